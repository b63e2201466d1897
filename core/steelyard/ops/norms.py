"""Normalisations, computed in float32.

Legend: H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


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
