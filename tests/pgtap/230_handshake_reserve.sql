\ir _begin.sql
\ir _starts.sql
select plan(56);

select baton.register_worker_function('orders', pending_timeout => '1 minute') \g /dev/null

-- Every answer
select results_eq(
  $$select r.outcome, r.invocation_id is not null, r.expires_at, r.retry_after
    from baton.reserve_worker_invocation('orders') as r$$,
  $$values ('reserved', true, baton._now() + interval '1 minute', null::interval)$$,
  'reserve: reserved, with its id and deadline'
);
select results_eq(
  $$select f.invocation_status, f.invocation_expires_at, f.last_invoked_at, f.failed_starts, f.invocation_worker_id,
    f.invocation_transport, f.invocation_request_id from baton.worker_functions as f$$,
  $$values ('pending', baton._now() + interval '1 minute', baton._now(), 0, null::uuid, null::text, null::bigint)$$,
  'reserve: the row says so'
);
select is_empty('select m.message_id from baton.messages as m', 'reserve: a manual start is delivered by its caller, not by a queue');
select baton_test.invocation('orders') as first \gset
select results_eq(
  $$select r.outcome, r.invocation_id, r.expires_at, r.retry_after from baton.reserve_worker_invocation('orders') as r$$,
  $$values ('pending', null::uuid, baton._now() + interval '1 minute', interval '1 minute')$$,
  'reserve: pending, with the deadline, and never the id of another''s reservation'
);
select baton_test.advance('59.999999 seconds') \g /dev/null
select is(baton_test.reserve('orders'), 'pending 00:00:00.000001', 'reserve: pending a microsecond before the deadline, throttle or not');
select is(baton_test.failed_starts('orders'), 0, 'reserve: nothing has failed yet');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.reserve('orders'), 'reserved', 'reserve: at the deadline, the throttle being over, a new start');
select isnt(baton_test.invocation('orders'), :'first', 'reserve: under a new id');
select is(baton_test.failed_starts('orders'), 1, 'reserve: the lost start counts');
select is(baton_test.incidents('invocation_expired', 'orders'), 1::bigint, 'reserve: an incident tells');

select baton.register_worker_function('batch', start_mode => 'process') \g /dev/null
select is(baton_test.reserve('batch'), 'process', 'reserve: process functions are started by others');
select baton.register_worker(baton_test.worker(1), 'batch') \g /dev/null
select is(baton_test.reserve('batch'), 'process', 'reserve: also while a worker is healthy');
select baton.disable_worker_function('batch') \g /dev/null
select is(baton_test.reserve('batch'), 'disabled', 'reserve: disabled comes before process');
select is(baton_test.raised('select baton.reserve_worker_invocation(''nobody'')'), '42704 unknown_function', 'reserve: an unknown function');
select is(baton_test.raised('select baton.reserve_worker_invocation(null)'), '42704 unknown_function', 'reserve: no function');

select baton.register_worker_function('mail') \g /dev/null
select baton_test.start('mail', baton_test.worker(2)) \g /dev/null
select results_eq(
  $$select r.outcome, r.invocation_id, r.expires_at, r.retry_after from baton.reserve_worker_invocation('mail') as r$$,
  $$values ('ready', null::uuid, null::timestamptz, null::interval)$$, 'reserve: ready'
);
select baton_test.advance('14.999999 seconds') \g /dev/null
select is(baton_test.reserve('mail'), 'ready', 'reserve: ready while the heartbeat is younger than heartbeat_timeout');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.reserve('mail'), 'reserved', 'reserve: at that age it starts a replacement');
select baton.heartbeat(baton_test.worker(2)) \g /dev/null
select is(baton_test.reserve('mail'), 'ready', 'reserve: a worker that comes back counts before the pending start');
select is(baton_test.standing('mail'), 'pending', 'reserve: and looking at it completes nothing');
select baton.stop_worker(baton_test.worker(2)) \g /dev/null
select is(baton_test.reserve('mail'), 'pending 00:01:00', 'reserve: without it, pending');
select is(baton_test.invocation('mail') is not null and baton_test.failed_starts('mail') = 1, true, 'reserve: one id all along');

-- Expiry: booked once, before the throttle is looked at
select baton.register_worker_function('short', pending_timeout => '1 second') \g /dev/null
select is(baton_test.reserve('short'), 'reserved', 'reserve: a pending timeout below the debounce');
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.reserve('short'), 'throttled 00:00:11', 'reserve: expired, so the throttle is doubled already at this look');
select is(baton_test.reserve('short'), 'throttled 00:00:11', 'reserve: a second look counts nothing more');
select is(baton_test.failed_starts('short'), 1, 'reserve: one lost start is one failed start');
select is(baton_test.standing('short'), 'failed expired', 'reserve: booked as expired');
select is(baton_test.incidents('invocation_expired', 'short'), 1::bigint, 'reserve: with one incident');
select baton_test.advance('10.999999 seconds') \g /dev/null
select is(baton_test.reserve('short'), 'throttled 00:00:00.000001', 'reserve: throttled a microsecond before the throttle is over');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.reserve('short'), 'reserved', 'reserve: reserved when it is over');

-- The throttle's growth
create function baton_test.spacing(function_name text, starts integer)
returns interval[]
language plpgsql
as $$
declare
  v_spacing interval[] := '{}';
begin
  for i in 1..spacing.starts loop
    v_spacing := v_spacing || baton_test.reserve_when_possible(spacing.function_name);
  end loop;
  return v_spacing;
end;
$$;
select baton.register_worker_function('lost', pending_timeout => '1 second') \g /dev/null
select is(
  baton_test.spacing('lost', 9),
  '{0, 12 s, 24 s, 48 s, 96 s, 192 s, 5 min, 5 min, 5 min}',
  'reserve: lost starts in a row double the throttle, up to five minutes'
);
select is(baton_test.failed_starts('lost'), 8, 'reserve: each of them counted');
update baton.worker_functions set failed_starts = 2000000 where function_name = 'lost';
select is(baton_test.spacing('lost', 1), '{5 min}', 'reserve: after any number of them');
select baton.register_worker_function('slow', debounce => '10 minutes', pending_timeout => '1 second') \g /dev/null
select is(
  baton_test.spacing('slow', 3), '{0, 10 min, 10 min}', 'reserve: a debounce over five minutes is neither doubled nor cut'
);
select baton.register_worker_function('edge', debounce => '5 minutes', pending_timeout => '1 second') \g /dev/null
select is(baton_test.spacing('edge', 3), '{0, 5 min, 5 min}', 'reserve: one of five minutes stays that');
select baton.register_worker_function('quick', debounce => '1 second', pending_timeout => '1 minute') \g /dev/null
select is(
  baton_test.spacing('quick', 3), '{0, 1 min, 1 min}', 'reserve: the deadline spaces too, where it is longer than the throttle'
);
select baton.register_worker_function('seldom', debounce => '3000 hours') \g /dev/null
update baton.worker_functions set failed_starts = 22, last_invoked_at = baton._now() where function_name = 'seldom';
select is(
  baton_test.reserve('seldom'), 'throttled 125 days', 'reserve: a debounce that no interval could hold so often doubled'
);

-- Crash loops: accepted, and dead before the first heartbeat
select baton.register_worker_function('crash') \g /dev/null
create function baton_test.crashes(function_name text, times integer, worker_id uuid default null)
returns interval[]
language plpgsql
as $$
declare
  v_spacing interval[] := '{}';
begin
  for i in 1..crashes.times loop
    v_spacing := v_spacing || baton_test.reserve_when_possible(crashes.function_name);
    if baton_test.accept(
      crashes.function_name, baton_test.invocation(crashes.function_name), coalesce(crashes.worker_id, gen_random_uuid())
    ) <> 'accepted' then
      raise exception 'not accepted';
    end if;
  end loop;
  return v_spacing;
end;
$$;
select is(
  baton_test.crashes('crash', 11),
  '{0, 15 s, 15 s, 24 s, 48 s, 96 s, 192 s, 5 min, 5 min, 5 min, 5 min}',
  'reserve: workers that die before their first heartbeat are throttled'
);
select is(baton_test.failed_starts('crash'), 10, 'reserve: ten of them, replaced, are ten failed starts');
select is(baton_test.incidents('start_crashed', 'crash'), 10::bigint, 'reserve: each is an incident');
select baton_test.advance('299.999999 seconds') \g /dev/null
select is(baton_test.reserve('crash'), 'throttled 00:00:00.000001', 'reserve: looking counts no crash');
select is(baton_test.failed_starts('crash'), 10, 'reserve: only a replacement does');
select baton_test.advance('1 microsecond') \g /dev/null
select baton_test.must_reserve('crash') as invocation \gset
select is(baton_test.failed_starts('crash'), 11, 'reserve: the eleventh, when it is replaced');
select baton_test.advance('1 minute') \g /dev/null
select baton_test.reserve('crash') \g /dev/null
select is(baton_test.failed_starts('crash'), 12, 'reserve: a lost start after it counts on from there');
select baton.register_worker_function('same') \g /dev/null
select baton_test.must_reserve('same') \g /dev/null
select baton_test.accept('same', baton_test.invocation('same'), baton_test.worker(99)) \g /dev/null
select baton_test.advance('1 second') \g /dev/null
select baton.heartbeat(baton_test.worker(99)) \g /dev/null
select baton_test.advance('1 hour') \g /dev/null
select is(
  baton_test.crashes('same', 8, baton_test.worker(99)), '{0, 15 s, 15 s, 24 s, 48 s, 96 s, 192 s, 5 min}',
  'reserve: so are those that come under one id, which was once heard'
);
select is(baton_test.failed_starts('same'), 7, 'reserve: and counted');

-- What ends a row of failures
create function baton_test.join_in(worker_id uuid, function_name text)
returns void
language sql
begin atomic
  insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
  values (join_in.worker_id, join_in.function_name, true, baton._now(), baton._now());
end;
create function baton_test.failures_after(function_name text, statement text)
returns integer
language plpgsql
as $$
declare
  v_invocation_id uuid;
  v_worker_id uuid := gen_random_uuid();
begin
  perform baton.register_worker_function(failures_after.function_name);
  v_invocation_id := baton_test.must_reserve(failures_after.function_name);
  perform baton_test.advance('1 minute');
  v_invocation_id := baton_test.must_reserve(failures_after.function_name);
  if baton_test.failed_starts(failures_after.function_name) <> 1 then
    raise exception 'no failure to begin with';
  end if;
  execute replace(failures_after.statement, 'accept()', 'baton.accept_worker_invocation($2, $3, $1)')
  using v_worker_id, failures_after.function_name, v_invocation_id;
  perform baton_test.advance('1 hour');
  perform baton_test.must_reserve(failures_after.function_name);
  return baton_test.failed_starts(failures_after.function_name);
end;
$$;
select is(baton_test.failures_after('a1', 'select accept()'), 2, 'reserve: an accepted worker of no heartbeat is one more failure');
select is(
  baton_test.failures_after('a2', 'select accept(), baton_test.advance(''1 microsecond''), baton.heartbeat($1)'), 0,
  'reserve: one heartbeat after the start ends the row of failures'
);
select is(
  baton_test.failures_after('a3', 'select accept(), baton.stop_worker($1)'), 0, 'reserve: an orderly stop does'
);
select is(
  baton_test.failures_after('a4', 'select accept(), baton.stop_worker($1, draining => true)'), 0, 'reserve: draining does'
);
select is(
  baton_test.failures_after('a5', 'select baton.register_worker($1, $2), $3'), 0,
  'reserve: a worker that came by register_worker does, heartbeat or not'
);
select is(
  baton_test.failures_after('a6', 'select baton.register_worker($1, $2), baton.reconcile_worker_invocation($2, $3, $1)'), 0,
  'reserve: so does a start that was completed before its runtime asked'
);
select is(
  baton_test.failures_after('a7', 'select baton_test.join_in($1, $2), baton.reconcile_worker_invocation($2, $3)'), 0,
  'reserve: so does a start that reconcile completed against a worker that was there, heartbeat or not'
);
select is(
  baton_test.failures_after(
    'a8', 'select accept(), baton_test.advance(''1 hour''), baton._stop_silent_workers(baton._now())'
  ), 2,
  'reserve: a worker that tick gave up as silent did not stop in order'
);

-- Old runtimes, started again and again, never heard
select baton.register_worker_function('old') \g /dev/null
create function baton_test.old_restarts(times integer)
returns interval[]
language plpgsql
as $$
declare
  v_spacing interval[] := '{}';
begin
  for i in 1..old_restarts.times loop
    v_spacing := v_spacing || baton_test.reserve_when_possible('old');
    perform baton.register_worker(gen_random_uuid(), 'old');
  end loop;
  return v_spacing;
end;
$$;
select is(
  baton_test.old_restarts(10), '{0, 15 s, 15 s, 15 s, 15 s, 15 s, 15 s, 15 s, 15 s, 15 s}',
  'reserve: ten restarts of an old runtime are never throttled'
);
select is(baton_test.failed_starts('old'), 0, 'reserve: nor counted');

select * from finish();
rollback;
