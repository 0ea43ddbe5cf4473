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
