\ir _begin.sql
select plan(27);

-- Keys

select is(baton._task_key('r', 's', 7), e'r\x1fs\x1f7', 'task key: run, step and task, joined by what no name contains');
select is(
  baton._backstop_key('r', 's', 7, 3), e'r\x1fs\x1f7\x1fbackstop\x1f3', 'backstop key: those, its purpose and the attempt'
);
select isnt(
  baton._backstop_key('r', 's', 7, 3), baton._backstop_key('r', 's', 7, 4), 'backstop key: another attempt, another key'
);
select is(
  (
    select count(distinct k.key)
    from unnest(array['r', 'r1', 'r s']) as r (id), unnest(array['s', '1s', 's 1', 'wake']) as s (slug),
      unnest(array[0, 1, 11]) as t (nth),
      lateral (
        values (baton._task_key(r.id, s.slug, t.nth)), (baton._backstop_key(r.id, s.slug, t.nth, 1)),
          (baton._backstop_key(r.id, s.slug, t.nth, 11)), (baton._run_key(r.id, 'wake'))
      ) as k (key)
  ),
  (3 * 4 * 3 * 3 + 3)::bigint,
  'keys: no two are alike'
);

-- The lease: what is left of it since the stamp, in whole seconds; used up, a full one again

create function pg_temp.lease(age interval, lease interval default '860 seconds')
returns interval
language sql
as $$ select baton._lease_remaining('2026-01-01 00:00:00+00', lease, timestamptz '2026-01-01 00:00:00+00' + age) $$;
select is(pg_temp.lease('0'), '860 seconds', 'lease: at the stamp a full one');
select is(pg_temp.lease('1 microsecond'), '860 seconds', 'lease: a microsecond later rounded up');
select is(pg_temp.lease('999999 microseconds'), '860 seconds', 'lease: and until a second has passed');
select is(pg_temp.lease('1 second'), '859 seconds', 'lease: then a second less');
select is(pg_temp.lease('859 seconds'), '1 second', 'lease: its last second');
select is(pg_temp.lease('859.999999 seconds'), '1 second', 'lease: its last microsecond is rounded up');
select is(pg_temp.lease('860 seconds'), '860 seconds', 'lease: at its end a full one again');
select is(pg_temp.lease('860.000001 seconds'), '860 seconds', 'lease: and after it');
select is(pg_temp.lease('30 days'), '860 seconds', 'lease: however long');
select is(pg_temp.lease('-5 seconds'), '865 seconds', 'lease: a clock set back delays by that step');
select is(pg_temp.lease('0', '1.5 seconds'), '2 seconds', 'lease: never shorter than it is');
select is(pg_temp.lease('2 seconds', '1.5 seconds'), '2 seconds', 'lease: used up neither');
select is(pg_temp.lease('1 day', '2 days'), '24 hours', 'lease: days are counted in seconds');
select is(pg_temp.lease(null), '860 seconds', 'lease: without a stamp a full one');

-- Dispatch: the table as rows, null is any. Of all combinations each is decided by the first row that it meets.

create table pg_temp.dispatch_rules (
  nth integer, has_message boolean, owner text, may_run boolean, is_fresh boolean, is_within_limit boolean,
  inline_ownership boolean, decision text
);
insert into pg_temp.dispatch_rules values
(1, true, null, null, null, null, null, 'queued'),
(2, null, 'receipt', null, null, null, null, 'running'),
(3, null, 'message', true, null, null, null, 'execute'),
(4, null, 'other', null, null, null, true, 'backstop'),
(5, null, null, true, true, true, null, 'execute'),
(6, null, null, null, null, null, null, 'enqueue');
create table pg_temp.dispatched as
select distinct on (c.*) c.*, r.nth, r.decision,
  baton._dispatch_decision(
    c.has_message, nullif(c.owner, 'none'), c.may_run, c.is_fresh, c.is_within_limit, c.inline_ownership
  ) as decided
from (
  select *
  from unnest(array[false, true]) as a (has_message), unnest(array['none', 'receipt', 'message', 'other']) as o (owner),
    unnest(array[false, true]) as b (may_run), unnest(array[false, true]) as f (is_fresh),
    unnest(array[false, true]) as l (is_within_limit), unnest(array[false, true]) as w (inline_ownership)
  where not f.is_fresh or o.owner = 'none'
) as c
inner join pg_temp.dispatch_rules as r
  on coalesce(r.has_message = c.has_message, true) and coalesce(r.owner = c.owner, true)
  and coalesce(r.may_run = c.may_run, true) and coalesce(r.is_fresh = c.is_fresh, true)
  and coalesce(r.is_within_limit = c.is_within_limit, true)
  and coalesce(r.inline_ownership = c.inline_ownership, true)
order by c.*, r.nth;
select is(count(*), 80::bigint, 'dispatch: all combinations') from pg_temp.dispatched;
select is(array_agg(distinct d.nth order by d.nth), '{1,2,3,4,5,6}'::integer[], 'dispatch: every row decides some of them')
from pg_temp.dispatched as d;
select is_empty('select * from pg_temp.dispatched as d where d.decided is distinct from d.decision', 'dispatch: by the first row that applies');

-- Starting

create table pg_temp.start_rules (nth integer, is_open boolean, status text, due text, owner text, decision text);
insert into pg_temp.start_rules values
(1, false, null, null, null, 'skip'),
(2, null, 'ended', null, null, 'skip'),
(3, null, 'unknown', null, null, 'skip'),
(4, null, 'created', 'ahead', null, 'await'),
(5, null, 'created', null, null, 'execute'),
(6, null, 'started', null, 'receipt', 'again'),
(7, null, 'started', null, 'other', 'await'),
(8, null, 'started', null, 'none', 'recover');
create table pg_temp.starts as
select distinct on (c.is_open, c.status, c.due, c.owner, c.word) c.*, r.nth, r.decision,
  baton._start_decision(
    c.is_open, c.word, timestamptz '2026-01-01 00:00:00+00' + c.ahead, nullif(c.owner, 'none'), '2026-01-01 00:00:00+00'
  ) as decided
from (
  select *
  from unnest(array[false, true]) as a (is_open),
    (
      values ('created', 'created'), ('started', 'started'), ('ended', 'completed'), ('ended', 'failed'),
        ('ended', 'skipped'), ('ended', 'cancelled'), ('unknown', null)
    ) as s (status, word),
    (
      values ('never', null), ('past', interval '-1 microsecond'), ('due', '0'), ('ahead', '1 microsecond')
    ) as t (due, ahead),
    unnest(array['none', 'receipt', 'other']) as o (owner)
) as c
inner join pg_temp.start_rules as r
  on coalesce(r.is_open = c.is_open, true) and coalesce(r.status = c.status, true)
  and coalesce(r.due = c.due, true) and coalesce(r.owner = c.owner, true)
order by c.is_open, c.status, c.due, c.owner, c.word, r.nth;
select is(count(*), 168::bigint, 'start: all combinations') from pg_temp.starts;
select is(array_agg(distinct s.nth order by s.nth), '{1,2,3,4,5,6,7,8}'::integer[], 'start: every row decides some of them')
from pg_temp.starts as s;
select is_empty('select * from pg_temp.starts as s where s.decided is distinct from s.decision', 'start: by the first row that applies');
select is(baton._start_decision(null, 'created', null, null, baton._now()), 'skip', 'start: an unknown run is skipped');
select is_empty(
  $$select s.status from unnest(array['pending', 'running', 'suspended', 'completed', 'failed', 'cancelled', null]) as s (status)
  where baton._is_open(s.status) is distinct from coalesce(s.status in ('pending', 'running', 'suspended'), false)$$,
  'open: a run that has not ended; an unknown one has'
);
select is(
  (
    select array_agg(p.proname::text order by p.proname)
    from pg_proc as p
    where p.pronamespace = 'baton'::regnamespace
      and p.proname in ('_backstop_key', '_dispatch_decision', '_lease_remaining', '_start_decision', '_task_key')
      and p.provolatile = 'i'
  ),
  array['_backstop_key', '_dispatch_decision', '_lease_remaining', '_start_decision', '_task_key'],
  'decisions: none reads a table or a clock'
);
select * from finish();
rollback;
