/*
 * One replay of a run at a time, across processes and machines. The run's row serialises grants and says who holds the
 * baton; a holder that lost it is recognised by its epoch.
 */
create or replace function baton._is_held(run baton.runs, at timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  return baton._claim_lives((_is_held.run).replay_message_id, (_is_held.run).replay_delivery, _is_held.at)
    and baton._connection_lives((_is_held.run).replay_backend);
end;
$$;

-- A replay that never ended: a lapse, an incident, and its message goes if it still is its and owns nothing. True where
-- the run is at its limit: the caller ends it.
create or replace function baton._lose_replay(run baton.runs, by_message_id bigint, at timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_lapses integer := (_lose_replay.run).lapses + 1;
begin
  perform baton._incident(
    _lose_replay.at, 'replay_lost', queue_name => (_lose_replay.run).queue_name,
    run_id => (_lose_replay.run).run_id, message_id => (_lose_replay.run).replay_message_id,
    detail => jsonb_build_object('replay_epoch', (_lose_replay.run).replay_epoch, 'lapses', v_lapses)
  );
  with lost as (
    select m.message_id
    from baton.messages as m
    where m.message_id = (_lose_replay.run).replay_message_id
      and m.message_id <> _lose_replay.by_message_id
      and m.delivery = (_lose_replay.run).replay_delivery
      and not baton._owns(m.message_id, m.delivery)
    for update of m skip locked
  )
  delete from baton.messages as m where m.message_id = any (array(select l.message_id from lost as l));
  update baton.runs as r set lapses = v_lapses where r.run_id = (_lose_replay.run).run_id;
  if v_lapses < (select s.max_lapses from baton.settings as s where s.singleton) then
    return false;
  end if;
  perform baton._incident(
    _lose_replay.at, 'limit_reached', queue_name => (_lose_replay.run).queue_name,
    run_id => (_lose_replay.run).run_id, detail => jsonb_build_object('lapses', v_lapses)
  );
  return true;
end;
$$;

create or replace function baton.begin_replay(
  message_id bigint,
  delivery bigint,
  hold text default 'lease',
  out outcome text,
  out run_id text,
  out workflow_name text,
  out replay_epoch bigint,
  out last_seq bigint,
  out clock timestamptz,
  out status text,
  out retry_after interval
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
 *   the first row that applies
 *   the run's row not obtained within 100 ms               busy
 *   the receipt isn't current, or has run out              lost
 *   the run has ended or is unknown                        terminal
 *   held under this receipt                                granted anew
 *   held under another that lives                          handed_over
 *   otherwise, after a replay that was lost                granted, or at the limit terminal
 *   otherwise                                              granted
 */
declare
  v_free record;
  v_run baton.runs;
  v_backend integer;
begin
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  if begin_replay.hold = 'session' then
    v_backend := baton._hold_session();
  elsif begin_replay.hold <> 'lease' then
    perform baton._check_choice('hold', begin_replay.hold, 'lease', 'session');
  end if;

  -- Where both rows are free no subtransaction is needed, whose locks would make multixacts. Two look-ups: a join that
  -- was planned for few runs would read them all.
  select r as run, m.visible_at, m.dedupe_key
  into v_free
  from baton.runs as r
  cross join baton.messages as m
  where r.run_id = (select k.run_id from baton.messages as k where k.message_id = begin_replay.message_id)
    and m.message_id = begin_replay.message_id
    and m.delivery = begin_replay.delivery
    and m.claimed_at is not null
    and m.kind = 'run'
    and r.pruned_at is null
  for no key update of r, m skip locked;
  if found then
    run_id := (v_free.run).run_id;
  else
    select m.run_id
    into begin_replay.run_id
    from baton.messages as m
    where m.message_id = begin_replay.message_id and m.kind = 'run';
    if not found then
      outcome := 'lost';
      return;
    end if;
    begin
      perform baton._lock_soon(begin_replay.run_id, begin_replay.message_id, begin_replay.delivery);
    exception
      when lock_not_available then
        outcome := 'busy';
        retry_after := interval '1 second' * (0.8 + 0.4 * random());
        perform baton._postpone(begin_replay.message_id, begin_replay.delivery, begin_replay.retry_after);
        return;
    end;
    select baton._lock_run(begin_replay.run_id) as run, m.visible_at, m.dedupe_key
    into v_free
    from baton._lock_receipt(begin_replay.message_id, begin_replay.delivery) as m;
  end if;

  v_run := v_free.run;
  clock := baton._now();
  if (v_free.visible_at > clock) is not true then
    outcome := 'lost';
    perform baton._note_lost(begin_replay.message_id, begin_replay.delivery, 'begin_replay');
    return;
  end if;
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
    delete from baton.messages as m where m.message_id = begin_replay.message_id;
    return;
  end if;
  if not v_run.replay_ended
    and (v_run.replay_message_id, v_run.replay_delivery)
    is distinct from (begin_replay.message_id, begin_replay.delivery) then
    if baton._is_held(v_run, clock) then
      outcome := 'handed_over';
      update baton.runs as r set wake_pending = true where r.run_id = v_run.run_id;
      delete from baton.messages as m
      where m.message_id = begin_replay.message_id and not baton._owns(m.message_id, m.delivery);
      return;
    elsif baton._lose_replay(v_run, begin_replay.message_id, clock) then
      outcome := 'terminal';
      status := 'failed';
      perform baton._end_run(v_run, status, jsonb_build_object('reason', 'max_lapses'), clock);
      delete from baton.messages as m where m.message_id = begin_replay.message_id;
      return;
    end if;
  end if;

  update baton.runs as r
  set status = 'running',
    replay_epoch = baton._new_delivery(),
    replay_ended = false,
    replay_message_id = begin_replay.message_id,
    replay_delivery = begin_replay.delivery,
    replay_backend = v_backend,
    replay_began_at = begin_replay.clock,
    wake_pending = false,
    wake_message_id = nullif(r.wake_message_id, begin_replay.message_id),
    needs_driver = true
  where r.run_id = v_run.run_id
  returning 'granted', r.workflow_name, r.replay_epoch, r.last_seq, r.status
  into
    begin_replay.outcome, begin_replay.workflow_name, begin_replay.replay_epoch, begin_replay.last_seq,
    begin_replay.status;
  if v_free.dedupe_key is not null then
    update baton.messages as m set dedupe_key = null where m.message_id = begin_replay.message_id;
  end if;
end;
$$;

comment on function baton.begin_replay(bigint, bigint, text) is
'Ask for the replay of the run that a claimed run message names. The replay lasts as long as the receipt; extending the message extends it. Commit before you read the log: nobody waits for a holder.
Arguments: hold, lease, or session: then it also ends with the connection that asks, so that a killed process frees the run at once (that connection takes one advisory lock for its life).
Outcomes: granted, with run_id, workflow_name, replay_epoch (the fence that every writing verb names), last_seq, clock (by which a sleep is over or not); handed_over: somebody else holds it and will see what you brought; busy, with retry_after; terminal: the run has ended, with status; lost, where the receipt is not current or its claim has run out. After anything but granted take the next message
Raises: 22023, 25001
Locks: the run, then the message, waiting for each at most 100 ms
Source: the advisory lock around replays that users of the Workflow SDK built';

create or replace function baton.end_replay(
  run_id text,
  replay_epoch bigint,
  seen_seq bigint,
  wake_at timestamptz default null,
  out outcome text,
  out last_seq bigint,
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
/*
 *   the first row that applies
 *   the run has ended                                      terminal
 *   this epoch, ended already (the answer was lost)        ended; what came since is woken for
 *   another epoch, or the receipt isn't current            lost
 *   seen_seq beyond last_seq, wake_at infinite             22023
 *   something that asks for a replay was not seen          again
 *   otherwise                                              ended
 */
declare
  v_run baton.runs;
  v_now timestamptz;
begin
  -- _lock_run and _owns are written out: it is called for each replay, and a call in a call costs more than a look-up.
  if not baton._is_read_committed() then
    perform baton._require_read_committed();
  end if;
  select r.*
  into v_run
  from baton.runs as r
  where r.run_id = end_replay.run_id and r.pruned_at is null
  for no key update of r;
  status := v_run.status;
  if not baton._is_open(v_run.status) then
    outcome := 'terminal';
    perform baton._settle_replay(v_run, end_replay.replay_epoch);
    return;
  elsif (v_run.replay_epoch = end_replay.replay_epoch) is not true then
    outcome := 'lost';
    return;
  elsif v_run.replay_ended then
    outcome := 'ended';
  elsif (
    end_replay.seen_seq between v_run.wake_seq and v_run.last_seq
    and coalesce(isfinite(end_replay.wake_at), true)
  ) is not true then
    if not baton._is_current(v_run.replay_message_id, v_run.replay_delivery) then
      outcome := 'lost';
      perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'end_replay');
      return;
    elsif (end_replay.seen_seq between 0 and v_run.last_seq) is not true then
      perform baton._raise('invalid_position', v_run.last_seq::text, coalesce(end_replay.seen_seq::text, 'null'));
    elsif not isfinite(end_replay.wake_at) then
      perform baton._raise('invalid_time', 'wake_at', end_replay.wake_at::text);
    end if;
    outcome := 'again';
    last_seq := v_run.last_seq;
    return;
  else
    delete from baton.messages as m
    where m.message_id = v_run.replay_message_id
      and m.delivery = v_run.replay_delivery
      and m.claimed_at is not null
      and not exists (
        select
        from baton.tasks as t
        where t.owner_message_id = m.message_id and t.owner_delivery = m.delivery and t.status = 'started'
      );
    if not found and (baton._lock_receipt(v_run.replay_message_id, v_run.replay_delivery)).message_id is null then
      outcome := 'lost';
      perform baton._note_lost(v_run.replay_message_id, v_run.replay_delivery, 'end_replay');
      return;
    end if;
  end if;

  v_now := baton._now();
  if v_run.replay_ended then
    if v_run.wake_seq > v_run.replayed_seq then
      perform baton._wake(v_run, v_now);
    end if;
    return;
  end if;
  if v_run.wake_pending then
    v_run.wake_message_id := baton._ensure_wake(v_run, v_now);
  end if;
  update baton.runs as r
  set status = case when b.is_busy then 'running' else 'suspended' end,
    needs_driver = b.is_busy or r.wake_pending,
    replayed_seq = end_replay.seen_seq,
    replay_ended = true,
    failures = 0,
    lapses = 0,
    wake_at = end_replay.wake_at,
    wake_message_id = v_run.wake_message_id
  from (
    select exists (
      select from baton.tasks as t where t.run_id = end_replay.run_id and t.status in ('created', 'started')
    ) as is_busy
  ) as b
  where r.run_id = v_run.run_id
  returning 'ended', r.status into end_replay.outcome, end_replay.status;
  if v_run.wake_at is not null or end_replay.wake_at is not null then
    perform baton._set_timer(v_run, end_replay.wake_at, v_now);
  end if;
end;
$$;

comment on function baton.end_replay(text, bigint, bigint, timestamptz) is
'End a replay that has read and decided up to a position. Its message is removed, unless bodies run under it.
Arguments: seen_seq, the last position that the caller has read or was told to read up to; wake_at, when the run wants to be woken, by the clock that begin_replay gave.
Outcomes: ended; again, with last_seq: something came that asks for a replay: read up to there, decide, end again; terminal: the run has ended, or (status null) is unknown; lost: another replay has the baton, or the receipt is not current; with the run''s status
Raises: 22023, 25001
Locks: the run, then the message';

create or replace function baton.append_event(
  run_id text,
  replay_epoch bigint,
  type text,
  correlation_id text default null,
  payload jsonb default null,
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
declare
  v_run baton.runs;
  v_seq bigint;
begin
  perform baton._check_name('type', append_event.type);
  if strpos(append_event.type, '.') = 0 then
    perform baton._raise('invalid_event_type', quote_literal(append_event.type));
  end if;
  perform baton._check_key(append_event.correlation_id);
  perform baton._check_size('payload', pg_column_size(append_event.payload));
  v_run := baton._lock_run(append_event.run_id);
  if not baton._enter_replay(v_run, append_event.replay_epoch) then
    outcome := 'terminal';
    return;
  end if;
  if baton._has_event(v_run.run_id, append_event.type, append_event.correlation_id) then
    outcome := 'exists';
    return;
  end if;
  v_seq := baton._append(v_run, append_event.type, append_event.correlation_id, append_event.payload, baton._now());
  update baton.runs as r set last_seq = v_seq where r.run_id = v_run.run_id;
  outcome := 'appended';
end;
$$;

comment on function baton.append_event(text, bigint, text, text, jsonb) is
'Write an event of one''s own into the log, by the replay that holds it.
Arguments: type, with a dot in it; correlation_id, 1 to 500 bytes: an event of that type with it is written once.
Outcomes: appended; exists; terminal, where the run has ended or is unknown
Raises: PB001, 22023, 54000, 25001
Locks: the run';

create or replace function baton.release_replay(run_id text, out outcome text)
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
  v_spent integer;
  v_now timestamptz;
begin
  v_run := baton._lock_run(release_replay.run_id);
  outcome := 'none';
  if not baton._is_open(v_run.status) then
    return;
  end if;
  perform m.message_id
  from baton.messages as m
  where m.run_id = v_run.run_id and m.step_slug is null and m.claimed_at is not null
  order by m.message_id
  for no key update of m;
  v_now := baton._now();
  update baton.messages as m
  set claimed_at = null, visible_at = v_now
  where m.run_id = v_run.run_id and m.step_slug is null and m.claimed_at is not null
    and not baton._owns(m.message_id, m.delivery);
  get diagnostics v_spent = row_count;
  if v_spent = 0 and v_run.replay_ended then
    return;
  end if;
  update baton.runs as r
  set replay_epoch = baton._new_delivery(), replay_ended = true
  where r.run_id = v_run.run_id;
  perform baton._wake(v_run, v_now);
  perform baton._incident(
    v_now, 'operator', queue_name => v_run.queue_name, run_id => v_run.run_id,
    detail => jsonb_build_object('verb', 'release_replay')
  );
  outcome := 'released';
end;
$$;

comment on function baton.release_replay(text) is
'For operators: take the baton away from whoever holds it, and have the run replayed anew. Bodies that run go on.
Outcomes: released; none, where no replay is held and no message of the run that owns nothing is claimed, or the run has ended or is unknown
Raises: 25001
Locks: the run, then its claimed messages by id, waiting for them';
