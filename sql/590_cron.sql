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
