"""Findings of health() about the server, which need sessions and servers of their own."""

from pathlib import Path

from conftest import wait_until
from starts import call


def findings(conn, finding):
    return [h for h in call(conn, "health") if h.finding == finding]


def test_a_transaction_that_holds_back_vacuum_is_found_while_it_is_open(clock_db):
    """The clock of the package is set ahead of the one that transactions have: so they are as old as the test wants."""
    conn, reader = clock_db.connect(), clock_db.connect()
    reader.execute("begin isolation level repeatable read")
    reader.execute("select 1")
    began = reader.execute("select transaction_timestamp() as at").fetchone().at
    conn.execute("select baton_test.set_clock(%s::timestamptz + interval '10 minutes')", (began,))
    [well] = findings(conn, "oldest_snapshot")
    assert (well.severity, well.detail, well.subject, well.advice) == (
        "ok", "the oldest transaction is 00:10:00 old", None, None)
    conn.execute("select baton_test.advance('1 second')")
    [old] = findings(conn, "oldest_snapshot")
    assert (old.severity, old.detail) == ("warning", "the oldest transaction is 00:10:01 old")
    assert old.subject == f"pid {reader.info.backend_pid}" and "end it" in old.advice
    reader.execute("rollback")
    assert old.subject not in [h.subject for h in findings(conn, "oldest_snapshot")]


def test_an_owner_who_cannot_see_the_transactions_of_others_is_told(db, conn):
    """As such an owner: the function that health() calls runs with the owner's rights."""
    conn.execute("create role blind_owner")
    try:
        conn.execute("grant usage on schema baton to blind_owner")
        conn.execute("grant execute on function baton._health_vacuum(), baton._now() to blind_owner")

        def look():
            conn.execute("set role blind_owner")
            [found] = [h for h in call(conn, "_health_vacuum") if h.finding == "oldest_snapshot"]
            conn.execute("reset role")
            return found

        found = look()
        assert "other roles can't be seen" in found.detail
        assert found.advice == "grant pg_read_all_stats to blind_owner"
        conn.execute(found.advice)
        assert (look().advice, "can't be seen" in look().detail) == (None, False)
    finally:
        conn.execute("drop owned by blind_owner; drop role blind_owner")


def test_a_table_that_is_mostly_dead_rows_is_found_until_it_is_vacuumed(conn):
    def settle(dead, live):
        """Waits until the statistics tell so."""
        wait_until(lambda: conn.execute("select n_dead_tup, n_live_tup from pg_stat_user_tables"
                                        " where relid = 'baton.messages'::regclass").fetchone() == (dead, live),
                   f"{dead} rows are dead, {live} live")

    def add(count):
        conn.execute("insert into baton.messages (queue_name, visible_at, created_at)"
                     " select 'q', baton._now(), baton._now() from generate_series(1, %s)", (count,))

    def remove(count):
        conn.execute("delete from baton.messages where message_id in"
                     " (select message_id from baton.messages order by message_id limit %s)", (count,))

    conn.execute("alter table baton.messages set (autovacuum_enabled = off)")
    add(11_500)
    remove(10_000)
    settle(10_000, 1500)
    assert findings(conn, "dead_rows") == [], "10,000 are not many"
    remove(1)
    settle(10_001, 1499)
    [found] = findings(conn, "dead_rows")
    assert (found.severity, found.subject, found.detail) == (
        "warning", "messages", "about 10001 dead rows beside 1499 live ones (estimates)")
    add(502)
    settle(10_001, 2001)
    assert findings(conn, "dead_rows") == [], "a fifth lives"
    remove(1)
    settle(10_002, 2000)
    assert len(findings(conn, "dead_rows")) == 1
    conn.execute("vacuum baton.messages")
    settle(0, 2000)
    assert findings(conn, "dead_rows") == []


def test_a_database_that_takes_no_writes_is_found(db, conn):
    conn.execute(f"alter database {db.name} set default_transaction_read_only = on")
    [found] = findings(db.connect(), "read_only")
    assert found.severity == "critical" and "25006" in found.detail and "reset" in found.advice
    conn.execute(f"alter database {db.name} reset default_transaction_read_only")
    assert findings(db.connect(), "read_only") == []


def test_one_who_only_looks_is_no_finding(db):
    assert findings(db.connect(options="-c default_transaction_read_only=on"), "read_only") == []
    conn = db.connect()
    conn.execute("begin read only")
    assert findings(conn, "read_only") == []
    conn.execute("rollback")


def test_a_standby_is_found(make_cluster, make_database):
    cluster = make_cluster()
    db = make_database(cluster)
    assert findings(db.connect(), "read_only") == []
    db.close()
    cluster.stop()
    signal = Path(cluster.datadir, "standby.signal")
    signal.touch()
    signal.chmod(0o666)
    cluster.start()
    [found] = findings(db.connect(), "read_only")
    assert found.severity == "critical" and "standby" in found.detail and found.advice == "connect to the primary"
    assert call(db.connect(), "metrics")
