"""What the tests of runs and replay share: the verbs by short names, and a worker that is a process of its own."""

import contextlib
import json
import subprocess
import sys
from collections import namedtuple

import psycopg
import pytest
from conftest import ROOT, wait_until
from starts import call, one

Receipt = namedtuple("Receipt", "message_id delivery")


def start(conn, run_id="r", queue_name="q", **arguments):
    return one(conn, "start_run", workflow_name="w", input=None, run_id=run_id, queue_name=queue_name, **arguments)


def take(conn, run_id="r", queue_name="q", **arguments):
    """Claims one run message of the run; None where none is due."""
    for row in call(conn, "claim", queue_name=queue_name, for_run=run_id, **arguments):
        return Receipt(row.message_id, row.delivery)
    return None


def begin(conn, receipt, hold="lease"):
    return one(conn, "begin_replay", message_id=receipt.message_id, delivery=receipt.delivery, hold=hold)


def granted(conn, run_id="r", hold="lease", **arguments):
    """Claims, begins, and answers the receipt and the epoch."""
    receipt = take(conn, run_id, **arguments)
    answer = begin(conn, receipt, hold)
    assert answer.outcome == "granted", answer
    return receipt, answer.replay_epoch


def end(conn, epoch, seen_seq, run_id="r", **arguments):
    return one(conn, "end_replay", run_id=run_id, replay_epoch=epoch, seen_seq=seen_seq, **arguments)


def append(conn, epoch, type="x.y", run_id="r", **arguments):
    return one(conn, "append_event", run_id=run_id, replay_epoch=epoch, type=type, **arguments).outcome


def signal(conn, run_id="r", name="s", **arguments):
    return one(conn, "signal_run", run_id=run_id, name=name, **arguments).outcome


def wake(conn, run_id="r"):
    return one(conn, "wake_run", run_id=run_id).outcome


def cancel(conn, run_id="r"):
    return one(conn, "cancel_run", run_id=run_id, reason="enough").outcome


def run(conn, run_id="r"):
    return conn.execute("select * from baton.runs where run_id = %s", (run_id,)).fetchone()


def messages(conn, run_id="r"):
    return conn.execute("select * from baton.messages where run_id = %s order by message_id", (run_id,)).fetchall()


def log(conn, run_id="r"):
    return [(e.seq, e.type) for e in call(conn, "read_events", run_id=run_id, max_events=100_000)]


def last_seq(conn, run_id="r"):
    return conn.execute("select coalesce(max(seq), 0) as n from baton.events where run_id = %s", (run_id,)).fetchone().n


def incidents(conn, kind=None):
    return [i.kind for i in conn.execute("select kind from baton.incidents order by incident_id").fetchall()
            if kind in (None, i.kind)]


def wedged(conn):
    return [(w.run_id, w.reason) for w in conn.execute("select * from baton.wedged_runs order by run_id").fetchall()]


def body(conn, receipt, run_id="r", step_slug="s", status="started"):
    """A task in that state, started under the receipt."""
    conn.execute("insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq) values (%s, %s, 1, 1, 1)",
                 (run_id, step_slug))
    conn.execute("insert into baton.tasks (run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery,"
                 " last_started_at) values (%s, %s, 0, %s, 1, %s, %s, baton._now())",
                 (run_id, step_slug, status, *receipt))


def serve(conn, run_id="r", rounds=20):
    """Replays whatever is due, each to its end. Answers the positions that the replays had read when they ended."""
    ended = []
    for _ in range(rounds):
        receipt = take(conn, run_id)
        if receipt is None:
            return ended
        answer = begin(conn, receipt)
        if answer.outcome != "granted":
            continue
        seen = last_seq(conn, run_id)
        while (ending := end(conn, answer.replay_epoch, seen, run_id)).outcome == "again":
            seen = ending.last_seq
        if ending.outcome == "ended":
            ended.append(seen)
    raise AssertionError(f"after {rounds} rounds {run_id} is still being woken")


@contextlib.contextmanager
def superseded():
    """What is done in here is refused by the fence."""
    with pytest.raises(psycopg.DatabaseError) as refused:
        yield
    assert (refused.value.sqlstate, refused.value.diag.constraint_name) == ("PB001", "superseded")


PROGRAM = """
import json, sys, psycopg
conn = psycopg.connect(sys.argv[1], autocommit=True)
print(json.dumps(conn.info.backend_pid), flush=True)
for line in sys.stdin:
    sql, arguments = json.loads(line)
    cursor = conn.execute(sql, arguments)
    rows = cursor.fetchall() if cursor.description else []
    print(json.dumps([[c.name for c in cursor.description or []], rows], default=str), flush=True)
"""


class Process:
    """A process with one connection, which does what it is told and waits."""

    def __init__(self, dsn):
        self.child = subprocess.Popen([sys.executable, "-c", PROGRAM, dsn], stdin=subprocess.PIPE, text=True,
                                      stdout=subprocess.PIPE, cwd=ROOT)
        self.pid = json.loads(self.child.stdout.readline())

    def run(self, sql, arguments=()):
        print(json.dumps([sql, arguments]), file=self.child.stdin, flush=True)
        names, rows = json.loads(self.child.stdout.readline())
        row = namedtuple("Row", names)
        return [row(*values) for values in rows]

    def kill(self):
        self.child.kill()
        self.child.wait()

    def close(self):
        if self.child.poll() is None:
            self.kill()
        self.child.stdin.close()
        self.child.stdout.close()


def wait_gone(conn, pid):
    """Waits until the server has noticed that the connection is dead."""
    wait_until(lambda: not conn.execute("select from pg_stat_activity where pid = %s", (pid,)).fetchall(),
               f"backend {pid} has ended")
