/** What workflows and bodies are written with. */
import { setImmediate as turn } from "node:timers/promises";
import { asStored, type Attempt, type Event, json } from "./baton.ts";

/** What a body is told: its place in the run, which is the same at each attempt, and a signal that asks it to stop. */
export type Task = Attempt & { signal: AbortSignal };

/** A body has an effect on the world. It may run again if its process dies before its end is written down. */
export type Body<In, Out> = (input: In, task: Task) => Promise<Out> | Out;

/** A workflow only decides. It is called again from the top at every replay, and goes on in memory between them. */
export type Workflow = (run: Run) => Promise<unknown>;

export type StepOptions = { key?: string; maxAttempts?: number };

/** Thrown by a workflow or a body: it has failed for good. After any other error it is tried again. */
export class Failed extends Error {
  readonly detail: unknown;
  constructor(detail: unknown) {
    super(json(detail));
    this.detail = detail;
  }
}

/** Thrown by run.step and run.map: a body has failed for good or killed its process too often, or was skipped. */
export class StepFailed extends Failed {}

/** The log holds something that the code did not ask for: one of them was changed, or the code is not deterministic. */
export class Diverged extends Error {}

export type NewStep = { step_slug: string; inputs: string; max_attempts?: number };
/** What the code comes to: done, failed, in error, or none of these: it waits. */
export type Decision = { done?: { output: string } | void; failed?: { error: string }; error?: string };

/**
 * A run, from a replay on: what the log has is answered from it; what it has not is new, or is waited for.
 * The code gets copies: what it changes in them is not changed for the next replay.
 */
export class Run {
  readonly input: any;
  /** To be written: whoever writes them takes them out. */
  readonly newEvents: { type: string; correlation_id: string; payload: string }[] = [];
  readonly newSteps: NewStep[] = [];
  wakeAt: Date | null = null;

  #clock: Date;
  #code!: Promise<{ output: string }>;
  #suspend!: () => void;
  #unrecorded: string | undefined; // an error over which the code must not go on
  #waiting = new Map<string, (outputs: any) => void>(); // steps of one input
  #logged = new Map<string, any>(); // by "step NAME" and "record NAME": what the code must ask for
  #asked = new Set<string>();
  #ends = new Map<string, Event>();
  #outputs = new Map<string, unknown[]>();
  #signals: Event[] = [];

  constructor(events: Event[], clock: Date) {
    this.input = structuredClone(events[0]!.payload);
    this.#clock = clock;
    for (const { type, correlation_id, payload } of events) {
      if (type === "step_created") this.#logged.set(`step ${correlation_id}`, payload);
      if (type === "workflow.recorded") this.#logged.set(`record ${correlation_id}`, payload);
      if (type === "task_completed") {
        const outputs = this.#outputs.get(payload.step_slug) ?? [];
        outputs[payload.task_index] = payload.output;
        this.#outputs.set(payload.step_slug, outputs);
      }
      if (type === "run_advanced") { // by the short way: a step's one body has ended, and the next step has one
        this.#logged.set(`step ${correlation_id}`, { task_count: 1 });
        this.#outputs.set(payload.step_slug, [payload.output]);
      }
    }
    for (const event of events) {
      if (/^(run_advanced|step_(completed|failed|skipped))$/.test(event.type))
        this.#ends.set(event.payload.step_slug, event);
      if (event.type === "signal_received") this.#signals.push(event);
    }
  }

  /** What body(input) answers. The same body again in a run needs a key. */
  async step<In, Out>(body: Body<In, Out>, input: In, options: StepOptions = {}): Promise<Out> {
    const [output] = await this.map(body, [input], options);
    return output!;
  }

  /** What body answers for each input, in their order; they run in parallel, on any worker. */
  async map<In, Out>(body: Body<In, Out>, inputs: In[], { key, maxAttempts }: StepOptions = {}): Promise<Out[]> {
    const slug = key === undefined ? body.name : `${body.name} ${key}`;
    const created = this.#ask(`step ${slug}`);
    if (!created && inputs.length === 0) return []; // a step without tasks would end at once, and nobody be woken
    if (!created) this.newSteps.push({ step_slug: slug, inputs: json(inputs), max_attempts: maxAttempts });
    else if (created.task_count !== inputs.length)
      throw new Diverged(`${slug}: ${created.task_count} inputs in the log`);
    const end = this.#ends.get(slug);
    if (!end) return this.#wait(inputs.length === 1 ? slug : undefined);
    if (/^step_(failed|skipped)$/.test(end.type)) throw new StepFailed(structuredClone(end.payload));
    return structuredClone(this.#outputs.get(slug) ?? []) as Out[];
  }

  /** What decide() answers now, or answered in an earlier replay: for all that may come out differently. */
  record<T>(name: string, decide: () => T): T {
    const logged = this.#ask(`record ${name}`);
    if (logged !== undefined) return structuredClone(logged);
    let payload: string;
    try {
      payload = json(decide());
    } catch (error) {
      this.#unrecorded = String(error);
      throw error;
    }
    this.newEvents.push({ type: "workflow.recorded", correlation_id: name, payload });
    return asStored(payload) as T;
  }

  /** The payload of the next signal of that name. */
  async signal<T>(name: string): Promise<T> {
    const index = this.#signals.findIndex((event) => event.payload.name === name);
    return index < 0 ? this.#wait() : structuredClone(this.#signals.splice(index, 1)[0]!.payload.payload);
  }

  /** By the clock of the database when this replay was granted; this machine's does not count. */
  async sleep(name: string, seconds: number): Promise<void> {
    const until = new Date(this.record(`sleep ${name}`, () => new Date(this.#clock.getTime() + seconds * 1000)));
    if (this.#clock >= until) return;
    if (!(this.wakeAt && this.wakeAt <= until)) this.wakeAt = until;
    await this.#wait();
  }

  // For the worker -----------------------------------------------------------------------------

  /** Calls the code. */
  decide(workflow: Workflow): Promise<Decision> {
    const suspended = new Promise<void>((resolve) => (this.#suspend = resolve));
    this.#code = (async () => ({ output: json(await workflow(this)) }))();
    return this.#standstill(suspended);
  }

  /** Tells the code a body's output: it goes on where it stands. Answers what it wants, if that is one new step. */
  async goOn(slug: string, output: unknown): Promise<NewStep | undefined> {
    this.#waiting.get(slug)?.([output]);
    const { done, failed, error } = await this.#standstill(turn());
    const [step, ...others] = this.newSteps.splice(0);
    if (done || failed || error || others.length > 0 || this.newEvents.length > 0) return undefined;
    return step;
  }

  async #standstill(suspended: Promise<void>): Promise<Decision> {
    const decision: Decision = {};
    try {
      decision.done = await Promise.race([this.#code, suspended]);
    } catch (error) {
      if (!(error instanceof Failed)) return { error: String(error) };
      decision.failed = { error: json(error.detail) };
    }
    await turn(); // its other branches go as far as they can
    if (this.#unrecorded !== undefined && !decision.failed) return { error: this.#unrecorded };
    const [unasked] = this.#logged.keys();
    return unasked ? { error: `the log holds ${unasked}, and the code does not ask for it` } : decision;
  }

  #ask(name: string): any {
    if (this.#asked.has(name)) throw new Diverged(`${name} was there before: give it a key of its own`);
    this.#asked.add(name);
    const logged = this.#logged.get(name);
    this.#logged.delete(name);
    return logged;
  }

  /** The code stands still, once its other branches have gone as far; it goes on if it is told of that body's end. */
  #wait(body?: string): Promise<any> {
    setImmediate(this.#suspend);
    return new Promise((resolve) => body && this.#waiting.set(body, resolve));
  }
}
