\ir _begin.sql
\ir _queue.sql
select plan(17);

select is_empty($$select * from baton.queue_stats$$, 'queue_stats: without messages there are no queues');
select is_empty($$select * from baton.dead_letters$$, 'dead_letters: nor dead ones');

select outcome from baton.send('q', '1') \gset
select outcome from baton.send('q', '2', '10 seconds') \gset
select outcome from baton.send('q', '3', '1 hour') \gset
select * from baton_test.hold('held') \gset h
select * from baton_test.hold('dead', 'k') \gset d
select outcome from baton.fail(:dm, :dd, 'broken', final => true) \gset
select * from baton_test.hold('gone') \gset g
select outcome from baton.ack(:gm, :gd) \gset

select results_eq(
  $$select s.queue_name, s.ready, s.delayed, s.in_flight, s.dead, s.oldest_ready_age from baton.queue_stats as s
  order by s.queue_name$$,
  $$values
  ('dead', 0::bigint, 0::bigint, 0::bigint, 1::bigint, null::interval),
  ('held', 0, 0, 1, 0, null),
  ('q', 1, 2, 0, 0, interval '0')$$,
  'queue_stats: a row a queue that has messages, living or dead; due, delayed, held and dead ones counted'
);
select baton_test.advance('9.999999 seconds') \gset
select results_eq(
  $$select s.ready, s.delayed, s.oldest_ready_age from baton.queue_stats as s where s.queue_name = 'q'$$,
  $$values (1::bigint, 2::bigint, interval '9.999999 seconds')$$,
  'queue_stats: a microsecond before it is due a message is delayed; the oldest gives the age'
);
select baton_test.advance('1 microsecond') \gset
select results_eq(
  $$select s.ready, s.delayed, s.oldest_ready_age from baton.queue_stats as s where s.queue_name = 'q'$$,
  $$values (2::bigint, 1::bigint, interval '10 seconds')$$,
  'queue_stats: at that moment it is ready'
);
select baton_test.advance('19.999999 seconds') \gset
select results_eq(
  $$select s.ready, s.in_flight from baton.queue_stats as s where s.queue_name = 'held'$$,
  $$values (0::bigint, 1::bigint)$$,
  'queue_stats: a microsecond before its deadline a claim is in flight'
);
select baton_test.advance('1 microsecond') \gset
select results_eq(
  $$select s.ready, s.in_flight, s.oldest_ready_age from baton.queue_stats as s where s.queue_name = 'held'$$,
  $$values (1::bigint, 0::bigint, interval '0')$$,
  'queue_stats: at its deadline the message is ready'
);
select outcome from baton.fail(:hm, :hd, 'no', '1 minute') \gset
select results_eq(
  $$select s.ready, s.delayed, s.in_flight from baton.queue_stats as s where s.queue_name = 'held'$$,
  $$values (0::bigint, 1::bigint, 0::bigint)$$,
  'queue_stats: one that backs off is delayed'
);

select results_eq(
  $$select
    d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.reason, d.last_error, d.failures,
    d.lapses, d.claimed_at, d.claimed_by, d.created_at, d.died_at
  from baton.dead_letters as d$$,
  format(
    $$values (
      %s::bigint, 'dead', 'mail', '"held"'::jsonb, '{"h": 1}'::jsonb, 'k', 'final', 'broken', 1, 0,
      timestamptz '2026-01-01 00:00:00+00', null::uuid, timestamptz '2026-01-01 00:00:00+00',
      timestamptz '2026-01-01 00:00:00+00'
    )$$, :dm
  ),
  'dead_letters: a row a dead message, with its history'
);
select count(*) from baton.redrive(array[:dm]) \gset
select is_empty($$select * from baton.dead_letters$$, 'dead_letters: one that was redriven is gone');
select results_eq(
  $$select s.ready, s.dead from baton.queue_stats as s where s.queue_name = 'dead'$$,
  $$values (1::bigint, 0::bigint)$$,
  'queue_stats: and is ready'
);

-- Observers

create role baton_test_observer;
select outcome from baton.grant_usage('baton_test_observer', 'observer') \gset
grant usage on schema tap to baton_test_observer;
set local role baton_test_observer;
select is((select count(*) from baton.queue_stats), 3::bigint, 'queue_stats: an observer may read it');
select is_empty($$select * from baton.dead_letters$$, 'dead_letters: and this one');
select throws_ok($$select * from baton.messages$$, '42501', null, 'queue_stats: though not the tables below');
reset role;

-- Live messages, one by one

select outcome, message_id as due from baton.send('each', '"secret"', dedupe_key => 'k') \gset
select outcome, message_id as later from baton.send('each', '1', '1 second') \gset
select * from baton_test.hold('flight') \gset f
select results_eq(
  $$select o.message_id, o.state, o.dedupe_key, o.visible_at - o.created_at from baton.message_overview as o
  where o.queue_name in ('each', 'flight') order by o.message_id$$,
  format(
    $$values (%s::bigint, 'ready', 'k', interval '0'), (%s, 'delayed', null, interval '1 second'),
    (%s, 'in_flight', null, interval '30 seconds')$$, :due, :later, :fm
  ),
  'message_overview: a row a live message: due, later, claimed'
);
select baton.start_run('w', null, 'run', 'runs'), baton.start_run('w', null, 'later', 'runs', '1 hour') \g /dev/null
select results_eq(
  $$select o.run_id, o.dedupe_key from baton.message_overview as o where o.queue_name = 'runs' order by o.message_id$$,
  $$values ('run', e'run\x1fwake'), ('later', e'later\x1ftimer')$$, 'message_overview: a wake is shown as one'
);
select baton_test.advance('30 seconds') \g /dev/null
select results_eq(
  $$select o.message_id, o.state from baton.message_overview as o where o.queue_name in ('each', 'flight')
  order by o.message_id$$,
  format($$values (%s::bigint, 'ready'), (%s, 'ready'), (%s, 'lapsed')$$, :due, :later, :fm),
  'message_overview: a claim that ran out has lapsed at its deadline'
);

select * from finish();
rollback;
