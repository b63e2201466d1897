"""BERT, RoBERTa and XLM-RoBERTa as nodes: one encoder, which differs in how positions are counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from steelyard.plugin import (
    Absent,
    Blueprint,
    Config,
    Embedding,
    FillWith,
    Linear,
    Node,
    Norm,
    Part,
    Placement,
    WeightMapping,
)
from steelyard_model_bert.config import ARCHITECTURES, MODEL_TYPES, EncoderConfig, read_config
from steelyard_model_bert.mapping import BertMapping

if TYPE_CHECKING:
    from torch import nn


class BertFamily:
    """The encoders of BERT, RoBERTa and XLM-RoBERTa; heads are left out by declaration."""

    keys: ClassVar[tuple[str, ...]] = (*MODEL_TYPES, *ARCHITECTURES)

    def blueprint(self, config: Config) -> Blueprint:
        """Return the encoder's nodes.

        Tables are cut along the hidden size, so that words, positions and token types are added before one gather.
        """
        made = read_config(config)
        nodes: list[Node] = [*_embeddings(made)]
        for layer in range(made.layers):
            nodes += _layer(made, layer)
        if made.has_pooler:
            part = (Part("", made.hidden),)
            nodes.append(Linear("pooler.dense", made.hidden, part, Placement.REPLICATED, bias=True, absent="skip"))
        return Blueprint(tuple(nodes))

    def mapping(self, config: Config) -> WeightMapping:
        """Return the names that transformers gives them."""
        return BertMapping()

    def defaults(self, config: Config) -> Mapping[str, Any]:
        """Return no load options: an encoder needs none."""
        return {}

    def lora_targets(self) -> Mapping[str, str]:
        """Return nothing: adapters are not supported."""
        return {}

    def module(self, config: Config, built: Mapping[str, nn.Module]) -> nn.Module:
        """Build the encoder (torch)."""
        from steelyard_model_bert.module import BertEncoder

        return BertEncoder(read_config(config), built)


def _embeddings(made: EncoderConfig) -> Iterator[Node]:
    hidden = made.hidden
    # An exporter may leave out a table of which it uses one row of zeros; zeros add nothing, whatever their number.
    tables: tuple[tuple[str, int, str, Absent], ...] = (
        ("word", made.vocabulary, "vocab_size", "error"),
        ("position", made.positions, "max_position_embeddings", "error"),
        ("token_type", made.token_types, "type_vocab_size", FillWith(0.0)),
    )
    for name, rows, key, absent in tables:
        stem = f"embeddings.{name}_embeddings"
        yield Embedding(stem, rows, hidden, Placement.ROWWISE, absent=absent, rows_key=key)
    yield Norm("embeddings.LayerNorm", hidden, "layer", made.eps, bias=True)


def _layer(made: EncoderConfig, layer: int) -> Iterator[Node]:
    stem, hidden, inner, heads = f"encoder.layer.{layer}", made.hidden, made.intermediate, made.heads
    qkv = (Part("q", hidden, heads), Part("k", hidden, heads, kv=True), Part("v", hidden, heads, kv=True))
    out = (Part("", hidden),)
    yield Linear(f"{stem}.attention.qkv", hidden, qkv, Placement.COLWISE, bias=True, layer=layer)
    yield Linear(f"{stem}.attention.output.dense", hidden, out, Placement.ROWWISE, bias=True, layer=layer)
    yield Norm(f"{stem}.attention.output.LayerNorm", hidden, "layer", made.eps, bias=True, layer=layer)
    up = (Part("", inner),)
    yield Linear(f"{stem}.intermediate.dense", hidden, up, Placement.COLWISE, bias=True, layer=layer)
    yield Linear(f"{stem}.output.dense", inner, out, Placement.ROWWISE, bias=True, layer=layer)
    yield Norm(f"{stem}.output.LayerNorm", hidden, "layer", made.eps, bias=True, layer=layer)
