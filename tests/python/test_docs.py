"""The words around the package: links lead somewhere, each guide has a picture, and what is advised holds."""

import re

import pytest
from conftest import ROOT
from psycopg.types.json import Jsonb
from runs import append, begin, cancel, end, granted, last_seq, signal, start, superseded, take
from starts import call, one
from tasks import complete, create, fail, release, replay, short_way, skip

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "node_modules" not in page.parts]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))


def anchors(page):
    """As GitHub makes them of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_each_guide_has_a_picture(guide):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", guide.read_text(), re.M | re.S)
    assert any(not language and re.search(r"-->|──|<--", text) for language, text in blocks)


def advised(guide, number):
    """A statement of a guide, its literals made parameters by position."""
    statement = re.findall(r"^```sql\n(.*?)^```$", (ROOT / "docs/guides" / guide).read_text(), re.M | re.S)[number]
    return re.sub(r"'orders'", "'q'", re.sub(r"'r', 8343822083997712, 7", "%s, %s, %s", statement))


def test_a_claim_and_the_begin_of_what_it_found_share_a_statement(conn):
    """docs/guides/replay.md: not for messages of other kinds."""
    statement = advised("replay.md", 0)
    plan = "\n".join(row[0] for row in conn.execute("explain " + statement.rstrip(";\n")).fetchall())
    assert re.search(r"Result .*\n +One-Time Filter: \(m.kind = 'run'::text\)\n +-> +Function Scan on begin_replay", plan), plan
    call(conn, "send", queue_name="q", payload=Jsonb(1), kind="mail")
    [row] = conn.execute(statement).fetchall()
    assert (row.kind, row.outcome) == ("mail", None)
    start(conn)
    [row] = conn.execute(statement).fetchall()
    assert (row.kind, row.outcome, row.run_id) == ("run", "granted", "r")


def test_from_run_to_run_a_handler_goes_in_one_statement(conn):
    """docs/guides/replay.md"""
    statement = advised("replay.md", 1)
    for run_id in "abc":
        start(conn, run_id)
    _, epoch = granted(conn, "a")
    signal(conn, "a")
    [row] = conn.execute(statement, ("a", epoch, 1)).fetchall()
    assert (row.ended, row.read_to, row.message_id, row.outcome) == ("again", 2, None, None)
    assert [count for count, in conn.execute("select count(*) from baton.messages where claimed_at is not null")] == [1]
    [row] = conn.execute(statement, ("a", epoch, 2)).fetchall()
    assert (row.ended, row.outcome, row.run_id) == ("ended", "granted", "b")
    [row] = conn.execute(statement, ("b", row.replay_epoch, 1)).fetchall()
    assert (row.ended, row.outcome, row.run_id) == ("ended", "granted", "c")
    conn.execute("delete from baton.messages where run_id = 'a'")
    [row] = conn.execute(statement, ("c", row.replay_epoch, 1)).fetchall()
    assert (row.ended, row.message_id, row.outcome) == ("ended", None, None)


def test_a_log_of_ones_own_is_fenced_by_an_event_beside_each_append(conn):
    """docs/guides/migrating.md, way 1."""
    conn.execute("create table own_log (run_id text, position integer)")
    conn.execute("update baton.settings set visibility = '1 hour'")
    start(conn)
    receipt, epoch = granted(conn)
    with conn.transaction():
        conn.execute("insert into own_log values ('r', 1)")
        assert append(conn, epoch, "own.appended", correlation_id="1") == "appended"
    second = begin(conn, receipt).replay_epoch
    with superseded(), conn.transaction():
        conn.execute("insert into own_log values ('r', 2)")
        append(conn, epoch, "own.appended", correlation_id="2")
    with conn.transaction():
        conn.execute("insert into own_log values ('r', 2)")
        assert append(conn, second, "own.appended", correlation_id="2") == "appended"
    assert conn.execute("select position from own_log order by position").fetchall() == [(1,), (2,)]
    assert end(conn, second, last_seq(conn)).outcome == "ended"
    assert take(conn) is None


def test_the_log_is_as_the_guide_has_it(conn):
    """docs/guides/replay.md: each type of event, and the keys of its payload."""
    [table] = re.findall(r"^## The log\n.*?^\| --- .*?\n(.*?)\n\n", (ROOT / "docs/guides/replay.md").read_text(), re.M | re.S)
    told, seen = {}, {}
    for types, payload in (row.strip("| ").split(" | ")[:2] for row in table.splitlines()):
        for type in re.findall(r"`(\w+)`", types):
            told.setdefault(type, set()).update(re.findall(r"`(\w+)`", payload))

    start(conn)
    signal(conn)
    receipt, epoch = granted(conn)
    forgiven = "given up, skipped", "failed, skipped"
    slugs = "completed", "given up", "failed", *forgiven, "skipped", "released"
    for slug in slugs:
        create(conn, epoch, slug, on_exhausted="skip_step" if slug in forgiven else "fail_step")
    tasks = {task.step_slug: task for task in replay(conn, receipt, epoch, inline_limit=len(slugs))[1]}
    complete(conn, tasks["completed"])
    for slug in "failed", "failed, skipped":
        fail(conn, tasks[slug], final=True)
    for slug in "given up", "given up, skipped":
        release(conn, slug, action="fail")
    skip(conn, "skipped")
    fail(conn, tasks["released"])
    release(conn, "released")
    cancel(conn)
    start(conn, "another")
    call(conn, "complete_run", run_id="another", replay_epoch=granted(conn, "another")[1], output=Jsonb(1))
    start(conn, "third")
    receipt, _ = granted(conn, "third")
    call(conn, "fail", message_id=receipt.message_id, delivery=receipt.delivery, error="no", final=True)

    start(conn, "ahead")
    receipt, epoch = granted(conn, "ahead")
    create(conn, epoch, run_id="ahead")
    replay(conn, receipt, epoch, run_id="ahead")
    one(conn, "advance_run", **short_way(epoch, "ahead"))

    for type, payload in conn.execute("select type, payload from baton.events"):
        seen.setdefault(type, set()).update(payload if isinstance(payload, dict) else ())
    assert seen == told
