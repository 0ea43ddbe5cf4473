/*
 * The schema baton as sorted lines of text, one a fact: psql -XAtq -f tools/fingerprint.sql
 *
 * Who owns it and how it was installed do not show: the owner is called OWNER, a privilege that was never touched is
 * the same as its default, and membership in an extension is left out.
 */
set search_path = pg_catalog;

with
schema as (
  select n.oid, n.nspowner as owner, n.nspacl from pg_namespace as n where n.nspname = 'baton'
),
relations as (
  select c.*, c.relname::text as name
  from pg_class as c
  inner join schema as s on s.oid = c.relnamespace
  where c.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
),
functions as (
  select p.*, format('%s(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as name
  from pg_proc as p
  inner join schema as s on s.oid = p.pronamespace
),
types as (
  select t.*, t.typname::text as name
  from pg_type as t
  inner join schema as s on s.oid = t.typnamespace
  where t.typcategory <> 'A' and not exists (select from pg_class as c where c.oid = t.typrelid and c.relkind <> 'c')
),
-- Numbered over the columns that are there, so that a dropped one leaves no gap.
columns as (
  select
    r.oid as relation, r.name || '.' || a.attname as name, a.attnum, a.attacl,
    row_number() over (partition by r.oid order by a.attnum) as position,
    format_type(a.atttypid, a.atttypmod) as type, a.attnotnull, a.attidentity, a.attgenerated, a.attstorage,
    a.attcompression, a.attstattarget,
    array(
      select o.option from unnest(a.attoptions) as o (option)
      where o.option not like 'pg\_attver=%'  -- a mark that some servers set themselves
      order by 1
    ) as attoptions,
    case when a.attcollation <> t.typcollation then (select c.collname from pg_collation as c where c.oid = a.attcollation) end
      as collation,
    pg_get_expr(d.adbin, d.adrelid) as value
  from relations as r
  inner join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
  inner join pg_type as t on t.oid = a.atttypid
  left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
  where r.relkind <> 'S'
),
privileges as (
  select 'schema' as what, 'baton' as name, coalesce(s.nspacl, acldefault('n', s.owner)) as acl, s.owner from schema as s
  union all
  select
    'relation', r.name, coalesce(r.relacl, acldefault((case r.relkind when 'S' then 's' else 'r' end)::"char", r.relowner)),
    r.relowner
  from relations as r
  union all
  select 'column', c.name, c.attacl, r.relowner from columns as c inner join relations as r on r.oid = c.relation
  union all
  select 'function', f.name, coalesce(f.proacl, acldefault('f', f.proowner)), f.proowner from functions as f
  union all
  select 'type', t.name, coalesce(t.typacl, acldefault('T', t.typowner)), t.typowner from types as t
),
facts as (
  select format('relation %s kind=%s persistence=%s options=%s rowsecurity=%s force=%s replica=%s',
    r.name, r.relkind, r.relpersistence, array(select unnest(r.reloptions) order by 1), r.relrowsecurity,
    r.relforcerowsecurity, r.relreplident) as fact
  from relations as r
  union all
  select format('column %s %s %s notnull=%s identity=%s generated=%s storage=%s compression=%s statistics=%s options=%s collation=%s default=%s',
    c.name, c.position, c.type, c.attnotnull, c.attidentity, c.attgenerated, c.attstorage, c.attcompression,
    nullif(c.attstattarget, -1), c.attoptions, c.collation, c.value)
  from columns as c
  union all
  select format('sequence %s type=%s start=%s increment=%s min=%s max=%s cache=%s cycle=%s owned_by=%s',
    r.name, format_type(q.seqtypid, null), q.seqstart, q.seqincrement, q.seqmin, q.seqmax, q.seqcache, q.seqcycle,
    (select c.name from pg_depend as d inner join columns as c on c.relation = d.refobjid and c.attnum = d.refobjsubid
     where d.classid = 'pg_class'::regclass and d.objid = r.oid and d.refclassid = 'pg_class'::regclass))
  from relations as r inner join pg_sequence as q on q.seqrelid = r.oid
  union all
  select format('constraint %s.%s %s valid=%s', r.name, k.conname, pg_get_constraintdef(k.oid), k.convalidated)
  from relations as r inner join pg_constraint as k on k.conrelid = r.oid
  union all
  select format('index %s %s valid=%s options=%s', r.name, pg_get_indexdef(i.indexrelid), i.indisvalid, x.reloptions)
  from relations as r
  inner join pg_index as i on i.indrelid = r.oid
  inner join pg_class as x on x.oid = i.indexrelid
  union all
  select format('statistics %s', pg_get_statisticsobjdef(e.oid))
  from schema as s inner join pg_statistic_ext as e on e.stxnamespace = s.oid
  union all
  select format('trigger %s %s enabled=%s', r.name, pg_get_triggerdef(t.oid), t.tgenabled)
  from relations as r inner join pg_trigger as t on t.tgrelid = r.oid
  where not t.tgisinternal
  union all
  select format('rule %s.%s enabled=%s %s', r.name, w.rulename, w.ev_enabled, pg_get_ruledef(w.oid))
  from relations as r inner join pg_rewrite as w on w.ev_class = r.oid
  union all
  select format('policy %s.%s %s permissive=%s roles=%s using=%s check=%s',
    r.name, p.polname, p.polcmd, p.polpermissive, p.polroles::regrole[], pg_get_expr(p.polqual, r.oid),
    pg_get_expr(p.polwithcheck, r.oid))
  from relations as r inner join pg_policy as p on p.polrelid = r.oid
  union all
  select format('function %s cost=%s rows=%s %s', f.name, f.procost, f.prorows,
    case when f.prokind = 'a' then 'aggregate' else pg_get_functiondef(f.oid) end)
  from functions as f
  union all
  select format('type %s kind=%s category=%s base=%s notnull=%s default=%s labels=%s checks=%s',
    t.name, t.typtype, t.typcategory, nullif(t.typbasetype, 0)::regtype, t.typnotnull, t.typdefault,
    array(select e.enumlabel from pg_enum as e where e.enumtypid = t.oid order by e.enumsortorder),
    array(select pg_get_constraintdef(k.oid) from pg_constraint as k where k.contypid = t.oid order by k.conname))
  from types as t
  union all
  select format('operator %s', o.oid::regoperator) from schema as s inner join pg_operator as o on o.oprnamespace = s.oid
  union all
  select format('default privileges %s %s %s', d.defaclrole::regrole, d.defaclobjtype, d.defaclacl)
  from schema as s inner join pg_default_acl as d on d.defaclnamespace = s.oid
  union all
  select format('comment on schema: %s', c.description)
  from schema as s
  inner join pg_description as c on c.classoid = 'pg_namespace'::regclass and c.objoid = s.oid
  union all
  select format('comment on relation %s: %s', r.name, c.description)
  from relations as r
  inner join pg_description as c on c.classoid = 'pg_class'::regclass and c.objoid = r.oid and c.objsubid = 0
  union all
  select format('comment on column %s: %s', k.name, c.description)
  from columns as k
  inner join pg_description as c
    on c.classoid = 'pg_class'::regclass and c.objoid = k.relation and c.objsubid = k.attnum
  union all
  select format('comment on function %s: %s', f.name, c.description)
  from functions as f
  inner join pg_description as c on c.classoid = 'pg_proc'::regclass and c.objoid = f.oid
  union all
  select format('comment on %s %s.%s: %s', t.what, r.name, t.name, c.description)
  from (
    select 'constraint' as what, k.conname as name, k.conrelid as relation, k.oid, 'pg_constraint'::regclass as class
    from pg_constraint as k
    union all
    select 'trigger', g.tgname, g.tgrelid, g.oid, 'pg_trigger'::regclass from pg_trigger as g
    union all
    select 'index', x.relname, i.indrelid, x.oid, 'pg_class'::regclass
    from pg_index as i inner join pg_class as x on x.oid = i.indexrelid
  ) as t
  inner join relations as r on r.oid = t.relation
  inner join pg_description as c on c.classoid = t.class and c.objoid = t.oid
  union all
  select format('privilege %s %s %s to %s grantable=%s', p.what, p.name, a.privilege_type,
    case a.grantee when 0 then 'PUBLIC' when p.owner then 'OWNER' else a.grantee::regrole::text end, a.is_grantable)
  from privileges as p
  cross join lateral aclexplode(p.acl) as a
)
select regexp_replace(f.fact, '\s+', ' ', 'g') from facts as f order by f.fact collate "C";
