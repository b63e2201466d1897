"""Attention: the product, its masks, and positions that padding decides.

Legend: B texts, T tokens, S keys, h query heads, g key/value heads, d size of a head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from steelyard.errors import ConfigError


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
    with _without_plans(q):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=shares
        )


def _without_plans(q: Tensor) -> AbstractContextManager[None]:
    """Return a context without cuDNN's kernel where one token is decoded: it makes a plan for every number of keys.

    Each token has one more key than the token before, so each would wait for plans that no other uses.
    """
    if q.device.type == "cuda" and q.shape[2] == 1:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    return nullcontext()


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


def causal_mask(
    new: int, before: int, *, window: int | None = None, kept: Tensor | None = None, device: torch.device
) -> Tensor | None:
    """Return which tokens each new token may attend to, or None where `attention` needs no mask for that.

    None stands for the token itself and all before it, where no token stands before the new ones or one alone is new.
    A token always attends to itself, so that the rows of padding, which nobody reads, are numbers and not NaN.

    Args:
        new: New tokens.
        before: Tokens before them.
        window: Tokens that one attends to, itself counted; None for all.
        kept: 1 for a token that is attended to, 0 for padding, of all tokens so far.
        device: Where the mask is made.
    Raises:
        ConfigError: ``kept`` is of floats, or of another number of tokens.
    Shapes:
        kept (B, before + new) -> (1, 1, new, before + new), or with B in front, bool

    >>> causal_mask(2, 1, window=2, device=torch.device("cpu"))[0, 0].tolist()
    [[True, True, False], [False, True, True]]
    """
    total = before + new
    if window is not None and window >= total:
        window = None
    if kept is not None:
        if kept.is_floating_point():
            raise ConfigError(f"an attention mask is 1 and 0 in whole numbers or bools, not {kept.dtype}")
        if kept.shape[-1] != total:
            raise ConfigError(f"an attention mask of {kept.shape[-1]} tokens, and there are {total} with those before")
    if kept is None and window is None and (not before or new == 1):
        return None
    keys = torch.arange(total, device=device)
    queries = keys[before:, None]
    allowed = keys <= queries
    if window is not None:
        allowed &= keys > queries - window
    if kept is None:
        return allowed[None, None]
    return (allowed & kept.bool()[:, None, :] | (keys == queries))[:, None]
