"""What a format of the proof is: a layout for core, and an encoder and a decoder that know nothing of core.

Legend: N = out_features, K = in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from steelyard.layouts import Cutter, StoredTensor
from steelyard.schemes import LayerScheme

Arrays: TypeAlias = dict[str, np.ndarray]


@dataclass(frozen=True)
class Edge:
    """Elements of a logical axis between two places where a stored tensor can be cut.

    Attributes:
        step: Elements.
        soft: Whether the step belongs to a grid of scales, which can be laid out finer.
    """

    step: int = 1
    soft: bool = False


@dataclass(frozen=True)
class View:
    """What a decoder is told of a piece.

    Attributes:
        n: Rows.
        k: Columns.
        steps: Axis to elements of a scale, where the grid has steps.
        start_in: First column, of the whole matrix.
        rows: Rows of each part that lies in it, in order.
    """

    n: int
    k: int
    steps: Mapping[str, int] = field(default_factory=dict)
    start_in: int = 0
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Format:
    """One published format.

    Attributes:
        name: Readable id.
        scheme: What a dialect would say of it.
        tensors: The layout as core wants it.
        edges: Tensor to where it can be cut along N and along K; None where the axis is not in it. From the
            published slice table, not from the dims.
        encode: ``(rng, n, k, shared)`` to stored tensors and the real matrix that they mean; tensors in ``shared``
            must be taken over as they are.
        decode: ``(stored, view)`` to the real matrix of any piece.
        legal: ``(N, K)`` that sizes of a file must be multiples of.
        cutter: For what dims cannot describe.
    """

    name: str
    scheme: LayerScheme
    tensors: tuple[StoredTensor, ...]
    edges: Mapping[str, tuple[Edge | None, Edge | None]]
    encode: Callable[[np.random.Generator, int, int, Mapping[str, np.ndarray]], tuple[Arrays, np.ndarray]]
    decode: Callable[[Mapping[str, np.ndarray], View], np.ndarray]
    legal: tuple[int, int] = (1, 1)
    cutter: Cutter | None = None


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return scales that are far from zero and no powers of two."""
    return rng.integers(65, 255, shape) / 64.0


def grid_of(scale: np.ndarray) -> np.ndarray:
    """Return a scale as a matrix, whatever unit dims it is stored with: (N,), (N, 1), (N, 1, G, 1) or (N, G)."""
    return scale.reshape(scale.shape[0], -1)


def per_row(scalar: np.ndarray, view: View) -> np.ndarray:
    """Return one scalar, or one a part, as a column of rows."""
    values = np.asarray(scalar).reshape(-1)
    if values.size == 1:
        return np.full((view.n, 1), values[0])
    return np.repeat(values, view.rows)[:, None]
