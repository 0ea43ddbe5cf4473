\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(49);

-- Created, once

select baton_test.start('a') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select is(
  (select outcome from baton.create_step('a', :ae, 'charge', '[{"n": 1}, null, "x"]', 'skip_step', 2)), 'created', 'create: a step'
);
select results_eq(
  $$select s.step_slug, s.status, s.task_count, s.open_tasks, s.on_exhausted, s.max_attempts, s.created_seq from baton.steps as s$$,
  $$values ('charge', 'created', 3, 3, 'skip_step', 2, 2::bigint)$$, 'create: as it was asked for'
);
select results_eq(
  $$select t.task_index, t.status, t.attempt, t.input from baton.tasks as t order by t.task_index$$,
  $$values (0, 'created', 0, '{"n": 1}'::jsonb), (1, 'created', 0, 'null'), (2, 'created', 0, '"x"')$$,
  'create: an item a task, counted from 0'
);
select results_eq(
  $$select e.seq, e.type, e.correlation_id, e.payload from baton.read_events('a', 1) as e$$,
  $$values (2::bigint, 'step_created', 'charge',
    '{"step_slug": "charge", "task_count": 3, "on_exhausted": "skip_step", "max_attempts": 2}'::jsonb)$$,
  'create: with one event'
);
select is(baton_test.run('a'), 'running 2/0/0 held', 'create: that asks for no replay');
select is(baton_test.messages('a'), 'keyless 00:00:30 claimed', 'create: nothing is sent');
select is(
  (select outcome from baton.create_step('a', :ae, 'charge', '[1, 2, 3]')), 'exists', 'create: again, with other inputs: it is there'
);
select is((select outcome from baton.create_step('a', :ae, 'charge', '[1, 2]')), 'mismatch', 'create: fewer tasks are a mismatch');
select is((select outcome from baton.create_step('a', :ae, 'charge', '[1, 2, 3, 4]')), 'mismatch', 'create: more too');
select is((select outcome from baton.create_step('a', :ae, 'charge', '[]')), 'mismatch', 'create: none too');
select results_eq(
  $$select (select count(*) from baton.tasks), (select count(*) from baton.steps), baton_test.steps('a'), baton_test.run('a')$$,
  $$values (3::bigint, 1::bigint, 'charge created 3/3', 'running 2/0/0 held')$$, 'create: and nothing was changed by any of them'
);
select is(
  (select t.input from baton.tasks as t where t.task_index = 2), '"x"', 'create: the inputs are those of the first'
);
select is((select outcome from baton.create_step('a', :ae, 'other', '[1]')), 'created', 'create: another step');
select is((select s.created_seq from baton.steps as s where s.step_slug = 'other'), 3::bigint, 'create: keeps its own position');
select results_eq(
  $$select s.on_exhausted, s.max_attempts from baton.steps as s where s.step_slug = 'other'$$, $$values ('fail_step', 3)$$,
  'create: what is left out has defaults'
);
select is(
  (select outcome from baton.create_step('a', :ae, 'nulls', '[1]', null, null)), 'created', 'create: null is the default'
);
select results_eq(
  $$select s.on_exhausted, s.max_attempts from baton.steps as s where s.step_slug = 'nulls'$$, $$values ('fail_step', 3)$$,
  'create: the same one'
);

-- Without inputs

select is((select outcome from baton.create_step('a', :ae, 'none', '[]')), 'completed', 'create: without inputs it has ended at once');
select is(
  baton_test.steps('a'), 'charge created 3/3, other created 1/1, nulls created 1/1, none completed 0/0', 'create: completed'
);
select is(baton_test.log('a'), 'step_created, step_created, step_created, step_completed', 'create: with both events');
select is(baton_test.run('a'), 'running 6/0/0 held', 'create: which ask for no replay: this one has seen them');
select is((select outcome from baton.create_step('a', :ae, 'none', '[]')), 'exists', 'create: again it is there');
select is((select s.outputs from baton.step_outputs as s where s.step_slug = 'none'), null, 'create: it has no outputs');
select is(baton_test.finish('a', :ae), 'ended running', 'create: with tasks open the run is running');

-- After its end

select baton_test.made('b') \g /dev/null
select baton_test.start('c') \g /dev/null
select m as cm, d as cd, e as ce from baton_test.replay('c') \gset
select baton_test.step('c', :ce) \g /dev/null
select outcome from baton.skip_step('c', 's', :ce) \g /dev/null
select is(baton_test.step('c', :ce), 'exists', 'create: a step that has ended exists');
select is(baton_test.step('c', :ce, 's', 2), 'mismatch', 'create: or is a mismatch');

-- The fence

select is(
  baton_test.sqlstate_of(format('select baton.create_step(''a'', %s, ''x'', ''[1]'')', :ae)), 'PB001', 'create: a replay that has ended writes nothing'
);
select is(
  baton_test.sqlstate_of(format('select baton.create_step(''a'', %s, ''charge'', ''[1, 2, 3]'')', :ae)), 'PB001', 'create: nor is it told what exists'
);
select is(baton_test.sqlstate_of('select baton.create_step(''c'', 1, ''x'', ''[1]'')'), 'PB001', 'create: another epoch is refused');
select is(baton_test.sqlstate_of('select baton.create_step(''c'', null, ''x'', ''[1]'')'), 'PB001', 'create: null too');
select outcome from baton.cancel_run('c', 'x') \g /dev/null
select is(baton_test.step('c', 1, 'x'), 'terminal', 'create: of an ended run: terminal');
select isnt(baton_test.state(:cm), null, 'create: under another epoch no message goes');
select is(baton_test.step('c', :ce, 'x'), 'terminal', 'create: under the replay''s own too');
select is(baton_test.state(:cm), null, 'create: and its message goes');
select is(baton_test.step('nobody', 1, 'x'), 'terminal', 'create: of an unknown run too');

-- Arguments

select baton_test.made('z') \g /dev/null
select r.replay_epoch as ze from baton.runs as r where r.run_id = 'z' \gset
select is_empty(
  $$select n.name from baton_test.bad_names(200) as n
  where baton_test.sqlstate_of(format('select baton.create_step(''z'', 1, %L, ''[]'')', n.name)) <> '22023'$$,
  'create: names that are refused'
);
select is(
  (select count(*) from baton_test.odd_names(200) as n where baton_test.step('z', :ze, n.name) = 'created'), 3::bigint,
  'create: odd ones are taken'
);
select is_empty(
  $$select i.inputs from unnest(array[null, '{}', '1', 'null', '"x"']) as i (inputs)
  where baton_test.sqlstate_of(format('select baton.create_step(''z'', 1, ''x'', %L)', i.inputs)) <> '22023'$$,
  'create: inputs that are no array'
);
select is(baton_test.sqlstate_of('select baton.create_step(''z'', 1, ''x'', ''[]'', ''fail'')'), '22023', 'create: an unknown policy');
select is(baton_test.sqlstate_of('select baton.create_step(''z'', 1, ''x'', ''[]'', max_attempts => 0)'), '22023', 'create: no attempt at all');
select is(
  (select outcome from baton.create_step('z', :ze, 'once', '[1]', max_attempts => 1)), 'created', 'create: one attempt is enough'
);
select pg_column_size(jsonb_build_array(repeat('x', 2000))) as size \gset
update baton.settings set max_payload_bytes = :size;
select is(
  (select outcome from baton.create_step('z', :ze, 'large', jsonb_build_array(repeat('x', 2000)))), 'created', 'create: inputs at the limit'
);
update baton.settings set max_payload_bytes = :size - 1;
select is(
  baton_test.sqlstate_of(format('select baton.create_step(''z'', %s, ''larger'', jsonb_build_array(repeat(''x'', 2000)))', :ze)),
  '54000', 'create: over it'
);
select is(
  (select count(*) from baton.steps as s where s.run_id = 'z' and s.step_slug in ('x', 'larger')), 0::bigint, 'create: nothing was written'
);
update baton.settings set max_payload_bytes = default;

-- Steps of a name in two runs are two; a large step

select is(baton_test.steps('b'), 's created 1/1', 'create: another run''s step of the same name');
select is(baton_test.step('z', :ze, 'many', 2000), 'created', 'create: two thousand tasks');
select results_eq(
  $$select count(*), min(t.task_index), max(t.task_index), bool_and(t.input = to_jsonb(t.task_index)) from baton.tasks as t where t.step_slug = 'many'$$,
  $$values (2000::bigint, 0, 1999, true)$$, 'create: each with its own input'
);
select is((select r.last_seq from baton.runs as r where r.run_id = 'z'), (select max(e.seq) from baton.events as e where e.run_id = 'z'), 'create: positions are those of the log');
select is((select count(*) from baton.incidents), 0::bigint, 'create: no incident in any of this');
select * from finish();
rollback;
