"""Users' faults with names, as loads of real values: tensors that are missing, too many, or fused on disk."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from steelyard.errors import PlanError
from steelyard.plugin import Axis, Param, Source
from steelyard.reader import WAYS
from steelyard.torch import Weight
from support import cases
from support.checkpoints import dense_shapes
from support.planned import TOY_D

FOUND = "(model.safetensors): no rule of the model uses or drops it"
PATCH, QKV = "visual.patch_embed.weight", "visual.blocks.0.attn.qkv.weight"


@pytest.fixture(autouse=True, params=cases.PATTERNS.values(), ids=cases.PATTERNS)
def fresh_memory(request):
    with cases.poisoned(request.param):
        yield


# --- A: missing and unexpected -----------------------------------------------------------------------------------


class VisionMapping:
    """Names of the text model, and of parameters that stand in the file under their own names."""

    def __init__(self, text):
        self.text = text

    def names(self, node, part, expert):
        return (Source(node.stem),) if isinstance(node, Param) else self.text.names(node, part, expert)

    def drops(self, config):
        return self.text.drops(config)


class LlamaWithVision:
    """The installed Llama, and two parameters of a vision encoder beside it."""

    keys = ("LlamaWithVisionForConditionalGeneration",)

    def __init__(self):
        self.text = cases.installed()["model"]["LlamaForCausalLM"]()

    def blueprint(self, config):
        made, weight = self.text.blueprint(config), (Axis("out"), Axis("in"))
        return replace(made, nodes=(*made.nodes, Param(PATCH, weight, 64, 48), Param(QKV, weight, 192, 64)))

    def mapping(self, config):
        return VisionMapping(self.text.mapping(config))

    def defaults(self, config):
        return self.text.defaults(config)

    def lora_targets(self):
        return {}

    def module(self, config, built):
        made = nn.Module()
        made.text = self.text.module(config, built)
        made.patch, made.qkv = built[PATCH], built[QKV]
        return made


@pytest.fixture(scope="module")
def with_vision():
    return cases.installed_and(LlamaWithVision)


def test_R001_an_encoder_that_is_not_stored_is_an_error(tmp_path, with_vision):
    """R001: both parameters are named, before anything is read; no other placement than poisoned memory exists."""
    config = {"architectures": list(LlamaWithVision.keys)}
    folder = cases.folder_of(tmp_path, cases.toy_d(), config)
    expected = [f"missing tensor {name}, needed for {name}" for name in (PATCH, QKV)]
    assert cases.errors(lambda: cases.load(folder, registry=with_vision)) == expected
    assert cases.errors(lambda: cases.ranks(folder, tp=2, registry=with_vision)) == expected


def test_R001_an_encoder_that_may_be_absent_is_reported_as_not_filled(tmp_path, with_vision):
    """R001: what the allow list names is zeros and not memory's remains, and stands in the report; the rest is loaded."""
    whole = cases.toy_d()
    folder = cases.folder_of(tmp_path, whole, {"architectures": list(LlamaWithVision.keys)})
    model = cases.load(folder, registry=with_vision, allow_missing=("visual.*",))
    cases.assert_holds(model.module.text, cases.share(whole, 1, 0))
    for weight, shape in ((model.module.patch, (64, 48)), (model.module.qkv, (192, 64))):
        assert isinstance(weight, Weight)
        assert torch.equal(weight.value, torch.zeros(shape, dtype=torch.bfloat16))
    assert [finding.text for finding in model.report.findings] == [
        f"{name} is not stored and allow_missing names it: it is filled with zeros" for name in (PATCH, QKV)
    ]
    filled = [(one.stem, one.detail) for one in model.report.parameters if one.rule == "fill"]
    assert filled == [(PATCH, "value = 0"), (QKV, "value = 0")]


def test_R005_an_unexpected_tensor_is_told_alike_by_every_reader(tmp_path):
    """R005, L-18: one text and one list whatever reads and however many ranks; with strict off, the same note once."""
    whole = cases.toy_d()
    extra = "model.layers.0.self_attn.rel_bias"
    folder = cases.folder_of(tmp_path, whole | {extra: np.ones(4, np.float32)}, shards=3)
    said = [f"unexpected tensor {extra} (model-00002-of-00003.safetensors): no rule of the model uses or drops it"]
    texts = set()
    for way in WAYS:
        assert cases.errors(lambda way=way: cases.load(folder, reader=way)) == said
        assert cases.errors(lambda way=way: cases.ranks(folder, tp=2, reader=way)) == said
        with pytest.raises(PlanError, match="1 problem") as caught:
            cases.load(folder, reader=way)
        texts.add(str(caught.value))
        model = cases.load(folder, reader=way, strict=False)
        assert [(one.severity, one.text) for one in model.report.findings] == [("note", said[0])]
        cases.assert_holds(model.module, cases.share(whole, 1, 0))
    assert len(texts) == 1


def test_R007_a_config_with_more_layers_than_the_files_is_an_error(tmp_path):
    """R007: case (a); the 9 parameters of the third layer and nothing else."""
    folder = cases.folder_of(tmp_path, cases.toy_d(), {"num_hidden_layers": 3})
    with pytest.raises(PlanError, match="9 problems") as caught:
        cases.load(folder)
    absent = sorted(name for name in dense_shapes(TOY_D | {"num_hidden_layers": 3}) if ".layers.2." in name)
    assert sorted(finding.subject for finding in caught.value.findings) == absent
    assert all(f"missing tensor {name} " in str(caught.value) for name in absent)


def test_R007_files_with_more_layers_than_the_config_are_an_error_unless_declared(tmp_path):
    """R007: case (b); 9 unexpected tensors, or one more layer that only drafts and is left out with its reason."""
    whole = cases.toy_d()
    more = sorted(name for name in whole if ".layers.1." in name)
    folder = cases.folder_of(tmp_path / "more", whole, {"num_hidden_layers": 1})
    assert cases.errors(lambda: cases.load(folder)) == [f"unexpected tensor {name} {FOUND}" for name in more]
    declared = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    model = cases.load(cases.folder_of(tmp_path / "draft", whole, declared))
    first = {name: array for name, array in whole.items() if name not in more}
    cases.assert_holds(model.module, cases.share(first, 1, 0))
    assert sorted(model.report.dropped) == more
    assert all("num_nextn_predict_layers" in reason for reason in model.report.dropped.values())


# --- C: merged on disk, as far as plain floats go ----------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_R019_a_file_that_is_merged_already_gives_every_part_its_rows(tmp_path, tp):
    """R019: qkv_proj and gate_up_proj are the only names; what one scalar belongs to is every part. Plain floats."""
    merged = cases.numbers({name: array.shape for name, array in cases.fused(cases.toy_d()).items()})
    assert {array.shape for name, array in merged.items() if "qkv" in name or "gate_up" in name} == {(1024, 256)}
    folder = cases.folder_of(tmp_path, merged)
    whole = {}
    for name, array in merged.items():
        if ".qkv_proj." in name:
            parts = zip("qkv", (array[:512], array[512:768], array[768:]), strict=True)
            whole |= {name.replace("qkv", part): rows for part, rows in parts}
        elif ".gate_up_proj." in name:
            whole |= {name.replace("gate_up", "gate"): array[:512], name.replace("gate_up", "up"): array[512:]}
        else:
            whole[name] = array
    for rank, module in enumerate(cases.modules(folder, tp)):
        cases.assert_holds(module, cases.share(whole, tp, rank))


def test_R024_a_value_projection_that_is_not_stored_is_an_error(tmp_path):
    """R024: no family here lets v borrow k; with the flag or without it, ``v_proj.weight`` of every layer is named."""
    without = {name: array for name, array in cases.toy_d().items() if ".v_proj." not in name}
    for place, config in enumerate(({}, {"attention_k_eq_v": True})):
        said = cases.errors(
            lambda at=str(place), config=config: cases.load(cases.folder_of(tmp_path / at, without, config))
        )
        assert [text.split()[2] for text in said] == [
            f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)
        ]
        assert all(text.startswith("missing tensor ") for text in said)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_R025_what_stands_beside_a_merged_weight_is_cut_with_the_same_borders(tmp_path, tp):
    """R025, P-12: the biases of a merged qkv and gate_up; those of the row-parallel o and down are whole on every rank."""
    config = {"attention_bias": True, "mlp_bias": True}
    whole = cases.toy_d(**config)
    merged = cases.fused(whole)
    assert merged["model.layers.1.self_attn.qkv_proj.bias"].shape == (1024,)
    folder = cases.folder_of(tmp_path, merged, config)
    for rank, module in enumerate(cases.modules(folder, tp)):
        cases.assert_holds(module, cases.share(whole, tp, rank))
    if tp == 2:
        held = cases.held(module)
        bias = merged["model.layers.1.self_attn.qkv_proj.bias"]
        for part, (start, stop) in {"q": (256, 512), "k": (640, 768), "v": (896, 1024)}.items():
            assert held[f"layers.1.self_attn.{part}_proj.bias"].tolist() == bias[start:stop].tolist()
