\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(98);

-- Created: execute

select baton_test.queued('a', 2) \g /dev/null
select m as am, d as ad from baton_test.take_task('a') \gset
select results_eq(
  format('select * from baton.start_task(%s, %s)', :am, :ad),
  $$values ('execute', 'a', 's', 0, 1, 'w', '0'::jsonb, null::interval)$$, 'created: execute, with what is to be run'
);
select is(baton_test.task('a'), 'started 1 0/0 under task', 'created: it is started');
select results_eq(
  $$select t.owner_message_id, t.owner_delivery, t.last_started_at, t.worker_id from baton.tasks as t where t.run_id = 'a' and t.task_index = 0$$,
  format('select %s::bigint, %s::bigint, baton._now(), null::uuid', :am, :ad), 'created: stamped with the receipt'
);
select results_eq(
  $$select e.type, e.payload from baton.read_events('a', 2) as e$$,
  format(
    $$values ('task_started', jsonb_build_object('step_slug', 's', 'task_index', 0, 'attempt', 1, 'message_id', %s, 'delivery', %s))$$, :am, :ad
  ),
  'created: with an event'
);
select is(baton_test.run('a'), 'running 3/0/2', 'created: that asks for no replay');
select is(baton_test.messages('a'), 's/0 00:00:30 claimed, s/1 00:00:00', 'created: the message stays claimed');
select is(baton_test.incidents_of('a'), null, 'created: no incident');
select m as a2m, d as a2d from baton_test.take_task('a', 1, worker_id => baton_test.worker(7)) \gset
select is(baton_test.begin(:a2m, :a2d), 'execute s/1#1', 'created: tasks of one run are started side by side');
select is((select t.worker_id from baton.tasks as t where t.run_id = 'a' and t.task_index = 1), baton_test.worker(7), 'created: the task says who runs it');

-- Started under this receipt: execute, the same attempt

select is(baton_test.begin(:am, :ad), 'execute s/0#1', 'again: the same attempt, the answer was lost');
select is((select s.input from baton.start_task(:am, :ad) as s), '0', 'again: with its input');
select is(baton_test.task('a'), 'started 1 0/0 under task', 'again: nothing is changed');
select is(baton_test.run('a'), 'running 4/0/2', 'again: nor logged');

-- The receipt

select is(baton_test.begin(:am, :ad + 1), 'lost', 'lost: another delivery');
select is(baton_test.begin(:am, null), 'lost', 'lost: none');
select is(baton_test.begin(null, null), 'lost', 'lost: nulls');
select is(baton_test.begin(-1, 1), 'lost', 'lost: an unknown message');
select * from baton_test.hold('users') \gset u
select is(baton_test.begin(:um, :ud), 'lost', 'lost: a user''s message');
select m as rm, d as rd, e as re from baton_test.made('r') \gset
select is(baton_test.begin(:rm, :rd), 'lost', 'lost: a run message');
select isnt(baton_test.state(:rm), null, 'lost: which is left alone');
select is(baton_test.incidents('lost'), 1::bigint, 'lost: an incident where another delivery has taken the row');
select baton_test.queued('b') \g /dev/null
select m as bm, d as bd from baton_test.take_task('b') \gset
select baton_test.advance('29.999999 seconds') \g /dev/null
select baton_test.queued('b2') \g /dev/null
select m as b2m, d as b2d from baton_test.take_task('b2') \gset
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.begin(:bm, :bd), 'lost', 'lost: whose claim has run out starts nothing');
select is(baton_test.task('b'), 'created 0 0/0', 'lost: nothing is changed');
select is(baton_test.messages('b'), 's/0 00:00:00 claimed', 'lost: the message is left alone');
select outcome from baton.extend(:bm, :bd) \g /dev/null
select is(baton_test.begin(:bm, :bd), 'execute s/0#1', 'lost: who extends may start');
select baton_test.advance('29.999998 seconds') \g /dev/null
select is(baton_test.begin(:b2m, :b2d), 'execute s/0#1', 'lost: not a microsecond before');

-- Ended, unknown, pruned: skip

select baton_test.queued('c', 3) \g /dev/null
select m as cm, d as cd from baton_test.take_task('c', 0, '1 hour') \gset
select m as c2m, d as c2d from baton_test.take_task('c', 1, '1 hour') \gset
select m as c3m, d as c3d from baton_test.started('c', 2, '1 hour') \gset
select is(baton_test.fail('c', :c3m, :c3d, final => true, task_index => 2), 'failed ended', 'skip: (a sibling fails for good)');
select is(baton_test.begin(:cm, :cd), 'skip', 'skip: its step has ended');
select is(baton_test.state(:cm), null, 'skip: the message goes');
select outcome from baton.cancel_run('c', 'x') \g /dev/null
select is(baton_test.begin(:c2m, :c2d), 'skip', 'skip: its run has ended');
select is(baton_test.messages('c'), null, 'skip: nothing is left');
select is(baton_test.log('c'), 'task_started 2#1, task_failed 2#1, step_failed, run_cancelled', 'skip: and nothing was logged');
select baton_test.queued('d', 3) \g /dev/null
select m as dm, d as dd from baton_test.take_task('d', 0) \gset
select m as d2m, d as d2d from baton_test.take_task('d', 1) \gset
select m as d3m, d as d3d from baton_test.take_task('d', 2) \gset
delete from baton.tasks where run_id = 'd' and task_index = 0;
select is(baton_test.begin(:dm, :dd), 'skip', 'skip: nobody knows the task');
delete from baton.tasks where run_id = 'd';
delete from baton.steps where run_id = 'd';
select is(baton_test.begin(:d2m, :d2d), 'skip', 'skip: nobody knows the step');
delete from baton.runs where run_id = 'd';
select is(baton_test.begin(:d3m, :d3d), 'skip', 'skip: the run was pruned');
select is(baton_test.messages('d'), null, 'skip: the messages go');
select baton_test.queued('e') \g /dev/null
select m as em, d as ed, a as ea from baton_test.started('e') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as e2m, d as e2d from baton_test.take_task('e') \gset
select is(baton_test.complete('e', :em, :ed), 'completed ended', 'skip: (an earlier delivery completes late)');
select is(baton_test.begin(:e2m, :e2d), 'skip', 'skip: the task is completed');
select is(baton_test.messages('e'), 'wake 00:00:00', 'skip: and the message gone');

-- A retry that is not due: await

select baton_test.queued('f') \g /dev/null
select m as fm, d as fd, a as fa from baton_test.started('f') \gset
select is(baton_test.fail('f', :fm, :fd), 'retrying 00:00:10', 'retry: the body fails');
update baton.messages set visible_at = baton._now() where run_id = 'f';
select m as fm, d as fd from baton_test.take_task('f') \gset
select is(baton_test.begin(:fm, :fd), 'await 00:00:10', 'retry: who comes too early waits');
select is(baton_test.messages('f'), 's/0 00:00:10', 'retry: the message is due then, and given back');
select is(baton_test.begin(:fm, :fd), 'lost', 'retry: its receipt is spent');
select is(baton_test.task('f'), 'created 1 1/0 00:00:10', 'retry: nothing else is changed');
select baton_test.advance('9.999999 seconds') \g /dev/null
update baton.messages set visible_at = baton._now() where run_id = 'f';
select m as fm, d as fd from baton_test.take_task('f') \gset
select is(baton_test.begin(:fm, :fd), 'await 00:00:00.000001', 'retry: a microsecond before');
select baton_test.advance('1 microsecond') \g /dev/null
select m as fm, d as fd from baton_test.take_task('f') \gset
select is(baton_test.begin(:fm, :fd), 'execute s/0#2', 'retry: at its time it is run');
select is(baton_test.task('f'), 'started 2 1/0 under task 00:00:00', 'retry: a second attempt, no lapse');

-- Redelivered: owned recovery

select baton_test.queued('g') \g /dev/null
select m as gm, d as gd, a as ga from baton_test.started('g') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as g2m, d as g2d from baton_test.take_task('g') \gset
select is(:g2m::bigint, :gm::bigint, 'recovery: a dead owner''s message comes back');
select is(baton_test.begin(:g2m, :g2d), 'execute s/0#2', 'recovery: and is run anew');
select is(baton_test.task('g'), 'started 2 0/1 under task', 'recovery: a lapse');
select is(baton_test.incidents_of('g'), 'owned_recovery', 'recovery: an incident tells');
select is(baton_test.begin(:gm, :gd), 'lost', 'recovery: who slept through its lapse starts nothing');
select is(baton_test.fail('g', :gm, :gd), 'lost', 'recovery: can''t fail the newer attempt');
select is(baton_test.fail('g', :gm, :gd, 2), 'lost', 'recovery: nor under its number');
select is(baton_test.task('g'), 'started 2 0/1 under task', 'recovery: which goes on');
select is(baton_test.complete('g', :gm, :gd), 'completed ended', 'recovery: but may complete it, once');
select is(baton_test.complete('g', :g2m, :g2d, 2), 'already_completed', 'recovery: the other is told');

-- Started under another message: await while it lives, else take it over

select m as hm, d as hd from baton_test.inline('h') \gset
update baton.settings set inline_ownership = false;
select m as h2m, d as h2d, e as h2e from baton_test.again('h', '1 hour') \gset
select baton_test.dispatch('h', :h2e) \g /dev/null
update baton.settings set inline_ownership = true;
select m as h3m, d as h3d from baton_test.take_task('h', 0, '10 seconds') \gset
select is(baton_test.begin(:h3m, :h3d), 'await 00:00:30', 'await: until its owner''s deadline');
select is(baton_test.messages('h'), 'keyless 00:00:30 claimed, keyless 01:00:00 claimed, s/0 00:00:30', 'await: the message is due then');
select is(baton_test.task('h'), 'started 1 0/0 under run', 'await: the task is left alone');
select is(baton_test.begin(:h3m, :h3d), 'lost', 'await: the receipt is spent');
select baton_test.advance('29.5 seconds') \g /dev/null
update baton.messages set visible_at = baton._now() where dedupe_key like 'h%';
select m as h3m, d as h3d from baton_test.take_task('h') \gset
select is(baton_test.begin(:h3m, :h3d), 'await 00:00:01', 'await: at least a second');
select baton_test.advance('499999 microseconds') \g /dev/null
update baton.messages set visible_at = baton._now() where dedupe_key like 'h%';
select m as h3m, d as h3d from baton_test.take_task('h') \gset
select is(baton_test.begin(:h3m, :h3d), 'await 00:00:01', 'await: a microsecond before its owner''s deadline too');
select baton_test.advance('1 microsecond') \g /dev/null
update baton.messages set visible_at = baton._now() where dedupe_key like 'h%';
select m as h3m, d as h3d from baton_test.take_task('h') \gset
select is(baton_test.begin(:h3m, :h3d), 'execute s/0#2', 'takeover: at it the task is taken over');
select is(baton_test.task('h'), 'started 2 0/1 under task', 'takeover: a lapse, under its own message');
select is(baton_test.incidents_of('h'), 'takeover', 'takeover: an incident tells');
select is(
  (select format('%s %s', i.message_id = :hm, i.detail) from baton.incidents as i where i.run_id = 'h'), 't {"attempt": 1}', 'takeover: from whom'
);
select is((select outcome from baton.extend(:hm, :hd)), 'lost', 'takeover: the receipt is spent, a late extend is lost');
select is(baton_test.messages('h'), 'keyless 00:00:00, keyless 00:59:30 claimed, s/0 00:00:30 claimed', 'takeover: its message is due again');
select is((select outcome from baton.begin_replay(:hm, :hd)), 'lost', 'takeover: its owner can''t begin a replay either');
select is(baton_test.fail('h', :hm, :hd), 'lost', 'takeover: nor fail the task');
select is(baton_test.complete('h', :hm, :hd), 'completed ended', 'takeover: but complete it, once');
select is(baton_test.messages('h'), 'keyless 00:00:00, keyless 00:59:30 claimed, s/0 00:00:30 claimed, wake 00:00:00', 'takeover: whoever runs it still holds its message');
select is((select outcome from baton.extend(:h3m, :h3d)), 'cancelled', 'takeover: and is told');

-- A late extend before the takeover keeps the task

select m as im, d as id from baton_test.inline('i') \gset
update baton.settings set inline_ownership = false;
select m as i2m, d as i2d, e as i2e from baton_test.again('i', '1 hour') \gset
select baton_test.dispatch('i', :i2e) \g /dev/null
update baton.settings set inline_ownership = true;
select baton_test.advance('40 seconds') \g /dev/null
select is((select outcome from baton.extend(:im, :id)), 'extended', 'extend: late, before anybody acted');
select m as i3m, d as i3d from baton_test.take_task('i') \gset
select is(baton_test.begin(:i3m, :i3d), 'await 00:00:30', 'extend: then it lives');

-- The owner's message is gone, spent, or out under a new delivery: taken over at once

select m as jm, d as jd from baton_test.inline('j') \gset
delete from baton.messages where message_id = :jm;
select m as j2m, d as j2d, e as j2e from baton_test.again('j') \gset
select baton_test.dispatch('j', :j2e) \g /dev/null
select m as j3m, d as j3d from baton_test.take_task('j') \gset
select is(baton_test.begin(:j3m, :j3d), 'execute s/0#2', 'takeover: the owner''s message was purged');
select m as km, d as kd from baton_test.inline('k') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as k2m, d as k2d, e as k2e from baton_test.again('k', '1 hour') \gset
select is(:k2m::bigint, :km::bigint, 'takeover: (the owner''s message is out under a new delivery)');
update baton.messages set claimed_by = baton_test.worker(1) where message_id = :k2m;
select baton.register_worker_function('f', start_mode => 'process'), baton.register_worker(baton_test.worker(1), 'f'),
  baton.stop_worker(baton_test.worker(1), true) \g /dev/null
select is(baton_test.dispatch('k', :k2e), 'enqueue s/0#1', 'takeover: (whose worker starts nothing)');
select m as k3m, d as k3d from baton_test.take_task('k') \gset
select is(baton_test.begin(:k3m, :k3d), 'execute s/0#2', 'takeover: the task doesn''t wait for it');
select is((select outcome from baton.extend(:k2m, :k2d)), 'extended', 'takeover: whose receipt is not the one that was stamped, and stays');

-- A message with a lapsed owner and the task's own in the queue: one runs it, at once

select m as lm, d as ld from baton_test.inline('l') \gset
select baton_test.advance('30 seconds') \g /dev/null
update baton.settings set inline_ownership = false;
select m as l2m, d as l2d, e as l2e from baton_test.replay('l') \gset
insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
values ('l', 'task', 'l', 's', 0, e'l\x1fs\x1f0', baton._now(), baton._now());
select is(baton_test.dispatch('l', :l2e), 'queued s/0#1', 'both: the owner''s redelivery leaves it to the message');
select is(baton_test.finish('l', :l2e), 'ended running', 'both: and ends');
select is(baton_test.messages('l'), 's/0 00:00:00', 'both: its message goes, the new delivery owns nothing');
select m as l3m, d as l3d from baton_test.take_task('l') \gset
select is(baton_test.begin(:l3m, :l3d), 'execute s/0#2', 'both: the task''s message runs it at once');
update baton.settings set inline_ownership = true;

-- Poison: the start that would follow the last lapse

select baton_test.set_limits(10, 2) \g /dev/null
select baton_test.queued('p', 2) \g /dev/null
select m as pm, d as pd, a as pa from baton_test.started('p') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as pm, d as pd from baton_test.take_task('p') \gset
select is(baton_test.begin(:pm, :pd), 'execute s/0#2', 'poison: one lapse below the limit');
select baton_test.advance('30 seconds') \g /dev/null
select m as pm, d as pd from baton_test.take_task('p') \gset
select m as p2m, d as p2d from baton_test.take_task('p', 1) \gset
select is(baton_test.begin(:pm, :pd), 'skip', 'poison: at it the task ends');
select is(baton_test.task('p') || ', ' || baton_test.steps('p'), 'failed 2 0/2 under nothing, s failed 0/2', 'poison: with its step, after max_lapses starts');
select is(baton_test.run('p'), 'running 6/6/2 wake', 'poison: the run goes on');
select is(baton_test.messages('p'), 's/1 00:00:30 claimed, wake 00:00:00', 'poison: it is woken, and the message is gone');
select is(baton_test.log('p'), 'task_started 0#1, task_started 0#2, task_failed 0#2, step_failed', 'poison: with its events');
select is(
  (select e.payload from baton.read_events('p', 4) as e where e.type = 'task_failed'),
  '{"step_slug": "s", "task_index": 0, "attempt": 2, "reason": "max_lapses"}', 'poison: that say why'
);
select is(baton_test.incidents_of('p'), 'owned_recovery limit_reached', 'poison: incidents tell: the last time nothing was recovered');
select is(baton_test.begin(:p2m, :p2d), 'skip', 'poison: its siblings end with the step');
select m as qm, d as qd from baton_test.inline('q', on_exhausted => 'skip_step') \gset
update baton.tasks set lapses = 1 where run_id = 'q';
select baton_test.advance('30 seconds') \g /dev/null
insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
values ('q', 'task', 'q', 's', 0, e'q\x1fs\x1f0', baton._now(), baton._now());
select m as q2m, d as q2d from baton_test.take_task('q') \gset
select is(baton_test.begin(:q2m, :q2d), 'skip', 'poison: by taking over too');
select is(baton_test.steps('q'), 's skipped 0/1', 'poison: as its step says');
select is((select outcome from baton.extend(:qm, :qd)), 'lost', 'poison: the dead owner''s receipt is spent');
select is(baton_test.sqlstate_of('select baton.start_task(null, 1)'), '00000', 'arguments: nulls are lost');
select * from finish();
rollback;
