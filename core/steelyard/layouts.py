"""How a scheme's tensors lie on disk, and where a node's names stand: records that core can cut without asking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from steelyard.blueprint import Absent
from steelyard.dtypes import FLOATS
from steelyard.placement import Axis, Cut, Dims, Order, RowOrder, Spans, transpose

if TYPE_CHECKING:
    from collections.abc import Sequence

Role: TypeAlias = Literal["codes", "scale", "zero", "input_scale", "index", "metadata", "bias"]
Merge: TypeAlias = Literal["concat", "per_part", "equal", "max"]
CheckName: TypeAlias = Literal["finite", "positive", "power_of_two", "no_nan_codes", "trivial_index"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a layout.

    Attributes:
        spellings: Endings that it may have, with their separator; the first is canonical.
        dtypes: Codes that it may have.
        dims: Every accepted form, such as ``((), (Fixed(1),))`` for a scalar; no two may fit one shape.
        absent: What its absence means.
        role: What it is.
        merge: How the parts of a fused node share it: laid one behind the other along ``out`` (``concat``), one
            each (``per_part``), one for all that must be equal (``equal``), or the largest (``max``).
        scope: ``global`` if a rank needs it of every expert, not of its own alone.
        checks: What its bytes must satisfy, tested while they pass.
    """

    spellings: tuple[str, ...]
    dtypes: tuple[str, ...]
    dims: tuple[Dims, ...]
    absent: Absent = "error"
    role: Role = "codes"
    merge: Merge = "concat"
    scope: Literal["local", "global"] = "local"
    checks: tuple[CheckName, ...] = ()

    @property
    def name(self) -> str:
        """The canonical ending without its separator: the key of the tensor in what `prepare` gets."""
        return self.spellings[0].lstrip("._")


class Cutter(Protocol):
    """Cuts what dims alone cannot describe: act-order indices, tiles of a kernel.

    The same laws hold as for declared dims: cut then decode equals decode then cut, bit for bit.
    """

    def cut(self, tensor: StoredTensor, dims: Dims, spans: Spans, order: Order | None, part: str) -> Cut:
        """Return a rank's piece; raise CutError if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """One closed alternative of how a scheme's tensors are stored.

    Attributes:
        name: Unique among the alternatives, for messages and the report.
        tensors: What it consists of.
        cut: Only for formats that dims cannot describe.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    cut: Cutter | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where one part of a node may stand in a checkpoint.

    Attributes:
        path: Name without the layout's ending; for a `Param`, the whole name.
        respell: Endings that differ here, such as ``{".weight": ".gamma"}``.
        order: How parts lie along ``out`` if several share the tensor.
        stacked: Whether all experts stand in one tensor; core puts ``Axis("expert")`` in front.
        transposed: Whether (in, out) is stored; core swaps the two where a tensor has both.
        rows: How the rows of one attention head are stored; core puts them into the model's order.
    """

    path: str
    respell: Mapping[str, str] = field(default_factory=dict)
    order: Order | None = None
    stacked: bool = False
    transposed: bool = False
    rows: RowOrder = RowOrder.PLAIN

    def names(self, tensor: StoredTensor) -> list[str]:
        """Return every name that a tensor may have here."""
        path, respell = self.path, self.respell
        return [path + respell.get(spelling, spelling) for spelling in tensor.spellings]

    def dims(self, dims: Dims) -> Dims:
        """Return a layout's dims as they lie in this source."""
        if self.transposed:
            dims = transpose(dims)
        return (Axis("expert"), *dims) if self.stacked else dims

    @property
    def shape_key(self) -> tuple[Order | None, bool, bool, RowOrder]:
        """What of the source decides shapes and cuts: equal keys share them."""
        return self.order, self.stacked, self.transposed, self.rows


@dataclass(frozen=True, slots=True)
class Drop:
    """Tensors of a checkpoint that are left out on purpose.

    Attributes:
        pattern: A name with ``*`` for any run of characters; it must match a whole name.
        because: The reason, as the report prints it.
    """

    pattern: str
    because: str


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor that a dialect stores beside a node of some class, such as a KV-cache scale.

    Attributes:
        node: Class name of the node it belongs to: ``"AttentionState"``, ``"Linear"``.
        tensor: The tensor; its spellings follow the path of the node's sources.
    """

    node: str
    tensor: StoredTensor


def plain(name: str, *dims: Dims, absent: Absent = "error", role: Role = "codes") -> StoredTensor:
    """Return a plain float tensor with the ending ``.name``, or no ending if the name is empty."""
    return StoredTensor((f".{name}" if name else "",), FLOATS, dims, absent=absent, role=role)


def bias_tensor() -> StoredTensor:
    """Return the bias that core adds to every layout of a Linear that has one.

    Shapes:
        (out,)
    """
    return plain("bias", (Axis("out"),), role="bias")


def with_bias(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """Return the layouts with a bias added to each."""
    return tuple(Layout(layout.name, (*layout.tensors, bias_tensor()), layout.cut) for layout in layouts)
