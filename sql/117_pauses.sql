/*
 * Pausing a queue: nothing of it is claimed until it is resumed. What is in flight goes on, and so does sending. The
 * pause stands beside the queue's mark, which a claim reads anyway.
 */
create or replace function baton.pause_queue(queue_name text, out outcome text, out was_paused boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_now timestamptz;
begin
  perform baton._check_users_queue(pause_queue.queue_name);
  perform q.queue_name from baton.queue_marks as q where q.queue_name = pause_queue.queue_name for no key update of q;
  v_now := baton._now();
  insert into baton.queue_marks as q (queue_name, mark, marked_at, seen_at, paused_at)
  values (pause_queue.queue_name, '-infinity', '-infinity', v_now, v_now)
  on conflict on constraint queue_marks_pkey do update set paused_at = v_now where q.paused_at is null;
  outcome := 'paused';
  was_paused := not found;
  if not was_paused then
    perform baton._incident(
      v_now, 'operator', queue_name => pause_queue.queue_name, detail => jsonb_build_object('verb', 'pause_queue')
    );
  end if;
end;
$$;

comment on function baton.pause_queue(text) is
'Stop handing out the messages of a queue, from the next claim on. What is claimed goes on: its receipts stay good, replays and bodies end as they would. Messages are sent, and workers started, as before; to stop these, disable their functions.
Outcomes: paused, with was_paused
Raises: 22023
Locks: the queue''s mark';

create or replace function baton.resume_queue(queue_name text, out outcome text, out was_paused boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
  perform baton._check_users_queue(resume_queue.queue_name);
  update baton.queue_marks as q
  set paused_at = null
  where q.queue_name = resume_queue.queue_name and q.paused_at is not null;
  outcome := 'resumed';
  was_paused := found;
  if was_paused then
    perform baton._incident(
      baton._now(), 'operator', queue_name => resume_queue.queue_name,
      detail => jsonb_build_object('verb', 'resume_queue')
    );
  end if;
end;
$$;

comment on function baton.resume_queue(text) is
'Hand out the messages of a paused queue again.
Outcomes: resumed, with was_paused
Raises: 22023
Locks: the queue''s mark';
