"""What the scenarios of tools/bench share: a cluster, pgbench, and tables in Markdown."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

from cluster import Cluster, clean_environ, find_bindir, has_extension

SETTINGS = {"fsync": "on", "full_page_writes": "on", "jit": "on", "shared_buffers": "512MB", "max_wal_size": "8GB"}
MODES = {"on": "default durability", "off": "synchronous_commit off"}
BARRIER = 4_153_229  # an advisory lock
# Whether a run that goes on from transaction to transaction was started.
RUNS = "", "few_", "short_", "bare_", "next_", "absurd_", "dbos_"
VARIABLES = [part for name in RUNS for part in ("-D", f"{name}started=0")] + ["-D", "nth=0"]
WARM = 10  # so many of a connection's first transactions make its plans, and are not counted
FLOOR = "single-row commit"
FLOOR_SQL = "insert into bench.floor (n) values (1)"


class Bench:
    """One throwaway cluster with the package installed; short: fewer and smaller rounds."""

    def __init__(self, sql: Path, short: bool, seconds: int | None = None):
        self.short = short
        self.seconds = seconds or (5 if short else 20)
        settings = dict(SETTINGS)
        self.counts_statements = has_extension(find_bindir(), "pg_stat_statements")
        if self.counts_statements:
            settings |= {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "none"}
        self.cluster = Cluster(settings=settings)
        self.sql = sql
        self.peers = {}
        self.missing = {}

    def __enter__(self):
        self.cluster.__enter__()
        psql = [f"{self.cluster.bindir}/psql", "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", self.sql]
        subprocess.run(psql, env=self.env(), check=True, stdout=subprocess.DEVNULL)
        with self.connect() as conn:
            conn.execute("create schema bench create table floor (n integer)")
            if self.counts_statements:
                conn.execute("create extension pg_stat_statements")
        return self

    def __exit__(self, *error):
        self.cluster.__exit__(*error)

    def env(self) -> dict[str, str]:
        return {**clean_environ(), **self.cluster.env()}

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(self.cluster.dsn(), autocommit=True)

    def vacuum(self):
        with self.connect() as conn:
            conn.execute("vacuum analyze")

    def analyze(self):
        """So that plans are made for tables as large as they are by now."""
        with self.connect() as conn:
            conn.execute("analyze")

    @contextlib.contextmanager
    def ticking(self):
        """baton.tick at the interval at which schedule() has it called by default."""
        stop = threading.Event()

        def tick():
            with self.connect() as conn:
                conn.execute("select baton.tick()")
                while not stop.wait(5):
                    conn.execute("select baton.tick()")

        with ThreadPoolExecutor() as threads:
            ticks = threads.submit(tick)
            try:
                yield
            finally:
                stop.set()
        ticks.result()

    def rounds(self, number: int, seconds: int = 100):
        """So many rounds, but none begins after so long."""
        started = time.monotonic()
        for self.round in range(1, number + 1):
            yield self.round
            if time.monotonic() - started > seconds:
                return

    def value(self, sql: str):
        with self.connect() as conn:
            return conn.execute(sql).fetchone()[0]

    def add_peers(self, peers):
        """Those that can be installed; why the others are missing."""
        for peer in peers:
            reason = peer.install()
            if reason:
                self.missing[peer.name] = reason
            else:
                peer.prepare(self)
                self.peers[peer.name] = peer

    @contextlib.contextmanager
    def committing(self, mode: str):
        """What connects meanwhile, and says nothing else, commits so."""
        with self.connect() as conn:
            conn.execute(f"alter role postgres set synchronous_commit = {mode}")
            yield
            conn.execute("alter role postgres reset synchronous_commit")

    def wrap(self, name: str, sql: str):
        """A function that answers the ids of the rows which a statement gives: pgbench keeps only single rows."""
        with self.connect() as conn:
            conn.execute(f"""
                create or replace function bench.{name}(out ids text[]) language plpgsql as $$
                declare
                  v_row record;
                begin
                  for v_row in {sql} loop
                    ids := array_append(ids, v_row.id::text);
                  end loop;
                end $$
            """)

    def pgbench(self, mode: str, *arguments) -> str:
        command = [f"{self.cluster.bindir}/pgbench", "-n", "-M", "prepared", *map(str, arguments)]
        env = {**self.env(), "PGOPTIONS": f"-c synchronous_commit={mode}"}
        result = subprocess.run(command, env=env, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"tools/bench: pgbench failed\n{result.stdout}{result.stderr}")
        return result.stdout

    def log(self, mode: str, scripts: list[str], transactions: int, clients: int = 1) -> list[tuple[int, ...]]:
        """Each transaction of so many a connection: its script, how long it took, and its end, in microseconds. A
        connection draws a script for each of its transactions, so that all scripts meet the same disk and the same
        neighbours. What a script puts into variables is there in the connection's next transactions; those of
        VARIABLES are 0 at first."""
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["-l", f"--log-prefix={folder}/log", *VARIABLES, "-c", clients, "-t", transactions]
            for nth, script in enumerate(scripts):
                Path(folder, f"{nth}.sql").write_text(script)
                arguments += ["-f", f"{folder}/{nth}.sql"]
            self.pgbench(mode, *arguments)
            lines = [map(int, line.split()) for log in glob.glob(f"{folder}/log.*") for line in open(log)]
        return [(nth, took, second * 1_000_000 + part) for _, _, took, nth, second, part in lines]

    def times(self, mode: str, scripts: dict[str, str], transactions: int) -> dict[str, list[float]]:
        """How long each transaction of each script took, in milliseconds; one connection."""
        times = {name: [] for name in scripts}
        names = list(scripts)
        for nth, took, _ in self.log(mode, list(scripts.values()), transactions):
            times[names[nth]].append(took / 1000)
        return times

    def rate(self, mode: str, script: str, transactions: int, clients: int) -> float:
        """Transactions a second of so many connections, which begin together once all are warm."""
        wait = (f"\\set nth :nth + 1\n\\if :nth = {WARM + 1}\n"
                f"select 1 from pg_advisory_lock_shared({BARRIER});\n\\endif\n")
        waiting = f"select count(*) from pg_locks where objid = {BARRIER} and not granted"
        with self.connect() as conn, ThreadPoolExecutor() as threads:
            conn.execute(f"select pg_advisory_lock({BARRIER})")
            log = threads.submit(self.log, mode, [wait + script], WARM + transactions, clients)
            deadline = time.monotonic() + 60  # a client that failed never comes
            while ((warm := conn.execute(waiting).fetchone()[0]) < clients
                   and not log.done() and time.monotonic() < deadline):
                time.sleep(0.01)
            begun = time.time()
            conn.execute(f"select pg_advisory_unlock({BARRIER})")
            ended = max(end for *_, end in log.result()) / 1_000_000
        assert warm == clients, f"{warm} of {clients} clients were warm after a minute"
        return transactions * clients / (ended - begun)

    def repeat(self, mode: str, script: str, transactions: int, clients: int = 1) -> float:
        """So many transactions of each connection: transactions a second, those of cold connections among them."""
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(script)
            file.flush()
            output = self.pgbench(mode, *VARIABLES, "-c", clients, "-t", transactions, "-f", file.name)
        return float(re.search(r"tps = ([\d.]+)", output)[1])

    def machine(self) -> str:
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        with self.connect() as conn:
            postgres = conn.execute("show server_version").fetchone()[0].split()[0]
        return f"{os.cpu_count()} cores of {model[1] if model else os.uname().machine}, PostgreSQL {postgres}"


def statement(sql: str) -> str:
    """As a line of a script for pgbench; a row's columns become variables."""
    return sql + (" \\gset\n" if sql.startswith(("select", "with")) or "returning" in sql else ";\n")


def target(what: str, ratio: float, limit: float) -> str:
    """A line of a list: on a ratio of times and the limit that it is meant to keep."""
    verdict = "kept" if ratio <= limit else "missed"
    return f"- {what}: {ratio:.2f} times as long; meant to be at most {limit:g}: {verdict}.\n"


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
