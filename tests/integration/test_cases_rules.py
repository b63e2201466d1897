"""The rules of cuts over ranks with the numbers that state them, as loads of real values and forwards on rank processes."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from steelyard.blueprint import Embedding, Linear, Part, Placement
from steelyard.config import LoadConfig
from steelyard.errors import ConfigError
from steelyard.layers import weight_of
from steelyard.placement import Order
from steelyard.plugin import Source
from support import cases
from support.checkpoints import toy_b, toy_b_shapes, values
from support.decoders import call
from support.loading import ToyKernel, executed, plan_toy
from support.ranks_decoders import outputs

COLWISE, ROWWISE = Placement.COLWISE, Placement.ROWWISE


@pytest.fixture(autouse=True, params=cases.PATTERNS.values(), ids=cases.PATTERNS)
def fresh_memory(request):
    with cases.poisoned(request.param):
        yield


def by_row(rows, columns=3):
    """Return rows whose value is their index."""
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], columns, axis=1)


def built(made, stem):
    """Return one node of every rank, loaded."""
    return [executed(made, rank)[0].built[stem] for rank in range(made.job.world)]


def biases(module):
    (bias,) = (value for name, value in module.state_dict().items() if name.endswith("bias"))
    return bias.tolist()


# --- rows and columns that divide, or do not ---------------------------------------------------------------------


def one_linear(folder, size, placement, tp):
    out, inner = size
    node = Linear("w", inner, (Part("", out),), placement)
    tensors = {"w.weight": values(0, (out, inner))}
    return tensors["w.weight"], lambda: plan_toy(folder, tensors, node, tp=tp)


@pytest.mark.parametrize(("size", "placement"), [((12, 4), COLWISE), ((4, 12), ROWWISE)], ids=["rows", "columns"])
def test_sizes_that_divide_go_out_in_order(tmp_path, size, placement):
    """P-01, P-02, P-04: 12 over 3 ranks are 4 each, side by side, and all of them are the whole."""
    whole, planned = one_linear(tmp_path, size, placement, 3)
    held = [weight_of(one).numpy() for one in built(planned(), "w")]
    assert [one.shape for one in held] == [(4, 4)] * 3
    assert np.concatenate(held, axis=0 if placement is COLWISE else 1).tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("size", "placement", "axis"), [((10, 4), COLWISE, "out"), ((4, 10), ROWWISE, "in")], ids=["rows", "columns"]
)
def test_sizes_that_do_not_divide_are_refused(tmp_path, size, placement, axis):
    """P-01, P-02: 10 over 3 ranks; both numbers are named, and no rank gets 3 of them in silence."""
    assert cases.errors(one_linear(tmp_path, size, placement, 3)[1]) == [
        f"w: cannot cut {axis}[0:10]: 10 elements do not divide by tp 3; sizes that fit: 1, 2, 5, 10"
    ]


# --- heads -------------------------------------------------------------------------------------------------------

LAYOUTS = [  # query heads, key/value heads, ranks; key/value heads of a rank, and the first of them on each
    (8, 8, 4, 2, [0, 2, 4, 6]),
    (32, 8, 4, 2, [0, 2, 4, 6]),
    (8, 4, 4, 1, [0, 1, 2, 3]),
    (8, 2, 4, 1, [0, 0, 1, 1]),
    (8, 2, 8, 1, [0, 0, 0, 0, 1, 1, 1, 1]),
    (32, 4, 8, 1, [0, 0, 1, 1, 2, 2, 3, 3]),
    (32, 1, 8, 1, [0] * 8),
    (12, 3, 6, 1, [0, 0, 1, 1, 2, 2]),
    (64, 8, 16, 1, [head for head in range(8) for _ in range(2)]),
]
REFUSED = [(8, 6, 4), (8, 3, 8), (10, 2, 3), (24, 6, 4), (24, 3, 8), (12, 6, 4), (12, 4, 6), (40, 8, 5)]


def plan_qkv(folder, heads, kv_heads, dim, tp, *, is_fused, bias=False):
    """Plan q, k and v whose rows have their index in the fused tensor as value."""
    parts = (Part("q", heads * dim, heads), *(Part(name, kv_heads * dim, kv_heads, kv=True) for name in "kv"))
    order = Order(tuple((part.name, part.out) for part in parts))
    rows = by_row(sum(part.out for part in parts))
    ends = np.cumsum([part.out for part in parts])[:-1]
    pieces = (
        {"": rows} if is_fused else {f".{name}": piece for name, piece in zip("qkv", np.split(rows, ends), strict=True)}
    )
    tensors = {f"qkv{name}.weight": piece for name, piece in pieces.items()}
    tensors |= {f"qkv{name}.bias": piece[:, 0] + 100 for name, piece in pieces.items()} if bias else {}

    def names(node, part, expert):
        return (Source("qkv", order=order),) if is_fused else (Source(f"qkv.{part}"),)

    return plan_toy(folder, tensors, Linear("qkv", 3, parts, COLWISE, bias=bias), names=names, tp=tp)


def rows_held(made):
    return [[int(row) for row in weight_of(one)[:, 0]] for one in built(made, "qkv")]


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize(("heads", "kv_heads", "tp", "local", "firsts"), LAYOUTS)
def test_heads_are_loaded_as_the_table_says(tmp_path, heads, kv_heads, tp, local, firsts, is_fused):
    """P-08, P-10, P-11, P-12: two rows a head; each query head finds its own key/value head on its rank."""
    found = rows_held(plan_qkv(tmp_path, heads, kv_heads, 2, tp, is_fused=is_fused))
    each = heads // tp
    for rank, first in enumerate(firsts):
        q = list(range(2 * rank * each, 2 * (rank + 1) * each))
        k = [2 * heads + row for row in range(2 * first, 2 * (first + local))]
        assert found[rank] == [*q, *k, *(row + 2 * kv_heads for row in k)]
        for head in range(rank * each, (rank + 1) * each):
            assert first + (head - rank * each) // (each // local) == head // (heads // kv_heads)


@pytest.mark.parametrize(("heads", "kv_heads", "tp"), REFUSED)
def test_heads_that_would_compute_wrong_attention_are_refused(tmp_path, heads, kv_heads, tp):
    """P-09, P-10: every layout that the table rejects, with all three numbers."""
    (said,) = cases.errors(lambda: plan_qkv(tmp_path, heads, kv_heads, 2, tp, is_fused=True))
    assert f"(q_heads={heads}, kv_heads={kv_heads}, tp={tp})" in said


@pytest.mark.parametrize(
    ("tp", "rows"),
    [
        (4, [[0, 1, 8, 10], [2, 3, 8, 10], [4, 5, 9, 11], [6, 7, 9, 11]]),
        (8, [[rank, 8 if rank < 4 else 9, 10 if rank < 4 else 11] for rank in range(8)]),
    ],
)
def test_fused_rows_of_every_rank_are_those_stated(tmp_path, tp, rows):
    """P-11: 8 query heads and 2 key/value heads of one row, Q 0-7, K 8-9, V 10-11."""
    assert rows_held(plan_qkv(tmp_path, 8, 2, 1, tp, is_fused=True)) == rows


def test_a_fused_weight_and_its_bias_follow_the_same_rows(tmp_path):
    """P-12: rows 8, 4 and 4 on two ranks."""
    made = plan_qkv(tmp_path, 4, 2, 2, 2, is_fused=True, bias=True)
    stated = [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]
    assert rows_held(made) == stated
    assert [biases(one) for one in built(made, "qkv")] == [[row + 100 for row in rows] for rows in stated]


def test_a_fused_gate_and_up_are_cut_apart(tmp_path):
    """P-13: gate 0-3, up 4-7."""
    parts = (Part("gate", 4), Part("up", 4))
    order = Order((("gate", 4), ("up", 4)))
    made = plan_toy(
        tmp_path,
        {"gu.weight": by_row(8)},
        Linear("gu", 3, parts, COLWISE),
        names=lambda node, part, expert: (Source("gu", order=order),),
        tp=2,
    )
    assert [weight_of(one)[:, 0].tolist() for one in built(made, "gu")] == [[0, 1, 4, 5], [2, 3, 6, 7]]


# --- vocabularies ------------------------------------------------------------------------------------------------


def plan_vocabulary(folder, rows, tp, options=None):
    nodes = (Embedding("table", rows, 3, COLWISE), Linear("head", 3, (Part("", rows, padded=True),), COLWISE))
    tensors = {f"{node.stem}.weight": by_row(rows) + 1 for node in nodes}
    return plan_toy(folder, tensors, *nodes, tp=tp, options=options)


def test_a_vocabulary_that_does_not_divide_says_what_to_pad_it_to(tmp_path):
    """P-14: 10 words on 4 ranks: refused with 10, 4 and 12; 12 words are 3 rows each; padded, the last rank has zeros."""
    off = LoadConfig(vocab_padding="off")
    said = cases.errors(lambda: plan_vocabulary(tmp_path / "odd", 10, 4, off))
    why = "a vocabulary of 10 does not divide by tp 4; pad it to 12, or allow vocab_padding='auto'"
    assert said == [f"{stem}: cannot cut out[0:10]: {why}" for stem in ("table", "head")]
    for stem in ("table", "head"):
        even = [weight_of(one)[:, 0].tolist() for one in built(plan_vocabulary(tmp_path / "even", 12, 4, off), stem)]
        assert even == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
        padded = [weight_of(one)[:, 0].tolist() for one in built(plan_vocabulary(tmp_path / "odd", 10, 4), stem)]
        assert padded == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 0]]


# --- single numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one-element"])
def test_single_numbers_reach_every_rank_whole(tmp_path, shape):
    """P-19: a weight's scale and an input's, on 4 ranks, for rows, columns, merged parts and heads."""
    heads = tuple(Part(name, 8 if name == "q" else 4, 4 if name == "q" else 2, kv=name != "q") for name in "qkv")
    nodes = [
        Linear("column", 8, (Part("", 8),), COLWISE),
        Linear("row", 8, (Part("", 8),), ROWWISE),
        Linear("merged", 8, (Part("gate", 8), Part("up", 8)), COLWISE),
        Linear("heads", 8, heads, COLWISE),
    ]
    tensors, scales = {}, iter(range(1, 20))
    for node in nodes:
        for part in node.parts:
            stem = f"{node.stem}.{part.name}".rstrip(".")
            tensors[f"{stem}.codes"] = np.ones((part.out, 8), np.int8)
            tensors[f"{stem}.scale"] = np.full(shape, next(scales) / 2, np.float32)
            tensors[f"{stem}.input_scale"] = np.full(shape, 0.5, np.float32)
    made = plan_toy(tmp_path, tensors, *nodes, config={"quantization_config": {"quant_method": "toy"}}, tp=4)
    expected = {
        "column": [0.5] * 2,
        "row": [1.0] * 8,
        "merged": [1.5] * 2 + [2.0] * 2,
        "heads": [2.5] * 2 + [3.0] * 2 + [3.5] * 2,
    }
    for stem, rows in expected.items():
        for one in built(made, stem):
            (kernel,) = (inner for inner in one.modules() if isinstance(inner, ToyKernel))
            assert kernel.input_scale.flatten().tolist() == [0.5]
            assert kernel.weight[:, 0].tolist() == rows


def test_ranks_that_there_cannot_be_are_refused_before_the_folder_is_looked_at(tmp_path):
    """P-23: sizes of 0, and ranks that do not fit one another."""
    absent = tmp_path / "absent"
    for sizes in ({"tp": 0}, {"ep": 0}, {"moe_tp": -1}):
        with pytest.raises(ConfigError):
            cases.plan(absent, **sizes)
    folder = cases.folder_of(tmp_path / "there", cases.toy_d())
    with pytest.raises(ConfigError, match="world=3 is not a multiple of tp=2"):
        cases.plan(folder, tp=2, world=3)


# --- forwards on real rank processes -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_loaded_table_looks_up_on_two_ranks_as_on_one(tmp_path, rank_pool, family):
    """P-15: by vocabulary (8 words of 4 numbers, ids 0, 7 and 3) and by hidden size; both equal torch's look-up."""
    folder, stem, table = looked_up_in(tmp_path, family)
    ids = [0, 7, 3]
    expected = functional.embedding(torch.tensor(ids), torch.from_numpy(table))
    for found in rank_pool.values("support.ranks_decoders:looked_up", 2, (str(folder), stem, ids)):
        assert torch.equal(found, expected)


def looked_up_in(folder, family):
    """Write a checkpoint and return its folder, the stem of its table, and the table."""
    if family == "bert":
        name = "embeddings.word_embeddings.weight"
        place = list(toy_b_shapes()).index(name)
        return toy_b(folder), name.removesuffix(".weight"), values(place, toy_b_shapes()[name])
    sizes = {"vocab_size": 8, "hidden_size": 4, "head_dim": 2, "intermediate_size": 4, "num_hidden_layers": 1}
    whole = cases.toy_d(**sizes)
    table = np.arange(32, dtype=np.float32).reshape(8, 4) - 15
    whole["model.embed_tokens.weight"] = table
    return cases.folder_of(folder, whole, sizes, dtype="F32"), "embed_tokens", table


def test_two_ranks_compute_what_one_computes(tmp_path, rank_pool):
    """P-25, P-05: five tokens through two layers with every bias, float32, on 2 ranks and on 4, from fused tensors."""
    config = {"attention_bias": True, "mlp_bias": True}
    draws = np.random.default_rng(0)
    whole = {}
    for name, array in cases.toy_d(**config).items():
        whole[name] = draws.normal("norm" in name, 0.05, array.shape).astype(np.float32)
    folder = cases.folder_of(tmp_path, cases.fused(whole), config, dtype="F32")
    asked = [call([[1, 5, 9, 2, 95]])]
    (alone,) = outputs(str(folder), asked, {"tp": 1})
    assert alone.std() > 0.1
    for world in (2, 4):
        for (found,) in rank_pool.values("support.ranks_decoders:outputs", world, (str(folder), asked, {"tp": world})):
            assert (found - alone).abs().max() < 1e-5
