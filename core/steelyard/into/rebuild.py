"""Values of what no checkpoint holds: buffers outside the state dict, made anew by the code that made them first.

Four ways are tried, all on copies without weights, before anything is read: what the caller gives; the model's own
``initialize_weights()``, as transformers fills them after its own loads; the owner's ``reset_parameters()``, torch's
convention for modules that were made on ``meta``; the owner's constructor, with the arguments that it keeps.

Each way runs twice, over other poison and other random numbers. Only a value that comes out equal to the bit both
times was made by the code, and not left over; anything else is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from steelyard.findings import Finding
from steelyard.into.held import META, Hidden, poison

Rebuild: TypeAlias = Callable[[nn.Module], torch.Tensor]
"""Returns the value of one buffer; it gets the module that owns it, which may be on ``meta``."""

_SETTINGS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_UNINITIALISED = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted,
    torch.Tensor.new_empty, torch.Tensor.new_empty_strided,
}  # fmt: skip


@dataclass(slots=True)
class Rebuilt:
    """What was made anew.

    Attributes:
        values: Full name to value, on the CPU.
        how: Full name to the way that made it.
        findings: What no way makes, and patterns that name nothing.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


class _Unable(Exception):
    """Why a way cannot make a value."""


def make_again(module: nn.Module, hidden: Sequence[Hidden], given: Mapping[str, Rebuild]) -> Rebuilt:
    """Make the value of each hidden tensor; the module itself is not touched.

    Args:
        module: The module.
        hidden: What to make.
        given: Full name, or a pattern with ``*`` for any run, to what makes its value.
    """
    made = Rebuilt()
    reasons: dict[str, list[str]] = {one.name: [] for one in hidden}
    for name in given:
        if not any(fnmatchcase(one.name, name) for one in hidden):
            text = f"rebuild names {name}, which matches no tensor on meta that the state dict leaves out"
            made.findings.append(Finding("unused-pattern", "note", name, text))
    for one in hidden:
        maker = next((make for pattern, make in given.items() if fnmatchcase(one.name, pattern)), None)
        if maker is not None:
            _try(made, [one], "rebuild=", reasons, partial(_given, maker, module.get_submodule(one.path)))
    left = _left(made, hidden)
    for path in _initializing(module) if left else ():
        inside = [one for one in left if _lies_in(one.path, path)]
        _try(made, inside, "initialize_weights()", reasons, partial(_initialized, module, path, inside))
    owners: dict[str, list[Hidden]] = {}
    for one in _left(made, hidden):
        owners.setdefault(one.path, []).append(one)
    for path, mine in owners.items():
        owner = module.get_submodule(path)
        kind = type(owner).__name__
        _try(made, mine, f"{kind}.reset_parameters()", reasons, partial(_reset, owner, mine))
        mine = _left(made, mine)
        _try(made, mine, f"{kind}(...)", reasons, partial(_constructed, owner, mine))
    for one in _left(made, hidden):
        text = (
            f"{one.name} is on meta, the module's state dict leaves it out, and no code that was found makes its value "
            f"({'; '.join(reasons[one.name])}); say rebuild={{{one.name!r}: function of its owner}}, or make the module "
            "on a real device"
        )
        made.findings.append(Finding("missing", "error", one.name, text))
    return made


def _left(made: Rebuilt, hidden: Iterable[Hidden]) -> list[Hidden]:
    return [one for one in hidden if one.name not in made.values]


def _lies_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _try(
    made: Rebuilt,
    hidden: Sequence[Hidden],
    how: str,
    reasons: Mapping[str, list[str]],
    run: Callable[[int], Sequence[object]],
) -> None:
    """Run one way twice and keep what came out equal; note for everything else why it did not."""
    if not hidden:
        return
    try:
        both = []
        for seed in (0, 1):
            with _aside(seed):
                both.append(run(seed))
    except _Unable as error:
        for one in hidden:
            reasons[one.name].append(f"{how}: {error}")
        return
    except Exception as error:  # noqa: BLE001 - a module's own code may fail in any way; what it says is passed on
        for one in hidden:
            reasons[one.name].append(f"{how} failed with {type(error).__name__}: {error}")
        return
    for one, first, second in zip(hidden, *both, strict=True):
        why = _unlike(one.tensor, first, second)
        if why:
            reasons[one.name].append(f"{how}: {why}")
        else:
            assert isinstance(first, torch.Tensor), "what is alike is a tensor"
            made.values[one.name] = first.detach().clone(memory_format=torch.contiguous_format)
            made.how[one.name] = how


def _unlike(wanted: torch.Tensor, first: object, second: object) -> str:
    """Say why two values made one after the other are not what is wanted; "" if they are."""
    for value in (first, second):
        if not isinstance(value, torch.Tensor):
            return f"it gives a {type(value).__name__}"
        if value.device == META:
            return "it is left without a value"
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            return f"it gives {value.dtype} {list(value.shape)}, the module has {wanted.dtype} {list(wanted.shape)}"
    assert isinstance(first, torch.Tensor), "looked at above"
    assert isinstance(second, torch.Tensor), "looked at above"
    return "" if _bits(first) == _bits(second) else "it is not overwritten in full, or with other values each time"


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@contextmanager
def _aside(seed: int) -> Iterator[None]:
    """Let code run without gradients and with random numbers of its own, which the process's do not notice."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _twin(module: nn.Module, hidden: Iterable[Hidden], seed: int) -> nn.Module:
    """Return a copy of a module whose parameters are on ``meta`` and whose hidden tensors are poison."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device=META)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for one in hidden:
        fresh = torch.empty(one.tensor.shape, dtype=one.tensor.dtype)
        memo[id(one.tensor)] = poison(fresh, other=bool(seed))
    twin = copy.deepcopy(module, memo)
    assert isinstance(twin, nn.Module), "a copy is of the same class"
    return twin


def _initializing(module: nn.Module) -> Iterator[str]:
    """Yield the names of the outermost modules that can initialise all that is in them."""
    found: list[str] = []
    for path, one in module.named_modules():
        if hasattr(type(one), "initialize_weights") and not any(_lies_in(path, outer) for outer in found):
            found.append(path)
            yield path


def _given(maker: Rebuild, owner: nn.Module, seed: int) -> list[object]:
    return [maker(owner)]


def _initialized(module: nn.Module, path: str, hidden: Sequence[Hidden], seed: int) -> list[object]:
    twin: Any = _twin(module.get_submodule(path), hidden, seed)
    twin.initialize_weights()
    inner = [one.path[len(path) :].lstrip(".") if path else one.path for one in hidden]
    return [getattr(twin.get_submodule(place), one.attribute) for place, one in zip(inner, hidden, strict=True)]


def _reset(owner: nn.Module, hidden: Sequence[Hidden], seed: int) -> list[object]:
    if not hasattr(type(owner), "reset_parameters"):
        raise _Unable("there is none")
    twin: Any = _twin(owner, hidden, seed)
    twin.reset_parameters()
    return [getattr(twin, one.attribute) for one in hidden]


def _constructed(owner: nn.Module, hidden: Sequence[Hidden], seed: int) -> list[object]:
    """Make the owner again; what its constructor leaves uninitialised stays on ``meta``, and takes no memory."""
    given: dict[str, object] = {}
    for name, parameter in inspect.signature(type(owner)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _Unable(f"its constructor takes {parameter}, which is not kept")
        if name in ("device", "dtype") and parameter.default is None:
            continue
        if name not in vars(owner):
            raise _Unable(f"its constructor takes {name}, which is not kept under that name")
        given[name] = vars(owner)[name]
    with _EmptyOnMeta():
        again = type(owner)(**given)
    for name, value in vars(again).items():
        if name != "training" and isinstance(value, _SETTINGS) and vars(owner).get(name) != value:
            raise _Unable(f"made again it has {name}={value!r}, and {vars(owner).get(name)!r} here")
    return [getattr(again, one.attribute) for one in hidden]


class _EmptyOnMeta(TorchFunctionMode):
    """Puts on ``meta`` what is made without a value."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _UNINITIALISED:
            named["device"] = META
        return func(*args, **named)
