"""Routed experts from stored tensors to numbers: what each rank holds of them, in which order, and what they compute.

Ranks are run one after the other in this process and their outputs added; `test_experts_parallel.py` has real ones.
"""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from steelyard import execute
from steelyard.blueprint import Linear, Part, Placement
from steelyard.collectives import Groups
from steelyard.config import LoadConfig
from steelyard.errors import ConfigError, LoadError, PlanError
from steelyard.experts import DenseExperts, Experts
from steelyard.layers import frozen
from steelyard.planning import plan
from steelyard.ranks import Ranks
from steelyard.reader import WAYS
from support.experts import (
    CODED,
    FORMS,
    PARTS,
    STEM,
    LoopExperts,
    backend_of,
    coded,
    mixture,
    node_of,
    registry_with,
    stored_as,
    tokens_of,
    wholes_of,
)
from support.families import ToyMoe
from support.loading import executed, recording_format, registry_for, write_toy
from support.planned import (
    FP8_CHANNEL,
    TOY_M_CONFIG,
    error_texts,
    hollow,
    hollow_m,
    plain,
    plan_of,
    planned,
    toy_m_shapes,
)
from support.stored import bytes_of

UP_FIRST = ("up", "gate")
JOBS = [
    {},
    {"tp": 2},
    {"ep": 2},
    {"ep": 3},
    {"ep": 4},
    {"tp": 2, "ep": 4},
    {"ep": 2, "moe_tp": 2},
    {"tp": 2, "ep": 2, "moe_tp": 2, "world": 4},
    {"tp": 4, "ep": 2, "moe_tp": 2},
    {"moe_tp": 4, "world": 4},
]


def name_of(job):
    return "-".join(f"{key}{size}" for key, size in job.items()) or "one"


jobs = pytest.mark.parametrize("job", JOBS, ids=name_of)


def planned_layer(folder, tensors, node, *backends, form="split", config=None, options=None, **job):
    """Write a layer's checkpoint and return its plan, with findings."""
    write_toy(folder, tensors, config)
    return plan(folder, target="cpu", config=options, registry=registry_with(node, *backends, form=form), **job)


def layers_of(made):
    """Return every rank's layer, built from the file."""
    made.check()
    return [executed(made, rank)[0].built[STEM] for rank in range(made.job.world)]


def total(layers, made, batch):
    """Return the sum of what each rank's kernel makes of tokens; replicas of whole experts are counted once."""
    counted = layers if made.job.ep * made.job.moe_tp == made.job.world else layers[: made.job.tp]
    return sum(layer.kernel(*batch) for layer in counted)


def held(layer):
    """Return the experts that a rank's layer holds, in order."""
    return list(range(layer.local.experts.start, layer.local.experts.stop))


# --- what is computed --------------------------------------------------------------------------------------------


@jobs
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("order", [None, UP_FIRST], ids=["gate-first", "up-first"])
def test_the_ranks_together_compute_the_whole_layer(tmp_path, job, bias, order):
    """E-01, E-31, P-05, P-06, R073: with a bias in every matrix; down's is added by one of the ranks that share an expert."""
    node = node_of(5, bias=bias)
    wholes = wholes_of(node)
    backends = [] if order is None else [backend_of(order=order)]
    made = planned_layer(tmp_path, stored_as("split", wholes), node, *backends, **job)
    layers, batch = layers_of(made), tokens_of(node, 9)
    assert all(type(layer.kernel) is (DenseExperts if order is None else LoopExperts) for layer in layers)
    assert total(layers, made, batch).tolist() == mixture(wholes, *batch)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("job", [{}, {"ep": 2}, {"ep": 2, "moe_tp": 2}], ids=name_of)
def test_every_stored_form_gives_the_same_memory(tmp_path, form, job):
    """E-08, R068: single or stacked, with and without .weight, (out, in) or declared (in, out): equal bits on each rank."""
    node = node_of(3, bias=True)
    wholes = wholes_of(node)
    single = planned_layer(tmp_path / "split", stored_as("split", wholes), node, **job)
    other = planned_layer(tmp_path / form, stored_as(form, wholes), node, form=form, **job)
    for mine, theirs in zip(layers_of(single), layers_of(other), strict=True):
        assert {name: bytes_of(one) for name, one in mine.state_dict().items()} == {
            name: bytes_of(one) for name, one in theirs.state_dict().items()
        }
        assert held(mine) == held(theirs)


@pytest.mark.parametrize(
    ("count", "ep", "tp"), [(1, 1, 1), (8, 8, 1), (8, 1, 4), (2, 2, 2), (1, 2, 1), (2, 4, 1), (1, 1, 4), (4, 4, 4)]
)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_edge_sizes_compute_what_the_reference_does(tmp_path, count, ep, tp, top_k, tokens):
    """E-31: one expert, one choice, no token, one rank an expert, tp inside one expert, more ranks than experts."""
    if top_k > count:
        top_k = count
    node = node_of(count, top_k=top_k)
    wholes = wholes_of(node)
    made = planned_layer(tmp_path, stored_as("split", wholes), node, ep=ep, tp=tp)
    batch = tokens_of(node, tokens)
    found = total(layers_of(made), made, batch)
    assert found.shape == (tokens, 8)
    assert found.tolist() == mixture(wholes, *batch)


def test_a_rank_without_experts_reads_none_and_adds_zeros(tmp_path):
    """E-31, R034: two experts on three ranks; the last holds empty matrices, and says so."""
    node = node_of(2, bias=True)
    made = planned_layer(tmp_path, stored_as("split", wholes_of(node)), node, ep=3)
    layers, batch = layers_of(made), tokens_of(node, 4)
    assert [held(layer) for layer in layers] == [[0], [1], []]
    assert list(made.reads(2)) == []
    assert {name: list(one.shape) for name, one in layers[2].state_dict().items()} == {
        "kernel.w13": [0, 8, 8], "kernel.w2": [0, 8, 4], "kernel.w13_bias": [0, 8], "kernel.w2_bias": [0, 8],
    }  # fmt: skip
    assert layers[2].kernel(*batch).tolist() == [[0.0] * 8] * 4
    assert layers[2].extra_repr() == "2 experts (here none), 2 a token, inner 4 (here 4), relu"
    assert layers[1].extra_repr() == "2 experts (here 1 to 1), 2 a token, inner 4 (here 4), relu"


def test_experts_that_no_token_goes_to_change_nothing(tmp_path):
    """E-31: every token goes to expert 2 alone; what the others hold, NaN included, does not show."""
    node = node_of(4, top_k=1)
    wholes = wholes_of(node)
    for part in PARTS:
        wholes[part][[0, 1, 3]] = np.nan
    (layer,) = layers_of(planned_layer(tmp_path, stored_as("split", wholes), node))
    x, _, weights = tokens_of(node, 5)
    ids = torch.full((5, 1), 2)
    assert layer(x, ids, weights).tolist() == mixture(wholes, x, ids, weights)


def test_tokens_come_in_any_shape(tmp_path):
    """One token, a batch of sequences, a view that is not contiguous: the output has the input's shape."""
    node = node_of(3)
    wholes = wholes_of(node)
    (layer,) = layers_of(planned_layer(tmp_path, stored_as("split", wholes), node))
    x, ids, weights = tokens_of(node, 12)
    want = torch.tensor(mixture(wholes, x, ids, weights), dtype=torch.float32)
    assert torch.equal(layer(*(one.unflatten(0, (3, 4)) for one in (x, ids, weights))), want.unflatten(0, (3, 4)))
    turned = (one.unflatten(0, (3, 4)).transpose(0, 1) for one in (x, ids, weights))
    assert torch.equal(layer(*turned), want.unflatten(0, (3, 4)).transpose(0, 1))
    assert torch.equal(layer(x[0], ids[0], weights[0]), want[0])
    assert layer(*(one[:0].unflatten(0, (0, 4)) for one in (x, ids, weights))).shape == (0, 4, 8)


def test_another_number_of_experts_a_token_is_refused(tmp_path):
    node = node_of(4, top_k=2)
    (layer,) = layers_of(planned_layer(tmp_path, stored_as("split", wholes_of(node)), node))
    with pytest.raises(LoadError) as caught:
        layer(torch.zeros(1, 8), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 3))
    assert str(caught.value) == "experts: 3 experts a token, the node has 2"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_have_the_inputs_dtype_and_are_added_in_float32(tmp_path, dtype):
    """Two outputs of 256 and one of 1: a sum in bfloat16 would lose the one."""
    node = node_of(3, hidden=1, inner=1, top_k=3)
    ones = {part: np.ones((3, 1, 1), np.float32) for part in PARTS} | {
        "down": np.float32([256, -256, 1]).reshape(3, 1, 1)
    }
    made = planned_layer(tmp_path, stored_as("split", ones), node, options=LoadConfig(dtype=dtype))
    (layer,) = layers_of(made)
    x = torch.ones(1, 1, dtype=vars(torch)[dtype])
    for ids in ([0, 1, 2], [2, 0, 1], [0, 2, 1]):
        found = layer(x, torch.tensor([ids]), torch.ones(1, 3))
        assert (found.dtype, found.tolist()) == (x.dtype, [[1.0]])


# --- what each rank holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "first", "second"),
    [({"ep": 4}, (2, 8, 8), (2, 8, 4)), ({"tp": 2}, (8, 4, 8), (8, 8, 2))],
    ids=["ep4-tp1", "ep1-tp2"],
)
@pytest.mark.parametrize("order", [None, UP_FIRST, ("gate", "up"), ("down", "up", "gate")])
def test_gate_and_up_lie_in_the_order_that_the_form_asks_for(tmp_path, job, first, second, order):
    """E-01, R073: shapes as published; gate 1 and up 2; core's reference wants gate first, there is no order of core's."""
    node = node_of(8)
    wholes = wholes_of(node) | {part: np.full((8, 4, 8), value, np.float32) for part, value in (("gate", 1), ("up", 2))}
    backends = [] if order is None else [backend_of(order=order)]
    made = planned_layer(tmp_path, stored_as("stacked", wholes), node, *backends, form="stacked", **job)
    for layer in layers_of(made):
        tensors = layer.kernel.state_dict()
        w13, w2 = (tensors[name if order is None else f"{name}_weight"] for name in ("w13", "w2"))
        assert (tuple(w13.shape), tuple(w2.shape)) == (first, second)
        halves = [one.unique().tolist() for one in w13.chunk(2, 1)]
        assert halves == ([[1.0], [2.0]] if order in (None, ("gate", "up")) else [[2.0], [1.0]])


def test_a_form_without_an_order_keeps_the_nodes(tmp_path):
    """E-01: which is the family's: here up first."""
    node = node_of(2)
    turned = Linear("", 8, node.w13.parts[::-1], Placement.COLWISE)
    node = type(node)(STEM, 2, turned, node.w2, top_k=2, activation="relu")
    wholes = wholes_of(node)
    tensors = stored_as("split", wholes)
    (layer,) = layers_of(planned_layer(tmp_path / "fake", tensors, node, backend_of()))
    assert layer.kernel.order == UP_FIRST
    (reference,) = layers_of(planned_layer(tmp_path / "core", tensors, node))
    batch = tokens_of(node, 6)
    assert layer(*batch).tolist() == reference(*batch).tolist() == mixture(wholes, *batch)


@pytest.mark.parametrize(
    ("count", "ep", "sizes"), [(6, 4, [2, 2, 1, 1]), (5, 2, [3, 2]), (30, 8, [4] * 6 + [3] * 2), (8, 4, [2] * 4)]
)
def test_experts_that_do_not_divide_are_loaded_and_run(tmp_path, count, ep, sizes):
    """R034, E-02: the first ranks take one more; each expert is in one rank's memory, and the sum is the whole layer's."""
    node = node_of(count, hidden=4, inner=2)
    wholes = wholes_of(node)
    made = planned_layer(tmp_path, stored_as("split", wholes), node, ep=ep)
    layers, batch = layers_of(made), tokens_of(node, 20)
    assert [len(held(layer)) for layer in layers] == sizes
    assert [expert for layer in layers for expert in held(layer)] == list(range(count))
    kept = torch.cat([layer.kernel.w2 for layer in layers])
    assert kept.tolist() == wholes["down"].tolist()
    assert total(layers, made, batch).tolist() == mixture(wholes, *batch)


def test_experts_that_must_be_even_are_refused(tmp_path):
    """E-02: ``experts="even"``; where they divide, nothing changes."""
    node = node_of(10)
    tensors = stored_as("split", wholes_of(node))
    made = planned_layer(tmp_path / "four", tensors, node, ep=4, options=LoadConfig(experts="even"))
    assert error_texts(made) == ["experts: 10 experts do not divide by ep 4 and experts='even'"]
    layers = layers_of(planned_layer(tmp_path / "five", tensors, node, ep=5, options=LoadConfig(experts="even")))
    assert [held(layer) for layer in layers] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_whole_experts_take_whole_scales_whatever_the_dense_rank_is(tmp_path):
    """E-03: ep 4 and tp 4; rank 3 holds experts 6 and 7 whole, four scales of gate and of up each."""
    node = node_of(8)
    tensors, worth = coded(stored_as("split", wholes_of(node)))
    made = planned_layer(tmp_path, tensors, node, backend_of(order=("gate", "up")), config=CODED, ep=4, tp=4)
    reads = {read.name: read for read in made.check().reads(3)}
    assert [
        (one.start, one.length) for one in reads["experts.6.gate.scale"].cut.slices
    ] == [(0, 4), (0, 1)]  # fmt: skip
    layer = layers_of(made)[3]
    for local, expert in enumerate((6, 7)):
        want = np.concatenate([worth[f"{STEM}.{expert}.{part}.weight"] for part in ("gate", "up")])
        assert layer.kernel.w13_weight[local].tolist() == want.tolist()


def test_the_rank_inside_an_expert_cuts_weights_scales_and_biases(tmp_path):
    """E-03: world 4, tp 4, ep 2, moe_tp 2: rank 3 is second inside its experts, and fourth of the dense layers."""
    node = node_of(4, bias=True)
    wholes = wholes_of(node)
    tensors, worth = coded(stored_as("split", wholes))
    made = planned_layer(tmp_path, tensors, node, backend_of(order=("gate", "up")), config=CODED, tp=4, ep=2, moe_tp=2)
    for rank, layer in enumerate(layers_of(made)):
        rows, first = slice(2 * (rank % 2), 2 * (rank % 2) + 2), 2 * (rank // 2)
        assert held(layer) == [first, first + 1]
        tensors = layer.kernel.state_dict()
        for local, expert in enumerate(held(layer)):
            gate, up, down = (worth[f"{STEM}.{expert}.{part}.weight"] for part in PARTS)
            assert tensors["w13_weight"][local].tolist() == np.concatenate([gate[rows], up[rows]]).tolist()
            assert tensors["w2_weight"][local].tolist() == down[:, rows].tolist()
            gate, up, down = (wholes[f"{part}.bias"][expert] for part in PARTS)
            assert tensors["w13_bias"][local].tolist() == np.concatenate([gate[rows], up[rows]]).tolist()
            assert tensors["w2_bias"][local].tolist() == (down.tolist() if rank % 2 == 0 else [0.0] * 8)


def test_quantized_experts_compute_what_their_worth_does(tmp_path):
    """E-03: codes and scales of each rank's piece, through prepare and the kernel."""
    node = node_of(5)
    tensors, worth = coded(stored_as("split", wholes_of(node)))
    made = planned_layer(tmp_path, tensors, node, backend_of(order=UP_FIRST), config=CODED, ep=2, moe_tp=2)
    batch = tokens_of(node, 8)
    wholes = {part: np.stack([worth[f"{STEM}.{expert}.{part}.weight"] for expert in range(5)]) for part in PARTS}
    assert total(layers_of(made), made, batch).tolist() == mixture(wholes, *batch)


def test_a_stack_is_narrowed_to_the_ranks_experts_and_halves(tmp_path):
    """R073: world 4, tp 2, ep 2, moe_tp 2; expert e holds e + 1; the second pair holds 3 and 4, 128 rows of each half."""
    node = node_of(4, hidden=16, inner=256)
    numbers = np.arange(1, 5, dtype=np.float32).reshape(4, 1, 1)
    wholes = {"gate": numbers * np.ones((1, 256, 16), np.float32), "up": -numbers * np.ones((1, 256, 16), np.float32)}
    wholes |= {"down": numbers * np.arange(256, dtype=np.float32) * np.ones((1, 16, 1), np.float32)}
    made = planned_layer(tmp_path, stored_as("stacked", wholes), node, form="stacked", world=4, tp=2, ep=2, moe_tp=2)
    for rank, layer in enumerate(layers_of(made)):
        mine = [[1.0, 2.0], [3.0, 4.0]][rank // 2]
        gate, up = layer.kernel.w13.chunk(2, 1)
        assert gate.shape == up.shape == (2, 128, 16)
        assert [one.unique().tolist() for one in gate] == [[one] for one in mine]
        assert [one.unique().tolist() for one in up] == [[-one] for one in mine]
        columns = np.arange(128) + 128 * (rank % 2)
        assert layer.kernel.w2[:, 0].tolist() == [(one * columns).tolist() for one in mine]


def test_the_width_of_an_expert_must_divide(tmp_path):
    """E-04: 6 rows over 4 ranks; where experts stay whole, tp does not matter."""
    node = node_of(4, inner=6)
    tensors = stored_as("split", wholes_of(node))
    made = planned_layer(tmp_path / "cut", tensors, node, tp=4)
    assert error_texts(made) == ["experts: cannot cut out[0:6]: 6 elements do not divide by tp 4; sizes that fit: 1, 2, 3, 6"]  # fmt: skip
    layers = layers_of(planned_layer(tmp_path / "whole", tensors, node, tp=4, ep=4))
    assert {tuple(layer.kernel.w13.shape) for layer in layers} == {(1, 12, 8)}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    count=st.integers(1, 7),
    ep=st.integers(1, 5),
    moe_tp=st.integers(1, 4),
    width=st.integers(1, 3),
    hidden=st.integers(1, 6),
    form=st.sampled_from(FORMS),
    order=st.sampled_from([("gate", "up"), UP_FIRST]),
)
def test_every_element_of_every_expert_is_on_one_rank(count, ep, moe_tp, width, hidden, form, order):
    """P-04, E-08, E-10: numbers that are all different; what the ranks hold, joined, is the checkpoint, whatever its form."""
    node = node_of(count, hidden, width * moe_tp, top_k=1)
    wholes, at = {}, 1
    for part in PARTS:
        shape = (count, node.w2.parts[0].out, width * moe_tp) if part == "down" else (count, width * moe_tp, hidden)
        wholes[part] = np.arange(at, at + np.prod(shape), dtype=np.float32).reshape(shape)
        at += wholes[part].size
    with tempfile.TemporaryDirectory() as folder:
        job = {"ep": ep, "moe_tp": moe_tp} if ep > 1 else {"tp": moe_tp}
        made = planned_layer(Path(folder), stored_as(form, wholes), node, backend_of(order=order), form=form, **job)
        layers = layers_of(made)
    joined = {part: [] for part in PARTS}
    for first in range(0, ep * moe_tp, moe_tp):
        mine = [layer.kernel.state_dict() for layer in layers[first : first + moe_tp]]
        for place, part in enumerate(order):
            joined[part].append(torch.cat([one["w13_weight"].chunk(2, 1)[place] for one in mine], 1))
        joined["down"].append(torch.cat([one["w2_weight"] for one in mine], 2))
    for part, pieces in joined.items():
        assert torch.cat(pieces).tolist() == wholes[part].tolist()


# --- what is stored ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "inner"), [(8, 4), (4, 4), (4, 2)], ids=["2M=H", "H=M", "2M=H=4"])
@pytest.mark.parametrize("form", ["stacked", "in_first"])
def test_squares_are_turned_only_where_they_are_declared_so(tmp_path, hidden, inner, form):
    """E-10: gate_up is square where 2M = H, down where M = H; the same bytes mean what the mapping says."""
    rng = np.random.default_rng(4)
    node = node_of(2, hidden, inner)
    turned = form == "in_first"
    shape = (2, hidden, 2 * inner) if turned else (2, 2 * inner, hidden)
    fused = rng.integers(-9, 9, shape).astype(np.float32)
    down = rng.integers(-9, 9, (2, inner, hidden) if turned else (2, hidden, inner)).astype(np.float32)
    tensors = {f"{STEM}.gate_up": fused, f"{STEM}.down": down}
    (layer,) = layers_of(planned_layer(tmp_path, tensors, node, form=form))
    gate, up = layer.kernel.w13.chunk(2, 1)
    if turned:
        wanted = fused[:, :, :inner].swapaxes(1, 2), fused[:, :, inner:].swapaxes(1, 2), down.swapaxes(1, 2)
    else:
        wanted = fused[:, :inner], fused[:, inner:], down
    assert [gate.tolist(), up.tolist(), layer.kernel.w2.tolist()] == [one.tolist() for one in wanted]


@pytest.mark.parametrize(
    ("name", "shape", "found", "axes"),
    [
        ("gate_up", (7, 16, 8), "[7, 16, 8]", "[8, 16, 8] = [expert, out, in]"),
        ("gate_up", (16, 8), "[16, 8]", "[8, 16, 8] = [expert, out, in]"),
        ("down", (8, 4, 16), "[8, 4, 16]", "[8, 8, 8] = [expert, out, in]"),
        ("down", (8, 8, 8, 1), "[8, 8, 8, 1]", "[8, 8, 8] = [expert, out, in]"),
    ],
)
def test_a_stack_of_another_shape_is_refused_with_both_shapes(tmp_path, name, shape, found, axes):
    """E-09: number of experts, rank, axes; said once, not once an expert."""
    node = node_of(8, 8, 8)
    tensors = stored_as("stacked", wholes_of(node)) | {f"{STEM}.{name}": np.zeros(shape, np.float32)}
    (text,) = error_texts(planned_layer(tmp_path, tensors, node, form="stacked"))
    assert text.startswith(f"{STEM}.{name} (model.safetensors): stored shape {found}, experts expects {axes} with ")


def test_an_expert_that_is_not_there_is_listed_with_its_projection(tmp_path):
    """E-06: two of them at once, and no other; nothing is built."""
    node = node_of(6)
    tensors = stored_as("split", wholes_of(node))
    del tensors[f"{STEM}.5.up.weight"], tensors[f"{STEM}.1.down.weight"]
    made = planned_layer(tmp_path, tensors, node, ep=2)
    also = f"(also looked for {STEM}.{{fused}}, {STEM}.{{fused}}.weight)"
    assert error_texts(made) == [
        f"missing tensor {STEM}.5.up.weight {also.format(fused='gate_up')}, needed for experts.5",
        f"missing tensor {STEM}.1.down.weight {also.format(fused='down')}, needed for experts.1",
    ]
    with pytest.raises(PlanError):
        next(iter(made.reads(0)))


def test_an_expert_that_is_there_twice_does_not_stand_for_another(tmp_path):
    """E-06: expert 4 twice and 5 never is two errors, though the count is right."""
    node = node_of(6)
    tensors = stored_as("split", wholes_of(node))
    for part in PARTS:
        tensors[f"{STEM}.04.{part}.weight"] = tensors.pop(f"{STEM}.5.{part}.weight")
    texts = error_texts(planned_layer(tmp_path, tensors, node))
    assert {text.split()[2] for text in texts if text.startswith("missing tensor")} == {
        f"{STEM}.5.{part}.weight" for part in PARTS
    }
    assert {text.split()[2] for text in texts if text.startswith("unexpected tensor")} == {
        f"{STEM}.04.{part}.weight" for part in PARTS
    }
    assert len(texts) == 6


def test_an_expert_under_two_published_names_is_a_duplicate(tmp_path):
    """E-06: as Mixtral names it and as Qwen3 does."""
    tensors = plain(toy_m_shapes(TOY_M_CONFIG | {"num_hidden_layers": 1}))
    twice = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    tensors[twice] = tensors["model.layers.0.mlp.experts.2.gate_proj.weight"]
    hollow_m(tmp_path, tensors=tensors, num_hidden_layers=1)
    assert error_texts(planned(tmp_path, ep=2)) == [
        f"duplicate tensors model.layers.0.mlp.experts.2.gate_proj.weight and {twice}: "
        "both are layers.0.mlp.experts.2's weight; keep one of them (model.safetensors)"
    ]


@pytest.mark.parametrize("name", ["x.gate.weight", "3.gates.weight", "8.gate.weight", "-1.up.weight", "gate.weight"])
def test_names_that_are_nearly_an_experts_are_refused(tmp_path, name):
    """E-05: on the ranks that would not hold the expert too."""
    node = node_of(8)
    tensors = stored_as("split", wholes_of(node)) | {f"{STEM}.{name}": np.zeros((4, 8), np.float32)}
    for job in ({}, {"ep": 4}):
        texts = error_texts(planned_layer(tmp_path / str(job), tensors, node, **job))
        assert len(texts) == 1
        assert texts[0].startswith(f"unexpected tensor {STEM}.{name} ")


def test_single_experts_beside_a_stack_are_refused(tmp_path):
    """R068: experts 0 to 2 single, and a stack too."""
    node = node_of(4)
    wholes = wholes_of(node)
    single = {name: one for name, one in stored_as("split", wholes).items() if f"{STEM}.3." not in name}
    texts = error_texts(planned_layer(tmp_path, single | stored_as("stacked", wholes), node, form="stacked"))
    assert {text.partition(":")[0] for text in texts} == {
        f"duplicate tensors {STEM}.{expert}.{part}.weight and {STEM}.{'down' if part == 'down' else 'gate_up'}"
        for expert in range(3)
        for part in PARTS
    }


def test_gate_and_up_of_unlike_floats_are_one_buffer(tmp_path):
    """Plain floats are cast to the parameter's dtype; that is no reason to refuse."""
    node = node_of(2)
    wholes = wholes_of(node)
    tensors = {
        name: one.astype(np.float16) if ".up." in name else one for name, one in stored_as("split", wholes).items()
    }
    (layer,) = layers_of(planned_layer(tmp_path, tensors, node))
    batch = tokens_of(node, 3)
    assert layer(*batch).tolist() == mixture(wholes, *batch)


def test_gate_and_up_of_unlike_schemes_are_refused(tmp_path):
    """E-06: they must be stored alike, for they lie in one buffer; the text says in which way they differ."""
    node = node_of(2)
    plain_tensors = stored_as("split", wholes_of(node))
    tensors, _ = coded(plain_tensors)
    for expert in range(2):
        del tensors[f"{STEM}.{expert}.up.scale"]
        tensors[f"{STEM}.{expert}.up.weight"] = plain_tensors[f"{STEM}.{expert}.up.weight"]
    config = {"quantization_config": {"quant_method": "channel", "ignore": [".up"]}}
    made = planned_layer(tmp_path, tensors, node, backend_of(), config=config)
    assert error_texts(made) == [
        "experts: gate and up are quantized differently; gate and up of an expert must lie in one buffer"
    ]


def test_scales_of_gate_and_up_in_unlike_dtypes_are_refused(tmp_path):
    """E-06: a scale is never cast."""
    node = node_of(2, hidden=256, inner=256)
    tensors = {}
    for expert in range(2):
        for part in PARTS:
            code = "F32" if part == "up" else "BF16"
            tensors |= {f"experts.{expert}.{part}.weight": ("F8_E4M3", (256, 256))}
            tensors |= {f"experts.{expert}.{part}.weight_scale": (code, (256, 1))}
    made = plan_of(tmp_path, tensors, node, config={"quantization_config": FP8_CHANNEL})
    assert error_texts(made) == [
        "experts: weight_scale of gate and up is stored as BF16 and F32; "
        "gate and up of an expert must lie in one buffer"
    ]


@pytest.mark.parametrize("way", WAYS)
def test_every_reader_takes_a_ranks_own_experts_alone(tmp_path, way):
    """R071: four experts, EP 2, four shards; 6 tensors of the rank's own range and their very bytes, counted at the reader."""
    config = TOY_M_CONFIG | {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
    tensors = plain(toy_m_shapes(config))
    hollow(tmp_path, config, tensors, shards=4)
    made = plan(tmp_path, ep=2, target="cpu", registry=registry_for(ToyMoe, others=(recording_format([]),))).check()
    sizes = {name: 2 * int(np.prod(shape)) for name, (_, shape) in tensors.items()}
    for rank in range(2):
        built, reader = executed(made, rank, way)
        of_experts = [name for name in reader.names if ".experts." in name]
        assert sorted(of_experts) == sorted(
            f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            for expert in (2 * rank, 2 * rank + 1)
            for part in PARTS
        )
        assert len(of_experts) == 6
        assert built.received == {name: sizes[name] for name in reader.names}
        asked = sum(built.received.values())
        if way == "pread":
            assert reader.bytes_read == asked
        else:  # whole pages, those at the ends of a tensor too
            assert asked <= reader.bytes_read <= asked + 2 * 4096 * len(reader.names)
        assert built.built["layers.0.mlp.experts"].node.top_k == 2


# --- how a layer is quantized ------------------------------------------------------------------------------------


def test_a_layer_that_the_config_says_nothing_of_inherits_and_one_that_it_names_does_not(tmp_path):
    """E-22: "not given" is the config's scheme, "none" is plain; a file that says otherwise is refused."""
    node = node_of(3)
    wholes = wholes_of(node)
    plain_tensors = stored_as("split", wholes)
    tensors, worth = coded(plain_tensors)
    fake = backend_of(order=("gate", "up"))
    inherits = planned_layer(tmp_path / "inherits", tensors, node, fake, config=CODED).check()
    named = {"quantization_config": {"quant_method": "channel", "ignore": [STEM]}}
    is_none = planned_layer(tmp_path / "none", plain_tensors, node, fake, config=named).check()
    nothing = planned_layer(tmp_path / "nothing", plain_tensors, node, fake).check()
    keys = [[task.segment.scheme.key(experts=True) for task in made.tasks(0)] for made in (inherits, is_none, nothing)]
    assert keys == [["int8.channel.experts"] * 2, ["float.plain.experts"] * 2, ["float.plain.experts"] * 2]
    batch = tokens_of(node, 5)
    codes = {part: np.stack([worth[f"{STEM}.{expert}.{part}.weight"] for expert in range(3)]) for part in PARTS}
    for made, want in ((inherits, codes), (is_none, wholes), (nothing, wholes)):
        (layer,) = layers_of(made)
        assert layer(*batch).tolist() == mixture(want, *batch)
    for config, stored in ((CODED, plain_tensors), (named, tensors)):
        assert error_texts(planned_layer(tmp_path / "wrong", stored, node, fake, config=config))


# --- tensors and memory ------------------------------------------------------------------------------------------


@pytest.fixture
def layer(tmp_path):
    """Return a layer of three experts with biases, on core's reference kernel."""
    node = node_of(3, bias=True)
    (made,) = layers_of(planned_layer(tmp_path, stored_as("split", wholes_of(node)), node))
    return made


def kernels_tensors(value):
    """Return every tensor that a kernel's attributes reach, wherever it is kept."""
    found = []
    for one in value if isinstance(value, (list, tuple)) else value.values():
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, (dict, list, tuple)):
            found += kernels_tensors(one)
    return found


def test_a_kernel_holds_the_modules_parameters_and_nothing_else(layer):
    """E-23: one memory; a move to another device or dtype leaves nothing behind."""
    names = ["kernel.w13", "kernel.w13_bias", "kernel.w2", "kernel.w2_bias"]
    assert sorted(layer.state_dict()) == sorted(dict(layer.named_parameters())) == names
    for name, parameter in layer.named_parameters():
        mine = getattr(layer.kernel, name.removeprefix("kernel."))
        assert (mine is parameter, mine.data_ptr()) == (True, parameter.data_ptr())
        assert not parameter.requires_grad
    assert len(kernels_tensors(vars(layer.kernel))) == 4
    for target in (torch.float64, torch.bfloat16, torch.device("meta")):
        layer.to(target)
        reached = kernels_tensors(vars(layer.kernel))
        assert {id(one) for one in reached} == {id(one) for one in layer.parameters()}
        assert all(target in (one.dtype, one.device) for one in reached)


def test_a_layer_that_was_moved_computes_with_what_was_moved(layer):
    """E-23: in another dtype, the forward is of that dtype."""
    node = layer.node
    x, ids, weights = tokens_of(node, 5)
    want = mixture(wholes_of(node), x, ids, weights)
    found = layer.to(torch.float64)(x.double(), ids, weights)
    assert (found.dtype, found.tolist()) == (torch.float64, want)
    assert layer.to(torch.float32)(x, ids, weights).tolist() == want


@pytest.mark.parametrize("how", ["in place", "another Parameter", "loaded"])
def test_a_replaced_weight_is_the_one_that_is_used(layer, how):
    """E-23: whichever way it is replaced."""
    node = layer.node
    batch = tokens_of(node, 5)
    wholes = wholes_of(node) | {"down": wholes_of(node, 7)["down"]}
    other = torch.from_numpy(wholes["down"])
    match how:
        case "in place":
            layer.kernel.w2.data.copy_(other)
        case "another Parameter":
            layer.kernel.w2 = frozen(other)
        case "loaded":
            layer.load_state_dict(layer.state_dict() | {"kernel.w2": other})
    assert layer(*batch).tolist() == mixture(wholes, *batch)


def test_a_kernel_of_another_class_moves_too(tmp_path):
    """E-23: what a backend builds is part of the module."""
    node = node_of(2)
    (layer,) = layers_of(planned_layer(tmp_path, stored_as("split", wholes_of(node)), node, backend_of(order=UP_FIRST)))
    assert {one.device.type for one in layer.to("meta").state_dict().values()} == {"meta"}


def test_a_kernel_that_is_no_module_is_refused(tmp_path):
    """E-23: its tensors would stay where they are."""

    class Loose(backend_of()):
        def experts(self, w13, w2, schemes, node):
            return lambda x, ids, weights: x

    node = node_of(2)
    made = planned_layer(tmp_path, stored_as("split", wholes_of(node)), node, Loose).check()
    with pytest.raises(LoadError) as caught:
        executed(made)
    assert str(caught.value) == "kernel backend fake: its experts kernel is a function, not an nn.Module"


def test_a_backend_that_fails_is_named(tmp_path):
    class Failing(backend_of()):
        def experts(self, w13, w2, schemes, node):
            raise ValueError("no such tile")

    node = node_of(2)
    made = planned_layer(tmp_path, stored_as("split", wholes_of(node)), node, Failing).check()
    with pytest.raises(LoadError) as caught:
        executed(made)
    assert str(caught.value) == "experts: kernel backend fake failed: ValueError: no such tile"


def test_a_backend_is_given_both_schemes_and_the_ranks_piece(tmp_path):
    """What `experts` gets: prepared tensors, each matrix's scheme, names left out of the node."""
    given = []

    class Recording(backend_of(order=UP_FIRST)):
        def experts(self, w13, w2, schemes, node):
            given.append((sorted(w13), sorted(w2), [one.key() for one in schemes], node))
            return super().experts(w13, w2, schemes, node)

    node = node_of(4, bias=True)
    config = {"quantization_config": {"quant_method": "channel", "ignore": [".down"]}}
    plain_tensors = stored_as("split", wholes_of(node))
    tensors, _ = coded(plain_tensors)
    for expert in range(4):
        del tensors[f"{STEM}.{expert}.down.scale"]
        tensors[f"{STEM}.{expert}.down.weight"] = plain_tensors[f"{STEM}.{expert}.down.weight"]
    layers_of(planned_layer(tmp_path, tensors, node, Recording, config=config, ep=2, moe_tp=2))
    assert [one[:3] for one in given] == [(["bias", "weight"],) * 2 + (["int8.channel", "float.plain"],)] * 4
    for rank, (*_, local) in enumerate(given):
        assert (local.node.stem, local.inner, local.is_first) == ("", 2, rank % 2 == 0)
        assert [part.name for part in local.w13.parts] == list(UP_FIRST)
        assert (local.experts.start, local.experts.stop) == (2 * (rank // 2), 2 * (rank // 2) + 2)


def test_biases_of_down_are_added_by_one_rank(tmp_path):
    """P-05, P-06: zero tokens of input leave the biases alone; the first rank gives down's, the second zeros."""
    node = node_of(2, bias=True, top_k=1)
    wholes = wholes_of(node) | {f"{part}.bias": np.zeros((2, 4), np.float32) for part in ("gate", "up")}
    made = planned_layer(tmp_path, stored_as("split", wholes), node, tp=2)
    first, second = (
        layer.kernel(torch.zeros(1, 8), torch.tensor([[1]]), torch.ones(1, 1)) for layer in layers_of(made)
    )
    assert first.tolist() == [wholes["down.bias"][1].tolist()]
    assert second.tolist() == [[0.0] * 8]


def test_what_memory_held_before_never_shows(tmp_path, monkeypatch):
    """E-06: buffers full of NaN; ranks with and without experts, biases that are one rank's alone."""
    real = execute.allocate
    monkeypatch.setattr(execute, "allocate", lambda *given: real(*given).fill_(float("nan")))
    node = node_of(3, bias=True)
    wholes = wholes_of(node)
    made = planned_layer(tmp_path, stored_as("stacked", wholes), node, form="stacked", ep=4, moe_tp=2)
    layers, batch = layers_of(made), tokens_of(node, 5)
    assert all(one.isfinite().all() for layer in layers for one in layer.state_dict().values())
    assert total(layers, made, batch).tolist() == mixture(wholes, *batch)


def test_tokens_out_of_range_get_zeros(layer):
    """Places that a router leaves empty, numbered -1 or past the last expert, are nobody's."""
    x, ids, weights = tokens_of(layer.node, 3)
    ids[0, 1], ids[2] = -1, 99
    weights[0, 1] = 5.0
    found = layer(x, ids, weights)
    alone = mixture(wholes_of(layer.node), x[:1], ids[:1, :1], weights[:1, :1])
    assert found[0].tolist() == alone[0]
    assert found[2].tolist() == [0.0] * 8


def test_a_layer_is_built_around_what_it_is_given(layer):
    """The layer holds its kernel once; ranks alone need no process group."""
    again = Experts(layer.node, layer.local, layer.kernel, Groups())
    batch = tokens_of(layer.node, 4)
    assert torch.equal(again(*batch), layer(*batch))
    assert isinstance(layer.kernel, nn.Module)
    with pytest.raises(ConfigError):
        Ranks.of(tp=2, ep=3, moe_tp=1, world=2)


def test_parts_that_a_reference_does_not_know_are_refused(tmp_path):
    """E-01: experts of one matrix before down are another computation."""
    node = node_of(2)
    single = Linear("", 8, (Part("gate", 4),), Placement.COLWISE)
    node = type(node)(STEM, 2, single, node.w2, top_k=1, activation="relu")
    tensors = {name: one for name, one in stored_as("split", wholes_of(node_of(2))).items() if ".up." not in name}
    (text,) = error_texts(planned_layer(tmp_path, tensors, node))
    assert "torch: computes experts of gate and up, not of gate" in text
