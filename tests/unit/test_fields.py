"""Values of a config: what is taken, and what each refusal says."""

import pytest

from steelyard import fields
from steelyard.errors import ConfigError

KNOWN = {"silu": 1, "gelu": 2}

TAKEN = {
    "a count": (lambda config: fields.count(config, "n"), {"n": 3}, 3),
    "a default count": (lambda config: fields.count(config, "n", 5), {}, 5),
    "a stated count": (lambda config: fields.count_if_stated(config, "n"), {"n": 3}, 3),
    "an absent count": (lambda config: fields.count_if_stated(config, "n"), {}, None),
    "a null count": (lambda config: fields.count_if_stated(config, "n"), {"n": None}, None),
    "nothing at all": (lambda config: fields.count(config, "n", smallest=0), {"n": 0}, 0),
    "layers": (lambda config: fields.layers(config), {"num_hidden_layers": 4096}, 4096),
    "a number": (lambda config: fields.positive(config, "eps"), {"eps": 1}, 1.0),
    "a default number": (lambda config: fields.positive(config, "eps", 0.5), {}, 0.5),
    "false": (lambda config: fields.flag(config, "on", True), {"on": False}, False),
    "a default flag": (lambda config: fields.flag(config, "on", True), {}, True),
    "a name": (lambda config: fields.one_of(config, "act", KNOWN, "silu"), {"act": "gelu"}, 2),
    "a default name": (lambda config: fields.one_of(config, "act", KNOWN, "silu"), {}, 1),
    "architectures": (fields.architectures, {"architectures": ["A", None, 3, "B"]}, ["A", "B"]),
    "no architectures": (fields.architectures, {"architectures": None}, []),
}

REFUSED = {
    "an absent count": (lambda config: fields.count(config, "n"), {}, "n is absent; a count is needed"),
    "a null count": (lambda config: fields.count(config, "n", 5), {"n": None}, "n is null; a count is needed"),
    "a count of halves": (lambda config: fields.count(config, "n"), {"n": 1.5}, "n=1.5 is not a count of at least 1"),
    "a true count": (lambda config: fields.count(config, "n"), {"n": True}, "n=True is not a count of at least 1"),
    "a count too small": (
        lambda config: fields.count(config, "n", smallest=2),
        {"n": 1},
        "n=1 is not a count of at least 2",
    ),
    "a stated count too small": (
        lambda config: fields.count_if_stated(config, "n"),
        {"n": 0},
        "n=0 is not a count of at least 1",
    ),
    "too many layers": (
        fields.layers,
        {"num_hidden_layers": 4097},
        "num_hidden_layers=4097 is past the 4096 that any model has; it is damaged",
    ),
    "an absent number": (
        lambda config: fields.positive(config, "eps"),
        {},
        "eps is absent; a positive number is needed",
    ),
    "a null number": (
        lambda config: fields.positive(config, "eps", 1.0),
        {"eps": None},
        "eps is null; a positive number is needed",
    ),
    "zero": (lambda config: fields.positive(config, "eps"), {"eps": 0}, "eps=0 is not a positive number"),
    "infinity": (
        lambda config: fields.positive(config, "eps"),
        {"eps": float("inf")},
        "eps=inf is not a positive number",
    ),
    "a text for a number": (
        lambda config: fields.positive(config, "eps"),
        {"eps": "1"},
        "eps='1' is not a positive number",
    ),
    "a text for a flag": (
        lambda config: fields.flag(config, "on", False),
        {"on": "false"},
        "on='false' is neither true nor false",
    ),
    "a null flag": (lambda config: fields.flag(config, "on", False), {"on": None}, "on=None is neither true nor false"),
    "an unknown name": (
        lambda config: fields.one_of(config, "act", KNOWN, "silu"),
        {"act": "sine"},
        "act='sine' is not computed; known are silu, gelu",
    ),
    "a list for a name": (
        lambda config: fields.one_of(config, "act", KNOWN, "silu"),
        {"act": ["silu"]},
        "act=['silu'] is not computed; known are silu, gelu",
    ),
    "what is not computed": (
        lambda config: fields.refuse(config, {"cap": "a cap"}),
        {"cap": 3},
        "cap=3: a cap is not computed by this family",
    ),
    "one for true": (
        lambda config: fields.refuse(config, {"cap": "a cap"}),
        {"cap": 1},
        "cap=1: a cap is not computed by this family",
    ),
}


@pytest.mark.parametrize(("read", "config", "value"), TAKEN.values(), ids=TAKEN)
def test_a_value_is_taken_as_it_stands_or_by_its_default(read, config, value):
    """M-18: no value is converted but a whole number to a number."""
    found = read(config)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("read", "config", "text"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_taken_is_refused_by_key_and_value(read, config, text):
    """M-18, X-06: one wrong value a rule."""
    with pytest.raises(ConfigError) as caught:
        read(config)
    assert str(caught.value) == text


@pytest.mark.parametrize("value", [None, False, 1.0, 1])
def test_a_neutral_value_switches_nothing_on(value):
    """M-18: keys that models write although they change nothing."""
    fields.refuse({"scale": value}, {"scale": "a scale"}, neutral=(None, False, 1, 1.0))
