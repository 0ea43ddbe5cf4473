"""A secret goes into one header and nowhere else.

Every test ends by looking for it: in the server's log (with every statement logged, and errors in full), in what the
verbs answered, in notices and errors that the client saw, in every view, and in every table but its own place and
pg_net's queue.
"""

import json

import psycopg
import pytest
import standin
from starts import call, function, register

SECRET = 'tok-"quoted"\\back-xyzzy-sesame'
MULTI_LINE = "tok-first-line-xyzzy\nsecond-line-sesame"
PIECES = ("xyzzy", "sesame")
LOUD = ("-c log_statement=all -c log_min_messages=debug1 -c log_min_error_statement=debug5"
        " -c log_error_verbosity=verbose -c log_duration=on"
        " -c log_parameter_max_length=-1 -c log_parameter_max_length_on_error=-1")
QUIET = ("-c log_statement=none -c log_min_messages=fatal -c log_min_error_statement=panic"
         " -c log_min_duration_statement=-1 -c log_duration=off")


class Leak:
    """A database whose secrets are put in silently, and everything that comes out of it."""

    def __init__(self, db, server_log, place, transport):
        self.db, self.server_log, self.place, self.seen = db, server_log, place, []
        self.quiet = db.connect(options=QUIET)
        if names := {"pg_net", "vault"} & {place, transport}:
            standin.install(self.quiet, *names)
        self.quiet.execute("update baton.settings set transport = %s", (transport,))
        self.quiet.close()
        self.quiet = db.connect(options=QUIET)
        self.conn = db.connect(options=LOUD)
        self.conn.add_notice_handler(lambda notice: self.seen.append(
            [notice.message_primary, notice.message_detail, notice.message_hint, notice.context]))

    def store(self, secret, name="key"):
        if self.place == "vault":
            self.quiet.execute("select vault.create_secret(%s, %s)", (secret, name))
        else:
            self.quiet.execute("insert into baton.secrets values (%s, %s)", (name, secret))

    def call(self, verb, **arguments):
        try:
            rows = call(self.conn, verb, **arguments)
        except psycopg.Error as error:
            self.seen.append([str(error), *(getattr(error.diag, field) for field in (
                "message_primary", "message_detail", "message_hint", "context", "internal_query"))])
            return []
        self.seen.append(rows)
        return rows

    def everything(self):
        """Run all that reads, and give all that was seen, as one text."""
        for verb in ("health", "tick", "ensure_workers"):
            self.call(verb)
        for (name,) in self.conn.execute("""
            select c.relname from pg_class as c
            where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'v') and c.relname <> 'secrets'
        """).fetchall():
            self.seen.append([name, self.conn.execute(f"select r::text from baton.{name} as r").fetchall()])
        return json.dumps(self.seen, default=str)

    def assert_none(self):
        told, log = self.everything(), self.server_log.text()
        assert "ensure_workers" in log, "the statements are in the log"
        for piece in PIECES:
            assert piece not in told
            assert piece not in log


@pytest.fixture(params=["pg_net", "outbox"])
def transport(request):
    return request.param


@pytest.fixture(params=["vault", "baton.secrets"])
def leak(request, db, server_log, transport):
    return Leak(db, server_log, request.param, transport)


def test_a_good_secret_is_in_the_authorization_header_alone(leak, transport):
    leak.store(SECRET)
    register(leak.conn, secret_name="key")
    assert [row.outcome for row in leak.call("ensure_workers")] == ["reserved"]
    leak.call("claim_deliveries")
    leak.assert_none()
    if transport == "pg_net":
        [headers] = [row.headers for row in leak.quiet.execute("select headers from net.http_request_queue")]
        assert headers.pop("Authorization") == f"Bearer {SECRET}"
        assert not any(piece in json.dumps(headers) for piece in PIECES)


BAD = {
    "absent": (None, "missing or empty"),
    "empty": ("", "missing or empty"),
    "blank": ("  ", "missing or empty"),
    "two-lines": (MULTI_LINE, "more than one line"),
    "return": (SECRET + "\r", "more than one line"),
}


def test_a_secret_that_cannot_be_sent_is_named_and_not_shown(leak, transport):
    """Without it nothing is sent: an unauthenticated request would be worse. Over the outbox the sender has its own."""
    for name, (secret, _) in BAD.items():
        if secret is not None:
            leak.store(secret, name)
        register(leak.conn, name, secret_name=name)
    register(leak.conn, "public")
    rows = {row.function_name: row for row in leak.call("ensure_workers")}
    assert rows.keys() == BAD.keys() | {"public"}
    assert rows["public"].outcome == "reserved"
    for name, (_, problem) in BAD.items():
        if transport == "pg_net":
            assert rows[name].outcome == "error"
            assert problem in rows[name].detail and name in rows[name].detail
            assert function(leak.conn, name).invocation_error == "error"
        else:
            assert rows[name].outcome == "reserved"
    if transport == "pg_net":
        assert {h.subject for h in leak.call("health") if h.finding == "credential"} == BAD.keys()
        assert [row.url for row in leak.quiet.execute("select url from net.http_request_queue")] == [
            "http://127.0.0.1:9/public"]
    leak.assert_none()


def test_a_url_that_the_transport_refuses_is_an_error_of_its_function_alone(leak, transport):
    leak.store(SECRET)
    for name in ("bad-port", "bad-host", "good"):
        register(leak.conn, name, secret_name="key")
    leak.call("register_worker_function", function_name="bad-scheme", url="ftp://example.com")
    leak.call("register_worker_function", function_name="two-lines", url="http://example.com/\nX: y")
    leak.quiet.execute("update baton.worker_functions set url = 'http://host:port/' where function_name = 'bad-port'")
    leak.quiet.execute("update baton.worker_functions set url = 'http://' where function_name = 'bad-host'")
    rows = {row.function_name: row.outcome for row in leak.call("ensure_workers")}
    bad = "error" if transport == "pg_net" else "reserved"
    assert rows == {"bad-port": bad, "bad-host": bad, "good": "reserved"}
    leak.assert_none()


SAYS_ALL_IT_KNOWS = """
create or replace function net.http_post(
  url text, body jsonb default '{}', params jsonb default '{}', headers jsonb default '{}',
  timeout_milliseconds integer default 5000
)
returns bigint
language plpgsql
as $$
begin
  if url like '%/in-message' then
    raise exception 'cannot post % with %, that is: %', url, headers, headers ->> 'Authorization'
      using errcode = '22023';
  elsif url like '%/in-detail' then
    raise exception 'cannot post'
      using detail = headers::text, hint = headers ->> 'Authorization', column = headers ->> 'Authorization';
  elsif url like '%/in-row' then
    create temp table t (headers jsonb check (false)) on commit drop;
    insert into t values (headers);
  elsif url like '%/in-context' then
    execute format('select %L::integer', headers ->> 'Authorization');
  end if;
  return 1;
end
$$;
"""


@pytest.mark.parametrize("place", ["vault", "baton.secrets"])
def test_a_transport_that_fails_with_everything_it_knows_gives_nothing_away(db, server_log, place):
    leak = Leak(db, server_log, place, "pg_net")
    leak.store(SECRET)
    leak.quiet.execute(SAYS_ALL_IT_KNOWS)
    names = ["in-context", "in-detail", "in-message", "in-row"]
    for name in names:
        register(leak.conn, name, secret_name="key")
    rows = {row.function_name: row.outcome for row in leak.call("ensure_workers")}
    assert rows == dict.fromkeys(names, "error")
    assert "cannot post http://127.0.0.1:9/in-message with" in function(leak.conn, "in-message").invocation_detail
    leak.assert_none()


def test_no_kind_of_role_reads_the_secrets(conn):
    conn.execute("insert into baton.secrets values ('key', 'not-for-you')")
    conn.execute("begin")
    for kind in ("client", "worker", "sender", "observer", "admin"):
        conn.execute(f"create role baton_secrets_{kind}")
        conn.execute("select baton.grant_usage(%s, %s)", (f"baton_secrets_{kind}", kind))
        conn.execute(f"set local role baton_secrets_{kind}")
        for statement in (
            "select * from baton.secrets", "copy baton.secrets to stdout", "select * from baton._credential('key')",
            "select * from baton._post('http://a', null, null, 'key', '1 s')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute(statement)
        conn.execute("reset role")
    conn.execute("rollback")
