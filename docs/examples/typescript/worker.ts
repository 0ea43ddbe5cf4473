/** The worker: claims messages, replays runs, executes bodies (the why: docs/guides/ownership.md). */
import { setImmediate as turn, setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import { type Attempt, type Baton, call, type Event, json, one, type Receipt, type Started } from "./baton.ts";
import { type Body, Failed, Run, type Workflow } from "./workflow.ts";

const POLL_MS = 1000 * Number(process.env.POLL_SECONDS ?? 1);
const VISIBILITY_MS = 1000 * Number(process.env.VISIBILITY_SECONDS ?? 30); // how long a claim lasts unextended
const HEARTBEAT_MS = 1000 * Number(process.env.HEARTBEAT_SECONDS ?? 5); // well below the function's heartbeat_timeout
const BEAT_MS = Math.min(HEARTBEAT_MS, VISIBILITY_MS / 3);
const VISIBILITY = `${VISIBILITY_MS} ms`;
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
          const hinted = new Promise<void>((resolve) => (this.hint = resolve));
          if (this.stopping || Date.now() >= beatAt) {
            await this.#beat(db);
            beatAt = Date.now() + BEAT_MS;
          }
          await this.#reconcile(db);
          await Promise.race([hinted, sleep(beatAt - Date.now(), undefined, { signal: done }).catch(() => {})]);
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

type Replayed = { outcome: string; task?: Started };
/** What the workflow's code comes to: done, failed, in error, or none of these: it waits. */
type Decision = { run: Run; done?: { output: string } | void; failed?: { error: string }; error?: string };
type Ended = { attempt: Attempt; output: string } | { attempt: Attempt; error: string; final: boolean };

/** A connection that works on one message at a time. */
class Lane {
  receipt: Receipt | undefined; // the message in hand
  attempt: Attempt | undefined; // the body that runs
  #abort = new AbortController(); // of that body
  #baton!: Baton; // of the last replay
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
    let { outcome, task } = await this.#replay(events);
    while (task) {
      const ended = await this.#execute(task);
      if (!ended) return "given back";
      // A later attempt ends alone: should the workflow's code kill us then, that is not the body's fault.
      let answer = task.attempt === 1 ? await this.#goOn(ended, events) : undefined;
      if (!answer) {
        await this.#end(ended);
        answer = await this.#replay(events);
      }
      ({ outcome, task } = answer);
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
    this.#baton = baton;
    let { outcome } = baton; // handed_over: somebody else goes on, and sees what we have written
    let task: Started | undefined;
    while (outcome === "granted" || outcome === "again") { // again: something came while we decided
      await this.#read(baton.run_id, events);
      const write = await this.#decide(baton, events); // with no transaction open, unless a body's end began one
      const written = await this.#transaction(write); // all or nothing
      outcome = written.outcome;
      task ??= written.task;
    }
    return outcome === "ended" ? { outcome, task } : { outcome };
  }

  async #read(run_id: string, events: Event[]): Promise<void> {
    for (;;) {
      const page = await call(this.#db, "read_events", { run_id, after_seq: events.at(-1)?.seq ?? 0 });
      if (page.length === 0) return;
      events.push(...page);
    }
  }

  /** Runs the workflow's code over the events. Answers what is then to be written. */
  async #decide(baton: Baton, events: Event[]): Promise<() => Promise<Replayed>> {
    const workflow = this.#worker.application.workflows[baton.workflow_name];
    if (!workflow) // others may know it: a newer deployment
      return () => this.#giveBack(`unknown workflow: ${baton.workflow_name}`, UNKNOWN_DELAY);
    const { run, done, failed, error } = await this.#run(workflow, events, baton.clock);
    if (error) return () => this.#giveBack(error);
    const { run_id, replay_epoch } = baton;
    return async () => {
      for (const event of run.newEvents) await one(this.#db, "append_event", { run_id, replay_epoch, ...event });
      if (done) return one(this.#db, "complete_run", { run_id, replay_epoch, ...done });
      if (failed) return one(this.#db, "fail_run", { run_id, replay_epoch, ...failed });
      return this.#suspend(run, { run_id, replay_epoch }, events.at(-1)!.seq);
    };
  }

  async #run(workflow: Workflow, events: Event[], clock: Date): Promise<Decision> {
    const decision: Decision = { run: new Run(events, clock) };
    const { run } = decision;
    try {
      decision.done = await Promise.race([workflow(run).then((output) => ({ output: json(output) })), run.suspended]);
    } catch (error) {
      if (!(error instanceof Failed)) return { run, error: String(error) };
      decision.failed = { error: json(error.detail) };
    }
    await turn(); // its other branches go as far as they can
    const unasked = run.unasked();
    return unasked ? { run, error: `the log holds ${unasked}, and the code does not ask for it` } : decision;
  }

  async #suspend(run: Run, fence: { run_id: string; replay_epoch: number }, seen_seq: number): Promise<Replayed> {
    for (const step of run.newSteps) await one(this.#db, "create_step", { ...fence, ...step });
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
    try {
      this.attempt = attempt;
      this.#worker.hint(); // it may have been cancelled before it was registered here
      if (this.#worker.stopping) this.abort("stopping");
      signal.throwIfAborted();
      return { attempt, output: json(await body(input, { ...attempt, signal })) };
    } catch (error) {
      const final = error instanceof Failed;
      if (!signal.aborted) return { attempt, error: json(final ? error.detail : String(error)), final };
      // By force: the body that ran under the message has stopped, and is given out anew if it is still wanted.
      log((await one(this.#db, "park", { ...this.receipt!, force: true })).outcome, step_slug);
      return undefined;
    } finally {
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

  async #end(ended: Ended): Promise<string> {
    try {
      return (await this.#say(ended)).outcome;
    } catch (error) {
      if (!(error instanceof pg.DatabaseError && error.code === "54000")) throw error; // over max_payload_bytes
      return (await this.#say({ attempt: ended.attempt, error: json(error.message), final: true })).outcome;
    }
  }

  async #goOn(ended: Ended, events: Event[]): Promise<Replayed | undefined> {
    return ("output" in ended && (await this.#advance(ended, events))) || this.#endAndReplay(ended, events);
  }

  /**
   * The short way: the end of a body and the start of the next one in one call, where the code, ahead of the log, wants
   * just that one, and nothing else has happened to the run. Answers nothing: take the long way.
   */
  async #advance({ attempt, output }: Ended & { output: string }, events: Event[]): Promise<Replayed | undefined> {
    const { run_id, workflow_name, replay_epoch, clock } = this.#baton;
    const { step_slug, task_index } = attempt;
    try {
      await this.#read(run_id, events);
      const payload = { step_slug, task_index, output: await this.#asStored(output) };
      const seq = events.at(-1)!.seq;
      const ahead = ["task_completed", "step_completed"].map((type) => ({ seq, type, correlation_id: null, payload }));
      const workflow = this.#worker.application.workflows[workflow_name]!;
      const { run, done, failed, error } = await this.#run(workflow, [...events, ...ahead], clock);
      const [step] = run.newSteps;
      const inputs: unknown[] = step ? JSON.parse(step.inputs) : [];
      const isOne = run.newSteps.length === 1 && inputs.length === 1;
      if (done || failed || error || !step || !isOne || run.newEvents.length > 0 || run.wakeAt) return undefined;
      const input = await this.#asStored(json(inputs[0]));
      const next = { next_step_slug: step.step_slug, next_input: json(input), max_attempts: step.max_attempts };
      const { outcome } = await one(this.#db, "advance_run", { run_id, replay_epoch, step_slug, output, ...next });
      if (outcome !== "advanced") return undefined;
      return { outcome, task: { outcome, run_id, step_slug: step.step_slug, task_index: 0, attempt: 1, input } };
    } catch (error) {
      if (!(error instanceof pg.DatabaseError)) throw error;
      log("not advanced:", error.message);
      return undefined;
    }
  }

  /** As replays and later attempts will read it: jsonb has an order of its own. */
  async #asStored(value: string): Promise<unknown> {
    const { rows } = await this.#db.query("select $1::jsonb as value", [value]);
    return rows[0].value;
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
      if (!(error instanceof pg.DatabaseError)) throw error;
      log("rolled back:", error.message);
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
