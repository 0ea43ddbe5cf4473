"""A held snapshot

Messages go in and out at a fixed rate, while somebody else's transaction holds a snapshot, so that vacuum can remove no
dead row, and without that. Autovacuum looks every 5 s, `baton.tick` runs as often. The times are those of "finish
one, claim the next" of baton, of claim + complete of graphile-worker, from its start, not from when it should have
started; "behind" is how late the last ones began.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import tempfile
from pathlib import Path

import psycopg

import bench_queue
from bench_frame import VARIABLES, Bench, percentile, table, target

RATE = 800
CLIENTS = 4


@contextlib.contextmanager
def held_snapshot(bench: Bench):
    with psycopg.connect(bench.cluster.dsn()) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("select count(*) from baton.messages")
        yield


def load(bench: Bench, enqueue: str, finish: str, seconds: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each "finish", in the order of time, and how late each began."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for name, script in {"in": enqueue, "out": finish}.items():
            Path(folder, f"{name}.sql").write_text(script)
            command = [f"{bench.cluster.bindir}/pgbench", "-n", "-M", "prepared", *VARIABLES, "-c", str(CLIENTS),
                       "-R", str(RATE), "-T", str(seconds), "-l", f"--log-prefix={folder}/{name}",
                       "-f", f"{folder}/{name}.sql"]
            processes.append(subprocess.Popen(command, env=bench.env(), stdout=subprocess.PIPE,
                                              stderr=subprocess.STDOUT, text=True))
        for process in processes:
            output, _ = process.communicate()
            assert process.returncode == 0, output
        rows = sorted((list(map(int, line.split())) for log in Path(folder).glob("out.*") if log.suffix != ".sql"
                       for line in log.read_text().splitlines()), key=lambda row: (row[4], row[5]))
    return [(row[2] - row[6]) / 1000 for row in rows], [row[6] / 1000 for row in rows]


def run(bench: Bench) -> str:
    seconds = bench.seconds
    contenders = {bench_queue.IN_ONE: (bench_queue.BATON, bench_queue.BATON.finish_and_next[1])}
    if "graphile-worker" in bench.peers:
        graphile = bench.peers["graphile-worker"]
        contenders["graphile-worker: claim + complete"] = (graphile, graphile.finish[1])
    rows, tails, counts = [], {}, {}
    with bench.connect() as conn:
        conn.execute("alter system set autovacuum_naptime = '5s'")
        conn.execute("select pg_reload_conf()")
    for name, (peer, finish) in contenders.items():
        for is_held in (False, True):
            bench_queue.clear(bench)
            bench.repeat("off", peer.enqueue[100], 4 * RATE // 100)  # so that it never runs dry
            with bench.ticking(), held_snapshot(bench) if is_held else contextlib.nullcontext():
                times, late = load(bench, peer.enqueue[1], finish, seconds)
            half = times[len(times) // 2:]
            tails[name, is_held], counts[name, is_held] = percentile(half, 99), len(times)
            rows.append([name, "held" if is_held else "not held", f"{len(times) / seconds:.0f}",
                         f"{percentile(times, 50):.3f}", f"{percentile(half, 50):.3f}", f"{percentile(half, 99):.3f}",
                         f"{statistics.mean(late[-50:]):.0f}"])
    with bench.connect() as conn:
        conn.execute("alter system reset autovacuum_naptime")
        conn.execute("select pg_reload_conf()")
    bench_queue.clear(bench)
    ours = bench_queue.IN_ONE
    return table([f"{RATE} a second in and out for {seconds} s", "snapshot", "finished a second", "p50 ms",
                  "p50 of the second half", "p99 of the second half", "behind ms"], rows) + "\n" + target(
        f"{ours}, p99 under the held snapshot against without", tails[ours, True] / tails[ours, False], 2) + target(
        f"{ours}, number without against under the held snapshot", counts[ours, False] / counts[ours, True], 1.01)
