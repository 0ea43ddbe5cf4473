/*
 * Part of health: workers that hear of cancellations late or never.
 */
create or replace function baton._health_workers()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_control_notify boolean := (select s.control_notify from baton.settings as s where s.singleton);
  v_function record;
begin
  severity := 'warning';
  for v_function in
    with busy as materialized (
      select distinct t.worker_id from baton.tasks as t where t.status = 'started'
    )
    select
      f.function_name,
      count(*) as healthy,
      count(*) filter (where w.control = 'polling' and v_control_notify) as polling,
      count(*) filter (
        where w.control = 'off' and exists (select from busy as b where b.worker_id = w.worker_id)
      ) as deaf
    from baton.worker_functions as f
    inner join baton.workers as w on w.function_name = f.function_name and w.stopped_at is null
    where baton._is_healthy(w, f.heartbeat_timeout, v_now)
    group by f.function_name
    order by f.function_name
  loop
    subject := v_function.function_name;
    if v_function.polling > 0 then
      finding := 'polling';
      detail := format(
        '%s of %s workers don''t hear the control channel: their bodies are stopped at the next time that they ask',
        v_function.polling, v_function.healthy
      );
      advice := 'have them listen on a direct connection, or in session mode: a transaction pooler passes nothing on';
      return next;
    end if;
    if v_function.deaf > 0 then
      finding := 'no_cancellation';
      detail := format(
        '%s of %s workers run bodies, with control off: nobody asks these to stop', v_function.deaf, v_function.healthy
      );
      advice := 'have them ask terminal_tasks, and tell heartbeat so: control => polling or listening';
      return next;
    end if;
  end loop;
end;
$$;
