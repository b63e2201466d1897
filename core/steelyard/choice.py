"""Which kernel backend serves a Segment: asked in a stated order, every refusal and its reason kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from steelyard.errors import ConfigError
from steelyard.local import LocalExperts, LocalNode
from steelyard.protocols import ExpertsBackend, KernelBackend
from steelyard.schemes import Accept, Form, LayerScheme

REFERENCE = "torch"
"""The backend that computes everything, slowly; always the last to be asked."""

PREFERRED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("fp8", "sm_90"): ("deepgemm",),
    ("fp8", "gfx942"): ("aiter",),
    ("int4", "gfx942"): ("aiter",),
}
"""First choices by (weight format, target); backends that are not installed are passed over."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen backend.

    Attributes:
        backend: Its key.
        form: What it takes.
        refusals: Backend to reason, of those asked before it.
        missing: Why it cannot run here, empty if it can; a plan for another machine keeps the choice.
    """

    backend: str
    form: Form
    refusals: tuple[tuple[str, str], ...] = ()
    missing: str = ""


class NoKernel(Exception):
    """Every candidate refused; caught by the planner, which makes a finding of it."""

    def __init__(self, refusals: Mapping[str, str]) -> None:
        self.refusals = dict(refusals)
        super().__init__(
            "; ".join(f"{name}: {why}" for name, why in refusals.items()) or "no kernel backend is installed"
        )


def order_of(installed: Sequence[str], scheme: LayerScheme, target: str, wanted: Sequence[str] | None) -> list[str]:
    """Return the backends to ask, in order.

    Args:
        installed: Keys of the backends that there are.
        scheme: How the layer is quantized.
        target: What it shall run on.
        wanted: The user's list, which replaces the default order; None for the default.
    Raises:
        ConfigError: the user names a backend that is not installed.
    """
    if wanted is not None:
        unknown = [name for name in wanted if name not in installed]
        if unknown:
            raise ConfigError(
                f"kernels={list(wanted)} names {', '.join(unknown)}; installed: {', '.join(sorted(installed)) or 'none'}"
            )
        return list(wanted)
    first = [name for name in PREFERRED.get((scheme.weight, target), ()) if name in installed]
    rest = sorted(name for name in installed if name not in first and name != REFERENCE)
    return [*first, *rest, *([REFERENCE] if REFERENCE in installed else [])]


def choose(
    backends: Mapping[str, KernelBackend],
    scheme: LayerScheme,
    nodes: Sequence[LocalNode],
    target: str,
    *,
    wanted: Sequence[str] | None = None,
    is_refined: bool = False,
    here: bool = True,
) -> Choice:
    """Return the first backend that takes a Segment on every rank.

    Args:
        backends: Key to backend.
        scheme: The Segment's scheme, refined if its grid is.
        nodes: Its local node on every rank, equal ones once.
        target: What it shall run on.
        wanted: The user's list of backends, or None.
        is_refined: Whether the scale grid is refined, which not every form takes.
        here: Whether it shall run on this machine, so that a backend must be installed in full.
    Raises:
        NoKernel: all refused.
        ConfigError: the user names a backend that is not there.
    """
    finest = min(scheme.grid().values(), default=0) if is_refined else None

    def ask(backend: KernelBackend) -> tuple[Form | None, str]:
        return _one_form([(backend.accepts(scheme, node, target), (node,)) for node in nodes], finest)

    return _first(backends, scheme, target, ask, wanted=wanted, here=here)


def choose_experts(
    backends: Mapping[str, KernelBackend],
    w13: LayerScheme,
    w2: LayerScheme,
    nodes: Sequence[LocalExperts],
    target: str,
    *,
    wanted: Sequence[str] | None = None,
    finest: int | None = None,
    here: bool = True,
) -> Choice:
    """Return the first backend that takes the experts of a layer, both matrices, on every rank.

    Args:
        backends: Key to backend.
        w13: How gate and up are quantized, on the refined grid if it is.
        w2: How down is.
        nodes: The experts on every rank, equal ones once.
        target: What it shall run on.
        wanted: The user's list of backends, or None.
        finest: The finest step of a refined scale grid, None if none is refined.
        here: Whether it shall run on this machine.
    Raises:
        NoKernel: all refused.
        ConfigError: the user names a backend that is not there.
    """

    def ask(backend: KernelBackend) -> tuple[Form | None, str]:
        if not isinstance(backend, ExpertsBackend):
            return None, "has no kernel for routed experts"
        answers = [(backend.accepts_experts(w13, w2, node, target), (node.w13, node.w2)) for node in nodes]
        return _one_form(answers, finest)

    return _first(backends, w13, target, ask, wanted=wanted, here=here)


def _first(
    backends: Mapping[str, KernelBackend],
    scheme: LayerScheme,
    target: str,
    ask: Callable[[KernelBackend], tuple[Form | None, str]],
    *,
    wanted: Sequence[str] | None,
    here: bool,
) -> Choice:
    refusals: dict[str, str] = {}
    for name in order_of(list(backends), scheme, target, wanted):
        backend = backends[name]
        serves = backend.serves(target)
        if not serves:
            refusals[name] = serves.why
            continue
        installed = backend.installed()
        if here and not installed:
            refusals[name] = installed.why
            continue
        form, why = ask(backend)
        if form is None:
            refusals[name] = why
            continue
        return Choice(name, form, tuple(refusals.items()), "" if installed else installed.why)
    raise NoKernel(refusals)


def _one_form(answers: Sequence[tuple[Accept, tuple[LocalNode, ...]]], finest: int | None) -> tuple[Form | None, str]:
    """Return the form that a backend takes on every rank, or why there is none."""
    form: Form | None = None
    for answer, nodes in answers:
        if not answer.verdict or answer.form is None:
            return None, answer.verdict.why
        if form is not None and answer.form != form:
            return None, f"takes {form.name} on one rank and {answer.form.name} on another"
        form = answer.form
        for node in nodes:
            unknown = [part.name for part in node.parts if form.part_order and part.name not in form.part_order]
            if unknown and len(node.parts) > 1:
                return None, f"orders the parts {', '.join(form.part_order or ())}, not {', '.join(unknown)}"
            if node.n % form.alignment[0] or node.k % form.alignment[1]:
                return None, f"local shape [{node.n}, {node.k}] is not a multiple of {list(form.alignment)}"
        if finest is not None and (form.smallest_grid is None or finest < form.smallest_grid):
            return None, f"takes no scale grid as fine as {finest}"
    return form, ""
