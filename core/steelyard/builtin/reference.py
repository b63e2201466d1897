"""The torch reference: plain matrix products on any device that torch has."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from steelyard.plugin import Accept, Form, LayerScheme, LinearKernel, LocalNode, Verdict

if TYPE_CHECKING:
    import torch


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
