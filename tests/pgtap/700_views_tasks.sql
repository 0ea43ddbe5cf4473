\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(17);

create function baton_test.ownership(run_id text)
returns text
language sql
volatile
begin atomic
  select string_agg(
    concat_ws(
      ' ', o.step_slug || '/' || o.task_index || '#' || o.attempt, coalesce(o.owner_kind, 'nothing'), o.alive, o.age,
      o.lease_remaining, o.decision
    ),
    ', ' order by o.step_slug, o.task_index
  )
  from baton.task_ownership as o
  where o.run_id = ownership.run_id;
end;

-- task_ownership: the tasks that are started, and who owns them

select m as am, d as ad, e as ae from baton_test.made('a', 2, worker_id => null) \gset
select is(baton_test.ownership('a'), null, 'ownership: nothing is started');
select baton_test.dispatch('a', :ae) \g /dev/null
select is(baton_test.ownership('a'), 's/0#1 run t 00:00:00 00:14:20 backstop', 'ownership: inline, under a run message');
select is((select o.owner_message_id from baton.task_ownership as o), :am::bigint, 'ownership: this one');
select baton_test.finish('a', :ae), baton_test.advance('10.5 seconds') \g /dev/null
select m as a1m, d as a1d from baton_test.take_task('a', 1, worker_id => baton_test.worker(4)) \gset
select baton_test.begin(:a1m, :a1d) \g /dev/null
select is(baton_test.ownership('a'), 's/0#1 run t 00:00:10.5 00:14:10 backstop, s/1#1 task t 00:00:00 00:14:20 queued', 'ownership: and queued, under its own message');
select is(
  (select array_agg(o.worker_id order by o.task_index) from baton.task_ownership as o where o.run_id = 'a'), array[null, baton_test.worker(4)], 'ownership: by whom, if they said'
);
update baton.settings set inline_ownership = false;
select is(baton_test.ownership('a'), 's/0#1 run t 00:00:10.5 00:14:10 enqueue, s/1#1 task t 00:00:00 00:14:20 queued', 'ownership: as dispatch decides with ownership off');
update baton.settings set inline_ownership = true;
select baton_test.advance('19.499999 seconds') \g /dev/null
select is(baton_test.ownership('a'), 's/0#1 run t 00:00:29.999999 00:13:51 backstop, s/1#1 task t 00:00:19.499999 00:14:01 queued', 'ownership: a microsecond before the claim runs out');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.ownership('a'), 's/0#1 run f 00:00:30 00:13:50 enqueue, s/1#1 task t 00:00:19.5 00:14:01 queued', 'ownership: at its end');
select baton_test.take('a') \g /dev/null
select is(baton_test.ownership('a'), 's/0#1 nothing f 00:00:30 00:13:50 enqueue, s/1#1 task t 00:00:19.5 00:14:01 queued', 'ownership: the receipt is not current any more');
select baton_test.complete('a', :am, :ad), baton_test.complete('a', :a1m, :a1d, 1, 1) \g /dev/null
select is(baton_test.ownership('a'), null, 'ownership: what has ended is not in it');
select m as bm, d as bd from baton_test.inline('b') \gset
update baton.tasks set lapses = 3 where run_id = 'b';
select is((select o.lapses from baton.task_ownership as o where o.run_id = 'b'), 3, 'ownership: with its lapses');
select is((select string_agg(o.run_id, ' ') from baton.task_ownership as o), 'b', 'ownership: of all runs');

-- step_outputs

select baton_test.queued('c', 12) \g /dev/null
select is((select s.outputs from baton.step_outputs as s where s.run_id = 'c'), null, 'outputs: none yet');
create function baton_test.complete_reversed(run_id text, tasks integer[])
returns void
language plpgsql
as $$
declare
  v_task integer;
  v_receipt record;
begin
  foreach v_task in array complete_reversed.tasks loop
    select s.m, s.d into strict v_receipt from baton_test.started(complete_reversed.run_id, v_task) as s;
    perform baton_test.complete(complete_reversed.run_id, v_receipt.m, v_receipt.d, 1, v_task);
  end loop;
end;
$$;
select baton_test.complete_reversed('c', '{11, 2, 0}') \g /dev/null
select results_eq(
  $$select s.step_slug, s.status, s.outputs from baton.step_outputs as s where s.run_id = 'c'$$,
  $$values ('s', 'created', '["out 0", "out 2", "out 11"]'::jsonb)$$, 'outputs: of what is completed so far, in the order of the tasks'
);
select baton_test.complete_reversed('c', '{10, 9, 8, 7, 6, 5, 4, 3, 1}') \g /dev/null
select results_eq(
  $$select s.status, s.outputs from baton.step_outputs as s where s.run_id = 'c'$$,
  $$select 'completed', jsonb_agg('out ' || i.nth order by i.nth) from generate_series(0, 11) as i (nth)$$, 'outputs: all, by number and not by name'
);
select m as dm, d as dd, e as de from baton_test.made('d', 0) \gset
select results_eq(
  $$select s.status, s.outputs from baton.step_outputs as s where s.run_id = 'd'$$, $$values ('completed', null::jsonb)$$, 'outputs: none of a step without tasks'
);
select baton_test.step('d', :de, 't'), baton_test.step('d', :de, 'u') \g /dev/null
select baton_test.dispatch('d', :de, 2) \g /dev/null
select baton_test.complete('d', :dm, :dd, 1, 0, 't') \g /dev/null
select outcome from baton.cancel_run('d', 'x') \g /dev/null
select results_eq(
  $$select s.step_slug, s.status, s.outputs from baton.step_outputs as s where s.run_id = 'd' order by s.step_slug$$,
  $$values ('s', 'completed', null::jsonb), ('t', 'completed', '["out 0"]'), ('u', 'cancelled', null)$$, 'outputs: a row a step, with its status'
);
select * from finish();
rollback;
