"""Numbers of bytes as text for people, and from such text.

Units:
    Everything here counts bytes. ``kB``, ``MB``, ``GB``, ``TB`` are powers of 1000; ``KiB``, ``MiB``, ``GiB``,
    ``TiB`` are powers of 1024.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from steelyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

UNITS: Final[Mapping[str, int]] = {
    "B": 1,
    "kB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_WRITTEN = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def human(count: int) -> str:
    """Return a number of bytes with the largest decimal unit that it reaches.

    >>> human(0), human(999), human(1_500), human(999_999), human(17_200_000_000)
    ('0 B', '999 B', '1.50 kB', '1.00 MB', '17.20 GB')
    """
    if count < 1000:
        return f"{count} B"
    value = float(count)
    unit = _DECIMAL[0]
    for following in _DECIMAL[1:]:
        if value < 999.995:  # what two digits would show as 1000.00 is the next unit's 1.00
            break
        value, unit = value / 1000, following
    return f"{value:.2f} {unit}"


def parse_size(text: str, name: str) -> int:
    """Return the bytes that a text such as ``80GB`` or ``80 GiB`` stands for; a plain number counts bytes.

    Args:
        text: The size as given; case does not matter.
        name: What the user knows the setting as, for the message.

    Raises:
        ConfigError: the text is no such size, or no whole number of bytes.

    >>> parse_size("80GB", "--fits"), parse_size("1.5 kib", "--fits"), parse_size("12", "--fits")
    (80000000000, 1536, 12)
    """
    found = _WRITTEN.fullmatch(text.strip())
    scale = {unit.lower(): size for unit, size in UNITS.items()}.get((found["unit"] or "B").lower()) if found else None
    if found is None or scale is None:
        raise ConfigError(f"{name}={text!r} is no size; write bytes, or a number with one of {', '.join(UNITS)}")
    exact = Decimal(found["number"]) * scale
    if exact != int(exact):
        raise ConfigError(f"{name}={text!r} is {exact.normalize():f} bytes, not a whole number of them")
    return int(exact)
