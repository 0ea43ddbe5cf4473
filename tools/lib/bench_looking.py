"""Looking on

health(), metrics() and the views in a database at work (100 open runs), beside finished runs with their events, steps
and tasks. Meant: with a hundred times as many finished runs at most twice the buffers.
"""

from __future__ import annotations

import statistics
import subprocess
import time

import psycopg

from bench_frame import Bench, table
from looking import LOOKS, at_work, buffers, finished

FEW = 10_000


def milliseconds(conn, sql: str) -> float:
    times = []
    for _ in range(20):
        started = time.perf_counter()
        conn.execute(sql).fetchall()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def run(bench: Bench) -> str:
    many = 20 * FEW if bench.short else 100 * FEW
    with bench.connect() as conn:
        conn.execute("create database looking")
    psql = [f"{bench.cluster.bindir}/psql", "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-d", "looking", "-f", bench.sql]
    subprocess.run(psql, env=bench.env(), check=True, stdout=subprocess.DEVNULL)
    with psycopg.connect(bench.cluster.dsn("looking"), autocommit=True) as conn:
        at_work(conn)
        finished(conn, 1, FEW)
        few = {name: (milliseconds(conn, sql), buffers(conn, sql)) for name, sql in LOOKS.items()}
        for first in range(FEW, many, 10 * FEW):
            finished(conn, first + 1, min(many, first + 10 * FEW))
        beside = {name: (milliseconds(conn, sql), buffers(conn, sql)) for name, sql in LOOKS.items()}
    too_dear = [name for name in LOOKS if beside[name][1] > 2 * few[name][1]]
    verdict = f"missed by {', '.join(too_dear)}" if too_dear else "kept"
    head = ["beside finished runs", f"ms: {FEW:,}", f"{many:,}", f"buffers: {FEW:,}", f"{many:,}"]
    rows = [[name, f"{few[name][0]:.1f}", f"{beside[name][0]:.1f}", str(few[name][1]), str(beside[name][1])]
            for name in LOOKS]
    return table(head, rows) + f"\nAt most twice the buffers: {verdict}.\n"
