"""The proof bites: layouts that are wrong in one place break the law, are refused, or do not fit the file.

Sizes are chosen so that the wrong layout fits the header wherever it can, since only then the numbers must tell.
"""

from dataclasses import replace

import pytest
from geometry.formats import FORMATS
from geometry.law import Unmatched, broken
from geometry.rules import Setup

from steelyard.blueprint import Part, Placement
from steelyard.errors import CutError
from steelyard.placement import Axis, Fixed, Order

COLWISE, ROWWISE = Placement.COLWISE, Placement.ROWWISE
OUT, IN = Axis("out"), Axis("in")


def wrong(name, tensor, *dims, **changes):
    """Return a format whose layout says something else of one tensor."""
    fmt = FORMATS[name]
    changes = {**changes, **({"dims": dims} if dims else {})}
    tensors = tuple(replace(one, **changes) if one.name == tensor else one for one in fmt.tensors)
    assert tensors != fmt.tensors
    return replace(fmt, tensors=tensors)


def one(n, k, placement, tp=2):
    return Setup((Part("", n),), k, placement, tp)


def pair(n, k, **changes):
    parts = (Part("gate", n), Part("up", n))
    return Setup(parts, k, COLWISE, 2, **changes)


def side_by_side(n):
    return Order((("gate", n), ("up", n)))


def grouped_heads(declared):
    parts = (Part("q", 64, heads=4), Part("k", 32, heads=2, kv=True), Part("v", 32, heads=2, kv=True))
    return Setup(parts, 32, COLWISE, 2, declared, truth=Order((("q", 32), ("k", 16), ("v", 16)), 2))


UNEQUAL = {
    "axes-swapped-on-a-square": (wrong("bf16", "weight", (IN, OUT)), one(64, 64, COLWISE)),
    "axes-swapped-on-a-square-rowwise": (wrong("bf16", "weight", (IN, OUT)), one(64, 64, ROWWISE)),
    "scale-a-row-along-columns": (wrong("fp8-channel[N]", "weight_scale", (IN,)), one(64, 64, ROWWISE)),
    "scale-a-row-not-cut": (wrong("fp8-channel[N]", "weight_scale", (Fixed(64),)), one(64, 64, COLWISE)),
    "scale-of-groups-swapped-on-a-square": (
        wrong("mxfp8", "weight_scale", (IN, Axis("out", 32))),
        one(128, 128, COLWISE),
    ),
    "groups-cut-along-out": (wrong("mxfp8", "weight_scale", (OUT, Axis("out", 32))), one(128, 128, COLWISE)),
    "groups-not-cut": (wrong("mxfp8", "weight_scale", (OUT, Fixed(4))), one(128, 128, ROWWISE)),
    "blocks-swapped-on-a-square": (
        wrong("fp8-block64-2d", "weight_scale_inv", (Axis("in", 64, 1, True), Axis("out", 64, 1, True))),
        one(128, 128, COLWISE),
    ),
    "zero-points-packed-along-columns": (
        wrong("ct-pack4-group64-zeros", "weight_zero_point", (Axis("in", 8), Axis("out", 64))),
        one(128, 128, ROWWISE),
    ),
    "zero-points-not-cut": (
        wrong("ct-pack4-channel-zeros", "weight_zero_point", (Fixed(16), Fixed(1))),
        one(128, 128, COLWISE),
    ),
    "three-bit-words-not-cut": (wrong("gptq3-group32", "qweight", (Fixed(12), OUT)), one(64, 128, ROWWISE)),
    "bytes-of-a-block-taken-for-blocks": (
        wrong("gpt-oss-blocks", "blocks", (OUT, Fixed(16), Axis("in", 32))),
        one(8, 512, ROWWISE),
    ),
    "row-pairs-taken-for-column-pairs": (
        wrong("modelopt-int4-row-pairs", "weight", (Axis("in", 2), OUT)),
        one(128, 128, COLWISE),
    ),
    "input-vector-along-rows": (
        wrong("modelopt-int4-row-pairs", "pre_quant_scale", (OUT,)),
        one(128, 128, ROWWISE),
    ),
    "act-order-without-its-cutter": (replace(FORMATS["gptq4-desc_act"], cutter=None), one(64, 128, ROWWISE)),
    "act-order-of-compressed-tensors-without-its-cutter": (
        replace(FORMATS["ct-pack4-g_idx"], cutter=None),
        one(64, 128, ROWWISE),
    ),
    "tiles-swapped-with-lanes": (
        wrong("torchao-tiled", "qdata", (Fixed(32), Axis("in", 128), Axis("out", 8), Fixed(4))),
        one(256, 256, COLWISE),
    ),
    "order-reversed": (
        FORMATS["bf16"],
        pair(32, 32, order=Order((("up", 32), ("gate", 32))), truth=side_by_side(32)),
    ),
    "interleave-declared-as-concat": (
        FORMATS["gpt-oss-blocks"],
        pair(32, 64, order=side_by_side(32), truth=Order((("gate", 1), ("up", 1)), 32)),
    ),
    "concat-declared-as-interleave": (
        FORMATS["fp8-channel[N]"],
        pair(32, 64, order=Order((("gate", 1), ("up", 1)), 32), truth=side_by_side(32)),
    ),
    "heads-in-groups-declared-as-concat": (FORMATS["bf16"], grouped_heads(Order((("q", 64), ("k", 32), ("v", 32))))),
    "keys-and-values-confused": (FORMATS["bf16"], grouped_heads(Order((("q", 32), ("v", 16), ("k", 16)), 2))),
    "transposed-not-declared-on-a-square": (
        FORMATS["bf16"],
        replace(one(64, 64, COLWISE), transposed=True, forgotten=True),
    ),
    "transposed-experts-not-declared-on-a-square": (
        FORMATS["fp8-block64-2d"],
        pair(64, 128, order=side_by_side(64), experts=2, ep=2, stacked=True, transposed=True, forgotten=True),
    ),
    "scalars-a-part-declared-equal": (wrong("fp8-tensor[]", "weight_scale", merge="equal"), pair(32, 32)),
    "shared-index-declared-a-part": (wrong("gptq4-desc_act", "g_idx", merge="concat"), pair(32, 64)),
}

REFUSED = {
    "scale-that-is-no-scale-is-not-refined": (
        wrong("fp8-block64-2d", "weight_scale_inv", role="codes"),
        one(96, 64, COLWISE, 3),
    ),
    "coarser-codes-than-stored": (wrong("bf16", "weight", (Axis("out", 8, 8), IN)), one(24, 64, COLWISE)),
}

UNMATCHED = {
    "three-bit-as-ten-a-word": (wrong("gptq3-group32", "qweight", (Axis("in", 10), OUT)), one(64, 320, ROWWISE)),
    "last-block-forgotten": (
        wrong("fp8-block128-2d", "weight_scale_inv", (Axis("out", 128), Axis("in", 128))),
        one(320, 128, COLWISE),
    ),
    "blocks-of-another-size": (
        wrong("fp8-block128-2d", "weight_scale_inv", (Axis("out", 64), Axis("in", 64))),
        one(256, 256, COLWISE),
    ),
    "eight-a-word-as-four": (wrong("awq-group64", "qweight", (IN, Axis("out", 4))), one(64, 64, COLWISE)),
    "awq-as-gptq": (wrong("awq-group64", "qweight", (Axis("in", 8), OUT)), one(64, 128, COLWISE)),
    "bytes-as-elements": (wrong("nvfp4", "weight", (OUT, Axis("in", 2, 2))), one(64, 64, ROWWISE)),
    "transposed-not-declared": (FORMATS["bf16"], replace(one(64, 32, COLWISE), transposed=True, forgotten=True)),
    "rows-that-the-order-has-not": (FORMATS["bf16"], pair(32, 32, order=side_by_side(16), truth=side_by_side(32))),
}


@pytest.mark.parametrize(("fmt", "setup"), UNEQUAL.values(), ids=UNEQUAL)
def test_a_wrong_layout_that_fits_the_header_gives_other_numbers(fmt, setup):
    """P-18, E-10, R026, R082: nothing but the law can find these."""
    right = FORMATS[fmt.name]
    assert broken(right, setup, layout_of=fmt) != []


@pytest.mark.parametrize(("fmt", "setup"), UNEQUAL.values(), ids=UNEQUAL)
def test_the_right_layout_holds_on_the_same_sizes(fmt, setup):
    """Otherwise the test above would prove nothing."""
    truth = replace(setup, order=setup.stored_order, truth=None, forgotten=False)
    assert broken(FORMATS[fmt.name], truth) == []


@pytest.mark.parametrize(("fmt", "setup"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_layout_can_be_refused_where_the_right_one_holds(fmt, setup):
    with pytest.raises(CutError):
        broken(FORMATS[fmt.name], setup, layout_of=fmt)
    assert broken(FORMATS[fmt.name], setup) == []


@pytest.mark.parametrize(("fmt", "setup"), UNMATCHED.values(), ids=UNMATCHED)
def test_a_wrong_layout_can_fail_to_fit_the_header(fmt, setup):
    with pytest.raises(Unmatched):
        broken(FORMATS[fmt.name], setup, layout_of=fmt)
