"""One rule for switches that come as text, such as environment variables.

The caller reads the variable, when the value is needed and never at import; this module only reads the word.
"""

from __future__ import annotations

from typing import Final

from steelyard.errors import ConfigError

ON: Final = ("1", "true", "yes", "on")
OFF: Final = ("0", "false", "no", "off")


def parse_flag(text: str | None, name: str) -> bool:
    """Return whether a switch is on.

    Args:
        text: The value as given; ``None`` if it is not set. Case and surrounding blanks do not matter.
        name: What the user knows the switch as, for the message.

    Raises:
        ConfigError: the text is neither a word for on nor one for off.

    >>> parse_flag("Yes", "STEELYARD_X"), parse_flag("False", "STEELYARD_X"), parse_flag("", "STEELYARD_X")
    (True, False, False)
    """
    word = (text or "").strip().lower()
    if word in ON:
        return True
    if not word or word in OFF:
        return False
    raise ConfigError(
        f"{name}={text!r} is neither on nor off; for on write one of {', '.join(ON)}; "
        f"for off one of {', '.join(OFF)}, or nothing"
    )
