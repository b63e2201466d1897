"""Numbers that bug reports and requirements state, one test each: rows, shapes, scale rows, refusals."""

import numpy as np
import pytest
from geometry.bits import E4M3, unpack_words
from geometry.formats import FORMATS
from geometry.formats_packed import awq, gptq
from geometry.law import broken, filled, localized, pieces_of, refusal, segments_of, taken, world_of
from geometry.rules import Setup

from steelyard.blueprint import Part, Placement
from steelyard.errors import CutError
from steelyard.local import even
from steelyard.placement import Order
from steelyard.segments import can_join, steps_of, strict

COLWISE, ROWWISE = Placement.COLWISE, Placement.ROWWISE
BLOCK = FORMATS["fp8-block128-2d"]


def one(n, k, placement, tp):
    return Setup((Part("", n),), k, placement, tp)


def gate_up(n, k, tp, *, fused):
    parts = (Part("gate", n), Part("up", n))
    return Setup(parts, k, COLWISE, tp, Order((("gate", n), ("up", n))) if fused else None)


def cuts(fmt, setup):
    """Return every rank's cuts: part to tensor to cut, on the grid that core chooses."""
    world = world_of(fmt, setup)
    locals_ = localized(setup)
    steps = {part.name: steps_of(world.unit(part.name), locals_) for part in setup.parts}
    return [
        {part.name: pieces_of(world.unit(part.name), local, part, steps[part.name]) for part in local.parts}
        for local in locals_
    ]


def shapes(fmt, setup):
    return [{name: piece.shape for name, piece in rank[""].items() if name != "bias"} for rank in cuts(fmt, setup)]


def strict_error(fmt, setup):
    unit, locals_ = world_of(fmt, setup).unit(setup.parts[0].name), localized(setup)
    error = strict(unit, locals_, steps_of(unit, locals_))
    return None if error is None else (error.axis, error.range, error.step)


def buffers(fmt, setup, stored=None):
    """Return every rank's buffers of its first Segment, the stored tensors replaced where given."""
    world = world_of(fmt, setup)
    world.stored.update(stored or {})
    segments = segments_of(world, setup)
    return [filled(world, segments, 0, segments[0].on(local))[0] for local in localized(setup)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("placement", [COLWISE, ROWWISE], ids=["colwise", "rowwise"])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_the_ranks_together_hold_everything(placement, fused, tp):
    """P-04: laid side by side, the ranks' pieces are the whole, for column, row and merged."""
    parts = (Part("gate", 24), Part("up", 40))
    order = Order((("gate", 24), ("up", 40))) if fused else None
    setup = Setup(parts, 48, placement, tp, order)
    world = world_of(FORMATS["bf16"], setup)
    for part in parts:
        pieces = [pieces_of(world.unit(part.name), local, _of(local, part), {}) for local in localized(setup)]
        name = "e0.weight" if fused else f"e0{part.name}.weight"
        arrays = [taken(world.stored[name], piece["weight"]) for piece in pieces]
        whole = world.stored[name][:24] if part.name == "gate" else world.stored[name][-40:]
        assert np.array_equal(np.concatenate(arrays, 0 if placement is COLWISE else 1), whole)


def _of(local, part):
    return next(mine for mine in local.parts if mine.name == part.name)


def test_gate_and_up_are_cut_part_by_part():
    """P-13, R026: rows gate 0-3 and up 4-7; gate_up of 512 rows each."""
    small = cuts(FORMATS["bf16"], gate_up(4, 4, 2, fused=True))
    rows = [rank["gate"]["weight"].slices[0].indices() + rank["up"]["weight"].slices[0].indices() for rank in small]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]
    large = cuts(FORMATS["bf16"], gate_up(512, 8, 2, fused=True))
    rows = [rank["gate"]["weight"].slices[0].indices() + rank["up"]["weight"].slices[0].indices() for rank in large]
    assert rows == [[*range(256), *range(512, 768)], [*range(256, 512), *range(768, 1024)]]


def test_the_weight_boundary_decides_not_the_number_of_grid_rows():
    """P-16: 192 and 448 rows on two ranks are no whole blocks although 2 and 4 grid rows divide by 2."""
    assert strict_error(BLOCK, one(192, 128, COLWISE, 2)) == ("out", (0, 96), 128)
    assert strict_error(BLOCK, one(448, 128, COLWISE, 2)) == ("out", (0, 224), 128)
    assert strict_error(BLOCK, one(256, 128, COLWISE, 2)) is None
    assert [rank["weight_scale_inv"] for rank in shapes(BLOCK, one(256, 128, COLWISE, 2))] == [(1, 1), (1, 1)]
    assert [rank["weight"] for rank in shapes(BLOCK, one(256, 128, COLWISE, 2))] == [(128, 128)] * 2
    assert strict_error(BLOCK, one(128, 384, ROWWISE, 3)) is None
    assert [rank["weight_scale_inv"] for rank in shapes(BLOCK, one(128, 384, ROWWISE, 3))] == [(1, 1)] * 3
    assert [rank["weight_scale_inv"] for rank in shapes(BLOCK, one(448, 128, COLWISE, 1))] == [(4, 1)]


def test_block_scales_of_keys_and_values_follow_their_heads():
    """P-17: 8 query and 2 key/value heads of 128 rows on 4 ranks; of 64 rows on 2 ranks a block is cut."""
    parts = (Part("q", 1024, heads=8), Part("k", 256, heads=2, kv=True), Part("v", 256, heads=2, kv=True))
    order = Order((("q", 1024), ("k", 256), ("v", 256)))
    setup = Setup(parts, 128, COLWISE, 4, order)
    rows = [
        [index for part in "qkv" for index in rank[part]["weight_scale_inv"].slices[0].indices()]
        for rank in cuts(BLOCK, setup)
    ]
    assert rows == [[0, 1, 8, 10], [2, 3, 8, 10], [4, 5, 9, 11], [6, 7, 9, 11]]
    narrow = (Part("q", 512, heads=8), Part("k", 128, heads=2, kv=True), Part("v", 128, heads=2, kv=True))
    unit = world_of(BLOCK, Setup(narrow, 128, COLWISE, 2)).unit("k")
    locals_ = localized(Setup(narrow, 128, COLWISE, 2))
    error = strict(unit, locals_, steps_of(unit, locals_))
    assert (error.axis, error.range, error.step) == ("out", (0, 64), 128)


@pytest.mark.parametrize("name", ["fp8-channel[N]", "fp8-channel[N,1]"])
def test_a_scale_a_row_stays_whole_where_columns_are_cut(name):
    """P-18, R014: also if N == K, where the lengths cannot tell."""
    for buffer, rank in zip(buffers(FORMATS[name], one(8, 8, ROWWISE, 2)), range(2), strict=True):
        assert buffer["weight"].shape == (8, 4)
        stored = world_of(FORMATS[name], one(8, 8, ROWWISE, 2)).stored["e0.weight_scale"]
        assert np.array_equal(buffer["weight_scale"].reshape(-1), stored.reshape(-1)), rank


@pytest.mark.parametrize("form", ["fp8-tensor[]", "fp8-tensor[1]"])
@pytest.mark.parametrize("placement", [COLWISE, ROWWISE], ids=["colwise", "rowwise"])
@pytest.mark.parametrize("kind", ["one", "merged", "qkv"])
def test_scalars_reach_every_rank_whole(kind, placement, form):
    """P-19: a weight scale of 0.5 is 0.5 on each of 4 ranks, once a part."""
    parts = {
        "one": (Part("", 16),),
        "merged": (Part("gate", 16), Part("up", 16)),
        "qkv": (Part("q", 32, heads=4), Part("k", 8, heads=1, kv=True), Part("v", 8, heads=1, kv=True)),
    }[kind]
    setup = Setup(parts, 16, placement, 4)
    scale = np.full(() if form.endswith("[]") else (1,), 0.5)
    stored = {f"e0{part.name}.weight_scale": scale for part in parts}
    for buffer in buffers(FORMATS[form], setup, stored):
        assert buffer["weight_scale"].tolist() == [0.5] * len(parts)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["column", "row", "merged", "qkv"])
def test_both_shapes_of_a_scale_a_row_give_equal_buffers(kind, tp):
    """P-20, R014: [N] and [N, 1]."""
    qkv = (Part("q", 8, heads=4), Part("k", 4, heads=2, kv=True), Part("v", 4, heads=2, kv=True))
    parts, placement, order = {
        "column": ((Part("", 16),), COLWISE, None),
        "row": ((Part("", 16),), ROWWISE, None),
        "merged": ((Part("gate", 8), Part("up", 8)), COLWISE, None),
        "qkv": (qkv, COLWISE, Order((("q", 8), ("k", 4), ("v", 4)))),
    }[kind]
    setup = Setup(parts, 16, placement, tp, order)
    flat, column = (buffers(FORMATS[name], setup) for name in ("fp8-channel[N]", "fp8-channel[N,1]"))
    for one_rank, other in zip(flat, column, strict=True):
        assert one_rank.keys() == other.keys()
        assert all(np.array_equal(one_rank[name], other[name]) for name in one_rank)


def test_awq_shards_have_the_published_shapes():
    """P-21: K 16, N 32, group 8; a rank with 4 of either is refused."""
    small = awq("small", 8)
    whole = {"qweight": (16, 4), "qzeros": (2, 4), "scales": (2, 32)}
    assert shapes(small, one(32, 16, COLWISE, 1)) == [whole]
    assert shapes(small, one(32, 16, COLWISE, 2)) == [{"qweight": (16, 2), "qzeros": (2, 2), "scales": (2, 16)}] * 2
    assert shapes(small, one(32, 16, ROWWISE, 2)) == [{"qweight": (8, 4), "qzeros": (1, 4), "scales": (1, 32)}] * 2
    assert refusal(small, one(32, 16, ROWWISE, 4)) == ("in", (0, 4), 4)
    assert refusal(small, one(32, 16, COLWISE, 8)) == ("out", (0, 4), 8)


def test_parts_that_end_inside_a_block_are_not_laid_in_one_grid():
    """P-22: 192 rows each have 2 + 2 scale rows where 384 have 3; 256 each have 4, gate 0-1 and up 2-3."""
    apart = gate_up(192, 256, 1, fused=False)
    world, locals_ = world_of(BLOCK, apart), localized(apart)
    verdict = can_join([world.unit("gate")], world.unit("up"), locals_)
    assert verdict.why == (
        "gate has 192 rows on a rank and weight_scale_inv steps by 128, so up would start inside a step"
    )  # fmt: skip
    assert broken(BLOCK, apart) == []
    assert strict_error(BLOCK, gate_up(192, 256, 1, fused=True)) == ("out", (0, 192), 128)
    even_rows = gate_up(256, 256, 1, fused=False)
    world = world_of(BLOCK, even_rows)
    (segment,) = segments_of(world, even_rows)
    on_rank = segment.on(localized(even_rows)[0])
    regions = {part: on_rank.pieces[part][1].region[0] for part in ("gate", "up")}
    assert regions == {"gate": (0, 2), "up": (2, 2)}


def row_scales(buffer, k, steps):
    """Return the scale that each row of a block-scaled buffer is multiplied with in its first column."""
    return np.repeat(buffer[:, 0], steps)


def test_rows_on_both_sides_of_a_border_use_the_shared_block():
    """R028: gate and up of 192 rows in one tensor, scale rows 1, 2, 4."""
    setup = gate_up(192, 256, 1, fused=True)
    scale = np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])
    (buffer,) = buffers(BLOCK, setup, {"e0.weight_scale_inv": scale})
    rows = row_scales(buffer["weight_scale_inv"], 256, 64)
    assert rows.tolist() == [1.0] * 128 + [2.0] * 64 + [2.0] * 64 + [4.0] * 128


def test_halves_off_the_blocks_keep_their_own_scale_rows():
    """R042: gate and up of 320 rows each; their sum would fit the blocks."""
    setup = gate_up(320, 256, 1, fused=False)
    world = world_of(BLOCK, setup)
    segments = segments_of(world, setup)
    assert [segment.parts for segment in segments] == [("gate",), ("up",)]
    for index, segment in enumerate(segments):
        held, wrong = filled(world, segments, index, segment.on(localized(setup)[0]))
        assert wrong == []
        assert np.array_equal(held["weight_scale_inv"], world.stored[f"e0{segment.parts[0]}.weight_scale_inv"])


def test_columns_on_both_sides_of_a_boundary_use_the_shared_block():
    """R044: 384 columns on two ranks, column scales 1, 2, 4."""
    setup = one(256, 384, ROWWISE, 2)
    scale = np.array([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    held = [
        np.repeat(rank["weight_scale_inv"][0], 64) for rank in buffers(BLOCK, setup, {"e0.weight_scale_inv": scale})
    ]
    assert held[0].tolist() == [1.0] * 128 + [2.0] * 64
    assert held[1].tolist() == [2.0] * 64 + [4.0] * 128
    assert strict_error(BLOCK, setup) == ("in", (0, 192), 128)


def test_a_group_on_two_ranks_is_shared_and_never_made_192_wide():
    """R079: 768 inputs in groups of 256 on two ranks: rank 0 has groups 0, 1a and rank 1 has 1b, 2."""
    setup = one(32, 768, ROWWISE, 2)
    wide = awq("wide", 256)
    assert broken(wide, setup) == []
    pieces = cuts(wide, setup)
    assert [rank[""]["scales"].slices[0].indices() for rank in pieces] == [[0, 1], [1, 2]]
    assert [rank[""]["scales"].shape for rank in pieces] == [(3, 32)] * 2
    assert strict_error(wide, setup) == ("in", (0, 384), 256)


def test_act_order_keeps_every_group_on_every_rank():
    """R082: 512 inputs, g_idx = i mod 4, scales of group g are 2 ** g."""
    setup = one(256, 512, ROWWISE, 2)
    made = gptq("act", 4, 128, act_order=True)
    index = (np.arange(512) % 4).astype(np.int32)
    scales = np.repeat(2.0 ** np.arange(4)[:, None], 256, 1)
    world = world_of(made, setup)
    words = world.stored["e0.qweight"]
    for rank, held in enumerate(buffers(made, setup, {"e0.g_idx": index, "e0.scales": scales})):
        assert np.array_equal(held["qweight"], words[rank * 32 : rank * 32 + 32])
        assert np.array_equal(held["g_idx"], index[rank * 256 : rank * 256 + 256])
        assert held["scales"].shape == (4, 256)
        assert np.array_equal(held["scales"][held["g_idx"]][:, 0], 2.0 ** (np.arange(256) % 4))


@pytest.mark.parametrize("name", ["gptq4-one-group", "awq-one-group"])
def test_one_group_for_the_whole_input_is_held_whole(name):
    """R084, R087: scales [1, out] and zeros [1, out / 8] on both ranks."""
    setup = one(256, 256, ROWWISE, 2)
    for rank in shapes(FORMATS[name], setup):
        assert (rank["scales"], rank["qzeros"]) == ((1, 256), (1, 32))
    assert broken(FORMATS[name], setup) == []


def test_stored_zeros_wrap_inside_their_field():
    """R087: stored nibbles 15, 7, 0, 15, 8, 1, 14, 2 of an older file are zeros 0, 8, 1, 0, 9, 2, 15, 3."""
    word = np.array([[sum(nibble << 4 * i for i, nibble in enumerate([15, 7, 0, 15, 8, 1, 14, 2]))]], np.uint32)
    assert ((unpack_words(word, 4, 8, 1) + 1) & 15).tolist() == [[0, 8, 1, 0, 9, 2, 15, 3]]


def test_a_last_short_group_is_a_group():
    """R090: 192 inputs in groups of 128 have 2 scale rows; on two ranks the grid is 32."""
    short = gptq("short", 4, 128)
    assert shapes(short, one(64, 192, COLWISE, 1))[0]["scales"] == (2, 64)
    assert broken(short, one(64, 192, COLWISE, 1)) == []
    assert broken(short, one(64, 192, ROWWISE, 2)) == []
    assert strict_error(short, one(64, 192, ROWWISE, 2)) == ("in", (0, 96), 128)


def test_sizes_that_do_not_divide_are_refused_with_the_sizes_that_fit():
    """P-01, P-02, P-03, R079: 10 rows over 3 ranks."""
    with pytest.raises(CutError) as caught:
        even("out", 10, 3, 0)
    error = caught.value
    assert (error.axis, error.range, error.step) == ("out", (0, 10), 0)
    assert {1, 2, 5, 10} <= set(error.fits)
    assert str(error) == (
        "cannot cut out[0:10]: 10 elements do not divide by tp 3; sizes that fit: 1, 2, 5, 10"
    )  # fmt: skip


def test_a_refused_block_names_the_sizes_that_fit():
    """R043: 576 rows over 8 ranks would need a grid of 8; the sizes named do fit."""
    setup = one(576, 128, COLWISE, 8)
    unit = world_of(BLOCK, setup).unit("")
    with pytest.raises(CutError) as caught:
        steps_of(unit, localized(setup))
    assert caught.value.fits
    for tp in caught.value.fits:
        assert refusal(BLOCK, one(576, 128, COLWISE, tp)) is None, tp


def test_block_scales_multiply_whatever_their_name_says():
    """The example of [576, 7168]: 5 x 56 scales, and row 575 uses scale row 4."""
    codes = np.full((576, 256), 0x38, np.uint8)
    scale = np.arange(10.0).reshape(5, 2)
    setup = one(576, 256, COLWISE, 1)
    (held,) = buffers(BLOCK, setup, {"e0.weight": codes, "e0.weight_scale_inv": scale})
    assert (E4M3[held["weight"]] * np.kron(held["weight_scale_inv"], np.ones((128, 128)))[:576])[575].tolist() == (
        [8.0] * 128 + [9.0] * 128
    )
    assert shapes(BLOCK, one(576, 7168, COLWISE, 1))[0]["weight_scale_inv"] == (5, 56)
