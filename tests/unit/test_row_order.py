"""Rows in another order than the model's: rotary pairs on disk, and parts that a kernel wants in its own order.

What must come out is worked out by index lists in numpy, from the rows as the model uses them.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.blueprint import Embedding, Experts, Linear, Norm, Param, Part, Placement
from steelyard.collectives import Groups
from steelyard.execute import Executor
from steelyard.layers import weight_of
from steelyard.layouts import Source
from steelyard.placement import Axis, Cut, Order, Pairs, RowOrder, Slice
from steelyard.planning import plan
from steelyard.reader import WAYS
from steelyard.storage import finish
from support.built import SilentGroup
from support.checkpoints import encode
from support.experts import CODED, ChannelDialect, ChannelMethod, backend_of, coded
from support.loading import CPU, executed, registry_for, runnable, write_toy
from support.planned import AWQ, FP8_BLOCK, FP8_TENSOR, error_texts, plan_of

HIDDEN, HEAD = 10, 6
PAIRS = RowOrder.ROPE_PAIRS
BOTH = ("plain", "channel")


def qkv(heads=4, kv_heads=2, head=HEAD, *, bias=True, hidden=HIDDEN):
    parts = (
        Part("q", heads * head, heads),
        Part("k", kv_heads * head, kv_heads, kv=True),
        Part("v", kv_heads * head, kv_heads, kv=True),
    )
    return Linear("qkv", hidden, parts, Placement.COLWISE, bias=bias)


def rows_of(node, seed=0):
    """Return each part's rows and biases as the model uses them: whole numbers."""
    rng = np.random.default_rng(seed)
    made = {}
    for part in node.parts:
        made[f"{part.name}.weight"] = rng.integers(-99, 100, (part.out, node.in_features)).astype(np.float32)
        if node.bias:
            made[f"{part.name}.bias"] = rng.integers(-99, 100, part.out).astype(np.float32)
    return made


def in_pairs(rows, heads):
    """Return rows as a publisher stores them: in each head 0, d/2, 1, d/2 + 1, ..."""
    size = len(rows) // heads
    half = size // 2
    within = [place for pair in range(half) for place in (pair, pair + half)]
    return rows[[head * size + place for head in range(heads) for place in within]]


def stored(node, rows, paired=("q", "k")):
    """Return a part's stored tensors by name: those of ``paired`` parts in rotary pairs."""
    heads = {part.name: part.heads for part in node.parts}
    return {f"qkv.{name}": in_pairs(one, heads[name[0]]) if name[0] in paired else one for name, one in rows.items()}


def split_names(node, part, expert):
    return (Source(f"qkv.{part}", rows=PAIRS if part in ("q", "k") else RowOrder.PLAIN),)


def fused_names(order, *, transposed=False):
    def names(node, part, expert):
        rows = PAIRS if part in ("q", "k") else RowOrder.PLAIN
        return (Source("qkv", order=order, rows=rows, transposed=transposed),)

    return names


def planned_qkv(folder, tensors, node, names, *backends, config=None, tp=1):
    write_toy(folder, tensors, config)
    others = [("quant dialect", ChannelDialect), ("quant method", ChannelMethod)]
    others += [("kernel backend", one) for one in backends or (backend_of("toy"),)]
    registry = registry_for(runnable(node, names=names), others=tuple(others))
    return plan(folder, tp=tp, target="cpu", registry=registry).check()


def expected(node, rows, tp, rank):
    """Return a rank's rows of each part, and of the bias: whole heads, key/value heads repeated where there are too few."""
    heads, kv_heads = node.parts[0].heads, node.parts[1].heads
    size = node.parts[0].out // heads
    queries = range(rank * heads // tp, (rank + 1) * heads // tp)
    pairs = sorted({query // (heads // kv_heads) for query in queries})
    mine = {"q": queries, "k": pairs, "v": pairs}
    made = {}
    for name, one in rows.items():
        made[name] = np.concatenate([one[head * size : (head + 1) * size] for head in mine[name[0]]])
    return made


def held(layer):
    """Return a layer's weight and bias as they lie in its kernel."""
    biases = [value for name, value in layer.state_dict().items() if name.endswith("bias")]
    return weight_of(layer), biases[0] if biases else None


# --- rotary pairs ------------------------------------------------------------------------------------------------


def test_the_rows_of_a_head_by_hand():
    """Head size 6 of two heads: 0 3 1 4 2 5 on disk; along any dim, after a swap, and not across heads."""
    rows = torch.arange(12)
    disk = torch.tensor([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    cut = Cut((Slice(0, 12),), (None,))
    assert finish(disk, cut, None, Pairs(0, 6)).tolist() == rows.tolist()
    wide = Cut((Slice(0, 2), Slice(0, 12)), (None, None))
    two = torch.stack([disk, disk + 100])
    assert finish(two, wide, None, Pairs(1, 6)).tolist() == [rows.tolist(), (rows + 100).tolist()]
    assert finish(two, wide, (0, 1), Pairs(0, 6)).t().tolist() == [rows.tolist(), (rows + 100).tolist()]
    assert finish(two, wide, None).tolist() == two.tolist()
    assert finish(disk[:0], cut, None, Pairs(0, 6)).shape == (0,)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("is_fused", [False, True], ids=["split", "fused"])
def test_heads_stored_in_pairs_load_as_the_model_uses_them(tmp_path, way, tp, is_fused):
    """P-08, P-11, P-12: weight and bias of q and k, not of v; two key/value heads split over 2 ranks, repeat over 4."""
    node = qkv()
    rows = rows_of(node)
    tensors = stored(node, rows)
    names = split_names
    if is_fused:
        order = Order(tuple((part.name, part.out) for part in node.parts))
        tensors = {
            f"qkv.{kind}": np.concatenate([tensors[f"qkv.{part}.{kind}"] for part in "qkv"])
            for kind in ("weight", "bias")
        }
        names = fused_names(order)
    made = planned_qkv(tmp_path, tensors, node, names, tp=tp)
    for rank in range(tp):
        weight, bias = held(executed(made, rank, way)[0].built["qkv"])
        want = expected(node, rows, tp, rank)
        assert weight.tolist() == np.concatenate([want[f"{part}.weight"] for part in "qkv"]).tolist()
        assert bias.tolist() == np.concatenate([want[f"{part}.bias"] for part in "qkv"]).tolist()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_heads_that_lie_between_one_anothers_rows_are_put_in_order(tmp_path, tp, transposed):
    """P-12: a tensor of [q | k | v] for each head, and (in, out); the piece is cut and swapped first, then unpaired."""
    node = qkv(4, 4, bias=False)
    rows = rows_of(node)
    tensors = stored(node, rows)
    groups = [tensors[f"qkv.{part}.weight"].reshape(4, HEAD, HIDDEN) for part in "qkv"]
    whole = np.stack(groups, 1).reshape(-1, HIDDEN)
    order = Order((("q", HEAD), ("k", HEAD), ("v", HEAD)), 4)
    names = fused_names(order, transposed=transposed)
    made = planned_qkv(tmp_path, {"qkv.weight": whole.T.copy() if transposed else whole}, node, names, tp=tp)
    for rank in range(tp):
        want = expected(node, rows, tp, rank)
        weight, _ = held(executed(made, rank)[0].built["qkv"])
        assert weight.tolist() == np.concatenate([want[f"{part}.weight"] for part in "qkv"]).tolist()


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("flat", [False, True], ids=["(out, 1)", "(out,)"])
def test_scales_of_rows_move_with_their_rows(tmp_path, tp, flat):
    """P-20: codes and a scale a row, stored as a column or flat; their product is the model's row."""
    node = qkv(bias=False)
    codes, worth = coded({f"{name}": one % 100 for name, one in rows_of(node).items()})
    heads = {part.name: part.heads for part in node.parts}
    tensors = {f"qkv.{name}": in_pairs(one, heads[name[0]]) if name[0] in "qk" else one for name, one in codes.items()}
    if flat:
        tensors = {name: one.reshape(-1) if name.endswith("scale") else one for name, one in tensors.items()}
    made = planned_qkv(tmp_path, tensors, node, split_names, config=CODED, tp=tp)
    for rank in range(tp):
        want = expected(node, worth, tp, rank)
        weight, _ = held(executed(made, rank)[0].built["qkv"])
        assert weight.tolist() == np.concatenate([want[f"{part}.weight"] for part in "qkv"]).tolist()


@pytest.mark.parametrize("code", ["F32", "BF16", "F16"])
def test_rows_of_every_plain_float_are_moved_and_cast(tmp_path, code):
    """L-31: the cast and the order are two things; each is done once."""
    node = qkv(2, 2, 8, bias=False)
    rows = {name: np.float32(one % 64) for name, one in rows_of(node).items()}
    tensors = {name: encode(one, code) for name, one in stored(node, rows).items()}
    weight, _ = held(executed(planned_qkv(tmp_path, tensors, node, split_names))[0].built["qkv"])
    assert weight.dtype == torch.float32
    assert weight.tolist() == np.concatenate([rows[f"{part}.weight"] for part in "qkv"]).tolist()


def test_a_scale_of_the_whole_tensor_has_no_rows_to_move(tmp_path):
    """P-19."""
    node = qkv(2, 2, 64, bias=False, hidden=128)
    tensors = {}
    for part in "qkv":
        tensors |= {f"qkv.{part}.weight": ("F8_E4M3", (128, 128)), f"qkv.{part}.weight_scale": ("F32", ())}
        tensors |= {f"qkv.{part}.input_scale": ("F32", ())}
    config = {"quantization_config": FP8_TENSOR}
    made = plan_of(tmp_path, tensors, node, names=split_names, config=config).check()
    assert {(read.part, read.buffer) for read in made.reads(0) if read.pairs} == {("q", "weight"), ("k", "weight")}


def test_rows_that_are_plain_in_one_source_and_paired_in_another_are_two_classes(tmp_path):
    """Two nodes of one shape: what is worked out for the one does not serve the other."""
    nodes = [Linear(stem, HIDDEN, (Part("", 4 * HEAD, 4),), Placement.COLWISE) for stem in "ab"]
    rows = rows_of(qkv())["q.weight"]

    def names(node, part, expert):
        return (Source(node.stem, rows=PAIRS if node.stem == "a" else RowOrder.PLAIN),)

    write_toy(tmp_path, {"a.weight": in_pairs(rows, 4), "b.weight": rows})
    registry = registry_for(runnable(*nodes, names=names))
    built = executed(plan(tmp_path, target="cpu", registry=registry).check())[0].built
    assert weight_of(built["a"]).tolist() == weight_of(built["b"]).tolist() == rows.tolist()


def test_one_name_in_two_orders_is_refused(tmp_path):
    """Two sources that name one tensor and lay it out differently."""
    node = Linear("a", HIDDEN, (Part("", 4 * HEAD, 4),), Placement.COLWISE)
    made = plan_of(
        tmp_path, {"a.weight": ("F32", (24, HIDDEN))}, node,
        names=lambda node, part, expert: (Source("a", rows=PAIRS), Source("a")),
    )  # fmt: skip
    assert error_texts(made) == ["a.weight: the mappings lay it out in two ways for a's weight"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    half=st.integers(1, 4),
    tp=st.integers(1, 4),
    is_paired=st.booleans(),
)
def test_the_ranks_together_hold_every_row_in_the_models_order(tmp_path_factory, kv_heads, group, half, tp, is_paired):
    """P-04, P-11: any heads that go out, in pairs or not; those that do not are refused as ever."""
    heads = kv_heads * group
    node = qkv(heads, kv_heads, 2 * half, hidden=3)
    rows = rows_of(node)
    paired = ("q", "k") if is_paired else ()
    tensors = stored(node, rows, paired)
    folder = tmp_path_factory.mktemp("heads")

    def names(node, part, expert):
        return (Source(f"qkv.{part}", rows=PAIRS if part in paired else RowOrder.PLAIN),)

    write_toy(folder, tensors)
    made = plan(folder, tp=tp, target="cpu", registry=registry_for(runnable(node, names=names)))
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        assert made.errors
        return
    for rank in range(tp):
        weight, bias = held(executed(made, rank)[0].built["qkv"])
        want = expected(node, rows, tp, rank)
        assert weight.tolist() == np.concatenate([want[f"{part}.weight"] for part in "qkv"]).tolist()
        assert bias.tolist() == np.concatenate([want[f"{part}.bias"] for part in "qkv"]).tolist()


# --- refusals ----------------------------------------------------------------------------------------------------


def refused(folder, tensors, node, names, **options):
    return error_texts(plan_of(folder, tensors, node, names=names, **options))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (Part("", 24), "no heads"),
        (Part("", 24, 8), "three rows a head"),
        (Part("", 24, 24), "one row a head"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pairs_need_heads_of_an_even_size(tmp_path, part, what):
    """P-12: a head is what pairs lie in."""
    node = Linear("a", HIDDEN, (part,), Placement.COLWISE)
    texts = refused(
        tmp_path, {"a.weight": ("F32", (24, HIDDEN))}, node, lambda node, part, expert: (Source("a", rows=PAIRS),)
    )
    assert texts == [
        "a.weight (model.safetensors): the mapping says that its rows lie in rotary pairs, "
        "but '' has no heads of an even size"
    ]


@pytest.mark.parametrize(
    ("node", "tensors"),
    [
        (Embedding("a", 24, HIDDEN, Placement.COLWISE), {"a.weight": (24, HIDDEN)}),
        (Norm("a", 24), {"a.weight": (24,)}),
        (Param("a", (Axis("out"), Axis("in")), 24, HIDDEN), {"a": (24, HIDDEN)}),
    ],
    ids=["Embedding", "Norm", "Param"],
)
def test_only_a_linear_has_heads(tmp_path, node, tensors):
    texts = refused(
        tmp_path, {name: ("F32", shape) for name, shape in tensors.items()}, node,
        lambda node, part, expert: (Source("a", rows=PAIRS),),
    )  # fmt: skip
    assert len(texts) == 1
    assert texts[0].endswith("that its rows lie in rotary pairs, but '' has no heads of an even size")


def test_rows_packed_along_out_are_refused(tmp_path):
    """AWQ lays eight rows in a word: they cannot be taken apart by moving words. Its scales alone could; nothing is half done."""
    node = Linear("a", 128, (Part("", 256, 4),), Placement.COLWISE)
    tensors = {"a.qweight": ("I32", (128, 32)), "a.qzeros": ("I32", (1, 32)), "a.scales": ("F16", (1, 256))}
    texts = refused(
        tmp_path, tensors, node, lambda node, part, expert: (Source("a", rows=PAIRS),),
        config={"quantization_config": AWQ},
    )  # fmt: skip
    assert texts == [
        "a.qweight (model.safetensors): its rows lie in rotary pairs, which cannot be put in order in [in, out/8]",
        "a.qzeros (model.safetensors): its rows lie in rotary pairs, which cannot be put in order in [in/128, out/8]",
    ]


def test_scales_of_blocks_of_rows_are_refused(tmp_path):
    """A block of 128 rows has one scale; what is known of rows of a head is not known of blocks."""
    node = Linear("a", 128, (Part("", 256, 4),), Placement.COLWISE)
    tensors = {"a.weight": ("F8_E4M3", (256, 128)), "a.weight_scale_inv": ("F32", (2, 1))}
    texts = refused(
        tmp_path, tensors, node, lambda node, part, expert: (Source("a", rows=PAIRS),),
        config={"quantization_config": FP8_BLOCK},
    )  # fmt: skip
    assert texts == [
        "a.weight_scale_inv (model.safetensors): its rows lie in rotary pairs, "
        "which cannot be put in order in [ceil(out/128), ceil(in/128)]"
    ]


def test_experts_have_no_pairs(tmp_path):
    """Stacked or one by one."""
    w13 = Linear("", HIDDEN, (Part("gate", 4, 2), Part("up", 4, 2)), Placement.COLWISE)
    node = Experts("e", 2, w13, Linear("", 4, (Part("down", HIDDEN),), Placement.ROWWISE))
    tensors = {"e.gate": ("F32", (2, 4, HIDDEN)), "e.up": ("F32", (2, 4, HIDDEN)), "e.down": ("F32", (2, HIDDEN, 4))}
    texts = refused(
        tmp_path, tensors, node,
        lambda node, part, expert: (
            Source(f"e.{part}", {".weight": ""}, stacked=True, rows=PAIRS if part != "down" else RowOrder.PLAIN),
        ),
    )  # fmt: skip
    assert texts == [
        f"e.{part} (model.safetensors): its rows lie in rotary pairs, which cannot be put in order in [out, in]"
        for part in ("gate", "up")
    ]


# --- the order that a kernel asks for ----------------------------------------------------------------------------

ORDERS = [("q", "k", "v"), ("v", "k", "q"), ("k", "v", "q"), ("x", "v", "q", "k")]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "".join(order))
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", BOTH)
def test_a_linear_gives_its_parts_in_the_nodes_order_whatever_its_kernel_holds(tmp_path, order, tp, kind):
    """E-01, P-12: buffers, scales and biases lie as the form asks; forward and split give q, k, v."""
    node = qkv()
    rows = rows_of(node)
    tensors, config = stored(node, rows, ()), None
    if kind == "channel":
        codes, worth = coded({name: one % 100 if name.endswith("weight") else one for name, one in rows.items()})
        tensors, rows, config = {f"qkv.{name}": one for name, one in codes.items()}, worth, CODED
    made = planned_qkv(
        tmp_path, tensors, node, lambda node, part, expert: (Source(f"qkv.{part}"),),
        backend_of("toy", order), config=config, tp=tp,
    )  # fmt: skip
    x = torch.from_numpy(np.random.default_rng(5).integers(-3, 4, (2, 3, HIDDEN)).astype(np.float32))
    inside = [part for part in order if part in "qkv"]
    for rank in range(tp):
        layer = executed(made, rank)[0].built["qkv"]
        want = expected(node, rows, tp, rank)
        weight, bias = held(layer)
        assert weight.tolist() == np.concatenate([want[f"{part}.weight"] for part in inside]).tolist()
        assert bias.tolist() == np.concatenate([want[f"{part}.bias"] for part in inside]).tolist()
        outputs = [x.numpy() @ want[f"{part}.weight"].T + want[f"{part}.bias"] for part in "qkv"]
        y = layer(x)
        assert y.tolist() == np.concatenate(outputs, -1).tolist()
        assert [one.tolist() for one in layer.split(y)] == [one.tolist() for one in outputs]
        assert list(layer.part_sizes) == list(layer.parts) == ["q", "k", "v"]


def test_parts_that_stay_apart_are_each_in_order(tmp_path):
    """M-22: k is quantized and v is not; the order holds inside a Segment, and outputs are joined in the node's."""
    node = qkv()
    rows = {name: one % 100 if name.endswith("weight") else one for name, one in rows_of(node).items()}
    codes, worth = coded({"k.weight": rows["k.weight"]})
    tensors = {f"qkv.{name}": one for name, one in ({**rows, **codes}).items()}
    config = {"quantization_config": {"quant_method": "channel", "ignore": ["qkv.q", "qkv.v"]}}
    made = planned_qkv(
        tmp_path, tensors, node, lambda node, part, expert: (Source(f"qkv.{part}"),),
        backend_of("toy", ("v", "k", "q")), config=config,
    )  # fmt: skip
    layer = executed(made)[0].built["qkv"]
    assert len(layer.segments) == 3
    values = {**rows, **worth}
    x = torch.ones(1, HIDDEN)
    outputs = [x.numpy() @ values[f"{part}.weight"].T + values[f"{part}.bias"] for part in "qkv"]
    assert layer(x).tolist() == np.concatenate(outputs, -1).tolist()


def test_a_rowwise_linear_of_several_parts_adds_its_bias_in_the_nodes_order(tmp_path):
    """P-05: the bias is one Parameter behind the sum, and the sum stands in the node's order."""
    node = Linear("two", 8, (Part("a", 3), Part("b", 5)), Placement.ROWWISE, bias=True)
    rng = np.random.default_rng(2)
    whole = {part.name: rng.integers(-9, 9, (part.out, 8)).astype(np.float32) for part in node.parts}
    biases = {part.name: rng.integers(-9, 9, part.out).astype(np.float32) for part in node.parts}
    tensors = {f"two.{name}.weight": one for name, one in whole.items()}
    tensors |= {f"two.{name}.bias": one for name, one in biases.items()}
    write_toy(tmp_path, tensors)
    others = (("kernel backend", backend_of("toy", ("b", "a"))),)
    registry = registry_for(runnable(node), others=others)
    made = plan(tmp_path, tp=2, target="cpu", registry=registry).check()
    total = 0
    x = torch.from_numpy(rng.integers(-3, 4, (2, 8)).astype(np.float32))
    for rank in range(2):
        with made.load_format[1].open(made.checkpoint, "mmap") as reader:
            groups = Groups(tensor=SilentGroup(2, rank))
            layer = Executor(made, rank, CPU, reader, groups, lambda: None).run().built["two"]
        assert layer.bias.tolist() == np.concatenate([biases["a"], biases["b"]]).tolist()
        total = total + layer.partial(x[:, 4 * rank : 4 * rank + 4])
    want = [x.numpy() @ whole[name].T + biases[name] for name in "ab"]
    assert total.tolist() == np.concatenate(want, -1).tolist()


def test_pairs_and_another_order_together(tmp_path):
    """P-12: each piece leaves its pairs and goes where the kernel wants its part."""
    node = qkv()
    rows = rows_of(node)
    made = planned_qkv(tmp_path, stored(node, rows), node, split_names, backend_of("toy", ("v", "q", "k")), tp=2)
    for rank in range(2):
        weight, bias = held(executed(made, rank)[0].built["qkv"])
        want = expected(node, rows, 2, rank)
        assert weight.tolist() == np.concatenate([want[f"{part}.weight"] for part in "vqk"]).tolist()
        assert bias.tolist() == np.concatenate([want[f"{part}.bias"] for part in "vqk"]).tolist()
