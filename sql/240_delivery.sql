/*
 * Delivery: how the request to start a worker leaves the database.
 *
 * pg_net and Supabase Vault are found late and called dynamically: neither need be there. Over the outbox the request
 * is a message of the queue baton.deliveries, and a sender resolves the secret in its own environment.
 */
comment on table baton.secrets is
'Bearer tokens by name, where Supabase Vault is not installed. Read by the owner alone; never shown.
Written by: nobody';
comment on column baton.secrets.secret is 'One line, not empty.';

-- Null where pg_net can be used in this database, else why not.
create or replace function baton._pg_net_problem()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_problem text := baton._schema_problem('pg_net', 'net');
begin
  if v_problem is not null then
    return v_problem;
  elsif to_regprocedure('net.http_post(text,jsonb,jsonb,jsonb,integer)') is null then
    return 'schema net has no function http_post like pg_net''s';
  elsif current_setting('pg_net.database_name', true) is null then
    return 'pg_net is not in shared_preload_libraries';
  elsif current_setting('pg_net.database_name', true) <> current_database() then
    return format(
      'pg_net works for database %s, not for %s', current_setting('pg_net.database_name', true), current_database()
    );
  end if;
  return null;
end;
$$;

create or replace function baton._transport()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_transport text;
begin
  select s.transport into v_transport from baton.settings as s where s.singleton;
  if v_transport = 'auto' then
    v_transport := case when baton._pg_net_problem() is null then 'pg_net' else 'outbox' end;
  end if;
  return v_transport;
end;
$$;

create or replace function baton._credential(secret_name text, out secret text, out problem text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_place text := 'baton.secrets';
begin
  if to_regnamespace('vault') is not null then
    problem := baton._schema_problem('Supabase Vault', 'vault');
  end if;
  if problem is not null then
    return;
  elsif to_regclass('vault.decrypted_secrets') is not null then
    v_place := 'Supabase Vault';
    begin
      execute 'select s.decrypted_secret from vault.decrypted_secrets as s where s.name = $1'
      into secret using _credential.secret_name;
    exception
      when others then
        problem := format('secret %s can''t be read from %s: %s', _credential.secret_name, v_place, sqlerrm);
        return;
    end;
  else
    select s.secret into _credential.secret from baton.secrets as s where s.secret_name = _credential.secret_name;
  end if;
  if secret is null or btrim(secret) = '' then
    problem := format('secret %s is missing or empty in %s', _credential.secret_name, v_place);
  elsif secret ~ '[[:cntrl:]]' then
    problem := format('secret %s in %s has more than one line', _credential.secret_name, v_place);
  end if;
  if problem is not null then
    secret := null;
  end if;
end;
$$;

create or replace function baton._post(url text, body jsonb, headers jsonb, secret_name text, request_timeout interval)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_problem text := baton._pg_net_problem();
  v_secret text;
  v_headers jsonb := _post.headers;
  v_request_id bigint;
begin
  if v_problem is null and _post.secret_name is not null then
    select c.secret, c.problem into v_secret, v_problem from baton._credential(_post.secret_name) as c;
    v_headers := v_headers || jsonb_build_object('Authorization', 'Bearer ' || v_secret);
  end if;
  if v_problem is not null then
    raise exception '%', v_problem;
  end if;
  execute 'select net.http_post(url => $1, body => $2, headers => $3, timeout_milliseconds => $4)'
  into v_request_id
  using _post.url, _post.body, v_headers, (extract(epoch from _post.request_timeout) * 1000)::integer;
  return v_request_id;
exception
  when others then
    raise exception '%', coalesce(
      replace(replace(sqlerrm, v_secret, '***'), regexp_replace(to_json(v_secret)::text, '^"|"$', '', 'g'), '***'),
      sqlerrm
    );
end;
$$;

-- Requests the start of the pending invocation; the request leaves with the caller's commit. Raises where it can't be
-- made, never with the secret in its text.
create or replace function baton._request_start(function baton.worker_functions, transport text)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := _request_start.function;
  v_settings baton.settings;
  v_url text;
  v_body jsonb;
  v_headers jsonb;
  v_request_id bigint;
begin
  select s.* into v_settings from baton.settings as s where s.singleton;
  v_url := coalesce(v_function.url, rtrim(v_settings.base_url, '/') || '/' || v_function.function_name);
  if v_url is null then
    raise exception 'neither the function''s url nor settings.base_url is set';
  end if;
  v_body := jsonb_build_object('invocation_id', v_function.invocation_id, 'function_name', v_function.function_name);
  v_headers := jsonb_build_object(
    'Content-Type', 'application/json', 'Idempotency-Key', v_function.invocation_id
  );

  case _request_start.transport
    when 'pg_net' then
      v_request_id := baton._post(v_url, v_body, v_headers, v_function.secret_name, v_settings.request_timeout);
    when 'outbox' then
      select i.message_id
      into v_request_id
      from baton._insert_keyed(
        'baton.deliveries',
        jsonb_build_object(
          'function_name', v_function.function_name, 'url', v_url, 'headers', v_headers,
          'secret_name', v_function.secret_name, 'body', v_body
        ),
        null, v_function.function_name || e'\x1f' || v_function.invocation_id, null, null
      ) as i;
  end case;

  update baton.worker_functions as f
  set invocation_transport = _request_start.transport, invocation_request_id = v_request_id
  where f.function_name = v_function.function_name;
  return v_request_id;
end;
$$;

create or replace function baton.claim_deliveries(max_messages integer default 1)
returns table (
  message_id bigint,
  delivery bigint,
  payload jsonb,
  failures integer,
  lapses integer,
  visible_at timestamptz
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_secret uuid := gen_random_uuid();
  v_wanted integer := coalesce(claim_deliveries.max_messages, 1);
  v_claimed integer;
  v_delivery record;
begin
  perform baton._check_limit('max_messages', claim_deliveries.max_messages);
  while v_wanted > 0 loop
    v_claimed := 0;
    for v_delivery in
      -- Unlike other messages a delivery has no limit but the end of its invocation.
      update baton.messages as m
      set delivery = baton._delivery(v_secret, m.message_id),
        claimed_at = v_now,
        lapses = m.lapses + (m.claimed_at is not null)::integer,
        visible_at = v_now + baton._visibility()
      where m.message_id = any (
        array(
          select d.message_id
          from baton.messages as d
          where d.queue_name = 'baton.deliveries' and d.visible_at <= v_now
          order by d.visible_at, d.message_id
          limit v_wanted
          for no key update of d skip locked
        )
      )
      returning m.message_id, m.delivery, m.payload, m.failures, m.lapses, m.visible_at
    loop
      v_claimed := v_claimed + 1;
      if exists (
        select
        from baton.worker_functions as f
        where f.function_name = v_delivery.payload ->> 'function_name'
          and f.invocation_id::text = v_delivery.payload -> 'body' ->> 'invocation_id'
          and baton._is_pending(f, v_now)
      ) then
        v_wanted := v_wanted - 1;
        message_id := v_delivery.message_id;
        delivery := v_delivery.delivery;
        payload := v_delivery.payload;
        failures := v_delivery.failures;
        lapses := v_delivery.lapses;
        visible_at := v_delivery.visible_at;
        return next;
      else
        delete from baton.messages as m where m.message_id = v_delivery.message_id;
      end if;
    end loop;
    exit when v_claimed = 0;
  end loop;
end;
$$;

comment on function baton.claim_deliveries(integer) is
'For senders: take requests to start workers from the outbox, as claim takes messages. Each is a POST of payload.body to payload.url with payload.headers and, where payload.secret_name is set, that secret as bearer token. Ack it when it is delivered, fail it with final where it can''t be, else fail it. A request whose invocation is over is dropped.
Returns: a row a request: message_id, delivery, payload (function_name, url, headers, secret_name, body), failures, lapses, visible_at (when the claim runs out)
Raises: 22023
Locks: the messages, never waiting';
