"""The runnable encoder, loaded from real files through entry points, against transformers."""

import gc
from pathlib import Path

import pytest
import torch
import transformers

import steelyard
from steelyard.config import LoadConfig
from support.checkpoints import TOY_B_CONFIG as TOY
from support.checkpoints import encode, toy_b, toy_b_tensors, write_config, write_shards

SIZES = {
    "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50,
    "max_position_embeddings": 20, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
}  # fmt: skip
STYLES = {
    "Bert": (transformers.BertConfig, 0),
    "Roberta": (transformers.RobertaConfig, 1),
    "XLMRoberta": (transformers.XLMRobertaConfig, 1),
}
IDS = [[1, 5, 9, 2]]
NEAR = {"rtol": 0, "atol": 1e-5}
LAYER = "encoder.layer.0."
WORKER = f"{Path(__file__).with_name('ranks_bert.py')}:outputs"


def reference(architecture="BertModel", **changes):
    """Return transformers' model with every parameter random, so that no term of its formula is zero or one."""
    style = architecture.partition("For")[0].removesuffix("Model")
    config_class, pad = STYLES[style]
    torch.manual_seed(0)
    config = config_class(**SIZES | {"pad_token_id": pad, "architectures": [architecture]} | changes)
    made = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


def batch(pad):
    """Return ids, mask and token types of three texts: whole, padded behind, padded in front."""
    ids = [[7, 5, 9, 2, 30, 49], [7, 8, 2, pad, pad, pad], [pad, pad, 7, 41, 6, 2]]
    mask = [[int(token != pad) for token in row] for row in ids]
    types = [[0, 0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    return ids, mask, types


def load(folder, **options):
    return steelyard.load(folder, **{"device": "cpu", "dtype": "float32"} | options)


def encoded(module, *inputs):
    with torch.inference_mode():
        return module(*(None if one is None else torch.tensor(one) for one in inputs))


def expected(model, ids, mask=None, types=None):
    """Return the outputs of the encoder inside a model of transformers."""
    inner = dict(model.named_children())
    encoder = inner.get("bert", inner.get("roberta", model))
    given = {"attention_mask": mask, "token_type_ids": types}
    with torch.inference_mode():
        return encoder(torch.tensor(ids), **{name: torch.tensor(one) for name, one in given.items() if one is not None})


def test_four_tokens_equal_transformers(tmp_path):
    """B-07, B-10: 2 layers, hidden 16, 4 heads, 50 words, eps 1e-12, exact GELU; pooler too."""
    model = reference()
    model.save_pretrained(tmp_path)
    found, wanted = encoded(load(tmp_path).module, IDS), expected(model, IDS)
    assert found.last_hidden_state.shape == (1, 4, 16)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **NEAR)
    torch.testing.assert_close(found.pooler_output, wanted.pooler_output, **NEAR)


@pytest.mark.parametrize(
    "architecture",
    [
        "BertModel",
        "BertForMaskedLM",
        "BertForSequenceClassification",
        "RobertaModel",
        "RobertaForMaskedLM",
        "RobertaForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForMaskedLM",
        "XLMRobertaForSequenceClassification",
    ],
)
def test_a_padded_batch_of_pairs_equals_transformers(tmp_path, architecture):
    """B-01, B-04, B-07, B-09: each architecture as transformers saves it, heads and prefixes included."""
    model = reference(architecture)
    model.save_pretrained(tmp_path)
    inputs = batch(model.config.pad_token_id)
    loaded = load(tmp_path)
    found, wanted = encoded(loaded.module, *inputs), expected(model, *inputs)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, **NEAR)
    assert (found.pooler_output is None) == (wanted.pooler_output is None)
    if wanted.pooler_output is not None:
        torch.testing.assert_close(found.pooler_output, wanted.pooler_output, **NEAR)
    heads = ("cls.", "lm_head.", "classifier.")
    assert all(name.startswith(heads) for name in loaded.report.dropped)
    assert bool(loaded.report.dropped) == ("For" in architecture)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish"])
def test_each_activation_equals_transformers(tmp_path, activation):
    """B-10: by every published name."""
    model = reference(hidden_act=activation)
    model.save_pretrained(tmp_path)
    found = encoded(load(tmp_path).module, IDS).last_hidden_state
    torch.testing.assert_close(found, expected(model, IDS).last_hidden_state, **NEAR)


def test_the_two_forms_of_gelu_differ(tmp_path):
    """B-10: by more than the tolerance of the test above, so that it tells them apart."""
    outputs = []
    for activation in ("gelu", "gelu_new"):
        reference(hidden_act=activation).save_pretrained(tmp_path / activation)
        outputs.append(encoded(load(tmp_path / activation).module, IDS).last_hidden_state)
    assert (outputs[0] - outputs[1]).abs().max() > 2e-5


def test_eps_comes_from_the_config(tmp_path):
    """B-10: 1e-2 in place of 1e-12 changes the output by more than 1e-4, as it does in transformers."""
    outputs = []
    for eps in (1e-12, 1e-2):
        model = reference(layer_norm_eps=eps)
        model.save_pretrained(tmp_path / str(eps))
        outputs.append(encoded(load(tmp_path / str(eps)).module, IDS).last_hidden_state)
        torch.testing.assert_close(outputs[-1], expected(model, IDS).last_hidden_state, **NEAR)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4


def test_roberta_positions_start_behind_the_padding_token_and_skip_padding(tmp_path):
    """B-09: with pad 1, ids [0, 5, 6, 1] stand at [2, 3, 4, 1]."""
    reference("RobertaModel").save_pretrained(tmp_path)
    module = load(tmp_path).module
    counted = encoded(module, [[0, 5, 6, 1]]).last_hidden_state
    assert torch.equal(counted, encoded(module, [[0, 5, 6, 1]], None, None, [[2, 3, 4, 1]]).last_hidden_state)
    assert not torch.allclose(counted, encoded(module, [[0, 5, 6, 1]], None, None, [[0, 1, 2, 3]]).last_hidden_state)


def test_bert_positions_are_counted_from_zero(tmp_path):
    reference().save_pretrained(tmp_path)
    module = load(tmp_path).module
    counted = encoded(module, [[0, 5, 6, 0]]).last_hidden_state
    assert torch.equal(counted, encoded(module, [[0, 5, 6, 0]], None, None, [[0, 1, 2, 3]]).last_hidden_state)


@pytest.mark.parametrize(("architecture", "limit"), [("BertModel", 20), ("RobertaModel", 18)])
def test_the_longest_text_is_computed_and_a_longer_one_refused(tmp_path, architecture, limit):
    """B-09: the limit is the table's rows less those that no token uses."""
    model = reference(architecture)
    model.save_pretrained(tmp_path)
    module = load(tmp_path).module
    assert module.max_positions == limit
    longest = [[5] * limit]
    torch.testing.assert_close(
        encoded(module, longest).last_hidden_state, expected(model, longest).last_hidden_state, **NEAR
    )
    with pytest.raises(
        ValueError, match=rf"^the texts have {limit + 1} tokens; this encoder has positions for {limit}$"
    ):
        encoded(module, [[5] * (limit + 1)])


def test_a_text_that_is_all_padding_attends_to_itself_and_harms_no_other(tmp_path):
    reference().save_pretrained(tmp_path)
    module = load(tmp_path).module
    beside = encoded(module, [[7, 5, 2], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]).last_hidden_state
    assert torch.isfinite(beside).all()
    torch.testing.assert_close(beside[:1], encoded(module, [[7, 5, 2]]).last_hidden_state, **NEAR)
    torch.testing.assert_close(beside[1:], encoded(module, [[0, 0, 0]]).last_hidden_state, **NEAR)


def test_padding_changes_nothing(tmp_path):
    reference("RobertaModel").save_pretrained(tmp_path)
    module = load(tmp_path).module
    ids, mask, _ = batch(1)
    alone = encoded(module, [[7, 8, 2]]).last_hidden_state[0]
    torch.testing.assert_close(encoded(module, ids, mask).last_hidden_state[1, :3], alone, **NEAR)


def without_types(tensors):
    return {name: stored for name, stored in tensors.items() if "token_type_embeddings" not in name}


def saved(folder, tensors, config=TOY, shards=1):
    write_config(folder, config)
    write_shards(folder, tensors, shards)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_missing_token_type_table_is_like_the_word_table_and_computes_like_zeros(tmp_path, dtype):
    """B-05: device and dtype are the word table's, also after ``.to()``."""
    tensors = toy_b_tensors()
    zeros = tensors | {"embeddings.token_type_embeddings.weight": encode(torch.zeros(2, 64).numpy(), "F32")}
    filled = load(saved(tmp_path / "without", without_types(tensors)), dtype=dtype).module
    explicit = load(saved(tmp_path / "zeros", zeros), dtype=dtype).module
    inputs = ([[7, 5, 9]], None, [[0, 1, 1]])
    assert torch.equal(encoded(filled, *inputs).last_hidden_state, encoded(explicit, *inputs).last_hidden_state)
    for move in ({}, {"dtype": torch.float64}, {"device": "meta"}):
        filled = filled.to(**move)
        word, types = filled.embeddings.word.weight, filled.embeddings.token_type.weight
        assert (types.dtype, types.device, types.shape) == (word.dtype, word.device, (2, 64))
        assert (filled.dtype, filled.device) == (word.dtype, word.device)


def parameters(module):
    return dict(sorted(module.state_dict().items()))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def old_names(tensors, stems):
    spelled = {".weight": ".gamma", ".bias": ".beta"}
    return {
        name.replace(f".{ending}", spelled[f".{ending}"]) if (stem, ending) in stems else name: stored
        for name, stored in tensors.items()
        for stem, ending in [(name.rpartition(".")[0], name.rpartition(".")[2])]
    }


def test_old_norm_names_load_bit_for_bit(tmp_path):
    """B-02: gamma and beta everywhere, weight and bias everywhere, and mixed within a norm."""
    new = toy_b_tensors()
    mixed = old_names(new, {("embeddings.LayerNorm", "weight"), (f"{LAYER}output.LayerNorm", "bias")})
    assert sum("gamma" in name or "beta" in name for name in mixed) == 2
    loads = [
        parameters(load(saved(tmp_path / name, tensors)).module)
        for name, tensors in (("new", new), ("old", toy_b_tensors(old_norms=True)), ("mixed", mixed))
    ]
    assert same(loads[0], loads[1])
    assert same(loads[0], loads[2])


def test_gamma_2_and_beta_3_become_weight_2_and_bias_3(tmp_path):
    """R125: in every norm; not the 1 and 0 that a norm starts with."""
    tensors = toy_b_tensors(old_norms=True)
    for name in tensors:
        if name.endswith((".gamma", ".beta")):
            tensors[name] = encode(torch.full((64,), 2.0 if name.endswith("gamma") else 3.0).numpy(), "F32")
    module = load(saved(tmp_path, tensors)).module
    norms = [module.embeddings.norm, module.layers[0].attention_norm, module.layers[0].norm]
    for norm in norms:
        assert norm.weight.unique().tolist() == [2.0]
        assert norm.bias.unique().tolist() == [3.0]


def test_a_prefix_changes_no_bit(tmp_path):
    """B-03, R123: bare, ``bert.`` and ``roberta.``."""
    loads = [
        parameters(load(toy_b(tmp_path / f"at{prefix}", prefix=prefix)).module) for prefix in ("", "bert.", "roberta.")
    ]
    assert same(loads[0], loads[1])
    assert same(loads[0], loads[2])


@pytest.mark.parametrize("reader", ["mmap", "pread", "auto"])
def test_values_outlive_reader_and_files(tmp_path, reader):
    """R131: three shards, each way to read; the values are exact once the files are gone."""
    tensors = toy_b_tensors()
    folder = saved(tmp_path / "model", tensors, shards=3)
    module = load(folder, config=LoadConfig(reader=reader)).module
    for file in folder.iterdir():
        file.unlink()
    gc.collect()
    words = torch.frombuffer(bytearray(tensors["embeddings.word_embeddings.weight"][2]), dtype=torch.float32)
    assert torch.equal(module.embeddings.word.weight, words.reshape(50, 64))
    assert same(parameters(module), parameters(load(saved(tmp_path / "again", tensors)).module))


def test_the_same_plan_runs_in_bfloat16(tmp_path):
    """B-10: half the bits, the same model."""
    model = reference()
    model.save_pretrained(tmp_path)
    module = load(tmp_path, dtype="bfloat16").module
    found = encoded(module, IDS).last_hidden_state
    assert (module.dtype, found.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close(found.float(), expected(model, IDS).last_hidden_state, rtol=0, atol=0.15)


@pytest.mark.parametrize(("architecture", "ranks"), [("BertModel", 2), ("RobertaModel", 2), ("BertForMaskedLM", 4)])
def test_ranks_together_compute_what_one_computes(tmp_path, rank_pool, architecture, ranks):
    """B-06: real processes; each holds its columns of the tables and its heads, biases are added once."""
    model = reference(architecture)
    model.save_pretrained(tmp_path)
    inputs = batch(model.config.pad_token_id)
    whole = encoded(load(tmp_path).module, *inputs)
    for hidden, pooled in rank_pool.values(WORKER, ranks, (str(tmp_path), inputs, ranks)):
        torch.testing.assert_close(torch.tensor(hidden), whole.last_hidden_state, **NEAR)
        assert (pooled is None) == (whole.pooler_output is None)
        if pooled is not None:
            torch.testing.assert_close(torch.tensor(pooled), whole.pooler_output, **NEAR)
