"""Each rule of tests/pgtap/900_catalog.sql is broken by a change that the package could get, and says so."""

import re

import psycopg
import pytest
from conftest import ROOT, Database, _janitor

CATALOG = (ROOT / "tests/pgtap/900_catalog.sql").read_text()
RULES = re.findall(r"^\$\$, '(.*)'\);$", CATALOG, re.M)

VERB = """create function baton.verb({arguments}out outcome text) language plpgsql {volatility} {definer}
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan
  as $$begin {body} end$$;
  revoke all on function baton.verb from public;"""


def verb(arguments="", volatility="volatile", definer="security definer", body="outcome := 'done';",
         contract=("A verb.", "Outcomes: done", "Raises: none", "Locks: none")):
    text = "\n".join(contract).replace("'", "''")
    return VERB.format(arguments=arguments, volatility=volatility, definer=definer, body=body) + (
        f"comment on function baton.verb is '{text}';")


TABLE = """create table baton.extra (extra_id bigint, constraint extra_pkey primary key (extra_id));
comment on table baton.extra is 'More.
Written by: the owner';"""

BREAKS = [
    ("privileges: no function is executable by public", "grant execute on function baton._now() to public"),
    ("privileges: no function is executable by public",
     "update pg_proc set proacl = null where proname = '_now'"),
    ("privileges: no table, view, column or sequence is open to public", "grant select on baton.queue_stats to public"),
    ("privileges: no table, view, column or sequence is open to public",
     "grant select (transport) on baton.settings to public"),
    ("privileges: no table, view, column or sequence is open to public",
     "grant usage on sequence baton.messages_message_id_seq to public"),
    ("privileges: no type but the rows of tables is usable by public", "create domain baton.word as text"),
    ("privileges: the schema is closed to public", "grant usage on schema baton to public"),
    ("privileges: an installation grants nothing to anybody",
     "grant execute on function baton.tick() to catalog_somebody"),
    ("privileges: an installation grants nothing to anybody", "grant select on baton.settings to catalog_somebody"),
    ("privileges: everything belongs to the owner of the schema",
     "alter table baton.secrets owner to catalog_somebody"),
    ("privileges: everything belongs to the owner of the schema",
     "alter function baton._now() owner to catalog_somebody"),
    ("path: every plpgsql function pins pg_catalog, pg_temp", "alter function baton.tick() reset search_path"),
    ("path: every plpgsql function pins pg_catalog, pg_temp", "alter function baton.tick() set search_path = ''"),
    ("plans: where sequential scans are disabled, nothing is compiled or planned anew",
     "alter function baton._move_marks(timestamptz) reset jit"),
    ("plans: where sequential scans are disabled, nothing is compiled or planned anew",
     "alter function baton._move_marks(timestamptz) reset plan_cache_mode"),
    ("plans: no verb keeps one that reads a whole table", "alter function baton.tick() reset enable_seqscan"),
    ("path: every plpgsql function pins pg_catalog, pg_temp",
     "alter function baton.tick() set search_path = baton, pg_catalog, pg_temp"),
    ("path: every sql function is begin atomic or pins pg_catalog, pg_temp",
     "create function baton._loose() returns integer language sql as 'select 1';"
     "revoke all on function baton._loose() from public"),
    ("functions: only sql and plpgsql",
     "create function baton._internal(double precision) returns double precision language internal immutable as 'dsin';"
     "revoke all on function baton._internal from public"),
    ("functions: one procedure, which can commit since it has neither SET nor SECURITY DEFINER",
     "create procedure baton._other() language plpgsql set search_path = pg_catalog, pg_temp as 'begin end';"
     "revoke all on procedure baton._other() from public"),
    ("functions: one procedure, which can commit since it has neither SET nor SECURITY DEFINER",
     "alter procedure baton._tick_for_a_minute security definer"),
    ("functions: one procedure, which can commit since it has neither SET nor SECURITY DEFINER",
     "alter procedure baton._tick_for_a_minute set search_path = pg_catalog, pg_temp"),
    ("definer: every public verb that writes is security definer", "alter function baton.tick() security invoker"),
    ("definer: every public verb that writes is security definer", verb(definer="")),
    ("definer: no internal function is", "alter function baton._now() security definer"),
    ("functions: no overloads",
     "create function baton._now(integer) returns integer language sql begin atomic select 1; end;"
     "revoke all on function baton._now(integer) from public"),
    ("functions: every argument of a public one has a name", verb(arguments="integer, ")),
    ("functions: the first column that a verb answers is its outcome", verb(arguments="out more text, ")),
    ("functions: who writes into a log is told no position, only who is to read it",
     verb(arguments="out last_seq bigint, ")),
    ("contract: every public function says Outcomes or Returns, Raises and Locks",
     "comment on function baton.tick() is null"),
    ("contract: every public function says Outcomes or Returns, Raises and Locks",
     verb(contract=["A verb.", "Outcomes: done", "Raises: none"])),
    ("contract: every public function says Outcomes or Returns, Raises and Locks",
     verb(contract=["A verb.", "Raises: none", "Locks: none"])),
    ("contract: every public function says Outcomes or Returns, Raises and Locks",
     verb(contract=["Outcomes: done", "Raises: none", "Locks: none"])),
    ("contract: every outcome that a body sets is documented", verb(body="outcome := 'finished';")),
    ("contract: every documented SQLSTATE is registered in _errors() or standard",
     verb(contract=["A verb.", "Outcomes: done", "Raises: PB999", "Locks: none"])),
    ("contract: Raises names SQLSTATEs, or none",
     verb(contract=["A verb.", "Outcomes: done", "Raises: sometimes", "Locks: none"])),
    ("contract: Raises names what a function and those that it calls raise",
     verb(body="perform baton._check_interval('x', '1 day');")),
    ("contract: Raises names what a function and those that it calls raise",
     verb(contract=["A verb.", "Outcomes: done", "Raises: 22023", "Locks: none"])),
    ("errors: every condition that is raised is registered", verb(body="perform baton._raise('never_heard', 'x');")),
    ("errors: every registered condition is raised", """
        create or replace function baton._errors() returns table (condition text, code text, message text, hint text)
        language sql immutable begin atomic select 'never_raised', '22023', 'x', 'y'; end"""),
    ("comments: every table and view has one", "comment on view baton.queue_stats is null"),
    ("comments: every column of a view and of settings has one", "comment on column baton.settings.transport is null"),
    ("comments: every column of a view and of settings has one",
     "comment on column baton.queue_stats.queue_name is null"),
    ("comments: every table names the functions that write it",
     verb(body="update baton.settings as s set transport = 'auto'; outcome := 'done';")),
    ("comments: every table names the functions that write it", "comment on table baton.messages is 'Messages.'"),
    ("comments: every table names the functions that write it",
     "comment on table baton.incidents is 'What was.\nWritten by: nobody'"),
    ("comments: every table names the functions that write it",
     "comment on table baton.secrets is 'Tokens.\nWritten by: tick'"),
    ("tables: no default reads a clock", TABLE + "alter table baton.extra add column at timestamptz default now()"),
    ("tables: no default reads a clock", TABLE + "alter table baton.extra add column at date default current_date"),
    ("tables: no default reads a clock", verb(arguments="at timestamptz default clock_timestamp(), ")),
    ("tables: no oid and no reg* column", TABLE + "alter table baton.extra add column other regclass"),
    ("tables: no oid and no reg* column", TABLE + "alter table baton.extra add column other oid[]"),
    ("tables: no enum type", "create type baton.colour as enum ('red'); revoke all on type baton.colour from public"),
    ("tables: every foreign key has an index", TABLE + """alter table baton.extra add column function_name text,
        add constraint extra_function_fkey foreign key (function_name) references baton.worker_functions;"""),
    ("tables: none is unlogged", TABLE.replace("create table", "create unlogged table")),
    ("tables: every one has a primary key", TABLE + "alter table baton.extra drop constraint extra_pkey"),
    ("tables: no view reads the secrets",
     "create view baton.peek as select s.* from baton.secrets as s; comment on view baton.peek is 'Peek'"),
]


@pytest.fixture(scope="module")
def catalog(cluster, template):
    """A connection to a database with the package and pgTAP, and a role that is nobody."""
    janitor = _janitor(cluster, "baton_catalog_rules", template_dbname=template)
    janitor.drop()
    with janitor:
        database = Database(cluster, janitor.dbname)
        conn = psycopg.connect(database.dsn, autocommit=True)
        conn.execute("create schema tap; create extension pgtap schema tap; create role catalog_somebody")
        try:
            yield conn
        finally:
            conn.execute("drop owned by catalog_somebody; drop role catalog_somebody")
            conn.close()


def failing(conn, change):
    """The rules that say no once this change is made, in a transaction that is rolled back."""
    body = re.sub(r"^(\\.*|begin;|rollback;)$", "", CATALOG, flags=re.M)
    with conn.transaction(force_rollback=True):
        if change:
            conn.execute(change)
        cursor = conn.execute(body)
        lines = []
        while True:
            if cursor.description:
                lines += [str(row[0]) for row in cursor]
            if not cursor.nextset():
                break
    said = [re.match(r"(not )?ok \d+ - (.*)", line) for line in "\n".join(lines).splitlines()]
    said = [match for match in said if match]
    assert [match[2] for match in said] == RULES
    return {match[2] for match in said if match[1]}


def test_the_package_keeps_every_rule(catalog):
    assert failing(catalog, None) == set()


def test_every_rule_is_broken_below():
    assert {rule for rule, _ in BREAKS} == set(RULES)


@pytest.mark.parametrize("rule, change", BREAKS, ids=[f"{n} {rule}" for n, (rule, _) in enumerate(BREAKS, 1)])
def test_a_broken_rule_is_told(catalog, rule, change):
    assert rule in failing(catalog, change)


@pytest.mark.parametrize("change", [
    verb(), verb(volatility="stable", definer=""), verb(arguments="name text default 'x', "), TABLE,
    TABLE + """alter table baton.extra add column function_name text,
        add constraint extra_function_fkey foreign key (function_name) references baton.worker_functions;
        create index extra_function_idx on baton.extra (function_name)""",
    """alter function baton.after_restore() set enable_seqscan = off; alter function baton.after_restore() set jit = off;
        alter function baton.after_restore() set plan_cache_mode = force_generic_plan""",
], ids=["verb", "read", "argument", "table", "foreign key", "setting"])
def test_what_is_right_passes(catalog, change):
    assert failing(catalog, change) == set()
