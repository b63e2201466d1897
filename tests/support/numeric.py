"""Comparisons that a mean cannot pass: every token is held to its own tolerance."""

from __future__ import annotations

import torch


def assert_tokens_close(actual: torch.Tensor, expected: torch.Tensor, *, min_cos: float, max_rel: float) -> None:
    """Compare token by token, never by a mean over them; the worst token is named.

    Args:
        actual: What was computed.
        expected: The reference, of the same shape.
        min_cos: The least cosine that a token may have with its reference.
        max_rel: The largest error that an element of a token may have, as a share of the token's largest reference.
    Shapes:
        (..., H): the last dim is one token's, all others count tokens
    """
    assert actual.shape == expected.shape, f"shapes differ: {list(actual.shape)} and {list(expected.shape)}"
    assert expected.numel(), "there is nothing to compare"
    mine = actual.detach().double().cpu().reshape(-1, actual.shape[-1])
    theirs = expected.detach().double().cpu().reshape(-1, expected.shape[-1])
    assert mine.isfinite().all(), f"token {_first(~mine.isfinite().all(-1))} is not finite"
    assert theirs.isfinite().all(), f"token {_first(~theirs.isfinite().all(-1))} of the reference is not finite"
    largest = theirs.abs().amax(-1)
    error = (mine - theirs).abs().amax(-1)
    rel = torch.where(largest > 0, error / largest.clamp_min(1e-300), torch.where(error > 0, torch.inf, 0.0))
    assert rel.max() <= max_rel, (
        f"token {int(rel.argmax())} is off by {rel.max():.3e} of its largest value, over {max_rel}"
    )
    cos = torch.nn.functional.cosine_similarity(mine, theirs, dim=-1, eps=1e-300)
    cos = torch.where(largest > 0, cos, 1.0)  # a token of zeros has no direction; its error was compared
    assert cos.min() >= min_cos, (
        f"token {int(cos.argmin())} has cosine {cos.min():.6f} with its reference, under {min_cos}"
    )


def _first(wrong: torch.Tensor) -> int:
    return int(wrong.to(torch.int64).argmax())
