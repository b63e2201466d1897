"""Hook implementations of steelyard-model-qwen3-moe."""

from __future__ import annotations

from steelyard.plugin import ModelFamily, hookimpl


@hookimpl
def steelyard_models() -> list[type[ModelFamily]]:
    """Offer the one family of all these decoders."""
    from steelyard_model_qwen3_moe.family import MoeFamily

    return [MoeFamily]
