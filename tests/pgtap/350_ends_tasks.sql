\ir _begin.sql
\ir _queue.sql
\ir _tasks.sql
select plan(28);

-- However a step ends, the run is woken once; except by a replay's own verbs, and by a body under a current receipt of
-- a run message of that run, whose handler replays next. Each way ends step s of a run of its own, by the receipt of
-- the task's own message, of the run message that owns it, or none.

update baton.settings set max_lapses = 2;
create function baton_test.end_step(run_id text, way text, receipt text)
returns text
language plpgsql
as $$
declare
  v record;
  v_epoch bigint;
  v_answer text;
begin
  if end_step.receipt = 'task' then
    perform baton_test.queued(end_step.run_id);
    select s.m, s.d into strict v from baton_test.started(end_step.run_id, 0, '1 hour') as s;
  else
    select i.m, i.d into strict v from baton_test.inline(end_step.run_id) as i;
  end if;
  case
    when end_step.receipt = 'none' then
      select null::bigint as m, null::bigint as d into v;
    when end_step.receipt = 'stale' then
      update baton.messages as m set delivery = baton._new_delivery() where m.run_id = end_step.run_id;
    else
      null;
  end case;
  case end_step.way
    when 'completion' then
      v_answer := baton_test.complete(end_step.run_id, v.m, v.d);
    when 'failure' then
      v_answer := baton_test.fail(end_step.run_id, v.m, v.d, final => true);
    when 'release' then
      v_answer := baton_test.release(end_step.run_id, 'fail');
    when 'skip by an operator' then
      select concat_ws(' ', s.outcome, s.status) into v_answer from baton.skip_step(end_step.run_id, 's') as s;
    when 'skip by a replay' then
      select a.e into strict v_epoch from baton_test.again(end_step.run_id) as a;
      select concat_ws(' ', s.outcome, s.status) into v_answer from baton.skip_step(end_step.run_id, 's', v_epoch) as s;
    when 'poison in a start' then
      update baton.tasks as t set lapses = 1 where t.run_id = end_step.run_id;
      update baton.messages as m set visible_at = baton._now() where m.message_id = v.m;
      select t.m, t.d into strict v from baton_test.take_task(end_step.run_id) as t;
      v_answer := baton_test.begin(v.m, v.d);
    when 'poison in a dispatch' then
      update baton.tasks as t set lapses = 1 where t.run_id = end_step.run_id;
      update baton.messages as m set visible_at = baton._now() where m.message_id = v.m;
      select r.e into strict v_epoch from baton_test.replay(end_step.run_id) as r;
      v_answer := baton_test.dispatch(end_step.run_id, v_epoch);
  end case;
  return v_answer;
end;
$$;
create table pg_temp.ways as
select
  w.*, baton_test.end_step(w.way || ' ' || w.receipt, w.way, w.receipt) as answered,
  0::bigint as wakes
from (
  values
  ('completion', 'task', 'completed ended', 1::bigint),
  ('completion', 'run', 'completed ended', 0),
  ('completion', 'stale', 'completed ended', 1),
  ('completion', 'none', 'completed ended', 1),
  ('failure', 'task', 'failed ended', 1),
  ('failure', 'run', 'failed ended', 0),
  ('release', 'task', 'released failed', 1),
  ('release', 'run', 'released failed', 1),
  ('skip by an operator', 'task', 'done skipped', 1),
  ('skip by an operator', 'run', 'done skipped', 1),
  ('skip by a replay', 'task', 'done skipped', 0),
  ('skip by a replay', 'run', 'done skipped', 0),
  ('poison in a start', 'task', 'skip', 1),
  ('poison in a dispatch', 'run', 'failed s/0#1', 0)
) as w (way, receipt, answer, wakes_wanted);
-- What a statement inserts it does not see: the messages are counted by the next one.
update pg_temp.ways as w
set wakes = (
  select count(*)
  from baton.messages as m
  where m.run_id = w.way || ' ' || w.receipt and m.kind = 'run' and m.claimed_at is null
);
select is_empty('select w.way, w.receipt, w.answered from pg_temp.ways as w where w.answered is distinct from w.answer', 'steps: every way ends one');
select is_empty('select w.way, w.receipt, w.wakes from pg_temp.ways as w where w.wakes <> w.wakes_wanted', 'steps: and wakes the run once, or leaves it to its handler');
select is_empty(
  $$select w.way, w.receipt, r.wake_seq, r.last_seq from pg_temp.ways as w
  inner join baton.runs as r on r.run_id = w.way || ' ' || w.receipt
  where (r.wake_seq = r.last_seq) is distinct from (w.way <> 'skip by a replay')$$,
  'steps: its event is the last, and asks for a replay unless a replay''s verb wrote it'
);
select is_empty(
  $$select w.way, w.receipt, n.type, n.times from pg_temp.ways as w
  cross join lateral (
    select count(*) as times, min(e.type) as type from baton.read_events(w.way || ' ' || w.receipt) as e where e.type ~ '^step_(completed|failed|skipped)$'
  ) as n
  where n.times <> 1
    or n.type <> case when w.way = 'completion' then 'step_completed' when w.way like 'skip%' then 'step_skipped' else 'step_failed' end$$,
  'steps: one event of the end'
);
select is_empty(
  $$select s.run_id, s.status from baton.steps as s where s.status = 'created' or s.open_tasks <> 0$$, 'steps: nothing of them is open'
);
select is_empty($$select t.run_id, t.status from baton.tasks as t where t.status in ('created', 'started')$$, 'steps: nor a task');
select is_empty($$select m.run_id from baton.messages as m where m.kind = 'task' and m.claimed_at is null$$, 'steps: no message of a task waits');
select is(baton_test.wedged(), null, 'steps: no run is wedged');
update baton.settings set max_lapses = default;

-- Woken once, also where a wake waits already, or two steps end

select m as am, d as ad, e as ae from baton_test.made('a', 2) \gset
select baton_test.step('a', :ae, 't'), baton_test.dispatch('a', :ae, 0), baton_test.finish('a', :ae) \g /dev/null
select m as a0m, d as a0d from baton_test.take_task('a', 0, step_slug => 't') \gset
select baton_test.begin(:a0m, :a0d) \g /dev/null
select outcome from baton.wake_run('a') \g /dev/null
select baton_test.complete('a', :a0m, :a0d, step_slug => 't') \g /dev/null
select outcome from baton.skip_step('a', 's') \g /dev/null
select is(baton_test.messages('a'), 'wake 00:00:00', 'wakes: two steps end beside a wake: there is one');
select is(baton_test.steps('a'), 's skipped 0/2, t completed 0/1', 'wakes: both have ended');

-- A run that ends: tasks in every state, messages in every state

create function baton_test.prepare(run_id text)
returns table (what text, m bigint, d bigint)
language plpgsql
as $$
declare
  v_run record;
  v record;
begin
  select n.* into strict v_run from baton_test.made(prepare.run_id, 8) as n;
  perform baton_test.step(prepare.run_id, v_run.e, 'done');
  perform baton_test.dispatch(prepare.run_id, v_run.e);
  perform baton.extend(v_run.m, v_run.d, '1 hour');
  what := 'replay';
  m := v_run.m;
  d := v_run.d;
  return next;
  perform baton_test.take_task(prepare.run_id, 0, step_slug => 'done');
  perform baton_test.started(prepare.run_id, 1);
  perform baton_test.complete(prepare.run_id, null, null, 1, 1);
  delete from baton.messages as n where n.run_id = prepare.run_id and n.step_slug = 's' and n.task_index = 1;
  select s.m, s.d into strict v from baton_test.started(prepare.run_id, 2, '1 hour') as s;
  what := 'started';
  m := v.m;
  d := v.d;
  return next;
  select s.m, s.d into strict v from baton_test.take_task(prepare.run_id, 3, '1 hour') as s;
  what := 'claimed';
  m := v.m;
  d := v.d;
  return next;
  select s.m, s.d into strict v from baton_test.started(prepare.run_id, 4, '1 second') as s;
  what := 'ran out';
  m := v.m;
  d := v.d;
  return next;
  select s.m, s.d into strict v from baton_test.started(prepare.run_id, 5) as s;
  perform baton_test.fail(prepare.run_id, v.m, v.d, task_index => 5, retry_delay => '1 day');
  select s.m, s.d into strict v from baton_test.started(prepare.run_id, 6) as s;
  perform baton_test.complete(prepare.run_id, v.m, v.d, 1, 6);
  perform baton.wake_run(prepare.run_id);
  perform baton_test.advance('1 second');
end;
$$;
create function baton_test.ended(run_id text, how text)
returns text
language plpgsql
as $$
declare
  v_said text;
  v_epoch bigint;
begin
  select r.replay_epoch into strict v_epoch from baton.runs as r where r.run_id = ended.run_id;
  case ended.how
    when 'complete' then
      select outcome into v_said from baton.complete_run(ended.run_id, v_epoch, '1');
    when 'fail' then
      select outcome into v_said from baton.fail_run(ended.run_id, v_epoch, '1');
    when 'cancel' then
      select outcome into v_said from baton.cancel_run(ended.run_id, 'x');
  end case;
  return v_said;
end;
$$;
create table pg_temp.held as
select h.how, p.*
from unnest(array['complete', 'fail', 'cancel']) as h (how) cross join lateral baton_test.prepare(h.how) as p;
select is(
  baton_test.messages('cancel'),
  'keyless 00:59:59 claimed, s/2 00:59:59 claimed, s/3 00:59:59 claimed, s/4 00:00:00 claimed, s/5 23:59:59, s/7 -00:00:01, done/0 00:00:29 claimed, wake -00:00:01',
  'runs: messages in every state'
);
select is(
  (select string_agg(baton_test.ended(h.how, h.how), ' ') from unnest(array['complete', 'fail', 'cancel']) as h (how)), 'done done done', 'runs: each ends'
);
select is_empty(
  $$select t.run_id, t.step_slug, t.task_index, t.status from baton.tasks as t
  where t.run_id in ('complete', 'fail', 'cancel')
    and t.status <> case when t.step_slug = 's' and t.task_index in (1, 6) then 'completed' else 'cancelled' end$$,
  'runs: what was unfinished is cancelled, what was completed stays that'
);
select is(
  (select string_agg(distinct baton_test.steps(h.how), '; ') from unnest(array['complete', 'fail', 'cancel']) as h (how)),
  's cancelled 0/8, done cancelled 0/1', 'runs: steps too'
);
select is(
  (select string_agg(baton_test.messages(h.how), '; ' order by h.how) from unnest(array['complete', 'fail', 'cancel']) as h (how)),
  'keyless 00:59:59 claimed, s/2 00:59:59 claimed, s/3 00:59:59 claimed, done/0 00:00:29 claimed; '
  's/2 00:59:57 claimed, s/3 00:59:57 claimed, done/0 00:00:27 claimed; s/2 00:59:58 claimed, s/3 00:59:58 claimed, done/0 00:00:28 claimed',
  'runs: unclaimed messages go, and those whose claim ran out'
);
select is(
  (select count(*) from baton.events as e where e.run_id in ('complete', 'fail', 'cancel') and e.seq > (
    select min(f.seq) from baton.events as f where f.run_id = e.run_id and f.type in ('run_completed', 'run_failed', 'run_cancelled')
  )), 0::bigint, 'runs: with one event, the last'
);

-- Claimed messages can do nothing any more: each verb, on the three runs

select is(
  (select string_agg(outcome, ' ') from pg_temp.held as h cross join lateral baton.start_task(h.m, h.d) where h.what = 'claimed'),
  'skip skip skip', 'powerless: start_task'
);
select is(
  (select string_agg(distinct s.said, ' ') from (
    select baton_test.complete(h.how, h.m, h.d, 1, 2) as said from pg_temp.held as h where h.what = 'started' and h.how = 'complete'
    union all
    select baton_test.fail(h.how, h.m, h.d, 1, task_index => 2) from pg_temp.held as h where h.what = 'started' and h.how = 'fail'
  ) as s), 'too_late', 'powerless: complete_task and fail_task'
);
select is(
  (select outcome from pg_temp.held as h cross join lateral baton.extend(h.m, h.d) where h.what = 'started' and h.how = 'cancel'), 'cancelled', 'powerless: extend'
);
select is(
  (select string_agg(outcome, ' ') from pg_temp.held as h cross join lateral baton.extend(h.m, h.d) where h.what in ('started', 'ran out')),
  'lost lost lost lost lost lost', 'powerless: those messages are gone by now'
);
select is((select outcome from pg_temp.held as h cross join lateral baton.begin_replay(h.m, h.d) where h.what = 'replay' and h.how = 'cancel'), 'terminal', 'powerless: begin_replay');
select is(
  (select string_agg(baton_test.messages(h.how), '; ' order by h.how) from unnest(array['complete', 'fail', 'cancel']) as h (how)),
  'done/0 00:00:29 claimed; done/0 00:00:27 claimed; done/0 00:00:28 claimed', 'powerless: and every answer settles its message'
);
select is(
  (select string_agg(distinct baton_test.release(h.how, task_index => 4), ' ') from unnest(array['complete', 'fail', 'cancel']) as h (how)), 'terminal cancelled', 'powerless: release_task'
);
select is(
  (select string_agg(outcome || ' ' || c.status, ', ' order by h.how) from unnest(array['complete', 'fail', 'cancel']) as h (how) cross join lateral baton.cancel_run(h.how, 'again') as c),
  'terminal cancelled, terminal completed, terminal failed', 'powerless: cancel_run'
);
select baton_test.advance('1 hour') \g /dev/null
select is((select count(*) from unnest(array['complete', 'fail', 'cancel']) as q (name), lateral baton.claim(q.name, max_messages => 10)), 3::bigint, 'powerless: what was left is claimed once more');
select is(
  (select string_agg(distinct s.outcome, ' ') from baton.messages as m cross join lateral baton.start_task(m.message_id, m.delivery) as s where m.step_slug = 'done'),
  'skip', 'powerless: and goes'
);
select is((select count(*) from baton.messages as m where m.run_id in ('complete', 'fail', 'cancel')), 0::bigint, 'powerless: no message of a finished run retries for ever');

-- Other runs are left alone

select baton_test.queued('other', 2) \g /dev/null
select baton_test.queued('mine', 2) \g /dev/null
select outcome from baton.cancel_run('mine', 'x') \g /dev/null
select is(baton_test.messages('other') || ', ' || baton_test.steps('other'), 's/0 00:00:00, s/1 00:00:00, s created 2/2', 'others: another run''s messages and steps');
select * from finish();
rollback;
