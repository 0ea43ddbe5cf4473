/*
 * Steps: creating them, and the one path on which they and their tasks end.
 *
 * Functions that append take the run's row and give it back with last_seq moved on; the verb writes it once.
 */

create or replace function baton._save_positions(run baton.runs)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.runs as r
  set last_seq = (_save_positions.run).last_seq, wake_seq = (_save_positions.run).wake_seq
  where r.run_id = (_save_positions.run).run_id;
end;
$$;

create or replace function baton._task_event(
  run baton.runs, type text, task baton.tasks, detail jsonb, at timestamptz
)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs := _task_event.run;
begin
  v_run.last_seq := baton._append(
    v_run, _task_event.type, null,
    jsonb_build_object(
      'step_slug', (_task_event.task).step_slug, 'task_index', (_task_event.task).task_index,
      'attempt', (_task_event.task).attempt
    ) || _task_event.detail,
    _task_event.at
  );
  return v_run;
end;
$$;

-- Ends an open step without its result: its event, its unfinished tasks, and their unclaimed messages.
create or replace function baton._end_step(
  run baton.runs, step_slug text, status text, detail jsonb, at timestamptz
)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs := _end_step.run;
begin
  v_run.last_seq := baton._append(
    v_run, 'step_' || _end_step.status, null,
    jsonb_build_object('step_slug', _end_step.step_slug) || _end_step.detail, _end_step.at
  );
  update baton.steps as s
  set status = _end_step.status, open_tasks = 0
  where s.run_id = v_run.run_id and s.step_slug = _end_step.step_slug;
  perform baton._notify_control(v_run, _end_step.status, _end_step.step_slug);
  update baton.tasks as t
  set status = case _end_step.status when 'skipped' then 'skipped' else 'cancelled' end
  where t.run_id = v_run.run_id and t.step_slug = _end_step.step_slug and t.status in ('created', 'started');
  with free as (
    select m.message_id
    from baton.messages as m
    where m.run_id = v_run.run_id
      and m.step_slug = _end_step.step_slug
      and (m.claimed_at is null or m.visible_at <= _end_step.at)
    order by m.message_id
    for update of m skip locked
  )
  delete from baton.messages as m where m.message_id = any (array(select f.message_id from free as f));
  return v_run;
end;
$$;

-- A body that was stopped or given up: the task goes back to created, and attempts up to now are refused.
create or replace function baton._release(run baton.runs, task baton.tasks, at timestamptz)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.tasks as t
  set status = 'created',
    fence_attempt = t.attempt,
    lapses = 0,
    retry_at = null,
    owner_message_id = null,
    owner_delivery = null
  where t.run_id = (_release.run).run_id
    and t.step_slug = (_release.task).step_slug
    and t.task_index = (_release.task).task_index;
  return baton._task_event(_release.run, 'task_released', _release.task, '{}', _release.at);
end;
$$;

-- A task that fails for good ends its step as on_exhausted says.
create or replace function baton._exhaust_task(
  run baton.runs, task baton.tasks, detail jsonb, at timestamptz
)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs;
  v_status text;
begin
  v_run := baton._task_event(
    _exhaust_task.run, 'task_failed', _exhaust_task.task, _exhaust_task.detail, _exhaust_task.at
  );
  update baton.tasks as t
  set status = 'failed', failures = (_exhaust_task.task).failures, lapses = (_exhaust_task.task).lapses
  where t.run_id = v_run.run_id
    and t.step_slug = (_exhaust_task.task).step_slug
    and t.task_index = (_exhaust_task.task).task_index;
  select case s.on_exhausted when 'skip_step' then 'skipped' else 'failed' end
  into v_status
  from baton.steps as s
  where s.run_id = v_run.run_id and s.step_slug = (_exhaust_task.task).step_slug;
  v_run := baton._end_step(
    v_run, (_exhaust_task.task).step_slug, v_status,
    jsonb_build_object('task_index', (_exhaust_task.task).task_index) || _exhaust_task.detail, _exhaust_task.at
  );
  v_run.wake_seq := v_run.last_seq;
  return v_run;
end;
$$;

create or replace function baton._check_step(step_slug text, on_exhausted text, max_attempts integer)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_step.on_exhausted not in ('fail_step', 'skip_step')
        then baton._check_choice('on_exhausted', _check_step.on_exhausted, 'fail_step', 'skip_step')
      when _check_step.max_attempts < 1
        then baton._raise('too_small', 'max_attempts', '1', _check_step.max_attempts::text)
      else baton._check_name('step_slug', _check_step.step_slug)
    end;
end;

create or replace function baton.create_step(
  run_id text,
  replay_epoch bigint,
  step_slug text,
  inputs jsonb,
  on_exhausted text default 'fail_step',
  max_attempts integer default 3,
  out outcome text
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
  v_step baton.steps;
  v_now timestamptz;
  v_count integer;
begin
  perform baton._check_step(create_step.step_slug, create_step.on_exhausted, create_step.max_attempts);
  if create_step.inputs is null or jsonb_typeof(create_step.inputs) <> 'array' then
    perform baton._raise('invalid_inputs', coalesce(jsonb_typeof(create_step.inputs), 'null'));
  end if;
  perform baton._check_size('inputs', pg_column_size(create_step.inputs));
  v_run := baton._lock_run(create_step.run_id);
  v_now := baton._now();
  if not baton._enter_replay(v_run, create_step.replay_epoch) then
    outcome := 'terminal';
    return;
  end if;

  v_count := jsonb_array_length(create_step.inputs);
  select s.* into v_step from baton.steps as s where s.run_id = v_run.run_id and s.step_slug = create_step.step_slug;
  if found then
    outcome := case when v_step.task_count = v_count then 'exists' else 'mismatch' end;
    return;
  end if;

  outcome := case v_count when 0 then 'completed' else 'created' end;
  with step as (
    insert into baton.steps as s (
      run_id, step_slug, status, task_count, open_tasks, on_exhausted, max_attempts, created_seq
    )
    values (
      v_run.run_id, create_step.step_slug, create_step.outcome, v_count, v_count,
      coalesce(create_step.on_exhausted, 'fail_step'), coalesce(create_step.max_attempts, 3), v_run.last_seq + 1
    )
    returning s.step_slug, s.task_count, s.on_exhausted, s.max_attempts
  ),
  tasks as (
    insert into baton.tasks (run_id, step_slug, task_index, input)
    select v_run.run_id, create_step.step_slug, i.nth - 1, i.input
    from jsonb_array_elements(create_step.inputs) with ordinality as i (input, nth)
  )
  insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)
  select v_run.run_id, v_run.last_seq + 1, 'step_created', s.step_slug, to_jsonb(s), v_now
  from step as s;
  v_run.last_seq := v_run.last_seq + 1;
  if v_count = 0 then
    v_run.last_seq := baton._append(
      v_run, 'step_completed', null, jsonb_build_object('step_slug', create_step.step_slug), v_now
    );
  end if;
  update baton.runs as r set last_seq = v_run.last_seq where r.run_id = v_run.run_id;
end;
$$;

comment on function baton.create_step(text, bigint, text, jsonb, text, integer) is
'Create a step with its tasks, once: what a replay finds created it only checks.
Arguments: step_slug, unique in the run; inputs, an array, one task each; on_exhausted, what a task that fails for good does to its step: fail_step or skip_step; max_attempts, failures of a task after which it has failed for good.
Outcomes: created; exists; mismatch: it exists with another number of tasks, nothing is changed; completed: it has no tasks; terminal: the run has ended or is unknown
Raises: PB001, 22023, 54000, 25001
Locks: the run';

create or replace function baton.skip_step(
  run_id text,
  step_slug text,
  replay_epoch bigint default null,
  reason text default null,
  out outcome text,
  out status text
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
  v_now timestamptz;
begin
  v_run := baton._lock_run(skip_step.run_id);
  v_now := baton._now();
  if skip_step.replay_epoch is null then
    outcome := case when baton._is_open(v_run.status) then 'done' else 'terminal' end;
  else
    outcome := case when baton._enter_replay(v_run, skip_step.replay_epoch) then 'done' else 'terminal' end;
  end if;
  select s.status
  into skip_step.status
  from baton.steps as s
  where s.run_id = v_run.run_id and s.step_slug = skip_step.step_slug;
  if not found then
    outcome := 'unknown';
  elsif status <> 'created' then
    outcome := 'terminal';
  end if;
  if outcome = 'done' then
    v_run := baton._end_step(
      v_run, skip_step.step_slug, 'skipped', jsonb_build_object('reason', left(skip_step.reason, 1000)), v_now
    );
    status := 'skipped';
    if skip_step.replay_epoch is null then
      v_run.wake_seq := v_run.last_seq;
      perform baton._wake(v_run, v_now);
      perform baton._incident(
        v_now, 'operator', queue_name => v_run.queue_name, run_id => v_run.run_id, step_slug => skip_step.step_slug,
        detail => jsonb_build_object('verb', 'skip_step')
      );
    end if;
    perform baton._save_positions(v_run);
  end if;
end;
$$;

comment on function baton.skip_step(text, text, bigint, text) is
'End a step without its result: its unfinished tasks are skipped.
Arguments: replay_epoch, of the replay that decides it; null: an operator does, and the run is woken; reason, for people; its first 1,000 characters are kept.
Outcomes: done; terminal, where it or its run has ended; unknown; with the step''s status
Raises: PB001, 25001
Locks: the run, then its messages';
