"""The family's answers from a config alone: nodes, sizes, what each model type adds, and the values that it refuses."""

import subprocess
import sys

import pytest
import transformers

from steelyard.plugin import (
    AttentionState,
    ConfigError,
    Embedding,
    Linear,
    Norm,
    Part,
    Placement,
    Tie,
    decoder,
)
from steelyard_model_llama.config import ARCHITECTURES, MODEL_TYPES, read_config
from steelyard_model_llama.consolidated import ConsolidatedMapping
from steelyard_model_llama.family import LlamaFamily
from support.planned import registry_of


def of(small, model_type, **changes):
    """Return a config of another model type."""
    architecture = next(name for name, its in ARCHITECTURES.items() if its == model_type)
    return small | {"architectures": [architecture], "model_type": model_type} | changes


def nodes(config):
    return {node.stem: node for node in LlamaFamily().blueprint(config).nodes}


def test_a_layer_is_four_linears_two_norms_and_a_state(small):
    stem, hidden = "layers.1", (Part("", 12),)
    qkv = (Part("q", 16, 4), Part("k", 8, 2, kv=True), Part("v", 8, 2, kv=True))
    assert [node for node in nodes(small).values() if getattr(node, "layer", None) == 1] == [
        Norm(f"{stem}.input_layernorm", 12, "rms", 1e-5, layer=1),
        Linear(f"{stem}.self_attn.qkv_proj", 12, qkv, Placement.COLWISE, layer=1),
        AttentionState(f"{stem}.self_attn.state", 4, 2, 4, layer=1),
        Linear(f"{stem}.self_attn.o_proj", 16, hidden, Placement.ROWWISE, layer=1),
        Norm(f"{stem}.post_attention_layernorm", 12, "rms", 1e-5, layer=1),
        Linear(f"{stem}.mlp.gate_up_proj", 12, (Part("gate", 16), Part("up", 16)), Placement.COLWISE, layer=1),
        Linear(f"{stem}.mlp.down_proj", 16, hidden, Placement.ROWWISE, layer=1),
    ]


def test_the_vocabulary_is_cut_alike_in_embedding_and_head(small):
    """R036: both may be padded, and a tie joins them."""
    made = LlamaFamily().blueprint(small | {"tie_word_embeddings": True})
    assert made.nodes[0] == Embedding("embed_tokens", 10, 12, Placement.COLWISE, rows_key="vocab_size")
    assert made.nodes[-2:] == (
        Norm("norm", 12, "rms", 1e-5),
        Linear("lm_head", 12, (Part("", 10, padded=True),), Placement.COLWISE),
    )
    assert made.ties == (Tie("lm_head", "embed_tokens"),)
    assert LlamaFamily().blueprint(small).ties == ()


def biases(config):
    """Return the Linears of the first layer that have biases."""
    return [
        stem.rpartition(".")[2] for stem, node in nodes(config).items() if ".0." in stem and getattr(node, "bias", 0)
    ]


BIASES = {
    "llama": ("llama", {}, []),
    "llama attention": ("llama", {"attention_bias": True}, ["qkv_proj", "o_proj"]),
    "llama mlp": ("llama", {"mlp_bias": True}, ["gate_up_proj", "down_proj"]),
    "mistral": ("mistral", {"attention_bias": True, "mlp_bias": True}, []),
    "qwen2": ("qwen2", {"attention_bias": False, "mlp_bias": True}, ["qkv_proj"]),
    "qwen3": ("qwen3", {"mlp_bias": True}, []),
    "qwen3 attention": ("qwen3", {"attention_bias": True}, ["qkv_proj", "o_proj"]),
}


@pytest.mark.parametrize(("model_type", "changes", "found"), BIASES.values(), ids=BIASES)
def test_biases_are_those_of_the_model_type(small, model_type, changes, found):
    """Keys that a type does not know change nothing, as in transformers."""
    assert biases(of(small, model_type, **changes)) == found


def test_only_qwen3_normalises_heads(small):
    for model_type in MODEL_TYPES:
        norms = [node for stem, node in nodes(of(small, model_type)).items() if stem.endswith(("q_norm", "k_norm"))]
        assert [node.size for node in norms] == [4] * (4 if model_type == "qwen3" else 0)


LEFT_OUT = (
    "head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "sliding_window", "max_window_layers",
    "use_sliding_window", "tie_word_embeddings", "hidden_act",
)  # fmt: skip


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_a_config_leaves_out_is_what_transformers_takes(small, model_type):
    """Every default against its configuration class; theta, biases and windows too."""
    stated = {key: value for key, value in of(small, model_type).items() if key not in LEFT_OUT}
    stated |= {"num_attention_heads": 32, "hidden_size": 64}
    theirs = transformers.AutoConfig.for_model(
        model_type, **{key: stated[key] for key in stated if key != "model_type"}
    )
    made = read_config(stated)
    assert made.kv_heads == theirs.num_key_value_heads
    assert made.head_dim == (theirs.to_dict().get("head_dim") or 2)
    assert made.max_positions == theirs.max_position_embeddings
    assert made.eps == theirs.rms_norm_eps
    assert made.rope.theta == theirs.rope_parameters["rope_theta"]
    assert made.activation == theirs.hidden_act
    assert made.ties_head == theirs.tie_word_embeddings
    assert made.windows == ((theirs.sliding_window if model_type == "mistral" else None),) * 2
    assert made.drafts == 0
    assert not made.is_nested


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None] * 4),
        ({"use_sliding_window": True}, [None, None, 5, 5]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [5] * 4),
        ({"use_sliding_window": True, "max_window_layers": 9}, [None] * 4),
        ({"use_sliding_window": True, "sliding_window": None}, [None] * 4),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", *["full_attention"] * 3]}, [5, *[None] * 3]),
        ({"layer_types": ["full_attention"] * 4}, [None] * 4),
        ({"layer_types": None}, [None] * 4),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_of_qwen_are_those_of_transformers(small, model_type, changes, windows):
    stated = of(small, model_type, num_hidden_layers=4, sliding_window=5, max_window_layers=2) | changes
    theirs = transformers.AutoConfig.for_model(
        model_type, **{key: stated[key] for key in stated if key != "model_type"}
    )
    wanted = [theirs.sliding_window if one == "sliding_attention" else None for one in theirs.layer_types]
    assert list(read_config(stated).windows) == wanted == windows


@pytest.mark.parametrize("changes", [{}, {"sliding_window": None}, {"sliding_window": 7}])
def test_windows_of_mistral_are_on_every_layer(small, changes):
    """A window that is null is none; one that is absent is 4096."""
    theirs = transformers.MistralConfig(**changes)
    assert read_config(of(small, "mistral", **changes)).windows == (theirs.sliding_window,) * 2


def test_llama_has_no_window(small):
    assert read_config(small | {"sliding_window": 4, "use_sliding_window": True}).windows == (None, None)


@pytest.mark.parametrize("key", LlamaFamily.keys)
def test_every_key_is_found_and_leads_to_a_blueprint(key, small):
    """By model_type or by architecture alone; an architecture that ends in Model has no head."""
    sizes = {name: value for name, value in small.items() if name not in ("architectures", "model_type")}
    named = {"model_type": key} if key in MODEL_TYPES else {"architectures": [key]}
    assert ("lm_head" in nodes(sizes | named)) == (not key.endswith("Model"))
    assert key in registry_of(LlamaFamily)["model"]
    assert LlamaFamily().blueprint(sizes | named).notes == ()


def test_the_family_sets_no_options_and_offers_its_projections_to_adapters(small):
    assert LlamaFamily().defaults(small) == {}
    parts = {
        f"{stem.partition('.0.')[2]}.{part.name}".strip(".")
        for stem, node in nodes(small).items()
        if ".0." in stem
        for part in getattr(node, "parts", ())
    }
    assert set(LlamaFamily().lora_targets().values()) == parts
    assert LlamaFamily().lora_targets() == decoder.LORA_TARGETS


def test_the_family_plans_where_torch_is_absent(small):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from steelyard_model_llama.family import LlamaFamily\n"
        "from steelyard_model_llama.consolidated import ConsolidatedMapping\n"
        f"config = {small!r}\n"
        "family = LlamaFamily()\n"
        "for mapping in (family.mapping(config), ConsolidatedMapping()):\n"
        "    assert mapping.names(family.blueprint(config).nodes[0], '', None)\n"
        "    mapping.drops(config)\n"
    )
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_foreign_model_type_beside_a_known_architecture_is_a_note(small):
    """The architecture decides; early Yi and its like are Llamas under a name of their own."""
    assert LlamaFamily().blueprint(small | {"model_type": "Yi"}).notes == (
        "architectures=['LlamaForCausalLM'] and model_type='Yi': the architecture decides, and the model is computed as llama",
    )


def test_a_wrapper_takes_sizes_from_its_text_model_and_the_rest_from_itself(small):
    """R060: the flag of the part that owns the head decides, and a contradiction is a note."""
    text = {key: value for key, value in small.items() if key != "architectures"}
    wrapper = {"architectures": ["LlamaForCausalLM"], "model_type": "wrapper", "tie_word_embeddings": True}
    silent = LlamaFamily().blueprint(wrapper | {"text_config": text})
    assert silent.ties == (Tie("lm_head", "embed_tokens"),)
    assert silent.notes == ()
    stated = LlamaFamily().blueprint(wrapper | {"text_config": text | {"tie_word_embeddings": False}})
    assert stated.ties == ()
    assert stated.notes == (
        "tie_word_embeddings is True at the top level and False in text_config; text_config, which owns the head, decides",
    )
    assert read_config(wrapper | {"text_config": text}).is_nested
    assert not read_config(small | {"text_config": None}).is_nested


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
LAYER_TYPES = ["full_attention", "sliding_attention"]
REFUSED = {
    "half a head rotated": (
        {"partial_rotary_factor": 0.5, "head_dim": 8},
        "partial_rotary_factor leaves 4 of 8 values of a head as they are; this family's models rotate whole heads",
    ),
    "no hidden size": ({"hidden_size": None}, "hidden_size is null; a count is needed"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0 is not a count of at least 1"),
    "heads": (
        {"hidden_size": 10, "head_dim": None},
        "hidden_size=10 is not a multiple of num_attention_heads=4, and no head_dim is set",
    ),
    "pairs": ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
    "pairs as text": ({"num_key_value_heads": "2"}, "num_key_value_heads='2' is not a count of at least 1"),
    "no pairs": ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not a count of at least 1"),
    "a head of none": ({"head_dim": 0}, "head_dim=0 is not a count of at least 1"),
    "an odd head": (
        {"head_dim": 3},
        "head_dim=3 rotates 3 values of a head; rope type 'default' needs an even number of at least 2",
    ),
    "layers as text": ({"num_hidden_layers": "2"}, "num_hidden_layers='2' is not a count of at least 1"),
    "too many layers": (
        {"num_hidden_layers": 10**9},
        "num_hidden_layers=1000000000 is past the 4096 that any model has; it is damaged",
    ),
    "too many drafts": (
        {"num_nextn_predict_layers": 10**9},
        "num_nextn_predict_layers=1000000000 is past the 4096 that any model has; it is damaged",
    ),
    "a true size": ({"intermediate_size": True}, "intermediate_size=True is not a count of at least 1"),
    "no words": ({"vocab_size": None}, "vocab_size is null; a count is needed"),
    "null positions": ({"max_position_embeddings": None}, "max_position_embeddings is null; a count is needed"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps=0 is not a positive number"),
    "null eps": ({"rms_norm_eps": None}, "rms_norm_eps is null; a positive number is needed"),
    "activation": (
        {"hidden_act": "mish"},
        "hidden_act='mish' is not computed; known are silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu",
    ),
    "bias": ({"attention_bias": "yes"}, "attention_bias='yes' is neither true nor false"),
    "mlp bias": ({"mlp_bias": 1}, "mlp_bias=1 is neither true nor false"),
    "tie": ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' is neither true nor false"),
    "rope": (
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        "rope_scaling.rope_type='longrope' is not computed; computed are default, linear, dynamic, llama3, yarn",
    ),
    "text model": ({"text_config": [1]}, "text_config=[1] is not an object"),
    "both ways": (
        {"is_causal": False},
        "is_causal=False: attention to the tokens that follow is not computed by this family",
    ),
    "capped scores": (
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0: a cap of attention scores is not computed by this family",
    ),
    "scaled scores": (
        {"attention_multiplier": 1.0},
        "attention_multiplier=1.0: a scale of attention scores is not computed by this family",
    ),
    "scaled embeddings": (
        {"embedding_multiplier": 12},
        "embedding_multiplier=12: a scale of embeddings is not computed by this family",
    ),
    "layers without positions": (
        {"no_rope_layers": [1, 0]},
        "no_rope_layers=[1, 0]: a layer without rotary positions is not computed by this family",
    ),
    "cross-attention": (
        {"add_cross_attention": True},
        "add_cross_attention=True: cross-attention is not computed by this family",
    ),
    "a window of none": (MISTRAL | {"sliding_window": 0}, "sliding_window=0 is not a count of at least 1"),
    "a switch that Mistral lacks": (
        MISTRAL | {"use_sliding_window": False},
        "use_sliding_window=False and sliding_window=4096 contradict each other: a Mistral has no such switch; "
        "say sliding_window=null for a model without a window",
    ),
    "a switch of text": (QWEN2 | {"use_sliding_window": "no"}, "use_sliding_window='no' is neither true nor false"),
    "a border of text": (
        QWEN2 | {"use_sliding_window": True, "max_window_layers": "1"},
        "max_window_layers='1' is not a count of at least 0",
    ),
    "too few layer types": (
        QWEN2 | {"layer_types": ["full_attention"]},
        "layer_types=['full_attention'] is not a list of 2 names, one a layer",
    ),
    "an unknown layer type": (
        QWEN2 | {"layer_types": ["full_attention", "linear_attention"]},
        "layer_types names 'linear_attention'; computed are full_attention, sliding_attention",
    ),
    "layer types without a window": (
        QWEN2 | {"layer_types": LAYER_TYPES},
        f"layer_types={LAYER_TYPES} contradicts the other keys, by which no window is set",
    ),
    "layer types of Mistral": (
        MISTRAL | {"layer_types": LAYER_TYPES},
        f"layer_types={LAYER_TYPES} contradicts the other keys, by which every layer has the window of 4096",
    ),
    "layer types of Llama": (
        {"layer_types": LAYER_TYPES},
        f"layer_types={LAYER_TYPES} contradicts the other keys, by which no window is set",
    ),
    "two types": (
        {"model_type": "qwen2"},
        "architectures=['LlamaForCausalLM'] and model_type='qwen2' contradict each other: llama, qwen2 differ in biases, "
        "norms and windows",
    ),
    "two architectures": (
        {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]},
        "architectures=['LlamaForCausalLM', 'Qwen3ForCausalLM'] and model_type='llama' contradict each other: llama, qwen3 "
        "differ in biases, norms and windows",
    ),
    "a wrapper of another type": (
        {"text_config": {"model_type": "mistral"}},
        "architectures=['LlamaForCausalLM'] and model_type='llama' and 'mistral' contradict each other: llama, mistral "
        "differ in biases, norms and windows",
    ),
    "no type": (
        {"architectures": None, "model_type": "t5"},
        "architectures=[] and model_type='t5' name no decoder of Llama, Mistral, Qwen2 or Qwen3",
    ),
}


@pytest.mark.parametrize(("changes", "text"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_met_is_refused_by_key_and_value(changes, text, small):
    """M-18, X-22, P-09."""
    with pytest.raises(ConfigError) as caught:
        LlamaFamily().blueprint(small | changes)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"]
)
def test_a_size_has_no_default(key, small):
    with pytest.raises(ConfigError) as caught:
        LlamaFamily().blueprint({name: value for name, value in small.items() if name != key})
    assert str(caught.value) == f"{key} is absent; a count is needed"


NEUTRAL = {
    "logits_scaling": 1.0, "embedding_multiplier": 1, "residual_multiplier": 1.0, "attn_logit_softcapping": None,
    "no_rope_layers": [], "is_causal": True, "add_cross_attention": False, "attention_multiplier": None,
    "pretraining_tp": 2, "rope_scaling": None,
}  # fmt: skip


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_value_that_changes_no_number_is_taken(key, small):
    assert read_config(small | {key: NEUTRAL[key]}) == read_config(small)


def test_further_names_know_no_norms_of_heads(small):
    """A Qwen3 has no release under these names; nothing is invented for it."""
    norm = nodes(of(small, "qwen3"))["layers.0.self_attn.q_norm"]
    assert ConsolidatedMapping().names(norm, "", None) == ()
