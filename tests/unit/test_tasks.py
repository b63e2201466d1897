"""The steps of a rank: every element of every buffer is written exactly once, whatever the model and the job."""

import tempfile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.blueprint import Embedding, Experts, FillWith, Linear, Norm, Param, Part, Placement
from steelyard.layouts import Layout, Source, StoredTensor
from steelyard.placement import Axis, Fixed, Order
from steelyard.registry import Registry
from steelyard.steps import Check, Fill, Read
from support.planned import (
    AWQ,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    TOY,
    family_of,
    hollow,
    numbered,
    plan_of,
    planned,
    registry_of,
    run,
)
from support.quant import Fp8Dialect, Fp8Method, backend

PLACEMENTS = (Placement.COLWISE, Placement.ROWWISE, Placement.REPLICATED)
STATED = {"plain": None, "tensor": FP8_TENSOR, "channel": FP8_CHANNEL, "block": FP8_BLOCK, "awq": AWQ}


def matrix(path, rows, columns, quant, lead=(), bias=False, turned=False):
    """Return the stored tensors of one matrix; ``lead`` is an expert dim in front, ``turned`` swaps what has both axes."""
    if turned:
        made = {}
        for name, (code, shape) in matrix(path, rows, columns, quant, lead, bias).items():
            inner = shape[len(lead) :]
            both = len(inner) == 2 and not (quant == "channel" and name.endswith("scale"))
            made[name] = (code, (*lead, *(inner[::-1] if both else inner)))
        return made
    made = {f"{path}.bias": ("BF16", (*lead, rows))} if bias else {}
    match quant:
        case "plain":
            return made | {f"{path}.weight": ("BF16", (*lead, rows, columns))}
        case "awq":
            return made | {
                f"{path}.qweight": ("I32", (*lead, columns, rows // 8)),
                f"{path}.qzeros": ("I32", (*lead, columns // 128, rows // 8)),
                f"{path}.scales": ("F16", (*lead, columns // 128, rows)),
            }
    made |= {f"{path}.weight": ("F8_E4M3", (*lead, rows, columns))}
    scale = {"tensor": (), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[quant]
    made |= {f"{path}.weight_scale": ("F32", (*lead, *scale))}
    if quant == "tensor":
        made |= {f"{path}.input_scale": ("F32", lead)}
    return made


@st.composite
def models(draw):
    """Draw nodes, the tensors of each, and where its mapping looks for them."""
    quant = draw(st.sampled_from(list(STATED)))
    unit = 128 if quant == "awq" else 8
    sizes = st.integers(1, 4).map(lambda count: count * 2 * unit)
    nodes, tensors, sources = [], {"dtype.weight": ("BF16", (8,))}, {}
    nodes.append(Norm("dtype", 8))
    for index in range(draw(st.integers(1, 3))):
        stem, columns = f"n{index}", draw(sizes)
        kind = draw(
            st.sampled_from(
                ["linear", "fused", "experts", "stacked", "one-stack", "embedding", "head", "param", "norm"]
            )
        )
        bias = draw(st.booleans())
        match kind:
            case "linear" | "fused":
                heads = draw(st.sampled_from([None, (4, 1), (4, 2), (4, 4)]))
                if heads is None:
                    parts = tuple(Part(f"p{n}", draw(sizes)) for n in range(draw(st.integers(1, 3))))
                    placement = draw(st.sampled_from(PLACEMENTS))
                else:
                    q, kv = heads
                    parts = (Part("p0", q * unit, q), *(Part(f"p{n}", kv * unit, kv, kv=True) for n in (1, 2)))
                    placement = Placement.COLWISE
                nodes.append(Linear(stem, columns, parts, placement, bias=bias))
                if kind == "fused":
                    rows = tuple((part.name, part.out) for part in parts)
                    sources[stem] = (Source(stem, order=Order(rows)),)
                    tensors |= matrix(stem, sum(part.out for part in parts), columns, quant, bias=bias)
                else:
                    for part in parts:
                        tensors |= matrix(f"{stem}.{part.name}", part.out, columns, quant, bias=bias)
            case "experts" | "stacked" | "one-stack":
                count, inner = draw(st.integers(1, 5)), draw(sizes)
                up = (Part("gate", inner), Part("up", inner))
                w13 = Linear("", columns, up, Placement.COLWISE, bias=bias)
                nodes.append(Experts(stem, count, w13, Linear("", inner, (Part("down", columns),), Placement.ROWWISE)))
                if kind == "one-stack":
                    turned = draw(st.booleans())
                    runs = draw(
                        st.sampled_from([((("gate", inner), ("up", inner)), 1), ((("up", inner), ("gate", inner)), 1)])
                    )
                    together = (Source(f"{stem}.both", order=Order(*runs), stacked=True, transposed=turned),)
                    sources |= {(stem, "gate"): together, (stem, "up"): together}
                    sources[stem, "down"] = (Source(f"{stem}.down", stacked=True, transposed=turned),)
                    tensors |= matrix(f"{stem}.both", 2 * inner, columns, quant, (count,), bias=bias, turned=turned)
                    tensors |= matrix(f"{stem}.down", columns, inner, quant, (count,), turned=turned)
                    continue
                for part, rows, width in (
                    ("gate", inner, columns),
                    ("up", inner, columns),
                    ("down", columns, inner),
                ):
                    biased = bias and part != "down"
                    if kind == "stacked":
                        sources[stem, part] = (Source(f"{stem}.{part}", stacked=True),)
                        tensors |= matrix(f"{stem}.{part}", rows, width, quant, (count,), bias=biased)
                    else:
                        for expert in range(count):
                            tensors |= matrix(f"{stem}.{expert}.{part}", rows, width, quant, bias=biased)
            case "embedding":
                rows, placement = draw(st.integers(1, 30)), draw(st.sampled_from(PLACEMENTS))
                nodes.append(Embedding(stem, rows, columns, placement))
                tensors[f"{stem}.weight"] = ("BF16", (rows, columns))
            case "head":
                rows = draw(st.integers(1, 30))
                nodes.append(Linear(stem, columns, (Part("lm_head", rows, padded=True),), Placement.COLWISE, bias=bias))
                tensors |= matrix(f"{stem}.lm_head", rows, columns, "plain", bias=bias)
            case "param":
                dims = draw(st.sampled_from([(), (Axis("out"),), (Fixed(3), Axis("in"), Axis("out"))]))
                nodes.append(Param(stem, dims, 16, 8, draw(st.sampled_from(PLACEMENTS))))
                tensors[stem] = ("F32", {0: (), 1: (16,), 3: (3, 8, 16)}[len(dims)])
            case "norm":
                nodes.append(Norm(stem, columns, bias=bias, absent=FillWith(1.0)))
    return quant, nodes, tensors, sources


JOBS = ({}, {"tp": 2}, {"tp": 4}, {"ep": 2}, {"ep": 3}, {"tp": 2, "ep": 2, "moe_tp": 2, "world": 4}, {"tp": 2, "ep": 4})


@settings(max_examples=100, deadline=None)
@given(model=models(), job=st.sampled_from(JOBS))
def test_reads_and_fills_tile_every_buffer_exactly(model, job):
    """L-19, L-21, P-04: no element of any buffer is written twice or never, on any rank; every read lies in its tensor."""
    quant, nodes, tensors, sources = model

    def names(node, part, expert):
        for key in (node.stem, (node.stem, part)):
            if key in sources:
                return sources[key]
        pieces = (node.stem, "" if expert is None else str(expert), part)
        return (Source(".".join(piece for piece in pieces if piece)),)

    config = TOY | ({"quantization_config": STATED[quant]} if STATED[quant] else {})
    with tempfile.TemporaryDirectory() as folder:
        hollow(folder, config, tensors)
        made = planned(folder, registry=registry_of(family_of(*nodes, names=names)), **job)
    if made.errors:
        assert {finding.code for finding in made.errors} <= {"cut", "heads", "config"}, made.errors
        return
    used = set()
    for rank in range(made.job.world):
        run(made, rank, numbered(made.checkpoint.entries))
        used |= {read.name for read in made.reads(rank)}
        assert made.rank(rank).reads == len(list(made.reads(rank)))
    assert used == set(tensors)


# --- checks ------------------------------------------------------------------------------------------------------

CODES = StoredTensor((".weight",), ("F8_E4M3",), ((Axis("out"), Axis("in")),), checks=("no_nan_codes",))
INDEX = StoredTensor((".g_idx",), ("I32",), ((Axis("in"),),), role="index", merge="equal", checks=("trivial_index",))


def plan_with_index(folder, *nodes, tensors):
    class Method(Fp8Method):
        def layouts(self, scheme, node):
            return (Layout("indexed", (CODES, INDEX)),)

    registry = Registry(registry_of().catalog)
    for noun, cls in (
        ("model", family_of(*nodes)),
        ("quant dialect", Fp8Dialect),
        ("quant method", Method),
        ("kernel backend", backend("toy")),
    ):
        registry.add(noun, cls)
    hollow(folder, TOY | {"quantization_config": FP8_CHANNEL}, tensors)
    return planned(folder, registry=registry).check()


def test_a_tensor_that_parts_must_share_is_read_once_and_compared(tmp_path):
    """An index of q, k and v is one: the first is kept, the others must equal it."""
    parts = (Part("a", 64), Part("b", 32), Part("c", 32))
    tensors = {}
    for part in parts:
        tensors |= {f"l.{part.name}.weight": ("F8_E4M3", (part.out, 64)), f"l.{part.name}.g_idx": ("I32", (64,))}
    made = plan_with_index(tmp_path, Linear("l", 64, parts, Placement.COLWISE), tensors=tensors)
    (task,) = made.tasks(0)
    assert [read.name for read in task.reads if read.buffer == "g_idx"] == ["l.a.g_idx"]
    compared = {check.read.name: check.equal_to for check in task.checks if check.equal_to}
    assert compared == {"l.b.g_idx": "l.a.g_idx", "l.c.g_idx": "l.a.g_idx"}
    assert {rule for check in task.checks for rule in check.rules} == {"no_nan_codes", "trivial_index"}
    run(made, 0, numbered(made.checkpoint.entries))


def expert_tensors():
    tensors = {}
    for expert in range(3):
        for part in ("gate", "up", "down"):
            path = f"experts.{expert}.{part}"
            tensors |= {f"{path}.weight": ("F8_E4M3", (32, 32)), f"{path}.g_idx": ("I32", (32,))}
    return tensors


EXPERTS = Experts(
    "experts",
    3,
    Linear("", 32, (Part("gate", 32), Part("up", 32)), Placement.COLWISE),
    Linear("", 32, (Part("down", 32),), Placement.ROWWISE),
)


def test_a_tensor_that_gate_and_up_must_share_is_read_once_an_expert(tmp_path):
    """L-21: the owner of a shared index is kept for each expert, not for the last."""
    made = plan_with_index(tmp_path, EXPERTS, tensors=expert_tensors())
    run(made, 0, numbered(made.checkpoint.entries))
    up, _ = made.tasks(0)
    assert [read.name for read in up.reads if read.buffer == "g_idx"] == [f"experts.{e}.gate.g_idx" for e in range(3)]
    assert {check.read.name: check.equal_to for check in up.checks if check.equal_to} == {
        f"experts.{expert}.up.g_idx": f"experts.{expert}.gate.g_idx" for expert in range(3)
    }


# --- padding -----------------------------------------------------------------------------------------------------


def test_rows_of_padding_are_filled_with_zeros_in_weight_and_bias(tmp_path):
    """R036: the last rank alone; the head's bias too."""
    head = Linear("lm_head", 64, (Part("", 97, padded=True),), Placement.COLWISE, bias=True)
    made = plan_of(
        tmp_path, {"lm_head.weight": ("BF16", (97, 64)), "lm_head.bias": ("BF16", (97,))}, head, tp=2
    ).check()
    first, last = (next(made.tasks(rank)) for rank in range(2))
    assert first.fills == ()
    assert last.fills == (
        Fill("lm_head", 0, "weight", ((48, 1), (0, 64)), 0.0),
        Fill("lm_head", 0, "bias", ((48, 1),), 0.0),
    )


def test_padding_that_ends_inside_a_block_has_no_scale_of_its_own(tmp_path):
    """R036, R054: 255 rows in blocks of 128 over two ranks: rank 1 holds 127 + 1 rows, which is one block."""
    head = Linear("lm_head", 256, (Part("", 255, padded=True),), Placement.COLWISE)
    made = plan_of(
        tmp_path,
        {"lm_head.weight": ("F8_E4M3", (255, 256)), "lm_head.weight_scale_inv": ("F32", (2, 2))},
        head,
        config={"quantization_config": FP8_BLOCK},
        tp=2,
    ).check()
    shapes = {buffer.name: buffer.shape for buffer in next(made.tasks(1)).on_rank.buffers}
    assert shapes == {"weight": (128, 256), "weight_scale_inv": (1, 2)}


# --- steps are plain data -----------------------------------------------------------------------------------------


def test_a_read_says_where_its_bytes_lie_and_where_they_go(tmp_path):
    """L-13: file, first byte, dtype, shape, cut, buffer and region; nothing is looked up again."""
    node = Linear("l", 64, (Part("a", 32), Part("b", 32)), Placement.COLWISE)
    made = plan_of(tmp_path, {"l.a.weight": ("BF16", (32, 64)), "l.b.weight": ("BF16", (32, 64))}, node, tp=2).check()
    (task,) = made.tasks(1)
    a, b = task.reads
    entries = made.checkpoint.entries
    assert isinstance(b, Read)
    assert (b.name, b.file, b.start, b.dtype, b.shape) == (
        "l.b.weight",
        0,
        entries["l.b.weight"].start,
        "BF16",
        (32, 64),
    )
    assert (b.stem, b.segment, b.buffer, b.part, b.expert) == ("l", 0, "weight", "b", None)
    assert a.region == ((0, 16), (0, 64))
    assert b.region == ((16, 16), (0, 64))
    assert np.array_equal(b.cut.slices[0].indices(), np.arange(16, 32))
    assert task.checks == ()
    assert Check(b).rules == ()
