"""pg_cron, pg_net and Vault are in the database, but the owner of the package may not use their schemas."""

import pytest
from conftest import INSTALL, ROOT
from starts import call, one

OWNER = "baton_plain_owner"


@pytest.fixture
def conn(empty_db):
    conn = empty_db.connect()
    for file in ("cron", "pg_net", "vault"):
        empty_db.psql("-q", "-1", "-f", ROOT / f"tests/standin/{file}.sql")
    conn.execute("revoke usage on schema net from public")
    conn.execute(f"create role {OWNER}")
    try:
        conn.execute(f"grant create on database {empty_db.name} to {OWNER}")
        empty_db.psql("-q", "-1", "-c", f"set role {OWNER}", "-f", INSTALL)
        yield conn
    finally:
        conn.execute(f"drop owned by {OWNER} cascade")
        conn.execute(f"drop role {OWNER}")


def test_nothing_fails_and_health_tells(conn):
    one(conn, "register_worker_function", function_name="orders", url="http://127.0.0.1:9/", secret_name="key")
    assert [(row.outcome, row.detail) for row in call(conn, "ensure_workers")] == [("reserved", None)]
    assert [row.part for row in call(conn, "tick") if row.error] == []
    assert one(conn, "schedule").outcome == one(conn, "unschedule").outcome == "unavailable"

    told = {row.finding: row.detail for row in call(conn, "health")}
    assert told["transport"].endswith(f"pg_net can't be used: role {OWNER} has no USAGE on schema net")
    assert told["cron_job"].startswith(f"pg_cron can't be used: role {OWNER} has no USAGE on schema cron")

    conn.execute("update baton.settings set transport = 'pg_net'")
    told = {row.finding: row.detail for row in call(conn, "health")}
    assert told["credential"] == f"Supabase Vault can't be used: role {OWNER} has no USAGE on schema vault"


def test_uninstall_works(conn, empty_db):
    empty_db.psql("-q", "-1", "-f", ROOT / "sql/uninstall.sql")
    assert conn.execute("select to_regnamespace('baton')").fetchone()[0] is None
