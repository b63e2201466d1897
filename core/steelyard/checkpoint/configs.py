"""The JSON files of a checkpoint: how they are read, and where the dtype and the quantization stand in them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from steelyard.dtypes import CONFIG_DTYPES
from steelyard.errors import BadConfig
from steelyard.headers import FETCH_AGAIN, explain, open_regular, read_bytes, shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG: Final = "config.json"

MAX_JSON: Final = 64 << 20
"""Bytes of the longest JSON file that is read; the largest index and tokenizer files known are below 40 MiB."""

QUANTIZATION_FILES: Final = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
"""Where exporters put a quantization config beside ``config.json``, in the order in which they are asked."""

_NAMES_DTYPE = ("dtype", "torch_dtype")
_NOT_QUANTIZED = frozenset({"", "none"})


class JsonFile(NamedTuple):
    """What a JSON file holds, and the hash of its bytes as hex."""

    content: Any
    sha256: str


class _Doubled(ValueError):
    """A name stands twice in one object, with different values."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise _Doubled(f"gives {shown(name)} twice, with different values")
    return found


def read_json(path: Path) -> JsonFile:
    """Read a JSON file of at most `MAX_JSON` bytes.

    Raises:
        BadConfig: it is absent, unreadable, too long, or no JSON in UTF-8; or a name stands twice in an object of it.
    """
    where = str(path)
    try:
        with open_regular(path) as (handle, status):
            if status.st_size > MAX_JSON:
                raise BadConfig(where, f"has {status.st_size} bytes, past the limit of {MAX_JSON}; it is damaged")
            raw = read_bytes(handle, status.st_size, 0)
    except OSError as error:
        raise BadConfig(where, explain(path, error)) from error
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_members)
    except UnicodeDecodeError as error:
        raise BadConfig(where, f"is not UTF-8 at byte {error.start}; {FETCH_AGAIN}") from error
    except json.JSONDecodeError as error:
        why = f"{error.msg} at line {error.lineno}, column {error.colno}"
        raise BadConfig(where, f"is not JSON: {why}; {FETCH_AGAIN}") from error
    except RecursionError as error:
        raise BadConfig(where, "is nested too deeply") from error
    except ValueError as error:  # a double name, or an integer of thousands of digits
        raise BadConfig(where, str(error)) from error
    return JsonFile(content, hashlib.sha256(raw).hexdigest())


def read_config(folder: Path) -> JsonFile:
    """Read ``config.json``, which every checkpoint must have.

    Raises:
        BadConfig: it is absent, unreadable or no JSON object.
    """
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise BadConfig(str(path), "is absent; it says what model this is: fetch it from where the weights came from")
    found = read_json(path)
    if not isinstance(found.content, dict):
        raise BadConfig(str(path), f"must be a JSON object, not {_kind(found.content)}; {FETCH_AGAIN}")
    return found


class SideFiles(Mapping[str, Any]):
    """The other JSON files of a folder: name to content, each read when it is first looked up."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self._folder, self._names = folder, names
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = read_json(self._folder / name).content
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the code of the dtype that a config states for itself or for its text model; None if of neither.

    >>> config_dtype({"torch_dtype": "bfloat16"}), config_dtype({"dtype": "auto"})
    ('BF16', None)
    """
    for level in (config, config.get("text_config")):
        if isinstance(level, Mapping):
            for key in _NAMES_DTYPE:
                named = level.get(key)
                code = CONFIG_DTYPES.get(named.removeprefix("torch.")) if isinstance(named, str) else None
                if code is not None:
                    return code
    return None


def find_quantization(
    config: Mapping[str, Any], files: SideFiles, folder: Path
) -> tuple[Mapping[str, Any], str] | None:
    """Return the quantization config and where it stands; None if the checkpoint is not quantized.

    The first place that is not empty answers: the config, its text model's, an older key, then a side file.

    Raises:
        BadConfig: a place holds no object, or the config and its text model's differ.
    """
    where = str(folder / CONFIG)
    inner = config.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    top = _stated(where, "quantization_config", config.get("quantization_config"))
    below = _stated(where, "text_config.quantization_config", text.get("quantization_config"))
    if top is not None and below is not None and top != below:
        keys = sorted(key for key in {*top, *below} if top.get(key) != below.get(key))
        raise BadConfig(
            where,
            "quantization_config and text_config.quantization_config differ in "
            f"{', '.join(map(shown, keys))}; keep the one that the weights were made with",
        )
    older = _stated(where, "compression_config", config.get("compression_config"))
    for found, source in (
        (top, f"{CONFIG}: quantization_config"),
        (below, f"{CONFIG}: text_config.quantization_config"),
        (older, f"{CONFIG}: compression_config"),
    ):
        if found is not None:
            return None if _says_no(found) else (found, source)
    for name in QUANTIZATION_FILES:
        if name in files:
            found = _stated(str(folder / name), "it", files[name])
            if found is not None:
                return None if _says_no(found) else (found, name)
    return None


def _stated(where: str, what: str, value: Any) -> Mapping[str, Any] | None:
    """Return a quantization config that says something; None for an absent or empty one."""
    if value is None or value == {} or (isinstance(value, str) and value.strip().lower() in _NOT_QUANTIZED):
        return None
    if not isinstance(value, Mapping):
        raise BadConfig(where, f"{what} must be a JSON object, not {_kind(value)}")
    return value


def _says_no(config: Mapping[str, Any]) -> bool:
    method = config.get("quant_method")
    return isinstance(method, str) and method.strip().lower() in _NOT_QUANTIZED


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
    return "an object"
