"""What stays behind

WAL that a message (enqueued, claimed, finished one by one) and a step write, once the pages they touch have been written
whole since the last checkpoint; bytes on disk of what is finished, with indexes, after a vacuum: finished messages of
baton and of graphile-worker are deleted, the others keep theirs until they are pruned. A step of baton goes the short
way. Then, as many messages go through in batches of a hundred, by how much the tables have grown and how many dead rows
autovacuum has left.
"""

from __future__ import annotations

import bench_durable
import bench_queue
from bench_frame import Bench, table


def on_disk(bench: Bench, peer) -> int:
    """The bytes of all tables of a schema, with what belongs to them."""
    return bench.value(f"""
        select sum(pg_total_relation_size(c.oid))::bigint from pg_class as c
        where c.relkind in ('r', 'm') and c.relnamespace = '{peer.schema}'::regnamespace
    """)


def dead_rows(bench: Bench, peer) -> int:
    return bench.value(f"select sum(n_dead_tup)::bigint from pg_stat_user_tables where schemaname = '{peer.schema}'")


def traces(bench: Bench, peer, act, pieces: int) -> list[str]:
    """WAL and disk a piece."""
    act(pieces)  # the second time uses what was left free the first time
    bench.vacuum()
    size, position = on_disk(bench, peer), bench.value("select pg_current_wal_insert_lsn()::text")
    act(pieces)
    wal = bench.value(f"select pg_current_wal_insert_lsn() - '{position}'")
    bench.vacuum()
    return [f"{wal / pieces:.0f}", f"{max(0, on_disk(bench, peer) - size) / pieces:.0f}"]


def run(bench: Bench) -> str:
    pieces, many = (800, 10_000) if bench.short else (2000, 1_000_000)
    rows, ends = [], []
    bench_queue.clear(bench)
    for peer in bench_queue.queues(bench):
        def messages(number, peer=peer):
            bench.repeat("off", peer.enqueue[1], number)
            bench.repeat("off", peer.finish[1], number)

        rows.append([f"{peer.name}: a message", *traces(bench, peer, messages, pieces)])
        if 100 in peer.finish:
            size = on_disk(bench, peer)
            bench.repeat("off", peer.enqueue[100] + peer.finish[100], many // 100)
            ends.append([peer.name, f"{(on_disk(bench, peer) - size) / 1e6:.1f}", f"{dead_rows(bench, peer):,}"])
        bench_queue.clear(bench)
    for peer in (bench_queue.BATON, *bench.peers.values()):
        step = bench_durable.SHORT_SCRIPT if peer.name == "baton" else peer.step
        if step:
            # The first transaction of each starts the run.
            rows.append([f"{peer.name}: a step", *traces(
                bench, peer, lambda number, step=step: bench.repeat("off", step, number + 1), pieces)])
    return (table(["", "bytes of WAL", "bytes on disk"], rows) + "\n"
            + table([f"after {many:,} messages", "more MB on disk", "dead rows"], ends))
