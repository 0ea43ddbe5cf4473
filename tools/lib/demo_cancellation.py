"""The act of cancellation: what has ended stops working, in whichever process it runs.

Each run fans out to three bodies. One fails as often as it may; another has failed once, and waits for its next try; the
third works on and on. With the last failure the step is skipped, and the run goes on with its next step. At the end a run
with six bodies is cancelled, of which four run and two wait in the queue.

Beside it a database whose workers neither listen nor ask: what has ended works on there, to no end.
"""
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from psycopg.types.json import Jsonb

import demo_stage
from cluster import Cluster, exit_on_signals

# docs/examples/worker_durable.py with a workflow of the demo, whose bodies say in a table how they fare.
WORKER = """
import os, signal
import psycopg, worker_durable
from worker_durable import BODIES, WORKFLOWS

def ask(sql, task, **more):
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as db:
        return db.execute(sql, {"run": task.run_id, "index": task.task_index, "attempt": task.attempt, **more}).fetchone()[0]

def until(sql, task):
    while not ask(sql, task):
        task.cancelled.wait(0.05)

def body(input, task):
    marker = ask("insert into demo_bodies (run_id, task_index, attempt, pid) values (%(run)s, %(index)s, %(attempt)s,"
                 " %(pid)s) returning body_id", task, pid=os.getpid())
    try:
        if input["does"] == "fail":
            until("select count(*) = 3 from demo_bodies where run_id = %(run)s and attempt = 1", task)
            if task.attempt == 2:
                until("select status = 'created' from baton.tasks where run_id = %(run)s and task_index = 1", task)
            raise ValueError("on purpose")
        if input["does"] == "fail later":
            until("select count(*) > 0 from demo_bodies where run_id = %(run)s and attempt = 2", task)
            raise ValueError("on purpose")
        task.cancelled.wait(input["seconds"])
        task.raise_if_cancelled()
    finally:
        ask("update demo_bodies set stopped_at = clock_timestamp(), reason = %(reason)s where body_id = %(marker)s"
            " returning 1", task, marker=marker, reason=task.reason)

def clean_up(input, task):
    return "cleaned up"

def fan(run):
    if run.map("body", run.input, max_attempts=2, on_exhausted="skip_step") is None:
        return run.step("clean_up")

BODIES.update(body=body, clean_up=clean_up)
WORKFLOWS["fan"] = fan
worker = worker_durable.Worker()
signal.signal(signal.SIGTERM, worker.stop)
worker.work()
"""
BODIES = """
create table demo_bodies (
  body_id bigint generated always as identity, run_id text, task_index integer, attempt integer, pid integer,
  begun_at timestamptz default clock_timestamp(), stopped_at timestamptz, reason text
);
update baton.settings set backoff_base = '2 s';
"""
# The bodies, with how long after the end of their step or run they stopped, if that is over, and where it began after it.
LOOK = """
select b.*, extract(epoch from b.stopped_at - e.created_at)::float as late, b.begun_at > e.created_at as begun_late
from demo_bodies as b
left join lateral (
  select v.created_at from baton.events as v
  where v.run_id = b.run_id and v.type in ('step_skipped', 'run_cancelled')
  order by v.seq limit 1
) as e on true
order by b.body_id
"""
PROCESSES, SLOTS = 2, 2


class Side:
    """One database and its workers."""

    def __init__(self, dbname, cluster, folder, environment):
        self.dbname, self.cluster, self.environment = dbname, cluster, environment
        self.log = Path(folder, f"{dbname}.log")
        self.bodies, self.outputs = [], []

    async def open(self, stack, more):
        await asyncio.to_thread(demo_stage.install, self.cluster, self.dbname, BODIES + more)
        self.db = await demo_stage.connect(self.cluster, self.dbname)
        for _ in range(PROCESSES):
            stack.enter_context(demo_stage.process(
                [sys.executable, "-c", WORKER],
                {"DATABASE_URL": self.cluster.dsn(self.dbname), "POLL_SECONDS": "0.1", "SLOTS": str(SLOTS),
                 "PYTHONPATH": str(demo_stage.ROOT / "docs/examples"), **self.environment}, self.log))

    async def rows(self, sql, *arguments):
        return await (await self.db.execute(sql, arguments)).fetchall()

    async def until(self, sql, *arguments):
        for _ in range(600):
            [row] = await self.rows(f"select ({sql}) as it_is", *arguments)
            if row["it_is"]:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self.dbname}: it did not come to that: {sql}\n{self.log.read_text()}")

    async def fan(self, run_id, *bodies):
        await self.db.execute("select baton.start_run('fan', %s, %s)", (Jsonb(bodies), run_id))

    async def settled(self, run_id):
        await self.until("select bool_and(stopped_at is not null) from demo_bodies where run_id = %s", run_id)

    async def look(self):
        self.bodies = await self.rows(LOOK)

    def stopped(self):
        return [body for body in self.bodies if body["reason"]]

    def in_vain(self):
        return [body for body in self.bodies if body["stopped_at"] and not body["reason"] and (body["late"] or 0) > 0]


def line(sides):
    return "cancellation | " + " | ".join(
        f"{side.dbname}: {len(side.bodies)} bodies, {len(side.stopped())} stopped, {len(side.in_vain())} worked on"
        for side in sides)


async def play(stage):
    count, seconds = (2, 5) if stage.short else (4, 6)
    cluster = Cluster()
    exit_on_signals()  # the cluster starts in a thread, which can't
    try:
        await asyncio.to_thread(cluster.start)
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg_baton-demo-"))
            new = Side("pg_baton", cluster, folder, {})
            old = Side("never_asks", cluster, folder, {"LISTEN_URL": "off", "HEARTBEAT_SECONDS": "600"})
            await new.open(stack, "")
            await old.open(stack, "update baton.settings set control_notify = false")
            stage.say(f"Cancellation: {count} runs, whose step has three bodies: one fails for good, one waits for its next try,\n"
                      f"one works for {seconds} s. The step is skipped, and the run goes on. Then a run is cancelled, of which\n"
                      f"{PROCESSES * SLOTS} of 6 bodies run.\n"
                      "never asks: the same with workers that neither listen nor ask; what has ended works on.")
            await run(stage, new, old, count, seconds)
            await figures(stage, new, old, count)
            for side in (new, old):
                await side.db.close()
    finally:
        await asyncio.to_thread(cluster.remove)


async def run(stage, new, old, count, seconds):
    async def all_of(side):
        work = {"does": "work", "seconds": seconds}
        for number in range(count):
            run_id = f"run-{number + 1}"
            await side.fan(run_id, {"does": "fail"}, {"does": "fail later"}, work)
            await side.until("select status = 'completed' from baton.get_run(%s)", run_id)
            await side.settled(run_id)
        await side.fan("cancelled", *[work] * 6)
        await side.until("select count(*) = %s from demo_bodies where run_id = 'cancelled'", PROCESSES * SLOTS)
        await side.db.execute("select baton.cancel_run('cancelled', 'enough')")
        await side.settled("cancelled")

    await demo_stage.side_by_side(stage, (new, old), all_of, line)


async def figures(stage, new, old, count):
    ended = count + PROCESSES * SLOTS  # bodies that run when their step or run ends

    def begun(side):
        waiting = sum(body["run_id"] != "cancelled" and body["task_index"] == 1 for body in side.bodies)
        return f"{waiting}, {sum(body['run_id'] == 'cancelled' for body in side.bodies)}"

    for side, name in ((new, "pg_baton"), (old, "never asks")):
        [row] = await side.rows(
            "select (select count(*) from baton.runs as r where r.status = 'completed') as went_on,"
            " (select count(*) from baton.incidents as i where i.kind = 'too_late') as too_late")
        stage.check(f"{name}, cancellation: runs that went on when their step was skipped", count, row["went_on"])
        stage.check(f"{name}, cancellation: bodies begun that waited for a next try, and of the 6 of the cancelled run",
                    f"{count}, {PROCESSES * SLOTS}", begun(side))
        stage.check(f"{name}, cancellation: bodies that worked on after the end, and came too late",
                    "0, 0" if side is new else f"{ended}, {ended}", f"{len(side.in_vain())}, {row['too_late']}")
    late = [body["late"] for body in new.stopped()]
    stage.check("pg_baton, cancellation: bodies stopped within a second of the end", ended, sum(0 < late < 1 for late in late))
    stage.check("pg_baton, cancellation: the slowest of them", "under 1 s", f"{max(late, default=0) * 1000:.0f} ms",
                ok=0 < max(late, default=0) < 1)
