\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(21);

create function baton_test.completions(run_id text, variadic tasks integer[])
returns jsonb
language sql
stable
begin atomic
  select coalesce(
    jsonb_agg(
      jsonb_build_object(
        'step_slug', 's', 'task_index', i.task_index, 'attempt', 1, 'output', i.nth * 10,
        'message_id', t.owner_message_id, 'delivery', t.owner_delivery
      ) order by i.nth
    ), '[]'
  )
  from unnest(completions.tasks) with ordinality as i (task_index, nth)
  left join baton.tasks as t on t.run_id = completions.run_id and t.step_slug = 's' and t.task_index = i.task_index;
end;

create function baton_test.complete_all(run_id text, completions jsonb)
returns text
language sql
volatile
begin atomic
  select string_agg(
    concat_ws(' ', c.outcome, c.step_slug || '/' || c.task_index, case when c.step_ended then 'ended' end), ', ' order by c.nth
  )
  from baton.complete_tasks(complete_all.run_id, complete_all.completions)
    with ordinality as c (outcome, step_slug, task_index, step_ended, nth);
end;

select baton_test.queued('a', 5) \g /dev/null
select count(baton_test.started('a', i)) from generate_series(0, 3) as i \g /dev/null
select is(
  baton_test.complete_all('a', baton_test.completions('a', 2, 0)), 'completed s/2, completed s/0', 'several: answered in the caller''s order'
);
select is(baton_test.messages('a'), 's/1 00:00:30 claimed, s/3 00:00:30 claimed, s/4 00:00:00', 'several: their messages go');
select is(baton_test.log('a'), 'task_started 0#1, task_started 1#1, task_started 2#1, task_started 3#1, task_completed 0#1, task_completed 2#1', 'several: written by message');
select is(
  baton_test.complete_all('a', baton_test.completions('a', 3, 2, 7, 4, 3)),
  'completed s/3, already_completed s/2, too_late s/7, lost s/4, already_completed s/3', 'several: each is decided on its own'
);
select is(baton_test.run('a'), 'running 9/0/2', 'several: positions go on');
select is((select count(baton_test.started('a', 4))), 1::bigint, 'several: (the last one starts)');
select is(baton_test.complete_all('a', baton_test.completions('a', 4, 1)), 'completed s/4 ended, completed s/1', 'several: one of them ends the step');
select is(baton_test.messages('a'), 'wake 00:00:00', 'several: the run is woken, once');
select is(
  (select s.outputs from baton.step_outputs as s where s.run_id = 'a'), '[20, 20, 10, 10, 10]', 'several: outputs in the order of the tasks'
);
select is(baton_test.steps('a'), 's completed 0/5', 'several: the step has ended');

-- Inline: several bodies under one run message

select m as bm, d as bd, e as be from baton_test.made('b', 3) \gset
select baton_test.dispatch('b', :be, 3), baton_test.finish('b', :be) \g /dev/null
select is(
  baton_test.complete_all('b', baton_test.completions('b', 0, 1, 2)), 'completed s/0, completed s/1, completed s/2 ended', 'inline: three bodies under one message'
);
select is(baton_test.messages('b'), 'keyless 00:00:30 claimed', 'inline: that is not settled, and nobody else is woken');

-- Two steps at once, ended by one call

select m as cm, d as cd, e as ce from baton_test.made('c') \gset
select baton_test.step('c', :ce, 't'), baton_test.dispatch('c', :ce, 2), baton_test.finish('c', :ce) \g /dev/null
select is(
  baton_test.complete_all('c', baton_test.completions('c', 0) || jsonb_build_object('step_slug', 't', 'task_index', 0, 'attempt', 1)),
  'completed s/0 ended, completed t/0 ended', 'steps: two end in one call'
);
select is(baton_test.log('c'), 'step_created, task_started 0#1, task_started 0#1, task_completed 0#1, step_completed, task_completed 0#1, step_completed', 'steps: with an event each');
select is(baton_test.messages('c'), 'keyless 00:00:30 claimed, wake 00:00:00', 'steps: the one without a receipt wakes the run');

-- Arguments

select is(baton_test.complete_all('a', '[]'), null, 'arguments: none, no row');
select is(baton_test.complete_all('nobody', '[{"step_slug": "s", "task_index": 0}]'), 'too_late s/0', 'arguments: an unknown run');
select is(baton_test.complete_all('a', '[{}]'), 'too_late', 'arguments: nothing named is unknown');
select is_empty(
  $$select c.completions from unnest(array[null, '{}', '1', 'null', '"x"']) as c (completions)
  where baton_test.sqlstate_of(format('select * from baton.complete_tasks(''a'', %L)', c.completions)) <> '22023'$$,
  'arguments: what is no array'
);
select is_empty(
  $$select c.completions from unnest(array['[1]', '["x"]', '[null]', '[[]]']) as c (completions)
  where baton_test.sqlstate_of(format('select * from baton.complete_tasks(''a'', %L)', c.completions)) <> '22023'$$,
  'arguments: items that are no objects'
);
select is_empty(
  $$select c.completions from unnest(array['[{"task_index": "x"}]', '[{"attempt": 1.5}]', '[{"message_id": []}]', '[{"attempt": 9999999999}]', '[{"delivery": -1}]']) as c (completions)
  where baton_test.sqlstate_of(format('select * from baton.complete_tasks(''a'', %L)', c.completions)) <> '22023'$$,
  'arguments: items that name no number'
);
select * from finish();
rollback;
