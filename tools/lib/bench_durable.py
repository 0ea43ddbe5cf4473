"""A durable step

Its body is nothing: the output of one step is recorded, the run replayed, and the next step started, in one
transaction (docs/guides/ownership.md). "The short way" is what a worker does that keeps its workflow in memory, as
DBOS does, where nothing else has happened to the run: one call of advance_run. A run goes on for as many steps as the
round has.
"""

from __future__ import annotations

import re
import statistics

import bench_queue
from bench_frame import FLOOR, FLOOR_SQL, MODES, WARM, Bench, percentile, table, target

STEP = "baton: a step"
FEW = "baton: a step, in fewer statements"
SHORT = "baton: a step, the short way"
BARE = "the same rows changed by one bare statement"
JOB = "graphile-worker: claim + complete"

# A run goes on from one transaction of a connection to the next.
START = r"""\if :started = 0
select run_id from baton.start_run('bench', '{"n": 1}', queue_name => 'steps') \gset
select message_id, delivery from baton.claim('steps', visibility => '1 hour') \gset
select replay_epoch, last_seq as seen_seq from baton.begin_replay(:message_id, :delivery) \gset
begin;
select outcome from baton.create_step(:run_id, :replay_epoch, 'step-0', '[{"n": 1}]') \gset
select attempt from baton.dispatch_tasks(:run_id, :replay_epoch) where outcome = 'execute' \gset
select outcome from baton.end_replay(:run_id, :replay_epoch, :seen_seq) \gset
end;
\set n 0
\set started 1
\else
"""
STEP_SCRIPT = START + r"""\set read_seq :seen_seq
begin;
select outcome from baton.complete_task(
  :run_id, 'step-' || :n, 0, :attempt, '{"n": 1}', :message_id, :delivery) \gset
select replay_epoch, last_seq as seen_seq from baton.begin_replay(:message_id, :delivery) \gset
select seq, type, correlation_id, payload, created_at from baton.read_events(:run_id, :read_seq);
\set n :n + 1
select outcome from baton.create_step(:run_id, :replay_epoch, 'step-' || :n, '[{"n": 1}]') \gset
select attempt from baton.dispatch_tasks(:run_id, :replay_epoch) where outcome = 'execute' \gset
select outcome from baton.end_replay(:run_id, :replay_epoch, :seen_seq) \gset
end;
\endif
"""
# The same verbs, as few statements as the decision in the middle allows.
FEW_SCRIPT = START + r"""\set read_seq :seen_seq
begin;
select b.replay_epoch, b.last_seq as seen_seq
from baton.complete_task(:run_id, 'step-' || :n, 0, :attempt, '{"n": 1}', :message_id, :delivery) as c
left join lateral baton.begin_replay(:message_id, :delivery) as b on true \gset
select seq, type, correlation_id, payload, created_at from baton.read_events(:run_id, :read_seq);
\set n :n + 1
select d.attempt
from baton.create_step(:run_id, :replay_epoch, 'step-' || :n, '[{"n": 1}]') as s
left join lateral (
  select t.attempt from baton.dispatch_tasks(:run_id, :replay_epoch) as t where t.outcome = 'execute'
) as d on true
left join lateral baton.end_replay(:run_id, :replay_epoch, :seen_seq) as e on true \gset
end;
\endif
"""
SHORT_SCRIPT = START + r"""\set last_n :n
\set n :n + 1
select baton.advance_run(
  :run_id, :replay_epoch, 'step-' || :last_n, '{"n": 1}', 'step-' || :n, '{"n": 1}') as outcome \gset
\endif
"""
# The rows that advance_run changes, without a function, a decision table, or anything else that it promises.
BARE_SCRIPT = START.replace(r"\set n 0", r"""select last_seq as seen_seq from baton.runs where run_id = :run_id \gset
\set n 0""") + r"""\set last_n :n
\set n :n + 1
with task as (
  update baton.tasks as t set status = 'completed'
  where t.run_id = :run_id and t.step_slug = 'step-' || :last_n and t.task_index = 0
), step as (
  update baton.steps as s set status = 'completed', open_tasks = 0
  where s.run_id = :run_id and s.step_slug = 'step-' || :last_n
), next_step as (
  insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
  values (:run_id, 'step-' || :n, 1, 1, :seen_seq + 1)
), next_task as (
  insert into baton.tasks (
    run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery, last_started_at, input
  )
  values (:run_id, 'step-' || :n, 0, 'started', 1, :message_id, :delivery, now(), '{"n": 1}')
), logged as (
  insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)
  values (:run_id, :seen_seq + 1, 'run_advanced', 'step-' || :n, jsonb_build_object(
    'step_slug', 'step-' || :last_n, 'output', cast('{"n": 1}' as jsonb), 'next_step_slug', 'step-' || :n,
    'on_exhausted', 'fail_step', 'max_attempts', 3,
    'message_id', cast(:message_id as bigint), 'delivery', cast(:delivery as bigint)), now())
)
update baton.runs as r
set last_seq = :seen_seq + 1
where r.run_id = :run_id
returning r.last_seq as seen_seq \gset
\endif
"""


def apart(script: str, prefix: str) -> str:
    """With variables, a queue and a run of its own."""
    for name in ("started", "run_id", "message_id", "delivery", "replay_epoch", "seen_seq", "read_seq", "attempt", "last_n",
                 "n"):
        script = re.sub(rf":{name}\b", f":{prefix}{name}", script).replace(rf"\set {name} ", rf"\set {prefix}{name} ")
    return re.sub(r"\\([ag])set", rf"\\\1set {prefix}", script).replace("'steps'", f"'{prefix}steps'")


def count_steps(bench: Bench) -> list[int]:
    """The completed steps of the last four runs, which are those of the four scripts."""
    with bench.connect() as conn:
        return sorted(count for count, in conn.execute("""
            select (select count(*) from baton.steps as s where s.run_id = r.run_id and s.status = 'completed')
            from baton.runs as r order by r.created_at desc limit 4
        """))


def run(bench: Bench) -> str:
    graphile = bench.peers.get("graphile-worker")
    peers = [peer for peer in bench.peers.values() if peer.step]
    scripts = {FLOOR: FLOOR_SQL + ";\n", STEP: STEP_SCRIPT,
               FEW: apart(FEW_SCRIPT, "few_"), SHORT: apart(SHORT_SCRIPT, "short_"), BARE: apart(BARE_SCRIPT, "bare_")}
    scripts |= {f"{peer.name}: a step": peer.step for peer in peers}
    if graphile:
        scripts[JOB] = graphile.finish[1]
    steps, rounds = (300, 2) if bench.short else (1000, 3)
    figures = {mode: [] for mode in MODES}
    for _ in bench.rounds(rounds):
        for mode in MODES:
            if graphile:
                bench.repeat("off", graphile.enqueue[1], 2 * steps)
            bench.vacuum()
            times = bench.times(mode, scripts, len(scripts) * steps)
            for name in times.keys() - {FLOOR, JOB}:
                times[name].pop(0)  # which started the run
            assert count_steps(bench) == sorted(len(times[name]) for name in (STEP, FEW, SHORT, BARE))
            bench_queue.clear(bench)
            figures[mode].append({name: [statistics.mean(warm := v[WARM:]), percentile(warm, 50), percentile(warm, 99)]
                                  for name, v in times.items()})

    def median(mode, name, nth, unit=None):
        return statistics.median(f[name][nth] / (f[unit][nth] if unit else 1) for f in figures[mode])

    text = ""
    for mode, title in MODES.items():
        text += table([title, "a second", "p50 ms", "p99 ms", "commits"], [
            [name, f"{1000 / median(mode, name, 0):.0f}", f"{median(mode, name, 1):.3f}",
             f"{median(mode, name, 2):.3f}", f"{median(mode, name, 0, FLOOR):.2f}"] for name in scripts]) + "\n"
    for mode, limit in {"on": 0.7, "off": 1}.items():
        if graphile:
            for name in (SHORT, BARE):
                text += target(f"{name} against {JOB} ({MODES[mode]})", median(mode, name, 0, JOB), limit)
        if peers:
            best = min((f"{peer.name}: a step" for peer in peers), key=lambda name: median(mode, name, 0))
            for name in (SHORT, BARE):
                text += target(f"{name} against {best} ({MODES[mode]})", median(mode, name, 0, best), 0.5)
    return text
