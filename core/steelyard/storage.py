"""Stored dtypes as torch sees them, and pieces of stored tensors: take, refine, swap.

Bytes are handled as integers of the element's width until the piece is complete, so that no value is ever converted
on the way. Elements narrower than a byte are handled as bytes, their last dim counted in bytes.

Legend: a piece has the stored tensor's dims; `steelyard.placement.Cut` counts stored indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steelyard.dtypes import DTYPES
from steelyard.placement import Cut, Pairs, Slice
from steelyard.steps import Region

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    # Exponents and sub-byte codes stay bytes: torch gained dtypes for them late, and no torch 2.6 kernel copies them.
    "F8_E8M0": torch.uint8,
    "F4": torch.uint8,
    "F6_E2M3": torch.uint8,
    "F6_E3M2": torch.uint8,
}

WORDS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def itemsize(code: str) -> int:
    """Return the bytes of one element in memory; 1 for elements narrower than a byte."""
    return max(DTYPES[code].bits // 8, 1)


def in_memory(code: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a stored shape as torch has it: the last dim in bytes where elements are narrower than a byte.

    >>> in_memory("F4", (64, 128)), in_memory("BF16", (64, 128))
    ((64, 64), (64, 128))
    """
    bits = DTYPES[code].bits
    if bits >= 8 or not shape:
        return tuple(shape)
    return (*shape[:-1], shape[-1] * bits // 8)


def cut_in_memory(code: str, cut: Cut) -> tuple[Slice, ...]:
    """Return a cut's slices as torch has them; ValueError if one does not fall on a byte."""
    bits = DTYPES[code].bits
    if bits >= 8 or not cut.slices:
        return cut.slices
    last = cut.slices[-1]
    numbers = (last.start * bits, last.length * bits, last.stride * bits)
    if any(number % 8 for number in numbers):
        raise ValueError(f"{code}: a piece {last} does not start and stop on whole bytes")
    start, length, stride = (number // 8 for number in numbers)
    return (*cut.slices[:-1], Slice(start, length, stride, last.count))


def take(t: torch.Tensor, dim: int, piece: Slice) -> torch.Tensor:
    """Return the indices of one dim that a slice names; a view if they are one run."""
    if piece.count == 1:
        return t.narrow(dim, piece.start, piece.length)
    return t.index_select(dim, torch.tensor(piece.indices(), device=t.device))


def finish(t: torch.Tensor, cut: Cut, swap: tuple[int, int] | None, pairs: Pairs | None = None) -> torch.Tensor:
    """Return a piece on its refined grid, with its dims and the rows of its heads in the buffer's order.

    Shapes:
        cut.taken -> cut.shape, two dims swapped if ``swap`` names them

    >>> from steelyard.placement import Slice
    >>> four = Cut((Slice(0, 4),), (None,))
    >>> finish(torch.tensor([0, 2, 1, 3]), four, None, Pairs(0, 4)).tolist()
    [0, 1, 2, 3]
    """
    for dim, regrid in enumerate(cut.regrids):
        if regrid is not None:
            t = t.repeat_interleave(regrid.repeat, dim).narrow(dim, regrid.skip, regrid.keep)
    if swap is not None:
        t = t.transpose(*swap)
    if pairs is None:
        return t
    shape = t.shape
    heads = t.reshape(*shape[: pairs.dim], -1, pairs.head // 2, 2, *shape[pairs.dim + 1 :])
    return heads.transpose(pairs.dim + 1, pairs.dim + 2).reshape(shape)


def region_of(buffer: torch.Tensor, region: Region, code: str) -> torch.Tensor:
    """Return the view of a buffer that a region names, in stored indices of dtype ``code``."""
    bits = DTYPES[code].bits
    for dim, (start, length) in enumerate(region):
        if bits < 8 and dim == len(region) - 1:
            start, length = start * bits // 8, length * bits // 8
        buffer = buffer.narrow(dim, start, length)
    return buffer


def narrowed(t: torch.Tensor, code: str) -> tuple[torch.Tensor, int]:
    """Return plain floats in the dtype of ``code``, and how many finite ones became infinite on the way.

    >>> narrowed(torch.tensor([1.0, 70000.0]), "F16")
    (tensor([1., inf], dtype=torch.float16), 1)
    """
    made = t.to(TORCH_DTYPES[code])
    if code == "F32":
        return made, 0
    return made, int((torch.isinf(made) & ~torch.isinf(t)).sum())


def words(t: torch.Tensor, code: str) -> torch.Tensor:
    """Return a tensor's elements as integers of their width: the same memory, never converted."""
    return t.view(WORDS[itemsize(code)]) if code != "C64" else t
