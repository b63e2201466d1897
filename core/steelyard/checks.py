"""What only bytes can tell: tests of stored values, made while they pass, collected and raised once.

Source:
    e4m3fn has NaN at 0x7F and 0xFF, e4m3fnuz and e5m2fnuz at 0x80 alone, e5m2 where the exponent is 31 and the mantissa
    is not 0 (OCP OFP8 rev 1.0; the fnuz types as torch defines them). E8M0 has NaN at 0xFF; the 4- and 6-bit floats
    have none (OCP Microscaling rev 1.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from steelyard.layouts import CheckName
from steelyard.placement import Span
from steelyard.schemes import LayerScheme


def _count(bad: torch.Tensor, what: str) -> str:
    return f"{int(bad.sum())} of {bad.numel()} values are {what}" if bool(bad.any()) else ""


def finite(t: torch.Tensor) -> str:
    """Say how many values are NaN or infinite; "" if none is."""
    return _count(~torch.isfinite(t.to(torch.float32)), "not finite")


def positive(t: torch.Tensor) -> str:
    """Say how many values are not finite or below 0; 0 stands for a block of zeros and is allowed."""
    wide = t.to(torch.float32)
    return _count(~torch.isfinite(wide) | (wide < 0), "negative or not finite")


def power_of_two(t: torch.Tensor) -> str:
    """Say how many float values are not positive powers of two."""
    mantissa, _ = torch.frexp(t.to(torch.float32))
    return _count(mantissa != 0.5, "not powers of two")


def no_nan_codes(t: torch.Tensor) -> str:
    """Say how many 8-bit float codes are NaN."""
    codes = t.view(torch.uint8).to(torch.int32)
    if t.dtype == torch.float8_e4m3fn:
        bad = (codes & 0x7F) == 0x7F
    elif t.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        bad = codes == 0x80
    elif t.dtype == torch.float8_e5m2:
        bad = ((codes & 0x7C) == 0x7C) & ((codes & 0x03) != 0)
    else:
        return f"NaN codes of {t.dtype} are not known"
    return _count(bad, "NaN codes")


RULES: Mapping[str, Callable[[torch.Tensor], str]] = {
    "finite": finite,
    "positive": positive,
    "power_of_two": power_of_two,
    "no_nan_codes": no_nan_codes,
}


def violated(rule: CheckName, t: torch.Tensor, code: str, scheme: LayerScheme, inner: Span) -> str:
    """Return what is wrong with a stored piece under a rule; "" if nothing is.

    Args:
        rule: The rule's name.
        t: The piece, as stored.
        code: Its stored dtype, which torch may hold as plain bytes.
        scheme: The layer's scheme as stored, which has the group size that an index speaks of.
        inner: The rank's range of ``in``, where an index starts.
    """
    if rule == "trivial_index":
        group = scheme.grid().get("in", inner.size)
        expected = torch.arange(inner.start, inner.stop, device=t.device) // group
        return _count(t.flatten().to(torch.int64) != expected, "not i // group_size: the order of activations matters")
    if code == "F8_E8M0":
        # Every other code is a positive power of two.
        return _count(t == 0xFF, "NaN codes")
    if code in ("F4", "F6_E2M3", "F6_E3M2") and rule == "no_nan_codes":
        return ""
    return RULES[rule](t)
