\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
\ir ../sql/fold_tasks.sql
select plan(10);

-- The tables are what the log tells, and the comparison sees where they are not.

select m as am, d as ad, e as ae from baton_test.made('a', 4) \gset
select baton_test.step('a', :ae, 't', 2, 'skip_step', 1), baton_test.step('a', :ae, 'none', 0) \g /dev/null
select baton_test.dispatch('a', :ae, 2) \g /dev/null
select baton_test.complete('a', :am, :ad), baton_test.fail('a', :am, :ad, task_index => 1), baton_test.finish('a', :ae) \g /dev/null
select m as a2m, d as a2d, a as a2a from baton_test.started('a', 2) \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as a2m, d as a2d, a as a2a from baton_test.started('a', 2) \gset
select baton_test.release('a', task_index => 3) \g /dev/null
select is_empty($$select * from baton_test.unfolded('a')$$, 'fold: tasks in every state');
select is((select count(*) from baton_test._fold_tasks('a')), 9::bigint, 'fold: three steps and six tasks');
select m as atm, d as atd from baton_test.take_task('a', 0, step_slug => 't') \gset
select baton_test.begin(:atm, :atd) \g /dev/null
select outcome from baton.fail_task('a', 't', 0, 1, null, :atm, :atd) \g /dev/null
select is_empty($$select * from baton_test.unfolded('a')$$, 'fold: a skipped step');
select baton_test.release('a', task_index => 1) \g /dev/null
select is_empty($$select * from baton_test.unfolded('a')$$, 'fold: a waiting retry that was released');
select outcome from baton.cancel_run('a', 'x') \g /dev/null
select is_empty($$select * from baton_test.unfolded('a')$$, 'fold: a run that has ended');
select is(
  (select string_agg(f.step_slug || '/' || f.task_index || ' ' || (f.cache ->> 'status'), ', ' order by f.step_slug, f.task_index) from baton_test._fold_tasks('a') as f where f.task_index is not null),
  's/0 completed, s/1 cancelled, s/2 cancelled, s/3 cancelled, t/0 failed, t/1 skipped', 'fold: to what happened'
);

create function baton_test.notices(change text)
returns boolean
language plpgsql
as $$
declare
  v_noticed boolean;
begin
  begin
    execute notices.change;
    v_noticed := exists (select from baton_test.unfolded('a'));
    raise exception using errcode = 'BT000';
  exception
    when sqlstate 'BT000' then
      return v_noticed;
  end;
end;
$$;
select is_empty(
  $$select c.change from unnest(array[
    'attempt = attempt + 1', 'failures = failures + 1', 'lapses = lapses + 1', 'fence_attempt = fence_attempt + 1',
    'owner_message_id = 0', 'owner_delivery = 0', 'last_started_at = ''epoch''', 'retry_at = ''epoch''',
    'status = ''created'''
  ]) as c (change)
  where not baton_test.notices('update baton.tasks set ' || c.change || ' where task_index = 2')$$,
  'fold: a column of a task that differs is noticed'
);
select is_empty(
  $$select c.change from unnest(array[
    'status = ''created''', 'task_count = 9', 'open_tasks = 9', 'on_exhausted = ''skip_step''', 'max_attempts = 9', 'created_seq = 99'
  ]) as c (change)
  where not baton_test.notices('update baton.steps set ' || c.change || ' where step_slug = ''s''')$$,
  'fold: a column of a step too'
);
select is(baton_test.notices('delete from baton.tasks where task_index = 2'), true, 'fold: a task that is missing');
select is(baton_test.notices('update baton.tasks set worker_id = gen_random_uuid(), input = ''7'''), false, 'fold: input and worker are no cache');
select * from finish();
rollback;
