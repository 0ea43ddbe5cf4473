/** pg_baton's verbs as this worker calls them: by named arguments, typed. */
import pg from "pg";

// Message ids, deliveries, epochs and positions are below 2^53.
pg.types.setTypeParser(pg.types.builtins.INT8, Number);

export type Receipt = { message_id: number; delivery: number };
export type Fence = { run_id: string; replay_epoch: number };
export type Attempt = { run_id: string; step_slug: string; task_index: number; attempt: number };
export type Message = Receipt & { kind: string; run_id: string };
export type Baton = Fence & { outcome: string; workflow_name: string; clock: Date };
export type Event = { seq: number; type: string; correlation_id: string | null; payload: any };
export type Started = Attempt & { outcome: string; input: unknown };

type Outcome = { outcome: string };
type Reason = { outcome: string; reason: string | null };
type Ended = Attempt & Receipt;

/** A verb's arguments and the rows that it answers. Arguments of type jsonb are made with `json`. */
type Verbs = {
  register_worker: [{ worker_id: string; function_name: string; version?: string }, Reason];
  reserve_worker_invocation: [{ function_name: string }, Outcome & { invocation_id: string | null }];
  reconcile_worker_invocation: [{ function_name: string; invocation_id: string; worker_id?: string }, Reason];
  accept_worker_invocation:
    [{ function_name: string; invocation_id: string; worker_id: string; version?: string }, Reason];
  dismiss_worker_invocation: [{ function_name: string; invocation_id: string; reason: string }, Outcome];
  heartbeat: [{ worker_id: string; control: "listening" | "polling" }, Outcome];
  stop_worker: [{ worker_id: string; draining?: boolean }, Outcome];
  recover_runs: [{ queue_name: string }, { run_id: string }];

  claim: [{ queue_name: string; worker_id: string; visibility: string }, Message];
  extend: [Receipt & { visibility: string }, Outcome];
  extend_many: [{ receipts: string; visibility: string }, Outcome];
  park: [Receipt & { force: boolean }, Outcome];
  fail: [Receipt & { error: string; delay?: string; force: boolean }, Outcome];

  begin_replay: [Receipt & { hold: "session" | "lease" }, Baton];
  read_events: [{ run_id: string; after_seq: number }, Event];
  append_event: [Fence & { type: string; correlation_id: string; payload: string }, Outcome];
  create_step: [Fence & { step_slug: string; inputs: string; max_attempts?: number }, Outcome];
  dispatch_tasks: [Fence & { inline_limit: number }, Omit<Started, "run_id">];
  end_replay: [Fence & { seen_seq: number; wake_at: Date | null }, Outcome];
  complete_run: [Fence & { output: string }, Outcome];
  fail_run: [Fence & { error: string }, Outcome];

  start_task: [Receipt, Started];
  complete_task: [Ended & { output: string }, Outcome];
  advance_run: [Fence & {
    step_slug: string; output: string; next_step_slug: string; next_input: string; max_attempts?: number;
  }, Outcome];
  fail_task: [Ended & { error: string; final?: boolean }, Outcome];
  terminal_tasks: [{ keys: string }, Outcome];
};

export type Verb = keyof Verbs;
export type Arguments<V extends Verb> = Verbs[V][0];
export type Row<V extends Verb> = Verbs[V][1];

export const json = (value: unknown): string => JSON.stringify(value ?? null) ?? "null"; // of a function, too

/** The value of that JSON as it will be read from the database: jsonb has its own order of keys. */
export const asStored = (text: string): unknown => inOrder(JSON.parse(text));

function inOrder(value: any): unknown {
  if (typeof value !== "object" || value === null) return value;
  if (Array.isArray(value)) {
    for (const [index, item] of value.entries()) value[index] = inOrder(item);
    return value;
  }
  const members = Object.entries(value).sort(([a], [b]) => compareKeys(Buffer.from(a), Buffer.from(b)));
  for (const member of members) member[1] = inOrder(member[1]);
  return Object.fromEntries(members);
}

const compareKeys = (a: Buffer, b: Buffer): number => a.length - b.length || Buffer.compare(a, b);

type Database = pg.ClientBase | pg.Pool;

/** Calls a verb; arguments that are undefined keep their defaults. */
export async function call<V extends Verb>(db: Database, verb: V, values: Arguments<V>): Promise<Row<V>[]> {
  const given = Object.entries(values).filter(([, value]) => value !== undefined);
  const names = given.map(([name], index) => `${name} => $${index + 1}`);
  const { rows } = await db.query(`select * from baton.${verb}(${names.join(", ")})`, given.map(([, value]) => value));
  return rows;
}

/** For verbs that always answer one row. */
export async function one<V extends Verb>(db: Database, verb: V, values: Arguments<V>): Promise<Row<V>> {
  return (await call(db, verb, values))[0]!;
}
