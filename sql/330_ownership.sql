/*
 * Who owns and who lives. Pure reading, and the two questions that need a lock to be answered for certain.
 *
 * A receipt owns the tasks that were started under it. Its holder lives while the receipt is current and its claim has
 * not run out; a row that is locked may be being extended, and counts as alive. That a session's holder lives is proven
 * by an advisory lock on its pid, which its connection takes once and keeps: who can take it in shared mode knows that
 * the connection is gone. No verb ever releases it.
 */
comment on table baton.steps is
'The steps of the runs: a cache of their logs.
Written by: _end_run, _end_step, _prune_log, _prune_whole, advance_run, complete_task, complete_tasks, create_step';
comment on column baton.steps.open_tasks is 'How many of its tasks are unfinished.';
comment on column baton.steps.created_seq is 'The position of the event that created it: steps are dispatched in that order.';
comment on table baton.tasks is
'The tasks of the steps: a cache of the logs. Outputs and errors are in the events only.
Written by: _end_run, _end_step, _exhaust_task, _prune_log, _prune_whole, _release, _start, advance_run, complete_task, complete_tasks, create_step, fail_task, start_tasks';
comment on column baton.tasks.attempt is 'One start of the body: its ownership epoch.';
comment on column baton.tasks.lapses is 'Starts in a row that were lost.';
comment on column baton.tasks.fence_attempt is 'Attempts up to it are refused.';
comment on column baton.tasks.owner_message_id is 'With owner_delivery, the receipt that the body was started under.';

create or replace function baton._owns(message_id bigint, delivery bigint)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (
    select
    from baton.tasks as t
    where t.owner_message_id = _owns.message_id and t.owner_delivery = _owns.delivery and t.status = 'started'
  );
end;
$$;

create or replace function baton._session_lock_class()
returns integer
language sql
immutable
begin atomic
  select 1650553967;
end;

-- Null where the lock can't be had: then the hold is a lease.
create or replace function baton._hold_session()
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_try_advisory_lock(baton._session_lock_class(), pg_backend_pid()) then
    return pg_backend_pid();
  end if;
  return null;
end;
$$;

create or replace function baton._connection_lives(backend integer)
returns boolean
language sql
volatile
begin atomic
  select _connection_lives.backend is null
    or _connection_lives.backend = pg_backend_pid()
    or not pg_try_advisory_xact_lock_shared(baton._session_lock_class(), _connection_lives.backend);
end;

-- Whether the claim of a receipt lives, asked under its row's lock.
create or replace function baton._claim_lives(message_id bigint, delivery bigint, at timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message baton.messages;
begin
  select m.*
  into v_message
  from baton.messages as m
  where m.message_id = _claim_lives.message_id
  for no key update of m skip locked;
  if found then
    return v_message.delivery = _claim_lives.delivery
      and v_message.claimed_at is not null
      and v_message.visible_at > _claim_lives.at;
  end if;
  return exists (
    select
    from baton.messages as m
    where m.message_id = _claim_lives.message_id
      and m.delivery = _claim_lives.delivery
      and m.claimed_at is not null
  );
end;
$$;

-- The wait is bounded for these two rows only: what else a call may wait for (a table that is being truncated or
-- indexed) is no reason for an error.
create or replace function baton._lock_soon(run_id text, message_id bigint, delivery bigint)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set lock_timeout = '100ms'
as $$
begin
  perform baton._lock_run(_lock_soon.run_id);
  perform baton._lock_receipt(_lock_soon.message_id, _lock_soon.delivery);
end;
$$;

-- Due again later, for an answer that leaves nothing to do now; what owns bodies stays claimed. A timer or a backstop
-- loses its key: it is on its way, and no longer waits for its time.
create or replace function baton._postpone(message_id bigint, delivery bigint, delay interval)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  with free as (
    select m.message_id
    from baton.messages as m
    where m.message_id = _postpone.message_id
      and m.delivery = _postpone.delivery
      and m.claimed_at is not null
      and not baton._owns(m.message_id, m.delivery)
    for no key update of m skip locked
  )
  update baton.messages as m
  set visible_at = baton._now() + _postpone.delay,
    claimed_at = null,
    dedupe_key = null
  where m.message_id = any (array(select f.message_id from free as f));
end;
$$;
