"""The checks of tools/soak notice what they are there for: each on a few lines of notes or a log that is wrong."""

import json
from collections import namedtuple
from datetime import datetime, timedelta, timezone

import pytest
import soak_checks
from soak_audit import Audit
from soak_load import Load, Started

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
Run = namedtuple("Run", "run_id status last_seq")
Event = namedtuple("Event", "seq type correlation_id payload created_at")
TASK = ("r", "s", 0)


class Observer:
    def rows(self, *_):
        return []


@pytest.fixture
def audit():
    load = Load(seed=1, open_runs=1)
    load.started["r"] = Started([], ["a"])
    return Audit(load, Observer())


@pytest.fixture
def notes(tmp_path):
    """notes({"what": ..., "at": ...}, ...) -> what the soak makes of them"""
    def make(*lines):
        file = tmp_path / "notes"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return soak_checks.Notes(file)

    return make


def begins(at, attempt=1, receipt=(1, 11), worker="w"):
    return {"what": "begins", "at": at, "worker": worker, "run_id": "r", "step_slug": "s", "task_index": 0,
            "attempt": attempt, "receipt": receipt}


def ends(at, attempt=1, how="stopped", worker="w"):
    return {**begins(at, attempt, worker=worker), "what": "ends", "how": how}


def wrong(audit):
    return {check: len(cases) for check, cases in audit.wrong.cases.items() if cases}


def log(*events):
    """Events a second apart, numbered: (type, payload) or (type, payload, correlation_id)."""
    return [Event(n, type, more[0] if more else None, payload, START + timedelta(seconds=n))
            for n, (type, payload, *more) in enumerate(events, 1)]


def task(type, index=0, attempt=1, **more):
    return type, {"step_slug": "s", "task_index": index, "attempt": attempt, "message_id": 1, "delivery": 11, **more}


WHOLE = [("run_created", []), ("step_created", {"step_slug": "s"}), task("task_started"), task("task_completed"),
         ("step_completed", {"step_slug": "s"}), ("signal_received", {}, "k"), ("soak.wrote", ["a", "w", 7]),
         ("run_completed", ["a"])]

ADVANCED = ("run_advanced", {"step_slug": "before", "output": 1, "next_step_slug": "s", "on_exhausted": "fail_step",
                             "max_attempts": 3, "message_id": 1, "delivery": 11}, "s")


@pytest.mark.parametrize("events, completions", [(WHOLE, 1), ([WHOLE[0], ADVANCED, *WHOLE[3:]], 2)], ids=["long", "short"])
def test_a_whole_log_is_well(audit, events, completions):
    audit.load.started["r"].signals["k"] = "signalled"
    audit.look_at(Run("r", "completed", len(events)), log(*events))
    assert wrong(audit) == {} and (audit.completions, audit.events) == (completions, len(events))
    [(kind, attempt, _, receipt)] = audit.starts[TASK]
    assert (kind, attempt, receipt) == ("task_started", 1, (1, 11))


@pytest.mark.parametrize("check, events", [
    ("once", [*WHOLE[:4], task("task_completed"), *WHOLE[4:]]),
    ("once", [*WHOLE[:5], WHOLE[4], *WHOLE[5:]]),
    ("once", [*WHOLE[:3], task("task_started"), *WHOLE[3:]]),
    ("once", [WHOLE[0], ADVANCED, ADVANCED, *WHOLE[3:]]),
    ("once", [*WHOLE[:3], ADVANCED, *WHOLE[3:]]),
    ("once", [*WHOLE, ("soak.wrote", ["a", "w", 7])]),
    ("signals", [*WHOLE[:5], *WHOLE[6:]]),
    ("writers", [*WHOLE[:7], ("soak.wrote", ["b", "x", 8]), ("soak.wrote", ["c", "w", 7]), WHOLE[7]]),
    ("writers", [*WHOLE[:7], ("soak.wrote", ["b", "x", 7]), WHOLE[7]]),
    ("result", [*WHOLE[:7], ("run_completed", ["b"])]),
], ids=["a task ends twice", "a step ends twice", "an attempt starts twice", "a step ends twice by the short way",
        "an attempt starts twice by the short way", "written after the end", "a signal is missing",
        "epochs mix", "two write under an epoch", "another result"])
def test_a_log_that_is_wrong_is_noticed(audit, check, events):
    audit.load.started["r"].signals["k"] = "signalled"
    audit.look_at(Run("r", "completed", len(events)), log(*events))
    assert check in wrong(audit)


def test_a_gap_a_clock_that_goes_back_and_an_unknown_run_are_noticed(audit):
    audit.look_at(Run("r", "completed", 9), log(*WHOLE))
    assert wrong(audit) == {"gaps": 1}
    first, *rest = log(*WHOLE)
    audit.look_at(Run("r", "completed", 8), [first._replace(created_at=START + timedelta(seconds=2.5)), *rest])
    assert wrong(audit) == {"gaps": 2}
    audit.look_at(Run("x", "completed", 8), log(*WHOLE))
    assert wrong(audit) == {"gaps": 2, "started": 1}


@pytest.mark.parametrize("between, until, expected", [
    ([], 109, {"killed": 1}),
    ([], 110, {"killed": 1}),
    ([], 110.5, {"wrong": 1}),
    ([], None, {"wrong": 1}),
    ([("task_retrying", 1, 105, (1, 11))], 130, {"task_retrying": 1}),
    ([("task_released", 1, 105, (1, 11))], 130, {"task_released": 1}),
], ids=["after the claim", "at its end", "within the claim", "no claim is known", "a retry", "released"])
def test_a_start_of_what_runs_elsewhere_is_noticed(audit, notes, between, until, expected):
    audit.starts[TASK] = [("task_started", 1, 100, (1, 11)), *between, ("task_started", 2, 110, (1, 12))]
    claims = [{"what": "claims", "at": 99, "worker": "w", "receipt": [1, 11], "until": until}] if until else []
    found = notes(*claims, begins(100), {"what": "killed", "at": 101, "worker": "w"}, begins(110, 2, (1, 12), "x"))
    assert soak_checks.second_starts(found, audit) == expected
    assert wrong(audit) == ({"second starts": 1} if "wrong" in expected else {})


def grant(epoch, asked, worker="w", committed=True):
    return {"what": "granted", "at": asked + 0.1, "asked": asked, "worker": worker, "run_id": "r", "epoch": epoch,
            "receipt": [1, epoch], "backend": 1000 + epoch, "is_committed": committed}


def write(epoch, asked, worker="w"):
    return {"what": "wrote", "at": asked + 0.1, "asked": asked, "worker": worker, "run_id": "r", "epoch": epoch, "verb": "v"}


@pytest.mark.parametrize("lines, wrongs", [
    ([grant(7, 100), write(7, 101), grant(8, 102, "x"), write(8, 103, "x")], 0),
    ([grant(7, 100), grant(8, 102, "x"), write(7, 103)], 1),
    ([grant(7, 100), grant(8, 102, "x"), write(7, 102)], 0),
    ([grant(7, 100), grant(8, 102, "x", committed=False), write(7, 103)], 0),
    ([grant(7, 100), write(7, 101, "x")], 1),
    ([write(7, 101)], 1),
], ids=["in turn", "after a later grant", "while the other is granted", "after one that may be rolled back", "another worker",
        "granted to nobody"])
def test_writes_that_the_fence_should_have_refused_are_noticed(audit, notes, lines, wrongs):
    soak_checks.fence(notes(*lines), audit)
    assert len(audit.wrong.cases["fence"]) == wrongs


def disconnection(second, pid):
    return (f"2026-01-01 00:00:{second:02}.000 UTC [{pid}] w@soak LOG:  disconnection: session time: 0:00:01.000 user=w"
            " database=soak host=[local]\n")


@pytest.mark.parametrize("until, log, others, wrongs", [
    (30, "", [], 1), (20, "", [], 0), (None, "", [], 1), (30, disconnection(15, 1007), [], 0),
    (30, disconnection(15, 1008), [], 1), (30, disconnection(25, 1007), [], 1), (30, disconnection(5, 1007), [], 1),
    (30, "", [{"what": "server stopped", "at": 15}, {"what": "server started", "at": 16}], 0),
    (30, "", [{"what": "server stopped", "at": 9}, {"what": "server started", "at": 16}], 0),
    (30, "", [{"what": "server stopped", "at": 8}, {"what": "server started", "at": 9}], 1),
], ids=["while it is held", "its claim ran out", "no claim is known", "its connection ended", "another one ended",
        "it ended later", "one of that number ended before", "the server was down",
        "just before it was down", "the server was down before"])
def test_a_replay_that_is_lost_while_it_is_held_is_noticed(audit, notes, tmp_path, until, log, others, wrongs):
    def at(second):
        return START.timestamp() + second

    file = tmp_path / "server.log"
    file.write_text(log)
    claims = [{"what": "claims", "at": at(9), "worker": "w", "receipt": [1, 7], "until": at(until)}] if until else []
    found = notes(*claims, grant(7, at(10)), *({**line, "at": at(line["at"])} for line in others))
    audit.lost_replays = [("r", 7, at(20)), ("r", 6, at(10))]  # of the other one nobody has heard
    soak_checks.lost_replays(found, audit, soak_checks.disconnected(file))
    assert len(audit.wrong.cases["replays"]) == wrongs


def test_bodies_that_nobody_started_or_that_ran_twice_for_one_attempt_are_noticed(audit, notes):
    audit.starts[TASK] = [("task_started", 1, 100, (1, 11))]
    assert soak_checks.bodies(notes(begins(100)), audit) == 1 and wrong(audit) == {}
    soak_checks.bodies(notes(begins(100), begins(101)), audit)
    assert wrong(audit) == {"bodies": 1}
    soak_checks.bodies(notes(begins(100), begins(102, 2)), audit)
    assert wrong(audit) == {"bodies": 2}


@pytest.mark.parametrize("seconds, others, is_late", [
    (1, [], False), (5, [], True), (5, [{"what": "stopped", "at": 102, "worker": "w"}], False),
    (5, [{"what": "stopped", "at": 90, "worker": "w"}, {"what": "continued", "at": 95, "worker": "w"}], True),
    (5, [{"what": "server stopped", "at": 102}, {"what": "server started", "at": 103}], False),
], ids=["in time", "late", "its process was stopped", "it was stopped before", "the server was down"])
def test_bodies_that_hear_late_of_their_end_are_noticed(audit, notes, seconds, others, is_late):
    audit.ends["r", None] = 101
    assert soak_checks.late(notes(*others, begins(100), ends(101 + seconds)), audit)[0] == 1
    assert wrong(audit) == ({"late": 1} if is_late else {})


def test_errors_that_nobody_provoked_are_noticed(tmp_path):
    file = tmp_path / "server.log"
    file.write_text("2026-01-01 00:00:00.000 UTC [1] a@soak FATAL:  terminating connection due to administrator command\n"
                    "2026-01-01 00:00:00.000 UTC [1] a@soak ERROR:  deadlock detected\n"
                    "2026-01-01 00:00:00.000 UTC [1] a@soak WARNING:  it says ERROR\n")
    seen, others = soak_checks.server_log(file)
    assert seen["connections ended"] == 1 and [line.split("ERROR:  ")[1] for line in others] == ["deadlock detected"]
