"""docs/examples/worker_runs.py as several processes on one queue, which are killed, stopped and sent home."""

import json
import signal
import threading

import psycopg
import pytest
from conftest import wait_until
from programs import EXAMPLES, Program, Shop

# Each workflow names what it decides in its events: who (pid), under which epoch.
CODE = """
import os, signal, time
import worker_runs
from worker_runs import WORKFLOWS, Failed, log

LOOKS = []

def mark(run, **more):
    return {"pid": os.getpid(), "epoch": run.baton.replay_epoch, **more}

def steps(run):
    for number in range(run.input["steps"]):
        run.record("test.step", lambda: mark(run, number=number))
        run.sleep(0)
    return "walked"

def gated(run):  # decides, and is held in there until a file appears: the gate for all, or the one of this process
    run.record("test.before", lambda: mark(run))
    def decide():
        log("deciding", os.getpid())
        while not any(map(os.path.exists, (run.input, f"{run.input}.{os.getpid()}"))):
            time.sleep(0.02)
        return mark(run)
    run.record("test.gated", decide)
    run.record("test.after", lambda: mark(run))
    return "through"

def raises(run):
    run.record("test.kept_out", lambda: mark(run))
    raise ValueError("on purpose")

def impure(run):
    run.record("test." + ("even" if len(run.recorded) % 2 == 0 else "odd"), lambda: mark(run))
    run.wait_signal("never")

def collects(run):
    return [run.wait_signal("item") for _ in range(run.input)]

def ends_failed(run):
    raise Failed({"because": "it said so"})

def cleans(run):
    try:
        return run.record("test.got", lambda item=run.wait_signal("item"): mark(run, item=item))["item"]
    except BaseException:
        return "caught"
    finally:
        run.record("test.cleaned", lambda: mark(run))

def naps(run):
    try:
        run.sleep(60)
    except BaseException:
        run.wait_signal("never")

def falls_back(run):
    try:
        run.record("test.looked", lambda: mark(run, looks=[LOOKS.append(1), LOOKS[1]]))
    except Exception:
        run.record("test.fell_back", lambda: mark(run))
    return run.wait_signal("item")

def plain(run):
    if run.input == "record":
        run.record("test.plain", lambda: {1})
    if run.input == "error":
        raise Failed({1})
    return {1}

WORKFLOWS.update(steps=steps, gated=gated, raises=raises, impure=impure, collects=collects, ends_failed=ends_failed,
                 plain=plain, cleans=cleans, naps=naps, falls_back=falls_back)
for name in os.environ.get("FORGET", "").split():
    del WORKFLOWS[name]
worker = worker_runs.Worker()
signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
worker.work()
"""


class Office(Shop):
    def __init__(self, db, folder):
        super().__init__(db, folder)
        self.gate = folder / "gate"

    def worker(self, visibility=60, wait=True, **env):
        name = f"worker-{len(self.workers) + 1}"
        dsn = psycopg.conninfo.make_conninfo(self.db.cluster.dsn(self.db.name, user=self.user), application_name=name)
        program = Program(self.folder / f"{name}.log", ["-c", CODE], {
            "DATABASE_URL": dsn, "POLL_SECONDS": "0.05", "VISIBILITY_SECONDS": str(visibility),
            "UNKNOWN_SECONDS": "0.3", "PYTHONPATH": str(EXAMPLES), **env})
        program.name = name
        self.workers.append(program)
        if wait:
            program.wait_for("ready")
        return program

    def start_gated(self):
        self.start("gated", json.dumps(str(self.gate)))

    def start(self, workflow_name, input, run_id="r"):
        self.conn.execute("select * from baton.start_run(%s, %s::jsonb, %s)", (workflow_name, input, run_id))

    def signal(self, name, payload="null", run_id="r"):
        self.conn.execute("select * from baton.signal_run(%s, %s, %s::jsonb)", (run_id, name, payload))

    def row(self, run_id="r"):
        return self.conn.execute("select * from baton.runs where run_id = %s", (run_id,)).fetchone()

    def wait(self, status, run_id="r"):
        wait_until(lambda: self.run(run_id).status == status, f"{run_id} is {status}", every=0.02)
        return self.run(run_id)

    def events(self, run_id="r"):
        """The log, which is checked: dense, and each epoch written by one process and in one piece."""
        events = self.conn.execute("select * from baton.read_events(%s)", (run_id,)).fetchall()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        writers = [(event.payload["epoch"], event.payload["pid"]) for event in events if event.type.startswith("test.")]
        blocks = [one for one, before in zip(writers, [None, *writers]) if one != before]
        assert len({epoch for epoch, _ in blocks}) == len(blocks), f"an epoch with two writers, or in pieces: {blocks}"
        return events

    def pids(self, run_id="r"):
        return {event.payload["pid"] for event in self.events(run_id) if event.type.startswith("test.")}

    def types(self, run_id="r"):
        return [event.type for event in self.events(run_id)]

    def backends(self, worker):
        return self.conn.execute("select pid from pg_stat_activity where application_name = %s and datname = %s",
                                 (worker.name, self.db.name)).fetchall()


@pytest.fixture
def office(db, tmp_path):
    office = Office(db, tmp_path)
    yield office
    office.close()


def test_several_workers_bring_many_runs_to_their_end(office, server_log):
    for _ in range(3):
        office.worker()
    for number in range(20):
        office.start("steps", '{"steps": 5}', f"r{number}")
    for number in range(20):
        assert office.wait("completed", f"r{number}").output == "walked"
        numbers = [event.payload["number"] for event in office.events(f"r{number}") if event.type == "test.step"]
        assert numbers == [0, 1, 2, 3, 4]
    assert office.messages() == []
    assert len(set().union(*(office.pids(f"r{number}") for number in range(20)))) > 1, "more than one took part"
    assert server_log.errors() == []


def test_the_example_workflow(office):
    """A signal wakes it, a timer fires by the database's clock, and its error is its own."""
    office.worker()
    office.worker()
    office.start("ship", '{"items": 3, "seconds": 0.5}')
    wait_until(lambda: office.row().status == "suspended", "it waits for its signal")
    assert office.types() == ["run_created", "order.priced"]
    office.signal("paid", '{"amount": 30}')
    wait_until(lambda: office.row().wake_at, "it sleeps")
    until = office.row().wake_at
    run = office.wait("completed")
    assert run.output["total"] == 30
    assert run.ended_at >= until
    assert office.types() == ["run_created", "order.priced", "signal_received", "timer.set", "order.shipped",
                              "run_completed"]
    assert office.events()[4].payload["parcel"] == run.output["parcel"]

    office.start("ship", '{"items": 3}', "poor")
    office.signal("paid", '{"amount": 10}', "poor")
    assert office.wait("failed", "poor").error == {"missing": 20}
    office.start("ends_failed", "null", "said")
    assert office.wait("failed", "said").error == {"because": "it said so"}


def test_no_signal_is_missed(office):
    for _ in range(2):
        office.worker()
    office.start("collects", "30")
    for number in range(30):
        office.signal("item", str(number))
    assert office.wait("completed").output == list(range(30))


def test_killed_in_a_replay_another_goes_on_at_once(office):
    first = office.worker(visibility=600)
    office.start_gated()
    first.wait_for("deciding")
    first.signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not office.backends(first), "its connections are gone")
    second = office.worker(visibility=600)  # recovers at its start; the claim has minutes to run
    second.wait_for("recovered: r\n")
    second.wait_for("deciding")
    office.gate.touch()
    assert office.wait("completed").output == "through"
    assert office.types() == ["run_created", "test.before", "test.gated", "test.after", "run_completed"]
    assert office.pids() == {second.process.pid}
    assert len(office.incidents("replay_lost")) == 1
    assert office.messages() == []


def test_killed_in_a_replay_a_running_one_goes_on_with_the_next_tick(office):
    first = office.worker(visibility=600)
    office.start_gated()
    first.wait_for("deciding")
    second = office.worker(visibility=600)
    first.signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: not office.backends(first), "its connections are gone")
    office.gate.touch()
    office.conn.execute("select baton.tick()")
    assert office.wait("completed").output == "through"
    assert office.pids() == {second.process.pid}


def test_stopped_beyond_its_claim_it_is_refused(office, server_log):
    first = office.worker(visibility=2)
    office.start_gated()
    first.wait_for("deciding")
    epoch = office.row().replay_epoch
    first.signal(signal.SIGSTOP)
    second = office.worker()
    second.wait_for("deciding")  # it has taken over
    assert office.row().replay_epoch != epoch
    office.open_gate(first)
    first.signal(signal.SIGCONT)
    first.wait_for("superseded r")
    assert office.types() == ["run_created"]
    office.open_gate(second)
    assert office.wait("completed").output == "through"
    assert office.pids() == {second.process.pid}
    second.signal(signal.SIGKILL)
    office.start("steps", '{"steps": 1}', "next")
    office.wait("completed", "next")
    assert office.pids("next") == {first.process.pid}, "the refused one goes on"
    assert server_log.errors(ignore="was superseded") == []


def test_stopped_until_its_run_has_ended_it_is_told(office, server_log):
    first = office.worker(visibility=2)
    office.start_gated()
    first.wait_for("deciding")
    first.signal(signal.SIGSTOP)
    office.gate.touch()
    second = office.worker(visibility=2)
    office.wait("completed")
    log = office.events()
    first.signal(signal.SIGCONT)
    first.wait_for("terminal r")
    assert office.events() == log and office.pids() == {second.process.pid}
    assert server_log.errors() == []


def test_stopped_beyond_its_claim_while_nobody_takes_over_it_goes_on(office):
    first = office.worker(visibility=2)
    office.start_gated()
    first.wait_for("deciding")
    first.signal(signal.SIGSTOP)
    wait_until(lambda: office.conn.execute("select visible_at < clock_timestamp() from baton.messages").fetchone()[0],
               "the claim has run out", every=0.05)
    office.gate.touch()
    first.signal(signal.SIGCONT)
    office.wait("completed")
    assert office.incidents("replay_lost") == []


def test_code_that_has_been_left_decides_nothing_on_its_way_out(office):
    office.worker()
    office.start("cleans", "null")
    office.wait("suspended")
    office.signal("item", "7")
    assert office.wait("completed").output == 7
    assert [type for type in office.types() if type.startswith("test.")] == ["test.got", "test.cleaned"]


def test_what_code_that_has_been_left_waits_for_does_not_count(office):
    office.worker()
    office.start("naps", "null")
    office.wait("suspended")
    assert office.row().wake_at


def test_the_code_does_not_go_on_over_what_could_not_be_recorded(office):
    office.worker()
    office.start("falls_back", "null")
    office.signal("item", "7")
    assert office.wait("completed").output == 7
    assert [type for type in office.types() if type.startswith("test.")] == ["test.looked"]


def test_a_message_that_is_settled_meanwhile_does_not_end_the_extending(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import worker_runs

    over = threading.Event()

    class Settles:  # when it has been looked at once
        looks = 0

        @property
        def receipt(self):
            self.looks += 1
            return (1, 2) if self.looks == 1 else None

    class Connection:
        extended = []

        def execute(self, sql, arguments):
            self.extended.append(arguments[:2])
            over.set()

        def close(self):
            pass

    monkeypatch.setattr(worker_runs, "connect", Connection)
    worker_runs.extend([Settles()], over)
    assert Connection.extended == [(1, 2)]


def test_a_long_replay_is_extended(office):
    first = office.worker(visibility=3)
    office.start_gated()
    first.wait_for("deciding")
    second = office.worker(visibility=3)
    wait_until(lambda: office.conn.execute("select claimed_at < clock_timestamp() - interval '4 s' from baton.messages"
                                           ).fetchone()[0], "a claim would have run out", every=0.1)
    assert "deciding" not in second.text()
    office.gate.touch()
    office.wait("completed")
    assert office.pids() == {first.process.pid}


def test_signals_that_come_in_a_replay(office):
    """They are handed to the holder, whoever claims their messages; and lead to `again`, not to a second replay."""
    first = office.worker()
    office.start_gated()
    first.wait_for("deciding")
    second = office.worker()
    for told in (1, 2, 3):
        office.signal("knock")
        second.wait_for("handed_over r", times=told)
    assert office.types() == ["run_created"] + ["signal_received"] * 3
    office.gate.touch()
    office.wait("completed")
    assert office.pids() == {first.process.pid}
    assert office.messages() == []


def test_an_unknown_workflow_is_given_back(office):
    office.conn.execute("update baton.settings set max_failures = 1000")
    old = office.worker(FORGET="steps", UNKNOWN_SECONDS="600")
    office.start("steps", '{"steps": 1}')
    old.wait_for("failing: unknown workflow: steps\nfailed r")
    assert office.row().failures == 1
    [message] = office.messages()
    assert office.conn.execute("select %s > clock_timestamp() + interval '500 s'", (message.visible_at,)).fetchone()[0]
    old.signal()
    assert old.wait() == 0
    new = office.worker()
    office.conn.execute("update baton.messages set visible_at = clock_timestamp()")
    office.wait("completed")
    assert office.pids() == {new.process.pid}


def test_a_workflow_that_raises_is_tried_until_the_limit(office):
    office.conn.execute("update baton.settings set max_failures = 3")
    worker = office.worker()
    office.start("raises", "null")
    run = office.wait("failed")
    assert run.error == {"reason": "max_failures", "error": "ValueError('on purpose')"}
    assert worker.text().count("failing: ValueError('on purpose')") == 3
    assert office.types() == ["run_created", "run_failed"], "nothing of a failed replay is written"


@pytest.mark.parametrize("what", ["record", "output", "error"])
def test_what_is_not_json_is_an_error_of_the_workflow(office, what):
    office.conn.execute("update baton.settings set max_failures = 2")
    worker = office.worker()
    office.start("plain", json.dumps(what))
    assert "TypeError" in office.wait("failed").error["error"]
    assert worker.process.poll() is None


def test_code_that_contradicts_the_log_is_noticed(office):
    office.conn.execute("update baton.settings set max_failures = 2")
    office.worker()
    office.start("impure", "null")
    wait_until(lambda: office.row().status == "suspended", "it waits for its signal")
    office.signal("other")
    assert office.wait("failed").error["error"] == "Diverged('event 2 is test.even 1, not test.odd')"


def test_an_orderly_stop_parks_the_replay_and_another_goes_on(office):
    first = office.worker(visibility=600)
    office.start_gated()
    first.wait_for("deciding")
    first.signal(signal.SIGTERM)
    office.open_gate(first)
    assert first.wait() == 0
    assert "parked r" in first.text() and first.text().endswith("stopped\n")
    assert office.types() == ["run_created", "test.before", "test.gated"], "what it had decided is kept"
    row = office.row()
    assert (row.failures, row.lapses, row.replay_ended) == (0, 0, True)
    second = office.worker()
    assert office.wait("completed").output == "through"
    assert [event.payload["pid"] for event in office.events()[1:4]] == [*[first.process.pid] * 2, second.process.pid]
    second.signal(signal.SIGTERM)  # with nothing in hand
    assert second.wait() == 0


def test_a_worker_comes_through_a_lost_connection(office):
    first = office.worker(visibility=600)
    office.start_gated()
    first.wait_for("deciding")
    office.conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'worker-1'"
                        " and datname = current_database()")
    wait_until(lambda: not office.backends(first), "its connections are gone")
    office.gate.touch()
    first.wait_for("database: ")
    office.wait("completed")  # recovered by itself, when it connects again
    assert office.types() == ["run_created", "test.before", "test.gated", "test.after", "run_completed"]
    assert len(office.incidents("replay_lost")) == 1
