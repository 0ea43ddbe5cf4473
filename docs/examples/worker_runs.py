"""The reference consumer of runs: claim a message, replay its run, end the replay (docs/guides/replay.md).

    DATABASE_URL=postgresql:///app QUEUE_NAME=orders python docs/examples/worker_runs.py
    select * from baton.start_run('ship', '{"items": 2, "seconds": 5}', 'r', queue_name => 'orders');
    select * from baton.signal_run('r', 'paid', '{"amount": 20}');

Any number of these may share a queue, come, go and crash: one replay a run at a time, whatever happens. Needs psycopg.
"""
import contextlib
import copy
import functools
import json
import os
import signal
import sys
import threading
import time
from datetime import datetime, timedelta
from decimal import Decimal

import psycopg
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

DATABASE_URL = os.environ.get("DATABASE_URL", "")
QUEUE = os.environ.get("QUEUE_NAME", "default")
POLL_SECONDS = float(os.environ.get("POLL_SECONDS", "1"))
VISIBILITY = timedelta(seconds=float(os.environ.get("VISIBILITY_SECONDS", "30")))  # how long a claim lasts unextended
UNKNOWN_DELAY = timedelta(seconds=float(os.environ.get("UNKNOWN_SECONDS", "60")))
log = functools.partial(print, file=sys.stderr, flush=True)


# A workflow is a function of its run, called again from the top at every replay. What it does that may come out
# differently the second time (a look-up, a random number) goes through run.record, and so into the log.
def ship(run):
    price = run.record("order.priced", lambda: {"total": 10 * run.input["items"]})
    payment = run.wait_signal("paid")
    if payment["amount"] < price["total"]:
        raise Failed({"missing": price["total"] - payment["amount"]})
    run.sleep(run.input.get("seconds", 60))  # until when it may be returned
    parcel = run.record("order.shipped", lambda: {"parcel": os.urandom(4).hex()})
    return {"total": price["total"], **parcel}


WORKFLOWS = {"ship": ship}


class Failed(Exception):
    """Raised by a workflow: its run ends as failed, with this error. After any other exception it is tried again."""

    def __init__(self, error):
        super().__init__(as_logged(error))


class Diverged(Exception):
    """The log holds something else than the code would write: it was changed, or something it did is not recorded."""


class Suspended(BaseException):  # not an Exception, which a workflow may catch
    """Nothing to do until a time, or (None) until something is signalled."""


class Stopping(BaseException):
    """This process is to end: what was recorded is kept, the rest is for another one."""


def as_logged(value):
    """A copy of plain JSON in the form in which jsonb gives it back: keys in its order, numbers as numeric prints them."""
    def number(text):
        return int(Decimal(text)) if "e+" in text else float(text) + 0.0  # no -0.0

    def in_order(pairs):
        return dict(sorted(dict(pairs).items(), key=lambda pair: (len(key := pair[0].encode()), key)))

    return json.loads(json.dumps(value, allow_nan=False), parse_float=number, object_pairs_hook=in_order)


class Run:
    """What a workflow sees of its run in one replay: what the log has is answered from it, what it has not is new. All that
    it gets is a copy: what the code changes in it neither the next replay sees nor the log."""

    def __init__(self, events, baton, is_stopping):
        self.input, self.baton, self.is_stopping = copy.deepcopy(events[0].payload), baton, is_stopping
        self.recorded = [event for event in events if "." in event.type]  # pg_baton's own types have no dot
        self.signals = [event.payload for event in events if event.type == "signal_received"]
        self.position, self.new = 0, []  # events of its own that the code has passed; those that are to be written
        self.left = None  # why the code is to be left

    def call(self, workflow):
        """What the code answers, or raises, unless it is left: then it is that, whatever the code makes of it."""
        try:
            return as_logged(workflow(self))
        finally:
            self.raise_if_left()

    def raise_if_left(self):
        """Nothing is decided on the way out: in a finally, or where the code has caught why it is left."""
        if self.left:
            raise self.left

    def leave(self, why):
        self.left = self.left or why
        self.raise_if_left()

    def record(self, event_type, decide):
        """What decide() answers now, or answered in an earlier replay: plain JSON."""
        self.raise_if_left()
        self.position += 1
        correlation_id = str(self.position)  # by its place in the code
        if self.position <= len(self.recorded):
            event = self.recorded[self.position - 1]
            if (event.type, event.correlation_id) != (event_type, correlation_id):
                raise Diverged(f"event {event.seq} is {event.type} {event.correlation_id}, not {event_type}")
            return copy.deepcopy(event.payload)
        if self.is_stopping():
            self.leave(Stopping())
        try:
            payload = as_logged(decide())
        except Exception as error:  # it isn't recorded: the code must not go on over it
            self.leave(error)
        self.new.append((event_type, correlation_id, Jsonb(payload)))
        return copy.deepcopy(payload)

    def wait_signal(self, name):
        """The payload of the next signal of that name."""
        for index, received in enumerate(self.signals):
            if received["name"] == name:
                return copy.deepcopy(self.signals.pop(index)["payload"])
        self.leave(Suspended(None))

    def sleep(self, seconds):
        """By the clock of the database when this replay was granted; this machine's does not count."""
        until = self.record("timer.set", lambda: (self.baton.clock + timedelta(seconds=seconds)).isoformat())
        if self.baton.clock < (until := datetime.fromisoformat(until)):
            self.leave(Suspended(until))


def connect(url=DATABASE_URL, **options):
    return psycopg.connect(  # the time-out: a process that hangs must not keep a row locked
        url, autocommit=True, row_factory=namedtuple_row, connect_timeout=5, client_encoding="utf8",
        prepare_threshold=None,  # a pooler in transaction mode gives each transaction another connection
        options="-c idle_in_transaction_session_timeout=10s", **options)


def extend(workers, over):
    """In a thread, over a connection of its own: the claims in hand last, and with them the replays."""
    while not over.is_set():
        with contextlib.suppress(psycopg.Error), contextlib.closing(connect()) as db:
            while not over.is_set():
                for receipt in [receipt for worker in workers if (receipt := worker.receipt)]:
                    db.execute("select * from baton.extend(%s, %s, %s)", (*receipt, VISIBILITY))
                over.wait(VISIBILITY.total_seconds() / 3)
        over.wait(POLL_SECONDS)


class Worker:
    run_class = Run
    db, worker_id = None, None  # without an id it claims anonymously

    def __init__(self):
        self.receipt, self.stopping = None, False  # the message in hand; whether to take another one

    def one(self, sql, *arguments):
        return self.db.execute(sql, arguments).fetchone()

    def work(self):
        threading.Thread(target=extend, args=([self], threading.Event()), daemon=True).start()
        self.serve()
        log("stopped")

    def serve(self):
        while not self.stopping:
            try:
                self.db = connect()
                recovered = self.db.execute("select * from baton.recover_runs(%s)", [QUEUE]).fetchall()
                log("ready; recovered:", *(row.run_id for row in recovered))
                while not self.stopping:
                    if not self.work_once():
                        time.sleep(POLL_SECONDS)
            except psycopg.Error as error:  # what was in hand is recovered, here or elsewhere
                log("database:", repr(error))
                time.sleep(POLL_SECONDS)
            finally:
                if self.db:
                    self.db.close()

    def claim(self):
        return self.one("select * from baton.claim(%s, %s, visibility => %s)", QUEUE, self.worker_id, VISIBILITY)

    def work_once(self):
        """One message. The answers of pg_baton settle it: there is nothing to acknowledge."""
        if not (message := self.claim()):
            return False
        self.receipt = message.message_id, message.delivery
        try:
            log(self.handle(message), message.run_id)
        except psycopg.Error as error:
            if self.db.closed:
                raise
            if error.sqlstate == "PB001":  # we came too late: nothing of this is written, another has gone on
                log("superseded", message.run_id)
            else:
                log(self.fail(repr(error)), message.run_id)
        finally:
            self.receipt = None
        return True

    def handle(self, message):
        # hold session: if this process is killed, its connection tells, and the run is free at once
        baton = self.one("select * from baton.begin_replay(%s, %s, 'session')", *self.receipt)
        # handed_over, busy, terminal, lost: nothing is left to do
        return self.replay(baton) if baton.outcome == "granted" else baton.outcome

    def replay(self, baton):
        if not (workflow := WORKFLOWS.get(baton.workflow_name)):  # others may know it: a newer deployment
            return self.fail(f"unknown workflow: {baton.workflow_name}", UNKNOWN_DELAY)
        events, outcome = [], "again"
        while outcome == "again":  # something came while we decided
            while page := self.db.execute("select * from baton.read_events(%s, %s)",
                                          (baton.run_id, events[-1].seq if events else 0)).fetchall():
                events += page
            outcome = self.decide(baton, workflow, self.run_class(events, baton, lambda: self.stopping), events[-1].seq)
        return outcome

    def decide(self, baton, workflow, run, seen_seq):
        """Run the code with no transaction open, so that nobody waits for us; then write, all or nothing."""
        fence = baton.run_id, baton.replay_epoch
        try:
            end = "select * from baton.complete_run(%s, %s, %s)", *fence, Jsonb(run.call(workflow))
        except Suspended as wait:
            end = "select * from baton.end_replay(%s, %s, %s, %s)", *fence, seen_seq, *wait.args
        except Failed as error:
            end = "select * from baton.fail_run(%s, %s, %s)", *fence, Jsonb(error.args[0])
        except Stopping:
            end = "select * from baton.park(%s, %s)", *self.receipt
        except Exception as error:
            return self.fail(repr(error))
        if run.position < len(run.recorded):
            return self.fail(f"Diverged('the code ends before event {run.recorded[run.position].seq}')")
        with self.db.transaction():
            for event in run.new:
                self.one("select * from baton.append_event(%s, %s, %s, %s, %s)", *fence, *event)
            return self.one(*end).outcome

    def fail(self, error, delay=None):
        """Give the message back, after a back-off; at settings.max_failures in a row the run fails."""
        log("failing:", error)
        return self.one("select * from baton.fail(%s, %s, %s, %s)", *self.receipt, error, delay).outcome


if __name__ == "__main__":
    worker = Worker()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(worker, "stopping", True))  # finish the replay in hand, or park it
    worker.work()
