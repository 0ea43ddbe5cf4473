"""start_tasks and complete_tasks against start_task and complete_task: one by one they answer the same and leave the same
rows, from any state that the verbs lead to.

Each example is a transaction: a random history of two runs, then the batch, whose traces are looked at and taken back, and
the same calls one by one. First what waits to be started, or completes a task that is named once, by message; then the
others (starts in the caller's order).

`make histories` goes through new histories; the tests always through the same.
"""

import os
import random
import threading
from collections import Counter

import psycopg
import pytest
from conftest import wait_blocked
from psycopg.types.json import Jsonb
from runs import cancel, end, granted, last_seq, log, messages, start, take, wake
from starts import advance, begin, call, one
from tasks import (
    Task, complete, counted, create, dispatch, extend, fail, queued, release, skip, start_task, step,
)

RUNS = "a", "b"
SOAK = int(os.environ.get("BATON_SOAK", 0))
HISTORIES = 60
START = {"lost", "skip", "retry ahead", "created", "this receipt", "another lives", "recovery", "takeover", "poison"}
COMPLETE = {"completed", "already_completed", "too_late", "lost", "ended", "ended by a run message", "named twice", "late"}
hits = Counter()

TABLES = {
    "runs": "run_id", "steps": "run_id, step_slug", "tasks": "run_id, step_slug, task_index", "events": "run_id, seq",
    "messages": "message_id", "incidents": "incident_id", "tallies": "tally_id",
}
CLASSIFY = """
    select m.message_id, case
        when m.message_id is null then 'lost'
        when not baton._is_open(r.status) or t.status is null or t.status not in ('created', 'started') then 'skip'
        when t.status = 'created' and t.retry_at > baton._now() then 'retry ahead'
        when t.status = 'created' then 'created'
        when (t.owner_message_id, t.owner_delivery) = (m.message_id, m.delivery) then 'this receipt'
        when t.owner_message_id <> m.message_id and exists (
          select from baton.messages as o where o.message_id = t.owner_message_id and o.delivery = t.owner_delivery
            and o.claimed_at is not null and o.visible_at > baton._now()) then 'another lives'
        when t.lapses + 1 = (select max_lapses from baton.settings) then 'poison'
        when t.owner_message_id = m.message_id then 'recovery'
        else 'takeover' end as row,
      m.dedupe_key = baton._task_key(m.run_id, m.step_slug, m.task_index) as is_own
    from rows from (jsonb_to_recordset(%s) as (message_id bigint, delivery bigint)) with ordinality
      as c (message_id, delivery, nth)
    left join baton.messages as m on m.message_id = c.message_id and m.delivery = c.delivery
      and m.claimed_at is not null and m.visible_at > baton._now() and m.kind = 'task'
    left join baton.runs as r using (run_id)
    left join baton.tasks as t using (run_id, step_slug, task_index)
    order by c.nth"""


class History:
    """What led to the state: every receipt that was given out, current or not, with what it was for."""

    def __init__(self, conn, rng):
        self.conn, self.rng, self.receipts, self.bodies = conn, rng, [], []
        conn.execute("update baton.settings set max_lapses = %s, inline_ownership = false", (rng.randint(1, 2),))
        for run_id in RUNS:
            start(conn, run_id)
            receipt, epoch = granted(conn, run_id, visibility="20 s")
            for slug in "st":
                create(conn, epoch, slug, range(rng.randint(1, 3)), run_id, max_attempts=2)
            self.dispatched(run_id, receipt, epoch)

    def dispatched(self, run_id, receipt, epoch):
        for row in dispatch(self.conn, epoch, self.rng.randint(0, 2), run_id):
            if row.outcome == "execute":
                self.bodies.append((run_id, Task(row.step_slug, row.task_index, row.attempt, receipt)))
        self.receipts.append(receipt)
        end(self.conn, epoch, last_seq(self.conn, run_id), run_id)

    def happens(self, what):
        getattr(self, what)()

    def pick(self, values):
        return self.rng.choice(values)

    def any_task(self):
        return self.pick(self.conn.execute("select * from baton.tasks order by 1, 2, 3").fetchall())

    def claims(self):
        for row in call(self.conn, "claim", queue_name="q", max_messages=self.rng.randint(1, 6),
                        visibility=self.pick(["10 s", "30 s", "1 hour"])):
            self.receipts.append(row)

    def starts(self):
        for receipt in self.rng.choices(self.receipts[-6:], k=2):
            answer = start_task(self.conn, receipt)
            if answer.outcome == "execute":
                self.bodies.append((answer.run_id, Task(answer.step_slug, answer.task_index, answer.attempt, receipt)))

    def completes(self):
        if self.bodies:
            run_id, task = self.pick(self.bodies)
            complete(self.conn, task, run_id)

    def fails(self):
        if self.bodies:
            run_id, task = self.pick(self.bodies[-3:])
            fail(self.conn, task, run_id, retry_delay=self.pick(["0 s", "10 s", "1 hour"]),
                 final=self.rng.random() < 0.2)

    def time_passes(self):
        advance(self.conn, self.pick(["10 s", "19.999999 s", "30 s"]))

    def is_lost(self):
        """Claims run out, and their messages are claimed again."""
        self.conn.execute("update baton.messages set visible_at = baton._now() where claimed_at is not null and message_id"
                          " in (select owner_message_id from baton.tasks where status = 'started' and task_index <> %s)",
                          (self.rng.randint(0, 2),))
        self.claims()

    def replays(self):
        run_id = self.pick(RUNS)
        if wake(self.conn, run_id) == "woken" and (receipt := take(self.conn, run_id, visibility="1 hour")):
            begun = one(self.conn, "begin_replay", message_id=receipt.message_id, delivery=receipt.delivery)
            if begun.outcome == "granted":
                self.dispatched(run_id, receipt, begun.replay_epoch)

    def comes_early(self):
        self.conn.execute("update baton.messages set visible_at = baton._now() where claimed_at is null")

    def is_purged(self):
        if messages := self.conn.execute("select message_id from baton.messages order by 1").fetchall():
            self.conn.execute("delete from baton.messages where message_id = %s", self.pick(messages))

    def loses_its_key(self):
        if messages := self.conn.execute("select message_id from baton.messages where kind = 'task' order by 1").fetchall():
            self.conn.execute("update baton.messages set dedupe_key = null where message_id = %s", self.pick(messages))

    def is_released(self):
        task = self.any_task()
        release(self.conn, task.step_slug, task.task_index, task.run_id)

    def ends(self):
        run_id = self.pick(RUNS)
        if self.pick([True, False]):
            cancel(self.conn, run_id)
        else:
            skip(self.conn, self.pick("st"), run_id)


WHAT = [*["claims", "starts", "is_lost", "fails", "replays", "comes_early"] * 3, "completes", "time_passes", "is_purged",
        "loses_its_key", "is_released", "ends"]


def traces(conn, known):
    """All rows, without the ids that only a sequence gives."""
    found = {}
    for table, key in TABLES.items():
        found[table] = [row.x for row in conn.execute(f"select to_jsonb(x) as x from baton.{table} as x order by {key}")]
        for row in found[table]:
            for name in ("incident_id", "tally_id"):
                row.pop(name, None)
            for name in ("message_id", "wake_message_id"):
                if row.get(name) and row[name] not in known:
                    row[name] = "new"
            if table == "incidents" and row["detail"]:
                row["detail"].pop("verb", None)
    return found


def compare(conn, batch, singles):
    """Both from the same state; their answers in the caller's order."""
    known = {row.message_id for row in conn.execute("select message_id from baton.messages")}
    sides = []
    for side in (batch, singles):
        conn.execute("savepoint here")
        sides.append((side(), traces(conn, known)))
        conn.execute("rollback to here")
    (answers, found), (expected, wanted) = sides
    assert answers == expected
    for table in TABLES:
        assert found[table] == wanted[table], table


def start_all(history):
    """Receipts of all kinds, some of them twice."""
    conn, rng = history.conn, history.rng
    receipts = rng.choices(history.receipts, range(1, 1 + len(history.receipts)), k=rng.randint(1, 10))
    named = [{"message_id": r.message_id, "delivery": r.delivery + rng.choice([0] * 9 + [1])} for r in receipts]
    rows = conn.execute(CLASSIFY, (Jsonb(named),)).fetchall()
    hits.update(("start", row.row) for row in rows)
    order = sorted(range(len(named)), key=lambda n: (
        (0, rows[n].message_id) if rows[n].row == "created" and rows[n].is_own else (1, n)))

    def singles():
        answers = {n: one(conn, "start_task", **named[n]) for n in order}
        return [(answers[n].outcome, *named[n].values(), *answers[n][1:]) for n in range(len(named))]

    compare(conn, lambda: [tuple(row) for row in call(conn, "start_tasks", receipts=Jsonb(named))], singles)


def complete_all(history):
    """Tasks of one run under receipts of all kinds and attempts beside the right one."""
    conn, rng = history.conn, history.rng
    run_id = history.pick(RUNS)
    tasks = conn.execute("select * from baton.tasks where run_id = %s order by 2, 3", (run_id,)).fetchall()
    others = [*history.receipts, Task(None, None, None)]
    items = []
    for task in rng.choices(tasks, [1 + 5 * (t.status == "started") for t in tasks], k=rng.randint(1, 8)):
        receipt, owner = rng.choice(others), rng.random() < 0.75
        items.append({
            "step_slug": task.step_slug, "task_index": task.task_index + rng.choice([0] * 15 + [9]),
            "attempt": max(0, task.attempt + rng.choice([0] * 6 + [-1, 1])), "output": rng.randint(0, 99),
            "message_id": task.owner_message_id if owner else getattr(receipt, "message_id", None),
            "delivery": task.owner_delivery if owner else getattr(receipt, "delivery", None)})
    named = Counter((i["step_slug"], i["task_index"]) for i in items)
    by_key = {(t.step_slug, t.task_index): t for t in tasks}

    def counts(item):
        task = by_key.get((item["step_slug"], item["task_index"]))
        return bool(task) and task.status in ("created", "started") and task.fence_attempt < item["attempt"] <= task.attempt

    def first(item):
        return counts(item) and named[item["step_slug"], item["task_index"]] == 1

    order = sorted(range(len(items)), key=lambda n: (
        not first(items[n]), items[n]["message_id"] is None, items[n]["message_id"] or 0, n))
    current = {(m.message_id, m.delivery): m for m in conn.execute(
        "select * from baton.messages where claimed_at is not null")}

    def singles():
        answers = {n: one(conn, "complete_task", run_id=run_id, **{**items[n], "output": Jsonb(items[n]["output"])})
                   for n in order}
        for n, answer in answers.items():
            message = current.get((items[n]["message_id"], items[n]["delivery"]))
            hits["complete", answer.outcome] += 1
            hits["complete", "late"] += answer.outcome == "completed" and message is None
            if answer.step_ended:
                hits["complete", "ended by a run message" if message and message.kind == "run" else "ended"] += 1
            hits["complete", "named twice"] += counts(items[n]) and not first(items[n])
        return [(answers[n].outcome, i["step_slug"], i["task_index"], answers[n].step_ended) for n, i in enumerate(items)]

    compare(conn, lambda: [tuple(row) for row in call(conn, "complete_tasks", run_id=run_id, completions=Jsonb(items))],
            singles)


@pytest.fixture
def db(clock_db):
    return clock_db


def test_a_batch_over_histories_answers_and_writes_what_one_by_one_would_be(conn):
    """Always the same histories, that reach each row; by BATON_SOAK so many others."""
    hits.clear()
    for seed in (random.randrange(10**9) for _ in range(SOAK)) if SOAK else range(HISTORIES):
        rng = random.Random(seed)
        conn.execute("begin")
        conn.execute("select setseed(0)")
        try:
            history = History(conn, rng)
            for n in range(24):
                history.happens(rng.choice(WHAT))
                if n % 4 == 3:
                    start_all(history)
                    complete_all(history)
        except BaseException:
            print(f"seed {seed}")
            raise
        finally:
            conn.execute("rollback")
    print(*(f"{count:6} {verb}: {row}" for (verb, row), count in sorted(hits.items())), sep="\n")
    assert not ({("start", row) for row in START} | {("complete", row) for row in COMPLETE}) - {*hits}


# Against other sessions ---------------------------------------------------------------------------


def as_receipts(tasks):
    return Jsonb([{"message_id": t.message_id, "delivery": t.delivery} for t in tasks])


def as_completions(tasks):
    return Jsonb([{"step_slug": t.step_slug, "task_index": t.task_index, "attempt": 1, "output": t.task_index,
                   "message_id": t.message_id, "delivery": t.delivery} for t in tasks])


def claimed(conn, runs=("r",), tasks=3):
    """Runs with so many queued tasks, all claimed. Their messages alternate: the first of each run, the second, …"""
    for run_id in runs:
        queued(conn, run_id, inputs=range(tasks))
    conn.execute("update baton.messages set visible_at = visible_at - interval '1 h' where kind = 'task'")
    rows = call(conn, "claim", queue_name="q", max_messages=100, visibility="1 hour")
    return sorted((row for row in rows if row.kind == "task"), key=lambda row: (row.task_index, row.run_id))


def batch(verb, tasks):
    """The arguments of start_tasks, or of complete_tasks of run r."""
    if verb == "start_tasks":
        return {"receipts": as_receipts(tasks)}
    return {"run_id": "r", "completions": as_completions(tasks)}


def outcomes(rows):
    return [row.outcome for row in rows]


@pytest.mark.parametrize("order", ["started by the first", "started by nobody"])
def test_starts_of_two_runs_in_opposite_orders_wait_for_each_other_in_turn(conn, first, second, server_log, order):
    tasks = claimed(conn, ("a", "b"))
    first.run("begin")
    assert outcomes(call(first, "start_tasks", receipts=as_receipts(tasks))) == ["execute"] * 6
    begin(second, "start_tasks", receipts=as_receipts(reversed(tasks)))
    wait_blocked(conn, second, by=first)
    first.run("commit" if order == "started by the first" else "rollback")
    assert [(row.outcome, row.attempt, row.message_id) for row in second.result()] == [
        ("execute", 1, t.message_id) for t in reversed(tasks)]
    for run_id in "ab":
        assert counted(conn, "task_started", run_id) == 3
        assert [seq for seq, _ in log(conn, run_id)] == list(range(1, last_seq(conn, run_id) + 1))
    assert server_log.errors() == []


@pytest.mark.parametrize("verb", ["start_tasks", "complete_tasks"])
def test_a_batch_holds_no_message_while_it_waits_for_one_with_a_lower_id(conn, first, second, verb):
    """As extend_many, which goes by id alone. Of two runs the lower id may be the later one's."""
    runs = ("b", "a") if verb == "start_tasks" else ("r",)
    for run_id in runs:
        queued(conn, run_id, inputs=[1] if len(runs) == 2 else [1, 2])
    lower, higher = sorted(call(conn, "claim", queue_name="q", max_messages=9, visibility="1 hour"),
                           key=lambda row: row.message_id)
    assert lower.run_id >= higher.run_id
    if verb == "complete_tasks":
        call(conn, "start_tasks", receipts=as_receipts([lower, higher]))
    first.run("begin")
    assert extend(first, lower) == "extended"
    begin(second, verb, **batch(verb, [higher, lower]))
    wait_blocked(conn, second, by=first)
    first.run("set local lock_timeout = '5s'")
    assert extend(first, higher) == "extended"
    first.run("commit")
    assert set(outcomes(second.result())) == {"execute" if verb == "start_tasks" else "completed"}


def test_a_start_of_two_runs_locks_them_by_their_keys_and_before_any_message(conn, first, second):
    tasks = claimed(conn, ("a", "b"), 1)
    first.run("begin")
    first.run("select from baton.runs where run_id = 'b' for no key update")
    begin(second, "start_tasks", receipts=as_receipts(reversed(tasks)))
    wait_blocked(conn, second, by=first)
    conn.execute("set lock_timeout = '5s'")
    for task in tasks:
        assert extend(conn, task) == "extended", "its messages are free"
    with pytest.raises(psycopg.errors.LockNotAvailable):
        conn.execute("select from baton.runs where run_id = 'a' for no key update nowait")
    first.run("commit")
    assert outcomes(second.result()) == ["execute", "execute"]


@pytest.mark.parametrize("calls", ["a call each", "one call"])
def test_those_in_hand_and_those_that_come_next_are_extended_in_a_call_each(conn, first, second, calls):
    """docs/guides/ownership.md: one call for both may end in a deadlock, where the next ones have lower ids."""
    coming, in_hand, _ = claimed(conn)
    call(conn, "start_tasks", receipts=as_receipts([in_hand]))
    second.run("set deadlock_timeout = '1h'")
    first.run("begin")
    assert outcomes(call(first, "complete_tasks", run_id="r", completions=as_completions([in_hand]))) == ["completed"]
    if calls == "a call each":
        assert outcomes(call(second, "extend_many", receipts=as_receipts([coming]))) == ["extended"]
    begin(second, "extend_many", receipts=as_receipts([in_hand] if calls == "a call each" else [coming, in_hand]))
    wait_blocked(conn, second, by=first)
    begin(first, "start_tasks", receipts=as_receipts([coming]))
    if calls == "one call":
        assert isinstance(first.error(), psycopg.errors.DeadlockDetected)
        first.run("rollback")
    else:
        assert outcomes(first.result()) == ["execute"]
        first.run("commit")
    assert outcomes(second.result()) == (["lost"] if calls == "a call each" else ["extended"] * 2)


OTHERS = {
    "cancel_run": ("skip", "too_late", {"run_id": "r", "reason": "enough"}),
    "skip_step": ("skip", "too_late", {"run_id": "r", "step_slug": "s"}),
    "release_task": ("lost", "lost", {"run_id": "r", "step_slug": "s", "task_index": 1}),
}


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("verb", ["start_tasks", "complete_tasks"])
def test_a_batch_decides_on_what_was_committed_while_it_waited(conn, first, second, verb, other, ending):
    tasks = claimed(conn)
    expected = "execute"
    if verb == "complete_tasks":
        expected = "completed"
        call(conn, "start_tasks", receipts=as_receipts(tasks))
    first.run("begin")
    assert one(first, other, **OTHERS[other][2]).outcome in ("done", "released")
    begin(second, verb, **batch(verb, tasks))
    wait_blocked(conn, second, by=first)
    first.run(ending)
    told = OTHERS[other][verb == "complete_tasks"]
    others = expected if other == "release_task" else told
    assert outcomes(second.result()) == ([others, told, others] if ending == "commit" else [expected] * 3)
    written = {"rollback": 3, "commit": 2 if other == "release_task" else 0}[ending]
    assert counted(conn, "task_completed" if verb == "complete_tasks" else "task_started") == written
    assert [seq for seq, _ in log(conn)] == list(range(1, last_seq(conn) + 1))


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_claim_in_flight_of_a_message_that_ran_out_decides_what_becomes_of_it(conn, first, second, ending):
    """The body completes, whoever has the message; who claimed it anew keeps it."""
    tasks = claimed(conn)
    call(conn, "start_tasks", receipts=as_receipts(tasks))
    advance(conn, "1 hour")
    first.run("begin")
    first.run("update baton.messages set visible_at = visible_at + interval '1 minute' where task_index <> 1")
    [again] = call(first, "claim", queue_name="q", visibility="1 hour")
    assert again.task_index == 1
    begin(second, "complete_tasks", run_id="r", completions=as_completions(tasks))
    wait_blocked(conn, second, by=first)
    first.run(ending)
    assert [(row.outcome, row.step_ended) for row in second.result()] == [
        ("completed", False), ("completed", False), ("completed", True)]
    assert [m.message_id for m in messages(conn) if m.kind == "task"] == ([again.message_id] if ending == "commit" else [])


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_start_waits_for_an_extend_of_its_own_message_and_goes_by_that(conn, first, second, ending):
    tasks = claimed(conn)
    advance(conn, "1 hour")
    first.run("begin")
    assert extend(first, tasks[1]) == "extended"
    begin(second, "start_tasks", receipts=as_receipts(tasks))
    wait_blocked(conn, second, by=first)
    first.run(ending)
    assert outcomes(second.result()) == ["lost", "execute" if ending == "commit" else "lost", "lost"]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_start_waits_for_its_own_message_to_be_given_back(conn, first, second, ending):
    tasks = claimed(conn)
    first.run("begin")
    assert one(first, "park", message_id=tasks[1].message_id, delivery=tasks[1].delivery).outcome == "parked"
    begin(second, "start_tasks", receipts=as_receipts(tasks))
    wait_blocked(conn, second, by=first)
    first.run(ending)
    assert outcomes(second.result()) == ["execute", "lost" if ending == "commit" else "execute", "execute"]
    assert counted(conn, "task_started") == (2 if ending == "commit" else 3)


def test_a_batch_waits_for_no_message_but_its_own(conn, first):
    """Of a completion whose receipt was lost, the task's message is another's; while that is locked it stays."""
    tasks = claimed(conn)
    call(conn, "start_tasks", receipts=as_receipts(tasks))
    conn.execute("update baton.messages set claimed_at = null where kind = 'task'")
    first.run("begin")
    first.run("select from baton.messages where message_id = %s for no key update", (tasks[1].message_id,))
    conn.execute("set lock_timeout = '5s'")
    answers = call(conn, "complete_tasks", run_id="r", completions=as_completions(tasks))
    assert outcomes(answers) == ["completed"] * 3
    assert [m.message_id for m in messages(conn) if m.kind == "task"] == [tasks[1].message_id]
    first.run("commit")
    conn.execute("update baton.messages set claimed_at = now(), delivery = 1, visible_at = 'infinity'")
    assert outcomes(call(conn, "start_tasks", receipts=as_receipts([tasks[1]._replace(delivery=1)]))) == ["skip"]


@pytest.mark.parametrize("verb", ["start_tasks", "complete_tasks"])
def test_a_batch_reads_the_clock_after_it_has_waited(conn, first, second, verb):
    tasks = claimed(conn)
    if verb == "complete_tasks":
        call(conn, "start_tasks", receipts=as_receipts(tasks))
    first.run("begin")
    first.run("select from baton.messages where message_id = %s for no key update", (tasks[2].message_id,))
    begin(second, verb, **batch(verb, tasks))
    wait_blocked(conn, second, by=first)
    now = advance(conn, "1 minute")
    first.run("commit")
    second.result()
    assert {e.created_at for e in call(conn, "read_events", run_id="r", after_seq=last_seq(conn) - 3)} == {now}


def test_consumers_that_go_ten_by_ten_through_two_runs(plain_db, server_log):
    """As in docs/guides/ownership.md: the claim commits; ends and the next starts share a statement where those are of one
    run. Six at once, over two runs whose tasks alternate in the queue; beside them one extends whatever is claimed."""
    conn = plain_db.connect()
    runs = ["a", "b"]
    for r in runs:
        queued(conn, r, inputs=range(200))
    conn.execute("update baton.messages set visible_at = now() - interval '1 h' + task_index / 25 * interval '1 s'")
    barrier, together, across, failed = threading.Barrier(7, timeout=60), [], [], []
    done = threading.Event()
    both = ("select c.ended, s.* from (select count(*) filter (where c.outcome = 'completed') as ended"
            " from baton.complete_tasks(%(run_id)s, %(completions)s) as c) as c"
            " left join lateral baton.start_tasks(%(receipts)s) as s on true")

    def completing(own, run_id, in_hand):
        if in_hand:
            ended = call(own, "complete_tasks", run_id=run_id, completions=as_completions(in_hand))
            assert outcomes(ended) == ["completed"] * len(in_hand)

    def work():
        own = plain_db.connect(options="-c statement_timeout=30s")
        in_hand, run_id = [], None
        try:
            barrier.wait()
            while found := [row for row in call(own, "claim", queue_name="q", max_messages=10, visibility="1 hour")
                            if row.kind == "task"]:
                of = {row.run_id for row in found}
                if in_hand and of == {run_id}:
                    answers = own.execute(both, {"run_id": run_id, "completions": as_completions(in_hand),
                                                 "receipts": as_receipts(found)}).fetchall()
                    assert {row.ended for row in answers} == {len(in_hand)}
                    together.append(threading.get_ident())
                else:
                    completing(own, run_id, in_hand)
                    answers = call(own, "start_tasks", receipts=as_receipts(found))
                    across.append(len(of))
                assert [(row.outcome, row.attempt) for row in answers] == [("execute", 1)] * len(found)
                run_id = max(of)
                if len(of) > 1:
                    completing(own, min(of), [row for row in answers if row.run_id == min(of)])
                in_hand = [row for row in answers if row.run_id == run_id]
            completing(own, run_id, in_hand)
        except BaseException as error:
            failed.append(error)

    def extends():
        own = plain_db.connect(options="-c statement_timeout=30s")
        try:
            barrier.wait()
            while not done.is_set():
                rows = own.execute("select message_id, delivery from baton.messages where claimed_at is not null").fetchall()
                call(own, "extend_many", receipts=as_receipts(rows))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    beside = threading.Thread(target=extends)
    for thread in (*threads, beside):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    beside.join()
    assert not failed, failed
    assert len(set(together)) > 1 and max(across) == 2
    for r in runs:
        assert step(conn, "s", r).status == "completed" and counted(conn, "task_completed", r) == 200
        assert counted(conn, "task_started", r) == 200
        assert [seq for seq, _ in log(conn, r)] == list(range(1, last_seq(conn, r) + 1))
        assert [m.kind for m in messages(conn, r)] == ["run"]
    assert server_log.errors() == []
