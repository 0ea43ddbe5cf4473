\ir _begin.sql
\ir _starts.sql
select plan(48);

select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.register_worker_function('other', start_mode => 'process') \g /dev/null
select baton.register_worker(baton_test.worker(9), 'other') \g /dev/null

-- disable
select is(
  (select concat_ws(' ', d.outcome, d.was_enabled) from baton.disable_worker_function('orders') as d),
  'disabled t', 'disable_worker_function: answers that it was enabled'
);
select is(
  (select concat_ws(' ', d.outcome, d.was_enabled) from baton.disable_worker_function('orders') as d),
  'disabled f', 'disable_worker_function: and that it was not'
);
select is(baton_test.reserve('orders'), 'disabled', 'disable_worker_function: no start is reserved any more');
select is(
  (select count(*)::integer from baton.ensure_workers() as e where e.function_name = 'orders'), 0,
  'disable_worker_function: nor requested'
);
select is(
  (select e.outcome from baton.enable_worker_function('orders') as e),
  'enabled', 'enable_worker_function: answers enabled'
);
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('orders') as invocation \gset
select is(baton_test.standing('orders'), 'pending', 'enable_worker_function: the next ensure_workers starts one');
select baton.ensure_workers() \g /dev/null
select is(baton_test.invocation('orders'), :'invocation', 'enable_worker_function: exactly one');
select baton_test.advance('59.999999 seconds') \g /dev/null
select baton.disable_worker_function('orders') \g /dev/null
select is(
  baton_test.standing('orders'), 'failed disabled',
  'disable_worker_function: a pending start fails, even a microsecond before its deadline'
);
select is(baton_test.failed_starts('orders'), 0, 'disable_worker_function: that is no failed start');
select is_empty(
  $$select m.message_id from baton.messages as m where m.payload ->> 'function_name' = 'orders'$$,
  'disable_worker_function: its delivery goes'
);
select is(
  baton_test.reconcile('orders', :'invocation'), 'rejected disabled', 'disable_worker_function: reconcile refuses it'
);
select is(
  baton_test.accept('orders', :'invocation', baton_test.worker(1)), 'rejected disabled',
  'disable_worker_function: accept refuses it'
);
select baton.enable_worker_function('orders') \g /dev/null
select is(
  baton_test.accept('orders', :'invocation', baton_test.worker(1)), 'rejected disabled',
  'enable_worker_function: what was refused stays refused'
);
select is(
  (select count(*)::integer from baton.ensure_workers() as e where e.function_name = 'orders'), 1,
  'enable_worker_function: clears the throttle'
);
select baton_test.advance('60 seconds') \g /dev/null
select baton.disable_worker_function('orders') \g /dev/null
select is(
  baton_test.standing('orders'), 'failed expired', 'disable_worker_function: a start past its deadline has expired'
);
select is(baton_test.failed_starts('orders'), 1, 'disable_worker_function: and counts as failed');
select baton.enable_worker_function('orders') \g /dev/null
select is(baton_test.failed_starts('orders'), 0, 'enable_worker_function: clears the failed starts');
select is(baton_test.state('orders'), 'retryable', 'enable_worker_function: and the throttle that came of them');

-- enable of what is enabled
select baton_test.must_reserve('orders') as pending \gset
select baton.enable_worker_function('orders') \g /dev/null
select is(baton_test.invocation('orders'), :'pending', 'enable_worker_function: a pending start goes on');
select is(baton_test.state('orders'), 'pending', 'enable_worker_function: and stays pending');
select baton_test.accept('orders', :'pending', baton_test.worker(2)) \g /dev/null
select baton.enable_worker_function('orders') \g /dev/null
select is(baton_test.reserve('orders'), 'ready', 'enable_worker_function: nothing is started beside a healthy worker');

-- disable leaves running workers alone
select baton.disable_worker_function('orders') \g /dev/null
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(2)) as h), 'active',
  'disable_worker_function: a running worker goes on'
);
select is(
  baton_test.accept('orders', :'pending', baton_test.worker(2)), 'accepted',
  'disable_worker_function: a worker that was accepted before is told so again'
);
select baton.enable_worker_function('orders') \g /dev/null
select is(baton_test.state('orders'), 'ready', 'enable_worker_function: that worker counts again');

-- deprecate
select baton.register_worker_function('mail', url => 'http://w.test') \g /dev/null
select baton_test.start('mail', baton_test.worker(3)) \g /dev/null
select baton.stop_worker(baton_test.worker(3)) \g /dev/null
select baton_test.advance('6 seconds') \g /dev/null
select baton_test.start('mail', baton_test.worker(4)) \g /dev/null
select baton_test.advance('6 seconds') \g /dev/null
select baton.heartbeat(baton_test.worker(4)) \g /dev/null
select baton.register_worker(baton_test.worker(5), 'mail') \g /dev/null
select baton.stop_worker(baton_test.worker(5), draining => true) \g /dev/null
select is(
  (select concat_ws(' ', d.outcome, d.was_enabled) from baton.deprecate_workers('mail') as d),
  'deprecated t', 'deprecate_workers: answers that the function was enabled'
);
select results_eq(
  $$select w.worker_id, w.deprecated_at = baton._now() from baton.workers as w where w.function_name = 'mail' order by 1$$,
  $$values (baton_test.worker(3), null), (baton_test.worker(4), true), (baton_test.worker(5), true)$$,
  'deprecate_workers: all but the stopped are deprecated'
);
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(4)) as h), 'deprecated',
  'deprecate_workers: a worker hears it at its heartbeat'
);
select baton.send('mail', '{}') \g /dev/null
select is_empty(
  format('select c.message_id from baton.claim(%L, %L) as c', 'mail', baton_test.worker(4)),
  'deprecate_workers: a deprecated worker claims nothing more'
);
select isnt_empty('select c.message_id from baton.claim(''mail'') as c', 'deprecate_workers: though there is a message');
select is(baton_test.state('mail'), 'disabled', 'deprecate_workers: disables');
select baton_test.advance('1 second') \g /dev/null
select is(
  (select concat_ws(' ', d.outcome, d.was_enabled) from baton.deprecate_workers('mail') as d),
  'deprecated f', 'deprecate_workers: again, and that it was disabled'
);
select is(
  (select w.deprecated_at from baton.workers as w where w.worker_id = baton_test.worker(4)),
  baton._now() - interval '1 second', 'deprecate_workers: the first time stays'
);
select baton.enable_worker_function('mail') \g /dev/null
select results_eq(
  $$select e.outcome, e.function_name from baton.ensure_workers() as e where e.function_name = 'mail'$$,
  $$values ('reserved', 'mail')$$, 'deprecate_workers: after it, enabling starts a new worker beside the old ones'
);
select baton_test.invocation('mail') as booting \gset
select is(
  (select count(*)::integer from baton.ensure_workers() as e where e.function_name = 'mail'), 0,
  'deprecate_workers: exactly one'
);
select is(
  baton_test.reconcile('mail', :'booting', baton_test.worker(4)), 'start',
  'deprecate_workers: a deprecated worker completes no start'
);
select baton.deprecate_workers('mail') \g /dev/null
select is(baton_test.standing('mail'), 'failed deprecated', 'deprecate_workers: a pending start fails');
select is(baton_test.failed_starts('mail'), 0, 'deprecate_workers: that is no failed start');
select is_empty(
  $$select m.message_id from baton.messages as m where m.queue_name = 'baton.deliveries' and m.payload ->> 'function_name' = 'mail'$$,
  'deprecate_workers: its delivery goes'
);
select is(
  baton_test.reconcile('mail', :'booting'), 'rejected deprecated', 'deprecate_workers: reconcile refuses what boots old code'
);
select is(
  baton_test.accept('mail', :'booting', baton_test.worker(6)), 'rejected deprecated',
  'deprecate_workers: accept refuses it'
);
select baton.enable_worker_function('mail') \g /dev/null
select is(
  baton_test.accept('mail', :'booting', baton_test.worker(6)), 'rejected deprecated',
  'deprecate_workers: also after the deploy'
);
select baton_test.must_reserve('mail') as late \gset
select baton_test.advance('60 seconds') \g /dev/null
select baton.deprecate_workers('mail') \g /dev/null
select is(baton_test.standing('mail'), 'failed expired', 'deprecate_workers: a start past its deadline has expired');

-- All three
select is(
  (select string_agg(distinct i.detail ->> 'verb', ' ' order by i.detail ->> 'verb')
    from baton.incident_log as i where i.kind = 'operator'),
  'deprecate_workers disable_worker_function enable_worker_function', 'deploys: each leaves an incident'
);
select is(
  baton_test.raised('select baton.' || v.verb || '(''nobody'')'), '42704 unknown_function',
  v.verb || ': an unknown function'
)
from unnest(array['disable_worker_function', 'deprecate_workers', 'enable_worker_function']) as v (verb);
select is(
  (select h.outcome from baton.heartbeat(baton_test.worker(9)) as h), 'active',
  'deploys: workers of other functions are not touched'
);
select is(baton_test.state('other'), 'process', 'deploys: and their functions stay enabled');

select * from finish();
rollback;
