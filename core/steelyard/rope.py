"""What a config says of rotary position embeddings, in both of its spellings, checked key by key.

Older configs state ``rope_theta`` beside ``rope_scaling``; transformers 5 writes one group, ``rope_parameters``. Where
transformers passes over a key or lets one of two values win, this module refuses: a rotation that is wrong shows only
in what the model says. `steelyard.ops.rotary` computes what is described here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from steelyard.errors import ConfigError

RopeKind: TypeAlias = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Frequencies as theta gives them."""

    kind: ClassVar[RopeKind] = "default"


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Every frequency is divided by one factor.

    Attributes:
        factor: What divides them.
    """

    kind: ClassVar[RopeKind] = "linear"
    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """Theta grows with the text once the text is longer than those of training.

    Attributes:
        factor: How fast it grows.
        positions: Tokens up to which it stays as it is.
    """

    kind: ClassVar[RopeKind] = "dynamic"
    factor: float
    positions: int


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Low frequencies are divided, high ones stay, and those between lie between.

    Attributes:
        factor: What divides the low ones.
        low: Turns within ``positions`` below which a frequency is low.
        high: Turns within ``positions`` above which it is high; more than ``low``.
        positions: Tokens of the texts of training.
    """

    kind: ClassVar[RopeKind] = "llama3"
    factor: float
    low: float
    high: float
    positions: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: a ramp over the dims leads from frequencies that stay to those that are divided; cos and sin are scaled.

    Attributes:
        factor: What divides the low frequencies.
        attention_factor: What cos and sin are multiplied by.
        beta_fast: Turns within ``positions`` at which the ramp begins.
        beta_slow: Turns within ``positions`` at which it ends; at most ``beta_fast``.
        truncate: Whether the ends of the ramp are whole dims.
        positions: Tokens of the texts of training.
    """

    kind: ClassVar[RopeKind] = "yarn"
    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    positions: int


RopeScaling: TypeAlias = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotation of query and key heads by position.

    Attributes:
        theta: The base: pair i of a head turns by theta ** (-2i / dim) a token, before scaling.
        dim: Values at the start of a head that are rotated, an even number; the whole head unless the config says less.
        scaling: What changes the frequencies, for texts longer than those of training.
    """

    theta: float
    dim: int
    scaling: RopeScaling

    @property
    def kind(self) -> RopeKind:
        """The name that configs give the scaling."""
        return self.scaling.kind


KINDS: Final[tuple[RopeKind, ...]] = get_args(RopeKind)

_ORIGINAL: Final = "original_max_position_embeddings"
_ANY_KIND: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS: Final[Mapping[RopeKind, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": (
        "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
"""What each kind reads beside `_ANY_KIND`."""

_FLOAT32: Final = 3.4028234663852886e38  # the largest
_POSITIVE: Final = "a number greater than 0 that float32 holds"
_COUNT: Final = "a whole number from 1 to 2**53"


def read_rope(config: Mapping[str, Any], *, head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """Return the one rotation that a config asks for.

    ``rope_theta``, ``partial_rotary_factor`` and ``original_max_position_embeddings`` may stand in the group or beside
    it. Groups for layer types are taken if they all ask for the same, and so are both spellings at once.

    transformers lets the group win over ``rope_theta`` and ``partial_rotary_factor`` beside it, a top-level
    ``original_max_position_embeddings`` over the group's, and ``rope_scaling`` over ``rope_parameters``. Here two
    unequal values are an error. Llama3 must state its original length, which transformers takes to be
    ``max_position_embeddings`` although that makes no sense for it; yarn may leave it out.

    Args:
        config: The parsed ``config.json``.
        head_dim: Values of one head.
        default_theta: Theta of a config that states none; the family's.
    Raises:
        ConfigError: a kind is not computed, a value cannot be met or contradicts another, or nothing reads a key; the
            text names key, value and what is accepted.
    Source:
        transformers 5.24, ``modeling_rope_utils.py``. As there, ``partial_rotary_factor`` counts for every kind; its
        Llama, Mistral, Mixtral and Qwen modules pass over it for the default kind and fail for the others.

    >>> read_rope({"rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2}}, head_dim=128)
    RopeConfig(theta=500000.0, dim=128, scaling=LinearRope(factor=2.0))
    """
    groups = [*_groups(config)] or [_Group("", {}, config)]
    first = _read(groups[0], head_dim, default_theta)
    for group in groups[1:]:
        if _read(group, head_dim, default_theta) != first:
            raise ConfigError(
                f"{groups[0].path}={dict(groups[0].keys)!r} and {group.path}={dict(group.keys)!r} ask for different "
                "rotations; one rotation is computed for all layers"
            )
    return first


def _groups(config: Mapping[str, Any]) -> Iterator[_Group]:
    for name in ("rope_parameters", "rope_scaling"):
        stated = config.get(name)
        if stated is None or stated == {}:
            continue
        if not isinstance(stated, Mapping):
            raise ConfigError(f"{name}={stated!r} is not a group of keys; null or a group is accepted")
        known = {*_ANY_KIND, *(key for keys in _KEYS.values() for key in keys)}
        if known.isdisjoint(stated) and any(isinstance(value, Mapping) for value in stated.values()):
            for layers, inner in stated.items():
                if not isinstance(inner, Mapping):
                    raise ConfigError(f"{name}.{layers}={inner!r} is not a group of keys; every layer is rotated")
                yield _Group(f"{name}.{layers}", inner, config)
        else:
            yield _Group(name, stated, config)


@dataclass(frozen=True, slots=True)
class _Group:
    """One group of rope keys, where it stands, and the config around it."""

    path: str
    keys: Mapping[str, Any]
    config: Mapping[str, Any]

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def needed(self, key: str) -> float:
        if key not in self.keys:
            raise ConfigError(f"{self.name(key)} is absent; {_POSITIVE} is needed")
        return _number(self.name(key), self.keys[key])

    def optional(self, key: str) -> float | None:
        """Return a number; None if it is not given, which transformers takes null and 0 for."""
        return None if self.keys.get(key) in (None, 0) else self.needed(key)

    def shared(self, key: str) -> tuple[str, Any] | None:
        """Return name and value of a key that may stand in the group or beside it; None if it does neither."""
        if key not in self.keys:
            return (key, self.config[key]) if key in self.config else None
        value, beside = self.keys[key], self.config.get(key)
        if beside is not None and beside != value:
            raise ConfigError(
                f"{key}={beside!r} and {self.name(key)}={value!r} contradict each other; state one, or both alike"
            )
        return self.name(key), value

    def positions(self) -> int:
        if "max_position_embeddings" not in self.config:
            raise ConfigError(f"max_position_embeddings is absent; {self.path} needs it, {_COUNT}")
        return _count("max_position_embeddings", self.config["max_position_embeddings"])


def _read(group: _Group, head_dim: int, default_theta: float) -> RopeConfig:
    kind = _kind(group)
    accepted = (*_ANY_KIND, *_KEYS[kind])
    unread = [f"{group.name(key)}={value!r}" for key, value in group.keys.items() if key not in accepted]
    if unread:
        raise ConfigError(f"{', '.join(unread)}: rope type {kind!r} reads {', '.join(accepted)} and nothing else")
    name, theta = group.shared("rope_theta") or ("rope_theta", default_theta)
    if _number(name, theta) <= 1:
        raise ConfigError(f"{name}={theta!r} is not greater than 1")
    return RopeConfig(float(theta), _dim(group, kind, head_dim), _scaling(group, kind))


def _kind(group: _Group) -> RopeKind:
    given = {key: group.keys[key] for key in ("rope_type", "type") if key in group.keys} or {"rope_type": "default"}
    (key, value), *others = given.items()
    for other, unlike in others:
        if unlike != value:
            raise ConfigError(
                f"{group.name(key)}={value!r} and {group.name(other)}={unlike!r} contradict each other; "
                "state one, or both alike"
            )
    for kind in KINDS:
        if value == kind:
            return kind
    raise ConfigError(f"{group.name(key)}={value!r} is not computed; computed are {', '.join(KINDS)}")


def _dim(group: _Group, kind: RopeKind, head_dim: int) -> int:
    name, part = group.shared("partial_rotary_factor") or ("partial_rotary_factor", None)
    if part is not None and _number(name, part) > 1:
        raise ConfigError(f"{name}={part!r} is greater than 1, the whole head")
    dim = head_dim if part is None else int(head_dim * part)
    least = 4 if kind == "dynamic" else 2  # dynamic's exponent is dim / (dim - 2)
    if dim < least or dim % 2:
        told = "" if part is None else f" with {name}={part!r}"
        raise ConfigError(
            f"head_dim={head_dim}{told} rotates {dim} values of a head; rope type {kind!r} needs an even number of "
            f"at least {least}"
        )
    return dim


def _scaling(group: _Group, kind: RopeKind) -> RopeScaling:
    match kind:
        case "default":
            return DefaultRope()
        case "linear":
            return LinearRope(group.needed("factor"))
        case "dynamic":
            return DynamicRope(group.needed("factor"), group.positions())
        case "llama3":
            return _llama3(group)
        case "yarn":
            return _yarn(group)


def _llama3(group: _Group) -> Llama3Rope:
    low, high = group.needed("low_freq_factor"), group.needed("high_freq_factor")
    if high <= low:
        raise ConfigError(f"{group.name('high_freq_factor')}={high:g} is not greater than low_freq_factor={low:g}")
    original = group.shared(_ORIGINAL)
    if original is None:
        raise ConfigError(f"{group.name(_ORIGINAL)} is absent; {_COUNT} is needed")
    return Llama3Rope(group.needed("factor"), low, high, _count(*original))


def _yarn(group: _Group) -> YarnRope:
    original = group.shared(_ORIGINAL)
    positions = group.positions() if original is None else _count(*original)
    if "factor" in group.keys and group.keys["factor"] is None:
        factor = group.positions() / positions
    else:
        factor = group.needed("factor")
    fast, slow = group.optional("beta_fast") or 32.0, group.optional("beta_slow") or 1.0
    if fast < slow:
        raise ConfigError(f"{group.name('beta_fast')}={fast:g} is less than beta_slow={slow:g}")
    truncate = group.keys.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ConfigError(f"{group.name('truncate')}={truncate!r} is neither true nor false")
    return YarnRope(factor, _attention_factor(group, factor), fast, slow, truncate, positions)


def _attention_factor(group: _Group, factor: float) -> float:
    if group.keys.get("attention_factor") is not None:
        return group.needed("attention_factor")
    above, below = group.optional("mscale"), group.optional("mscale_all_dim")
    if above and below:  # one of them alone counts for nothing, in transformers too
        return _mscale(factor, above) / _mscale(factor, below)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(name: str, value: object) -> float:
    if value is None:
        raise ConfigError(f"{name} is null; {_POSITIVE} is needed")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _FLOAT32:
        raise ConfigError(f"{name}={value!r} is not {_POSITIVE}")
    return float(value)


def _count(name: str, value: object) -> int:
    if value is None:
        raise ConfigError(f"{name} is null; {_COUNT} is needed")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**53:
        raise ConfigError(f"{name}={value!r} is not {_COUNT}")
    return value
