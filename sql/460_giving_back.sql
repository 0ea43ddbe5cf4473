/*
 * park and fail: giving a message back. A user's message is locked alone. A run message ends the replay that it holds
 * and becomes the run's wake, so that signals can neither cut a back-off nor multiply messages; it counts on the run,
 * whichever messages drive it.
 */

-- The run's wake, due at the given time: where there is none, the message that is given back (null: a new one); a wake
-- that waits unclaimed takes the later time instead; where somebody holds the wake, the message waits beside it.
create or replace function baton._set_back(
  run baton.runs, message_id bigint, due_at timestamptz, at timestamptz
)
returns timestamptz
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message_id bigint := _set_back.message_id;
  v_due_at timestamptz := _set_back.due_at;
  v_wake_id bigint;
  v_wake baton.messages;
begin
  select m.message_id
  into v_wake_id
  from baton.messages as m
  where m.message_id = (_set_back.run).wake_message_id;
  select m.*
  into v_wake
  from baton.messages as m
  where m.message_id = v_wake_id
    and m.message_id is distinct from _set_back.message_id
    and (m.claimed_at is null or m.visible_at <= _set_back.at)
  for no key update of m skip locked;
  if found then
    v_due_at := greatest(v_wake.visible_at, _set_back.due_at);
    delete from baton.messages as m where m.message_id = _set_back.message_id;
    update baton.messages as m set visible_at = v_due_at, claimed_at = null where m.message_id = v_wake_id;
  elsif _set_back.message_id is null then
    v_message_id := baton._send_run_message(_set_back.run, null, _set_back.due_at, _set_back.at);
  else
    update baton.messages as m
    set dedupe_key = null, visible_at = _set_back.due_at, claimed_at = null
    where m.message_id = _set_back.message_id;
  end if;
  update baton.runs as r
  set wake_pending = true, needs_driver = true, wake_message_id = coalesce(v_wake_id, v_message_id)
  where r.run_id = (_set_back.run).run_id;
  return v_due_at;
end;
$$;

create or replace function baton._end_replay_under(run baton.runs, message baton.messages)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  update baton.runs as r
  set replay_epoch = baton._new_delivery(), replay_ended = true
  where r.run_id = (_end_replay_under.run).run_id
    and not r.replay_ended
    and r.replay_message_id = (_end_replay_under.message).message_id
    and r.replay_delivery = (_end_replay_under.message).delivery;
end;
$$;

-- The tasks of the bodies that run under a message go back to created.
create or replace function baton._release_owned(run baton.runs, message baton.messages, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_task baton.tasks;
  v_run baton.runs := _release_owned.run;
begin
  for v_task in
    select t.*
    from baton.tasks as t
    where t.owner_message_id = (_release_owned.message).message_id
      and t.owner_delivery = (_release_owned.message).delivery
      and t.status = 'started'
    order by t.step_slug, t.task_index
  loop
    v_run := baton._release(v_run, v_task, _release_owned.at);
  end loop;
  if v_run.last_seq > (_release_owned.run).last_seq then
    perform baton._save_positions(v_run);
  end if;
end;
$$;

-- The run of a run message, or by force of any: locked before the message.
create or replace function baton._lock_run_of(message_id bigint, force boolean)
returns baton.runs
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run_id text;
begin
  select m.run_id
  into v_run_id
  from baton.messages as m
  where m.message_id = _lock_run_of.message_id and (m.kind = 'run' or _lock_run_of.force);
  if v_run_id is not null then
    return baton._lock_run(v_run_id);
  end if;
  return null;
end;
$$;

create or replace function baton.park(
  message_id bigint,
  delivery bigint,
  delay interval default '0',
  force boolean default false,
  out outcome text,
  out visible_at timestamptz
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_run baton.runs;
  v_message baton.messages;
  v_now timestamptz;
begin
  perform baton._check_interval('delay', park.delay);
  v_run := baton._lock_run_of(park.message_id, coalesce(park.force, false));
  v_message := baton._lock_receipt(park.message_id, park.delivery);
  v_now := baton._now();
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(park.message_id, park.delivery, 'park');
  elsif not baton._has_purpose(v_message) then
    outcome := 'cancelled';
    delete from baton.messages as m where m.message_id = v_message.message_id;
  elsif park.force is not true and baton._owns(v_message.message_id, v_message.delivery) then
    outcome := 'in_use';
  elsif v_message.kind is distinct from 'run' then
    perform baton._release_owned(v_run, v_message, v_now);
    update baton.messages as m
    set visible_at = v_now + coalesce(park.delay, '0'), claimed_at = null
    where m.message_id = v_message.message_id
    returning 'parked', m.visible_at into park.outcome, park.visible_at;
  else
    outcome := 'parked';
    perform baton._end_replay_under(v_run, v_message);
    perform baton._release_owned(v_run, v_message, v_now);
    visible_at := baton._set_back(v_run, v_message.message_id, v_now + coalesce(park.delay, '0'), v_now);
  end if;
end;
$$;

comment on function baton.park(bigint, bigint, interval, boolean) is
'Give a message back: it is due again after the delay. Counts nothing. A run message ends the replay that it holds and becomes the run''s wake.
Arguments: delay, by default none; force, for a handler that has stopped the bodies under a run message, or can''t run them: their tasks are given out anew.
Outcomes: parked, with visible_at; in_use, where bodies run under it (unless forced); cancelled: its run or task has ended, it is removed; lost, where the receipt is not current
Raises: 22023; for a run message, or by force, 25001
Locks: the message; of a run message, or by force, the run first';

create or replace function baton.fail(
  message_id bigint,
  delivery bigint,
  error text,
  delay interval default null,
  final boolean default false,
  force boolean default false,
  out outcome text,
  out visible_at timestamptz
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_kind text;
  v_run baton.runs;
  v_message baton.messages;
  v_now timestamptz;
  v_due_at timestamptz;
begin
  perform baton._check_interval('delay', fail.delay);
  perform baton._check_size('error', octet_length(fail.error));
  select m.kind into v_kind from baton.messages as m where m.message_id = fail.message_id;
  if v_kind is null or v_kind not in ('run', 'task') then
    select f.outcome, f.visible_at
    into fail.outcome, fail.visible_at
    from baton._fail_message(fail.message_id, fail.delivery, fail.error, fail.delay, coalesce(fail.final, false)) as f;
    return;
  end if;

  v_run := baton._lock_run_of(fail.message_id, coalesce(fail.force, false));
  v_message := baton._lock_receipt(fail.message_id, fail.delivery);
  v_now := baton._now();
  if v_message.message_id is null then
    outcome := 'lost';
    perform baton._note_lost(fail.message_id, fail.delivery, 'fail');
    return;
  elsif not baton._has_purpose(v_message) then
    outcome := 'cancelled';
    delete from baton.messages as m where m.message_id = v_message.message_id;
    return;
  elsif v_kind = 'task' then
    if fail.force is not true and baton._owns(v_message.message_id, v_message.delivery) then
      outcome := 'in_use';
      return;
    end if;
    perform baton._release_owned(v_run, v_message, v_now);
    update baton.messages as m
    set failures = m.failures + 1,
      last_error = fail.error,
      visible_at = v_now + coalesce(fail.delay, baton._backoff(m.failures + 1)),
      claimed_at = null
    where m.message_id = v_message.message_id
    returning 'failed', m.visible_at into fail.outcome, fail.visible_at;
    return;
  end if;

  v_run.failures := v_run.failures + 1;
  update baton.runs as r set failures = v_run.failures where r.run_id = v_run.run_id;
  if fail.final or v_run.failures >= (select s.max_failures from baton.settings as s where s.singleton) then
    outcome := 'dead';
    perform baton._end_run(
      v_run, 'failed',
      jsonb_build_object('reason', case when fail.final then 'final' else 'max_failures' end, 'error', fail.error),
      v_now
    );
    delete from baton.messages as m where m.message_id = v_message.message_id;
    perform baton._incident(
      v_now, 'limit_reached', queue_name => v_run.queue_name, message_id => v_message.message_id,
      run_id => v_run.run_id, detail => jsonb_build_object('failures', v_run.failures)
    );
    return;
  end if;

  v_due_at := v_now + coalesce(fail.delay, baton._backoff(v_run.failures));
  perform baton._end_replay_under(v_run, v_message);
  if baton._owns(v_message.message_id, v_message.delivery) and fail.force is not true then
    outcome := 'in_use';
    visible_at := baton._set_back(v_run, null, v_due_at, v_now);
  else
    outcome := 'failed';
    perform baton._release_owned(v_run, v_message, v_now);
    update baton.messages as m set last_error = fail.error where m.message_id = v_message.message_id;
    visible_at := baton._set_back(v_run, v_message.message_id, v_due_at, v_now);
  end if;
end;
$$;

comment on function baton.fail(bigint, bigint, text, interval, boolean, boolean) is
'Say that a message could not be handled: it counts a failure and is due again later, or is dead. Of a run message the failure is the run''s: it ends the replay that it holds and becomes the run''s wake, and at the limit the run fails. A delivery''s final failure dismisses the invocation that it was to deliver.
Arguments: error, for people; delay, by default settings.backoff_base doubled with each failure up to settings.backoff_max, give or take a fifth; final, as at its limit; force, as in park.
Outcomes: failed, with visible_at; dead, at settings.max_failures or final (a task message has no limit); in_use, where bodies run under it (unless forced): the wake is sent, the message stays claimed; cancelled: its run or task has ended, it is removed; lost, where the receipt is not current
Raises: 22023, 54000; for a run message, by force, or where it ends a delivery, 25001
Locks: the message; of a run message, or by force, the run first, where it ends a delivery the function first';
