"""The reference worker that executes: workflows with steps, whose bodies run once each (docs/guides/ownership.md).

    DATABASE_URL=postgresql:///app QUEUE_NAME=orders python docs/examples/worker_durable.py
    select * from baton.start_run('order', '{"amount": 7, "items": ["hat", "scarf"]}', queue_name => 'orders');

It adds steps to the consumer of worker_runs.py. A step's one body runs here, inline, under the run message that this
process holds; the bodies of a fan-out have messages of their own, for any process. One message at a time in each of its
slots. What has ended elsewhere is asked to stop (cancellation.py), and so is everything on SIGTERM. Needs psycopg.
"""
import concurrent.futures
import contextlib
import copy
import os
import signal
import threading
import time
import types
import uuid

import psycopg
import worker_runs
from cancellation import Attempt, Cancelled, Control
from psycopg.types.json import Jsonb
from worker_runs import (
    DATABASE_URL, POLL_SECONDS, UNKNOWN_DELAY, VISIBILITY, Diverged, Failed, Run, Stopping, Suspended, as_logged, connect,
    log,
)

FUNCTION = os.environ.get("FUNCTION_NAME")  # a registered function of start_mode process; without: no heartbeat
SLOTS = int(os.environ.get("SLOTS", "1"))
HEARTBEAT_SECONDS = float(os.environ.get("HEARTBEAT_SECONDS", "5"))
LISTEN_URL = os.environ.get("LISTEN_URL", DATABASE_URL)  # a direct connection, not a transaction pooler's; off: none


# A body does what has an effect on the world. It may be run again if its process dies before its end is written down:
# `attempt` counts, and run, step and index are the same each time, as a key for others to recognise it by.
def charge(amount, task):
    return {"payment": f"{task.run_id}/{task.step_slug}", "amount": amount}


def pack(item, task):
    for _ in range(3):
        task.raise_if_cancelled()  # a long body asks from time to time whether it is to go on
        task.cancelled.wait(0.01)  # and waits for things so that it hears of it
    return {"box": f"{item}-{task.attempt}"}


BODIES = {body.__name__: body for body in (charge, pack)}


# A workflow only decides. It may be called again from the top after any step, and must come to the same steps.
def order(run):
    try:
        payment = run.step("charge", run.input["amount"], max_attempts=5)
    except StepFailed as failed:
        raise Failed({"not charged": failed.error}) from None
    return {"payment": payment, "boxes": run.map("pack", run.input["items"])}


WORKFLOWS = {"order": order}


class StepFailed(Failed):
    """Raised by run.step and run.map: a body has failed for good, or has killed its process too often. So it is at each
    replay: where the code doesn't catch it, the run ends as failed, with what the log says of the step."""

    def __init__(self, end):
        super().__init__(end)
        self.slug, self.error = end["step_slug"], copy.deepcopy(end.get("error") or end.get("reason"))


class StepRun(Run):
    """What a workflow sees of its run in one replay; with advance, from the end of a step on, ahead of the next one."""

    def __init__(self, events, baton, is_stopping, advance=None):
        super().__init__(events, baton, is_stopping)
        self.created, self.passed, self.ended, self.outputs = {}, set(), {}, {}  # created: and not passed yet
        self.new_steps, self.advance = [], advance
        for event in events:
            if event.type == "step_created":
                self.created[event.correlation_id] = event.payload
            elif event.type == "task_completed":
                self.outputs.setdefault(event.payload["step_slug"], {})[event.payload["task_index"]] = event.payload["output"]
            elif event.type == "run_advanced":  # by the short way: a step's one body has ended, and the next has one
                self.outputs[event.payload["step_slug"]] = {0: event.payload["output"]}
                self.created[event.correlation_id] = {"task_count": 1}
            elif event.type in ("step_failed", "step_skipped"):
                self.ended[event.payload["step_slug"]] = event

    def record(self, event_type, decide):
        """Ahead of a replay nothing is decided that the replay would have to write down."""
        if self.advance and self.position == len(self.recorded):
            self.leave(Suspended(None))
        return super().record(event_type, decide)

    def step(self, body, input=None, key="", **options):
        """What BODIES[body](input) answers. The same body again in a run needs a key, which makes the step's name."""
        outputs = self.map(body, [input], key, **options)
        return outputs and outputs[0]

    def map(self, body, inputs, key="", **options):
        """The answers for all inputs, in their order; None if the step was skipped. Options: those of create_step."""
        self.raise_if_left()
        slug, inputs = f"{body} {key}".strip(), list(inputs)
        if slug in self.passed:
            raise Diverged(f"there is a step {slug!r} already: give it a key")
        self.passed.add(slug)
        if not (created := self.created.pop(slug, None)):
            if not inputs:  # a step without tasks would end at once, and nobody be woken
                return []
            step = slug, as_logged(inputs), options.get("on_exhausted"), options.get("max_attempts")
            if self.is_stopping():
                self.leave(Stopping())
            if not self.advance:
                self.new_steps.append(step)
            elif len(inputs) == 1 and self.position == len(self.recorded) and not self.created:
                if output := self.advance(*step):
                    return copy.deepcopy([output.obj])
            self.leave(Suspended(None))
        if created["task_count"] != len(inputs):
            raise Diverged(f"step {slug!r} had {created['task_count']} inputs, not {len(inputs)}")
        outputs = self.outputs.get(slug, {})
        if len(outputs) == len(inputs):
            return copy.deepcopy([outputs[index] for index in range(len(inputs))])
        if not (end := self.ended.get(slug)):
            self.leave(Suspended(None))
        if end.type == "step_failed":
            raise StepFailed(end.payload)
        return None


class Worker:
    """A process: its slots, and what they share. Another one may follow in the same process."""

    def __init__(self):
        worker_id = uuid.uuid4()
        self.worker_id = worker_id if FUNCTION else None
        self.asking, self.over, self.is_registered = threading.Lock(), threading.Event(), False
        self.control = Control(worker_id, connect, HEARTBEAT_SECONDS, on_beat=self.beat, listen=None
                               if LISTEN_URL == "off" else lambda: connect(
                                   LISTEN_URL, keepalives_idle=10, keepalives_interval=5, keepalives_count=3))
        self.slots = [Slot(self) for _ in range(SLOTS)]

    def work(self):
        self.control.start()
        extending = threading.Thread(target=worker_runs.extend, args=(self.slots, self.over), daemon=True)
        extending.start()
        with concurrent.futures.ThreadPoolExecutor(SLOTS) as pool:
            try:
                for served in concurrent.futures.as_completed([pool.submit(slot.serve) for slot in self.slots]):
                    served.result()
            finally:
                self.stop()
        self.over.set()
        extending.join()
        self.control.close()
        if FUNCTION:
            with contextlib.suppress(psycopg.Error), contextlib.closing(connect()) as db:
                db.execute("select * from baton.stop_worker(%s)", [self.worker_id])
        log("stopped")

    def drain(self):
        """Claims nothing more. What is in hand is finished."""
        for slot in self.slots:
            slot.stopping = True

    def stop(self, *_):
        """The handler of SIGTERM: what is in hand is given back, and the bodies are asked to stop."""
        self.drain()
        self.control.shut_down()

    def beat(self, db, state):
        if not FUNCTION:
            return
        if not self.is_registered:
            answer = db.execute("select * from baton.register_worker(%s, %s)", (self.worker_id, FUNCTION)).fetchone()
            self.is_registered = answer.outcome == "registered"
        answer = db.execute("select * from baton.heartbeat(%s, %s)", (self.worker_id, state)).fetchone()
        if answer.outcome != "active":  # stopping, deprecated, stopped, unknown: it was refused
            log("draining:", answer.outcome)
            self.drain()


class Slot(worker_runs.Worker):
    """One message at a time: the connection and the loop are those of worker_runs."""

    def __init__(self, worker):
        super().__init__()
        self.worker, self.worker_id, self.control = worker, worker.worker_id, worker.control

    def claim(self):
        with self.worker.asking:  # of all that are idle one asks
            while not self.stopping:
                if message := super().claim():
                    return message
                time.sleep(POLL_SECONDS)

    def one(self, sql, *arguments):
        row = super().one(sql, *arguments)
        if row and getattr(row, "outcome", None) == "in_use":
            raise AssertionError(f"bodies run under {self.receipt}, and it was to be given away: {sql}")
        return row

    def handle(self, message):
        return self.handle_run() if message.kind == "run" else self.handle_task()

    # A run message ------------------------------------------------------------------------------

    def handle_run(self):
        """Replay, and run the body that it starts here, and those that follow from it; again until there is none."""
        events = []
        outcome, task = self.replay(events)
        while task:
            ended = self.execute(task)
            if task.output and task.attempt == 1:
                ended = self.run_ahead(events, task, ended)
            if not ended:
                return "given back"
            # A later attempt ends alone: should the workflow's code kill us now, that is not the body's fault.
            answer = self.end_and_replay(events, ended) if task.attempt == 1 else None
            if not answer:
                self.end(ended)
                answer = self.replay(events)
            outcome, task = answer
        return outcome

    def run_ahead(self, events, task, ended):
        """The short way: the code goes on over an end that isn't told yet, and stays on its stack from there: while it wants
        one step of one input after the other, and nothing else happens to the run, a step is one call of advance_run.
        Answers the end that is to be told the long way, or None: the last body was given back."""
        error = None

        def advance(*step):
            nonlocal task, ended, error
            try:
                if task := self.advance(task, *step):
                    ended = self.execute(task)
            except BaseException as raised:  # not for the code to catch
                task, error = None, raised
            return task and task.output

        run = StepRun(events, task.baton, lambda: self.stopping, advance)
        run.created.setdefault(task.step_slug, {"task_count": 1})
        run.outputs.setdefault(task.step_slug, {})[task.task_index] = task.output.obj
        with contextlib.suppress(Exception, Suspended, Stopping):  # what the code raises is left to the replay, too
            run.call(WORKFLOWS[task.baton.workflow_name])
        if error:
            raise error
        return ended

    def advance(self, task, slug, inputs, *options):
        """The end of a body and the start of the next one in one call. Answers the next one; None: take the long way."""
        try:
            answer = self.one("select baton.advance_run(%s, %s, %s, %s, %s, %s, %s, %s) as outcome", task.run_id,
                              task.baton.replay_epoch, task.step_slug, task.output, slug, Jsonb(inputs[0]), *options)
            if answer.outcome == "advanced":
                return Task(task.baton, types.SimpleNamespace(step_slug=slug, task_index=0, attempt=1, input=inputs[0]))
        except psycopg.Error as error:
            log("not advanced:", repr(error))
        return None

    def end_and_replay(self, events, ended):
        """The end of a body and the replay that follows, in one short transaction: one commit a step."""
        seen = len(events)
        try:
            with self.db.transaction():
                self.one(*ended)
                return self.replay(events, contextlib.nullcontext)
        except psycopg.Error as error:
            log("rolled back:", repr(error))
            del events[seen:]
            return None

    def replay(self, events, transaction=None):
        """Answers how it ended, and the body that this process is to run, if it was given one."""
        # hold session: if this process is killed while it decides, its connection tells, and the run is free at once
        baton = self.one("select * from baton.begin_replay(%s, %s, 'session')", *self.receipt)
        outcome, task = baton.outcome, None  # handed_over: somebody else goes on, and sees what we have written
        while outcome in ("granted", "again"):  # again: something came while we decided
            self.read_on(baton.run_id, events)
            run, end = self.decide(baton, events)  # with no transaction open, unless one is given
            with (transaction or self.db.transaction)():  # all or nothing
                outcome, started = self.write(baton, run, end)
            task = task or started
            if started and run.new:  # ahead the code comes by what it has recorded here
                self.read_on(baton.run_id, events)
        return outcome, task if outcome == "ended" else None

    def read_on(self, run_id, events):
        while page := self.db.execute("select * from baton.read_events(%s, %s)",
                                      (run_id, events[-1].seq if events else 0)).fetchall():
            events += page

    def decide(self, baton, events):
        """Run the workflow's code over the events. Answers what is to be written, and how the replay is to end; or None,
        and with what to fail."""
        if not (workflow := WORKFLOWS.get(baton.workflow_name)):  # others may know it: a newer deployment
            return None, (f"unknown workflow: {baton.workflow_name}", UNKNOWN_DELAY)
        run, fence, error = StepRun(events, baton, lambda: self.stopping), (baton.run_id, baton.replay_epoch), None
        try:
            end = "select * from baton.complete_run(%s, %s, %s)", *fence, Jsonb(run.call(workflow))
        except Suspended as wait:
            end = "select * from baton.end_replay(%s, %s, %s, %s)", *fence, events[-1].seq, *wait.args
        except Failed as failed:
            end = "select * from baton.fail_run(%s, %s, %s)", *fence, Jsonb(failed.args[0])
        except Stopping:
            end = self.parking()
        except Exception as raised:
            error = repr(raised)
        if run.position < len(run.recorded) or run.created:
            error = error or "Diverged('the log holds more than the code did')"
        return (None, (error,)) if error else (run, end)

    def write(self, baton, run, end):
        """Answers how the replay ended, and the body that this process is to run, if it was given one."""
        if not run:
            return self.fail(*end), None
        task, fence = None, (baton.run_id, baton.replay_epoch)
        for event in run.new:
            self.one("select * from baton.append_event(%s, %s, %s, %s, %s)", *fence, *event)
        for slug, inputs, *options in run.new_steps:
            self.one("select * from baton.create_step(%s, %s, %s, %s, %s, %s)", *fence, slug, Jsonb(inputs), *options)
        if isinstance(run.left, Suspended):
            rows = self.dispatch(fence)
            if any(row.outcome == "lost" for row in rows):  # our claim ran out; if nobody took it, it is still ours
                self.one("select * from baton.extend(%s, %s, %s)", *self.receipt, VISIBILITY)
                rows = self.dispatch(fence)
            # running: it was given to us, and the answer was lost
            task = next((Task(baton, row) for row in rows if row.outcome in ("execute", "running")), None)
        return self.one(*end).outcome, task

    def dispatch(self, fence):
        """At most one body at a time under our message; the others get messages of their own."""
        return self.db.execute("select * from baton.dispatch_tasks(%s, %s, 1)", fence).fetchall()

    # A task message -----------------------------------------------------------------------------

    def handle_task(self):
        started = self.one("select * from baton.start_task(%s, %s)", *self.receipt)
        if started.outcome != "execute":  # await, skip, lost: nothing is left to do
            return started.outcome
        ended = self.execute(Task(started, started))
        return self.end(ended) if ended else "given back"

    # A body -------------------------------------------------------------------------------------

    def execute(self, task):
        """Run a body, while the message that it runs under is extended. Answers the call that tells how it ended."""
        if not (body := BODIES.get(task.step_slug.split(" ")[0])):
            self.fail(f"unknown step: {task.step_slug}", UNKNOWN_DELAY)
            return None
        verb, options = "complete_task", ""
        try:
            with self.control.registered(task):
                task.raise_if_cancelled()
                result = as_logged(body(task.input, task))
            task.output = Jsonb(result)
        except (Cancelled, Exception) as raised:
            if task.cancelled.is_set():  # it has stopped, in whatever way: given back, unless it has ended
                log(self.tell(*self.parking()).outcome, task.step_slug)
                return None
            verb, result = "fail_task", repr(raised)
            if isinstance(raised, Failed):
                result, options = raised.args[0], ", final => true"
        return (f"select * from baton.{verb}(%s, %s, %s, %s, %s, %s, %s{options})", task.run_id, task.step_slug,
                task.task_index, task.attempt, Jsonb(result), *self.receipt)

    def tell(self, *call):
        """What became of a body. If the connection broke meanwhile, over a new one: to say it twice is harmless."""
        while True:
            try:
                if self.db.closed:
                    self.db = connect()
                return self.one(*call)
            except psycopg.OperationalError as error:
                if not self.db.closed or self.stopping:
                    raise
                log("database:", repr(error))
                time.sleep(POLL_SECONDS)

    def end(self, ended):
        try:
            return self.tell(*ended).outcome
        except psycopg.Error as error:  # an output over settings.max_payload_bytes, or that jsonb can't hold
            if (error.sqlstate or "")[:2] not in ("22", "54"):
                raise
            _, *task, _, message_id, delivery = ended
            return self.tell("select * from baton.fail_task(%s, %s, %s, %s, %s, %s, %s, final => true)", *task,
                            Jsonb(repr(error)), message_id, delivery).outcome

    # By force: the body that ran under the message has stopped, or can't be run here, and is given out anew.

    def parking(self):
        return "select * from baton.park(%s, %s, force => true)", *self.receipt

    def fail(self, error, delay=None):
        log("failing:", error)
        return self.one("select * from baton.fail(%s, %s, %s, %s, force => true)", *self.receipt, error, delay).outcome


class Task(Attempt):
    """What a body is told of itself: which attempt it is, and whether it is to stop."""

    def __init__(self, baton, row):
        super().__init__(baton.run_id, row.step_slug, row.task_index, row.attempt)
        self.baton, self.input, self.output = baton, row.input, None  # the replay that started it here


if __name__ == "__main__":
    worker = Worker()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.stop)
    worker.work()
