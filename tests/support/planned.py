"""Plans for core's tests: registries of toys, checkpoints that are holes, and what a plan's steps do to numbers."""

import json
from math import prod
from pathlib import Path

import numpy as np

from steelyard.builtin.reference import TorchReference
from steelyard.config import LoadConfig
from steelyard.discovery import Catalog
from steelyard.dtypes import nbytes
from steelyard.planning import plan
from steelyard.plugin import Blueprint, Source, Verdict
from steelyard.registry import Registry
from support.checkpoints import BLOCK, TOY_D_CONFIG, dense_shapes, header_bytes, write_config
from support.families import ToyDense, ToyMoe, ToyMoeInFirst, ToyVision
from support.quant import AwqDialect, AwqMethod, Fp8Dialect, Fp8Method, GroupsDialect, Pack32Method, backend

EXPERTS, MOE_INTER = 4, 256
TOY_M_CONFIG = TOY_D_CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": MOE_INTER,
}
TOY_D = TOY_D_CONFIG | {"torch_dtype": "bfloat16"}
FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_CHANNEL = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_strategy": "channel"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"}
TARGET = "sm_90"


class Reference(TorchReference):
    """Core's reference as it is where torch is installed: a plan must not depend on that."""

    def installed(self):
        return Verdict(True)


def core_offers(*, without=()):
    """Return what core itself offers, without some kinds."""
    offers = Catalog.from_environment(block=()).offers
    return tuple(one for one in offers if one.distribution == "steelyard" and one.noun not in without)


def registry_of(*families, backends=None, others=()):
    """Return a registry of core's own plugins and the toys.

    Args:
        families: Families; all the toys if none is given.
        backends: Kernel backends; one that takes every quantized layer, on grids down to 16, if None.
        others: ``(kind, class)`` of further plugins.
    """
    registry = Registry(Catalog(core_offers(without=("kernel backend",))))
    registry.add("kernel backend", Reference)
    for family in families or (ToyDense, ToyMoe, ToyMoeInFirst, ToyVision):
        registry.add("model", family)
    for dialect in (Fp8Dialect, AwqDialect, GroupsDialect):
        registry.add("quant dialect", dialect)
    for method in (Fp8Method, AwqMethod, Pack32Method):
        registry.add("quant method", method)
    for cls in backends if backends is not None else (backend("toy", smallest_grid=16),):
        registry.add("kernel backend", cls)
    for noun, cls in others:
        registry.add(noun, cls)
    return registry


def family_of(*nodes, ties=(), names=None, drops=(), defaults=None, keys=("ToyForCausalLM",)):
    """Return a family of the nodes given.

    Args:
        nodes: Its nodes.
        ties: Its ties.
        names: What its mapping answers, a function of (node, part, expert); by default a part's name, or an expert's
            number and part, behind the stem.
        drops: What its mapping leaves out.
        defaults: Its load options.
        keys: Its keys.
    """

    def behind_the_stem(node, part, expert):
        pieces = (node.stem, "" if expert is None else str(expert), part)
        return (Source(".".join(piece for piece in pieces if piece)),)

    class Mapping:
        def names(self, node, part, expert):
            return (names or behind_the_stem)(node, part, expert)

        def drops(self, config):
            return drops

    class Family:
        def blueprint(self, config):
            return Blueprint(nodes, ties)

        def mapping(self, config):
            return Mapping()

        def defaults(self, config):
            return defaults or {}

        def lora_targets(self):
            return {}

    Family.keys = keys
    return Family


TOY = {"architectures": ["ToyForCausalLM"], "model_type": "toy", "torch_dtype": "bfloat16"}


def plan_of(folder, tensors, *nodes, config=None, ties=(), names=None, drops=(), registry=None, **options):
    """Write tensors as holes and return the plan of a family of the nodes given; for the rest see `family_of`."""
    hollow(folder, TOY | (config or {}), tensors)
    family = family_of(*nodes, ties=ties, names=names, drops=drops)
    if registry is None:
        registry = registry_of(family)
    else:
        registry.add("model", family)
    return planned(folder, registry=registry, **options)


def planned(folder, *, registry=None, target=TARGET, tp=None, ep=None, moe_tp=None, world=None, **options):
    """Return the plan of a folder; further options are fields of `LoadConfig`."""
    return plan(
        folder,
        tp=tp,
        ep=ep,
        moe_tp=moe_tp,
        world=world,
        target=target,
        config=LoadConfig(**options) if options else None,
        registry=registry if registry is not None else registry_of(),
    )


# --- checkpoints whose data is a hole ----------------------------------------------------------------------------


def hollow(folder, config, tensors, shards=1):
    """Write a checkpoint with real headers and holes for data, and return its folder.

    Args:
        folder: Where.
        config: ``config.json``.
        tensors: Name to ``(dtype code, shape)``.
        shards: Files.
    """
    folder = Path(folder)
    write_config(folder, config)
    names = list(tensors)
    share = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, at = {}, 0
        for name in names[number * share : (number + 1) * share]:
            code, shape = tensors[name]
            size = nbytes(code, tuple(shape))
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + size]}
            weight_map[name] = file
            at += size
        first = header_bytes(header)
        with (folder / file).open("wb") as out:
            out.write(first)
            out.truncate(len(first) + at)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def plain(shapes, dtype="BF16"):
    """Return name to ``(dtype, shape)`` from name to shape."""
    return {name: (dtype, tuple(shape)) for name, shape in shapes.items()}


def toy_m_shapes(config=None, stored="split"):
    """Return the names and shapes of TOY-M, sorted by name.

    Args:
        config: Its config.
        stored: ``split`` (one tensor an expert and projection), ``mixtral`` (w1, w3, w2), ``stacked`` or ``in_first``.
    """
    config = config or TOY_M_CONFIG
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    shapes = dense_shapes(config)
    for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"]):
        stem = f"model.layers.{layer}.mlp"
        for name in ("gate_proj", "up_proj", "down_proj"):
            del shapes[f"{stem}.{name}.weight"]
        shapes[f"{stem}.gate.weight"] = (experts, hidden)
        match stored:
            case "split":
                for expert in range(experts):
                    shapes[f"{stem}.experts.{expert}.gate_proj.weight"] = (inner, hidden)
                    shapes[f"{stem}.experts.{expert}.up_proj.weight"] = (inner, hidden)
                    shapes[f"{stem}.experts.{expert}.down_proj.weight"] = (hidden, inner)
            case "mixtral":
                older = f"model.layers.{layer}.block_sparse_moe"
                shapes[f"{older}.gate.weight"] = shapes.pop(f"{stem}.gate.weight")
                for expert in range(experts):
                    shapes[f"{older}.experts.{expert}.w1.weight"] = (inner, hidden)
                    shapes[f"{older}.experts.{expert}.w3.weight"] = (inner, hidden)
                    shapes[f"{older}.experts.{expert}.w2.weight"] = (hidden, inner)
            case "stacked":
                shapes[f"{stem}.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
                shapes[f"{stem}.experts.down_proj"] = (experts, hidden, inner)
            case "in_first":
                shapes[f"{stem}.experts.gate_up_proj"] = (experts, hidden, 2 * inner)
                shapes[f"{stem}.experts.down_proj"] = (experts, inner, hidden)
    return dict(sorted(shapes.items()))


def fused(tensors):
    """Return tensors with q, k, v and gate, up of every layer laid one behind the other along their rows."""
    left = dict(tensors)
    made = {}
    for name, (code, shape) in tensors.items():
        for first, others, together in (
            ("q_proj", ("k_proj", "v_proj"), "qkv_proj"),
            ("gate_proj", ("up_proj",), "gate_up_proj"),
        ):
            if f".{first}." in name and ".experts." not in name:
                parts = [left.pop(name.replace(first, one)) for one in (first, *others)]
                rows = sum(part_shape[0] for _, part_shape in parts)
                made[name.replace(first, together)] = (code, (rows, *shape[1:]))
    return dict(sorted((left | made).items()))


def is_projection(name):
    return "_proj." in name or name.endswith("_proj")


def coded(shapes, quant):
    """Return the tensors of a checkpoint whose projections are quantized, name to ``(dtype, shape)``.

    Args:
        shapes: Names and shapes of the plain checkpoint.
        quant: ``FP8-T``, ``FP8-C``, ``FP8-B``, ``AWQ`` or ``CT-W4``.
    """
    made = {}
    for name, shape in shapes.items():
        if not is_projection(name):
            made[name] = ("BF16", shape)
            continue
        stem = name.removesuffix(".weight")
        rows, columns = shape
        match quant:
            case "FP8-T":
                made |= {name: ("F8_E4M3", shape), f"{name}_scale": ("F32", ()), f"{stem}.input_scale": ("F32", ())}
            case "FP8-C":
                made |= {name: ("F8_E4M3", shape), f"{name}_scale": ("BF16", (rows, 1))}
            case "FP8-B":
                blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
                made |= {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("F32", blocks)}
            case "AWQ":
                groups = columns // BLOCK
                made |= {
                    f"{stem}.qweight": ("I32", (columns, rows // 8)),
                    f"{stem}.qzeros": ("I32", (groups, rows // 8)),
                    f"{stem}.scales": ("F16", (groups, rows)),
                }
            case "CT-W4":
                made |= {
                    f"{stem}.weight_packed": ("I32", (rows, columns // 8)),
                    f"{stem}.weight_scale": ("BF16", (rows, columns // BLOCK)),
                    f"{stem}.weight_shape": ("I64", (2,)),
                }
    return dict(sorted(made.items()))


QUANTIZED = {"FP8-T": FP8_TENSOR, "FP8-C": FP8_CHANNEL, "FP8-B": FP8_BLOCK, "AWQ": AWQ}


def hollow_d(folder, *, tensors=None, quant=None, config=None, **changes):
    """Write TOY-D as holes; ``config`` and ``changes`` are merged over the toy's config."""
    stated = TOY_D | ({"quantization_config": QUANTIZED[quant]} if quant else {}) | (config or {}) | changes
    if tensors is None:
        shapes = dense_shapes(stated)
        tensors = coded(shapes, quant) if quant else plain(shapes)
    return hollow(folder, stated, tensors)


def hollow_m(folder, *, stored="split", tensors=None, quant=None, config=None, **changes):
    """Write TOY-M as holes; ``config`` and ``changes`` are merged over the toy's config."""
    stated = TOY_M_CONFIG | ({"quantization_config": QUANTIZED[quant]} if quant else {}) | (config or {}) | changes
    if stored == "in_first":
        stated = stated | {"architectures": ["ToyInFirstForCausalLM"]}
    if tensors is None:
        shapes = toy_m_shapes(stated, stored)
        tensors = coded(shapes, quant) if quant else plain(shapes)
    return hollow(folder, stated, tensors)


# --- what steps do to numbers ------------------------------------------------------------------------------------


def taken(array, read):
    """Return the piece of a stored array that a read's cut names, regridded and swapped, by indices alone."""
    assert array.shape == tuple(read.shape)
    for axis, (piece, regrid) in enumerate(zip(read.cut.slices, read.cut.regrids, strict=True)):
        indices = piece.indices()
        assert not indices or (indices[0] >= 0 and indices[-1] < array.shape[axis]), f"{read.name} is cut past its end"
        array = np.take(array, indices, axis=axis)
        if regrid is not None:
            array = np.repeat(array, regrid.repeat, axis=axis)
            array = np.take(array, range(regrid.skip, regrid.skip + regrid.keep), axis=axis)
    return np.swapaxes(array, *read.swap) if read.swap is not None else array


def run(plan, rank, stored):
    """Carry out a rank's steps on numbers; return (stem, segment, buffer) to array.

    Every element must be written exactly once.

    Args:
        plan: The plan.
        rank: The rank.
        stored: A function from a stored tensor's name and shape to an array.
    """
    made = {}
    for task in plan.tasks(rank):
        buffers = {one.name: np.zeros(one.shape, np.int64) for one in task.on_rank.buffers}
        written = {name: np.zeros(array.shape, np.int64) for name, array in buffers.items()}
        for step, value in [
            *((read, taken(stored(read.name, read.shape), read)) for read in task.reads),
            *((fill, fill.value) for fill in task.fills),
        ]:
            assert (step.stem, step.segment) == (task.stem, task.index)
            place = tuple(slice(start, start + length) for start, length in step.region)
            target = buffers[step.buffer][place]
            assert target.shape == tuple(length for _, length in step.region), f"{step} reaches past its buffer"
            buffers[step.buffer][place] = value if np.isscalar(value) else np.reshape(value, target.shape)
            written[step.buffer][place] += 1
        for name, counts in written.items():
            assert (counts == 1).all(), f"{task.stem} {name}: elements written {sorted(set(counts.flatten()))} times"
            made[task.stem, task.index, name] = buffers[name]
    return made


def numbered(entries):
    """Return a function from a stored tensor's name to an array in which every element is another number.

    Args:
        entries: ``plan.checkpoint.entries``.
    """
    first, at = {}, 1
    for name, entry in entries.items():
        first[name] = at
        at += prod(entry.shape)

    def stored(name, shape):
        return np.arange(first[name], first[name] + prod(shape), dtype=np.int64).reshape(shape)

    return stored


def texts(plan, code=None):
    """Return the sentences of a plan's findings, of one code if given."""
    return [finding.text for finding in plan.findings if code is None or finding.code == code]


def error_texts(plan):
    return [finding.text for finding in plan.errors]
