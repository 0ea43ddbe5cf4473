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
