"""The runnable decoder (torch): core's, with experts behind attention.

Legend: H hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from steelyard.plugin import LoadError
from steelyard.torch import Decoder, Experts, GatedMlp, Linear, ops, take, weight_of
from steelyard_model_qwen3_moe.config import MoeConfig


class SparseMlp(nn.Module):
    """Routed experts, and a shared one that every token goes through where the model has it.

    Args:
        made: The decoder's sizes and choices.
        built: Stem to built node.
        layer: The layer's number.
    """

    def __init__(self, made: MoeConfig, built: Mapping[str, nn.Module], layer: int) -> None:
        super().__init__()
        stem = f"layers.{layer}.mlp"
        self._top_k, self._renormalizes = made.top_k, made.renormalizes
        self.router = take(built, f"{stem}.gate", Linear)
        self.experts = take(built, f"{stem}.experts", Experts)
        self.shared, self.shared_gate = None, None
        if made.shared:
            self.shared = GatedMlp(made.decoder.activation, built, f"{stem}.shared_expert")
            self.shared_gate = take(built, f"{stem}.shared_expert_gate", Linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' weighted sum, with the gated output of the shared one, whole on every rank.

        The router runs in the dtype of its weight, which ``keep_float32`` may name. The weights of a token's experts
        stay in float32 until the outputs are added.

        Shapes:
            (..., H) -> (..., H)
        """
        logits = self.router(x.to(self._router_dtype(x)))
        ids, weights = ops.route(logits, self._top_k, renormalize=self._renormalizes)
        y: Tensor = self.experts(x, ids, weights)
        if self.shared is not None and self.shared_gate is not None:
            y = y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return y

    def _router_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype of the router's weight; of one that is packed for a kernel, the input's."""
        try:
            return weight_of(self.router).dtype
        except LoadError:
            return x.dtype


def decoder_of(made: MoeConfig, built: Mapping[str, nn.Module]) -> Decoder:
    """Return the decoder, each built node taken once."""

    def mlp(layer: int) -> nn.Module:
        if made.sparse[layer]:
            return SparseMlp(made, built, layer)
        return GatedMlp(made.decoder.activation, built, f"layers.{layer}.mlp")

    return Decoder(made.decoder, built, mlp)
