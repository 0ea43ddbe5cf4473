"""Behind PgBouncer in transaction mode: a client meets another of two server connections with each transaction."""

import random

import pytest
from conftest import wait_until
from programs import EXAMPLES, Program, role
from runs import (
    append, begin, end, granted, incidents, last_seq, log, messages, run, serve, start, superseded, take, wake, wedged,
)
from starts import advance, call
from test_reference_worker import Fleet

RESETS = ["discard all", "select pg_advisory_unlock_all()"]


def open_both(pooled, **kw):
    """Two clients, and a server connection for each of them."""
    clients = [pooled.connect(**kw), pooled.connect(**kw)]
    for client in clients:
        client.execute("begin")
    for client in clients:
        client.execute("commit")
    return clients


def pid(client):
    return client.execute("select pg_backend_pid() as pid").fetchone().pid


def test_transactions_of_one_client_meet_both_server_connections(db, make_pooler):
    pooled = make_pooler(db)
    first, second = open_both(pooled)
    assert first.info.backend_pid not in pooled.server_pids(), "the pid that a client is told is no backend's"
    assert len({pid(first) for _ in range(2)}) == 2
    second.execute("begin")
    assert len({pid(second), pid(first)}) == 2 and pid(second) == pid(second)


# A session hold ----------------------------------------------------------------------------------


def test_a_session_hold_lasts_as_long_as_its_receipt_when_its_client_has_gone(clock_db, make_pooler):
    """Promptness is lost: the server connection lives on, and with it the hold."""
    conn, (holder, other) = clock_db.connect(), open_both(make_pooler(clock_db))
    start(conn)
    _, epoch = granted(holder, hold="session")
    holder.close()
    for _ in range(2):
        wake(other)
        assert begin(other, take(other), "session").outcome == "handed_over"
    advance(conn, "29.999 s")
    wake(other)
    assert begin(other, take(other), "session").outcome == "handed_over"
    advance(conn, "1 ms")
    granted(other, hold="session")
    with superseded():
        append(other, epoch)
    assert incidents(conn) == ["replay_lost"] and len(messages(conn)) == 1


def test_clients_that_share_a_server_connection_are_not_granted_twice(db, make_pooler):
    """Its own pid says nothing of who asks; and what another client of that connection ends is not this one's hold."""
    pooled = make_pooler(db, pool_size=1)
    conn, holder, other = db.connect(), pooled.connect(), pooled.connect()
    start(conn)
    start(conn, "r2")
    _, epoch = granted(holder, hold="session")
    _, second = granted(other, "r2", hold="session")
    assert run(conn).replay_backend == run(conn, "r2").replay_backend is not None
    wake(conn)
    assert begin(other, take(other), "session").outcome == "handed_over"
    assert end(other, second, 1, "r2").outcome == "ended"
    wake(conn)
    assert begin(conn, take(conn), "session").outcome == "handed_over"
    assert append(holder, epoch) == "appended"
    assert incidents(conn) == []


def lose_server(conn, backend):
    """As server_lifetime, a failover or an operator's RECONNECT do."""
    conn.execute("select pg_terminate_backend(%s)", (backend,))


@pytest.mark.parametrize("settings, lose", [
    pytest.param({}, lose_server, id="the server connection ends"),
    *(pytest.param({"server_reset_query": query, "server_reset_query_always": 1}, None, id=query) for query in RESETS),
])
def test_a_hold_that_is_lost_under_a_living_client_repeats_a_replay_and_no_more(db, make_pooler, settings, lose):
    pooled = make_pooler(db, **settings)
    conn, (holder, other) = db.connect(), open_both(pooled)
    start(conn)
    _, first = granted(holder, hold="session", visibility="1 hour")
    backend = run(conn).replay_backend
    assert backend in pooled.server_pids()
    if lose:
        lose(conn, backend)
    locks = "select from pg_locks where locktype = 'advisory' and pid = %s"
    wait_until(lambda: not conn.execute(locks, (backend,)).fetchall(), "the lock has gone")
    wait_until(lambda: (backend in pooled.server_pids()) == (not lose), "the pooler has noticed")
    wake(other)
    _, second = granted(conn, hold="session", visibility="1 hour")
    holder.execute("begin")
    wake(holder)
    with superseded():
        append(holder, first)
    holder.execute("rollback")
    assert log(conn) == [(1, "run_created")] and not run(conn).wake_pending
    assert end(holder, first, 1).outcome == "lost"
    assert append(other, second) == "appended"
    assert end(other, second, 1).outcome == "ended"
    assert incidents(conn) == ["replay_lost"] and messages(conn) == [] and wedged(conn) == []


# Many clients ------------------------------------------------------------------------------------


class Crowd:
    """Clients that come and go, and what each of them believes."""

    def __init__(self, conn, pooled, seed):
        self.conn, self.pooled, self.rng = conn, pooled, random.Random(seed)
        self.clients = [*open_both(pooled), pooled.connect(), pooled.connect()]
        self.busy = None  # who has a transaction open, and so a server connection of its own
        self.holder = None  # the receipt and epoch of the replay that was granted last and has not ended
        self.dead, self.backends, self.repeated = [], set(), 0  # epochs; of grants; replays whose receipt lived on

    def client(self):
        return self.rng.choice([client for client in self.clients if client is not self.busy])

    def receipt_lives(self):
        return bool(self.conn.execute(
            "select from baton.messages where (message_id, delivery) = (%s, %s) and visible_at > baton._now()",
            self.holder[0]).fetchall())

    def wake(self):
        wake(self.client())

    def replay(self):
        receipt = take(self.client())
        if receipt is None:
            return
        if self.rng.random() < 0.3:  # a grant that its caller takes back, or whose answer is lost
            client = self.client()
            client.execute("begin")
            begin(client, receipt, "session")
            client.execute("rollback")
        lived = self.holder and self.receipt_lives()
        answer = begin(self.client(), receipt, "session")
        if answer.outcome == "granted":
            self.backends.add(run(self.conn).replay_backend)
            if self.holder:
                self.repeated += bool(lived)
                self.dead.append(self.holder[1])
            self.holder = receipt, answer.replay_epoch
        else:
            assert answer.outcome == "handed_over" and lived, answer

    def write(self):
        if self.holder:
            assert append(self.client(), self.holder[1]) == "appended"
        for epoch in self.dead[-2:]:
            with superseded():
                append(self.client(), epoch)

    def end(self):
        if self.holder:
            assert end(self.client(), self.holder[1], last_seq(self.conn)).outcome == "ended"
            self.dead.append(self.holder[1])
            self.holder = None

    def traffic(self):
        if self.busy:
            self.busy.execute("commit")
            self.busy = None
        else:
            self.busy = self.client()
            self.busy.execute("begin")
            self.busy.execute("select 1")

    def come_and_go(self):
        client = self.client()
        client.close()
        self.clients[self.clients.index(client)] = self.pooled.connect()

    def time_passes(self):
        advance(self.conn, "31 s")
        call(self.client(), "recover_runs")


@pytest.mark.parametrize("query", [None, *RESETS])
def test_there_are_never_two_that_can_write_and_the_run_is_never_stuck(clock_db, make_pooler, query):
    conn = clock_db.connect()
    conn.execute("update baton.settings set max_lapses = 1000")
    settings = {"server_reset_query": query, "server_reset_query_always": 1} if query else {}
    start(conn)
    crowd = Crowd(conn, make_pooler(clock_db, **settings), seed=7)
    actions = [crowd.wake] * 3 + [crowd.replay] * 4 + [crowd.write] * 3 + [
        crowd.end, crowd.traffic, crowd.come_and_go, crowd.time_passes]
    for _ in range(300):
        crowd.rng.choice(actions)()
    assert len(crowd.backends) == 2 and len(crowd.dead) > 10
    assert (crowd.repeated > 0) == bool(query), "only a reset has a replay repeated"

    crowd.time_passes()
    serve(conn)
    assert [seq for seq, _ in log(conn)] == list(range(1, last_seq(conn) + 1))
    assert run(conn).status == "suspended" and run(conn).replay_ended
    assert messages(conn) == [] and wedged(conn) == []


# LISTEN ------------------------------------------------------------------------------------------


def test_listen_succeeds_and_hears_nothing_but_its_own(db, make_pooler):
    """The server connection listens, not the client: it hears only what it sends itself, by chance."""
    pooled = make_pooler(db, pool_size=1)
    conn, listener, sender = db.connect(), pooled.connect(), pooled.connect()
    listener.execute("listen baton_control")
    assert len(pooled.server_pids()) == 1
    conn.execute("notify baton_control, 'from elsewhere'")
    sender.execute("notify baton_control, 'by the same server connection'")
    assert [n.payload for n in listener.notifies(timeout=0.3)] == []
    listener.execute("notify baton_control, 'by itself'")
    assert [n.payload for n in listener.notifies(timeout=10, stop_after=1)] == ["by itself"]


# The reference workers ---------------------------------------------------------------------------

MANY = 20  # runs: psycopg prepares a statement when it has been executed five times


@pytest.fixture
def pooled(db, make_pooler):
    """With two server connections for the workers."""
    pooled = make_pooler(db, users=("postgres", "baton_test_worker", "baton_test_sender"))
    open_both(pooled, user=role(pooled.connect(), "worker"))
    return pooled


@pytest.fixture
def workers(pooled, tmp_path):
    """workers(file): two processes of an example behind the pooler, under a worker's role."""
    made = []

    def make(file):
        dsn = pooled.cluster.dsn(pooled.name, user="baton_test_worker")
        for number in range(2):
            made.append(Program(tmp_path / f"{number}.log", [EXAMPLES / file], {
                "DATABASE_URL": dsn, "QUEUE_NAME": "q", "POLL_SECONDS": "0.05", "VISIBILITY_SECONDS": "60"}))
        for program in made:
            program.wait_for("ready")
        return made

    yield make
    for program in made:
        program.end()


def outputs(pooled, count):
    """Of all runs, once they are completed."""
    client = pooled.connect()

    def completed():
        runs = client.execute("select status from baton.runs").fetchall()
        return len(runs) == count and all(run.status == "completed" for run in runs)

    wait_until(completed, f"{count} runs are completed", every=0.05)
    assert messages(client) == []
    return [client.execute("select * from baton.get_run(%s)", (row.run_id,)).fetchone().output
            for row in client.execute("select run_id from baton.runs order by run_id").fetchall()]


def test_worker_runs(pooled, workers, server_log):
    programs, client = workers("worker_runs.py"), pooled.connect()
    for number in range(MANY):
        client.execute("select baton.start_run('ship', '{\"items\": 2, \"seconds\": 0}', %s, 'q')", (f"r{number}",))
        client.execute("select baton.signal_run(%s, 'paid', '{\"amount\": 20}')", (f"r{number}",))
    assert [output["total"] for output in outputs(pooled, MANY)] == [20] * MANY
    assert not any("database:" in program.text() for program in programs)
    assert server_log.errors() == []


def test_worker_durable(pooled, workers, server_log):
    programs, client = workers("worker_durable.py"), pooled.connect()
    for number in range(MANY):
        client.execute("select baton.start_run('order', %s::jsonb, %s, 'q')",
                       ('{"amount": 5, "items": ["a", "b"]}', f"r{number}"))
    assert [output["boxes"] for output in outputs(pooled, MANY)] == [[{"box": "a-1"}, {"box": "b-1"}]] * MANY
    assert not any("database:" in program.text() for program in programs)
    assert server_log.errors() == []


def test_worker_http(pooled, tmp_path, server_log):
    fleet = Fleet(pooled, tmp_path)
    try:
        program = fleet.worker()
        fleet.register(program.url)
        fleet.tick()
        fleet.wait_ready()
        fleet.send(*[f'{{"order": {number}}}' for number in range(MANY)])
        wait_until(lambda: fleet.left() == 0, "all messages are handled")
        program.wait_for("handled", times=MANY)
        assert "database:" not in program.text()
        assert server_log.errors() == []
    finally:
        for program in fleet.programs:
            program.end()
