\ir _begin.sql
\ir _starts.sql
select plan(52);

create function baton_test.row_of(function_name text)
returns text
language sql
stable
begin atomic
  select f::text from baton.worker_functions as f where f.function_name = row_of.function_name;
end;

-- The function
select is(
  baton_test.raised('select baton.reconcile_worker_invocation(''nobody'', gen_random_uuid())'), '42704 unknown_function',
  'reconcile: an unknown function raises'
);
select is(
  baton_test.raised('select baton.reconcile_worker_invocation(null, gen_random_uuid())'), '42704 unknown_function',
  'reconcile: no function raises'
);

-- Not the current one
select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.register_worker_function('mail', url => 'http://w.test') \g /dev/null
select is(baton_test.reconcile('orders', null), 'rejected superseded', 'reconcile: no id, before the first invocation');
select is(baton_test.reconcile('orders', gen_random_uuid()), 'rejected superseded', 'reconcile: any id, before the first invocation');
select baton_test.must_reserve('orders') as orders \gset
select baton_test.must_reserve('mail') as mail \gset
select is(baton_test.reconcile('orders', null), 'rejected superseded', 'reconcile: no id, while one is pending');
select is(baton_test.reconcile('orders', gen_random_uuid()), 'rejected superseded', 'reconcile: an unknown id');
select is(baton_test.reconcile('orders', :'mail'), 'rejected superseded', 'reconcile: another function''s id');
select is(baton_test.standing('orders') || ' ' || baton_test.standing('mail'), 'pending pending', 'reconcile: which harms neither');

-- Pending, and nobody there
select baton_test.row_of('orders') as before \gset
select is(baton_test.reconcile('orders', :'orders'), 'start', 'reconcile: pending and nobody there: start');
select is(baton_test.reconcile('orders', :'orders', baton_test.worker(1)), 'start', 'reconcile: a worker that nobody knows is none');
select is(baton_test.reconcile('orders', :'orders'), 'start', 'reconcile: a duplicate request hears the same');
select is(baton_test.row_of('orders'), :'before', 'reconcile: receiving a request changes nothing');
select is_empty('select w.worker_id from baton.workers as w', 'reconcile: and makes no worker');

-- The deadline
select baton_test.advance('59.999999 seconds') \g /dev/null
select is(baton_test.reconcile('orders', :'orders'), 'start', 'reconcile: a microsecond before the deadline: start');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.reconcile('orders', :'orders'), 'rejected expired', 'reconcile: at the deadline: expired');
select is(baton_test.failed_starts('orders'), 1, 'reconcile: which books the failed start');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.reconcile('orders', :'orders'), 'rejected expired', 'reconcile: and after it');
select is(baton_test.failed_starts('orders'), 1, 'reconcile: once');
select is(baton_test.reconcile('mail', gen_random_uuid()), 'rejected superseded', 'reconcile: under a wrong id, past the deadline');
select is(baton_test.standing('mail'), 'failed expired', 'reconcile: the current one is booked all the same');
select baton.register_worker(baton_test.worker(2), 'mail') \g /dev/null
select is(
  baton_test.reconcile('mail', :'mail', baton_test.worker(2)), 'rejected expired',
  'reconcile: an expired start is not completed, not even by a healthy worker'
);
select baton.stop_worker(baton_test.worker(2)) \g /dev/null

-- Superseded
select baton_test.must_reserve('orders') as orders2 \gset
select is(baton_test.reconcile('orders', :'orders'), 'rejected superseded', 'reconcile: the id before the current one');
select is(baton_test.reconcile('orders', :'orders2'), 'start', 'reconcile: the current one');

-- Failed, for each reason
select baton.dismiss_worker_invocation('orders', :'orders2', 'no memory') \g /dev/null
select is(baton_test.reconcile('orders', :'orders2'), 'rejected dismissed', 'reconcile: a dismissed one');
select baton.enable_worker_function('orders') \g /dev/null
select baton_test.must_reserve('orders') as orders3 \gset
select baton.disable_worker_function('orders') \g /dev/null
select is(baton_test.reconcile('orders', :'orders3'), 'rejected disabled', 'reconcile: one that was pending at disable');
select baton.enable_worker_function('orders') \g /dev/null
select baton_test.must_reserve('orders') as orders4 \gset
select baton.deprecate_workers('orders') \g /dev/null
select is(baton_test.reconcile('orders', :'orders4'), 'rejected deprecated', 'reconcile: one that was pending at deprecate');
select baton.register_worker_function('nowhere') \g /dev/null
select e.invocation_id as nowhere from baton.ensure_workers() as e where e.function_name = 'nowhere' \gset
select is(baton_test.reconcile('nowhere', :'nowhere'), 'rejected error', 'reconcile: one whose request could not be made');

-- Ready
select baton.register_worker_function('calls', url => 'http://w.test') \g /dev/null
select baton_test.start('calls', baton_test.worker(10)) as calls \gset
select is(
  baton_test.reconcile('calls', :'calls'), 'ready ' || baton_test.worker(10), 'reconcile: an accepted one: ready, with its worker'
);
select is(
  baton_test.reconcile('calls', :'calls', baton_test.worker(11)), 'ready ' || baton_test.worker(10),
  'reconcile: whoever asks'
);
select baton_test.advance('1 hour') \g /dev/null
select is(
  baton_test.reconcile('calls', :'calls', baton_test.worker(10)), 'ready ' || baton_test.worker(10),
  'reconcile: also long after the deadline'
);
select is(
  (select w.last_heartbeat_at from baton.workers as w where w.worker_id = baton_test.worker(10)),
  baton._now() - interval '1 hour', 'reconcile: that is no heartbeat'
);
select baton.stop_worker(baton_test.worker(10)) \g /dev/null
select is(
  baton_test.reconcile('calls', :'calls'), 'ready ' || baton_test.worker(10),
  'reconcile: a duplicate starts nothing even when that worker has stopped'
);

-- Pending, and the caller has a worker
select baton.register_worker_function('own', url => 'http://w.test') \g /dev/null
select baton_test.start('own', baton_test.worker(20)) \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('own') as own \gset
select is(
  baton_test.reconcile('own', :'own', baton_test.worker(20)), 'ready ' || baton_test.worker(20),
  'reconcile: the caller''s own worker, silent for a minute, is taken'
);
select is(baton_test.standing('own'), 'ready reconcile', 'reconcile: the start is completed against it');
select is(
  (select w.last_heartbeat_at from baton.workers as w where w.worker_id = baton_test.worker(20)), baton._now(),
  'reconcile: being named is its heartbeat'
);
select is(baton_test.reserve('own'), 'ready', 'reconcile: so it is healthy again');
select is_empty(
  $$select m.message_id from baton.messages as m where m.payload ->> 'function_name' = 'own'$$,
  'reconcile: the delivery goes'
);
select is(
  baton_test.accept('own', :'own', baton_test.worker(21)), 'rejected already_accepted',
  'reconcile: a runtime that boots for it comes too late'
);

-- … which goes no more, or is another's
create function baton_test.reconcile_own(function_name text, statement text)
returns text
language plpgsql
as $$
declare
  v_worker_id uuid := gen_random_uuid();
begin
  perform baton.register_worker_function(reconcile_own.function_name);
  perform baton_test.start(reconcile_own.function_name, v_worker_id);
  perform baton.heartbeat(v_worker_id);
  execute reconcile_own.statement using v_worker_id, reconcile_own.function_name;
  perform baton_test.advance('1 minute');
  return baton_test.reconcile(
    reconcile_own.function_name, baton_test.must_reserve(reconcile_own.function_name), v_worker_id
  );
end;
$$;
select is(
  baton_test.reconcile_own('b1', 'select baton.stop_worker($1), $2'), 'start',
  'reconcile: a worker of its own that has stopped is none'
);
select is(
  baton_test.reconcile_own('b2', 'select baton.stop_worker($1, draining => true), $2'), 'start',
  'reconcile: nor is one that is stopping'
);
select is(
  baton_test.reconcile_own('b3', 'select baton.deprecate_workers($2), baton.enable_worker_function($2), $1'), 'start',
  'reconcile: nor is a deprecated one'
);
select baton.heartbeat(baton_test.worker(20)) \g /dev/null
select baton_test.advance('1 second') \g /dev/null
select baton.register_worker_function('b5', url => 'http://w.test') \g /dev/null
select baton_test.must_reserve('b5') as b5 \gset
select is(
  baton_test.reconcile('b5', :'b5', baton_test.worker(20)), 'start', 'reconcile: nor is another function''s, healthy as it is'
);
select is(
  (select w.last_heartbeat_at from baton.workers as w where w.worker_id = baton_test.worker(20)) < baton._now(), true,
  'reconcile: for that one it is no heartbeat'
);
select is(
  baton_test.reconcile_own('b4', 'select baton_test.advance(''1 hour''), baton._stop_silent_workers(baton._now()), $1, $2'),
  'start', 'reconcile: nor is one of its own that was given up as silent'
);

-- Pending, and another worker is healthy
select baton.register_worker_function('other', url => 'http://w.test') \g /dev/null
select baton_test.start('other', baton_test.worker(30)) \g /dev/null
select baton_test.advance('15 seconds') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton_test.invocation('other') as other \gset
select is(baton_test.reconcile('other', :'other'), 'start', 'reconcile: one silent for heartbeat_timeout is not healthy');
select baton.heartbeat(baton_test.worker(30)) \g /dev/null
select baton_test.advance('14.999999 seconds') \g /dev/null
select is(
  baton_test.reconcile('other', :'other', baton_test.worker(31)), 'ready ' || baton_test.worker(30),
  'reconcile: one that came back, a microsecond before its timeout, is taken'
);
select is(baton_test.standing('other'), 'ready reconcile', 'reconcile: the start is completed against it');
select is(
  (select w.last_heartbeat_at from baton.workers as w where w.worker_id = baton_test.worker(30)),
  baton._now() - interval '14.999999 seconds', 'reconcile: for which it is no heartbeat'
);
select is_empty(
  $$select m.message_id from baton.messages as m where m.payload ->> 'function_name' = 'other'$$,
  'reconcile: the delivery goes'
);
select is(
  baton_test.reconcile('other', :'other', baton_test.worker(31)), 'ready ' || baton_test.worker(30),
  'reconcile: again the same answer'
);

-- The row of the caller's own comes first
select baton.register_worker_function('both', url => 'http://w.test') \g /dev/null
select baton_test.start('both', baton_test.worker(40)) \g /dev/null
select baton.register_worker(baton_test.worker(41), 'both') \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select baton_test.must_reserve('both') as both \gset
select baton.heartbeat(baton_test.worker(40)) \g /dev/null
select is(
  baton_test.reconcile('both', :'both', baton_test.worker(41)), 'ready ' || baton_test.worker(41),
  'reconcile: the caller''s own silent worker comes before another''s healthy one'
);
select baton.register_worker_function('two', url => 'http://w.test') \g /dev/null
select baton_test.start('two', baton_test.worker(50)) \g /dev/null
select baton.register_worker(baton_test.worker(51), 'two') \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select baton_test.must_reserve('two') as two \gset
select baton.heartbeat(baton_test.worker(51)) \g /dev/null
select baton_test.advance('1 second') \g /dev/null
select baton.heartbeat(baton_test.worker(50)) \g /dev/null
select is(
  baton_test.reconcile('two', :'two'), 'ready ' || baton_test.worker(50), 'reconcile: of several, the one heard last'
);

select * from finish();
rollback;
