"""Layers as a load would build them, from whole tensors: cut for a rank by the same local nodes, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steelyard import blueprint
from steelyard.blueprint import Placement
from steelyard.collectives import Group
from steelyard.local import LocalNode, localize
from steelyard.ranks import Ranks
from steelyard.torch import BuiltSegment, DenseLinear, Embedding, Linear, Norm


class SilentGroup(Group):
    """One of several ranks without the others: collectives are counted, and hand back what one rank alone knows."""

    __slots__ = ("gathers", "reduces")

    def __init__(self, size: int = 2, rank: int = 0) -> None:
        self.size, self.rank = size, rank
        self.reduces = self.gathers = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.reduces += 1
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.gathers += 1
        return torch.cat([x] * self.size, dim)


def ranks_of(group: Group) -> Ranks:
    return Ranks.of(tp=group.size, rank=group.rank)


def padded(rows: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])


def linear(
    node: blueprint.Linear,
    weights: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor] | None = None,
    group: Group | None = None,
    *,
    segments: Sequence[tuple[str, ...]] = (),
) -> Linear:
    """Build a rank's Linear from whole parts.

    Args:
        node: The node.
        weights: Part to its whole weight (out, in).
        biases: Part to its whole bias (out,).
        group: The ranks; one if not given.
        segments: Parts that lie together; all of them if not given.
    """
    group = group or Group()
    local = localize(node, ranks_of(group))[0]
    built = []
    for names in segments or [tuple(part.name for part in node.parts)]:
        mine = local.only(names)
        weight = torch.cat([rows(weights[part.name], part.out)[:, slice_of(mine.inner)] for part in mine.parts])
        bias = None if biases is None else torch.cat([rows(biases[part.name], part.out) for part in mine.parts])
        kernel = DenseLinear(padded(weight, mine.padding))
        built.append(BuiltSegment(mine, kernel, None if bias is None else padded(bias, mine.padding)))
    return Linear(node, built, group)


def embedding(node: blueprint.Embedding, weight: torch.Tensor, group: Group | None = None) -> Embedding:
    group = group or Group()
    local: LocalNode = localize(node, ranks_of(group))[0]
    mine = padded(rows(weight, local.parts[0].out)[:, slice_of(local.inner)], local.padding)
    return Embedding(node, local, mine, group)


def rms(size: int, weight: torch.Tensor, eps: float = 1e-6) -> Norm:
    return Norm(blueprint.Norm("norm", size, "rms", eps), weight)


def one_part(stem: str, size: tuple[int, int], placement: Placement, *, bias: bool = False) -> blueprint.Linear:
    """Return an unfused node of (out, in) features."""
    return blueprint.Linear(stem, size[1], (blueprint.Part("", size[0]),), placement, bias=bias)


def slice_of(span) -> slice:
    return slice(span.start, span.stop)


def rows(t: torch.Tensor, span) -> torch.Tensor:
    return t[slice_of(span)]
