"""Upgrades, with work in flight: of every frozen release to this tree, and of one made-up version to the next."""

import subprocess

import psycopg
import pytest
import releases
from cluster import clean_environ
from conftest import CHECKS, ROOT, Session, wait_blocked
from psycopg.rows import namedtuple_row
from runs import append, cancel, end, granted, log, messages, run, signal, start, take, wedged
from starts import accept, begin, call, one, register, reserved
from tasks import complete, create, inline, look, queued, replay, short_way, started, take_task
from test_install import house, make  # noqa: F401

ALL = [*releases.BEFORE, "made up"]
WORKER, ANOTHER = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
KINDS = "client", "worker", "sender", "observer", "admin"
LONG = "10 minutes"


@pytest.fixture(scope="module")
def upgrades(house, tmp_path_factory):
    """upgrades(name) -> the Upgrade, whose newer version is the one that extensions come in."""
    folder, known = tmp_path_factory.mktemp("releases"), {}
    house.execute(*(f"create role upgrade_{name} login" for name in (*KINDS, "reader", "stranger")))

    def upgrades(name):
        if name not in known:
            if name == "made up":
                known[name] = releases.made_up(house, folder)
            elif name == "same":
                known[name] = releases.same(house, folder)
            else:
                known[name] = releases.released(house, name)
        known[name].offer()
        return known[name]

    return upgrades


@pytest.fixture
def upgrade(upgrades):
    return upgrades("made up")


@pytest.fixture
def connect(house):
    opened = []

    def connect(database, user="house_owner", **kw):
        opened.append(house.connect(database, user, row_factory=namedtuple_row, **kw))
        return opened[-1]

    yield connect
    for conn in opened:
        conn.close()


class Work:
    """One of everything that can be under way, begun in the older version and finished in the newer one."""

    def __init__(self, conn):
        self.conn = conn
        register(conn)
        [self.invocation_id] = reserved(conn).values()
        one(conn, "register_worker_function", function_name="p", queue_name="users", start_mode="process")
        one(conn, "register_worker", worker_id=WORKER, function_name="p")
        for queue_name in ("users", "users", "doomed"):
            one(conn, "send", queue_name=queue_name, payload=None)
        [self.message] = call(conn, "claim", queue_name="users", worker_id=WORKER, visibility=LONG)
        [dead] = call(conn, "claim", queue_name="doomed")
        one(conn, "fail", message_id=dead.message_id, delivery=dead.delivery, error="no", final=True)
        self.dead_id = dead.message_id
        start(conn, "sleeps")
        _, epoch = granted(conn, "sleeps")
        append(conn, epoch, run_id="sleeps")
        later = conn.execute("select baton._now() + interval '1 hour' as at").fetchone().at
        assert end(conn, epoch, 2, "sleeps", wake_at=later).outcome == "ended"
        assert run(conn, "sleeps").status == "suspended"
        start(conn, "held")
        _, self.epoch = granted(conn, "held", visibility=LONG)
        append(conn, self.epoch, run_id="held")
        [self.body] = inline(conn, "inline", visibility=LONG)
        start(conn, "ahead")
        receipt, self.ahead = granted(conn, "ahead", visibility=LONG)
        create(conn, self.ahead, run_id="ahead")
        replay(conn, receipt, self.ahead, run_id="ahead")
        self.step = "s"
        if conn.execute("select to_regproc('baton.advance_run') is not null").fetchone()[0]:
            self.advance("t")
        queued(conn, "running")
        self.task = started(conn, take_task(conn, visibility=LONG))
        queued(conn, "waiting")
        start(conn, "gone")
        cancel(conn, "gone")
        self.logs = {run_id: log(conn, run_id) for run_id in ("sleeps", "held", "inline", "ahead", "running", "waiting", "gone")}

    def advance(self, next_step):
        """The short way of the run that is ahead."""
        arguments = short_way(self.ahead, "ahead", self.step, next_step)
        assert one(self.conn, "advance_run", **arguments).outcome == "advanced"
        self.step = next_step

    def finish(self):
        conn = self.conn
        for run_id, events in self.logs.items():
            assert log(conn, run_id) == events
        assert complete(conn, started(conn, take_task(conn)), "waiting").outcome == "completed"
        assert one(conn, "heartbeat", worker_id=WORKER).outcome == "active"
        assert accept(conn, self.invocation_id, ANOTHER) == "accepted"
        receipt = {"message_id": self.message.message_id, "delivery": self.message.delivery}
        assert one(conn, "extend", **receipt).outcome == "extended"
        assert one(conn, "ack", **receipt).outcome == "acked"
        assert len(call(conn, "claim", queue_name="users", max_messages=9)) == 1
        assert [row.outcome for row in call(conn, "redrive", message_ids=[self.dead_id])] == ["redriven"]
        assert append(conn, self.epoch, run_id="held") == "appended"
        assert end(conn, self.epoch, 3, "held").outcome == "ended"
        self.advance("u")
        assert log(conn, "ahead")[len(self.logs["ahead"]):] == [(len(self.logs["ahead"]) + 1, "run_advanced")]
        assert complete(conn, self.body, "inline").outcome == "completed"
        assert complete(conn, self.task, "running").outcome == "completed"
        assert signal(conn, "sleeps") == "signalled"
        for run_id in ("sleeps", "running", "waiting"):
            assert look(conn, run_id=run_id) == ([], [])
        assert wedged(conn) == []
        assert [row.error for row in call(conn, "tick") if row.error] == []


def give(conn):
    """A role of each kind, and what users grant and build themselves."""
    for kind in KINDS:
        one(conn, "grant_usage", role_name=f"upgrade_{kind}", kind=kind)
    conn.execute("grant usage on schema baton to upgrade_reader")
    conn.execute("grant select on baton.step_outputs, baton.runs to upgrade_reader")
    conn.execute("grant execute on function baton.version() to upgrade_reader")
    conn.execute("create view public.mine as select o.run_id, o.outputs from baton.step_outputs as o")
    conn.execute("grant select on public.mine to upgrade_reader")


def use(connect, database):
    """What was granted can be done."""
    assert one(connect(database, "upgrade_client"), "send", queue_name="new", payload=None).outcome == "sent"
    assert len(call(connect(database, "upgrade_worker"), "claim", queue_name="new")) == 1
    assert call(connect(database, "upgrade_sender"), "claim_deliveries") is not None
    assert call(connect(database, "upgrade_observer"), "health")
    assert call(connect(database, "upgrade_admin"), "tick") is not None
    reader = connect(database, "upgrade_reader")
    for source in ("baton.step_outputs", "baton.runs", "public.mine", "baton.version()"):
        assert reader.execute(f"select from {source}").description is not None


def grants(conn):
    """What others than the owner have."""
    return conn.execute("""
        select c.oid::regclass::text as object, a.grantee::regrole::text, a.privilege_type
        from pg_class as c cross join lateral aclexplode(c.relacl) as a
        where c.relnamespace = 'baton'::regnamespace and a.grantee <> c.relowner
        union all
        select p.oid::regprocedure::text, case a.grantee when 0 then 'PUBLIC' else a.grantee::regrole::text end,
          a.privilege_type
        from pg_proc as p cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
        where p.pronamespace = 'baton'::regnamespace and a.grantee <> p.proowner
        order by 1, 2, 3
    """).fetchall()


def rows(conn):
    """Every row of every table, as JSON."""
    tables = conn.execute("select c.relname from pg_class as c where c.relnamespace = 'baton'::regnamespace and"
                          " c.relkind = 'r' order by 1").fetchall()
    return {table: [row for row, in conn.execute(f"select to_jsonb(t) from baton.{table} as t order by t::text")]
            for table, in tables}


def dumped(conn):
    """The names of the tables and sequences whose rows pg_dump keeps of an extension; None is one that has gone."""
    return conn.execute("select array_agg(c.relname order by c.relname) from pg_extension as e"
                        " cross join unnest(e.extconfig) as d (oid) left join pg_class as c on c.oid = d.oid"
                        " where e.extname = 'pg_baton'").fetchone()[0]


def default_privileges(house, database):
    """All that the owner makes from now on is the stranger's at once."""
    house.execute(*(f"alter default privileges grant {what} to upgrade_stranger" for what in
                    ("all on tables", "all on sequences", "usage on schemas", "execute on routines")),
                  dbname=database, user="house_owner")


@pytest.mark.parametrize("way", ["plain", "extension"])
@pytest.mark.parametrize("name", ALL)
def test_work_in_flight_goes_on(house, make, upgrades, connect, name, way):
    upgrade, database = upgrades(name), make()
    default_privileges(house, database)
    upgrade.install(way, database)
    conn = connect(database)
    work = Work(conn)
    give(conn)
    granted_before, rows_before = grants(conn), rows(conn)

    assert upgrade.apply(way, database) is None
    assert one(conn, "version").version == upgrade.end
    assert grants(conn) == granted_before
    rows_after = rows(conn)
    for table, before in rows_before.items():
        after = rows_after.get(table, [])
        assert len(after) == len(before)
        assert all(any(row.items() <= other.items() for other in after) for row in before), table
    unowned = [line for line in house.fingerprint(database) if " to upgrade_" not in line]
    assert unowned == upgrade.fresh()
    if way == "extension":
        assert conn.execute("select extversion from pg_extension where extname = 'pg_baton'").fetchone() == (upgrade.end,)
        fresh = make()
        house.execute("create extension pg_baton", dbname=fresh)
        assert dumped(conn) == dumped(connect(fresh))
    use(connect, database)
    work.finish()


def test_new_verbs_of_a_kind_come_by_granting_it_again(house, make, upgrades, connect):
    upgrade, database = upgrades("made up"), make()
    upgrade.install("plain", database)
    conn = connect(database)
    give(conn)
    assert upgrade.apply("plain", database) is None
    client = connect(database, "upgrade_client")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        client.execute("select baton.new_verb()")
    one(conn, "grant_usage", role_name="upgrade_client", kind="client")
    assert client.execute("select baton.new_verb()").fetchone() == (7,)


@pytest.mark.parametrize("part, instead", [
    ("alter table baton.queue_marks add column note text;", ""),
    ("drop function baton._left_over();", ""),
    ("constraint extras_pkey primary key", "constraint another primary key"),
])
def test_what_a_step_forgets_shows(house, make, upgrade, part, instead):
    database = make()
    upgrade.install("plain", database)
    text = upgrade.steps[0].read_text()
    assert text.count(part) == 1
    try:
        house.execute(text.replace(part, instead), dbname=database, user="house_owner")
    except psycopg.errors.UndefinedColumn:
        return
    assert house.fingerprint(database) != upgrade.fresh()


def test_a_table_that_only_goes_stays_among_those_that_are_dumped(house, make, upgrade, connect):
    database, step = make(), upgrade.steps[0]
    upgrade.install("extension", database)
    text = step.read_text()
    assert text.count(releases.OUT_OF_THE_EXTENSION) == 1
    step.write_text(text.replace(releases.OUT_OF_THE_EXTENSION, ""))
    try:
        assert upgrade.apply("extension", database) is None
    finally:
        step.write_text(text)
    assert None in dumped(connect(database))


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "extension"])
def test_a_second_upgrade_changes_nothing_and_none_goes_back(house, make, upgrade, way):
    database = make()
    upgrade.install(way, database)
    assert upgrade.apply(way, database) is None
    before = house.contents(database), house.fingerprint(database)
    refusal = upgrade.apply(way, database)
    if way == "extension":
        assert refusal is None  # Postgres says in a NOTICE that it is there
        with pytest.raises(psycopg.Error, match="no update path"):
            house.execute(f"alter extension pg_baton update to '{upgrade.start}'", dbname=database, user="house_owner")
    else:
        assert refusal.startswith("42710") and f"pg_baton {upgrade.end} is already installed" in refusal
    assert (house.contents(database), house.fingerprint(database)) == before


def test_another_version_is_not_upgraded(house, make, upgrades, upgrade):
    """Neither a newer one nor an older one: this tree is no version that the made-up step starts from."""
    database = make()
    upgrades("same").run(upgrades("same").base, database)
    before = house.fingerprint(database)
    refusal = upgrade.apply("plain", database)
    assert refusal.startswith("55000") and "this database has 0.0.1" in refusal and "never back" in refusal
    assert house.fingerprint(database) == before


def test_where_there_is_nothing_nothing_is_upgraded(house, make, upgrade):
    database = make()
    refusal = upgrade.apply("plain", database)
    assert refusal.startswith("42704") and "not installed" in refusal and database in refusal
    assert "schema baton" not in house.contents(database)


def test_an_extension_is_upgraded_by_alter_extension_only(house, make, upgrade):
    database = make()
    upgrade.install("extension", database)
    before = house.fingerprint(database)
    refusal = upgrade.apply("plain", database)
    assert refusal.startswith("55000") and f"ALTER EXTENSION pg_baton UPDATE TO '{upgrade.end}'" in refusal
    assert house.fingerprint(database) == before


def test_a_plain_installation_is_not_upgraded_by_an_extension(house, make, upgrade):
    database = make()
    upgrade.install("plain", database)
    before = house.fingerprint(database)
    assert 'extension "pg_baton" does not exist' in upgrade.apply("extension", database)
    with pytest.raises(psycopg.Error, match="already installed") as refused:
        house.execute("create extension pg_baton", dbname=database, user="house_owner")
    assert "docs/guides/upgrading.md" in refused.value.diag.message_hint
    assert house.fingerprint(database) == before


@pytest.mark.parametrize("user", ["postgres", "house_tenant"])
@pytest.mark.parametrize("way", ["plain", "extension"])
def test_only_the_owner_upgrades(house, make, upgrade, way, user):
    database = make()
    upgrade.install(way, database)
    before = house.fingerprint(database)
    refusal = upgrade.apply(way, database, user)
    assert refusal.startswith("42501")
    if (way, user) != ("extension", "house_tenant"):  # that one Postgres itself refuses
        assert "SET ROLE house_owner" in refusal
    assert house.fingerprint(database) == before


def test_without_a_transaction_it_refuses_and_changes_nothing(house, make, upgrade):
    database = make()
    upgrade.install("plain", database)
    before = house.contents(database), house.fingerprint(database)
    # Without ON_ERROR_STOP: psql goes on after the refusal, and must not write anything either.
    done = house.psql(database, "-f", upgrade.steps[0], user="house_owner")
    assert "pg_baton must be upgraded in one transaction" in done.stderr
    assert (house.contents(database), house.fingerprint(database)) == before
    done = house.psql(database, "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", upgrade.steps[0], user="house_owner")
    assert done.returncode == 0, done.stderr
    assert house.fingerprint(database) == upgrade.fresh()


# --- others at the same time ---------------------------------------------------------------------


def test_who_waits_too_long_for_a_lock_gives_up_as_a_whole_and_may_try_again(house, make, upgrade, connect):
    ways = {make(): way for way in ("plain", "extension")}
    before, sessions, holder = {}, {}, {}
    for database, way in ways.items():
        upgrade.install(way, database)
        before[database] = house.contents(database), house.fingerprint(database)
        holder[database] = connect(database)
        holder[database].execute("begin")
        holder[database].execute("select from baton.queue_marks")
    try:
        for database, way in ways.items():
            text = "alter extension pg_baton update" if way == "extension" else upgrade.steps[0].read_text()
            sessions[database] = Session(house.connect(database, "house_owner"), way).start(text)
            wait_blocked(connect(database), sessions[database], by=holder[database].info.backend_pid)
        for database, session in sessions.items():
            assert isinstance(session.error(timeout=20), psycopg.errors.LockNotAvailable)
            assert (house.contents(database), house.fingerprint(database)) == before[database]
            holder[database].execute("commit")
            assert upgrade.apply(ways[database], database) is None
            assert house.fingerprint(database) == upgrade.fresh()
    finally:
        for session in sessions.values():
            session.close()


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_who_comes_while_another_upgrades_waits_and_is_told(house, make, upgrade, connect, how):
    database, text = make(), upgrade.steps[0].read_text()
    upgrade.install("plain", database)
    first, second = (Session(house.connect(database, "house_owner"), n) for n in ("first", "second"))
    try:
        first.run("begin")
        first.run(text)
        second.start(text)
        wait_blocked(connect(database), second, by=first)
        assert call(connect(database, options="-c lock_timeout=1s"), "tick") == [], "it waits for nobody"
        first.run(how)
        if how == "commit":
            assert "already installed" in str(second.error())
        else:
            second.result()
    finally:
        first.close()
        second.close()
    assert house.fingerprint(database) == upgrade.fresh()


@pytest.fixture
def ways(house, make, upgrade, connect):
    """Sessions of whom only the impatient one looks for a deadlock: ways(impatient) -> the upgrader's and a caller's."""
    opened = []

    def ways(impatient):
        database = make()
        upgrade.install("plain", database)
        sessions = []
        for name, user in (("upgrade", "house_owner"), ("caller", "postgres")):
            patience = "10ms" if name == impatient else "1h"
            house.execute(f"alter role {user} in database {database} set deadlock_timeout = '{patience}'")
            sessions.append(Session(house.connect(database, user, row_factory=namedtuple_row), name))
        opened.extend(sessions)
        return connect(database), *sessions

    yield ways
    for session in opened:
        session.close()


def test_a_call_may_be_in_a_deadlock_with_it_and_is_made_again(house, upgrade, ways):
    observer, upgrader, caller = ways("caller")
    caller.run("begin")
    caller.run("select from baton.dead_letters")
    upgrader.start(upgrade.steps[0].read_text())  # has changed queue_marks, and comes to the view
    wait_blocked(observer, upgrader, by=caller)
    claim = "select * from baton.claim('users')"
    assert isinstance(caller.start(claim).error(), psycopg.errors.DeadlockDetected)
    caller.run("rollback")
    upgrader.result()
    assert caller.run(claim) == []
    assert house.fingerprint(observer.info.dbname) == upgrade.fresh()


def test_it_may_be_in_a_deadlock_itself_gives_up_as_a_whole_and_may_try_again(house, upgrade, ways, connect):
    observer, upgrader, caller = ways("upgrade")
    database, step = observer.info.dbname, upgrade.steps[0].read_text()
    before = house.contents(database), house.fingerprint(database)
    between = connect(database)
    between.execute("begin")
    between.execute("lock table baton.worker_functions in share update exclusive mode")
    caller.run("begin")
    caller.run("select from baton.dead_letters")
    upgrader.start(step)
    wait_blocked(observer, upgrader, by=between.info.backend_pid)
    caller.start("select * from baton.claim('users')")
    wait_blocked(observer, caller, by=upgrader)
    between.execute("commit")
    assert isinstance(upgrader.error(), psycopg.errors.DeadlockDetected)
    assert caller.result() == []
    caller.run("commit")
    assert (house.contents(database), house.fingerprint(database)) == before
    upgrader.run(step)
    assert house.fingerprint(database) == upgrade.fresh()


def test_a_call_that_waited_meanwhile_may_miss_what_has_gone_and_is_made_again(upgrade, ways, connect):
    observer, upgrader, caller = ways("nobody")
    start(observer, "r")
    holder = connect(observer.info.dbname)
    holder.execute("begin")
    holder.execute("select from baton.runs where run_id = 'r' for update")
    begin(caller, "cancel_run", run_id="r", reason=None)
    wait_blocked(observer, caller, by=holder.info.backend_pid)
    upgrader.run(upgrade.steps[0].read_text())
    holder.execute("commit")
    missed = caller.error()
    assert isinstance(missed, psycopg.errors.UndefinedFunction) and "_left_over" in str(missed)
    assert one(caller, "cancel_run", run_id="r", reason=None).outcome == "done"


def test_prepared_statements_go_on_but_for_all_columns_of_a_view_that_has_got_one(house, make, upgrades, connect):
    upgrade, database = upgrades("0.1.0"), make()
    upgrade.install("plain", database)
    conn = connect(database)
    verb, named, everything = ("select * from baton.send('users', null)", "select queue_name, ready from baton.queue_stats",
                               "select * from baton.queue_stats")
    for statement in (verb, named, everything):
        conn.execute(statement, prepare=True)
    assert upgrade.apply("plain", database) is None
    for n in (2, 3):
        assert conn.execute(verb, prepare=True).fetchone().outcome == "sent"
        assert conn.execute(named, prepare=True).fetchall() == [("users", n)]
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="must not change result type"):
            conn.execute(everything, prepare=True)
    conn.execute("deallocate all")
    assert conn.execute(everything, prepare=False).fetchone().ready == 3


# --- afterwards ----------------------------------------------------------------------------------

NEED = {"due", "overdue", "signalled", "held", "again", "queued", "inline", "unread", "given back"}


def runs_of_all_kinds(conn):
    """A run in every state that it can be in, as far as it matters to who drives it; NEED are those that need a driver."""
    for run_id in ("due", "replayed", "held", "again", "unread", "given back", "sleeping"):
        start(conn, run_id)
    for run_id in ("delayed", "told", "overdue", "signalled"):
        start(conn, run_id, delay="1 hour")
    signal(conn, "told")
    conn.execute("update baton.runs set wake_at = wake_at - interval '2 hours' where run_id in ('overdue', 'signalled')")
    conn.execute("update baton.messages set visible_at = visible_at - interval '2 hours'"
                 " where run_id in ('overdue', 'signalled')")
    signal(conn, "signalled")
    granted(conn, "held", visibility=LONG)
    granted(conn, "again", visibility=LONG)
    signal(conn, "again")
    later = conn.execute("select baton._now() + interval '1 hour' as at").fetchone().at
    for run_id in ("replayed", "unread", "sleeping"):
        _, epoch = granted(conn, run_id)
        assert end(conn, epoch, 1, run_id, wake_at=later if run_id == "sleeping" else None).outcome == "ended"
    signal(conn, "unread")
    message_id, delivery = take(conn, "given back")
    one(conn, "fail", message_id=message_id, delivery=delivery, error="no", delay="1 hour")
    queued(conn, "queued")
    inline(conn, "inline", visibility=LONG)
    start(conn, "gone")
    cancel(conn, "gone")


def wakes_are_shared(conn):
    """A run that has a wake gets no other, and one that waits for its time is no wedged one."""
    assert wedged(conn) == []
    for run_id in ("due", "signalled", "unread", "given back"):
        signal(conn, run_id)
        waiting = {m.dedupe_key for m in messages(conn, run_id) if m.claimed_at is None} - {f"{run_id}\x1ftimer"}
        assert waiting in ({None}, {f"{run_id}\x1fwake"}), run_id


def all_are_recovered(conn):
    """Without their messages just those are found that need a driver."""
    conn.execute(CHECKS.read_text())
    wakes_are_shared(conn)
    conn.execute("delete from baton.messages")
    assert {row.run_id for row in call(conn, "recover_runs")} == NEED
    assert call(conn, "recover_runs") == [] == wedged(conn)


@pytest.mark.parametrize("name", releases.BEFORE)
def test_recovery_finds_the_runs_that_need_a_driver(house, make, upgrades, connect, name):
    upgrade, database = upgrades(name), make()
    upgrade.install("plain", database)
    conn = connect(database)
    runs_of_all_kinds(conn)
    assert upgrade.apply("plain", database) is None
    all_are_recovered(conn)


def test_a_wake_keeps_its_key_until_its_grant(house, make, upgrades, connect):
    upgrade, database = upgrades("0.4.0"), make()
    upgrade.install("plain", database)
    conn = connect(database)
    start(conn, "r")
    assert upgrade.apply("plain", database) is None
    signal(conn, "r")
    assert [m.dedupe_key for m in messages(conn)] == ["r\x1fwake"]
    granted(conn)
    assert [m.dedupe_key for m in messages(conn)] == [None]


def test_a_wake_that_kept_its_key_backs_off_as_any(house, make, upgrades, connect):
    upgrade, database = upgrades("0.4.0"), make()
    upgrade.install("plain", database)
    conn = connect(database)
    start(conn, "r")
    receipt, _ = granted(conn)
    signal(conn, "r")
    assert upgrade.apply("plain", database) is None
    one(conn, "fail", message_id=receipt.message_id, delivery=receipt.delivery, error="no", delay="1 hour")
    [waiting] = messages(conn)
    assert waiting.dedupe_key == "r\x1fwake"
    assert waiting.visible_at > conn.execute("select baton._now() + interval '59 minutes' as at").fetchone().at
    assert wedged(conn) == [] == call(conn, "recover_runs")


@pytest.mark.parametrize("name", releases.BEFORE)
def test_a_dump_of_the_older_extension_is_restored_where_the_newer_one_is(house, make, upgrades, connect, tmp_path, name):
    upgrade, source, target = upgrades(name), make(), make()
    upgrade.install("extension", source)
    runs_of_all_kinds(connect(source))
    house.dump("pg_dump", "-Fc", "-f", tmp_path / "dump", house.cluster.dsn(source, "postgres"))
    house.dump("pg_restore", "--exit-on-error", "-d", house.cluster.dsn(target, "house_owner"), tmp_path / "dump")
    conn = connect(target)
    assert one(conn, "version").version == upgrade.end
    assert one(conn, "after_restore").outcome == "restored"
    all_are_recovered(conn)


@pytest.mark.parametrize("way", ["plain", "extension"])
@pytest.mark.parametrize("name", ALL)
def test_an_upgraded_database_can_be_dumped_and_restored(house, make, upgrades, connect, tmp_path, name, way):
    upgrade, source, target = upgrades(name), make(), make()
    upgrade.install(way, source)
    work = Work(connect(source))
    assert upgrade.apply(way, source) is None
    if name == "made up":
        house.execute("insert into baton.extras default values", dbname=source, user="house_owner")
    house.dump("pg_dump", "-Fc", "-f", tmp_path / "dump", house.cluster.dsn(source, "postgres"))
    house.dump("pg_restore", "--exit-on-error", "-d", house.cluster.dsn(target, "house_owner"), tmp_path / "dump")
    assert house.fingerprint(target) == upgrade.fresh()
    assert rows(connect(target)) == rows(connect(source))
    conn = connect(target)
    assert one(conn, "after_restore").outcome == "restored"
    receipt = {"message_id": work.message.message_id, "delivery": work.message.delivery}
    assert one(conn, "ack", **receipt).outcome == "lost"
    assert len(call(conn, "claim", queue_name="users", max_messages=9)) == 2
    assert look(conn, run_id="inline")[0] == ["execute"]


@pytest.mark.parametrize("name", releases.BEFORE[:1] or ["same"])
def test_all_pgtap_tests_pass_on_an_upgraded_database(house, make, upgrades, name):
    upgrade, database = upgrades(name), make("postgres")
    upgrade.install("plain", database, "postgres")
    assert upgrade.apply("plain", database, "postgres") is None
    house.execute("create schema tap", "create extension pgtap schema tap", dbname=database)
    files = sorted(str(path) for path in (ROOT / "tests/pgtap").glob("[!_]*.sql"))
    environ = {**clean_environ(), **house.cluster.env(), "PGOPTIONS": "-c client_min_messages=warning"}
    done = subprocess.run(["pg_prove", "--dbname", database, "--failures", *files], env=environ, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
