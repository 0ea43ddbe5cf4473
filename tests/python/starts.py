"""What the tests of worker starts share: calls by name, a function to start, and a recorder of starts."""

import uuid


def call(conn, verb, may_be_in_use=False, **arguments):
    """The rows of select * from baton.VERB(name => value, ...); conn is a connection or a Session."""
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    sql = f"select * from baton.{verb}({named})"
    rows = conn.run(sql, arguments) if hasattr(conn, "run") else conn.execute(sql, arguments).fetchall()
    if not may_be_in_use and any(getattr(row, "outcome", None) == "in_use" for row in rows):
        raise AssertionError(f"{verb} of {arguments}: bodies run under it, or it is the run's, and nobody expected that")
    return rows


def one(conn, verb, may_be_in_use=False, **arguments):
    [row] = call(conn, verb, may_be_in_use, **arguments)
    return row


def begin(session, verb, **arguments):
    """Sends the call and does not wait for it."""
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    return session.start(f"select * from baton.{verb}({named})", arguments)


def register(conn, function_name="orders", **arguments):
    arguments = {"url": f"http://127.0.0.1:9/{function_name}", **arguments}
    conn.execute("update baton.settings set transport = 'outbox' where transport = 'auto'")
    return one(conn, "register_worker_function", function_name=function_name, **arguments)


def function(conn, function_name="orders"):
    return conn.execute("select * from baton.worker_functions where function_name = %s", (function_name,)).fetchone()


def startup(conn, function_name="orders"):
    return conn.execute("select * from baton.worker_startup where function_name = %s", (function_name,)).fetchone()


def worker(conn, worker_id):
    return conn.execute("select * from baton.workers where worker_id = %s", (worker_id,)).fetchone()


def deliveries(conn):
    return conn.execute("select * from baton.messages where queue_name = 'baton.deliveries'"
                        " order by message_id").fetchall()


def incidents(conn, kind):
    return conn.execute("select * from baton.incidents where kind = %s order by incident_id", (kind,)).fetchall()


def reserved(conn):
    """One ensure_workers: the functions for which it reserved a start, with the ids."""
    return {row.function_name: row.invocation_id for row in call(conn, "ensure_workers") if row.outcome == "reserved"}


def reserve(conn, function_name="orders"):
    row = one(conn, "reserve_worker_invocation", function_name=function_name)
    assert row.outcome == "reserved", row
    return row.invocation_id


def accept(conn, invocation_id, worker_id, function_name="orders"):
    row = one(conn, "accept_worker_invocation", function_name=function_name, invocation_id=invocation_id,
              worker_id=worker_id)
    return row.reason or row.outcome


def reconcile(conn, invocation_id, worker_id=None, function_name="orders"):
    row = one(conn, "reconcile_worker_invocation", function_name=function_name, invocation_id=invocation_id,
              worker_id=worker_id)
    return row.reason or row.outcome


def advance(conn, by):
    return conn.execute("select baton_test.advance(%s)", (by,)).fetchone()[0]


new_id = uuid.uuid4


def record_starts(conn):
    """From now on public.starts has a row a reservation that is committed, public.requests one a delivery sent."""
    conn.execute("""
        create table public.starts (
          nth bigserial, pid integer default pg_backend_pid(), function_name text, invocation_id uuid,
          at timestamptz, expires_at timestamptz, written_at timestamptz default clock_timestamp()
        );
        create function public.record_start() returns trigger language plpgsql as $$
        begin
          insert into public.starts (function_name, invocation_id, at, expires_at)
          values (new.function_name, new.invocation_id, new.last_invoked_at, new.invocation_expires_at);
          return null;
        end
        $$;
        create trigger record_start after update of invocation_id on baton.worker_functions
        for each row when (new.invocation_id is distinct from old.invocation_id) execute function public.record_start();

        create table public.requests (function_name text, invocation_id uuid);
        create function public.record_request() returns trigger language plpgsql as $$
        begin
          insert into public.requests (function_name, invocation_id)
          values (new.payload ->> 'function_name', (new.payload -> 'body' ->> 'invocation_id')::uuid);
          return null;
        end
        $$;
        create trigger record_request after insert on baton.messages
        for each row when (new.queue_name = 'baton.deliveries') execute function public.record_request();
    """)
