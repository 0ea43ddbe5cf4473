\ir _begin.sql
\ir _starts.sql
select plan(17);

select is(baton._purge_cron_runs(), 0, 'cron history: without pg_cron there is none');
\ir ../standin/cron.sql
select is(baton._purge_cron_runs(), 0, 'cron history: without a job of ours nothing is purged');
select baton.schedule() \g /dev/null
select cron.schedule('somebody', '* * * * *', 'select 1') as theirs \gset
select j.jobid as ours from cron.job as j where j.jobname = 'pg_baton tick' \gset
select is(baton._purge_cron_runs(), 0, 'cron history: with no runs there is nothing to purge');

create function baton_test.left_of(jobid bigint)
returns integer
language sql
stable
begin atomic
  select count(*)::integer from cron.job_run_details as r where r.jobid = left_of.jobid;
end;

-- 600 runs of ours, 400 of somebody else's
insert into cron.job_run_details (jobid, status, end_time)
select case when n.number % 5 < 3 then :ours else :theirs end, 'succeeded', now() from generate_series(1, 1000) as n (number);
select is(baton._purge_cron_runs(), 0, 'cron history: the newest 1,000 of all jobs stay');
insert into cron.job_run_details (jobid, status) values (:ours, 'connecting');
select is(baton._purge_cron_runs(), 1, 'cron history: with one more, the oldest goes');
select is((select min(r.runid) from cron.job_run_details as r), 2::bigint, 'cron history: that one');
insert into cron.job_run_details (jobid, status, start_time, end_time)
select :ours, 'connecting', null, null from generate_series(1, 1000) as n (number);
select is(baton_test.left_of(:ours), 1600, 'cron history: a thousand runs that never ended');
select is(baton._purge_cron_runs(), 600, 'cron history: all that are older go');
select is(baton_test.left_of(:theirs), 400, 'cron history: of another job none ever does');
insert into cron.job_run_details (jobid, status) select :ours, 'running' from generate_series(1, 1001) as n (number);
select is(baton._purge_cron_runs(), 1001, 'cron history: runs without an end too');
select is(
  (select count(*)::integer from cron.job_run_details as r where r.jobid = :ours and r.end_time is null), 1000,
  'cron history: the newest are kept'
);
select is(baton._purge_cron_runs(), 0, 'cron history: what was purged once is not searched again');

-- Another owner's job of the same name, and a tick
insert into cron.job (schedule, command, jobname, username) values ('* * * * *', 'x', 'pg_baton tick', 'somebody')
returning jobid as another \gset
insert into cron.job_run_details (jobid, status) values (:another, 'succeeded');
insert into cron.job_run_details (jobid, status) select :ours, 'succeeded' from generate_series(1, 2000) as n (number);
select is(
  (select t.changed::integer from baton.tick() as t where t.part = 'cron_runs'), 2000,
  'cron history: tick purges'
);
select is(baton_test.left_of(:another), 1, 'cron history: not those of another role''s job of that name');

-- Bounded, and when the numbers begin anew
insert into cron.job_run_details (jobid, status) select :ours, 'succeeded' from generate_series(1, 12000) as n (number);
select is(baton._purge_cron_runs(), 10000, 'cron history: at most 10,000 runs are looked at a tick');
truncate cron.job_run_details;
alter sequence cron.runid_seq restart;
insert into cron.job_run_details (jobid, status) select :ours, 'succeeded' from generate_series(1, 1100) as n (number);
select is(baton._purge_cron_runs(), 100, 'cron history: numbers that begin anew are purged anew');

-- unschedule
select baton.unschedule() \g /dev/null
select is(
  baton_test.left_of(:ours) || ' ' || (select count(*) from cron.job as j where j.jobname = 'somebody'), '0 1',
  'cron history: unschedule leaves nothing of ours'
);

select * from finish();
rollback;
