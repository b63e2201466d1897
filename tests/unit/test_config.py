import copy
import inspect
import itertools
import pickle

import pytest

from steelyard.closed import UNSET, check_keys, unknown
from steelyard.config import LOAD_FORMATS, ORIGINS, Agreement, LoadConfig, resolve
from steelyard.errors import ConfigError

FIELDS = LoadConfig.model_fields
_fresh = itertools.count()


@pytest.fixture
def variable():
    """Return the name of an environment variable that nobody was warned of yet."""
    return f"STEELYARD_TEST_{next(_fresh)}"


# --- the record --------------------------------------------------------------------------------------


def test_every_field_is_described_and_has_a_default():
    """L-25, D-10."""
    assert [name for name, field in FIELDS.items() if not field.description] == []
    assert [name for name, field in FIELDS.items() if field.is_required()] == []
    assert LoadConfig().trust_files is False


def test_the_signature_is_closed_and_names_every_field():
    """L-25, L-26: a checker and an editor see the fields, and no **kwargs."""
    signature = inspect.signature(LoadConfig)
    assert list(signature.parameters) == list(FIELDS)
    assert {parameter.kind for parameter in signature.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


def test_a_config_cannot_be_changed():
    """L-25: nothing is set on it later."""
    with pytest.raises(ValueError, match="frozen"):
        LoadConfig().tp = 2
    with pytest.raises(ValueError, match="frozen"):
        LoadConfig().agreement.timeout = 2.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"quant_sorce": 1, "tp": 1}, None),
        ({"taget": "cpu"}, "there is no setting taget; did you mean target?"),
        ({"agreement": {"tmeout": 1.0}}, "there is no setting agreement.tmeout; did you mean agreement.timeout?"),
        ({"prefer": {"modle": {}}}, "there is no kind prefer.modle; did you mean prefer.model?"),
        ({"agreement": 3}, "agreement=3: input should be a valid dictionary or instance of Agreement"),
        ({"kernels": "torch"}, "kernels='torch' must be a list of names, such as ['torch']"),
        ({"kernels": [""]}, "kernels.0='': string should have at least 1 character"),
        ({"trust_files": "yes"}, "trust_files='yes': input should be a valid boolean"),
        ({"agreement": {"timeout": 0}}, "agreement.timeout=0 must be greater than 0"),
        (
            {"agreement": {"timeout": 1, "heartbeat": 2}},
            "agreement: heartbeat=2 must be shorter than timeout=1",
        ),
        ({"taget": "cpu", "tp": 0}, "tp=0 must be at least 1; there is no setting taget; did you mean target?"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_setting_is_one_error_with_its_path_and_the_closest_match(given, text):
    """D-08, L-25."""
    with pytest.raises(ConfigError) as caught:
        LoadConfig(**given)
    if text is None:
        text = f"there is no setting quant_sorce; there are {', '.join(FIELDS)}"
    assert str(caught.value) == f"LoadConfig: {text}"


def test_unknown_keys_of_plain_data_are_named_with_the_closest_match():
    """D-08."""
    check_keys({"aiter_fmoe_overlay": "warn"}, ["aiter_fmoe_overlay"], "moe")
    with pytest.raises(ConfigError) as caught:
        check_keys({"aiter_fmoe_overly": "warn", "x": 1}, ["aiter_fmoe_overlay"], "moe")
    assert str(caught.value) == (
        "there is no setting moe.aiter_fmoe_overly; did you mean moe.aiter_fmoe_overlay?; "
        "there is no setting moe.x; there are aiter_fmoe_overlay"
    )


def test_a_key_with_dots_is_one_name():
    """D-08: scheme keys such as fp8.plain have dots."""
    assert unknown("fp8.plane", ["fp8.plain"], path="methods", noun="method") == (
        "there is no method methods.fp8.plane; did you mean methods.fp8.plain?"
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"ep": -1}, "ep=-1 must be at least 1"),
        ({"moe_tp": 0}, "moe_tp=0 must be at least 1"),
        ({"tp": True}, "tp=True: input should be a valid integer"),
        ({"tp": "8"}, "tp='8': input should be a valid integer"),
        ({"tp": 1.0}, "tp=1.0: input should be a valid integer"),
    ],
    ids=str,
)
def test_a_size_is_a_whole_number_of_at_least_one(given, text):
    """P-23."""
    with pytest.raises(ConfigError) as caught:
        LoadConfig(**given)
    assert str(caught.value) == f"LoadConfig: {text}"


CHOICES = ["dtype", "load_format", "reader", "scale_grid", "experts", "vocab_padding"]


@pytest.mark.parametrize("field", CHOICES)
def test_an_unknown_word_lists_the_words_there_are(field):
    """L-01, M-18."""
    with pytest.raises(ConfigError) as caught:
        LoadConfig(**{field: "turbo"})
    words = {
        "dtype": "'auto', 'float32', 'bfloat16', 'float16'",
        "load_format": ", ".join(map(repr, LOAD_FORMATS)),
        "reader": "'auto', 'mmap', 'pread'",
        "scale_grid": "'refine', 'strict'",
        "experts": "'uneven', 'even'",
        "vocab_padding": "'auto', 'off'",
    }
    assert str(caught.value) == f"LoadConfig: {field}='turbo' must be one of {words[field]}"


def test_words_are_taken_in_any_case_and_kept_in_lower_case():
    """L-01."""
    assert LoadConfig(load_format="AUTO").load_format == "auto"
    assert LoadConfig(load_format=" SafeTensors ").load_format == "safetensors"


@pytest.mark.parametrize("name", LOAD_FORMATS)
def test_every_load_format_is_captured_as_its_text(name):
    """D-11."""
    assert resolve({"load_format": name}).to_json()["load_format"] == {"value": name, "origin": "explicit"}


@pytest.mark.parametrize("field", [*CHOICES, "target", "device"])
def test_an_empty_text_means_not_given(field):
    """D-07: everywhere where a text is taken."""
    assert LoadConfig(**{field: ""}) == LoadConfig()
    assert LoadConfig(**{field: " "}).model_fields_set == set()
    family = {"load_format": "safetensors"}
    assert resolve({field: ""}, defaults=family) == resolve({}, defaults=family)


def test_an_empty_text_is_no_size_and_no_switch():
    """D-07 is about texts."""
    for field in ("tp", "trust_files", "kernels"):
        with pytest.raises(ConfigError):
            LoadConfig(**{field: ""})


# --- defaults ----------------------------------------------------------------------------------------


def test_every_switch_that_may_change_outputs_is_off_by_default():
    """D-04."""
    risky = {name: field for name, field in FIELDS.items() if (field.json_schema_extra or {}).get("affects_output")}
    assert set(risky) == {"dtype", "kernels", "trust_files", "keep_float32", "allow_missing"}
    off = (False, None, (), "auto")
    assert {name: field.default for name, field in risky.items() if field.default not in off} == {}
    assert LoadConfig().strict is True


def test_unset_is_one_object_after_pickle_and_deepcopy():
    """D-03."""
    assert pickle.loads(pickle.dumps(UNSET)) is UNSET
    assert copy.deepcopy(UNSET) is UNSET
    assert copy.copy({"a": UNSET})["a"] is UNSET
    assert repr(UNSET) == "UNSET"


def test_unset_differs_from_none_where_none_is_a_value():
    """D-03, E-22: kernels=None asks for core's order, UNSET leaves the family's."""
    family = {"kernels": ["torch"]}
    assert resolve({"kernels": UNSET}, defaults=family).config.kernels == ("torch",)
    assert resolve(LoadConfig(kernels=UNSET), defaults=family).config.kernels == ("torch",)
    for given in ({"kernels": None}, LoadConfig(kernels=None)):
        effective = resolve(given, defaults=family)
        assert effective.config.kernels is None
        assert effective.origins["kernels"] == "explicit"


def test_none_is_not_given_where_none_is_no_value():
    """D-01, D-03."""
    effective = resolve(LoadConfig(target=None), overrides={"tp": None}, defaults={"target": "sm_90", "tp": 2})
    assert (effective.config.target, effective.config.tp) == ("sm_90", 2)
    assert effective.origins["target"] == "family"
    assert resolve({"agreement": {"timeout": None}}).config == LoadConfig()


def test_a_config_survives_pickle_with_what_was_given():
    config = LoadConfig(tp=2, agreement={"timeout": 5})
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.given() == {"tp": 2, "agreement": {"timeout": 5.0}}


# --- precedence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "1", "0"], ids=["absent", "1", "0"])
@pytest.mark.parametrize("given", [None, True, False])
def test_explicit_goes_before_environment_and_that_before_the_default(given, text, variable, caplog):
    """D-01: nine combinations, each a hundred times with one warning in all, or none where it is not set."""
    environ = {} if text is None else {variable: text}
    deprecated = {variable: "trust_files"}
    expected = given if given is not None else text == "1"
    origin = "explicit" if given is not None else "default" if text is None else "environment"
    for _ in range(100):
        effective = resolve({"trust_files": given}, deprecated=deprecated, environ=environ)
        assert effective.config.trust_files is expected
        assert effective.origins["trust_files"] == origin
    assert [record.getMessage() for record in caplog.records] == (
        []
        if text is None
        else [f"the environment variable {variable} is deprecated; set trust_files of LoadConfig instead"]
    )


def test_the_environment_goes_before_the_family(variable):
    """D-01."""
    effective = resolve({}, defaults={"reader": "mmap"}, deprecated={variable: "reader"}, environ={variable: "pread"})
    assert (effective.config.reader, effective.origins["reader"]) == ("pread", "environment")


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("trust_files", "yes", True),
        ("trust_files", "OFF", False),
        ("strict", "0", False),
        ("tp", "8", 8),
        ("tp", "", None),
        ("load_format", "", "auto"),
        ("target", "sm_90", "sm_90"),
        ("target", "90", "90"),
        ("kernels", '["aiter", "torch"]', ("aiter", "torch")),
        ("agreement.timeout", "5.5", 5.5),
    ],
)
def test_a_variables_text_is_read_as_its_setting_takes_it(path, text, value, variable):
    """D-09, D-07."""
    found = resolve(deprecated={variable: path}, environ={variable: text}).config
    for step in path.split("."):
        found = getattr(found, step)
    assert found == value


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (
            "trust_files",
            "maybe",
            "{name}='maybe' is neither on nor off; for on write one of 1, true, yes, on; "
            "for off one of 0, false, no, off, or nothing",
        ),
        ("tp", "many", "environment variable {name}: LoadConfig: tp='many': input should be a valid integer"),
        ("reader", "x", "environment variable {name}: LoadConfig: reader='x' must be one of 'auto', 'mmap', 'pread'"),
    ],
)
def test_a_variable_with_a_wrong_text_is_an_error_that_names_it(path, text, message, variable):
    """D-09."""
    with pytest.raises(ConfigError) as caught:
        resolve(deprecated={variable: path}, environ={variable: text})
    assert str(caught.value) == message.format(name=variable)


def test_the_environment_is_read_when_it_is_resolved_and_not_again(variable, monkeypatch):
    """D-06: a decided configuration stays; the next load sees the new environment."""
    deprecated = {variable: "load_format"}
    first = resolve(deprecated=deprecated)
    monkeypatch.setenv(variable, "safetensors")
    second = resolve(deprecated=deprecated)
    assert (first.config.load_format, second.config.load_format) == ("auto", "safetensors")
    with pytest.raises(TypeError):
        first.origins["load_format"] = "explicit"


def test_no_variable_decides_anything_unless_it_is_listed(monkeypatch):
    """D-05, D-06."""
    monkeypatch.setenv("STEELYARD_LOAD_FORMAT", "safetensors")
    assert resolve().config == LoadConfig()


@pytest.mark.parametrize("as_config", [True, False], ids=["LoadConfig", "mapping"])
@pytest.mark.parametrize(
    ("given", "timeout", "heartbeat"),
    [
        ({}, 30.0, 5.0),
        ({"agreement": {"heartbeat": 2.0}}, 30.0, 2.0),
        ({"agreement": {"timeout": 9.0}}, 9.0, 5.0),
        ({"agreement": {"timeout": 60.0}}, 60.0, 5.0),
    ],
    ids=["nothing", "one key", "the other key", "the built-in value by name"],
)
def test_a_familys_defaults_are_merged_key_by_key(given, timeout, heartbeat, as_config):
    """D-02: only what the user set counts, also where it equals the built-in value."""
    defaults = {"agreement": {"timeout": 30.0, "heartbeat": 5.0}}
    effective = resolve(LoadConfig(**given) if as_config else given, defaults=defaults)
    assert effective.config.agreement == Agreement(timeout=timeout, heartbeat=heartbeat)
    for key in ("timeout", "heartbeat"):
        wanted = "explicit" if key in given.get("agreement", {}) else "family"
        assert effective.origins[f"agreement.{key}"] == wanted


def test_a_section_given_as_a_record_counts_only_for_what_was_set_in_it():
    """D-02."""
    effective = resolve(LoadConfig(agreement=Agreement(heartbeat=0.5)), defaults={"agreement": {"timeout": 7}})
    assert effective.config.agreement == Agreement(timeout=7, heartbeat=0.5)


def test_preferences_are_merged_kind_by_kind_and_key_by_key():
    """D-02."""
    effective = resolve(
        {"prefer": {"model": {"a": "mine"}}},
        defaults={"prefer": {"model": {"a": "theirs", "b": "theirs"}, "quant method": {"fp8.plain": "theirs"}}},
    )
    assert effective.config.prefer == {"model": {"a": "mine", "b": "theirs"}, "quant method": {"fp8.plain": "theirs"}}
    assert {path: origin for path, origin in effective.origins.items() if path.startswith("prefer")} == {
        "prefer.model.a": "explicit",
        "prefer.model.b": "family",
        "prefer.quant method.fp8.plain": "family",
    }


def test_an_unknown_key_of_a_familys_defaults_is_an_error_that_names_the_family():
    """D-02."""
    with pytest.raises(ConfigError) as caught:
        resolve({}, defaults={"agreement": {"tmeout": 1}}, family="toy")
    assert str(caught.value) == (
        "defaults of the model family 'toy': LoadConfig: there is no setting agreement.tmeout; "
        "did you mean agreement.timeout?"
    )


def test_values_that_fit_alone_and_not_together_are_refused():
    """D-02: the merged result is validated again."""
    with pytest.raises(ConfigError) as caught:
        resolve({"agreement": {"heartbeat": 50.0}}, defaults={"agreement": {"timeout": 10.0}})
    assert str(caught.value) == "LoadConfig: agreement: heartbeat=50 must be shorter than timeout=10"


def test_what_the_call_says_goes_before_the_config():
    effective = resolve(LoadConfig(tp=2, ep=4), overrides={"tp": 8, "ep": None})
    assert (effective.config.tp, effective.config.ep) == (8, 4)
    assert effective.origins["tp"] == "explicit"


# --- the record of a load ----------------------------------------------------------------------------


def test_the_record_names_every_setting_with_its_origin(variable):
    """D-14."""
    effective = resolve(
        {"tp": 2, "kernels": ["torch"]},
        defaults={"load_format": "safetensors"},
        deprecated={variable: "trust_files"},
        environ={variable: "1"},
    )
    assert effective.describe() == (
        "tp=2 (explicit), ep=None (default), moe_tp=None (default), target=None (default), device=None (default), "
        "dtype=auto (default), load_format=safetensors (family default), reader=auto (default), "
        'kernels=["torch"] (explicit), prefer={} (default), scale_grid=refine (default), experts=uneven (default), '
        "vocab_padding=auto (default), trust_files=True (environment), strict=True (default), "
        "strict_plugins=False (default), keep_float32=[] (default), allow_missing=[] (default), "
        "agreement.timeout=60.0 (default), agreement.heartbeat=1.0 (default)"
    )
    assert set(effective.origins.values()) == set(ORIGINS)


def test_every_setting_has_an_origin_and_plain_data():
    """D-14."""
    data = resolve({"keep_float32": ["norm"]}).to_json()
    assert data["keep_float32"] == {"value": ["norm"], "origin": "explicit"}
    assert set(data) == {*FIELDS, "agreement.timeout", "agreement.heartbeat"} - {"agreement"}
