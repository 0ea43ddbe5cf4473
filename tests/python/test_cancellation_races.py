"""After an end: nothing starts any more, what was sent is gone or powerless, and whoever comes late is told.

The channel is tested in test_control_channel, the bodies that stop with the workers that run them.
"""

import threading

import pytest
from cancelling import ask, build, reclaimed
from conftest import wait_blocked
from psycopg.types.json import Jsonb
from runs import Receipt, append, begin, cancel, granted, messages, run, signal, take, wake
from starts import advance, call, one
from starts import begin as send
from tasks import (
    Task, complete, create, dispatch, ending, extend, fail, look, release, replay, skip, start_task, started, step, task,
)


@pytest.fixture
def db(clock_db):
    return clock_db


def rows(conn, run_id="r"):
    """All that is stored of a run, and how often somebody came too late."""
    tables = [conn.execute(f"select * from baton.{table} where run_id = %s order by {key}", (run_id,)).fetchall()
              for table, key in (("runs", "run_id"), ("steps", "step_slug"), ("tasks", "step_slug, task_index"),
                                 ("events", "seq"), ("messages", "message_id"))]
    late = conn.execute("select count(*) as n from baton.incidents where run_id = %s and kind = 'too_late'", (run_id,))
    return tables, late.fetchone().n


ENDS = {
    "complete_run": lambda conn, epoch: one(conn, "complete_run", run_id="r", replay_epoch=epoch, output=None),
    "fail_run": lambda conn, epoch: one(conn, "fail_run", run_id="r", replay_epoch=epoch, error=None),
    "cancel_run": lambda conn, epoch: one(conn, "cancel_run", run_id="r", reason="enough"),
}


@pytest.mark.parametrize("end_of_run", ENDS)
def test_after_the_end_of_a_run_everything_is_gone_or_powerless(conn, end_of_run):
    """At the end there are: bodies that run, under their own messages and under a run message; a claimed task message
    that has not been started; a retry that waits; a wake, a timer and a backstop; and a replay that is held."""
    bodies = build(conn, ["s/0", "s/1"], inline_limit=1)
    assert fail(conn, bodies["s/1"], retry_delay="1 hour").outcome == "retrying"
    [held, *_] = [Receipt(row.message_id, row.delivery)
                  for row in call(conn, "claim", queue_name="r", max_messages=10, visibility="1 hour")]
    wake(conn)
    at = conn.execute("select baton._now() + '1 hour' as at").fetchone().at
    receipt, epoch = granted(conn, queue_name="r")
    assert set(replay(conn, receipt, epoch, wake_at=at)[0]) == {"backstop", "queued"}
    signal(conn)
    receipt, epoch = granted(conn, queue_name="r", visibility="1 hour")
    signal(conn)
    keys = {"timer", "backstop"}
    assert {key for key in keys for m in messages(conn) if m.dedupe_key and key in m.dedupe_key} == keys
    assert run(conn).wake_message_id in {m.message_id for m in messages(conn) if not m.claimed_at}

    assert ENDS[end_of_run](conn, epoch).outcome == "done"
    assert all(m.claimed_at for m in messages(conn)), "what nobody holds is gone, the delayed ones too"
    claimed = {m.message_id for m in messages(conn)}
    assert {held.message_id, bodies["s/0"].receipt.message_id} <= claimed
    assert {(t.step_slug, t.task_index, t.status) for t in rows(conn)[0][2]} == {
        ("s", 0, "cancelled"), ("s", 1, "cancelled"), ("s", 2, "cancelled"), ("t", 0, "cancelled")}

    assert signal(conn) == wake(conn) == "terminal"
    assert create(conn, epoch, "more") == append(conn, epoch) == "terminal"
    assert [row.outcome for row in dispatch(conn, epoch)] == ["terminal"]
    assert extend(conn, bodies["s/0"].receipt) == "cancelled"
    assert begin(conn, bodies["s/0"].receipt).outcome == "lost", "cancelled removes the message"
    assert start_task(conn, held).outcome == "skip"
    before, late = rows(conn)
    assert complete(conn, bodies["s/0"]).outcome == fail(conn, bodies["s/0"]).outcome == "too_late"
    assert complete(conn, bodies["s/1"]).outcome == fail(conn, bodies["s/1"]).outcome == "too_late"
    assert one(conn, "complete_tasks", run_id="r", completions=Jsonb([
        {**ending(bodies["s/0"]), "output": 1}])).outcome == "too_late"
    assert rows(conn) == (before, late + 5), "it stays as it was, and each leaves an incident"
    advance(conn, "1 day")
    for row in call(conn, "claim", queue_name="r", max_messages=10):
        receipt = Receipt(row.message_id, row.delivery)
        assert (begin(conn, receipt).outcome if row.kind == "run" else start_task(conn, receipt).outcome) in ("terminal", "skip")
    assert messages(conn) == [] and call(conn, "recover_runs") == [] and take(conn, queue_name="r") is None


@pytest.mark.parametrize("on_exhausted", ["fail_step", "skip_step"])
def test_after_the_end_of_a_step_its_siblings_never_start_and_the_run_goes_on(conn, on_exhausted):
    bodies = build(conn, ["s/0", "s/1", "t/0"], on_exhausted=on_exhausted)
    [waiting] = [m for m in messages(conn) if m.kind == "task" and m.claimed_at is None]
    assert waiting.task_index == 2
    assert fail(conn, bodies["s/0"], final=True).step_ended
    assert waiting.message_id not in {m.message_id for m in messages(conn)}, "the queued one never starts"
    status = {"fail_step": "cancelled", "skip_step": "skipped"}[on_exhausted]
    assert [task(conn, task_index=n).status for n in range(3)] == ["failed", status, status]
    assert extend(conn, bodies["s/1"].receipt) == "cancelled" and extend(conn, bodies["t/0"].receipt) == "extended"
    before, late = rows(conn)
    assert complete(conn, bodies["s/1"]).outcome == fail(conn, bodies["s/1"]).outcome == "too_late"
    assert complete(conn, bodies["s/0"]).outcome == "too_late"
    assert rows(conn) == (before, late + 3)
    assert skip(conn).outcome == "terminal" and release(conn, task_index=1).outcome == "terminal"
    assert look(conn, queue_name="r")[0] == ["queued"], "t"
    assert complete(conn, bodies["t/0"]).outcome == "completed"
    assert look(conn, queue_name="r")[0] == [] and run(conn).status == "suspended"


def test_a_task_message_claimed_before_the_end_and_started_after_it_is_skipped(conn, clock_db):
    """Cancelled between the claim and the start: also where the start waits for the end's commit."""
    build(conn, [])
    claims = [Receipt(c.message_id, c.delivery) for c in call(conn, "claim", queue_name="r", max_messages=10)]
    ender, starter = clock_db.session("ender"), clock_db.session("starter")
    for settled, outcome in (("rollback", "execute"), ("commit", "skip")):
        ender.run("begin")
        assert cancel(ender) == "done"
        send(starter, "start_task", **claims.pop()._asdict())
        wait_blocked(conn, starter, by=ender)
        ender.run(settled)
        assert starter.result()[0].outcome == outcome
    assert [start_task(conn, receipt).outcome for receipt in claims] == ["skip"] * len(claims)


# Who comes late is told by the query --------------------------------------------------------------------


def test_a_late_sibling_of_a_completed_step_learns_it(conn):
    """Its claim ran out, another attempt completed the task and with it the step, and its body still runs."""
    bodies = build(conn, ["t/0"])
    newer = started(conn, reclaimed(conn, bodies["t/0"].receipt))
    assert ask(conn, bodies["t/0"], newer) == ["superseded task_started", "running"]
    assert complete(conn, newer).step_ended and step(conn, "t").status == "completed"
    assert ask(conn, bodies["t/0"]) == ["completed task_completed"]
    before, _ = rows(conn)
    assert complete(conn, bodies["t/0"]).outcome == "already_completed"
    assert rows(conn)[0] == before


def test_a_body_that_was_superseded_learns_it_whatever_superseded_it(conn):
    bodies = build(conn)
    started(conn, reclaimed(conn, bodies["s/0"].receipt))
    release(conn, task_index=1)
    fail(conn, bodies["t/0"], retry_delay="1 s")
    assert ask(conn, *bodies.values()) == ["superseded task_started", "superseded task_released", "superseded task_retrying"]


def test_the_query_waits_for_nobody_and_sees_what_is_committed(conn, clock_db):
    bodies = build(conn)
    holder, asking = clock_db.session("holder"), clock_db.session("asking", options="-c lock_timeout=1s")
    holder.run("begin")
    holder.run("lock table baton.tasks, baton.steps, baton.runs, baton.messages in exclusive mode")
    cancel(holder)
    assert ask(asking, *bodies.values()) == ["running"] * 3
    holder.run("commit")
    assert ask(asking, *bodies.values()) == ["cancelled run_cancelled"] * 3


# Isolation ----------------------------------------------------------------------------------------------


def test_nothing_of_other_runs_steps_and_queues_is_touched(conn):
    """Also where slugs are the same, or one run's name begins with another's."""
    names = ["r", "r2", "r\x20s", "other"]
    bodies = {r: build(conn, run_id=r) for r in names}
    before = {r: rows(conn, r) for r in names}
    assert skip(conn, "s").outcome == "done"
    assert ask(conn, *bodies["r"].values()) == ["skipped step_skipped", "skipped step_skipped", "running"]
    assert extend(conn, bodies["r"]["t/0"].receipt, visibility="2 hours") == "extended"
    assert cancel(conn) == "done"
    for r in names[1:]:
        assert rows(conn, r) == before[r]
        assert ask(conn, *bodies[r].values(), run_id=r) == ["running"] * 3
        assert [extend(conn, body.receipt) for body in bodies[r].values()] == ["extended"] * 3


# Locks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_by", [cancel, skip])
def test_one_locked_task_message_in_a_batch_of_fifty_delays_nothing(conn, clock_db, end_by):
    one(conn, "start_run", workflow_name="w", input=None, run_id="r", queue_name="q")
    receipt, epoch = granted(conn)
    create(conn, epoch, inputs=range(50))
    replay(conn, receipt, epoch, inline_limit=0)
    [*_, locked] = [m.message_id for m in messages(conn)[:25]]
    holder = clock_db.session("holder")
    holder.run("begin")
    holder.run("select from baton.messages where message_id = %s for update", (locked,))
    conn.execute("set lock_timeout = '1s'")
    end_by(conn)
    assert [m.message_id for m in messages(conn) if m.kind == "task"] == [locked]
    holder.run("rollback")
    [row] = [c for c in call(conn, "claim", queue_name="q", max_messages=10) if c.kind == "task"]
    assert row.message_id == locked and start_task(conn, row).outcome == "skip", "it is powerless, and goes when it is met"
    assert [m for m in messages(conn) if m.kind == "task"] == []


ROUNDS = 500


def prepare(conn):
    """Runs by number, each with a step of three tasks that run under their own messages; half of the claims ran out."""
    conn.execute("""
        insert into baton.runs (run_id, workflow_name, queue_name, status, needs_driver, last_seq, created_at)
        select n::text, 'w', 'q', 'running', true, 5, baton._now() from generate_series(1, %(rounds)s) as n;
        """.replace("%(rounds)s", str(ROUNDS)) + """
        insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
        select r.run_id, 's', 3, 3, 2 from baton.runs as r;
        insert into baton.messages (
          queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, delivery, claimed_at, created_at
        )
        select 'q', 'task', r.run_id, 's', i, baton._task_key(r.run_id, 's', i),
          baton._now() + interval '1 hour' * (r.run_id::integer / 8 % 2), 1, baton._now(), baton._now()
        from baton.runs as r, generate_series(0, 2) as i;
        insert into baton.tasks (
          run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery, last_started_at
        )
        select m.run_id, 's', m.task_index, 'started', 1, m.message_id, 1, m.created_at from baton.messages as m;
    """)
    found = {}
    for m in conn.execute("select run_id, task_index, message_id from baton.messages order by message_id").fetchall():
        found.setdefault(m.run_id, []).append(Task("s", m.task_index, 1, Receipt(m.message_id, 1)))
    return found


def test_ends_and_completing_sessions_in_opposite_orders_never_deadlock(plain_db, server_log):
    """Each round one side is already in the middle when the other begins: the end, or a handler that completes its tasks
    in the opposite order, having extended them in the same transaction."""
    conn = plain_db.connect()
    runs = prepare(conn)
    barrier = threading.Barrier(2, timeout=60)
    wrong, outcomes = [], {"completed": 0, "too_late": 0}

    def end(own, r, n):
        yield cancel(own, r) if n % 4 < 2 else skip(own, run_id=r).outcome
        yield cancel(own, r)

    def finish(own, r, n):
        for owned in reversed(runs[r]):
            assert extend(own, owned.receipt) in ("extended", "lost", "cancelled")
        if n % 8 < 4:
            yield "holds the messages"
        for owned in reversed(runs[r]):
            answer = complete(own, owned, r).outcome
            outcomes[answer] += 1
            yield "holds the run"

    def work(side, turn):
        own = plain_db.connect(options="-c deadlock_timeout=20ms -c statement_timeout=10s")
        try:
            for r in runs:
                n = int(r)
                with own.transaction():
                    steps = side(own, r, n)
                    if n % 2 == turn:
                        next(steps)
                        barrier.wait()
                    else:
                        barrier.wait()
                    for _ in steps:
                        pass
                barrier.wait()
        except BaseException as error:
            wrong.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(side, turn)) for turn, side in enumerate((end, finish))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and server_log.errors() == []
    assert sum(outcomes.values()) == 3 * ROUNDS and min(outcomes.values()) > ROUNDS / 4, outcomes
    assert {r.status for r in conn.execute("select status from baton.runs").fetchall()} == {"cancelled"}
    assert conn.execute("select count(*) as n from baton.tasks where status = 'completed'").fetchone().n == outcomes["completed"]
