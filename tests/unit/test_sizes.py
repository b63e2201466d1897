import pytest

from steelyard.errors import ConfigError
from steelyard.sizes import human, parse_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_994, "999.99 kB"),
        (999_999, "1.00 MB"),
        (1_500_000_000_000, "1.50 TB"),
        (10**16, "10000.00 TB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_they_reach(count, text):
    assert human(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("80GiB", 80 << 30), ("1.5 kb", 1500), (" 12 ", 12), ("7b", 7), ("0.5MiB", 1 << 19)],
)
def test_a_size_is_read_with_decimal_and_binary_units(text, count):
    assert parse_size(text, "--fits") == count


@pytest.mark.parametrize("text", ["", "GB", "80 gigs", "-1", "1e9", "80GB free", "nan", "٣GB"])
def test_what_is_no_size_is_an_error_that_lists_the_units(text):
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "--fits")
    assert str(caught.value) == (
        f"--fits={text!r} is no size; write bytes, or a number with one of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
    )


def test_a_part_of_a_byte_is_an_error():
    with pytest.raises(ConfigError) as caught:
        parse_size("0.5", "--fits")
    assert str(caught.value) == "--fits='0.5' is 0.5 bytes, not a whole number of them"
