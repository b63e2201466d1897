"""A rank's work as steps: what fills each Segment's buffers, made from the classes when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from steelyard.blueprint import Node
from steelyard.local import LocalNode
from steelyard.placement import Axis
from steelyard.segments import Piece, Segment, SegmentOnRank
from steelyard.steps import Check, Fill, Read, Region
from steelyard.units import Unit, UnitClass


@dataclass(slots=True, eq=False)
class NodeClass:
    """Everything that nodes with the same shape and the same stored tensors have in common.

    Attributes:
        shape: The node without its names.
        segments: Its Segments, in order; those of w13 come before those of w2.
    """

    shape: Node
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node: its class, and the stored tensors of each part (and expert) of it.

    Attributes:
        node: The node.
        cls: What it shares with others.
        units: (linear, part, expert) to the part's unit; expert is None where there is none or all are stacked.
    """

    node: Node
    cls: NodeClass
    units: Mapping[tuple[int, str, int | None], Unit]


@dataclass(frozen=True, slots=True)
class SegmentTask:
    """All that it takes to build one Segment on one rank.

    Attributes:
        stem: The node.
        index: The Segment's index in the node.
        segment: What it shares with others.
        on_rank: Its local node, buffers and pieces.
        reads: What fills the buffers from the file.
        fills: What fills them with constants.
        checks: What the bytes must satisfy.
    """

    stem: str
    index: int
    segment: Segment
    on_rank: SegmentOnRank
    reads: tuple[Read, ...]
    fills: tuple[Fill, ...]
    checks: tuple[Check, ...]

    @property
    def method(self) -> str:
        """The key of its quant method."""
        return self.segment.scheme.key(experts=self.on_rank.local.experts is not None)


def task_of(planned: PlannedNode, index: int, on_rank: SegmentOnRank) -> SegmentTask:
    """Return what one Segment of a node needs on a rank.

    Args:
        planned: The node.
        index: The Segment's index in the node.
        on_rank: The Segment as the rank holds it.
    """
    segment = planned.cls.segments[index]
    stem = planned.node.stem
    reads: list[Read] = []
    fills: list[Fill] = []
    checks: list[Check] = []
    owners: dict[tuple[str, int | None], Read] = {}  # who fills what all parts share
    filled: set[tuple[str, int | None]] = set()
    for unit_class in segment.units:
        pieces = on_rank.pieces[unit_class.part]
        for expert in _experts(unit_class, on_rank.local):
            unit = planned.units[(segment.linear, unit_class.part, expert)]
            for piece, entry in zip(pieces, unit.entries, strict=True):
                found = piece.found
                name = found.tensor.name
                region = _at(piece, on_rank.local, expert)
                if region is None:
                    continue
                shared = (name, expert) if found.tensor.merge == "equal" else None
                if piece.cut is None or entry is None:
                    if shared in filled:
                        continue
                    if shared is not None:
                        filled.add(shared)
                    fills.append(Fill(stem, index, name, region, found.fill.value if found.fill else 0.0))
                    continue
                read = Read(
                    entry.name, entry.file, entry.start, found.dtype, found.shape, piece.cut, found.swap,
                    found.pairs, stem, index, name, region, unit_class.part, expert,
                )  # fmt: skip
                if shared is not None and shared in owners:
                    checks.append(Check(read, found.tensor.checks, equal_to=owners[shared].name))
                    continue
                if shared is not None:
                    owners[shared] = read
                reads.append(read)
                if found.tensor.checks:
                    checks.append(Check(read, found.tensor.checks))
    fills.extend(_padding(stem, index, on_rank))
    return SegmentTask(stem, index, segment, on_rank, tuple(reads), tuple(fills), tuple(checks))


def repeats(piece: Piece, local: LocalNode) -> int:
    """Return how many stored tensors of one node a piece stands for on a rank."""
    if local.experts is None or piece.found.stacked:
        return 1
    return local.experts.size if piece.found.tensor.scope == "global" else len(local.experts)


def _experts(unit: UnitClass, local: LocalNode) -> Iterable[int | None]:
    if local.experts is None or unit.is_stacked:
        return (None,)
    if any(found.tensor.scope == "global" for found in unit.tensors):
        return range(local.experts.size)
    return range(local.experts.start, local.experts.stop)


def _at(piece: Piece, local: LocalNode, expert: int | None) -> Region | None:
    """Return where in the buffer one expert's piece goes; None if the rank does not hold it."""
    if expert is None or local.experts is None:
        return piece.region
    if piece.found.tensor.scope == "global":
        return ((expert, 1), *piece.region[1:])
    if not local.experts.start <= expert < local.experts.stop:
        return None
    return ((expert - local.experts.start, 1), *piece.region[1:])


def _padding(stem: str, index: int, on_rank: SegmentOnRank) -> Iterable[Fill]:
    if not on_rank.local.padding:
        return
    last = list(on_rank.pieces.values())[-1]
    shapes = {buffer.name: buffer.shape for buffer in on_rank.buffers}
    for piece in last:
        for at, dim in enumerate(piece.found.target):
            if isinstance(dim, Axis) and dim.of == "out":
                shape = shapes[piece.found.tensor.name]
                filled = sum(piece.region[at])
                if filled < shape[at]:
                    region = [(0, size) for size in shape]
                    region[at] = (filled, shape[at] - filled)
                    yield Fill(stem, index, piece.found.tensor.name, tuple(region), 0.0)
