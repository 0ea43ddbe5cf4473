#!/usr/bin/env python3
"""The worker of the pg_net stand-in: sends what net.http_request_queue holds, for one database.

    pg_net_sender.py DSN

One transaction a batch, as pg_net does it: at most 200 requests leave the queue, all are sent at once, and only when
the last one is answered or out of time do the responses appear and does the next batch begin. A sender that fails in
between has sent them, and sends them again. It sleeps until a commit wakes it, and ends when the server stays away for
half a minute.
"""

import asyncio
import socket
import sys

import httpx
import psycopg
from psycopg.types.json import Jsonb

BATCH_SIZE = 200
PAUSE = 1.0
RECONNECT_FOR = 30.0

TAKE = """
    with rows as (select q.id from net.http_request_queue as q order by q.id limit %s)
    delete from net.http_request_queue as q using rows where q.id = rows.id
    returning q.id, q.method, q.url, q.timeout_milliseconds, q.body,
      array(select array[h.key, h.value] from jsonb_each_text(q.headers) as h where h.value <> '')
"""
EXPIRE = """
    delete from net._http_response as r
    where r.created < now() - coalesce(nullif(current_setting('pg_net.ttl', true), ''), '6 hours')::interval
"""
ANSWER = """
    insert into net._http_response (id, status_code, content_type, headers, content, timed_out, error_msg)
    values (%s, %s, %s, %s, %s, %s, %s)
"""


def error_text(error):
    """What curl calls this error."""
    cause = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "Couldn't resolve host name"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.ConnectError):
        return "SSL connect error" if "SSL" in str(error) else "Couldn't connect to server"
    if isinstance(error, httpx.RemoteProtocolError):
        if "incomplete message body" in str(error) or "peer closed connection" in str(error):
            return "Transferred a partial file"
        return "Server returned nothing (no headers, no data)"
    if isinstance(error, httpx.TooManyRedirects):
        return "Number of redirects hit maximum amount"
    if isinstance(error, (httpx.UnsupportedProtocol, httpx.InvalidURL)):
        return "Unsupported protocol"
    if isinstance(error, httpx.WriteError):
        return "Failed sending data to the peer"
    return "Failure when receiving data from the peer"


async def send(http, method, url, timeout, body, headers):
    """Everything of a response row but its id."""
    headers = {name: value.encode() for name, value in headers}
    if not any(name.lower() == "user-agent" for name in headers):
        headers["User-Agent"] = b"pg_net/standin"
    try:
        async with asyncio.timeout(timeout / 1000 if timeout else None):
            response = await http.request(method.upper(), url, headers=headers, content=body)
    except TimeoutError:
        return None, None, None, None, True, f"Timeout of {timeout} ms reached. Total time: {timeout}.000000 ms"
    except Exception as error:  # whatever it was, a request always gets its response row
        return None, None, None, None, False, error_text(error)
    content = response.content.split(b"\0")[0].decode("utf-8", "replace")
    received = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers.raw}
    return response.status_code, response.headers.get("content-type"), Jsonb(received), content or None, False, None


async def send_batch(connection, http):
    """Send one batch; true if there was one."""
    async with connection.transaction():
        await connection.execute(EXPIRE)
        rows = await (await connection.execute(TAKE, [BATCH_SIZE])).fetchall()
        answers = await asyncio.gather(*(send(http, *row[1:]) for row in rows))
        for row, answer in zip(rows, answers, strict=True):
            await connection.execute(ANSWER, [row[0], *answer])
    return bool(rows)


async def serve(connection, http):
    """Until net.worker_restart() is called."""
    await connection.execute("listen pg_net_standin")
    while True:
        sent = await send_batch(connection, http)
        async for notify in connection.notifies(timeout=PAUSE if sent else None, stop_after=1):
            if notify.payload == "restart":
                return


async def main(dsn):
    loop = asyncio.get_running_loop()
    last_seen = loop.time()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, follow_redirects=True, trust_env=False, limits=limits) as http:
        http.headers = {}
        while loop.time() - last_seen < RECONNECT_FOR:
            try:
                async with await psycopg.AsyncConnection.connect(
                    dsn, autocommit=True, application_name="pg_net standin"
                ) as connection:
                    try:
                        await serve(connection, http)
                    finally:
                        last_seen = loop.time()
            except psycopg.Error as error:
                print(f"pg_net standin: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
