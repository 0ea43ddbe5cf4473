/*
 * release_task: an operator takes a task away from a body that hangs while its handler extends.
 */
create or replace function baton.release_task(
  run_id text, step_slug text, task_index integer, action text default 'requeue', out outcome text, out status text
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
  v_task baton.tasks;
  v_message baton.messages;
  v_now timestamptz;
begin
  perform baton._check_choice('action', coalesce(release_task.action, 'requeue'), 'requeue', 'fail');
  v_run := baton._lock_run(release_task.run_id);
  select m.*
  into v_message
  from baton.messages as m
  where m.dedupe_key = baton._task_key(v_run.run_id, release_task.step_slug, release_task.task_index)
  for no key update of m;
  v_now := baton._now();
  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = v_run.run_id and t.step_slug = release_task.step_slug and t.task_index = release_task.task_index;
  status := v_task.status;
  if not found then
    outcome := 'unknown';
    return;
  elsif v_task.status not in ('created', 'started') then
    outcome := 'terminal';
    return;
  end if;

  outcome := 'released';
  perform baton._incident(
    v_now, 'operator', queue_name => v_run.queue_name, run_id => v_run.run_id, step_slug => v_task.step_slug,
    task_index => v_task.task_index,
    detail => jsonb_build_object('verb', 'release_task', 'action', coalesce(release_task.action, 'requeue'))
  );
  perform baton._notify_control(
    v_run, case release_task.action when 'fail' then 'failed' else 'released' end, v_task.step_slug, v_task.task_index
  );
  if release_task.action = 'fail' then
    v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('reason', 'released'), v_now);
    perform baton._settle_run(v_run, null, v_now);
    perform baton._drop_task_message(v_run.run_id, v_task.step_slug, v_task.task_index, v_message, v_now);
    status := 'failed';
    return;
  end if;
  v_run := baton._release(v_run, v_task, v_now);
  perform baton._save_positions(v_run);
  perform baton._requeue_task(v_run, v_task, v_now, v_message, v_now);
  status := 'created';
end;
$$;

comment on function baton.release_task(text, text, integer, text) is
'For operators, against a body that hangs while its handler extends: attempts up to now are refused from now on.
Arguments: action, requeue: the task is due at once, also where it waits for a retry, and is started anew by whoever claims its message; fail: it has failed for good.
Outcomes: released; terminal: it has ended; unknown; with the task''s status
Raises: 22023, 25001
Locks: the run, then the task''s message, waiting for it';
