/**
 * A worker that others start: systemd, Kubernetes, a shell. Its function is registered before it starts:
 *
 *     select * from baton.register_worker_function('orders', start_mode => 'process');
 *
 *     npm ci && npm run build
 *     DATABASE_URL=postgresql:///app FUNCTION_NAME=orders npm run process
 */
import { randomUUID } from "node:crypto";
import pg from "pg";
import { one } from "./baton.ts";
import { bodies, workflows } from "./orders.ts";
import { DATABASE, log, Worker } from "./worker.ts";

const db = new pg.Client(DATABASE);
await db.connect();
const worker = new Worker(randomUUID(), { queue: process.env.QUEUE_NAME ?? "orders", workflows, bodies });
const function_name = process.env.FUNCTION_NAME ?? "orders";
const { outcome, reason } = await one(db, "register_worker", { worker_id: worker.id, function_name, version: "1" });
await db.end();
if (outcome !== "registered") throw new Error(`not registered: ${reason}`);
log("registered", worker.id);
for (const signal of ["SIGTERM", "SIGINT"] as const) process.on(signal, () => worker.stop(signal));
await worker.work();
