"""Values of a model's config, each checked when it is read: a message names the key and what stands there.

A key that is absent takes the default; one that is null states nothing that could be taken, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any, TypeVar

from steelyard.errors import ConfigError

_Value = TypeVar("_Value")

MOST_LAYERS = 4096
"""A config that states more layers would only fill memory with nodes that no file holds."""


def count(config: Mapping[str, Any], key: str, default: int | None = None, *, smallest: int = 1) -> int:
    """Return a whole number.

    Args:
        config: The config.
        key: Its key.
        default: What an absent key means; None if it must be there.
        smallest: The least that it may be.
    Raises:
        ConfigError: it is absent, no whole number, or too small.

    >>> count({"hidden_size": 64}, "hidden_size"), count({}, "heads", 8)
    (64, 8)
    """
    value = config.get(key, default)
    if value is None:
        raise ConfigError(f"{key} is {'null' if key in config else 'absent'}; a count is needed")
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise ConfigError(f"{key}={value!r} is not a count of at least {smallest}")
    return value


def count_if_stated(config: Mapping[str, Any], key: str, *, smallest: int = 1) -> int | None:
    """Return a whole number, or None for a key that is absent or null: something else decides then.

    Raises:
        ConfigError: it is no whole number, or too small.
    """
    return None if config.get(key) is None else count(config, key, smallest=smallest)


def layers(config: Mapping[str, Any], key: str = "num_hidden_layers") -> int:
    """Return the number of layers.

    Raises:
        ConfigError: it is absent, no count, or more than any model has.
    """
    value = count(config, key)
    if value > MOST_LAYERS:
        raise ConfigError(f"{key}={value} is past the {MOST_LAYERS} that any model has; it is damaged")
    return value


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a finite number above 0.

    Raises:
        ConfigError: it is absent without a default, or no such number.
    """
    value = config.get(key, default)
    if value is None:
        raise ConfigError(f"{key} is {'null' if key in config else 'absent'}; a positive number is needed")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{key}={value!r} is not a positive number")
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return true or false.

    Raises:
        ConfigError: it is neither.
    """
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value!r} is neither true nor false")
    return value


def one_of(config: Mapping[str, Any], key: str, known: Mapping[str, _Value], default: str) -> _Value:
    """Return what a name stands for.

    Raises:
        ConfigError: the name is not known; the text lists those that are.
    """
    name = config.get(key, default)
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{key}={name!r} is not computed; known are {', '.join(known)}")
    return known[name]


def refuse(config: Mapping[str, Any], keys: Mapping[str, str], neutral: Collection[object] = (None, False)) -> None:
    """Refuse a config that switches on what is not computed.

    Args:
        config: The config.
        keys: Key to what it would switch on.
        neutral: Values that switch nothing on.
    Raises:
        ConfigError: one of the keys has another value.
    """
    for key, what in keys.items():
        value = config.get(key)
        if not any(value is one or (value == one and type(value) is type(one)) for one in neutral):
            raise ConfigError(f"{key}={value!r}: {what} is not computed by this family")


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names in ``architectures``; none if the key is absent."""
    return [name for name in config.get("architectures") or () if isinstance(name, str)]
