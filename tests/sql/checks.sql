/*
 * What holds for every row of runs, steps and tasks. As CHECKs they would be parsed at each write of the package, so
 * they are constraints here only.
 */
alter table baton.runs
add constraint runs_status_check check (
  status = any('{pending, running, suspended, completed, failed, cancelled}'::text[])
),
add constraint runs_needs_driver_check check (
  needs_driver is not distinct from (
    ended_at is null
    and case status
      when 'running' then true
      when 'pending' then wake_pending
      else wake_pending or wake_seq > replayed_seq
    end
  )
);
alter table baton.steps
add constraint steps_status_check check (status = any('{created, completed, failed, skipped, cancelled}'::text[])),
add constraint steps_on_exhausted_check check (on_exhausted = any('{fail_step, skip_step}'::text[]));
alter table baton.tasks
add constraint tasks_status_check check (
  status = any('{created, started, completed, failed, skipped, cancelled}'::text[])
);
