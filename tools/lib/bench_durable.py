"""A durable step

Its body is nothing: the output of one step is recorded, the run replayed, and the next step started, in one
transaction (docs/guides/ownership.md). A run goes on for as many steps as the round has.
"""

from __future__ import annotations

import statistics

from bench_frame import FLOOR, FLOOR_SQL, MODES, Bench, percentile, table, target

STEP = "baton: a step"
JOB = "graphile-worker: claim + complete"

# A run goes on from one transaction of a connection to the next.
STEP_SCRIPT = r"""\if :started = 0
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
begin;
select outcome from baton.complete_task(
  :run_id, 'step-' || :n, 0, :attempt, '{"n": 1}', :message_id, :delivery) \gset
\set read_seq :seen_seq
select replay_epoch, last_seq as seen_seq from baton.begin_replay(:message_id, :delivery) \gset
select seq, type, correlation_id, payload, created_at from baton.read_events(:run_id, :read_seq);
\set n :n + 1
select outcome from baton.create_step(:run_id, :replay_epoch, 'step-' || :n, '[{"n": 1}]') \gset
select attempt from baton.dispatch_tasks(:run_id, :replay_epoch) where outcome = 'execute' \gset
select outcome from baton.end_replay(:run_id, :replay_epoch, :seen_seq) \gset
end;
\endif
"""


def count_steps(conn) -> int:
    """The steps of the last run, each completed but the one whose body runs."""
    return conn.execute(
        "select count(*) from baton.steps as s where s.status = 'completed' and s.run_id = "
        "(select r.run_id from baton.runs as r order by r.created_at desc limit 1)"
    ).fetchone()[0]


def run(bench: Bench) -> str:
    graphile = bench.peers.get("graphile-worker")
    peers = [peer for peer in bench.peers.values() if peer.step]
    scripts = {FLOOR: FLOOR_SQL + ";\n", STEP: STEP_SCRIPT} | {f"{peer.name}: a step": peer.step for peer in peers}
    if graphile:
        scripts[JOB] = graphile.finish[1]
    steps, rounds = (300, 2) if bench.short else (1000, 3)
    figures = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            if graphile:
                bench.rate("off", graphile.enqueue[1], 2 * steps)
            bench.vacuum()
            times = bench.times(mode, scripts, len(scripts) * steps)
            for name in times.keys() - {FLOOR, JOB}:
                times[name].pop(0)  # which started the run
            with bench.connect() as conn:
                assert count_steps(conn) == len(times[STEP])
                if graphile:
                    conn.execute(graphile.clear)
            figures[mode].append({name: [statistics.mean(v), percentile(v, 50), percentile(v, 99)]
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
            text += target(f"{STEP} against {JOB} ({MODES[mode]})", median(mode, STEP, 1, JOB), limit)
        if peers:
            best = min((f"{peer.name}: a step" for peer in peers), key=lambda name: median(mode, name, 0))
            text += target(f"{STEP} against {best} ({MODES[mode]})", median(mode, STEP, 1, best), 0.5)
    return text
