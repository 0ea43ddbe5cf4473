/*
 * Cancellation: what a worker asks about the bodies that it runs. The rows are the truth; what the control channel says
 * is a reason to ask.
 */
create or replace function baton.terminal_tasks(keys jsonb)
returns table (outcome text, run_id text, step_slug text, task_index integer, attempt integer, cause text)
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
/*
 *   the first row that applies
 *   no such task                                  unknown
 *   the task has ended                            completed, failed, skipped, cancelled
 *   the attempt was never given out               unknown
 *   started, with this attempt                    running
 *   otherwise                                     superseded
 */
declare
  v_item jsonb;
begin
  if terminal_tasks.keys is null or jsonb_typeof(terminal_tasks.keys) <> 'array' then
    perform baton._raise('invalid_keys', 'not an array');
  end if;
  select i.value
  into v_item
  from jsonb_array_elements(terminal_tasks.keys) as i
  where (
    i.value -> 'run_id' is not null
    and i.value -> 'step_slug' is not null
    and i.value -> 'task_index' is not null
    and i.value -> 'attempt' is not null
    and coalesce(i.value ->> 'task_index', '0') ~ '^[0-9]{1,9}$'
    and coalesce(i.value ->> 'attempt', '0') ~ '^[0-9]{1,9}$'
  ) is not true
  limit 1;
  if found then
    perform baton._raise('invalid_keys', 'not a key: ' || left(v_item::text, 60));
  end if;

  -- That it asks for the run in there keeps it a look-up a key, whatever a plan takes the number of keys or tasks for.
  return query
  select
    case
      when t.status in ('completed', 'failed', 'skipped', 'cancelled') then t.status
      when (k.attempt between 1 and t.attempt) is not true then 'unknown'
      when t.status = 'started' and k.attempt = t.attempt then 'running'
      else 'superseded'
    end,
    k.run_id, k.step_slug, k.task_index, k.attempt,
    case
      when t.status in ('completed', 'failed') then 'task_' || t.status
      when t.status = 'skipped' then 'step_skipped'
      when t.status = 'cancelled' then (
        select
          case s.status
            when 'failed' then 'step_failed'
            else 'run_' || (select r.status from baton.runs as r where r.run_id = s.run_id)
          end
        from baton.steps as s
        where s.run_id = k.run_id and s.step_slug = k.step_slug
      )
      when (k.attempt between 1 and t.attempt) is not true or (t.status = 'started' and k.attempt = t.attempt) then null
      when k.attempt <= t.fence_attempt then 'task_released'
      when k.attempt < t.attempt then 'task_started'
      else 'task_retrying'
    end
  from jsonb_array_elements(terminal_tasks.keys) with ordinality as i (value, nth)
  cross join lateral (
    select
      i.value ->> 'run_id' as run_id, i.value ->> 'step_slug' as step_slug,
      (i.value ->> 'task_index')::integer as task_index, (i.value ->> 'attempt')::integer as attempt
  ) as k
  left join lateral (
    select o.status, o.attempt, o.fence_attempt
    from baton.tasks as o
    where o.run_id = k.run_id and o.step_slug = k.step_slug and o.task_index = k.task_index
      and not exists (select from baton.runs as r where r.run_id = o.run_id and r.pruned_at is not null)
  ) as t on true
  order by i.nth;
end;
$$;

comment on function baton.terminal_tasks(jsonb) is
'Which of the bodies that a worker runs should go on. It asks when it has registered an attempt, when the channel baton_control says something, and from time to time: everything but running is to be aborted.
Arguments: keys, an array of objects with run_id, step_slug, task_index and attempt, as execute gave them.
Returns: a row a key, in their order: outcome: running; superseded: this attempt no longer holds the task; completed, failed, skipped, cancelled: the task has ended; unknown; then run_id, step_slug, task_index, attempt, and cause, the type of event that did it: run_completed, run_failed, run_cancelled, step_failed, step_skipped, task_completed (of run_advanced, too), task_failed; of superseded: task_started (a later attempt), task_retrying, task_released
Raises: 22023
Locks: none';
