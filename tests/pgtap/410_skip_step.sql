\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(52);

create function baton_test.skip(run_id text, epoch bigint default null, step_slug text default 's', reason text default null)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', s.outcome, s.status) from baton.skip_step(skip.run_id, skip.step_slug, skip.epoch, skip.reason) as s;
end;

-- By a replay

select m as am, d as ad, e as ae from baton_test.made('a', 3) \gset
select baton_test.dispatch('a', :ae) \g /dev/null
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed, s/1 00:00:00, s/2 00:00:00', 'skip: a step with one body and two messages');
select is(baton_test.skip('a', :ae, reason => 'not needed'), 'done skipped', 'skip: by its replay');
select is(baton_test.steps('a'), 's skipped 0/3', 'skip: the step has ended');
select is(
  (select string_agg(baton_test.task('a', i.nth), ', ' order by i.nth) from generate_series(0, 2) as i (nth)),
  'skipped 1 0/0 under run, skipped 0 0/0, skipped 0 0/0', 'skip: and its tasks'
);
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed', 'skip: their messages go');
select is(baton_test.log('a'), 'task_started 0#1, step_skipped', 'skip: one event, none a task');
select is(
  (select e.payload from baton.read_events('a', 3) as e), '{"step_slug": "s", "reason": "not needed"}', 'skip: that says why'
);
select is(baton_test.run('a'), 'running 4/0/0 held', 'skip: a replay''s own verb wakes nobody');
select is(baton_test.incidents_of('a'), null, 'skip: nor is it an incident');
select is(baton_test.skip('a', :ae), 'terminal skipped', 'skip: again, it has ended');
select is(baton_test.skip('a'), 'terminal skipped', 'skip: for an operator too');
select is(baton_test.run('a'), 'running 4/0/0 held', 'skip: who is too late changes nothing');
select is(baton_test.complete('a', :am, :ad), 'too_late', 'skip: the body that ran is too late');
select is(baton_test.finish('a', :ae), 'ended suspended', 'skip: and nothing is left to run');
select is(baton_test.messages('a'), null, 'skip: its message goes, it owns nothing any more');

-- By an operator

select baton_test.queued('b', 3) \g /dev/null
select m as bm, d as bd from baton_test.take_task('b', 1) \gset
select m as b2m, d as b2d from baton_test.started('b', 2) \gset
select is(baton_test.skip('b', reason => 'stuck'), 'done skipped', 'operator: skips a step');
select is(baton_test.messages('b'), 's/1 00:00:30 claimed, s/2 00:00:30 claimed, wake 00:00:00', 'operator: what nobody claimed goes, and the run is woken');
select is(baton_test.run('b'), 'running 4/4/2 wake', 'operator: its event asks for a replay');
select is(baton_test.incidents_of('b'), 'operator', 'operator: an incident tells');
select is(
  (select i.step_slug || ' ' || i.detail::text from baton.incidents as i where i.run_id = 'b'), 's {"verb": "skip_step"}', 'operator: of what'
);
select is(baton_test.begin(:bm, :bd), 'skip', 'operator: a claimed message starts nothing any more');
select is(baton_test.state(:bm), null, 'operator: and is gone');
select is((select outcome from baton.extend(:b2m, :b2d)), 'cancelled', 'operator: a body that runs hears it when it extends');
select is(baton_test.state(:b2m), null, 'operator: its message is gone then');
select is(baton_test.complete('b', :b2m, :b2d, 1, 2), 'too_late', 'operator: its output comes too late');
select is(baton_test.fail('b', :b2m, :b2d, 1, task_index => 2), 'too_late', 'operator: its failure too');
select is(baton_test.incidents_of('b'), 'operator too_late too_late', 'operator: incidents tell');
select is(baton_test.skip('b'), 'terminal skipped', 'operator: a second one is too late');
select is(baton_test.messages('b'), 'wake 00:00:00', 'operator: the run was woken once');

-- Of what has ended otherwise, of what is unknown

select m as cm, d as cd from baton_test.inline('c') \gset
select baton_test.complete('c', :cm, :cd) \g /dev/null
select is(baton_test.skip('c'), 'terminal completed', 'skip: a completed step stays that');
select m as dm, d as dd from baton_test.inline('d') \gset
select outcome from baton.cancel_run('d', 'x') \g /dev/null
select is(baton_test.skip('d'), 'terminal cancelled', 'skip: of an ended run');
select is(baton_test.skip('d', 1), 'terminal cancelled', 'skip: by a replay too');
select isnt(baton_test.state(:dm), null, 'skip: under another epoch the message stays');
select r.replay_epoch as de from baton.runs as r where r.run_id = 'd' \gset
select is(baton_test.skip('d', :de), 'terminal cancelled', 'skip: under its own');
select is(baton_test.state(:dm), null, 'skip: it goes');
select is(baton_test.skip('c', null, 'other'), 'unknown', 'skip: an unknown step');
select is(baton_test.skip('nobody'), 'unknown', 'skip: an unknown run');
select is(baton_test.skip('nobody', 1), 'unknown', 'skip: for a replay too');

-- The fence

select m as em, d as ed, e as ee from baton_test.made('e') \gset
select is(baton_test.sqlstate_of('select baton.skip_step(''e'', ''s'', 1)'), 'PB001', 'skip: another epoch is refused');
select is(baton_test.sqlstate_of('select baton.skip_step(''e'', ''other'', 1)'), 'PB001', 'skip: also for a step that it takes to be there');
select is(baton_test.skip('e', :ee, 'other'), 'unknown', 'skip: by its own replay that is unknown');
select baton_test.finish('e', :ee) \g /dev/null
select is(
  baton_test.sqlstate_of(format('select baton.skip_step(''e'', ''s'', %s)', :ee)), 'PB001', 'skip: one that has ended too'
);
select is(baton_test.steps('e'), 's created 1/1', 'skip: the step is open still');
select is(baton_test.skip('e', reason => repeat('x', 1001)), 'done skipped', 'skip: with a long reason');
select is(
  (select length(e.payload ->> 'reason') from baton.read_events('e', 2) as e where e.type = 'step_skipped'), 1000, 'skip: of which the first 1,000 characters are kept'
);

-- Other steps are left alone

select m as fm, d as fd, e as fe from baton_test.made('f') \gset
select baton_test.step('f', :fe, 't', 2) \g /dev/null
select baton_test.dispatch('f', :fe, 0) \g /dev/null
select is(baton_test.skip('f', :fe), 'done skipped', 'skip: one of two steps');
select is(baton_test.steps('f'), 's skipped 0/1, t created 2/2', 'skip: the other goes on');
select is(baton_test.messages('f'), 'keyless 00:00:30 claimed, t/0 00:00:00, t/1 00:00:00', 'skip: with its messages');

-- A claim is over at its instant

select baton_test.queued('g', 3) \g /dev/null
select m as gm, d as gd from baton_test.take_task('g') \gset
select m as g1m, d as g1d from baton_test.take_task('g', 1, '30.000001 seconds') \gset
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.messages('g'), 's/0 00:00:00 claimed, s/1 00:00:00.000001 claimed, s/2 -00:00:30', 'skip: one claim is just over, one not yet');
select is(baton_test.skip('g'), 'done skipped', 'skip: with such siblings');
select is(baton_test.state(:gm), null, 'skip: the message whose claim is over goes');
select is((select outcome from baton.extend(:g1m, :g1d)), 'cancelled', 'skip: the other is its holder''s, who hears it');
select * from finish();
rollback;
