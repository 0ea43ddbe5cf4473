// pg-boss in its own process: node bench_pgboss.js ACTION ...
const PgBoss = require("pg-boss");

const data = { n: 1 };

// A loop of fetch and complete: work() asks only every half second.
async function work(boss, jobs, batch) {
  let first, last;
  for (let done = 0; done < jobs;) {
    const fetched = await boss.fetch("bench", { batchSize: batch });
    if (fetched.length === 0) throw new Error(`${done} of ${jobs}`);
    last = process.hrtime.bigint();
    first ??= last;
    await boss.complete("bench", fetched.map((job) => job.id));
    done += fetched.length;
  }
  return { seconds: Number(last - first) / 1e9 };
}

async function main([action, ...numbers]) {
  const [jobs, concurrency, batch] = numbers.map(Number);
  const boss = new PgBoss({
    connectionString: process.env.DATABASE_URL, supervise: false, schedule: false, migrate: action === "schema",
  });
  await boss.start();
  if (action === "schema") await boss.createQueue("bench");
  let answer = null;
  if (action === "sample") {
    if (jobs === 1) await boss.send("bench", data);
    else await boss.insert(Array.from({ length: jobs }, () => ({ name: "bench", data })));
    await work(boss, jobs, jobs);
  }
  if (action === "work") answer = await work(boss, jobs, batch);
  await boss.stop({ graceful: false });
  console.log(JSON.stringify(answer));
}

main(process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
