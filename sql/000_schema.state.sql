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
