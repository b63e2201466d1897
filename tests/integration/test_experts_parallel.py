"""Routed experts over real rank processes (gloo): the ranks together compute what one process computes (X-03)."""

import numpy as np
import pytest
import torch

from steelyard.blueprint import Linear, Part, Placement
from support.experts import FORMS, mixture, node_of, stored_as, tokens_of, wholes_of
from support.loading import write_toy

HERE = "support.ranks_experts"

# Every legal (tp, ep, moe_tp) of up to four ranks, and the members of each group: dense layers, experts, replicas.
ALONE = "0|1|2|3"
GROUPS = {
    (2, 1, 1, 1): ("0|1", "0|1", "0|1"),
    (2, 1, 2, 1): ("0|1", "01", "01"),
    (2, 1, 1, 2): ("0|1", "01", "01"),
    (2, 2, 1, 2): ("01", "01", "0|1"),
    (2, 2, 2, 1): ("01", "01", "0|1"),
    (3, 1, 1, 1): ("0|1|2", "0|1|2", "0|1|2"),
    (3, 1, 3, 1): ("0|1|2", "012", "012"),
    (3, 1, 1, 3): ("0|1|2", "012", "012"),
    (3, 3, 1, 3): ("012", "012", "0|1|2"),
    (3, 3, 3, 1): ("012", "012", "0|1|2"),
    (4, 1, 1, 1): (ALONE, ALONE, ALONE),
    (4, 1, 4, 1): (ALONE, "0123", "0123"),
    (4, 1, 2, 2): (ALONE, "0123", "0123"),
    (4, 1, 1, 4): (ALONE, "0123", "0123"),
    (4, 2, 1, 2): ("01|23", "01|23", ALONE),
    (4, 2, 4, 1): ("01|23", "0123", "02|13"),
    (4, 2, 2, 2): ("01|23", "0123", "02|13"),
    (4, 2, 1, 4): ("01|23", "0123", "02|13"),
    (4, 4, 4, 1): ("0123", "0123", ALONE),
    (4, 4, 2, 2): ("0123", "0123", ALONE),
    (4, 4, 1, 4): ("0123", "0123", ALONE),
}


def is_legal(world, tp, ep, moe_tp):
    """Return whether sizes fit a job, by the rule as it is written down."""
    return world % tp == 0 and (ep * moe_tp == world or (ep == 1 and moe_tp == tp))


def test_the_table_of_groups_is_every_legal_job():
    sizes = range(1, 5)
    legal = {
        (world, tp, ep, moe_tp)
        for world in (2, 3, 4)
        for tp in sizes
        for ep in sizes
        for moe_tp in sizes
        if is_legal(world, tp, ep, moe_tp)
    }
    assert set(GROUPS) == legal


@pytest.mark.parametrize(("world", "tp", "ep", "moe_tp"), GROUPS)
def test_each_group_has_its_ranks_in_order(rank_pool, world, tp, ep, moe_tp):
    """P-07, E-03: who answers when a rank gathers, and as which one it stands there."""
    found = rank_pool.values(f"{HERE}:members", world, (tp, ep, moe_tp))
    for kind, wanted in zip(("tensor", "experts", "replicas"), GROUPS[world, tp, ep, moe_tp], strict=True):
        for rank, groups in enumerate(found):
            (mine,) = ([int(one) for one in group] for group in wanted.split("|") if str(rank) in group)
            assert groups[kind] == (mine.index(rank), mine), (kind, rank)


@pytest.mark.parametrize("sizes", [(1, 1, 3), (4, 1, 3), (2, 2, 1), (3, 4, 1)])
def test_sizes_that_make_no_job_are_refused_alike_on_every_rank(rank_pool, sizes):
    """P-07, E-03: before any group is made, so that no rank waits for another."""
    assert not is_legal(4, *sizes)
    outcomes = rank_pool.run(f"{HERE}:members", 4, sizes)
    assert {one.kind for one in outcomes} == {"ConfigError"}
    assert len({one.text for one in outcomes}) == 1


def test_a_second_load_makes_no_second_groups_and_a_second_job_does(rank_pool):
    """The workers are reused, with a new process group each time."""
    for _ in range(2):
        assert rank_pool.values(f"{HERE}:same_groups", 4, (2, 2, 2)) == [(True, 2)] * 4


@pytest.mark.parametrize("counts", [[1, 3, 0, 2], [0, 0, 0, 0], [0, 0, 4, 0], [2, 2, 2, 2]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_rows_are_gathered_from_ranks_that_have_unlike_numbers_of_them(rank_pool, counts, dtype):
    """P-07: in rank order; each rank learns where its own stand; nothing of the padding is left."""
    values = [[100 * rank + 2 * row, 100 * rank + 2 * row + 1] for rank, n in enumerate(counts) for row in range(n)]
    numbers = [10 * rank + row for rank, n in enumerate(counts) for row in range(n)]
    values = torch.tensor(values, dtype=torch.int64).reshape(-1, 2).to(vars(torch)[dtype]).tolist()
    for rank, (found, ids, own, shape) in enumerate(rank_pool.values(f"{HERE}:rows", 4, (counts, dtype))):
        assert (found, ids, shape) == (values, numbers, [sum(counts), 2])
        assert own == [sum(counts[:rank]), sum(counts[: rank + 1])]


# --- the layer ---------------------------------------------------------------------------------------------------

ONE_REPLICA = [
    (2, {"tp": 2}),
    (2, {"tp": 2, "ep": 2}),
    (4, {"tp": 4, "ep": 4}),
    (4, {"tp": 4, "ep": 2, "moe_tp": 2}),
    (4, {"tp": 4, "moe_tp": 4}),
]
REPLICAS = [
    (2, {"tp": 1, "ep": 2}),
    (4, {"tp": 1, "ep": 4}),
    (4, {"tp": 2, "ep": 4}),
    (4, {"tp": 2, "ep": 2, "moe_tp": 2}),
    (4, {"tp": 1, "ep": 2, "moe_tp": 2}),
    (4, {"tp": 1, "ep": 1, "moe_tp": 4}),
    (4, {"tp": 2, "ep": 1, "moe_tp": 2}),
]


def name_of(value):
    return "-".join(f"{key}{size}" for key, size in value.items()) if isinstance(value, dict) else str(value)


def run(pool, folder, world, sizes, batches, *, node=None, form="split", order=None):
    """Write a layer and return what every rank made of its replica's tokens."""
    node = node or node_of(6, bias=True)
    write_toy(folder, stored_as(form, wholes_of(node)))
    return pool.values(f"{HERE}:layer_on_ranks", world, (str(folder), node, form, batches, sizes, order))


@pytest.mark.parametrize(("world", "sizes"), ONE_REPLICA, ids=name_of)
@pytest.mark.parametrize("order", [None, ("up", "gate")], ids=["core", "up-first"])
def test_ranks_that_share_their_tokens_compute_the_whole_layer(rank_pool, tmp_path, world, sizes, order):
    """E-01, E-03, E-31, P-05, P-07: equal numbers on every rank; down's bias once an expert, however many ranks share it."""
    node = node_of(6, bias=True)
    batch = tokens_of(node, 7)
    for got in run(rank_pool, tmp_path, world, sizes, [batch], order=order):
        assert got["out"] == mixture(wholes_of(node), *batch)


@pytest.mark.parametrize(("world", "sizes"), REPLICAS, ids=name_of)
@pytest.mark.parametrize("form", ["split", "in_first"])
def test_replicas_bring_their_own_tokens_and_take_their_own_back(rank_pool, tmp_path, world, sizes, form):
    """E-03, P-05, P-07, R073: one has none, the others unlike numbers; each gets what one process computes of its own."""
    node = node_of(6, bias=True)
    counts = [3, 0, 5, 1][: world // sizes["tp"]]
    batches = [tokens_of(node, count, seed) for seed, count in enumerate(counts)]
    for rank, got in enumerate(run(rank_pool, tmp_path, world, sizes, batches, form=form)):
        batch = batches[rank // sizes["tp"]]
        assert got["out"] == mixture(wholes_of(node), *batch)
        assert got["shape"] == [len(batch[0]), 8]


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, {"tp": 1, "ep": 2}), (4, {"tp": 2, "ep": 2, "moe_tp": 2})], ids=name_of
)
def test_replicas_with_the_same_tokens_get_the_same_bits(rank_pool, tmp_path, world, sizes):
    """P-07: a batch of sequences, as a model calls it; and none at all on any rank."""
    node = node_of(6, bias=True)
    batch = tuple(one.unflatten(0, (2, 3)) for one in tokens_of(node, 6))
    want = np.reshape(mixture(wholes_of(node), *(one.flatten(0, 1) for one in batch)), (2, 3, 8)).tolist()
    batches = [batch] * (world // sizes["tp"])
    assert [got["out"] for got in run(rank_pool, tmp_path / "some", world, sizes, batches)] == [want] * world
    nothing = [tokens_of(node, 0)] * (world // sizes["tp"])
    assert [got["shape"] for got in run(rank_pool, tmp_path / "none", world, sizes, nothing)] == [[0, 8]] * world


def test_more_ranks_than_experts_is_a_rank_that_adds_nothing(rank_pool, tmp_path):
    """E-31, R034: two experts on four ranks; those without any still gather and add, or the others would wait."""
    node = node_of(2, bias=True)
    batches = [tokens_of(node, count, seed) for seed, count in enumerate([2, 0, 3, 1])]
    found = run(rank_pool, tmp_path, 4, {"tp": 1, "ep": 4}, batches, node=node)
    assert [got["held"] for got in found] == [[0, 1], [1, 2], [2, 2], [2, 2]]
    assert [got["w13"][0] for got in found] == [1, 1, 0, 0]
    assert [got["out"] for got in found] == [mixture(wholes_of(node), *batch) for batch in batches]


@pytest.mark.parametrize("form", FORMS)
def test_world_4_tp_2_ep_2_moe_tp_2(rank_pool, tmp_path, form):
    """R073, E-08: the second pair of ranks holds experts 2 and 3, half of the rows each; every stored form computes alike."""
    node = node_of(4, top_k=1)
    batches = [tokens_of(node, 4, 0), tokens_of(node, 6, 1)]
    found = run(rank_pool, tmp_path, 4, {"tp": 2, "ep": 2, "moe_tp": 2}, batches, node=node, form=form)
    assert [(got["held"], got["first"]) for got in found] == [
        ([0, 2], True), ([0, 2], False), ([2, 4], True), ([2, 4], False)
    ]  # fmt: skip
    assert {tuple(got["w13"]) for got in found} == {(2, 4, 8)}
    assert [got["out"] for got in found] == [mixture(wholes_of(node), *batches[rank // 2]) for rank in range(4)]


def test_uneven_experts_over_ranks_equal_one_process(rank_pool, tmp_path):
    """R034, E-02: five experts on two ranks, three and two; what a rank says of itself."""
    node = node_of(5)
    batch = tokens_of(node, 8)
    found = run(rank_pool, tmp_path, 2, {"tp": 2, "ep": 2}, [batch], node=node)
    assert [got["held"] for got in found] == [[0, 3], [3, 5]]
    assert [got["out"] for got in found] == [mixture(wholes_of(node), *batch)] * 2
    assert found[1]["repr"] == "5 experts (here 3 to 4), 2 a token, inner 4 (here 4), relu"


def test_a_wrong_number_of_experts_a_token_is_refused_before_ranks_wait(rank_pool, tmp_path):
    """P-07: alike on every rank."""
    node = node_of(4)
    write_toy(tmp_path, stored_as("split", wholes_of(node)))
    outcomes = rank_pool.run(f"{HERE}:other_top_k", 2, (str(tmp_path), node))
    assert {(one.kind, one.text) for one in outcomes} == {("LoadError", "experts: 3 experts a token, the node has 2")}


# --- a dense layer whose kernel wants its parts in another order ---------------------------------------------------


@pytest.mark.parametrize("order", [("v", "k", "q"), ("k", "q", "v")], ids="".join)
def test_a_linear_is_gathered_in_the_nodes_order(rank_pool, tmp_path, order):
    """P-07, P-12, E-01: q, k, v with biases on two ranks; forward, split and gathered, each as the node has it."""
    rng = np.random.default_rng(3)
    parts = (Part("q", 16, 4), Part("k", 8, 2, kv=True), Part("v", 8, 2, kv=True))
    node = Linear("qkv", 6, parts, Placement.COLWISE, bias=True)
    whole = {part.name: rng.integers(-9, 10, (part.out, 6)).astype(np.float32) for part in parts}
    bias = {part.name: rng.integers(-9, 10, part.out).astype(np.float32) for part in parts}
    together = {"weight": np.concatenate([*whole.values()]), "bias": np.concatenate([*bias.values()])}
    write_toy(tmp_path, {f"qkv.{name}": one for name, one in together.items()})
    x = rng.integers(-3, 4, (2, 3, 6)).astype(np.float32)
    outputs = [x @ whole[name].T + bias[name] for name in "qkv"]
    args = (str(tmp_path), node, torch.from_numpy(x), order)
    for rank, (y, split, gathered) in enumerate(rank_pool.values(f"{HERE}:linear_on_ranks", 2, args)):
        mine = [np.split(one, 2, -1)[rank] for one in outputs]
        assert [one.tolist() for one in split] == [one.tolist() for one in mine]
        assert y.tolist() == np.concatenate(mine, -1).tolist()
        assert gathered.tolist() == np.concatenate(outputs, -1).tolist()
