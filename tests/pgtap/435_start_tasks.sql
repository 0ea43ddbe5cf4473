\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(41);

-- The receipts of what is claimed of a run, in the order of the messages.
create function baton_test.receipts(run_id text)
returns jsonb
language sql
stable
begin atomic
  select jsonb_agg(jsonb_build_object('message_id', m.message_id, 'delivery', m.delivery) order by m.message_id)
  from baton.messages as m
  where m.run_id = receipts.run_id and m.claimed_at is not null;
end;

create function baton_test.reversed(receipts jsonb)
returns jsonb
language sql
immutable
begin atomic
  select jsonb_agg(r.item order by r.nth desc) from jsonb_array_elements(reversed.receipts) with ordinality as r (item, nth);
end;

create function baton_test.begin_all(receipts jsonb)
returns text
language sql
volatile
begin atomic
  select string_agg(
    concat_ws(
      ' ', s.outcome, case when s.outcome = 'execute' then s.run_id || ':' || s.step_slug || '/' || s.task_index || '#' || s.attempt end,
      s.retry_after
    ), ', ' order by s.nth
  )
  from baton.start_tasks(begin_all.receipts)
    with ordinality as s (
      outcome, message_id, delivery, run_id, step_slug, task_index, attempt, workflow_name, input, retry_after, nth
    );
end;

-- Created: all in one, answered in the caller's order, started by message

select baton_test.queued('a', 4) \g /dev/null
select count(baton_test.take_task('a', i, worker_id => baton_test.worker(i))) from generate_series(0, 2) as i \g /dev/null
select baton_test.receipts('a') as a \gset
select results_eq(
  format('select s.outcome, s.message_id, s.delivery, s.run_id, s.step_slug, s.task_index, s.attempt, s.workflow_name, s.input, s.retry_after from baton.start_tasks(%L) as s', baton_test.reversed(:'a')),
  $$select 'execute', m.message_id, m.delivery, 'a', 's', m.task_index, 1, 'w', to_jsonb(m.task_index), null::interval
  from baton.messages as m where m.run_id = 'a' and m.claimed_at is not null order by m.message_id desc$$,
  'created: execute, each with its receipt and what is to be run'
);
select is(baton_test.task('a', 0) || ', ' || baton_test.task('a', 2), 'started 1 0/0 under task, started 1 0/0 under task', 'created: they are started');
select is_empty(
  $$select t.task_index from baton.tasks as t inner join baton.messages as m using (run_id, step_slug, task_index)
  where t.run_id = 'a' and t.status = 'started' and (t.owner_message_id, t.owner_delivery, t.last_started_at, t.worker_id)
    is distinct from (m.message_id, m.delivery, baton._now(), baton_test.worker(t.task_index))$$,
  'created: each is stamped with its own receipt, and its worker'
);
select is(baton_test.log('a'), 'task_started 0#1, task_started 1#1, task_started 2#1', 'created: logged in the order of the messages');
select results_eq(
  $$select e.seq, e.payload from baton.read_events('a', 2) as e$$,
  $$select 2 + row_number() over (order by t.task_index), jsonb_build_object('step_slug', 's', 'task_index', t.task_index, 'attempt', 1, 'message_id', t.owner_message_id, 'delivery', t.owner_delivery)
  from baton.tasks as t where t.run_id = 'a' and t.status = 'started' order by t.task_index$$,
  'created: with events as of start_task'
);
select is(baton_test.run('a'), 'running 5/0/2', 'created: that ask for no replay');
select is(
  baton_test.messages('a'), 's/0 00:00:30 claimed, s/1 00:00:30 claimed, s/2 00:00:30 claimed, s/3 00:00:00', 'created: the messages stay claimed'
);
select is(baton_test.task('a', 3), 'created 0 0/0', 'created: nothing else is started');
select is(baton_test.begin_all(:'a'), 'execute a:s/0#1, execute a:s/1#1, execute a:s/2#1', 'again: the same attempts, the answer was lost');
select is(baton_test.run('a'), 'running 5/0/2', 'again: nothing is logged');

-- One receipt twice

select m as a4m, d as a4d from baton_test.take_task('a', 3) \gset
select format('{"message_id": %s, "delivery": %s}', :a4m, :a4d) as a4 \gset
select is(baton_test.begin_all(format('[%s, %s]', :'a4', :'a4')::jsonb), 'execute a:s/3#1, execute a:s/3#1', 'twice: the same answer');
select is(baton_test.log('a'), 'task_started 0#1, task_started 1#1, task_started 2#1, task_started 3#1', 'twice: started once');

-- Each is decided on its own, as by start_task

select baton_test.queued('b', 8) \g /dev/null
select m as b0m, d as b0d from baton_test.started('b', 0) \gset
select is(baton_test.fail('b', :b0m, :b0d), 'retrying 00:00:10', 'mixed: (one is to be tried again later)');
update baton.messages set visible_at = baton._now() where run_id = 'b' and task_index = 0;
select count(baton_test.take_task('b', i, '29 seconds')) from generate_series(0, 0) as i \g /dev/null
select count(baton_test.take_task('b', 1)) \g /dev/null
select m as b2m, d as b2d, a as b2a from baton_test.started('b', 2) \gset
select is(baton_test.complete('b', :b2m, :b2d, :b2a, 2), 'completed', 'mixed: (one has ended)');
select m as b3m, d as b3d from baton_test.take_task('b', 3) \gset
update baton.tasks set status = 'completed' where run_id = 'b' and task_index = 3;
select m as b4m, d as b4d from baton_test.started('b', 4) \gset
update baton.messages set delivery = delivery - 1, visible_at = baton._now() + interval '30 seconds' where message_id = :b4m;
select m as b5m, d as b5d from baton_test.started('b', 5) \gset
select m as b6m, d as b6d from baton_test.take_task('b', 6) \gset
update baton.messages set visible_at = baton._now() where message_id = :b6m;
select m as b7m, d as b7d from baton_test.take_task('b', 7) \gset
select is(
  baton_test.begin_all(
    jsonb_build_array(
      jsonb_build_object('message_id', :b2m, 'delivery', :b2d), jsonb_build_object('message_id', :b7m, 'delivery', :b7d + 1)
    ) || baton_test.receipts('b')
  ),
  'lost, lost, await 00:00:10, execute b:s/1#1, skip, execute b:s/4#2, execute b:s/5#1, lost, execute b:s/7#1',
  'mixed: gone, another delivery; a retry ahead, created, ended, recovered, started already, run out, created'
);
select is(
  baton_test.messages('b'),
  's/0 00:00:10, s/1 00:00:30 claimed, s/4 00:00:30 claimed, s/5 00:00:30 claimed, s/6 00:00:00 claimed, s/7 00:00:30 claimed',
  'mixed: one is given back, one goes'
);
select is(
  (select string_agg(e.payload ->> 'task_index', ' ' order by e.seq) from baton.read_events('b', 8) as e where e.type = 'task_started'), '1 7 4',
  'mixed: what waits to be started comes first'
);
select is((select count(*) from baton.read_events('b') as e) || ' ' || (select r.last_seq from baton.runs as r where r.run_id = 'b'), '11 11', 'mixed: positions have no gap');
select is(baton_test.incidents_of('b'), 'owned_recovery', 'mixed: the recovery leaves an incident');
select is(baton_test.incidents('lost'), 1::bigint, 'mixed: so does the receipt of another delivery');

-- A wrong receipt of a message beside the right one

select baton_test.queued('c', 2) \g /dev/null
select m as cm, d as cd from baton_test.take_task('c', 0) \gset
select m as c2m, d as c2d from baton_test.take_task('c', 1) \gset
select is(
  baton_test.begin_all(format('[{"message_id": %1$s, "delivery": 1}, {"message_id": %1$s, "delivery": %2$s}]', :cm, :cd)::jsonb),
  'lost, execute c:s/0#1', 'receipts: the right one starts, after the wrong one'
);
select is(
  baton_test.begin_all(format('[{"message_id": %1$s, "delivery": %2$s}, {"message_id": %1$s, "delivery": 1}]', :c2m, :c2d)::jsonb),
  'execute c:s/1#1, lost', 'receipts: and before it'
);
select is(baton_test.log('c'), 'task_started 0#1, task_started 1#1', 'receipts: each once');

-- The deadline of a claim, and of a retry

select baton_test.queued('d', 2) \g /dev/null
select m as dm, d as dd from baton_test.started('d', 1) \gset
select is(baton_test.fail('d', :dm, :dd, task_index => 1), 'retrying 00:00:10', 'deadlines: (a retry in ten seconds)');
update baton.messages set visible_at = baton._now() where run_id = 'd';
select m as dm, d as dd from baton_test.take_task('d', 0, '10 seconds') \gset
select m as d2m, d as d2d from baton_test.take_task('d', 1, '1 hour') \gset
select baton_test.advance('10 seconds') \g /dev/null
select is(baton_test.begin_all(baton_test.receipts('d')), 'lost, execute d:s/1#2', 'deadlines: at it a claim has run out, and a retry is due');
select is(baton_test.task('d', 1), 'started 2 1/0 under task 00:00:00', 'deadlines: the retry is a second attempt, no lapse');

-- Several runs; those that have ended, or are gone

select baton_test.queued(r, 3) from unnest(array['g', 'e', 'f']) as r \g /dev/null
select count(baton_test.take_task(r, i)) from unnest(array['g', 'e', 'f']) as r, generate_series(0, 2) as i \g /dev/null
select baton_test.receipts('g') -> 1 as g1 \gset
select baton_test.receipts('e') -> 2 as e2 \gset
select baton_test.receipts('g') -> 0 as g0 \gset
select baton_test.receipts('e') -> 0 as e0 \gset
select baton_test.receipts('f') -> 0 as f0 \gset
select baton_test.receipts('f') -> 1 as f1 \gset
update baton.messages set claimed_at = baton._now() where run_id = 'f';
delete from baton.runs where run_id = 'f';
select is(
  baton_test.begin_all(format('[%s, %s, %s, %s, %s]', :'g1', :'e2', :'f0', :'g0', :'e0')::jsonb),
  'execute g:s/1#1, execute e:s/2#1, skip, execute g:s/0#1, execute e:s/0#1', 'runs: of several, in the caller''s order'
);
select is(baton_test.log('g') || '; ' || baton_test.log('e'), 'task_started 0#1, task_started 1#1; task_started 0#1, task_started 2#1', 'runs: each has its own log');
select is(baton_test.run('g') || '; ' || baton_test.run('e'), 'running 4/0/2; running 4/0/2', 'runs: and its positions');
select outcome from baton.cancel_run('e', 'x') \g /dev/null
select baton_test.receipts('g') -> 2 as g2 \gset
select baton_test.receipts('e') -> 1 as e1 \gset
select is(baton_test.begin_all(format('[%s, %s]', :'e1', :'g2')::jsonb), 'skip, execute g:s/2#1', 'runs: one that has ended starts nothing');
select is(baton_test.messages('f'), 's/1 00:00:30 claimed, s/2 00:00:30 claimed', 'runs: of one that is gone the message goes');

-- Not a task's own message

select * from baton_test.hold('users') \gset u
select m as rm, d as rd from baton_test.made('r') \gset
select is(
  baton_test.begin_all(format('[{"message_id": %s, "delivery": %s}, {"message_id": %s, "delivery": %s}, {"message_id": 999999999, "delivery": 1}, {"message_id": null, "delivery": 1}]', :um, :ud, :rm, :rd)::jsonb),
  'lost, lost, lost, lost', 'lost: a user''s message, a run message, an unknown one, none'
);
select ok(baton_test.state(:um) is not null and baton_test.state(:rm) is not null, 'lost: they are left alone');
select baton_test.queued('h') \g /dev/null
select m as hm, d as hd from baton_test.take_task('h', 0, '1 hour') \gset
update baton.messages set dedupe_key = null where message_id = :hm;
select m as h1m, d as h1d, e as h1e from baton_test.again('h') \gset
select is(baton_test.dispatch('h', :h1e, 0), 'enqueue s/0#0', 'two: (the task gets another message)');
select m as h2m, d as h2d from baton_test.take_task('h', 0, '1 hour') \gset
select is(
  baton_test.begin_all(format('[{"message_id": %s, "delivery": %s}, {"message_id": %s, "delivery": %s}]', :hm, :hd, :h2m, :h2d)::jsonb),
  'await 01:00:00, execute h:s/0#1', 'two messages of one task: its own starts it, the other waits'
);
select is(baton_test.log('h'), 'task_started 0#1', 'two messages of one task: one body');

-- Poison

select baton_test.set_limits(10, 2) \g /dev/null
select baton_test.queued('p', 3) \g /dev/null
select m as pm, d as pd from baton_test.started('p', 0) \gset
select m as p1m, d as p1d from baton_test.take_task('p', 1, '1 hour') \gset
update baton.tasks set lapses = 1 where run_id = 'p' and task_index = 0;
select baton_test.advance('30 seconds') \g /dev/null
select count(baton_test.take_task('p', 0, '1 hour')) \g /dev/null
select is(baton_test.begin_all(baton_test.receipts('p')), 'skip, execute p:s/1#1', 'poison: the task ends');
select is(baton_test.log('p'), 'task_started 0#1, task_started 1#1, task_failed 0#1, step_failed', 'poison: with its step, after the others have started');
select is(baton_test.run('p') || ', ' || baton_test.messages('p'), 'running 6/6/2 wake, s/1 00:59:30 claimed, wake 00:00:00', 'poison: the run is woken');

-- Arguments

select is(baton_test.begin_all('[]'), null, 'arguments: none, no row');
select is_empty(
  $$select c.receipts from unnest(array[null, '{}', '1', 'null', '[1]', '[{}]', '[{"message_id": 1}]', '[{"message_id": "x", "delivery": 1}]']) as c (receipts)
  where baton_test.sqlstate_of(format('select * from baton.start_tasks(%L)', c.receipts)) <> '22023'$$,
  'arguments: what is no array of receipts'
);
select * from finish();
rollback;
