"""What a user can ask of a load: one closed record, and the one rule by which a value is decided.

A value is the user's if given; else a deprecated environment variable's; else the model family's default; else
the built-in one. `resolve` decides once for a load and keeps where each value came from; what changes in the
environment later has no effect on that load.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from steelyard.closed import UNSET, reworded, unknown
from steelyard.errors import ConfigError
from steelyard.flags import parse_flag
from steelyard.kinds import BY_NOUN

if TYPE_CHECKING:
    from pydantic.config import JsonDict
    from pydantic.fields import FieldInfo

_log = logging.getLogger(__name__)

LoadFormatName: TypeAlias = Literal["auto", "safetensors"]
LOAD_FORMATS: tuple[LoadFormatName, ...] = get_args(LoadFormatName)

Origin: TypeAlias = Literal["explicit", "environment", "family", "default"]
ORIGINS: Mapping[Origin, str] = {
    "explicit": "explicit",
    "environment": "environment",
    "family": "family default",
    "default": "default",
}
"""Where a value can come from, first come first, and how a record calls it."""


def _word(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


_Choice = BeforeValidator(_word)
_Size = Annotated[int, Field(strict=True, ge=1)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1)]
_RISKY: JsonDict = {"affects_output": True}  # set to anything but its default, the model may compute something else
_NONE_COUNTS: JsonDict = {"none_is_a_value": True}


class Agreement(BaseModel):
    """How the ranks of a job keep in touch while they load.

    Units:
        Seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: _Seconds = Field(default=60.0, description="Longest wait for another rank before it counts as failed.")
    heartbeat: _Seconds = Field(
        default=1.0, description="Time between two signs of life of a rank; shorter than the timeout."
    )

    @model_validator(mode="after")
    def _beats_in_time(self) -> Agreement:
        if self.heartbeat >= self.timeout:
            raise ConfigError(f"heartbeat={self.heartbeat:g} must be shorter than timeout={self.timeout:g}")
        return self


class _Told(BaseModel):
    """Raises `ConfigError` where pydantic would raise its own error."""

    # A private class has it so that the public one keeps a closed signature, which pydantic makes from the fields.
    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {'; '.join(reworded(error, type(self)))}") from None


class LoadConfig(_Told):
    """What a load is asked to do; every field has a default, an unknown one is an error.

    An empty text stands for "not given" wherever a text is taken, and so does `UNSET` everywhere.

    Raises:
        ConfigError: a name is unknown or a value cannot be met; all of them in one text.

    >>> LoadConfig(tp=8, load_format="SafeTensors").load_format
    'safetensors'
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp: _Size | None = Field(default=None, description="Ranks that share each dense layer; None for 1.")
    ep: _Size | None = Field(default=None, description="Ranks that the experts of a layer go out over; None for 1.")
    moe_tp: _Size | None = Field(
        default=None, description="Ranks that share one expert; None for 1 if ep > 1, else tp."
    )
    target: _Name | None = Field(
        default=None, description='What kernels are chosen for: "cpu", "sm_90", "gfx942"; None for this machine.'
    )
    device: _Name | None = Field(
        default=None,
        description='Where the weights go: "cpu", "cuda", "cuda:1"; None for the first accelerator, or the CPU.',
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _Choice] = Field(
        default="auto",
        description="Dtype of the parameters that are not quantized; auto takes the checkpoint's.",
        json_schema_extra=_RISKY,
    )
    load_format: Annotated[LoadFormatName, _Choice] = Field(
        default="auto", description="What the checkpoint's files are; auto asks every format that is installed."
    )
    reader: Annotated[Literal["auto", "mmap", "pread"], _Choice] = Field(
        default="auto", description="How bytes are read; auto takes the way that costs least."
    )
    kernels: tuple[_Name, ...] | None = Field(
        default=None,
        description="The only kernel backends to ask, in order; None for the order of core.",
        json_schema_extra=_RISKY | _NONE_COUNTS,
    )
    prefer: dict[str, dict[str, _Name]] = Field(
        default_factory=dict,
        description="Kind to key to the distribution that serves the key where several offer it.",
    )
    scale_grid: Annotated[Literal["refine", "strict"], _Choice] = Field(
        default="refine",
        description="Whether a rank boundary inside a block of scales is met by a finer grid, or refused.",
    )
    experts: Annotated[Literal["uneven", "even"], _Choice] = Field(
        default="uneven",
        description="Whether the first ranks take one expert more where they do not divide, or none may.",
    )
    vocab_padding: Annotated[Literal["auto", "off"], _Choice] = Field(
        default="auto",
        description="Whether a vocabulary that the ranks do not divide is padded with zeros, or refused.",
    )
    trust_files: bool = Field(
        default=False,
        strict=True,
        description="Load a plain tensor as such where the config says that it is quantized.",
        json_schema_extra=_RISKY,
    )
    strict: bool = Field(
        default=True, strict=True, description="Refuse tensors that nothing uses; off, they are noted."
    )
    strict_plugins: bool = Field(
        default=False, strict=True, description="Refuse to go on beside a plugin that is broken."
    )
    keep_float32: tuple[_Name, ...] = Field(
        default=(),
        description='Fragments of node names whose parameters stay in float32, such as "norm".',
        json_schema_extra=_RISKY,
    )
    allow_missing: tuple[_Name, ...] = Field(
        default=(),
        description="Patterns (* for any run) of parameters that may stay unfilled.",
        json_schema_extra=_RISKY,
    )
    agreement: Agreement = Field(default_factory=Agreement, description="How the ranks of a job keep in touch.")

    @model_validator(mode="before")
    @classmethod
    def _without_unset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        return {
            name: _pruned(value, UNSET)
            for name, value in data.items()
            if value is not UNSET and not (_is_blank(value) and name in fields and _takes_text(fields[name]))
        }

    @field_validator("prefer")
    @classmethod
    def _known_kinds(cls, prefer: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for kind in prefer:
            if kind not in BY_NOUN:
                raise ConfigError(unknown(kind, BY_NOUN, path="prefer", noun="kind"))
        return prefer

    def given(self) -> dict[str, Any]:
        """Return the values that the user set, as nested plain data; None only where it is a value."""
        data = self.model_dump(exclude_unset=True)
        fields = type(self).model_fields
        return {name: value for name, value in data.items() if value is not None or _none_counts(fields[name])}


@dataclass(frozen=True, slots=True)
class Effective:
    """A decided configuration.

    Attributes:
        config: The values.
        origins: Dotted path of every value to where it came from.
    """

    config: LoadConfig
    origins: Mapping[str, Origin]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Return path to value and origin, as plain data."""
        values = dict(_leaves(self.config.model_dump(mode="json")))
        return {
            ".".join(path): {"value": value, "origin": self.origins[".".join(path)]} for path, value in values.items()
        }

    def describe(self) -> str:
        """Return one line with every value and its origin, for the record of a load.

        >>> resolve({"tp": 2}, defaults={"load_format": "safetensors"}).describe()[:30]
        'tp=2 (explicit), ep=None (defa'
        """
        return ", ".join(
            f"{path}={_shown(entry['value'])} ({ORIGINS[entry['origin']]})" for path, entry in self.to_json().items()
        )


def resolve(
    explicit: LoadConfig | Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    family: str = "",
    deprecated: Mapping[str, str] = MappingProxyType({}),
    environ: Mapping[str, str] | None = None,
) -> Effective:
    """Decide every value of a configuration.

    Mappings are merged key by key, nested ones too. A None is as good as not given, but in the fields where None is
    a value, and only what the user set in a `LoadConfig` counts as given.

    Args:
        explicit: What the user asked for.
        overrides: What the user asked for in the call itself; it goes before ``explicit``.
        defaults: What the model family sets, as nested plain data.
        family: The family's name, for messages.
        deprecated: Environment variable to the dotted path that replaces it. A variable that is set is honoured,
            and named in one warning a process.
        environ: The environment; None for this process's, read now.

    Raises:
        ConfigError: a value or a name of any of the sources cannot be met; the text names the source.
    """
    user = _merged(_validated(explicit), _validated(overrides))
    variables = _from_environment(os.environ if environ is None else environ, deprecated)
    source = f"defaults of the model family {family!r}" if family else "defaults of the model family"
    layers: dict[Origin, dict[str, Any]] = {
        "explicit": user,
        "environment": variables,
        "family": _validated(defaults, source),
    }
    merged: dict[str, Any] = {}
    for layer in reversed(layers.values()):
        merged = _merged(merged, layer)
    config = LoadConfig(**merged)
    return Effective(config, MappingProxyType(dict(_origins(config, layers))))


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value) if isinstance(value, (list, dict)) else str(value)


def _is_blank(value: object) -> bool:
    return isinstance(value, str) and not value.strip()


def _takes_text(field: FieldInfo) -> bool:
    """Whether a field is a text or one of several words."""
    kinds = [_bare(kind) for kind in get_args(field.annotation) or (field.annotation,)]
    return get_origin(field.annotation) is Literal or all(kind in (str, NoneType) for kind in kinds)


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _none_counts(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, Mapping) and bool(extra.get("none_is_a_value"))


def _field(path: str) -> FieldInfo:
    """Return the field that a dotted path names."""
    model: Any = LoadConfig
    *sections, last = path.split(".")
    for name in sections:
        model = model.model_fields[name].annotation
    field: FieldInfo = model.model_fields[last]
    return field


# --- layers -----------------------------------------------------------------------------------------


def _validated(data: LoadConfig | Mapping[str, Any] | None, source: str = "") -> dict[str, Any]:
    """Return what one source gives, checked and in normal form."""
    if isinstance(data, LoadConfig):
        return data.given()
    fields = LoadConfig.model_fields
    given = {
        name: _pruned(value, UNSET, None)
        for name, value in (data or {}).items()
        if value is not None or (name in fields and _none_counts(fields[name]))
    }
    try:
        return LoadConfig(**given).given()
    except ConfigError as error:
        if not source:
            raise
        raise ConfigError(f"{source}: {error}") from None


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _pruned(value: Any, *absent: object) -> Any:
    """Return plain data without the entries whose value is one of ``absent``."""
    if not isinstance(value, Mapping):
        return value
    return {key: _pruned(inner, *absent) for key, inner in value.items() if not any(inner is one for one in absent)}


def _leaves(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _origins(config: LoadConfig, layers: Mapping[Origin, Mapping[str, Any]]) -> Iterator[tuple[str, Origin]]:
    for path, _ in _leaves(config.model_dump()):
        yield ".".join(path), next((origin for origin, layer in layers.items() if _holds(layer, path)), "default")


def _holds(layer: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    inner: Any = layer
    for key in path:
        if not isinstance(inner, Mapping) or key not in inner:
            return False
        inner = inner[key]
    return True


# --- deprecated variables ---------------------------------------------------------------------------

_warned: set[str] = set()
_warned_lock = Lock()


def _from_environment(environ: Mapping[str, str], deprecated: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, path in deprecated.items():
        text = environ.get(variable)
        if text is None:
            continue
        _warn_once(variable, path)
        value = _value_of(text, variable, path)
        for step in reversed(path.split(".")):
            value = {step: value}
        found = _merged(found, _validated(value, f"environment variable {variable}"))
    return found


def _value_of(text: str, variable: str, path: str) -> Any:
    """Return a variable's text as the field takes it: a switch, a word, or else JSON."""
    field = _field(path)
    if field.annotation is bool:
        return parse_flag(text, variable)
    if _takes_text(field):
        return text
    if _is_blank(text):
        return UNSET
    try:
        return json.loads(text)
    except ValueError:
        return text  # the field says what it takes instead


def _warn_once(variable: str, path: str) -> None:
    with _warned_lock:
        if variable in _warned:
            return
        _warned.add(variable)
    _log.warning("the environment variable %s is deprecated; set %s of LoadConfig instead", variable, path)
