"""metrics() as its readers take it: parsed, scraped with psql, drawn by the dashboard, counted beside other sessions."""

import json
import re
import threading

import prometheus_client.openmetrics.parser as openmetrics
import prometheus_client.parser as prometheus
import psycopg
import pytest
from conftest import ROOT
from runs import granted, wake
from starts import call
from tasks import dispatch, extend, inline, queued, start_task, take_task

DASHBOARD = json.loads((ROOT / "docs/grafana/pg_baton.json").read_text())
NAMES = ['plain', 'with "quotes"', "back\\slash", "curly {brace}, a=\"b\"", "ünï cödé 🎵", "%s %(x)s $1"]


def read(conn):
    return conn.execute("select baton.metrics() as text").fetchone().text


def families(text):
    """The families as an OpenMetrics parser reads them, by name."""
    return {family.name: family for family in openmetrics.text_string_to_metric_families(text)}


def samples(conn):
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families(read(conn)).values() for s in f.samples}


def value(conn, name, **labels):
    return samples(conn)[name, tuple(sorted(labels.items()))]


@pytest.fixture
def full(conn):
    """A connection to a database with something in every gauge and counter."""
    for name in NAMES:
        conn.execute("select baton.send(%s, '1')", (name,))
    call(conn, "register_worker_function", function_name="orders", queue_name=NAMES[1], url="http://127.0.0.1:9")
    call(conn, "register_worker", worker_id="00000000-0000-0000-0000-000000000001", function_name="orders")
    inline(conn)
    wake(conn)
    _, epoch = granted(conn, visibility="1 hour")
    dispatch(conn, epoch)
    return conn


def test_a_parser_of_openmetrics_reads_it(full):
    text = read(full)
    read_back = families(text)
    assert {f.type for f in read_back.values()} == {"gauge", "counter"}
    assert all(f.documentation and f.samples for f in read_back.values())
    assert {f.name for f in read_back.values() if f.unit} == {f for f in read_back if f.endswith("_seconds")}
    assert all(s.name == f.name + ("_total" if f.type == "counter" else "")
               for f in read_back.values() for s in f.samples)
    labels = [tuple(s.labels) for f in read_back.values() for s in f.samples]
    assert {label for group in labels for label in group} == {
        "version", "severity", "finding", "queue", "state", "function", "control", "status", "alive", "owner", "kind"}
    assert value(full, "baton_backstops_armed_total") == 1


def test_odd_names_come_back_as_they_are(full):
    for name in NAMES:
        assert value(full, "baton_queue_messages", queue=name, state="ready") == 1


def test_the_older_format_of_prometheus_reads_the_same(full):
    text = read(full)
    older = {(s.name, tuple(sorted(s.labels.items()))): s.value
             for f in prometheus.text_string_to_metric_families(text) for s in f.samples}
    newer = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families(text).values() for s in f.samples}
    assert older == newer


def test_psql_prints_what_can_be_scraped(db, full):
    printed = db.psql("-At", "-c", "select baton.metrics()").stdout
    assert printed.endswith("\n# EOF\n")
    assert families(printed).keys() == families(read(full)).keys()


def test_it_is_read_in_a_read_only_transaction(full):
    full.execute("begin read only")
    assert families(read(full))
    full.execute("rollback")


# --- the dashboard ------------------------------------------------------------------------------

EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]


def test_every_metric_and_label_of_the_dashboard_exists(full):
    known = {}
    for (name, labels) in samples(full):
        known.setdefault(name, set()).update(label for label, _ in labels)
    used = [(name, selector) for e in EXPRESSIONS for name, selector in re.findall(r"\b(baton_\w+)\{([^}]*)\}", e)]
    assert len(used) == sum(e.count("baton_") for e in EXPRESSIONS) >= 20
    for name, selector in used:
        assert name in known
        assert {m for m in re.findall(r"(\w+)=", selector)} - {"job"} <= known[name], (name, selector)
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(r"baton_\w+", target["expr"])
            drawn = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            drawn |= {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
            assert drawn <= known[names[0]], target


def test_the_values_that_the_dashboard_selects_exist(full):
    kinds = {dict(labels)["kind"] for name, labels in samples(full) if name == "baton_incidents_total"}
    selected = [v for e in EXPRESSIONS for group in re.findall(r'kind=~"([^"]*)"', e) for v in group.split("|")]
    assert selected and set(selected) <= kinds


def test_the_dashboard_shows_every_metric(full):
    shown = {name for e in EXPRESSIONS for name in re.findall(r"baton_\w+", e)}
    assert shown == {name for name, _ in samples(full)}


def test_the_panels_of_the_dashboard_have_ids_of_their_own_and_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = [(x, y) for p in DASHBOARD["panels"] for g in [p["gridPos"]]
             for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])]
    assert len(taken) == len(set(taken))


# --- counters beside other sessions ---------------------------------------------------------------


def await_one(conn, receipt):
    assert start_task(conn, receipt).outcome == "await"


def test_two_that_count_the_same_do_not_wait_for_each_other_nor_does_tick(db, conn):
    """Each of two sessions has counted an await and a lost receipt and not committed; a tick adds up what is there."""
    conn.execute("update baton.settings set inline_ownership = false")
    receipts, lost = [], []
    for run_id in ("a", "b"):
        [task] = inline(conn, run_id, visibility="1 hour")
        wake(conn, run_id)
        _, epoch = granted(conn, run_id)
        assert [row.outcome for row in dispatch(conn, epoch, run_id=run_id)] == ["enqueue"]
        receipts.append(take_task(conn, newest=True))
        conn.execute("select baton.send('mail ' || %s, '1')", (run_id,))
        old = call(conn, "claim", queue_name=f"mail {run_id}", visibility="0")[0]
        call(conn, "claim", queue_name=f"mail {run_id}")
        lost.append(old)
    sessions = [db.connect(options="-c lock_timeout=2s") for _ in receipts]
    for session, receipt, old in zip(sessions, receipts, lost, strict=True):
        session.execute("begin")
        await_one(session, receipt)
        assert extend(session, old) == "lost"
    before = value(conn, "baton_awaits_total")
    ticking = db.connect(options="-c lock_timeout=2s")
    call(ticking, "tick")
    sessions[0].execute("commit")
    assert value(conn, "baton_awaits_total") == before + 1
    call(ticking, "tick")
    sessions[1].execute("rollback")
    assert (value(conn, "baton_awaits_total"), value(conn, "baton_incidents_total", kind="lost")) == (before + 1, 1)


def test_a_counter_never_goes_down_and_misses_nothing_while_it_is_added_up_and_incidents_are_removed(db, conn):
    """Two count, one adds up, one removes, until a fifth has read six numbers."""
    counted, readings, failures = [], [], []
    enough = threading.Event()

    def count(connection):
        connection.execute("select baton._incident(baton._now(), 'lost')")
        counted.append(1)

    def fold(connection):
        connection.execute("select baton._fold_tallies()")

    def remove(connection):
        connection.execute("delete from baton.incidents")

    def look(connection):
        readings.append(value(connection, "baton_incidents_total", kind="lost"))
        if len(set(readings)) == 6:
            enough.set()

    def work(what):
        connection = db.connect()
        try:
            while not enough.is_set():
                what(connection)
        except Exception as error:  # shown by the assertion below
            failures.append(error)
            enough.set()

    threads = [threading.Thread(target=work, args=(what,)) for what in (count, count, fold, remove, look)]
    for thread in threads:
        thread.start()
    enough.wait(60)
    enough.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert readings == sorted(readings) and len(set(readings)) == 6
    assert value(conn, "baton_incidents_total", kind="lost") == len(counted)


def test_what_is_rolled_back_is_not_counted(conn):
    queued(conn)
    conn.execute("begin")
    conn.execute("select baton._incident(baton._now(), 'lost')")
    assert value(conn, "baton_incidents_total", kind="lost") == 1
    conn.execute("rollback")
    assert value(conn, "baton_incidents_total", kind="lost") == 0


def test_an_observer_reads_it_and_nobody_else(db, conn):
    user = "metrics_nobody"
    conn.execute(f"create role {user} login")
    try:
        conn.execute(f"grant connect on database {db.name} to {user}")
        with psycopg.connect(db.cluster.dsn(db.name, user=user), autocommit=True) as other:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                other.execute("select baton.metrics()")
            call(conn, "grant_usage", role_name=user, kind="observer")
            assert other.execute("select right(baton.metrics(), 5)").fetchone() == ("# EOF",)
    finally:
        conn.execute(f"drop owned by {user}; drop role {user}")
