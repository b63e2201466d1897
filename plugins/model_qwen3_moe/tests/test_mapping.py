"""The mapping on plans: which stored name fills which node, what is left out and why, and what is an error."""

import numpy as np
import pytest

from support.loading import plan
from support.planned import error_texts, hollow, plain

FILE = "(model.safetensors)"
FORMS = ["split", "named", "fused", "stacked", "stacked.weight"]


@pytest.fixture
def planned(tmp_path, registry):
    """Return a function that plans a config and names with their shapes; no tensor has data."""

    def planned(config, shapes, **sizes):
        return plan(hollow(tmp_path, config, plain(shapes)), target="cpu", registry=registry, **sizes)

    return planned


@pytest.fixture
def shapes_in(mixture):
    """Return a function from a config and a form to names and shapes; the numbers are never looked at."""

    def shapes_in(config, form="split"):
        empty = {name: np.broadcast_to(np.float32(0), shape) for name, shape in mixture.shapes(config).items()}
        return {name: array.shape for name, array in mixture.stored(config, empty, form).items()}

    return shapes_in


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("job", [{}, {"tp": 2}, {"ep": 2}], ids=["1", "tp2", "ep2"])
def test_every_published_form_is_planned_without_a_word(mixture, planned, shapes_in, model_type, form, job):
    """E-08: nothing missing, nothing left over, nothing to say."""
    config = mixture.configs[model_type]
    assert planned(config, shapes_in(config, form), **job).check().findings == ()


MISNAMED = {
    "qwen3_moe": [
        "mlp.experts.x.gate_proj.weight", "mlp.experts.3.gate.weight", "mlp.experts.4.gate_proj.weight",
        "mlp.experts.00.up_proj.weight", "mlp.experts.-1.up_proj.weight", "mlp.experts.0.w1.weight",
        "mlp.experts.0.gate_proj", "mlp.experts.gate_proj", "block_sparse_moe.experts.0.w1.weight",
        "mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight", "mlp.gate.bias",
        "mlp.gate.e_score_correction_bias", "mlp.up_proj.weight",
    ],
    "mixtral": [
        "block_sparse_moe.experts.4.w1.weight", "block_sparse_moe.experts.0.w4.weight",
        "block_sparse_moe.experts.0.gate_proj.weight", "mlp.experts.0.w1.weight", "block_sparse_moe.gate.bias",
    ],
    "qwen2_moe": ["mlp.shared_experts.up_proj.weight", "block_sparse_moe.gate.weight"],
}  # fmt: skip


@pytest.mark.parametrize("model_type", MISNAMED)
def test_a_name_that_is_nearly_right_is_unexpected(mixture, planned, shapes_in, model_type):
    """E-05: no expert, projection or number is guessed; a router has no bias here."""
    config = mixture.configs[model_type]
    names = [f"model.layers.1.{name}" for name in MISNAMED[model_type]]
    found = error_texts(planned(config, shapes_in(config) | dict.fromkeys(names, (256, 256))))
    assert sorted(found) == sorted(
        f"unexpected tensor {name} {FILE}: no rule of the model uses or drops it" for name in names
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_a_missing_matrix_of_an_expert_is_named_with_every_place_looked_at(mixture, planned, shapes_in, ep):
    """E-06: by expert and projection, whichever rank holds it, and though another expert is complete."""
    config = mixture.configs["mixtral"] | {"num_local_experts": 6}
    shapes = shapes_in(config)
    del shapes["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    del shapes["model.layers.0.block_sparse_moe.experts.0.w2.weight"]
    stems = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert error_texts(planned(config, shapes, ep=ep)) == [
        f"missing tensor {stems[0]}.0.down_proj.weight (also looked for {stems[0]}.down_proj, {stems[0]}.down_proj.weight, "
        "model.layers.0.block_sparse_moe.experts.0.w2.weight), needed for layers.0.mlp.experts.0",
        f"missing tensor {stems[1]}.5.up_proj.weight (also looked for {stems[1]}.5.gate_up_proj.weight, "
        f"{stems[1]}.gate_up_proj, {stems[1]}.gate_up_proj.weight, model.layers.1.block_sparse_moe.experts.5.w3.weight), "
        "needed for layers.1.mlp.experts.5",
    ]


@pytest.mark.parametrize("form", ["stacked", "stacked.weight", "fused", "named"])
def test_two_forms_of_an_expert_are_an_error(mixture, planned, shapes_in, form):
    """R068: experts 0 to 2 one by one as Mixtral's release names them, and layer 0 in another form too.

    Each of the nine is named: as a duplicate, or, beside a stack that stands for all experts, as left over.
    """
    config = mixture.configs["mixtral"]
    split, other = shapes_in(config), shapes_in(config, form)
    kept = {name: shape for name, shape in split.items() if ".0.block_sparse_moe.experts.3." not in name}
    more = {name: shape for name, shape in other.items() if ".layers.0.mlp.experts." in name}
    found = error_texts(planned(config, kept | more))
    assert len(found) == 9
    for name in (name for name in kept if ".0.block_sparse_moe.experts." in name):
        (text,) = (text for text in found if name in text)
        is_left_over = form.startswith("stacked") and ".experts.0." not in name
        assert text.startswith(
            "unexpected tensor " if is_left_over else "duplicate tensors model.layers.0.mlp.experts."
        )


def test_a_stack_of_another_shape_is_refused_by_name_and_shape(mixture, planned, shapes_in):
    """E-09, E-10: 7 experts for 4, a flat stack, and one that is stored (expert, in, out)."""
    config = mixture.configs["qwen3_moe"] | {"moe_intermediate_size": 64}
    shapes, stem = shapes_in(config, "stacked"), "model.layers.0.mlp.experts"
    for name, shape, wanted in (
        ("gate_up_proj", (7, 128, 256), "[4, 128, 256] = [expert, out, in] with out=128, in=256"),
        ("gate_up_proj", (512, 256), "[4, 128, 256] = [expert, out, in] with out=128, in=256"),
        ("gate_up_proj", (4, 256, 128), "[4, 128, 256] = [expert, out, in] with out=128, in=256"),
        ("down_proj", (4, 64, 256), "[4, 256, 64] = [expert, out, in] with out=256, in=64"),
    ):
        assert error_texts(planned(config, shapes | {f"{stem}.{name}": shape})) == [
            f"{stem}.{name} {FILE}: stored shape {list(shape)}, layers.0.mlp.experts expects {wanted} "
            "(tp_size=1, ep_size=1, moe_tp=1)"
        ]


@pytest.mark.parametrize("name", ["shared_expert_gate.weight", "shared_expert.up_proj.weight", "gate.weight"])
def test_a_shared_expert_and_the_router_are_needed(mixture, planned, shapes_in, name):
    """L-19: a mixture that computes without them gives other numbers without a word."""
    config = mixture.configs["qwen2_moe"]
    shapes = shapes_in(config)
    del shapes[f"model.layers.0.mlp.{name}"]
    (text,) = error_texts(planned(config, shapes))
    assert text.startswith(f"missing tensor model.layers.0.mlp.{name}")


def test_layers_that_only_draft_are_left_out_with_the_reason(mixture, planned, shapes_in):
    """As the config counts them, behind the last."""
    config = mixture.configs["qwen3_moe"] | {"num_nextn_predict_layers": 1}
    extra = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"]
    made = planned(config, shapes_in(config) | dict.fromkeys(extra, (8, 8))).check()
    assert made.dropped == dict.fromkeys(extra, "a layer that drafts tokens (num_nextn_predict_layers)")


def test_a_model_without_a_head_drops_it(mixture, planned, shapes_in):
    config = mixture.configs["mixtral"]
    shapes = shapes_in(config)
    made = planned(config | {"architectures": ["MixtralModel"]}, shapes).check()
    assert made.dropped == {"lm_head.weight": "the architecture has no head"}
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items() if name != "lm_head.weight"}
    assert planned(config | {"architectures": ["MixtralModel"]}, bare).check().dropped == {}


def test_a_width_that_the_ranks_do_not_divide_is_refused(mixture, planned, shapes_in):
    """E-04: an expert's, where ranks cut it; whole experts on as many ranks are fine."""
    config = mixture.configs["qwen3_moe"] | {"moe_intermediate_size": 6}
    assert error_texts(planned(config, shapes_in(config), tp=4)) == [
        "layers.0.mlp.experts: cannot cut out[0:6]: 6 elements do not divide by tp 4; sizes that fit: 1, 2, 3, 6 "
        "(and 1 more like it)"
    ]
    assert not planned(config, shapes_in(config), tp=4, ep=4).errors
