"""The torch reference: plain matrix products on any device that torch has."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from steelyard.plugin import Accept, ExpertsKernel, Form, LayerScheme, LinearKernel, LocalExperts, LocalNode, Verdict

if TYPE_CHECKING:
    import torch


GATED = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")
"""Activations that the reference computes: those of `steelyard.torch.ops`, which is not imported to plan."""


class TorchReference:
    """Computes plain floats with ``torch.nn.functional.linear``; always the last backend to be asked."""

    keys: ClassVar[tuple[str, ...]] = ("torch",)

    def serves(self, target: str) -> Verdict:
        """Say yes: torch computes everywhere."""
        return Verdict(True)

    def installed(self) -> Verdict:
        """Say whether torch is installed, without importing it."""
        if find_spec("torch") is None:
            return Verdict(False, "torch is not installed; pip install 'steelyard[torch]'")
        return Verdict(True)

    def accepts(self, scheme: LayerScheme, node: LocalNode, target: str) -> Accept:
        """Take every plain float."""
        if scheme.is_quantized:
            return Accept(Verdict(False, f"computes plain floats, not {scheme.key()}"))
        return Accept(Verdict(True), Form("dense"))

    def linear(self, weights: Mapping[str, torch.Tensor], scheme: LayerScheme, node: LocalNode) -> LinearKernel:
        """Build the kernel around the prepared weight.

        Shapes:
            weights["weight"] (n, k)
        """
        from steelyard.torch import DenseLinear

        return DenseLinear(weights["weight"])

    def accepts_experts(self, w13: LayerScheme, w2: LayerScheme, node: LocalExperts, target: str) -> Accept:
        """Take gated experts of plain floats."""
        if w13.is_quantized or w2.is_quantized:
            return Accept(Verdict(False, f"computes plain floats, not {w13.key()} and {w2.key()}"))
        names = sorted(part.name for part in node.w13.parts)
        if names != ["gate", "up"]:
            return Accept(Verdict(False, f"computes experts of gate and up, not of {', '.join(names)}"))
        if node.node.activation not in GATED:
            return Accept(Verdict(False, f"has no activation {node.node.activation!r}"))
        return Accept(Verdict(True), Form("dense", part_order=("gate", "up")))

    def experts(
        self, w13: Mapping[str, torch.Tensor], w2: Mapping[str, torch.Tensor],
        schemes: tuple[LayerScheme, LayerScheme], node: LocalExperts,
    ) -> ExpertsKernel:  # fmt: skip
        """Build the kernel around the prepared weights.

        Shapes:
            w13["weight"] (experts, 2M, H), w2["weight"] (experts, H, M)
        """
        from steelyard.torch import DenseExperts

        return DenseExperts(w13, w2, node)
