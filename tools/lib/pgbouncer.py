"""A throwaway PgBouncer in front of a throwaway cluster, with transaction pooling. Standard library only.

    with PgBouncer(cluster, pool_size=2) as pooler:
        psycopg.connect(pooler.dsn("app"), prepare_threshold=None)

It listens on a socket in a temporary folder and ends with the block, or with this process. Its server connections take
turns: a client meets another one with each transaction. A second one is opened once two transactions are open at a time.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from cluster import clean_environ, unprivileged

PORT = 6432  # of the socket's name only


def program() -> str | None:
    """PgBouncer, which lies where not everybody's PATH looks; None where it is not installed."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin")


def version() -> str:
    out = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True).stdout
    return out.splitlines()[0]


class PgBouncer:
    def __init__(self, cluster, pool_size=2, users=("postgres",), **settings):
        """cluster: anything with dsn(). pool_size: for each database and user. settings: lines of pgbouncer.ini."""
        self.cluster = cluster
        self.users = users
        self.settings = {
            "pool_mode": "transaction",
            "default_pool_size": pool_size,
            "server_round_robin": 1,
            "max_client_conn": 1000,
            "ignore_startup_parameters": "options",
            **settings,
        }
        self._base = self._process = None

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        self.close()

    @property
    def log(self) -> Path:
        return Path(self._base, "pgbouncer.log")

    def dsn(self, dbname="postgres", user="postgres") -> str:
        return f"host={self._base} port={PORT} dbname={dbname} user={user}"

    def start(self):
        self._base = tempfile.mkdtemp(prefix="pg_baton-")
        run_as = unprivileged()
        settings = {
            **self.settings, "unix_socket_dir": self._base, "listen_port": PORT, "auth_type": "trust",
            "auth_file": f"{self._base}/users", "admin_users": "postgres",
        }
        server = " ".join(part for part in self.cluster.dsn().split() if not part.startswith(("dbname=", "user=")))
        lines = ["[databases]", f"* = {server}", "[pgbouncer]", *(f"{k} = {v}" for k, v in settings.items())]
        Path(self._base, "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        Path(self._base, "users").write_text("".join(f'"{user}" ""\n' for user in self.users))
        if run_as:
            os.chown(self._base, run_as["user"], run_as["group"])
            os.chmod(self._base, 0o755)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", program(), f"{self._base}/pgbouncer.ini"], cwd=self._base,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=clean_environ(), start_new_session=True, **run_as)
        deadline = time.monotonic() + 10
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text()
                self.close()
                raise RuntimeError(f"PgBouncer did not start\n{text}")
            time.sleep(0.01)
        return self

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(f"{self._base}/.s.PGSQL.{PORT}") == 0

    def close(self):
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._base:
            shutil.rmtree(self._base, ignore_errors=True)
        self._base = self._process = None
