"""Programs under test as processes of their own, and an HTTP endpoint that answers as a test wants."""

import json
import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cluster import clean_environ
from conftest import PATIENCE, ROOT, TREE, wait_until

SECRET = "s3cret-0f-the-te5ts"
EXAMPLES = TREE / "docs/examples"


class Program:
    """A child process whose output goes into a file; it is killed at the end if the test has not ended it."""

    def __init__(self, output, command, env, interpreter=sys.executable, cwd=ROOT):
        self.output = Path(output)
        environ = {k: v for k, v in clean_environ().items() if not k.lower().endswith("_proxy")}
        with self.output.open("ab") as file:
            self.process = subprocess.Popen([interpreter, *map(str, command)], stdin=subprocess.DEVNULL, stdout=file,
                                            stderr=file, env={**environ, **env}, cwd=cwd)

    def text(self):
        return self.output.read_text()

    def wait_for(self, text, times=1):
        def said():
            ended = self.process.poll() is not None
            if self.text().count(text) >= times:
                return True
            assert not ended, f"it ended without {text!r}:\n{self.text()}"

        try:
            wait_until(said, f"{text!r} {times} times in the output")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, timeout=PATIENCE):
        return self.process.wait(timeout)

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Shop:
    """One queue, the processes that work on it, and a folder where their bodies leave marks and wait at a gate."""

    def __init__(self, db, folder):
        self.db, self.folder, self.workers = db, folder, []
        self.conn = db.connect()
        self.conn.execute("update baton.settings set backoff_base = '100 ms'")
        self.user = role(self.conn, "worker")

    def close(self):
        self.open_gate()
        for worker in self.workers:
            worker.end()

    def run(self, run_id="r"):
        return self.conn.execute("select * from baton.get_run(%s)", (run_id,)).fetchone()

    def ended(self, run_id="r"):
        return self.run(run_id).ended_at

    def wait(self, status, run_id="r"):
        try:
            wait_until(lambda: self.ended(run_id), f"{run_id} has ended", every=0.02)
        except AssertionError as error:
            said = "".join(f"\n{worker.output.name}:\n{worker.text()}" for worker in self.workers)
            raise AssertionError(f"{error}\n{self.messages()}{said}") from None
        assert self.run(run_id).status == status, self.run(run_id)
        return self.run(run_id)

    def types(self, run_id="r"):
        return [event.type for event in self.conn.execute("select * from baton.read_events(%s, 0, 100000)", (run_id,))]

    def messages(self):
        return self.conn.execute("select * from baton.messages order by message_id").fetchall()

    def wait_empty(self):
        wait_until(lambda: not self.messages(), "no message is left", every=0.05)

    def incidents(self, kind):
        return self.conn.execute("select * from baton.incidents where kind = %s", (kind,)).fetchall()

    def lines(self, name="marks"):
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def wait_marks(self, count):
        wait_until(lambda: len(self.lines()) >= count, f"{count} marks", every=0.02)

    def end_connections(self, count, which):
        """Of all workers, once they are so many."""
        theirs = "from pg_stat_activity where usename = %s and datname = %s"
        found = (self.user, self.db.name)
        wait_until(lambda: len(self.conn.execute(f"select {theirs}", found).fetchall()) == count, f"connected: {which}")
        self.conn.execute(f"select pg_terminate_backend(pid, 10000) {theirs}", found)

    def open_gate(self, worker=None):
        """For all, or for one process."""
        (self.folder / (f"gate.{worker.process.pid}" if worker else "gate")).touch()


class Request:
    def __init__(self, path, headers, body):
        self.path, self.headers, self.body = path, headers, body
        self.invocation_id = body.get("invocation_id")


class Endpoint:
    """An HTTP server on a free port. answer(request) is a status, or a status and headers."""

    def __init__(self):
        self.requests, self.answer = [], lambda _: 202
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Request(self.path, self.headers, json.loads(body or b"{}"))
                endpoint.requests.append(request)
                answer = endpoint.answer(request)
                status, headers = answer if isinstance(answer, tuple) else (answer, {})
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:
                    pass  # the sender did not wait

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def ids(self):
        return [str(request.invocation_id) for request in self.requests]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def role(conn, kind):
    """A role with the grants of that kind alone."""
    name = f"baton_test_{kind}"
    if not conn.execute("select 1 from pg_roles where rolname = %s", (name,)).fetchone():
        conn.execute(f"create role {name} login")
    conn.execute("select baton.grant_usage(%s, %s)", (name, kind))
    return name


def sender(database, output, *options, user, secret=SECRET, env=()):
    environment = {"BATON_SECRET_KEY": secret} if secret is not None else {}
    return Program(output, [TREE / "tools/sender", "--poll", "0.1", "--database-url",
                            database.cluster.dsn(database.name, user=user), *options], {**environment, **dict(env)})


def worker(database, output, port, *, user, function="orders", code=None, **env):
    """docs/examples/worker_http.py; code: Python to run in its place, which can import it."""
    command = ["-c", code] if code else [EXAMPLES / "worker_http.py"]
    return Program(output, command, {
        "FUNCTION_NAME": function, "DATABASE_URL": database.cluster.dsn(database.name, user=user), "PORT": str(port),
        "BATON_TOKEN": SECRET, "HEARTBEAT_SECONDS": "0.2", "POLL_SECONDS": "0.1",
        "PYTHONPATH": os.fspath(EXAMPLES), **{name: str(value) for name, value in env.items()}})
