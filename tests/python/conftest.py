"""Fixtures over one cluster, and one database a test, cloned from a template in which the package is installed.

    db            this test's database: .connect() .session() .psql() .dsn .name; a module may take clock_db for it
    clock_db      one with the clock of tests/sql/test_clock.sql
    plain_db      one without, also where db has it
    still_db      one whose tables autovacuum leaves alone, so that plans, and what they cost, change only by the test
    conn          one connection to db
    first, second two sessions of it
    process       process() -> a process of its own with a connection to it (runs.Process)
    server_log    what the server wrote since the test began: .text() .errors()
    make_cluster  a cluster of the test's own, to be crashed or given settings
    make_database a database with the package, in such a cluster
    make_pooler   a PgBouncer in transaction mode in front of a database

Rows are named tuples: equal to plain ones, with the columns as attributes. Connections are in autocommit mode; a
transaction is a `begin` and a `commit`. The helpers Session and wait_blocked can be imported from here.
"""

import itertools
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pgbouncer
import psycopg
import pytest
import skips
from cluster import Cluster, clean_environ
from pgbouncer import PgBouncer
from psycopg.rows import namedtuple_row
from pytest_postgresql.janitor import DatabaseJanitor

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / os.environ.get("BATON_TREE", ".")  # what is tested: tools/mutants sets it
INSTALL = ROOT / os.environ.get("BATON_INSTALL", "sql/install.sql")
TEST_CLOCK = ROOT / "tests/sql/test_clock.sql"
CHECKS = ROOT / "tests/sql/checks.sql"
TEMPLATE = "baton_template"
CLOCK_TEMPLATE = "baton_template_clock"
PATIENCE = float(os.environ.get("BATON_PATIENCE", 60))  # seconds: what does not happen fails, however busy the machine is
RANDOM_SECONDS = float(os.environ.get("BATON_SECONDS", 8))  # how long verbs are called at random


def wait_until(condition, what, timeout=PATIENCE, every=0.01):
    """Polls until condition() is true and returns what it said."""
    deadline = time.monotonic() + timeout
    while True:
        if answer := condition():
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"after {timeout} s still not: {what}")
        time.sleep(every)


def wait_blocked(observer_conn, pid, by=None):
    """Waits until the server says that pid (a number or a Session) is blocked, by `by` if that is given."""
    pid, by = getattr(pid, "pid", pid), getattr(by, "pid", by)

    def blocked():
        blockers = observer_conn.execute("select pg_blocking_pids(%s)", (pid,)).fetchone()[0]
        return by in blockers if by is not None else bool(blockers)

    wait_until(blocked, f"session {pid} is blocked by {by or 'anybody'}")


class Session:
    """A connection with a thread of its own, which runs one statement at a time."""

    def __init__(self, conn, name):
        self.conn = conn
        self.name = name
        self.pid = conn.info.backend_pid
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._future = None

    def start(self, sql, params=None):
        """Sends a statement and does not wait for it."""
        assert self._future is None, f"{self.name} still has a statement whose result nobody took"
        self._future = self._thread.submit(self._execute, sql, params)
        return self

    def _execute(self, sql, params):
        cursor = self.conn.execute(sql, params)
        return cursor.fetchall() if cursor.description else None

    def done(self):
        return self._future is None or self._future.done()

    def result(self, timeout=PATIENCE):
        """The rows (None of a statement without), or the statement's exception."""
        assert self._future is not None, f"{self.name} has no statement"
        rows = self._future.result(timeout)
        self._future = None
        return rows

    def error(self, timeout=PATIENCE):
        """The exception of a statement that is expected to fail."""
        assert self._future is not None, f"{self.name} has no statement"
        error = self._future.exception(timeout)
        self._future = None
        assert error is not None, f"{self.name}'s statement did not fail"
        return error

    def run(self, sql, params=None, timeout=PATIENCE):
        return self.start(sql, params).result(timeout)

    def close(self):
        if not self.done():
            self.conn.cancel_safe(timeout=PATIENCE)
        self._thread.shutdown(wait=True)
        self.conn.close()


class Database:
    """One database of a cluster; close() ends what was opened through it."""

    def __init__(self, cluster, name):
        self.cluster = cluster
        self.name = name
        self.dsn = cluster.dsn(name)
        self._open = []

    def connect(self, **kw):
        kw = {"autocommit": True, "row_factory": namedtuple_row, "options": "-c statement_timeout=60s", **kw}
        conn = psycopg.connect(self.dsn, **kw)
        self._open.append(conn)
        return conn

    def session(self, name="session", **kw):
        session = Session(self.connect(application_name=name, **kw), name)
        self._open.append(session)
        return session

    def psql(self, *args, check=True, **kw):
        """Runs psql -X with these arguments; .stdout and .stderr are text."""
        command = [f"{self.cluster.bindir}/psql", "-X", "-v", "ON_ERROR_STOP=1", "-d", self.dsn, *map(str, args)]
        done = subprocess.run(command, env=clean_environ(), cwd=ROOT, capture_output=True, text=True, **kw)
        if check and done.returncode:
            raise AssertionError(f"psql failed\n{done.stdout}{done.stderr}")
        return done

    def install(self, file=INSTALL):
        self.psql("-q", "-1", "-f", file)

    def close(self):
        while self._open:
            self._open.pop().close()


@dataclass
class RunningCluster:
    """The cluster that `tools/cluster run` started around the tests."""

    host: str
    port: str
    bindir: str
    log: str
    has_pg_cron: bool
    user: str = "postgres"

    def dsn(self, dbname="postgres", user="postgres", host=None):
        return psycopg.conninfo.make_conninfo(host=host or self.host, port=self.port, dbname=dbname, user=user)


def _janitor(cluster, name, **kw):
    return DatabaseJanitor(user=cluster.user, host=cluster.host, port=cluster.port, dbname=name, **kw)


@pytest.fixture(scope="session")
def cluster():
    """The cluster of this run: .dsn() .log .bindir .has_pg_cron"""
    own = None
    env = os.environ
    if "BATON_SERVER_LOG" not in env or "PYTEST_XDIST_WORKER" in env:  # several processes: each has its own
        own = Cluster(cron=True).start()
        env = own.env()
    yield RunningCluster(env["PGHOST"], env["PGPORT"], env["BATON_BINDIR"], env["BATON_SERVER_LOG"],
                         bool(env["BATON_HAS_CRON"]))
    if own:
        own.remove()


@pytest.fixture(scope="session")
def template(cluster):
    janitor = _janitor(cluster, TEMPLATE, as_template=True)
    janitor.drop()
    with janitor:
        Database(cluster, TEMPLATE).install()
        yield TEMPLATE


@pytest.fixture(scope="session")
def clock_template(cluster, template):
    janitor = _janitor(cluster, CLOCK_TEMPLATE, template_dbname=template, as_template=True)
    janitor.drop()
    with janitor:
        for file in (TEST_CLOCK, CHECKS):
            Database(cluster, CLOCK_TEMPLATE).install(file)
        yield CLOCK_TEMPLATE


_numbers = itertools.count(1)


def _clone(cluster, template, prefix):
    janitor = _janitor(cluster, f"{prefix}_{next(_numbers)}", template_dbname=template)
    janitor.drop()
    with janitor:
        database = Database(cluster, janitor.dbname)
        try:
            yield database
        finally:
            database.close()


@pytest.fixture
def plain_db(cluster, template, server_log):
    for database in _clone(cluster, template, "t"):
        server_log.databases.append(database.name)
        yield database


@pytest.fixture
def still_db(plain_db):
    plain_db.psql("-q", "-c", """do $$
        declare
          v_table regclass;
        begin
          for v_table in select c.oid from pg_class as c where c.relnamespace = 'baton'::regnamespace and c.relkind = 'r' loop
            execute format('alter table %s set (autovacuum_enabled = off)', v_table);
          end loop;
        end
        $$""")
    return plain_db


@pytest.fixture
def clock_db(cluster, clock_template, server_log):
    for database in _clone(cluster, clock_template, "tc"):
        server_log.databases.append(database.name)
        yield database


@pytest.fixture
def empty_db(cluster, server_log):
    """A database without the package."""
    for database in _clone(cluster, "template0", "te"):
        server_log.databases.append(database.name)
        yield database


@pytest.fixture
def db(plain_db):
    return plain_db


@pytest.fixture
def conn(db):
    return db.connect()


@pytest.fixture
def first(db):
    return db.session("first")


@pytest.fixture
def second(db):
    return db.session("second")


@pytest.fixture
def process(db):
    from runs import Process

    made = []

    def make():
        made.append(Process(db.dsn))
        return made[-1]

    yield make
    for one in made:
        one.close()


class ServerLog:
    def __init__(self, path):
        self.path = Path(path)
        self.databases = []
        self._from = self.path.stat().st_size

    def text(self):
        with self.path.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    def errors(self, ignore=None):
        """The lines of ERROR, FATAL and PANIC of this test's databases and of the server itself.

        ignore: a pattern of messages that the test provokes. Autovacuum gives way to whoever wants its table, and says so.
        """
        lines = re.findall(r"^\S+ \S+ \S+ \[\d+\] \S*?@(\S*) ((?:ERROR|FATAL|PANIC): .*)$", self.text(), re.M)
        return [line for database, line in lines
                if (not database or database in self.databases) and not (ignore and re.search(ignore, line))
                and "canceling autovacuum task" not in line]


@pytest.fixture
def server_log(cluster):
    return ServerLog(cluster.log)


@pytest.fixture
def make_cluster():
    """make_cluster(settings={...}, cron=True, relocate=True, ...) -> a started Cluster, removed after the test."""
    made = []

    def make(**kw):
        made.append(Cluster(**kw))
        return made[-1].start()

    yield make
    for one in reversed(made):
        one.remove()


@pytest.fixture
def make_database():
    """make_database(cluster, name="app", install=True) -> a new Database in a cluster that the test made."""
    made = []

    def make(cluster, name="app", install=True):
        with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
            if not conn.execute("select 1 from pg_database where datname = %s", (name,)).fetchone():
                conn.execute(psycopg.sql.SQL("create database {}").format(psycopg.sql.Identifier(name)))
        made.append(Database(cluster, name))
        if install:
            made[-1].install()
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


class Pooled(Database):
    """A database seen through a PgBouncer, which is its cluster."""

    def connect(self, **kw):
        return super().connect(**{"prepare_threshold": None, **kw})

    def server_pids(self):
        """The backends behind the pooler, as it sees them."""
        with psycopg.connect(self.cluster.dsn("pgbouncer"), autocommit=True, row_factory=namedtuple_row) as admin:
            return {row.remote_pid for row in admin.execute("show servers") if row.database == self.name}


@pytest.fixture
def make_pooler(cluster):
    """make_pooler(db, pool_size=2, ...) -> db behind a PgBouncer of its own. Skips where that is not installed."""
    if not pgbouncer.program():
        pytest.skip("pgbouncer is not installed")
    made = []

    def make(db, **kw):
        made.append(PgBouncer(cluster, **kw).start())
        made.append(Pooled(made[-1], db.name))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def pytest_collection_finish(session):
    """A minute of pg_cron begins, so that it is over when its test comes, in whatever process that is."""
    import cron_minute

    wanted = any(item.path.name == "test_zcron_minute.py" for item in session.items)
    if wanted and cron_minute.has_pg_cron() and not session.config.option.collectonly:
        cron_minute.started()


_skipped = []


def pytest_runtest_logreport(report):
    if report.outcome == "skipped":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        _skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))


def pytest_collectreport(report):
    if report.skipped:
        _skipped.append((report.nodeid, report.longrepr[2].removeprefix("Skipped: ")))


def pytest_sessionfinish(session):
    if skips.strict() and skips.unlisted(_skipped) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if skips.strict():
        for name, reason in skips.unlisted(_skipped):
            terminalreporter.write_line(f"skipped, but not in tests/allowed-skips.txt: {name}  {reason}", red=True)
