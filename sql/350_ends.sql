/*
 * How runs end: one path. What was unfinished is cancelled with it, its unclaimed messages go, and claimed ones can do
 * nothing any more. Of racing ends one wins; the others are told what the run is.
 */

-- The caller holds the run's lock, and knows that it is open.
create or replace function baton._end_run(run baton.runs, status text, payload jsonb, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_seq bigint;
begin
  v_seq := baton._append(_end_run.run, 'run_' || _end_run.status, null, _end_run.payload, _end_run.at);
  update baton.runs as r
  set status = _end_run.status,
    last_seq = v_seq,
    wake_pending = false,
    wake_at = null,
    replay_ended = true,
    ended_at = _end_run.at,
    needs_driver = false
  where r.run_id = (_end_run.run).run_id;
  perform baton._notify_control(_end_run.run, _end_run.status);
  update baton.tasks as t
  set status = 'cancelled'
  where t.run_id = (_end_run.run).run_id and t.status in ('created', 'started');
  update baton.steps as s
  set status = 'cancelled', open_tasks = 0
  where s.run_id = (_end_run.run).run_id and s.status = 'created';
  with free as (
    select m.message_id
    from baton.messages as m
    where m.run_id = (_end_run.run).run_id and (m.claimed_at is null or m.visible_at <= _end_run.at)
    order by m.message_id
    for update of m skip locked
  )
  delete from baton.messages as m where m.message_id = any (array(select f.message_id from free as f));
end;
$$;

-- An answer that leaves nothing to do settles the message that the replay was granted under.
create or replace function baton._settle_replay(run baton.runs, replay_epoch bigint)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from baton.messages as m
  where m.message_id = (_settle_replay.run).replay_message_id
    and m.delivery = (_settle_replay.run).replay_delivery
    and (_settle_replay.run).replay_epoch = _settle_replay.replay_epoch;
end;
$$;

create or replace function baton._check_fence(run baton.runs, replay_epoch bigint)
returns void
language sql
stable
begin atomic
  select
    case
      when (
        (_check_fence.run).replay_epoch = _check_fence.replay_epoch and not (_check_fence.run).replay_ended
      ) is not true
        then baton._raise(
            'superseded', quote_literal((_check_fence.run).run_id), coalesce(_check_fence.replay_epoch::text, 'null')
          )
    end;
end;

-- The replay that writes: an ended run is terminal, another epoch is refused. True where it may go on.
create or replace function baton._enter_replay(run baton.runs, replay_epoch bigint)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if not baton._is_open((_enter_replay.run).status) then
    perform baton._settle_replay(_enter_replay.run, _enter_replay.replay_epoch);
    return false;
  end if;
  perform baton._check_fence(_enter_replay.run, _enter_replay.replay_epoch);
  return true;
end;
$$;

-- What complete_run and fail_run share.
create or replace function baton._end_replayed_run(
  run_id text, replay_epoch bigint, payload jsonb, inout status text, out outcome text
)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs;
begin
  perform baton._check_size('payload', pg_column_size(_end_replayed_run.payload));
  v_run := baton._lock_run(_end_replayed_run.run_id);
  if not baton._enter_replay(v_run, _end_replayed_run.replay_epoch) then
    outcome := 'terminal';
    status := v_run.status;
    return;
  end if;
  perform baton._settle_replay(v_run, _end_replayed_run.replay_epoch);
  perform baton._end_run(v_run, _end_replayed_run.status, _end_replayed_run.payload, baton._now());
  outcome := 'done';
end;
$$;

create or replace function baton.complete_run(
  run_id text, replay_epoch bigint, output jsonb, out outcome text, out status text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  select e.outcome, e.status
  into complete_run.outcome, complete_run.status
  from baton._end_replayed_run(complete_run.run_id, complete_run.replay_epoch, complete_run.output, 'completed') as e;
end;
$$;

comment on function baton.complete_run(text, bigint, jsonb) is
'End a run with its output, by the replay that holds it. The replay ends with it.
Outcomes: done; terminal, where it has ended already, or (status null) is unknown; with status
Raises: PB001, 54000, 25001
Locks: the run, then its messages';

create or replace function baton.fail_run(
  run_id text, replay_epoch bigint, error jsonb, out outcome text, out status text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  select e.outcome, e.status
  into fail_run.outcome, fail_run.status
  from baton._end_replayed_run(fail_run.run_id, fail_run.replay_epoch, fail_run.error, 'failed') as e;
end;
$$;

comment on function baton.fail_run(text, bigint, jsonb) is
'End a run with an error, by the replay that holds it. The replay ends with it.
Outcomes: done; terminal, where it has ended already, or (status null) is unknown; with status
Raises: PB001, 54000, 25001
Locks: the run, then its messages';

create or replace function baton.cancel_run(run_id text, reason text, out outcome text, out status text)
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
begin
  v_run := baton._lock_run(cancel_run.run_id);
  outcome := 'terminal';
  status := v_run.status;
  if baton._is_open(v_run.status) then
    perform baton._end_run(v_run, 'cancelled', to_jsonb(left(cancel_run.reason, 1000)), baton._now());
    outcome := 'done';
    status := 'cancelled';
  end if;
end;
$$;

comment on function baton.cancel_run(text, text) is
'End a run from outside. Queued work of it never starts; a replay that holds it is told at its next call.
Arguments: reason, for people; its first 1,000 characters are kept.
Outcomes: done; terminal, where it has ended already, or (status null) is unknown; with status
Raises: 25001
Locks: the run, then its messages';
