/*
 * Live messages, dead ones, and the marks from which claims look.
 *
 * A row of messages is written a few times and then deleted. The claim index has visible_at, which every claim
 * changes; nothing else indexed does.
 */
create table baton.messages (
  message_id bigint generated always as identity,
  queue_name text not null,
  kind text,
  run_id text,
  step_slug text,
  task_index integer,
  payload jsonb,
  headers jsonb,
  dedupe_key text,
  visible_at timestamptz not null,
  delivery bigint,
  claimed_at timestamptz,
  claimed_by uuid,
  failures integer default 0 not null,
  lapses integer default 0 not null,
  last_error text,
  created_at timestamptz not null
) with (
  fillfactor = 80,
  autovacuum_vacuum_scale_factor = 0.02,
  autovacuum_vacuum_threshold = 500,
  autovacuum_vacuum_insert_scale_factor = 0.1,
  autovacuum_analyze_scale_factor = 0.1,
  autovacuum_analyze_threshold = 500,
  autovacuum_vacuum_cost_delay = 0
);

create index messages_claim_idx on baton.messages (queue_name, visible_at, message_id);
-- After the other index with message_id: of two that cost the same, as in a tiny table, the newer one is planned with.
alter table baton.messages add constraint messages_pkey primary key (message_id);
create unique index messages_key_idx on baton.messages (dedupe_key, queue_name) where dedupe_key is not null;
create index messages_run_idx on baton.messages (run_id, step_slug) where run_id is not null;

create table baton.dead_messages (
  message_id bigint not null,
  queue_name text not null,
  kind text,
  payload jsonb,
  headers jsonb,
  dedupe_key text,
  failures integer not null,
  lapses integer not null,
  last_error text,
  claimed_at timestamptz,
  claimed_by uuid,
  created_at timestamptz not null,
  died_at timestamptz not null,
  reason text not null,
  constraint dead_messages_pkey primary key (message_id),
  constraint dead_messages_reason_check check (reason in ('failures', 'lapses', 'final'))
);

create index dead_messages_queue_idx on baton.dead_messages (queue_name, died_at);
create index dead_messages_died_idx on baton.dead_messages (died_at);

create table baton.queue_marks (
  queue_name text not null,
  mark timestamptz not null,
  marked_at timestamptz not null,
  seen_at timestamptz not null,
  paused_at timestamptz,
  constraint queue_marks_pkey primary key (queue_name)
) with (fillfactor = 50);
