"""The package's clients in a process of their own: bench_baton_driver.py ACTION ..."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/examples"))
os.environ |= {"QUEUE_NAME": "bench", "POLL_SECONDS": "0.01"}
import worker_durable  # noqa: E402

bodies = []


def body(number, task):
    bodies.append(time.perf_counter())
    return {"n": number}


def steps(run):
    for number in range(run.input["steps"]):
        run.step("body", number, key=number)


worker_durable.BODIES["body"] = body
worker_durable.WORKFLOWS["steps"] = steps
worker_durable.log = worker_durable.worker_runs.log = lambda *_: None


def work(messages, batch):
    """Finish what is in hand and claim what comes next, in one statement."""
    one = """
        select c.message_id, c.delivery, c.payload
        from baton.ack(%s, %s) as a left join lateral baton.claim('mail') as c on true
    """
    many = """
        select c.message_id, c.delivery, c.payload
        from (select count(*) from baton.ack_many(%s)) as a
        left join lateral baton.claim('mail', max_messages => %s) as c on true
    """
    receipt, receipts = (None, None), []
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True, prepare_threshold=1) as conn:
        while len(bodies) < messages:
            rows = conn.execute(one, receipt) if batch == 1 else conn.execute(many, [Jsonb(receipts), batch])
            receipts = []
            for *receipt, _ in rows:
                bodies.append(time.perf_counter())
                receipts.append(dict(zip(("message_id", "delivery"), receipt)))
            assert receipt[0]
    return {"seconds": bodies[-1] - bodies[0]}


def run_steps(number):
    """One run in the reference worker."""
    worker = worker_durable.Worker()
    thread = threading.Thread(target=worker.work)
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        thread.start()
        time.sleep(1)
        started = time.perf_counter()
        (run_id,) = conn.execute("select run_id from baton.start_run('steps', jsonb_build_object('steps', %s::integer), "
                                 "queue_name => 'bench')", [number]).fetchone()
        while conn.execute("select status from baton.get_run(%s)", [run_id]).fetchone()[0] != "completed":
            time.sleep(0.2)
    worker.drain()
    thread.join()
    return {"first": (bodies[0] - started) * 1000, "steps": [(b - a) * 1000 for a, b in zip(bodies, bodies[1:])]}


def main(action, *numbers):
    answer = work(int(numbers[0]), int(numbers[2])) if action == "work" else run_steps(int(numbers[0]))
    print(json.dumps(answer))


main(*sys.argv[1:])
