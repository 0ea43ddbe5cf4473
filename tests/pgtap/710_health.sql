\ir _begin.sql
\ir _starts.sql
select plan(77);

create function baton_test.health(finding text, subject text default null)
returns text
language sql
volatile
begin atomic
  select coalesce(string_agg(concat_ws(': ', h.severity, h.detail), '; ' order by h.subject), 'nothing')
  from baton.health() as h
  where h.finding = health.finding and (health.subject is null or h.subject = health.subject);
end;

-- The clock, without pg_cron
select is(baton_test.health('tick'), 'critical: tick() never ran', 'health: nothing has ticked yet');
select is(
  baton_test.health('cron_job'), 'warning: pg_cron is not in this database', 'health: nor is pg_cron there to do it'
);
select is(
  (select h.advice from baton.health() as h where h.finding = 'tick'),
  'call baton.tick() every few seconds', 'health: what to do about it'
);
select baton.tick() \g /dev/null
select is(baton_test.health('tick'), 'ok: last tick 00:00:00 ago', 'health: a tick');
select is(
  baton_test.health('cron_job'), 'ok: pg_cron is not in this database; something else ticks',
  'health: anything may call it'
);
select is((select h.advice from baton.health() as h where h.finding = 'tick'), null, 'health: then there is nothing to do');
select baton_test.advance('89.999999 seconds') \g /dev/null
select is(baton_test.health('tick'), 'ok: last tick 00:01:29 ago', 'health: a tick within 90 s is well');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.health('tick'), 'critical: last tick 00:01:30 ago', 'health: one 90 s ago is not');
select baton.tick() \g /dev/null
update baton.state set last_tick_errors = '{"responses": "permission denied", "queue_marks": "x"}';
select is(
  (select string_agg(concat_ws(' ', h.severity, h.subject, h.detail), '; ' order by h.subject)
    from baton.health() as h where h.finding = 'tick_part'),
  'warning queue_marks x; warning responses permission denied', 'health: parts of the tick that failed'
);
select baton.tick() \g /dev/null
select is(baton_test.health('tick_part'), 'nothing', 'health: until they don''t');

-- The outbox
select is(
  baton_test.health('transport'),
  'ok: requests wait in the queue baton.deliveries for a sender; pg_net is not in this database',
  'health: auto, and why it is the outbox'
);
update baton.settings set transport = 'outbox';
select is(
  baton_test.health('transport', 'outbox'), 'ok: requests wait in the queue baton.deliveries for a sender',
  'health: the outbox, as it is set'
);
select baton.register_worker_function('orders', url => 'http://w.test') \g /dev/null
select baton.ensure_workers() \g /dev/null
select baton_test.advance('10 seconds') \g /dev/null
select matches(baton_test.health('transport'), '^ok', 'health: a request may wait for ten seconds');
select baton_test.advance('1 microsecond') \g /dev/null
select is(
  baton_test.health('transport'), 'critical: a request has waited for 00:00:10', 'health: longer, and no sender is there'
);
select baton.claim_deliveries() \g /dev/null
select matches(baton_test.health('transport'), '^ok', 'health: until one takes it');
select baton.disable_worker_function('orders') \g /dev/null

-- pg_net
update baton.settings set transport = 'pg_net';
select is(
  baton_test.health('transport', 'pg_net'), 'critical: pg_net is not in this database', 'health: pg_net is wanted and is not there'
);
\ir ../standin/pg_net.sql
select is(
  baton_test.health('transport'), 'critical: pg_net''s worker is not running in this database', 'health: nor its worker'
);
select set_config('application_name', 'pg_net 0.20.4', true), pg_stat_clear_snapshot() \g /dev/null
select is(baton_test.health('transport'), 'ok: pg_net 0.20.4', 'health: with its worker it is well');
select set_config('pg_net.database_name', 'elsewhere', true) \g /dev/null
select is(
  baton_test.health('transport'), 'critical: pg_net works for database elsewhere, not for ' || current_database(),
  'health: unless that looks at another database'
);
select set_config('pg_net.database_name', current_database(), true) \g /dev/null
insert into pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
select pg_nextoid('pg_extension', 'oid', 'pg_extension_oid_index'), 'pg_net', r.oid, 'pg_catalog'::regnamespace, false, '0.14.0'
from pg_roles as r where r.rolname = current_user;
create function baton_test.versions(library text, extension text)
returns text
language plpgsql
as $$
begin
  perform set_config('application_name', 'pg_net ' || versions.library, true);
  perform pg_stat_clear_snapshot();
  update pg_extension as e set extversion = versions.extension where e.extname = 'pg_net';
  return baton_test.health('transport');
end;
$$;
select is(
  baton_test.versions(v.library, v.extension),
  case
    when v.fits then 'ok: pg_net ' || v.library
    else format('critical: pg_net %s is loaded with the SQL objects of %s: it sends nothing', v.library, v.extension)
  end, 'health: pg_net ' || v.library || ' with the objects of ' || v.extension
)
from (
  values
  ('0.20.4', '0.14.0', false), ('0.19.5', '0.8.0', false), ('0.19.0', '0.18.0', false), ('1.0.0', '0.14.0', false),
  ('0.14.0', '0.14.0', true), ('0.20.4', '0.19.5', true), ('0.20.4', '0.20.4', true), ('0.18.0', '0.14.0', true),
  ('0.20.4', '0.20.0', true), ('0.20.4', '1.0', true)
) as v (library, extension, fits);
select is(baton_test.versions('0.20.4', '0.20.4'), 'ok: pg_net 0.20.4', 'health: pg_net as it should be');
select net.http_get('http://elsewhere.test') as stuck \gset
select baton.tick() \g /dev/null
select baton_test.advance('1 minute') \g /dev/null
select baton.tick() \g /dev/null
select matches(baton_test.health('transport'), '^ok', 'health: a request may stand first in its queue for a minute');
select baton_test.advance('1 microsecond') \g /dev/null
select is(
  baton_test.health('transport'), format('critical: request %s has stood first in pg_net''s queue for 00:01:00', :stuck),
  'health: longer, and it is stuck'
);
delete from net.http_request_queue;
select net.http_get('http://elsewhere.test') \g /dev/null
select baton.tick() \g /dev/null
select matches(baton_test.health('transport'), '^ok', 'health: another request in its place, and it moves');
delete from net.http_request_queue;
select baton.tick() \g /dev/null
select baton_test.advance('1 hour') \g /dev/null
select matches(baton_test.health('transport'), '^ok', 'health: an empty queue is never stuck');

-- Functions
select baton.enable_worker_function('orders') \g /dev/null
select is(baton_test.health('url'), 'nothing', 'health: a function with a URL');
select baton.register_worker_function('nourl') \g /dev/null
select is(
  baton_test.health('url', 'nourl'), 'critical: neither the function''s url nor settings.base_url is set',
  'health: one without any'
);
update baton.settings set base_url = 'http://w.test';
select is(baton_test.health('url'), 'nothing', 'health: base_url is enough');
select baton.unregister_worker_function('nourl') \g /dev/null
select baton.register_worker_function('orders', secret_name => 'key') \g /dev/null
select is(
  baton_test.health('credential', 'orders'), 'critical: secret key is missing or empty in baton.secrets', 'health: a secret that is missing'
);
insert into baton.secrets (secret_name, secret) values ('key', e'S3CR3T\nmore');
select is(
  baton_test.health('credential', 'orders'), 'critical: secret key in baton.secrets has more than one line', 'health: one of two lines'
);
select is(
  (select count(*)::integer from baton.health() as h where h::text like '%S3CR3T%'), 0, 'health: which is not shown'
);
update baton.secrets set secret = 'S3CR3T';
select is(baton_test.health('credential'), 'nothing', 'health: a good one');
delete from baton.secrets;
update baton.settings set transport = 'outbox';
select is(baton_test.health('credential'), 'nothing', 'health: over the outbox the sender has the secrets');

select is(baton_test.health('unprotected'), 'nothing', 'health: no worker is no unprotected one');
select baton_test.start('orders', baton_test.worker(1)) \g /dev/null
select is(baton_test.health('unprotected'), 'nothing', 'health: nor is one of the handshake');
select baton.register_worker(baton_test.worker(2), 'orders') \g /dev/null
select is(
  baton_test.health('unprotected', 'orders'), 'warning: a healthy worker came without the handshake', 'health: an old runtime is'
);
select baton_test.advance('15 seconds') \g /dev/null
select is(baton_test.health('unprotected'), 'nothing', 'health: while it is healthy');

select baton.register_worker_function('lost', url => 'http://w.test', pending_timeout => '10 seconds') \g /dev/null
select is(baton_test.reserve_when_possible('lost'), interval '0', 'health: (a first start)');
select is(baton_test.health('pending', 'lost'), 'nothing', 'health: a start that is pending');
select baton_test.advance('4.999999 seconds') \g /dev/null
select is(baton_test.health('pending', 'lost'), 'nothing', 'health: for less than half of its time');
select baton_test.advance('1 microsecond') \g /dev/null
select is(
  baton_test.health('pending', 'lost'), 'warning: a start has been pending for 00:00:05', 'health: or for longer'
);
select baton_test.accept('lost', baton_test.invocation('lost'), baton_test.worker(3)) \g /dev/null
select is(baton_test.health('pending', 'lost'), 'nothing', 'health: until its worker is there');
select baton.stop_worker(baton_test.worker(3)) \g /dev/null
select baton_test.reserve_when_possible('lost') from generate_series(1, 3) \g /dev/null
select is(baton_test.failed_starts('lost'), 2, 'health: two starts in a row failed');
select is(baton_test.health('failing', 'lost'), 'nothing', 'health: which may happen');
select baton.dismiss_worker_invocation('lost', baton_test.invocation('lost'), 'no memory') \g /dev/null
select is(
  baton_test.health('failing', 'lost'), 'critical: 3 starts in a row failed, last: dismissed: no memory', 'health: the third'
);
select baton_test.reserve_when_possible('lost') \g /dev/null
select baton_test.advance('10 seconds') \g /dev/null
select matches(
  baton_test.health('failing', 'lost'), '^critical: 4 starts in a row failed', 'health: one that has expired counts before it is booked'
);
savepoint failing;
select baton_test.reserve_when_possible('lost') \g /dev/null
select baton_test.accept('lost', baton_test.invocation('lost'), baton_test.worker(4)) \g /dev/null
select is(baton_test.health('failing', 'lost'), 'nothing', 'health: a worker that is there ends it');
rollback to failing;
select baton.enable_worker_function('lost') \g /dev/null
select is(baton_test.health('failing', 'lost'), 'nothing', 'health: enabling clears it');

select is(baton_test.health('locked'), 'nothing', 'health: no row is held');
select baton._note_locked('lost', baton._now()) \g /dev/null
select is(
  baton_test.health('locked', 'lost'), 'warning: a transaction held the function''s row while it was to be started',
  'health: one was held'
);
select baton_test.advance('4 minutes 59.999999 seconds') \g /dev/null
select matches(baton_test.health('locked'), '^warning', 'health: within five minutes');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.health('locked'), 'nothing', 'health: no longer');
select baton._note_locked('lost', baton._now()) from generate_series(1, 3) \g /dev/null
select is(baton_test.incidents('function_locked', 'lost'), 2::bigint, 'health: a row that stays held is one incident a pending timeout');

-- Only what should be started
select baton._note_locked('lost', baton._now()) \g /dev/null
select baton.register_worker_function('lost', secret_name => 'none') \g /dev/null
update baton.settings set transport = 'pg_net', base_url = null;
select isnt(baton_test.health('credential', 'lost'), 'nothing', 'health: a function with faults');
select baton.register_worker_function('lost', start_mode => 'process') \g /dev/null
select is_empty($$select h.finding from baton.health() as h where h.subject = 'lost'$$, 'health: nothing is asked of a process function');
select baton.register_worker_function('lost', start_mode => 'http') \g /dev/null
select baton.disable_worker_function('lost') \g /dev/null
select is_empty($$select h.finding from baton.health() as h where h.subject = 'lost'$$, 'health: nor of a disabled one');

-- pg_cron
\ir ../standin/cron.sql
select set_config('application_name', 'psql', true), pg_stat_clear_snapshot() \g /dev/null
delete from pg_extension where extname = 'pg_net';
update baton.settings set transport = 'outbox';
select baton.tick() \g /dev/null
select is(baton_test.health('cron_job'), 'ok: pg_cron has no job of schedule(); something else ticks', 'health: no job');
select baton_test.advance('1 hour') \g /dev/null
select is(baton_test.health('cron_job'), 'warning: pg_cron has no job of schedule()', 'health: and nothing else ticks');
select is(
  (select h.advice from baton.health() as h where h.finding = 'tick'), 'select * from baton.schedule()',
  'health: what to do about it with pg_cron'
);
select baton.schedule() \g /dev/null
select is(
  (select h.advice from baton.health() as h where h.finding = 'tick'),
  'its job begins within a minute of schedule(); if it does not, see the finding cron_job',
  'health: and when that is done'
);
select j.jobid as job from cron.job as j \gset
create function baton_test.with_scheduler(running boolean)
returns text
language plpgsql
as $$
begin
  perform set_config('application_name', case when with_scheduler.running then 'pg_cron scheduler' else 'psql' end, true);
  perform pg_stat_clear_snapshot();
  return baton_test.health('cron_job');
end;
$$;
select is(baton_test.with_scheduler(true), 'ok: no run yet', 'health: a job');
select is(
  baton_test.with_scheduler(false),
  case
    when current_setting('shared_preload_libraries') ~ '\mpg_cron\M' then 'ok: no run yet'
    else 'critical: the scheduler of pg_cron is not running'
  end, 'health: and a scheduler that runs it'
);
insert into cron.job_run_details (jobid, status, return_message) values (:job, 'succeeded', '1 row'), (:job, 'running', null);
select is(baton_test.with_scheduler(true), 'ok: last run: 1 row', 'health: its last run that ended');
insert into cron.job_run_details (jobid, status, return_message) values (:job, 'failed', 'connection failed');
select is(baton_test.with_scheduler(true), 'critical: the last run failed: connection failed', 'health: which failed');
insert into cron.job_run_details (jobid, status, return_message) values (:job + 1, 'succeeded', 'another job');
select is(
  baton_test.with_scheduler(true), 'critical: the last run failed: connection failed', 'health: whatever other jobs do'
);
insert into cron.job_run_details (jobid, status, return_message) values (:job, 'succeeded', '1 row');
select is(baton_test.with_scheduler(true), 'ok: last run: 1 row', 'health: it is well again');
select cron.alter_job(:job, active => false) \g /dev/null
select is(baton_test.with_scheduler(true), 'critical: the job is not active', 'health: the job was set inactive');

-- The order
select is(
  (select string_agg(h.severity, ' ' order by h.nth) from (
    select q.severity, row_number() over () as nth from (select r.severity from baton.health() as r) as q
  ) as h),
  (select string_agg(h.severity, ' ' order by array_position(array['critical', 'warning', 'ok'], h.severity)) from baton.health() as h),
  'health: the worst comes first'
);

select * from finish();
rollback;
