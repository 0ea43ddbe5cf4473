/*
 * Nothing is left to PUBLIC: all comes through grant_usage. Last, so that it covers every object.
 */
revoke all on schema baton from public;
revoke all on all tables in schema baton from public;
revoke all on all sequences in schema baton from public;
revoke all on all routines in schema baton from public;

-- ALTER DEFAULT PRIVILEGES may have given to others what was made just now. It is taken back by an installation or an
-- upgrade, from objects that were not there before: what others have on older ones was granted.
do $$
declare
  v_older oid[] := nullif(current_setting('baton.older_objects', true), '');
  v_grant record;
begin
  for v_grant in
    select distinct format('table %s', c.oid::regclass) as object, a.grantee::regrole as role_name
    from pg_class as c
    cross join lateral aclexplode(c.relacl) as a
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'S', 'v')
      and c.oid <> all (v_older) and a.grantee not in (0, c.relowner)
    union all
    select distinct format('routine %s', p.oid::regprocedure), a.grantee::regrole
    from pg_proc as p
    cross join lateral aclexplode(p.proacl) as a
    where p.pronamespace = 'baton'::regnamespace and p.oid <> all (v_older) and a.grantee not in (0, p.proowner)
  loop
    execute format('revoke all on %s from %s', v_grant.object, v_grant.role_name);
  end loop;
end;
$$;
