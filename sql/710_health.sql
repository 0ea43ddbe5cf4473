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
