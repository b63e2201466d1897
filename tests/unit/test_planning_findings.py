"""What is wrong with a checkpoint is found on the plan: every sentence whole, all of them in one error."""

import pytest

from steelyard.blueprint import Embedding, Experts, FillWith, Linear, Norm, Param, Part, Placement
from steelyard.errors import PlanError
from steelyard.layouts import Drop, Source
from steelyard.placement import Axis, Order
from support.families import ToyVision
from support.planned import (
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
    plain,
    plan_of,
    planned,
    registry_of,
    run,
    texts,
    toy_m_shapes,
)

FILE = "(model.safetensors)"
SIZES = "(tp_size=1, ep_size=1, moe_tp=1)"
ATTN, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
QKV = (Part("q", 512, 4), Part("k", 256, 2, kv=True), Part("v", 256, 2, kv=True))


def stored_d(**changes):
    """Return TOY-D's tensors; a value of None takes one away, ``__`` in a name stands for a dot."""
    tensors = plain(dense_shapes(TOY_D))
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


def plan_d(folder, config=None, options=None, /, **changes):
    hollow_d(folder, tensors=stored_d(**changes), config=config)
    return planned(folder, **(options or {}))


# --- unexpected --------------------------------------------------------------------------------------------------


def test_a_tensor_that_no_rule_uses_is_an_error_and_a_buffer_is_dropped_with_its_reason(tmp_path):
    """L-18, M-09: a name is used, dropped by a named rule, or an error."""
    extra = {"model__layers__0__mlp__extra__weight": ("BF16", (8,))}
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (64,)),
        "model.layers.1.self_attn.masked_bias": ("BF16", ()),
    }
    made = plan_d(tmp_path, **extra, **{name.replace(".", "__"): value for name, value in buffers.items()})
    assert error_texts(made) == [
        f"unexpected tensor model.layers.0.mlp.extra.weight {FILE}: no rule of the model uses or drops it"
    ]
    assert made.dropped == {
        "model.layers.0.self_attn.rotary_emb.inv_freq": "a buffer that the model computes",
        "model.layers.1.self_attn.masked_bias": "a mask that the model computes",
    }


def test_twelve_unexpected_names_are_counted_and_ten_are_listed(tmp_path):
    """L-18: the message says 12 and lists 10; the findings have all."""
    names = [f"model.layers.0.mlp.extra_{index:02d}.weight" for index in range(12)]
    made = plan_d(tmp_path, **{name.replace(".", "__"): ("BF16", (8,)) for name in names})
    assert [finding.subject for finding in made.errors] == names
    with pytest.raises(PlanError) as caught:
        made.check()
    listed = "".join(
        f"\n  - unexpected tensor {name} {FILE}: no rule of the model uses or drops it" for name in names[:10]
    )
    assert str(caught.value) == (
        f"{tmp_path} cannot be loaded as asked (tp_size=1, ep_size=1, moe_tp=1, world=1, target=sm_90), 12 problems:"
        f"\n  - 12 findings of kind unexpected, the first 10:{listed}"
    )


@pytest.mark.parametrize("reader", ["auto", "mmap", "pread"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_unexpected_tensor_is_one_whatever_reads_it_and_a_note_if_the_user_says_so(tmp_path, reader, device):
    """R005, L-18: the mode does not change what counts; with strict off the same sentence is a note, once."""
    options = {"reader": reader, "device": device}
    changes = {"model__layers__0__self_attn__rel_bias": ("BF16", (4,))}
    made = plan_d(tmp_path, None, options, **changes)
    text = f"unexpected tensor {ATTN}.rel_bias {FILE}: no rule of the model uses or drops it"
    assert error_texts(made) == [text]
    lax = planned(tmp_path, strict=False, **options).check()
    assert texts(lax) == [text]


def test_numbers_in_names_are_indices(tmp_path):
    """M-13: layers.10 is not layers.1, and a layer past the last is unexpected."""
    config = TOY_D | {"num_hidden_layers": 12}
    tensors = plain(dense_shapes(config))
    hollow(tmp_path / "whole", config, tensors)
    made = planned(tmp_path / "whole").check()
    for task in made.tasks(0):
        if task.stem.startswith("layers."):
            layer = task.stem.split(".")[1]
            assert {read.name.split(".")[2] for read in task.reads} <= {layer}
    extra = tensors | {"model.layers.12.input_layernorm.weight": ("BF16", (256,))}
    hollow(tmp_path / "more", config, extra)
    assert error_texts(planned(tmp_path / "more")) == [
        f"unexpected tensor model.layers.12.input_layernorm.weight {FILE}: no rule of the model uses or drops it"
    ]


@pytest.mark.parametrize(
    "name",
    [
        "experts.x.gate_proj.weight",
        "experts.3.gate.weight",
        "experts.4.gate_proj.weight",
        "experts.03.gate_proj.weight",
    ],
)
def test_a_name_that_is_nearly_an_experts_is_unexpected(tmp_path, name):
    """M-13, E-05: no expert, projection or number is guessed; there are 4 experts."""
    tensors = plain(toy_m_shapes()) | {f"{MLP}.{name}": ("BF16", (256, 256))}
    hollow_m(tmp_path, tensors=tensors)
    assert error_texts(planned(tmp_path)) == [
        f"unexpected tensor {MLP}.{name} {FILE}: no rule of the model uses or drops it"
    ]


# --- missing -----------------------------------------------------------------------------------------------------


def test_a_parameter_without_a_tensor_is_named_alone_with_the_places_looked_at(tmp_path):
    """L-19: the missing name and only it."""
    made = plan_d(tmp_path, model__layers__1__self_attn__k_proj__weight=None)
    assert error_texts(made) == [
        "missing tensor model.layers.1.self_attn.k_proj.weight (also looked for model.layers.1.self_attn.qkv_proj.weight), "
        "needed for layers.1.self_attn.qkv_proj"
    ]
    assert "layers.1.self_attn.qkv_proj" not in {
        one.node.stem for one in made.nodes
    }  # a node with a hole is not planned


def test_a_missing_bias_is_named(tmp_path):
    """L-19: every tensor of a leaf, the bias too."""
    config = TOY_D | {"attention_bias": True}
    biases = {f"model.layers.{layer}.self_attn.{one}_proj.bias": ("BF16", (n,)) for layer in (0, 1) for one, n in
              (("q", 512), ("k", 256), ("v", 256))}  # fmt: skip
    del biases["model.layers.1.self_attn.v_proj.bias"]
    hollow(tmp_path, config, plain(dense_shapes(TOY_D)) | biases)
    assert error_texts(planned(tmp_path)) == [
        "missing tensor model.layers.1.self_attn.v_proj.bias (also looked for model.layers.1.self_attn.qkv_proj.bias), "
        "needed for layers.1.self_attn.qkv_proj"
    ]


def test_a_config_with_more_layers_than_the_files_names_every_parameter_of_the_rest(tmp_path):
    """R007: nine parameters of the layer that is not there."""
    made = plan_d(tmp_path, {"num_hidden_layers": 3})
    names = {name.replace("layers.0.", "layers.2.") for name in dense_shapes(TOY_D) if ".layers.0." in name}
    assert len(names) == 9
    assert {finding.subject for finding in made.errors} == names
    assert {finding.code for finding in made.errors} == {"missing"}


def test_files_with_more_layers_than_the_config_are_listed_unless_declared_as_extra(tmp_path):
    """R007: nine unexpected tensors, or a rule that says what they are."""
    made = plan_d(tmp_path, {"num_hidden_layers": 1})
    names = {name for name in dense_shapes(TOY_D) if ".layers.1." in name}
    assert {(finding.code, finding.subject) for finding in made.errors} == {("unexpected", name) for name in names}
    lone = plan_of(
        tmp_path / "lone",
        {"norm.weight": ("BF16", (8,)), "mtp.norm.weight": ("BF16", (8,))},
        Norm("norm", 8),
        drops=(Drop("mtp.*", "a draft layer, which no forward of this model uses"),),
    ).check()
    assert lone.dropped == {"mtp.norm.weight": "a draft layer, which no forward of this model uses"}


def test_a_whole_encoder_that_is_absent_is_an_error_or_a_listed_exception(tmp_path):
    """R001: both parameters are named; with an allow list both are reported as not filled from the file."""
    tensors = {
        name.replace("model.", "model.language_model."): value for name, value in plain(dense_shapes(TOY_D)).items()
    }
    hollow(tmp_path, TOY_D | {"architectures": list(ToyVision.keys)}, tensors)
    made = planned(tmp_path)
    parameters = ("visual.patch_embed.weight", "visual.blocks.0.attn.qkv.weight")
    assert error_texts(made) == [f"missing tensor {name}, needed for {name}" for name in parameters]
    allowed = planned(tmp_path, allow_missing=("visual.*",)).check()
    assert texts(allowed, "missing") == [
        f"{name} is not stored and allow_missing names it: it is filled with zeros" for name in parameters
    ]
    filled = run(allowed, 0, numbered(allowed.checkpoint.entries))
    assert filled["visual.patch_embed.weight", 0, ""].shape == (64, 48)
    assert not filled["visual.patch_embed.weight", 0, ""].any()


def test_an_allow_list_fills_one_part_and_names_that_part(tmp_path):
    hollow_d(tmp_path, tensors=stored_d(model__layers__0__self_attn__q_proj__weight=None))
    made = planned(tmp_path, allow_missing=(f"{ATTN}.q_proj.weight",)).check()
    assert texts(made, "missing") == [
        "layers.0.self_attn.qkv_proj q is not stored and allow_missing names it: it is filled with zeros"
    ]


def test_an_allow_list_does_not_excuse_what_is_there_and_wrong(tmp_path):
    made = plan_d(
        tmp_path,
        None,
        {"allow_missing": ("*q_proj*",)},
        model__layers__0__self_attn__q_proj__weight=("BF16", (511, 256)),
    )
    assert [finding.code for finding in made.errors] == ["shape"]


@pytest.mark.parametrize(
    ("node", "stored", "text"),
    [
        (Norm("n", 8, bias=True, absent="skip"), "n.weight", "missing tensor n.bias, needed for n"),
        (Linear("n", 8, (Part("a", 8), Part("b", 8)), Placement.COLWISE, absent="skip"), "n.a.weight",
         "missing tensor n.b.weight, needed for n"),
    ],
    ids=["norm", "linear"],
)  # fmt: skip
def test_an_optional_node_is_stored_whole_or_not_at_all(tmp_path, node, stored, text):
    shape = (8,) if isinstance(node, Norm) else (8, 8)
    assert error_texts(plan_of(tmp_path, {stored: ("BF16", shape)}, node)) == [text]


def test_every_kind_of_optional_node_is_left_out_and_named(tmp_path):
    nodes = (
        Embedding("table", 8, 8, Placement.COLWISE, absent="skip"),
        Param("scale", (Axis("out"),), 8, absent="skip"),
        Norm("extra", 8, absent="skip"),
        Linear("score", 8, (Part("", 2),), Placement.REPLICATED, absent="skip"),
    )
    made = plan_of(tmp_path, {"norm.weight": ("BF16", (8,))}, Norm("norm", 8), *nodes).check()
    assert made.skipped == ("table", "scale", "extra", "score")
    assert [planned_node.node.stem for planned_node in made.nodes] == ["norm"]


def test_a_constant_stands_for_an_absent_tensor(tmp_path):
    made = plan_of(tmp_path, {"a.weight": ("BF16", (8,))}, Norm("a", 8), Norm("b", 8, absent=FillWith(1.0))).check()
    held = run(made, 0, numbered(made.checkpoint.entries))
    assert held["b", 0, "weight"].tolist() == [1] * 8


# --- twice -------------------------------------------------------------------------------------------------------


def test_a_split_and_a_fused_tensor_of_one_part_are_duplicates(tmp_path):
    """L-21, M-12: the same part delivered twice."""
    made = plan_d(tmp_path, model__layers__0__self_attn__qkv_proj__weight=("BF16", (1024, 256)))
    assert error_texts(made) == [
        f"duplicate tensors {ATTN}.{one}_proj.weight and {ATTN}.qkv_proj.weight: both are layers.0.self_attn.qkv_proj's "
        "weight; keep one of them (model.safetensors)"
        for one in "qkv"
    ]


def test_experts_stored_one_by_one_and_stacked_are_duplicates(tmp_path):
    """R068, L-21: a mix of both forms."""
    stacked = {
        name: value
        for name, value in plain(toy_m_shapes(stored="stacked")).items()
        if name.startswith(f"{MLP}.experts")
    }
    tensors = {name: value for name, value in plain(toy_m_shapes()).items() if not name.startswith(f"{MLP}.experts.3.")}
    hollow_m(tmp_path, tensors=tensors | stacked)
    found = error_texts(planned(tmp_path))
    assert len(found) == 9
    assert found[0] == (
        f"duplicate tensors {MLP}.experts.0.gate_proj.weight and {MLP}.experts.gate_up_proj: "
        "both are layers.0.mlp.experts.0's weight; keep one of them (model.safetensors)"
    )


def test_two_sources_of_one_target_are_an_error(tmp_path):
    """M-10: ``bert.w`` and ``w`` both reach one parameter."""
    made = plan_of(
        tmp_path,
        {"bert.norm.weight": ("BF16", (8,)), "norm.weight": ("BF16", (8,))},
        Norm("norm", 8),
        names=lambda node, part, expert: (Source("norm"), Source("bert.norm")),
    )
    assert error_texts(made) == [
        "duplicate tensors norm.weight and bert.norm.weight: both are norm's weight; keep one of them (model.safetensors)"
    ]


def test_one_source_of_two_targets_is_an_error(tmp_path):
    """M-10: no tensor fills two parameters unless a tie says so."""
    made = plan_of(
        tmp_path,
        {"norm.weight": ("BF16", (8,))},
        Norm("a", 8),
        Norm("b", 8),
        names=lambda node, part, expert: (Source("norm"),),
    )
    assert error_texts(made) == ["norm.weight would fill both a and b"]


def fused_sources(order):
    return lambda node, part, expert: (Source("qkv", order=order) if part else Source("qkv"),)


RUNS = (("q", 512), ("k", 256), ("v", 256))


@pytest.mark.parametrize("nodes", [("qkv", "alone"), ("alone", "qkv")], ids=["order-first", "order-last"])
def test_a_tensor_of_several_parts_is_not_also_another_nodes(tmp_path, nodes):
    known = {
        "qkv": Linear("qkv", 256, QKV, Placement.COLWISE),
        "alone": Linear("alone", 256, (Part("", 1024),), Placement.COLWISE),
    }
    made = plan_of(
        tmp_path,
        {"qkv.weight": ("BF16", (1024, 256))},
        *(known[name] for name in nodes),
        names=fused_sources(Order(RUNS)),
    )
    assert {finding.code for finding in made.errors} == {"collision"}
    assert (
        error_texts(made)[0]
        == f"qkv.weight would fill both {'qkv q and alone' if nodes[0] == 'qkv' else 'alone and qkv q'}"
    )


def test_two_nodes_do_not_share_a_tensor_of_several_parts(tmp_path):
    nodes = (Linear("one", 256, QKV, Placement.COLWISE), Linear("two", 256, QKV, Placement.COLWISE))
    made = plan_of(tmp_path, {"qkv.weight": ("BF16", (1024, 256))}, *nodes, names=fused_sources(Order(RUNS)))
    assert error_texts(made) == [f"qkv.weight would fill both one q and two {part}" for part in "qkv"]


def test_an_order_with_a_part_that_the_node_lacks_leaves_rows_unread(tmp_path):
    order = Order((*RUNS, ("gate", 512)))
    made = plan_of(
        tmp_path,
        {"qkv.weight": ("BF16", (1536, 256))},
        Linear("qkv", 256, QKV, Placement.COLWISE),
        names=fused_sources(order),
    )
    assert error_texts(made) == ["qkv.weight: no node reads its parts gate"]


def test_an_order_without_a_part_of_the_node_is_an_error_of_the_mapping(tmp_path):
    order = Order((("q", 512), ("v", 256)))
    made = plan_of(
        tmp_path,
        {"qkv.weight": ("BF16", (768, 256))},
        Linear("qkv", 256, QKV, Placement.COLWISE),
        names=fused_sources(order),
    )
    assert error_texts(made) == [f"qkv.weight {FILE}: the mapping says that 'k' of qkv lies in it, but lays only q, v"]


def test_an_order_with_other_rows_than_the_part_is_an_error_of_the_mapping(tmp_path):
    order = Order((("q", 256), ("k", 256), ("v", 512)))
    made = plan_of(
        tmp_path,
        {"qkv.weight": ("BF16", (1024, 256))},
        Linear("qkv", 256, QKV, Placement.COLWISE),
        names=fused_sources(order),
    )
    assert error_texts(made) == [
        f"qkv.weight {FILE}: the mapping lays 256 rows of 'q' in it, qkv has 512",
        f"qkv.weight {FILE}: the mapping lays 512 rows of 'v' in it, qkv has 256",
    ]


def test_mappings_that_lay_one_tensor_out_in_two_ways_are_refused(tmp_path):
    """L-29, M-10: the order of parts is declared, and the first of two declarations does not win in silence."""
    made = plan_of(
        tmp_path,
        {"qkv.weight": ("BF16", (1024, 256))},
        Linear("qkv", 256, QKV, Placement.COLWISE),
        names=lambda node, part, expert: (Source("qkv", order=Order(RUNS)), Source("qkv", order=Order(RUNS[::-1]))),
    )
    assert error_texts(made) == ["qkv.weight: the mappings lay it out in two ways for qkv's weight"]


def test_two_publishers_with_the_same_names_are_one(tmp_path):
    class Publisher:
        keys = ("toy.same",)

        def names(self, node, part, expert):
            return (Source(node.stem),)

        def drops(self, config):
            return ()

    family = family_of(Norm("norm", 8))
    hollow(tmp_path, {"architectures": ["ToyForCausalLM"], "model_type": "toy"}, {"norm.weight": ("BF16", (8,))})
    made = planned(tmp_path, registry=registry_of(family, others=[("weight mapping", Publisher)])).check()
    assert len(list(made.reads(0))) == 1


# --- shapes and dtypes -------------------------------------------------------------------------------------------


def test_a_shape_error_says_what_is_stored_what_is_expected_and_for_which_job(tmp_path):
    """L-28: tensor, both shapes, sizes of the job."""
    made = plan_d(tmp_path, None, {"tp": 2}, model__layers__0__self_attn__o_proj__weight=("BF16", (256, 511)))
    assert error_texts(made) == [
        f"{ATTN}.o_proj.weight {FILE}: stored shape [256, 511], layers.0.self_attn.o_proj expects [256, 512] = [out, in] "
        "with out=256, in=512 (tp_size=2, ep_size=1, moe_tp=2)"
    ]


def test_nothing_is_transposed_by_its_shape(tmp_path):
    """L-29: an undeclared (in, out) is an error."""
    made = plan_d(tmp_path, model__layers__0__mlp__down_proj__weight=("BF16", (512, 256)))
    assert error_texts(made) == [
        f"{MLP}.down_proj.weight {FILE}: stored shape [512, 256], layers.0.mlp.down_proj expects [256, 512] = [out, in] "
        f"with out=256, in=512 {SIZES}"
    ]


@pytest.mark.parametrize("turned", [True, False], ids=["declared", "undeclared"])
def test_a_square_weight_is_transposed_only_where_the_mapping_says_so(tmp_path, turned):
    """L-29: a square tells nothing of its orientation."""
    made = plan_of(
        tmp_path,
        {"square.weight": ("BF16", (4, 4))},
        Linear("square", 4, (Part("", 4),), Placement.COLWISE),
        names=lambda node, part, expert: (Source("square", transposed=turned),),
        tp=2,
    ).check()
    stored = numbered(made.checkpoint.entries)("square.weight", (4, 4))
    for rank in range(2):
        held = run(made, rank, numbered(made.checkpoint.entries))["square", 0, "weight"]
        assert (held == (stored.T if turned else stored)[2 * rank : 2 * rank + 2]).all()


def test_a_stack_of_another_number_of_experts_is_one_error_a_part(tmp_path):
    """E-09, L-28: the stack is named once, not once an expert."""
    tensors = plain(toy_m_shapes(stored="stacked")) | {f"{MLP}.experts.gate_up_proj": ("BF16", (7, 512, 256))}
    hollow_m(tmp_path, tensors=tensors)
    assert error_texts(planned(tmp_path)) == [
        f"{MLP}.experts.gate_up_proj {FILE}: stored shape [7, 512, 256], layers.0.mlp.experts expects [4, 512, 256] = "
        f"[expert, out, in] with out=512, in=256 {SIZES}"
    ]


def test_layers_with_unlike_numbers_of_experts_do_not_share_a_match(tmp_path):
    """A stack of 4 must not pass for one of 6 because an earlier layer has 4."""
    up = Linear("", 256, (Part("gate", 256), Part("up", 256)), Placement.COLWISE)
    down = Linear("", 256, (Part("down", 256),), Placement.ROWWISE)
    tensors = {f"{stem}.{part}": ("BF16", (4, 256, 256)) for stem in ("four", "six") for part in ("gate", "up", "down")}
    made = plan_of(
        tmp_path,
        tensors,
        Experts("four", 4, up, down),
        Experts("six", 6, up, down),
        names=lambda node, part, expert: (Source(f"{node.stem}.{part}", {".weight": ""}, stacked=True),),
    )
    assert error_texts(made) == [
        f"six.{part} {FILE}: stored shape [4, 256, 256], six expects [6, 256, 256] = [expert, out, in] with out=256, "
        f"in=256 {SIZES}"
        for part in ("gate", "up", "down")
    ]


@pytest.mark.parametrize(
    ("code", "shape"), [("F8_E4M3", (512, 256)), ("I32", (512, 256)), ("I8", (512, 256)), ("F64", (512, 256))]
)
def test_codes_never_land_in_a_plain_parameter(tmp_path, code, shape):
    """L-31: both dtypes are named."""
    made = plan_d(tmp_path, model__layers__0__self_attn__q_proj__weight=(code, shape))
    assert error_texts(made) == [
        f"{ATTN}.q_proj.weight {FILE}: stored as {code}, layers.0.self_attn.qkv_proj takes F32 or BF16 or F16; codes and "
        "floats are never cast into each other"
    ]


@pytest.mark.parametrize("code", ["F32", "F16", "BF16"])
def test_floats_are_cast_into_each_other(tmp_path, code):
    """L-31: and only those."""
    made = plan_d(tmp_path, model__layers__0__self_attn__q_proj__weight=(code, (512, 256))).check()
    (task,) = (task for task in made.tasks(0) if task.stem == "layers.0.self_attn.qkv_proj")
    assert [(read.part, read.dtype) for read in task.reads] == [("q", code), ("k", "BF16"), ("v", "BF16")]
    assert [buffer.dtype for buffer in task.on_rank.buffers] == ["BF16"]


def test_an_axis_that_a_node_has_not_is_a_shape_error(tmp_path):
    made = plan_of(tmp_path, {"p": ("BF16", (4,))}, Param("p", (Axis("expert"),)))
    assert error_texts(made) == [
        f"p {FILE}: stored shape [4], p expects [expert] (it has no axis 'expert') with out=1, in=1 {SIZES}"
    ]


@pytest.mark.parametrize(
    ("dims", "shape", "sizes"),
    [((), (), (1, 1)), ((Axis("out"), Axis("in")), (0, 8), (0, 8)), ((Axis("out"),), (0,), (0, 1))],
    ids=["scalar", "empty-matrix", "empty-vector"],
)
def test_scalars_and_empty_tensors_are_planned_like_any(tmp_path, dims, shape, sizes):
    made = plan_of(tmp_path, {"p": ("BF16", shape)}, Param("p", dims, *sizes)).check()
    assert run(made, 0, numbered(made.checkpoint.entries))["p", 0, ""].shape == shape
    assert made.rank(0).bytes_needed == (2 if shape == () else 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_part_may_have_no_rows(tmp_path, tp):
    node = Linear("l", 8, (Part("a", 0), Part("b", 8)), Placement.COLWISE)
    made = plan_of(tmp_path, {"l.a.weight": ("BF16", (0, 8)), "l.b.weight": ("BF16", (8, 8))}, node, tp=tp).check()
    assert run(made, tp - 1, numbered(made.checkpoint.entries))["l", 0, "weight"].shape == (8 // tp, 8)


# --- names -------------------------------------------------------------------------------------------------------


def test_parts_are_matched_by_whole_segments(tmp_path):
    """M-11: gate_up_proj is no up_proj, and qkv_proj no v_proj."""
    hollow_d(tmp_path, tensors=fused(plain(dense_shapes(TOY_D))))
    made = planned(tmp_path).check()
    parts = {(read.name, read.part) for read in made.reads(0) if read.part}
    assert {part for name, part in parts if name.endswith("gate_up_proj.weight")} == {"gate", "up"}
    assert {part for name, part in parts if name.endswith("qkv_proj.weight")} == {"q", "k", "v"}
    renamed = {name.replace("up_proj", "sup_proj"): value for name, value in plain(dense_shapes(TOY_D)).items()}
    hollow_d(tmp_path / "sup", tensors=renamed)
    assert {finding.code for finding in planned(tmp_path / "sup").errors} == {"missing", "unexpected"}


@pytest.mark.parametrize("quant", [None, "FP8-B"])
def test_tensors_fused_on_disk_load_as_the_split_ones(tmp_path, quant):
    """M-12: weights and block scales; every rank holds the same."""
    shapes = dense_shapes(TOY_D)
    tensors = coded(shapes, quant) if quant else plain(shapes)
    hollow_d(tmp_path / "split", quant=quant, tensors=tensors)
    hollow_d(tmp_path / "fused", quant=quant, tensors=fused(tensors))
    split, together = planned(tmp_path / "split", tp=2).check(), planned(tmp_path / "fused", tp=2).check()

    def stored(name, shape):
        """Give each row of a split tensor, and of the fused one, a number by its part and place."""
        import numpy as np

        parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate", "up")}
        for whole, members in parts.items():
            if f".{whole}." in name:
                sizes = [tensors[name.replace(whole, f"{member}_proj")][1] for member in members]
                pieces = [
                    stored(name.replace(whole, f"{m}_proj"), size) for m, size in zip(members, sizes, strict=True)
                ]
                return np.concatenate(pieces)
        seed = sum(map(ord, name))
        return (np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) * 31 + seed * 1009) % 1_000_003

    for rank in range(2):
        first, second = run(split, rank, stored), run(together, rank, stored)
        assert first.keys() == second.keys()
        assert all((first[key] == second[key]).all() for key in first)


def test_stems_that_begin_alike_are_told_apart(tmp_path):
    """M-13: the longer name is not the shorter one's."""
    stems = ("model.layers.1", "model.layers.10", "model.layers.1.norm", "model.layers", "model")
    made = plan_of(
        tmp_path, {f"{stem}.weight": ("BF16", (8,)) for stem in stems}, *(Norm(stem, 8) for stem in stems)
    ).check()
    assert [(read.stem, read.name) for read in made.reads(0)] == [(stem, f"{stem}.weight") for stem in stems]


# --- heads and parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((Part("q", 250, 4),), "l: 250 rows of 'q' are not a multiple of 4 heads"),
        ((Part("k", 256, 2, kv=True),), "l: key/value heads of 'k' stand without their query heads in one Linear"),
        (
            (Part("q", 512, 4), Part("k", 512, 4, kv=True), Part("v", 256, 2, kv=True)),
            "l: 'v' has 2 heads, the parts before it 4",
        ),
        ((Part("a", 96, padded=True), Part("b", 96)), "l: a padded part must be the only one of its Linear"),
    ],
    ids=["rows", "no-query", "unlike", "padded"],
)
def test_heads_and_padding_that_cannot_be_are_findings(tmp_path, parts, text):
    tensors = {f"l.{part.name}.weight": ("BF16", (part.out, 8)) for part in parts}
    assert error_texts(plan_of(tmp_path, tensors, Linear("l", 8, parts, Placement.COLWISE))) == [text]


def test_a_number_of_experts_that_no_file_holds_is_refused_at_once(tmp_path):
    """E-06, X-22: not one missing expert after another."""
    tensors = plain(toy_m_shapes(TOY_M_CONFIG))
    hollow_m(tmp_path, num_experts=10**12, tensors=tensors)
    assert error_texts(planned(tmp_path))[0] == (
        "model.layers.0.mlp.gate.weight (model.safetensors): stored shape [4, 256], layers.0.mlp.gate expects "
        "[1000000000000, 256] = [out, in] with out=1000000000000, in=256 (tp_size=1, ep_size=1, moe_tp=1)"
    )
    assert (
        f"layers.0.mlp.experts: the config states {10**12} experts, which are not stacked, and the checkpoint holds "
        f"{len(tensors)} tensors in all; the number is damaged"
    ) in error_texts(planned(tmp_path))


def test_experts_that_are_none_are_an_error_of_the_config(tmp_path):
    hollow_m(tmp_path, num_experts=0, tensors=plain(toy_m_shapes(TOY_M_CONFIG | {"num_experts": 0})))
    assert error_texts(planned(tmp_path)) == [
        f"layers.{layer}.mlp.experts: 0 experts; there must be at least 1" for layer in (0, 1)
    ]


# --- all at once -------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_wrong_in_seven_ways_is_one_error_with_every_sentence(tmp_path):
    """L-18, L-19, L-21, L-28, L-31, P-01, P-02: found on the plan, all at once."""
    changes = {
        "model__norm__weight": None,
        "model__layers__0__mlp__extra__weight": ("BF16", (8,)),
        "model__layers__0__self_attn__o_proj__weight": ("BF16", (256, 511)),
        "model__layers__1__self_attn__o_proj__weight": ("F8_E4M3", (256, 512)),
        "model__layers__1__self_attn__qkv_proj__weight": ("BF16", (1024, 256)),
        "model__layers__1__self_attn__k_proj__weight": None,
        "model__layers__1__self_attn__v_proj__weight": None,
    }
    with pytest.raises(PlanError) as caught:
        plan_d(tmp_path, None, {"tp": 3}, **changes).check()
    heads = "4 query heads do not divide by tp 3 (q_heads=4, kv_heads=2, tp=3); tp sizes that fit: 1, 2, 4"
    halves = "512 elements do not divide by tp 3; sizes that fit: 1, 2, 4, 8, 16 (and 1 more like it)"
    assert str(caught.value) == "\n  - ".join(
        [
            f"{tmp_path} cannot be loaded as asked (tp_size=3, ep_size=1, moe_tp=3, world=3, target=sm_90), 9 problems:",
            f"{ATTN}.o_proj.weight {FILE}: stored shape [256, 511], layers.0.self_attn.o_proj expects [256, 512] = "
            "[out, in] with out=256, in=512 (tp_size=3, ep_size=1, moe_tp=3)",
            "duplicate tensors model.layers.1.self_attn.q_proj.weight and model.layers.1.self_attn.qkv_proj.weight: both "
            "are layers.1.self_attn.qkv_proj's weight; keep one of them (model.safetensors)",
            f"model.layers.1.self_attn.o_proj.weight {FILE}: stored as F8_E4M3, layers.1.self_attn.o_proj takes F32 or "
            "BF16 or F16; codes and floats are never cast into each other",
            "missing tensor model.norm.weight, needed for norm",
            f"unexpected tensor {MLP}.extra.weight {FILE}: no rule of the model uses or drops it",
            f"layers.0.self_attn.qkv_proj: {heads}",
            f"layers.1.self_attn.qkv_proj: {heads}",
            f"layers.0.mlp.gate_up_proj: cannot cut out[0:512]: {halves}",
            f"layers.0.mlp.down_proj: cannot cut in[0:512]: {halves}",
        ]
    )
