"""What distinguishes these four decoders from one another, and what their ``config.json`` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from steelyard.plugin import Config, ConfigError, decoder, fields

MODEL_TYPES: Final[Mapping[str, decoder.Traits]] = {
    "llama": decoder.Traits(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    ),
    "mistral": decoder.Traits(
        window="always",
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": decoder.Traits(
        qkv_bias=True,
        window="upper",
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
    "qwen3": decoder.Traits(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        has_qk_norm=True,
        window="upper",
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
    ),
}
"""Model type to what is special about it.

Source:
    transformers 5.24, ``configuration_*.py`` and ``modeling_*.py`` of llama, mistral, qwen2 and qwen3.
"""

ARCHITECTURES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "MistralForCausalLM": "mistral",
    "MistralModel": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2Model": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3Model": "qwen3",
}


def read_config(config: Config) -> decoder.DecoderConfig:
    """Return what a config says, with the published defaults for what it leaves out.

    Args:
        config: The parsed ``config.json``.
    Raises:
        ConfigError: a size is absent, or a value cannot be met; the text names the key and the value.
    """
    model_type, notes = _model_type(config)
    if model_type == "mistral":
        _refuse_an_unread_switch(decoder.text_config(config))
    made = decoder.read_decoder(config, MODEL_TYPES[model_type])
    return replace(made, notes=(*made.notes, *notes))


def _model_type(config: Config) -> tuple[str, list[str]]:
    """Return the model type that decides, and what the user should know of the others."""
    architectures = fields.architectures(config)
    stated = [config.get("model_type"), decoder.text_config(config).get("model_type")]
    types = list(dict.fromkeys(one for one in stated if isinstance(one, str) and one))
    said = {ARCHITECTURES[name] for name in architectures if name in ARCHITECTURES}
    said |= {one for one in types if one in MODEL_TYPES}
    told = f"architectures={architectures} and model_type={' and '.join(map(repr, types)) or None}"
    if len(said) > 1:
        raise ConfigError(
            f"{told} contradict each other: {', '.join(sorted(said))} differ in biases, norms and windows"
        )
    if not said:
        raise ConfigError(f"{told} name no decoder of Llama, Mistral, Qwen2 or Qwen3")
    (found,) = said
    if types and found not in types:
        return found, [f"{told}: the architecture decides, and the model is computed as {found}"]
    return found, []


def _refuse_an_unread_switch(text: Config) -> None:
    """Refuse a switch that transformers' Mistral passes over and other runtimes obey."""
    window = text.get("sliding_window", MODEL_TYPES["mistral"].defaults["sliding_window"])
    if window is not None and not fields.flag(text, "use_sliding_window", True):
        raise ConfigError(
            f"use_sliding_window=False and sliding_window={window!r} contradict each other: a Mistral has no such switch; "
            "say sliding_window=null for a model without a window"
        )
