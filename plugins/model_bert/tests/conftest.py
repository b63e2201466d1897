"""Fixtures for encoders of any size, written byte by byte, and for registries that know this family alone."""

import pytest

from steelyard_model_bert.family import BertFamily
from support.checkpoints import TOY_B_CONFIG, encode, values, write_config, write_shards
from support.planned import registry_of

SMALL = TOY_B_CONFIG | {
    "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 11,
    "max_position_embeddings": 6, "layer_norm_eps": 1e-7,
}  # fmt: skip


def shapes_of(config):
    """Return names and shapes of an encoder, pooler included, sorted by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
    }
    linears, norms = {"pooler.dense": (hidden, hidden)}, ["embeddings.LayerNorm"]
    for layer in range(config["num_hidden_layers"]):
        stem = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            linears[f"{stem}.attention.self.{name}"] = (hidden, hidden)
        linears[f"{stem}.attention.output.dense"] = (hidden, hidden)
        linears[f"{stem}.intermediate.dense"] = (inner, hidden)
        linears[f"{stem}.output.dense"] = (hidden, inner)
        norms += [f"{stem}.attention.output.LayerNorm", f"{stem}.output.LayerNorm"]
    for stem, shape in linears.items():
        shapes |= {f"{stem}.weight": shape, f"{stem}.bias": shape[:1]}
    for stem in norms:
        shapes |= {f"{stem}.weight": (hidden,), f"{stem}.bias": (hidden,)}
    return dict(sorted(shapes.items()))


@pytest.fixture
def registry():
    return registry_of(BertFamily)


@pytest.fixture
def small():
    """Return the config of an encoder with hidden size 8, 2 heads, 16 between, 2 layers."""
    return dict(SMALL)


@pytest.fixture
def tensors_of():
    """Return a function from a config to its tensors, which hold small whole numbers."""

    def made(config):
        return {name: encode(values(t, shape), "F32") for t, (name, shape) in enumerate(shapes_of(config).items())}

    return made


@pytest.fixture
def write():
    """Return a function that writes a config and tensors to a folder and returns it."""

    def write(folder, config, tensors, shards=1):
        write_config(folder, config)
        write_shards(folder, tensors, shards)
        return folder

    return write
