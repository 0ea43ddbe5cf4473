"""What the tests of steps and tasks share: the verbs by short names, and tasks in the states that a test needs."""

from collections import namedtuple

from conftest import ROOT
from psycopg.types.json import Jsonb
from runs import Receipt, end, granted, last_seq, start
from soak_audit import long_way
from starts import call, one

Task = namedtuple("Task", "step_slug task_index attempt receipt", defaults=(None,))


def create(conn, epoch, slug="s", inputs=(1,), run_id="r", **arguments):
    return one(conn, "create_step", run_id=run_id, replay_epoch=epoch, step_slug=slug, inputs=Jsonb(list(inputs)),
               **arguments).outcome


def dispatch(conn, epoch, inline_limit=1, run_id="r"):
    return call(conn, "dispatch_tasks", run_id=run_id, replay_epoch=epoch, inline_limit=inline_limit)


def decisions(conn, epoch, inline_limit=1, run_id="r"):
    return [row.outcome for row in dispatch(conn, epoch, inline_limit, run_id)]


def replay(conn, receipt, epoch, inline_limit=1, run_id="r", **arguments):
    """Dispatches and ends a replay that was granted. Answers the decisions, with what it started here as tasks."""
    rows = dispatch(conn, epoch, inline_limit, run_id)
    assert end(conn, epoch, last_seq(conn, run_id), run_id, **arguments).outcome == "ended"
    started = [Task(row.step_slug, row.task_index, row.attempt, receipt) for row in rows if row.outcome == "execute"]
    return [row.outcome for row in rows], started


def inline(conn, run_id="r", inputs=(1,), inline_limit=1, visibility=None, **arguments):
    """A new run with one step, whose first tasks were started under its run message; the tasks."""
    start(conn, run_id)
    receipt, epoch = granted(conn, run_id, visibility=visibility)
    assert create(conn, epoch, inputs=inputs, run_id=run_id, **arguments) == "created"
    return replay(conn, receipt, epoch, inline_limit, run_id)[1]


def queued(conn, run_id="r", inputs=(1,), **arguments):
    """A new run with one step whose tasks all have messages of their own."""
    assert inline(conn, run_id, inputs, inline_limit=0, **arguments) == []


def look(conn, inline_limit=1, run_id="r", **arguments):
    """Another handler claims the run's wake and replays; the decisions and what it started."""
    receipt, epoch = granted(conn, run_id, **arguments)
    return replay(conn, receipt, epoch, inline_limit, run_id)


def take_task(conn, queue_name="q", newest=False, **arguments):
    """Claims a message that is due, which must be a task's; None where nothing is due. newest: that task message first."""
    if newest:
        conn.execute("update baton.messages set visible_at = visible_at - interval '1 day' where visible_at <= baton._now()"
                     " and message_id = (select max(m.message_id) from baton.messages as m where m.kind = 'task')")
    for row in call(conn, "claim", queue_name=queue_name, **arguments):
        assert row.kind == "task", row
        return Receipt(row.message_id, row.delivery)
    return None


def start_task(conn, receipt):
    return one(conn, "start_task", message_id=receipt.message_id, delivery=receipt.delivery)


def started(conn, receipt):
    """Starts the task of a claimed message; as a task."""
    answer = start_task(conn, receipt)
    assert answer.outcome == "execute", answer
    return Task(answer.step_slug, answer.task_index, answer.attempt, receipt)


def ending(task, run_id="r", **arguments):
    return {"run_id": run_id, "step_slug": task.step_slug, "task_index": task.task_index, "attempt": task.attempt,
            "message_id": task.receipt.message_id, "delivery": task.receipt.delivery, **arguments}


def complete(conn, task, run_id="r", output=None):
    return one(conn, "complete_task", **ending(task, run_id, output=Jsonb(output)))


def fail(conn, task, run_id="r", **arguments):
    return one(conn, "fail_task", **ending(task, run_id, error=Jsonb("no"), **arguments))


def short_way(epoch, run_id="r", step_slug="s", next_step_slug="t"):
    """The arguments of advance_run."""
    return {"run_id": run_id, "replay_epoch": epoch, "step_slug": step_slug, "output": Jsonb("out"),
            "next_step_slug": next_step_slug, "next_input": Jsonb("in")}


def write_as_before(conn, run_id="r"):
    """The log as 0.4.0 wrote it, which had no event of its own for the short way."""
    assert counted(conn, "run_advanced", run_id) > 0
    with conn.transaction():
        written = conn.execute("delete from baton.events where run_id = %s returning *", (run_id,)).fetchall()
        events = [each for event in sorted(written, key=lambda event: event.seq) for each in long_way(event)]
        for seq, event in enumerate(events, 1):
            conn.execute("insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)"
                         " values (%s, %s, %s, %s, %s, %s)",
                         (run_id, seq, event.type, event.correlation_id, Jsonb(event.payload), event.created_at))
        conn.execute("update baton.runs set last_seq = %s where run_id = %s", (len(events), run_id))
        conn.execute("update baton.steps as s set created_seq = e.seq from baton.events as e where s.run_id = %s"
                     " and e.run_id = s.run_id and e.type = 'step_created' and e.correlation_id = s.step_slug", (run_id,))
    conn.execute("create schema baton_test")
    conn.execute((ROOT / "tests/sql/fold_tasks.sql").read_text())
    assert conn.execute("select * from baton_test.unfolded(%s)", (run_id,)).fetchall() == []


def skip(conn, slug="s", run_id="r", epoch=None):
    return one(conn, "skip_step", run_id=run_id, step_slug=slug, replay_epoch=epoch)


def release(conn, slug="s", task_index=0, run_id="r", action="requeue"):
    return one(conn, "release_task", run_id=run_id, step_slug=slug, task_index=task_index, action=action)


def extend(conn, receipt, **arguments):
    return one(conn, "extend", message_id=receipt.message_id, delivery=receipt.delivery, **arguments).outcome


def task(conn, slug="s", task_index=0, run_id="r"):
    return conn.execute("select * from baton.tasks where run_id = %s and step_slug = %s and task_index = %s",
                        (run_id, slug, task_index)).fetchone()


def step(conn, slug="s", run_id="r"):
    return conn.execute("select * from baton.steps where run_id = %s and step_slug = %s", (run_id, slug)).fetchone()


def backstops(conn, run_id="r"):
    """What is still to wait for of each, in seconds."""
    return [row.s for row in conn.execute(
        "select extract(epoch from visible_at - baton._now())::float8 as s from baton.messages"
        " where run_id = %s and dedupe_key like %s order by visible_at", (run_id, "%\x1fbackstop\x1f%")).fetchall()]


def counted(conn, type, run_id="r"):
    return conn.execute("select count(*) as n from baton.events where run_id = %s and type = %s",
                        (run_id, type)).fetchone().n
