"""What goes wrong in the soak: processes are killed, stopped, also in the middle of a replay, and sent home, connections
end, messages of runs are removed by hand, the server crashes."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from cluster import clean_environ

ROOT = Path(__file__).resolve().parents[2]
VISIBILITY = 3  # seconds that a claim lasts unextended
WORKERS, SLOTS = 4, 5
ACTIONS = {"kill": 4, "send home": 4, "stop": 3, "stop in a replay": 3, "end a connection": 12, "remove messages": 4, "crash": 2}
PURGE = """
delete from baton.messages as m
using (
  select k.message_id from baton.messages as k
  where k.queue_name = 'soak' and k.run_id is not null and k.claimed_at is null and random() < %s
  order by k.message_id for update skip locked
) as u
where m.message_id = u.message_id
returning m.run_id, m.dedupe_key
"""
TOKEN = "soak-token"


class Child:
    def __init__(self, kind, name, folder, command, environment):
        self.kind, self.name, self.log = kind, name, Path(folder, f"{name}.log")
        self.signals, self.resumes_at, self.to_be_gone_at = [], None, None
        self.trap, self.is_trapped = Path(folder, f"{name}.trap"), False
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env={**clean_environ(), "NO_PROXY": "127.0.0.1", "SOAK_NAME": name, "SOAK_TRAP": str(self.trap), **environment})

    @property
    def lives(self):
        return self.process.poll() is None

    def send(self, number):
        self.signals.append(number)
        self.process.send_signal(number)

    def tail(self):
        return self.log.read_text(errors="replace")[-3000:]


class Platform:
    """The processes: it replaces each one that ends, as a platform does, and notes what is done to them."""

    def __init__(self, cluster, dsn, folder, port):
        self.cluster, self.folder, self.number = cluster, folder, 0
        self.notes = os.open(Path(folder, "notes"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.children, self.unexpected, self.closing = [], [], False
        self.kinds = {
            "worker": (WORKERS, [ROOT / "tools/lib/soak_worker.py"], {
                "DATABASE_URL": dsn("soak_worker"), "QUEUE_NAME": "soak", "FUNCTION_NAME": "soak", "SLOTS": str(SLOTS),
                "POLL_SECONDS": "0.1", "VISIBILITY_SECONDS": str(VISIBILITY), "HEARTBEAT_SECONDS": "1",
                "SOAK_NOTES": str(Path(folder, "notes"))}),
            "web": (1, [ROOT / "docs/examples/worker_http.py"], {
                "DATABASE_URL": dsn("soak_worker"), "FUNCTION_NAME": "web", "PORT": str(port), "BATON_TOKEN": TOKEN,
                "HEARTBEAT_SECONDS": "0.5", "POLL_SECONDS": "0.2", "BOOT_SECONDS": "0.5"}),
            "sender": (1, [ROOT / "tools/sender", "--poll", "0.2", "--unsure-delay", "2",
                              "--database-url", dsn("soak_sender")], {
                "BATON_SECRET_WEB": TOKEN}),
        }

    def note(self, what, **more):
        line = json.dumps({"at": time.time(), "what": what, **more})
        os.write(self.notes, line.encode() + b"\n")

    def keep(self):
        """Notes who has ended, resumes who was stopped for long enough, and starts whoever is missing."""
        for child in [*self.children]:
            if not child.lives:
                self.children.remove(child)
                self.look_at_end(child)
            elif child.resumes_at and (self.closing or time.monotonic() > child.resumes_at):
                child.resumes_at = None
                self.note("continued", worker=child.name)
                child.send(signal.SIGCONT)
            elif child.is_trapped and not child.trap.exists():
                child.is_trapped = False
                child.resumes_at = time.monotonic() + random.uniform(1.3, 2.5) * VISIBILITY
            elif child.to_be_gone_at and time.monotonic() > child.to_be_gone_at:
                self.unexpected.append(f"{child.name} was still there 30 s after SIGTERM\n{child.tail()}")
                child.send(signal.SIGKILL)
        for kind, (count, *_) in self.kinds.items():
            for _ in range(count - sum(child.kind == kind for child in self.children) if not self.closing else 0):
                self.start(kind)

    def start(self, kind):
        _, command, environment = self.kinds[kind]
        self.number += 1
        child = Child(kind, f"{kind}-{self.number}", self.folder, command, environment)
        self.children.append(child)
        self.note("began", worker=child.name, pid=child.process.pid)
        return child

    def look_at_end(self, child):
        status = child.process.returncode
        self.note("ended", worker=child.name, status=status)
        # By SIGKILL: by us, or by a body. By SIGTERM: it was not ready for it yet.
        if status != -signal.SIGKILL and not (signal.SIGTERM in child.signals and status in (0, -signal.SIGTERM)):
            self.unexpected.append(f"{child.name} ended by itself, status {status}\n{child.tail()}")

    def some(self, rng, *kinds):
        """One of these that was neither stopped nor told to go."""
        there = [child for child in self.children if child.kind in kinds and child.lives and not child.resumes_at
                 and not child.to_be_gone_at]
        return rng.choice(there) if there else None

    def send_home(self, child):
        self.note("terminated", worker=child.name)
        child.to_be_gone_at = time.monotonic() + 30
        child.send(signal.SIGTERM)

    def close(self):
        """All are sent home."""
        self.closing = True
        self.keep()
        for child in self.children:
            if not child.to_be_gone_at:
                self.send_home(child)
        while self.children:
            self.keep()
            time.sleep(0.05)

    def kill(self):
        for child in self.children:
            if child.lives:
                child.process.kill()
            child.process.wait()


class Chaos:
    def __init__(self, platform, seed, over, admin, owner):
        self.platform, self.over, self.admin, self.owner = platform, over, admin, owner
        self.rng, self.counts, self.crashed_at = random.Random(f"{seed} chaos"), dict.fromkeys(ACTIONS, 0), None

    def run(self):
        """Each kind once, then any."""
        first = self.rng.sample([*ACTIONS], len(ACTIONS))
        while not self.over.is_set():
            pause = time.monotonic() + self.rng.uniform(0.1, 1.3)
            while time.monotonic() < pause:
                self.platform.keep()
                self.over.wait(0.05)
            [action] = first[:1] or self.rng.choices(list(ACTIONS), ACTIONS.values())
            if getattr(self, action.replace(" ", "_"))():
                self.counts[action] += 1
                del first[:1]
        while any(child.resumes_at for child in self.platform.children):
            self.platform.keep()
            time.sleep(0.05)

    def kill(self):
        if child := self.platform.some(self.rng, "worker", "worker", "web", "sender"):
            self.platform.note("killed", worker=child.name)
            child.send(signal.SIGKILL)
        return child

    def send_home(self):
        if child := self.platform.some(self.rng, "worker", "web"):
            self.platform.send_home(child)
        return child

    def stop(self):
        """For less, or for longer, than a claim lasts; half of the workers at the most."""
        if self.many_are_stopped():
            return None
        if child := self.platform.some(self.rng, "worker", "web"):
            self.platform.note("stopped", worker=child.name)
            child.resumes_at = time.monotonic() + self.rng.uniform(0.5, 2.5) * VISIBILITY
            child.send(signal.SIGSTOP)
        return child

    def stop_in_a_replay(self):
        """For longer than a claim lasts, so that who goes on then comes too late."""
        child = None if self.many_are_stopped() else self.platform.some(self.rng, "worker")
        if child:
            child.trap.touch()
            child.is_trapped = True
        return child

    def many_are_stopped(self):
        return sum(bool(child.resumes_at or child.is_trapped) for child in self.platform.children) >= WORKERS / 2

    def remove_messages(self, share=0.5):
        """Messages of runs that nobody has claimed. What they would have brought on, recovery does."""
        rows = self.owner.rows(PURGE, share)
        self.platform.note("removed", messages=[(row.run_id, row.dedupe_key) for row in rows])
        return rows

    def end_a_connection(self):
        rows = self.admin.rows(
            "select a.application_name, a.usename, a.state, left(a.query, 100) as query, pg_terminate_backend(a.pid)"
            " from pg_stat_activity as a where a.datname = 'soak' and a.backend_type = 'client backend'"
            " order by random() limit 1")
        for row in rows:
            self.platform.note("connection ended", role=row.usename, state=row.state, query=row.query)
        return rows

    def crash(self):
        if self.crashed_at and time.monotonic() < self.crashed_at + 8:
            return False
        self.platform.note("server stopped")
        self.platform.cluster.restart("immediate")
        self.platform.note("server started")
        self.crashed_at = time.monotonic()
        return True
