"""One replay at a time: sessions and processes against each other, in orders that are forced.

A session is known to wait when pg_blocking_pids says so. Where time matters the clock is the test's own.
"""

import itertools
import json
import subprocess
import sys
import threading

import pytest
from conftest import ROOT, wait_blocked, wait_until
from psycopg import errors
from runs import (
    append, begin, body, cancel, end, granted, incidents, last_seq, log, messages, run, serve, signal, start,
    superseded, take, wait_gone, wake, wedged,
)
from starts import advance, call, one
from starts import begin as send


def now(conn):
    return conn.execute("select baton._now() as now").fetchone().now


# Never two ---------------------------------------------------------------------------------------

WORKER = """
import sys, psycopg
from psycopg.types.json import Jsonb
dsn, name, until = sys.argv[1], sys.argv[2], int(sys.argv[3])
conn = psycopg.connect(dsn, autocommit=True)
def one(sql, *values): return conn.execute(sql, values).fetchone()
while True:
    claimed = one("select message_id, delivery, run_id from baton.claim('q')")
    if claimed is None:
        if one("select from baton.runs where ended_at is null") is None:
            break
        continue
    outcome, run_id, epoch, seq = one(
        "select outcome, run_id, replay_epoch, last_seq from baton.begin_replay(%s, %s, %s)", claimed[0], claimed[1],
        ["lease", "session"][name == "b"])
    if outcome != "granted":
        continue
    entries = one("select count(*) filter (where type = 'x.in') from baton.events where run_id = %s", run_id)[0]
    for type in ("x.in", "x.out"):
        one("select baton.append_event(%s, %s, %s, null, %s)", run_id, epoch, type, Jsonb([name, epoch]))
    if entries + 1 >= until:
        one("select baton.complete_run(%s, %s, null)", run_id, epoch)
        continue
    one("select baton.wake_run(%s)", run_id)
    while True:
        ended, seq = one("select outcome, last_seq from baton.end_replay(%s, %s, %s)", run_id, epoch, seq)
        if ended != "again":
            break
"""


def entries(conn, run_id):
    rows = conn.execute("select type, payload from baton.events where run_id = %s and type like 'x.%%' order by seq",
                        (run_id,)).fetchall()
    return [(row.type, *row.payload) for row in rows]


def test_two_processes_never_replay_one_run_at_a_time_and_another_run_goes_on_meanwhile(db, conn):
    for run_id in ("contested", "other"):
        start(conn, run_id)
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, db.dsn, name, "60"], cwd=ROOT) for name in "ab"]
    try:
        while any(w.poll() is None for w in workers):
            signal(conn, "contested")
        assert [w.wait(30) for w in workers] == [0, 0]
    finally:
        for w in workers:
            w.kill()
            w.wait()
    for run_id in ("contested", "other"):
        seen = entries(conn, run_id)
        assert len(seen) == 120
        for entered, left in zip(seen[::2], seen[1::2], strict=True):
            assert (entered[0], left[0]) == ("x.in", "x.out") and entered[1:] == left[1:]
        assert len({epoch for _, _, epoch in seen}) == 60
        assert [seq for seq, _ in log(conn, run_id)] == list(range(1, last_seq(conn, run_id) + 1))
        assert run(conn, run_id).status == "completed" and not messages(conn, run_id)


def test_while_one_process_holds_a_run_the_other_is_told_so_and_replays_another_run(conn, process):
    one_process, other = process(), process()
    for run_id in ("r", "r2"):
        start(conn, run_id)
    begin_sql = "select b.* from baton.claim('q', for_run => %s) as c, baton.begin_replay(c.message_id, c.delivery, %s) as b"
    for hold in ("lease", "session"):
        [held] = one_process.run(begin_sql, ["r", hold])
        assert held.outcome == "granted"
        wake(conn)
        [answer] = other.run(begin_sql, ["r", hold])
        assert answer.outcome == "handed_over"
        wake(conn, "r2")
        [answer] = other.run(begin_sql, ["r2", hold])
        assert answer.outcome == "granted"
        assert end(conn, answer.replay_epoch, 1, "r2").outcome == "ended"
        assert end(conn, held.replay_epoch, 1).outcome == "ended"


def test_of_two_begins_the_loser_decides_on_what_the_winner_committed(db, conn, first, second):
    """The wait inside begin_replay itself, made long enough to be seen."""
    conn.execute("alter function baton._lock_soon(text, bigint, bigint) set lock_timeout = '20s'")
    start(conn)
    one_message = take(conn)
    conn.execute("update baton.runs set wake_message_id = null")
    wake(conn)
    other_message = take(conn)
    for outcome, expected in (("commit", "handed_over"), ("rollback", "granted")):
        first.run("begin")
        assert begin(first, one_message).outcome == "granted"
        send(second, "begin_replay", message_id=other_message.message_id, delivery=other_message.delivery)
        wait_blocked(conn, second, by=first)
        first.run(outcome)
        [answer] = second.result()
        assert answer.outcome == expected
        if expected == "handed_over":
            assert end(conn, run(conn).replay_epoch, 1).outcome == "ended"
            one_message = take(conn)
            conn.execute("update baton.runs set wake_message_id = null")
            wake(conn)
            other_message = take(conn)
    assert len(messages(conn)) == 2 and not wedged(conn)


def test_a_claim_for_a_run_skips_what_another_has_open(conn, first, second):
    start(conn)
    granted(conn)
    wake(conn)
    conn.execute("update baton.messages set visible_at = baton._now()")
    claim = "select message_id from baton.claim('q', for_run => 'r')"
    first.run("begin")
    [of_first], [of_second] = first.run(claim), second.run(claim)
    assert {of_first, of_second} == {(m.message_id,) for m in messages(conn)} and of_first != of_second
    assert second.run(claim) == []
    first.run("rollback")
    assert second.run(claim) == [of_first]


def test_one_connection_that_asks_for_two_messages_is_granted_one(conn):
    for hold in ("lease", "session"):
        start(conn, hold)
        _, epoch = granted(conn, hold, hold)
        wake(conn, hold)
        assert begin(conn, take(conn, hold), hold).outcome == "handed_over"
        assert append(conn, epoch, run_id=hold) == "appended"


def test_a_holder_whose_extend_is_in_flight_lives_though_its_claim_ran_out(clock_db):
    conn, holder = clock_db.connect(), clock_db.session("holder")
    start(conn)
    receipt, epoch = granted(conn)
    wake(conn)
    other = take(conn, visibility="1 hour")
    advance(conn, "30 s")
    holder.run("begin")
    assert one(holder, "extend", message_id=receipt.message_id, delivery=receipt.delivery).outcome == "extended"
    assert begin(conn, other).outcome == "handed_over"
    holder.run("commit")
    assert end(conn, epoch, 1).outcome == "ended"


# Who dies frees the run ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["connection", "process", "closed"])
def test_a_session_hold_ends_at_once_with_its_connection(conn, process, how):
    holder = process()
    start(conn)
    [held] = holder.run("select b.* from baton.claim('q', visibility => '1 hour') as c,"
                        " baton.begin_replay(c.message_id, c.delivery, 'session') as b")
    assert held.outcome == "granted"
    wake(conn)
    assert begin(conn, take(conn)).outcome == "handed_over"
    wake(conn)
    if how == "connection":
        conn.execute("select pg_terminate_backend(%s)", (holder.pid,))
    elif how == "process":
        holder.kill()
    else:
        holder.child.stdin.close()
        holder.child.wait(10)
    wait_gone(conn, holder.pid)
    answer = begin(conn, take(conn), "session")
    assert answer.outcome == "granted"
    assert incidents(conn) == ["replay_lost"] and run(conn).lapses == 1
    assert len(messages(conn)) == 1, "the lost one's message goes"
    with superseded():
        append(conn, held.replay_epoch)


def test_a_lost_replays_message_that_somebody_has_open_delays_no_grant(conn, process, first):
    conn.execute("set lock_timeout = '3 s'")
    holder = process()
    start(conn)
    receipt = take(conn)
    holder.run("select * from baton.begin_replay(%s, %s, 'session')", receipt)
    holder.kill()
    wait_gone(conn, holder.pid)
    wake(conn)
    first.run("begin")
    one(first, "extend", message_id=receipt.message_id, delivery=receipt.delivery)
    granted(conn)
    first.run("commit")
    assert incidents(conn) == ["replay_lost"] and len(messages(conn)) == 2


def test_a_session_hold_that_died_is_found_by_the_next_tick(conn, process):
    holder = process()
    start(conn)
    holder.run("select b.* from baton.claim('q', visibility => '1 hour') as c,"
               " baton.begin_replay(c.message_id, c.delivery, 'session') as b")
    assert wedged(conn) == []
    call(conn, "tick")
    assert take(conn) is None
    holder.kill()
    wait_gone(conn, holder.pid)
    assert wedged(conn) == [("r", "replay")]
    call(conn, "tick")
    assert wedged(conn) == []
    assert begin(conn, take(conn)).outcome == "granted"


def test_a_lease_lasts_as_long_as_its_receipt_whatever_happens_to_the_connection(conn, process):
    holder = process()
    start(conn)
    holder.run("select b.* from baton.claim('q') as c, baton.begin_replay(c.message_id, c.delivery) as b")
    holder.kill()
    wait_gone(conn, holder.pid)
    wake(conn)
    assert begin(conn, take(conn)).outcome == "handed_over"


def test_bodies_under_a_message_outlive_the_connection_of_its_replay(conn, process):
    holder = process()
    start(conn)
    [held] = holder.run("select c.message_id, c.delivery, b.outcome from baton.claim('q', visibility => '1 hour') as c,"
                        " baton.begin_replay(c.message_id, c.delivery, 'session') as b")
    receipt = (held.message_id, held.delivery)
    body(conn, receipt)
    wake(conn)
    holder.kill()
    wait_gone(conn, holder.pid)
    assert begin(conn, take(conn)).outcome == "granted"
    assert one(conn, "extend", message_id=receipt[0], delivery=receipt[1]).outcome == "extended"
    assert len(messages(conn)) == 2


def test_the_same_receipt_on_another_connection_outlives_the_first_one(conn, process):
    lingering, living = process(), process()
    start(conn)
    receipt = take(conn, visibility="1 hour")
    ask = ("select * from baton.begin_replay(%s, %s, 'session')", list(receipt))
    [old] = lingering.run(*ask)
    [new] = living.run(*ask)
    assert (old.outcome, new.outcome) == ("granted", "granted") and old.replay_epoch != new.replay_epoch
    lingering.kill()
    wait_gone(conn, lingering.pid)
    wake(conn)
    assert begin(conn, take(conn)).outcome == "handed_over"
    assert append(conn, new.replay_epoch) == "appended"
    assert incidents(conn) == [] and run(conn).lapses == 0


def advisory_locks(conn, pid):
    return conn.execute("select count(*) as n from pg_locks where locktype = 'advisory' and pid = %s", (pid,)).fetchone().n


def test_a_connection_has_one_advisory_lock_at_the_most_whatever_it_does(db, conn):
    worker = db.connect()
    pid = worker.info.backend_pid
    start(conn)
    for _ in range(1000):
        _, epoch = granted(worker, hold="session")
        assert end(worker, epoch, 1).outcome == "ended"
        wake(worker)
    assert advisory_locks(conn, pid) == 1
    for n in range(20):
        start(conn, f"completed {n}")
        _, epoch = granted(worker, f"completed {n}", hold="session")
        one(worker, "complete_run", run_id=f"completed {n}", replay_epoch=epoch, output=None)
        start(conn, f"left {n}")
        granted(worker, f"left {n}", hold="session")
        start(conn, f"failed {n}")
        with pytest.raises(errors.DivisionByZero), worker.transaction():
            granted(worker, f"failed {n}", hold="session")
            worker.execute("select 1 / 0")
        worker.execute("begin")
        granted(worker, f"failed {n}", hold="session")
        worker.execute("rollback")
        receipt, epoch = granted(worker, f"failed {n}", hold="session")
        with superseded():
            append(worker, epoch + 1, run_id=f"failed {n}")
        one(worker, "fail", message_id=receipt.message_id, delivery=receipt.delivery, error="x")
    assert advisory_locks(conn, pid) == 1


def test_with_its_lock_taken_by_others_a_hold_is_a_lease(db, conn):
    worker = db.connect()
    conn.execute("select pg_advisory_lock(baton._session_lock_class(), %s)", (worker.info.backend_pid,))
    start(conn)
    _, epoch = granted(worker, hold="session")
    assert run(conn).replay_backend is None
    assert end(worker, epoch, 1).outcome == "ended"


# Superseded ---------------------------------------------------------------------------------------


def test_a_holder_that_comes_too_late_is_refused_and_nothing_of_its_transaction_stays(clock_db, server_log):
    conn, late = clock_db.connect(), clock_db.connect()
    start(conn)
    receipt, epoch = granted(late)
    advance(conn, "30 s")
    again, new_epoch = granted(conn)
    assert again.message_id == receipt.message_id
    with superseded(), late.transaction():
        late.execute("create table baton_test.mine ()")
        append(late, epoch)
    assert conn.execute("select to_regclass('baton_test.mine') as t").fetchone().t is None
    for verb in ("complete_run", "fail_run"):
        with superseded():
            one(late, verb, run_id="r", replay_epoch=epoch, **{"output" if verb == "complete_run" else "error": None})
    assert end(late, epoch, 1).outcome == "lost"
    assert log(conn) == [(1, "run_created")]
    assert incidents(conn) == ["replay_lost"]
    assert append(conn, new_epoch) == "appended"
    assert one(late, "extend", message_id=receipt.message_id, delivery=receipt.delivery).outcome == "lost"
    assert incidents(conn) == ["replay_lost", "lost"]


# The lost wake-up ---------------------------------------------------------------------------------

STEPS = ["claim", "grant", "read", "append", "end"]


@pytest.mark.parametrize("verb", [signal, wake])
def test_a_wake_up_at_any_point_of_a_replay_is_followed_by_one_that_sees_it(conn, verb):
    for before, appends in itertools.product([*STEPS, "after"], [True, False]):
        r = f"{before} {appends}"
        start(conn, r)
        receipt = epoch = seen = ended = None
        for step in [*STEPS, "after"]:
            if step == before:
                assert verb(conn, r) in ("signalled", "woken")
            if step == "claim":
                receipt = take(conn, r)
            elif step == "grant":
                epoch = begin(conn, receipt).replay_epoch
            elif step == "read":
                seen = last_seq(conn, r)
            elif step == "append" and appends:
                append(conn, epoch, run_id=r)
            elif step == "end":
                ended = end(conn, epoch, seen, r)
        unseen = verb is signal and before in ("append", "end")
        assert ended.outcome == ("again" if unseen else "ended"), r
        if unseen:
            assert ended.last_seq == last_seq(conn, r)
            assert end(conn, epoch, ended.last_seq, r).outcome == "ended"
        served_by_this_grant = before in ("claim", "grant")
        assert len(serve(conn, r)) == (0 if served_by_this_grant else 1), r
        assert run(conn, r).wake_pending is False and run(conn, r).wake_seq <= run(conn, r).replayed_seq
        assert messages(conn, r) == []


@pytest.mark.parametrize("verb", [signal, wake])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_end_waits_for_a_wake_up_in_flight_and_decides_on_what_became_of_it(conn, first, second, verb, ending):
    start(conn)
    _, epoch = granted(conn)
    first.run("begin")
    verb(first)
    send(second, "end_replay", run_id="r", replay_epoch=epoch, seen_seq=1)
    wait_blocked(conn, second, by=first)
    first.run(ending)
    [ended] = second.result()
    asks_again = verb is signal and ending == "commit"
    assert ended.outcome == ("again" if asks_again else "ended")
    if asks_again:
        assert end(conn, epoch, 2).outcome == "ended"
    assert len(messages(conn)) == (ending == "commit")


@pytest.mark.parametrize("verb", [signal, wake])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_wake_up_waits_for_an_end_in_flight_and_decides_on_what_became_of_it(conn, first, second, verb, ending):
    start(conn)
    _, epoch = granted(conn)
    first.run("begin")
    assert end(first, epoch, 1).outcome == "ended"
    send(second, f"{verb.__name__}_run", run_id="r", **({"name": "s"} if verb is signal else {}))
    wait_blocked(conn, second, by=first)
    first.run(ending)
    second.result()
    if ending == "rollback":
        assert end(conn, epoch, 1).outcome == ("again" if verb is signal else "ended")
        assert end(conn, epoch, last_seq(conn)).outcome == "ended"
    assert serve(conn) == [last_seq(conn)]


@pytest.mark.parametrize("verb", [signal, wake])
def test_a_wake_up_waits_for_a_grant_in_flight_and_gets_a_message_of_its_own(conn, first, second, verb):
    start(conn)
    receipt = take(conn)
    first.run("begin")
    epoch = begin(first, receipt).replay_epoch
    send(second, f"{verb.__name__}_run", run_id="r", **({"name": "s"} if verb is signal else {}))
    wait_blocked(conn, second, by=first)
    first.run("commit")
    second.result()
    assert len(messages(conn)) == 2, "the key was given up at the grant"
    assert end(conn, epoch, last_seq(conn)).outcome == "ended"
    assert len(serve(conn)) == 1


def test_a_wake_that_is_handed_over_outlives_a_holder_that_dies(clock_db):
    conn = clock_db.connect()
    start(conn)
    _, epoch = granted(conn)
    end(conn, epoch, 1, wake_at="2026-01-01 00:00:10+00")
    wake(conn)
    granted(conn)
    advance(conn, "10 s")
    timer = take(conn)
    assert begin(conn, timer).outcome == "handed_over"
    assert [m.dedupe_key for m in messages(conn)] == [None], "the timer's message is gone"
    conn.execute("delete from baton.messages")
    assert wedged(conn) == [("r", "replay")]
    call(conn, "recover_runs")
    assert len(serve(conn)) == 1


def test_events_that_ask_for_nothing_never_make_an_end_spin(conn):
    start(conn)
    _, epoch = granted(conn)
    for n in range(20):
        append(conn, epoch, f"x.{n}")
        conn.execute("select baton._append(r, 'task_completed', null, null, baton._now()) from baton.runs as r")
        conn.execute("update baton.runs set last_seq = last_seq + 1")
    assert end(conn, epoch, 1).outcome == "ended"
    assert end(conn, epoch, 1).outcome == "ended"
    assert messages(conn) == []


# What a holder does not do ------------------------------------------------------------------------


def test_a_holder_keeps_no_transaction_open_and_nobody_waits_for_it(db, conn):
    holder = db.connect()
    start(conn)
    granted(holder, hold="session")
    [backend] = conn.execute("select state, xact_start, backend_xmin, backend_xid from pg_stat_activity where pid = %s",
                             (holder.info.backend_pid,)).fetchall()
    assert backend == ("idle", None, None, None)
    locks = conn.execute("select locktype from pg_locks where pid = %s", (holder.info.backend_pid,)).fetchall()
    assert locks == [("advisory",)]
    assert conn.execute("select count(*) as n from pg_locks where not granted").fetchone().n == 0


def test_wakes_signals_and_a_cancellation_commit_while_a_replay_is_held(conn, first):
    start(conn)
    _, epoch = granted(conn, hold="session")
    first.run("set lock_timeout = '2s'")
    for n in range(100):
        assert wake(first) == "woken"
        assert signal(first) == "signalled"
    assert len(messages(conn)) == 2, "all of them share one message"
    assert end(conn, epoch, 1).outcome == "again"
    assert end(conn, epoch, 101).outcome == "ended"
    assert serve(conn) == [101], "and lead to one replay after this one, at once"
    wake(conn)
    granted(conn)
    assert cancel(first) == "done"


def test_a_hundred_wakes_from_many_sessions_lead_to_two_replays_at_the_most(db, conn):
    start(conn)
    assert len(serve(conn)) == 1
    barrier = threading.Barrier(5)

    def ring():
        own = db.connect(options="-c lock_timeout=20s")
        barrier.wait()
        for _ in range(25):
            wake(own)

    threads = [threading.Thread(target=ring) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait()
    for thread in threads:
        thread.join()
    assert len(messages(conn)) == 1
    assert len(serve(conn)) == 1


def test_where_the_run_is_held_for_long_a_begin_answers_busy_and_comes_again(conn, first, server_log):
    start(conn)
    receipt = take(conn)
    first.run("begin")
    first.run("select baton._lock_run('r')")
    before = now(conn)
    answer = begin(conn, receipt)
    assert answer.outcome == "busy" and 0.8 <= answer.retry_after.total_seconds() <= 1.2
    [message] = messages(conn)
    assert message.claimed_at is None and run(conn).wake_message_id == message.message_id
    assert before <= message.visible_at - answer.retry_after <= now(conn)
    assert one(conn, "extend", message_id=receipt.message_id, delivery=receipt.delivery).outcome == "lost"
    first.run("rollback")
    assert begin(conn, receipt).outcome == "lost"
    assert server_log.errors() == []


@pytest.mark.parametrize("purpose", ["timer", "s\x1f0\x1fbackstop\x1f1"])
def test_a_begin_that_answers_busy_leaves_a_driver(conn, first, purpose):
    """What waited for its time and is put off by a second is not waiting for its time any more."""
    start(conn)
    gone, epoch = granted(conn)
    body(conn, gone)
    assert end(conn, epoch, 1, wake_at=now(conn)).outcome == "ended"
    conn.execute("delete from baton.messages where message_id = %s", (gone.message_id,))
    conn.execute("update baton.messages set dedupe_key = %s", ("r\x1f" + purpose,))
    receipt = take(conn)
    first.run("begin")
    first.run("select baton._lock_run('r')")
    assert begin(conn, receipt).outcome == "busy"
    first.run("rollback")
    [message] = messages(conn)
    assert message.message_id == receipt.message_id and message.claimed_at is None and message.dedupe_key is None
    assert wedged(conn) == [] and call(conn, "recover_runs") == [] and incidents(conn) == []


def cross(conn, first, second):
    """The first holds a's replay and a message of b, the second b's and a message of a; their transactions are open.
    Answers each one's own run, its epoch, and the message of the other's."""
    held = {}
    for session, run_id in ((first, "a"), (second, "b")):
        start(conn, run_id)
        held[run_id] = granted(session, run_id)[1]
        wake(conn, run_id)
    for session in (first, second):
        session.run("set deadlock_timeout = '1h'")
    receipts = {"a": take(first, "b"), "b": take(second, "a")}
    first.run("begin")
    second.run("begin")
    return [(run_id, held[run_id], receipts[run_id]._asdict()) for run_id in "ab"]


def test_two_that_go_from_run_to_run_in_opposite_orders_are_busy(conn, first, second, server_log):
    for session, (run_id, epoch, _) in zip((first, second), them := cross(conn, first, second), strict=True):
        session.run("set deadlock_timeout = '1s'")
        assert end(session, epoch, 1, run_id).outcome == "ended"
    for session, (_, _, receipt) in zip((first, second), them, strict=True):
        send(session, "begin_replay", **receipt)
    assert [session.result()[0].outcome for session in (first, second)] == ["busy", "busy"]
    first.run("commit")
    second.run("commit")
    assert [m.claimed_at for run_id in "ab" for m in messages(conn, run_id)] == [None, None]
    assert wedged(conn) == [] and server_log.errors() == []


def test_of_two_that_wait_for_each_other_from_run_to_run_one_gives_up_and_the_other_goes_on(conn, first, second, server_log):
    """The wait inside begin_replay itself, made long enough to be seen, and for one of them longer than for the other."""
    (a, a_epoch, of_b), (b, b_epoch, of_a) = cross(conn, first, second)
    assert end(first, a_epoch, 1, a).outcome == end(second, b_epoch, 1, b).outcome == "ended"
    wait = "alter function baton._lock_soon(text, bigint, bigint) set lock_timeout = "
    conn.execute(wait + "'1500ms'")
    send(first, "begin_replay", **of_b)
    wait_blocked(conn, first, by=second)
    conn.execute(wait + "'20s'")
    send(second, "begin_replay", **of_a)
    wait_blocked(conn, second, by=first)
    assert first.result()[0].outcome == "busy"
    first.run("commit")
    assert second.result()[0].outcome == "granted"
    second.run("commit")
    assert not run(conn, "a").replay_ended and [m.claimed_at for m in messages(conn, "b")] == [None]
    assert wedged(conn) == [] and server_log.errors() == []


def test_who_begins_the_next_before_the_end_of_the_last_may_end_in_a_deadlock(conn, first, second):
    (a, a_epoch, of_b), (b, b_epoch, of_a) = cross(conn, first, second)
    assert one(first, "begin_replay", **of_b).outcome == one(second, "begin_replay", **of_a).outcome == "handed_over"
    send(first, "end_replay", run_id=a, replay_epoch=a_epoch, seen_seq=1)
    wait_blocked(conn, first, by=second)
    second.run("set deadlock_timeout = '10ms'")
    send(second, "end_replay", run_id=b, replay_epoch=b_epoch, seen_seq=1)
    assert isinstance(second.error(), errors.DeadlockDetected)
    second.run("rollback")
    assert first.result()[0].outcome == "ended"
    first.run("commit")
    assert end(conn, b_epoch, 1, b).outcome == "ended"


@pytest.mark.parametrize("table, mode", [("runs", "share"), ("runs", "access exclusive"), ("messages", "access exclusive")])
def test_a_table_that_somebody_indexes_or_truncates_is_waited_for(conn, first, second, server_log, table, mode):
    start(conn)
    receipt = take(conn)
    first.run("begin")
    first.run(f"lock table baton.{table} in {mode} mode")
    send(second, "begin_replay", message_id=receipt.message_id, delivery=receipt.delivery)
    wait_blocked(conn, second, by=first)
    wait_until(lambda: conn.execute("select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
                                    " and clock_timestamp() > query_start + interval '300 milliseconds'",
                                    (second.pid,)).fetchone() is not None or second.done(), "it waits for longer than for a row")
    first.run("commit")
    [answer] = second.result()
    assert answer.outcome == "granted" and server_log.errors() == []


def test_an_end_that_waited_for_an_extend_reads_the_clock_after_it(clock_db):
    conn, first, second = clock_db.connect(), clock_db.session("first"), clock_db.session("second")
    start(conn)
    receipt, epoch = granted(conn)
    wake(conn)
    conn.execute("delete from baton.messages where message_id = %s", (run(conn).wake_message_id,))
    first.run("begin")
    one(first, "extend", message_id=receipt.message_id, delivery=receipt.delivery)
    send(second, "end_replay", run_id="r", replay_epoch=epoch, seen_seq=1)
    wait_blocked(conn, second, by=first)
    advance(conn, "20 seconds")
    first.run("commit")
    [answer] = second.result()
    assert answer.outcome == "ended"
    [message] = messages(conn)
    assert message.visible_at == now(conn)


def test_to_give_back_beside_a_wake_that_somebody_has_open_waits_for_nobody(conn, first):
    conn.execute("set lock_timeout = '3 s'")
    start(conn)
    receipt, _ = granted(conn)
    wake(conn)
    first.run("begin")
    assert take(first) is not None
    assert one(conn, "park", message_id=receipt.message_id, delivery=receipt.delivery, delay="1 hour").outcome == "parked"
    first.run("commit")
    assert len(messages(conn)) == 2


def test_a_timer_that_somebody_has_open_delays_no_end_and_no_next_timer(conn, first):
    conn.execute("set lock_timeout = '3 s'")
    start(conn)
    _, epoch = granted(conn)
    in_an_hour, in_two = [conn.execute("select now() + %s * interval '1 hour' as at", (n,)).fetchone().at for n in (1, 2)]
    assert end(conn, epoch, 1, wake_at=in_an_hour).outcome == "ended"
    wake(conn)
    _, epoch = granted(conn)
    first.run("begin")
    first.run("select from baton.messages where visible_at = %s for update", (in_an_hour,))
    assert end(conn, epoch, 1, wake_at=in_two).outcome == "ended"
    first.run("commit")
    assert [message.visible_at for message in messages(conn)] == [in_an_hour, in_two]


def test_a_release_that_waited_for_an_extend_reads_the_clock_after_it(clock_db):
    conn, first, second = clock_db.connect(), clock_db.session("first"), clock_db.session("second")
    start(conn)
    receipt, _ = granted(conn)
    first.run("begin")
    one(first, "extend", message_id=receipt.message_id, delivery=receipt.delivery)
    send(second, "release_replay", run_id="r")
    wait_blocked(conn, second, by=first)
    advance(conn, "20 seconds")
    first.run("commit")
    assert second.result()[0].outcome == "released"
    assert {message.visible_at for message in messages(conn)} == {now(conn)}


@pytest.mark.parametrize("verb, result", [("complete_run", "output"), ("fail_run", "error")])
def test_an_end_of_a_run_that_waited_for_an_extend_reads_the_clock_after_it(clock_db, verb, result):
    conn, first, second = clock_db.connect(), clock_db.session("first"), clock_db.session("second")
    start(conn)
    receipt, epoch = granted(conn)
    first.run("begin")
    one(first, "extend", message_id=receipt.message_id, delivery=receipt.delivery)
    send(second, verb, run_id="r", replay_epoch=epoch, **{result: "{}"})
    wait_blocked(conn, second, by=first)
    advance(conn, "20 seconds")
    first.run("commit")
    [answer] = second.result()
    assert answer.outcome == "done"
    assert messages(conn) == []
    assert run(conn).ended_at == now(conn)


def test_who_owns_bodies_keeps_its_message_when_a_begin_answers_busy(conn, first):
    start(conn)
    receipt, epoch = granted(conn)
    body(conn, receipt)
    end(conn, epoch, 1)
    first.run("begin")
    first.run("select baton._lock_run('r')")
    assert begin(conn, receipt).outcome == "busy"
    first.run("rollback")
    assert one(conn, "extend", message_id=receipt.message_id, delivery=receipt.delivery).outcome == "extended"
    assert begin(conn, receipt).outcome == "granted"


# Ends ---------------------------------------------------------------------------------------------

ENDS = {
    "complete": ("completed", "select * from baton.complete_run('{}', {}, '1')"),
    "fail": ("failed", "select * from baton.fail_run('{}', {}, '1')"),
    "cancel": ("cancelled", "select * from baton.cancel_run('{}', '{}')"),
}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_of_two_ends_the_second_waits_and_is_told_the_first(conn, first, second, ending):
    for winner, loser in itertools.permutations(ENDS, 2):
        r = f"{winner} before {loser}"
        start(conn, r)
        _, epoch = granted(conn, r)
        first.run("begin")
        assert first.run(ENDS[winner][1].format(r, epoch)) == [("done", ENDS[winner][0])]
        second.start(ENDS[loser][1].format(r, epoch))
        wait_blocked(conn, second, by=first)
        first.run(ending)
        status = ENDS[winner if ending == "commit" else loser][0]
        assert second.result() == [("terminal" if ending == "commit" else "done", status)]
        assert run(conn, r).status == status
        assert log(conn, r) == [(1, "run_created"), (2, f"run_{status}")]


def test_racing_ends_write_one_terminal_event_and_all_are_told_the_truth(db, conn):
    rounds = 500
    conn.execute("select baton.start_run('w', null, 'run ' || n, 'q') from generate_series(1, %s) as n", (rounds,))
    epochs = dict(conn.execute("select b.run_id, b.replay_epoch from baton.claim('q', max_messages => %s) as c,"
                               " baton.begin_replay(c.message_id, c.delivery) as b", (rounds,)).fetchall())
    assert len(epochs) == rounds
    barrier = threading.Barrier(3, timeout=60)
    told = {name: {} for name in ENDS}

    def race(name):
        own = db.connect()
        for n in range(1, rounds + 1):
            statement = ENDS[name][1].format(f"run {n}", epochs[f"run {n}"])
            barrier.wait()
            told[name][f"run {n}"] = own.execute(statement).fetchone()

    threads = [threading.Thread(target=race, args=(name,)) for name in ENDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = conn.execute("select run_id, type from baton.events where type <> 'run_created'").fetchall()
    assert len(ends) == rounds
    for run_id, type in ends:
        answers = [told[name][run_id] for name in ENDS]
        assert sorted(a.outcome for a in answers) == ["done", "terminal", "terminal"]
        assert {a.status for a in answers} == {type.removeprefix("run_")}
    assert conn.execute("select count(*) as n from baton.messages").fetchone().n == 0
    assert len({type for _, type in ends}) > 1, "the races were none"


# Events -------------------------------------------------------------------------------------------


def test_positions_are_dense_and_a_reader_misses_nothing_in_any_commit_order(db, conn):
    start(conn, "other")
    conn.execute("set lock_timeout = '2s'")
    sessions = [db.session(f"session {n}") for n in range(3)]
    for order, undone in itertools.product(itertools.permutations(range(3)), (None, 0, 1, 2)):
        r = f"{order} without {undone}"
        start(conn, r)
        read = []

        def look(r=r, read=read):
            for event in call(conn, "read_events", run_id=r, after_seq=len(read)):
                read.append(event)
                assert event.seq == len(read), "an event appeared before one that was read"

        for session in sessions:
            session.run("begin")
        for place, n in enumerate(order):
            send(sessions[n], "signal_run", run_id=r, name=f"of {n}")
            if place == 0:
                sessions[n].result()
            else:
                wait_blocked(conn, sessions[n])
            look()
        for place, n in enumerate(order):
            sessions[n].run("rollback" if n == undone else "commit")
            if place < 2:
                sessions[order[place + 1]].result()
            assert signal(conn, "other") == "signalled", "another run is not blocked"
            look()
        assert [e.payload["name"] for e in read[1:]] == [f"of {n}" for n in order if n != undone], r
        assert serve(conn, r) == [len(read)] and run(conn, r).last_seq == len(read)


def test_one_creation_of_two_at_the_same_moment_is_answered_not_an_error(conn, first, second, server_log):
    for ending, expected in (("commit", "exists"), ("rollback", "created")):
        first.run("begin")
        assert start(first, ending).outcome == "created"
        send(second, "start_run", workflow_name="w", input=None, run_id=ending, queue_name="q")
        wait_blocked(conn, second, by=first)
        first.run(ending)
        [answer] = second.result()
        assert answer.outcome == expected and len(messages(conn, ending)) == 1
    assert server_log.errors() == []


def test_one_signal_of_two_with_a_key_at_the_same_moment_is_a_duplicate(conn, first, second, server_log):
    start(conn)
    first.run("begin")
    assert signal(first, dedupe_key="k") == "signalled"
    send(second, "signal_run", run_id="r", name="s", dedupe_key="k")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    [answer] = second.result()
    assert answer.outcome == "duplicate" and server_log.errors() == []


# Recovery -----------------------------------------------------------------------------------------


def test_ten_sessions_recover_a_run_once(db, conn):
    for n in range(20):
        start(conn, f"lost {n}")
    conn.execute("delete from baton.messages")
    for _ in range(3):
        barrier = threading.Barrier(10, timeout=60)
        sessions = [db.connect() for _ in range(10)]
        found = []

        def recover(own, barrier=barrier, found=found):
            barrier.wait()
            for _ in range(5):
                found.extend(r.run_id for r in call(own, "recover_runs"))

        threads = [threading.Thread(target=recover, args=(own,)) for own in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == sorted(f"lost {n}" for n in range(20))
        assert all(len(messages(conn, f"lost {n}")) == 1 for n in range(20))
        assert wedged(conn) == []
        conn.execute("delete from baton.messages")


def test_a_second_recovery_returns_at_once_also_the_very_first_time(conn, first, second):
    for _ in range(2):
        start(conn)
        conn.execute("delete from baton.messages")
        first.run("begin")
        assert len(call(first, "recover_runs")) == 1
        second.run("set lock_timeout = '2s'")
        assert call(second, "recover_runs") == []
        first.run("rollback")
    assert len(call(second, "recover_runs")) == 1


def test_recovery_does_not_wait_for_a_run_that_somebody_holds(conn, first):
    for run_id in ("held", "lost"):
        start(conn, run_id)
    conn.execute("delete from baton.messages")
    first.run("begin")
    first.run("select baton._lock_run('held')")
    conn.execute("set lock_timeout = '2s'")
    assert [r.run_id for r in call(conn, "recover_runs")] == ["lost"]
    first.run("rollback")
    assert [r.run_id for r in call(conn, "recover_runs")] == ["held"]


def test_recovery_decides_anew_under_the_lock(conn, first, second):
    """Between its look and its lock somebody wakes the run: there is still one message."""
    start(conn)
    conn.execute("delete from baton.messages")
    first.run("begin")
    assert [r.run_id for r in call(first, "recover_runs")] == ["r"]
    send(second, "wake_run", run_id="r")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    second.result()
    assert len(messages(conn)) == 1
    conn.execute("delete from baton.messages")
    first.run("begin")
    wake(first)
    assert call(conn, "recover_runs") == []
    first.run("commit")
    assert len(messages(conn)) == 1


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [False, True], ids=["quiet", "with a signal every second"])
@pytest.mark.parametrize("way", ["fails", "dies"])
def test_a_replay_that_never_comes_through_ends_its_run_after_as_many_tries_as_the_limit_says(clock_db, way, signals):
    conn = clock_db.connect()
    conn.execute("update baton.settings set max_failures = 4, max_lapses = 3")
    start(conn)
    tries, most = [], 0
    for second in range(400):
        if signals:
            signal(conn)
        if second % 5 == 0:
            call(conn, "tick")
        while receipt := take(conn):
            answer = begin(conn, receipt)
            if answer.outcome == "granted":
                tries.append(second)
                if way == "fails":
                    one(conn, "fail", message_id=receipt.message_id, delivery=receipt.delivery, error="no", delay="10 s")
        most = max(most, len(messages(conn)))
        if run(conn).ended_at:
            break
        advance(conn, "1 s")
    reason, limit = {"fails": ("max_failures", 4), "dies": ("max_lapses", 3)}[way]
    assert len(tries) == limit
    answer = one(conn, "get_run", run_id="r")
    assert answer.status == "failed" and answer.error["reason"] == reason
    assert most <= 2, "signals don't multiply messages"
    if way == "fails":
        assert [b - a for a, b in itertools.pairwise(tries)] == [10, 10, 10], "and don't cut the back-off"
    assert messages(conn) == []


def test_a_run_that_meets_deploys_between_successes_never_ends(clock_db):
    conn = clock_db.connect()
    conn.execute("update baton.settings set max_failures = 3, max_lapses = 3")
    start(conn)
    for _ in range(10):
        for _ in range(2):
            receipt, _ = granted(conn)
            one(conn, "fail", message_id=receipt.message_id, delivery=receipt.delivery, error="old", delay="1 s")
            advance(conn, "1 s")
            granted(conn)
            advance(conn, "30 s")
        _, epoch = granted(conn)
        assert (run(conn).failures, run(conn).lapses) == (2, 2)
        assert end(conn, epoch, 1).outcome == "ended" and (run(conn).failures, run(conn).lapses) == (0, 0)
        wake(conn)


# Isolation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_verbs_that_decide_over_several_rows_refuse_other_levels(conn, first, level):
    start(conn)
    receipt, epoch = granted(conn)
    m, d = receipt
    first.run(f"set default_transaction_isolation = '{level}'")
    for verb in (
        "start_run('w', null)", "signal_run('r', 's')", "wake_run('r')", f"begin_replay({m}, {d})",
        f"end_replay('r', {epoch}, 1)", f"append_event('r', {epoch}, 'x.y')", f"complete_run('r', {epoch}, null)",
        f"fail_run('r', {epoch}, null)", "cancel_run('r', 'x')", "release_replay('r')", "recover_runs()", "tick()",
        f"park({m}, {d})", f"fail({m}, {d}, 'x')",
    ):
        first.start(f"select * from baton.{verb}")
        assert first.error().sqlstate == "25001", verb
    for verb in ("get_run('r')", "read_events('r')", f"extend({m}, {d})", "claim('q')", f"ack({m}, {d})"):
        first.run(f"select * from baton.{verb}")
    assert [m.delivery for m in messages(conn)] == [receipt.delivery] and run(conn).replay_epoch == epoch


# An ack --------------------------------------------------------------------------------------------


def test_an_ack_that_waited_for_another_message_sees_that_the_run_has_ended_meanwhile(conn, first, second):
    one(conn, "send", queue_name="users", payload=None)
    [users] = call(conn, "claim", queue_name="users")
    start(conn)
    runs = take(conn)
    receipts = [{"message_id": m.message_id, "delivery": m.delivery} for m in (users, runs)]
    first.run("begin")
    one(first, "extend", **receipts[0])
    send(second, "ack_many", receipts=json.dumps(receipts))
    wait_blocked(conn, second, by=first)
    assert cancel(conn) == "done"
    first.run("commit")
    assert [answer.outcome for answer in second.result()] == ["acked", "acked"]
    assert messages(conn) == []


def test_an_ack_looks_again_at_what_it_did_not_remove_and_waits_for_nobody(db, conn, first, second):
    third = db.session("third")
    start(conn)
    runs = take(conn)
    one(conn, "send", queue_name="users", payload=None)
    [users] = call(conn, "claim", queue_name="users")
    receipts = [{"message_id": m.message_id, "delivery": m.delivery} for m in (runs, users)]
    assert runs.message_id < users.message_id
    first.run("begin")
    first.run(f"select from baton.messages where message_id = {users.message_id} for update")
    send(second, "ack_many", receipts=json.dumps(receipts))
    wait_blocked(conn, second, by=first)
    assert cancel(conn) == "done"
    send(third, "extend_many", receipts=json.dumps(receipts))
    wait_blocked(conn, third, by=second)
    first.run("commit")
    assert [answer.outcome for answer in second.result()] == ["in_use", "acked"]
    assert [answer.outcome for answer in third.result()] == ["cancelled", "lost"]
    assert messages(conn) == []


def test_an_ack_of_what_an_open_run_needs_waits_for_nobody(conn, first):
    conn.execute("set lock_timeout = '5s'")
    start(conn)
    receipt = take(conn)
    receipt = {"message_id": receipt.message_id, "delivery": receipt.delivery}
    first.run("begin")
    one(first, "extend", **receipt)
    assert one(conn, "ack", may_be_in_use=True, **receipt).outcome == "in_use"


# A caller's transaction ---------------------------------------------------------------------------


def test_a_grant_that_its_caller_rolls_back_leaves_nothing(conn, first):
    start(conn)
    receipt = take(conn)
    first.run("begin")
    answer = begin(first, receipt, "session")
    assert answer.outcome == "granted"
    first.run("rollback")
    with superseded():
        append(conn, answer.replay_epoch)
    assert run(conn).status == "pending" and wedged(conn) == []
    assert begin(conn, receipt, "session").outcome == "granted"
