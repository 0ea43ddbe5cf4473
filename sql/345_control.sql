/*
 * The control channel: bodies that run are asked to stop. A hint, sent with the end that it tells of; what holds is in
 * the rows, for terminal_tasks to read. It costs all commits of the database a wait for each other: it is sent only
 * where a body may be running.
 */

-- Called before the tasks are closed: by the end of a run; of a step; or, with a task_index, where a task is taken away
-- from its body. The reason is the end: completed, failed, cancelled, skipped, released.
create or replace function baton._notify_control(
  run baton.runs, reason text, step_slug text default null, task_index integer default null
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_attempt integer;
begin
  -- By the index of unfinished tasks: "is true" keeps that of all owners, which has no run, out of the plan.
  select t.attempt
  into v_attempt
  from baton.tasks as t
  where t.run_id = (_notify_control.run).run_id
    and t.status in ('created', 'started')
    and (t.status = 'started') is true
    and (_notify_control.step_slug is null or t.step_slug = _notify_control.step_slug)
    and (_notify_control.task_index is null or t.task_index = _notify_control.task_index)
  limit 1;
  if found and (select s.control_notify from baton.settings as s where s.singleton) then
    perform pg_notify(
      'baton_control',
      json_strip_nulls(
        json_build_object(
          'v', 1,
          'event', case
            when _notify_control.task_index is not null then 'cancel:task'
            when _notify_control.step_slug is not null then 'cancel:step'
            else 'cancel:run'
          end,
          'queue_name', (_notify_control.run).queue_name,
          'run_id', (_notify_control.run).run_id,
          'step_slug', _notify_control.step_slug,
          'task_index', _notify_control.task_index,
          'attempt', case when _notify_control.task_index is not null then v_attempt end,
          'reason', _notify_control.reason
        )
      )::text
    );
  end if;
end;
$$;
