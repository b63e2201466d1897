"""Segments: which parts of a node share one buffer and one kernel, and where each rank's piece of them lies.

Parts share a Segment iff scheme, layout, geometry and form allow it; otherwise they stay apart, exact, and a finding
says why. A `NodeClass` holds all of that for every node with the same shape and the same stored tensors, so a plan of
many thousand tensors makes a few dozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from steelyard.choice import Choice
from steelyard.errors import CutError
from steelyard.local import LocalNode, LocalPart
from steelyard.placement import (
    SMALLEST_GRID,
    Axis,
    Cut,
    Fixed,
    Slice,
    Spans,
    cut,
    fitting_sizes,
    grid_step,
    is_grid,
    physical,
    stored_shape,
    whole,
)
from steelyard.schemes import LayerScheme, Verdict
from steelyard.steps import Buffer, Region
from steelyard.units import Found, UnitClass

GRIDDED = ("scale", "zero")


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of one part on one rank: what is cut and where it goes; ``cut`` is None for a fill."""

    found: Found
    cut: Cut | None
    region: Region


@dataclass(frozen=True, slots=True)
class SegmentOnRank:
    """A Segment as one rank holds it."""

    local: LocalNode
    buffers: tuple[Buffer, ...]
    pieces: Mapping[str, tuple[Piece, ...]]  # part -> its tensors, in the class's order


@dataclass(slots=True)
class Segment:
    """Parts of one Linear that share a scheme, a layout and a kernel.

    Attributes:
        linear: 0 for a node's only Linear and for w13, 1 for w2.
        units: The parts' classes, in order.
        scheme: Their scheme, on the refined grid if there is one.
        steps: Axis to refined step; empty if the stored grid is kept.
        choice: The kernel; None for nodes that need none.
        param_dtype: Code of the dtype of its plain floats in memory.
    """

    linear: int
    units: tuple[UnitClass, ...]
    scheme: LayerScheme
    steps: Mapping[str, int]
    param_dtype: str
    choice: Choice | None = None
    _ranks: dict[LocalNode, SegmentOnRank] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts, in the order in which they lie in its buffers."""
        return tuple(unit.part for unit in self.units)

    def on(self, local: LocalNode) -> SegmentOnRank:
        """Return the Segment as a rank holds it; raise CutError if a piece cannot be cut."""
        mine = local.only(self.parts)
        known = self._ranks.get(mine)
        if known is None:
            known = self._ranks[mine] = _lay_out(self, local, mine)
        return known


def steps_of(unit: UnitClass, locals_: Sequence[LocalNode], *, joined: bool = False) -> dict[str, int]:
    """Return the refined scale grid that puts every rank's boundary on an edge; empty if the stored one does.

    Args:
        unit: A part.
        locals_: The node on every rank, equal ones once.
        joined: Whether another part must follow in the same buffer, so that the part's own end must be an edge too.
    Raises:
        CutError: the grid would have to be finer than `SMALLEST_GRID`.
    """
    grid = unit.scheme.grid()
    steps: dict[str, int] = {}
    for found in unit.tensors:
        if found.tensor.role not in GRIDDED or found.fill is not None or unit.layout.cut is not None:
            continue
        for dim in found.dims:
            if not isinstance(dim, Axis) or not is_grid(dim, grid):
                continue
            pieces = [
                physical(dim.of, local.spans(_part(local, unit.part))[dim.of], found.order, unit.part)
                for local in locals_
            ]
            if joined and dim.of == "out":
                pieces += [(Slice(0, len(_part(local, unit.part).out)), 0) for local in locals_]
            step = grid_step(dim.elements, pieces)
            if step == dim.elements:
                continue
            if step < SMALLEST_GRID:
                worst = next(
                    (piece for piece, size in pieces if grid_step(dim.elements, [(piece, size)]) < SMALLEST_GRID),
                    pieces[0][0],
                )
                raise _no_grid(dim, worst, pieces[0][1], step, ordered=found.order is not None)
            steps[dim.of] = min(step, steps.get(dim.of, step))
    return steps


def strict(unit: UnitClass, locals_: Sequence[LocalNode], steps: Mapping[str, int]) -> CutError | None:
    """Return the error that a refined grid stands for where only the stored grid is allowed."""
    if not steps:
        return None
    try:
        for local in locals_:
            list(_cuts(unit, local, {}))
    except CutError as error:
        return error
    return None


def can_join(
    units: Sequence[UnitClass], other: UnitClass, locals_: Sequence[LocalNode], *, joined: bool = False
) -> Verdict:
    """Return whether a part may lie behind the others in one buffer; the reason is part of a finding.

    Args:
        units: The parts before it.
        other: The part.
        locals_: The node on every rank, equal ones once.
        joined: Whether the scale grid is refined where that puts them into one buffer; see `steps_of`.
    """
    first = units[0]
    names = f"{', '.join(unit.part for unit in units)} and {other.part}"
    if other.scheme != first.scheme:
        return Verdict(False, f"{names} are quantized differently")
    if other.layout.name != first.layout.name or len(other.tensors) != len(first.tensors):
        return Verdict(False, f"{names} are stored in different layouts")
    for mine, theirs in zip(first.tensors, other.tensors, strict=True):
        if mine.tensor != theirs.tensor or mine.target != theirs.target or (mine.fill is None) != (theirs.fill is None):
            return Verdict(False, f"{mine.tensor.name} of {names} is stored in different forms")
        is_cast = mine.tensor.role == "bias" or (mine.tensor.role == "codes" and not first.scheme.is_quantized)
        if mine.dtype != theirs.dtype and not is_cast:
            return Verdict(False, f"{mine.tensor.name} of {names} is stored as {mine.dtype} and {theirs.dtype}")
    steps = [steps_of(unit, locals_, joined=joined) for unit in (*units, other)]
    if any(step != steps[0] for step in steps):
        return Verdict(False, f"{names} need different scale grids on the ranks asked for")
    return next(
        (Verdict(False, why) for unit in units if (why := starts_inside(unit, other, locals_, steps[0]))), Verdict(True)
    )


def starts_inside(unit: UnitClass, other: UnitClass, locals_: Sequence[LocalNode], steps: Mapping[str, int]) -> str:
    """Return why a part that follows another in one buffer would start inside a step; empty if it does not."""
    for found in unit.tensors:
        for dim in found.target:
            if not isinstance(dim, Axis) or dim.of != "out" or dim.elements == 1:
                continue
            period = steps.get("out", dim.elements) if is_grid(dim, unit.scheme.grid()) else dim.elements
            rows = [len(_part(local, unit.part).out) for local in locals_]
            ragged = next((count for count in rows if count % period), None)
            if ragged is not None:
                return (
                    f"{unit.part} has {ragged} rows on a rank and {found.tensor.name} "
                    f"steps by {period}, so {other.part} would start inside a step"
                )
    return ""


def _part(local: LocalNode, name: str) -> LocalPart:
    return next(part for part in local.parts if part.name == name)


def _cuts(unit: UnitClass, local: LocalNode, steps: Mapping[str, int]) -> Iterator[tuple[Found, Cut | None]]:
    grid = unit.scheme.grid()
    for found in unit.tensors:
        spans = _spans(found, unit, local)
        if found.fill is not None:
            yield found, None
        elif unit.layout.cut is not None:
            yield found, unit.layout.cut.cut(found.tensor, found.dims, spans, found.order, unit.part)
        else:
            fine = steps if found.tensor.role in GRIDDED else {}
            yield found, cut(found.dims, spans, order=found.order, part=unit.part, steps=fine, grid=grid)


def _spans(found: Found, unit: UnitClass, local: LocalNode) -> Spans:
    spans = local.spans(_part(local, unit.part))
    if local.experts is not None and found.tensor.scope == "global":
        return {**spans, "expert": whole(local.experts.size)}
    return spans


def _lay_out(segment: Segment, local: LocalNode, mine: LocalNode) -> SegmentOnRank:
    pieces: dict[str, tuple[Piece, ...]] = {}
    totals: dict[str, int] = {}  # buffer -> rows laid so far along its out dim
    shapes: dict[str, list[int]] = {}
    buffers: dict[str, Buffer] = {}
    for index, unit in enumerate(segment.units):
        row: list[Piece] = []
        for found, one in _cuts(unit, local, segment.steps):
            name = found.tensor.name
            shape = list(_local_shape(found, one, unit, mine))
            out_dim = _out_dim(found, mine)
            merged = found.tensor.merge == "concat" and out_dim is not None
            region = [(0, size) for size in shape]
            if merged and out_dim is not None:
                offset = totals.get(name, 0)
                region[out_dim] = (offset, shape[out_dim])
                totals[name] = offset + shape[out_dim]
                if name in shapes:
                    shapes[name][out_dim] += shape[out_dim]
                else:
                    shapes[name] = shape
            elif found.tensor.merge == "equal" or (found.tensor.merge == "concat" and len(segment.units) == 1):
                shapes.setdefault(name, shape)
            else:
                lead = 1 if mine.experts is not None else 0
                region.insert(lead, (index, 1))
                shape.insert(lead, len(segment.units))
                shapes.setdefault(name, shape)
            row.append(Piece(found, one, tuple(region)))
            buffers.setdefault(name, Buffer(name, (), _buffer_dtype(segment, found), found.tensor.merge))
        pieces[unit.part] = tuple(row)
    laid = tuple(
        Buffer(buffer.name, _padded(shapes[buffer.name], segment, mine, buffer.name), buffer.dtype, buffer.merge)
        for buffer in buffers.values()
    )
    return SegmentOnRank(mine, laid, pieces)


def _local_shape(found: Found, one: Cut | None, unit: UnitClass, mine: LocalNode) -> tuple[int, ...]:
    """Return the shape of a piece in its buffer: experts first, then the target's dims."""
    spans = _spans(found, unit, mine)
    if one is None:
        shape = stored_shape(found.target, {axis: len(span) for axis, span in spans.items()})
    else:
        taken = list(one.shape)
        if found.swap is not None:
            a, b = found.swap
            taken[a], taken[b] = taken[b], taken[a]
        shape = _reshaped(taken, found)
    if _has_lead(found, mine):
        return (len(spans["expert"]), *shape)
    return shape


def _has_lead(found: Found, mine: LocalNode) -> bool:
    """Return whether the buffer has an expert dim that the stored tensor has not."""
    return mine.experts is not None and not found.stacked


def _reshaped(taken: Sequence[int], found: Found) -> tuple[int, ...]:
    """Return the taken shape with unit dims where the target has them and not where it has not."""
    rest = iter(size for size, dim in zip(taken, _swapped_dims(found), strict=True) if dim != Fixed(1))
    return tuple(1 if dim == Fixed(1) else next(rest) for dim in found.target)


def _swapped_dims(found: Found) -> tuple[object, ...]:
    dims: list[object] = list(found.dims)
    if found.swap is not None:
        a, b = found.swap
        dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


def _out_dim(found: Found, mine: LocalNode) -> int | None:
    """Return which dim of the buffer runs along ``out``, an expert dim in front counted."""
    for index, dim in enumerate(found.target):
        if isinstance(dim, Axis) and dim.of == "out":
            return index + _has_lead(found, mine)
    return None


def _padded(shape: list[int], segment: Segment, mine: LocalNode, name: str) -> tuple[int, ...]:
    if not mine.padding:
        return tuple(shape)
    for found in segment.units[-1].tensors:
        if found.tensor.name == name:
            at = _out_dim(found, mine)
            for dim in found.target:
                if isinstance(dim, Axis) and dim.of == "out" and at is not None:
                    gridded = is_grid(dim, segment.units[-1].scheme.grid())
                    step = segment.steps.get("out", dim.elements) if gridded else dim.elements
                    shape[at] = Axis("out", step, dim.indices, dim.short_tail).stored(mine.n)
    return tuple(shape)


def _buffer_dtype(segment: Segment, found: Found) -> str:
    if found.tensor.role == "bias" or (found.tensor.role == "codes" and not segment.scheme.is_quantized):
        return segment.param_dtype
    return found.dtype


def _no_grid(axis: Axis, piece: Slice, size: int, step: int, *, ordered: bool) -> CutError:
    fits = () if ordered else fitting_sizes(size, SMALLEST_GRID)
    return CutError(
        axis.of,
        (piece.start, piece.stop),
        step,
        f"the boundary lies inside a block of {axis.elements} and only a grid of {step} would have an edge there; "
        f"the finest that is made is {SMALLEST_GRID}",
        fits=fits,
    )
