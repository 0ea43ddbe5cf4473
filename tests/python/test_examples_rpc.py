"""docs/examples/worker_rpc.py and rpc.sql over HTTP, against tests/standin/postgrest.py in PostgREST's place."""

import json
import re
import signal

import httpx
import pytest
from cluster import free_port
from conftest import ROOT, wait_until
from psycopg.types.json import Jsonb
from programs import EXAMPLES, Program, Shop
from runs import granted
from starts import call, one
from tasks import create, replay, short_way, write_as_before

WORKER, USER = "token-of-a-worker", "token-of-a-user"
CODE = """
import os, signal, time
import psycopg, worker_rpc
from worker_rpc import WORKFLOWS

FOLDER = os.environ["FOLDER"]

def gated(value, key):
    with open(FOLDER + "/marks", "a") as file:
        file.write(f"{key} {os.getpid()}\\n")
    while not os.path.exists(FOLDER + "/gate"):
        time.sleep(0.02)
    return value

def flaky(value, key):
    with open(FOLDER + "/tries", "a") as file:
        file.write("x")
    if os.path.getsize(FOLDER + "/tries") < 3:
        raise ValueError("not yet")
    return "third time"

def broken(value, key):
    raise ValueError("never")

WORKFLOWS.update(gate=[gated], retries=[flaky], fails=[broken])
for name in os.environ.get("FORGET", "").split():
    del WORKFLOWS[name]

class Lossy(worker_rpc.Baton):  # every answer is lost once: each verb is carried out twice
    def call(self, verb, **arguments):
        if verb == "dispatch_tasks" and (owner := os.environ.pop("OWNER_URL", None)):  # the claim runs out before it
            with psycopg.connect(owner) as db:
                db.execute("update baton.messages set visible_at = baton._now()")
        if os.environ.get("LOSSY") and verb != "claim":
            super().call(verb, **arguments)
        return super().call(verb, **arguments)

worker_rpc.Baton = Lossy
worker = worker_rpc.Worker()
signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
worker.work()
"""


class Office(Shop):
    def __init__(self, db, folder):
        super().__init__(db, folder)
        for name in ("authenticator", "app_worker", "app_user"):  # roles are the cluster's: they may be there
            if self.conn.execute("select from pg_roles where rolname = %s", [name]).fetchall():
                self.conn.execute(f"drop role {name}")
        db.psql("-q", "-f", EXAMPLES / "rpc.sql")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.server = Program(folder / "standin.log", [ROOT / "tests/standin/postgrest.py",
                                                       db.cluster.dsn(db.name, user="authenticator"), port,
                                                       f"{WORKER}=app_worker", f"{USER}=app_user"], {})
        self.server.wait_for("ready")

    def close(self):
        super().close()
        self.server.end()
        self.conn.execute("drop owned by authenticator, app_worker, app_user cascade")
        self.conn.execute("drop role authenticator, app_worker, app_user")

    def post(self, name, token, profile="baton", **arguments):
        return httpx.post(f"{self.url}/rpc/{name}", json=arguments, trust_env=False,
                          headers={"Authorization": f"Bearer {token}", "Content-Profile": profile})

    def worker(self, visibility=60, **env):
        program = Program(self.folder / f"worker-{len(self.workers) + 1}.log", ["-c", CODE], {
            "BATON_URL": self.url, "BATON_TOKEN": WORKER, "POLL_SECONDS": "0.05", "UNKNOWN_SECONDS": "0.3",
            "VISIBILITY_SECONDS": str(visibility), "FOLDER": str(self.folder),
            "PYTHONPATH": str(EXAMPLES), **env})
        self.workers.append(program)
        program.wait_for("ready")
        return program

    def start(self, workflow_name, input=None, run_id="r"):
        self.conn.execute("select baton.start_run(%s, %s::jsonb, %s)", (workflow_name, json.dumps(input), run_id))

    def marks(self):
        return [(key, int(pid)) for key, pid in map(str.split, self.lines())]


@pytest.fixture
def office(db, tmp_path):
    office = Office(db, tmp_path)
    yield office
    office.close()


@pytest.mark.parametrize("lossy", ["", "yes"], ids=["as it is", "every answer is lost once"])
def test_an_order_is_placed_and_worked_off(office, lossy, server_log):
    office.worker(LOSSY=lossy)
    office.worker(LOSSY=lossy)
    order = {"order_number": 7, "amount": 12, "items": ["a", "b"]}
    assert [office.post("place_order", USER, "api", **order).json() for _ in range(2)] == ["created", "exists"]
    assert office.wait("completed", "order-7").output == {
        "payment": "order-7/charge", "boxes": ["box of a", "box of b"]}
    types = [event.type for event in office.conn.execute("select * from baton.read_events('order-7')")]
    assert types.count("task_completed") == 2 and types.count("step_created") == 2
    wait_until(lambda: not office.conn.execute("select from baton.messages").fetchall(), "no message is left")
    assert server_log.errors() == []


def test_killed_in_a_body_another_runs_it_again(office):
    first = office.worker(visibility=1)
    office.start("gate", "through")
    office.wait_marks(1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = office.worker(visibility=1)
    office.wait_marks(2)
    office.open_gate()
    assert office.wait("completed").output == "through"
    assert office.marks() == [("r/gated", first.process.pid), ("r/gated", second.process.pid)]


def test_a_claim_that_runs_out_before_the_body_is_given_out_is_taken_up_again(office):
    office.open_gate()
    worker = office.worker(visibility=600, OWNER_URL=office.db.dsn)
    office.start("gate", "on time")
    wait_until(lambda: "ended r" in worker.text() or office.ended(), "the message is settled")
    assert (office.run().status, office.run().output) == ("completed", "on time")
    assert len(office.marks()) == 1
    assert office.conn.execute("select from baton.incidents").fetchall() == []


def test_a_long_body_keeps_its_lease(office):
    for _ in range(2):
        office.worker(visibility=2)
    office.start("gate", "through")
    office.wait_marks(1)
    until = office.conn.execute("select clock_timestamp() + '2.5 s' as t").fetchone().t
    wait_until(lambda: office.conn.execute("select clock_timestamp() > %s", [until]).fetchone()[0], "a claim would have run out", every=0.1)
    office.open_gate()
    assert office.wait("completed").output == "through"
    assert len(office.marks()) == 1


@pytest.mark.parametrize("written", ["in one event", "as before"])
def test_a_run_that_another_worker_took_the_short_way_with_goes_on(office, written):
    office.start("order", {"items": ["a"]})
    receipt, epoch = granted(office.conn, queue_name="default")
    create(office.conn, epoch, "charge")
    replay(office.conn, receipt, epoch)
    arguments = short_way(epoch, step_slug="charge", next_step_slug="pack")
    advanced = one(office.conn, "advance_run", **{**arguments, "next_input": Jsonb({"payment": "paid", "items": ["a"]})})
    assert advanced.outcome == "advanced"
    if written == "as before":
        write_as_before(office.conn)
    call(office.conn, "park", message_id=receipt.message_id, delivery=receipt.delivery, force=True)
    office.worker()
    assert office.wait("completed").output == {"payment": "paid", "boxes": ["box of a"]}


def test_failing_bodies_unknown_workflows_and_an_orderly_stop(office):
    office.conn.execute("update baton.settings set max_failures = 1000")
    old = office.worker(FORGET="retries")
    office.start("retries", None)
    old.wait_for("failing: unknown workflow: retries")
    old.signal()
    assert old.wait() == 0
    office.worker()
    office.start("fails", None, "f")
    assert office.wait("completed").output == "third time"
    assert office.wait("failed", "f").error["step_slug"] == "broken"


def test_who_may_call_what(office):
    order = {"order_number": 7, "amount": 12, "items": ["a"]}
    assert office.post("place_order", USER, "api", **{**order, "amount": 0}).json()["code"] == "22023"
    assert office.post("place_order", "no such token", "api", **order).status_code == 401
    for token, verb, arguments in (
        (USER, "start_run", {"workflow_name": "w", "input": None}), (USER, "claim", {"queue_name": "default"}),
        (WORKER, "tick", {}), (WORKER, "grant_usage", {"role_name": "app_user", "kind": "worker"}),
        (WORKER, "release_replay", {"run_id": "r"}), (WORKER, "_now", {}),
    ):
        answer = office.post(verb, token, **arguments)
        assert (answer.status_code, answer.json()["code"]) == (403, "42501"), verb
    assert office.post("place_order", WORKER, "api", **order).json()["code"] == "42501"


def test_a_superseded_replay_is_told_by_its_code(office):
    office.start("gate")
    (message,) = office.post("claim", WORKER, queue_name="default").json()
    receipt = {"message_id": message["message_id"], "delivery": message["delivery"]}
    first, second = (office.post("begin_replay", WORKER, **receipt).json() for _ in range(2))
    assert [first["outcome"], second["outcome"]] == ["granted", "granted"]
    late = office.post("create_step", WORKER, run_id="r", replay_epoch=first["replay_epoch"], step_slug="s", inputs=[1])
    assert (late.status_code, late.json()["code"]) == (400, "PB001")
    assert re.search("superseded", late.json()["message"])
    created = office.post("create_step", WORKER, run_id="r", replay_epoch=second["replay_epoch"], step_slug="s", inputs=[1])
    assert created.json() == {"outcome": "created"}
