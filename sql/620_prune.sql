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
