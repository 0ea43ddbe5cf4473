"""docs/examples/worker_http.py and tools/sender, as processes: a start from the tick to the handled message."""

import signal
import uuid

import httpx
import pytest
from cluster import free_port
from conftest import ROOT, wait_until
from programs import SECRET, role, sender, worker

# Its initialisation, and messages that say so, wait until a gate opens.
GATED = """
import asyncio, os, signal, sys
import uvicorn, worker_http

handle = worker_http.handle

async def gate(name):
    while not os.path.exists(os.environ["FOLDER"] + "/" + name):
        await asyncio.sleep(0.02)

async def initialise():
    worker_http.log("it boots")
    await gate("boot")

async def gated(message):
    if message["payload"].get("gated"):
        await gate("work")
    await handle(message)

worker_http.initialise, worker_http.handle = initialise, gated
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
uvicorn.run(worker_http.app, port=int(os.environ["PORT"]))
"""


class Fleet:
    """One function with its sender and its worker processes."""

    def __init__(self, db, folder):
        self.db, self.folder, self.programs = db, folder, []
        self.conn = db.connect()
        self.worker_role = role(self.conn, "worker")
        self.conn.execute("update baton.settings set transport = 'outbox', backoff_base = '100 ms'")
        self.programs.append(sender(db, folder / "sender.log", user=role(self.conn, "sender")))
        self.sender = self.programs[0]
        self.sender.wait_for("started")

    def worker(self, **env):
        """A process that listens, and its URL."""
        port = free_port()
        program = worker(self.db, self.folder / f"worker-{port}.log", port, user=self.worker_role, FOLDER=self.folder, **env)
        self.programs.append(program)
        program.wait_for("running on")
        program.url = f"http://127.0.0.1:{port}/"
        return program

    def register(self, url, **more):
        arguments = {"url": url, "secret_name": "key", "debounce": "1 s", "heartbeat_timeout": "30 s", **more}
        named = ", ".join(f"{name} => %({name})s" for name in arguments)
        self.conn.execute(f"select baton.register_worker_function('orders', {named})", arguments)

    def tick(self):
        """The ids that ensure_workers reserved."""
        rows = self.conn.execute("select * from baton.ensure_workers()").fetchall()
        return [row.invocation_id for row in rows if row.outcome == "reserved"]

    def open_gate(self, name):
        (self.folder / name).touch()

    def function(self):
        return self.conn.execute("select * from baton.worker_functions").fetchone()

    def workers(self, where="true"):
        return self.conn.execute(f"select * from baton.workers as w where {where} order by w.started_at").fetchall()

    def wait_ready(self, tick=False, more_than=0):
        """Until more than so many workers were accepted; ticking, if asked to. The ids that the ticks reserved."""
        reserved = []

        def ready():
            if tick:
                reserved.extend(self.tick())
            return self.function().invocation_status == "ready" and len(self.workers()) > more_than
        wait_until(ready, "a worker is accepted", every=0.05)
        return reserved

    def request(self, url, body=None, token=SECRET):
        answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, trust_env=False)
        return answer.status_code, answer.json()

    def send(self, *payloads):
        for payload in payloads:
            self.conn.execute("select baton.send('orders', %s::jsonb)", (payload,))

    def left(self):
        return self.conn.execute("select count(*) from baton.messages").fetchone()[0]


@pytest.fixture
def fleet(db, tmp_path):
    fleet = Fleet(db, tmp_path)
    yield fleet
    for program in fleet.programs:
        program.end()


def test_from_the_tick_to_the_handled_message(fleet, server_log):
    program = fleet.worker()
    fleet.register(program.url)
    fleet.send('{"order": 1}', '{"order": 2}')
    [invocation_id] = fleet.tick()
    fleet.wait_ready()
    wait_until(lambda: fleet.left() == 0, "all messages are handled")
    [accepted] = fleet.workers()
    assert accepted.handshake and fleet.function().invocation_detail == "accept"
    program.wait_for('handled {"order": 2}')
    wait_until(lambda: fleet.workers()[0].last_heartbeat_at > accepted.started_at, "it sends heartbeats")

    # The same request again, and one by hand: there is a worker already.
    again = {"invocation_id": str(invocation_id), "function_name": "orders"}
    assert fleet.request(program.url, again) == (
        200, {"status": "ready", "reason": None, "worker_id": str(accepted.worker_id)})
    assert fleet.request(program.url) == (200, {"status": "ready"})
    # What leads to nothing.
    assert fleet.request(program.url, again, token="wrong") == (401, {"status": "unauthorised"})
    assert fleet.request(program.url, {"invocation_id": "not-a-uuid"}) == (400, {"status": "malformed"})
    assert fleet.request(program.url, [1]) == (400, {"status": "malformed"})
    status, answer = fleet.request(program.url, {"invocation_id": str(uuid.uuid4())})
    assert (status, answer["reason"]) == (409, "superseded")

    assert len(fleet.workers()) == 1 and fleet.tick() == []
    assert server_log.errors() == []
    assert SECRET not in program.text() + fleet.sender.text() + server_log.text()


def test_a_boot_longer_than_the_debounce_is_requested_once(fleet):
    program = fleet.worker(code=GATED)
    fleet.register(program.url)
    [invocation_id] = fleet.tick()
    program.wait_for("202 Accepted")
    # Duplicates reach the same process, and others come by hand.
    assert fleet.request(program.url, {"invocation_id": str(invocation_id)}) == (
        202, {"status": "starting", "invocation_id": str(invocation_id)})
    assert fleet.request(program.url) == (202, {"status": "pending"})

    def debounced():
        assert fleet.tick() == [], "no tick reserves another start"
        return fleet.conn.execute("select clock_timestamp() > last_invoked_at + 2 * debounce"
                                  " from baton.worker_functions").fetchone()[0]

    wait_until(debounced, "the debounce is long over", every=0.05)
    fleet.open_gate("boot")
    assert fleet.wait_ready(tick=True) == []
    assert len(fleet.workers()) == 1
    assert fleet.sender.text().count("acked") == 1 and program.text().count("it boots") == 1


def test_of_two_runtimes_that_boot_for_one_request_one_is_accepted(fleet):
    first, second = fleet.worker(code=GATED), fleet.worker(code=GATED)
    fleet.register(first.url)
    [invocation_id] = fleet.tick()
    first.wait_for("it boots")
    assert fleet.request(second.url, {"invocation_id": str(invocation_id)})[0] == 202
    fleet.open_gate("boot")
    fleet.wait_ready()
    wait_until(lambda: "rejected already_accepted" in first.text() + second.text(), "the other one is refused")
    assert len(fleet.workers()) == 1


def test_a_manual_start_reserves_for_itself(fleet):
    program = fleet.worker()
    fleet.register(program.url)
    status, answer = fleet.request(program.url)
    assert (status, answer["status"]) == (202, "starting")
    fleet.wait_ready()
    assert str(fleet.function().invocation_id) == answer["invocation_id"]
    assert fleet.function().invocation_transport is None and fleet.tick() == []


def test_a_manual_start_of_a_disabled_function_is_refused(fleet):
    program = fleet.worker()
    fleet.register(program.url)
    fleet.conn.execute("select baton.disable_worker_function('orders')")
    assert fleet.request(program.url) == (409, {"status": "disabled"})


def test_a_start_slower_than_the_pending_timeout_is_refused(fleet):
    program = fleet.worker(code=GATED)
    fleet.register(program.url, pending_timeout="3 s")
    fleet.tick()
    program.wait_for("it boots")
    wait_until(lambda: fleet.conn.execute("select clock_timestamp() >= invocation_expires_at from baton.worker_functions"
                                          ).fetchone()[0], "it has expired", every=0.05)
    fleet.open_gate("boot")
    program.wait_for("rejected")
    assert fleet.workers() == []


def test_a_request_that_comes_while_an_expired_start_goes_on_is_served_by_it(fleet):
    """The runtime accepts with the newest id that it was asked for, after one boot."""
    program = fleet.worker(code=GATED)
    fleet.register(program.url, pending_timeout="3 s")
    [first] = fleet.tick()
    wait_until(lambda: fleet.tick() or program.text().count("202 Accepted") > 1, "it is asked again", every=0.05)
    program.wait_for("202 Accepted", times=2)
    fleet.open_gate("boot")
    fleet.wait_ready()
    assert fleet.function().invocation_id != first
    assert len(fleet.workers()) == 1 and program.text().count("it boots") == 1


def test_a_failed_initialisation_dismisses_with_its_reason(fleet):
    code = """
import worker_http, uvicorn
async def initialise():
    raise RuntimeError("the model is missing")
worker_http.initialise = initialise
uvicorn.run(worker_http.app, port=int(worker_http.os.environ["PORT"]))
"""
    program = fleet.worker(code=code)
    fleet.register(program.url)
    fleet.tick()
    wait_until(lambda: fleet.function().invocation_error == "dismissed", "it is dismissed")
    assert fleet.function().invocation_detail == "RuntimeError('the model is missing')"
    assert fleet.workers() == []


def test_sigterm_while_initialising_dismisses_at_once(fleet):
    program = fleet.worker(BOOT_SECONDS=50)
    fleet.register(program.url)
    fleet.tick()
    program.wait_for("202 Accepted")
    program.signal()
    assert program.wait() == 0
    assert fleet.function().invocation_error == "dismissed"
    assert "shutting down" in fleet.function().invocation_detail


def test_an_acceptance_whose_connection_breaks_is_repeated(fleet):
    program = fleet.worker(code=GATED)
    fleet.register(program.url)
    fleet.tick()
    program.wait_for("202 Accepted")
    fleet.conn.execute("begin")
    fleet.conn.execute("select from baton.worker_functions for update")
    fleet.open_gate("boot")
    observer = fleet.db.connect()
    waiting = """select pid from pg_stat_activity where query like '%%accept_worker_invocation%%'
                 and cardinality(pg_blocking_pids(pid)) > 0 and datname = current_database() and pid <> %s"""
    [pid] = wait_until(lambda: observer.execute(waiting, (0,)).fetchone(), "the acceptance waits")
    observer.execute("select pg_terminate_backend(%s)", (pid,))
    wait_until(lambda: observer.execute(waiting, (pid,)).fetchone(), "it is repeated over a new connection")
    fleet.conn.execute("commit")
    fleet.wait_ready()
    assert len(fleet.workers()) == 1


def test_sigterm_drains_while_the_replacement_starts(fleet):
    old, new = fleet.worker(code=GATED), fleet.worker(code=GATED)
    fleet.open_gate("boot")
    fleet.register(old.url)
    fleet.tick()
    fleet.wait_ready()
    fleet.send('{"gated": true}')
    claimed = "select claimed_at from baton.messages"
    wait_until(lambda: fleet.conn.execute(claimed).fetchone()[0], "the message is in hand")
    fleet.register(new.url)
    old.signal()
    wait_until(lambda: fleet.workers("w.stopping_at is not null"), "the old one says that it is draining")
    fleet.wait_ready(tick=True, more_than=1)
    assert old.process.poll() is None, "the old one is still at work"
    assert fleet.workers("w.stopped_at is not null") == []
    fleet.open_gate("work")
    assert old.wait() == 0
    assert 'handled {"gated": true}' in old.text() and fleet.left() == 0
    assert len(fleet.workers()) == 2 and len(fleet.workers("w.stopped_at is null")) == 1
    assert fleet.function().failed_starts == 0


def test_a_killed_worker_is_replaced_after_its_heartbeat_timeout(fleet):
    old, new = fleet.worker(), fleet.worker()
    fleet.register(old.url, heartbeat_timeout="2 s")
    fleet.tick()
    fleet.wait_ready()
    wait_until(lambda: fleet.workers("w.last_heartbeat_at > w.started_at"), "it has sent a heartbeat")
    fleet.register(new.url, heartbeat_timeout="2 s")
    old.signal(signal.SIGKILL)
    old.wait()
    [reserved] = fleet.wait_ready(tick=True, more_than=1)
    first, second = fleet.workers()
    silent = fleet.conn.execute(
        "select last_invoked_at >= %s + heartbeat_timeout from baton.worker_functions", (first.last_heartbeat_at,))
    assert silent.fetchone()[0], "not before the timeout"
    assert (fleet.function().invocation_id, fleet.function().invocation_worker_id) == (reserved, second.worker_id)
    assert fleet.function().failed_starts == 0
    fleet.send('{"order": 3}')
    new.wait_for('handled {"order": 3}')


def test_a_deprecated_worker_ends_and_the_process_starts_another_one(fleet):
    program = fleet.worker()
    fleet.register(program.url)
    fleet.tick()
    fleet.wait_ready()
    fleet.conn.execute("select baton.deprecate_workers('orders')")
    wait_until(lambda: fleet.workers("w.stopped_at is not null"), "it stops")
    fleet.send('{"order": 4}')
    assert fleet.tick() == []
    fleet.conn.execute("select baton.enable_worker_function('orders')")
    fleet.wait_ready(tick=True, more_than=1)
    program.wait_for('handled {"order": 4}')
    assert len({row.worker_id for row in fleet.workers()}) == 2


def test_a_message_longer_than_its_visibility_is_extended_and_handled_once(fleet):
    fleet.conn.execute("update baton.settings set visibility = '2 s'")
    program = fleet.worker(code=GATED)
    fleet.open_gate("boot")
    fleet.register(program.url)
    fleet.send('{"gated": true}')
    fleet.tick()
    wait_until(lambda: fleet.conn.execute("select claimed_at from baton.messages").fetchone()[0], "the message is in hand")

    def longer():
        assert fleet.conn.execute("select * from baton.claim('orders')").fetchall() == [], "nobody else gets it"
        return fleet.conn.execute("select clock_timestamp() > claimed_at + interval '2.5 s' from baton.messages").fetchone()[0]

    wait_until(longer, "its claim would have run out", every=0.05)
    fleet.open_gate("work")
    wait_until(lambda: fleet.left() == 0, "it is handled")
    assert program.text().count("handled") == 1


def test_the_database_comes_back_and_the_worker_goes_on(make_cluster, make_database, tmp_path):
    cluster = make_cluster()
    fleet = Fleet(make_database(cluster), tmp_path)
    try:
        program = fleet.worker()
        fleet.register(program.url, heartbeat_timeout="30 s")
        fleet.tick()
        fleet.wait_ready()
        cluster.restart("immediate")
        program.wait_for("database:")
        fleet.conn = fleet.db.connect()
        fleet.send('{"order": 5}')
        program.wait_for('handled {"order": 5}')
        assert len(fleet.workers()) == 1
    finally:
        for program in fleet.programs:
            program.end()


def test_while_the_database_is_away_the_handler_answers_502(make_cluster, make_database, tmp_path):
    """Which dismisses nothing: another runtime may be starting under that id."""
    cluster = make_cluster()
    fleet = Fleet(make_database(cluster), tmp_path)
    try:
        program = fleet.worker()
        cluster.stop()
        assert fleet.request(program.url, {"invocation_id": str(uuid.uuid4())})[0] == 502
    finally:
        for program in fleet.programs:
            program.end()


def test_it_is_short_enough_to_be_read():
    assert len((ROOT / "docs/examples/worker_http.py").read_text().splitlines()) < 200
