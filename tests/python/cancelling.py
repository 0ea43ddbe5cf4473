"""What the tests of cancellation share: a run with bodies, and what the control channel and terminal_tasks say of it."""

import json

from psycopg.types.json import Jsonb
from runs import Receipt, granted, start
from starts import call
from tasks import create, replay, started

LATE = "update baton.messages set visible_at = baton._now() - interval '1 s' where message_id = %s"


def build(conn, bodies=("s/0", "s/1", "t/0"), run_id="r", queue_name=None, inline_limit=0, **arguments):
    """A run with the steps s, of three tasks, and t, of one, whose replay has ended; these bodies run, for an hour.

    Answers them by those names. With an inline_limit the first ones run under its run message. Its queue is its own.
    """
    queue_name = queue_name or run_id
    start(conn, run_id, queue_name)
    receipt, epoch = granted(conn, run_id, visibility="1 hour", queue_name=queue_name)
    assert create(conn, epoch, "s", range(3), run_id, **arguments) == "created"
    assert create(conn, epoch, "t", [0], run_id) == "created"
    inline = replay(conn, receipt, epoch, inline_limit, run_id)[1]
    made = {f"{task.step_slug}/{task.task_index}": task for task in inline}
    for row in call(conn, "claim", queue_name=queue_name, max_messages=10, visibility="1 hour"):
        receipt, name = Receipt(row.message_id, row.delivery), f"{row.step_slug}/{row.task_index}"
        if name in bodies:
            made[name] = started(conn, receipt)
        else:
            call(conn, "park", **receipt._asdict())
    assert set(bodies) <= set(made)
    return made


def reclaimed(conn, receipt, queue_name="r"):
    """A claim ran out, and somebody else claims the message."""
    conn.execute(LATE, (receipt.message_id,))
    [row] = call(conn, "claim", queue_name=queue_name)
    assert row.message_id == receipt.message_id
    return Receipt(row.message_id, row.delivery)


def key(task, run_id="r"):
    return {"run_id": run_id, "step_slug": task.step_slug, "task_index": task.task_index, "attempt": task.attempt}


def ask(conn, *tasks, run_id="r"):
    """What terminal_tasks says of these: outcome, and cause where there is one."""
    keys = Jsonb([key(task, run_id) for task in tasks])
    return [" ".join(filter(None, (row.outcome, row.cause))) for row in call(conn, "terminal_tasks", keys=keys)]


def listen(db):
    conn = db.connect()
    conn.execute("listen baton_control")
    return conn


def heard(listener, conn):
    """What the control channel has said up to a marker, which is sent last and so heard last."""
    conn.execute("select pg_notify('baton_control', 'marker')")
    found = []
    for notification in listener.notifies(timeout=60):
        if notification.payload == "marker":
            return found
        found.append(json.loads(notification.payload))
    raise AssertionError("the marker was not heard")


def said(event, reason, run_id="r", **more):
    return {"v": 1, "event": event, "queue_name": run_id, "run_id": run_id, "reason": reason, **more}
