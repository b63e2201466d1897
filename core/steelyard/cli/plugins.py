"""``steelyard plugins`` and ``steelyard doctor``: what is installed, and whether it works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import typer

from steelyard.cli.output import AsJson, print_json, print_table
from steelyard.discovery import BLOCK_VARIABLE, Catalog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from steelyard.discovery import BrokenOffer, Offer

State: TypeAlias = Literal["offered", "ok", "ambiguous", "blocked", "broken"]


class Entry(NamedTuple):
    """One line of a listing.

    Attributes:
        kind: The kind, or the unknown group.
        key: The look-up key.
        distribution: Who offers it.
        version: The distribution's version.
        module: The module that would be imported.
        requires: Versions of steelyard that the distribution works with; empty if not stated.
        state: ``offered`` before an import and ``ok`` after one; or why it cannot be used as it is.
        error: The message, empty if there is none.
    """

    kind: str
    key: str
    distribution: str
    version: str
    module: str
    requires: str
    state: State
    error: str = ""


def plugins(as_json: AsJson = False) -> None:
    """List what installed plugins offer, by kind, from their metadata; import none of them."""
    catalog = Catalog.from_environment()
    ambiguous = catalog.ambiguous()
    entries = [
        _entry(offer, "ambiguous" if (offer.noun, offer.key) in ambiguous else "offered") for offer in catalog.offers
    ]
    entries += _unusable(catalog)
    _print(catalog, entries, as_json=as_json)


def doctor(as_json: AsJson = False) -> None:
    """Import every installed plugin and say which ones work; exit with 1 if one is broken."""
    from steelyard.errors import BrokenPlugin
    from steelyard.registry import Registry

    catalog = Catalog.from_environment()
    registry = Registry(catalog)
    ambiguous = catalog.ambiguous()
    entries = []
    for offer in catalog.offers:
        state: State = "ambiguous" if (offer.noun, offer.key) in ambiguous else "ok"
        try:
            registry.resolve_offer(offer)
        except BrokenPlugin as error:
            entries.append(_entry(offer, "broken", error.why))
        else:
            entries.append(_entry(offer, state))
    entries += _unusable(catalog)
    _print(catalog, entries, as_json=as_json)
    if any(entry.state == "broken" for entry in entries):
        raise typer.Exit(1)


def _entry(offer: Offer, state: State, error: str = "") -> Entry:
    return Entry(offer.noun, offer.key, offer.distribution, offer.version, offer.module, offer.requires, state, error)


def _unusable(catalog: Catalog) -> Iterator[Entry]:
    for offer in catalog.blocked:
        yield _entry(offer, "blocked", f"dropped by {BLOCK_VARIABLE}")
    for entry in catalog.broken:
        yield _broken(entry)


def _broken(entry: BrokenOffer) -> Entry:
    return Entry(entry.noun, entry.key, entry.distribution, entry.version, entry.module, "", "broken", entry.why)


def _print(catalog: Catalog, entries: list[Entry], *, as_json: bool) -> None:
    installed = {entry.distribution for entry in entries}
    idle = [name for name in catalog.block if name not in installed]
    if as_json:
        print_json({"plugins": [entry._asdict() for entry in entries], "block_without_effect": idle})
        return
    if entries:
        columns = ["kind", "key", "distribution", "version", "module", "state"]
        rows = [
            [entry.kind, entry.key, entry.distribution, entry.version, entry.module, entry.state] for entry in entries
        ]
        print_table(columns, rows)
    else:
        print("No installed distribution offers a plugin.")
    for entry in entries:
        if entry.error:
            print(f"{entry.state}: {entry.kind} {entry.key!r} of {entry.distribution} {entry.version}: {entry.error}")
    for name in idle:
        print(f"{BLOCK_VARIABLE} names {name}, which offers nothing here")
