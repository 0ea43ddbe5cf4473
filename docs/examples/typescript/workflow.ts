/** What workflows and bodies are written with. */
import { type Attempt, type Event, json } from "./baton.ts";

/** What a body is told: its place in the run, which is the same at each attempt, and a signal that asks it to stop. */
export type Task = Attempt & { signal: AbortSignal };

/** A body has an effect on the world. It may run again if its process dies before its end is written down. */
export type Body<In, Out> = (input: In, task: Task) => Promise<Out> | Out;

/** A workflow only decides: it is called again from the top at every replay. */
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

/** Thrown by run.step and run.map: a body has failed for good, or has killed its process too often. */
export class StepFailed extends Failed {}

/** The log holds something that the code did not ask for: one of them was changed, or the code is not deterministic. */
export class Diverged extends Error {}

/** A run in one replay: what the log has is answered from it; what it has not is new, or is waited for. */
export class Run {
  readonly input: any;
  readonly newEvents: { type: string; correlation_id: string; payload: string }[] = [];
  readonly newSteps: { step_slug: string; inputs: string; max_attempts?: number }[] = [];
  wakeAt: Date | null = null;
  /** Settles when the code waits and nothing that it does in this replay can bring it on. */
  readonly suspended: Promise<void>;

  #clock: Date;
  #suspend!: () => void;
  #logged = new Map<string, any>(); // by "step NAME" and "record NAME": what the code must ask for
  #asked = new Set<string>();
  #ends = new Map<string, Event>();
  #outputs = new Map<string, unknown[]>();
  #signals: Event[] = [];

  constructor(events: Event[], clock: Date) {
    this.input = events[0]!.payload;
    this.#clock = clock;
    this.suspended = new Promise((resolve) => (this.#suspend = resolve));
    for (const { type, correlation_id, payload } of events) {
      if (type === "step_created") this.#logged.set(`step ${correlation_id}`, payload);
      if (type === "workflow.recorded") this.#logged.set(`record ${correlation_id}`, payload);
      if (type === "task_completed") {
        const outputs = this.#outputs.get(payload.step_slug) ?? [];
        outputs[payload.task_index] = payload.output;
        this.#outputs.set(payload.step_slug, outputs);
      }
    }
    for (const event of events) {
      if (/^step_(completed|failed|skipped)$/.test(event.type)) this.#ends.set(event.payload.step_slug, event);
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
    if (!created) {
      this.newSteps.push({ step_slug: slug, inputs: json(inputs), max_attempts: maxAttempts });
      return this.#wait();
    }
    if (created.task_count !== inputs.length) throw new Diverged(`${slug}: ${created.task_count} inputs in the log`);
    const end = this.#ends.get(slug);
    if (!end) return this.#wait();
    if (end.type !== "step_completed") throw new StepFailed({ step: slug, ...end.payload });
    return (this.#outputs.get(slug) ?? []) as Out[];
  }

  /** What decide() answers now, or answered in an earlier replay: for all that may come out differently. */
  record<T>(name: string, decide: () => T): T {
    const logged = this.#ask(`record ${name}`);
    if (logged !== undefined) return logged;
    const payload = json(decide());
    this.newEvents.push({ type: "workflow.recorded", correlation_id: name, payload });
    return JSON.parse(payload);
  }

  /** The payload of the next signal of that name. */
  async signal<T>(name: string): Promise<T> {
    const index = this.#signals.findIndex((event) => event.payload.name === name);
    return index < 0 ? this.#wait() : this.#signals.splice(index, 1)[0]!.payload.payload;
  }

  /** By the clock of the database when this replay was granted; this machine's does not count. */
  async sleep(name: string, seconds: number): Promise<void> {
    const until = new Date(this.record(`sleep ${name}`, () => new Date(this.#clock.getTime() + seconds * 1000)));
    if (this.#clock < until) await this.#wait(until);
  }

  /** After the code: something that the log holds and the code did not ask for. */
  unasked(): string | undefined {
    return [...this.#logged.keys()].find((name) => !this.#asked.has(name));
  }

  #ask(name: string): any {
    if (this.#asked.has(name)) throw new Diverged(`${name} was there before: give it a key of its own`);
    this.#asked.add(name);
    return this.#logged.get(name);
  }

  /** A promise that never settles: the code ends here in this replay, once its other branches have gone as far. */
  #wait(until?: Date): Promise<never> {
    if (until && !(this.wakeAt && this.wakeAt <= until)) this.wakeAt = until;
    setImmediate(this.#suspend);
    return new Promise(() => {});
  }
}
