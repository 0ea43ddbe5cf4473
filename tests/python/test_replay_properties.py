"""Anything that can happen to a run, in any order, over the real SQL with a clock of the test's own.

A holder is a claim that somebody works under: it may begin, read, append, end, give back, extend, or die at any call
boundary. Messages are purged by hand, replays released, and time jumps. After every step at most one holder can write
and the log is dense; after every tick no run is wedged; and at the end everything that asked for a replay got one that
could see it.
"""

from collections import Counter

import psycopg
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from runs import wedged

ROWS = {
    # begin_replay's table but busy, which needs somebody who holds the run's row
    "begin: lost", "begin: terminal", "begin: granted anew", "begin: handed_over", "begin: granted after a lost one",
    "begin: terminal at the limit", "begin: granted",
    # end_replay's
    "end: terminal", "end: ended already", "end: lost", "end: refused", "end: again", "end: ended",
}
DEAD = 2147483647
NEWEST_FIRST = st.sampled_from([0, 0, 1, 1, 2, 3])

LOOK = """
create function baton_test.look(run_id text, epochs bigint[], asked boolean)
returns text
language plpgsql
as $$
declare
  v_epoch bigint;
  v_writers integer := 0;
begin
  foreach v_epoch in array look.epochs loop
    begin
      if (select a.outcome from baton.append_event(look.run_id, v_epoch, 'x.y') as a) = 'appended' then
        v_writers := v_writers + 1;
      end if;
      raise exception 'undone' using errcode = 'XX999';
    exception
      when sqlstate 'PB001' or sqlstate 'XX999' then null;
    end;
  end loop;
  if v_writers > 1 then
    return format('%s can write', v_writers);
  elsif v_writers > 0 and (select r.replay_ended from baton.runs as r where r.run_id = look.run_id) then
    return 'a replay that has ended can write';
  elsif look.asked and (
    select r.ended_at is null and not r.wake_pending from baton.runs as r where r.run_id = look.run_id
  ) then
    return 'a wake that no grant has followed is forgotten';
  elsif exists (
    select
    from baton.runs as r
    cross join lateral (select count(*) as n, max(e.seq) as last from baton.events as e where e.run_id = r.run_id) as e
    where e.n <> r.last_seq or e.last <> r.last_seq
  ) then
    return 'a log has gaps';
  elsif exists (
    select from baton.runs as r where r.ended_at is not null and (not r.replay_ended or r.wake_pending or r.wake_at is not null)
  ) then
    return 'an ended run holds something';
  elsif exists (
    select
    from baton.runs as r
    inner join baton.messages as m on m.message_id = r.wake_message_id
    where m.run_id <> r.run_id or m.kind <> 'run' or m.dedupe_key is not null
      or not r.replay_ended and (m.message_id, m.delivery) = (r.replay_message_id, r.replay_delivery)
  ) then
    return 'a wake is of another run, has a key, or was granted';
  end if;
  return null;
end;
$$;
"""


class Holder:
    def __init__(self, run_id, message_id, delivery):
        self.run_id, self.message_id, self.delivery = run_id, message_id, delivery
        self.epoch = self.seen = None
        self.session = False


class Runs(RuleBasedStateMachine):
    conn = None
    hits = Counter()

    # --- asking

    def rows(self, sql, *values):
        cursor = self.conn.execute(sql, values)
        return cursor.fetchall() if cursor.description else []

    def one(self, sql, *values):
        [row] = self.rows(sql, *values)
        return row

    @property
    def run(self):
        return self.one("select *, ended_at is null as open from baton.runs where run_id = %s", self.run_id)

    def pick(self, number):
        """0 is the newest."""
        return self.holders[-1 - number % len(self.holders)]

    def holder_lives(self):
        """Whether somebody's replay is alive, by what the protocol says, from the tables."""
        return bool(self.rows(
            "select 1 from baton.runs as r inner join baton.messages as m on m.message_id = r.replay_message_id"
            " and m.delivery = r.replay_delivery where r.run_id = %s and not r.replay_ended and m.claimed_at is not null"
            " and m.visible_at > baton._now() and coalesce(r.replay_backend, 0) <> %s", self.run_id, DEAD))

    # --- what happens

    @initialize()
    def begin_anew(self):
        self.conn.execute("truncate baton.runs, baton.events, baton.messages, baton.steps, baton.tasks, baton.incidents,"
                          " baton.recovery_cursors, baton.queue_marks")
        self.conn.execute("select baton_test.set_clock('2026-01-01 00:00:00+00'), setseed(0)")
        self.holders, self.epochs, self.number = [], [], 0
        self.next_run()

    def next_run(self):
        self.number += 1
        self.run_id = f"run {self.number}"
        self.epochs = []
        delay = "10 s" if self.number % 3 == 0 else "0"
        self.asked = delay == "0"
        assert self.one("select * from baton.start_run('w', null, %s, 'q', %s)", self.run_id, delay).outcome == "created"

    @precondition(lambda self: not self.run.open)
    @rule()
    def start(self):
        self.next_run()

    @rule()
    def signal(self):
        self.one("select * from baton.signal_run(%s, 's')", self.run_id)

    @rule()
    def wake(self):
        if self.one("select * from baton.wake_run(%s)", self.run_id).outcome == "woken":
            self.asked = True

    @rule(visibility=st.sampled_from(["5 s", "30 s", "10 min"]))
    def claim(self, visibility):
        for row in self.rows("select * from baton.claim('q', visibility => %s)", visibility):
            self.holders.append(Holder(row.run_id, row.message_id, row.delivery))
            del self.holders[:-4]

    @rule(visibility=st.sampled_from(["5 s", "30 s", "10 min"]), session=st.booleans())
    def work(self, visibility, session):
        """What a worker does without a break."""
        self.claim(visibility)
        if self.holders:
            self.begin_by(self.holders[-1], session)

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST, session=st.booleans())
    def begin(self, number, session):
        self.begin_by(self.pick(number), session)

    def begin_by(self, holder, session=False):
        before = self.run
        lives = self.holder_lives()
        own = (before.replay_message_id, before.replay_delivery) == (holder.message_id, holder.delivery)
        mine = holder.run_id == self.run_id
        answer = self.one("select * from baton.begin_replay(%s, %s, %s)", holder.message_id, holder.delivery,
                          "session" if session else "lease")
        outcome = answer.outcome
        if outcome == "granted":
            assert mine
            if not before.replay_ended and not own:
                assert not lives, "granted while another's replay is alive"
                assert self.run.lapses == before.lapses + 1
                outcome = "granted after a lost one"
            elif own and not before.replay_ended:
                outcome = "granted anew"
            holder.epoch, holder.seen, holder.session = answer.replay_epoch, answer.last_seq, session
            self.epochs.append(holder.epoch)
            self.asked = False
        elif outcome == "handed_over":
            assert lives and not own
            self.asked = True
        elif outcome == "terminal" and mine and before.open:
            assert self.run.status == "failed"
            outcome = "terminal at the limit"
        self.hits[f"begin: {outcome}"] += 1
        return answer.outcome

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST)
    def read(self, number):
        holder = self.pick(number)
        holder.seen = self.one("select coalesce(max(seq), 0) as n from baton.events where run_id = %s", holder.run_id).n

    def may_write(self, run_id, epoch):
        """By trying, in a transaction that is undone."""
        try:
            with self.conn.transaction(force_rollback=True):
                return self.one("select * from baton.append_event(%s, %s, 'x.y')", run_id, epoch).outcome == "appended"
        except psycopg.DatabaseError as error:
            assert error.sqlstate == "PB001"
            return False

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST)
    def append(self, number):
        holder = self.pick(number)
        if self.may_write(holder.run_id, holder.epoch):
            self.one("select * from baton.append_event(%s, %s, 'x.y')", holder.run_id, holder.epoch)

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST, sleep=st.sampled_from([None, "0", "20 s"]))
    def end(self, number, sleep):
        self.end_by(self.pick(number), sleep)

    def end_by(self, holder, sleep=None):
        before = self.run
        mine = holder.run_id == self.run_id
        try:
            answer = self.one(
                "select * from baton.end_replay(%s, %s, %s, case when %s = 'infinity' then 'infinity' else"
                " baton._now() + nullif(%s, 'infinity')::interval end)", holder.run_id, holder.epoch,
                -1 if holder.seen is None else holder.seen, sleep, sleep)
        except psycopg.DatabaseError as error:
            assert error.sqlstate == "22023"
            self.hits["end: refused"] += 1
            return None
        outcome = answer.outcome
        if outcome == "ended":
            if before.replay_ended:
                outcome = "ended already"
            else:
                assert mine and before.wake_seq <= holder.seen and self.run.replayed_seq == holder.seen
        elif outcome == "again":
            assert before.wake_seq > holder.seen and answer.last_seq == before.last_seq
            holder.seen = answer.last_seq
        self.hits[f"end: {outcome}"] += 1
        return outcome

    @rule(signals=st.booleans(), appends=st.booleans(), times=st.integers(1, 3))
    def work_to_the_end(self, signals, appends, times):
        self.work("30 s", False)
        if signals:
            self.signal()
        if appends and self.holders:
            self.append(0)
        for _ in range(times if self.holders else 0):
            self.end_by(self.holders[-1])

    @rule(sleep=st.sampled_from([None, "infinity"]))
    def end_beyond_the_log(self, sleep):
        self.work("30 s", False)
        if self.holders:
            holder = self.holders[-1]
            seen, holder.seen = holder.seen, holder.seen if sleep else 10_000
            self.end_by(holder, sleep)
            holder.seen = seen

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST, verb=st.sampled_from(["park", "fail"]), force=st.booleans())
    def give_back(self, number, verb, force):
        holder = self.pick(number)
        arguments = "" if verb == "park" else "error => 'x', "
        answer = self.one(f"select * from baton.{verb}(%s, %s, {arguments}delay => '5 s', force => %s)",
                          holder.message_id, holder.delivery, force)
        if holder.run_id == self.run_id and answer.outcome in ("parked", "failed"):
            self.asked = True

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST)
    def extend(self, number):
        holder = self.pick(number)
        self.one("select * from baton.extend(%s, %s, '30 s')", holder.message_id, holder.delivery)

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST)
    def run_a_body(self, number):
        """Under the holder's receipt, as a replay that dispatches would."""
        holder = self.pick(number)
        if self.may_write(holder.run_id, holder.epoch):
            self.conn.execute(
                "insert into baton.tasks (run_id, step_slug, task_index, status, attempt, owner_message_id, owner_delivery)"
                " select %s, 's', count(*), 'started', 1, %s, %s from baton.tasks where run_id = %s",
                (holder.run_id, holder.message_id, holder.delivery, holder.run_id))

    @rule()
    def bodies_end(self):
        self.conn.execute("update baton.tasks set status = 'completed' where run_id = %s and status in ('created', 'started')",
                          (self.run_id,))

    @precondition(lambda self: self.holders)
    @rule(number=NEWEST_FIRST)
    def die(self, number):
        holder = self.holders.pop(-1 - number % len(self.holders))
        if holder.session:
            self.conn.execute("update baton.runs set replay_backend = %s where run_id = %s and replay_epoch = %s",
                              (DEAD, holder.run_id, holder.epoch))

    @rule(times=st.integers(1, 3))
    def die_at_work(self, times):
        for _ in range(times):
            self.wake()
            self.work("10 min", True)
            if self.holders:
                self.die(0)

    @rule(number=NEWEST_FIRST)
    def purge(self, number):
        self.conn.execute("delete from baton.messages where message_id = (select message_id from baton.messages"
                          " order by message_id offset %s limit 1)", (number % 3,))

    @rule()
    def release(self):
        if self.one("select * from baton.release_replay(%s)", self.run_id).outcome == "released":
            self.asked = True

    @rule()
    def cancel(self):
        if len(self.epochs) > 1:
            self.claim("30 s")
            self.one("select * from baton.cancel_run(%s, 'x')", self.run_id)
            if self.holders:
                self.begin_by(self.holders[-1])
                self.end_by(self.holders[0])

    @rule(by=st.sampled_from(["1 s", "5 s", "29 s", "31 s", "1 h"]))
    def time_jumps(self, by):
        self.conn.execute("select baton_test.advance(%s)", (by,))

    @rule()
    def tick(self):
        failed = self.rows("select * from baton.tick() where error is not null")
        assert failed == []
        assert wedged(self.conn) == []

    @invariant()
    def all_is_well(self):
        if hasattr(self, "holders"):
            assert self.one("select baton_test.look(%s, %s, %s) as it", self.run_id, self.epochs[-4:], self.asked).it is None

    def teardown(self):
        """Every holder dies; ticks and a worker do the rest, in bounded time."""
        if self.conn is None or not hasattr(self, "holders"):
            return
        while self.holders:
            self.die(0)
        for _ in range(30):
            self.tick()
            while claimed := self.rows("select * from baton.claim('q')"):
                holder = Holder(claimed[0].run_id, claimed[0].message_id, claimed[0].delivery)
                self.bodies_end()
                if self.begin_by(holder) == "granted":
                    self.read_and_end(holder)
            run = self.run
            waits = self.rows("select 1 from baton.messages as m where m.kind = 'run'")
            if not run.open or (not waits and not run.wake_pending and run.replay_ended and run.status == "suspended"):
                break
            self.conn.execute("select baton_test.advance('2 min')")
        else:
            raise AssertionError(f"after an hour it is still not at rest: {run}")
        if run.open:
            assert run.wake_seq <= run.replayed_seq, "a signal that no replay has read"
            assert not self.asked, "a wake that no grant has followed"

    def read_and_end(self, holder):
        holder.seen = self.one("select max(seq) as n from baton.events where run_id = %s", holder.run_id).n
        assert self.end_by(holder) == "ended"


def test_whatever_happens_to_a_run(clock_db):
    Runs.conn = clock_db.connect()
    Runs.hits = Counter()
    Runs.conn.execute(LOOK)
    Runs.conn.execute("update baton.settings set max_failures = 6, max_lapses = 3, backoff_max = '20 s'")
    run_state_machine_as_test(Runs, settings=settings(
        derandomize=True, max_examples=50, stateful_step_count=40, deadline=None, database=None,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    ))
    assert ROWS - set(Runs.hits) == set(), f"rows of the tables that nothing reached, among {Runs.hits}"
    Runs.conn = None
