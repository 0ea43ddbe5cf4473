/*
 * Runs and their events. No payload is in runs: the input is in run_created, output and error in the last event.
 *
 * The index for recovery has the runs that somebody should be driving; suspended ones with nothing unread, and those
 * whose start is delayed, are in none: they are found by their wake_at.
 * It has a column of its own, so that a grant, or a step of a running run, changes nothing that is indexed.
 */
create table baton.runs (
  run_id text not null,
  workflow_name text not null,
  queue_name text not null,
  status text default 'pending' not null,
  last_seq bigint default 0 not null,
  wake_seq bigint default 0 not null,
  replayed_seq bigint default 0 not null,
  wake_pending boolean default false not null,
  failures integer default 0 not null,
  lapses integer default 0 not null,
  wake_at timestamptz,
  replay_epoch bigint,
  replay_ended boolean default true not null,
  replay_message_id bigint,
  replay_delivery bigint,
  replay_backend integer,
  replay_began_at timestamptz,
  created_at timestamptz not null,
  ended_at timestamptz,
  needs_driver boolean default false,
  pruned_at timestamptz,
  wake_message_id bigint,
  constraint runs_pkey primary key (run_id)
) with (
  fillfactor = 70,
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 500,
  autovacuum_analyze_scale_factor = 0.1,
  autovacuum_vacuum_cost_delay = 0
);

create index runs_attention_idx on baton.runs (queue_name, run_id)
where needs_driver;
create index runs_wake_at_idx on baton.runs (wake_at, run_id) where wake_at is not null;
create index runs_ended_idx on baton.runs (pruned_at, ended_at, run_id) where ended_at is not null;

create table baton.recovery_cursors (
  scope text not null,
  queue_name text default '' not null,
  run_id text default '' not null,
  wake_at timestamptz default '-infinity' not null,
  wake_run_id text default '' not null,
  constraint recovery_cursors_pkey primary key (scope)
);

create table baton.events (
  run_id text not null,
  seq bigint not null,
  type text not null,
  correlation_id text,
  payload jsonb,
  created_at timestamptz not null,
  constraint events_pkey primary key (run_id, seq)
);

create unique index events_once_idx on baton.events (run_id, type, correlation_id)
where correlation_id is not null and (type in ('step_created', 'signal_received') or strpos(type, '.') > 0);
