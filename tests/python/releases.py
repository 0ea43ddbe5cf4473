"""Upgrades under test: from every frozen release to this tree, and between two trees made up for it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import psycopg
from conftest import ROOT, TREE

SQL, BUILD = TREE / "sql", TREE / "tools/build"
FROZEN = SQL / "frozen"
HEAD = re.search(r"'(.*)'::text as version", (SQL / "010_version.sql").read_text())[1]
RELEASED = sorted((path.stem.removeprefix("pg_baton--") for path in FROZEN.glob("pg_baton--*.sql")
                   if path.stem.count("--") == 1), key=lambda version: [int(n) for n in version.split(".")])
BEFORE = [version for version in RELEASED if version != HEAD]

FUNCTION = """
create or replace function baton.{name}()
returns integer
language sql
immutable
begin atomic
  select {value};
end;
"""
# What the newer one of two made-up trees has more, beside a function in every file of code; and what has gone.
STATE = """
alter table baton.queue_marks add column note text;
create table baton.extras (
  extra_id bigint generated always as identity,
  constraint extras_pkey primary key (extra_id)
);
"""
DROPPED = "\ncreate table baton.left_behind (\n  note text\n);\n"
OUT_OF_THE_EXTENSION = """
do $$
begin
  if exists (select from pg_extension as e where e.extname = 'pg_baton') then
    alter extension pg_baton drop table baton.left_behind;
  end if;
end;
$$;
"""
STEP = STATE + "drop function baton._left_over();\n" + OUT_OF_THE_EXTENSION + "drop table baton.left_behind;\n"
VIEW = "\ncreate or replace view baton.extra_view as\nselect q.queue_name, q.note from baton.queue_marks as q;\n"


def build(*goal, sql, out):
    subprocess.run([BUILD, *goal], check=True, capture_output=True, env={**os.environ, "SQL": str(sql), "OUT": str(out)})
    out.chmod(0o644)
    return out


def append(path, text):
    path.write_text(path.read_text() + text)


def tree(folder, version):
    """A copy of the parts that says it is that version."""
    shutil.copytree(SQL, folder, ignore=shutil.ignore_patterns("frozen", "[0-9]*--*.sql"))
    path = folder / "010_version.sql"
    path.write_text(path.read_text().replace(f"'{HEAD}'", f"'{version}'"))
    return folder


class Upgrade:
    """The scripts of one: the installation of the older version, and the steps to the newer one."""

    def __init__(self, house, base, steps, end):
        self.house, self.end, self._fresh = house, end, None
        self.folder = Path(house.cluster.sharedir) / "extension"
        self.start = base.stem.removeprefix("pg_baton--")
        self.base, self.steps = base, steps
        for script in (base, *steps):
            if script.parent != self.folder:
                shutil.copy(script, self.folder)

    def offer(self):
        """CREATE EXTENSION and ALTER EXTENSION mean the newer version."""
        control = (ROOT / "pg_baton.control").read_text()
        (self.folder / "pg_baton.control").write_text(
            re.sub(r"default_version = '.*'", f"default_version = '{self.end}'", control))

    def run(self, script, database, user="house_owner"):
        self.house.execute(script.read_text().replace("\\echo", "-- "), dbname=database, user=user)

    def install(self, way, database, user="house_owner"):
        if way == "extension":
            self.house.execute(f"create extension pg_baton version '{self.start}'", dbname=database, user=user)
        else:
            self.run(self.base, database, user)

    def apply(self, way, database, user="house_owner"):
        """None, or the SQLSTATE and message of the refusal."""
        try:
            if way == "extension":
                self.house.execute("alter extension pg_baton update", dbname=database, user=user)
            else:
                for step in self.steps:
                    self.run(step, database, user)
        except psycopg.Error as error:
            return f"{error.sqlstate}: {error}\n{error.diag.message_hint}"

    def fresh(self):
        """The fingerprint of the newer version, installed as it is."""
        if self._fresh is None:
            self.house.execute("create database fresh template template0")
            self.run(self.folder / f"pg_baton--{self.end}.sql", "fresh", "postgres")
            self._fresh = self.house.fingerprint("fresh")
            self.house.execute("drop database fresh")
        return self._fresh


def released(house, version):
    """From that release, over all later ones, to this tree."""
    chain = [*RELEASED[RELEASED.index(version):], *([] if HEAD in RELEASED else [HEAD])]
    chain = chain[:chain.index(HEAD) + 1]
    steps = []
    for older, newer in zip(chain, chain[1:], strict=False):
        name = f"pg_baton--{older}--{newer}.sql"
        out = Path(house.cluster.sharedir) / "extension" / name
        steps.append(FROZEN / name if newer in RELEASED else build("upgrade", older, newer, sql=SQL, out=out))
    return Upgrade(house, FROZEN / f"pg_baton--{version}.sql", steps, HEAD)


def made_up(house, folder):
    """Two versions that differ in a column, tables, a view, a verb, bodies in every file, and a function that is gone."""
    extensions = Path(house.cluster.sharedir) / "extension"
    old, new = tree(folder / "old", "90.1.0"), tree(folder / "new", "90.2.0")
    append(old / "030_clock.sql", FUNCTION.format(name="_left_over", value=1))
    append(old / "400_tasks.state.sql", DROPPED)
    append(new / "400_tasks.state.sql", STATE)
    ends = old / "350_ends.sql"
    waits = "v_run := baton._lock_run(cancel_run.run_id);"
    ends.write_text(ends.read_text().replace(waits, f"{waits} perform baton._left_over();"))
    for path in sorted(new.glob("*.sql")):
        if path.name < "900" and not path.name.endswith(".state.sql") and path.name[0].isdigit():
            append(path, FUNCTION.format(name=f"_in_{path.stem}", value=2))
            append(old / path.name, FUNCTION.format(name=f"_in_{path.stem}", value=1))
    append(new / "610_schedule.sql", FUNCTION.format(name="new_verb", value=7))
    append(new / "700_views.sql", VIEW)
    roles = new / "800_roles.sql"
    roles.write_text(re.sub(r"('client', 'function',\s+array\[)", r"\1'new_verb',", roles.read_text(), count=1))
    (new / "upgrade/90.1.0--90.2.0.sql").write_text(STEP)
    base = build("extension", sql=old, out=extensions / "pg_baton--90.1.0.sql")
    build("extension", sql=new, out=extensions / "pg_baton--90.2.0.sql")
    script = build("upgrade", "90.1.0", "90.2.0", sql=new, out=extensions / "pg_baton--90.1.0--90.2.0.sql")
    return Upgrade(house, base, [script], "90.2.0")


def same(house, folder):
    """From a version that differs from this tree in its number only, by an empty step."""
    extensions = Path(house.cluster.sharedir) / "extension"
    old, new = tree(folder / "same_old", "0.0.1"), tree(folder / "same_new", HEAD)
    (new / f"upgrade/0.0.1--{HEAD.removesuffix('-dev')}.sql").touch()
    base = build("extension", sql=old, out=extensions / "pg_baton--0.0.1.sql")
    script = build("upgrade", "0.0.1", HEAD, sql=new, out=extensions / f"pg_baton--0.0.1--{HEAD}.sql")
    return Upgrade(house, base, [script], HEAD)
