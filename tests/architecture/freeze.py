"""Write the snapshot of public names: ``python tests/architecture/freeze.py``, or ``make freeze``.

The snapshot holds what users and plugins may rely on. A change of it is a change of the interface: it needs a
line in CHANGELOG.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

HERE = Path(__file__).resolve().parent
SNAPSHOT = HERE / "public_names.json"
DOORS = ("steelyard", "steelyard.plugin", "steelyard.testing", "steelyard.torch")
ABSENT = object()
CONFIG = ("steelyard.config", "LoadConfig")


def described(value: object) -> str:
    """Return one line on a public name: the signature of a function, the kind of anything else."""
    if value is ABSENT:
        return "absent"
    if inspect.isclass(value):
        return "class"
    if inspect.isfunction(value):
        return f"function {inspect.signature(value)}"
    if inspect.ismodule(value):
        return "module"
    return type(value).__name__


def names_of(module: ModuleType) -> dict[str, str]:
    """Return the names of a module's ``__all__``, each loaded and described."""
    return {name: described(value_of(module, name)) for name in sorted(module.__all__)}


def value_of(module: ModuleType, name: str) -> object:
    """Return a name of a module, with whatever it loads lazily; `ABSENT` if its own module is still to be written."""
    try:
        value: object = getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("steelyard."):
            raise
        return ABSENT
    return value


def fields(config: Any) -> dict[str, str]:
    """Return the fields of a pydantic model with annotation and default, as their class wrote them."""
    written: dict[str, object] = {}
    for base in reversed(config.__mro__):
        written.update(vars(base).get("__annotations__", {}))
    return {name: f"{written[name]} = {default_of(field)}" for name, field in config.model_fields.items()}


def default_of(field: Any) -> str:
    """Return the default of a field as text."""
    if field.is_required():
        return "(required)"
    return f"{field.default_factory.__name__}()" if field.default_factory is not None else repr(field.default)


def current() -> dict[str, dict[str, str]]:
    """Return the public names as they are now; of modules that do not exist yet, none."""
    found = {door: names_of(importlib.import_module(door)) for door in DOORS if exists(door)}
    module, name = CONFIG
    if exists(module):
        found[".".join(CONFIG)] = fields(value_of(importlib.import_module(module), name))
    return found


def exists(module: str) -> bool:
    """Tell whether a module is written: a file, and for a package one that says what it exports."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    return module not in DOORS or "__all__" in Path(spec.origin).read_text()


def differences(frozen: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """Return a line for each name that was added, taken away or changed."""
    lines: list[str] = []
    for place in sorted({*frozen, *now}):
        old, new = frozen.get(place, {}), now.get(place, {})
        lines.extend(f"{place}: {name} is new" for name in new if name not in old)
        lines.extend(f"{place}: {name} is gone" for name in old if name not in new)
        lines.extend(
            f"{place}: {name} was {old[name]!r}, is {new[name]!r}"
            for name in new
            if name in old and old[name] != new[name]
        )
    return lines


if __name__ == "__main__":
    text = json.dumps(current(), indent=2, sort_keys=True) + "\n"
    changed = not SNAPSHOT.exists() or SNAPSHOT.read_text() != text
    SNAPSHOT.write_text(text)
    sys.stdout.write(f"{SNAPSHOT}: {'written' if changed else 'unchanged'}\n")
