"""Routed experts built from a plan: the layer, and the torch reference of what runs inside it.

Legend: T tokens, K experts of a token, H hidden size, E experts of this rank, M this rank's rows of gate and of up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from steelyard import blueprint, ops
from steelyard.collectives import Groups
from steelyard.errors import LoadError
from steelyard.layers import frozen
from steelyard.local import LocalExperts


class DenseExperts(nn.Module):
    """Experts with plain weights, computed one after the other; the torch reference kernel.

    Args:
        w13: ``weight``, and ``bias`` if there is one; gate stands before up.
        w2: Likewise.
        node: The rank's piece.
    Shapes:
        w13 weight (E, 2M, H), bias (E, 2M); w2 weight (E, H, M), bias (E, H)
    """

    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None

    def __init__(self, w13: Mapping[str, Tensor], w2: Mapping[str, Tensor], node: LocalExperts) -> None:
        super().__init__()
        self.w13, self.w2 = frozen(w13["weight"]), frozen(w2["weight"])
        for name, tensors in (("w13_bias", w13), ("w2_bias", w2)):
            self.register_parameter(name, frozen(tensors["bias"]) if "bias" in tensors else None)
        self._first = node.experts.start
        self._activate = ops.activation(node.node.activation)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what this rank's experts make of each token.

        Shapes:
            x (T, H), ids and weights (T, K) -> (T, H)
        """
        places, counts = ops.sort_by_expert(ids, self._first, len(self.w13))
        sizes = counts.tolist()
        places = places[: sum(sizes)]
        rows = torch.split(ops.permute(x, places, ids.shape[-1]), sizes)
        made = [self._expert(expert, tokens) for expert, tokens in enumerate(rows) if len(tokens)]
        return ops.combine(torch.cat([*made, x[:0]]), places, weights)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        bias13, bias2 = (None if bias is None else bias[expert] for bias in (self.w13_bias, self.w2_bias))
        gate, up = functional.linear(x, self.w13[expert], bias13).chunk(2, -1)
        return functional.linear(self._activate(gate) * up, self.w2[expert], bias2)


class Experts(nn.Module):
    """One rank's share of a layer's routed experts.

    Args:
        node: The node.
        local: This rank's piece of it.
        kernel: What computes it, ``kernel(x, ids, weights)``.
        groups: The rank's groups.
    """

    def __init__(self, node: blueprint.Experts, local: LocalExperts, kernel: nn.Module, groups: Groups) -> None:
        super().__init__()
        self.node, self.local, self.kernel, self.groups = node, local, kernel, groups

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, over all ranks.

        Replicas that share the experts bring tokens of their own, as many as each has, and all of them must call.

        Args:
            x: Tokens.
            ids: The experts of each token, numbered over all ranks.
            weights: What each expert's output is multiplied by.
        Raises:
            LoadError: a token has another number of experts than the node says.
        Shapes:
            x (..., H), ids and weights (..., K) -> (..., H)
        """
        if ids.shape[-1] != self.node.top_k:
            raise LoadError(f"{self.node.stem}: {ids.shape[-1]} experts a token, the node has {self.node.top_k}")
        tokens = x.reshape(-1, x.shape[-1])
        own, (every, ids, weights) = self.groups.replicas.gather_rows(
            tokens, *(one.reshape(-1, one.shape[-1]) for one in (ids, weights))
        )
        mixed: Tensor = self.kernel(every, ids, weights)
        return self.groups.experts.all_reduce(mixed)[own].view(x.shape)

    def extra_repr(self) -> str:
        """Describe the node and this rank's share."""
        held = self.local.experts
        here = f"{held.start} to {held.stop - 1}" if len(held) else "none"
        return (
            f"{self.node.num_experts} experts (here {here}), {self.node.top_k} a token, "
            f"inner {self.node.w2.in_features} (here {self.local.inner}), {self.node.activation}"
        )
