"""An upgrade while sessions and worker processes of the older version are at work, and go on."""

import threading
import time

import psycopg
import pytest
from conftest import PATIENCE, Database, wait_until
from psycopg.rows import namedtuple_row
from starts import call, one
from test_install import house, make  # noqa: F401
from test_upgrade import ALL, upgrade, upgrades  # noqa: F401
from test_worker_durable import DurableShop

# What a call that was on its way at that very moment may end in, once: docs/guides/upgrading.md.
DOCUMENTED = psycopg.errors.DeadlockDetected, psycopg.errors.UndefinedFunction


class Load:
    """Threads with sessions of their own. A call that fails is made again, in a new transaction."""

    def __init__(self, connect):
        self.connect, self.ending, self.threads = connect, threading.Event(), []
        self.sent, self.acked, self.errors, self.slowest = set(), [], [], 0.0

    def start(self, body, user):
        def loop():
            conn = self.connect(user)
            try:
                while not self.ending.is_set():
                    began = time.monotonic()
                    try:
                        body(conn)
                    except DOCUMENTED as error:
                        self.errors.append(error)
                    self.slowest = max(self.slowest, time.monotonic() - began)
            except BaseException as error:
                self.errors.append(error)
                raise

        self.threads.append(threading.Thread(target=loop))
        self.threads[-1].start()

    def send(self, conn):
        with conn.transaction():
            ids = {one(conn, "send", queue_name="load", payload=None).message_id for _ in range(3)}
        self.sent |= ids

    def work(self, conn):
        for message in call(conn, "claim", queue_name="load", max_messages=5):
            receipt = {"message_id": message.message_id, "delivery": message.delivery}
            with conn.transaction():
                one(conn, "extend", **receipt)
                outcome = one(conn, "ack", **receipt).outcome
            self.acked.append((message.message_id, outcome))

    def look(self, conn):
        assert [row.error for row in call(conn, "tick") if row.error] == []
        call(conn, "health")
        conn.execute("select baton.metrics()")
        self.ending.wait(0.1)

    def end(self):
        self.ending.set()
        for thread in self.threads:
            thread.join(PATIENCE)


def applied(upgrade, way, database):
    """Or it met a call in a deadlock, or did not get a lock in time, and has given up as a whole: docs/guides/upgrading.md."""
    refusal = upgrade.apply(way, database)
    assert refusal is None or refusal.startswith(("40P01", "55P03")), refusal
    return refusal is None


@pytest.mark.parametrize("name, way", [("made up", "plain"), (ALL[-2:][0], "extension")])
def test_nothing_is_lost_and_nobody_stops(house, make, upgrades, tmp_path, name, way):
    upgrade, database = upgrades(name), make()
    upgrade.install(way, database)
    shop = DurableShop(Database(house.cluster, database), tmp_path)
    load = Load(lambda user: house.connect(database, user, row_factory=namedtuple_row, prepare_threshold=1))
    try:
        load.start(load.look, "house_owner")
        for body in (load.send, load.work, load.work):
            load.start(body, shop.user)
        workers = [shop.worker(QUICK_SECONDS="0.002") for _ in range(2)]
        shop.start("gate", run_id="held")  # its body runs from before the upgrade until after it
        shop.wait_marks(1)
        for n in range(40):
            shop.start("steps", 15, f"r{n}")
        ended = "select count(*) as n from baton.runs where status = 'completed'"
        wait_until(lambda: shop.conn.execute(ended).fetchone().n >= 3 and len(load.acked) > 50, "work is under way")
        wait_until(lambda: applied(upgrade, way, database), "the upgrade comes through")
        acked = len(load.acked)
        assert not shop.ended("held")
        shop.open_gate()
        shop.start("steps", 15, "after")
        wait_until(lambda: shop.conn.execute(ended).fetchone().n == 42 and len(load.acked) > acked + 50, "all runs end")
        assert [worker.process.poll() for worker in workers] == [None, None]
    finally:
        load.end()
        for worker in shop.workers:
            worker.end()
    print(f"the slowest call: {load.slowest:.2f} s; errors: {load.errors}")
    shop.db.close()
    assert [error for error in load.errors if not isinstance(error, DOCUMENTED)] == []
    with house.connect(database, row_factory=namedtuple_row) as conn:
        left = {row.message_id for row in conn.execute("select message_id from baton.messages where queue_name = 'load'")}
        assert {outcome for _, outcome in load.acked} == {"acked"}
        done = [message_id for message_id, _ in load.acked]
        assert len(done) == len(set(done))
        assert set(done) | left == load.sent
        assert not set(done) & left
        assert conn.execute("select from baton.incidents where kind <> 'operator'").fetchall() == []
        marks = shop.marks()
        assert len(marks) == len(set(mark[:4] for mark in marks)) == 41 * 15 + 1
