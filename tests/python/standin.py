"""The stand-ins for pg_net, Vault and pg_cron, and an HTTP server to send to."""

import contextlib
import dataclasses
import http.server
import os
import pathlib
import subprocess
import sys
import threading
import time
import urllib.parse

import psycopg
from conftest import wait_until

STANDIN = pathlib.Path(__file__).resolve().parent.parent / "standin"


def install(connection, *names):
    """Install stand-ins (by default pg_net's) into the database of this superuser's connection, and commit.

    Known are "pg_net", "vault" and "cron". Connections made afterwards see pg_net.database_name as the extension
    would set it.
    """
    with connection.transaction():
        for name in names or ("pg_net",):
            connection.execute((STANDIN / f"{name}.sql").read_text())
    if not connection.autocommit:
        connection.commit()


@contextlib.contextmanager
def running(dsn):
    """Run the sender for the database that `dsn` names, whose stand-in is installed; entered once it is up."""
    sender = subprocess.Popen(
        [sys.executable, str(STANDIN / "pg_net_sender.py"), dsn], stdin=subprocess.DEVNULL, env=dict(os.environ)
    )
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            wait_until(lambda: sender.poll() is not None or worker_is_up(connection), "the sender is up")
        if sender.poll() is not None:
            raise RuntimeError(f"the sender of the pg_net stand-in ended with {sender.returncode}")
        yield sender
    finally:
        sender.terminate()
        try:
            sender.wait(timeout=5)
        except subprocess.TimeoutExpired:
            sender.kill()
            sender.wait()


def worker_is_up(connection):
    """Whether pg_net's worker, the stand-in's or the real one, looks at the database of this connection."""
    return connection.execute(
        "select exists (select from pg_stat_activity as a"
        " where a.application_name like 'pg_net %' and a.datname = current_database())"
    ).fetchone()[0]


@dataclasses.dataclass
class Arrival:
    """One request as the server saw it. `finished_at` is set once it has been answered (or not, as told)."""

    method: str
    path: str
    query: str
    headers: object
    body: bytes
    at: float
    finished_at: float | None = None


@dataclasses.dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict = dataclasses.field(default_factory=dict)
    delay: float = 0
    close: bool = False


class HttpTarget:
    """An HTTP server on a free port of 127.0.0.1 that records what arrives and answers as told.

        with HttpTarget() as target:
            target.on("/start", status=503, delay=1.5)
            ...
            [arrival] = target.wait("/start")
    """

    def __init__(self):
        self._answers = {}
        self._arrivals = []
        self._changed = threading.Condition()
        target = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def handle_any(self):
                target._handle(self)

            do_GET = do_POST = do_DELETE = handle_any

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on(self, path, status=200, body=b"", headers=None, delay=0, close=False):
        """From now on answer requests to `path` so, after `delay` seconds; `close`: hang up without an answer."""
        body = body.encode() if isinstance(body, str) else body
        self._answers[path] = Answer(status, body, headers or {}, delay, close)
        return self.url + path

    def arrivals(self, path=None):
        with self._changed:
            return [a for a in self._arrivals if path in (None, a.path)]

    def wait(self, path=None, count=1, timeout=60, finished=False):
        """The arrivals at `path`, once there are `count` (that have been answered, with `finished`)."""

        def enough():
            return sum(a.finished_at is not None or not finished for a in self.arrivals(path)) >= count

        with self._changed:
            if not self._changed.wait_for(enough, timeout):
                raise AssertionError(f"not within {timeout} s: {count} at {path}; arrived: {self._arrivals}")
            return self.arrivals(path)

    def _handle(self, request):
        url = urllib.parse.urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        arrival = Arrival(request.command, url.path, url.query, request.headers, body, time.monotonic())
        answer = self._answers.get(url.path, Answer())
        with self._changed:
            self._arrivals.append(arrival)
            self._changed.notify_all()
        time.sleep(answer.delay)
        arrival.finished_at = time.monotonic()
        with self._changed:
            self._changed.notify_all()
        if answer.close:
            return
        with contextlib.suppress(OSError):
            request.send_response(answer.status)
            for name, value in answer.headers.items():
                request.send_header(name, value)
            request.send_header("Content-Length", str(len(answer.body)))
            request.end_headers()
            request.wfile.write(answer.body)
