"""The server itself fails: it crashes in the middle of load, ends connections, answers read only, and its clock jumps."""

import contextlib
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import psycopg
import pytest
from conftest import ServerLog, wait_until
from psycopg.types.json import Jsonb
from runs import Receipt, append, begin, end, granted, last_seq, log, run, start, superseded, wedged
from soak_load import Caller
from starts import call, one, register
from tasks import Task, complete, create, dispatch, fail, inline, queued, short_way, start_task, take_task
from test_tasks_batches import as_completions, as_receipts, outcomes
from test_worker_durable import DurableShop

PROVOKED = (r"terminating connection|the database system is|connection to client lost|"
            r"server closed the connection unexpectedly")


# Load, and a server that goes on and off -----------------------------------------------------------


class Mail:
    """Messages and signals, asked again until there is an answer; and what the answers were."""

    def __init__(self, dsn):
        self.over, self.all_sent = threading.Event(), threading.Event()
        self.sent, self.keys, self.signals = [], {}, []  # keys: of each message id that was claimed
        self.taken = []  # (message id, what was done with it), in their order
        self.pool = ThreadPoolExecutor(max_workers=3)
        self.parts = [self.pool.submit(part, Caller(dsn)) for part in (self.send, self.take, self.signal)]

    def send(self, caller):
        try:
            while not self.over.wait(0.01):
                key = f"m-{len(self.sent)}"
                caller.one("select * from baton.send('mail', %s, dedupe_key => %s)", Jsonb(key), key)
                self.sent.append(key)
        finally:
            self.all_sent.set()

    def take(self, caller):
        while not self.all_sent.wait(0.005) or caller.rows("select from baton.messages where queue_name = 'mail'"):
            for row in caller.rows("select * from baton.claim('mail', visibility => '1 s')"):
                self.keys[row.message_id] = row.payload
                self.taken.append((row.message_id, "claimed"))
                answer = caller.one("select * from baton.ack(%s, %s)", row.message_id, row.delivery)
                self.taken.append((row.message_id, answer.outcome))

    def signal(self, caller):
        while not self.over.wait(0.01):
            key = f"s-{len(self.signals)}"
            answer = caller.one("select * from baton.signal_run('listens', 's', null, %s)", key)
            assert answer.outcome in ("signalled", "duplicate")
            self.signals.append(key)

    def close(self):
        self.over.set()
        with self.pool:
            for part in self.parts:
                part.result(30)


@pytest.fixture
def open_shop(tmp_path):
    """open_shop(db) -> a DurableShop, whose processes end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda db: stack.enter_context(contextlib.closing(DurableShop(db, tmp_path)))


def crash(cluster, rng):
    cluster.restart("immediate")


def end_connections(cluster, rng):
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
        for _ in range(20):
            admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'app'"
                          " and backend_type = 'client backend' and random() < 0.2")
            threading.Event().wait(rng.uniform(0, 0.05))


def test_a_grant_that_was_not_flushed_is_lost_with_its_claim_unless_something_was_decided_under_it(make_cluster, make_database):
    """docs/guides/replay.md"""
    cluster = make_cluster(settings={"fsync": "on", "autovacuum": "off", "wal_writer_delay": "10s"})
    db = make_database(cluster)
    start(db.connect())
    cluster.restart()  # what writes the log in the background has just done so, and does again in ten seconds
    conn = db.connect()
    grant = ("select set_config('synchronous_commit', 'off', true), m.message_id, m.delivery, b.outcome, b.replay_epoch"
             " from baton.claim('q', visibility => '1 hour') as m"
             " cross join lateral baton.begin_replay(m.message_id, m.delivery) as b")
    lost = conn.execute(grant).fetchone()
    assert lost.outcome == "granted"
    crash(cluster, None)
    conn = db.connect()
    assert run(conn).status == "pending" and wedged(conn) == []
    assert one(conn, "extend", message_id=lost.message_id, delivery=lost.delivery).outcome == "lost"

    kept = conn.execute(grant).fetchone()
    with superseded():
        append(conn, lost.replay_epoch)
    assert append(conn, kept.replay_epoch) == "appended"
    crash(cluster, None)
    conn = db.connect()
    assert end(conn, kept.replay_epoch, last_seq(conn)).outcome == "ended"
    assert log(conn)[-1][1] == "x.y"


def unflushed_claim(conn, queue_name, max_messages):
    with conn.transaction():
        conn.execute("set local synchronous_commit = off")
        return call(conn, "claim", queue_name=queue_name, max_messages=max_messages, visibility="1 hour")


# The body's effect, in the transaction of its completion.
COMPLETED = """
    with c as materialized (select * from baton.complete_tasks('r', %s)),
    done as (insert into effects select c.task_index from c where c.outcome = 'completed')
    select c.outcome, c.step_ended from c"""


def test_batches_whose_answers_a_crash_took_are_asked_again_under_the_same_receipts(make_cluster, make_database):
    """All have committed, and only the last one, a claim that was not flushed, is lost; nobody has read the answers."""
    cluster = make_cluster(settings={"fsync": "on", "autovacuum": "off", "wal_writer_delay": "10s"})
    db = make_database(cluster)
    conn = db.connect()
    conn.execute("create table effects (task_index integer)")
    [here] = inline(conn, "ahead", visibility="1 hour")
    step = short_way(run(conn, "ahead").replay_epoch, "ahead")
    queued(conn, inputs=range(5))
    tasks = unflushed_claim(conn, "q", 5)
    call(conn, "send_many", queue_name="mail", messages=Jsonb([{"payload": 1}] * 2))
    mail = call(conn, "claim", queue_name="mail", max_messages=2)
    keyed = Jsonb([{"payload": n, "dedupe_key": f"k{n}"} for n in range(2)])

    def ask(conn):
        started = call(conn, "start_tasks", receipts=as_receipts(tasks))
        todo.extend(started if not todo else [])
        ended = conn.execute(COMPLETED, (as_completions(todo[:3]),)).fetchall()
        extended = call(conn, "extend_many", receipts=as_receipts(todo[3:]))
        return (outcomes(started), [row.attempt for row in started[3:]], outcomes(ended), outcomes(extended),
                outcomes(call(conn, "ack_many", receipts=as_receipts(mail))), one(conn, "advance_run", **step).outcome,
                call(conn, "send_many", queue_name="others", messages=keyed))

    todo = []
    *answers, sent = ask(conn)
    assert answers == [["execute"] * 5, [1, 1], ["completed"] * 3, ["extended"] * 2, ["acked"] * 2, "advanced"]
    lost = unflushed_claim(conn, "others", 2)
    crash(cluster, None)

    conn = db.connect()
    assert outcomes(call(conn, "extend_many", receipts=as_receipts(lost))) == ["lost"] * 2
    *answers, again = ask(conn)
    assert answers == [["lost"] * 3 + ["execute"] * 2, [1, 1], ["already_completed"] * 3, ["extended"] * 2, ["lost"] * 2,
                       "declined"]
    assert [tuple(row) for row in again] == [("duplicate", row.message_id) for row in sent]
    assert [row.lapses for row in call(conn, "claim", queue_name="others", max_messages=2)] == [0, 0], "due, and not counted"

    grant = begin(conn, here.receipt)
    assert [(row.step_slug, row.attempt) for row in dispatch(conn, grant.replay_epoch, run_id="ahead")
            if row.outcome == "running"] == [("t", 1)], "it lost the answer, and runs it"
    ended = conn.execute(COMPLETED, (as_completions(todo),)).fetchall()
    assert Counter(outcomes(ended)) == {"already_completed": 3, "completed": 2}
    assert sum(row.step_ended for row in ended) == 1
    assert sorted(row.task_index for row in conn.execute("select task_index from effects").fetchall()) == list(range(5))
    assert [type for _, type in log(conn)][2:] == ["task_started"] * 5 + ["task_completed"] * 5 + ["step_completed"]
    assert wedged(conn) == []


ROWS = """
    select r.run_id, r.status, r.last_seq, r.wake_pending, r.replay_epoch, t.status as task, t.attempt, m.message_id, m.delivery,
      m.visible_at, (select count(*) from baton.events) as events, (select count(*) from baton.messages) as messages
    from baton.runs as r
    left join baton.tasks as t using (run_id)
    left join baton.messages as m using (run_id, step_slug, task_index)
    order by r.run_id, t.task_index"""


def test_what_was_prepared_outlives_its_connection_and_a_crash(make_cluster, make_database):
    """Two-phase commit: what is committed in the end is as if it had been all the time."""
    cluster = make_cluster(settings={"max_prepared_transactions": 2})
    db = make_database(cluster)
    conn = db.connect()
    queued(conn, inputs=range(4))
    start(conn, "held")
    inline(conn, "ahead", visibility="1 hour")
    step = short_way(run(conn, "ahead").replay_epoch, "ahead")

    def prepare(name):
        own = db.connect()
        own.execute("begin")
        tasks = call(own, "start_tasks", receipts=as_receipts(call(own, "claim", queue_name="q", max_messages=4)))
        ended = call(own, "complete_tasks", run_id="r", completions=as_completions(tasks[:2]))
        call(own, "extend_many", receipts=as_receipts(tasks[2:]))
        call(own, "send_many", queue_name="mail", messages=Jsonb([{"payload": 1, "dedupe_key": "k"}, {"payload": 2}]))
        _, epoch = granted(own, "held", hold="session", queue_name="q")
        assert call(own, "recover_runs") == [] and create(own, epoch, run_id="held") == "created"
        answers = [outcomes(tasks), outcomes(ended), one(own, "advance_run", **step).outcome]
        own.execute(f"prepare transaction '{name}'")
        own.close()
        return answers, tasks[2:], epoch

    before = conn.execute(ROWS).fetchall()
    assert prepare("undone")[0] == [["execute"] * 4, ["completed"] * 2, "advanced"]
    crash(cluster, None)
    conn = db.connect()
    assert call(conn, "claim", queue_name="q", max_messages=10) == []
    conn.execute("rollback prepared 'undone'")
    assert conn.execute(ROWS).fetchall() == before

    answers, tasks, epoch = prepare("done")
    assert answers == [["execute"] * 4, ["completed"] * 2, "advanced"]
    crash(cluster, None)
    conn = db.connect()
    conn.execute("commit prepared 'done'")
    assert wedged(conn) == [("held", "replay")], "the connection that held it is gone"
    assert append(conn, epoch, run_id="held") == "appended", "until somebody else begins"
    assert outcomes(call(conn, "complete_tasks", run_id="r", completions=as_completions(tasks))) == ["completed"] * 2
    assert one(conn, "advance_run", **{**step, "step_slug": "t", "next_step_slug": "u"}).outcome == "advanced"
    assert outcomes(call(conn, "send_many", queue_name="mail", messages=Jsonb([{"dedupe_key": "k"}]))) == ["duplicate"]
    assert [seq for seq, _ in log(conn)] == list(range(1, 3 + 4 + 4 + 1))


@pytest.mark.parametrize("trouble", [crash, end_connections])
def test_in_the_middle_of_load_nothing_is_lost_that_was_answered(make_cluster, make_database, open_shop, trouble):
    cluster, rng = make_cluster(settings={"fsync": "on"}), random.Random(7)
    db = make_database(cluster)
    server_log = ServerLog(cluster.log)
    server_log.databases.append(db.name)
    shop = open_shop(db)
    start(shop.conn, "listens", "nobody")
    for number in range(3):
        shop.start("fan", list(range(20)), f"fan {number}")
        shop.start("steps", 8, f"steps {number}")
    mail = Mail(db.dsn)
    try:
        shop.keep(2, visibility=1, SLOTS="3", QUICK_SECONDS="0.02")
        for number in range(3):
            shop.wait_marks(20 * number + 10)
            trouble(cluster, rng)
        shop.conn = db.connect()
        wait_until(lambda: not shop.conn.execute("select from baton.runs where ended_at is null"
                                                 " and run_id <> 'listens'").fetchall(), "all runs have ended")
        wait_until(lambda: len(mail.sent) > 50 and len(mail.signals) > 50, "there were many messages and signals")
    finally:
        mail.close()
    for worker in shop.living():
        worker.signal()
    assert [worker.wait() for worker in shop.workers] == [0, 0], "no worker died of it"

    for number in range(3):
        assert shop.run(f"fan {number}").output == list(range(20))
        assert shop.run(f"steps {number}").output == list(range(8))
        assert log(shop.conn, f"fan {number}")[-1][0] == last_seq(shop.conn, f"fan {number}")
    ends = Counter((row.run_id, row.slug, row.index) for row in shop.conn.execute(
        "select run_id, payload ->> 'step_slug' as slug, coalesce(payload ->> 'task_index', '0') as index from baton.events"
        " where type in ('task_completed', 'run_advanced')").fetchall())
    assert len(ends) == 3 * 20 + 3 * 8 and set(ends.values()) == {1}
    assert max(Counter(shop.marks()).values()) == 1, "no attempt ran twice"

    last = {message_id: n for n, (message_id, _) in enumerate(mail.taken)}
    assert set(mail.keys.values()) == set(mail.sent)
    assert all(n == last[message_id] for n, (message_id, what) in enumerate(mail.taken) if what == "acked"), "came again"
    signals = [row.correlation_id for row in shop.conn.execute(
        "select correlation_id from baton.events where run_id = 'listens' and type = 'signal_received' order by seq").fetchall()]
    assert signals == mail.signals, "each once, in their order"
    assert server_log.errors(ignore=PROVOKED) == []
    shop.conn.execute("select baton.tick()")
    assert shop.conn.execute("select from baton.wedged_runs").fetchall() == []


# Read only -----------------------------------------------------------------------------------------

# Whatever a verb asks for, by the names of its arguments.
ARGUMENTS = {
    "attempt": "1", "completions": '[{"step_slug": "s", "task_index": 0, "attempt": 1, "output": 1, "message_id": 1,'
    ' "delivery": 1}]', "error": '"no"', "function_name": "orders", "input": "null", "inputs": "[1]",
    "invocation_id": "00000000-0000-0000-0000-000000000001", "keys": '[{"run_id": "r", "step_slug": "s", "task_index": 0,'
    ' "attempt": 1}]', "kind": "client", "messages": '[{"payload": 1}]', "name": "n", "next_input": "1", "next_step_slug": "t",
    "older_than": "1 day", "output": "1", "payload": "1", "queue_name": "q", "reason": "because",
    "receipts": '[{"message_id": 1, "delivery": 1}]', "replay_epoch": "1", "role_name": "postgres", "run_id": "r",
    "seen_seq": "1", "step_slug": "s", "task_index": "0", "type": "x.y", "worker_id": "00000000-0000-0000-0000-000000000002",
    "workflow_name": "w",
}
READS = {"get_run", "health", "metrics", "read_events", "terminal_tasks", "version"}
NOTHING_TO_DO = {"schedule", "unschedule"}  # without pg_cron


@pytest.fixture(params=["set so", "hot standby"])
def read_only(request, make_cluster, make_database):
    """A connection on which nothing can be written, and arguments: a task's receipt, a dead message, a function to start."""
    cluster = make_cluster()
    db = make_database(cluster)
    conn = db.connect()
    register(conn)
    queued(conn)
    receipt = take_task(conn)
    dead = one(conn, "send", queue_name="dead", payload="1").message_id
    [claimed] = call(conn, "claim", queue_name="dead")
    assert one(conn, "fail", message_id=dead, delivery=claimed.delivery, error="no", final=True).outcome == "dead"
    if request.param == "set so":
        conn.execute("alter database app set default_transaction_read_only = on")
    else:
        db = make_database(make_cluster(standby_of=cluster), install=False)
    return db.connect(), ARGUMENTS | receipt._asdict() | {"message_ids": [dead]}


def test_read_only_what_writes_answers_with_25006_alone_and_what_reads_goes_on(read_only):
    (conn, arguments), refused = read_only, set()
    verbs = conn.execute(
        "select p.proname, array(select a.name from unnest(p.proargnames, p.proargmodes) with ordinality as a (name, mode, n)"
        " where coalesce(a.mode, 'i') in ('i', 'b') order by a.n limit p.pronargs - p.pronargdefaults) as names"
        " from pg_proc as p where p.pronamespace = 'baton'::regnamespace and p.proname !~ '^_' order by p.proname").fetchall()
    assert len(verbs) > 50
    for verb, names in verbs:
        try:
            rows = call(conn, verb, **{name: arguments[name] for name in names})
        except psycopg.Error as error:
            assert error.sqlstate == "25006", (verb, error)
            refused.add(verb)
        else:
            assert verb not in NOTHING_TO_DO or rows[0].outcome == "unavailable"
    assert {verb for verb, _ in verbs} - refused - READS - NOTHING_TO_DO == set()
    assert refused & READS == set()
    assert one(conn, "get_run", run_id="r").status == "running" and len(call(conn, "read_events", run_id="r")) == 2
    assert [row.severity for row in call(conn, "health") if row.finding == "read_only"] == ["critical"]
    for view in conn.execute("select viewname from pg_views where schemaname = 'baton'").fetchall():
        conn.execute(f"select * from baton.{view.viewname}").fetchall()


def test_a_worker_goes_on_once_the_server_can_be_written_again(db, open_shop, server_log):
    """Connections that are open stay as they are; new ones are read only. The worker tries again and again."""
    shop = open_shop(db)
    worker = shop.worker(visibility=1)
    shop.start("gate", "through")
    shop.wait_marks(1)
    shop.conn.execute(f"alter database {db.name} set default_transaction_read_only = on")
    shop.conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and application_name ="
                      " 'worker-1'", (db.name,))
    shop.open_gate()
    worker.wait_for("ReadOnlySqlTransaction", times=2)
    shop.conn.execute(f"alter database {db.name} reset default_transaction_read_only")
    assert shop.wait("completed").output == "through"
    assert worker.process.poll() is None
    worker.signal()
    assert worker.wait() == 0
    assert server_log.errors(ignore="terminating connection|in a read-only transaction") == []


# The clock jumps -----------------------------------------------------------------------------------


class Handler:
    """One handler that does one thing at a time. The clock goes on only where nothing is due, to the moment when it is."""

    def __init__(self, conn, queue):
        self.conn, self.queue = conn, queue
        self.bodies, self.handled, self.waited = Counter(), Counter(), timedelta()

    def moments(self):
        """Works until all has ended, and stops after each verb: there the clock may jump."""
        while True:
            yield
            if rows := call(self.conn, "claim", queue_name=self.queue):
                yield
                [row] = rows
                yield from getattr(self, row.kind or "message")(row, Receipt(row.message_id, row.delivery))
            elif due := self.conn.execute("select min(visible_at) as at from baton.messages where queue_name = %s",
                                          (self.queue,)).fetchone().at:
                self.waited += due - self.conn.execute("select baton._now() as at").fetchone().at
                self.conn.execute("select baton_test.set_clock(%s)", (due,))
                call(self.conn, "tick")
            else:
                return

    def message(self, row, receipt):
        self.handled[row.payload] += 1
        yield
        assert one(self.conn, "ack", **receipt._asdict()).outcome == "acked"

    def run(self, row, receipt):
        answer = begin(self.conn, receipt)
        if answer.outcome != "granted":
            return
        yield
        started, events = [], call(self.conn, "read_events", run_id=row.run_id)
        types = [event.type for event in events]
        if "step_created" not in types:
            create(self.conn, answer.replay_epoch, "s", [0, 1], row.run_id)
            yield
        if "step_completed" not in types:
            started = dispatch(self.conn, answer.replay_epoch, run_id=row.run_id)
            yield
            if started[0].outcome == "lost":  # the claim ran out, and is still ours
                assert one(self.conn, "extend", **receipt._asdict()).outcome == "extended"
                started = dispatch(self.conn, answer.replay_epoch, run_id=row.run_id)
                yield
        until = next((event.payload for event in events if event.type == "timer.set"), None)
        if "step_completed" in types and until is None:
            until = (answer.clock + timedelta(seconds=20)).isoformat()
            one(self.conn, "append_event", run_id=row.run_id, replay_epoch=answer.replay_epoch, type="timer.set",
                payload=Jsonb(until))
            yield
        if until and answer.clock >= datetime.fromisoformat(until):
            one(self.conn, "complete_run", run_id=row.run_id, replay_epoch=answer.replay_epoch, output=Jsonb("done"))
            return
        ended = end(self.conn, answer.replay_epoch, last_seq(self.conn, row.run_id), row.run_id, wake_at=until)
        assert ended.outcome == "ended"
        for task in started:
            if task.outcome == "execute":
                yield
                yield from self.body(task, row.run_id, receipt)
                yield
                yield from self.run(row, receipt)

    def task(self, row, receipt):
        answer = start_task(self.conn, receipt)
        if answer.outcome == "execute":
            yield
            yield from self.body(answer, row.run_id, receipt)

    def body(self, task, run_id, receipt):
        self.bodies[task.step_slug, task.task_index, task.attempt] += 1
        yield
        task = Task(task.step_slug, task.task_index, task.attempt, receipt)
        if task.attempt == 1:
            assert fail(self.conn, task, run_id, retry_delay="20 s").outcome == "retrying"
        else:
            assert complete(self.conn, task, run_id).outcome == "completed"


def work(conn, name, jump=None, at=None):
    """A run and messages, some of them later; after `at` moments the clock jumps. How long the clock had to go on."""
    handler = Handler(conn, name)
    start(conn, name, name, delay="20 s")
    one(conn, "send", queue_name=name, payload=Jsonb("at once"))
    one(conn, "send", queue_name=name, payload=Jsonb("later"), delay="20 s")
    for moment, _ in enumerate(handler.moments()):
        assert moment < 200, "it does not end"
        if moment == at:
            conn.execute("select baton_test.advance(%s)", (jump,))
    assert one(conn, "get_run", run_id=name).output == "done"
    assert handler.handled == {"at once": 1, "later": 1}
    assert handler.bodies == {("s", index, attempt): 1 for index in (0, 1) for attempt in (1, 2)}
    assert conn.execute("select from baton.wedged_runs").fetchall() == []
    return handler.waited, moment


@pytest.mark.parametrize("hours", [1, -1], ids=["forward", "back"])
def test_a_clock_that_jumps_by_an_hour_at_any_moment_delays_by_the_step_and_loses_nothing(clock_db, hours):
    conn, hour = clock_db.connect(), timedelta(hours=1)
    waited, moments = work(conn, "as it is")
    assert waited == timedelta(seconds=60) and moments > 30, "the start, a retry, the sleep"
    late = [work(conn, f"at {moment}", hours * hour, moment)[0] - waited for moment in range(moments)]
    if hours == 1:
        assert max(late) == timedelta(0) and min(late) == timedelta(seconds=-20)
    else:
        assert max(late) == hour and min(late) == timedelta(0)
