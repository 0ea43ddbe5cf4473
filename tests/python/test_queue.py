"""Messages between real sessions: who waits for whom, who wins, and that nothing is given out twice.

Steps stand in their order; that a session waits is what the server says, never a matter of time.
"""

import json
import threading
from collections import Counter

import psycopg
import pytest
from conftest import _clone, wait_blocked

ROUNDS = 200


# A database a test would take longer than most tests here: they share two, emptied before each.


@pytest.fixture(scope="module")
def shared_db(cluster, template):
    yield from _clone(cluster, template, "tq")


@pytest.fixture(scope="module")
def shared_clock_db(cluster, clock_template):
    yield from _clone(cluster, clock_template, "tqc")


def emptied(database, server_log, *more):
    server_log.databases.append(database.name)
    with database.connect() as conn:
        conn.execute("truncate baton.messages, baton.dead_messages, baton.queue_marks, baton.incidents")
        conn.execute("insert into baton.settings default values")
        for statement in more:
            conn.execute(statement)
    yield database
    database.close()


@pytest.fixture
def db(shared_db, server_log):
    yield from emptied(shared_db, server_log)


@pytest.fixture
def clock_db(shared_clock_db, server_log):
    yield from emptied(shared_clock_db, server_log, "select baton_test.set_clock('2026-01-01')")


def send(session, payload=1, queue="q", **kw):
    return run(session, "send", queue_name=queue, payload=json.dumps(payload), **kw)[0]


def claim(session, queue="q", **kw):
    return run(session, "claim", queue_name=queue, **kw)


def run(session, verb, **kw):
    """A verb's rows, by a Session or a connection."""
    rows = (session.run if hasattr(session, "run") else session.execute)(*call(verb, **kw))
    return rows if isinstance(rows, list) else rows.fetchall()


def call(verb, **kw):
    casts = {"payload": "jsonb", "messages": "jsonb", "receipts": "jsonb", "message_ids": "bigint[]",
             "delay": "interval", "visibility": "interval"}
    arguments = ", ".join(f"{k} => %({k})s" + (f"::{casts[k]}" if k in casts else "") for k in kw)
    return f"select * from baton.{verb}({arguments})", kw


def receipt(row):
    return {"message_id": row.message_id, "delivery": row.delivery}


def receipts(rows):
    return json.dumps([receipt(row) for row in rows])


def keyed(keys):
    return json.dumps([{"payload": key, "dedupe_key": key} for key in keys])


def advance(conn, by):
    conn.execute("select baton_test.advance(%s)", (by,))


def bury(conn, key=None, queue="q"):
    """A dead message's id."""
    send(conn, queue=queue, dedupe_key=key)
    [row] = claim(conn, queue)
    run(conn, "fail", **receipt(row), error="no", final=True)
    return row.message_id


def in_parallel(*functions):
    """Runs them at the same moment, each in a thread; the first exception is raised."""
    start = threading.Barrier(len(functions))
    errors = []

    def body(function):
        try:
            start.wait(10)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def in_rounds(raced, *functions, prepare=lambda: None):
    """Calls them at the same moment, each in a thread, ROUNDS times; and again until it was a race, at most ten times that.

    They are given the number of the round. Before each, while nobody is at work, prepare is called. Answers how many there were.
    """
    number, over = -1, False

    def begin():
        nonlocal number, over
        number += 1
        over = number >= ROUNDS and (raced() or number == 10 * ROUNDS)
        if not over:
            prepare()

    meet = threading.Barrier(len(functions), action=begin)

    def loop(function):
        meet.wait(10)
        while not over:
            function(number)
            meet.wait(10)

    in_parallel(*(lambda f=f: loop(f) for f in functions))
    return number


# --- claims ----------------------------------------------------------------------------------------------------------


def test_a_claim_skips_what_another_has_open(db, conn):
    a, b = db.session("a"), db.session("b")
    first, second = send(conn).message_id, send(conn).message_id
    a.run("begin")
    assert [r.message_id for r in claim(a)] == [first]
    assert [r.message_id for r in claim(b)] == [second]
    assert claim(b, max_messages=10) == []
    a.run("rollback")
    [again] = claim(b)
    assert (again.message_id, again.lapses) == (first, 0)


def test_first_claims_of_a_queue_do_not_wait_for_each_other(db, conn):
    a, b = db.session("a"), db.session("b")
    send(conn)
    send(conn)
    a.run("begin")
    assert len(claim(a)) == 1
    assert len(claim(b)) == 1
    a.run("commit")
    assert conn.execute("select count(*) from baton.queue_marks").fetchone() == (1,)


@pytest.mark.parametrize("held", ["queue_marks", "messages"])
def test_no_claim_waits_for_a_row_that_somebody_holds(db, conn, held):
    a, b = db.session("a"), db.session("b")
    send(conn)
    claim(conn)
    send(conn)
    a.run("begin")
    a.run(f"select from baton.{held} for update")
    assert len(claim(b)) == (1 if held == "queue_marks" else 0)


def test_a_message_of_an_open_send_is_not_seen(db):
    a, b = db.session("a"), db.session("b")
    a.run("begin")
    send(a)
    assert claim(b) == []
    a.run("commit")
    assert len(claim(b)) == 1


def test_many_consumers_take_each_message_once(db, conn, server_log):
    consumers, messages = 8, 500
    conn.execute("select count(*) from baton.send_many('q', (select jsonb_agg(jsonb_build_object('payload', i)) "
                 "from generate_series(1, %s) as i))", (messages,))
    connections = [db.connect() for _ in range(consumers)]
    won = [[] for _ in range(consumers)]

    def consume(number):
        size = number % 3 + 1
        while rows := claim(connections[number], max_messages=size):
            for row in rows:
                assert run(connections[number], "ack", **receipt(row)) == [("acked",)]
                won[number].append(row.payload)

    in_parallel(*(lambda n=n: consume(n) for n in range(consumers)))
    assert sorted(payload for mine in won for payload in mine) == list(range(1, messages + 1))
    assert sum(bool(mine) for mine in won) > 1, "only one consumer won anything: that was no race"
    assert conn.execute("select count(*) from baton.messages").fetchone() == (0,)
    assert conn.execute("select count(*) from baton.incidents").fetchone() == (0,)
    assert server_log.errors() == []


# --- a claim that ran out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_extend_in_flight_at_the_deadline_is_never_beside_a_second_delivery(clock_db, end):
    clock, a, b = clock_db.connect(), clock_db.session("a"), clock_db.session("b")
    send(clock)
    [first] = claim(a)
    advance(clock, "29.9 seconds")
    a.run("begin")
    assert run(a, "extend", **receipt(first))[0].outcome == "extended"
    advance(clock, "0.2 seconds")
    assert claim(b) == [], "an open extend: the claim counts as alive"
    a.run(end)
    second = claim(b)
    if end == "commit":
        assert second == []
        assert run(a, "ack", **receipt(first)) == [("acked",)]
    else:
        assert [r.lapses for r in second] == [1]
        assert run(a, "ack", **receipt(first)) == [("lost",)]


def test_an_extend_in_flight_keeps_a_message_at_its_limit_from_tick_and_removal(clock_db):
    clock, a = clock_db.connect(), clock_db.session("a")
    clock.execute("update baton.settings set max_lapses = 1")
    clock.execute("set statement_timeout = '5s'")
    send(clock)
    [first] = claim(a)
    advance(clock, "29.9 seconds")
    a.run("begin")
    run(a, "extend", **receipt(first))
    advance(clock, "0.2 seconds")
    assert "dead_letters" not in [r.part for r in run(clock, "tick")]
    assert run(clock, "remove_messages", message_ids=[first.message_id]) == [("in_flight", first.message_id)]
    a.run("commit")
    assert "dead_letters" not in [r.part for r in run(clock, "tick")]
    assert run(clock, "remove_messages", message_ids=[first.message_id]) == [("in_flight", first.message_id)]
    assert run(a, "ack", **receipt(first)) == [("acked",)]


def test_tick_judges_each_message_under_its_lock(clock_db):
    clock, a, b = clock_db.connect(), clock_db.session("a"), clock_db.session("b")
    clock.execute("update baton.settings set max_lapses = 1")
    send(clock)
    send(clock)
    low, high = sorted(claim(clock, max_messages=2))
    advance(clock, "30 seconds")
    a.run("begin")
    a.run("insert into baton.dead_messages (message_id, queue_name, failures, lapses, created_at, died_at, reason) "
          "values (%s, 'q', 0, 0, baton._now(), baton._now(), 'lapses')", (low.message_id,))
    b.start(*call("tick"))
    wait_blocked(clock, b, by=a)
    assert run(clock, "extend", **receipt(high))[0].outcome == "extended", "tick has seen it, and not yet locked it"
    a.run("rollback")
    assert [r.changed for r in b.result() if r.part == "dead_letters"] == [1]
    assert run(clock, "ack", **receipt(high)) == [("acked",)]
    assert run(clock, "ack", **receipt(low)) == [("lost",)]


VERBS = {
    "ack": ({}, "acked"),
    "park": ({}, "parked"),
    "extend": ({}, "extended"),
    "fail": ({"error": "no"}, "failed"),
    "ack_many": (None, "acked"),
    "extend_many": (None, "extended"),
}


def use(session, verb, row):
    """Starts a verb under a row's receipt."""
    arguments, _ = VERBS[verb]
    kw = {"receipts": receipts([row])} if arguments is None else {**receipt(row), **arguments}
    return session.start(*call(verb, **kw))


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("verb", VERBS)
def test_after_a_lapse_the_holder_waits_for_the_next_claim_and_loses_if_that_commits(clock_db, verb, end):
    clock, a, b = clock_db.connect(), clock_db.session("a"), clock_db.session("b")
    send(clock)
    [first] = claim(a)
    advance(clock, "30 seconds")
    b.run("begin")
    [second] = claim(b)
    use(a, verb, first)
    wait_blocked(clock, a, by=b)
    b.run(end)
    [answer] = a.result()
    incidents = clock.execute("select message_id, detail from baton.incidents").fetchall()
    if end == "commit":
        assert answer.outcome == "lost"
        assert incidents == [(first.message_id, {"verb": verb, "delivery": first.delivery})]
        assert run(b, "ack", **receipt(second)) == [("acked",)]
    else:
        assert answer.outcome == VERBS[verb][1]
        assert incidents == []


@pytest.mark.parametrize("verb", VERBS)
def test_after_a_lapse_a_claim_passes_by_a_verb_of_the_holder_that_is_open(clock_db, verb):
    clock, a, b = clock_db.connect(), clock_db.session("a"), clock_db.session("b")
    send(clock)
    [first] = claim(a)
    advance(clock, "30 seconds")
    a.run("begin")
    assert use(a, verb, first).result()[0].outcome == VERBS[verb][1]
    assert claim(b) == []
    a.run("commit")
    again = claim(b)
    assert [(r.message_id, r.lapses) for r in again] == ([(first.message_id, 0)] if verb == "park" else [])


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_waits_for_another_of_the_same_receipt_and_then_sees_what_it_did(db, conn, verb):
    a, b = db.session("a"), db.session("b")
    send(conn)
    [row] = claim(conn)
    a.run("begin")
    run(a, "extend", **receipt(row), visibility="1 hour")
    use(b, verb, row)
    wait_blocked(conn, b, by=a)
    a.run("commit")
    assert b.result()[0].outcome == VERBS[verb][1]

    send(conn, queue="spent")
    [row] = claim(conn, "spent")
    a.run("begin")
    run(a, "park", **receipt(row))
    use(b, verb, row)
    wait_blocked(conn, b, by=a)
    a.run("commit")
    assert b.result()[0].outcome == "lost"
    assert conn.execute("select count(*) from baton.incidents").fetchone() == (0,)


def test_verbs_read_the_clock_after_they_waited(clock_db):
    clock, a, b, c, d = clock_db.connect(), *(clock_db.session(n) for n in "abcd")
    rows = []
    for _ in range(3):
        send(clock)
        rows += claim(clock)
    a.run("begin")
    a.run("select from baton.messages for no key update")
    b.start(*call("extend", **receipt(rows[0]), visibility="1 minute"))
    c.start(*call("park", **receipt(rows[1]), delay="1 minute"))
    d.start(*call("extend_many", receipts=receipts(rows[2:]), visibility="1 minute"))
    for session in (b, c, d):
        wait_blocked(clock, session, by=a)
    advance(clock, "1 hour")
    a.run("commit")
    due = clock.execute("select baton._now() + interval '1 minute'").fetchone()[0]
    assert [s.result()[0].visible_at for s in (b, c, d)] == [due, due, due]


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["send", "send_many"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_second_sender_waits_only_for_the_same_key_uncommitted(db, conn, verb, end):
    a, b, c = db.session("a"), db.session("b"), db.session("c")
    a.run("begin")
    first = send(a, "first", dedupe_key="k")
    if verb == "send":
        b.start(*call("send", queue_name="q", payload='"second"', dedupe_key="k"))
    else:
        b.start(*call("send_many", queue_name="q", messages=keyed(["k"])))
    wait_blocked(conn, b, by=a)
    assert send(c, dedupe_key="other").outcome == "sent"
    assert send(c, queue="elsewhere", dedupe_key="k").outcome == "sent"
    assert send(c).outcome == "sent"
    a.run(end)
    [second] = b.result()
    if end == "commit":
        assert second == ("duplicate", first.message_id)
    else:
        assert second.outcome == "sent"
        assert second.message_id != first.message_id
    found = conn.execute("select message_id from baton.messages where queue_name = 'q' and dedupe_key = 'k'").fetchall()
    assert found == [(second.message_id,)]


@pytest.mark.parametrize("what", ["claim", "ack", "extend", "fail", "tick"])
def test_a_key_whose_message_somebody_has_open_is_a_duplicate_without_waiting(clock_db, what):
    clock, a, b = clock_db.connect(), clock_db.session("a"), clock_db.session("b")
    if what == "tick":
        clock.execute("update baton.settings set max_lapses = 1")
    held = send(clock, dedupe_key="k")
    a.run("begin")
    if what != "claim":
        a.run("commit")
        [row] = claim(a)
        if what == "tick":
            advance(clock, "30 seconds")
        a.run("begin")
    if what == "claim":
        assert len(claim(a)) == 1
    elif what == "tick":
        assert "dead_letters" in [r.part for r in run(a, "tick")]
    else:
        run(a, what, **receipt(row), **({"error": "no", "final": True} if what == "fail" else {}))
    assert send(b, dedupe_key="k") == ("duplicate", held.message_id)
    a.run("commit")
    freed = what in ("ack", "fail", "tick")
    assert send(b, dedupe_key="k").outcome == ("sent" if freed else "duplicate")


def test_redrive_does_not_wait_for_who_has_the_holder_of_its_key_open(db, conn):
    a, b = db.session("a"), db.session("b")
    dead = bury(conn, "k")
    send(conn, dedupe_key="k")
    [row] = claim(conn)
    a.run("begin")
    run(a, "ack", **receipt(row))
    assert run(b, "redrive", message_ids=[dead]) == [("key_taken", dead)]
    a.run("commit")
    assert run(b, "redrive", message_ids=[dead]) == [("redriven", dead)]


def test_a_duplicate_does_not_end_the_callers_transaction(db, conn, server_log):
    a, b = db.session("a"), db.session("b")
    a.run("begin")
    send(a, dedupe_key="k")
    b.run("begin")
    send(b, "before")
    b.start(*call("send", queue_name="q", payload="1", dedupe_key="k"))
    wait_blocked(conn, b, by=a)
    a.run("commit")
    assert b.result()[0].outcome == "duplicate"
    send(b, "after")
    b.run("commit")
    payloads = conn.execute("select payload from baton.messages where dedupe_key is null").fetchall()
    assert sorted(payloads) == [("after",), ("before",)]
    assert server_log.errors() == []


# --- several messages in one verb: always in one order ----------------------------------------------------------------


def test_send_many_inserts_by_key(db, conn):
    a, b, c = db.session("a"), db.session("b"), db.session("c")
    a.run("begin")
    send(a, dedupe_key="a")
    b.start(*call("send_many", queue_name="q", messages=keyed(["z", "a"])))
    wait_blocked(conn, b, by=a)
    assert send(c, dedupe_key="z").outcome == "sent", "z waits behind a"
    a.run("commit")
    assert [r.outcome for r in b.result()] == ["duplicate", "duplicate"]


def test_redrive_inserts_by_key(db, conn):
    a, b, c = db.session("a"), db.session("b"), db.session("c")
    late, early = bury(conn, "z"), bury(conn, "a")
    a.run("begin")
    send(a, dedupe_key="a")
    b.start(*call("redrive", message_ids=[late, early]))
    wait_blocked(conn, b, by=a)
    assert send(c, dedupe_key="z").outcome == "sent", "z waits behind a"
    a.run("commit")
    assert b.result() == [("key_taken", late), ("key_taken", early)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_redrives_of_one_message_bring_it_back_once(db, conn, end):
    a, b = db.session("a"), db.session("b")
    dead = bury(conn)
    a.run("begin")
    assert run(a, "redrive", message_ids=[dead]) == [("redriven", dead)]
    b.start(*call("redrive", message_ids=[dead]))
    wait_blocked(conn, b, by=a)
    a.run(end)
    assert b.result() == [("unknown" if end == "commit" else "redriven", dead)]
    assert conn.execute("select count(*) from baton.messages").fetchone() == (1,)


@pytest.mark.parametrize("first", ["both", "one"])
def test_redrives_of_two_messages_that_had_one_key_never_deadlock(db, conn, server_log, first):
    a, b, blocker = db.session("a"), db.session("b"), db.session("blocker")
    early, late = bury(conn, "k"), bury(conn, "k")
    ids = {"both": [late, early], "one": [late]}
    second = "one" if first == "both" else "both"
    blocker.run("begin")
    blocker.run("lock table baton.incidents in exclusive mode")
    a.start(*call("redrive", message_ids=ids[first]))
    wait_blocked(conn, a, by=blocker)
    b.start(*call("redrive", message_ids=ids[second]))
    wait_blocked(conn, b, by=a)
    blocker.run("commit")
    answers = {first: a.result(), second: b.result()}
    if first == "both":
        assert answers == {"both": [("key_taken", late), ("redriven", early)], "one": [("key_taken", late)]}
    else:
        assert answers == {"one": [("redriven", late)], "both": [("unknown", late), ("key_taken", early)]}
    assert server_log.errors() == []


@pytest.mark.parametrize("verb", ["ack_many", "extend_many"])
def test_a_verb_on_several_receipts_locks_by_id(db, conn, verb):
    a, b, c = db.session("a"), db.session("b"), db.session("c")
    for _ in range(2):
        send(conn)
    low, high = sorted(claim(conn, max_messages=2))
    a.run("begin")
    run(a, "extend", **receipt(low))
    b.start(*call(verb, receipts=receipts([high, low])))
    wait_blocked(conn, b, by=a)
    assert run(c, "extend", **receipt(high), visibility="1 hour")[0].outcome == "extended", "the high one is still free"
    a.run("commit")
    assert [r.outcome for r in b.result()] == [VERBS[verb][1]] * 2


def test_crossing_keys_of_send_many_never_deadlock(db, server_log):
    a, b = db.connect(), db.connect()
    sent = Counter()

    def sender(conn, step, number):
        rows = run(conn, "send_many", queue_name="q", messages=keyed([f"{number} {n}" for n in range(12)][::step]))
        sent[step] += sum(r.outcome == "sent" for r in rows)

    rounds = in_rounds(lambda: sent[1] and sent[-1], lambda number: sender(a, 1, number), lambda number: sender(b, -1, number))
    assert sent[1] + sent[-1] == rounds * 12
    assert sent[1] and sent[-1], "one sender won every key: that was no race"
    assert server_log.errors() == []


def test_crossing_keys_of_redrive_and_send_many_never_deadlock(db, conn, server_log):
    rounds, size = ROUNDS // 10, 10
    conn.execute("select count(*) from baton.send_many('q', (select jsonb_agg(jsonb_build_object('dedupe_key', i)) "
                 "from generate_series(0, %s) as i))", (rounds * size - 1,))
    rows = claim(conn, max_messages=rounds * size)
    assert len(rows) == rounds * size
    ids = {key: number for number, key in conn.execute("select message_id, dedupe_key from baton.messages")}
    for row in rows:
        run(conn, "fail", **receipt(row), error="no", final=True)
    a, b = db.connect(), db.connect()
    outcomes = Counter()
    meet = threading.Barrier(2)

    def both(function, step):
        for number in range(rounds):
            keys = [str(number * size + n) for n in range(size)][::step]
            meet.wait(10)
            outcomes.update(r.outcome for r in function(keys))

    in_parallel(
        lambda: both(lambda keys: run(a, "redrive", message_ids=[ids[k] for k in keys]), -1),
        lambda: both(lambda keys: run(b, "send_many", queue_name="q", messages=keyed(keys)), 1),
    )
    assert outcomes["redriven"] == outcomes["duplicate"]
    assert outcomes["sent"] == outcomes["key_taken"]
    assert outcomes["redriven"] + outcomes["sent"] == rounds * size
    assert server_log.errors() == []


def test_ack_many_and_extend_many_in_opposite_orders_never_deadlock(db, conn, server_log):
    size = 6
    a, b = db.connect(), db.connect()
    held = []
    outcomes = Counter()

    def hold():
        run(conn, "send_many", queue_name="q", messages=json.dumps([{}] * size))
        held[:] = claim(conn, max_messages=size)

    def acks(_):
        outcomes.update(r.outcome for r in run(a, "ack_many", receipts=receipts(held)))

    def extends(_):
        outcomes.update({r.outcome for r in run(b, "extend_many", receipts=receipts(held[::-1]))})

    rounds = in_rounds(lambda: outcomes["extended"] and outcomes["lost"], acks, extends, prepare=hold)
    assert outcomes["acked"] == rounds * size
    assert outcomes["extended"] + outcomes["lost"] >= rounds
    assert outcomes["extended"] and outcomes["lost"], "one was first every time: that was no race"
    assert server_log.errors() == []


# --- marks ------------------------------------------------------------------------------------------------------------


def test_a_send_that_is_open_over_a_tick_is_seen_at_once(clock_db):
    clock, a = clock_db.connect(), clock_db.session("a")
    send(clock)
    [row] = claim(clock)
    run(clock, "ack", **receipt(row))
    a.run("begin")
    send(a)
    advance(clock, "4 seconds")
    run(clock, "tick")
    a.run("commit")
    assert len(claim(clock)) == 1


def test_a_send_that_is_open_for_longer_waits_for_a_tick_and_is_not_lost(clock_db):
    clock, a = clock_db.connect(), clock_db.session("a")
    send(clock)
    [row] = claim(clock)
    run(clock, "ack", **receipt(row))
    a.run("begin")
    send(a)
    advance(clock, "1 minute")
    run(clock, "tick")
    a.run("commit")
    assert claim(clock) == [], "it lies below the mark"
    advance(clock, "5 seconds")
    run(clock, "tick")
    advance(clock, "5 seconds")
    run(clock, "tick")
    advance(clock, "5 seconds")
    run(clock, "tick")
    assert len(claim(clock)) == 1, "a quarter of a minute later a tick has looked from the start"


def test_a_tick_passes_by_a_mark_that_somebody_holds(clock_db):
    clock, a = clock_db.connect(), clock_db.session("a")
    clock.execute("set statement_timeout = '5s'")
    for queue in ("one", "two"):
        send(clock, queue=queue)
        claim(clock, queue)
    a.run("begin")
    a.run("select from baton.queue_marks where queue_name = 'one' for update")
    assert [(r.part, r.changed) for r in run(clock, "tick")] == [("queue_marks", 1)]


# --- isolation levels -------------------------------------------------------------------------------------------------

LEVELS = {
    "repeatable read": psycopg.IsolationLevel.REPEATABLE_READ,
    "serializable": psycopg.IsolationLevel.SERIALIZABLE,
}


@pytest.mark.parametrize("level", LEVELS)
def test_under_an_old_snapshot_a_claim_says_40001_and_gives_nothing_twice(db, conn, level):
    a = db.session("a")
    send(conn)
    a.run(f"begin isolation level {level}")
    a.run("select from baton.messages")
    [row] = claim(conn)
    assert a.start(*call("claim", queue_name="q")).error().sqlstate == "40001"
    a.run("rollback")
    assert claim(a) == []
    assert run(conn, "ack", **receipt(row)) == [("acked",)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("verb", VERBS)
def test_under_an_old_snapshot_a_late_receipt_is_never_good(clock_db, level, verb):
    clock, a = clock_db.connect(), clock_db.session("a")
    send(clock)
    [first] = claim(clock)
    a.run(f"begin isolation level {level}")
    a.run("select from baton.messages")
    advance(clock, "30 seconds")
    [second] = claim(clock)
    assert use(a, verb, first).error().sqlstate == "40001"
    a.run("rollback")
    assert run(clock, "ack", **receipt(second)) == [("acked",)]


@pytest.mark.parametrize("level", LEVELS)
def test_under_an_old_snapshot_a_key_is_never_held_twice(db, conn, level):
    a = db.session("a")
    a.run(f"begin isolation level {level}")
    a.run("select from baton.messages")
    send(conn, dedupe_key="k")
    assert a.start(*call("send", queue_name="q", payload="1", dedupe_key="k")).error().sqlstate == "40001"
    a.run("rollback")
    assert conn.execute("select count(*) from baton.messages").fetchone() == (1,)


@pytest.mark.parametrize("level", LEVELS)
def test_consumers_at_a_higher_level_take_each_message_once(db, conn, server_log, level):
    consumers, messages = 4, 60
    conn.execute("select count(*) from baton.send_many('q', (select jsonb_agg(jsonb_build_object('payload', i)) "
                 "from generate_series(1, %s) as i))", (messages,))
    connections = [db.connect() for _ in range(consumers)]
    won = [[] for _ in range(consumers)]
    refused = Counter()

    def consume(number):
        mine = connections[number]
        mine.isolation_level = LEVELS[level]
        while True:
            try:
                with mine.transaction():
                    if not (rows := claim(mine)):
                        return
                with mine.transaction():
                    run(mine, "extend", **receipt(rows[0]))
            except psycopg.Error as error:
                refused[error.sqlstate] += 1
                if sum(refused.values()) > 20 * messages:
                    raise
            else:
                won[number].append(rows[0].payload)

    in_parallel(*(lambda n=n: consume(n) for n in range(consumers)))
    taken = [payload for mine in won for payload in mine]
    assert len(taken) == len(set(taken))
    assert sum(bool(mine) for mine in won) > 1, "only one consumer won anything: that was no race"
    assert set(refused) <= {"40001"}
    assert conn.execute("select count(*) from baton.messages where claimed_at is null").fetchone() == (0,)
    assert conn.execute("select count(*) from baton.messages where lapses > 0").fetchone() == (0,)


# --- settings of the session ------------------------------------------------------------------------------------------


def test_a_session_without_standard_conforming_strings_is_answered_the_same(db):
    odd = db.connect(options="-c standard_conforming_strings=off -c escape_string_warning=off")
    every_verb(odd)
    assert send(odd, queue="x01 \\", dedupe_key="x9f \\").outcome == "sent"
    for bad in ("a\x01", "a\x7f", "a\x9f"):
        for arguments in ({"queue": bad}, {"dedupe_key": bad}):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                send(odd, **arguments)


# --- NOTIFY -----------------------------------------------------------------------------------------------------------


def heard(listener, conn):
    """The notifications up to a marker, which is sent last and so heard last."""
    conn.execute("select pg_notify('baton_messages', 'marker')")
    found = []
    for notification in listener.notifies(timeout=60):
        if notification.payload == "marker":
            return found
        found.append((notification.channel, notification.payload))
    raise AssertionError("the marker was not heard")


def every_verb(conn):
    """Each verb of messages, with an effect."""
    send(conn, dedupe_key="k")
    send(conn, dedupe_key="k")
    run(conn, "send_many", queue_name="q", messages=json.dumps([{}, {"dedupe_key": "k2"}, {}, {}, {}, {}, {}]))
    rows = claim(conn, max_messages=8)
    assert len(rows) == 8
    run(conn, "extend", **receipt(rows[0]))
    run(conn, "extend_many", receipts=receipts(rows))
    run(conn, "ack", **receipt(rows[0]))
    run(conn, "ack", **receipt(rows[0]))
    run(conn, "ack_many", receipts=receipts(rows[1:3]))
    run(conn, "park", **receipt(rows[3]))
    run(conn, "fail", **receipt(rows[4]), error="no")
    run(conn, "fail", **receipt(rows[5]), error="no", final=True)
    run(conn, "redrive", message_ids=[rows[5].message_id])
    run(conn, "remove_messages", message_ids=[rows[5].message_id])
    run(conn, "tick")


def test_with_message_notify_off_no_verb_notifies(db, conn):
    listener = db.connect()
    for (channel,) in conn.execute("select unnest(array['baton_messages', 'baton_control'])"):
        listener.execute(f"listen {channel}")
    every_verb(conn)
    assert heard(listener, conn) == []


def test_with_message_notify_on_send_names_the_queue(db, conn):
    listener = db.connect()
    listener.execute("listen baton_messages")
    conn.execute("update baton.settings set message_notify = true")
    send(conn, queue="one")
    assert heard(listener, conn) == [("baton_messages", "one")]
    send(conn, queue="keys", dedupe_key="k")
    assert heard(listener, conn) == [("baton_messages", "keys")]
    send(conn, queue="keys", dedupe_key="k")
    assert heard(listener, conn) == [], "a duplicate sends nothing"
    run(conn, "send_many", queue_name="many", messages=json.dumps([{}, {}]))
    assert heard(listener, conn) == [("baton_messages", "many")]
    run(conn, "send_many", queue_name="many", messages=keyed("ab"))
    assert heard(listener, conn) == [("baton_messages", "many")]
    run(conn, "send_many", queue_name="many", messages=keyed("ab"))
    assert heard(listener, conn) == [], "duplicates send nothing"
    run(conn, "send_many", queue_name="many", messages="[]")
    assert heard(listener, conn) == []
    conn.execute("begin")
    send(conn)
    conn.execute("rollback")
    assert heard(listener, conn) == [], "nor does a send that is rolled back"
    claim(conn, "one")
    run(conn, "tick")
    assert heard(listener, conn) == []
