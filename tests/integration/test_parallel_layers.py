"""Layers over real rank processes (gloo): what the ranks compute together is what one rank computes alone (X-03)."""

import pytest
import torch
from torch.nn import functional

from steelyard import blueprint
from steelyard.blueprint import Part, Placement
from steelyard.collectives import Group
from support.numeric import assert_tokens_close
from support.ranks_layers import HEAD_DIM, block_nodes, decoder

HERE = "support.ranks_layers"


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


# --- Linear -----------------------------------------------------------------------------------------


def test_a_rowwise_bias_is_added_once(rank_pool):
    """P-05, P-06: [12] on both ranks, not [22]; unsummed [11] and [1]."""
    x, weight, bias = torch.ones(1, 2), torch.tensor([[1.0, 1.0]]), torch.tensor([10.0])
    got = rank_pool.values(f"{HERE}:row_parallel", 2, (x, weight, bias))
    assert [one["forward"] for one in got] == [[[12.0]], [[12.0]]]
    assert [one["partial"] for one in got] == [[[11.0]], [[1.0]]]


def test_a_rowwise_product_and_the_sum_of_its_partials_are_the_whole_product(rank_pool, rng):
    """P-05, P-06: with numbers that are not equal on the ranks."""
    x, weight = torch.randn(3, 5, 8, generator=rng), torch.randn(6, 8, generator=rng)
    bias = torch.randn(6, generator=rng)
    got = rank_pool.values(f"{HERE}:row_parallel", 4, (x, weight, bias))
    want = functional.linear(x, weight, bias)
    for one in got:
        torch.testing.assert_close(torch.tensor(one["forward"]), want, rtol=0, atol=1e-5)
    partials = torch.stack([torch.tensor(one["partial"]) for one in got])
    torch.testing.assert_close(partials.sum(0), want, rtol=0, atol=1e-5)


def test_a_gathered_product_stands_in_rank_order(rank_pool, rng):
    """P-07: out 4 on 2 ranks: width 2 if not gathered; gathered, the product of one process to 1e-6 on both."""
    x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((2, 3, 6), (4, 6), (4,)))
    want = functional.linear(x, weight, bias)
    for rank, (local, gathered) in enumerate(rank_pool.values(f"{HERE}:column_parallel", 2, (x, weight, bias))):
        assert local.shape == (2, 3, 2)
        torch.testing.assert_close(local, want[..., 2 * rank : 2 * rank + 2], rtol=0, atol=1e-6)
        torch.testing.assert_close(gathered, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("segments", [[], [("q",), ("k", "v")], [("q",), ("k",), ("v",)]], ids=["one", "two", "three"])
def test_the_parts_of_a_fused_linear_go_out_part_by_part(rank_pool, rng, world, segments):
    """P-08, P-12: each rank has its heads of each part; gathered, every part is whole before the next begins."""
    parts = (Part("q", 16, 4), Part("k", 8, 2, kv=True), Part("v", 8, 2, kv=True))
    node = blueprint.Linear("qkv", 6, parts, Placement.COLWISE, bias=True)
    weights = {part.name: torch.randn(part.out, 6, generator=rng) for part in parts}
    biases = {part.name: torch.randn(part.out, generator=rng) for part in parts}
    x = torch.randn(2, 3, 6, generator=rng)
    whole = {name: functional.linear(x, weights[name], biases[name]) for name in weights}
    for rank, (y, split, gathered) in enumerate(
        rank_pool.values(f"{HERE}:fused", world, (node, weights, biases, x, segments))
    ):
        q, kv = 16 // world, 4 if world == 4 else 8 // world
        first = (rank // (world // 2)) * 4
        want = [whole["q"][..., rank * q : (rank + 1) * q], *(whole[name][..., first : first + kv] for name in "kv")]
        for mine, theirs in zip(split, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        torch.testing.assert_close(y, torch.cat(want, -1), rtol=0, atol=1e-6)
        if world == 4:
            assert gathered is None
        else:
            torch.testing.assert_close(gathered, torch.cat([*whole.values()], -1), rtol=0, atol=1e-6)


def test_gathering_repeated_heads_is_refused_on_every_rank(rank_pool):
    """P-08: alike on all, so that none waits for a collective that others never enter."""
    parts = (Part("q", 4, 4), Part("k", 2, 2, kv=True))
    node = blueprint.Linear("qk", 6, parts, Placement.COLWISE)
    weights = {part.name: torch.zeros(part.out, 6) for part in parts}
    outcomes = rank_pool.run(f"{HERE}:gather", 4, (node, weights, torch.zeros(1, 6)))
    assert {(one.kind, one.text) for one in outcomes} == {
        (
            "ConfigError",
            "qk: 2 heads of 'k' are repeated over 4 ranks, so their outputs cannot be gathered; "
            "split() this rank's output instead",
        )
    }


# --- tables and heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["colwise", "rowwise", "replicated"])
def test_a_parallel_look_up_is_the_whole_look_up(rank_pool, rng, placement):
    """P-15: vocabulary 8, hidden 4, ids 0 7 3, on 2 ranks; by rows, by columns, and whole."""
    table, ids = torch.randn(8, 4, generator=rng), torch.tensor([0, 7, 3])
    for got in rank_pool.values(f"{HERE}:lookup", 2, (table, ids, placement)):
        assert torch.equal(got, functional.embedding(ids, table))


@pytest.mark.parametrize("placement", ["colwise", "rowwise"])
def test_rows_of_several_tables_are_added_before_they_are_made_whole(rank_pool, rng, placement):
    """B-06: words, positions and token types need one collective, not three."""
    tables = [torch.randn(size, 4, generator=rng) for size in (8, 6, 2)]
    ids = [torch.randint(0, len(table), (2, 5), generator=rng) for table in tables]
    want = sum(functional.embedding(one, table) for one, table in zip(ids, tables, strict=True))
    for got in rank_pool.values(f"{HERE}:lookup_added", 2, (tables, ids, placement)):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("vocabulary", "world"), [(11, 2), (10, 3), (10, 4), (5, 4), (12, 4)])
def test_a_padded_vocabulary_looks_up_and_projects_like_a_whole_one(rank_pool, rng, vocabulary, world):
    """P-14: padding rows are nobody's id and nobody's logit, also where a rank holds nothing else (5 over 4)."""
    table, x = torch.randn(vocabulary, 6, generator=rng), torch.randn(2, 3, 6, generator=rng)
    ids = torch.arange(vocabulary).repeat(2).reshape(2, -1)
    for got in rank_pool.values(f"{HERE}:lookup", world, (table, ids, "colwise")):
        assert torch.equal(got, functional.embedding(ids, table))
    for logits, width in rank_pool.values(f"{HERE}:head", world, (table, x)):
        assert width == -(-vocabulary // world)
        assert logits.shape[-1] == vocabulary
        torch.testing.assert_close(logits, x @ table.t(), rtol=0, atol=1e-6)


def test_an_id_outside_the_vocabulary_is_refused_on_every_rank(rank_pool):
    """P-15: also by the ranks whose rows it is far from; a zero vector would go on in silence."""
    for placement in ("colwise", "rowwise"):
        outcomes = rank_pool.run(f"{HERE}:lookup", 2, (torch.zeros(8, 4), torch.tensor([8]), placement))
        assert {(one.kind, one.text) for one in outcomes} == {
            ("IndexError", "table: id 8 is outside a vocabulary of 8")
        }


# --- a whole layer of a decoder ---------------------------------------------------------------------


def layer_by_hand(heads, weights, biases, norms, x):
    """Compute the decoder layer in float64 from the whole tensors, with torch alone."""
    q_heads, kv_heads = heads
    w = {f"{name}{part}": one.double() for name, parts in weights.items() for part, one in parts.items()}
    b = {f"{name}{part}": one.double() for name, parts in biases.items() for part, one in parts.items()}
    x, norms = x.double(), [one.double() for one in norms]

    def rms(y, weight):
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    y, (batch, tokens) = rms(x, norms[0]), x.shape[:2]
    q, k, v = (y @ w[f"qkv{part}"].t() + b[f"qkv{part}"] for part in "qkv")
    mixed = torch.zeros(batch, tokens, q_heads * HEAD_DIM, dtype=torch.float64)
    for head in range(q_heads):
        mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        shared = head // (q_heads // kv_heads)
        theirs = slice(shared * HEAD_DIM, (shared + 1) * HEAD_DIM)
        scores = q[..., mine] @ k[..., theirs].transpose(1, 2) / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        mixed[..., mine] = scores.softmax(-1) @ v[..., theirs]
    x = x + mixed @ w["o"].t() + b["o"]
    y = rms(x, norms[1])
    gate = y @ w["gate_upgate"].t()
    return x + (gate * torch.sigmoid(gate) * (y @ w["gate_upup"].t())) @ w["down"].t() + b["down"]


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)], ids=["grouped", "full", "single"])
def test_attention_and_mlp_on_several_ranks_equal_one_rank(rank_pool, rng, heads):
    """P-25, P-08: on 2 ranks, and on 4, where 2 key/value heads are held twice; 5 tokens, float32, within 1e-5."""
    hidden, inner = 16, 24
    nodes = block_nodes(hidden, *heads, inner)
    weights = {
        name: {part.name: torch.randn(part.out, node.in_features, generator=rng) / 4 for part in node.parts}
        for name, node in nodes.items()
    }
    biases = {
        name: {part.name: torch.randn(part.out, generator=rng) for part in node.parts}
        for name, node in nodes.items()
        if node.bias
    }
    norms = (torch.rand(hidden, generator=rng) + 0.5, torch.rand(hidden, generator=rng) + 0.5)
    x = torch.randn(2, 5, hidden, generator=rng)
    alone = decoder(heads, weights, biases, norms, x, Group())
    assert_tokens_close(alone, layer_by_hand(heads, weights, biases, norms, x), min_cos=1 - 1e-9, max_rel=1e-5)
    for world in (2, 4):
        for split_qkv in (False, True):
            args = (heads, weights, biases, norms, x, split_qkv)
            for got in rank_pool.values(f"{HERE}:block", world, args):
                assert (got - alone).abs().max() < 1e-5
                assert_tokens_close(got, alone, min_cos=1 - 1e-9, max_rel=1e-5)
