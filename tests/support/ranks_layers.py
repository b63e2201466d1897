"""Worker functions for the tests of layers over real ranks; each runs on every rank and returns plain data."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steelyard import blueprint
from steelyard.blueprint import Part, Placement
from steelyard.collectives import Group, current_ranks, tensor_parallel_group
from steelyard.torch import Linear, ops
from support import built

COLWISE, ROWWISE = Placement.COLWISE, Placement.ROWWISE
HEAD_DIM = 4


def everyone() -> Group:
    return tensor_parallel_group(current_ranks())


def row_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, list[float]]:
    """Return what a rowwise Linear computes of this rank's share of x, summed and not."""
    layer = built.linear(
        built.one_part("o", (*weight.shape,), ROWWISE, bias=True), {"": weight}, {"": bias}, everyone()
    )
    mine = x.chunk(layer.group.size, -1)[layer.group.rank]
    return {"forward": layer(mine).tolist(), "partial": layer.partial(mine).tolist()}


def column_parallel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a colwise Linear's local and gathered output."""
    layer = built.linear(
        built.one_part("c", (*weight.shape,), COLWISE, bias=True), {"": weight}, {"": bias}, everyone()
    )
    return layer(x), layer.gathered(x)


def fused(
    node: blueprint.Linear,
    weights: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    segments: list[tuple[str, ...]],
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """Return a fused colwise Linear's output, its parts, and its gathered output where there is one."""
    layer = built.linear(node, weights, biases, everyone(), segments=segments)
    y = layer(x)
    whole = all(layer.part_sizes[part.name] * layer.group.size == part.out for part in node.parts)
    return y, list(layer.split(y)), layer.gathered(x) if whole else None


def gather(node: blueprint.Linear, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Gather, whatever comes of it."""
    return built.linear(node, weights, None, everyone()).gathered(x)


def lookup(weight: torch.Tensor, ids: torch.Tensor, placement: str) -> torch.Tensor:
    node = blueprint.Embedding("table", *weight.shape, Placement(placement))
    return built.embedding(node, weight, everyone())(ids)


def lookup_added(tables: list[torch.Tensor], ids: list[torch.Tensor], placement: str) -> torch.Tensor:
    """Return the sum of several tables' rows, made whole once."""
    group = everyone()
    nodes = [blueprint.Embedding("table", *table.shape, Placement(placement)) for table in tables]
    layers = [built.embedding(node, table, group) for node, table in zip(nodes, tables, strict=True)]
    shares = [layer.local(one) for layer, one in zip(layers, ids, strict=True)]
    return layers[0].whole(torch.stack(shares).sum(0))


def head(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the gathered logits of a vocabulary that the ranks need not divide, and the local width."""
    out, inner = weight.shape
    node = blueprint.Linear("lm_head", inner, (Part("", out, padded=True),), COLWISE)
    layer = built.linear(node, {"": weight}, None, everyone())
    return layer.gathered(x), layer(x).shape[-1]


def block_nodes(hidden: int, heads: int, kv_heads: int, inner: int) -> dict[str, blueprint.Linear]:
    """Return the Linears of a decoder layer with grouped-query heads."""
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    parts = (Part("q", q, heads), Part("k", kv, kv_heads, kv=True), Part("v", kv, kv_heads, kv=True))
    return {
        "qkv": blueprint.Linear("qkv", hidden, parts, COLWISE, bias=True),
        "o": built.one_part("o", (hidden, q), ROWWISE, bias=True),
        "gate_up": blueprint.Linear("gate_up", hidden, (Part("gate", inner), Part("up", inner)), COLWISE),
        "down": built.one_part("down", (hidden, inner), ROWWISE, bias=True),
    }


def block(
    heads: tuple[int, int], weights: dict[str, dict[str, torch.Tensor]], biases: dict[str, dict[str, torch.Tensor]],
    norms: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, split_qkv: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute a decoder layer on this rank's share of it."""
    return decoder(heads, weights, biases, norms, x, everyone(), split_qkv=split_qkv)


def decoder(
    heads: tuple[int, int], weights: dict[str, dict[str, torch.Tensor]], biases: dict[str, dict[str, torch.Tensor]],
    norms: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, group: Group, *, split_qkv: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute attention and a gated MLP, each behind a norm and added to its input, from these layers alone."""
    hidden, inner = x.shape[-1], weights["down"][""].shape[1]
    segments = {"qkv": [("q",), ("k", "v")]} if split_qkv else {}
    layers: dict[str, Linear] = {
        name: built.linear(node, weights[name], biases.get(name), group, segments=segments.get(name, ()))
        for name, node in block_nodes(hidden, *heads, inner).items()
    }
    before, after = (built.rms(hidden, norm) for norm in norms)
    qkv = layers["qkv"]
    q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in qkv.split(qkv(before(x))))
    mixed = ops.attention(q, k, v, is_causal=True)
    x = x + layers["o"](mixed.transpose(1, 2).flatten(2))
    gate, up = layers["gate_up"].split(layers["gate_up"](after(x)))
    return x + layers["down"](ops.activation("silu")(gate) * up)
