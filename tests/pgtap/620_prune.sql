\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(102);

-- Calls it, and answers in words.
create function baton_test.prune(older_than interval default '0', max_rows integer default 1000)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', p.rows_removed, case when p.more then 'more' end) from baton.prune(prune.older_than, prune.max_rows) as p;
end;

-- How many rows of a run are there: run, events, steps, tasks, messages.
create function baton_test.left_of(run_id text)
returns text
language sql
stable
begin atomic
  select concat_ws(
    '/',
    (select count(*) from baton.runs as r where r.run_id = left_of.run_id),
    (select count(*) from baton.events as e where e.run_id = left_of.run_id),
    (select count(*) from baton.steps as s where s.run_id = left_of.run_id),
    (select count(*) from baton.tasks as t where t.run_id = left_of.run_id),
    (select count(*) from baton.messages as m where m.run_id = left_of.run_id)
  );
end;

-- A run with a step of so many tasks, all of them queued, that has been cancelled: 5 rows and one a task.
create function baton_test.ended(run_id text, tasks integer default 1)
returns void
language plpgsql
volatile
as $$
begin
  perform baton_test.queued(ended.run_id, ended.tasks);
  perform baton.cancel_run(ended.run_id, 'enough');
end;
$$;

-- Old runs, whole, the oldest first

select is(baton_test.prune(), '0', 'runs: there is nothing');
select baton_test.ended('a'), baton_test.advance('1 hour') \g /dev/null
select baton_test.ended('c', 2), baton_test.advance('1 hour') \g /dev/null
select baton_test.ended('b', 3), baton_test.queued('open', 2), baton_test.advance('1 hour') \g /dev/null
select is(baton_test.left_of('c'), '1/3/1/2/0', 'runs: (this is what one of them has)');
select is(baton_test.prune('3 hours 1 microsecond'), '0', 'runs: none is old enough');
select is(baton_test.prune('3 hours'), '6', 'runs: from that age on one goes');
select is(baton_test.left_of('a'), '0/0/0/0/0', 'runs: as a whole');
select is(baton_test.left_of('c') || ' ' || baton_test.left_of('b'), '1/3/1/2/0 1/3/1/3/0', 'runs: the younger ones stay');
select is(baton_test.prune(max_rows => 14), '7 more', 'runs: the oldest first; one that does not fit any more is left for the next call');
select is(baton_test.left_of('c') || ' ' || baton_test.left_of('b'), '0/0/0/0/0 1/3/1/3/0', 'runs: as a whole too');
select is((select r.pruned_at from baton.runs as r where r.run_id = 'b'), null, 'runs: and it is not marked');
select is((select g.status from baton.get_run('b') as g), 'cancelled', 'runs: so it is known');
select is(baton_test.prune(max_rows => 8), '8 more', 'runs: that call takes it');
select is(baton_test.left_of('b'), '0/0/0/0/0', 'runs: all of it');
select is(baton_test.prune(max_rows => 8), '0', 'runs: until nothing is left');
select is(baton_test.left_of('open'), '1/2/1/2/2', 'runs: an open one stays, however old it is');
select is((select s.outcome from baton.start_run('other', '2', 'a') as s), 'created', 'runs: a pruned id may be used again');
select is((select string_agg(e.type, ' ') from baton.read_events('a') as e), 'run_created', 'runs: and begins anew');
select baton.cancel_run('a', 'x') \g /dev/null
select is(baton_test.prune(max_rows => 0), '0', 'runs: no rows, nothing to call again for');
select is(baton_test.prune(), '3', 'runs: 1,000 rows by default');

-- Unknown ids

select is((select g.outcome from baton.get_run('c') as g), 'unknown', 'pruned: get_run');
select is((select concat_ws(' ', s.outcome, s.status) from baton.signal_run('c', 's') as s), 'terminal', 'pruned: signal_run, without a status');

-- Leftover messages

select m as dm, d as dd from baton_test.inline('d') \gset
select m as em, d as ed from baton_test.inline('e') \gset
select baton.cancel_run('d', 'x'), baton.cancel_run('e', 'x') \g /dev/null
select is(baton_test.prune(), '0', 'messages: a handler lives that is still to hear of the end');
select is((select x.outcome from baton.extend(:em, :ed) as x), 'cancelled', 'messages: it does');
select is(baton_test.prune(), '7', 'messages: then its run goes');
select baton_test.advance('29.999999 seconds') \g /dev/null
select is(baton_test.prune(), '0', 'messages: the claim of the other one lives to its end');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.left_of('d'), '1/4/1/1/1', 'messages: (there is one)');
select is(baton_test.prune(), '8', 'messages: at which it is a leftover');
select is(baton_test.left_of('d'), '0/0/0/0/0', 'messages: and goes along');
select is((select x.outcome from baton.extend(:dm, :dd) as x), 'lost', 'messages: whoever comes later is lost');

-- A run of more rows than a call may remove

select baton_test.queued('f', 6) \g /dev/null
select m as fm, d as fd, a as fa from baton_test.started('f', 0, '1 minute') \gset
select m as f1m, d as f1d, a as f1a from baton_test.started('f', 1, '1 minute') \gset
select is(baton_test.complete('f', :fm, :fd), 'completed', 'large: (a task completes)');
select baton.cancel_run('f', 'x'), baton_test.advance('1 minute') \g /dev/null
select baton_test.ended('g') \g /dev/null
select is(baton_test.left_of('f'), '1/6/1/6/1', 'large: (a run of 15 rows)');
select is(baton_test.prune(max_rows => 13), '13 more', 'large: of which a call takes what it may');
select is(baton_test.left_of('f'), '1/1/0/0/0', 'large: its own row comes last');
select is((select r.pruned_at from baton.runs as r where r.run_id = 'f'), baton._now(), 'large: it is marked');
select is(baton_test.left_of('g'), '1/3/1/1/0', 'large: the next one has to wait');
select is(baton_test.prune('10 years', max_rows => 1), '1 more', 'large: what was begun goes on, whatever the age');
select is(baton_test.left_of('f'), '1/0/0/0/0', 'large: its row is left');
select is(baton_test.prune(max_rows => 1), '1 more', 'large: and goes');
select is(baton_test.left_of('f'), '0/0/0/0/0', 'large: then nothing is left');
select is(baton_test.prune(max_rows => 6), '6 more', 'large: and it is the turn of the next one');

select baton_test.queued('h', 20), baton.cancel_run('h', 'x') \g /dev/null
select is(baton_test.left_of('h'), '1/3/1/20/0', 'steps: (a step of 20 tasks)');
select is(baton_test.prune(max_rows => 8), '8 more', 'steps: goes in parts too');
select is(baton_test.left_of('h'), '1/2/1/13/0', 'steps: the last event first, then the tasks from the last one on');
select is((select max(t.task_index) from baton.tasks as t where t.run_id = 'h'), 12, 'steps: the first ones are left');
select is(baton_test.prune(max_rows => 13), '13 more', 'steps: when its tasks are gone');
select is(baton_test.left_of('h'), '1/2/1/0/0', 'steps: the step is left');
select is(baton_test.prune(max_rows => 1), '1 more', 'steps: until there is room');
select is(baton_test.left_of('h'), '1/2/0/0/0', 'steps: for its row too');
select is(baton_test.prune(), '3', 'steps: and the rest');

select m as im, d as id, e as ie from baton_test.made('i', 2) \gset
select baton_test.step('i', :ie, 't', 0), baton_test.step('i', :ie, 'u', 3) \g /dev/null
select baton_test.dispatch('i', :ie, 0), baton_test.finish('i', :ie), baton.cancel_run('i', 'x') \g /dev/null
select is(baton_test.left_of('i'), '1/6/3/5/0', 'steps: (three of them, one without tasks)');
select is((select array_agg(baton_test.prune(max_rows => 4) order by n.n) from generate_series(1, 4) as n (n)), '{4 more,4 more,4 more,3}', 'steps: each call takes what it may');
select is(baton_test.left_of('i'), '0/0/0/0/0', 'steps: all goes in the end');

select baton_test.inline('j') \g /dev/null
select is(
  (
    select array_agg(a.outcome order by n.n)
    from generate_series(1, 3) as n (n)
    cross join baton.runs as r
    cross join lateral baton.advance_run(
      'j', r.replay_epoch, case n.n when 1 then 's' else 's' || n.n - 1 end, null, 's' || n.n, null
    ) as a
    where r.run_id = 'j'
  ), '{advanced,advanced,advanced}', 'short way: (three times)'
);
select baton.cancel_run('j', 'x'), baton_test.advance('1 hour') \g /dev/null
select is(baton_test.left_of('j'), '1/7/4/4/1', 'short way: (four steps)');
select is((select array_agg(baton_test.prune(max_rows => 4) order by n.n) from generate_series(1, 4) as n (n)), '{4 more,4 more,4 more,4 more}', 'short way: each call takes what it may');
select is(baton_test.left_of('j'), '1/0/0/0/0', 'short way: all of its steps');
select is(baton_test.prune(), '1', 'short way: and the run');

-- Marked, it is unknown to every verb and view

select baton_test.queued('z', 6) \g /dev/null
select m as zm, d as zd, a as za from baton_test.started('z', 0, '1 hour') \gset
select baton_test.take_task('z', 1, '1 hour') \g /dev/null
select baton.cancel_run('z', 'x'), baton_test.advance('1 hour') \g /dev/null
select is(baton_test.prune(max_rows => 5), '5 more', 'marked: (a run of which much is left)');
select is(baton_test.left_of('z'), '1/2/1/5/0', 'marked: (this much)');
select is((select concat_ws(' ', s.outcome, s.status) from baton.start_run('w', '{"in": 1}', 'z', 'z') as s), 'conflict', 'marked: start_run');
select is((select concat_ws(' ', g.outcome, g.status) from baton.get_run('z') as g), 'unknown', 'marked: get_run');
select is_empty($$select e.seq from baton.read_events('z') as e$$, 'marked: read_events');
select is((select concat_ws(' ', s.outcome, s.status) from baton.signal_run('z', 's') as s), 'terminal', 'marked: signal_run');
select is((select concat_ws(' ', w.outcome, w.status) from baton.wake_run('z') as w), 'terminal', 'marked: wake_run');
select is((select concat_ws(' ', c.outcome, c.status) from baton.cancel_run('z', 'x') as c), 'terminal', 'marked: cancel_run');
select is((select concat_ws(' ', c.outcome, c.status) from baton.complete_run('z', 1, '1') as c), 'terminal', 'marked: complete_run');
select is((select concat_ws(' ', f.outcome, f.status) from baton.fail_run('z', 1, '1') as f), 'terminal', 'marked: fail_run');
select is((select a.outcome from baton.append_event('z', 1, 'x.y') as a), 'terminal', 'marked: append_event');
select is((select concat_ws(' ', e.outcome, e.status) from baton.end_replay('z', 1, 1) as e), 'terminal', 'marked: end_replay');
select is((select r.outcome from baton.release_replay('z') as r), 'none', 'marked: release_replay');
select is((select c.outcome from baton.create_step('z', 1, 's', '[1, 2, 3, 4, 5, 6]') as c), 'terminal', 'marked: create_step');
select is(baton_test.dispatch('z', 1), 'terminal', 'marked: dispatch_tasks');
select is((select s.outcome from baton.skip_step('z', 's') as s), 'unknown', 'marked: skip_step');
select is(baton_test.complete('z', :zm, :zd, :za), 'too_late', 'marked: complete_task');
select is(baton_test.fail('z', :zm, :zd, :za), 'too_late', 'marked: fail_task');
select is(baton_test.release('z'), 'unknown', 'marked: release_task');
select is(
  (select t.outcome from baton.terminal_tasks('[{"run_id": "z", "step_slug": "s", "task_index": 0, "attempt": 1}]') as t), 'unknown',
  'marked: terminal_tasks'
);
insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, visible_at, delivery, claimed_at, created_at)
select 'z', k.kind, 'z', 's', 0, baton._now() + interval '1 minute', k.delivery, baton._now(), baton._now()
from (values ('run', 7), ('task', 8)) as k (kind, delivery);
select is(
  (select concat_ws(' ', b.outcome, b.status) from baton.messages as m, baton.begin_replay(m.message_id, 7) as b where m.delivery = 7),
  'terminal', 'marked: begin_replay'
);
select is((select baton_test.begin(m.message_id, 8) from baton.messages as m where m.delivery = 8), 'skip', 'marked: start_task');
select is_empty($$select r.run_id from baton.run_overview as r where r.run_id = 'z'$$, 'marked: run_overview');
select is_empty($$select s.step_slug from baton.step_outputs as s where s.run_id = 'z'$$, 'marked: step_outputs');
select baton_test.prune() \g /dev/null
select is(baton_test.left_of('z'), '0/0/0/0/0', 'marked: (the rest)');

-- Then dead messages, incidents, workers

delete from baton.incidents;
select baton_test.hold('mail') \g /dev/null
select baton.fail(m.message_id, m.delivery, 'x', final => true) from baton.messages as m where m.queue_name = 'mail' \g /dev/null
select baton.send('mail', '1') \g /dev/null
select is((select count(*) from baton.dead_letters as d), 1::bigint, 'rest: (a dead message, and the incident of its death)');
select baton_test.advance('1 hour'), baton_test.ended('j') \g /dev/null
select is(baton_test.prune('1 hour 1 microsecond'), '0', 'rest: both are too young');
select is(baton_test.prune('1 hour', 1), '1 more', 'rest: from that age on the dead message goes');
select is(
  concat_ws('/', (select count(*) from baton.dead_messages), (select count(*) from baton.incidents)), '0/1', 'rest: the incident after it'
);
select is(baton_test.prune('1 hour'), '1', 'rest: in the next call');
select is((select count(*) from baton.messages as m where m.queue_name = 'mail'), 1::bigint, 'rest: a live message stays');
select is(baton_test.prune(), '6', 'rest: (the run)');

select baton.register_worker_function('p', start_mode => 'process'), baton.register_worker_function('h') \g /dev/null
update baton.settings set transport = 'outbox', base_url = 'http://h';
select baton.register_worker(baton_test.worker(n.n), 'p') from generate_series(1, 4) as n (n) \g /dev/null
select r.invocation_id as inv from baton.reserve_worker_invocation('h') as r \gset
select baton.accept_worker_invocation('h', :'inv', baton_test.worker(5)) \g /dev/null
select baton_test.queued('k') \g /dev/null
select m as km, d as kd from baton_test.take_task('k', 0, worker_id => baton_test.worker(2)) \gset
select baton_test.begin(:km, :kd) \g /dev/null
select baton_test.queued('of nobody') \g /dev/null
select m as nm, d as nd from baton_test.take_task('of nobody', 0) \gset
select baton_test.begin(:nm, :nd) \g /dev/null
select baton.stop_worker(baton_test.worker(n.n)) from generate_series(2, 5) as n (n) \g /dev/null
select baton.stop_worker(baton_test.worker(4), draining => true) \g /dev/null
update baton.workers set stopped_at = null where worker_id = baton_test.worker(4);
delete from baton.incidents;
select baton_test.advance('1 hour') \g /dev/null
select is(baton_test.prune('1 hour 1 microsecond'), '0', 'workers: too young');
select is(baton_test.prune('1 hour'), '1', 'workers: one that stopped, and is named by nothing, goes');
select is(
  (select array_agg(right(w.worker_id::text, 1) order by w.worker_id) from baton.workers as w), '{1,2,4,5}',
  'workers: not one that lives or drains, has a started task, or is the last one of its function'
);
select is(baton_test.complete('k', :km, :kd), 'completed ended', 'workers: (the task ends)');
select is(baton_test.prune('1 hour'), '1', 'workers: then its worker goes too');

-- Arguments

select is(baton_test.sqlstate_of('select baton.prune(null)'), '22023', 'arguments: an age is wanted');
select is(baton_test.sqlstate_of('select baton.prune(''-1 second'')'), '22023', 'arguments: no age');
select is(baton_test.sqlstate_of('select baton.prune(''1 day'', -1)'), '22023', 'arguments: no number');
select is((select p.rows_removed from baton.prune('0', null) as p), 0, 'arguments: null is the default');

-- health

create function baton_test.late()
returns text
language sql
volatile
begin atomic
  select string_agg(concat_ws(' | ', h.severity, h.detail), ', ') from baton.health() as h where h.finding = 'retention';
end;
select baton_test.ended('l'), baton_test.advance('2 days') \g /dev/null
select is(baton_test.late(), null, 'health: without settings.retention nothing is late');
update baton.settings set retention = '1 day';
select is(baton_test.late(), null, 'health: up to a day late is as it should be');
select baton_test.advance('1 microsecond') \g /dev/null
select is(baton_test.late(), 'warning | the oldest ended run has ended 2 days ago', 'health: after that nobody prunes');
select is(baton_test.prune('1 day'), '6', 'health: (somebody does)');
select is(baton_test.late(), null, 'health: then all is well');
select * from finish();
rollback;
