"""The short way from one inline step to the next against whatever else may happen to the run, in orders that are forced.

Whoever comes second is known to wait when pg_blocking_pids says so, and is told the truth. Then the handlers go on, the
long way: the log has no gap and nothing twice, and each signal is read by a replay.
"""

import threading
import time
from collections import Counter

import pytest
from conftest import ROOT, wait_blocked
from psycopg.types.json import Jsonb
from runs import Receipt, begin, end, granted, incidents, last_seq, log, messages, run, signal, start, take, wake, wedged
from starts import advance, call, one
from starts import begin as send
from tasks import (
    Task, complete, counted, create, dispatch, ending, extend, inline, look, replay, short_way, start_task, step, task,
)


@pytest.fixture
def db(clock_db):
    clock_db.psql("-q", "-f", ROOT / "tests/sql/fold_tasks.sql")
    return clock_db


@pytest.fixture
def conn(db):
    conn = db.connect()
    conn.execute("alter function baton._lock_soon(text, bigint, bigint) set lock_timeout = '20s'")
    return conn


@pytest.fixture
def owned(conn):
    """The only body of a run, which runs inline; its replay has ended."""
    [task] = inline(conn)
    return task


@pytest.fixture
def epoch(conn, owned):
    return run(conn).replay_epoch


def go_on(conn, epoch, **arguments):
    return one(conn, "advance_run", **short_way(epoch, **arguments)).outcome


def check(conn, run_id="r"):
    """What holds between any two calls."""
    types = [type for _, type in log(conn, run_id)]
    assert [seq for seq, _ in log(conn, run_id)] == list(range(1, run(conn, run_id).last_seq + 1))
    assert conn.execute("select * from baton_test.unfolded(%s)", (run_id,)).fetchall() == []
    statuses = Counter(t.status for t in conn.execute("select status from baton.tasks where run_id = %s", (run_id,)))
    assert statuses["created"] + statuses["started"] <= 1
    advanced = types.count("run_advanced")
    assert types.count("task_completed") + advanced == types.count("step_completed") + advanced == statuses["completed"]
    assert wedged(conn) == []


def drive(conn, run_id="r"):
    """Handlers that come when all claims have run out, and take the long way: the step t follows s, and then the run ends."""
    for _ in range(20):
        check(conn, run_id)
        if run(conn, run_id).ended_at:
            return
        advance(conn, "1 hour")
        call(conn, "tick")
        for row in call(conn, "claim", queue_name="q"):
            receipt = Receipt(row.message_id, row.delivery)
            if row.kind == "task":
                if start_task(conn, receipt).outcome == "execute":
                    complete(conn, Task(row.step_slug, 0, task(conn, row.step_slug, 0, run_id).attempt, receipt), run_id)
                continue
            granting = begin(conn, receipt)
            if granting.outcome != "granted":
                continue
            s, t = step(conn, "s", run_id), step(conn, "t", run_id)
            if t and t.status != "created":
                one(conn, "complete_run", run_id=run_id, replay_epoch=granting.replay_epoch, output=None)
                continue
            if s.status != "created":
                create(conn, granting.replay_epoch, "t", run_id=run_id)
            for body in replay(conn, receipt, granting.replay_epoch, run_id=run_id)[1]:
                complete(conn, body, run_id)
    raise AssertionError("the run never ends")


# What else may happen: the call, what is answered where it comes first, and after the short way; whether that is open then.
OTHERS = {
    "signal": (lambda r, o, e: ("signal_run", {**r, "name": "s"}), "signalled", "signalled", False),
    "wake": (lambda r, o, e: ("wake_run", r), "woken", "woken", False),
    "cancel": (lambda r, o, e: ("cancel_run", {**r, "reason": "enough"}), "done", "done", False),
    "release": (lambda r, o, e: ("release_task", {**r, "step_slug": "s", "task_index": 0}), "released", "terminal", False),
    "release the next": (
        lambda r, o, e: ("release_task", {**r, "step_slug": "t", "task_index": 0}), "unknown", "released", True),
    "fail for good": (
        lambda r, o, e: ("release_task", {**r, "step_slug": "s", "task_index": 0, "action": "fail"}),
        "released", "terminal", False),
    "skip": (lambda r, o, e: ("skip_step", {**r, "step_slug": "s"}), "done", "terminal", False),
    "skip the next": (lambda r, o, e: ("skip_step", {**r, "step_slug": "t"}), "unknown", "done", True),
    "extend": (lambda r, o, e: ("extend", o.receipt._asdict()), "extended", "extended", True),
    "park": (lambda r, o, e: ("park", {**o.receipt._asdict(), "force": True}), "parked", "parked", False),
    "fail": (lambda r, o, e: ("fail", {**o.receipt._asdict(), "error": "no", "force": True}), "failed", "failed", False),
    "complete": (lambda r, o, e: ("complete_task", ending(o, **r, output=None)), "completed", "already_completed", False),
    "begin": (lambda r, o, e: ("begin_replay", o.receipt._asdict()), "granted", "granted", False),
    "itself": (lambda r, o, e: ("advance_run", short_way(e, **r)), "advanced", "declined", False),
}


def each(conn):
    """A run for each of the others: how it is called there, and the rest."""
    for name, (made, *told) in OTHERS.items():
        run_id = f"{name} and the short way"
        [owned] = inline(conn, run_id)
        epoch = run(conn, run_id).replay_epoch
        yield run_id, epoch, made({"run_id": run_id}, owned, epoch), *told
        drive(conn, run_id)


@pytest.mark.parametrize("settled", ["commit", "rollback"])
def test_who_comes_after_the_short_way_is_told_so(conn, first, second, settled):
    for run_id, epoch, (verb, arguments), alone, after, _ in each(conn):
        first.run("begin")
        assert go_on(first, epoch, run_id=run_id) == "advanced"
        send(second, verb, **arguments)
        wait_blocked(conn, second, by=first)
        first.run(settled)
        [answer] = second.result()
        assert answer.outcome == (after if settled == "commit" else alone), run_id
        if settled == "commit":
            assert step(conn, "s", run_id).status == task(conn, "s", 0, run_id).status == "completed", run_id
            assert counted(conn, "run_advanced", run_id) == 1


@pytest.mark.parametrize("settled", ["commit", "rollback"])
def test_the_short_way_after_whatever_else_knows_of_it(conn, first, second, settled):
    for run_id, epoch, (verb, arguments), alone, _, is_open in each(conn):
        first.run("begin")
        assert one(first, verb, **arguments).outcome == alone, run_id
        send(second, "advance_run", **short_way(epoch, run_id))
        wait_blocked(conn, second, by=first)
        first.run(settled)
        [answer] = second.result()
        assert answer.outcome == ("advanced" if is_open or settled == "rollback" else "declined"), run_id
        is_advanced = answer.outcome == "advanced" or (verb, settled) == ("advance_run", "commit")
        assert (counted(conn, "run_advanced", run_id) == 1) == is_advanced, run_id


@pytest.mark.parametrize("order", ["signal first", "signal second"])
@pytest.mark.parametrize("verb", ["signal_run", "wake_run"])
def test_what_comes_beside_the_short_way_is_read_by_a_replay(conn, first, second, owned, epoch, order, verb):
    """Both wait for somebody who holds the run, and go on in that order."""
    calls = [(verb, {"run_id": "r", "name": "s"} if verb == "signal_run" else {"run_id": "r"}), ("advance_run", short_way(epoch))]
    expected = ["signalled" if verb == "signal_run" else "woken", "declined"]
    if order == "signal second":
        calls.reverse()
        expected = ["advanced", expected[0]]
    conn.execute("begin")
    conn.execute("select from baton.runs for no key update")
    for session, (name, arguments) in zip((first, second), calls, strict=True):
        send(session, name, **arguments)
        wait_blocked(conn, session)
    conn.execute("rollback")
    assert [session.result()[0].outcome for session in (first, second)] == expected
    due = take(conn)
    assert due, "a replay is asked for"
    answer = begin(conn, due)
    assert (answer.outcome, answer.last_seq) == ("granted", last_seq(conn))
    decided, executed = replay(conn, due, answer.replay_epoch)
    assert (decided, executed) == (["backstop"], []), "the body is left alone"
    assert go_on(conn, epoch, **({} if order == "signal first" else {"step_slug": "t", "next_step_slug": "u"})) == "declined"
    assert extend(conn, owned.receipt) == "extended"
    drive(conn)


def test_a_wake_and_a_replay_by_another_process(conn, process, owned, epoch):
    """Whose replay goes on, or has ended: in neither does the epoch of the one before open the short way."""
    wake(conn)
    other = process()
    [held] = other.run("select b.* from baton.claim('q', for_run => 'r') as c, baton.begin_replay(c.message_id, c.delivery) as b")
    assert held.outcome == "granted"
    assert go_on(conn, epoch) == "declined"
    other.run("select * from baton.dispatch_tasks('r', %s)", [held.replay_epoch])
    [ended] = other.run("select * from baton.end_replay('r', %s, %s)", [held.replay_epoch, last_seq(conn)])
    assert ended.outcome == "ended"
    assert go_on(conn, epoch) == "declined"
    assert go_on(conn, held.replay_epoch) == "declined", "nor does its own, for a body that it does not run"
    assert complete(conn, owned).step_ended
    drive(conn)


def test_a_replay_that_is_being_granted_closes_the_short_way(conn, first, second, owned, epoch):
    first.run("begin")
    assert begin(first, owned.receipt).outcome == "granted"
    send(second, "advance_run", **short_way(epoch))
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "declined"
    assert complete(conn, owned).step_ended and begin(conn, owned.receipt).outcome == "granted"
    drive(conn)


def test_a_replay_that_waits_for_the_short_way_sees_where_it_led(conn, first, second, owned, epoch):
    first.run("begin")
    assert go_on(first, epoch) == "advanced"
    send(second, "wake_run", run_id="r")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    second.result()
    assert look(conn)[0] == ["backstop"] and task(conn, "t").owner_delivery == owned.receipt.delivery
    assert go_on(conn, epoch, step_slug="t", next_step_slug="u") == "declined"
    drive(conn)


# The claim ran out ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settled", ["commit", "rollback"])
def test_a_message_claimed_again_while_the_short_way_waits(conn, first, second, owned, epoch, settled):
    advance(conn, "30 s")
    first.run("begin")
    again = take(first)
    send(second, "advance_run", **short_way(epoch))
    wait_blocked(conn, second, by=first)
    first.run(settled)
    assert second.result()[0].outcome == "declined", "it starts nothing, even where nobody has taken it"
    if settled == "commit":
        answer = begin(conn, again)
        decided, [newer] = replay(conn, again, answer.replay_epoch)
        assert decided == ["execute"] and newer.attempt == 2 and incidents(conn, "owned_recovery") == ["owned_recovery"]
        assert go_on(conn, epoch) == go_on(conn, answer.replay_epoch) == "declined"
        assert complete(conn, owned).outcome == "completed", "the first completion wins"
        assert complete(conn, newer).outcome == "already_completed"
    else:
        assert extend(conn, owned.receipt) == "extended"
        assert go_on(conn, epoch) == "advanced", "it was nobody else's meanwhile"
    drive(conn)


@pytest.mark.parametrize("held", ["runs", "messages"])
def test_a_claim_that_runs_out_while_the_short_way_waits_starts_nothing(conn, first, second, epoch, held):
    first.run("begin")
    first.run(f"select from baton.{held} for no key update")
    send(second, "advance_run", **short_way(epoch))
    wait_blocked(conn, second, by=first)
    advance(conn, "30 s")
    first.run("rollback")
    assert second.result()[0].outcome == "declined"
    drive(conn)


def test_nobody_claims_a_message_whose_handler_is_going_on(conn, first, owned, epoch):
    first.run("begin")
    assert go_on(first, epoch) == "advanced"
    advance(conn, "30 s")
    assert take(conn) is None, "its row is locked"
    first.run("commit")
    assert go_on(conn, epoch, step_slug="t", next_step_slug="u") == "declined"
    receipt, newest = granted(conn)
    decided, [newer] = replay(conn, receipt, newest)
    assert (decided, newer.step_slug, newer.attempt) == (["execute"], "t", 2), "the next body is the message's, as any other"
    drive(conn)


def test_an_extend_in_flight_keeps_the_short_way_open(conn, first, second, owned, epoch):
    advance(conn, "30 s")
    first.run("begin")
    assert extend(first, owned.receipt) == "extended"
    send(second, "advance_run", **short_way(epoch))
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "advanced"
    drive(conn)


def test_a_worker_that_dies_right_after_the_short_way_is_followed_by_another(conn, process):
    """Killed with the answer on its way: the next body is run by whoever claims the message."""
    [owned] = inline(conn)
    epoch = run(conn).replay_epoch
    doomed = process()
    [answer] = doomed.run("select * from baton.advance_run('r', %s, 's', '1', 't', '2')", [epoch])
    assert answer.outcome == "advanced"
    doomed.kill()
    advance(conn, "30 s")
    receipt, newest = granted(conn)
    decided, [newer] = replay(conn, receipt, newest)
    assert (decided, newer.step_slug, newer.attempt) == (["execute"], "t", 2)
    assert complete(conn, newer).step_ended and complete(conn, owned).outcome == "already_completed"
    drive(conn)


def test_who_lost_the_answer_asks_again_and_takes_the_long_way_to_the_same_body(conn, owned, epoch):
    assert go_on(conn, epoch) == "advanced"
    assert go_on(conn, epoch) == "declined"
    assert complete(conn, owned).outcome == "already_completed"
    answer = begin(conn, owned.receipt)
    assert create(conn, answer.replay_epoch, "t") == "exists"
    assert [row.outcome for row in dispatch(conn, answer.replay_epoch)] == ["running"]
    assert end(conn, answer.replay_epoch, last_seq(conn)).outcome == "ended"
    assert complete(conn, Task("t", 0, 1, owned.receipt)).step_ended
    drive(conn)


# Many at once ---------------------------------------------------------------------------------------


class Handler(threading.Thread):
    """Claims whatever is due of a run of many steps, and goes the short way where it is open."""

    def __init__(self, conn, steps, told, barrier):
        super().__init__()
        self.conn, self.steps, self.told, self.barrier = conn, steps, told, barrier
        self.seen, self.advanced, self.error = {}, [], None

    def run(self):
        try:
            self.barrier.wait()
            deadline = time.monotonic() + 60
            while not run(self.conn).ended_at:
                assert time.monotonic() < deadline, "the run does not end"
                for row in call(self.conn, "claim", queue_name="q", visibility="1 hour"):
                    self.handle(row)
        except BaseException as error:
            self.error = error

    def handle(self, row):
        receipt = Receipt(row.message_id, row.delivery)
        if row.kind == "task":
            if start_task(self.conn, receipt).outcome == "execute":
                complete(self.conn, Task(row.step_slug, 0, 1, receipt))
            return
        slug = self.replay(receipt)
        while slug is not None:
            following = f"s{int(slug[1:]) + 1}"
            if int(slug[1:]) + 1 < self.steps:
                outcome = one(self.conn, "advance_run", **short_way(self.epoch, step_slug=slug, next_step_slug=following)).outcome
                self.told[outcome] += 1
                if outcome == "advanced":
                    self.advanced.append((self.epoch, following))
                    slug = following
                    continue
            complete(self.conn, Task(slug, 0, 1, receipt))
            slug = self.replay(receipt)

    def replay(self, receipt):
        """The long way; the step whose body it has started here."""
        granting = begin(self.conn, receipt)
        if granting.outcome != "granted":
            return None
        self.epoch, seen, mine = granting.replay_epoch, granting.last_seq, None
        while True:
            ended = sum(type in ("step_completed", "run_advanced") for _, type in log(self.conn)[:seen])
            if ended == self.steps:
                one(self.conn, "complete_run", run_id="r", replay_epoch=self.epoch, output=None)
                return None
            create(self.conn, self.epoch, f"s{ended}")
            mine = next((row.step_slug for row in dispatch(self.conn, self.epoch) if row.outcome in ("execute", "running")), mine)
            answer = end(self.conn, self.epoch, seen)
            if answer.outcome == "ended":
                self.seen[self.epoch] = seen
                return mine
            assert answer.outcome == "again", answer
            seen = answer.last_seq


def test_signals_and_handlers_at_once_lose_nothing(plain_db):
    """No step is made twice, or over a signal that the replay before the short way had not read. The last thirty steps are
    left in peace: there the short way is open at last, however busy the others are."""
    conn, steps, told = plain_db.connect(), 150, Counter()
    conn.execute("alter function baton._lock_soon(text, bigint, bigint) set lock_timeout = '20s'")
    start(conn)
    barrier = threading.Barrier(4, timeout=60)
    handlers = [Handler(plain_db.connect(), steps, told, barrier) for _ in range(3)]
    for handler in handlers:
        handler.start()
    barrier.wait()
    sent = 0
    while not step(conn, f"s{steps - 30}") and all(handler.is_alive() for handler in handlers):
        sent += signal(conn, payload=Jsonb(sent)) == "signalled"
        before = last_seq(conn)
        while last_seq(conn) < before + 12 and not run(conn).ended_at and all(h.is_alive() for h in handlers):
            time.sleep(0.001)
    for handler in handlers:
        handler.join()
        assert handler.error is None, handler.error
    events = call(conn, "read_events", run_id="r", max_events=100_000)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    created = {e.correlation_id: e.seq for e in events if e.type in ("step_created", "run_advanced")}
    assert list(created) == [f"s{n}" for n in range(steps)]
    counts = Counter(e.type for e in events)
    assert counts["task_completed"] == counts["step_completed"] == counts["task_started"] == steps - counts["run_advanced"]
    assert counts["run_advanced"] == told["advanced"]
    signals = [e.seq for e in events if e.type == "signal_received"]
    assert len(signals) == sent
    for handler in handlers:
        for epoch, slug in handler.advanced:
            assert not [seq for seq in signals if handler.seen[epoch] < seq < created[slug]], "a signal that nobody had read"
    assert told["advanced"] and told["declined"], told
    while left := take(conn):  # a wake that a claim had locked for a moment when the run ended
        assert begin(conn, left).outcome == "terminal"
    assert messages(conn) == []
