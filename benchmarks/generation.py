"""Decoders on an accelerator: what a load holds and peaks at, and that the model writes what it should.

    python benchmarks/generation.py --random /tmp/llama7b            # a random Llama of 7B shape in bf16, written there
    python benchmarks/generation.py --smollm2 FOLDER                 # SmolLM2-135M-Instruct, from examples/smollm2.py

Bounds of the memory test, beside the parameters and the KV cache: 64 MB after the load, 512 MB at its peak.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import steelyard

MB = 1 << 20
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
CAPITAL = "The capital of France is"
CONTINUATION = " Paris.\n\nThe answer is: 2"  # ten tokens, by transformers in float32


def write_random(folder: Path, config: dict[str, object], shards: int = 4) -> None:
    """Write a random checkpoint; nothing if it is there."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    layers, vocabulary = int(config["num_hidden_layers"]), int(config["vocab_size"])
    kv = hidden // int(config["num_attention_heads"]) * int(config["num_key_value_heads"])
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for layer in range(layers):
        stem = f"model.layers.{layer}"
        for name, shape in (("q", (hidden, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden)), ("o", (hidden, hidden))):
            shapes[f"{stem}.self_attn.{name}_proj.weight"] = shape
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            shapes[f"{stem}.mlp.{name}_proj.weight"] = shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{stem}.{name}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    names, weight_map = list(shapes), {}
    for shard in range(shards):
        tensors = {}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        for name in names[shard::shards]:
            shape = shapes[name]
            made = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)
            tensors[name] = (made + 1 if len(shape) == 1 else made).cpu()
            weight_map[name] = file
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def greedy(model: torch.nn.Module, ids: torch.Tensor, tokens: int) -> tuple[list[int], int, float]:
    """Return the tokens that follow, the bytes of the cache, and tokens a second of decoding."""
    cache = model.new_cache(1, ids.shape[1] + tokens)
    made: list[int] = []
    with torch.inference_mode():
        last = model(ids, cache=cache, keep=1)[:, -1:].argmax(-1)
        made.append(int(last))
        started = time.perf_counter()
        for _ in range(tokens - 1):
            last = model(last, cache=cache, keep=1)[:, -1:].argmax(-1)
            made.append(int(last))
    return made, cache.nbytes, (tokens - 1) / (time.perf_counter() - started)


def memory(folder: Path) -> dict[str, object]:
    """Load to the accelerator and generate; hold what is in memory against its bounds."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    loaded = steelyard.load(folder, device="cuda")
    seconds = time.perf_counter() - started
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    own = sum({one.data_ptr(): one.nbytes for one in loaded.module.parameters()}.values())
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 512), device="cuda")
    cache = loaded.module.new_cache(1, 1024)
    with_cache = torch.cuda.memory_allocated() - before
    bytes_of_cache = cache.nbytes
    del cache
    made, _, speed = greedy(loaded.module, ids, 64)
    found = {
        "parameters MB": own / MB,
        "beside them after the load MB": (after - own) / MB,
        "beside them and the cache MB": (with_cache - own - bytes_of_cache) / MB,
        "beside them at the peak MB": (peak - own) / MB,
        "KV cache of 1024 tokens MB": bytes_of_cache / MB,
        "load s": seconds,
        "load GB/s": own / seconds / 1e9,
        "decode tokens/s": speed,
        "tokens": made[:8],
    }
    assert with_cache - own - bytes_of_cache <= 64 * MB, found
    assert peak - own <= 512 * MB, found
    return {**found, **against_transformers(folder, loaded.module, ids)}


def against_transformers(folder: Path, module: torch.nn.Module, ids: torch.Tensor) -> dict[str, object]:
    """Return how far logits are from transformers' in float32, beside transformers' own in the module's dtype."""
    from transformers import AutoModelForCausalLM

    def logits(dtype: torch.dtype) -> torch.Tensor:
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(ids.device).eval()
        return peer(ids).logits.float()

    with torch.inference_mode():
        exact, mine, theirs = logits(torch.float32), module(ids).float(), logits(module.dtype)
    found = {}
    for name, made in (("ours", mine), ("transformers'", theirs)):
        off = (made - exact).abs()
        found |= {
            f"logits, {name} off float32: mean": float(off.mean()),
            f"logits, {name} off float32: most": float(off.max()),
        }
    return found


def smollm2(folder: Path, device: str) -> dict[str, object]:
    """Generate from the real model, in float32 against transformers, and in bfloat16."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(CAPITAL).ids], device=device)
    found: dict[str, object] = {}
    for dtype in ("float32", "bfloat16"):
        loaded = steelyard.load(folder, device=device, dtype=dtype)
        made, _, speed = greedy(loaded.module, ids, 10)
        found[f"{dtype}: continuation"] = tokenizer.decode(made)
        found[f"{dtype}: decode tokens/s"] = speed
        if dtype == "float32":
            assert tokenizer.decode(made) == CONTINUATION, found
            found |= against_transformers(folder, loaded.module, ids)
        assert tokenizer.decode(made).startswith(" Paris"), found
    return found


def main() -> None:
    """Run what was asked for and print it."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--random", type=Path)
    asked.add_argument("--smollm2", type=Path)
    asked.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = asked.parse_args()
    if options.random is not None:
        write_random(options.random, SHAPE)
        print(json.dumps(memory(options.random), indent=1))
    if options.smollm2 is not None:
        print(json.dumps(smollm2(options.smollm2, options.device), indent=1))


if __name__ == "__main__":
    main()
