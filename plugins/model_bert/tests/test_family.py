"""The family's answers from a config alone: nodes, sizes, and the values that it refuses."""

import subprocess
import sys

import pytest

import steelyard
from steelyard.plugin import ConfigError, Embedding, FillWith, Linear, Norm, Part, Placement
from steelyard_model_bert.config import read_config
from steelyard_model_bert.family import BertFamily
from support.checkpoints import toy_b
from support.planned import error_texts, registry_of

ROBERTA = {"architectures": ["RobertaModel"], "model_type": "roberta", "pad_token_id": 1}


def nodes(config):
    return {node.stem: node for node in BertFamily().blueprint(config).nodes}


def test_a_layer_is_four_linears_and_two_norms(small):
    found = nodes(small)
    stem = "encoder.layer.1"
    hidden = (Part("", 8),)
    assert [node for node in found.values() if getattr(node, "layer", None) == 1] == [
        Linear(
            f"{stem}.attention.qkv", 8, (Part("q", 8, 2), Part("k", 8, 2, kv=True), Part("v", 8, 2, kv=True)),
            Placement.COLWISE, bias=True, layer=1,
        ),
        Linear(f"{stem}.attention.output.dense", 8, hidden, Placement.ROWWISE, bias=True, layer=1),
        Norm(f"{stem}.attention.output.LayerNorm", 8, "layer", 1e-7, bias=True, layer=1),
        Linear(f"{stem}.intermediate.dense", 8, (Part("", 16),), Placement.COLWISE, bias=True, layer=1),
        Linear(f"{stem}.output.dense", 16, hidden, Placement.ROWWISE, bias=True, layer=1),
        Norm(f"{stem}.output.LayerNorm", 8, "layer", 1e-7, bias=True, layer=1),
    ]  # fmt: skip


def test_tables_are_cut_along_the_hidden_size(small):
    """B-06: word, position and token-type tables; only the last may be absent, and then it is zeros (B-05)."""
    assert list(nodes(small).values())[:4] == [
        Embedding("embeddings.word_embeddings", 11, 8, Placement.ROWWISE, rows_key="vocab_size"),
        Embedding("embeddings.position_embeddings", 6, 8, Placement.ROWWISE, rows_key="max_position_embeddings"),
        Embedding(
            "embeddings.token_type_embeddings", 2, 8, Placement.ROWWISE, FillWith(0.0), rows_key="type_vocab_size"
        ),
        Norm("embeddings.LayerNorm", 8, "layer", 1e-7, bias=True),
    ]


@pytest.mark.parametrize(("stated", "rows"), [(0, 1), (1, 1), (2, 2), (4, 4)])
def test_the_token_type_table_has_at_least_one_row(stated, rows, small):
    """B-05: [max(type_vocab_size, 1), H]."""
    assert nodes(small | {"type_vocab_size": stated})["embeddings.token_type_embeddings"].vocabulary == rows


@pytest.mark.parametrize(
    ("architecture", "has_pooler"),
    [
        ("BertModel", True),
        ("BertForSequenceClassification", True),
        ("BertForMaskedLM", False),
        ("RobertaModel", True),
        ("RobertaForMaskedLM", False),
        ("RobertaForSequenceClassification", False),
        ("XLMRobertaModel", True),
        ("XLMRobertaForMaskedLM", False),
        ("XLMRobertaForSequenceClassification", False),
    ],
)
def test_the_pooler_belongs_to_the_architecture(architecture, has_pooler, small):
    """O-32: where there is one it is optional, since ``add_pooling_layer`` is not in a config."""
    config = {key: value for key, value in small.items() if key != "model_type"} | {"architectures": [architecture]}
    pooler = nodes(config).get("pooler.dense")
    wanted = Linear("pooler.dense", 8, (Part("", 8),), Placement.REPLICATED, bias=True, absent="skip")
    assert pooler == (wanted if has_pooler else None)


@pytest.mark.parametrize("key", BertFamily.keys)
def test_every_key_is_found_and_leads_to_a_blueprint(key, small):
    """B-01: by model_type or by architecture."""
    sizes = {
        name: value for name, value in small.items() if name not in ("architectures", "model_type", "pad_token_id")
    }
    named = {"model_type": key} if key in ("bert", "roberta", "xlm-roberta") else {"architectures": [key]}
    positions = read_config(sizes | named).first_position
    assert positions == (0 if key.lower().startswith("bert") else 2)
    assert key in registry_of(BertFamily)["model"]


def test_the_family_plans_where_torch_is_absent(small):
    """B-01: blueprint, names and drops import no torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from steelyard_model_bert.family import BertFamily\n"
        f"config = {small!r}\n"
        "family = BertFamily()\n"
        "nodes = family.blueprint(config).nodes\n"
        "assert family.mapping(config).names(nodes[0], '', None) and family.mapping(config).drops(config)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=child_env())
    assert done.returncode == 0, done.stderr


def child_env():
    return {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}


REFUSED = {
    "no hidden size": ({"hidden_size": None}, "hidden_size is null; a count is needed"),
    "heads": ({"num_attention_heads": 3}, "hidden_size=8 is not a multiple of num_attention_heads=3"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads=0 is not a count of at least 1"),
    "layers as text": ({"num_hidden_layers": "2"}, "num_hidden_layers='2' is not a count of at least 1"),
    "a true size": ({"intermediate_size": True}, "intermediate_size=True is not a count of at least 1"),
    "negative types": ({"type_vocab_size": -1}, "type_vocab_size=-1 is not a count of at least 0"),
    "relative positions": (
        {"position_embedding_type": "relative_key_query"},
        "position_embedding_type='relative_key_query': only 'absolute' is computed",
    ),
    "activation": (
        {"hidden_act": "mish"},
        "hidden_act='mish' is not computed; known are gelu, gelu_python, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, "
        "silu, swish",
    ),
    "decoder": ({"is_decoder": True}, "is_decoder=True: a causal decoder is not computed by this family"),
    "cross-attention": (
        {"add_cross_attention": True},
        "add_cross_attention=True: cross-attention is not computed by this family",
    ),
    "eps": ({"layer_norm_eps": 0}, "layer_norm_eps=0 is not a positive number"),
    "eps as text": ({"layer_norm_eps": "1e-12"}, "layer_norm_eps='1e-12' is not a positive number"),
    "no position left": (
        ROBERTA | {"max_position_embeddings": 2},
        "max_position_embeddings=2 leaves no position for a token: with pad_token_id=1 positions start at 2",
    ),
    "no padding token": (ROBERTA | {"pad_token_id": None}, "pad_token_id is null; a count is needed"),
    "two families": (
        {"model_type": "roberta"},
        "architectures=['BertModel'] and model_type='roberta' contradict each other: "
        "BERT and RoBERTa count positions differently",
    ),
    "no family": (
        {"architectures": None, "model_type": "t5"},
        "architectures=[] and model_type='t5' name no BERT or RoBERTa encoder",
    ),
}


@pytest.mark.parametrize(("changes", "text"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_met_is_refused_by_key_and_value(changes, text, small):
    """M-18, B-09: an activation lists the known ones; a table too small for any token."""
    with pytest.raises(ConfigError) as caught:
        BertFamily().blueprint(small | changes)
    assert str(caught.value) == text


SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_a_size_has_no_default(key, small):
    config = {name: value for name, value in small.items() if name != key}
    with pytest.raises(ConfigError) as caught:
        BertFamily().blueprint(config)
    assert str(caught.value) == f"{key} is absent; a count is needed"


def test_configs_of_2019_get_the_published_defaults(small):
    made = read_config({key: small[key] for key in (*SIZES, "model_type")})
    assert (made.activation, made.eps, made.token_types, made.max_positions) == ("gelu", 1e-12, 2, 6)
    assert read_config({key: small[key] for key in SIZES} | {"model_type": "xlm-roberta"}).max_positions == 4


def test_roberta_starts_behind_the_padding_token(small):
    """B-09: of 514 rows, 512 are positions."""
    made = read_config(small | ROBERTA | {"max_position_embeddings": 514})
    assert (made.first_position, made.max_positions) == (2, 512)


def test_a_position_table_of_another_size_is_an_error_at_load(tmp_path):
    """B-09: a table of 32 rows cannot serve 512 positions; nothing is read."""
    folder = toy_b(tmp_path, config={"max_position_embeddings": 512})
    plan = steelyard.plan(folder, target="cpu", registry=registry_of(BertFamily))
    assert error_texts(plan) == [
        "embeddings.position_embeddings.weight (model.safetensors): stored shape [32, 64], embeddings.position_embeddings "
        "expects [512, 64] = [out, in] with out=512 (the config's max_position_embeddings), in=64 (tp_size=1, ep_size=1, moe_tp=1)"
    ]


def test_more_ranks_than_the_heads_allow_are_refused(tmp_path, small, tensors_of, write, registry):
    """B-06: 12 heads do not go out over 8 ranks, though 384 columns would divide."""
    config = small | {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 1}
    plan = steelyard.plan(write(tmp_path, config, tensors_of(config)), target="cpu", tp=8, registry=registry)
    assert error_texts(plan) == [
        "encoder.layer.0.attention.qkv: 12 query heads do not divide by tp 8 (q_heads=12, kv_heads=12, tp=8); "
        "tp sizes that fit: 1, 2, 3, 4, 6, 12"
    ]


def test_a_number_of_layers_that_no_encoder_has_is_refused_before_nodes_are_made(small):
    """X-22: a damaged count must not fill memory."""
    with pytest.raises(ConfigError) as caught:
        BertFamily().blueprint(small | {"num_hidden_layers": 10**9})
    assert str(caught.value) == "num_hidden_layers=1000000000 is past the 4096 that any model has; it is damaged"
