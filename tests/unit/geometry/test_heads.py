"""Query and key/value heads over the ranks: the whole published table, and proof that the rule is the right one."""

from math import gcd

import numpy as np
import pytest
from geometry.formats import FORMATS
from geometry.law import all_ranks, broken, localized, pieces_of, world_of
from geometry.rules import Setup

from steelyard.blueprint import AttentionState, Experts, Linear, Part, Placement
from steelyard.errors import ConfigError
from steelyard.local import localize
from steelyard.placement import Order
from steelyard.ranks import Ranks, distribute, head_range, head_sizes

# query heads, key/value heads, tp, query heads a rank, key/value heads a rank, first key/value head of each rank
ACCEPTED = {
    "8-8-tp4": (8, 8, 4, 2, 2, [0, 2, 4, 6]),
    "32-8-tp4": (32, 8, 4, 8, 2, [0, 2, 4, 6]),
    "8-4-tp4": (8, 4, 4, 2, 1, [0, 1, 2, 3]),
    "8-2-tp4": (8, 2, 4, 2, 1, [0, 0, 1, 1]),
    "8-2-tp8": (8, 2, 8, 1, 1, [0, 0, 0, 0, 1, 1, 1, 1]),
    "32-4-tp8": (32, 4, 8, 4, 1, [0, 0, 1, 1, 2, 2, 3, 3]),
    "32-1-tp8": (32, 1, 8, 4, 1, [0] * 8),
    "12-3-tp6": (12, 3, 6, 2, 1, [0, 0, 1, 1, 2, 2]),
    "64-8-tp16": (64, 8, 16, 4, 1, [rank // 2 for rank in range(16)]),
    "12-3-tp3": (12, 3, 3, 4, 1, [0, 1, 2]),
}
REFUSED = {
    "8-6-tp4": (8, 6, 4),
    "8-3-tp8": (8, 3, 8),
    "10-2-tp3": (10, 2, 3),
    "24-6-tp4-rank-0-would-give-query-2-the-wrong-head": (24, 6, 4),
    "24-3-tp8": (24, 3, 8),
    "12-6-tp4": (12, 6, 4),
    "12-4-tp6": (12, 4, 6),
    "40-8-tp5": (40, 8, 5),
    "6-4-tp2-although-both-divide": (6, 4, 2),
    "8-3-tp1": (8, 3, 1),
}
SMALL = {name: row for name, row in ACCEPTED.items() if row[0] <= 12}


@pytest.mark.parametrize("row", ACCEPTED.values(), ids=ACCEPTED)
def test_heads_go_out_as_the_table_says(row):
    """P-08, P-09."""
    queries, pairs, tp, local_q, local_kv, firsts = row
    for rank in range(tp):
        assert head_range(queries, pairs, tp, rank, kv=False) == (rank * local_q, (rank + 1) * local_q)
        assert head_range(queries, pairs, tp, rank, kv=True) == (firsts[rank], firsts[rank] + local_kv)
    assert tp in head_sizes(queries, pairs)


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("kv", [False, True], ids=["queries", "pairs"])
def test_other_head_counts_are_refused_with_every_number(row, kv):
    """P-09, P-10."""
    queries, pairs, tp = row
    for rank in range(tp):
        with pytest.raises(ConfigError) as caught:
            head_range(queries, pairs, tp, rank, kv=kv)
        assert f"q_heads={queries}, kv_heads={pairs}, tp={tp}" in str(caught.value)
    assert tp not in head_sizes(queries, pairs)


def candidates():
    """Yield the layouts that pass the gcd rule: 1411 of them with up to 64 query heads and 32 ranks."""
    for queries in range(1, 65):
        for pairs in range(1, queries + 1):
            for tp in range(1, 33):
                local_kv = pairs // gcd(pairs, tp)
                if queries % tp == 0 and queries % pairs == 0 and queries // tp % local_kv == 0:
                    yield queries, pairs, tp


def answer(queries, pairs, tp, rank, *, kv):
    try:
        return head_range(queries, pairs, tp, rank, kv=kv)
    except ConfigError:
        return None


def test_exactly_the_layouts_with_right_local_attention_are_accepted():
    """P-10, P-11: of 1411 layouts 1151 are accepted, and each local query head finds its own key/value head."""
    every = list(candidates())
    accepted = [row for row in every if answer(*row, 0, kv=True) is not None]
    assert (len(every), len(accepted)) == (1411, 1151)
    for queries, pairs, tp in accepted:
        held = []
        for rank in range(tp):
            first_q, stop_q = answer(queries, pairs, tp, rank, kv=False)
            first, stop = answer(queries, pairs, tp, rank, kv=True)
            local = (stop_q - first_q) // (stop - first)
            assert all(q // (queries // pairs) == first + (q - first_q) // local for q in range(first_q, stop_q))
            held += range(first, stop)
        assert sorted(held) == sorted(list(range(pairs)) * max(1, tp // pairs))


def test_refused_layouts_have_no_uniform_local_map():
    """P-10: the 260 that the gcd rule alone would let through compute wrong attention on some rank."""
    wrong = [row for row in candidates() if answer(*row, 0, kv=True) is None]
    assert len(wrong) == 260
    for queries, pairs, tp in wrong:
        groups, local_q = gcd(pairs, tp), queries // tp
        local_kv = pairs // groups
        firsts = [rank // (tp // groups) * local_kv for rank in range(tp)]
        assert any(
            (rank * local_q + q) // (queries // pairs) != firsts[rank] + q // (local_q // local_kv)
            for rank in range(tp)
            for q in range(local_q)
        )


def qkv(queries, pairs, size):
    return (
        Part("q", queries * size, heads=queries),
        Part("k", pairs * size, heads=pairs, kv=True),
        Part("v", pairs * size, heads=pairs, kv=True),
    )


@pytest.mark.parametrize("row", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("arrangement", ["apart", "fused", "grouped-by-pair"])
@pytest.mark.parametrize(
    "name", ["bf16", "fp8-tensor[]", "fp8-channel[N,1]", "fp8-channel[N]", "fp8-block64-2d", "awq-group64", "nvfp4"]
)
def test_weight_bias_scales_and_packed_codes_follow_the_same_heads(name, arrangement, row):
    """P-08, P-11, P-12, P-17: one rule for every stored tensor, also where pairs repeat."""
    queries, pairs, tp = row[:3]
    parts = qkv(queries, pairs, 64)
    orders = {
        "apart": None,
        "fused": Order(tuple((part.name, part.out) for part in parts)),
        "grouped-by-pair": Order((("q", queries // pairs * 64), ("k", 64), ("v", 64)), pairs),
    }
    setup = Setup(parts, 64, Placement.COLWISE, tp, orders[arrangement])
    assert broken(FORMATS[name], setup) == []


def physical_rows(setup):
    """Return the stored rows of each rank, part by part, from the cuts themselves."""
    world = world_of(FORMATS["bf16"], setup)
    rows = []
    for local in localized(setup):
        mine = []
        for part in local.parts:
            mine += pieces_of(world.unit(part.name), local, part, {})["weight"].slices[0].indices()
        rows.append(mine)
    return rows


def fused(queries, pairs, size, tp):
    parts = qkv(queries, pairs, size)
    return Setup(parts, 8, Placement.COLWISE, tp, Order(tuple((part.name, part.out) for part in parts)))


def test_fused_rows_of_every_rank_are_the_published_ones():
    """P-11, P-12, R026."""
    assert physical_rows(fused(8, 2, 1, 4)) == [[0, 1, 8, 10], [2, 3, 8, 10], [4, 5, 9, 11], [6, 7, 9, 11]]
    assert physical_rows(fused(8, 2, 1, 8)) == [
        [rank, 8 if rank < 4 else 9, 10 if rank < 4 else 11] for rank in range(8)
    ]  # fmt: skip
    assert physical_rows(fused(4, 2, 2, 2)) == [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    expected = [
        [*range(256), *range(512, 640), *range(768, 896)],
        [*range(256, 512), *range(640, 768), *range(896, 1024)],
    ]
    assert physical_rows(fused(8, 4, 64, 2)) == expected


def test_what_attention_keeps_follows_the_key_value_heads():
    """P-08, P-09: per-head state is cut between the same heads as k and v."""
    state = AttentionState("state", 8, 2, 16)
    spans = [localize(state, ranks)[0].parts[0] for ranks in Ranks.of(tp=8).all()]
    assert [part.heads.start for part in spans] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [(part.out.start, part.out.stop) for part in spans] == [(0, 16)] * 4 + [(16, 32)] * 4
    with pytest.raises(ConfigError, match="kv_heads=3, tp=2"):
        localize(AttentionState("state", 6, 3, 16), Ranks.of(tp=2))


def test_pairs_without_their_queries_are_refused():
    """P-08: the number of ranks that share a key/value head follows from the queries, so they must be named."""
    node = Linear("n", 8, (Part("k", 32, heads=2, kv=True),), Placement.COLWISE)
    with pytest.raises(ConfigError, match="without their query heads"):
        localize(node, Ranks.of(tp=2))


def test_experts_that_must_be_even_are_refused_with_both_numbers():
    """E-02: 8 experts on 4 ranks, and 10 where only even shares are allowed."""
    down = Linear("down", 8, (Part("", 8),), Placement.REPLICATED)
    eight, ten = (Experts("experts", count, down, down) for count in (8, 10))
    ranks = Ranks.of(ep=4, rank=1)
    assert [(one.experts.start, one.experts.stop) for one in localize(eight, ranks, experts="even")] == [(2, 4)] * 2
    with pytest.raises(ConfigError, match="10 experts do not divide by ep 4"):
        localize(ten, ranks, experts="even")


@pytest.mark.parametrize(
    ("count", "parts", "ranges"),
    [
        pytest.param(6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)], id="6-over-4"),
        pytest.param(5, 2, [(0, 3), (3, 5)], id="5-over-2"),
        pytest.param(2, 3, [(0, 1), (1, 2), (2, 2)], id="2-over-3"),
    ],
)
def test_experts_that_do_not_divide_go_to_the_first_ranks(count, parts, ranges):
    """R034."""
    assert [distribute(count, parts, index) for index in range(parts)] == ranges


def test_thirty_experts_on_eight_ranks_are_held_exactly_once():
    """R034."""
    ranges = [distribute(30, 8, index) for index in range(8)]
    assert [stop - start for start, stop in ranges] == [4] * 6 + [3] * 2
    assert [expert for start, stop in ranges for expert in range(start, stop)] == list(range(30))


def test_every_rank_of_a_job_is_made_once():
    setup = Setup((Part("", 8),), 8, Placement.COLWISE, 2, experts=3, ep=2)
    assert [ranks.rank for ranks in all_ranks(setup)] == [0, 1, 2, 3]
    assert [len(local.experts) for local in localized(setup)] == [2, 2, 1, 1]
    assert np.array_equal([local.n for local in localized(setup)], [4, 4, 4, 4])
