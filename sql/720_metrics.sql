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
