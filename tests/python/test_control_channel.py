"""What baton_control says: one notification an end that concerns a running body, and nothing else, ever."""

import pytest
from cancelling import ask, build, heard, listen, reclaimed, said
from psycopg.types.json import Jsonb
from runs import append, begin, cancel, end, granted, last_seq, signal, start, wake
from starts import call, new_id, one
from tasks import complete, create, dispatch, extend, fail, inline, release, skip, started, task, take_task


@pytest.fixture
def db(clock_db):
    return clock_db


@pytest.fixture
def listener(clock_db):
    return listen(clock_db)


def limit(conn, name, value):
    conn.execute(f"update baton.settings set {name} = %s", (value,))


LONG = Jsonb({"reason": "x" * 9000})


# What ends a run, with what the channel says of it -------------------------------------------------


def complete_run(conn, r):
    _, epoch = granted(conn, r, queue_name=r)
    assert one(conn, "complete_run", run_id=r, replay_epoch=epoch, output=LONG).outcome == "done"


def fail_run(conn, r):
    _, epoch = granted(conn, r, queue_name=r)
    assert one(conn, "fail_run", run_id=r, replay_epoch=epoch, error=LONG).outcome == "done"


def cancel_run(conn, r):
    assert cancel(conn, r) == "done"


def fail_last_replay(conn, r):
    receipt, _ = granted(conn, r, queue_name=r)
    assert one(conn, "fail", **receipt._asdict(), error="no", final=True).outcome == "dead"


def lose_last_replay(conn, r):
    limit(conn, "max_lapses", 1)
    receipt, _ = granted(conn, r, queue_name=r)
    assert begin(conn, reclaimed(conn, receipt, r)).outcome == "terminal"


RUN_ENDS = {complete_run: "completed", fail_run: "failed", cancel_run: "cancelled", fail_last_replay: "failed",
            lose_last_replay: "failed"}


def test_the_end_of_a_run_says_so_once_whatever_runs(conn, listener):
    for ending, reason in RUN_ENDS.items():
        r = ending.__name__
        bodies = build(conn, run_id=r)
        wake(conn, r)
        assert heard(listener, conn) == []
        ending(conn, r)
        assert heard(listener, conn) == [said("cancel:run", reason, r)]
        assert ask(conn, *bodies.values(), run_id=r) == [f"cancelled run_{reason}"] * 3


def test_the_end_of_a_run_without_a_body_says_nothing(conn, listener):
    for ending in RUN_ENDS:
        r = ending.__name__
        build(conn, bodies=(), run_id=r)
        wake(conn, r)
        ending(conn, r)
        assert task(conn, run_id=r).status == "cancelled" and heard(listener, conn) == [], r


# What ends a step ------------------------------------------------------------------------------------


def skip_as_operator(conn, r, bodies):
    assert skip(conn, run_id=r).outcome == "done"


def skip_in_a_replay(conn, r, bodies):
    wake(conn, r)
    _, epoch = granted(conn, r, queue_name=r)
    assert skip(conn, run_id=r, epoch=epoch).outcome == "done"


def fail_last_attempt(conn, r, bodies):
    assert fail(conn, bodies["s/0"], r, final=True).outcome == "failed"


def lose_last_start(conn, r, bodies):
    limit(conn, "max_lapses", 1)
    assert one(conn, "start_task", **reclaimed(conn, bodies["s/0"].receipt, r)._asdict()).outcome == "skip"


def lose_last_inline_start(conn, r, bodies):
    limit(conn, "max_lapses", 1)
    epoch = begin(conn, reclaimed(conn, bodies["s/0"].receipt, r)).replay_epoch
    assert dispatch(conn, epoch, run_id=r)[0].outcome == "failed"


SKIPS = [skip_as_operator, skip_in_a_replay]
EXHAUSTS = [fail_last_attempt, lose_last_start, lose_last_inline_start]


@pytest.mark.parametrize("on_exhausted, reason", [("fail_step", "failed"), ("skip_step", "skipped")])
def test_the_end_of_a_step_says_so_once_where_a_body_of_it_runs(conn, listener, on_exhausted, reason):
    for ending in SKIPS + EXHAUSTS:
        r = ending.__name__
        bodies = build(conn, run_id=r, on_exhausted=on_exhausted, inline_limit=int(ending is lose_last_inline_start))
        ending(conn, r, bodies)
        expected = "skipped" if ending in SKIPS else reason
        assert heard(listener, conn) == [said("cancel:step", expected, r, step_slug="s")]
        status = {"failed": "cancelled", "skipped": "skipped"}[expected]
        assert ask(conn, bodies["s/1"], bodies["t/0"], run_id=r) == [f"{status} step_{expected}", "running"]


def test_the_end_of_a_step_says_nothing_where_no_other_body_of_it_runs(conn, listener):
    for ending in SKIPS + EXHAUSTS:
        r = ending.__name__
        bodies = ["t/0"] if ending in SKIPS else ["s/0", "t/0"]
        ending(conn, r, build(conn, bodies, r, inline_limit=int(ending is lose_last_inline_start)))
        assert task(conn, task_index=1, run_id=r).status in ("skipped", "cancelled") and heard(listener, conn) == [], r


# release_task ----------------------------------------------------------------------------------------


def test_a_release_says_which_attempt(conn, listener):
    bodies = build(conn)
    release(conn)
    assert heard(listener, conn) == [said("cancel:task", "released", step_slug="s", task_index=0, attempt=1)]
    assert ask(conn, *bodies.values()) == ["superseded task_released", "running", "running"]
    release(conn)
    release(conn, task_index=2)
    assert heard(listener, conn) == [], "a task that waits has no body"
    conn.execute("delete from baton.messages where kind = 'task' and claimed_at is null and task_index = 2")
    started(conn, take_task(conn, "r"))
    release(conn)
    assert heard(listener, conn) == [said("cancel:task", "released", step_slug="s", task_index=0, attempt=2)]


def test_a_release_to_fail_says_it_to_the_body_and_to_its_siblings(conn, listener):
    build(conn, bodies=["s/0"])
    release(conn, action="fail")
    alone = said("cancel:task", "failed", step_slug="s", task_index=0, attempt=1)
    assert heard(listener, conn) == [alone]
    build(conn, run_id="other")
    release(conn, action="fail", run_id="other")
    assert heard(listener, conn) == [{**alone, "queue_name": "other", "run_id": "other"},
                                     said("cancel:step", "failed", "other", step_slug="s")]


# With the transaction, off, at its longest, and never else ----------------------------------------------


def test_it_is_said_with_the_commit(conn, listener, clock_db):
    bodies = build(conn)
    ending = clock_db.session("ending")
    for settled, expected in (("rollback", []), ("commit", [said("cancel:run", "cancelled")])):
        ending.run("begin")
        cancel(ending)
        assert heard(listener, conn) == [] and ask(conn, bodies["s/0"]) == ["running"]
        ending.run(settled)
        assert heard(listener, conn) == expected


def test_switched_off_nothing_is_said_and_the_query_knows_all_the_same(conn, listener):
    limit(conn, "control_notify", False)
    bodies = build(conn)
    release(conn, task_index=1)
    skip(conn, "t")
    cancel(conn)
    assert heard(listener, conn) == []
    assert ask(conn, *bodies.values()) == ["cancelled run_cancelled", "cancelled run_cancelled", "skipped step_skipped"]


@pytest.mark.parametrize("character", ['"', "\\", "ä"])
def test_the_longest_names_fit(conn, listener, character):
    name = character * (200 // len(character.encode()))
    start(conn, name, name)
    _, epoch = granted(conn, name, queue_name=name)
    create(conn, epoch, name, [1], name)
    dispatch(conn, epoch, 1, name)
    release(conn, name, run_id=name)
    assert heard(listener, conn) == [said("cancel:task", "released", name, step_slug=name, task_index=0, attempt=1)]


def test_an_end_that_comes_again_says_nothing(conn, listener):
    bodies = build(conn)
    skip(conn)
    assert len(heard(listener, conn)) == 1
    skip(conn)
    fail(conn, bodies["s/0"], final=True)
    release(conn)
    assert heard(listener, conn) == []
    cancel(conn)
    assert len(heard(listener, conn)) == 1
    cancel(conn)
    skip(conn, "t")
    assert heard(listener, conn) == []


def test_what_ends_nothing_says_nothing_beside_bodies(conn, listener):
    call(conn, "register_worker_function", function_name="f", start_mode="process")
    worker_id = new_id()
    call(conn, "register_worker", worker_id=worker_id, function_name="f")
    bodies = build(conn)
    for n in range(2):
        one(conn, "heartbeat", worker_id=worker_id, control="listening")
        assert [extend(conn, body.receipt) for body in bodies.values()] == ["extended"] * 3
        receipts = Jsonb([body.receipt._asdict() for body in bodies.values()])
        assert [row.outcome for row in call(conn, "extend_many", receipts=receipts)] == ["extended"] * 3
        assert (signal(conn), wake(conn)) == ("signalled", "woken")
        _, epoch = granted(conn, queue_name="r")
        assert append(conn, epoch, correlation_id=str(n)) == "appended"
        dispatch(conn, epoch)
        assert end(conn, epoch, last_seq(conn)).outcome == "ended"
        ask(conn, *bodies.values())
        call(conn, "recover_runs")
        call(conn, "tick")
    assert fail(conn, bodies["s/1"], retry_delay="1 s").outcome == "retrying"
    newer = started(conn, reclaimed(conn, bodies["s/0"].receipt))
    assert newer.attempt == 2 and complete(conn, newer).outcome == "completed", "taken over"
    assert complete(conn, bodies["t/0"]).step_ended
    assert heard(listener, conn) == []


def test_a_handler_that_gives_its_bodies_back_has_stopped_them_itself(conn, listener):
    queued = build(conn)
    assert one(conn, "park", **queued["s/0"].receipt._asdict(), force=True).outcome == "parked"
    assert one(conn, "fail", **queued["s/1"].receipt._asdict(), error="no", force=True).outcome == "failed"
    for verb, arguments, outcome in (("park", {}, "parked"), ("fail", {"error": "no"}, "failed")):
        [owned] = inline(conn, verb)
        assert one(conn, verb, **owned.receipt._asdict(), force=True, **arguments).outcome == outcome
        assert ask(conn, owned, run_id=verb) == ["superseded task_released"]
    assert heard(listener, conn) == []
