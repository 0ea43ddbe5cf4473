/*
 * Several ends at once: one statement decides on all that complete a task which no other one names, in the order of
 * their messages, as complete_task would one by one. The others are left to that: which of two comes first decides, and
 * what completes nothing writes nothing into the run.
 *
 * What an item names is looked up in subqueries with "offset 0", and changed by its ctid, which nobody else changes
 * under the run's lock: a join that was planned for few items or a small table reads all of that, or more than that.
 */
create or replace function baton._completions(completions jsonb)
returns table (
  nth bigint, step_slug text, task_index integer, attempt integer, output jsonb, message_id bigint, delivery bigint
)
language sql
stable
begin atomic
  select
    i.nth, i.item ->> 'step_slug' as step_slug, (i.item ->> 'task_index')::integer as task_index,
    (i.item ->> 'attempt')::integer as attempt, i.item -> 'output' as output,
    (i.item ->> 'message_id')::bigint as message_id, (i.item ->> 'delivery')::bigint as delivery
  from jsonb_array_elements(_completions.completions) with ordinality as i (item, nth);
end;

create or replace function baton._check_completions(completions jsonb)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_invalid jsonb;
begin
  if _check_completions.completions is null or jsonb_typeof(_check_completions.completions) <> 'array' then
    perform baton._raise('invalid_completions', 'not an array');
  end if;
  select i.item
  into v_invalid
  from jsonb_array_elements(_check_completions.completions) as i (item)
  where (
    jsonb_typeof(i.item) = 'object'
    and coalesce(i.item ->> 'task_index', '0') ~ '^[0-9]{1,9}$'
    and coalesce(i.item ->> 'attempt', '0') ~ '^[0-9]{1,9}$'
    and coalesce(i.item ->> 'message_id', '0') ~ '^[0-9]{1,18}$'
    and coalesce(i.item ->> 'delivery', '0') ~ '^[0-9]{1,18}$'
  ) is not true
  limit 1;
  if found then
    perform baton._raise('invalid_completions', 'not a completion: ' || left(v_invalid::text, 60));
  end if;
  perform
    baton._check_size(
      'output',
      (
        select max(pg_column_size(i.item -> 'output'))
        from jsonb_array_elements(_check_completions.completions) as i (item)
      )
    );
end;
$$;

create or replace function baton.complete_tasks(run_id text, completions jsonb)
returns table (outcome text, step_slug text, task_index integer, step_ended boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_run baton.runs;
  v_last_seq bigint;
  v_wake_seq bigint;
  v_wakes boolean;
  v_outcomes text[];
  v_ended boolean[];
  v_item record;
  v_answer record;
  v_now timestamptz;
begin
  perform baton._check_completions(complete_tasks.completions);
  v_run := baton._lock_run(complete_tasks.run_id);
  perform m.message_id
  from baton.messages as m
  where m.message_id = any (array(select c.message_id from baton._completions(complete_tasks.completions) as c))
    and m.claimed_at is not null
    and (
      (m.message_id, m.delivery) in (
        select c.message_id, c.delivery from baton._completions(complete_tasks.completions) as c
      )
    ) is true
  order by m.message_id
  for no key update of m;
  v_now := baton._now();

  with item as materialized (
    select
      c.nth, c.step_slug, c.task_index, c.attempt, c.output, m.message_id, m.is_own, m.replays_next, t.task,
      row_number() over (order by c.message_id, c.nth) as turn,
      baton._completes(t.status, t.fence_attempt, t.attempt, c.attempt)
      and count(*) over (partition by c.step_slug, c.task_index) = 1 as completes
    from baton._completions(complete_tasks.completions) as c
    left join lateral (
      select
        m.message_id, m.dedupe_key = baton._task_key(v_run.run_id, c.step_slug, c.task_index) as is_own,
        baton._replays_next(m, v_run.run_id) as replays_next
      from baton.messages as m
      where m.message_id = c.message_id and m.delivery = c.delivery and m.claimed_at is not null
      offset 0
    ) as m on true
    left join lateral (
      select t.ctid as task, t.status, t.fence_attempt, t.attempt
      from baton.tasks as t
      where t.run_id = v_run.run_id and t.step_slug = c.step_slug and t.task_index = c.task_index
      offset 0
    ) as t on true
  ),
  completed as (
    update baton.tasks as t set status = 'completed' from item as i where i.completes and t.ctid = i.task
  ),
  counted as (
    update baton.steps as s
    set open_tasks = s.open_tasks - c.tasks,
      status = case s.open_tasks when c.tasks then 'completed' else s.status end
    from (
      select
        count(*) as tasks, max(i.turn) as turn,
        (select s.ctid from baton.steps as s where s.run_id = v_run.run_id and s.step_slug = i.step_slug) as step
      from item as i
      where i.completes
      group by i.step_slug
    ) as c
    where s.ctid = c.step
    returning s.step_slug, s.open_tasks, c.turn
  ),
  logged as (
    insert into baton.events as e (run_id, seq, type, payload, created_at)
    select v_run.run_id, v_run.last_seq + row_number() over (order by n.turn, n.part), n.type, n.payload, v_now
    from (
      select
        i.turn, 1 as part, 'task_completed' as type,
        jsonb_build_object(
          'step_slug', i.step_slug, 'task_index', i.task_index, 'attempt', i.attempt, 'output', i.output
        ) as payload
      from item as i
      where i.completes
      union all
      select c.turn, 2, 'step_completed', jsonb_build_object('step_slug', c.step_slug)
      from counted as c
      where c.open_tasks = 0
    ) as n
    returning e.seq, e.type
  ),
  free as (
    select m.message_id
    from baton.messages as m
    where m.dedupe_key = any (
        array(
          select baton._task_key(v_run.run_id, i.step_slug, i.task_index)
          from item as i
          where i.completes and i.is_own is not true
        )
      )
      and (m.claimed_at is null or m.visible_at <= v_now)
    for update of m skip locked
  ),
  dropped as (
    delete from baton.messages as m
    where m.message_id = any (
      array(
        select i.message_id from item as i where i.completes and i.is_own
        union all
        select f.message_id from free as f
      )
    )
  ),
  answer as (
    select
      i.nth, i.replays_next, case when i.completes then 'completed' end as outcome,
      i.turn in (select c.turn from counted as c where c.open_tasks = 0) as step_ended
    from item as i
  )
  select
    array_agg(a.outcome order by a.nth),
    array_agg(a.step_ended order by a.nth),
    bool_or(a.step_ended and a.replays_next is not true),
    (select max(l.seq) from logged as l),
    (select max(l.seq) from logged as l where l.type = 'step_completed')
  into v_outcomes, v_ended, v_wakes, v_last_seq, v_wake_seq
  from answer as a;
  if v_last_seq is not null then
    v_run.last_seq := v_last_seq;
    v_run.wake_seq := coalesce(v_wake_seq, v_run.wake_seq);
    perform baton._save_positions(v_run);
  end if;
  if v_wakes then
    perform baton._wake(v_run, v_now);
  end if;

  for v_item in
    select c.nth, c.step_slug, c.task_index, c.attempt, c.output, c.message_id, c.delivery
    from baton._completions(complete_tasks.completions) as c
    where (
      c.nth in (select o.nth from unnest(v_outcomes) with ordinality as o (outcome, nth) where o.outcome is null)
    ) is true
    order by c.message_id, c.nth
  loop
    v_answer := baton.complete_task(
      complete_tasks.run_id, v_item.step_slug, v_item.task_index, v_item.attempt, v_item.output, v_item.message_id,
      v_item.delivery
    );
    v_outcomes[v_item.nth] := v_answer.outcome;
    v_ended[v_item.nth] := v_answer.step_ended;
  end loop;

  return query
  select i.outcome, i.item ->> 'step_slug', (i.item ->> 'task_index')::integer, i.step_ended
  from rows from (
    jsonb_array_elements(complete_tasks.completions), unnest(v_outcomes), unnest(v_ended)
  ) with ordinality as i (item, outcome, step_ended, nth)
  order by i.nth;
end;
$$;

comment on function baton.complete_tasks(text, jsonb) is
'Record the outputs of several tasks of a run, as complete_task would one by one, in the order of their messages; one that is named twice after the others.
Arguments: completions, an array of objects with the other arguments of complete_task.
Returns: a row each, in their order: outcome as in complete_task, step_slug, task_index, step_ended
Raises: 22023, 54000, 25001
Locks: the run, then the messages by id';
