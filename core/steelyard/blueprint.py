"""The model as data: its nodes, without tensors and without names on disk.

A family turns a config into a `Blueprint`. Everything after it (names, schemes, cuts, kernels) is worked out from
these nodes, so a family holds no code for quantization or for ranks.

Legend: ``out`` and ``in`` are out_features and in_features. An Embedding's ``out`` is the vocabulary and its ``in``
the hidden size, so that a tied head is cut like it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

from steelyard.placement import Dims


class Placement(Enum):
    """How a node goes out over the tensor-parallel ranks."""

    COLWISE = "colwise"  # along out
    ROWWISE = "rowwise"  # along in
    REPLICATED = "replicated"  # not at all


@dataclass(frozen=True, slots=True)
class FillWith:
    """The value of every element of a tensor that the checkpoint may leave out."""

    value: float


Absent: TypeAlias = Literal["error", "skip"] | FillWith
"""What an absent tensor means: an error, nothing at all, or a constant."""


@dataclass(frozen=True, slots=True)
class Part:
    """A member of a fused Linear.

    Attributes:
        name: ``"q"``, ``"gate"``; ``""`` for the only part of an unfused Linear.
        out: Out-features of the part, in elements.
        heads: Attention heads in it; it is then cut between heads.
        kv: Whether these are key/value heads, which repeat where there are more ranks than heads.
        padded: Whether zero rows may be added so that the ranks divide it (a vocabulary).
    """

    name: str
    out: int
    heads: int | None = None
    kv: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """One or more matrices that share their input.

    Attributes:
        stem: Name of the node in the model.
        in_features: Elements of the input.
        parts: Members, in the model's logical order.
        placement: How it goes out over the ranks.
        bias: Whether every part has one.
        absent: ``"skip"``: the node may be left out whole; a part of it that is there makes the rest needed.
        dtype: Code of a dtype that overrides the model's.
        layer: Index of the layer, if it lies in one.
        because: What in the config asks for it, for messages.
    """

    stem: str
    in_features: int
    parts: tuple[Part, ...]
    placement: Placement
    bias: bool = False
    absent: Literal["error", "skip"] = "error"
    dtype: str | None = None
    layer: int | None = None
    because: str = ""


@dataclass(frozen=True, slots=True)
class Embedding:
    """A look-up table (vocabulary, hidden); colwise is vocabulary-parallel, rowwise hidden-parallel.

    Attributes:
        stem: Name of the node in the model.
        vocabulary: Rows.
        hidden: Columns.
        placement: How it goes out over the ranks.
        absent: What its absence means.
        dtype: Code of a dtype that overrides the model's.
        rows_key: The config's key that sets the rows, for messages.
    """

    stem: str
    vocabulary: int
    hidden: int
    placement: Placement
    absent: Absent = "error"
    dtype: str | None = None
    rows_key: str = ""


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over ``size`` elements.

    Attributes:
        stem: Name of the node in the model.
        size: Elements that are normalised together.
        kind: ``"layer"`` takes the mean away, ``"rms"`` does not.
        eps: What is added to the variance.
        bias: Whether it has one.
        placement: How it goes out over the ranks.
        dtype: Code of a dtype that overrides the model's.
        absent: What its absence means.
        layer: Index of the layer, if it lies in one.
    """

    stem: str
    size: int
    kind: Literal["layer", "rms"] = "rms"
    eps: float = 1e-6
    bias: bool = False
    placement: Placement = Placement.REPLICATED
    dtype: str | None = None
    absent: Absent = "error"
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts: a token goes through ``top_k`` of them, and their outputs are added by its weights.

    Attributes:
        stem: Name of the node in the model.
        num_experts: Experts of the layer, over all ranks.
        w13: One expert's first matrices, ``gate`` and ``up``; its stem and layer are the node's.
        w2: Its last one, down.
        top_k: Experts that a token goes through.
        activation: What the gate passes, by the name that configs use.
        layer: Index of the layer, if it lies in one.
    """

    stem: str
    num_experts: int
    w13: Linear
    w2: Linear
    top_k: int = 1
    activation: str = "silu"
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionState:
    """What attention keeps beside its projections, such as KV-cache scales; filled by a dialect's companions."""

    stem: str
    q_heads: int
    kv_heads: int
    head_dim: int
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """Any other tensor.

    Attributes:
        stem: Its full name in the model.
        dims: How logical axes lie in it.
        out: Elements of the ``out`` axis, if a dim names it.
        inner: Elements of the ``in`` axis, if a dim names it.
        placement: How it goes out over the ranks.
        dtype: Code of a dtype that overrides the model's.
        absent: What its absence means.
    """

    stem: str
    dims: Dims
    out: int = 1
    inner: int = 1
    placement: Placement = Placement.REPLICATED
    dtype: str | None = None
    absent: Absent = "error"
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class Tie:
    """Two nodes that share memory.

    Attributes:
        target: Stem of the node that may have no tensor of its own.
        source: Stem of the node whose weight it uses.
    """

    target: str
    source: str


Node: TypeAlias = Linear | Embedding | Norm | Experts | AttentionState | Param


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model's nodes, in the order in which they are built, and its ties.

    Attributes:
        nodes: The nodes.
        ties: Which of them share memory.
        notes: What the user should know of the config, such as two keys that contradict each other.
    """

    nodes: tuple[Node, ...]
    ties: tuple[Tie, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            if node.stem in seen:
                raise ValueError(f"blueprint: two nodes have the stem {node.stem!r}")
            seen.add(node.stem)
        for tie in self.ties:
            if tie.target not in seen or tie.source not in seen:
                raise ValueError(f"blueprint: tie {tie.target!r} -> {tie.source!r} names a node that does not exist")
