/*
 * Dispatch: what a replay does with the unfinished tasks. Every start stamps the receipt that it runs under; that
 * delivery is the task's lease. What is not run here, and has no living owner, gets a message of its own.
 */

-- The messages, other than this one, that own started tasks of the run and live. Tasks with a message of their own are
-- left to it, and the owners of a thousand bodies unlocked.
create or replace function baton._live_owners(run_id text, message_id bigint, at timestamptz)
returns bigint[]
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_owner record;
  v_live bigint[] := '{}'::bigint[];
begin
  for v_owner in
    select distinct t.owner_message_id, t.owner_delivery
    from baton.tasks as t
    where t.run_id = _live_owners.run_id
      and t.status = 'started'
      and t.owner_message_id <> _live_owners.message_id
      and not exists (
        select from baton.messages as m where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
      )
    order by t.owner_message_id
  loop
    if baton._claim_lives(v_owner.owner_message_id, v_owner.owner_delivery, _live_owners.at) then
      v_live := v_live || v_owner.owner_delivery;
    end if;
  end loop;
  return v_live;
end;
$$;

-- A task that would be recovered here, and was lost for the last time, fails before anything is started.
create or replace function baton._poisoned_task(run_id text, message baton.messages)
returns baton.tasks
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_task baton.tasks;
begin
  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = _poisoned_task.run_id
    and t.status = 'started'
    and t.owner_message_id = (_poisoned_task.message).message_id
    and t.owner_delivery <> (_poisoned_task.message).delivery
    and t.lapses + 1 >= (select s.max_lapses from baton.settings as s)
    and not exists (
      select
      from baton.messages as m
      where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
    )
  order by t.step_slug, t.task_index
  limit 1;
  v_task.lapses := v_task.lapses + 1;
  return v_task;
end;
$$;

-- Whether bodies may be started under the message: the worker that claimed it, if it said who it is, goes on.
create or replace function baton._may_run(message baton.messages)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return not exists (
    select
    from baton.workers as w
    where w.worker_id = (_may_run.message).claimed_by
      and not baton._goes_on(w)
  );
end;
$$;

create or replace function baton.dispatch_tasks(run_id text, replay_epoch bigint, inline_limit integer default 1)
returns table (outcome text, step_slug text, task_index integer, attempt integer, input jsonb, delay interval)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_settings baton.settings;
  v_run baton.runs;
  v_message baton.messages;
  v_task baton.tasks;
  v_live bigint[];
  v_may_run boolean;
  v_now timestamptz;
begin
  perform baton._check_limit('inline_limit', dispatch_tasks.inline_limit);
  v_run := baton._lock_run(dispatch_tasks.run_id);
  v_message := baton._lock_receipt(v_run.replay_message_id, v_run.replay_delivery);
  v_now := baton._now();
  if not baton._enter_replay(v_run, dispatch_tasks.replay_epoch) then
    outcome := 'terminal';
    return next;
    return;
  elsif (v_message.visible_at > v_now) is not true then
    outcome := 'lost';
    perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'dispatch_tasks');
    return next;
    return;
  end if;

  select s.* into v_settings from baton.settings as s;
  v_may_run := baton._may_run(v_message);
  v_live := baton._live_owners(v_run.run_id, v_message.message_id, v_now);
  if v_may_run then
    loop
      v_task := baton._poisoned_task(v_run.run_id, v_message);
      exit when v_task.run_id is null;
      v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('reason', 'max_lapses'), v_now);
      perform baton._incident(
        v_now, 'limit_reached', queue_name => v_run.queue_name, run_id => v_run.run_id, step_slug => v_task.step_slug,
        task_index => v_task.task_index, detail => jsonb_build_object('lapses', v_task.lapses)
      );
      outcome := 'failed';
      step_slug := v_task.step_slug;
      task_index := v_task.task_index;
      attempt := v_task.attempt;
      return next;
    end loop;
  end if;

  -- Without a join that a plan made for few tasks could do row by row. A ctid stays as it is under the run's lock.
  return query
  with open_tasks as materialized (
    select
      t.ctid as row_id,
      t.step_slug, t.task_index, t.attempt, t.status, t.failures, t.lapses, t.input, t.retry_at, t.last_started_at,
      (
        select s.created_seq from baton.steps as s where s.run_id = t.run_id and s.step_slug = t.step_slug
      ) as created_seq,
      exists (
        select
        from baton.messages as m
        where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
      ) as has_message,
      case
        when t.status = 'created' then null
        when t.owner_message_id = v_message.message_id and t.owner_delivery = v_message.delivery then 'receipt'
        when t.owner_message_id = v_message.message_id then 'message'
        when t.owner_delivery = any (v_live) then 'other'
      end as owner
    from baton.tasks as t
    where t.run_id = v_run.run_id and t.status in ('created', 'started')
  ),
  ranked as (
    select
      o.*,
      o.status = 'created' and o.failures = 0 as is_fresh,
      count(*) filter (where o.owner = 'receipt' or (o.owner = 'message' and v_may_run and not o.has_message)) over ()
      + count(*) filter (where o.status = 'created' and o.failures = 0 and not o.has_message) over (
        order by o.created_seq, o.task_index
      ) as nth_inline
    from open_tasks as o
  ),
  decided as materialized (
    select
      r.row_id, r.step_slug, r.task_index, r.attempt, r.status, r.input, r.retry_at, r.last_started_at, r.created_seq,
      baton._dispatch_decision(
        r.has_message, r.owner, v_may_run, r.is_fresh, r.nth_inline <= coalesce(dispatch_tasks.inline_limit, 1),
        v_settings.inline_ownership
      ) as decision,
      case when r.owner = 'other' then
        baton._lease_remaining(r.last_started_at, v_settings.inline_lease, v_now)
      end as lease
    from ranked as r
  ),
  started as (
    update baton.tasks as t
    set status = 'started',
      attempt = t.attempt + 1,
      lapses = t.lapses + (t.status = 'started')::integer,
      owner_message_id = v_message.message_id,
      owner_delivery = v_message.delivery,
      last_started_at = v_now,
      worker_id = v_message.claimed_by
    from decided as d
    where d.decision = 'execute' and t.ctid = d.row_id
    returning t.step_slug, t.task_index, t.attempt, d.created_seq, d.status = 'started' as is_recovery
  ),
  logged as (
    insert into baton.events (run_id, seq, type, payload, created_at)
    select
      v_run.run_id,
      v_run.last_seq + row_number() over (order by s.created_seq, s.task_index),
      'task_started',
      jsonb_build_object(
        'step_slug', s.step_slug, 'task_index', s.task_index, 'attempt', s.attempt,
        'message_id', v_message.message_id, 'delivery', v_message.delivery
      ),
      v_now
    from started as s
    returning 1
  ),
  positioned as (
    update baton.runs as r
    set last_seq = v_run.last_seq + (select count(*) from logged), wake_seq = v_run.wake_seq
    where r.run_id = v_run.run_id
      and (v_run.wake_seq <> r.wake_seq or v_run.last_seq <> r.last_seq or exists (select from started))
  ),
  sent as (
    insert into baton.messages (
      queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at
    )
    select
      v_run.queue_name, 'task', v_run.run_id, d.step_slug, d.task_index,
      baton._task_key(v_run.run_id, d.step_slug, d.task_index), greatest(v_now, d.retry_at), v_now
    from decided as d
    where d.decision = 'enqueue'
    order by d.created_seq, d.task_index
    returning case when v_settings.message_notify then baton._notify_message(v_run.queue_name) end
  ),
  armed as (
    insert into baton.messages (queue_name, kind, run_id, dedupe_key, visible_at, created_at)
    select
      v_run.queue_name, 'run', v_run.run_id,
      baton._backstop_key(v_run.run_id, d.step_slug, d.task_index, d.attempt), v_now + d.lease, v_now
    from (
      select
        b.*,
        exists (
          select
          from baton.messages as m
          where m.dedupe_key = baton._backstop_key(v_run.run_id, b.step_slug, b.task_index, b.attempt)
        ) as is_armed
      from decided as b
      where b.decision = 'backstop'
    ) as d
    where not d.is_armed
    order by d.created_seq, d.task_index
    returning case when v_settings.message_notify then baton._notify_message(v_run.queue_name) end
  ),
  recovered as (
    insert into baton.incidents (at, kind, queue_name, message_id, run_id, step_slug, task_index, detail)
    select
      v_now, 'owned_recovery', v_run.queue_name, v_message.message_id, v_run.run_id, s.step_slug, s.task_index,
      jsonb_build_object('attempt', s.attempt)
    from started as s
    where s.is_recovery
  )
  select
    d.decision, d.step_slug, d.task_index, d.attempt + (d.decision = 'execute')::integer,
    case when d.decision in ('execute', 'running') then d.input end,
    case d.decision
      when 'backstop' then d.lease
      when 'enqueue' then greatest(d.retry_at - v_now, '0')
    end
  from decided as d
  order by d.created_seq, d.task_index;
end;
$$;

comment on function baton.dispatch_tasks(text, bigint, integer) is
'What a replay does with the unfinished tasks of its run: start some here, see to it that the others are or will be started, once each. Bodies run outside the replay, while the run message is extended.
Arguments: inline_limit, how many bodies may run under this run message at the same time.
Returns: a row a task, in the order of their steps: outcome, step_slug, task_index, attempt, input (of execute and running), delay. queued: it has a message of its own; running: it was started under this receipt already, only a caller that lost the answer runs it; execute: the caller runs it; backstop: another one owns it and lives, and this run will be replayed after delay to look again; enqueue: its message was sent, due after delay; failed: it was lost for the last time. One row lost, where the receipt is not current or its claim has run out; one row terminal, where the run has ended
Raises: PB001, 22023, 25001
Locks: the run, then its message; owners'' messages never waiting';
