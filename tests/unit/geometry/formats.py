"""Formats whose codes are whole bytes or pairs of nibbles: plain floats, FP8, INT8, FP4 and FP6.

Legend: N = out_features, K = in_features.
"""

from __future__ import annotations

import numpy as np
from geometry.bits import E2M1, E2M3, E4M3, bf16, e8m0, pack_nibbles, signed, spread, unpack_nibbles
from geometry.formats_packed import PACKED
from geometry.record import Edge, Format, floats, grid_of, per_row

from steelyard.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from steelyard.layouts import StoredTensor
from steelyard.placement import Axis, Fixed
from steelyard.schemes import LayerScheme

FREE = Edge()
PLAIN = (Axis("out"), Axis("in"))
SCALAR_DIMS = ((), (Fixed(1),))
FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


def codes_tensor(dtype="F8_E4M3", dims=PLAIN, name=".weight"):
    return StoredTensor((name,), (dtype,), (dims,))


def scale_tensor(*dims, name=".weight_scale", dtype="F32", merge="concat"):
    return StoredTensor((name,), (dtype,), dims, role="scale", merge=merge)


def fp8_codes(rng, n, k):
    return rng.choice(FINITE, (n, k))


# --- plain floats ------------------------------------------------------------------------------------------------


def encode_bf16(rng, n, k, shared):
    codes = rng.integers(0, 0x7F80, (n, k)).astype(np.uint16)
    return {"weight": codes}, bf16(codes)


def decode_bf16(stored, view):
    return bf16(stored["weight"])


BF16 = Format(
    "bf16", LayerScheme(), (codes_tensor("BF16"),), {"weight": (FREE, FREE)}, encode_bf16, decode_bf16
)  # fmt: skip


# --- one scale for the matrix, or one a row ----------------------------------------------------------------------


def fp8_tensor(form):
    def encode(rng, n, k, shared):
        codes, scale, act = fp8_codes(rng, n, k), floats(rng), floats(rng)
        stored = {"weight": codes, "weight_scale": scale.reshape(form), "input_scale": act.reshape(form)}
        return stored, E4M3[codes] * scale

    def decode(stored, view):
        assert np.asarray(stored["input_scale"]).size in (1, len(view.rows))
        return E4M3[stored["weight"]] * per_row(stored["weight_scale"], view)

    return Format(
        f"fp8-tensor{list(form)}".replace(", ", "x"),
        LayerScheme("fp8", granularity=PerTensor()),
        (
            codes_tensor(),
            scale_tensor(*SCALAR_DIMS, merge="per_part"),
            StoredTensor((".input_scale",), ("F32",), SCALAR_DIMS, role="input_scale", merge="per_part"),
        ),
        {"weight": (FREE, FREE), "weight_scale": (None, None), "input_scale": (None, None)},
        encode,
        decode,
    )


def channel(name, weight, dtype, draw, values, form):
    def encode(rng, n, k, shared):
        codes, scale = draw(rng, n, k), floats(rng, n, 1)
        return {"weight": codes, "weight_scale": scale.reshape(form(n))}, values(codes) * scale

    def decode(stored, view):
        return values(stored["weight"]) * grid_of(stored["weight_scale"])

    return Format(
        name,
        LayerScheme(weight, granularity=PerChannel()),
        (codes_tensor(dtype), scale_tensor((Axis("out"), Fixed(1)), (Axis("out"),))),
        {"weight": (FREE, FREE), "weight_scale": (FREE, None)},
        encode,
        decode,
    )


def int8_codes(rng, n, k):
    return rng.integers(-128, 128, (n, k)).astype(np.int8)


# --- blocks and groups over whole bytes --------------------------------------------------------------------------


def fp8_block(block, form="2d"):
    soft = Edge(block, soft=True)
    grid = (Axis("out", block, short_tail=True), Axis("in", block, short_tail=True))
    dims = (grid, (grid[0], Fixed(1), grid[1], Fixed(1)))

    def encode(rng, n, k, shared):
        codes, scale = fp8_codes(rng, n, k), floats(rng, -(-n // block), -(-k // block))
        held = scale if form == "2d" else scale[:, None, :, None]
        return {"weight": codes, "weight_scale_inv": held}, E4M3[codes] * spread(scale, n, k, block, block)

    def decode(stored, view):
        scale = grid_of(stored["weight_scale_inv"])
        steps = view.steps["out"], view.steps["in"]
        assert scale.shape == (-(-view.n // steps[0]), -(-view.k // steps[1]))
        return E4M3[stored["weight"]] * spread(scale, view.n, view.k, *steps)

    return Format(
        f"fp8-block{block}-{form}",
        LayerScheme("fp8", granularity=PerBlock(block, block)),
        (codes_tensor(), scale_tensor(*dims, name=".weight_scale_inv")),
        {"weight": (FREE, FREE), "weight_scale_inv": (soft, soft)},
        encode,
        decode,
    )


def grouped(name, weight, group, tensor, packed, pack, values, draw, *, scales=floats, real=None, extra=None):
    """Return a format of codes with a scale for ``group`` neighbours along K.

    Args:
        tensor: The codes as core wants them.
        packed: Where the codes can be cut.
        pack: Codes to what is stored.
        values: What is stored to real values.
        draw: ``(rng, n, k)`` to codes.
        scales: ``(rng, n, groups)`` to stored scales.
        real: Stored scales to real ones.
        extra: ``(tensor, sign)`` of a global scale a part, multiplied or divided.
    """
    read = real or (lambda scale: scale)

    def encode(rng, n, k, shared):
        codes, scale = draw(rng, n, k), scales(rng, n, k // group)
        stored = {tensor.name: pack(codes), "weight_scale": scale}
        factor = 1.0
        if extra is not None:
            stored[extra[0].name] = floats(rng)
            factor = stored[extra[0].name] ** extra[1]
        return stored, values(stored[tensor.name]) * (spread(read(scale), n, k, 1, group) * factor)

    def decode(stored, view):
        scale = spread(read(stored["weight_scale"]), view.n, view.k, 1, view.steps["in"])
        assert stored["weight_scale"].shape[1] == view.k // view.steps["in"]
        factor = 1.0 if extra is None else per_row(stored[extra[0].name], view) ** extra[1]
        return values(stored[tensor.name]) * (scale * factor)

    edges = {tensor.name: packed, "weight_scale": (FREE, Edge(group, soft=True))}
    tensors = (tensor, scale_tensor((Axis("out"), Axis("in", group))))
    if extra is not None:
        edges[extra[0].name] = (None, None)
        tensors = (*tensors, extra[0])
    return Format(name, LayerScheme(weight, granularity=PerGroup(group)), tensors, edges, encode, decode, (2, group))


def exponents(rng, n, groups):
    return rng.integers(117, 137, (n, groups)).astype(np.uint8)


def fp8_scales(rng, n, groups):
    return rng.integers(0x20, 0x60, (n, groups)).astype(np.uint8)


def fp8_values(codes):
    return E4M3[codes]


def nibble_codes(rng, n, k):
    return rng.integers(0, 16, (n, k))


def fp4_values(packed):
    return E2M1[unpack_nibbles(packed)]


def block_values(blocks):
    return E2M1[unpack_nibbles(blocks).reshape(*blocks.shape[:-2], -1)]


def into_blocks(codes):
    return pack_nibbles(codes).reshape(*codes.shape[:-1], -1, 16)


def element_codes(codes):
    return codes.astype(np.uint8)


def element_values(codes):
    return E2M1[codes]


def int4_values(packed):
    return signed(unpack_nibbles(packed), 4)


def byte_values(codes):
    return codes.astype(np.int64)


def int4_bytes(codes):
    return signed(codes, 4).astype(np.int8)


def pack_sixes(codes):
    fours = codes.reshape(codes.shape[0], -1, 4).astype(np.int64)
    word = sum(fours[..., i] << 6 * i for i in range(4))
    return np.stack([word >> 8 * i & 255 for i in range(3)], -1).reshape(codes.shape[0], -1).astype(np.uint8)


def six_values(packed):
    threes = packed.reshape(packed.shape[0], -1, 3).astype(np.int64)
    word = sum(threes[..., i] << 8 * i for i in range(3))
    return E2M3[np.stack([word >> 6 * i & 63 for i in range(4)], -1).reshape(packed.shape[0], -1)]


def six_codes(rng, n, k):
    return rng.integers(0, 64, (n, k))


PAIRS = (Axis("out"), Axis("in", 2))
PAIR_EDGES = (FREE, Edge(2))
GLOBAL = scale_tensor(*SCALAR_DIMS, name=".weight_scale_2", merge="per_part")
DIVISOR = scale_tensor(*SCALAR_DIMS, name=".weight_global_scale", merge="per_part")


def _packed_pairs(name=".weight", dtype="U8"):
    return codes_tensor(dtype, PAIRS, name)


BYTES = (
    BF16,
    fp8_tensor(()),
    fp8_tensor((1,)),
    channel("fp8-channel[N,1]", "fp8", "F8_E4M3", fp8_codes, fp8_values, lambda n: (n, 1)),
    channel("fp8-channel[N]", "fp8", "F8_E4M3", fp8_codes, fp8_values, lambda n: (n,)),
    channel("int8-w8a8", "int8", "I8", int8_codes, byte_values, lambda n: (n, 1)),
    fp8_block(64),
    fp8_block(128),
    fp8_block(128, "4d"),
    grouped(
        "mxfp8", "mxfp8", 32, codes_tensor(), (FREE, FREE), lambda codes: codes, fp8_values, fp8_codes,
        scales=exponents, real=e8m0,
    ),
    grouped(
        "nvfp4", "nvfp4", 16, _packed_pairs(), PAIR_EDGES, pack_nibbles, fp4_values, nibble_codes,
        scales=fp8_scales, real=fp8_values, extra=(GLOBAL, 1),
    ),
    grouped(
        "ct-nvfp4", "nvfp4", 16, _packed_pairs(".weight_packed"), PAIR_EDGES, pack_nibbles, fp4_values, nibble_codes,
        scales=fp8_scales, real=fp8_values, extra=(DIVISOR, -1),
    ),
    grouped(
        "nvfp4-f4-header", "nvfp4", 16, codes_tensor("F4", (Axis("out"), Axis("in", 2, 2))), PAIR_EDGES,
        element_codes, element_values, nibble_codes, scales=fp8_scales, real=fp8_values, extra=(GLOBAL, 1),
    ),
    grouped(
        "mxfp4", "mxfp4", 32, _packed_pairs(), PAIR_EDGES, pack_nibbles, fp4_values, nibble_codes,
        scales=exponents, real=e8m0,
    ),
    grouped(
        "gpt-oss-blocks", "mxfp4", 32, codes_tensor("U8", (Axis("out"), Axis("in", 32), Fixed(16)), "_blocks"),
        (FREE, Edge(32)), into_blocks, block_values, nibble_codes, scales=exponents, real=e8m0,
    ),
    grouped(
        "mxfp6", "mxfp6", 32, codes_tensor("U8", (Axis("out"), Axis("in", 4, 3)), ".weight_packed"), (FREE, Edge(4)),
        pack_sixes, six_values, six_codes, scales=exponents, real=e8m0,
    ),
    grouped("w4afp8", "int4", 128, _packed_pairs(dtype="I8"), PAIR_EDGES, pack_nibbles, int4_values, nibble_codes),
    grouped(
        "ct-w4a8-unpacked", "int4", 64, codes_tensor("I8"), (FREE, FREE), int4_bytes, byte_values, nibble_codes
    ),
)  # fmt: skip

FORMATS = {one.name: one for one in (*BYTES, *PACKED)}
