\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(53);

create function baton_test.told()
returns text
language sql
volatile
begin atomic
  select string_agg(h.severity, ' ') from baton.health() as h where h.finding = 'restored';
end;

-- The restored database is played by this one, under another identity
select is(baton_test.told(), null, 'health: where the package was installed nothing is to do');
select is(
  (select split_part(s.identity, '/', 1) from baton.state as s), (select c.system_identifier::text from pg_control_system() as c),
  'health: (which tells clusters apart)'
);
update baton.state set identity = 'another';
select is(baton_test.told(), 'warning', 'health: rows of another database are told');
select baton.tick() \g /dev/null
select is(baton_test.told(), 'warning', 'health: and no tick settles it');

-- In flight: users' messages, a replay, bodies, starts, workers
update baton.settings set transport = 'outbox', base_url = 'http://h', max_lapses = 1;
select baton.register_worker_function('p', start_mode => 'process'), baton.register_worker_function('h'),
  baton.register_worker_function('ready') \g /dev/null
select baton.ensure_workers() \g /dev/null
select f.invocation_id as inv from baton.worker_functions as f where f.function_name = 'h' \gset
select f.invocation_id as ready from baton.worker_functions as f where f.function_name = 'ready' \gset
select baton.accept_worker_invocation('ready', :'ready', baton_test.worker(3)) \g /dev/null
select baton.register_worker(baton_test.worker(n.n), 'p') from generate_series(1, 2) as n (n) \g /dev/null
select baton.stop_worker(baton_test.worker(2), draining => true) \g /dev/null
select m as am, d as ad from baton_test.hold('mail') \gset
select m as bm, d as bd, e as be from baton_test.made('b', 2) \gset
select m as cm, d as cd from baton_test.inline('c') \gset
select baton_test.queued('t', 2) \g /dev/null
select m as tm, d as td from baton_test.started('t') \gset
select baton_test.start('asleep') \g /dev/null
select m as sm, d as sd, e as se from baton_test.replay('asleep') \gset
select baton_test.finish('asleep', :se, baton._now() + interval '1 hour') \g /dev/null
select baton_test.queued('ended') \g /dev/null
select m as em, d as ed from baton_test.started('ended') \gset
select baton.cancel_run('ended', 'x'), baton.send('mail', '1', '1 hour') \g /dev/null
select baton_test.advance('10 seconds') \g /dev/null
select max(m.message_id) as last from baton.messages as m \gset
delete from baton.incidents;

select is((select a.outcome from baton.after_restore() as a), 'restored', 'restore: it says so');
select is(baton_test.told(), null, 'restore: health is content');

-- Old receipts
select is((select x.outcome from baton.ack(:am, :ad) as x), 'lost', 'receipts: ack');
select is((select x.outcome from baton.extend(:am, :ad) as x), 'lost', 'receipts: extend');
select is((select x.outcome from baton.park(:am, :ad) as x), 'lost', 'receipts: park');
select is((select x.outcome from baton.fail(:am, :ad, 'x') as x), 'lost', 'receipts: fail');
select is((select b.outcome from baton.begin_replay(:bm, :bd) as b), 'lost', 'receipts: begin_replay');
select is(baton_test.begin(:tm, :td), 'lost', 'receipts: start_task');
select is((select x.outcome from baton.extend(:em, :ed) as x), 'lost', 'receipts: of an ended run');
select is(baton_test.state(:am), '2026-01-01 00:00:10+00 free 0 0', 'receipts: a message is due at once, and nothing is counted');
select results_eq(
  $$select m.visible_at from baton.messages as m where m.queue_name = 'mail' order by m.message_id$$,
  $$values (timestamptz '2026-01-01 00:00:10+00'), ('2026-01-01 01:00:00+00')$$, 'receipts: one that is delayed stays so'
);
select is((select count(*) from baton.messages as m where m.claimed_at is not null), 0::bigint, 'receipts: no claim is left');

-- Replays
select is(
  baton_test.sqlstate_of(format('select baton.append_event(''b'', %s, ''x.y'')', :'be')), 'PB001', 'replays: the epoch is superseded'
);
select is((select e.outcome from baton.end_replay('b', :be, 1) as e), 'lost', 'replays: it ends nothing');
select is(baton_test.run('b'), 'running 2/0/0 wake', 'replays: a new one is asked for');
select is(baton_test.messages('b'), 'keyless 00:00:00', 'replays: by the message that is there');
select is((select r.lapses from baton.runs as r where r.run_id = 'b'), 0, 'replays: no lapse is counted');
select m as b2m, d as b2d, e as b2e from baton_test.replay('b') \gset
select is(baton_test.dispatch('b', :b2e, 1), 'execute s/0#1, enqueue s/1#0', 'replays: and goes on with the work');
select is(baton_test.run('asleep'), 'suspended 1/0/1', 'replays: who sleeps sleeps on');
select is(baton_test.messages('asleep'), 'timer 00:59:50', 'replays: to its time');

-- Bodies
select is(baton_test.task('c'), 'created 1 0/0 fence 1', 'bodies: an inline one is released, and that is no lapse');
select is(baton_test.complete('c', :cm, :cd), 'lost', 'bodies: its output is refused');
select is(baton_test.messages('c'), 'keyless 00:00:00', 'bodies: its run is due');
select m as c2m, d as c2d, e as c2e from baton_test.replay('c') \gset
select is(baton_test.dispatch('c', :c2e), 'execute s/0#2', 'bodies: and starts it anew');
select is(baton_test.complete('c', :c2m, :c2d, 2), 'completed ended', 'bodies: to its end');
select is(baton_test.task('t'), 'created 1 0/0 fence 1', 'bodies: a queued one is released');
select is(baton_test.complete('t', :tm, :td), 'lost', 'bodies: its output is refused');
select m as t2m, d as t2d, a as t2a from baton_test.started('t') \gset
select is(:t2a, 2, 'bodies: whoever claims its message starts it anew');
select is(baton_test.complete('t', :t2m, :t2d, 2), 'completed', 'bodies: to its end');
select is(baton_test.log('t'), 'task_started 0#1, task_released 0#1, task_started 0#2, task_completed 0#2', 'bodies: the log tells');
select is((select count(*) from baton.events as e where e.run_id = 'ended' and e.type = 'task_released'), 0::bigint, 'bodies: a run that has ended is left alone');

-- Starts and workers
select is(
  (select concat_ws(' ', f.invocation_status, f.invocation_error, f.failed_starts) from baton.worker_functions as f where f.function_name = 'h'),
  'failed expired 1', 'starts: what was pending has expired'
);
select is(
  (select r.outcome || ' ' || r.reason from baton.reconcile_worker_invocation('h', :'inv') as r), 'rejected expired',
  'starts: whoever comes with it is rejected'
);
select is(
  (select concat_ws(' ', f.invocation_status, f.failed_starts) from baton.worker_functions as f where f.function_name = 'ready'),
  'ready 0', 'starts: one that was ready stays so'
);
select is((select count(*) from baton.workers as w where w.stopped_at = baton._now()), 3::bigint, 'workers: all are stopped');
select is((select h.outcome from baton.heartbeat(baton_test.worker(1)) as h), 'stopped', 'workers: and are told');
select is((select w.stopping_at from baton.workers as w where w.worker_id = baton_test.worker(2)), timestamptz '2026-01-01', 'workers: when one began to stop stays');
select is((select count(*) from baton.claim('mail', baton_test.worker(1)) as c), 0::bigint, 'workers: they get nothing');
select baton_test.advance('1 minute') \g /dev/null
select is((select string_agg(e.function_name, ' ' order by e.function_name) from baton.ensure_workers() as e where e.outcome = 'reserved'), 'h ready', 'workers: new ones are started');
select is((select f.failed_starts from baton.worker_functions as f where f.function_name = 'ready'), 0, 'workers: that the old ones stopped was no crash');

-- Ids
select cmp_ok((select s.message_id from baton.send('ids', '1') as s), '>', :last + 1000000::bigint, 'ids: a million further');
select setval('baton.messages_message_id_seq', 80000000) \g /dev/null
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '1') as s), 81000001::bigint, 'ids: past those that were given out and are gone');
update baton.tasks set owner_message_id = 90000000 where run_id = 't' and task_index = 1;
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '2') as s), 91000001::bigint, 'ids: past every one that is stored: an owner');
update baton.runs set replay_message_id = 100000000 where run_id = 'asleep';
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '3') as s), 101000001::bigint, 'ids: a replay''s');
update baton.runs set wake_message_id = 102000000 where run_id = 'asleep';
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '3') as s), 103000001::bigint, 'ids: a wake''s');
select baton_test.hold('ids2') \g /dev/null
select baton._incident(baton._now(), 'lost', message_id => 110000000) \g /dev/null
select setval('baton.incidents_incident_id_seq', 1), setval('baton.tallies_tally_id_seq', 1) \g /dev/null
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '4') as s), 111000001::bigint, 'ids: an incident''s');
insert into baton.dead_messages (message_id, queue_name, failures, lapses, created_at, died_at, reason)
values (120000000, 'ids', 1, 0, baton._now(), baton._now(), 'final');
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '5') as s), 121000001::bigint, 'ids: a dead message''s');
select setval('baton.messages_message_id_seq', 5) \g /dev/null
select baton.after_restore() \g /dev/null
select is((select s.message_id from baton.send('ids', '6') as s), 122000002::bigint, 'ids: a live one''s, where the sequence was left behind');
select is((select max(i.detail ->> 'verb') from baton.incidents as i where i.kind = 'operator'), 'after_restore', 'restore: an incident tells of it');
select * from finish();
rollback;
