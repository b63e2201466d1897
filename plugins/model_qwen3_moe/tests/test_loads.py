"""Loads of whole checkpoints, rank by rank in this process: what each holds, and what it reads for that."""

import tempfile
import time
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.config import LoadConfig
from steelyard.dtypes import nbytes
from steelyard.plugin import distribute
from steelyard.torch import ops
from steelyard_model_qwen3_moe.family import MoeFamily
from support.loading import executed, plan, recording_format, registry_for
from support.planned import hollow, plain

JOBS = [
    {}, {"tp": 2}, {"tp": 4}, {"ep": 2}, {"ep": 3}, {"ep": 4}, {"ep": 8}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 4},
    {"ep": 2, "moe_tp": 2}, {"tp": 2, "ep": 2, "moe_tp": 2}, {"tp": 4, "ep": 2, "moe_tp": 2},
]  # fmt: skip
FORMS = ["split", "named", "fused", "stacked", "stacked.weight"]


@st.composite
def mixtures(draw):
    """Draw a model type, sizes that the ranks divide, the ranks, and how the experts are stored."""
    model_type = draw(st.sampled_from(["qwen2_moe", "qwen3_moe", "mixtral"]))
    kv = draw(st.sampled_from([1, 2, 4]))
    count = draw(st.integers(1, 9))
    inner = 4 * draw(st.integers(1, 3))
    sizes = {
        "num_key_value_heads": kv, "num_attention_heads": 4 * draw(st.integers(1, 2)), "head_dim": 2,
        "hidden_size": draw(st.sampled_from([4, 6])), "num_hidden_layers": 2, "vocab_size": draw(st.integers(1, 9)),
        "num_experts_per_tok": draw(st.integers(1, count)),
    }  # fmt: skip
    if model_type == "mixtral":
        sizes |= {"num_local_experts": count, "intermediate_size": inner}
    else:
        sizes |= {
            "num_experts": count,
            "moe_intermediate_size": inner,
            "intermediate_size": 4 * draw(st.integers(1, 4)),
        }
        sizes |= draw(st.sampled_from([{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]))
    if model_type == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 4 * draw(st.integers(1, 3))
    return model_type, sizes, draw(st.sampled_from(JOBS)), draw(st.sampled_from(FORMS))


@settings(max_examples=30, deadline=None)
@given(drawn=mixtures())
def test_the_ranks_together_hold_the_checkpoint(mixture, registry, drawn):
    """P-04, E-02, E-03, E-08, E-31, R034, R073: by slices of whole matrices; together, every element of every tensor."""
    model_type, sizes, job, form = drawn
    config = mixture.configs[model_type] | sizes
    arrays = mixture.numbered(config)
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        mixture.write(Path(folder), config, mixture.stored(config, arrays, form), "F32")
        made = plan(folder, target="cpu", registry=registry, **job).check()
        for rank in range(made.job.world):
            held = mixture.held(executed(made, rank)[0].built)
            wanted = mixture.expected(config, arrays, rank=rank, **job)
            assert held.keys() == wanted.keys()
            for place, array in wanted.items():
                assert held[place].shape == array.shape, (place, rank)
                assert (held[place] == array).all(), (place, rank)
                seen.update(held[place].flatten().tolist())
    assert seen - {0.0} == set(np.concatenate([array.flatten() for array in arrays.values()]).tolist())


@pytest.mark.parametrize(("model_type", "ep"), [("qwen3_moe", 1), ("qwen3_moe", 2), ("mixtral", 2)])
def test_every_form_of_the_experts_gives_the_same_memory(tmp_path, mixture, registry, model_type, ep):
    """R068, E-08, E-14: one by one, fused, stacked with the ending .weight and without it, mapped or read; bit for bit."""
    config = mixture.configs[model_type] | {"num_hidden_layers": 1}
    arrays = mixture.arrays(config)
    loads = {}
    for form in FORMS:
        folder = mixture.write(tmp_path / form, config, mixture.stored(config, arrays, form))
        made = plan(folder, ep=ep, target="cpu", registry=registry).check()
        for way in ("mmap", "pread"):
            loads[form, way] = [mixture.held(executed(made, rank, way)[0].built) for rank in range(ep)]
    for rank in range(ep):
        first = loads["split", "mmap"][rank]
        assert first["layers.0.mlp.experts", "w13"].shape == (4 // ep, 512, 256)
        wanted = mixture.expected(config, arrays, ep=ep, rank=rank)
        assert all((first[place] == wanted[place]).all() for place in wanted)
        for how, held in loads.items():
            assert held[rank].keys() == first.keys()
            assert all((held[rank][place] == first[place]).all() for place in first), how


@pytest.mark.parametrize("way", ["mmap", "pread"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "mixtral"])
def test_a_rank_is_handed_its_own_experts_alone(tmp_path, mixture, model_type, way):
    """R071, E-02: 4 experts over 2 ranks, 4 files: 6 of a layer's 12 tensors, whole, counted where the reader hands out."""
    config = mixture.configs[model_type]
    folder = mixture.write(tmp_path, config, mixture.arrays(config), shards=4)
    handed = []
    registry = registry_for(MoeFamily, others=(recording_format([], lambda read, _: handed.append(read)),))
    made = plan(folder, ep=2, target="cpu", registry=registry, config=LoadConfig(reader=way)).check()
    dense = {name: 2 * prod(shape) for name, shape in mixture.shapes(config).items() if ".experts." not in name}
    counts = []
    for rank in range(2):
        handed.clear()
        _, reader = executed(made, rank, way)
        experts = [read for read in handed if ".experts." in read.name]
        for layer in range(2):
            names = [read.name for read in experts if f".layers.{layer}." in read.name]
            assert len(names) == len(set(names)) == 6
            assert {int(name.split(".experts.")[1].split(".")[0]) for name in names} == {2 * rank, 2 * rank + 1}
        assert sorted(read.name for read in handed if read not in experts) == sorted(dense)
        assert {nbytes(read.dtype, read.cut.taken) for read in experts} == {2 * 256 * 256}
        counts.append(reader.bytes_read)
    needed = sum(dense.values()) + 2 * 6 * 2 * 256 * 256
    pages = 2 * 4096 * len(handed) if way == "mmap" else 0  # it counts whole pages, at either end of a piece
    assert counts[0] == counts[1]
    assert needed <= counts[0] <= needed + pages


def test_a_stack_is_read_for_the_ranks_experts_alone(tmp_path, mixture, registry):
    """R071, R073: half of each stack, in bytes."""
    config = mixture.configs["qwen3_moe"]
    arrays = mixture.stored(config, mixture.arrays(config), "stacked")
    made = plan(mixture.write(tmp_path, config, arrays), ep=2, target="cpu", registry=registry).check()
    stacks = sum(2 * array.size for name, array in arrays.items() if ".experts." in name)
    everything = sum(2 * array.size for array in arrays.values())
    for rank in range(2):
        _, reader = executed(made, rank, "pread")
        assert reader.bytes_read == everything - stacks // 2


@pytest.mark.parametrize(
    ("count", "ep", "ranges"), [(6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)]), (5, 2, [(0, 3), (3, 5)])]
)
@pytest.mark.parametrize("form", ["split", "stacked"])
def test_experts_that_do_not_divide_are_held_once(tmp_path, mixture, registry, count, ep, ranges, form):
    """R034: TOY-M with 6 and 5 experts; the value of expert e is e + 1."""
    config = mixture.configs["qwen3_moe"] | {"num_experts": count, "num_hidden_layers": 1}
    made = plan(valued(tmp_path, mixture, config, form), ep=ep, target="cpu", registry=registry).check()
    for rank, (start, stop) in enumerate(ranges):
        held = mixture.held(executed(made, rank)[0].built)
        for name in ("w13", "w2"):
            experts = held["layers.0.mlp.experts", name]
            assert [set(one.flatten().tolist()) for one in experts] == [{one + 1.0} for one in range(start, stop)]


def test_thirty_experts_go_out_over_eight_ranks():
    """R034: six ranks with 4 and two with 3."""
    sizes = [stop - start for start, stop in (distribute(30, 8, rank) for rank in range(8))]
    assert sizes == [4] * 6 + [3] * 2


def valued(folder, mixture, config, form):
    """Write a mixture whose expert e holds e + 1 everywhere, and return its folder."""
    arrays = {
        name: np.full_like(array, int(name.split(".experts.")[1].split(".")[0]) + 1) if ".experts." in name else array
        for name, array in mixture.arrays(config).items()
    }
    return mixture.write(folder, config, mixture.stored(config, arrays, form))


def test_a_stack_is_narrowed_by_experts_and_then_inside_gate_and_up(tmp_path, mixture, registry):
    """R073: ep 2 x tp 2; the second pair of ranks holds the values 3 and 4 alone, 128 rows of gate and 128 of up."""
    config = mixture.configs["qwen3_moe"]
    job = {"tp": 2, "ep": 2, "moe_tp": 2}
    folder = valued(tmp_path / "values", mixture, config, "stacked")
    made = plan(folder, target="cpu", registry=registry, **job).check()
    for rank in (2, 3):
        w13 = mixture.held(executed(made, rank)[0].built)["layers.0.mlp.experts", "w13"]
        assert w13.shape == (2, 256, 256)
        assert [set(one.flatten().tolist()) for one in w13] == [{3.0}, {4.0}]
    arrays = mixture.arrays(config)
    folder = mixture.write(tmp_path / "rows", config, mixture.stored(config, arrays, "stacked"))
    made = plan(folder, target="cpu", registry=registry, **job).check()
    held = mixture.held(executed(made, 3)[0].built)["layers.0.mlp.experts", "w13"]
    gate, up = (arrays[f"model.layers.0.mlp.experts.2.{name}_proj.weight"] for name in ("gate", "up"))
    assert (held[0] == np.concatenate([gate[128:], up[128:]])).all()


@pytest.mark.parametrize(
    ("count", "job"), [(8, {"ep": 8}), (8, {"tp": 4}), (2, {"tp": 2, "ep": 2, "moe_tp": 1}), (3, {"ep": 4}), (1, {})]
)
def test_the_ranks_outputs_add_up_to_the_whole(tmp_path, mixture, registry, count, job):
    """E-31, E-02: 8 experts on 8 ranks, on 4 that cut each, 3 on 4 ranks, of which one has none; top-k 1."""
    config = mixture.configs["mixtral"] | {
        "num_local_experts": count, "num_experts_per_tok": 1, "num_hidden_layers": 1, "hidden_size": 16, "head_dim": 4,
        "intermediate_size": 8,
    }  # fmt: skip
    draws = np.random.default_rng(0)
    arrays = {name: draws.normal(size=shape).astype(np.float32) for name, shape in mixture.shapes(config).items()}
    folder = mixture.write(tmp_path, config, arrays, "F32")
    x, logits = (torch.from_numpy(draws.normal(size=(9, size)).astype(np.float32)) for size in (16, count))
    ids, weights = ops.route(logits, 1, renormalize=False)

    def summed(**sizes):
        made = plan(folder, target="cpu", registry=registry, **sizes).check()
        world = range(made.job.world)
        built = [executed(made, rank)[0].built["layers.0.mlp.experts"] for rank in world]
        return sum(one.kernel(x, ids, weights) for one in built)

    torch.testing.assert_close(summed(**job), summed(), rtol=0, atol=1e-5)


# Qwen3-235B-A22B and Mixtral-8x7B as published, as far as sizes go.
QWEN3_235B = {
    "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
}  # fmt: skip
MIXTRAL_8X7B = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "sizes", "experts"),
    [("qwen3_moe", QWEN3_235B, 94 * 128 * 3 * 1536 * 4096 * 2), ("mixtral", MIXTRAL_8X7B, 32 * 8 * 3 * 14336 * 4096 * 2)],
    ids=["Qwen3-235B-A22B", "Mixtral-8x7B"],
)  # fmt: skip
def test_a_published_size_is_planned_from_headers_alone(tmp_path, mixture, registry, model_type, sizes, experts):
    """R071, E-02: tp 8 and ep 8; each rank reads an eighth of the experts, by the plan's own figures and by its reads."""
    config = mixture.configs[model_type] | sizes
    shapes = mixture.shapes(config)
    assert sum(2 * prod(shape) for name, shape in shapes.items() if ".experts." in name) == experts
    folder = hollow(tmp_path, config, plain(shapes), shards=8)
    started = time.process_time()
    made = plan(folder, tp=8, ep=8, target="sm_90", registry=registry).check()
    seconds = time.process_time() - started
    assert seconds < 10
    replicated = sum(
        2 * prod(shape) for name, shape in shapes.items() if "norm" in name or name.endswith(".gate.weight")
    )
    repeats = max(1, 8 // config["num_key_value_heads"])
    kv = sum(2 * prod(shape) for name, shape in shapes.items() if ".k_proj." in name or ".v_proj." in name)
    everything = sum(2 * prod(shape) for shape in shapes.values())
    cut = everything - experts - replicated - kv
    assert {one.bytes_needed for one in made.ranks} == {experts // 8 + cut // 8 + kv * repeats // 8 + replicated}
    mine = [read for read in made.reads(5) if ".experts." in read.name]
    assert sum(nbytes(read.dtype, read.cut.taken) for read in mine) == experts // 8
    assert len(mine) == config["num_hidden_layers"] * 3 * (128 if model_type == "qwen3_moe" else 8) // 8
