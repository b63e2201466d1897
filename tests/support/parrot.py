"""A model of text that says what its checkpoint holds: row t of its one table has the logits of what follows token t.

Ids below 256 are bytes, so a script is bytes that are all different. Any number of ranks can share the table.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from steelyard.blueprint import Embedding, Placement
from steelyard.plugin import hookimpl
from support.checkpoints import write_config, write_safetensors
from support.planned import family_of

BOS, EOS, START, END = 256, 257, 258, 259
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|im_start|>": START, "<|im_end|>": END}
V = 260
CONFIG = {"architectures": ["ParrotForCausalLM"], "vocab_size": V, "max_position_embeddings": 64, "dtype": "float32"}
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def letters() -> list[str]:
    """Return the visible character that GPT-2 writes for each byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    found = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    return [found[byte] for byte in range(256)]


def bytes_tokenizer() -> Tokenizer:
    """Return a byte-level BPE without merges: a token is a byte, or special."""
    made = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters())}, []))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def write_parrot(folder: Path, *scripts: list[int], **config: object) -> Path:
    """Write a checkpoint whose model follows the scripts greedily, and its tokenizer."""
    table = np.zeros((V, V), dtype=np.float32)
    for script in scripts:
        assert len(set(script[:-1])) == len(script[:-1]), "a token is followed by one other"
        table[script[:-1], script[1:]] = 5.0
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, CONFIG | config)
    write_safetensors(folder / "model.safetensors", {"table.weight": table})
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "bos_token_id": BOS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    return folder


class Parrot(nn.Module):
    """The module: it offers what `steelyard.generation.TextModel` asks for, and needs no cache."""

    def __init__(self, config, built) -> None:
        super().__init__()
        self.table = built["table"]
        self.vocabulary, self.max_positions = V, config["max_position_embeddings"]
        self.has_head = not config["architectures"][0].endswith("Model")

    def new_cache(self, batch, tokens):
        return []

    def forward(self, input_ids, *, attention_mask=None, position_ids=None, cache=None, keep=0):
        return self.table(input_ids[:, -keep:])


class ParrotFamily(
    family_of(
        Embedding("table", V, V, Placement.COLWISE),
        names=None,
        keys=("ParrotForCausalLM", "ParrotModel"),
    )
):
    """The family."""

    def module(self, config, built):
        return Parrot(config, built)


@hookimpl
def steelyard_models():
    return [ParrotFamily]
