/*
 * Steps and tasks as the log tells them: what the tables must be. A row a step (task_index null) and a task, with the
 * columns that are a cache.
 */
create function baton_test._fold_tasks(run_id text)
returns table (step_slug text, task_index integer, cache jsonb)
language plpgsql
stable
as $$
declare
  v_event baton.events;
  v_steps jsonb := '{}';
  v_tasks jsonb := '{}';
  v_step jsonb;
  v_task jsonb;
  v_key text;
  v_slug text;
begin
  for v_event in
    select e.* from baton.events as e where e.run_id = _fold_tasks.run_id order by e.seq
  loop
    v_slug := v_event.payload ->> 'step_slug';
    v_key := concat_ws('/', v_slug, v_event.payload ->> 'task_index');
    v_step := v_steps -> v_slug;
    v_task := v_tasks -> v_key;
    case v_event.type
      when 'step_created' then
        v_step := v_event.payload || jsonb_build_object(
          'status', 'created', 'open_tasks', v_event.payload -> 'task_count', 'created_seq', v_event.seq
        );
        select v_tasks || coalesce(jsonb_object_agg(v_slug || '/' || i.nth, jsonb_build_object(
          'step_slug', v_slug, 'task_index', i.nth, 'status', 'created', 'attempt', 0, 'failures', 0, 'lapses', 0,
          'fence_attempt', 0, 'owner_message_id', null, 'owner_delivery', null, 'last_started_at', null,
          'retry_at', null
        )), '{}')
        into v_tasks
        from generate_series(0, (v_event.payload ->> 'task_count')::integer - 1) as i (nth);
      when 'task_started' then
        v_task := v_task || jsonb_build_object(
          'status', 'started',
          'attempt', v_event.payload -> 'attempt',
          'lapses', (v_task ->> 'lapses')::integer + (v_task ->> 'status' = 'started')::integer,
          'owner_message_id', v_event.payload -> 'message_id',
          'owner_delivery', v_event.payload -> 'delivery',
          'last_started_at', v_event.created_at
        );
      when 'task_retrying' then
        v_task := v_task || jsonb_build_object(
          'status', 'created', 'failures', (v_task ->> 'failures')::integer + 1, 'lapses', 0,
          'retry_at', (v_event.payload ->> 'retry_at')::timestamptz, 'owner_message_id', null, 'owner_delivery', null
        );
      when 'task_released' then
        v_task := v_task || jsonb_build_object(
          'status', 'created', 'fence_attempt', v_task -> 'attempt', 'lapses', 0, 'retry_at', null,
          'owner_message_id', null, 'owner_delivery', null
        );
      when 'task_completed' then
        v_task := v_task || '{"status": "completed"}';
        v_step := v_step || jsonb_build_object('open_tasks', (v_step ->> 'open_tasks')::integer - 1);
      when 'run_advanced' then
        v_key := v_slug || '/0';
        v_task := (v_tasks -> v_key) || '{"status": "completed"}';
        v_step := v_step || '{"status": "completed", "open_tasks": 0}';
        v_slug := v_event.payload ->> 'next_step_slug';
        v_steps := v_steps || jsonb_build_object(v_event.payload ->> 'step_slug', v_step);
        v_tasks := v_tasks || jsonb_build_object(v_key, v_task);
        v_key := v_slug || '/0';
        v_step := jsonb_build_object(
          'step_slug', v_slug, 'status', 'created', 'task_count', 1, 'open_tasks', 1,
          'on_exhausted', v_event.payload -> 'on_exhausted', 'max_attempts', v_event.payload -> 'max_attempts',
          'created_seq', v_event.seq
        );
        v_task := jsonb_build_object(
          'step_slug', v_slug, 'task_index', 0, 'status', 'started', 'attempt', 1, 'failures', 0, 'lapses', 0,
          'fence_attempt', 0, 'owner_message_id', v_event.payload -> 'message_id',
          'owner_delivery', v_event.payload -> 'delivery', 'last_started_at', v_event.created_at, 'retry_at', null
        );
      when 'task_failed' then
        v_task := v_task || jsonb_build_object(
          'status', 'failed',
          'failures', (v_task ->> 'failures')::integer + (v_event.payload ? 'error')::integer,
          'lapses',
          (v_task ->> 'lapses')::integer + coalesce(v_event.payload ->> 'reason' = 'max_lapses', false)::integer
        );
      else
        null;
    end case;
    if v_task is not null then
      v_tasks := v_tasks || jsonb_build_object(v_key, v_task);
    end if;
    if v_event.type in ('step_completed', 'step_failed', 'step_skipped') then
      v_step := v_step || jsonb_build_object('status', substr(v_event.type, 6), 'open_tasks', 0);
    end if;
    if v_step is not null then
      v_steps := v_steps || jsonb_build_object(v_slug, v_step);
    end if;
    if v_event.type ~ '^(step_failed|step_skipped|run_completed|run_failed|run_cancelled)$' then
      select v_tasks || coalesce(jsonb_object_agg(t.key, t.value || jsonb_build_object(
        'status', case v_event.type when 'step_skipped' then 'skipped' else 'cancelled' end
      )), '{}')
      into v_tasks
      from jsonb_each(v_tasks) as t
      where t.value ->> 'status' in ('created', 'started') and coalesce(t.value ->> 'step_slug' = v_slug, true);
    end if;
    if v_event.type in ('run_completed', 'run_failed', 'run_cancelled') then
      select v_steps || coalesce(jsonb_object_agg(s.key, s.value || '{"status": "cancelled", "open_tasks": 0}'), '{}')
      into v_steps
      from jsonb_each(v_steps) as s
      where s.value ->> 'status' = 'created';
    end if;
  end loop;
  return query
  select s.key, null::integer, s.value from jsonb_each(v_steps) as s
  union all
  select t.value ->> 'step_slug', (t.value ->> 'task_index')::integer, t.value from jsonb_each(v_tasks) as t;
end;
$$;

-- Where the tables and the log differ; no row: nowhere.
create function baton_test.unfolded(run_id text)
returns table (step_slug text, task_index integer, cached jsonb, folded jsonb)
language sql
stable
begin atomic
  select coalesce(c.step_slug, f.step_slug), coalesce(c.task_index, f.task_index), c.cache, f.cache
  from (
    select s.step_slug, -1 as task_index, to_jsonb(s) - 'run_id' as cache
    from baton.steps as s
    where s.run_id = unfolded.run_id
    union all
    select t.step_slug, t.task_index, to_jsonb(t) - '{run_id,input,worker_id}'::text[]
    from baton.tasks as t
    where t.run_id = unfolded.run_id
  ) as c
  full join (
    select n.step_slug, coalesce(n.task_index, -1) as task_index, n.cache
    from baton_test._fold_tasks(unfolded.run_id) as n
  ) as f on f.step_slug = c.step_slug and f.task_index = c.task_index
  where c.cache is distinct from f.cache;
end;
