"""Parts of nodes as they were found in a checkpoint: records that the matcher makes and everything after it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from steelyard.blueprint import AttentionState, Embedding, Experts, FillWith, Linear, Node, Norm, Param
from steelyard.headers import TensorEntry
from steelyard.layouts import Layout, StoredTensor
from steelyard.placement import Dims, Order, Pairs
from steelyard.schemes import LayerScheme


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor of a matched layout: as it is stored, and as its buffer wants it.

    Attributes:
        tensor: The layout's entry.
        dims: The dims as stored, an expert dim and a transpose included.
        target: The dims of the buffer.
        dtype: Stored dtype; of a fill, the first that the layout names.
        shape: Stored shape; of a fill, empty.
        order: How parts lie in it, if several share it.
        stacked: Whether all experts share it.
        swap: Dims to swap on the way to the buffer.
        pairs: Rows to take out of rotary pairs on the way.
        fill: The constant that stands for it, if it is absent.
    """

    tensor: StoredTensor
    dims: Dims
    target: Dims
    dtype: str
    shape: tuple[int, ...]
    order: Order | None = None
    stacked: bool = False
    swap: tuple[int, int] | None = None
    pairs: Pairs | None = None
    fill: FillWith | None = None


@dataclass(frozen=True, slots=True, eq=False)
class UnitClass:
    """What one part of a node is made of; shared by all parts with the same shapes, so compared by identity.

    Attributes:
        part: The part's name.
        scheme: How it is quantized.
        layout: The alternative that fits.
        tensors: Its tensors, as found.
        is_stacked: Whether one stored tensor holds every expert of it.
    """

    part: str
    scheme: LayerScheme
    layout: Layout
    tensors: tuple[Found, ...]
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A part found: its class, and the header's entry of each of the class's tensors (None for a fill)."""

    cls: UnitClass
    entries: tuple[TensorEntry | None, ...]


def shape_of(node: Node) -> Node:
    """Return the node without its names: equal for nodes that are matched, cut and served alike."""
    if isinstance(node, Experts):
        inner = (replace(node.w13, stem="", layer=None), replace(node.w2, stem="", layer=None))
        return replace(node, stem="", layer=None, w13=inner[0], w2=inner[1])
    if isinstance(node, Embedding):
        return replace(node, stem="")
    return replace(node, stem="", layer=None)


def sizes_of(node: Node, part: str, experts: int | None) -> dict[str, int]:
    """Return the logical sizes of every axis that a part's tensors may have."""
    match node:
        case Linear():
            mine = next(one for one in node.parts if one.name == part)
            sizes = {"out": mine.out, "in": node.in_features, "part": len(node.parts)}
            if mine.heads:
                sizes["head"] = mine.heads
        case Embedding():
            sizes = {"out": node.vocabulary, "in": node.hidden}
        case Norm():
            sizes = {"out": node.size, "in": 1}
        case Param():
            sizes = {"out": node.out, "in": node.inner}
        case AttentionState():
            sizes = {"out": node.kv_heads * node.head_dim, "in": 1, "head": node.kv_heads}
        case Experts():
            raise TypeError("experts are matched one Linear at a time")
    if experts is not None:
        sizes["expert"] = experts
    return sizes
