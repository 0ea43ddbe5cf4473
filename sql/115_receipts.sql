/*
 * Receipts: what the holder of a claim may do with its message.
 *
 * A receipt (message_id, delivery) is current while the row has that delivery and is claimed. A claim that ran out
 * stays its holder's until somebody else acts on it.
 *
 * The verbs on several receipts go through them one by one, by id: a join that was planned for a small table, or for
 * more receipts than there are, reads all messages.
 */
create or replace function baton._lock_receipt(message_id bigint, delivery bigint)
returns baton.messages
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message baton.messages;
begin
  select m.*
  into v_message
  from baton.messages as m
  where m.message_id = _lock_receipt.message_id
    and m.delivery = _lock_receipt.delivery
    and m.claimed_at is not null
  for no key update of m;
  return v_message;
end;
$$;

create or replace function baton._visibility()
returns interval
language sql
stable
begin atomic
  select s.visibility
  from baton.settings as s
  where s.singleton;
end;

-- A receipt whose message another delivery has taken is worth an incident; one whose message is gone is not.
create or replace function baton._note_lost(message_id bigint, delivery bigint, verb text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message baton.messages;
begin
  select m.*
  into v_message
  from baton.messages as m
  where m.message_id = _note_lost.message_id
    and m.delivery <> _note_lost.delivery
    and not exists (
      select
      from baton.incidents as i
      where i.message_id = m.message_id
        and i.kind = 'lost'
        and i.detail ->> 'delivery' = _note_lost.delivery::text
    );
  if found then
    perform baton._incident(
      baton._now(), 'lost', queue_name => v_message.queue_name, message_id => v_message.message_id,
      worker_id => v_message.claimed_by,
      detail => jsonb_build_object('verb', _note_lost.verb, 'delivery', _note_lost.delivery)
    );
  end if;
end;
$$;

-- The receipts of an array, in its order. A null in one is no error: like any receipt that is not current it is lost.
create or replace function baton._receipts(receipts jsonb, out ids bigint[], out deliveries bigint[])
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_item jsonb;
begin
  if _receipts.receipts is null or jsonb_typeof(_receipts.receipts) <> 'array' then
    perform baton._raise('invalid_receipts', 'not an array');
  end if;
  begin
    select array_agg(r.message_id), array_agg(r.delivery)
    into _receipts.ids, _receipts.deliveries
    from jsonb_to_recordset(_receipts.receipts) as r (message_id bigint, delivery bigint);
    if array_position(ids, null) is null and array_position(deliveries, null) is null then
      return;
    end if;
  exception
    when invalid_parameter_value or invalid_text_representation or numeric_value_out_of_range then null;
  end;
  select i.value
  into v_item
  from jsonb_array_elements(_receipts.receipts) as i
  where (
    i.value -> 'message_id' is not null
    and i.value -> 'delivery' is not null
    and coalesce(i.value ->> 'message_id', '0') ~ '^[0-9]{1,18}$'
    and coalesce(i.value ->> 'delivery', '0') ~ '^[0-9]{1,18}$'
  ) is not true
  limit 1;
  if found then
    perform baton._raise('invalid_receipts', 'not a receipt: ' || left(v_item::text, 60));
  end if;
end;
$$;

-- What a message is for: a user's message always has a purpose, a run message while its run is open, a task message
-- while its task is unfinished. Read without a lock.
create or replace function baton._has_purpose(message baton.messages)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  case (_has_purpose.message).kind
    when 'run' then
      return exists (
        select from baton.runs as r where r.run_id = (_has_purpose.message).run_id and r.ended_at is null
      );
    when 'task' then
      -- "Is true" keeps it a look-up by the whole key: the index of unfinished tasks has the run alone.
      return exists (
        select
        from baton.tasks as t
        where t.run_id = (_has_purpose.message).run_id
          and t.step_slug = (_has_purpose.message).step_slug
          and t.task_index = (_has_purpose.message).task_index
          and (t.status in ('created', 'started')) is true
      );
    else
      return true;
  end case;
end;
$$;

create or replace function baton._is_current(message_id bigint, delivery bigint)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (
    select
    from baton.messages as m
    where m.message_id = _is_current.message_id and m.delivery = _is_current.delivery and m.claimed_at is not null
  );
end;
$$;

-- What a receipt is told that did not ack: its run or task may have ended since it was looked at. It waits for nobody:
-- the caller may hold messages with higher ids.
create or replace function baton._refuse_ack(message_id bigint, delivery bigint, verb text)
returns text
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform m.message_id
  from baton.messages as m
  where m.message_id = _refuse_ack.message_id
    and m.delivery = _refuse_ack.delivery
    and m.claimed_at is not null
    and not baton._has_purpose(m)
  for update of m skip locked;
  if found then
    delete from baton.messages as m where m.message_id = _refuse_ack.message_id;
    return 'acked';
  elsif baton._is_current(_refuse_ack.message_id, _refuse_ack.delivery) then
    return 'in_use';
  end if;
  perform baton._note_lost(_refuse_ack.message_id, _refuse_ack.delivery, _refuse_ack.verb);
  return 'lost';
end;
$$;

create or replace function baton.ack(message_id bigint, delivery bigint, force boolean default false, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  delete from baton.messages as m
  where m.message_id = ack.message_id
    and m.delivery = ack.delivery
    and m.claimed_at is not null
    and (m.run_id is null or ack.force or not baton._has_purpose(m));
  if found then
    outcome := 'acked';
  else
    outcome := baton._refuse_ack(ack.message_id, ack.delivery, 'ack');
  end if;
end;
$$;

comment on function baton.ack(bigint, bigint, boolean) is
'Remove a message: its work is done. A claim that only ran out still acks.
Arguments: force, to remove a message that its open run or unfinished task needs; the next tick''s recovery brings the run on.
Outcomes: acked; in_use, where its open run or unfinished task needs it (unless forced); lost, where the receipt is not current
Raises: none
Locks: the message';

create or replace function baton.ack_many(receipts jsonb)
returns table (outcome text, message_id bigint)
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
  v_ids bigint[];
  v_deliveries bigint[];
  v_acked bigint[];
  v_acked_deliveries bigint[];
begin
  select r.ids, r.deliveries into v_ids, v_deliveries from baton._receipts(ack_many.receipts) as r;

  -- By the index of the key, and so in its order. "Is true" keeps the receipts from being joined, which could be
  -- planned to read all messages.
  with acked as (
    delete from baton.messages as m
    where m.message_id = any (v_ids)
      and m.claimed_at is not null
      and (
        (m.message_id, m.delivery) in (
          select r.message_id, r.delivery from unnest(v_ids, v_deliveries) as r (message_id, delivery)
        )
      ) is true
      and (m.run_id is null or not baton._has_purpose(m))
    returning m.message_id, m.delivery
  )
  select array_agg(a.message_id), array_agg(a.delivery) into v_acked, v_acked_deliveries from acked as a;
  if cardinality(v_acked) = cardinality(v_ids) then
    return query select 'acked', r.message_id from unnest(v_ids) with ordinality as r (message_id, nth) order by r.nth;
    return;
  end if;

  return query
  select
    case
      when a.delivery is not null and r.nth = min(r.nth) over (partition by r.message_id, r.delivery) then 'acked'
      else baton._refuse_ack(r.message_id, r.delivery, 'ack_many')
    end,
    r.message_id
  from unnest(v_ids, v_deliveries) with ordinality as r (message_id, delivery, nth)
  left join unnest(v_acked, v_acked_deliveries) as a (message_id, delivery)
    on a.message_id = r.message_id and a.delivery = r.delivery
  order by r.nth;
end;
$$;

comment on function baton.ack_many(jsonb) is
'Remove several messages.
Arguments: receipts, an array of objects with message_id and delivery.
Returns: a row each, in their order: outcome as in ack, message_id
Raises: 22023
Locks: the messages, by id';

create or replace function baton.extend(
  message_id bigint, delivery bigint, visibility interval default null, out outcome text, out visible_at timestamptz
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
  v_message baton.messages;
begin
  perform baton._check_interval('visibility', extend.visibility);
  v_message := baton._lock_receipt(extend.message_id, extend.delivery);
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(extend.message_id, extend.delivery, 'extend');
    return;
  elsif not baton._has_purpose(v_message) then
    outcome := 'cancelled';
    delete from baton.messages as m where m.message_id = v_message.message_id;
    return;
  end if;

  update baton.messages as m
  set visible_at = greatest(m.visible_at, baton._now() + coalesce(extend.visibility, baton._visibility()))
  where m.message_id = v_message.message_id
  returning 'extended', m.visible_at into extend.outcome, extend.visible_at;
end;
$$;

comment on function baton.extend(bigint, bigint, interval) is
'Prolong a claim, also one that ran out while nobody acted on it; never shortens it.
Arguments: visibility, from now on, by default settings.visibility.
Outcomes: extended, with visible_at (when it runs out); cancelled: its run or task has ended, it is removed; lost, where the receipt is not current
Raises: 22023
Locks: the message';

create or replace function baton.extend_many(receipts jsonb, visibility interval default null)
returns table (outcome text, message_id bigint, visible_at timestamptz)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids bigint[];
  v_deliveries bigint[];
  v_receipt record;
  v_until timestamptz;
begin
  perform baton._check_interval('visibility', extend_many.visibility);
  select r.ids, r.deliveries into v_ids, v_deliveries from baton._receipts(extend_many.receipts) as r;
  for v_receipt in
    select r.message_id, r.delivery from unnest(v_ids, v_deliveries) as r (message_id, delivery) order by r.message_id
  loop
    perform m.message_id
    from baton.messages as m
    where m.message_id = v_receipt.message_id and m.delivery = v_receipt.delivery and m.claimed_at is not null
    for no key update of m;
  end loop;
  v_until := baton._now() + coalesce(extend_many.visibility, baton._visibility());

  for v_receipt in
    select r.message_id, r.delivery
    from unnest(v_ids, v_deliveries) with ordinality as r (message_id, delivery, nth)
    order by r.nth
  loop
    message_id := v_receipt.message_id;
    delete from baton.messages as m
    where m.message_id = v_receipt.message_id
      and m.delivery = v_receipt.delivery
      and m.claimed_at is not null
      -- As one expression: "run_id is not null" alone would be planned with the index of runs.
      and (m.run_id is null or baton._has_purpose(m)) is not true;
    if found then
      outcome := 'cancelled';
      visible_at := null;
      return next;
      continue;
    end if;
    update baton.messages as m
    set visible_at = greatest(m.visible_at, v_until)
    where m.message_id = v_receipt.message_id and m.delivery = v_receipt.delivery and m.claimed_at is not null
    returning 'extended', m.visible_at into extend_many.outcome, extend_many.visible_at;
    if not found then
      outcome := 'lost';
      perform baton._note_lost(v_receipt.message_id, v_receipt.delivery, 'extend_many');
    end if;
    return next;
  end loop;
end;
$$;

comment on function baton.extend_many(jsonb, interval) is
'Prolong several claims.
Arguments: receipts, an array of objects with message_id and delivery; visibility, as in extend.
Returns: a row each, in their order: outcome as in extend, message_id, visible_at
Raises: 22023
Locks: the messages, by id';
