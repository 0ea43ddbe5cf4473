/*
 * Rules for what is not written yet: each looks at the whole schema as it was installed, so this file takes nothing
 * from _begin.sql, which replaces the clock and adds builders. tests/python/test_catalog_rules.py breaks each rule.
 */
\set ON_ERROR_STOP true
\set QUIET 1
\pset format unaligned
\pset tuples_only true
\pset pager off
begin;
set local search_path = tap, public;
set local client_min_messages = warning;

create temporary table functions on commit drop as
select
  p.oid, p.proname::text as name, p.prokind, l.lanname::text as language, p.provolatile as volatility,
  p.prosecdef as definer, p.proconfig as config, p.proacl as acl, p.proowner as owner, p.pronargs, p.proargnames,
  p.proargmodes, p.prosqlbody is not null as atomic, p.proname !~ '^_' as public,
  coalesce(obj_description(p.oid, 'pg_proc'), '') as comment,
  regexp_replace(
    regexp_replace(coalesce(pg_get_function_sqlbody(p.oid), p.prosrc), '/\*.*?\*/', ' ', 'g'), '--[^\n]*', '', 'g'
  ) as body
from pg_proc as p
inner join pg_language as l on l.oid = p.prolang
where p.pronamespace = 'baton'::regnamespace;

create temporary table relations on commit drop as
select c.oid, c.relname::text as name, c.relkind as kind, c.relacl as acl, c.relowner as owner, c.relpersistence
from pg_class as c
where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'f', 'S');

create temporary table columns on commit drop as
select
  r.oid, r.name as relation, r.kind, a.attnum, a.attname::text as name, a.atttypid, a.attacl as acl,
  col_description(r.oid, a.attnum) as comment
from relations as r
inner join pg_attribute as a on a.attrelid = r.oid and a.attnum > 0 and not a.attisdropped
where r.kind <> 'S';

-- Which function writes which table, by the words of its body.
create temporary table writes on commit drop as
select distinct f.name as function, lower(m.found[1]) as relation
from functions as f
cross join lateral regexp_matches(
  f.body,
  '(?:insert\s+into|update|delete\s+from|merge\s+into|truncate(?:\s+table)?)\s+(?:only\s+)?baton\.(\w+)', 'gi'
) as m (found);

-- The words after "Written by:" in a table's comment.
create temporary table writers on commit drop as
select
  r.name as relation, obj_description(r.oid, 'pg_class') ~ '(^|\n)Written by: [^\n]+$' as stated,
  array(
    select trim(w.word)
    from regexp_split_to_table(substring(obj_description(r.oid, 'pg_class') from 'Written by: ([^\n]+)$'), ',') as w (word)
    order by 1
  ) as stated_writers,
  array(select w.function from writes as w where w.relation = r.name order by 1) as true_writers
from relations as r
where r.kind in ('r', 'p');

-- The SQLSTATEs after "Raises:" in a public function's comment.
create temporary table raises on commit drop as
select f.name as function, c.found[1] as code
from functions as f
cross join lateral regexp_matches(substring(f.comment from '(?:^|\n)Raises: ([^\n]*)'), '\m[0-9A-Z]{5}\M', 'g') as c (found)
where f.public;

-- The conditions that a function hands to _raise.
create temporary table raised on commit drop as
select distinct f.name as function, m.found[1] as condition
from functions as f
cross join lateral regexp_matches(f.body, 'baton\._raise\(\s*''(\w+)''', 'g') as m (found);

-- What a public function can raise: by what it and everything that it calls hands to _raise. Names in strings don't count.
create temporary table raisable on commit drop as
with recursive
calls as (
  select distinct f.name as caller, m.found[1] as called
  from functions as f
  cross join lateral regexp_matches(
    regexp_replace(f.body, '''(?:[^'']|'''')*''', '''''', 'g'), 'baton\.(\w+)\s*\(', 'g'
  ) as m (found)
),
reached as (
  select f.name as function, f.name as called from functions as f where f.public
  union
  select r.function, c.called from reached as r inner join calls as c on c.caller = r.called
)
select distinct r.function, e.code
from reached as r
inner join raised as d on d.function = r.called
inner join baton._errors() as e on e.condition = d.condition
where (r.function, e.code) <> ('register_worker_function', '42704');  -- it locks a row that it has just written

select plan(35);

-- Privileges

select is_empty($$
  select f.name from functions as f
  cross join lateral aclexplode(coalesce(f.acl, acldefault('f', f.owner))) as a
  where a.grantee = 0
$$, 'privileges: no function is executable by public');

select is_empty($$
  select r.name, a.privilege_type from relations as r
  cross join lateral aclexplode(coalesce(r.acl, acldefault((case r.kind when 'S' then 's' else 'r' end)::"char", r.owner))) as a
  where a.grantee = 0
  union all
  select c.relation || '.' || c.name, a.privilege_type from columns as c
  cross join lateral aclexplode(c.acl) as a
  where a.grantee = 0
$$, 'privileges: no table, view, column or sequence is open to public');

select is_empty($$
  select t.typname from pg_type as t
  cross join lateral aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) as a
  where t.typnamespace = 'baton'::regnamespace
    and a.grantee = 0
    and t.typcategory <> 'A'
    and not exists (select from relations as r where r.oid = t.typrelid)
$$, 'privileges: no type but the rows of tables is usable by public');

select is_empty($$
  select a.privilege_type from pg_namespace as n
  cross join lateral aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) as a
  where n.nspname = 'baton' and a.grantee = 0
$$, 'privileges: the schema is closed to public');

select is_empty($$
  select f.name from functions as f
  cross join lateral aclexplode(f.acl) as a
  where a.grantee <> f.owner and a.grantee <> 0
  union all
  select r.name from relations as r
  cross join lateral aclexplode(r.acl) as a
  where a.grantee <> r.owner and a.grantee <> 0
$$, 'privileges: an installation grants nothing to anybody');

select is_empty($$
  select f.name from functions as f
  cross join pg_namespace as n
  where n.nspname = 'baton' and f.owner <> n.nspowner
  union all
  select r.name from relations as r
  cross join pg_namespace as n
  where n.nspname = 'baton' and r.owner <> n.nspowner
$$, 'privileges: everything belongs to the owner of the schema');

-- How functions are made

select is_empty($$
  select f.name, f.config from functions as f
  where f.language = 'plpgsql'
    and f.name <> '_tick_for_a_minute'
    and not (
      'search_path=pg_catalog, pg_temp' = any (coalesce(f.config, '{}'))
      and 1 = (select count(*) from unnest(f.config) as c (setting) where c.setting like 'search_path=%')
    )
$$, 'path: every plpgsql function pins pg_catalog, pg_temp');

select is_empty($$
  select f.name from functions as f
  where f.language = 'sql' and not f.atomic
    and 'search_path=pg_catalog, pg_temp' <> all (coalesce(f.config, '{}'))
$$, 'path: every sql function is begin atomic or pins pg_catalog, pg_temp');

-- A plan that has to use what is disabled looks so dear that it would be compiled at every call; and so dear beside one
-- made for the arguments that it would be planned anew at every call.
select is_empty($$
  select f.name
  from functions as f
  where 'enable_seqscan=off' = any (coalesce(f.config, '{}'))
    and not f.config @> '{jit=off, plan_cache_mode=force_generic_plan}'
$$, 'plans: where sequential scans are disabled, nothing is compiled or planned anew');

-- after_restore changes all rows; the others read no table of ours.
select is_empty($$
  select f.name
  from functions as f
  where f.language = 'plpgsql' and f.public
    and f.name not in ('after_restore', 'grant_usage', 'schedule', 'unschedule')
    and 'enable_seqscan=off' <> all (coalesce(f.config, '{}'))
$$, 'plans: no verb keeps one that reads a whole table');

select is_empty($$
  select f.name, f.language from functions as f where f.language not in ('sql', 'plpgsql')
$$, 'functions: only sql and plpgsql');

select is_empty($$
  select f.name, f.prokind, f.config, f.definer from functions as f
  where f.prokind <> 'f'
    and not (f.name = '_tick_for_a_minute' and f.prokind = 'p' and f.config is null and not f.definer)
$$, 'functions: one procedure, which can commit since it has neither SET nor SECURITY DEFINER');

select is_empty($$
  select f.name from functions as f
  where f.public and f.volatility = 'v' and not f.definer
    and f.name <> 'grant_usage'  -- has no more rights than its caller: only the owner can grant
$$, 'definer: every public verb that writes is security definer');

select is_empty($$
  select f.name from functions as f where not f.public and f.definer
$$, 'definer: no internal function is');

select is_empty($$
  select f.name from functions as f group by f.name having count(*) > 1
$$, 'functions: no overloads');

select is_empty($$
  select f.name from functions as f
  where f.public
    and (
      f.pronargs > 0 and f.proargnames is null
      or coalesce(array_length(f.proargnames, 1), 0) < f.pronargs
      or '' = any (coalesce(f.proargnames, '{}'))
    )
$$, 'functions: every argument of a public one has a name');

select is_empty($$
  select f.name from functions as f
  where f.public
    and f.volatility = 'v'
    and f.name not in ('claim', 'claim_deliveries', 'health', 'metrics', 'tick', 'recover_runs', 'prune')
    and 'outcome' is distinct from (
      select f.proargnames[m.position]
      from unnest(f.proargmodes) with ordinality as m (mode, position)
      where m.mode in ('o', 'b', 't')
      order by m.position
      limit 1
    )
$$, 'functions: the first column that a verb answers is its outcome');

select is_empty($$
  select f.name, a.name
  from functions as f
  cross join lateral unnest(f.proargnames, f.proargmodes) as a (name, mode)
  where f.public
    and a.mode in ('o', 'b', 't')
    and a.name ~ 'seq|position'
    and (f.name, a.name) not in (('begin_replay', 'last_seq'), ('end_replay', 'last_seq'), ('read_events', 'seq'))
$$, 'functions: who writes into a log is told no position, only who is to read it');

-- Contracts

select is_empty($$
  select f.name, f.comment from functions as f
  where f.public
    and f.comment !~ '^[^\n]+\n(?:.*\n)?(?:Outcomes|Returns): [^\n]+\nRaises: [^\n]+\nLocks: [^\n]+(?:\nSource: [^\n]+)?$'
$$, 'contract: every public function says Outcomes or Returns, Raises and Locks');

select is_empty($$
  select f.name, o.found[1] from functions as f
  cross join lateral regexp_matches(f.body, '\moutcome\s*:=\s*''(\w+)''', 'g') as o (found)
  where f.public
    and o.found[1] <> all (
      regexp_split_to_array(substring(f.comment from '(?:^|\n)Outcomes: ([^\n]+)'), '\W+')
    )
$$, 'contract: every outcome that a body sets is documented');

select is_empty($$
  select r.function, r.code from raises as r
  where r.code not in (select e.code from baton._errors() as e)
    and r.code not in ('40001', '40P01', '42501', '55P03', '57014')
$$, 'contract: every documented SQLSTATE is registered in _errors() or standard');

select is_empty($$
  select f.name from functions as f
  where f.public
    and substring(f.comment from '(?:^|\n)Raises: ([^\n]*)') <> 'none'
    and f.name not in (select r.function from raises as r)
$$, 'contract: Raises names SQLSTATEs, or none');

select is_empty($$
  (select r.function, r.code, 'not documented' from raisable as r
   except select d.function, d.code, 'not documented' from raises as d)
  union all
  (select d.function, d.code, 'never raised' from raises as d
   where d.code not in ('40001', '40P01', '42501', '55P03', '57014')
   except select r.function, r.code, 'never raised' from raisable as r)
$$, 'contract: Raises names what a function and those that it calls raise');

select is_empty($$
  select r.function, r.condition from raised as r
  where r.condition not in (select e.condition from baton._errors() as e)
$$, 'errors: every condition that is raised is registered');

select is_empty($$
  select e.condition from baton._errors() as e
  where e.condition not in (select r.condition from raised as r)
$$, 'errors: every registered condition is raised');

select is_empty($$
  select r.name from relations as r
  where r.kind <> 'S' and coalesce(obj_description(r.oid, 'pg_class'), '') = ''
$$, 'comments: every table and view has one');

select is_empty($$
  select c.relation, c.name from columns as c
  where (c.kind = 'v' or c.relation = 'settings') and coalesce(c.comment, '') = ''
$$, 'comments: every column of a view and of settings has one');

select is_empty($$
  select w.relation, w.stated_writers, w.true_writers from writers as w
  where w.stated is distinct from true
    or case
      when w.true_writers = '{}' then w.stated_writers not in ('{the owner}', '{nobody}')
      else array_remove(w.stated_writers, 'the owner') <> w.true_writers
    end
$$, 'comments: every table names the functions that write it');

-- Tables

select is_empty($$
  select c.relation, c.name from columns as c
  inner join pg_attrdef as d on d.adrelid = c.oid and d.adnum = c.attnum
  where pg_get_expr(d.adbin, d.adrelid) ~* '\m(now|\w+_timestamp|timeofday|_now|uuidv7)\(|CURRENT_|LOCALTIME'
  union all
  select f.name, pg_get_function_arguments(f.oid) from functions as f
  where pg_get_function_arguments(f.oid) ~* 'DEFAULT [^,]*(\m(now|\w+_timestamp|timeofday|_now|uuidv7)\(|CURRENT_|LOCALTIME)'
$$, 'tables: no default reads a clock');

select is_empty($$
  select c.relation, c.name, format_type(c.atttypid, null) from columns as c
  inner join pg_type as t on t.oid = c.atttypid
  where c.kind in ('r', 'p') and t.typnamespace = 'pg_catalog'::regnamespace and t.typname ~ '^_?(reg\w+|oid)$'
$$, 'tables: no oid and no reg* column');

select is_empty($$
  select t.typname from pg_type as t where t.typnamespace = 'baton'::regnamespace and t.typtype = 'e'
$$, 'tables: no enum type');

select is_empty($$
  select k.conrelid::regclass, k.conname from pg_constraint as k
  inner join relations as r on r.oid = k.conrelid
  where k.contype = 'f'
    and not exists (
      select from pg_index as i
      where i.indrelid = k.conrelid
        and i.indisvalid
        and i.indpred is null
        and (i.indkey::smallint[])[0:array_length(k.conkey, 1) - 1] @> k.conkey
    )
$$, 'tables: every foreign key has an index');

select is_empty($$
  select r.name from relations as r where r.relpersistence <> 'p'
$$, 'tables: none is unlogged');

select is_empty($$
  select r.name from relations as r
  where r.kind in ('r', 'p')
    and not exists (select from pg_constraint as k where k.conrelid = r.oid and k.contype = 'p')
$$, 'tables: every one has a primary key');

select is_empty($$
  select r.name from relations as r
  inner join pg_rewrite as w on w.ev_class = r.oid
  inner join pg_depend as d on d.classid = 'pg_rewrite'::regclass and d.objid = w.oid
    and d.refclassid = 'pg_class'::regclass
  inner join pg_class as s on s.oid = d.refobjid
  where r.kind = 'v' and s.relnamespace = 'baton'::regnamespace and s.relname = 'secrets'
$$, 'tables: no view reads the secrets');

select * from finish();
rollback;
