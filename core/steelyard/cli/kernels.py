"""``steelyard kernels``: every kernel backend, what it serves and whether it can run here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from steelyard.cli.output import AsJson, print_json, print_table
from steelyard.cli.render import TargetOption

if TYPE_CHECKING:
    from steelyard.registry import Registry


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend.

    Attributes:
        key: Its key.
        distribution: Who offers it.
        version: That distribution's version.
        serves: Whether it has kernels for the target.
        serves_why: Why not, or what it adds to a yes.
        installed: Whether it can run here.
        installed_why: Why not.
        first_for: Weight formats that it is asked first for on the target, before any that has no rank.
        error: Why it cannot be used at all; empty if it can.
    """

    key: str
    distribution: str
    version: str
    serves: bool = False
    serves_why: str = ""
    installed: bool = False
    installed_why: str = ""
    first_for: tuple[str, ...] = ()
    error: str = ""


def kernels(target: TargetOption = None, as_json: AsJson = False) -> None:
    """List the kernel backends: whether each serves a target, whether it can run here, and why not."""
    from steelyard.registry import default_registry
    from steelyard.target import this_machine

    asked = target or this_machine()
    rows = backends(default_registry(), asked)
    if as_json:
        print_json({"target": asked, "kernels": [asdict(row) for row in rows]})
        return
    if not rows:
        print("No installed distribution offers a kernel backend.")
        return
    columns = ["kernel", "distribution", f"serves {asked}", "installed here", "first for"]
    print_table(
        columns,
        [
            [
                row.key,
                f"{row.distribution} {row.version}".strip(),
                row.error or _said(row.serves, row.serves_why),
                "" if row.error else _said(row.installed, row.installed_why),
                ", ".join(row.first_for),
            ]
            for row in rows
        ],
    )


def backends(registry: Registry, target: str) -> list[BackendRow]:
    """Return a row for each backend that is offered, by key; one that cannot be used says why.

    Args:
        registry: What is installed.
        target: What the backends are asked about.
    """
    from steelyard.choice import PREFERRED
    from steelyard.errors import PluginError

    usable = dict(registry.available("kernel backend"))
    rows = []
    for key in registry.list_keys("kernel backend"):
        if key not in usable:
            try:
                registry.resolve("kernel backend", key)
            except PluginError as error:
                rows.append(BackendRow(key, "", "", error=str(error)))
            continue
        backend, offer = usable[key](), registry.offer("kernel backend", key)
        serves, installed = backend.serves(target), backend.installed()
        first_for = tuple(weight for (weight, arch), names in PREFERRED.items() if arch == target and key in names)
        rows.append(
            BackendRow(
                key,
                offer.distribution,
                offer.version,
                serves.ok,
                serves.why,
                installed.ok,
                installed.why,
                first_for,
            )
        )
    return rows


def _said(yes: bool, why: str) -> str:
    word = "yes" if yes else "no"
    return f"{word}: {why}" if why else word
