"""Worker functions for the tests of collectives; each runs on every rank."""

from __future__ import annotations

import threading

import torch
from torch import distributed

from steelyard.collectives import current_ranks, tensor_parallel_group
from steelyard.ranks import Ranks


def reduce_and_gather(tp: int, dtype: str) -> dict[str, object]:
    group = tensor_parallel_group(current_ranks(tp=tp))
    rank = distributed.get_rank()
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=vars(torch)[dtype]) + 10 * rank
    return {
        "size": group.size,
        "rank": group.rank,
        "last": group.all_gather(x).tolist(),
        "first": group.all_gather(x, dim=0).tolist(),
        "transposed": group.all_gather(x.t()).tolist(),
        "sum": group.all_reduce(x.clone()).tolist(),
        "sum_transposed": group.all_reduce(x.t()).tolist(),
    }


def column_parallel(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    group = tensor_parallel_group(current_ranks())
    rows = weight.shape[0] // group.size
    return group.all_gather(x @ weight[group.rank * rows : (group.rank + 1) * rows].t())


def row_parallel(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    group = tensor_parallel_group(current_ranks())
    columns = weight.shape[1] // group.size
    mine = slice(group.rank * columns, (group.rank + 1) * columns)
    return group.all_reduce(x[:, mine] @ weight[:, mine].t()) + bias


def groups_made(loads: int) -> tuple[bool, int]:
    """Return whether every load got one group, and the threads that the later loads added."""
    first = tensor_parallel_group(current_ranks(tp=2))
    before = len(threads())
    others = [tensor_parallel_group(current_ranks(tp=2)) for _ in range(loads)]
    return all(group is first for group in others), len(threads()) - before


def threads() -> list[str]:
    import os

    return os.listdir("/proc/self/task")


def sum_of_ones() -> tuple[float, int]:
    """Return the sum over the tensor-parallel group of this very process group."""
    value = tensor_parallel_group(current_ranks(tp=2)).all_reduce(torch.ones(1)).item()
    return value, threading.active_count()


def refused(world: int, rank: int) -> None:
    tensor_parallel_group(Ranks(world=world, rank=rank, tp=world, moe_tp=world))


def ranks_now(tp: int | None, ep: int | None, moe_tp: int | None) -> Ranks:
    return current_ranks(tp, ep, moe_tp)
