"""The guide "Keep your queue, take the baton": its code, as it is printed, behind a queue of the test's own."""

import json
import re
import threading
from types import SimpleNamespace

import psycopg
import pytest
from conftest import ROOT, wait_until
from programs import role

GUIDE = ROOT / "docs/guides/keep-your-queue.md"
[CODE] = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)


class Shop:
    """A queue that is a table, a run that gathers what lies in another one, and how it is replayed."""

    def __init__(self, db):
        self.db, self.conn = db, db.connect()
        self.user = role(self.conn, "worker")
        self.conn.execute(f"""
            create table public.jobs (job_id bigint generated always as identity primary key, run_id text);
            create table public.things (n integer);
            grant all on public.jobs, public.things to {self.user};
            update baton.settings set visibility = '60 s';
            select baton.start_run('gather', null, 'r')""")
        self.conn.execute("delete from baton.messages")  # nobody but the jobs moves it on
        self.replaying = threading.Lock()
        self.replays, self.overlaps, self.outcomes = 0, 0, []

    def handler(self):
        """The guide's functions, over a connection of their own."""
        db = psycopg.connect(self.db.cluster.dsn(self.db.name, user=self.user), autocommit=True,
                             row_factory=psycopg.rows.namedtuple_row)
        self.db._open.append(db)
        handler = SimpleNamespace(db=db, during=lambda: None, wake_in=None, replays=0)

        functions = {"db": db, "queue": "default", "replay": lambda message, baton: self.replay(handler, baton)}
        exec(compile(CODE, GUIDE, "exec"), functions)
        handler.handle, handler.sweep = functions["handle"], functions["sweep"]
        return handler

    def replay(self, handler, baton):
        """What lies there and isn't in the log goes into the log."""
        self.replays += 1
        handler.replays += 1
        outcome = "again"
        while outcome == "again":
            if not self.replaying.acquire(blocking=False):
                self.overlaps += 1
                return
            try:
                seen_seq = self.gather(handler, baton)
            finally:
                self.replaying.release()
            outcome = handler.db.execute(
                "select * from baton.end_replay(%s, %s, %s, %s::timestamptz + %s::interval)",
                (baton.run_id, baton.replay_epoch, seen_seq, baton.clock, handler.wake_in)).fetchone().outcome
        self.outcomes.append(outcome)

    def gather(self, handler, baton):
        events = handler.db.execute("select * from baton.read_events(%s, 0, 100000)", (baton.run_id,)).fetchall()
        known = {event.payload["n"] for event in events if event.type == "gather.thing"}
        things = {n for n, in handler.db.execute("select n from public.things").fetchall()}
        handler.during()
        for n in sorted(things - known):
            handler.db.execute("select * from baton.append_event(%s, %s, 'gather.thing', payload => %s::jsonb)",
                               (baton.run_id, baton.replay_epoch, json.dumps({"n": n})))
        return events[-1].seq

    def put(self, n):
        self.conn.execute("insert into public.things values (%s)", (n,))

    def ring(self, n, times=1):
        self.put(n)
        self.conn.execute("insert into public.jobs (run_id) select 'r' from generate_series(1, %s)", (times,))

    def job(self, conn):
        """The next job, which is then the caller's, or None."""
        return conn.execute("delete from public.jobs where job_id = (select job_id from public.jobs order by job_id"
                            " for update skip locked limit 1) returning run_id").fetchone()

    def gathered(self):
        """What is in the log, which is dense."""
        events = self.conn.execute("select * from baton.read_events('r', 0, 100000)").fetchall()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        return [event.payload["n"] for event in events if event.type == "gather.thing"]

    def messages(self):
        return self.conn.execute("select * from baton.messages").fetchall()


@pytest.fixture
def shop(db):
    return Shop(db)


def in_thread(function, *arguments):
    errors = []

    def call():
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.errors = errors
    thread.start()
    return thread


def ended(*threads):
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive() and not thread.errors, thread.errors


def test_two_handlers_drive_one_run(shop, server_log):
    """Jobs come twice and to both at once: no overlap, nothing missing, nothing twice."""
    closing = threading.Event()

    def consume(handler):
        while (job := shop.job(handler.db)) or not closing.wait(0.002):
            if job:
                assert handler.handle(job) == "done"

    handlers = [shop.handler() for _ in range(2)]
    threads = [in_thread(consume, handler) for handler in handlers]
    for n in range(150):
        shop.ring(n, times=2)
    wait_until(lambda: not shop.conn.execute("select from public.jobs").fetchall(), "all jobs are taken", 30)
    closing.set()
    ended(*threads)
    sweeper = shop.handler()
    wait_until(lambda: sweeper.sweep() or not shop.messages(), "what was busy is done", every=0.1)
    assert sorted(shop.gathered()) == list(range(150))
    assert shop.overlaps == 0 and set(shop.outcomes) == {"ended"}
    assert all(handler.replays for handler in handlers)
    assert server_log.errors() == []


def test_who_finds_it_held_leaves_the_rest_to_the_holder(shop):
    first, second = shop.handler(), shop.handler()
    reading, go_on = threading.Event(), threading.Event()
    first.during = lambda: (reading.set(), go_on.wait(20))
    shop.put(1)
    thread = in_thread(first.handle, SimpleNamespace(run_id="r"))
    assert reading.wait(20)
    shop.put(2)  # after the holder has looked
    assert second.handle(SimpleNamespace(run_id="r")) == "done"
    assert shop.gathered() == [] and shop.replays == 1, "it did not replay"
    go_on.set()
    ended(thread)
    assert shop.gathered() == [1, 2], "the holder went on, with no sweep"
    assert shop.replays == 2 and shop.overlaps == 0
    assert shop.messages() == []


def test_a_handler_that_dies_is_replaced(shop):
    """Before it could claim, or in its replay; the job itself is gone."""
    first, second = shop.handler(), shop.handler()
    shop.put(1)
    first.db.execute("select baton.wake_run('r')")
    first.db.close()
    second.sweep()
    assert shop.gathered() == [1]

    shop.conn.execute("update baton.settings set visibility = '1 s'")
    dying = shop.handler()
    shop.put(2)

    def die():
        dying.db.close()
        raise KeyError
    dying.during = die
    with pytest.raises(KeyError):
        dying.handle(SimpleNamespace(run_id="r"))
    wait_until(lambda: second.sweep() or shop.gathered() == [1, 2], "the sweep has taken it over", every=0.05)
    assert shop.messages() == [] and shop.overlaps == 0


def test_the_sweep_serves_timers(shop):
    handler = shop.handler()
    handler.wake_in = "200 ms"
    handler.handle(SimpleNamespace(run_id="r"))
    handler.wake_in = None
    shop.put(1)
    wait_until(lambda: handler.sweep() or shop.gathered() == [1], "the timer has fired", every=0.05)
    assert shop.messages() == []


def test_only_the_runs_own_messages_are_touched(shop):
    shop.conn.execute("select baton.start_run('gather', null, 'other')")
    handler = shop.handler()
    shop.put(1)
    handler.handle(SimpleNamespace(run_id="r"))
    assert shop.gathered() == [1]
    assert [(message.run_id, message.claimed_at) for message in shop.messages()] == [("other", None)]


def test_an_unknown_or_ended_run_is_done(shop):
    handler = shop.handler()
    shop.conn.execute("select baton.cancel_run('r', 'closed')")
    for run_id in ("r", "nobody"):
        assert handler.handle(SimpleNamespace(run_id=run_id)) == "done"
    assert shop.replays == 0
