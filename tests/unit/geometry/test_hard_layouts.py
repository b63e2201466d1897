"""Layouts that broke other loaders: interleaved, per head, per group of heads, stacked, transposed, off the blocks."""

from dataclasses import replace

import numpy as np
import pytest
from geometry.formats import FORMATS
from geometry.law import broken, filled, localized, pieces_of, refusal, segments_of, world_of
from geometry.rules import Setup, grid_of_part, refusals

from steelyard.blueprint import Embedding, Linear, Part, Placement
from steelyard.local import localize
from steelyard.placement import Axis, Cut, Order, Regrid, Slice, cut
from steelyard.ranks import Ranks
from steelyard.segments import steps_of, strict

COLWISE, ROWWISE = Placement.COLWISE, Placement.ROWWISE


def gate_up(n):
    return (Part("gate", n), Part("up", n))


def side_by_side(parts):
    return Order(tuple((part.name, part.out) for part in parts))


def joined(setup, name):
    """Return the parts of every Segment, and their scale steps along out."""
    world = world_of(FORMATS[name], setup)
    return [("".join(segment.parts), segment.steps.get("out")) for segment in segments_of(world, setup)]


# --- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("ep", [1, 2, 3])
def test_interleaved_blocks_are_cut_by_experts_and_by_row_pairs(ep, tp):
    """E-08: gate is rows 0::2 and up 1::2 of every expert's blocks, scales and bias; 5 experts go out unevenly."""
    pairs = Order((("gate", 1), ("up", 1)), 32)
    setup = Setup(gate_up(32), 64, COLWISE, tp, pairs, experts=5, ep=ep, stacked=True)
    assert broken(FORMATS["gpt-oss-blocks"], setup) == []


def test_interleaved_blocks_are_read_as_strided_rows():
    """E-08: rank 3 of ep 2 x tp 2 reads one slice a dim and nothing of its neighbours."""
    pairs = Order((("gate", 1), ("up", 1)), 64)
    setup = Setup(gate_up(64), 64, COLWISE, 2, pairs, experts=4, ep=2, stacked=True)
    world, local = world_of(FORMATS["gpt-oss-blocks"], setup), localized(setup)[3]
    cuts = {part.name: pieces_of(world.unit(part.name), local, part, {}) for part in local.parts}
    assert cuts["gate"]["blocks"].slices == (Slice(2, 2), Slice(64, 1, 2, 32), Slice(0, 2), Slice(0, 16))
    assert cuts["up"]["bias"].slices == (Slice(2, 2), Slice(65, 1, 2, 32))


@pytest.mark.parametrize(
    ("k", "tp", "expected"),
    [
        pytest.param(256, 2, None, id="8-blocks-over-2"),
        pytest.param(256, 4, None, id="8-blocks-over-4"),
        pytest.param(2880, 2, None, id="90-blocks-over-2"),
        pytest.param(2880, 4, ("in", (0, 720), 32), id="90-blocks-over-4"),
    ],
)
def test_down_blocks_are_cut_between_blocks_or_not_at_all(k, tp, expected):
    """E-08, R044."""
    setup = Setup((Part("", 16),), k, ROWWISE, tp, experts=2, stacked=True)
    assert refusal(FORMATS["gpt-oss-blocks"], setup) == expected


STACKED = ["bf16", "fp8-tensor[]", "fp8-channel[N,1]", "fp8-channel[N]", "fp8-block64-2d", "int8-w8a8"]


@pytest.mark.parametrize("transposed", [False, True], ids=["out-first", "in-first"])
@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (1, 2), (2, 1), (3, 2)], ids=lambda size: str(size))
def test_stacked_experts_equal_the_single_ones(name, ep, tp, transposed):
    """E-08, E-09, E-10, E-11: [E, 2I, H] and [E, H, 2I], each with its scales; block scales are transposed too."""
    parts = gate_up(128)
    one = Setup(parts, 192, COLWISE, tp, side_by_side(parts), 3, ep, stacked=True, transposed=transposed)
    assert broken(FORMATS[name], one) == []
    down = Setup((Part("", 128),), 128, ROWWISE, tp, None, 3, ep, stacked=True, transposed=transposed)
    assert broken(FORMATS[name], down) == []


@pytest.mark.parametrize("transposed", [False, True], ids=["out-first", "in-first"])
def test_square_experts_are_told_apart_by_declaration_alone(transposed):
    """E-10: with 2 x 64 rows and 128 columns both readings fit the shape."""
    parts = gate_up(64)
    setup = Setup(parts, 128, COLWISE, 2, side_by_side(parts), 2, 2, stacked=True, transposed=transposed)
    assert broken(FORMATS["fp8-block64-2d"], setup) == []
    assert world_of(FORMATS["bf16"], setup).stored["s.weight"].shape == (2, 128, 128)


def test_the_scale_of_a_transposed_pair_is_split_along_its_last_axis():
    """E-11: scale [2, 2, 2] of value 10h + m: gate [[0, 10]], up [[1, 11]]."""
    scale = np.array([[[10 * h + m for m in range(2)] for h in range(2)]] * 2)
    parts = gate_up(128)
    setup = Setup(parts, 256, COLWISE, 1, side_by_side(parts), 2, stacked=True, transposed=True)
    world, local = world_of(FORMATS["fp8-block128-2d"], setup), localized(setup)[0]
    got = {}
    for part in local.parts:
        piece = pieces_of(world.unit(part.name), local, part, {})["weight_scale_inv"]
        got[part.name] = scale[0][np.ix_(piece.slices[1].indices(), piece.slices[2].indices())].T.tolist()
    assert got == {"gate": [[0, 10]], "up": [[1, 11]]}


@pytest.mark.parametrize("name", ["w4afp8", "ct-pack4-group64-zeros", "awq-group64", "nvfp4", "fp8-channel[N]", "bf16"])
@pytest.mark.parametrize(("ep", "tp"), [(1, 2), (2, 1), (2, 2)], ids=lambda size: str(size))
def test_experts_in_files_of_their_own_are_stacked_per_rank(name, ep, tp):
    """E-08, R016, R034: 3 experts over ep, each cut by tp; gate and up are laid one behind the other per expert."""
    assert broken(FORMATS[name], Setup(gate_up(64), 128, COLWISE, tp, experts=3, ep=ep)) == []
    assert broken(FORMATS[name], Setup((Part("", 64),), 256, ROWWISE, tp, experts=3, ep=ep)) == []


@pytest.mark.parametrize("stacked", [False, True], ids=["one-by-one", "stacked"])
def test_a_rank_without_experts_holds_empty_buffers(stacked):
    """R034: 2 experts on 3 ranks."""
    parts = gate_up(32)
    setup = Setup(parts, 64, COLWISE, 1, side_by_side(parts) if stacked else None, 2, 3, stacked=stacked)
    assert broken(FORMATS["nvfp4"], setup) == []
    world = world_of(FORMATS["nvfp4"], setup)
    on_rank = segments_of(world, setup)[0].on(localized(setup)[2])
    assert {buffer.shape[0] for buffer in on_rank.buffers} == {0}


# --- attention ---------------------------------------------------------------------------------------------------


def mla(nope, value, heads, k, tp):
    parts = (Part("k_nope", nope * heads, heads=heads), Part("v", value * heads, heads=heads))
    return Setup(parts, k, COLWISE, tp, Order((("k_nope", nope), ("v", value)), heads))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["bf16", "fp8-channel[N,1]", "fp8-block64-2d", "fp8-block128-2d", "ct-pack4-group64-zeros"]
)
def test_latent_attention_rows_are_cut_per_head(name, tp):
    """P-12, R026: kv_b_proj is (k_nope 128 | v 128) a head, block scales of 128 along."""
    assert broken(FORMATS[name], mla(128, 128, 4, 128, tp)) == []


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        pytest.param(1, ("out", (0, 768), 32), id="several-heads-a-rank-are-refused"),
        pytest.param(4, None, id="one-head-a-rank-is-refined"),
    ],
)
def test_latent_attention_off_the_blocks_is_refined_or_refused(tp, expected):
    """R028: heads of 96 + 128 rows with blocks of 128 meet no common edge but one of 32."""
    setup = mla(96, 128, 4, 128, tp)
    got = refusal(FORMATS["fp8-block128-2d"], setup)
    assert (got is None) == (expected is None)
    assert (got in refusals(FORMATS["fp8-block128-2d"], setup)) == (got is not None)
    assert got is None or got[2] == expected[2]
    assert broken(FORMATS["bf16"], setup) == []


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["bf16", "awq-group64", "fp8-channel[N]", "fp8-block64-2d", "gptq3-group32"])
def test_rows_grouped_by_key_value_head_are_cut_per_group(name, tp):
    """P-12, R026: wqkv is (queries of one pair | k | v) a key/value head."""
    parts = (Part("q", 256, heads=4), Part("k", 128, heads=2, kv=True), Part("v", 128, heads=2, kv=True))
    setup = Setup(parts, 64, COLWISE, tp, Order((("q", 128), ("k", 64), ("v", 64)), 2))
    assert broken(FORMATS[name], setup) == []


def small_language_model(tp, *, fused):
    parts = (Part("q", 576, heads=9), Part("k", 192, heads=3, kv=True), Part("v", 192, heads=3, kv=True))
    return Setup(parts, 576, COLWISE, tp, side_by_side(parts) if fused else None)


@pytest.mark.parametrize(
    ("tp", "fused", "expected"),
    [
        pytest.param(1, False, [("q", None), ("k", None), ("v", None)], id="apart-whole"),
        pytest.param(3, False, [("qkv", 64)], id="apart-over-3"),
        pytest.param(1, True, [("qk", 64), ("v", None)], id="fused-whole"),
        pytest.param(3, True, [("qkv", 64)], id="fused-over-3"),
    ],
)
def test_576_wide_heads_stay_apart_or_share_a_grid_of_64(tp, fused, expected):
    """P-22, R028, R042: 576 = 4.5 blocks of 128; nothing is joined over a block edge and nothing is inexact."""
    setup = small_language_model(tp, fused=fused)
    assert broken(FORMATS["fp8-block128-2d"], setup) == []
    assert joined(setup, "fp8-block128-2d") == expected


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["bf16", "fp8-block64-2d", "fp8-channel[N]"])
def test_a_dense_matrix_stored_transposed_is_cut_like_any_other(name, tp):
    """E-10: (in, out) as of a convolution with one tap; N == K here, so only the declaration tells."""
    square = Setup((Part("", 256),), 256, COLWISE, tp, transposed=True)
    assert broken(FORMATS[name], square) == []
    assert broken(FORMATS[name], replace(square, placement=ROWWISE)) == []


# --- blocks ------------------------------------------------------------------------------------------------------


def test_320_rows_on_two_ranks_are_laid_on_a_grid_of_32():
    """R040, P-16: rank 1 reads scale rows 1..2, repeats each 4 times, skips 1 and keeps 5."""
    setup = Setup((Part("", 320),), 256, COLWISE, 2)
    world = world_of(FORMATS["fp8-block128-2d"], setup)
    unit, locals_ = world.unit(""), localized(setup)
    steps = steps_of(unit, locals_)
    assert steps == {"out": 32}
    pieces = [pieces_of(unit, local, local.parts[0], steps)["weight_scale_inv"] for local in locals_]
    assert pieces[0] == Cut((Slice(0, 2), Slice(0, 2)), (Regrid(4, 0, 5), None))
    assert pieces[1] == Cut((Slice(1, 2), Slice(0, 2)), (Regrid(4, 1, 5), None))
    assert broken(FORMATS["fp8-block128-2d"], setup) == []


def test_a_strict_grid_is_refused_with_axis_range_and_step():
    """P-16, R040: the same cut where only the stored grid is allowed."""
    setup = Setup((Part("", 320),), 256, COLWISE, 2)
    unit, locals_ = world_of(FORMATS["fp8-block128-2d"], setup).unit(""), localized(setup)
    error = strict(unit, locals_, steps_of(unit, locals_))
    assert (error.axis, error.range, error.step) == ("out", (0, 160), 128)


def test_a_strict_grid_is_no_error_where_the_stored_one_fits():
    setup = Setup((Part("", 256),), 256, COLWISE, 2)
    unit, locals_ = world_of(FORMATS["fp8-block128-2d"], setup).unit(""), localized(setup)
    assert strict(unit, locals_, steps_of(unit, locals_)) is None


def test_288_of_576_rows_are_refined_and_72_are_refused():
    """R043: 576 rows over 2 ranks need a grid of 32; over 8 ranks one of 8, which is refused."""
    one = Setup((Part("", 576),), 128, COLWISE, 2)
    assert grid_of_part(FORMATS["fp8-block128-2d"], one, one.parts[0]) == {"out": 32}
    assert broken(FORMATS["fp8-block128-2d"], one) == []
    assert refusal(FORMATS["fp8-block128-2d"], replace(one, tp=8)) == ("out", (0, 72), 8)


# --- tied heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [64, 70], ids=["divides", "padded"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_tied_head_is_cut_like_its_embedding(vocabulary, tp):
    """Both are (vocabulary, hidden), so one piece serves both; rows past the vocabulary are padding."""
    dims = (Axis("out"), Axis("in"))
    embedding = Embedding("embed", vocabulary, 16, COLWISE)
    head = Linear("lm_head", 16, (Part("", vocabulary, padded=True),), COLWISE)
    table = np.arange(vocabulary)
    held = []
    for ranks in Ranks.of(tp=tp).all():
        (one,), (other,) = localize(embedding, ranks), localize(head, ranks)
        pieces = [cut(dims, local.spans(local.parts[0])) for local in (one, other)]
        assert pieces[0] == pieces[1]
        assert (
            (one.n, one.k, one.padding) == (other.n, other.k, other.padding) == (-(-vocabulary // tp), 16, one.padding)
        )
        held += table[pieces[0].slices[0].indices()].tolist()
    assert held == table.tolist()


def vocabulary(rows, tp):
    return Setup((Part("", rows, padded=True),), 64, COLWISE, tp)


@pytest.mark.parametrize("name", ["bf16", "fp8-channel[N]", "fp8-channel[N,1]", "mxfp8"])
@pytest.mark.parametrize(("rows", "tp", "share"), [(70, 4, 18), (97, 2, 49)], ids=lambda size: str(size))
def test_rows_past_the_vocabulary_are_filled_with_zeros_once(name, rows, tp, share):
    """P-04, R036: 70 rows over 4 ranks are 18 each, the last 2 of them zeros, scales and bias alike."""
    setup = vocabulary(rows, tp)
    world = world_of(FORMATS[name], setup)
    segments = segments_of(world, setup)
    held = [filled(world, segments, 0, segments[0].on(local)) for local in localized(setup)]
    assert all(wrong == [] for _, wrong in held)
    for tensor in held[0][0]:
        whole_tensor = world.stored[f"e0.{tensor}"]
        joined_up = np.concatenate([buffers[tensor] for buffers, _ in held])
        assert [buffers[tensor].shape[0] for buffers, _ in held] == [share] * tp
        assert np.array_equal(joined_up[:rows].reshape(whole_tensor.shape), whole_tensor)
        assert not joined_up[rows:].any()


def test_padded_rows_share_the_scale_block_that_they_lie_in():
    """R036: 95 rows in blocks of 64 over 2 ranks are 48 each on a grid of 16, so 3 scale rows each."""
    setup = vocabulary(95, 2)
    world = world_of(FORMATS["fp8-block64-2d"], setup)
    (segment,) = segments_of(world, setup)
    held = [filled(world, [segment], 0, segment.on(local)) for local in localized(setup)]
    assert [wrong for _, wrong in held] == [[], []]
    assert [buffers["weight_scale_inv"].shape for buffers, _ in held] == [(3, 1), (3, 1)]
