"""prune beside everything else, and what it costs in buffers."""

import threading

import pytest
from conftest import wait_blocked
from psycopg.types.json import Jsonb
from runs import begin, cancel, granted, last_seq, messages, run, signal, start
from starts import begin as send
from starts import call, one
from tasks import complete, create, inline, queued, replay, started, take_task


@pytest.fixture
def conn(db):
    """It waits for no lock for long: prune waits for none."""
    return db.connect(options="-c lock_timeout=2s -c statement_timeout=60s")


def prune(conn, older_than="0", **arguments):
    return tuple(one(conn, "prune", older_than=older_than, **arguments))


def ended(conn, run_id="r", tasks=1):
    """A run that has ended: 5 rows and one a task."""
    queued(conn, run_id, inputs=range(tasks))
    cancel(conn, run_id)


def there(conn):
    return [r.run_id for r in conn.execute("select run_id from baton.runs order by run_id").fetchall()]


# Nothing waits -----------------------------------------------------------------------------------


def test_a_run_that_somebody_has_locked_is_skipped(conn, first):
    for run_id in ("a", "b", "c"):
        ended(conn, run_id)
    first.run("begin")
    assert one(first, "signal_run", run_id="a", name="s").outcome == "terminal"
    assert prune(conn) == (12, False)
    assert there(conn) == ["a"]
    first.run("commit")
    assert prune(conn) == (6, False)


def test_a_run_is_skipped_whose_message_somebody_has_locked(conn, first):
    for run_id in ("a", "b"):
        inline(conn, run_id)
        cancel(conn, run_id)
    conn.execute("update baton.messages set visible_at = baton._now()")
    first.run("begin")
    first.run("select from baton.messages where run_id = 'a' for no key update")
    assert prune(conn)[0] == 8
    assert there(conn) == ["a"] and len(messages(conn, "a")) == 1
    first.run("commit")
    assert prune(conn)[0] == 8


def test_what_else_somebody_has_locked_is_skipped(conn, first):
    one(conn, "register_worker_function", function_name="p", start_mode="process")
    worker_ids = ["00000000-0000-0000-0000-00000000000" + n for n in "12"]
    for worker_id in worker_ids:
        one(conn, "register_worker", worker_id=worker_id, function_name="p")
        one(conn, "stop_worker", worker_id=worker_id)
        one(conn, "send", queue_name="q", payload=Jsonb(1))
        [message] = call(conn, "claim", queue_name="q")
        one(conn, "fail", message_id=message.message_id, delivery=message.delivery, error="x", final=True)
    first.run("begin")
    for table, key in (("dead_messages", "message_id"), ("incidents", "incident_id"), ("workers", "worker_id")):
        first.run(f"select from baton.{table} order by {key} limit 1 for no key update")
    assert prune(conn) == (3, False)
    first.run("commit")
    assert prune(conn) == (3, False)


def test_two_prunes_share_the_work(conn, first, second):
    for run_id in ("a", "b"):
        ended(conn, run_id)
    first.run("begin")
    assert prune(first, max_rows=6) == (6, True)
    assert prune(second, max_rows=6) == (6, True)
    assert there(conn) == ["a"]
    first.run("commit")
    assert there(conn) == []


def test_a_run_that_was_pruned_and_started_anew_meanwhile_is_left_alone(conn, first, second):
    for run_id in ("a", "b"):
        ended(conn, run_id)
    first.run("begin")
    first.run("lock table baton.events in share row exclusive mode")
    send(second, "prune", older_than="0")
    wait_blocked(conn, second, first)
    assert prune(first) == (6, False), "the other one has a, and has looked at b already"
    assert start(first, "b").outcome == "created"
    first.run("commit")
    assert second.result() == [(6, False)]
    assert run(conn, "b").status == "pending" and there(conn) == ["b"]


# Who comes meanwhile -----------------------------------------------------------------------------


@pytest.mark.parametrize(("max_rows", "how", "status"), [(1000, "commit", None), (4, "commit", None), (4, "rollback", "cancelled")])
def test_who_waits_for_a_run_that_is_pruned_finds_it_unknown(conn, first, second, max_rows, how, status):
    ended(conn, "r", tasks=2)
    first.run("begin")
    assert prune(first, max_rows=max_rows)[0] == min(max_rows, 7)
    send(second, "signal_run", run_id="r", name="s")
    wait_blocked(conn, second, first)
    first.run(how)
    [answer] = second.result()
    assert (answer.outcome, answer.status) == ("terminal", status)


@pytest.mark.parametrize("max_rows", [1000, 4])
def test_a_start_beside_an_open_prune_finds_the_run_and_waits_for_nobody(conn, first, max_rows):
    ended(conn, "r", tasks=2)
    first.run("begin")
    prune(first, max_rows=max_rows)
    assert start(conn, "r").outcome == "exists"
    first.run("commit")
    answer = start(conn, "r")
    assert (answer.outcome, answer.status) == (("created", "pending") if max_rows == 1000 else ("conflict", None))


def test_a_start_whose_run_is_pruned_before_it_has_read_it_starts_it(conn, first, second):
    ended(conn, "r")
    first.run("begin")
    first.run("lock table baton.events in access exclusive mode")
    send(second, "start_run", workflow_name="w", input=None, run_id="r", queue_name="q")
    wait_blocked(conn, second, first)
    assert prune(first)[0] == 6
    first.run("commit")
    [answer] = second.result()
    assert (answer.outcome, answer.status) == ("created", "pending")


def test_a_reader_that_goes_page_by_page_reads_no_half_of_a_marked_run(conn):
    ended(conn, "r", tasks=20)
    assert [e.seq for e in call(conn, "read_events", run_id="r", max_events=1)] == [1]
    assert prune(conn, max_rows=10) == (10, True)
    assert conn.execute("select count(*) as n from baton.events").fetchone().n == 2
    assert call(conn, "read_events", run_id="r", after_seq=1) == []


# Beside work -------------------------------------------------------------------------------------


def drive(conn, run_id):
    """A run with an inline and a queued task, to its end."""
    receipt, epoch = granted(conn, run_id, queue_name=run_id)
    create(conn, epoch, run_id=run_id, inputs=(1, 2))
    _, [task] = replay(conn, receipt, epoch, run_id=run_id)
    signal(conn, run_id)
    assert complete(conn, task, run_id).outcome == "completed"
    other = started(conn, take_task_of(conn, run_id))
    assert complete(conn, other, run_id).outcome == "completed"
    answer = begin(conn, receipt)
    assert answer.outcome == "granted"
    assert one(conn, "complete_run", run_id=run_id, replay_epoch=answer.replay_epoch, output=None).outcome == "done"
    return last_seq(conn, run_id)


def take_task_of(conn, run_id):
    conn.execute("delete from baton.messages where run_id = %s and kind = 'run' and claimed_at is null", (run_id,))
    return take_task(conn, queue_name=run_id)


def test_beside_starts_signals_and_completions(db, server_log):
    """The workers use few run_ids again and again; two prune all the time."""
    starts, removed, failures = [], [0, 0], []
    working = threading.Event()
    working.set()

    def work(name):
        conn = db.connect()
        for n in range(60):
            run_id = f"{name} {n % 3}"
            while (answer := start(conn, run_id, queue_name=run_id)).outcome != "created":
                assert (answer.outcome, answer.status) in [("exists", "completed"), ("conflict", None)], answer
            starts.append(run_id)
            drive(conn, run_id)

    def remove(n):
        conn = db.connect()
        while working.is_set():
            removed[n] += prune(conn, max_rows=9)[0]

    def guarded(function, *values):
        try:
            function(*values)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=guarded, args=(work, name)) for name in ("ann", "bob")]
    pruners = [threading.Thread(target=guarded, args=(remove, n)) for n in range(2)]
    for thread in workers + pruners:
        thread.start()
    for thread in workers:
        thread.join(60)
    working.clear()
    for thread in pruners:
        thread.join(10)
    assert not failures, failures
    assert len(starts) == 120 and all(removed), (len(starts), removed)
    conn = db.connect()
    while prune(conn)[1]:
        pass
    for table in ("runs", "events", "steps", "tasks", "messages"):
        assert conn.execute(f"select * from baton.{table}").fetchall() == [], table
    assert server_log.errors() == []


def test_nothing_of_an_open_run_or_another_queue_is_touched(conn):
    inline(conn, "r1", inputs=(1, 2), visibility="1 second")
    queued(conn, "r1 2")
    one(conn, "send", queue_name="users", payload=Jsonb(1), dedupe_key="r")
    ended(conn, "r")
    everything = [f"select t from baton.{table} as t where t.run_id is distinct from 'r' order by t::text"
                  for table in ("runs", "events", "steps", "tasks", "messages")]
    before = [conn.execute(query).fetchall() for query in everything]
    assert prune(conn) == (6, False)
    assert [conn.execute(query).fetchall() for query in everything] == before
    assert run(conn, "r") is None


# Costs -------------------------------------------------------------------------------------------

LARGE = """
insert into baton.runs (run_id, workflow_name, queue_name, status, last_seq, created_at, ended_at)
values ('large', 'w', 'q', 'completed', 200000, baton._now() - interval '1 day', baton._now() - interval '1 hour');
insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)
select 'large', n, case when n % 100 = 50 then 'step_created' else 'x.y' end, 's' || n, '{}', baton._now()
from generate_series(1, 200000) as n;
insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
select 'large', 's' || n, case n when 100050 then 20000 else 2 end, 0, n from generate_series(50, 200000, 100) as n;
insert into baton.tasks (run_id, step_slug, task_index, status)
select s.run_id, s.step_slug, n - 1, 'completed' from baton.steps as s, generate_series(1, s.task_count) as n;
analyze baton.runs, baton.events, baton.steps, baton.tasks;
"""


def buffers(conn, sql, *values):
    [plan] = conn.execute(f"explain (analyze, buffers, format json) {sql}", values).fetchone()[0]
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


def test_a_run_of_200_000_events_goes_in_calls_of_which_none_costs_more_than_it_removes(still_db):
    conn, reader = still_db.connect(), still_db.connect()
    conn.execute(LARGE)
    conn.execute("set plan_cache_mode = force_generic_plan")
    # What is removed stays for this one: a call that stepped over it would cost more and more.
    reader.execute("begin isolation level repeatable read")
    reader.execute("select from baton.runs")
    rows = conn.execute("select 1 + (select count(*) from baton.events) + (select count(*) from baton.steps)"
                        " + (select count(*) from baton.tasks) as n").fetchone().n
    assert rows == 1 + 200_000 + 2_000 + 1_999 * 2 + 20_000
    costs = []
    while run(conn, "large"):
        costs.append(buffers(conn, "select * from baton.prune('0', 10000)"))
    assert len(costs) == -(-rows // 10_000), costs
    assert max(costs) < 1.1 * costs[0] < 20_000, costs
    for table in ("events", "steps", "tasks"):
        assert conn.execute(f"select * from baton.{table}").fetchall() == [], table


def test_what_is_young_or_open_costs_nothing(still_db):
    """In runs, incidents, dead messages and workers, the oldest of which are a second old."""
    conn = still_db.connect()
    conn.execute("set plan_cache_mode = force_generic_plan")
    ask = "select * from baton.prune('1 day')"
    before = min(buffers(conn, ask) for _ in range(3))
    conn.execute(
        "insert into baton.runs (run_id, workflow_name, queue_name, status, last_seq, created_at, ended_at)"
        " select 'r' || n, 'w', 'q', case when n % 2 = 0 then 'completed' else 'suspended' end, 1, baton._now(),"
        " case when n % 2 = 0 then baton._now() - interval '1 second' end from generate_series(1, 40000) as n;"
        "insert into baton.incidents (at, kind) select baton._now() - interval '1 second', 'x' from generate_series(1, 20000);"
        "insert into baton.dead_messages (message_id, queue_name, failures, lapses, created_at, died_at, reason)"
        " select n, 'q', 1, 0, baton._now(), baton._now() - interval '1 second', 'final' from generate_series(1, 20000) as n;"
        "insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at, stopped_at)"
        " select gen_random_uuid(), 'f', true, baton._now(), baton._now(), baton._now() - interval '1 second'"
        " from generate_series(1, 20000);"
        "analyze baton.runs, baton.incidents, baton.dead_messages, baton.workers")
    assert min(buffers(conn, ask) for _ in range(3)) <= before + 20
    assert min(buffers(conn, "select * from baton._health_retention()") for _ in range(3)) < 20
    some = "select * from baton.prune('1 second', 50)"
    for table in ("runs", "dead_messages", "incidents", "workers"):
        assert conn.execute(f"select count(*) as n from baton.{table}").fetchone().n >= 20_000
        assert min(buffers(conn, some) for _ in range(3)) < 50 * 30, table
        conn.execute(f"delete from baton.{table}")
        conn.execute(f"vacuum baton.{table}")
