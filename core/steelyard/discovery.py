"""What installed distributions offer, read from their metadata alone.

Nothing here imports a plugin. The names of a distribution are compared in their normalized form (PEP 503)
everywhere: in a catalog, in ``STEELYARD_BLOCK`` and in what a user prefers.

Source:
    Entry points and METADATA: the PyPA's "Entry points specification" and "Core metadata specifications".
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

import importlib_metadata

from steelyard.kinds import BY_GROUP, GROUP_PREFIX, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from steelyard.kinds import KindName

BLOCK_VARIABLE: Final = "STEELYARD_BLOCK"
CORE: Final = "steelyard"
NOT_INSTALLED: Final = "0+unknown"

_ORDER = {kind.noun: place for place, kind in enumerate(KINDS)}
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(\[[^]]*])?\s*(?P<specifier>[^;]*)(;(?P<marker>.*))?")
_UNREADABLE = (TypeError, ValueError, OSError)  # a line without "=", bytes that are not UTF-8, no permission


@dataclass(frozen=True, slots=True)
class Offer:
    """One key that an installed distribution declares.

    Attributes:
        noun: The kind.
        key: The look-up key, an entry point's name.
        distribution: Normalized name of the distribution.
        version: The distribution's version, as its metadata says it.
        module: The module that holds the hooks, an entry point's value.
        requires: The versions of steelyard that the distribution works with, such as ``>=0.1,<0.2``; empty
            if its metadata states none.
    """

    noun: KindName
    key: str
    distribution: str
    version: str
    module: str
    requires: str = ""


@dataclass(frozen=True, slots=True)
class BrokenOffer:
    """An entry point that cannot be an offer.

    Attributes:
        noun: The kind; the name of the group if it belongs to none, empty if the file could not be read.
        key: The entry point's name as found.
        distribution: Normalized name of the distribution.
        version: The distribution's version.
        module: The entry point's value as found.
        why: What is wrong and what to do.
    """

    noun: str
    key: str
    distribution: str
    version: str
    module: str
    why: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}: {self.why}"


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything that is offered, in a fixed order: kind, key, distribution.

    Attributes:
        offers: What may be resolved.
        broken: Entry points under steelyard's groups that cannot be offers.
        blocked: Offers of the distributions in ``block``.
        block: Normalized names of the distributions that were to be dropped, installed or not.
    """

    offers: tuple[Offer, ...] = ()
    broken: tuple[BrokenOffer, ...] = ()
    blocked: tuple[Offer, ...] = ()
    block: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls, *, path: Iterable[str] | None = None, block: Iterable[str] | None = None) -> Catalog:
        """Read the metadata of every installed distribution.

        Args:
            path: Folders to look in instead of ``sys.path``.
            block: Distributions to drop; by default those that ``STEELYARD_BLOCK`` names, separated by commas.
        """
        names = os.environ.get(BLOCK_VARIABLE, "").split(",") if block is None else block
        dropped = tuple(sorted({normalized(name) for name in names if name.strip()}))
        offers: dict[tuple[str, str, str], Offer] = {}
        broken: dict[BrokenOffer, None] = {}
        for found in _read(None if path is None else [str(folder) for folder in path]):
            if isinstance(found, Offer):
                first = offers.setdefault((found.noun, found.key, found.distribution), found)
                if first.module == found.module:
                    continue
                why = f"{found.key!r} is declared twice, for {first.module} and for {found.module}; keep one"
                found = _broken(found.noun, found, why)
            if found.distribution not in dropped:
                broken[found] = None
        ordered = sorted(offers.values(), key=lambda offer: (_ORDER[offer.noun], offer.key, offer.distribution))
        return cls(
            offers=tuple(offer for offer in ordered if offer.distribution not in dropped),
            broken=tuple(sorted(broken, key=lambda entry: (entry.noun, entry.key, entry.distribution, entry.module))),
            blocked=tuple(offer for offer in ordered if offer.distribution in dropped),
            block=dropped,
        )

    def of(self, noun: KindName) -> tuple[Offer, ...]:
        """Return the offers of one kind."""
        return tuple(offer for offer in self.offers if offer.noun == noun)

    def ambiguous(self) -> frozenset[tuple[str, str]]:
        """Return the pairs of kind and key that more than one distribution offers."""
        count = Counter((offer.noun, offer.key) for offer in self.offers)
        return frozenset(place for place, times in count.items() if times > 1)


def normalized(name: str) -> str:
    """Return a distribution's name in the one form in which names are compared.

    Source:
        PEP 503, "Normalized Names".

    >>> normalized(" Steelyard_Quant.FP8")
    'steelyard-quant-fp8'
    """
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@cache
def core_version() -> str:
    """Return the version of the steelyard that runs, or `NOT_INSTALLED` for a source tree that is not installed."""
    try:
        return importlib_metadata.version(CORE)
    except importlib_metadata.PackageNotFoundError:
        return NOT_INSTALLED


class _Headers(NamedTuple):
    """The three fields of a METADATA file that matter here; empty where the file does not have them."""

    distribution: str = ""
    version: str = ""
    requires: str = ""


def _read(path: list[str] | None) -> Iterator[Offer | BrokenOffer]:
    """Yield what every distribution declares under steelyard's groups; a distribution found twice counts once."""
    last: importlib_metadata.IDistribution | None = None
    headers = _Headers()
    for point in _entry_points(path):
        if isinstance(point, BrokenOffer):
            yield point
        elif point.group.startswith(GROUP_PREFIX):
            if point.dist is not None and point.dist is not last:  # a distribution's entry points follow each other
                last, headers = point.dist, _headers(point.dist)
            yield _offer(point, headers)


def _entry_points(path: list[str] | None) -> Iterable[importlib_metadata.EntryPoint | BrokenOffer]:
    """Return all entry points: of the environment in one call, of folders or after a failed call one by one.

    One unreadable ``entry_points.txt`` fails that one call for all distributions, hence the second way.
    """
    if path is None:
        try:
            return importlib_metadata.entry_points()
        except _UNREADABLE:
            return _one_by_one(importlib_metadata.distributions())
    return _one_by_one(importlib_metadata.distributions(path=path))


def _one_by_one(
    dists: Iterable[importlib_metadata.IDistribution],
) -> Iterator[importlib_metadata.EntryPoint | BrokenOffer]:
    seen: set[str] = set()
    for dist in dists:
        headers = _headers(dist)
        if headers.distribution and headers.distribution in seen:
            continue
        seen.add(headers.distribution)
        try:
            points = tuple(dist.entry_points)
        except _UNREADABLE as error:
            if _concerns_steelyard(dist, headers):
                yield BrokenOffer("", "", headers.distribution, headers.version, "", _unreadable(error))
            continue
        yield from points


def _unreadable(error: Exception) -> str:
    return f"entry_points.txt cannot be read ({type(error).__name__}: {error}); reinstall the distribution"


def _concerns_steelyard(dist: importlib_metadata.IDistribution, headers: _Headers) -> bool:
    """Whether a distribution with an unreadable file is worth a report: it requires steelyard or names a group."""
    if headers.requires or headers.distribution.startswith(CORE):
        return True
    try:
        return f"[{GROUP_PREFIX}" in (dist.read_text("entry_points.txt") or "")
    except _UNREADABLE:
        return False


def _offer(point: importlib_metadata.EntryPoint, headers: _Headers) -> Offer | BrokenOffer:
    kind = BY_GROUP.get(point.group)
    noun: KindName = kind.noun if kind else KINDS[0].noun
    offer = Offer(noun, point.name, headers.distribution, headers.version, point.value, headers.requires)
    if kind is None:
        return _broken(point.group, offer, f"there is no group {point.group}; the groups are {', '.join(BY_GROUP)}")
    if not headers.distribution:
        return _broken(noun, offer, "its metadata has no name; remove its dist-info folder, or reinstall it")
    if not point.name:
        return _broken(noun, offer, f"an entry point of {point.group} has an empty key; name the key before the '='")
    if not all(part.isidentifier() for part in point.value.split(".")):
        return _broken(noun, offer, f"{point.value!r} is not the dotted name of a module, which {point.name!r} needs")
    return offer


def _broken(noun: str, offer: Offer, why: str) -> BrokenOffer:
    name = offer.distribution or "an unnamed distribution"
    return BrokenOffer(noun, offer.key, name, offer.version or "of no version", offer.module, why)


def _headers(dist: importlib_metadata.IDistribution) -> _Headers:
    """Read three fields of the metadata's header without the e-mail parser, which takes ten times as long."""
    try:
        text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    except _UNREADABLE:
        return _Headers()
    name = version = ""
    ranges = []
    for line in text.partition("\n\n")[0].split("\n"):
        field, _, value = line.partition(":")
        match field.lower():
            case "name":
                name = normalized(value)
            case "version":
                version = value.strip()
            case "requires-dist":
                ranges.append(_range_on_core(value.strip()))
    return _Headers(name, version, ",".join(filter(None, ranges)))


def _range_on_core(requirement: str) -> str:
    """Return the version range if a requirement is one on steelyard that holds here, else an empty text."""
    match = _REQUIREMENT.match(requirement)
    if match is None or normalized(match["name"]) != CORE:
        return ""
    specifier = match["specifier"].strip()
    if specifier.startswith("@") or not _holds(match["marker"]):
        return ""
    return specifier.strip("() ")


def _holds(marker: str | None) -> bool:
    """Whether a requirement's marker holds here; one that cannot be read does, so that its range is not lost."""
    if not marker:
        return True
    from packaging.markers import InvalidMarker, Marker

    try:
        return Marker(marker).evaluate({"extra": ""})
    except InvalidMarker:
        return True
