"""A sender that claims while a start is being requested."""

from conftest import wait_blocked
from starts import begin, call, deliveries, function, register


def test_a_request_that_is_committed_while_a_sender_claims_is_handed_out_and_not_dropped(db, conn):
    """The claim's first snapshot knows the function before the reservation, a later one knows the delivery."""
    register(conn)
    ensuring, sender, holder = (db.session(name) for name in ("ensuring", "sender", "holder"))
    ensuring.run("begin")
    assert [row.outcome for row in call(ensuring, "ensure_workers")] == ["reserved"]
    holder.run("begin")
    holder.run("lock table baton.queue_marks in access exclusive mode")
    begin(sender, "claim_deliveries", max_messages=10)
    wait_blocked(conn, sender, by=holder)
    ensuring.run("commit")
    holder.run("rollback")

    [claimed] = sender.result()
    assert claimed.payload["body"]["invocation_id"] == str(function(conn).invocation_id)
    assert len(deliveries(conn)) == 1
