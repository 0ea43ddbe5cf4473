\ir _begin.sql
\ir _starts.sql
select plan(22);

create function baton_test.beat(worker_id uuid, control text default null)
returns text
language sql
volatile
begin atomic
  select h.outcome from baton.heartbeat(beat.worker_id, beat.control) as h;
end;

select baton.register_worker_function('orders') \g /dev/null
select baton_test.start('orders', baton_test.worker(1)) \g /dev/null

select is(baton_test.beat(baton_test.worker(2)), 'unknown', 'heartbeat: an unknown worker');
select is(baton_test.beat(null), 'unknown', 'heartbeat: null');

-- What it is for
select baton_test.advance('14.999999 seconds') \g /dev/null
select is(baton_test.state('orders'), 'ready', 'heartbeat: a worker is healthy until its heartbeat_timeout');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.state('orders'), 'retryable', 'heartbeat: and at that instant no longer');
select is(baton_test.beat(baton_test.worker(1)), 'active', 'heartbeat: a silent worker that comes back goes on');
select is(baton_test.state('orders'), 'ready', 'heartbeat: and is healthy again');
select is(
  (select w.last_heartbeat_at from baton.workers as w), baton._now(), 'heartbeat: the time is the clock''s'
);
select baton_test.advance('14.999999 seconds') \g /dev/null
select is(baton_test.reserve('orders'), 'ready', 'heartbeat: the timeout counts from the last one');

-- control
select is((select w.control from baton.workers as w), 'off', 'heartbeat: control is off at first');
select baton_test.beat(baton_test.worker(1), 'polling') \g /dev/null
select is((select w.control from baton.workers as w), 'polling', 'heartbeat: what is given is stored');
select baton_test.beat(baton_test.worker(1)) \g /dev/null
select is((select w.control from baton.workers as w), 'polling', 'heartbeat: null keeps it');
select baton_test.beat(baton_test.worker(1), 'listening') \g /dev/null
select is((select w.control from baton.workers as w), 'listening', 'heartbeat: listening');
select is(
  baton_test.raised(format('select baton.heartbeat(%L, %L)', baton_test.worker(1), 'maybe')), '22023 invalid_choice',
  'heartbeat: any other word is refused'
);

-- What it tells, and what it doesn't revive
select baton_test.advance('1 second') \g /dev/null
select baton.deprecate_workers('orders') \g /dev/null
select is(baton_test.beat(baton_test.worker(1)), 'deprecated', 'heartbeat: tells a deprecated worker');
select is(
  (select w.last_heartbeat_at from baton.workers as w), baton._now(),
  'heartbeat: which is still heard, so that it is not given up while it finishes'
);
select isnt(
  (select w.deprecated_at from baton.workers as w), null, 'heartbeat: and stays deprecated'
);
select baton.stop_worker(baton_test.worker(1), draining => true) \g /dev/null
select is(baton_test.beat(baton_test.worker(1)), 'stopping', 'heartbeat: tells a draining worker, deprecated or not');
select isnt((select w.stopping_at from baton.workers as w), null, 'heartbeat: which goes on stopping');
select baton.stop_worker(baton_test.worker(1)) \g /dev/null
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.beat(baton_test.worker(1), 'off'), 'stopped', 'heartbeat: tells a stopped worker');
select results_eq(
  $$select w.last_heartbeat_at, w.stopped_at, w.control from baton.workers as w$$,
  $$values (baton._now() - interval '1 second', baton._now() - interval '1 second', 'listening')$$,
  'heartbeat: and changes nothing of it'
);
select baton.enable_worker_function('orders') \g /dev/null
select is(baton_test.state('orders'), 'retryable', 'heartbeat: none of this keeps a replacement from starting');
select is(
  (select concat_ws(' ', f.last_invoked_at, f.invocation_status) from baton.worker_functions as f),
  'ready', 'heartbeat: the function''s row is not touched'
);

select * from finish();
rollback;
