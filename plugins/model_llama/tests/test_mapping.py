"""The mapping on plans: which stored name fills which node, what is left out and why, and what is an error."""

import numpy as np
import pytest

import steelyard
from support.checkpoints import dense_shapes, encode, values, write_config, write_shards
from support.loading import executed
from support.planned import error_texts, hollow, numbered, plain, run

Q, K, V = (f"layers.0.attention.w{part}.weight" for part in "qkv")


@pytest.fixture
def planned(tmp_path, registry):
    """Return a function that writes shapes as holes, plans their load and returns the plan."""

    def planned(config, shapes, *, tp=1, name="model"):
        return steelyard.plan(
            hollow(tmp_path / name, config, plain(shapes, "F32")), target="cpu", tp=tp, registry=registry
        )

    return planned


def behind(prefix, shapes):
    return {name.replace("model.", prefix, 1): shape for name, shape in shapes.items()}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaModel"])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_bare_model_may_have_bare_names_and_a_model_with_a_head_may_not(planned, small, architecture, prefix):
    bare = architecture == "LlamaModel"
    config = small | {"architectures": [architecture]}
    shapes = {name: shape for name, shape in dense_shapes(small).items() if not (bare and name == "lm_head.weight")}
    plan = planned(config, behind(prefix, shapes))
    assert bool(plan.errors) == (not bare and prefix == "")


def test_two_models_in_one_file_are_not_mixed(planned, small):
    """M-10: the same part under two of its names."""
    shapes = {name: shape for name, shape in dense_shapes(small).items() if name != "lm_head.weight"}
    plan = planned(small | {"architectures": ["LlamaModel"]}, shapes | {"norm.weight": (12,)})
    assert error_texts(plan) == [
        "duplicate tensors norm.weight and model.norm.weight: both are norm's weight; keep one of them (model.safetensors)"
    ]


def test_a_tensor_stored_split_and_fused_is_a_duplicate(planned, small):
    """M-12."""
    stem = "model.layers.0.self_attn"
    plan = planned(small, dense_shapes(small) | {f"{stem}.qkv_proj.weight": (32, 12)})
    first = error_texts(plan)[0]
    assert first == (
        f"duplicate tensors {stem}.q_proj.weight and {stem}.qkv_proj.weight: both are layers.0.self_attn.qkv_proj's weight; "
        "keep one of them (model.safetensors)"
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.foo",
        "score.weight",
    ],
)
def test_any_other_name_is_unexpected(planned, small, name):
    """L-18: a bias or a norm that the model type does not have is not passed over."""
    plan = planned(small, dense_shapes(small) | {name: (4,)})
    assert error_texts(plan) == [f"unexpected tensor {name} (model.safetensors): no rule of the model uses or drops it"]


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_a_bias_that_the_config_promises_must_be_stored(planned, small, key):
    """L-19."""
    missing = {text.split()[2] for text in error_texts(planned(small | {key: True}, dense_shapes(small)))}
    parts = (
        ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")
        if key == "attention_bias"
        else ("mlp.gate", "mlp.up", "mlp.down")
    )
    assert missing == {f"model.layers.{layer}.{part}_proj.bias" for layer in range(2) for part in parts}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_drafts_are_left_out_behind_every_prefix(planned, small, prefix):
    """R007: (b); and no other layer is."""
    text = {key: value for key, value in small.items() if key != "architectures"}
    wrapper = {"architectures": ["LlamaForCausalLM"], "text_config": text | {"num_nextn_predict_layers": 1}}
    shapes = behind(prefix, dense_shapes(small | {"num_hidden_layers": 4}))
    plan = planned(wrapper, shapes)
    assert {name.split("layers.")[1][0] for name in plan.dropped} == {"2"}
    assert len(plan.dropped) == 9
    assert sorted({finding.subject for finding in plan.errors}) == sorted(
        name for name in shapes if "layers.3." in name
    )


def meta(config):
    """Return the names and shapes of a Llama under Meta's names."""
    hidden, inner, words, dim = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"tok_embeddings.weight": (words, hidden), "norm.weight": (hidden,), "output.weight": (words, hidden)}
    for layer in range(config["num_hidden_layers"]):
        rows = {"attention.wq": (q, hidden), "attention.wk": (kv, hidden), "attention.wv": (kv, hidden)}
        rows |= {"attention.wo": (hidden, q), "feed_forward.w1": (inner, hidden), "feed_forward.w3": (inner, hidden)}
        rows |= {"feed_forward.w2": (hidden, inner), "attention_norm": (hidden,), "ffn_norm": (hidden,)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in rows.items()}
    return shapes


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_metas_names_fill_every_node(planned, small, model_type):
    """M-10: and the mapping stands in the plan among what it used; other model types do not know the names."""
    named = {"model_type": model_type, "architectures": [f"{model_type.capitalize()}ForCausalLM"]}
    plan = planned(small | named, meta(small) | {"rope.freqs": (2,)}).check()
    assert plan.dropped == {"rope.freqs": "a buffer that the model computes"}
    assert len({read.name for read in plan.reads(0)}) == len(meta(small))


def test_qwen_has_no_release_under_metas_names(planned, small):
    named = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    plan = planned(small | named, meta(small))
    assert {finding.code for finding in plan.errors} == {"missing", "unexpected"}


def test_metas_head_is_left_out_of_a_model_without_one(planned, small):
    plan = planned(small | {"architectures": ["LlamaModel"]}, meta(small)).check()
    assert plan.dropped == {"output.weight": "the architecture has no head"}


def test_rows_leave_their_pairs_within_each_head_of_a_rank(tmp_path, registry, small):
    """P-12: heads of four rows stored 0 2 1 3; rank 1 of 2 holds the last two query heads and the last pair."""
    config = small | {"num_hidden_layers": 1}
    tensors = {name: encode(values(t, shape), "F32") for t, (name, shape) in enumerate(meta(config).items())}
    for name, rows in ((Q, 16), (K, 8), (V, 8)):
        tensors[name] = encode(np.arange(rows)[:, None].repeat(12, 1), "F32")
    write_config(tmp_path, config)
    write_shards(tmp_path, tensors)
    plan = steelyard.plan(tmp_path, target="cpu", tp=2, registry=registry).check()
    qkv = executed(plan, 1)[0].built["layers.0.self_attn.qkv_proj"].segments[0].kernel.weight
    assert qkv[:, 0].tolist() == [8, 10, 9, 11, 12, 14, 13, 15, 4, 6, 5, 7, 4, 5, 6, 7]


def test_fused_rows_of_a_rank_are_those_of_its_parts(planned, small):
    """P-12, P-13, M-12: rank 1 of 2, rows of a fused qkv (16, 8, 8) and of a fused gate and up (16, 16)."""
    config, stem = small | {"num_hidden_layers": 1}, "model.layers.0."
    shapes = {
        name: shape
        for name, shape in dense_shapes(config).items()
        if not any(part in name for part in ("q_p", "k_p", "v_p", "gate", "up_"))
    }
    shapes |= {f"{stem}self_attn.qkv_proj.weight": (32, 12), f"{stem}mlp.gate_up_proj.weight": (32, 12)}
    plan = planned(config, shapes, tp=2).check()
    stored = numbered(plan.checkpoint.entries)
    found = run(plan, 1, stored)
    for node, rows in (
        ("self_attn.qkv_proj", [*range(8, 16), *range(20, 24), *range(28, 32)]),
        ("mlp.gate_up_proj", [*range(8, 16), *range(24, 32)]),
    ):
        whole = stored(f"{stem}{node}.weight", (32, 12))
        assert (found[f"layers.0.{node}", 0, "weight"] == whole[rows]).all()
