/*
 * What is decided of a task, as functions of what is known: keys, the lease, and the two decision tables. Nothing here
 * reads a table or a clock.
 */
-- The keys of runs and tasks hold a control character, which no user's key does, and a run has one queue: the key alone
-- finds the message, and no other index can be taken for that.
create or replace function baton._task_key(run_id text, step_slug text, task_index integer)
returns text
language sql
immutable
begin atomic
  select _task_key.run_id || e'\x1f' || _task_key.step_slug || e'\x1f' || _task_key.task_index::text;
end;

-- It names the attempt: all wakes of one attempt share one backstop, and a new stamp gets its own.
create or replace function baton._backstop_key(run_id text, step_slug text, task_index integer, attempt integer)
returns text
language sql
immutable
begin atomic
  select baton._task_key(_backstop_key.run_id, _backstop_key.step_slug, _backstop_key.task_index)
    || e'\x1fbackstop\x1f' || _backstop_key.attempt::text;
end;

-- How long a backstop waits: what is left of the lease since the stamp, in whole seconds; used up, a full lease again.
create or replace function baton._lease_remaining(last_started_at timestamptz, lease interval, at timestamptz)
returns interval
language sql
immutable
begin atomic
  select
    make_interval(
      secs => ceil(
        extract(
          epoch from case
            when _lease_remaining.at < _lease_remaining.last_started_at + _lease_remaining.lease
              then _lease_remaining.last_started_at + _lease_remaining.lease - _lease_remaining.at
            else _lease_remaining.lease
          end
        )
      )::double precision
    );
end;

-- What a replay does with an unfinished task; the first that applies. By owner: "receipt" is this run message's
-- receipt, "message" this message under an earlier delivery, "other" another message that lives, null none.
create or replace function baton._dispatch_decision(
  has_message boolean, owner text, may_run boolean, is_fresh boolean, is_within_limit boolean, inline_ownership boolean
)
returns text
language sql
immutable
begin atomic
  select
    case
      when _dispatch_decision.has_message then 'queued'
      when _dispatch_decision.owner = 'receipt' then 'running'
      when _dispatch_decision.owner = 'message' and _dispatch_decision.may_run then 'execute'
      when _dispatch_decision.owner = 'other' and _dispatch_decision.inline_ownership then 'backstop'
      when _dispatch_decision.is_fresh and _dispatch_decision.may_run and _dispatch_decision.is_within_limit
        then 'execute'
      else 'enqueue'
    end;
end;

-- What the holder of a task message does; the first that applies. By owner as above, "receipt" being its own.
create or replace function baton._start_decision(
  is_open boolean, status text, retry_at timestamptz, owner text, at timestamptz
)
returns text
language sql
immutable
begin atomic
  select
    case
      when not coalesce(_start_decision.is_open and _start_decision.status in ('created', 'started'), false) then 'skip'
      when _start_decision.status = 'created' and _start_decision.at < _start_decision.retry_at then 'await'
      when _start_decision.status = 'created' then 'execute'
      when _start_decision.owner = 'receipt' then 'again'
      when _start_decision.owner = 'other' then 'await'
      else 'recover'
    end;
end;

-- Whether a completion is the first, from an attempt since the last release.
create or replace function baton._completes(status text, fence_attempt integer, last_attempt integer, attempt integer)
returns boolean
language sql
immutable
begin atomic
  select coalesce(
    _completes.status in ('created', 'started')
    and _completes.attempt > _completes.fence_attempt
    and _completes.attempt <= _completes.last_attempt, false
  );
end;
