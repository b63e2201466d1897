"""What a module holds: its state's tensors under all their names, what the state leaves out, and how both come to be.

A tensor keeps its identity when it leaves ``meta``: contents are swapped into the same object, so whatever points to it
(a tied parameter, an attribute, a list) points to the loaded weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from steelyard.errors import LoadError
from steelyard.findings import Finding, FindingCode
from steelyard.headers import TensorEntry
from steelyard.storage import TORCH_DTYPES

META = torch.device("meta")
PLAIN_CLASSES = (torch.Tensor, nn.Parameter)
REGISTERS = ("_parameters", "_buffers", "_modules")
"""Attributes of every module in which torch keeps what was registered."""

_BYTES = (0x5A, 0xA5)  # what poison is made of, and other poison to compare with

CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in reversed(tuple(TORCH_DTYPES.items()))}
"""Torch dtype to stored code; of several codes that torch holds as bytes, the plain one."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One tensor of a module's state.

    Attributes:
        names: Its names in the state dict; more than one if the module ties them.
        tensor: The tensor.
        code: Code of its dtype.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    code: str


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """A tensor on ``meta`` that the state dict leaves out: a buffer that is not persistent, or a plain attribute.

    Attributes:
        path: Name of the module that owns it; empty for the outermost.
        attribute: Its name there.
        tensor: The tensor.
    """

    path: str
    attribute: str
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """The full name."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass(slots=True)
class ModuleState:
    """A module's tensors.

    Attributes:
        held: Those that a checkpoint must fill, each once.
        hidden: Those that must be made anew.
        findings: What keeps the module from being loaded into.
    """

    held: list[Held] = field(default_factory=list)
    hidden: list[Hidden] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The state as a checkpoint would describe it, every name of a tied tensor on its own."""
        return {
            name: TensorEntry(name, one.code, tuple(one.tensor.shape), 0, 0, 0)
            for one in self.held
            for name in one.names
        }


_Key: TypeAlias = tuple[object, ...]


def state_of(module: nn.Module) -> ModuleState:
    """Return what a module holds; nothing of it is changed."""
    made = ModuleState()
    registered: dict[int, torch.Tensor] = {}
    for _, tensor, _ in _registered(module):
        registered.setdefault(id(tensor), tensor)
    stated = module.state_dict(keep_vars=True)
    groups: dict[_Key, tuple[torch.Tensor, list[str]]] = {}
    for name, value in stated.items():
        if not isinstance(value, torch.Tensor):
            _refuse(made, "missing", name, f"{name} of the module's state is a {type(value).__name__}, not a tensor")
        elif id(value) not in registered:
            text = f"{name} of the module's state is no parameter or buffer of it: writing there would change nothing"
            _refuse(made, "missing", name, text)
        else:
            groups.setdefault(_key(value), (value, []))[1].append(name)
    for tensor, names in groups.values():
        _hold(made, tensor, tuple(names))
    _require_apart(made)
    _find_hidden(module, made, {id(value) for value in stated.values()}, set(registered))
    return made


def _hold(made: ModuleState, tensor: torch.Tensor, names: tuple[str, ...]) -> None:
    name, code = names[0], CODES.get(tensor.dtype)
    kind = type(tensor)
    if kind not in PLAIN_CLASSES:
        text = f"{name} of the module is a {kind.__module__}.{kind.__qualname__}; only plain tensors are loaded into"
        _refuse(made, "dtype", name, text)
    elif code is None:
        _refuse(made, "dtype", name, f"{name} of the module is of {tensor.dtype}, which no checkpoint holds")
    elif tensor.device == META and weakref.getweakrefcount(tensor):
        text = f"{name} of the module is on meta and weakly referenced, so that it cannot get memory in its place"
        _refuse(made, "config", name, f"{text}; make the module on a real device")
    else:
        made.held.append(Held(names, tensor, code))


def _find_hidden(module: nn.Module, made: ModuleState, in_state: set[int], registered: set[int]) -> None:
    seen: set[int] = set()
    for name, tensor, hidden in _registered(module):
        if id(tensor) in in_state or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if hidden is None:
            text = f"{name} is a parameter that the module's state dict leaves out, so that no checkpoint can fill it"
            _refuse(made, "missing", name, text)
        elif tensor.device == META:
            made.hidden.append(hidden)
    for path, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in REGISTERS:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if isinstance(value, torch.Tensor):
                if value.device == META and id(value) not in registered | seen:
                    seen.add(id(value))
                    made.hidden.append(Hidden(path, attribute, value))
            elif any(one.device == META and id(one) not in registered | seen for one in _inside(value)):
                text = (
                    f"{name} of the module keeps tensors on meta in a {type(value).__name__}, which nothing here fills"
                )
                _refuse(made, "missing", name, f"{text}; make the module on a real device")


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Hidden | None]]:
    """Yield name and tensor of everything registered, every place on its own, and for a buffer what it is if hidden."""
    for path, owner in module.named_modules():
        before = f"{path}." if path else ""
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield before + name, parameter, None
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            yield before + name, buffer, Hidden(path, name, buffer)


def _inside(value: object) -> Sequence[torch.Tensor]:
    """Return the tensors directly inside a list, tuple, set or dict."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return [one for one in value if isinstance(one, torch.Tensor)] if isinstance(value, (list, tuple, set)) else []


def _key(tensor: torch.Tensor) -> _Key:
    """Return what two tensors have in common if they are one: the object, or on a real device the memory."""
    if tensor.device == META or not tensor.numel():
        return (id(tensor),)
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _require_apart(made: ModuleState) -> None:
    """Add a finding for tensors that share a part of their memory: one would be written over the other."""
    ranges = []
    for one in made.held:
        tensor = one.tensor
        if tensor.device != META and tensor.numel():
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), one.names[0]))
    ranges.sort()
    for before, after in zip(ranges, ranges[1:], strict=False):
        if before[0] == after[0] and after[1] < before[2]:
            text = f"{before[3]} and {after[3]} of the module share a part of their memory; each must have its own"
            _refuse(made, "collision", after[3], text)


def _refuse(made: ModuleState, code: FindingCode, subject: str, text: str) -> None:
    made.findings.append(Finding(code, "error", subject, text))


def poison(tensor: torch.Tensor, *, other: bool = False) -> torch.Tensor:
    """Fill a fresh tensor with what no weight is, and return it.

    Args:
        tensor: Contiguous; NaN if it is of floats, else the byte 0x5A, for truth values True.
        other: Fill it with other poison, to find out what was overwritten.

    >>> poison(torch.zeros(2)).tolist(), poison(torch.zeros(1, dtype=torch.int16)).item() == 0x5A5A
    ([nan, nan], True)
    """
    if tensor.dtype == torch.bool:
        return tensor.fill_(not other)
    if not other and (tensor.is_floating_point() or tensor.is_complex()) and tensor.element_size() > 1:
        return tensor.fill_(float("nan"))
    if tensor.numel():
        tensor.reshape(-1).view(torch.uint8).fill_(_BYTES[other])
    return tensor


def materialise(state: ModuleState, values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give memory to every tensor on ``meta``: poisoned if a checkpoint must fill it, else with the value made for it.

    Args:
        state: What the module holds.
        values: Full name of each hidden tensor to its value.
        device: Where.
    Raises:
        LoadError: a tensor cannot get memory in its place.
    """
    for one in state.held:
        if one.tensor.device == META:
            fresh = poison(torch.empty(one.tensor.shape, dtype=one.tensor.dtype, device=device))
            _become(one.names[0], one.tensor, fresh)
    for hidden in state.hidden:
        _become(hidden.name, hidden.tensor, values[hidden.name].to(device))


def _become(name: str, tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Let a tensor on ``meta`` have another's memory; the object, its class and its attributes stay."""
    made = nn.Parameter(fresh, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
    vars(made).update(vars(tensor))
    try:
        torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except RuntimeError as error:
        raise LoadError(f"{name} of the module cannot get memory in its place: {error}") from error
