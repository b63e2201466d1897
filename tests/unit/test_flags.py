import pytest

from steelyard.errors import ConfigError
from steelyard.flags import parse_flag


@pytest.mark.parametrize("text", ["1", "true", "yes", "on", "TRUE", "Yes", " on "])
def test_words_for_on_are_on_in_any_case(text):
    """D-09."""
    assert parse_flag(text, "STEELYARD_X") is True


@pytest.mark.parametrize("text", ["0", "false", "no", "off", "False", "OFF", "", "  ", None])
def test_words_for_off_and_nothing_are_off_in_any_case(text):
    """R182, D-07, D-09."""
    assert parse_flag(text, "STEELYARD_X") is False


@pytest.mark.parametrize("text", ["maybe", "2", "-1", "yess", "nothing"])
def test_any_other_word_is_an_error_that_names_the_switch(text):
    """D-09."""
    with pytest.raises(ConfigError) as caught:
        parse_flag(text, "STEELYARD_X")
    assert str(caught.value) == (
        f"STEELYARD_X={text!r} is neither on nor off; for on write one of 1, true, yes, on; "
        "for off one of 0, false, no, off, or nothing"
    )
