/*
 * What docs/reference.md says, as one JSON document, from a database with the package: tools/docs writes it down.
 * What each grant kind may do is found out by granting it to a role, so this ends with a rollback.
 */
\set ON_ERROR_STOP true
begin;
set local search_path = pg_catalog;

create temporary table kinds (kind text, role_name text);
insert into kinds
select k.kind, 'baton_docs_' || k.kind
from unnest(array['client', 'worker', 'sender', 'observer', 'admin']) as k (kind);
select format('create role %I', k.role_name) from kinds as k
\gexec
select format('select baton.grant_usage(%L, %L)', k.role_name, k.kind) from kinds as k
\o /dev/null
\gexec
\o

with functions as (
  select p.*, p.proname::text as name
  from pg_proc as p
  where p.pronamespace = 'baton'::regnamespace and p.prokind = 'f' and p.proname !~ '^_'
),
arguments as (
  select
    f.oid, a.position, a.name, format_type(a.type, null) as type,
    coalesce(f.proargmodes[a.position]::text, 'i') as mode,
    pg_get_function_arg_default(f.oid, a.position::integer) as value
  from functions as f
  cross join lateral unnest(coalesce(f.proallargtypes, f.proargtypes::oid[]), f.proargnames) with ordinality
    as a (type, name, position)
),
relations as (
  select c.oid, c.relname::text as name, c.relkind, obj_description(c.oid, 'pg_class') as comment
  from pg_class as c
  where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'v')
),
columns as (
  select
    r.name as relation,
    jsonb_agg(
      jsonb_build_object(
        'name', a.attname, 'type', format_type(a.atttypid, a.atttypmod), 'comment', col_description(r.oid, a.attnum),
        'default', pg_get_expr(d.adbin, d.adrelid)
      ) order by a.attnum
    ) as columns
  from relations as r
  inner join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
  left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
  group by r.name
)
select jsonb_build_object(
  'version', baton.version(),
  'functions', (
    select jsonb_object_agg(f.name, jsonb_build_object(
      'comment', obj_description(f.oid, 'pg_proc'),
      'set', f.proretset,
      'result', pg_get_function_result(f.oid),
      'inputs', coalesce((
        select jsonb_agg(jsonb_build_object('name', a.name, 'type', a.type, 'default', a.value) order by a.position)
        from arguments as a where a.oid = f.oid and a.mode in ('i', 'b', 'v')
      ), '[]'),
      'outputs', coalesce((
        select jsonb_agg(jsonb_build_object('name', a.name, 'type', a.type) order by a.position)
        from arguments as a where a.oid = f.oid and a.mode in ('o', 'b', 't')
      ), '[]')
    ))
    from functions as f
  ),
  'views', (
    select jsonb_object_agg(r.name, jsonb_build_object('comment', r.comment, 'columns', c.columns))
    from relations as r inner join columns as c on c.relation = r.name where r.relkind = 'v'
  ),
  'tables', (select jsonb_object_agg(r.name, r.comment order by r.name) from relations as r where r.relkind = 'r'),
  'settings', (select c.columns from columns as c where c.relation = 'settings'),
  'errors', (
    select jsonb_agg(to_jsonb(e) order by e.code, e.condition) from baton._errors() as e
  ),
  'kinds', (
    select jsonb_object_agg(k.kind, jsonb_build_object(
      'functions', coalesce((
        select jsonb_agg(f.name order by f.name) from functions as f
        where has_function_privilege(k.role_name, f.oid, 'execute')
      ), '[]'),
      'views', coalesce((
        select jsonb_agg(r.name order by r.name) from relations as r
        where has_table_privilege(k.role_name, r.oid, 'select')
      ), '[]')
    ))
    from kinds as k
  )
);
rollback;
