"""docs/examples/worker.sh as processes on one queue, which are killed and stopped."""

import json
import os
import signal

import pytest
from conftest import ROOT, wait_until
from programs import Program, role

# Leaves a mark, a line in a file, then waits until the gate is open.
GATED = 'cat >>"$FOLDER/marks"; echo $PPID >>"$FOLDER/pids"; until [ -e "$FOLDER/gate" ]; do sleep 0.02; done'


class Shop:
    def __init__(self, db, folder):
        self.db, self.folder, self.workers = db, folder, []
        self.conn = db.connect()
        self.conn.execute("update baton.settings set backoff_base = '100 ms'")
        self.user = role(self.conn, "worker")

    def worker(self, script, visibility=60):
        program = Program(self.folder / f"worker-{len(self.workers) + 1}.log",
                          [ROOT / "docs/examples/worker.sh", "sh", "-c", script], {
                              "DATABASE_URL": self.db.cluster.dsn(self.db.name, user=self.user), "QUEUE_NAME": "q",
                              "PATH": f"{self.db.cluster.bindir}:{os.environ['PATH']}", "POLL_SECONDS": "0.05",
                              "VISIBILITY_SECONDS": str(visibility), "FOLDER": str(self.folder)}, interpreter="/bin/bash")
        self.workers.append(program)
        program.wait_for("ready")
        return program

    def send(self, payload):
        return self.conn.execute("select * from baton.send('q', %s::jsonb)", [json.dumps(payload)]).fetchone().message_id

    def lines(self, name="marks"):
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []

    def wait_lines(self, count):
        wait_until(lambda: len(self.lines()) >= count, f"{count} marks", timeout=20, every=0.02)

    def messages(self):
        return self.conn.execute("select * from baton.messages").fetchall()

    def wait_empty(self):
        wait_until(lambda: not self.messages(), "all are handled", timeout=20, every=0.02)


@pytest.fixture
def shop(db, tmp_path):
    shop = Shop(db, tmp_path)
    yield shop
    (shop.folder / "gate").touch()
    for worker in shop.workers:
        worker.end()


def test_payloads_arrive_as_they_were_sent_and_errors_are_kept(shop, server_log):
    shop.conn.execute("update baton.settings set max_failures = 1")
    worker = shop.worker("""read -r line; case $line in *bad*) echo "it's 'ünmöglich'" >&2; exit 3;; esac
                            printf '%s\\n' "$line" >>"$FOLDER/marks" """)
    payloads = [{"a": "line\nand\ttab \\ 'quoted' \"twice\" $HOME `id` ü"}, [1, None], "text", None]
    for payload in payloads:
        shop.send(payload)
    bad = shop.send("bad")
    shop.wait_empty()
    assert [json.loads(line) if line else None for line in shop.lines()] == payloads
    dead = shop.conn.execute("select message_id, last_error from baton.dead_letters").fetchall()
    assert dead == [(bad, "status 3: it's 'ünmöglich'")]
    worker.signal()
    assert worker.wait() == 0 and worker.text().endswith("stopped\n")
    assert server_log.errors() == []


def test_killed_in_hand_another_handles_it(shop):
    first = shop.worker(GATED, visibility=2)
    shop.send({"order": 7})
    shop.wait_lines(1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = shop.worker(GATED, visibility=2)
    shop.wait_lines(2)  # its background loop does not go on for it
    assert shop.lines("pids") == [str(first.process.pid), str(second.process.pid)]
    (shop.folder / "gate").touch()
    shop.wait_empty()
    second.wait_for("acked")


def test_a_long_command_keeps_its_message(shop):
    for _ in range(2):
        shop.worker(GATED, visibility=1)
    shop.send({"order": 7})
    shop.wait_lines(1)
    (first,) = shop.messages()
    wait_until(lambda: (shop.messages()[0].visible_at - first.visible_at).total_seconds() > 2, "extended beyond two claims",
               timeout=20, every=0.05)
    (shop.folder / "gate").touch()
    shop.wait_empty()
    assert len(shop.lines()) == 1


def test_an_orderly_stop_finishes_what_is_in_hand(shop):
    worker = shop.worker(GATED)
    shop.send({"order": 7})
    shop.send({"order": 8})
    shop.wait_lines(1)
    worker.signal()
    (shop.folder / "gate").touch()
    assert worker.wait() == 0
    assert len(shop.lines()) == 1 and len(shop.messages()) == 1
    assert "acked" in worker.text() and worker.text().endswith("stopped\n")
