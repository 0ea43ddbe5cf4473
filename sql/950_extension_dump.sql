/*
 * As an extension, tables and sequences must be registered, or pg_dump leaves their rows out. A step of an upgrade that
 * drops one takes it out of the extension first (alter extension pg_baton drop table): else its entry stays.
 */
do $$
declare
  v_relation regclass;
begin
  for v_relation in
    select c.oid::regclass
    from pg_class as c
    where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'S')
    order by c.relname
  loop
    perform pg_extension_config_dump(v_relation, '');
  end loop;
exception
  when feature_not_supported then
    null;
end;
$$;
