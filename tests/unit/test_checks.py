"""What only bytes can tell: every rule against numpy or torch, which know nothing of the rule's bit masks."""

import numpy as np
import pytest
import torch

from steelyard.checks import finite, no_nan_codes, positive, power_of_two, violated
from steelyard.granularity import PerGroup
from steelyard.placement import Span, whole
from steelyard.schemes import UNQUANTIZED, LayerScheme
from steelyard.storage import TORCH_DTYPES

INF, NAN = float("inf"), float("nan")
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def judged(rule, tensor, code="F32"):
    return violated(rule, tensor, code, UNQUANTIZED, whole(1))


@pytest.mark.parametrize("code", FP8)
def test_of_all_codes_of_an_8_bit_float_those_that_torch_calls_nan_are_counted(code):
    """Each of the 256 codes alone, and all at once."""
    codes = torch.arange(256).to(torch.uint8)
    is_nan = torch.isnan(codes.view(TORCH_DTYPES[code]).to(torch.float32))
    for value in range(256):
        found = judged("no_nan_codes", codes[value : value + 1].view(TORCH_DTYPES[code]), code)
        assert found == ("1 of 1 values are NaN codes" if is_nan[value] else "")
    whole_table = codes.view(TORCH_DTYPES[code]).reshape(16, 16)
    assert judged("no_nan_codes", whole_table, code) == f"{int(is_nan.sum())} of 256 values are NaN codes"


@pytest.mark.parametrize(
    ("code", "nans"), [("F8_E4M3", 2), ("F8_E5M2", 6), ("F8_E4M3FNUZ", 1), ("F8_E5M2FNUZ", 1)], ids=FP8
)
def test_the_number_of_nan_codes_is_that_of_the_standard(code, nans):
    """Source: OCP OFP8 rev 1.0, tables 1 and 2; the fnuz types have one NaN, in place of minus zero."""
    table = torch.arange(256).to(torch.uint8).view(TORCH_DTYPES[code])
    assert judged("no_nan_codes", table, code) == f"{nans} of 256 values are NaN codes"


@pytest.mark.parametrize("rule", ["no_nan_codes", "finite", "positive", "power_of_two"])
def test_an_exponent_byte_is_a_power_of_two_but_for_one_code(rule):
    """R153: E8M0 scales are bytes to torch; 0xFF is NaN and every other code is 2^(code - 127)."""
    codes = torch.arange(256).to(torch.uint8)
    assert judged(rule, codes[:255], "F8_E8M0") == ""
    assert judged(rule, codes, "F8_E8M0") == "1 of 256 values are NaN codes"


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_the_narrow_floats_have_no_nan_at_all(code):
    assert judged("no_nan_codes", torch.arange(256).to(torch.uint8), code) == ""


def test_nan_codes_of_other_dtypes_are_not_guessed():
    assert judged("no_nan_codes", torch.zeros(1, dtype=torch.uint8), "U8") == "NaN codes of torch.uint8 are not known"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_finite_and_positive_count_what_numpy_counts(dtype):
    values = torch.tensor([1.0, 0.0, -0.0, -2.0, INF, -INF, NAN, 0.5, 448.0]).to(dtype)
    wide = values.to(torch.float32).numpy()
    bad = int((~np.isfinite(wide)).sum())
    assert finite(values) == f"{bad} of 9 values are not finite"
    assert positive(values) == f"{int((~np.isfinite(wide) | (wide < 0)).sum())} of 9 values are negative or not finite"
    good = torch.tensor([1.0, 0.0, 0.5]).to(dtype)
    assert (finite(good), positive(good)) == ("", "")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_power_of_two_that_a_float_has_is_one_and_nothing_else(dtype):
    """Every bit pattern of the 16-bit floats; for float32 the powers, their neighbours and random bits."""
    if dtype.itemsize == 2:
        bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
        values = torch.from_numpy(bits.view(np.int16)).view(dtype)
    else:
        powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
        beside = np.nextafter(powers, np.float32(np.inf), dtype=np.float32)
        rng = np.random.default_rng(7).integers(0, 1 << 32, 5000, dtype=np.uint32).view(np.float32)
        specials = np.array([0, -0.0, np.inf, -np.inf, np.nan, -1, -2], np.float32)
        values = torch.from_numpy(np.concatenate([powers, -powers, beside, rng, specials]))
    wide = values.to(torch.float64).numpy()
    with np.errstate(all="ignore"):
        is_power = np.isfinite(wide) & (wide > 0) & (np.exp2(np.round(np.log2(wide))) == wide)
    assert power_of_two(values[torch.from_numpy(is_power)]) == ""
    bad = values[torch.from_numpy(~is_power)]
    assert power_of_two(bad) == f"{len(bad)} of {len(bad)} values are not powers of two"


@pytest.mark.parametrize("rule", ["finite", "positive", "power_of_two"])
def test_scalars_and_empty_pieces_pass(rule):
    assert judged(rule, torch.tensor(0.5)) == ""
    assert judged(rule, torch.empty(0, 4)) == ""


def test_a_strided_piece_is_judged_as_it_stands():
    stored = torch.ones(4, 4)
    stored[:, 1] = NAN
    assert finite(stored[:, ::2]) == ""
    assert finite(stored[:, 1:2]) == "4 of 4 values are not finite"
    codes = torch.zeros(4, 4, dtype=torch.uint8)
    codes[:, 1] = 0x7F
    assert no_nan_codes(codes.view(torch.float8_e4m3fn)[:, ::2]) == ""


@pytest.mark.parametrize(
    ("group", "rows"),
    [(4, Span(0, 16, 16)), (4, Span(8, 16, 16)), (16, Span(4, 8, 16)), (None, Span(3, 7, 16))],
    ids=str,
)
def test_a_trivial_index_counts_groups_from_where_the_rank_starts(group, rows):
    scheme = LayerScheme("int4", "pack32", PerGroup(group) if group else None)
    index = torch.tensor([place // (group or 16) for place in range(rows.start, rows.stop)], dtype=torch.int32)
    assert violated("trivial_index", index, "I32", scheme, rows) == ""
    index[0], index[-1] = 7, 9
    assert violated("trivial_index", index, "I32", scheme, rows) == (
        f"2 of {len(rows)} values are not i // group_size: the order of activations matters"
    )
