\ir _begin.sql
\ir _starts.sql
select plan(21);

create function baton_test.stop(worker_id uuid, draining boolean default false)
returns text
language sql
volatile
begin atomic
  select s.outcome from baton.stop_worker(stop.worker_id, stop.draining) as s;
end;

select baton.register_worker_function('orders') \g /dev/null
select baton_test.start('orders', baton_test.worker(1)) \g /dev/null

select is(baton_test.stop(baton_test.worker(2)), 'unknown', 'stop_worker: an unknown worker');
select is(baton_test.stop(null), 'unknown', 'stop_worker: null');
select is(baton_test.state('orders'), 'ready', 'stop_worker: that stops nobody');

-- Draining
select baton_test.advance('6 seconds') \g /dev/null
select is(baton_test.stop(baton_test.worker(1), true), 'stopping', 'stop_worker: draining');
select results_eq(
  $$select w.stopping_at, w.stopped_at from baton.workers as w$$,
  $$values (baton._now(), null::timestamptz)$$, 'stop_worker: draining marks it as stopping'
);
select is(baton_test.state('orders'), 'retryable', 'stop_worker: a replacement of a draining worker may start at once');
select baton.send('orders', '{}') \g /dev/null
select is_empty(
  format('select c.message_id from baton.claim(%L, %L) as c', 'orders', baton_test.worker(1)),
  'stop_worker: a draining worker claims nothing more'
);
select isnt_empty('select c.message_id from baton.claim(''orders'') as c', 'stop_worker: though there is a message');
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.stop(baton_test.worker(1), true), 'stopping', 'stop_worker: draining again');
select is(
  (select w.stopping_at from baton.workers as w), baton._now() - interval '1 second', 'stop_worker: the first time stays'
);

-- Stopped
select is(baton_test.stop(baton_test.worker(1)), 'stopped', 'stop_worker: a draining worker has stopped');
select results_eq(
  $$select w.stopping_at, w.stopped_at from baton.workers as w$$,
  $$values (baton._now() - interval '1 second', baton._now())$$, 'stop_worker: both times are kept'
);
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.stop(baton_test.worker(1)), 'stopped', 'stop_worker: again');
select is(baton_test.stop(baton_test.worker(1), true), 'stopped', 'stop_worker: draining comes too late then');
select is(
  (select w.stopped_at from baton.workers as w), baton._now() - interval '1 second', 'stop_worker: the first time stays'
);

-- At once
select baton_test.start('orders', baton_test.worker(3)) \g /dev/null
select is(baton_test.stop(baton_test.worker(3)), 'stopped', 'stop_worker: at once');
select results_eq(
  format('select w.stopping_at, w.stopped_at from baton.workers as w where w.worker_id = %L', baton_test.worker(3)),
  $$values (baton._now(), baton._now())$$, 'stop_worker: an orderly stop sets both times'
);
select is(baton_test.reserve('orders'), 'throttled 00:00:06', 'stop_worker: a replacement may start when the throttle is over');
select is(
  (select outcome from baton.stop_worker(baton_test.worker(3), draining => null)), 'stopped', 'stop_worker: null is not draining'
);
select baton_test.advance('6 seconds') \g /dev/null
select baton_test.start('orders', baton_test.worker(4)) \g /dev/null
select baton.deprecate_workers('orders') \g /dev/null
select is(baton_test.stop(baton_test.worker(4)), 'stopped', 'stop_worker: a deprecated worker');
select is(baton_test.incidents('worker_silent'), 0::bigint, 'stop_worker: an orderly stop is no incident');

select * from finish();
rollback;
