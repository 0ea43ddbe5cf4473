"""pg-boss for the benchmark (npm)."""

from __future__ import annotations

from bench_peer import FromNpm, bind, find


class PgBoss(FromNpm):
    name = "pg-boss"
    schema = "pgboss"
    packages = ["pg-boss@10.4.2"]  # of the last major version for Node 20
    driver = "bench_pgboss.js"
    left = "select count(*) from pgboss.job where name = 'bench' and state < 'active' and start_after <= now()"
    clear = "delete from pgboss.job where name = 'bench'"

    delayed = """
        insert into pgboss.job (name, data, start_after) select 'bench', '{"n": 1}', now() + '1 day'
        from generate_series(1, %(rows)s)
    """
    finished = """
        insert into pgboss.job (name, data, state, started_on, completed_on)
        select 'bench', '{"n": 1}', 'completed', now(), now() from generate_series(1, %(rows)s)
    """

    def prepare(self, bench):
        self.drive(bench, "schema")
        self.enqueue, self.finish = {}, {}
        for batch in (1, 10, 100):
            logged = self.learn(bench, batch)
            self.enqueue[batch] = bind(find(logged, "INSERT INTO pgboss.job")) + ";\n"
            claim, complete = bind(find(logged, "FOR UPDATE SKIP LOCKED")), find(logged, "completed_on = now")
            if batch == 1:
                self.finish[1] = f"{claim} \\gset\n{bind(complete, p2='array[:id]')};\n"
            else:
                bench.wrap(f"pgboss_fetch_{batch}", claim)
                self.finish[batch] = (f"select ids from bench.pgboss_fetch_{batch}() \\gset\n"
                                      f"{bind(complete, p2=':ids')};\n")
