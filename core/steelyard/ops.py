"""Functions that layers and models share: norms, attention, positions, pooling. Pure, and torch's own where that is right.

Legend: B texts, T tokens, S keys, H hidden size, h query heads, g key/value heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.errors import ConfigError

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}
"""Activation by the name that configs use.

Source:
    transformers 5.24, ``activations.py``: ``gelu`` is the exact form (erf), ``gelu_new`` and ``gelu_pytorch_tanh`` the
    tanh form.
"""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by the name that configs use.

    Raises:
        ConfigError: the name is not known.

    >>> activation("relu")(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    known = ACTIVATIONS.get(name)
    if known is None:
        raise ConfigError(f"activation {name!r} is not known; there are {', '.join(ACTIVATIONS)}")
    return known


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Take the mean away, divide by the standard deviation, scale and shift; all of it in float32.

    Args:
        x: The input.
        weight: What the normalised input is multiplied by; of x's dtype or of any other.
        bias: What is added then, or None.
        eps: What is added to the variance.
    Shapes:
        x (..., H), weight (H,), bias (H,) -> (..., H), in x's dtype
    """
    if weight.dtype == x.dtype:  # torch's own is one kernel and computes in float32 inside, then rounds once
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    wide = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root of the mean square and scale; all of it in float32.

    Args:
        x: The input.
        weight: What the normalised input is multiplied by; of x's dtype or of any other.
        eps: What is added to the mean square.
    Shapes:
        x (..., H), weight (H,) -> (..., H), in x's dtype
    Source:
        Zhang and Sennrich 2019, equation 4. transformers' LlamaRMSNorm rounds once more, before it scales: in 16 bits
        the two differ by one unit in the last place.
    """
    if weight.dtype == x.dtype:  # torch's own is one kernel and computes in float32 inside, then rounds once
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute scaled dot-product attention; h / g query heads that follow one another share a key/value head.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: True where a query may attend, or what is added to the scores.
        is_causal: Whether a token attends only to itself and those before it.
        scale: Factor of the scores; 1 / sqrt(d) if not given.
    Raises:
        ValueError: h is not a multiple of g.
    Shapes:
        q (B, h, T, d), k and v (B, g, S, d), mask broadcast to (B, h, T, S) -> (B, h, T, d)
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {kv_heads} key/value heads")
    shares = heads != kv_heads
    if shares and mask is not None:
        # With a mask only cuDNN's kernel takes fewer key/value heads (16 bits, some GPUs); elsewhere torch would fall
        # back to a product that holds every score at once. A copy of k and v is the smaller harm (H200, torch 2.11).
        k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))
        shares = False
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=shares
    )


def padding_mask(attention_mask: Tensor) -> Tensor:
    """Return which tokens may be attended to, for every query.

    A text that is all padding attends to all of it, so that its rows, which nobody reads, are numbers and not NaN.

    Raises:
        ConfigError: the mask is of floats, which some add to scores (0 keeps, -inf masks) and some multiply with.
    Shapes:
        (B, T) of 1 and 0 -> (B, 1, 1, T), bool

    >>> padding_mask(torch.tensor([[1, 0], [0, 0]]))[:, 0, 0].tolist()
    [[True, False], [True, True]]
    """
    if attention_mask.is_floating_point():
        raise ConfigError(f"an attention mask is 1 and 0 in whole numbers or bools, not {attention_mask.dtype}")
    kept = attention_mask.bool()
    return (kept | ~kept.any(-1, keepdim=True))[:, None, None, :]


def positions_from_padding(ids: Tensor, pad: int) -> Tensor:
    """Return RoBERTa's positions: they count from ``pad`` + 1 and skip padding, which keeps position ``pad``.

    Shapes:
        (B, T) -> (B, T)
    Source:
        transformers 5.24, ``RobertaEmbeddings.create_position_ids_from_input_ids``.

    >>> positions_from_padding(torch.tensor([[0, 5, 6, 1]]), 1).tolist()
    [[2, 3, 4, 1]]
    """
    kept = ids.ne(pad).to(torch.int64)
    return kept.cumsum(-1) * kept + pad


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
