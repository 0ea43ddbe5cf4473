-- What the files about steps and tasks share, after _queue.sql. A run's queue has the run's name, so that runs don't
-- meet. Verbs answer as words.

create function baton_test.start(run_id text)
returns text
language sql
volatile
begin atomic
  select s.outcome from baton.start_run('w', '{"in": 1}', start.run_id, start.run_id) as s;
end;

create function baton_test.worker(number integer)
returns uuid
language sql
immutable
begin atomic
  select lpad(worker.number::text, 32, '0')::uuid;
end;

-- Claims one run message of a run.
create function baton_test.take(
  run_id text, visibility interval default null, worker_id uuid default null, out m bigint, out d bigint
)
language sql
volatile
begin atomic
  select c.message_id, c.delivery
  from baton.claim(take.run_id, take.worker_id, visibility => take.visibility, for_run => take.run_id) as c;
end;

-- The same, and begins a replay.
create function baton_test.replay(
  run_id text, visibility interval default null, worker_id uuid default null, out m bigint, out d bigint, out e bigint
)
language plpgsql
volatile
as $$
begin
  select t.m, t.d
  into strict replay.m, replay.d
  from baton_test.take(replay.run_id, replay.visibility, replay.worker_id) as t;
  select b.replay_epoch
  into strict replay.e
  from baton.begin_replay(replay.m, replay.d) as b
  where b.outcome = 'granted';
end;
$$;

-- Wakes the run and replays it under the wake.
create function baton_test.again(run_id text, visibility interval default null, out m bigint, out d bigint, out e bigint)
language plpgsql
volatile
as $$
begin
  perform baton.wake_run(again.run_id);
  select r.m, r.d, r.e into strict again.m, again.d, again.e from baton_test.replay(again.run_id, again.visibility) as r;
end;
$$;

create function baton_test.step(
  run_id text, epoch bigint, step_slug text default 's', tasks integer default 1,
  on_exhausted text default 'fail_step', max_attempts integer default 3
)
returns text
language sql
volatile
begin atomic
  select c.outcome
  from baton.create_step(
    step.run_id, step.epoch, step.step_slug,
    (select coalesce(jsonb_agg(i.nth - 1 order by i.nth), '[]') from generate_series(1, step.tasks) as i (nth)),
    step.on_exhausted, step.max_attempts
  ) as c;
end;

-- A new run whose first replay has created a step, and goes on.
create function baton_test.made(
  run_id text, tasks integer default 1, on_exhausted text default 'fail_step', max_attempts integer default 3,
  worker_id uuid default null, out m bigint, out d bigint, out e bigint
)
language plpgsql
volatile
as $$
begin
  perform baton_test.start(made.run_id);
  select r.m, r.d, r.e
  into strict made.m, made.d, made.e
  from baton_test.replay(made.run_id, worker_id => made.worker_id) as r;
  perform baton_test.step(made.run_id, made.e, 's', made.tasks, made.on_exhausted, made.max_attempts);
end;
$$;

-- What a replay hears of its tasks: outcome, step/task#attempt, a delay if there is one.
create function baton_test.dispatch(run_id text, epoch bigint, inline_limit integer default 1)
returns text
language sql
volatile
begin atomic
  select string_agg(
    concat_ws(' ', t.outcome, t.step_slug || '/' || t.task_index || '#' || t.attempt, nullif(t.delay, '0')), ', '
    order by t.nth
  )
  from baton.dispatch_tasks(dispatch.run_id, dispatch.epoch, dispatch.inline_limit)
    with ordinality as t (outcome, step_slug, task_index, attempt, input, delay, nth);
end;

-- Ends a replay that has seen everything.
create function baton_test.finish(run_id text, epoch bigint, wake_at timestamptz default null)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', n.outcome, n.last_seq, n.status)
  from baton.runs as r
  cross join lateral baton.end_replay(finish.run_id, finish.epoch, r.last_seq, finish.wake_at) as n
  where r.run_id = finish.run_id;
end;

-- A new run with a task that was started inline and whose replay has ended.
create function baton_test.inline(
  run_id text, max_attempts integer default 3, on_exhausted text default 'fail_step', out m bigint, out d bigint
)
language plpgsql
volatile
as $$
declare
  v_epoch bigint;
begin
  select n.m, n.d, n.e
  into strict inline.m, inline.d, v_epoch
  from baton_test.made(inline.run_id, 1, inline.on_exhausted, inline.max_attempts) as n;
  perform baton_test.dispatch(inline.run_id, v_epoch);
  perform baton_test.finish(inline.run_id, v_epoch);
end;
$$;

-- A new run whose tasks were all sent, and whose replay has ended.
create function baton_test.queued(
  run_id text, tasks integer default 1, max_attempts integer default 3, on_exhausted text default 'fail_step'
)
returns void
language plpgsql
volatile
as $$
declare
  v_epoch bigint;
begin
  select n.e
  into strict v_epoch
  from baton_test.made(queued.run_id, queued.tasks, queued.on_exhausted, queued.max_attempts) as n;
  perform baton_test.dispatch(queued.run_id, v_epoch, 0);
  perform baton_test.finish(queued.run_id, v_epoch);
end;
$$;

-- Claims a task's own message, if it is due.
create function baton_test.take_task(
  run_id text, task_index integer default 0, visibility interval default '30 seconds', step_slug text default 's',
  worker_id uuid default null, out m bigint, out d bigint
)
language sql
volatile
begin atomic
  update baton.messages
  set delivery = baton._new_delivery(), claimed_at = baton._now(), claimed_by = take_task.worker_id,
    visible_at = baton._now() + take_task.visibility
  where queue_name = take_task.run_id
    and dedupe_key = concat_ws(e'\x1f', take_task.run_id, take_task.step_slug, take_task.task_index)
    and visible_at <= baton._now()
  returning message_id, delivery;
end;

-- The same, and starts it.
create function baton_test.started(
  run_id text, task_index integer default 0, visibility interval default '30 seconds', out m bigint, out d bigint, out a integer
)
language plpgsql
volatile
as $$
begin
  select t.m, t.d
  into strict started.m, started.d
  from baton_test.take_task(started.run_id, started.task_index, started.visibility) as t;
  select s.attempt into strict started.a from baton.start_task(started.m, started.d) as s where s.outcome = 'execute';
end;
$$;

create function baton_test.begin(message_id bigint, delivery bigint)
returns text
language sql
volatile
begin atomic
  select concat_ws(
    ' ', s.outcome, case when s.outcome = 'execute' then s.step_slug || '/' || s.task_index || '#' || s.attempt end,
    s.retry_after
  )
  from baton.start_task("begin".message_id, "begin".delivery) as s;
end;

create function baton_test.complete(
  run_id text, message_id bigint, delivery bigint, attempt integer default 1, task_index integer default 0,
  step_slug text default 's'
)
returns text
language sql
volatile
begin atomic
  select c.outcome || case when c.step_ended then ' ended' else '' end
  from baton.complete_task(
    complete.run_id, complete.step_slug, complete.task_index, complete.attempt,
    to_jsonb('out ' || complete.task_index), complete.message_id, complete.delivery
  ) as c;
end;

create function baton_test.fail(
  run_id text, message_id bigint, delivery bigint, attempt integer default 1, retry_delay interval default '10 seconds',
  final boolean default false, task_index integer default 0
)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', f.outcome, f.retry_at - baton._now(), case when f.step_ended then 'ended' end)
  from baton.fail_task(
    fail.run_id, 's', fail.task_index, fail.attempt, '"broken"', fail.message_id, fail.delivery, fail.retry_delay,
    fail.final
  ) as f;
end;

create function baton_test.release(
  run_id text, action text default 'requeue', task_index integer default 0, step_slug text default 's'
)
returns text
language sql
volatile
begin atomic
  select concat_ws(' ', r.outcome, r.status)
  from baton.release_task(release.run_id, release.step_slug, release.task_index, release.action) as r;
end;

-- How a task stands: status, attempt, failures/lapses, fence, the message that owns it (run or task), its retry.
create function baton_test.task(run_id text, task_index integer default 0, step_slug text default 's')
returns text
language sql
stable
begin atomic
  select concat_ws(
    ' ', t.status, t.attempt, t.failures || '/' || t.lapses, 'fence ' || nullif(t.fence_attempt, 0),
    'under ' || case when t.owner_message_id is not null then coalesce(m.kind, 'nothing') end, t.retry_at - baton._now()
  )
  from baton.tasks as t
  left join baton.messages as m
    on m.message_id = t.owner_message_id and m.delivery = t.owner_delivery and m.claimed_at is not null
  where t.run_id = task.run_id and t.step_slug = task.step_slug and t.task_index = task.task_index;
end;

-- The steps of a run: slug, status, open tasks of all tasks.
create function baton_test.steps(run_id text)
returns text
language sql
stable
begin atomic
  select string_agg(format('%s %s %s/%s', s.step_slug, s.status, s.open_tasks, s.task_count), ', ' order by s.created_seq)
  from baton.steps as s
  where s.run_id = steps.run_id;
end;

-- How a run stands: status, last_seq/wake_seq/replayed_seq, what else is set.
create function baton_test.run(run_id text)
returns text
language sql
stable
begin atomic
  select concat_ws(
    ' ', r.status, concat_ws('/', r.last_seq, r.wake_seq, r.replayed_seq), case when r.wake_pending then 'wake' end,
    case when not r.replay_ended then 'held' end
  )
  from baton.runs as r
  where r.run_id = run.run_id;
end;

-- Its log after its first two events (run_created, step_created), as words.
create function baton_test.log(run_id text)
returns text
language sql
volatile
begin atomic
  select string_agg(
    concat_ws(
      ' ', e.type,
      case when e.type like 'task%' then (e.payload ->> 'task_index') || '#' || (e.payload ->> 'attempt') end
    ), ', ' order by e.seq
  )
  from baton.read_events(log.run_id, 2) as e;
end;

create function baton_test.incidents_of(run_id text)
returns text
language sql
stable
begin atomic
  select string_agg(i.kind, ' ' order by i.incident_id) from baton.incidents as i where i.run_id = incidents_of.run_id;
end;
