"""The server crashes between a reservation and its delivery, and the clock is set back: each costs a bounded time.

One cluster, crashed again and again, with pg_net's stand-in (whose tables are unlogged, as pg_net's are) and without a
worker of it: a test reads the queue itself. The clock is the test's own, so bounds are counted, not waited for.
"""

import itertools
from datetime import timedelta

import psycopg
import pytest
import standin
from cluster import Cluster
from conftest import TEST_CLOCK
from starts import (
    accept, advance, call, deliveries, function, incidents, new_id, one, reconcile, register, reserved, startup, worker,
)

TICK = timedelta(seconds=5)
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def crashing():
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def app(crashing, make_database):
    """A database with the package, the test's clock, and .crash()."""
    database = make_database(crashing, name=f"app_{next(numbers)}")
    database.install(TEST_CLOCK)

    def crash():
        """All connections are gone; a new one."""
        crashing.restart(mode="immediate")
        return database.connect()

    database.crash = crash
    return database


def pg_net(database):
    conn = database.connect()
    standin.install(conn)
    conn.execute("update baton.settings set transport = 'pg_net'")
    return database.connect()


def queue(conn):
    """What waits in pg_net's queue: (request id, invocation id as text)."""
    return [(row.id, row.body["invocation_id"]) for row in conn.execute(
        "select id, convert_from(body, 'utf8')::jsonb as body from net.http_request_queue order by id")]


def tick(conn):
    rows = call(conn, "tick")
    assert [row for row in rows if row.error] == []
    return {row.part: row.changed for row in rows}


def respond(conn, request_id, status_code):
    conn.execute("insert into net._http_response (id, status_code) values (%s, %s)", (request_id, status_code))


@pytest.mark.parametrize("debounce, bound", [("6 s", 60), ("45 s", 90)], ids=["pending timeout", "throttle"])
def test_requests_that_a_crash_took_are_made_again_within_the_bound(app, debounce, bound):
    """Whichever is longer, the pending timeout or the throttle, and one tick; nobody is stopped for it."""
    conn = pg_net(app)
    names = ["a", "b", "c"]
    for name in [*names, "other"]:
        register(conn, name, debounce=debounce, pending_timeout="60 s", heartbeat_timeout="1 h")
    survivor = new_id()
    assert accept(conn, reserved(conn)["other"], survivor, "other") == "accepted"
    old = {name: function(conn, name).invocation_id for name in names}
    invoked_at = {name: function(conn, name).last_invoked_at for name in names}
    assert len(queue(conn)) == 4

    conn = app.crash()
    assert queue(conn) == []
    assert {startup(conn, name).startup_state for name in names} == {"pending"}
    again = {}
    while len(again) < 3:
        now = advance(conn, TICK)
        assert now <= invoked_at["a"] + timedelta(seconds=bound) + TICK
        tick(conn)
        sent = {invocation_id for _, invocation_id in queue(conn)}
        again |= {name: now for name in names if str(function(conn, name).invocation_id) in sent and name not in again}
    assert all(again[name] - invoked_at[name] >= timedelta(seconds=bound) for name in names)
    assert len(queue(conn)) == 3

    for name in names:
        assert reconcile(conn, old[name], function_name=name) == "superseded"
        assert accept(conn, old[name], new_id(), name) == "superseded"
        assert accept(conn, function(conn, name).invocation_id, new_id(), name) == "accepted"
    assert one(conn, "heartbeat", worker_id=survivor).outcome == "active"
    assert worker(conn, survivor).stopped_at is None
    assert {startup(conn, name).startup_state for name in names} == {"ready"}
    for _ in range(5):
        advance(conn, TICK)
        tick(conn)
    assert len(queue(conn)) == 3


def test_a_reservation_that_a_crash_rolled_back_never_was(app):
    conn = pg_net(app)
    register(conn)
    conn.execute("begin")
    assert reserved(conn)
    conn = app.crash()
    assert (function(conn).invocation_id, queue(conn)) == (None, [])
    assert reserved(conn)


def test_over_the_outbox_a_crash_costs_nothing_or_one_claim(app):
    conn = app.connect()
    for name in ("waiting", "claimed"):
        register(conn, name)
        assert reserved(conn)
        if name == "waiting":
            [row] = call(conn, "claim_deliveries")
            assert one(conn, "fail", message_id=row.message_id, delivery=row.delivery, error="no answer",
                       delay="10 s").outcome == "failed"
    ids = {name: str(function(conn, name).invocation_id) for name in ("waiting", "claimed")}
    [before] = call(conn, "claim_deliveries")
    assert before.payload["body"]["invocation_id"] == ids["claimed"]

    conn = app.crash()
    tick(conn)
    assert len(deliveries(conn)) == 2
    advance(conn, "10 s")
    [row] = call(conn, "claim_deliveries")
    assert (row.payload["body"]["invocation_id"], row.failures, row.lapses) == (ids["waiting"], 1, 0)
    advance(conn, "20 s")
    [row] = call(conn, "claim_deliveries")
    assert (row.payload["body"]["invocation_id"], row.failures, row.lapses) == (ids["claimed"], 0, 1)
    assert one(conn, "ack", message_id=before.message_id, delivery=before.delivery).outcome == "lost"
    assert accept(conn, row.payload["body"]["invocation_id"], new_id(), "claimed") == "accepted"


def test_a_delivery_that_was_being_sent_comes_again_and_starts_nothing_twice(app):
    """The request arrived, the worker was accepted, and the server went before the sender's ack."""
    conn = app.connect()
    register(conn)
    [invocation_id] = reserved(conn).values()
    [claimed] = call(conn, "claim_deliveries")
    assert accept(conn, invocation_id, new_id()) == "accepted"
    conn = app.crash()
    assert reconcile(conn, invocation_id) == "ready"
    advance(conn, "30 s")
    assert call(conn, "claim_deliveries") == []
    assert deliveries(conn) == []
    assert one(conn, "ack", message_id=claimed.message_id, delivery=claimed.delivery).outcome == "lost"


@pytest.mark.parametrize("before", [1, 3], ids=["one request", "three requests"])
def test_request_ids_that_begin_anew_end_no_other_start(app, before):
    """A tick comes first, as it does when tick alone starts workers."""
    conn = pg_net(app)
    names = [f"f-{n}" for n in range(before)]
    for name in names:
        register(conn, name)
    tick(conn)
    assert [request_id for request_id, _ in queue(conn)] == list(range(1, before + 1))
    conn = app.crash()
    for name in names:
        register(conn, "new-" + name)
    tick(conn)
    assert [request_id for request_id, _ in queue(conn)] == list(range(1, before + 1))
    assert len(incidents(conn, "request_ids_forgotten")) == 1
    for request_id in range(1, before + 1):
        respond(conn, request_id, 500)
    assert tick(conn)["responses"] == before
    assert {function(conn, name).invocation_status for name in names} == {"pending"}
    assert {function(conn, "new-" + name).invocation_error for name in names} == {"dismissed"}
    assert len(incidents(conn, "request_ids_forgotten")) == 1


def test_an_id_given_out_again_before_the_first_tick_is_its_last_owners(app):
    conn = pg_net(app)
    register(conn, "old")
    register(conn, "old-too")
    assert len(reserved(conn)) == 2
    conn = app.crash()
    advance(conn, "1 s")
    register(conn, "new")
    register(conn, "new-too")
    assert len(reserved(conn)) == 2
    for request_id in (1, 2):
        respond(conn, request_id, 404)
    assert tick(conn)["responses"] == 2
    assert {function(conn, name).invocation_status for name in ("old", "old-too")} == {"pending"}
    assert {function(conn, name).invocation_status for name in ("new", "new-too")} == {"failed"}


def test_a_clock_set_back_delays_by_the_step_and_loses_nothing(app):
    """One hour back: what was pending may still be accepted, what was ready stays so, what fails is started later."""
    conn = app.connect()
    register(conn, "pending")
    register(conn, "ready", heartbeat_timeout="30 s")
    register(conn, "throttled")
    ids = reserved(conn)
    [claimed] = call(conn, "claim_deliveries", max_messages=1)
    worker_id = new_id()
    assert accept(conn, ids["ready"], worker_id, "ready") == "accepted"
    assert one(conn, "dismiss_worker_invocation", function_name="throttled", invocation_id=ids["throttled"],
               reason="test").outcome == "dismissed"

    advance(conn, "-1 h")
    tick(conn)
    states = {name: startup(conn, name).startup_state for name in ids}
    assert states == {"pending": "pending", "ready": "ready", "throttled": "throttled"}
    assert one(conn, "ack", message_id=claimed.message_id, delivery=claimed.delivery).outcome == "acked"
    assert one(conn, "heartbeat", worker_id=worker_id).outcome == "active"
    advance(conn, "25 s")
    assert startup(conn, "ready").startup_state == "ready"
    assert reserved(conn) == {}
    advance(conn, "5 s")
    assert reserved(conn) == {}, "the step still delays"
    advance(conn, "1 h 30 s")
    assert set(reserved(conn)) == {"pending", "ready", "throttled"}
    assert {name: function(conn, name).failed_starts for name in ids} == {"pending": 1, "ready": 0, "throttled": 1}
    assert incidents(conn, "start_crashed") == []
    assert reconcile(conn, ids["pending"], function_name="pending") == "superseded"


def test_a_clock_set_back_still_lets_the_pending_worker_in(app):
    conn = app.connect()
    register(conn)
    [invocation_id] = reserved(conn).values()
    advance(conn, "-1 h")
    assert reconcile(conn, invocation_id) == "start"
    assert accept(conn, invocation_id, new_id()) == "accepted"
    assert startup(conn).startup_state == "ready"


def test_the_stand_ins_tables_really_are_lost_in_a_crash(app):
    conn = pg_net(app)
    assert conn.execute("select net.http_post('http://127.0.0.1:9')").fetchone()[0] == 1
    with pytest.raises(psycopg.OperationalError):
        app.crash()
        conn.execute("select 1")
    conn = app.connect()
    assert queue(conn) == []
    assert conn.execute("select net.http_post('http://127.0.0.1:9')").fetchone()[0] == 1
