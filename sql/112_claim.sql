/*
 * Claiming: what is due is given out, the longest due first, for a while.
 */

-- What is given out together has one secret. From gen_random_uuid, which setseed can't repeat.
create or replace function baton._delivery(secret uuid, message_id bigint)
returns bigint
language sql
immutable
begin atomic
  select uuid_hash_extended(_delivery.secret, _delivery.message_id) & 9007199254740991;
end;

create or replace function baton._new_delivery()
returns bigint
language sql
volatile
begin atomic
  select baton._delivery(gen_random_uuid(), 0);
end;

-- Failures (a handler said so) and lapses (nobody said anything) have limits of their own.
-- Null while a message may still be given out. It is asked only while no claim of it lives: a claim that is still
-- there has run out, and counts as the lapse that the next claim would book.
create or replace function baton._dead_reason(
  kind text, failures integer, lapses integer, claimed_at timestamptz, max_failures integer, max_lapses integer
)
returns text
language sql
immutable
begin atomic
  select
    case
      when _dead_reason.kind in ('run', 'task') then null
      when _dead_reason.failures >= _dead_reason.max_failures then 'failures'
      when _dead_reason.lapses + (_dead_reason.claimed_at is not null)::integer >= _dead_reason.max_lapses then 'lapses'
    end;
end;

create or replace function baton.claim(
  queue_name text,
  worker_id uuid default null,
  max_messages integer default 1,
  visibility interval default null,
  for_run text default null
)
returns table (
  message_id bigint,
  delivery bigint,
  kind text,
  run_id text,
  step_slug text,
  task_index integer,
  payload jsonb,
  headers jsonb,
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
  v_rules record;
  v_picked bigint[];
begin
  perform
    baton._check_users_queue(claim.queue_name),
    baton._check_limit('max_messages', claim.max_messages),
    baton._check_interval('visibility', claim.visibility);
  if claim.worker_id is not null then
    perform w.worker_id from baton.workers as w where w.worker_id = claim.worker_id and baton._goes_on(w);
    if not found then
      return;
    end if;
  end if;
  select
    s.visibility, s.max_failures, s.max_lapses, q.queue_name is not null as is_registered, q.paused_at,
    case
      when q.marked_at > v_now - baton._mark_age() and q.marked_at <= v_now then q.mark
      else '-infinity'
    end as mark
  into v_rules
  from baton.settings as s
  left join baton.queue_marks as q on q.queue_name = claim.queue_name
  where s.singleton;
  if v_rules.paused_at is not null then
    return;
  end if;
  if claim.for_run is null then
    v_picked := array(
      select m.message_id
      from baton.messages as m
      where m.queue_name = claim.queue_name
        and m.visible_at >= v_rules.mark
        and m.visible_at <= v_now
        and baton._dead_reason(
          m.kind, m.failures, m.lapses, m.claimed_at, v_rules.max_failures, v_rules.max_lapses
        ) is null
      order by m.visible_at, m.message_id
      limit coalesce(claim.max_messages, 1)
      for no key update of m skip locked
    );
  else
    -- "Is true" keeps it a look-up by the run: the index of claims gives the order, and would read what else is due.
    v_picked := array(
      select m.message_id
      from baton.messages as m
      where m.run_id = claim.for_run
        and m.step_slug is null
        and (m.queue_name = claim.queue_name and m.visible_at <= v_now) is true
      order by m.visible_at, m.message_id
      limit coalesce(claim.max_messages, 1)
      for no key update of m skip locked
    );
  end if;

  return query
  update baton.messages as m
  set delivery = baton._delivery(v_secret, m.message_id),
    claimed_at = v_now,
    claimed_by = claim.worker_id,
    lapses = m.lapses + (m.claimed_at is not null)::integer,
    visible_at = v_now + coalesce(claim.visibility, v_rules.visibility)
  where m.message_id = any (v_picked)
  returning
    m.message_id, m.delivery, m.kind, m.run_id, m.step_slug, m.task_index, m.payload, m.headers, m.failures, m.lapses,
    m.visible_at;

  if found and claim.for_run is null and not v_rules.is_registered then
    perform baton._register_queue(claim.queue_name, v_now);
  end if;
end;
$$;

comment on function baton.claim(text, uuid, integer, interval, text) is
'Take messages that are due, the longest due first, and hide them from others until the claim runs out. Message_id and delivery are the receipt that every later verb wants. A message whose last claim ran out counts one lapse; one at its limit is skipped. A stopping, deprecated, stopped or unknown worker gets nothing, nor does anybody from a paused queue.
Arguments: worker_id, null is anonymous; visibility, how long the claim lasts, by default settings.visibility; for_run, only that run''s run messages.
Returns: a row a message, in no order: message_id, delivery, kind (run: begin_replay comes next; task: start_task; else the sender''s own), run_id, step_slug, task_index, payload, headers, failures, lapses, visible_at (when the claim runs out)
Raises: 22023
Locks: the messages, never waiting';
