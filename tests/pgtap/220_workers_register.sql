\ir _begin.sql
\ir _starts.sql
select plan(36);

select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null

-- process functions
select is(
  (select concat_ws(' ', r.outcome, r.reason) from baton.register_worker(baton_test.worker(1), 'batch', '1.2') as r),
  'registered', 'register_worker: a process function''s worker'
);
select results_eq(
  $$select w.function_name, w.version, w.handshake, w.control, w.started_at, w.last_heartbeat_at, w.stopping_at,
    w.stopped_at, w.deprecated_at from baton.workers as w$$,
  $$values ('batch', '1.2', false, 'off', baton._now(), baton._now(), null::timestamptz, null::timestamptz,
    null::timestamptz)$$,
  'register_worker: the row, without the handshake'
);
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.register(baton_test.worker(1), 'batch'), 'registered', 'register_worker: again, the same');
select results_eq(
  $$select w.version, w.started_at, w.last_heartbeat_at from baton.workers as w$$,
  $$values ('1.2', baton._now() - interval '1 second', baton._now())$$,
  'register_worker: which keeps the row, and is a heartbeat'
);

-- an http function: old runtimes
select is(baton_test.register(baton_test.worker(2), 'orders'), 'registered', 'register_worker: http, nothing pending');
select is(baton_test.standing('orders'), '', 'register_worker: no invocation is made up');
select is(baton_test.reserve('orders'), 'ready', 'register_worker: the worker counts');
select baton.stop_worker(baton_test.worker(2)) \g /dev/null

select baton.ensure_workers() \g /dev/null
select baton_test.invocation('orders') as invocation \gset
select baton_test.advance('59.999999 seconds') \g /dev/null
select is(baton_test.register(baton_test.worker(3), 'orders'), 'registered', 'register_worker: http, a start is pending');
select is(
  baton_test.standing('orders'), 'ready register_worker',
  'register_worker: completes it, even a microsecond before its deadline'
);
select is(
  baton_test.reconcile('orders', :'invocation'), 'ready ' || baton_test.worker(3), 'register_worker: with this worker'
);
select is_empty(
  $$select m.message_id from baton.messages as m where m.payload ->> 'function_name' = 'orders'$$,
  'register_worker: and its delivery goes'
);
select is(
  baton_test.accept('orders', :'invocation', baton_test.worker(4)), 'rejected already_accepted',
  'register_worker: nobody else can accept that start'
);
select baton.stop_worker(baton_test.worker(3)) \g /dev/null
select baton_test.must_reserve('orders') as invocation \gset
select baton_test.advance('60 seconds') \g /dev/null
select is(
  baton_test.register(baton_test.worker(5), 'orders'), 'registered', 'register_worker: http, a start past its deadline'
);
select is(baton_test.standing('orders'), 'failed expired', 'register_worker: is not completed, it has expired');
select is(baton_test.failed_starts('orders'), 1, 'register_worker: as one failed start');
select baton.stop_worker(baton_test.worker(5)) \g /dev/null

-- a process function has nothing to complete
select baton.register_worker_function('mail', url => 'http://w.test') \g /dev/null
select baton_test.must_reserve('mail') as invocation \gset
select baton.register_worker_function('mail', start_mode => 'process') \g /dev/null
select is(
  baton_test.register(baton_test.worker(6), 'mail'), 'registered', 'register_worker: of a function that became a process'
);
select is(baton_test.standing('mail'), 'pending', 'register_worker: completes nothing of it');
select is(
  baton_test.register(baton_test.worker(1), 'batch'), 'registered',
  'register_worker: the first worker is still one of its own'
);

-- refused
select is(
  baton_test.register(baton_test.worker(1), 'orders'), 'rejected worker_gone', 'register_worker: an id of another function'
);
select is(
  (select w.function_name from baton.workers as w where w.worker_id = baton_test.worker(1)), 'batch',
  'register_worker: which stays there'
);
select is(
  baton_test.register(baton_test.worker(5), 'orders'), 'rejected worker_gone', 'register_worker: an id that was stopped'
);
savepoint silence;
select baton_test.advance('1 hour') \g /dev/null
select baton._stop_silent_workers(baton._now()) \g /dev/null
select is(
  baton_test.register(baton_test.worker(1), 'batch'), 'rejected worker_gone',
  'register_worker: an id that was given up as silent'
);
rollback to savepoint silence;
select baton.stop_worker(baton_test.worker(1), draining => true) \g /dev/null
select is(
  baton_test.register(baton_test.worker(1), 'batch'), 'rejected worker_gone', 'register_worker: an id that is stopping'
);
select baton.deprecate_workers('mail') \g /dev/null
select baton.enable_worker_function('mail') \g /dev/null
select is(
  baton_test.register(baton_test.worker(6), 'mail'), 'rejected worker_gone', 'register_worker: an id that is deprecated'
);
select is(
  (select w.last_heartbeat_at from baton.workers as w where w.worker_id = baton_test.worker(5)),
  (select w.started_at from baton.workers as w where w.worker_id = baton_test.worker(5)),
  'register_worker: what is refused is no heartbeat'
);
select baton_test.advance('1 minute') \g /dev/null
select baton_test.must_reserve('orders') as invocation \gset
select baton.register_worker_function('orders', require_handshake => true) \g /dev/null
select is(
  baton_test.register(baton_test.worker(7), 'orders'), 'rejected handshake_required',
  'register_worker: where the handshake is required'
);
select is(baton_test.standing('orders'), 'pending', 'register_worker: the pending start waits for its handshake');
select is(
  baton_test.accept('orders', :'invocation', baton_test.worker(7)), 'accepted',
  'register_worker: by which the same worker is taken'
);
select is(
  baton_test.register(baton_test.worker(7), 'orders'), 'rejected handshake_required',
  'register_worker: a worker of the handshake is refused there too'
);
select is_empty(
  $$select n.name from baton_test.odd_versions() as n (name, is_good)
  where baton_test.raised(
    format('select baton.register_worker(gen_random_uuid(), ''batch'', %L)', n.name)
  ) <> case when n.is_good then 'nothing' else '22023 invalid_name' end$$,
  'register_worker: a version has 1 to 200 bytes and no control character'
);
select baton.disable_worker_function('batch') \g /dev/null
select is(
  baton_test.register(baton_test.worker(8), 'batch'), 'rejected disabled', 'register_worker: a disabled function'
);
select is_empty(
  format('select w.worker_id from baton.workers as w where w.worker_id = %L', baton_test.worker(8)),
  'register_worker: what is refused leaves no row'
);
select is(
  baton_test.raised('select baton.register_worker(null, ''batch'')'), '22023 missing_argument', 'register_worker: no id'
);
select is(
  baton_test.raised('select baton.register_worker(gen_random_uuid(), ''nobody'')'), '42704 unknown_function',
  'register_worker: an unknown function'
);
select is(
  baton_test.raised('select baton.register_worker(gen_random_uuid(), null)'), '42704 unknown_function',
  'register_worker: no function'
);
select baton.register_worker_function('batch', require_handshake => true) \g /dev/null
select is(
  baton_test.register(baton_test.worker(8), 'batch'), 'rejected handshake_required',
  'register_worker: handshake_required is said before disabled'
);

select * from finish();
rollback;
