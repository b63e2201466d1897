"""Keep the status column of docs/requirements.md: which tests name a requirement, or why none does.

A test names a requirement by its id in the docstring of the test, or of the suite or test class around it. Run this to rewrite
the column; titles and reasons are written by hand in the page and kept. A status is one of::

    tests: tests/unit/test_checkpoint.py::test_name, ...
    tests: tests/unit/test_checkpoint.py::test_name; partly: what is still missing
    open: why
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "requirements.md"

COUNTS = {"L": 34, "M": 22, "P": 25, "Q": 31, "E": 31, "B": 10, "A": 10, "K": 18, "T": 38, "F": 23, "D": 14, "X": 24}
CASES = 118  # ids R001 to R197, with gaps
OPEN = {  # what a row says that has lost its tests, until someone writes why
    "Q": "needs quantization plugins",
    "E": "needs quantization plugins",
    "A": "needs LoRA",
    "K": "needs kernel plugins",
    "T": "needs the tuning provider",
    "F": "needs more load formats",
}
NOT_YET = "no test names it yet"

ID = re.compile(r"\b(?:[LMPQEBAKTFDX]-\d{2}|R\d{3})\b")
ROW = re.compile(r"^\| (?P<id>[A-Z]-\d{2}|R\d{3}) \| (?P<title>[^|]+?) \| (?P<status>[^|]*?)\s*\|$")
TALLY = re.compile(r"^Tests name \d+ of \d+\.$")


@dataclass(frozen=True, slots=True)
class Row:
    """One requirement.

    Attributes:
        id: Its id, such as ``"L-18"`` or ``"R141"``.
        title: What it demands, in a line.
        status: The last column, as the module's docstring says.
    """

    id: str
    title: str
    status: str

    def line(self) -> str:
        """Return the row as it stands in the page."""
        return f"| {self.id} | {self.title} | {self.status} |"


def test_files(root: Path) -> Iterator[Path]:
    """Yield the files whose docstrings count: test modules, and the suites that core ships."""
    for pattern in ("tests/**/test_*.py", "plugins/*/tests/**/test_*.py", "core/steelyard/testing/**/*.py"):
        yield from sorted(root.glob(pattern))


def named(root: Path) -> dict[str, list[str]]:
    """Return the tests that name each id, as ``path::name`` or ``path::Class::name``."""
    found: dict[str, list[str]] = {}
    for path in test_files(root):
        for name, docstring in tests_of(path.read_text()):
            for requirement in sorted(set(ID.findall(docstring))):
                found.setdefault(requirement, []).append(f"{path.relative_to(root).as_posix()}::{name}")
    return found


def tests_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of each test function, test class and suite of a module."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test"):
                    yield f"{prefix}{name}", ast.get_docstring(node) or ""
                case ast.ClassDef(name=name, body=inner) if name.startswith("Test") or name.endswith("Suite"):
                    yield f"{prefix}{name}", ast.get_docstring(node) or ""
                    yield from visit(inner, f"{prefix}{name}::")

    yield from visit(ast.parse(text).body, "")


def rows_of(page: str) -> list[Row]:
    """Return the rows of the page in their order."""
    return [Row(**match.groupdict()) for match in map(ROW.match, page.splitlines()) if match is not None]


def updated(row: Row, tests: Mapping[str, list[str]]) -> Row:
    """Return a row with the status that it should have."""
    names = tests.get(row.id)
    if names:
        _, partly, rest = row.status.partition("; partly: ")
        return replace(row, status=f"tests: {', '.join(names)}{partly}{rest}")
    if re.match(r"open: \S", row.status):
        return row
    return replace(row, status=f"open: {OPEN.get(row.id[0], NOT_YET)}")


def rewritten(page: str, tests: Mapping[str, list[str]]) -> str:
    """Return the page with every status and the tally brought up to date."""
    rows = rows_of(page)
    tally = f"Tests name {sum(row.id in tests for row in rows)} of {len(rows)}."
    lines: list[str] = []
    for line in page.splitlines():
        match = ROW.match(line)
        lines.append(updated(Row(**match.groupdict()), tests).line() if match else TALLY.sub(tally, line))
    return "\n".join(lines) + "\n"


def problems(page: str, tests: Mapping[str, list[str]], *, counts: Mapping[str, int], cases: int) -> list[str]:
    """Return a line for each way in which the page is wrong.

    Args:
        page: Text of docs/requirements.md.
        tests: The tests that name each id.
        counts: How many requirements each letter has.
        cases: How many cases there are.
    """
    rows = rows_of(page)
    ids = [row.id for row in rows]
    expected = {f"{letter}-{number:02}" for letter, count in counts.items() for number in range(1, count + 1)}
    lines = [f"{name} has no row" for name in sorted(expected - set(ids))]
    lines += [f"{name} has {ids.count(name)} rows" for name in sorted(set(ids)) if ids.count(name) > 1]
    lines += [f"{name} is no requirement" for name in sorted(set(ids) - expected) if not name.startswith("R")]
    if (found := sum(name.startswith("R") for name in set(ids))) != cases:
        lines.append(f"{found} cases have a row, not {cases}")
    for name in sorted(set(tests) - set(ids)):
        lines.append(f"{name} is named by {tests[name][0]}, but has no row")
    for row in rows:
        wanted = updated(row, tests).status
        if row.status != wanted:
            lines.append(f"{row.id} says {row.status!r}, should say {wanted!r}")
    if not lines and page != rewritten(page, tests):
        lines.append("the tally is out of date")
    return lines


if __name__ == "__main__":
    before = PAGE.read_text()
    tests = named(REPOSITORY)
    PAGE.write_text(rewritten(before, tests))
    for problem in (remaining := problems(PAGE.read_text(), tests, counts=COUNTS, cases=CASES)):
        sys.stderr.write(f"{problem}\n")
    sys.stdout.write(next(line for line in PAGE.read_text().splitlines() if TALLY.match(line)) + "\n")
    sys.exit(1 if remaining else 0)
