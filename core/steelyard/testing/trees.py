"""Installed distributions written by hand, for tests of discovery; needs no pytest.

A tree is what an installer leaves behind: a ``dist-info`` folder beside the modules.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from steelyard.discovery import normalized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def write_distribution(
    root: Path,
    name: str,
    version: str = "1.0",
    *,
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    modules: Mapping[str, str] | None = None,
    requires: Iterable[str] = (),
) -> Path:
    """Write a distribution as if it were installed and return its ``dist-info`` folder.

    Args:
        root: A folder that is, or will be, on ``sys.path``.
        name: Name of the distribution, as its author spells it.
        version: Its version.
        entry_points: Group to key to module.
        modules: Path below ``root`` to source text, which may be indented as a whole.
        requires: ``Requires-Dist`` values.
    """
    info = root / f"{normalized(name).replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    headers = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    headers += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(headers) + "\n\nA distribution written by hand.\n", encoding="utf-8")
    lines: list[str] = []
    for group, keys in (entry_points or {}).items():
        lines += [f"[{group}]", *(f"{key} = {module}" for key, module in keys.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for place, source in (modules or {}).items():
        file = root / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(source), encoding="utf-8")
    return info


@contextmanager
def importable(root: Path) -> Iterator[Path]:
    """Put a folder first on ``sys.path``; on the way out take it off, with every module that came from it."""
    entry = str(root)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield root
    finally:
        sys.path.remove(entry)
        for name, module in list(sys.modules.items()):
            file = module.__dict__.get("__file__") if module is not None else None
            if isinstance(file, str) and Path(file).is_relative_to(root):
                del sys.modules[name]
        importlib.invalidate_caches()
