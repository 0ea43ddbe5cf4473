\ir _begin.sql
\ir _starts.sql
select plan(28);

create function baton_test.dismiss(function_name text, invocation_id uuid, reason text default 'no memory')
returns text
language sql
volatile
begin atomic
  select d.outcome from baton.dismiss_worker_invocation(dismiss.function_name, dismiss.invocation_id, dismiss.reason) as d;
end;

select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.register_worker_function('mail', url => 'http://w.test') \g /dev/null
select is(baton_test.dismiss('orders', null), 'ignored', 'dismiss: no id, before the first invocation');
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('orders') as orders \gset
select baton_test.invocation('mail') as mail \gset

select is(baton_test.dismiss('orders', null), 'ignored', 'dismiss: no id');
select is(baton_test.dismiss('orders', gen_random_uuid()), 'ignored', 'dismiss: an unknown id');
select is(baton_test.dismiss('orders', :'mail'), 'ignored', 'dismiss: another function''s id');
select is(baton_test.standing('orders') || ' ' || baton_test.standing('mail'), 'pending pending', 'dismiss: which harms neither');

select baton_test.advance('59.999999 seconds') \g /dev/null
select is(baton_test.dismiss('orders', :'orders'), 'dismissed', 'dismiss: the pending one, a microsecond before its deadline');
select is(baton_test.standing('orders'), 'failed dismissed no memory', 'dismiss: it has failed, for that reason');
select is(baton_test.failed_starts('orders'), 1, 'dismiss: a failed start');
select results_eq(
  $$select i.kind, i.function_name, i.invocation_id, i.detail
    from baton.incident_log as i order by i.incident_id desc limit 1$$,
  format($$values ('invocation_dismissed', 'orders', %L::uuid,
    '{"reason": "no memory", "failed_starts": 1}'::jsonb)$$, :'orders'),
  'dismiss: an incident tells'
);
select is(
  (select count(*)::integer from baton.messages as m where m.payload ->> 'function_name' = 'orders'), 0,
  'dismiss: its delivery goes'
);
select is(
  (select count(*)::integer from baton.messages as m where m.payload ->> 'function_name' = 'mail'), 1,
  'dismiss: no other does'
);
select is(baton_test.dismiss('orders', :'orders', 'again'), 'ignored', 'dismiss: again');
select is(baton_test.standing('orders'), 'failed dismissed no memory', 'dismiss: the first reason stays');
select is(baton_test.failed_starts('orders'), 1, 'dismiss: and counts once');
select is(baton_test.reserve('orders'), 'reserved', 'dismiss: the next start need not wait for the deadline, the throttle being over');
select baton_test.invocation('orders') as orders2 \gset
select is(baton_test.dismiss('orders', :'orders'), 'ignored', 'dismiss: the id before the current one');
select is(baton_test.standing('orders'), 'pending', 'dismiss: harms no later start');
select baton_test.dismiss('orders', :'orders2') \g /dev/null
select is(baton_test.reserve('orders'), 'throttled 00:00:24', 'dismiss: the throttle is doubled for each failed start');

-- At the deadline
select is(baton_test.dismiss('mail', :'mail'), 'dismissed', 'dismiss: another, still before its deadline');
select baton_test.advance('1 minute') \g /dev/null
select baton_test.must_reserve('mail') as mail2 \gset
select baton_test.advance('1 minute') \g /dev/null
select is(baton_test.dismiss('mail', :'mail2'), 'ignored', 'dismiss: at the deadline it is too late');
select is(baton_test.standing('mail'), 'failed expired', 'dismiss: the start has expired');
select is(baton_test.failed_starts('mail'), 2, 'dismiss: and counts as one');

-- A start that is done
select baton_test.start('mail', baton_test.worker(1)) as mail3 \gset
select is(baton_test.dismiss('mail', :'mail3'), 'ignored', 'dismiss: an accepted one');
select is(baton_test.state('mail'), 'ready', 'dismiss: harms no worker');

-- The reason
select baton.register_worker_function('long') \g /dev/null
select baton_test.dismiss('long', baton_test.must_reserve('long'), repeat('x', 2000)) \g /dev/null
select is(
  (select length(s.invocation_detail) from baton.worker_startup as s where s.function_name = 'long'), 1000,
  'dismiss: a long reason is cut'
);
select baton.enable_worker_function('long') \g /dev/null
select is(baton_test.dismiss('long', baton_test.must_reserve('long'), null), 'dismissed', 'dismiss: no reason is none');
select is(baton_test.standing('long'), 'failed dismissed', 'dismiss: and then nothing is told');
select is(
  baton_test.raised('select baton.dismiss_worker_invocation(''nobody'', gen_random_uuid(), ''x'')'), '42704 unknown_function',
  'dismiss: an unknown function'
);

select * from finish();
rollback;
