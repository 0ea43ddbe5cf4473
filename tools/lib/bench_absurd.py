"""absurd for the benchmark (PyPI): its schema by absurdctl, its verbs as its SDK calls them."""

from __future__ import annotations

import subprocess

from bench_peer import FOLDER, FromPyPI, bind, find


class Absurd(FromPyPI):
    name = "absurd"
    packages = ["absurd-sdk==0.5.1", "absurdctl==0.5.1"]
    driver = "bench_absurd_driver.py"
    schema = "absurd"
    left = "select count(*) from absurd.r_bench where state = 'pending' and available_at <= now()"
    clear = "truncate absurd.t_bench, absurd.r_bench, absurd.c_bench, absurd.e_bench, absurd.w_bench"

    delayed = """
        with new as materialized (
          select gen_random_uuid() as task_id, gen_random_uuid() as run_id from generate_series(1, %(rows)s)
        ), runs as (
          insert into absurd.r_bench (run_id, task_id, attempt, state, available_at)
          select new.run_id, new.task_id, 1, 'sleeping', now() + '1 day' from new
        )
        insert into absurd.t_bench (task_id, task_name, params, state, attempts, last_attempt_run)
        select new.task_id, 'bench', '{"n": 1}', 'sleeping', 1, new.run_id from new
    """
    finished = """
        with new as materialized (
          select gen_random_uuid() as task_id, gen_random_uuid() as run_id from generate_series(1, %(rows)s)
        ), runs as (
          insert into absurd.r_bench (run_id, task_id, attempt, state, available_at)
          select new.run_id, new.task_id, 1, 'completed', now() + '0' from new
        )
        insert into absurd.t_bench (task_id, task_name, params, state, attempts, last_attempt_run)
        select new.task_id, 'bench', '{"n": 1}', 'completed', 1, new.run_id from new
    """

    def prepare(self, bench):
        for arguments in (["init"], ["create-queue", "bench"]):
            subprocess.run([FOLDER / self.name / "bin/absurdctl", *arguments], check=True, capture_output=True,
                           env=bench.env())
        logged = self.learn(bench)
        self.enqueue = {1: bind(find(logged, "spawn_task")) + ";\n"}
        claim = bind(find(logged, "claim_task"))
        states = bind(find(logged, "get_task_checkpoint_states"), p2=":absurd_task_id", p3=":absurd_run_id")
        complete = bind(find(logged, "complete_run"), p2=":absurd_run_id")
        self.finish = {1: f"{claim} \\gset absurd_\n{states};\n{complete};\n"}
        look = bind(find(logged, "get_task_checkpoint_state\\("), p2=":absurd_task_id", p3="'step-' || :absurd_n")
        store = bind(find(logged, "set_task_checkpoint_state"), p2=":absurd_task_id", p3="'step-' || :absurd_n",
                     p5=":absurd_run_id")
        self.step = f"""\\if :absurd_started = 0
{self.enqueue[1]}{claim} \\gset absurd_
{states};
\\set absurd_n 0
\\set absurd_started 1
\\else
\\set absurd_n :absurd_n + 1
{look};
{store};
\\endif
"""
