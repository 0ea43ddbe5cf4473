"""A fan-out

One step with many tasks: created and dispatched to the queue, worked off by 4 clients, and the run replayed to its end.
A client claims the next task, then completes the one in hand and starts that one, in one statement; or ten or fifty at
once ([why](guides/ownership.md#many-short-bodies)); beside it the same rows changed by two bare statements.
And the way from start_run to the first body, in three statements: start_run; claim and begin_replay; create_step,
dispatch_tasks and end_replay; and the same where the second's commit is not flushed ([why](guides/replay.md#the-loop)).
Beside it the same number of jobs of graphile-worker, added a hundred at once and taken one, ten or a hundred at once, and
of absurd, spawned and taken one by one; and the way of a job, which is no run, from its enqueueing to its claim.
"""

from __future__ import annotations

import time

import bench_queue
from bench_frame import FLOOR, FLOOR_SQL, MODES, WARM, Bench, percentile, table

FIRST_BODY = r"""select run_id from baton.start_run('bench', '{"n": 1}', queue_name => 'first') \gset
select m.message_id, m.delivery, b.replay_epoch, b.last_seq as seen_seq
from baton.claim('first', visibility => '1 hour') as m
cross join lateral baton.begin_replay(m.message_id, m.delivery) as b \gset
select d.attempt
from baton.create_step(:run_id, :replay_epoch, 'step-0', '[{"n": 1}]') as s
left join lateral (
  select t.attempt from baton.dispatch_tasks(:run_id, :replay_epoch) as t where t.outcome = 'execute'
) as d on true
left join lateral baton.end_replay(:run_id, :replay_epoch, :seen_seq) as e on true \gset
"""
UNFLUSHED = FIRST_BODY.replace(
    "select m.message_id", "select set_config('synchronous_commit', 'off', true) as unflushed, m.message_id")
MESSAGE = r"""select outcome from baton.send('letters', '{"n": 1}') \gset
select message_id, delivery, payload from baton.claim('letters', visibility => '1 hour') \gset
"""
# Claims the next task; then completes the one in hand and starts that one.
TASK = r"""select message_id as next_message_id, delivery as next_delivery
from baton.claim('many', visibility => '1 hour') \gset
\if :next_started = 0
select run_id, task_index, attempt
from baton.start_task(:next_message_id, :next_delivery) where outcome = 'execute' \gset
\set next_started 1
\else
select s.run_id, s.task_index, s.attempt
from baton.complete_task(:run_id, 'many', :task_index, :attempt, '{"n": 1}', :message_id, :delivery) as c
left join lateral baton.start_task(:next_message_id, :next_delivery) as s on s.outcome = 'execute' \gset
\endif
\set message_id :next_message_id
\set delivery :next_delivery
"""
# The same, many at once.
TASKS = r"""select min(m.run_id) as run_id,
  json_agg(json_build_object('message_id', m.message_id, 'delivery', m.delivery) order by m.message_id) as receipts
from baton.claim('many', max_messages => {batch}, visibility => '1 hour') as m \gset
\if :next_started = 0
select {completions} as completions from baton.start_tasks(:receipts) as s where s.outcome = 'execute' \gset
\set next_started 1
\else
select {completions} as completions
from (select count(*) from baton.complete_tasks(:run_id, :completions)) as c
left join lateral baton.start_tasks(:receipts) as s on s.outcome = 'execute' \gset
\endif
"""
COMPLETIONS = """json_agg(json_build_object('step_slug', s.step_slug, 'task_index', s.task_index, 'attempt', s.attempt,
  'output', '{"n": 1}'::json, 'message_id', s.message_id, 'delivery', s.delivery))"""
# The same rows, by statements that check nothing.
BARE = r"""\if :bare_started = 0
select '{{}}' as ids, '{{}}' as tasks \gset bare_
\set bare_started 1
\endif
with taken as (
  update baton.messages as m
  set delivery = 1, claimed_at = now(), visible_at = now() + '1 hour'
  where m.message_id = any (array(
    select d.message_id from baton.messages as d
    where d.queue_name = 'many' and d.visible_at <= now()
    order by d.visible_at, d.message_id limit {batch} for no key update skip locked
  ))
  returning m.message_id, m.run_id, m.task_index
)
select min(t.run_id) as run_id, array_agg(t.message_id) as next_ids, array_agg(t.task_index) as next_tasks
from taken as t \gset bare_
with run as (
  update baton.runs as r
  set last_seq = r.last_seq + cardinality(cast(:bare_tasks as integer[])) + {batch}
  where r.run_id = :bare_run_id
  returning r.run_id, r.last_seq
), ended as (
  update baton.tasks as t set status = 'completed' from run as r
  where t.run_id = r.run_id and t.step_slug = 'many' and t.task_index = any (cast(:bare_tasks as integer[]))
), counted as (
  update baton.steps as s set open_tasks = s.open_tasks - cardinality(cast(:bare_tasks as integer[])) from run as r
  where s.run_id = r.run_id and s.step_slug = 'many'
), gone as (
  delete from baton.messages as m where m.message_id = any (cast(:bare_ids as bigint[]))
), started as (
  update baton.tasks as t
  set status = 'started', attempt = 1, owner_message_id = n.message_id, owner_delivery = 1, last_started_at = now()
  from run as r, unnest(cast(:bare_next_ids as bigint[]), cast(:bare_next_tasks as integer[])) as n (message_id, nth)
  where t.run_id = r.run_id and t.step_slug = 'many' and t.task_index = n.nth
), logged as (
  insert into baton.events (run_id, seq, type, payload, created_at)
  select r.run_id, r.last_seq + 1 - row_number() over (), e.type,
    jsonb_build_object('step_slug', 'many', 'task_index', e.nth, 'attempt', 1, 'output', '{{"n": 1}}'::jsonb), now()
  from run as r, (
    select 'task_completed' as type, t.nth from unnest(cast(:bare_tasks as integer[])) as t (nth)
    union all
    select 'task_started', t.nth from unnest(cast(:bare_next_tasks as integer[])) as t (nth)
  ) as e
)
select cast(:bare_next_ids as text) as ids, cast(:bare_next_tasks as text) as tasks \gset bare_
"""
CLIENTS = 4
SCRIPTS = {
    ("baton", 1): TASK,
    **{("baton", batch): TASKS.format(batch=batch, completions=COMPLETIONS) for batch in (10, 50)},
    **{("bare statements", batch): BARE.format(batch=batch) for batch in (1, 10, 50)},
}
HOW = {1: "", 10: ", ten at once", 50: ", fifty at once", 100: ", a hundred at once"}


def replay(conn, decide):
    """Claims the run's message and replays: the statements of the transaction that ends it."""
    message = conn.execute("select message_id, delivery from baton.claim('many', visibility => '1 hour')").fetchone()
    replay = conn.execute("select run_id, replay_epoch, last_seq as seen_seq from baton.begin_replay(%s, %s)", message)
    values = dict(zip((column.name for column in replay.description), replay.fetchone(), strict=True))
    with conn.transaction():
        for statement in decide:
            conn.execute(statement, values)


def fan_out(bench: Bench, mode: str, tasks: int, script: str, batch: int) -> tuple[float, float, float]:
    """Milliseconds to create and dispatch, tasks a second, milliseconds of the replay that ends the run."""
    with bench.committing(mode), bench.connect() as conn:
        conn.execute("select baton.start_run('bench', '{}', queue_name => 'many')")
        started = time.perf_counter()
        # Each client has a batch in hand at the end.
        replay(conn, [
            "select baton.create_step(%(run_id)s, %(replay_epoch)s, 'many', "
            f"(select jsonb_agg(jsonb_build_object('n', i)) from generate_series(1, {tasks + CLIENTS * batch}) as i))",
            "select count(*) from baton.dispatch_tasks(%(run_id)s, %(replay_epoch)s, 0)",
            "select baton.end_replay(%(run_id)s, %(replay_epoch)s, %(seen_seq)s)",
        ])
        created = time.perf_counter()
        bench.analyze()
        rate = batch * bench.repeat(mode, script, tasks // CLIENTS // batch + 1, CLIENTS)
        conn.execute("""
            select baton.complete_task(
              t.run_id, t.step_slug, t.task_index, t.attempt, '{}', t.owner_message_id, t.owner_delivery)
            from baton.tasks as t where t.step_slug = 'many' and t.status = 'started'
        """)
        worked_off = time.perf_counter()
        replay(conn, ["select baton.complete_run(%(run_id)s, %(replay_epoch)s, '{}')"])
        ended = time.perf_counter()
        assert bench.value("select count(*) from baton.tasks where step_slug = 'many' and status <> 'completed'") == 0
    return (created - started) * 1000, rate, (ended - worked_off) * 1000


def run(bench: Bench) -> str:
    rows = []
    for tasks in (1000,) if bench.short else (1000, 10_000):
        for mode, title in MODES.items():
            for (who, batch), script in SCRIPTS.items():
                bench_queue.clear(bench)
                created, rate, ended = fan_out(bench, mode, tasks, script, batch)
                rows.append([f"{who}: {tasks:,} tasks{HOW[batch]}, {title}", f"{created:.0f}", f"{rate:.0f}",
                             f"{ended:.1f}"])
            for peer in bench.peers.values():
                if peer.name in ("absurd", "graphile-worker"):
                    at_once = max(peer.enqueue)
                    for batch, script in peer.finish.items():
                        if CLIENTS * batch * 5 > tasks:
                            continue  # most of it would be the making of plans
                        bench_queue.clear(bench)
                        started = time.perf_counter()
                        # A claim may skip what another one has locked at that moment.
                        bench.repeat(mode, peer.enqueue[at_once], (tasks + CLIENTS * batch) // at_once + 1)
                        created = (time.perf_counter() - started) * 1000
                        bench.analyze()
                        rate = batch * bench.repeat(mode, script, tasks // CLIENTS // batch, CLIENTS)
                        rows.append([f"{peer.name}: {tasks:,} jobs{HOW[batch]}, {title}", f"{created:.0f}",
                                     f"{rate:.0f}", "–"])
    text = table(["a fan-out", "create ms", "tasks a second", "last replay ms"], rows) + "\n"

    scripts = {FLOOR: FLOOR_SQL + ";\n", "baton: a run, to its first body": FIRST_BODY,
               "baton: the same, its grant not flushed": UNFLUSHED,
               "baton: a message: enqueue, claim": MESSAGE}
    for peer in bench.peers.values():
        if peer.finish:
            claim = peer.finish[1].partition("\\gset")
            prefix = "absurd_" if peer.name == "absurd" else ""
            scripts[f"{peer.name}: enqueue, claim"] = peer.enqueue[1] + f"{claim[0]}\\gset {prefix}\n"
    bench_queue.clear(bench)
    rows = []
    times = {mode: bench.times(mode, scripts, len(scripts) * (100 if bench.short else 400)) for mode in MODES}
    for name in scripts:
        rows.append([name] + [f"{percentile(times[mode][name][WARM:], percent):.3f}"
                              for mode in MODES for percent in (50, 99)])
    bench_queue.clear(bench)
    return text + table(["to the first body"] + [f"{MODES[mode]}: p{percent} ms" for mode in MODES
                                                 for percent in (50, 99)], rows)
