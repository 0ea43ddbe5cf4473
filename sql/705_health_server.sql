/*
 * Part of health: whether the server takes writes, and what keeps vacuum from its work.
 */
create or replace function baton._health_server()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  finding := 'read_only';
  subject := current_database()::text;
  severity := 'critical';
  if pg_is_in_recovery() then
    detail := 'this server is a standby: every verb that writes ends in 25006';
    advice := 'connect to the primary';
    return next;
  -- What a role or a session has chosen for itself, as one that only looks should, is no finding.
  elsif exists (
    select
    from pg_settings as s
    where s.name = 'default_transaction_read_only' and s.setting = 'on'
      and s.source in ('configuration file', 'command line', 'database')
  ) then
    detail := 'default_transaction_read_only is on: every verb that writes ends in 25006, and nothing ticks';
    advice := 'is a disk full, or did somebody set it? then: alter database ... reset default_transaction_read_only';
    return next;
  end if;
end;
$$;

create or replace function baton._health_vacuum()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_oldest record;
begin
  select a.pid, clock.at - a.xact_start as age
  into v_oldest
  from pg_stat_activity as a
  cross join (select baton._now() as at) as clock
  where a.backend_xmin is not null and a.datname = current_database() and a.xact_start is not null
  order by a.xact_start
  limit 1;
  finding := 'oldest_snapshot';
  severity := case when v_oldest.age > interval '10 minutes' then 'warning' else 'ok' end;
  detail := 'the oldest transaction is ' || coalesce(date_trunc('second', v_oldest.age)::text, '00:00:00') || ' old';
  if severity = 'warning' then
    subject := 'pid ' || v_oldest.pid;
    advice := 'it keeps vacuum from removing finished rows: end it';
  elsif not pg_has_role('pg_read_all_stats', 'usage') then
    detail := detail || '; those of other roles can''t be seen';
    advice := format('grant pg_read_all_stats to %I', current_user);
  end if;
  return next;

  finding := 'dead_rows';
  for subject, detail in
    select s.relname::text, format('about %s dead rows beside %s live ones (estimates)', s.n_dead_tup, s.n_live_tup)
    from pg_stat_user_tables as s
    where s.schemaname = 'baton' and s.n_dead_tup > 10000 and s.n_dead_tup > 5 * s.n_live_tup
    order by s.relname
  loop
    severity := 'warning';
    advice := 'is autovacuum on, and no old snapshot held?';
    return next;
  end loop;
end;
$$;
