"""Any history of worker starts, over the real SQL, beside a model of the protocol in Python.

The model predicts every answer exactly, and every row of the tables and of the view worker_startup after it. Beside
that some promises are asked of the rows themselves, without the model: see Promises. The clock is the test's own. An
example is one transaction, which is rolled back.

The decision tables of reconcile and accept are counted: a row that no example hits fails the test.
"""

import uuid
from collections import Counter
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test,
)
from starts import call

RECONCILE = {
    "unknown function", "no such id", "an old id", "another function's id", "failed: dismissed", "failed: expired",
    "failed: disabled", "failed: deprecated", "failed: error", "ready", "past its deadline", "the caller's own worker",
    "another healthy worker", "start",
}
ACCEPT = {
    "unknown function", "superseded", "failed: dismissed", "failed: expired", "failed: disabled", "failed: deprecated",
    "failed: error", "past its deadline", "repeated", "repeated, but the worker is gone", "already accepted",
    "a new worker", "a worker that goes on", "a used id",
}
FUNCTIONS = {
    "http": {"url": "http://127.0.0.1:9", "debounce": 6, "pending_timeout": 60, "heartbeat_timeout": 15},
    "strict": {"url": "http://127.0.0.1:9", "debounce": 2, "pending_timeout": 10, "heartbeat_timeout": 30,
               "require_handshake": True},
    "no-url": {"debounce": 1, "pending_timeout": 20, "heartbeat_timeout": 15},
    "process": {"url": "http://127.0.0.1:9", "start_mode": "process", "debounce": 6, "pending_timeout": 60,
                "heartbeat_timeout": 15},
}
VISIBILITY, MAX_FAILURES, MAX_LAPSES, SILENT = timedelta(seconds=8), 2, 2, timedelta(hours=1)
BOOKED = ("dismissed", "expired", "error")


def seconds(number):
    return timedelta(seconds=number)


@dataclass
class Function:
    function_name: str
    queue_name: str
    url: str | None = None
    start_mode: str = "http"
    enabled: bool = True
    require_handshake: bool = False
    debounce: timedelta = seconds(6)
    pending_timeout: timedelta = seconds(60)
    heartbeat_timeout: timedelta = seconds(15)
    last_invoked_at: datetime | None = None
    failed_starts: int = 0
    invocation_id: uuid.UUID | None = None
    invocation_status: str | None = None
    invocation_expires_at: datetime | None = None
    invocation_worker_id: uuid.UUID | None = None
    invocation_error: str | None = None
    invocation_detail: str | None = None
    invocation_transport: str | None = None
    invocation_request_id: int | None = None


@dataclass
class Worker:
    worker_id: uuid.UUID
    function_name: str
    handshake: bool
    started_at: datetime
    last_heartbeat_at: datetime
    stopping_at: datetime | None = None
    stopped_at: datetime | None = None
    deprecated_at: datetime | None = None

    def goes_on(self):
        return not (self.stopping_at or self.stopped_at or self.deprecated_at)


@dataclass
class Delivery:
    message_id: int
    function_name: str
    invocation_id: uuid.UUID
    visible_at: datetime
    delivery: int | None = None
    claimed_at: datetime | None = None
    failures: int = 0
    lapses: int = 0


class Model:
    """protocols.md, section 1, for one thread."""

    def __init__(self, now):
        self.now, self.functions, self.workers, self.deliveries = now, {}, {}, {}
        self.incidents, self.hit_reconcile, self.hit_accept = Counter(), Counter(), Counter()
        self.owners = {}  # of every id ever reserved, in order

    # what is

    def pending(self, f):
        return f.invocation_status == "pending" and self.now < f.invocation_expires_at

    def overdue(self, f):
        return f.invocation_status == "pending" and self.now >= f.invocation_expires_at

    def of(self, f):
        return [w for w in self.workers.values() if w.function_name == f.function_name]

    def healthy(self, f):
        found = [w for w in self.of(f) if w.goes_on() and self.now < w.last_heartbeat_at + f.heartbeat_timeout]
        return sorted(sorted(found, key=lambda w: w.worker_id), key=lambda w: w.last_heartbeat_at, reverse=True)

    def next_attempt(self, f, if_it_expires=False):
        if f.last_invoked_at is None:
            return None
        failed = f.failed_starts + (if_it_expires or self.overdue(f))
        return f.last_invoked_at + min(f.debounce * 2 ** failed, max(f.debounce, timedelta(minutes=5)))

    def state(self, f):
        if not f.enabled:
            return "disabled"
        if f.start_mode == "process":
            return "process"
        if self.healthy(f):
            return "ready"
        if self.pending(f):
            return "pending"
        attempt = self.next_attempt(f)
        return "throttled" if attempt and self.now < attempt else "retryable"

    # what happens under a function's lock

    def book(self, f):
        if self.overdue(f):
            self.fail_start(f, "expired", None)

    def fail_start(self, f, error, detail):
        f.invocation_status, f.invocation_error, f.invocation_detail = "failed", error, detail
        if error in BOOKED:
            f.failed_starts += 1
            self.incidents["invocation_" + error] += 1
        self.drop_delivery(f)

    def complete(self, f, worker_id, verb):
        f.invocation_status, f.invocation_worker_id = "ready", worker_id
        f.invocation_error, f.invocation_detail = None, verb
        self.drop_delivery(f)

    def drop_delivery(self, f):
        message = self.deliveries.get(f.invocation_request_id)
        if message and (message.claimed_at is None or message.visible_at <= self.now):
            del self.deliveries[message.message_id]

    def start(self, f, invocation_id):
        if f.invocation_status == "ready":
            w = self.workers[f.invocation_worker_id]
            crashed = f.invocation_detail == "accept" and w.last_heartbeat_at == w.started_at and not w.stopping_at
            f.failed_starts = f.failed_starts + 1 if crashed else 0
            self.incidents["start_crashed"] += crashed
        f.invocation_id, f.invocation_status = invocation_id, "pending"
        f.invocation_expires_at, f.last_invoked_at = self.now + f.pending_timeout, self.now
        f.invocation_worker_id = f.invocation_error = f.invocation_detail = None
        f.invocation_transport = f.invocation_request_id = None
        assert invocation_id not in self.owners, "an id is new"
        self.owners[invocation_id] = f.function_name

    def admit(self, worker_id, f, handshake):
        """False: the id is used up."""
        w = self.workers.get(worker_id)
        if w is None:
            self.workers[worker_id] = Worker(worker_id, f.function_name, handshake, self.now, self.now)
            return True
        if w.function_name == f.function_name and w.goes_on():
            w.last_heartbeat_at = self.now
            if handshake:
                w.handshake, w.started_at = True, self.now
            return True
        return False

    # the verbs; those that make ids are told them

    def reserve(self, f):
        self.book(f)
        state = self.state(f)
        if state == "retryable":
            return "reserved", self.now + f.pending_timeout, None
        if state == "pending":
            return state, f.invocation_expires_at, f.invocation_expires_at - self.now
        if state == "throttled":
            return state, None, self.next_attempt(f) - self.now
        return state, None, None

    def ensure_workers(self):
        """(outcome, function) in order; the ids come with started()."""
        candidates = [f for f in self.functions.values() if self.overdue(f) or self.state(f) == "retryable"]
        candidates.sort(key=lambda f: (f.last_invoked_at is not None, f.last_invoked_at or self.now, f.function_name))
        rows = []
        for f in candidates:
            self.book(f)
            if self.state(f) == "retryable":
                rows.append(("reserved" if f.url else "error", f))
        return rows

    def started(self, outcome, f, invocation_id, request_id):
        self.start(f, invocation_id)
        if outcome == "error":
            self.fail_start(f, "error", "neither the function's url nor settings.base_url is set")
        else:
            f.invocation_transport, f.invocation_request_id = "outbox", request_id
            self.deliveries[request_id] = Delivery(request_id, f.function_name, invocation_id, self.now)

    def reconcile(self, f, invocation_id, worker_id):
        def hit(row, *answer):
            self.hit_reconcile[row] += 1
            return answer
        overdue = self.overdue(f)
        self.book(f)
        if f.invocation_id is None or f.invocation_id != invocation_id:
            owner = self.owners.get(invocation_id)
            row = "an old id" if owner == f.function_name else "another function's id" if owner else "no such id"
            return hit(row, "rejected", None, "superseded")
        if f.invocation_status == "failed":
            return hit("past its deadline" if overdue else f"failed: {f.invocation_error}", "rejected", None,
                       f.invocation_error)
        if f.invocation_status == "ready":
            return hit("ready", "ready", f.invocation_worker_id, None)
        own = self.workers.get(worker_id)
        if own and own.function_name == f.function_name and own.goes_on():
            own.last_heartbeat_at = self.now
            self.complete(f, worker_id, "reconcile")
            return hit("the caller's own worker", "ready", worker_id, None)
        if healthy := self.healthy(f):
            self.complete(f, healthy[0].worker_id, "reconcile")
            return hit("another healthy worker", "ready", healthy[0].worker_id, None)
        return hit("start", "start", None, None)

    def accept(self, f, invocation_id, worker_id):
        def hit(row, *answer):
            self.hit_accept[row] += 1
            return answer
        overdue = self.overdue(f)
        self.book(f)
        w = self.workers.get(worker_id)
        if f.invocation_id is None or f.invocation_id != invocation_id:
            return hit("superseded", "rejected", "superseded")
        if f.invocation_status == "failed":
            row = "past its deadline" if overdue else f"failed: {f.invocation_error}"
            return hit(row, "rejected", f.invocation_error)
        if f.invocation_status == "ready":
            if worker_id != f.invocation_worker_id:
                return hit("already accepted", "rejected", "already_accepted")
            if w.goes_on():
                return hit("repeated", "accepted", None)
            return hit("repeated, but the worker is gone", "rejected", "worker_gone")
        if not self.admit(worker_id, f, True):
            return hit("a used id", "rejected", "worker_gone")
        self.complete(f, worker_id, "accept")
        return hit("a worker that goes on" if w else "a new worker", "accepted", None)

    def register_worker(self, f, worker_id):
        self.book(f)
        if f.require_handshake:
            return "rejected", "handshake_required"
        if not f.enabled:
            return "rejected", "disabled"
        if not self.admit(worker_id, f, False):
            return "rejected", "worker_gone"
        if f.start_mode == "http" and self.pending(f):
            self.complete(f, worker_id, "register_worker")
        return "registered", None

    def dismiss(self, f, invocation_id, reason):
        self.book(f)
        if f.invocation_id == invocation_id and self.pending(f):
            self.fail_start(f, "dismissed", reason)
            return "dismissed"
        return "ignored"

    def heartbeat(self, worker_id):
        w = self.workers.get(worker_id)
        if w is None:
            return "unknown"
        if w.stopped_at:
            return "stopped"
        w.last_heartbeat_at = self.now
        return "stopping" if w.stopping_at else "deprecated" if w.deprecated_at else "active"

    def stop_worker(self, worker_id, draining):
        w = self.workers.get(worker_id)
        if w is None:
            return "unknown"
        if w.stopped_at:
            return "stopped"
        w.stopping_at = w.stopping_at or self.now
        w.stopped_at = None if draining else self.now
        return "stopping" if draining else "stopped"

    def disable(self, f, error):
        self.book(f)
        if self.pending(f):
            self.fail_start(f, error, None)
        was_enabled, f.enabled = f.enabled, False
        if error == "deprecated":
            for w in self.of(f):
                if not w.stopped_at and not w.deprecated_at:
                    w.deprecated_at = self.now
        self.incidents["operator"] += 1
        return was_enabled

    def enable(self, f):
        self.book(f)
        f.enabled, f.failed_starts, f.last_invoked_at = True, 0, None
        self.incidents["operator"] += 1

    def unregister(self, f):
        self.book(f)
        if any(not w.stopped_at for w in self.of(f)):
            return "has_workers"
        self.drop_delivery(f)
        del self.functions[f.function_name]
        self.incidents["operator"] += 1
        return "removed"

    def stop_silent(self):
        silent = [w for w in self.workers.values() if not w.stopped_at and w.last_heartbeat_at <= self.now - SILENT]
        for w in silent:
            w.stopped_at = self.now
        self.incidents["worker_silent"] += len(silent)
        return len(silent)

    def wanted(self, message):
        f = self.functions.get(message.function_name)
        return f is not None and f.invocation_id == message.invocation_id and self.pending(f)

    def claim_deliveries(self, max_messages):
        """The messages that are given out, in order; the numbers of the claims come with the answer."""
        given = []
        while len(given) < max_messages:
            due = [m for m in self.deliveries.values() if m.visible_at <= self.now]
            due = sorted(due, key=lambda m: (m.visible_at, m.message_id))[:max_messages - len(given)]
            if not due:
                break
            for m in due:
                m.lapses += m.claimed_at is not None
                m.claimed_at, m.visible_at = self.now, self.now + VISIBILITY
                if self.wanted(m):
                    given.append(m)
                else:
                    del self.deliveries[m.message_id]
        return given

    def current(self, message_id, delivery):
        m = self.deliveries.get(message_id)
        if m and m.delivery == delivery and m.claimed_at is not None:
            return m
        self.incidents["lost"] += m is not None and m.delivery != delivery
        return None

    def ack(self, message_id, delivery):
        m = self.current(message_id, delivery)
        if m is None:
            return "lost"
        del self.deliveries[message_id]
        return "acked"

    def fail(self, message_id, delivery, error, delay, final):
        m = self.current(message_id, delivery)
        if m is None:
            return "lost", None
        m.failures += 1
        if not final and m.failures < MAX_FAILURES:
            m.visible_at, m.claimed_at = self.now + delay, None
            return "failed", m.visible_at
        del self.deliveries[message_id]
        f = self.functions.get(m.function_name)
        if f:
            self.dismiss(f, m.invocation_id, error)
        return "dead", None


class Promises:
    """What holds between two states of the rows, whatever the model says."""

    def __init__(self):
        self.before, self.accepted = {}, {}

    def seen_accepted(self, invocation_id, worker_id):
        assert self.accepted.setdefault(invocation_id, worker_id) == worker_id, "two acceptances of one invocation"

    def check(self, now, functions, workers, deliveries):
        for name, new in functions.items():
            old = self.before.get(name)
            if old is None:
                continue
            if old.invocation_id != new.invocation_id:
                was_pending = old.invocation_status == "pending" and now < old.invocation_expires_at
                assert not was_pending, "a start while another one is pending"
                assert not [w for w in workers.values() if w.function_name == name and not w.stopping_at
                            and not w.stopped_at and not w.deprecated_at
                            and now < w.last_heartbeat_at + new.heartbeat_timeout], "a start beside a healthy worker"
                if old.last_invoked_at is not None:
                    wait = min(old.debounce * 2 ** old.failed_starts, max(old.debounce, timedelta(minutes=5)))
                    assert now >= old.last_invoked_at + wait, "a start within the throttle"
            elif old.invocation_status == "pending":
                if new.invocation_status == "pending":
                    assert old.invocation_expires_at == new.invocation_expires_at
                elif new.invocation_status == "ready":
                    assert now < old.invocation_expires_at, "completed after its deadline"
                    assert new.invocation_worker_id in workers, "ready without a worker"
                else:
                    assert new.invocation_error, "neither pending nor ready, and no reason"
            else:
                assert new.invocation_status == old.invocation_status, "revived"
        waiting = Counter(m.function_name for m in deliveries.values() if is_waiting(m, functions, now))
        assert max(waiting.values(), default=0) <= 1, f"two requests on their way for one start: {waiting}"
        self.before = functions


def is_waiting(message, functions, now):
    f = functions.get(message.function_name)
    return (f is not None and f.invocation_id == message.invocation_id and f.invocation_status == "pending"
            and now < f.invocation_expires_at)


names = st.sampled_from(["http", "http", "http", "strict", "strict", "no-url", "process"])
picks = st.integers(0, 5)
which_id = st.sampled_from(["current"] * 6 + ["old", "other's", "none"])
which_worker = st.sampled_from(["new", "new", "own", "own", "the accepted", "any", "unknown"])


def columns(cls):
    return ", ".join(field.name for field in fields(cls))


LOOK = [
    f"select {columns(Function)} from baton.worker_functions",
    f"select {columns(Worker)} from baton.workers",
    "select message_id, payload ->> 'function_name', (payload -> 'body' ->> 'invocation_id')::uuid, visible_at,"
    " delivery, claimed_at, failures, lapses from baton.messages",
    "select kind, count(*) from baton.incidents group by kind",
    "select * from baton.worker_startup order by function_name",
]


class Starts(RuleBasedStateMachine):
    """Rules draw small numbers, which count back from the newest of what there is."""

    def __init__(self, conn, reconciled, accepted):
        super().__init__()
        self.conn, self.numbers, self.receipts, self.crashed = conn, 0, [], set()
        conn.execute("begin")
        self.model = Model(conn.execute("select baton._now()").fetchone()[0].astimezone(UTC))
        self.model.hit_reconcile, self.model.hit_accept = reconciled, accepted
        self.promises = Promises()

    def teardown(self):
        self.conn.execute("rollback")

    def ask(self, verb, **arguments):
        return call(self.conn, verb, **arguments)

    def answer(self, verb, **arguments):
        [row] = self.ask(verb, **arguments)
        return tuple(row)

    def function(self, name):
        return self.model.functions.get(name)

    def refused(self, verb, **arguments):
        with pytest.raises(psycopg.errors.UndefinedObject), self.conn.transaction():
            self.ask(verb, **arguments)

    def newest(self, items, pick):
        items = list(items)
        return items[-1 - pick % len(items)] if items else None

    def pick_id(self, name, which, pick):
        f, owners = self.function(name), self.model.owners
        if which == "current" and f and f.invocation_id:
            return f.invocation_id
        if which in ("current", "old"):
            found = self.newest([i for i, owner in owners.items() if owner == name], pick)
            return found or uuid.UUID(int=1)
        if which == "other's":
            return self.newest([i for i, owner in owners.items() if owner != name], pick) or uuid.UUID(int=1)
        return uuid.UUID(int=1)

    def pick_worker(self, name, which, pick):
        f, workers = self.function(name), self.model.workers
        chosen = None
        if which == "own":
            chosen = self.newest([i for i, w in workers.items() if w.function_name == name], pick)
        elif which == "the accepted" and f:
            chosen = f.invocation_worker_id
        elif which == "any":
            chosen = self.newest(workers, pick)
        elif which == "unknown":
            return uuid.UUID(int=2)
        if chosen is None:
            self.numbers += 1
            chosen = uuid.UUID(int=self.numbers * 7919 % 10007 + 10)
        return chosen

    # the world

    @initialize(started=st.sampled_from([0, 1, 1, 1, 2, 2, 2]))
    def begin(self, started):
        self.conn.execute(
            "update baton.settings set transport = 'outbox', visibility = %s, max_failures = %s, max_lapses = %s,"
            " silent_worker_timeout = %s", (VISIBILITY, MAX_FAILURES, MAX_LAPSES, SILENT))
        for name in FUNCTIONS:
            self.register_function(name)
        if started > 0:
            self.ensure_workers()
            self.rows_are_as_predicted()
        for name in ("http", "strict") if started > 1 else ():
            self.accepting(name, self.function(name).invocation_id, self.pick_worker(name, "new", 0))

    def register_function(self, name, **more):
        given = {k: seconds(v) if isinstance(v, int) and not isinstance(v, bool) else v
                 for k, v in (FUNCTIONS[name] | more).items()}
        assert self.answer("register_worker_function", function_name=name, **given) == ("registered",)
        f = self.model.functions.setdefault(name, Function(name, name))
        self.model.book(f)
        for key, value in given.items():
            setattr(f, key, value)

    @rule(name=names, debounce=st.sampled_from([1, 6]), timeout=st.sampled_from([10, 40]))
    def register_worker_function(self, name, debounce, timeout):
        self.register_function(name, debounce=debounce, pending_timeout=timeout)

    @rule(name=names)
    def unregister_worker_function(self, name):
        f = self.function(name)
        expected = self.model.unregister(f) if f else "unknown"
        assert self.answer("unregister_worker_function", function_name=name) == (expected,)

    @rule(by=st.sampled_from([1, 2, 5, 5, 7, 15, 30, 60, 400, 3600]))
    def time_passes(self, by):
        self.set_clock(self.model.now + seconds(by))

    @rule(pick=st.integers(0, 30), before=st.booleans())
    def time_passes_to_an_edge(self, pick, before):
        """To a deadline of somebody, or to the last microsecond before it."""
        edges = {f.invocation_expires_at for f in self.model.functions.values()}
        edges |= {self.model.next_attempt(f) for f in self.model.functions.values()}
        edges |= {w.last_heartbeat_at + self.model.functions[w.function_name].heartbeat_timeout
                  for w in self.model.workers.values() if w.function_name in self.model.functions}
        edges |= {m.visible_at for m in self.model.deliveries.values()}
        edges = sorted(e for e in edges if e and e - timedelta(microseconds=1) > self.model.now)
        if edges:
            self.set_clock(edges[pick % len(edges)] - timedelta(microseconds=before))

    def set_clock(self, at):
        self.rows_are_as_predicted()
        self.model.now = at
        self.conn.execute("select baton_test.set_clock(%s)", (at,))

    # the clock's and a caller's starts

    def learn(self, outcome, f, invocation_id, request_id):
        self.model.started(outcome, f, invocation_id, request_id)

    @rule()
    def ensure_workers(self):
        expected = self.model.ensure_workers()
        rows = self.ask("ensure_workers")
        assert [(r.outcome, r.function_name) for r in rows] == [(o, f.function_name) for o, f in expected]
        for row, (outcome, f) in zip(rows, expected, strict=True):
            assert (row.request_id is None, row.detail is None) == (outcome == "error", outcome == "reserved")
            self.learn(outcome, f, row.invocation_id, row.request_id)

    @rule()
    def tick(self):
        silent = self.model.stop_silent()
        expected = self.model.ensure_workers()
        parts = {r.part: (r.changed, r.error) for r in self.ask("tick") if r.part not in ("queue_marks", "totals")}
        assert parts == {part: (count, None) for part, count in
                         {"silent_workers": silent, "ensure_workers": len(expected)}.items() if count}
        for outcome, f in expected:
            row = self.conn.execute("select invocation_id, invocation_request_id from baton.worker_functions"
                                    " where function_name = %s", (f.function_name,)).fetchone()
            self.learn(outcome, f, row.invocation_id, row.invocation_request_id)

    @rule(name=names)
    def reserve(self, name):
        f = self.function(name)
        if not f:
            return self.refused("reserve_worker_invocation", function_name=name)
        expected = self.model.reserve(f)
        outcome, invocation_id, expires_at, retry_after = self.answer("reserve_worker_invocation", function_name=name)
        assert (outcome, expires_at, retry_after) == expected
        assert (invocation_id is not None) == (outcome == "reserved")
        if invocation_id:
            self.model.start(f, invocation_id)

    # runtimes

    @rule(name=names, which=which_id, pick=picks, which_one=which_worker)
    def reconcile(self, name, which, pick, which_one):
        self.reconciling(name, self.pick_id(name, which, pick), self.pick_worker(name, which_one, pick))

    @rule(name=names, which=which_id, pick=picks)
    def reconcile_without_a_worker(self, name, which, pick):
        self.reconciling(name, self.pick_id(name, which, pick), None)

    def reconciling(self, name, invocation_id, worker_id):
        f = self.function(name)
        arguments = {"function_name": name, "invocation_id": invocation_id, "worker_id": worker_id}
        if not f:
            self.model.hit_reconcile["unknown function"] += 1
            return self.refused("reconcile_worker_invocation", **arguments)
        expected = self.model.reconcile(f, invocation_id, worker_id)
        assert self.answer("reconcile_worker_invocation", **arguments) == expected

    @rule(name=names, which=which_id, pick=picks, which_one=which_worker)
    def accept(self, name, which, pick, which_one):
        self.accepting(name, self.pick_id(name, which, pick), self.pick_worker(name, which_one, pick))

    def accepting(self, name, invocation_id, worker_id):
        f = self.function(name)
        arguments = {"function_name": name, "invocation_id": invocation_id, "worker_id": worker_id}
        if not f:
            self.model.hit_accept["unknown function"] += 1
            return self.refused("accept_worker_invocation", **arguments)
        expected = self.model.accept(f, invocation_id, worker_id)
        answer = self.answer("accept_worker_invocation", **arguments)
        assert answer == expected
        if answer[0] == "accepted":
            self.promises.seen_accepted(invocation_id, worker_id)

    @rule(name=names, beats=st.booleans())
    def a_runtime_boots(self, name, beats):
        """What should happen: a request, a start, an acceptance, and perhaps a first heartbeat a second later."""
        f = self.function(name)
        if f and self.model.state(f) == "retryable":
            self.reserve(name)
            self.rows_are_as_predicted()
        if f and self.model.pending(f):
            worker_id = self.pick_worker(name, "new", 0)
            self.accepting(name, f.invocation_id, worker_id)
            if beats:
                self.set_clock(self.model.now + seconds(1))
                self.beating(worker_id)

    @rule(name=st.sampled_from(["http", "strict", "no-url"]),
          then=st.sampled_from(["silence", "comes back", "asks", "asks", "both", "accepts"]))
    def a_worker_falls_silent(self, name, then):
        """Its replacement is reserved, and perhaps it is heard again before that one is up, or gets the request."""
        f = self.function(name)
        if f and f.enabled and (healthy := self.model.healthy(f)):
            self.set_clock(self.model.now + f.heartbeat_timeout)
            if self.model.state(f) == "throttled":
                self.set_clock(self.model.next_attempt(f))
            self.reserve(name)
            self.rows_are_as_predicted()
            if then in ("comes back", "both"):
                self.beating(healthy[0].worker_id)
            if then in ("asks", "both"):
                self.reconciling(name, f.invocation_id, healthy[0].worker_id if then == "asks" else None)
            if then == "accepts":
                self.accepting(name, f.invocation_id, healthy[0].worker_id)

    @rule(name=names, before=st.booleans(), then=st.sampled_from(["reconcile", "accept", "dismiss", "reserve"]))
    def a_boot_takes_long(self, name, before, then):
        """To the deadline, or to the last microsecond before it."""
        f = self.function(name)
        if f and self.model.pending(f):
            edge = f.invocation_expires_at - timedelta(microseconds=before)
            self.set_clock(max(edge, self.model.now))
            self.rows_are_as_predicted()
            if then == "reconcile":
                self.reconciling(name, f.invocation_id, None)
            elif then == "accept":
                self.accepting(name, f.invocation_id, self.pick_worker(name, "new", 0))
            elif then == "dismiss":
                self.dismiss(name, "current", 0)
            else:
                self.reserve(name)

    @rule(name=names, asks=st.booleans(), pick=picks)
    def a_request_arrives_late(self, name, asks, pick):
        """The runtime that a failed start was meant for."""
        invocation_id = self.pick_id(name, "current", pick)
        if asks:
            self.reconciling(name, invocation_id, None)
        self.accepting(name, invocation_id, self.pick_worker(name, "new", 0))

    @rule(name=names, which=which_id, pick=picks, asks=st.booleans())
    def dismiss(self, name, which, pick, asks=False):
        """And the request may arrive a second time."""
        f, invocation_id = self.function(name), self.pick_id(name, which, pick)
        arguments = {"function_name": name, "invocation_id": invocation_id, "reason": "boot failed"}
        if not f:
            return self.refused("dismiss_worker_invocation", **arguments)
        expected = self.model.dismiss(f, invocation_id, "boot failed")
        assert self.answer("dismiss_worker_invocation", **arguments) == (expected,)
        if asks:
            self.reconciling(name, invocation_id, None)
            self.accepting(name, invocation_id, self.pick_worker(name, "new", 0))

    @rule(name=names, which=which_worker, pick=picks)
    def register_worker(self, name, which, pick):
        f, worker_id = self.function(name), self.pick_worker(name, which, pick)
        if not f:
            return self.refused("register_worker", worker_id=worker_id, function_name=name)
        expected = self.model.register_worker(f, worker_id)
        assert self.answer("register_worker", worker_id=worker_id, function_name=name) == expected

    def beating(self, worker_id):
        assert self.answer("heartbeat", worker_id=worker_id) == (self.model.heartbeat(worker_id),)

    @rule(pick=picks)
    def heartbeat(self, pick):
        alive = [i for i in self.model.workers if i not in self.crashed]
        self.beating(self.newest(alive, pick) or uuid.UUID(int=2))

    @rule()
    def all_heartbeats(self):
        for worker_id in self.model.workers:
            if worker_id not in self.crashed:
                self.beating(worker_id)

    @rule(pick=picks, draining=st.booleans(), accepts=st.booleans())
    def stop_worker(self, pick, draining, accepts):
        """And its id may be used once more."""
        worker_id = self.newest(self.model.workers, pick) or uuid.UUID(int=2)
        expected = self.model.stop_worker(worker_id, draining)
        assert self.answer("stop_worker", worker_id=worker_id, draining=draining) == (expected,)
        if accepts and expected != "unknown":
            name = self.model.workers[worker_id].function_name
            self.accepting(name, self.pick_id(name, "current", 0), worker_id)

    @rule(pick=picks)
    def a_runtime_crashes(self, pick):
        """Nobody hears from its worker again."""
        self.crashed.add(self.newest(self.model.workers, pick))

    # operators

    @rule(name=names, verb=st.sampled_from(["disable_worker_function", "deprecate_workers"]), asks=st.booleans())
    def disable(self, name, verb, asks):
        """And the request that was on its way may still arrive."""
        f = self.function(name)
        if not f:
            return self.refused(verb, function_name=name)
        outcome, error = {"disable_worker_function": ("disabled", "disabled"),
                          "deprecate_workers": ("deprecated", "deprecated")}[verb]
        assert self.answer(verb, function_name=name) == (outcome, self.model.disable(f, error))
        if asks and f.invocation_id:
            self.reconciling(name, f.invocation_id, None)
            self.accepting(name, f.invocation_id, self.pick_worker(name, "new", 0))

    @rule(name=names)
    def enable(self, name):
        f = self.function(name)
        if not f:
            return self.refused("enable_worker_function", function_name=name)
        self.model.enable(f)
        assert self.answer("enable_worker_function", function_name=name) == ("enabled",)

    @precondition(lambda self: sum(f.enabled for f in self.model.functions.values()) < len(FUNCTIONS))
    @rule()
    def the_deploy_is_done(self):
        for name in FUNCTIONS:
            if name not in self.model.functions:
                self.register_function(name)
            elif not self.model.functions[name].enabled:
                self.enable(name)

    # senders

    @rule(wanted=st.integers(1, 3))
    def claim_deliveries(self, wanted):
        expected = self.model.claim_deliveries(wanted)
        rows = self.ask("claim_deliveries", max_messages=wanted)
        assert [(r.message_id, r.payload["function_name"], r.payload["body"]["invocation_id"], r.failures, r.lapses,
                 r.visible_at) for r in rows] == [
            (m.message_id, m.function_name, str(m.invocation_id), m.failures, m.lapses, m.visible_at) for m in expected]
        for row, message in zip(rows, expected, strict=True):
            message.delivery = row.delivery
            self.receipts.append((row.message_id, row.delivery))

    @precondition(lambda self: self.receipts)
    @rule(pick=picks)
    def ack(self, pick):
        message_id, delivery = self.newest(self.receipts, pick)
        expected = self.model.ack(message_id, delivery)
        assert self.answer("ack", message_id=message_id, delivery=delivery) == (expected,)

    @precondition(lambda self: self.receipts)
    @rule(pick=picks, delay=st.sampled_from([0, 3]), final=st.booleans())
    def fail(self, pick, delay, final):
        message_id, delivery = self.newest(self.receipts, pick)
        expected = self.model.fail(message_id, delivery, "HTTP 404", seconds(delay), final)
        assert self.answer("fail", message_id=message_id, delivery=delivery, error="HTTP 404", delay=seconds(delay),
                           final=final) == expected

    # after every step

    @invariant()
    def rows_are_as_predicted(self):
        model = self.model
        with self.conn.pipeline():
            cursors = [self.conn.execute(query) for query in LOOK]
        functions, workers, deliveries, incidents, startup = [cursor.fetchall() for cursor in cursors]
        functions = {r.function_name: Function(*r) for r in functions}
        workers = {r.worker_id: Worker(*r) for r in workers}
        deliveries = {r.message_id: Delivery(*r) for r in deliveries}
        self.promises.check(model.now, functions, workers, deliveries)
        assert functions == model.functions
        assert workers == model.workers
        assert deliveries == model.deliveries
        assert dict(incidents) == {kind: count for kind, count in model.incidents.items() if count}
        assert [row.function_name for row in startup] == sorted(functions)
        for row in startup:
            self.the_view_tells_the_same(row)

    def the_view_tells_the_same(self, row):
        f = self.model.functions[row.function_name]
        state, healthy, attempt = self.model.state(f), self.model.healthy(f), self.model.next_attempt(f)
        until = {"retryable": self.model.now, "throttled": attempt}.get(state)
        if state == "pending":
            until = max(f.invocation_expires_at, self.model.next_attempt(f, True) or f.invocation_expires_at)
        assert (row.startup_state, row.healthy_workers, row.protected, row.failed_starts) == (
            state, len(healthy), all(w.handshake for w in healthy), f.failed_starts + self.model.overdue(f))
        wait = row.seconds_until_next_attempt
        assert (wait is None) == (until is None)
        if until is not None:
            assert float(wait) == pytest.approx((until - self.model.now).total_seconds(), abs=1e-3)


def test_any_history_keeps_the_promises_and_is_predicted_by_the_model(clock_db):
    """No shrinking: over a database it takes minutes. To shrink a failure, add Phase.shrink here."""
    conn = clock_db.connect()
    reconciled, accepted = Counter(), Counter()
    run_state_machine_as_test(
        lambda: Starts(conn, reconciled, accepted),
        settings=settings(max_examples=120, stateful_step_count=50, derandomize=True, database=None, deadline=None,
                          phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=False))
    assert RECONCILE - reconciled.keys() == set(), "rows of the table of reconcile that no example hit"
    assert ACCEPT - accepted.keys() == set(), "rows of the table of accept that no example hit"
