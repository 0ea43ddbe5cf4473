\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(39);

select results_eq(
  $$select * from baton.start_run('w', '{"n": 1}', 'a')$$, $$values ('created', 'a', 'pending')$$, 'start: a run'
);
select is(baton_test.run('a'), 'pending 1/0/0 0/0 wake', 'start: pending, and a wake is asked for');
select is(baton_test.messages('a'), 'wake 00:00:00', 'start: with its first message');
select results_eq($$select e.seq, e.type, e.payload from baton.read_events('a') as e$$, $$values (1::bigint, 'run_created', '{"n": 1}'::jsonb)$$, 'start: the input is in its first event');
select results_eq($$select * from baton.start_run('w', '{"n": 1}', 'a')$$, $$values ('exists', 'a', 'pending')$$, 'start: again: it exists');
select is(baton_test.messages('a'), 'wake 00:00:00', 'start: which sends nothing');
select is_empty(
  $$select c.* from (values ('v', '{"n": 1}', 'default'), ('w', '{"n": 2}', 'default'), ('w', null, 'default'), ('w', '{"n": 1}', 'q')) as c (workflow, input, queue),
    baton.start_run(c.workflow, c.input::jsonb, 'a', c.queue) as s where s.outcome <> 'conflict' or s.status <> 'pending'$$,
  'start: with another workflow, input or queue it is a conflict'
);
select outcome from baton.cancel_run('a', 'x') \g /dev/null
select results_eq($$select * from baton.start_run('w', '{"n": 1}', 'a', null, null)$$, $$values ('exists', 'a', 'cancelled')$$, 'start: an ended run exists too');
select is((select outcome from baton.start_run('w', null, 'b')), 'created', 'start: without an input');
select is((select outcome from baton.start_run('w', null, 'b')), 'exists', 'start: which is the same as itself');
select is((select outcome from baton.start_run('w', 'null', 'b')), 'conflict', 'start: and not as a JSON null');
select results_eq(
  $$select r.outcome, r.workflow_name, r.queue_name, r.status, r.output, r.error, r.created_at, r.ended_at, r.wake_at from baton.get_run('b') as r$$,
  $$values ('found', 'w', 'default', 'pending', null::jsonb, null::jsonb, baton._now(), null::timestamptz, null::timestamptz)$$, 'get: how it stands'
);
select is((select outcome from baton.get_run('nobody')), 'unknown', 'get: an unknown run');

-- Ids

select run_id as first from baton.start_run('w', null) \gset
select baton_test.advance('1 millisecond') \g /dev/null
select run_id as second from baton.start_run('w', null) \gset
select ok(:'first' ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$', 'start: without a run_id one is made, a UUID of version 7');
select ok(:'first' collate "C" < :'second' collate "C", 'start: ordered by time');
select is_empty(
  $$select n.name from baton_test.bad_names(200) as n where baton_test.sqlstate_of(format('select baton.start_run(%L, null)', n.name)) <> '22023'
    or baton_test.sqlstate_of(format('select baton.start_run(''w'', null, %L)', n.name)) <> '22023'
    or baton_test.sqlstate_of(format('select baton.start_run(''w'', null, null, %L)', n.name)) <> '22023'$$, 'start: bad names are refused'
);
select is_empty(
  $$select n.name from baton_test.odd_names(200) as n, baton.start_run(n.name, null, n.name, n.name) as s where s.outcome <> 'created'$$, 'start: odd ones are taken'
);
select throws_ok($$select baton.start_run('w', null, null, 'baton.x')$$, '22023', null, 'start: the package''s queues are refused');
select throws_ok($$select baton.start_run(null, null)$$, '22023', null, 'start: a workflow without a name is refused');
update baton.settings set max_payload_bytes = 1024;
select throws_ok($$select baton.start_run('w', to_jsonb(repeat('x', 1024)))$$, '54000', null, 'start: an input over the limit is refused');
update baton.settings set max_payload_bytes = 1048576;

-- Delayed starts

select is(baton_test.start('d', '1 hour'), 'created', 'delay: a delayed start');
select is(baton_test.run('d'), 'pending 1/0/0 0/0 01:00:00', 'delay: is a wake_at, and no wake');
select is(baton_test.messages('d'), 'timer 01:00:00', 'delay: with its timer');
select is((select wake_at - baton._now() from baton.get_run('d')), interval '1 hour', 'delay: which one can ask for');
select outcome from baton.signal_run('d', 's') \g /dev/null
select is(baton_test.messages('d'), 'timer 01:00:00', 'delay: a signal does not pull it forward');
select is(baton_test.run('d'), 'pending 2/2/0 0/0 01:00:00', 'delay: it is in the log');
select baton_test.advance('59 minutes 59.999999 seconds') \g /dev/null
select outcome from baton.signal_run('d', 's') \g /dev/null
select is((select m from baton_test.take('d')), null, 'delay: a microsecond before its time it is asleep');
select baton_test.advance('1 microsecond') \g /dev/null
select outcome from baton.signal_run('d', 's') \g /dev/null
select is(baton_test.messages('d'), 'timer 00:00:00, wake 00:00:00', 'delay: at its time a signal wakes');
select m as dm, d as dd, e as de from baton_test.replay('d') \gset
select is(baton_test.finish_replay('d', :de, 4), 'ended suspended', 'delay: it is replayed');
select is(baton_test.run('d'), 'suspended 4/4/4 0/0', 'delay: and its sleep is over');
select baton_test.start('early', '1 hour') \g /dev/null
select outcome from baton.signal_run('early', 's') \g /dev/null
select is((select outcome from baton.wake_run('early')), 'woken', 'delay: wake_run starts it early');
select is(baton_test.messages('early'), 'wake 00:00:00', 'delay: its timer gives way to a wake');
select is(baton_test.run('early'), 'pending 2/2/0 0/0 wake', 'delay: and it is not asleep any more');
select baton_test.start('gone', '1 hour') \g /dev/null
select is((select outcome from baton.cancel_run('gone', 'x')), 'done', 'delay: it can be cancelled');
select is(baton_test.messages('gone'), null, 'delay: its timer goes');
select is_empty(
  $$select d.delay from unnest(array['-1 microsecond', '10 years 1 microsecond']) as d (delay)
  where baton_test.sqlstate_of(format('select baton.start_run(''w'', null, delay => %L)', d.delay)) <> '22023'$$, 'delay: below zero or over ten years it is refused'
);
select is(baton_test.start('far', '10 years'), 'created', 'delay: ten years are taken');
select baton_test.start('later', '1 hour') \g /dev/null
select is((select r.needs_driver from baton.runs as r where r.run_id = 'later'), false, 'delay: until then nobody should be driving it');
select baton_test.advance('1 hour') \g /dev/null
select baton_test.replay('later') \g /dev/null
select is((select r.needs_driver from baton.runs as r where r.run_id = 'later'), true, 'delay: whoever is granted its replay should');
select * from finish();
rollback;
