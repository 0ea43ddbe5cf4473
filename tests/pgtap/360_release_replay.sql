\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(23);

select baton_test.start('a') \g /dev/null
select is((select outcome from baton.release_replay('a')), 'none', 'release: nothing is held, nothing claimed');
select is(baton_test.messages('a'), 'wake 00:00:00', 'release: nothing is changed');
select m as am, d as ad, e as ae from baton_test.replay('a', '1 hour') \gset
select is((select outcome from baton.release_replay('a')), 'released', 'release: a replay');
select is(baton_test.run('a'), 'running 1/0/0 0/0 wake', 'release: it has ended, and that is no lapse');
select is(baton_test.messages('a'), 'keyless 00:00:00, wake 00:00:00', 'release: its claim is spent, the run is woken');
select throws_ok(format('select baton.append_event(''a'', %s, ''x.y'')', :ae), 'PB001', null, 'release: under a new epoch');
select is(baton_test.finish_replay('a', :ae, 1), 'lost running', 'release: its end is lost');
select is((select outcome from baton.extend(:am, :ad)), 'lost', 'release: and its extend');
select results_eq(
  $$select i.kind, i.detail from baton.incidents as i where i.run_id = 'a'$$, $$values ('operator', '{"verb": "release_replay"}'::jsonb)$$, 'release: an incident tells'
);
select is(baton_test.answer(t.m, t.d), 'granted', 'release: the next replay is granted') from baton_test.take('a') as t;

-- Claims without a replay

select baton_test.start('c') \g /dev/null
select m as cm, d as cd from baton_test.take('c', '1 hour') \gset
select is((select outcome from baton.release_replay('c')), 'released', 'release: a claim under which nothing began');
select is(baton_test.messages('c'), 'wake 00:00:00', 'release: is due at once');
select is(baton_test.run('c'), 'pending 1/0/0 0/0 wake', 'release: the run is pending still');
select baton_test.start('m') \g /dev/null
select baton_test.replay('m', '1 hour') \g /dev/null
select outcome from baton.wake_run('m') \g /dev/null
select baton_test.take('m', '1 hour') \g /dev/null
select outcome from baton.release_replay('m') \g /dev/null
select is(baton_test.messages('m'), 'keyless 00:00:00, wake 00:00:00', 'release: all claims of its run messages');

-- Bodies go on

select baton_test.start('b') \g /dev/null
select m as bm, d as bd, e as be from baton_test.replay('b') \gset
select baton_test.body('b', :bm, :bd) \g /dev/null
select m as tm from baton_test.task_message('b', 's', 0) \gset
select count(*) from baton.claim('q', max_messages => 100) \g /dev/null
select is((select outcome from baton.release_replay('b')), 'released', 'release: a replay under whose message bodies run');
select is(baton_test.messages('b'), 'keyless 00:00:30 claimed, s/0 00:00:30 claimed, wake 00:00:00', 'release: that message and a task''s stay claimed');
select is((select outcome from baton.extend(:bm, :bd)), 'extended', 'release: and are extended');
select is((select t.status from baton.tasks as t where t.run_id = 'b'), 'started', 'release: the body runs on');
select is((select outcome from baton.release_replay('b')), 'none', 'release: again there is nothing to release');
select throws_ok(format('select baton.append_event(''b'', %s, ''x.y'')', :be), 'PB001', null, 'release: but its replay is over');

-- Nothing to release

select is((select outcome from baton.release_replay('nobody')), 'none', 'release: of an unknown run');
select outcome from baton.cancel_run('b', 'x') \g /dev/null
select is((select outcome from baton.release_replay('b')), 'none', 'release: of an ended run');
select baton_test.start('other') \g /dev/null
select baton_test.replay('other') \g /dev/null
select outcome from baton.release_replay('a') \g /dev/null
select is(baton_test.run('other'), 'running 1/0/0 0/0 held', 'release: another run''s replay is left alone');
select * from finish();
rollback;
