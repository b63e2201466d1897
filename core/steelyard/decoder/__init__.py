"""Decoders as most models are built: pre-norm layers of grouped-query attention and a gated MLP, or experts.

What is here is torch-free and describes one; `attention` and `model` run it. A family says what is special about its
models, and uses the rest.
"""

from __future__ import annotations

from steelyard.decoder.config import DecoderConfig, Traits, read_decoder, text_config
from steelyard.decoder.names import PROJECTIONS, DecoderMapping, order_of
from steelyard.decoder.nodes import LORA_TARGETS, attention, blueprint_of, gated_mlp

__all__ = [
    "LORA_TARGETS",
    "PROJECTIONS",
    "DecoderConfig",
    "DecoderMapping",
    "Traits",
    "attention",
    "blueprint_of",
    "gated_mlp",
    "order_of",
    "read_decoder",
    "text_config",
]
