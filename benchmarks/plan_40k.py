"""Times the plan of a mixture-of-experts checkpoint of about 40,000 tensors in 100 files, from headers alone.

Run: ``python benchmarks/plan_40k.py [--runs 5]``. The files are sparse: headers are real, data is a hole. Prints the
median seconds of opening the headers, of the plan with its first rank, and of a further rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from steelyard.checkpoint import Checkpoint
from steelyard.discovery import Catalog
from steelyard.planning import plan
from steelyard.plugin import Blueprint, Drop, Experts, Linear, Node, Norm, Part, Placement, Source
from steelyard.registry import Registry

LAYERS, EXPERTS, HIDDEN, INNER, FILES = 104, 128, 512, 256, 100


class Family:
    """Attention is left out: experts are what makes a checkpoint large in names."""

    keys = ("BenchForCausalLM",)

    def blueprint(self, config: Mapping[str, Any]) -> Blueprint:
        nodes: list[Node] = []
        for layer in range(LAYERS):
            stem = f"model.layers.{layer}"
            up = (Part("gate", INNER), Part("up", INNER))
            nodes.append(Norm(f"{stem}.norm", HIDDEN, layer=layer))
            nodes.append(
                Experts(
                    f"{stem}.mlp.experts",
                    EXPERTS,
                    Linear("w13", HIDDEN, up, Placement.COLWISE),
                    Linear("w2", INNER, (Part("down", HIDDEN),), Placement.ROWWISE),
                    layer=layer,
                )
            )
        return Blueprint(tuple(nodes))

    def mapping(self) -> Mapping_:
        return Mapping_()

    def defaults(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}

    def lora_targets(self) -> Mapping[str, str]:
        return {}


class Mapping_:
    def names(self, node: Node, part: str, expert: int | None) -> tuple[Source, ...]:
        return (Source(node.stem if expert is None else f"{node.stem}.{expert}.{part}_proj"),)

    def drops(self, config: Mapping[str, Any]) -> tuple[Drop, ...]:
        return ()


def write(folder: Path) -> int:
    """Write the checkpoint and return how many tensors it has."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        shapes[f"model.layers.{layer}.norm.weight"] = (HIDDEN,)
        for expert in range(EXPERTS):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes[f"{stem}.gate_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{stem}.up_proj.weight"] = (INNER, HIDDEN)
            shapes[f"{stem}.down_proj.weight"] = (HIDDEN, INNER)
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
    config = {"architectures": ["BenchForCausalLM"], "model_type": "bench", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    registry = Registry(Catalog.from_environment())
    registry.add("model", Family)
    with tempfile.TemporaryDirectory() as name:
        count = write(Path(name))
        headers, first, further = [], [], []
        for _ in range(runs):
            start = time.perf_counter()
            Checkpoint.open(name)
            headers.append(time.perf_counter() - start)
            start = time.perf_counter()
            made = plan(name, tp=8, ep=8, target="cpu", registry=registry).check()
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
