"""Which kernel backend serves a Segment: the order in which they are asked, and every refusal with its reason."""

import pytest

from steelyard.blueprint import Linear, Part, Placement
from steelyard.choice import PREFERRED, REFERENCE, Choice, NoKernel, choose, order_of
from steelyard.errors import ConfigError, UnknownPlugin
from steelyard.granularity import PerBlock, PerChannel
from steelyard.local import localize
from steelyard.ranks import Ranks
from steelyard.schemes import Accept, Form, LayerScheme, Verdict
from support.planned import error_texts, hollow_d, planned, registry_of, texts
from support.quant import backend

FP8 = LayerScheme("fp8", granularity=PerChannel())
NODE = Linear("l", 4096, (Part("", 14336),), Placement.COLWISE)


def locals_of(node=NODE, **job):
    """Return a node's pieces, equal ones once, as the planner hands them over."""
    return list(dict.fromkeys(localize(node, ranks)[0] for ranks in Ranks.of(**job).all()))


def made(*classes):
    return {cls.keys[0]: cls() for cls in classes}


# --- order -------------------------------------------------------------------------------------------------------


def test_the_table_of_core_goes_first_then_names_in_order_and_torch_last():
    """M-22: no hidden priority number; ties are broken by name."""
    installed = ["torch", "zeta", "alpha", "deepgemm"]
    assert order_of(installed, FP8, "sm_90", None) == ["deepgemm", "alpha", "zeta", "torch"]
    assert order_of(installed, FP8, "gfx942", None) == ["alpha", "deepgemm", "zeta", "torch"]
    assert order_of(["alpha"], FP8, "cpu", None) == ["alpha"]


def test_every_row_of_the_table_names_backends_before_the_reference():
    """M-22: the reference is asked last whatever a row says."""
    for (weight, target), names in PREFERRED.items():
        installed = ["aaa", REFERENCE, *names]
        assert order_of(installed, LayerScheme(weight), target, None) == [*names, "aaa", REFERENCE]
        assert REFERENCE not in names


def test_the_users_list_replaces_the_order_of_core():
    """M-22, D-13: and nothing else is asked."""
    assert order_of(["torch", "alpha", "deepgemm"], FP8, "sm_90", ["torch", "alpha"]) == ["torch", "alpha"]
    assert order_of(["torch"], FP8, "sm_90", []) == []


def test_a_name_of_the_user_that_is_not_installed_is_an_error():
    """M-22: an explicit choice is never replaced."""
    with pytest.raises(ConfigError) as caught:
        order_of(["torch", "alpha"], FP8, "sm_90", ["alpha", "deepgemm", "fast"])
    assert str(caught.value) == "kernels=['alpha', 'deepgemm', 'fast'] names deepgemm, fast; installed: alpha, torch"


# --- asking ------------------------------------------------------------------------------------------------------


def test_the_first_that_says_yes_is_taken_and_the_refusals_before_it_are_kept():
    """M-22, X-24: A says no, B yes, C is not asked."""
    a, b, c = backend("a", refuses="needs a group of 64"), backend("b"), backend("c")
    choice = choose(made(a, b, c), FP8, locals_of(), "sm_90")
    assert choice == Choice("b", Form("b"), (("a", "needs a group of 64"),))
    assert (len(a.asked), len(b.asked), len(c.asked)) == (1, 1, 0)


def test_where_all_say_no_every_reason_is_in_the_error():
    """M-22, X-24: each candidate and why, in the order asked."""
    classes = (
        backend("a", targets=("gfx942",)),
        backend("b", missing="its library is not built; pip install b"),
        backend("c", weights=("int4",)),
        backend("d", alignment=(1, 512)),
    )
    node = Linear("l", 300, (Part("", 64),), Placement.COLWISE)
    with pytest.raises(NoKernel) as caught:
        choose(made(*classes), FP8, locals_of(node), "sm_90")
    assert caught.value.refusals == {
        "a": "has no kernels for sm_90",
        "b": "its library is not built; pip install b",
        "c": "computes int4, not fp8",
        "d": "local shape [64, 300] is not a multiple of [1, 512]",
    }
    assert str(caught.value) == "; ".join(f"{name}: {why}" for name, why in caught.value.refusals.items())


def test_without_a_backend_the_error_says_so():
    with pytest.raises(NoKernel) as caught:
        choose({}, FP8, locals_of(), "cpu")
    assert str(caught.value) == "no kernel backend is installed"


def test_a_backend_must_take_the_piece_of_every_rank():
    """M-22: by the local shapes, which are not those of the checkpoint."""
    a = backend("a", alignment=(128, 1))
    node = Linear("l", 4096, (Part("", 1344),), Placement.COLWISE)
    assert (
        choose(made(a), FP8, locals_of(Linear("l", 4096, (Part("", 1280),), Placement.COLWISE), tp=2), "sm_90").backend
        == "a"
    )
    with pytest.raises(NoKernel, match=r"^a: local shape \[672, 4096\] is not a multiple of \[128, 1\]$"):
        choose(made(a), FP8, locals_of(node, tp=2), "sm_90")


def test_a_form_that_differs_between_ranks_is_a_refusal():
    vocabulary = Linear("lm_head", 4096, (Part("", 97, padded=True),), Placement.COLWISE)
    a = backend("a", form=lambda scheme, node: Form("padded" if node.padding else "whole"))
    with pytest.raises(NoKernel, match="^a: takes whole on one rank and padded on another$"):
        choose(made(a), FP8, locals_of(vocabulary, tp=2), "sm_90")


def test_a_yes_without_a_form_cannot_be_said():
    with pytest.raises(ValueError, match="^Accept: a yes needs a form$"):
        Accept(Verdict(True))


@pytest.mark.parametrize(
    ("granularity", "smallest", "is_taken"),
    [(PerBlock(32, 128), 32, True), (PerBlock(32, 128), 64, False), (PerBlock(128, 32), 64, False), (PerBlock(64, 64), None, False)],
    ids=["fine-enough", "rows-too-fine", "columns-too-fine", "none"],
)  # fmt: skip
def test_a_refined_grid_is_compared_with_the_finest_of_the_form(granularity, smallest, is_taken):
    scheme = LayerScheme("fp8", granularity=granularity)
    backends = made(backend("a", smallest_grid=smallest))
    assert choose(backends, scheme, locals_of(), "sm_90").backend == "a"  # as stored, a kernel knows by itself
    if is_taken:
        assert choose(backends, scheme, locals_of(), "sm_90", is_refined=True).backend == "a"
    else:
        finest = min(granularity.rows, granularity.cols)
        with pytest.raises(NoKernel, match=f"^a: takes no scale grid as fine as {finest}$"):
            choose(backends, scheme, locals_of(), "sm_90", is_refined=True)


# --- here and elsewhere ------------------------------------------------------------------------------------------


def test_a_backend_that_is_not_installed_is_chosen_for_another_machine_and_refused_for_this():
    """M-22: whether it serves a target and whether it can run here are two questions."""
    backends = made(backend("a", missing="aiter is not installed"), backend("b"))
    assert choose(backends, FP8, locals_of(), "gfx942", here=False) == Choice(
        "a", Form("a"), (), "aiter is not installed"
    )
    assert choose(backends, FP8, locals_of(), "gfx942") == Choice("b", Form("b"), (("a", "aiter is not installed"),))


def test_a_laptops_plan_equals_the_clusters(tmp_path):
    """M-22: the choice, the digest and the figures; what cannot run here is a note."""
    hollow_d(tmp_path, quant="FP8-C")
    laptop = registry_of(
        backends=(backend("deepgemm", missing="deep_gemm is not installed", targets=("sm_90",)), backend("slow"))
    )
    cluster = registry_of(backends=(backend("deepgemm", targets=("sm_90",)), backend("slow")))
    here, there = (planned(tmp_path, registry=one, tp=2, target="sm_90").check() for one in (laptop, cluster))
    assert here.digest == there.digest
    assert here.ranks == there.ranks
    assert {choice.backend for choice in choices(here).values()} == {"deepgemm", "torch"}
    assert {stem: (one.backend, one.form) for stem, one in choices(here).items()} == {
        stem: (one.backend, one.form) for stem, one in choices(there).items()
    }
    assert texts(there, "not-installed") == []
    assert texts(here, "not-installed") == [
        "kernel backend deepgemm serves sm_90 and was chosen for it, but cannot run here: deep_gemm is not installed"
    ]
    assert [finding.severity for finding in here.findings if finding.code == "not-installed"] == ["note"]


def choices(plan):
    """Return stem to the choice of its first Segment."""
    return {task.stem: task.segment.choice for task in plan.tasks(0) if task.segment.choice is not None}


def test_the_order_reaches_the_plan_and_refusals_stay_with_the_choice(tmp_path):
    """M-22, D-13: by default, and with the user's list."""
    hollow_d(tmp_path, quant="FP8-C")
    backends = (
        backend("deepgemm", targets=("sm_90",), refuses="takes blocks of 128 only"),
        backend("apex"),
        backend("bolt"),
    )
    chosen = choices(planned(tmp_path, registry=registry_of(backends=backends), target="sm_90").check())
    assert chosen["layers.0.mlp.down_proj"] == Choice(
        "apex", Form("apex", "BF16"), (("deepgemm", "takes blocks of 128 only"),)
    )
    assert chosen["lm_head"].backend == REFERENCE
    assert [name for name, _ in chosen["lm_head"].refusals] == ["apex", "bolt", "deepgemm"]
    asked = choices(planned(tmp_path, registry=registry_of(backends=backends), kernels=("bolt", "torch")).check())
    assert asked["layers.0.mlp.down_proj"] == Choice("bolt", Form("bolt", "BF16"))
    assert asked["lm_head"].refusals == (("bolt", "computes fp8 and int4, not float"),)


def test_a_list_that_serves_only_some_layers_is_an_error_for_the_others(tmp_path):
    """M-22: the reference does not slip in behind the user's list."""
    hollow_d(tmp_path, quant="FP8-C")
    assert error_texts(planned(tmp_path, kernels=("toy",))) == [
        "lm_head: no kernel backend takes float.plain with local shape [96, 256] on sm_90: toy: computes fp8 and int4, not "
        "float"
    ]


def test_a_backend_that_the_user_names_and_that_is_nowhere_is_an_error(tmp_path):
    """M-22: with the command that helps."""
    hollow_d(tmp_path, quant="FP8-C")
    with pytest.raises(UnknownPlugin) as caught:
        planned(tmp_path, kernels=("deepgemm",))
    assert str(caught.value) == (
        "no kernel backend named 'deepgemm'; installed: torch, toy. Install it with: pip install steelyard-cuda-deepgemm"
    )


def test_the_weights_dtype_of_a_form_is_the_models_unless_the_backend_says_otherwise(tmp_path):
    hollow_d(tmp_path, quant="FP8-C")
    wide = backend("wide", form=lambda scheme, node: Form("wide", "F8_E4M3"))
    chosen = choices(planned(tmp_path, registry=registry_of(backends=(wide,)), dtype="float16").check())
    assert chosen["layers.0.mlp.down_proj"].form.weight_dtype == "F8_E4M3"
    assert chosen["lm_head"].form.weight_dtype == "F16"


def test_layers_alike_are_asked_for_once(tmp_path):
    """A plan of many layers asks once a class, by local shapes."""
    hollow_d(tmp_path, quant="FP8-C", num_hidden_layers=12)
    toy = backend("toy")
    planned(tmp_path, registry=registry_of(backends=(toy,)), tp=2).check()
    quantized = [(scheme, node) for scheme, node, _ in toy.asked if scheme.is_quantized]
    assert len(quantized) == len(set(quantized)) <= 8
