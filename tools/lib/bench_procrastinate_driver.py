"""procrastinate in its own process: bench_procrastinate_driver.py ACTION ..."""

import asyncio
import json
import os
import sys
import time

import procrastinate

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"]))
bodies = []


@app.task(name="bench", queue="bench")
async def bench(n):
    bodies.append(time.perf_counter())


async def main(action, *numbers):
    answer = None
    async with app.open_async():
        if action == "schema":
            await app.schema_manager.apply_schema_async()
        elif action == "sample" and numbers == ("1",):
            await bench.defer_async(n=1)
            await app.run_worker_async(wait=False, queues=["bench"])
        elif action == "sample":
            await bench.batch_defer_async(*[{"n": 1}] * int(numbers[0]))
            await app.run_worker_async(wait=False, queues=["bench"], concurrency=10)
        elif action == "work":
            await app.run_worker_async(wait=False, queues=["bench"], concurrency=int(numbers[1]))
            assert len(bodies) == int(numbers[0])
            answer = {"seconds": bodies[-1] - bodies[0]}
    print(json.dumps(answer))


asyncio.run(main(*sys.argv[1:]))
