/*
 * Fast failure: what pg_net learned about requests that are still awaited.
 *
 * Responses are weak evidence: they come late or never, their ids begin anew after a crash, and neither a timeout nor
 * a 2xx proves anything. So a response can only end the pending invocation that still has its request id.
 */

-- Why a response means that no start is under way; null where it proves nothing. 409 and some gateway errors are
-- answered by runtimes that may be starting.
create or replace function baton._response_failure(status_code integer, error_msg text)
returns text
language sql
immutable
begin atomic
  select
    case
      when _response_failure.status_code >= 400
        and _response_failure.status_code not in (408, 409, 502, 504)
        and _response_failure.status_code not between 520 and 524 then 'HTTP ' || _response_failure.status_code
      when _response_failure.status_code is null
        and _response_failure.error_msg ~* '^could(n''t| not) (connect|resolve)' then _response_failure.error_msg
    end;
end;

create or replace function baton._read_responses(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_ids bigint[];
  v_last_id bigint;
  v_response record;
  v_function baton.worker_functions;
  v_failure text;
  v_read bigint[] := '{}'::bigint[];
begin
  select array_agg(a.invocation_request_id)
  into v_ids
  from (
    select f.invocation_request_id
    from baton.worker_functions as f
    where f.invocation_transport = 'pg_net' and f.invocation_request_id is not null
    order by f.last_invoked_at
    limit 1000
  ) as a;
  if v_ids is null
    or baton._schema_problem('pg_net', 'net') is not null or to_regclass('net._http_response') is null then
    return 0;
  end if;

  execute 'select s.last_value - (not s.is_called)::integer from net.http_request_queue_id_seq as s' into v_last_id;
  if v_last_id < (select max(i.id) from unnest(v_ids) as i (id)) then
    with free as (
      select f.function_name
      from baton.worker_functions as f
      where f.invocation_transport = 'pg_net' and f.invocation_request_id is not null
      order by f.function_name
      for no key update of f skip locked
    )
    update baton.worker_functions as f
    set invocation_request_id = null
    from free
    where f.function_name = free.function_name;
    if found then
      perform baton._incident(
        _read_responses.at, 'request_ids_forgotten', detail => jsonb_build_object('pg_net_is_at', v_last_id)
      );
    end if;
    return 0;
  end if;

  for v_response in
    execute 'select r.id, r.status_code, r.error_msg from net._http_response as r where r.id = any ($1) order by r.id'
    using v_ids
  loop
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.invocation_request_id = v_response.id
      and f.function_name = (
        select n.function_name
        from baton.worker_functions as n
        where n.invocation_transport = 'pg_net' and n.invocation_request_id = v_response.id
        order by n.last_invoked_at desc
        limit 1
      )
    for no key update of f skip locked;
    continue when not found;
    v_failure := baton._response_failure(v_response.status_code, v_response.error_msg);
    if v_failure is not null then
      perform baton._dismiss(v_function, v_function.invocation_id, v_failure, _read_responses.at);
    end if;
    update baton.worker_functions as f
    set invocation_request_id = null
    where f.function_name = v_function.function_name;
    v_read := v_read || v_response.id;
  end loop;
  execute
    'with free as (select r.ctid from net._http_response as r where r.id = any ($1) for update of r skip locked)
    delete from net._http_response as r using free as f where r.ctid = f.ctid'
  using v_read;

  with unanswered as (
    select f.function_name
    from baton.worker_functions as f
    where f.invocation_transport = 'pg_net'
      and f.invocation_request_id is not null
      and f.invocation_expires_at <= _read_responses.at
    order by f.function_name
    for no key update of f skip locked
  )
  update baton.worker_functions as f
  set invocation_request_id = null
  from unanswered as u
  where f.function_name = u.function_name;
  return cardinality(v_read);
end;
$$;

-- pg_net's queue has no times: what stands first, and since when, tells whether it moves.
create or replace function baton._watch_pg_net(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_head_id bigint;
begin
  if baton._schema_problem('pg_net', 'net') is null and to_regclass('net.http_request_queue') is not null then
    execute 'select q.id from net.http_request_queue as q limit 1' into v_head_id;
  end if;
  update baton.state as s
  set pg_net_head_id = v_head_id, pg_net_head_since = _watch_pg_net.at
  where s.pg_net_head_id is distinct from v_head_id;
  return 0;
end;
$$;
