"""What pg_cron did in the minute that began before the tests."""

import re
from collections import Counter
from pathlib import Path

import cron_minute
import pytest
from conftest import wait_until
from starts import call

pytestmark = pytest.mark.skipif(not cron_minute.has_pg_cron(), reason="pg_cron is not installed")


def test_pg_cron_ticks_through_a_whole_minute():
    """About twelve ticks in a minute and on into the next one, each in a transaction of its own."""
    minute = cron_minute.started()
    assert minute.outcome.outcome == "scheduled"
    conn = minute.connect()
    wait_until(lambda: conn.execute("select max(at) - min(at) > '62 s' from public.ticks").fetchone()[0],
               "a whole minute of ticks", timeout=150, every=0.5)
    ticks = conn.execute("select at, xid from public.ticks where at < (select min(at) + '1 minute' from public.ticks)"
                         " order by at").fetchall()
    assert 10 <= len(ticks) <= 13, ticks
    assert max(Counter(xid for _, xid in ticks).values()) == 1

    runs = dict(conn.execute("select status, count(*) from cron.job_run_details group by status").fetchall())
    assert "failed" not in runs
    severities = {h.finding: h.severity for h in call(conn, "health")}
    assert (severities["tick"], severities["cron_job"]) == ("ok", "ok")
    log = Path(minute.cluster.log).read_text()
    assert not re.findall("ERROR: .*", log)
