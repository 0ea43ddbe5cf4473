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

create or replace view baton.worker_overview as
select
  w.worker_id, w.function_name, f.queue_name, w.version,
  case
    when w.stopped_at is not null then 'stopped'
    when w.deprecated_at is not null then 'deprecated'
    when w.stopping_at is not null then 'stopping'
    when baton._is_healthy(w, f.heartbeat_timeout, c.at) then 'healthy'
    else 'silent'
  end as state,
  w.control, w.handshake, w.started_at, w.last_heartbeat_at, w.stopped_at
from baton.workers as w
inner join baton.worker_functions as f on f.function_name = w.function_name
cross join (select baton._now() as at) as c;

comment on view baton.worker_overview is 'The workers, those that have stopped too until they are pruned.';
comment on column baton.worker_overview.worker_id is 'The worker.';
comment on column baton.worker_overview.function_name is 'Its function.';
comment on column baton.worker_overview.queue_name is 'What it claims from.';
comment on column baton.worker_overview.version is 'What it said it runs.';
comment on column baton.worker_overview.state is
'The first that applies: stopped; deprecated or stopping (it claims nothing more and finishes what it holds); healthy (its heartbeat is fresh); silent.';
comment on column baton.worker_overview.control is 'How it hears of cancellations: listening, polling, off.';
comment on column baton.worker_overview.handshake is 'Whether it was started by an invocation.';
comment on column baton.worker_overview.started_at is 'When it was accepted or registered.';
comment on column baton.worker_overview.last_heartbeat_at is 'When it was heard last.';
comment on column baton.worker_overview.stopped_at is 'When it stopped, or was given up.';

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
),
paused as (
  select q.queue_name, q.paused_at
  from baton.queue_marks as q
  where q.paused_at is not null
)
select
  coalesce(live.queue_name, dead.queue_name, paused.queue_name) as queue_name,
  coalesce(live.ready, 0) as ready,
  coalesce(live.delayed, 0) as delayed,
  coalesce(live.in_flight, 0) as in_flight,
  coalesce(dead.dead, 0) as dead,
  live.oldest_ready_age,
  paused.paused_at
from live
full join dead on dead.queue_name = live.queue_name
full join paused on paused.queue_name = coalesce(live.queue_name, dead.queue_name);

comment on view baton.queue_stats is 'The messages of each queue that has any or is paused, counted.';
comment on column baton.queue_stats.queue_name is 'The queue.';
comment on column baton.queue_stats.ready is 'Due. Those whose claim ran out are among them, and those at their limit until a tick buries them.';
comment on column baton.queue_stats.delayed is 'Due later: sent with a delay, parked or backing off.';
comment on column baton.queue_stats.in_flight is 'Claimed by somebody.';
comment on column baton.queue_stats.dead is 'In dead_letters.';
comment on column baton.queue_stats.oldest_ready_age is 'For how long the longest due message has waited.';
comment on column baton.queue_stats.paused_at is 'Since when nothing of it is claimed; null: it is not paused.';

create or replace view baton.message_overview as
select
  m.message_id, m.queue_name, m.kind, m.run_id, m.step_slug, m.task_index,
  coalesce(
    m.dedupe_key,
    (
      select r.run_id || e'\x1fwake'
      from baton.runs as r
      where r.run_id = m.run_id and r.wake_message_id = m.message_id
    )
  ) as dedupe_key,
  case
    when m.claimed_at is null and m.visible_at <= c.at then 'ready'
    when m.claimed_at is null then 'delayed'
    when m.visible_at <= c.at then 'lapsed'
    else 'in_flight'
  end as state,
  m.visible_at, m.claimed_at, m.claimed_by, m.failures, m.lapses, m.last_error, m.created_at
from baton.messages as m
cross join (select baton._now() as at) as c;

comment on view baton.message_overview is
'The live messages, without their payloads. Ask for a message_id, a queue_name or a run_id: these are found by index.';
comment on column baton.message_overview.message_id is 'Stable over every redelivery.';
comment on column baton.message_overview.queue_name is 'Its queue.';
comment on column baton.message_overview.kind is 'run, task, or the sender''s own word.';
comment on column baton.message_overview.run_id is 'The run of a run or task message.';
comment on column baton.message_overview.step_slug is 'The step of a task message.';
comment on column baton.message_overview.task_index is 'The task of a task message.';
comment on column baton.message_overview.dedupe_key is 'The key that it holds; of a run''s wake, its run_id and wake.';
comment on column baton.message_overview.state is
'ready (due), delayed (due later), in_flight (claimed), lapsed (its claim ran out: the next claim counts a lapse).';
comment on column baton.message_overview.visible_at is 'When it is due; while it is claimed, when the claim runs out.';
comment on column baton.message_overview.claimed_at is 'When it was claimed, if it is.';
comment on column baton.message_overview.claimed_by is 'The worker that claimed it last, if it said.';
comment on column baton.message_overview.failures is 'How often a handler said that it failed.';
comment on column baton.message_overview.lapses is 'How often a claim ran out in silence and another one followed.';
comment on column baton.message_overview.last_error is 'What the last fail said.';
comment on column baton.message_overview.created_at is 'When it was sent.';

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
  i.incident_id, i.at, i.kind, i.function_name, i.worker_id, i.invocation_id, i.queue_name, i.message_id, i.run_id,
  i.step_slug, i.task_index, i.detail
from baton.incidents as i;

comment on view baton.incident_log is 'What was repaired, given up, refused or done by an operator.';
comment on column baton.incident_log.incident_id is 'Ascending: order by it.';
comment on column baton.incident_log.at is 'When it happened.';
comment on column baton.incident_log.kind is
'invocation_expired, invocation_dismissed, invocation_error: a start failed; start_crashed: a worker was accepted and never heard again; function_locked: somebody holds a function''s row; worker_silent: tick gave a worker up; request_ids_forgotten: pg_net began anew; lost: a receipt came too late; limit_reached: a message died, or a run or a task failed; replay_lost: a replay never ended; run_recovered: a run that nobody drove was woken; owned_recovery: a start was lost, and the message that owned it started the task anew; takeover: the task''s own message did; too_late: a result came after the end; operator: a verb of an operator.';
comment on column baton.incident_log.function_name is 'The function concerned, if one is.';
comment on column baton.incident_log.worker_id is 'The worker concerned, if one is.';
comment on column baton.incident_log.invocation_id is 'The invocation concerned, if one is.';
comment on column baton.incident_log.queue_name is 'The queue of the message concerned.';
comment on column baton.incident_log.message_id is 'The message concerned, if one is.';
comment on column baton.incident_log.run_id is 'The run concerned, if one is.';
comment on column baton.incident_log.step_slug is 'The step concerned, if one is.';
comment on column baton.incident_log.task_index is 'The task concerned, if one is.';
comment on column baton.incident_log.detail is 'What else is known.';

create or replace view baton.run_overview as
select
  r.run_id, r.workflow_name, r.queue_name, r.status, r.last_seq,
  r.ended_at is null and (r.wake_seq > r.replayed_seq or r.wake_pending) as unread,
  r.failures, r.lapses, r.wake_at, r.created_at, r.ended_at,
  r.needs_driver as active
from baton.runs as r
where r.pruned_at is null;

comment on view baton.run_overview is 'The runs. Ask for a run_id, or for those that are active: these are found by index.';
comment on column baton.run_overview.run_id is 'The run.';
comment on column baton.run_overview.workflow_name is 'Its workflow.';
comment on column baton.run_overview.queue_name is 'Its queue.';
comment on column baton.run_overview.status is 'pending, running, suspended; completed, failed, cancelled.';
comment on column baton.run_overview.last_seq is 'How many events it has.';
comment on column baton.run_overview.unread is 'Something happened that no replay has seen yet.';
comment on column baton.run_overview.failures is 'Replays in a row that failed.';
comment on column baton.run_overview.lapses is 'Replays in a row that were lost.';
comment on column baton.run_overview.wake_at is 'When it asked to be woken, or is to start.';
comment on column baton.run_overview.created_at is 'When it was started.';
comment on column baton.run_overview.ended_at is 'When it ended.';
comment on column baton.run_overview.active is
'Pending, running, or with something unread; not those that have ended, or are suspended until something happens.';

create or replace view baton.replays as
select
  r.run_id,
  r.workflow_name,
  r.queue_name,
  r.replay_epoch,
  r.replay_message_id as message_id,
  m.claimed_by as worker_id,
  r.replay_backend as backend,
  case when r.replay_backend is null then 'lease' else 'session' end as hold,
  c.at - r.replay_began_at as age,
  m.visible_at - c.at as claim_remaining,
  coalesce(m.visible_at > c.at, false) and baton._connection_lives(r.replay_backend) as alive
from baton.runs as r
cross join (select baton._now() as at) as c
left join baton.messages as m
  on m.message_id = r.replay_message_id and m.delivery = r.replay_delivery and m.claimed_at is not null
where r.needs_driver and not r.replay_ended;

comment on view baton.replays is 'The replays that have not ended, and whether their holders live.';
comment on column baton.replays.run_id is 'The run.';
comment on column baton.replays.workflow_name is 'Its workflow.';
comment on column baton.replays.queue_name is 'Its queue.';
comment on column baton.replays.replay_epoch is 'The fence that its holder writes under.';
comment on column baton.replays.message_id is 'The run message that it was granted under.';
comment on column baton.replays.worker_id is 'The worker that claimed that message, if it said.';
comment on column baton.replays.backend is 'The pid of its connection, for a session hold.';
comment on column baton.replays.hold is 'lease or session.';
comment on column baton.replays.age is 'Since the grant.';
comment on column baton.replays.claim_remaining is 'Until its claim runs out; null where it was taken.';
comment on column baton.replays.alive is 'False: the next grant takes it over.';

create or replace view baton.task_ownership as
select
  t.run_id,
  t.step_slug,
  t.task_index,
  t.attempt,
  t.lapses,
  m.kind as owner_kind,
  t.owner_message_id,
  t.worker_id,
  c.at - t.last_started_at as age,
  coalesce(m.visible_at > c.at, false) as alive,
  baton._lease_remaining(t.last_started_at, s.inline_lease, c.at) as lease_remaining,
  baton._dispatch_decision(
    exists (
      select
      from baton.messages as o
      where o.dedupe_key = baton._task_key(t.run_id, t.step_slug, t.task_index)
    ),
    case when m.visible_at > c.at then 'other' end, true, false, false, s.inline_ownership
  ) as decision
from baton.tasks as t
cross join (select baton._now() as at) as c
cross join (
  select o.inline_lease, o.inline_ownership
  from baton.settings as o
  order by o.singleton
  limit 1
) as s
left join baton.messages as m
  on m.message_id = t.owner_message_id and m.delivery = t.owner_delivery and m.claimed_at is not null
where t.status = 'started';

comment on view baton.task_ownership is 'The started tasks, and who owns them.';
comment on column baton.task_ownership.run_id is 'The run.';
comment on column baton.task_ownership.step_slug is 'The step.';
comment on column baton.task_ownership.task_index is 'The task, from 0.';
comment on column baton.task_ownership.attempt is 'How often it was started.';
comment on column baton.task_ownership.lapses is 'Starts in a row that were lost.';
comment on column baton.task_ownership.owner_kind is
'run: inline, under the run message of a handler; task: under its own message; null: that receipt is no longer current.';
comment on column baton.task_ownership.owner_message_id is 'The message that it was started under.';
comment on column baton.task_ownership.worker_id is 'The worker that claimed that message, if it said.';
comment on column baton.task_ownership.age is 'Since its last start.';
comment on column baton.task_ownership.alive is 'Whether the claim that it runs under lives.';
comment on column baton.task_ownership.lease_remaining is 'How long a backstop armed now would wait.';
comment on column baton.task_ownership.decision is
'What a replay under another message would do: queued, backstop or enqueue.';

create or replace view baton.step_outputs as
select
  s.run_id,
  s.step_slug,
  s.status,
  (
    select jsonb_agg(o.output order by o.task_index)
    from (
      select (e.payload ->> 'task_index')::integer as task_index, e.payload -> 'output' as output
      from baton.events as e
      where e.run_id = s.run_id
        and e.type in ('task_completed', 'run_advanced')
        and e.payload ->> 'step_slug' = s.step_slug
    ) as o
  ) as outputs
from baton.steps as s
where not exists (
  select
  from baton.runs as r
  where r.run_id = s.run_id and r.pruned_at is not null
);

comment on view baton.step_outputs is 'The outputs of the steps, in the order of their tasks. Ask for a run_id.';
comment on column baton.step_outputs.run_id is 'The run.';
comment on column baton.step_outputs.step_slug is 'The step.';
comment on column baton.step_outputs.status is 'created, completed, failed, skipped, cancelled.';
comment on column baton.step_outputs.outputs is 'An array of the outputs of its completed tasks.';
