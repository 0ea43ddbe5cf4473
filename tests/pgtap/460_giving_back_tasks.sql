\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(69);

-- A task message that nobody has started

select baton_test.queued('a', 2) \g /dev/null
select m as am, d as ad from baton_test.take_task('a') \gset
select is(baton_test.park(:am, :ad, '1 minute'), 'parked 00:01:00', 'park: a task message');
select is(baton_test.messages('a'), 's/0 00:01:00, s/1 00:00:00', 'park: is due again, under its key');
select is(baton_test.task('a'), 'created 0 0/0', 'park: the task is as it was');
select is(baton_test.state(:am), (baton._now() + interval '1 minute') || ' free 0 0', 'park: nothing is counted');
select is(baton_test.park(:am, :ad), 'lost', 'park: the receipt is spent');
select m as a1m, d as a1d from baton_test.take_task('a', 1) \gset
select is(baton_test.fail_message(:a1m, :a1d), 'failed 00:01:00', 'fail: a task message');
select is(baton_test.state(:a1m), (baton._now() + interval '1 minute') || ' free 1 0', 'fail: it counts, for the back-off');
select is((select m.last_error from baton.messages as m where m.message_id = :a1m), 'broken', 'fail: it says why');
select is(baton_test.task('a', 1), 'created 0 0/0', 'fail: not on the task');
select is(baton_test.run('a'), 'running 2/0/2', 'fail: nor on the run');
select is(baton_test.fail_message(:a1m, :a1d), 'lost', 'fail: the receipt is spent');

-- fail of a task message has no limit

select baton_test.set_limits(2, 2) \g /dev/null
select baton_test.queued('b') \g /dev/null
create function baton_test.fail_often(run_id text, times integer)
returns text
language plpgsql
as $$
declare
  v_receipt record;
  v_said text;
begin
  for i in 1..fail_often.times loop
    select t.m, t.d into strict v_receipt from baton_test.take_task(fail_often.run_id) as t;
    v_said := concat_ws(', ', v_said, baton_test.fail_message(v_receipt.m, v_receipt.d, '0', i = 2));
  end loop;
  return v_said;
end;
$$;
select is(baton_test.fail_often('b', 4), 'failed 00:00:00, failed 00:00:00, failed 00:00:00, failed 00:00:00', 'fail: beyond every limit, and final is ignored');
select is((select m.failures from baton.messages as m where m.run_id = 'b'), 4, 'fail: it counts on');
select m as bm, d as bd from baton_test.take_task('b') \gset
select ok(f.visible_at - baton._now() between '12.8 seconds' and '19.2 seconds', 'fail: its back-off grows')
from baton.fail(:bm, :bd, 'broken') as f;
update baton.settings set max_failures = default, max_lapses = default;
select is((select count(*) from baton.dead_messages), 0::bigint, 'fail: a task message is never a dead letter');

-- A task message whose task runs under it

select baton_test.queued('c') \g /dev/null
select m as cm, d as cd, a as ca from baton_test.started('c') \gset
select is(baton_test.park(:cm, :cd, '1 minute'), 'in_use', 'park: its body runs');
select is(baton_test.fail_message(:cm, :cd), 'in_use', 'fail: its body runs');
select is(baton_test.task('c') || ', ' || baton_test.messages('c'), 'started 1 0/0 under task, s/0 00:00:30 claimed', 'in_use: nothing is changed');
select is((select m.failures from baton.messages as m where m.message_id = :cm), 0, 'in_use: nor counted');
select is(baton_test.park(:cm, :cd, '1 minute', true), 'parked 00:01:00', 'park: by force');
select is(baton_test.task('c'), 'created 1 0/0 fence 1', 'park: its task is to be given out anew, up to now refused, and no lapse');
select is(baton_test.log('c'), 'task_started 0#1, task_released 0#1', 'park: the log says so');
select is(baton_test.messages('c'), 's/0 00:01:00', 'park: and its message is due after the delay');
select is(baton_test.run('c'), 'running 4/0/2', 'park: no replay is asked for');
select is(baton_test.complete('c', :cm, :cd), 'lost', 'park: the body that was stopped is refused');
select baton_test.advance('1 minute') \g /dev/null
select m as cm, d as cd, a as ca from baton_test.started('c') \gset
select is(baton_test.task('c'), 'started 2 0/0 fence 1 under task', 'park: then it is started, without a lapse');
select is(baton_test.fail_message(:cm, :cd, '1 minute', force => true), 'failed 00:01:00', 'fail: by force');
select is(baton_test.task('c'), 'created 2 0/0 fence 2', 'fail: the task, too, and no failure of the task');
select is((select m.failures from baton.messages as m where m.message_id = :cm), 1, 'fail: but of the message');
select is(baton_test.incidents_of('c'), null, 'force: no incident');
select is(baton_test.complete('c', :cm, :cd, 2), 'lost', 'fail: that body is refused as well');
select baton_test.advance('1 minute') \g /dev/null
select m as c2m, d as c2d from baton_test.take_task('c') \gset
select is(baton_test.park(:c2m, :c2d, '1 minute', true), 'parked 00:01:00', 'force: a message that owns nothing');
select is(baton_test.task('c'), 'created 2 0/0 fence 2', 'force: releases nothing');
select is(baton_test.log('c'), 'task_started 0#1, task_released 0#1, task_started 0#2, task_released 0#2', 'force: and logs nothing');

-- Force is by receipt: a redelivery that has not started the task releases nothing

select baton_test.queued('d') \g /dev/null
select m as dm, d as dd, a as da from baton_test.started('d') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as d2m, d as d2d from baton_test.take_task('d') \gset
select is(baton_test.park(:dm, :dd, force => true), 'lost', 'force: under an old receipt');
select is(baton_test.park(:d2m, :d2d), 'parked 00:00:00', 'park: a redelivery, not started');
select is(baton_test.task('d'), 'started 1 0/0 under nothing', 'park: the lost start is still counted when it is started');
select m as d3m, d as d3d, a as d3a from baton_test.started('d') \gset
select is(baton_test.task('d'), 'started 2 0/1 under task', 'park: as a lapse');

-- Ended tasks

select baton_test.queued('e', 3) \g /dev/null
select m as em, d as ed, a as ea from baton_test.started('e', 0) \gset
select m as e1m, d as e1d, a as e1a from baton_test.started('e', 1) \gset
select m as e2m, d as e2d from baton_test.take_task('e', 2) \gset
select baton_test.fail('e', :em, :ed, final => true) \g /dev/null
select is(baton_test.park(:e1m, :e1d), 'cancelled', 'park: its task has ended with its step');
select is(baton_test.fail_message(:e2m, :e2d), 'cancelled', 'fail: too');
select is(baton_test.messages('e'), 'wake 00:00:00', 'cancelled: the messages go');
select baton_test.queued('f', 2) \g /dev/null
select m as fm, d as fd, a as fa from baton_test.started('f') \gset
select m as f1m, d as f1d, a as f1a from baton_test.started('f', 1) \gset
select outcome from baton.cancel_run('f', 'x') \g /dev/null
select is(baton_test.park(:fm, :fd, force => true), 'cancelled', 'park: by force too');
select is(baton_test.fail_message(:f1m, :f1d, force => true), 'cancelled', 'fail: by force too');
select is(baton_test.messages('f'), null, 'cancelled: the messages go');
select is(baton_test.log('f'), 'task_started 0#1, task_started 1#1, run_cancelled', 'cancelled: nothing is logged after the end');

-- Run messages that own tasks

select m as gm, d as gd, e as ge from baton_test.made('g', 3) \gset
select baton_test.dispatch('g', :ge, 2) \g /dev/null
select is(baton_test.park(:gm, :gd), 'in_use', 'run message: park while bodies run under it');
select is(baton_test.run('g'), 'running 4/0/0 held', 'run message: the replay goes on');
select is(baton_test.fail_message(:gm, :gd), 'in_use 00:01:00', 'run message: fail');
select is(baton_test.messages('g'), 'keyless 00:00:30 claimed, s/2 00:00:00, wake 00:01:00', 'run message: sends the wake, and stays claimed');
select is(baton_test.run('g'), 'running 4/0/0 wake', 'run message: its replay has ended');
select is(baton_test.task('g') || ', ' || baton_test.task('g', 1), 'started 1 0/0 under run, started 1 0/0 under run', 'run message: its bodies go on');
select is(baton_test.complete('g', :gm, :gd), 'completed', 'run message: one of them completes');
select is(baton_test.park(:gm, :gd, '2 minutes', true), 'parked 00:02:00', 'run message: park by force');
select is(baton_test.task('g') || ', ' || baton_test.task('g', 1), 'completed 1 0/0 under nothing, created 1 0/0 fence 1', 'run message: what has ended stays so, what ran is to be given out anew');
select is(baton_test.messages('g'), 's/2 00:00:00, wake 00:02:00', 'run message: it becomes the wake');
select is(baton_test.log('g'), 'task_started 0#1, task_started 1#1, task_completed 0#1, task_released 1#1', 'run message: the log says so');
select is(baton_test.wedged(), null, 'run message: nothing is wedged');
select baton_test.advance('2 minutes') \g /dev/null
select m as g2m, d as g2d, e as g2e from baton_test.replay('g') \gset
select is(baton_test.dispatch('g', :g2e), 'execute s/1#2, queued s/2#0', 'run message: then it is run here, the second attempt');
select is(baton_test.task('g', 1), 'started 2 0/0 fence 1 under run', 'run message: no lapse');
select is(baton_test.complete('g', :gm, :gd, 1, 1), 'lost', 'run message: the first one is refused');
select is(baton_test.fail_message(:g2m, :g2d, '1 minute', force => true), 'failed 00:01:00', 'run message: fail by force');
select is(baton_test.task('g', 1), 'created 2 0/0 fence 2', 'run message: gives it out anew too');
select is((select r.failures from baton.runs as r where r.run_id = 'g'), 2, 'run message: and counts on the run');

-- Bodies under an earlier delivery of the message are lost, not released

select m as hm, d as hd from baton_test.inline('h') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as h2m, d as h2d from baton_test.take('h') \gset
select is(baton_test.park(:h2m, :h2d), 'parked 00:00:00', 'run message: a redelivery owns nothing yet');
select is(baton_test.task('h'), 'started 1 0/0 under nothing', 'run message: its earlier body is to be recovered');
select m as h3m, d as h3d, e as h3e from baton_test.replay('h') \gset
select is(baton_test.dispatch('h', :h3e), 'execute s/0#2', 'run message: by whoever holds it next');
select is(baton_test.task('h'), 'started 2 0/1 under run', 'run message: as a lapse');

-- Twenty orderly drains reach no limit

select baton_test.set_limits(2, 2) \g /dev/null
select m as im, d as id, e as ie from baton_test.made('i') \gset
create function baton_test.drain(run_id text, times integer)
returns void
language plpgsql
as $$
declare
  v_receipt record;
begin
  for i in 1..drain.times loop
    select r.* into strict v_receipt from baton_test.replay(drain.run_id) as r;
    perform baton_test.dispatch(drain.run_id, v_receipt.e);
    perform baton_test.finish(drain.run_id, v_receipt.e);
    perform baton_test.park(v_receipt.m, v_receipt.d, force => true);
  end loop;
end;
$$;
select baton_test.dispatch('i', :ie), baton_test.finish('i', :ie), baton_test.park(:im, :id, force => true), baton_test.drain('i', 19) \g /dev/null
select is(baton_test.task('i'), 'created 20 0/0 fence 20', 'drains: twenty starts, no lapse');
select is((select r.status from baton.get_run('i') as r), 'running', 'drains: and a healthy run');
select * from finish();
rollback;
