"""Times the plan of a Qwen3-MoE checkpoint of about 40,000 tensors in 100 files, from headers alone.

Run: ``python benchmarks/plan_40k.py [--runs 5]``. The files are sparse: headers are real, data is a hole. Prints the
median seconds of opening the headers, of the plan with its first rank, and of a further rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from math import prod
from pathlib import Path
from statistics import median

from steelyard.checkpoint import Checkpoint
from steelyard.planning import plan

LAYERS, EXPERTS, HIDDEN, INNER, HEAD, FILES = 102, 128, 512, 256, 64, 100


CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": LAYERS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * INNER,
    "moe_intermediate_size": INNER,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": HEAD,
    "vocab_size": 1024,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
}


def write(folder: Path) -> int:
    """Write the checkpoint and return how many tensors it has."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{stem}.{name}.weight"] = (HIDDEN,)
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{stem}.self_attn.{name}.weight"] = (8 * HEAD, HIDDEN)
        shapes[f"{stem}.self_attn.o_proj.weight"] = (HIDDEN, 8 * HEAD)
        for name in ("q_norm", "k_norm"):
            shapes[f"{stem}.self_attn.{name}.weight"] = (HEAD,)
        shapes[f"{stem}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            one = f"{stem}.mlp.experts.{expert}"
            shapes[f"{one}.gate_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{one}.up_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{one}.down_proj.weight"] = (HIDDEN, INNER)
    shapes |= {
        "model.embed_tokens.weight": (1024, HIDDEN),
        "lm_head.weight": (1024, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    names = list(shapes)
    share = -(-len(names) // FILES)
    weight_map = {}
    for index in range(FILES):
        file = f"model-{index + 1:05d}-of-{FILES:05d}.safetensors"
        header, at = {}, 0
        for name in names[index * share : (index + 1) * share]:
            size = 2 * prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [at, at + size]}
            weight_map[name], at = file, at + size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        count = write(Path(name))
        headers, first, further = [], [], []
        for _ in range(runs):
            start = time.perf_counter()
            Checkpoint.open(name)
            headers.append(time.perf_counter() - start)
            start = time.perf_counter()
            made = plan(name, tp=8, ep=8, target="cpu").check()
            made.rank(0)
            first.append(time.perf_counter() - start)
            for rank in range(1, 8):
                start = time.perf_counter()
                made.rank(rank)
                further.append(time.perf_counter() - start)
        print(f"{count} tensors in {FILES} files, tp 8, ep 8, {runs} runs, medians")
        print(f"  headers alone           {median(headers):.3f} s")
        print(f"  plan with first rank    {median(first):.3f} s")
        print(f"  a further rank          {median(further):.5f} s")


if __name__ == "__main__":
    main()
