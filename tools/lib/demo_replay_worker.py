"""A worker of act two: docs/examples/worker_runs.py with a workflow whose every turn is slow and comes out differently.

Each event says who wrote it (pid), under which epoch, and the how-manieth of its run's code it is. Its correlation_id
is drawn anew, as runtimes do that give a new id to each step: nothing but the baton keeps two replays apart.
"""
import os
import random
import signal
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/examples"))
import worker_runs  # noqa: E402
from worker_runs import Diverged, Jsonb, Stopping  # noqa: E402

TURNS_A_REPLAY = 3


class Run(worker_runs.Run):
    def record(self, event_type, decide):
        self.position += 1
        if self.position <= len(self.recorded):
            event = self.recorded[self.position - 1]
            if (event.type, event.payload["position"]) != (event_type, self.position):
                raise Diverged(f"event {event.seq} is {event.type} {event.payload['position']}, "
                               f"not {event_type} {self.position}")
            return event.payload["value"]
        if self.is_stopping():
            raise Stopping
        value = decide()
        self.new.append((event_type, uuid.uuid4().hex, Jsonb({
            "position": self.position, "value": value, "pid": os.getpid(), "epoch": self.baton.replay_epoch})))
        return value


def conversation(run):
    answer = None

    def think(number):
        time.sleep(random.uniform(0.15, 0.35))
        return {"number": number, "after": answer, "answer": uuid.uuid4().hex[:8]}

    for number in range(1, run.input["turns"] + 1):
        answer = run.record("demo.turn", lambda: think(number))["answer"]
        if number % TURNS_A_REPLAY == 0:
            run.sleep(0.05)  # any worker takes it up again
    run.wait_signal("finish")
    return {"answer": answer}


if __name__ == "__main__":
    worker_runs.WORKFLOWS = {"conversation": conversation}
    worker = worker_runs.Worker()
    worker.run_class = Run
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stopping", True))
    worker.work()
