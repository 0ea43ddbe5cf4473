"""The reference worker: an HTTP function that pg_baton starts, which then consumes its queue.

    FUNCTION_NAME=orders DATABASE_URL=postgresql:///app BATON_TOKEN=... PORT=8080 python docs/examples/worker_http.py

Answer at once, reconcile first, initialise in the background, accept, and only then process; heartbeat, drain, stop.
Which HTTP status says what stands in docs/guides/handlers.md. Needs psycopg, starlette and uvicorn.
"""
import asyncio
import contextlib
import functools
import hmac
import json
import os
import signal
import sys
import uuid

import psycopg
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

FUNCTION = os.environ["FUNCTION_NAME"]
QUEUE = os.environ.get("QUEUE_NAME", FUNCTION)
DATABASE_URL = os.environ.get("DATABASE_URL", "")
TOKEN = os.environ["BATON_TOKEN"]  # what the caller sends as `Authorization: Bearer ...`
BOOT_SECONDS = float(os.environ.get("BOOT_SECONDS", "0"))
HEARTBEAT_SECONDS = float(os.environ.get("HEARTBEAT_SECONDS", "5"))  # well below the function's heartbeat_timeout
POLL_SECONDS = float(os.environ.get("POLL_SECONDS", "1"))
log = functools.partial(print, file=sys.stderr, flush=True)


async def initialise():
    await asyncio.sleep(BOOT_SECONDS)  # the application's own start: load what it needs, check what it needs


async def handle(message):  # the application's own work; it may run twice for a message, so make it idempotent
    await asyncio.sleep(float((message["payload"] or {}).get("seconds", 0)))
    log("handled", json.dumps(message["payload"]))


class Database:
    """One connection, opened when it is needed. Verbs are single statements: no transaction is ever left open."""

    def __init__(self):
        self.connection, self.opening = None, asyncio.Lock()

    async def call(self, sql, *arguments):
        """One verb, asked once more if the connection broke: its answer may be lost, and repeating it is harmless."""
        for last in (False, True):
            try:
                async with self.opening:
                    if self.connection is None or self.connection.closed:
                        self.connection = await psycopg.AsyncConnection.connect(  # poolers want nothing prepared
                            DATABASE_URL, autocommit=True, connect_timeout=5, row_factory=psycopg.rows.dict_row,
                            client_encoding="utf8", options="-c statement_timeout=5s", prepare_threshold=None)
                return await (await self.connection.execute(sql, arguments)).fetchone()
            except psycopg.OperationalError:
                if last or not (self.connection is None or self.connection.closed):
                    raise  # a timeout, or no database: not a lost connection


class Worker:
    """What an acceptance allows to run: heartbeats, and one message after the other."""

    def __init__(self, worker_id):
        self.worker_id, self.database = worker_id, Database()
        self.receipt, self.draining = None, False  # the message in hand; whether to claim another one
        self.task = asyncio.create_task(self.run())

    async def run(self):
        beat = asyncio.create_task(self.heartbeat())
        while not self.draining:
            try:
                busy = await self.work()
            except psycopg.Error as error:
                busy = log("database:", error)
            await asyncio.sleep(0 if busy else POLL_SECONDS)
        beat.cancel()
        with contextlib.suppress(psycopg.Error):  # if it can't be said, the heartbeat timeout says it
            await self.database.call("select * from baton.stop_worker(%s)", self.worker_id)
        log("stopped", self.worker_id)

    async def work(self):
        if not (message := await self.database.call("select * from baton.claim(%s, %s)", QUEUE, self.worker_id)):
            return False
        self.receipt = receipt = message["message_id"], message["delivery"]
        try:
            await handle(message)
        except Exception as error:
            await self.database.call("select * from baton.fail(%s, %s, %s)", *receipt, repr(error))
        else:
            await self.database.call("select * from baton.ack(%s, %s)", *receipt)
        finally:
            self.receipt = None
        return True

    async def heartbeat(self):
        while True:
            try:
                if self.receipt:
                    await self.database.call("select * from baton.extend(%s, %s)", *self.receipt)
                answer = await self.database.call("select * from baton.heartbeat(%s)", self.worker_id)
                self.draining |= answer["outcome"] != "active"  # stopping, deprecated, stopped, unknown
            except psycopg.Error as error:
                log("database:", type(error).__name__)
            await asyncio.sleep(HEARTBEAT_SECONDS)


class Runtime:
    """This process: at most one initialisation at a time, and at most one worker that claims."""

    def __init__(self):
        self.database, self.shutting_down = Database(), False
        self.worker = self.starting = self.invocation_id = None

    async def request(self, invocation_id):
        """Answer one request to start: reconcile first, always, whatever this process believes about itself."""
        if invocation_id is None:  # a person, or a local run: reserve like everybody else
            answer = await self.database.call("select * from baton.reserve_worker_invocation(%s)", FUNCTION)
            if (outcome := answer["outcome"]) != "reserved":
                return {"ready": 200, "pending": 202, "throttled": 429}.get(outcome, 409), {"status": outcome}
            invocation_id = answer["invocation_id"]
        answer = await self.database.call(
            "select * from baton.reconcile_worker_invocation(%s, %s, %s)", FUNCTION, invocation_id,
            self.worker.worker_id if self.worker and not self.worker.draining else None)
        if answer["outcome"] != "start":
            return {"ready": 200, "rejected": 409}[answer["outcome"]], {
                "status": answer["outcome"], "reason": answer["reason"], "worker_id": str(answer["worker_id"] or "")}
        if self.shutting_down:
            return 502, {"status": "shutting down"}
        self.invocation_id = invocation_id  # the newest: an initialisation that is under way accepts with this one
        if self.starting is None:
            self.starting = asyncio.create_task(self.start())
        return 202, {"status": "starting", "invocation_id": str(invocation_id)}

    async def start(self):
        worker_id, tried = uuid.uuid4(), None
        try:
            await asyncio.wait_for(initialise(), 60)  # the pending timeout: later it would be refused anyway
            while tried != self.invocation_id:
                tried = self.invocation_id
                answer = await self.database.call(
                    "select * from baton.accept_worker_invocation(%s, %s, %s, %s)", FUNCTION, tried, worker_id, "1")
            log(answer["outcome"], answer["reason"] or "", worker_id)
            if answer["outcome"] == "accepted":  # only then may anything be processed
                if self.worker:
                    self.worker.draining = True  # the database no longer counts on the former one
                self.worker = Worker(worker_id)
        except (Exception, asyncio.CancelledError) as error:
            log("not started:", type(error).__name__)
            with contextlib.suppress(psycopg.Error):  # unsaid, it costs the pending timeout
                await self.database.call("select * from baton.dismiss_worker_invocation(%s, %s, %s)", FUNCTION,
                                         self.invocation_id, repr(error))
        finally:
            self.starting = None

    async def shut_down(self):
        self.shutting_down = True
        if starting := self.starting:
            starting.cancel("shutting down")
            await asyncio.wait([starting])
        if worker := self.worker:
            worker.draining = True
            with contextlib.suppress(psycopg.Error):  # a replacement may start while this finishes its message
                await self.database.call("select * from baton.stop_worker(%s, draining => true)", worker.worker_id)
            await worker.task


runtime = Runtime()


async def start(request):
    if not hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {TOKEN}".encode()):
        return JSONResponse({"status": "unauthorised"}, 401)
    try:
        body = json.loads(await request.body() or b"{}")
        invocation_id = uuid.UUID(body["invocation_id"]) if body.get("invocation_id") else None
    except (ValueError, TypeError, AttributeError):
        return JSONResponse({"status": "malformed"}, 400)
    try:
        status, answer = await runtime.request(invocation_id)
    except psycopg.Error as error:  # a refusal (no grant, no such function) dismisses the start; no database does not
        status, answer = 502 if isinstance(error, psycopg.OperationalError) else 500, {"status": type(error).__name__}
    return JSONResponse(answer, status)


@contextlib.asynccontextmanager
async def lifespan(_):
    yield
    await runtime.shut_down()  # SIGTERM: the listener is closed already


app = Starlette(routes=[Route("/{path:path}", start, methods=["POST"])], lifespan=lifespan)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn drains, then raises the signal once more
    uvicorn.run(app, host=os.environ.get("HOST", "127.0.0.1"), port=int(os.environ.get("PORT", "8080")))
