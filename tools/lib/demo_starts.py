"""Act one: worker starts.

The fleet is one that was seen in production: 20 functions that take 13 to 16 seconds to boot, a tick every 5 seconds,
a debounce of 6. Beside them stand functions with one trouble each. The platform below plays a serverless host: every
request that it gets may start a fresh runtime, a task of this process; only a runtime that is killed is a process.

The same fleet runs twice at the same time, each over its own database and its own tools/sender: once with pg_baton as
it is, and once with a reservation that knows only the debounce (debounce_only.sql) and runtimes that register when
they are up, as before there was a handshake.
"""
import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from pathlib import Path

import httpx
import uvicorn
from rich import box
from rich.console import Group
from rich.table import Table
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import demo_stage
from cluster import Cluster, find_bindir, has_extension

FLEET = [f"fleet-{number:02}" for number in range(1, 21)]
TOKEN = "only-for-this-demo"
TROUBLES = {
    "flaky": "its first two boots fail",
    "lost": "its first request is lost",
    "twice": "its request arrives twice",
    "manual": "somebody starts it by hand, too",
    "killed": "its first worker is killed",
}


class Side:
    """One database, its sender, and the runtimes that are started for it."""

    def __init__(self, dbname, handshake, times):
        self.dbname, self.handshake, self.times = dbname, handshake, times
        self.functions = [*FLEET, *(TROUBLES if handshake else (f for f in TROUBLES if f != "killed"))]
        self.requests = defaultdict(list)  # the ids that the sender brought, a function
        self.boots, self.failed, self.refused = Counter(), Counter(), Counter()
        self.booting, self.most = Counter(), Counter()  # now; the most live workers that were ever seen at once
        self.accepted = Counter()
        self.state, self.alive = {}, Counter()
        self.tasks, self.errors = set(), []

    async def connect(self, cluster):
        self.runtimes, self.watcher, self.ticker = [await demo_stage.connect(cluster, self.dbname) for _ in range(3)]

    async def verb(self, sql, *arguments):
        return await (await self.runtimes.execute(sql, arguments)).fetchone()

    def spawn(self, coroutine):
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.ended)

    def ended(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and task.exception():
            self.errors.append(task.exception())

    # The platform and its runtimes

    async def request(self, function, body, by_hand):
        if not by_hand:
            self.requests[function].append(body["invocation_id"])
        if function == "lost" and len(self.requests[function]) == 1:
            return 202, {"status": "the platform took it and lost it"}
        if function == "killed":
            return await self.killed.forward(body)
        if function == "twice" and len(self.requests[function]) == 1:
            self.spawn(self.runtime_request(function, body))
        return await self.runtime_request(function, body)

    async def runtime_request(self, function, body):
        """What a fresh runtime does with a request: docs/examples/worker_http.py in short."""
        if not self.handshake:
            self.spawn(self.boot(function, None))
            return 200, {"status": "started"}
        invocation_id = body.get("invocation_id")
        if invocation_id is None:
            answer = await self.verb("select * from baton.reserve_worker_invocation(%s)", function)
            if answer["outcome"] != "reserved":
                return 202, {"status": answer["outcome"]}
            invocation_id = answer["invocation_id"]
        answer = await self.verb("select * from baton.reconcile_worker_invocation(%s, %s)", function, invocation_id)
        if answer["outcome"] == "start":
            self.spawn(self.boot(function, invocation_id))
        return {"start": 202, "ready": 200, "rejected": 409}[answer["outcome"]], {"status": answer["outcome"]}

    async def boot(self, function, invocation_id):
        self.boots[function] += 1
        number = self.boots[function]
        self.booting[function] += 1
        seconds = random.Random(f"{function} {number}").uniform(*self.times.boot)
        worker_id = uuid.uuid4()
        try:
            if function == "flaky" and number <= 2:
                await asyncio.sleep(seconds / 2)
                self.failed[function] += 1
                if invocation_id:
                    await self.verb("select * from baton.dismiss_worker_invocation(%s, %s, %s)", function,
                                    invocation_id, f"boot {number} failed")
                return
            await asyncio.sleep(seconds)
            if invocation_id:
                answer = await self.verb("select * from baton.accept_worker_invocation(%s, %s, %s, %s)", function,
                                         invocation_id, worker_id, "demo")
                if answer["outcome"] == "rejected":
                    self.refused[function] += 1
                    return
            else:
                await self.verb("select * from baton.register_worker(%s, %s, %s)", worker_id, function, "demo")
        finally:
            self.booting[function] -= 1
        while True:
            await self.verb("select * from baton.heartbeat(%s)", worker_id)
            await asyncio.sleep(self.times.heartbeat)

    # The clock and the view

    async def tick(self):
        next_at = time.monotonic()
        while True:
            await self.ticker.execute("select baton.tick()")
            next_at = max(next_at + self.times.tick, time.monotonic())
            await asyncio.sleep(next_at - time.monotonic())

    async def look(self):
        rows = await (await self.watcher.execute(
            "select w.function_name, w.startup_state from baton.worker_startup as w")).fetchall()
        self.state = {row["function_name"]: row["startup_state"] for row in rows}
        rows = await (await self.watcher.execute(
            "select w.function_name, count(*) as accepted, count(*) filter (where w.stopped_at is null"
            " and w.last_heartbeat_at > clock_timestamp() - f.heartbeat_timeout) as alive"
            " from baton.workers as w join baton.worker_functions as f using (function_name) group by 1")).fetchall()
        self.accepted = Counter({row["function_name"]: row["accepted"] for row in rows})
        self.alive = Counter({row["function_name"]: row["alive"] for row in rows})
        self.most |= self.alive
        row = await (await self.watcher.execute("select s.last_tick_at from baton.state as s")).fetchone()
        return row["last_tick_at"] if row else None

    @property
    def settled(self):
        return all(self.alive[f] for f in self.functions) and not any(self.booting.values())

    def sent(self, function):
        return len(set(self.requests[function]))

    def total(self, counter):
        return sum(counter[f] for f in self.functions)


class Times:
    """The times of production, divided."""

    def __init__(self, divisor):
        self.divisor = divisor
        self.tick, self.debounce, self.pending, self.silence, self.heartbeat = (
            seconds / divisor for seconds in (5, 6, 60, 30, 5))
        self.boot = 13 / divisor, 16 / divisor


class Reference:
    """The function whose worker is killed: docs/examples/worker_http.py in a process of its own."""

    def __init__(self, side, cluster, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = Path(folder, "worker.log")
        self.command = [sys.executable, demo_stage.ROOT / "docs/examples/worker_http.py"]
        self.environment = {
            "FUNCTION_NAME": "killed", "DATABASE_URL": cluster.dsn(side.dbname), "BATON_TOKEN": TOKEN,
            "PORT": str(self.port), "BOOT_SECONDS": str(side.times.boot[0]),
            "HEARTBEAT_SECONDS": str(side.times.heartbeat)}
        self.side, self.kills = side, 0
        side.killed = self

    async def listening(self):
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise RuntimeError("the reference worker did not start: " + self.log.read_text())

    async def live(self, first_up):
        """Run the process, kill it once its worker has sent a heartbeat, and run another one, as a platform does."""
        with demo_stage.process(self.command, self.environment, self.log) as child:
            await self.listening()
            first_up.set()
            while not await self.beating():
                await asyncio.sleep(0.1)
            child.kill()
            child.wait()
            self.kills += 1
        with demo_stage.process(self.command, self.environment, self.log):
            await asyncio.get_running_loop().create_future()

    async def forward(self, body):
        async with httpx.AsyncClient(trust_env=False) as http:
            try:
                answer = await http.post(f"http://127.0.0.1:{self.port}/", json=body,
                                         headers={"Authorization": f"Bearer {TOKEN}"})
            except httpx.TransportError:
                return 502, {"status": "not up"}
        return answer.status_code, answer.json()

    async def beating(self):
        row = await (await self.side.watcher.execute(
            "select count(*) as n from baton.workers as w"
            " where w.function_name = 'killed' and w.last_heartbeat_at > w.started_at")).fetchone()
        return row["n"] > 0


async def serve(sides):
    """The platform's front door: one HTTP server for both sides. Answers its address and the running server."""
    async def start(request):
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return JSONResponse({"status": "unauthorised"}, 401)
        side = sides[request.path_params["side"]]
        body = json.loads(await request.body() or b"{}")
        status, answer = await side.request(request.path_params["function"], body, "invocation_id" not in body)
        return JSONResponse(answer, status)

    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    app = Starlette(routes=[Route("/{side}/{function}", start, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1))
    server.capture_signals = contextlib.nullcontext  # Ctrl-C ends the demo, not only its server
    task = asyncio.create_task(server.serve([listener]))
    return f"http://127.0.0.1:{listener.getsockname()[1]}", server, task


async def register(side, base_url):
    await side.watcher.execute("update baton.settings set transport = 'outbox'")
    for function in side.functions:
        if function != "manual":
            await register_one(side, function, f"{base_url}/{side.dbname}/{function}")


async def register_one(side, function, url):
    t = side.times
    await side.watcher.execute(
        "select baton.register_worker_function(%s, url => %s, secret_name => 'demo', debounce => %s::interval,"
        " pending_timeout => %s::interval, heartbeat_timeout => %s::interval)",
        (function, url, f"{t.debounce} s", f"{t.pending} s", f"{t.silence} s"))


async def start_by_hand(side, base_url):
    """Just after a tick: register the function and start it, twice, without an invocation id."""
    url = f"{base_url}/{side.dbname}/manual"
    await register_one(side, "manual", url)
    async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        return [(await http.post(url)).json()["status"] for _ in range(2)]


def picture(side_by_side, clock, ticked_by):
    """The live table."""
    new, old = side_by_side
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("\nfunction", "left"), ("\ntrouble", "left"), ("pg_baton\nstarts sent", "right"),
                          ("\nbooting", "right"), ("\nlive workers", "right"), ("\nstate", "left"),
                          ("debounce only\nstarts sent", "right"), ("\nlive workers", "right")):
        table.add_column(name, justify=justify)

    def alive(side, functions):
        count, most = sum(side.alive[f] for f in functions), max(side.alive[f] for f in functions)
        return f"[bold red]{count}[/]" if most > 1 else f"[green]{count}[/]" if count else "0"

    for name, functions, trouble in [("fleet-01 to 20", FLEET, "13 to 16 s to boot"),
                                     *((f, [f], text) for f, text in TROUBLES.items())]:
        count = Counter(new.state.get(f, "-") for f in functions)
        states = ", ".join(f"{state} {n}" if len(functions) > 1 else state for state, n in sorted(count.items()))
        both = functions[0] in old.functions
        table.add_row(
            name, trouble, str(sum(new.sent(f) for f in functions)), str(sum(new.booting[f] for f in functions)),
            alive(new, functions), states, *((str(sum(map(old.sent, functions))), alive(old, functions)) if both else ()))
    digits = [" ".join(f"[bold red]{n}[/]" if (n := s.alive[f]) > 1 else str(n) for f in FLEET) for s in side_by_side]
    head = (f"{clock():5.1f} s, as {clock() * new.times.divisor:.0f} s in production; "
            f"pg_baton is ticked by {ticked_by}\ndebounce only: the same package with a reservation that does not ask whether a start is pending")
    return Group(head, table, f"live workers of each fleet function   pg_baton       {digits[0]}",
                 f"                                      debounce only  {digits[1]}\n")


def line(side_by_side, clock):
    new, old = side_by_side
    states = Counter(new.state.values())
    return (f"{clock():5.1f} s  pg_baton: {sum(map(new.sent, new.functions))} starts sent, "
            f"{', '.join(f'{n} {s}' for s, n in sorted(states.items()))}, {new.total(new.alive)} live workers"
            f" | debounce only: {sum(map(old.sent, old.functions))} starts sent, {old.total(old.alive)} live workers")


async def clock_of(side, use_cron):
    """Schedule the ticks: by pg_cron, which this answers in words, or by a task of this process."""
    if use_cron:
        version = await (await side.watcher.execute(
            "select extversion from pg_extension where extname = 'pg_cron'")).fetchone()
        seconds = tuple(map(int, version["extversion"].split("-")[0].split(".")[:2])) >= (1, 5)
        interval = "1 second"  # it knows whole seconds only
        answer = await side.watcher.execute("select * from baton.schedule(%s::interval)", (interval,))
        answer = await answer.fetchone()
        if answer["outcome"] == "scheduled":
            how = "" if seconds else ", inside one job a minute"
            return f"pg_cron {version['extversion']} every {interval}{how}"
    side.spawn(side.tick())
    return f"this program every {side.times.tick:.2f} seconds"


async def play(stage):
    times = Times(6 if stage.short else 4)
    new, old = Side("pg_baton", True, times), Side("debounce_only", False, times)
    bindir = find_bindir()
    use_cron = has_extension(bindir, "pg_cron") and not stage.short
    stage.say("Worker starts: 20 functions as seen in production (a tick every 5 s, debounce 6 s, boot 13 to 16 s),\n"
              f"and {len(TROUBLES)} with a trouble each. All times are divided by {times.divisor}: a tick every "
              f"{times.tick:.2f} s,\ndebounce {times.debounce:.2f} s, boot {times.boot[0]:.2f} to {times.boot[1]:.2f} s.")
    settings = {"shared_preload_libraries": "pg_cron", "cron.database_name": new.dbname} if use_cron else {}
    async with contextlib.AsyncExitStack() as stack:
        cluster = stack.enter_context(Cluster(bindir, settings=settings))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg_baton-demo-"))
        demo_stage.install(cluster, new.dbname, "create extension pg_cron" if use_cron else "")
        demo_stage.install(cluster, old.dbname, Path(__file__).with_name("debounce_only.sql").read_text())
        for side in (new, old):
            await side.connect(cluster)
        base_url, server, serving = await serve({side.dbname: side for side in (new, old)})
        killed, killed_up = Reference(new, cluster, folder), asyncio.Event()
        new.spawn(killed.live(killed_up))
        for side in (new, old):
            stack.enter_context(demo_stage.sender(cluster, side.dbname, Path(folder, side.dbname), {"DEMO": TOKEN}))
        await killed_up.wait()
        for side in (new, old):
            await register(side, base_url)
        try:
            await run(stage, new, old, base_url, use_cron)
            figures(stage, new, old, killed)
            if stage.wrong:
                await evidence(stage, new, folder)
        finally:
            server.should_exit = True
            await serving
            tasks = new.tasks | old.tasks
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            secret_seen = any(TOKEN in Path(folder, side.dbname).read_text() for side in (new, old))
        stage.check("the credential in a sender's output", "no", "yes" if secret_seen else "no")


async def run(stage, new, old, base_url, use_cron):
    ticked_by = await clock_of(new, use_cron)
    stage.say(f"pg_baton is ticked by {ticked_by}; debounce only by this program.")
    if "inside one job a minute" in ticked_by:
        stage.say(f"That job begins at the next full minute, in {60 - time.time() % 60:.0f} s.")
    first_tick = await new.look()
    deadline = time.monotonic() + 75
    while await new.look() == first_tick:
        if time.monotonic() > deadline:
            raise RuntimeError("the first tick did not come")
        await asyncio.sleep(0.05)
    clock = demo_stage.Clock()
    old.spawn(old.tick())
    for side in (new, old):
        side.by_hand = await start_by_hand(side, base_url)
    deadline = 150 / new.times.divisor
    settled_at = None
    async with stage.screen(lambda: picture((new, old), clock, ticked_by), lambda: line((new, old), clock)):
        while clock() < deadline:
            for side in (new, old):
                await side.look()
                if side.errors:
                    raise side.errors[0]
            # Over when all are up, the killed one again, and two more ticks have changed nothing.
            if not (new.settled and old.settled and new.accepted["killed"] >= 2):
                settled_at = None
            elif settled_at is None:
                settled_at = clock()
            elif clock() - settled_at > 2.5 * new.times.tick:
                break
            await asyncio.sleep(0.1)
    stage.check("all functions have a worker at the end", "yes", "yes" if settled_at is not None else "no")


def figures(stage, new, old, killed):
    def per_function(function):
        return f"{new.sent(function)} sent, {new.accepted[function]} accepted"

    fleet = Counter(per_function(f) for f in FLEET)
    stage.check("pg_baton: each of the 20 of the fleet", "1 sent, 1 accepted",
                "; ".join(sorted(fleet)), set(fleet) == {"1 sent, 1 accepted"})
    stage.check(f"pg_baton: flaky ({TROUBLES['flaky']})", "3 sent, 1 accepted", per_function("flaky"))
    stage.check(f"pg_baton: lost ({TROUBLES['lost']})", "2 sent, 1 accepted", per_function("lost"))
    stage.check(f"pg_baton: twice ({TROUBLES['twice']})", "1 sent, 1 accepted", per_function("twice"))
    stage.check("pg_baton: twice, boots and how many were refused", "2 booted, 1 refused",
                f"{new.boots['twice']} booted, {new.refused['twice']} refused")
    # A tick may come between the registration and the request by hand; then that one finds a start pending.
    by_hand = new.by_hand.count("start")
    stage.check(f"pg_baton: manual ({TROUBLES['manual']})", "1 by hand or sent, 1 accepted",
                f"{by_hand} by hand, {per_function('manual')}",
                by_hand + new.sent("manual") == 1 == new.accepted["manual"])
    stage.check("pg_baton: manual, the second request by hand", "pending", new.by_hand[1])
    stage.check(f"pg_baton: killed ({TROUBLES['killed']})", "1 killed, 2 sent, 2 accepted",
                f"{killed.kills} killed, {per_function('killed')}")
    twins = [f for f in new.functions if new.most[f] > 1]
    stage.check("pg_baton: functions that ever had two live workers", 0, len(twins))
    many = sum(old.alive[f] > 1 for f in FLEET)
    stage.check("debounce only: of the 20, with two live workers or more", "15 or more", many, many >= 15)
    sent = sum(map(old.sent, FLEET))
    stage.check("debounce only: starts sent to the 20", "35 or more", sent, sent >= 35)
    extra = old.total(old.alive) - len(old.functions)
    stage.check("debounce only: live workers that nobody needs", "15 or more", extra, extra >= 15)


async def evidence(stage, side, folder):
    stage.say("What pg_baton noted:")
    rows = await side.watcher.execute("select i.at::time(1), i.kind, i.function_name, i.detail"
                                      " from baton.incidents as i order by i.at limit 40")
    for row in await rows.fetchall():
        stage.say(f"  {row['at']} {row['kind']} {row['function_name']} {row['detail']}")
    for file in sorted(Path(folder).iterdir()):
        stage.say(f"The end of the output of {file.name}:")
        for text in file.read_text().splitlines()[-15:]:
            stage.say("  " + text)
