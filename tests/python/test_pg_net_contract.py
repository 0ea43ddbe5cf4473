"""What the package relies on in pg_net, point by point.

Runs on the real extension where the server has it preloaded, and else on the stand-in: the same tests, so the stand-in
cannot drift from what it stands for. Where pg_net's versions differ, the test says what it accepts from which one.

That something does NOT arrive is shown by order, not by waiting: a request posted later arrives and has its response
row, and pg_net goes on to the next batch only when it has finished the one before.
"""

import contextlib
import socket
import uuid

import psycopg
import pytest
import standin
from conftest import wait_until
from psycopg import errors, sql
from psycopg.types.json import Jsonb

POST_ARGUMENTS = (
    "url text, body jsonb DEFAULT '{}'::jsonb, params jsonb DEFAULT '{}'::jsonb, "
    """headers jsonb DEFAULT '{"Content-Type": "application/json"}'::jsonb, """
    "timeout_milliseconds integer DEFAULT 5000"
)


class Net:
    """A database with pg_net or its stand-in, its worker running, and a server to send to."""

    def __init__(self, dsn, target, version):
        self.dsn = dsn
        self.target = target
        self.version = version  # of the real extension; the stand-in behaves as the newest
        self.connection = self.connect()

    def connect(self, autocommit=True):
        return psycopg.connect(self.dsn, autocommit=autocommit)

    def value(self, query, *args, connection=None):
        return (connection or self.connection).execute(query, args).fetchone()[0]

    def post(self, url, connection=None, **arguments):
        """Call net.http_post by name; a path goes to the target."""
        arguments["url"] = self.target.url + url if url and url.startswith("/") else url
        for name in ("body", "params", "headers"):
            if arguments.get(name) is not None:
                arguments[name] = Jsonb(arguments[name])
        call = sql.SQL("select net.http_post({})").format(
            sql.SQL(", ").join(sql.SQL("{} => {}").format(sql.Identifier(n), sql.Placeholder(n)) for n in arguments)
        )
        return (connection or self.connection).execute(call, arguments).fetchone()[0]

    def response(self, request_id, connection=None):
        """The response row, once it is there."""
        query = (
            "select r.status_code, r.content_type, r.headers, r.content, r.timed_out, r.error_msg, r.created"
            " from net._http_response as r where r.id = %s"
        )
        cursor = (connection or self.connection).cursor(row_factory=psycopg.rows.namedtuple_row)
        return wait_until(lambda: cursor.execute(query, [request_id]).fetchone(), f"response {request_id}")

    def settle(self):
        """Let everything that was committed so far be sent."""
        self.response(self.post("/settle"))

    def failed(self, row):
        """Whether a response row is what a request without an answer leaves behind."""
        assert (row.status_code, row.headers, row.content, row.content_type) == (None, None, None, None)
        return row.error_msg

    def says_timed_out(self, row):
        """timed_out is filled in for failures from 0.19.6 on."""
        return row.timed_out is None if self.version < (0, 19, 6) else row.timed_out


@contextlib.contextmanager
def real_pg_net(admin, dsn):
    """Make the preloaded worker look at the database of `dsn`."""
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    admin.execute(sql.SQL("alter system set pg_net.database_name = {}").format(name))
    try:
        admin.execute("select pg_reload_conf()")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("create extension pg_net")
            version = connection.execute("select extversion from pg_extension where extname = 'pg_net'").fetchone()[0]
            # Not net.worker_restart(): a 0.14 worker does not hear it while its own database lacks the extension.
            connection.execute(
                "select pg_terminate_backend(a.pid) from pg_stat_activity as a where a.application_name like 'pg_net %'"
            )
            wait_until(lambda: standin.worker_is_up(connection), "pg_net's worker is up")
        yield tuple(int(part) for part in version.split("."))
    finally:
        admin.execute("alter system reset pg_net.database_name")
        admin.execute("select pg_reload_conf()")


@contextlib.contextmanager
def standin_pg_net(dsn):
    with psycopg.connect(dsn) as connection:
        standin.install(connection)
    with standin.running(dsn):
        yield (999,)


@pytest.fixture(scope="module")
def net(cluster):
    name = f"pg_net_contract_{uuid.uuid4().hex[:12]}"
    dsn = cluster.dsn(name)
    with psycopg.connect(cluster.dsn(), autocommit=True) as admin, standin.HttpTarget() as target:
        preloaded = admin.execute("show shared_preload_libraries").fetchone()[0]
        admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            is_real = "pg_net" in [library.strip() for library in preloaded.split(",")]
            with real_pg_net(admin, dsn) if is_real else standin_pg_net(dsn) as version:
                net = Net(dsn, target, version)
                with net.connection:
                    yield net
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_http_post_has_exactly_the_signature_that_the_package_calls(net):
    function = "net.http_post(text, jsonb, jsonb, jsonb, integer)"
    assert net.value("select pg_get_function_arguments(%s::regprocedure)", function) == POST_ARGUMENTS
    assert net.value("select pg_get_function_result(%s::regprocedure)", function) == "bigint"


def test_queue_and_responses_are_unlogged_tables_of_known_columns(net):
    def columns(table):
        return net.value(
            "select array_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod) order by a.attnum)"
            " from pg_attribute as a where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped",
            table,
        )

    assert columns("net.http_request_queue") == [
        "id bigint",
        "method net.http_method",
        "url text",
        "headers jsonb",
        "body bytea",
        "timeout_milliseconds integer",
    ]
    assert columns("net._http_response") == [
        "id bigint",
        "status_code integer",
        "content_type text",
        "headers jsonb",
        "content text",
        "timed_out boolean",
        "error_msg text",
        "created timestamp with time zone",
    ]
    assert net.value(
        "select string_agg(c.relpersistence::text, '') from pg_class as c"
        " where c.oid in ('net.http_request_queue'::regclass, 'net._http_response'::regclass)"
    ) == "uu"


def test_before_the_commit_nothing_is_sent_and_only_the_caller_sees_the_request(net):
    with net.connect(autocommit=False) as caller:
        request_id = net.post("/open", connection=caller, body={"b": 1, "a": [1, 2]})
        net.settle()
        assert net.target.arrivals("/open") == []
        assert net.value("select count(*) from net.http_request_queue where id = %s", request_id) == 0
        own = caller.execute(
            "select method, body, headers, timeout_milliseconds from net.http_request_queue where id = %s", [request_id]
        ).fetchone()
        assert own == ("POST", b'{"a": [1, 2], "b": 1}', {"Content-Type": "application/json"}, 5000)
        caller.rollback()


def test_after_the_commit_exactly_one_request_arrives_with_the_body_as_it_was(net):
    with net.connect(autocommit=False) as caller:
        net.post("/committed", connection=caller, body={"b": 1, "a": [1, 2]}, headers={"X-Own": "yes"})
        caller.commit()
    net.target.wait("/committed")
    net.settle()
    [arrival] = net.target.arrivals("/committed")
    assert arrival.method == "POST"
    assert arrival.body == b'{"a": [1, 2], "b": 1}'
    assert arrival.headers["Content-Type"] == "application/json"
    assert arrival.headers["User-Agent"].startswith("pg_net/")
    assert arrival.headers["X-Own"] == "yes"


def test_a_response_row_says_what_came_back_and_the_request_leaves_the_queue(net):
    net.target.on("/answered", body="hello", headers={"Content-Type": "text/plain", "X-Answer": "yes"})
    request_id = net.post("/answered")
    row = net.response(request_id)
    assert (row.status_code, row.content_type, row.content) == (200, "text/plain", "hello")
    assert row.headers["X-Answer"] == "yes"
    assert (row.timed_out, row.error_msg) == (False, None)
    assert row.created is not None
    assert net.value("select count(*) from net.http_request_queue where id = %s", request_id) == 0


def test_a_rolled_back_request_is_never_sent_and_its_id_is_used_up(net):
    with net.connect(autocommit=False) as caller:
        request_id = net.post("/rolled-back", connection=caller)
        caller.rollback()
        following = net.post("/settle", connection=caller)
        caller.commit()
    assert following == request_id + 1
    net.response(following)
    net.settle()
    assert net.target.arrivals("/rolled-back") == []
    assert net.value("select count(*) from net._http_response where id = %s", request_id) == 0


def test_a_rollback_to_a_savepoint_drops_only_the_requests_after_it(net):
    with net.connect(autocommit=False) as caller:
        net.post("/before-savepoint", connection=caller)
        with caller.transaction(force_rollback=True):
            net.post("/after-savepoint", connection=caller)
        net.post("/past-savepoint", connection=caller)
        caller.commit()
    net.target.wait("/before-savepoint")
    net.target.wait("/past-savepoint")
    net.settle()
    assert net.target.arrivals("/after-savepoint") == []


@pytest.mark.parametrize("status", [409, 500])
def test_an_error_status_is_an_answer_and_is_not_retried(net, status):
    path = f"/status-{status}"
    net.target.on(path, status=status)
    row = net.response(net.post(path))
    assert (row.status_code, row.error_msg, row.timed_out) == (status, None, False)
    net.settle()
    assert len(net.target.arrivals(path)) == 1


def test_a_refused_connection_leaves_an_error_and_no_status(net):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        row = net.response(net.post(f"http://127.0.0.1:{nobody.getsockname()[1]}/"))
    assert net.failed(row) == "Couldn't connect to server"
    assert row.timed_out is not True


def test_an_unknown_host_leaves_an_error_and_no_status(net):
    row = net.response(net.post("http://nobody.invalid/"))
    assert net.failed(row) == "Couldn't resolve host name"
    assert row.timed_out is not True


def test_a_timeout_says_so_although_the_server_got_the_request_and_finishes_it(net):
    net.target.on("/late", delay=1.5)
    row = net.response(net.post("/late", timeout_milliseconds=400))
    assert net.failed(row).startswith("Timeout of 400 ms reached")
    assert net.says_timed_out(row)
    net.target.wait("/late", finished=True)
    net.settle()
    assert len(net.target.arrivals("/late")) == 1


def test_a_redirect_is_followed_and_a_post_becomes_a_get_without_a_body(net):
    net.target.on("/moved", status=302, headers={"Location": net.target.url + "/moved-to"})
    row = net.response(net.post("/moved", body={"a": 1}))
    assert row.status_code == 200
    [arrival] = net.target.arrivals("/moved-to")
    assert (arrival.method, arrival.body) == ("GET", b"")


def test_empty_headers_are_dropped_and_other_values_become_their_text(net):
    headers = {"X-Null": None, "X-Empty": "", "X-Number": 5, "X-Object": {"a": 1}, "Authorization": "Bearer s"}
    net.post("/headers", headers=headers)
    [arrival] = net.target.wait("/headers")
    assert "X-Null" not in arrival.headers
    assert "X-Empty" not in arrival.headers
    assert arrival.headers["X-Number"] == "5"
    assert arrival.headers["X-Object"] == '{"a": 1}'
    assert arrival.headers["Authorization"] == "Bearer s"
    assert arrival.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("content_type", ["text/plain", "application/json; charset=utf-8"])
def test_another_content_type_is_refused_at_the_call(net, content_type):
    with pytest.raises(errors.RaiseException) as raised:
        net.post("/refused", headers={"content-type": content_type})
    assert raised.value.diag.message_primary == 'Content-Type header must be "application/json"'


def test_a_null_body_is_sent_as_an_empty_post(net):
    net.post("/no-body", body=None)
    [arrival] = net.target.wait("/no-body")
    assert (arrival.method, arrival.body) == ("POST", b"")


def test_no_url_and_an_url_without_a_scheme_are_errors_at_the_call(net):
    with pytest.raises(errors.NotNullViolation):
        net.post(None)
    with pytest.raises(errors.InternalError_):
        net.post("127.0.0.1/start")
    with pytest.raises(errors.NotNullViolation):
        net.post("/no-timeout", timeout_milliseconds=None)


def test_parameters_are_appended_to_the_url_and_null_ones_skipped(net):
    net.post("/parameters?kept=1", params={"sp": "a b&c", "nothing": None})
    [arrival] = net.target.wait("/parameters")
    assert arrival.query == "kept=1&sp=a%20b%26c"


def test_one_slow_request_holds_up_every_later_one(net):
    net.target.on("/slow", delay=1.5)
    net.post("/slow")
    net.target.wait("/slow")
    net.post("/behind-slow")
    [behind] = net.target.wait("/behind-slow")
    [slow] = net.target.arrivals("/slow")
    assert slow.finished_at is not None
    assert behind.at >= slow.finished_at


def test_a_role_without_grants_can_send_and_read_the_answers(net):
    role = sql.Identifier(f"contract_{uuid.uuid4().hex[:12]}")
    net.connection.execute(sql.SQL("create role {}").format(role))
    try:
        with net.connect() as caller:
            caller.execute(sql.SQL("set role {}").format(role))
            assert net.response(net.post("/anybody", connection=caller), connection=caller).status_code == 200
            caller.execute("select count(*) from net.http_request_queue")
    finally:
        net.connection.execute(sql.SQL("drop role {}").format(role))


def test_a_running_worker_is_seen_by_its_check_and_by_its_application_name(net):
    net.connection.execute("select net.check_worker_is_up()")
    assert standin.worker_is_up(net.connection)


def test_a_request_queued_right_after_a_restart_of_the_worker_is_sent_once(net):
    assert net.value("select net.worker_restart()") is True
    net.post("/after-restart")
    net.target.wait("/after-restart")
    net.settle()
    assert len(net.target.arrivals("/after-restart")) == 1
