"""Storage dtypes: the safetensors code, bits per element, and whether it is a plain float.

Units:
    ``bits`` counts bits per *logical* element. A header shape counts elements for every code, also for F4
    and the F6 codes, whose elements do not fill a byte.
Source:
    safetensors 0.8.0, ``Dtype`` of the file format; checked against the package in tests/unit/test_dtypes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

Family: TypeAlias = Literal["float", "packed", "int", "bool", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """One storage dtype.

    Attributes:
        code: The name in a safetensors header.
        bits: Bits per logical element.
        family: ``float`` for the dtypes that may be cast into each other; ``packed`` for quantized codes
            (8 bits and fewer), which are never cast by value.
    """

    code: str
    bits: int
    family: Family


DTYPES: Mapping[str, DType] = {
    dtype.code: dtype
    for dtype in (
        DType("BOOL", 8, "bool"),
        DType("U8", 8, "int"),
        DType("I8", 8, "int"),
        DType("F8_E5M2", 8, "packed"),
        DType("F8_E4M3", 8, "packed"),
        DType("F8_E5M2FNUZ", 8, "packed"),
        DType("F8_E4M3FNUZ", 8, "packed"),
        DType("F8_E8M0", 8, "packed"),
        DType("F4", 4, "packed"),
        DType("F6_E2M3", 6, "packed"),
        DType("F6_E3M2", 6, "packed"),
        DType("I16", 16, "int"),
        DType("U16", 16, "int"),
        DType("F16", 16, "float"),
        DType("BF16", 16, "float"),
        DType("I32", 32, "int"),
        DType("U32", 32, "int"),
        DType("F32", 32, "float"),
        DType("I64", 64, "int"),
        DType("U64", 64, "int"),
        DType("F64", 64, "float"),
        DType("C64", 64, "complex"),
    )
}

FLOATS: tuple[str, ...] = ("F32", "BF16", "F16")
"""The dtypes that a plain parameter may be stored in and cast among; F64 is refused (it would lose bits)."""

CONFIG_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names that a config's ``dtype`` or ``torch_dtype`` uses, to codes."""


def nbytes(code: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that a tensor takes on disk.

    Args:
        code: A key of `DTYPES`.
        shape: Header shape, in elements.
    Raises:
        KeyError: the code is unknown.
        ValueError: the elements do not fill whole bytes.

    >>> nbytes("BF16", (4, 8)), nbytes("F4", (64, 128)), nbytes("F32", ())
    (64, 4096, 4)
    """
    bits = DTYPES[code].bits * prod(shape)
    if bits % 8:
        raise ValueError(f"{code} {list(shape)} takes {bits} bits, not whole bytes")
    return bits // 8
