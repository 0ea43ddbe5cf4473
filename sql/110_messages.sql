/*
 * Messages: sending.
 *
 * A key is looked up before it is inserted: "on conflict" waits for whoever has the other message's row open, and is
 * left to the case that two senders insert one key at the same moment. Inserts go by key, so that such waits can't
 * form a circle.
 *
 * These verbs pin enable_seqscan = off: a plan that a session cached while the table was nearly empty would otherwise
 * read the whole table until the next analyze. With it they pin jit = off, or the price that a disabled plan seems to
 * have, where there is no index to use, would have it compiled at every call; and a generic plan, or beside that price
 * planning anew at every call looks cheap, which it is not.
 */
comment on table baton.messages is
'The live messages of all queues, a row each until they are acked or dead. A queue needs no creation.
Written by: _bury_message, _drop_delivery, _drop_task_message, _end_run, _end_step, _fail_message, _insert_keyed, _lose_replay, _postpone, _prune_runs, _refuse_ack, _requeue_task, _send_run_message, _set_back, _set_timer, _settle_replay, _take_over, ack, ack_many, after_restore, begin_replay, claim, claim_deliveries, complete_tasks, dispatch_tasks, end_replay, extend, extend_many, fail, park, redrive, release_replay, remove_messages, send, send_many, start_run, start_task';
comment on column baton.messages.message_id is 'Stable over every redelivery.';
comment on column baton.messages.kind is 'run (it makes somebody replay a run), task (it is a task to execute), or the sender''s own word.';
comment on column baton.messages.run_id is 'The run of a run or task message.';
comment on column baton.messages.step_slug is 'The step of a task message; null of a run message, which is how those of a run are found among its task messages.';
comment on column baton.messages.task_index is 'The task of a task message.';
comment on column baton.messages.dedupe_key is 'Unique among the live messages of a queue.';
comment on column baton.messages.visible_at is 'When it is due; while it is claimed, when the claim runs out.';
comment on column baton.messages.delivery is
'The claim it was last given out under: a random number below 2^53, new each time.';
comment on column baton.messages.claimed_at is 'Set while the receipt (message_id, delivery) is current.';
comment on column baton.messages.claimed_by is 'The worker that claimed it, if it said.';
comment on column baton.messages.failures is 'How often a handler said that it failed.';
comment on column baton.messages.lapses is 'How often a claim ran out in silence and another one followed.';
comment on column baton.messages.last_error is 'What the last fail said.';

create or replace function baton._check_kind(value text)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_kind.value in ('run', 'task') then baton._raise('reserved_kind', quote_literal(_check_kind.value))
      when _check_kind.value is not null then baton._check_name('kind', _check_kind.value)
    end;
end;

create or replace function baton._check_headers(value jsonb)
returns void
language sql
stable
begin atomic
  select
    case
      when jsonb_typeof(_check_headers.value) <> 'object'
        then baton._raise('invalid_headers', jsonb_typeof(_check_headers.value))
    end;
end;

create or replace function baton._check_payload(payload jsonb, headers jsonb)
returns void
language sql
stable
begin atomic
  select
    baton._check_size(
      'payload with headers',
      coalesce(pg_column_size(_check_payload.payload), 0) + coalesce(pg_column_size(_check_payload.headers), 0)
    );
end;

create or replace function baton._notify_message(queue_name text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_notify('baton_messages', _notify_message.queue_name)
  from baton.settings as s
  where s.singleton and s.message_notify;
end;
$$;

create or replace function baton._insert_keyed(
  queue_name text,
  payload jsonb,
  delay interval,
  dedupe_key text,
  kind text,
  headers jsonb,
  out outcome text,
  out message_id bigint
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz;
begin
  loop
    select m.message_id
    into _insert_keyed.message_id
    from baton.messages as m
    where m.queue_name = _insert_keyed.queue_name and m.dedupe_key = _insert_keyed.dedupe_key;
    if found then
      outcome := 'duplicate';
      return;
    end if;

    v_now := baton._now();
    insert into baton.messages as m (queue_name, kind, payload, headers, dedupe_key, visible_at, created_at)
    values (
      _insert_keyed.queue_name, _insert_keyed.kind, _insert_keyed.payload, _insert_keyed.headers,
      _insert_keyed.dedupe_key, v_now + coalesce(_insert_keyed.delay, '0'), v_now
    )
    on conflict do nothing
    returning m.message_id into _insert_keyed.message_id;
    if found then
      outcome := 'sent';
      perform baton._notify_message(_insert_keyed.queue_name);
      return;
    end if;
  end loop;
end;
$$;

create or replace function baton.send(
  queue_name text,
  payload jsonb,
  delay interval default '0',
  dedupe_key text default null,
  kind text default null,
  headers jsonb default null,
  out outcome text,
  out message_id bigint
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
  v_now timestamptz;
  v_answer record;
begin
  perform
    baton._check_users_queue(send.queue_name),
    baton._check_interval('delay', send.delay),
    baton._check_key(send.dedupe_key),
    baton._check_kind(send.kind),
    baton._check_headers(send.headers),
    baton._check_payload(send.payload, send.headers);
  if send.dedupe_key is null then
    v_now := baton._now();
    insert into baton.messages as m (queue_name, kind, payload, headers, visible_at, created_at)
    values (send.queue_name, send.kind, send.payload, send.headers, v_now + coalesce(send.delay, '0'), v_now)
    returning 'sent', m.message_id into send.outcome, send.message_id;
    perform baton._notify_message(send.queue_name);
  else
    v_answer := baton._insert_keyed(
      send.queue_name, send.payload, send.delay, send.dedupe_key, send.kind, send.headers
    );
    outcome := v_answer.outcome;
    message_id := v_answer.message_id;
  end if;
end;
$$;

comment on function baton.send(text, jsonb, interval, text, text, jsonb) is
'Put a message into a queue, in the caller''s transaction. A key that a live message of the queue holds makes it a duplicate: nothing is changed and that message''s id is answered. The key is free again once that message is acked or dead.
Arguments: delay, until the message is due; dedupe_key, 1 to 500 bytes; kind and headers (an object), the sender''s own.
Outcomes: sent, duplicate; with message_id
Raises: 22023, 54000
Locks: none; waits only for another transaction that is inserting the same key';

-- True where all are payloads and nothing else. Only an item that is more than a small payload needs the whole check.
create or replace function baton._check_messages(messages jsonb)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_item jsonb;
  v_unknown text;
  v_is_plain boolean := true;
begin
  if _check_messages.messages is null or jsonb_typeof(_check_messages.messages) <> 'array' then
    perform baton._raise('invalid_messages', 'not an array');
  end if;
  for v_item in
    select i.value
    from jsonb_array_elements(_check_messages.messages) as i
    where case
      when jsonb_typeof(i.value) = 'object' then i.value - 'payload' <> '{}'
      else true
    end
    or pg_column_size(i.value) > (select s.max_payload_bytes from baton.settings as s where s.singleton)
  loop
    if jsonb_typeof(v_item) <> 'object' then
      perform baton._raise('invalid_messages', 'not an object: ' || left(v_item::text, 60));
    end if;
    select k.name
    into v_unknown
    from jsonb_object_keys(v_item) as k (name)
    where k.name not in ('payload', 'delay', 'dedupe_key', 'kind', 'headers')
    limit 1;
    if found then
      perform baton._raise('invalid_messages', 'unknown key ' || quote_literal(left(v_unknown, 60)));
    end if;
    begin
      perform
        baton._check_interval('delay', (v_item ->> 'delay')::interval),
        baton._check_key(v_item ->> 'dedupe_key'),
        baton._check_kind(v_item ->> 'kind'),
        baton._check_headers(nullif(v_item -> 'headers', 'null')),
        baton._check_payload(v_item -> 'payload', nullif(v_item -> 'headers', 'null'));
    exception
      when invalid_datetime_format or datetime_field_overflow or interval_field_overflow then
        perform baton._raise('invalid_messages', 'not an interval: ' || left(v_item ->> 'delay', 60));
    end;
    v_is_plain := false;
  end loop;
  return v_is_plain;
end;
$$;

create or replace function baton.send_many(queue_name text, messages jsonb)
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_keyed record;
  v_sent record;
  v_outcomes text[];
  v_ids bigint[];
  v_keyless_ids bigint[];
  v_is_plain boolean;
  v_now timestamptz;
begin
  perform baton._check_users_queue(send_many.queue_name);
  v_is_plain := baton._check_messages(send_many.messages);
  if not v_is_plain then
    for v_keyed in
      select i.value as item, i.nth
      from jsonb_array_elements(send_many.messages) with ordinality as i (value, nth)
      where i.value ->> 'dedupe_key' is not null
      order by i.value ->> 'dedupe_key', i.nth
    loop
      v_sent := baton._insert_keyed(
        send_many.queue_name, v_keyed.item -> 'payload', (v_keyed.item ->> 'delay')::interval,
        v_keyed.item ->> 'dedupe_key', v_keyed.item ->> 'kind', nullif(v_keyed.item -> 'headers', 'null')
      );
      v_outcomes[v_keyed.nth] := v_sent.outcome;
      v_ids[v_keyed.nth] := v_sent.message_id;
    end loop;
  end if;

  v_now := baton._now();
  if v_is_plain then
    return query
    insert into baton.messages as m (queue_name, payload, visible_at, created_at)
    select send_many.queue_name, i.value -> 'payload', v_now, v_now
    from jsonb_array_elements(send_many.messages) with ordinality as i (value, nth)
    order by i.nth
    returning 'sent', m.message_id;
    if found then
      perform baton._notify_message(send_many.queue_name);
    end if;
    return;
  end if;
  with added as (
    insert into baton.messages as m (queue_name, kind, payload, headers, visible_at, created_at)
    select
      send_many.queue_name, i.value ->> 'kind', i.value -> 'payload', nullif(i.value -> 'headers', 'null'),
      v_now + coalesce((i.value ->> 'delay')::interval, '0'), v_now
    from jsonb_array_elements(send_many.messages) with ordinality as i (value, nth)
    where i.value ->> 'dedupe_key' is null
    order by i.nth
    returning m.message_id
  )
  select array_agg(a.message_id order by a.message_id) into v_keyless_ids from added as a;
  if v_keyless_ids is not null then
    perform baton._notify_message(send_many.queue_name);
  end if;
  if v_ids is null then
    return query
    select 'sent', i.message_id from unnest(v_keyless_ids) with ordinality as i (message_id, nth) order by i.nth;
    return;
  end if;

  return query
  select coalesce(v_outcomes[i.nth], 'sent'), coalesce(v_ids[i.nth], v_keyless_ids[i.nth_keyless])
  from (
    select
      e.nth, count(*) filter (where e.value ->> 'dedupe_key' is null) over (order by e.nth) as nth_keyless
    from jsonb_array_elements(send_many.messages) with ordinality as e (value, nth)
  ) as i
  order by i.nth;
end;
$$;

comment on function baton.send_many(text, jsonb) is
'Put several messages into a queue, in the caller''s transaction.
Arguments: messages, an array of objects with payload and, where wanted, delay (an interval as text, or seconds), dedupe_key, kind and headers, as in send.
Returns: a row each, in their order: outcome (sent, duplicate), message_id
Raises: 22023, 54000
Locks: none; waits, key by key in their order, only for other transactions that are inserting the same keys';
