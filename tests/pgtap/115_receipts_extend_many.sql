\ir _begin.sql
\ir _queue.sql
select plan(10);

select * from baton_test.hold('a') \gset a
select * from baton_test.hold('b') \gset b
select * from baton_test.hold('c') \gset c
select * from baton_test.hold('d') \gset d
select baton_test.advance('30 seconds') \gset
select delivery as taker from baton.claim('d') \gset
select outcome from baton.extend(:cm, :cd, '1 hour') \gset
select outcome, message_id as n from baton.send('new', '1') \gset

create temporary table answers as
select a.outcome, a.message_id, a.visible_at, a.nth
from baton.extend_many(
  baton_test.receipts(:bm, :bd, :am, :ad, :cm, :cd, :dm, :dd, :n, 1, :bm, :bd, :dm, null, null, :dd), '1 minute'
) with ordinality as a (outcome, message_id, visible_at, nth);
select results_eq(
  $$select a.outcome, a.message_id, a.visible_at from answers as a order by a.nth$$,
  format(
    $$values
    ('extended', %1$s::bigint, timestamptz '2026-01-01 00:01:30+00'),
    ('extended', %2$s, '2026-01-01 00:01:30+00'),
    ('extended', %3$s, '2026-01-01 01:00:30+00'),
    ('lost', %4$s, null),
    ('lost', %5$s, null),
    ('extended', %1$s, '2026-01-01 00:01:30+00'),
    ('lost', %4$s, null),
    ('lost', null, null)$$,
    :bm, :am, :cm, :dm, :n
  ),
  'extend_many: a row a receipt, in their order, never shortening; twice is the same as once'
);
select results_eq(
  $$select baton_test.state(m.message_id) from baton.messages as m order by m.queue_name$$,
  array[
    '2026-01-01 00:01:30+00 claimed 0 0', '2026-01-01 00:01:30+00 claimed 0 0', '2026-01-01 01:00:30+00 claimed 0 0',
    '2026-01-01 00:01:00+00 claimed 0 1', '2026-01-01 00:00:30+00 free 0 0'
  ],
  'extend_many: the rows say so, and the lost are left alone'
);
select results_eq(
  $$select i.queue_name, i.message_id, i.detail from baton.incidents as i where i.kind = 'lost'$$,
  format(
    $$select 'd', %s::bigint, jsonb_build_object('verb', 'extend_many', 'delivery', %s)$$, :dm, :dd
  ),
  'extend_many: an incident for the one that another claim has, and for no other'
);
select baton_test.advance('1 minute') \gset
select results_eq(
  format('select outcome, visible_at from baton.extend_many(%L)', baton_test.receipts(:am, :ad)),
  $$values ('extended', timestamptz '2026-01-01 00:02:00+00')$$,
  'extend_many: by default for settings.visibility, also where the claim ran out'
);
select results_eq(
  format('select outcome, visible_at from baton.extend_many(%L, null)', baton_test.receipts(:bm, :bd)),
  $$values ('extended', timestamptz '2026-01-01 00:02:00+00')$$,
  'extend_many: null is the default'
);
select is((select outcome from baton.ack(:am, :ad)), 'acked', 'extend_many: receipts stay the same');
select is_empty($$select * from baton.extend_many('[]')$$, 'extend_many: of nothing comes nothing');
select is_empty(
  $$select r.receipts
  from unnest(
    array[
      null, 'null', '{}', '{"message_id": 1, "delivery": 1}', '1', '[1]', '[null]', '[["message_id", "delivery"]]',
      '[{}]', '[{"message_id": 1}]', '[{"delivery": 1}]', '[{"message_id": 1.5, "delivery": 1}]',
      '[{"message_id": "x", "delivery": 1}]', '[{"message_id": 1, "delivery": 99999999999999999999}]'
    ]
  ) as r (receipts)
  where baton_test.sqlstate_of(format('select baton.extend_many(%L)', r.receipts)) <> '22023'$$,
  'extend_many: what is not an array of receipts is refused'
);
select is_empty(
  $$select d.visibility from unnest(array['-1 microsecond', '10 years 1 microsecond', '100 years']) as d (visibility)
  where baton_test.sqlstate_of(format('select baton.extend_many(''[]'', %L)', d.visibility)) <> '22023'$$,
  'extend_many: a visibility below zero or above ten years is refused'
);
select throws_ok(
  $$select baton.extend_many('[]', interval 'infinity')$$, baton_test.refuses_infinity(), null,
  'extend_many: an infinite one is refused'
);

select * from finish();
rollback;
