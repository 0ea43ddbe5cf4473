create table baton.worker_functions (
  function_name text not null,
  queue_name text not null,
  url text,
  secret_name text,
  start_mode text default 'http' not null,
  enabled boolean default true not null,
  require_handshake boolean default false not null,
  debounce interval default '6 seconds' not null,
  pending_timeout interval default '60 seconds' not null,
  heartbeat_timeout interval default '15 seconds' not null,
  last_invoked_at timestamptz,
  failed_starts integer default 0 not null,
  invocation_id uuid,
  invocation_status text,
  invocation_expires_at timestamptz,
  invocation_worker_id uuid,
  invocation_error text,
  invocation_detail text,
  invocation_transport text,
  invocation_request_id bigint,
  constraint worker_functions_pkey primary key (function_name),
  constraint worker_functions_start_mode_check check (start_mode in ('http', 'process')),
  constraint worker_functions_invocation_status_check check (invocation_status in ('pending', 'ready', 'failed')),
  constraint worker_functions_invocation_error_check check (
    invocation_error in ('dismissed', 'expired', 'disabled', 'deprecated', 'error')
  ),
  constraint worker_functions_invocation_transport_check check (invocation_transport in ('pg_net', 'outbox'))
) with (fillfactor = 70);

create table baton.workers (
  worker_id uuid not null,
  function_name text not null,
  version text,
  handshake boolean not null,
  control text default 'off' not null,
  started_at timestamptz not null,
  last_heartbeat_at timestamptz not null,
  stopping_at timestamptz,
  stopped_at timestamptz,
  deprecated_at timestamptz,
  constraint workers_pkey primary key (worker_id),
  constraint workers_control_check check (control in ('listening', 'polling', 'off'))
) with (
  fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500
);

create index workers_live_idx on baton.workers (function_name) where stopped_at is null;
create index workers_stopped_idx on baton.workers (stopped_at) where stopped_at is not null;

create table baton.secrets (
  secret_name text not null,
  secret text not null,
  constraint secrets_pkey primary key (secret_name)
);
