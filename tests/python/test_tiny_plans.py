"""Plans that a session made while the tables were tiny, and keeps: no verb reads them whole when they have grown."""

import uuid

import pytest
from psycopg.types.json import Jsonb
from runs import granted, last_seq, start
from starts import call, one, register
from tasks import create, dispatch, replay, started, take_task, task
from test_replay_costs import buffers

TABLES = "messages, dead_messages, runs, events, steps, tasks, workers, incidents, tallies"

GROW = """
insert into baton.runs (run_id, workflow_name, queue_name, status, needs_driver, last_seq, created_at)
select 'other ' || n, 'w', 'q', 'running', true, 2, baton._now() from generate_series(1, 2000) as n;
insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
select 'other ' || n, 's', 10, 10, 2 from generate_series(1, 2000) as n;
insert into baton.tasks (run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery, last_started_at)
select 'other ' || n, 's', i, 'started', 1, -n, 1, baton._now()
from generate_series(1, 2000) as n, generate_series(0, 9) as i;
insert into baton.messages (queue_name, visible_at, created_at, delivery, claimed_at)
select 'q', baton._now() + interval '1 hour', baton._now(), 1, baton._now() from generate_series(1, 20000) as n;
insert into baton.messages (queue_name, kind, run_id, visible_at, created_at)
select 'bells', 'run', 'other ' || n, baton._now(), baton._now() from generate_series(1, 20000) as n;
insert into baton.dead_messages (message_id, queue_name, failures, lapses, created_at, died_at, reason)
select -n, 'q', 1, 0, baton._now(), baton._now(), 'final' from generate_series(1, 20000) as n;
insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at, stopped_at)
select gen_random_uuid(), 'of ' || n % 2, false, baton._now(), baton._now(), case n % 2 when 0 then baton._now() end
from generate_series(1, 20000) as n;
insert into baton.incidents (at, kind) select baton._now(), 'lost' from generate_series(1, 20000) as n;
"""

SIBLINGS = """
with run as (select %s::text as run_id, %s::integer as count),
step as (
  insert into baton.steps (run_id, step_slug, task_count, open_tasks, created_seq)
  select r.run_id, 'more ' || n, 1, 1, 2 from run as r, generate_series(1, r.count) as n
),
task as (
  insert into baton.tasks (run_id, step_slug, task_index)
  select r.run_id, 's ' || n %% 3, 2 + n from run as r, generate_series(1, r.count) as n
)
insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at, created_at)
select 'q', 'task', r.run_id, 's ' || n %% 3, 2 + n, baton._task_key(r.run_id, 's ' || n %% 3, 2 + n),
  baton._now() + interval '1 hour', baton._now()
from run as r, generate_series(1, r.count) as n
"""


@pytest.fixture
def db(still_db):
    return still_db


def running(conn, run_id):
    """A run that is being replayed, with a body under its message and two under messages of their own."""
    start(conn, run_id)
    receipt, epoch = granted(conn, run_id)
    create(conn, epoch, inputs=range(3), run_id=run_id)
    dispatch(conn, epoch, 1, run_id)
    return receipt, epoch


def dead(conn):
    one(conn, "send", queue_name="mail", payload="1")
    [message] = call(conn, "claim", queue_name="mail")
    one(conn, "fail", message_id=message.message_id, delivery=message.delivery, error="no", final=True)
    return message.message_id


def account(conn):
    """The buffers that verbs took, by verb, and spend(verb, *arguments), which calls one."""
    spent = {}

    def spend(verb, *arguments):
        places = ", ".join(["%s"] * len(arguments))
        spent[verb] = buffers(conn, f"select * from baton.{verb}({places})", *arguments)

    return spent, spend


def costs(conn, name):
    """What each verb reads, where it has something to do."""
    spent, spend = account(conn)
    run_id = f"ended {name}"
    _, epoch = running(conn, run_id)
    spend("get_run", run_id)
    message = take_task(conn)
    spend("start_task", *message)
    spend("release_task", run_id, "s", 2)
    spend("skip_step", run_id, "s", epoch)
    spend("complete_run", run_id, epoch, "1")
    start(conn, f"alone {name}")
    _, epoch = granted(conn, f"alone {name}")
    create(conn, epoch, run_id=f"alone {name}")
    replay(conn, None, epoch, run_id=f"alone {name}")
    spend("advance_run", f"alone {name}", epoch, "s", "1", "t", "2")
    assert task(conn, "t", 0, f"alone {name}").status == "started"
    _, epoch = running(conn, f"cancelled {name}")
    spend("cancel_run", f"cancelled {name}", "enough")

    start(conn, f"doorbell {name}", queue_name="bells")
    spend("claim", "bells", None, 1, None, f"doorbell {name}")
    spent["claim for_run"] = spent.pop("claim")
    register(conn, name)
    spend("ensure_workers")
    invocation_id = conn.execute("select invocation_id as id from baton.worker_functions where function_name = %s",
                                 (name,)).fetchone().id
    worker_id = uuid.uuid4()
    spend("reconcile_worker_invocation", name, invocation_id)
    spend("accept_worker_invocation", name, invocation_id, worker_id)
    spend("heartbeat", worker_id)
    spend("claim", "nothing", worker_id)
    spend("deprecate_workers", name)
    spend("stop_worker", worker_id)
    spend("unregister_worker_function", name)

    spend("redrive", [dead(conn)])
    spend("discard", [dead(conn)])
    conn.execute("update baton.runs set ended_at = ended_at - interval '2 days' where run_id = %s", (run_id,))
    conn.execute("update baton.incidents set at = at - interval '2 days' where incident_id = (select max(incident_id)"
                 " from baton.incidents)")
    spend("prune", "1 day")
    return spent


def test_no_verb_reads_tables_whole_that_were_tiny_when_it_was_planned(db):
    conn, other = db.connect(), db.connect()
    costs(conn, "zero")
    other.execute(f"vacuum analyze {', '.join('baton.' + table for table in TABLES.split(', '))}")
    tiny = [costs(conn, name) for name in ("one", "two", "three")][-1]
    other.execute(GROW)
    grown = costs(conn, "four")
    assert {verb: (tiny[verb], used) for verb, used in grown.items() if used > tiny[verb] + 60} == {}


def test_to_extend_users_messages_does_not_read_those_of_runs(db):
    conn, other = db.connect(), db.connect()
    for _ in range(3):
        one(conn, "send", queue_name="mail", payload="1")
    receipts = Jsonb([{"message_id": message.message_id, "delivery": message.delivery}
                      for message in call(conn, "claim", queue_name="mail", max_messages=3)])
    other.execute("vacuum analyze baton.messages")
    ask = "select * from baton.extend_many(%s)"
    tiny = [buffers(conn, ask, receipts) for _ in range(2)][-1]
    other.execute("insert into baton.messages (queue_name, kind, run_id, visible_at, created_at)"
                  " select 'q', 'run', 'r ' || n, baton._now(), baton._now() from generate_series(1, 20000) as n")
    assert buffers(conn, ask, receipts) <= tiny + 60


def test_to_ask_how_a_run_stands_does_not_read_its_log(db):
    conn, other = db.connect(), db.connect()
    ask = "select * from baton.get_run('r')"
    start(conn)
    other.execute("vacuum analyze baton.runs, baton.events")
    tiny = [buffers(conn, ask) for _ in range(2)][-1]
    other.execute("insert into baton.events (run_id, seq, type, created_at)"
                  " select 'r', n, 'x.y', baton._now() from generate_series(2, 20000) as n")
    other.execute("update baton.runs set last_seq = 20000")
    assert buffers(conn, ask) <= tiny + 10


def test_a_task_is_looked_up_by_its_whole_key(db):
    """However many other tasks of its step are unfinished, also in tables that were never analysed."""
    conn, other = db.connect(), db.connect()
    start(conn)
    _, epoch = granted(conn, visibility="1 hour")
    create(conn, epoch, inputs=range(40))
    dispatch(conn, epoch, 0)

    def costs():
        spent, spend = account(conn)
        tasks = [started(conn, take_task(conn)) for _ in range(4)]
        receipts = [{"message_id": owned.receipt.message_id, "delivery": owned.receipt.delivery} for owned in tasks]
        spend("extend", *tasks[0].receipt)
        spend("extend_many", Jsonb(receipts[:1]))
        spend("ack", *tasks[0].receipt)
        spend("ack_many", Jsonb(receipts[:1]))
        spend("terminal_tasks", Jsonb([{"run_id": "r", "step_slug": "s", "task_index": tasks[0].task_index, "attempt": 1}]))
        spend("park", *tasks[0].receipt, "1 hour", True)
        spend("fail", *tasks[1].receipt, "no", "1 hour", False, True)
        spend("fail_task", "r", "s", tasks[2].task_index, 1, Jsonb("no"), *tasks[2].receipt, "1 hour")
        spend("complete_task", "r", "s", tasks[3].task_index, 1, Jsonb(1), *tasks[3].receipt)
        return spent

    costs()
    few = costs()
    other.execute("insert into baton.tasks (run_id, step_slug, task_index)"
                  " select 'r', 's', n from generate_series(40, 10000) as n")
    other.execute("delete from baton.messages where kind = 'task' and claimed_at is null")
    other.execute("insert into baton.messages (queue_name, kind, run_id, step_slug, task_index, dedupe_key, visible_at,"
                  " created_at) select 'q', 'task', 'r', 's', n, baton._task_key('r', 's', n), baton._now(),"
                  " baton._now() from generate_series(9990, 10000) as n")
    many = costs()
    assert {verb: (few[verb], used) for verb, used in many.items() if used > few[verb] + 30} == {}


def test_a_dispatch_asks_for_the_messages_of_its_own_tasks(db):
    """Also where the plan was made for a hundred tasks and hardly a message: from Postgres 18 on, that sequential scans
    are disabled does not keep it from reading all messages once and hashing them."""
    conn, other = db.connect(), db.connect()
    start(conn)
    _, epoch = granted(conn, visibility="1 hour")
    create(conn, epoch, inputs=range(100))
    dispatch(other, epoch, 100)
    other.execute("vacuum analyze baton.messages, baton.runs, baton.steps, baton.tasks")
    ask = "select * from baton.dispatch_tasks('r', %s, 100)"
    few = [buffers(conn, ask, epoch) for _ in range(2)][-1]
    other.execute("insert into baton.messages (queue_name, payload, dedupe_key, visible_at, created_at) select 'q',"
                  " to_jsonb(repeat('x', 1000)), 'key ' || n, baton._now(), baton._now() from generate_series(1, 20000) as n")
    assert buffers(conn, ask, epoch) <= few + 100 * 8


def test_batches_of_tasks_look_up_what_they_name(db):
    """However many other runs, steps, tasks and messages there are, also of the run itself, and however few there were."""
    conn, other = db.connect(), db.connect()

    def costs(run_id, siblings=0):
        spent, spend = account(conn)
        start(conn, run_id)
        _, epoch = granted(conn, run_id, visibility="1 hour")
        for n in range(3):
            create(conn, epoch, f"s {n}", range(3), run_id)
        dispatch(conn, epoch, 0, run_id)
        other.execute(SIBLINGS, (run_id, siblings))
        tasks = call(conn, "claim", queue_name="q", max_messages=5)
        spend("start_tasks", Jsonb([{"message_id": t.message_id, "delivery": t.delivery} for t in tasks]))
        spend("complete_tasks", run_id, Jsonb([
            {"step_slug": t.step_slug, "task_index": t.task_index, "attempt": 1, "output": 1, "message_id": t.message_id,
             "delivery": t.delivery if n else None} for n, t in enumerate(tasks)]))
        assert last_seq(conn, run_id) == 4 + 5 + 5 + 1
        call(conn, "cancel_run", run_id=run_id, reason="enough")
        return spent

    costs("zero")
    other.execute(f"vacuum analyze {', '.join('baton.' + table for table in TABLES.split(', '))}")
    tiny = [costs(name) for name in ("one", "two", "three")][-1]
    other.execute(GROW)
    grown = costs("four", 5000)
    assert {verb: (tiny[verb], used) for verb, used in grown.items() if used > tiny[verb] + 60} == {}
