/*
 * What an argument may be: names, keys, intervals, sizes; the isolation level of a verb; what may be looked up.
 *
 * The checks of the hot verbs are single expressions, which the planner puts into the caller's. There is no BETWEEN in
 * them: a dump writes it out, and what is read back is not the same function any more.
 */
create or replace function baton._check_name(argument text, value text)
returns void
language sql
stable
begin atomic
  select
    case
      when (
        octet_length(_check_name.value) >= 1
        and octet_length(_check_name.value) <= 200
        and _check_name.value !~ '[\x01-\x1f\x7f-\x9f]'
      ) is not true
        then baton._raise('invalid_name', _check_name.argument, quote_nullable(left(_check_name.value, 60)))
    end;
end;

create or replace function baton._check_key(value text)
returns void
language sql
stable
begin atomic
  select
    case
      when octet_length(_check_key.value) < 1
        or octet_length(_check_key.value) > 500
        or _check_key.value ~ '[\x01-\x1f\x7f-\x9f]'
        then baton._raise('invalid_key', quote_literal(left(_check_key.value, 60)))
    end;
end;

create or replace function baton._check_function_name(value text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_function_name.value is null or _check_function_name.value !~ '^[A-Za-z0-9._~-]{1,200}$' then
    perform baton._raise('invalid_function_name', quote_nullable(left(_check_function_name.value, 60)));
  end if;
end;
$$;

create or replace function baton._check_users_queue(queue_name text)
returns void
language sql
stable
begin atomic
  select
    case
      when starts_with(_check_users_queue.queue_name, 'baton.')
        then baton._raise('reserved_queue', quote_literal(_check_users_queue.queue_name))
      else baton._check_name('queue_name', _check_users_queue.queue_name)
    end;
end;

-- To compare intervals takes each month for 30 days, to add them does not.
create or replace function baton._check_interval(argument text, value interval, shortest interval default '0')
returns void
language sql
stable
begin atomic
  select
    case
      when _check_interval.value < '0'
        or _check_interval.value > '10 years'
        or timestamp '2000-01-01' + _check_interval.value < timestamp '2000-01-01'
        then baton._raise('invalid_interval', _check_interval.argument, _check_interval.value::text)
      when _check_interval.value < _check_interval.shortest
        then baton._raise(
            'too_small', _check_interval.argument, _check_interval.shortest::text, _check_interval.value::text
          )
    end;
end;

create or replace function baton._check_limit(argument text, value integer)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_limit.value < 0
        then baton._raise('invalid_limit', _check_limit.argument, _check_limit.value::text)
    end;
end;

create or replace function baton._check_choice(argument text, value text, variadic choices text[])
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_choice.value is null or _check_choice.value <> all (_check_choice.choices) then
    perform baton._raise(
      'invalid_choice', _check_choice.argument, array_to_string(_check_choice.choices, ', '),
      quote_nullable(left(_check_choice.value, 60))
    );
  end if;
end;
$$;

create or replace function baton._check_large(argument text, bytes integer)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_limit integer;
begin
  select s.max_payload_bytes into v_limit from baton.settings as s where s.singleton;
  if _check_large.bytes > v_limit then
    perform baton._raise('too_large', _check_large.argument, _check_large.bytes::text, v_limit::text);
  end if;
end;
$$;

-- No limit is below 1 kB: what is smaller is not measured against it.
create or replace function baton._check_size(argument text, bytes integer)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_size.bytes > 1024 then baton._check_large(_check_size.argument, _check_size.bytes)
    end;
end;

-- Null where the schema of an optional extension can be used, else why not. To look up a name in a schema without
-- USAGE is an error, even with to_regclass.
create or replace function baton._schema_problem(extension text, schema_name text)
returns text
language sql
stable
begin atomic
  select
    case
      when to_regnamespace(_schema_problem.schema_name) is null
        then format('%s is not in this database', _schema_problem.extension)
      when not has_schema_privilege(_schema_problem.schema_name, 'usage')
        then format(
          '%s can''t be used: role %s has no USAGE on schema %s', _schema_problem.extension, current_user,
          _schema_problem.schema_name
        )
    end;
end;

create or replace function baton._is_read_committed()
returns boolean
language sql
stable
begin atomic
  select current_setting('transaction_isolation') not in ('repeatable read', 'serializable');
end;

-- A verb that locks a row and then decides over others needs a new snapshot after the lock.
create or replace function baton._require_read_committed()
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if not baton._is_read_committed() then
    perform baton._raise('wrong_isolation', upper(current_setting('transaction_isolation')));
  end if;
end;
$$;
