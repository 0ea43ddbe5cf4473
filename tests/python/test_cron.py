"""schedule() and unschedule() on the real pg_cron of this machine, and the job that they make.

That pg_cron really runs it is looked at by test_zcron_minute.py.
"""

import cron_minute
import pytest
from starts import call, one

needs_pg_cron = pytest.mark.skipif(not cron_minute.has_pg_cron(), reason="pg_cron is not installed")


@pytest.fixture
def cron(make_cluster, make_database):
    cluster = make_cluster(cron=True)
    conn = make_database(cluster, name="postgres").connect()
    conn.execute("create extension pg_cron")
    return conn


def jobs(conn):
    return conn.execute("select jobname, schedule, command, username, database, active from cron.job").fetchall()


@needs_pg_cron
def test_one_job_changed_in_place_and_taken_away(cron):
    assert one(cron, "unschedule").outcome == "unscheduled"
    assert jobs(cron) == []
    version = cron.execute("select extversion from pg_extension where extname = 'pg_cron'").fetchone()[0]
    old = tuple(map(int, version.split("-")[0].split("."))) < (1, 5)

    row = one(cron, "schedule", tick_every="5 seconds")
    assert row.outcome == "scheduled" and version in row.detail
    minute = ("* * * * *", "call baton._tick_for_a_minute('00:00:05')")
    expected = minute if old else ("5 seconds", "select * from baton.tick()")
    assert jobs(cron) == [("pg_baton tick", *expected, "postgres", "postgres", True)]
    [(job_id,)] = cron.execute("select jobid from cron.job").fetchall()

    assert one(cron, "schedule", tick_every="1 minute").outcome == "scheduled"
    assert jobs(cron) == [("pg_baton tick", "* * * * *", "select * from baton.tick()", "postgres", "postgres", True)]
    assert cron.execute("select jobid from cron.job").fetchall() == [(job_id,)]

    cron.execute("update cron.job set active = false")
    assert [h.severity for h in call(cron, "health") if h.finding == "cron_job"] == ["critical"]
    assert one(cron, "schedule").outcome == "scheduled"
    assert [j.active for j in jobs(cron)] == [True]

    cron.execute("update baton.settings set retention = '30 days'")
    assert one(cron, "schedule").outcome == "scheduled"
    assert sorted(j.jobname for j in jobs(cron)) == ["pg_baton prune", "pg_baton tick"]
    command = cron.execute("select command from cron.job where jobname = 'pg_baton prune'").fetchone().command
    assert cron.execute(command).fetchall() == [(0, False)]

    cron.execute("select cron.schedule('of somebody else', '0 0 1 1 *', 'select 1')")
    assert one(cron, "unschedule").outcome == "unscheduled"
    assert [j.jobname for j in jobs(cron)] == ["of somebody else"]


@needs_pg_cron
def test_only_the_packages_own_runs_are_purged_and_only_the_old_ones(cron):
    assert one(cron, "schedule", tick_every="1 minute").outcome == "scheduled"
    [(job_id,)] = cron.execute("select jobid from cron.job").fetchall()
    cron.execute("""
        insert into cron.job_run_details (jobid, runid, database, username, command, status)
        select case when n % 2 = 0 then %s else 999 end, n, 'postgres', 'postgres', 'select 1', 'connecting'
        from generate_series(1, 3000) as n
    """.replace("n % 2", "n %% 2"), (job_id,))
    assert ("cron_runs", 1000) in [(r.part, r.changed) for r in call(cron, "tick")]
    left = dict(cron.execute("select jobid, count(*) from cron.job_run_details group by 1").fetchall())
    assert left == {job_id: 500, 999: 1500}
    assert "cron_runs" not in [r.part for r in call(cron, "tick")]


def test_the_job_runs_no_operator_of_another_schema(conn):
    """One that fits better than pg_catalog's, or that comes before it: the job has the rights of the owner."""
    conn.execute("""
        create function public.better(interval, integer) returns interval language plpgsql
        as $$ begin raise exception 'stolen'; end $$;
        create operator public./ (leftarg = interval, rightarg = integer, function = public.better);
        create function public.before(timestamptz, interval) returns timestamptz language plpgsql
        as $$ begin raise exception 'stolen'; end $$;
        create operator public.+ (leftarg = timestamptz, rightarg = interval, function = public.before);
    """)
    for path in "public", "public, pg_catalog":
        conn.execute(f"set search_path = {path}")
        conn.execute("call baton._tick_for_a_minute('1 minute')")


def test_the_job_ticks_twelve_times_a_minute_and_commits_each_time(conn):
    """With a clock that leaps at every look after the first, so that it never sleeps."""
    conn.execute(cron_minute.RECORD)
    conn.execute("""
        create sequence public.looks;
        create or replace function baton._now() returns timestamptz language sql volatile
        as $$ select timestamptz '2026-01-01' + greatest(nextval('public.looks') - 1, 0) * interval '5 seconds' $$;
    """)
    conn.execute("call baton._tick_for_a_minute('5 seconds')")
    ticks = conn.execute("select at, xid from public.ticks order by at").fetchall()
    assert len(ticks) == 12
    assert len({xid for _, xid in ticks}) == 12
