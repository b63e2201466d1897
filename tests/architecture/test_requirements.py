"""docs/requirements.md says of every requirement which tests name it, or why none does."""

from pathlib import Path

import pytest
from floors import REPOSITORY

PAGE = "\n".join(
    ["Tests name 1 of 3.", "", "| A-01 | one | tests: tests/test_a.py::test_one |", "| A-02 | two | open: later |"]
)
PAGE += "\n| R007 | seven | open: never |\n"
ONE = {"A-01": ["tests/test_a.py::test_one"]}


@pytest.fixture
def script():
    """Return scripts/requirements.py as a module."""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location("requirements_page", REPOSITORY / "scripts" / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def problems(script):
    """Return the checker over a page of two requirements and a case."""
    return lambda page, tests: script.problems(page, tests, counts={"A": 2}, cases=1)


def test_the_page_is_up_to_date(script):
    """X-17: run `make requirements` if this fails."""
    page = script.PAGE.read_text()
    found = script.problems(page, script.named(REPOSITORY), counts=script.COUNTS, cases=script.CASES)
    assert not found, "\n".join(["", *found])


def test_a_page_that_is_right_passes(problems):
    assert problems(PAGE, ONE) == []


def test_an_id_that_a_test_names_must_not_be_open(problems):
    tests = {**ONE, "R007": ["tests/test_a.py::test_seven"]}
    assert problems(PAGE, tests) == [
        "R007 says 'open: never', should say 'tests: tests/test_a.py::test_seven'",
    ]


def test_a_listed_test_must_exist(problems):
    assert problems(PAGE, {}) == [
        "A-01 says 'tests: tests/test_a.py::test_one', should say 'open: needs LoRA'",
    ]


@pytest.mark.parametrize("status", ["", "done", "open:", "open: "])
def test_an_id_has_tests_or_a_reason(problems, status):
    page = PAGE.replace("open: later", status)
    assert problems(page, ONE) == [f"A-02 says {status.strip()!r}, should say 'open: needs LoRA'"]


def test_rows_are_complete_and_unique(problems):
    assert problems(PAGE.replace("A-02", "A-03"), ONE) == ["A-02 has no row", "A-03 is no requirement"]
    assert problems(PAGE.replace("A-02", "A-01"), ONE)[:2] == ["A-02 has no row", "A-01 has 2 rows"]
    assert problems(PAGE.replace("| R007 | seven | open: never |", ""), ONE) == ["0 cases have a row, not 1"]


def test_an_id_that_does_not_exist_is_found_in_a_test(problems):
    assert problems(PAGE, {**ONE, "A-77": ["tests/test_a.py::test_x"]}) == [
        "A-77 is named by tests/test_a.py::test_x, but has no row"
    ]


def test_the_tally_counts(problems):
    assert problems(PAGE.replace("name 1 of", "name 2 of"), ONE) == ["the tally is out of date"]


def test_rewriting_keeps_titles_reasons_and_what_is_only_partly_proved(script):
    page = PAGE.replace("test_one |", "test_old; partly: not on two ranks |")
    assert script.rewritten(page, ONE) == PAGE.replace("test_one |", "test_one; partly: not on two ranks |")
    assert script.rewritten(PAGE, ONE) == PAGE


def test_ids_are_read_from_tests_test_classes_and_suites(script, tmp_path: Path):
    folder = tmp_path / "plugins" / "model_x" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text(
        '"""L-01: a module names nothing."""\n'
        "def helper():\n    '''L-02'''\n"
        "def test_one():\n    '''Prove it (L-03, R007).'''\n"
        "class TestB(Suite):\n    '''L-04: by the suite.'''\n    def test_two(self):\n        '''L-03'''\n"
        "def test_three():\n    x = 'L-05'\n"
    )
    at = "plugins/model_x/tests/test_a.py::"
    assert script.named(tmp_path) == {
        "L-03": [f"{at}test_one", f"{at}TestB::test_two"],
        "R007": [f"{at}test_one"],
        "L-04": [f"{at}TestB"],
    }
