"""docs/examples/typescript, checked by its compiler, as processes on one queue that are killed, stopped and cancelled."""

import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.request

import psycopg
import pytest
from cluster import free_port
from conftest import wait_until
from programs import EXAMPLES, SECRET, Program, Shop
from tasks import write_as_before

FOLDER = EXAMPLES / "typescript"
# The example's worker with workflows whose bodies leave marks, a line in a file: which step, which attempt, which process.
CODE = """
import { randomUUID } from "node:crypto";
import { appendFileSync, existsSync } from "node:fs";
import { setImmediate as turn, setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import { one } from "./dist/baton.js";
import { DATABASE, Worker } from "./dist/worker.js";
import { Failed } from "./dist/workflow.js";

const { FOLDER, FORGET = "", OWNER_URL } = process.env;
const mark = ({ step_slug, task_index, attempt }) =>
  appendFileSync(`${FOLDER}/marks`, [step_slug, task_index, attempt, process.pid].join("|") + "\\n");
const note = (...words) => appendFileSync(`${FOLDER}/notes`, words.join(" ") + "\\n");
const { query } = pg.Client.prototype;
pg.Client.prototype.query = function (text, values) {
  note("asked", this.processID, /baton\\.(\\w+)/.exec(text)?.[1] ?? text);
  const answer = query.call(this, text, values);
  return text === "commit" && existsSync(`${FOLDER}/hold`) ? answer.then(held) : answer;
};
async function held(result) {
  note("held");
  while (existsSync(`${FOLDER}/hold`)) await sleep(5);
  return result;
}

async function gated(input, task) {
  mark(task);
  while (!existsSync(`${FOLDER}/gate`)) await sleep(20, undefined, { signal: task.signal });
  return input;
}
function quick(input, task) { mark(task); note("body"); return input; }
async function brief(_, task) { await turn(); mark(task); }
function unordered(_, task) { mark(task); return { long: 1, b: 2 }; }
function keys(input, task) { mark(task); return Object.keys(input).join(" "); }
function flaky(input, task) {
  mark(task);
  if (task.attempt <= input) throw new Error(`attempt ${task.attempt}`);
  return task.attempt;
}
async function broken(input, task) { await gated(input, task); throw new Failed("broken"); }
function fails() { throw new Failed([]); }
function nul(_, task) { mark(task); return "\\0"; }
function large(input, task) { mark(task); return "x".repeat(input); }

let isLate = false, looks = 0;
const workflows = {
  gate: (run) => run.step(gated, run.input),
  fan: (run) => run.map(gated, run.input),
  retries: (run) => run.step(flaky, run.input, { maxAttempts: 3 }),
  tooLarge: (run) => run.step(large, run.input),
  unheld: (run) => run.step(nul, null),
  inlineAndQueued: (run) => run.map(gated, ["inline", "queued"]),
  steps: async (run) => {
    note("called");
    const seen = [];
    for (let number = 0; number < run.input; number++) seen.push(await run.step(quick, number, { key: String(number) }));
    return seen;
  },
  branches: async (run) => {
    const branch = async (name) => [await run.step(quick, name, { key: name }), await run.signal(name)];
    return Promise.all([branch("a"), branch("b"), run.step(quick, run.record("dice", () => Math.random()), { key: "c" })]);
  },
  kills: async (run) => { await run.step(quick, null); process.kill(process.pid, "SIGKILL"); },
  late: async (run) => {
    if (!isLate) { // its claim runs out while it decides
      isLate = true;
      const owner = new pg.Client(OWNER_URL);
      await owner.connect();
      await owner.query("update baton.messages set visible_at = baton._now()");
      await owner.end();
    }
    return run.step(quick, run.input);
  },
  spreads: async (run) => {
    await run.step(quick, 0, { key: "first" });
    return Promise.all(["a", "b"].map((key) => run.step(gated, key, { key })));
  },
  maps: async (run) => {
    await run.step(quick, 0, { key: "first" });
    const both = await run.map(gated, ["a", "b"]);
    note("mapped", both.join(" "));
    return both;
  },
  notes: async (run) => {
    await run.step(quick, 0, { key: "first" });
    const dice = run.record("dice", () => Math.random());
    return [dice, await run.step(quick, dice, { key: "dice" })];
  },
  ordered: async (run) => {
    const first = await run.step(unordered, null);
    await run.step(quick, 0, { key: Object.keys(first).join(" ") });
    return run.step(keys, { long: 1, b: 2 });
  },
  follows: async (run) => {
    const caught = [];
    const tried = (...step) => run.step(...step).catch((error) => { caught.push(String(error)); });
    return [await tried(quick, 1), await tried(gated, 2), await tried(quick, 3, { key: "last" }), caught];
  },
  resumes: async (run) => [
    await run.step(quick, 1), await run.step(gated, 2),
    await run.step(quick, 3, { key: "3" }), await run.step(quick, 4, { key: "4" }),
  ],
  remembers: async (run) => {
    const recorded = run.record("unordered", () => ({ long: 1, b: 2 }));
    return run.step(quick, Object.keys(recorded).join(" "), { key: Object.keys(recorded).join(" ") });
  },
  ends: async (run) => {
    await run.step(quick, 0, { key: "first" });
    const last = run.step(quick, 1, { key: "last" });
    if (run.input === "failed") throw new Failed("enough");
    return Promise.race([last, run.input]);
  },
  changes: async (run) => {
    const failure = await run.step(fails, null).catch(({ detail }) => detail.error);
    const given = [run.input, await run.signal("list"), run.record("list", () => []), await run.step(quick, []), failure];
    for (const list of given) list.push("changed");
    await run.step(quick, run.record("next", () => 0), { key: "last" });
    return given;
  },
  recovers: async (run) => [
    await run.step(quick, 0, { key: "first" }), await run.step(flaky, 1, { maxAttempts: 2 }),
    await run.step(quick, 2, { key: "last" }),
  ],
  pairs: (run) => Promise.all(["a", "b"].map(async (name, index) => {
    const seen = [];
    for (let number = 0; number < 2 + 3 * index; number++) seen.push(await run.step(quick, number, { key: name + number }));
    return seen;
  })),
  stops: async (run) => {
    await run.step(gated, null);
    return Promise.race([run.signal("stop"), run.step(quick, "went on")]);
  },
  turns: async (run) => {
    for (let number = 0; number < run.input; number++) await run.step(brief, null, { key: String(number) });
  },
  nothing: async (run) => [await run.step(quick, 1), await run.map(quick, [], { key: "map" })],
  fallsBack: async (run) => {
    try {
      run.record("looked", () => { if (looks++ === 0) throw new Error("away"); });
    } catch {
      run.record("fell back", () => 1);
    }
    return run.signal("item");
  },
  impure: (run) => run.step(quick, null, { key: String(process.hrtime.bigint()) }),
  impureAhead: async (run) => {
    await run.step(quick, null);
    return run.step(quick, null, { key: String(process.hrtime.bigint()) });
  },
};
workflows.halves = (run) => Promise.all([run.step(broken, null), workflows.steps(run)]);
const bodies = { gated, quick, brief, unordered, keys, flaky, fails, nul, large, broken };
for (const name of FORGET.split(" ")) { delete workflows[name]; delete bodies[name]; }

const worker = new Worker(randomUUID(), { queue: "default", workflows, bodies }, Number(process.env.LANES ?? 2));
const db = new pg.Client(DATABASE);
await db.connect();
await one(db, "register_worker", { worker_id: worker.id, function_name: "default" });
await db.end();
process.on("SIGTERM", () => worker.stop("SIGTERM"));
await worker.work();
"""


@pytest.fixture(scope="session")
def node():
    """Node, with the example compiled: what the types say is checked here."""
    node = shutil.which("node")
    if not node or not (FOLDER / "node_modules/.bin/tsc").exists():
        pytest.skip("Node or the packages of docs/examples/typescript are missing")
    # The program itself: what PyPI calls node is a script that starts it, and does not pass signals on.
    node = subprocess.run([node, "-p", "process.execPath"], capture_output=True, text=True, check=True).stdout.strip()
    built = subprocess.run([node, "node_modules/.bin/tsc"], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout
    return node


class NodeShop(Shop):
    def __init__(self, db, folder, node):
        super().__init__(db, folder)
        self.node = node
        for name in ("default", "orders"):
            self.conn.execute("select baton.register_worker_function(%s, start_mode => 'process')", [name])
        self.url = self.url_of(db, self.user)

    @staticmethod
    def url_of(db, user):
        info = psycopg.conninfo.conninfo_to_dict(db.cluster.dsn(db.name, user=user))
        return f"postgresql:///{info['dbname']}?host={info['host']}&port={info['port']}&user={info['user']}"

    def program(self, *command, visibility=60, **env):
        program = Program(self.folder / f"worker-{len(self.workers) + 1}.log", command, {
            "DATABASE_URL": self.url, "POLL_SECONDS": "0.05", "VISIBILITY_SECONDS": str(visibility),
            "HEARTBEAT_SECONDS": "0.3", "UNKNOWN_SECONDS": "0.3", "FOLDER": str(self.folder), **env},
            interpreter=self.node, cwd=FOLDER)
        self.workers.append(program)
        return program

    def worker(self, **options):
        program = self.program("--input-type=module", "-e", CODE, **options)
        program.wait_for("ready")
        return program

    def start(self, workflow_name, input=None, run_id="r", queue_name="default"):
        answer = self.conn.execute("select * from baton.start_run(%s, %s::jsonb, %s, %s)",
                                   (workflow_name, json.dumps(input), run_id, queue_name))
        assert answer.fetchone().outcome == "created"

    def signal(self, name, payload=None, run_id="r"):
        self.conn.execute("select baton.signal_run(%s, %s, %s::jsonb)", (run_id, name, json.dumps(payload)))

    def marks(self):
        return [(step, int(index), int(attempt), int(pid)) for step, index, attempt, pid
                in (line.split("|") for line in self.lines())]


@pytest.fixture
def shop(db, tmp_path, node):
    shop = NodeShop(db, tmp_path, node)
    yield shop
    shop.close()


def test_the_lock_file_names_no_registry():
    assert not [entry for entry in json.loads((FOLDER / "package-lock.json").read_text())["packages"].values()
                if "resolved" in entry or "integrity" not in entry and "name" not in entry]


def test_the_example_as_it_is_run_by_others(shop, server_log):
    workers = [shop.program("dist/process.js", FUNCTION_NAME="orders") for _ in range(2)]
    for worker in workers:
        worker.wait_for("ready")
    shop.start("order", {"amount": 7, "items": ["a", "b", "c"]}, "o", "orders")
    shop.start("ship", {"items": 3, "seconds": 0.3}, "s", "orders")
    shop.signal("paid", {"amount": 30}, "s")
    shop.start("ship", {"items": 3}, "poor", "orders")
    shop.signal("paid", {"amount": 10}, "poor")
    assert shop.wait("completed", "o").output == {
        "payment": {"payment": "o/charge", "amount": 7}, "boxes": [{"box": f"{item}-1"} for item in "abc"]}
    assert shop.wait("completed", "s").output["total"] == 30
    assert shop.wait("failed", "poor").error == {"missing": 20}
    wait_until(lambda: [row.control for row in shop.conn.execute("select control from baton.workers")] == ["listening"] * 2,
               "both hear their probes")
    for worker in workers:
        worker.signal()
        assert worker.wait() == 0
    assert shop.conn.execute("select count(stopped_at) from baton.workers").fetchone() == (2,)
    shop.wait_empty()
    assert server_log.errors() == []


def test_killed_in_a_body_another_runs_it_again(shop):
    first = shop.worker(visibility=1)
    shop.start("gate", "through")
    shop.wait_marks(1)
    first.signal(signal.SIGKILL)
    first.wait()
    second = shop.worker(visibility=1)
    shop.wait_marks(2)
    shop.open_gate()
    assert shop.wait("completed").output == "through"
    assert [mark[2:] for mark in shop.marks()] == [(1, first.process.pid), (2, second.process.pid)]
    assert shop.conn.execute("select count(*) from baton.incidents where kind = 'owned_recovery'").fetchone() == (1,)
    shop.wait_empty()


def test_killed_in_a_fan_out_the_others_complete_it_with_every_result_once(shop):
    first, second = shop.worker(visibility=1), shop.worker(visibility=1)
    shop.start("fan", list(range(8)))
    shop.wait_marks(4)
    first.signal(signal.SIGKILL)
    first.wait()
    shop.open_gate()
    assert shop.wait("completed").output == list(range(8))
    assert shop.types().count("task_completed") == 8
    assert {pid for *_, pid in shop.marks()} == {first.process.pid, second.process.pid}


def test_a_claim_that_runs_out_before_the_body_is_given_out_is_taken_up_again(shop):
    worker = shop.worker(visibility=600, HEARTBEAT_SECONDS="600", LANES="1", OWNER_URL=shop.url_of(shop.db, "postgres"))
    shop.start("late", "on time")
    wait_until(lambda: "ended r" in worker.text() or shop.ended(), "the message is settled")
    assert (shop.run().status, shop.run().output) == ("completed", "on time")
    assert [attempt for _, _, attempt, _ in shop.marks()] == [1]
    assert shop.types().count("task_started") == 1 and shop.conn.execute("select from baton.incidents").fetchall() == []


def test_a_body_longer_than_its_claim_is_run_once(shop):
    shop.worker(visibility=2)
    shop.worker(visibility=2)
    shop.start("gate", "through")
    shop.wait_marks(1)
    later = shop.conn.execute("select clock_timestamp() + '2.5 s' as t").fetchone().t
    wait_until(lambda: shop.conn.execute("select clock_timestamp() > %s", (later,)).fetchone()[0], "a claim would have run out", every=0.1)
    shop.open_gate()
    shop.wait("completed")
    assert len(shop.marks()) == 1


def test_an_orderly_stop_gives_the_body_out_anew(shop):
    first = shop.worker(visibility=600)
    shop.start("gate", "through")
    shop.wait_marks(1)
    first.signal()
    assert first.wait() == 0
    assert "parked gated" in first.text() and "stopped" in first.text()
    second = shop.worker()
    shop.wait_marks(2)
    shop.open_gate()
    assert shop.wait("completed").output == "through"
    assert shop.marks()[1][-1] == second.process.pid and "task_released" in shop.types()


@pytest.mark.parametrize("notify", [True, False], ids=["heard", "asked"])
def test_a_body_of_a_cancelled_run_is_aborted_and_no_other(shop, notify):
    shop.conn.execute("update baton.settings set control_notify = %s", [notify])
    worker = shop.worker(**({"HEARTBEAT_SECONDS": "100", "visibility": 600} if notify else {}))
    for number, run_id in enumerate(["other", "r"], 1):
        shop.start("gate", run_id, run_id)
        shop.wait_marks(number)
        wait_until(lambda number=number: " ".join(shop.lines("notes")).count("terminal_tasks") >= number, "it was asked about")
    shop.conn.execute("select baton.cancel_run('r', 'enough')")
    worker.wait_for("aborting gated cancelled")
    worker.wait_for("given back r")
    shop.open_gate()
    assert shop.wait("completed", "other").output == "other"
    assert worker.text().count("aborting") == 1


def test_one_inline_step_costs_one_commit(shop):
    shop.worker(HEARTBEAT_SECONDS="100", LANES="1")
    number, cost = "select pg_current_xact_id()::text::bigint as n", {}
    for steps in (1, 1, 5, 25, 5, 25):
        before = shop.conn.execute(number).fetchone().n
        shop.start("steps", steps, run_id := f"r{before}")
        assert shop.wait("completed", run_id).output == list(range(steps))
        cost.setdefault(steps, []).append(shop.conn.execute(number).fetchone().n - before)
    assert min(cost[25]) - min(cost[5]) == 20, cost  # what else the cluster does at that moment comes on top


def count_grants(shop):
    """From here on public.grants has a row a replay that was granted."""
    shop.conn.execute("""
        create table public.grants (epoch bigint);
        create function public.note_grant() returns trigger language plpgsql as $$
        begin insert into public.grants values (new.replay_epoch); return null; end $$;
        create trigger note_grant after update on baton.runs for each row
        when (new.replay_epoch is distinct from old.replay_epoch and not new.replay_ended) execute function public.note_grant();
    """)
    return lambda: shop.conn.execute("select count(*) as n from public.grants").fetchone().n


def test_from_one_inline_step_to_the_next_there_is_no_replay(shop):
    grants = count_grants(shop)
    shop.worker()
    shop.start("steps", 10)
    assert shop.wait("completed").output == list(range(10))
    assert grants() == 2, "the first, and the one that finds that the run is complete"
    assert shop.types()[1:] == ["step_created", "task_started", *9 * ["run_advanced"], "task_completed", "step_completed",
                                "run_completed"]
    assert len(shop.marks()) == 10


def test_from_one_inline_step_to_the_next_the_code_goes_on_in_memory_and_there_is_one_statement(shop):
    worker = shop.worker(LANES="1", HEARTBEAT_SECONDS="100")
    shop.start("steps", 50)
    assert shop.wait("completed").output == list(range(50))
    notes = shop.lines("notes")
    assert notes.count("called") == 2, "at the first replay, and at the one that finds that the run is complete"
    lane = next(note.split()[1] for note in notes if note.endswith(" claim"))
    said = " ".join(note.split()[-1] for note in notes if note.startswith(f"asked {lane} ") or note == "body")
    assert "dispatch_tasks end_replay commit" + " body advance_run" * 49 + " body begin complete_task begin_replay" in said
    assert "Warning" not in worker.text(), "nothing piles up in Node"


VALUES = r"""
import assert from "node:assert";
import pg from "pg";
import { asStored, json } from "./dist/baton.js";

let seed = 1;
const below = (limit) => (seed = (seed * 48271) % 2147483647) % limit;
const one = (values) => values[below(values.length)];
const keys = ["", "a", "b", "aa", "10", "2", "01", "-1", "é", "ÿ", "z€", "\uffeea", "\u{1f600}", "\u2028", "\"", "\t", "__proto__"];
const key = () => below(2) ? one(keys) : String.fromCodePoint(...Array.from({ length: below(4) }, () => 1 + below(0xd7ff)));
const double = () => new Float64Array(new Int32Array([below(2 ** 31 - 1) << 1, below(2 ** 31 - 1) << 1]).buffer)[0];
const numbers = [
  0, -0, NaN, Infinity, 5e-324, -5e-324, 2.2250738585072014e-308, Number.MAX_VALUE, 1e21, 1e-7, 2 ** 53, -(2 ** 63), 0.1 + 0.2,
];
const leaf = () => one([double, () => one(numbers), key, () => one([null, true, undefined, () => 1, Symbol("s"), new Date(0)])])();
const value = (depth) => {
  const items = Array.from({ length: below(6) }, () => (depth && below(3) ? value(depth - 1) : leaf()));
  return below(3) ? Object.fromEntries(items.map((item) => [key(), item])) : items;
};
const nested = Array.from({ length: 1000 }).reduce((inner, _, n) => (n % 2 ? [inner] : { b: inner, a: n }), null);

const texts = [...numbers, undefined, () => 1, nested, ...Array.from({ length: 2000 }, () => value(3))].map(json);
const db = new pg.Client({ connectionString: process.env.DATABASE_URL });
await db.connect();
const { rows } = await db.query("select value from unnest($1::jsonb[]) with ordinality as t (value, n) order by n", [texts]);
await db.end();
assert.equal(rows.length, texts.length);
for (const [index, { value }] of rows.entries()) {
  assert.equal(JSON.stringify(asStored(texts[index])), JSON.stringify(value)); // what it holds, in order
  if (texts[index].length < 1000) assert.deepStrictEqual(asStored(texts[index]), value); // 0 is not -0
}
console.log(texts.filter((text) => JSON.stringify(asStored(text)) !== text).length, "in another order");
"""


def test_what_is_read_again_needs_no_database(shop):
    program = shop.program("--input-type=module", "-e", VALUES)
    assert program.wait() == 0, program.text()
    assert int(program.text().split()[0]) > 500


@pytest.mark.parametrize("workflow, output", [("notes", None), ("ordered", "b long"), ("remembers", "b long")])
def test_what_is_decided_ahead_is_what_replays_decide(shop, workflow, output):
    shop.conn.execute("update baton.settings set max_failures = 1")
    shop.worker()
    shop.start(workflow)
    answer = shop.wait("completed").output
    assert answer == output if output else answer[0] == answer[1]


def test_what_the_code_changes_is_not_changed_for_its_next_replay(shop):
    shop.start("changes", [])
    shop.signal("list", [])
    shop.worker(LANES="1")
    assert shop.wait("completed").output == [["changed"]] * 5


@pytest.mark.parametrize("workflow", ["spreads", "maps"])
def test_two_bodies_after_one_run_side_by_side(shop, workflow):
    shop.conn.execute("update baton.settings set max_failures = 1")
    shop.worker()
    shop.start(workflow)
    shop.wait_marks(3)
    shop.open_gate()
    assert shop.wait("completed").output == ["a", "b"]
    assert {note for note in shop.lines("notes") if note.startswith("mapped")} <= {"mapped a b"}, "it is not told of a part"


@pytest.mark.parametrize("status", ["completed", "failed"])
def test_code_that_ends_starts_nothing_more(shop, status):
    shop.worker()
    shop.start("ends", status)
    shop.wait(status)
    assert shop.types().count("step_created") == len(shop.marks()) == 1 and "run_advanced" not in shop.types()


def test_branches_go_on_side_by_side_and_the_last_one_alone(shop):
    shop.conn.execute("update baton.settings set max_failures = 1")
    shop.worker()
    shop.start("pairs")
    assert shop.wait("completed").output == [list(range(2)), list(range(5))]
    assert sorted(step for step, *_ in shop.marks()) == [f"quick {key}" for key in ("a0", "a1", "b0", "b1", "b2", "b3", "b4")]


def test_a_signal_that_comes_while_a_body_runs_is_seen_before_the_next_step(shop):
    shop.worker(LANES="1")
    shop.start("stops")
    shop.wait_marks(1)
    shop.signal("stop", "stopped")
    shop.open_gate()
    assert shop.wait("completed").output == "stopped"
    assert shop.types().count("step_created") == 1 and "run_advanced" not in shop.types()


@pytest.mark.parametrize("written", ["in one event", "as before"])
def test_killed_on_the_short_way_the_next_replay_goes_on_by_what_the_log_has_of_it(shop, written):
    first = shop.worker(visibility=1, LANES="1")
    shop.start("resumes")
    shop.wait_marks(2)
    first.signal(signal.SIGKILL)
    first.wait()
    if written == "as before":
        write_as_before(shop.conn)
    shop.open_gate()
    shop.worker(visibility=1, LANES="1")
    assert shop.wait("completed").output == [1, 2, 3, 4]
    assert [(step, attempt) for step, _, attempt, _ in shop.marks()] == [
        ("quick", 1), ("gated", 1), ("gated", 2), ("quick 3", 1), ("quick 4", 1)]
    assert shop.types().count("run_advanced") == 1 + (written == "in one event")


@pytest.mark.parametrize("refusal", ["declined", "error"])
def test_where_the_short_way_is_not_open_the_long_one_is_taken(shop, refusal):
    grants = count_grants(shop)
    worker = shop.worker(LANES="1")
    shop.start("follows")
    shop.wait_marks(2)
    if refusal == "declined":
        shop.conn.execute("select baton.wake_run('r')")
    else:
        shop.conn.execute("revoke execute on function baton.advance_run from baton_test_worker")
    shop.open_gate()
    assert shop.wait("completed").output == [1, 2, 3, []], "what the code catches is of its steps"
    assert grants() == 3 and ("not advanced: error: permission denied" in worker.text()) == (refusal == "error")
    assert shop.types().count("task_completed") + shop.types().count("run_advanced") == len(shop.marks()) == 3


def test_a_fan_out_over_nothing_waits_for_nobody(shop):
    shop.worker()
    shop.start("nothing")
    assert shop.wait("completed").output == [1, []]


def test_the_code_does_not_go_on_over_what_could_not_be_recorded(shop):
    shop.conn.execute("update baton.settings set max_failures = 2")
    shop.worker(LANES="1")
    shop.start("fallsBack")
    shop.signal("item", 7)
    assert shop.wait("completed").output == 7
    recorded = "select correlation_id from baton.events where run_id = 'r' and type = 'workflow.recorded'"
    assert shop.conn.execute(recorded).fetchall() == [("looked",)]


def test_cancelled_between_its_start_and_its_registration_a_body_is_aborted_right_after(shop):
    shop.conn.execute("update baton.settings set control_notify = false")
    worker = shop.worker(HEARTBEAT_SECONDS="100", visibility=600, LANES="1")
    (shop.folder / "hold").touch()
    shop.start("gate")
    wait_until(lambda: "held" in shop.lines("notes"), "its start is committed")
    shop.conn.execute("select baton.cancel_run('r', 'enough')")
    (shop.folder / "hold").unlink()
    worker.wait_for("aborting gated cancelled")
    worker.wait_for("given back r")


def test_short_bodies_are_not_asked_about(shop):
    shop.worker(HEARTBEAT_SECONDS="100", LANES="1")
    shop.start("turns", 200)
    shop.wait("completed")
    asked = [note for note in shop.lines("notes") if note.endswith(" terminal_tasks")]
    assert len(shop.marks()) == 200 and len(asked) < 20


def test_cancelled_while_the_code_is_in_memory_the_body_is_aborted_and_no_other_started(shop):
    grants = count_grants(shop)
    worker = shop.worker(HEARTBEAT_SECONDS="100", visibility=600, LANES="1")
    shop.start("follows")
    shop.wait_marks(2)
    shop.conn.execute("select baton.cancel_run('r', 'enough')")
    worker.wait_for("aborting gated cancelled")
    worker.wait_for("given back r")
    shop.open_gate()
    shop.start("gate", "next", "next")
    assert shop.wait("completed", "next").output == "next"
    assert [step for step, *_ in shop.marks()] == ["quick", "gated", "gated"]
    assert [shop.types().count(type) for type in ("step_created", "run_advanced")] == [1, 1]
    assert grants() == 3, "one of the cancelled run"


def test_a_body_that_fails_while_the_code_is_in_memory_is_tried_again(shop):
    grants = count_grants(shop)
    shop.worker(LANES="1")
    shop.start("recovers")
    assert shop.wait("completed").output == [0, 2, 2]
    assert [(step, attempt) for step, _, attempt, _ in shop.marks()] == [
        ("quick first", 1), ("flaky", 1), ("flaky", 2), ("quick last", 1)]
    assert grants() == 4, "the first, with the failure, after the retry, and at the end"
    assert shop.conn.execute("select max_attempts from baton.steps where step_slug = 'flaky'").fetchone() == (2,)


def test_branches_wait_side_by_side(shop):
    shop.worker()
    shop.start("branches")
    shop.wait_marks(3)
    shop.signal("b", 2)
    shop.signal("a", 1)
    a, b, dice = shop.wait("completed").output
    assert (a, b) == (["a", 1], ["b", 2]) and 0 <= dice < 1
    assert len(shop.marks()) == 3


def test_a_branch_that_fails_ends_the_run_whatever_the_other_has_in_the_log(shop):
    shop.conn.execute("update baton.settings set max_failures = 1")
    shop.worker()
    shop.start("halves", 8)
    wait_until(lambda: shop.types().count("step_completed") == 8, "the other is through", every=0.02)
    shop.open_gate()
    assert shop.wait("failed").error["step_slug"] == "broken"
    assert [step for step, *_ in shop.marks()].count("broken") == 1, "it failed for good"


def test_a_body_that_fails_is_retried_until_its_limit(shop):
    shop.worker()
    shop.start("retries", 2)
    assert shop.wait("completed").output == 3
    assert [attempt for _, _, attempt, _ in shop.marks()] == [1, 2, 3]
    shop.start("retries", 3, "never")
    assert shop.wait("failed", "never").error["step_slug"] == "flaky"


def test_a_step_that_failed_for_good_ends_its_run_at_once_where_the_code_does_not_catch_it(shop):
    shop.conn.execute("update baton.settings set max_failures = 1")
    worker = shop.worker()
    shop.start("retries", 3)
    assert shop.wait("failed").error == {"step_slug": "flaky", "task_index": 0, "error": "Error: attempt 3"}
    assert "failing:" not in worker.text()


def test_a_workflow_that_kills_its_process_after_a_body_is_counted_on_the_run(shop):
    shop.conn.execute("update baton.settings set max_lapses = 4")
    shop.start("kills")

    def done():
        if not any(worker.process.poll() is None for worker in shop.workers):
            shop.program("--input-type=module", "-e", CODE, visibility=1)
        return shop.run().ended_at

    wait_until(done, "the run has ended", every=0.05)
    assert (shop.run().status, shop.run().error) == ("failed", {"reason": "max_lapses"})
    assert len(shop.marks()) == 2, "the second attempt's end is kept"


def test_an_output_that_is_too_large_fails_the_body_for_good(shop):
    shop.conn.execute("update baton.settings set max_payload_bytes = 10000")
    worker = shop.worker()
    shop.start("tooLarge", 30000)
    assert shop.wait("failed").error["step_slug"] == "large"
    assert len(shop.marks()) == 1 and "rolled back: " in worker.text()


def test_an_output_that_jsonb_cannot_hold_fails_the_body_for_good(shop):
    shop.worker()
    shop.start("unheld")
    assert shop.wait("failed").error["step_slug"] == "nul"
    assert len(shop.marks()) == 1


def test_an_end_is_told_over_a_new_connection_where_the_one_breaks_while_the_body_runs(shop):
    worker = shop.worker()
    shop.start("inlineAndQueued")
    shop.wait_marks(2)
    shop.end_connections(4, "two lanes, what tends them, and the listener")
    shop.open_gate()
    assert shop.wait("completed").output == ["inline", "queued"]
    assert len(shop.marks()) == 2 and "rolled back: " in worker.text()
    assert shop.conn.execute("select from baton.incidents").fetchall() == []


@pytest.mark.parametrize("workflow, bodies", [("impure", 1), ("impureAhead", 2)])
def test_code_that_does_not_ask_for_what_the_log_holds_fails_its_run(shop, workflow, bodies):
    shop.conn.execute("update baton.settings set max_failures = 2")
    shop.worker()
    shop.start(workflow)
    assert "the log holds step quick" in shop.wait("failed").error["error"]
    assert len(shop.marks()) == bodies


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


def test_a_worker_comes_through_lost_connections(shop):
    worker = shop.worker()
    shop.conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'baton_test_worker'"
                      " and datname = current_database()")
    worker.wait_for("ready", times=2)
    shop.open_gate()
    shop.start("gate", "through")
    assert shop.wait("completed").output == "through"


def test_behind_a_pooler_in_transaction_mode(shop, make_pooler, server_log):
    shop.url = shop.url_of(make_pooler(shop.db, users=["baton_test_worker"]), "baton_test_worker")
    workers = [shop.worker(), shop.worker()]
    shop.open_gate()
    for number in range(3):
        shop.start("fan", [number, "x"], f"r{number}")
    for number in range(3):
        assert shop.wait("completed", f"r{number}").output == [number, "x"]
    assert not any("database:" in worker.text() for worker in workers)
    assert shop.conn.execute("select distinct control from baton.workers").fetchall() == [("polling",)], "LISTEN heard nothing"
    assert server_log.errors() == []


def test_started_over_http(shop):
    port = free_port()
    shop.conn.execute("select baton.register_worker_function('web', url => %s, debounce => '1 s')", [f"http://127.0.0.1:{port}"])

    def post(body=None, token=SECRET):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/web", json.dumps(body).encode(), method="POST",
                                         headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"})
        try:
            return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    assert shop.program("dist/http.js", FUNCTION_NAME="web", BATON_TOKEN="").wait() != 0, "no token, no worker"
    worker = shop.program("dist/http.js", FUNCTION_NAME="web", QUEUE_NAME="orders", PORT=str(port), BATON_TOKEN=SECRET,
                          BOOT_SECONDS="2")
    wait_until(lambda: post({"invocation_id": "not an id"}) == 400, "it listens", every=0.05)
    assert [post({}, token) for token in ("wrong", SECRET[::-1])] == [401, 401]
    reserved = shop.conn.execute("select * from baton.reserve_worker_invocation('web')").fetchone()
    body = {"invocation_id": str(reserved.invocation_id)}
    assert [post(body), post(body), post()] == [202, 202, 202], "one start, however often it is asked for"
    worker.wait_for("accepted")
    assert post(body) == 200
    assert post({"invocation_id": "00000000-0000-4000-8000-000000000000"}) == 409
    shop.start("order", {"amount": 7, "items": []}, "o", "orders")
    assert shop.wait("completed", "o").output["boxes"] == []
    assert shop.conn.execute("select startup_state from baton.worker_startup where function_name = 'web'").fetchone() == ("ready",)
    worker.signal()
    assert worker.wait() == 0
    assert shop.conn.execute("select count(*) from baton.workers where stopped_at is null").fetchone() == (0,)
    assert worker.text().count("accepted") == 1
