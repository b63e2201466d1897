"""Quantized checkpoints on the plan: which scheme and layout each part has, what is fused, and which grid it gets.

The dialects and methods are the toys of ``support.quant``; their formats are those of published files.
"""

import numpy as np
import pytest

from steelyard.blueprint import Experts, Linear, Part, Placement
from steelyard.choice import Choice
from steelyard.errors import ConfigError
from steelyard.granularity import PerBlock
from steelyard.layouts import Companion, Layout, Source, StoredTensor
from steelyard.placement import Axis, Fixed, Order, Regrid
from steelyard.registry import Registry
from steelyard.schemes import Form
from support.families import SPLIT
from support.planned import (
    FP8_BLOCK,
    TOY,
    TOY_D,
    TOY_M_CONFIG,
    coded,
    dense_shapes,
    error_texts,
    family_of,
    fused,
    hollow,
    hollow_d,
    hollow_m,
    numbered,
    plan_of,
    planned,
    registry_of,
    run,
    texts,
    toy_m_shapes,
)
from support.quant import Fp8Dialect, Fp8Method, ToyQuantConfig, backend

FILE = "(model.safetensors)"
SIZES = "(tp_size=1, ep_size=1, moe_tp=1)"
ATTN, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
FP8 = StoredTensor((".weight",), ("F8_E4M3",), ((Axis("out"), Axis("in")),))
CHANNEL = {"quantization_config": {"quant_method": "fp8", "weight_strategy": "channel"}}
BLOCK = {"quantization_config": FP8_BLOCK}


def made_plain(tensors, *fragments):
    """Return tensors in which projections whose name holds a fragment are BF16 without a scale."""
    made = {}
    for name, (code, shape) in tensors.items():
        if any(fragment in name for fragment in fragments):
            if name.endswith(".weight"):
                made[name] = ("BF16", shape)
        else:
            made[name] = (code, shape)
    return made


def schemes(made):
    """Return the stems and parts of quantized Segments."""
    return {
        (task.stem, part): task.segment.scheme.key()
        for task in made.tasks(0)
        if task.segment.scheme.is_quantized
        for part in task.segment.parts
    }


def segments_of(made, stem, rank=0):
    return [task for task in made.tasks(rank) if task.stem == stem]


def shapes_of(made, stem, rank=0):
    """Return the buffers' shapes of a stem that is one Segment."""
    (task,) = segments_of(made, stem, rank)
    return {buffer.name: buffer.shape for buffer in task.on_rank.buffers}


def with_method(method, *nodes, companions=()):
    """Return a registry with one family of the nodes and another FP8 method than the usual."""

    class Dialect(Fp8Dialect):
        def parse(self, config, files):
            made = super().parse(config, files)

            class Parsed(ToyQuantConfig):
                def companions(self):
                    return companions

            return Parsed(made.schemes, made.ignore, made.codes, made.notes)

    registry = Registry(registry_of().catalog)
    registry.add("model", family_of(*nodes))
    registry.add("quant dialect", Dialect)
    registry.add("quant method", method)
    registry.add("kernel backend", backend("toy"))
    return registry


# --- file against config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["FP8-T", "FP8-C", "FP8-B", "AWQ"])
@pytest.mark.parametrize("tp", [1, 2])
def test_each_format_is_planned_whole_and_fused(tmp_path, quant, tp):
    """Every projection is quantized; head, embedding and norms are plain; parts of one input share a Segment."""
    hollow_d(tmp_path, quant=quant)
    made = planned(tmp_path, tp=tp).check()
    assert texts(made) == []
    stems = {stem for stem, _ in schemes(made)}
    assert stems == {
        f"layers.{layer}.{node}"
        for layer in (0, 1)
        for node in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert all(len(segments_of(made, stem)) == 1 for stem in stems)
    for rank in range(tp):
        run(made, rank, numbered(made.checkpoint.entries))


def test_modules_that_are_plain_in_the_file_but_not_ignored_are_named_with_both_dtypes(tmp_path):
    """R009, R106: no value is rounded to FP8."""
    tensors = made_plain(coded(dense_shapes(TOY_D), "FP8-B"), "layers.1.mlp")
    hollow_d(tmp_path, tensors=tensors, quant="FP8-B")
    made = planned(tmp_path)
    found = [finding for finding in made.errors if finding.code == "dtype"]
    assert [finding.text for finding in found] == [
        f"model.layers.1.mlp.{name}_proj.weight {FILE}: stored as BF16, layers.1.mlp.{stem} takes F8_E4M3; codes and floats "
        "are never cast into each other"
        for name, stem in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
    ]
    missing = [finding.subject for finding in made.errors if finding.code == "missing"]
    assert missing == [f"model.layers.1.mlp.{name}_proj.weight_scale_inv" for name in ("gate", "up", "down")]


def test_the_files_are_trusted_where_the_user_says_so_with_a_line_each(tmp_path):
    """R009, R106, D-13: the documented fallback, exact values and three lines."""
    tensors = made_plain(coded(dense_shapes(TOY_D), "FP8-B"), "layers.1.mlp")
    hollow_d(tmp_path, tensors=tensors, quant="FP8-B")
    made = planned(tmp_path, trust_files=True).check()
    assert texts(made) == [
        f"model.layers.1.mlp.{name}_proj.weight: the config says fp8.plain, the file holds a plain float; loaded as it is "
        "stored, as trust_files says"
        for name in ("gate", "up", "down")
    ]
    assert {stem for stem, _ in schemes(made) if ".1.mlp" in stem} == set()
    assert {
        buffer.dtype for task in segments_of(made, "layers.1.mlp.down_proj") for buffer in task.on_rank.buffers
    } == {"BF16"}


def test_a_float_with_a_scale_beside_it_is_not_trusted(tmp_path):
    """R151: a BF16 weight with a scale is neither plain nor FP8."""
    tensors = coded(dense_shapes(TOY_D), "FP8-B") | {f"{ATTN}.q_proj.weight": ("BF16", (512, 256))}
    hollow_d(tmp_path, tensors=tensors, quant="FP8-B")
    assert error_texts(planned(tmp_path, trust_files=True)) == [
        f"{ATTN}.q_proj.weight {FILE}: stored as BF16, layers.0.self_attn.qkv_proj takes F8_E4M3; codes and floats are "
        "never cast into each other"
    ]


def test_a_weight_without_its_scale_is_an_error(tmp_path):
    """L-19, E-07: every tensor of a scheme is needed."""
    tensors = coded(dense_shapes(TOY_D), "FP8-B")
    del tensors[f"{MLP}.down_proj.weight_scale_inv"]
    hollow_d(tmp_path, tensors=tensors, quant="FP8-B")
    assert error_texts(planned(tmp_path)) == [
        f"missing tensor {MLP}.down_proj.weight_scale_inv (also looked for {MLP}.down_proj.weight_scale), needed for "
        "layers.0.mlp.down_proj"
    ]


@pytest.mark.parametrize("aux", ["weight_scale", "input_scale"])
def test_an_expert_without_its_scale_is_named(tmp_path, aux):
    """E-06, E-07: the expert and the projection are in the name."""
    tensors = coded(toy_m_shapes(), "FP8-T")
    del tensors[f"{MLP}.experts.3.down_proj.{aux}"]
    hollow_m(tmp_path, tensors=tensors, quant="FP8-T")
    made = planned(tmp_path)
    assert "layers.0.mlp.experts" not in {one.node.stem for one in made.nodes}
    (text,) = error_texts(made)
    assert text.startswith(f"missing tensor {MLP}.experts.3.down_proj.{aux} (also looked for ")
    assert text.endswith("needed for layers.0.mlp.experts.3")


# --- ignore rules ------------------------------------------------------------------------------------------------


def test_an_ignore_entry_for_the_router_leaves_gate_proj_alone(tmp_path):
    """R011, R048: entries end on dot borders; the dense layer and the router's."""
    config = TOY_M_CONFIG | {
        "first_k_dense_replace": 1,
        "quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["mlp.gate"]},
    }
    hollow(tmp_path, config, coded(toy_m_shapes(config), "FP8-B"))
    made = planned(tmp_path).check()
    assert texts(made) == []
    found = schemes(made)
    assert {part for stem, part in found if stem == "layers.0.mlp.gate_up_proj"} == {"gate", "up"}
    assert {part for stem, part in found if stem == "layers.1.mlp.experts"} == {"gate", "up", "down"}
    assert not any(stem == "layers.1.mlp.gate" for stem, _ in found)


def test_forcing_a_coded_module_plain_is_an_error_about_its_codes_and_its_scale(tmp_path):
    """R011: a scale that no module uses is by itself enough to stop."""
    config = {"quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["gate_proj"]}, "num_hidden_layers": 1}
    hollow_d(tmp_path, config=config, tensors=coded(dense_shapes(TOY_D | config), "FP8-B"))
    assert error_texts(planned(tmp_path)) == [
        f"{MLP}.gate_proj.weight {FILE}: stored as F8_E4M3, layers.0.mlp.gate_up_proj takes F32 or BF16 or F16; codes and "
        "floats are never cast into each other",
        f"unexpected tensor {MLP}.gate_proj.weight_scale_inv {FILE}: no rule of the model uses or drops it",
    ]


@pytest.mark.parametrize(
    ("entry", "plain"),
    [
        ("self_attn.o_proj", ["layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"]),
        ("o_proj", ["layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"]),
        ("model.layers.1.self_attn.o_proj", ["layers.1.self_attn.o_proj"]),
        ("model.layers.1", [f"layers.1.{n}" for n in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]),
    ],
    ids=["suffix", "last", "full", "prefix"],
)  # fmt: skip
def test_entries_match_a_run_of_segments_at_any_depth(tmp_path, entry, plain):
    """R046: short names, full names and prefixes."""
    names = {
        f"model.{stem.removesuffix('.qkv_proj').removesuffix('.gate_up_proj')}.{SPLIT[part]}"
        if part else f"model.{stem}"
        for stem in plain
        for part in (("q", "k", "v") if stem.endswith("qkv_proj") else ("gate", "up") if stem.endswith("up_proj") else ("",))
    }  # fmt: skip
    tensors = made_plain(coded(dense_shapes(TOY_D), "FP8-B"), *(f"{name}." for name in names))
    config = {"quantization_config": FP8_BLOCK | {"modules_to_not_convert": [entry]}}
    hollow_d(tmp_path, tensors=tensors, config=config)
    made = planned(tmp_path).check()
    assert texts(made) == []
    coded_stems = {stem for stem, _ in schemes(made)}
    assert coded_stems == {
        one.node.stem for one in made.nodes if isinstance(one.node, Linear) and one.node.stem not in [*plain, "lm_head"]
    }


def test_an_entry_with_the_fused_name_counts_for_all_its_parts(tmp_path):
    """R058: the merged name and all parts are asked about."""
    tensors = made_plain(coded(dense_shapes(TOY_D), "FP8-B"), f"{MLP}.gate_proj", f"{MLP}.up_proj")
    config = {"quantization_config": FP8_BLOCK | {"modules_to_not_convert": [f"{MLP}.gate_up_proj"]}}
    hollow_d(tmp_path, tensors=tensors, config=config)
    made = planned(tmp_path).check()
    assert texts(made) == []
    assert not any(stem == "layers.0.mlp.gate_up_proj" for stem, _ in schemes(made))
    assert len(segments_of(made, "layers.0.mlp.gate_up_proj")) == 1


def test_entries_that_match_nothing_and_keys_that_nobody_reads_are_told(tmp_path):
    """R050: an entry with a wrapper's suffix is reported beside the dtype error."""
    entry = f"{MLP}.down_proj.linear"
    stated = FP8_BLOCK | {"modules_to_not_convert": [entry], "exclude_me": 1}
    tensors = made_plain(coded(dense_shapes(TOY_D), "FP8-B"), f"{MLP}.down_proj.")
    hollow_d(tmp_path, tensors=tensors, config={"quantization_config": stated})
    made = planned(tmp_path)
    assert [(finding.code, finding.severity) for finding in made.findings] == [
        ("dtype", "error"),
        ("missing", "error"),
        ("unread-key", "note"),
        ("unused-pattern", "note"),
    ]
    assert [finding.text for finding in made.findings][2:] == [
        "quantization key 'exclude_me' is read by nobody",
        f"ignore entry '{entry}' matched no layer",
    ]


@pytest.mark.parametrize("stored", ["coded", "plain"])
def test_a_head_is_quantized_if_the_file_says_so_and_plain_if_not(tmp_path, stored):
    """R054: a head is a module like others; its 96 rows are a partial block."""
    tensors = coded(dense_shapes(TOY_D), "FP8-B")
    if stored == "coded":
        tensors |= {"lm_head.weight": ("F8_E4M3", (96, 256)), "lm_head.weight_scale_inv": ("F32", (1, 2))}
    hollow_d(tmp_path, tensors=tensors, quant="FP8-B")
    made = planned(tmp_path, tp=2).check()
    assert ("lm_head" in {stem for stem, _ in schemes(made)}) == (stored == "coded")
    if stored == "coded":
        assert shapes_of(made, "lm_head", 1) == {"weight": (48, 256), "weight_scale_inv": (3, 2)}


def test_a_packed_head_without_scales_is_an_error(tmp_path):
    """R054: the third case."""
    tensors = coded(dense_shapes(TOY_D), "AWQ") | {"lm_head.qweight": ("I32", (256, 12))}
    del tensors["lm_head.weight"]
    hollow_d(tmp_path, tensors=tensors, quant="AWQ")
    assert error_texts(planned(tmp_path)) == [
        f"missing tensor lm_head.{name}, needed for lm_head" for name in ("qzeros", "scales")
    ]


def test_a_packed_head_is_cut_once_from_its_full_sizes(tmp_path):
    """R038: word columns and scale columns of each rank."""
    tensors = coded(dense_shapes(TOY_D), "AWQ")
    del tensors["lm_head.weight"]
    tensors |= {
        "lm_head.qweight": ("I32", (256, 12)),
        "lm_head.qzeros": ("I32", (2, 12)),
        "lm_head.scales": ("F16", (2, 96)),
    }
    hollow_d(tmp_path, tensors=tensors, quant="AWQ")
    made = planned(tmp_path, tp=2).check()
    for rank in range(2):
        (task,) = segments_of(made, "lm_head", rank)
        columns = {read.buffer: (read.cut.slices[1].start, read.cut.slices[1].length) for read in task.reads}
        assert columns == {"qweight": (6 * rank, 6), "qzeros": (6 * rank, 6), "scales": (48 * rank, 48)}


# --- scales ------------------------------------------------------------------------------------------------------


def test_a_channel_scale_of_one_dim_is_cut_as_its_weight_is(tmp_path):
    """R013, R014: [out] and [out, 1] alike; column-parallel slices, row-parallel keeps it whole."""
    tensors = coded(dense_shapes(TOY_D), "FP8-C")
    flat = {name: (code, shape[:1] if name.endswith("_scale") else shape) for name, (code, shape) in tensors.items()}
    for folder, stored in (("column", tensors), ("flat", flat)):
        hollow_d(tmp_path / folder, tensors=stored, config=CHANNEL)
        made = planned(tmp_path / folder, tp=2).check()
        for rank in range(2):
            scales = {
                read.name: (read.cut.slices[0].start, read.cut.slices[0].length)
                for read in made.reads(rank)
                if read.buffer == "weight_scale" and ".layers.0." in read.name
            }
            assert scales == {
                f"{ATTN}.q_proj.weight_scale": (256 * rank, 256),
                f"{ATTN}.k_proj.weight_scale": (128 * rank, 128),
                f"{ATTN}.v_proj.weight_scale": (128 * rank, 128),
                f"{MLP}.gate_proj.weight_scale": (256 * rank, 256),
                f"{MLP}.up_proj.weight_scale": (256 * rank, 256),
                f"{ATTN}.o_proj.weight_scale": (0, 256),
                f"{MLP}.down_proj.weight_scale": (0, 256),
            }
        assert shapes_of(made, "layers.0.self_attn.qkv_proj")["weight_scale"] == (512, 1)


def test_groups_are_found_whatever_they_are_called_and_none_is_an_error(tmp_path):
    """R013: a group named after its scheme."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"FP8_DYNAMIC": group}}
    tensors = coded(dense_shapes(TOY_D), "FP8-C")
    hollow_d(tmp_path, tensors=tensors, config={"quantization_config": stated})
    assert shapes_of(planned(tmp_path).check(), "layers.0.self_attn.qkv_proj")["weight_scale"] == (1024, 1)
    hollow_d(tmp_path, tensors=tensors, config={"quantization_config": stated | {"config_groups": {}}})
    with pytest.raises(ConfigError, match="^compressed-tensors: config_groups is empty$"):
        planned(tmp_path)


def test_expert_scales_are_cut_as_their_weights_are(tmp_path):
    """R016: gate's half and up's half of each rank behind one another; w2's whole."""
    hollow_m(tmp_path, quant="FP8-C")
    made = planned(tmp_path, tp=2).check()
    for rank in range(2):
        up, down = segments_of(made, "layers.0.mlp.experts", rank)
        assert {buffer.name: buffer.shape for buffer in up.on_rank.buffers}["weight_scale"] == (4, 256, 1)
        assert {buffer.name: buffer.shape for buffer in down.on_rank.buffers}["weight_scale"] == (4, 256, 1)
        scales = [
            (read.part, read.cut.slices[0].start, read.region[1])
            for read in up.reads
            if read.buffer == "weight_scale" and read.expert == 2
        ]
        assert scales == [("gate", 128 * rank, (0, 128)), ("up", 128 * rank, (128, 128))]
        assert {read.cut.slices[0].length for read in down.reads if read.buffer == "weight_scale"} == {256}


def test_a_scales_name_is_read_under_the_scheme(tmp_path):
    """R018: ``weight_scale_inv`` is a scalar for one scheme and a grid for the other."""
    by_tensor = {
        name.replace("weight_scale", "weight_scale_inv"): value
        for name, value in coded(dense_shapes(TOY_D), "FP8-T").items()
    }
    hollow_d(tmp_path / "tensor", tensors=by_tensor, quant="FP8-T")
    hollow_d(tmp_path / "block", quant="FP8-B")
    for folder in ("tensor", "block"):
        made = planned(tmp_path / folder).check()
        assert texts(made) == []
        assert len([read for read in made.reads(0) if read.name.endswith("weight_scale_inv")]) == 14


@pytest.mark.parametrize("tp", [1, 2])
def test_one_scalar_of_a_merged_tensor_is_every_parts(tmp_path, tp):
    """R019: one scale on disk, one in each part's place."""
    shapes = {
        name: shape for name, (_, shape) in fused({n: ("BF16", s) for n, s in dense_shapes(TOY_D).items()}).items()
    }
    hollow_d(tmp_path, tensors=coded(shapes, "FP8-T"), quant="FP8-T")
    made = planned(tmp_path, tp=tp).check()
    stem, name = "layers.0.self_attn.qkv_proj", f"{ATTN}.qkv_proj.weight_scale"
    assert shapes_of(made, stem) == {"weight": (1024 // tp, 256), "weight_scale": (3,), "input_scale": (3,)}
    (task,) = segments_of(made, stem, tp - 1)
    assert [(read.name, read.part, read.region) for read in task.reads if read.buffer == "weight_scale"] == [
        (name, part, ((place, 1),)) for place, part in enumerate("qkv")
    ]


def test_every_part_has_a_place_for_its_input_scale_and_the_largest_is_taken(tmp_path):
    """R021: one slot a part, then the maximum."""
    hollow_d(tmp_path, quant="FP8-T")
    made = planned(tmp_path).check()
    for stem, count in (
        ("layers.0.self_attn.qkv_proj", 3),
        ("layers.0.mlp.gate_up_proj", 2),
        ("layers.0.mlp.down_proj", 1),
    ):
        (task,) = segments_of(made, stem)
        (scale,) = (buffer for buffer in task.on_rank.buffers if buffer.name == "input_scale")
        assert (scale.shape, scale.merge) == ((count,), "max")


def test_one_input_scale_an_expert_is_kept_for_each_local_expert(tmp_path):
    """R077: local scales stay with their expert."""
    hollow_m(tmp_path, quant="FP8-T")
    made = planned(tmp_path, ep=2).check()
    up, _ = segments_of(made, "layers.0.mlp.experts", 1)
    assert {buffer.name: buffer.shape for buffer in up.on_rank.buffers}["input_scale"] == (2, 2)
    assert {(read.expert, read.region[0]) for read in up.reads if read.buffer == "input_scale"} == {
        (2, (0, 1)),
        (3, (1, 1)),
    }


def test_a_scale_that_all_ranks_need_is_read_of_every_expert(tmp_path):
    """R077: a global scale is not indexed with local numbers."""

    class Global(Fp8Method):
        def layouts(self, scheme, node):
            scale = StoredTensor((".weight_scale_2",), ("F32",), ((),), role="scale", merge="per_part", scope="global")
            return (Layout("global", (FP8, scale)),)

    up = Linear("", 256, (Part("gate", 256), Part("up", 256)), Placement.COLWISE)
    node = Experts("experts", 4, up, Linear("", 256, (Part("down", 256),), Placement.ROWWISE))
    tensors = {}
    for expert in range(4):
        for part in ("gate", "up", "down"):
            tensors |= {f"experts.{expert}.{part}.weight": ("F8_E4M3", (256, 256))}
            tensors |= {f"experts.{expert}.{part}.weight_scale_2": ("F32", ())}
    hollow(tmp_path, TOY | CHANNEL, tensors)
    made = planned(tmp_path, registry=with_method(Global, node), ep=2).check()
    number = numbered(made.checkpoint.entries)
    for rank in range(2):
        held = run(made, rank, number)
        assert held["experts", 0, "weight"].shape == (2, 512, 256)
        scales = held["experts", 0, "weight_scale_2"]
        assert scales.tolist() == [
            [int(number(f"experts.{expert}.{part}.weight_scale_2", ())) for part in ("gate", "up")]
            for expert in range(4)
        ]
        assert made.rank(rank).reads == len(list(made.reads(rank)))


def test_kv_scales_go_to_the_attention_whatever_the_part_rules_say(tmp_path):
    """Companions are claimed before any part rule: ``k_proj.k_scale`` is no tensor of k_proj."""
    spelled = {
        "k": ("k_proj.k_scale", "k_proj.output_scale", "k_scale"),
        "v": ("v_proj.v_scale", "v_proj.output_scale", "attn.v_scale"),
    }
    tensors = coded(dense_shapes(TOY_D | {"num_hidden_layers": 3}), "FP8-T")
    for layer in range(3):
        tensors |= {f"model.layers.{layer}.self_attn.{names[layer]}": ("F32", ()) for names in spelled.values()}
    hollow_d(tmp_path, tensors=tensors, quant="FP8-T", num_hidden_layers=3)
    made = planned(tmp_path).check()
    assert texts(made) == []
    for layer in range(3):
        (task,) = segments_of(made, f"layers.{layer}.self_attn.attn")
        assert {read.buffer: read.name.split("self_attn.")[1] for read in task.reads} == {
            f"{one}_scale": names[layer] for one, names in spelled.items()
        }
        assert shapes_of(made, f"layers.{layer}.self_attn.attn") == {"k_scale": (1,), "v_scale": (1,)}


def test_two_spellings_of_one_kv_scale_are_duplicates(tmp_path):
    """R121, L-21: an old and a new name side by side."""
    tensors = coded(dense_shapes(TOY_D), "FP8-T") | {
        f"{ATTN}.k_proj.k_scale": ("F32", ()),
        f"{ATTN}.k_proj.output_scale": ("F32", ()),
    }
    hollow_d(tmp_path, tensors=tensors, quant="FP8-T")
    assert error_texts(planned(tmp_path)) == [
        f"duplicate tensors {ATTN}.k_proj.k_scale and {ATTN}.k_proj.output_scale: both are layers.0.self_attn.attn's "
        "k_scale; keep one of them (model.safetensors)"
    ]


def test_a_companion_that_takes_an_axis_fits_only_nodes_that_have_it(tmp_path):
    """A per-head scale beside every Linear: q has heads, o has none and takes the scalar."""
    companion = StoredTensor(
        (".head_scale",), ("F32",), ((Axis("head"),), ()), absent="skip", role="scale", merge="per_part"
    )
    nodes = (
        Linear("q", 256, (Part("", 512, 4),), Placement.COLWISE),
        Linear("o", 512, (Part("", 256),), Placement.ROWWISE),
    )
    tensors = {"q.head_scale": ("F32", (4,)), "o.head_scale": ("F32", ())}
    for stem, rows, columns in (("q", 512, 256), ("o", 256, 512)):
        tensors |= {f"{stem}.weight": ("F8_E4M3", (rows, columns)), f"{stem}.weight_scale": ("BF16", (rows, 1))}
    hollow(tmp_path, TOY | CHANNEL, tensors)
    registry = with_method(Fp8Method, *nodes, companions=(Companion("Linear", companion),))
    made = planned(tmp_path, registry=registry, tp=2).check()
    assert [(read.name, read.cut.taken) for read in made.reads(1) if read.buffer == "head_scale"] == [
        ("q.head_scale", (2,)),
        ("o.head_scale", ()),
    ]


# --- fused and kept apart ----------------------------------------------------------------------------------------


def test_packed_words_zeros_and_scales_are_merged_each_along_its_own_axis(tmp_path):
    """R003: the merged qweight is q, k and v behind one another along dim 1."""
    hollow_d(tmp_path, quant="AWQ")
    made = planned(tmp_path).check()
    number = numbered(made.checkpoint.entries)
    held = run(made, 0, number)
    stem = "layers.0.self_attn.qkv_proj"
    for name, code_rows in (("qweight", 256), ("qzeros", 2), ("scales", 2)):
        parts = [
            number(f"{ATTN}.{one}_proj.{name}", made.checkpoint.entries[f"{ATTN}.{one}_proj.{name}"].shape)
            for one in "qkv"
        ]
        assert (held[stem, 0, name] == np.concatenate(parts, axis=1)).all()
        assert held[stem, 0, name].shape == (code_rows, 1024 if name == "scales" else 128)
    assert shapes_of(made, "layers.0.mlp.gate_up_proj")["qweight"] == (256, 128)


def test_a_merged_awq_tensor_is_cut_in_each_tensors_own_units(tmp_path):
    """R025: word columns and scale columns of both ranks."""
    node = Linear(
        "qkv", 256, (Part("q", 512, 4), Part("k", 256, 2, kv=True), Part("v", 256, 2, kv=True)), Placement.COLWISE
    )
    order = Order((("q", 512), ("k", 256), ("v", 256)))
    made = plan_of(
        tmp_path,
        {"qkv.qweight": ("I32", (256, 128)), "qkv.qzeros": ("I32", (2, 128)), "qkv.scales": ("F16", (2, 1024))},
        node,
        names=lambda node, part, expert: (Source("qkv", order=order),),
        config={"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}},
        tp=2,
    ).check()
    columns = {
        rank: {
            name: [
                (read.cut.slices[1].start, read.cut.slices[1].stop - 1)
                for read in made.reads(rank)
                if read.buffer == name
            ]
            for name in ("qweight", "qzeros", "scales")
        }
        for rank in range(2)
    }
    assert columns[0] == {
        "qweight": [(0, 31), (64, 79), (96, 111)],
        "qzeros": [(0, 31), (64, 79), (96, 111)],
        "scales": [(0, 255), (512, 639), (768, 895)],
    }
    assert columns[1]["scales"] == [(256, 511), (640, 767), (896, 1023)]


def test_parts_with_other_schemes_stay_apart_and_exact(tmp_path):
    """R052: q and k by channel, v in 4 bits; with one group for all three they are merged."""
    float8 = {"type": "float", "num_bits": 8, "strategy": "channel"}
    int4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
    config = TOY_D | {"num_hidden_layers": 1}
    by_channel, words = coded(dense_shapes(config), "FP8-C"), coded(dense_shapes(config), "CT-W4")
    mixed = {name: value for name, value in by_channel.items() if ".v_proj." not in name}
    mixed |= {name: value for name, value in words.items() if ".v_proj." in name}
    groups = {
        "A": {"targets": ["re:.*(q|k|o|gate|up|down)_proj$"], "weights": float8},
        "B": {"targets": ["re:.*v_proj$"], "weights": int4},
    }
    stated = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    hollow_d(tmp_path / "mixed", tensors=mixed, config={"quantization_config": stated, "num_hidden_layers": 1})
    made = planned(tmp_path / "mixed", tp=2).check()
    assert texts(made) == [
        "layers.0.self_attn.qkv_proj: not fused because q, k and v are quantized differently",
    ]
    first, second = segments_of(made, "layers.0.self_attn.qkv_proj")
    assert (first.segment.parts, first.segment.scheme.key()) == (("q", "k"), "fp8.plain")
    assert (second.segment.parts, second.segment.scheme.key()) == (("v",), "int4.pack32")
    run(made, 1, numbered(made.checkpoint.entries))
    one = stated | {"config_groups": {"A": {"targets": ["Linear"], "weights": float8}}}
    hollow_d(tmp_path / "one", tensors=by_channel, config={"quantization_config": one, "num_hidden_layers": 1})
    merged = planned(tmp_path / "one").check()
    assert [task.segment.parts for task in segments_of(merged, "layers.0.self_attn.qkv_proj")] == [("q", "k", "v")]


def test_a_part_that_is_ignored_stays_apart(tmp_path):
    """R052: a partly ignored fusion loads exactly."""
    tensors = made_plain(coded(dense_shapes(TOY_D), "FP8-B"), ".k_proj.")
    hollow_d(tmp_path, tensors=tensors, config={"quantization_config": FP8_BLOCK | {"ignored_layers": ["k_proj"]}})
    made = planned(tmp_path).check()
    assert [task.segment.parts for task in segments_of(made, "layers.0.self_attn.qkv_proj")] == [("q",), ("k",), ("v",)]
    stem = "layers.0.self_attn.qkv_proj: not fused because"
    assert texts(made) == [
        f"{stem} q and k are quantized differently (and 1 more like it)",
        f"{stem} k and v are quantized differently (and 1 more like it)",
    ]


def test_scales_stored_in_two_dtypes_keep_parts_apart(tmp_path):
    tensors = coded(dense_shapes(TOY_D), "FP8-C") | {f"{MLP}.up_proj.weight_scale": ("F32", (512, 1))}
    hollow_d(tmp_path, tensors=tensors, config=CHANNEL)
    made = planned(tmp_path).check()
    assert texts(made) == [
        "layers.0.mlp.gate_up_proj: not fused because weight_scale of gate and up is stored as BF16 and F32"
    ]


def test_a_bias_of_another_float_does_not_keep_parts_apart(tmp_path):
    biases = {
        f"model.layers.{layer}.self_attn.{one}_proj.bias": (code, (n,))
        for layer in (0, 1)
        for one, n, code in (("q", 512, "BF16"), ("k", 256, "F32"), ("v", 256, "F16"))
    }
    hollow_d(tmp_path, tensors=coded(dense_shapes(TOY_D), "FP8-C") | biases, config=CHANNEL, attention_bias=True)
    made = planned(tmp_path, tp=4).check()
    assert texts(made) == []
    assert shapes_of(made, "layers.0.self_attn.qkv_proj")["bias"] == (384,)


def test_parts_whose_halves_end_inside_a_block_stay_apart(tmp_path):
    """R042: 640 rows fit a grid of 128, 320 and 320 do not."""
    hollow_d(tmp_path, quant="FP8-B", intermediate_size=320)
    made = planned(tmp_path).check()
    assert texts(made) == [
        "layers.0.mlp.gate_up_proj: not fused because gate has 320 rows on a rank and weight_scale_inv steps by 128, so up "
        "would start inside a step (and 1 more like it)"
    ]
    for task, part in zip(segments_of(made, "layers.0.mlp.gate_up_proj"), ("gate", "up"), strict=True):
        assert task.segment.parts == (part,)
        assert {buffer.name: buffer.shape for buffer in task.on_rank.buffers} == {
            "weight": (320, 256),
            "weight_scale_inv": (3, 2),
        }
        assert not any(read.cut.is_regridded for read in task.reads)


# --- the scale grid ----------------------------------------------------------------------------------------------


def rows_of_blocks(read, rows, step):
    """Return, for each of a rank's rows, which stored scale row it is under."""
    regrid, piece = read.cut.regrids[0], read.cut.slices[0].indices()
    fine = piece if regrid is None else [index for index in piece for _ in range(regrid.repeat)]
    kept = fine if regrid is None else fine[regrid.skip : regrid.skip + regrid.keep]
    return [kept[row // step] for row in range(rows)]


def test_a_part_border_inside_a_block_shares_that_blocks_scale(tmp_path):
    """R028: 192 and 192 rows merged on disk, three blocks."""
    node = Linear("gate_up", 256, (Part("gate", 192), Part("up", 192)), Placement.COLWISE)
    made = plan_of(
        tmp_path,
        {"gate_up.weight": ("F8_E4M3", (384, 256)), "gate_up.weight_scale_inv": ("F32", (3, 2))},
        node,
        names=lambda node, part, expert: (Source("gate_up", order=Order((("gate", 192), ("up", 192)))),),
        config=BLOCK,
    ).check()
    (task,) = segments_of(made, "gate_up")
    assert task.segment.scheme.granularity == PerBlock(64, 128)
    gate, up = (read for read in task.reads if read.buffer == "weight_scale_inv")
    assert rows_of_blocks(gate, 192, 64) == [0] * 128 + [1] * 64
    assert rows_of_blocks(up, 192, 64) == [1] * 64 + [2] * 128


def test_a_rank_border_inside_a_block_refines_the_grid_for_all_ranks(tmp_path):
    """R040: 640 rows in 5 blocks over two ranks; rank 0 has blocks 0, 1 and half of 2."""
    hollow_d(tmp_path, quant="FP8-B", intermediate_size=640)
    made = planned(tmp_path, tp=2).check()
    refined = "its scale grid is refined so that every rank starts on an edge"
    assert texts(made) == [
        f"layers.0.mlp.gate_up_proj: {refined}: out 128 -> 64 (and 1 more like it)",
        f"layers.0.mlp.down_proj: {refined}: in 128 -> 64 (and 1 more like it)",
    ]
    for rank, blocks in enumerate(([0] * 128 + [1] * 128 + [2] * 64, [2] * 64 + [3] * 128 + [4] * 128)):
        (task,) = segments_of(made, "layers.0.mlp.gate_up_proj", rank)
        assert task.segment.scheme.granularity == PerBlock(64, 128)
        for read in task.reads:
            if read.buffer == "weight_scale_inv":
                assert rows_of_blocks(read, 320, 64) == blocks
        (down,) = segments_of(made, "layers.0.mlp.down_proj", rank)
        assert down.segment.scheme.granularity == PerBlock(128, 64)
    (first, *_) = (
        read for read in segments_of(made, "layers.0.mlp.gate_up_proj", 1)[0].reads if read.buffer != "weight"
    )
    assert first.cut.regrids == (Regrid(2, 1, 5), None)


def test_a_strict_grid_refuses_with_module_range_block_and_both_layers(tmp_path):
    """R040, R043: gate, up and down of both layers at once, before anything is read."""
    hollow_d(tmp_path, quant="FP8-B", intermediate_size=640)
    inside = "one stored index covers 128 elements (and 1 more like it)"
    assert error_texts(planned(tmp_path, tp=2, scale_grid="strict")) == [
        f"layers.0.mlp.gate_up_proj: cannot cut out[0:320]: {inside}",
        f"layers.0.mlp.down_proj: cannot cut in[0:320]: {inside}",
    ]


def test_a_grid_that_would_be_too_fine_is_an_error_with_the_sizes_that_fit(tmp_path):
    """R043: 576 over 64 ranks is 9 rows; the finest grid is 16."""
    hollow_d(tmp_path, quant="FP8-B", intermediate_size=576, num_attention_heads=64, num_key_value_heads=64, head_dim=4)
    found = [text for text in error_texts(planned(tmp_path, tp=64)) if ".mlp." in text]
    finest = "and only a grid of 1 would have an edge there; the finest that is made is 16; sizes that fit: "
    assert found == [
        f"layers.0.mlp.gate_up_proj: cannot cut out[0:9]: the boundary lies inside a block of 128 {finest}"
        "1, 2, 3, 4, 6, 9, 12, 18, 36 (and 1 more like it)",
        f"layers.0.mlp.down_proj: cannot cut in[0:9]: the boundary lies inside a block of 128 {finest}"
        "1, 2, 3, 4, 6, 9, 12, 18, 36 (and 1 more like it)",
    ]


def test_the_input_side_of_a_row_parallel_layer_is_refined_too(tmp_path):
    """R044: 384 columns in 3 blocks over two ranks."""
    node = Linear("down", 384, (Part("", 256),), Placement.ROWWISE)
    made = plan_of(
        tmp_path,
        {"down.weight": ("F8_E4M3", (256, 384)), "down.weight_scale_inv": ("F32", (2, 3))},
        node,
        config=BLOCK,
        tp=2,
    ).check()
    for rank, columns in enumerate(([0, 0, 1], [1, 2, 2])):
        (scale,) = (read for read in made.reads(rank) if read.buffer == "weight_scale_inv")
        regrid, piece = scale.cut.regrids[1], scale.cut.slices[1].indices()
        fine = [index for index in piece for _ in range(regrid.repeat)][regrid.skip : regrid.skip + regrid.keep]
        assert fine == columns
    (task,) = segments_of(made, "down")
    assert task.segment.scheme.granularity == PerBlock(128, 64)


@pytest.mark.parametrize(
    ("smallest", "why"),
    [(None, "takes no scale grid as fine as 64"), (128, "takes no scale grid as fine as 64"), (64, None)],
)
def test_a_refined_grid_needs_a_form_that_takes_it(tmp_path, smallest, why):
    """R040: the backend's form says how fine a grid may be; another backend is asked."""
    hollow_d(tmp_path, quant="FP8-B", intermediate_size=640, num_hidden_layers=1)
    backends = (backend("coarse", smallest_grid=smallest), backend("fine", smallest_grid=16))
    made = planned(tmp_path, tp=2, registry=registry_of(backends=backends)).check()
    (task,) = segments_of(made, "layers.0.mlp.gate_up_proj")
    form = Form("coarse" if why is None else "fine", "BF16", smallest_grid=smallest if why is None else 16)
    refusals = () if why is None else (("coarse", why),)
    assert task.segment.choice == Choice(form.name, form, refusals)
    (plain,) = segments_of(made, "layers.0.self_attn.qkv_proj")
    assert plain.segment.choice.backend == "coarse"


def test_a_grid_that_no_backend_takes_is_an_error_with_every_reason(tmp_path):
    """M-22, R040: rather no plan than a kernel with another grid."""
    hollow_d(tmp_path, quant="FP8-B", intermediate_size=640, num_hidden_layers=1)
    made = planned(tmp_path, tp=2, registry=registry_of(backends=(backend("coarse"),)))
    reasons = "coarse: takes no scale grid as fine as 64; torch: computes plain floats, not fp8.plain"
    assert error_texts(made) == [
        f"layers.0.mlp.gate_up_proj: no kernel backend takes fp8.plain with local shape [640, 256] on sm_90: {reasons}",
        f"layers.0.mlp.down_proj: no kernel backend takes fp8.plain with local shape [256, 320] on sm_90: {reasons}",
    ]


# --- layouts -----------------------------------------------------------------------------------------------------


def layouts_of(*layouts):
    class Method(Fp8Method):
        def layouts(self, scheme, node):
            return layouts

    return Method


SCALE = StoredTensor((".weight_scale",), ("F32",), ((Axis("out"), Fixed(1)),), role="scale")
ZERO = StoredTensor((".weight_zero",), ("F32",), ((Axis("out"), Fixed(1)),), role="zero")
BYTES = StoredTensor((".weight",), ("I8",), ((Axis("out"), Axis("in")),))
LINEAR = Linear("l", 256, (Part("", 512),), Placement.COLWISE)


def plan_l(folder, tensors, *layouts):
    stored = {f"l.{name}": value for name, value in tensors.items()}
    hollow(folder, TOY | CHANNEL, stored)
    return planned(folder, registry=with_method(layouts_of(*layouts), LINEAR))


def test_the_layout_whose_headers_fit_is_taken(tmp_path):
    """Codes as FP8 or as bytes are two layouts; the one with more tensors goes before the one with fewer."""
    layouts = (Layout("fp8", (FP8, SCALE)), Layout("bytes", (BYTES, SCALE)), Layout("bytes-zero", (BYTES, SCALE, ZERO)))
    tensors = {"weight": ("I8", (512, 256)), "weight_scale": ("F32", (512, 1))}
    made = plan_l(tmp_path / "a", tensors, *layouts).check()
    assert segments_of(made, "l")[0].segment.units[0].layout.name == "bytes"
    made = plan_l(tmp_path / "b", tensors | {"weight_zero": ("F32", (512, 1))}, *layouts).check()
    assert segments_of(made, "l")[0].segment.units[0].layout.name == "bytes-zero"


def test_no_layout_that_fits_is_an_error_about_the_nearest(tmp_path):
    """L-28: what differs from the nearest, and the names of the others."""
    layouts = (Layout("fp8", (FP8, SCALE)), Layout("fp8-zero", (FP8, SCALE, ZERO)), Layout("bytes", (BYTES, SCALE)))
    made = plan_l(tmp_path, {"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("F32", (256, 1))}, *layouts)
    assert error_texts(made) == [
        f"l.weight_scale {FILE}: stored shape [256, 1], l expects [512, 1] = [out, 1] with out=512, in=256 {SIZES}; the "
        "nearest layout of scheme fp8.plain is fp8, not fp8-zero, bytes"
    ]


def test_two_layouts_that_fit_are_an_error_and_none_is_taken(tmp_path):
    """L-29: no guessing; the tensors are not named a second time as unexpected."""
    layouts = (Layout("first", (FP8, SCALE)), Layout("second", (FP8, SCALE)))
    made = plan_l(tmp_path, {"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("F32", (512, 1))}, *layouts)
    assert error_texts(made) == ["l: layouts first and second of scheme fp8.plain both fit the headers"]


def test_a_method_without_a_layout_is_an_error(tmp_path):
    made = plan_l(tmp_path, {"weight": ("F8_E4M3", (512, 256))})
    assert error_texts(made)[0] == "l: the method of scheme fp8.plain has no layout for it"


def test_one_tensor_is_not_two_of_a_layout(tmp_path):
    """M-10, L-21: a scale whose spelling another entry has too."""
    twice = StoredTensor((".weight_zero", ".weight_scale"), ("F32",), ((Axis("out"), Fixed(1)),), role="zero")
    tensors = {"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("F32", (512, 1))}
    made = plan_l(tmp_path, tensors, Layout("fp8", (FP8, SCALE, twice)))
    assert error_texts(made) == ["l.weight_scale would fill both l and l"]


def test_a_tensor_that_the_layout_does_not_have_is_unexpected(tmp_path):
    """L-20, L-18: a misspelt name of a leaf."""
    tensors = {"weight": ("F8_E4M3", (512, 256)), "weight_scale": ("F32", (512, 1)), "wieght_zero": ("F32", (512, 1))}
    made = plan_l(tmp_path, tensors, Layout("fp8", (FP8, SCALE)))
    assert error_texts(made) == [f"unexpected tensor l.wieght_zero {FILE}: no rule of the model uses or drops it"]


def test_unit_dims_of_a_scale_do_not_keep_parts_apart(tmp_path):
    """R013: [out, 1] beside [out] in one fused node."""
    tensors = coded(dense_shapes(TOY_D), "FP8-C") | {f"{ATTN}.k_proj.weight_scale": ("BF16", (256,))}
    hollow_d(tmp_path, tensors=tensors, config=CHANNEL)
    made = planned(tmp_path, tp=2).check()
    assert texts(made) == []
    run(made, 1, numbered(made.checkpoint.entries))
    assert shapes_of(made, "layers.0.self_attn.qkv_proj")["weight_scale"] == (512, 1)


# --- experts -----------------------------------------------------------------------------------------------------


def test_the_experts_of_a_layer_must_agree(tmp_path):
    """One expert is left plain."""
    config = {"quantization_config": FP8_BLOCK | {"modules_to_not_convert": ["layers.1.mlp.experts.2.up_proj"]}}
    tensors = made_plain(coded(toy_m_shapes(), "FP8-B"), "layers.1.mlp.experts.2.up_proj")
    hollow_m(tmp_path, tensors=tensors, config=config)
    assert error_texts(planned(tmp_path)) == [
        "layers.1.mlp.experts: 'up' of expert 2 is stored or quantized in another way than expert 0's; the experts of a "
        "layer must agree"
    ]


def test_the_experts_message_names_the_expert_that_was_found_first(tmp_path):
    tensors = coded(toy_m_shapes(TOY_M_CONFIG | {"num_hidden_layers": 1}), "FP8-C")
    del tensors[f"{MLP}.experts.0.up_proj.weight"]
    tensors[f"{MLP}.experts.3.up_proj.weight_scale"] = ("F32", (256, 1))
    hollow_m(tmp_path, tensors=tensors, config=CHANNEL, num_hidden_layers=1)
    found = [finding.text for finding in planned(tmp_path).errors if finding.code == "layout"]
    assert found == [
        "layers.0.mlp.experts: 'up' of expert 3 is stored or quantized in another way than expert 1's; the experts of a "
        "layer must agree"
    ]


@pytest.mark.parametrize("options", [{}, {"strict": False}], ids=["strict", "lax"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_stack_with_scales_one_by_one_is_refused(tmp_path, options, count):
    """E-07: a stack of codes and one scale an expert must not become one expert's scale for all."""
    up = Linear("", 256, (Part("up", 256),), Placement.COLWISE)
    node = Experts("experts", count, up, Linear("", 256, (Part("down", 256),), Placement.ROWWISE))
    tensors = {f"experts.{part}": ("F8_E4M3", (count, 256, 256)) for part in ("up", "down")}
    tensors |= {
        f"experts.{expert}.{part}.weight_scale": ("BF16", (256, 1))
        for expert in range(count)
        for part in ("up", "down")
    }
    made = plan_of(
        tmp_path,
        tensors,
        node,
        names=lambda node, part, expert: (
            Source(f"experts.{part}", {".weight": ""}, stacked=True),
            Source(f"experts.{expert}.{part}"),
        ),
        config=CHANNEL,
        **options,
    )
    assert [finding.text for finding in made.errors if finding.code == "layout"] == [
        f"experts: '{part}' is stored for all experts at once, but its weight_scale for each; all tensors of a part must be "
        "stored alike"
        for part in ("up", "down")
    ]
