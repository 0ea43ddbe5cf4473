/*
 * Every repair, limit reached and lost receipt leaves one row. Writing it waits for nobody: no two rows are the same.
 *
 * What metrics() counts is added up apart, so that pruning incidents takes nothing away from a counter: whatever
 * happens adds a tally, a row of its own, and tick folds the tallies into totals. A counter is its total and its
 * tallies.
 */
comment on table baton.incidents is
'What was repaired, given up, refused or done by an operator, a row each.
Written by: _incident, _prune_rest';
comment on column baton.incidents.incident_id is 'Ascending, with gaps.';
comment on column baton.incidents.at is 'When it happened, by the database''s clock.';
comment on column baton.incidents.kind is 'What happened; the view incident_log explains the kinds.';
comment on column baton.incidents.function_name is 'The function concerned, if one is.';
comment on column baton.incidents.worker_id is 'The worker concerned, if one is.';
comment on column baton.incidents.invocation_id is 'The invocation concerned, if one is.';
comment on column baton.incidents.queue_name is 'The queue of the message concerned.';
comment on column baton.incidents.message_id is 'The message concerned, if one is.';
comment on column baton.incidents.run_id is 'The run concerned, if one is.';
comment on column baton.incidents.step_slug is 'The step concerned, if one is.';
comment on column baton.incidents.task_index is 'The task concerned, if one is.';
comment on column baton.incidents.detail is 'What else is known, as an object; never a secret.';

comment on table baton.tallies is
'What happened since the last tick, for the counters of metrics(), a row each.
Written by: _fold_tallies, _tally';
comment on column baton.tallies.kind is 'A kind of incident, or await, or backstop.';

comment on table baton.totals is
'The counters of metrics() as of the last tick, a row a kind: they only grow.
Written by: _fold_tallies';

create or replace function baton._tally(kind text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into baton.tallies (kind) values (_tally.kind);
end;
$$;

-- For tick, which is the only one that writes totals.
create or replace function baton._fold_tallies()
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_folded integer;
begin
  with next as (
    select t.tally_id from baton.tallies as t order by t.tally_id limit 10000 for update of t skip locked
  ),
  folded as (
    delete from baton.tallies as t
    where t.tally_id = any (array(select n.tally_id from next as n))
    returning t.kind
  ),
  added as (
    insert into baton.totals as o (kind, total)
    select f.kind, count(*)
    from folded as f
    group by f.kind
    on conflict (kind) do update set total = o.total + excluded.total
  )
  select count(*)::integer into v_folded from folded;
  return v_folded;
end;
$$;

create or replace function baton._incident(
  at timestamptz,
  kind text,
  function_name text default null,
  worker_id uuid default null,
  invocation_id uuid default null,
  queue_name text default null,
  message_id bigint default null,
  run_id text default null,
  step_slug text default null,
  task_index integer default null,
  detail jsonb default null
)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into baton.incidents (
    at, kind, function_name, worker_id, invocation_id, queue_name, message_id, run_id, step_slug, task_index, detail
  )
  values (
    _incident.at, _incident.kind, _incident.function_name, _incident.worker_id, _incident.invocation_id,
    _incident.queue_name, _incident.message_id, _incident.run_id, _incident.step_slug, _incident.task_index,
    _incident.detail
  );
  perform baton._tally(_incident.kind);
end;
$$;
