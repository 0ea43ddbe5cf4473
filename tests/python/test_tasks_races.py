"""Bodies that run once while their owner lives: sessions and processes against each other, in orders that are forced.

A session is known to wait when pg_blocking_pids says so. The clock is the test's own, but where threads race.
"""

import itertools
import random
import threading
import time

import psycopg
import pytest
from conftest import PATIENCE, RANDOM_SECONDS, wait_blocked
from psycopg.types.json import Jsonb
from runs import (
    Receipt, begin, cancel, end, granted, incidents, last_seq, log, messages, run, serve, signal, start,
    superseded, take, wait_gone, wake, wedged,
)
from starts import advance, call, one
from starts import begin as send
from tasks import (
    Task, backstops, complete, counted, create, decisions, dispatch, ending, extend, fail, inline, look, queued, release,
    replay, short_way, skip, start_task, started, step, take_task, task,
)

OFF = "update baton.settings set inline_ownership = false"


@pytest.fixture
def db(clock_db):
    return clock_db


def send_extend(session, receipt):
    send(session, "extend", message_id=receipt.message_id, delivery=receipt.delivery)


def send_start(session, receipt):
    send(session, "start_task", message_id=receipt.message_id, delivery=receipt.delivery)


# Takeover against a late extend -------------------------------------------------------------------


@pytest.fixture(params=["run message", "another task message"])
def lapsed(request, conn):
    """A task whose owner's claim has just run out, and the claim of a message of its own."""
    if request.param == "run message":
        conn.execute(OFF)
        [owned] = inline(conn)
        signal(conn)
        assert look(conn)[0] == ["enqueue"]
    else:
        queued(conn)
        owned = started(conn, take_task(conn))
        conn.execute("update baton.messages set dedupe_key = null")  # as if it had been purged, and is still held
        wake(conn)
        conn.execute(OFF)
        assert look(conn)[0] == ["enqueue"]
    message = take_task(conn, visibility="1 hour")
    advance(conn, "30 s")
    return owned, message


def test_after_a_late_extend_there_is_no_takeover(conn, lapsed):
    owned, message = lapsed
    assert extend(conn, owned.receipt) == "extended"
    answer = start_task(conn, message)
    assert answer.outcome == "await" and answer.retry_after.total_seconds() == 30
    advance(conn, "29.9 s")
    assert take_task(conn) is None, "it is due when the claim that it waits for has run out"
    advance(conn, "0.1 s")
    assert started(conn, take_task(conn, newest=True)).attempt == 2


def test_after_a_takeover_a_late_extend_is_lost_and_the_first_completion_wins(conn, lapsed):
    owned, message = lapsed
    newer = started(conn, message)
    assert newer.attempt == 2 and task(conn).lapses == 1
    assert extend(conn, owned.receipt) == "lost"
    assert incidents(conn, "takeover") == ["takeover"]
    assert fail(conn, owned).outcome == "lost"
    assert complete(conn, owned).outcome == "completed"
    assert complete(conn, newer).outcome == "already_completed"
    assert counted(conn, "task_completed") == 1 and messages(conn)[-1].kind == "run"


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_extend_in_flight_counts_as_alive(conn, first, lapsed, ending):
    owned, message = lapsed
    conn.execute("set lock_timeout = '5s'")
    first.run("begin")
    assert extend(first, owned.receipt) == "extended"
    answer = start_task(conn, message)
    assert answer.outcome == "await" and 1 <= answer.retry_after.total_seconds() <= 1.2
    first.run(ending)
    advance(conn, "2 s")
    message = take_task(conn, newest=True, visibility="1 hour")
    if ending == "commit":
        assert start_task(conn, message).outcome == "await"
        assert extend(conn, owned.receipt) == "extended"
    else:
        assert started(conn, message).attempt == 2
        assert extend(conn, owned.receipt) == "lost"


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_extend_that_waits_for_a_takeover_is_told_what_became_of_it(conn, first, second, lapsed, ending):
    owned, message = lapsed
    first.run("begin")
    assert start_task(first, message).outcome == "execute"
    send_extend(second, owned.receipt)
    wait_blocked(conn, second, by=first)
    first.run(ending)
    [answer] = second.result()
    assert answer.outcome == ("lost" if ending == "commit" else "extended")
    assert start_task(conn, message).outcome == ("execute" if ending == "commit" else "await")


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_message_claimed_again_against_a_late_extend(conn, first, second, ending):
    queued(conn)
    owned = started(conn, take_task(conn))
    advance(conn, "30 s")
    first.run("begin")
    again = take_task(first)
    send_extend(second, owned.receipt)
    wait_blocked(conn, second, by=first)
    first.run(ending)
    [answer] = second.result()
    assert answer.outcome == ("lost" if ending == "commit" else "extended")
    if ending == "commit":
        assert started(conn, again).attempt == 2 and incidents(conn, "owned_recovery") == ["owned_recovery"]
    advance(conn, "30 s")
    first.run("begin")
    assert extend(first, again if ending == "commit" else owned.receipt) == "extended"
    assert take_task(conn) is None, "while an extend is in flight nobody claims it"
    first.run("commit")
    assert take_task(conn) is None


def test_an_owner_that_vanishes_while_a_start_decides_is_awaited_and_then_replaced(conn, first, second, lapsed):
    """The owner's row is locked by an ack that commits just after the start has seen it locked."""
    owned, message = lapsed
    args = "is_open boolean, status text, retry_at timestamptz, owner text, at timestamptz"
    conn.execute("alter function baton._start_decision rename to _decide")
    conn.execute(f"""
        create function baton._start_decision({args}) returns text language plpgsql as $$
        begin
          perform pg_advisory_xact_lock(1);
          return baton._decide(is_open, status, retry_at, owner, at);
        end $$""")
    first.run("begin")
    ack = {"message_id": owned.receipt.message_id, "delivery": owned.receipt.delivery, "force": True}
    assert one(first, "ack", **ack).outcome == "acked"
    conn.execute("select pg_advisory_lock(1)")
    send_start(second, message)
    wait_blocked(conn, second, by=conn.info.backend_pid)
    first.run("commit")
    conn.execute("select pg_advisory_unlock(1)")
    [answer] = second.result()
    assert answer.outcome == "await" and 1 <= answer.retry_after.total_seconds() <= 1.2
    advance(conn, "1.2 s")
    assert started(conn, take_task(conn, newest=True)).attempt == 2


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_owner_whose_message_is_being_removed_counts_as_alive_until_that_commits(conn, first, lapsed, ending):
    conn.execute("set lock_timeout = '5s'")
    owned, message = lapsed
    first.run("begin")
    ack = {"message_id": owned.receipt.message_id, "delivery": owned.receipt.delivery, "force": True}
    assert one(first, "ack", **ack).outcome == "acked"
    answer = start_task(conn, message)
    assert answer.outcome == "await" and 1 <= answer.retry_after.total_seconds() <= 1.2
    first.run(ending)
    advance(conn, "1.2 s")
    assert started(conn, take_task(conn, newest=True)).attempt == 2
    assert extend(conn, owned.receipt) == "lost"


def test_a_dispatch_that_meets_an_extend_in_flight_leaves_the_task_to_its_owner(conn, first):
    conn.execute("set lock_timeout = '5s'")
    [owned] = inline(conn)
    advance(conn, "30 s")
    first.run("begin")
    assert extend(first, owned.receipt) == "extended"
    wake(conn)
    assert look(conn)[0] == ["backstop"]
    first.run("commit")
    wake(conn)
    assert look(conn)[0] == ["backstop"]


# One task, several who would run it ---------------------------------------------------------------

CLAIM_AND_START = "select s.* from baton.claim('q', visibility => %s) as c, baton.start_task(c.message_id, c.delivery) as s"


@pytest.mark.parametrize("outcome", ["killed", "completes"])
def test_of_two_processes_one_executes_and_the_other_awaits(conn, process, outcome):
    conn.execute(OFF)
    queued(conn, "two")
    one_process, other = process(), process()
    [executed] = one_process.run(CLAIM_AND_START, ["30 s"])
    assert executed.outcome == "execute"
    conn.execute("update baton.messages set dedupe_key = null where kind = 'task'")
    wake(conn, "two")
    assert look(conn, run_id="two")[0] == ["enqueue"]
    [answer] = other.run(CLAIM_AND_START, ["1 hour"])
    assert answer.outcome == "await"
    if outcome == "killed":
        one_process.kill()
        wait_gone(conn, one_process.pid)
        assert take_task(conn) is None, "its claim has not run out"
        advance(conn, "30 s")
        conn.execute("delete from baton.messages where kind = 'task' and dedupe_key is null")
        [answer] = other.run(CLAIM_AND_START, ["1 hour"])
        assert (answer.outcome, answer.attempt, answer.input) == ("execute", 2, 1)
        assert incidents(conn, "takeover") == ["takeover"]
    else:
        [ended] = one_process.run(
            "select c.* from baton.tasks as t, baton.complete_task(t.run_id, t.step_slug, t.task_index, t.attempt, '1',"
            " t.owner_message_id, t.owner_delivery) as c where t.run_id = 'two'")
        assert (ended.outcome, ended.step_ended) == ("completed", True)
        assert [m.kind for m in messages(conn, "two")] == ["task", "run"], "its own waits no longer; the run is woken"
        advance(conn, "30 s")
        conn.execute("delete from baton.messages where kind = 'run'")
        assert other.run(CLAIM_AND_START, ["1 hour"])[0].outcome == "skip"
        assert messages(conn, "two") == []
    assert counted(conn, "task_started", "two") == (2 if outcome == "killed" else 1)


def test_a_task_completed_while_another_one_claims_its_message_is_skipped(conn):
    conn.execute(OFF)
    [owned] = inline(conn)
    wake(conn)
    assert look(conn)[0] == ["enqueue"]
    message = take_task(conn)
    assert complete(conn, owned).outcome == "completed"
    assert {m.kind for m in messages(conn)} == {"run", "task"}, "what somebody has claimed stays"
    assert start_task(conn, message).outcome == "skip"
    assert {m.kind for m in messages(conn)} == {"run"}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_of_two_starts_at_the_same_moment_the_second_decides_on_the_first(conn, first, second, ending):
    queued(conn)
    message = take_task(conn)
    first.run("begin")
    assert start_task(first, message).attempt == 1
    send_start(second, message)
    wait_blocked(conn, second, by=first)
    first.run(ending)
    [answer] = second.result()
    assert (answer.outcome, answer.attempt) == ("execute", 1)
    assert counted(conn, "task_started") == 1


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_one_receipt_that_dispatches_twice_starts_nothing_twice(conn, first, second, ending):
    [owned] = inline(conn, inputs=[1, 2, 3])
    epoch = begin(conn, owned.receipt).replay_epoch
    assert decisions(conn, epoch) == ["running", "queued", "queued"]
    assert create(conn, epoch, "t", [1, 2]) == "created"
    complete(conn, owned)
    first.run("begin")
    assert decisions(first, epoch) == ["queued", "queued", "execute", "enqueue"]
    send(second, "dispatch_tasks", run_id="r", replay_epoch=epoch, inline_limit=1)
    wait_blocked(conn, second, by=first)
    first.run(ending)
    expected = ["running", "queued"] if ending == "commit" else ["execute", "enqueue"]
    assert [row.outcome for row in second.result()] == ["queued", "queued", *expected]
    assert counted(conn, "task_started") == 2 and task(conn, "t").attempt == 1


def test_a_superseded_dispatch_is_refused_at_once_whatever_the_holder_does(clock_db, conn, first):
    quick = clock_db.connect(options="-c lock_timeout=1s")
    start(conn)
    _, old = granted(conn, visibility="10 seconds")
    advance(conn, "10 seconds")
    receipt, epoch = granted(conn)
    first.run("begin")
    send_extend(first, receipt)
    first.result()
    with superseded():
        dispatch(quick, old)
    assert end(first, epoch, 1).outcome == "ended"
    first.run("commit")


def test_a_handler_that_slept_through_its_lapse_starts_nothing(conn):
    queued(conn)
    late = take_task(conn)
    advance(conn, "30 s")
    assert start_task(conn, late).outcome == "lost"
    newer = started(conn, take_task(conn))
    assert start_task(conn, late).outcome == "lost"
    older = Task("s", 0, newer.attempt, late)
    assert fail(conn, older).outcome == "lost", "it can't fail an attempt that it did not start"
    assert extend(conn, newer.receipt) == "extended"


def test_a_new_delivery_does_not_fail_the_attempt_of_the_old_one(conn):
    queued(conn)
    old = started(conn, take_task(conn))
    advance(conn, "30 s")
    message = take_task(conn)
    assert fail(conn, old._replace(receipt=message)).outcome == "lost"
    assert task(conn).failures == 0 and extend(conn, message) == "extended"
    newer = started(conn, message)
    assert newer.attempt == 2 and fail(conn, newer).outcome == "retrying"


# Ends: the first wins -----------------------------------------------------------------------------


def test_a_completion_late_twice_from_an_old_attempt_and_after_cancellation(conn, server_log):
    queued(conn, inputs=[1, 2])
    old = started(conn, take_task(conn))
    ended = started(conn, take_task(conn))
    advance(conn, "30 s")
    newer = started(conn, take_task(conn))
    if newer.task_index != old.task_index:
        ended, newer = newer, started(conn, take_task(conn))
    assert complete(conn, Task("s", old.task_index, 0, old.receipt)).outcome == "lost"
    assert complete(conn, Task("s", old.task_index, 3, old.receipt)).outcome == "lost", "never given out"
    assert complete(conn, old).outcome == "completed", "late, and of an old attempt: it is the first"
    for again in (old, newer):
        assert complete(conn, again).outcome == "already_completed"
    assert fail(conn, newer).outcome == "too_late"
    assert counted(conn, "task_completed") == 1
    assert one(conn, "complete_task", **ending(newer, output=None)).outcome == "already_completed"
    assert cancel(conn) == "done"
    before = log(conn)
    for answer in (complete(conn, ended), fail(conn, ended)):
        assert answer.outcome == "too_late"
    assert log(conn) == before and messages(conn) == []
    assert server_log.errors() == []


@pytest.mark.parametrize("way", ["completion", "exhausted", "skipped", "released", "poison"])
def test_however_a_step_ends_its_run_is_woken_once(conn, way):
    conn.execute("update baton.settings set max_lapses = 1")
    queued(conn, max_attempts=1)
    message = take_task(conn, visibility="1 hour")
    owned = started(conn, message)
    if way == "completion":
        assert complete(conn, owned).step_ended
        complete(conn, owned)
    elif way == "exhausted":
        assert fail(conn, owned).step_ended
        fail(conn, owned)
    elif way == "skipped":
        assert skip(conn).outcome == "done"
        assert skip(conn).outcome == "terminal"
    elif way == "released":
        assert release(conn, action="fail").outcome == "released"
        assert release(conn, action="fail").outcome == "terminal"
    else:
        advance(conn, "1 hour")
        assert start_task(conn, take_task(conn)).outcome == "skip"
    assert [m.kind for m in messages(conn) if m.claimed_at is None] == ["run"]
    assert serve(conn) == [last_seq(conn)]
    assert step(conn).status in ("completed", "failed", "skipped") and step(conn).open_tasks == 0
    assert extend(conn, message) in ("cancelled", "lost") and messages(conn) == []


def test_a_body_that_ends_under_its_run_message_wakes_nobody(conn):
    [owned] = inline(conn)
    assert complete(conn, owned).step_ended
    assert [m.message_id for m in messages(conn)] == [owned.receipt.message_id], "that handler begins a replay next"
    advance(conn, "1 min")
    assert extend(conn, owned.receipt) == "extended"
    epoch = begin(conn, owned.receipt).replay_epoch
    assert end(conn, epoch, last_seq(conn)).outcome == "ended" and messages(conn) == []


# Two under one message ----------------------------------------------------------------------------


def test_the_second_goes_on_under_its_owner_when_the_first_ends_while_another_one_replays(conn):
    one_body, other = inline(conn, inputs=[1, 2], inline_limit=2)
    receipt = one_body.receipt
    wake(conn)
    held, epoch = granted(conn)
    assert complete(conn, one_body).outcome == "completed"
    assert begin(conn, receipt).outcome == "handed_over"
    assert extend(conn, receipt) == "extended", "its message stays for the other body"
    assert replay(conn, held, epoch)[0] == ["backstop"]
    signal(conn)
    assert look(conn)[0] == ["backstop"] and len(backstops(conn)) == 1
    assert one(conn, "park", may_be_in_use=True, message_id=receipt.message_id, delivery=receipt.delivery).outcome == "in_use"
    assert complete(conn, other).step_ended
    assert serve(conn) == [], "that handler begins a replay next"
    assert begin(conn, receipt).outcome == "granted"
    assert counted(conn, "task_started") == 2 and task(conn, task_index=1).attempt == 1


# Purged by hand -----------------------------------------------------------------------------------


def purge(conn, kind=None):
    conn.execute("delete from baton.messages where %s::text is null or kind = %s", (kind, kind))


def recovered(conn):
    """A tick, and a replay by whoever claims the wake."""
    call(conn, "tick")
    return look(conn)


def run_through(conn, owned):
    assert complete(conn, owned).outcome == "completed"
    call(conn, "tick")
    wake(conn)
    receipt, epoch = granted(conn)
    assert one(conn, "complete_run", run_id="r", replay_epoch=epoch, output=None).outcome == "done"
    extend(conn, owned.receipt)  # a run message whose handler has not heard yet
    assert messages(conn) == [] and wedged(conn) == []


def test_the_owners_message_purged_while_its_body_runs(conn):
    [owned] = inline(conn)
    purge(conn)
    assert wedged(conn) == [("r", "task")]
    decided, executed = recovered(conn)
    assert decided == ["enqueue"] and executed == []
    assert extend(conn, owned.receipt) == "lost", "its body is no live one any more"
    newer = started(conn, take_task(conn))
    assert newer.attempt == 2 and incidents(conn, "takeover") == ["takeover"]
    assert fail(conn, owned).outcome == "lost"
    run_through(conn, newer)


def test_the_owners_message_purged_behind_a_backstop(conn):
    """With recovery off: the backstop alone brings the run on."""
    conn.execute("update baton.settings set recovery = false")
    [owned] = inline(conn)
    wake(conn)
    assert look(conn)[0] == ["backstop"] and backstops(conn) == [860]
    conn.execute("delete from baton.messages where message_id = %s", (owned.receipt.message_id,))
    advance(conn, "859 s")
    call(conn, "tick")
    assert take(conn) is None
    advance(conn, "1 s")
    assert look(conn)[0] == ["enqueue"]
    run_through(conn, started(conn, take_task(conn)))


def test_the_tasks_own_message_purged_before_it_is_started(conn):
    queued(conn)
    purge(conn, "task")
    assert wedged(conn) == [("r", "task")]
    decided, [owned] = recovered(conn)
    assert decided == ["execute"] and owned.attempt == 1
    run_through(conn, owned)


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_tasks_own_message_purged_while_it_is_being_started(conn, first, second, ending):
    queued(conn)
    message = take_task(conn)
    first.run("begin")
    first.run("delete from baton.messages where kind = 'task'")
    send_start(second, message)
    wait_blocked(conn, second, by=first)
    first.run(ending)
    [answer] = second.result()
    if ending == "commit":
        assert answer.outcome == "lost" and task(conn).status == "created"
        _, [owned] = recovered(conn)
    else:
        assert answer.outcome == "execute"
        owned = Task("s", 0, 1, message)
    run_through(conn, owned)


def test_the_tasks_own_message_purged_while_a_start_of_it_is_in_flight(conn, first, second):
    queued(conn)
    message = take_task(conn)
    first.run("begin")
    owned = started(first, message)
    second.start("delete from baton.messages where kind = 'task'")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    second.result()
    assert wedged(conn) == [("r", "task")]
    assert recovered(conn)[0] == ["enqueue"]
    assert extend(conn, owned.receipt) == "lost"
    newer = started(conn, take_task(conn))
    assert newer.attempt == 2
    run_through(conn, newer)


def test_the_tasks_own_message_purged_after_its_start_and_the_body_comes_through(conn):
    queued(conn)
    owned = started(conn, take_task(conn))
    purge(conn, "task")
    assert complete(conn, owned).outcome == "completed"
    assert [m.kind for m in messages(conn)] == ["run"]
    assert serve(conn) == [last_seq(conn)]


@pytest.mark.parametrize("owner", ["inline", "queued"])
def test_the_message_of_a_waiting_retry_purged(conn, owner):
    if owner == "inline":
        [owned] = inline(conn)
    else:
        queued(conn)
        owned = started(conn, take_task(conn))
    assert fail(conn, owned, retry_delay="1 min").outcome == "retrying"
    if owner == "inline":
        epoch = begin(conn, owned.receipt).replay_epoch
        assert replay(conn, owned.receipt, epoch)[0] == ["queued"]
    purge(conn)
    assert recovered(conn)[0] == ["enqueue"], "from the first retry on the queue owns it"
    call(conn, "tick")
    advance(conn, "59.9 s")
    assert take_task(conn) is None, "no retry early"
    advance(conn, "0.1 s")
    newer = started(conn, take_task(conn))
    assert (newer.attempt, task(conn).failures) == (2, 1)
    run_through(conn, newer)


# Backstops, timers, retries beside each other -----------------------------------------------------


def test_twenty_wakes_in_one_epoch_arm_one_backstop(conn):
    [owned] = inline(conn, visibility="1 hour")
    for n in range(20):
        signal(conn)
        rows = None
        receipt, epoch = granted(conn)
        [row] = rows = dispatch(conn, epoch)
        assert (row.outcome, row.delay.total_seconds()) == ("backstop", 860 - n)
        assert end(conn, epoch, last_seq(conn)).outcome == "ended" and len(rows) == 1
        advance(conn, "1 s")
    assert backstops(conn) == [840] and len(messages(conn)) == 2
    assert complete(conn, owned).outcome == "completed"


def test_a_backstop_that_fires_inside_a_longer_lease_arms_its_successor(conn):
    [owned] = inline(conn, visibility="1 hour")
    wake(conn)
    look(conn)
    for _ in range(3):
        advance(conn, "860 s")
        extend(conn, owned.receipt, visibility="1 hour")
        assert look(conn)[0] == ["backstop"] and backstops(conn) == [860]
    assert counted(conn, "task_started") == 1


def test_a_retry_after_a_second_is_not_swallowed_by_a_pending_backstop(conn):
    [owned] = inline(conn)
    wake(conn)
    assert look(conn)[0] == ["backstop"]
    answer = fail(conn, owned, retry_delay="1 s")
    assert answer.outcome == "retrying"
    epoch = begin(conn, owned.receipt).replay_epoch
    assert replay(conn, owned.receipt, epoch)[0] == ["queued"]
    assert take_task(conn) is None
    advance(conn, "1 s")
    newer = started(conn, take_task(conn))
    assert newer.attempt == 2 and backstops(conn) == [859]
    assert complete(conn, newer).outcome == "completed"


@pytest.mark.parametrize("owner", ["wake", "timer"])
def test_a_timer_beside_a_long_inline_body_fires_in_time(conn, owner):
    start_at = conn.execute("select baton._now() as at").fetchone().at
    queued(conn)
    own = started(conn, take_task(conn))
    complete(conn, own)
    receipt, epoch = granted(conn)
    if owner == "timer":
        end(conn, epoch, last_seq(conn), wake_at=start_at)
        receipt, epoch = granted(conn, visibility="1 hour")
        assert receipt is not None
    else:
        extend(conn, receipt, visibility="1 hour")
    create(conn, epoch, "long")
    _, [owned] = replay(conn, receipt, epoch, wake_at=conn.execute("select baton._now() + '10 s' as at").fetchone().at)
    for _ in range(3):
        advance(conn, "9.9 s")
        assert take(conn) is None
        advance(conn, "0.1 s")
        timer, epoch = granted(conn)
        decided, _ = replay(conn, timer, epoch, wake_at=conn.execute("select baton._now() + '10 s' as at").fetchone().at)
        assert decided == ["backstop"]
    assert extend(conn, owned.receipt) == "extended" and counted(conn, "task_started") == 2


# complete against cancel against fail_task against skip_step ------------------------------------------

ENDS = {
    "complete": lambda s, r, t: send(s, "complete_task", **ending(t, r, output=None)),
    "fail": lambda s, r, t: send(s, "fail_task", **ending(t, r, error=None)),
    "skip": lambda s, r, t: send(s, "skip_step", run_id=r, step_slug="s"),
    "cancel": lambda s, r, t: send(s, "cancel_run", run_id=r, reason="enough"),
}
WON = {"complete": "completed", "fail": "failed", "skip": "done", "cancel": "done"}
TOLD = {"complete": "too_late", "fail": "too_late", "skip": "terminal"}
STATUS = {"complete": "completed", "fail": "failed", "skip": "skipped", "cancel": "cancelled"}


@pytest.mark.parametrize("settled", ["commit", "rollback"])
def test_of_two_ends_the_second_is_told_the_first(conn, first, second, settled):
    for winner, loser in itertools.permutations(ENDS, 2):
        r = f"{winner} before {loser}"
        [owned] = inline(conn, r, max_attempts=1)
        first.run("begin")
        ENDS[winner](first, r, owned)
        assert first.result()[0].outcome == WON[winner]
        ENDS[loser](second, r, owned)
        wait_blocked(conn, second, by=first)
        first.run(settled)
        [answer] = second.result()
        if settled == "commit":
            assert answer.outcome == ("done" if loser == "cancel" else TOLD[loser]), r
            assert task(conn, run_id=r).status == step(conn, run_id=r).status == STATUS[winner], r
        else:
            assert answer.outcome == WON[loser], r
            assert task(conn, run_id=r).status == step(conn, run_id=r).status == STATUS[loser], r
        cancel(conn, r)


def test_racing_ends_write_one_end_and_all_are_told_the_truth(plain_db):
    conn, rounds = plain_db.connect(), 300
    for n in range(rounds):
        inline(conn, f"run {n}", max_attempts=1, visibility="1 hour")
    owned = {t.run_id: Task("s", 0, 1, (t.owner_message_id, t.owner_delivery))
             for t in conn.execute("select * from baton.tasks").fetchall()}
    barrier, told = threading.Barrier(4, timeout=60), {name: {} for name in ENDS}

    def race(name):
        own = plain_db.session(name)
        for n in range(rounds):
            r = f"run {n}"
            receipt = type("Receipt", (), dict(zip(("message_id", "delivery"), owned[r].receipt, strict=True)))
            barrier.wait()
            ENDS[name](own, r, owned[r]._replace(receipt=receipt))
            told[name][r] = own.result()[0].outcome

    threads = [threading.Thread(target=race, args=(name,)) for name in ENDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = set()
    for n in range(rounds):
        r = f"run {n}"
        status = task(conn, run_id=r).status
        [winner] = [name for name, s in STATUS.items() if s == status]
        won.add(winner)
        for name in ("complete", "fail", "skip"):
            assert told[name][r] == (WON[name] if name == winner else TOLD[name]), (r, name, winner)
        assert told["cancel"][r] == "done" and run(conn, r).status == "cancelled"
        ends = [type for _, type in log(conn, r) if type in (
            "task_completed", "task_failed", "step_completed", "step_failed", "step_skipped")]
        assert ends == {"complete": ["task_completed", "step_completed"], "fail": ["task_failed", "step_failed"],
                        "skip": ["step_skipped"], "cancel": []}[winner], r
    assert len(won) > 1, "the races were none"
    call(conn, "tick")
    assert {m.claimed_at is not None for m in conn.execute("select * from baton.messages").fetchall()} <= {True}


# Nobody waits in a circle -------------------------------------------------------------------------


class Board:
    """A run with an inline body, a queued one and one that waits, and every verb that could be called on it now."""

    def __init__(self, conn, run_id):
        self.conn, self.run_id = conn, run_id
        [self.inline] = inline(conn, run_id, inputs=[1, 2, 3], visibility="1 hour", max_attempts=2)
        self.queued = started(conn, take_task(conn, visibility="1 hour"))
        signal(conn, run_id)
        self.held, self.epoch = granted(conn, run_id, visibility="1 hour")
        create(conn, self.epoch, "t", [1, 2], run_id)
        dispatch(conn, self.epoch, 1, run_id)
        signal(conn, run_id)
        self.waiting = take_task(conn, visibility="1 hour")

    def calls(self):
        r = {"run_id": self.run_id}
        replay = {**r, "replay_epoch": self.epoch}
        receipt = self.waiting._asdict()
        both = [self.inline, self.queued]
        completions = Jsonb([{"step_slug": t.step_slug, "task_index": t.task_index, "attempt": t.attempt, "output": 1,
                              **t.receipt._asdict()} for t in reversed(both)])
        return {
            "create_step": {**replay, "step_slug": "u", "inputs": Jsonb([1])},
            "dispatch_tasks": replay,
            "start_task": receipt,
            "start_tasks": {"receipts": Jsonb([x._asdict() for x in (self.queued.receipt, self.waiting)])},
            "complete_task": ending(self.inline, self.run_id, output=None),
            "complete_tasks": {**r, "completions": completions},
            "fail_task": ending(self.queued, self.run_id, error=None),
            "advance_run": short_way(self.epoch, self.run_id),
            "skip_step": {**r, "step_slug": "t"},
            "release_task": {**r, "step_slug": "s", "task_index": self.queued.task_index},
            "claim": {"queue_name": "q", "max_messages": 5, "for_run": self.run_id},
            "extend": self.inline.receipt._asdict(),
            "extend_many": {"receipts": Jsonb([x._asdict() for x in (self.waiting, self.queued.receipt, self.held,
                                                                     self.inline.receipt)])},
            "signal_run": {**r, "name": "s"},
            "begin_replay": self.inline.receipt._asdict(),
            "end_replay": {**replay, "seen_seq": 1},
            "park": {**receipt, "force": True},
            "fail": {**self.held._asdict(), "error": "no", "force": True},
            "append_event": {**replay, "type": "x.y"},
            "complete_run": {**replay, "output": None},
            "fail_run": {**replay, "error": None},
            "cancel_run": {**r, "reason": "enough"},
            "ack_many": {"receipts": Jsonb([x._asdict() for x in (self.waiting, self.held)])},
            "wake_run": r,
            "release_replay": r,
            "recover_runs": {"queue_name": "q"},
            "terminal_tasks": {"keys": Jsonb([{**r, "step_slug": t.step_slug, "task_index": t.task_index,
                                               "attempt": t.attempt} for t in both])},
            "prune": {"older_than": "0"},
            "tick": {},
        }


class Alone(Board):
    """A run whose only body runs inline, after its replay: what the short way is for."""

    def __init__(self, conn, run_id):
        self.conn, self.run_id = conn, run_id
        [self.inline] = inline(conn, run_id, visibility="1 hour")
        self.queued, self.held, self.waiting = self.inline, self.inline.receipt, self.inline.receipt
        self.epoch = run(conn, run_id).replay_epoch


VERBS = ["create_step", "dispatch_tasks", "start_task", "start_tasks", "complete_task", "complete_tasks", "fail_task",
         "advance_run", "skip_step", "release_task"]
OTHERS = ["claim", "extend", "extend_many", "signal_run", "begin_replay", "end_replay", "park", "fail", "complete_run",
          "cancel_run", "release_replay"]
ALLOWED = ("PB001",)  # a replay that was superseded by the other verb


def tolerated(error):
    return isinstance(error, psycopg.Error) and error.sqlstate in ALLOWED


def settle(session):
    try:
        session.result()
    except psycopg.Error as error:
        assert tolerated(session.error()), error


@pytest.mark.parametrize("verb", VERBS)
def test_no_two_verbs_wait_for_each_other(clock_db, first, second, server_log, verb):
    """Both behind a session that holds the run, or the messages, so that they start together when it lets go."""
    conn, blocker = clock_db.connect(), clock_db.session("blocker")
    conn.execute("alter function baton._lock_soon(text, bigint, bigint) set lock_timeout = '20s'")
    holds = ["select from baton.runs where run_id = %s for no key update",
             "select from baton.messages where run_id = %s order by message_id for no key update"]
    blocked = 0
    for (one_verb, other), hold in itertools.product(
            dict.fromkeys(p for o in VERBS + OTHERS for p in ((verb, o), (o, verb))), holds):
        run_id = f"{one_verb} {other} {hold[12:20]}"
        calls = (Alone if verb == "advance_run" else Board)(conn, run_id).calls()
        blocker.run("begin")
        blocker.run(hold, (run_id,))
        for session, name in ((first, one_verb), (second, other)):
            send(session, name, **calls[name])
            wait_settled_or_blocked(conn, session)
            blocked += not session.done()
        blocker.run("rollback")
        for session in (first, second):
            settle(session)
        conn.execute("delete from baton.messages")
        cancel(conn, run_id)
    assert blocked > 20, "nobody waited for anybody"
    assert [line for line in server_log.errors() if "was superseded" not in line] == []


def wait_settled_or_blocked(conn, session):
    deadline = time.monotonic() + 60
    while not session.done():
        if conn.execute("select pg_blocking_pids(%s)", (session.pid,)).fetchone()[0]:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_random_pairs_of_verbs_never_deadlock(plain_db, server_log):
    """For BATON_SECONDS (8), and until each verb has been answered, and there were many calls. Also two in one transaction,
    in the documented order: messages after the run, by id."""
    conn, until = plain_db.connect(), time.monotonic() + RANDOM_SECONDS
    boards = [Board(conn, "run 0")]
    done, failed = [], []
    barrier = threading.Barrier(4, timeout=60)

    def enough():
        return {*VERBS, *OTHERS} <= set(done) and len(done) > 25 * RANDOM_SECONDS

    def renew():
        conn.execute("delete from baton.messages")
        cancel(conn, boards[0].run_id)
        boards[0] = (Alone if type(boards[0]) is Board else Board)(conn, f"run {len(done)} {time.monotonic()}")

    def work(n):
        rng, own = random.Random(n), plain_db.connect()
        try:
            while (left := until - time.monotonic()) > 0 or left > -PATIENCE and not enough():
                if n == 0:
                    renew()
                barrier.wait()
                calls = boards[0].calls()
                for _ in range(6):
                    names = [rng.choice(list(calls)) for _ in range(rng.choice([1, 1, 2]))]
                    if len(names) == 2:  # the run first, and then one of the messages
                        names = ["signal_run", rng.choice([*VERBS, "extend", "begin_replay"])]
                    try:
                        with own.transaction():
                            for name in names:
                                call(own, name, may_be_in_use=True, **calls[name])
                                done.append(name)
                    except psycopg.Error as error:
                        if not tolerated(error):
                            raise
                barrier.wait()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            barrier.abort()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert enough(), sorted(set(done))
    assert [line for line in server_log.errors() if "was superseded" not in line] == []


# From body to body --------------------------------------------------------------------------------


def test_consumers_that_claim_first_go_from_body_to_body_of_two_runs(plain_db, server_log):
    """As in docs/guides/ownership.md: the claim commits; an end and the next start share a statement where they share a
    run. Six at once, over two runs whose tasks alternate in the queue, four by four."""
    conn = plain_db.connect()
    runs = ["a", "b"]
    for r in runs:
        queued(conn, r, inputs=range(120))
    conn.execute("update baton.messages set visible_at = now() - interval '1 h' + task_index / 4 * interval '1 s'")
    barrier, together, failed = threading.Barrier(6, timeout=60), [], []
    both = ("select c.outcome as ended, s.* from baton.complete_task(%(run_id)s, %(step_slug)s, %(task_index)s,"
            " %(attempt)s, '1', %(message_id)s, %(delivery)s) as c"
            " left join lateral baton.start_task(%(next_id)s, %(next_delivery)s) as s on true")

    def work():
        own = plain_db.connect(options="-c statement_timeout=30s")
        in_hand = run_id = None
        try:
            barrier.wait()
            while (found := call(own, "claim", queue_name="q", visibility="1 hour")) and found[0].kind == "task":
                receipt = Receipt(found[0].message_id, found[0].delivery)
                if found[0].run_id == run_id:
                    [answer] = own.execute(both, {**ending(in_hand, run_id), "next_id": receipt.message_id,
                                                  "next_delivery": receipt.delivery}).fetchall()
                    assert (answer.ended, answer.outcome) == ("completed", "execute")
                    in_hand = Task(answer.step_slug, answer.task_index, answer.attempt, receipt)
                    together.append(threading.get_ident())
                else:
                    if in_hand:
                        assert complete(own, in_hand, run_id).outcome == "completed"
                    in_hand, run_id = started(own, receipt), found[0].run_id
            if in_hand:
                assert complete(own, in_hand, run_id).outcome == "completed"
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert len(set(together)) > 1 and len(together) > 20
    for r in runs:
        assert step(conn, "s", r).status == "completed" and counted(conn, "task_completed", r) == 120
        assert [seq for seq, _ in log(conn, r)] == list(range(1, last_seq(conn, r) + 1))
    assert server_log.errors() == []


# A locked task delays nothing ---------------------------------------------------------------------


def test_a_locked_task_in_a_batch_delays_nothing(plain_db):
    """Five hundred batches, one message of each locked by somebody; the others are started and completed meanwhile."""
    conn, locker = plain_db.connect(options="-c lock_timeout=2s -c statement_timeout=60s"), plain_db.connect()
    for n in range(500):
        r = f"run {n}"
        queued(conn, r, inputs=range(4))
        locker.execute("begin")
        [locked] = locker.execute("select task_index from baton.messages where run_id = %s and task_index = %s"
                                  " for no key update", (r, n % 4)).fetchall()
        batch = call(conn, "claim", queue_name="q", max_messages=10)
        assert sorted(m.task_index for m in batch) == sorted({0, 1, 2, 3} - {locked.task_index})
        completions = [{"step_slug": m.step_slug, "task_index": m.task_index, "attempt": 1, "output": n,
                        "message_id": m.message_id, "delivery": m.delivery}
                       for m in batch if start_task(conn, m).outcome == "execute"]
        answers = call(conn, "complete_tasks", run_id=r, completions=Jsonb(completions))
        assert [a.outcome for a in answers] == ["completed"] * 3
        wake(conn, r)
        receipt, epoch = granted(conn, r)
        assert decisions(conn, epoch, run_id=r) == ["queued"]
        assert end(conn, epoch, last_seq(conn, r), r).outcome == "ended"
        locker.execute("rollback")
        last = started(conn, take_task(conn))
        assert last.task_index == locked.task_index and complete(conn, last, r).step_ended
        cancel(conn, r)


# Two messages, one body -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["the owner's first", "the task's first"])
def test_a_lapsed_owner_and_the_tasks_own_message_both_due_run_it_once_and_at_once(conn, order):
    conn.execute(OFF)
    [owned] = inline(conn)
    wake(conn)
    assert look(conn)[0] == ["enqueue"]
    advance(conn, "30 s")
    rows = {row.kind: row for row in call(conn, "claim", queue_name="q", max_messages=5)}
    assert rows["run"].message_id == owned.receipt.message_id

    def owners():
        epoch = begin(conn, Receipt(rows["run"].message_id, rows["run"].delivery)).replay_epoch
        assert decisions(conn, epoch) == ["queued"]
        assert end(conn, epoch, last_seq(conn)).outcome == "ended"

    if order == "the owner's first":
        owners()
    newer = started(conn, Receipt(rows["task"].message_id, rows["task"].delivery))
    if order == "the task's first":
        owners()
    assert newer.attempt == 2 and [m.kind for m in messages(conn)] == ["task"]
    assert complete(conn, newer).outcome == "completed" and counted(conn, "task_started") == 2


# NOTIFY -------------------------------------------------------------------------------------------


@pytest.fixture
def heard(conn, clock_db):
    """The queues that were named since it was asked last, each as often as it was; a marker is heard last."""
    listener = clock_db.connect()
    listener.execute("listen baton_messages")

    def hear():
        conn.execute("notify baton_messages, 'marker'")
        return list(itertools.takewhile("marker".__ne__, (n.payload for n in listener.notifies(timeout=60))))

    return hear


def test_with_message_notify_on_a_retry_names_its_queue(conn, heard):
    conn.execute("update baton.settings set message_notify = true")
    [task] = inline(conn)
    heard()
    assert fail(conn, task).outcome == "retrying"
    assert heard() == ["q"]


def test_with_message_notify_on_a_dispatch_names_its_queue_for_what_it_sends(conn, heard):
    inline(conn, inputs=[1, 2, 3])
    conn.execute("delete from baton.messages where kind = 'task'")
    wake(conn)
    _, epoch = granted(conn)
    assert heard() == [], "it is off"
    conn.execute("update baton.settings set message_notify = true")
    conn.execute("begin")
    assert decisions(conn, epoch, 0) == ["backstop", "enqueue", "enqueue"]
    conn.execute("rollback")
    assert heard() == []
    assert decisions(conn, epoch, 0) == ["backstop", "enqueue", "enqueue"]
    assert heard() == ["q"]
    assert decisions(conn, epoch, 0) == ["backstop", "queued", "queued"]
    assert heard() == [], "nothing was sent"
    conn.execute("delete from baton.messages where dedupe_key like %s", ("%\x1fbackstop\x1f%",))
    assert decisions(conn, epoch, 0) == ["backstop", "queued", "queued"]
    assert heard() == ["q"]
    conn.execute("delete from baton.messages where kind = 'task'")
    assert decisions(conn, epoch, 0) == ["backstop", "enqueue", "enqueue"]
    assert heard() == ["q"]


# An operator against a body that hangs --------------------------------------------------------------


def test_a_release_waits_for_an_extend_in_flight_and_spends_its_receipt(conn, first, second):
    queued(conn)
    hung = started(conn, take_task(conn))
    first.run("begin")
    assert extend(first, hung.receipt) == "extended"
    send(second, "release_task", run_id="r", step_slug="s", task_index=0)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "released"
    assert extend(conn, hung.receipt) == "lost"
    assert complete(conn, hung).outcome == "lost" and fail(conn, hung).outcome == "lost"
    newer = started(conn, take_task(conn))
    assert (newer.attempt, task(conn).lapses, task(conn).fence_attempt) == (2, 0, 1)
    assert complete(conn, hung).outcome == "lost"
    assert complete(conn, newer).outcome == "completed"


def test_an_extend_waits_for_a_release_and_is_told(conn, first, second):
    queued(conn)
    hung = started(conn, take_task(conn))
    first.run("begin")
    assert release(first).outcome == "released"
    send_extend(second, hung.receipt)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "lost"


def test_an_inline_body_that_hangs_is_released_to_the_queue(conn):
    [hung] = inline(conn)
    assert release(conn).outcome == "released"
    newer = started(conn, take_task(conn))
    assert newer.attempt == 2 and complete(conn, hung).outcome == "lost"
    assert extend(conn, hung.receipt) == "extended", "its handler still has the run message"
    assert complete(conn, newer).step_ended
    assert begin(conn, hung.receipt).outcome == "granted"
