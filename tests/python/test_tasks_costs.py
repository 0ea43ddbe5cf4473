"""What steps and tasks cost, in buffers a task: large fan-outs among many small runs."""

import pytest
from psycopg.types.json import Jsonb
from runs import begin, end, granted, last_seq, run, serve, start, take, wake
from starts import call
from tasks import counted, create, dispatch, queued, started, step, take_task, task
from test_replay_costs import buffers


@pytest.fixture
def db(still_db):
    return still_db


@pytest.fixture
def conn(db):
    """Among five thousand runs of one task each, which wait in the same queue, all of it analysed."""
    conn = db.connect(options="-c statement_timeout=20s")
    conn.execute("set plan_cache_mode = force_generic_plan")
    conn.execute("""
        insert into baton.runs (run_id, workflow_name, queue_name, status, needs_driver, last_seq, created_at)
        select 'small ' || n, 'w', 'q', 'running', true, 2, baton._now() from generate_series(1, 5000) as n;
        insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
        select r.run_id, 's', 1, 1, 2 from baton.runs as r;
        insert into baton.tasks (run_id, step_slug, task_index, input) select r.run_id, 's', 0, '1' from baton.runs as r;
        insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
        select 'q', 'task', t.run_id, 's', 0, baton._task_key(t.run_id, 's', 0), baton._now() + interval '1 h', baton._now()
        from baton.tasks as t;
    """)
    conn.execute("analyze baton.runs, baton.steps, baton.tasks, baton.messages")
    return conn


CREATE = "select * from baton.create_step(%s, %s, 's', (select jsonb_agg(n) from generate_series(1, %s) as n))"
DISPATCH = "select * from baton.dispatch_tasks(%s, %s, 0)"


def costs(conn, run_id, count):
    """Buffers a task: create, dispatch, dispatch again, ask whether the run is wedged, cancel."""
    start(conn, run_id)
    receipt, epoch = granted(conn, run_id, visibility="1 hour")
    create(conn, epoch, "warm", [1], run_id)
    dispatch(conn, epoch, 0, run_id)
    total = {"create": buffers(conn, CREATE, run_id, epoch, count),
             "dispatch": buffers(conn, DISPATCH, run_id, epoch),
             "again": buffers(conn, DISPATCH, run_id, epoch)}
    assert conn.execute("select count(*) as n from baton.messages where run_id = %s and kind = 'task'",
                        (run_id,)).fetchone().n == count + 1
    end(conn, epoch, last_seq(conn, run_id), run_id)
    total["wedged"] = buffers(conn, "select * from baton.wedged_runs where run_id = %s", run_id)
    total["cancel"] = buffers(conn, "select * from baton.cancel_run(%s, 'enough')", run_id)
    return {name: used / count for name, used in total.items()}


# Among them the rows themselves, two to four indexes of a message, and one of a task.
BOUNDS = {"create": 8, "dispatch": 20, "again": 8, "wedged": 6, "cancel": 16}


def test_ten_thousand_tasks_cost_no_more_a_task_than_a_thousand(conn):
    thousand, ten_thousand = costs(conn, "thousand", 1000), costs(conn, "ten thousand", 10_000)
    for name, bound in BOUNDS.items():
        assert ten_thousand[name] <= bound, (name, thousand, ten_thousand)
        assert ten_thousand[name] <= 1.5 * thousand[name] + 1, (name, thousand, ten_thousand)


def test_ten_thousand_bodies_of_others_cost_a_dispatch_next_to_nothing(conn):
    """All of them run inline under one message, which lives: a replay by somebody else arms a backstop for each, once."""
    start(conn)
    receipt, epoch = granted(conn, visibility="1 hour")
    create(conn, epoch, inputs=range(10_000))
    dispatch(conn, epoch, 10_000)
    assert end(conn, epoch, last_seq(conn)).outcome == "ended"
    wake(conn)
    message, epoch = granted(conn, visibility="1 hour")
    assert {row.outcome for row in dispatch(conn, epoch)} == {"backstop"}
    assert buffers(conn, DISPATCH, "r", epoch) <= 20 * 10_000
    assert conn.execute("select count(*) as n from baton.messages where dedupe_key like %s",
                        ("%\x1fbackstop\x1f%",)).fetchone().n == 10_000
    assert begin(conn, receipt).outcome == "handed_over" and take(conn) is None and message != receipt


def test_a_replay_beside_a_thousand_bodies_of_queued_tasks_leaves_their_messages_alone(conn):
    start(conn)
    _, epoch = granted(conn, visibility="1 hour")
    create(conn, epoch, inputs=range(1000))
    dispatch(conn, epoch, 0)
    bodies = conn.execute("select s.outcome from baton.claim('q', max_messages => 1000) as c,"
                          " baton.start_task(c.message_id, c.delivery) as s").fetchall()
    assert [body.outcome for body in bodies] == ["execute"] * 1000
    ask = "explain (analyze, buffers, wal, format json) " + DISPATCH
    for _ in range(2):
        [(plan,)] = conn.execute(ask, ("r", epoch)).fetchall()
    assert plan[0]["Plan"]["Actual Rows"] == 1000 and plan[0]["Plan"].get("WAL Records", 0) < 20


def test_ten_thousand_messages_of_tasks_make_no_doorbell_dear(conn):
    """What looks for the run messages of a run does not read those of its tasks."""
    def cost(run_id, count):
        queued(conn, run_id, range(count))
        conn.execute("analyze baton.messages")
        used = {}
        for _ in range(2):
            wake(conn, run_id)
            used["wedged"] = buffers(conn, "select * from baton.wedged_runs where run_id = %s", run_id)
            used["claim"] = buffers(conn, "select * from baton.claim('q', for_run => %s)", run_id)
            used["release"] = buffers(conn, "select * from baton.release_replay(%s)", run_id)
            assert serve(conn, run_id) == [last_seq(conn, run_id)]
        return used

    cost("first", 10)
    small, large = cost("small", 10), cost("large", 10_000)
    for name, used in large.items():
        assert used <= small[name] + 30, (name, small, large)


def test_a_start_and_an_end_cost_the_same_in_a_large_step(conn):
    def cost(run_id, count):
        queued(conn, run_id, range(count))
        used = []
        for _ in range(5):
            message = take_task(conn)
            begun = buffers(conn, "select * from baton.start_task(%s, %s)", *message)
            owned = started(conn, message)
            ended = buffers(conn, "select * from baton.complete_task(%s, 's', %s, 1, '1', %s, %s)", run_id,
                            owned.task_index, *message)
            assert task(conn, task_index=owned.task_index, run_id=run_id).status == "completed"
            used.append((begun, ended))
        call(conn, "cancel_run", run_id=run_id, reason="enough")
        return [sorted(column)[2] for column in zip(*used, strict=True)]

    cost("first", 10)
    small, large = cost("small", 10), cost("large", 10_000)
    assert large[0] <= small[0] + 15 and large[1] <= small[1] + 15, (small, large)


CLAIM = ("select jsonb_agg(jsonb_build_object('message_id', c.message_id, 'delivery', c.delivery)) as receipts"
         " from baton.claim('q', max_messages => %s, visibility => '1 hour') as c")
COMPLETIONS = ("select jsonb_agg(jsonb_build_object('step_slug', t.step_slug, 'task_index', t.task_index, 'attempt', 1,"
               " 'output', 1, 'message_id', t.owner_message_id, 'delivery', t.owner_delivery)) as completions"
               " from baton.tasks as t where t.run_id = %s and t.status = 'started'")


def test_ten_thousand_at_once_cost_a_task_what_ten_do_and_less_than_one_by_one(conn):
    """Under one plan, which was made for ten of them."""
    def batch(run_id, count):
        queued(conn, run_id, range(count))
        receipts = conn.execute(CLAIM, (count,)).fetchone().receipts
        begun = buffers(conn, "select count(*) from baton.start_tasks(%s) as s where s.outcome = 'execute'", Jsonb(receipts))
        completions = conn.execute(COMPLETIONS, (run_id,)).fetchone().completions
        ended = buffers(conn, "select count(*) from baton.complete_tasks(%s, %s)", run_id, Jsonb(completions))
        assert counted(conn, "task_completed", run_id) == count and step(conn, run_id=run_id).status == "completed"
        conn.execute("delete from baton.messages where kind = 'run'")
        return begun / count, ended / count

    first, ten, ten_thousand = batch("first", 10), batch("ten", 10), batch("ten thousand", 10_000)
    assert ten_thousand[0] <= 1.5 * ten[0] and ten_thousand[1] <= 1.5 * ten[1], (first, ten, ten_thousand)
    queued(conn, inputs=range(20))
    singles = []
    for _ in range(20):
        message = take_task(conn)
        begun = buffers(conn, "select * from baton.start_task(%s, %s)", *message)
        index = conn.execute("select task_index from baton.messages where message_id = %s", message[:1]).fetchone().task_index
        ended = buffers(conn, "select * from baton.complete_task('r', 's', %s, 1, '1', %s, %s)", index, *message)
        singles.append((begun, ended))
    begun, ended = (sorted(column)[10] for column in zip(*singles, strict=True))
    assert ten[0] < 0.8 * begun and ten[1] < 0.8 * ended, (begun, ended, ten)


ADVANCE = "select * from baton.advance_run(%s, %s, %s, '1', %s, '2')"


def test_the_short_way_costs_the_same_after_a_thousand_steps_and_less_than_half_of_the_long_one(conn):
    start(conn)
    receipt, epoch = granted(conn, visibility="1 hour")
    create(conn, epoch, "s 0")
    dispatch(conn, epoch)
    end(conn, epoch, last_seq(conn))
    used = [buffers(conn, ADVANCE, "r", epoch, f"s {n}", f"s {n + 1}") for n in range(1000)]
    assert task(conn, "s 1000").status == "started" and last_seq(conn) == 3 + 1000
    assert sorted(used[-100:])[50] <= sorted(used[:100])[50] + 15, (used[:10], used[-10:])
    long = buffers(conn, "select * from baton.complete_task('r', 's 1000', 0, 1, '1', %s, %s)", *receipt)
    long += buffers(conn, "select * from baton.begin_replay(%s, %s)", *receipt)
    epoch = run(conn).replay_epoch
    long += buffers(conn, "select * from baton.create_step('r', %s, 'next', '[2]')", epoch)
    long += buffers(conn, "select * from baton.dispatch_tasks('r', %s)", epoch)
    long += buffers(conn, "select * from baton.end_replay('r', %s, %s)", epoch, last_seq(conn))
    assert 2 * max(used[-100:]) < long


ASK = """select * from baton.terminal_tasks((
  select jsonb_agg(jsonb_build_object('run_id', r || ' ' || n, 'step_slug', 's', 'task_index', 0, 'attempt', 1))
  from generate_series(1, %s) as n, unnest(array['small', 'nobody']) as r
))"""


def test_to_ask_for_hundreds_of_bodies_is_a_look_up_each_however_many_tasks_there_are(db):
    """Also under a plan that was made for ten of them, and where the planner would rather join."""
    conn = db.connect()
    conn.execute("set plan_cache_mode = force_generic_plan")
    conn.execute("set enable_nestloop = off")
    insert = ("insert into baton.tasks (run_id, step_slug, task_index, status, attempt) select 'small ' || n, 's', i,"
              " 'completed', 1 from generate_series(%s::integer, %s) as n, generate_series(0, 9) as i")
    for first, last in ((1, 1), (2, 2000)):
        conn.execute(insert, (first, last))
        for _ in range(2):
            spent = {count: buffers(conn, ASK, count) for count in (1, 10, 250)}
        assert spent[10] <= 10 * 2 * 5 and spent[250] <= 250 * 2 * 5, spent
        conn.execute("analyze baton.tasks")
        conn.execute(ASK, (1,))
    asked = conn.execute(ASK, (250,)).fetchall()
    assert sorted(row.outcome for row in asked) == ["completed"] * 250 + ["unknown"] * 250
