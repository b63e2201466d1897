"""Rules that no linter here checks, over core and plugins; `house_rules.py` beside this file holds the checkers."""

import json
import os
import subprocess
import sys

import pytest
from floors import CORE, ROOT, table, torch_free_modules
from house_rules import CHECKS, broken, shipped, suite_files

# Every exemption: its line as the checker prints it without the line number, and why it is right.
EXEMPT: dict[str, dict[str, str]] = {
    "X-09": {},
    "X-10": {},
    "L-26": {},
    "M-21": {},
}
MOCKING: dict[str, str] = {}  # test files that use unittest.mock, and what lies outside their claim


def without_line(text: str) -> str:
    """Drop the line number of a finding, so that an exemption outlives an edit above it."""
    place, _, what = text.partition(" ")
    return f"{place.rpartition(':')[0]} {what}"


def unexcused(rule: str, files: dict[str, str]) -> list[str]:
    """Return the breaks that have no exemption."""
    return [line for line in broken(rule, files) if without_line(line) not in EXEMPT.get(rule, {})]


def test_type_ignores_carry_a_code_and_a_reason():
    """X-08: no blanket ignore in a line or a file."""
    found = unexcused("X-08", {**shipped(), **suite_files()})
    assert not found, "\n".join(["", *found])


def test_errors_are_narrow():
    """X-09: nothing swallows a broad error, and no ``finally`` returns over one."""
    found = unexcused("X-09", {**shipped(), **suite_files()})
    assert not found, "\n".join(["", *found])


def test_attributes_with_a_known_name_are_written_as_such():
    """X-10: no getattr, setattr or delattr of a literal."""
    found = unexcused("X-10", shipped())
    assert not found, "\n".join(["", *found])


def test_no_public_function_takes_open_keywords():
    """L-26: forwarding needs an explicit list."""
    found = unexcused("L-26", shipped())
    assert not found, "\n".join(["", *found])


def test_no_test_module_is_a_script():
    """X-05: tests assert, in a framework."""
    files = {name: text for name, text in suite_files().items() if name.rpartition("/")[2].startswith("test_")}
    assert files
    found = unexcused("X-05", files)
    assert not found, "\n".join(["", *found])


def test_tests_use_public_names():
    """M-21: no private name of a package is read, imported or patched."""
    found = unexcused("M-21", suite_files())
    assert not found, "\n".join(["", *found])


def test_no_module_reads_the_environment_when_imported():
    """D-05, X-11: by source, in core and in every plugin."""
    found = unexcused("D-05", shipped())
    assert not found, "\n".join(["", *found])


def test_importing_core_asks_the_environment_nothing_of_ours():
    """D-05, X-11: by running it, with every look-up recorded, and nothing of torch or a GPU started."""
    code = (
        "import importlib, json, os, sys\n"
        "asked, get = [], os.environ.__class__.__getitem__\n"
        "def record(self, key):\n"
        "    asked.append(key)\n"
        "    return get(self, key)\n"
        "os.environ.__class__.__getitem__ = record\n"
        "os.environ.get('STEELYARD_PROBE'), os.getenv('STEELYARD_PROBE'), 'STEELYARD_PROBE' in os.environ\n"
        "assert asked == ['STEELYARD_PROBE'] * 3, asked\n"
        "asked.clear()\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(asked))\n"
    )
    modules = ["steelyard" if name == ROOT else f"steelyard.{name}" for name in torch_free_modules(CORE, table())]
    path = os.pathsep.join([str(CORE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    ours = ("STEELYARD_", "DG_", "KIMI_", "AITER_", "RTP_")
    assert [name for name in json.loads(done.stdout) if name.startswith(ours)] == []


def test_every_test_that_mocks_is_listed():
    """X-02: a test that uses unittest.mock says in `MOCKING` what lies outside its claim."""
    assert {line.partition(":")[0] for line in broken("X-02", suite_files())} == set(MOCKING)


def test_every_exemption_is_still_needed():
    """An exemption that excuses nothing hides the next break."""
    for rule, lines in EXEMPT.items():
        files = {**shipped(), **suite_files()}
        assert set(lines) - {without_line(line) for line in broken(rule, files)} == set(), rule


BAD = [
    ("X-08", "x = 1  # type: ignore", "1 type: ignore without a code"),
    ("X-08", "# type: ignore\nx = 1", "1 type: ignore without a code"),
    (
        "X-08",
        "x = 1\ny = 2  # type: ignore[misc]",
        "2 type: ignore without a reason, behind it or in a comment above it",
    ),
    ("X-08", "# mypy: ignore-errors", "1 switches a tool off for the whole file"),
    ("X-08", "# ruff: noqa: F401", "1 switches a tool off for the whole file"),
    ("X-09", "try:\n    f()\nexcept:\n    raise", "3 bare except"),
    ("X-09", "try:\n    f()\nexcept Exception:\n    pass", "3 a broad except that swallows"),
    ("X-09", "try:\n    f()\nexcept (OSError, BaseException):\n    ...", "3 a broad except that swallows"),
    (
        "X-09",
        "def g():\n    try:\n        f()\n    except Exception:\n        return None",
        "4 a broad except that swallows",
    ),
    (
        "X-09",
        "for i in x:\n    try:\n        f()\n    except Exception:\n        continue",
        "4 a broad except that swallows",
    ),
    ("X-09", "import contextlib\nwith contextlib.suppress(Exception):\n    f()", "2 suppresses a broad exception"),
    (
        "X-09",
        "def g():\n    try:\n        f()\n    finally:\n        if x:\n            return 1",
        "6 return in finally",
    ),
    ("X-09", "for i in x:\n    try:\n        f()\n    finally:\n        break", "5 break in finally"),
    ("X-10", "getattr(x, 'lit')", "1 getattr of the literal 'lit'"),
    ("X-10", "getattr(x, 'lit', None)", "1 getattr of the literal 'lit'"),
    ("X-10", "setattr(x, 'lit', 1)", "1 setattr of the literal 'lit'"),
    ("L-26", "def f(a, **kwargs): ...", "1 f takes **kwargs"),
    ("L-26", "class A:\n    def __init__(self, **options): ...", "2 A.__init__ takes **options"),
    ("L-26", "class A:\n    async def run(self, **more): ...", "2 A.run takes **more"),
    ("X-05", "def main(): ...", "1 a test module with main()"),
    ("X-05", "if __name__ == '__main__':\n    f()", "1 a test module with a main guard"),
    ("M-21", "import steelyard.registry as r\nr._cache.clear()", "2 uses steelyard.registry: _cache"),
    ("M-21", "import steelyard.a\nsteelyard.a._b = 1", "2 uses steelyard.a: _b"),
    ("M-21", "from steelyard import registry\nregistry.Registry._x()", "2 uses steelyard.registry: _x"),
    ("M-21", "from steelyard.registry import _cache", "1 imports steelyard.registry._cache"),
    ("M-21", "from steelyard import a\nmonkeypatch.setattr(a, '_b', 1)", "2 patches _b"),
    ("M-21", "monkeypatch.setattr('steelyard.a._b', 1)", "1 patches steelyard.a._b"),
    ("D-05", "import os\nX = os.environ.get('A')", "2 environ at module level"),
    ("D-05", "from os import environ\nclass A:\n    x = environ['A']", "3 environ at module level"),
    ("D-05", "import os\ndef f(a=os.getenv('A')): ...", "2 getenv at module level"),
    ("D-05", "import os\nif os.environ:\n    x = 1", "2 environ at module level"),
    ("X-02", "from unittest.mock import patch", "1 imports unittest.mock"),
    ("X-02", "from unittest import mock", "1 imports unittest.mock"),
    ("X-02", "def f():\n    import unittest.mock", "2 imports unittest.mock"),
]

GOOD = [
    ("X-08", "x = 1  # type: ignore[misc]  # torch has no stub for it"),
    ("X-08", "# torch has no stub for it\nx = 1  # type: ignore[misc]"),
    ("X-08", "x = '# type: ignore'"),
    ("X-09", "try:\n    f()\nexcept OSError:\n    pass"),
    ("X-09", "try:\n    f()\nexcept Exception as error:\n    failures.append(error)"),
    ("X-09", "try:\n    f()\nexcept Exception:\n    raise"),
    ("X-09", "try:\n    f()\nfinally:\n    for i in x:\n        break"),
    ("X-09", "try:\n    f()\nfinally:\n    def g():\n        return 1"),
    ("X-10", "getattr(x, name)"),
    ("X-10", "monkeypatch.setattr(x, 'lit', 1)"),
    ("L-26", "def _f(**kwargs): ..."),
    ("L-26", "def f():\n    def inner(**kwargs): ..."),
    ("X-05", "def test_main(): ..."),
    ("M-21", "import os\nos._exit(1)"),
    ("M-21", "from steelyard import a\na.__doc__\nself._x = 1"),
    ("D-05", "import os\ndef f():\n    return os.environ['A']"),
    ("D-05", "import os\nf = lambda: os.getenv('A')"),
    ("X-02", "import unittest"),
]


@pytest.mark.parametrize(("rule", "source", "line"), BAD)
def test_each_checker_bites(rule, source, line):
    assert list(CHECKS[rule](source)) == [line]


@pytest.mark.parametrize(("rule", "source"), GOOD)
def test_each_checker_lets_good_code_through(rule, source):
    assert list(CHECKS[rule](source)) == []


def test_each_checker_is_shown_to_bite():
    assert {rule for rule, _, _ in BAD} == set(CHECKS)
