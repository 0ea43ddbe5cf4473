#!/usr/bin/env python3
"""A stand-in for PostgREST: of it, only how a function is called.

    postgrest.py DSN PORT TOKEN=ROLE...

POST /rpc/NAME is one transaction: `set local role`, and one select of the function of the schema that Content-Profile
names, its arguments by name, taken out of the JSON body as their types say. A function with output columns
answers an object, any other a value, and one that returns a set a list of them. An error of the database is its code, message and hint under the status that PostgREST gives
it. Of a token only the role is known, by a table in place of a signature; filters, schema cache and all else are not here.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg
from psycopg import sql

FUNCTION = """
    select p.proretset, p.proargmodes && '{b,o,t}' as is_row, a.name, format_type(a.type, null) as type
    from pg_proc as p
    left join lateral unnest(p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes)
      as a (name, type, mode) on coalesce(a.mode, 'i') in ('i', 'b') and a.name = any (%s)
    where p.proname = %s and p.pronamespace = (select n.oid from pg_namespace as n where n.nspname = %s)
"""
STATUS = {"42501": 403, "42883": 404, "25006": 405, "23505": 409, "25": 500, "40": 500, "53": 503, "54": 500, "57": 500}


def status_of(error):
    return STATUS.get(error.sqlstate) or STATUS.get((error.sqlstate or "57")[:2], 400)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        role = self.server.roles.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        schema, name = self.headers.get("Content-Profile", "api"), self.path.removeprefix("/rpc/")
        if not role:
            return self.answer(401, {"code": "PGRST301", "message": "no such token"})
        try:
            with psycopg.connect(self.server.dsn) as db:
                return self.answer(200, self.call(db, role, schema, name, body.decode()))
        except psycopg.Error as error:
            return self.answer(status_of(error), {
                "code": error.sqlstate, "message": error.diag.message_primary, "hint": error.diag.message_hint})

    def call(self, db, role, schema, name, body):
        db.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))
        given = list(json.loads(body or "{}"))
        rows = db.execute(FUNCTION, (given, name, schema)).fetchall()
        arguments = {argument: kind for _, _, argument, kind in rows if argument}
        if not rows or len(arguments) < len(given):
            raise psycopg.errors.UndefinedFunction(f"no function {schema}.{name} with {given}")
        is_set, is_row = rows[0][:2]
        one = "to_json(t)" if is_row else "to_json(t.value)"
        query = sql.SQL("select {one} from (select r.* from {body} cross join lateral {function}({given}) as r{name}) as t").format(
            one=sql.SQL(f"coalesce(json_agg({one}), '[]')" if is_set else one),
            body=sql.SQL("json_to_record(%s) as b ({})").format(sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(argument), sql.SQL(kind)) for argument, kind in arguments.items())
            ) if arguments else sql.SQL("(select) as b"),
            function=sql.Identifier(schema, name),
            given=sql.SQL(", ").join(sql.SQL("{0} => b.{0}").format(sql.Identifier(argument)) for argument in arguments),
            name=sql.SQL("" if is_row else " (value)"))
        return db.execute(query, (body,) if arguments else None).fetchone()[0]

    def answer(self, status, content):
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def main():
    dsn, port, *tokens = sys.argv[1:]
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.daemon_threads = True
    server.dsn, server.roles = dsn, dict(token.split("=") for token in tokens)
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
