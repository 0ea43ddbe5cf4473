\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(41);

create function baton_test.key(run_id text, task_index integer default 0, attempt integer default 1, step_slug text default 's')
returns jsonb
language sql
immutable
begin atomic
  select jsonb_build_object(
    'run_id', key.run_id, 'step_slug', key.step_slug, 'task_index', key.task_index, 'attempt', key.attempt
  );
end;

create function baton_test.ask(run_id text, task_index integer default 0, attempt integer default 1, step_slug text default 's')
returns text
language sql
volatile
begin atomic
  select string_agg(concat_ws(' ', t.outcome, t.cause), ', ')
  from baton.terminal_tasks(
    jsonb_build_array(baton_test.key(ask.run_id, ask.task_index, ask.attempt, ask.step_slug))
  ) as t;
end;

-- A body that goes on, and one that completes

select m as am, d as ad from baton_test.inline('a') \gset
select is(baton_test.ask('a'), 'running', 'running: an inline body');
select baton_test.advance('1 hour') \g /dev/null
select is(baton_test.ask('a'), 'running', 'running: its claim ran out, but nobody else has started it');
select is(baton_test.ask('a', attempt => 2), 'unknown', 'unknown: an attempt that was never given out');
select is(baton_test.ask('a', attempt => 0), 'unknown', 'unknown: nor was that');
select is(baton_test.ask('a', 1), 'unknown', 'unknown: the task');
select is(baton_test.ask('a', step_slug => 'other'), 'unknown', 'unknown: the step');
select is(baton_test.ask('nobody'), 'unknown', 'unknown: the run');
select is(baton_test.complete('a', :am, :ad), 'completed ended', 'completed: (the body ends)');
select is(baton_test.ask('a'), 'completed task_completed', 'completed');
select is(baton_test.ask('a', attempt => 7), 'completed task_completed', 'completed: whoever asks');
select outcome from baton.cancel_run('a', 'x') \g /dev/null
select is(baton_test.ask('a'), 'completed task_completed', 'completed: that stays, also when the run is cancelled later');

-- Superseded: a later attempt, a retry, a release

select baton_test.queued('b') \g /dev/null
select is(baton_test.ask('b'), 'unknown', 'unknown: an attempt of a task that was never started');
select m as bm, d as bd, a as ba from baton_test.started('b') \gset
select is(baton_test.fail('b', :bm, :bd), 'retrying 00:00:10', 'superseded: (the body fails)');
select is(baton_test.ask('b'), 'superseded task_retrying', 'superseded: a retry waits');
select baton_test.advance('10 seconds') \g /dev/null
select m as b2m, d as b2d, a as b2a from baton_test.started('b', 0, '1 minute') \gset
select is(baton_test.ask('b'), 'superseded task_started', 'superseded: it was started again');
select is(baton_test.ask('b', attempt => 2), 'running', 'superseded: not the new attempt');
select baton_test.advance('1 minute') \g /dev/null
select m as b3m, d as b3d, a as b3a from baton_test.started('b') \gset
select is(baton_test.ask('b', attempt => 2), 'superseded task_started', 'superseded: lost, and taken over');
select is(baton_test.release('b'), 'released created', 'superseded: (an operator takes it away)');
select is(baton_test.ask('b', attempt => 3), 'superseded task_released', 'superseded: released');
select is(baton_test.ask('b', attempt => 1), 'superseded task_released', 'superseded: and so are those before');
select m as b4m, d as b4d, a as b4a from baton_test.started('b') \gset
select is(baton_test.ask('b', attempt => 3), 'superseded task_released', 'superseded: also beside the next attempt');
select is(baton_test.ask('b', attempt => 4), 'running', 'superseded: that one is running');

-- Ends of a step

select baton_test.queued('c', 4, 1) \g /dev/null
select m as cm, d as cd from baton_test.started('c') \gset
select count(baton_test.started('c', 1)) \g /dev/null
select m as c2m, d as c2d from baton_test.started('c', 2) \gset
select baton_test.complete('c', :c2m, :c2d, 1, 2) \g /dev/null
select is(baton_test.fail('c', :cm, :cd), 'failed ended', 'step: (a task fails for good, and its step with it)');
select is(baton_test.ask('c'), 'failed task_failed', 'step: the task that failed');
select is(baton_test.ask('c', 1), 'cancelled step_failed', 'step: its sibling');
select is(baton_test.ask('c', 2), 'completed task_completed', 'step: what had completed stays so');
select outcome from baton.cancel_run('c', 'x') \g /dev/null
select is(baton_test.ask('c', 1), 'cancelled step_failed', 'step: the first end is the cause');
select baton_test.queued('d', 2, 1, 'skip_step') \g /dev/null
select m as dm, d as dd from baton_test.started('d') \gset
select count(baton_test.started('d', 1)) \g /dev/null
select baton_test.fail('d', :dm, :dd) \g /dev/null
select is(baton_test.ask('d', 1), 'skipped step_skipped', 'step: skipped, since a task was exhausted');
select baton_test.inline('e') \g /dev/null
select outcome from baton.skip_step('e', 's') \g /dev/null
select is(baton_test.ask('e'), 'skipped step_skipped', 'step: skipped by an operator');

-- Ends of a run

select m as fm, d as fd, e as fe from baton_test.made('f') \gset
select baton_test.dispatch('f', :fe) \g /dev/null
select outcome from baton.fail_run('f', :fe, '"no"') \g /dev/null
select is(baton_test.ask('f'), 'cancelled run_failed', 'run: failed');
select m as gm, d as gd, e as ge from baton_test.made('g') \gset
select baton_test.dispatch('g', :ge) \g /dev/null
select outcome from baton.complete_run('g', :ge, '1') \g /dev/null
select is(baton_test.ask('g'), 'cancelled run_completed', 'run: completed beside it');
select baton_test.inline('h') \g /dev/null
select outcome from baton.cancel_run('h', 'x') \g /dev/null
select is(baton_test.ask('h'), 'cancelled run_cancelled', 'run: cancelled');

-- Several at once

select is(
  (
    select string_agg(concat_ws(' ', t.outcome, t.run_id, t.step_slug, t.task_index, t.attempt, t.cause), ', ' order by t.nth)
    from baton.terminal_tasks(
      jsonb_build_array(
        baton_test.key('h'), baton_test.key('b', 0, 4), baton_test.key('nobody', 3, 7), baton_test.key('b', 0, 1), baton_test.key('h')
      )
    ) with ordinality as t (outcome, run_id, step_slug, task_index, attempt, cause, nth)
  ),
  'cancelled h s 0 1 run_cancelled, running b s 0 4, unknown nobody s 3 7, superseded b s 0 1 task_released, cancelled h s 0 1 run_cancelled',
  'several: a row each, in their order, with their keys'
);
select is((select count(*) from baton.terminal_tasks('[]')), 0::bigint, 'several: none, no row');
select is(
  (select string_agg(format('%s %s %s', t.outcome, t.run_id, t.cause), ', ' order by t.run_id) from baton.terminal_tasks(
    (select jsonb_agg(baton_test.key(k.run_id)) from unnest(array['f', 'g', 'h']) as k (run_id))) as t),
  'cancelled f run_failed, cancelled g run_completed, cancelled h run_cancelled', 'several: of different runs'
);

-- Arguments

select is_empty(
  $$select k.keys from unnest(array[null, '{}', '1', 'null', '"x"']) as k (keys)
  where baton_test.sqlstate_of(format('select * from baton.terminal_tasks(%L)', k.keys)) <> '22023'$$,
  'arguments: what is no array'
);
select is_empty(
  $$select k.keys from unnest(array['[1]', '["x"]', '[null]', '[[]]', '[{}]']) as k (keys)
  where baton_test.sqlstate_of(format('select * from baton.terminal_tasks(%L)', k.keys)) <> '22023'$$,
  'arguments: items that are no keys'
);
select is_empty(
  $$select a.name from unnest(array['run_id', 'step_slug', 'task_index', 'attempt']) as a (name)
  where baton_test.sqlstate_of(
    format('select * from baton.terminal_tasks(%L)', jsonb_build_array(baton_test.key('b') - a.name))
  ) <> '22023'$$,
  'arguments: one that is missing'
);
select is_empty(
  $$select k.part from unnest(array['{"task_index": "x"}', '{"attempt": 1.5}', '{"attempt": []}', '{"task_index": -1}', '{"attempt": 9999999999}'])
    as k (part)
  where baton_test.sqlstate_of(
    format('select * from baton.terminal_tasks(%L)', jsonb_build_array(baton_test.key('b') || k.part::jsonb))
  ) <> '22023'$$,
  'arguments: items that name no number'
);
select is(
  (
    select string_agg(t.outcome, ' ')
    from unnest(array['run_id', 'step_slug', 'task_index', 'attempt']) as a (name)
    cross join lateral baton.terminal_tasks(
      jsonb_build_array(baton_test.key('b', 0, 4) || jsonb_build_object(a.name, null))
    ) as t
  ),
  'unknown unknown unknown unknown', 'arguments: a null names nothing'
);
select is(
  (select t.outcome from baton.terminal_tasks('[{"run_id": "b", "step_slug": "s", "task_index": "0", "attempt": "4", "more": 1}]') as t),
  'running', 'arguments: numbers as text, and what is not asked for'
);
select * from finish();
rollback;
