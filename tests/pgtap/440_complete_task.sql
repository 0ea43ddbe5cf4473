\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(85);

-- Under the task's own message

select baton_test.queued('a', 2) \g /dev/null
select m as am, d as ad, a as aa from baton_test.started('a') \gset
select m as a2m, d as a2d, a as a2a from baton_test.started('a', 1) \gset
select is(
  (select format('%s %s', c.outcome, c.step_ended) from baton.complete_task('a', 's', 1, 1, '{"out": 1}', :a2m, :a2d) as c),
  'completed f', 'complete: a task, not the last of its step'
);
select is(baton_test.task('a', 1), 'completed 1 0/0 under nothing', 'complete: it has ended');
select is(baton_test.steps('a'), 's created 1/2', 'complete: one is open');
select is(baton_test.messages('a'), 's/0 00:00:30 claimed', 'complete: its message goes');
select is(baton_test.run('a'), 'running 5/0/2', 'complete: which asks for no replay');
select is(
  (select e.payload from baton.read_events('a', 4) as e), '{"step_slug": "s", "task_index": 1, "attempt": 1, "output": {"out": 1}}', 'complete: the output is in its event'
);
select is(baton_test.complete('a', :am, :ad), 'completed ended', 'complete: the last one ends its step');
select is(baton_test.steps('a'), 's completed 0/2', 'complete: completed');
select is(baton_test.run('a'), 'running 7/7/2 wake', 'complete: that asks for a replay');
select is(baton_test.messages('a'), 'wake 00:00:00', 'complete: and wakes the run, once');
select is(baton_test.log('a'), 'task_started 0#1, task_started 1#1, task_completed 1#1, task_completed 0#1, step_completed', 'complete: one event each');
select is((select s.outputs from baton.step_outputs as s where s.run_id = 'a'), '["out 0", {"out": 1}]', 'complete: outputs in the order of the tasks');
select is(baton_test.complete('a', :am, :ad), 'already_completed', 'complete: again');
select is(baton_test.complete('a', null, null), 'already_completed', 'complete: whoever asks');
select is(baton_test.complete('a', :am, :ad, 99), 'already_completed', 'complete: under whatever attempt');
select is(baton_test.run('a') || baton_test.messages('a'), 'running 7/7/2 wakewake 00:00:00', 'complete: nothing is changed');
select is(baton_test.incidents_of('a'), null, 'complete: no incident');

-- Under a run message: that handler begins a replay next

select m as bm, d as bd from baton_test.inline('b') \gset
select is(baton_test.complete('b', :bm, :bd), 'completed ended', 'inline: a body under a run message');
select is(baton_test.messages('b'), 'keyless 00:00:30 claimed', 'inline: that stays, and nobody else is woken');
select is(baton_test.run('b'), 'running 5/5/3', 'inline: its event asks for a replay');
select is(baton_test.wedged(), null, 'inline: and has a driver: the message');
select e as be from (select b.replay_epoch as e from baton.begin_replay(:bm, :bd) as b) as x \gset
select is(baton_test.finish('b', :be), 'ended suspended', 'inline: its handler replays');
select is(baton_test.messages('b'), null, 'inline: and the message goes: nothing runs under it any more');
select m as b2m, d as b2d from baton_test.inline('b2') \gset
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.complete('b2', :b2m, :b2d), 'completed ended', 'inline: its claim has run out, nobody acted on it');
select is(baton_test.messages('b2'), 'keyless 00:00:00 claimed', 'inline: it is still its handler''s');
select m as b3m, d as b3d from baton_test.inline('b3') \gset
select baton_test.advance('30 seconds') \g /dev/null
select baton_test.take('b3') \g /dev/null
select is(baton_test.complete('b3', :b3m, :b3d), 'completed ended', 'inline: its receipt is not current any more');
select is(baton_test.messages('b3'), 'keyless 00:00:30 claimed, wake 00:00:00', 'inline: then the run is woken');
select m as b4m, d as b4d from baton_test.inline('b4') \gset
select m as b5m, d as b5d from baton_test.inline('b5') \gset
select is(baton_test.complete('b4', :b5m, :b5d), 'completed ended', 'inline: another run''s message');
select is(baton_test.messages('b4'), 'keyless 00:00:30 claimed, wake 00:00:00', 'inline: is no handler of this run');
select m as b6m, d as b6d from baton_test.inline('b6') \gset
select is(baton_test.complete('b6', null, null), 'completed ended', 'inline: no receipt refuses nothing');
select is(baton_test.messages('b6'), 'keyless 00:00:30 claimed, wake 00:00:00', 'inline: the run is woken');

-- The first completion wins, from any attempt

select baton_test.queued('c') \g /dev/null
select m as cm, d as cd, a as ca from baton_test.started('c') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as c2m, d as c2d, a as c2a from baton_test.started('c') \gset
select is(baton_test.complete('c', :cm, :cd), 'completed ended', 'first: an old attempt');
select is(baton_test.task('c'), 'completed 2 0/1 under task', 'first: while a newer one runs');
select is(baton_test.messages('c'), 's/0 00:00:30 claimed, wake 00:00:00', 'first: whose message stays its own');
select is((select e.payload ->> 'attempt' from baton.read_events('c', 4) as e where e.type = 'task_completed'), '1', 'first: the event says which');
select is(baton_test.complete('c', :c2m, :c2d, 2), 'already_completed', 'first: the newer one is told');
select is(baton_test.messages('c'), 'wake 00:00:00', 'first: and its message goes');
select is(baton_test.log('c'), 'task_started 0#1, task_started 0#2, task_completed 0#1, step_completed', 'first: there is one completion');
select baton_test.queued('c3') \g /dev/null
select m as c3m, d as c3d, a as c3a from baton_test.started('c3') \gset
select is(baton_test.fail('c3', :c3m, :c3d), 'retrying 00:00:10', 'first: (a body fails)');
select is(baton_test.complete('c3', :c3m, :c3d), 'completed ended', 'first: and then completes, while its retry waits');
select is(baton_test.messages('c3'), 'wake 00:00:00', 'first: the unclaimed message of the retry goes');
select baton_test.queued('c4') \g /dev/null
select m as c4m, d as c4d, a as c4a from baton_test.started('c4') \gset
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.complete('c4', :c4m, :c4d), 'completed ended', 'first: after its claim ran out');
select is(baton_test.messages('c4'), 'wake 00:00:00', 'first: its message goes');
select m as c5m, d as c5d from baton_test.inline('c5') \gset
update baton.settings set inline_ownership = false;
select m as c6m, d as c6d, e as c6e from baton_test.again('c5') \gset
select baton_test.dispatch('c5', :c6e), baton_test.finish('c5', :c6e) \g /dev/null
update baton.settings set inline_ownership = true;
select is(baton_test.complete('c5', :c5m, :c5d), 'completed ended', 'first: the inline body, while a message of the task waits');
select is(baton_test.messages('c5'), 'keyless 00:00:30 claimed', 'first: that goes too');

-- Attempts that were never given out, or released

select baton_test.queued('d') \g /dev/null
select m as dm, d as dd, a as da from baton_test.started('d') \gset
select is(baton_test.complete('d', :dm, :dd, 2), 'lost', 'attempt: one that was never given out');
select is(baton_test.complete('d', :dm, :dd, 0), 'lost', 'attempt: none');
select is(baton_test.complete('d', :dm, :dd, null), 'lost', 'attempt: null');
select is(baton_test.incidents('lost'), 0::bigint, 'attempt: no incident while the receipt is current');
select baton_test.release('d') \g /dev/null
select is(baton_test.complete('d', :dm, :dd, 1), 'lost', 'attempt: one that was released');
select is(baton_test.messages('d'), 's/0 00:00:00', 'attempt: the message is left alone');
select m as d2m, d as d2d, a as d2a from baton_test.started('d') \gset
select is(baton_test.complete('d', :dm, :dd, 1), 'lost', 'attempt: nor while the next one runs');
select is(baton_test.incidents('lost'), 1::bigint, 'attempt: another delivery has taken the message by then: an incident');
select is(baton_test.complete('d', :d2m, :d2d, 2), 'completed ended', 'attempt: the next one completes');
select is(baton_test.complete('d', :dm, :dd, 1), 'already_completed', 'attempt: and the released one is told');
select baton_test.queued('d3') \g /dev/null
select is(baton_test.complete('d3', null, null, 0), 'lost', 'attempt: a task that was never started');

-- Too late

select baton_test.queued('e', 3) \g /dev/null
select m as em, d as ed, a as ea from baton_test.started('e', 0) \gset
select m as e2m, d as e2d, a as e2a from baton_test.started('e', 1) \gset
select m as e3m, d as e3d, a as e3a from baton_test.started('e', 2) \gset
select baton_test.fail('e', :em, :ed, final => true) \g /dev/null
select is(baton_test.complete('e', :em, :ed), 'too_late', 'late: the task has failed');
select is(baton_test.complete('e', :e2m, :e2d, 1, 1), 'too_late', 'late: its step has');
select is(baton_test.messages('e'), 's/2 00:00:30 claimed, wake 00:00:00', 'late: the caller''s message goes');
select outcome from baton.cancel_run('e', 'x') \g /dev/null
select is(baton_test.complete('e', :e3m, :e3d, 1, 2), 'too_late', 'late: the run has ended');
select is(baton_test.messages('e'), null, 'late: nothing is left');
select is(baton_test.log('e'), 'task_started 0#1, task_started 1#1, task_started 2#1, task_failed 0#1, step_failed, run_cancelled', 'late: none of them is logged');
select is(baton_test.incidents_of('e'), 'too_late too_late too_late', 'late: incidents tell');
select is(
  (select string_agg(concat_ws(' ', i.step_slug, i.task_index, i.detail), ', ' order by i.incident_id) from baton.incidents as i where i.run_id = 'e'),
  's 0 {"verb": "complete_task", "status": "failed"}, s 1 {"verb": "complete_task", "status": "cancelled"}, s 2 {"verb": "complete_task", "status": "cancelled"}',
  'late: of what'
);
select is(baton_test.complete('e', null, null, 1, 3), 'too_late', 'late: an unknown task');
select is(baton_test.complete('e', null, null, 1, 0, 'other'), 'too_late', 'late: an unknown step');
select is(baton_test.complete('nobody', null, null), 'too_late', 'late: an unknown run');
select string_agg(md5(n::text), '') as long from generate_series(1, 1000) as n \gset
select is(baton_test.complete(:'long', null, null, 1, 0, :'long'), 'too_late', 'late: however long it is');
select is(
  (select length(i.run_id || i.step_slug) from baton.incidents as i order by i.incident_id desc limit 1), 400, 'late: of which the incident keeps as much as a name has'
);
select baton_test.queued('f') \g /dev/null
select m as fm, d as fd, a as fa from baton_test.started('f') \gset
delete from baton.tasks where run_id = 'f';
delete from baton.steps where run_id = 'f';
delete from baton.runs where run_id = 'f';
select is(baton_test.complete('f', :fm, :fd), 'too_late', 'late: its run was pruned');
select is(baton_test.messages('f'), null, 'late: the caller''s message goes');
select baton_test.queued('f2') \g /dev/null
select baton_test.queued('f3') \g /dev/null
select m as f2m, d as f2d, a as f2a from baton_test.started('f2') \gset
delete from baton.runs where run_id = 'f2';
select is(baton_test.complete('nobody', :f2m, :f2d), 'too_late', 'late: under a message of something else');
select isnt(baton_test.state(:f2m), null, 'late: which stays');

-- Only its own task and step

select baton_test.queued('g', 2) \g /dev/null
select m as gm, d as gd, a as ga from baton_test.started('g') \gset
select is(baton_test.complete('g', :gm, :gd), 'completed', 'others: one task of two');
select is(baton_test.task('g', 1) || ', ' || baton_test.messages('g'), 'created 0 0/0, s/1 00:00:00', 'others: the other one is as it was');

-- Arguments

select m as zm, d as zd from baton_test.inline('z') \gset
select pg_column_size(to_jsonb(repeat('x', 2000))) as size \gset
update baton.settings set max_payload_bytes = :size - 1;
select is(
  baton_test.sqlstate_of(format('select baton.complete_task(''z'', ''s'', 0, 1, to_jsonb(repeat(''x'', 2000)), %s, %s)', :zm, :zd)), '54000', 'arguments: an output over the limit'
);
select is(baton_test.task('z'), 'started 1 0/0 under run', 'arguments: nothing was changed');
update baton.settings set max_payload_bytes = :size;
select is(
  (select outcome from baton.complete_task('z', 's', 0, 1, to_jsonb(repeat('x', 2000)), :zm, :zd)), 'completed', 'arguments: at the limit'
);
update baton.settings set max_payload_bytes = default;
select m as z2m, d as z2d from baton_test.inline('z2') \gset
select is((select outcome from baton.complete_task('z2', 's', 0, 1, null, :z2m, :z2d)), 'completed', 'arguments: no output');
select is((select s.outputs from baton.step_outputs as s where s.run_id = 'z2'), '[null]', 'arguments: is null among the outputs');

-- A claim that ran out keeps no message

select baton_test.queued('held', 2) \g /dev/null
select m as y0m, d as y0d from baton_test.take_task('held', 0) \gset
select m as y1m, d as y1d from baton_test.take_task('held', 1) \gset
select t.outcome from (values (:y0m, :y0d), (:y1m, :y1d)) as r (m, d), baton.start_task(r.m, r.d) as t \g /dev/null
select baton_test.advance('29.999999 seconds') \g /dev/null
select is(baton_test.complete('held', null, null, 1, 0), 'completed', 'claimed: under no receipt');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.complete('held', null, null, 1, 1), 'completed ended', 'claimed: when the claim has run out');
select is(
  (select array_agg(m.message_id) from baton.messages as m where m.run_id = 'held' and m.kind = 'task'), array[:y0m]::bigint[],
  'claimed: the message goes then, and is left to who holds it before'
);

-- In one statement with the start of the next, as in docs/guides/ownership.md

select baton_test.queued('both', 2) \g /dev/null
select m as bothm, d as bothd from baton_test.started('both') \gset
select m as nextm, d as nextd from baton_test.take_task('both', 1) \gset
select is(
  (
    select format('%s %s %s', c.outcome, s.outcome, s.task_index)
    from baton.complete_task('both', 's', 0, 1, '1', :bothm, :bothd) as c
    left join lateral baton.start_task(:nextm, :nextd) as s on true
  ),
  'completed execute 1', 'complete: may be called in one statement with start_task'
);
select is(
  baton_test.log('both'), 'task_started 0#1, task_completed 0#1, task_started 1#1', 'complete: and comes first'
);
select * from finish();
rollback;
