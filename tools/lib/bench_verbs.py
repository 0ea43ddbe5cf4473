"""The verbs

What each verb costs, as multiples of a single-row commit, and to the server itself.
One connection goes through cycles of verbs, a transaction each. A figure is the median over the rounds of a mean within
a round. "From run to run" is a replay's whole way in one statement: `end_replay` of the run before, `claim`, and
`begin_replay` of the next ([how](guides/replay.md#from-run-to-run)). What a call costs the server is measured apart, one
connection at a time. Meanwhile 10,000 runs and messages of baton wait for tomorrow, so that no plan is made for empty
tables; no jobs of graphile-worker do, which gets a plan for them that takes five times as long.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from pathlib import Path

import psycopg

import bench_queue
from bench_frame import FLOOR, FLOOR_SQL, MODES, Bench, statement, table, target

# What a grant and an end change, without a function, a decision table, or anything else that they promise.
BARE = "the same rows changed by two bare statements"
NEXT = "from run to run: end_replay, claim and begin_replay"
BARE_NEXT = "the same rows changed by one bare statement"
# Look-ups, as in begin_replay: a join that is planned for few runs reads them all.
BARE_BEGIN = """
with free as materialized (
  select r.run_id, m.message_id, m.delivery from baton.runs as r cross join baton.messages as m
  where r.run_id = (select k.run_id from baton.messages as k where k.message_id = :message_id)
    and m.message_id = :message_id and m.delivery = :delivery and m.claimed_at is not null and r.replay_ended
  for no key update of r, m skip locked
)
update baton.runs as r
set status = 'running', replay_epoch = 1, replay_ended = false, replay_message_id = :message_id,
  replay_delivery = :delivery, replay_began_at = clock_timestamp(), wake_pending = false, wake_message_id = null
where r.run_id = (select f.run_id from free as f)
returning r.replay_epoch, r.last_seq""".strip()
BARE_END = """
with held as materialized (
  select r.run_id, r.replay_message_id from baton.runs as r
  where r.run_id = :run_id and r.replay_epoch = :replay_epoch and r.wake_seq <= :last_seq for no key update of r
), gone as (
  delete from baton.messages as m where m.message_id = (select h.replay_message_id from held as h)
)
update baton.runs as r set status = 'suspended', replayed_seq = :last_seq, replay_ended = true
where r.run_id = (select h.run_id from held as h)
returning r.status as outcome""".strip()
FROM_RUN_TO_RUN = """
select n.*
from baton.end_replay(:next_run_id, :next_epoch, :next_seq) as e
left join lateral (
  select b.run_id as next_run_id, b.replay_epoch as next_epoch, b.last_seq as next_seq
  from baton.claim('runs', max_messages => (e.outcome <> 'again')::integer, visibility => '1 hour') as m
  cross join lateral baton.begin_replay(m.message_id, m.delivery) as b
) as n on true""".strip()
BARE_FROM_RUN_TO_RUN = """
with held as materialized (
  select r.run_id, r.replay_message_id from baton.runs as r
  where r.run_id = :bare_run_id and r.replay_epoch = :bare_epoch and r.wake_seq <= :bare_seq for no key update of r
), gone as (
  delete from baton.messages as m where m.message_id = (select h.replay_message_id from held as h)
), ended as (
  update baton.runs as r set status = 'suspended', replayed_seq = :bare_seq, replay_ended = true
  where r.run_id = (select h.run_id from held as h)
), due as materialized (
  select m.message_id, m.run_id from baton.messages as m
  where m.queue_name = 'runs' and m.visible_at <= clock_timestamp()
  order by m.visible_at, m.message_id limit 1 for no key update of m skip locked
), claimed as (
  update baton.messages as m
  set delivery = 1, claimed_at = clock_timestamp(), visible_at = clock_timestamp() + interval '1 hour'
  where m.message_id = (select d.message_id from due as d)
  returning m.message_id, m.delivery
)
update baton.runs as r
set status = 'running', replay_epoch = 1, replay_ended = false, replay_message_id = c.message_id,
  replay_delivery = c.delivery, replay_began_at = clock_timestamp(), wake_pending = false, wake_message_id = null
from claimed as c
where r.run_id = (select d.run_id from due as d)
returning r.run_id as bare_run_id, r.replay_epoch as bare_epoch, r.last_seq as bare_seq""".strip()

# A cycle: (name, statement), in order. Statements of one name are added up.
CYCLE = [
    (FLOOR, FLOOR_SQL),
    ("send", """select outcome from baton.send('mail', '{"n": 1}')"""),
    ("claim + ack", "select message_id, delivery from baton.claim('mail')"),
    ("claim + ack", "select outcome from baton.ack(:message_id, :delivery)"),
    ("start_run", """select run_id from baton.start_run('bench', '{"n": 1}', queue_name => 'runs')"""),
    ("claim of a run message", "select message_id, delivery from baton.claim('runs')"),
    ("begin_replay + end_replay", "select replay_epoch, last_seq from baton.begin_replay(:message_id, :delivery)"),
    ("begin_replay + end_replay", "select outcome from baton.end_replay(:run_id, :replay_epoch, :last_seq)"),
    ("signal_run", """select outcome from baton.signal_run(:run_id, 'bench', '{"n": 1}')"""),
    ("claim of a run message", "select message_id, delivery from baton.claim('runs')"),
    ("begin_replay + complete_run", "select replay_epoch from baton.begin_replay(:message_id, :delivery)"),
    ("begin_replay + complete_run", "select outcome from baton.complete_run(:run_id, :replay_epoch, '{}')"),
    ("start_run", """select run_id from baton.start_run('bench', '{"n": 1}', queue_name => 'runs')"""),
    ("claim of a run message", "select message_id, delivery from baton.claim('runs')"),
    (BARE, BARE_BEGIN),
    (BARE, BARE_END),
    ("start_run", """select run_id from baton.start_run('bench', '{"n": 1}', queue_name => 'runs')"""),
    (NEXT, FROM_RUN_TO_RUN),
    ("start_run", """select run_id from baton.start_run('bench', '{"n": 1}', queue_name => 'runs')"""),
    (BARE_NEXT, BARE_FROM_RUN_TO_RUN),
]
# What goes on from cycle to cycle has no run before the first.
BEFORE = {f"{name}_{what}": value for name in ("next", "bare")
          for what, value in {"run_id": "-", "epoch": 0, "seq": 0}.items()}
TARGET = "begin_replay + end_replay"
PEER = "graphile-worker: claim + complete"


def run_pgbench(bench, script, cycles, mode):
    """The mean of each statement, in milliseconds."""
    before = [part for name, value in BEFORE.items() for part in ("-D", f"{name}={value}")]
    listed = bench.pgbench(mode, "-r", "-t", cycles, *before, "-f", script.name)
    listed = listed.split("statement latencies in milliseconds", 1)[1].split("\n", 1)[1]
    return [float(line.split()[0]) for line in listed.splitlines() if line.strip()]


def add_up(cycle, values):
    """One figure a name; what a cycle does twice is divided by how often it does it."""
    sums, seen = {}, {}
    for (name, statement), value in zip(cycle, values, strict=True):
        sums[name] = sums.get(name, 0) + value
        seen.setdefault(name, []).append(statement)
    return {name: total * len(set(seen[name])) / len(seen[name]) for name, total in sums.items()}


def measure(cluster, cycle, cycles, before, after, settings):
    """What after(connection, before(connection)) gives for each statement, a list a cycle. Caches are warm."""
    figures = [[] for _ in cycle]
    with psycopg.connect(cluster.dsn(), autocommit=True, prepare_threshold=1) as conn:
        conn.execute(settings)
        variables = dict(BEFORE)
        for nth in range(cycles + cycles // 2):
            for values, (_, statement) in zip(figures, cycle, strict=True):
                started = before(conn)
                cursor = conn.execute(re.sub(r"(?<![:\w]):([a-z_]+)", r"%(\1)s", statement), variables)
                value = after(conn, started)
                if cursor.description:
                    variables |= dict(zip((c.name for c in cursor.description), cursor.fetchone(), strict=True))
                if nth >= cycles // 2:
                    values.append(value)
    return figures


def count(cluster, cycle):
    """A call's statements with those inside it, the buffers it touches, the bytes of WAL that it writes, and the
    functions that were compiled for it: none should be."""
    query = """
        select
          sum(calls), sum(shared_blks_hit + shared_blks_read) filter (where toplevel),
          sum(wal_bytes) filter (where toplevel), sum(jit_functions)
        from pg_stat_statements
        where query not like '%pg_stat_statements_reset%'
    """
    counts = measure(
        cluster, cycle, 50, lambda conn: conn.execute("select pg_stat_statements_reset()"),
        lambda conn, _: [int(n) for n in conn.execute(query).fetchone()], "set pg_stat_statements.track = 'all'",
    )
    columns = [add_up(cycle, [statistics.mean(v[i] for v in values) for values in counts]) for i in range(4)]
    return {name: [f"{column[name]:.0f}" for column in columns] for name in columns[0]}


def processor_time(cluster, cycle):
    """The server's own time on a processor for a call, in microseconds: the lower quartile."""
    def now(conn):
        return int(Path(f"/proc/{conn.info.backend_pid}/schedstat").read_text().split()[0]) / 1000

    times = measure(cluster, cycle, 400, now, lambda conn, started: now(conn) - started, "set synchronous_commit = off")
    return add_up(cycle, [statistics.quantiles(values, n=4)[0] for values in times])


def run(bench: Bench) -> str:
    cycle = list(CYCLE)
    graphile = bench.peers.get("graphile-worker")
    if graphile:
        cycle += [
            ("graphile-worker: add_job", """select id from graphile_worker.add_job('bench', '{"n": 1}')"""),
            (PEER, graphile.claim),
            (PEER, graphile.complete),
        ]
    rounds, cycles = (2, 100) if bench.short else (4, 1000)
    with bench.connect() as conn:
        conn.execute("""
            select count(*) from generate_series(1, 10000)
            cross join lateral baton.start_run('bench', '{}', queue_name => 'runs', delay => '1 day')
        """)
        conn.execute(bench_queue.BATON.delayed, {"rows": 10_000})
    figures = {mode: [] for mode in MODES}
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write("".join(statement(sql) for _, sql in cycle))
        script.flush()
        run_pgbench(bench, script, cycles, "off")  # warm up
        for _ in bench.rounds(rounds):
            bench.vacuum()
            for mode in MODES:
                figures[mode].append(add_up(cycle, run_pgbench(bench, script, cycles, mode)))
    names = list(figures["on"][0])

    def median(mode, name, unit=None):
        return statistics.median(f[name] / (f[unit] if unit else 1) for f in figures[mode])

    head = ["median"] + [f"{text}: {what}" for text in MODES.values() for what in ("ms", "commits")]
    text = table(head, [[name] + [text for mode in MODES for text in (
        f"{median(mode, name):.3f}", f"{median(mode, name, FLOOR):.2f}")] for name in names])
    if bench.counts_statements:
        counts, times = count(bench.cluster, cycle), processor_time(bench.cluster, cycle)
        text += "\n" + table(["a call", "µs of processor", "statements", "buffers", "bytes of WAL", "compiled by JIT"],
                             [[name, f"{times[name]:.0f}", *counts[name]] for name in names])
    if graphile:
        text += "\n" + "".join(target(f"{name} against {PEER} ({MODES[mode]})", median(mode, name, PEER), 1)
                               for name in (TARGET, BARE, NEXT, BARE_NEXT) for mode in MODES)
    return text
