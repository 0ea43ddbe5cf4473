\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(83);

-- Retrying, under the task's own message

select baton_test.queued('a') \g /dev/null
select m as am, d as ad, a as aa from baton_test.started('a') \gset
update baton.tasks set lapses = 5 where run_id = 'a';
select results_eq(
  format('select * from baton.fail_task(''a'', ''s'', 0, 1, ''{"e": 1}'', %s, %s, ''10 seconds'')', :am, :ad),
  $$values ('retrying', baton._now() + interval '10 seconds', false)$$, 'retry: the first failure'
);
select is(baton_test.task('a'), 'created 1 1/0 00:00:10', 'retry: the task waits, counts a failure, and forgets its lapses');
select is(baton_test.messages('a'), 's/0 00:00:10', 'retry: its message is due then');
select is(baton_test.run('a'), 'running 4/0/2', 'retry: no replay is asked for');
select results_eq(
  $$select e.type, e.payload - 'retry_at', (e.payload ->> 'retry_at')::timestamptz from baton.read_events('a', 3) as e$$,
  $$values ('task_retrying', '{"step_slug": "s", "task_index": 0, "attempt": 1, "error": {"e": 1}}'::jsonb, baton._now() + interval '10 seconds')$$,
  'retry: with an event that says why and when'
);
select is(baton_test.fail('a', :am, :ad), 'lost', 'retry: again, the receipt is spent');
select is(baton_test.state(:am), (baton._now() + interval '10 seconds') || ' free 0 0', 'retry: the message counts nothing itself');
select is(baton_test.incidents_of('a'), null, 'retry: no incident');
select baton_test.advance('9.999999 seconds') \g /dev/null
select is((select m from baton_test.take_task('a')), null, 'retry: a microsecond before its time it is not offered');
select baton_test.advance('1 microsecond') \g /dev/null
select m as am, d as ad, a as aa from baton_test.started('a') \gset
select is(:aa, 2, 'retry: then a second attempt');
select is(baton_test.fail('a', :am, :ad, 2), 'retrying 00:00:10', 'retry: the second failure');
select baton_test.advance('10 seconds') \g /dev/null
select m as am, d as ad, a as aa from baton_test.started('a') \gset
select is(baton_test.fail('a', :am, :ad, 3), 'failed ended', 'exhausted: the failure that is max_attempts');
select is(baton_test.task('a') || ', ' || baton_test.steps('a'), 'failed 3 3/0 under nothing 00:00:00, s failed 0/1', 'exhausted: the task has failed, and its step');
select is(baton_test.messages('a'), 'wake 00:00:00', 'exhausted: the message goes, the run is woken once');
select is(baton_test.run('a'), 'running 9/9/2 wake', 'exhausted: a replay is asked for');
select is(
  baton_test.log('a'), 'task_started 0#1, task_retrying 0#1, task_started 0#2, task_retrying 0#2, task_started 0#3, task_failed 0#3, step_failed', 'exhausted: with its events'
);
select results_eq(
  $$select e.payload from baton.read_events('a', 7) as e$$,
  $$values ('{"step_slug": "s", "task_index": 0, "attempt": 3, "error": "broken"}'::jsonb), ('{"step_slug": "s", "task_index": 0, "error": "broken"}')$$,
  'exhausted: that say why'
);
select is(baton_test.fail('a', :am, :ad, 3), 'too_late', 'exhausted: again it is too late');
select is(baton_test.run('a') || baton_test.messages('a'), 'running 9/9/2 wakewake 00:00:00', 'exhausted: nothing is changed');

-- on_exhausted, final, and siblings

select baton_test.queued('b', 4, on_exhausted => 'skip_step') \g /dev/null
select m as bm, d as bd, a as ba from baton_test.started('b') \gset
select m as b1m, d as b1d, a as b1a from baton_test.started('b', 1) \gset
select m as b2m, d as b2d, a as b2a from baton_test.started('b', 2) \gset
select baton_test.complete('b', :b2m, :b2d, 1, 2) \g /dev/null
select is(baton_test.fail('b', :bm, :bd, final => true), 'failed ended', 'final: as at its limit');
select is(baton_test.steps('b'), 's skipped 0/4', 'skip_step: the step is skipped');
select is(
  (select string_agg(baton_test.task('b', i.nth), ', ' order by i.nth) from generate_series(0, 3) as i (nth)),
  'failed 1 1/0 under nothing, skipped 1 0/0 under task, completed 1 0/0 under nothing, skipped 0 0/0', 'skip_step: its unfinished tasks too'
);
select is(baton_test.messages('b'), 's/1 00:00:30 claimed, wake 00:00:00', 'skip_step: queued siblings never start');
select is(baton_test.log('b'), 'task_started 0#1, task_started 1#1, task_started 2#1, task_completed 2#1, task_failed 0#1, step_skipped', 'skip_step: its own event');
select is(baton_test.fail('b', :b1m, :b1d, task_index => 1), 'too_late', 'skip_step: a sibling is too late');
select is(baton_test.messages('b'), 'wake 00:00:00', 'skip_step: and its message gone');
select baton_test.queued('c', 2, on_exhausted => 'fail_step', max_attempts => 1) \g /dev/null
select m as cm, d as cd, a as ca from baton_test.started('c') \gset
select is(baton_test.fail('c', :cm, :cd), 'failed ended', 'fail_step: one attempt');
select is(baton_test.steps('c'), 's failed 0/2', 'fail_step: the step has failed');
select is(baton_test.task('c', 1), 'cancelled 0 0/0', 'fail_step: its unfinished tasks are cancelled');
select is(baton_test.messages('c'), 'wake 00:00:00', 'fail_step: their messages go');
select is((select r.status from baton.get_run('c') as r), 'running', 'fail_step: the run goes on: its code decides');

-- Inline: from the first retry on the queue owns the task

select m as dm, d as dd from baton_test.inline('d') \gset
select is(baton_test.fail('d', :dm, :dd), 'retrying 00:00:10', 'inline: a body fails');
select is(baton_test.messages('d'), 'keyless 00:00:30 claimed, s/0 00:00:10', 'inline: a message of its own is sent; the run message stays claimed');
select results_eq(
  $$select m.kind, m.queue_name, m.step_slug, m.task_index from baton.messages as m where m.run_id = 'd' and m.dedupe_key is not null$$,
  $$values ('task', 'd', 's', 0)$$, 'inline: a task message'
);
select replay_epoch as de from baton.begin_replay(:dm, :dd) \gset
select is(baton_test.dispatch('d', :de), 'queued s/0#1', 'inline: its handler leaves it to that');
select is(baton_test.finish('d', :de), 'ended running', 'inline: and ends');
select is(baton_test.messages('d'), 's/0 00:00:10', 'inline: its message goes: it owns nothing any more');
select baton_test.advance('10 seconds') \g /dev/null
select m as d2m, d as d2d, a as d2a from baton_test.started('d') \gset
select is(baton_test.task('d'), 'started 2 1/0 under task 00:00:00', 'inline: the retry runs under its own message');
select m as d3m, d as d3d, e as d3e from baton_test.again('d') \gset
select is(baton_test.dispatch('d', :d3e), 'queued s/0#2', 'inline: a replay beside it leaves it alone');
select is(baton_test.fail('d', :d2m, :d2d, 2), 'retrying 00:00:10', 'inline: it fails again');
select is(baton_test.messages('d'), 's/0 00:00:10, keyless 00:00:30 claimed', 'inline: and waits in the queue again');
select m as em, d as ed from baton_test.inline('e') \gset
select is(baton_test.fail('e', :em, :ed, final => true), 'failed ended', 'inline: for good');
select is(baton_test.messages('e'), 'keyless 00:00:30 claimed', 'inline: that handler replays next: nobody else is woken');
select is(baton_test.run('e'), 'running 5/5/3', 'inline: it is asked for a replay');
select m as fm, d as fd from baton_test.inline('f') \gset
update baton.settings set inline_ownership = false;
select m as f2m, d as f2d, e as f2e from baton_test.again('f') \gset
select baton_test.dispatch('f', :f2e), baton_test.finish('f', :f2e) \g /dev/null
update baton.settings set inline_ownership = true;
select is(baton_test.fail('f', :fm, :fd), 'retrying 00:00:10', 'inline: while a message of the task waits');
select is(baton_test.messages('f'), 'keyless 00:00:30 claimed, s/0 00:00:00', 'inline: there is still one');
select m as f3m, d as f3d from baton_test.take_task('f') \gset
select is(baton_test.begin(:f3m, :f3d), 'await 00:00:10', 'inline: which comes too early and waits: no retry before its time');

-- Who may: the current attempt, under the receipt that started it, while that is current

select baton_test.queued('g', 2) \g /dev/null
select m as gm, d as gd, a as ga from baton_test.started('g') \gset
select m as g2m, d as g2d, a as g2a from baton_test.started('g', 1) \gset
select is(baton_test.fail('g', :gm, :gd, 0), 'lost', 'lost: an older attempt');
select is(baton_test.fail('g', :gm, :gd, 2), 'lost', 'lost: one that was never given out');
select is(baton_test.fail('g', :gm, :gd, null), 'lost', 'lost: null');
select is(baton_test.fail('g', :g2m, :g2d), 'lost', 'lost: another receipt, current as it is');
select is(baton_test.fail('g', :gm, :gd + 1), 'lost', 'lost: another delivery');
select is(baton_test.fail('g', null, null), 'lost', 'lost: none');
select is(baton_test.incidents('lost'), 1::bigint, 'lost: an incident where another delivery has taken the row');
select is(baton_test.task('g') || ', ' || baton_test.task('g', 1), 'started 1 0/0 under task, started 1 0/0 under task', 'lost: nothing is changed');
select is(baton_test.messages('g'), 's/0 00:00:30 claimed, s/1 00:00:30 claimed', 'lost: the messages are left alone');
select baton_test.advance('30 seconds') \g /dev/null
select is(baton_test.fail('g', :gm, :gd), 'retrying 00:00:10', 'lost: a claim that ran out still fails its task, while nobody acted on it');
select m as g3m, d as g3d from baton_test.take_task('g', 1) \gset
select is(baton_test.fail('g', :g2m, :g2d, task_index => 1), 'lost', 'lost: not once another delivery is out');
select is(baton_test.fail('g', :g3m, :g3d, task_index => 1), 'lost', 'lost: nor does that fail an attempt that it didn''t start');
select is(baton_test.task('g', 1), 'started 1 0/0 under nothing', 'lost: the attempt is to be recovered');
select m as hm, d as hd from baton_test.inline('h') \gset
select baton_test.advance('30 seconds') \g /dev/null
select m as h2m, d as h2d from baton_test.take('h') \gset
select is(baton_test.fail('h', :h2m, :h2d), 'lost', 'lost: a new delivery of a run message, before it has dispatched');
select baton_test.release('g', task_index => 1) \g /dev/null
select is(baton_test.fail('g', :g3m, :g3d, task_index => 1), 'lost', 'lost: a released attempt');

-- Too late, unknown, pruned

select baton_test.queued('i', 2) \g /dev/null
select m as im, d as id, a as ia from baton_test.started('i') \gset
select m as i2m, d as i2d, a as i2a from baton_test.started('i', 1) \gset
select baton_test.complete('i', :im, :id) \g /dev/null
select is(baton_test.fail('i', :im, :id), 'too_late', 'late: it is completed');
select is(baton_test.task('i'), 'completed 1 0/0 under nothing', 'late: and stays that');
select outcome from baton.cancel_run('i', 'x') \g /dev/null
select is(baton_test.fail('i', :i2m, :i2d, task_index => 1), 'too_late', 'late: the run has ended');
select is(baton_test.messages('i'), null, 'late: its message goes');
select is(baton_test.incidents_of('i'), 'too_late too_late', 'late: incidents tell');
select is(baton_test.fail('i', null, null, task_index => 2), 'too_late', 'late: an unknown task');
select is(baton_test.fail('nobody', null, null), 'too_late', 'late: an unknown run');
select baton_test.queued('j') \g /dev/null
select m as jm, d as jd, a as ja from baton_test.started('j') \gset
delete from baton.tasks where run_id = 'j';
delete from baton.runs where run_id = 'j';
select is(baton_test.fail('j', :jm, :jd), 'too_late', 'late: its run was pruned');
select is(baton_test.messages('j'), null, 'late: the message goes');

-- The back-off of fail, by the task's failures

create function baton_test.backs_off(failures integer)
returns numeric
language plpgsql
as $$
declare
  v_name text := 'off' || backs_off.failures;
  v_receipt record;
  v_answer record;
begin
  perform baton_test.queued(v_name, 1, 1000);
  select t.m, t.d into strict v_receipt from baton_test.started(v_name) as t;
  update baton.tasks as t set failures = backs_off.failures - 1 where t.run_id = v_name;
  select f.* into strict v_answer
  from baton.fail_task(v_name, 's', 0, 1, null, v_receipt.m, v_receipt.d) as f;
  return extract(epoch from v_answer.retry_at - baton._now());
end;
$$;
select ok(b.seconds between 0.8 and 1.2, 'back-off: a second, give or take a fifth')
from baton_test.backs_off(1) as b (seconds);
select ok(b.seconds between 6.4 and 9.6, 'back-off: doubled with each failure')
from baton_test.backs_off(4) as b (seconds);
select ok(b.seconds between 720 and 1080, 'back-off: up to backoff_max')
from baton_test.backs_off(30) as b (seconds);
select baton_test.queued('k') \g /dev/null
select m as km, d as kd, a as ka from baton_test.started('k') \gset
select is(baton_test.fail('k', :km, :kd, 1, '0'), 'retrying 00:00:00', 'back-off: none, where the caller says so');
select m as km, d as kd, a as ka from baton_test.started('k') \gset
select is(:ka, 2, 'back-off: it is due at once');

-- Failures are never crashes, crashes never failures

select baton_test.advance('30 seconds') \g /dev/null
select m as km, d as kd, a as ka from baton_test.started('k') \gset
select is(baton_test.task('k'), 'started 3 1/1 under task -00:00:30', 'counters: a crash is a lapse');
select is(baton_test.fail('k', :km, :kd, 3), 'retrying 00:00:10', 'counters: a failure');
select is(baton_test.task('k'), 'created 3 2/0 00:00:10', 'counters: ends the row of lapses');
select is(baton_test.fail('k', :km, :kd, 3), 'lost', 'counters: once');

-- Arguments

select is_empty(
  $$select d.delay from unnest(array['-1 microsecond', '10 years 1 microsecond']) as d (delay)
  where baton_test.sqlstate_of(format('select baton.fail_task(''k'', ''s'', 0, 1, null, 1, 1, %L)', d.delay)) <> '22023'$$,
  'arguments: delays outside ten years'
);
select is(baton_test.sqlstate_of('select baton.fail_task(''k'', ''s'', 0, 1, null, 1, 1, ''infinity'')'), baton_test.refuses_infinity(), 'arguments: nor infinite');
select pg_column_size(to_jsonb(repeat('x', 2000))) as size \gset
update baton.settings set max_payload_bytes = :size - 1;
select is(baton_test.sqlstate_of('select baton.fail_task(''k'', ''s'', 0, 1, to_jsonb(repeat(''x'', 2000)), 1, 1)'), '54000', 'arguments: an error over the limit');
select * from finish();
rollback;
