"""The JSON files of a sentence-transformers folder: what they say, and that nothing of it is passed over."""

import json

import pytest

from steelyard.errors import BadConfig, CheckpointError
from steelyard.sentences import SentenceSettings, sentence_settings

MODELS = "sentence_transformers.models."
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": f"{MODELS}Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{MODELS}Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{MODELS}Normalize"}
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_lasttoken": "last",
}


def folder_of(path, modules=(TRANSFORMER, POOLING, NORMALIZE), pooling=None, length=None, where=""):
    """Write a folder as sentence-transformers leaves it; None leaves a file out."""
    path.mkdir(exist_ok=True)
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(list(modules)))
    (path / "1_Pooling").mkdir(exist_ok=True)
    said = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True} if pooling is None else pooling
    (path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    if length is not None:
        (path / where).mkdir(exist_ok=True)
        (path / where / "sentence_bert_config.json").write_text(json.dumps(length))
    return path


def refusal(path):
    with pytest.raises(BadConfig) as caught:
        sentence_settings(str(path))
    return str(caught.value).replace(f"{path}/", "")


def test_the_usual_folder_is_read(tmp_path):
    length = {"max_seq_length": 256, "do_lower_case": False}
    assert sentence_settings(folder_of(tmp_path, length=length)) == SentenceSettings(
        tmp_path, ("mean",), normalize=True, max_tokens=256, lower=False, source="modules.json"
    )


def test_without_a_third_module_vectors_keep_their_length(tmp_path):
    assert not sentence_settings(folder_of(tmp_path, (TRANSFORMER, POOLING))).normalize


def test_a_plain_encoder_gets_the_mean_and_says_that_nobody_asked(tmp_path):
    folder_of(tmp_path, None, length={"max_seq_length": 64, "do_lower_case": True})
    found = sentence_settings(tmp_path)
    assert found == SentenceSettings(tmp_path, max_tokens=64, lower=True)
    assert (found.pooling, found.normalize) == (("mean",), False)
    assert found.source == "no modules.json: mean of the tokens, not normalised"


def test_the_encoder_may_lie_in_a_folder_of_its_own(tmp_path):
    """Source: sentence-transformers before 2.0 puts it into ``0_Transformer``."""
    inner = TRANSFORMER | {"path": "0_Transformer"}
    found = sentence_settings(
        folder_of(tmp_path, (inner, POOLING), length={"max_seq_length": 32}, where="0_Transformer")
    )
    assert (found.folder, found.max_tokens) == (tmp_path / "0_Transformer", 32)


@pytest.mark.parametrize(
    "kind", ["sentence_transformers.models.Transformer", "sentence_transformers.base.modules.transformer.Transformer"]
)
def test_a_module_is_known_by_its_class_wherever_the_package_keeps_it(tmp_path, kind):
    assert sentence_settings(folder_of(tmp_path, (TRANSFORMER | {"type": kind}, POOLING))).pooling == ("mean",)


@pytest.mark.parametrize(("key", "mode"), list(MODES.items()))
def test_each_pooling_mode_is_known_by_its_switch(tmp_path, key, mode):
    off = dict.fromkeys(MODES, False)
    assert sentence_settings(folder_of(tmp_path, pooling=off | {key: True})).pooling == (mode,)


def test_several_modes_stand_in_the_order_of_the_package(tmp_path):
    """Source: sentence-transformers' Pooling.forward lays cls, max, mean, mean_sqrt_len, last behind one another."""
    found = sentence_settings(folder_of(tmp_path, pooling=dict.fromkeys(reversed(MODES), True)))
    assert found.pooling == ("cls", "max", "mean", "mean_sqrt_len", "last")


@pytest.mark.parametrize(
    ("pooling", "text"),
    [
        (
            {"pooling_mode_weightedmean_tokens": True, "pooling_mode_mean_tokens": True},
            "1_Pooling/config.json: asks for pooling_mode_weightedmean_tokens; "
            "this version pools by mean, cls, max, mean_sqrt_len, last",
        ),
        ({"pooling_mode_mean_tokens": False}, "1_Pooling/config.json: turns no pooling mode on"),
        ({}, "1_Pooling/config.json: turns no pooling mode on"),
        ([], "1_Pooling/config.json: is not an object"),
    ],
    ids=["unknown-mode", "all-off", "empty", "no-object"],
)
def test_pooling_that_is_not_computed_is_refused(tmp_path, pooling, text):
    folder_of(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    assert refusal(tmp_path) == text


@pytest.mark.parametrize(
    ("modules", "listed"),
    [
        ((), "no module"),
        ((TRANSFORMER,), "Transformer"),
        ((POOLING, TRANSFORMER), "Pooling, Transformer"),
        ((TRANSFORMER, POOLING, POOLING), "Transformer, Pooling, Pooling"),
        ((TRANSFORMER, NORMALIZE, POOLING), "Transformer, Normalize, Pooling"),
        ((TRANSFORMER, TRANSFORMER, POOLING), "Transformer, Transformer, Pooling"),
    ],
    ids=["none", "no-pooling", "turned", "two-poolings", "normalised-first", "two-encoders"],
)
def test_another_chain_of_modules_is_refused(tmp_path, modules, listed):
    """What would be computed is not what the folder says, so nothing is."""
    assert refusal(folder_of(tmp_path, modules)) == (
        f"modules.json: lists {listed}; this version computes Transformer, Pooling and perhaps Normalize"
    )


@pytest.mark.parametrize(
    "kind", [f"{MODELS}Dense", f"{MODELS}WordEmbeddings", "custom_st.Transformer", "Transformer", "", None], ids=str
)
def test_modules_of_others_are_refused(tmp_path, kind):
    """A class of the publisher's own is code that nobody runs, whatever it is called."""
    assert refusal(folder_of(tmp_path, (TRANSFORMER | {"type": kind}, POOLING))) == (
        f"modules.json: names the module {str(kind)!r}; "
        "this version computes those of sentence_transformers called Transformer, Pooling, Normalize"
    )


@pytest.mark.parametrize(
    "path", ["..", "../x", "a/../../x", "/etc", "\\etc", "a\\..\\..\\x", "//x", "a\0b", None, 7, ["x"]], ids=repr
)
def test_a_folder_outside_the_checkpoint_is_refused(tmp_path, path):
    """X-22: no path of a file of the checkpoint leads out of it."""
    for modules in ((TRANSFORMER | {"path": path}, POOLING), (TRANSFORMER, POOLING | {"path": path})):
        assert refusal(folder_of(tmp_path, modules)) == (
            f"modules.json: names the folder {path!r}, which does not lie in the checkpoint"
        )


def test_the_folder_of_a_module_that_stores_nothing_may_be_absent(tmp_path):
    assert not (folder_of(tmp_path) / "2_Normalize").exists()
    assert sentence_settings(tmp_path).normalize


def test_a_pooling_folder_that_is_absent_is_an_error(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert refusal(tmp_path).startswith("1_Pooling/config.json: ")


@pytest.mark.parametrize("text", ["{}", "3", '["x"]', "not json"], ids=str)
def test_a_list_of_modules_that_is_none_is_an_error(tmp_path, text):
    folder_of(tmp_path)
    (tmp_path / "modules.json").write_text(text)
    assert refusal(tmp_path).startswith("modules.json: ")


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "256", True], ids=repr)
def test_a_length_that_is_no_count_is_an_error(tmp_path, tokens):
    folder_of(tmp_path, length={"max_seq_length": tokens})
    assert refusal(tmp_path) == f"sentence_bert_config.json: max_seq_length={tokens!r} is not a count of tokens"


@pytest.mark.parametrize("length", [{}, {"max_seq_length": None}, None], ids=repr)
def test_a_length_that_is_not_stated_is_left_to_the_encoder(tmp_path, length):
    assert sentence_settings(folder_of(tmp_path, length=length)).max_tokens is None


def test_older_names_of_the_length_file_are_read(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 128}')
    assert sentence_settings(tmp_path).max_tokens == 128


def test_a_length_file_that_is_no_object_is_an_error(tmp_path):
    folder_of(tmp_path, length=[256])
    assert refusal(tmp_path) == "sentence_bert_config.json: is not an object"


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(CheckpointError):
        sentence_settings(tmp_path / "nowhere")


def test_a_default_prompt_is_refused_and_not_passed_over(tmp_path):
    """A vector without the prompt would be another text's."""
    folder = folder_of(tmp_path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q: "}}))
    assert sentence_settings(folder).normalize
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": "query"}))
    assert refusal(folder) == (
        "config_sentence_transformers.json: puts the prompt 'query' before every text; this version does not"
    )
