"""Routed experts for core's tests: one layer in every stored form, its reference in numpy, a kernel with another order.

Values are small whole numbers, the activation is relu and weights of a token are quarters, so that every sum is exact
in float32 and equal bits are asked for, whatever the ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from steelyard.blueprint import Experts, Linear, Part, Placement
from steelyard.granularity import PerChannel
from steelyard.placement import Order
from steelyard.plugin import Accept, Axis, Fixed, Footprint, Form, LayerScheme, Layout, Source, StoredTensor, Verdict
from steelyard.registry import Registry
from steelyard.torch import DenseLinear
from support.loading import Toy, registry_for, runnable

STEM = "experts"
HIDDEN, INNER = 8, 4
FORMS = ("split", "stacked", "stacked_weight", "in_first", "in_first_weight")
PARTS = ("gate", "up", "down")
CODED = {"quantization_config": {"quant_method": "channel"}}

Arrays = dict[str, np.ndarray]


def node_of(
    count: int, hidden: int = HIDDEN, inner: int = INNER, *, top_k: int = 2, bias: bool = False, **changes: Any
) -> Experts:
    """Return a layer of experts named ``experts``."""
    w13 = Linear("", hidden, (Part("gate", inner), Part("up", inner)), Placement.COLWISE, bias=bias)
    w2 = Linear("", inner, (Part("down", hidden),), Placement.ROWWISE, bias=bias)
    return Experts(STEM, count, w13, w2, top_k=top_k, **{"activation": "relu"} | changes)


def wholes_of(node: Experts, seed: int = 0) -> Arrays:
    """Return each part's matrices (experts, out, in) and, under ``part.bias``, its biases (experts, out)."""
    rng = np.random.default_rng(seed)
    made = {}
    for linear in (node.w13, node.w2):
        for part in linear.parts:
            shape = (node.num_experts, part.out, linear.in_features)
            made[part.name] = rng.integers(-3, 4, shape).astype(np.float32)
            if linear.bias:
                made[f"{part.name}.bias"] = rng.integers(-5, 6, shape[:2]).astype(np.float32)
    return made


def stored_as(form: str, wholes: Arrays) -> Arrays:
    """Return the tensors of a checkpoint that holds a layer: one an expert and part, or stacks of all experts."""
    if form == "split":
        return {
            f"{STEM}.{expert}.{name if '.' in name else f'{name}.weight'}": one
            for name, whole in wholes.items()
            for expert, one in enumerate(whole)
        }
    made = {}
    for fused, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        whole = np.concatenate([wholes[part] for part in parts], 1)
        plain = "" if "weight" not in form else ".weight"
        made[f"{STEM}.{fused}{plain}"] = whole.swapaxes(1, 2).copy() if "in_first" in form else whole
        if f"{parts[0]}.bias" in wholes:
            beside = "_bias" if "weight" not in form else ".bias"
            made[f"{STEM}.{fused}{beside}"] = np.concatenate([wholes[f"{part}.bias"] for part in parts], 1)
    return made


def names_for(form: str) -> Callable[[Any, str, int | None], tuple[Source, ...]]:
    """Return what a mapping answers: single experts, or stacks with and without an ending, declared (in, out) or not."""
    turned = "in_first" in form

    def names(node: Any, part: str, expert: int | None) -> tuple[Source, ...]:
        if not isinstance(node, Experts):
            parts = tuple((one.name, one.out) for one in node.parts)
            return (Source(node.stem, order=Order(parts) if len(parts) > 1 else None),)
        fused = f"{node.stem}.{'down' if part == 'down' else 'gate_up'}"
        order = None if part == "down" else Order(tuple((one.name, one.out) for one in node.w13.parts))
        bare = {".weight": "", ".bias": "_bias"}
        return (
            Source(f"{node.stem}.{expert}.{part}"),
            Source(fused, bare, order, stacked=True, transposed=turned),
            Source(fused, {}, order, stacked=True, transposed=turned),
        )

    return names


def tokens_of(node: Experts, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, the experts of each (all different) and their weights in quarters."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-2, 3, (count, node.w13.in_features)).astype(np.float32)
    ids = np.array([rng.permutation(node.num_experts)[: node.top_k] for _ in range(count)], np.int64)
    weights = rng.integers(1, 5, (count, node.top_k)).astype(np.float32) / 4
    return torch.from_numpy(x), torch.from_numpy(ids.reshape(count, node.top_k)), torch.from_numpy(weights)


def mixture(wholes: Mapping[str, np.ndarray], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[Any]:
    """Return what a layer makes of tokens, token by token and expert by expert, from whole matrices alone."""
    tokens = x.double().numpy()
    made = np.zeros_like(tokens)
    for token, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            gate, up = (
                wholes[part][expert].astype(np.float64) @ tokens[token] + wholes.get(f"{part}.bias", _ZEROS)[expert]
                for part in ("gate", "up")
            )
            inner = np.maximum(gate, 0) * up
            out = wholes["down"][expert].astype(np.float64) @ inner + wholes.get("down.bias", _ZEROS)[expert]
            made[token] += float(weights[token, slot]) * out
    assert np.abs(made).max(initial=0) < 2**20, "the sums are no longer exact in float32"
    listed: list[Any] = made.tolist()
    return listed


class _Zeros:
    def __getitem__(self, expert: int) -> float:
        return 0.0


_ZEROS: Any = _Zeros()


# --- a kernel with another order, and a quantization ----------------------------------------------------------------


class LoopExperts(nn.Module):
    """Experts token by token, from what a backend was given; it trusts the order that its form asked for."""

    def __init__(self, w13: Mapping[str, Any], w2: Mapping[str, Any], local: Any, order: tuple[str, ...]) -> None:
        super().__init__()
        for prefix, tensors in (("w13", w13), ("w2", w2)):
            for name, tensor in tensors.items():
                self.register_buffer(f"{prefix}_{name}", tensor)
        self.held, self.order, self.local = local.experts, order, local

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        tensors = dict(self.named_buffers())
        for token in range(len(x)):
            for slot, expert in enumerate(ids[token].tolist()):
                if not self.held.start <= expert < self.held.stop:
                    continue
                at = expert - self.held.start
                both = tensors["w13_weight"][at] @ x[token]
                if "w13_bias" in tensors:
                    both = both + tensors["w13_bias"][at]
                halves = dict(zip(self.order, both.chunk(2), strict=True))
                out = tensors["w2_weight"][at] @ (torch.relu(halves["gate"]) * halves["up"])
                if "w2_bias" in tensors:
                    out = out + tensors["w2_bias"][at]
                made[token] += weights[token, slot] * out
        return made


def backend_of(name: str = "fake", order: tuple[str, ...] | None = None, **form: Any) -> type:
    """Return a backend that takes every Linear and every layer of experts, in one form.

    Args:
        name: Its key.
        order: The part order of its form.
        form: The rest of its form.
    """

    class Backend:
        keys = (name,)

        def serves(self, target: str) -> Verdict:
            return Verdict(True)

        def installed(self) -> Verdict:
            return Verdict(True)

        def accepts(self, scheme: LayerScheme, node: Any, target: str) -> Accept:
            return Accept(Verdict(True), Form(name, part_order=order, **form))

        def linear(self, weights: Mapping[str, torch.Tensor], scheme: LayerScheme, node: Any) -> DenseLinear:
            return DenseLinear(weights["weight"])

        def accepts_experts(self, w13: LayerScheme, w2: LayerScheme, node: Any, target: str) -> Accept:
            return self.accepts(w13, node, target)

        def experts(self, w13: Any, w2: Any, schemes: Any, node: Any) -> LoopExperts:
            return LoopExperts(w13, w2, node, tuple(part.name for part in node.w13.parts))

    return Backend


class ChannelConfig:
    """A quantization config that gives Linears and experts signed bytes with a scale a row, but for those ignored."""

    def __init__(self, ignore: tuple[str, ...]) -> None:
        self._ignore = ignore

    def scheme(self, names: tuple[str, ...], cls: str, headers: Any) -> LayerScheme | None:
        if cls not in ("Linear", "Experts") or any(one in name for one in self._ignore for name in names):
            return None
        return LayerScheme("int8", "channel", PerChannel())

    def companions(self) -> tuple[()]:
        return ()

    def findings(self) -> tuple[()]:
        return ()


class ChannelDialect:
    """``{"quant_method": "channel"}``, with ``ignore``: parts of names."""

    keys = ("channel",)

    def parse(self, config: Mapping[str, Any], files: Any) -> ChannelConfig:
        return ChannelConfig(tuple(config.get("ignore", ())))


class ChannelMethod:
    """Signed bytes with a scale a row, stored ``(out, 1)`` or ``(out,)``."""

    keys = ("int8.channel", "int8.channel.experts")

    def layouts(self, scheme: LayerScheme, node: Any) -> tuple[Layout, ...]:
        codes = StoredTensor((".weight",), ("I8",), ((Axis("out"), Axis("in")),))
        forms = ((Axis("out"), Fixed(1)), (Axis("out"),))
        return (Layout("channel", (codes, StoredTensor((".scale",), ("F32",), forms, role="scale"))),)

    def prepared(self, scheme: LayerScheme, node: Any, form: Form) -> Footprint:
        return Footprint(node.n * node.k * 4)

    def prepare(self, stored: Mapping[str, torch.Tensor], scheme: Any, node: Any, form: Form) -> Any:
        return {"weight": stored["weight"].float() * stored["scale"]}

    def dequantize(self, stored: Mapping[str, torch.Tensor], scheme: Any, node: Any, to: Any) -> torch.Tensor:
        return self.prepare(stored, scheme, node, Form("dense"))["weight"].to(to)


def coded(tensors: Arrays) -> tuple[Arrays, Arrays]:
    """Return plain tensors as codes and scales 1, 2, 4, 1, ... a row, and what they are worth."""
    made, worth = {}, {}
    for name, value in tensors.items():
        if not name.endswith(".weight"):
            made[name] = worth[name] = value
            continue
        scale = np.float32(2) ** (np.arange(prod(value.shape[:-1])).reshape(*value.shape[:-1], 1) % 3)
        made |= {name: value.astype(np.int8), name.replace(".weight", ".scale"): scale.astype(np.float32)}
        worth[name] = (value * scale).astype(np.float32)
    return made, worth


def registry_with(node: Any, *backends: type, form: str = "split", further: tuple[Any, ...] = ()) -> Registry:
    """Return a registry of a layer's family, the quantization above and backends; core's reference is asked last."""
    others = [("quant dialect", ChannelDialect), ("quant method", ChannelMethod)]
    others += [("kernel backend", one) for one in backends]
    return registry_for(runnable(node, *further, names=names_for(form), module=_toy), others=tuple(others))


def _toy(config: Any, built: Any) -> Toy:
    return Toy(built)
