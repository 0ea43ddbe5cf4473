-- What the files about runs share, after _queue.sql. Steps and tasks are written directly.

create function baton_test.start(run_id text, delay interval default '0', queue_name text default 'q')
returns text
language sql
volatile
begin atomic
  select s.outcome
  from baton.start_run('w', '{"in": 1}', start.run_id, start.queue_name, start.delay) as s;
end;

-- Claims one run message of a run.
create function baton_test.take(
  run_id text, visibility interval default null, queue_name text default 'q', out m bigint, out d bigint
)
language sql
volatile
begin atomic
  select c.message_id, c.delivery
  from baton.claim(take.queue_name, visibility => take.visibility, for_run => take.run_id) as c;
end;

-- The same, and begins a replay.
create function baton_test.replay(
  run_id text, visibility interval default null, out m bigint, out d bigint, out e bigint
)
language plpgsql
volatile
as $$
begin
  select t.m, t.d into strict replay.m, replay.d from baton_test.take(replay.run_id, replay.visibility) as t;
  select b.replay_epoch into strict replay.e from baton.begin_replay(replay.m, replay.d) as b where b.outcome = 'granted';
end;
$$;

-- A new run that has been replayed once and is suspended.
create function baton_test.idle(run_id text, wake_at timestamptz default null)
returns void
language plpgsql
volatile
as $$
declare
  v_epoch bigint;
begin
  perform baton_test.start(idle.run_id);
  select b.e into strict v_epoch from baton_test.replay(idle.run_id) as b;
  perform baton.end_replay(idle.run_id, v_epoch, 1, idle.wake_at);
end;
$$;

create function baton_test.answer(message_id bigint, delivery bigint, hold text default 'lease')
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', b.outcome, case when b.outcome <> 'granted' then b.status end)
  from baton.begin_replay(answer.message_id, answer.delivery, answer.hold) as b;
end;

create function baton_test.finish_replay(
  run_id text, replay_epoch bigint, seen_seq bigint, wake_at timestamptz default null
)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', e.outcome, e.last_seq, e.status)
  from baton.end_replay(
    finish_replay.run_id, finish_replay.replay_epoch, finish_replay.seen_seq, finish_replay.wake_at
  ) as e;
end;

-- A step, and its tasks in these states.
create function baton_test.step(run_id text, step_slug text, variadic statuses text[])
returns void
language sql
volatile
begin atomic
  insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
  select
    step.run_id, step.step_slug, cardinality(step.statuses),
    (select count(*) from unnest(step.statuses) as s (status) where s.status in ('created', 'started')), 1;
  insert into baton.tasks (run_id, step_slug, task_index, status, attempt)
  select step.run_id, step.step_slug, s.nth - 1, s.status, (s.status <> 'created')::integer
  from unnest(step.statuses) with ordinality as s (status, nth);
end;

-- A body runs under this receipt.
create function baton_test.body(run_id text, message_id bigint, delivery bigint, step_slug text default 's')
returns void
language plpgsql
volatile
as $$
begin
  perform baton_test.step(body.run_id, body.step_slug, 'started');
  update baton.tasks as t
  set owner_message_id = body.message_id, owner_delivery = body.delivery, last_started_at = baton._now()
  where t.run_id = body.run_id and t.step_slug = body.step_slug;
end;
$$;

create function baton_test.task_message(run_id text, step_slug text, task_index integer, out m bigint)
language sql
volatile
begin atomic
  insert into baton.messages (
    queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at
  )
  select
    r.queue_name, 'task', r.run_id, task_message.step_slug, task_message.task_index,
    concat_ws(e'\x1f', r.run_id, task_message.step_slug, task_message.task_index), baton._now(), baton._now()
  from baton.runs as r
  where r.run_id = task_message.run_id
  returning message_id;
end;

-- How a run stands: status, last_seq/wake_seq/replayed_seq, failures/lapses, what else is set.
create function baton_test.run(run_id text)
returns text
language sql
stable
begin atomic
  select concat_ws(
    ' ', r.status, concat_ws('/', r.last_seq, r.wake_seq, r.replayed_seq), concat_ws('/', r.failures, r.lapses),
    case when r.wake_pending then 'wake' end, case when not r.replay_ended then 'held' end, r.wake_at - baton._now()
  )
  from baton.runs as r
  where r.run_id = run.run_id;
end;

-- Its log, as words.
create function baton_test.log(run_id text)
returns text
language sql
volatile
begin atomic
  select string_agg(e.type, ' ' order by e.seq) from baton.read_events(log.run_id) as e;
end;
