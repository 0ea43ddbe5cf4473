"""Every way in, every way out, and what stands afterwards."""

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
from pathlib import Path

import psycopg
import pytest
from cluster import Cluster, clean_environ, find_bindir
from conftest import ROOT, TREE, Session, wait_blocked

STANDIN_CRON = ROOT / "tests/standin/cron.sql"
SQL = TREE / "sql"
FINGERPRINT = (ROOT / "tools/fingerprint.sql").read_text()
WAYS = ["checkout", "one_file", "driver", "extension"]
numbers = itertools.count(1)


class House:
    """A cluster whose share folder is ours, with the built files in it."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.plain = self.build("plain", folder / "pg_baton.sql")
        version = self.value("select %s", [control_version()])
        extensions = Path(cluster.sharedir) / "extension"
        self.build("extension", extensions / f"pg_baton--{version}.sql")
        shutil.copy(ROOT / "pg_baton.control", extensions)
        self.execute(*(f"create role {role} login" for role in ("house_owner", "house_tenant", "house_stranger")))

    @staticmethod
    def build(kind, out):
        environment = {**os.environ, "OUT": str(out), "SQL": str(SQL)}
        subprocess.run([ROOT / "tools/build", kind], env=environment, check=True, capture_output=True)
        out.chmod(0o644)
        return out

    def connect(self, dbname="postgres", user="postgres", **kw):
        return psycopg.connect(self.cluster.dsn(dbname, user), autocommit=True, **kw)

    def execute(self, *statements, dbname="postgres", user="postgres"):
        with self.connect(dbname, user) as conn:
            for statement in statements:
                conn.execute(statement)

    def value(self, query, params=None, dbname="postgres", user="postgres"):
        with self.connect(dbname, user) as conn:
            return conn.execute(query, params).fetchone()[0]

    def psql(self, database, *args, user="postgres", **environment):
        return subprocess.run(
            [f"{self.cluster.bindir}/psql", "-X", "-d", self.cluster.dsn(database, user), *map(str, args)],
            cwd=ROOT, env=clean_environ() | environment, capture_output=True, text=True, timeout=60,
        )

    def dump(self, *args):
        return subprocess.run([f"{self.cluster.bindir}/{args[0]}", *map(str, args[1:])], env=clean_environ(),
                              capture_output=True, text=True, check=True, timeout=60)

    def install(self, way, database, user):
        """None, or the SQLSTATE and message of the refusal."""
        if way in ("checkout", "one_file"):
            file = SQL / "install.sql" if way == "checkout" else self.plain
            told = ("-q", "-1", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", "-f", file)
            done = self.psql(database, *told, user=user)
            assert (done.returncode == 0) == ("ERROR" not in done.stderr), done.stderr
            return done.stderr if done.returncode else None
        text = self.plain.read_text() if way == "driver" else "create extension pg_baton"
        try:
            self.execute(text, dbname=database, user=user)
        except psycopg.Error as error:
            return f"{error.sqlstate}: {error}"

    def uninstall(self, database, user, **environment):
        told = ("-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", SQL / "uninstall.sql")
        return self.psql(database, *told, user=user, **environment)

    def fingerprint(self, database):
        with self.connect(database) as conn:
            return read_fingerprint(conn)

    def contents(self, database):
        """Everything in a database that could be left behind, by name."""
        with self.connect(database) as conn:
            return sorted(row[0] for row in conn.execute("""
                select 'schema ' || n.nspname from pg_namespace as n where n.nspname !~ '^pg_'
                union all
                select 'relation ' || c.oid::regclass from pg_class as c
                where c.relnamespace::regnamespace::text !~ '^(pg_|information_schema)'
                union all
                select 'function ' || p.oid::regprocedure from pg_proc as p
                where p.pronamespace::regnamespace::text !~ '^(pg_|information_schema)'
                union all
                select 'type ' || t.oid::regtype from pg_type as t
                where t.typnamespace::regnamespace::text !~ '^(pg_|information_schema)'
                union all
                select 'extension ' || e.extname from pg_extension as e
                union all
                select 'privileges ' || d.oid from pg_default_acl as d
            """))


def read_fingerprint(conn):
    cursor = conn.execute(FINGERPRINT)
    while cursor.description is None:
        cursor.nextset()
    return [line for line, in cursor.fetchall()]


def control_version():
    line = next(x for x in (ROOT / "pg_baton.control").read_text().splitlines() if x.startswith("default_version"))
    return line.split("'")[1]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    with Cluster(relocate=True, cron=True) as cluster:
        yield House(cluster, tmp_path_factory.mktemp("build"))


@pytest.fixture
def make(house):
    """make(user) -> a new database that the user owns, or, for the tenant, owns only an empty schema baton of."""
    made = []

    def make(user="house_owner", encoding="UTF8"):
        name = f"install_{next(numbers)}"
        owner = "postgres" if user == "house_tenant" else user
        house.execute(f"create database {name} owner {owner} template template0 encoding '{encoding}'")
        made.append(name)
        if user == "house_tenant":
            house.execute(f"create schema baton authorization {user}", dbname=name)
        return name

    yield make
    for name in made:
        house.execute(f"drop database {name} with (force)")


@pytest.fixture(scope="module")
def reference(house):
    """The fingerprint of an installation from the checkout by a superuser."""
    house.execute("create database reference template template0")
    assert house.install("checkout", "reference", "postgres") is None
    return house.fingerprint("reference")


def try_out(house, database, user):
    """The package works for its owner."""
    with house.connect(database, user) as conn:
        assert conn.execute("select baton.version()").fetchone()[0] == control_version()
        assert conn.execute("select outcome from baton.send('install', '1')").fetchone()[0] == "sent"
        assert conn.execute("select payload from baton.claim('install')").fetchone()[0] == 1
        assert conn.execute("select error from baton.tick() where error is not null").fetchall() == []


# --- in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["house_owner", "house_tenant"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_schema(house, make, reference, way, user):
    name = make(user)
    assert house.install(way, name, user) is None
    assert house.fingerprint(name) == reference
    assert house.value("select rolsuper from pg_roles where rolname = %s", [user]) is False
    try_out(house, name, user)


@pytest.mark.parametrize("way", WAYS)
def test_the_encoding_of_the_database_is_no_matter(house, make, reference, way):
    name = make(encoding="EUC_JP")
    assert house.install(way, name, "house_owner") is None
    assert house.fingerprint(name) == reference
    try_out(house, name, "house_owner")


def test_a_session_without_standard_conforming_strings_installs_the_same(house, make, reference):
    name = make()
    house.execute(f"alter database {name} set standard_conforming_strings = off")
    assert house.install("checkout", name, "house_owner") is None
    house.execute(f"alter database {name} reset standard_conforming_strings")
    assert house.fingerprint(name) == reference


@pytest.mark.parametrize("fact", [
    "grant execute on function baton.version() to public",
    "grant select on baton.queue_stats to public",
    "grant usage on schema baton to public",
    "comment on function baton.version() is 'another'",
    "comment on column baton.settings.transport is 'another'",
    "alter table baton.messages add column more text",
    "alter table baton.settings alter column transport set default 'outbox'",
    "alter table baton.messages set (fillfactor = 100)",
    "drop index baton.messages_claim_idx",
    "alter table baton.settings drop constraint settings_transport_check",
    "create function baton.left_over() returns integer language sql begin atomic select 1; end",
    "alter function baton.tick() security invoker",
    "alter function baton.tick() reset search_path",
    "alter function baton._now() stable",
    "alter table baton.settings disable trigger user",
    "create type baton.left_over as enum ('one')",
])
def test_the_fingerprint_sees(house, reference, fact):
    with house.connect("reference") as conn, conn.transaction(force_rollback=True):
        conn.execute(fact)
        assert read_fingerprint(conn) != reference
    assert house.fingerprint("reference") == reference


def test_an_extension_script_can_only_be_run_by_create_extension(house, make):
    name = make()
    script = Path(house.cluster.sharedir) / "extension" / f"pg_baton--{control_version()}.sql"
    done = house.psql(name, "-1", "-f", script, user="house_owner")
    assert 'Use "CREATE EXTENSION pg_baton"' in done.stdout
    assert "schema baton" not in house.contents(name)


def test_create_extension_leaves_the_path_as_it_was(house, make):
    with house.connect(make(), "house_owner") as conn, conn.transaction():
        conn.execute("set local search_path = public, pg_temp")
        conn.execute("create extension pg_baton")
        assert conn.execute("show search_path").fetchone()[0] == "public, pg_temp"


@pytest.mark.parametrize("user", ["house_owner", "house_tenant"])
@pytest.mark.parametrize("file", ["install.sql", "one_file"])
def test_without_a_transaction_it_refuses_and_leaves_nothing(house, make, file, user):
    name = make(user)
    before = house.contents(name)
    # Without ON_ERROR_STOP: the built file goes on after the refusal, and must not write anything either.
    done = house.psql(name, "-f", house.plain if file == "one_file" else SQL / file, user=user)
    assert "pg_baton must be installed in one transaction" in done.stderr
    assert house.contents(name) == before


def test_a_failure_halfway_leaves_nothing(house, make, tmp_path):
    name = make()
    before = house.contents(name)
    broken = tmp_path / "broken.sql"
    broken.write_text(house.plain.read_text() + "\nselect 1 / 0;\n")
    with pytest.raises(psycopg.errors.DivisionByZero):
        house.execute(broken.read_text(), dbname=name, user="house_owner")
    assert house.contents(name) == before


@pytest.mark.parametrize("again", ["checkout", "one_file", "driver", "extension"])
@pytest.mark.parametrize("first", ["checkout", "extension"])
def test_again_it_says_that_it_is_there(house, make, first, again):
    name = make()
    assert house.install(first, name, "house_owner") is None
    house.execute("select baton.send('kept', '1')", dbname=name, user="house_owner")
    before = house.contents(name), house.fingerprint(name)
    refusal = house.install(again, name, "house_owner")
    assert "42710" in refusal
    if (first, again) == ("extension", "extension"):
        assert 'extension "pg_baton" already exists' in refusal  # Postgres itself says so, before any script
    else:
        assert f"pg_baton {control_version()} is already installed" in refusal
    assert (house.contents(name), house.fingerprint(name)) == before
    assert house.value("select count(*) from baton.messages", dbname=name) == 1


@pytest.mark.parametrize("foreign", [
    "create table baton.mine (a integer)",
    "create function baton.mine() returns integer language sql return 1",
    "create type baton.mine as enum ('a')",
])
def test_a_schema_with_something_in_it_is_left_alone(house, make, foreign):
    name = make("house_tenant")
    house.execute(foreign, dbname=name, user="house_tenant")
    before = house.contents(name)
    for way in WAYS:
        assert "schema baton is not empty" in house.install(way, name, "house_tenant")
    assert house.contents(name) == before


def test_a_schema_of_somebody_else_is_left_alone(house, make):
    name = make("house_owner")
    house.execute("create schema baton authorization house_stranger", dbname=name)
    before = house.contents(name)
    for way in WAYS:
        refusal = house.install(way, name, "house_owner")
        assert "42501" in refusal and "belongs to another role" in refusal
    assert house.contents(name) == before


@pytest.fixture
def make_install(tmp_path):
    """make_install(config, NAME=VALUE, ...): this tree, with the parts and tools under test, for that pg_config."""
    pgxs = subprocess.run([f"{find_bindir()}/pg_config", "--pgxs"], capture_output=True, text=True).stdout.strip()
    if not os.path.exists(pgxs):
        pytest.skip("PGXS is not installed")
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, folder in (("Makefile", ROOT), ("pg_baton.control", ROOT), ("sql", TREE), ("tools", TREE)):
        (tree / name).symlink_to(folder / name)

    def make_install(config, **told):
        told = {"PG_CONFIG": config, "PGXS": pgxs, **told}
        subprocess.run(["make", "-s", "install", *(f"{name}={value}" for name, value in told.items())], cwd=tree, check=True)

    return make_install


def test_make_install_puts_each_version_and_each_step_where_extensions_are_and_nothing_elsewhere(make_install, tmp_path):
    config, target = f"{find_bindir()}/pg_config", tmp_path / "target"
    make_install(config, DESTDIR=target)
    folder = subprocess.run([config, "--sharedir"], capture_output=True, text=True, check=True).stdout.strip()
    frozen = {path.stem.removeprefix("pg_baton--") for path in (SQL / "frozen").glob("pg_baton--*.sql")}
    versions = sorted({name for name in frozen if "--" not in name} | {control_version()},
                      key=lambda version: [int(n) for n in version.removesuffix("-dev").split(".")])
    steps = map("--".join, zip(versions, versions[1:], strict=False))
    installed = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    names = "pg_baton.control", *(f"pg_baton--{name}.sql" for name in (*versions, *steps))
    assert installed == {f"{folder[1:]}/extension/{name}" for name in names}


def test_make_install_brings_the_first_release_and_the_way_from_it_to_this_version(make_install, make_cluster):
    cluster = make_cluster(relocate=True)
    make_install(f"{cluster.bindir}/pg_config")
    found = {}
    for name, how in (("fresh", ["create extension pg_baton"]),
                      ("upgraded", ["create extension pg_baton version '0.1.0'",
                                    "alter extension pg_baton update to '0.2.0'", "alter extension pg_baton update"])):
        with psycopg.connect(cluster.dsn(), autocommit=True) as conn:
            conn.execute(f"create database {name} template template0")
        with psycopg.connect(cluster.dsn(name), autocommit=True) as conn:
            for statement in how:
                conn.execute(statement)
                said = conn.execute("select e.extversion, baton.version() from pg_extension as e where"
                                    " e.extname = 'pg_baton'").fetchone()
                assert said[0] == said[1]
            assert said[1] == control_version()
            found[name] = read_fingerprint(conn)
    assert found["upgraded"] == found["fresh"]


# --- three at once -------------------------------------------------------------------------------


@contextlib.contextmanager
def sessions(house, database, user, count):
    opened = [Session(house.connect(database, user), f"installer {n}") for n in range(count)]
    try:
        yield opened
    finally:
        for session in opened:
            session.close()


@pytest.mark.parametrize("user", ["house_owner", "house_tenant"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_who_comes_while_another_installs_waits_and_is_told(house, make, reference, user, end):
    name, text = make(user), house.plain.read_text()
    with sessions(house, name, user, 3) as (first, second, third), house.connect(name) as observer:
        first.run("begin")
        first.run(text)
        second.start(text)
        wait_blocked(observer, second, by=first)
        third.start(text)
        wait_blocked(observer, third)
        first.run(end)
        results = [outcome_of(session) for session in (second, third)]
    told = [r for r in results if r is not None]
    assert all("42710" in r and "already installed" in r for r in told)
    assert len(told) == (2 if end == "commit" else 1)
    assert house.fingerprint(name) == reference
    try_out(house, name, user)


def outcome_of(session):
    try:
        session.result(30)
    except psycopg.Error as error:
        return f"{error.sqlstate}: {error}"


@pytest.mark.parametrize("ways", [("checkout", "one_file", "driver"), ("extension", "checkout", "driver")],
                         ids=["plain", "with an extension"])
def test_three_at_once(house, make, reference, ways):
    name, barrier, refusals = make(), threading.Barrier(3), []

    def one(way):
        barrier.wait(30)
        refusals.append(house.install(way, name, "house_owner"))

    threads = [threading.Thread(target=one, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(refusals) == 3 and refusals.count(None) == 1
    assert all("42710" in r and "already installed" in r for r in refusals if r)
    assert house.fingerprint(name) == reference
    try_out(house, name, "house_owner")


# --- dump and restore ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["checkout", "extension"])
def test_a_dump_keeps_the_rows(house, make, reference, tmp_path, way):
    source, target = make(), make()
    assert house.install(way, source, "house_owner") is None
    house.execute("select baton.send('kept', '[1]')", "update baton.settings set max_lapses = 7", "select baton.tick()",
                  "select baton.register_worker_function('kept', queue_name => 'kept', url => 'http://localhost/')",
                  dbname=source, user="house_owner")
    house.dump("pg_dump", "-Fc", "-f", tmp_path / "dump", house.cluster.dsn(source, "postgres"))
    house.dump("pg_restore", "--exit-on-error", "-d", house.cluster.dsn(target, "postgres"), tmp_path / "dump")
    assert house.fingerprint(target) == reference
    for query in ("select m::text from baton.messages as m", "select s::text from baton.settings as s",
                  "select f::text from baton.worker_functions as f", "select s::text from baton.state as s"):
        assert house.value(query, dbname=target) == house.value(query, dbname=source)
    # The id sequence went along: the next message gets a new id.
    sent = house.value("select message_id from baton.send('kept', '[2]')", dbname=target)
    assert sent > house.value("select min(message_id) from baton.messages", dbname=target)


def test_the_extension_dumps_every_table_and_sequence(house, make):
    name = make()
    assert house.install("extension", name, "house_owner") is None
    missing = house.value("""
        select array_agg(c.relname) from pg_class as c
        where c.relnamespace = 'baton'::regnamespace and c.relkind in ('r', 'S')
          and c.oid <> all (select unnest(e.extconfig) from pg_extension as e where e.extname = 'pg_baton')
    """, dbname=name)
    assert missing is None


@pytest.mark.parametrize("way", ["checkout", "extension"])
def test_default_privileges_hand_out_nothing(house, make, way):
    """What others do for every schema (Supabase for its API roles): all that the owner makes is theirs at once."""
    name = make()
    grants = ("grant all on tables", "grant all on sequences", "grant usage on schemas", "grant execute on routines",
              "revoke execute on routines from public")
    house.execute(*(f"alter default privileges {grant}" + ("" if " from " in grant else " to house_stranger")
                    for grant in grants), dbname=name, user="house_owner")
    assert house.install(way, name, "house_owner") is None
    open_ones = """
        select array_agg(o.name order by o.name) from (
          select c.relname as name from pg_class as c
          where c.relnamespace = 'baton'::regnamespace and case c.relkind
            when 'r' then has_table_privilege('house_stranger', c.oid,
              'select, insert, update, delete, truncate, references, trigger')
            when 'v' then has_table_privilege('house_stranger', c.oid, 'select, insert, update, delete')
            when 'S' then has_sequence_privilege('house_stranger', c.oid, 'usage, select, update')
          end
          union all
          select p.proname from pg_proc as p
          where p.pronamespace = 'baton'::regnamespace and has_function_privilege('house_stranger', p.oid, 'execute')
        ) as o
    """
    assert house.value(open_ones, dbname=name) is None
    house.execute("select baton.grant_usage('house_stranger', 'client')", dbname=name, user="house_owner")
    assert house.value("select outcome from baton.send('q', '1')", dbname=name, user="house_stranger") == "sent"
    house.execute((SQL / "900_privileges.sql").read_text(), dbname=name, user="house_owner")
    assert house.value("select outcome from baton.send('q', '1')", dbname=name, user="house_stranger") == "sent"
    assert "send" in house.value(open_ones, dbname=name)


# --- out -----------------------------------------------------------------------------------------


def test_uninstall_leaves_nothing(house, make):
    name = make()
    before = house.contents(name)
    assert house.install("checkout", name, "house_owner") is None
    try_out(house, name, "house_owner")
    done = house.uninstall(name, "house_owner")
    assert done.returncode == 0, done.stderr
    assert house.contents(name) == before
    assert house.install("checkout", name, "house_owner") is None


def test_uninstall_by_the_owner_of_the_schema_alone(house, make):
    name = make("house_tenant")
    assert house.install("checkout", name, "house_tenant") is None
    done = house.uninstall(name, "house_tenant")
    assert done.returncode == 0, done.stderr
    assert not [thing for thing in house.contents(name) if "baton." in thing]


def test_drop_extension_leaves_nothing(house, make):
    name = make()
    before = house.contents(name)
    assert house.install("extension", name, "house_owner") is None
    try_out(house, name, "house_owner")
    house.execute("drop extension pg_baton", dbname=name, user="house_owner")
    assert house.contents(name) == before


def test_uninstall_refuses_an_extension(house, make):
    name = make()
    assert house.install("extension", name, "house_owner") is None
    before = house.contents(name)
    done = house.uninstall(name, "house_owner", PGOPTIONS="-c baton.uninstall=yes")
    assert done.returncode != 0
    assert "pg_baton is installed as an extension" in done.stderr and "drop extension pg_baton" in done.stderr
    assert house.contents(name) == before


def test_uninstall_refuses_where_there_is_nothing(house, make):
    done = house.uninstall(make(), "house_owner")
    assert done.returncode != 0 and "not installed" in done.stderr


def with_a_worker(house, name):
    house.execute(
        "select baton.register_worker_function('shop', queue_name => 'shop', start_mode => 'process')",
        "select baton.register_worker('11111111-1111-1111-1111-111111111111', 'shop')",
        dbname=name, user="house_owner",
    )


def test_uninstall_refuses_while_a_worker_lives(house, make):
    name = make()
    empty = house.contents(name)
    assert house.install("checkout", name, "house_owner") is None
    with_a_worker(house, name)
    before = house.contents(name)
    done = house.uninstall(name, "house_owner")
    assert done.returncode != 0
    assert "worker" in done.stderr and "baton.uninstall" in done.stderr
    assert house.contents(name) == before
    done = house.uninstall(name, "house_owner", PGOPTIONS="-c baton.uninstall=yes")
    assert done.returncode == 0, done.stderr
    assert house.contents(name) == empty


def test_uninstall_goes_once_the_worker_has_stopped(house, make):
    name = make()
    assert house.install("checkout", name, "house_owner") is None
    with_a_worker(house, name)
    house.execute("select baton.stop_worker('11111111-1111-1111-1111-111111111111')", dbname=name, user="house_owner")
    done = house.uninstall(name, "house_owner")
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["stand-in", "pg_cron"])
def cron_database(request, house, make):
    """A database with a schema cron that the owner may use, and nothing else."""
    if request.param == "stand-in":
        name = make()
        house.execute(STANDIN_CRON.read_text(), "grant usage on schema cron to house_owner", dbname=name)
        yield name
        return
    if not house.cluster.has_pg_cron:
        pytest.skip("pg_cron is not installed")
    house.execute("create extension pg_cron", "grant usage on schema cron to house_owner",
                  "grant create on database postgres to house_owner")
    yield "postgres"
    house.execute("drop schema if exists baton cascade", "drop extension pg_cron",
                  "revoke create on database postgres from house_owner")


def test_uninstall_removes_the_cron_jobs_and_no_others(house, cron_database):
    name = cron_database
    house.execute("select cron.schedule('mine', '0 0 1 1 *', 'select 1')", dbname=name, user="house_owner")
    jobs = "select array_agg(j.jobname order by j.jobid) from cron.job as j"
    assert house.install("checkout", name, "house_owner") is None
    with house.connect(name, "house_owner") as conn:
        assert conn.execute("select outcome from baton.schedule()").fetchone()[0] == "scheduled"
    assert len(house.value(jobs, dbname=name)) == 2
    done = house.uninstall(name, "house_owner")
    assert done.returncode == 0, done.stderr
    assert house.value(jobs, dbname=name) == ["mine"]
    assert not [thing for thing in house.contents(name) if "baton" in thing]

