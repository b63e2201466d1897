"""The door for plugins that needs torch: layers, kernels' building blocks, ops and readers.

The other door is `steelyard.plugin`. Everything else may change without notice.
"""

from __future__ import annotations

from steelyard import ops
from steelyard.collectives import Group, Groups, groups_of, tensor_parallel_group
from steelyard.decoder.attention import Attention, KVCache
from steelyard.decoder.model import Decoder, DecoderLayer, GatedMlp
from steelyard.experts import DenseExperts, Experts
from steelyard.layers import (
    BuiltSegment,
    DenseLinear,
    Embedding,
    Linear,
    Norm,
    State,
    Weight,
    share_weight,
    take,
    weight_of,
)
from steelyard.reader import open_reader
from steelyard.storage import TORCH_DTYPES

__all__ = [
    "TORCH_DTYPES",
    "Attention",
    "BuiltSegment",
    "Decoder",
    "DecoderLayer",
    "DenseExperts",
    "DenseLinear",
    "Embedding",
    "Experts",
    "GatedMlp",
    "Group",
    "Groups",
    "KVCache",
    "Linear",
    "Norm",
    "State",
    "Weight",
    "groups_of",
    "open_reader",
    "ops",
    "share_weight",
    "take",
    "tensor_parallel_group",
    "weight_of",
]
