\ir _begin.sql
\ir _starts.sql
select plan(50);

-- Accepted
select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('orders') as orders \gset
select baton_test.advance('59.999999 seconds') \g /dev/null
select results_eq(
  format('select a.outcome, a.reason from baton.accept_worker_invocation(''orders'', %L, %L, version => ''1.2'') as a',
    :'orders', baton_test.worker(1)),
  $$values ('accepted', null::text)$$, 'accept: a microsecond before the deadline'
);
select results_eq(
  $$select w.worker_id, w.function_name, w.version, w.handshake, w.control, w.started_at, w.last_heartbeat_at,
    w.stopping_at, w.stopped_at, w.deprecated_at from baton.workers as w$$,
  $$values (baton_test.worker(1), 'orders', '1.2', true, 'off', baton._now(), baton._now(), null::timestamptz,
    null::timestamptz, null::timestamptz)$$, 'accept: the worker is there'
);
select is(baton_test.standing('orders'), 'ready accept', 'accept: and the invocation is ready');
select is(
  (select f.invocation_worker_id from baton.worker_functions as f), baton_test.worker(1), 'accept: with that worker'
);
select is_empty('select m.message_id from baton.messages as m', 'accept: its delivery goes');
select is(baton_test.reserve('orders'), 'ready', 'accept: no other start is reserved');

-- Again
select baton_test.advance('1 second') \g /dev/null
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(1)), 'accepted',
  'accept: again, its answer having been lost, also after the deadline'
);
select results_eq(
  $$select w.version, w.started_at, w.last_heartbeat_at from baton.workers as w$$,
  $$values ('1.2', baton._now() - interval '1 second', baton._now() - interval '1 second')$$,
  'accept: which changes nothing, nor is it a heartbeat'
);
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(2)), 'rejected already_accepted', 'accept: another worker comes too late'
);
select is((select count(*)::integer from baton.workers), 1, 'accept: and is not there');
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(1)), 'accepted', 'accept: the first one is still the accepted one'
);
select baton.stop_worker(baton_test.worker(1), draining => true) \g /dev/null
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(1)), 'rejected worker_gone', 'accept: again, when it is stopping by now'
);
select baton.stop_worker(baton_test.worker(1)) \g /dev/null
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(1)), 'rejected worker_gone', 'accept: again, when it has stopped'
);
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(2)), 'rejected already_accepted',
  'accept: another worker, when the first has stopped'
);
select baton.register_worker_function('mail', url => 'http://w.test') \g /dev/null
select baton_test.start('mail', baton_test.worker(3)) as mail \gset
select baton.deprecate_workers('mail') \g /dev/null
select is(
  baton_test.accept('mail', :'mail', baton_test.worker(3)), 'rejected worker_gone', 'accept: again, when it is deprecated by now'
);
select baton_test.start('orders', baton_test.worker(4)) as silent \gset
select baton_test.advance('1 hour') \g /dev/null
select baton._stop_silent_workers(baton._now()) \g /dev/null
select is(
  baton_test.accept('orders', :'silent', baton_test.worker(4)), 'rejected worker_gone',
  'accept: again, when it was given up as silent'
);
delete from baton.workers where worker_id = baton_test.worker(4);
select is(
  baton_test.accept('orders', :'silent', baton_test.worker(4)), 'rejected worker_gone', 'accept: again, when its row is gone'
);

-- Too late
select baton_test.must_reserve('orders') as orders2 \gset
select is(
  baton_test.accept('orders', :'orders', baton_test.worker(5)), 'rejected superseded', 'accept: the id before the current one'
);
select is(
  baton_test.accept('orders', gen_random_uuid(), baton_test.worker(5)), 'rejected superseded', 'accept: an unknown id'
);
select is(baton_test.accept('orders', null, baton_test.worker(5)), 'rejected superseded', 'accept: no id');
select is(
  baton_test.accept('mail', :'orders2', baton_test.worker(5)), 'rejected superseded', 'accept: an id of another function'
);
select baton.register_worker_function('fresh') \g /dev/null
select is(
  baton_test.accept('fresh', null, baton_test.worker(5)), 'rejected superseded', 'accept: no id, before the first invocation'
);
select is(baton_test.standing('orders'), 'pending', 'accept: none of this harms the pending start');
select baton_test.advance('60 seconds') \g /dev/null
select is(
  baton_test.accept('orders', :'orders2', baton_test.worker(5)), 'rejected expired', 'accept: at the deadline'
);
select is(baton_test.failed_starts('orders'), 1, 'accept: which books the failed start');
select baton_test.advance('1 microsecond') \g /dev/null
select is(
  baton_test.accept('orders', :'orders2', baton_test.worker(5)), 'rejected expired', 'accept: and after it'
);
select is(baton_test.failed_starts('orders'), 1, 'accept: once');
select is_empty(
  format('select w.worker_id from baton.workers as w where w.worker_id = %L', baton_test.worker(5)),
  'accept: who is rejected is not there'
);

-- Failed for another reason
select baton_test.must_reserve('orders') as orders3 \gset
select baton.dismiss_worker_invocation('orders', :'orders3', 'x') \g /dev/null
select is(baton_test.accept('orders', :'orders3', baton_test.worker(5)), 'rejected dismissed', 'accept: a dismissed start');
select baton.enable_worker_function('orders') \g /dev/null
select baton_test.must_reserve('orders') as orders4 \gset
select baton.disable_worker_function('orders') \g /dev/null
select is(
  baton_test.accept('orders', :'orders4', baton_test.worker(5)), 'rejected disabled', 'accept: a start that was pending at disable'
);
select baton.enable_worker_function('orders') \g /dev/null
select baton_test.must_reserve('orders') as orders5 \gset
select baton.deprecate_workers('orders') \g /dev/null
select is(
  baton_test.accept('orders', :'orders5', baton_test.worker(5)), 'rejected deprecated',
  'accept: a start that was pending at deprecate'
);
select baton.register_worker_function('nowhere') \g /dev/null
select e.invocation_id as nowhere from baton.ensure_workers() as e where e.function_name = 'nowhere' \gset
select is(
  baton_test.accept('nowhere', :'nowhere', baton_test.worker(5)), 'rejected error',
  'accept: a start whose request could not be made'
);
select baton.enable_worker_function('orders') \g /dev/null
select baton_test.must_reserve('orders') as orders6 \gset
update baton.worker_functions set enabled = false where function_name = 'orders';
select is(
  baton_test.accept('orders', :'orders6', baton_test.worker(5)), 'rejected disabled',
  'accept: a pending start of a function that is not enabled'
);
update baton.worker_functions set enabled = true where function_name = 'orders';

-- The worker's id
select is(
  baton_test.accept('orders', :'orders6', baton_test.worker(1)), 'rejected worker_gone', 'accept: an id that has stopped'
);
select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select baton.register_worker(baton_test.worker(n.number), 'batch') from generate_series(6, 8) as n (number) \g /dev/null
select is(
  baton_test.accept('orders', :'orders6', baton_test.worker(6)), 'rejected worker_gone', 'accept: an id of another function'
);
select is(
  (select w.function_name from baton.workers as w where w.worker_id = baton_test.worker(6)), 'batch', 'accept: which stays there'
);
select is(baton_test.standing('orders'), 'pending', 'accept: the start stays pending');
select is(baton_test.accept('orders', :'orders6', baton_test.worker(5)), 'accepted', 'accept: so that another id can take it');
select is(
  baton_test.raised(format('select baton.accept_worker_invocation(''orders'', %L, null)', :'orders6')), '22023 missing_argument',
  'accept: no id of a worker'
);
select is_empty(
  $$select n.name from baton_test.odd_versions() as n (name, is_good)
  where baton_test.raised(
    format('select baton.accept_worker_invocation(''orders'', gen_random_uuid(), gen_random_uuid(), %L)', n.name)
  ) <> case when n.is_good then 'nothing' else '22023 invalid_name' end$$,
  'accept: a version has 1 to 200 bytes and no control character'
);
select is(
  baton_test.raised('select baton.accept_worker_invocation(''nobody'', gen_random_uuid(), gen_random_uuid())'),
  '42704 unknown_function', 'accept: an unknown function'
);

-- An id that is known and goes on
select baton_test.advance('1 hour') \g /dev/null
select baton_test.must_reserve('orders') as orders7 \gset
select is(baton_test.accept('orders', :'orders7', baton_test.worker(5)), 'accepted', 'accept: a known worker that goes on');
select results_eq(
  format('select w.started_at, w.last_heartbeat_at from baton.workers as w where w.worker_id = %L', baton_test.worker(5)),
  $$values (baton._now(), baton._now())$$, 'accept: keeps its row, and has started now'
);
select is(baton_test.reserve('orders'), 'ready', 'accept: and is healthy');
select is(
  baton_test.reconcile('orders', :'orders7'), 'ready ' || baton_test.worker(5), 'accept: the invocation is its own'
);
select baton_test.advance('1 hour') \g /dev/null
select baton.register_worker_function('old') \g /dev/null
select baton.register_worker(baton_test.worker(9), 'old') \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select baton_test.must_reserve('old') as old \gset
select is(baton_test.accept('old', :'old', baton_test.worker(9)), 'accepted', 'accept: a worker that once came without the handshake');
select ok(
  (select w.handshake from baton.workers as w where w.worker_id = baton_test.worker(9)),
  'accept: has the handshake from then on'
);

-- A start that reconcile completed
select baton_test.advance('1 minute') \g /dev/null
select baton_test.must_reserve('old') as old2 \gset
select baton_test.reconcile('old', :'old2', baton_test.worker(9)) \g /dev/null
select is(baton_test.accept('old', :'old2', baton_test.worker(9)), 'accepted', 'accept: by the worker that it was completed with');
select is(baton_test.accept('old', :'old2', baton_test.worker(2)), 'rejected already_accepted', 'accept: by any other');
select is(
  (select count(*)::integer from baton.workers as w where w.function_name = 'old'), 1, 'accept: there is one worker'
);

select * from finish();
rollback;
