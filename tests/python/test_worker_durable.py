"""docs/examples/worker_durable.py as several processes on one queue, which are killed, stopped and sent home."""

import collections
import json
import random
import re
import signal
from types import SimpleNamespace

import psycopg
import pytest
from conftest import ROOT, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import EXAMPLES, Program, Shop
from runs import granted, start
from soak_audit import long_way
from tasks import create, replay, write_as_before

# Each body leaves a mark, a line in a file: which task, which attempt, which process.
CODE = """
import itertools, os, signal, time
import worker_durable
from worker_durable import BODIES, WORKFLOWS, Failed, Slot, StepFailed, log

FOLDER = os.environ["FOLDER"]
LOOKS = itertools.count()

def note(name, line):
    with open(f"{FOLDER}/{name}", "a") as file:
        print(line, file=file)

def mark(task):
    note("marks", f"{task.run_id}|{task.step_slug}|{task.task_index}|{task.attempt}|{os.getpid()}")

def quick(input, task):
    mark(task)
    time.sleep(float(os.environ.get("QUICK_SECONDS", 0.01)))
    return input

def gated(input, task):  # until the gate opens, for all, or for this process
    mark(task)
    while not any(map(os.path.exists, (f"{FOLDER}/gate", f"{FOLDER}/gate.{os.getpid()}"))):
        task.raise_if_cancelled()
        time.sleep(0.02)
    return input

def poison(input, task):
    if input == "harmless":
        return input
    mark(task)
    os.kill(os.getpid(), signal.SIGKILL)

def flaky(input, task):
    mark(task)
    if task.attempt <= input:
        raise ValueError(f"attempt {task.attempt}")
    return task.attempt

def large(input, task):
    mark(task)
    return "x" * input

def epoch(input, task):  # of its run's last replay
    mark(task)
    with worker_durable.connect(os.environ["OWNER_URL"]) as db:
        return db.execute("select replay_epoch from baton.runs where run_id = %s", [task.run_id]).fetchone()[0]

def listed(input, task):
    mark(task)
    return {"later": list(input), "b": None}

def nul(input, task):
    mark(task)
    return "\\0"

def odd(input, task):
    return float(input)

BODIES.update({body.__name__: body for body in (quick, gated, poison, flaky, large, epoch, listed, odd, nul)})

def fan(run):
    return run.map("quick", run.input)

def steps(run):
    note("calls", run.baton.run_id)
    return [run.step("quick", number, key=number) for number in range(run.input)]

def gate(run):
    return run.step("gated", run.input)

def caught(run):
    try:
        return run.map("poison", run.input)
    except StepFailed as failed:
        return [failed.slug, failed.error, run.step("quick", "after")]

def both(run):
    return run.map("gated", run.input)

def retries(run):
    return run.step("flaky", run.input, max_attempts=3)

def kills(run):
    run.step("quick")
    os.kill(os.getpid(), signal.SIGKILL)

def too_large(run):
    run.step("large", run.input)
    return run.step("quick")

def late(run):  # its claim runs out while it decides
    if not run.created:
        with worker_durable.connect(os.environ["OWNER_URL"]) as db:
            db.execute("update baton.messages set visible_at = baton._now()")
    return run.step("quick", run.input)

def raises(run):
    run.step("quick")
    raise ValueError("on purpose")

def ways(run):
    steps = [run.step("epoch", key=number) for number in range(4)]
    return [steps, run.map("epoch", [1, 2], "fan"), run.step("epoch", key="after")]

def hears(run):
    run.step("gated")
    return [run.step("epoch"), run.wait_signal("knock")]

def resumes(run):
    return [run.step("quick", 1), run.step("gated", 2), run.step("quick", 3, "3"), run.step("quick", 4, "4")]

def looks(run):
    first, looked = run.step("quick", 0, "0"), run.record("shop.looked", lambda: next(LOOKS))
    return [first, looked, run.step("quick", 1, "1"), run.step("quick", 2, "2")]

def wary(run):
    outputs = []
    for number in range(3):
        try:
            outputs.append(run.step("gated", number, number))
        except Exception as error:
            note("caught", error)
    return outputs

def tidies(run):  # in whatever way the code is left
    seen = []
    try:
        seen.append(run.step("quick", 1, "1"))
        seen.append(run.step("flaky", 9, max_attempts=1))
    except StepFailed as failed:
        seen.append(failed.slug)
    finally:
        seen += [run.record("shop.tidied", lambda: next(LOOKS)), run.step("quick", 2, "tidy"), *run.map("quick", [3, 4], "up")]
    return seen

def swallows(run):
    seen = []
    for number in range(3):
        try:
            seen.append(run.step("quick", number, number))
        except BaseException as error:
            note("caught", error)
    try:
        seen.append(run.wait_signal("knock"))
    except BaseException:
        return "given up"
    return seen

def nothing(run):
    return [run.step("quick", 1, "1"), run.map("quick", []), run.step("quick", 2, "2")]

def stumbles(run):
    return [run.step("quick"), run.step("flaky", 1), run.step("quick", "on", "after")]

def strays(run):  # in its second call, which is ahead, it leaves out something that the log has
    is_astray = next(LOOKS) == 1
    if not is_astray or run.input != "record":
        run.record("shop.looked", lambda: 1)
    if not is_astray or run.input != "step":
        run.step("quick", 0, "0")
    if is_astray:
        run.step("quick", 0, "stray")
    return run.step("quick", 1, "1")

def mixed(run):
    note("calls", run.baton.run_id)
    looked, heard = run.record("shop.looked", lambda: {"later": 1e16, "b": [-0.0]}), run.wait_signal("knock")
    for changed in (run.input, looked, heard):
        changed["changed"] = changed.get("changed", 0) + 1
    keys = run.step("quick", list(looked), "keys")
    lists = [run.step("listed", looked, n) for n in range(3)]
    for words in lists:
        words["later"].append("more")
    more = [run.step("quick", [words, None], n, max_attempts=5, on_exhausted="skip_step") for n, words in enumerate(lists)]
    flaky, fan = run.step("flaky", 1), run.map("quick", more, "fan")
    for n, answer in enumerate(fan):
        answer[0] = run.step("quick", answer, f"again {n}")
    return [run.input, looked, heard, keys, flaky, fan]

def plain(run):
    if run.input == "input":
        run.step("quick", {1})
    if run.input == "error":
        raise Failed({1})
    return {1}

def unheld(run):
    return run.step("nul")

def nan(run):
    return run.step("odd", "nan", max_attempts=1)

def forms(run):
    run.step("quick")
    words = run.step("listed", {"later": 1, "b": 2})
    return [words["later"], [run.step("quick", word, word) for word in words]]

WORKFLOWS.update({flow.__name__: flow for flow in (
    fan, steps, gate, both, caught, retries, kills, too_large, raises, late, ways, hears, resumes, looks, forms, wary, stumbles,
    strays, mixed, plain, nan, tidies, swallows, nothing,
    unheld)})
for name in os.environ.get("FORGET", "").split():
    WORKFLOWS.pop(name, None)
    BODIES.pop(name, None)

def without_an_answer(name):  # it is committed, and the connection breaks before that is told
    way = getattr(Slot, name)

    def broken(slot, what, *more):
        seen = list(what) if name == "end_and_replay" else None
        answer = way(slot, what, *more)
        if not answer or not os.path.exists(f"{FOLDER}/break.{name}"):
            return answer
        os.remove(f"{FOLDER}/break.{name}")
        slot.db.close()
        if seen:
            what[:] = seen

    setattr(Slot, name, broken)

without_an_answer("advance")
without_an_answer("end_and_replay")
if "LONG_WAY" in os.environ:
    Slot.run_ahead = lambda slot, events, task, ended: ended
worker = worker_durable.Worker()
signal.signal(signal.SIGTERM, worker.stop)
worker.work()
"""

NEVER_AWAITS = (ROOT / "tools/lib/never_awaits.sql").read_text()


class DurableShop(Shop):
    code = CODE

    def worker(self, visibility=60, wait=True, **env):
        name = f"worker-{len(self.workers) + 1}"
        dsn = psycopg.conninfo.make_conninfo(self.db.cluster.dsn(self.db.name, user=self.user), application_name=name)
        program = Program(self.folder / f"{name}.log", ["-c", self.code], {
            "DATABASE_URL": dsn, "POLL_SECONDS": "0.05", "VISIBILITY_SECONDS": str(visibility), "UNKNOWN_SECONDS": "0.3",
            "FOLDER": str(self.folder), "PYTHONPATH": str(EXAMPLES), **env})
        self.workers.append(program)
        if wait:
            program.wait_for("ready")
        return program

    def living(self):
        return [worker for worker in self.workers if worker.process.poll() is None]

    def keep(self, count, **options):
        """Starts as many as are missing, as a platform does."""
        for _ in range(count - len(self.living())):
            self.worker(wait=False, **options)

    def start(self, workflow_name, input=None, run_id="r"):
        answer = self.conn.execute("select * from baton.start_run(%s, %s::jsonb, %s)",
                                   (workflow_name, json.dumps(input), run_id))
        assert answer.fetchone().outcome == "created"

    def marks(self):
        """[(run, step, index, attempt, pid)]"""
        return [(run, step, int(index), int(attempt), int(pid)) for run, step, index, attempt, pid
                in (line.split("|") for line in self.lines())]

    def status(self, run_id="r"):
        return self.conn.execute("select status from baton.runs where run_id = %s", (run_id,)).fetchone().status

    def epoch(self, run_id="r"):
        return self.conn.execute("select replay_epoch from baton.runs where run_id = %s", (run_id,)).fetchone().replay_epoch

    def task(self, slug, index=0, run_id="r"):
        return self.conn.execute("select * from baton.tasks where run_id = %s and step_slug = %s and task_index = %s",
                                 (run_id, slug, index)).fetchone()


@pytest.fixture
def shop(db, tmp_path):
    shop = DurableShop(db, tmp_path)
    yield shop
    shop.close()


def test_a_fan_out_over_four_processes_with_random_kills_completes_with_every_result_once(shop, server_log):
    rng, kills, tasks, options = random.Random(11), 0, 1000, {"visibility": 2, "QUICK_SECONDS": "0.005"}
    shop.start("fan", list(range(tasks)))
    shop.keep(4, **options)
    shop.wait_marks(5)

    def done():
        nonlocal kills
        if kills < 12 and len(shop.marks()) > 75 * kills:
            living = shop.living()
            if len(living) == 4:
                rng.choice(living).signal(signal.SIGKILL)
                kills += 1
        shop.keep(4, **options)
        shop.conn.execute("select baton.tick()")
        return shop.ended()

    wait_until(done, "the run has ended", timeout=150, every=0.05)
    assert kills >= 8
    assert shop.run().output == list(range(tasks))
    completed = [event.payload["task_index"] for event in shop.conn.execute(
        "select payload from baton.events where type = 'task_completed'").fetchall()]
    assert sorted(completed) == list(range(tasks))
    ran = collections.Counter(index for _, _, index, _, _ in shop.marks())
    again = sum(count - 1 for count in ran.values())
    assert set(ran) == set(range(tasks)) and again <= kills, "only what a killed process had in hand ran again"
    assert len({pid for *_, pid in shop.marks()}) >= 4
    shop.wait_empty()
    assert server_log.errors(ignore="connection to client lost") == []


@pytest.mark.parametrize("inputs", [["deadly"], ["harmless", "deadly"]], ids=["inline", "queued"])
def test_a_poison_task_ends_as_a_failed_step_that_the_workflow_catches(shop, inputs):
    shop.conn.execute("update baton.settings set max_lapses = 3")
    shop.start("caught", inputs)

    def done():
        shop.keep(1, visibility=1)
        return shop.ended()

    wait_until(done, "the run has ended", every=0.05)
    assert shop.run().output == ["poison", "max_lapses", "after"]
    starts = [(index, attempt) for _, step, index, attempt, _ in shop.marks() if step == "poison"]
    assert starts == [(len(inputs) - 1, attempt) for attempt in (1, 2, 3)]
    assert shop.types().count("task_failed") == 1 and len(shop.incidents("limit_reached")) == 1
    shop.wait_empty()


def signalled_in_the_middle(shop):
    """A body runs; a signal comes, and another process replays the run."""
    first = shop.worker()
    shop.start("gate", "through")
    shop.wait_marks(1)
    second = shop.worker()
    for told in (1, 2, 3):
        assert shop.conn.execute("select * from baton.signal_run('r', 'knock')").fetchone().outcome == "signalled"
        wait_until(lambda: not shop.conn.execute("select from baton.runs where wake_pending or wake_seq > replayed_seq"
                                                 " or not replay_ended").fetchall(), "the signal was read")
        if "executed twice" in second.text():
            break
        wait_until(lambda: second.text().count("ended r") + first.text().count("ended r") >= told, "a worker says so too")
    return first, second


def test_a_signal_in_the_middle_of_an_inline_step_does_not_run_it_again(shop):
    first, _ = signalled_in_the_middle(shop)
    backstops = shop.conn.execute("select from baton.messages where dedupe_key like %s", ("%\x1fbackstop\x1f%",)).fetchall()
    assert len(backstops) == 1
    shop.open_gate()
    assert shop.wait("completed").output == "through"
    assert shop.marks() == [("r", "gated", 0, 1, first.process.pid)]
    shop.wait_empty()


def test_without_ownership_and_single_flight_it_runs_twice(shop):
    """The same on a start_task that never awaits, with ownership switched off."""
    shop.conn.execute(NEVER_AWAITS)
    first = shop.worker()
    shop.start("gate", "through")
    shop.wait_marks(1)
    second = shop.worker()
    assert shop.conn.execute("select * from baton.signal_run('r', 'knock')").fetchone().outcome == "signalled"
    shop.wait_marks(2)
    assert {pid for *_, pid in shop.marks()} == {first.process.pid, second.process.pid}, "two bodies at once"
    assert shop.types().count("task_completed") == 0


def test_with_ownership_off_single_flight_alone_keeps_it_from_running_twice(shop):
    shop.conn.execute("update baton.settings set inline_ownership = false")
    shop.worker(visibility=3)
    shop.start("gate", "through")
    shop.wait_marks(1)
    second = shop.worker()
    shop.conn.execute("select baton.signal_run('r', 'knock')")
    second.wait_for("await r")
    shop.open_gate()
    assert shop.wait("completed").output == "through"
    assert len(shop.marks()) == 1


def test_one_inline_step_costs_one_commit(shop):
    shop.worker()
    shop.start("steps", 2, "warm")
    shop.wait("completed", "warm")
    number = "select pg_current_xact_id()::text::bigint as n"
    cost = collections.defaultdict(list)
    for attempt, steps in ((attempt, steps) for attempt in range(3) for steps in (5, 25, 45)):
        before = shop.conn.execute(number).fetchone().n
        shop.start("steps", steps, f"{steps} {attempt}")
        shop.wait("completed", f"{steps} {attempt}")
        cost[steps].append(shop.conn.execute(number).fetchone().n - before - steps)
    # Start, claim, grant, the first dispatch, and this count; what else the cluster does at that moment comes on top.
    assert {steps: min(more) for steps, more in cost.items()} == {5: 5, 25: 5, 45: 5}, dict(cost)


def test_a_step_after_a_step_is_reached_the_short_way_a_fan_out_and_the_end_the_long_one(shop):
    shop.worker(OWNER_URL=shop.db.dsn)
    shop.start("ways")
    steps, fan, after = shop.wait("completed").output
    assert len(set(steps)) == 1, "no replay in between"
    assert len({steps[0], *fan, after, shop.epoch()}) == 5
    begun, over = ["step_created", "task_started"], ["task_completed", "step_completed"]
    assert shop.types()[1:8] == [*begun, *3 * ["run_advanced"], *over]
    assert shop.types()[-5:] == [*begun, *over, "run_completed"]
    assert len(shop.marks()) == 7
    shop.wait_empty()


def test_where_a_signal_came_meanwhile_the_next_step_is_reached_the_long_way(shop):
    shop.worker(OWNER_URL=shop.db.dsn)
    shop.start("hears")
    shop.wait_marks(1)
    before = shop.epoch()
    shop.conn.execute("select baton.signal_run('r', 'knock', '\"who is there\"')")
    shop.open_gate()
    epoch, heard = shop.wait("completed").output
    assert epoch != before and heard == "who is there"
    assert [step for _, step, *_ in shop.marks()] == ["gated", "epoch"]


def test_what_is_recorded_between_two_steps_is_decided_once_and_kept(shop):
    shop.worker()
    shop.start("looks")
    assert shop.wait("completed").output == [0, 0, 1, 2]
    assert shop.types().count("shop.looked") == 1


def test_the_code_is_called_as_often_for_forty_steps_as_for_four(shop):
    shop.worker()
    for steps in (4, 40):
        shop.start("steps", steps, str(steps))
        assert shop.wait("completed", str(steps)).output == list(range(steps))
    assert collections.Counter(shop.lines("calls")) == {"4": 3, "40": 3}, "a replay, ahead from there, and a replay at the end"


def test_from_one_inline_body_to_the_next_the_server_hears_one_statement(shop, server_log):
    shop.conn.execute(f"alter role {shop.user} in database {shop.db.name} set log_statement = 'all'")
    shop.worker()
    shop.start("steps", 20)
    shop.wait("completed")
    said = re.findall(r"\[(\d+)\] \S+ LOG:  (?:statement|execute .*?): (.*)", server_log.text())
    [pid] = {pid for pid, statement in said if "advance_run" in statement}
    statements = [re.sub(r"select (?:\* from )?baton\.(\w+).*", r"\1", statement) for by, statement in said if by == pid]
    first = statements.index("advance_run")
    assert statements[first:first + 20] == [*19 * ["advance_run"], "BEGIN"]
    assert "complete_task" in statements[first + 20:] and "advance_run" not in statements[first + 20:]


@pytest.mark.parametrize("what", ["declined", "an error"])
def test_code_that_catches_every_exception_does_not_catch_what_is_not_its_own(shop, what):
    shop.worker()
    shop.start("wary")
    shop.wait_marks(1)
    if what == "declined":
        assert shop.conn.execute("select * from baton.signal_run('r', 'knock')").fetchone().outcome == "signalled"
    else:
        assert shop.conn.execute("select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                                 " where usename = %s and datname = %s", (shop.user, shop.db.name)).fetchall()
    shop.open_gate()
    assert shop.wait("completed").output == [0, 1, 2] and shop.lines("caught") == []
    assert [(step, attempt) for _, step, _, attempt, _ in shop.marks()] == [(f"gated {number}", 1) for number in range(3)]


@pytest.mark.parametrize("workflow", ["tidies", "swallows"])
@pytest.mark.parametrize("options", [{}, {"LONG_WAY": "on"}], ids=["short", "long"])
def test_code_that_has_been_left_decides_nothing_on_its_way_out(shop, workflow, options):
    shop.worker(**options)
    shop.start(workflow)
    if workflow == "swallows":
        wait_until(lambda: shop.status() == "suspended", "it waits for its signal")
        shop.conn.execute("select baton.signal_run('r', 'knock', '3')")
    expected = {"tidies": [1, "flaky", 0, 2, 3, 4], "swallows": [0, 1, 2, 3]}[workflow]
    assert shop.wait("completed").output == expected
    types = shop.types()
    assert types.count("shop.tidied") == (workflow == "tidies")
    assert types.count("step_created") + types.count("run_advanced") == {"tidies": 4, "swallows": 3}[workflow]


def test_a_fan_out_over_nothing_waits_for_nobody(shop):
    shop.worker()
    shop.start("nothing")
    assert shop.wait("completed").output == [1, [], 2]


@pytest.mark.parametrize("gone", [psycopg.OperationalError, SystemExit])
def test_an_error_of_the_worker_itself_is_raised_when_the_code_has_been_left(monkeypatch, gone):
    monkeypatch.syspath_prepend(EXAMPLES)
    import worker_durable

    slot, advanced, caught = worker_durable.Worker().slots[0], [], []

    def wary(run):
        run.step("first")
        try:
            run.step("second")
        except BaseException as error:
            caught.append(type(error))
        run.step("third")

    def advance(task, *step):
        advanced.append(step[0])
        return task

    def execute(task):
        raise gone("gone")

    monkeypatch.setitem(worker_durable.WORKFLOWS, "wary", wary)
    slot.advance, slot.execute = advance, execute
    task = SimpleNamespace(baton=SimpleNamespace(workflow_name="wary"), step_slug="first", task_index=0,
                           output=worker_durable.Jsonb(None))
    with pytest.raises(gone, match="gone"):
        slot.run_ahead([SimpleNamespace(type="run_created", payload=None)], task, None)
    assert (advanced, caught) == (["second"], [worker_durable.Suspended])


@pytest.mark.parametrize("written", ["in one event", "as before"])
def test_killed_on_the_short_way_the_next_replay_goes_on_by_what_the_log_has_of_it(shop, written):
    first = shop.worker(visibility=1)
    shop.start("resumes")
    shop.wait_marks(2)
    first.signal(signal.SIGKILL)
    first.wait()
    if written == "as before":
        write_as_before(shop.conn)
    shop.open_gate()
    shop.worker(visibility=1)
    assert shop.wait("completed").output == [1, 2, 3, 4]
    assert [(step, attempt) for _, step, _, attempt, _ in shop.marks()] == [
        ("quick", 1), ("gated", 1), ("gated", 2), ("quick 3", 1), ("quick 4", 1)]
    assert shop.types().count("run_advanced") == 1 + (written == "in one event")


def test_a_body_that_fails_ahead_is_tried_again_and_the_run_goes_on(shop):
    shop.worker()
    shop.start("stumbles")
    assert shop.wait("completed").output == [None, 2, "on"]
    assert [(step, attempt) for _, step, _, attempt, _ in shop.marks()] == [
        ("quick", 1), ("flaky", 1), ("flaky", 2), ("quick after", 1)]
    assert shop.types().count("task_retrying") == 1
    shop.wait_empty()


@pytest.mark.parametrize("what", ["record", "step"])
def test_nothing_is_started_ahead_while_the_log_holds_more_than_the_code_has_done(shop, what):
    shop.worker()
    shop.start("strays", what)
    assert shop.wait("completed").output == 1
    assert [step for _, step, *_ in shop.marks()] == ["quick 0", "quick 1"]


def test_the_log_of_a_run_is_the_same_on_either_way_whatever_the_code_changes_in_what_it_gets(shop):
    def logged(run_id):
        apart = {"message_id", "delivery", "retry_at"}
        return [(event.type, event.correlation_id, {name: value for name, value in event.payload.items() if name not in apart}
                 if isinstance(event.payload, dict) else event.payload)
                for read in shop.conn.execute("select * from baton.read_events(%s)", (run_id,)) for event in long_way(read)]

    for run_id, options in {"long": {"LONG_WAY": "on"}, "short": {}}.items():
        shop.start("mixed", {}, run_id)
        shop.conn.execute("select baton.signal_run(%s, 'knock', '{}')", (run_id,))
        worker = shop.worker(**options)
        shop.wait("completed", run_id)
        worker.signal()
        worker.wait()
    assert shop.run("short").output == shop.run("long").output
    [*changed, keys, flaky, fan] = shop.run("short").output
    assert changed == [{"changed": 1}, {"b": [0.0], "later": 10**16, "changed": 1}, {"changed": 1}]
    assert (keys, flaky) == (["b", "later", "changed"], 2)
    assert fan == 3 * [[[{"b": None, "later": ["b", "later", "changed", "more"]}, None], None]]
    assert logged("short") == logged("long")
    calls = collections.Counter(shop.lines("calls"))
    assert calls["short"] < calls["long"]


@pytest.mark.parametrize("what", ["input", "output", "error"])
def test_what_is_not_json_is_an_error_of_the_workflow(shop, what):
    shop.conn.execute("update baton.settings set max_failures = 2")
    worker = shop.worker()
    shop.start("plain", what)
    assert "TypeError" in shop.wait("failed").error["error"]
    assert worker.process.poll() is None


def test_what_is_not_a_number_in_json_is_an_error_of_its_body(shop):
    shop.conn.execute("update baton.settings set max_failures = 1")
    shop.worker()
    shop.start("nan")
    assert shop.wait("failed").error["error"].startswith("ValueError")


texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
numbers = (st.integers() | st.integers(-10**40, 10**40) | st.floats(allow_nan=False, allow_infinity=False)
           | st.sampled_from([0.0, -0.0, 1e15, 1e16, -1.5e16, 1e22, 1.7976931348623157e308, 5e-324, 1e-5, 123456789012345680.0]))
plain_json = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.integers(0, 9), inner, max_size=6), max_leaves=20)


def test_what_the_code_gets_ahead_is_what_replays_will_read(conn, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from worker_runs import Jsonb, as_logged

    @settings(max_examples=400, derandomize=True, deadline=None, database=None)
    @given(plain_json)
    def check(value):
        read = conn.execute("select %s", [Jsonb(value)]).fetchone()[0]
        assert json.dumps(as_logged(value)) == json.dumps(read)

    check()
    twice = {"1": "first", 1: "last", "é": 1, "zz": 2, "z": 3}
    assert json.dumps(as_logged(twice)) == json.dumps(conn.execute("select %s", [Jsonb(twice)]).fetchone()[0])


def test_on_the_short_way_outputs_and_inputs_are_as_the_log_has_them(shop):
    shop.worker()
    shop.start("forms")
    assert shop.wait("completed").output == [["b", "later"], ["b", "later"]]
    assert [step for _, step, *_ in shop.marks()] == ["quick", "listed", "quick b", "quick later"]


def test_five_hundred_inline_steps_of_one_run_with_a_deploy_every_twentieth_reach_no_limit(shop):
    """Three processes stand by; each deploy ends the one that runs the steps, every sixth by SIGKILL."""
    shop.conn.execute("update baton.settings set max_lapses = 3, max_failures = 3")
    options, deploys, steps = {"visibility": 1, "QUICK_SECONDS": "0.005"}, 0, 500
    shop.keep(3, **options)
    shop.start("steps", steps)

    def done():
        nonlocal deploys
        marks = shop.marks()
        if len(marks) >= 20 * (deploys + 1):
            [runs_it] = [worker for worker in shop.workers if worker.process.pid == marks[-1][-1]]
            if runs_it.process.poll() is None:  # else the next one has not begun
                runs_it.signal(signal.SIGKILL if deploys % 6 == 5 else signal.SIGTERM)
                runs_it.wait()
                deploys += 1
        shop.keep(3, **options)
        return shop.ended()

    wait_until(done, "the run has ended", timeout=150)
    assert shop.run().status == "completed" and shop.run().output == list(range(steps))
    assert deploys >= 20
    marks = shop.marks()
    assert {step for _, step, *_ in marks} == {f"quick {n}" for n in range(steps)}
    assert len(marks) <= steps + deploys and len({pid for *_, pid in marks}) >= deploys


def test_killed_in_an_inline_body_it_is_run_again_by_whoever_gets_the_message(shop):
    first = shop.worker(visibility=1)
    shop.start("gate", "through")
    shop.wait_marks(1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = shop.worker(visibility=1)
    shop.wait_marks(2)
    shop.open_gate()
    assert shop.wait("completed").output == "through"
    assert [(attempt, pid) for *_, attempt, pid in shop.marks()] == [(1, first.process.pid), (2, second.process.pid)]
    assert len(shop.incidents("owned_recovery")) == 1 and shop.task("gated").lapses == 1


def test_a_long_body_is_extended(shop):
    first, second = shop.worker(visibility=2), shop.worker(visibility=2)
    shop.start("gate", "through")
    shop.wait_marks(1)
    later = shop.conn.execute("select clock_timestamp() + '2.5 s' as t").fetchone().t
    wait_until(lambda: shop.conn.execute("select clock_timestamp() > %s", (later,)).fetchone()[0], "a claim would have run out", every=0.1)
    shop.open_gate()
    shop.wait("completed")
    assert len(shop.marks()) == 1 and first.process.poll() is None and second.process.poll() is None


@pytest.mark.parametrize("inputs", ["inline", "queued"])
def test_an_orderly_stop_gives_the_body_out_anew(shop, inputs):
    first = shop.worker(visibility=600)
    shop.start("gate", "through")
    shop.wait_marks(1)
    if inputs == "queued":
        shop.conn.execute("update baton.settings set inline_ownership = false")
        shop.conn.execute("delete from baton.messages")
        first.end()
        shop.conn.execute("select baton.tick()")
        first = shop.worker(visibility=600)
        shop.wait_marks(2)
    before = len(shop.marks())
    first.signal()
    assert first.wait() == 0
    assert "parked" in first.text() and first.text().endswith("stopped\n")
    assert (shop.task("gated").status, shop.task("gated").lapses) == ("created", 0)
    second = shop.worker()
    shop.wait_marks(before + 1)
    shop.open_gate()
    assert shop.wait("completed").output == "through"
    assert shop.marks()[-1][-1] == second.process.pid and "task_released" in shop.types()


def test_an_end_is_told_over_a_new_connection_where_the_one_breaks_while_the_body_runs(shop):
    worker = shop.worker(SLOTS="2", visibility=60)
    shop.start("both", ["inline", "queued"])
    shop.wait_marks(2)
    shop.end_connections(5, "two slots, the extending, the reconciliation and the listener")
    shop.open_gate()
    assert shop.wait("completed").output == ["inline", "queued"]
    assert len(shop.marks()) == 2 and worker.text().count("database: AdminShutdown") == 1, "queued; inline: rolled back"
    assert shop.conn.execute("select from baton.incidents").fetchall() == []


@pytest.mark.parametrize("way", ["advance", "end_and_replay"])
def test_a_body_that_was_started_by_a_commit_whose_answer_is_lost_is_run_at_once(shop, way):
    shop.worker(visibility=600)
    lost = shop.folder / f"break.{way}"
    lost.touch()
    shop.start("looks")
    assert shop.wait("completed").output == [0, 0, 1, 2]
    assert [(step, attempt) for _, step, _, attempt, _ in shop.marks()] == [("quick 0", 1), ("quick 1", 1), ("quick 2", 1)]
    assert not lost.exists()


def test_a_claim_that_runs_out_before_the_body_is_given_out_is_taken_up_again(shop):
    worker = shop.worker(visibility=600, OWNER_URL=shop.db.dsn)
    shop.start("late", "on time")
    wait_until(lambda: "ended r" in worker.text() or shop.ended(), "the message is settled")
    assert (shop.run().status, shop.run().output) == ("completed", "on time")
    assert [attempt for *_, attempt, _ in shop.marks()] == [1]
    assert shop.types().count("task_started") == 1 and shop.conn.execute("select from baton.incidents").fetchall() == []


def test_a_body_that_fails_is_retried_until_its_limit(shop):
    shop.worker()
    shop.start("retries", 2)
    assert shop.wait("completed").output == 3
    assert [attempt for *_, attempt, _ in shop.marks()] == [1, 2, 3]
    assert shop.types().count("task_retrying") == 2
    shop.start("retries", 3, "never")
    assert shop.wait("failed", "never").error["step_slug"] == "flaky"


def test_a_step_that_failed_for_good_ends_its_run_at_once_where_the_code_does_not_catch_it(shop):
    shop.conn.execute("update baton.settings set max_failures = 1")
    worker = shop.worker()
    shop.start("retries", 3)
    assert shop.wait("failed").error == {"step_slug": "flaky", "task_index": 0, "error": "ValueError('attempt 3')"}
    assert "failing:" not in worker.text()


def test_a_workflow_that_kills_its_process_after_a_body_is_counted_on_the_run(shop):
    shop.conn.execute("update baton.settings set max_lapses = 4")
    shop.start("kills")

    def done():
        shop.keep(1, visibility=1)
        return shop.ended()

    wait_until(done, "the run has ended", every=0.05)
    assert (shop.run().status, shop.run().error) == ("failed", {"reason": "max_lapses"})
    assert len(shop.marks()) == 2, "the second attempt's end is kept"
    assert shop.types().count("task_completed") == 1


def test_an_output_that_jsonb_cannot_hold_fails_the_body_for_good(shop):
    shop.conn.execute("update baton.settings set max_failures = 1")
    shop.worker()
    shop.start("unheld")
    assert shop.wait("failed").error["step_slug"] == "nul"
    assert len(shop.marks()) == 1


def test_an_output_that_is_too_large_fails_the_body_for_good(shop):
    shop.conn.execute("update baton.settings set max_payload_bytes = 10000, max_failures = 1")
    worker = shop.worker()
    shop.start("too_large", 30000)
    assert shop.wait("failed").error["step_slug"] == "large"
    assert len(shop.marks()) == 1 and "not advanced: ProgramLimitExceeded" in worker.text() and "rolled back: " in worker.text()


def test_a_workflow_that_raises_after_a_step_keeps_the_step(shop):
    shop.conn.execute("update baton.settings set max_failures = 3")
    shop.worker()
    shop.start("raises")
    assert shop.wait("failed").error["error"] == "ValueError('on purpose')"
    assert len(shop.marks()) == 1 and "step_completed" in shop.types()


@pytest.mark.parametrize("unknown", ["gate", "gated"], ids=["workflow", "step"])
def test_what_an_old_deployment_does_not_know_is_given_back(shop, unknown):
    shop.conn.execute("update baton.settings set max_failures = 1000")
    shop.open_gate()
    old = shop.worker(FORGET=unknown, UNKNOWN_SECONDS="600")
    shop.start("gate", "through")
    old.wait_for("failing: unknown")
    old.wait_for("given back r" if unknown == "gated" else "failed r")
    assert shop.conn.execute("select visible_at > clock_timestamp() + '500 s' from baton.messages").fetchall() == [(True,)]
    old.signal()
    assert old.wait() == 0
    new = shop.worker()
    shop.conn.execute("update baton.messages set visible_at = clock_timestamp()")
    assert shop.wait("completed").output == "through"
    assert {pid for *_, pid in shop.marks()} == {new.process.pid}


def test_the_example_workflow(shop):
    shop.worker()
    shop.start("order", {"amount": 7, "items": ["a", "b", "c"]})
    assert shop.wait("completed").output == {
        "payment": {"payment": "r/charge", "amount": 7}, "boxes": [{"box": f"{item}-1"} for item in "abc"]}
    shop.wait_empty()


def test_an_in_use_that_it_does_not_expect_is_raised(conn, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import worker_durable

    start(conn)
    receipt, epoch = granted(conn)
    create(conn, epoch)
    replay(conn, receipt, epoch)
    slot = worker_durable.Worker().slots[0]
    slot.db, slot.receipt = conn, receipt
    with pytest.raises(AssertionError, match="bodies run under"):
        slot.one("select * from baton.park(%s, %s)", *receipt)
    assert slot.one(*slot.parking()).outcome == "parked"
