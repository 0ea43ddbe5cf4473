\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(43);

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

-- Named twice: decided one by one, after the others

select baton_test.queued('e', 4) \g /dev/null
select count(baton_test.started('e', i)) from generate_series(0, 2) as i \g /dev/null
select is(
  baton_test.complete_all('e', jsonb_set(baton_test.completions('e', 0, 0, 1), '{0,attempt}', '2')), 'lost s/0, completed s/0, completed s/1', 'twice: of one task the first that counts wins'
);
select is(baton_test.log('e'), 'task_started 0#1, task_started 1#1, task_started 2#1, task_completed 1#1, task_completed 0#1', 'twice: it comes after the others');
select is(
  (select e.payload -> 'output' from baton.read_events('e', 6) as e), '20', 'twice: with its own output'
);

-- Late, released, and under other receipts

select m.message_id as e2m, m.delivery as e2d from baton.messages as m where m.run_id = 'e' and m.task_index = 2 \gset
select baton_test.advance('30 seconds') \g /dev/null
select count(baton_test.take_task('e', 2, '1 hour')) \g /dev/null
select count(baton_test.started('e', 3, '1 hour')) \g /dev/null
select m.message_id as e3m, m.delivery as e3d from baton.messages as m where m.run_id = 'e' and m.task_index = 3 \gset
select is(
  baton_test.complete_all(
    'e',
    format(
      '[{"step_slug": "s", "task_index": 2, "attempt": 1, "message_id": %s, "delivery": %s}, {"step_slug": "s", "task_index": 3, "attempt": 1, "message_id": %s, "delivery": %s}]',
      :e3m, :e3d, :e2m, :e2d
    )::jsonb
  ),
  'completed s/2 ended, completed s/3', 'late: under receipts of other messages'
);
select is(baton_test.messages('e'), 's/2 01:00:00 claimed, s/3 01:00:00 claimed, wake 00:00:00', 'late: which are left to who holds them');
select baton_test.queued('f', 4) \g /dev/null
select count(baton_test.started('f', i)) from generate_series(0, 2) as i \g /dev/null
select baton_test.completions('f', 0, 1, 2) as f \gset
select is(baton_test.release('f', task_index => 1), 'released created', 'released: (by an operator)');
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.complete_all('f', :'f'), 'completed s/0, lost s/1, completed s/2', 'released: an older attempt is lost; a claim that ran out is not');
select is(baton_test.messages('f'), 's/1 -00:00:30, s/3 -00:00:30', 'released: its message stays, those of the others go');
select is(
  baton_test.complete_all('f', '[{"step_slug": "s", "task_index": 3, "attempt": 0}, {"step_slug": "s", "task_index": 3}, {"step_slug": "s", "task_index": 1, "attempt": 2}]'),
  'lost s/3, lost s/3, lost s/1', 'attempts: never given out'
);
update baton.tasks set attempt = 3 where run_id = 'f' and task_index = 1;
select is(baton_test.complete_all('f', '[{"step_slug": "s", "task_index": 1, "attempt": 2}]'), 'completed s/1', 'attempts: an older one since the release counts');
select is(baton_test.messages('f'), 's/3 -00:00:30', 'attempts: nobody held its message, which goes');
update baton.messages set delivery = 1, claimed_at = baton._now(), visible_at = baton._now() + interval '1 microsecond' where run_id = 'f';
update baton.tasks set attempt = 1 where run_id = 'f' and task_index = 3;
select is(baton_test.complete_all('f', '[{"step_slug": "s", "task_index": 3, "attempt": 1}]'), 'completed s/3 ended', 'attempts: of a task that somebody has claimed');
select is(baton_test.messages('f'), 's/3 00:00:00.000001 claimed, wake 00:00:00', 'attempts: that one keeps the message');

-- The tasks' messages, of who names no receipt

select baton_test.queued('k', 3) \g /dev/null
select count(baton_test.started('k', i)) from generate_series(0, 2) as i \g /dev/null
update baton.messages
set claimed_at = case when task_index > 0 then claimed_at end,
  visible_at = baton._now() + (array['10 seconds', '0', '1 microsecond'])[task_index + 1]::interval
where run_id = 'k';
select is(
  baton_test.complete_all('k', '[{"step_slug": "s", "task_index": 0, "attempt": 1}, {"step_slug": "s", "task_index": 1, "attempt": 1}, {"step_slug": "s", "task_index": 2, "attempt": 1}]'),
  'completed s/0, completed s/1, completed s/2 ended', 'messages: without a receipt'
);
select is(baton_test.messages('k'), 's/2 00:00:00.000001 claimed, wake 00:00:00', 'messages: one that waits goes, and one whose claim has run out');

-- Who ends the step under a run message of the run wakes nobody; who ends it otherwise, or another step, does

select m as gm, d as gd, e as ge from baton_test.made('g', 2) \gset
select baton_test.dispatch('g', :ge, 1), baton_test.finish('g', :ge) \g /dev/null
select count(baton_test.started('g', 1)) \g /dev/null
select is(baton_test.complete_all('g', baton_test.completions('g', 1, 0)), 'completed s/1 ended, completed s/0', 'wakes: by the order of the messages the queued one ends the step');
select is(baton_test.messages('g'), 'keyless 00:00:30 claimed, wake 00:00:00', 'wakes: the run is woken');
select is(baton_test.run('g'), 'running 7/7/3 wake', 'wakes: the end of the step asks for a replay');
select is(baton_test.log('g'), 'task_started 0#1, task_started 1#1, task_completed 0#1, task_completed 1#1, step_completed', 'wakes: after its last task');
select m as hm, d as hd from baton_test.inline('h') \gset
select m as im, d as id from baton_test.inline('i') \gset
select is(
  baton_test.complete_all('h', jsonb_set(jsonb_set(baton_test.completions('h', 0), '{0,message_id}', :'im'), '{0,delivery}', :'id')),
  'completed s/0 ended', 'wakes: under a run message of another run'
);
select is(baton_test.messages('h'), 'keyless 00:00:30 claimed, wake 00:00:00', 'wakes: which is no handler of this one');

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
update baton.settings set max_payload_bytes = 1024;
select is(
  baton_test.sqlstate_of(format('select * from baton.complete_tasks(''i'', %L)', jsonb_build_array('{}'::jsonb, jsonb_build_object('step_slug', 's', 'task_index', 0, 'attempt', 1, 'output', repeat('x', 1100))))),
  '54000', 'arguments: an output over max_payload_bytes'
);
select * from finish();
rollback;
