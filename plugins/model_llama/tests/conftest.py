"""A decoder's config and tensors, written byte by byte: no transformers in these."""

import pytest

from steelyard_model_llama.consolidated import ConsolidatedMapping
from steelyard_model_llama.family import LlamaFamily
from support.planned import registry_of

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 10,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture
def small():
    """Return the config of a Llama with 4 query heads, 2 key/value heads and 2 layers."""
    return dict(SMALL)


@pytest.fixture
def registry():
    """Return a registry of core, this family and its further names."""
    return registry_of(LlamaFamily, others=[("weight mapping", ConsolidatedMapping)])
