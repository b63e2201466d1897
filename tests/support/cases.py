"""Users' faults as real loads: small checkpoints of real values, loaded on every rank, and what each rank must hold then.

What a rank must hold is written down from the rules in words: no line here asks the planner or the geometry. Tensors
are called as a checkpoint calls them where nothing is fused, without ``model.`` in front; a layer's experts are one
stack a projection, such as ``layers.0.mlp.experts.gate_proj``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import steelyard
from steelyard import execute
from steelyard.collectives import Groups
from steelyard.config import LoadConfig
from steelyard.execute import Executor
from steelyard.loader import Built
from steelyard.loadplan import LoadPlan
from steelyard.registry import Registry, default_registry
from steelyard.torch import Embedding, Experts, Linear, Norm, weight_of
from support.checkpoints import dense_shapes, encode, values, write_config, write_shards
from support.loading import Recording
from support.planned import TOY_D, TOY_M_CONFIG, toy_m_shapes
from support.stored import bytes_of

Arrays = dict[str, np.ndarray]
"""Name to float32 array."""

PATTERNS = {"nan": 0xFF, "0x5A": 0x5A}
"""What fresh memory holds before a load, each byte; all ones are a NaN in every dtype of floats."""

TOY_M = TOY_M_CONFIG | {"norm_topk_prob": True}
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def installed() -> Registry:
    """Return the plugins that the cases are loaded with: those installed."""
    return default_registry()


def installed_and(*families: type[Any]) -> Registry:
    """Return the plugins installed and further families."""
    made = Registry.from_environment()
    for family in families:
        made.add("model", family)
    return made


@contextmanager
def poisoned(pattern: int) -> Iterator[None]:
    """Make all memory that a load takes hold one byte pattern before; one thread, for pieces are small."""
    real, threads = execute.allocate, torch.get_num_threads()

    def allocate(shape: tuple[int, ...], code: str, device: torch.device) -> torch.Tensor:
        made = real(shape, code, device)
        if made.numel():
            made.view(-1).view(torch.uint8).fill_(pattern)
        return made

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "allocate", allocate)
        yield
    torch.set_num_threads(threads)


# --- checkpoints -------------------------------------------------------------------------------------------------


def numbers(shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Return F_t * 2^-(t // 3) of every tensor, t its place among the sorted names.

    F_t alone is F_(t + 3): the tensors of two layers, or of two experts, would be equal, and mixing them up no fault.
    """
    return {name: values(t, shape) * 2.0 ** -(t // 3) for t, (name, shape) in enumerate(sorted(shapes.items()))}


def toy_d(**config: Any) -> Arrays:
    """Return TOY-D's tensors under split names, the biases that its config asks for among them."""
    stated = TOY_D | config
    shapes = dense_shapes(stated)
    biased = [("attention_bias", ".self_attn."), ("mlp_bias", ".mlp.")]
    for key, where in biased:
        if stated.get(key):
            weights = [(name, shape) for name, shape in shapes.items() if where in name]
            shapes |= {f"{name.removesuffix('.weight')}.bias": shape[:1] for name, shape in weights}
    return numbers(shapes)


def toy_m(**config: Any) -> Arrays:
    """Return TOY-M's tensors one by one, with the norms of heads that Qwen3-MoE has beside TOY-D's tensors."""
    shapes = toy_m_shapes(TOY_M | config)
    for layer in range(TOY_M["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.self_attn.{one}_norm.weight": (TOY_M["head_dim"],) for one in "qk"}
    return numbers(shapes)


def fused(arrays: Arrays) -> Arrays:
    """Return tensors with q, k, v and gate, up of every layer one behind the other, biases likewise."""
    left = dict(arrays)
    for name in arrays:
        for first, others, together in (
            (".q_proj.", (".k_proj.", ".v_proj."), ".qkv_proj."),
            (".gate_proj.", (".up_proj.",), ".gate_up_proj."),
        ):
            if first in name and ".experts." not in name:
                parts = [left.pop(name.replace(first, one)) for one in (first, *others)]
                left[name.replace(first, together)] = np.concatenate(parts)
    return left


def stacked(arrays: Arrays) -> Arrays:
    """Return tensors with the experts of each layer in two stacks: gate and up, and down."""
    left = {name: array for name, array in arrays.items() if ".experts." not in name}
    stems = {name.partition(".experts.")[0] + ".experts" for name in arrays if ".experts." in name}
    for stem in stems:
        count = len({name for name in arrays if name.startswith(stem) and name.endswith("down_proj.weight")})
        gate, up, down = (
            [arrays[f"{stem}.{expert}.{one}_proj.weight"] for expert in range(count)] for one in ("gate", "up", "down")
        )
        left[f"{stem}.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
        left[f"{stem}.down_proj"] = np.stack(down)
    return left


def folder_of(
    folder: Path,
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "BF16",
    shards: int = 1,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint and return its folder.

    Args:
        folder: Where.
        arrays: Its tensors.
        config: What differs from TOY-D's config.
        dtype: Code of all tensors.
        shards: Files.
        metadata: Of each file's header, beside the format.
    """
    write_config(folder, TOY_D | {"torch_dtype": DTYPES[dtype]} | dict(config or {}))
    tensors = {name: encode(array, dtype) for name, array in sorted(arrays.items())}
    write_shards(folder, tensors, shards, metadata={"format": "pt", **(metadata or {})})
    return folder


# --- what a rank must hold ---------------------------------------------------------------------------------------

KV_ROWS = {1: [(0, 256)], 2: [(0, 128), (128, 256)], 4: [(0, 128), (0, 128), (128, 256), (128, 256)]}
"""Tensor-parallel size to the rows of k, and of v, that each rank holds: two heads of 128 rows."""


def share(whole: Arrays, tp: int, rank: int) -> Arrays:
    """Return what a tensor-parallel rank holds of TOY-D, or of TOY-M but its experts.

    q, gate and up rows r * n / tp; k and v by `KV_ROWS`; o and down columns; embedding and head rows, with zero rows
    behind the vocabulary so that all ranks have as many; everything else, and the bias of o and down, whole.
    """
    held = {}
    for name, array in whole.items():
        part, _, ending = name.removeprefix("model.").rpartition(".")
        match part.rpartition(".")[2]:
            case "q_proj" | "gate_proj" | "up_proj":
                array = array[_equal(len(array), tp, rank)]
            case "k_proj" | "v_proj":
                array = array[slice(*KV_ROWS[tp][rank])]
            case "o_proj" | "down_proj" if ending == "weight":
                array = array[:, _equal(array.shape[1], tp, rank)]
            case "embed_tokens" | "lm_head":
                rows = -(-len(array) // tp)
                padded = np.concatenate([array, np.zeros((rows * tp - len(array), array.shape[1]), np.float32)])
                array = padded[rank * rows : (rank + 1) * rows]
        held[name.removeprefix("model.")] = array
    return held


def moe_share(whole: Arrays, experts: range, *, tp: int = 1, tp_rank: int = 0, inner: slice = slice(None)) -> Arrays:
    """Return what a rank holds of TOY-M: its experts, and of each the rows ``inner`` of gate and up; the rest as `share`."""
    held = share({name: array for name, array in whole.items() if ".experts." not in name}, tp, tp_rank)
    for stem in sorted({name.partition(".experts.")[0] for name in whole if ".experts." in name}):
        for one in ("gate", "up", "down"):
            every = np.stack([whole[f"{stem}.experts.{expert}.{one}_proj.weight"] for expert in experts])
            held[f"{stem}.experts.{one}_proj".removeprefix("model.")] = (
                every[:, :, inner] if one == "down" else every[:, inner]
            )
    return held


def _equal(size: int, parts: int, index: int) -> slice:
    assert size % parts == 0
    return slice(index * size // parts, (index + 1) * size // parts)


# --- loads -------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A rank of a job, loaded in this process.

    Attributes:
        module: Its model.
        names: The stored tensors that its reader handed out, one entry a piece.
        received: Stored tensor to the bytes of it that the rank received.
        read: Bytes that its reader asked of files.
    """

    module: nn.Module
    names: list[str]
    received: Mapping[str, int]
    read: int


def plan(folder: Path, *, tp: int = 1, registry: Registry | None = None, **options: Any) -> LoadPlan:
    """Return the plan of a folder for the CPU; ``ep``, ``moe_tp``, ``world`` and fields of `LoadConfig` may be given."""
    sizes = {name: options.pop(name) for name in ("ep", "moe_tp", "world") if name in options}
    config = LoadConfig(device="cpu", **options)
    return steelyard.plan(folder, tp=tp, target="cpu", config=config, registry=registry or installed(), **sizes)


def load(folder: Path, *, registry: Registry | None = None, **options: Any) -> steelyard.LoadedModel:
    """Load a folder as a user does, on one process; options are fields of `LoadConfig`."""
    config = LoadConfig(**options)
    return steelyard.load(folder, device="cpu", tp=1, config=config, registry=registry or installed())


def ranks(folder: Path, **options: Any) -> list[Rank]:
    """Return every rank of a job, loaded one after the other in this process; options as in `plan`."""
    made = plan(folder, **options).check()
    loaded = []
    for rank in range(made.job.world):
        with Recording(made.load_format[1].open(made.checkpoint, made.reader[0])) as reader:
            executed = Executor(made, rank, torch.device("cpu"), reader, Groups(), lambda: None).run()
        built = Built(executed.built)
        module = made.family.module(made.config, built)
        built.check()
        loaded.append(Rank(module, reader.names, executed.received, reader.bytes_read))
    return loaded


def modules(folder: Path, tp: int = 1, **options: Any) -> list[nn.Module]:
    """Return every rank's model: by `load` if there is one rank, else by `ranks`."""
    if tp == 1:
        return [load(folder, **options).module]
    return [one.module for one in ranks(folder, tp=tp, **options)]


def errors(call: Callable[[], Any]) -> list[str]:
    """Return the sentences of the errors of the plan with which a call must fail."""
    try:
        call()
    except steelyard.PlanError as error:
        return [finding.text for finding in error.findings]
    raise AssertionError("nothing was raised")


# --- what a rank holds -------------------------------------------------------------------------------------------


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a decoder's layers under the names of `share`."""
    found: dict[str, torch.Tensor] = {}
    for one in module.modules():
        match one:
            case Linear():
                above, sizes = one.node.stem.rpartition(".")[0], [one.part_sizes[name] for name in one.parts]
                names = [f"{above}.{name}_proj" if name else one.node.stem for name in one.parts]
                biases = [tensor for name, tensor in one.state_dict().items() if name.rpartition(".")[2] == "bias"]
                for ending, tensors in (("weight", [weight_of(one)]), ("bias", biases)):
                    for tensor in tensors:
                        pieces = zip(names, torch.split(tensor, sizes), strict=True)
                        found |= {f"{name}.{ending}": piece for name, piece in pieces}
            case Embedding() | Norm():
                found[f"{one.node.stem}.weight"] = one.weight
            case Experts():
                gate, up = one.kernel.w13.chunk(2, 1)
                pieces = zip(("gate", "up", "down"), (gate, up, one.kernel.w2), strict=True)
                found |= {f"{one.node.stem}.{name}_proj": piece for name, piece in pieces}
    return found


def assert_holds(module: nn.Module, expected: Arrays, dtype: str = "BF16") -> None:
    """Compare every parameter and buffer of a rank's model with what it must hold, bit for bit."""
    found = held(module)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert tuple(found[name].shape) == array.shape, name
        assert bytes_of(found[name]) == encode(array, dtype)[2], name
    everything = sum(tensor.nbytes for tensor in module.state_dict().values())
    assert everything == sum(tensor.nbytes for tensor in found.values()), "the model holds something else too"
