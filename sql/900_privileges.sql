/*
 * Nothing is left to PUBLIC: all comes through grant_usage. Last, so that it covers every object.
 */
revoke all on schema baton from public;
revoke all on all tables in schema baton from public;
revoke all on all sequences in schema baton from public;
revoke all on all routines in schema baton from public;

-- ALTER DEFAULT PRIVILEGES may have given tables and sequences to others: those are nobody's but the owner's.
do $$
declare
  v_grant record;
begin
  for v_grant in
    select distinct c.oid::regclass as relation, a.grantee::regrole as role_name
    from pg_class as c
    cross join lateral aclexplode(c.relacl) as a
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'S') and a.grantee not in (0, c.relowner)
  loop
    execute format('revoke all on table %s from %s', v_grant.relation, v_grant.role_name);
  end loop;
end;
$$;
