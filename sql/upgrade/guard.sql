/*
 * The guards of an upgrade, before its step and all code. tools/build puts the versions in.
 *
 * One file serves psql, drivers and ALTER EXTENSION. A missing transaction is noticed, and a client that goes on after
 * the error kept from writing, as in 000_schema.state.sql.
 */
set local search_path = pg_catalog, pg_temp;

do $$
begin
  if current_setting('search_path') is distinct from 'pg_catalog, pg_temp' then
    perform set_config('default_transaction_read_only', 'on', false);
  end if;
end;
$$;

do $$
declare
  v_owner name;
  v_installed text;
  v_is_extension boolean;
  v_by_extension boolean;
begin
  if current_setting('search_path') is distinct from 'pg_catalog, pg_temp' then
    raise exception 'pg_baton must be upgraded in one transaction'
      using errcode = '25P01', hint = 'psql -X -1 -v ON_ERROR_STOP=1 -f pg_baton--@FROM@--@TO@.sql';
  end if;

  perform set_config('lock_timeout', '5s', true);
  perform pg_advisory_xact_lock(hashtextextended('pg_baton install', 0));
  v_owner := (select pg_get_userbyid(n.nspowner) from pg_namespace as n where n.nspname = 'baton');
  if v_owner <> current_user then
    raise exception 'schema baton belongs to another role'
      using errcode = '42501', hint = format('Upgrade as its owner: SET ROLE %I', v_owner);
  end if;
  if to_regprocedure('baton.version()') is null then
    raise exception 'pg_baton is not installed in this database'
      using errcode = '42704', hint = format('This is database %I.', current_database());
  end if;
  execute 'select baton.version()' into v_installed;
  if v_installed = '@TO@' then
    raise exception 'pg_baton @TO@ is already installed in this database'
      using errcode = '42710', hint = 'There is nothing to upgrade.';
  end if;
  if v_installed is distinct from '@FROM@' then
    raise exception 'this upgrades pg_baton @FROM@ to @TO@, and this database has %', v_installed
      using errcode = '55000', hint = 'Upgrades go from one version to the next, and never back.';
  end if;

  v_is_extension := exists (select from pg_extension as e where e.extname = 'pg_baton');
  begin
    perform pg_extension_config_dump('baton.settings', '');
    v_by_extension := true;
  exception
    when feature_not_supported then
      v_by_extension := false;
  end;
  if v_is_extension and not v_by_extension then
    raise exception 'pg_baton is installed as an extension'
      using errcode = '55000', hint = 'ALTER EXTENSION pg_baton UPDATE TO ''@TO@''';
  end if;

  -- As a tick does: none is at work while other locks are taken, and those that come return at once.
  perform s.singleton from baton.state as s for no key update of s;
  perform set_config(  -- 900_privileges asks
    'baton.older_objects',
    array(
      select c.oid from pg_class as c where c.relnamespace = 'baton'::regnamespace
      union all
      select p.oid from pg_proc as p where p.pronamespace = 'baton'::regnamespace
    )::text,
    true
  );
end;
$$;
