\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(62);

-- A body that hangs under its own message while its handler extends

select baton_test.queued('a') \g /dev/null
select m as am, d as ad, a as aa from baton_test.started('a') \gset
update baton.tasks set lapses = 4 where run_id = 'a';
select outcome from baton.extend(:am, :ad, '1 hour') \g /dev/null
select is(baton_test.release('a'), 'released created', 'release: a task under its own message');
select is(baton_test.task('a'), 'created 1 0/0 fence 1', 'release: back to created, older attempts refused, no lapse');
select is(baton_test.messages('a'), 's/0 00:00:00', 'release: its message is spent, and due at once');
select is(baton_test.log('a'), 'task_started 0#1, task_released 0#1', 'release: with an event');
select is(baton_test.run('a'), 'running 4/0/2', 'release: that asks for no replay');
select is(baton_test.incidents_of('a'), 'operator', 'release: an incident tells');
select is(
  (select format('%s %s %s', i.step_slug, i.task_index, i.detail) from baton.incidents as i where i.run_id = 'a'),
  's 0 {"verb": "release_task", "action": "requeue"}', 'release: of what'
);
select is((select outcome from baton.extend(:am, :ad)), 'lost', 'refused: the handler that extends');
select is(baton_test.begin(:am, :ad), 'lost', 'refused: to start it again');
select is(baton_test.complete('a', :am, :ad), 'lost', 'refused: to complete it');
select is(baton_test.fail('a', :am, :ad), 'lost', 'refused: to fail it');
select is((select outcome from baton.park(:am, :ad, force => true)), 'lost', 'refused: to park it');
select is(baton_test.task('a'), 'created 1 0/0 fence 1', 'refused: nothing of it counts');
select m as a2m, d as a2d, a as a2a from baton_test.started('a') \gset
select is(:a2m::bigint, :am::bigint, 'release: whoever claims the message');
select is(:a2a, 2, 'release: runs it anew');
select is(baton_test.task('a'), 'started 2 0/0 fence 1 under task', 'release: that is no lapse');
select is(baton_test.complete('a', :am, :ad), 'lost', 'refused: beside the new attempt too');
select is(baton_test.fail('a', :am, :ad), 'lost', 'refused: nor does it fail that');
select is(baton_test.release('a'), 'released created', 'release: a second time');
select is(baton_test.task('a'), 'created 2 0/0 fence 2', 'release: the second attempt is refused as well');
select m as a3m, d as a3d, a as a3a from baton_test.started('a') \gset
select is(baton_test.complete('a', :a3m, :a3d, 3), 'completed ended', 'release: the third completes');
select is(baton_test.release('a'), 'terminal completed', 'release: then it has ended');
select is((select count(*) from baton.read_events('a') as e where e.type = 'task_completed'), 1::bigint, 'release: there was one completion');

-- Inline: the run message and its other bodies are left alone

select m as bm, d as bd, e as be from baton_test.made('b', 2) \gset
select baton_test.dispatch('b', :be, 2), baton_test.finish('b', :be) \g /dev/null
select is(baton_test.release('b'), 'released created', 'inline: one of two bodies under a run message');
select is(baton_test.messages('b'), 'keyless 00:00:30 claimed, s/0 00:00:00', 'inline: its own message is sent; the run message stays claimed');
select is(baton_test.task('b', 1), 'started 1 0/0 under run', 'inline: the other body goes on');
select is(baton_test.complete('b', :bm, :bd), 'lost', 'inline: the released one is refused');
select is(baton_test.complete('b', :bm, :bd, 1, 1), 'completed', 'inline: the other one completes');
select m as b2m, d as b2d, a as b2a from baton_test.started('b') \gset
select is(:b2a, 2, 'inline: and somebody runs the first anew');
select is(baton_test.complete('b', :b2m, :b2d, 2), 'completed ended', 'inline: to its end');
select m as cm, d as cd from baton_test.inline('c') \gset
update baton.settings set inline_ownership = false;
select m as c2m, d as c2d, e as c2e from baton_test.again('c') \gset
select baton_test.dispatch('c', :c2e), baton_test.finish('c', :c2e) \g /dev/null
update baton.settings set inline_ownership = true;
select m as c3m, d as c3d from baton_test.take_task('c') \gset
select is(baton_test.begin(:c3m, :c3d), 'await 00:00:30', 'inline: (a message of the task waits for the body)');
select is(baton_test.release('c'), 'released created', 'inline: released');
select is(baton_test.messages('c'), 'keyless 00:00:30 claimed, s/0 00:00:00', 'inline: that message is due at once');
select m as c4m, d as c4d, a as c4a from baton_test.started('c') \gset
select is(baton_test.task('c'), 'started 2 0/0 fence 1 under task', 'inline: and starts it, its owner alive as it is');

-- One that waits

select baton_test.queued('d') \g /dev/null
select m as dm, d as dd, a as da from baton_test.started('d') \gset
select baton_test.fail('d', :dm, :dd) \g /dev/null
select is(baton_test.release('d'), 'released created', 'waiting: a retry');
select is(baton_test.complete('d', :dm, :dd), 'lost', 'waiting: its attempts so far are refused');
select is(baton_test.messages('d'), 's/0 00:00:00', 'waiting: there is one message');
select m as dm, d as dd from baton_test.take_task('d') \gset
select is(baton_test.task('d'), 'created 1 1/0 fence 1', 'waiting: there is no time that it waits for');
select is(baton_test.begin(:dm, :dd), 'execute s/0#2', 'waiting: it is started at once');
select m as em, d as ed, e as ee from baton_test.made('e') \gset
select is(baton_test.release('e'), 'released created', 'waiting: one that was never dispatched');
select is(baton_test.messages('e'), 'keyless 00:00:30 claimed, s/0 00:00:00', 'waiting: is sent');
select is(baton_test.dispatch('e', :ee), 'queued s/0#0', 'waiting: once');

-- To fail

select baton_test.queued('f', 2) \g /dev/null
select m as fm, d as fd, a as fa from baton_test.started('f') \gset
select is(baton_test.release('f', 'fail'), 'released failed', 'fail: a body that hangs');
select is(baton_test.task('f') || ', ' || baton_test.steps('f'), 'failed 1 0/0 under nothing, s failed 0/2', 'fail: it has failed for good, with its step');
select is(baton_test.messages('f'), 'wake 00:00:00', 'fail: its messages go, though claimed, and the run is woken once');
select is(baton_test.log('f'), 'task_started 0#1, task_failed 0#1, step_failed', 'fail: with its events');
select is(
  (select e.payload from baton.read_events('f', 3) as e where e.type = 'task_failed'),
  '{"step_slug": "s", "task_index": 0, "attempt": 1, "reason": "released"}', 'fail: that say why'
);
select is(baton_test.run('f'), 'running 5/5/2 wake', 'fail: a replay is asked for');
select is(baton_test.complete('f', :fm, :fd), 'too_late', 'fail: its output comes too late');
select is((select outcome from baton.extend(:fm, :fd)), 'lost', 'fail: its handler is told');
select is(baton_test.release('f', 'fail'), 'terminal failed', 'fail: again it has ended');
select m as gm, d as gd from baton_test.inline('g', on_exhausted => 'skip_step') \gset
select is(baton_test.release('g', 'fail'), 'released failed', 'fail: an inline body');
select is(baton_test.steps('g'), 's skipped 0/1', 'fail: of a step that may be skipped');
select is(baton_test.messages('g'), 'keyless 00:00:30 claimed, wake 00:00:00', 'fail: the run is woken, its handler''s message stays');
select is((select i.detail ->> 'action' from baton.incidents as i where i.run_id = 'g'), 'fail', 'fail: an incident tells');

-- Ended, unknown, arguments

select baton_test.inline('h') \g /dev/null
select outcome from baton.cancel_run('h', 'x') \g /dev/null
select is(baton_test.release('h'), 'terminal cancelled', 'terminal: its run has ended');
select is(baton_test.release('g', task_index => 1), 'unknown', 'unknown: the task');
select is(baton_test.release('g', step_slug => 'other'), 'unknown', 'unknown: the step');
select is(baton_test.release('nobody'), 'unknown', 'unknown: the run');
select is(baton_test.incidents_of('nobody'), null, 'unknown: no incident');
select is(baton_test.sqlstate_of('select baton.release_task(''g'', ''s'', 0, ''drop'')'), '22023', 'arguments: an unknown action');
select baton_test.queued('i') \g /dev/null
select is(baton_test.release('i', null), 'released created', 'arguments: null is the default');
select * from finish();
rollback;
