"""A queue

Messages are put into a queue, then claimed and finished, one by one or in batches; messages a second. "claim + finish"
are two commits, as a consumer pays them that handles its message in between; "finish one, claim the next" is one
statement, and so are the "bare statements", which change the rows that the verbs change and check nothing. One client
draws by lot whose turn it is; 4 and 16 clients work for one contender after the other. A peer without a verb for
batches is left out there. Each round goes through all of it twice, with tables that were analyzed while they were empty,
and when they were filled: plans differ, and each figure is that of the better ones. `baton.tick` runs every 5 s, as
`schedule()` has it by default.
"""

from __future__ import annotations

import itertools
import statistics

from bench_baton import Baton
from bench_frame import FLOOR, FLOOR_SQL, MODES, WARM, Bench, table, target

BATCHES = {1: 1, 10: 3, 100: 10}  # and how many times as many messages
CLIENTS = (1, 4, 16)
BATON = Baton()
EMPTY, FILLED = ANALYZED = "analyzed while empty", "analyzed when filled"
IN_ONE = "baton: finish one, claim the next"
BARE = "the same rows changed by bare statements"


def queues(bench: Bench) -> list:
    return [BATON, *(peer for peer in bench.peers.values() if peer.enqueue)]


def contenders(bench: Bench, batch: int):
    """The scripts of both halves, by name; each name with the one whose queue it is."""
    owners = {peer.name: peer for peer in queues(bench) if batch in peer.enqueue}
    enqueue = {name: peer.enqueue[batch] for name, peer in owners.items()} | {BARE: BATON.bare_enqueue[batch]}
    finish = {name: peer.finish[batch] for name, peer in owners.items() if batch in peer.finish}
    return owners, enqueue, finish | {IN_ONE: BATON.finish_and_next[batch], BARE: BATON.bare_finish[batch]}


def in_turns(bench: Bench, mode: str, batch: int, messages: int, when: str) -> dict[tuple[str, str], float]:
    """One client that draws by lot whose turn it is: messages a second, by half and name."""
    owners, enqueue, finish = contenders(bench, batch)
    transactions = WARM + max(messages // batch, 10)
    floor = {FLOOR: FLOOR_SQL + ";\n"}
    put = bench.times(mode, enqueue | floor, transactions * (len(enqueue) + 1))
    for name in finish:  # more than what chance may take
        bench.repeat("off", owners.get(name, BATON).enqueue[batch], transactions + 20)
    if when == FILLED:
        bench.analyze()
    before = {name: bench.value(owner.left) for name, owner in owners.items()}
    taken = bench.times(mode, finish | floor, transactions * (len(finish) + 1))
    for name, owner in owners.items():
        gone = batch * sum(len(taken[n]) for n in finish if owners.get(n, BATON) is owner)
        assert before[name] - bench.value(owner.left) == gone, f"{name} has lost count"
    return {(half, name): batch * 1000 / statistics.mean(times[WARM:])
            for half, all_times in {"enqueue": put, "finish": taken}.items() for name, times in all_times.items()
            if batch == 1 or name != FLOOR}


def by_many(bench: Bench, mode: str, batch: int, clients: int, messages: int,
            when: str) -> dict[tuple[str, str], float]:
    """So many clients of one contender, then of the next: messages a second, by half and name."""
    owners, enqueue, finish = contenders(bench, batch)
    del enqueue[BARE], finish[BARE]
    transactions = max(messages // batch // clients, 2 * WARM)
    taken = (WARM + transactions) * clients
    rates = {}
    for name, script in (enqueue if batch > 1 else enqueue | {FLOOR: FLOOR_SQL + ";\n"}).items():
        rates["enqueue", name] = batch * bench.rate(mode, script, transactions, clients)
    for name, script in finish.items():
        owner = owners.get(name, BATON)
        # A claim may skip what another one has locked at that moment: some more than are taken out.
        bench.repeat("off", owner.enqueue[batch], clients + (taken if name == IN_ONE else 0))
        if when == FILLED:
            bench.analyze()
        before = bench.value(owner.left)
        rates["finish", name] = batch * bench.rate(mode, script, transactions, clients)
        assert before - bench.value(owner.left) == batch * taken, f"{name} has lost count"
    return rates


def clear(bench: Bench):
    with bench.connect() as conn:
        for peer in queues(bench):
            conn.execute(peer.clear)
    bench.vacuum()


def run(bench: Bench) -> str:
    rounds, messages, crowds = (1, 400, CLIENTS[:2]) if bench.short else (3, 800, CLIENTS)
    figures = {when: {} for when in ANALYZED}
    with bench.ticking():
        for _ in bench.rounds(rounds, 400):
            for batch, mode, clients, when in itertools.product(BATCHES, MODES, crowds, ANALYZED):
                number = messages * BATCHES[batch]
                found = (in_turns(bench, mode, batch, number, when) if clients == 1 else
                         by_many(bench, mode, batch, clients, number, when))
                for key, rate in found.items():
                    figures[when].setdefault((mode, batch, clients, *key), []).append(rate)
                clear(bench)
    rates = {key: max(statistics.median(of[key]) for of in figures.values()) for key in figures[EMPTY]}
    columns = [(batch, clients) for batch in BATCHES for clients in crowds]
    names = [", ".join([f"{batch} by {batch}"] * (batch > 1) + ["1 client" if clients == 1 else f"{clients} clients"])
             for batch, clients in columns]
    text = ""
    for mode, title in MODES.items():
        for half, verb in {"enqueue": "enqueue", "finish": "claim + finish"}.items():
            text += table([f"{title}: {verb}, a second", *names], [
                [name] + [f"{rates[key]:.0f}" if (key := (mode, *column, half, name)) in rates else "–"
                          for column in columns]
                for name in dict.fromkeys(key[4] for key in rates if key[3] == half)]) + "\n"
    peers = [peer.name for peer in bench.peers.values()]
    for mode, title in MODES.items():
        for half, ours, batch, limit in (
            ("enqueue", "baton", 1, 1), ("enqueue", "baton", 100, 0.5), ("enqueue", BARE, 100, 0.5),
            *(("finish", ours, batch, limit) for batch, limit in {1: 0.7 if mode == "on" else 1, 100: 0.5}.items()
              for ours in (IN_ONE, BARE)),
        ):
            theirs = {name: rates[key] for name in peers if (key := (mode, batch, 1, half, name)) in rates}
            if theirs:
                best = max(theirs, key=theirs.get)
                bare = ", bare statements" if ours == BARE else ""
                text += target(f"{half} {batch} by {batch}{bare}, against {best} ({title}, 1 client)",
                               theirs[best] / rates[mode, batch, 1, half, ours], limit)
    return text
