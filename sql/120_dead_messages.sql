/*
 * The dead, and what an operator does with messages. fail buries a message at its limit at once, tick the others.
 */
comment on table baton.dead_messages is
'Messages that reached a limit, with their history, until they are redriven or discarded.
Written by: _bury_message, _prune_rest, discard, redrive';
comment on column baton.dead_messages.reason is 'failures, lapses, or final: the handler asked for it.';

-- The caller holds the row's lock.
create or replace function baton._bury_message(message baton.messages, reason text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from baton.messages as m where m.message_id = (_bury_message.message).message_id;
  insert into baton.dead_messages (
    message_id, queue_name, kind, payload, headers, dedupe_key, failures, lapses, last_error, claimed_at, claimed_by,
    created_at, died_at, reason
  )
  select
    d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.failures,
    d.lapses + (_bury_message.reason = 'lapses' and d.claimed_at is not null)::integer,
    d.last_error, d.claimed_at, d.claimed_by, d.created_at, _bury_message.at, _bury_message.reason
  from (select (_bury_message.message).*) as d;
  perform baton._incident(
    _bury_message.at, 'limit_reached', queue_name => (_bury_message.message).queue_name,
    message_id => (_bury_message.message).message_id, worker_id => (_bury_message.message).claimed_by,
    detail => jsonb_build_object('reason', _bury_message.reason)
  );
end;
$$;

-- For tick: looks at the first 1,000 due messages of each users' queue, the ones that claims have to step over.
create or replace function baton._bury_messages(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_settings baton.settings;
  v_queue baton.queue_marks;
  v_id bigint;
  v_message baton.messages;
  v_buried integer := 0;
begin
  select s.* into v_settings from baton.settings as s where s.singleton;
  for v_queue in
    select q.* from baton.queue_marks as q where not starts_with(q.queue_name, 'baton.') order by q.queue_name
  loop
    exit when v_buried >= 1000;
    for v_id in
      with due as materialized (
        select m.message_id, m.kind, m.failures, m.lapses, m.claimed_at
        from baton.messages as m
        where m.queue_name = v_queue.queue_name and m.visible_at >= v_queue.mark and m.visible_at <= _bury_messages.at
        order by m.visible_at, m.message_id
        limit 1000
      )
      select d.message_id
      from due as d
      where baton._dead_reason(
        d.kind, d.failures, d.lapses, d.claimed_at, v_settings.max_failures, v_settings.max_lapses
      ) is not null
      order by d.message_id
    loop
      select m.*
      into v_message
      from baton.messages as m
      where m.message_id = v_id
        and m.visible_at <= _bury_messages.at
        and baton._dead_reason(
          m.kind, m.failures, m.lapses, m.claimed_at, v_settings.max_failures, v_settings.max_lapses
        ) is not null
      for update of m skip locked;
      continue when not found;
      perform baton._bury_message(
        v_message,
        baton._dead_reason(
          v_message.kind, v_message.failures, v_message.lapses, v_message.claimed_at, v_settings.max_failures,
          v_settings.max_lapses
        ),
        _bury_messages.at
      );
      v_buried := v_buried + 1;
    end loop;
  end loop;
  return v_buried;
end;
$$;

create or replace function baton.redrive(message_ids bigint[])
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_ids bigint[] := '{}'::bigint[];
  v_places bigint[] := '{}'::bigint[];
  v_given record;
  v_dead baton.dead_messages;
  v_now timestamptz;
  v_outcomes text[];
begin
  -- All of them before the first key: two dead messages may have had the same one. Looked up by their ids, then sorted:
  -- else it could be planned as a walk through all the dead in that order. Who waited may find the row gone.
  for v_given in
    with given as materialized (
      select d.message_id, d.queue_name, d.dedupe_key
      from baton.dead_messages as d
      where d.message_id = any (redrive.message_ids)
    )
    select g.message_id, min(i.nth) as nth
    from given as g
    inner join unnest(redrive.message_ids) with ordinality as i (message_id, nth) on i.message_id = g.message_id
    group by g.message_id, g.queue_name, g.dedupe_key
    order by g.queue_name, g.dedupe_key, g.message_id
  loop
    perform from baton.dead_messages as d where d.message_id = v_given.message_id for update of d;
    if found then
      v_ids := v_ids || v_given.message_id;
      v_places := v_places || v_given.nth;
    end if;
  end loop;

  for v_n in 1 .. cardinality(v_ids) loop
    select d.* into v_dead from baton.dead_messages as d where d.message_id = v_ids[v_n];
    v_now := baton._now();
    if exists (
      select from baton.messages as m where m.queue_name = v_dead.queue_name and m.dedupe_key = v_dead.dedupe_key
    ) then
      v_outcomes[v_places[v_n]] := 'key_taken';
      continue;
    end if;
    insert into baton.messages (
      message_id, queue_name, kind, payload, headers, dedupe_key, visible_at, last_error, created_at
    )
    overriding system value
    values (
      v_dead.message_id, v_dead.queue_name, v_dead.kind, v_dead.payload, v_dead.headers, v_dead.dedupe_key, v_now,
      v_dead.last_error, v_dead.created_at
    )
    on conflict do nothing;
    if not found then
      v_outcomes[v_places[v_n]] := 'key_taken';
      continue;
    end if;
    delete from baton.dead_messages as d where d.message_id = v_dead.message_id;
    v_outcomes[v_places[v_n]] := 'redriven';
    perform baton._incident(
      v_now, 'operator', queue_name => v_dead.queue_name, message_id => v_dead.message_id,
      detail => jsonb_build_object('verb', 'redrive')
    );
  end loop;

  return query
  select coalesce(v_outcomes[i.nth], 'unknown'), i.message_id
  from unnest(redrive.message_ids) with ordinality as i (message_id, nth)
  order by i.nth;
end;
$$;

comment on function baton.redrive(bigint[]) is
'Bring dead messages back: same id, both counters at 0, due at once.
Returns: a row an id, in their order: outcome, message_id. redriven; key_taken, where a live message of the queue holds its key by now; unknown, where it isn''t dead
Raises: none
Locks: the dead messages, by queue and key; waits for another transaction that is inserting the same key';

-- The ids that a verb was given, and whether it is done with each: one that is given twice is done once.
create or replace function baton._answers_by_id(message_ids bigint[], done bigint[])
returns table (message_id bigint, nth bigint, is_done boolean)
language sql
immutable
begin atomic
  select
    i.message_id,
    i.nth,
    i.nth = min(i.nth) over (partition by i.message_id)
      and i.message_id in (select d.message_id from unnest(_answers_by_id.done) as d (message_id)) as is_done
  from unnest(_answers_by_id.message_ids) with ordinality as i (message_id, nth);
end;

create or replace function baton.discard(message_ids bigint[])
returns table (outcome text, message_id bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_dead record;
  v_discarded bigint[];
begin
  -- As in redrive.
  for v_dead in
    with given as materialized (
      select d.message_id, d.queue_name, d.dedupe_key
      from baton.dead_messages as d
      where d.message_id = any (discard.message_ids)
    )
    select g.message_id, g.queue_name
    from given as g
    order by g.queue_name, g.dedupe_key, g.message_id
  loop
    delete from baton.dead_messages as d where d.message_id = v_dead.message_id;
    continue when not found;
    v_discarded := v_discarded || v_dead.message_id;
    perform baton._incident(
      baton._now(), 'operator', queue_name => v_dead.queue_name, message_id => v_dead.message_id,
      detail => jsonb_build_object('verb', 'discard')
    );
  end loop;

  return query
  select case when i.is_done then 'discarded' else 'unknown' end, i.message_id
  from baton._answers_by_id(discard.message_ids, v_discarded) as i
  order by i.nth;
end;
$$;

comment on function baton.discard(bigint[]) is
'Remove dead messages for good.
Returns: a row an id, in their order: outcome, message_id. discarded; unknown, where it isn''t dead
Raises: none
Locks: the dead messages, by queue and key';

create or replace function baton.remove_messages(message_ids bigint[])
returns table (outcome text, message_id bigint)
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
  v_message record;
  v_removed bigint[];
begin
  for v_message in
    with free as (
      select m.message_id
      from baton.messages as m
      where m.message_id = any (remove_messages.message_ids)
        and not starts_with(m.queue_name, 'baton.')
        and m.run_id is null
        and (m.claimed_at is null or m.visible_at <= v_now)
      order by m.message_id
      for update of m skip locked
    )
    delete from baton.messages as m
    where m.message_id = any (array(select f.message_id from free as f))
    returning m.message_id, m.queue_name
  loop
    v_removed := v_removed || v_message.message_id;
    perform baton._incident(
      v_now, 'operator', queue_name => v_message.queue_name, message_id => v_message.message_id,
      detail => jsonb_build_object('verb', 'remove_messages')
    );
  end loop;

  return query
  select
    case
      when i.is_done then 'removed'
      when exists (
        select
        from baton.messages as m
        where m.message_id = i.message_id and m.run_id is null and not starts_with(m.queue_name, 'baton.')
        offset 0
      ) then 'in_flight'
      else 'unknown'
    end,
    i.message_id
  from baton._answers_by_id(remove_messages.message_ids, v_removed) as i
  order by i.nth;
end;
$$;

comment on function baton.remove_messages(bigint[]) is
'Remove users'' messages that nobody holds, unread.
Returns: a row an id, in their order: outcome, message_id. removed; in_flight, where a claim of it lives or its row is locked; unknown
Raises: none
Locks: the messages, never waiting';
