"""What the soak checks while it runs: each run at its end, before it is pruned, and how large the tables are."""
import collections
import threading

ENDS = {"run_completed": "completed", "run_failed": "failed", "run_cancelled": "cancelled"}
STEP_ENDS = ("step_completed", "step_failed", "step_skipped")
EVENTS = "select seq, type, correlation_id, payload, created_at from baton.events where run_id = %s order by seq"
SIZES = """
select c.relname, pg_total_relation_size(c.oid) as size
from pg_class as c where c.relnamespace = 'baton'::regnamespace and c.relkind = 'r'
"""
TRACES = {
    "run": "select * from baton.runs where run_id = %s",
    "steps": "select * from baton.steps where run_id = %s",
    "tasks": "select * from baton.tasks where run_id = %s",
    "messages": "select * from baton.messages where run_id = %s",
    "incidents": "select * from baton.incidents where run_id = %s order by incident_id",
    "events": EVENTS,
    "wedged": "select * from baton.wedged_runs where run_id = %s",
    "where log and tables differ": "select * from baton_test.unfolded(%s)",
}
SHOWN = 3  # runs of a failed check that are printed with all that is known of them


def long_way(event):
    """What the long way writes in the place of this event: four for the one of the short way."""
    if event.type != "run_advanced":
        return [event]
    it, task = event.payload, {"task_index": 0, "attempt": 1}
    ended, created = {"step_slug": it["step_slug"]}, {"step_slug": it["next_step_slug"]}
    return [event._replace(type=type, correlation_id=correlation_id, payload=payload) for type, correlation_id, payload in (
        ("task_completed", None, {**ended, **task, "output": it["output"]}),
        ("step_completed", None, ended),
        ("step_created", event.correlation_id, {
            **created, "task_count": 1, "on_exhausted": it["on_exhausted"], "max_attempts": it["max_attempts"]}),
        ("task_started", None, {**created, **task, "message_id": it["message_id"], "delivery": it["delivery"]}),
    )]


class Wrong:
    """The cases of each check that went wrong, and the first few with all that is known of them."""

    def __init__(self, load, observer):
        self.load, self.observer = load, observer
        self.cases, self.lock = collections.defaultdict(list), threading.Lock()

    def note(self, check, what, run_id=None):
        with self.lock:
            if run_id and len(self.cases[check]) < SHOWN:
                what = f"{what}\n{self.trace(run_id)}"
            self.cases[check].append(what)

    def trace(self, run_id):
        lines = [f"  started: {self.load.started.get(run_id)}"]
        for name, sql in TRACES.items():
            lines += [f"  {name}: {row._asdict()}" for row in self.observer.rows(sql, run_id)]
        return "\n".join(lines)


class Audit:
    def __init__(self, load, observer):
        self.load, self.observer, self.wrong = load, observer, Wrong(load, observer)
        self.starts = {}  # (run, step, index): the task's events but its end, (type, attempt, at, receipt)
        self.ends = {}  # (run, step or None): when it ended, if not by its own tasks
        self.incidents, self.last_incident = collections.Counter(), 0
        self.lost_replays = []  # (run, epoch, when)
        self.sizes = collections.Counter()
        self.events = self.completions = 0

    def look(self):
        for row in self.observer.rows("select run_id, status, last_seq from baton.runs where ended_at is not null"
                                      " and pruned_at is null"):
            if row.run_id not in self.load.ended:
                self.look_at(row, self.observer.rows(EVENTS, row.run_id))
                self.load.ended[row.run_id] = row.status
        for row in self.observer.rows("select incident_id, kind, run_id, at, detail from baton.incidents"
                                      " where incident_id > %s order by incident_id", self.last_incident):
            self.incidents[row.kind] += 1
            if row.kind == "replay_lost":
                self.lost_replays.append((row.run_id, row.detail["replay_epoch"], row.at.timestamp()))
            self.last_incident = row.incident_id
        for row in self.observer.rows(SIZES):
            self.sizes[row.relname] = max(self.sizes[row.relname], row.size)

    def look_at(self, run, events):
        def check(name, ok, what=None):
            if not ok:
                self.wrong.note(name, f"{run.run_id}: {what}", run.run_id)

        started = self.load.started.get(run.run_id)
        check("started", started, "nobody started it")
        check("gaps", [event.seq for event in events] == list(range(1, run.last_seq + 1)), "its log has gaps")
        times = [event.created_at for event in events]
        check("gaps", times == sorted(times), "the times of its log go back")
        differs = self.observer.rows("select * from baton_test.unfolded(%s)", run.run_id)
        check("fold", not differs, "log and tables differ")
        self.events += len(events)
        events = [each for event in events for each in long_way(event)]
        kinds = collections.Counter()
        for event in events:
            payload = event.payload if isinstance(event.payload, dict) else {}
            key = payload.get("step_slug"), payload.get("task_index")
            if event.type in STEP_ENDS or event.type == "task_completed":
                kinds[("end", *key)] += 1
            elif event.type == "task_started":
                kinds[("start", *key, payload["attempt"])] += 1
            elif event.type == "signal_received":
                kinds[("signal", event.correlation_id)] += 1
            elif event.type in ENDS:
                kinds["end"] += 1
            if event.type in ("task_started", "task_retrying", "task_released"):
                receipt = payload.get("message_id"), payload.get("delivery")
                self.starts.setdefault((run.run_id, *key), []).append(
                    (event.type, payload["attempt"], event.created_at.timestamp(), receipt))
            if event.type in ("step_failed", "step_skipped"):
                self.ends[run.run_id, key[0]] = event.created_at.timestamp()
            elif event.type == "run_cancelled":
                self.ends[run.run_id, None] = event.created_at.timestamp()
        check("once", max(kinds.values(), default=1) == 1 and kinds["end"] == 1, f"twice: {kinds - collections.Counter(set(kinds))}")
        check("once", ENDS.get(events[-1].type) == run.status, f"it is {run.status}, and its log ends {events[-1].type}")
        self.completions += sum(event.type == "task_completed" for event in events)
        wrote = [event.payload for event in events if event.type == "soak.wrote"]
        blocks = [wrote[n][2] for n in range(len(wrote)) if n == 0 or wrote[n][2] != wrote[n - 1][2]]
        check("writers", len(blocks) == len(set(blocks)) and len({(name, epoch) for _, name, epoch in wrote}) == len(blocks),
              f"epochs mix in its log: {wrote}")
        if started:
            self.look_at_result(run, started, events[-1], kinds, check)

    def look_at_result(self, run, started, end, kinds, check):
        if run.status != "cancelled":
            check("result", run.status == started.status and end.payload == started.outputs,
                  f"it is {run.status} with {end.payload}, not {started.status} with {started.outputs}")
        for name, answer in dict(started.signals).items():
            check("signals", answer == "terminal" or kinds["signal", name] == 1, f"signal {name} was {answer} and is not there")
