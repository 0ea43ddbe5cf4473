/*
 * Views for observers. Rules are asked of the functions that the verbs use, so a view never tells another story.
 */
create or replace view baton.worker_startup as
select
  f.function_name,
  f.queue_name,
  s.startup_state,
  h.unhandshaken = 0 as protected,
  h.healthy as healthy_workers,
  case s.startup_state
    when 'retryable' then 0
    when 'throttled' then extract(epoch from baton._next_attempt_at(f, c.at) - c.at)
    when 'pending' then extract(epoch from greatest(
      f.invocation_expires_at, baton._next_attempt_at(f, f.invocation_expires_at)
    ) - c.at)
  end as seconds_until_next_attempt,
  f.failed_starts + baton._is_overdue(f, c.at)::integer as failed_starts,
  f.invocation_error,
  f.invocation_detail,
  f.invocation_id,
  f.invocation_expires_at,
  f.last_invoked_at
from baton.worker_functions as f
cross join (select baton._now() as at) as c
cross join lateral (
  select count(*) as healthy, count(*) filter (where not w.handshake) as unhandshaken
  from baton.workers as w
  where w.function_name = f.function_name and w.stopped_at is null
    and baton._is_healthy(w, f.heartbeat_timeout, c.at)
) as h
cross join lateral (select baton._startup_state(f, h.healthy > 0, c.at) as startup_state) as s;

comment on view baton.worker_startup is 'How the start of each function stands.';
comment on column baton.worker_startup.function_name is 'The function.';
comment on column baton.worker_startup.queue_name is 'What its workers claim from.';
comment on column baton.worker_startup.startup_state is
'The first that applies: disabled; process (others start it); ready (a healthy worker exists); pending (a start is under way); throttled (the next attempt has to wait); retryable (the next tick starts one).';
comment on column baton.worker_startup.protected is
'False while a healthy worker came without the handshake: it may have been started twice. Says nothing of process functions.';
comment on column baton.worker_startup.healthy_workers is 'Workers with a fresh heartbeat that go on.';
comment on column baton.worker_startup.seconds_until_next_attempt is
'Until a start may be requested if nothing else happens; null where none will be.';
comment on column baton.worker_startup.failed_starts is
'Starts in a row that failed before the current one; a good start sets it to 0 when the next one is reserved.';
comment on column baton.worker_startup.invocation_error is
'Why the last start failed: dismissed, expired, disabled, deprecated, or error (it could not be requested).';
comment on column baton.worker_startup.invocation_detail is
'The failure in words; of a good start the verb that completed it: accept, reconcile or register_worker.';
comment on column baton.worker_startup.invocation_id is 'The current invocation.';
comment on column baton.worker_startup.invocation_expires_at is 'When it counts as lost if it is still pending.';
comment on column baton.worker_startup.last_invoked_at is 'When the last start was reserved.';

create or replace view baton.queue_stats as
with live as (
  select
    m.queue_name,
    count(*) filter (where m.visible_at <= c.at) as ready,
    count(*) filter (where m.visible_at > c.at and m.claimed_at is null) as delayed,
    count(*) filter (where m.visible_at > c.at and m.claimed_at is not null) as in_flight,
    max(c.at - m.visible_at) filter (where m.visible_at <= c.at) as oldest_ready_age
  from baton.messages as m
  cross join (select baton._now() as at) as c
  group by m.queue_name
),
dead as (
  select d.queue_name, count(*) as dead
  from baton.dead_messages as d
  group by d.queue_name
)
select
  coalesce(live.queue_name, dead.queue_name) as queue_name,
  coalesce(live.ready, 0) as ready,
  coalesce(live.delayed, 0) as delayed,
  coalesce(live.in_flight, 0) as in_flight,
  coalesce(dead.dead, 0) as dead,
  live.oldest_ready_age
from live
full join dead on dead.queue_name = live.queue_name;

comment on view baton.queue_stats is 'The messages of each queue that has any, counted.';
comment on column baton.queue_stats.queue_name is 'The queue.';
comment on column baton.queue_stats.ready is 'Due. Those whose claim ran out are among them, and those at their limit until a tick buries them.';
comment on column baton.queue_stats.delayed is 'Due later: sent with a delay, parked or backing off.';
comment on column baton.queue_stats.in_flight is 'Claimed by somebody.';
comment on column baton.queue_stats.dead is 'In dead_letters.';
comment on column baton.queue_stats.oldest_ready_age is 'For how long the longest due message has waited.';

create or replace view baton.dead_letters as
select
  d.message_id, d.queue_name, d.kind, d.payload, d.headers, d.dedupe_key, d.reason, d.last_error, d.failures, d.lapses,
  d.claimed_at, d.claimed_by, d.created_at, d.died_at
from baton.dead_messages as d;

comment on view baton.dead_letters is 'Messages that reached a limit: read them, mend the cause, redrive them.';
comment on column baton.dead_letters.message_id is 'What redrive wants.';
comment on column baton.dead_letters.queue_name is 'The queue that it comes from and goes back to.';
comment on column baton.dead_letters.kind is 'As sent.';
comment on column baton.dead_letters.payload is 'As sent.';
comment on column baton.dead_letters.headers is 'As sent.';
comment on column baton.dead_letters.dedupe_key is 'As sent; another message may hold it by now.';
comment on column baton.dead_letters.reason is
'failures or lapses (the limit that it reached), or final (its handler asked for it).';
comment on column baton.dead_letters.last_error is 'What the last fail said.';
comment on column baton.dead_letters.failures is 'How often a handler said that it failed.';
comment on column baton.dead_letters.lapses is 'How often its claim ran out in silence.';
comment on column baton.dead_letters.claimed_at is 'When it was claimed last, if that claim was never given back.';
comment on column baton.dead_letters.claimed_by is 'The worker that claimed it last, if it said.';
comment on column baton.dead_letters.created_at is 'When it was sent.';
comment on column baton.dead_letters.died_at is 'When it reached its limit.';

create or replace view baton.incident_log as
select
  i.incident_id, i.at, i.kind, i.function_name, i.worker_id, i.invocation_id, i.queue_name, i.message_id, i.detail
from baton.incidents as i;

comment on view baton.incident_log is 'What was repaired, given up, refused or done by an operator.';
comment on column baton.incident_log.incident_id is 'Ascending: order by it.';
comment on column baton.incident_log.at is 'When it happened.';
comment on column baton.incident_log.kind is
'invocation_expired, invocation_dismissed, invocation_error: a start failed; start_crashed: a worker was accepted and never heard again; function_locked: somebody holds a function''s row; worker_silent; request_ids_forgotten: pg_net began anew; lost: a receipt came too late; limit_reached: a message died; operator: a verb of an operator.';
comment on column baton.incident_log.function_name is 'The function concerned, if one is.';
comment on column baton.incident_log.worker_id is 'The worker concerned, if one is.';
comment on column baton.incident_log.invocation_id is 'The invocation concerned, if one is.';
comment on column baton.incident_log.queue_name is 'The queue of the message concerned.';
comment on column baton.incident_log.message_id is 'The message concerned, if one is.';
comment on column baton.incident_log.detail is 'What else is known.';
