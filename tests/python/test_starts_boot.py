"""A boot that takes longer than the debounce: what pg_baton is there for."""

import pytest
from conftest import ROOT
from starts import accept, advance, call, new_id, one, reconcile, record_starts, register, startup

DEBOUNCE_ONLY = ROOT / "tools/lib/debounce_only.sql"


class Boot:
    """One function with the times seen in production, ticked every five seconds by four clocks at once."""

    def __init__(self, db):
        self.db, self.conn = db, db.connect()
        self.clocks = [db.session(f"clock-{n}") for n in range(4)]
        register(self.conn, debounce="6 s", pending_timeout="60 s")
        record_starts(self.conn)

    def tick(self):
        calls = [("tick", {}), ("ensure_workers", {}), ("ensure_workers", {}),
                 ("reserve_worker_invocation", {"function_name": "orders"})]
        for clock, (verb, arguments) in zip(self.clocks, calls, strict=True):
            named = ", ".join(f"{name} => %({name})s" for name in arguments)
            clock.start(f"select * from baton.{verb}({named})", arguments)
        for clock in self.clocks:
            clock.result()
        advance(self.conn, "5 s")

    def starts(self):
        return [row.invocation_id for row in self.conn.execute("select * from public.starts order by nth")]


def only_one_start(db, ticks=11):
    """A worker that needs 55 of its 60 seconds. All ticks together request it once, and it is accepted."""
    boot = Boot(db)
    [row] = [r for r in call(boot.conn, "ensure_workers") if r.outcome == "reserved"]
    assert reconcile(boot.conn, row.invocation_id) == "start"
    states = set()
    for _ in range(ticks):
        boot.tick()
        states.add(startup(boot.conn).startup_state)
        assert boot.starts() == [row.invocation_id], "a second start while the first one boots"
    assert states == {"pending"}
    assert boot.conn.execute("select invocation_id from public.requests").fetchall() == [(row.invocation_id,)]
    worker_id = new_id()
    assert accept(boot.conn, row.invocation_id, worker_id) == "accepted"
    for _ in range(ticks):
        assert one(boot.conn, "heartbeat", worker_id=worker_id).outcome == "active"
        boot.tick()
    assert boot.starts() == [row.invocation_id]
    assert startup(boot.conn).failed_starts == 0


def test_a_boot_beyond_the_debounce_is_requested_once_however_many_ticks(clock_db):
    only_one_start(clock_db)


def test_a_reservation_that_knows_only_the_debounce_requests_it_again(clock_db):
    """The same scenario as it was before the handshake."""
    clock_db.install(DEBOUNCE_ONLY)
    with pytest.raises(AssertionError, match="a second start while the first one boots"):
        only_one_start(clock_db)


def test_a_boot_that_outlasts_its_deadline_is_replaced_and_refused(clock_db):
    boot = Boot(clock_db)
    boot.tick()
    [first] = boot.starts()
    for _ in range(12):
        boot.tick()
    [_, second] = boot.starts()
    assert accept(boot.conn, first, new_id()) == "superseded"
    assert accept(boot.conn, second, new_id()) == "accepted"
    assert boot.conn.execute("select count(*) from baton.workers").fetchone() == (1,)
