"""A worker without a connection to the database: each verb is one HTTP request, in the manner of PostgREST.

    BATON_URL=https://example.com/rest BATON_TOKEN=... QUEUE_NAME=default python docs/examples/worker_rpc.py

A request is a transaction of its own, and no connection proves that this process lives: the hold is a lease, which
lasts as long as the claim is extended. An answer may be lost; each verb may be asked again. Needs httpx. The roles and
PostgREST's configuration: docs/examples/rpc.sql.
"""
import contextlib
import functools
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import httpx

QUEUE = os.environ.get("QUEUE_NAME", "default")
POLL_SECONDS = float(os.environ.get("POLL_SECONDS", "1"))
VISIBILITY_SECONDS = float(os.environ.get("VISIBILITY_SECONDS", "30"))
UNKNOWN_SECONDS = float(os.environ.get("UNKNOWN_SECONDS", "60"))
log = functools.partial(print, file=sys.stderr, flush=True)


# A body may run again if its process dies before its end is written down.
def charge(order, key):
    return {**order, "payment": key}


def pack(order, key):
    return {"payment": order["payment"], "boxes": [f"box of {item}" for item in order["items"]]}


# A workflow is one body after the other: each gets what the one before it answered.
WORKFLOWS = {"order": [charge, pack]}


class Refused(Exception):
    """The database raised an error: code has its SQLSTATE."""

    def __init__(self, error):
        super().__init__(error.get("message"))
        self.code = error.get("code")


class Baton:
    """baton.claim(queue_name=...) is POST /rpc/claim with that argument: one row, or a list where a verb answers rows."""

    def __init__(self):
        self.http = httpx.Client(base_url=os.environ["BATON_URL"], timeout=10, headers={
            "Authorization": f"Bearer {os.environ['BATON_TOKEN']}", "Content-Profile": "baton"})

    def __getattr__(self, verb):
        return functools.partial(self.call, verb)

    def call(self, verb, **arguments):
        for last in (False, True):
            try:
                response = self.http.post(f"/rpc/{verb}", json=arguments)
                if response.status_code < 500 or last:
                    break
            except httpx.TransportError:
                if last:
                    raise
            time.sleep(POLL_SECONDS)
        if response.is_error:
            raise Refused(response.json())
        rows = response.json()
        return [SimpleNamespace(**row) for row in rows] if isinstance(rows, list) else SimpleNamespace(**rows)


class Worker:
    def __init__(self):
        self.baton, self.receipt, self.stopping = Baton(), None, False

    def work(self):
        threading.Thread(target=self.extend, daemon=True).start()
        log("ready")
        while not self.stopping:
            try:
                if not self.work_once():
                    time.sleep(POLL_SECONDS)
            except (httpx.TransportError, ValueError) as error:  # what was in hand is recovered, here or elsewhere
                log("http:", repr(error))
                time.sleep(POLL_SECONDS)
        log("stopped")

    def extend(self):
        baton = Baton()
        while True:
            if receipt := self.receipt:
                with contextlib.suppress(httpx.TransportError, ValueError, Refused):
                    baton.extend(**receipt, visibility=f"{VISIBILITY_SECONDS} s")
            time.sleep(VISIBILITY_SECONDS / 3)

    def work_once(self):
        messages = self.baton.claim(queue_name=QUEUE, visibility=f"{VISIBILITY_SECONDS} s")
        for message in messages:
            self.receipt = {"message_id": message.message_id, "delivery": message.delivery}
            try:
                log(self.handle_run() if message.kind == "run" else self.handle_task(), message.run_id)
            except Refused as error:
                if error.code == "PB001":  # we came too late: another has gone on
                    log("superseded", message.run_id)
                else:
                    log(self.fail(str(error)), message.run_id)
            finally:
                self.receipt = None
        return messages

    def handle_run(self):
        while True:
            granted = self.baton.begin_replay(**self.receipt, hold="lease")
            if granted.outcome != "granted":  # handed_over, busy, terminal, lost: nothing is left to do
                return granted.outcome
            if not (bodies := WORKFLOWS.get(granted.workflow_name)):
                return self.fail(f"unknown workflow: {granted.workflow_name}", delay=f"{UNKNOWN_SECONDS} s")
            outcome, task = self.replay(bodies, {"run_id": granted.run_id, "replay_epoch": granted.replay_epoch})
            if not task:
                return outcome
            self.execute(SimpleNamespace(**vars(task), run_id=granted.run_id))

    def replay(self, bodies, fence):
        """Several requests under one epoch. If we die between two of them the replay is lost, and begun anew."""
        events, outcome, task = [], "again", None
        while outcome == "again":  # something came while we decided
            while page := self.baton.read_events(run_id=fence["run_id"], after_seq=events[-1].seq if events else 0):
                events += page
            verb, arguments = self.decide(bodies, events)
            if verb:  # complete_run or fail_run
                return getattr(self.baton, verb)(**fence, **arguments).outcome, None
            if arguments:
                self.baton.create_step(**fence, **arguments)
            rows = self.baton.dispatch_tasks(**fence)
            if any(row.outcome == "lost" for row in rows):  # our claim ran out; if nobody took it, it is still ours
                self.baton.extend(**self.receipt, visibility=f"{VISIBILITY_SECONDS} s")
                rows = self.baton.dispatch_tasks(**fence)
            for row in rows:
                if row.outcome in ("execute", "running"):  # running: no body runs here, so the answer was lost
                    task = row
            outcome = self.baton.end_replay(**fence, seen_seq=events[-1].seq).outcome
        return outcome, task if outcome == "ended" else None

    def decide(self, bodies, events):
        """The end of the run; or None, and the step that is next, if it is not there yet."""
        value, created, outputs = events[0].payload, set(), {}
        for event in events:
            if event.type in ("step_created", "run_advanced"):  # advanced: by a worker that goes the short way
                created.add(event.correlation_id)
            if event.type in ("task_completed", "run_advanced"):
                outputs[event.payload["step_slug"]] = event.payload["output"]
            elif event.type in ("step_failed", "step_skipped"):
                return "fail_run", {"error": event.payload}
        for body in bodies:
            if (slug := body.__name__) not in outputs:
                return None, None if slug in created else {"step_slug": slug, "inputs": [value]}
            value = outputs[slug]
        return "complete_run", {"output": value}

    def handle_task(self):
        started = self.baton.start_task(**self.receipt)
        return self.execute(started) if started.outcome == "execute" else started.outcome

    def execute(self, task):
        body = next((body for bodies in WORKFLOWS.values() for body in bodies if body.__name__ == task.step_slug), None)
        if not body:
            return self.fail(f"unknown step: {task.step_slug}", delay=f"{UNKNOWN_SECONDS} s")
        attempt = {"run_id": task.run_id, "step_slug": task.step_slug, "task_index": task.task_index, "attempt": task.attempt}
        try:
            output = body(task.input, f"{task.run_id}/{task.step_slug}")
        except Exception as error:
            return self.baton.fail_task(**attempt, **self.receipt, error=repr(error)).outcome
        return self.baton.complete_task(**attempt, **self.receipt, output=output).outcome

    def fail(self, error, **options):
        """Give the message back, by force: no body runs under it."""
        log("failing:", error)
        return self.baton.fail(**self.receipt, error=error, force=True, **options).outcome


if __name__ == "__main__":
    worker = Worker()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(worker, "stopping", True))  # what is in hand is finished
    worker.work()
