"""Local nodes: the piece of each node that one rank holds, from placement and ranks alone.

They come before kernel choice and before cuts: a kernel is asked about the local shape, a cut is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from steelyard.blueprint import AttentionState, Embedding, Experts, Linear, Node, Norm, Param, Part, Placement
from steelyard.errors import ConfigError, CutError
from steelyard.placement import Span, fitting_sizes, whole
from steelyard.ranks import Ranks, distribute, head_range


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A rank's rows of one part; ``heads`` is the range of its heads, if it has any."""

    name: str
    out: Span
    heads: Span | None = None


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A rank's piece of a node, or of some of its parts.

    Attributes:
        node: What it is a piece of; for experts, the Linear of one expert.
        parts: Its parts' ranges of ``out``.
        inner: Its range of ``in``.
        experts: Its range of experts, if there are any.
        padding: Rows past the vocabulary that this rank holds, at the end of its rows.
    """

    node: Linear | Embedding | Norm | Param | AttentionState
    parts: tuple[LocalPart, ...]
    inner: Span
    experts: Span | None = None
    padding: int = 0

    @property
    def n(self) -> int:
        """Local out-features, padding included, in elements."""
        return sum(len(part.out) for part in self.parts) + self.padding

    @property
    def k(self) -> int:
        """Local in-features, in elements."""
        return len(self.inner)

    def only(self, names: tuple[str, ...]) -> LocalNode:
        """Return the same piece with some of the parts alone, in the order of the names."""
        by_name = {part.name: part for part in self.parts}
        return replace(self, parts=tuple(by_name[name] for name in names))

    def spans(self, part: LocalPart) -> Mapping[str, Span]:
        """Return the range of every logical axis, for one part."""
        names = [mine.name for mine in self.parts]
        index = names.index(part.name)
        spans = {"out": part.out, "in": self.inner, "part": Span(index, index + 1, len(names))}
        if self.experts is not None:
            spans["expert"] = self.experts
        if part.heads is not None:
            spans["head"] = part.heads
        return spans


@dataclass(frozen=True, slots=True)
class LocalExperts:
    """A rank's piece of an Experts node: some of the experts, or some of the rows inside each, or both.

    Attributes:
        node: The node, without its names.
        w13: Its piece of gate and up.
        w2: Its piece of down.
        is_first: Whether it is the first of the ranks that share an expert: what is added once is added there.
    """

    node: Experts
    w13: LocalNode
    w2: LocalNode
    is_first: bool = True

    @property
    def experts(self) -> Span:
        """The experts that the rank holds."""
        held = self.w13.experts
        assert held is not None, "w13 is a piece of experts"
        return held

    @property
    def inner(self) -> int:
        """Rows of gate, and of up, that the rank holds of each expert."""
        return self.w2.k


def localize(
    node: Node, ranks: Ranks, *, experts: str = "uneven", vocab_padding: str = "auto"
) -> tuple[LocalNode, ...]:
    """Return a rank's piece of a node: one local node, or two (w13, w2) for experts.

    Args:
        node: The node.
        ranks: The rank and the sizes of the job.
        experts: ``"even"`` refuses a number of experts that the ranks do not divide.
        vocab_padding: ``"off"`` refuses a vocabulary that the ranks do not divide.
    Raises:
        CutError: a size does not divide by the ranks.
        ConfigError: heads or experts do not go out over the ranks.
    """
    match node:
        case Linear():
            return (_linear(node, ranks.tp, ranks.tp_rank, vocab_padding),)
        case Experts():
            if experts == "even" and node.num_experts % ranks.ep:
                raise ConfigError(f"{node.num_experts} experts do not divide by ep {ranks.ep} and experts='even'")
            start, stop = distribute(node.num_experts, ranks.ep, ranks.ep_rank)
            mine = Span(start, stop, node.num_experts)
            return tuple(
                replace(_linear(one, ranks.moe_tp, ranks.moe_tp_rank, vocab_padding), experts=mine)
                for one in (node.w13, node.w2)
            )
        case Embedding():
            return (_embedding(node, ranks, vocab_padding),)
        case Norm():
            if node.placement is not Placement.REPLICATED and ranks.tp > 1:
                raise ConfigError(
                    f"a norm over {node.size} elements is declared {node.placement.value}; each of {ranks.tp} ranks would "
                    "take the mean of its own share alone. Declare it replicated, or over one head"
                )
            return (LocalNode(node, (LocalPart("", whole(node.size)),), whole(1)),)
        case Param():
            out = _divide("out", node.out, ranks, node.placement is Placement.COLWISE)
            inner = _divide("in", node.inner, ranks, node.placement is Placement.ROWWISE)
            return (LocalNode(node, (LocalPart("", out),), inner),)
        case AttentionState():
            head_range(node.q_heads, node.kv_heads, ranks.tp, ranks.tp_rank, kv=False)
            start, stop = head_range(node.q_heads, node.kv_heads, ranks.tp, ranks.tp_rank, kv=True)
            size = node.head_dim
            rows = Span(start * size, stop * size, node.kv_heads * size)
            return (LocalNode(node, (LocalPart("", rows, Span(start, stop, node.kv_heads)),), whole(1)),)


def even(axis: str, size: int, parts: int, index: int) -> Span:
    """Return the equal share ``index`` of ``parts``; raise CutError if the size does not divide.

    >>> even("out", 12, 3, 1)
    Span(start=4, stop=8, size=12)
    """
    if size % parts:
        raise CutError(
            axis,
            (0, size),
            0,
            f"{size} elements do not divide by tp {parts}",
            fits=fitting_sizes(size, 1, limit=max(parts, 16)),
        )
    local = size // parts
    return Span(index * local, (index + 1) * local, size)


def _divide(axis: str, size: int, ranks: Ranks, is_cut: bool) -> Span:
    return even(axis, size, ranks.tp, ranks.tp_rank) if is_cut else whole(size)


def _linear(node: Linear, tp: int, tp_rank: int, vocab_padding: str) -> LocalNode:
    if node.placement is Placement.COLWISE:
        if any(part.padded for part in node.parts):
            if len(node.parts) > 1:
                raise ConfigError("a padded part must be the only one of its Linear")
            rows, padding = padded_rows(node.parts[0].out, tp, tp_rank, vocab_padding)
            return LocalNode(node, (LocalPart(node.parts[0].name, rows),), whole(node.in_features), padding=padding)
        parts = tuple(_part(node, part, tp, tp_rank) for part in node.parts)
        return LocalNode(node, parts, whole(node.in_features))
    everything = tuple(
        LocalPart(part.name, whole(part.out), whole(part.heads) if part.heads else None) for part in node.parts
    )
    if node.placement is Placement.ROWWISE:
        return LocalNode(node, everything, even("in", node.in_features, tp, tp_rank))
    return LocalNode(node, everything, whole(node.in_features))


def _part(node: Linear, part: Part, tp: int, tp_rank: int) -> LocalPart:
    if part.heads is None:
        return LocalPart(part.name, even("out", part.out, tp, tp_rank))
    if part.out % part.heads:
        raise ConfigError(f"{part.out} rows of {part.name!r} are not a multiple of {part.heads} heads")
    kv_heads = next((other.heads for other in node.parts if other.kv and other.heads), None)
    q_heads = next((other.heads for other in node.parts if other.heads and not other.kv), None)
    if q_heads is None:
        raise ConfigError(f"key/value heads of {part.name!r} stand without their query heads in one Linear")
    if part.heads != (kv_heads if part.kv else q_heads):
        raise ConfigError(
            f"{part.name!r} has {part.heads} heads, the parts before it {kv_heads if part.kv else q_heads}"
        )
    start, stop = head_range(q_heads, kv_heads or q_heads, tp, tp_rank, kv=part.kv)
    size = part.out // part.heads
    return LocalPart(part.name, Span(start * size, stop * size, part.out), Span(start, stop, part.heads))


def _embedding(node: Embedding, ranks: Ranks, vocab_padding: str) -> LocalNode:
    if node.placement is Placement.ROWWISE:
        inner = even("in", node.hidden, ranks.tp, ranks.tp_rank)
        return LocalNode(node, (LocalPart("", whole(node.vocabulary)),), inner)
    if node.placement is Placement.REPLICATED:
        return LocalNode(node, (LocalPart("", whole(node.vocabulary)),), whole(node.hidden))
    rows, padding = padded_rows(node.vocabulary, ranks.tp, ranks.tp_rank, vocab_padding)
    return LocalNode(node, (LocalPart("", rows),), whole(node.hidden), padding=padding)


def padded_rows(vocabulary: int, tp: int, tp_rank: int, vocab_padding: str) -> tuple[Span, int]:
    """Return a rank's rows of a vocabulary, and the rows of padding that follow them.

    Args:
        vocabulary: Rows stored.
        tp: Ranks that share them.
        tp_rank: This rank.
        vocab_padding: ``"auto"`` pads to a multiple of the ranks, ``"off"`` refuses.
    Raises:
        CutError: it does not divide and padding is off; the text names the size to pad to.

    >>> padded_rows(10, 4, 3, "auto")
    (Span(start=9, stop=10, size=10), 2)
    """
    padded = -(-vocabulary // tp) * tp
    if padded != vocabulary and vocab_padding == "off":
        raise CutError(
            "out",
            (0, vocabulary),
            0,
            f"a vocabulary of {vocabulary} does not divide by tp {tp}; pad it to {padded}, or allow "
            "vocab_padding='auto'",
        )
    local = padded // tp
    start = min(tp_rank * local, vocabulary)
    stop = min(start + local, vocabulary)
    return Span(start, stop, vocabulary), local - (stop - start)
