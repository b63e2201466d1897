"""How one layer is quantized, and what a backend or a method answers about it: small closed records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from steelyard.granularity import Granularity, PerToken, grid, refine

Option: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Activation:
    """How the input of a layer is quantized.

    Attributes:
        weight: Short name of the format, as it stands in a scheme key: ``"fp8"``, ``"int8"``.
        granularity: Which elements share a scale.
        static: Whether the scale is stored in the checkpoint.
    """

    weight: str
    granularity: Granularity | PerToken
    static: bool = False


@dataclass(frozen=True, slots=True)
class LayerScheme:
    """How one part of a node is quantized, normalised over dialects.

    Attributes:
        weight: Number format of the weight: ``"float"``, ``"fp8"``, ``"int4"``.
        packing: How codes lie on disk: ``"plain"``, ``"awq"``, ``"pack32"``.
        granularity: Which elements share a scale; None for a plain float.
        activation: How the input is quantized, or None.
        symmetric: Whether there are no zero points.
        options: What else the dialect says that a method needs, sorted by name.
    """

    weight: str = "float"
    packing: str = "plain"
    granularity: Granularity | None = None
    activation: Activation | None = None
    symmetric: bool = True
    options: tuple[tuple[str, Option], ...] = ()

    def key(self, *, experts: bool = False) -> str:
        """Return the look-up key of the quant method, ``<weight>.<packing>[.a<act>][.experts]``.

        >>> LayerScheme("int4", "bytes", activation=Activation("fp8", PerToken())).key(experts=True)
        'int4.bytes.afp8.experts'
        """
        act = f".a{self.activation.weight}" if self.activation else ""
        return f"{self.weight}.{self.packing}{act}{'.experts' if experts else ''}"

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is stored in another form than a plain float."""
        return self.weight != "float"

    def option(self, name: str, default: Option = None) -> Option:
        """Return one option."""
        return dict(self.options).get(name, default)

    def grid(self) -> Mapping[str, int]:
        """Return the steps of the scale grid, axis to logical elements."""
        return grid(self.granularity)

    def refined(self, steps: Mapping[str, int]) -> LayerScheme:
        """Return the scheme on a finer scale grid; itself if there are no steps."""
        if not steps or self.granularity is None:
            return self
        return replace(self, granularity=refine(self.granularity, steps))


UNQUANTIZED = LayerScheme()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A yes or no with its reason.

    >>> bool(Verdict(False, "needs sm_90"))
    False
    """

    ok: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel takes; `QuantMethod.prepare` goes to it and no further.

    Attributes:
        name: Name of the form, unique for a backend.
        weight_dtype: Code of the weight's dtype in memory; core puts the parameter's where a backend says None.
        scales: How scales are given: as stored, one a row, or one for the tensor.
        part_order: Order of the parts along ``out``; None keeps the node's.
        alignment: Elements that local (out, in) must be multiples of.
        smallest_grid: Finest step of a refined scale grid that the kernel takes; None takes no refined grid.
    """

    name: str
    weight_dtype: str | None = None
    scales: Literal["stored", "row", "tensor"] = "stored"
    part_order: tuple[str, ...] | None = None
    alignment: tuple[int, int] = (1, 1)
    smallest_grid: int | None = None


@dataclass(frozen=True, slots=True)
class Accept:
    """A backend's answer for one layer: a verdict and, if yes, the form that it takes."""

    verdict: Verdict
    form: Form | None = None

    def __post_init__(self) -> None:
        if self.verdict.ok and self.form is None:
            raise ValueError("Accept: a yes needs a form")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one Segment or expert slab needs on the target device.

    Units:
        Bytes. ``final`` stays, ``transient`` is needed beside it and the stored tensors while it is prepared.
    """

    final: int
    transient: int = 0
