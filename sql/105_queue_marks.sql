/*
 * Marks: where claims begin to look in a queue.
 *
 * While somebody holds an old snapshot, vacuum can't remove finished messages, and a claim would step over all of
 * them. A mark lies below the earliest due message and at least 5 s behind the clock; tick moves it, up or down. A
 * message that commits below it (its transaction was open, or waited for a key, for longer than that) waits until a
 * tick looks from the start, which it does every 15 s. A mark that is not fresh is not used.
 */
comment on table baton.queue_marks is
'Where claims of a queue begin to look, and whether they may. A queue has a row from its first claim or pause on until it has been empty for an hour and is not paused.
Written by: _move_marks, _register_queue, pause_queue, resume_queue';
comment on column baton.queue_marks.mark is 'No due message that was known to the last look from the start was below it when it was set.';
comment on column baton.queue_marks.marked_at is 'When it was set: claims believe it for 10 s.';
comment on column baton.queue_marks.seen_at is 'When a tick last saw a live message.';
comment on column baton.queue_marks.paused_at is 'Since when the queue is paused; null: it is not.';

create or replace function baton._mark_age()
returns interval
language sql
immutable
begin atomic
  select interval '10 seconds';
end;

create or replace function baton._mark_lag()
returns interval
language sql
immutable
begin atomic
  select interval '5 seconds';
end;

-- Called by a claim, which never waits: two that register one queue at the same moment are kept apart by a lock.
create or replace function baton._register_queue(queue_name text, at timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_try_advisory_xact_lock(hashtextextended('baton.queue_marks ' || _register_queue.queue_name, 0)) then
    insert into baton.queue_marks (queue_name, mark, marked_at, seen_at)
    values (_register_queue.queue_name, '-infinity', '-infinity', _register_queue.at)
    on conflict do nothing;
  end if;
end;
$$;

create or replace function baton._move_marks(at timestamptz)
returns integer
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_queue baton.queue_marks;
  v_from timestamptz;
  v_earliest timestamptz;
  v_moved integer := 0;
begin
  for v_queue in
    select q.* from baton.queue_marks as q order by q.marked_at limit 1000 for update of q skip locked
  loop
    v_from := case
      when date_bin('15 seconds', greatest(v_queue.marked_at, 'epoch'), 'epoch')
        = date_bin('15 seconds', _move_marks.at, 'epoch') then v_queue.mark
      else '-infinity'
    end;
    select m.visible_at
    into v_earliest
    from baton.messages as m
    where m.queue_name = v_queue.queue_name and m.visible_at >= v_from
    order by m.visible_at, m.message_id
    limit 1;
    if v_earliest is null and v_queue.paused_at is null and v_queue.seen_at < _move_marks.at - interval '1 hour' then
      delete from baton.queue_marks as q where q.queue_name = v_queue.queue_name;
      continue;
    end if;
    update baton.queue_marks as q
    set mark = least(v_earliest, _move_marks.at - baton._mark_lag()),
      marked_at = _move_marks.at,
      seen_at = case when v_earliest is null then q.seen_at else _move_marks.at end
    where q.queue_name = v_queue.queue_name;
    v_moved := v_moved + 1;
  end loop;
  return v_moved;
end;
$$;
