"""What ``config.json`` says of a decoder with routed experts: every value that decides a shape or a number, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from steelyard.plugin import Config, ConfigError, decoder, fields

Style: TypeAlias = Literal["Qwen2-MoE", "Qwen3-MoE", "Mixtral"]

MODEL_TYPES: Final[Mapping[str, Style]] = {"qwen2_moe": "Qwen2-MoE", "qwen3_moe": "Qwen3-MoE", "mixtral": "Mixtral"}
ARCHITECTURES: Final[Mapping[str, Style]] = {
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "Qwen2MoeModel": "Qwen2-MoE",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Qwen3MoeModel": "Qwen3-MoE",
    "MixtralForCausalLM": "Mixtral",
    "MixtralModel": "Mixtral",
}

TRAITS: Final[Mapping[Style, decoder.Traits]] = {
    "Qwen2-MoE": decoder.Traits(
        qkv_bias="qkv_bias",
        window="every_other",
        defaults={"qkv_bias": True, "max_window_layers": 28, "rms_norm_eps": 1e-6},
    ),
    "Qwen3-MoE": decoder.Traits(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        has_qk_norm=True,
        window="always",
        defaults={"use_sliding_window": False, "rms_norm_eps": 1e-6},
    ),
    "Mixtral": decoder.Traits(window="always", theta=1_000_000.0, defaults={"rms_norm_eps": 1e-5}),
}
"""What distinguishes the attention of each; transformers 5.24's config classes have these defaults."""

NOT_COMPUTED: Final = {"routed_scaling_factor": "a factor of the experts' sum"}
"""What relatives with the same names multiply by."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A decoder's sizes and choices.

    Attributes:
        style: Whose names and rules it has.
        decoder: All but the experts.
        experts: Routed experts of a sparse layer.
        top_k: Experts that a token goes through.
        inner: Rows of an expert's gate, and of its up.
        shared: Rows of the shared expert's gate, and of its up; 0 if there is none.
        renormalizes: Whether the weights of a token's experts are divided by their sum.
        sparse: Whether each layer has experts; the others have a dense MLP.
    """

    style: Style
    decoder: decoder.DecoderConfig
    experts: int
    top_k: int
    inner: int
    shared: int
    renormalizes: bool
    sparse: tuple[bool, ...]


def read_config(config: Config) -> MoeConfig:
    """Return what a config says, with the published defaults for what it leaves out.

    Sizes have no default. Of the number of experts either spelling is taken: transformers 5 writes Qwen3-MoE's as
    ``num_local_experts``.

    Args:
        config: The parsed ``config.json``.
    Raises:
        ConfigError: a size is absent, or a value cannot be met; the text names the key and the value.
    Source:
        transformers 5.24: Qwen2MoeConfig, Qwen3MoeConfig, MixtralConfig, and the decoder layers of their models.
    """
    text = decoder.text_config(config)
    style = _style(config, text)
    fields.refuse(text, NOT_COMPUTED, neutral=(None, 1, 1.0))
    if style != "Mixtral" and fields.flag(text, "use_sliding_window", False) and text.get("sliding_window") is None:
        raise ConfigError("use_sliding_window=True without sliding_window; a count of tokens is needed")
    made = decoder.read_decoder(config, TRAITS[style])
    experts, top_k = _experts(text, style), fields.count(text, "num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(f"num_experts_per_tok={top_k} is more than the {experts} experts of a layer")
    return MoeConfig(
        style=style,
        decoder=made,
        experts=experts,
        top_k=top_k,
        inner=made.intermediate if style == "Mixtral" else fields.count(text, "moe_intermediate_size"),
        shared=fields.count(text, "shared_expert_intermediate_size") if style == "Qwen2-MoE" else 0,
        renormalizes=_renormalizes(text, style),
        sparse=(True,) * made.layers if style == "Mixtral" else _sparse(text, made.layers),
    )


def _style(config: Config, text: Config) -> Style:
    architectures, model_type = fields.architectures(config), text.get("model_type")
    said = {ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES}
    if isinstance(model_type, str) and model_type in MODEL_TYPES:
        said.add(MODEL_TYPES[model_type])
    stated = f"architectures={architectures} and model_type={model_type!r}"
    if len(said) > 1:
        raise ConfigError(f"{stated} contradict each other: they are {' and '.join(sorted(said))}")
    if not said:
        raise ConfigError(f"{stated} name no Qwen2-MoE, Qwen3-MoE or Mixtral decoder")
    return said.pop()


def _experts(text: Config, style: Style) -> int:
    keys = ("num_local_experts", "num_experts") if style == "Mixtral" else ("num_experts", "num_local_experts")
    stated = {key: fields.count(text, key) for key in keys if text.get(key) is not None}
    if len(set(stated.values())) > 1:
        both = " and ".join(f"{key}={value}" for key, value in stated.items())
        raise ConfigError(f"{both} contradict each other; state one, or both alike")
    return next(iter(stated.values())) if stated else fields.count(text, keys[0])


def _renormalizes(text: Config, style: Style) -> bool:
    if style != "Mixtral":
        return fields.flag(text, "norm_topk_prob", False)
    if not fields.flag(text, "norm_topk_prob", True):
        raise ConfigError("norm_topk_prob=False: Mixtral always divides a token's weights by their sum")
    return True


def _sparse(text: Config, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every ``decoder_sparse_step``-th, but for those that are named as dense."""
    step, dense = fields.count(text, "decoder_sparse_step", 1), text.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in dense):
        raise ConfigError(f"mlp_only_layers={dense!r} is not a list of layers' numbers")
    outside = [one for one in dense if not 0 <= one < layers]
    if outside:
        raise ConfigError(f"mlp_only_layers={dense!r} names layer {outside[0]}; there are layers 0 to {layers - 1}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
