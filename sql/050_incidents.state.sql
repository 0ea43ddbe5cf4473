create table baton.incidents (
  incident_id bigint generated always as identity,
  at timestamptz not null,
  kind text not null,
  function_name text,
  worker_id uuid,
  invocation_id uuid,
  queue_name text,
  message_id bigint,
  run_id text,
  step_slug text,
  task_index integer,
  detail jsonb,
  constraint incidents_pkey primary key (incident_id)
);

create index incidents_at_idx on baton.incidents (at);
create index incidents_function_idx on baton.incidents (function_name, kind, at) where function_name is not null;
create index incidents_run_idx on baton.incidents (run_id) where run_id is not null;
create index incidents_message_idx on baton.incidents (message_id) where message_id is not null;

create table baton.tallies (
  tally_id bigint generated always as identity,
  kind text not null,
  constraint tallies_pkey primary key (tally_id)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_cost_delay = 0);

create table baton.totals (
  kind text not null,
  total bigint not null,
  constraint totals_pkey primary key (kind)
) with (fillfactor = 50);
