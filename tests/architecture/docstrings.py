"""Checkers of docstrings and of docs/hooks.md, over source text."""

from __future__ import annotations

import ast
import inspect
import re
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Documented: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

ORDER = (
    ("Args", "Attributes"),
    ("Returns", "Yields"),
    ("Raises",),
    ("Shapes",),
    ("Units",),
    ("Source",),
    ("Proved by",),
)
PLACE = {name: place for place, names in enumerate(ORDER) for name in names}
HOOK_SECTIONS = ("Called", "Returns", "Raises", "Imports", "Proved by")
OTHER_SPELLINGS = {
    "Arguments": "Args",
    "Parameters": "Args",
    "Return": "Returns",
    "Yield": "Yields",
    "Raise": "Raises",
    "Sources": "Source",
    "Example": "a doctest without a heading",
    "Examples": "a doctest without a heading",
}


def public(tree: ast.Module) -> Iterator[tuple[str, Documented]]:
    """Yield the public functions, classes and methods of a module with their dotted names."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Documented]]:
        for node in body:
            match node:
                case ast.ClassDef(name=name) if not name.startswith("_"):
                    yield f"{prefix}{name}", node
                    yield from visit(node.body, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                    if not _is_repeated(node):
                        yield f"{prefix}{name}", node
                case ast.If(body=inner, orelse=other):
                    yield from visit([*inner, *other], prefix)

    yield from visit(tree.body, "")


def _is_repeated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether another definition carries the docstring: overloads, setters and overrides."""
    for decorator in node.decorator_list:
        match decorator:
            case (
                ast.Name(id="overload" | "override")
                | ast.Attribute(attr="overload" | "override" | "setter" | "deleter")
            ):
                return True
    return False


def undocumented(text: str) -> Iterator[str]:
    """Find public definitions without a docstring, and a module without one."""
    tree = ast.parse(text)
    if tree.body and not ast.get_docstring(tree):
        yield "1 the module has no docstring"
    for name, node in public(tree):
        if not ast.get_docstring(node):
            yield f"{node.lineno} {name} has no docstring"


def headings(docstring: str) -> list[str]:
    """Return the section headings of a docstring, in their order."""
    names = "|".join([*PLACE, *OTHER_SPELLINGS, "Called", "Imports"])
    return re.findall(rf"^({names}):(?=\s|$)", inspect.cleandoc(docstring), re.MULTILINE)


def misordered(text: str) -> Iterator[str]:
    """Find sections that are out of order, doubled, misspelt, or behind an example."""
    for name, node in public(ast.parse(text)):
        docstring = ast.get_docstring(node)
        if not docstring or is_hookspec(node):
            continue
        found = headings(docstring)
        for heading in found:
            if heading in OTHER_SPELLINGS:
                yield f"{node.lineno} {name}: {heading} is written as {OTHER_SPELLINGS[heading]}"
        known = [heading for heading in found if heading in PLACE]
        for heading in sorted(set(known)):
            if known.count(heading) > 1:
                yield f"{node.lineno} {name}: {heading} stands twice"
        for before, after in zip(known, known[1:], strict=False):
            if PLACE[after] < PLACE[before]:
                yield f"{node.lineno} {name}: {after} stands behind {before}"
        _, example, rest = docstring.partition("\n>>> ")
        if example and headings(rest):
            yield f"{node.lineno} {name}: {headings(rest)[0]} stands behind an example"


def is_hookspec(node: Documented) -> bool:
    """Tell whether a definition is marked as a hook specification."""
    marks = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return any(isinstance(mark, ast.Name) and mark.id == "hookspec" for mark in marks)


def hookspecs(text: str) -> dict[str, str]:
    """Return each hook's name and its signature as written, from ``def`` to the colon, mypy's notes aside."""
    lines = text.splitlines()
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and is_hookspec(node):
            header = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
            found[node.name] = inspect.cleandoc(header).strip().partition("  # type: ignore")[0]
    return found


def bad_hookspecs(text: str) -> Iterator[str]:
    """Find hook specifications whose docstring lacks one of the five sections, or orders them otherwise."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and is_hookspec(node):
            found = tuple(headings(ast.get_docstring(node) or ""))
            if found != HOOK_SECTIONS:
                yield f"{node.lineno} {node.name}: sections {', '.join(found) or 'none'}, not {', '.join(HOOK_SECTIONS)}"
