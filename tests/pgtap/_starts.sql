-- Short ways to ask the verbs of worker starts, after _begin.sql: each answers its row as words.

create function baton_test.worker(number integer)
returns uuid
language sql
immutable
begin atomic
  select lpad(worker.number::text, 32, '0')::uuid;
end;

create function baton_test.reserve(function_name text)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', r.outcome, r.retry_after) from baton.reserve_worker_invocation(reserve.function_name) as r;
end;

create function baton_test.reconcile(function_name text, invocation_id uuid, worker_id uuid default null)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', r.outcome, r.reason, r.worker_id)
  from baton.reconcile_worker_invocation(
    reconcile.function_name, reconcile.invocation_id, reconcile.worker_id
  ) as r;
end;

create function baton_test.accept(function_name text, invocation_id uuid, worker_id uuid)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', a.outcome, a.reason)
  from baton.accept_worker_invocation(accept.function_name, accept.invocation_id, accept.worker_id) as a;
end;

create function baton_test.register(worker_id uuid, function_name text)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', r.outcome, r.reason)
  from baton.register_worker(register.worker_id, register.function_name) as r;
end;

create function baton_test.state(function_name text)
returns text
language sql
stable
begin atomic
  select s.startup_state from baton.worker_startup as s where s.function_name = state.function_name;
end;

create function baton_test.invocation(function_name text)
returns uuid
language sql
stable
begin atomic
  select f.invocation_id from baton.worker_functions as f where f.function_name = invocation.function_name;
end;

create function baton_test.failed_starts(function_name text)
returns integer
language sql
stable
begin atomic
  select f.failed_starts from baton.worker_functions as f where f.function_name = failed_starts.function_name;
end;

-- The current invocation in words: status, error, detail.
create function baton_test.standing(function_name text)
returns text
language sql
stable
begin atomic
  select concat_ws(' ', f.invocation_status, f.invocation_error, f.invocation_detail)
  from baton.worker_functions as f
  where f.function_name = standing.function_name;
end;

-- Reserves a start that must be possible.
create function baton_test.must_reserve(function_name text)
returns uuid
language plpgsql
volatile
as $$
declare
  v_answer record;
begin
  select r.* into v_answer from baton.reserve_worker_invocation(must_reserve.function_name) as r;
  if v_answer.outcome <> 'reserved' then
    raise exception 'not reserved: %', v_answer;
  end if;
  return v_answer.invocation_id;
end;
$$;

-- Reserves a start, and accepts the worker at once.
create function baton_test.start(function_name text, worker_id uuid)
returns uuid
language plpgsql
volatile
as $$
declare
  v_invocation_id uuid := baton_test.must_reserve(start.function_name);
  v_answer text := baton_test.accept(start.function_name, v_invocation_id, start.worker_id);
begin
  if v_answer <> 'accepted' then
    raise exception 'not accepted: %', v_answer;
  end if;
  return v_invocation_id;
end;
$$;

-- Lets time pass until a start can be reserved, reserves it, and tells how long that took.
create function baton_test.reserve_when_possible(function_name text)
returns interval
language plpgsql
volatile
as $$
declare
  v_answer record;
  v_waited interval := '0';
begin
  loop
    select r.* into v_answer from baton.reserve_worker_invocation(reserve_when_possible.function_name) as r;
    exit when v_answer.outcome = 'reserved';
    v_answer.retry_after := coalesce(nullif(v_answer.retry_after, '0'), '1 second');
    v_waited := v_waited + v_answer.retry_after;
    perform baton_test.advance(v_answer.retry_after);
    if v_waited > interval '1 day' then
      raise exception 'never reserved: %', v_answer;
    end if;
  end loop;
  return v_waited;
end;
$$;

-- How often an incident of a kind was noted.
create function baton_test.incidents(kind text, function_name text default null)
returns bigint
language sql
stable
begin atomic
  select count(*)
  from baton.incident_log as i
  where i.kind = incidents.kind
    and i.function_name = coalesce(incidents.function_name, i.function_name);
end;

-- What one statement raises: its SQLSTATE and the registered condition; 'nothing' if it succeeds. Leaves no change.
create function baton_test.raised(statement text)
returns text
language plpgsql
volatile
as $$
declare
  v_state text;
  v_condition text;
begin
  execute raised.statement;
  raise exception using errcode = 'BT000';
exception
  when sqlstate 'BT000' then
    return 'nothing';
  when others then
    get stacked diagnostics v_state = returned_sqlstate, v_condition = constraint_name;
    return concat_ws(' ', v_state, nullif(v_condition, ''));
end;
$$;

-- Versions of a worker's code, and whether they are taken.
create function baton_test.odd_versions()
returns table (version text, is_good boolean)
language sql
immutable
begin atomic
  select v.version, v.is_good
  from (
    values
    (repeat('ä', 100), true), ('v1 "''%', true), (repeat('v', 201), false), (repeat('ä', 100) || 'v', false), ('', false),
    (e'v\n1', false), ('v' || chr(127), false), ('v' || chr(159), false)
  ) as v (version, is_good);
end;

-- The tables and views in which a word stands, but for secrets.
create function baton_test.relations_with(word text)
returns setof text
language plpgsql
stable
as $$
declare
  v_relation regclass;
  v_found boolean;
begin
  for v_relation in
    select c.oid::regclass from pg_class as c
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'v') and c.relname <> 'secrets'
  loop
    execute format('select exists (select from %s as r where strpos(r::text, $1) > 0)', v_relation)
    into v_found using relations_with.word;
    if v_found then
      return next v_relation::text;
    end if;
  end loop;
end;
$$;
