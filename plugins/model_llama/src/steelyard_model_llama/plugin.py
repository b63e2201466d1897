"""Hook implementations of steelyard-model-llama."""

from __future__ import annotations

from steelyard.plugin import ModelFamily, WeightMapping, hookimpl


@hookimpl
def steelyard_models() -> list[type[ModelFamily]]:
    """Offer the one family of all these decoders."""
    from steelyard_model_llama.family import LlamaFamily

    return [LlamaFamily]


@hookimpl
def steelyard_weight_mappings() -> list[type[WeightMapping]]:
    """Offer the names that Meta and Mistral give the tensors of their own releases."""
    from steelyard_model_llama.consolidated import ConsolidatedMapping

    return [ConsolidatedMapping]
