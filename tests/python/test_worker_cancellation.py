"""Cancellation in docs/examples/worker_durable.py: bodies in processes of their own, which are asked to stop."""

import contextlib
import json
import re
import signal

import pytest
from conftest import wait_until
from programs import EXAMPLES
from runs import cancel, granted, start
from tasks import create, release, replay, skip
from test_worker_durable import DurableShop

# Each body leaves marks, a line each in a file: that it began, why it was asked to stop, that it came to its end.
CODE = """
import os, signal, threading, time
import worker_durable
from cancellation import Control
from worker_durable import BODIES, WORKFLOWS, Slot, Suspended, log

FOLDER = os.environ["FOLDER"]

def there(*names):
    return any(os.path.exists(f"{FOLDER}/{name}") for name in names)

def mark(task, what):
    with open(FOLDER + "/marks", "a") as file:
        print(what, task.run_id, task.step_slug, task.task_index, task.attempt, os.getpid(), sep="|", file=file)

def quick(input, task):
    return input

def waits(input, task):  # until it is asked to stop, or the gate opens, for all, or for this process
    mark(task, "began")
    while not there("gate", f"gate.{os.getpid()}"):
        if input == "fails" and there("fail"):
            raise ValueError("on purpose")
        if task.cancelled.wait(0.02):
            mark(task, task.reason)
            task.raise_if_cancelled()
    mark(task, "ended")
    return input

def deaf(input, task):
    mark(task, "began")
    while not there("gate"):
        time.sleep(0.02)
    return input

def fan(run):
    first = run.map(run.input["body"], run.input["inputs"], **run.input["options"])
    return [first, run.step("waits", "after", key="after")] if run.input["after"] else first

def chain(run):
    return [run.step("quick"), run.step(run.input), run.step("waits", "after", "after")]

def w(run):
    run.created.clear()
    raise Suspended(None)

BODIES.update({body.__name__: body for body in (quick, waits, deaf)})
WORKFLOWS.update(fan=fan, chain=chain, w=w)

hear, execute = Control._hear, Slot.execute

def heard(control, payload):
    hear(control, payload)
    if '"probe"' not in payload:
        log("heard", payload[:200])

def held(slot, task):  # started, and not yet registered
    if there("hold"):
        mark(task, "started")
        while there("hold"):
            time.sleep(0.02)
    return execute(slot, task)

Control._hear, Slot.execute = heard, held

for _ in range(int(os.environ.get("WORKERS", "1"))):
    worker = worker_durable.Worker()
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGUSR1, lambda *_: log("active", len(worker.control.active), "threads", threading.active_count()))
    worker.work()
"""
NEVER = 600  # seconds between reconciliations, where something else must be in time


class Hall(DurableShop):
    """One function, and its workers with bodies that wait."""

    code = CODE

    def __init__(self, db, folder):
        super().__init__(db, folder)
        self.conn.execute("select baton.register_worker_function('hall', 'q', start_mode => 'process')")
        if not self.conn.execute("select from pg_roles where rolname = 'baton_test_listener'").fetchall():
            self.conn.execute("create role baton_test_listener")
        self.conn.execute("alter role baton_test_listener login")

    def worker(self, slots=1, interval=NEVER, wait=True, listen=None, **env):
        listen = listen or self.db.cluster.dsn(self.db.name, user="baton_test_listener")
        return super().worker(wait=wait, **{
            "SLOTS": str(slots), "HEARTBEAT_SECONDS": str(interval), "LISTEN_URL": listen, "QUEUE_NAME": "q",
            "FUNCTION_NAME": "hall", **env})

    def start(self, *inputs, run_id="r", body="waits", after=False, **options):
        input = {"inputs": inputs, "body": body, "after": after, "options": options}
        answer = self.conn.execute("select * from baton.start_run('fan', %s::jsonb, %s, 'q')", (json.dumps(input), run_id))
        assert answer.fetchone().outcome == "created"

    def touch(self, name):
        (self.folder / name).touch()

    def marks(self):
        """[(what, run, step, index, attempt, pid)]"""
        return [(what, run, step, int(index), int(attempt), int(pid)) for what, run, step, index, attempt, pid
                in (line.split("|") for line in self.lines())]

    def marked(self, what):
        return [mark for mark in self.marks() if mark[0] == what]

    def wait_marked(self, what, count=1):
        try:
            wait_until(lambda: len(self.marked(what)) >= count, f"{what}, {count} times", every=0.02)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.marks()}\n" + "\n".join(w.text() for w in self.workers)) from None
        return self.marked(what)

    def stopped(self):
        return sum(worker.text().count("stopping a body") for worker in self.workers)

    def state(self):
        rows = self.conn.execute("select control from baton.workers where stopped_at is null").fetchall()
        return rows[0].control if rows else None

    def wait_state(self, state):
        wait_until(lambda: self.state() == state, f"the worker says that it is {state}", every=0.02)

    def deafen(self):
        """The listener loses its connection, and gets no other."""
        self.conn.execute("alter role baton_test_listener nologin")
        assert self.conn.execute("select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                                 " where usename = 'baton_test_listener' and datname = %s", (self.db.name,)).fetchall()
        self.wait_state("polling")

    def let_hear(self):
        self.conn.execute("alter role baton_test_listener login")

    def look(self, worker):
        """Bodies in the registry, threads, connections."""
        looks = worker.text().count("active ")
        worker.signal(signal.SIGUSR1)
        worker.wait_for("active ", looks + 1)
        *_, (active, threads) = re.findall(r"active (\d+) threads (\d+)\n", worker.text())
        connections = self.conn.execute("select from pg_stat_activity where datname = %s and pid <> pg_backend_pid()",
                                        (self.db.name,)).fetchall()
        return int(active), int(threads), len(connections)


@pytest.fixture
def hall(db, tmp_path):
    hall = Hall(db, tmp_path)
    yield hall
    hall.let_hear()
    hall.close()


def queued(conn, run_id, *slugs, queue_name="q"):
    """A run with a task under a message of its own in each step, that no worker replays yet."""
    start(conn, run_id, queue_name)
    receipt, epoch = granted(conn, run_id, queue_name=queue_name)
    for slug in slugs:
        create(conn, epoch, slug, run_id=run_id)
    replay(conn, receipt, epoch, 0, run_id)


# What is stopped, and what is not ----------------------------------------------------------------


def test_the_sibling_of_a_task_that_exhausts_its_retries_is_stopped_and_the_queued_one_never_starts(hall):
    """At once, by the hint: the reconciliation comes much later."""
    worker = hall.worker(slots=2)
    hall.wait_state("listening")
    hall.start("fails", "a", "b", after=True, on_exhausted="skip_step", max_attempts=1)
    hall.wait_marked("began", 2)
    hall.touch("fail")
    [stopped] = hall.wait_marked("step_skipped")
    hall.wait_marked("began", 3)
    hall.open_gate()
    assert hall.wait("completed").output == [None, "after"]
    hall.wait_empty()
    assert stopped[:5] == ("step_skipped", "r", "waits", 1, 1)
    assert [mark[2:4] for mark in hall.marked("began")] == [("waits", 0), ("waits", 1), ("waits after", 0)]
    assert [mark[2:4] for mark in hall.marked("ended")] == [("waits after", 0)]
    assert (hall.stopped(), hall.look(worker)[0], hall.incidents("too_late")) == (1, 0, []), "who stops has not failed"


@pytest.mark.parametrize("body", ["waits", "deaf"])
def test_the_body_of_a_run_whose_code_is_kept_in_memory_is_stopped_and_nothing_more_is_started(hall, body):
    hall.worker()
    hall.wait_state("listening")
    hall.conn.execute("select baton.start_run('chain', to_jsonb(%s::text), 'r', 'q')", [body])
    hall.wait_marked("began")
    assert hall.types()[-1] == "run_advanced", "the short way"
    assert cancel(hall.conn) == "done"
    wait_until(lambda: hall.stopped() == 1, "it is asked to stop")
    if body == "waits":
        hall.wait_marked("run_cancelled")
    hall.open_gate()
    hall.wait_empty()
    hall.start("on", run_id="next")
    assert hall.wait("completed", "next").output == ["on"]
    assert [mark[2] for mark in hall.marked("began") if mark[1] == "r"] == [body]
    assert [hall.types().count(type) for type in ("step_created", "run_advanced")] == [1, 1]


def test_only_what_was_cancelled_is_stopped(hall):
    queued(hall.conn, "r1", "waits s", "waits t")
    queued(hall.conn, "r2", "waits s")
    queued(hall.conn, "r3", "waits s", queue_name="q2")
    hall.worker(slots=3)
    hall.worker(QUEUE_NAME="q2")
    hall.wait_marked("began", 4)
    assert skip(hall.conn, "waits s", "r1").outcome == "done"
    assert [mark[1:3] for mark in hall.wait_marked("step_skipped")] == [("r1", "waits s")]
    assert cancel(hall.conn, "r1") == "done"
    assert [mark[1:3] for mark in hall.wait_marked("run_cancelled")] == [("r1", "waits t")]
    hall.open_gate()
    assert sorted(mark[1:3] for mark in hall.wait_marked("ended", 2)) == [("r2", "waits s"), ("r3", "waits s")]
    wait_until(lambda: {hall.task("waits s", 0, run_id).status for run_id in ("r2", "r3")} == {"completed"}, "both completed")
    assert hall.stopped() == 2


def test_what_waits_in_the_queue_of_a_cancelled_run_never_starts(hall):
    hall.worker()
    hall.start("a", "b", "c")
    hall.wait_marked("began")
    assert cancel(hall.conn) == "done"
    hall.wait_marked("run_cancelled")
    hall.open_gate()
    hall.start("d", run_id="next")
    assert hall.wait("completed", "next").output == ["d"]
    assert [mark[1:4] for mark in hall.marked("began")] == [("r", "waits", 0), ("next", "waits", 0)]
    hall.wait_empty()


def test_a_body_that_an_operator_takes_away_is_stopped_and_another_one_runs(hall):
    hall.worker(slots=2)
    hall.start("a")
    hall.wait_marked("began")
    assert release(hall.conn, "waits").outcome == "released"
    [stopped] = hall.wait_marked("task_released")
    began = hall.wait_marked("began", 2)
    assert (stopped[4], began[1][4]) == (1, 2)
    hall.open_gate()
    assert hall.wait("completed").output == ["a"]
    assert [mark[4] for mark in hall.marked("ended")] == [2] and hall.stopped() == 1


@pytest.mark.parametrize("successor, reason", [("goes on", "task_started"), ("has ended", "task_completed")])
def test_a_body_that_was_replaced_learns_it_when_its_process_comes_back(hall, successor, reason):
    first = hall.worker(interval=0.3, VISIBILITY_SECONDS="1")
    hall.start("a")
    hall.wait_marked("began")
    first.signal(signal.SIGSTOP)
    second = hall.worker()
    hall.wait_marked("began", 2)
    if successor == "has ended":
        hall.open_gate(second)
        hall.wait("completed")
    first.signal(signal.SIGCONT)
    [stopped] = hall.wait_marked(reason)
    assert stopped[4:] == (1, first.process.pid)
    hall.open_gate(second)
    assert hall.wait("completed").output == ["a"]
    assert [mark[4:] for mark in hall.marked("ended")] == [(2, second.process.pid)]


# Hints that are missed, doubled, forged, or off --------------------------------------------------


def test_what_the_listener_misses_is_found_by_the_reconciliation_with_all_slots_taken(hall):
    worker = hall.worker(interval=0.3)
    hall.wait_state("listening")
    hall.start("a")
    hall.wait_marked("began")
    hall.deafen()
    assert cancel(hall.conn) == "done"
    hall.wait_marked("run_cancelled")
    assert hall.state() == "polling" and "listener: OperationalError" in worker.text()
    hall.start("b", run_id="next")
    hall.wait_marked("began", 2)
    hall.let_hear()
    hall.wait_state("listening")
    hall.open_gate()
    assert hall.wait("completed", "next").output == ["b"], "without a listener it works on"


def test_what_ends_while_the_listener_is_away_is_found_when_it_is_back(hall):
    worker = hall.worker()
    hall.wait_state("listening")
    hall.start("a")
    hall.wait_marked("began")
    hall.deafen()
    assert cancel(hall.conn) == "done"
    assert hall.stopped() == 0
    hall.let_hear()
    hall.wait_marked("run_cancelled")
    hall.wait_state("listening")
    assert "heard" not in worker.text()


@pytest.mark.parametrize("listen, state", [(None, "listening"), ("off", "off")], ids=["no hints", "no listener"])
def test_without_hints_a_body_is_stopped_by_the_next_reconciliation(hall, listen, state):
    hall.conn.execute("update baton.settings set control_notify = %s", (listen == "off",))
    worker = hall.worker(interval=0.3, listen=listen)
    hall.wait_state(state)
    hall.start("a")
    hall.wait_marked("began")
    assert cancel(hall.conn) == "done"
    hall.wait_marked("run_cancelled")
    assert "heard" not in worker.text()
    assert hall.look(worker)[2] == (4 if listen is None else 3), "the slot, the extending, the reconciliation, the listener"


def test_behind_a_transaction_pooler_listen_hears_nothing_and_the_worker_says_so(hall, make_pooler):
    url = make_pooler(hall.db, pool_size=4, users=(hall.user,)).cluster.dsn(hall.db.name, user=hall.user)
    worker = hall.worker(interval=0.3, DATABASE_URL=url, listen=url)
    hall.start("a")
    hall.wait_marked("began")
    assert cancel(hall.conn) == "done"
    hall.wait_marked("run_cancelled")
    assert hall.state() == "polling"
    assert not re.search("heard|listening|listener:", worker.text()), "LISTEN did not fail"


def test_what_ends_between_its_start_and_its_registration_is_stopped_right_after(hall):
    """The hint came, and found nobody."""
    worker = hall.worker()
    hall.touch("hold")
    hall.start("a")
    hall.wait_marked("started")
    assert cancel(hall.conn) == "done"
    worker.wait_for("heard")
    assert hall.stopped() == 0
    (hall.folder / "hold").unlink()
    worker.wait_for("stopping a body: run_cancelled r waits 0 1")
    hall.wait_empty()


def test_doubled_hints_are_harmless_and_forged_ones_believed_in_nothing(hall):
    worker = hall.worker(slots=3)
    hall.start("a", run_id="deaf", body="deaf")
    hall.start("b", run_id="goes on")
    hall.start("c", run_id="last")
    hall.wait_marked("began", 3)
    assert [cancel(hall.conn, "deaf") for _ in range(2)] == ["done", "terminal"]
    worker.wait_for("stopping a body")
    hint = {"v": 1, "event": "cancel:run", "queue_name": "q", "run_id": "deaf", "reason": "cancelled"}
    sent = [*[json.dumps(hint)] * 3, json.dumps(hint | {"event": "cancel:step", "step_slug": "deaf"}),
            json.dumps(hint | {"run_id": "goes on"}), '{"event": "cancel:run"}', "", "nonsense", "[1]", "5", "[" * 7000,
            '{"event": "cancel:run", "run_id": {}}', '{"event": null}']
    for payload in sent:
        hall.conn.execute("select pg_notify('baton_control', %s)", (payload,))
    worker.wait_for("heard", 1 + len(sent))
    assert cancel(hall.conn, "last") == "done"
    hall.wait_marked("run_cancelled")
    assert hall.stopped() == 2
    hall.open_gate()
    assert hall.wait("completed", "goes on").output == ["b"]
    wait_until(lambda: hall.incidents("too_late"), "the deaf body has ended, too late")
    assert (hall.run("deaf").status, len(hall.incidents("too_late"))) == ("cancelled", 1)
    hall.wait_empty()
    assert (hall.stopped(), hall.look(worker)[0]) == (2, 0) and "Traceback" not in worker.text()
    hall.wait_state("listening")


def test_a_body_that_ends_while_it_is_asked_about_is_not_said_to_be_stopped(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    from cancellation import Attempt, Control

    control, attempt, body = Control("w", connect=None), Attempt("r", "s", 0, 1), contextlib.ExitStack()

    class Asked:
        def execute(self, sql, arguments):
            body.close()
            return self

        def fetchall(self):
            return [("completed", "task_completed")]

    body.enter_context(control.registered(attempt))
    control._look(Asked())
    assert control.active == set() and not attempt.cancelled.is_set()
    assert "stopping" not in capsys.readouterr().err


# The worker itself -------------------------------------------------------------------------------


def test_nothing_is_left_of_bodies_that_have_settled(hall):
    worker = hall.worker(slots=3, interval=0.2)
    hall.start("a", run_id="first", body="quick")
    hall.wait("completed", "first")
    hall.wait_state("listening")
    wait_until(lambda: worker.text().count("ready") == 3, "all slots are connected")
    before = hall.look(worker)
    for number in range(3):
        hall.start(*range(10), run_id=f"quick {number}", body="quick")
        hall.start("a", "b", run_id=f"cancelled {number}")
        hall.wait_marked("began", 2 * (number + 1))
        hall.wait("completed", f"quick {number}")
        cancel(hall.conn, f"cancelled {number}")
        hall.wait_marked("run_cancelled", 2 * (number + 1))
    hall.deafen()
    hall.let_hear()
    hall.wait_state("listening")
    hall.wait_empty()
    assert (before, hall.look(worker)) == ((0, 7, 6), (0, 7, 6))


def test_a_stop_while_a_run_is_cancelled_stops_every_body_and_the_next_worker_here_starts_afresh(hall):
    worker = hall.worker(slots=2, WORKERS="2")
    hall.start("a", run_id="cancelled")
    hall.start("b", run_id="goes on")
    hall.wait_marked("began", 2)
    canceller = hall.db.session("canceller")
    canceller.start("select outcome from baton.cancel_run('cancelled', 'enough')")
    worker.signal()
    assert canceller.result() == [("done",)]
    worker.wait_for("\nstopped\n")
    asked = {mark[1]: mark[0] for mark in hall.marks() if mark[0] != "began"}
    assert asked["goes on"] == "shutdown" and asked["cancelled"] in ("run_cancelled", "shutdown") and hall.stopped() == 2
    began = hall.wait_marked("began", 3)
    assert began[2][1:] == ("goes on", "waits", 0, 2, worker.process.pid)
    hall.open_gate()
    assert hall.wait("completed", "goes on").output == ["b"]
    hall.wait_empty()
    worker.signal()
    assert worker.wait() == 0 and "Traceback" not in worker.text()
    assert (hall.stopped(), len(hall.marked("began"))) == (2, 3)
    assert hall.conn.execute("select stopped_at is not null from baton.workers").fetchall() == [(True,), (True,)]


def test_a_worker_that_is_sent_home_finishes_what_it_holds_and_claims_nothing_more(hall):
    worker = hall.worker(interval=0.2)
    hall.start("a", run_id="in hand")
    hall.wait_marked("began")
    hall.conn.execute("select baton.deprecate_workers('hall')")
    worker.wait_for("draining: deprecated")
    hall.start("b", run_id="next")
    hall.open_gate()
    assert worker.wait() == 0
    assert len(hall.marked("ended")) == 1 and hall.stopped() == 0
    assert hall.task("waits", 0, "in hand").status == "completed" and hall.run("next").status == "pending"
