\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(152);

-- Not started: execute up to the limit, the others are sent

select m as am, d as ad, e as ae from baton_test.made('a', 4) \gset
select results_eq(
  format('select * from baton.dispatch_tasks(''a'', %s, 2)', :ae),
  $$values ('execute', 's', 0, 1, '0'::jsonb, null::interval), ('execute', 's', 1, 1, '1', null),
    ('enqueue', 's', 2, 0, null, '0'), ('enqueue', 's', 3, 0, null, '0')$$,
  'fresh: as many as the limit says are run here, the others sent'
);
select results_eq(
  $$select t.task_index, t.status, t.attempt, t.lapses, t.owner_message_id, t.owner_delivery, t.last_started_at
    from baton.tasks as t where t.run_id = 'a' order by 1$$,
  format(
    $$values (0, 'started', 1, 0, %1$s::bigint, %2$s::bigint, baton._now()), (1, 'started', 1, 0, %1$s, %2$s, baton._now()),
      (2, 'created', 0, 0, null, null, null), (3, 'created', 0, 0, null, null, null)$$, :am, :ad
  ),
  'fresh: a start stamps the receipt'
);
select results_eq(
  $$select e.seq, e.type, e.payload from baton.read_events('a', 2) as e$$,
  format(
    $$select 2 + t.nth, 'task_started', jsonb_build_object('step_slug', 's', 'task_index', t.nth - 1, 'attempt', 1,
      'message_id', %s, 'delivery', %s) from generate_series(1::bigint, 2) as t (nth)$$, :am, :ad
  ),
  'fresh: with an event each'
);
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed, s/2 00:00:00, s/3 00:00:00', 'fresh: messages, due at once');
select results_eq(
  $$select m.kind, m.queue_name, m.run_id, m.step_slug, m.task_index, m.payload from baton.messages as m where m.kind = 'task' order by 5$$,
  $$values ('task', 'a', 'a', 's', 2, null::jsonb), ('task', 'a', 'a', 's', 3, null)$$, 'fresh: that say what they are for'
);
select is(baton_test.run('a'), 'running 4/0/0 held', 'fresh: a start asks for no replay');

-- Again under the same receipt

select is(
  baton_test.dispatch('a', :ae, 2), 'running s/0#1, running s/1#1, queued s/2#0, queued s/3#0', 'again: nothing is started twice'
);
select is(
  (select string_agg(t.input::text, ',') from baton.dispatch_tasks('a', :ae, 2) as t where t.outcome = 'running'), '0,1',
  'again: with the inputs, for a caller that lost the answer'
);
select is(
  baton_test.dispatch('a', :ae, 100), 'running s/0#1, running s/1#1, queued s/2#0, queued s/3#0', 'again: what has a message is not run here, whatever the limit'
);
select is(baton_test.run('a') || baton_test.messages('a'), 'running 4/0/0 heldkeyless 00:00:30 claimed, s/2 00:00:00, s/3 00:00:00', 'again: and nothing is written');
select is(baton_test.complete('a', :am, :ad), 'completed', 'again: one body ends');
select baton_test.step('a', :ae, 't', 3) \g /dev/null
select is(
  baton_test.dispatch('a', :ae, 2),
  'running s/1#1, queued s/2#0, queued s/3#0, execute t/0#1, enqueue t/1#0, enqueue t/2#0',
  'again: what runs here counts for the limit, finished bodies don''t'
);
select is(baton_test.dispatch('a', :ae, 0), 'running s/1#1, queued s/2#0, queued s/3#0, running t/0#1, queued t/1#0, queued t/2#0', 'again: a lower limit stops nothing');

-- The limit

select m as lm, d as ld, e as le from baton_test.made('l', 2) \gset
select is(baton_test.dispatch('l', :le, 0), 'enqueue s/0#0, enqueue s/1#0', 'limit: none');
select m as l1m, d as l1d, e as l1e from baton_test.made('l1', 2) \gset
select is(baton_test.dispatch('l1', :l1e), 'execute s/0#1, enqueue s/1#0', 'limit: one by default');
select m as l2m, d as l2d, e as l2e from baton_test.made('l2', 2) \gset
select is(baton_test.dispatch('l2', :l2e, null), 'execute s/0#1, enqueue s/1#0', 'limit: null is the default');
select is(baton_test.sqlstate_of(format('select * from baton.dispatch_tasks(''l2'', %s, -1)', :l2e)), '22023', 'limit: never negative');
select m as l3m, d as l3d, e as l3e from baton_test.made('l3', 1) \gset
select baton_test.step('l3', :l3e, 'b', 1), baton_test.step('l3', :l3e, 'a', 1) \g /dev/null
select is(baton_test.dispatch('l3', :l3e, 2), 'execute s/0#1, execute b/0#1, enqueue a/0#0', 'limit: in the order in which the steps were created');
select m as l4m, d as l4d, e as l4e from baton_test.made('l4', 12) \gset
select is(
  (select array_agg(t.task_index) from baton.dispatch_tasks('l4', :l4e, 11) as t where t.outcome = 'execute'), '{0,1,2,3,4,5,6,7,8,9,10}'::integer[],
  'limit: tasks by number'
);

-- Redelivered: started by this message, under an earlier delivery

select m as rm, d as rd from baton_test.inline('r') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as r2m, d as r2d, e as r2e from baton_test.replay('r') \gset
select is(:r2m::bigint, :rm::bigint, 'owned recovery: a dead owner''s message comes back by itself');
select is(baton_test.dispatch('r', :r2e), 'execute s/0#2', 'owned recovery: whoever holds it runs the body anew');
select is(baton_test.task('r'), 'started 2 0/1 under run', 'owned recovery: stamped anew, a lapse');
select results_eq(
  $$select t.owner_delivery, t.last_started_at from baton.tasks as t where t.run_id = 'r'$$,
  format('select %s::bigint, baton._now()', :r2d), 'owned recovery: under the new delivery'
);
select is(baton_test.incidents_of('r'), 'owned_recovery', 'owned recovery: an incident tells');
select is((select i.detail ->> 'attempt' from baton.incidents as i where i.run_id = 'r'), '1', 'owned recovery: which attempt was lost');
select is(baton_test.log('r'), 'task_started 0#1, task_started 0#2', 'owned recovery: and an event');
select is(baton_test.dispatch('r', :r2e), 'running s/0#2', 'owned recovery: once');
select is(baton_test.dispatch('r', :r2e, 0), 'running s/0#2', 'owned recovery: it runs here now');
select m as rlm, d as rld from baton_test.inline('rl') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as rl2m, d as rl2d, e as rl2e from baton_test.replay('rl') \gset
select baton_test.step('rl', :rl2e, 't', 2) \g /dev/null
select is(baton_test.dispatch('rl', :rl2e, 1), 'execute s/0#2, enqueue t/0#0, enqueue t/1#0', 'owned recovery: comes before the limit, and counts for it');
select is((select outcome from baton.extend(:rlm, :rld)), 'lost', 'owned recovery: the earlier delivery is lost');

-- Started by another message

select m as om, d as od from baton_test.inline('o') \gset
select baton_test.advance('10 seconds') \g /dev/null
select m as o2m, d as o2d, e as o2e from baton_test.again('o', '1 hour') \gset
select is(baton_test.dispatch('o', :o2e), 'backstop s/0#1 00:14:10', 'backstop: another message owns it and lives: for the rest of its lease');
select is(baton_test.messages('o'), 'keyless 00:00:20 claimed, keyless 01:00:00 claimed, s/0/backstop/1 00:14:10', 'backstop: a delayed run message');
select is((select m.kind from baton.messages as m where m.dedupe_key like '%backstop%'), 'run', 'backstop: of the kind run');
select is(baton_test.dispatch('o', :o2e), 'backstop s/0#1 00:14:10', 'backstop: again');
select is(baton_test.task('o'), 'started 1 0/0 under run', 'backstop: nothing is done to the task');
select is(
  (select count(*) from generate_series(1, 20) as i, lateral baton_test.dispatch('o', :o2e)), 20::bigint, 'backstop: twenty wakes'
);
select is(baton_test.messages('o'), 'keyless 00:00:20 claimed, keyless 01:00:00 claimed, s/0/backstop/1 00:14:10', 'backstop: of one attempt share one');
select baton_test.advance('19.999999 seconds') \g /dev/null
select is(baton_test.dispatch('o', :o2e), 'backstop s/0#1 00:13:51', 'backstop: a microsecond before the owner''s claim runs out');
select is(baton_test.messages('o'), 'keyless 00:00:00.000001 claimed, keyless 00:59:40.000001 claimed, s/0/backstop/1 00:13:50.000001', 'backstop: which stays as it was');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.dispatch('o', :o2e), 'enqueue s/0#1', 'other: at its deadline it is sent');
select is(baton_test.messages('o'), 'keyless 00:00:00 claimed, keyless 00:59:40 claimed, s/0/backstop/1 00:13:50, s/0 00:00:00', 'other: a message of its own');
select is(baton_test.task('o'), 'started 1 0/0 under run', 'other: whoever starts that will take the task over');
select is((select outcome from baton.extend(:om, :od, '1 minute')), 'extended', 'other: its owner may still extend');
select is(baton_test.dispatch('o', :o2e), 'queued s/0#1', 'other: it has a message, so the owner matters no more');
select m as o3m, d as o3d from baton_test.take_task('o') \gset
select is(baton_test.dispatch('o', :o2e), 'queued s/0#1', 'other: also while that is claimed');

-- Another message that is lost, spent, or at work under a new delivery, owns nothing that lives

select m as xm, d as xd from baton_test.inline('x') \gset
delete from baton.messages where message_id = :xm;
select m as x2m, d as x2d, e as x2e from baton_test.again('x') \gset
select is(baton_test.dispatch('x', :x2e), 'enqueue s/0#1', 'other: the owner''s message was purged');
select m as x3m, d as x3d from baton_test.inline('x3') \gset
update baton.messages set claimed_at = null, visible_at = baton._now() + interval '1 hour' where message_id = :x3m;
select m as x4m, d as x4d, e as x4e from baton_test.again('x3') \gset
select is(baton_test.dispatch('x3', :x4e), 'enqueue s/0#1', 'other: its receipt was spent');
select m as x5m, d as x5d from baton_test.inline('x5') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as x6m, d as x6d from baton_test.take('x5', '1 hour') \gset
select m as x7m, d as x7d, e as x7e from baton_test.again('x5') \gset
select is(baton_test.dispatch('x5', :x7e), 'enqueue s/0#1', 'other: the owner''s message is out under a new delivery');

-- The task's own message was purged after it was started

select baton_test.queued('p') \g /dev/null
select m as pm, d as pd, a as pa from baton_test.started('p') \gset
delete from baton.messages where message_id = :pm;
select m as p2m, d as p2d, e as p2e from baton_test.again('p') \gset
select is(baton_test.dispatch('p', :p2e), 'enqueue s/0#1', 'purged: it is sent anew, not run here');

-- A retry is the queue's for good

select m as tm, d as td from baton_test.inline('t') \gset
select is(baton_test.fail('t', :tm, :td), 'retrying 00:00:10', 'retry: a body fails');
select is(baton_test.messages('t'), 'keyless 00:00:30 claimed, s/0 00:00:10', 'retry: its message is sent');
delete from baton.messages where dedupe_key is not null and run_id = 't';
select replay_epoch as te from baton.begin_replay(:tm, :td) \gset
select is(baton_test.dispatch('t', :te), 'enqueue s/0#1 00:00:10', 'retry: purged, it is sent again, for the same time');
select is(baton_test.messages('t'), 'keyless 00:00:30 claimed, s/0 00:00:10', 'retry: not run here, before its time');
delete from baton.messages where dedupe_key is not null and run_id = 't';
select baton_test.advance('10 seconds') \g /dev/null
select is(baton_test.dispatch('t', :te), 'enqueue s/0#1', 'retry: nor after it');
delete from baton.messages where dedupe_key is not null and run_id = 't';
select baton_test.advance('1 second') \g /dev/null
select is(baton_test.dispatch('t', :te), 'enqueue s/0#1', 'retry: nor long after it');
select is(baton_test.messages('t'), 'keyless 00:00:19 claimed, s/0 00:00:00', 'retry: due at once then, not in the past');

-- Released: run anew, here or elsewhere

select m as um, d as ud, e as ue from baton_test.made('u') \gset
select baton_test.dispatch('u', :ue) \g /dev/null
select baton_test.release('u') \g /dev/null
select is(baton_test.dispatch('u', :ue), 'queued s/0#1', 'released: it has its message');
delete from baton.messages where dedupe_key is not null and run_id = 'u';
select is(baton_test.dispatch('u', :ue), 'execute s/0#2', 'released: without it, it is run here: no failure holds it');
select is(baton_test.task('u'), 'started 2 0/0 fence 1 under run', 'released: as a first start, no lapse');

-- A worker that stops or is deprecated starts nothing inline

select baton_test.worker(1) as w1, baton_test.worker(2) as w2, baton_test.worker(3) as w3 \gset
select baton.register_worker_function('f', start_mode => 'process') \g /dev/null
select baton.register_worker(:'w1', 'f'), baton.register_worker(:'w2', 'f'), baton.register_worker(:'w3', 'f') \g /dev/null
select m as wm, d as wd, e as we from baton_test.made('w', worker_id => :'w1') \gset
select baton.stop_worker(:'w1', draining => true) \g /dev/null
select is(baton_test.dispatch('w', :we), 'enqueue s/0#0', 'worker: a draining one');
select m as w2m, d as w2d, e as w2e from baton_test.made('w2', worker_id => :'w2') \gset
select m as w3m, d as w3d, e as w3e from baton_test.made('w3', worker_id => :'w3') \gset
select is(baton_test.dispatch('w2', :w2e), 'execute s/0#1', 'worker: one that goes on');
select is((select t.worker_id from baton.tasks as t where t.run_id = 'w2'), :'w2'::uuid, 'worker: the task says who runs it');
select m as w4m, d as w4d from baton_test.inline('w4') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as w4m, d as w4d, e as w4e from baton_test.replay('w4', worker_id => :'w2') \gset
select baton.deprecate_workers('f') \g /dev/null
select is(baton_test.dispatch('w3', :w3e), 'lost', 'worker: (its claim has run out)');
select m as w3m, d as w3d, e as w3e from baton_test.replay('w3') \gset
update baton.messages set claimed_by = :'w3' where message_id = :w3m;
select is(baton_test.dispatch('w3', :w3e), 'enqueue s/0#0', 'worker: a deprecated one');
select is(baton_test.dispatch('w4', :w4e), 'enqueue s/0#1', 'worker: nor does it recover what it owned');
select m as w5m, d as w5d, e as w5e from baton_test.made('w5') \gset
update baton.messages set claimed_by = baton_test.worker(9) where message_id = :w5m;
select is(baton_test.dispatch('w5', :w5e), 'enqueue s/0#0', 'worker: one that is not there any more had stopped');
select baton.stop_worker(:'w2') \g /dev/null
select m as w6m, d as w6d, e as w6e from baton_test.made('w6') \gset
update baton.messages set claimed_by = :'w2' where message_id = :w6m;
select is(baton_test.dispatch('w6', :w6e), 'enqueue s/0#0', 'worker: a stopped one');

-- Ownership switched off

select m as nm, d as nd from baton_test.inline('n') \gset
select m as n2m, d as n2d, e as n2e from baton_test.again('n') \gset
update baton.settings set inline_ownership = false;
select is(baton_test.dispatch('n', :n2e), 'enqueue s/0#1', 'off: what another owns is sent beside it');
select is(baton_test.messages('n'), 'keyless 00:00:30 claimed, keyless 00:00:30 claimed, s/0 00:00:00', 'off: no backstop');
select m as n3m, d as n3d from baton_test.take_task('n') \gset
select is(baton_test.begin(:n3m, :n3d), 'await 00:00:30', 'off: single flight still holds');
select is(baton_test.finish('n', :n2e), 'ended running', 'off: the replay ends');
select replay_epoch as n4e from baton.begin_replay(:nm, :nd) \gset
select is(baton_test.dispatch('n', :n4e), 'queued s/0#1', 'off: for it too the message comes first');
select is(baton_test.finish('n', :n4e), 'ended running', 'off: it ends its replay');
select isnt(baton_test.state(:nm), null, 'off: and keeps its message: it owns the task, though that has one of its own');
select m as n5m, d as n5d, e as n5e from baton_test.made('n5') \gset
select is(baton_test.dispatch('n5', :n5e), 'execute s/0#1', 'off: stamping goes on');
select is(baton_test.task('n5'), 'started 1 0/0 under run', 'off: as ever');
select is(baton_test.dispatch('n5', :n5e), 'running s/0#1', 'off: and counts for its receipt');
update baton.settings set inline_ownership = true;

-- Lost and terminal

select m as ym, d as yd, e as ye from baton_test.made('y') \gset
select baton_test.advance('29.999999 seconds') \g /dev/null
select is(baton_test.dispatch('y', :ye, 0), 'enqueue s/0#0', 'lost: a microsecond before its claim runs out it dispatches');
delete from baton.messages where dedupe_key is not null and run_id = 'y';
select baton_test.advance('1 microsecond') \g /dev/null
select results_eq(
  format('select * from baton.dispatch_tasks(''y'', %s)', :ye),
  $$values ('lost', null::text, null::integer, null::integer, null::jsonb, null::interval)$$, 'lost: at its end no more'
);
select is(baton_test.messages('y'), 'keyless 00:00:00 claimed', 'lost: the message is left alone');
select outcome from baton.extend(:ym, :yd) \g /dev/null
select is(baton_test.dispatch('y', :ye), 'execute s/0#1', 'lost: who extends may go on');
select is(baton_test.incidents_of('y'), null, 'lost: that is no incident');
select baton_test.advance('30 seconds') \g /dev/null
select baton_test.take('y') \g /dev/null
select is(baton_test.dispatch('y', :ye), 'lost', 'lost: another delivery has taken the message');
select is(baton_test.incidents('lost'), 2::bigint, 'lost: which is an incident');
select is((select i.detail ->> 'verb' from baton.incidents as i where i.message_id = :ym), 'dispatch_tasks', 'lost: of this verb');
select is(baton_test.sqlstate_of('select * from baton.dispatch_tasks(''y'', 1)'), 'PB001', 'fence: another epoch is refused');
select is(baton_test.sqlstate_of('select * from baton.dispatch_tasks(''y'', null)'), 'PB001', 'fence: null too');
select outcome from baton.cancel_run('y', 'x') \g /dev/null
select is(baton_test.dispatch('y', 1), 'terminal', 'terminal: the run has ended');
select is(baton_test.dispatch('nobody', 1), 'terminal', 'terminal: or is unknown');
select m as zm, d as zd, e as ze from baton_test.made('z') \gset
select outcome from baton.cancel_run('z', 'x') \g /dev/null
select is(baton_test.dispatch('z', :ze), 'terminal', 'terminal: under the replay''s own epoch');
select is(baton_test.messages('z'), null, 'terminal: its message goes');
select m as z2m, d as z2d, e as z2e from baton_test.made('z2', 0) \gset
select is(baton_test.dispatch('z2', :z2e), null, 'nothing to do: no row');

-- Poison: the lapse that reaches max_lapses ends the task, before anything is started

select baton_test.set_limits(10, 3) \g /dev/null
select m as qm, d as qd, e as qe from baton_test.made('q', 2) \gset
select is(baton_test.dispatch('q', :qe, 2), 'execute s/0#1, execute s/1#1', 'poison: two bodies');
select is(baton_test.complete('q', :qm, :qd, 1, 1), 'completed', 'poison: one is fine');
select baton_test.finish('q', :qe), baton_test.advance('30 seconds') \g /dev/null
select m as qm, d as qd, e as qe from baton_test.replay('q') \gset
select is(baton_test.dispatch('q', :qe), 'execute s/0#2', 'poison: the other dies: a lapse');
select baton_test.finish('q', :qe), baton_test.advance('30 seconds') \g /dev/null
select m as qm, d as qd, e as qe from baton_test.replay('q') \gset
select is(baton_test.dispatch('q', :qe), 'execute s/0#3', 'poison: the third start');
select is(baton_test.task('q'), 'started 3 0/2 under run', 'poison: after two lapses');
select baton_test.finish('q', :qe), baton_test.advance('30 seconds') \g /dev/null
select m as qm, d as qd, e as qe from baton_test.replay('q') \gset
select is(baton_test.dispatch('q', :qe), 'failed s/0#3', 'poison: the lapse that is max_lapses ends it');
select is(baton_test.task('q') || ', ' || baton_test.steps('q'), 'failed 3 0/3 under nothing, s failed 0/2', 'poison: and its step');
select is(baton_test.log('q'), 'task_started 0#1, task_started 1#1, task_completed 1#1, task_started 0#2, task_started 0#3, task_failed 0#3, step_failed', 'poison: with its events');
select is(baton_test.finish('q', :qe), 'ended suspended', 'poison: who has seen them ends');
select is(baton_test.incidents_of('q'), 'owned_recovery owned_recovery limit_reached', 'poison: incidents tell');
select m as q2m, d as q2d, e as q2e from baton_test.made('q2', 3) \gset
select baton_test.dispatch('q2', :q2e, 2) \g /dev/null
update baton.tasks set lapses = 2 where run_id = 'q2' and task_index = 0;
select baton_test.advance('30 seconds') \g /dev/null
select m as q2m, d as q2d, e as q2e from baton_test.replay('q2') \gset
select baton_test.step('q2', :q2e, 't') \g /dev/null
select is(baton_test.dispatch('q2', :q2e), 'failed s/0#1, execute t/0#1', 'poison: a step that it ends starts nothing, another does');
select is((select outcome || ' ' || (last_seq = 8)::text from baton.end_replay('q2', :q2e, 4)), 'again true', 'poison: its event asks for a replay');
select is(baton_test.messages('q2'), 'keyless 00:00:30 claimed', 'poison: its siblings'' messages go');

-- Poison is only what would be started here

select m as q3m, d as q3d from baton_test.inline('q3') \gset
update baton.tasks set lapses = 2 where run_id = 'q3';
select m as q4m, d as q4d, e as q4e from baton_test.again('q3', '1 hour') \gset
select is(baton_test.dispatch('q3', :q4e), 'backstop s/0#1 00:14:20', 'poison: not while its owner lives');
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.dispatch('q3', :q4e), 'enqueue s/0#1', 'poison: another message''s is left to start_task');
select baton_test.finish('q3', :q4e) \g /dev/null
select m as q5m, d as q5d, e as q5e from baton_test.replay('q3') \gset
select is(:q5m::bigint, :q3m::bigint, 'poison: (the owner''s message comes back)');
select is(baton_test.dispatch('q3', :q5e), 'queued s/0#1', 'poison: nor where it has a message by now');
delete from baton.messages where dedupe_key is not null and run_id = 'q3';
update baton.messages set claimed_by = :'w2' where message_id = :q5m;
select is(baton_test.dispatch('q3', :q5e), 'enqueue s/0#1', 'poison: nor under a worker that starts nothing');
delete from baton.messages where dedupe_key is not null and run_id = 'q3';
update baton.messages set claimed_by = null where message_id = :q5m;
update baton.tasks set lapses = 1 where run_id = 'q3';
select is(baton_test.dispatch('q3', :q5e), 'execute s/0#2', 'poison: one lapse below the limit it is started');
select m as q6m, d as q6d from baton_test.inline('q6', on_exhausted => 'skip_step') \gset
update baton.tasks set lapses = 2 where run_id = 'q6';
select baton_test.advance('30 seconds') \g /dev/null
select m as q6m, d as q6d, e as q6e from baton_test.replay('q6') \gset
select is(baton_test.dispatch('q6', :q6e), 'failed s/0#1', 'poison: of a step that may be skipped');
select is(baton_test.steps('q6'), 's skipped 0/1', 'poison: skips it');
select is((select baton_test.run('q6')), 'running 5/5/3 held', 'poison: which asks for a replay too');
select m as q7m, d as q7d, e as q7e from baton_test.made('q7', 4) \gset
select is(
  baton_test.dispatch('q7', :q7e, 4), 'execute s/0#1, execute s/1#1, execute s/2#1, execute s/3#1', 'poison: four bodies'
);
select baton_test.complete('q7', :q7m, :q7d, 1, 2), baton_test.finish('q7', :q7e), baton_test.advance('30 seconds') \g /dev/null
select m as q7m, d as q7d, e as q7e from baton_test.replay('q7') \gset
select m as q8m, d as q8d from baton_test.inline('q8') \gset
update baton.tasks set lapses = 2 where run_id = 'q7' and task_index < 3;
update baton.tasks set owner_message_id = :q8m, owner_delivery = :q8d where run_id = 'q7' and task_index = 0;
update baton.tasks set owner_delivery = :q7d where run_id = 'q7' and task_index = 1;
select is(
  baton_test.dispatch('q7', :q7e), 'backstop s/0#1 00:13:50, running s/1#1, execute s/3#2',
  'poison: only what was started under an earlier delivery of this message, and has not ended'
);
update baton.settings set max_lapses = default;

-- The re-arm sequence, with recovery switched off: a wake arms; the owner is stamped anew; the next wake arms that
-- stamp's own; what fires inside a lease arms its successor; the owner is lost for good; the successor fires.

update baton.settings set recovery = false;
select m as am, d as ad from baton_test.inline('arm') \gset
select m as bm, d as bd, e as be from baton_test.again('arm') \gset
select is(baton_test.dispatch('arm', :be), 'backstop s/0#1 00:14:20', 'arm: a wake arms a backstop');
select is(baton_test.finish('arm', :be), 'ended running', 'arm: and ends');
select is(baton_test.messages('arm'), 'keyless 00:00:30 claimed, s/0/backstop/1 00:14:20', 'arm: one backstop waits');
select baton_test.advance('30 seconds') \g /dev/null
select m as cm, d as cd, e as ce from baton_test.replay('arm', '20 minutes') \gset
select is(:cm::bigint, :am::bigint, 'arm: the owner''s message comes back');
select is(baton_test.dispatch('arm', :ce), 'execute s/0#2', 'arm: and the task is stamped anew');
select is(baton_test.finish('arm', :ce), 'ended running', 'arm: its body runs');
select baton_test.advance('10 seconds') \g /dev/null
select m as dm, d as dd, e as de from baton_test.again('arm') \gset
select is(baton_test.dispatch('arm', :de), 'backstop s/0#2 00:14:10', 'arm: the next wake arms that stamp''s own, with its full lease');
select is(baton_test.finish('arm', :de), 'ended running', 'arm: and ends');
select is(baton_test.messages('arm'), 'keyless 00:19:50 claimed, s/0/backstop/1 00:13:40, s/0/backstop/2 00:14:10', 'arm: beside the first one''s');
select baton_test.advance('820 seconds') \g /dev/null
select m as em, d as ed, e as ee from baton_test.replay('arm', '1 minute') \gset
select is((select m.dedupe_key from baton.messages as m where m.message_id = :em), null, 'arm: the first fires, and gives up its key');
select is(baton_test.dispatch('arm', :ee), 'backstop s/0#2 00:00:30', 'arm: inside the lease of the second stamp');
select is(baton_test.finish('arm', :ee), 'ended running', 'arm: that one is armed already');
select is(baton_test.messages('arm'), 'keyless 00:06:10 claimed, s/0/backstop/2 00:00:30', 'arm: so one backstop waits');
select baton_test.advance('30 seconds') \g /dev/null
select m as fm, d as fd, e as fe from baton_test.replay('arm', '1 minute') \gset
select is(baton_test.dispatch('arm', :fe), 'backstop s/0#2 00:14:20', 'arm: it fires while the owner lives, its lease used up: a full one again');
select is(baton_test.messages('arm'), 'keyless 00:05:40 claimed, keyless 00:01:00 claimed, s/0/backstop/2 00:14:20', 'arm: and arms its successor under the same key');
select is(baton_test.finish('arm', :fe), 'ended running', 'arm: before it ends');
delete from baton.messages where message_id = :am;
select is(baton_test.messages('arm'), 's/0/backstop/2 00:14:20', 'arm: the owner''s message is lost for good');
select part || ' ' || changed from baton.tick() where part = 'recovery' \g /dev/null
select is(baton_test.messages('arm'), 's/0/backstop/2 00:14:20', 'arm: nobody recovers anything');
select baton_test.advance('859.999999 seconds') \g /dev/null
select is((select m from baton_test.take('arm')), null, 'arm: a microsecond before its time nothing is due');
select baton_test.advance('1 microsecond') \g /dev/null
select m as gm, d as gd, e as ge from baton_test.replay('arm') \gset
select is(baton_test.dispatch('arm', :ge), 'enqueue s/0#2', 'arm: then the successor fires, and the task is sent');
select is(baton_test.finish('arm', :ge), 'ended running', 'arm: that replay ends');
select m as hm, d as hd from baton_test.take_task('arm') \gset
select is(baton_test.begin(:hm, :hd), 'execute s/0#3', 'arm: somebody runs it');
select is(baton_test.complete('arm', :hm, :hd, 3), 'completed ended', 'arm: the run goes on');
select is(baton_test.messages('arm'), 'wake 00:00:00', 'arm: with nothing left over');

-- A long body whose handler keeps extending past two leases is not run twice; when it dies at last the run goes on

select m as im, d as id from baton_test.inline('long') \gset
select outcome from baton.extend(:im, :id, '40 minutes') \g /dev/null
create function baton_test.fire(run_id text)
returns text
language plpgsql
as $$
declare
  v_due timestamptz;
  v_epoch bigint;
  v_said text;
begin
  select min(m.visible_at) into strict v_due from baton.messages as m where m.run_id = fire.run_id and m.claimed_at is null;
  perform baton_test.set_clock(greatest(v_due, baton._now()));
  select r.e into strict v_epoch from baton_test.replay(fire.run_id) as r;
  v_said := baton_test.dispatch(fire.run_id, v_epoch);
  perform baton_test.finish(fire.run_id, v_epoch);
  return v_said;
end;
$$;
select outcome from baton.wake_run('long') \g /dev/null
select is(baton_test.fire('long'), 'backstop s/0#1 00:14:20', 'long: a wake arms a backstop');
select is(baton_test.fire('long'), 'backstop s/0#1 00:14:20', 'long: it fires when the lease is used up, and arms the next');
select is(baton_test.fire('long'), 'backstop s/0#1 00:14:20', 'long: and that one the next');
select is(baton_test.messages('long'), 'keyless 00:11:20 claimed, s/0/backstop/1 00:14:20', 'long: there is always one');
select is(baton_test.task('long'), 'started 1 0/0 under run', 'long: the body runs once');
select is(baton_test.fire('long'), 'execute s/0#2', 'long: when it has died at last, its message comes back first, and the run goes on');

-- A timer beside a long inline body

select m as jm, d as jd, e as je from baton_test.made('timer') \gset
select baton_test.dispatch('timer', :je) \g /dev/null
select baton_test.finish('timer', :je, baton._now() + interval '1 minute') \g /dev/null
select outcome from baton.extend(:jm, :jd, '1 hour') \g /dev/null
select is(baton_test.messages('timer'), 'keyless 01:00:00 claimed, timer 00:01:00', 'timer: beside a long body');
select is(baton_test.fire('timer'), 'backstop s/0#1 00:13:20', 'timer: fires in time');
select is(baton._now() - (select t.last_started_at from baton.tasks as t where t.run_id = 'timer'), interval '1 minute', 'timer: at its time');

-- A pending backstop swallows no retry

select m as km, d as kd from baton_test.inline('retry') \gset
select outcome from baton.wake_run('retry') \g /dev/null
select is(baton_test.fire('retry'), 'backstop s/0#1 00:14:20', 'retry: a backstop waits');
select is(baton_test.fail('retry', :km, :kd, retry_delay => '1 second'), 'retrying 00:00:01', 'retry: the body fails');
select is(baton_test.messages('retry'), 'keyless 00:00:30 claimed, s/0/backstop/1 00:14:20, s/0 00:00:01', 'retry: its retry has a message of its own, in a second');
select * from finish();
rollback;
