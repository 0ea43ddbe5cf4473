"""A worker of the soak: docs/examples/worker_durable.py with one workflow, which does what its run's input says.

Into one file, a line each, by one write, so that a kill cuts nothing off: each start and end of a body with its receipt,
until when each claim lasts by the answers of claim and extend, and who was granted which epoch and wrote under it.

Where the file SOAK_TRAP lies, a replay that decides removes it and stops this process, as SIGSTOP does.
"""
import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/examples"))
import worker_durable  # noqa: E402
from cancellation import Cancelled  # noqa: E402
from worker_durable import StepFailed  # noqa: E402
from worker_runs import Failed  # noqa: E402

NAME = os.environ["SOAK_NAME"]
TRAP = os.environ["SOAK_TRAP"]
NOTES = os.open(os.environ["SOAK_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(what, **more):
    line = json.dumps({"at": time.time(), "what": what, "worker": NAME, **more}, default=str)
    os.write(NOTES, line.encode() + b"\n")


# Bodies -----------------------------------------------------------------------------------------


def work(input, task):
    note("begins", receipt=task.receipt, **task.key)
    how = "raised"
    try:
        output = do(task=task, **input)
        how = "returned"
        return output
    except Cancelled:
        how = "stopped"
        raise
    finally:
        note("ends", how=how, reason=task.reason, **task.key)


def do(task, value, seconds=0, fails=0, dies=0, deaf=False):
    if task.attempt <= dies:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    if deaf:
        time.sleep(seconds)
    else:
        task.cancelled.wait(seconds)
        task.raise_if_cancelled()
    if task.attempt <= fails:
        raise ValueError("on purpose")
    return value


execute = worker_durable.Slot.execute


def execute_noted(slot, task):
    task.receipt = slot.receipt
    return execute(slot, task)


# The workflow -----------------------------------------------------------------------------------


def soak(run):
    outputs = []
    for number, (kind, what) in enumerate(run.input):
        key = str(number)
        if kind == "record":
            outputs.append(run.record("soak.wrote", lambda: decide(run, what))[0])
        elif kind == "signal":
            outputs.append(run.wait_signal(what))
        elif kind == "sleep":
            run.sleep(what)
        elif kind == "step":
            outputs.append(run.step("work", what, key, max_attempts=5))
        elif kind == "fan":
            outputs.append(run.map("work", what, key, max_attempts=5))
        elif kind == "skip":
            outputs.append(run.map("work", what, key, max_attempts=2, on_exhausted="skip_step"))
        elif kind == "catch":
            try:
                run.map("work", what, key, max_attempts=2)
            except StepFailed as failed:
                outputs.append(failed.error)
        elif kind == "fail":
            raise Failed(what)
    return outputs


def decide(run, what):
    time.sleep(random.choice([0, 0, 0.1, 0.5]))  # a look-up; who is stopped in it may come too late
    if not replay.is_in_transaction:
        with contextlib.suppress(FileNotFoundError):
            os.remove(TRAP)
            note("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
    return [what, NAME, run.baton.replay_epoch]


# The answers ------------------------------------------------------------------------------------

CLAIMS = {"claim", "extend"}
WRITES = {"append_event", "create_step", "end_replay", "complete_run", "fail_run", "advance_run"}
replay = threading.local()  # that of this slot: was it begun in a transaction?


class Connection(psycopg.Connection):
    def execute(self, query, params=None, **options):
        is_in_transaction = self.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        asked = time.time()
        cursor = super().execute(query, params, **options)
        found = re.match(r"select (?:\* from )?baton\.(\w+)", query)
        if found and (row := cursor.fetchone()):
            cursor.scroll(0, "absolute")
            self.note(found[1], row, params, asked, is_in_transaction)
        return cursor

    def note(self, verb, row, params, asked, is_in_transaction):
        if verb in CLAIMS and not is_in_transaction and getattr(row, "outcome", "extended") == "extended":
            receipt = (row.message_id, row.delivery) if verb == "claim" else params[:2]
            note("claims", receipt=receipt, until=row.visible_at.timestamp())
        elif verb == "begin_replay" and row.outcome == "granted":
            replay.is_in_transaction = is_in_transaction
            note("granted", run_id=row.run_id, epoch=row.replay_epoch, asked=asked, receipt=params[:2],
                 backend=self.info.backend_pid, is_committed=not is_in_transaction)
        elif verb in WRITES and row.outcome not in ("terminal", "lost", "declined"):
            note("wrote", run_id=params[0], epoch=params[1], asked=asked, verb=verb)


if __name__ == "__main__":
    psycopg.connect = Connection.connect
    worker_durable.BODIES["work"], worker_durable.WORKFLOWS["soak"] = work, soak
    worker_durable.Slot.execute = execute_noted
    worker = worker_durable.Worker()
    signal.signal(signal.SIGTERM, worker.stop)
    worker.work()
