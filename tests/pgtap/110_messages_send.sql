\ir _begin.sql
\ir _queue.sql
select plan(54);

-- What it stores

select outcome as a_outcome, message_id as a
from baton.send('q', '{"n": 1}', kind => 'mail', headers => '{"h": 2}') \gset
select is(:'a_outcome'::text, 'sent', 'send: a message is sent');
select results_eq(
  format(
    'select
      queue_name, kind, payload, headers, dedupe_key, delivery, claimed_at, claimed_by, failures, lapses, last_error
    from baton.messages where message_id = %s', :a
  ),
  $$values (
    'q', 'mail', '{"n": 1}'::jsonb, '{"h": 2}'::jsonb, null::text, null::bigint, null::timestamptz, null::uuid, 0, 0,
    null::text
  )$$,
  'send: payload, headers and kind are stored, unclaimed and uncounted'
);
select results_eq(
  format('select visible_at, created_at from baton.messages where message_id = %s', :a),
  $$values ('2026-01-01 00:00:00+00'::timestamptz, '2026-01-01 00:00:00+00'::timestamptz)$$,
  'send: without a delay it is due at once'
);
select message_id as b from baton.send('q', '1', '90 seconds') \gset
select results_eq(
  format('select visible_at, created_at from baton.messages where message_id = %s', :b),
  $$values ('2026-01-01 00:01:30+00'::timestamptz, '2026-01-01 00:00:00+00'::timestamptz)$$,
  'send: a delay moves when it is due, not when it was created'
);
select message_id as keyed from baton.send('q', '1', '90 seconds', 'delayed') \gset
select results_eq(
  format('select visible_at, created_at from baton.messages where message_id = %s', :keyed),
  $$values ('2026-01-01 00:01:30+00'::timestamptz, '2026-01-01 00:00:00+00'::timestamptz)$$,
  'send: also under a key'
);
select message_id as b from baton.send('q', '1', delay => null) \gset
select is(baton_test.state(:b), '2026-01-01 00:00:00+00 free 0 0', 'send: a null delay is the default, none');
select message_id as b
from baton.send(
  headers => null, kind => null, dedupe_key => null, delay => '0', payload => 'null', queue_name => 'q'
) \gset
select results_eq(
  format('select kind, headers, dedupe_key, payload from baton.messages where message_id = %s', :b),
  $$values (null::text, null::jsonb, null::text, 'null'::jsonb)$$,
  'send: every argument can be named; null kind, headers and key are none, and a JSON null is a payload'
);
select message_id as b from baton.send('q', null) \gset
select is((select payload from baton.messages where message_id = :b), null, 'send: a payload may be null');
select is((select count(*) from baton.messages where dedupe_key is null), 5::bigint, 'send: without a key every send is a message');

-- Keys

select message_id as k from baton.send('q', '1', dedupe_key => 'k') \gset
select results_eq(
  $$select outcome, message_id from baton.send('q', '2', '1 hour', 'k', 'other', '{}')$$,
  format($$values ('duplicate', %s::bigint)$$, :k),
  'send: a key that a live message holds is a duplicate of that message'
);
select results_eq(
  $$select message_id, payload, kind, headers, visible_at from baton.messages where dedupe_key = 'k'$$,
  format($$values (%s::bigint, '1'::jsonb, null::text, null::jsonb, '2026-01-01 00:00:00+00'::timestamptz)$$, :k),
  'send: a duplicate changes nothing'
);
select is(
  (select outcome from baton.send('q2', '1', dedupe_key => 'k')), 'sent',
  'send: another queue has its own keys'
);
select is((select outcome from baton.send('q', '1', dedupe_key => 'K')), 'sent', 'send: keys differ by case');
select is((select outcome from baton.send('q', '1', dedupe_key => 'k ')), 'sent', 'send: keys differ by a space');

select outcome, message_id as h from baton.send('held', '1', '10 seconds', 'k') \gset
select is(
  (select message_id from baton.send('held', '2', dedupe_key => 'k')), :h::bigint,
  'key: held while the message is delayed'
);
select baton_test.advance('10 seconds') \gset
select delivery as d from baton.claim('held') \gset
select is((select message_id from baton.send('held', '2', dedupe_key => 'k')), :h::bigint, 'key: held in flight');
select baton_test.advance('30 seconds') \gset
select is(
  (select message_id from baton.send('held', '2', dedupe_key => 'k')), :h::bigint,
  'key: held after the claim ran out'
);
select delivery as d from baton.claim('held') \gset
select is(
  (select message_id from baton.send('held', '2', dedupe_key => 'k')), :h::bigint,
  'key: held by the next delivery'
);
select outcome from baton.park(:h, :d) \gset
select is(
  (select message_id from baton.send('held', '2', dedupe_key => 'k')), :h::bigint,
  'key: held when it is parked'
);
select delivery as d from baton.claim('held') \gset
select outcome from baton.fail(:h, :d, 'no', '0') \gset
select is((select message_id from baton.send('held', '2', dedupe_key => 'k')), :h::bigint, 'key: held after a failure');
select delivery as d from baton.claim('held') \gset
select outcome from baton.ack(:h, :d) \gset
select results_eq(
  $$select outcome, message_id <> (select max(message_id) from baton.messages where queue_name <> 'held')
  from baton.send('held', '2', dedupe_key => 'k')$$,
  $$values ('sent', true)$$,
  'key: free after the ack'
);
select message_id as h, delivery as d from baton.claim('held') \gset
select outcome from baton.fail(:h, :d, 'no', final => true) \gset
select is((select outcome from baton.send('held', '3', dedupe_key => 'k')), 'sent', 'key: free after death');
select message_id as h from baton.messages where queue_name = 'held' \gset
select outcome from baton.remove_messages(array[:h]) \gset
select is((select outcome from baton.send('held', '4', dedupe_key => 'k')), 'sent', 'key: free after removal');

-- Delays

select is(
  (select outcome from baton.send('q', '1', interval '10 years')), 'sent',
  'send: a delay of ten years is taken'
);
select throws_ok(
  $$select baton.send('q', '1', interval '10 years 0.000001 seconds')$$, '22023', null, 'send: a longer one is refused'
);
select throws_ok(
  $$select baton.send('q', '1', interval '100 years')$$, '22023', null, 'send: a century is refused'
);
select throws_ok(
  $$select baton.send('q', '1', interval '-0.000001 seconds')$$, '22023', null, 'send: a negative delay is refused'
);
select throws_ok(
  $$select baton.send('q', '1', interval '-10 years 3650 days')$$, '22023', null,
  'send: so is one that is negative only when it is added'
);
select throws_ok(
  $$select baton.send('q', '1', interval 'infinity')$$, baton_test.refuses_infinity(), null,
  'send: an infinite delay is refused'
);
select throws_ok(
  $$select baton.send('q', '1', interval '-infinity')$$, baton_test.refuses_infinity(), null,
  'send: a negative infinite delay is refused'
);

-- Names, kinds, keys

select is_empty(
  $$select n.name from baton_test.odd_names(200) as n
  where baton_test.sqlstate_of(format('select baton.send(%L, ''1'')', n.name)) <> '00000'$$,
  'send: a queue name may have 200 bytes and odd characters'
);
select is_empty(
  $$select n.name from baton_test.bad_names(200) as n
  where baton_test.sqlstate_of(format('select baton.send(%L, ''1'')', n.name)) <> '22023'$$,
  'send: an empty or longer queue name, or one with a control character, is refused'
);
select throws_ok($$select baton.send(null, '1')$$, '22023', null, 'send: a null queue name is refused');
select is_empty(
  $$select n.name from unnest(array['baton.', 'baton.deliveries', 'baton.x']) as n (name)
  where baton_test.sqlstate_of(format('select baton.send(%L, ''1'')', n.name)) <> '22023'$$,
  'send: the package''s own queues are refused'
);
select is_empty(
  $$select n.name from unnest(array['baton', 'Baton.x', 'x.baton.', 'baton-x']) as n (name)
  where baton_test.sqlstate_of(format('select baton.send(%L, ''1'')', n.name)) <> '00000'$$,
  'send: names that only look like those are taken'
);
select is_empty(
  $$select n.name from baton_test.odd_names(200) as n
  where baton_test.sqlstate_of(format('select baton.send(''q'', ''1'', kind => %L)', n.name)) <> '00000'$$,
  'send: a kind may have 200 bytes and odd characters'
);
select is_empty(
  $$select n.name from baton_test.bad_names(200) as n
  where baton_test.sqlstate_of(format('select baton.send(''q'', ''1'', kind => %L)', n.name)) <> '22023'$$,
  'send: an empty or longer kind, or one with a control character, is refused'
);
select throws_ok($$select baton.send('q', '1', kind => 'run')$$, '22023', null, 'send: kind run is refused');
select throws_ok($$select baton.send('q', '1', kind => 'task')$$, '22023', null, 'send: kind task is refused');
select is((select outcome from baton.send('q', '1', kind => 'Run')), 'sent', 'send: kind Run is somebody''s own');
select is_empty(
  $$select n.name from baton_test.odd_names(500) as n
  where baton_test.sqlstate_of(format('select baton.send(''q'', ''1'', dedupe_key => %L)', n.name)) <> '00000'$$,
  'send: a key may have 500 bytes and odd characters'
);
select is_empty(
  $$select n.name from baton_test.bad_names(500) as n
  where baton_test.sqlstate_of(format('select baton.send(''q'', ''1'', dedupe_key => %L)', n.name)) <> '22023'$$,
  'send: an empty or longer key, or one with a control character, is refused'
);

-- Payload and headers

select is_empty(
  $$select h.headers from unnest(array['[]', '"h"', '1', 'true', 'null']) as h (headers)
  where baton_test.sqlstate_of(format('select baton.send(''q'', ''1'', headers => %L)', h.headers)) <> '22023'$$,
  'send: headers that are not an object are refused'
);
select is((select outcome from baton.send('q', '1', headers => '{}')), 'sent', 'send: headers may be empty');
update baton.settings
set max_payload_bytes = pg_column_size(to_jsonb(repeat('x', 2000))) + pg_column_size('{"h": 1}'::jsonb);
select is(
  (select outcome from baton.send('q', to_jsonb(repeat('x', 2000)), headers => '{"h": 1}')), 'sent',
  'send: payload and headers of exactly the limit are taken'
);
select throws_ok(
  $$select baton.send('q', to_jsonb(repeat('x', 2001)), headers => '{"h": 1}')$$, '54000', null,
  'send: a byte more of payload is refused'
);
select throws_ok(
  $$select baton.send('q', to_jsonb(repeat('x', 2000)), headers => '{"h": 1, "i": 1}')$$, '54000', null,
  'send: headers count'
);
update baton.settings set max_payload_bytes = 1048576;
select is(
  (select outcome from baton.send('q', to_jsonb(repeat('x', 1048576 - 12)))), 'sent',
  'send: the default limit is a megabyte'
);
select throws_ok(
  $$select baton.send('q', to_jsonb(repeat('x', 1048576 - 11)))$$, '54000', null, 'send: and not more'
);
select throws_ok(
  $$select baton.send('q', '{"a": "\u0000"}')$$, '22P05', null, 'send: jsonb refuses a NUL before anything is written'
);
select throws_ok(
  $$select baton.send('q', '{"a": "\ud800"}')$$, '22P02', null, 'send: jsonb refuses a lone surrogate'
);
select is(
  (select outcome from baton.send('q', '"\ud83d\ude00 \u0001"')), 'sent',
  'send: after a refusal the caller goes on, and whole pairs and other control characters are payload'
);
select message_id as b from baton.send('odd', '"\ud83d\ude00 \u0001"') \gset
select is(
  (select payload #>> '{}' from baton.claim('odd')), e'\U0001F600 \x01',
  'send: a payload comes back as it was'
);

select is_empty(
  $$select 1 from baton.messages where payload = to_jsonb(repeat('x', 2001)) or kind in ('run', 'task')$$,
  'send: what was refused is not there'
);

select * from finish();
rollback;
