"""The family's answers from a config alone: nodes, defaults, and the values that it refuses."""

import subprocess
import sys

import pytest
import torch
import transformers

from steelyard.plugin import AttentionState, ConfigError, Experts, Linear, Norm, Part, Placement
from steelyard_model_qwen3_moe.config import read_config
from steelyard_model_qwen3_moe.family import MoeFamily
from support.planned import registry_of

CLASSES = {
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "mixtral": transformers.MixtralConfig,
}
QWENS = ["qwen2_moe", "qwen3_moe"]


@pytest.fixture
def config_of(mixture):
    """Return a function from a model type and changes to the config of its TOY-M; None drops a key."""

    def config_of(of, /, **changes):
        merged = mixture.configs[of] | changes
        return {key: value for key, value in merged.items() if value is not None}

    return config_of


def nodes(config):
    return {node.stem: node for node in MoeFamily().blueprint(config).nodes}


def behind_attention(config, layer):
    return [node for stem, node in nodes(config).items() if stem.startswith(f"layers.{layer}.mlp.")]


def gated(stem, hidden, inner, layer):
    parts = (Part("gate", inner), Part("up", inner))
    return [
        Linear(f"{stem}.gate_up_proj", hidden, parts, Placement.COLWISE, layer=layer),
        Linear(f"{stem}.down_proj", inner, (Part("", hidden),), Placement.ROWWISE, layer=layer),
    ]


def routed(layer, count, top_k, inner):
    w13 = Linear("", 256, (Part("gate", inner), Part("up", inner)), Placement.COLWISE)
    w2 = Linear("", inner, (Part("down", 256),), Placement.ROWWISE)
    return [
        Linear(f"layers.{layer}.mlp.gate", 256, (Part("", count),), Placement.REPLICATED, layer=layer),
        Experts(f"layers.{layer}.mlp.experts", count, w13, w2, top_k, "silu", layer),
    ]


def test_a_sparse_layer_is_a_router_and_experts(config_of):
    """E-01: Qwen3-MoE's and Mixtral's, whose intermediate_size is the experts'."""
    config = config_of("qwen3_moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=64)
    assert behind_attention(config, 1) == routed(1, 6, 3, 64)
    config = config_of("mixtral", num_local_experts=8, intermediate_size=96)
    assert behind_attention(config, 1) == routed(1, 8, 2, 96)


def test_a_shared_expert_is_a_dense_mlp_beside_a_gate_of_one_row(config_of):
    """The shared expert is cut like a dense MLP; every rank has its gate."""
    gate = Linear("layers.0.mlp.shared_expert_gate", 256, (Part("", 1),), Placement.REPLICATED, layer=0)
    config = config_of("qwen2_moe", shared_expert_intermediate_size=48)
    assert behind_attention(config, 0) == [
        *routed(0, 4, 2, 256),
        *gated("layers.0.mlp.shared_expert", 256, 48, 0),
        gate,
    ]


@pytest.mark.parametrize("model_type", QWENS)
@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"mlp_only_layers": []}, [0, 1, 2, 3, 4]),
        ({"mlp_only_layers": [0, 3]}, [1, 2, 4]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 3}, [2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, [3]),
        ({"decoder_sparse_step": 6}, []),
    ],
)
def test_dense_layers_stand_where_transformers_has_them(config_of, model_type, changes, sparse):
    """By transformers' own model on meta; a step of 2 makes layer 1 sparse, not layer 0."""
    config = config_of(model_type, num_hidden_layers=5, intermediate_size=32, **changes)
    assert [layer for layer, one in enumerate(read_config(config).sparse) if one] == sparse
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(CLASSES[model_type](**config))
    theirs = [layer for layer, one in enumerate(model.layers) if hasattr(one.mlp, "experts")]
    assert theirs == sparse
    for layer in set(range(5)) - set(sparse):
        assert behind_attention(config, layer) == gated(f"layers.{layer}.mlp", 256, 32, layer)


def test_attention_has_the_biases_and_norms_of_its_model(config_of):
    """Qwen2-MoE: biases of q, k, v unless qkv_bias says no; Qwen3-MoE: norms of a head, and attention_bias for all four."""

    def attention(config):
        found = nodes(config)
        stem = "layers.0.self_attn"
        return (
            found[f"{stem}.qkv_proj"].bias,
            found[f"{stem}.o_proj"].bias,
            found.get(f"{stem}.q_norm"),
            found.get(f"{stem}.k_norm"),
        )

    norms = [Norm(f"layers.0.self_attn.{one}_norm", 128, "rms", 1e-6, layer=0) for one in "qk"]
    assert attention(config_of("qwen2_moe")) == (True, False, None, None)
    assert attention(config_of("qwen2_moe", qkv_bias=False)) == (False, False, None, None)
    assert attention(config_of("qwen3_moe")) == (False, False, *norms)
    assert attention(config_of("qwen3_moe", attention_bias=True)) == (True, True, *norms)
    assert attention(config_of("mixtral", attention_bias=True)) == (False, False, None, None)
    state = AttentionState("layers.0.self_attn.state", 4, 2, 128, layer=0)
    assert nodes(config_of("mixtral"))["layers.0.self_attn.state"] == state


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("qwen2_moe", {"sliding_window": 8}, [None] * 4),
        ("qwen2_moe", {"sliding_window": 8, "use_sliding_window": True}, [8, None, 8, None]),
        ("qwen2_moe", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [8, None, None, None]),
        (
            "qwen2_moe",
            {"sliding_window": 8, "use_sliding_window": True,
             "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
            [None, 8, 8, None],
        ),
        ("qwen3_moe", {"sliding_window": 8}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, [8] * 4),
        ("mixtral", {}, [None] * 4),
        ("mixtral", {"sliding_window": 8}, [8] * 4),
    ],
)  # fmt: skip
def test_windows_slide_over_the_layers_that_transformers_says(config_of, model_type, changes, windows):
    assert list(read_config(config_of(model_type, num_hidden_layers=4, **changes)).decoder.windows) == windows


SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings", "intermediate_size", "num_experts_per_tok",
)  # fmt: skip
OWN_SIZES = {
    "qwen2_moe": ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "mixtral": ("num_local_experts",),
}


@pytest.mark.parametrize("model_type", CLASSES)
def test_what_a_config_leaves_out_is_what_transformers_takes(config_of, model_type):
    """Every value but the sizes, against the config class of transformers 5.24."""
    stated = {key: config_of(model_type)[key] for key in (*SIZES, *OWN_SIZES[model_type])}
    made = read_config(stated | {"model_type": model_type})
    theirs = CLASSES[model_type](**stated)
    assert made.decoder.activation == theirs.hidden_act
    assert made.decoder.eps == theirs.rms_norm_eps
    assert made.decoder.rope.theta == theirs.rope_parameters["rope_theta"]
    assert made.decoder.ties_head == theirs.tie_word_embeddings
    assert made.decoder.has_qkv_bias == getattr(theirs, "qkv_bias", getattr(theirs, "attention_bias", False))
    assert made.decoder.has_out_bias == getattr(theirs, "attention_bias", False)
    assert made.decoder.windows == (getattr(theirs, "sliding_window", None) or None,) * 2
    assert made.renormalizes == getattr(theirs, "norm_topk_prob", True)
    assert made.sparse == (True, True)
    assert made.decoder.head_dim == theirs.hidden_size // theirs.num_attention_heads
    layers = {"num_hidden_layers": 40, "use_sliding_window": True, "sliding_window": 8}
    if model_type == "qwen2_moe":  # every other layer below max_window_layers
        found = read_config(stated | {"model_type": model_type} | layers).decoder.windows
        kinds = CLASSES[model_type](**stated | layers).layer_types
        assert found == tuple(8 if kind == "sliding_attention" else None for kind in kinds)


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_config_that_transformers_writes_is_read(config_of, model_type):
    """It names Qwen3-MoE's experts num_local_experts, and states every key."""
    written = CLASSES[model_type](**config_of(model_type)).to_dict()
    assert ("num_local_experts" in written) == (model_type != "qwen2_moe")
    assert read_config(written) == read_config(config_of(model_type))


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_size_has_no_default(config_of, model_type):
    left = [key for key in (*SIZES, *OWN_SIZES[model_type]) if key != "num_key_value_heads"]
    for key in left:
        with pytest.raises(ConfigError) as caught:
            read_config(config_of(model_type, **{key: None}))
        assert str(caught.value) == f"{key} is absent; a count is needed"


def test_renormalisation_is_the_configs_and_mixtrals_always(config_of):
    found = {
        model_type: [
            read_config(config_of(model_type, norm_topk_prob=said)).renormalizes
            for said in (None, True, *((False,) if model_type != "mixtral" else ()))
        ]
        for model_type in CLASSES
    }
    assert found == {"qwen2_moe": [False, True, False], "qwen3_moe": [False, True, False], "mixtral": [True, True]}


REFUSED = {
    "more experts a token than there are": (
        "qwen3_moe",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok=5 is more than the 4 experts of a layer",
    ),
    "more of Mixtral's": (
        "mixtral",
        {"num_local_experts": 1},
        "num_experts_per_tok=2 is more than the 1 experts of a layer",
    ),
    "no expert": ("qwen2_moe", {"num_experts": 0}, "num_experts=0 is not a count of at least 1"),
    "no expert a token": (
        "qwen2_moe",
        {"num_experts_per_tok": 0},
        "num_experts_per_tok=0 is not a count of at least 1",
    ),
    "experts as text": ("mixtral", {"num_local_experts": "8"}, "num_local_experts='8' is not a count of at least 1"),
    "two numbers of experts": (
        "qwen3_moe",
        {"num_local_experts": 8},
        "num_experts=4 and num_local_experts=8 contradict each other; state one, or both alike",
    ),
    "no width": ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size=0 is not a count of at least 1"),
    "no width of the shared expert": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size=0 is not a count of at least 1",
    ),
    "sparse step": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0 is not a count of at least 1"),
    "dense layers as a number": ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1 is not a list of layers' numbers"),
    "dense layers as text": (
        "qwen2_moe",
        {"mlp_only_layers": ["0"]},
        "mlp_only_layers=['0'] is not a list of layers' numbers",
    ),
    "a dense layer that is not there": (
        "qwen2_moe",
        {"mlp_only_layers": [0, 2]},
        "mlp_only_layers=[0, 2] names layer 2; there are layers 0 to 1",
    ),
    "a layer from behind": (
        "qwen3_moe",
        {"mlp_only_layers": [-1]},
        "mlp_only_layers=[-1] names layer -1; there are layers 0 to 1",
    ),
    "normalisation as a number": ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 is neither true nor false"),
    "Mixtral without normalisation": (
        "mixtral",
        {"norm_topk_prob": False},
        "norm_topk_prob=False: Mixtral always divides a token's weights by their sum",
    ),
    "a factor": (
        "qwen3_moe",
        {"routed_scaling_factor": 2.5},
        "routed_scaling_factor=2.5: a factor of the experts' sum is not computed by this family",
    ),
    "a window without a size": (
        "qwen3_moe",
        {"use_sliding_window": True},
        "use_sliding_window=True without sliding_window; a count of tokens is needed",
    ),
    "bias": ("qwen2_moe", {"qkv_bias": "yes"}, "qkv_bias='yes' is neither true nor false"),
    "heads": (
        "mixtral",
        {"num_attention_heads": 3},
        "num_attention_heads=3 is not a multiple of num_key_value_heads=2",
    ),
    "two families": (
        "qwen3_moe",
        {"model_type": "mixtral"},
        "architectures=['Qwen3MoeForCausalLM'] and model_type='mixtral' contradict each other: they are Mixtral and Qwen3-MoE",
    ),
    "no family": (
        "mixtral",
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "architectures=['LlamaForCausalLM'] and model_type='llama' name no Qwen2-MoE, Qwen3-MoE or Mixtral decoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "text"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_met_is_refused_by_key_and_value(config_of, model_type, changes, text):
    """M-18: one key wrong, one sentence; it says what stands there and what would do."""
    with pytest.raises(ConfigError) as caught:
        MoeFamily().blueprint(config_of(model_type, **changes))
    assert str(caught.value) == text


@pytest.mark.parametrize("key", MoeFamily.keys)
def test_every_key_is_found_and_leads_to_a_blueprint(config_of, key):
    """By model_type or by architecture; one whose name ends in Model has no head."""
    model_type = {"qwen2": "qwen2_moe", "qwen3": "qwen3_moe", "mixtr": "mixtral"}[key.lower()[:5]]
    named = {"model_type": key} if key == model_type else {"architectures": [key], "model_type": None}
    config = config_of(model_type, **{"architectures": None} | named)
    assert ("lm_head" in nodes(config)) == (not key.endswith("Model"))
    assert key in registry_of(MoeFamily)["model"]


def test_adapters_are_offered_for_attention_alone():
    assert MoeFamily().lora_targets() == {
        "q_proj": "self_attn.qkv_proj.q",
        "k_proj": "self_attn.qkv_proj.k",
        "v_proj": "self_attn.qkv_proj.v",
        "o_proj": "self_attn.o_proj",
    }


def test_no_load_options_are_set(config_of):
    assert MoeFamily().defaults(config_of("mixtral")) == {}


def test_the_family_plans_where_torch_is_absent(config_of):
    """Blueprint, names and drops import no torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from steelyard_model_qwen3_moe.family import MoeFamily\n"
        f"config = {config_of('mixtral')!r}\n"
        "family = MoeFamily()\n"
        "nodes = family.blueprint(config).nodes\n"
        "mapping = family.mapping(config)\n"
        "assert mapping.names(nodes[0], '', None)\n"
        "assert mapping.drops(config) == ()\n"
    )
    paths = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=paths)
    assert done.returncode == 0, done.stderr
