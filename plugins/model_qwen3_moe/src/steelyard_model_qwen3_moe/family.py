"""Qwen2-MoE, Qwen3-MoE and Mixtral as nodes: a decoder whose layers route every token through a few of many experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from steelyard.plugin import Blueprint, Config, Experts, Linear, Node, Part, Placement, WeightMapping, decoder
from steelyard_model_qwen3_moe.config import ARCHITECTURES, MODEL_TYPES, MoeConfig, read_config
from steelyard_model_qwen3_moe.mapping import mapping_of

if TYPE_CHECKING:
    from torch import nn


class MoeFamily:
    """The decoders of Qwen2-MoE, Qwen3-MoE and Mixtral."""

    keys: ClassVar[tuple[str, ...]] = (*MODEL_TYPES, *ARCHITECTURES)

    def blueprint(self, config: Config) -> Blueprint:
        """Return the decoder's nodes."""
        made = read_config(config)
        return decoder.blueprint_of(made.decoder, lambda layer: _mlp(made, layer))

    def mapping(self, config: Config) -> WeightMapping:
        """Return the names that transformers and the publishers give them."""
        return mapping_of(read_config(config))

    def defaults(self, config: Config) -> Mapping[str, Any]:
        """Return no load options: these decoders need none."""
        return {}

    def lora_targets(self) -> Mapping[str, str]:
        """Return attention's projections; adapters of experts are not supported."""
        return {name: part for name, part in decoder.LORA_TARGETS.items() if part.startswith("self_attn.")}

    def module(self, config: Config, built: Mapping[str, nn.Module]) -> nn.Module:
        """Build the decoder (torch)."""
        from steelyard_model_qwen3_moe.module import decoder_of

        return decoder_of(read_config(config), built)


def _mlp(made: MoeConfig, layer: int) -> Iterator[Node]:
    """Yield what stands behind a layer's attention.

    The router and the gate of the shared expert are small, and every rank needs their whole output.
    """
    stem, hidden, inner = f"layers.{layer}.mlp", made.decoder.hidden, made.inner
    if not made.sparse[layer]:
        yield from decoder.gated_mlp(stem, hidden, made.decoder.intermediate, layer=layer)
        return
    yield Linear(f"{stem}.gate", hidden, (Part("", made.experts),), Placement.REPLICATED, layer=layer)
    w13 = Linear("", hidden, (Part("gate", inner), Part("up", inner)), Placement.COLWISE)
    w2 = Linear("", inner, (Part("down", hidden),), Placement.ROWWISE)
    yield Experts(f"{stem}.experts", made.experts, w13, w2, made.top_k, made.decoder.activation, layer)
    if made.shared:
        yield from decoder.gated_mlp(f"{stem}.shared_expert", hidden, made.shared, layer=layer)
        yield Linear(f"{stem}.shared_expert_gate", hidden, (Part("", 1),), Placement.REPLICATED, layer=layer)
