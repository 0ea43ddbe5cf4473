"""procrastinate for the benchmark (PyPI)."""

from __future__ import annotations

from bench_peer import FromPyPI, bind, find


class Procrastinate(FromPyPI):
    name = "procrastinate"
    packages = ["procrastinate==3.10.0", "psycopg[binary]==3.3.9"]
    driver = "bench_procrastinate_driver.py"
    schema = "public"
    left = "select count(*) from procrastinate_jobs where status = 'todo' and coalesce(scheduled_at, now()) <= now()"
    clear = "truncate procrastinate_jobs cascade"

    delayed = """
        set local session_replication_role = replica;
        insert into procrastinate_jobs (queue_name, task_name, args, scheduled_at)
        select 'bench', 'bench', '{"n": 1}', now() + '1 day' from generate_series(1, %(rows)s)
    """
    finished = """
        set local session_replication_role = replica;
        insert into procrastinate_jobs (queue_name, task_name, args, status, attempts)
        select 'bench', 'bench', '{"n": 1}', 'succeeded', 1 from generate_series(1, %(rows)s)
    """

    def prepare(self, bench):
        self.drive(bench, "schema")
        with bench.connect() as conn:
            (worker,) = conn.execute("select worker_id from procrastinate_register_worker_v1()").fetchone()
            # A worker of theirs would remove it when it has been silent.
            conn.execute("update procrastinate_workers set last_heartbeat = 'infinity' where id = %s", [worker])
        self.enqueue = {}
        for batch in (1, 10, 100):
            logged = self.learn(bench, batch)
            self.enqueue[batch] = bind(find(logged, "procrastinate_defer_jobs")) + ";\n"
            if batch == 1:
                claim = bind(find(logged, "procrastinate_fetch_job"), p2=f"'{worker}'")
                complete = bind(find(logged, "procrastinate_finish_job"), p1=":id")
                self.finish = {1: f"{claim} \\gset\n{complete};\n"}
