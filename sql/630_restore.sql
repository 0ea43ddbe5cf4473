/*
 * A restored dump, or a clone. Its rows go on where the other database stood, and so do the workers of that database if
 * they can reach this one: under receipts that look current. after_restore makes them void.
 */

-- Which database this is: another cluster, another database in it, or a schema created anew has another one. A copy of
-- the files has not.
create or replace function baton._identity()
returns text
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_system text;
begin
  if has_function_privilege('pg_control_system()', 'execute') then
    execute 'select c.system_identifier::text from pg_control_system() as c' into v_system;
  end if;
  return (
    select concat_ws('/', v_system, d.oid, 'baton.state'::regclass::oid)
    from pg_database as d
    where d.datname = current_database()
  );
end;
$$;

do $$
begin
  update baton.state as s set identity = baton._identity() where s.identity is null;
end;
$$;

create or replace function baton._health_restore()
returns table (severity text, finding text, subject text, detail text, advice text)
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from baton.state as s where s.identity <> baton._identity()) then
    severity := 'warning';
    finding := 'restored';
    subject := null;
    detail := 'these rows come from another database: receipts of its workers are still current';
    advice := 'select * from baton.after_restore(), before workers start';
    return next;
  end if;
end;
$$;

-- Message ids go a million past every one that is stored: the other database may have given out so many since. Ids of
-- incidents and tallies only past those that are there, which logical replication brings without their sequences.
create or replace function baton._move_ids()
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_message_id bigint;
begin
  select
    greatest(
      s.last_value,
      (select max(m.message_id) from baton.messages as m),
      (select max(d.message_id) from baton.dead_messages as d),
      (select max(i.message_id) from baton.incidents as i),
      (select max(r.replay_message_id) from baton.runs as r),
      (select max(r.wake_message_id) from baton.runs as r),
      (select max(t.owner_message_id) from baton.tasks as t)
    )
  into v_message_id
  from baton.messages_message_id_seq as s;
  perform setval('baton.messages_message_id_seq', v_message_id + 1000000);
  perform setval(
    'baton.incidents_incident_id_seq', greatest(s.last_value, (select max(i.incident_id) from baton.incidents as i))
  )
  from baton.incidents_incident_id_seq as s;
  perform setval(
    'baton.tallies_tally_id_seq', greatest(s.last_value, (select max(t.tally_id) from baton.tallies as t))
  )
  from baton.tallies_tally_id_seq as s;
end;
$$;

-- Bodies are released as by force, which counts nothing, and the replay ends. The caller holds the run's lock.
create or replace function baton._give_up_run(run baton.runs, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  v_run baton.runs := _give_up_run.run;
  v_task baton.tasks;
begin
  for v_task in
    select t.*
    from baton.tasks as t
    where t.run_id = v_run.run_id and t.status = 'started'
    order by t.step_slug, t.task_index
  loop
    v_run := baton._release(v_run, v_task, _give_up_run.at);
  end loop;
  perform baton._save_positions(v_run);
  update baton.runs as r
  set replay_epoch = baton._new_delivery(), replay_ended = true, wake_pending = true
  where r.run_id = v_run.run_id and not r.replay_ended;
end;
$$;

create or replace function baton.after_restore(out outcome text)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_function baton.worker_functions;
  v_run baton.runs;
  v_now timestamptz;
begin
  perform baton._require_read_committed();
  -- As a tick does, which holds it while it locks rows of the others.
  perform s.singleton from baton.state as s for no key update of s;
  lock table baton.worker_functions, baton.workers, baton.runs, baton.messages in exclusive mode;
  v_now := baton._now();

  perform baton._move_ids();
  for v_run in
    select r.*
    from baton.runs as r
    where r.ended_at is null
      and (
        not r.replay_ended
        or exists (select from baton.tasks as t where t.run_id = r.run_id and t.status = 'started')
      )
    order by r.run_id
  loop
    perform baton._give_up_run(v_run, v_now);
  end loop;
  -- Of an extension the dump may be of a version that has no such columns.
  update baton.runs as r
  set wake_message_id = m.message_id
  from baton.messages as m
  where m.run_id = r.run_id and m.dedupe_key = baton._run_key(r.run_id, 'wake');
  update baton.runs as r
  set needs_driver = true
  where not r.needs_driver and (r.status = 'running' or r.wake_pending);
  update baton.messages as m
  set claimed_at = null, visible_at = least(m.visible_at, v_now)
  where m.claimed_at is not null;
  for v_function in
    select f.* from baton.worker_functions as f where f.invocation_status = 'pending' order by f.function_name
  loop
    perform baton._fail_invocation(v_function, 'expired', 'after_restore', v_now);
  end loop;
  update baton.workers as w
  set stopping_at = coalesce(w.stopping_at, v_now), stopped_at = v_now
  where w.stopped_at is null;
  update baton.state as s
  set identity = baton._identity(), cron_purged_runid = 0, pg_net_head_id = null, pg_net_head_since = null
  where s.singleton;
  perform baton._incident(v_now, 'operator', detail => jsonb_build_object('verb', 'after_restore'));
  outcome := 'restored';
end;
$$;

comment on function baton.after_restore() is
'For a restored dump or a clone, once, before workers start: what was in flight in the other database is given out anew here, and nothing that its workers hold is current any more. Message ids go on a million past every one that is stored, all claims and replays end (their work is due at once; nothing is counted), bodies that ran are released, pending invocations fail as expired, and all workers are stopped.
Outcomes: restored
Raises: 25001
Locks: all functions, workers, runs and messages, against everything but reading, after a tick that is at work';
