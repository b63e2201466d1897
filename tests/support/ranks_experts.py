"""Worker functions for the tests of experts over real ranks; each runs on every rank and returns plain data."""

from __future__ import annotations

from typing import Any

import torch

import steelyard
from steelyard.blueprint import Experts, Linear
from steelyard.collectives import Group, current_ranks, groups_of
from support.experts import backend_of, registry_with

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def members(tp: int, ep: int, moe_tp: int) -> dict[str, tuple[int, list[int]]]:
    """Return for each kind of group this rank's index in it, and the ranks that answer when it gathers."""
    torch.distributed.barrier()  # a rank that raises at once would leave while others still connect
    ranks = current_ranks(tp, ep, moe_tp)
    groups = groups_of(ranks)

    def one(group: Group) -> tuple[int, list[int]]:
        return group.rank, group.all_gather(torch.tensor([ranks.rank]), 0).tolist()

    return {"tensor": one(groups.tensor), "experts": one(groups.experts), "replicas": one(groups.replicas)}


def same_groups(tp: int, ep: int, moe_tp: int) -> tuple[bool, int]:
    """Return whether a second load gets the first one's groups, and what they sum now."""
    first, second = (groups_of(current_ranks(tp, ep, moe_tp)) for _ in range(2))
    return second.replicas is first.replicas and second.tensor is first.tensor, int(
        second.replicas.all_reduce(torch.ones(1)).item()
    )


def rows(counts: list[int], dtype: str) -> tuple[list[Any], list[Any], list[int], list[int]]:
    """Gather as many rows as a rank is told to have; return all of two tensors, and where this rank's stand."""
    ranks = current_ranks()
    group = groups_of(ranks).tensor
    mine = counts[ranks.rank]
    values = (torch.arange(mine * 2).reshape(mine, 2) + 100 * ranks.rank).to(vars(torch)[dtype])
    ids = torch.arange(mine) + 10 * ranks.rank
    own, (every, numbers) = group.gather_rows(values, ids)
    assert torch.equal(every[own], values)
    assert every.dtype == values.dtype
    return every.tolist(), numbers.tolist(), [own.start, own.stop], list(every.shape)


def layer_on_ranks(
    folder: str, node: Experts, form: str, batches: list[Batch], sizes: dict[str, int], order: tuple[str, ...] | None
) -> dict[str, Any]:
    """Load a layer of experts and return what it makes of this replica's tokens.

    Args:
        folder: The checkpoint.
        node: The layer.
        form: How it is stored.
        batches: Tokens, experts and weights of each replica.
        sizes: ``tp``, ``ep`` and ``moe_tp``.
        order: The part order of a backend to use instead of core's reference; None for that.
    """
    backends = () if order is None else (backend_of(order=order),)
    model = steelyard.load(folder, device="cpu", registry=registry_with(node, *backends, form=form), **sizes)
    layer = model.module.nodes[node.stem]
    replica = torch.distributed.get_rank() // sizes["tp"]
    x, ids, weights = batches[replica]
    before = x.clone()
    with torch.inference_mode():
        made = layer(x, ids, weights)
    assert torch.equal(x, before), "the layer changed its input"
    return {
        "out": made.tolist(),
        "shape": list(made.shape),
        "held": [layer.local.experts.start, layer.local.experts.stop],
        "first": layer.local.is_first,
        "w13": list(layer.kernel.state_dict()["w13" if order is None else "w13_weight"].shape),
        "repr": layer.extra_repr(),
    }


def other_top_k(folder: str, node: Experts) -> None:
    """Give a token more experts than the node says."""
    model = steelyard.load(folder, device="cpu", registry=registry_with(node), tp=1, ep=2)
    model.module.nodes[node.stem](torch.zeros(1, 8), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3))


def linear_on_ranks(
    folder: str, node: Linear, x: torch.Tensor, order: tuple[str, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Load a Linear whose kernel wants its parts in some order; return its output, the parts of it, and all gathered."""
    model = steelyard.load(folder, device="cpu", registry=registry_with(node, backend_of("toy", order)))
    layer = model.module.nodes[node.stem]
    with torch.inference_mode():
        y = layer(x)
        return y, list(layer.split(y)), layer.gathered(x)
