"""The act of task ownership: a signal arrives in the middle of a body that runs inline, and the body runs once.

Beside it a database without the two rules that see to it (never_awaits.sql): there every body runs twice.
"""
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

import demo_stage
from cluster import Cluster, exit_on_signals

# docs/examples/worker_durable.py with a workflow of the demo, whose body writes a marker, takes a while, and ends.
WORKER = """
import os, signal, time
import psycopg, worker_durable
from worker_durable import BODIES, WORKFLOWS

def charge(seconds, task):
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as db:
        marker, = db.execute("insert into demo_markers (run_id, attempt, pid, beside) values (%s, %s, %s, exists (select"
                             " from demo_markers as m where m.run_id = %s and not m.ended)) returning marker_id",
                             (task.run_id, task.attempt, os.getpid(), task.run_id)).fetchone()
        time.sleep(seconds)
        while not db.execute("select exists (select from demo_ends where run_id = %s)", (task.run_id,)).fetchone()[0]:
            time.sleep(0.05)
        db.execute("update demo_markers set ended = true where marker_id = %s", (marker,))
    return "charged"

def buy(run):
    return run.step("charge", run.input)

BODIES["charge"], WORKFLOWS["buy"] = charge, buy
worker = worker_durable.Worker()
signal.signal(signal.SIGTERM, worker.stop)
worker.work()
"""
MARKERS = """
create table demo_markers (
  marker_id bigint generated always as identity, run_id text, attempt integer, pid integer, beside boolean,
  ended boolean default false
);
create table demo_ends (run_id text)
"""
VISIBILITY = 2


class Side:
    """One database and its two workers."""

    def __init__(self, dbname, cluster, folder):
        self.dbname, self.cluster, self.folder = dbname, cluster, folder
        self.workers, self.runs, self.killed = {}, [], None

    async def open(self, stack, more):
        await asyncio.to_thread(demo_stage.install, self.cluster, self.dbname, more)
        self.db = await demo_stage.connect(self.cluster, self.dbname)
        await self.db.execute(MARKERS)
        for _ in range(2):
            self.add(stack)

    def add(self, stack):
        child = stack.enter_context(demo_stage.process(
            [sys.executable, "-c", WORKER],
            {"DATABASE_URL": self.cluster.dsn(self.dbname), "POLL_SECONDS": "0.1", "VISIBILITY_SECONDS": str(VISIBILITY),
             "PYTHONPATH": str(demo_stage.ROOT / "docs/examples")}, Path(self.folder, f"{self.dbname}.log")))
        self.workers[child.pid] = child

    async def rows(self, sql, *arguments):
        return await (await self.db.execute(sql, arguments)).fetchall()

    async def until(self, condition, sql, *arguments):
        for _ in range(600):
            if condition(rows := await self.rows(sql, *arguments)):
                return rows
            await asyncio.sleep(0.05)
        raise RuntimeError(f"{self.dbname}: it did not come to that: {sql}\n" + Path(self.folder, f"{self.dbname}.log").read_text())

    async def buy(self, run_id, seconds):
        """One run: as soon as its body has begun a signal is sent; it ends when somebody has replayed the run."""
        run = {"run_id": run_id, "markers": [], "backstops": 0, "state": {"results": 0}}
        self.runs.append(run)
        await self.db.execute("select baton.start_run('buy', %s::jsonb, %s)", (str(seconds), run_id))
        [marker, *_] = await self.until(bool, "select * from demo_markers where run_id = %s", run_id)
        if run_id == self.killed:
            self.workers[marker["pid"]].kill()
        else:
            await self.db.execute("select baton.signal_run(%s, 'knock')", (run_id,))
            [state] = await self.until(lambda rows: any(rows[0].values()), """
                select
                  (select count(*) from baton.messages where run_id = %s and dedupe_key like '%%backstop%%') as backstops,
                  (select count(*) from demo_markers where run_id = %s and beside) as beside
                """, run_id, run_id)
            run["backstops"] = state["backstops"]
        await self.db.execute("insert into demo_ends values (%s)", (run_id,))
        await self.until(lambda rows: rows[0]["status"] == "completed", "select status from baton.get_run(%s)", run_id)
        # Whoever runs the body a second time comes to its end too.
        await self.until(lambda rows: not any(row["pid"] in self.workers and self.workers[row["pid"]].poll() is None
                                              for row in rows),
                         "select pid from demo_markers where run_id = %s and not ended", run_id)

    async def look(self):
        for run in self.runs:
            run["markers"] = await self.rows("select * from demo_markers where run_id = %s order by marker_id", run["run_id"])
            [state] = await self.rows(
                "select r.status, (select count(*) from baton.events as e where e.run_id = r.run_id and e.type ="
                " 'task_completed') as results from baton.runs as r where r.run_id = %s", run["run_id"])
            run["state"] = state


def line(sides):
    return "tasks | " + " | ".join(
        f"{side.dbname}: {len(side.runs)} runs, {sum(len(run['markers']) for run in side.runs)} bodies, "
        f"{sum(run['state']['results'] for run in side.runs)} results" for side in sides)


async def play(stage):
    count, seconds = (4, 0.7) if stage.short else (8, 1.5)
    cluster = Cluster()
    exit_on_signals()  # the cluster starts in a thread, which can't
    try:
        await asyncio.to_thread(cluster.start)
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg_baton-demo-"))
            new, old = Side("pg_baton", cluster, folder), Side("never_awaits", cluster, folder)
            await new.open(stack, "")
            await old.open(stack, Path(__file__).with_name("never_awaits.sql").read_text())
            stage.say(f"Task ownership: {count} runs, a step each, whose body runs inline for {seconds} s and writes a marker.\n"
                      "In its middle a signal arrives, and the other one of two processes replays the run. At the end the\n"
                      "process is killed in the middle of a body.\n"
                      "never awaits: the same with a start_task that never awaits, and inline ownership off; nobody is killed.")
            await run(stage, new, old, count, seconds)
            for side in (new, old):
                for child in side.workers.values():
                    child.terminate()
            figures(stage, new, old, count)
            incidents = await new.rows("select kind, count(*) as n from baton.incidents group by kind order by kind")
            stage.check("pg_baton, tasks: incidents", "owned_recovery 1",
                        ", ".join(f"{row['kind']} {row['n']}" for row in incidents))
            for side in (new, old):
                await side.db.close()
    finally:
        await asyncio.to_thread(cluster.remove)


async def run(stage, new, old, count, seconds):
    async def all_of(side):
        for number in range(count):
            await side.buy(f"order-{number + 1}", seconds)
        if side is new:
            side.killed = f"order-{count + 1}"
            await side.buy(side.killed, seconds)

    await demo_stage.side_by_side(stage, (new, old), all_of, line)


def figures(stage, new, old, count):
    def each(side, of):
        return ", ".join(sorted({str(of(run)) for run in side.runs[:count]}))

    stage.check("pg_baton, tasks: bodies run, each run", "1", each(new, lambda run: len(run["markers"])))
    stage.check("pg_baton, tasks: replays in the middle, each leaving a backstop", "1", each(new, lambda run: run["backstops"]))
    stage.check("pg_baton, tasks: results, each run", "1", each(new, lambda run: run["state"]["results"]))
    killed = new.runs[count]
    stage.check("pg_baton, tasks: killed in the body, its attempts", "1, 2", ", ".join(str(m["attempt"]) for m in killed["markers"]))
    stage.check("pg_baton, tasks: killed in the body, results", 1, killed["state"]["results"])
    stage.check("never awaits, tasks: bodies run, each run", "2", each(old, lambda run: len(run["markers"])))
    beside = sum(any(m["beside"] for m in run["markers"]) for run in old.runs)
    stage.check("never awaits, tasks: runs whose body ran beside itself", count, beside)
    stage.check("pg_baton, tasks: runs whose body ran beside itself", 0,
                sum(any(m["beside"] for m in run["markers"]) for run in new.runs[:count]))
