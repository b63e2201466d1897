"""Loads for core's tests: toy families with modules, a quantization with every kind of tensor, readers that count."""

import weakref

import torch
from torch import nn

from steelyard.builtin.formats import Safetensors
from steelyard.collectives import Groups
from steelyard.discovery import Catalog
from steelyard.execute import Executor
from steelyard.granularity import PerGroup, PerTensor
from steelyard.planning import plan
from steelyard.plugin import (
    Accept,
    Axis,
    FillWith,
    Fixed,
    Footprint,
    Form,
    LayerScheme,
    Layout,
    StoredTensor,
    Verdict,
)
from steelyard.reader import MmapReader, PreadReader
from steelyard.registry import Registry
from steelyard.torch import DenseLinear
from support.checkpoints import write_config, write_shards
from support.planned import TOY, family_of

CPU = torch.device("cpu")


class Toy(nn.Module):
    """A module that takes every built node and runs none."""

    def __init__(self, built):
        super().__init__()
        self.nodes = nn.ModuleDict({stem.replace(".", "__"): built[stem] for stem in built})


def runnable(*nodes, module=None, **options):
    """Return a family of the nodes given whose module is a `Toy`, or what ``module(config, built)`` makes."""
    base = family_of(*nodes, **options)

    class Runnable(base):
        def module(self, config, built):
            return module(config, built) if module is not None else Toy(built)

    return Runnable


class ToyConfig:
    """A quantization config that gives every Linear one scheme, but for those that it ignores."""

    def __init__(self, scheme, ignore):
        self._scheme, self._ignore = scheme, ignore

    def scheme(self, names, cls, headers):
        return None if cls != "Linear" or any(name in self._ignore for name in names) else self._scheme

    def companions(self):
        return ()

    def findings(self):
        return ()


class ToyDialect:
    """``{"quant_method": "toy"}``, with ``group`` and ``ignore``."""

    keys = ("toy",)

    def parse(self, config, files):
        group = config.get("group")
        granularity = PerGroup(group) if group else PerTensor()
        return ToyConfig(LayerScheme("int8", "toy", granularity), tuple(config.get("ignore", ())))


SCALAR = ((), (Fixed(1),))


class ToyMethod:
    """Signed bytes with a scale a part; an index that parts share, the largest input scale, an optional zero point."""

    keys = ("int8.toy",)
    events = []

    def layouts(self, scheme, node):
        return (
            Layout(
                "toy",
                (
                    StoredTensor((".codes",), ("I8",), ((Axis("out"), Axis("in")),)),
                    StoredTensor((".scale",), ("F32",), SCALAR, role="scale", merge="per_part", checks=("positive",)),
                    StoredTensor(
                        (".g_idx",), ("I32",), ((Axis("in"),),), FillWith(0.0), role="index", merge="equal",
                        checks=("trivial_index",),
                    ),
                    StoredTensor((".input_scale",), ("F32",), SCALAR, FillWith(1.0), role="input_scale", merge="max"),
                ),
            ),
        )  # fmt: skip

    def prepared(self, scheme, node, form):
        return Footprint(node.n * node.k * 4)

    def prepare(self, stored, scheme, node, form):
        self.events.append(("prepare", node.node.stem))
        rows = [len(part.out) for part in node.parts]
        scales = torch.cat([stored["scale"][place].expand(count) for place, count in enumerate(rows)])
        return {"weight": stored["codes"].to(torch.float32) * scales[:, None], "input_scale": stored["input_scale"]}

    def dequantize(self, stored, scheme, node, to):
        return self.prepare(stored, scheme, node, Form("dense"))["weight"].to(to)


class ToyKernel(nn.Module):
    """A product with a prepared weight, which is a buffer."""

    def __init__(self, weights):
        super().__init__()
        for name, tensor in weights.items():
            self.register_buffer(name, tensor)

    def forward(self, x, bias):
        return nn.functional.linear(x, self.weight, bias)


class ToyBackend:
    """Runs what `ToyMethod` prepares."""

    keys = ("toy",)
    events = []

    def serves(self, target):
        return Verdict(True)

    def installed(self):
        return Verdict(True)

    def accepts(self, scheme, node, target):
        if scheme.weight not in ("int8", "float"):
            return Accept(Verdict(False, "computes toys"))
        return Accept(Verdict(True), Form("toy", smallest_grid=1))

    def linear(self, weights, scheme, node):
        self.events.append(("kernel", node.node.stem))
        return ToyKernel(weights) if scheme.is_quantized else DenseLinear(weights["weight"])


def registry_for(*families, others=()):
    """Return a registry of core's own plugins, the toy quantization and the families given.

    Args:
        families: Families.
        others: ``(kind, class)`` of further plugins; a kind and key given here takes the toy's place.
    """
    offers = tuple(offer for offer in Catalog.from_environment(block=()).offers if offer.distribution == "steelyard")
    replaced = {(noun, key) for noun, cls in others for key in cls.keys}
    registry = Registry(Catalog(tuple(offer for offer in offers if (offer.noun, offer.key) not in replaced)))
    for family in families:
        registry.add("model", family)
    mine = (("quant dialect", ToyDialect), ("quant method", ToyMethod), ("kernel backend", ToyBackend))
    for noun, cls in (*(one for one in mine if (one[0], one[1].keys[0]) not in replaced), *others):
        registry.add(noun, cls)
    return registry


def write_toy(folder, tensors, config=None, shards=1):
    """Write tensors as a toy's checkpoint and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, TOY | {"torch_dtype": "float32"} | (config or {}))
    write_shards(folder, tensors, shards)
    return folder


def plan_toy(folder, tensors, *nodes, config=None, shards=1, others=(), ties=(), names=None, tp=None, options=None):
    """Write a toy's checkpoint and return its plan, checked, for the CPU."""
    write_toy(folder, tensors, config, shards)
    registry = registry_for(runnable(*nodes, ties=ties, names=names), others=others)
    return plan(folder, tp=tp, target="cpu", config=options, registry=registry).check()


class Recording:
    """A reader that records what passes: names in order, and weak references to every piece."""

    def __init__(self, reader, before=None):
        self._reader, self._before = reader, before
        self.names, self.pieces, self.most_alive = [], [], 0

    @property
    def bytes_read(self):
        return self._reader.bytes_read

    def read(self, read):
        if self._before is not None:
            self._before(read, len(self.names))
        self.names.append(read.name)
        piece = self._reader.read(read)
        self.pieces.append(weakref.ref(piece))
        self.most_alive = max(self.most_alive, self.alive())
        return piece

    def alive(self):
        """Return how many pieces are alive."""
        return sum(piece() is not None for piece in self.pieces)

    def __enter__(self):
        self._reader.__enter__()
        return self

    def __exit__(self, *given):
        return self._reader.__exit__(*given)


def recording_format(readers, before=None):
    """Return the safetensors format with readers that record; they are added to ``readers``."""

    class Recorded(Safetensors):
        def open(self, checkpoint, way):
            made = Recording((MmapReader if way == "mmap" else PreadReader)(checkpoint), before)
            readers.append(made)
            return made

    return ("load format", Recorded)


def executed(made, rank=0, way="mmap", poll=lambda: None):
    """Run one rank of a plan in this process and return (what was executed, the reader)."""
    with made.load_format[1].open(made.checkpoint, way) as reader:
        return Executor(made, rank, CPU, reader, Groups(), poll).run(), reader
