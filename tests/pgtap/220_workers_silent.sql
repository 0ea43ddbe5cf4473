\ir _begin.sql
\ir _starts.sql
select plan(14);

create function baton_test.stopped_by_tick()
returns integer
language sql
volatile
begin atomic
  select coalesce(sum(t.changed), 0)::integer from baton.tick() as t where t.part = 'silent_workers';
end;

select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select baton.register_worker(baton_test.worker(n.number), 'batch') from generate_series(1, 4) as n (number) \g /dev/null
select baton_test.advance('10 seconds') \g /dev/null
select baton.heartbeat(baton_test.worker(2)) \g /dev/null
select baton.stop_worker(baton_test.worker(3), draining => true) \g /dev/null
select baton.stop_worker(baton_test.worker(4)) \g /dev/null
select w.stopped_at as stopped_before from baton.workers as w where w.worker_id = baton_test.worker(4) \gset

select baton_test.advance('59 minutes 49.999999 seconds') \g /dev/null
select is(baton_test.stopped_by_tick(), 0, 'silent workers: before silent_worker_timeout nobody is stopped');
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(3)) as h), 'stopping', 'silent workers: a draining one is heard'
);
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.stopped_by_tick(), 1, 'silent workers: at that instant the silent one is stopped');
select results_eq(
  format('select w.stopping_at, w.stopped_at from baton.workers as w where w.worker_id = %L', baton_test.worker(1)),
  $$values (null::timestamptz, baton._now())$$, 'silent workers: it did not stop in order, and that can be seen'
);
select results_eq(
  $$select i.kind, i.function_name, i.worker_id, i.detail
    from baton.incident_log as i where i.kind = 'worker_silent'$$,
  $$values ('worker_silent', 'batch', baton_test.worker(1),
    jsonb_build_object('last_heartbeat_at', timestamptz '2026-01-01 00:00:00+00'))$$,
  'silent workers: an incident tells'
);
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(1)) as h), 'stopped', 'silent workers: its late heartbeat revives nothing'
);
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(2)) as h), 'active', 'silent workers: one that was heard goes on'
);
select is(
  (select w.stopped_at from baton.workers as w where w.worker_id = baton_test.worker(4)), :'stopped_before',
  'silent workers: one that was stopped already keeps its time'
);
select is(baton_test.stopped_by_tick(), 0, 'silent workers: each is stopped once');
select baton_test.advance('2 hours') \g /dev/null
select is(baton_test.stopped_by_tick(), 2, 'silent workers: draining ones too, when they fall silent');

-- The setting
select baton.register_worker(baton_test.worker(5), 'batch') \g /dev/null
update baton.settings set silent_worker_timeout = '1 second';
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.stopped_by_tick(), 1, 'silent workers: silent_worker_timeout is a setting');

-- Bounded
insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
select baton_test.worker(1000 + n.number), 'batch', false, baton._now(), baton._now() from generate_series(1, 1001) as n (number);
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.stopped_by_tick(), 1000, 'silent workers: at most 1,000 a tick');
select is(baton_test.stopped_by_tick(), 1, 'silent workers: the rest at the next');
select is(
  (select u.outcome from baton.unregister_worker_function('batch') as u), 'removed',
  'silent workers: then nothing holds the function'
);

select * from finish();
rollback;
