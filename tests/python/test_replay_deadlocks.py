"""Verbs that lock more than one row of one run, against each other: nobody ends in 40P01.

Each pair meets behind somebody who holds the run, or one of the messages, once in each order; then at random, for BATON_SECONDS (8).
"""

import itertools
import random
import threading
import time

import psycopg
import psycopg.types.json
import pytest
from conftest import RANDOM_SECONDS, wait_blocked, wait_until

BUILD = """
create function baton_test.build(
  run_id text, out m1 bigint, out d1 bigint, out m2 bigint, out d2 bigint, out epoch bigint, out receipts jsonb
)
language plpgsql
as $$
begin
  perform baton.start_run('w', null, build.run_id, 'q');
  select c.message_id, c.delivery into m1, d1 from baton.claim('q', for_run => build.run_id) as c;
  select b.replay_epoch into epoch from baton.begin_replay(m1, d1) as b;
  update baton.runs as r set wake_at = clock_timestamp() + interval '1 hour' where r.run_id = build.run_id;
  perform baton._set_timer(r, r.wake_at, clock_timestamp()) from baton.runs as r where r.run_id = build.run_id;
  perform baton.wake_run(build.run_id);
  select c.message_id, c.delivery into m2, d2 from baton.claim('q', for_run => build.run_id) as c;
  update baton.runs as r set wake_message_id = null where r.run_id = build.run_id;
  perform baton.wake_run(build.run_id);
  receipts := jsonb_build_array(
    jsonb_build_object('message_id', m2, 'delivery', d2), jsonb_build_object('message_id', m1, 'delivery', d1)
  );
end;
$$;
"""

VERBS = {
    "begin": "baton.begin_replay(%(m2)s, %(d2)s)",
    "begin again": "baton.begin_replay(%(m1)s, %(d1)s)",
    "end": "baton.end_replay(%(run_id)s, %(epoch)s, 1, clock_timestamp() + interval '2 hours')",
    "complete": "baton.complete_run(%(run_id)s, %(epoch)s, null)",
    "cancel": "baton.cancel_run(%(run_id)s, 'x')",
    "release": "baton.release_replay(%(run_id)s)",
    "park the holder": "baton.park(%(m1)s, %(d1)s)",
    "park another": "baton.park(%(m2)s, %(d2)s, '1 minute')",
    "fail the holder": "baton.fail(%(m1)s, %(d1)s, 'x')",
    "fail another": "baton.fail(%(m2)s, %(d2)s, 'x', '0')",
    "park by force": "baton.park(%(m1)s, %(d1)s, force => true)",
    "fail by force": "baton.fail(%(m1)s, %(d1)s, 'x', force => true)",
    "signal": "baton.signal_run(%(run_id)s, 's')",
    "wake": "baton.wake_run(%(run_id)s)",
    "recover": "baton.recover_runs()",
    "claim": "baton.claim('q', max_messages => 100, visibility => '0')",
    "extend many": "baton.extend_many(%(receipts)s)",
    "ack many": "baton.ack_many(%(receipts)s)",
}
HELD = {
    "the run": "select from baton.runs where run_id = %(run_id)s for update",
    "its holder's message": "select from baton.messages where message_id = %(m1)s for update",
    "another message": "select from baton.messages where message_id = %(m2)s for update",
}
EXPECTED = "PB001"


def prepare(db):
    conn = db.connect()
    conn.execute("create schema baton_test")
    conn.execute(BUILD)
    conn.execute("alter function baton._lock_soon(text, bigint, bigint) set lock_timeout = '20s'")
    conn.execute("update baton.settings set max_failures = 1000000, max_lapses = 1000000")
    return conn


def build(conn, run_id):
    row = conn.execute("select * from baton_test.build(%s)", (run_id,)).fetchone()._asdict()
    return {**row, "receipts": psycopg.types.json.Jsonb(row["receipts"]), "run_id": run_id}


def blocked_or_done(conn, session):
    def is_so():
        return session.done() or conn.execute("select pg_blocking_pids(%s) as p", (session.pid,)).fetchone().p

    wait_until(is_so, f"{session.name} is blocked, or done", every=0.002)


def meet(conn, sessions, pair, held, run_id):
    """Both verbs behind the blocker, in that order. Answers what went wrong."""
    there = build(conn, run_id)
    blocker, *others = sessions
    blocker.run("begin")
    blocker.run(HELD[held], there)
    for session, verb in zip(others, pair, strict=True):
        session.start(f"select * from {VERBS[verb]}", there)
        blocked_or_done(conn, session)
    blocker.run("rollback")
    wrong = []
    for session, verb in zip(others, pair, strict=True):
        try:
            session.result()
        except psycopg.Error as error:
            session.error()
            if error.sqlstate != EXPECTED:
                wrong.append((held, pair, verb, error.sqlstate))
    conn.execute("delete from baton.messages where run_id = %s", (run_id,))
    conn.execute("delete from baton.runs where run_id = %s", (run_id,))
    return wrong


@pytest.fixture
def sessions(db):
    made = [db.session(name, options="-c deadlock_timeout=50ms -c statement_timeout=20s") for name in ("blocker", "a", "b")]
    return made


@pytest.mark.parametrize("held", HELD)
def test_no_pair_of_verbs_deadlocks_in_either_order(db, sessions, held):
    conn = prepare(db)
    wrong = []
    for n, pair in enumerate(itertools.product(VERBS, repeat=2)):
        wrong += meet(conn, sessions, pair, held, f"run {n}")
    assert wrong == []


LOCKS_THE_MESSAGE_FIRST = [(
    "  v_run := baton._lock_run_of(park.message_id, coalesce(park.force, false));\n"
    "  v_message := baton._lock_receipt(park.message_id, park.delivery);\n",
    "  v_message := baton._lock_receipt(park.message_id, park.delivery);\n"
    "  v_run := baton._lock_run_of(park.message_id, coalesce(park.force, false));\n",
)]


def test_a_verb_with_the_order_broken_is_caught(db, sessions):
    conn = prepare(db)
    body = conn.execute("select pg_get_functiondef('baton.park'::regproc) as f").fetchone().f
    for find, replace in LOCKS_THE_MESSAGE_FIRST:
        assert body.count(find) == 1
        body = body.replace(find, replace)
    conn.execute(body)
    wrong = []
    for n, other in enumerate(("end", "complete", "release", "fail the holder")):
        for pair in (("park the holder", other), (other, "park the holder")):
            wrong += meet(conn, sessions, pair, "the run", f"run {n} {pair[0]}")
            wrong += meet(conn, sessions, pair, "its holder's message", f"run {n} {pair[0]} again")
    assert {sqlstate for *_, sqlstate in wrong} == {"40P01"}


def test_random_verbs_of_many_sessions_never_deadlock(db, server_log):
    """For BATON_SECONDS (8), and until each session has made fifty rounds. Also two a transaction, run by run in the order
    of their keys."""
    conn = prepare(db)
    until = time.monotonic() + RANDOM_SECONDS
    lock = threading.Lock()
    now = {run_id: build(conn, run_id) for run_id in ("a", "b")}
    wrong, done = [], []

    def call(own, verb, there):
        try:
            own.execute(f"select * from {VERBS[verb]}", there)
        except psycopg.errors.InFailedSqlTransaction:
            pass
        except psycopg.Error as error:
            if error.sqlstate != EXPECTED:
                wrong.append((verb, error.sqlstate, str(error)))

    def work(seed):
        own = db.connect(options="-c deadlock_timeout=50ms -c statement_timeout=20s")
        chance = random.Random(seed)
        n = 0
        while (n < 50 or time.monotonic() < until) and not wrong:
            n += 1
            with lock:
                there = dict(now)
            verbs = [chance.choice(list(VERBS)) for _ in range(2)]
            single = {"recover", "claim"}
            if chance.random() < 0.3 and not single & set(verbs):
                own.execute("begin")
                for run_id, verb in zip("ab", verbs, strict=True):
                    call(own, verb, there[run_id])
                own.execute("rollback" if own.info.transaction_status == psycopg.pq.TransactionStatus.INERROR else "commit")
            else:
                call(own, verbs[0], there[chance.choice("ab")])
            if chance.random() < 0.1:
                run_id = chance.choice("ab")
                fresh = f"{run_id} {seed} {n}"
                try:
                    built = build(own, fresh)
                except psycopg.errors.LockNotAvailable:
                    continue
                with lock:
                    now[run_id] = built
        done.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(done) == 4
    assert server_log.errors(ignore="was superseded|transaction is aborted") == []


def test_after_restore_waits_for_a_tick_that_is_at_work_before_it_locks_anything_else(db):
    conn, first, second = db.connect(), db.session("first"), db.session("second")
    first.run("begin")
    first.run("select from baton.state for no key update")  # what a tick locks first
    second.start("select * from baton.after_restore()")
    wait_blocked(conn, second, by=first)
    first.run("select * from baton.tick()")
    first.run("commit")
    assert second.result() == [("restored",)]
