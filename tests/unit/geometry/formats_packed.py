"""Formats that pack codes into words or rows: compressed-tensors, AWQ, GPTQ, modelopt row pairs, torchao tiles.

Legend: N = out_features, K = in_features, G = groups along K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from geometry.bits import (
    pack_awq,
    pack_nibbles,
    pack_tiles,
    pack_words,
    signed,
    spread,
    unpack_awq,
    unpack_nibbles,
    unpack_tiles,
    unpack_words,
)
from geometry.record import Edge, Format, floats

from steelyard.granularity import PerChannel, PerGroup
from steelyard.layouts import StoredTensor
from steelyard.placement import Axis, Fixed, cut, whole
from steelyard.schemes import LayerScheme

FREE = Edge()


@dataclass(frozen=True)
class ActOrder:
    """Keeps every group on every rank: under act-order a rank's columns belong to groups all over."""

    def cut(self, tensor, dims, spans, order, part):
        if tensor.role in ("scale", "zero"):
            spans = {**spans, "in": whole(spans["in"].size)}
        return cut(dims, spans, order=order, part=part)


def packed(name, dims, *, role="codes", merge="concat", dtype="I32"):
    return StoredTensor((f".{name}",), (dtype,), (dims,), role=role, merge=merge)


def stream(axis, bits):
    """Return the dim of a dense stream of codes in 32-bit words: whole words for 32 of an odd width."""
    return Axis(axis, 32 // bits) if 32 % bits == 0 else Axis(axis, 32, bits)


def stream_edge(bits):
    return Edge(32 // bits if 32 % bits == 0 else 32)


def permuted(rng, k, group):
    return (rng.permutation(k) // group).astype(np.int32)


# --- compressed-tensors ------------------------------------------------------------------------------------------


def ct_pack(name, bits, group, *, zeros, act_order=False):
    """Return pack-quantized: codes along K, zero points along N; ``group`` None is one scale a row."""
    soft = None if group is None or act_order else Edge(group, soft=True)
    along = Fixed(1) if group is None else Axis("in", group)
    tensors = [
        packed("weight_packed", (Axis("out"), stream("in", bits))),
        packed("weight_scale", (Axis("out"), along), role="scale", dtype="BF16"),
        packed("weight_shape", (Fixed(2),), role="metadata", merge="per_part", dtype="I64"),
    ]
    edges = {
        "weight_packed": (FREE, stream_edge(bits)),
        "weight_scale": (FREE, soft),
        "weight_shape": (None, None),
    }
    if zeros:
        tensors.append(packed("weight_zero_point", (stream("out", bits), along), role="zero"))
        edges["weight_zero_point"] = (stream_edge(bits), soft)
    if act_order:
        tensors.append(packed("weight_g_idx", (Axis("in"),), role="index", merge="equal"))
        edges["weight_g_idx"] = (None, FREE)

    def encode(rng, n, k, shared):
        count = 1 if group is None else k // group
        codes, scale = rng.integers(0, 1 << bits, (n, k)), floats(rng, n, count)
        zero = rng.integers(0, 1 << bits, (n, count)) if zeros else np.full((n, count), 1 << (bits - 1))
        index = np.arange(k) // (group or k)
        stored = {
            "weight_packed": pack_words(codes, bits, 1),
            "weight_scale": scale,
            "weight_shape": np.array([n, k]),
        }
        if zeros:
            stored["weight_zero_point"] = pack_words(zero, bits, 0)
        if act_order:
            index = stored["weight_g_idx"] = shared.get("weight_g_idx", permuted(rng, k, group))
        return stored, (codes - zero[:, index]) * scale[:, index]

    def decode(stored, view):
        scale = stored["weight_scale"]
        codes = unpack_words(stored["weight_packed"], bits, view.k, 1)
        zero = np.full(scale.shape, 1 << (bits - 1))
        if zeros:
            zero = unpack_words(stored["weight_zero_point"], bits, view.n, 0)
        index = stored["weight_g_idx"] if act_order else np.arange(view.k) // view.steps.get("in", view.k)
        assert act_order or scale.shape == (view.n, -(-view.k // view.steps.get("in", view.k)))
        return (codes - zero[:, index]) * scale[:, index]

    granularity = PerChannel() if group is None else PerGroup(group)
    legal = (32 if 32 % bits else 32 // bits, group or 32)
    return Format(
        name, LayerScheme("int4", "pack32", granularity), tuple(tensors), edges, encode, decode, legal,
        ActOrder() if act_order else None,
    )  # fmt: skip


# --- AWQ ---------------------------------------------------------------------------------------------------------


def awq(name, group):
    """Return AWQ's gemm layout, K first; ``group`` None is one group for the whole input."""
    soft = None if group is None else Edge(group, soft=True)
    along = Fixed(1) if group is None else Axis("in", group)

    def encode(rng, n, k, shared):
        count = 1 if group is None else k // group
        codes, zero = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (count, n))
        scale = floats(rng, count, n)
        stored = {"qweight": pack_awq(codes), "qzeros": pack_awq(zero), "scales": scale}
        index = np.arange(k) // (group or k)
        return stored, ((codes - zero[index]) * scale[index]).T

    def decode(stored, view):
        codes, zero, scale = unpack_awq(stored["qweight"]), unpack_awq(stored["qzeros"]), stored["scales"]
        index = np.arange(view.k) // view.steps.get("in", view.k)
        assert scale.shape == zero.shape == (index[-1] + 1, view.n)
        return ((codes - zero[index]) * scale[index]).T

    return Format(
        name,
        LayerScheme("int4", "awq", PerChannel() if group is None else PerGroup(group), symmetric=False),
        (
            packed("qweight", (Axis("in"), Axis("out", 8))),
            packed("qzeros", (along, Axis("out", 8)), role="zero"),
            packed("scales", (along, Axis("out")), role="scale", dtype="F16"),
        ),
        {"qweight": (Edge(8), FREE), "qzeros": (Edge(8), soft), "scales": (FREE, soft)},
        encode,
        decode,
        (8, group or 1),
    )


# --- GPTQ --------------------------------------------------------------------------------------------------------


def gptq(name, bits, group, *, act_order=False):
    """Return GPTQ v1: stored zeros are one less, ``g_idx`` is rebased by the reader unless act-order made it."""
    soft = None if group is None or act_order else Edge(group, soft=True)
    along = Fixed(1) if group is None else Axis("in", group, short_tail=True)
    mask = (1 << bits) - 1

    def encode(rng, n, k, shared):
        count = 1 if group is None else -(-k // group)
        codes, zero = rng.integers(0, mask + 1, (k, n)), rng.integers(0, mask + 1, (count, n))
        scale = floats(rng, count, n)
        index = (np.arange(k) // (group or k)).astype(np.int32)
        if act_order:
            index = shared.get("g_idx", permuted(rng, k, group))
        stored = {
            "qweight": pack_words(codes, bits, 0),
            "qzeros": pack_words(zero - 1 & mask, bits, 1),
            "scales": scale,
            "g_idx": index,
        }
        return stored, (scale[index] * (codes - zero[index])).T

    def decode(stored, view):
        codes = unpack_words(stored["qweight"], bits, view.k, 0)
        zero = unpack_words(stored["qzeros"], bits, view.n, 1) + 1 & mask
        index = stored["g_idx"]
        if not act_order:
            size, step = group or view.start_in + view.k, view.steps.get("in", view.k)
            assert np.array_equal(index, (view.start_in + np.arange(view.k)) // size)
            index = index - view.start_in // size if step == size else np.arange(view.k) // step
            assert stored["scales"].shape == (index[-1] + 1, view.n)
        return (stored["scales"][index] * (codes - zero[index])).T

    edge = stream_edge(bits)
    return Format(
        name,
        LayerScheme("int4", "gptq", PerChannel() if group is None else PerGroup(group), symmetric=False),
        (
            packed("qweight", (stream("in", bits), Axis("out"))),
            packed("qzeros", (along, stream("out", bits)), role="zero"),
            packed("scales", (along, Axis("out")), role="scale", dtype="F16"),
            packed("g_idx", (Axis("in"),), role="index", merge="equal"),
        ),
        {"qweight": (FREE, edge), "qzeros": (edge, soft), "scales": (FREE, soft), "g_idx": (None, FREE)},
        encode,
        decode,
        (32, 32),
        ActOrder() if act_order else None,
    )


# --- row pairs and tiles -----------------------------------------------------------------------------------------


def row_pairs(group):
    """Return modelopt's int4: two rows in a byte, and a vector that multiplies the input."""

    def encode(rng, n, k, shared):
        codes, scale = rng.integers(-8, 8, (n, k)), floats(rng, n, k // group)
        before = shared.get("pre_quant_scale", floats(rng, k))
        stored = {"weight": pack_nibbles(codes, 0), "weight_scale": scale, "pre_quant_scale": before}
        return stored, codes * spread(scale, n, k, 1, group) * before

    def decode(stored, view):
        codes = signed(unpack_nibbles(stored["weight"], 0), 4)
        return codes * spread(stored["weight_scale"], view.n, view.k, 1, view.steps["in"]) * stored["pre_quant_scale"]

    soft = Edge(group, soft=True)
    return Format(
        "modelopt-int4-row-pairs",
        LayerScheme("int4", "rows", PerGroup(group)),
        (
            packed("weight", (Axis("out", 2), Axis("in")), dtype="U8"),
            packed("weight_scale", (Axis("out"), Axis("in", group)), role="scale", dtype="F32"),
            packed("pre_quant_scale", (Axis("in"),), role="scale", merge="equal", dtype="F32"),
        ),
        {"weight": (Edge(2), FREE), "weight_scale": (FREE, soft), "pre_quant_scale": (None, FREE)},
        encode,
        decode,
        (2, group),
    )


def tiled(group):
    """Return torchao's tile-packed int4; its zero is a float offset."""

    def encode(rng, n, k, shared):
        codes, pair = rng.integers(0, 16, (n, k)), floats(rng, k // group, n, 2)
        scale, zero = (spread(pair[..., i].T, n, k, 1, group) for i in range(2))
        return {"qdata": pack_tiles(codes), "scale_and_zero": pair}, (codes - 8) * scale + zero

    def decode(stored, view):
        pair = stored["scale_and_zero"]
        scale, zero = (spread(pair[..., i].T, view.n, view.k, 1, view.steps["in"]) for i in range(2))
        return (unpack_tiles(stored["qdata"]) - 8) * scale + zero

    return Format(
        "torchao-tiled",
        LayerScheme("int4", "tiled", PerGroup(group), symmetric=False),
        (
            packed("qdata", (Axis("out", 8), Axis("in", 128), Fixed(32), Fixed(4))),
            packed("scale_and_zero", (Axis("in", group), Axis("out"), Fixed(2)), role="scale", dtype="BF16"),
        ),
        {"qdata": (Edge(8), Edge(128)), "scale_and_zero": (FREE, Edge(group, soft=True))},
        encode,
        decode,
        (8, 128),
    )


PACKED = (
    ct_pack("ct-pack4-group128", 4, 128, zeros=False),
    ct_pack("ct-pack4-group64-zeros", 4, 64, zeros=True),
    ct_pack("ct-pack8-group64-zeros", 8, 64, zeros=True),
    ct_pack("ct-pack4-channel-zeros", 4, None, zeros=True),
    ct_pack("ct-pack3-group32-zeros", 3, 32, zeros=True),
    ct_pack("ct-pack4-g_idx", 4, 32, zeros=False, act_order=True),
    awq("awq-group64", 64),
    awq("awq-group128", 128),
    awq("awq-one-group", None),
    gptq("gptq4-group64", 4, 64),
    gptq("gptq8-group128", 8, 128),
    gptq("gptq2-group32", 2, 32),
    gptq("gptq3-group32", 3, 32),
    gptq("gptq4-one-group", 4, None),
    gptq("gptq4-desc_act", 4, 32, act_order=True),
    row_pairs(64),
    tiled(64),
)
