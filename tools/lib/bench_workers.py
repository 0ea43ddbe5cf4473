"""Worker processes

The same through the libraries themselves, a process each, with bodies that do nothing: jobs a second between the first
body and the last, with tables that were analyzed while they were empty, or when they were filled, whichever is better.
"Tuned" is what the library offers for many small jobs: baton and pg-boss claim a hundred at once, graphile-worker has a
local queue of a hundred, its completions batched, and 10 jobs at once, procrastinate runs 10 at once, absurd claims 10 at
once, DBOS has a queue without limits. pg-boss is driven by fetch and complete, since its work() asks every half second at
most, and baton, which has no library, by claim and ack in one statement. Below, one run of many steps: the time from one
body to the next, and from the start of the run to its first body. baton's worker for that is the one in docs/examples: it
keeps the workflow in memory from one step to the next.
"""

from __future__ import annotations

import itertools
import statistics

import bench_queue
from bench_frame import MODES, Bench, percentile, table

# Concurrency and size of a batch.
ONE = (1, 1)
TUNED = {"baton": (1, 100), "graphile-worker": (10, 100), "pg-boss": (1, 100), "procrastinate": (10, 1),
         "absurd": (1, 10), "DBOS": (1, 1)}


def work(bench: Bench, peer, when: str, jobs: int, concurrency: int, batch: int) -> float:
    if peer.enqueue:
        at_once = batch if batch in peer.enqueue else 1
        bench.repeat("off", peer.enqueue[at_once], jobs // at_once)
        if when == bench_queue.FILLED:
            bench.analyze()
    return (jobs - batch) / peer.drive(bench, "work", jobs, concurrency, batch)["seconds"]


def run(bench: Bench) -> str:
    jobs, steps = (200, 200) if bench.short else (600, 1000)
    queues = [*bench_queue.queues(bench), *(peer for peer in bench.peers.values() if not peer.enqueue)]
    walkers = [peer for peer in queues if peer.step or peer.name == "baton"]
    rates, walks = {}, {}
    for mode in MODES:
        with bench.committing(mode):
            for when, peer in itertools.product(bench_queue.ANALYZED, queues):
                for kind, how in {"one at a time": ONE, "tuned": TUNED[peer.name]}.items():
                    if peer.enqueue or kind == "tuned":
                        bench_queue.clear(bench)
                        rate = work(bench, peer, when, 10 * jobs if how[1] == 100 else jobs, *how)
                        rates[mode, kind, peer.name] = max(rate, rates.get((mode, kind, peer.name), 0))
            for peer in walkers:
                walks[mode, peer.name] = peer.drive(bench, "steps", steps)
    columns = [(mode, kind) for mode in MODES for kind in ("one at a time", "tuned")]
    text = table(["jobs a second"] + [f"{MODES[mode]}: {kind}" for mode, kind in columns], [
        [peer.name] + [f"{rates[key]:.0f}" if (key := (*column, peer.name)) in rates else "–" for column in columns]
        for peer in queues]) + "\n"
    for mode, title in MODES.items():
        text += table([f"{title}: a run of {steps} steps", "a second", "p50 ms", "p99 ms", "first body ms"], [
            [peer.name, f"{1000 / statistics.mean(walk['steps']):.0f}", f"{percentile(walk['steps'], 50):.3f}",
             f"{percentile(walk['steps'], 99):.3f}", f"{walk['first']:.1f}"]
            for peer in walkers for walk in [walks[mode, peer.name]]]) + "\n"
    return text
