"""Senders that claim at the same time."""

from starts import call, register


def test_a_sender_takes_what_no_other_has_open(db, conn):
    register(conn, "orders")
    register(conn, "mails")
    assert [row.outcome for row in call(conn, "ensure_workers")] == ["reserved", "reserved"]
    one, other = db.session("one"), db.session("other")
    for sender in (one, other):
        sender.run("set lock_timeout = '5s'")
        sender.run("begin")
    names = [claimed.payload["function_name"] for sender in (one, other) for claimed in call(sender, "claim_deliveries")]
    assert sorted(names) == ["mails", "orders"]
    assert call(one, "claim_deliveries", max_messages=10) == []
