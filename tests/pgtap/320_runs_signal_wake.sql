\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(38);

-- signal_run

select baton_test.idle('a', baton._now() + interval '1 hour') \g /dev/null
select results_eq($$select * from baton.signal_run('a', 'paid', '{"by": 1}', 'k')$$, $$values ('signalled', 'suspended')$$, 'signal: a run');
select is(baton_test.run('a'), 'suspended 2/2/1 0/0 wake 01:00:00', 'signal: asks for a replay');
select is(baton_test.messages('a'), 'timer 01:00:00, wake 00:00:00', 'signal: and wakes, while its timer waits on');
select results_eq(
  $$select e.type, e.correlation_id, e.payload from baton.read_events('a', 1) as e$$,
  $$values ('signal_received', 'k', '{"name": "paid", "payload": {"by": 1}}'::jsonb)$$, 'signal: it is in the log'
);
select results_eq($$select * from baton.signal_run('a', 'other', null, 'k')$$, $$values ('duplicate', 'suspended')$$, 'signal: a second one with its key is a duplicate');
select is(baton_test.run('a'), 'suspended 2/2/1 0/0 wake 01:00:00', 'signal: which changes nothing');
select is((select outcome from baton.signal_run('a', 'paid')), 'signalled', 'signal: without a key');
select is((select outcome from baton.signal_run('a', 'paid')), 'signalled', 'signal: as often as one likes');
select is(baton_test.messages('a'), 'timer 01:00:00, wake 00:00:00', 'signal: all share one wake');
select baton_test.idle('b') \g /dev/null
select is((select outcome from baton.signal_run('b', 'paid', null, 'k')), 'signalled', 'signal: a key is a run''s own');
select m as am, d as ad from baton_test.take('a') \gset
select outcome from baton.signal_run('a', 's') \g /dev/null
select is(baton_test.messages('a'), 'timer 01:00:00, wake 00:00:30 claimed', 'signal: a claimed wake is shared too, its grant is still to come');
select b.replay_epoch as ae from baton.begin_replay(:am, :ad) as b \gset
select outcome from baton.signal_run('a', 's') \g /dev/null
select is(baton_test.messages('a'), 'timer 01:00:00, keyless 00:00:30 claimed, wake 00:00:00', 'signal: after the grant there is another');
select outcome from baton.cancel_run('a', 'x') \g /dev/null
select results_eq($$select * from baton.signal_run('a', 's')$$, $$values ('terminal', 'cancelled')$$, 'signal: of an ended run');
select results_eq($$select * from baton.signal_run('nobody', 's')$$, $$values ('terminal', null::text)$$, 'signal: of an unknown run');
select is(baton_test.log('a'), 'run_created signal_received signal_received signal_received signal_received signal_received run_cancelled', 'signal: an ended log gets none');
select is_empty(
  $$select n.name from baton_test.bad_names(200) as n where baton_test.sqlstate_of(format('select baton.signal_run(''b'', %L)', n.name)) <> '22023'$$, 'signal: bad names are refused'
);
select is_empty(
  $$select n.name from baton_test.bad_names(500) as n where baton_test.sqlstate_of(format('select baton.signal_run(''b'', ''s'', null, %L)', n.name)) <> '22023'$$, 'signal: bad keys too'
);
update baton.settings set max_payload_bytes = 1024;
select throws_ok($$select baton.signal_run('b', 's', to_jsonb(repeat('x', 1024)))$$, '54000', null, 'signal: a payload over the limit is refused');
update baton.settings set max_payload_bytes = 1048576;

-- wake_run

select baton_test.idle('w') \g /dev/null
select results_eq($$select * from baton.wake_run('w')$$, $$values ('woken', 'suspended')$$, 'wake: a run');
select is(baton_test.run('w'), 'suspended 1/0/1 0/0 wake', 'wake: is noted, without an event');
select is(baton_test.messages('w'), 'wake 00:00:00', 'wake: has one message');
select r.ctid as written from baton.runs as r where r.run_id = 'w' \gset
select outcome from baton.wake_run('w') \g /dev/null
select is(baton_test.messages('w'), 'wake 00:00:00', 'wake: which all share until a replay begins');
select is((select r.ctid from baton.runs as r where r.run_id = 'w'), :'written'::tid, 'wake: the later ones write nothing');
delete from baton.messages where run_id = 'w';
select outcome from baton.wake_run('w') \g /dev/null
select outcome from baton.wake_run('w') \g /dev/null
select is(baton_test.messages('w'), 'wake 00:00:00', 'wake: where it was purged the next one has one');
delete from baton.messages where run_id = 'w';
select outcome from baton.signal_run('w', 's') \g /dev/null
select outcome from baton.signal_run('w', 's') \g /dev/null
select is(baton_test.messages('w'), 'wake 00:00:00', 'wake: and so has the next signal');
select m as wm, d as wd, e as we from baton_test.replay('w') \gset
select outcome from baton.wake_run('w') \g /dev/null
select outcome from baton.wake_run('w') \g /dev/null
select is(baton_test.messages('w'), 'keyless 00:00:30 claimed, wake 00:00:00', 'wake: and after that get their own');
select is(baton_test.finish_replay('w', :we, 3), 'ended suspended', 'wake: the end of the replay');
select is(baton_test.messages('w'), 'wake 00:00:00', 'wake: sends no second one');
select m as wm, d as wd, e as we from baton_test.replay('w') \gset
select is(baton_test.run('w'), 'running 3/3/3 0/0 held', 'wake: only a grant clears it');
select baton_test.idle('f') \g /dev/null
select outcome from baton.wake_run('f') \g /dev/null
select baton.fail(m, d, 'x', '1 hour') from baton_test.replay('f') \g /dev/null
select is((select outcome from baton.wake_run('f')), 'woken', 'wake: during a back-off');
select is(baton_test.messages('f'), 'wake 01:00:00', 'wake: does not cut it');
select results_eq($$select * from baton.wake_run('nobody')$$, $$values ('terminal', null::text)$$, 'wake: of an unknown run');
select outcome from baton.cancel_run('w', 'x') \g /dev/null
select results_eq($$select * from baton.wake_run('w')$$, $$values ('terminal', 'cancelled')$$, 'wake: of an ended run');
select outcome from baton.wake_run('f') \g /dev/null

-- Keys never meet those of others

select baton_test.idle('k') \g /dev/null
select baton_test.idle('k wake') \g /dev/null
select is((select outcome from baton.send('q', '1', dedupe_key => 'k wake')), 'sent', 'keys: a user''s key');
select outcome from baton.wake_run('k') \g /dev/null
select outcome from baton.wake_run('k wake') \g /dev/null
select is(baton_test.messages('k'), 'wake 00:00:00', 'keys: is never that of a run''s wake');
select is(baton_test.messages('k wake'), 'wake 00:00:00', 'keys: nor is another run''s');

-- The grant of another message leaves the wake what it is

select baton_test.idle('t', baton._now()) \g /dev/null
select m as tm, d as td from baton_test.take('t') \gset
select outcome from baton.wake_run('t') \g /dev/null
select outcome from baton.begin_replay(:tm, :td) \g /dev/null
select outcome from baton.signal_run('t', 's') \g /dev/null
select is(baton_test.messages('t'), 'keyless 00:00:30 claimed, wake 00:00:00', 'wake: a timer''s grant leaves it to those that come');

-- Notifications

select is((select count(*) from baton.messages as m where m.kind = 'run' and m.payload is null and m.headers is null), (select count(*) from baton.messages as m where m.kind = 'run'), 'run messages carry nothing');
select * from finish();
rollback;
