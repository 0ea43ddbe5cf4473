"""Many sessions that all want to start the same functions, for ten seconds, while nobody accepts."""

import random
import threading
import time
from collections import Counter

from starts import call, one, record_starts, register

SESSIONS = 32
SECONDS = 10


def hammer(db, functions, seconds, enable=()):
    """All answers `reserved` to 32 sessions that call ensure_workers and reserve in a loop.

    What a session reserved it sends itself, as a manual start does. Two more sessions enable the functions in `enable`
    all the time, which clears their throttle: only the pending start is left to hold the others back.
    """
    answers, failures = [], []
    start = threading.Barrier(SESSIONS + 3)
    conns = [db.connect() for _ in range(SESSIONS + 2)]
    ends = []

    def starter(conn, seed):
        choice = random.Random(seed)
        start.wait()
        while time.monotonic() < ends[0]:
            for row in call(conn, "ensure_workers"):
                assert row.outcome in ("reserved", "locked"), row
                if row.outcome == "reserved":
                    answers.append((row.function_name, row.invocation_id))
            function = choice.choice(functions)
            with conn.transaction():
                row = one(conn, "reserve_worker_invocation", function_name=function)
                assert row.outcome in ("reserved", "pending", "throttled"), row
                if row.outcome == "reserved":
                    conn.execute("insert into public.requests values (%s, %s)", (function, row.invocation_id))
                    answers.append((function, row.invocation_id))

    def operator(conn, seed):
        choice = random.Random(seed)
        start.wait()
        while enable and time.monotonic() < ends[0]:
            one(conn, "enable_worker_function", function_name=choice.choice(enable))

    def guarded(work, conn, seed):
        try:
            work(conn, seed)
        except BaseException as failure:  # told by the test's own thread
            failures.append(failure)
            raise

    threads = [threading.Thread(target=guarded, args=(starter if n < SESSIONS else operator, conn, n), daemon=True)
               for n, conn in enumerate(conns)]
    for thread in threads:
        thread.start()
    ends.append(time.monotonic() + seconds)
    start.wait(timeout=60)
    for thread in threads:
        thread.join(seconds + 30)
        assert not thread.is_alive()
    assert not failures, failures
    return answers


def test_every_function_is_started_once_a_pending_start(db, conn, server_log):
    """Fifty functions whose start stays pending throughout, and fifty whose start is lost after a second."""
    slow = [f"slow-{n}" for n in range(50)]
    fast = [f"fast-{n}" for n in range(50)]
    for name in slow:
        register(conn, name, debounce="1 s")
    for name in fast:
        register(conn, name, debounce="1 s", pending_timeout="1 s")
    record_starts(conn)

    answers = hammer(db, slow + fast, SECONDS, enable=fast)

    starts = conn.execute("select * from public.starts order by nth").fetchall()
    requests = conn.execute("select * from public.requests").fetchall()
    assert sorted(answers) == sorted((s.function_name, s.invocation_id) for s in starts)
    assert sorted(answers) == sorted(requests)
    assert Counter(s.function_name for s in starts if s.function_name in slow) == Counter(slow)
    assert conn.execute("select count(*) from baton.worker_functions where invocation_status = 'pending'"
                        " and function_name like 'slow-%'").fetchone()[0] == 50

    # ensure_workers reads the clock before it goes through its functions; what counts is when it wrote.
    times = {name: [(s.written_at, s.expires_at) for s in starts if s.function_name == name] for name in fast}
    for name, seen in times.items():
        assert len(seen) > 1, f"{name} was started {len(seen)} times only"
        for (_, deadline), (at, _) in zip(seen, seen[1:], strict=False):
            assert at >= deadline, f"{name} was started again {deadline - at} before the deadline"
    expired = conn.execute("select function_name, count(*) from baton.incidents where kind = 'invocation_expired'"
                           " and function_name like 'fast-%' group by 1").fetchall()
    for name, count in expired:
        assert count in (len(times[name]) - 1, len(times[name])), f"the expiries of {name} are booked once each"

    assert len({s.pid for s in starts}) > 1, "one session won everything"
    assert server_log.errors() == []
