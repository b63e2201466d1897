"""The one table of extension kinds: noun, entry-point group, hook, known distributions.

Everything that lists, resolves or documents plugins derives from `KINDS`. A row's ``known`` maps keys to
the distribution that offers them, so that an unknown key can be answered with the command that helps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

KindName: TypeAlias = Literal[
    "model",
    "weight mapping",
    "quant method",
    "kernel backend",
    "tuning provider",
    "quant dialect",
    "load format",
]

GROUP_PREFIX = "steelyard."


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to extend steelyard.

    Attributes:
        noun: What the kind is called in messages.
        group: Entry-point group; an entry point's name there is the look-up key.
        hook: Name of the pluggy hook that returns the classes.
        known: Key to the distribution that offers it, for install hints.
    """

    noun: KindName
    group: str
    hook: str
    known: Mapping[str, str] = field(default_factory=dict)


_BERT = "steelyard-model-bert"
_LLAMA = "steelyard-model-llama"
_MOE = "steelyard-model-qwen3-moe"
_FP8 = "steelyard-quant-fp8"
_AWQ = "steelyard-quant-awq"
_W4A8 = "steelyard-moe-w4a8"

KINDS: tuple[Kind, ...] = (
    Kind(
        "model",
        "steelyard.models",
        "steelyard_models",
        {
            **dict.fromkeys(
                (
                    "bert",
                    "roberta",
                    "xlm-roberta",
                    "BertModel",
                    "BertForMaskedLM",
                    "BertForSequenceClassification",
                    "RobertaModel",
                    "RobertaForMaskedLM",
                    "RobertaForSequenceClassification",
                    "XLMRobertaModel",
                    "XLMRobertaForMaskedLM",
                    "XLMRobertaForSequenceClassification",
                ),
                _BERT,
            ),
            **dict.fromkeys(
                (
                    "llama",
                    "mistral",
                    "qwen2",
                    "qwen3",
                    "LlamaForCausalLM",
                    "MistralForCausalLM",
                    "Qwen2ForCausalLM",
                    "Qwen3ForCausalLM",
                    "LlamaModel",
                    "MistralModel",
                    "Qwen2Model",
                    "Qwen3Model",
                ),
                _LLAMA,
            ),
            **dict.fromkeys(
                (
                    "qwen2_moe",
                    "qwen3_moe",
                    "mixtral",
                    "Qwen2MoeForCausalLM",
                    "Qwen3MoeForCausalLM",
                    "MixtralForCausalLM",
                    "Qwen2MoeModel",
                    "Qwen3MoeModel",
                    "MixtralModel",
                ),
                _MOE,
            ),
        },
    ),
    Kind(
        "weight mapping",
        "steelyard.weight_mappings",
        "steelyard_weight_mappings",
        {"llama.meta": _LLAMA, "mistral.consolidated": _LLAMA},
    ),
    Kind(
        "quant method",
        "steelyard.quant_methods",
        "steelyard_quant_methods",
        {
            "fp8.plain": _FP8,
            "int4.awq": _AWQ,
            "int4.pack32": _AWQ,
            "int4.bytes.afp8.experts": _W4A8,
        },
    ),
    Kind(
        "kernel backend",
        "steelyard.kernel_backends",
        "steelyard_kernel_backends",
        {"deepgemm": "steelyard-cuda-deepgemm", "aiter": "steelyard-rocm-aiter"},
    ),
    Kind(
        "tuning provider",
        "steelyard.tuning_providers",
        "steelyard_tuning_providers",
        {"aiter": "steelyard-rocm-aiter"},
    ),
    Kind(
        "quant dialect",
        "steelyard.quant_dialects",
        "steelyard_quant_dialects",
        {
            "fp8": _FP8,
            "fbgemm_fp8": _FP8,
            "compressed-tensors": _FP8,
            "modelopt": _FP8,
            "awq": _AWQ,
            "w4afp8": _W4A8,
            "gptq": "steelyard-quant-gptq",
            "mxfp4": "steelyard-quant-mxfp4",
        },
    ),
    Kind(
        "load format",
        "steelyard.load_formats",
        "steelyard_load_formats",
        {"fastsafetensors": "steelyard-io-fastsafetensors", "gguf": "steelyard-io-gguf"},
    ),
)

BY_NOUN: Mapping[str, Kind] = {kind.noun: kind for kind in KINDS}
BY_GROUP: Mapping[str, Kind] = {kind.group: kind for kind in KINDS}
