"""What ensure_workers costs when there is nothing to do, in buffers and WAL."""

import pytest
from starts import call


@pytest.fixture
def db(still_db):
    return still_db


def healthy_functions(conn, first, last):
    conn.execute("""
        insert into baton.worker_functions (function_name, queue_name, url, heartbeat_timeout)
        select 'f-' || n, 'f-' || n, 'http://127.0.0.1:9', '1 day'
        from generate_series(%(first)s::integer, %(last)s::integer) as n
    """, {"first": first, "last": last})
    conn.execute("""
        insert into baton.workers (worker_id, function_name, handshake, started_at, last_heartbeat_at)
        select gen_random_uuid(), 'f-' || n, true, baton._now(), baton._now()
        from generate_series(%(first)s::integer, %(last)s::integer) as n
    """, {"first": first, "last": last})
    conn.execute("vacuum (analyze) baton.worker_functions, baton.workers, baton.settings")


def cost(db):
    """Buffers and WAL records of one ensure_workers, in a session that has done it before."""
    conn = db.connect()
    for _ in range(2):
        [(plan,)] = conn.execute("explain (analyze, buffers, wal, format json) select * from baton.ensure_workers()")
    top = plan[0]["Plan"]
    assert top["Actual Rows"] == 0
    return top["Shared Hit Blocks"] + top["Shared Read Blocks"], top["WAL Records"], top["Shared Dirtied Blocks"]


def test_ten_thousand_healthy_functions_cost_reads_in_proportion_and_no_write(db, conn):
    conn.execute("update baton.settings set transport = 'outbox'")
    healthy_functions(conn, 1, 1000)
    thousand, _, _ = cost(db)
    healthy_functions(conn, 1001, 10000)
    ten_thousand, wal_records, dirtied = cost(db)
    assert ten_thousand <= 12 * thousand, (ten_thousand, thousand)
    assert (wal_records, dirtied) == (0, 0)


def test_one_call_starts_at_most_a_hundred_and_the_longest_uninvoked_first(db, conn):
    conn.execute("update baton.settings set transport = 'outbox'")
    healthy_functions(conn, 1, 300)
    conn.execute("update baton.workers set stopped_at = baton._now()"
                 " where split_part(function_name, '-', 2)::integer > 50")
    conn.execute("update baton.worker_functions set last_invoked_at = baton._now() - interval '1 day'"
                 " - split_part(function_name, '-', 2)::integer * interval '1 s'"
                 " where split_part(function_name, '-', 2)::integer > 60")
    rows = call(conn, "ensure_workers")
    assert {row.outcome for row in rows} == {"reserved"}
    never_invoked = sorted(f"f-{n}" for n in range(51, 61))
    assert [row.function_name for row in rows] == never_invoked + [f"f-{n}" for n in range(300, 210, -1)]
    assert [len(call(conn, "ensure_workers")) for _ in range(3)] == [100, 50, 0]
