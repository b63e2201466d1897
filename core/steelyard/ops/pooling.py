"""Hidden states of many tokens to one vector a text.

Legend: B texts, T tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the tokens that are not padding.

    Shapes:
        hidden (B, T, H), mask (B, T) -> (B, H)
    """
    kept = mask[..., None].to(hidden.dtype)
    return (hidden * kept).sum(1) / kept.sum(1).clamp_min(1)


def mean_sqrt_len_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the tokens that are not padding, divided by the root of their number.

    Shapes:
        hidden (B, T, H), mask (B, T) -> (B, H)
    """
    kept = mask[..., None].to(hidden.dtype)
    return (hidden * kept).sum(1) / kept.sum(1).clamp_min(1).sqrt()


def max_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the largest value of each feature over the tokens that are not padding.

    Shapes:
        hidden (B, T, H), mask (B, T) -> (B, H)
    """
    return hidden.masked_fill(mask[..., None] == 0, torch.finfo(hidden.dtype).min).amax(1)


def cls_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the first token that is not padding.

    Shapes:
        hidden (B, T, H), mask (B, T) -> (B, H)
    """
    first = mask.to(torch.int64).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), first]


def last_token_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the last token that is not padding.

    Shapes:
        hidden (B, T, H), mask (B, T) -> (B, H)
    """
    last = mask.shape[1] - 1 - mask.to(torch.int64).flip(1).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def normalize(x: Tensor) -> Tensor:
    """Scale each vector to length 1.

    Shapes:
        (..., H) -> (..., H)
    """
    return functional.normalize(x, dim=-1)
