"""What ``config.json`` says of a decoder: every value that decides a shape or a number, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from steelyard import fields
from steelyard.errors import ConfigError
from steelyard.protocols import Config
from steelyard.rope import RopeConfig, read_rope

Window: TypeAlias = Literal["none", "always", "upper", "every_other"]
"""Which layers attend to a sliding window: no layer; all, if ``sliding_window`` is set; with ``use_sliding_window``
those from ``max_window_layers`` on; with it every other one below that. ``layer_types`` goes before all but the first two."""

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}

NOT_COMPUTED: Mapping[str, str] = {
    "attn_logit_softcapping": "a cap of attention scores",
    "embedding_multiplier": "a scale of embeddings",
    "final_logit_softcapping": "a cap of logits",
    "logits_scaling": "a scale of logits",
    "no_rope_layers": "a layer without rotary positions",
    "residual_multiplier": "a scale of residuals",
    "add_cross_attention": "cross-attention",
}
"""Keys that models of the same names set where they differ in their numbers."""

DRAFTS = "num_nextn_predict_layers"

NEUTRAL: tuple[object, ...] = (None, False, 1, 1.0, [])
"""Values of these keys that change no number."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What distinguishes one model type's decoder from another's.

    Attributes:
        qkv_bias: Whether q, k and v have biases: always, never, or as a key of the config says (false if absent).
        out_bias: Whether attention's output projection has one; likewise.
        mlp_bias: Whether the matrices of the MLP have; likewise.
        has_qk_norm: Whether each head of q and k is normalised before it is rotated.
        window: Which layers attend to a sliding window.
        theta: The base of rotary positions where a config states none.
        defaults: Values of keys that a config may leave out; one that is null is not left out.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool = False
    window: Window = "none"
    theta: float = 10000.0
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder's sizes and choices.

    Attributes:
        hidden: Size of a hidden state.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Size of a head.
        layers: Layers.
        intermediate: Rows of a dense MLP's gate, and of its up.
        vocabulary: Rows of the embedding and of the head.
        max_positions: Tokens that a text may have.
        activation: What an MLP's gate passes.
        eps: What every norm adds to the mean square.
        rope: Rotary positions.
        windows: Tokens that each layer attends to, the token itself counted; None for all before it.
        has_qkv_bias: Whether q, k and v have biases.
        has_out_bias: Whether attention's output projection has one.
        has_mlp_bias: Whether the matrices of a dense MLP have.
        has_qk_norm: Whether each head of q and k is normalised.
        has_head: Whether the architecture has a head that makes logits.
        ties_head: Whether the head uses the embedding's weight.
        drafts: Layers stored behind the last that only draft tokens for speculative decoding.
        is_nested: Whether the text model stands inside a wrapper, so that its names are nested.
        notes: What the user should know of the config.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    intermediate: int
    vocabulary: int
    max_positions: int
    activation: str
    eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_head: bool
    ties_head: bool
    drafts: int
    is_nested: bool
    notes: tuple[str, ...]


def text_config(config: Config) -> Config:
    """Return the text model's part of a config; what a wrapper says at its top level counts where the part is silent."""
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise ConfigError(f"text_config={inner!r} is not an object")
    return {**{key: value for key, value in config.items() if key != "text_config"}, **inner}


def read_decoder(config: Config, traits: Traits) -> DecoderConfig:
    """Return what a config says of a decoder.

    Args:
        config: The parsed ``config.json``.
        traits: What is special about its model type.
    Raises:
        ConfigError: a size is absent, or a value cannot be met; the text names the key and the value.
    """
    text = {**traits.defaults, **text_config(config)}
    fields.refuse(text, NOT_COMPUTED, NEUTRAL)
    fields.refuse(text, {"attention_multiplier": "a scale of attention scores"})
    if not fields.flag(text, "is_causal", True):
        raise ConfigError("is_causal=False: attention to the tokens that follow is not computed by this family")
    hidden, heads = fields.count(text, "hidden_size"), fields.count(text, "num_attention_heads")
    head_dim = fields.count_if_stated(text, "head_dim")
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, and no head_dim is set"
            )
        head_dim = hidden // heads
    kv_heads = fields.count_if_stated(text, "num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    rope = read_rope(text, head_dim=head_dim, default_theta=traits.theta)
    if rope.dim != head_dim:
        raise ConfigError(
            f"partial_rotary_factor leaves {head_dim - rope.dim} of {head_dim} values of a head as they are; "
            "this family's models rotate whole heads"
        )
    layers = fields.layers(text)
    names = fields.architectures(config)
    has_head = not names or not all(name.endswith("Model") for name in names)
    return DecoderConfig(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        intermediate=fields.count(text, "intermediate_size"),
        vocabulary=fields.count(text, "vocab_size"),
        max_positions=fields.count(text, "max_position_embeddings"),
        activation=fields.one_of(text, "hidden_act", ACTIVATIONS, "silu"),
        eps=fields.positive(text, "rms_norm_eps"),
        rope=rope,
        windows=_windows(text, traits.window, layers),
        has_qkv_bias=_bias(text, traits.qkv_bias),
        has_out_bias=_bias(text, traits.out_bias),
        has_mlp_bias=_bias(text, traits.mlp_bias),
        has_qk_norm=traits.has_qk_norm,
        has_head=has_head,
        ties_head=has_head and fields.flag(text, "tie_word_embeddings", False),
        drafts=fields.layers(text, DRAFTS) if text.get(DRAFTS) else 0,
        is_nested=config.get("text_config") is not None,
        notes=tuple(_contradictions(config)),
    )


def _bias(text: Config, said: bool | str) -> bool:
    return fields.flag(text, said, False) if isinstance(said, str) else said


def _windows(text: Config, rule: Window, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window.

    Source:
        transformers 5.24, the ``__post_init__`` of MistralConfig, Qwen2Config, Qwen3Config, Qwen2MoeConfig and
        Qwen3MoeConfig, and where their models make masks.
    """
    is_used = rule != "none" and fields.flag(text, "use_sliding_window", rule == "always")
    window = fields.count_if_stated(text, "sliding_window") if is_used else None
    slides = [window is not None] * layers
    if window is not None and rule in ("upper", "every_other"):
        border = fields.count(text, "max_window_layers", smallest=0)
        slides = [layer >= border if rule == "upper" else layer % 2 == 0 and layer < border for layer in range(layers)]
    types = text.get("layer_types")
    if types is not None:
        stated = _slides(types, layers)
        if stated != slides and (window is None or rule == "always"):
            without = "no window is set" if window is None else f"every layer has the window of {window}"
            raise ConfigError(f"layer_types={types!r} contradicts the other keys, by which {without}")
        slides = stated
    return tuple(window if one else None for one in slides)


def _slides(types: object, layers: int) -> list[bool]:
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"layer_types={types!r} is not a list of {layers} names, one a layer")
    known = ("full_attention", "sliding_attention")
    unknown = [name for name in types if name not in known]
    if unknown:
        raise ConfigError(f"layer_types names {unknown[0]!r}; computed are {', '.join(known)}")
    return [name == "sliding_attention" for name in types]


def _contradictions(config: Config) -> list[str]:
    """Return a sentence where a wrapper and its text model say different things of what is loaded."""
    inner = config.get("text_config")
    key = "tie_word_embeddings"
    if not isinstance(inner, Mapping) or key not in inner or key not in config or inner[key] == config[key]:
        return []
    return [
        f"{key} is {config[key]} at the top level and {inner[key]} in text_config; "
        "text_config, which owns the head, decides"
    ]
