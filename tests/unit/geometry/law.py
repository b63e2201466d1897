"""The law: a rank's piece, cut and then decoded, equals the decoded whole, cut. Checked bit for bit, on two levels.

Level 1 cuts every stored tensor of every part with `steelyard.placement.cut`. Level 2 lays the parts into buffers
with `steelyard.segments` and `steelyard.tasks`, and fills them. What must come out is worked out in `geometry.rules`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from geometry.record import Arrays, Format, View
from geometry.rules import Setup, columns_of, experts_of, positions, rows_of

from steelyard.blueprint import Experts, Linear, Placement
from steelyard.errors import CutError
from steelyard.layouts import Layout, Source, with_bias
from steelyard.local import LocalNode, LocalPart, localize
from steelyard.matching import Matcher
from steelyard.placement import Cut, cut
from steelyard.ranks import Ranks
from steelyard.segments import Segment, SegmentOnRank, can_join, steps_of
from steelyard.tasks import NodeClass, PlannedNode, task_of
from steelyard.units import Unit, UnitClass, shape_of


class Entry(NamedTuple):
    """What a header says of one tensor."""

    name: str
    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int


class Unmatched(AssertionError):
    """A made file does not fit the layout that is on trial."""


@dataclass(frozen=True)
class World:
    """A made checkpoint of one node, and what it means.

    Attributes:
        stored: Name to array.
        meaning: (expert, part) to its real matrix, rows in the part's own order.
        bias: (expert, part) to its bias.
        linear: Which Linear of the node is on trial: 1 for the second one of experts.
        units: (part, expert) to what core matched.
    """

    stored: Arrays
    meaning: Mapping[tuple[int | None, str], np.ndarray]
    bias: Mapping[tuple[int | None, str], np.ndarray]
    node: Linear | Experts
    linear: int
    units: Mapping[tuple[str, int | None], Unit]

    def unit(self, part: str) -> UnitClass:
        return next(unit.cls for (name, _), unit in self.units.items() if name == part)


def all_ranks(setup: Setup) -> list[Ranks]:
    """Return every rank of the job; experts are cut by ep and by tp inside one expert."""
    if setup.experts:
        world = setup.ep * setup.tp
        tp = setup.tp if setup.ep == 1 else 1
        return list(Ranks(world=world, tp=tp, ep=setup.ep, moe_tp=setup.tp).all())
    return list(Ranks.of(tp=setup.tp).all())


def node_of(setup: Setup) -> tuple[Linear | Experts, int]:
    """Return the node, and which of its Linears is on trial."""
    linear = Linear("n", setup.k, setup.parts, setup.placement, bias=True)
    if not setup.experts:
        return linear, 0
    other = Linear("o", setup.tp, (replace(setup.parts[0], name="", out=setup.tp),), Placement.REPLICATED)
    if setup.placement is Placement.ROWWISE:
        return Experts("n", setup.experts, other, linear), 1
    return Experts("n", setup.experts, linear, other), 0


def localized(setup: Setup) -> list[LocalNode]:
    """Return every rank's piece of the node."""
    node, index = node_of(setup)
    return [localize(node, ranks)[index] for ranks in all_ranks(setup)]


# --- a checkpoint, made without core -----------------------------------------------------------------------------


def _swapped(fmt: Format, arrays: Arrays) -> Arrays:
    """Store (in, out) instead of (out, in), where a tensor has both axes."""
    return {
        name: np.swapaxes(array, -1, -2) if None not in fmt.edges.get(name, (None,)) else array
        for name, array in arrays.items()
    }


def _encoded(fmt: Format, rng: np.random.Generator, n: int, setup: Setup, shared: Arrays) -> tuple[Arrays, np.ndarray]:
    arrays, meaning = fmt.encode(rng, n, setup.k, shared)
    return {**arrays, "bias": rng.integers(-999, 999, n).astype(np.float64)}, meaning


def _spelled(fmt: Format, path: str, name: str) -> str:
    return path + next((one.spellings[0] for one in fmt.tensors if one.name == name), f".{name}")


def world_of(fmt: Format, setup: Setup, *, layout_of: Format | None = None, seed: int = 7) -> World:
    """Make a checkpoint in one format and let core match it.

    Args:
        fmt: How it is made and read.
        setup: What it holds and where it goes.
        layout_of: Whose layout core is given, if not the format's own: a wrong one.
        seed: Of the random codes.
    """
    rng = np.random.default_rng(seed)
    meaning, bias, stored = {}, {}, {}
    per_source: dict[str, list[Arrays]] = {}
    order = setup.stored_order
    for expert in range(setup.experts) if setup.experts else (None,):
        shared: Arrays = {}
        names = [""] if order else [part.name for part in setup.parts]
        for source in names:
            n = sum(part.out for part in setup.parts if order or part.name == source)
            arrays, real = _encoded(fmt, rng, n, setup, shared)
            merges = {tensor.name: tensor.merge for tensor in fmt.tensors}
            shared = {name: array for name, array in arrays.items() if merges.get(name) == "equal"}
            for part in setup.parts if order else [part for part in setup.parts if part.name == source]:
                rows = positions(order, part) if order else slice(None)
                meaning[expert, part.name], bias[expert, part.name] = real[rows], arrays["bias"][rows]
            per_source.setdefault(source, []).append(_swapped(fmt, arrays) if setup.transposed else arrays)
    for source, copies in per_source.items():
        if setup.stacked:
            for name in copies[0]:
                stored[_spelled(fmt, f"s{source}", name)] = np.stack([one[name] for one in copies])
        else:
            for expert, one in enumerate(copies):
                for name, array in one.items():
                    stored[_spelled(fmt, f"e{expert}{source}", name)] = np.asarray(array)
    node, linear = node_of(setup)
    return World(stored, meaning, bias, node, linear, _matched(layout_of or fmt, setup, stored))


def _matched(fmt: Format, setup: Setup, stored: Arrays) -> Mapping[tuple[str, int | None], Unit]:
    layouts = tuple(with_bias([Layout("on trial", fmt.tensors, fmt.cutter)]))
    dtypes = {tensor.name: tensor.dtypes[0] for tensor in layouts[0].tensors}
    entries = {}
    for name, array in stored.items():
        code = next(dtypes[key] for key in sorted(dtypes, key=len, reverse=True) if name.endswith(key))
        entries[name] = Entry(name, 0, code, array.shape, 0)
    matcher = Matcher(entries, ["made.safetensors"], "made")
    node, index = node_of(setup)
    linear = (node.w13, node.w2)[index] if isinstance(node, Experts) else node
    shape, units = shape_of(linear), {}
    for expert in range(setup.experts) if setup.experts and not setup.stacked else (None,):
        for part in setup.parts:
            path = "s" if setup.stacked else f"e{expert or 0}"
            path += "" if setup.order else part.name
            source = Source(path, order=setup.order, stacked=setup.stacked, transposed=setup.declared_transposed)
            stem = "n" if expert is None else f"n.{expert}"
            unit = matcher.match(
                linear, shape, part.name, fmt.scheme, layouts, (source,), stem=stem,
                experts=setup.experts or None,
            )  # fmt: skip
            if unit is None:
                raise Unmatched("; ".join(finding.text for finding in matcher.findings))
            units[part.name, expert] = unit
    if matcher.findings:
        raise Unmatched("; ".join(finding.text for finding in matcher.findings))
    return units


# --- a cut, applied without core ---------------------------------------------------------------------------------


def taken(array: np.ndarray, piece: Cut) -> np.ndarray:
    """Apply a cut with plain indices; an index past the end is an error, as is a fine index that is not there."""
    assert len(piece.slices) == array.ndim
    for dim, (run, regrid) in enumerate(zip(piece.slices, piece.regrids, strict=True)):
        indices = [run.start + i * run.stride + j for i in range(run.count) for j in range(run.length)]
        assert all(0 <= index < array.shape[dim] for index in indices), "past the end of what is stored"
        array = np.take(array, np.array(indices, np.int64), axis=dim)
        if regrid is not None:
            array = np.repeat(array, regrid.repeat, axis=dim)
            assert regrid.skip + regrid.keep <= array.shape[dim], "past the end of the finer grid"
            array = np.take(array, range(regrid.skip, regrid.skip + regrid.keep), axis=dim)
    return array


# --- level 1 -----------------------------------------------------------------------------------------------------


def pieces_of(unit: UnitClass, local: LocalNode, part: LocalPart, steps: Mapping[str, int]) -> dict[str, Cut]:
    """Return the cut of every tensor of one part on one rank."""
    spans = local.spans(part)
    cuts = {}
    for found in unit.tensors:
        if unit.layout.cut is not None:
            cuts[found.tensor.name] = unit.layout.cut.cut(found.tensor, found.dims, spans, found.order, part.name)
        else:
            fine = steps if found.tensor.role in ("scale", "zero") else None
            cuts[found.tensor.name] = cut(
                found.dims, spans, order=found.order, part=part.name, steps=fine, grid=unit.scheme.grid()
            )
    return cuts


def unequal_cuts(fmt: Format, setup: Setup, world: World) -> Iterator[str]:
    """Yield every piece that decodes to something else than the same piece of the whole."""
    locals_ = localized(setup)
    for part in setup.parts:
        unit = world.unit(part.name)
        steps = steps_of(unit, list(dict.fromkeys(locals_)))
        grid = unit.scheme.refined(steps).grid()
        for rank, local in enumerate(locals_):
            mine = next(one for one in local.parts if one.name == part.name)
            cuts = pieces_of(unit, local, mine, steps)
            rows, cols = rows_of(setup, part, rank), columns_of(setup, rank)
            view = View(len(rows), len(cols), grid, cols.start, (len(rows),))
            for expert in experts_of(setup, rank):
                arrays = {}
                for found, entry in zip(unit.tensors, world.units[_key(setup, part.name, expert)].entries, strict=True):
                    array = taken(world.stored[entry.name], cuts[found.tensor.name])
                    arrays[found.tensor.name] = array[expert - experts_of(setup, rank)[0]] if setup.stacked else array
                where = f"rank {rank} part {part.name!r} expert {expert}"
                yield from _compared(fmt, setup, arrays, view, world, ((expert, part.name, rows),), cols, where)


def _key(setup: Setup, part: str, expert: int | None) -> tuple[str, int | None]:
    return part, None if setup.stacked else expert


def _compared(fmt, setup, arrays, view, world, wanted, cols, where) -> Iterator[str]:
    if setup.transposed:
        arrays = _swapped(fmt, arrays)
    bias = np.concatenate([world.bias[expert, part][rows] for expert, part, rows in wanted])
    if not np.array_equal(arrays["bias"].reshape(-1), bias):
        yield f"{where}: bias"
    expected = np.concatenate([world.meaning[expert, part][rows][:, cols] for expert, part, rows in wanted])
    try:
        real = fmt.decode({name: array for name, array in arrays.items() if name != "bias"}, view)
    except (AssertionError, ValueError, IndexError) as error:  # shapes that do not belong together
        yield f"{where}: not decodable ({type(error).__name__} {error})"
        return
    if real.shape != expected.shape or not np.array_equal(real, expected):
        yield f"{where}: decodes to other numbers"


# --- level 2 -----------------------------------------------------------------------------------------------------


def segments_of(world: World, setup: Setup) -> list[Segment]:
    """Join parts in their order as long as core allows it."""
    unique = list(dict.fromkeys(localized(setup)))
    groups: list[list[UnitClass]] = []
    for part in setup.parts:
        unit = world.unit(part.name)
        if groups and can_join(groups[-1], unit, unique):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    segments = []
    for group in groups:
        steps = steps_of(group[0], unique)
        scheme = group[0].scheme.refined(steps)
        segments.append(Segment(world.linear, tuple(group), scheme, steps, "BF16"))
    return segments


def filled(world: World, segments: Sequence[Segment], index: int, on_rank: SegmentOnRank) -> tuple[Arrays, list[str]]:
    """Fill one Segment's buffers from the stored tensors; also say which elements are not filled exactly once."""
    units = {(world.linear, part, expert): unit for (part, expert), unit in world.units.items()}
    planned = PlannedNode(world.node, NodeClass(world.node, tuple(segments)), units)
    task = task_of(planned, index, on_rank)
    buffers = {buffer.name: np.zeros(buffer.shape) for buffer in on_rank.buffers}
    counts = {buffer.name: np.zeros(buffer.shape, np.int64) for buffer in on_rank.buffers}
    for read in task.reads:
        array = taken(world.stored[read.name], read.cut)
        if read.swap is not None:
            array = np.swapaxes(array, *read.swap)
        region = tuple(slice(start, start + length) for start, length in read.region)
        if not counts[read.buffer].any():
            buffers[read.buffer] = buffers[read.buffer].astype(array.dtype)
        buffers[read.buffer][region] = array.reshape(buffers[read.buffer][region].shape)
        counts[read.buffer][region] += 1
    for fill in task.fills:
        region = tuple(slice(start, start + length) for start, length in fill.region)
        buffers[fill.buffer][region] = fill.value
        counts[fill.buffer][region] += 1
    wrong = [f"{name} is not filled exactly once" for name, count in counts.items() if not (count == 1).all()]
    for check in task.checks:
        if check.equal_to is not None:
            same = np.array_equal(world.stored[check.equal_to], world.stored[check.read.name])
            wrong += [] if same else [f"{check.read.name} differs from {check.equal_to}"]
    return buffers, wrong


def unequal_buffers(fmt: Format, setup: Setup, world: World) -> Iterator[str]:
    """Yield every buffer that decodes to something else than the rank's rows of its parts, one behind the other."""
    segments = segments_of(world, setup)
    upright = replace(setup, transposed=False)  # buffers are (out, in), however the file lies
    for rank, local in enumerate(localized(setup)):
        cols, experts = columns_of(setup, rank), experts_of(setup, rank)
        for index, segment in enumerate(segments):
            on_rank = segment.on(local)
            buffers, wrong = filled(world, segments, index, on_rank)
            where = f"rank {rank} segment {'+'.join(segment.parts)}"
            yield from (f"{where}: {text}" for text in wrong)
            parts = [part for part in setup.parts if part.name in segment.parts]
            rows = {part.name: rows_of(setup, part, rank) for part in parts}
            lengths = tuple(len(one) for one in rows.values())
            if (on_rank.local.n, on_rank.local.k) != (sum(lengths), len(cols)):
                yield f"{where}: local shape {on_rank.local.n} x {on_rank.local.k}"
            view = View(sum(lengths), len(cols), segment.scheme.grid(), cols.start, lengths)
            for slot, expert in enumerate(experts):
                arrays = {name: array[slot] if setup.experts else array for name, array in buffers.items()}
                wanted = [(expert, part.name, rows[part.name]) for part in parts]
                yield from _compared(fmt, upright, arrays, view, world, wanted, cols, f"{where} expert {expert}")


def broken(fmt: Format, setup: Setup, *, layout_of: Format | None = None) -> list[str]:
    """Return every break of the law, on both levels.

    Raises:
        CutError: core refuses the cut.
        ConfigError: core refuses the ranks.
        Unmatched: core does not accept the made file.
    """
    localized(setup)
    world = world_of(fmt, setup, layout_of=layout_of)
    return [*unequal_cuts(fmt, setup, world), *unequal_buffers(fmt, setup, world)]


def refusal(fmt: Format, setup: Setup) -> tuple[str, tuple[int, int], int] | None:
    """Return axis, range and step of core's refusal; None if it cuts, and then the law must hold."""
    try:
        assert broken(fmt, setup) == []
    except CutError as error:
        return error.axis, error.range, error.step
    return None
