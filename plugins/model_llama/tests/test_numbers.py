"""The runnable decoders, loaded over real ranks from files that transformers wrote, against transformers."""

import pytest
import torch

import steelyard
from steelyard.plugin import ConfigError
from support.decoders import (
    SIZES,
    assert_close,
    call,
    config_of,
    consolidated,
    expected_logits,
    fused,
    left_padded,
    logits,
    rewritten,
    tensors_of,
    texts,
    tiny,
)

WORKER = "support.ranks_decoders:outputs"
TOKENS = 11
WHOLE = call(texts(2, TOKENS))
PADDED = left_padded([TOKENS, 3, 7])
LAST = call(texts(2, TOKENS), keep=2)
ONE_BY_ONE = call(texts(2, TOKENS), chunks=(5, *[1] * 6))
IN_CHUNKS = call(texts(2, TOKENS), chunks=(2, 4, 1, 4))
PADDED_IN_CHUNKS = PADDED | {"chunks": (1, 4, 3, *[1] * 3)}
CALLS = (WHOLE, PADDED, LAST, ONE_BY_ONE, IN_CHUNKS, PADDED_IN_CHUNKS)
FEW = (WHOLE, PADDED, IN_CHUNKS)
LONG = (call(texts(2, 40)), left_padded([40, 9]))  # past the 16 positions of training
LONG_IN_CHUNKS = call(texts(1, 40), chunks=(7, 20, 1, 12))


def rope(kind, **keys):
    return {"max_position_embeddings": 64, "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **keys}}


ORIGINAL = {"original_max_position_embeddings": 16}
UPPER = {"use_sliding_window": True, "sliding_window": 4}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
CASES = {
    "llama": ("llama", {}, CALLS),
    "mistral": ("mistral", {}, FEW),
    "qwen2": ("qwen2", {}, CALLS),
    "qwen3": ("qwen3", {}, CALLS),
    "llama with every bias": ("llama", {"attention_bias": True, "mlp_bias": True}, FEW),
    "qwen3 with every bias": ("qwen3", {"attention_bias": True}, FEW),
    "a tied head": ("llama", {"tie_word_embeddings": True}, FEW),
    "as many key-value heads": ("qwen2", {"num_key_value_heads": 4}, FEW),
    "one key-value head": ("llama", {"num_key_value_heads": 1}, FEW),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}, (WHOLE,)),
    "another theta and eps": ("llama", {**rope("default"), "rms_norm_eps": 0.1}, LONG),
    "rope linear": ("llama", rope("linear", factor=4.0), (*LONG, LONG_IN_CHUNKS)),
    "rope dynamic": ("llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": 16}, (*LONG, WHOLE, PADDED)),
    "rope llama3": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL),
        (*LONG, LONG_IN_CHUNKS),
    ),
    "rope yarn": ("qwen2", rope("yarn", factor=4.0, **ORIGINAL), (*LONG, LONG_IN_CHUNKS)),
    "window": ("mistral", {"sliding_window": 4}, CALLS),
    "window of one": ("mistral", {"sliding_window": 1}, FEW),
    "window as long as the text": ("mistral", {"sliding_window": TOKENS}, FEW),
    "window of the upper layers": ("qwen2", UPPER | {"max_window_layers": 1}, CALLS),
    "window by layer types": ("qwen3", UPPER | {"max_window_layers": 0, "layer_types": MIXED}, CALLS),
    "window not used": ("qwen3", {"sliding_window": 4, "use_sliding_window": False}, (WHOLE,)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function from a case to its folder, written once."""
    made = {}

    def folder(name):
        if name not in made:
            model_type, changes, _ = CASES[name]
            made[name] = tiny(tmp_path_factory.mktemp("decoder"), model_type, **changes)
        return made[name]

    return folder


def expected(folder, calls):
    return [expected_logits(folder, asked) for asked in calls]


def check(found, wanted, calls, **near):
    for mine, theirs, asked in zip(found, wanted, calls, strict=True):
        assert_close(mine, theirs, asked=asked, **near)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_on_one_two_and_four_ranks(folders, rank_pool, name):
    """P-04, P-05, P-08, P-11, P-15, P-25, P-14, R036: to 2e-5, in one forward, padded, in chunks and token by token.

    Two key/value heads split over 2 ranks and repeat over 4; 97 words are padded to 98 and to 100.
    """
    folder, calls = folders(name), CASES[name][2]
    wanted = expected(folder, calls)
    alone = logits(rank_pool, folder, *calls)
    check(alone, wanted, calls)
    for tp in (2, 4):
        found = logits(rank_pool, folder, *calls, tp=tp)
        check(found, wanted, calls)
        check(found, alone, calls, atol=1e-5)


def test_the_cases_differ_by_more_than_the_tolerance(folders):
    """A window, a scaled rotation, a bias or a tie that had no effect would be no test of it."""
    llama, mistral = (expected_logits(folders(name), WHOLE) for name in ("llama", "mistral"))
    assert torch.equal(llama, mistral)  # the same parameters, drawn in the same order
    windows = [expected_logits(folders(name), WHOLE) for name in ("window", "window of one")]
    ropes = [expected_logits(folders(name), LONG[0]) for name in CASES if name.startswith("rope ")]
    plain = expected_logits(folders("another theta and eps"), LONG[0])
    for some in ([mistral, *windows], [plain, *ropes]):
        for index, one in enumerate(some):
            assert all((one - other).abs().max() > 0.01 for other in some[index + 1 :])
    upper = expected_logits(folders("window of the upper layers"), WHOLE)
    assert (upper - expected_logits(folders("qwen2"), WHOLE)).abs().max() > 0.01


BARE = {"llama": {}, "qwen3": {"attention_bias": True}}


@pytest.mark.parametrize("model_type", BARE)
def test_a_model_without_a_head_returns_hidden_states(tmp_path, rank_pool, model_type):
    """Names stand bare there; a stored head is left out with its reason."""
    folder = tiny(tmp_path / "bare", model_type, bare=True, **BARE[model_type])
    assert "embed_tokens.weight" in tensors_of(folder)
    calls = (WHOLE, PADDED, ONE_BY_ONE)
    wanted = expected(folder, calls)
    for tp in (1, 2):
        check(logits(rank_pool, folder, *calls, tp=tp), wanted, calls)
    head = {"lm_head.weight": torch.zeros(97, 20)}
    folder = rewritten(tmp_path / "head", config_of(folder), tensors_of(folder) | head)
    model = steelyard.load(folder, device="cpu")
    assert model.module.has_head is False
    assert model.report.dropped == {"lm_head.weight": "the architecture has no head"}


SPELLINGS = {
    "fused": (fused, "llama", {"attention_bias": True, "mlp_bias": True}),
    "fused qwen2": (fused, "qwen2", {}),
    "meta": (lambda tensors: consolidated(tensors, SIZES["head_dim"]), "llama", {}),
    "meta with biases": (
        lambda tensors: consolidated(tensors, SIZES["head_dim"]),
        "llama",
        {"attention_bias": True, "mlp_bias": True},
    ),
    "meta, tied": (lambda tensors: consolidated(tensors, SIZES["head_dim"]), "llama", {"tie_word_embeddings": True}),
    "mistral's own": (lambda tensors: consolidated(tensors, SIZES["head_dim"]), "mistral", {"sliding_window": 5}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_other_publishers_names_compute_the_same(tmp_path, rank_pool, name):
    """M-12, P-12, P-13: fused tensors are cut part by part, and rows leave their rotary pairs head by head."""
    spell, model_type, changes = SPELLINGS[name]
    plain = tiny(tmp_path / "plain", model_type, **changes)
    tensors = spell(tensors_of(plain))
    assert not tensors.keys() >= tensors_of(plain).keys()
    folder = rewritten(tmp_path / "spelt", config_of(plain), tensors)
    wanted = expected_logits(plain, WHOLE)
    for tp in (1, 2, 4):
        (found,) = logits(rank_pool, folder, WHOLE, tp=tp)
        assert_close(found, wanted)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_a_text_model_inside_a_wrapper_is_found(tmp_path, rank_pool, prefix):
    """R060: the sizes stand in ``text_config``, and so does the tie that counts; the contradiction is a note."""
    plain = tiny(tmp_path / "plain", "llama")
    config, tensors = config_of(plain), tensors_of(plain)
    text = {key: value for key, value in config.items() if key != "architectures"}
    wrapper = {"architectures": ["LlamaForCausalLM"], "model_type": "wrapper", "tie_word_embeddings": True}
    head = "language_model.lm_head" if prefix.startswith("language_model.") else "lm_head"
    names = {name: name.replace("model.", prefix, 1).replace("lm_head", head) for name in tensors}
    nested = {names[name]: tensor for name, tensor in tensors.items()}
    folder = rewritten(tmp_path / "nested", wrapper | {"text_config": text}, nested)
    (found,) = logits(rank_pool, folder, WHOLE, tp=2)
    assert_close(found, expected_logits(plain, WHOLE))
    plan = steelyard.plan(folder, target="cpu")
    assert [finding.text for finding in plan.findings] == [
        "tie_word_embeddings is True at the top level and False in text_config; text_config, which owns the head, decides"
    ]


def test_a_head_that_is_tied_by_the_text_model_is_not_awaited(tmp_path):
    """R060: the flags swapped and no head stored; it shares the embedding's memory."""
    plain = tiny(tmp_path / "plain", "llama", tie_word_embeddings=True)
    config = config_of(plain)
    wrapper = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "text_config": config}
    model = steelyard.load(rewritten(tmp_path / "nested", wrapper, tensors_of(plain)), device="cpu")
    assert "lm_head.weight" not in tensors_of(plain)
    weights = {
        parameter.data_ptr()
        for name, parameter in model.module.named_parameters(remove_duplicate=False)
        if "embedding" in name or "head" in name
    }
    assert len(weights) == 1


def test_a_tied_head_that_is_stored_is_the_embedding_if_it_is_equal_and_else_itself(tmp_path, rank_pool):
    """R060, O-18: what the file holds is evidence."""
    tied = tiny(tmp_path / "tied", "llama", tie_word_embeddings=True)
    table = tensors_of(tied)["model.embed_tokens.weight"]
    equal = rewritten(tmp_path / "equal", config_of(tied), tensors_of(tied) | {"lm_head.weight": table})
    other = rewritten(tmp_path / "other", config_of(tied), tensors_of(tied) | {"lm_head.weight": table + 1})
    untied = rewritten(tmp_path / "untied", config_of(tied) | {"tie_word_embeddings": False}, tensors_of(other))
    for folder, wanted in ((equal, tied), (other, untied)):
        for tp in (1, 2):
            (found,) = logits(rank_pool, folder, WHOLE, tp=tp)
            assert_close(found, expected_logits(wanted, WHOLE))


def test_layers_that_only_draft_are_left_out(tmp_path):
    """R007: (b) declared as extra by ``num_nextn_predict_layers``; not declared, each of their tensors is an error."""
    folder = tiny(tmp_path / "three", "llama")
    config = config_of(folder) | {"num_hidden_layers": 2}
    extra = sorted(name for name in tensors_of(folder) if ".layers.2." in name)
    undeclared = steelyard.plan(rewritten(tmp_path / "two", config, tensors_of(folder)), target="cpu")
    assert sorted(finding.subject for finding in undeclared.errors) == extra
    assert len(extra) == 9
    declared = config | {"num_nextn_predict_layers": 1}
    model = steelyard.load(rewritten(tmp_path / "drafts", declared, tensors_of(folder)), device="cpu")
    reason = "a layer that drafts tokens (num_nextn_predict_layers)"
    assert model.report.dropped == dict.fromkeys(extra, reason)


def test_a_config_with_more_layers_than_the_files_names_what_is_missing(tmp_path):
    """R007: (a) the nine parameters of the layer."""
    folder = tiny(tmp_path / "three", "llama")
    config = config_of(folder) | {"num_hidden_layers": 4}
    plan = steelyard.plan(rewritten(tmp_path / "four", config, tensors_of(folder)), target="cpu")
    names = {finding.subject for finding in plan.errors}
    assert names == {name.replace(".2.", ".3.") for name in tensors_of(folder) if ".layers.2." in name}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(folders, rank_pool, model_type):
    """Roundings differ in their places, not in their size."""
    folder = folders(model_type)
    exact, theirs = expected_logits(folder, PADDED), expected_logits(folder, PADDED, torch.bfloat16)
    kept = torch.tensor(PADDED["mask"]).bool()
    bound = 2 * (theirs.float() - exact)[kept].abs().max()
    for tp in (1, 2):
        (mine,) = logits(rank_pool, folder, PADDED, tp=tp, dtype="bfloat16")
        assert mine.dtype == torch.bfloat16
        assert torch.isfinite(mine).all()
        assert (mine.float() - exact)[kept].abs().max() < bound


def test_a_text_that_is_all_padding_gives_numbers(folders, rank_pool):
    """Its rows are nobody's, and those of the text beside it do not change."""
    folder = folders("window")
    beside = call([texts(1, 5)[0], [0] * 5], [[1] * 5, [0] * 5])
    alone = call(texts(1, 5))
    (found,) = logits(rank_pool, folder, beside)
    assert torch.isfinite(found).all()
    assert_close(found[:1], expected_logits(folder, alone))


@pytest.fixture(scope="module")
def module(folders):
    """Return the module of the plain Llama, on one process."""
    return steelyard.load(folders("llama"), device="cpu", dtype="float32").module


def test_a_full_cache_is_an_error_before_anything_is_computed(module):
    """The numbers are in the text, and the cache is as it was."""
    cache = module.new_cache(1, 4)
    ids = torch.tensor(texts(1, 5))
    with torch.inference_mode():
        module(ids[:, :3], cache=cache)
        with pytest.raises(ConfigError) as caught:
            module(ids[:, 3:], cache=cache)
        assert str(caught.value) == "the cache has room for 4 tokens; 3 are in it, 2 would follow"
        assert cache.length == 3
        assert_close(module(ids[:, 3:4], cache=cache), module(ids[:, :4])[:, 3:])


def test_a_cache_takes_the_bytes_of_its_heads(module):
    """3 layers, keys and values, 2 texts, 2 heads, 7 tokens, 6 numbers of 4 bytes each."""
    assert module.new_cache(2, 7).nbytes == 3 * 2 * 2 * 2 * 7 * 6 * 4


MASKS = {
    "floats": (torch.ones(1, 5), "an attention mask is 1 and 0 in whole numbers or bools, not torch.float32"),
    "of the new tokens alone": (
        torch.ones(1, 2, dtype=torch.int64),
        "an attention mask of 2 tokens, and there are 5 with those before",
    ),
}


@pytest.mark.parametrize(("mask", "text"), MASKS.values(), ids=MASKS)
def test_a_mask_that_could_be_misread_is_refused(module, mask, text):
    cache, ids = module.new_cache(1, 5), torch.tensor(texts(1, 5))
    with torch.inference_mode():
        module(ids[:, :3], cache=cache)
        with pytest.raises(ConfigError) as caught:
            module(ids[:, 3:], attention_mask=mask, cache=cache)
    assert str(caught.value) == text


def test_what_the_module_says_of_itself(module):
    assert (module.vocabulary, module.max_positions, module.has_head) == (97, 64, True)
    assert (module.dtype, module.device) == (torch.float32, torch.device("cpu"))
