"""What the soak checks at its end: the notes of the processes beside the logs of the runs, and what is left."""
import bisect
import collections
import json
import re
from datetime import datetime
from pathlib import Path

SLACK = 2  # seconds after which the server has surely written that a connection has ended
LATE = 3  # seconds after its end in which a body must have stopped
TABLES_MB = 20  # all tables with their indexes, at their largest

# What the soak provokes itself; every other ERROR, FATAL and PANIC fails it.
PROVOKED = {
    "connections ended": "FATAL:  terminating connection due to administrator command",
    "a process stopped in a transaction": "FATAL:  terminating connection due to idle-in-transaction timeout",
    "a process killed in a statement": "FATAL:  connection to client lost",
    "connecting during a crash": "FATAL:  the database system is (starting up|shutting down|in recovery mode|not yet accepting)",
    "a replay that was superseded": "ERROR:  the replay of run .* was superseded",
}


class Notes:
    """The file of notes: bodies, claims, who wrote under which epoch, and what was done to the processes."""

    def __init__(self, file):
        self.bodies = collections.defaultdict(dict)  # (run, step, index): {attempt: what is known of the body}
        self.until = {}  # receipt: how long its claim lasts, as far as a worker was told
        self.grants, self.writes = {}, []  # epoch: its grant; what was written under an epoch, and not refused
        self.hurt = collections.defaultdict(list)  # worker: [(from, to, what)]
        self.down, self.twice = [], []  # when the server was; bodies of one attempt that began twice
        with file.open() as lines:
            for line in lines:
                self.read(json.loads(line))

    def read(self, note):
        what, at, worker = note["what"], note["at"], note.get("worker")
        if what in ("begins", "ends"):
            bodies, attempt = self.bodies[note["run_id"], note["step_slug"], note["task_index"]], note["attempt"]
            if what == "ends":
                bodies[attempt] |= {"ended": at, "how": note["how"]}
            elif attempt in bodies:
                self.twice.append(note)
            else:
                bodies[attempt] = {"began": at, "worker": worker, "receipt": tuple(note["receipt"])}
        elif what == "claims":
            receipt = tuple(note["receipt"])
            self.until[receipt] = max(note["until"], self.until.get(receipt, 0))
        elif what == "granted":
            self.grants[note["epoch"]] = note
        elif what == "wrote":
            self.writes.append(note)
        elif what in ("killed", "terminated", "stopped"):
            self.hurt[worker].append([at, float("inf"), what])
        elif what in ("continued", "ended") and self.hurt[worker]:
            self.hurt[worker][-1][1] = at
        elif what == "server stopped":
            self.down.append([at, float("inf")])
        elif what == "server started":
            self.down[-1][1] = at

    def what_hurt(self, worker, since, until):
        return next((what for begun, over, what in self.hurt[worker] if begun <= until and over >= since), None)


def second_starts(notes, audit):
    """Why each start after a task's first one was made. A lost one only where its claim had run out."""
    why = collections.Counter()
    for task, events in audit.starts.items():
        for before, event in zip(events, events[1:]):
            if event[0] != "task_started":
                continue
            kind, attempt, at, receipt = before
            if kind != "task_started":
                why[kind] += 1
                continue
            until = notes.until.get(receipt)
            if until is None or event[2] < until:
                why["wrong"] += 1
                audit.wrong.note("second starts", f"{task}: attempt {event[1]} began at {event[2]}, and the claim of attempt "
                                 f"{attempt} under {receipt} lasted until {until}; {notes.bodies[task]}", task[0])
                continue
            worker = notes.bodies[task].get(attempt, {}).get("worker")
            why[notes.what_hurt(worker, at, event[2]) or "its claim had run out"] += 1
    return why


def fence(notes, audit):
    """Each write is that of who was granted its epoch, asked for while no later grant of the run was known to anybody."""
    granted = collections.defaultdict(list)
    for grant in notes.grants.values():
        if grant["is_committed"]:
            granted[grant["run_id"]].append(grant)
    for write in notes.writes:
        own = notes.grants.get(write["epoch"])
        later = own and [grant for grant in granted[write["run_id"]] if own["at"] < grant["asked"] and grant["at"] < write["asked"]]
        if own is None or own["worker"] != write["worker"] or later:
            audit.wrong.note("fence", f"{write} under {own}, after {later}", write["run_id"])


def lost_replays(notes, audit, disconnected):
    """A replay is lost only once its claim has run out or its connection has ended, as the server's log says."""
    for run_id, epoch, at in audit.lost_replays:
        if not (grant := notes.grants.get(epoch)):  # its answer was lost with its connection
            continue
        until = notes.until.get(tuple(grant["receipt"]))
        ends = [(end, end) for end in disconnected[grant["backend"]]] + notes.down
        if until is None or at < until and not any(grant["asked"] <= over and begun <= at + SLACK for begun, over in ends):
            audit.wrong.note("replays", f"{grant} was held until {until}, and lost at {at}", run_id)


def bodies(notes, audit):
    """Each body is the start of an attempt that the log knows, and no attempt's body ran twice."""
    known = {(*task, attempt) for task, events in audit.starts.items() for kind, attempt, _, _ in events
             if kind == "task_started"}
    ran = {(*task, attempt) for task, attempts in notes.bodies.items() for attempt in attempts}
    for note in notes.twice:
        audit.wrong.note("bodies", f"began twice: {note}", note["run_id"])
    for stray in ran - known:
        audit.wrong.note("bodies", f"ran without a start: {stray}", stray[0])
    return len(ran)


def late(notes, audit):
    """How long after the end of its run or step, or after its release, each body stopped that asks; the worst."""
    worst, count = 0, 0
    down = [begun for begun, _ in notes.down]
    for task, attempts in notes.bodies.items():
        run_id, step, _ = task
        for attempt, body in attempts.items():
            released = [at for kind, n, at, _ in audit.starts.get(task, []) if kind == "task_released" and n == attempt]
            ends = [end for end in (audit.ends.get((run_id, None)), audit.ends.get((run_id, step)), *released) if end]
            if body.get("how") != "stopped" or not ends:
                continue
            count += 1
            end = min(ends)
            # A crash in between, or a little before: the listener connects anew, and the next interval tells.
            crashed = bisect.bisect(down, body["ended"]) != bisect.bisect(down, end - LATE)
            if crashed or notes.what_hurt(body["worker"], end, body["ended"]):
                continue
            worst = max(worst, body["ended"] - end)
            if body["ended"] - end > LATE:
                audit.wrong.note("late", f"{task} attempt {attempt} stopped {body['ended'] - end:.1f} s after its end", run_id)
    return count, worst


def server_log(path):
    """How often each provoked message came, and the lines of others."""
    seen, others = collections.Counter(), []
    for line in Path(path).read_text(errors="replace").splitlines():
        if found := re.search(r" ((?:ERROR|FATAL|PANIC):  .*)", line):
            name = next((name for name, pattern in PROVOKED.items() if re.match(pattern, found[1])), None)
            seen[name] += 1
            if name is None:
                others.append(line)
    return seen, others


def disconnected(path):
    """When each backend's connection ended, by the server's log."""
    ends = collections.defaultdict(list)
    for at, pid in re.findall(r"^(\S+ \S+) UTC \[(\d+)\] .*LOG:  disconnection:", Path(path).read_text(errors="replace"), re.M):
        ends[int(pid)].append(datetime.fromisoformat(f"{at}+00:00").timestamp())
    return ends


def left(audit, caller):
    """What must not be there once every run has ended and a round of tick has passed."""
    for name, sql in {
        "wedged": "select run_id from baton.wedged_runs",
        "open": "select run_id from baton.runs where ended_at is null",
        "unfinished": "select run_id from baton.tasks where status in ('created', 'started')"
                      " union all select run_id from baton.steps where status = 'created'",
        "messages": "select run_id, message_id, kind, dedupe_key, visible_at, claimed_at from baton.messages"
                    " where queue_name in ('soak', 'web')",
        "dead": "select null as run_id, message_id, reason from baton.dead_messages",
    }.items():
        for row in caller.rows(sql):
            audit.wrong.note(name, str(row._asdict()), row.run_id)
