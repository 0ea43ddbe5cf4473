"""One whole minute of a real pg_cron job, begun before the tests and looked at by one, so that nobody waits for it.

The cluster lives until the end of the run; it removes itself at exit.
"""

import functools
from dataclasses import dataclass

import psycopg
from cluster import Cluster, find_bindir, has_extension
from conftest import Database

RECORD = """
create table public.ticks (at timestamptz, xid xid8 default pg_current_xact_id());
create function public.record_tick() returns trigger language plpgsql as $$
begin
  insert into public.ticks (at) values (new.last_tick_at);
  return null;
end
$$;
create trigger record_tick after update of last_tick_at on baton.state
for each row when (new.last_tick_at is distinct from old.last_tick_at) execute function public.record_tick();
"""


def has_pg_cron():
    return has_extension(find_bindir(), "pg_cron")


@dataclass
class CronMinute:
    cluster: Cluster
    database: Database
    outcome: object

    def connect(self):
        return self.database.connect()


@functools.cache
def started():
    """The cluster whose pg_cron ticks, every 5 seconds from the next full minute on."""
    cluster = Cluster(cron=True).start()
    database = Database(cluster, "postgres")
    database.install()
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin:
        admin.execute("create extension pg_cron")
        admin.execute(RECORD)
    conn = database.connect()
    conn.execute("update baton.settings set transport = 'outbox'")
    outcome = conn.execute("select * from baton.schedule('5 seconds')").fetchone()
    return CronMinute(cluster, database, outcome)
