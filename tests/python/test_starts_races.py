"""Who waits, who wins: the verbs of worker starts against each other, in sessions whose order is forced.

A session is known to wait when pg_blocking_pids says so. The clock is the test's own: deadlines pass when a test says.
"""

import itertools
import threading

import psycopg
import pytest
import standin
from conftest import wait_blocked, wait_until
from psycopg import errors
from starts import (
    accept, advance, begin, call, deliveries, function, incidents, new_id, one, reconcile, register, reserve, reserved,
    startup, worker,
)

OLD_ENOUGH = {"pending_timeout": "60 s", "heartbeat_timeout": "1 h"}


@pytest.fixture
def db(clock_db):
    return clock_db


def hold(session, function_name="orders"):
    """The session locks the function's row until it commits."""
    session.run("begin")
    session.run("select from baton.worker_functions where function_name = %s for no key update", (function_name,))


# The deadline passes while an acceptance is open --------------------------------------------------

LOCKS_AND_CHECKS_IN_ONE = """
create or replace function baton.reserve_worker_invocation(
  function_name text, out outcome text, out invocation_id uuid, out expires_at timestamptz, out retry_after interval
)
language plpgsql
as $$
declare
  v_name text;
begin
  select f.function_name
  into v_name
  from baton.worker_functions as f
  where f.function_name = reserve_worker_invocation.function_name
    and not baton._is_pending(f, baton._now())
    and not exists (
      select
      from baton.workers as w
      where w.function_name = f.function_name and baton._is_healthy(w, f.heartbeat_timeout, baton._now())
    )
  for no key update of f;
  outcome := 'pending';
  if found then
    update baton.worker_functions as f
    set invocation_id = gen_random_uuid(), invocation_status = 'pending',
      invocation_expires_at = baton._now() + f.pending_timeout
    where f.function_name = v_name
    returning 'reserved', f.invocation_id, f.invocation_expires_at into outcome, invocation_id, expires_at;
  end if;
end;
$$
"""


def acceptance_commits_late(conn, first, second):
    """What a reservation answers that waited for an acceptance which began before the deadline."""
    register(conn, **OLD_ENOUGH)
    invocation_id = reserve(conn)
    first.run("begin")
    assert accept(first, invocation_id, new_id()) == "accepted"
    advance(conn, "61 s")
    begin(second, "reserve_worker_invocation", function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    [row] = second.result()
    return row.outcome


def test_an_acceptance_begun_before_the_deadline_leaves_nothing_to_reserve(conn, first, second):
    assert acceptance_commits_late(conn, first, second) == "ready"
    assert startup(conn).startup_state == "ready"
    assert function(conn).failed_starts == 0


def test_a_reservation_that_checks_in_the_locking_statement_starts_a_second_worker(conn, first, second):
    """The same, on a function that looks for workers with the snapshot from before it waited."""
    conn.execute(LOCKS_AND_CHECKS_IN_ONE)
    assert acceptance_commits_late(conn, first, second) == "reserved"


def test_ensure_workers_starts_no_second_worker_beside_an_acceptance_begun_in_time(conn, first):
    register(conn, **OLD_ENOUGH)
    invocation_id = reserve(conn)
    first.run("begin")
    assert accept(first, invocation_id, new_id()) == "accepted"
    advance(conn, "61 s")
    [row] = call(conn, "ensure_workers")
    assert (row.outcome, row.function_name) == ("locked", "orders")
    first.run("commit")
    assert call(conn, "ensure_workers") == []
    assert function(conn).failed_starts == 0


def test_ensure_workers_decides_anew_under_the_lock(conn, clock_db, first):
    """The candidates are found before an acceptance commits, and one is locked after it."""
    register(conn, "a", **OLD_ENOUGH)
    register(conn, "b", **OLD_ENOUGH)
    invocation_id = reserve(conn, "b")
    advance(conn, "61 s")
    conn.execute("""
        create function public.wait_in_the_middle() returns trigger language plpgsql as $$
        begin
          perform pg_advisory_xact_lock(1);
          return new;
        end
        $$;
        create trigger wait_in_the_middle before insert on baton.messages
        for each row execute function public.wait_in_the_middle();
        update baton.worker_functions set last_invoked_at = baton._now() - interval '1 day' where function_name = 'a';
        update baton.worker_functions set invocation_expires_at = baton._now() where function_name = 'b';
    """)
    blocker = clock_db.session("blocker")
    blocker.run("begin")
    blocker.run("select pg_advisory_xact_lock(1)")
    begin(first, "ensure_workers")
    wait_blocked(conn, first, by=blocker)
    conn.execute("update baton.worker_functions set invocation_expires_at = baton._now() + interval '1 s'"
                 " where function_name = 'b'")
    assert accept(conn, invocation_id, new_id(), "b") == "accepted"
    blocker.run("commit")
    assert [(row.outcome, row.function_name) for row in first.result()] == [("reserved", "a")]
    assert startup(conn, "b").startup_state == "ready"


# Two runtimes, one invocation ---------------------------------------------------------------------

def test_two_runtimes_accept_at_the_same_moment_and_one_wins(conn, clock_db, first, second):
    register(conn)
    invocation_id = reserve(conn)
    blocker = clock_db.session("blocker")
    hold(blocker)
    workers = [new_id(), new_id()]
    for session, worker_id in zip((first, second), workers, strict=True):
        begin(session, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id,
              worker_id=worker_id)
        wait_blocked(conn, session)
    blocker.run("commit")
    answers = [session.result()[0] for session in (first, second)]
    assert sorted((a.outcome, a.reason) for a in answers) == [("accepted", None), ("rejected", "already_accepted")]
    [winner] = [w for w, answer in zip(workers, answers, strict=True) if answer.outcome == "accepted"]
    assert conn.execute("select worker_id from baton.workers").fetchall() == [(winner,)]
    assert function(conn).invocation_worker_id == winner


def test_an_open_acceptance_shows_as_pending_and_then_as_ready(conn, first):
    register(conn)
    invocation_id = reserve(conn)
    first.run("begin")
    assert accept(first, invocation_id, new_id()) == "accepted"
    assert startup(conn).startup_state == "pending"
    assert call(conn, "ensure_workers") == []
    first.run("commit")
    assert startup(conn).startup_state == "ready"
    assert call(conn, "ensure_workers") == []


def test_an_acceptance_that_is_rolled_back_leaves_the_invocation_pending(conn, first, second):
    register(conn)
    invocation_id = reserve(conn)
    first.run("begin")
    assert accept(first, invocation_id, new_id()) == "accepted"
    begin(second, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=new_id())
    wait_blocked(conn, second, by=first)
    first.run("rollback")
    assert second.result()[0].outcome == "accepted"
    assert conn.execute("select count(*) from baton.workers").fetchone() == (1,)


def test_one_worker_id_is_accepted_by_one_function_only(conn, first, second):
    register(conn, "a")
    register(conn, "b")
    ids = {name: reserve(conn, name) for name in "ab"}
    worker_id = new_id()
    first.run("begin")
    assert accept(first, ids["a"], worker_id, "a") == "accepted"
    begin(second, "accept_worker_invocation", function_name="b", invocation_id=ids["b"], worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].reason == "worker_gone"
    assert worker(conn, worker_id).function_name == "a"
    assert function(conn, "b").invocation_status == "pending"


@pytest.mark.parametrize("late", [False, True], ids=["in time", "after the deadline"])
def test_an_acceptance_whose_answer_was_lost_is_repeated(conn, clock_db, late):
    register(conn, **OLD_ENOUGH)
    invocation_id, worker_id = reserve(conn), new_id()
    lost = clock_db.connect()
    assert accept(lost, invocation_id, worker_id) == "accepted"
    lost.close()
    if late:
        advance(conn, "61 s")
    assert reconcile(conn, invocation_id) == "ready"
    assert accept(conn, invocation_id, worker_id) == "accepted"
    assert accept(conn, invocation_id, new_id()) == "already_accepted"
    assert conn.execute("select worker_id from baton.workers").fetchall() == [(worker_id,)]
    assert function(conn).failed_starts == 0


def test_a_connection_that_ends_before_its_commit_has_accepted_nothing(conn, clock_db):
    register(conn)
    invocation_id, worker_id = reserve(conn), new_id()
    lost = clock_db.connect()
    lost.execute("begin")
    assert accept(lost, invocation_id, worker_id) == "accepted"
    lost.close()
    wait_until(lambda: one(conn, "reconcile_worker_invocation", function_name="orders", invocation_id=invocation_id,
                           worker_id=None).outcome == "start", "the invocation is free again")
    assert accept(conn, invocation_id, worker_id) == "accepted"


def test_duplicate_deliveries_before_during_and_after_the_acceptance(conn, first, second):
    register(conn)
    invocation_id, worker_id = reserve(conn), new_id()
    assert [reconcile(conn, invocation_id), reconcile(conn, invocation_id)] == ["start", "start"]
    assert function(conn).invocation_status == "pending"
    first.run("begin")
    assert accept(first, invocation_id, worker_id) == "accepted"
    begin(second, "reconcile_worker_invocation", function_name="orders", invocation_id=invocation_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    during = second.result()[0]
    after = one(conn, "reconcile_worker_invocation", function_name="orders", invocation_id=invocation_id)
    assert during == after
    assert (after.outcome, after.worker_id, after.reason) == ("ready", worker_id, None)
    assert conn.execute("select count(*) from baton.workers").fetchone() == (1,)


# Late and superseded ------------------------------------------------------------------------------

def test_a_deadline_that_passes_during_initialisation_refuses_the_worker(conn):
    register(conn)
    invocation_id = reserve(conn)
    assert reconcile(conn, invocation_id) == "start"
    advance(conn, "60 s")
    assert accept(conn, invocation_id, new_id()) == "expired"
    assert accept(conn, invocation_id, new_id()) == "expired"
    assert function(conn).failed_starts == 1
    assert conn.execute("select count(*) from baton.workers").fetchone() == (0,)


def test_a_deadline_that_passes_while_an_acceptance_waits_refuses_it(conn, first, second):
    register(conn)
    invocation_id = reserve(conn)
    hold(first)
    begin(second, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=new_id())
    wait_blocked(conn, second, by=first)
    advance(conn, "60 s")
    first.run("commit")
    assert second.result()[0].reason == "expired"
    assert conn.execute("select count(*) from baton.workers").fetchone() == (0,)


def test_a_deadline_that_passes_while_an_acceptance_waits_for_its_workers_id_refuses_it(conn, first, second):
    """Somebody else brings the same id, for another function and for the first time, and then thinks better of it."""
    register(conn)
    register(conn, "another")
    invocation_id, worker_id = reserve(conn), new_id()
    first.run("begin")
    assert one(first, "register_worker", worker_id=worker_id, function_name="another").outcome == "registered"
    begin(second, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    advance(conn, "60 s")
    first.run("rollback")
    assert second.result()[0].reason == "expired"
    assert conn.execute("select count(*) from baton.workers").fetchone() == (0,)


def test_a_registration_that_waited_for_its_workers_id_completes_no_expired_start(conn, first, second):
    register(conn)
    register(conn, "another")
    reserve(conn)
    worker_id = new_id()
    first.run("begin")
    assert one(first, "register_worker", worker_id=worker_id, function_name="another").outcome == "registered"
    begin(second, "register_worker", worker_id=worker_id, function_name="orders")
    wait_blocked(conn, second, by=first)
    advance(conn, "60 s")
    first.run("rollback")
    assert second.result()[0].outcome == "registered"
    assert (function(conn).invocation_status, function(conn).invocation_error) == ("failed", "expired")


def test_an_id_that_failed_or_was_replaced_authorises_nothing_any_more(conn):
    register(conn)
    old = reserve(conn)
    advance(conn, "60 s")
    new = reserve(conn)
    assert [reconcile(conn, old), accept(conn, old, new_id())] == ["superseded", "superseded"]
    assert one(conn, "dismiss_worker_invocation", function_name="orders", invocation_id=old, reason="late").outcome \
        == "ignored"
    assert (function(conn).invocation_id, function(conn).invocation_status) == (new, "pending")
    assert accept(conn, new, new_id()) == "accepted"
    assert one(conn, "dismiss_worker_invocation", function_name="orders", invocation_id=new, reason="late").outcome \
        == "ignored"
    assert startup(conn).startup_state == "ready"


def test_a_delivery_that_a_sender_still_holds_does_not_keep_the_next_start_back(conn):
    """A sender claims the request, goes, and the invocation expires before the claim does."""
    register(conn)
    [old] = reserved(conn).values()
    advance(conn, "50 s")
    [held] = call(conn, "claim_deliveries")
    advance(conn, "15 s")
    [new] = reserved(conn).values()
    assert [d.payload["body"]["invocation_id"] for d in deliveries(conn)] == [str(old), str(new)]
    assert [d.payload["body"]["invocation_id"] for d in call(conn, "claim_deliveries")] == [str(new)]
    advance(conn, "15 s")
    assert call(conn, "claim_deliveries") == []
    assert one(conn, "ack", message_id=held.message_id, delivery=held.delivery).outcome == "lost"
    assert function(conn).invocation_status == "pending"


def test_a_dismissal_that_waited_for_the_next_reservation_ends_nothing(conn, first, second):
    register(conn)
    old = reserve(conn)
    advance(conn, "60 s")
    first.run("begin")
    new = reserve(first)
    begin(second, "dismiss_worker_invocation", function_name="orders", invocation_id=old, reason="late")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "ignored"
    assert (function(conn).invocation_id, function(conn).invocation_status) == (new, "pending")


def test_an_expiry_that_two_sessions_see_is_booked_once(conn, first, second):
    register(conn)
    old = reserve(conn)
    advance(conn, "60 s")
    first.run("begin")
    assert reconcile(first, old) == "expired"
    begin(second, "reserve_worker_invocation", function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "reserved"
    assert function(conn).failed_starts == 1
    assert len(incidents(conn, "invocation_expired")) == 1


# Deploys ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("verb, reason", [("disable_worker_function", "disabled"), ("deprecate_workers", "deprecated")])
def test_an_acceptance_after_a_deploy_began_is_refused(conn, first, second, verb, reason):
    register(conn)
    invocation_id = reserve(conn)
    first.run("begin")
    assert one(first, verb, function_name="orders").was_enabled
    begin(second, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=new_id())
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].reason == reason
    assert conn.execute("select count(*) from baton.workers").fetchone() == (0,)
    assert function(conn).failed_starts == 0


@pytest.mark.parametrize("verb, deprecated", [("disable_worker_function", False), ("deprecate_workers", True)])
def test_an_acceptance_before_a_deploy_is_a_worker_of_the_old_code(conn, first, second, verb, deprecated):
    register(conn)
    invocation_id, worker_id = reserve(conn), new_id()
    first.run("begin")
    assert accept(first, invocation_id, worker_id) == "accepted"
    begin(second, verb, function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].was_enabled
    assert (worker(conn, worker_id).deprecated_at is not None) == deprecated
    assert function(conn).invocation_status == "ready"
    assert one(conn, "heartbeat", worker_id=worker_id).outcome == ("deprecated" if deprecated else "active")


def test_a_heartbeat_that_waited_for_a_deploy_hears_of_it(conn, first, second):
    register(conn)
    worker_id = new_id()
    assert accept(conn, reserve(conn), worker_id) == "accepted"
    first.run("begin")
    one(first, "deprecate_workers", function_name="orders")
    begin(second, "heartbeat", worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "deprecated"
    assert worker(conn, worker_id).deprecated_at is not None


# One stuck row ------------------------------------------------------------------------------------

def test_a_stuck_row_hinders_its_function_alone(conn, clock_db, first):
    """All others are started in that tick, the stuck one says so once a pending timeout, and its workers go on."""
    names = [f"f-{n}" for n in range(10)]
    for name in names:
        register(conn, name)
    worker_id = new_id()
    assert accept(conn, reserve(conn, "f-3"), worker_id, "f-3") == "accepted"
    advance(conn, "1 h")
    hold(first, "f-3")

    quick = clock_db.connect(options="-c lock_timeout=1s")
    rows = call(quick, "ensure_workers")
    outcomes = {row.function_name: row.outcome for row in rows}
    assert outcomes == {name: "locked" if name == "f-3" else "reserved" for name in names}
    assert len(deliveries(conn)) == 9
    assert one(quick, "heartbeat", worker_id=worker_id).outcome == "active"
    conn.execute("update baton.workers set last_heartbeat_at = last_heartbeat_at - interval '1 h'")

    for _ in range(5):
        assert ("locked", "f-3") in [(row.outcome, row.function_name) for row in call(quick, "ensure_workers")]
        advance(conn, "11 s")
    assert [i.function_name for i in incidents(conn, "function_locked")] == ["f-3"]
    advance(conn, "5 s")
    assert [r.part for r in call(quick, "tick") if r.error] == []
    assert [i.function_name for i in incidents(conn, "function_locked")] == ["f-3"] * 2
    assert [h.subject for h in call(conn, "health") if h.finding == "locked"] == ["f-3"]

    first.run("commit")
    assert "f-3" in reserved(conn)


def test_a_stuck_row_does_not_hold_up_the_sender(conn, clock_db, first):
    """A sender that could not deliver, and goes on: nothing of the function is decided, so nothing is waited for."""
    register(conn)
    assert reserved(conn)
    [claimed] = call(conn, "claim_deliveries")
    hold(first)
    quick = clock_db.connect(options="-c lock_timeout=1s")
    assert one(quick, "fail", message_id=claimed.message_id, delivery=claimed.delivery,
               error="HTTP 502").outcome == "failed"
    advance(conn, "2 s")
    [claimed] = call(quick, "claim_deliveries")
    assert one(quick, "extend", message_id=claimed.message_id, delivery=claimed.delivery).outcome == "extended"
    assert one(quick, "ack", message_id=claimed.message_id, delivery=claimed.delivery).outcome == "acked"


def test_a_spent_receipt_of_a_delivery_locks_no_function(conn, clock_db, first):
    register(conn)
    assert reserved(conn)
    [old] = call(conn, "claim_deliveries")
    advance(conn, "30 s")
    [new] = call(conn, "claim_deliveries")
    assert new.message_id == old.message_id
    hold(first)
    quick = clock_db.connect(options="-c lock_timeout=1s")
    for delivery in (old.delivery, None, 1):
        for level in ("read committed", "repeatable read", "serializable"):
            quick.execute(f"begin isolation level {level}")
            assert one(quick, "fail", message_id=old.message_id, delivery=delivery, error="late",
                       final=True).outcome == "lost"
            quick.execute("commit")
    first.run("commit")
    assert function(conn).invocation_status == "pending"


def test_a_spent_receipt_fails_while_the_holder_claims_and_fails_in_one_transaction(conn, first, second):
    register(conn)
    assert reserved(conn)
    [old] = call(conn, "claim_deliveries")
    advance(conn, "30 s")
    first.run("begin")
    [new] = call(first, "claim_deliveries")
    begin(second, "fail", message_id=old.message_id, delivery=old.delivery, error="late")
    wait_blocked(conn, second, by=first)
    assert one(first, "fail", message_id=new.message_id, delivery=new.delivery, error="HTTP 404",
               final=True).outcome == "dead"
    first.run("commit")
    assert second.result()[0].outcome == "lost"
    assert function(conn).invocation_detail == "HTTP 404"


def test_a_limit_that_is_lowered_while_a_failure_waits_ends_no_delivery_behind_the_functions_back(conn, first, second):
    register(conn)
    assert reserved(conn)
    [claimed] = call(conn, "claim_deliveries")
    first.run("begin")
    first.run("select from baton.messages for update")
    begin(second, "fail", message_id=claimed.message_id, delivery=claimed.delivery, error="HTTP 502")
    wait_blocked(conn, second, by=first)
    conn.execute("update baton.settings set max_failures = 1")
    first.run("commit")
    assert second.result()[0].outcome == "failed"
    assert (function(conn).invocation_status, len(deliveries(conn))) == ("pending", 1)
    advance(conn, "10 s")
    [claimed] = call(conn, "claim_deliveries")
    assert one(conn, "fail", message_id=claimed.message_id, delivery=claimed.delivery,
               error="HTTP 502").outcome == "dead"
    assert function(conn).invocation_detail == "HTTP 502"


def test_a_hundred_stuck_rows_do_not_keep_the_next_function_from_being_started(conn, first):
    conn.execute("select baton.register_worker_function('f' || lpad(n::text, 3, '0')) from generate_series(0, 100) as n")
    conn.execute("update baton.settings set transport = 'outbox', base_url = 'http://127.0.0.1:9'")
    first.run("begin")
    first.run("select from baton.worker_functions where function_name < 'f100' for update")
    answers = [(row.outcome, row.function_name) for row in call(conn, "ensure_workers")]
    assert answers == [("locked", f"f{n:03}") for n in range(100)] + [("reserved", "f100")]


# Pairs --------------------------------------------------------------------------------------------

def test_a_repeated_acceptance_that_waited_for_the_worker_to_stop_is_refused(conn, first, second):
    register(conn)
    invocation_id, worker_id = reserve(conn), new_id()
    assert accept(conn, invocation_id, worker_id) == "accepted"
    first.run("begin")
    assert one(first, "stop_worker", worker_id=worker_id).outcome == "stopped"
    begin(second, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].reason == "worker_gone"


def test_a_stop_that_waited_for_an_acceptance_stops_the_worker(conn, first, second):
    register(conn)
    worker_id = new_id()
    assert one(conn, "register_worker", worker_id=worker_id, function_name="orders").outcome == "registered"
    advance(conn, "1 min")
    invocation_id = reserve(conn)
    first.run("begin")
    assert accept(first, invocation_id, worker_id) == "accepted"
    begin(second, "stop_worker", worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "stopped"
    assert worker(conn, worker_id).stopped_at is not None
    advance(conn, "6 s")
    assert reserve(conn)


def test_a_worker_that_draws_back_while_it_is_reconciled_is_not_relied_on(conn, first, second):
    register(conn)
    worker_id = new_id()
    assert accept(conn, reserve(conn), worker_id) == "accepted"
    advance(conn, "1 min")
    invocation_id = reserve(conn)
    first.run("begin")
    assert one(first, "stop_worker", worker_id=worker_id, draining=True).outcome == "stopping"
    begin(second, "reconcile_worker_invocation", function_name="orders", invocation_id=invocation_id,
          worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "start"


def test_a_reservation_that_waited_for_a_registration_finds_it_ready(conn, first, second):
    register(conn)
    first.run("begin")
    assert one(first, "register_worker", worker_id=new_id(), function_name="orders").outcome == "registered"
    begin(second, "reserve_worker_invocation", function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "ready"


def test_a_registration_that_waited_for_a_reservation_completes_it(conn, first, second):
    register(conn)
    worker_id = new_id()
    first.run("begin")
    invocation_id = reserve(first)
    begin(second, "register_worker", worker_id=worker_id, function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "registered"
    row = function(conn)
    assert (row.invocation_id, row.invocation_status, row.invocation_worker_id) == (invocation_id, "ready", worker_id)
    assert startup(conn).protected is False


def test_two_ensure_workers_at_once_make_one_reservation(conn, first):
    register(conn)
    first.run("begin")
    [row] = call(first, "ensure_workers")
    assert row.outcome == "reserved"
    assert [r.outcome for r in call(conn, "ensure_workers")] == ["locked"]
    assert deliveries(conn) == []
    first.run("commit")
    assert call(conn, "ensure_workers") == []
    assert [d.payload["body"]["invocation_id"] for d in deliveries(conn)] == [str(row.invocation_id)]


def test_a_manual_start_that_waited_for_ensure_workers_is_told_that_one_is_pending(conn, first, second):
    register(conn)
    first.run("begin")
    assert [r.outcome for r in call(first, "ensure_workers")] == ["reserved"]
    begin(second, "reserve_worker_invocation", function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "pending"


def test_a_reservation_that_is_rolled_back_sends_nothing_and_throttles_nothing(conn, first):
    register(conn)
    first.run("begin")
    assert [r.outcome for r in call(first, "ensure_workers")] == ["reserved"]
    first.run("rollback")
    assert (deliveries(conn), function(conn).last_invoked_at) == ([], None)
    assert reserved(conn)


def test_a_second_tick_returns_at_once_while_the_first_is_at_work(conn, clock_db, first):
    register(conn)
    first.run("begin")
    assert [(r.part, r.changed) for r in call(first, "tick")] == [("ensure_workers", 1)]
    register(conn, "another")
    quick = clock_db.connect(options="-c lock_timeout=1s")
    assert call(quick, "tick") == []
    first.run("commit")
    assert [(r.part, r.changed) for r in call(quick, "tick")] == [("ensure_workers", 1)]


def test_a_heartbeat_in_flight_keeps_tick_from_giving_its_worker_up(conn, clock_db, first):
    register(conn)
    worker_id = new_id()
    assert accept(conn, reserve(conn), worker_id) == "accepted"
    advance(conn, "1 h")
    first.run("begin")
    assert one(first, "heartbeat", worker_id=worker_id).outcome == "active"
    quick = clock_db.connect(options="-c lock_timeout=1s")
    assert [r for r in call(quick, "tick") if r.part == "silent_workers" or r.error] == []
    first.run("commit")
    call(quick, "tick")
    assert one(conn, "heartbeat", worker_id=worker_id).outcome == "active"


def test_who_waited_for_tick_to_give_a_worker_up_hears_of_it(conn, clock_db, first, second):
    register(conn)
    worker_id = new_id()
    assert accept(conn, reserve(conn), worker_id) == "accepted"
    advance(conn, "1 h")
    invocation_id = reserve(conn)
    third = clock_db.session("third")
    first.run("begin")
    assert ("silent_workers", 1) in [(r.part, r.changed) for r in call(first, "tick")]
    begin(second, "heartbeat", worker_id=worker_id)
    wait_blocked(conn, second, by=first)
    begin(third, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=worker_id)
    wait_blocked(conn, third)
    first.run("commit")
    assert second.result()[0].outcome == "stopped"
    assert third.result()[0].reason == "worker_gone"
    assert function(conn).invocation_status == "pending"


def test_an_acceptance_keeps_a_function_from_being_forgotten(conn, first, second):
    register(conn)
    invocation_id = reserve(conn)
    first.run("begin")
    assert accept(first, invocation_id, new_id()) == "accepted"
    begin(second, "unregister_worker_function", function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "has_workers"


def test_an_acceptance_that_waited_until_its_function_was_forgotten_is_told(conn, first, second):
    register(conn)
    invocation_id = reserve(conn)
    first.run("begin")
    assert one(first, "unregister_worker_function", function_name="orders").outcome == "removed"
    begin(second, "accept_worker_invocation", function_name="orders", invocation_id=invocation_id, worker_id=new_id())
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert isinstance(second.error(), errors.UndefinedObject)
    assert conn.execute("select count(*) from baton.workers").fetchone() == (0,)


def test_who_waited_until_a_function_was_forgotten_and_registered_anew_asks_about_the_new_one(conn, first, second):
    register(conn)
    invocation_id = reserve(conn)
    first.run("begin")
    assert one(first, "unregister_worker_function", function_name="orders").outcome == "removed"
    assert one(first, "register_worker_function", function_name="orders").outcome == "registered"
    begin(second, "reconcile_worker_invocation", function_name="orders", invocation_id=invocation_id)
    wait_blocked(conn, second, by=first)
    first.run("commit")
    [answer] = second.result()
    assert (answer.outcome, answer.reason) == ("rejected", "superseded")


def test_who_waited_to_forget_a_function_that_was_registered_anew_forgets_the_new_one(conn, first, second):
    register(conn)
    first.run("begin")
    assert one(first, "unregister_worker_function", function_name="orders").outcome == "removed"
    assert one(first, "register_worker_function", function_name="orders").outcome == "registered"
    begin(second, "unregister_worker_function", function_name="orders")
    wait_blocked(conn, second, by=first)
    first.run("commit")
    assert second.result()[0].outcome == "removed" and function(conn) is None


def test_registering_a_function_that_is_being_forgotten_is_no_error(conn, clock_db, first, second):
    register(conn)
    blocker = clock_db.session("blocker")
    hold(blocker)
    begin(first, "unregister_worker_function", function_name="orders")
    wait_blocked(conn, first, by=blocker)
    begin(second, "register_worker_function", function_name="orders", queue_name="new")
    wait_blocked(conn, second)
    blocker.run("commit")
    assert first.result()[0].outcome == "removed"
    assert second.result()[0].outcome == "registered"
    assert function(conn).queue_name == "new"


def test_a_failed_response_that_meets_an_acceptance_ends_nothing(conn, clock_db):
    """The runtime was accepted although its request was answered with an error; the tick that reads it never waits."""
    standin.install(conn)
    conn, first = clock_db.connect(options="-c lock_timeout=1s"), clock_db.session("first")
    conn.execute("update baton.settings set transport = 'pg_net'")
    register(conn)
    [(_, invocation_id)] = reserved(conn).items()
    [request] = conn.execute("delete from net.http_request_queue returning id").fetchall()
    first.run("begin")
    assert accept(first, invocation_id, new_id()) == "accepted"
    conn.execute("insert into net._http_response (id, status_code) values (%s, 500)", (request.id,))
    assert [r for r in call(conn, "tick") if r.part == "responses" or r.error] == []
    first.run("commit")
    assert [r.changed for r in call(conn, "tick") if r.part == "responses"] == [1]
    assert startup(conn).startup_state == "ready"
    assert conn.execute("select count(*) from net._http_response").fetchone() == (0,)


# No deadlock --------------------------------------------------------------------------------------

class Pair:
    """One function of its own for two verbs: pending, with a silent worker and a delivery that a sender holds."""

    def __init__(self, name, worker_id, invocation_id, claimed):
        self.name, self.worker_id, self.invocation_id, self.claimed = name, worker_id, invocation_id, claimed

    def arguments(self, verb):
        function = {"function_name": self.name}
        worker = {"worker_id": self.worker_id}
        invocation = {"invocation_id": self.invocation_id}
        receipt = {"message_id": self.claimed.message_id, "delivery": self.claimed.delivery}
        return {
            "accept_worker_invocation": function | invocation | worker,
            "reconcile_worker_invocation": function | invocation | worker,
            "dismiss_worker_invocation": function | invocation | {"reason": "test"},
            "register_worker": function | worker,
            "deprecate_workers": function,
            "disable_worker_function": function,
            "enable_worker_function": function,
            "register_worker_function": function,
            "unregister_worker_function": function,
            "reserve_worker_invocation": function,
            "heartbeat": worker,
            "stop_worker": worker,
            "ensure_workers": {},
            "tick": {},
            "ack": receipt,
            "fail": receipt | {"error": "test", "final": True},
        }[verb]


SEVERAL_LOCKS = ["accept_worker_invocation", "reconcile_worker_invocation", "register_worker", "deprecate_workers",
                 "fail", "tick"]
ALL = [*SEVERAL_LOCKS, "dismiss_worker_invocation", "disable_worker_function", "enable_worker_function",
       "register_worker_function", "unregister_worker_function", "reserve_worker_invocation", "heartbeat",
       "stop_worker", "ensure_workers", "ack"]
ROWS = {
    "function": ("select from baton.worker_functions where function_name = %s for update", "name"),
    "worker": ("select from baton.workers where worker_id = %s for update", "worker_id"),
}


def test_no_two_verbs_lock_each_other_out(conn, clock_db):
    """Each verb that locks several rows, before and behind every other one, while a third session holds one of them."""
    orders = {(a, b) for a, b in itertools.product(SEVERAL_LOCKS, ALL)}
    orders |= {(b, a) for a, b in orders}
    rounds = [(row, *pair) for row in ROWS for pair in sorted(orders)]

    conn.execute("update baton.settings set transport = 'outbox'")
    names = [f"f-{n:03}" for n in range(len(rounds))]
    workers = {name: new_id() for name in names}
    for name in names:
        call(conn, "register_worker_function", function_name=name, url="http://127.0.0.1:9")
        call(conn, "register_worker", worker_id=workers[name], function_name=name)
    advance(conn, "1 min")
    ids = {}
    while found := reserved(conn):
        ids |= found
    claims = {c.payload["function_name"]: c for c in call(conn, "claim_deliveries", max_messages=1000)}
    assert claims.keys() == ids.keys() == set(names)

    options = "-c deadlock_timeout=50ms -c statement_timeout=10s"
    blocker = clock_db.connect()
    sessions = clock_db.session("before", options=options), clock_db.session("behind", options=options)
    waited = 0
    for name, (held, *verbs) in zip(names, rounds, strict=True):
        pair = Pair(name, workers[name], ids[name], claims[name])
        lock, key = ROWS[held]
        with blocker.transaction():
            blocker.execute(lock, (getattr(pair, key),))
            for session, verb in zip(sessions, verbs, strict=True):
                begin(session, verb, **pair.arguments(verb))
                wait_until(lambda session=session: session.done() or conn.execute(
                    "select pg_blocking_pids(%s) <> '{}'", (session.pid,)).fetchone()[0], "it waits or is done",
                    every=0.001)
            waited += not any(session.done() for session in sessions)
        for session, verb in zip(sessions, verbs, strict=True):
            try:
                session.result()
            except errors.UndefinedObject:
                assert "unregister_worker_function" in verbs
            except psycopg.Error as error:
                raise AssertionError(f"{verbs} while the {held}'s row is held: {verb}: {error}") from error
    assert waited > 50


def test_deploys_of_many_workers_lock_nobody_out(conn, clock_db, server_log):
    """deprecate_workers of 20 workers against acceptances with their ids, heartbeats and stops, 300 times."""
    register(conn, **OLD_ENOUGH)
    conn.execute("""
        create function public.refill() returns uuid[] language sql as $$
          update baton.worker_functions set enabled = true, invocation_id = gen_random_uuid(),
            invocation_status = 'pending', invocation_expires_at = baton._now() + interval '1 min';
          delete from baton.workers;
          insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
          select gen_random_uuid(), 'orders', true, baton._now(), baton._now() from generate_series(1, 20);
          select array_agg(worker_id order by worker_id) from baton.workers;
        $$
    """)
    rounds = 300
    barrier = threading.Barrier(5)
    found = []
    failures = []

    def deploy(one_conn, _ids, _invocation_id):
        call(one_conn, "deprecate_workers", function_name="orders")

    def accept_with(one_conn, ids, invocation_id):
        accept(one_conn, invocation_id, ids[len(found) % 20])

    def beat_all(one_conn, ids, _invocation_id):
        with one_conn.transaction():
            for worker_id in ids:
                call(one_conn, "heartbeat", worker_id=worker_id)

    def reconcile_and_stop(one_conn, ids, invocation_id):
        reconcile(one_conn, invocation_id, ids[-1])
        call(one_conn, "stop_worker", worker_id=ids[0])

    def loop(one_conn, work):
        try:
            for _ in range(rounds):
                barrier.wait(30)
                work(one_conn, *found[-1])
                barrier.wait(30)
        except BaseException as failure:  # told by the test's own thread
            failures.append(failure)
            barrier.abort()

    options = "-c deadlock_timeout=50ms -c statement_timeout=10s"
    threads = [threading.Thread(target=loop, args=(clock_db.connect(options=options), work), daemon=True)
               for work in (deploy, accept_with, beat_all, reconcile_and_stop)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            ids = conn.execute("select public.refill()").fetchone()[0]
            found.append((ids, function(conn).invocation_id))
            barrier.wait(30)
            barrier.wait(30)
    except threading.BrokenBarrierError:
        pass
    for thread in threads:
        thread.join(30)
    assert not [f for f in failures if not isinstance(f, threading.BrokenBarrierError)]
    assert len(found) == rounds
    assert server_log.errors() == []


# Isolation ----------------------------------------------------------------------------------------

REFUSES = ["register_worker_function", "unregister_worker_function", "enable_worker_function",
           "disable_worker_function", "deprecate_workers", "register_worker", "reserve_worker_invocation",
           "reconcile_worker_invocation", "accept_worker_invocation", "dismiss_worker_invocation", "ensure_workers",
           "tick", "fail"]
ACCEPTS = ["heartbeat", "stop_worker", "claim_deliveries", "ack", "health", "version"]


OTHER_LEVELS = ["repeatable read", "serializable"]


def test_verbs_that_decide_over_several_rows_refuse_other_isolation_levels(conn):
    register(conn)
    worker_id = new_id()
    assert one(conn, "register_worker", worker_id=worker_id, function_name="orders").outcome == "registered"
    advance(conn, "1 min")
    [invocation_id] = reserved(conn).values()
    [claimed] = call(conn, "claim_deliveries")
    pair = Pair("orders", worker_id, invocation_id, claimed)
    answers = {}
    for level, verb in itertools.product(OTHER_LEVELS, REFUSES + ACCEPTS):
        conn.execute(f"begin isolation level {level}")
        try:
            call(conn, verb, **({} if verb in ("claim_deliveries", "health", "version") else pair.arguments(verb)))
            answers[level, verb] = "works"
        except psycopg.Error as error:
            answers[level, verb] = error.sqlstate
        conn.execute("rollback")
    assert answers == {(level, verb): "25001" if verb in REFUSES else "works"
                       for level in OTHER_LEVELS for verb in REFUSES + ACCEPTS}
    told = {verb for verb in REFUSES + ACCEPTS if "25001" in conn.execute(
        "select obj_description(%s::regproc, 'pg_proc')", (f"baton.{verb}",)).fetchone()[0]}
    assert told == set(REFUSES)


def test_a_failure_that_dismisses_nothing_works_in_every_isolation_level(conn):
    register(conn)
    assert reserved(conn)
    for level in ["read committed", "read uncommitted", *OTHER_LEVELS]:
        [claimed] = call(conn, "claim_deliveries")
        conn.execute(f"begin isolation level {level}")
        assert one(conn, "fail", message_id=claimed.message_id, delivery=claimed.delivery, error="HTTP 502",
                   delay="0").outcome == "failed"
        conn.execute("commit")
    assert deliveries(conn)[0].failures == 4


@pytest.fixture
def pg_net(conn, clock_db):
    """The only function's request is on its way through pg_net; a connection that waits for nobody."""
    standin.install(conn)
    quick = clock_db.connect(options="-c lock_timeout=1s")
    quick.execute("update baton.settings set transport = 'pg_net'")
    register(quick)
    assert reserved(quick)
    return quick


def test_a_response_that_somebody_holds_does_not_keep_tick_waiting(pg_net, first):
    [request] = pg_net.execute("delete from net.http_request_queue returning id").fetchall()
    pg_net.execute("insert into net._http_response (id, status_code) values (%s, 404)", (request.id,))
    first.run("begin")
    first.run("select from net._http_response for update")
    assert [(r.part, r.changed) for r in call(pg_net, "tick") if r.part == "responses" or r.error] == [("responses", 1)]
    first.run("commit")
    assert function(pg_net).invocation_detail == "HTTP 404"


def test_ids_that_nobody_could_forget_are_no_incident(pg_net, first):
    pg_net.execute("select setval('net.http_request_queue_id_seq', 1, false)")
    hold(first)
    for _ in range(3):
        assert [r for r in call(pg_net, "tick") if r.error] == []
    assert incidents(pg_net, "request_ids_forgotten") == []
    first.run("commit")
    for _ in range(3):
        call(pg_net, "tick")
    assert len(incidents(pg_net, "request_ids_forgotten")) == 1
