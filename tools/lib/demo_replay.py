"""Act two: scale-out in the middle of long runs.

Two workers (demo_replay_worker.py) share a queue of runs that take many turns; the doorbell of a run that is being
replayed rings again and again. Then a third worker joins, recovers what it may and has every active run rung for, as a
recovery at start does; one is stopped in the middle of a replay, for longer than its claim lasts, and goes on late; one
is killed in the middle of a replay, and replaced. At the end the logs are read back and checked.

The same happens at the same time in a second database, where begin_replay always grants and no write is refused
(no_baton.sql).
"""
import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psycopg

import demo_stage
from cluster import Cluster, exit_on_signals

RUNS = [f"run-{number}" for number in range(1, 7)]


class Pace:
    def __init__(self, short):
        self.turns = 18 if short else 33  # a run
        self.visibility = 4
        self.lead = 1 if short else 4  # seconds between the scenes
        self.deadline = 60


class Worker:
    def __init__(self, name, child, log):
        self.name, self.child, self.log = name, child, log

    def text(self):
        return self.log.read_text()

    def send(self, number):
        self.child.send_signal(number)


class Side:
    """One database and its workers."""

    def __init__(self, dbname, title, cluster, folder, pace, stack):
        self.dbname, self.title, self.cluster, self.folder, self.pace = dbname, title, cluster, Path(folder), pace
        self.stack, self.workers, self.gone = stack, [], []
        self.status, self.turns = Counter(), 0

    async def connect(self):
        self.db, self.ticker = [await demo_stage.connect(self.cluster, self.dbname) for _ in range(2)]
        await self.db.execute("update baton.settings set max_failures = 3, backoff_base = '100 ms'")

    async def rows(self, sql, *arguments):
        return await (await self.db.execute(sql, arguments)).fetchall()

    async def start_worker(self):
        number = len(self.workers) + 1
        log = self.folder / f"{self.dbname}-{number}"
        dsn = psycopg.conninfo.make_conninfo(self.cluster.dsn(self.dbname), application_name=f"worker {number}")
        child = self.stack.enter_context(demo_stage.process(
            [sys.executable, Path(__file__).with_name("demo_replay_worker.py")],
            {"DATABASE_URL": dsn, "POLL_SECONDS": "0.1", "VISIBILITY_SECONDS": str(self.pace.visibility)}, log))
        worker = Worker(f"worker {number}", child, log)
        self.stack.callback(worker.send, signal.SIGCONT)
        self.workers.append(worker)
        await until(lambda: "ready" in worker.text() or child.poll() is not None, "a worker is ready", 30)
        return worker

    # What goes on all the time

    async def tick(self):
        while True:
            await self.ticker.execute("select baton.tick()")
            await asyncio.sleep(1)

    async def ring(self):
        for run_id in itertools.cycle(RUNS):
            await self.rows("select * from baton.signal_run(%s, 'nudge')", run_id)
            await asyncio.sleep(0.15)

    async def look(self):
        while True:
            self.status = Counter({row["status"]: row["n"] for row in await self.rows(
                "select r.status, count(*) as n from baton.runs as r group by 1")})
            [row] = await self.rows("select count(*) as n from baton.events as e where e.type = 'demo.turn'")
            self.turns = row["n"]
            await asyncio.sleep(0.5)

    # The scenes

    async def holders(self):
        """Who replays what: the worker's name, the run, the epoch, until when the claim lasts."""
        return await self.rows(
            "select a.application_name as name, r.run_id, r.replay_epoch, a.state = 'idle' as is_idle,"
            " extract(epoch from m.visible_at - clock_timestamp())::float as remaining"
            " from baton.runs as r"
            " join pg_stat_activity as a on a.pid = r.replay_backend"
            " join baton.messages as m on m.message_id = r.replay_message_id and m.delivery = r.replay_delivery"
            " where r.ended_at is null and not r.replay_ended")

    async def catch(self, avoid=()):
        """A worker that is stopped in the middle of a replay, with no transaction open, and what it holds."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found = [(worker, held) for held in await self.holders() for worker in self.workers
                     if worker.name == held["name"] and worker not in (*avoid, *self.gone)]
            if found:
                worker, held = random.choice(found)
                worker.send(signal.SIGSTOP)
                for again in await self.holders():
                    if again["is_idle"] and again["replay_epoch"] == held["replay_epoch"]:
                        return worker, again
                worker.send(signal.SIGCONT)
            await asyncio.sleep(0.05)
        return None, None

    async def wait_taken(self, held, timeout):
        """Until another replay of that run is granted; how long it took, or None."""
        began = time.monotonic()

        async def taken():
            [row] = await self.rows("select r.replay_epoch from baton.runs as r where r.run_id = %s", held["run_id"])
            return row["replay_epoch"] != held["replay_epoch"]
        return time.monotonic() - began if await until(taken, None, timeout) else None

    async def play(self, tell):
        for _ in range(2):
            await self.start_worker()
        for run_id in RUNS:
            await self.rows("select * from baton.start_run('conversation', %s::jsonb, %s)",
                            json.dumps({"turns": self.pace.turns}), run_id)
        await asyncio.sleep(self.pace.lead)

        self.joined = await self.start_worker()
        rung = await self.rows("select * from baton.runs as r, baton.wake_run(r.run_id) where r.ended_at is null")
        tell(f"{self.joined.name} has joined; {len(rung)} active runs are rung for")
        await asyncio.sleep(self.pace.lead)

        self.late, held = await self.catch(avoid=[self.joined])
        if self.late:
            tell(f"{self.late.name} is stopped in a replay of {held['run_id']}")
            taken = await self.wait_taken(held, 20)
            await asyncio.sleep(0.2)  # the other one is deciding by now
            self.late.send(signal.SIGCONT)
            tell(f"{self.late.name} goes on late, {'after' if taken else 'not after'} another replay has begun")
        await asyncio.sleep(self.pace.lead)

        self.killed, held = await self.catch(avoid=[self.late])
        if self.killed:
            self.remaining = held["remaining"]
            self.killed.send(signal.SIGKILL)
            self.gone.append(self.killed)
            self.taken_after, self.replacement = await asyncio.gather(
                self.wait_taken(held, 20), self.start_worker())
            after = "never" if self.taken_after is None else f"{self.taken_after:.1f} s later"
            tell(f"{self.killed.name} was killed in a replay of {held['run_id']}; {self.replacement.name} has come; "
                 f"the run is replayed again {after}")
        for run_id in RUNS:
            await self.rows("select * from baton.signal_run(%s, 'finish')", run_id)
        self.settled = await until(self.is_over, None, self.pace.deadline)
        if self.late:
            await until(lambda: "superseded" in self.late.text(), None, 5)

    async def is_over(self):
        return not await self.rows("select from baton.runs as r where r.ended_at is null")

    async def stop(self):
        """All at once, and the status of each that was still there."""
        alive = [worker for worker in self.workers if worker not in self.gone]
        for worker in alive:
            worker.send(signal.SIGTERM)
        await until(lambda: all(worker.child.poll() is not None for worker in alive), None, 10)
        self.statuses = [worker.child.poll() for worker in alive]

    async def read_back(self):
        self.status = Counter({row["status"]: row["n"] for row in await self.rows(
            "select r.status, count(*) as n from baton.runs as r group by 1")})
        self.logs = [Log(await self.rows(
            "select e.seq, e.type, e.payload from baton.events as e where e.run_id = %s order by e.seq", run_id))
            for run_id in RUNS]
        self.diverged = sum(worker.text().count("Diverged(") for worker in self.workers)
        self.handed_over = sum(worker.text().count("handed_over") for worker in self.workers)

    def total(self, count):
        return sum(count(log) for log in self.logs)


class Log:
    """The log of one run, and what is wrong with it."""

    def __init__(self, events):
        self.is_dense = [event["seq"] for event in events] == list(range(1, len(events) + 1))
        own = [event["payload"] for event in events if "." in event["type"]]
        self.pids = {payload["pid"] for payload in own}
        writers = [(payload["epoch"], payload["pid"]) for payload in own]
        blocks = [writer for writer, _ in itertools.groupby(writers)]
        self.torn = len(blocks) - len({epoch for epoch, _ in blocks})  # a second writer, or another one in between
        answers = [event["payload"]["value"] for event in events if event["type"] == "demo.turn"]
        self.turns = len(answers)
        self.twice = len(answers) - len({answer["number"] for answer in answers})
        self.contradicts = (
            [payload["position"] for payload in own] != list(range(1, len(own) + 1))
            or any(second["after"] != first["answer"] for first, second in itertools.pairwise(answers)))


async def until(condition, what, timeout):
    """Polls until the condition is true; with `what`, it is an error if it does not become so."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if asyncio.iscoroutine(answer):
            answer = await answer
        if answer:
            return answer
        if time.monotonic() > deadline:
            if what:
                raise RuntimeError(f"after {timeout} s still not: {what}")
            return answer
        await asyncio.sleep(0.05)


async def play(stage):
    pace = Pace(stage.short)
    cluster = Cluster()
    exit_on_signals()  # the cluster starts in a thread, which can't
    try:
        await asyncio.to_thread(cluster.start)
        async with contextlib.AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg_baton-demo-"))
            new = Side("pg_baton", "pg_baton", cluster, folder, pace, stack)
            old = Side("no_baton", "no baton", cluster, folder, pace, stack)
            for side, more in ((new, ""), (old, Path(__file__).with_name("no_baton.sql").read_text())):
                await asyncio.to_thread(demo_stage.install, cluster, side.dbname, more)
                await side.connect()
            await run(stage, new, old)
            for side in (new, old):
                await side.stop()
                await side.read_back()
            wrong = stage.wrong
            figures(stage, new, old)
            if stage.wrong > wrong:
                await evidence(stage, new)
    finally:
        await asyncio.to_thread(cluster.remove)


async def run(stage, new, old):
    pace, clock = new.pace, demo_stage.Clock()
    stage.say(f"Scale-out: {len(RUNS)} runs of {pace.turns} turns, two workers, and then: one joins, one is stopped\n"
              f"and goes on late, one is killed and replaced. A claim lasts {pace.visibility} s.\n"
              "no baton: the same with a begin_replay that always grants, and no write refused.")

    async def progress():
        while True:
            await asyncio.sleep(5)
            stage.say(f"{clock():5.1f} s  runs | " + " | ".join(
                f"{side.title}: {side.turns} turns, {side.status['completed']} completed,"
                f" {side.status['failed']} failed" for side in (new, old)))

    async def both():
        await asyncio.gather(*(side.play(lambda text, side=side: stage.say(f"{clock():5.1f} s  {side.title}: {text}"))
                               for side in (new, old)))
    await demo_stage.beside(both(), progress(), *(one for side in (new, old) for one in (side.tick(), side.ring(), side.look())))


def figures(stage, new, old):
    n, what = len(RUNS), "pg_baton, runs: "
    stage.check(what + "completed", f"{n} of {n}", f"{new.status['completed']} of {n}")
    stage.check(what + "logs without a gap", f"{n} of {n}", f"{new.total(lambda log: log.is_dense)} of {n}")
    stage.check(what + "epochs with a second writer, or not in one piece", 0, new.total(lambda log: log.torn))
    stage.check(what + "logs that contradict the code", 0, new.total(lambda log: log.contradicts))
    stage.check(what + "divergences that replays met", 0, new.diverged)
    stage.check(what + "turns taken", n * new.pace.turns, new.total(lambda log: log.turns))
    stage.check(what + "wakes that were handed over to a holder", "1 or more", new.handed_over, new.handed_over > 0)
    pids = set().union(*(log.pids for log in new.logs))
    stage.check(what + "the one that joined took part", "yes", "yes" if new.joined.child.pid in pids else "no")
    refused = new.late and "superseded" in new.late.text()
    stage.check(what + "the one that went on late was refused", "yes", "yes" if refused else "no")
    stage.check(what + "the one that was killed: its run went on before its claim ran out",
                "yes", "yes" if new.killed and new.taken_after and new.taken_after < new.remaining else "no")
    stage.check(what + "workers that stop in order at the end", "3 of 3",
                f"{new.statuses.count(0)} of {len(new.statuses)}")
    corrupt = old.total(lambda log: log.contradicts)
    stage.check("no baton, runs: logs that contradict the code", "1 or more", corrupt, corrupt > 0)
    stage.check("no baton, runs: divergences that replays met", "1 or more", old.diverged, old.diverged > 0)
    twice = old.total(lambda log: log.twice)
    stage.check("no baton, runs: turns taken twice", "1 or more", twice, twice > 0)
    stage.check("no baton, runs: failed", "1 or more", old.status["failed"], old.status["failed"] > 0)


async def evidence(stage, side):
    stage.say("What pg_baton noted:")
    for row in await side.rows(
            "select i.at::time(1), i.kind, i.run_id, i.detail from baton.incidents as i order by i.at limit 40"):
        stage.say(f"  {row['at']} {row['kind']} {row['run_id']} {row['detail']}")
    for worker in side.workers:
        stage.say(f"The end of the output of {worker.name}:")
        for text in worker.text().splitlines()[-15:]:
            stage.say("  " + text)
