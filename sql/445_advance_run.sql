/*
 * The short way from one inline step to the next. The handler that ran the body has decided already what comes after
 * it, over a log that nobody has added to since its replay: there is nothing that another replay could see.
 */
create or replace function baton.advance_run(
  run_id text,
  replay_epoch bigint,
  step_slug text,
  output jsonb,
  next_step_slug text,
  next_input jsonb,
  on_exhausted text default 'fail_step',
  max_attempts integer default 3,
  out outcome text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   advanced where all of this holds, else declined
 *   the run's last replay had this epoch, and has ended
 *   nothing has asked for a replay since: no event, no wake, no timer
 *   its receipt is current and has not run out, and its worker goes on
 *   the task is its step's only one (a sibling's end asks for no replay), and the run's only unfinished one
 *   it was started under that receipt, for the first time, and has no message
 *   the next step is new
 */
declare
  v_run record;
  v_message record;
  v_on_exhausted text := coalesce(advance_run.on_exhausted, 'fail_step');
  v_max_attempts integer := coalesce(advance_run.max_attempts, 3);
  v_now timestamptz;
begin
  perform
    baton._check_step(advance_run.next_step_slug, advance_run.on_exhausted, advance_run.max_attempts),
    baton._check_size('output', pg_column_size(advance_run.output)),
    baton._check_size('next_input', pg_column_size(jsonb_build_array(advance_run.next_input)));
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  outcome := 'declined';
  -- The write that locks the run gives out the position: most calls need no other.
  update baton.runs as r
  set last_seq = r.last_seq + 1
  where r.run_id = advance_run.run_id
    and r.replay_ended
    and r.replay_epoch = advance_run.replay_epoch
    and r.replayed_seq >= r.wake_seq
    and not r.wake_pending
    and r.wake_at is null
  returning r.run_id, r.last_seq, r.replay_message_id, r.replay_delivery into v_run;
  if not found then
    return;
  end if;
  -- _lock_receipt, written out, as it is called for each step.
  select m.message_id, m.delivery, m.visible_at, m.claimed_by
  into v_message
  from baton.messages as m
  where m.message_id = v_run.replay_message_id and m.delivery = v_run.replay_delivery and m.claimed_at is not null
  for no key update of m;
  v_now := baton._now();

  update baton.tasks as t
  set status = 'completed'
  where t.run_id = v_run.run_id
    and t.step_slug = advance_run.step_slug
    and t.task_index = 0
    -- "Is true" keeps it a look-up by the whole key.
    and (
      t.status = 'started'
      and t.attempt = 1
      and t.owner_message_id = v_message.message_id
      and t.owner_delivery = v_message.delivery
      and v_message.visible_at > v_now
    ) is true
    and (v_message.claimed_by is null or baton._may_run(v_message.claimed_by))
    and exists (
      select
      from baton.steps as s
      where s.run_id = v_run.run_id and s.step_slug = advance_run.step_slug and s.task_count = 1
    )
    and not exists (
      select
      from baton.tasks as o
      where o.run_id = v_run.run_id
        and o.status in ('created', 'started')
        and (o.step_slug, o.task_index) <> (advance_run.step_slug, 0)
    )
    and not exists (
      select
      from baton.messages as m
      where m.dedupe_key = baton._task_key(v_run.run_id, advance_run.step_slug, 0)
    )
    and not exists (
      select
      from baton.steps as s
      where s.run_id = v_run.run_id and s.step_slug = advance_run.next_step_slug
    );
  if not found then
    update baton.runs as r set last_seq = r.last_seq - 1 where r.run_id = v_run.run_id;
    return;
  end if;

  outcome := 'advanced';
  with ended as (
    update baton.steps as s
    set status = 'completed', open_tasks = 0
    where s.run_id = v_run.run_id and s.step_slug = advance_run.step_slug
  ),
  created as (
    insert into baton.steps (run_id, step_slug, task_count, open_tasks, on_exhausted, max_attempts, created_seq)
    values (v_run.run_id, advance_run.next_step_slug, 1, 1, v_on_exhausted, v_max_attempts, v_run.last_seq)
  ),
  started as (
    insert into baton.tasks (
      run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery, last_started_at, worker_id,
      input
    )
    values (
      v_run.run_id, advance_run.next_step_slug, 0, 'started', 1, v_message.message_id, v_message.delivery, v_now,
      v_message.claimed_by, coalesce(advance_run.next_input, 'null')
    )
  )
  insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)
  values (
    v_run.run_id, v_run.last_seq, 'run_advanced', advance_run.next_step_slug,
    jsonb_build_object(
      'step_slug', advance_run.step_slug, 'output', advance_run.output, 'next_step_slug', advance_run.next_step_slug,
      'on_exhausted', v_on_exhausted, 'max_attempts', v_max_attempts, 'message_id', v_message.message_id,
      'delivery', v_message.delivery
    ),
    v_now
  );
end;
$$;

comment on function baton.advance_run(text, bigint, text, jsonb, text, jsonb, text, integer) is
'Record the output of the one body that runs inline, and start the next step here, in one call, one commit and one event, run_advanced: what complete_task, begin_replay, create_step, dispatch_tasks and end_replay would do, where nothing else has happened to the run since the caller''s last replay. Where it is declined, take the long way.
Arguments: replay_epoch, of the caller''s last replay; step_slug, the step of one task whose body has ended; output, of that; next_step_slug, unique in the run; next_input, of its one task; on_exhausted and max_attempts, as in create_step.
Outcomes: advanced: the caller runs the body of the next step, task 0, attempt 1, under the same receipt; declined: nothing was changed, and the message stays as it is. That is so if the run has ended or is unknown; if a signal or anything else came that asks for a replay, another replay was granted, or the caller''s has not ended; if the receipt is not current, its claim has run out, or the worker stops; if a timer is set or other tasks are unfinished; if the step has several tasks, or its body has ended, does not run under this receipt, is not in its first attempt, or has a message of its own; or if there is a step of the next one''s name
Raises: 22023, 54000, 25001
Locks: the run, then the message
Source: eager activity execution of Temporal';
