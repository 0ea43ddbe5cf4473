// graphile-worker in its own process: node bench_graphile.js ACTION ...
const { makeWorkerUtils, run, Logger } = require("graphile-worker");

const connectionString = process.env.DATABASE_URL;
const logger = new Logger(() => () => {});

// Works off what is there with the library's own worker; the seconds from the first body to the last.
async function work(jobs, concurrentJobs, batch) {
  let first, last, done = 0, finish;
  const finished = new Promise((resolve) => { finish = resolve; });
  const bench = async () => {
    last = process.hrtime.bigint();
    first ??= last;
    if (++done === jobs) finish();
  };
  const worker = { concurrentJobs };
  if (batch > 1) Object.assign(worker, { localQueue: { size: batch }, completeJobBatchDelay: 0 });
  const runner = await run({
    connectionString, logger, noHandleSignals: true, taskList: { bench }, preset: { worker },
  });
  await finished;
  await runner.stop();
  return { seconds: Number(last - first) / 1e9 };
}

async function main([action, ...numbers]) {
  const [jobs, concurrency, batch] = numbers.map(Number);
  const utils = await makeWorkerUtils({ connectionString, logger });
  if (action === "schema") await utils.migrate();
  let answer = null;
  if (action === "sample") {
    if (jobs === 1) await utils.addJob("bench", { n: 1 });
    else await utils.addJobs(Array.from({ length: jobs }, () => ({ identifier: "bench", payload: { n: 1 } })));
    await work(jobs, jobs, jobs);
  }
  if (action === "work") answer = await work(jobs, concurrency, batch);
  await utils.release();
  console.log(JSON.stringify(answer));
}

main(process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
