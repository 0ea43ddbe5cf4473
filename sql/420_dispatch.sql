/*
 * Dispatch: what a replay does with the unfinished tasks. Every start stamps the receipt that it runs under; that
 * delivery is the task's lease. What is not run here, and has no living owner, gets a message of its own.
 *
 * Whether a task has a message is asked with "offset 0", which keeps it a look-up a task: planned for few messages they
 * would be read all at once, at each dispatch.
 */

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
    and t.lapses + 1 >= (select s.max_lapses from baton.settings as s where s.singleton)
    and not exists (
      select
      from baton.messages as m
      where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
      offset 0
    )
  order by t.step_slug, t.task_index
  limit 1;
  v_task.lapses := v_task.lapses + 1;
  return v_task;
end;
$$;

-- Whether bodies may be started under a message that the worker claimed: it goes on. One that is not there any more had
-- stopped.
create or replace function baton._may_run(worker_id uuid)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (select from baton.workers as w where w.worker_id = _may_run.worker_id and baton._goes_on(w));
end;
$$;

-- Starts a body under a message: its receipt is stamped, and owns the task from then on. The event is at seq.
create or replace function baton._start(task baton.tasks, message baton.messages, seq bigint, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  with started as (
    update baton.tasks as t
    set status = 'started',
      attempt = t.attempt + 1,
      lapses = (_start.task).lapses,
      owner_message_id = (_start.message).message_id,
      owner_delivery = (_start.message).delivery,
      last_started_at = _start.at,
      worker_id = (_start.message).claimed_by
    where t.run_id = (_start.task).run_id
      and t.step_slug = (_start.task).step_slug
      and t.task_index = (_start.task).task_index
    returning t.run_id, t.step_slug, t.task_index, t.attempt, t.owner_message_id, t.owner_delivery
  )
  insert into baton.events (run_id, seq, type, payload, created_at)
  select
    s.run_id, _start.seq, 'task_started',
    jsonb_build_object(
      'step_slug', s.step_slug, 'task_index', s.task_index, 'attempt', s.attempt, 'message_id', s.owner_message_id,
      'delivery', s.owner_delivery
    ),
    _start.at
  from started as s;
end;
$$;

-- The run is replayed when the lease of a body that somebody else runs is over, once an attempt.
create or replace function baton._arm_backstop(run baton.runs, task baton.tasks, delay interval, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._backstop_key(
    (_arm_backstop.task).run_id, (_arm_backstop.task).step_slug, (_arm_backstop.task).task_index,
    (_arm_backstop.task).attempt
  );
begin
  if not exists (
    select from baton.messages as m where m.dedupe_key = v_key
  ) then
    perform baton._send_run_message(_arm_backstop.run, v_key, _arm_backstop.at + _arm_backstop.delay, _arm_backstop.at);
    perform baton._tally('backstop');
  end if;
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
  v_settings record;
  v_run baton.runs;
  v_message baton.messages;
  v_task baton.tasks;
  v_open record;
  v_running bigint;
  v_lost bigint;
  v_owner text;
  v_may_run boolean;
  v_last_seq bigint;
  v_slugs text[] := '{}'::text[];
  v_indexes integer[] := '{}'::integer[];
  v_due timestamptz[] := '{}'::timestamptz[];
  v_now timestamptz;
begin
  perform baton._check_limit('inline_limit', dispatch_tasks.inline_limit);
  v_run := baton._lock_run(dispatch_tasks.run_id);
  if not baton._enter_replay(v_run, dispatch_tasks.replay_epoch) then
    outcome := 'terminal';
    return next;
    return;
  end if;
  v_message := baton._lock_receipt(v_run.replay_message_id, v_run.replay_delivery);
  v_now := baton._now();
  if (v_message.visible_at > v_now) is not true then
    outcome := 'lost';
    perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'dispatch_tasks');
    return next;
    return;
  end if;

  v_last_seq := v_run.last_seq;
  v_may_run := v_message.claimed_by is null or baton._may_run(v_message.claimed_by);
  loop
    -- The tasks that were started under the message, by this delivery and by earlier ones; the latter only as far as
    -- they are left to it: those with a message of their own are not.
    select
      count(*) filter (where t.owner_delivery = v_message.delivery),
      count(*) filter (
        where t.owner_delivery <> v_message.delivery
          and not exists (
            select from baton.messages as m where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
            offset 0
          )
      )
    into v_running, v_lost
    from baton.tasks as t
    where t.owner_message_id = v_message.message_id and t.status = 'started';
    exit when not v_may_run or v_lost = 0;
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
  if v_may_run then
    v_running := v_running + v_lost;
  end if;

  select s.inline_ownership, s.inline_lease into v_settings from baton.settings as s where s.singleton;
  for v_open in
    select
      t as task,
      exists (
        select from baton.messages as m where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
        offset 0
      ) as has_message
    from baton.tasks as t
    where t.run_id = v_run.run_id and t.status in ('created', 'started')
    order by
      (select s.created_seq from baton.steps as s where s.run_id = t.run_id and s.step_slug = t.step_slug),
      t.task_index
  loop
    v_task := v_open.task;
    v_owner := case
      when v_open.has_message or v_task.status = 'created' then null
      when v_task.owner_message_id = v_message.message_id and v_task.owner_delivery = v_message.delivery then 'receipt'
      when v_task.owner_message_id = v_message.message_id then 'message'
      when baton._claim_lives(v_task.owner_message_id, v_task.owner_delivery, v_now) then 'other'
    end;
    outcome := baton._dispatch_decision(
      v_open.has_message, v_owner, v_may_run, v_task.status = 'created' and v_task.failures = 0,
      v_running < coalesce(dispatch_tasks.inline_limit, 1), v_settings.inline_ownership
    );
    step_slug := v_task.step_slug;
    task_index := v_task.task_index;
    attempt := v_task.attempt;
    input := null;
    delay := null;
    case outcome
      when 'queued' then
        null;
      when 'running' then
        input := v_task.input;
      when 'execute' then
        if v_task.status = 'started' then
          v_task.lapses := v_task.lapses + 1;
          perform baton._incident(
            v_now, 'owned_recovery', queue_name => v_run.queue_name, message_id => v_message.message_id,
            run_id => v_run.run_id, step_slug => v_task.step_slug, task_index => v_task.task_index,
            detail => jsonb_build_object('attempt', v_task.attempt)
          );
        else
          v_running := v_running + 1;
        end if;
        v_run.last_seq := v_run.last_seq + 1;
        perform baton._start(v_task, v_message, v_run.last_seq, v_now);
        attempt := v_task.attempt + 1;
        input := v_task.input;
      when 'backstop' then
        delay := baton._lease_remaining(v_task.last_started_at, v_settings.inline_lease, v_now);
        perform baton._arm_backstop(v_run, v_task, dispatch_tasks.delay, v_now);
      when 'enqueue' then
        v_slugs := v_slugs || v_task.step_slug;
        v_indexes := v_indexes || v_task.task_index;
        v_due := v_due || greatest(v_now, v_task.retry_at);
        delay := greatest(v_task.retry_at - v_now, '0');
    end case;
    return next;
  end loop;

  if v_run.last_seq > v_last_seq then
    update baton.runs as r
    set last_seq = v_run.last_seq, wake_seq = v_run.wake_seq
    where r.run_id = v_run.run_id;
  end if;
  if cardinality(v_slugs) > 0 then
    insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
    select
      v_run.queue_name, 'task', v_run.run_id, e.step_slug, e.task_index,
      baton._task_key(v_run.run_id, e.step_slug, e.task_index), e.due_at, v_now
    from unnest(v_slugs, v_indexes, v_due) with ordinality as e (step_slug, task_index, due_at, nth)
    order by e.nth;
    perform baton._notify_message(v_run.queue_name);
  end if;
end;
$$;

comment on function baton.dispatch_tasks(text, bigint, integer) is
'What a replay does with the unfinished tasks of its run: start some here, see to it that the others are or will be started, once each. Bodies run outside the replay, while the run message is extended.
Arguments: inline_limit, how many bodies may run under this run message at the same time.
Returns: a row a task, in the order of their steps: outcome, step_slug, task_index, attempt, input (of execute and running), delay. queued: it has a message of its own; running: it was started under this receipt already, only a caller that lost the answer runs it; execute: the caller runs it; backstop: another one owns it and lives, and this run will be replayed after delay to look again; enqueue: its message was sent, due after delay; failed: it was lost for the last time. One row lost, where the receipt is not current or its claim has run out; one row terminal, where the run has ended or is unknown
Raises: PB001, 22023, 25001
Locks: the run, then its message; owners'' messages never waiting';
