/*
 * Steps and tasks: a cache of the log. Outputs and errors are in the events only.
 */
create table baton.steps (
  run_id text not null,
  step_slug text not null,
  status text default 'created' not null,
  task_count integer not null,
  open_tasks integer not null,
  on_exhausted text default 'fail_step' not null,
  max_attempts integer default 3 not null,
  created_seq bigint not null,
  constraint steps_pkey primary key (run_id, step_slug)
) with (fillfactor = 80);

create table baton.tasks (
  run_id text not null,
  step_slug text not null,
  task_index integer not null,
  status text default 'created' not null,
  attempt integer default 0 not null,
  failures integer default 0 not null,
  lapses integer default 0 not null,
  fence_attempt integer default 0 not null,
  owner_message_id bigint,
  owner_delivery bigint,
  last_started_at timestamptz,
  worker_id uuid,
  retry_at timestamptz,
  input jsonb,
  constraint tasks_pkey primary key (run_id, step_slug, task_index)
) with (fillfactor = 80);

create index tasks_open_idx on baton.tasks (run_id) where status in ('created', 'started');
create index tasks_owner_idx on baton.tasks (owner_message_id) where status = 'started';
