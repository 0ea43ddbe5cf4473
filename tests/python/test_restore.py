"""A dump with work in flight, restored beside its source, whose workers then reach the wrong database."""

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb
from runs import append, begin, end, granted, start, superseded, wedged
from starts import call, one, register, reserved
from tasks import complete, extend, inline, look, queued, start_task, started, take_task
from test_install import house, make  # noqa: F401

WORKER = "00000000-0000-0000-0000-000000000001"


@pytest.fixture
def connect(house):
    opened = []

    def connect(database):
        opened.append(house.connect(database, "house_owner", row_factory=namedtuple_row))
        return opened[-1]

    yield connect
    for conn in opened:
        conn.close()


def copy(house, tmp_path, source, target):
    """pg_dump and pg_restore, by the owner."""
    house.dump("pg_dump", "-Fc", "-f", tmp_path / "dump", house.cluster.dsn(source, "postgres"))
    house.dump("pg_restore", "--exit-on-error", "-d", house.cluster.dsn(target, "house_owner"), tmp_path / "dump")


def restored(conn):
    return [h.severity for h in call(conn, "health") if h.finding == "restored"]


@pytest.mark.parametrize("way", ["checkout", "extension"])
def test_after_restore_no_old_receipt_counts_and_the_work_goes_on(house, make, connect, tmp_path, way):
    source, target = make(), make()
    assert house.install(way, source, "house_owner") is None
    conn = connect(source)
    assert restored(conn) == []
    register(conn)
    [invocation_id] = reserved(conn).values()
    one(conn, "register_worker_function", function_name="p", start_mode="process")
    one(conn, "register_worker", worker_id=WORKER, function_name="p")
    one(conn, "send", queue_name="users", payload=None)
    [message] = call(conn, "claim", queue_name="users", worker_id=WORKER)
    start(conn, "held")
    held, epoch = granted(conn, "held")
    append(conn, epoch, run_id="held")
    [body] = inline(conn, "inline")
    queued(conn, "queued")
    task = started(conn, take_task_of(conn, "queued"))

    copy(house, tmp_path, source, target)
    assert restored(conn) == []
    conn = connect(target)
    assert restored(conn) == ["warning"]
    assert extend(conn, held) == "extended", "so it is needed"
    assert one(conn, "after_restore").outcome == "restored"
    assert restored(conn) == []

    # The workers of the source: whatever they hold is void here.
    assert one(conn, "ack", message_id=message.message_id, delivery=message.delivery).outcome == "lost"
    assert one(conn, "fail", message_id=message.message_id, delivery=message.delivery, error="x").outcome == "lost"
    for receipt in (held, body.receipt, task.receipt):
        assert extend(conn, receipt) == "lost"
    assert begin(conn, held).outcome == "lost"
    assert start_task(conn, task.receipt).outcome == "lost"
    with superseded():
        append(conn, epoch, run_id="held")
    assert end(conn, epoch, 1, "held").outcome == "lost"
    assert complete(conn, body, "inline").outcome == complete(conn, task, "queued").outcome == "lost"
    assert one(conn, "heartbeat", worker_id=WORKER).outcome == "stopped"
    answer = one(conn, "reconcile_worker_invocation", function_name="orders", invocation_id=invocation_id)
    assert (answer.outcome, answer.reason) == ("rejected", "expired")

    # New ones go on.
    assert wedged(conn) == []
    assert [m.message_id for m in call(conn, "claim", queue_name="users")] == [message.message_id]
    end(conn, granted(conn, "held")[1], 2, "held")
    assert look(conn, run_id="inline")[0] == ["execute"]
    again = started(conn, take_task_of(conn, "queued"))
    assert (again.attempt, complete(conn, again, "queued").outcome) == (2, "completed")
    assert one(conn, "send", queue_name="users", payload=None).message_id > task.receipt.message_id + 1_000_000
    for receipt in (held, body.receipt, task.receipt):
        assert extend(conn, receipt) == "lost"


def take_task_of(conn, run_id):
    """Claims the task message of a run, whatever else is due in the queue."""
    conn.execute("update baton.messages set visible_at = visible_at - interval '1 day' where run_id = %s and kind = 'task'",
                 (run_id,))
    return take_task(conn)


@pytest.mark.parametrize("way", ["checkout", "extension"])
def test_health_knows_a_dump_that_replaced_its_own_source(house, make, connect, tmp_path, way):
    source = make()
    assert house.install(way, source, "house_owner") is None
    house.dump("pg_dump", "-Fc", "-f", tmp_path / "dump", house.cluster.dsn(source, "postgres"))
    house.dump("pg_restore", "--clean", "-d", house.cluster.dsn(source, "house_owner"), tmp_path / "dump")
    assert restored(connect(source)) == ["warning"]


def test_health_knows_a_clone(house, make, connect):
    source, target = make(), make()
    assert house.install("checkout", source, "house_owner") is None
    house.execute(f"drop database {target}", f"create database {target} template {source} owner house_owner")
    assert restored(connect(target)) == ["warning"]
    assert restored(connect(source)) == []


def test_who_may_not_ask_for_the_system_is_served_as_well(house, make, connect):
    source = make()
    house.execute("revoke execute on function pg_control_system() from public", dbname=source)
    assert house.install("checkout", source, "house_owner") is None
    conn = connect(source)
    assert restored(conn) == []
    conn.execute("update baton.state set identity = 'another'")
    assert restored(conn) == ["warning"]
    assert one(conn, "after_restore").outcome == "restored"
    assert restored(conn) == []


def test_it_waits_for_what_is_open_and_who_comes_waits_for_it(house, make, connect):
    source = make()
    assert house.install("checkout", source, "house_owner") is None
    conn, other = connect(source), connect(source)
    other.execute("set lock_timeout = '100ms'")
    call(conn, "send_many", queue_name="q", messages=Jsonb([{}, {}]))
    conn.execute("begin")
    [message] = call(conn, "claim", queue_name="q")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        one(other, "after_restore")
    conn.execute("commit")
    conn.execute("begin")
    assert one(conn, "after_restore").outcome == "restored"
    with pytest.raises(psycopg.errors.LockNotAvailable):
        call(other, "claim", queue_name="q")
    conn.execute("commit")
    assert extend(other, message) == "lost"
    assert len(call(other, "claim", queue_name="q", max_messages=2)) == 2
