"""Routed experts: which experts a token goes through, and tokens sorted by expert and put back.

Legend: T tokens, E experts, K experts of a token, H hidden size, S pairs of a token and an expert of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights: the largest of a softmax over all experts.

    Args:
        logits: The router's output.
        top_k: Experts that a token goes through.
        renormalize: Whether a token's weights are divided by their sum.
    Shapes:
        (T, E) -> ids (T, K), int64, the heaviest first; weights (T, K), float32

    >>> ids, weights = route(torch.tensor([[0.0, 2.0, 1.0]]), 2, renormalize=True)
    >>> ids.tolist(), [round(weight, 4) for weight in weights[0].tolist()]
    ([[1, 2]], [0.7311, 0.2689])
    """
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if renormalize else weights


def sort_by_expert(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return a token's places in the order of the experts of a rank; places of other ranks' experts come last.

    A place is ``token * K + slot``. Places of one expert keep the order of the tokens.

    Args:
        ids: The experts of each token, numbered over all ranks.
        first: The rank's first expert.
        count: Experts of the rank.
    Shapes:
        (T, K) -> places (T * K,), how many of them each of the rank's experts has (count,)

    >>> places, counts = sort_by_expert(torch.tensor([[3, 1], [2, 3]]), 2, 2)
    >>> places.tolist(), counts.tolist()
    ([2, 0, 3, 1], [1, 2])
    """
    local = ids.flatten() - first
    keys = torch.where((local >= 0) & (local < count), local, count)
    return torch.argsort(keys, stable=True), torch.bincount(keys, minlength=count + 1)[:count]


def permute(x: Tensor, places: Tensor, top_k: int) -> Tensor:
    """Return the token of each place.

    Shapes:
        x (T, H), places (S,) -> (S, H)
    """
    return x[places // top_k]


def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's outputs, added in float32 and in the order of its experts.

    Args:
        y: Outputs, in the order of ``places``.
        places: The place of each output; a place that has none counts as zeros.
        weights: The weight of every place.
    Shapes:
        y (S, H), places (S,), weights (T, K) -> (T, H), in y's dtype
    """
    by_place = y.new_zeros(weights.numel(), y.shape[-1]).index_copy_(0, places, y)
    by_token = by_place.view(*weights.shape, y.shape[-1])
    return torch.einsum("tkh,tk->th", by_token.float(), weights.float()).to(y.dtype)
