"""What has ended stops: cancellation for a worker in Python (docs/guides/cancellation.md).

    control = Control(worker_id, connect)
    control.start()                              # before the first claim
    with control.registered(attempt):            # around each body, an Attempt
        body(input, attempt)
    control.shut_down()                          # asks every body here to stop
    control.close()                              # when they have stopped

One listener and one query a worker, however many bodies run. The rows decide: what the channel says is a reason to ask
terminal_tasks about the bodies here that may be meant, and whatever it fails to say is found at the next interval.
Nobody can stop a body from outside: it looks from time to time whether it is to go on.
"""
import contextlib
import functools
import json
import sys
import threading
import time

import psycopg
from psycopg.types.json import Jsonb

RETRY_SECONDS = 1
log = functools.partial(print, file=sys.stderr, flush=True)


class Cancelled(BaseException):  # not an Exception: a body must not take it for an error of its own
    """Raised in a body that asks whether it is to go on, and is not."""


class Attempt:
    """One start of a body, as the body sees it."""

    def __init__(self, run_id, step_slug, task_index, attempt):
        self.run_id, self.step_slug, self.task_index, self.attempt = run_id, step_slug, task_index, attempt
        self.key = {"run_id": run_id, "step_slug": step_slug, "task_index": task_index, "attempt": attempt}
        self.cancelled = threading.Event()  # cancelled.wait(seconds) is a sleep that ends early
        self.reason = None

    def raise_if_cancelled(self):
        if self.cancelled.is_set():
            raise Cancelled(self.reason)

    def cancel(self, reason):
        if not self.cancelled.is_set():
            self.reason = reason
            log("stopping a body:", reason, *self.key.values())
            self.cancelled.set()


class Control:
    """What a worker has one of: the registry of its bodies, a listener, and the reconciliation."""

    def __init__(self, worker_id, connect, interval=5, listen=None, on_beat=None):
        """connect() opens a connection in autocommit. listen() opens the listener's, which must not go through a
        transaction pooler; without it there is none. on_beat(db, state) is called at each interval."""
        self.worker_id, self.connect, self.interval = str(worker_id), connect, interval
        self.open_listener, self.on_beat = listen, on_beat
        self.active, self.suspects, self.shutting_down = set(), set(), False
        self.lock = threading.RLock()
        self.wake, self.beat_at = threading.Event(), 0  # wakes the reconciliation; when the next beat is due
        self.hears, self.probe_is_out = False, False
        self.has_tried, self.closing, self.threads = threading.Event(), threading.Event(), []

    @property
    def state(self):
        """For heartbeat: listening is who hears its own probes."""
        return "off" if not self.open_listener else "listening" if self.hears else "polling"

    def start(self):
        """LISTEN first, or a try that fails; then reconcile; then claim."""
        if self.open_listener:
            self._thread(self._listen)
            self.has_tried.wait()
        self._thread(self._reconcile)

    def close(self):
        self.closing.set()
        self._beat_now()  # a last probe, by which the listener wakes
        for thread in self.threads:
            thread.join()

    @contextlib.contextmanager
    def registered(self, attempt):
        with self.lock:
            self.active.add(attempt)
            if self.shutting_down:
                attempt.cancel("shutdown")
        self._suspect(attempt)  # it may have ended between its start and this line, and its hint found nobody
        try:
            yield
        finally:
            with self.lock:
                self.active.remove(attempt)

    def shut_down(self):
        with self.lock:
            self.shutting_down = True
            for attempt in self.active:
                attempt.cancel("shutdown")

    # The reconciliation: a thread with a connection of its own, whether or not the worker has a free slot ---------

    def _reconcile(self):
        while not self.closing.is_set():
            try:
                with contextlib.closing(self.connect()) as db:
                    self.beat_at = 0
                    while not self.closing.is_set():
                        self.wake.wait(max(0, self.beat_at - time.monotonic()))
                        self.wake.clear()
                        self._look(db)
            except psycopg.Error as error:
                log("reconciliation:", repr(error))
                self.closing.wait(RETRY_SECONDS)

    def _look(self, db):
        """At each beat all are asked about, in between those that may be meant by what was heard."""
        is_beat = time.monotonic() >= self.beat_at
        with self.lock:
            attempts = [*self.active] if is_beat else [*self.active & self.suspects]
            self.suspects.clear()
        if is_beat:
            self.beat_at = time.monotonic() + self.interval
        if attempts:
            rows = db.execute("select outcome, cause from baton.terminal_tasks(%s)",
                              [Jsonb([attempt.key for attempt in attempts])]).fetchall()
            for attempt, (outcome, cause) in zip(attempts, rows, strict=True):
                if outcome != "running" and attempt in self.active:  # it may have ended meanwhile
                    attempt.cancel(cause or outcome)
        if is_beat:
            self._beat(db)

    def _beat(self, db):
        if self.probe_is_out:
            self._set_hears(False)
        if self.open_listener:
            self.probe_is_out = True
            db.execute("select pg_notify('baton_control', %s)",
                       [json.dumps({"event": "probe", "worker_id": self.worker_id})])
        if self.on_beat:
            self.on_beat(db, self.state)

    # The listener: another one ----------------------------------------------------------------------------------

    def _listen(self):
        while not self.closing.is_set():
            try:
                with contextlib.closing(self.open_listener()) as db:
                    db.execute("listen baton_control")
                    self.has_tried.set()
                    self._beat_now()  # what has ended before this moment told nobody here
                    while not self.closing.is_set():
                        for notify in db.notifies(timeout=RETRY_SECONDS, stop_after=1):
                            self._hear(notify.payload)
            except psycopg.Error as error:
                log("listener:", repr(error))
                self.has_tried.set()
                self._set_hears(False)
                self.closing.wait(RETRY_SECONDS)

    def _hear(self, payload):
        try:
            event = dict(json.loads(payload))
        except (ValueError, TypeError, RecursionError):  # anybody may send anything
            return
        if str(event.get("event")).startswith("cancel:"):
            with self.lock:
                self._suspect(*(attempt for attempt in self.active if not attempt.cancelled.is_set() and all(
                    event.get(name) in (None, attempt.key[name]) for name in ("run_id", "step_slug", "task_index"))))
        elif event.get("event") == "probe" and event.get("worker_id") == self.worker_id:
            self.probe_is_out = False
            self._set_hears(True)

    def _set_hears(self, hears):
        if hears != self.hears:
            self.hears = hears
            log("control:", self.state)
            self._beat_now()

    def _suspect(self, *attempts):
        with self.lock:
            self.suspects.update(attempts)
        if attempts:
            self.wake.set()

    def _beat_now(self):
        self.beat_at = 0
        self.wake.set()

    def _thread(self, target):
        self.threads.append(threading.Thread(target=target, daemon=True))
        self.threads[-1].start()
