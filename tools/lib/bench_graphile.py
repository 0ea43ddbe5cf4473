"""graphile-worker for the benchmark (npm)."""

from __future__ import annotations

from bench_peer import FromNpm, bind, find

GET = "update .*_private_jobs as jobs"
DELETE = "delete from .*_private_jobs as jobs"


class Graphile(FromNpm):
    name = "graphile-worker"
    schema = "graphile_worker"
    packages = ["graphile-worker@0.17.3"]  # the last one for Node 20
    driver = "bench_graphile.js"
    left = "select count(*) from graphile_worker._private_jobs where run_at <= now()"
    clear = "truncate graphile_worker._private_jobs"

    delayed = """
        insert into graphile_worker._private_jobs (task_id, payload, run_at)
        select t.id, '{"n": 1}', now() + '1 day'
        from graphile_worker._private_tasks as t cross join generate_series(1, %(rows)s) where t.identifier = 'bench'
    """
    finished = """
        insert into graphile_worker._private_jobs (task_id, payload, priority)
        select t.id, '{"n": 1}', 77
        from graphile_worker._private_tasks as t cross join generate_series(1, %(rows)s) where t.identifier = 'bench';
        delete from graphile_worker._private_jobs where priority = 77
    """

    def prepare(self, bench):
        self.drive(bench, "schema")
        self.enqueue, self.finish = {}, {}
        for batch in (1, 10, 100):
            logged = self.learn(bench, batch)
            self.enqueue[batch] = bind(find(logged, "add_job")) + ";\n"
            claim, complete = bind(find(logged, GET)), find(logged, DELETE)
            if batch == 1:
                self.claim, self.complete = claim, bind(complete, p1=":id")
                self.finish[1] = f"{self.claim} \\gset\n{self.complete};\n"
            else:
                bench.wrap(f"graphile_get_{batch}", claim)
                self.finish[batch] = (f"select ids from bench.graphile_get_{batch}() \\gset\n"
                                      f"{bind(complete, p1=':ids')};\n")
