\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(38);

-- Needs and has, as a table of states: how a run gets there, and what wedged_runs says of it.

create temporary table states (nth integer generated always as identity, what text, reason text, build text);
insert into states (what, reason, build) values
-- (b) pending, or a replay that has not ended
('just started', null, $$select baton_test.start(%1$L)$$),
('started, its message purged', 'replay', $$select baton_test.start(%1$L); delete from baton.messages where run_id = %1$L$$),
('started, its message claimed', null, $$select baton_test.start(%1$L); select baton_test.take(%1$L)$$),
('started, its claim ran out', null, $$select baton_test.start(%1$L); select baton_test.take(%1$L, '0')$$),
('a replay is held', null, $$select baton_test.start(%1$L); select baton_test.replay(%1$L)$$),
('its claim ran out', null, $$select baton_test.start(%1$L); select baton_test.replay(%1$L);
  update baton.messages set visible_at = baton._now() where run_id = %1$L$$),
('a replay is held, its message purged', 'replay', $$select baton_test.start(%1$L); select baton_test.replay(%1$L);
  delete from baton.messages where run_id = %1$L$$),
('its connection is dead', 'replay', $$select baton_test.start(%1$L); select baton_test.replay(%1$L);
  update baton.runs set replay_backend = 2147483647 where run_id = %1$L$$),
('its connection is ours', null, $$select baton_test.start(%1$L); select baton_test.replay(%1$L);
  update baton.runs set replay_backend = pg_backend_pid() where run_id = %1$L$$),
('its connection is dead, a wake is there', null, $$select baton_test.start(%1$L); select baton_test.replay(%1$L);
  update baton.runs set replay_backend = 2147483647 where run_id = %1$L; select baton.wake_run(%1$L)$$),
('its connection is dead, bodies run under it', 'replay', $$select baton_test.start(%1$L);
  select baton_test.body(%1$L, m, d) from baton_test.replay(%1$L);
  update baton.runs set replay_backend = 2147483647 where run_id = %1$L$$),
('a replay is held, bodies run under it', null, $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d) from baton_test.replay(%1$L)$$),
('a replay was lost, its message is claimed again', null, $$select baton_test.start(%1$L); 
  select baton_test.replay(%1$L); update baton.messages set visible_at = baton._now() where run_id = %1$L; select baton_test.take(%1$L)$$),
-- Asleep
('a delayed start', null, $$select baton_test.start(%1$L, '1 hour')$$),
('a delayed start, its timer purged', null, $$select baton_test.start(%1$L, '1 hour'); delete from baton.messages where run_id = %1$L$$),
('a delayed start with a signal', null, $$select baton_test.start(%1$L, '1 hour'); select baton.signal_run(%1$L, 's'); delete from baton.messages where run_id = %1$L$$),
('a delayed start a microsecond ahead, its timer purged', null, $$select baton_test.start(%1$L, '1 microsecond'); delete from baton.messages where run_id = %1$L$$),
('a delayed start that is due, its timer purged', 'replay', $$select baton_test.start(%1$L, '1 hour'); delete from baton.messages where run_id = %1$L;
  update baton.runs set wake_at = baton._now() where run_id = %1$L$$),
-- Suspended
('suspended', null, $$select baton_test.idle(%1$L)$$),
('sleeping', null, $$select baton_test.idle(%1$L, baton._now() + interval '1 hour')$$),
('sleeping, its timer purged', null, $$select baton_test.idle(%1$L, baton._now() + interval '1 hour'); delete from baton.messages where run_id = %1$L$$),
-- (c) wake_at has passed
('its timer is due', null, $$select baton_test.idle(%1$L, baton._now())$$),
('its timer is due and purged', 'timer', $$select baton_test.idle(%1$L, baton._now()); delete from baton.messages where run_id = %1$L$$),
('a microsecond before that', null, $$select baton_test.idle(%1$L, baton._now() + interval '1 microsecond'); delete from baton.messages where run_id = %1$L$$),
('its timer is due and claimed', null, $$select baton_test.idle(%1$L, baton._now()); select baton_test.take(%1$L)$$),
-- (d) unread, or a wake that no grant has followed
('a signal', null, $$select baton_test.idle(%1$L); select baton.signal_run(%1$L, 's')$$),
('a signal, its wake purged', 'unread', $$select baton_test.idle(%1$L); select baton.signal_run(%1$L, 's'); delete from baton.messages where run_id = %1$L$$),
('unread, without a wake', 'unread', $$select baton_test.idle(%1$L); select baton.signal_run(%1$L, 's'); delete from baton.messages where run_id = %1$L;
  update baton.runs set wake_pending = false where run_id = %1$L$$),
('a signal that was read, beside a task with its message', null, $$select baton_test.idle(%1$L); select baton.signal_run(%1$L, 's');
  select baton_test.step(%1$L, 's', 'created'); select baton_test.task_message(%1$L, 's', 0); select baton.end_replay(%1$L, e, 2) from baton_test.replay(%1$L)$$),
('a wake, purged', 'unread', $$select baton_test.idle(%1$L); select baton.wake_run(%1$L); delete from baton.messages where run_id = %1$L$$),
('a wake, purged, while a timer waits', 'unread', $$select baton_test.idle(%1$L, baton._now() + interval '1 hour'); select baton.wake_run(%1$L);
  delete from baton.messages where message_id = (select r.wake_message_id from baton.runs as r where r.run_id = %1$L)$$),
('a wake, acked by force', 'unread', $$select baton_test.idle(%1$L); select baton.wake_run(%1$L); select baton.ack(m, d, true) from baton_test.take(%1$L)$$),
('a wake, claimed', null, $$select baton_test.idle(%1$L); select baton.wake_run(%1$L); select baton_test.take(%1$L)$$),
('a back-off', null, $$select baton_test.idle(%1$L); select baton.wake_run(%1$L); select baton.fail(m, d, 'x', '1 hour') from baton_test.replay(%1$L)$$),
('a back-off beside another wake', null, $$select baton_test.idle(%1$L); select baton.wake_run(%1$L);
  select baton.wake_run(%1$L) from baton_test.replay(%1$L); select baton_test.take(%1$L, '1 hour');
  select baton.fail(r.replay_message_id, r.replay_delivery, 'x', '1 hour') from baton.runs as r where r.run_id = %1$L$$),
('a back-off that has the key of older wakes', null, $$select baton_test.idle(%1$L); select baton.wake_run(%1$L);
  select baton.fail(m, d, 'x', '1 hour') from baton_test.replay(%1$L);
  update baton.messages set dedupe_key = baton._run_key(run_id, 'wake') where run_id = %1$L$$),
('a back-off without a key', null, $$select baton_test.idle(%1$L); select baton.wake_run(%1$L); select baton.fail(m, d, 'x', '1 hour') from baton_test.replay(%1$L);
  update baton.runs set wake_message_id = null where run_id = %1$L$$),
('parked', null, $$select baton_test.idle(%1$L); select baton.wake_run(%1$L); select baton.park(m, d, '1 hour') from baton_test.replay(%1$L)$$),
-- Messages that are kept for their bodies
('a body under a kept message', null, $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L)$$),
('a body under a kept message, and a lost wake', 'unread', $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L);
  update baton.runs set wake_pending = true, needs_driver = true where run_id = %1$L$$),
('a body under a kept message, and a sleep that has passed', 'timer', $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L);
  update baton.runs set wake_at = baton._now() where run_id = %1$L$$),
('a body under a kept message, and a lost sibling', 'task', $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L);
  select baton_test.step(%1$L, 't', 'created')$$),
-- (a) unfinished tasks
('a task without a message', 'task', $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L$$),
('a task with its message', null, $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L;
  select baton_test.task_message(%1$L, 's', 0)$$),
('two tasks, one with its message', 'task', $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created', 'created'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L;
  select baton_test.task_message(%1$L, 's', 1)$$),
('a task that waits for its retry', null, $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L;
  select baton_test.task_message(%1$L, 's', 0); update baton.messages set visible_at = baton._now() + interval '1 hour' where run_id = %1$L$$),
('tasks that have ended', null, $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'completed', 'failed', 'skipped', 'cancelled'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L$$),
('a body whose owner is gone', 'task', $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L);
  delete from baton.messages where run_id = %1$L$$),
('a body whose owner''s claim ran out', null, $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L);
  update baton.messages set visible_at = baton._now() where run_id = %1$L$$),
('a body of an earlier delivery, while the next one runs others', 'task', $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d, 's'), baton_test.body(%1$L, m, d + 1, 't'), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L)$$),
('a body under a message that was given back', 'task', $$select baton_test.start(%1$L); select baton_test.body(%1$L, m, d), baton.end_replay(%1$L, e, 1) from baton_test.replay(%1$L);
  update baton.messages set claimed_at = null, visible_at = baton._now() + interval '1 hour', dedupe_key = %1$L || e'\x1fx' where run_id = %1$L$$),
('a lost task beside a backstop', 'task', $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L;
  insert into baton.messages (queue_name, kind, run_id, dedupe_key, visible_at, created_at)
  values ('q', 'run', %1$L, concat_ws(e'\x1f', %1$L, 's', 0, 'backstop', 1), baton._now() + interval '1 hour', baton._now())$$),
('a lost task beside a backstop that is due', null, $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created'); update baton.runs set status = 'running', needs_driver = true where run_id = %1$L;
  insert into baton.messages (queue_name, kind, run_id, dedupe_key, visible_at, created_at)
  values ('q', 'run', %1$L, concat_ws(e'\x1f', %1$L, 's', 0, 'backstop', 1), baton._now(), baton._now())$$),
('a task message is no driver of a lost wake', 'unread', $$select baton_test.idle(%1$L); select baton_test.step(%1$L, 's', 'created'); select baton_test.task_message(%1$L, 's', 0);
  update baton.runs set wake_pending = true, needs_driver = true where run_id = %1$L$$),
-- Ended
('ended', null, $$select baton_test.start(%1$L); select baton.cancel_run(%1$L, 'x'); delete from baton.messages where run_id = %1$L$$);

do $$
declare
  v_state states;
  v_statement text;
begin
  for v_state in select s.* from states as s order by s.nth loop
    foreach v_statement in array string_to_array(format(v_state.build, v_state.what), ';') loop
      execute v_statement;
    end loop;
  end loop;
end;
$$;
create temporary table before on commit drop as
select s.what, s.reason, baton_test.messages(s.what) as messages, baton_test.run(s.what) as run from states as s;

select results_eq(
  $$select b.what, w.reason from before as b left join baton.wedged_runs as w on w.run_id = b.what order by b.what$$,
  $$select b.what, b.reason from before as b order by b.what$$,
  'wedged: exactly the runs that need a driver and have none'
);
select is((select count(*) from states as s where s.reason is null), 34::bigint, 'wedged: in 34 states nothing is needed');
select is((select count(*) from states as s where s.reason is not null), 21::bigint, 'wedged: in 21 something is');

-- A round of recovery

select results_eq(
  $$select r.run_id, r.reason from baton.recover_runs() as r order by r.run_id$$,
  $$select b.what, b.reason from before as b where b.reason is not null order by b.what$$, 'recovery: wakes them'
);
select is(baton_test.wedged(), null, 'recovery: no run is wedged after it');
select results_eq(
  $$select b.what from before as b where b.reason is null
    and (baton_test.messages(b.what) is distinct from b.messages or baton_test.run(b.what) is distinct from b.run)$$,
  array[]::text[], 'recovery: the others are as they were: live holders, delayed starts, back-offs, sleepers, kept messages'
);
select results_eq(
  $$select b.what from before as b where b.reason is not null
    and baton_test.messages(b.what) is distinct from concat_ws(', ', b.messages, 'wake 00:00:00')$$,
  array[]::text[], 'recovery: each wedged run has one more message, a wake that is due'
);
select is_empty(
  $$select r.run_id from baton.runs as r inner join before as b on b.what = r.run_id where b.reason is not null and not r.wake_pending$$,
  'recovery: which no grant has followed'
);
select results_eq(
  $$select i.run_id, i.detail ->> 'reason', i.queue_name from baton.incidents as i where i.kind = 'run_recovered' order by i.run_id$$,
  $$select b.what, b.reason, 'q' from before as b where b.reason is not null order by b.what$$, 'recovery: an incident tells of each'
);
select is_empty($$select * from baton.recover_runs()$$, 'recovery: the next round finds nothing');

-- Queues

select baton_test.start('of a', queue_name => 'a'), baton_test.start('of b', queue_name => 'b') \g /dev/null
delete from baton.messages where queue_name in ('a', 'b');
select results_eq($$select run_id from baton.recover_runs('a')$$, array['of a'], 'recovery: of a queue touches no other queue''s runs');
select is(baton_test.messages('of b'), null, 'recovery: they stay as they are');
select results_eq($$select run_id from baton.recover_runs('b')$$, array['of b'], 'recovery: until theirs');
delete from baton.messages where queue_name = 'a';
select is_empty($$select * from baton.recover_runs('b')$$, 'recovery: again');
select is_empty($$select * from baton.recover_runs('none')$$, 'recovery: of a queue without runs');
select results_eq($$select run_id from baton.recover_runs()$$, array['of a'], 'recovery: without a name it is of all');
select baton_test.idle('timer of q', baton._now()) \g /dev/null
delete from baton.messages where run_id = 'timer of q';
select is_empty($$select * from baton.recover_runs('a')$$, 'recovery: a passed sleep in another queue is left alone');
select results_eq($$select run_id from baton.recover_runs('q')$$, array['timer of q'], 'recovery: and found by its own');

-- Paging

delete from baton.messages;
delete from baton.runs;
delete from baton.recovery_cursors;
select count(*) from generate_series(1, 25) as n, lateral (select baton_test.start('healthy ' || lpad(n::text, 2, '0'))) as s \g /dev/null
select baton_test.start('lost') \g /dev/null
delete from baton.messages where run_id = 'lost';
create temporary table rounds as
select n, array(select r.run_id from baton.recover_runs(max_runs => 5 + 0 * n) as r) as found from generate_series(1, 7) as n;
select is((select array_agg(r.n) from rounds as r where r.found = array['lost']), array[6], 'recovery: pages past healthy runs, max_runs a call');
delete from baton.messages where run_id = 'healthy 01';
select results_eq($$select run_id from baton.recover_runs(max_runs => 5)$$, array[]::text[], 'recovery: goes on from its cursor');
select results_eq($$select run_id from baton.recover_runs(max_runs => 100)$$, array[]::text[], 'recovery: to the end');
select results_eq($$select run_id from baton.recover_runs(max_runs => 5)$$, array['healthy 01'], 'recovery: and then from the start');
delete from baton.recovery_cursors;
update baton.runs set status = 'suspended', wake_pending = false, needs_driver = false, wake_at = baton._now();
delete from baton.messages where run_id = 'healthy 25';
create temporary table sleepers as
select n, array(select r.run_id from baton.recover_runs(max_runs => 5 + 0 * n) as r) as found from generate_series(1, 6) as n;
select is((select array_agg(r.n) from sleepers as r where r.found = array['healthy 25']), array[5], 'recovery: the same for passed sleeps');
select is_empty($$select * from baton.recover_runs(max_runs => 0)$$, 'recovery: of no run at all');
delete from baton.recovery_cursors;
delete from baton.messages;
update baton.runs set wake_at = null, wake_pending = false, needs_driver = false;
update baton.runs set status = 'running', needs_driver = true where run_id in ('healthy 01', 'healthy 02', 'healthy 03');
insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
select r.run_id, 's', 6000, 6000, 1 from baton.runs as r where r.status = 'running';
insert into baton.tasks (run_id, step_slug, task_index)
select r.run_id, 's', 0 from baton.runs as r where r.status = 'running';
select results_eq(
  $$select run_id from baton.recover_runs() order by run_id$$, array['healthy 01', 'healthy 02'], 'recovery: looks at 10,000 tasks a call'
);
select results_eq($$select run_id from baton.recover_runs()$$, array['healthy 03'], 'recovery: and goes on with the next');

-- tick

delete from baton.messages;
update baton.steps set open_tasks = 1;
update baton.settings set recovery = false;
select is_empty($$select t.part from baton.tick() as t where t.part = 'recovery'$$, 'tick: with settings.recovery off nothing is recovered');
select isnt(baton_test.wedged(), null, 'tick: then runs stay wedged');
update baton.settings set recovery = true;
select results_eq($$select t.changed, t.error from baton.tick() as t where t.part = 'recovery'$$, $$values (3, null::text)$$, 'tick: recovers, and says how many');
select is(baton_test.wedged(), null, 'tick: none is left');

-- Arguments

select throws_ok($$select * from baton.recover_runs(max_runs => -1)$$, '22023', null, 'recovery: a negative limit is refused');
select throws_ok(format('select * from baton.recover_runs(%L)', n.name), '22023', null, 'recovery: a queue that no queue can be: ' || n.what)
from (values ('', 'none'), (repeat('x', 201), 'too long'), (e'a\nb', 'two lines')) as n (name, what);
select lives_ok(format('select * from baton.recover_runs(%L)', repeat('x', 200)), 'recovery: a queue with a long name');
select lives_ok($$select * from baton.recover_runs(null, null)$$, 'recovery: nulls are the defaults');

-- Each round begins anew

select baton_test.idle('twice', baton._now()) \g /dev/null
select is_empty($$select from baton.recover_runs() as r where r.run_id = 'twice'$$, 'recover: its timer is there');
delete from baton.messages where run_id = 'twice';
select results_eq(
  $$select r.reason from baton.recover_runs() as r where r.run_id = 'twice'$$, $$values ('timer')$$, 'recover: purged after that it is woken in the next round'
);
select * from finish();
rollback;
