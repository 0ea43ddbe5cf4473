\ir _begin.sql
\ir _queue.sql
select plan(20);

-- In order, and as send does it

select outcome, message_id as live from baton.send('q', '"live"', dedupe_key => 'm') \gset
create temporary table answers as
select a.outcome, a.message_id, a.nth
from baton.send_many(
  'q',
  '[
    {"payload": 1, "dedupe_key": "z"},
    {"payload": 2},
    {"payload": 3, "dedupe_key": "m"},
    {"payload": 4, "dedupe_key": "a", "delay": "90 seconds", "kind": "mail", "headers": {"h": 1}},
    {"payload": 5, "delay": 1.5, "kind": "mail", "headers": {"h": 2}},
    {"payload": 6, "dedupe_key": "z"},
    {"payload": 7}
  ]'
) with ordinality as a (outcome, message_id, nth);
select results_eq(
  $$select a.outcome from answers as a order by a.nth$$,
  array['sent', 'sent', 'duplicate', 'sent', 'sent', 'duplicate', 'sent'],
  'send_many: a row a message, in their order, with and without keys'
);
select results_eq(
  $$select m.payload from answers as a inner join baton.messages as m on m.message_id = a.message_id order by a.nth$$,
  array['1', '2', '"live"', '4', '5', '1', '7']::jsonb[],
  'send_many: each row has the id of its message, a duplicate that of the one that holds the key'
);
select results_eq(
  $$select
    m.payload, m.dedupe_key, m.kind, m.headers, m.visible_at - m.created_at, m.created_at, m.delivery, m.claimed_at,
    m.failures, m.lapses
  from baton.messages as m
  order by m.payload #>> '{}'$$,
  $$select
    v.payload::jsonb, v.dedupe_key, v.kind, v.headers::jsonb, v.delay::interval, timestamptz '2026-01-01 00:00:00+00',
    null::bigint, null::timestamptz, 0, 0
  from (
    values
    ('1', 'z', null, null, '0'),
    ('2', null, null, null, '0'),
    ('4', 'a', 'mail', '{"h": 1}', '90 seconds'),
    ('5', null, 'mail', '{"h": 2}', '1.5 seconds'),
    ('7', null, null, null, '0'),
    ('"live"', 'm', null, null, '0')
  ) as v (payload, dedupe_key, kind, headers, delay)$$,
  'send_many: delay, kind, headers and key are stored as by send; a number as delay is seconds'
);
select is_empty($$select * from baton.send_many('q', '[]')$$, 'send_many: of nothing comes nothing');
select results_eq(
  $$select count(*), count(distinct a.message_id) from baton.send_many(
    'many', (select jsonb_agg(jsonb_build_object('payload', i)) from generate_series(1, 1000) as i)
  ) as a$$,
  $$values (1000::bigint, 1000::bigint)$$,
  'send_many: a thousand at once'
);
select results_eq(
  $$select c.payload from baton.claim('many', max_messages => 3) as c$$, array['1', '2', '3']::jsonb[],
  'send_many: they are due in their order'
);

-- Nulls

select message_id as b
from baton.send_many('q', '[{"payload": null, "delay": null, "dedupe_key": null, "kind": null, "headers": null}]') \gset
select results_eq(
  format(
    'select m.payload, m.visible_at, m.dedupe_key, m.kind, m.headers
    from baton.messages as m where m.message_id = %s', :b
  ),
  $$values ('null'::jsonb, timestamptz '2026-01-01 00:00:00+00', null::text, null::text, null::jsonb)$$,
  'send_many: null is the default of all but the payload'
);
select message_id as b from baton.send_many('q', '[{}]') \gset
select results_eq(
  format('select m.payload, m.headers from baton.messages as m where m.message_id = %s', :b),
  $$values (null::jsonb, null::jsonb)$$,
  'send_many: an object without a payload is a message without one'
);

-- What is refused, and with it the whole call

select count(*) as before from baton.messages \gset
select throws_ok($$select baton.send_many('q', null)$$, '22023', null, 'send_many: null is refused');
select throws_ok($$select baton.send_many('q', '{"payload": 1}')$$, '22023', null, 'send_many: one object is refused');
select throws_ok($$select baton.send_many('q', 'null')$$, '22023', null, 'send_many: a JSON null is refused');
select is_empty(
  $$select i.item
  from unnest(
    array[
      '1', '"x"', 'null', '[]', '{"payloads": 1}', '{"payload": 1, "queue_name": "x"}',
      '{"delay": "-1 microsecond"}', '{"delay": -1}', '{"delay": "10 years 1 microsecond"}', '{"delay": "100 years"}',
      '{"delay": "infinity"}', '{"delay": "soon"}', '{"delay": true}', '{"delay": {}}', '{"delay": 1e30}',
      '{"delay": ""}', '{"dedupe_key": ""}', '{"dedupe_key": "a\u0001"}', '{"dedupe_key": "a\u0085"}',
      '{"kind": ""}', '{"kind": "a\n"}', '{"kind": "run"}', '{"kind": "task"}',
      '{"headers": []}', '{"headers": "h"}', '{"headers": 1}', '{"headers": true}'
    ]
  ) as i (item)
  where baton_test.sqlstate_of(format('select baton.send_many(''q'', ''[{"payload": 1}, %s]'')', i.item)) <> '22023'$$,
  'send_many: what is not an object, has an unknown key, or breaks a rule of send is refused'
);
select is_empty(
  $$select n.name from baton_test.bad_names(500) as n
  where baton_test.sqlstate_of(
    format('select baton.send_many(''q'', %L)', jsonb_build_array(jsonb_build_object('dedupe_key', n.name)))
  ) <> '22023'$$,
  'send_many: keys obey the rules of send'
);
select is_empty(
  $$select n.name from baton_test.bad_names(200) as n
  where baton_test.sqlstate_of(
    format('select baton.send_many(''q'', %L)', jsonb_build_array(jsonb_build_object('kind', n.name)))
  ) <> '22023'$$,
  'send_many: kinds obey the rules of send'
);
select is_empty(
  $$select n.name
  from (
    select b.name from baton_test.bad_names(200) as b
    union all
    select r.name from unnest(array['baton.', 'baton.deliveries', null]) as r (name)
  ) as n
  where baton_test.sqlstate_of(format('select baton.send_many(%L, ''[]'')', n.name)) <> '22023'$$,
  'send_many: queue names obey the rules of send, also when there is nothing to send'
);
select throws_ok(
  $$select baton.send_many('q', '[{"payload": "\u0000"}]')$$, '22P05', null,
  'send_many: jsonb refuses a NUL before anything is written'
);
select is((select count(*) from baton.messages), :before::bigint, 'send_many: one bad message, and none is sent');

-- Sizes

update baton.settings
set max_payload_bytes = pg_column_size(to_jsonb(repeat('x', 2000))) + pg_column_size('{"h": 1}'::jsonb);
select results_eq(
  $$select a.outcome from baton.send_many(
    'q',
    jsonb_build_array(
      jsonb_build_object('payload', repeat('x', 2000), 'headers', '{"h": 1}'::jsonb),
      jsonb_build_object('payload', repeat('x', 2000), 'headers', '{"h": 1}'::jsonb)
    )
  ) as a$$,
  array['sent', 'sent'],
  'send_many: each message may be of exactly the limit'
);
select throws_ok(
  $$select baton.send_many(
    'q', jsonb_build_array('{"payload": 1}'::jsonb, jsonb_build_object('payload', repeat('x', 3000)))
  )$$,
  '54000', null, 'send_many: one over the limit is refused'
);
select throws_ok(
  $$select baton.send_many(
    'q', jsonb_build_array(jsonb_build_object('payload', repeat('x', 2000), 'headers', '{"h": 1, "i": 1}'::jsonb))
  )$$,
  '54000', null, 'send_many: headers count'
);

select * from finish();
rollback;
