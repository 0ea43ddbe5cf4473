-- Removes pg_baton: psql "$DATABASE_URL" -X -1 -v ON_ERROR_STOP=1 -f sql/uninstall.sql
-- While workers are live it refuses, unless told: PGOPTIONS="-c baton.uninstall=yes" psql ...
\set ON_ERROR_STOP on
set local search_path = pg_catalog, pg_temp;
set local client_min_messages = warning;

do $$
begin
  if current_setting('search_path') is distinct from 'pg_catalog, pg_temp' then
    raise exception 'pg_baton must be uninstalled in one transaction'
      using errcode = '25P01', hint = 'psql -X -1 -v ON_ERROR_STOP=1 -f sql/uninstall.sql';
  end if;
  if to_regprocedure('baton.version()') is null then
    raise exception 'pg_baton is not installed in this database'
      using errcode = '42704', hint = format('This is database %I.', current_database());
  end if;
  if exists (select from pg_extension as e where e.extname = 'pg_baton') then
    raise exception 'pg_baton is installed as an extension'
      using errcode = '55000', hint = 'select * from baton.unschedule(); drop extension pg_baton';
  end if;
  if current_setting('baton.uninstall', true) is distinct from 'yes' and exists (
    select
    from baton.workers as w
    inner join baton.worker_functions as f on f.function_name = w.function_name
    where w.stopped_at is null and w.last_heartbeat_at + f.heartbeat_timeout > baton._now()
  ) then
    raise exception 'workers are live'
      using errcode = '55006', hint = 'Stop them, or say so: PGOPTIONS="-c baton.uninstall=yes" psql ...';
  end if;
  perform baton.unschedule();
  drop schema baton cascade;
end;
$$;
