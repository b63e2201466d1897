"""Which elements of a weight share a scale, and the shape that the scale then has.

Legend: N = out_features, K = in_features, G = groups along K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole matrix.

    Shapes:
        weight (N, K) -> scale ()
    """


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale a row.

    Shapes:
        weight (N, K) -> scale (N, 1)
    """


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for ``size`` neighbours along K in one row.

    Shapes:
        weight (N, K) -> scale (N, K // size)
    """

    size: int

    def __post_init__(self) -> None:
        _positive("group_size", self.size)


@dataclass(frozen=True, slots=True)
class PerBlock:
    """One scale for a rectangle of ``rows`` x ``cols``; the last block of an axis may be partial.

    Shapes:
        weight (N, K) -> scale (ceil(N / rows), ceil(K / cols))
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        _positive("block rows", self.rows)
        _positive("block cols", self.cols)


@dataclass(frozen=True, slots=True)
class PerToken:
    """One scale a token; for activations only.

    Shapes:
        activation (M, K) -> scale (M, 1), or (M, ceil(K / group)) if a group is given
    """

    group: int | None = None

    def __post_init__(self) -> None:
        if self.group is not None:
            _positive("token group", self.group)


Granularity: TypeAlias = PerTensor | PerChannel | PerGroup | PerBlock


def scale_shape(granularity: Granularity, n: int, k: int) -> tuple[int, ...]:
    """Return the shape of the scale of a weight (n, k).

    Raises:
        ValueError: a group does not divide k.

    >>> scale_shape(PerBlock(128, 128), 576, 7168), scale_shape(PerGroup(128), 64, 256)
    ((5, 56), (64, 2))
    """
    match granularity:
        case PerTensor():
            return ()
        case PerChannel():
            return (n, 1)
        case PerGroup(size):
            if k % size:
                raise ValueError(f"in_features {k} is not a multiple of group_size {size}")
            return (n, k // size)
        case PerBlock(rows, cols):
            return (-(-n // rows), -(-k // cols))
        case _:
            assert_never(granularity)


def grid(granularity: Granularity | None) -> Mapping[str, int]:
    """Return the logical elements that one scale covers along each axis it divides into steps.

    >>> grid(PerBlock(128, 64)) == {"out": 128, "in": 64}, grid(PerChannel())
    (True, {})
    """
    match granularity:
        case PerGroup(size):
            return {"in": size}
        case PerBlock(rows, cols):
            return {"out": rows, "in": cols}
        case _:
            return {}


def refine(granularity: Granularity, steps: Mapping[str, int]) -> Granularity:
    """Return the same kind of granularity with finer steps along the axes given.

    Args:
        granularity: What the checkpoint stores.
        steps: Axis to the new step; each must divide the old one.
    Raises:
        ValueError: the granularity has no grid along an axis, or the step does not divide.

    >>> refine(PerBlock(128, 128), {"out": 32})
    PerBlock(rows=32, cols=128)
    """
    old = grid(granularity)
    for axis, step in steps.items():
        if axis not in old or old[axis] % step:
            raise ValueError(f"{granularity} has no finer grid of {step} along {axis!r}")
    match granularity:
        case PerGroup(size):
            return PerGroup(steps.get("in", size))
        case PerBlock(rows, cols):
            return PerBlock(steps.get("out", rows), steps.get("in", cols))
        case _:
            return granularity
