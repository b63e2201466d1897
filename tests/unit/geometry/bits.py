"""Number formats and bit packings in numpy, written from the published layouts and without steelyard.

Legend: N = out_features, K = in_features. Words are unsigned and little-endian, low bits first.
"""

from __future__ import annotations

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble ``i`` of a word is column ``8c + AWQ_ORDER[i]``."""


def _e4m3(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3(code) for code in range(256)])
"""Value of every e4m3fn byte; 0x7F and 0xFF are NaN."""

_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array(_HALF + [-value for value in _HALF])

_SIX = [(m / 8 if e == 0 else (1 + m / 8) * 2.0 ** (e - 1)) for e in range(4) for m in range(8)]
E2M3 = np.array(_SIX + [-value for value in _SIX])


def e8m0(codes: np.ndarray) -> np.ndarray:
    """Return 2 ** (byte - 127)."""
    return np.ldexp(1.0, codes.astype(np.int64) - 127)


def bf16(bits: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Read two's complement."""
    half = 1 << (bits - 1)
    return (codes.astype(np.int64) ^ half) - half


def pack_words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack codes as one dense stream of 32-bit words along an axis; the last word is filled up with zeros."""
    moved = np.moveaxis(np.asarray(codes), axis, -1).astype(np.uint32)
    stream = (moved[..., None] >> np.arange(bits, dtype=np.uint32) & 1).reshape(*moved.shape[:-1], -1)
    count = -(-stream.shape[-1] // 32)
    padded = np.zeros((*stream.shape[:-1], count * 32), np.uint8)
    padded[..., : stream.shape[-1]] = stream
    words = np.packbits(padded, axis=-1, bitorder="little").view("<u4")
    return np.moveaxis(words, -1, axis)


def unpack_words(words: np.ndarray, bits: int, count: int, axis: int) -> np.ndarray:
    """Read ``count`` codes of a dense stream along an axis."""
    moved = np.ascontiguousarray(np.moveaxis(words, axis, -1)).astype("<u4")
    stream = np.unpackbits(moved.view(np.uint8), axis=-1, bitorder="little")
    taken = stream[..., : count * bits].reshape(*moved.shape[:-1], count, bits).astype(np.int64)
    return np.moveaxis((taken << np.arange(bits)).sum(-1), -1, axis)


def pack_nibbles(codes: np.ndarray, axis: int = -1) -> np.ndarray:
    """Pack pairs along an axis into bytes, the even one low."""
    moved = np.moveaxis(np.asarray(codes), axis, -1).astype(np.int64) & 15
    return np.moveaxis((moved[..., 0::2] | moved[..., 1::2] << 4).astype(np.uint8), -1, axis)


def unpack_nibbles(packed: np.ndarray, axis: int = -1) -> np.ndarray:
    """Read bytes into pairs along an axis, the low nibble first."""
    moved = np.moveaxis(packed, axis, -1).astype(np.int64)
    pairs = np.stack([moved & 15, moved >> 4], -1).reshape(*moved.shape[:-1], -1)
    return np.moveaxis(pairs, -1, axis)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """Pack [R, N] codes into [R, N / 8] words in AWQ's order."""
    eights = codes.reshape(codes.shape[0], -1, 8)[:, :, list(AWQ_ORDER)]
    return pack_words(eights.reshape(codes.shape[0], -1), 4, 1)


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Read [R, N / 8] words in AWQ's order into [R, N] codes."""
    eights = unpack_words(words, 4, words.shape[1] * 8, 1).reshape(words.shape[0], -1, 8)
    codes = np.empty_like(eights)
    codes[:, :, list(AWQ_ORDER)] = eights
    return codes.reshape(words.shape[0], -1)


def pack_tiles(codes: np.ndarray) -> np.ndarray:
    """Pack [N, K] codes into tiles of a tensor core: [N / 8, K / 128, 32, 4] words."""
    n, k = codes.shape
    # row tile, row, k tile, pair, half pair, k half, lane % 4, even or odd
    view = codes.reshape(n // 8, 8, k // 128, 4, 2, 2, 4, 2).astype(np.uint32)
    view = view.transpose(0, 2, 1, 6, 3, 4, 5, 7).reshape(n // 8, k // 128, 8, 4, 4, 4, 2)
    even = sum(view[..., i, 0] << np.uint32(4 * i) for i in range(4))
    odd = sum(view[..., i, 1] << np.uint32(16 + 4 * i) for i in range(4))
    return np.asarray(even | odd).reshape(n // 8, k // 128, 32, 4)


def unpack_tiles(words: np.ndarray) -> np.ndarray:
    """Read [N / 8, K / 128, 32, 4] words into [N, K] codes."""
    rows, cols = words.shape[:2]
    lanes = words.reshape(rows, cols, 8, 4, 4).astype(np.int64)
    even = np.stack([lanes >> 4 * i & 15 for i in range(4)], -1)
    odd = np.stack([lanes >> 16 + 4 * i & 15 for i in range(4)], -1)
    both = np.stack([even, odd], -1).reshape(rows, cols, 8, 4, 4, 2, 2, 2)
    return both.transpose(0, 2, 1, 4, 5, 6, 3, 7).reshape(rows * 8, cols * 128)


def spread(scale: np.ndarray, n: int, k: int, rows: int, cols: int) -> np.ndarray:
    """Repeat a grid of scales over blocks of ``rows`` x ``cols``; the last blocks may be partial."""
    return np.repeat(np.repeat(scale, rows, 0)[:n], cols, 1)[:, :k]
