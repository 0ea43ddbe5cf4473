/*
 * Runs: starting, waking, signalling.
 *
 * A wake is the message that wake_message_id names; it is there once until a replay is granted under it, and so shared
 * by all wakes before that. wake_pending says that a wake was asked for which no grant has followed yet.
 */
comment on table baton.runs is
'The runs, a row each.
Written by: _end_replay_under, _end_run, _give_up_run, _lose_replay, _prune_log, _prune_whole, _save_positions, _set_back, _wake, advance_run, after_restore, append_event, begin_replay, complete_task, create_step, dispatch_tasks, end_replay, fail, release_replay, signal_run, start_run, start_task, start_tasks, wake_run';
comment on column baton.runs.status is 'pending, running, suspended; completed, failed, cancelled.';
comment on column baton.runs.last_seq is 'The position of its newest event.';
comment on column baton.runs.wake_seq is 'The position of the newest that asks for a replay: a signal, the end of a step.';
comment on column baton.runs.replayed_seq is 'Up to which position the last replay that ended had read.';
comment on column baton.runs.wake_pending is 'A wake was asked for, and no grant has followed it.';
comment on column baton.runs.failures is 'Replays in a row that failed.';
comment on column baton.runs.lapses is 'Replays in a row that were lost.';
comment on column baton.runs.wake_at is 'When it asked to be woken; of a pending run, when it is to start.';
comment on column baton.runs.replay_epoch is 'The replay that was granted last: a random number below 2^53.';
comment on column baton.runs.replay_ended is 'Whether that replay has ended, so that its epoch is no longer current.';
comment on column baton.runs.replay_message_id is 'The receipt that it was granted under.';
comment on column baton.runs.replay_delivery is 'The receipt that it was granted under.';
comment on column baton.runs.replay_backend is 'The pid of its connection, for a session hold.';
comment on column baton.runs.needs_driver is 'It is open, and neither suspended with nothing unread nor waiting for a delayed start: somebody should be driving it.';
comment on column baton.runs.pruned_at is
'Since when it is being removed, in several calls of prune: every verb answers as if it were gone, and last_seq says how much of its log is left.';
comment on column baton.runs.wake_message_id is
'The message that all wakes share until a replay is granted under it; one that is gone counts as none.';

create or replace function baton._run_key(run_id text, purpose text)
returns text
language sql
immutable
begin atomic
  select _run_key.run_id || e'\x1f' || _run_key.purpose;
end;

create or replace function baton._send_run_message(
  run baton.runs, dedupe_key text, visible_at timestamptz, at timestamptz
)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message_id bigint;
begin
  insert into baton.messages as m (queue_name, kind, run_id, dedupe_key, visible_at, created_at)
  values (
    (_send_run_message.run).queue_name, 'run', (_send_run_message.run).run_id, _send_run_message.dedupe_key,
    _send_run_message.visible_at, _send_run_message.at
  )
  returning m.message_id into v_message_id;
  perform baton._notify_message((_send_run_message.run).queue_name);
  return v_message_id;
end;
$$;

-- The run's wake is there, or is sent. The caller holds the run's lock, and writes what it answers as wake_message_id.
create or replace function baton._ensure_wake(run baton.runs, at timestamptz)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from baton.messages as m where m.message_id = (_ensure_wake.run).wake_message_id) then
    return (_ensure_wake.run).wake_message_id;
  end if;
  return baton._send_run_message(_ensure_wake.run, null, _ensure_wake.at, _ensure_wake.at);
end;
$$;

create or replace function baton._wake(run baton.runs, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_wake_id bigint := baton._ensure_wake(_wake.run, _wake.at);
begin
  update baton.runs as r
  set wake_pending = true, needs_driver = true, wake_message_id = v_wake_id
  where r.run_id = (_wake.run).run_id
    and (r.wake_pending, r.wake_message_id) is distinct from (true, v_wake_id);
end;
$$;

create or replace function baton._is_asleep(run baton.runs, at timestamptz)
returns boolean
language sql
immutable
begin atomic
  select coalesce((_is_asleep.run).status = 'pending' and (_is_asleep.run).wake_at > _is_asleep.at, false);
end;

-- The run's timer is the message with the key (run, timer), due at wake_at. One that somebody has claimed loses its
-- key; one whose row is locked keeps it, and the new one goes without. One that is overdue already is due now: claims
-- don't look for messages that come long after their time.
create or replace function baton._set_timer(run baton.runs, wake_at timestamptz, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_key text := baton._run_key((_set_timer.run).run_id, 'timer');
  v_due_at timestamptz := greatest(_set_timer.wake_at, _set_timer.at);
  v_timer_id bigint;
  v_timer baton.messages;
begin
  select m.message_id
  into v_timer_id
  from baton.messages as m
  where m.dedupe_key = v_key;
  if v_timer_id is not null then
    select m.* into v_timer from baton.messages as m where m.message_id = v_timer_id for update of m skip locked;
    if not found then
      v_key := null;
    elsif v_timer.claimed_at is not null and v_timer.visible_at > _set_timer.at then
      update baton.messages as m set dedupe_key = null where m.message_id = v_timer_id;
    elsif _set_timer.wake_at is null then
      delete from baton.messages as m where m.message_id = v_timer_id;
    else
      update baton.messages as m
      set visible_at = v_due_at, claimed_at = null
      where m.message_id = v_timer_id;
      return;
    end if;
  end if;
  if _set_timer.wake_at is not null then
    perform baton._send_run_message(_set_timer.run, v_key, v_due_at, _set_timer.at);
  end if;
end;
$$;

-- Ordered by time: 48 bits of milliseconds, then random bits, as in a UUID of version 7.
create or replace function baton._new_run_id(at timestamptz)
returns text
language sql
volatile
begin atomic
  select
    regexp_replace(
      lpad(to_hex((extract(epoch from _new_run_id.at) * 1000)::bigint), 12, '0'), '(.{8})(.{4})', '\1-\2-7'
    ) || right(gen_random_uuid()::text, 21);
end;

create or replace function baton.start_run(
  out outcome text,
  workflow_name text,
  input jsonb,
  inout run_id text default null,
  queue_name text default 'default',
  delay interval default '0',
  out status text
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
  v_message_id bigint;
  v_now timestamptz := baton._now();
begin
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  run_id := coalesce(start_run.run_id, baton._new_run_id(v_now));
  perform
    baton._check_name('workflow_name', start_run.workflow_name),
    baton._check_users_queue(coalesce(start_run.queue_name, 'default')),
    baton._check_interval('delay', start_run.delay),
    baton._check_size('input', pg_column_size(start_run.input)),
    baton._check_name('run_id', start_run.run_id);

  loop
    if not exists (select from baton.runs as r where r.run_id = start_run.run_id) then
      v_message_id := nextval('baton.messages_message_id_seq');
      with created as (
        insert into baton.runs as r (
          run_id, workflow_name, queue_name, last_seq, wake_pending, wake_at, created_at, needs_driver, wake_message_id
        )
        select
          start_run.run_id, start_run.workflow_name, coalesce(start_run.queue_name, 'default'), 1, d.is_due,
          v_now + nullif(start_run.delay, '0'), v_now, d.is_due, case when d.is_due then v_message_id end
        from (select coalesce(start_run.delay <= '0', true) as is_due) as d
        on conflict do nothing
        returning r.*
      ),
      logged as (
        insert into baton.events (run_id, seq, type, payload, created_at)
        select c.run_id, 1, 'run_created', start_run.input, v_now
        from created as c
      )
      insert into baton.messages as m (message_id, queue_name, kind, run_id, dedupe_key, visible_at, created_at)
      overriding system value
      select
        v_message_id, c.queue_name, 'run', c.run_id,
        case when not c.wake_pending then baton._run_key(c.run_id, 'timer') end, coalesce(c.wake_at, v_now), v_now
      from created as c;
      if found then
        perform baton._notify_message(coalesce(start_run.queue_name, 'default'));
        outcome := 'created';
        status := 'pending';
        return;
      end if;
    end if;

    select
      case
        when r.pruned_at is null
          and r.workflow_name = start_run.workflow_name
          and r.queue_name = coalesce(start_run.queue_name, 'default')
          and e.payload is not distinct from start_run.input then 'exists'
        else 'conflict'
      end,
      case when r.pruned_at is null then r.status end
    into start_run.outcome, start_run.status
    from baton.runs as r
    left join baton.events as e on e.run_id = r.run_id and e.seq = 1
    where r.run_id = start_run.run_id;
    -- Not found: it was pruned meanwhile.
    exit when found;
  end loop;
end;
$$;

comment on function baton.start_run(text, jsonb, text, text, interval) is
'Start a run: the run and its first message, in the caller''s transaction. The run_id is the idempotency key until the run is pruned.
Arguments: run_id, 1 to 200 bytes, by default a new one, ordered by time; delay, until it is to start.
Outcomes: created; exists; conflict, where the run_id is taken by a run of another workflow, queue or input, or by one that is being pruned (status null); with run_id and status
Raises: 22023, 54000, 25001
Locks: none; waits only for another transaction that is starting the same run_id';

create or replace function baton.get_run(
  run_id text,
  out outcome text,
  out workflow_name text,
  out queue_name text,
  out status text,
  out output jsonb,
  out error jsonb,
  out created_at timestamptz,
  out ended_at timestamptz,
  out wake_at timestamptz
)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  select
    'found', r.workflow_name, r.queue_name, r.status,
    case when e.type = 'run_completed' then e.payload end,
    case when e.type in ('run_failed', 'run_cancelled') then e.payload end,
    r.created_at, r.ended_at, r.wake_at
  into
    get_run.outcome, get_run.workflow_name, get_run.queue_name, get_run.status, get_run.output, get_run.error,
    get_run.created_at, get_run.ended_at, get_run.wake_at
  from baton.runs as r
  -- "Offset 0" keeps it a look-up: a join that was planned for a short log would read all of a long one.
  left join lateral (
    select o.type, o.payload from baton.events as o where o.run_id = r.run_id and o.seq = r.last_seq offset 0
  ) as e on true
  where r.run_id = get_run.run_id and r.pruned_at is null;
  outcome := coalesce(outcome, 'unknown');
end;
$$;

comment on function baton.get_run(text) is
'How a run stands.
Outcomes: found, with workflow_name, queue_name, status, output (of a completed run), error (of a failed one; of a cancelled one the reason), created_at, ended_at, wake_at; unknown
Raises: none
Locks: none';

create or replace function baton.signal_run(
  run_id text, name text, payload jsonb default null, dedupe_key text default null, out outcome text, out status text
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
  v_now timestamptz;
  v_seq bigint;
begin
  perform
    baton._check_name('name', signal_run.name),
    baton._check_key(signal_run.dedupe_key),
    baton._check_size('payload', pg_column_size(signal_run.payload));
  v_run := baton._lock_run(signal_run.run_id);
  v_now := baton._now();
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
  elsif signal_run.dedupe_key is not null
    and baton._has_event(v_run.run_id, 'signal_received', signal_run.dedupe_key) then
    outcome := 'duplicate';
  else
    v_seq := baton._append(
      v_run, 'signal_received', signal_run.dedupe_key,
      jsonb_build_object('name', signal_run.name, 'payload', signal_run.payload), v_now
    );
    if baton._is_asleep(v_run, v_now) then
      update baton.runs as r set last_seq = v_seq, wake_seq = v_seq where r.run_id = v_run.run_id;
    else
      update baton.runs as r
      set last_seq = v_seq,
        wake_seq = v_seq,
        wake_pending = true,
        needs_driver = true,
        wake_message_id = baton._ensure_wake(v_run, v_now)
      where r.run_id = v_run.run_id;
    end if;
    outcome := 'signalled';
  end if;
end;
$$;

comment on function baton.signal_run(text, text, jsonb, text) is
'Append a signal to a run''s log and wake the run. A run whose delayed start is ahead keeps it for then.
Arguments: name and payload, what the workflow reads in signal_received; dedupe_key, 1 to 500 bytes: a second signal of the run with it is a duplicate.
Outcomes: signalled; duplicate; terminal, where it has ended, or (status null) is unknown; with status
Raises: 22023, 54000, 25001
Locks: the run';

create or replace function baton.wake_run(run_id text, out outcome text, out status text)
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
  v_now timestamptz;
begin
  v_run := baton._lock_run(wake_run.run_id);
  v_now := baton._now();
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
    return;
  end if;
  if baton._is_asleep(v_run, v_now) then
    update baton.runs as r set wake_at = null where r.run_id = v_run.run_id;
    perform baton._set_timer(v_run, null, v_now);
  end if;
  perform baton._wake(v_run, v_now);
  outcome := 'woken';
end;
$$;

comment on function baton.wake_run(text) is
'Have a run replayed, once for all wakes before that replay begins. A delayed run starts early.
Outcomes: woken; terminal, where it has ended, or (status null) is unknown; with status
Raises: 25001
Locks: the run';
