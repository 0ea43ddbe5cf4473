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
