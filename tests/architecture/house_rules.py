"""Checkers of the house rules: each takes source text and returns a line for each break of its rule."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
SKIPPED = {"__pycache__", "node_modules", "build", "dist"}


def shipped() -> dict[str, str]:
    """Return the text of each module that ships: core, and the plugins' packages."""
    return _read(REPOSITORY / "core", *sorted(REPOSITORY.glob("plugins/*/src")))


def suite_files() -> dict[str, str]:
    """Return the text of each file of the tests: core's and the plugins'."""
    return _read(REPOSITORY / "tests", *sorted(REPOSITORY.glob("plugins/*/tests")))


def _read(*folders: Path) -> dict[str, str]:
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text()
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not SKIPPED.intersection(path.parts)
    }


def broken(rule: str, files: dict[str, str]) -> list[str]:
    """Return the breaks of one rule in many files, each with its file in front."""
    check = CHECKS[rule]
    return [f"{name}:{line}" for name, text in files.items() for line in check(text)]


def blanket_ignores(text: str) -> Iterator[str]:
    """Find type ignores without a code or a reason, and comments that switch a tool off for a file."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, comment = token.start[0], token.string
        if re.match(r"#\s*(mypy:|ruff:\s*noqa|flake8:\s*noqa|pyright:\s*(basic|off))", comment):
            yield f"{row} switches a tool off for the whole file"
        match = re.search(r"#\s*type:\s*ignore(\[[\w\-, ]+\])?(.*)", comment)
        if match is None:
            continue
        above = lines[row - 2].strip() if row > 1 else ""
        if match[1] is None:
            yield f"{row} type: ignore without a code"
        elif not match[2].strip(" #") and not above.startswith("#"):
            yield f"{row} type: ignore without a reason, behind it or in a comment above it"


def wide_excepts(text: str) -> Iterator[str]:
    """Find bare excepts, broad ones that swallow, suppressed broad ones, and jumps out of a ``finally``."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.ExceptHandler(type=None):
                yield f"{node.lineno} bare except"
            case ast.ExceptHandler(type=kind, body=body) if _is_broad(kind) and all(map(_does_nothing, body)):
                yield f"{node.lineno} a broad except that swallows"
            case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=kinds):
                if any(map(_is_broad, kinds)):
                    yield f"{node.lineno} suppresses a broad exception"
            case ast.Try(finalbody=body):
                yield from (f"{jump.lineno} {_jump(jump)} in finally" for jump in _jumps(body, in_loop=False))


def _is_broad(kind: ast.expr | None) -> bool:
    match kind:
        case ast.Name(id="Exception" | "BaseException") | ast.Attribute(attr="Exception" | "BaseException"):
            return True
        case ast.Tuple(elts=kinds):
            return any(map(_is_broad, kinds))
    return False


def _does_nothing(node: ast.stmt) -> bool:
    match node:
        case ast.Pass() | ast.Continue() | ast.Break() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Return(value=None | ast.Constant()):
            return True
    return False


def _jump(node: ast.stmt) -> str:
    return type(node).__name__.lower()


def _jumps(body: list[ast.stmt], *, in_loop: bool) -> Iterator[ast.stmt]:
    for node in body:
        match node:
            case ast.Return():
                yield node
            case ast.Break() | ast.Continue() if not in_loop:
                yield node
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
            case _:
                inner = in_loop or isinstance(node, (ast.For, ast.AsyncFor, ast.While))
                for field in ("body", "orelse", "finalbody"):
                    yield from _jumps(getattr(node, field, []), in_loop=inner)
                for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                    yield from _jumps(part.body, in_loop=inner)


def literal_attributes(text: str) -> Iterator[str]:
    """Find getattr, setattr and delattr with a literal name."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "delattr") as function,
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                yield f"{node.lineno} {function.id} of the literal {name!r}"


def open_keywords(text: str) -> Iterator[str]:
    """Find public functions, methods and constructors that take ``**kwargs``."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            match node:
                case ast.ClassDef(name=name, body=inner) if not name.startswith("_"):
                    yield from visit(inner, f"{prefix}{name}.")
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if _is_public(name):
                    if node.args.kwarg is not None:
                        yield f"{node.lineno} {prefix}{name} takes **{node.args.kwarg.arg}"
                case ast.If() | ast.Try():
                    yield from visit([*node.body, *node.orelse], prefix)

    yield from visit(ast.parse(text).body, "")


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def mains(text: str) -> Iterator[str]:
    """Find a ``main`` function or a main guard."""
    for node in ast.parse(text).body:
        match node:
            case ast.FunctionDef(name="main") | ast.AsyncFunctionDef(name="main"):
                yield f"{node.lineno} a test module with main()"
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                yield f"{node.lineno} a test module with a main guard"


def foreign_privates(text: str) -> Iterator[str]:
    """Find private names of an imported package: read, written, imported, or patched by name.

    The standard library is left out: ``os._exit`` and its like are documented.
    """
    tree = ast.parse(text)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    bound = alias.asname or alias.name.partition(".")[0]
                    names[bound] = alias.name
            case ast.ImportFrom(module=str(base), names=aliases, level=0):
                for alias in aliases:
                    names[alias.asname or alias.name] = f"{base}.{alias.name}"
                    if _is_foreign(base) and _is_private(f"{base}.{alias.name}"):
                        yield f"{node.lineno} imports {base}.{alias.name}"
    names = {bound: name for bound, name in names.items() if _is_foreign(name)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=attribute) if _is_private(attribute):
                root: ast.expr = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in names:
                    yield f"{node.lineno} uses {names[root.id]}: {attribute}"
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "patch" | "object"), args=args):
                literals = [item.value for item in args[:2] if isinstance(item, ast.Constant)]
                owner = args[0] if args else None
                foreign = (isinstance(owner, ast.Name) and owner.id in names) or isinstance(owner, ast.Constant)
                for value in literals:
                    if foreign and isinstance(value, str) and _is_private(value):
                        yield f"{node.lineno} patches {value}"


def _is_foreign(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def environment_at_import(text: str) -> Iterator[str]:
    """Find reads of the environment that importing the module executes."""

    def visit(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
                    yield from visit(part)
                return
            case ast.Lambda():
                return
            case (
                ast.Attribute(attr="environ" | "environb" | "getenv" as name)
                | ast.Name(id="environ" | "getenv" as name)
            ):
                yield f"{node.lineno} {name} at module level"
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(text))


def mocks(text: str) -> Iterator[str]:
    """Find imports of ``unittest.mock``."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=aliases) if any(alias.name.startswith("unittest.mock") for alias in aliases):
                yield f"{node.lineno} imports unittest.mock"
            case ast.ImportFrom(module=str(base), names=aliases):
                if base == "unittest.mock" or (base == "unittest" and any(alias.name == "mock" for alias in aliases)):
                    yield f"{node.lineno} imports unittest.mock"


CHECKS = {
    "X-08": blanket_ignores,
    "X-09": wide_excepts,
    "X-10": literal_attributes,
    "L-26": open_keywords,
    "X-05": mains,
    "M-21": foreign_privates,
    "D-05": environment_at_import,
    "X-02": mocks,
}
