"""Which piece of which stored tensor goes where in a module: planned from names and shapes alone, for all of it at once.

A module's state is read like a second checkpoint: the same family, mapping and matcher find its nodes' parts, so that
fused, stacked and transposed tensors are known on both sides. Without a family, names are compared as they stand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from steelyard.blueprint import Experts, Node
from steelyard.checkpoint import Checkpoint
from steelyard.dtypes import FLOATS
from steelyard.findings import Finding, FindingCode, Severity
from steelyard.headers import TensorEntry
from steelyard.loadplan import LoadPlan
from steelyard.local import localize
from steelyard.matching import Matcher
from steelyard.names import BUFFERS, Names, dropped
from steelyard.parts import PartFinder
from steelyard.placement import Cut, Pairs, Slice, Span, cut
from steelyard.ranks import Ranks
from steelyard.registry import Registry
from steelyard.steps import Alias, Read
from steelyard.units import Found, Unit

OF_THE_MODULE = "the module"
NOT_OURS = ("kernel", "not-installed", "refined", "not-fused", "padded", "untied")
"""Findings about kernels, ranks and ties: what a module that is there has no use for, or has decided."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece goes in one tensor of the module; what was done to read it is done here the other way round.

    Attributes:
        name: The tensor, in the module's state dict.
        slices: Its indices.
        swap: Two dims to swap on the way there.
        pairs: Rows to put into rotary pairs before that.
    """

    name: str
    slices: tuple[Slice, ...]
    swap: tuple[int, int] | None = None
    pairs: Pairs | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """One piece on its way from the file, or a constant, to its place.

    Attributes:
        read: What is read; None for a constant.
        value: The constant.
        place: Where it goes.
        is_compared: Whether the module ties the place to one that is written: the values must be equal.
    """

    read: Read | None
    value: float
    place: Place
    is_compared: bool = False


@dataclass(slots=True)
class Copies:
    """Everything that is to be copied, and all that is wrong with it.

    Attributes:
        copies: The pieces.
        findings: What was found.
        dropped: Stored tensor to the reason why it is left out.
    """

    copies: list[Copy] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A module's state as the planner sees it.

    Attributes:
        entries: Every name to its tensor.
        group: Every name to the first name of the same tensor.
    """

    entries: Mapping[str, TensorEntry]
    group: Mapping[str, str]

    def names(self, first: str) -> list[str]:
        """Return all names of the tensor whose first name is given."""
        return [name for name, group in self.group.items() if group == first]


class _Side:
    """A node's parts on one side, the file's or the module's."""

    def __init__(self, node: Node, units: Mapping[tuple[int, str, int | None], Unit]) -> None:
        self.node, self._units = node, units
        self.locals = localize(node, Ranks.of())

    def pieces(
        self, linear: int, part: str, expert: int | None
    ) -> dict[str, tuple[Found, TensorEntry | None, Cut | None]]:
        """Return each tensor of a part, and the piece of it that is one expert's; a constant has neither entry nor cut."""
        unit = self._units.get((linear, part, None)) or self._units[linear, part, expert]
        local = self.locals[linear]
        spans = dict(local.spans(next(one for one in local.parts if one.name == part)))
        if expert is not None and local.experts is not None:
            spans["expert"] = Span(expert, expert + 1, local.experts.size)
        return {
            found.tensor.name: (
                found,
                entry,
                None if entry is None else cut(found.dims, spans, order=found.order, part=part),
            )
            for found, entry in zip(unit.cls.tensors, unit.entries, strict=True)
        }

    def names(self) -> list[str]:
        """Return the name of every tensor of the node."""
        return list(dict.fromkeys(one.name for unit in self._units.values() for one in unit.entries if one is not None))


class _Collector:
    """Puts copies together and keeps who writes which tensor of the module."""

    def __init__(self, checkpoint: Checkpoint, wanted: Wanted, severity: Severity) -> None:
        self.checkpoint, self.wanted, self.made = checkpoint, wanted, Copies()
        self.used: set[str] = set()  # stored tensors that are read
        self.written: dict[str, list[Copy]] = {}  # first name of a tensor of the module -> what is written to it
        self._severity = severity
        self._writer: dict[str, str] = {}  # the same -> the node, or the name, that writes it

    def add(self, owner: str, read: Read | None, value: float, place: Place) -> None:
        """Add a copy; where another owner writes the tensor already, both must be equal."""
        first = self.wanted.group[place.name]
        if read is not None:
            self.used.add(read.name)
        if self._writer.setdefault(first, owner) == owner:
            self.written.setdefault(first, []).append(Copy(read, value, place))
            self.made.copies.append(self.written[first][-1])
        elif not any(_is_same(one, read, place) for one in self.written[first]):
            self.made.copies.append(Copy(read, value, place, is_compared=True))

    def whole(self, name: str, stored: TensorEntry) -> None:
        """Add the copy of a whole tensor by its name, if shapes and dtypes allow it."""
        mine, where = self.wanted.entries[name], f"{name} ({self.file_of(stored)})"
        if mine.shape != stored.shape:
            self.error("shape", name, f"{where}: stored shape {list(stored.shape)}, the module has {list(mine.shape)}")
        elif mine.dtype != stored.dtype and not (mine.dtype in FLOATS and stored.dtype in FLOATS):
            self.error(
                "dtype", name, f"{where}: stored as {stored.dtype}, the module has {mine.dtype}; they are never cast"
            )
        else:
            slices = tuple(Slice(0, size) for size in stored.shape)
            everything = Cut(slices, (None,) * len(slices))
            read = Read(
                stored.name, stored.file, stored.start, stored.dtype, stored.shape, everything, None, None, name, 0, "", (), "",
            )  # fmt: skip
            self.add(name, read, 0.0, Place(name, slices))
        self.used.add(stored.name)

    def unfilled(self) -> list[str]:
        """Return the first names of the module's tensors that nothing writes."""
        return [first for first in dict.fromkeys(self.wanted.group.values()) if first not in self.written]

    def require_exactly_once(self) -> None:
        """Add a finding for each tensor of the module of which an element is written twice or never."""
        for first, copies in self.written.items():
            shape = self.wanted.entries[first].shape
            count, twice = covered([copy.place.slices for copy in copies])
            if twice is not None:
                self.error("collision", first, f"{first} of the module: {describe(twice)} would be written twice")
            elif count != prod(shape):
                text = (
                    f"{first} of the module: {count} of {prod(shape)} elements would be written; nothing fills the rest"
                )
                self.error("missing", first, text)

    def file_of(self, entry: TensorEntry) -> str:
        """Return the name of the file that holds a stored tensor."""
        return self.checkpoint.files[entry.file].name

    def unexpected(self, name: str, why: str) -> None:
        """Add the finding for a stored tensor that nothing takes: an error, unless the user takes it as a note."""
        text = f"unexpected tensor {name} ({self.file_of(self.checkpoint.entries[name])}): {why}"
        advice = "; strict=False leaves it out" if self._severity == "error" else ""
        self.made.findings.append(Finding("unexpected", self._severity, name, text + advice))

    def error(self, code: FindingCode, subject: str, text: str) -> None:
        """Add an error."""
        self.made.findings.append(Finding(code, "error", subject, text))


def by_family(plan: LoadPlan, wanted: Wanted, registry: Registry) -> Copies:
    """Return the copies for a checkpoint whose model family is installed.

    Args:
        plan: The plan of the file's side.
        wanted: The module's state.
        registry: Plugins to look in, under the plan's options.
    """
    options = plan.effective.config
    collector = _Collector(plan.checkpoint, wanted, "error" if options.strict else "note")
    publishers = [registry["weight mapping"][key]() for noun, key in plan.offers if noun == "weight mapping"]
    names = Names([plan.family.mapping(plan.config), *publishers])
    matcher = Matcher(wanted.entries, (OF_THE_MODULE,), "by config.json")
    asked = options.model_copy(update={"allow_missing": ()})  # it speaks of the file
    finder = PartFinder(plan.checkpoint, names, None, registry, asked, matcher)
    blueprint = plan.family.blueprint(plan.config)
    without_own, ties = finder.ties(blueprint.nodes, blueprint.ties)
    stored = {one.node.stem: _Side(one.node, one.units) for one in plan.nodes}
    held = {
        parts.node.stem: _Side(parts.node, parts.units)
        for node in blueprint.nodes
        if node.stem not in without_own and (parts := finder.find(node)) is not None
    }
    matcher.report_unread_parts()
    for sides, aliases in ((stored, plan.ties), (held, ties)):
        sides |= {one.target: sides[one.source] for one in aliases if isinstance(one, Alias) and one.source in sides}
    explained = {*matcher.blamed, *matcher.claims} - {name for side in held.values() for name in side.names()}
    for node in blueprint.nodes:
        theirs, mine = stored.get(node.stem), held.get(node.stem)
        if theirs is not None and mine is not None:
            _between(collector, node.stem, theirs, mine)
        elif mine is not None:
            explained.update(mine.names())
            if node.stem in plan.skipped:
                text = f"{node.stem} is optional and not stored, but the module has {', '.join(mine.names())}"
                collector.error("missing", node.stem, f"{text}; make the module without it")
        elif theirs is not None and node.stem in finder.skipped:
            for name in theirs.names():
                collector.used.add(name)
                collector.unexpected(name, f"the module has no place for {node.stem}")
    _rest(collector, plan, explained)
    made = collector.made
    made.findings += [
        Finding(one.code, "error", one.subject, f"in the module: {one.text}")
        for one in (*matcher.findings, *finder.findings)
        if one.severity == "error"
    ]
    made.findings += [
        one
        for one in plan.findings
        if one.code not in NOT_OURS and not (one.code == "unexpected" and one.subject in collector.used)
    ]
    made.dropped = {name: why for name, why in plan.dropped.items() if name not in collector.used}
    if not any(one.severity == "error" for one in made.findings):
        collector.require_exactly_once()
    return made


def by_name(checkpoint: Checkpoint, wanted: Wanted, why: str, *, strict: bool) -> Copies:
    """Return the copies for a checkpoint whose names are the module's own.

    Args:
        checkpoint: The checkpoint.
        wanted: The module's state.
        why: Why there is no family to map the names.
        strict: Whether a stored tensor that the module has no place for is an error.
    """
    collector = _Collector(checkpoint, wanted, "error" if strict else "note")
    entries = checkpoint.entries
    for name in wanted.entries:
        if name in entries:
            collector.whole(name, entries[name])
    for first in collector.unfilled():
        names = wanted.names(first)
        if not any(name in entries for name in names):
            collector.error("missing", first, f"missing tensor {' or '.join(names)}, which the module has")
    left = [name for name in entries if name not in wanted.entries]
    collector.made.dropped = dict(dropped(left, BUFFERS))
    for name in left:
        if name not in collector.made.dropped:
            collector.unexpected(name, "the module has no tensor of that name")
    text = f"names were compared as they stand, because no model family maps them: {why}"
    failed = any(one.severity == "error" for one in collector.made.findings)
    collector.made.findings.insert(0, Finding("plugin", "error" if failed else "note", "config.json", text))
    if not failed:
        collector.require_exactly_once()
    return collector.made


def _between(collector: _Collector, stem: str, theirs: _Side, mine: _Side) -> None:
    """Add the copies of one node, every part and expert of it on its own."""
    experts: Iterable[int | None] = range(theirs.node.num_experts) if isinstance(theirs.node, Experts) else (None,)
    for expert in experts:
        for linear, (local, other) in enumerate(zip(theirs.locals, mine.locals, strict=True)):
            for part, place in zip(local.parts, other.parts, strict=True):
                stored = theirs.pieces(linear, part.name, expert)
                for tensor, (found, entry, piece) in mine.pieces(linear, place.name, expert).items():
                    from_, stored_entry, taken = stored[tensor]
                    if entry is None or piece is None:
                        if stored_entry is not None:
                            collector.used.add(stored_entry.name)
                            collector.unexpected(stored_entry.name, f"the module has no place for {stem}'s {tensor}")
                        continue
                    target = Place(entry.name, piece.slices, found.swap, found.pairs)
                    if stored_entry is None or taken is None:
                        collector.add(stem, None, from_.fill.value if from_.fill else 0.0, target)
                        continue
                    read = Read(
                        stored_entry.name, stored_entry.file, stored_entry.start, from_.dtype, from_.shape, taken,
                        from_.swap, from_.pairs, stem, 0, tensor, (), part.name, expert,
                    )  # fmt: skip
                    collector.add(stem, read, 0.0, target)


def _rest(collector: _Collector, plan: LoadPlan, explained: set[str]) -> None:
    """Copy by its own name what the family does not know, or leaves out, and both sides have."""
    known = {name for one in plan.nodes for name in _Side(one.node, one.units).names()}
    for first in collector.unfilled():
        names = collector.wanted.names(first)
        if explained.intersection(names):
            continue
        stored = [name for name in names if name in plan.checkpoint.entries and name not in known]
        for name in stored:
            collector.whole(name, plan.checkpoint.entries[name])
        if not stored:
            text = f"missing tensor {' or '.join(names)}, which the module has: the model family {plan.family_key!r} does not"
            collector.error("missing", first, f"{text} know it, and the file stores nothing under that name")


def _is_same(one: Copy, read: Read | None, place: Place) -> bool:
    """Return whether a copy puts the very same piece in the very same place."""
    if one.read is None or read is None:
        return one.read is read and one.place.slices == place.slices
    return (one.read.name, one.read.cut, one.place.slices) == (read.name, read.cut, place.slices)


def covered(places: Sequence[tuple[Slice, ...]]) -> tuple[int, tuple[Slice, ...] | None]:
    """Return how many elements the places have, all counted, and a place that shares one with another.

    >>> covered([(Slice(0, 2),), (Slice(2, 1),)]), covered([(Slice(0, 2),), (Slice(1, 1),)])[1]
    ((3, None), (Slice(start=1, length=1, stride=0, count=1),))
    """
    beside: list[tuple[Slice, ...]] = []  # those that reach as far along the first dim as the one at hand
    count = 0
    for place in sorted(places, key=lambda place: [one.start for one in place]):
        if not all(one.size for one in place):
            continue
        count += prod(one.size for one in place)
        beside = [one for one in beside if not place or one[0].stop > place[0].start]
        for one in beside:
            if all(_meet(a, b) for a, b in zip(one, place, strict=True)):
                return count, place
        beside.append(place)
    return count, None


def _meet(one: Slice, other: Slice) -> bool:
    if one.stop <= other.start or other.stop <= one.start:
        return False
    if one.count == other.count == 1:
        return True
    return not set(one.indices()).isdisjoint(other.indices())


def describe(place: tuple[Slice, ...]) -> str:
    """Return a place as indices.

    >>> describe((Slice(3, 1), Slice(0, 64)))
    '[3:4, 0:64]'
    """
    runs = (f"{one.start}:{one.stop}" + (f" in {one.count} runs" if one.count > 1 else "") for one in place)
    return f"[{', '.join(runs)}]"
