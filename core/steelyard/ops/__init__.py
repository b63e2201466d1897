"""Functions that layers and models share, one module a subject. Pure, and torch's own where that is right."""

from __future__ import annotations

from steelyard.ops.activations import ACTIVATIONS, activation
from steelyard.ops.attention import attention, causal_mask, padding_mask, positions_from_padding
from steelyard.ops.moe import combine, permute, route, sort_by_expert
from steelyard.ops.norms import layer_norm, rms_norm
from steelyard.ops.pooling import cls_pool, last_token_pool, max_pool, mean_pool, mean_sqrt_len_pool, normalize
from steelyard.ops.rotary import Rotary, apply_rotary, inverse_frequencies, rotate

__all__ = [
    "ACTIVATIONS",
    "Rotary",
    "activation",
    "apply_rotary",
    "attention",
    "causal_mask",
    "cls_pool",
    "combine",
    "inverse_frequencies",
    "last_token_pool",
    "layer_norm",
    "max_pool",
    "mean_pool",
    "mean_sqrt_len_pool",
    "normalize",
    "padding_mask",
    "permute",
    "positions_from_padding",
    "rms_norm",
    "rotate",
    "route",
    "sort_by_expert",
]
