"""The harness itself: clusters start, crash, move and go away; the fixtures do what the tests rely on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from conftest import ROOT, wait_blocked, wait_until

TOOL = [sys.executable, str(ROOT / "tools/cluster")]
# What a child of tools/cluster prints to tell where its cluster is.
TELL = "from os import environ as e, path; print(path.dirname(e['PGHOST']), flush=True)"


def runs(pid):
    """Is there such a process, and not only a dead one that its parent has not asked about yet?"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_committed_work_outlives_a_crash_of_the_server(make_cluster):
    cluster = make_cluster()
    with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
        conn.execute("create table kept (n int)")
        conn.execute("insert into kept values (1)")
        cluster.restart("immediate")
        with pytest.raises(psycopg.OperationalError):
            conn.execute("select 1")
    with psycopg.connect(cluster.dsn()) as conn:
        assert conn.execute("select n from kept").fetchall() == [(1,)]
    assert "was not properly shut down" in Path(cluster.log).read_text()


def test_a_cluster_is_reached_over_tcp_too_and_takes_settings(make_cluster):
    cluster = make_cluster(settings={"work_mem": "7MB", "application_name": "it's \\ odd"})
    with psycopg.connect(cluster.dsn(host="127.0.0.1")) as conn:
        assert conn.execute("show work_mem").fetchone()[0] == "7MB"
        assert conn.execute("select reset_val from pg_settings where name = 'application_name'").fetchone()[0] == (
            "it's \\ odd")


def test_a_relocated_server_takes_an_extension_from_its_own_share_folder(make_cluster):
    cluster = make_cluster(relocate=True)
    assert cluster.sharedir.startswith(os.path.dirname(cluster.datadir))
    Path(cluster.sharedir, "extension/only_here.control").write_text("default_version = '1'\n")
    Path(cluster.sharedir, "extension/only_here--1.sql").write_text("create function here() returns int return 1;\n")
    with psycopg.connect(cluster.dsn()) as conn:
        conn.execute("create extension only_here")
        assert conn.execute("select here()").fetchone()[0] == 1


def test_removing_a_cluster_leaves_nothing(make_cluster):
    cluster = make_cluster()
    base = os.path.dirname(cluster.datadir)
    pid = int(Path(cluster.datadir, "postmaster.pid").read_text().splitlines()[0])
    cluster.remove()
    assert not os.path.exists(base)
    assert not runs(pid)


def test_the_tool_gives_the_status_of_its_command():
    done = subprocess.run([*TOOL, "run", "--", sys.executable, "-c", TELL + "; exit(7)"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert not os.path.exists(done.stdout.strip())


def test_the_command_finds_the_cluster_by_its_url_too():
    code = "import os, psycopg; url = os.environ['DATABASE_URL']; print(*psycopg.connect(url).execute('show port').fetchone())"
    done = subprocess.run([*TOOL, "run", "--", sys.executable, "-c", code + "; print(os.environ['PGPORT'])"],
                          capture_output=True, text=True, timeout=60)
    port, environ_port = done.stdout.split()
    assert port == environ_port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_tool_leaves_no_cluster(number):
    with subprocess.Popen([*TOOL, "run", "--", sys.executable, "-c", TELL + "; input()"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as tool:
        base = tool.stdout.readline().strip()
        pid = int(Path(base, "data/postmaster.pid").read_text().splitlines()[0])
        tool.send_signal(number)
        tool.wait(60)
    assert tool.returncode == (128 + number if number == signal.SIGTERM else -number)
    wait_until(lambda: not os.path.exists(base), f"{base} is removed")
    assert not runs(pid)


def test_each_test_has_a_database_of_its_own_with_the_package(conn, db):
    assert conn.execute("select current_database()").fetchone()[0] == db.name
    assert conn.execute("select to_regnamespace('baton') is not null").fetchone()[0]


def test_the_test_clock_moves_only_when_told(clock_db):
    conn = clock_db.connect()
    assert str(conn.execute("select baton._now() at time zone 'utc'").fetchone()[0]) == "2026-01-01 00:00:00"
    conn.execute("select baton_test.advance('1 day 1 millisecond')")
    assert str(conn.execute("select baton._now() at time zone 'utc'").fetchone()[0]) == "2026-01-02 00:00:00.001000"
    conn.execute("select baton_test.set_clock('2030-01-01 00:00:00+00')")
    assert str(conn.execute("select baton._now() at time zone 'utc'").fetchone()[0]) == "2030-01-01 00:00:00"


def test_a_blocked_session_is_seen_with_its_blocker(db):
    observer, ann, bob = db.connect(), db.session("ann"), db.session("bob")
    observer.execute("create table t as select 1 as n")
    ann.run("begin")
    ann.run("update t set n = 2")
    bob.start("update t set n = n + 10 returning n")
    wait_blocked(observer, bob, by=ann)
    assert not bob.done()
    with pytest.raises(AssertionError, match="still has a statement"):
        bob.start("select 1")
    ann.run("commit")
    assert bob.result() == [(12,)]


def test_the_server_log_is_filtered_by_database_and_time(conn, server_log):
    assert server_log.errors() == []
    with pytest.raises(psycopg.errors.DivisionByZero):
        conn.execute("select 1 / 0")
    assert server_log.errors() == ["ERROR:  division by zero"]
    assert server_log.errors(ignore="division by zero") == []
    assert "select 1 / 0" in server_log.text()
