"""The collectives that layers need, over groups of torch.distributed; a group of one rank needs none of it.

Units:
    Sizes and ranks count ranks of a group.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import distributed

from steelyard.errors import ConfigError
from steelyard.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

START = (
    "start the ranks with torchrun (torchrun --nproc-per-node=N ...) and call torch.distributed.init_process_group "
    "in each, before the load"
)

# The groups made for each kind and tp size, as long as the job's process group lives: a second load makes no second set.
_made: weakref.WeakKeyDictionary[distributed.ProcessGroup, dict[tuple[str, int], Group]] = weakref.WeakKeyDictionary()


class Group:
    """Ranks that compute one layer together.

    Every rank of the group calls the same methods in the same order, with tensors of one dtype, on the
    device that the process group's backend serves (gloo: CPU, nccl: CUDA).

    Attributes:
        size: Ranks of the group.
        rank: This one's index in it.
    """

    __slots__ = ("_group", "rank", "size")

    def __init__(self, size: int = 1, rank: int = 0, group: distributed.ProcessGroup | None = None) -> None:
        if size > 1 and group is None:
            raise ConfigError(f"a group of {size} ranks needs a process group; {START}")
        self.size, self.rank, self._group = size, rank, group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks.

        ``x`` is given up: it may be overwritten and returned. The same bits come back on every rank.

        Shapes:
            x: any, equal on all ranks -> the same
        """
        if self.size == 1:
            return x
        total = x.contiguous()
        distributed.all_reduce(total, group=self._group)
        return total

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors behind one another, in rank order.

        Args:
            x: This rank's tensor.
            dim: The dimension along which they are joined.
        Shapes:
            x: [..., n, ...], equal on all ranks -> [..., n * size, ...]
        """
        if self.size == 1:
            return x
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        distributed.all_gather(parts, own, group=self._group)
        return torch.cat(parts, dim)

    def gather_rows(self, *tensors: Tensor) -> tuple[slice, tuple[Tensor, ...]]:
        """Return the ranks' rows behind one another, in rank order; ranks may have different numbers of them.

        Args:
            tensors: This rank's tensors, of one number of rows.
        Returns:
            Where this rank's rows stand, and each tensor with all rows.
        Shapes:
            each (rows, ...) -> (sum of the ranks' rows, ...)
        """
        rows = len(tensors[0])
        if self.size == 1:
            return slice(0, rows), tensors
        counts = self.all_gather(torch.tensor([rows], device=tensors[0].device), 0).tolist()
        most = max(counts)
        gathered = []
        for one in tensors:
            padded = torch.cat([one, one.new_zeros(most - rows, *one.shape[1:])])
            parts = torch.split(self.all_gather(padded, 0), most) if most else [padded] * self.size
            gathered.append(torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]))
        start = sum(counts[: self.rank])
        return slice(start, start + rows), tuple(gathered)


@dataclass(frozen=True, slots=True)
class Groups:
    """A rank's groups.

    Attributes:
        tensor: Ranks that share the dense layers.
        experts: Ranks whose experts' outputs are added.
        replicas: Ranks that hold the same share of the dense layers and share the experts, each with tokens of its own.
    """

    tensor: Group = field(default_factory=Group)
    experts: Group = field(default_factory=Group)
    replicas: Group = field(default_factory=Group)


def groups_of(ranks: Ranks) -> Groups:
    """Return this rank's groups; called like `tensor_parallel_group`, on every rank at the same point.

    Raises:
        ConfigError: as `tensor_parallel_group` does.
    """
    tensor = tensor_parallel_group(ranks)
    if ranks.world == ranks.tp or (ranks.ep == 1 and ranks.moe_tp == ranks.tp):
        return Groups(tensor, tensor)
    job = distributed.group.WORLD
    assert job is not None, "torch.distributed is initialised"
    columns = [list(range(first, ranks.world, ranks.tp)) for first in range(ranks.tp)]
    replicas = _own(ranks, job, "replicas", columns)
    return Groups(tensor, Group(ranks.world, ranks.rank, job), replicas)


def _own(ranks: Ranks, job: distributed.ProcessGroup, kind: str, all_members: list[list[int]]) -> Group:
    """Return this rank's group of some kind, made once for a tp size and process group."""
    groups = _made.setdefault(job, {})
    key = (kind, ranks.tp)
    if key not in groups:
        # Each process makes every group, in one order, also those that it is not in: new_group is a collective.
        for members in all_members:
            group = distributed.new_group(members)
            if ranks.rank in members:
                groups[key] = Group(len(members), members.index(ranks.rank), group)
    return groups[key]


def tensor_parallel_group(ranks: Ranks) -> Group:
    """Return this rank's tensor-parallel group.

    The first call for a tp size makes the groups of all ranks, so every rank of the job calls it at the same
    point of its program and with the same sizes: agree on them first. Later calls return the same group.

    Args:
        ranks: The job and this rank's place in it.
    Raises:
        ConfigError: several ranks are asked for, and torch.distributed is not initialised or says another
            world size or rank.
    """
    if ranks.world == 1:
        return Group()
    if not is_initialized():
        raise ConfigError(f"{_asked(ranks)}, but torch.distributed is not initialised in this process; {START}")
    world, rank = distributed.get_world_size(), distributed.get_rank()
    if (world, rank) != (ranks.world, ranks.rank):
        raise ConfigError(
            f"{_asked(ranks)}, but torch.distributed was initialised with world size {world} and rank {rank}; {START}"
        )
    if ranks.tp == 1:
        return Group()
    job = distributed.group.WORLD
    assert job is not None, "torch.distributed is initialised"
    rows = [list(range(first, first + ranks.tp)) for first in range(0, ranks.world, ranks.tp)]
    return _own(ranks, job, "tensor", rows)


def current_ranks(tp: int | None = None, ep: int | None = None, moe_tp: int | None = None) -> Ranks:
    """Return this process's place in the job: torch.distributed's if it is initialised, else a job of one rank.

    Args:
        tp: Tensor-parallel size; the whole job by default.
        ep: Expert-parallel size; 1 by default.
        moe_tp: Tensor-parallel size inside an expert; by default ``tp``, or 1 where experts are distributed.
    Raises:
        ConfigError: the sizes do not fit the job, or ask for several ranks where torch.distributed is not
            initialised.
    """
    if is_initialized():
        world, rank = distributed.get_world_size(), distributed.get_rank()
        return Ranks.of(
            tp=world if tp is None else tp, ep=1 if ep is None else ep, moe_tp=moe_tp, world=world, rank=rank
        )
    asked = {name: size for name, size in (("tp", tp), ("ep", ep), ("moe_tp", moe_tp)) if size is not None and size > 1}
    if asked:
        sizes = ", ".join(f"{name}={size}" for name, size in asked.items())
        raise ConfigError(f"{sizes}, but torch.distributed is not initialised in this process; {START}")
    return Ranks.of(tp=1 if tp is None else tp, ep=1 if ep is None else ep, moe_tp=moe_tp)


def is_initialized() -> bool:
    """Tell whether this torch has torch.distributed and a process group exists."""
    return distributed.is_available() and distributed.is_initialized()


def _asked(ranks: Ranks) -> str:
    return f"world={ranks.world}, rank={ranks.rank} were asked for"
