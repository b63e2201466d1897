"""Closed settings: the sentinel for "not given", and one wording for keys and values that are refused.

pydantic's own errors are several lines, name its documentation and no closest match; `reworded` makes ours of them.
"""

from __future__ import annotations

import difflib
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from steelyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic import BaseModel, ValidationError


class Unset(Enum):
    """The type of `UNSET`; a member of an enumeration is the same object after a copy or a pickle."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return self.name


UNSET: Final = Unset.UNSET
"""Not given. It differs from None in the fields where None is a value."""


def check_keys(section: Mapping[str, Any], known: Iterable[str], path: str = "") -> None:
    """Refuse the unknown keys of a section of plain data, each with its path and the closest name.

    Args:
        section: The section.
        known: The keys that it may have.
        path: Where the section stands, dotted; empty for the top.

    Raises:
        ConfigError: a key is unknown.

    >>> check_keys({"aiter_fmoe_overly": "warn"}, ["aiter_fmoe_overlay"], "moe")
    Traceback (most recent call last):
        ...
    steelyard.errors.ConfigError: there is no setting moe.aiter_fmoe_overly; did you mean moe.aiter_fmoe_overlay?
    """
    names = list(known)
    wrong = [unknown(key, names, path=path) for key in section if key not in names]
    if wrong:
        raise ConfigError("; ".join(wrong))


def unknown(key: str, known: Iterable[str], *, path: str = "", noun: str = "setting") -> str:
    """Return the sentence on a name that does not exist, with the closest one or else all there are.

    Args:
        key: The name.
        known: The names that may stand in its place.
        path: Where that place is, dotted; empty for the top.
        noun: What the names are.
    """
    prefix = f"{path}." if path else ""
    names = list(known)
    close = difflib.get_close_matches(key, names, 1)
    advice = f"did you mean {prefix}{close[0]}?" if close else f"there are {', '.join(names) or 'none'}"
    return f"there is no {noun} {prefix}{key}; {advice}"


def reworded(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """Yield a sentence for each problem that pydantic found: the path, the value, what it must be.

    Args:
        error: What pydantic raised.
        model: The model that it was raised for, whose fields are looked up for the closest match.
    """
    for item in error.errors():
        path = ".".join(str(step) for step in item["loc"])
        given, context = item["input"], item.get("ctx", {})
        match item["type"]:
            case "extra_forbidden":
                *section, last = item["loc"]
                yield unknown(str(last), _names(model, section), path=".".join(map(str, section)))
            case "literal_error":
                yield f"{path}={given!r} must be one of {context['expected'].replace(' or ', ', ')}"
            case "greater_than_equal":
                yield f"{path}={given!r} must be at least {context['ge']}"
            case "greater_than":
                yield f"{path}={given!r} must be greater than {context['gt']:g}"
            case "tuple_type":
                yield f"{path}={given!r} must be a list of names, such as [{given!r}]"
            case "value_error":
                text = str(context["error"])
                yield text if not path or text.startswith("there is no") else f"{path}: {text}"
            case _:
                yield f"{path}={given!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _names(model: type[BaseModel], steps: Iterable[str | int]) -> list[str]:
    """Return the fields of the section that the steps lead to."""
    from pydantic import BaseModel  # here, so that checking plain data does not cost it

    for step in steps:
        section = model.model_fields[str(step)].annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return []
        model = section
    return list(model.model_fields)
