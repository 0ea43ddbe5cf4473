"""Any history of messages, against a model that says beforehand what every verb answers.

One session and several logical consumers: each claim gives a receipt, and every receipt, current, spent or another's,
may be used at any later time. The clock stands still between the rules, so that the model knows every deadline.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

SECOND = 1_000_000
MINUTE = 60 * SECOND
VISIBILITY = 30 * SECOND
BACKOFF_BASE, BACKOFF_MAX = 4 * SECOND, 6 * SECOND
MAX_FAILURES, MAX_LAPSES = 3, 2

EMPTY = """
truncate baton.messages, baton.dead_messages, baton.queue_marks, baton.incidents;
insert into baton.settings (max_failures, max_lapses, visibility, backoff_base, backoff_max)
values (3, 2, '30 seconds', '4 seconds', '6 seconds');
select setseed(0)
"""
MICROSECONDS = "(extract(epoch from {}) * 1000000)::bigint"
LIVE = f"""
select message_id, queue_name, dedupe_key, {MICROSECONDS.format('visible_at')} as due, delivery,
  claimed_at is not null as claimed, failures, lapses, last_error as error
from baton.messages
"""
DEAD = "select message_id, queue_name, dedupe_key, failures, lapses, last_error, reason from baton.dead_messages"
INTERVAL = "%s * interval '1 microsecond'"


@dataclass(frozen=True)
class Message:
    message_id: int
    queue_name: str
    dedupe_key: str | None
    due: int
    delivery: int | None = None
    claimed: bool = False
    failures: int = 0
    lapses: int = 0
    error: str | None = None

    def reason(self):
        """Why it may not be given out any more, once it is due."""
        if self.failures >= MAX_FAILURES:
            return "failures"
        if self.lapses + self.claimed >= MAX_LAPSES:
            return "lapses"


queues = st.sampled_from(["a", "b"])
keys = st.sampled_from([None, "k1", "k1", "k2"])
delays = st.sampled_from([0, 0, 0, 1, 10 * SECOND, MINUTE])
spans = st.sampled_from([0, 1, SECOND, 10 * SECOND, MINUTE])
picks = st.integers(0, 15)

# How often, what, with what. One rule draws from these: rules of their own are drawn evenly, or left out of whole
# histories, and most of those never come to a second delivery.
STEPS = [
    (2, "send", (queues, keys, delays)),
    (1, "send_many", (queues, st.lists(st.tuples(keys, delays), max_size=3))),
    (9, "claim", (queues, st.sampled_from([1, 1, 2, 3, 0]), st.none() | spans, st.booleans())),
    (
        10, "use",
        (
            st.sampled_from(["fail", "fail", "park", "extend", "ack"]), picks, st.none() | spans,
            st.sampled_from([False, False, True]),
        ),
    ),
    (2, "use_many", (st.sampled_from(["ack_many", "extend_many"]), st.lists(picks, max_size=4), st.none() | spans)),
    (
        4, "advance",
        (
            st.sampled_from([None, None, 1, SECOND, VISIBILITY - 1, VISIBILITY, 90 * MINUTE]), st.integers(0, 2),
            st.sampled_from([0, 0, 1]),
        ),
    ),
    (2, "tick", ()),
    (3, "redrive", (st.lists(picks, min_size=1, max_size=4),)),
    (1, "remove_messages", (st.lists(picks, min_size=1, max_size=3),)),
]
steps = st.sampled_from([step for often, *step in STEPS for _ in range(often)]).flatmap(
    lambda step: st.tuples(st.just(step[0]), *step[1])
)


class Queue(RuleBasedStateMachine):
    conn = None
    answers = Counter()

    @initialize()
    def begin(self):
        self.live, self.dead, self.ids, self.receipts, self.incidents = {}, {}, [], [], Counter()
        self.told = set()  # the lost receipts of which an incident tells
        self.conn.execute(EMPTY)
        self.set_clock(1_767_225_600 * SECOND)
        for queue, key in (("a", "k1"), ("a", None), ("b", "k2")):
            self.send(queue, key, 0)

    @rule(step=steps)
    def step(self, step):
        action, *arguments = step
        getattr(self, action)(*arguments)

    # --- help

    def call(self, verb, *arguments, casts=""):
        """A verb's rows. casts: a letter an argument: i interval (in microseconds), b jsonb, a bigint[], . as it is."""
        marks = {"i": INTERVAL, "b": "%s::jsonb", "a": "%s::bigint[]", ".": "%s"}
        places = ", ".join(marks[c] for c in casts.ljust(len(arguments), "."))
        return self.conn.execute(f"select * from baton.{verb}({places})", arguments).fetchall()

    def one(self, verb, *arguments, casts=""):
        [row] = self.call(verb, *arguments, casts=casts)
        self.answers[verb, row.outcome] += 1
        return row

    def set_clock(self, now):
        self.now = now
        self.conn.execute(f"select baton_test.set_clock('epoch'::timestamptz + {INTERVAL})", (now,))

    def clock(self, moment):
        return moment and round(moment.timestamp() * SECOND)

    def owner(self, queue, key):
        """The message that holds a key."""
        return next(
            (m.message_id for m in self.live.values() if key and (m.queue_name, m.dedupe_key) == (queue, key)), None
        )

    def held(self, receipt):
        """The message that the receipt is current for."""
        message = self.live.get(receipt[0])
        return message if message and message.claimed and message.delivery == receipt[1] else None

    def lost(self, receipt):
        message = self.live.get(receipt[0])
        if message and message.delivery is not None and message.delivery != receipt[1] and receipt not in self.told:
            self.told.add(receipt)
            self.incidents["lost"] += 1

    def change(self, message, **changes):
        self.live[message.message_id] = replace(message, **changes)

    def bury(self, message, reason, lapses=0):
        del self.live[message.message_id]
        self.dead[message.message_id] = (replace(message, lapses=message.lapses + lapses), reason)
        self.incidents["limit_reached"] += 1

    def add(self, message_id, queue, key, delay):
        """What a send answers; the model has the message then."""
        owner = self.owner(queue, key)
        if owner is not None:
            assert message_id == owner
            return "duplicate"
        assert message_id not in self.ids
        self.ids.append(message_id)
        self.live[message_id] = Message(message_id, queue, key, self.now + delay)
        return "sent"

    # --- sending

    def send(self, queue, key, delay):
        row = self.one("send", queue, "1", delay, key, casts=".bi.")
        assert row.outcome == self.add(row.message_id, queue, key, delay)

    def send_many(self, queue, items):
        messages = [{"payload": 1} | ({"dedupe_key": key, "delay": delay / SECOND} if key or delay else {}) for key, delay in items]
        rows = self.call("send_many", queue, json.dumps(messages), casts=".b")
        assert [r.outcome for r in rows] == [
            self.add(r.message_id, queue, key, delay) for r, (key, delay) in zip(rows, items, strict=True)
        ]

    # --- consumers

    def claim(self, queue, count, visibility, wait):
        ahead = [m.due for m in self.live.values() if m.queue_name == queue and not m.reason()]
        if wait and ahead and min(ahead) > self.now:
            self.set_clock(min(ahead))
        due = sorted(
            (m.due, m.message_id) for m in self.live.values()
            if m.queue_name == queue and m.due <= self.now and not m.reason()
        )[:count]
        rows = self.call("claim", queue, None, count, visibility, casts="...i")
        self.answers["claim", len(rows)] += 1
        assert sorted(r.message_id for r in rows) == sorted(message_id for _, message_id in due)
        for row in rows:
            message = self.live[row.message_id]
            assert row.delivery not in {delivery for _, delivery in self.receipts}
            self.receipts.append((row.message_id, row.delivery))
            until = self.now + (VISIBILITY if visibility is None else visibility)
            lapses = message.lapses + message.claimed
            self.change(message, delivery=row.delivery, claimed=True, lapses=lapses, due=until)
            message = self.live[row.message_id]
            assert (self.clock(row.visible_at), row.failures, row.lapses) == (until, message.failures, message.lapses)

    def pick(self, number):
        """A receipt: mostly a current one, else any of all times, or one of another message."""
        current = [(m.message_id, m.delivery) for m in self.live.values() if m.claimed]
        if number < 9 and current:
            return current[number % len(current)]
        if number < 13:
            return self.receipts[-(number % len(self.receipts)) - 1]
        return self.ids[number % len(self.ids)], self.receipts[-1][1]

    def use(self, verb, number, span, final):
        if not self.receipts:
            return
        receipt = self.pick(number)
        if verb == "ack":
            self.acked(self.one("ack", *receipt), receipt)
        elif verb == "park":
            self.parked(self.one("park", *receipt, span, casts="..i"), receipt, span)
        elif verb == "fail":
            error = f"at {self.now}"
            self.failed(self.one("fail", *receipt, error, span, final, casts="...i."), receipt, error, span, final)
        else:
            self.extended(self.one("extend", *receipt, span, casts="..i"), receipt, span)

    def use_many(self, verb, numbers, span):
        if not self.receipts:
            return
        several = [self.pick(number) for number in numbers]
        array = json.dumps([{"message_id": m, "delivery": d} for m, d in several])
        if verb == "ack_many":
            rows = self.call("ack_many", array, casts="b")
        else:
            rows = self.call("extend_many", array, span, casts="bi")
        assert [r.message_id for r in rows] == [m for m, _ in several]
        for place in sorted(range(len(several)), key=lambda p: (several[p][0], p)):
            if verb == "ack_many":
                self.acked(rows[place], several[place])
            else:
                self.extended(rows[place], several[place], span)

    def acked(self, row, receipt):
        if self.held(receipt):
            assert row.outcome == "acked"
            del self.live[receipt[0]]
        else:
            assert row.outcome == "lost"
            self.lost(receipt)

    def parked(self, row, receipt, delay):
        message = self.held(receipt)
        if not message:
            assert row == ("lost", None)
            self.lost(receipt)
            return
        due = self.now + (delay or 0)
        assert (row.outcome, self.clock(row.visible_at)) == ("parked", due)
        self.change(message, claimed=False, due=due)

    def failed(self, row, receipt, error, delay, final):
        message = self.held(receipt)
        if not message:
            assert row == ("lost", None)
            self.lost(receipt)
            return
        failed = replace(message, failures=message.failures + 1, error=error)
        if final or failed.failures >= MAX_FAILURES:
            assert row == ("dead", None)
            self.bury(failed, "final" if final else "failures")
            return
        assert row.outcome == "failed"
        due = self.clock(row.visible_at)
        if delay is None:
            expected = min(BACKOFF_BASE * 2 ** message.failures, BACKOFF_MAX)
            assert 0.8 * expected <= due - self.now <= 1.2 * expected
        else:
            assert due == self.now + delay
        self.change(failed, claimed=False, due=due)

    def extended(self, row, receipt, visibility):
        message = self.held(receipt)
        if not message:
            assert (row.outcome, row.visible_at) == ("lost", None)
            self.lost(receipt)
            return
        until = max(message.due, self.now + (VISIBILITY if visibility is None else visibility))
        assert (row.outcome, self.clock(row.visible_at)) == ("extended", until)
        self.change(message, due=until)

    # --- time and operators

    def advance(self, to, nth, before):
        """By a span, or to a deadline of some message, or a microsecond before one."""
        ahead = sorted({m.due for m in self.live.values() if m.due - before > self.now})
        if to:
            self.set_clock(self.now + to)
        elif nth < len(ahead):
            self.set_clock(ahead[nth] - before)

    def tick(self):
        changed = {r.part: r.changed for r in self.call("tick")}
        ended = [m for m in self.live.values() if m.due <= self.now and m.reason()]
        assert changed.get("dead_letters", 0) == len(ended)
        for message in ended:
            self.bury(message, message.reason(), lapses=message.reason() == "lapses" and message.claimed)
        self.answers["tick", len(ended)] += 1

    def redrive(self, numbers):
        if not self.dead:
            return
        candidates = sorted(self.dead) + self.ids[-2:]
        several = [candidates[n % len(candidates)] for n in numbers]
        expected = [None] * len(several)
        for place, message_id in sorted(
            enumerate(several), key=lambda p: (p[1] not in self.dead, self.dead_order(p[1]), p[0])
        ):
            if message_id not in self.dead or several.index(message_id) != place:
                expected[place] = "unknown"
                continue
            message, _ = self.dead[message_id]
            if self.owner(message.queue_name, message.dedupe_key) is not None:
                expected[place] = "key_taken"
                continue
            expected[place] = "redriven"
            del self.dead[message_id]
            self.live[message_id] = replace(message, due=self.now, delivery=None, claimed=False, failures=0, lapses=0)
            self.incidents["operator"] += 1
        rows = self.call("redrive", several, casts="a")
        assert rows == list(zip(expected, several, strict=True))
        self.answers.update(("redrive", outcome) for outcome in expected)

    def dead_order(self, message_id):
        if message_id not in self.dead:
            return ()
        message, _ = self.dead[message_id]
        return message.queue_name, message.dedupe_key is None, message.dedupe_key or "", message_id

    def remove_messages(self, numbers):
        several = [self.ids[n % len(self.ids)] for n in numbers]
        rows = self.call("remove_messages", several, casts="a")
        gone = {i for i in several if i in self.live and (not self.live[i].claimed or self.live[i].due <= self.now)}
        expected = []
        for place, message_id in enumerate(several):
            if message_id in gone and several.index(message_id) == place:
                expected.append("removed")
            else:
                expected.append("in_flight" if message_id in self.live and message_id not in gone else "unknown")
        assert rows == list(zip(expected, several, strict=True))
        for message_id in gone:
            del self.live[message_id]
        self.incidents["operator"] += len(gone)
        self.answers.update(("remove_messages", outcome) for outcome in expected)

    # --- always

    @invariant()
    def the_tables_are_what_the_model_says(self):
        live = self.conn.execute(LIVE).fetchall()
        dead = self.conn.execute(DEAD).fetchall()
        assert {r.message_id: Message(*r) for r in live} == self.live
        assert {r.message_id: tuple(r[1:]) for r in dead} == {
            m.message_id: (m.queue_name, m.dedupe_key, m.failures, m.lapses, m.error, reason)
            for m, reason in self.dead.values()
        }
        assert not {r.message_id for r in live} & {r.message_id for r in dead}, "a message is in two places"
        current = [r.delivery for r in live if r.claimed]
        assert len(set(current)) == len(current), "a receipt is current twice"
        incidents = self.conn.execute("select kind, count(*) from baton.incidents group by kind")
        assert Counter(dict(incidents)) == self.incidents


# What a run of this size must have seen to be worth anything.
WANTED = {
    ("send", "sent"), ("send", "duplicate"), ("claim", 0), ("claim", 1), ("claim", 2), ("tick", 0), ("tick", 1),
    ("ack", "acked"), ("ack", "lost"), ("park", "parked"), ("park", "lost"), ("extend", "extended"), ("extend", "lost"),
    ("fail", "failed"), ("fail", "dead"), ("fail", "lost"), ("redrive", "redriven"), ("redrive", "key_taken"),
    ("redrive", "unknown"), ("remove_messages", "removed"), ("remove_messages", "in_flight"),
    ("remove_messages", "unknown"),
}


def test_every_history_is_what_the_model_says(clock_db):
    Queue.conn = clock_db.connect()
    Queue.answers = Counter()
    run_state_machine_as_test(
        Queue,
        settings=settings(
            derandomize=True, database=None, deadline=None, max_examples=80, stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert not WANTED - set(Queue.answers), "the histories did not get everywhere"
