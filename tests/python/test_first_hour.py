"""What somebody runs in the first hour, as it is printed: README.md, a start by hand, docs/guides/connecting.md."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from uuid import uuid4

import psycopg
import pytest
from cluster import clean_environ, free_port
from conftest import ROOT, TREE, Database, wait_until
from programs import EXAMPLES, Program, role
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

SQL, PYTHON = (re.compile(rf"^```{language}\n(.*?)^```$", re.M | re.S) for language in ("sql", "python"))
README = (ROOT / "README.md").read_text()
STARTS = (ROOT / "docs/guides/starts.md").read_text()
CONNECTING = (ROOT / "docs/guides/connecting.md").read_text()
ROLES = re.findall(r"grant_usage\('(\w+)'", README)


@pytest.fixture
def ascii_db(cluster, server_log):
    """In the encoding that Postgres takes where the system has no locale, in which drivers answer bytes by default."""
    name = "first_hour"
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
        admin.execute(f"drop database if exists {name} with (force)")
        admin.execute(f"create database {name} template template0 encoding 'SQL_ASCII'")
        database = Database(cluster, name)
        server_log.databases.append(name)
        database.install()
        yield database
        database.close()
        admin.execute(f"drop database {name} with (force)")


def psql(db, text):
    """What psql, which stops at an error, answers: the first column of each row."""
    answers = db.psql("-q", "-A", "-t", "-F", "\t", "-f", "-", input=text).stdout
    return [line.split("\t")[0] for line in answers.splitlines()]


def test_the_sql_of_the_readme_runs_in_its_order(db):
    blocks = [block for block in SQL.findall(README) if "vault." not in block]
    assert len(blocks) == len(SQL.findall(README)) - 1 == 5
    db.connect().execute("".join(f"create role {name}; " for name in ROLES))
    try:
        starts, secret, queue, runs, grants = (psql(db, block) for block in blocks)
        assert starts[0] == "registered" and "critical" in starts and starts[-1] == "orders"
        assert secret == []
        assert queue == ["sent", "extended", "acked"]
        assert runs == ["created", "signalled", "found"]
        assert grants == ["granted"] * 5
    finally:
        db.connect().execute(f"drop owned by {', '.join(ROLES)}; drop role {', '.join(ROLES)}")


def test_the_handler_of_the_readme_starts_one_worker_however_often_it_is_asked(db):
    [code] = PYTHON.findall(README)
    conn = db.connect()
    conn.execute("select baton.register_worker_function('orders', url => 'http://127.0.0.1/')")
    [asked] = conn.execute("select * from baton.reserve_worker_invocation('orders')").fetchall()
    booting, working = [], []
    names = {"psycopg": psycopg, "namedtuple_row": namedtuple_row, "uuid4": uuid4, "url": db.dsn, "name": "orders",
             "boot": lambda: None, "in_background": lambda *start: booting.append(start), "work": working.append}
    exec(compile(code, "README.md", "exec"), names)
    try:
        assert [names["on_request"](asked.invocation_id) for _ in range(2)] == [202, 202]
        for start, invocation_id in booting:
            start(invocation_id)
        assert names["on_request"](asked.invocation_id) == 202
        assert len(booting) == 2 and [worker.worker_id for worker in conn.execute("select * from baton.workers")] == working
        assert len(working) == 1
    finally:
        names["db"].close()


def test_a_run_of_the_readme_is_replayed_by_its_worker_in_any_encoding(ascii_db, tmp_path):
    [block] = [block for block in SQL.findall(README) if "start_run" in block]
    psql(ascii_db, block)
    worker = Program(tmp_path / "worker.log", [EXAMPLES / "worker_runs.py"], {"DATABASE_URL": ascii_db.dsn})
    try:
        worker.wait_for("ended order-7")  # until its timer
    finally:
        worker.end()


def test_a_start_as_the_guide_has_it_in_any_encoding(ascii_db, tmp_path):
    [block] = re.findall(r"^### A start, locally\n[\s\S]*?^    make setup\n((?:    .*\n)+)", STARTS, re.M)
    port = free_port()
    for printed, here in (
        (".venv/bin/python", sys.executable), ("8080", str(port)),
        (r"sleep 2\b.*", f"until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do sleep 0.1; done"),
    ):
        assert re.search(printed, block)
        block = re.sub(printed, here, block)
    env = {**clean_environ(), "DATABASE_URL": ascii_db.dsn, "PATH": f"{ascii_db.cluster.bindir}:{os.environ['PATH']}"}
    output = tmp_path / "shell.log"
    with output.open("w") as file:
        shell = subprocess.Popen(["/bin/bash", "-c", f"set -m\n{block}\nread -r\nkill %1 %2\nwait"], cwd=TREE, env=env,
                                 stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: 'handled {"order": 7}' in output.read_text() or shell.poll() is not None, "it has handled it")
        [state] = ascii_db.connect(client_encoding="utf8").execute("select startup_state from baton.worker_startup").fetchall()
    finally:
        shell.communicate(timeout=60)
    said = output.read_text()
    assert state == ("ready",), said
    assert "HTTP 202, acked" in said and "Traceback" not in said


@pytest.fixture
def code(db):
    """The guide's Python: its first block sends, its second one works."""
    conn = db.connect()
    conn.execute("create table orders (order_id integer primary key)")
    user = role(conn, "worker")
    names = {"psycopg": psycopg, "Jsonb": Jsonb, "namedtuple_row": namedtuple_row, "url": db.dsn}
    send, work = PYTHON.findall(CONNECTING)
    return SimpleNamespace(
        send=lambda: exec(compile(send, "connecting.md", "exec"), dict(names)),
        work=lambda **more: exec(compile(f"{work}\nwork({db.cluster.dsn(db.name, user=user)!r})", "connecting.md", "exec"),
                                 {**names, **more}),
        conn=conn)


def test_the_guides_application_sends_with_its_own_change_and_its_consumer_works_and_fails(code):
    code.send()
    with pytest.raises(psycopg.errors.UniqueViolation):  # the order is there: neither it nor a message comes of this
        code.send()
    handled, pauses = [], []

    def handle(payload):
        handled.append(payload)
        if len(handled) == 1:
            raise ValueError("on purpose")

    def sleep(seconds):
        pauses.append(seconds)
        code.conn.execute("update baton.messages set visible_at = now()")  # the back-off is over

    code.work(handle=handle, stopping=lambda: len(handled) == 2 and len(pauses) == 2, time=SimpleNamespace(sleep=sleep))
    assert handled == [{"order": 7}] * 2
    assert code.conn.execute("select count(*) from baton.messages").fetchone() == (0,)
    assert pauses == [1, 1]


def test_what_the_guide_watches_can_be_asked_by_an_observer(db):
    [block] = SQL.findall(CONNECTING)
    observer = role(db.connect(), "observer")
    answers = Database(db.cluster, db.name)
    answers.dsn = db.cluster.dsn(db.name, user=observer)
    assert "critical" in psql(answers, block)


# What the guide's last table says that one sees: as whom, what is called, and the words of the row.
MISTAKES = [
    (None, "select * from baton.send('q', '1')", "permission denied for schema baton"),
    ("client", "select * from baton.claim('q')", "permission denied for function"),
    ("observer", "select * from baton.runs", "permission denied for table"),
    ("worker", "select * from baton.reserve_worker_invocation('ordres')", "unknown function"),
    ("worker", "select * from baton.ack(1, 2)", "lost"),
    ("client", "select * from baton.signal_run('ordre-7', 'paid')", "terminal"),
    ("client", "begin isolation level repeatable read; select * from baton.start_run('w', '1')", "25001"),
    ("client", "select * from baton.send('q', to_jsonb(repeat(md5('x'), 1000)))", "54000"),
]


@pytest.mark.parametrize("kind, call, seen", MISTAKES, ids=[seen for *_, seen in MISTAKES])
def test_first_mistakes_look_as_the_guide_says(db, kind, call, seen):
    owner = db.connect()
    owner.execute("update baton.settings set max_payload_bytes = 1024")
    assert sum(seen in line.split("|")[1] for line in CONNECTING.splitlines() if line.startswith("|")) == 1
    owner.execute("do $$ begin create role baton_test_none login; exception when duplicate_object then null; end $$")
    user = role(owner, kind) if kind else "baton_test_none"
    with psycopg.connect(db.cluster.dsn(db.name, user=user), autocommit=True) as conn:
        try:
            said = conn.execute(call.split("; ")[0]) and conn.execute(call.split("; ")[-1]).fetchone()[0]
        except psycopg.Error as error:
            said = f"{error.sqlstate} {error.diag.message_primary}"
            assert error.sqlstate == "42501" or error.diag.message_hint
    assert seen in said
