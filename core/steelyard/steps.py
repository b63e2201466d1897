"""What a plan consists of: where bytes come from, where they go, and what is checked on the way.

Every element of every buffer is the target of exactly one `Read` or `Fill`, or its node is an `Alias`.

Units:
    `Region` counts stored indices of a buffer. `Read.start` counts bytes from the start of the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from steelyard.layouts import CheckName, Merge
from steelyard.placement import Cut, Pairs

Region: TypeAlias = tuple[tuple[int, int], ...]
"""``(start, length)`` for each dim of a buffer."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor of one Segment as this rank holds it before it is prepared.

    Attributes:
        name: The tensor's name in what `prepare` gets.
        shape: This rank's shape; the first dim counts local experts if there are any.
        dtype: Code; the parameter's for plain floats, as stored for quantized tensors.
        merge: How parts share it; ``"max"`` is reduced over its first dim before `prepare`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    merge: Merge = "concat"


@dataclass(frozen=True, slots=True)
class Read:
    """One piece of one stored tensor.

    Attributes:
        name: The stored tensor.
        file: Index of its file in the checkpoint.
        start: Byte at which the whole tensor starts.
        dtype: Stored dtype code.
        shape: Stored shape.
        cut: The piece, in stored indices.
        swap: Two dims to swap after the cut, for a tensor stored transposed.
        pairs: Rows to take out of rotary pairs after that, for heads that are stored so.
        stem: The node that it fills.
        segment: Index of the Segment in the node.
        buffer: Name of the Segment's buffer.
        region: Where in the buffer the piece goes.
        part: The part that it is of.
        expert: The expert that it is of; None if it is of none, or of all that are stacked.
    """

    name: str
    file: int
    start: int
    dtype: str
    shape: tuple[int, ...]
    cut: Cut
    swap: tuple[int, int] | None
    pairs: Pairs | None
    stem: str
    segment: int
    buffer: str
    region: Region
    part: str
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Fill:
    """A constant in place of something that is not stored: an optional tensor, the padding of a vocabulary."""

    stem: str
    segment: int
    buffer: str
    region: Region
    value: float


@dataclass(frozen=True, slots=True)
class Check:
    """What a read's bytes must satisfy.

    Attributes:
        read: The tensor's piece that is looked at.
        rules: Names of the tests.
        equal_to: A stored tensor that it must equal, for parts that share one.
    """

    read: Read
    rules: tuple[CheckName, ...] = ()
    equal_to: str | None = None


@dataclass(frozen=True, slots=True)
class Alias:
    """A node that uses another's weights and has none of its own in the file."""

    target: str
    source: str


@dataclass(frozen=True, slots=True)
class AliasIfEqual:
    """A node that the config ties although its weights are stored: shared if the bytes are equal, else kept apart."""

    target: str
    source: str


Step: TypeAlias = Read | Fill | Check | Alias | AliasIfEqual
