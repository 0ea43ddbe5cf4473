/**
 * A worker that pg_baton starts over HTTP (docs/guides/handlers.md tells which status says what).
 *
 *     npm ci && npm run build
 *     DATABASE_URL=postgresql:///app FUNCTION_NAME=orders BATON_TOKEN=... PORT=8080 npm run http
 *
 * Answer at once, reconcile first, initialise in the background, accept, and only then work.
 */
import { randomUUID, timingSafeEqual } from "node:crypto";
import { createServer, type IncomingMessage } from "node:http";
import { json as readJson } from "node:stream/consumers";
import { setTimeout as sleep } from "node:timers/promises";
import pg from "pg";
import { type Arguments, json, one, type Row, type Verb } from "./baton.ts";
import { bodies, workflows } from "./orders.ts";
import { DATABASE, log, Worker } from "./worker.ts";

const FUNCTION = process.env.FUNCTION_NAME ?? "orders";
if (!process.env.BATON_TOKEN) throw new Error("BATON_TOKEN is missing: what callers send as bearer token");
const TOKEN = Buffer.from(`Bearer ${process.env.BATON_TOKEN}`);
const UUID = /^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$/i;

const pool = new pg.Pool({ ...DATABASE, max: 2, options: "-c statement_timeout=5s" });
pool.on("error", () => {}); // an idle connection broke: the next call opens another

const shutdown = new AbortController();
let worker: Worker | undefined;
let working: Promise<void> | undefined;
let starting: Promise<void> | undefined;
let newest = ""; // the invocation with which an initialisation that is under way accepts

/** A handshake verb, asked once more if the connection broke: its answer may be lost, and repeating it is harmless. */
async function ask<V extends Verb>(verb: V, values: Arguments<V>): Promise<Row<V>> {
  return one(pool, verb, values).catch((error) => {
    if (error instanceof pg.DatabaseError) throw error;
    return one(pool, verb, values);
  });
}

async function initialise(signal: AbortSignal): Promise<void> {
  await sleep(1000 * Number(process.env.BOOT_SECONDS ?? 0), undefined, { signal }); // the application's own start
}

async function start(): Promise<void> {
  const worker_id = randomUUID();
  try {
    await initialise(shutdown.signal);
    let answer: Row<"accept_worker_invocation">;
    let invocation_id: string;
    do {
      invocation_id = newest; // a newer request may have come in the meantime
      const values = { function_name: FUNCTION, invocation_id, worker_id, version: "1" };
      answer = await ask("accept_worker_invocation", values);
    } while (invocation_id !== newest);
    log(answer.outcome, answer.reason ?? "", worker_id);
    if (answer.outcome !== "accepted") return; // only an accepted worker may process anything
    worker?.stop("replaced"); // the database does not count on it any more
    worker = new Worker(worker_id, { queue: process.env.QUEUE_NAME ?? FUNCTION, workflows, bodies });
    working = worker.work();
  } catch (error) {
    log("not started:", error);
    const dismissal = { function_name: FUNCTION, invocation_id: newest, reason: String(error) };
    await ask("dismiss_worker_invocation", dismissal).catch(() => {}); // unsaid, it costs the pending timeout
  } finally {
    starting = undefined;
  }
}

/** Reconcile first, always, whatever this process believes about itself. */
async function answer(request: IncomingMessage): Promise<[number, object]> {
  const token = Buffer.from(request.headers.authorization ?? "");
  if (token.length !== TOKEN.length || !timingSafeEqual(token, TOKEN)) return [401, { status: "unauthorised" }];
  let { invocation_id } = ((await readJson(request).catch(() => ({}))) ?? {}) as { invocation_id?: string };
  if (invocation_id !== undefined && !UUID.test(invocation_id)) return [400, { status: "malformed" }];
  if (!invocation_id) { // a person, or a local run: reserve like everybody else
    const reserved = await ask("reserve_worker_invocation", { function_name: FUNCTION });
    if (!reserved.invocation_id)
      return [{ ready: 200, pending: 202, throttled: 429 }[reserved.outcome] ?? 409, { status: reserved.outcome }];
    invocation_id = reserved.invocation_id;
  }
  const values = { function_name: FUNCTION, invocation_id, worker_id: worker?.stopping ? undefined : worker?.id };
  const { outcome, reason } = await ask("reconcile_worker_invocation", values);
  if (outcome !== "start") return [outcome === "ready" ? 200 : 409, { status: outcome, reason }];
  if (shutdown.signal.aborted) return [502, { status: "shutting down" }];
  newest = invocation_id;
  starting ??= start();
  return [202, { status: "starting", invocation_id }];
}

const server = createServer(async (request, response) => {
  // A refusal (no grant, no such function) dismisses the start; a database that can't be reached does not.
  const [status, body] = await answer(request).catch((error): [number, object] =>
    [error instanceof pg.DatabaseError ? 500 : 502, { status: String(error) }]);
  response.writeHead(status, { "content-type": "application/json" }).end(json(body));
});
server.listen(Number(process.env.PORT ?? 8080), process.env.HOST ?? "127.0.0.1");

process.once("SIGTERM", async () => {
  server.close();
  shutdown.abort(new Error("shutting down"));
  await starting;
  worker?.stop("SIGTERM");
  await working;
  await pool.end();
});
