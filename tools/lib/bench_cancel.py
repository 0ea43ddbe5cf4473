"""Cancellation

How long it takes until a worker learns that a body of its own has ended elsewhere, and what the asking costs. Each
worker has 100 bodies in its registry, whose tasks were started through the verbs, and asks `terminal_tasks` about all of
them at an interval, as docs/examples/cancellation.py does; with the hint it also listens to `baton_control`, asks at
once about the bodies that an event may mean, and sends itself a probe at each interval. In each row 100 tasks are ended
at random times by `cancel_run`, `skip_step` and `release_task` in turn, over a connection of their own. The latency runs
from the moment when that call is sent to the moment when the worker would abort the body. The workers are coroutines of
one process, each with its own connections: what that process needs is part of the latency. Queries at rest are those of
all workers at their intervals, without the heartbeats, which they send anyway; the hint adds one for each end.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import psycopg
from psycopg.types.json import Jsonb

import pgbouncer
from bench_frame import Bench, percentile, table

BODIES = 100  # of a worker
ENDS = 100  # in a row of the tables
POOL_SIZE = 10
USER = "bench_worker"
CLOSING = """
So the reference workers listen, and ask at the interval of their heartbeat, 5 s: a cancellation is heard of in tens of
milliseconds with fewer queries than asking every 2 s takes, and what the hint fails to say is found after 5 s at most.
It costs one more connection a worker, which has to be direct; where that is too many, asking every second or two answers
in half of it, whatever the number of workers. A hint through a pooler is worth nothing.
"""
VERBS = [
    "select outcome from baton.cancel_run(%(run_id)s, 'bench')",
    "select outcome from baton.skip_step(%(run_id)s, %(step_slug)s)",
    "select outcome from baton.release_task(%(run_id)s, %(step_slug)s, %(task_index)s)",
]


@dataclass
class Way:
    name: str
    interval: float
    window: float  # in which the tasks end: one interval or several
    listens: bool = False


HINT = Way("hint, and every 5 s", 5, 10, listens=True)
WAYS = [HINT, Way("every 1 s", 1, 3), Way("every 2 s", 2, 4), Way("every 5 s", 5, 5)]


class Tasks:
    """Started tasks, a run for each call."""

    def __init__(self, conn: psycopg.Connection):
        self.conn = conn
        self.runs = 0
        conn.execute("set synchronous_commit = off")

    def start(self, count: int) -> list[dict]:
        self.runs += 1
        run_id = f"run-{self.runs}"
        self._one("start_run('bench', null, %s, 'bench')", run_id)
        message = self._one("claim('bench', visibility => '1 day', for_run => %s)", run_id)
        replay = self._one("begin_replay(%s, %s)", message.message_id, message.delivery)
        self._one("create_step(%s, %s, 'body', %s)", run_id, replay.replay_epoch, Jsonb([None] * count))
        rows = self.conn.execute("select * from baton.dispatch_tasks(%s, %s, %s)", (run_id, replay.replay_epoch, count))
        keys = [{"run_id": run_id, "step_slug": row.step_slug, "task_index": row.task_index, "attempt": row.attempt}
                for row in rows if row.outcome == "execute"]
        assert len(keys) == count
        assert self._one("end_replay(%s, %s, %s)", run_id, replay.replay_epoch, replay.last_seq).outcome == "ended"
        return keys

    def _one(self, call, *arguments):
        return self.conn.execute(f"select * from baton.{call}", arguments).fetchone()


class Worker:
    """A registry of bodies, a connection that asks and, where there is a dsn for it, one that listens."""

    def __init__(self, number: int, way: Way, dsn: str, listen_dsn: str | None, keys: list[dict], aborted):
        self.number, self.way, self.dsn, self.listen_dsn, self.aborted = number, way, dsn, listen_dsn, aborted
        self.active, self.spare = {}, keys[BODIES:]
        for key in keys[:BODIES]:
            self._register(key)
        self.queries, self.times, self.probe = 0, [], None

    def _register(self, key):
        self.active.setdefault(key["run_id"], []).append(key)

    async def open(self):
        options = {"autocommit": True, "prepare_threshold": None}
        self.conn = await psycopg.AsyncConnection.connect(self.dsn, **options)
        if self.listen_dsn:
            self.listener = await psycopg.AsyncConnection.connect(self.listen_dsn, **options)
            await self.listener.execute("listen baton_control")
            self.probe = json.dumps({"event": "probe", "worker_id": self.number})
        self.tasks = [asyncio.create_task(self._reconcile())]
        if self.listen_dsn:
            self.tasks.append(asyncio.create_task(self._listen()))

    async def close(self):
        for task in self.tasks:
            task.cancel()
        for result in await asyncio.gather(*self.tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise result
        await self.conn.close()
        if self.listen_dsn:
            await self.listener.close()

    async def _reconcile(self):
        due = time.monotonic() + random.random() * self.way.interval
        while True:
            await asyncio.sleep(max(0, due - time.monotonic()))
            due += self.way.interval
            if self.probe:
                self.queries += 1
                await self.conn.execute("select pg_notify('baton_control', %s)", [self.probe])
            self.queries += 1
            started = time.monotonic()
            await self._ask([key for keys in self.active.values() for key in keys])
            self.times.append((time.monotonic() - started) * 1000)

    async def _listen(self):
        async for notify in self.listener.notifies():
            event = json.loads(notify.payload)
            keys = [key for key in self.active.get(event.get("run_id"), ()) if all(
                event.get(name) in (None, key[name]) for name in ("step_slug", "task_index"))]
            if keys:
                await self._ask(keys)

    async def _ask(self, keys):
        rows = await self.conn.execute("select outcome from baton.terminal_tasks(%s)", [Jsonb(keys)])
        for key, (outcome,) in zip(keys, await rows.fetchall(), strict=True):
            if outcome != "running" and key in self.active.get(key["run_id"], ()):
                self.active[key["run_id"]].remove(key)
                self.aborted(key)
                if self.spare:
                    self._register(self.spare.pop())


async def measure(bench: Bench, tasks: Tasks, fillers, way: Way, count: int, dsn: str, listen_dsn: str | None):
    """One row of a table."""
    targets = [tasks.start(1)[0] for _ in range(ENDS)]
    sent, latencies, over = {}, [], asyncio.Event()

    def aborted(key):
        latencies.append((time.monotonic() - sent.pop(key["run_id"])) * 1000)
        if len(latencies) == ENDS:
            over.set()

    workers = [Worker(nth, way, dsn, listen_dsn, targets[nth::count] + fillers[nth], aborted) for nth in range(count)]
    try:
        await asyncio.gather(*(worker.open() for worker in workers))
        ender = await psycopg.AsyncConnection.connect(bench.cluster.dsn(), autocommit=True)
        started, before = time.monotonic(), sum(worker.queries for worker in workers)
        random.shuffle(targets)
        for nth, moment in enumerate(sorted(random.uniform(0, way.window) for _ in range(ENDS))):
            await asyncio.sleep(max(0, started + moment - time.monotonic()))
            sent[targets[nth]["run_id"]] = time.monotonic()
            await ender.execute(VERBS[nth % len(VERBS)], targets[nth])
        await asyncio.sleep(max(0, started + way.window - time.monotonic()))
        queries = sum(worker.queries for worker in workers) - before
        backends = await (await ender.execute(
            "select count(*) from pg_stat_activity where usename = %s", [USER])).fetchone()
        await ender.close()
        await asyncio.wait_for(over.wait(), way.interval + 30)
    finally:
        await asyncio.gather(*(worker.close() for worker in workers))
    clients = count * (2 if listen_dsn else 1)
    asked = [ms for worker in workers for ms in worker.times]
    return [str(count), str(clients), str(backends[0]), f"{queries / way.window:.1f}", f"{percentile(asked, 50):.1f}",
            f"{percentile(latencies, 50):.0f}", f"{percentile(latencies, 99):.0f}"]


HEAD = ["", "workers", "connections", "backends", "queries/s at rest", "ms a query", "latency p50, ms", "p99, ms"]


def run(bench: Bench) -> str:
    counts = [10] if bench.short else [1, 10, 50]
    with bench.connect() as conn:
        conn.row_factory = psycopg.rows.namedtuple_row
        conn.execute(f"create role {USER} login")
        conn.execute("select baton.grant_usage(%s, 'worker')", [USER])
        tasks = Tasks(conn)
        fillers = [tasks.start(BODIES) for _ in range(max(counts))]
        bench.vacuum()
        direct = bench.cluster.dsn(user=USER)

        def row(name, way, count, dsn, listen_dsn):
            return [name, *asyncio.run(measure(bench, tasks, fillers, way, count, dsn, listen_dsn))]

        text = "Directly:\n\n" + table(HEAD, [
            row(way.name, way, count, direct, direct if way.listens else None) for count in counts for way in WAYS])
        if not pgbouncer.program():
            return text + "\nWithout PgBouncer, which is not installed.\n" + CLOSING
        rows = []
        for count in counts:
            for way in WAYS:
                for name, listener in [(way.name, None)] if not way.listens else [
                        ("hint over a direct connection, and every 5 s", direct), ("hint through it, and every 5 s", "")]:
                    with pgbouncer.PgBouncer(bench.cluster, pool_size=POOL_SIZE, users=(USER,)) as pooler:
                        dsn = pooler.dsn(user=USER)
                        rows.append(row(name, way, count, dsn, dsn if listener == "" else listener))
        return text + (f"\nThrough {pgbouncer.version()} in transaction mode, with up to {POOL_SIZE} server connections. "
                       f"LISTEN through it hears nothing:\n\n") + table(HEAD, rows) + CLOSING
