"""Which kernel backend serves routed experts: one for both matrices, on every rank; every refusal is kept with its reason."""

import pytest

from steelyard.blueprint import Experts, Linear, Part, Placement
from steelyard.builtin.reference import GATED, TorchReference
from steelyard.choice import Choice, NoKernel, choose_experts
from steelyard.errors import ConfigError
from steelyard.granularity import PerBlock, PerChannel
from steelyard.local import LocalExperts, localize
from steelyard.protocols import ExpertsBackend
from steelyard.ranks import Ranks
from steelyard.schemes import UNQUANTIZED, Form, LayerScheme
from steelyard.torch import ops
from support.experts import node_of
from support.planned import FP8_BLOCK, FP8_CHANNEL, error_texts, hollow_m, plan_of, planned, registry_of, texts
from support.quant import backend

FP8 = LayerScheme("fp8", granularity=PerChannel())
BLOCKS = LayerScheme("fp8", granularity=PerBlock(128, 128))
NODE = node_of(8, 256, 512)
STEM = "layers.0.mlp.experts"


def pieces(node=NODE, **job):
    """Return every rank's experts, equal ones once, as the planner hands them over."""
    made = [
        LocalExperts(node, *localize(node, ranks), ranks.moe_tp_rank == 0) for ranks in Ranks.of(**job).all()
    ]  # fmt: skip
    return list(dict.fromkeys(made))


def made(*classes):
    return {cls.keys[0]: cls() for cls in classes}


def dense_only(name):
    """Return a backend that has kernels for Linears alone."""
    whole = backend(name)
    kept = ("keys", "asked", "serves", "installed", "accepts", "linear")
    return type(name, (), {key: value for key, value in vars(whole).items() if key in kept})


# --- asking ------------------------------------------------------------------------------------------------------


def test_the_first_that_takes_both_matrices_is_taken_and_the_refusals_before_it_are_kept():
    """M-22, X-24: A serves another target, B is not installed, C refuses, D has no experts, E says yes, F is not asked."""
    f = backend("f")
    classes = (
        backend("a", targets=("gfx942",)),
        backend("b", missing="its library is not built"),
        backend("c", refuses="needs a group of 64"),
        dense_only("d"),
        backend("e"),
        f,
    )
    choice = choose_experts(made(*classes), FP8, FP8, pieces(), "sm_90")
    assert choice == Choice(
        "e",
        Form("e"),
        (
            ("a", "has no kernels for sm_90"),
            ("b", "its library is not built"),
            ("c", "needs a group of 64"),
            ("d", "has no kernel for routed experts"),
        ),
    )
    assert f.asked == []


def test_a_backend_without_experts_is_not_asked_for_their_matrices():
    """M-22: it would take each as a Linear, and has nothing that routes."""
    alone = dense_only("alone")
    assert not isinstance(alone(), ExpertsBackend)
    with pytest.raises(NoKernel) as caught:
        choose_experts(made(alone), FP8, FP8, pieces(), "sm_90")
    assert caught.value.refusals == {"alone": "has no kernel for routed experts"}
    assert alone.asked == []


@pytest.mark.parametrize("schemes", [(UNQUANTIZED, FP8), (FP8, UNQUANTIZED)])
def test_one_matrix_that_is_refused_refuses_the_layer(schemes):
    """M-22: whichever it is."""
    with pytest.raises(NoKernel, match="^a: computes fp8 and int4, not float$"):
        choose_experts(made(backend("a")), *schemes, pieces(), "sm_90")
    with pytest.raises(
        NoKernel, match=r"^torch: computes plain floats, not (float|fp8)\.plain and (float|fp8)\.plain$"
    ):
        choose_experts(made(TorchReference), *schemes, pieces(), "cpu")


def test_the_users_order_is_kept_and_nothing_else_is_asked():
    """M-22, D-13."""
    a, b, c = backend("a"), backend("b"), backend("c", refuses="not today")
    assert choose_experts(made(a, b, c), FP8, FP8, pieces(), "sm_90", wanted=["c", "b"]) == Choice(
        "b", Form("b"), (("c", "not today"),)
    )
    assert a.asked == []
    with pytest.raises(ConfigError, match=r"^kernels=\['z'\] names z; installed: a, b, c$"):
        choose_experts(made(a, b, c), FP8, FP8, pieces(), "sm_90", wanted=["z"])
    with pytest.raises(NoKernel, match="^no kernel backend is installed$"):
        choose_experts(made(a), FP8, FP8, pieces(), "sm_90", wanted=[])


def test_a_plan_for_another_machine_keeps_a_backend_that_is_missing_here():
    """M-22: and says why it cannot run here."""
    away = backend("away", missing="its library is not built")
    choice = choose_experts(made(away), FP8, FP8, pieces(), "sm_90", here=False)
    assert (choice.backend, choice.missing) == ("away", "its library is not built")


@pytest.mark.parametrize(
    ("alignment", "job", "why"),
    [
        ((64, 1), {"tp": 16}, None),
        ((128, 1), {"tp": 16}, r"local shape \[64, 256\] is not a multiple of \[128, 1\]"),
        ((1, 64), {"tp": 8}, None),
        ((1, 64), {"tp": 16}, r"local shape \[256, 32\] is not a multiple of \[1, 64\]"),
        ((1, 128), {"ep": 8}, None),
    ],
)
def test_both_matrices_are_held_to_the_alignment(alignment, job, why):
    """M-22: w13 is [2M, H] on a rank and w2 [H, M]; by the local shapes."""
    candidates = made(backend("a", alignment=alignment))
    if why is None:
        assert choose_experts(candidates, FP8, FP8, pieces(**job), "sm_90").backend == "a"
    else:
        with pytest.raises(NoKernel, match=f"^a: {why}$"):
            choose_experts(candidates, FP8, FP8, pieces(**job), "sm_90")


def test_a_form_that_differs_between_ranks_is_a_refusal():
    """Three experts on two ranks; a backend that packs two at a time in another way than one."""
    even = backend("a", form=lambda scheme, node: Form("even" if len(node.experts) % 2 == 0 else "odd"))
    with pytest.raises(NoKernel, match="^a: takes even on one rank and odd on another$"):
        choose_experts(made(even), FP8, FP8, pieces(node_of(3, 64, 64), ep=2), "sm_90")


def test_equal_pieces_are_asked_for_once_and_the_first_of_an_expert_is_told():
    """What a backend sees: the node without other ranks' experts, and which rank adds what is added once."""
    asked = backend("a")
    nodes = pieces(ep=2, moe_tp=2)
    assert [(node.experts.start, node.inner, node.is_first) for node in nodes] == [
        (0, 256, True), (0, 256, False), (4, 256, True), (4, 256, False)
    ]  # fmt: skip
    choose_experts(made(asked), FP8, FP8, nodes, "sm_90")
    assert len(asked.asked) == 8  # both matrices of each


@pytest.mark.parametrize(
    ("smallest", "finest", "why"),
    [
        (16, 16, None),
        (16, None, None),
        (None, None, None),
        (None, 64, "takes no scale grid as fine as 64"),
        (64, 32, "takes no scale grid as fine as 32"),
    ],
)
def test_a_refined_grid_needs_a_form_that_takes_it(smallest, finest, why):
    candidates = made(backend("a", smallest_grid=smallest))
    if why is None:
        assert choose_experts(candidates, BLOCKS, BLOCKS, pieces(), "sm_90", finest=finest).backend == "a"
    else:
        with pytest.raises(NoKernel, match=f"^a: {why}$"):
            choose_experts(candidates, BLOCKS, BLOCKS, pieces(), "sm_90", finest=finest)


def test_an_order_that_leaves_a_part_out_is_a_refusal():
    """E-01: the form says in which order gate and up shall lie, and must name both; w2 has one part and no order."""
    partial = backend("a", form=lambda scheme, node: Form("a", part_order=("gate",)))
    other = backend("b", form=lambda scheme, node: Form("b", part_order=("up", "gate")))
    choice = choose_experts(made(partial, other), FP8, FP8, pieces(), "sm_90")
    assert choice == Choice(
        "b", Form("b", part_order=("up", "gate")), (("a", "orders the parts gate, not up"),)
    )  # fmt: skip


# --- the reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_the_reference_takes_gated_experts_gate_first(activation):
    """E-01."""
    node = node_of(2, activation=activation)
    choice = choose_experts(made(TorchReference), UNQUANTIZED, UNQUANTIZED, pieces(node), "cpu")
    assert choice.form.part_order == ("gate", "up")


def test_the_reference_refuses_an_activation_that_it_has_not():
    with pytest.raises(NoKernel, match="^torch: has no activation 'sine'$"):
        choose_experts(made(TorchReference), UNQUANTIZED, UNQUANTIZED, pieces(node_of(2, activation="sine")), "cpu")


def test_the_reference_refuses_parts_of_other_names():
    node = node_of(2)
    w13 = type(node.w13)("", 8, (node.w13.parts[0],), node.w13.placement)
    with pytest.raises(NoKernel, match="^torch: computes experts of gate and up, not of gate$"):
        choose_experts(made(TorchReference), UNQUANTIZED, UNQUANTIZED, pieces(Experts("e", 2, w13, node.w2)), "cpu")


def test_every_activation_that_the_reference_names_is_there():
    """The list stands in a module that must not import torch."""
    for name in GATED:
        ops.activation(name)


# --- in a plan ---------------------------------------------------------------------------------------------------


def kernels(made):
    return {(one.stem, one.backend) for one in made.kernels() if one.stem == STEM}


def test_a_plan_names_one_backend_for_a_layer_and_why_the_others_are_not(tmp_path):
    """M-22: the table's first, one that has no experts, and the one that is taken."""
    hollow_m(tmp_path, quant="FP8-C", num_hidden_layers=1)
    registry = registry_of(backends=(dense_only("alpha"), backend("beta")))
    plan = planned(tmp_path, registry=registry, ep=2).check()
    assert kernels(plan) == {(STEM, "beta")}
    assert {one.backend for one in plan.kernels() if "self_attn" in one.stem} == {"alpha"}
    (choice,) = {id(task.segment.choice): task.segment.choice for task in plan.tasks(0) if task.stem == STEM and task.index == 0}.values()  # fmt: skip
    assert choice.refusals == (("alpha", "has no kernel for routed experts"),)


def test_a_layer_that_nobody_takes_is_one_error_with_every_reason(tmp_path):
    """M-22: not one a matrix; the schemes, the pieces and each backend's answer are in it."""
    hollow_m(tmp_path, quant="FP8-C", num_hidden_layers=1)
    registry = registry_of(backends=(dense_only("alpha"),))
    assert error_texts(planned(tmp_path, registry=registry, ep=2)) == [
        f"{STEM}: no kernel backend takes fp8.plain.experts with 2 local experts, 256 rows of gate and of up each on "
        "sm_90: alpha: has no kernel for routed experts; torch: computes plain floats, not fp8.plain and fp8.plain"
    ]


def test_a_grid_that_is_refined_for_gate_and_up_is_refined_in_the_question(tmp_path):
    """P-16: 320 rows on two ranks need a grid of 32, which the form must take; w2's columns too."""
    hollow_m(tmp_path / "fine", quant="FP8-B", num_hidden_layers=1, moe_intermediate_size=320)
    plan = planned(tmp_path / "fine", tp=2, registry=registry_of(backends=(backend("toy", smallest_grid=32),)))
    refined = [text for text in texts(plan.check(), "refined") if text.startswith(STEM)]
    assert refined == [
        f"{STEM}: its scale grid is refined so that every rank starts on an edge: {axis} 128 -> 32"
        for axis in ("out", "in")
    ]
    coarse = registry_of(backends=(backend("toy", smallest_grid=64),))
    (text,) = error_texts(planned(tmp_path / "fine", tp=2, registry=coarse))
    assert "toy: takes no scale grid as fine as 32" in text


def test_the_users_list_holds_for_experts_too(tmp_path):
    """D-13."""
    hollow_m(tmp_path, quant="FP8-C", num_hidden_layers=1)
    registry = registry_of(backends=(backend("alpha"), backend("beta")))
    assert kernels(planned(tmp_path, registry=registry, kernels=["beta", "torch"]).check()) == {(STEM, "beta")}


def test_blocks_of_gate_and_up_that_share_a_border_are_apart_on_a_finer_grid(tmp_path):
    """E-01, P-22: 192 rows of each; up first or gate first, the second starts on an edge of the refined grid."""
    node = node_of(2, 256, 192)
    tensors = {}
    for expert in range(2):
        for part, shape in (("gate", (192, 256)), ("up", (192, 256)), ("down", (256, 192))):
            tensors |= {f"experts.{expert}.{part}.weight": ("F8_E4M3", shape)}
            tensors |= {f"experts.{expert}.{part}.weight_scale_inv": ("F32", tuple(-(-one // 128) for one in shape))}
    for order in (("up", "gate"), ("gate", "up")):
        taking = backend("toy", form=lambda scheme, node, order=order: Form("x", part_order=order, smallest_grid=16))
        plan = plan_of(
            tmp_path / order[0], tensors, node, config={"quantization_config": FP8_BLOCK},
            registry=registry_of(backends=(taking,)),
        ).check()  # fmt: skip
        task = next(plan.tasks(0))
        assert task.segment.parts == order
        assert {one.name: one.shape for one in task.on_rank.buffers} == {
            "weight": (2, 384, 256), "weight_scale_inv": (2, 6, 2)
        }  # fmt: skip
        assert {(read.part, read.region[1]) for read in task.reads if read.buffer == "weight_scale_inv"} == {
            (order[0], (0, 3)), (order[1], (3, 3))
        }  # fmt: skip


# --- the order of a Linear's parts -------------------------------------------------------------------------------


def qkv_of(rows):
    return Linear("qkv", 128, tuple(Part(name, out) for name, out in zip("qkv", rows, strict=True)), Placement.COLWISE)


def blocks_of(node):
    made = {}
    for part in node.parts:
        made[f"qkv.{part.name}.weight"] = ("F8_E4M3", (part.out, 128))
        made[f"qkv.{part.name}.weight_scale_inv"] = ("F32", (-(-part.out // 128), 1))
    return made


def ordering(*order):
    return backend("toy", form=lambda scheme, node: Form("x", part_order=order, smallest_grid=16))


def test_a_part_that_ends_inside_a_block_may_stand_last_and_nowhere_else(tmp_path):
    """P-22: a kernel's order moves v, 64 rows of a block of 128, before k, which would start inside v's block."""
    node, config = qkv_of((128, 128, 64)), {"quantization_config": FP8_BLOCK}
    for name, order in (("kept", ("q", "k", "v")), ("turned", ("k", "q", "v"))):
        registry = registry_of(backends=(ordering(*order),))
        (task,) = plan_of(tmp_path / name, blocks_of(node), node, config=config, registry=registry).check().tasks(0)
        assert task.segment.parts == order
    registry = registry_of(backends=(ordering("v", "k", "q"),))
    assert error_texts(plan_of(tmp_path / "first", blocks_of(node), node, config=config, registry=registry)) == [
        "qkv: kernel backend toy wants the parts in the order v, k, q, but v has 64 rows on a rank and weight_scale_inv "
        "steps by 128, so k would start inside a step"
    ]


def test_an_order_without_one_of_a_linears_parts_is_a_refusal(tmp_path):
    """M-22: the next backend is asked."""
    node = qkv_of((128, 128, 128))
    names = backend("names", form=lambda scheme, node: Form("x", part_order=("q", "k")))
    registry = registry_of(backends=(names, backend("next")))
    config = {"quantization_config": FP8_CHANNEL}
    tensors = {name: one for name, one in blocks_of(node).items() if name.endswith("weight")}
    tensors |= {f"qkv.{part}.weight_scale": ("F32", (128, 1)) for part in "qkv"}
    plan = plan_of(tmp_path, tensors, node, config=config, registry=registry).check()
    (task,) = plan.tasks(0)
    assert task.segment.choice.backend == "next"
    assert task.segment.choice.refusals == (("names", "orders the parts q, k, not v"),)
