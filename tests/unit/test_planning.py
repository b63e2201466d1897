"""The plan as a whole: which family and dialect it finds, what decides its dtypes and its digest, and what it reads."""

import json
import os
import shutil
from pathlib import Path

import pytest

from steelyard.blueprint import Linear, Norm, Part, Placement
from steelyard.discovery import Catalog
from steelyard.errors import BadConfig, BrokenPlugin, CapabilityError, ConfigError, PlanError, UnknownPlugin
from steelyard.layouts import Source
from steelyard.planning import plan
from steelyard.plugin import Verdict
from steelyard.registry import Registry
from steelyard.testing.trees import importable, write_distribution
from support.families import ToyDense, ToyMoe
from support.planned import (
    FP8_BLOCK,
    TOY,
    TOY_D,
    coded,
    core_offers,
    dense_shapes,
    error_texts,
    family_of,
    hollow,
    hollow_d,
    hollow_m,
    plain,
    plan_of,
    planned,
    registry_of,
    texts,
)
from support.quant import backend

LLAMA_70B = TOY_D | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
}


def dtypes(made):
    """Return stem to the dtype of its weight in memory, for every Segment of rank 0."""
    return {
        task.stem: buffer.dtype for task in made.tasks(0) for buffer in task.on_rank.buffers if buffer.name == "weight"
    }


# --- the family --------------------------------------------------------------------------------------------------


def test_architectures_are_asked_in_their_order_and_before_the_model_type(tmp_path):
    first, second, third = (
        family_of(Norm(f"{name}.norm", 256), keys=(name,)) for name in ("LlamaForCausalLM", "LlamaModel", "llama")
    )
    tensors = {"LlamaModel.norm.weight": ("BF16", (256,))}
    hollow(tmp_path, TOY_D | {"architectures": ["Unheard", "LlamaModel", "LlamaForCausalLM"]}, tensors)
    made = planned(tmp_path, registry=registry_of(first, second, third)).check()
    assert (made.family_key, type(made.family)) == ("LlamaModel", second)


def test_the_model_type_is_asked_where_no_architecture_is_known(tmp_path):
    family = family_of(Norm("norm", 256), keys=("llama",))
    hollow(tmp_path, TOY_D | {"architectures": ["LlamaForTokenClassification"]}, {"norm.weight": ("BF16", (256,))})
    assert planned(tmp_path, registry=registry_of(family)).check().family_key == "llama"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {"architectures": ["BertModel"], "model_type": "bert"},
            "no model named 'BertModel'; installed: ToyForCausalLM. Install it with: pip install steelyard-model-bert",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"], "model_type": "llama"},
            "no model named 'LlamaForTokenClassification'; installed: ToyForCausalLM. "
            "Install it with: pip install steelyard-model-llama",
        ),
        (
            {"architectures": ["NobodysModel"], "model_type": "nobody"},
            "no model named 'NobodysModel'; installed: ToyForCausalLM. No known package offers it.",
        ),
    ],
    ids=["by-architecture", "by-model-type", "nobody"],
)
def test_an_unknown_architecture_says_what_is_installed_and_what_to_install(tmp_path, config, text):
    hollow(tmp_path, config, {"norm.weight": ("BF16", (256,))})
    with pytest.raises(UnknownPlugin) as caught:
        planned(tmp_path, registry=registry_of(family_of(Norm("norm", 256))))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "names no architecture: it has neither 'architectures' nor 'model_type'"),
        (
            {"architectures": [], "model_type": ""},
            "names no architecture: it has neither 'architectures' nor 'model_type'",
        ),
        (
            {"architectures": [7], "model_type": 7},
            "names no architecture: it has neither 'architectures' nor 'model_type'",
        ),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' is not a list of names"),
        ({"architectures": 5}, "architectures=5 is not a list of names"),
    ],
    ids=["absent", "empty", "numbers", "text", "number"],
)
def test_a_config_without_a_usable_architecture_is_refused(tmp_path, config, why):
    hollow(tmp_path, config, {"norm.weight": ("BF16", (256,))})
    with pytest.raises(BadConfig) as caught:
        planned(tmp_path)
    assert str(caught.value) == f"config.json: {why}"


def with_tree(root, version="1.0", *, body="", noun="models", key="LlamaForCausalLM"):
    """Return a registry with core and one distribution in a folder on the path."""
    group, hook = f"steelyard.{noun}", f"steelyard_{noun}"
    source = body or (
        "from steelyard.plugin import hookimpl\nfrom support.families import ToyDense\n\n\n"
        f"@hookimpl\ndef {hook}():\n    return [ToyDense]\n"
    )
    write_distribution(
        root, "steelyard-tree", version, entry_points={group: {key: "tree_llama"}}, modules={"tree_llama.py": source}
    )
    return Registry(Catalog((*core_offers(), *Catalog.from_environment(path=[str(root)], block=()).offers)))


def test_a_family_that_is_blocked_is_named_and_not_advised_to_be_installed(tmp_path):
    """R177: by the model type too, where no architecture is known."""
    hollow(
        tmp_path / "model",
        TOY_D | {"architectures": ["LlamaForTokenClassification"]},
        {"norm.weight": ("BF16", (256,))},
    )
    with importable(tmp_path / "site") as root:
        with_tree(root, key="llama")
        registry = Registry(Catalog.from_environment(path=[str(root)], block=["steelyard-tree"]))
        with pytest.raises(UnknownPlugin) as caught:
            planned(tmp_path / "model", registry=registry)
    assert str(caught.value) == (
        "no model named 'LlamaForTokenClassification'; installed: none. steelyard-tree 1.0 would offer it, but is blocked "
        "by STEELYARD_BLOCK; unblock it."
    )


def test_a_family_that_cannot_be_imported_is_named_with_its_cause(tmp_path):
    """R177: a failed import does not look like an unknown architecture."""
    hollow_d(tmp_path / "model")
    with importable(tmp_path / "site") as root:
        registry = with_tree(root, body="import a_library_that_is_absent\n")
        with pytest.raises(BrokenPlugin) as caught:
            planned(tmp_path / "model", registry=registry)
    assert str(caught.value) == (
        "plugin steelyard-tree 1.0 is installed, but tree_llama failed: "
        "ModuleNotFoundError: No module named 'a_library_that_is_absent'"
    )


def test_a_backend_that_cannot_be_imported_is_a_note_unless_the_user_names_it(tmp_path):
    """R172: a failure is told, and nothing is used silently in its place."""
    hollow_d(tmp_path / "model")
    with importable(tmp_path / "site") as root:
        registry = with_tree(root, body="import absent_kernels\n", noun="kernel_backends", key="fast")
        registry.add("model", ToyDense)
        made = planned(tmp_path / "model", registry=registry).check()
        assert texts(made, "plugin") == [
            "kernel backend fast is installed but could not be used: plugin steelyard-tree 1.0 is installed, but "
            "tree_llama failed: ModuleNotFoundError: No module named 'absent_kernels'"
        ]
        with pytest.raises(BrokenPlugin):
            planned(tmp_path / "model", registry=registry, kernels=("fast", "torch"))


def test_an_unknown_quantization_lists_the_known_ones_before_anything_is_read(tmp_path):
    """M-18, R059: a method without a plugin is never taken for unquantized."""
    hollow_d(tmp_path, config={"quantization_config": {"quant_method": "torchao"}})
    with pytest.raises(UnknownPlugin) as caught:
        planned(tmp_path)
    assert str(caught.value) == (
        "no quant dialect named 'torchao'; installed: awq, compressed-tensors, fp8. No known package offers it."
    )


def test_a_quantization_config_without_a_method_is_refused(tmp_path):
    hollow_d(tmp_path, config={"quantization_config": {"bits": 4, "group_size": 128}})
    with pytest.raises(BadConfig) as caught:
        planned(tmp_path)
    assert str(caught.value) == (
        "config.json: quantization_config: its quantization config names no quant_method; keys: bits, group_size"
    )


def test_files_that_no_load_format_claims_are_refused(tmp_path):
    hollow_d(tmp_path)

    class Never:
        keys = ("safetensors",)

        def claims(self, files):
            return Verdict(False, f"reads tapes, not {', '.join(files)}")

    registry = Registry(Catalog())
    registry.add("model", ToyDense)
    registry.add("load format", Never)
    for offer in registry_of().catalog.of("quant method"):
        registry.add("quant method", registry_of().resolve("quant method", offer.key))
    registry.add("kernel backend", backend("toy", weights=("float",)))
    with pytest.raises(CapabilityError) as caught:
        planned(tmp_path, registry=registry)
    assert str(caught.value) == f"read {tmp_path}: safetensors: reads tapes, not model.safetensors"


# --- options -----------------------------------------------------------------------------------------------------


def test_a_familys_defaults_reach_the_plan_unless_the_user_says_otherwise(tmp_path):
    """D-13: a default acts, and its origin is on record."""

    class Careful(ToyDense):
        set_defaults = {"scale_grid": "strict", "keep_float32": ["norm"]}

    hollow_d(tmp_path, quant="FP8-B", intermediate_size=640)
    made = planned(tmp_path, registry=registry_of(Careful), tp=2)
    assert {finding.code for finding in made.errors} == {"cut"}
    assert made.options["scale_grid"] == {"value": "strict", "origin": "family"}
    asked = planned(tmp_path, registry=registry_of(Careful), tp=2, scale_grid="refine").check()
    assert asked.options["scale_grid"] == {"value": "refine", "origin": "explicit"}
    assert dtypes(asked)["norm"] == "F32"


def outcome(made):
    """Return everything of a plan that an option may change."""
    if made.errors:
        return error_texts(made)
    return [
        [
            (task.stem, task.segment.parts, task.segment.scheme, task.segment.choice, task.on_rank.buffers)
            for rank in range(made.job.world)
            for task in made.tasks(rank)
        ],
        texts(made),
    ]


@pytest.mark.parametrize(
    ("option", "checkpoint"),
    [
        ({"tp": 2}, {}),
        ({"ep": 2}, {}),
        ({"moe_tp": 2, "tp": 2, "ep": 2, "world": 4}, {}),
        ({"target": "gfx942"}, {}),
        ({"dtype": "float32"}, {}),
        ({"kernels": ("second", "torch")}, {}),
        ({"scale_grid": "strict", "tp": 2}, {"intermediate_size": 640}),
        ({"experts": "even", "ep": 3, "world": 3}, {}),
        ({"vocab_padding": "off", "tp": 2}, {"vocab_size": 97}),
        ({"keep_float32": ("norm",)}, {}),
        ({"strict": False}, {"num_hidden_layers": 1}),
        ({"allow_missing": ("*.layers.2.*", "layers.2.*")}, {"num_hidden_layers": 3}),
        ({"trust_files": True}, {"bf16_layer": 1}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_every_option_of_a_plan_has_an_effect(tmp_path, option, checkpoint):
    """D-13: from the public surface to what is planned."""
    shapes = dense_shapes(
        TOY_D | {name: checkpoint[name] for name in ("intermediate_size", "vocab_size") if name in checkpoint}
    )
    tensors = coded(shapes, "FP8-B")
    for name in list(tensors) if "bf16_layer" in checkpoint else ():
        if ".layers.1.mlp." in name:
            tensors |= {name: ("BF16", tensors[name][1])}
            if name.endswith("_inv"):
                del tensors[name]
    stored = {name: value for name, value in checkpoint.items() if name != "bf16_layer"}
    folder = tmp_path / "dense"
    hollow_d(folder, tensors=tensors, quant="FP8-B", **stored)
    if {"ep", "experts"} & option.keys():
        folder = tmp_path / "experts"
        hollow_m(folder)
    registry = registry_of(
        backends=(backend("first", smallest_grid=16, targets=("sm_90",)), backend("second", smallest_grid=16))
    )
    neutral = {name: option[name] for name in ("tp", "world", "ep") if name in option and len(option) > 1}
    if "moe_tp" in option:
        neutral = {"tp": 4}
    assert outcome(planned(folder, registry=registry, **option)) != outcome(
        planned(folder, registry=registry, **neutral)
    )


def test_an_impossible_job_is_refused_before_the_plan(tmp_path):
    """P-23: sizes and ranks that cannot be."""
    hollow_d(tmp_path)
    for job, text in (
        ({"tp": 2, "world": 3}, "world=3 is not a multiple of tp=2"),
        ({"ep": 4, "world": 8}, "ep=4 x moe_tp=1 must be world=8, or ep=1 with moe_tp=tp=1"),
    ):
        with pytest.raises(ConfigError) as caught:
            planned(tmp_path, **job)
        assert str(caught.value) == text
    for size in ("tp", "ep", "moe_tp"):
        with pytest.raises(ConfigError, match=f"LoadConfig: {size}=0 must be at least 1$"):
            planned(tmp_path, **{size: 0})
    made = planned(tmp_path, tp=2)
    for rank in (-1, 2):
        with pytest.raises(ConfigError) as caught:
            made.rank(rank)
        assert str(caught.value) == f"rank={rank} is outside 0..1 (world=2)"


def test_a_plan_with_errors_has_no_figures_and_raises_once_with_all(tmp_path):
    hollow_d(tmp_path, num_hidden_layers=3, tensors=plain(dense_shapes(TOY_D)))
    made = planned(tmp_path)
    assert made.ranks == ()
    for use in (made.check, lambda: made.rank(0), lambda: made.fits(1 << 40), lambda: list(made.tasks(0))):
        with pytest.raises(PlanError) as caught:
            use()
        assert caught.value.findings == made.errors


def test_it_fits_exactly_where_the_largest_peak_does(tmp_path):
    hollow_d(tmp_path, vocab_size=97)
    made = planned(tmp_path, tp=2).check()
    largest = max(rank.peak for rank in made.ranks)
    assert made.fits(largest)
    assert not made.fits(largest - 1)


# --- dtypes ------------------------------------------------------------------------------------------------------


def test_norms_that_shall_stay_wide_do_and_the_rest_is_cast(tmp_path):
    """R155: a dtype rule for some parameters holds."""
    hollow_d(tmp_path, tensors=plain(dense_shapes(TOY_D), "F32"))
    made = planned(tmp_path, dtype="bfloat16", keep_float32=("NORM",)).check()
    found = dtypes(made)
    assert {stem for stem, dtype in found.items() if dtype == "F32"} == {stem for stem in found if "norm" in stem}
    assert {dtype for stem, dtype in found.items() if "norm" not in stem} == {"BF16"}
    assert {read.dtype for read in made.reads(0)} == {"F32"}


def test_the_models_dtype_is_never_that_of_packed_words(tmp_path):
    """R157: the first float tensor that is no scale decides, where the config is silent."""
    groups = {
        "quant_method": "compressed-tensors",
        "config_groups": {"W4": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "group_size": 128}}},
    }
    tensors = dict(sorted(coded(dense_shapes(TOY_D), "CT-W4").items(), key=lambda item: "weight_packed" not in item[0]))
    assert next(iter(tensors)).endswith("weight_packed")
    config = {name: value for name, value in TOY_D.items() if name != "torch_dtype"}
    hollow(tmp_path, config | {"quantization_config": groups}, tensors)
    made = planned(tmp_path).check()
    assert made.dtype == "BF16"
    packed = [buffer for task in made.tasks(0) for buffer in task.on_rank.buffers if buffer.name == "weight_packed"]
    assert {buffer.dtype for buffer in packed} == {"I32"}


def test_a_nodes_own_dtype_goes_before_the_models_and_before_the_list(tmp_path):
    norms = (Norm("a.norm", 256, dtype="F16"), Norm("b.norm", 256), Norm("c", 256))
    tensors = {f"{node.stem}.weight": ("BF16", (256,)) for node in norms}
    made = plan_of(tmp_path, tensors, *norms, keep_float32=("norm",)).check()
    assert dtypes(made) == {"a.norm": "F16", "b.norm": "F32", "c": "BF16"}


def test_scales_beside_a_plain_node_keep_the_dtype_that_they_are_stored_in(tmp_path):
    """A KV-cache scale in float32 must not be rounded to the model's dtype."""
    scales = {
        "model.layers.0.self_attn.k_proj.k_scale": ("F32", ()),
        "model.layers.0.self_attn.v_proj.v_scale": ("F32", (1,)),
    }
    hollow_d(tmp_path, tensors=coded(dense_shapes(TOY_D), "FP8-C") | scales, quant="FP8-C")
    made = planned(tmp_path).check()
    (state,) = (task for task in made.tasks(0) if task.stem == "layers.0.self_attn.attn")
    assert {buffer.name: buffer.dtype for buffer in state.on_rank.buffers} == {"k_scale": "F32", "v_scale": "F32"}


# --- the digest --------------------------------------------------------------------------------------------------


def test_the_digest_is_equal_for_a_copy_elsewhere_at_another_time_on_another_device(tmp_path):
    hollow_m(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    os.utime(tmp_path / "there" / "model.safetensors", (1, 1))
    here = planned(tmp_path / "here", tp=2, ep=2)
    same = [
        planned(tmp_path / "here", tp=2, ep=2),
        planned(tmp_path / "there", tp=2, ep=2),
        planned(tmp_path / "here", tp=2, ep=2, device="cuda:3"),
        planned(tmp_path / "here", tp=2, ep=2, reader="mmap"),
        planned(tmp_path / "here", tp=2, ep=2, agreement={"timeout": 5}),
    ]
    assert [one.digest for one in same] == [here.digest] * len(same)
    assert len(here.digest) == 64


def test_the_digest_changes_with_everything_that_decides_what_is_loaded(tmp_path):
    tensors = plain(dense_shapes(TOY_D))
    hollow_d(tmp_path / "model")
    hollow_d(tmp_path / "config", rms_norm_eps=1e-5)
    hollow_d(tmp_path / "header", tensors=tensors | {"norm.unused": ("BF16", (8,))})
    moved = dict(reversed(tensors.items()))
    hollow_d(tmp_path / "offsets", tensors=moved)
    made = {
        "model": planned(tmp_path / "model"),
        "config": planned(tmp_path / "config"),
        "header": planned(tmp_path / "header"),
        "offsets": planned(tmp_path / "offsets"),
        "tp": planned(tmp_path / "model", tp=2),
        "world": planned(tmp_path / "model", world=2, moe_tp=2),
        "target": planned(tmp_path / "model", target="gfx942"),
        "option": planned(tmp_path / "model", keep_float32=("norm",)),
        "dtype": planned(tmp_path / "model", dtype="float16"),
        "choice": planned(tmp_path / "model", registry=registry_of(backends=(backend("a", weights=("float",)),))),
        "other choice": planned(tmp_path / "model", registry=registry_of(backends=(backend("b", weights=("float",)),))),
    }
    digests = {name: one.digest for name, one in made.items()}
    assert len(set(digests.values())) == len(digests), digests


def test_the_digest_changes_with_a_plugins_version(tmp_path):
    hollow_d(tmp_path / "model")
    digests = set()
    for version in ("1.0", "1.1"):
        with importable(tmp_path / version) as root:
            made = planned(tmp_path / "model", registry=with_tree(root, version)).check()
            assert made.plugins["steelyard-tree"] == version
            digests.add(made.digest)
    assert len(digests) == 2


def test_the_digest_covers_a_quantization_that_stands_in_a_file_of_its_own(tmp_path):
    """Ranks that see different side files must not agree: an ignore list is not in the choices."""
    digests = set()
    for ignore in (["lm_head"], ["lm_head", "model.norm"]):
        folder = hollow_d(tmp_path / str(len(ignore)), tensors=coded(dense_shapes(TOY_D), "FP8-B"))
        (folder / "hf_quant_config.json").write_text(json.dumps(FP8_BLOCK | {"ignored_layers": ignore}))
        digests.add(planned(folder).check().digest)
    assert len(digests) == 2


# --- what is read ------------------------------------------------------------------------------------------------


def bytes_read_by_this_process():
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
    return int(line.partition(":")[2])


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="counts the bytes of the process, which only Linux tells"
)
def test_a_plan_of_140_gigabytes_reads_headers_and_nothing_else(tmp_path):
    """R043: a plan needs no byte of data. The files are holes, so reading one would not fail; it is counted."""
    hollow(tmp_path, LLAMA_70B, plain(dense_shapes(LLAMA_70B)), shards=30)
    headers = 0
    for file in tmp_path.glob("*.safetensors"):
        with file.open("rb") as opened:
            headers += 8 + int.from_bytes(opened.read(8), "little")
    registry = registry_of(ToyDense)
    planned(tmp_path, tp=8, registry=registry).check()
    before = bytes_read_by_this_process()
    made = planned(tmp_path, tp=8, registry=registry).check()
    figures = made.ranks
    read = bytes_read_by_this_process() - before
    assert sum(file.header.file_size for file in made.checkpoint.files) > 140e9
    assert headers <= read <= headers + (tmp_path / "config.json").stat().st_size + 200_000
    assert len(figures) == 8


def test_a_further_rank_costs_no_look_at_a_tensor(tmp_path, monkeypatch):
    """Figures come from classes: the names of a further rank are not touched."""
    import steelyard.loadplan

    hollow_m(tmp_path, num_hidden_layers=8)
    made = planned(tmp_path, tp=2, ep=4).check()
    made.rank(0)
    looked = []

    def counted(planned_node, index, on_rank):
        looked.append(planned_node.node.stem)
        raise AssertionError("a figure made the steps of a node")

    monkeypatch.setattr(steelyard.loadplan, "task_of", counted)
    classes = {one.cls for one in made.nodes}
    assert len(classes) < len(made.nodes) / 3
    assert [made.rank(rank).rank for rank in range(1, 4)] == [1, 2, 3]
    assert looked == []


def test_further_publishers_names_are_looked_for_behind_the_familys(tmp_path):
    """R006: a rule that moves names carries the scales along; without it weights and scales are both named."""

    class Mtp:
        keys = ("llama.mtp",)

        def names(self, node, part, expert):
            if not node.stem.startswith("layers.1."):
                return ()
            own = ToyDense().mapping({}).names(node, part, expert)
            return tuple(
                Source(source.path.replace("model.layers.1.", "mtp.layers.0."), source.respell, source.order)
                for source in own
            )

        def drops(self, config):
            return ()

    stored = coded(dense_shapes(TOY_D), "FP8-T")
    moved = {name.replace("model.layers.1.", "mtp.layers.0."): value for name, value in stored.items()}
    hollow_d(tmp_path, tensors=moved, quant="FP8-T")
    made = planned(tmp_path, registry=registry_of(others=[("weight mapping", Mtp)])).check()
    assert {read.name for read in made.reads(0)} == set(moved)
    alone = planned(tmp_path)
    missing = {finding.subject for finding in alone.findings if finding.code == "missing"}
    wanted = {name for name in stored if ".layers.1." in name}
    assert missing == wanted
    assert len([name for name in wanted if name.endswith("_proj.weight")]) == 7
    assert len([name for name in wanted if name.endswith("weight_scale")]) == 7
    assert {one.subject for one in alone.findings if one.code == "unexpected"} == {
        n for n in moved if n.startswith("mtp.")
    }


def test_the_side_files_and_every_dialect_key_are_asked_without_regard_to_case(tmp_path):
    hollow_d(tmp_path, quant="FP8-B", tensors=coded(dense_shapes(TOY_D), "FP8-B"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = " FP8 "
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = planned(tmp_path).check()
    assert ("quant dialect", "fp8") in made.offers


def test_the_default_registry_is_used_where_none_is_given(tmp_path, monkeypatch):
    import steelyard.planning

    hollow_d(tmp_path)
    monkeypatch.setattr(steelyard.planning, "default_registry", registry_of)
    assert plan(tmp_path, target="sm_90").check().family_key == "LlamaForCausalLM"


def test_a_value_of_the_config_that_cannot_be_met_is_the_familys_error(tmp_path):
    hollow_d(tmp_path, hidden_act="gelu")
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path)
    assert str(caught.value) == "hidden_act='gelu': this toy has silu only"


def test_plans_hold_their_plugins_and_say_what_took_part(tmp_path):
    hollow_d(tmp_path, quant="AWQ")
    made = planned(tmp_path, registry=registry_of(ToyDense, ToyMoe)).check()
    assert sorted(made.offers) == [
        ("kernel backend", "torch"),
        ("kernel backend", "toy"),
        ("load format", "safetensors"),
        ("model", "LlamaForCausalLM"),
        ("quant dialect", "awq"),
        ("quant method", "float.plain"),
        ("quant method", "int4.awq"),
    ]


def test_an_optional_node_that_is_not_stored_is_left_out_and_named(tmp_path):
    head = Linear("score", 256, (Part("", 2),), Placement.REPLICATED, absent="skip")
    made = plan_of(tmp_path, {"norm.weight": ("BF16", (256,))}, Norm("norm", 256), head, config=TOY).check()
    assert made.skipped == ("score",)


def test_a_dtype_that_models_are_not_loaded_in_is_a_note(tmp_path):
    """R157: what the config states and what was taken."""
    hollow_d(tmp_path, torch_dtype="float64")
    made = planned(tmp_path).check()
    assert [finding.text for finding in made.findings] == [
        f"config.json states dtype float64, which models are not loaded in; {made.dtype}, as stored, is taken"
    ]
