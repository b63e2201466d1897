"""What ``config.json`` says of an encoder: every value that decides a shape or a number, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from steelyard.plugin import Config, ConfigError, fields

Style: TypeAlias = Literal["bert", "roberta"]
Activation: TypeAlias = Literal["gelu", "gelu_new", "relu", "silu"]

MODEL_TYPES: Final[Mapping[str, Style]] = {"bert": "bert", "roberta": "roberta", "xlm-roberta": "roberta"}
ARCHITECTURES: Final[Mapping[str, Style]] = {
    "BertModel": "bert",
    "BertForMaskedLM": "bert",
    "BertForSequenceClassification": "bert",
    "RobertaModel": "roberta",
    "RobertaForMaskedLM": "roberta",
    "RobertaForSequenceClassification": "roberta",
    "XLMRobertaModel": "roberta",
    "XLMRobertaForMaskedLM": "roberta",
    "XLMRobertaForSequenceClassification": "roberta",
}
WITHOUT_POOLER: Final = frozenset(
    {
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
    }
)
"""Architectures whose encoder is made with ``add_pooling_layer=False``."""

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Published names of activations and core's; three of them write one formula, the tanh form of GELU, differently."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder's sizes and choices.

    Attributes:
        style: ``"roberta"`` counts positions from the padding token on and skips padding, ``"bert"`` counts from 0.
        hidden: Size of a hidden state.
        heads: Attention heads.
        layers: Layers.
        intermediate: Size between the two matrices of the feed-forward part.
        vocabulary: Rows of the word table.
        positions: Rows of the position table.
        token_types: Rows of the token-type table, at least 1.
        activation: What stands between the two matrices.
        eps: What every norm adds to the variance.
        pad: Id of the padding token.
        has_pooler: Whether the architecture has one.
    """

    style: Style
    hidden: int
    heads: int
    layers: int
    intermediate: int
    vocabulary: int
    positions: int
    token_types: int
    activation: Activation
    eps: float
    pad: int
    has_pooler: bool

    @property
    def first_position(self) -> int:
        """The row of the position table that a text's first token uses."""
        return self.pad + 1 if self.style == "roberta" else 0

    @property
    def max_positions(self) -> int:
        """Tokens that a text may have."""
        return self.positions - self.first_position


def read_config(config: Config) -> EncoderConfig:
    """Return what a config says, with the published defaults for what it leaves out.

    Args:
        config: The parsed ``config.json``.
    Raises:
        ConfigError: a size is absent, or a value cannot be met; the text names the key and the value.
    Source:
        Defaults: BertConfig, RobertaConfig and XLMRobertaConfig of transformers 5.24. Published configs of 2019 lack
        ``layer_norm_eps``, ``pad_token_id`` and ``position_embedding_type``.
    """
    style = _style(config)
    _refuse_what_is_not_computed(config)
    hidden, heads = fields.count(config, "hidden_size"), fields.count(config, "num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    read = EncoderConfig(
        style=style,
        hidden=hidden,
        heads=heads,
        layers=fields.layers(config),
        intermediate=fields.count(config, "intermediate_size"),
        vocabulary=fields.count(config, "vocab_size"),
        positions=fields.count(config, "max_position_embeddings"),
        token_types=max(fields.count(config, "type_vocab_size", 2, smallest=0), 1),
        activation=fields.one_of(config, "hidden_act", ACTIVATIONS, "gelu"),
        eps=fields.positive(config, "layer_norm_eps", 1e-12),
        pad=fields.count(config, "pad_token_id", 1, smallest=0) if style == "roberta" else 0,
        has_pooler=not WITHOUT_POOLER.intersection(fields.architectures(config)),
    )
    if read.max_positions < 1:
        raise ConfigError(
            f"max_position_embeddings={read.positions} leaves no position for a token: with pad_token_id={read.pad} "
            f"positions start at {read.first_position}"
        )
    return read


def _style(config: Config) -> Style:
    architectures, model_type = fields.architectures(config), config.get("model_type")
    said = {name: ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES}
    if isinstance(model_type, str) and model_type in MODEL_TYPES:
        said[model_type] = MODEL_TYPES[model_type]
    styles = set(said.values())
    if len(styles) > 1:
        raise ConfigError(
            f"architectures={architectures} and model_type={model_type!r} contradict each other: "
            "BERT and RoBERTa count positions differently"
        )
    if not styles:
        raise ConfigError(
            f"architectures={architectures} and model_type={model_type!r} name no BERT or RoBERTa encoder"
        )
    return styles.pop()


def _refuse_what_is_not_computed(config: Config) -> None:
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ConfigError(f"position_embedding_type={positions!r}: only 'absolute' is computed")
    fields.refuse(config, {"is_decoder": "a causal decoder", "add_cross_attention": "cross-attention"})
