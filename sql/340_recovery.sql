/*
 * Recovery: a run that needs a driver and has none is woken. The view is the rule; recover_runs asks it again under the
 * run's lock.
 */
create or replace view baton.wedged_runs as
select r.run_id, r.workflow_name, r.queue_name, r.status, n.reason
from (select baton._now() as at) as c
cross join lateral (
  select a.*
  from baton.runs as a
  where a.needs_driver
  union all
  select s.*
  from baton.runs as s
  where s.wake_at <= baton._statement_time() and s.ended_at is null and not s.needs_driver
) as r
cross join lateral (
  select
    case
      when r.status = 'pending' or not r.replay_ended then 'replay'
      when r.wake_at <= c.at then 'timer'
      when r.wake_pending or r.wake_seq > r.replayed_seq then 'unread'
      when exists (
        select
        from baton.tasks as t
        where t.run_id = r.run_id
          and t.status in ('created', 'started')
          and not exists (
            select
            from baton.messages as m
            where m.dedupe_key = t.run_id || e'\x1f' || t.step_slug || e'\x1f' || t.task_index
          )
          and not exists (
            select
            from baton.messages as m
            where t.status = 'started'
              and m.message_id = t.owner_message_id
              and m.delivery = t.owner_delivery
              and m.claimed_at is not null
              and m.visible_at > c.at
          )
      ) then 'task'
    end as reason
) as n
where n.reason is not null
and not exists (
  select
  from baton.messages as m
  where m.run_id = r.run_id
    and m.step_slug is null
    and case
      when m.visible_at <= c.at then true
      when m.claimed_at is null then m.dedupe_key is null or m.message_id = r.wake_message_id
      when not r.replay_ended and m.message_id = r.replay_message_id and m.delivery = r.replay_delivery then
        baton._connection_lives(r.replay_backend)
      else not exists (
        select
        from baton.tasks as t
        where t.owner_message_id = m.message_id and t.owner_delivery = m.delivery and t.status = 'started'
      )
    end
);

comment on view baton.wedged_runs is
'Runs that need a driver and have none; empty after a round of recovery.';
comment on column baton.wedged_runs.run_id is 'The run.';
comment on column baton.wedged_runs.workflow_name is 'Its workflow.';
comment on column baton.wedged_runs.queue_name is 'Its queue.';
comment on column baton.wedged_runs.status is 'pending, running or suspended.';
comment on column baton.wedged_runs.reason is
'The need: replay (it has not begun, or was lost), timer (wake_at has passed), unread (something happened that no replay has seen), task (an unfinished task has neither a message nor a live owner).';

comment on table baton.recovery_cursors is
'How far recovery has paged through the runs that somebody should be driving, a row a scope.
Written by: _recover_runs';
comment on column baton.recovery_cursors.scope is 'The queue that recover_runs was called for; empty for all.';
comment on column baton.recovery_cursors.queue_name is 'With run_id, the run looked at last.';
comment on column baton.recovery_cursors.wake_at is 'With wake_run_id, the sleeping run looked at last.';

-- Why the run was wedged, decided anew under its lock; null where it is not, or somebody holds its row.
create or replace function baton._recover_run(run_id text, at timestamptz)
returns text
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs;
  v_reason text;
begin
  select r.*
  into v_run
  from baton.runs as r
  where r.run_id = _recover_run.run_id
  for no key update of r skip locked;
  select w.reason into v_reason from baton.wedged_runs as w where w.run_id = v_run.run_id;
  if v_reason is not null then
    perform baton._wake(v_run, _recover_run.at);
    perform baton._incident(
      _recover_run.at, 'run_recovered', queue_name => v_run.queue_name, run_id => v_run.run_id,
      detail => jsonb_build_object('reason', v_reason)
    );
  end if;
  return v_reason;
end;
$$;

create or replace function baton._recover_runs(queue_name text, max_runs integer)
returns table (run_id text, reason text)
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_scope text := coalesce(_recover_runs.queue_name, '');
  v_cursor baton.recovery_cursors;
  v_run record;
  v_page text[] := '{}'::text[];
  v_looked integer := 0;
  v_tasks bigint := 0::bigint;
  v_is_at_end boolean := true;
begin
  perform baton._require_read_committed();
  if not exists (select from baton.recovery_cursors as c where c.scope = v_scope)
    and pg_try_advisory_xact_lock(hashtextextended('baton.recovery_cursors ' || v_scope, 0)) then
    insert into baton.recovery_cursors (scope) values (v_scope) on conflict do nothing;
  end if;
  select c.* into v_cursor from baton.recovery_cursors as c where c.scope = v_scope for no key update of c skip locked;
  if not found then
    return;
  end if;
  v_cursor.queue_name := greatest(v_cursor.queue_name, v_scope);

  for v_run in
    select r.queue_name, r.run_id
    from baton.runs as r
    where r.needs_driver
      and (r.queue_name, r.run_id) > (v_cursor.queue_name, v_cursor.run_id)
    order by r.queue_name, r.run_id
    limit _recover_runs.max_runs
  loop
    exit when v_run.queue_name <> _recover_runs.queue_name;
    v_looked := v_looked + 1;
    v_page := v_page || v_run.run_id;
    v_cursor.queue_name := v_run.queue_name;
    v_cursor.run_id := v_run.run_id;
    select v_tasks + coalesce(sum(s.open_tasks), 0)
    into v_tasks
    from baton.steps as s
    where s.run_id = v_run.run_id and s.status = 'created';
    v_is_at_end := v_looked < _recover_runs.max_runs and v_tasks < 10000;
    exit when v_tasks >= 10000;
  end loop;
  if v_is_at_end then
    v_cursor.queue_name := '';
    v_cursor.run_id := '';
  end if;

  v_looked := 0;
  for v_run in
    select r.wake_at, r.run_id, r.queue_name
    from baton.runs as r
    where r.wake_at <= v_now and (r.wake_at, r.run_id) > (v_cursor.wake_at, v_cursor.wake_run_id)
    order by r.wake_at, r.run_id
    limit _recover_runs.max_runs
  loop
    v_looked := v_looked + 1;
    if _recover_runs.queue_name is null or v_run.queue_name = _recover_runs.queue_name then
      v_page := v_page || v_run.run_id;
    end if;
    v_cursor.wake_at := v_run.wake_at;
    v_cursor.wake_run_id := v_run.run_id;
  end loop;
  if v_looked < _recover_runs.max_runs then
    v_cursor.wake_at := '-infinity'::timestamptz;
    v_cursor.wake_run_id := '';
  end if;
  update baton.recovery_cursors as c
  set queue_name = v_cursor.queue_name, run_id = v_cursor.run_id,
    wake_at = v_cursor.wake_at, wake_run_id = v_cursor.wake_run_id
  where c.scope = v_scope;

  for v_run in
    select w.run_id from baton.wedged_runs as w where w.run_id = any (v_page) order by w.run_id
  loop
    run_id := v_run.run_id;
    reason := baton._recover_run(v_run.run_id, v_now);
    if reason is not null then
      return next;
    end if;
  end loop;
end;
$$;

create or replace function baton.recover_runs(queue_name text default null, max_runs integer default 1000)
returns table (run_id text, reason text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  if recover_runs.queue_name is not null then
    perform baton._check_name('queue_name', recover_runs.queue_name);
  end if;
  perform baton._check_limit('max_runs', recover_runs.max_runs);
  return query
  select r.run_id, r.reason
  from baton._recover_runs(recover_runs.queue_name, coalesce(recover_runs.max_runs, 1000)) as r;
end;
$$;

comment on function baton.recover_runs(text, integer) is
'Wake the runs that need a driver and have none (see wedged_runs). Safe from every process at every start, at the same time and repeatedly: a live replay is never disturbed, and a second caller returns at once. It pages through the runs that are not asleep, so that any number of healthy ones is passed in the end.
Arguments: queue_name, by default all queues; max_runs, how many to look at in one call (10,000 tasks at the most).
Returns: a row a run that was woken: run_id, reason (as in wedged_runs)
Raises: 22023, 25001
Locks: the runs that look wedged, never waiting';
