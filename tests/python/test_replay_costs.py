"""What runs cost, in buffers: that does not depend on how busy the machine is."""

import pytest
from runs import append, end, granted, last_seq, start, take, wake
from starts import call


@pytest.fixture
def db(still_db):
    return still_db


@pytest.fixture
def conn(db):
    conn = db.connect()
    conn.execute("set plan_cache_mode = force_generic_plan")
    return conn


def buffers(conn, sql, *values):
    [plan] = conn.execute(f"explain (analyze, buffers, format json) {sql}", values).fetchone()[0]
    return plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]


def many_events(conn, count, run_id="r"):
    conn.execute(
        "insert into baton.events (run_id, seq, type, correlation_id, payload, created_at)"
        " select r.run_id, r.last_seq + n, 'x.y', 'c' || r.last_seq + n, '{}', baton._now()"
        " from baton.runs as r, generate_series(1, %s) as n where r.run_id = %s", (count, run_id))
    conn.execute("update baton.runs set last_seq = last_seq + %s where run_id = %s", (count, run_id))
    conn.execute("analyze baton.events")


def test_append_and_a_page_of_the_log_cost_the_same_after_ten_thousand_events(conn):
    start(conn)
    _, epoch = granted(conn)

    def cost():
        append(conn, epoch, correlation_id=f"first {last_seq(conn)}")
        written = [buffers(conn, "select * from baton.append_event('r', %s, 'x.z', %s)", epoch, f"key {n} {last_seq(conn)}")
                   for n in range(5)]
        read = [buffers(conn, "select * from baton.read_events('r', %s, 100)", after) for after in (0, last_seq(conn) // 2)]
        return sorted(written)[2], max(read)

    many_events(conn, 200)
    append_at_200, read_at_200 = cost()
    many_events(conn, 10_000)
    append_at_10_000, read_at_10_000 = cost()
    assert append_at_10_000 <= append_at_200 + 10
    assert read_at_10_000 <= read_at_200 + 10 < 60


def test_a_begin_and_an_end_cost_the_same_after_ten_thousand_events(conn):
    def cost():
        [message] = conn.execute("select message_id, delivery from baton.claim('q', for_run => 'r')").fetchall()
        begun = buffers(conn, "select * from baton.begin_replay(%s, %s)", *message)
        epoch = conn.execute("select replay_epoch from baton.runs").fetchone().replay_epoch
        ended = buffers(conn, "select * from baton.end_replay('r', %s, %s)", epoch, last_seq(conn))
        wake(conn)
        return begun, ended

    start(conn)
    cost()
    before = cost()
    many_events(conn, 10_000)
    cost()
    after = cost()
    assert after[0] <= before[0] + 10 and after[1] <= before[1] + 10


def sleepers(conn, count, wake_at="baton._now() + interval '1 day'", status="'suspended'"):
    conn.execute(
        "insert into baton.runs (run_id, workflow_name, queue_name, status, last_seq, wake_at, created_at)"
        f" select 'asleep ' || n, 'w', 'q', {status}, 1, {wake_at}, baton._now() from generate_series(1, %s) as n", (count,))
    conn.execute("analyze baton.runs")


def test_a_million_sleeping_runs_cost_recovery_health_and_the_views_nothing(conn):
    """Without a time, until tomorrow, and with a start tomorrow."""
    looks = {
        "recovery": "select * from baton.recover_runs()", "health": "select * from baton.health()",
        "tick": "select * from baton.tick()", "replays": "select * from baton.replays",
        "wedged_runs": "select * from baton.wedged_runs", "task_ownership": "select * from baton.task_ownership",
        "one run": "select * from baton.run_overview where run_id = 'asleep 777'",
    }
    before = {name: min(buffers(conn, sql) for _ in range(3)) for name, sql in looks.items()}
    conn.execute("alter table baton.runs drop constraint runs_pkey")
    sleepers(conn, 1_000_000, "case when n %% 2 = 0 then baton._now() + interval '1 day' end",
             "case when n %% 4 = 0 then 'pending' else 'suspended' end")
    conn.execute("alter table baton.runs add constraint runs_pkey primary key (run_id)")
    after = {name: min(buffers(conn, sql) for _ in range(3)) for name, sql in looks.items()}
    assert {name for name in looks if after[name] > before[name] + 30} == set(), (before, after)
    assert call(conn, "recover_runs") == []
    conn.execute("update baton.runs set wake_at = baton._now() where run_id in ('asleep 776', 'asleep 777')")
    assert sorted(r.run_id for r in call(conn, "recover_runs")) == ["asleep 776", "asleep 777"]


def test_ended_runs_cost_the_views_and_recovery_nothing(conn):
    start(conn)
    granted(conn)
    conn.execute("delete from baton.messages")
    conn.execute(
        "insert into baton.runs (run_id, workflow_name, queue_name, status, last_seq, created_at, ended_at)"
        " select 'ended ' || n, 'w', 'q', 'completed', 2, baton._now(), baton._now() from generate_series(1, 50000) as n")
    conn.execute("analyze baton.runs")
    for view in ("wedged_runs", "replays"):
        assert buffers(conn, f"select * from baton.{view}") < 100, view
    assert buffers(conn, "select * from baton.recover_runs()") < 1000


def test_a_hundred_thousand_healthy_runs_do_not_hide_the_lost_one_behind_them(conn):
    conn.execute(
        "insert into baton.runs (run_id, workflow_name, queue_name, status, last_seq, wake_pending, needs_driver, wake_at, created_at)"
        " select 'healthy ' || n, 'w', 'q', 'pending', 1, n %% 2 = 0, n %% 2 = 0, case when n %% 2 = 1 then baton._now() + interval '1 day' end,"
        " baton._now() from generate_series(1, 100000) as n".replace("%%", "%"))
    conn.execute(
        "insert into baton.messages (queue_name, kind, run_id, visible_at, created_at)"
        " select r.queue_name, 'run', r.run_id, baton._now(), baton._now() from baton.runs as r where r.wake_pending")
    start(conn, "lost")
    conn.execute("delete from baton.messages where run_id = 'lost'")
    conn.execute("analyze baton.runs, baton.messages")
    found = []
    for calls in range(1, 30):
        used = buffers(conn, "select count(*) from baton.recover_runs(max_runs => 5000)")
        assert used < 100_000, "a call looks at max_runs runs"
        found = conn.execute("select run_id from baton.messages where run_id = 'lost'").fetchall()
        if found:
            break
    assert found and calls <= 21


def test_claims_and_grants_cost_nothing_of_other_runs(conn):
    start(conn)
    end(conn, granted(conn)[1], 1)
    wake(conn)
    [message] = conn.execute("select message_id, delivery from baton.claim('q', for_run => 'r')").fetchall()
    ask = "select * from baton.begin_replay(%s, %s)"
    before = [buffers(conn, ask, *message) for _ in range(3)][-1]
    sleepers(conn, 20_000)
    assert [buffers(conn, ask, *message) for _ in range(3)][-1] <= before + 10
    assert take(conn) is None


def test_a_grant_that_was_planned_for_few_runs_does_not_read_the_many(conn):
    start(conn)
    conn.execute("vacuum analyze baton.runs, baton.messages")

    def cost():
        [message] = conn.execute("select message_id, delivery from baton.claim('q', for_run => 'r')").fetchall()
        used = buffers(conn, "select * from baton.begin_replay(%s, %s)", *message)
        epoch = conn.execute("select replay_epoch from baton.runs where run_id = 'r'").fetchone().replay_epoch
        used += buffers(conn, "select * from baton.end_replay('r', %s, %s)", epoch, last_seq(conn))
        wake(conn)
        return used

    cost()
    before = cost()
    for number in range(2000):
        start(conn, f"other {number}")
    assert cost() <= before + 30, "taller indexes, and no more"
