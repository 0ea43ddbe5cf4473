/* pg_baton 0.5.0, assembled from sql/ by tools/build */
\echo Use "CREATE EXTENSION pg_baton" to load this file. \quit

/* ==== 000_schema.state.sql */

/*
 * The schema, and the guards of an installation.
 *
 * SET LOCAL does nothing outside a transaction: that is how a missing one is noticed. The session is then made
 * read-only, so that a client that goes on after the error leaves nothing behind. The lock makes simultaneous
 * installations wait for each other, so that all but the first are told that the package is there.
 */
set local search_path = pg_catalog, pg_temp;
set local standard_conforming_strings = on;

do $$
begin
  if current_setting('search_path') is distinct from 'pg_catalog, pg_temp' then
    perform set_config('default_transaction_read_only', 'on', false);
  end if;
end;
$$;

do $$
declare
  v_schema oid;
  v_installed text;
begin
  if current_setting('search_path') is distinct from 'pg_catalog, pg_temp' then
    raise exception 'pg_baton must be installed in one transaction'
      using errcode = '25P01', hint = 'psql -X -1 -v ON_ERROR_STOP=1 -f sql/install.sql';
  end if;
  if current_setting('server_version_num')::integer < 150000 then
    raise exception 'pg_baton needs PostgreSQL 15 or newer, this is %', current_setting('server_version')
      using errcode = '0A000';
  end if;

  perform pg_advisory_xact_lock(hashtextextended('pg_baton install', 0));
  perform set_config('baton.older_objects', '{}', true);  -- 900_privileges asks
  v_schema := to_regnamespace('baton');
  if v_schema is null then
    create schema baton;
    return;
  end if;
  if not exists (
    select from pg_namespace as n where n.oid = v_schema and n.nspowner = current_user::regrole
  ) then
    raise exception 'schema baton belongs to another role'
      using errcode = '42501', hint = format(
        'Install as its owner, or, where it is empty, give it away: ALTER SCHEMA baton OWNER TO %I', current_user
      );
  end if;
  if to_regprocedure('baton.version()') is not null then
    execute 'select baton.version()' into v_installed;
    raise exception 'pg_baton % is already installed in this database', v_installed
      using errcode = '42710', hint =
        'To upgrade it: docs/guides/upgrading.md. To install it anew: first sql/uninstall.sql, or DROP EXTENSION.';
  end if;
  if exists (
    select from pg_depend as d
    where d.refclassid = 'pg_namespace'::regclass and d.refobjid = v_schema and d.deptype = 'n'
  ) then
    raise exception 'schema baton is not empty'
      using errcode = '55000', hint = 'pg_baton needs the schema baton for itself: drop or move what is in it.';
  end if;
end;
$$;

/* ==== 040_settings.state.sql */

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

/* ==== 050_incidents.state.sql */

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

/* ==== 100_messages.state.sql */

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

/* ==== 200_workers.state.sql */

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

/* ==== 300_runs.state.sql */

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

/* ==== 400_tasks.state.sql */

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

/* ==== 010_version.sql */

create or replace function baton.version()
returns text
language sql
immutable
begin atomic
  select '0.5.0'::text as version;
end;

comment on function baton.version() is
'The version of the installed package.
Returns: the version, as text
Raises: none
Locks: none';

/* ==== 020_errors.sql */

/*
 * Every exception that the package raises, in one place. What races can bring is an outcome of a verb, never an
 * exception; these are for what a caller did wrong.
 */
create or replace function baton._errors()
returns table (condition text, code text, message text, hint text)
language sql
immutable
begin atomic
  select e.condition, e.code, e.message, e.hint
  from (
    values
    (
      'invalid_name', '22023', '%1$s must be 1 to 200 bytes without control characters, not %2$s',
      'For example orders, or order-7.'
    ),
    (
      'invalid_function_name', '22023', 'a function name has 1 to 200 characters of A-Z a-z 0-9 . _ ~ -, not %1$s',
      'Function names become a part of a URL.'
    ),
    (
      'invalid_key', '22023', 'a key must be 1 to 500 bytes without control characters, not %1$s',
      'Hash long keys.'
    ),
    (
      'reserved_queue', '22023', 'queue %1$s is reserved',
      'Names that begin with "baton." are the package''s own: choose another.'
    ),
    ('reserved_kind', '22023', 'kind %1$s is reserved', 'The kinds run and task are the package''s own.'),
    (
      'invalid_interval', '22023', '%1$s must be between 0 and 10 years, not %2$s',
      'For example 30 seconds, or 2 hours.'
    ),
    (
      'too_small', '22023', '%1$s must be at least %2$s, not %3$s',
      'Leave it out, or pass null, for the default.'
    ),
    ('invalid_time', '22023', '%1$s must be a finite time, not %2$s', 'Leave it out, or pass null, for none.'),
    ('invalid_limit', '22023', '%1$s must not be negative, not %2$s', 'Leave it out, or pass null, for the default.'),
    ('invalid_choice', '22023', '%1$s must be one of %2$s, not %3$s', 'Spell it exactly like one of these.'),
    ('missing_argument', '22023', '%1$s must not be null', 'Pass a value.'),
    ('invalid_headers', '22023', 'headers must be a JSON object, not %1$s', 'For example {"trace": "..."}'),
    ('invalid_url', '22023', 'not an http or https URL: %1$s', 'For example https://example.com/functions/v1/orders'),
    (
      'invalid_messages', '22023', 'messages: %1$s',
      'An array of objects with payload and, where wanted, delay, dedupe_key, kind and headers.'
    ),
    ('invalid_receipts', '22023', 'receipts: %1$s', 'An array of objects with message_id and delivery.'),
    (
      'invalid_schedule', '22023', 'tick_every must be 1 to 59 whole seconds or one minute, not %1$s',
      'Other intervals are beyond pg_cron. Leave it out for 5 seconds.'
    ),
    (
      'too_large', '54000', '%1$s has %2$s bytes, over the limit of %3$s',
      'Store large data elsewhere and send a reference, or raise settings.max_payload_bytes.'
    ),
    ('unknown_function', '42704', 'unknown function: %1$s', 'Register it: baton.register_worker_function(...)'),
    (
      'invalid_inputs', '22023', 'inputs must be a JSON array, one item a task, not %1$s',
      'For a step of one task: [input]'
    ),
    (
      'invalid_completions', '22023', 'completions: %1$s',
      'An array of objects with step_slug, task_index, attempt, output, message_id and delivery.'
    ),
    (
      'invalid_keys', '22023', 'keys: %1$s', 'An array of objects with run_id, step_slug, task_index and attempt.'
    ),
    ('invalid_event_type', '22023', 'a type of one''s own contains a dot, not %1$s', 'For example orders.checked'),
    (
      'invalid_position', '22023', 'seen_seq must be between 0 and last_seq (%1$s), not %2$s',
      'Pass the last position that you have read.'
    ),
    (
      'superseded', 'PB001', 'the replay of run %1$s was superseded: epoch %2$s is not current',
      'Nothing of this transaction stays. Begin anew with the receipt, or drop the message.'
    ),
    ('unknown_role', '42704', 'unknown role: %1$s', 'CREATE ROLE it first: the package makes no roles.'),
    (
      'wrong_isolation', '25001', 'this verb works in READ COMMITTED only, not in %1$s',
      'Call it in a transaction of its own: BEGIN ISOLATION LEVEL READ COMMITTED.'
    )
  ) as e (condition, code, message, hint);
end;

create or replace function baton._raise(condition text, variadic arguments text[])
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_error record;
begin
  select e.code, e.message, e.hint into strict v_error from baton._errors() as e where e.condition = _raise.condition;
  raise exception '%', format(v_error.message, variadic _raise.arguments)
    using errcode = v_error.code, hint = v_error.hint, constraint = _raise.condition;
end;
$$;

/* ==== 025_checks.sql */

/*
 * What an argument may be: names, keys, intervals, sizes; the isolation level of a verb; what may be looked up.
 *
 * The checks of the hot verbs are single expressions, which the planner puts into the caller's. There is no BETWEEN in
 * them: a dump writes it out, and what is read back is not the same function any more.
 */
create or replace function baton._check_name(argument text, value text)
returns void
language sql
stable
begin atomic
  select
    case
      when (
        octet_length(_check_name.value) >= 1
        and octet_length(_check_name.value) <= 200
        and _check_name.value !~ '[\x01-\x1f\x7f-\x9f]'
      ) is not true
        then baton._raise('invalid_name', _check_name.argument, quote_nullable(left(_check_name.value, 60)))
    end;
end;

create or replace function baton._check_key(value text)
returns void
language sql
stable
begin atomic
  select
    case
      when octet_length(_check_key.value) < 1
        or octet_length(_check_key.value) > 500
        or _check_key.value ~ '[\x01-\x1f\x7f-\x9f]'
        then baton._raise('invalid_key', quote_literal(left(_check_key.value, 60)))
    end;
end;

create or replace function baton._check_function_name(value text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_function_name.value is null or _check_function_name.value !~ '^[A-Za-z0-9._~-]{1,200}$' then
    perform baton._raise('invalid_function_name', quote_nullable(left(_check_function_name.value, 60)));
  end if;
end;
$$;

create or replace function baton._check_users_queue(queue_name text)
returns void
language sql
stable
begin atomic
  select
    case
      when starts_with(_check_users_queue.queue_name, 'baton.')
        then baton._raise('reserved_queue', quote_literal(_check_users_queue.queue_name))
      else baton._check_name('queue_name', _check_users_queue.queue_name)
    end;
end;

-- To compare intervals takes each month for 30 days, to add them does not.
create or replace function baton._check_interval(argument text, value interval, shortest interval default '0')
returns void
language sql
stable
begin atomic
  select
    case
      when _check_interval.value < '0'
        or _check_interval.value > '10 years'
        or timestamp '2000-01-01' + _check_interval.value < timestamp '2000-01-01'
        then baton._raise('invalid_interval', _check_interval.argument, _check_interval.value::text)
      when _check_interval.value < _check_interval.shortest
        then baton._raise(
            'too_small', _check_interval.argument, _check_interval.shortest::text, _check_interval.value::text
          )
    end;
end;

create or replace function baton._check_limit(argument text, value integer)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_limit.value < 0
        then baton._raise('invalid_limit', _check_limit.argument, _check_limit.value::text)
    end;
end;

create or replace function baton._check_choice(argument text, value text, variadic choices text[])
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_choice.value is null or _check_choice.value <> all (_check_choice.choices) then
    perform baton._raise(
      'invalid_choice', _check_choice.argument, array_to_string(_check_choice.choices, ', '),
      quote_nullable(left(_check_choice.value, 60))
    );
  end if;
end;
$$;

create or replace function baton._check_large(argument text, bytes integer)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_limit integer;
begin
  select s.max_payload_bytes into v_limit from baton.settings as s where s.singleton;
  if _check_large.bytes > v_limit then
    perform baton._raise('too_large', _check_large.argument, _check_large.bytes::text, v_limit::text);
  end if;
end;
$$;

-- No limit is below 1 kB: what is smaller is not measured against it.
create or replace function baton._check_size(argument text, bytes integer)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_size.bytes > 1024 then baton._check_large(_check_size.argument, _check_size.bytes)
    end;
end;

-- Null where the schema of an optional extension can be used, else why not. To look up a name in a schema without
-- USAGE is an error, even with to_regclass.
create or replace function baton._schema_problem(extension text, schema_name text)
returns text
language sql
stable
begin atomic
  select
    case
      when to_regnamespace(_schema_problem.schema_name) is null
        then format('%s is not in this database', _schema_problem.extension)
      when not has_schema_privilege(_schema_problem.schema_name, 'usage')
        then format(
          '%s can''t be used: role %s has no USAGE on schema %s', _schema_problem.extension, current_user,
          _schema_problem.schema_name
        )
    end;
end;

create or replace function baton._is_read_committed()
returns boolean
language sql
stable
begin atomic
  select current_setting('transaction_isolation') not in ('repeatable read', 'serializable');
end;

-- A verb that locks a row and then decides over others needs a new snapshot after the lock.
create or replace function baton._require_read_committed()
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if not baton._is_read_committed() then
    perform baton._raise('wrong_isolation', upper(current_setting('transaction_isolation')));
  end if;
end;
$$;

/* ==== 030_clock.sql */

/*
 * The one clock. A verb reads it once, after the last lock that it waits for. Tests replace this function; no setting
 * moves it.
 */
create or replace function baton._now()
returns timestamptz
language sql
volatile
begin atomic
  select clock_timestamp();
end;

-- For views: one time a statement, which the planner knows beforehand. It can tell then how few rows are due.
create or replace function baton._statement_time()
returns timestamptz
language sql
stable
begin atomic
  select baton._now();
end;

/* ==== 045_settings.sql */

comment on table baton.settings is
'The settings: one row, changed with UPDATE by the owner of the package. A change holds from the next call on.
Written by: _replace_singleton';
comment on column baton.settings.singleton is 'Always true: there is one row.';
comment on column baton.settings.transport is
'How requests to start workers are sent: pg_net, outbox (see tools/sender), or auto: pg_net where it is usable in this database, else outbox.';
comment on column baton.settings.base_url is
'The URL of a function that has none of its own is base_url, a slash, and its name.';
comment on column baton.settings.request_timeout is
'How long pg_net waits for the answer to a start request. Short: one slow answer delays all requests of a database.';
comment on column baton.settings.max_payload_bytes is 'Limit of a payload with its headers, and of an error text, in bytes; at least 1024.';
comment on column baton.settings.visibility is 'How long a claim lasts where the caller does not say.';
comment on column baton.settings.backoff_base is 'Delay after the first failure; doubled with each further one.';
comment on column baton.settings.backoff_max is 'Longest delay after a failure.';
comment on column baton.settings.max_failures is 'Failures after which a user''s message is dead, or replays of a run that failed in a row after which it fails.';
comment on column baton.settings.max_lapses is 'Claims that ran out in silence after which a user''s message is dead, or replays lost in a row after which a run fails, or starts lost in a row after which a task fails.';
comment on column baton.settings.message_notify is
'Whether send also sends NOTIFY baton_messages with the queue''s name. Off: a NOTIFY makes all commits of a database wait for each other.';
comment on column baton.settings.control_notify is
'Whether an end that concerns a running body sends NOTIFY baton_control. Off: bodies learn it when their worker asks terminal_tasks.';
comment on column baton.settings.recovery is 'Whether tick recovers runs that nobody drives.';
comment on column baton.settings.inline_ownership is
'Whether a task that runs under a living run message is left to it; off: it is queued beside it, and single flight alone keeps it from running twice.';
comment on column baton.settings.inline_lease is 'How long a backstop waits from a start on before it looks again.';
comment on column baton.settings.silent_worker_timeout is 'How long a worker may be silent before tick marks it as stopped.';
comment on column baton.settings.retention is
'How long what has ended is kept: schedule() has it pruned after that. Null: no pruning by schedule.';

comment on table baton.state is
'What the package remembers between ticks: one row.
Written by: _purge_cron_runs, _replace_singleton, _watch_pg_net, after_restore, tick';
comment on column baton.state.singleton is 'Always true: there is one row.';
comment on column baton.state.last_tick_at is 'When tick ran last, by whomever it was called.';
comment on column baton.state.last_tick_errors is 'The parts of the last tick that failed, with their errors; null if none did.';
comment on column baton.state.cron_purged_runid is 'Up to this run, pg_cron''s run history was searched for runs of the package.';

comment on column baton.state.pg_net_head_id is 'The request that stood first in pg_net''s queue at the last tick.';
comment on column baton.state.pg_net_head_since is 'Since when it has stood there.';
comment on column baton.state.identity is
'Which database the rows belong to, as _identity tells it. Another one: they were restored or cloned, and after_restore has not been called.';

-- A restored dump of an extension brings a row for a table that CREATE EXTENSION has filled already: the dump's wins.
create or replace function baton._replace_singleton()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  case tg_table_name
    when 'settings' then
      delete from baton.settings as s where s.singleton;
    when 'state' then
      delete from baton.state as s where s.singleton;
  end case;
  return new;
end;
$$;

create or replace trigger settings_replace before insert on baton.settings
for each row execute function baton._replace_singleton();

create or replace trigger state_replace before insert on baton.state
for each row execute function baton._replace_singleton();

/* ==== 055_incidents.sql */

/*
 * Every repair, limit reached and lost receipt leaves one row. Writing it waits for nobody: no two rows are the same.
 *
 * What metrics() counts is added up apart, so that pruning incidents takes nothing away from a counter: whatever
 * happens adds a tally, a row of its own, and tick folds the tallies into totals. A counter is its total and its
 * tallies.
 */
comment on table baton.incidents is
'What was repaired, given up, refused or done by an operator, a row each.
Written by: _incident, _prune_rest';
comment on column baton.incidents.incident_id is 'Ascending, with gaps.';
comment on column baton.incidents.at is 'When it happened, by the database''s clock.';
comment on column baton.incidents.kind is 'What happened; the view incident_log explains the kinds.';
comment on column baton.incidents.function_name is 'The function concerned, if one is.';
comment on column baton.incidents.worker_id is 'The worker concerned, if one is.';
comment on column baton.incidents.invocation_id is 'The invocation concerned, if one is.';
comment on column baton.incidents.queue_name is 'The queue of the message concerned.';
comment on column baton.incidents.message_id is 'The message concerned, if one is.';
comment on column baton.incidents.run_id is 'The run concerned, if one is.';
comment on column baton.incidents.step_slug is 'The step concerned, if one is.';
comment on column baton.incidents.task_index is 'The task concerned, if one is.';
comment on column baton.incidents.detail is 'What else is known, as an object; never a secret.';

comment on table baton.tallies is
'What happened since the last tick, for the counters of metrics(), a row each.
Written by: _fold_tallies, _tally';
comment on column baton.tallies.kind is 'A kind of incident, or await, or backstop.';

comment on table baton.totals is
'The counters of metrics() as of the last tick, a row a kind: they only grow.
Written by: _fold_tallies';

create or replace function baton._tally(kind text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into baton.tallies (kind) values (_tally.kind);
end;
$$;

-- For tick, which is the only one that writes totals.
create or replace function baton._fold_tallies()
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_folded integer;
begin
  with next as (
    select t.tally_id from baton.tallies as t order by t.tally_id limit 10000 for update of t skip locked
  ),
  folded as (
    delete from baton.tallies as t
    where t.tally_id = any (array(select n.tally_id from next as n))
    returning t.kind
  ),
  added as (
    insert into baton.totals as o (kind, total)
    select f.kind, count(*)
    from folded as f
    group by f.kind
    on conflict (kind) do update set total = o.total + excluded.total
  )
  select count(*)::integer into v_folded from folded;
  return v_folded;
end;
$$;

create or replace function baton._incident(
  at timestamptz,
  kind text,
  function_name text default null,
  worker_id uuid default null,
  invocation_id uuid default null,
  queue_name text default null,
  message_id bigint default null,
  run_id text default null,
  step_slug text default null,
  task_index integer default null,
  detail jsonb default null
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into baton.incidents (
    at, kind, function_name, worker_id, invocation_id, queue_name, message_id, run_id, step_slug, task_index, detail
  )
  values (
    _incident.at, _incident.kind, _incident.function_name, _incident.worker_id, _incident.invocation_id,
    _incident.queue_name, _incident.message_id, _incident.run_id, _incident.step_slug, _incident.task_index,
    _incident.detail
  );
  perform baton._tally(_incident.kind);
end;
$$;

/* ==== 105_queue_marks.sql */

/*
 * Marks: where claims begin to look in a queue.
 *
 * While somebody holds an old snapshot, vacuum can't remove finished messages, and a claim would step over all of
 * them. A mark lies below the earliest due message and at least 5 s behind the clock; tick moves it, up or down. A
 * message that commits below it (its transaction was open, or waited for a key, for longer than that) waits until a
 * tick looks from the start, which it does every 15 s. A mark that is not fresh is not used.
 */
comment on table baton.queue_marks is
'Where claims of a queue begin to look, and whether they may. A queue has a row from its first claim or pause on until it has been empty for an hour and is not paused.
Written by: _move_marks, _register_queue, pause_queue, resume_queue';
comment on column baton.queue_marks.mark is 'No due message that was known to the last look from the start was below it when it was set.';
comment on column baton.queue_marks.marked_at is 'When it was set: claims believe it for 10 s.';
comment on column baton.queue_marks.seen_at is 'When a tick last saw a live message.';
comment on column baton.queue_marks.paused_at is 'Since when the queue is paused; null: it is not.';

create or replace function baton._mark_age()
returns interval
language sql
immutable
begin atomic
  select interval '10 seconds';
end;

create or replace function baton._mark_lag()
returns interval
language sql
immutable
begin atomic
  select interval '5 seconds';
end;

-- Called by a claim, which never waits: two that register one queue at the same moment are kept apart by a lock.
create or replace function baton._register_queue(queue_name text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_try_advisory_xact_lock(hashtextextended('baton.queue_marks ' || _register_queue.queue_name, 0)) then
    insert into baton.queue_marks (queue_name, mark, marked_at, seen_at)
    values (_register_queue.queue_name, '-infinity', '-infinity', _register_queue.at)
    on conflict do nothing;
  end if;
end;
$$;

create or replace function baton._move_marks(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_queue baton.queue_marks;
  v_from timestamptz;
  v_earliest timestamptz;
  v_moved integer := 0;
begin
  for v_queue in
    select q.* from baton.queue_marks as q order by q.marked_at limit 1000 for update of q skip locked
  loop
    v_from := case
      when date_bin('15 seconds', greatest(v_queue.marked_at, 'epoch'), 'epoch')
        = date_bin('15 seconds', _move_marks.at, 'epoch') then v_queue.mark
      else '-infinity'
    end;
    select m.visible_at
    into v_earliest
    from baton.messages as m
    where m.queue_name = v_queue.queue_name and m.visible_at >= v_from
    order by m.visible_at, m.message_id
    limit 1;
    if v_earliest is null and v_queue.paused_at is null and v_queue.seen_at < _move_marks.at - interval '1 hour' then
      delete from baton.queue_marks as q where q.queue_name = v_queue.queue_name;
      continue;
    end if;
    update baton.queue_marks as q
    set mark = least(v_earliest, _move_marks.at - baton._mark_lag()),
      marked_at = _move_marks.at,
      seen_at = case when v_earliest is null then q.seen_at else _move_marks.at end
    where q.queue_name = v_queue.queue_name;
    v_moved := v_moved + 1;
  end loop;
  return v_moved;
end;
$$;

/* ==== 110_messages.sql */

/*
 * Messages: sending.
 *
 * A key is looked up before it is inserted: "on conflict" waits for whoever has the other message's row open, and is
 * left to the case that two senders insert one key at the same moment. Inserts go by key, so that such waits can't
 * form a circle.
 *
 * These verbs pin enable_seqscan = off: a plan that a session cached while the table was nearly empty would otherwise
 * read the whole table until the next analyze. With it they pin jit = off, or the price that a disabled plan seems to
 * have, where there is no index to use, would have it compiled at every call; and a generic plan, or beside that price
 * planning anew at every call looks cheap, which it is not.
 */
comment on table baton.messages is
'The live messages of all queues, a row each until they are acked or dead. A queue needs no creation.
Written by: _bury_message, _drop_delivery, _drop_task_message, _end_run, _end_step, _fail_message, _insert_keyed, _lose_replay, _postpone, _prune_runs, _refuse_ack, _requeue_task, _send_run_message, _set_back, _set_timer, _settle_replay, _take_over, ack, ack_many, after_restore, begin_replay, claim, claim_deliveries, complete_tasks, dispatch_tasks, end_replay, extend, extend_many, fail, park, redrive, release_replay, remove_messages, send, send_many, start_run, start_task';
comment on column baton.messages.message_id is 'Stable over every redelivery.';
comment on column baton.messages.kind is 'run (it makes somebody replay a run), task (it is a task to execute), or the sender''s own word.';
comment on column baton.messages.run_id is 'The run of a run or task message.';
comment on column baton.messages.step_slug is 'The step of a task message; null of a run message, which is how those of a run are found among its task messages.';
comment on column baton.messages.task_index is 'The task of a task message.';
comment on column baton.messages.dedupe_key is 'Unique among the live messages of a queue.';
comment on column baton.messages.visible_at is 'When it is due; while it is claimed, when the claim runs out.';
comment on column baton.messages.delivery is
'The claim it was last given out under: a random number below 2^53, new each time.';
comment on column baton.messages.claimed_at is 'Set while the receipt (message_id, delivery) is current.';
comment on column baton.messages.claimed_by is 'The worker that claimed it, if it said.';
comment on column baton.messages.failures is 'How often a handler said that it failed.';
comment on column baton.messages.lapses is 'How often a claim ran out in silence and another one followed.';
comment on column baton.messages.last_error is 'What the last fail said.';

create or replace function baton._check_kind(value text)
returns void
language sql
stable
begin atomic
  select
    case
      when _check_kind.value in ('run', 'task') then baton._raise('reserved_kind', quote_literal(_check_kind.value))
      when _check_kind.value is not null then baton._check_name('kind', _check_kind.value)
    end;
end;

create or replace function baton._check_headers(value jsonb)
returns void
language sql
stable
begin atomic
  select
    case
      when jsonb_typeof(_check_headers.value) <> 'object'
        then baton._raise('invalid_headers', jsonb_typeof(_check_headers.value))
    end;
end;

create or replace function baton._check_payload(payload jsonb, headers jsonb)
returns void
language sql
stable
begin atomic
  select
    baton._check_size(
      'payload with headers',
      coalesce(pg_column_size(_check_payload.payload), 0) + coalesce(pg_column_size(_check_payload.headers), 0)
    );
end;

create or replace function baton._notify_message(queue_name text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_notify('baton_messages', _notify_message.queue_name)
  from baton.settings as s
  where s.singleton and s.message_notify;
end;
$$;

create or replace function baton._insert_keyed(
  queue_name text,
  payload jsonb,
  delay interval,
  dedupe_key text,
  kind text,
  headers jsonb,
  out outcome text,
  out message_id bigint
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz;
begin
  loop
    select m.message_id
    into _insert_keyed.message_id
    from baton.messages as m
    where m.queue_name = _insert_keyed.queue_name and m.dedupe_key = _insert_keyed.dedupe_key;
    if found then
      outcome := 'duplicate';
      return;
    end if;

    v_now := baton._now();
    insert into baton.messages as m (queue_name, kind, payload, headers, dedupe_key, visible_at, created_at)
    values (
      _insert_keyed.queue_name, _insert_keyed.kind, _insert_keyed.payload, _insert_keyed.headers,
      _insert_keyed.dedupe_key, v_now + coalesce(_insert_keyed.delay, '0'), v_now
    )
    on conflict do nothing
    returning m.message_id into _insert_keyed.message_id;
    if found then
      outcome := 'sent';
      perform baton._notify_message(_insert_keyed.queue_name);
      return;
    end if;
  end loop;
end;
$$;

create or replace function baton.send(
  queue_name text,
  payload jsonb,
  delay interval default '0',
  dedupe_key text default null,
  kind text default null,
  headers jsonb default null,
  out outcome text,
  out message_id bigint
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
  v_now timestamptz;
  v_answer record;
begin
  perform
    baton._check_users_queue(send.queue_name),
    baton._check_interval('delay', send.delay),
    baton._check_key(send.dedupe_key),
    baton._check_kind(send.kind),
    baton._check_headers(send.headers),
    baton._check_payload(send.payload, send.headers);
  if send.dedupe_key is null then
    v_now := baton._now();
    insert into baton.messages as m (queue_name, kind, payload, headers, visible_at, created_at)
    values (send.queue_name, send.kind, send.payload, send.headers, v_now + coalesce(send.delay, '0'), v_now)
    returning 'sent', m.message_id into send.outcome, send.message_id;
    perform baton._notify_message(send.queue_name);
  else
    v_answer := baton._insert_keyed(
      send.queue_name, send.payload, send.delay, send.dedupe_key, send.kind, send.headers
    );
    outcome := v_answer.outcome;
    message_id := v_answer.message_id;
  end if;
end;
$$;

comment on function baton.send(text, jsonb, interval, text, text, jsonb) is
'Put a message into a queue, in the caller''s transaction. A key that a live message of the queue holds makes it a duplicate: nothing is changed and that message''s id is answered. The key is free again once that message is acked or dead.
Arguments: delay, until the message is due; dedupe_key, 1 to 500 bytes; kind and headers (an object), the sender''s own.
Outcomes: sent, duplicate; with message_id
Raises: 22023, 54000
Locks: none; waits only for another transaction that is inserting the same key';

-- True where all are payloads and nothing else. Only an item that is more than a small payload needs the whole check.
create or replace function baton._check_messages(messages jsonb)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_item jsonb;
  v_unknown text;
  v_is_plain boolean := true;
begin
  if _check_messages.messages is null or jsonb_typeof(_check_messages.messages) <> 'array' then
    perform baton._raise('invalid_messages', 'not an array');
  end if;
  for v_item in
    select i.value
    from jsonb_array_elements(_check_messages.messages) as i
    where case
      when jsonb_typeof(i.value) = 'object' then i.value - 'payload' <> '{}'
      else true
    end
    or pg_column_size(i.value) > (select s.max_payload_bytes from baton.settings as s where s.singleton)
  loop
    if jsonb_typeof(v_item) <> 'object' then
      perform baton._raise('invalid_messages', 'not an object: ' || left(v_item::text, 60));
    end if;
    select k.name
    into v_unknown
    from jsonb_object_keys(v_item) as k (name)
    where k.name not in ('payload', 'delay', 'dedupe_key', 'kind', 'headers')
    limit 1;
    if found then
      perform baton._raise('invalid_messages', 'unknown key ' || quote_literal(left(v_unknown, 60)));
    end if;
    begin
      perform
        baton._check_interval('delay', (v_item ->> 'delay')::interval),
        baton._check_key(v_item ->> 'dedupe_key'),
        baton._check_kind(v_item ->> 'kind'),
        baton._check_headers(nullif(v_item -> 'headers', 'null')),
        baton._check_payload(v_item -> 'payload', nullif(v_item -> 'headers', 'null'));
    exception
      when invalid_datetime_format or datetime_field_overflow or interval_field_overflow then
        perform baton._raise('invalid_messages', 'not an interval: ' || left(v_item ->> 'delay', 60));
    end;
    v_is_plain := false;
  end loop;
  return v_is_plain;
end;
$$;

create or replace function baton.send_many(queue_name text, messages jsonb)
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_keyed record;
  v_sent record;
  v_outcomes text[];
  v_ids bigint[];
  v_keyless_ids bigint[];
  v_is_plain boolean;
  v_now timestamptz;
begin
  perform baton._check_users_queue(send_many.queue_name);
  v_is_plain := baton._check_messages(send_many.messages);
  if not v_is_plain then
    for v_keyed in
      select i.value as item, i.nth
      from jsonb_array_elements(send_many.messages) with ordinality as i (value, nth)
      where i.value ->> 'dedupe_key' is not null
      order by i.value ->> 'dedupe_key', i.nth
    loop
      v_sent := baton._insert_keyed(
        send_many.queue_name, v_keyed.item -> 'payload', (v_keyed.item ->> 'delay')::interval,
        v_keyed.item ->> 'dedupe_key', v_keyed.item ->> 'kind', nullif(v_keyed.item -> 'headers', 'null')
      );
      v_outcomes[v_keyed.nth] := v_sent.outcome;
      v_ids[v_keyed.nth] := v_sent.message_id;
    end loop;
  end if;

  v_now := baton._now();
  if v_is_plain then
    return query
    insert into baton.messages as m (queue_name, payload, visible_at, created_at)
    select send_many.queue_name, i.value -> 'payload', v_now, v_now
    from jsonb_array_elements(send_many.messages) with ordinality as i (value, nth)
    order by i.nth
    returning 'sent', m.message_id;
    if found then
      perform baton._notify_message(send_many.queue_name);
    end if;
    return;
  end if;
  with added as (
    insert into baton.messages as m (queue_name, kind, payload, headers, visible_at, created_at)
    select
      send_many.queue_name, i.value ->> 'kind', i.value -> 'payload', nullif(i.value -> 'headers', 'null'),
      v_now + coalesce((i.value ->> 'delay')::interval, '0'), v_now
    from jsonb_array_elements(send_many.messages) with ordinality as i (value, nth)
    where i.value ->> 'dedupe_key' is null
    order by i.nth
    returning m.message_id
  )
  select array_agg(a.message_id order by a.message_id) into v_keyless_ids from added as a;
  if v_keyless_ids is not null then
    perform baton._notify_message(send_many.queue_name);
  end if;
  if v_ids is null then
    return query
    select 'sent', i.message_id from unnest(v_keyless_ids) with ordinality as i (message_id, nth) order by i.nth;
    return;
  end if;

  return query
  select coalesce(v_outcomes[i.nth], 'sent'), coalesce(v_ids[i.nth], v_keyless_ids[i.nth_keyless])
  from (
    select
      e.nth, count(*) filter (where e.value ->> 'dedupe_key' is null) over (order by e.nth) as nth_keyless
    from jsonb_array_elements(send_many.messages) with ordinality as e (value, nth)
  ) as i
  order by i.nth;
end;
$$;

comment on function baton.send_many(text, jsonb) is
'Put several messages into a queue, in the caller''s transaction.
Arguments: messages, an array of objects with payload and, where wanted, delay (an interval as text, or seconds), dedupe_key, kind and headers, as in send.
Returns: a row each, in their order: outcome (sent, duplicate), message_id
Raises: 22023, 54000
Locks: none; waits, key by key in their order, only for other transactions that are inserting the same keys';

/* ==== 112_claim.sql */

/*
 * Claiming: what is due is given out, the longest due first, for a while.
 */

-- What is given out together has one secret. From gen_random_uuid, which setseed can't repeat.
create or replace function baton._delivery(secret uuid, message_id bigint)
returns bigint
language sql
immutable
begin atomic
  select uuid_hash_extended(_delivery.secret, _delivery.message_id) & 9007199254740991;
end;

create or replace function baton._new_delivery()
returns bigint
language sql
volatile
begin atomic
  select baton._delivery(gen_random_uuid(), 0);
end;

-- Failures (a handler said so) and lapses (nobody said anything) have limits of their own.
-- Null while a message may still be given out. It is asked only while no claim of it lives: a claim that is still
-- there has run out, and counts as the lapse that the next claim would book.
create or replace function baton._dead_reason(
  kind text, failures integer, lapses integer, claimed_at timestamptz, max_failures integer, max_lapses integer
)
returns text
language sql
immutable
begin atomic
  select
    case
      when _dead_reason.kind in ('run', 'task') then null
      when _dead_reason.failures >= _dead_reason.max_failures then 'failures'
      when _dead_reason.lapses + (_dead_reason.claimed_at is not null)::integer >= _dead_reason.max_lapses then 'lapses'
    end;
end;

create or replace function baton.claim(
  queue_name text,
  worker_id uuid default null,
  max_messages integer default 1,
  visibility interval default null,
  for_run text default null
)
returns table (
  message_id bigint,
  delivery bigint,
  kind text,
  run_id text,
  step_slug text,
  task_index integer,
  payload jsonb,
  headers jsonb,
  failures integer,
  lapses integer,
  visible_at timestamptz
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_secret uuid := gen_random_uuid();
  v_rules record;
  v_picked bigint[];
begin
  perform
    baton._check_users_queue(claim.queue_name),
    baton._check_limit('max_messages', claim.max_messages),
    baton._check_interval('visibility', claim.visibility);
  if claim.worker_id is not null then
    perform w.worker_id from baton.workers as w where w.worker_id = claim.worker_id and baton._goes_on(w);
    if not found then
      return;
    end if;
  end if;
  select
    s.visibility, s.max_failures, s.max_lapses, q.queue_name is not null as is_registered, q.paused_at,
    case
      when q.marked_at > v_now - baton._mark_age() and q.marked_at <= v_now then q.mark
      else '-infinity'
    end as mark
  into v_rules
  from baton.settings as s
  left join baton.queue_marks as q on q.queue_name = claim.queue_name
  where s.singleton;
  if v_rules.paused_at is not null then
    return;
  end if;
  if claim.for_run is null then
    v_picked := array(
      select m.message_id
      from baton.messages as m
      where m.queue_name = claim.queue_name
        and m.visible_at >= v_rules.mark
        and m.visible_at <= v_now
        and baton._dead_reason(
          m.kind, m.failures, m.lapses, m.claimed_at, v_rules.max_failures, v_rules.max_lapses
        ) is null
      order by m.visible_at, m.message_id
      limit coalesce(claim.max_messages, 1)
      for no key update of m skip locked
    );
  else
    -- "Is true" keeps it a look-up by the run: the index of claims gives the order, and would read what else is due.
    v_picked := array(
      select m.message_id
      from baton.messages as m
      where m.run_id = claim.for_run
        and m.step_slug is null
        and (m.queue_name = claim.queue_name and m.visible_at <= v_now) is true
      order by m.visible_at, m.message_id
      limit coalesce(claim.max_messages, 1)
      for no key update of m skip locked
    );
  end if;

  return query
  update baton.messages as m
  set delivery = baton._delivery(v_secret, m.message_id),
    claimed_at = v_now,
    claimed_by = claim.worker_id,
    lapses = m.lapses + (m.claimed_at is not null)::integer,
    visible_at = v_now + coalesce(claim.visibility, v_rules.visibility)
  where m.message_id = any (v_picked)
  returning
    m.message_id, m.delivery, m.kind, m.run_id, m.step_slug, m.task_index, m.payload, m.headers, m.failures, m.lapses,
    m.visible_at;

  if found and claim.for_run is null and not v_rules.is_registered then
    perform baton._register_queue(claim.queue_name, v_now);
  end if;
end;
$$;

comment on function baton.claim(text, uuid, integer, interval, text) is
'Take messages that are due, the longest due first, and hide them from others until the claim runs out. Message_id and delivery are the receipt that every later verb wants. A message whose last claim ran out counts one lapse; one at its limit is skipped. A stopping, deprecated, stopped or unknown worker gets nothing, nor does anybody from a paused queue.
Arguments: worker_id, null is anonymous; visibility, how long the claim lasts, by default settings.visibility; for_run, only that run''s run messages.
Returns: a row a message, in no order: message_id, delivery, kind (run: begin_replay comes next; task: start_task; else the sender''s own), run_id, step_slug, task_index, payload, headers, failures, lapses, visible_at (when the claim runs out)
Raises: 22023
Locks: the messages, never waiting';

/* ==== 115_receipts.sql */

/*
 * Receipts: what the holder of a claim may do with its message.
 *
 * A receipt (message_id, delivery) is current while the row has that delivery and is claimed. A claim that ran out
 * stays its holder's until somebody else acts on it.
 *
 * The verbs on several receipts go through them one by one, by id: a join that was planned for a small table, or for
 * more receipts than there are, reads all messages.
 */
create or replace function baton._lock_receipt(message_id bigint, delivery bigint)
returns baton.messages
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message baton.messages;
begin
  select m.*
  into v_message
  from baton.messages as m
  where m.message_id = _lock_receipt.message_id
    and m.delivery = _lock_receipt.delivery
    and m.claimed_at is not null
  for no key update of m;
  return v_message;
end;
$$;

create or replace function baton._visibility()
returns interval
language sql
stable
begin atomic
  select s.visibility
  from baton.settings as s
  where s.singleton;
end;

-- A receipt whose message another delivery has taken is worth an incident; one whose message is gone is not.
create or replace function baton._note_lost(message_id bigint, delivery bigint, verb text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message baton.messages;
begin
  select m.*
  into v_message
  from baton.messages as m
  where m.message_id = _note_lost.message_id
    and m.delivery <> _note_lost.delivery
    and not exists (
      select
      from baton.incidents as i
      where i.message_id = m.message_id
        and i.kind = 'lost'
        and i.detail ->> 'delivery' = _note_lost.delivery::text
    );
  if found then
    perform baton._incident(
      baton._now(), 'lost', queue_name => v_message.queue_name, message_id => v_message.message_id,
      worker_id => v_message.claimed_by,
      detail => jsonb_build_object('verb', _note_lost.verb, 'delivery', _note_lost.delivery)
    );
  end if;
end;
$$;

-- The receipts of an array, in its order. A null in one is no error: like any receipt that is not current it is lost.
create or replace function baton._receipts(receipts jsonb, out ids bigint[], out deliveries bigint[])
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_item jsonb;
begin
  if _receipts.receipts is null or jsonb_typeof(_receipts.receipts) <> 'array' then
    perform baton._raise('invalid_receipts', 'not an array');
  end if;
  begin
    select array_agg(r.message_id), array_agg(r.delivery)
    into _receipts.ids, _receipts.deliveries
    from jsonb_to_recordset(_receipts.receipts) as r (message_id bigint, delivery bigint);
    if array_position(ids, null) is null and array_position(deliveries, null) is null then
      return;
    end if;
  exception
    when invalid_parameter_value or invalid_text_representation or numeric_value_out_of_range then null;
  end;
  select i.value
  into v_item
  from jsonb_array_elements(_receipts.receipts) as i
  where (
    i.value -> 'message_id' is not null
    and i.value -> 'delivery' is not null
    and coalesce(i.value ->> 'message_id', '0') ~ '^[0-9]{1,18}$'
    and coalesce(i.value ->> 'delivery', '0') ~ '^[0-9]{1,18}$'
  ) is not true
  limit 1;
  if found then
    perform baton._raise('invalid_receipts', 'not a receipt: ' || left(v_item::text, 60));
  end if;
end;
$$;

-- What a message is for: a user's message always has a purpose, a run message while its run is open, a task message
-- while its task is unfinished. Read without a lock.
create or replace function baton._has_purpose(message baton.messages)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  case (_has_purpose.message).kind
    when 'run' then
      return exists (
        select from baton.runs as r where r.run_id = (_has_purpose.message).run_id and r.ended_at is null
      );
    when 'task' then
      -- "Is true" keeps it a look-up by the whole key: the index of unfinished tasks has the run alone.
      return exists (
        select
        from baton.tasks as t
        where t.run_id = (_has_purpose.message).run_id
          and t.step_slug = (_has_purpose.message).step_slug
          and t.task_index = (_has_purpose.message).task_index
          and (t.status in ('created', 'started')) is true
      );
    else
      return true;
  end case;
end;
$$;

create or replace function baton._is_current(message_id bigint, delivery bigint)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (
    select
    from baton.messages as m
    where m.message_id = _is_current.message_id and m.delivery = _is_current.delivery and m.claimed_at is not null
  );
end;
$$;

-- What a receipt is told that did not ack: its run or task may have ended since it was looked at. It waits for nobody:
-- the caller may hold messages with higher ids.
create or replace function baton._refuse_ack(message_id bigint, delivery bigint, verb text)
returns text
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform m.message_id
  from baton.messages as m
  where m.message_id = _refuse_ack.message_id
    and m.delivery = _refuse_ack.delivery
    and m.claimed_at is not null
    and not baton._has_purpose(m)
  for update of m skip locked;
  if found then
    delete from baton.messages as m where m.message_id = _refuse_ack.message_id;
    return 'acked';
  elsif baton._is_current(_refuse_ack.message_id, _refuse_ack.delivery) then
    return 'in_use';
  end if;
  perform baton._note_lost(_refuse_ack.message_id, _refuse_ack.delivery, _refuse_ack.verb);
  return 'lost';
end;
$$;

create or replace function baton.ack(message_id bigint, delivery bigint, force boolean default false, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  delete from baton.messages as m
  where m.message_id = ack.message_id
    and m.delivery = ack.delivery
    and m.claimed_at is not null
    and (m.run_id is null or ack.force or not baton._has_purpose(m));
  if found then
    outcome := 'acked';
  else
    outcome := baton._refuse_ack(ack.message_id, ack.delivery, 'ack');
  end if;
end;
$$;

comment on function baton.ack(bigint, bigint, boolean) is
'Remove a message: its work is done. A claim that only ran out still acks.
Arguments: force, to remove a message that its open run or unfinished task needs; the next tick''s recovery brings the run on.
Outcomes: acked; in_use, where its open run or unfinished task needs it (unless forced); lost, where the receipt is not current
Raises: none
Locks: the message';

create or replace function baton.ack_many(receipts jsonb)
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids bigint[];
  v_deliveries bigint[];
  v_acked bigint[];
  v_acked_deliveries bigint[];
begin
  select r.ids, r.deliveries into v_ids, v_deliveries from baton._receipts(ack_many.receipts) as r;

  -- By the index of the key, and so in its order. "Is true" keeps the receipts from being joined, which could be
  -- planned to read all messages.
  with acked as (
    delete from baton.messages as m
    where m.message_id = any (v_ids)
      and m.claimed_at is not null
      and (
        (m.message_id, m.delivery) in (
          select r.message_id, r.delivery from unnest(v_ids, v_deliveries) as r (message_id, delivery)
        )
      ) is true
      and (m.run_id is null or not baton._has_purpose(m))
    returning m.message_id, m.delivery
  )
  select array_agg(a.message_id), array_agg(a.delivery) into v_acked, v_acked_deliveries from acked as a;
  if cardinality(v_acked) = cardinality(v_ids) then
    return query select 'acked', r.message_id from unnest(v_ids) with ordinality as r (message_id, nth) order by r.nth;
    return;
  end if;

  return query
  select
    case
      when a.delivery is not null and r.nth = min(r.nth) over (partition by r.message_id, r.delivery) then 'acked'
      else baton._refuse_ack(r.message_id, r.delivery, 'ack_many')
    end,
    r.message_id
  from unnest(v_ids, v_deliveries) with ordinality as r (message_id, delivery, nth)
  left join unnest(v_acked, v_acked_deliveries) as a (message_id, delivery)
    on a.message_id = r.message_id and a.delivery = r.delivery
  order by r.nth;
end;
$$;

comment on function baton.ack_many(jsonb) is
'Remove several messages.
Arguments: receipts, an array of objects with message_id and delivery.
Returns: a row each, in their order: outcome as in ack, message_id
Raises: 22023
Locks: the messages, by id';

create or replace function baton.extend(
  message_id bigint, delivery bigint, visibility interval default null, out outcome text, out visible_at timestamptz
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
  v_message baton.messages;
begin
  perform baton._check_interval('visibility', extend.visibility);
  v_message := baton._lock_receipt(extend.message_id, extend.delivery);
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(extend.message_id, extend.delivery, 'extend');
    return;
  elsif not baton._has_purpose(v_message) then
    outcome := 'cancelled';
    delete from baton.messages as m where m.message_id = v_message.message_id;
    return;
  end if;

  update baton.messages as m
  set visible_at = greatest(m.visible_at, baton._now() + coalesce(extend.visibility, baton._visibility()))
  where m.message_id = v_message.message_id
  returning 'extended', m.visible_at into extend.outcome, extend.visible_at;
end;
$$;

comment on function baton.extend(bigint, bigint, interval) is
'Prolong a claim, also one that ran out while nobody acted on it; never shortens it.
Arguments: visibility, from now on, by default settings.visibility.
Outcomes: extended, with visible_at (when it runs out); cancelled: its run or task has ended, it is removed; lost, where the receipt is not current
Raises: 22023
Locks: the message';

create or replace function baton.extend_many(receipts jsonb, visibility interval default null)
returns table (outcome text, message_id bigint, visible_at timestamptz)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids bigint[];
  v_deliveries bigint[];
  v_receipt record;
  v_until timestamptz;
begin
  perform baton._check_interval('visibility', extend_many.visibility);
  select r.ids, r.deliveries into v_ids, v_deliveries from baton._receipts(extend_many.receipts) as r;
  for v_receipt in
    select r.message_id, r.delivery from unnest(v_ids, v_deliveries) as r (message_id, delivery) order by r.message_id
  loop
    perform m.message_id
    from baton.messages as m
    where m.message_id = v_receipt.message_id and m.delivery = v_receipt.delivery and m.claimed_at is not null
    for no key update of m;
  end loop;
  v_until := baton._now() + coalesce(extend_many.visibility, baton._visibility());

  for v_receipt in
    select r.message_id, r.delivery
    from unnest(v_ids, v_deliveries) with ordinality as r (message_id, delivery, nth)
    order by r.nth
  loop
    message_id := v_receipt.message_id;
    delete from baton.messages as m
    where m.message_id = v_receipt.message_id
      and m.delivery = v_receipt.delivery
      and m.claimed_at is not null
      -- As one expression: "run_id is not null" alone would be planned with the index of runs.
      and (m.run_id is null or baton._has_purpose(m)) is not true;
    if found then
      outcome := 'cancelled';
      visible_at := null;
      return next;
      continue;
    end if;
    update baton.messages as m
    set visible_at = greatest(m.visible_at, v_until)
    where m.message_id = v_receipt.message_id and m.delivery = v_receipt.delivery and m.claimed_at is not null
    returning 'extended', m.visible_at into extend_many.outcome, extend_many.visible_at;
    if not found then
      outcome := 'lost';
      perform baton._note_lost(v_receipt.message_id, v_receipt.delivery, 'extend_many');
    end if;
    return next;
  end loop;
end;
$$;

comment on function baton.extend_many(jsonb, interval) is
'Prolong several claims.
Arguments: receipts, an array of objects with message_id and delivery; visibility, as in extend.
Returns: a row each, in their order: outcome as in extend, message_id, visible_at
Raises: 22023
Locks: the messages, by id';

/* ==== 117_pauses.sql */

/*
 * Pausing a queue: nothing of it is claimed until it is resumed. What is in flight goes on, and so does sending. The
 * pause stands beside the queue's mark, which a claim reads anyway.
 */
create or replace function baton.pause_queue(queue_name text, out outcome text, out was_paused boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz;
begin
  perform baton._check_users_queue(pause_queue.queue_name);
  perform q.queue_name from baton.queue_marks as q where q.queue_name = pause_queue.queue_name for no key update of q;
  v_now := baton._now();
  insert into baton.queue_marks as q (queue_name, mark, marked_at, seen_at, paused_at)
  values (pause_queue.queue_name, '-infinity', '-infinity', v_now, v_now)
  on conflict on constraint queue_marks_pkey do update set paused_at = v_now where q.paused_at is null;
  outcome := 'paused';
  was_paused := not found;
  if not was_paused then
    perform baton._incident(
      v_now, 'operator', queue_name => pause_queue.queue_name, detail => jsonb_build_object('verb', 'pause_queue')
    );
  end if;
end;
$$;

comment on function baton.pause_queue(text) is
'Stop handing out the messages of a queue, from the next claim on. What is claimed goes on: its receipts stay good, replays and bodies end as they would. Messages are sent, and workers started, as before; to stop these, disable their functions.
Outcomes: paused, with was_paused
Raises: 22023
Locks: the queue''s mark';

create or replace function baton.resume_queue(queue_name text, out outcome text, out was_paused boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  perform baton._check_users_queue(resume_queue.queue_name);
  update baton.queue_marks as q
  set paused_at = null
  where q.queue_name = resume_queue.queue_name and q.paused_at is not null;
  outcome := 'resumed';
  was_paused := found;
  if was_paused then
    perform baton._incident(
      baton._now(), 'operator', queue_name => resume_queue.queue_name,
      detail => jsonb_build_object('verb', 'resume_queue')
    );
  end if;
end;
$$;

comment on function baton.resume_queue(text) is
'Hand out the messages of a paused queue again.
Outcomes: resumed, with was_paused
Raises: 22023
Locks: the queue''s mark';

/* ==== 120_dead_messages.sql */

/*
 * The dead, and what an operator does with messages. fail buries a message at its limit at once, tick the others.
 */
comment on table baton.dead_messages is
'Messages that reached a limit, with their history, until they are redriven or discarded.
Written by: _bury_message, _prune_rest, discard, redrive';
comment on column baton.dead_messages.reason is 'failures, lapses, or final: the handler asked for it.';

-- The caller holds the row's lock.
create or replace function baton._bury_message(message baton.messages, reason text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from baton.messages as m where m.message_id = (_bury_message.message).message_id;
  insert into baton.dead_messages (
    message_id, queue_name, kind, payload, headers, dedupe_key, failures, lapses, last_error, claimed_at, claimed_by,
    created_at, died_at, reason
  )
  select
    d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.failures,
    d.lapses + (_bury_message.reason = 'lapses' and d.claimed_at is not null)::integer,
    d.last_error, d.claimed_at, d.claimed_by, d.created_at, _bury_message.at, _bury_message.reason
  from (select (_bury_message.message).*) as d;
  perform baton._incident(
    _bury_message.at, 'limit_reached', queue_name => (_bury_message.message).queue_name,
    message_id => (_bury_message.message).message_id, worker_id => (_bury_message.message).claimed_by,
    detail => jsonb_build_object('reason', _bury_message.reason)
  );
end;
$$;

-- For tick: looks at the first 1,000 due messages of each users' queue, the ones that claims have to step over.
create or replace function baton._bury_messages(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_settings baton.settings;
  v_queue baton.queue_marks;
  v_id bigint;
  v_message baton.messages;
  v_buried integer := 0;
begin
  select s.* into v_settings from baton.settings as s where s.singleton;
  for v_queue in
    select q.* from baton.queue_marks as q where not starts_with(q.queue_name, 'baton.') order by q.queue_name
  loop
    exit when v_buried >= 1000;
    for v_id in
      with due as materialized (
        select m.message_id, m.kind, m.failures, m.lapses, m.claimed_at
        from baton.messages as m
        where m.queue_name = v_queue.queue_name and m.visible_at >= v_queue.mark and m.visible_at <= _bury_messages.at
        order by m.visible_at, m.message_id
        limit 1000
      )
      select d.message_id
      from due as d
      where baton._dead_reason(
        d.kind, d.failures, d.lapses, d.claimed_at, v_settings.max_failures, v_settings.max_lapses
      ) is not null
      order by d.message_id
    loop
      select m.*
      into v_message
      from baton.messages as m
      where m.message_id = v_id
        and m.visible_at <= _bury_messages.at
        and baton._dead_reason(
          m.kind, m.failures, m.lapses, m.claimed_at, v_settings.max_failures, v_settings.max_lapses
        ) is not null
      for update of m skip locked;
      continue when not found;
      perform baton._bury_message(
        v_message,
        baton._dead_reason(
          v_message.kind, v_message.failures, v_message.lapses, v_message.claimed_at, v_settings.max_failures,
          v_settings.max_lapses
        ),
        _bury_messages.at
      );
      v_buried := v_buried + 1;
    end loop;
  end loop;
  return v_buried;
end;
$$;

create or replace function baton.redrive(message_ids bigint[])
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids bigint[] := '{}'::bigint[];
  v_places bigint[] := '{}'::bigint[];
  v_given record;
  v_dead baton.dead_messages;
  v_now timestamptz;
  v_outcomes text[];
begin
  -- All of them before the first key: two dead messages may have had the same one. Looked up by their ids, then sorted:
  -- else it could be planned as a walk through all the dead in that order. Who waited may find the row gone.
  for v_given in
    with given as materialized (
      select d.message_id, d.queue_name, d.dedupe_key
      from baton.dead_messages as d
      where d.message_id = any (redrive.message_ids)
    )
    select g.message_id, min(i.nth) as nth
    from given as g
    inner join unnest(redrive.message_ids) with ordinality as i (message_id, nth) on i.message_id = g.message_id
    group by g.message_id, g.queue_name, g.dedupe_key
    order by g.queue_name, g.dedupe_key, g.message_id
  loop
    perform from baton.dead_messages as d where d.message_id = v_given.message_id for update of d;
    if found then
      v_ids := v_ids || v_given.message_id;
      v_places := v_places || v_given.nth;
    end if;
  end loop;

  for v_n in 1 .. cardinality(v_ids) loop
    select d.* into v_dead from baton.dead_messages as d where d.message_id = v_ids[v_n];
    v_now := baton._now();
    if exists (
      select from baton.messages as m where m.queue_name = v_dead.queue_name and m.dedupe_key = v_dead.dedupe_key
    ) then
      v_outcomes[v_places[v_n]] := 'key_taken';
      continue;
    end if;
    insert into baton.messages (
      message_id, queue_name, kind, payload, headers, dedupe_key, visible_at, last_error, created_at
    )
    overriding system value
    values (
      v_dead.message_id, v_dead.queue_name, v_dead.kind, v_dead.payload, v_dead.headers, v_dead.dedupe_key, v_now,
      v_dead.last_error, v_dead.created_at
    )
    on conflict do nothing;
    if not found then
      v_outcomes[v_places[v_n]] := 'key_taken';
      continue;
    end if;
    delete from baton.dead_messages as d where d.message_id = v_dead.message_id;
    v_outcomes[v_places[v_n]] := 'redriven';
    perform baton._incident(
      v_now, 'operator', queue_name => v_dead.queue_name, message_id => v_dead.message_id,
      detail => jsonb_build_object('verb', 'redrive')
    );
  end loop;

  return query
  select coalesce(v_outcomes[i.nth], 'unknown'), i.message_id
  from unnest(redrive.message_ids) with ordinality as i (message_id, nth)
  order by i.nth;
end;
$$;

comment on function baton.redrive(bigint[]) is
'Bring dead messages back: same id, both counters at 0, due at once.
Returns: a row an id, in their order: outcome, message_id. redriven; key_taken, where a live message of the queue holds its key by now; unknown, where it isn''t dead
Raises: none
Locks: the dead messages, by queue and key; waits for another transaction that is inserting the same key';

-- The ids that a verb was given, and whether it is done with each: one that is given twice is done once.
create or replace function baton._answers_by_id(message_ids bigint[], done bigint[])
returns table (message_id bigint, nth bigint, is_done boolean)
language sql
immutable
begin atomic
  select
    i.message_id,
    i.nth,
    i.nth = min(i.nth) over (partition by i.message_id)
      and i.message_id in (select d.message_id from unnest(_answers_by_id.done) as d (message_id)) as is_done
  from unnest(_answers_by_id.message_ids) with ordinality as i (message_id, nth);
end;

create or replace function baton.discard(message_ids bigint[])
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_dead record;
  v_discarded bigint[];
begin
  -- As in redrive.
  for v_dead in
    with given as materialized (
      select d.message_id, d.queue_name, d.dedupe_key
      from baton.dead_messages as d
      where d.message_id = any (discard.message_ids)
    )
    select g.message_id, g.queue_name
    from given as g
    order by g.queue_name, g.dedupe_key, g.message_id
  loop
    delete from baton.dead_messages as d where d.message_id = v_dead.message_id;
    continue when not found;
    v_discarded := v_discarded || v_dead.message_id;
    perform baton._incident(
      baton._now(), 'operator', queue_name => v_dead.queue_name, message_id => v_dead.message_id,
      detail => jsonb_build_object('verb', 'discard')
    );
  end loop;

  return query
  select case when i.is_done then 'discarded' else 'unknown' end, i.message_id
  from baton._answers_by_id(discard.message_ids, v_discarded) as i
  order by i.nth;
end;
$$;

comment on function baton.discard(bigint[]) is
'Remove dead messages for good.
Returns: a row an id, in their order: outcome, message_id. discarded; unknown, where it isn''t dead
Raises: none
Locks: the dead messages, by queue and key';

create or replace function baton.remove_messages(message_ids bigint[])
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_message record;
  v_removed bigint[];
begin
  for v_message in
    with free as (
      select m.message_id
      from baton.messages as m
      where m.message_id = any (remove_messages.message_ids)
        and not starts_with(m.queue_name, 'baton.')
        and m.run_id is null
        and (m.claimed_at is null or m.visible_at <= v_now)
      order by m.message_id
      for update of m skip locked
    )
    delete from baton.messages as m
    where m.message_id = any (array(select f.message_id from free as f))
    returning m.message_id, m.queue_name
  loop
    v_removed := v_removed || v_message.message_id;
    perform baton._incident(
      v_now, 'operator', queue_name => v_message.queue_name, message_id => v_message.message_id,
      detail => jsonb_build_object('verb', 'remove_messages')
    );
  end loop;

  return query
  select
    case
      when i.is_done then 'removed'
      when exists (
        select
        from baton.messages as m
        where m.message_id = i.message_id and m.run_id is null and not starts_with(m.queue_name, 'baton.')
        offset 0
      ) then 'in_flight'
      else 'unknown'
    end,
    i.message_id
  from baton._answers_by_id(remove_messages.message_ids, v_removed) as i
  order by i.nth;
end;
$$;

comment on function baton.remove_messages(bigint[]) is
'Remove users'' messages that nobody holds, unread.
Returns: a row an id, in their order: outcome, message_id. removed; in_flight, where a claim of it lives or its row is locked; unknown
Raises: none
Locks: the messages, never waiting';

/* ==== 210_functions.sql */

/*
 * Functions: the deployable units that host workers, and what may be said of their state.
 *
 * One current invocation a function, in its row. Whoever locks the row books an invocation past its deadline as
 * failed, before anything else is decided.
 */
comment on table baton.worker_functions is
'The functions whose workers the package starts, a row each, with the current invocation.
Written by: _complete_invocation, _disable, _fail_invocation, _read_responses, _request_start, _reserve_invocation, enable_worker_function, register_worker_function, unregister_worker_function';
comment on column baton.worker_functions.url is 'Where a start is requested; null: settings.base_url, a slash and the name.';
comment on column baton.worker_functions.secret_name is 'The secret sent as bearer token; null: none is sent.';
comment on column baton.worker_functions.start_mode is 'http: started by request; process: others start it.';
comment on column baton.worker_functions.require_handshake is 'Whether register_worker is refused.';
comment on column baton.worker_functions.debounce is
'Shortest time between two starts; doubled for each start in a row that failed, up to five minutes.';
comment on column baton.worker_functions.pending_timeout is 'How long a requested start may take until it counts as lost.';
comment on column baton.worker_functions.heartbeat_timeout is 'How long a silent worker still counts as healthy.';
comment on column baton.worker_functions.failed_starts is 'Starts in a row that failed.';
comment on column baton.worker_functions.invocation_status is 'pending, ready or failed; null before the first.';
comment on column baton.worker_functions.invocation_worker_id is 'The worker that it is ready with.';
comment on column baton.worker_functions.invocation_error is
'Why it failed: dismissed, expired, disabled, deprecated, or error (the request could not be made).';
comment on column baton.worker_functions.invocation_detail is
'Failed: the reason in words. Ready: the verb that completed it, accept, reconcile or register_worker.';
comment on column baton.worker_functions.invocation_transport is 'How the request was sent; null: by the caller.';
comment on column baton.worker_functions.invocation_request_id is
'The transport''s number for the request, while an answer to it is awaited.';

create or replace function baton._is_pending(function baton.worker_functions, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    (_is_pending.function).invocation_status = 'pending'
    and _is_pending.at < (_is_pending.function).invocation_expires_at,
    false
  );
end;

create or replace function baton._is_overdue(function baton.worker_functions, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    (_is_overdue.function).invocation_status = 'pending'
    and _is_overdue.at >= (_is_overdue.function).invocation_expires_at,
    false
  );
end;

-- An overdue invocation counts as a failed start whether or not it has been booked. Null: at once.
create or replace function baton._next_attempt_at(function baton.worker_functions, at timestamptz)
returns timestamptz
language sql
immutable
begin atomic
  select (_next_attempt_at.function).last_invoked_at + least(
    (_next_attempt_at.function).debounce * (
      2 ^ least(
        (_next_attempt_at.function).failed_starts
        + baton._is_overdue(_next_attempt_at.function, _next_attempt_at.at)::integer,
        9
      )
    ),
    greatest((_next_attempt_at.function).debounce, '5 minutes')
  );
end;

create or replace function baton._startup_state(function baton.worker_functions, is_ready boolean, at timestamptz)
returns text
language sql
immutable
begin atomic
  select
    case
      when not (_startup_state.function).enabled then 'disabled'
      when (_startup_state.function).start_mode = 'process' then 'process'
      when _startup_state.is_ready then 'ready'
      when baton._is_pending(_startup_state.function, _startup_state.at) then 'pending'
      when _startup_state.at < baton._next_attempt_at(_startup_state.function, _startup_state.at) then 'throttled'
      else 'retryable'
    end;
end;

-- Null where there is none.
create or replace function baton._lock_if_known(function_name text)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions;
begin
  perform baton._require_read_committed();
  loop
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.function_name = _lock_if_known.function_name
    for no key update of f;
    -- One that is gone may have been registered anew by the transaction that was waited for.
    exit when found or not exists (
      select from baton.worker_functions as f where f.function_name = _lock_if_known.function_name
    );
  end loop;
  return v_function;
end;
$$;

create or replace function baton._lock_function(function_name text)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := baton._lock_if_known(_lock_function.function_name);
begin
  if v_function.function_name is null then
    perform baton._raise('unknown_function', quote_nullable(left(_lock_function.function_name, 60)));
  end if;
  return v_function;
end;
$$;

-- A request that waits in the outbox goes with its invocation. One that a sender holds is dropped by claim_deliveries.
create or replace function baton._drop_delivery(function baton.worker_functions, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if (_drop_delivery.function).invocation_transport = 'outbox' then
    with free as (
      select m.message_id
      from baton.messages as m
      where m.message_id = (_drop_delivery.function).invocation_request_id
        and m.queue_name = 'baton.deliveries'
        and (m.claimed_at is null or m.visible_at <= _drop_delivery.at)
      for update of m skip locked
    )
    delete from baton.messages as m where m.message_id = any (array(select f.message_id from free as f));
  end if;
end;
$$;

-- The caller holds the function's lock.
create or replace function baton._fail_invocation(
  function baton.worker_functions, error text, detail text, at timestamptz
)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions;
begin
  update baton.worker_functions as f
  set invocation_status = 'failed',
    invocation_error = _fail_invocation.error,
    invocation_detail = _fail_invocation.detail,
    failed_starts = f.failed_starts + (_fail_invocation.error in ('dismissed', 'expired', 'error'))::integer
  where f.function_name = (_fail_invocation.function).function_name
  returning f.* into v_function;
  perform baton._drop_delivery(v_function, _fail_invocation.at);
  if _fail_invocation.error in ('dismissed', 'expired', 'error') then
    perform baton._incident(
      _fail_invocation.at, 'invocation_' || _fail_invocation.error, function_name => v_function.function_name,
      invocation_id => v_function.invocation_id,
      detail => jsonb_build_object('reason', v_function.invocation_detail, 'failed_starts', v_function.failed_starts)
    );
  end if;
  return v_function;
end;
$$;

create or replace function baton._book_expiry(function baton.worker_functions, at timestamptz)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if baton._is_overdue(_book_expiry.function, _book_expiry.at) then
    return baton._fail_invocation(_book_expiry.function, 'expired', null, _book_expiry.at);
  end if;
  return _book_expiry.function;
end;
$$;

create or replace function baton._complete_invocation(
  function baton.worker_functions, worker_id uuid, verb text, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.worker_functions as f
  set invocation_status = 'ready',
    invocation_worker_id = _complete_invocation.worker_id,
    invocation_error = null,
    invocation_detail = _complete_invocation.verb
  where f.function_name = (_complete_invocation.function).function_name;
  perform baton._drop_delivery(_complete_invocation.function, _complete_invocation.at);
end;
$$;

create or replace function baton._check_url(url text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_url.url !~ '^https?://[^/?#[:space:][:cntrl:]]+[^#[:space:][:cntrl:]]*$' then
    perform baton._raise('invalid_url', quote_literal(left(_check_url.url, 60)));
  end if;
end;
$$;

create or replace function baton.register_worker_function(
  function_name text,
  queue_name text default null,
  url text default null,
  secret_name text default null,
  start_mode text default null,
  debounce interval default null,
  pending_timeout interval default null,
  heartbeat_timeout interval default null,
  require_handshake boolean default null,
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
  v_function baton.worker_functions;
begin
  perform baton._check_function_name(register_worker_function.function_name);
  perform baton._check_url(register_worker_function.url);
  if register_worker_function.secret_name is not null then
    perform baton._check_name('secret_name', register_worker_function.secret_name);
  end if;
  if register_worker_function.start_mode is not null then
    perform baton._check_choice('start_mode', register_worker_function.start_mode, 'http', 'process');
  end if;
  perform baton._check_interval('debounce', register_worker_function.debounce, '1 second');
  perform baton._check_interval('pending_timeout', register_worker_function.pending_timeout, '1 second');
  perform baton._check_interval('heartbeat_timeout', register_worker_function.heartbeat_timeout, '1 second');

  perform baton._require_read_committed();
  loop
    insert into baton.worker_functions (function_name, queue_name)
    values (register_worker_function.function_name, register_worker_function.function_name)
    on conflict on constraint worker_functions_pkey do nothing;
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.function_name = register_worker_function.function_name
    for no key update of f;
    exit when found;
  end loop;
  perform baton._check_users_queue(coalesce(register_worker_function.queue_name, v_function.queue_name));
  perform baton._book_expiry(v_function, baton._now());
  update baton.worker_functions as f
  set queue_name = coalesce(register_worker_function.queue_name, f.queue_name),
    url = coalesce(register_worker_function.url, f.url),
    secret_name = coalesce(register_worker_function.secret_name, f.secret_name),
    start_mode = coalesce(register_worker_function.start_mode, f.start_mode),
    debounce = coalesce(register_worker_function.debounce, f.debounce),
    pending_timeout = coalesce(register_worker_function.pending_timeout, f.pending_timeout),
    heartbeat_timeout = coalesce(register_worker_function.heartbeat_timeout, f.heartbeat_timeout),
    require_handshake = coalesce(register_worker_function.require_handshake, f.require_handshake)
  where f.function_name = register_worker_function.function_name;
  outcome := 'registered';
end;
$$;

comment on function baton.register_worker_function(
  text, text, text, text, text, interval, interval, interval, boolean
) is
'Register a function, or change what is given: null keeps what is stored. Never changes whether it is enabled.
Arguments: function_name, 1 to 200 of A-Z a-z 0-9 . _ ~ -; queue_name, what its workers claim from, at first the function''s name; url, at first settings.base_url, a slash and the name; secret_name, the bearer token''s name in Supabase Vault, baton.secrets or the sender''s environment; start_mode, http (the default) or process (others start it); debounce (6 s), pending_timeout (60 s) and heartbeat_timeout (15 s), at least 1 s each; require_handshake (false), whether register_worker is refused.
Outcomes: registered
Raises: 22023, 25001
Locks: the function';

create or replace function baton.unregister_worker_function(function_name text, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_function baton.worker_functions;
  v_now timestamptz;
begin
  v_function := baton._lock_if_known(unregister_worker_function.function_name);
  if v_function.function_name is null then
    outcome := 'unknown';
    return;
  end if;
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);
  if exists (
    select
    from baton.workers as w
    where w.function_name = v_function.function_name and w.stopped_at is null
  ) then
    outcome := 'has_workers';
    return;
  end if;
  perform baton._drop_delivery(v_function, v_now);
  delete from baton.worker_functions as f where f.function_name = v_function.function_name;
  perform baton._incident(
    v_now, 'operator', function_name => v_function.function_name,
    detail => jsonb_build_object('verb', 'unregister_worker_function')
  );
  outcome := 'removed';
end;
$$;

comment on function baton.unregister_worker_function(text) is
'Forget a function. Whoever asks about a start of it that is still under way gets 42704.
Outcomes: removed; has_workers, while one of its workers is not stopped; unknown
Raises: 25001
Locks: the function';

/* ==== 215_deploys.sql */

/*
 * Deploys: enabling, disabling and deprecating under the function's lock, so that an acceptance is either before
 * (and its worker is deprecated) or after (and refused).
 */
create or replace function baton.enable_worker_function(function_name text, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_function baton.worker_functions;
  v_now timestamptz;
begin
  v_function := baton._lock_function(enable_worker_function.function_name);
  v_now := baton._now();
  perform baton._book_expiry(v_function, v_now);
  update baton.worker_functions as f
  set enabled = true, failed_starts = 0, last_invoked_at = null
  where f.function_name = v_function.function_name;
  perform baton._incident(
    v_now, 'operator', function_name => v_function.function_name,
    detail => jsonb_build_object('verb', 'enable_worker_function')
  );
  outcome := 'enabled';
end;
$$;

comment on function baton.enable_worker_function(text) is
'Let a function be started, and forget its failed starts and its throttle: the next tick starts exactly one worker where none is healthy.
Outcomes: enabled
Raises: 42704, 25001
Locks: the function';

-- The caller holds the function's lock.
create or replace function baton._disable(function baton.worker_functions, error text, verb text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := baton._book_expiry(_disable.function, _disable.at);
begin
  if baton._is_pending(v_function, _disable.at) then
    perform baton._fail_invocation(v_function, _disable.error, null, _disable.at);
  end if;
  update baton.worker_functions as f set enabled = false where f.function_name = v_function.function_name;
  perform baton._incident(
    _disable.at, 'operator', function_name => v_function.function_name,
    detail => jsonb_build_object('verb', _disable.verb)
  );
end;
$$;

create or replace function baton.disable_worker_function(
  function_name text, out outcome text, out was_enabled boolean
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
  v_function baton.worker_functions;
begin
  v_function := baton._lock_function(disable_worker_function.function_name);
  perform baton._disable(v_function, 'disabled', 'disable_worker_function', baton._now());
  outcome := 'disabled';
  was_enabled := v_function.enabled;
end;
$$;

comment on function baton.disable_worker_function(text) is
'Start no more workers of a function; a pending start is refused from now on. Its running workers go on.
Outcomes: disabled; with was_enabled
Raises: 42704, 25001
Locks: the function';

create or replace function baton.deprecate_workers(function_name text, out outcome text, out was_enabled boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_function baton.worker_functions;
  v_now timestamptz;
begin
  v_function := baton._lock_function(deprecate_workers.function_name);
  perform w.worker_id
  from baton.workers as w
  where w.worker_id = any (
    array(
      select o.worker_id
      from baton.workers as o
      where o.function_name = v_function.function_name and o.stopped_at is null
    )
  )
  order by w.worker_id
  for no key update of w;
  v_now := baton._now();
  perform baton._disable(v_function, 'deprecated', 'deprecate_workers', v_now);
  update baton.workers as w
  set deprecated_at = v_now
  where w.function_name = v_function.function_name and w.stopped_at is null and w.deprecated_at is null;
  outcome := 'deprecated';
  was_enabled := v_function.enabled;
end;
$$;

comment on function baton.deprecate_workers(text) is
'Before a deploy: disable a function and deprecate its workers, which claim nothing more and finish what they hold. A pending start is refused from now on. After the deploy, enable_worker_function starts the new code.
Outcomes: deprecated; with was_enabled
Raises: 42704, 25001
Locks: the function, then its workers by id';

/* ==== 220_workers.sql */

/*
 * Workers: who is healthy, heartbeats, and the workers that come without the handshake.
 *
 * A worker that stops in order has stopping_at; one that tick found silent has stopped_at alone. Heartbeats lock the
 * worker's row only: under the function's lock all workers of a function would wait for each other.
 */
comment on table baton.workers is
'The workers that were accepted or registered, a row each.
Written by: _admit_worker, _prune_rest, _stop_silent_workers, after_restore, deprecate_workers, heartbeat, reconcile_worker_invocation, stop_worker';
comment on column baton.workers.worker_id is 'Chosen by the runtime.';
comment on column baton.workers.handshake is 'Whether it was accepted under an invocation; false: register_worker.';
comment on column baton.workers.control is
'Whether it hears control notifications: listening, polling (it can''t and asks instead), off.';
comment on column baton.workers.stopping_at is 'When it said that it is stopping or has stopped.';
comment on column baton.workers.stopped_at is 'When it stopped, or was given up as silent.';
comment on column baton.workers.deprecated_at is 'From when on it claims nothing more.';

-- "Is true" keeps the look-up of one worker from being planned with the index of all live ones.
create or replace function baton._goes_on(worker baton.workers)
returns boolean
language sql
immutable
begin atomic
  select (
      (_goes_on.worker).stopping_at is null
      and (_goes_on.worker).stopped_at is null
      and (_goes_on.worker).deprecated_at is null
    ) is true;
end;

create or replace function baton._is_healthy(worker baton.workers, heartbeat_timeout interval, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select baton._goes_on(_is_healthy.worker)
    and _is_healthy.at < (_is_healthy.worker).last_heartbeat_at + _is_healthy.heartbeat_timeout;
end;

-- The healthy worker of a function that was heard last; null: none.
create or replace function baton._healthy_worker(function baton.worker_functions, at timestamptz)
returns uuid
language sql
stable
begin atomic
  select w.worker_id
  from baton.workers as w
  where w.function_name = (_healthy_worker.function).function_name
    and w.stopped_at is null
    and baton._is_healthy(w, (_healthy_worker.function).heartbeat_timeout, _healthy_worker.at)
  order by w.last_heartbeat_at desc, w.worker_id
  limit 1;
end;

create or replace function baton._lock_worker(worker_id uuid)
returns baton.workers
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_worker baton.workers;
begin
  select w.* into v_worker from baton.workers as w where w.worker_id = _lock_worker.worker_id for no key update of w;
  return v_worker;
end;
$$;

-- The id itself, whether its worker is there or not: two that bring the same new id wait for each other here, before
-- they read the clock.
create or replace function baton._lock_worker_id(worker_id uuid)
returns baton.workers
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(hashtextextended('baton.workers ' || _lock_worker_id.worker_id, 0));
  return baton._lock_worker(_lock_worker_id.worker_id);
end;
$$;

create or replace function baton._check_worker_id(worker_id uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_worker_id.worker_id is null then
    perform baton._raise('missing_argument', 'worker_id');
  end if;
end;
$$;

create or replace function baton._check_version(version text)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if _check_version.version is not null then
    perform baton._check_name('version', _check_version.version);
  end if;
end;
$$;

-- Inserts the worker, or keeps its row if it is one of this function's that goes on; false: its id is used up.
-- The caller holds the locks of the function and of the worker's id.
create or replace function baton._admit_worker(
  worker_id uuid, function_name text, version text, handshake boolean, at timestamptz
)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into baton.workers (worker_id, function_name, version, handshake, started_at, last_heartbeat_at)
  values (
    _admit_worker.worker_id, _admit_worker.function_name, _admit_worker.version, _admit_worker.handshake,
    _admit_worker.at, _admit_worker.at
  )
  on conflict do nothing;
  if found then
    return true;
  end if;
  update baton.workers as w
  set last_heartbeat_at = _admit_worker.at,
    handshake = w.handshake or _admit_worker.handshake,
    started_at = case when _admit_worker.handshake then _admit_worker.at else w.started_at end
  where w.worker_id = _admit_worker.worker_id
    and w.function_name = _admit_worker.function_name
    and baton._goes_on(w);
  return found;
end;
$$;

create or replace function baton.register_worker(
  worker_id uuid, function_name text, version text default null, out outcome text, out reason text
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
  v_function baton.worker_functions;
  v_now timestamptz;
begin
  perform baton._check_worker_id(register_worker.worker_id);
  perform baton._check_version(register_worker.version);
  v_function := baton._lock_function(register_worker.function_name);
  perform baton._lock_worker_id(register_worker.worker_id);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);

  outcome := 'rejected';
  if v_function.require_handshake then
    reason := 'handshake_required';
  elsif not v_function.enabled then
    reason := 'disabled';
  elsif not baton._admit_worker(
    register_worker.worker_id, v_function.function_name, register_worker.version, false, v_now
  ) then
    reason := 'worker_gone';
  else
    outcome := 'registered';
    if v_function.start_mode = 'http' and baton._is_pending(v_function, v_now) then
      perform baton._complete_invocation(v_function, register_worker.worker_id, 'register_worker', v_now);
    end if;
  end if;
end;
$$;

comment on function baton.register_worker(uuid, text, text) is
'Register a worker without the handshake: for process functions, and for runtimes older than the handshake, whose start it completes if one is pending. Repeated with the same id it changes nothing else.
Outcomes: registered; rejected, with reason: handshake_required (the function wants it), disabled, worker_gone (the id is stopping, stopped, deprecated, or another function''s)
Raises: 22023, 42704, 25001
Locks: the function, then the worker';

create or replace function baton.heartbeat(worker_id uuid, control text default null, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_worker baton.workers;
begin
  if heartbeat.control is not null then
    perform baton._check_choice('control', heartbeat.control, 'listening', 'polling', 'off');
  end if;
  v_worker := baton._lock_worker(heartbeat.worker_id);
  if v_worker.worker_id is null then
    outcome := 'unknown';
  elsif v_worker.stopped_at is not null then
    outcome := 'stopped';
  else
    update baton.workers as w
    set last_heartbeat_at = baton._now(), control = coalesce(heartbeat.control, w.control)
    where w.worker_id = v_worker.worker_id;
    outcome := case
      when v_worker.stopping_at is not null then 'stopping'
      when v_worker.deprecated_at is not null then 'deprecated'
      else 'active'
    end;
  end if;
end;
$$;

comment on function baton.heartbeat(uuid, text) is
'Say that a worker lives, and learn what it should do. Revives nothing.
Arguments: control, whether it hears control notifications: listening, polling or off; null keeps what is stored.
Outcomes: active; stopping; deprecated: claim nothing more, finish and stop; stopped; unknown
Raises: 22023
Locks: the worker';

create or replace function baton.stop_worker(worker_id uuid, draining boolean default false, out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_worker baton.workers;
  v_now timestamptz;
begin
  v_worker := baton._lock_worker(stop_worker.worker_id);
  v_now := baton._now();
  if v_worker.worker_id is null then
    outcome := 'unknown';
  elsif v_worker.stopped_at is not null then
    outcome := 'stopped';
  else
    outcome := case when stop_worker.draining then 'stopping' else 'stopped' end;
    update baton.workers as w
    set stopping_at = coalesce(w.stopping_at, v_now),
      stopped_at = case when not coalesce(stop_worker.draining, false) then v_now end
    where w.worker_id = v_worker.worker_id;
  end if;
end;
$$;

comment on function baton.stop_worker(uuid, boolean) is
'Say that a worker stops, or (draining) is going to: from then on it claims nothing, and a replacement may start.
Outcomes: stopping; stopped (also where it was already); unknown
Raises: none
Locks: the worker';

-- For tick.
create or replace function baton._stop_silent_workers(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_worker record;
  v_stopped integer := 0;
begin
  for v_worker in
    with silent as (
      select w.worker_id
      from baton.workers as w
      where w.stopped_at is null
        and w.last_heartbeat_at <= _stop_silent_workers.at
          - (select s.silent_worker_timeout from baton.settings as s where s.singleton)
      order by w.worker_id
      limit 1000
      for no key update of w skip locked
    )
    update baton.workers as w
    set stopped_at = _stop_silent_workers.at
    where w.worker_id = any (array(select s.worker_id from silent as s))
    returning w.worker_id, w.function_name, w.last_heartbeat_at
  loop
    v_stopped := v_stopped + 1;
    perform baton._incident(
      _stop_silent_workers.at, 'worker_silent', function_name => v_worker.function_name,
      worker_id => v_worker.worker_id,
      detail => jsonb_build_object('last_heartbeat_at', v_worker.last_heartbeat_at)
    );
  end loop;
  return v_stopped;
end;
$$;

/* ==== 230_handshake.sql */

/*
 * The handshake: a start is reserved before it is requested, and consumed by the worker that is ready.
 *
 *   reserve -> request -> reconcile -> initialise -> accept
 *                                               \-> dismiss
 *
 * Every verb locks the function's row, reads the clock, books an invocation past its deadline, and decides in a
 * statement after the lock, which sees workers accepted while it waited. At no moment is there neither a pending
 * invocation nor a ready worker.
 */

-- Books how the start that is replaced went, and gives the failed ones in a row. A ready invocation was a good start if
-- an existing worker took it, or its worker was ever heard again or stopped in order; else the worker died at once,
-- which is a failed start.
create or replace function baton._book_start(function baton.worker_functions, at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := _book_start.function;
begin
  if v_function.invocation_status is distinct from 'ready' then
    return v_function.failed_starts;
  elsif v_function.invocation_detail = 'accept' and exists (
    select
    from baton.workers as w
    where w.worker_id = v_function.invocation_worker_id
      and w.last_heartbeat_at = w.started_at
      and w.stopping_at is null
  ) then
    perform baton._incident(
      _book_start.at, 'start_crashed', function_name => v_function.function_name,
      worker_id => v_function.invocation_worker_id, invocation_id => v_function.invocation_id
    );
    return v_function.failed_starts + 1;
  end if;
  return 0;
end;
$$;

-- The caller holds the function's lock and has decided that it may be started.
create or replace function baton._reserve_invocation(function baton.worker_functions, at timestamptz)
returns baton.worker_functions
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_failed_starts integer := baton._book_start(_reserve_invocation.function, _reserve_invocation.at);
  v_function baton.worker_functions;
begin
  update baton.worker_functions as f
  set invocation_id = gen_random_uuid(),
    invocation_status = 'pending',
    invocation_expires_at = _reserve_invocation.at + f.pending_timeout,
    invocation_worker_id = null,
    invocation_error = null,
    invocation_detail = null,
    invocation_transport = null,
    invocation_request_id = null,
    last_invoked_at = _reserve_invocation.at,
    failed_starts = v_failed_starts
  where f.function_name = (_reserve_invocation.function).function_name
  returning f.* into v_function;
  return v_function;
end;
$$;

create or replace function baton.reserve_worker_invocation(
  function_name text,
  out outcome text,
  out invocation_id uuid,
  out expires_at timestamptz,
  out retry_after interval
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
  v_function baton.worker_functions;
  v_now timestamptz;
begin
  v_function := baton._lock_function(reserve_worker_invocation.function_name);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);
  outcome := baton._startup_state(v_function, baton._healthy_worker(v_function, v_now) is not null, v_now);
  case outcome
    when 'retryable' then
      v_function := baton._reserve_invocation(v_function, v_now);
      outcome := 'reserved';
      invocation_id := v_function.invocation_id;
      expires_at := v_function.invocation_expires_at;
    when 'pending' then
      expires_at := v_function.invocation_expires_at;
      retry_after := v_function.invocation_expires_at - v_now;
    when 'throttled' then
      retry_after := baton._next_attempt_at(v_function, v_now) - v_now;
    when 'ready', 'disabled', 'process' then
  end case;
end;
$$;

comment on function baton.reserve_worker_invocation(text) is
'Reserve the start of a worker, in the transaction that requests it. While the reservation is pending nobody else gets one.
Outcomes: reserved, with invocation_id and expires_at; disabled; process (others start it); ready (a healthy worker exists); pending (another start is), with expires_at and retry_after; throttled, with retry_after
Raises: 42704, 25001
Locks: the function';

create or replace function baton.reconcile_worker_invocation(
  out outcome text,
  function_name text,
  invocation_id uuid,
  inout worker_id uuid default null,
  out reason text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies: the invocation id is
 *   not the current one                                       rejected: superseded
 *   current and failed (an expiry has just been booked)       rejected: its error
 *   current and ready                                         ready, with the accepted worker
 *   pending; the caller names its own worker, which goes on   ready, with that one
 *   pending; another healthy worker                           ready, with that one
 *   pending                                                   start
 */
declare
  v_function baton.worker_functions;
  v_own baton.workers;
  v_ready_worker_id uuid;
  v_now timestamptz;
begin
  v_function := baton._lock_function(reconcile_worker_invocation.function_name);
  v_own := baton._lock_worker(reconcile_worker_invocation.worker_id);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);
  worker_id := null;

  if v_function.invocation_id is null
    or v_function.invocation_id is distinct from reconcile_worker_invocation.invocation_id then
    outcome := 'rejected';
    reason := 'superseded';
    return;
  end if;
  case v_function.invocation_status
    when 'failed' then
      outcome := 'rejected';
      reason := v_function.invocation_error;
    when 'ready' then
      outcome := 'ready';
      worker_id := v_function.invocation_worker_id;
    when 'pending' then
      if v_own.function_name = v_function.function_name
        and baton._goes_on(v_own) then
        update baton.workers as w set last_heartbeat_at = v_now where w.worker_id = v_own.worker_id;
        v_ready_worker_id := v_own.worker_id;
      else
        v_ready_worker_id := baton._healthy_worker(v_function, v_now);
      end if;
      if v_ready_worker_id is null then
        outcome := 'start';
      else
        perform baton._complete_invocation(v_function, v_ready_worker_id, 'reconcile', v_now);
        outcome := 'ready';
        worker_id := v_ready_worker_id;
      end if;
  end case;
end;
$$;

comment on function baton.reconcile_worker_invocation(text, uuid, uuid) is
'What the handler of a start request asks first, on every request: should a worker be started? Receiving a request never ends its pending state; an existing worker does. The id is correlation, not authentication.
Arguments: worker_id, the worker that the caller runs already, if it does (this counts as its heartbeat).
Outcomes: start: initialise a worker and accept; ready, with worker_id: there is one; rejected: start nothing, with reason: superseded (not the current invocation of this function), expired, dismissed, disabled, deprecated, error. It never means that a running worker should stop
Raises: 42704, 25001
Locks: the function, then the named worker
Source: pgflow''s startup handshake';

create or replace function baton.accept_worker_invocation(
  function_name text,
  invocation_id uuid,
  worker_id uuid,
  version text default null,
  out outcome text,
  out reason text
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
  v_function baton.worker_functions;
  v_worker baton.workers;
  v_now timestamptz;
begin
  perform baton._check_worker_id(accept_worker_invocation.worker_id);
  perform baton._check_version(accept_worker_invocation.version);
  v_function := baton._lock_function(accept_worker_invocation.function_name);
  v_worker := baton._lock_worker_id(accept_worker_invocation.worker_id);
  v_now := baton._now();
  v_function := baton._book_expiry(v_function, v_now);

  outcome := 'rejected';
  if v_function.invocation_id is null
    or v_function.invocation_id is distinct from accept_worker_invocation.invocation_id then
    reason := 'superseded';
    return;
  end if;
  case v_function.invocation_status
    when 'failed' then
      reason := v_function.invocation_error;
    when 'ready' then
      if v_function.invocation_worker_id <> accept_worker_invocation.worker_id then
        reason := 'already_accepted';
      elsif v_worker.worker_id is null or not baton._goes_on(v_worker) then
        reason := 'worker_gone';
      else
        outcome := 'accepted';
      end if;
    when 'pending' then
      if not v_function.enabled then
        reason := 'disabled';
      elsif not baton._admit_worker(
        accept_worker_invocation.worker_id, v_function.function_name, accept_worker_invocation.version, true, v_now
      ) then
        reason := 'worker_gone';
      else
        perform baton._complete_invocation(v_function, accept_worker_invocation.worker_id, 'accept', v_now);
        outcome := 'accepted';
      end if;
  end case;
end;
$$;

comment on function baton.accept_worker_invocation(text, uuid, uuid, text) is
'What a runtime calls when its worker is ready: consumes the invocation and inserts the worker, in one. Only an accepted worker may start processing. Repeated with the same worker it gives the same answer, also after the deadline: repeat it once where the answer was lost.
Arguments: worker_id, chosen by the runtime, new for each worker; version, of the code, for the views.
Outcomes: accepted; rejected, with reason: superseded, expired, dismissed, disabled, deprecated, error, already_accepted (by another worker), worker_gone (the id is stopping, stopped, deprecated, or another function''s)
Raises: 22023, 42704, 25001
Locks: the function, then the worker
Source: pgflow''s startup handshake';

-- Only the pending invocation can be dismissed. The caller holds the function's lock.
create or replace function baton._dismiss(
  function baton.worker_functions, invocation_id uuid, reason text, at timestamptz
)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := baton._book_expiry(_dismiss.function, _dismiss.at);
begin
  if v_function.invocation_id = _dismiss.invocation_id and baton._is_pending(v_function, _dismiss.at) then
    perform baton._fail_invocation(v_function, 'dismissed', left(_dismiss.reason, 1000), _dismiss.at);
    return true;
  end if;
  return false;
end;
$$;

create or replace function baton.dismiss_worker_invocation(
  function_name text, invocation_id uuid, reason text, out outcome text
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
  v_function baton.worker_functions;
begin
  v_function := baton._lock_function(dismiss_worker_invocation.function_name);
  outcome := case
    when baton._dismiss(
      v_function, dismiss_worker_invocation.invocation_id, dismiss_worker_invocation.reason, baton._now()
    ) then 'dismissed'
    else 'ignored'
  end;
end;
$$;

comment on function baton.dismiss_worker_invocation(text, uuid, text) is
'What a runtime calls when its start fails, so that the next one need not wait for the deadline.
Arguments: reason, for people; its first 1,000 characters are kept.
Outcomes: dismissed; ignored, where it is not the pending invocation
Raises: 42704, 25001
Locks: the function';

/* ==== 240_delivery.sql */

/*
 * Delivery: how the request to start a worker leaves the database.
 *
 * pg_net and Supabase Vault are found late and called dynamically: neither need be there. Over the outbox the request
 * is a message of the queue baton.deliveries, and a sender resolves the secret in its own environment.
 */
comment on table baton.secrets is
'Bearer tokens by name, where Supabase Vault is not installed. Read by the owner alone; never shown.
Written by: nobody';
comment on column baton.secrets.secret is 'One line, not empty.';

-- Null where pg_net can be used in this database, else why not.
create or replace function baton._pg_net_problem()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_problem text := baton._schema_problem('pg_net', 'net');
begin
  if v_problem is not null then
    return v_problem;
  elsif to_regprocedure('net.http_post(text,jsonb,jsonb,jsonb,integer)') is null then
    return 'schema net has no function http_post like pg_net''s';
  elsif current_setting('pg_net.database_name', true) is null then
    return 'pg_net is not in shared_preload_libraries';
  elsif current_setting('pg_net.database_name', true) <> current_database() then
    return format(
      'pg_net works for database %s, not for %s', current_setting('pg_net.database_name', true), current_database()
    );
  end if;
  return null;
end;
$$;

create or replace function baton._transport()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_transport text;
begin
  select s.transport into v_transport from baton.settings as s where s.singleton;
  if v_transport = 'auto' then
    v_transport := case when baton._pg_net_problem() is null then 'pg_net' else 'outbox' end;
  end if;
  return v_transport;
end;
$$;

create or replace function baton._credential(secret_name text, out secret text, out problem text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_place text := 'baton.secrets';
begin
  if to_regnamespace('vault') is not null then
    problem := baton._schema_problem('Supabase Vault', 'vault');
  end if;
  if problem is not null then
    return;
  elsif to_regclass('vault.decrypted_secrets') is not null then
    v_place := 'Supabase Vault';
    begin
      execute 'select s.decrypted_secret from vault.decrypted_secrets as s where s.name = $1'
      into secret using _credential.secret_name;
    exception
      when others then
        problem := format('secret %s can''t be read from %s: %s', _credential.secret_name, v_place, sqlerrm);
        return;
    end;
  else
    select s.secret into _credential.secret from baton.secrets as s where s.secret_name = _credential.secret_name;
  end if;
  if secret is null or btrim(secret) = '' then
    problem := format('secret %s is missing or empty in %s', _credential.secret_name, v_place);
  elsif secret ~ '[[:cntrl:]]' then
    problem := format('secret %s in %s has more than one line', _credential.secret_name, v_place);
  end if;
  if problem is not null then
    secret := null;
  end if;
end;
$$;

create or replace function baton._post(url text, body jsonb, headers jsonb, secret_name text, request_timeout interval)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_problem text := baton._pg_net_problem();
  v_secret text;
  v_headers jsonb := _post.headers;
  v_request_id bigint;
begin
  if v_problem is null and _post.secret_name is not null then
    select c.secret, c.problem into v_secret, v_problem from baton._credential(_post.secret_name) as c;
    v_headers := v_headers || jsonb_build_object('Authorization', 'Bearer ' || v_secret);
  end if;
  if v_problem is not null then
    raise exception '%', v_problem;
  end if;
  execute 'select net.http_post(url => $1, body => $2, headers => $3, timeout_milliseconds => $4)'
  into v_request_id
  using _post.url, _post.body, v_headers, (extract(epoch from _post.request_timeout) * 1000)::integer;
  return v_request_id;
exception
  when others then
    raise exception '%', coalesce(
      replace(replace(sqlerrm, v_secret, '***'), regexp_replace(to_json(v_secret)::text, '^"|"$', '', 'g'), '***'),
      sqlerrm
    );
end;
$$;

-- Requests the start of the pending invocation; the request leaves with the caller's commit. Raises where it can't be
-- made, never with the secret in its text.
create or replace function baton._request_start(function baton.worker_functions, transport text)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions := _request_start.function;
  v_settings baton.settings;
  v_url text;
  v_body jsonb;
  v_headers jsonb;
  v_request_id bigint;
begin
  select s.* into v_settings from baton.settings as s where s.singleton;
  v_url := coalesce(v_function.url, rtrim(v_settings.base_url, '/') || '/' || v_function.function_name);
  if v_url is null then
    raise exception 'neither the function''s url nor settings.base_url is set';
  end if;
  v_body := jsonb_build_object('invocation_id', v_function.invocation_id, 'function_name', v_function.function_name);
  v_headers := jsonb_build_object(
    'Content-Type', 'application/json', 'Idempotency-Key', v_function.invocation_id
  );

  case _request_start.transport
    when 'pg_net' then
      v_request_id := baton._post(v_url, v_body, v_headers, v_function.secret_name, v_settings.request_timeout);
    when 'outbox' then
      select i.message_id
      into v_request_id
      from baton._insert_keyed(
        'baton.deliveries',
        jsonb_build_object(
          'function_name', v_function.function_name, 'url', v_url, 'headers', v_headers,
          'secret_name', v_function.secret_name, 'body', v_body
        ),
        null, v_function.function_name || e'\x1f' || v_function.invocation_id, null, null
      ) as i;
  end case;

  update baton.worker_functions as f
  set invocation_transport = _request_start.transport, invocation_request_id = v_request_id
  where f.function_name = v_function.function_name;
  return v_request_id;
end;
$$;

create or replace function baton.claim_deliveries(max_messages integer default 1)
returns table (
  message_id bigint,
  delivery bigint,
  payload jsonb,
  failures integer,
  lapses integer,
  visible_at timestamptz
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_secret uuid := gen_random_uuid();
  v_wanted integer := coalesce(claim_deliveries.max_messages, 1);
  v_claimed integer;
  v_delivery record;
begin
  perform baton._check_limit('max_messages', claim_deliveries.max_messages);
  while v_wanted > 0 loop
    v_claimed := 0;
    for v_delivery in
      -- Unlike other messages a delivery has no limit but the end of its invocation.
      update baton.messages as m
      set delivery = baton._delivery(v_secret, m.message_id),
        claimed_at = v_now,
        lapses = m.lapses + (m.claimed_at is not null)::integer,
        visible_at = v_now + baton._visibility()
      where m.message_id = any (
        array(
          select d.message_id
          from baton.messages as d
          where d.queue_name = 'baton.deliveries' and d.visible_at <= v_now
          order by d.visible_at, d.message_id
          limit v_wanted
          for no key update of d skip locked
        )
      )
      returning m.message_id, m.delivery, m.payload, m.failures, m.lapses, m.visible_at
    loop
      v_claimed := v_claimed + 1;
      if exists (
        select
        from baton.worker_functions as f
        where f.function_name = v_delivery.payload ->> 'function_name'
          and f.invocation_id::text = v_delivery.payload -> 'body' ->> 'invocation_id'
          and baton._is_pending(f, v_now)
      ) then
        v_wanted := v_wanted - 1;
        message_id := v_delivery.message_id;
        delivery := v_delivery.delivery;
        payload := v_delivery.payload;
        failures := v_delivery.failures;
        lapses := v_delivery.lapses;
        visible_at := v_delivery.visible_at;
        return next;
      else
        delete from baton.messages as m where m.message_id = v_delivery.message_id;
      end if;
    end loop;
    exit when v_claimed = 0;
  end loop;
end;
$$;

comment on function baton.claim_deliveries(integer) is
'For senders: take requests to start workers from the outbox, as claim takes messages. Each is a POST of payload.body to payload.url with payload.headers and, where payload.secret_name is set, that secret as bearer token. Ack it when it is delivered, fail it with final where it can''t be, else fail it. A request whose invocation is over is dropped.
Returns: a row a request: message_id, delivery, payload (function_name, url, headers, secret_name, body), failures, lapses, visible_at (when the claim runs out)
Raises: 22023
Locks: the messages, never waiting';

/* ==== 245_fail.sql */

/*
 * What fail does with a user's message, or with a delivery.
 *
 * The final failure of a delivery also dismisses the invocation. It locks the function before the message; that it is
 * final is known beforehand: only the receipt's holder counts failures, and the limit is read once.
 */

-- Doubled with each failure, from backoff_base up to backoff_max, give or take a fifth. In seconds: an interval doubled
-- that often is out of range.
create or replace function baton._backoff(failures integer)
returns interval
language sql
volatile
begin atomic
  select
    make_interval(
      secs => least(
        extract(epoch from s.backoff_base)::double precision * 2 ^ least(greatest(_backoff.failures - 1, 0), 60),
        extract(epoch from s.backoff_max)::double precision
      ) * (0.8 + 0.4 * random())
    )
  from baton.settings as s
  where s.singleton;
end;

create or replace function baton._fail_message(
  message_id bigint,
  delivery bigint,
  error text,
  delay interval,
  final boolean,
  out outcome text,
  out visible_at timestamptz
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_max_failures integer := (select s.max_failures from baton.settings as s where s.singleton);
  v_function baton.worker_functions;
  v_message baton.messages;
  v_reason text;
  v_now timestamptz;
begin
  select f.*
  into v_function
  from baton.worker_functions as f
  where f.function_name = (
    select m.payload ->> 'function_name'
    from baton.messages as m
    where m.message_id = _fail_message.message_id
      and m.delivery = _fail_message.delivery
      and m.claimed_at is not null
      and m.queue_name = 'baton.deliveries'
      and (_fail_message.final or m.failures + 1 >= v_max_failures)
  )
  for no key update of f;
  if found then
    perform baton._require_read_committed();
  end if;
  v_message := baton._lock_receipt(_fail_message.message_id, _fail_message.delivery);
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(_fail_message.message_id, _fail_message.delivery, 'fail');
    return;
  end if;

  v_now := baton._now();
  v_message.failures := v_message.failures + 1;
  v_message.last_error := _fail_message.error;
  v_reason := case
    when _fail_message.final then 'final'
    when v_message.failures >= v_max_failures then 'failures'
  end;
  if v_reason is null then
    update baton.messages as m
    set failures = v_message.failures,
      last_error = v_message.last_error,
      visible_at = v_now + coalesce(_fail_message.delay, baton._backoff(v_message.failures)),
      claimed_at = null
    where m.message_id = v_message.message_id
    returning 'failed', m.visible_at into _fail_message.outcome, _fail_message.visible_at;
    return;
  end if;

  outcome := 'dead';
  if v_message.queue_name = 'baton.deliveries' then
    delete from baton.messages as m where m.message_id = v_message.message_id;
    perform baton._dismiss(
      v_function, (v_message.payload -> 'body' ->> 'invocation_id')::uuid, v_message.last_error, v_now
    );
  else
    perform baton._bury_message(v_message, v_reason, v_now);
  end if;
end;
$$;

/* ==== 250_ensure_workers.sql */

/*
 * ensure_workers: what the clock calls. Level-triggered: it looks at what is, and ten calls in a row do what one does.
 *
 * Candidates are found without a lock, so that healthy functions cost no write. Each is then locked (never waiting)
 * and decided anew. A function that can't be requested fails alone: its reservation is rolled back with its request,
 * and booked as a failed start outside that subtransaction, so that it is throttled.
 */
-- A function that stays locked leaves one incident a pending timeout.
create or replace function baton._note_locked(function_name text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (
    select
    from baton.incidents as i
    inner join baton.worker_functions as f on f.function_name = i.function_name
    where i.function_name = _note_locked.function_name
      and i.kind = 'function_locked'
      and i.at > _note_locked.at - f.pending_timeout
  ) then
    perform baton._incident(_note_locked.at, 'function_locked', function_name => _note_locked.function_name);
  end if;
end;
$$;

create or replace function baton.ensure_workers()
returns table (outcome text, function_name text, invocation_id uuid, request_id bigint, detail text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_transport text := baton._transport();
  v_candidate text;
  v_taken integer := 0;
  v_function baton.worker_functions;
  v_reserved baton.worker_functions;
begin
  perform baton._require_read_committed();
  for v_candidate in
    select f.function_name
    from baton.worker_functions as f
    where baton._is_overdue(f, v_now)
      or baton._startup_state(f, baton._healthy_worker(f, v_now) is not null, v_now) = 'retryable'
    order by f.last_invoked_at nulls first, f.function_name
  loop
    exit when v_taken = 100;
    function_name := v_candidate;
    invocation_id := null;
    request_id := null;
    detail := null;
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.function_name = v_candidate
    for no key update of f skip locked;
    if not found then
      if exists (select from baton.worker_functions as f where f.function_name = v_candidate) then
        outcome := 'locked';
        detail := 'another transaction holds the function''s row';
        perform baton._note_locked(v_candidate, v_now);
        return next;
      end if;
      continue;
    end if;

    v_taken := v_taken + 1;
    v_function := baton._book_expiry(v_function, v_now);
    if baton._startup_state(v_function, baton._healthy_worker(v_function, v_now) is not null, v_now) <> 'retryable' then
      continue;
    end if;
    begin
      v_reserved := baton._reserve_invocation(v_function, v_now);
      request_id := baton._request_start(v_reserved, v_transport);
      outcome := 'reserved';
    exception
      when others then
        outcome := 'error';
        detail := sqlerrm;
    end;
    if outcome = 'error' then
      v_reserved := baton._reserve_invocation(v_function, v_now);
      perform baton._fail_invocation(v_reserved, 'error', detail, v_now);
    end if;
    invocation_id := v_reserved.invocation_id;
    return next;
  end loop;
end;
$$;

comment on function baton.ensure_workers() is
'Request the start of one worker for every enabled http function that has no healthy worker, no pending start and no throttle; at most 100 a call, longest uninvoked first. The request leaves with the caller''s commit. With nothing to do it writes nothing.
Returns: a row for each function that it acted on: outcome (reserved; error, with detail: the request could not be made and counts as a failed start; locked: somebody holds the function''s row), function_name, invocation_id, request_id (the transport''s), detail
Raises: 25001
Locks: the functions, never waiting
Source: pgflow''s ensure_workers';

/* ==== 260_responses.sql */

/*
 * Fast failure: what pg_net learned about requests that are still awaited.
 *
 * Responses are weak evidence: they come late or never, their ids begin anew after a crash, and neither a timeout nor
 * a 2xx proves anything. So a response can only end the pending invocation that still has its request id.
 */

-- Why a response means that no start is under way; null where it proves nothing. 409 and some gateway errors are
-- answered by runtimes that may be starting.
create or replace function baton._response_failure(status_code integer, error_msg text)
returns text
language sql
immutable
begin atomic
  select
    case
      when _response_failure.status_code >= 400
        and _response_failure.status_code not in (408, 409, 502, 504)
        and _response_failure.status_code not between 520 and 524 then 'HTTP ' || _response_failure.status_code
      when _response_failure.status_code is null
        and _response_failure.error_msg ~* '^could(n''t| not) (connect|resolve)' then _response_failure.error_msg
    end;
end;

create or replace function baton._read_responses(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_ids bigint[];
  v_last_id bigint;
  v_response record;
  v_function baton.worker_functions;
  v_failure text;
  v_read bigint[] := '{}'::bigint[];
begin
  select array_agg(a.invocation_request_id)
  into v_ids
  from (
    select f.invocation_request_id
    from baton.worker_functions as f
    where f.invocation_transport = 'pg_net' and f.invocation_request_id is not null
    order by f.last_invoked_at
    limit 1000
  ) as a;
  if v_ids is null
    or baton._schema_problem('pg_net', 'net') is not null or to_regclass('net._http_response') is null then
    return 0;
  end if;

  execute 'select s.last_value - (not s.is_called)::integer from net.http_request_queue_id_seq as s' into v_last_id;
  if v_last_id < (select max(i.id) from unnest(v_ids) as i (id)) then
    with free as (
      select f.function_name
      from baton.worker_functions as f
      where f.invocation_transport = 'pg_net' and f.invocation_request_id is not null
      order by f.function_name
      for no key update of f skip locked
    )
    update baton.worker_functions as f
    set invocation_request_id = null
    from free
    where f.function_name = free.function_name;
    if found then
      perform baton._incident(
        _read_responses.at, 'request_ids_forgotten', detail => jsonb_build_object('pg_net_is_at', v_last_id)
      );
    end if;
    return 0;
  end if;

  for v_response in
    execute 'select r.id, r.status_code, r.error_msg from net._http_response as r where r.id = any ($1) order by r.id'
    using v_ids
  loop
    select f.*
    into v_function
    from baton.worker_functions as f
    where f.invocation_request_id = v_response.id
      and f.function_name = (
        select n.function_name
        from baton.worker_functions as n
        where n.invocation_transport = 'pg_net' and n.invocation_request_id = v_response.id
        order by n.last_invoked_at desc
        limit 1
      )
    for no key update of f skip locked;
    continue when not found;
    v_failure := baton._response_failure(v_response.status_code, v_response.error_msg);
    if v_failure is not null then
      perform baton._dismiss(v_function, v_function.invocation_id, v_failure, _read_responses.at);
    end if;
    update baton.worker_functions as f
    set invocation_request_id = null
    where f.function_name = v_function.function_name;
    v_read := v_read || v_response.id;
  end loop;
  execute
    'with free as (select r.ctid from net._http_response as r where r.id = any ($1) for update of r skip locked)
    delete from net._http_response as r using free as f where r.ctid = f.ctid'
  using v_read;

  with unanswered as (
    select f.function_name
    from baton.worker_functions as f
    where f.invocation_transport = 'pg_net'
      and f.invocation_request_id is not null
      and f.invocation_expires_at <= _read_responses.at
    order by f.function_name
    for no key update of f skip locked
  )
  update baton.worker_functions as f
  set invocation_request_id = null
  from unanswered as u
  where f.function_name = u.function_name;
  return cardinality(v_read);
end;
$$;

-- pg_net's queue has no times: what stands first, and since when, tells whether it moves.
create or replace function baton._watch_pg_net(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_head_id bigint;
begin
  if baton._schema_problem('pg_net', 'net') is null and to_regclass('net.http_request_queue') is not null then
    execute 'select q.id from net.http_request_queue as q limit 1' into v_head_id;
  end if;
  update baton.state as s
  set pg_net_head_id = v_head_id, pg_net_head_since = _watch_pg_net.at
  where s.pg_net_head_id is distinct from v_head_id;
  return 0;
end;
$$;

/* ==== 310_events.sql */

/*
 * The event log of a run: gap-free, because positions are given out under the run's row lock. A reader never sees an
 * event appear before one that it has read.
 */
comment on table baton.events is
'The logs of all runs, append-only.
Written by: _append, _prune_log, _prune_whole, _start, advance_run, complete_tasks, create_step, start_run, start_tasks';
comment on column baton.events.seq is 'From 1, without gaps, a run.';
comment on column baton.events.type is
'run_created, run_advanced, run_completed, run_failed, run_cancelled, step_created, step_completed, step_failed, step_skipped, task_started, task_retrying, task_completed, task_failed, task_released, signal_received; a caller''s own types contain a dot.';
comment on column baton.events.correlation_id is
'What makes a step_created, a signal_received or an event of a caller''s own type unique a run, where it carries one. Of step_created and run_advanced it is the step that was created.';

create or replace function baton._is_open(status text)
returns boolean
language sql
immutable
begin atomic
  select coalesce(_is_open.status in ('pending', 'running', 'suspended'), false);
end;

create or replace function baton._lock_run(run_id text)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs;
begin
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  select r.*
  into v_run
  from baton.runs as r
  where r.run_id = _lock_run.run_id and r.pruned_at is null
  for no key update of r;
  return v_run;
end;
$$;

-- Appends at the position after run.last_seq; the caller holds the run's lock and writes last_seq.
create or replace function baton._append(
  run baton.runs, type text, correlation_id text, payload jsonb, at timestamptz
)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_seq bigint := (_append.run).last_seq + 1;
begin
  insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)
  values ((_append.run).run_id, v_seq, _append.type, _append.correlation_id, _append.payload, _append.at);
  return v_seq;
end;
$$;

create or replace function baton._has_event(run_id text, type text, correlation_id text)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (
    select
    from baton.events as e
    where e.run_id = _has_event.run_id
      and e.type = _has_event.type
      and e.correlation_id = _has_event.correlation_id
      and (e.type in ('step_created', 'signal_received') or strpos(e.type, '.') > 0)
  );
end;
$$;

create or replace function baton.read_events(run_id text, after_seq bigint default 0, max_events integer default 1000)
returns table (seq bigint, type text, correlation_id text, payload jsonb, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  perform baton._check_limit('max_events', read_events.max_events);
  return query
  select e.seq, e.type, e.correlation_id, e.payload, e.created_at
  from baton.events as e
  where e.run_id = read_events.run_id
    and e.seq > coalesce(read_events.after_seq, 0)
    and not exists (select from baton.runs as r where r.run_id = read_events.run_id and r.pruned_at is not null)
  order by e.seq
  limit coalesce(read_events.max_events, 1000);
end;
$$;

comment on function baton.read_events(text, bigint, integer) is
'Read the log of a run from a position on. Positions have no gaps, and no event appears before one that was read.
Arguments: after_seq, the last position that the caller has read; max_events, how many at the most.
Returns: a row an event, in order: seq, type (see baton.events), correlation_id, payload, created_at; none for an unknown run. The payload is the input of run_created, the output of run_completed, the error of run_failed, the reason of run_cancelled, name and payload of signal_received; of a caller''s own type, what it gave; else an object with step_slug, of a task''s event also task_index, attempt, and output, error or reason, of run_advanced also output, next_step_slug with its on_exhausted and max_attempts, and the receipt
Raises: 22023
Locks: none';

/* ==== 320_runs.sql */

/*
 * Runs: starting, waking, signalling.
 *
 * A wake is the message that wake_message_id names; it is there once until a replay is granted under it, and so shared
 * by all wakes before that. wake_pending says that a wake was asked for which no grant has followed yet.
 */
comment on table baton.runs is
'The runs, a row each.
Written by: _end_replay_under, _end_run, _give_up_run, _lose_replay, _prune_log, _prune_whole, _save_positions, _set_back, _wake, advance_run, after_restore, append_event, begin_replay, complete_task, create_step, dispatch_tasks, end_replay, fail, release_replay, signal_run, start_run, start_task, start_tasks, wake_run';
comment on column baton.runs.status is 'pending, running, suspended; completed, failed, cancelled.';
comment on column baton.runs.last_seq is 'The position of its newest event.';
comment on column baton.runs.wake_seq is 'The position of the newest that asks for a replay: a signal, the end of a step.';
comment on column baton.runs.replayed_seq is 'Up to which position the last replay that ended had read.';
comment on column baton.runs.wake_pending is 'A wake was asked for, and no grant has followed it.';
comment on column baton.runs.failures is 'Replays in a row that failed.';
comment on column baton.runs.lapses is 'Replays in a row that were lost.';
comment on column baton.runs.wake_at is 'When it asked to be woken; of a pending run, when it is to start.';
comment on column baton.runs.replay_epoch is 'The replay that was granted last: a random number below 2^53.';
comment on column baton.runs.replay_ended is 'Whether that replay has ended, so that its epoch is no longer current.';
comment on column baton.runs.replay_message_id is 'The receipt that it was granted under.';
comment on column baton.runs.replay_delivery is 'The receipt that it was granted under.';
comment on column baton.runs.replay_backend is 'The pid of its connection, for a session hold.';
comment on column baton.runs.needs_driver is 'It is open, and neither suspended with nothing unread nor waiting for a delayed start: somebody should be driving it.';
comment on column baton.runs.pruned_at is
'Since when it is being removed, in several calls of prune: every verb answers as if it were gone, and last_seq says how much of its log is left.';
comment on column baton.runs.wake_message_id is
'The message that all wakes share until a replay is granted under it; one that is gone counts as none.';

create or replace function baton._run_key(run_id text, purpose text)
returns text
language sql
immutable
begin atomic
  select _run_key.run_id || e'\x1f' || _run_key.purpose;
end;

create or replace function baton._send_run_message(
  run baton.runs, dedupe_key text, visible_at timestamptz, at timestamptz
)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message_id bigint;
begin
  insert into baton.messages as m (queue_name, kind, run_id, dedupe_key, visible_at, created_at)
  values (
    (_send_run_message.run).queue_name, 'run', (_send_run_message.run).run_id, _send_run_message.dedupe_key,
    _send_run_message.visible_at, _send_run_message.at
  )
  returning m.message_id into v_message_id;
  perform baton._notify_message((_send_run_message.run).queue_name);
  return v_message_id;
end;
$$;

-- The run's wake is there, or is sent. The caller holds the run's lock, and writes what it answers as wake_message_id.
create or replace function baton._ensure_wake(run baton.runs, at timestamptz)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from baton.messages as m where m.message_id = (_ensure_wake.run).wake_message_id) then
    return (_ensure_wake.run).wake_message_id;
  end if;
  return baton._send_run_message(_ensure_wake.run, null, _ensure_wake.at, _ensure_wake.at);
end;
$$;

create or replace function baton._wake(run baton.runs, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_wake_id bigint := baton._ensure_wake(_wake.run, _wake.at);
begin
  update baton.runs as r
  set wake_pending = true, needs_driver = true, wake_message_id = v_wake_id
  where r.run_id = (_wake.run).run_id
    and (r.wake_pending, r.wake_message_id) is distinct from (true, v_wake_id);
end;
$$;

create or replace function baton._is_asleep(run baton.runs, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select coalesce((_is_asleep.run).status = 'pending' and (_is_asleep.run).wake_at > _is_asleep.at, false);
end;

-- The run's timer is the message with the key (run, timer), due at wake_at. One that somebody has claimed loses its
-- key; one whose row is locked keeps it, and the new one goes without. One that is overdue already is due now: claims
-- don't look for messages that come long after their time.
create or replace function baton._set_timer(run baton.runs, wake_at timestamptz, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._run_key((_set_timer.run).run_id, 'timer');
  v_due_at timestamptz := greatest(_set_timer.wake_at, _set_timer.at);
  v_timer_id bigint;
  v_timer baton.messages;
begin
  select m.message_id
  into v_timer_id
  from baton.messages as m
  where m.dedupe_key = v_key;
  if v_timer_id is not null then
    select m.* into v_timer from baton.messages as m where m.message_id = v_timer_id for update of m skip locked;
    if not found then
      v_key := null;
    elsif v_timer.claimed_at is not null and v_timer.visible_at > _set_timer.at then
      update baton.messages as m set dedupe_key = null where m.message_id = v_timer_id;
    elsif _set_timer.wake_at is null then
      delete from baton.messages as m where m.message_id = v_timer_id;
    else
      update baton.messages as m
      set visible_at = v_due_at, claimed_at = null
      where m.message_id = v_timer_id;
      return;
    end if;
  end if;
  if _set_timer.wake_at is not null then
    perform baton._send_run_message(_set_timer.run, v_key, v_due_at, _set_timer.at);
  end if;
end;
$$;

-- Ordered by time: 48 bits of milliseconds, then random bits, as in a UUID of version 7.
create or replace function baton._new_run_id(at timestamptz)
returns text
language sql
volatile
begin atomic
  select
    regexp_replace(
      lpad(to_hex((extract(epoch from _new_run_id.at) * 1000)::bigint), 12, '0'), '(.{8})(.{4})', '\1-\2-7'
    ) || right(gen_random_uuid()::text, 21);
end;

create or replace function baton.start_run(
  out outcome text,
  workflow_name text,
  input jsonb,
  inout run_id text default null,
  queue_name text default 'default',
  delay interval default '0',
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
  v_message_id bigint;
  v_now timestamptz := baton._now();
begin
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  run_id := coalesce(start_run.run_id, baton._new_run_id(v_now));
  perform
    baton._check_name('workflow_name', start_run.workflow_name),
    baton._check_users_queue(coalesce(start_run.queue_name, 'default')),
    baton._check_interval('delay', start_run.delay),
    baton._check_size('input', pg_column_size(start_run.input)),
    baton._check_name('run_id', start_run.run_id);

  loop
    if not exists (select from baton.runs as r where r.run_id = start_run.run_id) then
      v_message_id := nextval('baton.messages_message_id_seq');
      with created as (
        insert into baton.runs as r (
          run_id, workflow_name, queue_name, last_seq, wake_pending, wake_at, created_at, needs_driver, wake_message_id
        )
        select
          start_run.run_id, start_run.workflow_name, coalesce(start_run.queue_name, 'default'), 1, d.is_due,
          v_now + nullif(start_run.delay, '0'), v_now, d.is_due, case when d.is_due then v_message_id end
        from (select coalesce(start_run.delay <= '0', true) as is_due) as d
        on conflict do nothing
        returning r.*
      ),
      logged as (
        insert into baton.events (run_id, seq, type, payload, created_at)
        select c.run_id, 1, 'run_created', start_run.input, v_now
        from created as c
      )
      insert into baton.messages as m (message_id, queue_name, kind, run_id, dedupe_key, visible_at, created_at)
      overriding system value
      select
        v_message_id, c.queue_name, 'run', c.run_id,
        case when not c.wake_pending then baton._run_key(c.run_id, 'timer') end, coalesce(c.wake_at, v_now), v_now
      from created as c;
      if found then
        perform baton._notify_message(coalesce(start_run.queue_name, 'default'));
        outcome := 'created';
        status := 'pending';
        return;
      end if;
    end if;

    select
      case
        when r.pruned_at is null
          and r.workflow_name = start_run.workflow_name
          and r.queue_name = coalesce(start_run.queue_name, 'default')
          and e.payload is not distinct from start_run.input then 'exists'
        else 'conflict'
      end,
      case when r.pruned_at is null then r.status end
    into start_run.outcome, start_run.status
    from baton.runs as r
    left join baton.events as e on e.run_id = r.run_id and e.seq = 1
    where r.run_id = start_run.run_id;
    -- Not found: it was pruned meanwhile.
    exit when found;
  end loop;
end;
$$;

comment on function baton.start_run(text, jsonb, text, text, interval) is
'Start a run: the run and its first message, in the caller''s transaction. The run_id is the idempotency key until the run is pruned.
Arguments: run_id, 1 to 200 bytes, by default a new one, ordered by time; delay, until it is to start.
Outcomes: created; exists; conflict, where the run_id is taken by a run of another workflow, queue or input, or by one that is being pruned (status null); with run_id and status
Raises: 22023, 54000, 25001
Locks: none; waits only for another transaction that is starting the same run_id';

create or replace function baton.get_run(
  run_id text,
  out outcome text,
  out workflow_name text,
  out queue_name text,
  out status text,
  out output jsonb,
  out error jsonb,
  out created_at timestamptz,
  out ended_at timestamptz,
  out wake_at timestamptz
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  select
    'found', r.workflow_name, r.queue_name, r.status,
    case when e.type = 'run_completed' then e.payload end,
    case when e.type in ('run_failed', 'run_cancelled') then e.payload end,
    r.created_at, r.ended_at, r.wake_at
  into
    get_run.outcome, get_run.workflow_name, get_run.queue_name, get_run.status, get_run.output, get_run.error,
    get_run.created_at, get_run.ended_at, get_run.wake_at
  from baton.runs as r
  -- "Offset 0" keeps it a look-up: a join that was planned for a short log would read all of a long one.
  left join lateral (
    select o.type, o.payload from baton.events as o where o.run_id = r.run_id and o.seq = r.last_seq offset 0
  ) as e on true
  where r.run_id = get_run.run_id and r.pruned_at is null;
  outcome := coalesce(outcome, 'unknown');
end;
$$;

comment on function baton.get_run(text) is
'How a run stands.
Outcomes: found, with workflow_name, queue_name, status, output (of a completed run), error (of a failed one; of a cancelled one the reason), created_at, ended_at, wake_at; unknown
Raises: none
Locks: none';

create or replace function baton.signal_run(
  run_id text, name text, payload jsonb default null, dedupe_key text default null, out outcome text, out status text
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
  v_seq bigint;
begin
  perform
    baton._check_name('name', signal_run.name),
    baton._check_key(signal_run.dedupe_key),
    baton._check_size('payload', pg_column_size(signal_run.payload));
  v_run := baton._lock_run(signal_run.run_id);
  v_now := baton._now();
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
  elsif signal_run.dedupe_key is not null
    and baton._has_event(v_run.run_id, 'signal_received', signal_run.dedupe_key) then
    outcome := 'duplicate';
  else
    v_seq := baton._append(
      v_run, 'signal_received', signal_run.dedupe_key,
      jsonb_build_object('name', signal_run.name, 'payload', signal_run.payload), v_now
    );
    if baton._is_asleep(v_run, v_now) then
      update baton.runs as r set last_seq = v_seq, wake_seq = v_seq where r.run_id = v_run.run_id;
    else
      update baton.runs as r
      set last_seq = v_seq,
        wake_seq = v_seq,
        wake_pending = true,
        needs_driver = true,
        wake_message_id = baton._ensure_wake(v_run, v_now)
      where r.run_id = v_run.run_id;
    end if;
    outcome := 'signalled';
  end if;
end;
$$;

comment on function baton.signal_run(text, text, jsonb, text) is
'Append a signal to a run''s log and wake the run. A run whose delayed start is ahead keeps it for then.
Arguments: name and payload, what the workflow reads in signal_received; dedupe_key, 1 to 500 bytes: a second signal of the run with it is a duplicate.
Outcomes: signalled; duplicate; terminal, where it has ended, or (status null) is unknown; with status
Raises: 22023, 54000, 25001
Locks: the run';

create or replace function baton.wake_run(run_id text, out outcome text, out status text)
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
  v_run := baton._lock_run(wake_run.run_id);
  v_now := baton._now();
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
    return;
  end if;
  if baton._is_asleep(v_run, v_now) then
    update baton.runs as r set wake_at = null where r.run_id = v_run.run_id;
    perform baton._set_timer(v_run, null, v_now);
  end if;
  perform baton._wake(v_run, v_now);
  outcome := 'woken';
end;
$$;

comment on function baton.wake_run(text) is
'Have a run replayed, once for all wakes before that replay begins. A delayed run starts early.
Outcomes: woken; terminal, where it has ended, or (status null) is unknown; with status
Raises: 25001
Locks: the run';

/* ==== 330_ownership.sql */

/*
 * Who owns and who lives. Pure reading, and the two questions that need a lock to be answered for certain.
 *
 * A receipt owns the tasks that were started under it. Its holder lives while the receipt is current and its claim has
 * not run out; a row that is locked may be being extended, and counts as alive. That a session's holder lives is proven
 * by an advisory lock on its pid, which its connection takes once and keeps: who can take it in shared mode knows that
 * the connection is gone. No verb ever releases it.
 */
comment on table baton.steps is
'The steps of the runs: a cache of their logs.
Written by: _end_run, _end_step, _prune_log, _prune_whole, advance_run, complete_task, complete_tasks, create_step';
comment on column baton.steps.open_tasks is 'How many of its tasks are unfinished.';
comment on column baton.steps.created_seq is 'The position of the event that created it: steps are dispatched in that order.';
comment on table baton.tasks is
'The tasks of the steps: a cache of the logs. Outputs and errors are in the events only.
Written by: _end_run, _end_step, _exhaust_task, _prune_log, _prune_whole, _release, _start, advance_run, complete_task, complete_tasks, create_step, fail_task, start_tasks';
comment on column baton.tasks.attempt is 'One start of the body: its ownership epoch.';
comment on column baton.tasks.lapses is 'Starts in a row that were lost.';
comment on column baton.tasks.fence_attempt is 'Attempts up to it are refused.';
comment on column baton.tasks.owner_message_id is 'With owner_delivery, the receipt that the body was started under.';

create or replace function baton._owns(message_id bigint, delivery bigint)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (
    select
    from baton.tasks as t
    where t.owner_message_id = _owns.message_id and t.owner_delivery = _owns.delivery and t.status = 'started'
  );
end;
$$;

create or replace function baton._session_lock_class()
returns integer
language sql
immutable
begin atomic
  select 1650553967;
end;

-- Null where the lock can't be had: then the hold is a lease.
create or replace function baton._hold_session()
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_try_advisory_lock(baton._session_lock_class(), pg_backend_pid()) then
    return pg_backend_pid();
  end if;
  return null;
end;
$$;

create or replace function baton._connection_lives(backend integer)
returns boolean
language sql
volatile
begin atomic
  select _connection_lives.backend is null
    or _connection_lives.backend = pg_backend_pid()
    or not pg_try_advisory_xact_lock_shared(baton._session_lock_class(), _connection_lives.backend);
end;

-- Whether the claim of a receipt lives, asked under its row's lock.
create or replace function baton._claim_lives(message_id bigint, delivery bigint, at timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message baton.messages;
begin
  select m.*
  into v_message
  from baton.messages as m
  where m.message_id = _claim_lives.message_id
  for no key update of m skip locked;
  if found then
    return v_message.delivery = _claim_lives.delivery
      and v_message.claimed_at is not null
      and v_message.visible_at > _claim_lives.at;
  end if;
  return exists (
    select
    from baton.messages as m
    where m.message_id = _claim_lives.message_id
      and m.delivery = _claim_lives.delivery
      and m.claimed_at is not null
  );
end;
$$;

-- The wait is bounded for these two rows only: what else a call may wait for (a table that is being truncated or
-- indexed) is no reason for an error.
create or replace function baton._lock_soon(run_id text, message_id bigint, delivery bigint)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
begin
  perform baton._lock_run(_lock_soon.run_id);
  perform baton._lock_receipt(_lock_soon.message_id, _lock_soon.delivery);
end;
$$;

-- Due again later, for an answer that leaves nothing to do now; what owns bodies stays claimed. A timer or a backstop
-- loses its key: it is on its way, and no longer waits for its time.
create or replace function baton._postpone(message_id bigint, delivery bigint, delay interval)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  with free as (
    select m.message_id
    from baton.messages as m
    where m.message_id = _postpone.message_id
      and m.delivery = _postpone.delivery
      and m.claimed_at is not null
      and not baton._owns(m.message_id, m.delivery)
    for no key update of m skip locked
  )
  update baton.messages as m
  set visible_at = baton._now() + _postpone.delay,
    claimed_at = null,
    dedupe_key = null
  where m.message_id = any (array(select f.message_id from free as f));
end;
$$;

/* ==== 340_recovery.sql */

/*
 * Recovery: a run that needs a driver and has none is woken. The view is the rule; recover_runs asks it again under the
 * run's lock.
 */
create or replace view baton.wedged_runs as
select r.run_id, r.workflow_name, r.queue_name, r.status, n.reason
from (select baton._now() as at) as c
cross join lateral (
  select a.*
  from baton.runs as a
  where a.needs_driver
  union all
  select s.*
  from baton.runs as s
  where s.wake_at <= baton._statement_time() and s.ended_at is null and not s.needs_driver
) as r
cross join lateral (
  select
    case
      when r.status = 'pending' or not r.replay_ended then 'replay'
      when r.wake_at <= c.at then 'timer'
      when r.wake_pending or r.wake_seq > r.replayed_seq then 'unread'
      when exists (
        select
        from baton.tasks as t
        where t.run_id = r.run_id
          and t.status in ('created', 'started')
          and not exists (
            select
            from baton.messages as m
            where m.dedupe_key = t.run_id || e'\x1f' || t.step_slug || e'\x1f' || t.task_index
          )
          and not exists (
            select
            from baton.messages as m
            where t.status = 'started'
              and m.message_id = t.owner_message_id
              and m.delivery = t.owner_delivery
              and m.claimed_at is not null
              and m.visible_at > c.at
          )
      ) then 'task'
    end as reason
) as n
where n.reason is not null
and not exists (
  select
  from baton.messages as m
  where m.run_id = r.run_id
    and m.step_slug is null
    and case
      when m.visible_at <= c.at then true
      when m.claimed_at is null then m.dedupe_key is null or m.message_id = r.wake_message_id
      when not r.replay_ended and m.message_id = r.replay_message_id and m.delivery = r.replay_delivery then
        baton._connection_lives(r.replay_backend)
      else not exists (
        select
        from baton.tasks as t
        where t.owner_message_id = m.message_id and t.owner_delivery = m.delivery and t.status = 'started'
      )
    end
);

comment on view baton.wedged_runs is
'Runs that need a driver and have none; empty after a round of recovery.';
comment on column baton.wedged_runs.run_id is 'The run.';
comment on column baton.wedged_runs.workflow_name is 'Its workflow.';
comment on column baton.wedged_runs.queue_name is 'Its queue.';
comment on column baton.wedged_runs.status is 'pending, running or suspended.';
comment on column baton.wedged_runs.reason is
'The need: replay (it has not begun, or was lost), timer (wake_at has passed), unread (something happened that no replay has seen), task (an unfinished task has neither a message nor a live owner).';

comment on table baton.recovery_cursors is
'How far recovery has paged through the runs that somebody should be driving, a row a scope.
Written by: _recover_runs';
comment on column baton.recovery_cursors.scope is 'The queue that recover_runs was called for; empty for all.';
comment on column baton.recovery_cursors.queue_name is 'With run_id, the run looked at last.';
comment on column baton.recovery_cursors.wake_at is 'With wake_run_id, the sleeping run looked at last.';

-- Why the run was wedged, decided anew under its lock; null where it is not, or somebody holds its row.
create or replace function baton._recover_run(run_id text, at timestamptz)
returns text
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs;
  v_reason text;
begin
  select r.*
  into v_run
  from baton.runs as r
  where r.run_id = _recover_run.run_id
  for no key update of r skip locked;
  select w.reason into v_reason from baton.wedged_runs as w where w.run_id = v_run.run_id;
  if v_reason is not null then
    perform baton._wake(v_run, _recover_run.at);
    perform baton._incident(
      _recover_run.at, 'run_recovered', queue_name => v_run.queue_name, run_id => v_run.run_id,
      detail => jsonb_build_object('reason', v_reason)
    );
  end if;
  return v_reason;
end;
$$;

create or replace function baton._recover_runs(queue_name text, max_runs integer)
returns table (run_id text, reason text)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_scope text := coalesce(_recover_runs.queue_name, '');
  v_cursor baton.recovery_cursors;
  v_run record;
  v_page text[] := '{}'::text[];
  v_looked integer := 0;
  v_tasks bigint := 0::bigint;
  v_is_at_end boolean := true;
begin
  perform baton._require_read_committed();
  if not exists (select from baton.recovery_cursors as c where c.scope = v_scope)
    and pg_try_advisory_xact_lock(hashtextextended('baton.recovery_cursors ' || v_scope, 0)) then
    insert into baton.recovery_cursors (scope) values (v_scope) on conflict do nothing;
  end if;
  select c.* into v_cursor from baton.recovery_cursors as c where c.scope = v_scope for no key update of c skip locked;
  if not found then
    return;
  end if;
  v_cursor.queue_name := greatest(v_cursor.queue_name, v_scope);

  for v_run in
    select r.queue_name, r.run_id
    from baton.runs as r
    where r.needs_driver
      and (r.queue_name, r.run_id) > (v_cursor.queue_name, v_cursor.run_id)
    order by r.queue_name, r.run_id
    limit _recover_runs.max_runs
  loop
    exit when v_run.queue_name <> _recover_runs.queue_name;
    v_looked := v_looked + 1;
    v_page := v_page || v_run.run_id;
    v_cursor.queue_name := v_run.queue_name;
    v_cursor.run_id := v_run.run_id;
    select v_tasks + coalesce(sum(s.open_tasks), 0)
    into v_tasks
    from baton.steps as s
    where s.run_id = v_run.run_id and s.status = 'created';
    v_is_at_end := v_looked < _recover_runs.max_runs and v_tasks < 10000;
    exit when v_tasks >= 10000;
  end loop;
  if v_is_at_end then
    v_cursor.queue_name := '';
    v_cursor.run_id := '';
  end if;

  v_looked := 0;
  for v_run in
    select r.wake_at, r.run_id, r.queue_name
    from baton.runs as r
    where r.wake_at <= v_now and (r.wake_at, r.run_id) > (v_cursor.wake_at, v_cursor.wake_run_id)
    order by r.wake_at, r.run_id
    limit _recover_runs.max_runs
  loop
    v_looked := v_looked + 1;
    if _recover_runs.queue_name is null or v_run.queue_name = _recover_runs.queue_name then
      v_page := v_page || v_run.run_id;
    end if;
    v_cursor.wake_at := v_run.wake_at;
    v_cursor.wake_run_id := v_run.run_id;
  end loop;
  if v_looked < _recover_runs.max_runs then
    v_cursor.wake_at := '-infinity'::timestamptz;
    v_cursor.wake_run_id := '';
  end if;
  update baton.recovery_cursors as c
  set queue_name = v_cursor.queue_name, run_id = v_cursor.run_id,
    wake_at = v_cursor.wake_at, wake_run_id = v_cursor.wake_run_id
  where c.scope = v_scope;

  for v_run in
    select w.run_id from baton.wedged_runs as w where w.run_id = any (v_page) order by w.run_id
  loop
    run_id := v_run.run_id;
    reason := baton._recover_run(v_run.run_id, v_now);
    if reason is not null then
      return next;
    end if;
  end loop;
end;
$$;

create or replace function baton.recover_runs(queue_name text default null, max_runs integer default 1000)
returns table (run_id text, reason text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  if recover_runs.queue_name is not null then
    perform baton._check_name('queue_name', recover_runs.queue_name);
  end if;
  perform baton._check_limit('max_runs', recover_runs.max_runs);
  return query
  select r.run_id, r.reason
  from baton._recover_runs(recover_runs.queue_name, coalesce(recover_runs.max_runs, 1000)) as r;
end;
$$;

comment on function baton.recover_runs(text, integer) is
'Wake the runs that need a driver and have none (see wedged_runs). Safe from every process at every start, at the same time and repeatedly: a live replay is never disturbed, and a second caller returns at once. It pages through the runs that are not asleep, so that any number of healthy ones is passed in the end.
Arguments: queue_name, by default all queues; max_runs, how many to look at in one call (10,000 tasks at the most).
Returns: a row a run that was woken: run_id, reason (as in wedged_runs)
Raises: 22023, 25001
Locks: the runs that look wedged, never waiting';

/* ==== 345_control.sql */

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

/* ==== 350_ends.sql */

/*
 * How runs end: one path. What was unfinished is cancelled with it, its unclaimed messages go, and claimed ones can do
 * nothing any more. Of racing ends one wins; the others are told what the run is.
 */

-- The caller holds the run's lock, and knows that it is open.
create or replace function baton._end_run(run baton.runs, status text, payload jsonb, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_seq bigint;
begin
  v_seq := baton._append(_end_run.run, 'run_' || _end_run.status, null, _end_run.payload, _end_run.at);
  update baton.runs as r
  set status = _end_run.status,
    last_seq = v_seq,
    wake_pending = false,
    wake_at = null,
    replay_ended = true,
    ended_at = _end_run.at,
    needs_driver = false
  where r.run_id = (_end_run.run).run_id;
  perform baton._notify_control(_end_run.run, _end_run.status);
  update baton.tasks as t
  set status = 'cancelled'
  where t.run_id = (_end_run.run).run_id and t.status in ('created', 'started');
  update baton.steps as s
  set status = 'cancelled', open_tasks = 0
  where s.run_id = (_end_run.run).run_id and s.status = 'created';
  with free as (
    select m.message_id
    from baton.messages as m
    where m.run_id = (_end_run.run).run_id and (m.claimed_at is null or m.visible_at <= _end_run.at)
    order by m.message_id
    for update of m skip locked
  )
  delete from baton.messages as m where m.message_id = any (array(select f.message_id from free as f));
end;
$$;

-- An answer that leaves nothing to do settles the message that the replay was granted under.
create or replace function baton._settle_replay(run baton.runs, replay_epoch bigint)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from baton.messages as m
  where m.message_id = (_settle_replay.run).replay_message_id
    and m.delivery = (_settle_replay.run).replay_delivery
    and (_settle_replay.run).replay_epoch = _settle_replay.replay_epoch;
end;
$$;

create or replace function baton._check_fence(run baton.runs, replay_epoch bigint)
returns void
language sql
stable
begin atomic
  select
    case
      when (
        (_check_fence.run).replay_epoch = _check_fence.replay_epoch and not (_check_fence.run).replay_ended
      ) is not true
        then baton._raise(
            'superseded', quote_literal((_check_fence.run).run_id), coalesce(_check_fence.replay_epoch::text, 'null')
          )
    end;
end;

-- The replay that writes: an ended run is terminal, another epoch is refused. True where it may go on.
create or replace function baton._enter_replay(run baton.runs, replay_epoch bigint)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if not baton._is_open((_enter_replay.run).status) then
    perform baton._settle_replay(_enter_replay.run, _enter_replay.replay_epoch);
    return false;
  end if;
  perform baton._check_fence(_enter_replay.run, _enter_replay.replay_epoch);
  return true;
end;
$$;

-- What complete_run and fail_run share.
create or replace function baton._end_replayed_run(
  run_id text, replay_epoch bigint, payload jsonb, inout status text, out outcome text
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs;
begin
  perform baton._check_size('payload', pg_column_size(_end_replayed_run.payload));
  v_run := baton._lock_run(_end_replayed_run.run_id);
  if not baton._enter_replay(v_run, _end_replayed_run.replay_epoch) then
    outcome := 'terminal';
    status := v_run.status;
    return;
  end if;
  perform baton._settle_replay(v_run, _end_replayed_run.replay_epoch);
  perform baton._end_run(v_run, _end_replayed_run.status, _end_replayed_run.payload, baton._now());
  outcome := 'done';
end;
$$;

create or replace function baton.complete_run(
  run_id text, replay_epoch bigint, output jsonb, out outcome text, out status text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  select e.outcome, e.status
  into complete_run.outcome, complete_run.status
  from baton._end_replayed_run(complete_run.run_id, complete_run.replay_epoch, complete_run.output, 'completed') as e;
end;
$$;

comment on function baton.complete_run(text, bigint, jsonb) is
'End a run with its output, by the replay that holds it. The replay ends with it.
Outcomes: done; terminal, where it has ended already, or (status null) is unknown; with status
Raises: PB001, 54000, 25001
Locks: the run, then its messages';

create or replace function baton.fail_run(
  run_id text, replay_epoch bigint, error jsonb, out outcome text, out status text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  select e.outcome, e.status
  into fail_run.outcome, fail_run.status
  from baton._end_replayed_run(fail_run.run_id, fail_run.replay_epoch, fail_run.error, 'failed') as e;
end;
$$;

comment on function baton.fail_run(text, bigint, jsonb) is
'End a run with an error, by the replay that holds it. The replay ends with it.
Outcomes: done; terminal, where it has ended already, or (status null) is unknown; with status
Raises: PB001, 54000, 25001
Locks: the run, then its messages';

create or replace function baton.cancel_run(run_id text, reason text, out outcome text, out status text)
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
begin
  v_run := baton._lock_run(cancel_run.run_id);
  outcome := 'terminal';
  status := v_run.status;
  if baton._is_open(v_run.status) then
    perform baton._end_run(v_run, 'cancelled', to_jsonb(left(cancel_run.reason, 1000)), baton._now());
    outcome := 'done';
    status := 'cancelled';
  end if;
end;
$$;

comment on function baton.cancel_run(text, text) is
'End a run from outside. Queued work of it never starts; a replay that holds it is told at its next call.
Arguments: reason, for people; its first 1,000 characters are kept.
Outcomes: done; terminal, where it has ended already, or (status null) is unknown; with status
Raises: 25001
Locks: the run, then its messages';

/* ==== 360_replay.sql */

/*
 * One replay of a run at a time, across processes and machines. The run's row serialises grants and says who holds the
 * baton; a holder that lost it is recognised by its epoch.
 */
create or replace function baton._is_held(run baton.runs, at timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  return baton._claim_lives((_is_held.run).replay_message_id, (_is_held.run).replay_delivery, _is_held.at)
    and baton._connection_lives((_is_held.run).replay_backend);
end;
$$;

-- A replay that never ended: a lapse, an incident, and its message goes if it still is its and owns nothing. True where
-- the run is at its limit: the caller ends it.
create or replace function baton._lose_replay(run baton.runs, by_message_id bigint, at timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_lapses integer := (_lose_replay.run).lapses + 1;
begin
  perform baton._incident(
    _lose_replay.at, 'replay_lost', queue_name => (_lose_replay.run).queue_name,
    run_id => (_lose_replay.run).run_id, message_id => (_lose_replay.run).replay_message_id,
    detail => jsonb_build_object('replay_epoch', (_lose_replay.run).replay_epoch, 'lapses', v_lapses)
  );
  with lost as (
    select m.message_id
    from baton.messages as m
    where m.message_id = (_lose_replay.run).replay_message_id
      and m.message_id <> _lose_replay.by_message_id
      and m.delivery = (_lose_replay.run).replay_delivery
      and not baton._owns(m.message_id, m.delivery)
    for update of m skip locked
  )
  delete from baton.messages as m where m.message_id = any (array(select l.message_id from lost as l));
  update baton.runs as r set lapses = v_lapses where r.run_id = (_lose_replay.run).run_id;
  if v_lapses < (select s.max_lapses from baton.settings as s where s.singleton) then
    return false;
  end if;
  perform baton._incident(
    _lose_replay.at, 'limit_reached', queue_name => (_lose_replay.run).queue_name,
    run_id => (_lose_replay.run).run_id, detail => jsonb_build_object('lapses', v_lapses)
  );
  return true;
end;
$$;

create or replace function baton.begin_replay(
  message_id bigint,
  delivery bigint,
  hold text default 'lease',
  out outcome text,
  out run_id text,
  out workflow_name text,
  out replay_epoch bigint,
  out last_seq bigint,
  out clock timestamptz,
  out status text,
  out retry_after interval
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies
 *   the run's row not obtained within 100 ms               busy
 *   the receipt isn't current, or has run out              lost
 *   the run has ended or is unknown                        terminal
 *   held under this receipt                                granted anew
 *   held under another that lives                          handed_over
 *   otherwise, after a replay that was lost                granted, or at the limit terminal
 *   otherwise                                              granted
 */
declare
  v_free record;
  v_run baton.runs;
  v_backend integer;
begin
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  if begin_replay.hold = 'session' then
    v_backend := baton._hold_session();
  elsif begin_replay.hold <> 'lease' then
    perform baton._check_choice('hold', begin_replay.hold, 'lease', 'session');
  end if;

  -- Where both rows are free no subtransaction is needed, whose locks would make multixacts. Two look-ups: a join that
  -- was planned for few runs would read them all.
  select r as run, m.visible_at, m.dedupe_key
  into v_free
  from baton.runs as r
  cross join baton.messages as m
  where r.run_id = (select k.run_id from baton.messages as k where k.message_id = begin_replay.message_id)
    and m.message_id = begin_replay.message_id
    and m.delivery = begin_replay.delivery
    and m.claimed_at is not null
    and m.kind = 'run'
    and r.pruned_at is null
  for no key update of r, m skip locked;
  if found then
    run_id := (v_free.run).run_id;
  else
    select m.run_id
    into begin_replay.run_id
    from baton.messages as m
    where m.message_id = begin_replay.message_id and m.kind = 'run';
    if not found then
      outcome := 'lost';
      return;
    end if;
    begin
      perform baton._lock_soon(begin_replay.run_id, begin_replay.message_id, begin_replay.delivery);
    exception
      when lock_not_available then
        outcome := 'busy';
        retry_after := interval '1 second' * (0.8 + 0.4 * random());
        perform baton._postpone(begin_replay.message_id, begin_replay.delivery, begin_replay.retry_after);
        return;
    end;
    select baton._lock_run(begin_replay.run_id) as run, m.visible_at, m.dedupe_key
    into v_free
    from baton._lock_receipt(begin_replay.message_id, begin_replay.delivery) as m;
  end if;

  v_run := v_free.run;
  clock := baton._now();
  if (v_free.visible_at > clock) is not true then
    outcome := 'lost';
    perform baton._note_lost(begin_replay.message_id, begin_replay.delivery, 'begin_replay');
    return;
  end if;
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
    delete from baton.messages as m where m.message_id = begin_replay.message_id;
    return;
  end if;
  if not v_run.replay_ended
    and (v_run.replay_message_id, v_run.replay_delivery)
    is distinct from (begin_replay.message_id, begin_replay.delivery) then
    if baton._is_held(v_run, clock) then
      outcome := 'handed_over';
      update baton.runs as r set wake_pending = true where r.run_id = v_run.run_id;
      delete from baton.messages as m
      where m.message_id = begin_replay.message_id and not baton._owns(m.message_id, m.delivery);
      return;
    elsif baton._lose_replay(v_run, begin_replay.message_id, clock) then
      outcome := 'terminal';
      status := 'failed';
      perform baton._end_run(v_run, status, jsonb_build_object('reason', 'max_lapses'), clock);
      delete from baton.messages as m where m.message_id = begin_replay.message_id;
      return;
    end if;
  end if;

  update baton.runs as r
  set status = 'running',
    replay_epoch = baton._new_delivery(),
    replay_ended = false,
    replay_message_id = begin_replay.message_id,
    replay_delivery = begin_replay.delivery,
    replay_backend = v_backend,
    replay_began_at = begin_replay.clock,
    wake_pending = false,
    wake_message_id = nullif(r.wake_message_id, begin_replay.message_id),
    needs_driver = true
  where r.run_id = v_run.run_id
  returning 'granted', r.workflow_name, r.replay_epoch, r.last_seq, r.status
  into
    begin_replay.outcome, begin_replay.workflow_name, begin_replay.replay_epoch, begin_replay.last_seq,
    begin_replay.status;
  if v_free.dedupe_key is not null then
    update baton.messages as m set dedupe_key = null where m.message_id = begin_replay.message_id;
  end if;
end;
$$;

comment on function baton.begin_replay(bigint, bigint, text) is
'Ask for the replay of the run that a claimed run message names. The replay lasts as long as the receipt; extending the message extends it. Commit before you read the log: nobody waits for a holder.
Arguments: hold, lease, or session: then it also ends with the connection that asks, so that a killed process frees the run at once (that connection takes one advisory lock for its life).
Outcomes: granted, with run_id, workflow_name, replay_epoch (the fence that every writing verb names), last_seq, clock (by which a sleep is over or not); handed_over: somebody else holds it and will see what you brought; busy, with retry_after; terminal: the run has ended, with status; lost, where the receipt is not current or its claim has run out. After anything but granted take the next message
Raises: 22023, 25001
Locks: the run, then the message, waiting for each at most 100 ms
Source: the advisory lock around replays that users of the Workflow SDK built';

create or replace function baton.end_replay(
  run_id text,
  replay_epoch bigint,
  seen_seq bigint,
  wake_at timestamptz default null,
  out outcome text,
  out last_seq bigint,
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
/*
 *   the first row that applies
 *   the run has ended                                      terminal
 *   this epoch, ended already (the answer was lost)        ended; what came since is woken for
 *   another epoch, or the receipt isn't current            lost
 *   seen_seq beyond last_seq, wake_at infinite             22023
 *   something that asks for a replay was not seen          again
 *   otherwise                                              ended
 */
declare
  v_run baton.runs;
  v_now timestamptz;
begin
  -- _lock_run and _owns are written out: it is called for each replay, and a call in a call costs more than a look-up.
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  select r.*
  into v_run
  from baton.runs as r
  where r.run_id = end_replay.run_id and r.pruned_at is null
  for no key update of r;
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
    perform baton._settle_replay(v_run, end_replay.replay_epoch);
    return;
  elsif (v_run.replay_epoch = end_replay.replay_epoch) is not true then
    outcome := 'lost';
    return;
  elsif v_run.replay_ended then
    outcome := 'ended';
  elsif (
    end_replay.seen_seq between v_run.wake_seq and v_run.last_seq
    and coalesce(isfinite(end_replay.wake_at), true)
  ) is not true then
    if not baton._is_current(v_run.replay_message_id, v_run.replay_delivery) then
      outcome := 'lost';
      perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'end_replay');
      return;
    elsif (end_replay.seen_seq between 0 and v_run.last_seq) is not true then
      perform baton._raise('invalid_position', v_run.last_seq::text, coalesce(end_replay.seen_seq::text, 'null'));
    elsif not isfinite(end_replay.wake_at) then
      perform baton._raise('invalid_time', 'wake_at', end_replay.wake_at::text);
    end if;
    outcome := 'again';
    last_seq := v_run.last_seq;
    return;
  else
    delete from baton.messages as m
    where m.message_id = v_run.replay_message_id
      and m.delivery = v_run.replay_delivery
      and m.claimed_at is not null
      and not exists (
        select
        from baton.tasks as t
        where t.owner_message_id = m.message_id and t.owner_delivery = m.delivery and t.status = 'started'
      );
    if not found and (baton._lock_receipt(v_run.replay_message_id, v_run.replay_delivery)).message_id is null then
      outcome := 'lost';
      perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'end_replay');
      return;
    end if;
  end if;

  v_now := baton._now();
  if v_run.replay_ended then
    if v_run.wake_seq > v_run.replayed_seq then
      perform baton._wake(v_run, v_now);
    end if;
    return;
  end if;
  if v_run.wake_pending then
    v_run.wake_message_id := baton._ensure_wake(v_run, v_now);
  end if;
  update baton.runs as r
  set status = case when b.is_busy then 'running' else 'suspended' end,
    needs_driver = b.is_busy or r.wake_pending,
    replayed_seq = end_replay.seen_seq,
    replay_ended = true,
    failures = 0,
    lapses = 0,
    wake_at = end_replay.wake_at,
    wake_message_id = v_run.wake_message_id
  from (
    select exists (
      select from baton.tasks as t where t.run_id = end_replay.run_id and t.status in ('created', 'started')
    ) as is_busy
  ) as b
  where r.run_id = v_run.run_id
  returning 'ended', r.status into end_replay.outcome, end_replay.status;
  if v_run.wake_at is not null or end_replay.wake_at is not null then
    perform baton._set_timer(v_run, end_replay.wake_at, v_now);
  end if;
end;
$$;

comment on function baton.end_replay(text, bigint, bigint, timestamptz) is
'End a replay that has read and decided up to a position. Its message is removed, unless bodies run under it.
Arguments: seen_seq, the last position that the caller has read or was told to read up to; wake_at, when the run wants to be woken, by the clock that begin_replay gave.
Outcomes: ended; again, with last_seq: something came that asks for a replay: read up to there, decide, end again; terminal: the run has ended, or (status null) is unknown; lost: another replay has the baton, or the receipt is not current; with the run''s status
Raises: 22023, 25001
Locks: the run, then the message';

create or replace function baton.append_event(
  run_id text,
  replay_epoch bigint,
  type text,
  correlation_id text default null,
  payload jsonb default null,
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
  v_seq bigint;
begin
  perform baton._check_name('type', append_event.type);
  if strpos(append_event.type, '.') = 0 then
    perform baton._raise('invalid_event_type', quote_literal(append_event.type));
  end if;
  perform baton._check_key(append_event.correlation_id);
  perform baton._check_size('payload', pg_column_size(append_event.payload));
  v_run := baton._lock_run(append_event.run_id);
  if not baton._enter_replay(v_run, append_event.replay_epoch) then
    outcome := 'terminal';
    return;
  end if;
  if baton._has_event(v_run.run_id, append_event.type, append_event.correlation_id) then
    outcome := 'exists';
    return;
  end if;
  v_seq := baton._append(v_run, append_event.type, append_event.correlation_id, append_event.payload, baton._now());
  update baton.runs as r set last_seq = v_seq where r.run_id = v_run.run_id;
  outcome := 'appended';
end;
$$;

comment on function baton.append_event(text, bigint, text, text, jsonb) is
'Write an event of one''s own into the log, by the replay that holds it.
Arguments: type, with a dot in it; correlation_id, 1 to 500 bytes: an event of that type with it is written once.
Outcomes: appended; exists; terminal, where the run has ended or is unknown
Raises: PB001, 22023, 54000, 25001
Locks: the run';

create or replace function baton.release_replay(run_id text, out outcome text)
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
  v_spent integer;
  v_now timestamptz;
begin
  v_run := baton._lock_run(release_replay.run_id);
  outcome := 'none';
  if not baton._is_open(v_run.status) then
    return;
  end if;
  perform m.message_id
  from baton.messages as m
  where m.run_id = v_run.run_id and m.step_slug is null and m.claimed_at is not null
  order by m.message_id
  for no key update of m;
  v_now := baton._now();
  update baton.messages as m
  set claimed_at = null, visible_at = v_now
  where m.run_id = v_run.run_id and m.step_slug is null and m.claimed_at is not null
    and not baton._owns(m.message_id, m.delivery);
  get diagnostics v_spent = row_count;
  if v_spent = 0 and v_run.replay_ended then
    return;
  end if;
  update baton.runs as r
  set replay_epoch = baton._new_delivery(), replay_ended = true
  where r.run_id = v_run.run_id;
  perform baton._wake(v_run, v_now);
  perform baton._incident(
    v_now, 'operator', queue_name => v_run.queue_name, run_id => v_run.run_id,
    detail => jsonb_build_object('verb', 'release_replay')
  );
  outcome := 'released';
end;
$$;

comment on function baton.release_replay(text) is
'For operators: take the baton away from whoever holds it, and have the run replayed anew. Bodies that run go on.
Outcomes: released; none, where no replay is held and no message of the run that owns nothing is claimed, or the run has ended or is unknown
Raises: 25001
Locks: the run, then its claimed messages by id, waiting for them';

/* ==== 405_decisions.sql */

/*
 * What is decided of a task, as functions of what is known: keys, the lease, and the two decision tables. Nothing here
 * reads a table or a clock.
 */
-- The keys of runs and tasks hold a control character, which no user's key does, and a run has one queue: the key alone
-- finds the message, and no other index can be taken for that.
create or replace function baton._task_key(run_id text, step_slug text, task_index integer)
returns text
language sql
immutable
begin atomic
  select _task_key.run_id || e'\x1f' || _task_key.step_slug || e'\x1f' || _task_key.task_index::text;
end;

-- It names the attempt: all wakes of one attempt share one backstop, and a new stamp gets its own.
create or replace function baton._backstop_key(run_id text, step_slug text, task_index integer, attempt integer)
returns text
language sql
immutable
begin atomic
  select baton._task_key(_backstop_key.run_id, _backstop_key.step_slug, _backstop_key.task_index)
    || e'\x1fbackstop\x1f' || _backstop_key.attempt::text;
end;

-- How long a backstop waits: what is left of the lease since the stamp, in whole seconds; used up, a full lease again.
create or replace function baton._lease_remaining(last_started_at timestamptz, lease interval, at timestamptz)
returns interval
language sql
immutable
begin atomic
  select
    make_interval(
      secs => ceil(
        extract(
          epoch from case
            when _lease_remaining.at < _lease_remaining.last_started_at + _lease_remaining.lease
              then _lease_remaining.last_started_at + _lease_remaining.lease - _lease_remaining.at
            else _lease_remaining.lease
          end
        )
      )::double precision
    );
end;

-- What a replay does with an unfinished task; the first that applies. By owner: "receipt" is this run message's
-- receipt, "message" this message under an earlier delivery, "other" another message that lives, null none.
create or replace function baton._dispatch_decision(
  has_message boolean, owner text, may_run boolean, is_fresh boolean, is_within_limit boolean, inline_ownership boolean
)
returns text
language sql
immutable
begin atomic
  select
    case
      when _dispatch_decision.has_message then 'queued'
      when _dispatch_decision.owner = 'receipt' then 'running'
      when _dispatch_decision.owner = 'message' and _dispatch_decision.may_run then 'execute'
      when _dispatch_decision.owner = 'other' and _dispatch_decision.inline_ownership then 'backstop'
      when _dispatch_decision.is_fresh and _dispatch_decision.may_run and _dispatch_decision.is_within_limit
        then 'execute'
      else 'enqueue'
    end;
end;

-- What the holder of a task message does; the first that applies. By owner as above, "receipt" being its own.
create or replace function baton._start_decision(
  is_open boolean, status text, retry_at timestamptz, owner text, at timestamptz
)
returns text
language sql
immutable
begin atomic
  select
    case
      when not coalesce(_start_decision.is_open and _start_decision.status in ('created', 'started'), false) then 'skip'
      when _start_decision.status = 'created' and _start_decision.at < _start_decision.retry_at then 'await'
      when _start_decision.status = 'created' then 'execute'
      when _start_decision.owner = 'receipt' then 'again'
      when _start_decision.owner = 'other' then 'await'
      else 'recover'
    end;
end;

-- Whether a completion is the first, from an attempt since the last release.
create or replace function baton._completes(status text, fence_attempt integer, last_attempt integer, attempt integer)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    _completes.status in ('created', 'started')
    and _completes.attempt > _completes.fence_attempt
    and _completes.attempt <= _completes.last_attempt, false
  );
end;

/* ==== 410_steps.sql */

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

/* ==== 420_dispatch.sql */

/*
 * Dispatch: what a replay does with the unfinished tasks. Every start stamps the receipt that it runs under; that
 * delivery is the task's lease. What is not run here, and has no living owner, gets a message of its own.
 *
 * Whether a task has a message is asked with "offset 0", which keeps it a look-up a task: planned for few messages they
 * would be read all at once, at each dispatch.
 */

-- A task that would be recovered here, and was lost for the last time, fails before anything is started.
create or replace function baton._poisoned_task(run_id text, message baton.messages)
returns baton.tasks
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_task baton.tasks;
begin
  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = _poisoned_task.run_id
    and t.status = 'started'
    and t.owner_message_id = (_poisoned_task.message).message_id
    and t.owner_delivery <> (_poisoned_task.message).delivery
    and t.lapses + 1 >= (select s.max_lapses from baton.settings as s where s.singleton)
    and not exists (
      select
      from baton.messages as m
      where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
      offset 0
    )
  order by t.step_slug, t.task_index
  limit 1;
  v_task.lapses := v_task.lapses + 1;
  return v_task;
end;
$$;

-- Whether bodies may be started under a message that the worker claimed: it goes on. One that is not there any more had
-- stopped.
create or replace function baton._may_run(worker_id uuid)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (select from baton.workers as w where w.worker_id = _may_run.worker_id and baton._goes_on(w));
end;
$$;

-- Starts a body under a message: its receipt is stamped, and owns the task from then on. The event is at seq.
create or replace function baton._start(task baton.tasks, message baton.messages, seq bigint, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  with started as (
    update baton.tasks as t
    set status = 'started',
      attempt = t.attempt + 1,
      lapses = (_start.task).lapses,
      owner_message_id = (_start.message).message_id,
      owner_delivery = (_start.message).delivery,
      last_started_at = _start.at,
      worker_id = (_start.message).claimed_by
    where t.run_id = (_start.task).run_id
      and t.step_slug = (_start.task).step_slug
      and t.task_index = (_start.task).task_index
    returning t.run_id, t.step_slug, t.task_index, t.attempt, t.owner_message_id, t.owner_delivery
  )
  insert into baton.events (run_id, seq, type, payload, created_at)
  select
    s.run_id, _start.seq, 'task_started',
    jsonb_build_object(
      'step_slug', s.step_slug, 'task_index', s.task_index, 'attempt', s.attempt, 'message_id', s.owner_message_id,
      'delivery', s.owner_delivery
    ),
    _start.at
  from started as s;
end;
$$;

-- The run is replayed when the lease of a body that somebody else runs is over, once an attempt.
create or replace function baton._arm_backstop(run baton.runs, task baton.tasks, delay interval, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._backstop_key(
    (_arm_backstop.task).run_id, (_arm_backstop.task).step_slug, (_arm_backstop.task).task_index,
    (_arm_backstop.task).attempt
  );
begin
  if not exists (
    select from baton.messages as m where m.dedupe_key = v_key
  ) then
    perform baton._send_run_message(_arm_backstop.run, v_key, _arm_backstop.at + _arm_backstop.delay, _arm_backstop.at);
    perform baton._tally('backstop');
  end if;
end;
$$;

create or replace function baton.dispatch_tasks(run_id text, replay_epoch bigint, inline_limit integer default 1)
returns table (outcome text, step_slug text, task_index integer, attempt integer, input jsonb, delay interval)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_settings record;
  v_run baton.runs;
  v_message baton.messages;
  v_task baton.tasks;
  v_open record;
  v_running bigint;
  v_lost bigint;
  v_owner text;
  v_may_run boolean;
  v_last_seq bigint;
  v_slugs text[] := '{}'::text[];
  v_indexes integer[] := '{}'::integer[];
  v_due timestamptz[] := '{}'::timestamptz[];
  v_now timestamptz;
begin
  perform baton._check_limit('inline_limit', dispatch_tasks.inline_limit);
  v_run := baton._lock_run(dispatch_tasks.run_id);
  if not baton._enter_replay(v_run, dispatch_tasks.replay_epoch) then
    outcome := 'terminal';
    return next;
    return;
  end if;
  v_message := baton._lock_receipt(v_run.replay_message_id, v_run.replay_delivery);
  v_now := baton._now();
  if (v_message.visible_at > v_now) is not true then
    outcome := 'lost';
    perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'dispatch_tasks');
    return next;
    return;
  end if;

  v_last_seq := v_run.last_seq;
  v_may_run := v_message.claimed_by is null or baton._may_run(v_message.claimed_by);
  loop
    -- The tasks that were started under the message, by this delivery and by earlier ones; the latter only as far as
    -- they are left to it: those with a message of their own are not.
    select
      count(*) filter (where t.owner_delivery = v_message.delivery),
      count(*) filter (
        where t.owner_delivery <> v_message.delivery
          and not exists (
            select from baton.messages as m where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
            offset 0
          )
      )
    into v_running, v_lost
    from baton.tasks as t
    where t.owner_message_id = v_message.message_id and t.status = 'started';
    exit when not v_may_run or v_lost = 0;
    v_task := baton._poisoned_task(v_run.run_id, v_message);
    exit when v_task.run_id is null;
    v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('reason', 'max_lapses'), v_now);
    perform baton._incident(
      v_now, 'limit_reached', queue_name => v_run.queue_name, run_id => v_run.run_id, step_slug => v_task.step_slug,
      task_index => v_task.task_index, detail => jsonb_build_object('lapses', v_task.lapses)
    );
    outcome := 'failed';
    step_slug := v_task.step_slug;
    task_index := v_task.task_index;
    attempt := v_task.attempt;
    return next;
  end loop;
  if v_may_run then
    v_running := v_running + v_lost;
  end if;

  select s.inline_ownership, s.inline_lease into v_settings from baton.settings as s where s.singleton;
  for v_open in
    select
      t as task,
      exists (
        select from baton.messages as m where m.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
        offset 0
      ) as has_message
    from baton.tasks as t
    where t.run_id = v_run.run_id and t.status in ('created', 'started')
    order by
      (select s.created_seq from baton.steps as s where s.run_id = t.run_id and s.step_slug = t.step_slug),
      t.task_index
  loop
    v_task := v_open.task;
    v_owner := case
      when v_open.has_message or v_task.status = 'created' then null
      when v_task.owner_message_id = v_message.message_id and v_task.owner_delivery = v_message.delivery then 'receipt'
      when v_task.owner_message_id = v_message.message_id then 'message'
      when baton._claim_lives(v_task.owner_message_id, v_task.owner_delivery, v_now) then 'other'
    end;
    outcome := baton._dispatch_decision(
      v_open.has_message, v_owner, v_may_run, v_task.status = 'created' and v_task.failures = 0,
      v_running < coalesce(dispatch_tasks.inline_limit, 1), v_settings.inline_ownership
    );
    step_slug := v_task.step_slug;
    task_index := v_task.task_index;
    attempt := v_task.attempt;
    input := null;
    delay := null;
    case outcome
      when 'queued' then
        null;
      when 'running' then
        input := v_task.input;
      when 'execute' then
        if v_task.status = 'started' then
          v_task.lapses := v_task.lapses + 1;
          perform baton._incident(
            v_now, 'owned_recovery', queue_name => v_run.queue_name, message_id => v_message.message_id,
            run_id => v_run.run_id, step_slug => v_task.step_slug, task_index => v_task.task_index,
            detail => jsonb_build_object('attempt', v_task.attempt)
          );
        else
          v_running := v_running + 1;
        end if;
        v_run.last_seq := v_run.last_seq + 1;
        perform baton._start(v_task, v_message, v_run.last_seq, v_now);
        attempt := v_task.attempt + 1;
        input := v_task.input;
      when 'backstop' then
        delay := baton._lease_remaining(v_task.last_started_at, v_settings.inline_lease, v_now);
        perform baton._arm_backstop(v_run, v_task, dispatch_tasks.delay, v_now);
      when 'enqueue' then
        v_slugs := v_slugs || v_task.step_slug;
        v_indexes := v_indexes || v_task.task_index;
        v_due := v_due || greatest(v_now, v_task.retry_at);
        delay := greatest(v_task.retry_at - v_now, '0');
    end case;
    return next;
  end loop;

  if v_run.last_seq > v_last_seq then
    update baton.runs as r
    set last_seq = v_run.last_seq, wake_seq = v_run.wake_seq
    where r.run_id = v_run.run_id;
  end if;
  if cardinality(v_slugs) > 0 then
    insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
    select
      v_run.queue_name, 'task', v_run.run_id, e.step_slug, e.task_index,
      baton._task_key(v_run.run_id, e.step_slug, e.task_index), e.due_at, v_now
    from unnest(v_slugs, v_indexes, v_due) with ordinality as e (step_slug, task_index, due_at, nth)
    order by e.nth;
    perform baton._notify_message(v_run.queue_name);
  end if;
end;
$$;

comment on function baton.dispatch_tasks(text, bigint, integer) is
'What a replay does with the unfinished tasks of its run: start some here, see to it that the others are or will be started, once each. Bodies run outside the replay, while the run message is extended.
Arguments: inline_limit, how many bodies may run under this run message at the same time.
Returns: a row a task, in the order of their steps: outcome, step_slug, task_index, attempt, input (of execute and running), delay. queued: it has a message of its own; running: it was started under this receipt already, only a caller that lost the answer runs it; execute: the caller runs it; backstop: another one owns it and lives, and this run will be replayed after delay to look again; enqueue: its message was sent, due after delay; failed: it was lost for the last time. One row lost, where the receipt is not current or its claim has run out; one row terminal, where the run has ended or is unknown
Raises: PB001, 22023, 25001
Locks: the run, then its message; owners'' messages never waiting';

/* ==== 430_start_task.sql */

/*
 * Starting a task under its own message: single flight, over all processes and machines. The loser never acks early.
 */
-- Spends the receipt that a dead owner was started under, so that its late extend is lost; the caller has found it dead
-- under its row's lock.
create or replace function baton._take_over(task baton.tasks, by_message_id bigint)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.messages as m
  set claimed_at = null
  where m.message_id = (_take_over.task).owner_message_id
    and m.message_id <> _take_over.by_message_id
    and m.delivery = (_take_over.task).owner_delivery
    and m.claimed_at is not null;
end;
$$;

create or replace function baton.start_task(
  message_id bigint,
  delivery bigint,
  out outcome text,
  out run_id text,
  out step_slug text,
  out task_index integer,
  out attempt integer,
  out workflow_name text,
  out input jsonb,
  out retry_after interval
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies
 *   the receipt isn't current, has run out, or isn't a task message's   lost
 *   run, step or task ended, unknown or pruned                          skip
 *   created, retry_at ahead                                             await
 *   created                                                             execute
 *   started under this receipt                                          execute, same attempt
 *   started under another message that lives                            await
 *   started otherwise                                                   execute; lost for the last time: skip
 */
declare
  v_run baton.runs;
  v_message baton.messages;
  v_task baton.tasks;
  v_owned_by text;
  v_decision text;
  v_now timestamptz;
begin
  select m.run_id, m.step_slug, m.task_index
  into start_task.run_id, start_task.step_slug, start_task.task_index
  from baton.messages as m
  where m.message_id = start_task.message_id and m.kind = 'task';
  if not found then
    outcome := 'lost';
    return;
  end if;
  v_run := baton._lock_run(start_task.run_id);
  v_message := baton._lock_receipt(start_task.message_id, start_task.delivery);
  v_now := baton._now();
  if (v_message.visible_at > v_now) is not true then
    outcome := 'lost';
    perform baton._note_lost(start_task.message_id, start_task.delivery, 'start_task');
    return;
  end if;

  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = v_run.run_id and t.step_slug = start_task.step_slug and t.task_index = start_task.task_index;
  if v_task.status = 'started' then
    if v_task.owner_message_id = v_message.message_id and v_task.owner_delivery = v_message.delivery then
      v_owned_by := 'receipt';
    elsif v_task.owner_message_id <> v_message.message_id
      and baton._claim_lives(v_task.owner_message_id, v_task.owner_delivery, v_now) then
      v_owned_by := 'other';
    end if;
  end if;
  v_decision := baton._start_decision(
    baton._is_open(v_run.status), v_task.status, v_task.retry_at, v_owned_by, v_now
  );
  attempt := v_task.attempt;
  workflow_name := v_run.workflow_name;
  case v_decision
    when 'skip' then
      outcome := 'skip';
      delete from baton.messages as m where m.message_id = v_message.message_id;
      return;
    when 'await' then
      outcome := 'await';
      perform baton._tally('await');
      if v_task.status = 'created' then
        retry_after := v_task.retry_at - v_now;
      else
        -- Locked, it may be gone by now: then the caller asks again soon.
        select greatest(m.visible_at - v_now, '1 second')
        into start_task.retry_after
        from baton.messages as m
        where m.message_id = v_task.owner_message_id
        for no key update of m skip locked;
        retry_after := coalesce(retry_after, interval '1 second' * (1 + 0.2 * random()));
      end if;
      update baton.messages as m
      set visible_at = v_now + start_task.retry_after, claimed_at = null
      where m.message_id = v_message.message_id;
      return;
    when 'again' then
      outcome := 'execute';
      input := v_task.input;
      return;
    when 'execute' then
      outcome := 'execute';
    when 'recover' then
      outcome := 'execute';
      v_task.lapses := v_task.lapses + 1;
      perform baton._take_over(v_task, v_message.message_id);
      if v_task.lapses >= (select s.max_lapses from baton.settings as s where s.singleton) then
        outcome := 'skip';
        v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('reason', 'max_lapses'), v_now);
        perform baton._save_positions(v_run);
        perform baton._wake(v_run, v_now);
        perform baton._incident(
          v_now, 'limit_reached', queue_name => v_run.queue_name, run_id => v_run.run_id,
          step_slug => v_task.step_slug, task_index => v_task.task_index,
          detail => jsonb_build_object('lapses', v_task.lapses)
        );
        delete from baton.messages as m where m.message_id = v_message.message_id;
        return;
      end if;
      perform baton._incident(
        v_now, case when v_task.owner_message_id = v_message.message_id then 'owned_recovery' else 'takeover' end,
        queue_name => v_run.queue_name, run_id => v_run.run_id, message_id => v_task.owner_message_id,
        step_slug => v_task.step_slug, task_index => v_task.task_index,
        detail => jsonb_build_object('attempt', v_task.attempt)
      );
  end case;

  perform baton._start(v_task, v_message, v_run.last_seq + 1, v_now);
  update baton.runs as r set last_seq = r.last_seq + 1 where r.run_id = v_run.run_id;
  attempt := v_task.attempt + 1;
  input := v_task.input;
end;
$$;

comment on function baton.start_task(bigint, bigint) is
'Ask for the task that a claimed task message names. Of all who ask, on all machines, one executes it while it lives; the others wait.
Outcomes: execute, with run_id, step_slug, task_index, attempt, workflow_name, input; await, with retry_after: another one runs it, or its retry is not due yet; the message is due again then; skip: there is nothing to run any more, the message is removed; lost, where the receipt is not current or its claim has run out
Raises: 25001
Locks: the run, then the message; the owner''s message never waiting';

/* ==== 435_start_tasks.sql */

/*
 * Several starts at once: one statement starts all tasks that wait to be started; the others are left to start_task.
 *
 * All runs are locked first, by key, then all messages, by id: run by run it could wait in a circle with extend_many
 * and ack_many, which go by the ids of their messages alone. What a receipt names is looked up in subqueries with
 * "offset 0", and changed by its ctid, as in 442_complete_tasks.
 */
create or replace function baton.start_tasks(receipts jsonb)
returns table (
  outcome text,
  message_id bigint,
  delivery bigint,
  run_id text,
  step_slug text,
  task_index integer,
  attempt integer,
  workflow_name text,
  input jsonb,
  retry_after interval
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids bigint[];
  v_deliveries bigint[];
  v_run_id text;
  v_item record;
  v_now timestamptz;
begin
  select c.ids, c.deliveries into v_ids, v_deliveries from baton._receipts(start_tasks.receipts) as c;
  for v_run_id in
    select distinct m.run_id
    from baton.messages as m
    where m.message_id = any (v_ids) and m.kind = 'task'
    order by m.run_id
  loop
    perform baton._lock_run(v_run_id);
  end loop;
  perform m.message_id
  from baton.messages as m
  where m.message_id = any (v_ids)
    and m.claimed_at is not null
    and (
      m.kind = 'task'
      and (m.message_id, m.delivery) in (
        select c.message_id, c.delivery from unnest(v_ids, v_deliveries) as c (message_id, delivery)
      )
    ) is true
  order by m.message_id
  for no key update of m;
  v_now := baton._now();

  for v_item in
    with item as materialized (
      select
        c.nth, c.message_id, c.delivery, m.claimed_by, m.run_id, m.step_slug, m.task_index, t.task,
        t.attempt + 1 as attempt, t.input, r.run, r.last_seq, r.workflow_name,
        c.nth = min(c.nth) over (partition by c.message_id, c.delivery) as is_first,
        (
          m.visible_at > v_now
          and m.dedupe_key = baton._task_key(m.run_id, m.step_slug, m.task_index)
          -- One that has not been started has no owner; for any other this is not the answer.
          and baton._start_decision(baton._is_open(r.status), t.status, t.retry_at, null, v_now) = 'execute'
        ) is true as starts
      from unnest(v_ids, v_deliveries) with ordinality as c (message_id, delivery, nth)
      left join lateral (
        select m.run_id, m.step_slug, m.task_index, m.dedupe_key, m.visible_at, m.claimed_by
        from baton.messages as m
        where m.message_id = c.message_id
          and m.delivery = c.delivery
          and m.claimed_at is not null
          and m.kind = 'task'
        offset 0
      ) as m on true
      left join lateral (
        select r.ctid as run, r.status, r.last_seq, r.workflow_name
        from baton.runs as r
        where r.run_id = m.run_id
        offset 0
      ) as r on true
      left join lateral (
        select t.ctid as task, t.status, t.retry_at, t.attempt, t.input
        from baton.tasks as t
        where t.run_id = m.run_id and t.step_slug = m.step_slug and t.task_index = m.task_index
        offset 0
      ) as t on true
    ),
    started as (
      select
        i.run, i.task, i.run_id, i.step_slug, i.task_index, i.attempt, i.message_id, i.delivery, i.claimed_by,
        i.last_seq + row_number() over (partition by i.run_id order by i.message_id) as seq
      from item as i
      where i.starts and i.is_first
    ),
    stamped as (
      update baton.tasks as t
      set status = 'started',
        attempt = s.attempt,
        owner_message_id = s.message_id,
        owner_delivery = s.delivery,
        last_started_at = v_now,
        worker_id = s.claimed_by
      from started as s
      where t.ctid = s.task
    ),
    logged as (
      insert into baton.events (run_id, seq, type, payload, created_at)
      select
        s.run_id, s.seq, 'task_started',
        jsonb_build_object(
          'step_slug', s.step_slug, 'task_index', s.task_index, 'attempt', s.attempt, 'message_id', s.message_id,
          'delivery', s.delivery
        ),
        v_now
      from started as s
    ),
    moved as (
      update baton.runs as r
      set last_seq = s.last_seq
      from (select s.run, max(s.seq) as last_seq from started as s group by s.run) as s
      where r.ctid = s.run
    )
    select
      i.message_id, i.delivery, i.starts, i.run_id, i.step_slug, i.task_index, i.attempt, i.workflow_name, i.input
    from item as i
    order by i.nth
  loop
    if v_item.starts then
      outcome := 'execute';
      run_id := v_item.run_id;
      step_slug := v_item.step_slug;
      task_index := v_item.task_index;
      attempt := v_item.attempt;
      workflow_name := v_item.workflow_name;
      input := v_item.input;
      retry_after := null;
    else
      select s.outcome, s.run_id, s.step_slug, s.task_index, s.attempt, s.workflow_name, s.input, s.retry_after
      into
        start_tasks.outcome, start_tasks.run_id, start_tasks.step_slug, start_tasks.task_index, start_tasks.attempt,
        start_tasks.workflow_name, start_tasks.input, start_tasks.retry_after
      from baton.start_task(v_item.message_id, v_item.delivery) as s;
    end if;
    message_id := v_item.message_id;
    delivery := v_item.delivery;
    return next;
  end loop;
end;
$$;

comment on function baton.start_tasks(jsonb) is
'Ask for the tasks that several claimed task messages name, as start_task would one by one: first those that wait to be started, in the order of their messages; then the others, in the caller''s.
Arguments: receipts, an array of objects with message_id and delivery.
Returns: a row each, in their order: outcome as in start_task, message_id, delivery, and what else start_task gives
Raises: 22023, 25001
Locks: the runs by key, then the messages by id; the owners'' messages never waiting';

/* ==== 440_end_task.sql */

/*
 * How a task ends. The first completion wins, from any attempt since the last release. Whatever ends a step wakes the
 * run once, unless the caller holds a run message of it: that handler begins a replay next.
 */

-- Whether a replay follows by itself: of a handler that holds a run message of the run.
create or replace function baton._replays_next(message baton.messages, run_id text)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    (_replays_next.message).kind = 'run' and (_replays_next.message).run_id = _replays_next.run_id, false
  );
end;

-- A step has ended: writes the run's positions, and wakes it, unless a replay follows by itself.
create or replace function baton._settle_run(run baton.runs, message baton.messages, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform baton._save_positions(_settle_run.run);
  if not baton._replays_next(_settle_run.message, (_settle_run.run).run_id) then
    perform baton._wake(_settle_run.run, _settle_run.at);
  end if;
end;
$$;

-- The task's own message goes: the caller's, or one that nobody holds.
create or replace function baton._drop_task_message(
  run_id text, step_slug text, task_index integer, message baton.messages, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._task_key(
    _drop_task_message.run_id, _drop_task_message.step_slug, _drop_task_message.task_index
  );
begin
  if (_drop_task_message.message).dedupe_key = v_key then
    delete from baton.messages as m where m.message_id = (_drop_task_message.message).message_id;
    return;
  end if;
  delete from baton.messages as d
  where d.message_id = (
    select m.message_id
    from baton.messages as m
    where m.dedupe_key = v_key and (m.claimed_at is null or m.visible_at <= _drop_task_message.at)
    for update of m skip locked
  );
end;
$$;

-- A callback that came after the end is told so, and leaves an incident; of what it names only as much as a name has.
create or replace function baton._note_too_late(
  run_id text, step_slug text, task_index integer, status text, verb text, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  perform baton._incident(
    _note_too_late.at, 'too_late', run_id => left(_note_too_late.run_id, 200),
    step_slug => left(_note_too_late.step_slug, 200),
    task_index => _note_too_late.task_index,
    detail => jsonb_build_object('verb', _note_too_late.verb, 'status', _note_too_late.status)
  );
end;
$$;

-- The task's own message is due at the given time: the caller's, or one that waits, or a new one.
create or replace function baton._requeue_task(
  run baton.runs, task baton.tasks, due_at timestamptz, message baton.messages, at timestamptz
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._task_key(
    (_requeue_task.run).run_id, (_requeue_task.task).step_slug, (_requeue_task.task).task_index
  );
begin
  if (_requeue_task.message).kind = 'task' then
    update baton.messages as m
    set visible_at = _requeue_task.due_at, claimed_at = null
    where m.message_id = (_requeue_task.message).message_id;
  elsif not exists (
    select
    from baton.messages as m
    where m.dedupe_key = v_key
  ) then
    insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
    values (
      (_requeue_task.run).queue_name, 'task', (_requeue_task.run).run_id, (_requeue_task.task).step_slug,
      (_requeue_task.task).task_index, v_key, _requeue_task.due_at, _requeue_task.at
    );
    perform baton._notify_message((_requeue_task.run).queue_name);
  end if;
end;
$$;

create or replace function baton.complete_task(
  run_id text,
  step_slug text,
  task_index integer,
  attempt integer,
  output jsonb,
  message_id bigint,
  delivery bigint,
  out outcome text,
  out step_ended boolean
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
  v_message baton.messages;
  v_status text;
  v_now timestamptz;
begin
  perform baton._check_size('output', pg_column_size(complete_task.output));
  v_run := baton._lock_run(complete_task.run_id);
  v_message := baton._lock_receipt(complete_task.message_id, complete_task.delivery);
  v_now := baton._now();
  step_ended := false;
  update baton.tasks as t
  set status = 'completed'
  where t.run_id = v_run.run_id
    and t.step_slug = complete_task.step_slug
    and t.task_index = complete_task.task_index
    and baton._completes(t.status, t.fence_attempt, t.attempt, complete_task.attempt);
  if found then
    outcome := 'completed';
    update baton.steps as s
    set open_tasks = s.open_tasks - 1,
      status = case s.open_tasks when 1 then 'completed' else s.status end
    where s.run_id = v_run.run_id and s.step_slug = complete_task.step_slug
    returning s.open_tasks = 0 into complete_task.step_ended;
    v_run.last_seq := baton._append(
      v_run, 'task_completed', null,
      jsonb_build_object(
        'step_slug', complete_task.step_slug, 'task_index', complete_task.task_index,
        'attempt', complete_task.attempt, 'output', complete_task.output
      ),
      v_now
    );
    if step_ended then
      v_run.last_seq := baton._append(
        v_run, 'step_completed', null, jsonb_build_object('step_slug', complete_task.step_slug), v_now
      );
      v_run.wake_seq := v_run.last_seq;
      perform baton._settle_run(v_run, v_message, v_now);
    else
      update baton.runs as r set last_seq = v_run.last_seq where r.run_id = v_run.run_id;
    end if;
  else
    select t.status
    into v_status
    from baton.tasks as t
    where t.run_id = v_run.run_id
      and t.step_slug = complete_task.step_slug
      and t.task_index = complete_task.task_index;
    if v_status in ('created', 'started') then
      outcome := 'lost';
      perform baton._note_lost(complete_task.message_id, complete_task.delivery, 'complete_task');
      return;
    elsif v_status = 'completed' then
      outcome := 'already_completed';
    else
      outcome := 'too_late';
      perform baton._note_too_late(
        complete_task.run_id, complete_task.step_slug, complete_task.task_index, v_status, 'complete_task', v_now
      );
    end if;
  end if;
  perform baton._drop_task_message(
    complete_task.run_id, complete_task.step_slug, complete_task.task_index, v_message, v_now
  );
end;
$$;

comment on function baton.complete_task(text, text, integer, integer, jsonb, bigint, bigint) is
'Record the output of a task. The first completion wins, from any attempt since the task was last released, also after its claim ran out; the task''s own message is removed.
Arguments: attempt, as execute gave it; message_id and delivery, the receipt that the body runs under: the task''s own, or the run message''s.
Outcomes: completed, with step_ended where it was the last of its step (the run is woken, unless a run message of it is the receipt); already_completed; too_late: the task, its step or its run has ended otherwise or is unknown; lost: the attempt was never given out, or was released
Raises: 54000, 25001
Locks: the run, then the message';

create or replace function baton.fail_task(
  run_id text,
  step_slug text,
  task_index integer,
  attempt integer,
  error jsonb,
  message_id bigint,
  delivery bigint,
  retry_delay interval default null,
  final boolean default false,
  out outcome text,
  out retry_at timestamptz,
  out step_ended boolean
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
  v_message baton.messages;
  v_task baton.tasks;
  v_max_attempts integer;
  v_now timestamptz;
begin
  perform baton._check_interval('retry_delay', fail_task.retry_delay);
  perform baton._check_size('error', pg_column_size(fail_task.error));
  v_run := baton._lock_run(fail_task.run_id);
  v_message := baton._lock_receipt(fail_task.message_id, fail_task.delivery);
  v_now := baton._now();
  step_ended := false;
  select t.*
  into v_task
  from baton.tasks as t
  where t.run_id = v_run.run_id and t.step_slug = fail_task.step_slug and t.task_index = fail_task.task_index;

  if v_task.status is null or v_task.status not in ('created', 'started') then
    outcome := 'too_late';
    perform baton._note_too_late(
      fail_task.run_id, fail_task.step_slug, fail_task.task_index, v_task.status, 'fail_task', v_now
    );
    perform baton._drop_task_message(
      fail_task.run_id, fail_task.step_slug, fail_task.task_index, v_message, v_now
    );
    return;
  elsif (
    v_message.message_id is not null
    and v_task.status = 'started'
    and v_task.attempt = fail_task.attempt
    and v_task.owner_message_id = v_message.message_id
    and v_task.owner_delivery = v_message.delivery
  ) is not true then
    outcome := 'lost';
    perform baton._note_lost(fail_task.message_id, fail_task.delivery, 'fail_task');
    return;
  end if;

  select s.max_attempts
  into v_max_attempts
  from baton.steps as s
  where s.run_id = v_run.run_id and s.step_slug = v_task.step_slug;
  v_task.failures := v_task.failures + 1;
  if fail_task.final or v_task.failures >= v_max_attempts then
    outcome := 'failed';
    step_ended := true;
    v_run := baton._exhaust_task(v_run, v_task, jsonb_build_object('error', fail_task.error), v_now);
    perform baton._settle_run(v_run, v_message, v_now);
    perform baton._drop_task_message(v_run.run_id, v_task.step_slug, v_task.task_index, v_message, v_now);
    return;
  end if;

  outcome := 'retrying';
  retry_at := v_now + coalesce(fail_task.retry_delay, baton._backoff(v_task.failures));
  update baton.tasks as t
  set status = 'created',
    failures = v_task.failures,
    lapses = 0,
    retry_at = fail_task.retry_at,
    owner_message_id = null,
    owner_delivery = null
  where t.run_id = v_run.run_id and t.step_slug = v_task.step_slug and t.task_index = v_task.task_index;
  v_run := baton._task_event(
    v_run, 'task_retrying', v_task, jsonb_build_object('error', fail_task.error, 'retry_at', fail_task.retry_at), v_now
  );
  perform baton._save_positions(v_run);
  perform baton._requeue_task(v_run, v_task, retry_at, v_message, v_now);
end;
$$;

comment on function baton.fail_task(text, text, integer, integer, jsonb, bigint, bigint, interval, boolean) is
'Record that a body failed: it is retried under a message of its own, or has failed for good, and its step ends as on_exhausted says.
Arguments: attempt, as execute gave it; error, anything; message_id and delivery, the receipt that the body was started under; retry_delay, by default the back-off of fail; final, no more retries.
Outcomes: retrying, with retry_at; failed, with step_ended (the run is woken, unless a run message of it is the receipt); too_late: the task, its step or its run has ended or is unknown; lost: it is not the current attempt under the receipt that started it, or that is not current
Raises: 22023, 54000, 25001
Locks: the run, then the message';

/* ==== 442_complete_tasks.sql */

/*
 * Several ends at once: one statement decides on all that complete a task which no other one names, in the order of
 * their messages, as complete_task would one by one. The others are left to that: which of two comes first decides, and
 * what completes nothing writes nothing into the run.
 *
 * What an item names is looked up in subqueries with "offset 0", and changed by its ctid, which nobody else changes
 * under the run's lock: a join that was planned for few items or a small table reads all of that, or more than that.
 */
create or replace function baton._completions(completions jsonb)
returns table (
  nth bigint, step_slug text, task_index integer, attempt integer, output jsonb, message_id bigint, delivery bigint
)
language sql
stable
begin atomic
  select
    i.nth, i.item ->> 'step_slug' as step_slug, (i.item ->> 'task_index')::integer as task_index,
    (i.item ->> 'attempt')::integer as attempt, i.item -> 'output' as output,
    (i.item ->> 'message_id')::bigint as message_id, (i.item ->> 'delivery')::bigint as delivery
  from jsonb_array_elements(_completions.completions) with ordinality as i (item, nth);
end;

create or replace function baton._check_completions(completions jsonb)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_invalid jsonb;
begin
  if _check_completions.completions is null or jsonb_typeof(_check_completions.completions) <> 'array' then
    perform baton._raise('invalid_completions', 'not an array');
  end if;
  select i.item
  into v_invalid
  from jsonb_array_elements(_check_completions.completions) as i (item)
  where (
    jsonb_typeof(i.item) = 'object'
    and coalesce(i.item ->> 'task_index', '0') ~ '^[0-9]{1,9}$'
    and coalesce(i.item ->> 'attempt', '0') ~ '^[0-9]{1,9}$'
    and coalesce(i.item ->> 'message_id', '0') ~ '^[0-9]{1,18}$'
    and coalesce(i.item ->> 'delivery', '0') ~ '^[0-9]{1,18}$'
  ) is not true
  limit 1;
  if found then
    perform baton._raise('invalid_completions', 'not a completion: ' || left(v_invalid::text, 60));
  end if;
  perform
    baton._check_size(
      'output',
      (
        select max(pg_column_size(i.item -> 'output'))
        from jsonb_array_elements(_check_completions.completions) as i (item)
      )
    );
end;
$$;

create or replace function baton.complete_tasks(run_id text, completions jsonb)
returns table (outcome text, step_slug text, task_index integer, step_ended boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_run baton.runs;
  v_last_seq bigint;
  v_wake_seq bigint;
  v_wakes boolean;
  v_outcomes text[];
  v_ended boolean[];
  v_item record;
  v_answer record;
  v_now timestamptz;
begin
  perform baton._check_completions(complete_tasks.completions);
  v_run := baton._lock_run(complete_tasks.run_id);
  perform m.message_id
  from baton.messages as m
  where m.message_id = any (array(select c.message_id from baton._completions(complete_tasks.completions) as c))
    and m.claimed_at is not null
    and (
      (m.message_id, m.delivery) in (
        select c.message_id, c.delivery from baton._completions(complete_tasks.completions) as c
      )
    ) is true
  order by m.message_id
  for no key update of m;
  v_now := baton._now();

  with item as materialized (
    select
      c.nth, c.step_slug, c.task_index, c.attempt, c.output, m.message_id, m.is_own, m.replays_next, t.task,
      row_number() over (order by c.message_id, c.nth) as turn,
      baton._completes(t.status, t.fence_attempt, t.attempt, c.attempt)
      and count(*) over (partition by c.step_slug, c.task_index) = 1 as completes
    from baton._completions(complete_tasks.completions) as c
    left join lateral (
      select
        m.message_id, m.dedupe_key = baton._task_key(v_run.run_id, c.step_slug, c.task_index) as is_own,
        baton._replays_next(m, v_run.run_id) as replays_next
      from baton.messages as m
      where m.message_id = c.message_id and m.delivery = c.delivery and m.claimed_at is not null
      offset 0
    ) as m on true
    left join lateral (
      select t.ctid as task, t.status, t.fence_attempt, t.attempt
      from baton.tasks as t
      where t.run_id = v_run.run_id and t.step_slug = c.step_slug and t.task_index = c.task_index
      offset 0
    ) as t on true
  ),
  completed as (
    update baton.tasks as t set status = 'completed' from item as i where i.completes and t.ctid = i.task
  ),
  counted as (
    update baton.steps as s
    set open_tasks = s.open_tasks - c.tasks,
      status = case s.open_tasks when c.tasks then 'completed' else s.status end
    from (
      select
        count(*) as tasks, max(i.turn) as turn,
        (select s.ctid from baton.steps as s where s.run_id = v_run.run_id and s.step_slug = i.step_slug) as step
      from item as i
      where i.completes
      group by i.step_slug
    ) as c
    where s.ctid = c.step
    returning s.step_slug, s.open_tasks, c.turn
  ),
  logged as (
    insert into baton.events as e (run_id, seq, type, payload, created_at)
    select v_run.run_id, v_run.last_seq + row_number() over (order by n.turn, n.part), n.type, n.payload, v_now
    from (
      select
        i.turn, 1 as part, 'task_completed' as type,
        jsonb_build_object(
          'step_slug', i.step_slug, 'task_index', i.task_index, 'attempt', i.attempt, 'output', i.output
        ) as payload
      from item as i
      where i.completes
      union all
      select c.turn, 2, 'step_completed', jsonb_build_object('step_slug', c.step_slug)
      from counted as c
      where c.open_tasks = 0
    ) as n
    returning e.seq, e.type
  ),
  free as (
    select m.message_id
    from baton.messages as m
    where m.dedupe_key = any (
        array(
          select baton._task_key(v_run.run_id, i.step_slug, i.task_index)
          from item as i
          where i.completes and i.is_own is not true
        )
      )
      and (m.claimed_at is null or m.visible_at <= v_now)
    for update of m skip locked
  ),
  dropped as (
    delete from baton.messages as m
    where m.message_id = any (
      array(
        select i.message_id from item as i where i.completes and i.is_own
        union all
        select f.message_id from free as f
      )
    )
  ),
  answer as (
    select
      i.nth, i.replays_next, case when i.completes then 'completed' end as outcome,
      i.turn in (select c.turn from counted as c where c.open_tasks = 0) as step_ended
    from item as i
  )
  select
    array_agg(a.outcome order by a.nth),
    array_agg(a.step_ended order by a.nth),
    bool_or(a.step_ended and a.replays_next is not true),
    (select max(l.seq) from logged as l),
    (select max(l.seq) from logged as l where l.type = 'step_completed')
  into v_outcomes, v_ended, v_wakes, v_last_seq, v_wake_seq
  from answer as a;
  if v_last_seq is not null then
    v_run.last_seq := v_last_seq;
    v_run.wake_seq := coalesce(v_wake_seq, v_run.wake_seq);
    perform baton._save_positions(v_run);
  end if;
  if v_wakes then
    perform baton._wake(v_run, v_now);
  end if;

  for v_item in
    select c.nth, c.step_slug, c.task_index, c.attempt, c.output, c.message_id, c.delivery
    from baton._completions(complete_tasks.completions) as c
    where (
      c.nth in (select o.nth from unnest(v_outcomes) with ordinality as o (outcome, nth) where o.outcome is null)
    ) is true
    order by c.message_id, c.nth
  loop
    v_answer := baton.complete_task(
      complete_tasks.run_id, v_item.step_slug, v_item.task_index, v_item.attempt, v_item.output, v_item.message_id,
      v_item.delivery
    );
    v_outcomes[v_item.nth] := v_answer.outcome;
    v_ended[v_item.nth] := v_answer.step_ended;
  end loop;

  return query
  select i.outcome, i.item ->> 'step_slug', (i.item ->> 'task_index')::integer, i.step_ended
  from rows from (
    jsonb_array_elements(complete_tasks.completions), unnest(v_outcomes), unnest(v_ended)
  ) with ordinality as i (item, outcome, step_ended, nth)
  order by i.nth;
end;
$$;

comment on function baton.complete_tasks(text, jsonb) is
'Record the outputs of several tasks of a run, as complete_task would one by one, in the order of their messages; one that is named twice after the others.
Arguments: completions, an array of objects with the other arguments of complete_task.
Returns: a row each, in their order: outcome as in complete_task, step_slug, task_index, step_ended
Raises: 22023, 54000, 25001
Locks: the run, then the messages by id';

/* ==== 445_advance_run.sql */

/*
 * The short way from one inline step to the next. The handler that ran the body has decided already what comes after
 * it, over a log that nobody has added to since its replay: there is nothing that another replay could see.
 */
create or replace function baton.advance_run(
  run_id text,
  replay_epoch bigint,
  step_slug text,
  output jsonb,
  next_step_slug text,
  next_input jsonb,
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
/*
 *   advanced where all of this holds, else declined
 *   the run's last replay had this epoch, and has ended
 *   nothing has asked for a replay since: no event, no wake, no timer
 *   its receipt is current and has not run out, and its worker goes on
 *   the task is its step's only one (a sibling's end asks for no replay), and the run's only unfinished one
 *   it was started under that receipt, for the first time, and has no message
 *   the next step is new
 */
declare
  v_run record;
  v_message record;
  v_on_exhausted text := coalesce(advance_run.on_exhausted, 'fail_step');
  v_max_attempts integer := coalesce(advance_run.max_attempts, 3);
  v_now timestamptz;
begin
  perform
    baton._check_step(advance_run.next_step_slug, advance_run.on_exhausted, advance_run.max_attempts),
    baton._check_size('output', pg_column_size(advance_run.output)),
    baton._check_size('next_input', pg_column_size(jsonb_build_array(advance_run.next_input)));
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  outcome := 'declined';
  -- The write that locks the run gives out the position: most calls need no other.
  update baton.runs as r
  set last_seq = r.last_seq + 1
  where r.run_id = advance_run.run_id
    and r.replay_ended
    and r.replay_epoch = advance_run.replay_epoch
    and r.replayed_seq >= r.wake_seq
    and not r.wake_pending
    and r.wake_at is null
  returning r.run_id, r.last_seq, r.replay_message_id, r.replay_delivery into v_run;
  if not found then
    return;
  end if;
  -- _lock_receipt, written out, as it is called for each step.
  select m.message_id, m.delivery, m.visible_at, m.claimed_by
  into v_message
  from baton.messages as m
  where m.message_id = v_run.replay_message_id and m.delivery = v_run.replay_delivery and m.claimed_at is not null
  for no key update of m;
  v_now := baton._now();

  update baton.tasks as t
  set status = 'completed'
  where t.run_id = v_run.run_id
    and t.step_slug = advance_run.step_slug
    and t.task_index = 0
    -- "Is true" keeps it a look-up by the whole key.
    and (
      t.status = 'started'
      and t.attempt = 1
      and t.owner_message_id = v_message.message_id
      and t.owner_delivery = v_message.delivery
      and v_message.visible_at > v_now
    ) is true
    and (v_message.claimed_by is null or baton._may_run(v_message.claimed_by))
    and exists (
      select
      from baton.steps as s
      where s.run_id = v_run.run_id and s.step_slug = advance_run.step_slug and s.task_count = 1
    )
    and not exists (
      select
      from baton.tasks as o
      where o.run_id = v_run.run_id
        and o.status in ('created', 'started')
        and (o.step_slug, o.task_index) <> (advance_run.step_slug, 0)
    )
    and not exists (
      select
      from baton.messages as m
      where m.dedupe_key = baton._task_key(v_run.run_id, advance_run.step_slug, 0)
    )
    and not exists (
      select
      from baton.steps as s
      where s.run_id = v_run.run_id and s.step_slug = advance_run.next_step_slug
    );
  if not found then
    update baton.runs as r set last_seq = r.last_seq - 1 where r.run_id = v_run.run_id;
    return;
  end if;

  outcome := 'advanced';
  with ended as (
    update baton.steps as s
    set status = 'completed', open_tasks = 0
    where s.run_id = v_run.run_id and s.step_slug = advance_run.step_slug
  ),
  created as (
    insert into baton.steps (run_id, step_slug, task_count, open_tasks, on_exhausted, max_attempts, created_seq)
    values (v_run.run_id, advance_run.next_step_slug, 1, 1, v_on_exhausted, v_max_attempts, v_run.last_seq)
  ),
  started as (
    insert into baton.tasks (
      run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery, last_started_at, worker_id,
      input
    )
    values (
      v_run.run_id, advance_run.next_step_slug, 0, 'started', 1, v_message.message_id, v_message.delivery, v_now,
      v_message.claimed_by, coalesce(advance_run.next_input, 'null')
    )
  )
  insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)
  values (
    v_run.run_id, v_run.last_seq, 'run_advanced', advance_run.next_step_slug,
    jsonb_build_object(
      'step_slug', advance_run.step_slug, 'output', advance_run.output, 'next_step_slug', advance_run.next_step_slug,
      'on_exhausted', v_on_exhausted, 'max_attempts', v_max_attempts, 'message_id', v_message.message_id,
      'delivery', v_message.delivery
    ),
    v_now
  );
end;
$$;

comment on function baton.advance_run(text, bigint, text, jsonb, text, jsonb, text, integer) is
'Record the output of the one body that runs inline, and start the next step here, in one call, one commit and one event, run_advanced: what complete_task, begin_replay, create_step, dispatch_tasks and end_replay would do, where nothing else has happened to the run since the caller''s last replay. Where it is declined, take the long way.
Arguments: replay_epoch, of the caller''s last replay; step_slug, the step of one task whose body has ended; output, of that; next_step_slug, unique in the run; next_input, of its one task; on_exhausted and max_attempts, as in create_step.
Outcomes: advanced: the caller runs the body of the next step, task 0, attempt 1, under the same receipt; declined: nothing was changed, and the message stays as it is. That is so if the run has ended or is unknown; if a signal or anything else came that asks for a replay, another replay was granted, or the caller''s has not ended; if the receipt is not current, its claim has run out, or the worker stops; if a timer is set or other tasks are unfinished; if the step has several tasks, or its body has ended, does not run under this receipt, is not in its first attempt, or has a message of its own; or if there is a step of the next one''s name
Raises: 22023, 54000, 25001
Locks: the run, then the message
Source: eager activity execution of Temporal';

/* ==== 450_release_task.sql */

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

/* ==== 460_giving_back.sql */

/*
 * park and fail: giving a message back. A user's message is locked alone. A run message ends the replay that it holds
 * and becomes the run's wake, so that signals can neither cut a back-off nor multiply messages; it counts on the run,
 * whichever messages drive it.
 */

-- The run's wake, due at the given time: where there is none, the message that is given back (null: a new one); a wake
-- that waits unclaimed takes the later time instead; where somebody holds the wake, the message waits beside it.
create or replace function baton._set_back(
  run baton.runs, message_id bigint, due_at timestamptz, at timestamptz
)
returns timestamptz
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message_id bigint := _set_back.message_id;
  v_due_at timestamptz := _set_back.due_at;
  v_wake_id bigint;
  v_wake baton.messages;
begin
  select m.message_id
  into v_wake_id
  from baton.messages as m
  where m.message_id = (_set_back.run).wake_message_id;
  select m.*
  into v_wake
  from baton.messages as m
  where m.message_id = v_wake_id
    and m.message_id is distinct from _set_back.message_id
    and (m.claimed_at is null or m.visible_at <= _set_back.at)
  for no key update of m skip locked;
  if found then
    v_due_at := greatest(v_wake.visible_at, _set_back.due_at);
    delete from baton.messages as m where m.message_id = _set_back.message_id;
    update baton.messages as m set visible_at = v_due_at, claimed_at = null where m.message_id = v_wake_id;
  elsif _set_back.message_id is null then
    v_message_id := baton._send_run_message(_set_back.run, null, _set_back.due_at, _set_back.at);
  else
    update baton.messages as m
    set dedupe_key = null, visible_at = _set_back.due_at, claimed_at = null
    where m.message_id = _set_back.message_id;
  end if;
  update baton.runs as r
  set wake_pending = true, needs_driver = true, wake_message_id = coalesce(v_wake_id, v_message_id)
  where r.run_id = (_set_back.run).run_id;
  return v_due_at;
end;
$$;

create or replace function baton._end_replay_under(run baton.runs, message baton.messages)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.runs as r
  set replay_epoch = baton._new_delivery(), replay_ended = true
  where r.run_id = (_end_replay_under.run).run_id
    and not r.replay_ended
    and r.replay_message_id = (_end_replay_under.message).message_id
    and r.replay_delivery = (_end_replay_under.message).delivery;
end;
$$;

-- The tasks of the bodies that run under a message go back to created.
create or replace function baton._release_owned(run baton.runs, message baton.messages, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_task baton.tasks;
  v_run baton.runs := _release_owned.run;
begin
  for v_task in
    select t.*
    from baton.tasks as t
    where t.owner_message_id = (_release_owned.message).message_id
      and t.owner_delivery = (_release_owned.message).delivery
      and t.status = 'started'
    order by t.step_slug, t.task_index
  loop
    v_run := baton._release(v_run, v_task, _release_owned.at);
  end loop;
  if v_run.last_seq > (_release_owned.run).last_seq then
    perform baton._save_positions(v_run);
  end if;
end;
$$;

-- The run of a run message, or by force of any: locked before the message.
create or replace function baton._lock_run_of(message_id bigint, force boolean)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run_id text;
begin
  select m.run_id
  into v_run_id
  from baton.messages as m
  where m.message_id = _lock_run_of.message_id and (m.kind = 'run' or _lock_run_of.force);
  if v_run_id is not null then
    return baton._lock_run(v_run_id);
  end if;
  return null;
end;
$$;

create or replace function baton.park(
  message_id bigint,
  delivery bigint,
  delay interval default '0',
  force boolean default false,
  out outcome text,
  out visible_at timestamptz
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
  v_message baton.messages;
  v_now timestamptz;
begin
  perform baton._check_interval('delay', park.delay);
  v_run := baton._lock_run_of(park.message_id, coalesce(park.force, false));
  v_message := baton._lock_receipt(park.message_id, park.delivery);
  v_now := baton._now();
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(park.message_id, park.delivery, 'park');
  elsif not baton._has_purpose(v_message) then
    outcome := 'cancelled';
    delete from baton.messages as m where m.message_id = v_message.message_id;
  elsif park.force is not true and baton._owns(v_message.message_id, v_message.delivery) then
    outcome := 'in_use';
  elsif v_message.kind is distinct from 'run' then
    perform baton._release_owned(v_run, v_message, v_now);
    update baton.messages as m
    set visible_at = v_now + coalesce(park.delay, '0'), claimed_at = null
    where m.message_id = v_message.message_id
    returning 'parked', m.visible_at into park.outcome, park.visible_at;
  else
    outcome := 'parked';
    perform baton._end_replay_under(v_run, v_message);
    perform baton._release_owned(v_run, v_message, v_now);
    visible_at := baton._set_back(v_run, v_message.message_id, v_now + coalesce(park.delay, '0'), v_now);
  end if;
end;
$$;

comment on function baton.park(bigint, bigint, interval, boolean) is
'Give a message back: it is due again after the delay. Counts nothing. A run message ends the replay that it holds and becomes the run''s wake.
Arguments: delay, by default none; force, for a handler that has stopped the bodies under a run message, or can''t run them: their tasks are given out anew.
Outcomes: parked, with visible_at; in_use, where bodies run under it (unless forced); cancelled: its run or task has ended, it is removed; lost, where the receipt is not current
Raises: 22023; for a run message, or by force, 25001
Locks: the message; of a run message, or by force, the run first';

create or replace function baton.fail(
  message_id bigint,
  delivery bigint,
  error text,
  delay interval default null,
  final boolean default false,
  force boolean default false,
  out outcome text,
  out visible_at timestamptz
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
  v_kind text;
  v_run baton.runs;
  v_message baton.messages;
  v_now timestamptz;
  v_due_at timestamptz;
begin
  perform baton._check_interval('delay', fail.delay);
  perform baton._check_size('error', octet_length(fail.error));
  select m.kind into v_kind from baton.messages as m where m.message_id = fail.message_id;
  if v_kind is null or v_kind not in ('run', 'task') then
    select f.outcome, f.visible_at
    into fail.outcome, fail.visible_at
    from baton._fail_message(fail.message_id, fail.delivery, fail.error, fail.delay, coalesce(fail.final, false)) as f;
    return;
  end if;

  v_run := baton._lock_run_of(fail.message_id, coalesce(fail.force, false));
  v_message := baton._lock_receipt(fail.message_id, fail.delivery);
  v_now := baton._now();
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(fail.message_id, fail.delivery, 'fail');
    return;
  elsif not baton._has_purpose(v_message) then
    outcome := 'cancelled';
    delete from baton.messages as m where m.message_id = v_message.message_id;
    return;
  elsif v_kind = 'task' then
    if fail.force is not true and baton._owns(v_message.message_id, v_message.delivery) then
      outcome := 'in_use';
      return;
    end if;
    perform baton._release_owned(v_run, v_message, v_now);
    update baton.messages as m
    set failures = m.failures + 1,
      last_error = fail.error,
      visible_at = v_now + coalesce(fail.delay, baton._backoff(m.failures + 1)),
      claimed_at = null
    where m.message_id = v_message.message_id
    returning 'failed', m.visible_at into fail.outcome, fail.visible_at;
    return;
  end if;

  v_run.failures := v_run.failures + 1;
  update baton.runs as r set failures = v_run.failures where r.run_id = v_run.run_id;
  if fail.final or v_run.failures >= (select s.max_failures from baton.settings as s where s.singleton) then
    outcome := 'dead';
    perform baton._end_run(
      v_run, 'failed',
      jsonb_build_object('reason', case when fail.final then 'final' else 'max_failures' end, 'error', fail.error),
      v_now
    );
    delete from baton.messages as m where m.message_id = v_message.message_id;
    perform baton._incident(
      v_now, 'limit_reached', queue_name => v_run.queue_name, message_id => v_message.message_id,
      run_id => v_run.run_id, detail => jsonb_build_object('failures', v_run.failures)
    );
    return;
  end if;

  v_due_at := v_now + coalesce(fail.delay, baton._backoff(v_run.failures));
  perform baton._end_replay_under(v_run, v_message);
  if baton._owns(v_message.message_id, v_message.delivery) and fail.force is not true then
    outcome := 'in_use';
    visible_at := baton._set_back(v_run, null, v_due_at, v_now);
  else
    outcome := 'failed';
    perform baton._release_owned(v_run, v_message, v_now);
    update baton.messages as m set last_error = fail.error where m.message_id = v_message.message_id;
    visible_at := baton._set_back(v_run, v_message.message_id, v_due_at, v_now);
  end if;
end;
$$;

comment on function baton.fail(bigint, bigint, text, interval, boolean, boolean) is
'Say that a message could not be handled: it counts a failure and is due again later, or is dead. Of a run message the failure is the run''s: it ends the replay that it holds and becomes the run''s wake, and at the limit the run fails. A delivery''s final failure dismisses the invocation that it was to deliver.
Arguments: error, for people; delay, by default settings.backoff_base doubled with each failure up to settings.backoff_max, give or take a fifth; final, as at its limit; force, as in park.
Outcomes: failed, with visible_at; dead, at settings.max_failures or final (a task message has no limit); in_use, where bodies run under it (unless forced): the wake is sent, the message stays claimed; cancelled: its run or task has ended, it is removed; lost, where the receipt is not current
Raises: 22023, 54000; for a run message, by force, or where it ends a delivery, 25001
Locks: the message; of a run message, or by force, the run first, where it ends a delivery the function first';

/* ==== 500_cancellation.sql */

/*
 * Cancellation: what a worker asks about the bodies that it runs. The rows are the truth; what the control channel says
 * is a reason to ask.
 */
create or replace function baton.terminal_tasks(keys jsonb)
returns table (outcome text, run_id text, step_slug text, task_index integer, attempt integer, cause text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies
 *   no such task                                  unknown
 *   the task has ended                            completed, failed, skipped, cancelled
 *   the attempt was never given out               unknown
 *   started, with this attempt                    running
 *   otherwise                                     superseded
 */
declare
  v_item jsonb;
begin
  if terminal_tasks.keys is null or jsonb_typeof(terminal_tasks.keys) <> 'array' then
    perform baton._raise('invalid_keys', 'not an array');
  end if;
  select i.value
  into v_item
  from jsonb_array_elements(terminal_tasks.keys) as i
  where (
    i.value -> 'run_id' is not null
    and i.value -> 'step_slug' is not null
    and i.value -> 'task_index' is not null
    and i.value -> 'attempt' is not null
    and coalesce(i.value ->> 'task_index', '0') ~ '^[0-9]{1,9}$'
    and coalesce(i.value ->> 'attempt', '0') ~ '^[0-9]{1,9}$'
  ) is not true
  limit 1;
  if found then
    perform baton._raise('invalid_keys', 'not a key: ' || left(v_item::text, 60));
  end if;

  -- That it asks for the run in there keeps it a look-up a key, whatever a plan takes the number of keys or tasks for.
  return query
  select
    case
      when t.status in ('completed', 'failed', 'skipped', 'cancelled') then t.status
      when (k.attempt between 1 and t.attempt) is not true then 'unknown'
      when t.status = 'started' and k.attempt = t.attempt then 'running'
      else 'superseded'
    end,
    k.run_id, k.step_slug, k.task_index, k.attempt,
    case
      when t.status in ('completed', 'failed') then 'task_' || t.status
      when t.status = 'skipped' then 'step_skipped'
      when t.status = 'cancelled' then (
        select
          case s.status
            when 'failed' then 'step_failed'
            else 'run_' || (select r.status from baton.runs as r where r.run_id = s.run_id)
          end
        from baton.steps as s
        where s.run_id = k.run_id and s.step_slug = k.step_slug
      )
      when (k.attempt between 1 and t.attempt) is not true or (t.status = 'started' and k.attempt = t.attempt) then null
      when k.attempt <= t.fence_attempt then 'task_released'
      when k.attempt < t.attempt then 'task_started'
      else 'task_retrying'
    end
  from jsonb_array_elements(terminal_tasks.keys) with ordinality as i (value, nth)
  cross join lateral (
    select
      i.value ->> 'run_id' as run_id, i.value ->> 'step_slug' as step_slug,
      (i.value ->> 'task_index')::integer as task_index, (i.value ->> 'attempt')::integer as attempt
  ) as k
  left join lateral (
    select o.status, o.attempt, o.fence_attempt
    from baton.tasks as o
    where o.run_id = k.run_id and o.step_slug = k.step_slug and o.task_index = k.task_index
      and not exists (select from baton.runs as r where r.run_id = o.run_id and r.pruned_at is not null)
  ) as t on true
  order by i.nth;
end;
$$;

comment on function baton.terminal_tasks(jsonb) is
'Which of the bodies that a worker runs should go on. It asks when it has registered an attempt, when the channel baton_control says something, and from time to time: everything but running is to be aborted.
Arguments: keys, an array of objects with run_id, step_slug, task_index and attempt, as execute gave them.
Returns: a row a key, in their order: outcome: running; superseded: this attempt no longer holds the task; completed, failed, skipped, cancelled: the task has ended; unknown; then run_id, step_slug, task_index, attempt, and cause, the type of event that did it: run_completed, run_failed, run_cancelled, step_failed, step_skipped, task_completed (of run_advanced, too), task_failed; of superseded: task_started (a later attempt), task_retrying, task_released
Raises: 22023
Locks: none';

/* ==== 590_cron.sql */

/*
 * pg_cron, which is found late: what there is of it in this database, and the history that it never purges.
 */

-- Null where pg_cron is not in this database, or its schema can't be used.
create or replace function baton._cron_version()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if baton._schema_problem('pg_cron', 'cron') is not null or to_regclass('cron.job') is null then
    return null;
  end if;
  return (select e.extversion from pg_extension as e where e.extname = 'pg_cron');
end;
$$;

create or replace function baton._cron_job_ids(job_names text[] default array['pg_baton tick', 'pg_baton prune'])
returns bigint[]
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_job_ids bigint[];
begin
  if baton._cron_version() is not null then
    execute
      'select array_agg(j.jobid) from cron.job as j
      where j.jobname = any ($1) and j.username = current_user and j.database = current_database()'
    into v_job_ids
    using _cron_job_ids.job_names;
  end if;
  return v_job_ids;
end;
$$;

-- For tick. Only the package's own runs, older than the newest 1,000 of all jobs.
create or replace function baton._purge_cron_runs()
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_job_ids bigint[] := baton._cron_job_ids();
  v_from bigint;
  v_newest bigint;
  v_upto bigint;
  v_purged integer := 0;
begin
  if v_job_ids is null then
    return 0;
  end if;
  execute 'select max(r.runid) from cron.job_run_details as r' into v_newest;
  select s.cron_purged_runid into v_from from baton.state as s where s.singleton;
  if v_newest < v_from then
    v_from := 0::bigint;
  end if;
  v_upto := least(v_newest - 1000, v_from + 10000);
  if v_upto > v_from then
    execute 'delete from cron.job_run_details as r where r.runid > $1 and r.runid <= $2 and r.jobid = any ($3)'
    using v_from, v_upto, v_job_ids;
    get diagnostics v_purged = row_count;
    update baton.state as s set cron_purged_runid = v_upto where s.singleton;
  end if;
  return v_purged;
end;
$$;

/* ==== 600_tick.sql */

/*
 * tick: everything periodic, one at a time, each part bounded and on its own, so that one failure does not stop the
 * rest.
 */
create or replace function baton._tick_part(part text, at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_changed integer;
begin
  case _tick_part.part
    when 'dead_letters' then
      v_changed := baton._bury_messages(_tick_part.at);
    when 'recovery' then
      select count(*)::integer
      into v_changed
      from baton._recover_runs(null, 1000)
      where (select s.recovery from baton.settings as s where s.singleton);
    when 'responses' then
      v_changed := baton._read_responses(_tick_part.at);
    when 'pg_net_queue' then
      v_changed := baton._watch_pg_net(_tick_part.at);
    when 'cron_runs' then
      v_changed := baton._purge_cron_runs();
    when 'silent_workers' then
      v_changed := baton._stop_silent_workers(_tick_part.at);
    when 'queue_marks' then
      v_changed := baton._move_marks(_tick_part.at);
    when 'totals' then
      v_changed := baton._fold_tallies();
    when 'ensure_workers' then
      select count(*)::integer into v_changed from baton.ensure_workers();
  end case;
  return v_changed;
end;
$$;

create or replace function baton.tick()
returns table (part text, changed integer, error text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_errors jsonb := '{}'::jsonb;
begin
  perform baton._require_read_committed();
  perform s.singleton from baton.state as s for no key update of s skip locked;
  if not found then
    return;
  end if;

  foreach part in array array[
    'dead_letters', 'recovery', 'responses', 'pg_net_queue', 'cron_runs', 'silent_workers', 'queue_marks', 'totals',
    'ensure_workers'
  ] loop
    begin
      changed := baton._tick_part(part, v_now);
      error := null;
    exception
      when others then
        changed := null;
        error := sqlerrm;
        v_errors := v_errors || jsonb_build_object(part, sqlerrm);
        raise warning 'pg_baton tick: %: %', part, sqlerrm;
    end;
    if changed is distinct from 0 then
      return next;
    end if;
  end loop;

  update baton.state as s set last_tick_at = v_now, last_tick_errors = nullif(v_errors, '{}') where s.singleton;
end;
$$;

comment on function baton.tick() is
'Everything periodic: dead letters, recovery of runs, answers to start requests, the package''s own rows in pg_cron''s history, silent workers, queue marks, the counters of metrics(), then ensure_workers. Call it every few seconds, by schedule() or by anything else. One at a time: a second caller returns at once.
Returns: a row a part that changed something or failed: part, changed (rows), error
Raises: 25001
Locks: the row of state, then what it changes, never waiting';

/* ==== 610_schedule.sql */

/*
 * Scheduling tick and prune with pg_cron. pg_cron before 1.5 knows no seconds: there one job a minute ticks
 * at the interval and commits between ticks.
 */

create or replace function baton._cron_knows_seconds(cron_version text)
returns boolean
language sql
immutable
begin atomic
  select string_to_array(substring(_cron_knows_seconds.cron_version from '^[0-9]+(?:\.[0-9]+)*'), '.')::integer[]
    >= array[1, 5];
end;

-- A procedure that commits can have neither SET nor SECURITY DEFINER: it pins the path itself, of the whole session,
-- which is the job's. Before that, no operator is looked up.
create or replace procedure baton._tick_for_a_minute(tick_every interval)
language plpgsql
as $$
declare
  v_end timestamptz;
  v_next timestamptz;
begin
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false);
  v_next := baton._now();
  v_end := v_next + interval '1 minute' - _tick_for_a_minute.tick_every / 2;
  loop
    perform baton.tick();
    commit;
    v_next := v_next + _tick_for_a_minute.tick_every;
    exit when v_next >= v_end;
    perform pg_sleep(extract(epoch from v_next - baton._now()));
  end loop;
end;
$$;

create or replace function baton.schedule(
  tick_every interval default '5 seconds', out outcome text, out detail text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_every interval := coalesce(schedule.tick_every, '5 seconds');
  v_seconds numeric := extract(epoch from v_every);
  v_version text := baton._cron_version();
  v_schedule text := '* * * * *';
  v_command text := 'select * from baton.tick()';
  v_prune text :=
    'select p.* from baton.settings as s cross join lateral baton.prune(s.retention, 10000) as p '
    'where s.retention is not null';
  v_job_id bigint;
begin
  if v_seconds <> trunc(v_seconds) or v_seconds not between 1 and 60 then
    perform baton._raise('invalid_schedule', v_every::text);
  end if;
  if v_version is null then
    outcome := 'unavailable';
    detail := coalesce(baton._schema_problem('pg_cron', 'cron'), 'pg_cron is not in this database')
      || ': call baton.tick() every few seconds by other means';
    return;
  end if;

  if v_seconds < 60 and baton._cron_knows_seconds(v_version) then
    v_schedule := v_seconds::integer || ' seconds';
  elsif v_seconds < 60 then
    v_command := format('call baton._tick_for_a_minute(%L)', v_every);
  end if;
  execute 'select cron.unschedule(j.jobid) from cron.job as j where j.jobid = any ($1) and not j.active'
  using baton._cron_job_ids();
  execute format('select cron.schedule(%L, %L, %L)', 'pg_baton tick', v_schedule, v_command) into v_job_id;
  outcome := 'scheduled';
  detail := format('pg_cron %s job %s: %s: %s', v_version, v_job_id, v_schedule, v_command);

  if (select s.retention from baton.settings as s where s.singleton) is null then
    execute 'select cron.unschedule(j.id) from unnest($1) as j (id)'
    using baton._cron_job_ids(array['pg_baton prune']);
  else
    execute format('select cron.schedule(%L, %L, %L)', 'pg_baton prune', '* * * * *', v_prune) into v_job_id;
    detail := detail || format('; job %s: prune every minute', v_job_id);
  end if;
end;
$$;

comment on function baton.schedule(interval) is
'Let pg_cron call tick(), and every minute prune() where settings.retention is set: one job each, changed in place where it is there already. The jobs run as the owner of the package.
Arguments: tick_every, 1 to 59 whole seconds, or one minute; by default 5 seconds.
Outcomes: scheduled; unavailable, where pg_cron is not in this database or its schema can''t be used; with detail
Raises: 22023
Locks: none of the package''s';

create or replace function baton.unschedule(out outcome text, out detail text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_job_ids bigint[] := baton._cron_job_ids();
begin
  if baton._cron_version() is null then
    outcome := 'unavailable';
    detail := coalesce(baton._schema_problem('pg_cron', 'cron'), 'pg_cron is not in this database');
    return;
  end if;
  execute 'select cron.unschedule(j.id) from unnest($1) as j (id)' using v_job_ids;
  execute 'delete from cron.job_run_details as r where r.jobid = any ($1)' using v_job_ids;
  outcome := 'unscheduled';
  detail := format('%s jobs removed', coalesce(cardinality(v_job_ids), 0));
end;
$$;

comment on function baton.unschedule() is
'Take the jobs of schedule() away, and what pg_cron''s history tells of them.
Outcomes: unscheduled, also where there was none; unavailable, where pg_cron is not in this database or its schema can''t be used; with detail
Raises: none
Locks: none of the package''s';

/* ==== 620_prune.sql */

/*
 * Retention: ended runs, the oldest first, each as a whole; then whatever else is old. One call removes so many rows,
 * and waits for nobody.
 *
 * A run of more rows than a call may remove is marked, which makes it unknown to every verb, and goes over several
 * calls, from the end of its log: runs.last_seq says how much of it is left, steps.task_count how much of a step. So a
 * call reads what it removes, and steps over nothing that an earlier one has removed.
 */

-- Removes rows of a run that is marked by this; its own row comes last.
create or replace function baton._prune_log(run baton.runs, max_rows integer, at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_seq bigint := (_prune_log.run).last_seq;
  v_left integer := _prune_log.max_rows;
  v_step record;
  v_keep bigint;
  v_keep_tasks integer;
  v_count integer;
begin
  while v_seq > 0 and v_left > 0 loop
    -- The newest step whose creation is among the events that this call can reach.
    select e.seq, s.step_slug, s.task_count
    into v_step
    from baton.events as e
    inner join baton.steps as s on s.run_id = e.run_id and s.step_slug = e.correlation_id
    where e.run_id = (_prune_log.run).run_id
      and e.seq > v_seq - v_left
      and e.seq <= v_seq
      and e.type in ('step_created', 'run_advanced')
    order by e.seq desc
    limit 1;
    v_keep := coalesce(v_step.seq, greatest(v_seq - v_left, 0));
    delete from baton.events as e
    where e.run_id = (_prune_log.run).run_id and e.seq > v_keep and e.seq <= v_seq;
    get diagnostics v_count = row_count;
    v_seq := v_keep;
    v_left := v_left - v_count;
    continue when v_step.seq is null;

    v_keep_tasks := greatest(v_step.task_count - v_left, 0);
    delete from baton.tasks as t
    where t.run_id = (_prune_log.run).run_id and t.step_slug = v_step.step_slug and t.task_index >= v_keep_tasks;
    get diagnostics v_count = row_count;
    v_left := v_left - v_count;
    if v_keep_tasks = 0 and v_left > 0 then
      delete from baton.steps as s where s.run_id = (_prune_log.run).run_id and s.step_slug = v_step.step_slug;
      v_left := v_left - 1;
    else
      update baton.steps as s
      set task_count = v_keep_tasks
      where s.run_id = (_prune_log.run).run_id and s.step_slug = v_step.step_slug;
    end if;
  end loop;

  if v_seq = 0 and v_left > 0 then
    delete from baton.runs as r where r.run_id = (_prune_log.run).run_id;
    v_left := v_left - 1;
  else
    update baton.runs as r
    set pruned_at = coalesce(r.pruned_at, _prune_log.at), last_seq = v_seq
    where r.run_id = (_prune_log.run).run_id;
  end if;
  return _prune_log.max_rows - v_left;
end;
$$;

create or replace function baton._prune_whole(run_id text)
returns integer
language sql
volatile
begin atomic
  with events as (
    delete from baton.events as e
    where e.run_id = _prune_whole.run_id
    returning 1
  ),
  tasks as (
    delete from baton.tasks as t
    where t.run_id = _prune_whole.run_id
    returning 1
  ),
  steps as (
    delete from baton.steps as s
    where s.run_id = _prune_whole.run_id
    returning 1
  ),
  runs as (
    delete from baton.runs as r
    where r.run_id = _prune_whole.run_id
    returning 1
  )
  select
    (select count(*) from events)::integer + (select count(*) from tasks)::integer
    + (select count(*) from steps)::integer + (select count(*) from runs)::integer;
end;

-- Leaves alone the runs whose row or whose messages somebody has locked, or under one of whose messages a handler still
-- lives, which is to hear that the run has ended.
create or replace function baton._prune_runs(
  until timestamptz, max_rows integer, at timestamptz, out removed integer, out more boolean
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run_id text;
  v_run baton.runs;
  v_rows bigint;
  v_count integer;
begin
  removed := 0;
  more := false;
  for v_run_id in
    (
      select r.run_id
      from baton.runs as r
      where r.ended_at is not null and r.pruned_at is not null
      order by r.pruned_at, r.ended_at, r.run_id
    )
    union all
    (
      select r.run_id
      from baton.runs as r
      where r.ended_at <= _prune_runs.until and r.pruned_at is null
      order by r.pruned_at, r.ended_at, r.run_id
    )
  loop
    exit when removed >= _prune_runs.max_rows;
    select r.*
    into v_run
    from baton.runs as r
    where r.run_id = v_run_id and (r.ended_at <= _prune_runs.until or r.pruned_at is not null)
    for update of r skip locked;
    continue when not found or exists (
      select
      from baton.messages as m
      where m.run_id = v_run_id and m.claimed_at is not null and m.visible_at > _prune_runs.at
    );
    with leftover as (
      select m.message_id
      from baton.messages as m
      where m.run_id = v_run_id
      order by m.message_id
      limit _prune_runs.max_rows - _prune_runs.removed
      for update of m skip locked
    )
    delete from baton.messages as m where m.message_id = any (array(select l.message_id from leftover as l));
    get diagnostics v_count = row_count;
    removed := removed + v_count;
    continue when exists (select from baton.messages as m where m.run_id = v_run_id);

    v_rows := v_run.last_seq + 1;
    if v_run.pruned_at is null and v_rows <= _prune_runs.max_rows then
      select v_rows + count(*) + coalesce(sum(s.task_count), 0)
      into v_rows
      from baton.steps as s
      where s.run_id = v_run_id;
    end if;
    if v_run.pruned_at is not null or v_rows > _prune_runs.max_rows then
      removed := removed + baton._prune_log(v_run, _prune_runs.max_rows - removed, _prune_runs.at);
    elsif v_rows <= _prune_runs.max_rows - removed then
      removed := removed + baton._prune_whole(v_run_id);
    else
      more := true;
      exit;
    end if;
  end loop;
end;
$$;

create or replace function baton._prune_rest(until timestamptz, max_rows integer)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_left integer := _prune_rest.max_rows;
  v_count integer;
begin
  with old as (
    select d.message_id
    from baton.dead_messages as d
    where d.died_at <= _prune_rest.until
    order by d.died_at
    limit v_left
    for update of d skip locked
  )
  delete from baton.dead_messages as d where d.message_id = any (array(select o.message_id from old as o));
  get diagnostics v_count = row_count;
  v_left := v_left - v_count;

  with old as (
    select i.incident_id
    from baton.incidents as i
    where i.at <= _prune_rest.until
    order by i.at
    limit v_left
    for update of i skip locked
  )
  delete from baton.incidents as i where i.incident_id = any (array(select o.incident_id from old as o));
  get diagnostics v_count = row_count;
  v_left := v_left - v_count;

  with old as (
    select w.worker_id
    from baton.workers as w
    where w.stopped_at <= _prune_rest.until
      -- The tasks are read once: what has to match row by row would read them for each worker.
      and w.worker_id not in (
        select t.worker_id from baton.tasks as t where t.status = 'started' and t.worker_id is not null
      )
      and not exists (select from baton.worker_functions as f where f.invocation_worker_id = w.worker_id)
    order by w.stopped_at
    limit v_left
    for update of w skip locked
  )
  delete from baton.workers as w where w.worker_id = any (array(select o.worker_id from old as o));
  get diagnostics v_count = row_count;
  return _prune_rest.max_rows - v_left + v_count;
end;
$$;

create or replace function baton.prune(
  older_than interval, max_rows integer default 1000, out rows_removed integer, out more boolean
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_max integer := coalesce(prune.max_rows, 1000);
begin
  perform baton._require_read_committed();
  if prune.older_than is null then
    perform baton._raise('missing_argument', 'older_than');
  end if;
  perform baton._check_interval('older_than', prune.older_than);
  perform baton._check_limit('max_rows', prune.max_rows);
  select p.removed, p.more
  into prune.rows_removed, prune.more
  from baton._prune_runs(v_now - prune.older_than, v_max, v_now) as p;
  if not more then
    rows_removed := rows_removed + baton._prune_rest(v_now - prune.older_than, v_max - rows_removed);
  end if;
  more := rows_removed > 0 and (more or rows_removed >= v_max);
end;
$$;

comment on function baton.prune(interval, integer) is
'Remove what is old: ended runs as a whole, the oldest first, with events, steps, tasks and leftover messages; then dead messages, incidents, and stopped workers without a started task. Call it again while more is true. A run of more than max_rows rows goes over several calls; from the first on every verb answers as if it were gone, but for start_run, which answers conflict until it is. What somebody has locked, and a run whose handler still lives, is left for a later call.
Arguments: older_than, since the end of a run, the death of a message, an incident, the stop of a worker; max_rows, how many rows to remove at the most.
Returns: one row: rows_removed, more
Raises: 22023, 25001
Locks: what it removes, never waiting';

-- More than a day late: nobody prunes, or more ends than is pruned.
create or replace function baton._health_retention()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_retention interval;
  v_oldest timestamptz;
begin
  select s.retention into v_retention from baton.settings as s where s.singleton;
  select r.ended_at
  into v_oldest
  from baton.runs as r
  where r.ended_at is not null and r.pruned_at is null
  order by r.pruned_at, r.ended_at, r.run_id
  limit 1;
  if v_oldest < v_now - v_retention - interval '1 day' then
    severity := 'warning';
    finding := 'retention';
    subject := null;
    detail := format('the oldest ended run has ended %s ago', date_trunc('second', v_now - v_oldest));
    advice := 'select * from baton.schedule() prunes every minute; or call baton.prune(...) while it answers more';
    return next;
  end if;
end;
$$;

/* ==== 630_restore.sql */

/*
 * A restored dump, or a clone. Its rows go on where the other database stood, and so do the workers of that database if
 * they can reach this one: under receipts that look current. after_restore makes them void.
 */

-- Which database this is: another cluster, another database in it, or a schema created anew has another one. A copy of
-- the files has not.
create or replace function baton._identity()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_system text;
begin
  if has_function_privilege('pg_control_system()', 'execute') then
    execute 'select c.system_identifier::text from pg_control_system() as c' into v_system;
  end if;
  return (
    select concat_ws('/', v_system, d.oid, 'baton.state'::regclass::oid)
    from pg_database as d
    where d.datname = current_database()
  );
end;
$$;

do $$
begin
  update baton.state as s set identity = baton._identity() where s.identity is null;
end;
$$;

create or replace function baton._health_restore()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from baton.state as s where s.identity <> baton._identity()) then
    severity := 'warning';
    finding := 'restored';
    subject := null;
    detail := 'these rows come from another database: receipts of its workers are still current';
    advice := 'select * from baton.after_restore(), before workers start';
    return next;
  end if;
end;
$$;

-- Message ids go a million past every one that is stored: the other database may have given out so many since. Ids of
-- incidents and tallies only past those that are there, which logical replication brings without their sequences.
create or replace function baton._move_ids()
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message_id bigint;
begin
  select
    greatest(
      s.last_value,
      (select max(m.message_id) from baton.messages as m),
      (select max(d.message_id) from baton.dead_messages as d),
      (select max(i.message_id) from baton.incidents as i),
      (select max(r.replay_message_id) from baton.runs as r),
      (select max(r.wake_message_id) from baton.runs as r),
      (select max(t.owner_message_id) from baton.tasks as t)
    )
  into v_message_id
  from baton.messages_message_id_seq as s;
  perform setval('baton.messages_message_id_seq', v_message_id + 1000000);
  perform setval(
    'baton.incidents_incident_id_seq', greatest(s.last_value, (select max(i.incident_id) from baton.incidents as i))
  )
  from baton.incidents_incident_id_seq as s;
  perform setval(
    'baton.tallies_tally_id_seq', greatest(s.last_value, (select max(t.tally_id) from baton.tallies as t))
  )
  from baton.tallies_tally_id_seq as s;
end;
$$;

-- Bodies are released as by force, which counts nothing, and the replay ends. The caller holds the run's lock.
create or replace function baton._give_up_run(run baton.runs, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs := _give_up_run.run;
  v_task baton.tasks;
begin
  for v_task in
    select t.*
    from baton.tasks as t
    where t.run_id = v_run.run_id and t.status = 'started'
    order by t.step_slug, t.task_index
  loop
    v_run := baton._release(v_run, v_task, _give_up_run.at);
  end loop;
  perform baton._save_positions(v_run);
  update baton.runs as r
  set replay_epoch = baton._new_delivery(), replay_ended = true, wake_pending = true
  where r.run_id = v_run.run_id and not r.replay_ended;
end;
$$;

create or replace function baton.after_restore(out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions;
  v_run baton.runs;
  v_now timestamptz;
begin
  perform baton._require_read_committed();
  -- As a tick does, which holds it while it locks rows of the others.
  perform s.singleton from baton.state as s for no key update of s;
  lock table baton.worker_functions, baton.workers, baton.runs, baton.messages in exclusive mode;
  v_now := baton._now();

  perform baton._move_ids();
  for v_run in
    select r.*
    from baton.runs as r
    where r.ended_at is null
      and (
        not r.replay_ended
        or exists (select from baton.tasks as t where t.run_id = r.run_id and t.status = 'started')
      )
    order by r.run_id
  loop
    perform baton._give_up_run(v_run, v_now);
  end loop;
  -- Of an extension the dump may be of a version that has no such columns.
  update baton.runs as r
  set wake_message_id = m.message_id
  from baton.messages as m
  where m.run_id = r.run_id and m.dedupe_key = baton._run_key(r.run_id, 'wake');
  update baton.runs as r
  set needs_driver = true
  where not r.needs_driver and (r.status = 'running' or r.wake_pending);
  update baton.messages as m
  set claimed_at = null, visible_at = least(m.visible_at, v_now)
  where m.claimed_at is not null;
  for v_function in
    select f.* from baton.worker_functions as f where f.invocation_status = 'pending' order by f.function_name
  loop
    perform baton._fail_invocation(v_function, 'expired', 'after_restore', v_now);
  end loop;
  update baton.workers as w
  set stopping_at = coalesce(w.stopping_at, v_now), stopped_at = v_now
  where w.stopped_at is null;
  update baton.state as s
  set identity = baton._identity(), cron_purged_runid = 0, pg_net_head_id = null, pg_net_head_since = null
  where s.singleton;
  perform baton._incident(v_now, 'operator', detail => jsonb_build_object('verb', 'after_restore'));
  outcome := 'restored';
end;
$$;

comment on function baton.after_restore() is
'For a restored dump or a clone, once, before workers start: what was in flight in the other database is given out anew here, and nothing that its workers hold is current any more. Message ids go on a million past every one that is stored, all claims and replays end (their work is due at once; nothing is counted), bodies that ran are released, pending invocations fail as expired, and all workers are stopped.
Outcomes: restored
Raises: 25001
Locks: all functions, workers, runs and messages, against everything but reading, after a tick that is at work';

/* ==== 700_views.sql */

/*
 * Views for observers. Rules are asked of the functions that the verbs use, so a view never tells another story.
 */
create or replace view baton.worker_startup as
select
  f.function_name,
  f.queue_name,
  s.startup_state,
  h.unhandshaken = 0 as protected,
  h.healthy as healthy_workers,
  case s.startup_state
    when 'retryable' then 0
    when 'throttled' then extract(epoch from baton._next_attempt_at(f, c.at) - c.at)
    when 'pending' then extract(epoch from greatest(
      f.invocation_expires_at, baton._next_attempt_at(f, f.invocation_expires_at)
    ) - c.at)
  end as seconds_until_next_attempt,
  f.failed_starts + baton._is_overdue(f, c.at)::integer as failed_starts,
  f.invocation_error,
  f.invocation_detail,
  f.invocation_id,
  f.invocation_expires_at,
  f.last_invoked_at
from baton.worker_functions as f
cross join (select baton._now() as at) as c
cross join lateral (
  select count(*) as healthy, count(*) filter (where not w.handshake) as unhandshaken
  from baton.workers as w
  where w.function_name = f.function_name and w.stopped_at is null
    and baton._is_healthy(w, f.heartbeat_timeout, c.at)
) as h
cross join lateral (select baton._startup_state(f, h.healthy > 0, c.at) as startup_state) as s;

comment on view baton.worker_startup is 'How the start of each function stands.';
comment on column baton.worker_startup.function_name is 'The function.';
comment on column baton.worker_startup.queue_name is 'What its workers claim from.';
comment on column baton.worker_startup.startup_state is
'The first that applies: disabled; process (others start it); ready (a healthy worker exists); pending (a start is under way); throttled (the next attempt has to wait); retryable (the next tick starts one).';
comment on column baton.worker_startup.protected is
'False while a healthy worker came without the handshake: it may have been started twice. Says nothing of process functions.';
comment on column baton.worker_startup.healthy_workers is 'Workers with a fresh heartbeat that go on.';
comment on column baton.worker_startup.seconds_until_next_attempt is
'Until a start may be requested if nothing else happens; null where none will be.';
comment on column baton.worker_startup.failed_starts is
'Starts in a row that failed before the current one; a good start sets it to 0 when the next one is reserved.';
comment on column baton.worker_startup.invocation_error is
'Why the last start failed: dismissed, expired, disabled, deprecated, or error (it could not be requested).';
comment on column baton.worker_startup.invocation_detail is
'The failure in words; of a good start the verb that completed it: accept, reconcile or register_worker.';
comment on column baton.worker_startup.invocation_id is 'The current invocation.';
comment on column baton.worker_startup.invocation_expires_at is 'When it counts as lost if it is still pending.';
comment on column baton.worker_startup.last_invoked_at is 'When the last start was reserved.';

create or replace view baton.worker_overview as
select
  w.worker_id, w.function_name, f.queue_name, w.version,
  case
    when w.stopped_at is not null then 'stopped'
    when w.deprecated_at is not null then 'deprecated'
    when w.stopping_at is not null then 'stopping'
    when baton._is_healthy(w, f.heartbeat_timeout, c.at) then 'healthy'
    else 'silent'
  end as state,
  w.control, w.handshake, w.started_at, w.last_heartbeat_at, w.stopped_at
from baton.workers as w
inner join baton.worker_functions as f on f.function_name = w.function_name
cross join (select baton._now() as at) as c;

comment on view baton.worker_overview is 'The workers, those that have stopped too until they are pruned.';
comment on column baton.worker_overview.worker_id is 'The worker.';
comment on column baton.worker_overview.function_name is 'Its function.';
comment on column baton.worker_overview.queue_name is 'What it claims from.';
comment on column baton.worker_overview.version is 'What it said it runs.';
comment on column baton.worker_overview.state is
'The first that applies: stopped; deprecated or stopping (it claims nothing more and finishes what it holds); healthy (its heartbeat is fresh); silent.';
comment on column baton.worker_overview.control is 'How it hears of cancellations: listening, polling, off.';
comment on column baton.worker_overview.handshake is 'Whether it was started by an invocation.';
comment on column baton.worker_overview.started_at is 'When it was accepted or registered.';
comment on column baton.worker_overview.last_heartbeat_at is 'When it was heard last.';
comment on column baton.worker_overview.stopped_at is 'When it stopped, or was given up.';

create or replace view baton.queue_stats as
with live as (
  select
    m.queue_name,
    count(*) filter (where m.visible_at <= c.at) as ready,
    count(*) filter (where m.visible_at > c.at and m.claimed_at is null) as delayed,
    count(*) filter (where m.visible_at > c.at and m.claimed_at is not null) as in_flight,
    max(c.at - m.visible_at) filter (where m.visible_at <= c.at) as oldest_ready_age
  from baton.messages as m
  cross join (select baton._now() as at) as c
  group by m.queue_name
),
dead as (
  select d.queue_name, count(*) as dead
  from baton.dead_messages as d
  group by d.queue_name
),
paused as (
  select q.queue_name, q.paused_at
  from baton.queue_marks as q
  where q.paused_at is not null
)
select
  coalesce(live.queue_name, dead.queue_name, paused.queue_name) as queue_name,
  coalesce(live.ready, 0) as ready,
  coalesce(live.delayed, 0) as delayed,
  coalesce(live.in_flight, 0) as in_flight,
  coalesce(dead.dead, 0) as dead,
  live.oldest_ready_age,
  paused.paused_at
from live
full join dead on dead.queue_name = live.queue_name
full join paused on paused.queue_name = coalesce(live.queue_name, dead.queue_name);

comment on view baton.queue_stats is 'The messages of each queue that has any or is paused, counted.';
comment on column baton.queue_stats.queue_name is 'The queue.';
comment on column baton.queue_stats.ready is 'Due. Those whose claim ran out are among them, and those at their limit until a tick buries them.';
comment on column baton.queue_stats.delayed is 'Due later: sent with a delay, parked or backing off.';
comment on column baton.queue_stats.in_flight is 'Claimed by somebody.';
comment on column baton.queue_stats.dead is 'In dead_letters.';
comment on column baton.queue_stats.oldest_ready_age is 'For how long the longest due message has waited.';
comment on column baton.queue_stats.paused_at is 'Since when nothing of it is claimed; null: it is not paused.';

create or replace view baton.message_overview as
select
  m.message_id, m.queue_name, m.kind, m.run_id, m.step_slug, m.task_index,
  coalesce(
    m.dedupe_key,
    (
      select r.run_id || e'\x1fwake'
      from baton.runs as r
      where r.run_id = m.run_id and r.wake_message_id = m.message_id
    )
  ) as dedupe_key,
  case
    when m.claimed_at is null and m.visible_at <= c.at then 'ready'
    when m.claimed_at is null then 'delayed'
    when m.visible_at <= c.at then 'lapsed'
    else 'in_flight'
  end as state,
  m.visible_at, m.claimed_at, m.claimed_by, m.failures, m.lapses, m.last_error, m.created_at
from baton.messages as m
cross join (select baton._now() as at) as c;

comment on view baton.message_overview is
'The live messages, without their payloads. Ask for a message_id, a queue_name or a run_id: these are found by index.';
comment on column baton.message_overview.message_id is 'Stable over every redelivery.';
comment on column baton.message_overview.queue_name is 'Its queue.';
comment on column baton.message_overview.kind is 'run, task, or the sender''s own word.';
comment on column baton.message_overview.run_id is 'The run of a run or task message.';
comment on column baton.message_overview.step_slug is 'The step of a task message.';
comment on column baton.message_overview.task_index is 'The task of a task message.';
comment on column baton.message_overview.dedupe_key is 'The key that it holds; of a run''s wake, its run_id and wake.';
comment on column baton.message_overview.state is
'ready (due), delayed (due later), in_flight (claimed), lapsed (its claim ran out: the next claim counts a lapse).';
comment on column baton.message_overview.visible_at is 'When it is due; while it is claimed, when the claim runs out.';
comment on column baton.message_overview.claimed_at is 'When it was claimed, if it is.';
comment on column baton.message_overview.claimed_by is 'The worker that claimed it last, if it said.';
comment on column baton.message_overview.failures is 'How often a handler said that it failed.';
comment on column baton.message_overview.lapses is 'How often a claim ran out in silence and another one followed.';
comment on column baton.message_overview.last_error is 'What the last fail said.';
comment on column baton.message_overview.created_at is 'When it was sent.';

create or replace view baton.dead_letters as
select
  d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.reason, d.last_error, d.failures, d.lapses,
  d.claimed_at, d.claimed_by, d.created_at, d.died_at
from baton.dead_messages as d;

comment on view baton.dead_letters is 'Messages that reached a limit: read them, mend the cause, redrive them.';
comment on column baton.dead_letters.message_id is 'What redrive wants.';
comment on column baton.dead_letters.queue_name is 'The queue that it comes from and goes back to.';
comment on column baton.dead_letters.kind is 'As sent.';
comment on column baton.dead_letters.payload is 'As sent.';
comment on column baton.dead_letters.headers is 'As sent.';
comment on column baton.dead_letters.dedupe_key is 'As sent; another message may hold it by now.';
comment on column baton.dead_letters.reason is
'failures or lapses (the limit that it reached), or final (its handler asked for it).';
comment on column baton.dead_letters.last_error is 'What the last fail said.';
comment on column baton.dead_letters.failures is 'How often a handler said that it failed.';
comment on column baton.dead_letters.lapses is 'How often its claim ran out in silence.';
comment on column baton.dead_letters.claimed_at is 'When it was claimed last, if that claim was never given back.';
comment on column baton.dead_letters.claimed_by is 'The worker that claimed it last, if it said.';
comment on column baton.dead_letters.created_at is 'When it was sent.';
comment on column baton.dead_letters.died_at is 'When it reached its limit.';

create or replace view baton.incident_log as
select
  i.incident_id, i.at, i.kind, i.function_name, i.worker_id, i.invocation_id, i.queue_name, i.message_id, i.run_id,
  i.step_slug, i.task_index, i.detail
from baton.incidents as i;

comment on view baton.incident_log is 'What was repaired, given up, refused or done by an operator.';
comment on column baton.incident_log.incident_id is 'Ascending: order by it.';
comment on column baton.incident_log.at is 'When it happened.';
comment on column baton.incident_log.kind is
'invocation_expired, invocation_dismissed, invocation_error: a start failed; start_crashed: a worker was accepted and never heard again; function_locked: somebody holds a function''s row; worker_silent: tick gave a worker up; request_ids_forgotten: pg_net began anew; lost: a receipt came too late; limit_reached: a message died, or a run or a task failed; replay_lost: a replay never ended; run_recovered: a run that nobody drove was woken; owned_recovery: a start was lost, and the message that owned it started the task anew; takeover: the task''s own message did; too_late: a result came after the end; operator: a verb of an operator.';
comment on column baton.incident_log.function_name is 'The function concerned, if one is.';
comment on column baton.incident_log.worker_id is 'The worker concerned, if one is.';
comment on column baton.incident_log.invocation_id is 'The invocation concerned, if one is.';
comment on column baton.incident_log.queue_name is 'The queue of the message concerned.';
comment on column baton.incident_log.message_id is 'The message concerned, if one is.';
comment on column baton.incident_log.run_id is 'The run concerned, if one is.';
comment on column baton.incident_log.step_slug is 'The step concerned, if one is.';
comment on column baton.incident_log.task_index is 'The task concerned, if one is.';
comment on column baton.incident_log.detail is 'What else is known.';

create or replace view baton.run_overview as
select
  r.run_id, r.workflow_name, r.queue_name, r.status, r.last_seq,
  r.ended_at is null and (r.wake_seq > r.replayed_seq or r.wake_pending) as unread,
  r.failures, r.lapses, r.wake_at, r.created_at, r.ended_at,
  r.needs_driver as active
from baton.runs as r
where r.pruned_at is null;

comment on view baton.run_overview is 'The runs. Ask for a run_id, or for those that are active: these are found by index.';
comment on column baton.run_overview.run_id is 'The run.';
comment on column baton.run_overview.workflow_name is 'Its workflow.';
comment on column baton.run_overview.queue_name is 'Its queue.';
comment on column baton.run_overview.status is 'pending, running, suspended; completed, failed, cancelled.';
comment on column baton.run_overview.last_seq is 'How many events it has.';
comment on column baton.run_overview.unread is 'Something happened that no replay has seen yet.';
comment on column baton.run_overview.failures is 'Replays in a row that failed.';
comment on column baton.run_overview.lapses is 'Replays in a row that were lost.';
comment on column baton.run_overview.wake_at is 'When it asked to be woken, or is to start.';
comment on column baton.run_overview.created_at is 'When it was started.';
comment on column baton.run_overview.ended_at is 'When it ended.';
comment on column baton.run_overview.active is
'Pending, running, or with something unread; not those that have ended, or are suspended until something happens.';

create or replace view baton.replays as
select
  r.run_id,
  r.workflow_name,
  r.queue_name,
  r.replay_epoch,
  r.replay_message_id as message_id,
  m.claimed_by as worker_id,
  r.replay_backend as backend,
  case when r.replay_backend is null then 'lease' else 'session' end as hold,
  c.at - r.replay_began_at as age,
  m.visible_at - c.at as claim_remaining,
  coalesce(m.visible_at > c.at, false) and baton._connection_lives(r.replay_backend) as alive
from baton.runs as r
cross join (select baton._now() as at) as c
left join baton.messages as m
  on m.message_id = r.replay_message_id and m.delivery = r.replay_delivery and m.claimed_at is not null
where r.needs_driver and not r.replay_ended;

comment on view baton.replays is 'The replays that have not ended, and whether their holders live.';
comment on column baton.replays.run_id is 'The run.';
comment on column baton.replays.workflow_name is 'Its workflow.';
comment on column baton.replays.queue_name is 'Its queue.';
comment on column baton.replays.replay_epoch is 'The fence that its holder writes under.';
comment on column baton.replays.message_id is 'The run message that it was granted under.';
comment on column baton.replays.worker_id is 'The worker that claimed that message, if it said.';
comment on column baton.replays.backend is 'The pid of its connection, for a session hold.';
comment on column baton.replays.hold is 'lease or session.';
comment on column baton.replays.age is 'Since the grant.';
comment on column baton.replays.claim_remaining is 'Until its claim runs out; null where it was taken.';
comment on column baton.replays.alive is 'False: the next grant takes it over.';

create or replace view baton.task_ownership as
select
  t.run_id,
  t.step_slug,
  t.task_index,
  t.attempt,
  t.lapses,
  m.kind as owner_kind,
  t.owner_message_id,
  t.worker_id,
  c.at - t.last_started_at as age,
  coalesce(m.visible_at > c.at, false) as alive,
  baton._lease_remaining(t.last_started_at, s.inline_lease, c.at) as lease_remaining,
  baton._dispatch_decision(
    exists (
      select
      from baton.messages as o
      where o.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
    ),
    case when m.visible_at > c.at then 'other' end, true, false, false, s.inline_ownership
  ) as decision
from baton.tasks as t
cross join (select baton._now() as at) as c
cross join (
  select o.inline_lease, o.inline_ownership
  from baton.settings as o
  order by o.singleton
  limit 1
) as s
left join baton.messages as m
  on m.message_id = t.owner_message_id and m.delivery = t.owner_delivery and m.claimed_at is not null
where t.status = 'started';

comment on view baton.task_ownership is 'The started tasks, and who owns them.';
comment on column baton.task_ownership.run_id is 'The run.';
comment on column baton.task_ownership.step_slug is 'The step.';
comment on column baton.task_ownership.task_index is 'The task, from 0.';
comment on column baton.task_ownership.attempt is 'How often it was started.';
comment on column baton.task_ownership.lapses is 'Starts in a row that were lost.';
comment on column baton.task_ownership.owner_kind is
'run: inline, under the run message of a handler; task: under its own message; null: that receipt is no longer current.';
comment on column baton.task_ownership.owner_message_id is 'The message that it was started under.';
comment on column baton.task_ownership.worker_id is 'The worker that claimed that message, if it said.';
comment on column baton.task_ownership.age is 'Since its last start.';
comment on column baton.task_ownership.alive is 'Whether the claim that it runs under lives.';
comment on column baton.task_ownership.lease_remaining is 'How long a backstop armed now would wait.';
comment on column baton.task_ownership.decision is
'What a replay under another message would do: queued, backstop or enqueue.';

create or replace view baton.step_outputs as
select
  s.run_id,
  s.step_slug,
  s.status,
  (
    select jsonb_agg(o.output order by o.task_index)
    from (
      select (e.payload ->> 'task_index')::integer as task_index, e.payload -> 'output' as output
      from baton.events as e
      where e.run_id = s.run_id
        and e.type in ('task_completed', 'run_advanced')
        and e.payload ->> 'step_slug' = s.step_slug
    ) as o
  ) as outputs
from baton.steps as s
where not exists (
  select
  from baton.runs as r
  where r.run_id = s.run_id and r.pruned_at is not null
);

comment on view baton.step_outputs is 'The outputs of the steps, in the order of their tasks. Ask for a run_id.';
comment on column baton.step_outputs.run_id is 'The run.';
comment on column baton.step_outputs.step_slug is 'The step.';
comment on column baton.step_outputs.status is 'created, completed, failed, skipped, cancelled.';
comment on column baton.step_outputs.outputs is 'An array of the outputs of its completed tasks.';

/* ==== 705_health_server.sql */

/*
 * Part of health: whether the server takes writes, and what keeps vacuum from its work.
 */
create or replace function baton._health_server()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  finding := 'read_only';
  subject := current_database()::text;
  severity := 'critical';
  if pg_is_in_recovery() then
    detail := 'this server is a standby: every verb that writes ends in 25006';
    advice := 'connect to the primary';
    return next;
  -- What a role or a session has chosen for itself, as one that only looks should, is no finding.
  elsif exists (
    select
    from pg_settings as s
    where s.name = 'default_transaction_read_only' and s.setting = 'on'
      and s.source in ('configuration file', 'command line', 'database')
  ) then
    detail := 'default_transaction_read_only is on: every verb that writes ends in 25006, and nothing ticks';
    advice := 'is a disk full, or did somebody set it? then: alter database ... reset default_transaction_read_only';
    return next;
  end if;
end;
$$;

create or replace function baton._health_vacuum()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_oldest record;
begin
  select a.pid, clock.at - a.xact_start as age
  into v_oldest
  from pg_stat_activity as a
  cross join (select baton._now() as at) as clock
  where a.backend_xmin is not null and a.datname = current_database() and a.xact_start is not null
  order by a.xact_start
  limit 1;
  finding := 'oldest_snapshot';
  severity := case when v_oldest.age > interval '10 minutes' then 'warning' else 'ok' end;
  detail := 'the oldest transaction is ' || coalesce(date_trunc('second', v_oldest.age)::text, '00:00:00') || ' old';
  if severity = 'warning' then
    subject := 'pid ' || v_oldest.pid;
    advice := 'it keeps vacuum from removing finished rows: end it';
  elsif not pg_has_role('pg_read_all_stats', 'usage') then
    detail := detail || '; those of other roles can''t be seen';
    advice := format('grant pg_read_all_stats to %I', current_user);
  end if;
  return next;

  finding := 'dead_rows';
  for subject, detail in
    select s.relname::text, format('about %s dead rows beside %s live ones (estimates)', s.n_dead_tup, s.n_live_tup)
    from pg_stat_user_tables as s
    where s.schemaname = 'baton' and s.n_dead_tup > 10000 and s.n_dead_tup > 5 * s.n_live_tup
    order by s.relname
  loop
    severity := 'warning';
    advice := 'is autovacuum on, and no old snapshot held?';
    return next;
  end loop;
end;
$$;

/* ==== 705_health_workers.sql */

/*
 * Part of health: workers that hear of cancellations late or never.
 */
create or replace function baton._health_workers()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_control_notify boolean := (select s.control_notify from baton.settings as s where s.singleton);
  v_function record;
begin
  severity := 'warning';
  for v_function in
    with busy as materialized (
      select distinct t.worker_id from baton.tasks as t where t.status = 'started'
    )
    select
      f.function_name,
      count(*) as healthy,
      count(*) filter (where w.control = 'polling' and v_control_notify) as polling,
      count(*) filter (
        where w.control = 'off' and exists (select from busy as b where b.worker_id = w.worker_id)
      ) as deaf
    from baton.worker_functions as f
    inner join baton.workers as w on w.function_name = f.function_name and w.stopped_at is null
    where baton._is_healthy(w, f.heartbeat_timeout, v_now)
    group by f.function_name
    order by f.function_name
  loop
    subject := v_function.function_name;
    if v_function.polling > 0 then
      finding := 'polling';
      detail := format(
        '%s of %s workers don''t hear the control channel: their bodies are stopped at the next time that they ask',
        v_function.polling, v_function.healthy
      );
      advice := 'have them listen on a direct connection, or in session mode: a transaction pooler passes nothing on';
      return next;
    end if;
    if v_function.deaf > 0 then
      finding := 'no_cancellation';
      detail := format(
        '%s of %s workers run bodies, with control off: nobody asks these to stop', v_function.deaf, v_function.healthy
      );
      advice := 'have them ask terminal_tasks, and tell heartbeat so: control => polling or listening';
      return next;
    end if;
  end loop;
end;
$$;

/* ==== 710_health.sql */

/*
 * health: what works, what doesn't, and what to do about it, a row a finding.
 */
create or replace function baton._health_clock()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := baton._now();
  v_state baton.state;
  v_job_ids bigint[] := baton._cron_job_ids(array['pg_baton tick']);
  v_is_ticking boolean;
  v_run record;
begin
  select s.* into v_state from baton.state as s where s.singleton;
  v_is_ticking := coalesce(v_state.last_tick_at > v_now - interval '90 seconds', false);
  finding := 'tick';
  severity := case when v_is_ticking then 'ok' else 'critical' end;
  detail := coalesce('last tick ' || date_trunc('second', v_now - v_state.last_tick_at) || ' ago', 'tick() never ran');
  if not v_is_ticking then
    advice := case
      when baton._cron_version() is null then 'call baton.tick() every few seconds'
      when v_job_ids is null then 'select * from baton.schedule()'
      else 'its job begins within a minute of schedule(); if it does not, see the finding cron_job'
    end;
  end if;
  return next;

  finding := 'tick_part';
  severity := 'warning';
  for subject, detail in select e.key, e.value from jsonb_each_text(v_state.last_tick_errors) as e loop
    advice := 'the other parts go on; mend the cause';
    return next;
  end loop;

  finding := 'cron_job';
  subject := null;
  advice := null;
  if v_job_ids is null then
    severity := case when v_is_ticking then 'ok' else 'warning' end;
    detail := case
      when baton._cron_version() is null
        then coalesce(baton._schema_problem('pg_cron', 'cron'), 'pg_cron is not in this database')
      else 'pg_cron has no job of schedule()'
    end || case when v_is_ticking then '; something else ticks' else '' end;
    advice := case
      when v_is_ticking then null
      when baton._cron_version() is null then 'create extension pg_cron, or let something else call baton.tick()'
      else 'select * from baton.schedule()'
    end;
    return next;
    return;
  end if;

  execute
    'select bool_and(j.active) as is_active, r.status, r.return_message
    from cron.job as j
    left join lateral (
      select n.status, n.return_message
      from (select d.* from cron.job_run_details as d order by d.runid desc limit 1000) as n
      where n.jobid = any ($1) and n.status in (''succeeded'', ''failed'')
      order by n.runid desc
      limit 1
    ) as r on true
    where j.jobid = any ($1)
    group by r.status, r.return_message'
  into v_run
  using v_job_ids;
  if not v_run.is_active then
    severity := 'critical';
    detail := 'the job is not active';
    advice := 'select * from baton.schedule()';
  elsif v_run.status = 'failed' then
    severity := 'critical';
    detail := 'the last run failed: ' || coalesce(v_run.return_message, 'no message');
    advice := 'if it can''t connect: admit the owner in pg_hba.conf, or set cron.use_background_workers = on';
  elsif not exists (select from pg_stat_activity as a where a.application_name = 'pg_cron scheduler') then
    severity := 'critical';
    detail := 'the scheduler of pg_cron is not running';
    advice := 'restart the server; a job of a dropped role also stops it: look at cron.job';
  else
    severity := 'ok';
    detail := coalesce('last run: ' || v_run.return_message, 'no run yet');
  end if;
  return next;
end;
$$;

create or replace function baton._health_transport()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := baton._now();
  v_problem text := baton._pg_net_problem();
  v_state baton.state;
  v_library text;
  v_extension text;
  v_waiting interval;
begin
  finding := 'transport';
  subject := baton._transport();
  severity := 'ok';
  if subject = 'outbox' then
    select max(v_now - m.visible_at)
    into v_waiting
    from baton.messages as m
    where m.queue_name = 'baton.deliveries' and m.visible_at <= v_now;
    detail := 'requests wait in the queue baton.deliveries for a sender';
    if v_waiting > interval '10 seconds' then
      severity := 'critical';
      detail := format('a request has waited for %s', date_trunc('second', v_waiting));
      advice := 'run a sender (tools/sender)';
    elsif (select s.transport from baton.settings as s where s.singleton) = 'auto' then
      detail := detail || '; ' || v_problem;
    end if;
    return next;
    return;
  end if;

  select substring(a.application_name from '^pg_net (.*)')
  into v_library
  from pg_stat_activity as a
  where a.application_name like 'pg_net %' and a.datname = current_database();
  select e.extversion into v_extension from pg_extension as e where e.extname = 'pg_net';
  select s.* into v_state from baton.state as s where s.singleton;
  if v_problem is not null then
    severity := 'critical';
    detail := v_problem;
    advice := 'mend that, or set settings.transport to outbox and run a sender';
  elsif v_library is null then
    severity := 'critical';
    detail := 'pg_net''s worker is not running in this database';
    advice := 'select net.worker_restart(), or restart the server';
  elsif v_library ~ '^(0[.](19|[2-9][0-9])|[1-9])' and v_extension ~ '^0[.](1[0-8]|[0-9])([.]|$)' then
    severity := 'critical';
    detail := format('pg_net %s is loaded with the SQL objects of %s: it sends nothing', v_library, v_extension);
    advice := 'alter extension pg_net update; select net.worker_restart()';
  elsif v_state.pg_net_head_id is not null and v_state.pg_net_head_since < v_now - interval '1 minute' then
    severity := 'critical';
    detail := format(
      'request %s has stood first in pg_net''s queue for %s', v_state.pg_net_head_id,
      date_trunc('second', v_now - v_state.pg_net_head_since)
    );
    advice := 'select net.worker_restart()';
  else
    detail := 'pg_net ' || v_library;
  end if;
  return next;
end;
$$;

create or replace function baton._health_functions()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := baton._now();
  v_transport text := baton._transport();
  v_base_url text;
  v_function baton.worker_functions;
  v_startup record;
  v_problem text;
begin
  select s.base_url into v_base_url from baton.settings as s where s.singleton;
  for v_function in
    select f.* from baton.worker_functions as f where f.enabled and f.start_mode = 'http' order by f.function_name
  loop
    subject := v_function.function_name;
    select w.startup_state, w.protected, w.failed_starts, w.invocation_error, w.invocation_detail
    into v_startup
    from baton.worker_startup as w
    where w.function_name = v_function.function_name;

    if v_function.url is null and v_base_url is null then
      severity := 'critical';
      finding := 'url';
      detail := 'neither the function''s url nor settings.base_url is set';
      advice := 'register_worker_function(..., url => ...)';
      return next;
    end if;
    if v_function.secret_name is not null and v_transport = 'pg_net' then
      select c.problem into v_problem from baton._credential(v_function.secret_name) as c;
      if v_problem is not null then
        severity := 'critical';
        finding := 'credential';
        detail := v_problem;
        advice := 'store one line there; until then the function is not started';
        return next;
      end if;
    end if;
    if not v_startup.protected then
      severity := 'warning';
      finding := 'unprotected';
      detail := 'a healthy worker came without the handshake';
      advice := 'deploy the handshake, then register_worker_function(..., require_handshake => true)';
      return next;
    end if;
    if v_startup.failed_starts >= 3 and v_startup.startup_state <> 'ready' then
      severity := 'critical';
      finding := 'failing';
      detail := format(
        '%s starts in a row failed, last: %s', v_startup.failed_starts,
        concat_ws(': ', v_startup.invocation_error, v_startup.invocation_detail)
      );
      advice := 'look at the logs of the function; enable_worker_function(...) clears the throttle';
      return next;
    end if;
    if v_function.invocation_status = 'pending'
      and v_now >= v_function.last_invoked_at + v_function.pending_timeout / 2 then
      severity := 'warning';
      finding := 'pending';
      detail := 'a start has been pending for ' || date_trunc('second', v_now - v_function.last_invoked_at);
      advice := 'a boot that needs this long wants a longer pending_timeout';
      return next;
    end if;
    if exists (
      select
      from baton.incidents as i
      where i.function_name = v_function.function_name
        and i.kind = 'function_locked'
        and i.at > v_now - greatest(v_function.pending_timeout, '5 minutes')
    ) then
      severity := 'warning';
      finding := 'locked';
      detail := 'a transaction held the function''s row while it was to be started';
      advice := 'set idle_in_transaction_session_timeout for the role of the workers; look at pg_stat_activity';
      return next;
    end if;
  end loop;
end;
$$;

create or replace function baton._health_queues()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_queue record;
begin
  for v_queue in
    select q.queue_name, q.ready, q.dead, q.oldest_ready_age, q.paused_at from baton.queue_stats as q
    where not starts_with(q.queue_name, 'baton.')
    order by q.queue_name
  loop
    subject := v_queue.queue_name;
    if v_queue.paused_at is not null then
      severity := 'warning';
      finding := 'paused';
      detail := format('since %s; %s messages are due', date_trunc('second', v_queue.paused_at), v_queue.ready);
      advice := 'resume_queue(...), when it may go on';
      return next;
    elsif v_queue.oldest_ready_age > interval '1 minute' then
      severity := 'warning';
      finding := 'oldest_ready_message';
      detail := format(
        '%s messages are due, the oldest for %s', v_queue.ready, date_trunc('second', v_queue.oldest_ready_age)
      );
      advice := 'does anybody claim from this queue? else add workers';
      return next;
    end if;
    if v_queue.dead > 0 then
      severity := 'warning';
      finding := 'dead_letters';
      detail := v_queue.dead || ' messages';
      advice := 'read baton.dead_letters, mend the cause, redrive';
      return next;
    end if;
  end loop;

  for v_queue in
    select m.queue_name, count(*) as n, max(m.lapses) as lapses
    from baton.messages as m
    where m.kind in ('run', 'task') and m.lapses >= 5
    group by m.queue_name
    order by m.queue_name
  loop
    severity := 'warning';
    finding := 'claimed_often';
    subject := v_queue.queue_name;
    detail := format('%s messages were claimed up to %s times without a grant or a start', v_queue.n, v_queue.lapses);
    advice := 'the workers claim and die, or claim and do not begin: look at their logs';
    return next;
  end loop;
end;
$$;

create or replace function baton._health_runs()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  for subject, detail in
    select
      p.run_id,
      format(
        'held for %s by %s%s', date_trunc('second', p.age), coalesce(p.worker_id::text, 'an anonymous worker'),
        ', backend ' || p.backend
      )
    from baton.replays as p
    where p.age > interval '5 minutes' and p.alive
    order by p.age desc
    limit 20
  loop
    severity := 'warning';
    finding := 'long_replay';
    advice := 'if its worker hangs: release_replay(...)';
    return next;
  end loop;

  select count(*) || ' runs need a driver and have none, for example ' || min(w.run_id)
  into detail
  from baton.wedged_runs as w
  having count(*) > 0;
  if found then
    severity := case
      when (select s.recovery from baton.settings as s where s.singleton) then 'warning'
      else 'critical'
    end;
    finding := 'wedged_runs';
    subject := null;
    advice := 'the next tick wakes them; with settings.recovery off: select * from baton.recover_runs()';
    return next;
  end if;
  if not (select s.recovery from baton.settings as s where s.singleton) then
    severity := 'warning';
    finding := 'recovery';
    subject := null;
    detail := 'settings.recovery is off: a run whose driver is lost stays where it is';
    advice := 'set it to true again, or let something else call baton.recover_runs()';
    return next;
  end if;
end;
$$;

create or replace function baton.health()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return query
  select h.severity, h.finding, h.subject, h.detail, h.advice
  from (
    select s.* from baton._health_server() as s
    union all
    select c.* from baton._health_clock() as c
    union all
    select t.* from baton._health_transport() as t
    union all
    select f.* from baton._health_functions() as f
    union all
    select w.* from baton._health_workers() as w
    union all
    select q.* from baton._health_queues() as q
    union all
    select u.* from baton._health_runs() as u
    union all
    select v.* from baton._health_vacuum() as v
    union all
    select r.* from baton._health_retention() as r
    union all
    select s.* from baton._health_restore() as s
  ) as h
  order by array_position(array['critical', 'warning', 'ok'], h.severity), h.finding, h.subject;
end;
$$;

comment on function baton.health() is
'What works, what does not, and what to do: whether the database can be written, the clock, the transport, the snapshots that hold back vacuum, and the functions, workers, queues and runs that are not as they should be. No secret is in it.
Returns: a row a finding, the worst first: severity (critical, warning, ok), finding, subject, detail, advice
Raises: none
Locks: none';

/* ==== 720_metrics.sql */

/*
 * metrics: the package in numbers, as OpenMetrics text. Counters come from tallies and totals (055), gauges from the
 * views and from health, so that they never tell another story.
 */
create or replace function baton._metric_families()
returns table (nth integer, name text, type text, help text)
language sql
immutable
begin atomic
  select f.nth, f.name, f.type, f.help
  from (
    values
    (1, 'baton_info', 'gauge', 'Always 1; the label is the version of the package.'),
    (
      2, 'baton_last_tick_timestamp_seconds', 'gauge',
      'When tick() ran last, in Unix time by the clock of the database; 0: never.'
    ),
    (3, 'baton_health_findings', 'gauge', 'Findings of health() that are not ok.'),
    (
      4, 'baton_queue_messages', 'gauge',
      'Live messages: ready (due), delayed, in_flight (claimed). Queues that are empty are left out.'
    ),
    (5, 'baton_queue_oldest_ready_age_seconds', 'gauge', 'For how long the longest due message has waited.'),
    (6, 'baton_queue_dead_messages', 'gauge', 'Messages in dead_letters.'),
    (7, 'baton_functions', 'gauge', 'Functions by their startup_state, as in worker_startup.'),
    (
      8, 'baton_function_failed_starts', 'gauge',
      'Starts in a row that failed before the current one; a good start sets it to 0 when the next one is reserved.'
    ),
    (9, 'baton_workers', 'gauge', 'Healthy workers, by how they hear of cancellations.'),
    (10, 'baton_open_runs', 'gauge', 'Runs that are pending (not replayed yet) or running (a replay or a task is).'),
    (
      11, 'baton_suspended_runs_estimate', 'gauge',
      'Runs that wait for a signal or a timer: an estimate from the statistics of the last ANALYZE.'
    ),
    (12, 'baton_replays', 'gauge', 'Replays that have not ended, by whether their holder lives.'),
    (
      13, 'baton_started_tasks', 'gauge',
      'Started tasks by what owns them: run (inline), task (a message of their own), none (their claim was taken).'
    ),
    (14, 'baton_awaits', 'counter', 'start_task answered await: another one runs the task, or its retry is not due.'),
    (15, 'baton_backstops_armed', 'counter', 'dispatch_tasks sent a delayed run message to look again after a task.'),
    (16, 'baton_incidents', 'counter', 'Incidents of each kind, pruned ones too; incident_log explains the kinds.')
  ) as f (nth, name, type, help);
end;

create or replace function baton._incident_kinds()
returns text[]
language sql
immutable
begin atomic
  select array[
    'invocation_expired', 'invocation_dismissed', 'invocation_error', 'start_crashed', 'function_locked',
    'worker_silent', 'request_ids_forgotten', 'lost', 'limit_reached', 'replay_lost', 'run_recovered', 'owned_recovery',
    'takeover', 'too_late', 'operator'
  ];
end;

create or replace function baton._label(name text, value text)
returns text
language sql
immutable
begin atomic
  select format('%s="%s"', _label.name, replace(replace(_label.value, '\', '\\'), '"', '\"'));
end;

-- One statement, so that a tally that is folded meanwhile is counted once.
create or replace function baton._metric_counters()
returns table (name text, labels text, value numeric)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return query
  with counted as (
    select c.kind, sum(c.times) as times
    from (
      select o.kind, o.total as times from baton.totals as o
      union all
      select t.kind, 1 from baton.tallies as t
      union all
      select k.kind, 0 from unnest(array['await', 'backstop'] || baton._incident_kinds()) as k (kind)
    ) as c
    group by c.kind
  )
  select
    case c.kind
      when 'await' then 'baton_awaits'
      when 'backstop' then 'baton_backstops_armed'
      else 'baton_incidents'
    end,
    case when c.kind not in ('await', 'backstop') then baton._label('kind', c.kind) end,
    c.times
  from counted as c;
end;
$$;

create or replace function baton._metric_gauges()
returns table (name text, labels text, value numeric)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_now timestamptz := baton._now();
begin
  return query
  select 'baton_info', baton._label('version', baton.version()), 1::numeric
  union all
  select 'baton_last_tick_timestamp_seconds', null, coalesce(extract(epoch from s.last_tick_at), 0)
  from baton.state as s
  where s.singleton
  union all
  select
    'baton_health_findings', baton._label('severity', h.severity) || ',' || baton._label('finding', h.finding),
    count(*)::numeric
  from baton.health() as h
  where h.severity <> 'ok'
  group by h.severity, h.finding;

  return query
  select g.name, g.labels, g.value
  from baton.queue_stats as q
  cross join lateral (select baton._label('queue', q.queue_name) as queue) as l
  cross join lateral (
    values
    ('baton_queue_messages', l.queue || ',state="ready"', q.ready::numeric),
    ('baton_queue_messages', l.queue || ',state="delayed"', q.delayed),
    ('baton_queue_messages', l.queue || ',state="in_flight"', q.in_flight),
    ('baton_queue_oldest_ready_age_seconds', l.queue, coalesce(extract(epoch from q.oldest_ready_age), 0)),
    ('baton_queue_dead_messages', l.queue, q.dead)
  ) as g (name, labels, value);

  return query
  select 'baton_functions', baton._label('state', n.state), count(w.function_name)::numeric
  from unnest(array['disabled', 'process', 'ready', 'pending', 'throttled', 'retryable']) as n (state)
  left join baton.worker_startup as w on w.startup_state = n.state
  group by n.state
  union all
  select 'baton_function_failed_starts', baton._label('function', w.function_name), w.failed_starts
  from baton.worker_startup as w
  union all
  select
    'baton_workers', baton._label('function', f.function_name) || ',' || baton._label('control', n.control),
    count(w.worker_id)
  from baton.worker_functions as f
  cross join unnest(array['listening', 'polling', 'off']) as n (control)
  left join baton.workers as w
    on w.function_name = f.function_name and w.control = n.control and w.stopped_at is null
    and baton._is_healthy(w, f.heartbeat_timeout, v_now)
  group by f.function_name, n.control;

  return query
  select 'baton_open_runs', baton._label('status', g.status), g.runs::numeric
  from (
    select
      count(*) filter (where r.status = 'pending') as pending, count(*) filter (where r.status = 'running') as running
    from baton.runs as r
    where r.needs_driver and r.status in ('pending', 'running')
  ) as o
  cross join lateral (values ('pending', o.pending), ('running', o.running)) as g (status, runs)
  union all
  select 'baton_suspended_runs_estimate', null, coalesce(max(round(c.reltuples * v.frequency)), 0)::numeric
  from pg_class as c
  inner join pg_stats as s on s.schemaname = 'baton' and s.tablename = 'runs' and s.attname = 'status'
  cross join lateral unnest(s.most_common_vals::text::text[], s.most_common_freqs) as v (status, frequency)
  where c.oid = 'baton.runs'::regclass and v.status = 'suspended'
  union all
  select 'baton_replays', baton._label('alive', n.alive::text), count(r.run_id)
  from unnest(array[true, false]) as n (alive)
  left join baton.replays as r on r.alive = n.alive
  group by n.alive
  union all
  select 'baton_started_tasks', baton._label('owner', n.owner), count(t.run_id)
  from unnest(array['run', 'task', 'none']) as n (owner)
  left join baton.task_ownership as t on coalesce(t.owner_kind, 'none') = n.owner
  group by n.owner;
end;
$$;

create or replace function baton.metrics()
returns text
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_text text;
begin
  with samples as materialized (
    select c.name, c.labels, c.value from baton._metric_counters() as c
    union all
    select g.name, g.labels, g.value from baton._metric_gauges() as g
  )
  select
    string_agg(
      concat_ws(
        e'\n',
        format('# TYPE %s %s', f.name, f.type),
        case when right(f.name, 8) = '_seconds' then format('# UNIT %s seconds', f.name) end,
        format('# HELP %s %s', f.name, f.help),
        (
          select
            string_agg(
              format(
                '%s%s%s %s', s.name, case f.type when 'counter' then '_total' end, '{' || s.labels || '}', s.value
              ), e'\n' order by s.labels
            )
          from samples as s
          where s.name = f.name
        )
      ), e'\n' order by f.nth
    )
  into v_text
  from baton._metric_families() as f;
  return v_text || e'\n# EOF';
end;
$$;

comment on function baton.metrics() is
'The package in numbers, as OpenMetrics text, which every Prometheus reads: psql -XAtc "select baton.metrics()". The counters start with the installation and never go down; what a rolled-back transaction did is not counted. Counting adds a row a happening, which tick adds up.
Returns: text that ends in # EOF
Raises: none
Locks: none';

/* ==== 800_roles.sql */

/*
 * Who may what. The package makes no roles and grants nothing to PUBLIC: grant_usage gives a role the verbs and views
 * of a kind. Views run the rules of 210, 220, 330 and 405 with their reader's rights: observers get those functions
 * too.
 */
create or replace function baton._grants()
returns table (kind text, object_type text, object_name text)
language sql
immutable
begin atomic
  select g.kind, g.object_type, o.object_name
  from (
    values
    (
      'client', 'function',
      array[
        'version', 'send', 'send_many', 'start_run', 'get_run', 'signal_run', 'wake_run', 'cancel_run', 'read_events'
      ]
    ),
    (
      'worker', 'function',
      array[
        'version', 'send', 'send_many', 'start_run', 'get_run', 'signal_run', 'wake_run', 'cancel_run', 'read_events',
        'begin_replay', 'end_replay', 'append_event', 'complete_run', 'fail_run', 'recover_runs',
        'create_step', 'dispatch_tasks', 'start_task', 'start_tasks', 'complete_task', 'complete_tasks', 'fail_task',
        'skip_step', 'advance_run', 'terminal_tasks', 'reserve_worker_invocation', 'reconcile_worker_invocation',
        'accept_worker_invocation', 'dismiss_worker_invocation', 'register_worker', 'heartbeat', 'stop_worker',
        'claim', 'ack', 'ack_many', 'park', 'fail', 'extend', 'extend_many'
      ]
    ),
    ('sender', 'function', array['version', 'claim_deliveries', 'ack', 'park', 'fail', 'extend']),
    (
      'observer', 'function',
      array[
        'version', 'health', 'metrics', '_now', '_statement_time', '_is_pending', '_is_overdue', '_next_attempt_at',
        '_startup_state', '_goes_on', '_is_healthy', '_connection_lives', '_session_lock_class', '_lease_remaining',
        '_dispatch_decision', '_task_key'
      ]
    ),
    (
      'observer', 'view',
      array[
        'worker_startup', 'worker_overview', 'queue_stats', 'message_overview', 'dead_letters', 'incident_log',
        'run_overview', 'replays', 'wedged_runs', 'task_ownership', 'step_outputs'
      ]
    ),
    (
      'admin', 'function',
      array[
        'register_worker_function', 'unregister_worker_function', 'enable_worker_function', 'disable_worker_function',
        'deprecate_workers', 'ensure_workers', 'pause_queue', 'resume_queue', 'redrive', 'discard', 'remove_messages',
        'tick', 'schedule', 'unschedule', 'release_replay', 'cancel_run', 'recover_runs', 'release_task', 'skip_step',
        'prune', 'after_restore'
      ]
    )
  ) as g (kind, object_type, object_names)
  cross join lateral unnest(g.object_names) as o (object_name);
end;

create or replace function baton.grant_usage(role_name text, kind text, out outcome text)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_object record;
begin
  perform baton._check_choice('kind', grant_usage.kind, 'client', 'worker', 'sender', 'observer', 'admin');
  if not exists (select from pg_roles as r where r.rolname = grant_usage.role_name) then
    perform baton._raise('unknown_role', quote_nullable(left(grant_usage.role_name, 60)));
  end if;
  execute format('grant usage on schema baton to %I', grant_usage.role_name);
  for v_object in
    select g.object_type, g.object_name
    from baton._grants() as g
    where g.kind = grant_usage.kind or (grant_usage.kind = 'admin' and g.kind = 'observer')
  loop
    case v_object.object_type
      when 'function' then
        execute format('grant execute on function baton.%I to %I', v_object.object_name, grant_usage.role_name);
      when 'view' then
        execute format('grant select on baton.%I to %I', v_object.object_name, grant_usage.role_name);
    end case;
  end loop;
  outcome := 'granted';
end;
$$;

comment on function baton.grant_usage(text, text) is
'Give a role the verbs and views of a kind. Called by the owner of the package; several kinds add up. REVOKE, or DROP OWNED BY, takes them away.
Arguments: kind: client (sends), worker (starts, claims and what follows), sender (delivers start requests), observer (views, health and metrics), admin (an observer''s, and the operator''s verbs).
Outcomes: granted
Raises: 22023, 42704
Locks: none of the package''s';

/* ==== 900_privileges.sql */

/*
 * Nothing is left to PUBLIC: all comes through grant_usage. Last, so that it covers every object.
 */
revoke all on schema baton from public;
revoke all on all tables in schema baton from public;
revoke all on all sequences in schema baton from public;
revoke all on all routines in schema baton from public;

-- ALTER DEFAULT PRIVILEGES may have given to others what was made just now. It is taken back by an installation or an
-- upgrade, from objects that were not there before: what others have on older ones was granted.
do $$
declare
  v_older oid[] := nullif(current_setting('baton.older_objects', true), '');
  v_grant record;
begin
  for v_grant in
    select distinct format('table %s', c.oid::regclass) as object, a.grantee::regrole as role_name
    from pg_class as c
    cross join lateral aclexplode(c.relacl) as a
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'S', 'v')
      and c.oid <> all (v_older) and a.grantee not in (0, c.relowner)
    union all
    select distinct format('routine %s', p.oid::regprocedure), a.grantee::regrole
    from pg_proc as p
    cross join lateral aclexplode(p.proacl) as a
    where p.pronamespace = 'baton'::regnamespace and p.oid <> all (v_older) and a.grantee not in (0, p.proowner)
  loop
    execute format('revoke all on %s from %s', v_grant.object, v_grant.role_name);
  end loop;
end;
$$;

/* ==== 950_extension_dump.sql */

/*
 * As an extension, tables and sequences must be registered, or pg_dump leaves their rows out. A step of an upgrade that
 * drops one takes it out of the extension first (alter extension pg_baton drop table): else its entry stays.
 */
do $$
declare
  v_relation regclass;
begin
  for v_relation in
    select c.oid::regclass
    from pg_class as c
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'S')
    order by c.relname
  loop
    perform pg_extension_config_dump(v_relation, '');
  end loop;
exception
  when feature_not_supported then
    null;
end;
$$;
