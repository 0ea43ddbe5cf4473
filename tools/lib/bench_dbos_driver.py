"""DBOS in its own process: bench_dbos_driver.py ACTION ..."""

import json
import logging
import os
import sys
import time

from dbos import DBOS

DBOS(config={"name": "bench", "system_database_url": os.environ["DATABASE_URL"], "log_level": "ERROR"})
logging.disable(logging.WARNING)
bodies = []


@DBOS.step()
def body(number):
    bodies.append(time.perf_counter())
    return number


@DBOS.workflow()
def steps(count):
    for number in range(count):
        body(number)


@DBOS.workflow()
def job(n):
    bodies.append(time.perf_counter())


def main(action, *numbers):
    answer = None
    DBOS.launch()
    if action == "sample":
        steps(2)
    elif action == "steps":
        started = time.perf_counter()
        steps(int(numbers[0]))
        answer = {"first": (bodies[0] - started) * 1000,
                  "steps": [(b - a) * 1000 for a, b in zip(bodies, bodies[1:])]}
    elif action == "work":
        handles = [DBOS.enqueue_workflow("bench", job, 1) for _ in range(int(numbers[0]))]
        DBOS.register_queue("bench")
        for handle in handles:
            handle.get_result()
        answer = {"seconds": bodies[-1] - bodies[0]}
    DBOS.destroy()
    print(json.dumps(answer))


main(*sys.argv[1:])
