\ir _begin.sql
\ir _starts.sql
select plan(50);

create function baton_test.scheduled(tick_every interval default '5 seconds')
returns text
language sql
volatile
begin atomic
  select s.outcome from baton.schedule(scheduled.tick_every) as s;
end;

-- Without pg_cron
select results_eq(
  'select s.outcome, s.detail from baton.schedule() as s',
  $$values ('unavailable', 'pg_cron is not in this database: call baton.tick() every few seconds by other means')$$,
  'schedule: without pg_cron it says so, and what to do'
);
select results_eq(
  'select u.outcome, u.detail from baton.unschedule() as u', $$values ('unavailable', 'pg_cron is not in this database')$$,
  'unschedule: without pg_cron it says so'
);
select is(
  baton_test.raised(format('select baton.schedule(%L)', i.every)), i.raised, 'schedule: ' || i.every || ' ' || i.what
)
from (
  values
  ('0', '22023 invalid_schedule', 'is refused'), ('-5 seconds', '22023 invalid_schedule', 'is refused'),
  ('0.5 seconds', '22023 invalid_schedule', 'is refused'), ('1.5 seconds', '22023 invalid_schedule', 'is refused'),
  ('61 seconds', '22023 invalid_schedule', 'is refused'), ('2 minutes', '22023 invalid_schedule', 'is refused'),
  ('1 day', '22023 invalid_schedule', 'is refused'), ('10 years', '22023 invalid_schedule', 'is refused'),
  ('1 second', 'nothing', 'is taken'), ('59 seconds', 'nothing', 'is taken'), ('1 minute', 'nothing', 'is taken')
) as i (every, raised, what);

-- pg_cron with seconds
\ir ../standin/cron.sql
create function baton_test.job()
returns text
language sql
volatile
begin atomic
  select string_agg(concat_ws(' | ', j.schedule, j.command, case when not j.active then 'inactive' end), e'\n' order by j.jobid)
  from cron.job as j;
end;
select results_eq(
  'select s.outcome, s.detail from baton.schedule() as s',
  $$values ('scheduled', 'pg_cron 1.6 job 1: 5 seconds: select * from baton.tick()')$$, 'schedule: every 5 seconds by default'
);
select is(baton_test.job(), '5 seconds | select * from baton.tick()', 'schedule: one job, that ticks');
select is(
  (select concat_ws(' | ', j.jobname, j.username, j.database) from cron.job as j),
  concat_ws(' | ', 'pg_baton tick', current_user, current_database()), 'schedule: of the owner, in this database'
);
select is(
  concat_ws(' | ', baton_test.scheduled(i.every), baton_test.job()),
  concat_ws(' | ', 'scheduled', i.schedule, 'select * from baton.tick()'),
  'schedule: ' || coalesce(i.every::text, 'null') || ' is ' || i.schedule
)
from (
  values
  (1, interval '1 second', '1 seconds'), (2, interval '59 seconds', '59 seconds'), (3, interval '1 minute', '* * * * *'),
  (4, interval '60 seconds', '* * * * *'), (5, null, '5 seconds')
) as i (nth, every, schedule)
order by i.nth;
select is((select max(j.jobid) from cron.job as j), 1::bigint, 'schedule: again and again it is the same job');

-- A job that was set inactive
select cron.alter_job(1, active => false) \g /dev/null
select is(baton_test.scheduled(), 'scheduled', 'schedule: when the job is inactive');
select is(baton_test.job(), '5 seconds | select * from baton.tick()', 'schedule: it ticks again');
select ok(
  (select j.active and j.jobid > 1 from cron.job as j), 'schedule: as a new job, since scheduling does not activate one'
);

-- prune
update baton.settings set retention = '30 days';
select matches(
  (select s.detail from baton.schedule() as s),
  '^pg_cron 1.6 job \d+: 5 seconds: select \* from baton.tick\(\); job \d+: prune every minute$',
  'schedule: with a retention there is a second job'
);
select results_eq(
  'select j.schedule, j.command from cron.job as j where j.jobname = ''pg_baton prune''',
  $$values ('* * * * *', 'select p.* from baton.settings as s cross join lateral baton.prune(s.retention, 10000) as p where s.retention is not null')$$,
  'schedule: which prunes by it, every minute'
);
select baton_test.scheduled() \g /dev/null
select is((select count(*) from cron.job as j), 2::bigint, 'schedule: again it is the same one');
select baton.start_run('w', '1', 'r'), baton.cancel_run('r', 'x'), baton_test.advance('30 days') \g /dev/null
select j.command from cron.job as j where j.jobname = 'pg_baton prune' \gset
:command \g /dev/null
select is((select count(*) from baton.runs), 0::bigint, 'schedule: (its command removes a run of that age)');
update baton.settings set retention = null;
select is_empty(:'command', 'schedule: a retention of null stops it at once');
select baton_test.scheduled() \g /dev/null
select is(baton_test.job(), '5 seconds | select * from baton.tick()', 'schedule: and takes the job away at the next call');
update baton.settings set retention = '30 days';
select baton_test.scheduled() \g /dev/null

-- unschedule
select cron.schedule('somebody', '* * * * *', 'select 1') \g /dev/null
insert into cron.job (schedule, command, jobname, username) values ('* * * * *', 'another''s', 'pg_baton tick', 'somebody');
insert into cron.job (schedule, command, jobname, username, database)
values ('* * * * *', 'elsewhere', 'pg_baton tick', current_user || '2', 'elsewhere');
select results_eq(
  'select u.outcome, u.detail from baton.unschedule() as u', $$values ('unscheduled', '2 jobs removed')$$,
  'unschedule: takes both jobs away'
);
select is(
  (select string_agg(j.command, ', ' order by j.jobid) from cron.job as j), 'select 1, another''s, elsewhere',
  'unschedule: and no other'
);
select results_eq(
  'select u.outcome, u.detail from baton.unschedule() as u', $$values ('unscheduled', '0 jobs removed')$$,
  'unschedule: where there is none it is no error'
);
delete from cron.job;

-- pg_cron whose schema the owner may not use
create role baton_test_owner;
grant usage on schema baton, tap to baton_test_owner;
grant execute on all functions in schema baton to baton_test_owner;
revoke usage on schema cron from public;
set local role baton_test_owner;
select tap.is(baton._cron_version(), null, 'schedule: pg_cron without USAGE on its schema can''t be used');
select tap.is(
  baton._schema_problem('pg_cron', 'cron'), 'pg_cron can''t be used: role baton_test_owner has no USAGE on schema cron',
  'schedule: and that is told'
);
reset role;

update baton.settings set retention = null;

-- pg_cron without seconds
create or replace function baton._cron_version()
returns text
language sql
stable
begin atomic
  select '1.4-1';
end;
select results_eq(
  'select s.outcome, s.detail from baton.schedule() as s',
  format(
    $$values ('scheduled', 'pg_cron 1.4-1 job %s: * * * * *: call baton._tick_for_a_minute(''00:00:05'')')$$,
    (select last_value + 1 from cron.jobid_seq)
  ), 'schedule: pg_cron 1.4 knows no seconds'
);
select is(
  baton_test.job(), '* * * * * | call baton._tick_for_a_minute(''00:00:05'')',
  'schedule: there one job a minute ticks at the interval'
);
select baton_test.scheduled('20 seconds') \g /dev/null
select is(
  baton_test.job(), '* * * * * | call baton._tick_for_a_minute(''00:00:20'')', 'schedule: another interval, the same job'
);
select baton_test.scheduled('1 minute') \g /dev/null
select is(baton_test.job(), '* * * * * | select * from baton.tick()', 'schedule: a minute needs no procedure');

select is(baton._cron_knows_seconds(v.version), v.knows, 'schedule: pg_cron ' || v.version || case when v.knows then ' has seconds' else ' has none' end)
from (
  values
  ('1.3', false), ('1.4', false), ('1.4-1', false), ('1.4.2', false), ('1.5', true), ('1.5.2', true), ('1.6', true),
  ('1.6.4', true), ('1.10', true), ('2.0', true)
) as v (version, knows);

select * from finish();
rollback;
