"""Plain floats: one matrix, stored as the model uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from steelyard.plugin import (
    DTYPES,
    Axis,
    Footprint,
    Form,
    LayerScheme,
    Layout,
    LocalNode,
    Node,
    plain,
)

if TYPE_CHECKING:
    import torch

_LAYOUTS = (Layout("plain", (plain("weight", (Axis("out"), Axis("in"))),)),)


class Unquantized:
    """The quant method of what is not quantized: Linear, Embedding, and one expert's Linear.

    Shapes:
        weight (out, in), or (experts, out, in) in a Segment of experts
    """

    keys: ClassVar[tuple[str, ...]] = ("float.plain", "float.plain.experts")

    def layouts(self, scheme: LayerScheme, node: Node) -> tuple[Layout, ...]:
        """Return the one layout; stacked experts without an ending are named by their mapping's sources."""
        return _LAYOUTS

    def prepared(self, scheme: LayerScheme, node: LocalNode, form: Form) -> Footprint:
        """Return the weight's bytes; it is handed on as it is, so nothing is needed beside it."""
        if form.weight_dtype is None:
            raise ValueError("core names the weight's dtype before it asks for bytes")
        return Footprint(node.n * node.k * DTYPES[form.weight_dtype].bits // 8)

    def prepare(
        self, stored: Mapping[str, torch.Tensor], scheme: LayerScheme, node: LocalNode, form: Form
    ) -> Mapping[str, torch.Tensor]:
        """Return the weight as it is: it was converted to the parameter's dtype while it was written."""
        return {"weight": stored["weight"]}

    def dequantize(
        self, stored: Mapping[str, torch.Tensor], scheme: LayerScheme, node: LocalNode, to: torch.dtype
    ) -> torch.Tensor:
        """Return the weight in the dtype asked for."""
        return stored["weight"].to(to)
