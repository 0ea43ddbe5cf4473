"""A queue with a past and a future

The same by one client, one by one, with messages that are delayed by a day and as many finished ones, and tables that
were analyzed so. One contender goes after the other: one that reads all of the others' rows would leave cold caches
to whoever is next. In parentheses: how many a second it was before these were there.
"""

from __future__ import annotations

import statistics

import psycopg

import bench_queue
from bench_frame import MODES, Bench, table


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
                rates = bench_queue.by_many(bench, mode, 1, 1, messages, bench_queue.FILLED)
                for (half, name), rate in rates.items():
                    figures[is_full].setdefault((mode, half, name), []).append(rate)
    bench_queue.clear(bench)

    columns = [(mode, half) for mode in MODES for half in ("enqueue", "finish")]
    return table(
        [f"with {rows:,} delayed and {rows:,} finished, a second", *(f"{MODES[mode]}: {half}" for mode, half in columns)],
        [[name] + [" (".join(f"{statistics.median(figures[is_full][key]):.0f}" for is_full in (True, False)) + ")"
                   if (key := (*column, name)) in figures[True] else "–" for column in columns]
         for name in dict.fromkeys(key[2] for key in figures[True])])
