"""The collectives that layers need, over groups of torch.distributed; a group of one rank needs none of it.

Units:
    Sizes and ranks count ranks of a group.
"""

from __future__ import annotations

import weakref
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

# The groups made for each tp size, as long as the job's process group lives: a second load makes no second set.
_made: weakref.WeakKeyDictionary[distributed.ProcessGroup, dict[int, Group]] = weakref.WeakKeyDictionary()


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
    groups = _made.setdefault(job, {})
    if ranks.tp not in groups:
        # Each process makes every group, in one order, also those that it is not in: new_group is a collective.
        for first in range(0, ranks.world, ranks.tp):
            group = distributed.new_group(list(range(first, first + ranks.tp)))
            if first <= ranks.rank < first + ranks.tp:
                groups[ranks.tp] = Group(ranks.tp, ranks.tp_rank, group)
    return groups[ranks.tp]


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
