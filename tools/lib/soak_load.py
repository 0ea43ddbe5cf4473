"""What is asked of the package in the soak: runs with signals, cancellations and operators, messages, tick and prune."""
import contextlib
import dataclasses
import heapq
import itertools
import random
import threading
import time

import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

KINDS = {"step": 6, "fan": 3, "record": 4, "signal": 3, "sleep": 2, "skip": 1, "catch": 1, "fail": 0.15}
SECONDS = [0, 0.02, 0.1, 0.3, 0.5, 1]
LONG = 5  # a body that outlasts its claim, which is extended
KEEP = "20 s"  # how long ended runs are kept; what is older was audited


@dataclasses.dataclass
class Started:
    """A run that was started, and what its clients were told."""

    parts: list
    outputs: object
    status: str = "completed"
    signals: dict = dataclasses.field(default_factory=dict)  # its dedupe_key, and the last answer
    cancelled: str | None = None  # what cancel_run answered


def plan(rng):
    """The parts of a run, for soak_worker.soak; what comes out of them; the names of the signals that it waits for."""
    started, names = Started([], []), []

    def body(**more):
        seconds = LONG if rng.random() < 0.03 else rng.choice(SECONDS)
        return {"value": rng.randrange(1000), "seconds": seconds, "deaf": rng.random() < 0.1, **more}

    for number in range(rng.choice([1, 1, 2, 3, 5, 8])):
        [kind] = rng.choices(list(KINDS), KINDS.values())
        what = output = None
        if kind == "step":
            what = body()
            if rng.random() < 0.15:
                what["fails"] = rng.choice([1, 2])
            elif rng.random() < 0.02:
                what["dies"] = rng.choice([1, 2])
            output = what["value"]
        elif kind == "fan":
            what = [body() for _ in range(rng.choice([2, 3, 5, 10, 25]))]
            output = [each["value"] for each in what]
        elif kind in ("skip", "catch"):  # the first body fails as often as it may
            what = [body(fails=100), *(body(seconds=2) for _ in range(rng.choice([0, 1, 3])))]
            output = None if kind == "skip" else "ValueError('on purpose')"
        elif kind == "sleep":
            what = rng.uniform(0, 3)
        elif kind in ("record", "signal"):
            what = output = f"{kind} {number}"
        if kind == "signal":
            names.append(what)
        started.parts.append((kind, what))
        if kind == "fail":
            started.status, started.outputs = "failed", None
            break
        if kind != "sleep":
            started.outputs.append(output)
    return started, names


class Caller:
    """A connection on which every statement is asked until there is an answer: every verb may be asked again.

    After a minute without one it gives up.
    """

    def __init__(self, dsn):
        self.dsn, self.db = dsn, None

    def rows(self, sql, *arguments):
        deadline = time.monotonic() + 60
        while True:
            try:
                if self.db is None or self.db.closed:
                    self.db = psycopg.connect(self.dsn, autocommit=True, row_factory=namedtuple_row, connect_timeout=5)
                return self.db.execute(sql, arguments).fetchall()
            except psycopg.OperationalError:
                if self.db and not self.db.closed or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def one(self, sql, *arguments):
        [row] = self.rows(sql, *arguments)
        return row


class Load:
    """Shared by those who make it: what was started, what has ended, and whether more is to be started."""

    def __init__(self, seed, open_runs):
        self.seed, self.open_runs = seed, open_runs
        self.started, self.ended, self.messages = {}, {}, set()
        self.over, self.settled = threading.Event(), threading.Event()
        self.numbers = itertools.count(1)

    def client(self, caller, name):
        """Starts runs, as many as may be open; signals and cancels them at random times, some twice."""
        rng, due, order = random.Random(f"{self.seed} {name}"), [], itertools.count()

        def later(seconds, action, *arguments):
            heapq.heappush(due, (time.monotonic() + seconds, next(order), action, arguments))

        def start():
            started, names = plan(rng)
            run_id = f"{name}-{next(self.numbers)}"
            self.started[run_id] = started
            delay = f"{rng.uniform(0, 2)} s" if rng.random() < 0.1 else "0"
            for _ in range(2 if rng.random() < 0.1 else 1):
                answer = caller.one("select * from baton.start_run('soak', %s, %s, 'soak', %s::interval)",
                                    Jsonb(started.parts), run_id, delay)
                assert answer.outcome in ("created", "exists"), answer
            for signal in names:
                for _ in range(2 if rng.random() < 0.2 else 1):
                    later(rng.uniform(0, 3), send, run_id, signal)
            if rng.random() < 0.12:
                later(rng.uniform(0, 3), cancel, run_id)

        def send(run_id, signal):
            answer = caller.one("select * from baton.signal_run(%s, %s, %s, %s)", run_id, signal, Jsonb(signal), signal)
            self.started[run_id].signals[signal] = answer.outcome

        def cancel(run_id):
            answer = caller.one("select * from baton.cancel_run(%s, 'soak')", run_id)
            self.started[run_id].cancelled = answer.status

        while due or not self.over.is_set():
            if not self.over.is_set() and len(self.started) - len(self.ended) < self.open_runs:
                start()
            if not self.over.is_set() and rng.random() < 0.2 and (going := self.started.keys() - self.ended.keys()):
                send(rng.choice(sorted(going)), f"knock {next(order)}")  # for which nobody waits: a replay beside a body
            while due and due[0][0] <= time.monotonic():
                _, _, action, arguments = heapq.heappop(due)
                action(*arguments)
            time.sleep(0.02)

    def sender(self, caller):
        """Messages for the HTTP function, some sent twice."""
        rng = random.Random(f"{self.seed} sender")
        while not self.over.wait(rng.uniform(0, 0.6)):
            key = f"m-{len(self.messages)}"
            self.messages.add(key)
            for _ in range(2 if rng.random() < 0.1 else 1):
                caller.one("select * from baton.send('web', %s, dedupe_key => %s)",
                           Jsonb({"key": key, "seconds": rng.choice([0, 0, 0.2])}), key)

    def operator(self, caller, observer):
        """Wakes runs for nothing, gives started tasks out anew, and ends replays."""
        rng = random.Random(f"{self.seed} operator")
        while not self.over.wait(rng.uniform(0, 1.5)):
            if not (runs := observer.rows("select run_id from baton.runs where ended_at is null")):
                continue
            run_id = rng.choice(runs).run_id
            tasks = observer.rows("select step_slug, task_index from baton.tasks where status = 'started' and run_id = %s", run_id)
            if tasks and rng.random() < 0.3:
                caller.one("select * from baton.release_task(%s, %s, %s)", run_id, *rng.choice(tasks))
            else:
                caller.one(f"select * from baton.{rng.choice(['wake_run', 'release_replay'])}(%s)", run_id)

    def tick(self, caller):
        while not self.settled.wait(0.5):
            for row in caller.rows("select * from baton.tick()"):
                assert row.error is None, row

    def audit(self, audit, pruner):
        """Looks at each run that has ended, and then has old ones removed."""
        while not self.settled.wait(0.5):
            audit.look()
            while pruner.one("select * from baton.prune(%s, 2000)", KEEP).more:
                pass


@contextlib.contextmanager
def listening(dsn, heard):
    """Counts what the control channel says while the block runs."""
    over = threading.Event()

    def listen():
        while not over.is_set():
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(dsn, autocommit=True) as db:
                db.execute("listen baton_control")
                while not over.is_set():
                    for notify in db.notifies(timeout=0.5, stop_after=1):
                        heard.append(notify.payload)
            over.wait(0.2)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
