"""Hook implementations of steelyard-model-bert."""

from __future__ import annotations

from steelyard.plugin import ModelFamily, hookimpl


@hookimpl
def steelyard_models() -> list[type[ModelFamily]]:
    """Offer the one family of all these encoders."""
    from steelyard_model_bert.family import BertFamily

    return [BertFamily]
