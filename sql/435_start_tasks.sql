/*
 * Several starts at once: one statement starts all tasks that wait to be started; the others are left to start_task.
 *
 * All runs are locked first, by key, then all messages, by id: run by run it could wait in a circle with extend_many
 * and ack_many, which go by the ids of their messages alone. What a receipt names is looked up in subqueries with
 * "offset 0", and changed by its ctid, as in 442_complete_tasks.
 */
create or replace function baton.start_tasks(receipts jsonb)
returns table (
  outcome text,
  message_id bigint,
  delivery bigint,
  run_id text,
  step_slug text,
  task_index integer,
  attempt integer,
  workflow_name text,
  input jsonb,
  retry_after interval
)
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
  v_ids bigint[];
  v_deliveries bigint[];
  v_run_id text;
  v_item record;
  v_now timestamptz;
begin
  select c.ids, c.deliveries into v_ids, v_deliveries from baton._receipts(start_tasks.receipts) as c;
  for v_run_id in
    select distinct m.run_id
    from baton.messages as m
    where m.message_id = any (v_ids) and m.kind = 'task'
    order by m.run_id
  loop
    perform baton._lock_run(v_run_id);
  end loop;
  perform m.message_id
  from baton.messages as m
  where m.message_id = any (v_ids)
    and m.claimed_at is not null
    and (
      m.kind = 'task'
      and (m.message_id, m.delivery) in (
        select c.message_id, c.delivery from unnest(v_ids, v_deliveries) as c (message_id, delivery)
      )
    ) is true
  order by m.message_id
  for no key update of m;
  v_now := baton._now();

  for v_item in
    with item as materialized (
      select
        c.nth, c.message_id, c.delivery, m.claimed_by, m.run_id, m.step_slug, m.task_index, t.task,
        t.attempt + 1 as attempt, t.input, r.run, r.last_seq, r.workflow_name,
        c.nth = min(c.nth) over (partition by c.message_id, c.delivery) as is_first,
        (
          m.visible_at > v_now
          and m.dedupe_key = baton._task_key(m.run_id, m.step_slug, m.task_index)
          -- One that has not been started has no owner; for any other this is not the answer.
          and baton._start_decision(baton._is_open(r.status), t.status, t.retry_at, null, v_now) = 'execute'
        ) is true as starts
      from unnest(v_ids, v_deliveries) with ordinality as c (message_id, delivery, nth)
      left join lateral (
        select m.run_id, m.step_slug, m.task_index, m.dedupe_key, m.visible_at, m.claimed_by
        from baton.messages as m
        where m.message_id = c.message_id
          and m.delivery = c.delivery
          and m.claimed_at is not null
          and m.kind = 'task'
        offset 0
      ) as m on true
      left join lateral (
        select r.ctid as run, r.status, r.last_seq, r.workflow_name
        from baton.runs as r
        where r.run_id = m.run_id
        offset 0
      ) as r on true
      left join lateral (
        select t.ctid as task, t.status, t.retry_at, t.attempt, t.input
        from baton.tasks as t
        where t.run_id = m.run_id and t.step_slug = m.step_slug and t.task_index = m.task_index
        offset 0
      ) as t on true
    ),
    started as (
      select
        i.run, i.task, i.run_id, i.step_slug, i.task_index, i.attempt, i.message_id, i.delivery, i.claimed_by,
        i.last_seq + row_number() over (partition by i.run_id order by i.message_id) as seq
      from item as i
      where i.starts and i.is_first
    ),
    stamped as (
      update baton.tasks as t
      set status = 'started',
        attempt = s.attempt,
        owner_message_id = s.message_id,
        owner_delivery = s.delivery,
        last_started_at = v_now,
        worker_id = s.claimed_by
      from started as s
      where t.ctid = s.task
    ),
    logged as (
      insert into baton.events (run_id, seq, type, payload, created_at)
      select
        s.run_id, s.seq, 'task_started',
        jsonb_build_object(
          'step_slug', s.step_slug, 'task_index', s.task_index, 'attempt', s.attempt, 'message_id', s.message_id,
          'delivery', s.delivery
        ),
        v_now
      from started as s
    ),
    moved as (
      update baton.runs as r
      set last_seq = s.last_seq
      from (select s.run, max(s.seq) as last_seq from started as s group by s.run) as s
      where r.ctid = s.run
    )
    select
      i.message_id, i.delivery, i.starts, i.run_id, i.step_slug, i.task_index, i.attempt, i.workflow_name, i.input
    from item as i
    order by i.nth
  loop
    if v_item.starts then
      outcome := 'execute';
      run_id := v_item.run_id;
      step_slug := v_item.step_slug;
      task_index := v_item.task_index;
      attempt := v_item.attempt;
      workflow_name := v_item.workflow_name;
      input := v_item.input;
      retry_after := null;
    else
      select s.outcome, s.run_id, s.step_slug, s.task_index, s.attempt, s.workflow_name, s.input, s.retry_after
      into
        start_tasks.outcome, start_tasks.run_id, start_tasks.step_slug, start_tasks.task_index, start_tasks.attempt,
        start_tasks.workflow_name, start_tasks.input, start_tasks.retry_after
      from baton.start_task(v_item.message_id, v_item.delivery) as s;
    end if;
    message_id := v_item.message_id;
    delivery := v_item.delivery;
    return next;
  end loop;
end;
$$;

comment on function baton.start_tasks(jsonb) is
'Ask for the tasks that several claimed task messages name, as start_task would one by one: first those that wait to be started, in the order of their messages; then the others, in the caller''s.
Arguments: receipts, an array of objects with message_id and delivery.
Returns: a row each, in their order: outcome as in start_task, message_id, delivery, and what else start_task gives
Raises: 22023, 25001
Locks: the runs by key, then the messages by id; the owners'' messages never waiting';
