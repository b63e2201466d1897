"""Llama, Mistral, Qwen2 and Qwen3 as nodes: one decoder, which differs in biases, norms of heads and windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from steelyard.plugin import Blueprint, Config, WeightMapping, decoder
from steelyard_model_llama.config import ARCHITECTURES, MODEL_TYPES, read_config

if TYPE_CHECKING:
    from torch import nn


class LlamaFamily:
    """The dense decoders of Llama, Mistral, Qwen2 and Qwen3."""

    keys: ClassVar[tuple[str, ...]] = (*MODEL_TYPES, *ARCHITECTURES)

    def blueprint(self, config: Config) -> Blueprint:
        """Return the decoder's nodes."""
        made = read_config(config)
        return decoder.blueprint_of(
            made,
            lambda layer: decoder.gated_mlp(
                f"layers.{layer}.mlp", made.hidden, made.intermediate, layer=layer, bias=made.has_mlp_bias
            ),
        )

    def mapping(self, config: Config) -> WeightMapping:
        """Return the names that transformers gives them, and the fused ones."""
        return decoder.DecoderMapping(read_config(config))

    def defaults(self, config: Config) -> Mapping[str, Any]:
        """Return no load options: a dense decoder needs none."""
        return {}

    def lora_targets(self) -> Mapping[str, str]:
        """Return the projections of attention and MLP."""
        return decoder.LORA_TARGETS

    def module(self, config: Config, built: Mapping[str, nn.Module]) -> nn.Module:
        """Build the decoder (torch)."""
        from steelyard.torch import Decoder

        return Decoder(read_config(config), built)
