"""What a claim touches, in buffers: a function scan's count includes those of the statements inside."""

import pytest

# This is about plans, not about autovacuum: nothing runs beside, and nobody takes a cached plan away.
ALONE = "alter table baton.messages set (autovacuum_enabled = off)"

FILL = """
insert into baton.messages (queue_name, visible_at, created_at, delivery, claimed_at)
select 'q', baton._now() + interval '1 hour' + i * interval '1 ms', baton._now(), d.delivery, d.claimed_at
from generate_series(1, %s) as i
cross join (values (null::bigint, null::timestamptz), (1, baton._now())) as d (delivery, claimed_at)
"""

FILL_DEAD = """
insert into baton.dead_messages (message_id, queue_name, failures, lapses, created_at, died_at, reason)
select -i, 'q', 1, 0, baton._now(), baton._now(), 'final' from generate_series(1, 20000) as i
"""


def buffers(conn, statement, rows):
    """The buffers of a statement that answers so many rows, once its plans are cached (the sixth call makes a generic
    plan of a function's statements)."""
    def once():
        [plan] = conn.execute("explain (analyze, buffers, timing off, format json) " + statement).fetchone()[0]
        assert plan["Plan"]["Actual Rows"] == rows
        return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]

    return min([once() for _ in range(10)][7:])


def due(conn, queue, count):
    items = "(select jsonb_agg('{}'::jsonb) from generate_series(1, %s))"
    conn.execute(f"select count(*) from baton.send_many(%s, {items})", (queue, count))


CLAIM = "select * from baton.claim('q')"


def test_a_claim_does_not_cost_more_with_delayed_and_in_flight_messages(clock_db):
    conn = clock_db.connect()
    conn.execute(ALONE)
    conn.execute(FILL, (100,))
    conn.execute("analyze baton.messages")
    nothing = buffers(conn, CLAIM, rows=0)
    due(conn, "q", 10)
    one = buffers(conn, CLAIM, rows=1)

    conn.execute(FILL, (200_000,))
    for fresh in (False, True):
        if fresh:
            conn.execute("analyze baton.messages")
            conn = clock_db.connect()
        assert buffers(conn, CLAIM, rows=0) <= nothing + 12
        due(conn, "q", 10)
        assert buffers(conn, CLAIM, rows=1) <= one + 12


def test_a_claim_does_not_step_over_finished_messages_that_a_snapshot_keeps(clock_db):
    conn, reader = clock_db.connect(), clock_db.connect()
    conn.execute(ALONE)
    nothing = buffers(conn, "select * from baton.claim('empty')", rows=0)
    due(conn, "new", 10)
    one = buffers(conn, "select * from baton.claim('new')", rows=1)

    reader.execute("begin isolation level repeatable read")
    reader.execute("select from baton.messages")
    for _ in range(10):
        due(conn, "q", 5000)
        done = conn.execute(
            "select count(*) filter (where a.outcome = 'acked') from baton.ack_many(("
            "select jsonb_agg(jsonb_build_object('message_id', c.message_id, 'delivery', c.delivery)) "
            "from baton.claim('q', max_messages => 5000) as c)) as a"
        ).fetchone()
        assert done == (5000,)
        conn.execute("select baton_test.advance('10 seconds')")
    conn.execute("select baton_test.advance('1 minute')")
    unmarked = buffers(conn, CLAIM, rows=0)
    assert unmarked > 3 * nothing, "the snapshot keeps nothing: this test proves nothing"

    conn.execute("select * from baton.tick()")
    assert buffers(conn, CLAIM, rows=0) <= 3 * nothing
    due(conn, "q", 10)
    assert buffers(conn, CLAIM, rows=1) <= 3 * one
    reader.execute("rollback")


CALLS = {
    "send": "send('held', '1', dedupe_key => 'k')",
    "claim": "claim('held')",
    "extend": "extend({m}, {d})",
    "extend_many": "extend_many('[{{\"message_id\": {m}, \"delivery\": {d}}}]')",
    "ack": "ack({m}, {d})",
    "ack_many": "ack_many('[{{\"message_id\": {m}, \"delivery\": {d}}}]')",
    "park": "park({m}, {d})",
    "fail": "fail({m}, {d}, 'no')",
    "redrive": "redrive(array[{m}])",
    "remove_messages": "remove_messages(array[{m}])",
    "dead_letters": "_bury_messages(baton._now())",
    "queue marks": "_move_marks(baton._now())",
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_plan_that_was_cached_while_the_tables_were_tiny_does_not_read_big_ones(clock_db, verb):
    conn, filler = clock_db.connect(), clock_db.connect()
    conn.execute(ALONE)
    conn.execute("alter table baton.dead_messages set (autovacuum_enabled = off)")
    due(conn, "held", 3)
    for table in ("messages", "dead_messages"):
        conn.execute(f"vacuum analyze baton.{table}")

    def call():
        """The buffers of one call that has an effect."""
        conn.execute("delete from baton.messages where queue_name = 'held'")
        due(conn, "held", 1)
        m, d = conn.execute("select message_id, delivery from baton.messages where queue_name = 'held'").fetchone()
        if verb not in ("send", "claim", "remove_messages"):
            m, d = conn.execute("select message_id, delivery from baton.claim('held')").fetchone()
        if verb == "redrive":
            conn.execute("select baton.fail(%s, %s, 'no', final => true)", (m, d))
        if verb == "dead_letters":
            conn.execute("update baton.settings set max_lapses = 1")
            conn.execute("select baton_test.advance('30 seconds')")
        statement = "explain (analyze, buffers, timing off, format json) select * from baton." + CALLS[verb]
        [plan] = conn.execute(statement.format(m=m, d=d)).fetchone()[0]
        assert plan["Plan"]["Actual Rows"] == 1
        return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]

    tiny = min([call() for _ in range(10)][7:])
    filler.execute(FILL, (10_000,))
    filler.execute(FILL_DEAD)
    assert call() <= tiny + 40
