"""graphile-worker for the benchmark: installed by npm into build/, its schema made by its own command, and the
statements with which it claims and completes a job, taken from the server's log while it works off one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import psycopg

from cluster import ROOT, Cluster, clean_environ

VERSION = "0.17.3"  # the last one for Node 20
FOLDER = ROOT / "build/bench-graphile"
# As in the log: "execute get_job/graphile_worker: with j as (...", its further lines begin with a tab.
LOGGED = re.compile(r"execute (get_job|complete_job)/graphile_worker: (.*(?:\n\t.*)*)")


class Graphile:
    name = "graphile-worker"

    def install(self) -> str | None:
        """Why it can't be measured, or None."""
        if not (shutil.which("npm") and shutil.which("node")):
            return "npm is not here"
        if (FOLDER / "node_modules/graphile-worker").exists():
            return None
        (FOLDER / "tasks").mkdir(parents=True, exist_ok=True)
        (FOLDER / "package.json").write_text('{"private": true}\n')
        (FOLDER / "tasks/bench.js").write_text("module.exports = async () => {};\n")
        result = subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund",
                                 f"graphile-worker@{VERSION}"], cwd=FOLDER, capture_output=True, text=True)
        return f"npm could not install graphile-worker {VERSION}" if result.returncode else None

    def versions(self) -> str:
        node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        return f"graphile-worker {VERSION} on Node {node.removeprefix('v')}"

    def prepare(self, cluster: Cluster):
        """Migrates, and keeps what the library sends to claim and to complete, with pgbench's variables."""
        self.cluster = cluster
        self._run("--schema-only")
        with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
            self.fill(conn, 1)
            conn.execute("alter role postgres set log_statement = 'all'")
            size = os.path.getsize(cluster.log)
            self._run("--once")
            conn.execute("alter role postgres reset log_statement")
            (task,) = conn.execute(
                "select id from graphile_worker._private_tasks where identifier = 'bench'").fetchone()
        logged = dict(LOGGED.findall(Path(cluster.log).read_bytes()[size:].decode()))
        self.claim = logged["get_job"].replace("$1", "'bench'").replace("$2", f"'{{{task}}}'")
        self.complete = logged["complete_job"].replace("$1", ":id")

    def fill(self, conn: psycopg.Connection, jobs: int):
        conn.execute("select graphile_worker.add_job('bench', '{}') from generate_series(1, %s)", [jobs])

    def _run(self, option: str):
        url = f"postgres://postgres@127.0.0.1:{self.cluster.port}/postgres"
        subprocess.run(["node_modules/.bin/graphile-worker", option], cwd=FOLDER, check=True, capture_output=True,
                       env={**clean_environ(), "DATABASE_URL": url})
