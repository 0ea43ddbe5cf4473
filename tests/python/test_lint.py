"""tools/lint finds what it is there to find: a small package without faults, and one change a rule."""

import importlib.machinery
import importlib.util
import os
import subprocess

import pytest
from conftest import TREE

pytest.importorskip("pglast")

FUNCTION = """create or replace function baton.{name}
returns {returns}
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_row baton.things;
  v_number integer;
begin
{body}
end;
$$;
"""
BODY = """  select t.* into v_row from baton.things as t where t.thing_id = look.thing_id for no key update of t;
  v_row.name := look.name;
  if v_row.name is null and v_number > 1 then
    look.outcome := baton._help(v_number);
  end if;
  for v_number in select w.n from (select 1 as n union select 2 as m order by n) as w order by w.n loop
    insert into baton.things as t (name) values (look.name)
    on conflict (thing_id) do update set name = excluded.name where t.name is null
    returning t.thing_id into look.thing_id;
  end loop;
  perform count(t) from baton.things as t;
  outcome := 'found';"""

PACKAGE = {
    "pg_baton.control": "comment = 'a test'\ndefault_version = '0.1.0'\n",
    "META.json": '{"version": "0.1.0", "provides": {"pg_baton": {"version": "0.1.0", "file": "sql/install.sql", '
                 '"docfile": "CHANGELOG.md"}}, "name": "pg_baton", "abstract": "a test", "maintainer": "us", '
                 '"license": "postgresql", "release_status": "stable", "meta-spec": {"version": "1.0.0"}}',
    "CHANGELOG.md": "# Changes\n\n## [0.1.0] - unreleased\n",
    "sql/install.sql": "\\set ON_ERROR_STOP on\n\\ir 000_schema.state.sql\n\\ir 100_things.state.sql\n"
                       "\\ir 010_version.sql\n\\ir 030_clock.sql\n\\ir 110_help.sql\n\\ir 120_look.sql\n"
                       "\\ir 700_views.sql\n",
    "sql/uninstall.sql": "drop schema baton cascade;\n",
    "sql/000_schema.state.sql": "set local search_path = pg_catalog, pg_temp;\n\ncreate schema baton;\n",
    "sql/100_things.state.sql": "create table baton.things (\n  thing_id bigint,\n  name text,\n"
                                "  constraint things_pkey primary key (thing_id)\n);\n\n"
                                "create index things_name_idx on baton.things (name);\n",
    "sql/010_version.sql": "create or replace function baton.version()\nreturns text\nlanguage sql\nimmutable\n"
                           "begin atomic\n  select '0.1.0';\nend;\n",
    "sql/030_clock.sql": "create or replace function baton._now()\nreturns timestamptz\nlanguage sql\nvolatile\n"
                         "begin atomic\n  select clock_timestamp();\nend;\n",
    "sql/110_help.sql": FUNCTION.format(
        name="_help(number integer)", returns="text", body="  return _help.number::text;"),
    "sql/120_look.sql": FUNCTION.format(
        name="look(inout thing_id bigint, name text, out outcome text)", returns="record", body=BODY),
    "sql/700_views.sql": "create or replace view baton.look_on as\nselect t.name from baton.things as t;\n",
}


@pytest.fixture(scope="module")
def lint():
    loader = importlib.machinery.SourceFileLoader("baton_lint", str(TREE / "tools/lint"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("baton_lint", loader))
    loader.exec_module(module)
    module.CALLS_UP = {}
    return module


@pytest.fixture
def check(lint, tmp_path):
    """check({path: text or a function of the text, ...}) -> the faults of the package with these changes."""

    def check(changes=None):
        for path, text in {**PACKAGE, **(changes or {})}.items():
            text = text(PACKAGE[path]) if callable(text) else text
            target = tmp_path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                target.unlink(missing_ok=True)
            else:
                target.write_text(text)
        lint.faults.clear()
        lint.check_parts(tmp_path)
        lint.check_versions(tmp_path)
        lint.check_words(tmp_path)
        return list(lint.faults)

    return check


def swap(old, new):
    def change(text):
        assert text.count(old) >= 1, f"{old!r} is not there"
        return text.replace(old, new)

    return change


def add(text):
    return lambda there: there + text


def test_a_good_package_has_no_faults(check):
    assert check() == []


LOOK, HELP, STATE, INSTALL = "sql/120_look.sql", "sql/110_help.sql", "sql/100_things.state.sql", "sql/install.sql"


@pytest.mark.parametrize("changes, expected", [
    # The manifest
    ({"sql/130_more.sql": "select 1;\n"}, "130_more.sql is not in it"),
    ({INSTALL: add("\\ir 800_gone.sql\n")}, "800_gone.sql does not exist"),
    ({INSTALL: add("\\ir 700_views.sql\n")}, "700_views.sql is in it twice"),
    ({INSTALL: swap("\\ir 030_clock.sql\n\\ir 110_help.sql\n", "\\ir 110_help.sql\n\\ir 030_clock.sql\n")},
     "030_clock.sql comes after 110_help.sql"),
    ({INSTALL: swap("\\ir 100_things.state.sql\n\\ir 010_version.sql\n",
                    "\\ir 010_version.sql\n\\ir 100_things.state.sql\n")},
     "state first, then code"),
    # What a part may hold
    ({HELP: add("\\echo done\n")}, "a psql command"),
    ({HELP: swap("return _help.number", "-- so…\n  return _help.number")}, "not ASCII"),
    ({HELP: add("commit;\n")}, "transaction control"),
    ({HELP: add("begin;\n")}, "transaction control"),
    ({HELP: add("set search_path = public;\n")}, "only 000 pins the path"),
    ({STATE: add("comment on table baton.things is 'x';\n")}, "CommentStmt can be run again"),
    ({STATE: add("create or replace view baton.v as select t.name from baton.things as t;\n")},
     "ViewStmt can be run again"),
    ({HELP: add("create table baton.more (a integer);\n")}, "CreateStmt is state"),
    ({HELP: add("insert into baton.things values (1, 'a');\n")}, "InsertStmt is state"),
    ({HELP: swap("create or replace", "create")}, "code can be run again"),
    ({"sql/700_views.sql": swap("create or replace", "create")}, "code can be run again"),
    ({STATE: swap("constraint things_pkey ", "")}, "a primary constraint without a name"),
    ({STATE: swap("name text,", "name text check (name <> ''),")}, "a check constraint without a name"),
    ({STATE: swap("create index things_name_idx on", "create index on")}, "an index without a name"),
    ({HELP: add("select (;\n")}, "cannot be parsed"),
    ({HELP: add("-- line\n" * 420)}, "split it by verb"),
    ({HELP: add("-- " + "x" * 120 + "\n")}, "columns (at most 120)"),
    ({HELP: swap("return _help", "RETURN _help")}, "RETURN: keywords are lowercase"),
    ({HELP: swap("language plpgsql", "LANGUAGE plpgsql")}, "LANGUAGE: keywords are lowercase"),
    # Functions
    ({HELP: swap("set search_path = pg_catalog, pg_temp\n", "")}, "must have: set search_path"),
    ({HELP: swap("pg_catalog, pg_temp", "pg_catalog, public, pg_temp")}, "must have: set search_path"),
    ({HELP: add(PACKAGE[HELP].replace("number integer", "other text").replace("_help.number", "_help.other"))},
     "no overloads"),
    ({HELP: swap("  return", "  commit;\n  return")}, "commits: only _tick_for_a_minute may"),
    ({HELP: add("create or replace procedure baton._proc()\nlanguage plpgsql\nset search_path = pg_catalog, pg_temp\n"
                "as $$\nbegin\n  null;\nend;\n$$;\n")}, "functions only"),
    # Qualified references
    ({LOOK: swap("where t.thing_id = look", "where thing_id = look")},
     "argument thing_id must be written look.thing_id"),
    ({LOOK: swap("if v_row.name is null", "if name is null")}, "argument name must be written look.name"),
    ({LOOK: swap("values (look.name)", "values (name)")}, "argument name must be written look.name"),
    ({LOOK: swap("select w.n from", "select n from")}, "n is not qualified"),
    ({LOOK: swap("returning t.thing_id into", "returning other into")}, "other is not qualified"),
    ({LOOK: swap("where t.name is null", "where colour is null")}, "colour is not qualified"),
    ({LOOK: swap("where t.thing_id = look.thing_id", "where t.name = outcome")}, "outcome is not qualified"),
    ({LOOK: swap("v_row.name := look.name", "v_row.name := name")}, "argument name must be written look.name"),
    ({LOOK: swap("look.outcome := baton._help(v_number)", "look.outcome := baton._help(number)")},
     "number is not qualified"),
    ({LOOK: swap("select t.* into", "select * into")}, "select *"),
    ({"sql/700_views.sql": swap("t.name from", "name from")}, "name is not qualified"),
    ({"sql/010_version.sql": swap("select '0.1.0'", "select v from (values ('0.1.0')) as w (v)")},
     "v is not qualified"),
    # The clock
    ({LOOK: swap("outcome := 'found'", "outcome := now()")}, "only baton._now() reads a clock"),
    ({LOOK: swap("outcome := 'found'", "outcome := current_timestamp")}, "only baton._now() reads a clock"),
    ({LOOK: swap("outcome := 'found'", "execute 'select statement_timestamp ()'")}, "only baton._now() reads a clock"),
    ({LOOK: swap("outcome := 'found'", "outcome := 'now'::timestamptz")}, "only baton._now() reads a clock"),
    ({STATE: swap("name text,", "name timestamptz default localtimestamp,")}, "only baton._now() reads a clock"),
    ({LOOK: swap("outcome := 'found'", "outcome := baton._now() - baton._now()")}, "reads the clock more than once"),
    # Calls
    ({HELP: swap("return _help.number", "perform baton.look(1, 'a');\n  return _help.number")},
     "baton.look of the higher"),
    ({HELP: swap("return _help.number", "perform 1 from baton.look_on as o;\n  return _help.number")},
     "baton.look_on of the higher"),
    ({LOOK: swap("baton._help(", "baton._gone(")}, "baton._gone() does not exist"),
    # Versions
    ({"pg_baton.control": swap("0.1.0", "0.2.0")}, "pg_baton.control says 0.2.0"),
    ({"META.json": swap('"version": "0.1.0", "provides"', '"version": "0.2.0", "provides"')}, "META.json version"),
    ({"META.json": swap('{"pg_baton": {"version": "0.1.0"', '{"pg_baton": {"version": "0.2.0"')}, "META.json provides"),
    ({"META.json": swap('"license": "postgresql", ', "")}, "META.json: no license"),
    ({"META.json": swap("0.1.0", "0.1")}, "META.json: not a semantic version: 0.1"),
    ({"META.json": swap('"stable"', '"unstable"')}, "release_status unstable does not go with version 0.1.0"),
    ({"META.json": swap("0.1.0", "0.1.0-dev")}, "release_status stable does not go with version 0.1.0-dev"),
    ({"META.json": swap("sql/install.sql", "sql/pg_baton.sql")}, "the file of pg_baton is not there: sql/pg_baton.sql"),
    ({"META.json": swap('"docfile": "CHANGELOG.md"', '"docfile": "doc.md"')}, "the docfile of pg_baton is not there"),
    ({"CHANGELOG.md": swap("0.1.0", "0.0.9")}, "CHANGELOG.md: says version 0.0.9"),
    ({"sql/010_version.sql": swap("0.1.0", "0.0.9")}, "010_version.sql: says version 0.0.9"),
    # Words
    ({"README.md": "see " + "/home" + "/ann/pg_baton\n"}, "a machine's path"),
    ({"notes/README.md": "from https://" + "pypi" + ".org/simple\n"}, "a registry's host"),
    ({"requirements.lock": "--" + "index-url x\n"}, "a registry's host"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_a_fault_is_found(check, changes, expected):
    faults = check(changes)
    assert any(expected in f for f in faults), faults


def test_what_was_made_here_is_left_alone_without_git_too(check):
    made = {".gitignore": "/.venv\n__pycache__/\n", ".venv/x.md": "see " + "/home" + "/ann\n"}
    assert check(made) == []
    assert check({**made, "README.md": made[".venv/x.md"]}) == [f"README.md:1: a machine's path: {'/home'}/a"]


def test_the_procedure_that_commits_is_the_one_exception(check):
    procedure = """create or replace procedure baton._tick_for_a_minute()
language plpgsql
as $$
begin
  commit;
end;
$$;
"""
    assert check({HELP: add(procedure)}) == []
    pinned = procedure.replace("plpgsql\nas", "plpgsql\nset search_path = pg_catalog, pg_temp\nas")
    assert any("can't commit with SET" in f for f in check({HELP: add(pinned)}))
    definer = procedure.replace("plpgsql\nas", "plpgsql\nsecurity definer\nas")
    assert any("can't commit with SET" in f for f in check({HELP: add(definer)}))


def test_a_call_to_a_higher_file_may_be_an_exception(lint, check, monkeypatch):
    calls_up = {HELP: swap("return _help.number", "perform baton.look(1, 'a');\n  return _help.number")}
    monkeypatch.setattr(lint, "CALLS_UP", {("_help", "look"): "why"})
    assert check(calls_up) == []
    assert check({HELP: PACKAGE[HELP]}) == ["tools/lint: CALLS_UP names _help -> look, which is not called"]


def test_prose_and_comments_do_not_count(check):
    comment = "comment on function baton._help(integer) is 'Says now() or " + "x" * 120 + "';\n"
    assert check({HELP: add("-- clock_timestamp() and baton._gone()\n")}) == []
    assert not [f for f in check({HELP: add(comment)}) if "columns" in f]


# --- releases ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def releases(lint, tmp_path):
    """releases(change) -> the faults after a change of a tree with two frozen releases and the parts of a third."""
    control, parts = tmp_path / "pg_baton.control", tmp_path / "sql"
    (parts / "upgrade").mkdir(parents=True)
    (parts / "frozen").mkdir()
    (parts / "install.sql").write_text("\\ir 000_schema.state.sql\n\\ir 010_version.sql\n")
    (parts / "000_schema.state.sql").write_text("create schema baton;\n")
    (parts / "upgrade/guard.sql").touch()

    def say(version, frozen=True):
        control.write_text(f"default_version = '{version}'\n")
        (parts / "010_version.sql").write_text(f"select '{version}'::text as version;\n")
        if frozen:
            subprocess.run([TREE / "tools/build", "freeze"], check=True, capture_output=True,
                           env={**os.environ, "SQL": str(parts)})

    def releases(change=lambda _: None):
        lint.faults.clear()
        change(tmp_path)
        lint.check_steps(tmp_path)
        lint.check_releases(tmp_path)
        return list(lint.faults)

    say("0.1.0")
    (parts / "upgrade/0.1.0--0.2.0.sql").write_text("alter table baton.things add column note text;\n")
    say("0.2.0")
    releases.say = say
    return releases


def test_frozen_releases_and_the_next_version_have_no_faults(releases):
    assert releases() == []
    releases.say("0.3.0-dev", frozen=False)
    (step,) = releases()
    assert step == "sql/upgrade/0.2.0--0.3.0.sql: is missing, even if empty"
    assert releases(lambda root: (root / "sql/upgrade/0.2.0--0.3.0.sql").touch()) == []


@pytest.mark.parametrize("path, expected", [
    ("sql/frozen/pg_baton--0.1.0.sql", "is frozen, and has changed"),
    ("sql/frozen/pg_baton--0.1.0--0.2.0.sql", "is frozen, and has changed"),
    ("sql/upgrade/0.1.0--0.2.0.sql", "is frozen, and has changed"),
    ("sql/frozen/pg_baton--0.1.5.sql", "is not in SHA256SUMS"),
    ("sql/upgrade/0.1.0--0.1.5.sql", "no release asks for it"),
    ("sql/010_version.sql", "0.2.0 is frozen, and these parts are others"),
])
def test_what_is_frozen_never_changes(releases, path, expected):
    def change(root):
        with open(root / path, "a") as file:
            file.write("comment on table baton.things is 'x';\n" if "upgrade/" not in path else "\n")

    assert any(expected in fault for fault in releases(change))


def test_a_release_is_frozen_once(releases, tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        releases.say("0.2.0")
    assert b"a frozen script never changes" in refused.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as refused:
        releases.say("0.3.0")
    assert b"every release but the first has a step" in refused.value.stderr
    releases.say("0.3.0", frozen=False)
    assert "pg_baton.control: 0.3.0 is not frozen and does not end in -dev" in releases()
