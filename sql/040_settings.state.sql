create table baton.settings (
  singleton boolean default true not null,
  transport text default 'auto' not null,
  base_url text,
  request_timeout interval default '5 seconds' not null,
  max_payload_bytes integer default 1048576 not null,
  visibility interval default '30 seconds' not null,
  backoff_base interval default '1 second' not null,
  backoff_max interval default '15 minutes' not null,
  max_failures integer default 10 not null,
  max_lapses integer default 20 not null,
  message_notify boolean default false not null,
  control_notify boolean default true not null,
  recovery boolean default true not null,
  inline_ownership boolean default true not null,
  inline_lease interval default '860 seconds' not null,
  silent_worker_timeout interval default '1 hour' not null,
  retention interval,
  constraint settings_pkey primary key (singleton),
  constraint settings_singleton_check check (singleton),
  constraint settings_transport_check check (transport in ('auto', 'pg_net', 'outbox')),
  constraint settings_base_url_check check (base_url ~ '^https?://[^/?#[:space:][:cntrl:]]+[^?#[:space:][:cntrl:]]*$'),
  constraint settings_request_timeout_check check (request_timeout between '1 millisecond' and '10 minutes'),
  constraint settings_max_payload_bytes_check check (max_payload_bytes >= 1024),
  constraint settings_visibility_check check (visibility between '1 second' and '10 years'),
  constraint settings_backoff_check check (
    backoff_base >= '0' and backoff_max >= backoff_base and backoff_max <= '10 years'
  ),
  constraint settings_max_failures_check check (max_failures > 0),
  constraint settings_max_lapses_check check (max_lapses > 0),
  constraint settings_inline_lease_check check (inline_lease between '1 second' and '10 years'),
  constraint settings_silent_worker_timeout_check check (silent_worker_timeout between '1 second' and '10 years'),
  constraint settings_retention_check check (retention between '0' and '10 years')
);

insert into baton.settings default values;

create table baton.state (
  singleton boolean default true not null,
  last_tick_at timestamptz,
  last_tick_errors jsonb,
  cron_purged_runid bigint default 0 not null,
  pg_net_head_id bigint,
  pg_net_head_since timestamptz,
  identity text,
  constraint state_pkey primary key (singleton),
  constraint state_singleton_check check (singleton)
);

insert into baton.state default values;
