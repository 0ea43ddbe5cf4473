/*
 * How a task ends. The first completion wins, from any attempt since the last release. Whatever ends a step wakes the
 * run once, unless the caller holds a run message of it: that handler begins a replay next.
 */

-- Whether a replay follows by itself: of a handler that holds a run message of the run.
create or replace function baton._replays_next(message baton.messages, run_id text)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    (_replays_next.message).kind = 'run' and (_replays_next.message).run_id = _replays_next.run_id, false
  );
end;

-- A step has ended: writes the run's positions, and wakes it, unless a replay follows by itself.
create or replace function baton._settle_run(run baton.runs, message baton.messages, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform baton._save_positions(_settle_run.run);
  if not baton._replays_next(_settle_run.message, (_settle_run.run).run_id) then
    perform baton._wake(_settle_run.run, _settle_run.at);
  end if;
end;
$$;

-- The task's own message goes: the caller's, or one that nobody holds.
create or replace function baton._drop_task_message(
  run_id text, step_slug text, task_index integer, message baton.messages, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._task_key(
    _drop_task_message.run_id, _drop_task_message.step_slug, _drop_task_message.task_index
  );
begin
  if (_drop_task_message.message).dedupe_key = v_key then
    delete from baton.messages as m where m.message_id = (_drop_task_message.message).message_id;
    return;
  end if;
  delete from baton.messages as d
  where d.message_id = (
    select m.message_id
    from baton.messages as m
    where m.dedupe_key = v_key and (m.claimed_at is null or m.visible_at <= _drop_task_message.at)
    for update of m skip locked
  );
end;
$$;

-- A callback that came after the end is told so, and leaves an incident; of what it names only as much as a name has.
create or replace function baton._note_too_late(
  run_id text, step_slug text, task_index integer, status text, verb text, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform baton._incident(
    _note_too_late.at, 'too_late', run_id => left(_note_too_late.run_id, 200),
    step_slug => left(_note_too_late.step_slug, 200),
    task_index => _note_too_late.task_index,
    detail => jsonb_build_object('verb', _note_too_late.verb, 'status', _note_too_late.status)
  );
end;
$$;

-- The task's own message is due at the given time: the caller's, or one that waits, or a new one.
create or replace function baton._requeue_task(
  run baton.runs, task baton.tasks, due_at timestamptz, message baton.messages, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._task_key(
    (_requeue_task.run).run_id, (_requeue_task.task).step_slug, (_requeue_task.task).task_index
  );
begin
  if (_requeue_task.message).kind = 'task' then
    update baton.messages as m
    set visible_at = _requeue_task.due_at, claimed_at = null
    where m.message_id = (_requeue_task.message).message_id;
  elsif not exists (
    select
    from baton.messages as m
    where m.dedupe_key = v_key
  ) then
    insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
    values (
      (_requeue_task.run).queue_name, 'task', (_requeue_task.run).run_id, (_requeue_task.task).step_slug,
      (_requeue_task.task).task_index, v_key, _requeue_task.due_at, _requeue_task.at
    );
    perform baton._notify_message((_requeue_task.run).queue_name);
  end if;
end;
$$;

create or replace function baton.complete_task(
  run_id text,
  step_slug text,
  task_index integer,
  attempt integer,
  output jsonb,
  message_id bigint,
  delivery bigint,
  out outcome text,
  out step_ended boolean
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
  v_run baton.runs;
  v_message baton.messages;
  v_status text;
  v_now timestamptz;
begin
  perform baton._check_size('output', pg_column_size(complete_task.output));
  v_run := baton._lock_run(complete_task.run_id);
  v_message := baton._lock_receipt(complete_task.message_id, complete_task.delivery);
  v_now := baton._now();
  step_ended := false;
  update baton.tasks as t
  set status = 'completed'
  where t.run_id = v_run.run_id
    and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index
    and baton._completes(t.status, t.fence_attempt, t.attempt, complete_task.attempt);
  if found then
    outcome := 'completed';
    update baton.steps as s
    set open_tasks = s.open_tasks - 1,
      status = case s.open_tasks when 1 then 'completed' else s.status end
    where s.run_id = v_run.run_id and s.step_slug = complete_task.step_slug
    returning s.open_tasks = 0 into complete_task.step_ended;
    v_run.last_seq := baton._append(
      v_run, 'task_completed', null,
      jsonb_build_object(
        'step_slug', complete_task.step_slug, 'task_index', complete_task.task_index,
        'attempt', complete_task.attempt, 'output', complete_task.output
      ),
      v_now
    );
    if step_ended then
      v_run.last_seq := baton._append(
        v_run, 'step_completed', null, jsonb_build_object('step_slug', complete_task.step_slug), v_now
      );
      v_run.wake_seq := v_run.last_seq;
      perform baton._settle_run(v_run, v_message, v_now);
    else
      update baton.runs as r set last_seq = v_run.last_seq where r.run_id = v_run.run_id;
    end if;
  else
    select t.status
    into v_status
    from baton.tasks as t
    where t.run_id = v_run.run_id
      and t.step_slug = complete_task.step_slug
      and t.task_index = complete_task.task_index;
    if v_status in ('created', 'started') then
      outcome := 'lost';
      perform baton._note_lost(complete_task.message_id, complete_task.delivery, 'complete_task');
      return;
    elsif v_status = 'completed' then
      outcome := 'already_completed';
    else
      outcome := 'too_late';
      perform baton._note_too_late(
        complete_task.run_id, complete_task.step_slug, complete_task.task_index, v_status, 'complete_task', v_now
      );
    end if;
  end if;
  perform baton._drop_task_message(
    complete_task.run_id, complete_task.step_slug, complete_task.task_index, v_message, v_now
  );
end;
$$;

comment on function baton.complete_task(text, text, integer, integer, jsonb, bigint, bigint) is
'Record the output of a task. The first completion wins, from any attempt since the task was last released, also after its claim ran out; the task''s own message is removed.
Arguments: attempt, as execute gave it; message_id and delivery, the receipt that the body runs under: the task''s own, or the run message''s.
Outcomes: completed, with step_ended where it was the last of its step (the run is woken, unless a run message of it is the receipt); already_completed; too_late: the task, its step or its run has ended otherwise or is unknown; lost: the attempt was never given out, or was released
Raises: 54000, 25001
Locks: the run, then the message';

create or replace function baton.fail_task(
  run_id text,
  step_slug text,
  task_index integer,
  attempt integer,
  error jsonb,
  message_id bigint,
  delivery bigint,
  retry_delay interval default null,
  final boolean default false,
  out outcome text,
  out retry_at timestamptz,
  out step_ended boolean
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
  v_run baton.runs;
  v_message baton.messages;
  v_task baton.tasks;
  v_max_attempts integer;
  v_now timestamptz;
begin
  perform baton._check_interval('retry_delay', fail_task.retry_delay);
  perform baton._check_size('error', pg_column_size(fail_task.error));
  v_run := baton._lock_run(fail_task.run_id);
  v_message := baton._lock_receipt(fail_task.message_id, fail_task.delivery);
  v_now := baton._now();
  step_ended := false;
  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = v_run.run_id and t.step_slug = fail_task.step_slug and t.task_index = fail_task.task_index;

  if v_task.status is null or v_task.status not in ('created', 'started') then
    outcome := 'too_late';
    perform baton._note_too_late(
      fail_task.run_id, fail_task.step_slug, fail_task.task_index, v_task.status, 'fail_task', v_now
    );
    perform baton._drop_task_message(
      fail_task.run_id, fail_task.step_slug, fail_task.task_index, v_message, v_now
    );
    return;
  elsif (
    v_message.message_id is not null
    and v_task.status = 'started'
    and v_task.attempt = fail_task.attempt
    and v_task.owner_message_id = v_message.message_id
    and v_task.owner_delivery = v_message.delivery
  ) is not true then
    outcome := 'lost';
    perform baton._note_lost(fail_task.message_id, fail_task.delivery, 'fail_task');
    return;
  end if;

  select s.max_attempts
  into v_max_attempts
  from baton.steps as s
  where s.run_id = v_run.run_id and s.step_slug = v_task.step_slug;
  v_task.failures := v_task.failures + 1;
  if fail_task.final or v_task.failures >= v_max_attempts then
    outcome := 'failed';
    step_ended := true;
    v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('error', fail_task.error), v_now);
    perform baton._settle_run(v_run, v_message, v_now);
    perform baton._drop_task_message(v_run.run_id, v_task.step_slug, v_task.task_index, v_message, v_now);
    return;
  end if;

  outcome := 'retrying';
  retry_at := v_now + coalesce(fail_task.retry_delay, baton._backoff(v_task.failures));
  update baton.tasks as t
  set status = 'created',
    failures = v_task.failures,
    lapses = 0,
    retry_at = fail_task.retry_at,
    owner_message_id = null,
    owner_delivery = null
  where t.run_id = v_run.run_id and t.step_slug = v_task.step_slug and t.task_index = v_task.task_index;
  v_run := baton._task_event(
    v_run, 'task_retrying', v_task, jsonb_build_object('error', fail_task.error, 'retry_at', fail_task.retry_at), v_now
  );
  perform baton._save_positions(v_run);
  perform baton._requeue_task(v_run, v_task, retry_at, v_message, v_now);
end;
$$;

comment on function baton.fail_task(text, text, integer, integer, jsonb, bigint, bigint, interval, boolean) is
'Record that a body failed: it is retried under a message of its own, or has failed for good, and its step ends as on_exhausted says.
Arguments: attempt, as execute gave it; error, anything; message_id and delivery, the receipt that the body was started under; retry_delay, by default the back-off of fail; final, no more retries.
Outcomes: retrying, with retry_at; failed, with step_ended (the run is woken, unless a run message of it is the receipt); too_late: the task, its step or its run has ended or is unknown; lost: it is not the current attempt under the receipt that started it, or that is not current
Raises: 22023, 54000, 25001
Locks: the run, then the message';
