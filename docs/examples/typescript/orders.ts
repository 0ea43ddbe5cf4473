/** The application's own part: its bodies and its workflows. */
import { setTimeout as wait } from "node:timers/promises";
import { Failed, type Run, StepFailed, type Task } from "./workflow.ts";

// Run, step and index are the same at each attempt: a key by which others recognise what they have done already.
async function charge(amount: number, { run_id, step_slug, signal }: Task) {
  await wait(20, undefined, { signal }); // fetch(url, { signal }) and the like: they stop when they are asked to
  return { payment: `${run_id}/${step_slug}`, amount };
}

function pack(item: string, { attempt }: Task) {
  return { box: `${item}-${attempt}` };
}

async function order(run: Run) {
  const { amount, items } = run.input as { amount: number; items: string[] };
  try {
    const [payment, boxes] = await Promise.all([run.step(charge, amount, { maxAttempts: 5 }), run.map(pack, items)]);
    return { payment, boxes };
  } catch (error) {
    throw error instanceof StepFailed ? new Failed({ "not delivered": error.detail }) : error;
  }
}

async function ship(run: Run) {
  const price = 10 * run.input.items;
  const paid = await run.signal<{ amount: number }>("paid");
  if (paid.amount < price) throw new Failed({ missing: price - paid.amount });
  await run.sleep("until it may be returned", run.input.seconds ?? 60);
  return { total: price, parcel: run.record("parcel", () => Math.random().toString(36).slice(2)) };
}

export const bodies = { charge, pack };
export const workflows = { order, ship };
