"""A queue with a past and a future

The same by one client, one by one, with messages that are delayed by a day and as many finished ones. In parentheses:
how many single-row commits it takes, and how many it took before these were there.
"""

from __future__ import annotations

import statistics

import psycopg

import bench_queue
from bench_frame import FLOOR, MODES, Bench, table


def run(bench: Bench) -> str:
    rounds, messages, rows = (1, 400, 50_000) if bench.short else (3, 600, 200_000)
    figures = {False: {}, True: {}}
    bench_queue.clear(bench)
    for is_full in (False, True):
        if is_full:
            with bench.connect() as conn:
                for peer in bench_queue.queues(bench):
                    for sql in (peer.delayed, peer.finished):
                        with conn.transaction(), psycopg.ClientCursor(conn) as cursor:
                            cursor.execute(sql, {"rows": rows})
            bench.vacuum()
        for _ in bench.rounds(rounds, 60):
            for mode in MODES:
                rates = bench_queue.in_turns(bench, mode, 1, messages, bench_queue.FILLED)
                for (half, name), rate in rates.items():
                    figures[is_full].setdefault((mode, half, name), []).append((rate, rates[half, FLOOR] / rate))
    bench_queue.clear(bench)

    def median(is_full, key, nth):
        return statistics.median(pair[nth] for pair in figures[is_full][key])

    columns = [(mode, half) for mode in MODES for half in ("enqueue", "finish")]
    names = [name for name in dict.fromkeys(key[2] for key in figures[True]) if name != FLOOR]
    head = [f"with {rows:,} delayed and {rows:,} finished, a second"]
    return table(head + [f"{MODES[mode]}: {half}" for mode, half in columns], [[name] + [
        f"{median(True, key, 0):.0f} ({median(True, key, 1):.1f}, {median(False, key, 1):.1f})"
        if key in figures[True] else "–" for key in ((*column, name) for column in columns)] for name in names])
