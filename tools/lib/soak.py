"""The soak: a cluster, the load, the accidents, and the figures that are checked at the end."""
import collections
import math
import re
import shutil
import tempfile
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb

import demo_stage
import soak_checks
from cluster import Cluster, free_port
from soak_audit import Audit
from soak_chaos import VISIBILITY, Chaos, Platform
from soak_checks import LATE, TABLES_MB, Notes
from soak_load import Caller, Load, Started, listening

ROLES = [("soak_client", "client"), ("soak_worker", "worker"), ("soak_sender", "sender"), ("soak_admin", "admin"),
         ("soak_admin", "client")]
OPEN_RUNS = 20
SETTLING = 90  # seconds that the last runs may take, once nothing is hurt any more
SERVER = {"fsync": "on", "full_page_writes": "on", "checkpoint_timeout": "30s", "autovacuum_naptime": "5s",
          "max_connections": "100",
          "log_disconnections": "on"}
SETUP = f"""
update baton.settings set transport = 'outbox', visibility = '{VISIBILITY} s', backoff_base = '200 ms', backoff_max = '2 s',
  silent_worker_timeout = '30 s';
select baton.register_worker_function('soak', start_mode => 'process', heartbeat_timeout => '5 s');
select baton.register_worker_function('web', url => 'http://127.0.0.1:%(port)s', secret_name => 'web', debounce => '1 s',
  pending_timeout => '5 s', heartbeat_timeout => '3 s');
"""


def soak(stage, seconds, seed, more):
    folder = tempfile.mkdtemp(prefix="pg_baton-soak-")
    with Cluster(settings=SERVER) as cluster:
        try:
            Soak(stage, cluster, folder, seed, more).run(seconds)
        finally:
            if stage.wrong or not stage.checks:
                shutil.copy(cluster.log, Path(folder, "server.log"))
                stage.say(f"What the processes and the server said is kept in {folder}")
            else:
                shutil.rmtree(folder)


class Soak:
    def __init__(self, stage, cluster, folder, seed, more):
        self.stage, self.cluster, self.folder, self.seed = stage, cluster, Path(folder), seed
        self.heard = []
        port = free_port()
        fold = (demo_stage.ROOT / "tests/sql/fold_tasks.sql").read_text()
        demo_stage.install(cluster, "soak", f"create schema baton_test;\n{fold}")
        with psycopg.connect(cluster.dsn("soak"), autocommit=True) as db:
            db.execute(SETUP % {"port": port})
            db.execute(more)
            for role in {role for role, _ in ROLES}:
                db.execute(f"create role {role} login")
            for role, kind in ROLES:
                db.execute("select baton.grant_usage(%s, %s)", [role, kind])
        self.load = Load(seed, OPEN_RUNS)
        self.audit = Audit(self.load, self.caller("postgres"))
        self.platform = Platform(cluster, self.dsn, folder, port)
        self.chaos = Chaos(self.platform, seed, self.load.over, Caller(cluster.dsn("postgres")), self.caller("postgres"))

    def dsn(self, role):
        return self.cluster.dsn("soak", role)

    def caller(self, role):
        return Caller(self.dsn(role))

    def run(self, seconds):
        clock, load = demo_stage.Clock(), self.load
        self.stage.say(f"Soak, {seconds:.0f} s, seed {self.seed}: everything goes wrong.")
        with ThreadPoolExecutor(max_workers=16) as pool, listening(self.dsn("postgres"), self.heard):
            try:
                self.come_too_late()
                # What ends when nothing is started any more, and what goes on until all has ended.
                parts = [pool.submit(load.client, self.caller("soak_client"), name) for name in ("a", "b")]
                parts += [pool.submit(load.sender, self.caller("soak_client")), pool.submit(self.chaos.run)]
                parts += [pool.submit(load.operator, self.caller("soak_admin"), self.caller("postgres"))]
                beside = [pool.submit(load.tick, self.caller("soak_admin"))]
                beside += [pool.submit(load.audit, self.audit, self.caller("soak_admin"))]
                while clock() < seconds:
                    self.watch(parts + beside, min(5, seconds - clock()))
                    self.stage.say(f"{clock():6.1f} s  {self.line()}")
                load.over.set()
                self.watch(parts, 60, all_of_them=True)
                self.remove_what_is_left(beside)
                settled = clock() + SETTLING
                while len(load.ended) < len(load.started) and clock() < settled:
                    self.platform.keep()
                    self.watch(beside, 0.2)
                self.until_empty(settled - clock())
                self.stage.say(f"{clock():6.1f} s  {self.line()}")
                load.settled.set()
                self.watch(beside, 60, all_of_them=True)
                self.check()
            finally:
                load.over.set()
                load.settled.set()
                self.platform.kill()

    def come_too_late(self):
        """First, with nothing else going on: a replay is stopped, goes on once another one has written, and is refused."""
        client, observer = self.caller("soak_client"), self.caller("postgres")
        late = self.load.started["late"] = Started([("record", "late"), ("signal", "late")], ["late", "late"])
        child = self.platform.start("worker")  # the others come when it is stopped
        child.trap.touch()
        client.one("select * from baton.start_run('soak', %s, 'late', 'soak')", Jsonb(late.parts))
        self.until(lambda: not child.trap.exists())
        child.resumes_at = math.inf
        self.until(lambda: observer.rows("select from baton.events where run_id = 'late' and type = 'soak.wrote'"),
                   self.platform.keep)
        child.resumes_at = time.monotonic()
        self.until(lambda: "superseded late" in child.tail(), self.platform.keep)
        answer = client.one("select * from baton.signal_run('late', 'late', %s, 'late')", Jsonb("late"))
        late.signals["late"] = answer.outcome

    def until(self, condition, meanwhile=lambda: None):
        """Waits for a while; what does not come, the checks miss."""
        deadline = time.monotonic() + 15
        while not condition() and time.monotonic() < deadline:
            meanwhile()
            time.sleep(0.05)

    def watch(self, parts, seconds, all_of_them=False):
        """Waits; raises what one of them raised."""
        done, going = wait(parts, seconds, FIRST_EXCEPTION)
        for part in done:
            part.result()
        if all_of_them and going:
            raise RuntimeError("a part of the load does not end: " + str(going))

    def remove_what_is_left(self, beside):
        """Nobody connects any more, and no signal wakes anything: tick's recovery is all that brings the runs on."""
        for _ in range(5):
            self.platform.keep()
            self.chaos.remove_messages(1)
            self.watch(beside, 1)

    def until_empty(self, seconds):
        """What is left in the queues when the last run has ended goes at the next claims."""
        observer, deadline = self.caller("postgres"), time.monotonic() + max(seconds, 10)
        while time.monotonic() < deadline and observer.rows("select from baton.messages where queue_name in ('soak', 'web')"):
            self.platform.keep()
            time.sleep(0.1)

    def line(self):
        counts = ", ".join(f"{action} {count}" for action, count in self.chaos.counts.items())
        return f"{len(self.load.started)} runs started, {len(self.load.ended)} ended, {self.audit.completions} bodies | {counts}"

    def check(self):
        stage, load, audit, caller = self.stage, self.load, self.audit, self.caller("postgres")
        caller.rows("select * from baton.tick()")
        audit.look()
        [usage] = caller.one("select pg_notification_queue_usage()")
        soak_checks.left(audit, caller)
        self.platform.close()
        notes = Notes(self.folder / "notes")
        for run_id, started in load.started.items():
            if run_id not in load.ended:
                audit.wrong.note("lost", f"{run_id} has not ended", run_id)
            elif started.cancelled and started.cancelled != load.ended[run_id]:
                audit.wrong.note("result", f"{run_id}: cancel_run said {started.cancelled}, it is {load.ended[run_id]}")
            elif load.ended[run_id] == "cancelled" and not started.cancelled:
                audit.wrong.note("result", f"{run_id} was cancelled by nobody")
        handled = collections.Counter(key for file in self.folder.glob("web-*.log")
                                      for key in re.findall(r'handled \{"key": "([^"]+)"', file.read_text()))
        for key in load.messages - handled.keys():
            audit.wrong.note("handled", key)
        soak_checks.fence(notes, audit)
        soak_checks.lost_replays(notes, audit, soak_checks.disconnected(self.cluster.log))
        why = soak_checks.second_starts(notes, audit)
        ran = soak_checks.bodies(notes, audit)
        stopped, worst = soak_checks.late(notes, audit)
        provoked, others = soak_checks.server_log(self.cluster.log)
        for line in others:
            audit.wrong.note("errors", line)
        for text in self.platform.unexpected:
            audit.wrong.note("processes", text)
        size = sum(audit.sizes.values()) / 1e6
        if size > TABLES_MB:
            audit.wrong.note("size", str(audit.sizes.most_common()))
        if usage > 0.01:
            audit.wrong.note("notifications", f"their queue is filled to {usage:.0%}")

        def none(check, what):
            stage.check(what, 0, len(audit.wrong.cases[check]))

        ends = collections.Counter(load.ended.values())
        stage.say(f"Ended: {dict(ends)}; {audit.events} events. Accidents: {dict(self.chaos.counts)}.\n"
                  f"Starts after a first one: {dict(why)}.\nIncidents: {dict(audit.incidents)}.\n"
                  f"In the server's log: {({name: provoked[name] for name in soak_checks.PROVOKED})}.\n"
                  f"The largest that tables were: {({name: f'{n / 1e6:.1f} MB' for name, n in audit.sizes.most_common(5)})}.")
        stage.check("accidents of each kind, at least", "1", min(self.chaos.counts.values()), ok=all(self.chaos.counts.values()))
        stage.check("runs that were started, and have ended", len(load.started), len(load.ended))
        none("lost", "runs that were lost")
        none("started", "runs that nobody started")
        none("result", "runs whose end is not what their input and their cancellation say")
        none("wedged", "wedged runs after a round of recovery")
        none("open", "open runs")
        none("unfinished", "unfinished steps and tasks")
        none("messages", "messages that are left")
        none("dead", "dead messages")
        none("gaps", "logs with gaps, or whose times go back")
        none("fold", "runs whose log does not fold to their steps and tasks")
        none("once", "runs that log an end or a start twice, or none")
        none("writers", "logs in which epochs mix")
        none("fence", "writes under an epoch that was another one's, or after a later one was granted")
        none("replays", "replays that were lost while they were held")
        late = provoked["a replay that was superseded"]
        stage.check("replays that came too late, and were refused", "some", late, ok=late > 0)
        recovered = audit.incidents["run_recovered"]
        stage.check("runs that recovery brought on", "some", recovered, ok=recovered > 0)
        none("signals", "signals that are not once in their log")
        stage.check("bodies that ran", "some", ran, ok=ran > 0)
        none("bodies", "bodies that nobody started, or twice for one attempt")
        none("second starts", "starts of a task that runs elsewhere, whose claim had not run out")
        stage.check("bodies that were told to stop, heard of it", f"within {LATE} s",
                    f"{stopped}, the slowest in {worst:.1f} s", ok=stopped > 0 and not audit.wrong.cases["late"])
        stage.check("notifications heard beside", "some", len(self.heard), ok=len(self.heard) > 0)
        none("notifications", "notifications that are stuck")
        stage.check("messages for the HTTP function, handled", len(load.messages), len(load.messages & handled.keys()))
        none("processes", "processes that ended by themselves, or did not when told")
        none("errors", "errors in the server's log that nobody provoked")
        stage.check("all tables with their indexes, at their largest", f"under {TABLES_MB} MB", f"{size:.1f} MB",
                    ok=not audit.wrong.cases["size"])
        for check, cases in audit.wrong.cases.items():
            if not cases:
                continue
            stage.say("\n".join(["", f"WRONG, {check}: {len(cases)}", *cases[:10]]))
