"""The executor: every element written exactly once, pieces one by one, and nothing kept of the file's memory."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard import execute
from steelyard.blueprint import Embedding, Experts, FillWith, Linear, Norm, Param, Part, Placement, Tie
from steelyard.config import LoadConfig
from steelyard.errors import LoadError, PlanError
from steelyard.execute import overlapping
from steelyard.layers import weight_of
from steelyard.layouts import Source
from steelyard.loadplan import LoadPlan
from steelyard.placement import Axis, Order
from steelyard.reader import WAYS
from steelyard.steps import Fill
from support.checkpoints import encode, values
from support.loading import ToyBackend, ToyKernel, ToyMethod, executed, plan_toy, recording_format
from support.stored import bytes_of

HIDDEN, OUT = 16, 32
QKV = Linear("qkv", HIDDEN, tuple(Part(name, OUT) for name in ("q", "k", "v")), Placement.COLWISE)
DOWN = Linear("down", OUT, (Part("", HIDDEN),), Placement.ROWWISE)
NORM = Norm("norm", HIDDEN)
QUANTIZED = {"quantization_config": {"quant_method": "toy"}}
both = pytest.mark.parametrize("way", WAYS)


def plain_tensors():
    shapes = {
        "down.weight": (HIDDEN, OUT),
        "norm.weight": (HIDDEN,),
        "qkv.k.weight": (OUT, HIDDEN),
        "qkv.q.weight": (OUT, HIDDEN),
        "qkv.v.weight": (OUT, HIDDEN),
    }
    return {name: values(place, shape) for place, (name, shape) in enumerate(shapes.items())}


def toy_tensors(stems=("qkv.q", "qkv.k", "qkv.v"), rows=OUT, columns=HIDDEN, group=None):
    """Return the tensors of a quantized Linear; scales are 1, 2, 3, ... and input scales 3, 6, 9, ... / 2."""
    tensors = {}
    for place, stem in enumerate(stems):
        tensors[f"{stem}.codes"] = values(place, (rows, columns)).astype(np.int8)
        tensors[f"{stem}.scale"] = np.float32(place + 1)
        tensors[f"{stem}.input_scale"] = np.float32(3 * (place + 1) / 2)
        tensors[f"{stem}.g_idx"] = (np.arange(columns) // (group or columns)).astype(np.int32)
    return tensors


def expected_rows(tensors, stems=("qkv.q", "qkv.k", "qkv.v")):
    return np.concatenate([tensors[f"{one}.codes"].astype(np.float32) * tensors[f"{one}.scale"] for one in stems])


def kernel_of(module):
    (kernel,) = (one for one in module.modules() if isinstance(one, ToyKernel))
    return kernel


def bias_of(module):
    (bias,) = (value for name, value in module.state_dict().items() if "bias" in name)
    return bias


@pytest.fixture
def poison(monkeypatch):
    """Return a function that makes every fresh buffer hold one byte pattern."""
    real = execute.allocate

    def set_pattern(pattern):
        def poisoned(shape, code, device):
            made = real(shape, code, device)
            if made.numel():
                made.reshape(-1).view(torch.uint8).fill_(pattern)
            return made

        monkeypatch.setattr(execute, "allocate", poisoned)

    return set_pattern


# --- values ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("shards", [1, 3])
def test_plain_nodes_hold_what_is_stored(tmp_path, way, shards):
    tensors = plain_tensors()
    made, _ = executed(plan_toy(tmp_path, tensors, QKV, DOWN, NORM, shards=shards), way=way)
    parts = np.concatenate([tensors[f"qkv.{part}.weight"] for part in "qkv"])
    assert bytes_of(weight_of(made.built["qkv"])) == parts.tobytes()
    assert bytes_of(weight_of(made.built["down"])) == tensors["down.weight"].tobytes()
    assert bytes_of(made.built["norm"].weight) == tensors["norm.weight"].tobytes()


@both
@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_holds_its_slice(tmp_path, way, tp):
    """P-24, cases' rank rules: rows of colwise parts, columns of rowwise ones, bit for bit."""
    tensors = plain_tensors()
    made = plan_toy(tmp_path, tensors, QKV, DOWN, NORM, tp=tp)
    rows, columns = OUT // tp, OUT // tp
    for rank in range(tp):
        built = executed(made, rank, way)[0].built
        mine = [tensors[f"qkv.{part}.weight"][rank * rows : (rank + 1) * rows] for part in "qkv"]
        assert weight_of(built["qkv"]).tolist() == np.concatenate(mine).tolist()
        assert (
            weight_of(built["down"]).tolist()
            == tensors["down.weight"][:, rank * columns : (rank + 1) * columns].tolist()
        )
        assert built["norm"].weight.tolist() == tensors["norm.weight"].tolist()


def test_quantized_parts_are_prepared_together(tmp_path):
    """X-02: from the config's quantization to the kernel, nothing mocked. Scales one a part, the index once, the largest input scale: what `prepare` is given."""
    tensors = toy_tensors()
    built = executed(plan_toy(tmp_path, tensors, QKV, config=QUANTIZED))[0].built["qkv"]
    assert kernel_of(built).weight.tolist() == expected_rows(tensors).tolist()
    assert kernel_of(built).input_scale.tolist() == 4.5


@pytest.mark.parametrize("patterns", [(0xFF, 0x5A)], ids=["nan-and-5a"])
def test_what_memory_held_before_never_shows(tmp_path, poison, patterns):
    """Cases' common definitions: two poison patterns, one result; NaN is 0xFF in every float."""
    nodes = (
        QKV,
        Embedding("embed", 10, HIDDEN, Placement.COLWISE),
        Norm("norm", HIDDEN, absent=FillWith(1.0)),
        Param("scale", (Axis("out"),), out=4, absent=FillWith(0.5)),
        Linear("head", HIDDEN, (Part("", 10, padded=True),), Placement.COLWISE, bias=True),
    )
    tensors = toy_tensors() | {
        "embed.weight": values(1, (10, HIDDEN)),
        "head.weight": values(2, (10, HIDDEN)),
        "head.bias": values(3, (10,)),
    }
    del tensors["qkv.q.g_idx"], tensors["qkv.k.g_idx"], tensors["qkv.v.g_idx"]
    config = {"quantization_config": {"quant_method": "toy", "ignore": ["head"]}}
    made = plan_toy(tmp_path, tensors, *nodes, config=config, tp=4)
    seen = []
    for pattern in patterns:
        poison(pattern)
        built = [executed(made, rank)[0].built for rank in range(4)]
        seen.append(
            [
                (stem, name, bytes_of(value))
                for one in built
                for stem, module in one.items()
                for name, value in module.state_dict().items()
            ]
        )
    assert seen[0] == seen[1]
    assert built[3]["norm"].weight.tolist() == [1.0] * HIDDEN
    assert built[3]["scale"].value.tolist() == [0.5] * 4


def test_a_padded_vocabulary_ends_with_zeros(tmp_path, poison):
    """R036, R037: 10 rows over 4 ranks are 4 x 3; the last rank holds one row and two of zeros."""
    poison(0xFF)
    nodes = (
        Embedding("embed", 10, HIDDEN, Placement.COLWISE),
        Linear("head", HIDDEN, (Part("", 10, padded=True),), Placement.COLWISE, bias=True),
    )
    tensors = {
        "embed.weight": values(1, (10, HIDDEN)),
        "head.weight": values(2, (10, HIDDEN)),
        "head.bias": values(3, (10,)),
    }
    built = executed(plan_toy(tmp_path, tensors, *nodes, tp=4), 3)[0].built
    zeros = [[0.0] * HIDDEN] * 2
    assert built["embed"].weight.tolist() == [tensors["embed.weight"][9].tolist(), *zeros]
    assert weight_of(built["head"]).tolist() == [tensors["head.weight"][9].tolist(), *zeros]
    assert bias_of(built["head"]).tolist() == [tensors["head.bias"][9], 0.0, 0.0]


@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("held", ["float32", "bfloat16", "float16"])
def test_plain_floats_are_cast_among_each_other(tmp_path, stored, held):
    """L-31: value casts are for the three plain floats, each as torch rounds it."""
    exact = np.array([1, -2, 0.5, 0, 3.5, -7, 1.25, 448], np.float32)
    plan = plan_toy(tmp_path, {"norm.weight": encode(exact, stored)}, Norm("norm", 8), options=LoadConfig(dtype=held))
    weight = executed(plan)[0].built["norm"].weight
    assert weight.dtype == vars(torch)[held]
    assert weight.tolist() == exact.tolist()


def test_rounding_is_that_of_torch(tmp_path):
    wide = np.random.default_rng(3).standard_normal(512).astype(np.float32)
    options = LoadConfig(dtype="bfloat16")
    built = executed(plan_toy(tmp_path, {"norm.weight": wide}, Norm("norm", 512), options=options))[0].built
    assert bytes_of(built["norm"].weight) == bytes_of(torch.from_numpy(wide).to(torch.bfloat16))


@pytest.mark.parametrize("stored", ["F8_E4M3", "I32", "F64", "U8"])
def test_codes_never_land_in_a_plain_parameter(tmp_path, stored):
    """L-31: found on the plan, before anything is read; the text has both dtypes."""
    raw = (stored, (8,), bytes(8 * {"F8_E4M3": 1, "I32": 4, "F64": 8, "U8": 1}[stored]))
    with pytest.raises(PlanError) as caught:
        plan_toy(tmp_path, {"norm.weight": raw}, Norm("norm", 8))
    assert f"stored as {stored}, norm takes F32 or BF16 or F16" in str(caught.value)


def test_the_executor_itself_refuses_to_cast_codes(tmp_path, monkeypatch):
    """L-31: also where a plan, wrongly, asks for it."""
    plan = plan_toy(tmp_path, {"norm.weight": np.ones(8, np.float32)}, Norm("norm", 8))
    tampered(monkeypatch, lambda task: {"reads": tuple(dataclasses.replace(read, dtype="I32") for read in task.reads)})
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == "norm.weight: a piece stored as I32 cannot become F32"


@pytest.mark.parametrize("stored", ["F32", "BF16"])
def test_values_too_large_for_float16_are_an_error(tmp_path, stored):
    """A cast may round, and may not make infinities where there were numbers."""
    large = np.array([1, 2.0**17, -(2.0**17), np.inf], np.float32)
    plan = plan_toy(
        tmp_path, {"norm.weight": encode(large, stored)}, Norm("norm", 4), options=LoadConfig(dtype="float16")
    )
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == (
        f"{tmp_path}: stored values contradict the plan:\n"
        "  - norm.weight (model.safetensors): 2 of 4 values are too large for F16"
    )


def test_values_too_large_for_bfloat16_are_an_error(tmp_path):
    """L-31: F32 reaches a little further than BF16 rounds."""
    largest = np.finfo(np.float32).max
    plan = plan_toy(
        tmp_path,
        {"norm.weight": np.array([1, largest, -1, 0], np.float32)},
        Norm("norm", 4),
        options=LoadConfig(dtype="bfloat16"),
    )
    with pytest.raises(LoadError, match=r"norm\.weight .*: 1 of 4 values are too large for BF16$"):
        executed(plan)


# --- exactly once ------------------------------------------------------------------------------------------------


def tampered(monkeypatch, change):
    """Make every plan's tasks differ by what ``change(task)`` says."""
    real = LoadPlan.tasks

    def tasks(self, rank):
        for task in real(self, rank):
            yield dataclasses.replace(task, **change(task))

    monkeypatch.setattr(LoadPlan, "tasks", tasks)


def test_an_element_written_twice_is_an_error(tmp_path, monkeypatch):
    plan = plan_toy(tmp_path, plain_tensors(), QKV, DOWN, NORM)
    tampered(monkeypatch, lambda task: {"reads": (*task.reads, task.reads[0])} if task.stem == "qkv" else {})
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == (
        f"qkv.weight: {4 * OUT * HIDDEN} of {3 * OUT * HIDDEN} elements were written, "
        f"[(0, {OUT}), (0, {HIDDEN})] (start, length) more than once; the plan does not cover it exactly once"
    )


def test_an_element_that_is_never_written_is_an_error(tmp_path, monkeypatch):
    plan = plan_toy(tmp_path, plain_tensors(), QKV, DOWN, NORM)
    tampered(monkeypatch, lambda task: {"reads": task.reads[:2]} if task.stem == "qkv" else {})
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == (
        f"qkv.weight: {2 * OUT * HIDDEN} of {3 * OUT * HIDDEN} elements were written; "
        "the plan does not cover it exactly once"
    )


def test_one_part_twice_and_another_never_is_an_error_although_the_count_is_right(tmp_path, monkeypatch):
    """A count alone would let uninitialised memory through."""
    plan = plan_toy(tmp_path, plain_tensors(), QKV, DOWN, NORM)
    tampered(monkeypatch, lambda task: {"reads": (task.reads[0], *task.reads[:2])} if task.stem == "qkv" else {})
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == (
        f"qkv.weight: {3 * OUT * HIDDEN} of {3 * OUT * HIDDEN} elements were written, "
        f"[(0, {OUT}), (0, {HIDDEN})] (start, length) more than once; the plan does not cover it exactly once"
    )


def test_a_node_without_any_step_is_an_error(tmp_path, monkeypatch):
    plan = plan_toy(tmp_path, plain_tensors(), QKV, DOWN, NORM)
    tampered(monkeypatch, lambda task: {"reads": ()} if task.stem == "norm" else {})
    with pytest.raises(LoadError, match=f"^norm.weight: 0 of {HIDDEN} elements were written;"):
        executed(plan)


def test_a_fill_over_a_read_is_an_error(tmp_path, monkeypatch):
    plan = plan_toy(tmp_path, plain_tensors(), QKV, DOWN, NORM)
    fill = Fill("norm", 0, "weight", ((4, 2),), 0.0)
    tampered(monkeypatch, lambda task: {"fills": (fill,)} if task.stem == "norm" else {})
    with pytest.raises(LoadError, match=r"^norm.weight: 18 of 16 elements were written, \[\(4, 2\)\] "):
        executed(plan)


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 3))] * 2), max_size=6))
def test_overlaps_are_found_as_counting_every_element_finds_them(regions):
    counts = np.zeros((8, 8), int)
    for (row, rows), (column, columns) in regions:
        counts[row : row + rows, column : column + columns] += 1
    found = overlapping(regions)
    assert (found is not None) == bool((counts > 1).any())
    assert found is None or found in regions


def test_a_scalar_may_be_written_once():
    assert overlapping([()]) is None
    assert overlapping([(), ()]) == ()


def test_an_executor_runs_once(tmp_path):
    """L-32: a second run would prepare what is prepared."""
    plan = plan_toy(tmp_path, toy_tensors(), QKV, config=QUANTIZED)
    with plan.load_format[1].open(plan.checkpoint, "mmap") as reader:
        executor = execute.Executor(plan, 0, torch.device("cpu"), reader, execute.Groups(), lambda: None)
        made = executor.run()
        before = kernel_of(made.built["qkv"]).weight.clone()
        with pytest.raises(RuntimeError, match="^an Executor runs once; make another for another load$"):
            executor.run()
    assert torch.equal(kernel_of(made.built["qkv"]).weight, before)


def experts_and_tensors(count=3, inner=8):
    w13 = Linear("", HIDDEN, (Part("gate", inner), Part("up", inner)), Placement.COLWISE)
    w2 = Linear("", inner, (Part("down", HIDDEN),), Placement.ROWWISE)
    tensors = {}
    for expert in range(count):
        for place, part in enumerate(("gate", "up")):
            tensors[f"experts.{expert}.{part}.weight"] = values(3 * expert + place, (inner, HIDDEN))
        tensors[f"experts.{expert}.down.weight"] = values(3 * expert + 2, (HIDDEN, inner))
    return Experts("experts", count, w13, w2), tensors


@both
def test_experts_are_built_from_two_segments_in_the_order_of_the_file(tmp_path, way):
    """E-06: gate and up of every expert in one buffer, down in another; one layer of both."""
    experts, tensors = experts_and_tensors()
    plan = plan_toy(tmp_path, tensors, experts, others=(recording_format([]),))
    made, reader = executed(plan, way=way)
    assert reader.names == list(tensors)
    held = made.built["experts"].kernel.state_dict()
    assert list(held) == ["w13", "w2"]
    for expert in range(3):
        gate, up, down = (tensors[f"experts.{expert}.{part}.weight"] for part in ("gate", "up", "down"))
        assert held["w13"][expert].tolist() == np.concatenate([gate, up]).tolist()
        assert held["w2"][expert].tolist() == down.tolist()


def test_one_expert_twice_and_another_never_is_an_error_although_the_count_is_right(tmp_path, monkeypatch):
    """E-06: a count of tensors would let it pass, and uninitialised memory with it."""
    experts, tensors = experts_and_tensors()
    plan = plan_toy(tmp_path, tensors, experts)

    def twice(task):
        if task.index:
            return {}
        reads = [
            dataclasses.replace(one, region=((0, 1), *one.region[1:])) if one.expert == 1 else one for one in task.reads
        ]
        return {"reads": tuple(reads)}

    tampered(monkeypatch, twice)
    with pytest.raises(LoadError, match=r"^experts\.weight: 768 of 768 elements were written, .* more than once;"):
        executed(plan)


# --- streaming ---------------------------------------------------------------------------------------------------


def layers_of(count, rows=256, columns=128):
    nodes = [Linear(f"layers.{place}", columns, (Part("", rows),), Placement.COLWISE) for place in range(count)]
    return nodes, {f"layers.{place}.weight": values(place, (rows, columns)) for place in range(count)}


@both
def test_one_piece_is_alive_at_a_time(tmp_path, way):
    """L-11: each piece is handed on at once and its reference dropped; every tensor is read exactly once."""
    nodes, tensors = layers_of(8)
    readers = []
    made, _ = executed(plan_toy(tmp_path, tensors, *nodes, others=(recording_format(readers),)), way=way)
    assert sorted(readers[0].names) == sorted(tensors)
    assert readers[0].most_alive == 1
    assert readers[0].alive() == 0
    assert len(made.built) == 8


def test_only_the_open_segments_are_in_memory_before_they_are_prepared(tmp_path, monkeypatch):
    """L-11: beside the weights, the stored tensors of one Segment; its buffers are gone when it is prepared."""
    stems = [f"layers.{place}" for place in range(6)]
    nodes = [Linear(stem, HIDDEN, (Part("", OUT),), Placement.COLWISE) for stem in stems]
    tensors = dict(sorted(toy_tensors(stems).items()))
    real, buffers, most = execute.allocate, [], [0]

    def recorded(shape, code, device):
        made = real(shape, code, device)
        buffers.append((weakref.ref(made), code, made.nbytes))
        most[0] = max(most[0], sum(size for ref, kind, size in buffers if kind == "I8" and ref() is not None))
        return made

    monkeypatch.setattr(execute, "allocate", recorded)
    plan = plan_toy(tmp_path, tensors, *nodes, config=QUANTIZED)
    made, _ = executed(plan)
    assert most[0] == OUT * HIDDEN
    assert made.peak_open == OUT * HIDDEN + HIDDEN * 4 + 4 + 4
    assert sum(ref() is not None for ref, kind, _ in buffers if kind == "I8") == 0


def test_segments_that_lie_mixed_in_the_file_are_all_open_and_counted(tmp_path):
    """Pieces come in the order of the file; the peak says what that costs."""
    first = Linear("a", HIDDEN, (Part("q", OUT), Part("k", OUT)), Placement.COLWISE)
    second = Linear("b", HIDDEN, (Part("q", OUT), Part("k", OUT)), Placement.COLWISE)
    tensors = {f"{stem}.{part}.weight": values(1, (OUT, HIDDEN)) for part in "qk" for stem in "ab"}
    readers = []
    made, _ = executed(plan_toy(tmp_path, tensors, first, second, others=(recording_format(readers),)))
    assert readers[0].names == ["a.q.weight", "b.q.weight", "a.k.weight", "b.k.weight"]
    assert made.peak_open == 2 * 2 * OUT * HIDDEN * 4


def test_pieces_are_read_in_the_order_of_the_files(tmp_path):
    nodes, tensors = layers_of(6)
    readers = []
    backwards = dict(reversed(tensors.items()))
    executed(plan_toy(tmp_path, backwards, *nodes, shards=3, others=(recording_format(readers),)))
    assert readers[0].names == list(backwards)


@both
def test_a_local_shard_owns_exactly_its_bytes(tmp_path, way):
    """P-24: 128 of 1024 rows in float32 take 524288 bytes, and nothing of the checkpoint tensor stays alive."""
    readers = []
    node = Linear("proj", 1024, (Part("", 1024),), Placement.COLWISE)
    stored = np.random.default_rng(5).standard_normal((1024, 1024)).astype(np.float32)
    plan = plan_toy(tmp_path, {"proj.weight": stored}, node, tp=8, others=(recording_format(readers),))
    made, reader = executed(plan, 3, way)
    weight = weight_of(made.built["proj"])
    assert weight.untyped_storage().nbytes() == 524288
    assert weight.is_contiguous()
    assert [piece() for piece in readers[0].pieces] == [None]
    assert bytes_of(weight) == stored[384:512].tobytes()
    assert made.received == {"proj.weight": 524288}
    assert reader.bytes_read <= 524288 + 8192
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if str(tmp_path) in line]


def test_the_plan_says_what_a_rank_receives_and_reads(tmp_path):
    """The plan's figures for a rank are what the executor and the plain reader then count."""
    tensors = plain_tensors()
    plan = plan_toy(tmp_path, tensors, QKV, DOWN, NORM, tp=2)
    for rank in range(2):
        made, reader = executed(plan, rank, "pread")
        figures = plan.rank(rank)
        assert sum(made.received.values()) == figures.bytes_needed
        assert reader.bytes_read == figures.bytes_read
        held = sum(one.nbytes for module in made.built.values() for one in module.state_dict().values())
        assert held == figures.final


def test_it_is_polled_before_every_read(tmp_path):
    """A rank that reads shows that it is alive, and learns that another died before it goes on."""
    polls = []

    def stop():
        polls.append(1)
        if len(polls) == 3:
            raise LoadError("rank 1: disk")

    readers = []
    nodes, tensors = layers_of(6)
    plan = plan_toy(tmp_path, tensors, *nodes, others=(recording_format(readers),))
    with pytest.raises(LoadError, match="^rank 1: disk$"):
        executed(plan, poll=stop)
    assert len(readers[0].names) == 2


# --- what bytes must satisfy -------------------------------------------------------------------------------------


def test_every_broken_check_is_in_one_error_and_nothing_is_prepared(tmp_path):
    """Design 4: checks are collected while bytes pass, and raised once before a model is returned."""
    tensors = toy_tensors()
    tensors["qkv.q.scale"] = np.float32(-1)
    tensors["qkv.v.scale"] = np.float32("nan")
    for part in "qkv":
        tensors[f"qkv.{part}.g_idx"] = np.full(HIDDEN, 3, np.int32)
    second = Linear("down", OUT, (Part("", HIDDEN),), Placement.ROWWISE)
    tensors |= toy_tensors(["down"], HIDDEN, OUT)
    ToyMethod.events.clear()
    plan = plan_toy(tmp_path, tensors, QKV, second, config=QUANTIZED)
    with pytest.raises(LoadError) as caught:
        executed(plan)
    index = "16 of 16 values are not i // group_size: the order of activations matters"
    assert str(caught.value) == (
        f"{tmp_path}: stored values contradict the plan:\n"
        "  - qkv.q.scale (model.safetensors): 1 of 1 values are negative or not finite\n"
        f"  - qkv.q.g_idx (model.safetensors): {index}\n"
        "  - qkv.v.scale (model.safetensors): 1 of 1 values are negative or not finite"
    )
    assert ToyMethod.events == []


def test_a_tensor_that_parts_must_share_is_compared(tmp_path):
    """merge='equal': one is kept, the others are read and must be the same bits."""
    tensors = toy_tensors()
    tensors["qkv.k.g_idx"] = np.arange(HIDDEN, dtype=np.int32)
    readers = []
    plan = plan_toy(tmp_path, tensors, QKV, config=QUANTIZED, others=(recording_format(readers),))
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == (
        f"{tmp_path}: stored values contradict the plan:\n"
        "  - qkv.k.g_idx (model.safetensors): differs from qkv.q.g_idx, "
        "which the same input uses; they must be equal"
    )
    assert sorted(readers[0].names) == sorted(tensors)


def test_the_last_of_the_parts_that_share_a_tensor_is_compared_too(tmp_path):
    tensors = toy_tensors()
    tensors["qkv.v.g_idx"] = np.ones(HIDDEN, np.int32)
    with pytest.raises(LoadError, match="qkv.v.g_idx .* differs from qkv.q.g_idx"):
        executed(plan_toy(tmp_path, tensors, QKV, config=QUANTIZED))


def test_a_shared_tensor_that_no_part_has_is_filled_once(tmp_path):
    """An optional index that parts share, absent: a constant, written exactly once."""
    tensors = {name: value for name, value in toy_tensors().items() if not name.endswith("g_idx")}
    built = executed(plan_toy(tmp_path, tensors, QKV, config=QUANTIZED))[0].built["qkv"]
    assert kernel_of(built).weight.tolist() == expected_rows(tensors).tolist()


def test_the_largest_of_the_parts_scales_is_kept(tmp_path):
    """merge='max', whichever part has it."""
    for place, largest in enumerate("qkv"):
        tensors = toy_tensors() | {f"qkv.{largest}.input_scale": np.float32(9)}
        built = executed(plan_toy(tmp_path / str(place), tensors, QKV, config=QUANTIZED))[0].built["qkv"]
        assert kernel_of(built).input_scale.tolist() == 9


def test_an_index_is_judged_on_the_stored_grid_where_the_ranks_need_a_finer_one(tmp_path):
    """A rank boundary inside a group refines the scales; the index still counts the stored groups."""

    class Grouped(ToyMethod):
        def layouts(self, scheme, node):
            (layout,) = super().layouts(scheme, node)
            size = scheme.granularity.size
            scale = dataclasses.replace(
                layout.tensors[1], dims=((Axis("out"), Axis("in", size, short_tail=True)),), merge="concat"
            )
            return (dataclasses.replace(layout, tensors=(layout.tensors[0], scale, *layout.tensors[2:])),)

        def prepare(self, stored, scheme, node, form):
            fine = scheme.granularity.size
            scales = stored["scale"].repeat_interleave(fine, 1)[:, : node.k]
            return {"weight": stored["codes"].to(torch.float32) * scales, "g_idx": stored["g_idx"]}

    columns, group = 192, 128
    node = Linear("down", columns, (Part("", 4),), Placement.ROWWISE)
    tensors = toy_tensors(["down"], 4, columns, group)
    tensors["down.scale"] = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    config = {"quantization_config": {"quant_method": "toy", "group": group}}
    plan = plan_toy(tmp_path, tensors, node, config=config, tp=2, others=(("quant method", Grouped),))
    assert [finding.code for finding in plan.findings] == ["refined"]
    whole_weight = tensors["down.codes"].astype(np.float32) * np.repeat(tensors["down.scale"], group, 1)[:, :columns]
    for rank in range(2):
        kernel = kernel_of(executed(plan, rank)[0].built["down"])
        assert kernel.weight.tolist() == whole_weight[:, rank * 96 : (rank + 1) * 96].tolist()


# --- ties --------------------------------------------------------------------------------------------------------

EMBED = Embedding("embed", 10, HIDDEN, Placement.COLWISE)
HEAD = Linear("head", HIDDEN, (Part("", 10, padded=True),), Placement.COLWISE)
TIED = (Tie("head", "embed"),)
TABLE = values(4, (10, HIDDEN))


def test_a_head_that_is_not_stored_uses_the_embedding(tmp_path):
    """O-18: one Parameter, seen by both; the ``state_dict`` of both shows the same memory."""
    made, _ = executed(plan_toy(tmp_path, {"embed.weight": TABLE}, EMBED, HEAD, ties=TIED))
    embed, head = made.built["embed"], made.built["head"]
    assert weight_of(head) is embed.weight
    assert (made.shared, made.apart) == ([], [])
    shown = {**embed.state_dict(), **head.state_dict()}
    assert len({one.data_ptr() for one in shown.values()}) == 1
    assert len(shown) == 2


def test_a_head_that_is_stored_equal_shares_the_memory(tmp_path):
    """R060: tied by the config, stored twice, the same bytes."""
    made, _ = executed(plan_toy(tmp_path, {"embed.weight": TABLE, "head.weight": TABLE}, EMBED, HEAD, ties=TIED))
    assert weight_of(made.built["head"]) is made.built["embed"].weight
    assert (made.shared, made.apart) == (["head"], [])
    both_held = torch.nn.ModuleList(made.built.values())
    assert len(list(both_held.parameters())) == 1


def test_a_head_that_is_stored_differently_stays_apart(tmp_path):
    """R060: one different value, and both are what the file says."""
    other = TABLE.copy()
    other[9, 15] += 1
    made, _ = executed(plan_toy(tmp_path, {"embed.weight": TABLE, "head.weight": other}, EMBED, HEAD, ties=TIED))
    assert (made.shared, made.apart) == ([], ["head"])
    assert weight_of(made.built["head"]).tolist() == other.tolist()
    assert made.built["embed"].weight.tolist() == TABLE.tolist()


def test_equal_values_of_another_dtype_stay_apart(tmp_path):
    """One memory cannot have two dtypes: a layer would compute in the other's."""
    tensors = {"embed.weight": TABLE, "head.weight": TABLE}
    options = LoadConfig(dtype="bfloat16", keep_float32=("embed",))
    made, _ = executed(plan_toy(tmp_path, tensors, EMBED, HEAD, ties=TIED, options=options))
    assert (made.shared, made.apart) == ([], ["head"])
    assert made.built["embed"].weight.dtype == torch.float32
    assert weight_of(made.built["head"]).dtype == torch.bfloat16


def test_a_head_that_is_stored_quantized_stays_apart(tmp_path):
    tensors = {"embed.weight": TABLE} | toy_tensors(["head"], 10, HIDDEN)
    made, _ = executed(plan_toy(tmp_path, tensors, EMBED, HEAD, ties=TIED, config=QUANTIZED))
    assert (made.shared, made.apart) == ([], ["head"])
    assert kernel_of(made.built["head"]).weight.tolist() == tensors["head.codes"].tolist()


@pytest.mark.parametrize("tp", [2, 4])
def test_ties_hold_on_every_rank(tmp_path, tp):
    plan = plan_toy(tmp_path, {"embed.weight": TABLE}, EMBED, HEAD, ties=TIED, tp=tp)
    for rank in range(tp):
        made, _ = executed(plan, rank)
        assert weight_of(made.built["head"]) is made.built["embed"].weight


# --- plugins that break the contract -----------------------------------------------------------------------------


def test_a_kernel_that_is_no_module_is_refused(tmp_path):
    """Its tensors would neither move with the model nor show in its ``state_dict``."""

    class Bare(ToyBackend):
        keys = ("bare",)

        def linear(self, weights, scheme, node):
            return lambda x, bias: x

    plan = plan_toy(
        tmp_path, plain_tensors(), QKV, DOWN, NORM, others=(("kernel backend", Bare),),
        options=LoadConfig(kernels=("bare",)),
    )  # fmt: skip
    with pytest.raises(LoadError) as caught:
        executed(plan)
    assert str(caught.value) == "kernel backend bare: its linear kernel is a function, not an nn.Module"


def test_a_constant_may_be_given_as_a_whole_number(tmp_path):
    made, _ = executed(plan_toy(tmp_path, plain_tensors(), QKV, DOWN, NORM, Norm("last", HIDDEN, absent=FillWith(1))))
    assert made.built["last"].weight.tolist() == [1.0] * HIDDEN


def test_transposed_and_fused_sources_arrive_in_the_nodes_form(tmp_path):
    """One stored tensor (in, out) that holds two parts; each is cut, turned and laid behind the other."""
    node = Linear("up", HIDDEN, (Part("gate", 8), Part("up", 8)), Placement.COLWISE)
    stored = values(3, (HIDDEN, 16))
    order = Order((("gate", 1), ("up", 1)), 8)
    plan = plan_toy(
        tmp_path, {"fused.weight": stored}, node, tp=2,
        names=lambda node, part, expert: (Source("fused", order=order, transposed=True),),
    )  # fmt: skip
    for rank in range(2):
        mine = slice(rank * 4, rank * 4 + 4)
        expected = np.concatenate([stored.T[0::2][mine], stored.T[1::2][mine]])
        assert weight_of(executed(plan, rank)[0].built["up"]).tolist() == expected.tolist()
