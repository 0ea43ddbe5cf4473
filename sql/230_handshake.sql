/*
 * The handshake: a start is reserved before it is requested, and consumed by the worker that is ready.
 *
 *   reserve -> request -> reconcile -> initialise -> accept
 *                                               \-> dismiss
 *
 * Every verb locks the function's row, reads the clock, books an invocation past its deadline, and decides in a
 * statement after the lock, which sees workers accepted while it waited. At no moment is there neither a pending
 * invocation nor a ready worker.
 */

-- Books how the start that is replaced went, and gives the failed ones in a row. A ready invocation was a good start if
-- an existing worker took it, or its worker was ever heard again or stopped in order; else the worker died at once,
-- which is a failed start.
create or replace function baton._book_start(function baton.worker_functions, at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := _book_start.function;
begin
  if v_function.invocation_status is distinct from 'ready' then
    return v_function.failed_starts;
  elsif v_function.invocation_detail = 'accept' and exists (
    select
    from baton.workers as w
    where w.worker_id = v_function.invocation_worker_id
      and w.last_heartbeat_at = w.started_at
      and w.stopping_at is null
  ) then
    perform baton._incident(
      _book_start.at, 'start_crashed', function_name => v_function.function_name,
      worker_id => v_function.invocation_worker_id, invocation_id => v_function.invocation_id
    );
    return v_function.failed_starts + 1;
  end if;
  return 0;
end;
$$;

-- The caller holds the function's lock and has decided that it may be started.
create or replace function baton._reserve_invocation(function baton.worker_functions, at timestamptz)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_failed_starts integer := baton._book_start(_reserve_invocation.function, _reserve_invocation.at);
  v_function baton.worker_functions;
begin
  update baton.worker_functions as f
  set invocation_id = gen_random_uuid(),
    invocation_status = 'pending',
    invocation_expires_at = _reserve_invocation.at + f.pending_timeout,
    invocation_worker_id = null,
    invocation_error = null,
    invocation_detail = null,
    invocation_transport = null,
    invocation_request_id = null,
    last_invoked_at = _reserve_invocation.at,
    failed_starts = v_failed_starts
  where f.function_name = (_reserve_invocation.function).function_name
  returning f.* into v_function;
  return v_function;
end;
$$;

create or replace function baton.reserve_worker_invocation(
  function_name text,
  out outcome text,
  out invocation_id uuid,
  out expires_at timestamptz,
  out retry_after interval
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
  v_function := baton._lock_function(reserve_worker_invocation.function_name);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);
  outcome := baton._startup_state(v_function, baton._healthy_worker(v_function, v_now) is not null, v_now);
  case outcome
    when 'retryable' then
      v_function := baton._reserve_invocation(v_function, v_now);
      outcome := 'reserved';
      invocation_id := v_function.invocation_id;
      expires_at := v_function.invocation_expires_at;
    when 'pending' then
      expires_at := v_function.invocation_expires_at;
      retry_after := v_function.invocation_expires_at - v_now;
    when 'throttled' then
      retry_after := baton._next_attempt_at(v_function, v_now) - v_now;
    when 'ready', 'disabled', 'process' then
  end case;
end;
$$;

comment on function baton.reserve_worker_invocation(text) is
'Reserve the start of a worker, in the transaction that requests it. While the reservation is pending nobody else gets one.
Outcomes: reserved, with invocation_id and expires_at; disabled; process (others start it); ready (a healthy worker exists); pending (another start is), with expires_at and retry_after; throttled, with retry_after
Raises: 42704, 25001
Locks: the function';

create or replace function baton.reconcile_worker_invocation(
  out outcome text,
  function_name text,
  invocation_id uuid,
  inout worker_id uuid default null,
  out reason text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies: the invocation id is
 *   not the current one                                       rejected: superseded
 *   current and failed (an expiry has just been booked)       rejected: its error
 *   current and ready                                         ready, with the accepted worker
 *   pending; the caller names its own worker, which goes on   ready, with that one
 *   pending; another healthy worker                           ready, with that one
 *   pending                                                   start
 */
declare
  v_function baton.worker_functions;
  v_own baton.workers;
  v_ready_worker_id uuid;
  v_now timestamptz;
begin
  v_function := baton._lock_function(reconcile_worker_invocation.function_name);
  v_own := baton._lock_worker(reconcile_worker_invocation.worker_id);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);
  worker_id := null;

  if v_function.invocation_id is null
    or v_function.invocation_id is distinct from reconcile_worker_invocation.invocation_id then
    outcome := 'rejected';
    reason := 'superseded';
    return;
  end if;
  case v_function.invocation_status
    when 'failed' then
      outcome := 'rejected';
      reason := v_function.invocation_error;
    when 'ready' then
      outcome := 'ready';
      worker_id := v_function.invocation_worker_id;
    when 'pending' then
      if v_own.function_name = v_function.function_name
        and baton._goes_on(v_own) then
        update baton.workers as w set last_heartbeat_at = v_now where w.worker_id = v_own.worker_id;
        v_ready_worker_id := v_own.worker_id;
      else
        v_ready_worker_id := baton._healthy_worker(v_function, v_now);
      end if;
      if v_ready_worker_id is null then
        outcome := 'start';
      else
        perform baton._complete_invocation(v_function, v_ready_worker_id, 'reconcile', v_now);
        outcome := 'ready';
        worker_id := v_ready_worker_id;
      end if;
  end case;
end;
$$;

comment on function baton.reconcile_worker_invocation(text, uuid, uuid) is
'What the handler of a start request asks first, on every request: should a worker be started? Receiving a request never ends its pending state; an existing worker does. The id is correlation, not authentication.
Arguments: worker_id, the worker that the caller runs already, if it does (this counts as its heartbeat).
Outcomes: start: initialise a worker and accept; ready, with worker_id: there is one; rejected: start nothing, with reason: superseded (not the current invocation of this function), expired, dismissed, disabled, deprecated, error. It never means that a running worker should stop
Raises: 42704, 25001
Locks: the function, then the named worker
Source: pgflow''s startup handshake';

create or replace function baton.accept_worker_invocation(
  function_name text,
  invocation_id uuid,
  worker_id uuid,
  version text default null,
  out outcome text,
  out reason text
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
  v_worker baton.workers;
  v_now timestamptz;
begin
  perform baton._check_worker_id(accept_worker_invocation.worker_id);
  perform baton._check_version(accept_worker_invocation.version);
  v_function := baton._lock_function(accept_worker_invocation.function_name);
  v_worker := baton._lock_worker_id(accept_worker_invocation.worker_id);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);

  outcome := 'rejected';
  if v_function.invocation_id is null
    or v_function.invocation_id is distinct from accept_worker_invocation.invocation_id then
    reason := 'superseded';
    return;
  end if;
  case v_function.invocation_status
    when 'failed' then
      reason := v_function.invocation_error;
    when 'ready' then
      if v_function.invocation_worker_id <> accept_worker_invocation.worker_id then
        reason := 'already_accepted';
      elsif v_worker.worker_id is null or not baton._goes_on(v_worker) then
        reason := 'worker_gone';
      else
        outcome := 'accepted';
      end if;
    when 'pending' then
      if not v_function.enabled then
        reason := 'disabled';
      elsif not baton._admit_worker(
        accept_worker_invocation.worker_id, v_function.function_name, accept_worker_invocation.version, true, v_now
      ) then
        reason := 'worker_gone';
      else
        perform baton._complete_invocation(v_function, accept_worker_invocation.worker_id, 'accept', v_now);
        outcome := 'accepted';
      end if;
  end case;
end;
$$;

comment on function baton.accept_worker_invocation(text, uuid, uuid, text) is
'What a runtime calls when its worker is ready: consumes the invocation and inserts the worker, in one. Only an accepted worker may start processing. Repeated with the same worker it gives the same answer, also after the deadline: repeat it once where the answer was lost.
Arguments: worker_id, chosen by the runtime, new for each worker; version, of the code, for the views.
Outcomes: accepted; rejected, with reason: superseded, expired, dismissed, disabled, deprecated, error, already_accepted (by another worker), worker_gone (the id is stopping, stopped, deprecated, or another function''s)
Raises: 22023, 42704, 25001
Locks: the function, then the worker
Source: pgflow''s startup handshake';

-- Only the pending invocation can be dismissed. The caller holds the function's lock.
create or replace function baton._dismiss(
  function baton.worker_functions, invocation_id uuid, reason text, at timestamptz
)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := baton._book_expiry(_dismiss.function, _dismiss.at);
begin
  if v_function.invocation_id = _dismiss.invocation_id and baton._is_pending(v_function, _dismiss.at) then
    perform baton._fail_invocation(v_function, 'dismissed', left(_dismiss.reason, 1000), _dismiss.at);
    return true;
  end if;
  return false;
end;
$$;

create or replace function baton.dismiss_worker_invocation(
  function_name text, invocation_id uuid, reason text, out outcome text
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
begin
  v_function := baton._lock_function(dismiss_worker_invocation.function_name);
  outcome := case
    when baton._dismiss(
      v_function, dismiss_worker_invocation.invocation_id, dismiss_worker_invocation.reason, baton._now()
    ) then 'dismissed'
    else 'ignored'
  end;
end;
$$;

comment on function baton.dismiss_worker_invocation(text, uuid, text) is
'What a runtime calls when its start fails, so that the next one need not wait for the deadline.
Arguments: reason, for people; its first 1,000 characters are kept.
Outcomes: dismissed; ignored, where it is not the pending invocation
Raises: 42704, 25001
Locks: the function';
