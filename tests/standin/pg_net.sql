/*
 * Stand-in for the extension pg_net: the same tables, signatures, grants and errors; pg_net_sender.py is its worker.
 * tests/python/test_pg_net_contract.py holds both to the same points.
 *
 * Left out: requests that arrive twice (curl resends on a reused connection), header injection by CR/LF,
 * invalid UTF-8 in a response, hosts and ports checked as strictly as curl does.
 * Never install it into the database that a preloaded pg_net looks at: that worker finds its tables by name.
 */
create schema net;

create domain net.http_method as text
check (value ilike 'get' or value ilike 'post' or value ilike 'delete');

create unlogged table net.http_request_queue (
  id bigserial,
  method net.http_method not null,
  url text not null,
  headers jsonb,
  body bytea,
  timeout_milliseconds integer not null
);

create unlogged table net._http_response (
  id bigint,
  status_code integer,
  content_type text,
  headers jsonb,
  content text,
  timed_out boolean,
  error_msg text,
  created timestamptz not null default now()
);

create index on net._http_response (created);

create function net._urlencode_string(string varchar)
returns text
language sql
immutable
as $$
  select string_agg(
    case
      when c.octet between 48 and 57 or c.octet between 65 and 90 or c.octet between 97 and 122
        or c.octet in (45, 46, 95, 126) then chr(c.octet)
      else '%' || lpad(to_hex(c.octet), 2, '0')
    end, '' order by c.position)
  from (
    select p.position, get_byte(convert_to(_urlencode_string.string, 'UTF8'), p.position) as octet
    from generate_series(0, octet_length(convert_to(_urlencode_string.string, 'UTF8')) - 1) as p (position)
  ) as c
$$;

create function net._encode_url_with_params_array(url text, params_array text[])
returns text
language plpgsql
immutable
as $$
declare
  v_url text := _encode_url_with_params_array.url;
  v_param text;
begin
  if v_url is null then
    return null;
  end if;
  if v_url !~* '^[a-z][a-z0-9+.-]*://' then
    raise exception 'invalid URL "%": Bad scheme', v_url using errcode = 'XX000';
  elsif v_url !~* '^(https?|ftps?|file)://' then
    raise exception 'invalid URL "%": Unsupported URL scheme', v_url using errcode = 'XX000';
  elsif v_url !~ '^[^:]*://[^/?#]' and v_url !~* '^file:' then
    raise exception 'invalid URL "%": No host part in the URL', v_url using errcode = 'XX000';
  elsif v_url ~ '^[^:]*://[^/?#]*:[^]/?#]*[^]/?#0-9][^]/?#]*($|[/?#])' and v_url !~ '^[^:]*://[^/?#]*@' then
    raise exception 'invalid URL "%": Port number was not a decimal number between 0 and 65535', v_url
      using errcode = 'XX000';
  end if;
  v_url := regexp_replace(v_url, '^([^:]*://[^/?#]+)($|[?#])', '\1/\2');
  foreach v_param in array coalesce(_encode_url_with_params_array.params_array, '{}') loop
    continue when v_param is null;
    v_url := v_url || case when v_url ~ '\?$' then '' when v_url like '%?%' then '&' else '?' end || v_param;
  end loop;
  return v_url;
end;
$$;

create function net.wake()
returns void
language sql
as $$
  select pg_notify('pg_net_standin', 'wake')
$$;

create function net.worker_restart()
returns boolean
language sql
as $$
  select pg_notify('pg_net_standin', 'restart') is not null
$$;

create function net.check_worker_is_up()
returns void
language plpgsql
as $$
begin
  if not exists (select from pg_stat_activity as a where a.application_name like 'pg_net %') then
    raise exception 'the pg_net background worker is not up'
      using detail = 'the pg_net background worker is down due to an internal error and cannot process requests',
      hint = 'make sure that you didn''t modify any of pg_net internal tables';
  end if;
end;
$$;

create function net.wait_until_running()
returns void
language plpgsql
as $$
begin
  while not exists (select from pg_stat_activity as a where a.application_name like 'pg_net %') loop
    perform pg_sleep(0.05);
    perform pg_stat_clear_snapshot();
  end loop;
end;
$$;

create function net._enqueue(
  method text, url text, params jsonb, headers jsonb, timeout_milliseconds integer, body jsonb
)
returns bigint
language plpgsql
as $$
declare
  v_params text[];
  v_id bigint;
begin
  select array_agg(net._urlencode_string(p.key) || '=' || net._urlencode_string(p.value))
  into v_params
  from jsonb_each_text(_enqueue.params) as p;

  insert into net.http_request_queue (method, url, headers, body, timeout_milliseconds)
  values (
    _enqueue.method,
    net._encode_url_with_params_array(_enqueue.url, v_params),
    _enqueue.headers,
    convert_to(_enqueue.body::text, 'UTF8'),
    _enqueue.timeout_milliseconds
  )
  returning http_request_queue.id into v_id;

  perform net.wake();
  return v_id;
end;
$$;

create function net.http_get(
  url text,
  params jsonb default '{}',
  headers jsonb default '{}',
  timeout_milliseconds integer default 5000
)
returns bigint
language plpgsql
as $$
begin
  return net._enqueue('GET', http_get.url, http_get.params, http_get.headers, http_get.timeout_milliseconds, null);
end;
$$;

create function net.http_post(
  url text,
  body jsonb default '{}',
  params jsonb default '{}',
  headers jsonb default '{"Content-Type": "application/json"}',
  timeout_milliseconds integer default 5000
)
returns bigint
language plpgsql
as $$
declare
  v_content_type text;
  v_headers jsonb := http_post.headers;
begin
  select h.value into v_content_type
  from jsonb_each_text(coalesce(v_headers, '{}')) as h
  where lower(h.key) = 'content-type'
  limit 1;

  if v_content_type is null then
    v_headers := v_headers || '{"Content-Type": "application/json"}';
  elsif v_content_type <> 'application/json' then
    raise exception 'Content-Type header must be "application/json"';
  end if;

  return net._enqueue('POST', http_post.url, http_post.params, v_headers, http_post.timeout_milliseconds,
    http_post.body);
end;
$$;

create function net.http_delete(
  url text,
  params jsonb default '{}',
  headers jsonb default '{}',
  timeout_milliseconds integer default 5000,
  body jsonb default null
)
returns bigint
language plpgsql
as $$
begin
  return net._enqueue('DELETE', http_delete.url, http_delete.params, http_delete.headers,
    http_delete.timeout_milliseconds, http_delete.body);
end;
$$;

grant usage on schema net to public;
grant all on all sequences in schema net to public;
grant all on all tables in schema net to public;

/*
 * The parameter that says which database the worker looks at. Set for the database, it reaches the connections made
 * from now on. Where the extension is preloaded, only its configuration file may set it.
 */
do $$
begin
  if current_setting('shared_preload_libraries') !~ '\mpg_net\M' then
    execute format('alter database %I set pg_net.database_name = %L', current_database(), current_database());
    perform set_config('pg_net.database_name', current_database(), false);
  end if;
end;
$$;
