"""Ops against formulas written out here and against transformers."""

import math

import pytest
import torch
from torch.nn import functional

from steelyard import ops
from steelyard.errors import ConfigError

ULP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # one unit in the last place, as a share
DTYPES = pytest.mark.parametrize("dtype", ULP, ids=["float32", "bfloat16", "float16"])


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


# --- activations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh"])
def test_an_activation_is_the_one_that_transformers_means(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001)
    torch.testing.assert_close(ops.activation(name)(x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)


def test_gelu_is_the_exact_form():
    """B-10: erf, not its tanh approximation, which is another function."""
    x = torch.linspace(-4, 4, 101)
    exact = torch.tensor([value * 0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()])
    torch.testing.assert_close(ops.activation("gelu")(x), exact, rtol=0, atol=1e-6)
    assert (ops.activation("gelu_new")(x) - exact).abs().max() > 1e-4


def test_an_unknown_activation_lists_the_known_ones():
    """M-18: activations."""
    with pytest.raises(ConfigError) as caught:
        ops.activation("quick_gelu")
    assert str(caught.value) == (
        "activation 'quick_gelu' is not known; there are gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish, tanh"
    )


# --- norms ------------------------------------------------------------------------------------------


def by_hand(x, weight, bias, eps, *, centred):
    """Compute a norm in float64."""
    wide = x.double()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return wide if bias is None else wide + bias.double()


@DTYPES
@pytest.mark.parametrize("weights", ULP, ids=["float32", "bfloat16", "float16"])
def test_norms_are_computed_in_float32_whatever_goes_in(rng, dtype, weights):
    x = (torch.randn(3, 7, 48, generator=rng) * 5 + 2).to(dtype)
    weight = (torch.randn(48, generator=rng) + 2).to(weights)
    bias = torch.randn(48, generator=rng).to(weights)
    for got, want in (
        (ops.layer_norm(x, weight, bias, 1e-5), by_hand(x, weight, bias, 1e-5, centred=True)),
        (ops.layer_norm(x, weight, None, 1e-5), by_hand(x, weight, None, 1e-5, centred=True)),
        (ops.rms_norm(x, weight, 1e-5), by_hand(x, weight, None, 1e-5, centred=False)),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2 * ULP[dtype], atol=2e-6)


def test_norms_are_those_of_torch_and_transformers(rng):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, weight, bias = torch.randn(5, 16, generator=rng), torch.randn(16, generator=rng), torch.randn(16, generator=rng)
    assert torch.equal(ops.layer_norm(x, weight, bias, 1e-12), functional.layer_norm(x, (16,), weight, bias, 1e-12))
    theirs = LlamaRMSNorm(16, eps=1e-6)
    theirs.weight.data.copy_(weight)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), theirs(x).detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", [ops.rms_norm, lambda x, weight, eps: ops.layer_norm(x, weight, None, eps)])
def test_large_inputs_in_float16_do_not_overflow(norm):
    """A square of 300 is past the largest float16."""
    x = torch.tensor([[300.0, -300.0, 100.0, -100.0]], dtype=torch.float16)
    want = x.float() / x.float().square().mean().sqrt()
    torch.testing.assert_close(norm(x, torch.ones(4, dtype=torch.float16), 1e-6).float(), want, rtol=1e-3, atol=0)


# --- attention --------------------------------------------------------------------------------------


def attention_by_hand(q, k, v, mask=None, scale=None):
    """Attend head by head in float64; query head i uses key/value head i // (h / g)."""
    heads = []
    for head in range(q.shape[1]):
        mine = head // (q.shape[1] // k.shape[1])
        scores = q[:, head].double() @ k[:, mine].double().transpose(-1, -2)
        scores = scores * (scale if scale is not None else q.shape[-1] ** -0.5)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, mine].double())
    return torch.stack(heads, 1)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_gives_each_query_head_its_own_key_value_head(rng, kv_heads, scale):
    """P-10: query heads that follow one another share a key/value head, with a mask, causal, and without either."""
    q = torch.randn(2, 4, 5, 8, generator=rng)
    k, v = torch.randn(2, 2, kv_heads, 5, 8, generator=rng)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, :, 3:] = False
    causal = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    for got, want in (
        (ops.attention(q, k, v, scale=scale), attention_by_hand(q, k, v, scale=scale)),
        (ops.attention(q, k, v, mask=mask, scale=scale), attention_by_hand(q, k, v, mask, scale)),
        (ops.attention(q, k, v, is_causal=True, scale=scale), attention_by_hand(q, k, v, causal, scale)),
    ):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


def test_attention_takes_what_is_added_to_the_scores(rng):
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=rng)
    kept = torch.tensor([True, True, False, True])[None, None, None]
    added = torch.zeros(1, 1, 1, 4).masked_fill(~kept, -torch.inf)
    torch.testing.assert_close(ops.attention(q, k, v, mask=added), ops.attention(q, k, v, mask=kept))


def test_query_heads_that_do_not_divide_are_refused(rng):
    """P-09: 6 query heads and 4 key/value heads have no sharing."""
    q, k = torch.randn(1, 6, 3, 4, generator=rng), torch.randn(1, 4, 3, 4, generator=rng)
    with pytest.raises(ValueError, match=r"^6 query heads are not a multiple of 4 key/value heads$"):
        ops.attention(q, k, k)


def test_padding_changes_nothing_and_a_text_of_padding_is_not_nan(rng):
    q, k, v = torch.randn(3, 2, 2, 5, 8, generator=rng)
    mask = ops.padding_mask(torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]))
    assert mask.shape == (2, 1, 1, 5)
    # Some of torch's kernels give zeros where nothing may be attended to, others NaN: no row is left without a token.
    assert mask[:, 0, 0].tolist() == [[True, True, True, False, False], [True] * 5]
    got = ops.attention(q, k, v, mask=mask)
    alone = ops.attention(q[:1, :, :3], k[:1, :, :3], v[:1, :, :3])
    torch.testing.assert_close(got[:1, :, :3], alone, rtol=0, atol=1e-6)
    assert got.isfinite().all()


# --- positions and pooling --------------------------------------------------------------------------


def test_positions_count_from_behind_the_padding_id():
    """B-09: pad 1, ids 0 5 6 1 have the positions 2 3 4 1; padding in front and inside is skipped too."""
    ids = torch.tensor([[0, 5, 6, 1], [1, 1, 0, 5], [0, 1, 5, 1]])
    got = ops.positions_from_padding(ids, 1)
    assert got.tolist() == [[2, 3, 4, 1], [1, 1, 2, 3], [2, 1, 3, 1]]
    assert got.dtype == torch.int64
    assert ops.positions_from_padding(ids.int(), 1).dtype == torch.int64


def test_positions_are_those_of_transformers(rng):
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    ids = torch.randint(0, 6, (8, 12), generator=rng)
    for pad in range(4):
        theirs = RobertaEmbeddings.create_position_ids_from_input_ids(ids, pad)
        assert torch.equal(ops.positions_from_padding(ids, pad), theirs)


HIDDEN = torch.tensor([[[1.0, -8.0], [3.0, -4.0], [100.0, 100.0]], [[2.0, 2.0], [4.0, -1.0], [9.0, 3.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("pool", "want"),
    [
        (ops.mean_pool, [[2.0, -6.0], [5.0, 4 / 3]]),
        (ops.mean_sqrt_len_pool, [[4 / 2**0.5, -12 / 2**0.5], [15 / 3**0.5, 4 / 3**0.5]]),
        (ops.max_pool, [[3.0, -4.0], [9.0, 3.0]]),
        (ops.cls_pool, [[1.0, -8.0], [2.0, 2.0]]),
        (ops.last_token_pool, [[3.0, -4.0], [9.0, 3.0]]),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pooling_reads_no_padding_on_either_side(pool, want, side):
    hidden, mask = HIDDEN, MASK
    if side == "left":
        hidden = torch.stack([HIDDEN[0].roll(1, 0), HIDDEN[1]])
        mask = torch.stack([MASK[0].roll(1, 0), MASK[1]])
    torch.testing.assert_close(pool(hidden, mask), torch.tensor(want))


@pytest.mark.parametrize(
    "pool", [ops.mean_pool, ops.mean_sqrt_len_pool, ops.max_pool, ops.cls_pool, ops.last_token_pool]
)
@DTYPES
def test_pooling_a_text_of_padding_gives_numbers(pool, dtype):
    got = pool(HIDDEN.to(dtype), torch.zeros_like(MASK))
    assert got.dtype == dtype
    assert got.isfinite().all()


def test_normalised_vectors_have_length_one(rng):
    x = torch.randn(3, 4, 9, generator=rng)
    got = ops.normalize(x)
    torch.testing.assert_close(got, x / x.square().sum(-1, keepdim=True).sqrt())
    assert ops.normalize(torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_a_mask_of_floats_is_refused():
    """X-13: 0 and -inf, added to scores, would be read the other way round."""
    with pytest.raises(
        ConfigError, match="^an attention mask is 1 and 0 in whole numbers or bools, not torch.float32$"
    ):
        ops.padding_mask(torch.tensor([[0.0, float("-inf")]]))
