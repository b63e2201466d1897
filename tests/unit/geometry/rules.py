"""What must come out, by arithmetic alone: a rank's rows, columns and experts, the finer grid, and the refusals.

Nothing here calls steelyard's cut, ranks or segments; indices are counted one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from steelyard.blueprint import Part, Placement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from geometry.record import Edge, Format

    from steelyard.placement import Order

FINEST = 16


@dataclass(frozen=True)
class Setup:
    """One Linear, how it is stored, and the ranks it goes out over.

    Attributes:
        parts: Its parts, in order.
        k: Columns.
        placement: Along rows or columns.
        tp: Ranks that share it.
        order: How the parts lie in one tensor, as core is told; None if each has its own.
        experts: Number of experts; 0 for a dense layer.
        ep: Ranks that share the experts.
        stacked: Whether one tensor holds all experts.
        transposed: Whether (in, out) is stored.
        truth: How the parts really lie, where core is told something wrong.
        forgotten: Whether core is not told that the file is transposed.
    """

    parts: tuple[Part, ...]
    k: int
    placement: Placement
    tp: int
    order: Order | None = None
    experts: int = 0
    ep: int = 1
    stacked: bool = False
    transposed: bool = False
    truth: Order | None = None
    forgotten: bool = False

    @property
    def stored_order(self) -> Order | None:
        """How the parts really lie."""
        return self.truth or self.order

    @property
    def declared_transposed(self) -> bool:
        """What core is told."""
        return self.transposed and not self.forgotten


def positions(order: Order, part: Part) -> np.ndarray:
    """Return where each row of a part lies, by writing down every row of the tensor."""
    labels = [name for _ in range(order.repeat) for name, rows in order.runs for _ in range(rows)]
    return np.array([at for at, name in enumerate(labels) if name == part.name])


def heads_fit(setup: Setup) -> bool:
    """Return whether query and key/value heads go out so that each rank's map is the same plain one."""
    queries = next((part.heads for part in setup.parts if part.heads and not part.kv), None)
    if queries is None or setup.placement is Placement.ROWWISE:
        return True
    pairs = next((part.heads for part in setup.parts if part.kv), queries)
    tp = setup.tp
    return queries % tp == 0 and queries % pairs == 0 and (pairs % tp == 0 or tp % pairs == 0)


def rows_of(setup: Setup, part: Part, rank: int) -> range:
    """Return a rank's rows of a part: equal shares, or whole heads with the key/value heads its queries look at."""
    if setup.placement is not Placement.COLWISE:
        return range(part.out)
    inner = rank % setup.tp
    if part.heads is None:
        share = part.out // setup.tp
        return range(inner * share, (inner + 1) * share)
    queries = next(one.heads for one in setup.parts if one.heads and not one.kv)
    mine = range(inner * queries // setup.tp, (inner + 1) * queries // setup.tp)
    size = part.out // part.heads
    heads = sorted({head // (queries // part.heads) for head in mine}) if part.kv else list(mine)
    return range(heads[0] * size, (heads[-1] + 1) * size)


def columns_of(setup: Setup, rank: int) -> range:
    """Return a rank's columns."""
    if setup.placement is not Placement.ROWWISE:
        return range(setup.k)
    share = setup.k // setup.tp
    return range(rank % setup.tp * share, (rank % setup.tp + 1) * share)


def experts_of(setup: Setup, rank: int) -> list[int | None]:
    """Return a rank's experts; ``[None]`` for a dense layer."""
    if not setup.experts:
        return [None]
    return np.array_split(np.arange(setup.experts), setup.ep)[rank // setup.tp].tolist()


def uneven(setup: Setup) -> set[tuple[str, tuple[int, int], int]]:
    """Return the sizes that the ranks do not divide, as ``(axis, range, step)`` of a refusal."""
    if setup.placement is Placement.ROWWISE:
        return {("in", (0, setup.k), 0)} if setup.k % setup.tp else set()
    sizes = [part.out for part in setup.parts if part.heads is None]
    return {("out", (0, size), 0) for size in sizes if size % setup.tp}


def runs_of(indices: np.ndarray) -> list[tuple[int, int]]:
    """Return the (start, stop) of every unbroken run of indices."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks)]


def _where(setup: Setup, part: Part, axis: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yield every rank's indices along a stored axis, and the axis' size."""
    for rank in range(setup.tp):
        if axis == "in":
            yield np.array(columns_of(setup, rank)), setup.k
        elif setup.order is None:
            yield np.array(rows_of(setup, part, rank)), part.out
        else:
            yield positions(setup.order, part)[list(rows_of(setup, part, rank))], setup.order.total


def _edges(fmt: Format) -> Iterator[tuple[str, Edge]]:
    for along_out, along_in in fmt.edges.values():
        if along_out is not None and along_out.step > 1:
            yield "out", along_out
        if along_in is not None and along_in.step > 1:
            yield "in", along_in


def grid_of_part(fmt: Format, setup: Setup, part: Part) -> dict[str, int]:
    """Return the finer grid that puts every rank's boundary on an edge, axis to step; only axes that need one.

    A step of 0 stands for none that is fine enough and allowed.
    """
    steps = {}
    for axis, edge in _edges(fmt):
        if not edge.soft:
            continue
        bounds = set()
        for indices, size in _where(setup, part, axis):
            bounds |= {bound for run in runs_of(indices) for bound in run if bound != size}
        step = max(d for d in range(1, edge.step + 1) if edge.step % d == 0 and not any(b % d for b in bounds))
        if step != edge.step:
            steps[axis] = step
    return steps


def refusals(fmt: Format, setup: Setup) -> set[tuple[str, tuple[int, int], int]]:
    """Return every reason for which core must refuse, as ``(axis, range, step)``; empty if the law must hold."""
    reasons = uneven(setup)
    if reasons or not heads_fit(setup):
        return reasons
    for part in setup.parts:
        if setup.order is not None:
            run = dict(setup.order.runs)[part.name]
            for rank in range(setup.tp):
                rows = rows_of(setup, part, rank)
                crosses = setup.order.repeat > 1 and rows.start // run != (rows.stop - 1) // run
                if crosses and (rows.start % run or rows.stop % run):
                    reasons.add(("out", (rows.start, rows.stop), run))
        finer = grid_of_part(fmt, setup, part)
        for axis, edge in _edges(fmt):
            for indices, size in _where(setup, part, axis):
                span, runs = (int(indices[0]), int(indices[-1]) + 1), runs_of(indices)
                if edge.soft:
                    step = finer.get(axis, edge.step)
                    if step < min(FINEST, edge.step) or (step != edge.step and len(runs) > 1):
                        reasons.add((axis, span, step))
                elif any(start % edge.step or (stop % edge.step and stop != size) for start, stop in runs):
                    reasons.add((axis, span, edge.step))
    return reasons


def joins(fmt: Format, setup: Setup, before: list[Part], part: Part) -> bool:
    """Return whether a part may lie behind others in one buffer: one grid for all, and every part ends on an edge."""
    grids = [grid_of_part(fmt, setup, one) for one in (*before, part)]
    if any(grid != grids[0] for grid in grids):
        return False
    for axis, edge in _edges(fmt):
        step = grids[0].get("out", edge.step) if edge.soft else edge.step
        rows = [len(rows_of(setup, one, rank)) for one in before for rank in range(setup.tp)]
        if axis == "out" and any(count % step for count in rows):
            return False
    return True
