"""Layers in one process. What several ranks compute together stands in tests/integration/test_parallel_layers.py."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from steelyard import blueprint
from steelyard.blueprint import Part, Placement
from steelyard.collectives import Group
from steelyard.errors import ConfigError, LoadError
from steelyard.local import localize
from steelyard.ranks import Ranks
from steelyard.torch import (
    BuiltSegment,
    DenseLinear,
    Embedding,
    Linear,
    Norm,
    State,
    Weight,
    share_weight,
    weight_of,
)
from support import built
from support.numeric import assert_tokens_close

COLWISE, ROWWISE, REPLICATED = Placement.COLWISE, Placement.ROWWISE, Placement.REPLICATED
PLACEMENTS = pytest.mark.parametrize("placement", [COLWISE, ROWWISE, REPLICATED], ids=lambda one: one.value)
QKV = blueprint.Linear(
    "qkv", 6, (Part("q", 8, 4), Part("k", 4, 2, kv=True), Part("v", 4, 2, kv=True)), COLWISE, bias=True
)
WORLD = (("float32", torch.float32), ("bfloat16", torch.bfloat16))


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def qkv(rng):
    """Return whole weights and biases of QKV's parts."""
    weights = {part.name: torch.randn(part.out, 6, generator=rng) for part in QKV.parts}
    return weights, {part.name: torch.randn(part.out, generator=rng) for part in QKV.parts}


def embedding_node(vocabulary=8, hidden=4, placement=COLWISE):
    return blueprint.Embedding("embed", vocabulary, hidden, placement)


# --- Linear -----------------------------------------------------------------------------------------


@PLACEMENTS
@pytest.mark.parametrize("has_bias", [True, False])
def test_on_one_rank_every_placement_is_the_plain_product(rng, placement, has_bias):
    weight, bias, x = (
        torch.randn(4, 6, generator=rng),
        torch.randn(4, generator=rng),
        torch.randn(2, 3, 6, generator=rng),
    )
    node = built.one_part("one", (4, 6), placement, bias=has_bias)
    layer = built.linear(node, {"": weight}, {"": bias} if has_bias else None)
    want = functional.linear(x, weight, bias if has_bias else None)
    assert torch.equal(layer(x), want)
    assert torch.equal(layer.gathered(x), want)
    if placement is ROWWISE:
        assert torch.equal(layer.partial(x), want)


@pytest.mark.parametrize("segments", [[("q",), ("k", "v")], [("q", "k"), ("v",)], [("q",), ("k",), ("v",)]])
@pytest.mark.parametrize("rank", range(4))
def test_segments_apart_compute_what_one_segment_does(rng, qkv, segments, rank):
    """P-12: parts come out in the node's order, their biases with them, whatever lies together in a kernel."""
    weights, biases = qkv
    x, group = torch.randn(5, 6, generator=rng), built.SilentGroup(4, rank)
    one = built.linear(QKV, weights, biases, group)
    several = built.linear(QKV, weights, biases, group, segments=segments)
    torch.testing.assert_close(several(x), one(x))
    assert several.parts == one.parts == ("q", "k", "v")
    assert several.part_sizes == one.part_sizes == {"q": 2, "k": 2, "v": 2}
    kv = rank // 2  # 4 ranks, 2 key/value heads: two ranks hold the same one
    starts = {"q": 2 * rank, "k": 2 * kv, "v": 2 * kv}
    for part, got in zip(QKV.parts, several.split(several(x)), strict=True):
        mine = slice(starts[part.name], starts[part.name] + 2)
        torch.testing.assert_close(got, functional.linear(x, weights[part.name][mine], biases[part.name][mine]))


def test_a_rowwise_linear_sums_once_and_adds_its_bias_behind(rng):
    """P-05, P-07: one collective a forward, none for a partial product; every rank's kernel leaves the bias out."""
    weight, bias, x = torch.randn(4, 6, generator=rng), torch.randn(4, generator=rng), torch.randn(5, 3, generator=rng)
    for rank in (0, 1):
        group = built.SilentGroup(2, rank)
        layer = built.linear(built.one_part("o", (4, 6), ROWWISE, bias=True), {"": weight}, {"": bias}, group)
        share = x @ weight[:, 3 * rank : 3 * rank + 3].t()
        torch.testing.assert_close(layer(x), share + bias)
        assert (group.reduces, group.gathers) == (1, 0)
        torch.testing.assert_close(layer.partial(x), share + bias if rank == 0 else share)
        assert (group.reduces, group.gathers) == (1, 0)


def test_a_rowwise_linear_of_several_segments_sums_once(rng):
    """Its biases lie in one Parameter, so that no forward joins them again."""
    node = blueprint.Linear("o", 6, (Part("a", 2), Part("b", 3)), ROWWISE, bias=True)
    weights = {"a": torch.randn(2, 6, generator=rng), "b": torch.randn(3, 6, generator=rng)}
    biases = {"a": torch.randn(2, generator=rng), "b": torch.randn(3, generator=rng)}
    group = built.SilentGroup(2, 0)
    layer = built.linear(node, weights, biases, group, segments=[("a",), ("b",)])
    x = torch.randn(4, 3, generator=rng)
    want = torch.cat([x @ weights[name][:, :3].t() + biases[name] for name in ("a", "b")], -1)
    torch.testing.assert_close(layer(x), want)
    assert group.reduces == 1
    assert [name for name, _ in layer.named_parameters() if "bias" in name] == ["bias"]


def test_colwise_and_replicated_linears_need_no_collective(rng):
    weight, x = torch.randn(4, 6, generator=rng), torch.randn(5, 6, generator=rng)
    for placement in (COLWISE, REPLICATED):
        group = built.SilentGroup(2, 1)
        layer = built.linear(built.one_part("c", (4, 6), placement), {"": weight}, None, group)
        assert layer(x).shape[-1] == (2 if placement is COLWISE else 4)
        assert (group.reduces, group.gathers) == (0, 0)
    assert torch.equal(layer.gathered(x), layer(x))
    assert group.gathers == 0


def test_gathering_several_parts_is_one_collective(rng, qkv):
    """P-07: joined part by part, [q of all ranks | k of all ranks | v of all ranks], not rank by rank."""
    group = built.SilentGroup(2, 1)
    layer = built.linear(QKV, *qkv, group)
    x = torch.randn(3, 5, 6, generator=rng)
    q, k, v = layer.split(layer(x))
    assert torch.equal(layer.gathered(x), torch.cat([q, q, k, k, v, v], -1))
    assert group.gathers == 1


@pytest.mark.parametrize("inside", [("q", "k", "v"), ("v", "k", "q"), ("k", "v", "q")], ids="".join)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kernel_may_hold_the_parts_in_another_order(rng, qkv, inside, rank):
    """E-01, P-12: outputs, their biases with them, come out in the node's order, gathered ones too; the kernel's stays."""
    x = torch.randn(3, 5, 6, generator=rng)
    plain = built.linear(QKV, *qkv, built.SilentGroup(2, rank))
    layer = built.linear(QKV, *qkv, built.SilentGroup(2, rank), segments=[inside])
    first = qkv[0][inside[0]]
    rows = slice(rank * len(first) // 2, (rank + 1) * len(first) // 2)
    assert torch.equal(layer.segments[0].kernel.weight[: len(first) // 2], first[rows])
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(layer.gathered(x), plain.gathered(x), rtol=0, atol=1e-6)
    for mine, theirs in zip(layer.split(layer(x)), plain.split(plain(x)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert layer.group.gathers == plain.group.gathers == 1
    assert layer.extra_repr() == plain.extra_repr()
    assert dict(layer.part_sizes) == {"q": 4, "k": 2, "v": 2}


def test_repeated_heads_are_not_gathered(qkv):
    """P-08: with 4 ranks and 2 key/value heads, joining the ranks' heads would double each."""
    layer = built.linear(QKV, *qkv, built.SilentGroup(4, 0))
    with pytest.raises(ConfigError) as caught:
        layer.gathered(torch.zeros(1, 6))
    assert str(caught.value) == (
        "qkv: 2 heads of 'k' are repeated over 4 ranks, so their outputs cannot be gathered; "
        "split() this rank's output instead"
    )


@pytest.mark.parametrize("placement", [COLWISE, REPLICATED], ids=lambda one: one.value)
def test_only_a_rowwise_product_is_partial(placement):
    layer = built.linear(built.one_part("up", (4, 6), placement), {"": torch.zeros(4, 6)})
    with pytest.raises(ConfigError) as caught:
        layer.partial(torch.zeros(1, 6))
    assert str(caught.value) == f"up is {placement.value}; only a rowwise Linear is summed over ranks"


def test_segments_that_are_not_the_node_are_refused(qkv):
    local = localize(QKV, Ranks())[0]

    def segment(names, bias_rows=None):
        mine = local.only(names)
        bias = None if bias_rows is None else torch.zeros(bias_rows)
        return BuiltSegment(mine, DenseLinear(torch.zeros(mine.n, 6)), bias)

    def refusal(node, *segments):
        with pytest.raises(LoadError) as caught:
            Linear(node, segments, Group())
        return str(caught.value)

    assert refusal(QKV, segment(("q",), 8), segment(("v",), 4)) == (
        "qkv: its Segments have the parts ['q', 'v'], the node has ['q', 'k', 'v']"
    )
    assert refusal(QKV, segment(("k", "v"), 8), segment(("q",), 8)) == (
        "qkv: its Segments have the parts ['k', 'v', 'q'], the node has ['q', 'k', 'v']"
    )
    assert refusal(QKV) == "qkv: its Segments have the parts [], the node has ['q', 'k', 'v']"
    assert refusal(QKV, segment(("q",), 8), segment(("k", "v"))) == "qkv: the node has a bias, and none was loaded"
    assert refusal(QKV, segment(("q", "k", "v"), 8)) == "qkv: a bias of shape [8], this rank holds [16]"
    plain = built.one_part("down", (4, 6), COLWISE)
    extra = BuiltSegment(localize(plain, Ranks())[0], DenseLinear(torch.zeros(4, 6)), torch.zeros(4))
    assert refusal(plain, extra) == "down: the node has no bias, and one was loaded"


def test_a_linear_describes_its_share(qkv):
    layer = built.linear(QKV, *qkv, built.SilentGroup(4, 3))
    assert layer.extra_repr() == "in 6 (here 6), out 16 (here 6), parts q|k|v, colwise, rank 3 of 4"
    node = built.one_part("o", (4, 6), ROWWISE)
    layer = built.linear(node, {"": torch.zeros(4, 6)}, None, built.SilentGroup(2, 1))
    assert layer.extra_repr() == "in 6 (here 3), out 4 (here 4), rowwise, rank 1 of 2"


# --- Embedding --------------------------------------------------------------------------------------


@PLACEMENTS
def test_an_id_outside_the_vocabulary_is_named(placement):
    layer = built.embedding(embedding_node(placement=placement), torch.zeros(8, 4), built.SilentGroup(2, 1))
    for ids, wrong in (([0, 8], 8), ([[3], [-1]], -1), ([7, 8, 100], 100)):
        with pytest.raises(IndexError) as caught:
            layer(torch.tensor(ids))
        assert str(caught.value) == f"embed: id {wrong} is outside a vocabulary of 8"


def test_an_id_in_the_padding_is_outside_the_vocabulary():
    """P-14: padding rows are held, and belong to no id."""
    layer = built.embedding(embedding_node(vocabulary=7), torch.ones(7, 4), built.SilentGroup(2, 1))
    assert layer.weight.shape == (4, 4)
    assert layer.weight[-1].tolist() == [0.0] * 4
    with pytest.raises(IndexError) as caught:
        layer(torch.tensor([7]))
    assert str(caught.value) == "embed: id 7 is outside a vocabulary of 7"


@PLACEMENTS
def test_no_ids_give_no_rows(placement):
    layer = built.embedding(embedding_node(placement=placement), torch.zeros(8, 4), built.SilentGroup(2, 1))
    assert layer(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_of_other_ranks_are_zeros(rng, dtype):
    """P-15: zeros also where the row that stands in for them holds NaN or infinity."""
    table = torch.randn(8, 4, generator=rng)
    table[0], table[4] = torch.nan, torch.inf
    for rank, want in ((0, [0, 0, 1, 1]), (1, [1, 1, 0, 0])):
        layer = built.embedding(embedding_node(), table, built.SilentGroup(2, rank))
        got = layer.local(torch.tensor([7, 5, 2, 3], dtype=dtype))
        assert got.isfinite().all()
        assert [int(row.any()) for row in got] == want


@PLACEMENTS
def test_a_table_makes_its_rows_whole_with_one_collective(placement):
    """P-07: a sum for rows, a gather for columns, nothing where every rank holds all."""
    group = built.SilentGroup(2, 0)
    layer = built.embedding(embedding_node(placement=placement), torch.zeros(8, 4), group)
    assert layer(torch.tensor([1, 2])).shape == (2, 4)
    assert (group.reduces, group.gathers) == {COLWISE: (1, 0), ROWWISE: (0, 1), REPLICATED: (0, 0)}[placement]


def test_a_table_of_the_wrong_shape_is_refused():
    node = embedding_node(placement=ROWWISE)
    local = localize(node, Ranks.of(tp=2))[0]
    with pytest.raises(LoadError) as caught:
        Embedding(node, local, torch.zeros(8, 4), built.SilentGroup(2, 0))
    assert str(caught.value) == "embed: a weight of shape [8, 4], this rank holds [8, 2]"
    layer = Embedding(node, local, torch.zeros(8, 2), built.SilentGroup(2, 0))
    assert layer.extra_repr() == "vocabulary 8 (here 8), hidden 4 (here 2), rowwise, rank 0 of 2"


# --- Norm, Weight, State ----------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("name", "dtype"), WORLD)
def test_a_norm_is_its_kind(rng, kind, has_bias, name, dtype):
    node = blueprint.Norm("norm", 8, kind, 1e-5, bias=has_bias)
    weight, bias, x = (torch.randn(*shape, generator=rng).to(dtype) for shape in ((8,), (8,), (3, 8)))
    layer = Norm(node, weight, bias if has_bias else None)
    wide = x.float() - (x.float().mean(-1, keepdim=True) if kind == "layer" else 0)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.float()
    want = want + bias.float() if has_bias else want
    got = layer(x)
    assert got.dtype == layer.weight.dtype == dtype
    tolerance = 1e-6 if name == "float32" else 2**-6
    assert_tokens_close(got.float(), want, min_cos=0.9999, max_rel=tolerance)


def test_eps_is_the_nodes():
    """B-10: 1e-12 and 1e-2 give other numbers."""
    x, weight, bias = torch.tensor([[0.1, -0.1, 0.2, 0.0]]), torch.ones(4), torch.zeros(4)
    small, large = (Norm(blueprint.Norm("n", 4, "layer", eps, bias=True), weight, bias)(x) for eps in (1e-12, 1e-2))
    assert (small - large).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("weight", "bias", "want"),
    [
        (torch.ones(4), torch.ones(8), "norm: a weight of shape [4] for a norm over 8 elements"),
        (torch.ones(8), torch.ones(4), "norm: a bias of shape [4], this rank holds [8]"),
        (torch.ones(8), None, "norm: the node has a bias, and none was loaded"),
    ],
)
def test_a_norm_of_another_size_is_refused(weight, bias, want):
    """A share of a norm would normalise over a share of the elements."""
    with pytest.raises(LoadError) as caught:
        Norm(blueprint.Norm("norm", 8, "layer", bias=True), weight, bias)
    assert str(caught.value) == want


def test_a_weight_and_a_state_hold_what_they_are_given():
    assert Weight(torch.tensor([1, 2])).value.tolist() == [1, 2]
    state = State({"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(2.0)})
    assert {name: value.item() for name, value in state.named_buffers()} == {"k_scale": 0.5, "v_scale": 2.0}
    assert list(state.state_dict()) == ["k_scale", "v_scale"]


# --- tensors and memory -----------------------------------------------------------------------------


class Everything(nn.Module):
    """One of each layer, on one of two ranks."""

    def __init__(self, qkv):
        super().__init__()
        group = built.SilentGroup(2, 1)
        self.table = built.embedding(embedding_node(hidden=6), torch.ones(8, 6), group)
        self.norm = Norm(blueprint.Norm("norm", 6, "layer", bias=True), torch.ones(6), torch.ones(6))
        self.qkv = built.linear(QKV, *qkv, group, segments=[("q",), ("k", "v")])
        self.out = built.linear(
            built.one_part("o", (6, 16), ROWWISE, bias=True), {"": torch.ones(6, 16)}, {"": torch.ones(6)}, group
        )
        self.scale = Weight(torch.ones(1))
        self.state = State({"k_scale": torch.ones(())})

    def forward(self, ids):
        return self.out(self.qkv(self.norm(self.table(ids)))) * self.scale.value * self.state.k_scale


def tensors_of(value, seen=None):
    """Yield every tensor that an object's attributes reach, wherever it is kept."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_of(one, seen)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from tensors_of(one, seen)
    elif isinstance(value, nn.Module):
        yield from tensors_of(vars(value), seen)


def test_every_tensor_moves_with_the_module(qkv):
    """E-23: nothing is held outside parameters and buffers, so a move leaves nothing behind."""
    model = Everything(qkv)
    listed = {id(one) for one in (*model.parameters(), *model.buffers())}
    held = list(tensors_of(model))
    assert len(held) == len(listed) == 11
    assert {id(one) for one in held} == listed
    assert not any(one.requires_grad for one in held)
    assert len(model.state_dict()) == 11
    model.to(torch.float64)
    assert model(torch.tensor([[1, 7]])).dtype == torch.float64
    model.to("meta")
    assert {one.device.type for one in tensors_of(model)} == {"meta"}
    assert model(torch.tensor([[1, 7]], device="meta")).device.type == "meta"


def test_a_forward_asks_nothing_of_the_environment_and_logs_nothing(qkv, monkeypatch):
    """X-21: 100 forwards, 0 log records, 0 reads of the environment, 0 new parameters."""
    model, ids = Everything(qkv), torch.tensor([[1, 7]])
    before = {name: one.data_ptr() for name, one in model.state_dict().items()}
    model(ids)
    records, reads = [], []

    class Counted(type(os.environ)):
        def __getitem__(self, key):
            reads.append(key)
            return super().__getitem__(key)

    class Kept(logging.Handler):
        def emit(self, record):
            records.append(record)

    environ = os.environ
    counted = Counted.__new__(Counted)
    vars(counted).update(vars(environ))
    handler = Kept(logging.NOTSET)
    logging.getLogger().addHandler(handler)
    monkeypatch.setattr(os, "environ", counted)
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)
    assert os.environ.get("PATH") is not None
    assert reads == ["PATH"]
    for _ in range(100):
        model(ids)
    logging.getLogger().removeHandler(handler)
    assert (records, reads) == ([], ["PATH"])
    assert {name: one.data_ptr() for name, one in model.state_dict().items()} == before


# --- shared weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_and_its_table_hold_one_parameter(rng, head_first):
    """Moving or writing one moves and writes the other, and memory is held once."""
    table = built.embedding(embedding_node(), torch.randn(8, 4, generator=rng))
    head = built.linear(built.one_part("head", (8, 4), COLWISE), {"": torch.randn(8, 4, generator=rng)})
    model = nn.ModuleDict({"table": table, "head": head})
    kept = weight_of(table if head_first else head)
    share_weight(*((head, table) if head_first else (table, head)))
    assert weight_of(head) is weight_of(table) is kept
    assert len(list(model.parameters())) == 1
    model.to(torch.float64)
    assert weight_of(head).data_ptr() == weight_of(table).data_ptr()
    with torch.no_grad():
        table.weight[3] = 0
    assert head(torch.ones(4, dtype=torch.float64))[3] == 0


class Packed(nn.Module):
    """A kernel whose weight is in a form of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros(8, 4, dtype=torch.uint8))

    def forward(self, x, bias):
        return x @ self.weight.to(x.dtype).t()


def test_a_weight_that_is_not_one_plain_tensor_is_not_shared(qkv):
    table = built.embedding(embedding_node(), torch.zeros(8, 4))
    node = built.one_part("head", (8, 4), COLWISE)
    packed = Linear(node, [BuiltSegment(localize(node, Ranks())[0], Packed())], Group())
    several = built.linear(QKV, *qkv, segments=[("q",), ("k", "v")])
    other = built.linear(built.one_part("head", (4, 8), COLWISE), {"": torch.zeros(4, 8)})
    narrow = built.embedding(embedding_node(), torch.zeros(8, 4, dtype=torch.bfloat16))

    def refusal(target, source):
        with pytest.raises(LoadError) as caught:
            share_weight(target, source)
        return str(caught.value)

    assert refusal(packed, table) == "a Linear of Packed has no one plain weight that could be shared"
    assert refusal(table, packed) == "a Linear of Packed has no one plain weight that could be shared"
    assert refusal(table, several) == (
        "a Linear of DenseLinear, DenseLinear has no one plain weight that could be shared"
    )
    assert refusal(table, State({})) == "a State has no one plain weight that could be shared"
    assert refusal(other, table) == (
        "a weight of shape [4, 8] in float32 and one of shape [8, 4] in float32 cannot be one"
    )
    assert refusal(narrow, table) == (
        "a weight of shape [8, 4] in bfloat16 and one of shape [8, 4] in float32 cannot be one"
    )


# --- imports ----------------------------------------------------------------------------------------

BLOCKED = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "aiter", "deep_gemm", "fastsafetensors"}:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
        return None

sys.meta_path.insert(0, Blocker())
import torch
from steelyard import blueprint
from steelyard.torch import Norm
import steelyard.layers, steelyard.ops

x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
weight = torch.linspace(0.5, 2, 8)
layer = Norm(blueprint.Norm("norm", 8, "rms", 1e-6), weight)
want = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
for _ in range(3):
    assert (layer(x) - want).abs().max() < 1e-6
assert not torch.cuda.is_initialized()
print("fine")
"""


def test_layers_run_without_any_compiled_op():
    """L-30, X-11: with triton, aiter, deep_gemm and fastsafetensors out of reach, layers import and compute."""
    core = Path(__file__).parents[2] / "core"
    got = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED],
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (got.stdout, got.stderr) == ("fine\n", "")
