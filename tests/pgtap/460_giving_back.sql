\ir _begin.sql
\ir _queue.sql
\ir _runs.sql
select plan(83);

-- park

select baton_test.start('a') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select is(baton_test.park(:am, :ad, '1 minute'), 'parked 00:01:00', 'park: a run message');
select is(baton_test.run('a'), 'running 1/0/0 0/0 wake', 'park: ends the replay that it holds, and counts nothing');
select is(baton_test.messages('a'), 'wake 00:01:00', 'park: and becomes the run''s wake');
select throws_ok(format('select baton.append_event(''a'', %s, ''x.y'')', :ae), 'PB001', null, 'park: under a new epoch');
select is(baton_test.finish_replay('a', :ae, 1), 'lost running', 'park: so that the old one can''t end');
select is(baton_test.park(:am, :ad), 'lost', 'park: the receipt is spent');
select outcome from baton.signal_run('a', 's') \g /dev/null
select is(baton_test.messages('a'), 'wake 00:01:00', 'park: a signal can''t cut the delay, and adds no message');
select is((select count(*) from baton.incidents as i where i.run_id = 'a'), 0::bigint, 'park: no incident');
select baton_test.advance('59.999999 seconds') \g /dev/null
select is((select m from baton_test.take('a')), null, 'park: a microsecond before its time it is not offered');
select baton_test.advance('1 microsecond') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select is(baton_test.run('a'), 'running 2/2/0 0/0 held', 'park: then it is granted, and no replay was lost');

-- park, under another delivery of its message

select baton_test.start('l') \g /dev/null
select m as lm, d as ld from baton_test.replay('l') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as lm, d as ld from baton_test.take('l') \gset
select is(baton_test.park(:lm, :ld, '1 minute'), 'parked 00:01:00', 'park: under the next delivery of a replay that was lost');
select is(baton_test.run('l'), 'running 1/0/0 0/0 wake held', 'park: does not end that replay');
select baton_test.advance('1 minute') \g /dev/null
select m as lm, d as ld from baton_test.replay('l') \gset
select is(baton_test.run('l'), 'running 1/0/0 0/1 held', 'park: so that it counts as lost');

-- park, beside another wake

select outcome from baton.wake_run('a') \g /dev/null
select is(baton_test.park(:am, :ad, '1 minute'), 'parked 00:01:00', 'park: while another wake waits');
select is(baton_test.messages('a'), 'wake 00:01:00', 'park: that takes the later time, and this message goes');
select is(baton_test.state(:am), null, 'park: this one');
select baton_test.advance('1 minute') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select baton._set_back(r, null, baton._now() + interval '1 hour', baton._now()) from baton.runs as r where r.run_id = 'a' \g /dev/null
select is(baton_test.park(:am, :ad, '1 minute'), 'parked 01:00:00', 'park: where the wake that waits is due later still, that stays');
select is(baton_test.messages('a'), 'wake 01:00:00', 'park: the later time of both');
select baton_test.advance('1 hour') \g /dev/null
select m as am, d as ad, e as ae from baton_test.replay('a') \gset
select outcome from baton.wake_run('a') \g /dev/null
select m as a2m, d as a2d from baton_test.take('a') \gset
select is(baton_test.park(:am, :ad, '1 minute'), 'parked 00:01:00', 'park: while somebody has claimed the wake');
select is(baton_test.messages('a'), 'keyless 00:01:00, wake 00:00:30 claimed', 'park: it waits without a key');
select is(baton_test.answer(:a2m, :a2d), 'granted', 'park: and the other is granted, nobody holds the run');
select baton_test.start('b') \g /dev/null
select m as bm, d as bd, e as be from baton_test.replay('b') \gset
select outcome from baton.wake_run('b') \g /dev/null
select m as b2m, d as b2d from baton_test.take('b', '10 seconds') \gset
select baton_test.advance('10 seconds') \g /dev/null
select is(baton_test.park(:bm, :bd, '1 minute'), 'parked 00:01:00', 'park: while the wake''s claim has run out');
select is(baton_test.messages('b'), 'wake 00:01:00', 'park: that waits, and its claim is over');
select is(baton_test.answer(:b2m, :b2d), 'lost', 'park: for its holder too');
select baton_test.start('p') \g /dev/null
select m as pm, d as pd, e as pe from baton_test.replay('p') \gset
select outcome from baton.wake_run('p') \g /dev/null
delete from baton.messages where run_id = 'p' and message_id <> :pm;
select outcome from baton.park(:pm, :pd, '1 minute') \g /dev/null
select is(baton_test.messages('p'), 'wake 00:01:00', 'park: where the wake was purged it becomes that');

-- park, of a message that was never granted

select baton_test.start('n') \g /dev/null
select m as nm, d as nd from baton_test.take('n') \gset
select is(baton_test.park(:nm, :nd, '1 minute'), 'parked 00:01:00', 'park: before a replay has begun');
select is(baton_test.messages('n'), 'wake 00:01:00', 'park: it is still the wake');
select is(baton_test.run('n'), 'pending 1/0/0 0/0 wake', 'park: and the run as it was');
select baton_test.start('h') \g /dev/null
select m as hm, d as hd, e as he from baton_test.replay('h') \gset
select outcome from baton.wake_run('h') \g /dev/null
select m as h2m, d as h2d from baton_test.take('h') \gset
select is(baton_test.park(:h2m, :h2d), 'parked 00:00:00', 'park: a message that holds no replay');
select lives_ok(format('select baton.append_event(''h'', %s, ''x.y'')', :he), 'park: leaves the replay of another alone');

-- park and fail, of ended and unknown runs

select baton_test.start('e') \g /dev/null
select m as em, d as ed from baton_test.take('e') \gset
select outcome from baton.cancel_run('e', 'x') \g /dev/null
select is(baton_test.park(:em, :ed), 'cancelled', 'park: of an ended run');
select is(baton_test.messages('e'), null, 'park: the message goes');
select baton_test.start('u') \g /dev/null
select m as um, d as ud from baton_test.take('u') \gset
delete from baton.runs where run_id = 'u';
select is(baton_test.park(:um, :ud), 'cancelled', 'park: of an unknown run');
select is(baton_test.messages('u'), null, 'park: the message goes too');
select baton_test.start('c') \g /dev/null
select m as cm, d as cd from baton_test.take('c') \gset
select outcome from baton.cancel_run('c', 'x') \g /dev/null
select is(baton_test.fail_message(:cm, :cd), 'cancelled', 'fail: of an ended run');
select is(baton_test.messages('c'), null, 'fail: the message goes');
select is((select r.status from baton.get_run('c') as r), 'cancelled', 'fail: and the run is what it was');
select baton_test.start('u2') \g /dev/null
select m as um, d as ud from baton_test.take('u2') \gset
delete from baton.runs where run_id = 'u2';
select is(baton_test.fail_message(:um, :ud), 'cancelled', 'fail: of an unknown run');

-- park and fail, while bodies run under it

select baton_test.start('o') \g /dev/null
select m as om, d as od, e as oe from baton_test.replay('o') \gset
select baton_test.body('o', :om, :od, 'one'), baton_test.body('o', :om, :od, 'two'), baton_test.body('o', :om, 0, 'three') \g /dev/null
update baton.tasks set attempt = 4, lapses = 2, fence_attempt = 1 where run_id = 'o';
select is(baton_test.park(:om, :od), 'in_use', 'park: while bodies run under it');
select is(baton_test.run('o'), 'running 1/0/0 0/0 held', 'park: nothing is changed');
select is(baton_test.messages('o'), 'keyless 00:00:30 claimed', 'park: of the message neither');
select is(baton_test.fail_message(:om, :od), 'in_use 00:01:00', 'fail: while bodies run under it');
select is(baton_test.run('o'), 'running 1/0/0 1/0 wake', 'fail: counts, and ends the replay');
select is(baton_test.messages('o'), 'keyless 00:00:30 claimed, wake 00:01:00', 'fail: sends such a wake and leaves the message claimed');
select is((select outcome from baton.extend(:om, :od)), 'extended', 'fail: its handler goes on extending it');
select is(baton_test.fail_message(:om, :od, '2 minutes'), 'in_use 00:02:00', 'fail: again');
select is(baton_test.messages('o'), 'keyless 00:00:30 claimed, wake 00:02:00', 'fail: there is one wake');
select is(baton_test.park(:om, :od, '3 minutes', true), 'parked 00:03:00', 'park: by force');
select is(baton_test.messages('o'), 'wake 00:03:00', 'park: it becomes the wake');
select results_eq(
  $$select t.step_slug, t.status, t.attempt, t.fence_attempt, t.lapses, t.owner_message_id from baton.tasks as t where t.run_id = 'o' order by 1$$,
  format($$values ('one', 'created', 4, 4, 0, null), ('three', 'started', 4, 1, 2, %s::bigint), ('two', 'created', 4, 4, 0, null)$$, :om),
  'park: its tasks are to be given out anew, up to now refused, and no lapse; another receipt''s are left alone'
);
select results_eq(
  $$select e.seq, e.type, e.payload ->> 'step_slug', e.payload ->> 'task_index', e.payload ->> 'attempt' from baton.events as e
  where e.run_id = 'o' and e.seq > 1 order by e.payload ->> 'step_slug'$$,
  $$select 1 + row_number() over (order by s.s <> (select e.payload ->> 'step_slug' from baton.events as e where e.run_id = 'o' and e.seq = 2)),
    'task_released', s.s, '0', '4' from unnest(array['one', 'two']) as s (s) order by 3$$,
  'park: the log says so, without a gap'
);
select is(baton_test.run('o'), 'running 3/0/0 2/0 wake', 'park: and so does the run');
select baton_test.start('o2') \g /dev/null
select m as om, d as od, e as oe from baton_test.replay('o2') \gset
select baton_test.body('o2', :om, :od) \g /dev/null
select is(baton_test.fail_message(:om, :od, force => true), 'failed 00:01:00', 'fail: by force');
select is(baton_test.messages('o2'), 'wake 00:01:00', 'fail: it becomes the wake');
select is((select t.status from baton.tasks as t where t.run_id = 'o2'), 'created', 'fail: and its tasks are to be given out anew');
select is(baton_test.log('o2'), 'run_created task_released', 'fail: the log says so');

-- fail

select baton_test.start('f') \g /dev/null
select m as fm, d as fd, e as fe from baton_test.replay('f') \gset
select is(baton_test.fail_message(:fm, :fd), 'failed 00:01:00', 'fail: a run message');
select is(baton_test.run('f'), 'running 1/0/0 1/0 wake', 'fail: counts on the run and ends the replay');
select is(baton_test.state(:fm), (baton._now() + interval '1 minute') || ' free 0 0', 'fail: not on the message');
select is((select m.last_error from baton.messages as m where m.message_id = :fm), 'broken', 'fail: the message says why');
select is(baton_test.messages('f'), 'wake 00:01:00', 'fail: it becomes the run''s wake');
select throws_ok(format('select baton.append_event(''f'', %s, ''x.y'')', :fe), 'PB001', null, 'fail: under a new epoch');
select is(baton_test.fail_message(:fm, :fd), 'lost', 'fail: the receipt is spent');
select is(baton_test.run('f'), 'running 1/0/0 1/0 wake', 'fail: a lost one counts nothing');
select outcome from baton.signal_run('f', 's') \g /dev/null
select is(baton_test.messages('f'), 'wake 00:01:00', 'fail: a signal can''t cut the back-off');
update baton.runs set failures = 3 where run_id = 'f';
update baton.messages set visible_at = baton._now() where run_id = 'f';
select m as fm, d as fd, e as fe from baton_test.replay('f') \gset
select ok(
  f.visible_at - baton._now() between '6.4 seconds' and '9.6 seconds', 'fail: without a delay it backs off by the run''s failures'
) from baton.fail(:fm, :fd, 'x') as f;

-- Limits

select baton_test.set_limits(2, 20) \g /dev/null
select baton_test.start('x') \g /dev/null
select m as xm, d as xd from baton_test.replay('x') \gset
select is(baton_test.fail_message(:xm, :xd, '0'), 'failed 00:00:00', 'limits: below max_failures');
select outcome from baton.wake_run('x') \g /dev/null
select m as xm, d as xd from baton_test.replay('x') \gset
select baton_test.body('x', :xm, :xd) \g /dev/null
select outcome from baton.wake_run('x') \g /dev/null
select is(baton_test.fail_message(:xm, :xd), 'dead', 'limits: at it the run ends, whichever messages drove it');
select results_eq(
  $$select r.status, r.error from baton.get_run('x') as r$$,
  $$values ('failed', '{"reason": "max_failures", "error": "broken"}'::jsonb)$$, 'limits: and says why'
);
select is(baton_test.run('x'), 'failed 2/0/0 2/0', 'limits: after as many tries as the limit says');
select is(baton_test.messages('x'), null, 'limits: its messages go');
select is((select t.status from baton.tasks as t where t.run_id = 'x'), 'cancelled', 'limits: and its tasks');
select is(baton_test.log('x'), 'run_created run_failed', 'limits: with one event');
select is((select i.detail from baton.incidents as i where i.run_id = 'x'), '{"failures": 2}', 'limits: an incident tells');
select is((select count(*) from baton.dead_messages), 0::bigint, 'limits: a run message is never a dead letter');
select baton_test.start('y') \g /dev/null
select m as ym, d as yd from baton_test.take('y') \gset
select is(baton_test.fail_message(:ym, :yd, final => true), 'dead', 'limits: final ends the run at once');
select is((select r.error from baton.get_run('y') as r), '{"reason": "final", "error": "broken"}', 'limits: and says so');
select baton_test.start('z') \g /dev/null
select m as zm, d as zd, e as ze from baton_test.replay('z') \gset
select is(baton_test.fail_message(:zm, :zd, '0'), 'failed 00:00:00', 'limits: one failure');
select m as zm, d as zd, e as ze from baton_test.replay('z') \gset
select is(baton_test.finish_replay('z', :ze, 1), 'ended suspended', 'limits: then a replay that comes through');
select outcome from baton.wake_run('z') \g /dev/null
select m as zm, d as zd, e as ze from baton_test.replay('z') \gset
select is(baton_test.fail_message(:zm, :zd, '0'), 'failed 00:00:00', 'limits: another failure is the first in a row');
select is_empty(
  $$select d.delay from unnest(array['-1 microsecond', '10 years 1 microsecond']) as d (delay)
  where baton_test.sqlstate_of(format('select baton.fail(1, 1, null, %L)', d.delay)) <> '22023'$$, 'fail: delays outside ten years are refused'
);
-- A timer that is given back before its replay

select baton_test.idle('t', baton._now()) \g /dev/null
select baton.park(m, d) from baton_test.take('t') \g /dev/null
select is((select r.needs_driver from baton.runs as r where r.run_id = 't'), true, 'park: the run of a timer has somebody to drive it from then on');
select is(baton_test.messages('t'), 'wake 00:00:00', 'park: the timer is its wake, and no timer any more');

select * from finish();
rollback;
