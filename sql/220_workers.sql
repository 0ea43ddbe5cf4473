/*
 * Workers: who is healthy, heartbeats, and the workers that come without the handshake.
 *
 * A worker that stops in order has stopping_at; one that tick found silent has stopped_at alone. Heartbeats lock the
 * worker's row only: under the function's lock all workers of a function would wait for each other.
 */
comment on table baton.workers is
'The workers that were accepted or registered, a row each.
Written by: _admit_worker, _prune_rest, _stop_silent_workers, after_restore, deprecate_workers, heartbeat, reconcile_worker_invocation, stop_worker';
comment on column baton.workers.worker_id is 'Chosen by the runtime.';
comment on column baton.workers.handshake is 'Whether it was accepted under an invocation; false: register_worker.';
comment on column baton.workers.control is
'Whether it hears control notifications: listening, polling (it can''t and asks instead), off.';
comment on column baton.workers.stopping_at is 'When it said that it is stopping or has stopped.';
comment on column baton.workers.stopped_at is 'When it stopped, or was given up as silent.';
comment on column baton.workers.deprecated_at is 'From when on it claims nothing more.';

-- "Is true" keeps the look-up of one worker from being planned with the index of all live ones.
create or replace function baton._goes_on(worker baton.workers)
returns boolean
language sql
immutable
begin atomic
  select (
      (_goes_on.worker).stopping_at is null
      and (_goes_on.worker).stopped_at is null
      and (_goes_on.worker).deprecated_at is null
    ) is true;
end;

create or replace function baton._is_healthy(worker baton.workers, heartbeat_timeout interval, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select baton._goes_on(_is_healthy.worker)
    and _is_healthy.at < (_is_healthy.worker).last_heartbeat_at + _is_healthy.heartbeat_timeout;
end;

-- The healthy worker of a function that was heard last; null: none.
create or replace function baton._healthy_worker(function baton.worker_functions, at timestamptz)
returns uuid
language sql
stable
begin atomic
  select w.worker_id
  from baton.workers as w
  where w.function_name = (_healthy_worker.function).function_name
    and w.stopped_at is null
    and baton._is_healthy(w, (_healthy_worker.function).heartbeat_timeout, _healthy_worker.at)
  order by w.last_heartbeat_at desc, w.worker_id
  limit 1;
end;

create or replace function baton._lock_worker(worker_id uuid)
returns baton.workers
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_worker baton.workers;
begin
  select w.* into v_worker from baton.workers as w where w.worker_id = _lock_worker.worker_id for no key update of w;
  return v_worker;
end;
$$;

-- The id itself, whether its worker is there or not: two that bring the same new id wait for each other here, before
-- they read the clock.
create or replace function baton._lock_worker_id(worker_id uuid)
returns baton.workers
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(hashtextextended('baton.workers ' || _lock_worker_id.worker_id, 0));
  return baton._lock_worker(_lock_worker_id.worker_id);
end;
$$;

create or replace function baton._check_worker_id(worker_id uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_worker_id.worker_id is null then
    perform baton._raise('missing_argument', 'worker_id');
  end if;
end;
$$;

create or replace function baton._check_version(version text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_version.version is not null then
    perform baton._check_name('version', _check_version.version);
  end if;
end;
$$;

-- Inserts the worker, or keeps its row if it is one of this function's that goes on; false: its id is used up.
-- The caller holds the locks of the function and of the worker's id.
create or replace function baton._admit_worker(
  worker_id uuid, function_name text, version text, handshake boolean, at timestamptz
)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into baton.workers (worker_id, function_name, version, handshake, started_at, last_heartbeat_at)
  values (
    _admit_worker.worker_id, _admit_worker.function_name, _admit_worker.version, _admit_worker.handshake,
    _admit_worker.at, _admit_worker.at
  )
  on conflict do nothing;
  if found then
    return true;
  end if;
  update baton.workers as w
  set last_heartbeat_at = _admit_worker.at,
    handshake = w.handshake or _admit_worker.handshake,
    started_at = case when _admit_worker.handshake then _admit_worker.at else w.started_at end
  where w.worker_id = _admit_worker.worker_id
    and w.function_name = _admit_worker.function_name
    and baton._goes_on(w);
  return found;
end;
$$;

create or replace function baton.register_worker(
  worker_id uuid, function_name text, version text default null, out outcome text, out reason text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_function baton.worker_functions;
  v_now timestamptz;
begin
  perform baton._check_worker_id(register_worker.worker_id);
  perform baton._check_version(register_worker.version);
  v_function := baton._lock_function(register_worker.function_name);
  perform baton._lock_worker_id(register_worker.worker_id);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);

  outcome := 'rejected';
  if v_function.require_handshake then
    reason := 'handshake_required';
  elsif not v_function.enabled then
    reason := 'disabled';
  elsif not baton._admit_worker(
    register_worker.worker_id, v_function.function_name, register_worker.version, false, v_now
  ) then
    reason := 'worker_gone';
  else
    outcome := 'registered';
    if v_function.start_mode = 'http' and baton._is_pending(v_function, v_now) then
      perform baton._complete_invocation(v_function, register_worker.worker_id, 'register_worker', v_now);
    end if;
  end if;
end;
$$;

comment on function baton.register_worker(uuid, text, text) is
'Register a worker without the handshake: for process functions, and for runtimes older than the handshake, whose start it completes if one is pending. Repeated with the same id it changes nothing else.
Outcomes: registered; rejected, with reason: handshake_required (the function wants it), disabled, worker_gone (the id is stopping, stopped, deprecated, or another function''s)
Raises: 22023, 42704, 25001
Locks: the function, then the worker';

create or replace function baton.heartbeat(worker_id uuid, control text default null, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_worker baton.workers;
begin
  if heartbeat.control is not null then
    perform baton._check_choice('control', heartbeat.control, 'listening', 'polling', 'off');
  end if;
  v_worker := baton._lock_worker(heartbeat.worker_id);
  if v_worker.worker_id is null then
    outcome := 'unknown';
  elsif v_worker.stopped_at is not null then
    outcome := 'stopped';
  else
    update baton.workers as w
    set last_heartbeat_at = baton._now(), control = coalesce(heartbeat.control, w.control)
    where w.worker_id = v_worker.worker_id;
    outcome := case
      when v_worker.stopping_at is not null then 'stopping'
      when v_worker.deprecated_at is not null then 'deprecated'
      else 'active'
    end;
  end if;
end;
$$;

comment on function baton.heartbeat(uuid, text) is
'Say that a worker lives, and learn what it should do. Revives nothing.
Arguments: control, whether it hears control notifications: listening, polling or off; null keeps what is stored.
Outcomes: active; stopping; deprecated: claim nothing more, finish and stop; stopped; unknown
Raises: 22023
Locks: the worker';

create or replace function baton.stop_worker(worker_id uuid, draining boolean default false, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_worker baton.workers;
  v_now timestamptz;
begin
  v_worker := baton._lock_worker(stop_worker.worker_id);
  v_now := baton._now();
  if v_worker.worker_id is null then
    outcome := 'unknown';
  elsif v_worker.stopped_at is not null then
    outcome := 'stopped';
  else
    outcome := case when stop_worker.draining then 'stopping' else 'stopped' end;
    update baton.workers as w
    set stopping_at = coalesce(w.stopping_at, v_now),
      stopped_at = case when not coalesce(stop_worker.draining, false) then v_now end
    where w.worker_id = v_worker.worker_id;
  end if;
end;
$$;

comment on function baton.stop_worker(uuid, boolean) is
'Say that a worker stops, or (draining) is going to: from then on it claims nothing, and a replacement may start.
Outcomes: stopping; stopped (also where it was already); unknown
Raises: none
Locks: the worker';

-- For tick.
create or replace function baton._stop_silent_workers(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_worker record;
  v_stopped integer := 0;
begin
  for v_worker in
    with silent as (
      select w.worker_id
      from baton.workers as w
      where w.stopped_at is null
        and w.last_heartbeat_at <= _stop_silent_workers.at
          - (select s.silent_worker_timeout from baton.settings as s where s.singleton)
      order by w.worker_id
      limit 1000
      for no key update of w skip locked
    )
    update baton.workers as w
    set stopped_at = _stop_silent_workers.at
    where w.worker_id = any (array(select s.worker_id from silent as s))
    returning w.worker_id, w.function_name, w.last_heartbeat_at
  loop
    v_stopped := v_stopped + 1;
    perform baton._incident(
      _stop_silent_workers.at, 'worker_silent', function_name => v_worker.function_name,
      worker_id => v_worker.worker_id,
      detail => jsonb_build_object('last_heartbeat_at', v_worker.last_heartbeat_at)
    );
  end loop;
  return v_stopped;
end;
$$;
