/*
 * Deploys: enabling, disabling and deprecating under the function's lock, so that an acceptance is either before
 * (and its worker is deprecated) or after (and refused).
 */
create or replace function baton.enable_worker_function(function_name text, out outcome text)
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
  v_function := baton._lock_function(enable_worker_function.function_name);
  v_now := baton._now();
  perform baton._book_expiry(v_function, v_now);
  update baton.worker_functions as f
  set enabled = true, failed_starts = 0, last_invoked_at = null
  where f.function_name = v_function.function_name;
  perform baton._incident(
    v_now, 'operator', function_name => v_function.function_name,
    detail => jsonb_build_object('verb', 'enable_worker_function')
  );
  outcome := 'enabled';
end;
$$;

comment on function baton.enable_worker_function(text) is
'Let a function be started, and forget its failed starts and its throttle: the next tick starts exactly one worker where none is healthy.
Outcomes: enabled
Raises: 42704, 25001
Locks: the function';

-- The caller holds the function's lock.
create or replace function baton._disable(function baton.worker_functions, error text, verb text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := baton._book_expiry(_disable.function, _disable.at);
begin
  if baton._is_pending(v_function, _disable.at) then
    perform baton._fail_invocation(v_function, _disable.error, null, _disable.at);
  end if;
  update baton.worker_functions as f set enabled = false where f.function_name = v_function.function_name;
  perform baton._incident(
    _disable.at, 'operator', function_name => v_function.function_name,
    detail => jsonb_build_object('verb', _disable.verb)
  );
end;
$$;

create or replace function baton.disable_worker_function(
  function_name text, out outcome text, out was_enabled boolean
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
  v_function := baton._lock_function(disable_worker_function.function_name);
  perform baton._disable(v_function, 'disabled', 'disable_worker_function', baton._now());
  outcome := 'disabled';
  was_enabled := v_function.enabled;
end;
$$;

comment on function baton.disable_worker_function(text) is
'Start no more workers of a function; a pending start is refused from now on. Its running workers go on.
Outcomes: disabled; with was_enabled
Raises: 42704, 25001
Locks: the function';

create or replace function baton.deprecate_workers(function_name text, out outcome text, out was_enabled boolean)
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
  v_function := baton._lock_function(deprecate_workers.function_name);
  perform w.worker_id
  from baton.workers as w
  where w.worker_id = any (
    array(
      select o.worker_id
      from baton.workers as o
      where o.function_name = v_function.function_name and o.stopped_at is null
    )
  )
  order by w.worker_id
  for no key update of w;
  v_now := baton._now();
  perform baton._disable(v_function, 'deprecated', 'deprecate_workers', v_now);
  update baton.workers as w
  set deprecated_at = v_now
  where w.function_name = v_function.function_name and w.stopped_at is null and w.deprecated_at is null;
  outcome := 'deprecated';
  was_enabled := v_function.enabled;
end;
$$;

comment on function baton.deprecate_workers(text) is
'Before a deploy: disable a function and deprecate its workers, which claim nothing more and finish what they hold. A pending start is refused from now on. After the deploy, enable_worker_function starts the new code.
Outcomes: deprecated; with was_enabled
Raises: 42704, 25001
Locks: the function, then its workers by id';
