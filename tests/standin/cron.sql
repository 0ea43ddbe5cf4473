/*
 * Stand-in for the extension pg_cron 1.6: the tables, row security and functions, checked arguments and errors, and a
 * row in pg_extension. It runs nothing: a test reads cron.job and runs the command itself.
 *
 * Left out: direct writes to cron.job are not refused (the functions run as their caller, who needs them), a sixth
 * field of a schedule is refused, and alter_job has no database and username.
 * Never install it into the database that a preloaded pg_cron uses. Needs a superuser.
 */
create schema cron;

create sequence cron.jobid_seq;
create sequence cron.runid_seq;

create table cron.job (
  jobid bigint primary key default nextval('cron.jobid_seq'),
  schedule text not null,
  command text not null,
  nodename text not null default 'localhost',
  nodeport integer not null default coalesce(inet_server_port(), current_setting('port')::integer),
  database text not null default current_database(),
  username text not null default current_user,
  active boolean not null default true,
  jobname text,
  constraint jobname_username_uniq unique (jobname, username)
);

create table cron.job_run_details (
  jobid bigint,
  runid bigint primary key default nextval('cron.runid_seq'),
  job_pid integer,
  database text,
  username text,
  command text,
  status text,
  return_message text,
  start_time timestamptz,
  end_time timestamptz
);

alter table cron.job enable row level security;
alter table cron.job_run_details enable row level security;
create policy cron_job_policy on cron.job using (username = current_user);
create policy cron_job_run_details_policy on cron.job_run_details using (username = current_user);

create function cron._check(schedule text)
returns void
language plpgsql
immutable
as $$
declare
  v_bounds int4range[] := array['[0,59]', '[0,23]', '[1,31]', '[1,12]', '[0,7]'];
  v_fields text[];
  v_ok boolean;
begin
  v_ok := _check.schedule ~* '^\s*([1-9]|[1-5][0-9])\s+seconds?\s*$'
    or _check.schedule ~* '^\s*@(reboot|yearly|annually|monthly|weekly|daily|midnight|hourly)\s*$';
  if not v_ok then
    v_fields := regexp_split_to_array(btrim(_check.schedule), '\s+');
    v_ok := cardinality(v_fields) = 5 and not exists (
      select
      from generate_series(1, 5) as n (i)
      cross join lateral regexp_split_to_table(
        case n.i
          when 4 then regexp_replace(v_fields[n.i], '\y(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\y', '1', 'gi')
          when 5 then regexp_replace(v_fields[n.i], '\y(mon|tue|wed|thu|fri|sat|sun)\y', '1', 'gi')
          else v_fields[n.i]
        end, ',') as part (item)
      cross join lateral regexp_match(part.item, '^(?:\*|(\d{1,4})(?:-(\d{1,4}))?)(?:/([1-9]\d{0,3}))?$') as m (piece)
      where
        not (n.i = 3 and part.item = '$')
        and (
          m.piece is null
          or not coalesce(m.piece[1]::integer <@ v_bounds[n.i], true)
          or not coalesce(m.piece[2]::integer <@ v_bounds[n.i], true)
        )
    );
  end if;
  if v_ok is not true then
    raise exception 'invalid schedule: %', _check.schedule
      using errcode = '22023', hint = 'Use cron format (e.g. 5 4 * * *), or interval format ''[1-59] seconds''';
  end if;
end;
$$;

create function cron.schedule(schedule text, command text)
returns bigint
language plpgsql
strict
as $$
declare
  v_jobid bigint;
begin
  perform cron._check(schedule.schedule);
  insert into cron.job (schedule, command)
  values (schedule.schedule, schedule.command)
  returning job.jobid into v_jobid;
  return v_jobid;
end;
$$;

create function cron.schedule(job_name text, schedule text, command text)
returns bigint
language plpgsql
as $$
declare
  v_jobid bigint;
begin
  if schedule.job_name is null then
    raise exception 'job_name can not be NULL' using errcode = 'XX000';
  elsif schedule.schedule is null then
    raise exception 'schedule can not be NULL' using errcode = 'XX000';
  elsif schedule.command is null then
    raise exception 'command can not be NULL' using errcode = 'XX000';
  end if;
  perform cron._check(schedule.schedule);
  insert into cron.job as j (schedule, command, jobname)
  values (schedule.schedule, schedule.command, schedule.job_name)
  on conflict on constraint jobname_username_uniq do update
  set schedule = excluded.schedule, command = excluded.command, database = excluded.database
  returning j.jobid into v_jobid;
  return v_jobid;
end;
$$;

create function cron.alter_job(
  job_id bigint,
  schedule text default null,
  command text default null,
  active boolean default null
)
returns void
language plpgsql
as $$
begin
  if alter_job.schedule is not null then
    perform cron._check(alter_job.schedule);
  end if;
  update cron.job as j
  set
    schedule = coalesce(alter_job.schedule, j.schedule),
    command = coalesce(alter_job.command, j.command),
    active = coalesce(alter_job.active, j.active)
  where j.jobid = alter_job.job_id and j.username = current_user;
  if not found then
    raise exception 'Job % does not exist or you don''t own it', alter_job.job_id using errcode = 'XX000';
  end if;
end;
$$;

create function cron.unschedule(job_id bigint)
returns boolean
language plpgsql
strict
as $$
begin
  delete from cron.job as j where j.jobid = unschedule.job_id;
  if not found then
    raise exception 'could not find valid entry for job %', unschedule.job_id using errcode = 'XX000';
  end if;
  return true;
end;
$$;

create function cron.unschedule(job_name text)
returns boolean
language plpgsql
strict
as $$
begin
  delete from cron.job as j where j.jobname = unschedule.job_name and j.username = current_user;
  if not found then
    raise exception 'could not find valid entry for job ''%''', unschedule.job_name using errcode = 'XX000';
  end if;
  return true;
end;
$$;

grant select, insert, update, delete on cron.job to public;
grant select, delete on cron.job_run_details to public;
grant usage, select on sequence cron.jobid_seq to public;
grant select on sequence cron.runid_seq to public;
revoke all on function cron.alter_job from public;

/* What says which pg_cron a database has. */
do $$
begin
  insert into pg_catalog.pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
  values (
    pg_catalog.pg_nextoid('pg_catalog.pg_extension', 'oid', 'pg_catalog.pg_extension_oid_index'),
    'pg_cron', current_user::regrole, 'pg_catalog'::regnamespace, false, '1.6'
  );
end;
$$;
