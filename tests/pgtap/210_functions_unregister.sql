\ir _begin.sql
\ir _starts.sql
select plan(16);

select is(
  (select u.outcome from baton.unregister_worker_function('orders') as u),
  'unknown', 'unregister_worker_function: what was never registered'
);
select is(
  (select u.outcome from baton.unregister_worker_function(null) as u),
  'unknown', 'unregister_worker_function: null'
);

select baton.register_worker_function('orders', url => 'http://w.test/orders') \g /dev/null
select baton.register_worker_function('mail', url => 'http://w.test/mail') \g /dev/null
select baton_test.start('orders', baton_test.worker(1)) \g /dev/null
select is(
  (select u.outcome from baton.unregister_worker_function('orders') as u),
  'has_workers', 'unregister_worker_function: while a worker is healthy'
);
select baton_test.advance('1 hour') \g /dev/null
select is(
  (select u.outcome from baton.unregister_worker_function('orders') as u),
  'has_workers', 'unregister_worker_function: while one is silent'
);
select baton.deprecate_workers('orders') \g /dev/null
select is(
  (select u.outcome from baton.unregister_worker_function('orders') as u),
  'has_workers', 'unregister_worker_function: while a deprecated one finishes'
);
select baton.stop_worker(baton_test.worker(1), draining => true) \g /dev/null
select is(
  (select u.outcome from baton.unregister_worker_function('orders') as u),
  'has_workers', 'unregister_worker_function: while one drains'
);
select ok(
  exists (select from baton.worker_functions as f where f.function_name = 'orders'),
  'unregister_worker_function: until then the function stays'
);
select baton.stop_worker(baton_test.worker(1)) \g /dev/null
select is(
  (select u.outcome from baton.unregister_worker_function('orders') as u),
  'removed', 'unregister_worker_function: once all are stopped'
);
select is_empty(
  $$select f.function_name from baton.worker_functions as f where f.function_name = 'orders'$$,
  'unregister_worker_function: the row is gone'
);
select results_eq(
  $$select i.kind, i.detail from baton.incident_log as i where i.function_name = 'orders' order by i.incident_id desc limit 1$$,
  $$values ('operator', '{"verb": "unregister_worker_function"}'::jsonb)$$,
  'unregister_worker_function: an incident tells'
);
select isnt_empty(
  $$select f.function_name from baton.worker_functions as f where f.function_name = 'mail'$$,
  'unregister_worker_function: other functions stay'
);

-- A start that is under way
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('mail') as invocation \gset
select is(
  (select u.outcome from baton.unregister_worker_function('mail') as u),
  'removed', 'unregister_worker_function: a pending start does not hold it up'
);
select is_empty(
  $$select m.message_id from baton.messages as m where m.queue_name = 'baton.deliveries'$$,
  'unregister_worker_function: its delivery goes with it'
);
select is(
  baton_test.raised(format('select baton.reconcile_worker_invocation(%L, %L)', 'mail', :'invocation')),
  '42704 unknown_function', 'unregister_worker_function: its request is refused when it arrives'
);
select baton.register_worker_function('mail', url => 'http://w.test/mail') \g /dev/null
select is(
  baton_test.reconcile('mail', :'invocation'), 'rejected superseded',
  'unregister_worker_function: also when the name is registered anew'
);
select is(baton_test.reserve('mail'), 'reserved', 'unregister_worker_function: a new registration starts afresh, unthrottled');

select * from finish();
rollback;
