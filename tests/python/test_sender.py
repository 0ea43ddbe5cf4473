"""tools/sender, as a process, over real HTTP: what it delivers, what it repeats, what it gives up, and how it ends."""

import signal
import threading

import pytest
from cluster import free_port
from conftest import wait_blocked, wait_until
from programs import SECRET, Endpoint, role, sender


@pytest.fixture
def endpoint():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def start_sender(tmp_path):
    """start_sender(database, *options, secret=..., env=...) -> the running program, with a sender's grants alone."""
    started = []

    def start(database, *options, **kw):
        user = role(database.connect(), "sender")
        started.append(sender(database, tmp_path / f"sender-{len(started)}.log", *options, user=user, **kw))
        started[-1].wait_for("started")
        return started[-1]

    yield start
    for program in started:
        program.end()


def register(conn, url, *functions, secret_name="key", **more):
    conn.execute("update baton.settings set transport = 'outbox', backoff_base = '100 ms'")
    for function in functions or ("orders",):
        arguments = {"function_name": function, "url": url, "secret_name": secret_name, **more}
        named = ", ".join(f"{name} => %({name})s" for name in arguments)
        conn.execute(f"select baton.register_worker_function({named})", arguments)


def start(conn):
    """A tick's part; the ids that were reserved."""
    rows = conn.execute("select * from baton.ensure_workers()").fetchall()
    return [str(row.invocation_id) for row in rows if row.outcome == "reserved"]


def invocation(conn, function="orders"):
    return conn.execute("select * from baton.worker_functions where function_name = %s", (function,)).fetchone()


def deliveries(conn):
    return conn.execute("select * from baton.messages where queue_name = 'baton.deliveries'").fetchall()


def wait_delivered(conn):
    wait_until(lambda: not deliveries(conn), "no delivery is left")


def test_a_delivery_is_posted_once_with_its_credential_and_acked(conn, db, endpoint, start_sender):
    program = start_sender(db)
    register(conn, endpoint.url + "/orders")
    [invocation_id] = start(conn)
    wait_delivered(conn)
    [request] = endpoint.requests
    assert request.path == "/orders"
    assert request.body == {"invocation_id": invocation_id, "function_name": "orders"}
    assert request.headers["Authorization"] == f"Bearer {SECRET}"
    assert request.headers["Idempotency-Key"] == invocation_id
    assert request.headers["Content-Type"] == "application/json"
    assert invocation(conn).invocation_status == "pending"
    program.wait_for("HTTP 202, acked")


def test_without_a_secret_name_no_credential_is_sent(conn, db, endpoint, start_sender):
    start_sender(db)
    register(conn, endpoint.url, secret_name=None)
    start(conn)
    wait_delivered(conn)
    assert endpoint.requests[0].headers["Authorization"] is None


def test_a_notification_wakes_it_between_two_polls(conn, db, endpoint, start_sender):
    conn.execute("update baton.settings set message_notify = true")
    program = start_sender(db, "--poll", "3600")
    observer = db.connect()
    wait_until(lambda: observer.execute(
        "select from pg_stat_activity as l, pg_stat_activity as c"
        " where l.application_name = 'pg_baton sender' and l.query = 'listen baton_messages' and l.state = 'idle'"
        " and c.application_name = 'pg_baton sender' and c.query like '%%claim_deliveries%%' and c.state = 'idle'"
        " and c.query_start > l.state_change and l.datname = current_database() and c.datname = l.datname",
        ).fetchone() is not None, "the sender listens, and has looked since")
    register(conn, endpoint.url)
    start(conn)
    program.wait_for("acked")


def test_502_is_tried_again_with_back_off_until_it_arrives(conn, db, endpoint, start_sender):
    endpoint.answer = lambda _: 502 if len(endpoint.requests) < 4 else 202
    program = start_sender(db)
    register(conn, endpoint.url)
    [invocation_id] = start(conn)
    wait_delivered(conn)
    assert endpoint.ids() == [invocation_id] * 4
    assert program.text().count("HTTP 502, failed") == 3
    assert invocation(conn).invocation_status == "pending"


@pytest.mark.parametrize("status, seconds", [
    (307, 10), (408, 10), (409, 10), (502, 10), (520, 10), (523, 10), (504, 30), (524, 30)])
def test_what_proves_nothing_dismisses_nothing(conn, db, endpoint, start_sender, status, seconds):
    """Back-off starts at 10 s here; where the request may have arrived, --unsure-delay decides."""
    endpoint.answer = lambda _: status
    start_sender(db, "--unsure-delay", "30")
    register(conn, endpoint.url)
    conn.execute("update baton.settings set backoff_base = '10 s'")
    start(conn)
    wait_until(lambda: deliveries(conn)[0].failures, "a failure is counted")
    [message] = deliveries(conn)
    assert message.last_error == f"HTTP {status}"
    between = conn.execute("select visible_at - created_at >= %s * interval '0.8 s' and visible_at - now() <= %s * interval '1.2 s'"
                           " from baton.messages", (seconds, seconds)).fetchone()
    assert between == (True,)
    assert invocation(conn).invocation_status == "pending"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500, 501, 503, 525])
def test_a_clear_refusal_dismisses_the_start(conn, db, endpoint, start_sender, status):
    endpoint.answer = lambda _: status
    start_sender(db)
    register(conn, endpoint.url)
    start(conn)
    wait_until(lambda: invocation(conn).invocation_error == "dismissed", "it is dismissed")
    assert invocation(conn).invocation_detail == f"HTTP {status}"
    assert invocation(conn).failed_starts == 1
    assert len(endpoint.requests) == 1
    assert not deliveries(conn)


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}/", "http://no-such-host.invalid/", "http://127.0.0.1:123456/",
                                 "http://127.0.0.1:0x1/", "http://[::1/", "http://xn--\u00e9\ufffd.invalid/"])
def test_an_address_that_cannot_be_reached_dismisses_the_start(conn, db, start_sender, url):
    start_sender(db)
    register(conn, url.format(port=free_port()))
    start(conn)
    wait_until(lambda: invocation(conn).invocation_error == "dismissed", "it is dismissed")
    assert invocation(conn).invocation_detail.startswith("cannot ")


@pytest.mark.parametrize("secret", [
    None, "", " ", f"{SECRET}\nX-Injected: yes", f"{SECRET}\r", f"{SECRET}\u00e9", f"two {SECRET}"])
def test_without_a_usable_secret_nothing_is_sent(conn, db, endpoint, start_sender, server_log, secret):
    program = start_sender(db, secret=secret)
    register(conn, endpoint.url)
    start(conn)
    wait_until(lambda: invocation(conn).invocation_error == "dismissed", "it is dismissed")
    assert "'key'" in invocation(conn).invocation_detail
    assert endpoint.requests == []
    assert SECRET not in program.text() + server_log.text()


def test_a_secret_is_read_from_its_file_at_each_send(conn, db, endpoint, start_sender, tmp_path):
    (tmp_path / "key").write_text("from-a-file\n")
    (tmp_path.parent / "outside").write_text("not-for-you")
    start_sender(db, "--secrets-dir", tmp_path)
    register(conn, endpoint.url)
    start(conn)
    wait_delivered(conn)
    (tmp_path / "key").write_text("changed")
    register(conn, endpoint.url, "second")
    start(conn)
    wait_delivered(conn)
    assert [r.headers["Authorization"] for r in endpoint.requests] == ["Bearer from-a-file", "Bearer changed"]
    register(conn, endpoint.url, "third", secret_name="../outside")
    start(conn)
    wait_until(lambda: invocation(conn, "third").invocation_error == "dismissed", "it is dismissed")


def test_no_answer_in_time_is_not_asked_for_twice_while_the_start_goes_on(conn, db, endpoint, start_sender):
    released = threading.Event()
    endpoint.answer = lambda _: released.wait(20) and 202
    program = start_sender(db, "--timeout", "2", "--unsure-delay", "30")
    register(conn, endpoint.url)
    [invocation_id] = start(conn)
    program.wait_for("no answer in time, failed")
    assert invocation(conn).invocation_status == "pending"
    assert conn.execute("select visible_at > created_at + interval '30 s' from baton.messages").fetchone() == (True,)
    accept = "select outcome from baton.accept_worker_invocation('orders', %s, gen_random_uuid())"
    assert conn.execute(accept, (invocation_id,)).fetchone() == ("accepted",)
    assert not deliveries(conn), "the acceptance takes the delivery away"
    released.set()
    wait_until(endpoint.ids, "the request is read")
    assert endpoint.ids() == [invocation_id]


def test_no_answer_in_time_is_asked_for_again_after_the_delay(conn, db, endpoint, start_sender):
    released = threading.Event()
    endpoint.answer = lambda _: 202 if len(endpoint.requests) > 1 else released.wait(20) and 202
    start_sender(db, "--timeout", "2", "--unsure-delay", "0.5")
    register(conn, endpoint.url)
    [invocation_id] = start(conn)
    wait_delivered(conn)
    released.set()
    assert endpoint.ids() == [invocation_id] * 2


def test_a_redirect_is_not_followed(conn, db, endpoint, start_sender):
    other = Endpoint()
    endpoint.answer = lambda _: (307, {"Location": other.url}) if len(endpoint.requests) == 1 else 202
    start_sender(db)
    register(conn, endpoint.url)
    start(conn)
    wait_delivered(conn)
    assert len(endpoint.requests) == 2 and other.requests == []
    other.close()


def test_no_secret_in_any_output(conn, db, endpoint, start_sender, server_log):
    """Over a delivery, a refusal, a repetition and a crash of its connection."""
    again = lambda: 502 if len(endpoint.requests) < 6 else 202  # noqa: E731
    endpoint.answer = lambda request: {"/good": 202, "/bad": 500, "/again": again()}[request.path]
    program = start_sender(db)
    for name in ("good", "bad", "again"):
        register(conn, f"{endpoint.url}/{name}", name)
    start(conn)
    conn.execute("select pg_terminate_backend(pid) from pg_stat_activity"
                 " where application_name = 'pg_baton sender' and datname = current_database()")
    wait_delivered(conn)
    program.signal()
    assert program.wait() == 0
    assert SECRET in endpoint.requests[0].headers["Authorization"]
    dump = "\n".join(str(conn.execute(f"select to_jsonb(t) from baton.{table} t").fetchall())
                     for table in ("messages", "dead_messages", "incidents", "worker_functions", "incident_log"))
    assert SECRET not in program.text()
    assert SECRET not in server_log.text()
    assert SECRET not in dump and "Bearer" not in dump


def test_sigterm_finishes_what_is_in_flight_and_claims_nothing_more(conn, db, endpoint, start_sender):
    released = threading.Event()
    endpoint.answer = lambda _: released.wait(20) and 202
    program = start_sender(db, "--concurrency", "2")
    register(conn, endpoint.url, "one", "two", "three")
    start(conn)
    wait_until(lambda: len(endpoint.requests) == 2, "two are in flight")
    program.signal()
    program.wait_for("stopping, 2 in flight")
    released.set()
    assert program.wait() == 0
    [left] = deliveries(conn)
    assert (left.claimed_at, left.failures, left.lapses) == (None, 0, 0)
    assert len(endpoint.requests) == 2


def test_what_was_claimed_and_not_sent_is_parked(conn, db, endpoint, start_sender):
    """Its claim is held where it has claimed the message and asks whether the start is still pending."""
    program = start_sender(db)
    register(conn, endpoint.url)
    conn.execute("begin")
    start(conn)
    holder, observer = db.session("holder"), db.connect()
    holder.run("begin")
    holder.start("lock table baton.worker_functions in access exclusive mode")
    wait_blocked(observer, holder, by=conn.info.backend_pid)
    conn.execute("commit")
    holder.result()
    wait_until(lambda: observer.execute(
        "select 1 from pg_stat_activity where application_name = 'pg_baton sender' and datname = current_database()"
        " and %s = any (pg_blocking_pids(pid))", (holder.pid,)).fetchone(), "its claim waits")
    program.signal(signal.SIGINT)
    program.wait_for("stopping")
    holder.run("commit")
    assert program.wait() == 0
    [left] = deliveries(conn)
    assert left.delivery is not None, "it was claimed"
    assert (left.claimed_at, left.failures, left.lapses) == (None, 0, 0)
    assert conn.execute("select visible_at <= now() from baton.messages").fetchone()[0]
    assert endpoint.requests == []


def test_a_killed_sender_s_delivery_is_repeated_after_the_visibility_timeout(conn, db, endpoint, start_sender):
    conn.execute("update baton.settings set visibility = '2 s'")
    released = threading.Event()
    endpoint.answer = lambda _: 202 if len(endpoint.requests) > 1 else released.wait(20) and 202
    first = start_sender(db)
    register(conn, endpoint.url)
    [invocation_id] = start(conn)
    wait_until(lambda: endpoint.requests, "it is in flight")
    first.signal(signal.SIGKILL)
    start_sender(db)
    wait_delivered(conn)
    released.set()
    assert endpoint.ids() == [invocation_id] * 2


def test_a_crash_of_the_server_is_survived(make_cluster, make_database, endpoint, start_sender):
    cluster = make_cluster()
    database = make_database(cluster)
    released = threading.Event()
    endpoint.answer = lambda _: 202 if len(endpoint.requests) > 1 else released.wait(20) and 202
    program = start_sender(database)
    conn = database.connect()
    register(conn, endpoint.url)
    [first] = start(conn)
    wait_until(lambda: endpoint.requests, "it is in flight")
    cluster.stop("immediate")
    released.set()
    program.wait_for("database:")
    cluster.start()
    conn = database.connect()
    wait_delivered(conn)
    register(conn, endpoint.url, "second")
    [second] = start(conn)
    wait_delivered(conn)
    assert endpoint.ids() == [first, second], "what it had sent before the crash it settled after, and never sent again"


def test_it_can_be_stopped_while_the_database_is_away(make_cluster, make_database, endpoint, start_sender):
    cluster = make_cluster()
    program = start_sender(make_database(cluster))
    cluster.stop()
    program.wait_for("database:")
    program.signal()
    assert program.wait() == 0


def test_after_three_expired_invocations_the_fourth_is_delivered_once(clock_db, endpoint, start_sender):
    conn = clock_db.connect()
    conn.execute("select baton_test.set_clock(clock_timestamp())")
    register(conn, endpoint.url)
    ids = []
    for _ in range(4):
        ids += start(conn)
        conn.execute("select baton_test.advance('60 s')" if len(ids) < 4 else "select 1")
    assert len(set(ids)) == 4
    program = start_sender(clock_db)
    wait_delivered(conn)
    program.signal()
    assert program.wait() == 0
    assert endpoint.ids() == ids[3:]


def test_backing_off_over_three_expired_invocations_the_fourth_is_delivered_once(clock_db, endpoint, start_sender):
    conn = clock_db.connect()
    conn.execute("select baton_test.set_clock(clock_timestamp())")
    register(conn, endpoint.url)
    endpoint.answer = lambda _: 202 if len(set(endpoint.ids())) > 3 else 502
    program = start_sender(clock_db)
    ids = []
    for number in range(1, 5):
        ids += start(conn)
        assert len(ids) == number
        if number < 4:  # the clock stands still: each one fails once, and waits when its time is over
            program.wait_for("HTTP 502, failed", number)
            conn.execute("select baton_test.advance('60 s')")
    wait_delivered(conn)
    assert endpoint.ids() == ids


def test_two_senders_share_the_deliveries_and_send_none_twice(conn, db, endpoint, start_sender):
    both = threading.Event()
    endpoint.answer = lambda _: (len(endpoint.requests) >= 6 and both.set()) or both.wait(20) and 202
    programs = [start_sender(db, "--concurrency", "3") for _ in range(2)]
    register(conn, endpoint.url, *(f"f{number}" for number in range(20)))
    ids = start(conn)
    wait_delivered(conn)
    assert len(ids) == 20 and sorted(endpoint.ids()) == sorted(ids)
    for program in programs:
        assert program.text().count("acked") >= 3, "each had its three hands full at once"


def test_it_never_waits_longer_than_its_claim(conn, db, endpoint, start_sender):
    conn.execute("update baton.settings set visibility = '3 s'")
    released = threading.Event()
    endpoint.answer = lambda _: released.wait(20) and 202
    program = start_sender(db, "--timeout", "60", "--unsure-delay", "3600")
    register(conn, endpoint.url)
    start(conn)
    program.wait_for("no answer in time, failed")
    wait_until(endpoint.ids, "the request is read")
    assert len(endpoint.requests) == 1
    released.set()


def test_a_role_without_the_grant_gets_a_clear_end(conn, db, tmp_path):
    if not conn.execute("select 1 from pg_roles where rolname = 'baton_test_nobody'").fetchone():
        conn.execute("create role baton_test_nobody login")
    program = sender(db, tmp_path / "log", user="baton_test_nobody")
    assert program.wait() != 0
    assert "permission denied" in program.text()
