"""DBOS for the benchmark (PyPI)."""

from __future__ import annotations

from bench_peer import FromPyPI, bind, find


class Dbos(FromPyPI):
    name = "DBOS"
    packages = ["dbos==3.4.0", "psycopg[binary]==3.3.9"]
    driver = "bench_dbos_driver.py"
    schema = "dbos"

    def prepare(self, bench):
        logged = self.learn(bench)
        with bench.connect() as conn:
            conn.execute(bind(find(logged, "INSERT INTO dbos.workflow_status"), p1="'bench-steps'"))
        workflow, number = {"p1": "'bench-steps'"}, {"p2": ":dbos_n"}
        self.step = f"""\\if :dbos_started = 0
select coalesce(max(function_id), 0) as dbos_n from dbos.operation_outputs where workflow_uuid = 'bench-steps' \\gset
\\set dbos_started 1
\\else
\\set dbos_n :dbos_n + 1
begin isolation level read committed;
{bind(find(logged, "^SELECT dbos.workflow_status.status"), **workflow)};
{bind(find(logged, "^SELECT dbos.operation_outputs.output"), **workflow, **number)};
commit;
begin;
{bind(find(logged, "FOR NO KEY UPDATE"), **workflow)};
{bind(find(logged, "INSERT INTO dbos.operation_outputs"), **workflow, **number)};
commit;
\\endif
"""
