"""docs/guarantees.md and tests/mutants.toml speak of the same mutants, and of tests that are there."""
import re
import tomllib

from conftest import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/guarantees.md").read_text().splitlines()
    if line.startswith("|")
][2:]
MUTANTS = {mutant["name"]: mutant for mutant in tomllib.loads((ROOT / "tests/mutants.toml").read_text())["mutant"]}


def test_every_mutant_stands_with_a_promise_and_every_named_mutant_exists():
    named = {name.strip() for row in ROWS for name in row[2].split(";")}
    assert set(MUTANTS) <= named
    assert {name for name in named if re.match(r"[\w ]+: ", name)} <= set(MUTANTS)


def test_every_promise_names_a_test():
    assert [row[0] for row in ROWS if not row[0].startswith("**") and not row[1]] == []


def test_every_mutant_changes_one_place_of_its_file():
    for name, mutant in MUTANTS.items():
        assert (ROOT / mutant["file"]).read_text().count(mutant["find"]) == 1, name
        assert mutant["replace"] != mutant["find"], name


def test_every_test_that_a_mutant_names_is_there():
    for name, mutant in MUTANTS.items():
        for test in mutant["tests"]:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text()
            assert not function or re.search(rf"(def|class) {re.escape(function.split('::')[0].split('[')[0])}\b", text), (name, test)
