"""docs/operating.md: each query and verb, as it is printed, by the roles that the page makes, in a database in that trouble."""

import re

import psycopg
import pytest
from conftest import ROOT, wait_blocked
from psycopg.rows import namedtuple_row
from runs import append, granted, signal, start, superseded
from starts import call, one, register, reserve
from tasks import complete, create, inline, replay, started, take_task
from test_metrics import samples

PAGE = (ROOT / "docs/operating.md").read_text()
SQL = re.compile(r"^```sql\n(.*?)^```$", re.M | re.S)
SECTIONS = {m[1]: SQL.findall(m[3]) for m in re.finditer(r"^### (\d+)\. ([^\n]*)\n(.*?)(?=^##)", PAGE, re.M | re.S)}
[WHO_MAY] = SQL.findall(re.search(r"^## Who may\n(.*?)(?=^## )", PAGE, re.M | re.S)[1])
WORKER = "00000000-0000-0000-0000-000000000001"


def statements(block):
    return [s for s in re.split(r";[^;\n]*\n", block + "\n") if s.strip()]


class Operator:
    """A session of the role that the page makes, which runs the page's blocks, one by one."""

    def __init__(self, db):
        self.conn = db.connect()
        self.conn.execute(WHO_MAY)
        self.session = psycopg.connect(db.cluster.dsn(db.name, user="baton_operator"), autocommit=True,
                                       row_factory=namedtuple_row)
        self.watcher = psycopg.connect(db.cluster.dsn(db.name, user="baton_watcher"), autocommit=True)
        self.left = {}

    def ask(self, number):
        """The answers of the section's next block, a list of rows for each statement."""
        blocks = self.left.setdefault(number, list(SECTIONS[str(number)]))
        return [self.session.execute(statement).fetchall() for statement in statements(blocks.pop(0))]

    def close(self):
        self.session.close()
        self.watcher.close()
        self.conn.execute("drop owned by baton_operator, baton_watcher; drop role baton_operator, baton_watcher")
        assert not any(self.left.values()), "a block of the page was not run"


@pytest.fixture
def operator(db):
    made = Operator(db)
    yield made
    made.close()


@pytest.fixture
def night(operator):
    """The owner's connection to a database that ticks."""
    operator.conn.execute("update baton.settings set transport = 'outbox'")
    call(operator.conn, "tick")
    return operator.conn


def test_the_page_has_ten_questions_and_a_test_for_each():
    tests = [name for name in globals() if re.match(r"test_\d+_", name)]
    assert list(SECTIONS) == [str(n) for n in range(1, 11)] == sorted((n.split("_")[1] for n in tests), key=int)
    assert all(SECTIONS.values())
    assert len(SQL.findall(PAGE)) == 1 + sum(map(len, SECTIONS.values()))


def test_a_watcher_sees_and_does_nothing(operator, night):
    assert operator.watcher.execute("select count(*) from baton.health()").fetchone()[0] > 0
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        operator.watcher.execute("select baton.tick()")


def test_1_is_it_well(operator, night):
    inline(night)
    night.execute("update baton.settings set recovery = true")
    night.execute("delete from baton.messages")
    night.execute("update baton.runs set wake_pending = true")
    call(night, "recover_runs")
    night.execute("update baton.state set last_tick_at = last_tick_at - interval '1 hour'")
    [found] = operator.ask(1)
    assert (found[0].severity, found[0].finding) == ("critical", "tick") and "baton" in found[0].advice
    assert "ok" not in {row.severity for row in found}
    [repaired] = operator.ask(1)
    assert [(row.kind, row.count, row.example) for row in repaired] == [("run_recovered", 1, "r")]
    call(night, "tick")
    operator.left[1] = SECTIONS["1"][:1]
    assert "critical" not in {row.severity for row in operator.ask(1)[0]}


def test_2_why_does_no_worker_start(operator, night):
    register(night)
    register(night, "fine")
    one(night, "register_worker", worker_id=WORKER, function_name="fine")
    for _ in range(3):
        night.execute("update baton.worker_functions set last_invoked_at = last_invoked_at - interval '1 hour'")
        answer = one(night, "reserve_worker_invocation", function_name="orders")
        one(night, "dismiss_worker_invocation", function_name="orders", invocation_id=answer.invocation_id,
            reason="no memory")
    [[row]] = operator.ask(2)
    assert (row.function_name, row.startup_state, row.failed_starts) == ("orders", "throttled", 3)
    assert (row.invocation_error, row.invocation_detail) == ("dismissed", "no memory")
    assert row.seconds_until_next_attempt > 0
    [enabled], [ensured] = operator.ask(2)
    assert (enabled.outcome, ensured.outcome, ensured.function_name) == ("enabled", "reserved", "orders")


def test_3_why_does_this_queue_not_move(operator, night):
    register(night, "idle", queue_name="other")
    one(night, "register_worker", worker_id=WORKER, function_name="idle")
    for queue in ("stuck", "stuck", "other"):
        call(night, "send", queue_name=queue, payload="1")
    night.execute("update baton.messages set visible_at = visible_at - interval '1 hour' where queue_name = 'stuck'")
    call(night, "claim", queue_name="other")
    [[first, *rest]] = operator.ask(3)
    assert (first.queue_name, first.ready, first.healthy_workers) == ("stuck", 2, None)
    assert first.oldest_ready_age.total_seconds() > 3590
    assert [(row.queue_name, row.ready, row.in_flight, row.healthy_workers) for row in rest] == [("other", 0, 1, 1)]
    call(night, "send", queue_name="mail", payload="1")
    assert operator.ask(3) == [[("paused", False)]]
    assert call(night, "claim", queue_name="mail") == []
    assert operator.ask(3) == [[("resumed", True)]]
    assert len(call(night, "claim", queue_name="mail")) == 1


def test_4_what_died_and_how_does_it_come_back(operator, night):
    for queue, key, error in (("mail", "a", "smtp: connection refused"), ("mail", "b", "smtp: connection refused"),
                              ("mail", None, "no such address"), ("other", None, "smtp: connection refused")):
        call(night, "send", queue_name=queue, payload="1", dedupe_key=key)
        [message] = call(night, "claim", queue_name=queue)
        call(night, "fail", message_id=message.message_id, delivery=message.delivery, error=error, final=True)
    call(night, "send", queue_name="mail", payload="1", dedupe_key="b")
    [dead] = operator.ask(4)
    assert dead[0][:4] == ("mail", "final", "smtp: connection refused", 2) and len(dead) == 3
    [brought] = operator.ask(4)
    assert sorted(brought) == [("key_taken", 1), ("redriven", 1)]
    assert len(call(night, "claim", queue_name="mail", max_messages=9)) == 2
    assert operator.ask(4) == [[("discarded", 1)]]


def test_5_where_does_this_run_stand(operator, night):
    start(night, "order-7")
    _, epoch = granted(night, "order-7")
    append(night, epoch, "orders.checked", "order-7")
    signal(night, "order-7", "paid")
    call(night, "release_replay", run_id="order-7")
    [stands], events, incidents = operator.ask(5)
    assert (stands.run_id, stands.status, stands.last_seq, stands.unread) == ("order-7", "running", 3, True)
    assert [e.type for e in events] == ["signal_received", "orders.checked", "run_created"]
    assert [(i.kind, i.detail) for i in incidents] == [("operator", {"verb": "release_replay"})]


def test_6_which_runs_are_stuck(operator, night):
    for run_id in ("old", "new", "lost"):
        start(night, run_id)
    night.execute("update baton.runs set created_at = created_at - interval '1 day', failures = 4 where run_id = 'old'")
    night.execute("delete from baton.messages where run_id = 'lost'")
    assert operator.ask(6) == [[("lost", "w", "q", "pending", "replay")]]
    assert operator.ask(6) == [[("lost", "replay")]]
    [active] = operator.ask(6)
    assert [row.run_id for row in active] == ["old", "new", "lost"] and active[0].failures == 4
    operator.left[6] = SECTIONS["6"][:1]
    assert operator.ask(6) == [[]]


def test_7_who_holds_this_replay_and_does_not_let_go(operator, night):
    start(night, "order-7")
    one(night, "register_worker_function", function_name="f", queue_name="q", start_mode="process")
    one(night, "register_worker", worker_id=WORKER, function_name="f")
    _, epoch = granted(night, "order-7", "session", visibility="1 hour", worker_id=WORKER)
    night.execute("update baton.runs set replay_began_at = replay_began_at - interval '20 minutes'")
    [[held]] = operator.ask(7)
    assert (held.run_id, held.alive, str(held.worker_id)) == ("order-7", True, WORKER)
    assert held.backend == night.info.backend_pid and held.age.total_seconds() >= 1200
    assert operator.ask(7) == [[("released",)]]
    with superseded():
        append(night, epoch, "orders.checked", "order-7")
    assert granted(night, "order-7")[1] != epoch


def test_8_which_bodies_run_and_how_do_i_get_rid_of_one_that_hangs(operator, night):
    start(night, "order-7")
    receipt, epoch = granted(night, "order-7", visibility="1 hour")
    for slug in ("charge", "mail", "survey"):
        assert create(night, epoch, slug, run_id="order-7") == "created"
    _, bodies = replay(night, receipt, epoch, 3, "order-7")
    night.execute("update baton.tasks set last_started_at = last_started_at - interval '1 day' where step_slug = 'charge'")
    [running] = operator.ask(8)
    assert [(row.step_slug, row.alive, row.owner_kind) for row in running][0] == ("charge", True, "run")
    assert len(running) == 3 and running[0].age.days == 1
    [requeued], [failed] = operator.ask(8)
    assert (requeued.outcome, failed.outcome, failed.status) == ("released", "released", "failed")
    assert complete(night, bodies[0], "order-7").outcome == "lost"
    assert started(night, take_task(night)).step_slug == "charge"
    assert operator.ask(8) == [[("done", "skipped")]]
    events = [e.type for e in call(night, "read_events", run_id="order-7")]
    assert {"task_released", "step_failed", "step_skipped"} <= set(events)


def test_9_how_do_i_stop_a_run_or_a_bad_deployment(operator, night):
    start(night, "order-7")
    for n in range(3):
        call(night, "start_run", workflow_name="order", input="1", run_id=f"bad {n}")
    call(night, "start_run", workflow_name="other", input="1", run_id="good")
    register(night)
    reserve(night)
    one(night, "register_worker", worker_id=WORKER, function_name="orders")
    assert operator.ask(9) == [[("done", "cancelled")]]
    assert operator.ask(9) == [[("done", 3)]]
    assert one(night, "get_run", run_id="good").status == "pending"
    [[deprecated]] = operator.ask(9)
    assert (deprecated.outcome, deprecated.was_enabled) == ("deprecated", True)
    assert one(night, "heartbeat", worker_id=WORKER).outcome == "deprecated"
    assert call(night, "ensure_workers") == []


def test_10_why_is_everything_slow(operator, db, night):
    start(night)
    granted(night, visibility="1 hour")
    night.execute("update baton.runs set replay_began_at = replay_began_at - interval '20 minutes'")
    call(night, "send", queue_name="q2", payload="1", dedupe_key="k")
    holder, waiter = db.session("holder"), db.session("waiter")
    holder.run("begin")
    holder.run("select * from baton.signal_run('r', 'x')")
    waiter.start("select * from baton.signal_run('r', 'y')")
    wait_blocked(night, waiter, holder)
    [findings] = operator.ask(10)
    assert [(row.finding, row.subject) for row in findings] == [("long_replay", "r")]
    [[waiting]] = operator.ask(10)
    assert (waiting.pid, waiting.application_name, waiting.blocked_by) == (waiter.pid, "waiter", [holder.pid])
    night.execute("select pg_terminate_backend(%s)", (holder.pid,))
    assert waiter.result()[0].outcome == "signalled"


# --- metrics ------------------------------------------------------------------------------------


def test_the_table_of_metrics_is_that_of_the_package(night):
    register(night)
    inline(night)
    call(night, "send", queue_name="q", payload="1")
    night.execute("update baton.state set last_tick_at = null")
    table = {name: set(filter(None, labels.strip().split(", ")))
             for name, labels in re.findall(r"^\| `(baton_\w+)` \|([^|]*)\|", PAGE, re.M)}
    found = {}
    for name, labels in samples(night):
        found.setdefault(name, set()).update(label for label, _ in labels)
    assert table == found


def test_what_the_page_would_alert_on_exists(night):
    alerts = re.findall(r"^    (\S*.*baton_.*)$", PAGE.split("Worth an alert:")[1], re.M)
    assert len(alerts) == 5
    names = {name for name, _ in samples(night)} | {"baton_queue_oldest_ready_age_seconds"}
    assert {name for alert in alerts for name in re.findall(r"baton_\w+", alert)} <= names
    kinds = {dict(labels)["kind"] for name, labels in samples(night) if name == "baton_incidents_total"}
    text = PAGE.split("Of the incidents,")[1].split("Worth an alert")[0]
    explained = {word for word in re.findall(r"`(\w+)`", text) if word != "incident_log"}
    assert explained <= kinds and len(explained) >= 6
