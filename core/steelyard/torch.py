"""The door for plugins that needs torch: layers, kernels' building blocks, ops and readers.

The other door is `steelyard.plugin`. Everything else may change without notice.
"""

from __future__ import annotations

from steelyard import ops
from steelyard.collectives import Group, tensor_parallel_group
from steelyard.layers import (
    BuiltSegment,
    DenseLinear,
    Embedding,
    Linear,
    Norm,
    State,
    Weight,
    share_weight,
    weight_of,
)
from steelyard.reader import open_reader
from steelyard.storage import TORCH_DTYPES

__all__ = [
    "TORCH_DTYPES",
    "BuiltSegment",
    "DenseLinear",
    "Embedding",
    "Group",
    "Linear",
    "Norm",
    "State",
    "Weight",
    "open_reader",
    "ops",
    "share_weight",
    "tensor_parallel_group",
    "weight_of",
]
