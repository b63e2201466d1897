"""Routing, and tokens sorted by expert and put back: against loops, and whole blocks against transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from steelyard.collectives import Groups
from steelyard.experts import DenseExperts, Experts
from steelyard.local import LocalExperts, localize
from steelyard.ranks import Ranks
from steelyard.torch import ops
from support.experts import node_of

HIDDEN, INNER, COUNT, TOP_K = 20, 12, 6, 3


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


# --- route -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_a_tokens_experts_are_the_largest_of_a_softmax_over_all(rng, top_k, renormalize):
    """E-31: the heaviest first; the sum is 1 only where it is asked for, or where every expert is taken."""
    logits = torch.randn(50, COUNT, generator=rng) * 3
    ids, weights = ops.route(logits, top_k, renormalize=renormalize)
    assert (ids.dtype, weights.dtype, ids.shape, weights.shape) == (torch.int64, torch.float32, *[(50, top_k)] * 2)
    for token, row in enumerate(logits.double().numpy()):
        likely = np.exp(row - row.max())
        likely /= likely.sum()
        order = np.argsort(-likely)[:top_k]
        want = likely[order] / (likely[order].sum() if renormalize else 1)
        assert ids[token].tolist() == order.tolist()
        np.testing.assert_allclose(weights[token].numpy(), want, rtol=0, atol=1e-6)


def test_one_choice_that_is_renormalized_weighs_one(rng):
    """E-31: top-k 1: where it is not, it weighs what the softmax says."""
    logits = torch.randn(8, 4, generator=rng)
    assert ops.route(logits, 1, renormalize=True)[1].tolist() == [[1.0]] * 8
    assert ops.route(logits, 1, renormalize=False)[1].max() < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_is_done_in_float32(rng, dtype):
    """Logits as they come: the same experts and weights as of the same numbers in float32."""
    logits = torch.randn(64, COUNT, generator=rng).to(dtype)
    for mine, theirs in zip(
        ops.route(logits, 2, renormalize=True), ops.route(logits.float(), 2, renormalize=True), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_no_token_has_no_experts():
    """E-31."""
    ids, weights = ops.route(torch.zeros(0, 4), 2, renormalize=True)
    assert (ids.shape, weights.shape) == ((0, 2), (0, 2))


def test_more_choices_than_experts_are_refused():
    """E-31: a token cannot go through more experts than there are."""
    with pytest.raises(RuntimeError):
        ops.route(torch.zeros(3, 2), 3, renormalize=True)


# --- sort and permute --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(st.integers(-1, 9), min_size=k, max_size=k), min_size=0, max_size=12).map(
            lambda rows: (k, rows)
        )
    ),
    first=st.integers(0, 9),
    count=st.integers(0, 6),
)
def test_places_are_sorted_by_expert_and_then_by_token(ids, first, count):
    """E-02: those of other ranks' experts come last; every place stands once; counts are the rank's own experts'."""
    top_k, rows = ids
    given_ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, top_k)
    places, counts = ops.sort_by_expert(given_ids, first, count)
    flat = given_ids.flatten().tolist()
    mine = [place for expert in range(first, first + count) for place, one in enumerate(flat) if one == expert]
    others = [place for place, one in enumerate(flat) if not first <= one < first + count]
    assert places.tolist() == mine + others
    assert counts.tolist() == [flat.count(expert) for expert in range(first, first + count)]


def test_tokens_of_one_expert_keep_their_order_however_many_there_are():
    """A sort that is not stable keeps short runs in order by chance; 5,000 places do not."""
    ids = torch.zeros(5000, 1, dtype=torch.int64)
    ids[::3] = 1
    places, counts = ops.sort_by_expert(ids, 0, 2)
    want = [*(place for place in range(5000) if place % 3), *range(0, 5000, 3)]
    assert places.tolist() == want
    assert counts.tolist() == [3333, 1667]


def test_a_place_is_a_token_and_a_slot():
    x = torch.arange(6.0).reshape(3, 2)
    assert ops.permute(x, torch.tensor([5, 0, 3, 2]), 2).tolist() == [[4, 5], [0, 1], [2, 3], [2, 3]]
    assert ops.permute(x, torch.tensor([], dtype=torch.int64), 2).shape == (0, 2)


# --- combine -----------------------------------------------------------------------------------------------------


def test_outputs_are_weighed_and_added_to_their_tokens(rng):
    """A place without an output counts as zeros."""
    y, places = torch.randn(4, 5, generator=rng), torch.tensor([4, 0, 3, 1])
    weights = torch.rand(3, 2, generator=rng)
    found = ops.combine(y, places, weights)
    want = torch.zeros(3, 5)
    for row, place in enumerate(places.tolist()):
        want[place // 2] += y[row] * weights[place // 2, place % 2]
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 2, 5), (3, 2, 5), (3, 1, 5), (2, 2, 0)])
def test_no_outputs_are_zeros(shape):
    """E-31: no token; or tokens, none of which is this rank's."""
    tokens, top_k, hidden = shape
    found = ops.combine(torch.zeros(0, hidden), torch.zeros(0, dtype=torch.int64), torch.ones(tokens, top_k))
    assert torch.equal(found, torch.zeros(tokens, hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_a_tokens_sum_does_not_depend_on_the_tokens_beside_it(rng, dtype, top_k):
    """Equal bits in any batch, at any place in it, and every time: replicas compute the same tokens in other batches."""
    tokens, hidden = 64, 48
    y = torch.randn(tokens * top_k, hidden, generator=rng).to(dtype)
    weights = torch.rand(tokens, top_k, generator=rng)
    everything = torch.arange(tokens * top_k)
    together = ops.combine(y, everything, weights)
    assert together.dtype == dtype
    mixed = torch.randperm(tokens * top_k, generator=rng)
    assert torch.equal(ops.combine(y[mixed], everything[mixed], weights), together)
    for token in (0, 17, 63):
        rows = slice(token * top_k, (token + 1) * top_k)
        alone = ops.combine(y[rows], torch.arange(top_k), weights[token : token + 1])
        assert torch.equal(alone[0], together[token])


def test_a_tokens_outputs_are_added_in_the_order_of_its_experts(rng):
    """One after the other in float32: the bits of a plain loop."""
    y, weights = torch.randn(64 * 8, 48, generator=rng), torch.rand(64, 8, generator=rng)
    want = torch.zeros(64, 48)
    for slot in range(8):
        want = want + y.view(64, 8, 48)[:, slot] * weights[:, slot : slot + 1]
    assert torch.equal(ops.combine(y, torch.arange(64 * 8), weights), want)


def test_a_large_part_and_a_small_one_are_added_in_float32():
    """1 + 2**-9 is lost in bfloat16 between two additions, and not where both come before the rounding."""
    y = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    assert ops.combine(y, torch.arange(3), torch.ones(1, 3)).tolist() == [[1.0 + 2.0**-7]]


def test_weights_keep_their_float32():
    """Two outputs that nearly cancel: 0.501 in bfloat16 is 0.5, and nothing would be left."""
    y = torch.tensor([[256.0], [-256.0]], dtype=torch.bfloat16)
    found = ops.combine(y, torch.arange(2), torch.tensor([[0.501, 0.5]]))
    assert found.tolist() == torch.tensor([[0.256]], dtype=torch.bfloat16).tolist()


# --- whole blocks, against transformers --------------------------------------------------------------------------


def ours(router, gate_up, down, x, *, top_k, renormalize):
    """Return what the layers compute of tokens, on one rank after the other of three, added."""
    count, both, hidden = gate_up.shape
    node = node_of(count, hidden, both // 2, top_k=top_k, activation="silu")
    tokens = x.reshape(-1, hidden)
    ids, weights = ops.route(functional.linear(tokens, router), top_k, renormalize=renormalize)
    total = torch.zeros_like(tokens)
    for ranks in Ranks.of(ep=3).all():
        local = LocalExperts(node, *localize(node, ranks))
        held = slice(local.experts.start, local.experts.stop)
        kernel = DenseExperts({"weight": gate_up[held]}, {"weight": down[held]}, local)
        total += Experts(node, local, kernel, Groups())(tokens, ids, weights)
    return total.reshape(x.shape)


@pytest.mark.parametrize(
    ("model", "renormalize"),
    [("qwen3_moe", True), ("qwen3_moe", False), ("qwen2_moe", True), ("qwen2_moe", False), ("mixtral", True)],
)
def test_a_sparse_block_computes_what_transformers_does(rng, model, renormalize):
    """E-31: Qwen3-MoE, Qwen2-MoE and Mixtral, tiny and random, in float32; Mixtral always renormalizes."""
    import transformers

    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "hidden_act": "silu", "num_attention_heads": 2}
    match model:
        case "mixtral":
            config = transformers.MixtralConfig(**sizes, num_local_experts=COUNT, intermediate_size=INNER)
            block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)
        case "qwen3_moe":
            config = transformers.Qwen3MoeConfig(
                **sizes, num_experts=COUNT, moe_intermediate_size=INNER, norm_topk_prob=renormalize
            )
            block = transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
        case "qwen2_moe":
            config = transformers.Qwen2MoeConfig(
                **sizes, num_experts=COUNT, moe_intermediate_size=INNER, norm_topk_prob=renormalize,
                shared_expert_intermediate_size=16,
            )  # fmt: skip
            block = transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.5)
    x = torch.randn(2, 9, HIDDEN, generator=rng)
    block.eval()
    with torch.inference_mode():
        want = block(x)
        want = want[0] if isinstance(want, tuple) else want
        found = ours(
            block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj, x,
            top_k=TOP_K, renormalize=renormalize,
        )  # fmt: skip
        if model == "qwen2_moe":
            shared = block.shared_expert(x)
            found = found + torch.sigmoid(block.shared_expert_gate(x)) * shared
    assert want.abs().max() > 0.5
    torch.testing.assert_close(found, want, rtol=0, atol=2e-5)
