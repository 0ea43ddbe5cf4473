/** The worker: claims messages, replays runs, executes bodies (the why: docs/guides/ownership.md). */
import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import {
  asStored, type Attempt, call, type Event, type Fence, json, one, type Receipt, type Started,
} from "./baton.ts";
import { type Body, Failed, Run, type Workflow } from "./workflow.ts";

const POLL_MS = 1000 * Number(process.env.POLL_SECONDS ?? 1);
const VISIBILITY_MS = 1000 * Number(process.env.VISIBILITY_SECONDS ?? 30); // how long a claim lasts unextended
const HEARTBEAT_MS = 1000 * Number(process.env.HEARTBEAT_SECONDS ?? 5); // well below the function's heartbeat_timeout
const BEAT_MS = Math.min(HEARTBEAT_MS, VISIBILITY_MS / 3);
const VISIBILITY = `${VISIBILITY_MS} ms`;
const SHORT_MS = 20; // a body that lasts longer is asked about
const UNKNOWN_DELAY = `${process.env.UNKNOWN_SECONDS ?? 60} s`;

export const DATABASE = {
  connectionString: process.env.DATABASE_URL,
  connectionTimeoutMillis: 5000,
  options: "-c idle_in_transaction_session_timeout=10s", // a process that hangs must not keep a row locked
};
export const log = (...words: unknown[]) => console.error(...words);

export type Application = {
  queue: string;
  workflows: Record<string, Workflow>;
  bodies: Record<string, Body<any, unknown>>;
};

async function connect(): Promise<pg.Client> {
  const db = new pg.Client(DATABASE);
  db.on("error", () => {}); // the next query tells
  await db.connect();
  return db;
}

/** Several lanes with a message each, and a connection that tends what they have in hand, beside one that listens. */
export class Worker {
  readonly id: string;
  readonly application: Application;
  /** Called when there is something to tell or to ask before the next beat. */
  hint = () => {};
  readonly #lanes: Lane[];
  readonly #stop = new AbortController();
  #heardAt = 0;

  /** The worker is registered, or its start accepted, before. */
  constructor(id: string, application: Application, lanes = 4) {
    this.id = id;
    this.application = application;
    this.#lanes = Array.from({ length: lanes }, () => new Lane(this));
  }

  get stopping(): boolean {
    return this.#stop.signal.aborted;
  }

  /** Bodies are asked to stop. What is in hand is finished or given back. */
  stop(reason: string): void {
    if (this.stopping) return;
    log("stopping:", reason);
    this.#stop.abort();
    for (const lane of this.#lanes) lane.abort(reason);
    this.hint();
  }

  async pause(): Promise<void> {
    await sleep(POLL_MS, undefined, { signal: this.#stop.signal }).catch(() => {});
  }

  async work(): Promise<void> {
    const done = new AbortController();
    const tending = this.#tend(done.signal);
    await Promise.all(this.#lanes.map((lane) => lane.work()));
    done.abort();
    this.hint();
    await tending;
    log("stopped", this.id);
  }

  async #tend(done: AbortSignal): Promise<void> {
    while (!done.aborted) {
      let db: pg.Client | undefined;
      let listener: pg.Client | undefined; // another one: through a pooler a connection may hear what it sends itself
      try {
        db = await connect();
        listener = await connect();
        listener.on("end", () => db?.end().catch(() => {}));
        listener.on("notification", ({ payload }) => {
          this.#heardAt = Date.now();
          if (payload?.includes('"cancel:')) this.hint();
        });
        await listener.query("listen baton_control");
        const recovered = await call(db, "recover_runs", { queue_name: this.application.queue });
        log("ready; recovered:", ...recovered.map(({ run_id }) => run_id));
        for (let beatAt = 0; !done.aborted; ) {
          const hinted = new AbortController();
          this.hint = () => hinted.abort();
          if (this.stopping || Date.now() >= beatAt) {
            await this.#beat(db);
            beatAt = Date.now() + BEAT_MS;
          }
          await this.#reconcile(db);
          await sleep(beatAt - Date.now(), undefined, { signal: hinted.signal }).catch(() => {});
        }
        await one(db, "stop_worker", { worker_id: this.id });
      } catch (error) { // what can't be said is found out by the time-outs
        log("database:", String(error));
        await sleep(POLL_MS, undefined, { signal: done }).catch(() => {});
      } finally {
        await listener?.end().catch(() => {});
        await db?.end().catch(() => {});
      }
    }
  }

  /** Say that we live, and extend what is in hand. */
  async #beat(db: pg.Client): Promise<void> {
    await db.query("select pg_notify('baton_control', $1)", [json({ event: "probe", worker_id: this.id })]);
    // Through a pooler LISTEN succeeds and nothing arrives: only a probe that comes back proves that we hear.
    const control = Date.now() - this.#heardAt < 3 * BEAT_MS ? "listening" : "polling";
    const { outcome } = await one(db, "heartbeat", { worker_id: this.id, control });
    if (outcome !== "active") this.stop(outcome); // stopping, deprecated, stopped, unknown
    if (this.stopping) await one(db, "stop_worker", { worker_id: this.id, draining: true }); // a successor may start
    const held = this.#lanes.flatMap((lane) => (lane.receipt ? { lane, receipt: lane.receipt } : []));
    const receipts = json(held.map(({ receipt }) => receipt));
    const answers = await call(db, "extend_many", { receipts, visibility: VISIBILITY });
    for (const [index, { lane, receipt }] of held.entries())
      if (answers[index]!.outcome !== "extended" && lane.receipt === receipt) lane.abort(answers[index]!.outcome);
  }

  /** Ask which of our bodies should go on. A notification is only a reason to ask: the rows are the truth. */
  async #reconcile(db: pg.Client): Promise<void> {
    const held = this.#lanes.flatMap((lane) => (lane.attempt ? { lane, attempt: lane.attempt } : []));
    if (held.length === 0) return;
    const answers = await call(db, "terminal_tasks", { keys: json(held.map(({ attempt }) => attempt)) });
    for (const [index, { lane, attempt }] of held.entries())
      if (answers[index]!.outcome !== "running" && lane.attempt === attempt) lane.abort(answers[index]!.outcome);
  }
}

/** A body to run here, and the workflow's code, which waits for it in memory. */
type Inline = { task: Started; run: Run; fence: Fence };
type Replayed = { outcome: string; inline?: Inline };
type Written = { outcome: string; task?: Started };
type Ended = { attempt: Attempt; output: string } | { attempt: Attempt; error: string; final: boolean };

/** A connection that works on one message at a time. */
class Lane {
  receipt: Receipt | undefined; // the message in hand
  attempt: Attempt | undefined; // the body that runs
  #abort = new AbortController(); // of that body
  readonly #worker: Worker;
  #db!: pg.Client;
  #inTransaction = false;

  constructor(worker: Worker) {
    this.#worker = worker;
  }

  /** Asks the body that runs to stop. */
  abort(reason: string): void {
    if (!this.attempt || this.#abort.signal.aborted) return;
    log("aborting", this.attempt.step_slug, reason);
    this.#abort.abort(new Error(reason));
  }

  async work(): Promise<void> {
    while (!this.#worker.stopping) {
      try {
        this.#db = await connect();
        while (!this.#worker.stopping) if (!(await this.#workOnce())) await this.#worker.pause();
      } catch (error) { // what was in hand is recovered, here or elsewhere
        log("database:", String(error));
        await this.#worker.pause();
      } finally {
        await this.#db?.end().catch(() => {});
      }
    }
  }

  /** One message. The answers of pg_baton settle it: there is nothing to acknowledge. */
  async #workOnce(): Promise<boolean> {
    const { id, application } = this.#worker;
    const values = { queue_name: application.queue, worker_id: id, visibility: VISIBILITY };
    const [message] = await call(this.#db, "claim", values);
    if (!message) return false;
    this.receipt = { message_id: message.message_id, delivery: message.delivery };
    try {
      log(message.kind === "run" ? await this.#handleRun() : await this.#handleTask(), message.run_id);
    } catch (error) {
      if (!(error instanceof pg.DatabaseError)) throw error;
      if (error.code === "PB001") log("superseded", message.run_id); // too late: nothing of it is written
      else log((await this.#giveBack(String(error))).outcome, message.run_id);
    } finally {
      this.receipt = undefined;
    }
    return true;
  }

  /** Replay, and run the body that it starts here, outside the replay; again until there is none. */
  async #handleRun(): Promise<string> {
    const events: Event[] = [];
    let { outcome, inline } = await this.#replay(events);
    while (inline) {
      const ended = await this.#execute(inline.task);
      if (!ended) return "given back";
      // A later attempt ends alone: should the workflow's code kill us then, that is not the body's fault.
      let answer: Replayed | undefined;
      if (inline.task.attempt === 1)
        answer = (await this.#advance(ended, inline)) ?? (await this.#endAndReplay(ended, events));
      if (!answer) {
        await this.#end(ended);
        answer = await this.#replay(events);
      }
      ({ outcome, inline } = answer);
    }
    return outcome;
  }

  async #handleTask(): Promise<string> {
    const started = await one(this.#db, "start_task", this.receipt!);
    if (started.outcome !== "execute") return started.outcome; // await, skip, lost: nothing is left to do
    const ended = await this.#execute(started);
    return ended ? this.#end(ended) : "given back";
  }

  // A replay -----------------------------------------------------------------------------------

  /** Answers how it ended, and the body that this lane is to run, if it was given one. */
  async #replay(events: Event[]): Promise<Replayed> {
    // hold session: if this process is killed while it decides, its connection tells, and the run is free at once
    const baton = await one(this.#db, "begin_replay", { ...this.receipt!, hold: "session" });
    const { run_id, replay_epoch, workflow_name, clock } = baton;
    const fence = { run_id, replay_epoch };
    let { outcome } = baton; // handed_over: somebody else goes on, and sees what we have written
    let run!: Run;
    let task: Started | undefined;
    while (outcome === "granted" || outcome === "again") { // again: something came while we decided
      await this.#read(run_id, events);
      run = new Run(events, clock);
      // with no transaction open, unless a body's end began one
      const write = await this.#decide(workflow_name, run, fence, events.at(-1)!.seq);
      const written = await this.#transaction(write); // all or nothing
      outcome = written.outcome;
      task ??= written.task;
    }
    return outcome === "ended" && task ? { outcome, inline: { task, run, fence } } : { outcome };
  }

  async #read(run_id: string, events: Event[]): Promise<void> {
    for (;;) {
      const page = await call(this.#db, "read_events", { run_id, after_seq: events.at(-1)?.seq ?? 0 });
      if (page.length === 0) return;
      events.push(...page);
    }
  }

  /** Runs the workflow's code. Answers what is then to be written. */
  async #decide(name: string, run: Run, fence: Fence, seen_seq: number): Promise<() => Promise<Written>> {
    const workflow = this.#worker.application.workflows[name];
    if (!workflow) // others may know it: a newer deployment
      return () => this.#giveBack(`unknown workflow: ${name}`, UNKNOWN_DELAY);
    const { done, failed, error } = await run.decide(workflow);
    if (error) return () => this.#giveBack(error);
    return async () => {
      for (const event of run.newEvents.splice(0)) await one(this.#db, "append_event", { ...fence, ...event });
      if (done) return one(this.#db, "complete_run", { ...fence, ...done });
      if (failed) return one(this.#db, "fail_run", { ...fence, ...failed });
      return this.#suspend(run, fence, seen_seq);
    };
  }

  async #suspend(run: Run, fence: Fence, seen_seq: number): Promise<Written> {
    for (const step of run.newSteps.splice(0)) await one(this.#db, "create_step", { ...fence, ...step });
    // At most one body under our message; the others get messages of their own. None, if this worker is stopping.
    const dispatch = () => call(this.#db, "dispatch_tasks", { ...fence, inline_limit: 1 });
    let rows = await dispatch();
    if (rows.some(({ outcome }) => outcome === "lost")) { // our claim ran out; if nobody took it, it is still ours
      await one(this.#db, "extend", { ...this.receipt!, visibility: VISIBILITY });
      rows = await dispatch();
    }
    const { outcome } = await one(this.#db, "end_replay", { ...fence, seen_seq, wake_at: run.wakeAt });
    const task = rows.find((row) => row.outcome === "execute");
    return { outcome, task: task && { ...task, run_id: fence.run_id } };
  }

  // A body -------------------------------------------------------------------------------------

  /** Answers how it ended, or nothing if it was given back. */
  async #execute({ run_id, step_slug, task_index, attempt: number, input }: Started): Promise<Ended | undefined> {
    const body = this.#worker.application.bodies[step_slug.split(" ")[0]!];
    if (!body) {
      await this.#giveBack(`unknown step: ${step_slug}`, UNKNOWN_DELAY);
      return undefined;
    }
    const attempt = { run_id, step_slug, task_index, attempt: number };
    const { signal } = (this.#abort = new AbortController());
    // It may have been cancelled before it was registered here.
    const asking = setTimeout(() => this.#worker.hint(), SHORT_MS);
    try {
      this.attempt = attempt;
      if (this.#worker.stopping) this.abort("stopping");
      signal.throwIfAborted();
      return { attempt, output: json(await body(input, { ...attempt, signal })) };
    } catch (error) {
      const final = error instanceof Failed;
      if (!signal.aborted) return { attempt, error: json(final ? error.detail : String(error)), final };
      // By force: the body that ran under the message has stopped, and is given out anew if it is still wanted.
      log((await this.#tell(() => one(this.#db, "park", { ...this.receipt!, force: true }))).outcome, step_slug);
      return undefined;
    } finally {
      clearTimeout(asking);
      this.attempt = undefined;
    }
  }

  #say(ended: Ended): Promise<{ outcome: string }> {
    const { attempt, ...how } = ended;
    const task = { ...attempt, ...this.receipt! };
    return "output" in how
      ? one(this.#db, "complete_task", { ...task, ...how })
      : one(this.#db, "fail_task", { ...task, ...how });
  }

  /** What became of a body. If the connection broke meanwhile, over a new one: to say it twice is harmless. */
  async #tell<T>(what: () => Promise<T>): Promise<T> {
    for (;;) {
      try {
        return await what();
      } catch (error) {
        if (this.#worker.stopping || (await this.#db.query("select").catch(() => undefined))) throw error;
        log("database:", String(error));
        await this.#worker.pause();
        await this.#db.end().catch(() => {});
        this.#db = await connect().catch(() => this.#db);
      }
    }
  }

  async #end(ended: Ended): Promise<string> {
    try {
      return (await this.#tell(() => this.#say(ended))).outcome;
    } catch (error) { // over max_payload_bytes, or nothing that jsonb can hold
      if (!(error instanceof pg.DatabaseError && /^(22|54)/.test(error.code ?? ""))) throw error;
      const failed = { attempt: ended.attempt, error: json(error.message), final: true };
      return (await this.#tell(() => this.#say(failed))).outcome;
    }
  }

  /**
   * The short way: the code is told of the end ahead of the log, and goes on where it stands. If it wants one new body
   * and nothing else, and nothing else has happened to the run, one call writes the end and starts that body. Answers
   * nothing: take the long way, where the code is called anew, since what it knows may not be what the log gets.
   */
  async #advance(ended: Ended, { run, fence }: Inline): Promise<Replayed | undefined> {
    if (!("output" in ended)) return undefined;
    const { attempt: { step_slug }, output } = ended;
    const next = await run.goOn(step_slug, asStored(output));
    const inputs = next ? (asStored(next.inputs) as unknown[]) : [];
    if (!next || inputs.length !== 1) return undefined;
    const { step_slug: next_step_slug, max_attempts } = next;
    const next_input = json(inputs[0]);
    try {
      const values = { ...fence, step_slug, output, next_step_slug, next_input, max_attempts };
      const { outcome } = await one(this.#db, "advance_run", values);
      if (outcome !== "advanced") return undefined;
      const { run_id } = fence;
      const task = { outcome, run_id, step_slug: next_step_slug, task_index: 0, attempt: 1, input: inputs[0] };
      return { outcome, inline: { task, run, fence } };
    } catch (error) {
      log("not advanced:", String(error));
      return undefined;
    }
  }

  /** The end of a body and the replay that follows, in one short transaction: one commit a step. */
  async #endAndReplay(ended: Ended, events: Event[]): Promise<Replayed | undefined> {
    const seen = events.length;
    try {
      return await this.#transaction(async () => {
        await this.#say(ended);
        return this.#replay(events);
      });
    } catch (error) {
      log("rolled back:", String(error));
      events.length = seen;
      return undefined;
    }
  }

  // Both --------------------------------------------------------------------------------------

  /** By force: a body that ran under the message has stopped, or can't be run here, and is given out anew. */
  #giveBack(error: string, delay?: string): Promise<{ outcome: string }> {
    log("failing:", error);
    return one(this.#db, "fail", { ...this.receipt!, error, delay, force: true });
  }

  async #transaction<T>(work: () => Promise<T>): Promise<T> {
    if (this.#inTransaction) return work();
    await this.#db.query("begin");
    this.#inTransaction = true;
    try {
      const result = await work();
      await this.#db.query("commit");
      return result;
    } catch (error) {
      await this.#db.query("rollback").catch(() => {});
      throw error;
    } finally {
      this.#inTransaction = false;
    }
  }
}
