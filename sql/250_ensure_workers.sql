/*
 * ensure_workers: what the clock calls. Level-triggered: it looks at what is, and ten calls in a row do what one does.
 *
 * Candidates are found without a lock, so that healthy functions cost no write. Each is then locked (never waiting)
 * and decided anew. A function that can't be requested fails alone: its reservation is rolled back with its request,
 * and booked as a failed start outside that subtransaction, so that it is throttled.
 */
-- A function that stays locked leaves one incident a pending timeout.
create or replace function baton._note_locked(function_name text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (
    select
    from baton.incidents as i
    inner join baton.worker_functions as f on f.function_name = i.function_name
    where i.function_name = _note_locked.function_name
      and i.kind = 'function_locked'
      and i.at > _note_locked.at - f.pending_timeout
  ) then
    perform baton._incident(_note_locked.at, 'function_locked', function_name => _note_locked.function_name);
  end if;
end;
$$;

create or replace function baton.ensure_workers()
returns table (outcome text, function_name text, invocation_id uuid, request_id bigint, detail text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_transport text := baton._transport();
  v_candidate text;
  v_taken integer := 0;
  v_function baton.worker_functions;
  v_reserved baton.worker_functions;
begin
  perform baton._require_read_committed();
  for v_candidate in
    select f.function_name
    from baton.worker_functions as f
    where baton._is_overdue(f, v_now)
      or baton._startup_state(f, baton._healthy_worker(f, v_now) is not null, v_now) = 'retryable'
    order by f.last_invoked_at nulls first, f.function_name
  loop
    exit when v_taken = 100;
    function_name := v_candidate;
    invocation_id := null;
    request_id := null;
    detail := null;
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.function_name = v_candidate
    for no key update of f skip locked;
    if not found then
      if exists (select from baton.worker_functions as f where f.function_name = v_candidate) then
        outcome := 'locked';
        detail := 'another transaction holds the function''s row';
        perform baton._note_locked(v_candidate, v_now);
        return next;
      end if;
      continue;
    end if;

    v_taken := v_taken + 1;
    v_function := baton._book_expiry(v_function, v_now);
    if baton._startup_state(v_function, baton._healthy_worker(v_function, v_now) is not null, v_now) <> 'retryable' then
      continue;
    end if;
    begin
      v_reserved := baton._reserve_invocation(v_function, v_now);
      request_id := baton._request_start(v_reserved, v_transport);
      outcome := 'reserved';
    exception
      when others then
        outcome := 'error';
        detail := sqlerrm;
    end;
    if outcome = 'error' then
      v_reserved := baton._reserve_invocation(v_function, v_now);
      perform baton._fail_invocation(v_reserved, 'error', detail, v_now);
    end if;
    invocation_id := v_reserved.invocation_id;
    return next;
  end loop;
end;
$$;

comment on function baton.ensure_workers() is
'Request the start of one worker for every enabled http function that has no healthy worker, no pending start and no throttle; at most 100 a call, longest uninvoked first. The request leaves with the caller''s commit. With nothing to do it writes nothing.
Returns: a row for each function that it acted on: outcome (reserved; error, with detail: the request could not be made and counts as a failed start; locked: somebody holds the function''s row), function_name, invocation_id, request_id (the transport''s), detail
Raises: 25001
Locks: the functions, never waiting
Source: pgflow''s ensure_workers';
