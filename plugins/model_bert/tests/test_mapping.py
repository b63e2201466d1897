"""The mapping on plans: which stored name fills which node, what is left out and why, and what is an error."""

import numpy as np
import pytest

import steelyard
from steelyard.plugin import PlanError
from support.checkpoints import TOY_B_CONFIG as TOY
from support.checkpoints import encode, toy_b, toy_b_shapes, toy_b_tensors, values, write_config, write_shards
from support.planned import error_texts, run, texts

PREFIXES = ["", "bert.", "roberta.", "xlm_roberta."]
ROBERTA_CLASSIFIER = TOY | {
    "architectures": ["RobertaForSequenceClassification"], "model_type": "roberta", "pad_token_id": 1,
}  # fmt: skip
MASKED = TOY | {"architectures": ["BertForMaskedLM"]}
LAYER = "encoder.layer.0."


@pytest.fixture
def planned(tmp_path, registry):
    """Return a function that writes tensors, plans their load and returns the plan."""

    def planned(tensors, config=TOY, *, tp=1, shards=1, name="model"):
        folder = tmp_path / name
        write_config(folder, config)
        write_shards(folder, tensors, shards)
        return steelyard.plan(folder, target="cpu", tp=tp, registry=registry)

    return planned


def array(stored):
    """Return a stored tensor's numbers; a float array stands for itself."""
    code, shape, raw = stored
    assert code == "F32"
    return np.frombuffer(raw, np.float32).reshape(shape)


def filled(plan, tensors, rank=0):
    """Return (stem, buffer) to what a rank's steps put there."""
    found = run(plan.check(), rank, lambda name, shape: array(tensors[name]).astype(np.int64))
    return {(stem, buffer): piece for (stem, _, buffer), piece in found.items()}


def same(a, b):
    return a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)


def stored_float(*shape):
    return encode(np.zeros(shape), "F32")


def test_each_stored_tensor_fills_its_own_node(planned):
    """B-08: q, k, v lie behind one another; everything else is the tensor of the node's own name."""
    tensors = toy_b_tensors()
    found = filled(planned(tensors), tensors)
    for ending in ("weight", "bias"):
        parts = [array(tensors[f"{LAYER}attention.self.{name}.{ending}"]) for name in ("query", "key", "value")]
        assert (found.pop((f"{LAYER}attention.qkv", ending)) == np.concatenate(parts)).all()
    others = {
        (name.rpartition(".")[0], name.rpartition(".")[2]): name for name in toy_b_shapes() if ".self." not in name
    }
    assert found.keys() == others.keys()
    for place, name in others.items():
        assert (found[place] == array(tensors[name])).all(), name


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_gives_the_same_encoder(planned, prefix):
    """B-03, R123: names behind the model's own attribute, or bare."""
    bare, prefixed = toy_b_tensors(), toy_b_tensors(prefix=prefix)
    assert same(filled(planned(bare), bare), filled(planned(prefixed, name="prefixed"), prefixed))


def test_a_classifiers_head_is_listed_with_its_reason(planned):
    """R123, B-04: the encoder of a RoBERTa classifier; its four head tensors are left out by rule."""
    encoder = toy_b_tensors(prefix="roberta.", pooler=False)
    head = {
        "classifier.dense.weight": stored_float(64, 64), "classifier.dense.bias": stored_float(64),
        "classifier.out_proj.weight": stored_float(2, 64), "classifier.out_proj.bias": stored_float(2),
    }  # fmt: skip
    plan = planned(encoder | head, ROBERTA_CLASSIFIER)
    bare = toy_b_tensors(pooler=False)
    expected = filled(planned(bare, name="bare"), bare)
    assert same(filled(plan, encoder), expected)
    assert plan.findings == ()
    assert plan.dropped == dict.fromkeys(head, "a classifier's head; this model is the encoder")


def test_masked_lm_names_load_without_head_and_pooler(planned):
    """B-04: what transformers and the original release store beside the encoder."""
    extras = {
        "bert.embeddings.position_ids": np.arange(32)[None],
        "bert.embeddings.token_type_ids": np.zeros((1, 32), np.int64),
        "bert.pooler.dense.weight": stored_float(64, 64),
        "bert.pooler.dense.bias": stored_float(64),
        "cls.predictions.bias": stored_float(50),
        "cls.predictions.transform.dense.weight": stored_float(64, 64),
        "cls.predictions.transform.LayerNorm.gamma": stored_float(64),
        "cls.seq_relationship.weight": stored_float(2, 64),
        "lm_head.decoder.weight": stored_float(50, 64),
        "classifier.weight": stored_float(2, 64),
    }
    plan = planned(toy_b_tensors(prefix="bert.", pooler=False) | extras, MASKED)
    assert plan.findings == ()
    head = "the pretraining head (masked words, next sentence); this model is the encoder"
    assert plan.dropped == {
        "bert.embeddings.position_ids": "a buffer that counts positions; they are computed",
        "bert.embeddings.token_type_ids": "a buffer of zeros; token types come with the input",
        "bert.pooler.dense.bias": "the architecture has no pooler",
        "bert.pooler.dense.weight": "the architecture has no pooler",
        "classifier.weight": "a classifier's head; this model is the encoder",
        "cls.predictions.bias": head,
        "cls.predictions.transform.LayerNorm.gamma": head,
        "cls.predictions.transform.dense.weight": head,
        "cls.seq_relationship.weight": head,
        "lm_head.decoder.weight": "the masked-word head; this model is the encoder",
    }


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layer.0.foo.weight",
        "encoder.layer.1.output.dense.weight",
        "encoder.layer.0.attention.self.query.gamma",
        "encoder.layer.0.classifier.weight",
        "embeddings.position_idx",
        "bert.embeddings.position_idx",
        "embeddings.position_ids.weight",
        "encoder.embeddings.position_ids",
        "electra.embeddings.position_ids",
        "embeddings.LayerNorm.scale",
        "pooler.dense.scale",
        "classifiers.weight",
        "qa_outputs.weight",
    ],
)
def test_any_other_name_is_unexpected(planned, name):
    """B-04, L-18, R127: a misspelt buffer and an unknown tensor are fatal, by name."""
    plan = planned(toy_b_tensors() | {name: stored_float(64, 64)})
    text = f"unexpected tensor {name} (model.safetensors): no rule of the model uses or drops it"
    assert error_texts(plan) == [text]
    with pytest.raises(PlanError, match="no rule of the model uses or drops it"):
        plan.check()


def test_a_buffer_of_positions_is_in_the_skip_list(planned):
    """R127: an integer buffer is no parameter."""
    plan = planned(toy_b_tensors(prefix="bert.") | {"bert.embeddings.position_ids": np.arange(32)[None]})
    assert plan.check().dropped == {"bert.embeddings.position_ids": "a buffer that counts positions; they are computed"}


NORMS = ["embeddings.LayerNorm", f"{LAYER}attention.output.LayerNorm", f"{LAYER}output.LayerNorm"]
OLD = {"weight": "gamma", "bias": "beta"}


def renamed(tensors, names):
    """Return tensors with some of the norms' tensors under their old names."""
    endings = {f"{stem}.{ending}": f"{stem}.{OLD[ending]}" for stem, ending in names}
    return {endings.get(name, name): stored for name, stored in tensors.items()}


MIXES = {
    "all old": [(stem, ending) for stem in NORMS for ending in OLD],
    "one norm": [(NORMS[1], "weight"), (NORMS[1], "bias")],
    "gamma beside bias": [(stem, "weight") for stem in NORMS],
    "weight beside beta": [(NORMS[0], "bias"), (NORMS[2], "bias")],
}


@pytest.mark.parametrize("names", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_norms_load_under_old_names_new_names_and_both_mixed(planned, names, prefix):
    """B-02, R125: decided for each tensor, never by one switch for the checkpoint."""
    new = toy_b_tensors()
    mixed = {prefix + name: stored for name, stored in renamed(new, names).items()}
    assert same(filled(planned(new), new), filled(planned(mixed, name="mixed"), mixed))


@pytest.mark.parametrize("stem", NORMS)
@pytest.mark.parametrize("ending", OLD)
def test_both_names_of_one_norm_are_a_duplicate(planned, stem, ending):
    """B-02, R125: even if they are equal; which of the two is meant is not guessed."""
    plan = planned(toy_b_tensors() | {f"{stem}.{OLD[ending]}": stored_float(64)})
    assert error_texts(plan) == [
        f"duplicate tensors {stem}.{ending} and {stem}.{OLD[ending]}: both are {stem}'s {ending}; keep one of them (model.safetensors)"
    ]


def test_one_tensor_behind_two_prefixes_is_a_duplicate(planned):
    """B-03: two encoders in one file are not mixed."""
    plan = planned(toy_b_tensors() | {"bert.embeddings.word_embeddings.weight": stored_float(50, 64)})
    assert texts(plan, "duplicate") == [
        "duplicate tensors embeddings.word_embeddings.weight and bert.embeddings.word_embeddings.weight: both are "
        "embeddings.word_embeddings's weight; keep one of them (model.safetensors)"
    ]


@pytest.mark.parametrize("name", [name for name in toy_b_shapes() if "token_type" not in name])
def test_every_other_tensor_is_mandatory(planned, name):
    """B-05, R125, L-19: a norm left at 1 and 0 would look reasonable, so its absence is an error; so is half a pooler."""
    tensors = toy_b_tensors()
    del tensors[name]
    (text,) = error_texts(planned(tensors))
    assert text.startswith(f"missing tensor {name} (also looked for ")


def test_a_missing_token_type_table_is_zeros(planned):
    """B-05: two rows of this rank's columns."""
    tensors = toy_b_tensors()
    del tensors["embeddings.token_type_embeddings.weight"]
    plan = planned(tensors, tp=2)
    assert [finding.text for finding in plan.findings] == [
        "embeddings.token_type_embeddings is not stored in full; it is filled: weight = 0"
    ]
    table = filled(plan, tensors, rank=1)["embeddings.token_type_embeddings", "weight"]
    assert table.shape == (2, 32)
    assert not table.any()


def test_a_missing_pooler_is_left_out_whole(planned):
    """O-32: an encoder saved with ``add_pooling_layer=False``."""
    plan = planned(toy_b_tensors(pooler=False)).check()
    assert plan.skipped == ("pooler.dense",)


def test_a_token_type_table_of_another_size_is_an_error(planned):
    """R129: [1, 64] for type_vocab_size 2 is neither copied in part nor broadcast."""
    name = "embeddings.token_type_embeddings.weight"
    plan = planned(toy_b_tensors() | {name: encode(values(0, (1, 64)), "F32")})
    assert error_texts(plan) == [
        f"{name} (model.safetensors): stored shape [1, 64], embeddings.token_type_embeddings expects [2, 64] = [out, in] "
        "with out=2 (the config's type_vocab_size), in=64 (tp_size=1, ep_size=1, moe_tp=1)"
    ]


@pytest.mark.parametrize("name", ["intermediate.dense", "output.dense"])
def test_no_matrix_is_turned_to_fit(planned, name):
    """L-29, B-08: (in, out) where (out, in) is declared is an error."""
    tensors = toy_b_tensors()
    stored = array(tensors[f"{LAYER}{name}.weight"])
    plan = planned(tensors | {f"{LAYER}{name}.weight": encode(stored.T, "F32")})
    assert [text.partition(",")[0] for text in error_texts(plan)] == [
        f"{LAYER}{name}.weight (model.safetensors): stored shape [{stored.shape[1]}"
    ]


def test_q_k_and_v_lie_in_that_order(tmp_path, registry, small, tensors_of, write):
    """B-08: at hidden size 4, rows 0-3 are q's, 4-7 k's, 8-11 v's; biases likewise."""
    config = small | {"hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    tensors = tensors_of(config)
    for value, name in enumerate(("query", "key", "value"), start=1):
        for ending, shape in (("weight", (4, 4)), ("bias", (4,))):
            tensors[f"{LAYER}attention.self.{name}.{ending}"] = encode(np.full(shape, value), "F32")
    plan = steelyard.plan(write(tmp_path, config, tensors), target="cpu", registry=registry)
    found = filled(plan, tensors)
    rows = [1] * 4 + [2] * 4 + [3] * 4
    assert found[f"{LAYER}attention.qkv", "bias"].tolist() == rows
    assert found[f"{LAYER}attention.qkv", "weight"].tolist() == [[row] * 4 for row in rows]


def test_rank_1_of_2_holds_its_half_of_every_node(tmp_path, registry, small, tensors_of, write):
    """B-06: hidden size 8, 2 heads, 16 between; tables by columns, biases of rowwise matrices whole, norms whole."""
    tensors = tensors_of(small)
    plan = steelyard.plan(write(tmp_path, small, tensors), target="cpu", tp=2, registry=registry)
    found = filled(plan, tensors, rank=1)
    whole = {name: array(stored) for name, stored in tensors.items()}
    for table in ("word", "position", "token_type"):
        stem = f"embeddings.{table}_embeddings"
        assert (found[stem, "weight"] == whole[f"{stem}.weight"][:, 4:8]).all()
    attention = f"{LAYER}attention"
    assert found[f"{attention}.qkv", "weight"].shape == (12, 8)
    for ending in ("weight", "bias"):
        halves = [whole[f"{attention}.self.{name}.{ending}"][4:8] for name in ("query", "key", "value")]
        assert (found[f"{attention}.qkv", ending] == np.concatenate(halves)).all()
    assert (found[f"{attention}.output.dense", "weight"] == whole[f"{attention}.output.dense.weight"][:, 4:8]).all()
    assert (found[f"{LAYER}intermediate.dense", "weight"] == whole[f"{LAYER}intermediate.dense.weight"][8:16]).all()
    assert (found[f"{LAYER}intermediate.dense", "bias"] == whole[f"{LAYER}intermediate.dense.bias"][8:16]).all()
    assert (found[f"{LAYER}output.dense", "weight"] == whole[f"{LAYER}output.dense.weight"][:, 8:16]).all()
    for stem in (f"{LAYER}attention.output", f"{LAYER}output"):
        assert (found[f"{stem}.dense", "bias"] == whole[f"{stem}.dense.bias"]).all()
        assert (found[f"{stem}.LayerNorm", "weight"] == whole[f"{stem}.LayerNorm.weight"]).all()
    shapes = {place: piece.shape for place, piece in found.items()}
    assert shapes[f"{LAYER}attention.output.dense", "weight"] == (8, 4)
    assert shapes[f"{LAYER}intermediate.dense", "weight"] == (8, 8)
    assert shapes[f"{LAYER}output.dense", "weight"] == (8, 8)
    assert shapes[f"{LAYER}output.LayerNorm", "weight"] == (8,)


def test_values_do_not_depend_on_shards(planned):
    """R131: TOY-B in three shards plans the same pieces."""
    tensors = toy_b_tensors()
    assert same(filled(planned(tensors, shards=3), tensors), filled(planned(tensors, name="one"), tensors))


def test_an_xlm_roberta_config_selects_the_family(tmp_path, registry):
    """B-01: by its architecture, before its model_type."""
    config = {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "pad_token_id": 1}
    plan = steelyard.plan(toy_b(tmp_path, config=config), target="cpu", registry=registry).check()
    assert plan.family_key == "XLMRobertaModel"
    assert plan.findings == ()
