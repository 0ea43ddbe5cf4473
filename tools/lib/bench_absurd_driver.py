"""absurd in its own process: bench_absurd_driver.py ACTION ..."""

import json
import os
import sys
import time

import psycopg
from absurd_sdk import Absurd

conn = psycopg.connect(os.environ["DATABASE_URL"], autocommit=True)
absurd = Absurd(conn, queue_name="bench")
bodies = []


@absurd.register_task("bench")
def bench(params, context):
    for number in range(params.get("steps", 0)):
        context.step(f"step-{number}", lambda: body(number))
    if not params.get("steps"):
        body(0)
    return {"n": 1}


def body(number):
    bodies.append(time.perf_counter())
    return {"n": number}


def work(tasks, batch=1):
    while len(bodies) < tasks:
        absurd.work_batch(batch_size=batch)


def main(action, *numbers):
    answer = None
    if action == "sample":
        absurd.spawn("bench", {"n": 1})
        absurd.work_batch()
        absurd.spawn("bench", {"steps": 1})
        absurd.work_batch()
    elif action == "work":
        work(int(numbers[0]), int(numbers[2]))
        answer = {"seconds": bodies[-1] - bodies[0]}
    elif action == "steps":
        started = time.perf_counter()
        absurd.spawn("bench", {"steps": int(numbers[0])})
        absurd.work_batch(claim_timeout=3600)
        answer = {"first": (bodies[0] - started) * 1000,
                  "steps": [(b - a) * 1000 for a, b in zip(bodies, bodies[1:])]}
    print(json.dumps(answer))


main(*sys.argv[1:])
