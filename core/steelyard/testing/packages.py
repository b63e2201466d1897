"""The laws of a plugin package: it introduces exactly what it declares, and leans on nothing but the two doors."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from steelyard.discovery import CORE, Catalog, Offer, normalized
from steelyard.errors import BrokenPlugin
from steelyard.kinds import BY_NOUN
from steelyard.registry import Registry, by_key, introduced, keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DOORS: Final = ("steelyard.plugin", "steelyard.torch", "steelyard.testing")
HEAVY: Final = ("torch", "triton")


class PluginPackageSuite:
    """Laws of an installed plugin package, to be subclassed by its tests.

    Attributes:
        distribution: Name of the distribution, in any spelling.
    """

    distribution: ClassVar[str]

    def offers(self) -> tuple[Offer, ...]:
        """Return what the distribution declares; a distribution that declares nothing breaks the first law."""
        name = normalized(self.distribution)
        catalog = Catalog.from_environment(block=())
        broken = [entry for entry in catalog.broken if entry.distribution == name]
        assert not broken, "; ".join(map(str, broken))
        offers = tuple(offer for offer in catalog.offers if offer.distribution == name)
        assert offers, f"{name} declares no key in any of steelyard's groups; is it installed here?"
        return offers

    def test_plugin_modules_import_without_torch(self) -> None:
        """A fresh interpreter imports each declared module and has not imported torch or triton then."""
        for module in sorted({offer.module for offer in self.offers()}):
            heavy = _heavy_imports(module)
            assert not heavy, f"importing {module} imports {', '.join(heavy)}; import them inside the functions"

    def test_every_declared_key_resolves(self) -> None:
        """Hooks have the specification's names and signatures, and each declared key is in exactly one class."""
        offers = self.offers()
        catalog = Catalog(offers=offers)
        registry = Registry(catalog)
        failures = []
        for offer in offers:
            try:
                registry.resolve(offer.noun, offer.key)
            except BrokenPlugin as error:
                failures.append(f"{offer.noun} {offer.key!r}: {error.why}")
        assert not failures, "; ".join(failures)

    def test_declared_keys_equal_returned_keys(self) -> None:
        """A key that only the class knows would never be found; one that only the metadata knows breaks."""
        declared: dict[tuple[str, str], set[str]] = {}
        for offer in self.offers():
            declared.setdefault((offer.noun, offer.module), set()).add(offer.key)
        for (noun, module), keys in declared.items():
            classes = introduced(importlib.import_module(module), BY_NOUN[noun])
            returned = {key for cls in classes for key in keys_of(cls)}
            assert returned == keys, (
                f"{module} declares the {noun} keys {', '.join(sorted(keys))}, "
                f"its classes have {', '.join(sorted(returned))}"
            )
            by_key(classes, keys)

    def test_sources_import_only_the_doors(self) -> None:
        """Of steelyard a plugin imports `steelyard.plugin`, `steelyard.torch` and `steelyard.testing`; no other plugin."""
        own = {_package(offer.module) for offer in self.offers()}
        catalog = Catalog.from_environment(block=())
        others = {_package(offer.module) for offer in catalog.offers} - own
        bad = [
            f"{file.name}:{line} imports {module}"
            for package in sorted(own)
            for file in _sources(package)
            for line, module in _imports(file)
            if not _is_within(module, own) and _is_forbidden(module, others)
        ]
        assert not bad, f"{'; '.join(bad)}; a plugin imports {', '.join(DOORS)} and no other plugin"


def _heavy_imports(module: str) -> list[str]:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, f"a fresh interpreter cannot import {module}:\n{child.stderr}"
    return child.stdout.split()


def _package(module: str) -> str:
    """Return the package that belongs to a plugin: the top level one, or the one below steelyard for built-ins."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == CORE else parts[0]


def _sources(package: str) -> list[Path]:
    spec = find_spec(package)
    assert spec is not None, f"{package} is declared, but is not installed"
    if spec.submodule_search_locations:
        return sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin else []


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of each module that a file imports; relative imports stay inside the package."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.lineno, f"{CORE}.{alias.name}" if node.module == CORE else node.module


def _is_within(module: str, packages: set[str] | tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_forbidden(module: str, others: set[str]) -> bool:
    if _is_within(module, (CORE,)):
        return not _is_within(module, DOORS)
    return module.startswith(f"{CORE}_") or _is_within(module, others)
