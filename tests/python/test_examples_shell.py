"""docs/examples/worker.sh and workflow.sh as processes on one queue, which are killed and stopped."""

import json
import os
import signal
import subprocess

import pytest
from conftest import wait_until
from programs import EXAMPLES, Program, Shop

# Leaves a mark, a line in a file, then waits until the gate is open.
GATED = 'echo $PPID >>"$FOLDER/pids"; cat >>"$FOLDER/marks"; until [ -e "$FOLDER/gate" ]; do sleep 0.02; done'


class Shell(Shop):
    def worker(self, script, visibility=60):
        return self.program(EXAMPLES / "worker.sh", "sh", "-c", script, visibility=visibility)

    def workflow(self, bodies="", visibility=60):
        """workflow.sh, its bodies followed by others of the test."""
        text = (EXAMPLES / "workflow.sh").read_text()
        file = self.folder / "workflow.sh"
        file.write_text(text.replace("\n# The workflow:", f"\n{bodies}\n# The workflow:", 1))
        return self.program(file, visibility=visibility)

    def program(self, *command, visibility):
        program = Program(self.folder / f"worker-{len(self.workers) + 1}.log", command, {
            "DATABASE_URL": self.db.cluster.dsn(self.db.name, user=self.user), "QUEUE_NAME": "q",
            "PATH": f"{self.db.cluster.bindir}:{os.environ['PATH']}", "POLL_SECONDS": "0.05",
            "VISIBILITY_SECONDS": str(visibility), "FOLDER": str(self.folder)}, interpreter="/bin/bash")
        self.workers.append(program)
        program.wait_for("ready")
        return program

    def send(self, payload):
        return self.conn.execute("select * from baton.send('q', %s::jsonb)", [json.dumps(payload)]).fetchone().message_id

    def start(self, run_id):
        self.conn.execute("select baton.start_run('order', '{\"amount\": 7}', %s, 'q')", [run_id])


@pytest.fixture
def shop(db, tmp_path):
    shop = Shell(db, tmp_path)
    yield shop
    shop.close()


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
    shop.wait_marks(1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = shop.worker(GATED, visibility=2)
    shop.wait_marks(2)  # its background loop does not go on for it
    assert shop.lines("pids") == [str(first.process.pid), str(second.process.pid)]
    shop.open_gate()
    shop.wait_empty()
    second.wait_for("acked")


def test_a_long_command_keeps_its_message(shop):
    for _ in range(2):
        shop.worker(GATED, visibility=3)
    shop.send({"order": 7})
    shop.wait_marks(1)
    (first,) = shop.messages()
    wait_until(lambda: (shop.messages()[0].visible_at - first.visible_at).total_seconds() > 3, "extended beyond a claim",
               every=0.05)
    shop.open_gate()
    shop.wait_empty()
    assert len(shop.lines()) == 1


def test_without_a_command_it_takes_nothing(shop):
    shop.send({"order": 7})
    done = subprocess.run(["/bin/bash", EXAMPLES / "worker.sh"], env={**os.environ, "DATABASE_URL": "unused"},
                          capture_output=True, text=True, timeout=20)
    assert done.returncode != 0 and "COMMAND" in done.stderr
    assert len(shop.messages()) == 1


def test_an_orderly_stop_finishes_what_is_in_hand(shop):
    worker = shop.worker(GATED)
    shop.send({"order": 7})
    shop.send({"order": 8})
    shop.wait_marks(1)
    worker.signal()
    shop.open_gate()
    assert worker.wait() == 0
    assert len(shop.lines()) == 1 and len(shop.messages()) == 1
    assert "acked" in worker.text() and worker.text().endswith("stopped\n")


ORDERED = {"shipped": {"order": {"amount": 7}, "payment": "r/charge/0"}}


def test_the_workflow_runs_to_its_end(shop, server_log):
    workers = [shop.workflow(), shop.workflow()]
    shop.start("r")
    shop.start("r2")
    assert shop.wait("completed").output == ORDERED
    assert shop.wait("completed", "r2").output["shipped"]["payment"] == "r2/charge/0"
    shop.wait_empty()
    for worker in workers:
        worker.signal()
        assert worker.wait() == 0
    assert server_log.errors() == []


def test_killed_in_a_body_the_workflow_goes_on_elsewhere(shop):
    gated = 'ship() { echo "$1 $$" >>"$FOLDER/marks"; until [ -e "$FOLDER/gate" ]; do sleep 0.02; done; echo "{\\"shipped\\": $(cat)}"; }'
    first = shop.workflow(gated, visibility=1)
    shop.start("r")
    shop.wait_marks(1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = shop.workflow(gated, visibility=1)
    shop.wait_marks(2)
    shop.open_gate()
    assert shop.wait("completed").output == ORDERED
    assert shop.lines() == [f"r/ship/0 {worker.process.pid}" for worker in (first, second)]


def test_a_body_longer_than_its_claim_is_run_once(shop):
    gated = 'ship() { echo x >>"$FOLDER/marks"; until [ -e "$FOLDER/gate" ]; do sleep 0.02; done; echo "{\\"shipped\\": $(cat)}"; }'
    for _ in range(2):
        shop.workflow(gated, visibility=2)
    shop.start("r")
    shop.wait_marks(1)
    (first,) = shop.messages()
    wait_until(lambda: (shop.messages()[0].visible_at - first.visible_at).total_seconds() > 2, "extended beyond a claim",
               every=0.05)
    shop.open_gate()
    assert shop.wait("completed").output == ORDERED
    assert len(shop.lines()) == 1


def test_a_body_that_fails_for_good_fails_the_run(shop):
    shop.workflow('ship() { echo x >>"$FOLDER/marks"; return 3; }')
    shop.start("r")
    assert shop.wait("failed").error["step_slug"] == "ship"
    assert len(shop.lines()) == 3
