"""What each rank gets: by index arithmetic, every element of every stored tensor lands where it belongs."""

import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.blueprint import Embedding, Linear, Norm, Part, Placement
from steelyard.dtypes import nbytes
from steelyard.errors import CutError
from steelyard.local import even, localize
from steelyard.ranks import Ranks
from support.families import ToyDense
from support.planned import (
    TOY_D,
    TOY_M_CONFIG,
    coded,
    dense_shapes,
    error_texts,
    fused,
    hollow,
    hollow_d,
    hollow_m,
    numbered,
    plain,
    plan_of,
    planned,
    registry_of,
    run,
    texts,
    toy_m_shapes,
)

# Llama 3.1 8B as published; one layer of it is enough for figures.
LLAMA_8B = TOY_D | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
}


def stem_reads(made, rank, ending):
    """Return (stored name, slices as (start, length) a dim) of the nodes whose stem ends so."""
    return [
        (read.name, [(piece.start, piece.length) for piece in read.cut.slices])
        for read in made.reads(rank)
        if read.stem.endswith(ending)
    ]


# --- the union of the ranks, by an independent rule ---------------------------------------------------------------


def share(size, parts, index):
    return slice(size // parts * index, size // parts * (index + 1))


def expected_dense(config, stored, tp, rank):
    """Return what a rank must hold of a dense model: plain slices of whole matrices, and the rule for heads."""
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    mine = {}
    for layer in range(config["num_hidden_layers"]):
        stem, attn, mlp = f"layers.{layer}", f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        q_rows = share(heads * dim, tp, rank)
        kv_rows = share(kv * dim, tp, rank) if kv % tp == 0 else share(kv * dim, kv, rank // (tp // kv))
        rows = share(config["intermediate_size"], tp, rank)
        mine[f"{stem}.self_attn.qkv_proj"] = np.concatenate(
            [
                stored[f"{attn}.q_proj.weight"][q_rows],
                stored[f"{attn}.k_proj.weight"][kv_rows],
                stored[f"{attn}.v_proj.weight"][kv_rows],
            ]
        )
        mine[f"{stem}.self_attn.o_proj"] = stored[f"{attn}.o_proj.weight"][:, q_rows]
        if f"{mlp}.gate_proj.weight" in stored:
            up = [stored[f"{mlp}.gate_proj.weight"][rows], stored[f"{mlp}.up_proj.weight"][rows]]
            mine[f"{stem}.mlp.gate_up_proj"] = np.concatenate(up)
            mine[f"{stem}.mlp.down_proj"] = stored[f"{mlp}.down_proj.weight"][:, rows]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            mine[f"{stem}.{norm}"] = stored[f"model.{stem}.{norm}.weight"]
    for stem, name in (("embed_tokens", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        size = -(-config["vocab_size"] // tp)
        table = np.concatenate([stored[name], np.zeros((size * tp - config["vocab_size"], config["hidden_size"]), int)])
        mine[stem] = table[size * rank : size * (rank + 1)]
    mine["norm"] = stored["model.norm.weight"]
    return mine


def split_view(entries, config):
    """Return the numbers of a checkpoint under split names, whatever names it has on disk."""
    number = numbered(entries)
    stored = {name: number(name, entry.shape) for name, entry in entries.items()}
    dim, inner = config["head_dim"], config["intermediate_size"]
    rows = {"q": config["num_attention_heads"] * dim} | dict.fromkeys("kv", config["num_key_value_heads"] * dim)
    for name in list(stored):
        for together, members in (("qkv_proj", rows), ("gate_up_proj", {"gate": inner, "up": inner})):
            if f".{together}." in name:
                whole, at = stored.pop(name), 0
                for member, size in members.items():
                    stored[name.replace(together, f"{member}_proj")] = whole[at : at + size]
                    at += size
    return stored


@st.composite
def dense_jobs(draw):
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv * draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 8) if kv * n % tp == 0 and (kv % tp == 0 or tp % kv == 0)] or [8])
    )
    config = TOY_D | {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([1, 4, 8])),
        "hidden_size": draw(st.sampled_from([8, 16, 40])),
        "intermediate_size": 8 * draw(st.integers(1, 5)),
        "vocab_size": draw(st.integers(1, 40)),
        "num_hidden_layers": draw(st.integers(1, 2)),
    }
    return config, tp, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(job=dense_jobs())
def test_the_ranks_of_a_dense_model_hold_the_checkpoint_and_nothing_else(job):
    """P-04, R026, R029, R031: every rank's buffers by plain slices, and together every element of every tensor."""
    config, tp, is_fused = job
    tensors = plain(dense_shapes(config))
    with tempfile.TemporaryDirectory() as folder:
        hollow(folder, config, fused(tensors) if is_fused else tensors)
        made = planned(folder, tp=tp).check()
    stored = split_view(made.checkpoint.entries, config)
    seen = set()
    for rank in range(tp):
        held = run(made, rank, numbered(made.checkpoint.entries))
        wanted = expected_dense(config, stored, tp, rank)
        assert {stem for stem, _, _ in held} == wanted.keys()
        for stem, array in wanted.items():
            assert (held[stem, 0, "weight"] == array).all(), (stem, rank)
            seen.update(held[stem, 0, "weight"].flatten().tolist())
    everything = np.concatenate([array.flatten() for array in stored.values()])
    assert seen - {0} == set(everything.tolist())


def expert_range(count, parts, index):
    """Return a group's experts: counted out one by one, the first groups take one more."""
    owners = sorted(expert % parts for expert in range(count))
    return [expert for expert, owner in enumerate(owners) if owner == index]


@st.composite
def expert_jobs(draw):
    job = draw(
        st.sampled_from(
            [{}, {"tp": 2}, {"ep": 2}, {"ep": 3}, {"ep": 4}, {"tp": 4, "ep": 2, "moe_tp": 2}, {"tp": 2, "ep": 2, "moe_tp": 2},
             {"tp": 2, "ep": 4}, {"ep": 8}, {"ep": 2, "moe_tp": 2, "world": 4}]
        )
    )  # fmt: skip
    config = TOY_M_CONFIG | {
        "num_hidden_layers": 1,
        "num_experts": draw(st.integers(1, 9)),
        "hidden_size": draw(st.sampled_from([4, 16])),
        "moe_intermediate_size": 2 * draw(st.integers(1, 6)),
        "head_dim": 2,
        "vocab_size": 8,
    }
    return config, job, draw(st.sampled_from(["split", "mixtral", "stacked", "in_first"]))


@settings(max_examples=50, deadline=None)
@given(job=expert_jobs())
def test_the_ranks_of_a_mixture_hold_each_expert_once(job):
    """P-04, E-01, E-02, E-03, E-08, E-10, E-31, R034, R073: gate and up are cut apart, then experts are kept whole or cut."""
    config, sizes, form = job
    inner, count = config["moe_intermediate_size"], config["num_experts"]
    with tempfile.TemporaryDirectory() as folder:
        hollow_m(folder, stored=form, config=config)
        made = planned(folder, **sizes).check()
    number = numbered(made.checkpoint.entries)
    stored = {name: number(name, entry.shape) for name, entry in made.checkpoint.entries.items()}
    stem = "model.layers.0.mlp.experts"

    def expert(index, part):
        """Return one expert's whole (out, in) matrix."""
        match form:
            case "split":
                return stored[f"{stem}.{index}.{part}_proj.weight"]
            case "mixtral":
                older = {"gate": "w1", "up": "w3", "down": "w2"}[part]
                return stored[f"model.layers.0.block_sparse_moe.experts.{index}.{older}.weight"]
        whole = stored[f"{stem}.down_proj" if part == "down" else f"{stem}.gate_up_proj"][index]
        whole = whole.T if form == "in_first" else whole
        return whole if part == "down" else whole[:inner] if part == "gate" else whole[inner:]

    owners = {}
    for rank in range(made.job.world):
        ep, moe_tp = sizes.get("ep", 1), made.job.moe_tp
        group, place = (rank // moe_tp, rank % moe_tp) if ep > 1 else (0, rank % moe_tp)
        mine = expert_range(count, ep, group)
        held = run(made, rank, number)
        rows = share(inner, moe_tp, place)
        up, down = held["layers.0.mlp.experts", 0, "weight"], held["layers.0.mlp.experts", 1, "weight"]
        assert up.shape == (len(mine), 2 * inner // moe_tp, config["hidden_size"])
        assert down.shape == (len(mine), config["hidden_size"], inner // moe_tp)
        for local, index in enumerate(mine):
            assert (up[local] == np.concatenate([expert(index, "gate")[rows], expert(index, "up")[rows]])).all()
            assert (down[local] == expert(index, "down")[:, rows]).all()
            owners.setdefault(index, []).append(place)
    assert sorted(owners) == list(range(count))
    assert all(sorted(places) == list(range(made.job.moe_tp)) for places in owners.values())


# --- experts -----------------------------------------------------------------------------------------------------


def experts_read(made, rank):
    """Return the numbers of the experts whose tensors a rank reads."""
    return sorted(
        {int(read.name.split(".experts.")[1].split(".")[0]) for read in made.reads(rank) if ".experts." in read.name}
    )


@pytest.mark.parametrize(
    ("count", "ep", "ranges"),
    [
        (6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)]),
        (5, 2, [(0, 3), (3, 5)]),
        (30, 8, [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24), (24, 27), (27, 30)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (1, 1, [(0, 1)]),
        (2, 3, [(0, 1), (1, 2), (2, 2)]),
    ],
)
def test_experts_go_out_in_ranges_and_only_a_ranks_own_are_read(tmp_path, count, ep, ranges):
    """R034, E-02, E-31, L-13: the same rule for filter, reader and buffers; 30 experts on 8 ranks."""
    config = TOY_M_CONFIG | {"num_experts": count, "num_hidden_layers": 1}
    hollow_m(tmp_path, config=config)
    made = planned(tmp_path, ep=ep).check()
    for rank, (start, stop) in enumerate(ranges):
        assert experts_read(made, rank) == list(range(start, stop))
        for task in made.tasks(rank):
            if task.stem.endswith("experts"):
                assert task.on_rank.buffers[0].shape[0] == stop - start


def test_experts_that_must_go_out_evenly_are_refused_with_the_numbers(tmp_path):
    """E-02: where the user asks for even shares."""
    hollow_m(tmp_path, num_experts=10)
    made = planned(tmp_path, ep=4, experts="even")
    assert error_texts(made) == [
        "layers.0.mlp.experts: 10 experts do not divide by ep 4 and experts='even' (and 1 more like it)"
    ]
    assert planned(tmp_path, ep=5, experts="even").check()


def test_the_width_of_an_expert_must_divide(tmp_path):
    """E-04: by the ranks that share it."""
    hollow_m(tmp_path, moe_intermediate_size=6)
    assert error_texts(planned(tmp_path, tp=4)) == [
        "layers.0.mlp.experts: cannot cut out[0:6]: 6 elements do not divide by tp 4; sizes that fit: 1, 2, 3, 6 "
        "(and 1 more like it)"
    ]


def test_ranks_read_their_own_experts_and_everything_dense_once(tmp_path):
    """L-13, L-14: 2 layers x 2 experts x 3 tensors; router and attention on every rank, each name once."""
    hollow_m(tmp_path, num_experts=8)
    made = planned(tmp_path, ep=4).check()
    names = [read.name for read in made.reads(1)]
    assert len(set(names)) == len(names)
    assert experts_read(made, 1) == [2, 3]
    assert len([name for name in names if ".experts." in name]) == 12
    dense = {name for name in toy_m_shapes(TOY_M_CONFIG | {"num_experts": 8}) if ".experts." not in name}
    assert {name for name in names if ".experts." not in name} == dense


def test_layer_numbers_are_no_expert_numbers(tmp_path):
    """L-14: layer 7 of 16 experts; rank 0 keeps 0 to 3, and expert 10 is not expert 1."""
    config = TOY_M_CONFIG | {"num_experts": 16, "num_hidden_layers": 8, "first_k_dense_replace": 7}
    hollow_m(tmp_path, config=config)
    made = planned(tmp_path, ep=4).check()
    assert experts_read(made, 0) == [0, 1, 2, 3]
    assert {read.name for read in made.reads(0) if ".layers.7.mlp.experts.3." in read.name} == {
        f"model.layers.7.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")
    }


def test_packed_experts_of_other_ranks_are_not_read(tmp_path):
    """R072, R075: by expert, not by one suffix; packed words, scales and shapes alike, under w1, w3 and w2."""
    groups = {"quant_method": "compressed-tensors", "config_groups": {"W4": {"targets": ["Linear"],
              "weights": {"type": "int", "num_bits": 4, "group_size": 128}}}, "ignore": ["lm_head"]}  # fmt: skip
    shapes = toy_m_shapes(stored="split")
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {}
    for name, value in coded(shapes, "CT-W4").items():
        for new, old in names.items() if ".experts." in name else ():
            if f".{new}." in name:
                name = name.replace(new, old).replace("mlp.experts", "block_sparse_moe.experts")
        tensors[name] = value
    hollow_m(tmp_path, tensors=tensors, config={"quantization_config": groups})
    made = planned(tmp_path, ep=2).check()
    assert experts_read(made, 0) == [0, 1]
    (task, *_) = (task for task in made.tasks(0) if task.stem == "layers.0.mlp.experts")
    assert {(read.part, read.name.split(".experts.0.")[1]) for read in task.reads if read.expert == 0} == {
        (part, f"{old}.weight_{kind}")
        for part, old in (("gate", "w1"), ("up", "w3"))
        for kind in ("packed", "scale", "shape")
    }
    assert {buffer.name: buffer.shape for buffer in task.on_rank.buffers} == {
        "weight_packed": (2, 512, 32),
        "weight_scale": (2, 512, 2),
        "weight_shape": (2, 2, 2),
    }


def test_a_stack_is_narrowed_to_the_ranks_experts_and_then_inside_gate_and_up(tmp_path):
    """R073: world 4, tp 2, ep 2, moe_tp 2; the second pair of ranks holds experts 2 and 3, halves of 128 rows."""
    hollow_m(tmp_path, stored="stacked")
    made = planned(tmp_path, world=4, tp=2, ep=2, moe_tp=2).check()
    for rank, (first, place) in enumerate([(0, 0), (0, 1), (2, 0), (2, 1)]):
        assert stem_reads(made, rank, "layers.0.mlp.experts") == [
            ("model.layers.0.mlp.experts.gate_up_proj", [(first, 2), (128 * place, 128), (0, 256)]),
            ("model.layers.0.mlp.experts.gate_up_proj", [(first, 2), (256 + 128 * place, 128), (0, 256)]),
            ("model.layers.0.mlp.experts.down_proj", [(first, 2), (0, 256), (128 * place, 128)]),
        ]


def test_a_declared_in_first_stack_is_cut_on_its_last_axis(tmp_path):
    """E-10: gate and up lie along the last axis, and H = 2M tells nothing."""
    hollow_m(tmp_path, stored="in_first", moe_intermediate_size=128)
    made = planned(tmp_path).check()
    reads = [read for read in made.reads(0) if read.stem == "layers.0.mlp.experts"]
    assert [(read.shape, read.swap) for read in reads] == [
        ((4, 256, 256), (1, 2)),
        ((4, 256, 256), (1, 2)),
        ((4, 128, 256), (1, 2)),
    ]
    assert [read.cut.slices[2].start for read in reads] == [0, 128, 0]


def test_an_undeclared_in_first_stack_that_is_no_square_is_refused(tmp_path):
    """E-10, L-29: nothing is inferred from sizes."""
    config = TOY_M_CONFIG | {"moe_intermediate_size": 384, "num_hidden_layers": 1}
    hollow_m(tmp_path, config=config, tensors=plain(toy_m_shapes(config, "in_first")))
    assert error_texts(planned(tmp_path)) == [
        "model.layers.0.mlp.experts.gate_up_proj (model.safetensors): stored shape [4, 256, 768], layers.0.mlp.experts "
        "expects [4, 768, 256] = [expert, out, in] with out=768, in=256 (tp_size=1, ep_size=1, moe_tp=1)",
        "model.layers.0.mlp.experts.down_proj (model.safetensors): stored shape [4, 384, 256], layers.0.mlp.experts "
        "expects [4, 256, 384] = [expert, out, in] with out=256, in=384 (tp_size=1, ep_size=1, moe_tp=1)",
    ]


def test_whole_experts_ignore_the_rank_inside_the_dense_group(tmp_path):
    """E-03: with ep 4 and tp 4 an expert is whole on its rank, scales too."""
    config = TOY_M_CONFIG | {"num_experts": 8, "num_hidden_layers": 1}
    tensors = coded(toy_m_shapes(config), "FP8-C")
    hollow_m(tmp_path, config=config, tensors=tensors, quant="FP8-C")
    made = planned(tmp_path, tp=4, ep=4).check()
    reads = dict(stem_reads(made, 3, "experts"))
    assert reads["model.layers.0.mlp.experts.6.gate_proj.weight_scale"] == [(0, 256), (0, 1)]
    assert reads["model.layers.0.mlp.experts.6.gate_proj.weight"] == [(0, 256), (0, 256)]


def test_the_place_inside_an_expert_is_not_the_place_in_the_dense_group(tmp_path):
    """E-03, R073: dense layers on one rank each, experts shared by two."""
    hollow_m(tmp_path, stored="stacked", num_hidden_layers=1)
    made = planned(tmp_path, world=4, tp=1, ep=2, moe_tp=2).check()
    for rank, (first, place) in enumerate([(0, 0), (0, 1), (2, 0), (2, 1)]):
        *_, down = stem_reads(made, rank, "layers.0.mlp.experts")
        assert down[1] == [(first, 2), (0, 256), (128 * place, 128)]


# --- what does not divide ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "axis"), [(Placement.COLWISE, "out"), (Placement.ROWWISE, "in")], ids=["colwise", "rowwise"]
)
def test_a_split_must_divide(tmp_path, placement, axis):
    """P-01, P-02: 10 over 3 is refused with the numbers, 12 gives 4 each."""
    out, inner = (10, 4) if axis == "out" else (4, 10)
    made = plan_of(
        tmp_path / "a", {"l.weight": ("BF16", (out, inner))}, Linear("l", inner, (Part("", out),), placement), tp=3
    )
    assert error_texts(made) == [
        f"l: cannot cut {axis}[0:10]: 10 elements do not divide by tp 3; sizes that fit: 1, 2, 5, 10"
    ]
    out, inner = (12, 4) if axis == "out" else (4, 12)
    made = plan_of(
        tmp_path / "b", {"l.weight": ("BF16", (out, inner))}, Linear("l", inner, (Part("", out),), placement), tp=3
    )
    assert [buffer.shape for task in made.tasks(2) for buffer in task.on_rank.buffers] == [(4, 4)]


def test_a_norm_is_not_cut(tmp_path):
    """P-25: a rank would take the mean of its own share alone; on one rank the declaration means nothing."""
    node = Norm("n", 12, placement=Placement.COLWISE)
    assert error_texts(plan_of(tmp_path, {"n.weight": ("BF16", (12,))}, node, tp=3)) == [
        "n: a norm over 12 elements is declared colwise; each of 3 ranks would take the mean of its own share alone. "
        "Declare it replicated, or over one head"
    ]
    assert not plan_of(tmp_path, {"n.weight": ("BF16", (12,))}, node, tp=1).errors


def test_the_share_of_a_rank_is_guarded_where_it_is_made():
    """P-03: a size that does not divide, and a rank outside its group."""
    with pytest.raises(CutError) as caught:
        even("out", 10, 3, 0)
    assert str(caught.value) == ("cannot cut out[0:10]: 10 elements do not divide by tp 3; sizes that fit: 1, 2, 5, 10")
    with pytest.raises(ValueError, match="^Span 9:12 lies outside 0:9$"):
        even("out", 9, 3, 3)


def test_a_vocabulary_that_does_not_divide_is_padded_or_refused(tmp_path):
    """P-14, R036: with padding off the text names the size to pad to."""
    config = TOY_D | {"vocab_size": 10, "num_hidden_layers": 0}
    hollow(tmp_path, config, plain(dense_shapes(config)))
    text = (
        "cannot cut out[0:10]: a vocabulary of 10 does not divide by tp 4; pad it to 12, or allow vocab_padding='auto'"
    )
    assert error_texts(planned(tmp_path, tp=4, vocab_padding="off")) == [f"embed_tokens: {text}", f"lm_head: {text}"]
    made = planned(tmp_path, tp=4).check()
    note = "padded to 4 x 3 rows with zeros, so that the ranks divide it"
    assert texts(made) == [f"embed_tokens: {note}", f"lm_head: {note}"]
    for rank, rows in enumerate([3, 3, 3, 1]):
        held = run(made, rank, numbered(made.checkpoint.entries))
        for stem in ("embed_tokens", "lm_head"):
            assert held[stem, 0, "weight"].shape == (3, 256)
            assert held[stem, 0, "weight"].any(axis=1).tolist() == [True] * rows + [False] * (3 - rows)


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_padding_is_decided_by_shape_and_ranks_alone(tmp_path, device):
    """R036, R037: vocabulary 97 on two ranks, the same plan for every device."""
    hollow_d(tmp_path, vocab_size=97)
    made = planned(tmp_path, tp=2, device=device).check()
    assert made.digest == planned(tmp_path, tp=2).digest
    held = run(made, 1, numbered(made.checkpoint.entries))["lm_head", 0, "weight"]
    assert held.shape == (49, 256)
    assert held.any(axis=1).tolist() == [True] * 48 + [False]


def test_more_ranks_than_rows_leave_the_last_with_padding_alone(tmp_path):
    made = plan_of(tmp_path, {"t.weight": ("BF16", (5, 8))}, Embedding("t", 5, 8, Placement.COLWISE), tp=4).check()
    held = [run(made, rank, numbered(made.checkpoint.entries))["t", 0, "weight"] for rank in range(4)]
    assert [array.any(axis=1).sum() for array in held] == [2, 2, 1, 0]
    assert {array.shape for array in held} == {(2, 8)}


# --- heads -------------------------------------------------------------------------------------------------------


def test_key_value_heads_are_repeated_where_there_are_more_ranks(tmp_path):
    """R031: TP 4 and two key/value heads, merged on disk; rank 3."""
    hollow_d(tmp_path, tensors=fused(plain(dense_shapes(TOY_D))))
    made = planned(tmp_path, tp=4).check()
    assert [piece[0] for _, piece in stem_reads(made, 3, "layers.0.self_attn.qkv_proj")] == [
        (384, 128),
        (640, 128),
        (896, 128),
    ]
    for tp in (3, 8):
        found = [finding for finding in planned(tmp_path, tp=tp).errors if finding.code == "heads"]
        assert [finding.subject for finding in found] == ["layers.0.self_attn.qkv_proj"]
        assert found[0].text == (
            f"layers.0.self_attn.qkv_proj: 4 query heads do not divide by tp {tp} (q_heads=4, kv_heads=2, tp={tp}); "
            "tp sizes that fit: 1, 2, 4 (and 1 more like it)"
        )


def test_dense_layers_are_repeated_over_data_parallel_ranks(tmp_path):
    """P-23: world 4 with tp 2 is two copies."""
    hollow_d(tmp_path)
    made = planned(tmp_path, tp=2, world=4).check()
    number = numbered(made.checkpoint.entries)
    first, third = run(made, 0, number), run(made, 2, number)
    assert all((first[key] == third[key]).all() for key in first)
    assert not (first["norm", 0, "weight"] == 0).any()
    assert (
        run(made, 1, number)["layers.0.mlp.down_proj", 0, "weight"] != first["layers.0.mlp.down_proj", 0, "weight"]
    ).all()


# --- figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", [None, "FP8-T", "FP8-C", "FP8-B", "AWQ"])
@pytest.mark.parametrize(
    "sizes", [{}, {"tp": 2}, {"tp": 2, "ep": 2, "moe_tp": 2, "world": 4}], ids=["1", "tp2", "tp2ep2"]
)
def test_figures_are_those_of_the_steps(tmp_path, quant, sizes):
    """Bytes and reads by class are what the steps, one by one, come to."""
    hollow_m(tmp_path, quant=quant, first_k_dense_replace=1)
    made = planned(tmp_path, **sizes).check()
    for figures in made.ranks:
        reads = list(made.reads(figures.rank))
        assert figures.reads == len(reads)
        assert figures.bytes_needed == sum(nbytes(read.dtype, read.cut.taken) for read in reads)
        assert figures.bytes_needed <= figures.bytes_read
        assert figures.requests >= figures.reads
        assert figures.final <= figures.peak
    if quant is None and not sizes:
        assert made.rank(0).bytes_needed == sum(entry.nbytes for entry in made.checkpoint.entries.values())


def test_shares_of_the_ranks_add_up(tmp_path):
    """P-04: what is cut adds up to the checkpoint once, what is repeated counts once a rank."""
    hollow(tmp_path, LLAMA_8B, plain(dense_shapes(LLAMA_8B)))
    made = planned(tmp_path, tp=8).check()
    entries = made.checkpoint.entries
    norms = sum(entry.nbytes for name, entry in entries.items() if "norm" in name)
    total = sum(entry.nbytes for entry in entries.values())
    assert sum(rank.bytes_needed for rank in made.ranks) == total - norms + 8 * norms
    assert len({rank.bytes_needed for rank in made.ranks}) == 1
    assert made.rank(0).final == made.rank(0).bytes_needed


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_reads_little_more_than_its_share_where_slices_are_long(tmp_path, tp):
    """L-13: bytes read are at most 1.05 x those needed where a run of a slice has 8 KiB, as Llama 70B's have."""
    config = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 32768, "num_attention_heads": 128}
    hollow(tmp_path, config, plain(dense_shapes(config)))
    made = planned(tmp_path, tp=tp).check()
    assert 2 * config["num_attention_heads"] * 128 // tp >= 8192
    for rank in made.ranks:
        assert rank.bytes_read <= 1.05 * rank.bytes_needed


def test_short_runs_are_read_with_what_lies_between(tmp_path):
    """A row of o_proj at TP 8 has 1 KiB: reading the matrix whole is one request instead of 4096."""
    hollow(tmp_path, LLAMA_8B, plain(dense_shapes(LLAMA_8B)))
    made = planned(tmp_path, tp=8).check()
    assert made.rank(3).requests == made.rank(3).reads
    assert made.rank(3).bytes_read < 2.2 * made.rank(3).bytes_needed


def test_the_peak_is_the_weights_and_the_largest_work_in_hand(tmp_path):
    """Segments are prepared in turn: one largest buffer and its transient beside all weights."""
    node = Linear("l", 256, (Part("", 512),), Placement.COLWISE)
    made = plan_of(
        tmp_path,
        {"l.weight": ("F8_E4M3", (512, 256)), "l.weight_scale": ("BF16", (512, 1)), "norm.weight": ("BF16", (256,))},
        node,
        Norm("norm", 256),
        config={"quantization_config": {"quant_method": "fp8", "weight_strategy": "channel"}},
    ).check()
    figures = made.rank(0)
    weights = 512 * 256 + 4 * 512  # codes and one float a row, as the method says it prepares them
    buffers = 512 * 256 + 2 * 512
    assert figures.final == weights + 2 * 256
    assert figures.peak == figures.final + buffers + 4 * 512
    assert figures.to_json()["peak"] == figures.peak


def test_local_nodes_come_from_placement_and_ranks_alone():
    """P-23: whatever the checkpoint holds."""
    node = Linear("l", 256, (Part("q", 512, 4), Part("k", 256, 2, kv=True)), Placement.COLWISE)
    (local,) = localize(node, Ranks.of(tp=4, rank=3))
    assert [(part.name, part.out.start, part.out.stop) for part in local.parts] == [("q", 384, 512), ("k", 128, 256)]
    assert (local.n, local.k) == (256, 256)


def test_a_plan_of_sixteen_ranks_makes_few_classes(tmp_path):
    """R043: what is equal is worked out once, however many layers and ranks."""
    config = LLAMA_8B | {"num_hidden_layers": 32}
    hollow(tmp_path, config, plain(dense_shapes(config)))
    made = planned(tmp_path, tp=16, registry=registry_of(ToyDense)).check()
    assert len({one.cls for one in made.nodes}) == 7
    assert len(made.ranks) == 16
