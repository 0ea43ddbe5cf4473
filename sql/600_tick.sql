/*
 * tick: everything periodic, one at a time, each part bounded and on its own, so that one failure does not stop the
 * rest.
 */
create or replace function baton._tick_part(part text, at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_changed integer;
begin
  case _tick_part.part
    when 'dead_letters' then
      v_changed := baton._bury_messages(_tick_part.at);
    when 'recovery' then
      select count(*)::integer
      into v_changed
      from baton._recover_runs(null, 1000)
      where (select s.recovery from baton.settings as s where s.singleton);
    when 'responses' then
      v_changed := baton._read_responses(_tick_part.at);
    when 'pg_net_queue' then
      v_changed := baton._watch_pg_net(_tick_part.at);
    when 'cron_runs' then
      v_changed := baton._purge_cron_runs();
    when 'silent_workers' then
      v_changed := baton._stop_silent_workers(_tick_part.at);
    when 'queue_marks' then
      v_changed := baton._move_marks(_tick_part.at);
    when 'totals' then
      v_changed := baton._fold_tallies();
    when 'ensure_workers' then
      select count(*)::integer into v_changed from baton.ensure_workers();
  end case;
  return v_changed;
end;
$$;

create or replace function baton.tick()
returns table (part text, changed integer, error text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz := baton._now();
  v_errors jsonb := '{}'::jsonb;
begin
  perform baton._require_read_committed();
  perform s.singleton from baton.state as s for no key update of s skip locked;
  if not found then
    return;
  end if;

  foreach part in array array[
    'dead_letters', 'recovery', 'responses', 'pg_net_queue', 'cron_runs', 'silent_workers', 'queue_marks', 'totals',
    'ensure_workers'
  ] loop
    begin
      changed := baton._tick_part(part, v_now);
      error := null;
    exception
      when others then
        changed := null;
        error := sqlerrm;
        v_errors := v_errors || jsonb_build_object(part, sqlerrm);
        raise warning 'pg_baton tick: %: %', part, sqlerrm;
    end;
    if changed is distinct from 0 then
      return next;
    end if;
  end loop;

  update baton.state as s set last_tick_at = v_now, last_tick_errors = nullif(v_errors, '{}') where s.singleton;
end;
$$;

comment on function baton.tick() is
'Everything periodic: dead letters, recovery of runs, answers to start requests, the package''s own rows in pg_cron''s history, silent workers, queue marks, the counters of metrics(), then ensure_workers. Call it every few seconds, by schedule() or by anything else. One at a time: a second caller returns at once.
Returns: a row a part that changed something or failed: part, changed (rows), error
Raises: 25001
Locks: the row of state, then what it changes, never waiting';
