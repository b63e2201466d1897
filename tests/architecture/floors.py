"""The floors of core: the table, and the checker that reads imports from source.

To renumber, move a name to another row or put a row between two: a floor's number is its place, lowest first.
Never loosen the rule. A package stands in the table as one name, and its modules may import each other
as long as no cycle arises; give one of them a row of its own (``"ops.moe"``) to hold it to a floor.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = REPOSITORY / "core" / "steelyard"

TORCH_LINE = "torch line"  # marks the place in ROWS: no module of a row before it imports torch or numpy
ROOT = "__init__"  # the package's own module

ROWS: tuple[tuple[str, ...] | str, ...] = (
    ("findings", "kinds", "dtypes"),
    ("errors",),
    ("closed", "fields", "flags", "granularity", "headers", "ranks", "rope", "sizes", "target"),
    ("placement", "checkpoint"),
    ("blueprint", "extents", "schemes", "discovery", "sentences", "texts"),
    ("config", "layouts", "local", "report"),
    ("steps",),
    ("protocols",),
    ("hookspecs", "names", "decoder"),
    ("plugin", "registry"),
    ("choice", "units"),
    ("matching", "segments"),
    ("parts",),
    ("tasks",),
    ("plan_table",),
    ("loadplan", "segmenting"),
    ("planning",),
    TORCH_LINE,
    ("collectives", "ops", "sampling", "storage", "agree"),
    ("checks", "layers", "reader"),
    ("experts", "decoder.attention"),
    ("execute", "decoder.model"),
    ("reporting",),
    ("torch", "loader"),
    ("embedding", "generation", "into"),
    (ROOT,),
    ("cli", "testing"),
)

# Rows whose module is still to be written. A name leaves this set in the change that adds the module.
PLANNED: frozenset[str] = frozenset()

# Modules below the line that may ask torch about this machine, inside a function and only there: name -> reason.
TORCH_IN_FUNCTION: Mapping[str, str] = {}
TORCH_FREE_ABOVE = frozenset({ROOT, "cli"})  # stand above the line, import torch inside functions only
BUILTIN = "builtin"  # enters through entry points: no row
BUILTIN_ABOVE_LINE: frozenset[str] = frozenset()  # its modules that import torch at module level
DOORS = ("plugin", "torch")
BANNED_BELOW = frozenset({"torch", "numpy"})


@dataclass(frozen=True)
class Import:
    """One import statement, or one `importlib.import_module` of a literal name.

    Attributes:
        name: What is imported, absolute; for ``from a import b`` both ``a`` and ``b``: ``a.b``.
        line: Line of the statement.
        base: The part before ``import`` of a ``from`` statement, else the name.
        in_function: Whether it runs only when a function is called.
        type_checking: Whether it stands under ``TYPE_CHECKING``.
    """

    name: str
    line: int
    base: str
    in_function: bool
    type_checking: bool

    @property
    def runs_on_import(self) -> bool:
        """Whether importing the module executes it."""
        return not self.in_function and not self.type_checking


@dataclass(frozen=True)
class Floors:
    """A table of floors.

    Attributes:
        rows: Names of modules, lowest floor first; `TORCH_LINE` once or never.
        planned: Names in the table whose module need not exist.
    """

    rows: Sequence[tuple[str, ...] | str]
    planned: frozenset[str] = frozenset()

    def numbers(self) -> dict[str, int]:
        """Return the floor of each name."""
        rows = [row for row in self.rows if not isinstance(row, str)]
        return {name: number for number, row in enumerate(rows) for name in row}

    def below_line(self) -> tuple[str, ...]:
        """Return the names under the torch line, lowest first."""
        names: list[str] = []
        for row in self.rows:
            if isinstance(row, str):
                return tuple(names)
            names.extend(row)
        return tuple(names)

    def entry(self, module: str) -> str | None:
        """Return the name in the table that holds a module: its own, or that of a package around it."""
        numbers = self.numbers()
        while module:
            if module in numbers:
                return module
            module = module.rpartition(".")[0]
        return None


def table() -> Floors:
    """Return core's table."""
    return Floors(ROWS, PLANNED)


def module_files(root: Path) -> dict[str, Path]:
    """Return the modules of a package by their name below it; the package's own is `ROOT`.

    Modules of a sub-package are ``sub`` for its ``__init__`` and ``sub.name``.
    """
    found: dict[str, Path] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports_of(tree: ast.Module, module: str, package: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yield every import of a module, wherever it stands.

    Args:
        tree: The parsed module.
        module: Its name below the package, or `ROOT`.
        package: Name of the package, such as ``"steelyard"``.
        is_package: Whether the module is an ``__init__``, which relative imports count from.
    """
    full = package if module == ROOT else f"{package}.{module}"
    around = full if is_package else full.rpartition(".")[0]

    def absolute(node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = around.split(".")
        parts = parts[: len(parts) - node.level + 1]
        return ".".join([*parts, node.module] if node.module else parts)

    def visit(node: ast.AST, in_function: bool, type_checking: bool) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, node.lineno, alias.name, in_function, type_checking)
            case ast.ImportFrom(names=names):
                base = absolute(node)
                for alias in names:
                    yield Import(f"{base}.{alias.name}", node.lineno, base, in_function, type_checking)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if _is_import_module(func):
                yield Import(name, node.lineno, name, in_function, type_checking)
        match node:
            case ast.If(test=test, body=body, orelse=orelse) if _is_type_checking(test):
                for child in body:
                    yield from visit(child, in_function, True)
                for child in orelse:
                    yield from visit(child, in_function, type_checking)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for part in (*node.decorator_list, node.args):
                    yield from visit(part, in_function, type_checking)
                for child in node.body:
                    yield from visit(child, True, type_checking)
            case ast.Lambda(body=value):
                yield from visit(value, True, type_checking)
            case _:
                for inner in ast.iter_child_nodes(node):
                    yield from visit(inner, in_function, type_checking)

    yield from visit(tree, False, False)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _is_import_module(func: ast.expr) -> bool:
    name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
    return name in {"import_module", "__import__"}


def all_imports(root: Path) -> dict[str, tuple[Import, ...]]:
    """Return the imports of every module of a package."""
    return {
        module: tuple(imports_of(ast.parse(path.read_text()), module, root.name, is_package=path.name == "__init__.py"))
        for module, path in module_files(root).items()
    }


def target_of(item: Import, package: str, modules: Iterable[str], floors: Floors) -> str | None:
    """Return the module of the package that an import names, `ROOT` for the package itself, None for others."""
    known = set(modules) | set(floors.numbers())
    for name in (item.name, item.base):
        if name == package:
            return ROOT
        inner = name.removeprefix(f"{package}.")
        if inner != name and (inner in known or name == item.base):
            return inner
    return None


def violations(root: Path, floors: Floors) -> list[str]:
    """Return a line for each break of the floors in a package.

    Args:
        root: The package's folder.
        floors: Its table.
    """
    numbers = floors.numbers()
    found = all_imports(root)
    lines = [*_table_violations(found, floors)]
    inside: dict[str, set[str]] = {}
    for module, items in found.items():
        if _in_builtin(module):
            lines.extend(_builtin_violations(module, items, root.name, found, floors))
            continue
        own = floors.entry(module)
        if own is None:
            continue
        for item in items:
            target = target_of(item, root.name, found, floors)
            if target is None:
                continue
            where = f"{module}:{item.line}"
            if _in_builtin(target):
                lines.append(f"{where} imports {target}: builtin enters through entry points, nothing imports it")
                continue
            other = floors.entry(target)
            if other is None:
                if target not in found:
                    lines.append(f"{where} imports {target}, which neither exists nor has a row")
                continue
            if other == own:
                if target != module:
                    inside.setdefault(module, set()).add(target)
            elif numbers[other] >= numbers[own]:
                how = ", under TYPE_CHECKING" if item.type_checking else ", in a function" if item.in_function else ""
                lines.append(
                    f"{where} (floor {numbers[own]}) imports {target} (floor {numbers[other]}){how}: "
                    f"only lower floors may be imported"
                )
    lines.extend(f"{' -> '.join(cycle)}: a cycle inside a package" for cycle in _cycles(inside))
    return lines


def _table_violations(found: Iterable[str], floors: Floors) -> Iterator[str]:
    numbers = floors.numbers()
    modules = list(found)
    listed = [name for row in floors.rows if not isinstance(row, str) for name in row]
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        yield f"{name} stands in two rows of the table"
    for module in modules:
        if module != ROOT and not _in_builtin(module) and floors.entry(module) is None:
            yield (
                f"{module} has no floor: put it in ROWS of tests/architecture/floors.py, one row above "
                f"the highest module that it imports"
            )
    for name in numbers:
        exists = name in modules or any(module.startswith(f"{name}.") for module in modules)
        if exists and name in floors.planned:
            yield f"{name} exists: take it out of PLANNED in tests/architecture/floors.py"
        if not exists and name not in floors.planned:
            yield f"{name} stands in ROWS but does not exist: remove its row, or list it in PLANNED until it is written"
    for name in sorted(floors.planned - set(numbers)):
        yield f"{name} is PLANNED but has no row"


def _in_builtin(module: str) -> bool:
    return module == BUILTIN or module.startswith(f"{BUILTIN}.")


def _builtin_violations(
    module: str, items: Iterable[Import], package: str, found: Mapping[str, object], floors: Floors
) -> Iterator[str]:
    for item in items:
        target = target_of(item, package, found, floors)
        if target is None or _in_builtin(target):
            continue
        door = floors.entry(target)
        if door not in DOORS:
            yield f"{module}:{item.line} imports {target}: a plugin, core's own too, imports the doors only"
        elif door == "torch" and item.runs_on_import and module not in BUILTIN_ABOVE_LINE:
            yield f"{module}:{item.line} imports {target} at module level, but stands below the torch line"


def _cycles(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    done: set[str] = set()
    for start in graph:
        stack: list[tuple[str, tuple[str, ...]]] = [(start, (start,))]
        seen: set[str] = set()
        while stack:
            node, path = stack.pop()
            for following in sorted(graph.get(node, ())):
                if following == start and start not in done:
                    done.update(path)
                    yield (*path, start)
                elif following not in seen:
                    seen.add(following)
                    stack.append((following, (*path, following)))


def torch_free_modules(root: Path, floors: Floors) -> tuple[str, ...]:
    """Return the existing modules that import without torch: those below the line, and the named ones above it."""
    below = {*floors.below_line(), *TORCH_FREE_ABOVE}
    return tuple(
        module
        for module in module_files(root)
        if (_in_builtin(module) and module not in BUILTIN_ABOVE_LINE) or floors.entry(module) in below
    )


def torch_violations(root: Path, floors: Floors) -> list[str]:
    """Return a line for each import of torch or numpy that runs when a torch-free module is imported.

    Below the line the import may stand under ``TYPE_CHECKING`` only (but see `TORCH_IN_FUNCTION`); in the
    modules of `TORCH_FREE_ABOVE` and in builtin, in functions too.
    """
    lines: list[str] = []
    below = set(floors.below_line())
    found = all_imports(root)
    for module in torch_free_modules(root, floors):
        strict = floors.entry(module) in below and module not in TORCH_IN_FUNCTION
        for item in found[module]:
            top = item.name.partition(".")[0]
            if top in BANNED_BELOW and (item.runs_on_import or (strict and not item.type_checking)):
                lines.append(f"{module}:{item.line} imports {top}, but stands below the torch line")
    return lines
