"""Geometry: how logical axes lie in a stored tensor, and the piece of it that a rank needs.

A stored dim is an `Axis` (so many logical elements in so many stored indices) or `Fixed`. An `Order` says how
parts lie along the stored ``out`` axis. `cut` turns a rank's logical ranges into slices of stored indices, or
says why it cannot. A boundary inside a scale block is met by a finer grid, which is data: a `Regrid` a dim.

Units:
    `Span` and `Order` count logical elements; `Slice` and `Regrid` count stored indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import gcd
from typing import Literal, TypeAlias

from steelyard.errors import CutError

AxisName: TypeAlias = Literal["out", "in", "expert", "part", "head", "lora"]

SMALLEST_GRID = 16
"""The finest step, in elements, that a refined scale grid may have."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A stored dim that runs along a logical axis.

    Attributes:
        of: The logical axis.
        elements: Logical elements in one period.
        indices: Stored indices in one period.
        short_tail: Whether the last period may be partly filled.

    >>> Axis("in", 32, 3)  # 32 codes of 3 bits in 3 words
    Axis(of='in', elements=32, indices=3, short_tail=False)
    """

    of: AxisName
    elements: int = 1
    indices: int = 1
    short_tail: bool = False

    def __post_init__(self) -> None:
        if self.elements < 1 or self.indices < 1:
            raise ValueError(f"Axis({self.of!r}): elements and indices must be at least 1")

    def stored(self, size: int) -> int:
        """Return the stored indices of ``size`` logical elements; raise ValueError if no whole number fits."""
        periods, rest = divmod(size, self.elements)
        if rest and not self.short_tail:
            raise ValueError(f"{self.of} {size} is not a multiple of {self.elements} elements a period")
        return periods * self.indices + -(-rest * self.indices // self.elements)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A stored dim that no rank ever cuts: a unit dim, the 16 bytes of an MXFP4 block, a convolution's taps."""

    size: int


Dim: TypeAlias = Axis | Fixed
Dims: TypeAlias = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """How parts lie along the stored ``out`` axis of one tensor.

    Attributes:
        runs: One period, ``((part, rows), ...)``; a part stands once in it.
        repeat: Periods.

    >>> Order((("gate", 1), ("up", 1)), 4).physical("up", Span(2, 4, 4))
    Slice(start=5, length=1, stride=2, count=2)
    """

    runs: tuple[tuple[str, int], ...]
    repeat: int = 1

    def __post_init__(self) -> None:
        names = [part for part, _ in self.runs]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"Order: every part stands exactly once in a period, got {names}")
        if self.repeat < 1 or any(rows < 1 for _, rows in self.runs):
            raise ValueError("Order: rows and repeat must be at least 1")

    @property
    def period(self) -> int:
        """Logical rows of one period."""
        return sum(rows for _, rows in self.runs)

    @property
    def total(self) -> int:
        """Logical rows of the whole tensor."""
        return self.period * self.repeat

    def rows(self, part: str) -> int:
        """Return the logical rows of one part; KeyError if it does not lie here."""
        return dict(self.runs)[part] * self.repeat

    def physical(self, part: str, span: Span) -> Slice:
        """Return where a range of a part's rows lies, in logical rows of the whole tensor.

        Raises:
            CutError: the range covers several runs but does not start and stop at their edges.
        """
        offset = 0
        for name, run in self.runs:
            if name == part:
                break
            offset += run
        else:
            raise KeyError(part)
        if self.repeat == 1 or span.start // run == max(span.start, span.stop - 1) // run:
            return Slice(offset + span.start // run * self.period + span.start % run, len(span))
        if span.start % run or span.stop % run:
            raise CutError(
                "out", (span.start, span.stop), run, f"{part} lies in runs of {run} rows, and the range cuts one"
            )
        count = (span.stop - span.start) // run
        if self.period == run:
            return Slice(offset + span.start, len(span))
        return Slice(offset + span.start // run * self.period, run, self.period, count)


class RowOrder(Enum):
    """How the rows of one attention head are stored; the model's own order rotates row i with row i + d/2."""

    PLAIN = "plain"  # as the model uses them
    ROPE_PAIRS = "rope_pairs"  # rows that rotate together side by side: 0, d/2, 1, d/2 + 1, ...


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows to take out of rotary pairs, after a piece is cut: every head of it on its own.

    Attributes:
        dim: The dim of the piece, after any swap, that runs along ``out``.
        head: Rows of one head.
    """

    dim: int
    head: int


@dataclass(frozen=True, slots=True)
class Span:
    """A rank's range of one logical axis.

    Attributes:
        start: First logical element.
        stop: One past the last.
        size: Elements of the whole axis.
    """

    start: int
    stop: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.size:
            raise ValueError(f"Span {self.start}:{self.stop} lies outside 0:{self.size}")

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether the range is the whole axis."""
        return self.start == 0 and self.stop == self.size


def whole(size: int) -> Span:
    """Return the span of a whole axis."""
    return Span(0, size, size)


@dataclass(frozen=True, slots=True)
class Slice:
    """Indices of one dim: ``count`` runs of ``length``, their starts ``stride`` apart."""

    start: int
    length: int
    stride: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        """Indices taken."""
        return self.length * self.count

    @property
    def stop(self) -> int:
        """One past the last index touched."""
        return self.start + self.stride * (self.count - 1) + self.length

    def indices(self) -> list[int]:
        """Return every index, in order (for tests and explanations)."""
        return [self.start + run * self.stride + i for run in range(self.count) for i in range(self.length)]


@dataclass(frozen=True, slots=True)
class Regrid:
    """A finer grid along one dim: repeat each index taken, skip some of the fine ones, keep some.

    Attributes:
        repeat: Fine indices that each stored one becomes.
        skip: Fine indices dropped at the front.
        keep: Fine indices kept after that.
    """

    repeat: int
    skip: int
    keep: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's piece of one stored tensor: a slice a dim and, where the grid is finer, a regrid a dim."""

    slices: tuple[Slice, ...]
    regrids: tuple[Regrid | None, ...]

    @property
    def taken(self) -> tuple[int, ...]:
        """Shape of what is read, in stored indices."""
        return tuple(piece.size for piece in self.slices)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what the rank holds, in stored indices, after any regrid."""
        return tuple(
            regrid.keep if regrid else piece.size for piece, regrid in zip(self.slices, self.regrids, strict=True)
        )

    @property
    def is_regridded(self) -> bool:
        """Whether any dim is laid out on a finer grid."""
        return any(regrid is not None for regrid in self.regrids)


Sizes: TypeAlias = Mapping[str, int]
Spans: TypeAlias = Mapping[str, Span]


def stored_shape(dims: Dims, sizes: Sizes) -> tuple[int, ...]:
    """Return the header shape that ``dims`` have for logical ``sizes``.

    Raises:
        ValueError: an axis is not a whole number of periods.
        KeyError: an axis of the dims has no size.

    >>> stored_shape((Axis("in"), Axis("out", 8)), {"out": 64, "in": 16})
    (16, 8)
    """
    return tuple(dim.size if isinstance(dim, Fixed) else dim.stored(sizes[dim.of]) for dim in dims)


def describe_dims(dims: Dims) -> str:
    """Return the formula of a stored shape.

    >>> describe_dims((Axis("out", 128, short_tail=True), Axis("in", 32, 3), Fixed(1)))
    '[ceil(out/128), in*3/32, 1]'
    """

    def one(dim: Dim) -> str:
        if isinstance(dim, Fixed):
            return str(dim.size)
        if dim.elements == dim.indices == 1:
            return dim.of
        scaled = f"{dim.of}*{dim.indices}" if dim.indices > 1 else dim.of
        return f"ceil({scaled}/{dim.elements})" if dim.short_tail else f"{scaled}/{dim.elements}"

    return f"[{', '.join(one(dim) for dim in dims)}]"


def has_axis(dims: Dims, axis: str) -> bool:
    """Return whether any dim runs along ``axis``."""
    return any(isinstance(dim, Axis) and dim.of == axis for dim in dims)


def transpose(dims: Dims) -> Dims:
    """Swap ``out`` and ``in`` where a tensor has both; return other dims as they are."""
    if not (has_axis(dims, "out") and has_axis(dims, "in")):
        return dims
    outs = [dim for dim in dims if isinstance(dim, Axis) and dim.of == "out"]
    ins = [dim for dim in dims if isinstance(dim, Axis) and dim.of == "in"]
    if len(outs) == len(ins) == 1:
        swap: dict[Dim, Dim] = {outs[0]: ins[0], ins[0]: outs[0]}
        return tuple(swap.get(dim, dim) for dim in dims)
    raise ValueError(f"{describe_dims(dims)} has an axis in several dims; its transpose must be declared in full")


def physical(axis: str, span: Span, order: Order | None, part: str) -> tuple[Slice, int]:
    """Return a rank's range as it lies along the stored axis, in logical elements, and the axis' whole size."""
    if axis == "out" and order is not None:
        return order.physical(part, span), order.total
    return Slice(span.start, len(span)), span.size


def grid_step(step: int, pieces: Iterable[tuple[Slice, int]]) -> int:
    """Return the coarsest step that divides ``step`` and on whose edges every piece starts and stops.

    Args:
        step: Logical elements that one stored index covers.
        pieces: `physical` ranges with their axis size; the end of an axis is always an edge.

    >>> grid_step(128, [(Slice(0, 160), 320), (Slice(160, 160), 320)])
    32
    """
    for piece, size in pieces:
        step = gcd(step, piece.start)
        if piece.stop != size or piece.count > 1:
            step = gcd(step, piece.length)
        if piece.count > 1:
            step = gcd(step, piece.stride)
    return step


def cut(
    dims: Dims,
    spans: Spans,
    *,
    order: Order | None = None,
    part: str = "",
    steps: Mapping[str, int] | None = None,
    grid: Mapping[str, int] | None = None,
) -> Cut:
    """Return a rank's piece of a stored tensor.

    Args:
        dims: How logical axes lie in it.
        spans: The rank's range of every axis that the dims name.
        order: How parts lie along ``out``, if the tensor holds several.
        part: The part wanted, if there is an order.
        steps: Refined grid, axis to elements; None or an absent axis keeps the stored grid.
        grid: The scheme's scale grid, axis to elements: which dims ``steps`` speaks of.
    Raises:
        CutError: a boundary does not fall on an edge of what is stored.
    """
    slices: list[Slice] = []
    regrids: list[Regrid | None] = []
    for dim in dims:
        if isinstance(dim, Fixed):
            slices.append(Slice(0, dim.size))
            regrids.append(None)
            continue
        piece, size = physical(dim.of, spans[dim.of], order, part)
        fine = (steps or {}).get(dim.of)
        if fine is not None and is_grid(dim, grid or {}) and fine != dim.elements:
            taken, regrid = _regrid(dim, piece, size, fine)
            slices.append(taken)
            regrids.append(regrid)
        else:
            slices.append(_to_indices(dim, piece, size))
            regrids.append(None)
    return Cut(tuple(slices), tuple(regrids))


def is_grid(dim: Dim, grid: Mapping[str, int]) -> bool:
    """Return whether a dim of a scale or zero point steps with the scheme's scale grid (and so can be refined)."""
    return isinstance(dim, Axis) and dim.indices == 1 and dim.elements > 1 and grid.get(dim.of) == dim.elements


def _to_indices(axis: Axis, piece: Slice, size: int) -> Slice:
    period = axis.elements
    if period == 1 and axis.indices == 1:
        return piece
    at_end = piece.count == 1 and piece.stop == size
    ragged = piece.start % period or (piece.length % period and not (axis.short_tail and at_end))
    if ragged or (piece.count > 1 and piece.stride % period):
        what = f"one stored index covers {period} elements"
        if axis.indices > 1:
            what = f"{axis.indices} stored indices cover {period} elements"
        raise CutError(axis.of, (piece.start, piece.stop), period, what)
    return Slice(
        piece.start // period * axis.indices,
        -(-piece.length * axis.indices // period),
        piece.stride // period * axis.indices,
        piece.count,
    )


def _regrid(axis: Axis, piece: Slice, size: int, fine: int) -> tuple[Slice, Regrid | None]:
    if axis.elements % fine or grid_step(axis.elements, [(piece, size)]) % fine or piece.count > 1:
        raise CutError(axis.of, (piece.start, piece.stop), fine, f"no grid of {fine} inside blocks of {axis.elements}")
    first = piece.start // axis.elements
    last = -(-piece.stop // axis.elements)
    repeat = axis.elements // fine
    skip = (piece.start - first * axis.elements) // fine
    return Slice(first, last - first), Regrid(repeat, skip, -(-piece.length // fine))


def fitting_sizes(size: int, step: int, *, limit: int = 64) -> tuple[int, ...]:
    """Return the group sizes up to ``limit`` that cut ``size`` elements on edges ``step`` apart.

    >>> fitting_sizes(576, 64)
    (1, 3, 9)
    """
    return tuple(n for n in range(1, limit + 1) if size % n == 0 and (n == 1 or (size // n) % max(step, 1) == 0))
