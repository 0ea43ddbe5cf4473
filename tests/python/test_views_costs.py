"""What health(), metrics() and the views cost beside finished runs. `tools/bench looking` does it with a million."""

import pytest
from looking import LOOKS, at_work, buffers, finished, plan

COMPILED_FROM = 100_000  # jit_above_cost


@pytest.fixture
def db(still_db):
    return still_db


def test_what_is_finished_costs_those_who_look_nothing(db, conn):
    at_work(conn)
    finished(conn, 1, 10_000)
    few = {name: buffers(conn, sql) for name, sql in LOOKS.items()}
    finished(conn, 10_001, 200_000)
    fresh = db.connect()
    many = {name: max(buffers(conn, sql), buffers(fresh, sql)) for name, sql in LOOKS.items()}
    assert {name: (few[name], many[name]) for name in LOOKS if many[name] > 2 * few[name]} == {}
    answers = {name: len(conn.execute(sql).fetchall()) for name, sql in LOOKS.items()}
    assert min(answers.values()) > 0, answers
    costs = {name: plan(conn, sql)["Total Cost"] for name, sql in LOOKS.items()}
    assert {name: cost for name, cost in costs.items() if cost > COMPILED_FROM} == {}, "compiled at each look"
