/*
 * Functions: the deployable units that host workers, and what may be said of their state.
 *
 * One current invocation a function, in its row. Whoever locks the row books an invocation past its deadline as
 * failed, before anything else is decided.
 */
comment on table baton.worker_functions is
'The functions whose workers the package starts, a row each, with the current invocation.
Written by: _complete_invocation, _disable, _fail_invocation, _read_responses, _request_start, _reserve_invocation, enable_worker_function, register_worker_function, unregister_worker_function';
comment on column baton.worker_functions.url is 'Where a start is requested; null: settings.base_url, a slash and the name.';
comment on column baton.worker_functions.secret_name is 'The secret sent as bearer token; null: none is sent.';
comment on column baton.worker_functions.start_mode is 'http: started by request; process: others start it.';
comment on column baton.worker_functions.require_handshake is 'Whether register_worker is refused.';
comment on column baton.worker_functions.debounce is
'Shortest time between two starts; doubled for each start in a row that failed, up to five minutes.';
comment on column baton.worker_functions.pending_timeout is 'How long a requested start may take until it counts as lost.';
comment on column baton.worker_functions.heartbeat_timeout is 'How long a silent worker still counts as healthy.';
comment on column baton.worker_functions.failed_starts is 'Starts in a row that failed.';
comment on column baton.worker_functions.invocation_status is 'pending, ready or failed; null before the first.';
comment on column baton.worker_functions.invocation_worker_id is 'The worker that it is ready with.';
comment on column baton.worker_functions.invocation_error is
'Why it failed: dismissed, expired, disabled, deprecated, or error (the request could not be made).';
comment on column baton.worker_functions.invocation_detail is
'Failed: the reason in words. Ready: the verb that completed it, accept, reconcile or register_worker.';
comment on column baton.worker_functions.invocation_transport is 'How the request was sent; null: by the caller.';
comment on column baton.worker_functions.invocation_request_id is
'The transport''s number for the request, while an answer to it is awaited.';

create or replace function baton._is_pending(function baton.worker_functions, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    (_is_pending.function).invocation_status = 'pending'
    and _is_pending.at < (_is_pending.function).invocation_expires_at,
    false
  );
end;

create or replace function baton._is_overdue(function baton.worker_functions, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    (_is_overdue.function).invocation_status = 'pending'
    and _is_overdue.at >= (_is_overdue.function).invocation_expires_at,
    false
  );
end;

-- An overdue invocation counts as a failed start whether or not it has been booked. Null: at once.
create or replace function baton._next_attempt_at(function baton.worker_functions, at timestamptz)
returns timestamptz
language sql
immutable
begin atomic
  select (_next_attempt_at.function).last_invoked_at + least(
    (_next_attempt_at.function).debounce * (
      2 ^ least(
        (_next_attempt_at.function).failed_starts
        + baton._is_overdue(_next_attempt_at.function, _next_attempt_at.at)::integer,
        9
      )
    ),
    greatest((_next_attempt_at.function).debounce, '5 minutes')
  );
end;

create or replace function baton._startup_state(function baton.worker_functions, is_ready boolean, at timestamptz)
returns text
language sql
immutable
begin atomic
  select
    case
      when not (_startup_state.function).enabled then 'disabled'
      when (_startup_state.function).start_mode = 'process' then 'process'
      when _startup_state.is_ready then 'ready'
      when baton._is_pending(_startup_state.function, _startup_state.at) then 'pending'
      when _startup_state.at < baton._next_attempt_at(_startup_state.function, _startup_state.at) then 'throttled'
      else 'retryable'
    end;
end;

-- Null where there is none.
create or replace function baton._lock_if_known(function_name text)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions;
begin
  perform baton._require_read_committed();
  loop
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.function_name = _lock_if_known.function_name
    for no key update of f;
    -- One that is gone may have been registered anew by the transaction that was waited for.
    exit when found or not exists (
      select from baton.worker_functions as f where f.function_name = _lock_if_known.function_name
    );
  end loop;
  return v_function;
end;
$$;

create or replace function baton._lock_function(function_name text)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := baton._lock_if_known(_lock_function.function_name);
begin
  if v_function.function_name is null then
    perform baton._raise('unknown_function', quote_nullable(left(_lock_function.function_name, 60)));
  end if;
  return v_function;
end;
$$;

-- A request that waits in the outbox goes with its invocation. One that a sender holds is dropped by claim_deliveries.
create or replace function baton._drop_delivery(function baton.worker_functions, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if (_drop_delivery.function).invocation_transport = 'outbox' then
    with free as (
      select m.message_id
      from baton.messages as m
      where m.message_id = (_drop_delivery.function).invocation_request_id
        and m.queue_name = 'baton.deliveries'
        and (m.claimed_at is null or m.visible_at <= _drop_delivery.at)
      for update of m skip locked
    )
    delete from baton.messages as m where m.message_id = any (array(select f.message_id from free as f));
  end if;
end;
$$;

-- The caller holds the function's lock.
create or replace function baton._fail_invocation(
  function baton.worker_functions, error text, detail text, at timestamptz
)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions;
begin
  update baton.worker_functions as f
  set invocation_status = 'failed',
    invocation_error = _fail_invocation.error,
    invocation_detail = _fail_invocation.detail,
    failed_starts = f.failed_starts + (_fail_invocation.error in ('dismissed', 'expired', 'error'))::integer
  where f.function_name = (_fail_invocation.function).function_name
  returning f.* into v_function;
  perform baton._drop_delivery(v_function, _fail_invocation.at);
  if _fail_invocation.error in ('dismissed', 'expired', 'error') then
    perform baton._incident(
      _fail_invocation.at, 'invocation_' || _fail_invocation.error, function_name => v_function.function_name,
      invocation_id => v_function.invocation_id,
      detail => jsonb_build_object('reason', v_function.invocation_detail, 'failed_starts', v_function.failed_starts)
    );
  end if;
  return v_function;
end;
$$;

create or replace function baton._book_expiry(function baton.worker_functions, at timestamptz)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if baton._is_overdue(_book_expiry.function, _book_expiry.at) then
    return baton._fail_invocation(_book_expiry.function, 'expired', null, _book_expiry.at);
  end if;
  return _book_expiry.function;
end;
$$;

create or replace function baton._complete_invocation(
  function baton.worker_functions, worker_id uuid, verb text, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.worker_functions as f
  set invocation_status = 'ready',
    invocation_worker_id = _complete_invocation.worker_id,
    invocation_error = null,
    invocation_detail = _complete_invocation.verb
  where f.function_name = (_complete_invocation.function).function_name;
  perform baton._drop_delivery(_complete_invocation.function, _complete_invocation.at);
end;
$$;

create or replace function baton._check_url(url text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_url.url !~ '^https?://[^/?#[:space:][:cntrl:]]+[^#[:space:][:cntrl:]]*$' then
    perform baton._raise('invalid_url', quote_literal(left(_check_url.url, 60)));
  end if;
end;
$$;

create or replace function baton.register_worker_function(
  function_name text,
  queue_name text default null,
  url text default null,
  secret_name text default null,
  start_mode text default null,
  debounce interval default null,
  pending_timeout interval default null,
  heartbeat_timeout interval default null,
  require_handshake boolean default null,
  out outcome text
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
  perform baton._check_function_name(register_worker_function.function_name);
  perform baton._check_url(register_worker_function.url);
  if register_worker_function.secret_name is not null then
    perform baton._check_name('secret_name', register_worker_function.secret_name);
  end if;
  if register_worker_function.start_mode is not null then
    perform baton._check_choice('start_mode', register_worker_function.start_mode, 'http', 'process');
  end if;
  perform baton._check_interval('debounce', register_worker_function.debounce, '1 second');
  perform baton._check_interval('pending_timeout', register_worker_function.pending_timeout, '1 second');
  perform baton._check_interval('heartbeat_timeout', register_worker_function.heartbeat_timeout, '1 second');

  perform baton._require_read_committed();
  loop
    insert into baton.worker_functions (function_name, queue_name)
    values (register_worker_function.function_name, register_worker_function.function_name)
    on conflict on constraint worker_functions_pkey do nothing;
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.function_name = register_worker_function.function_name
    for no key update of f;
    exit when found;
  end loop;
  perform baton._check_users_queue(coalesce(register_worker_function.queue_name, v_function.queue_name));
  perform baton._book_expiry(v_function, baton._now());
  update baton.worker_functions as f
  set queue_name = coalesce(register_worker_function.queue_name, f.queue_name),
    url = coalesce(register_worker_function.url, f.url),
    secret_name = coalesce(register_worker_function.secret_name, f.secret_name),
    start_mode = coalesce(register_worker_function.start_mode, f.start_mode),
    debounce = coalesce(register_worker_function.debounce, f.debounce),
    pending_timeout = coalesce(register_worker_function.pending_timeout, f.pending_timeout),
    heartbeat_timeout = coalesce(register_worker_function.heartbeat_timeout, f.heartbeat_timeout),
    require_handshake = coalesce(register_worker_function.require_handshake, f.require_handshake)
  where f.function_name = register_worker_function.function_name;
  outcome := 'registered';
end;
$$;

comment on function baton.register_worker_function(
  text, text, text, text, text, interval, interval, interval, boolean
) is
'Register a function, or change what is given: null keeps what is stored. Never changes whether it is enabled.
Arguments: function_name, 1 to 200 of A-Z a-z 0-9 . _ ~ -; queue_name, what its workers claim from, at first the function''s name; url, at first settings.base_url, a slash and the name; secret_name, the bearer token''s name in Supabase Vault, baton.secrets or the sender''s environment; start_mode, http (the default) or process (others start it); debounce (6 s), pending_timeout (60 s) and heartbeat_timeout (15 s), at least 1 s each; require_handshake (false), whether register_worker is refused.
Outcomes: registered
Raises: 22023, 25001
Locks: the function';

create or replace function baton.unregister_worker_function(function_name text, out outcome text)
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
  v_function := baton._lock_if_known(unregister_worker_function.function_name);
  if v_function.function_name is null then
    outcome := 'unknown';
    return;
  end if;
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);
  if exists (
    select
    from baton.workers as w
    where w.function_name = v_function.function_name and w.stopped_at is null
  ) then
    outcome := 'has_workers';
    return;
  end if;
  perform baton._drop_delivery(v_function, v_now);
  delete from baton.worker_functions as f where f.function_name = v_function.function_name;
  perform baton._incident(
    v_now, 'operator', function_name => v_function.function_name,
    detail => jsonb_build_object('verb', 'unregister_worker_function')
  );
  outcome := 'removed';
end;
$$;

comment on function baton.unregister_worker_function(text) is
'Forget a function. Whoever asks about a start of it that is still under way gets 42704.
Outcomes: removed; has_workers, while one of its workers is not stopped; unknown
Raises: 25001
Locks: the function';
