"""Parts of a model's nodes in a checkpoint: how each is quantized, under which names it stands, what stands for it.

The finder asks the dialect, the method and the mapping, and hands the rest to the `Matcher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from steelyard.blueprint import Absent, AttentionState, Embedding, Experts, FillWith, Linear, Node, Norm, Param, Tie
from steelyard.checkpoint import Checkpoint
from steelyard.config import LoadConfig
from steelyard.dtypes import FLOATS
from steelyard.findings import Finding, FindingCode, Severity
from steelyard.layouts import Layout, Source, StoredTensor, plain, with_bias
from steelyard.matching import Matcher
from steelyard.names import Names
from steelyard.placement import Axis
from steelyard.protocols import QuantConfig, QuantMethod
from steelyard.registry import Registry
from steelyard.schemes import UNQUANTIZED, LayerScheme
from steelyard.steps import Alias, AliasIfEqual
from steelyard.units import Unit, UnitClass, shape_of

NORM, PARAM, COMPANIONS = "norm", "param", "companions"
FEW_EXPERTS = 4096
"""Up to so many each missing expert is named; more than there are tensors are a damaged number."""

CORE_LAYOUTS = (NORM, PARAM, COMPANIONS)
"""Layouts that core itself declares, for nodes that no quant method has to do with."""

Units: TypeAlias = dict[tuple[int, str, int | None], Unit]


@dataclass(slots=True)
class NodeParts:
    """A node whose parts were all found.

    Attributes:
        node: The node.
        units: (linear, part, expert) to the part's unit.
        classes: (linear, class) of each part, in order.
    """

    node: Node
    units: Units
    classes: tuple[tuple[int, UnitClass], ...]


class PartFinder:
    """Finds the parts of nodes in one checkpoint; used once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        quant: QuantConfig | None,
        registry: Registry,
        options: LoadConfig,
        matcher: Matcher,
    ) -> None:
        self.checkpoint, self.names, self.quant, self.options = checkpoint, names, quant, options
        self.registry, self.matcher = registry, matcher
        self.methods: dict[str, QuantMethod] = {}
        self.findings: list[Finding] = []
        self.skipped: list[str] = []
        self._shapes: dict[Node, Node] = {}
        # By the identity of an interned shape: hashing a node for each of many thousand parts is what a plan would wait for.
        self._layouts: dict[tuple[LayerScheme, int, bool], tuple[Layout, ...]] = {}
        self._allowed_layouts: dict[int, tuple[Layout, ...]] = {}

    def ties(self, nodes: Sequence[Node], ties: Sequence[Tie]) -> tuple[set[str], tuple[Alias | AliasIfEqual, ...]]:
        """Return the stems that have no tensors of their own, and the ties as steps; every step's source is loaded.

        The order of the ties decides nothing: of nodes that are tied to one another, the one that no tie makes a
        target keeps the weight if it is stored, else the first that is.

        Args:
            nodes: The model's nodes.
            ties: The model's ties.
        """
        by_stem = {node.stem: node for node in nodes}
        aliased: set[str] = set()
        made: list[Alias | AliasIfEqual] = []
        for group in _tied(list(by_stem), ties):
            stored = [stem for stem in group if self._is_stored(by_stem[stem])]
            needed = [stem for stem in group if not _is_optional(by_stem[stem])]
            if not stored and not needed:
                continue
            keeper = (stored or needed)[0]
            for stem in group:
                if stem == keeper:
                    continue
                if stem not in stored:
                    node = by_stem[stem]
                    if isinstance(node, Linear) and node.bias:
                        self._add(
                            "missing", "error", stem,
                            f"{stem} is tied to {keeper} and has a bias of its own, which is not stored",
                        )  # fmt: skip
                    aliased.add(stem)
                    made.append(Alias(stem, keeper))
                    continue
                made.append(AliasIfEqual(stem, keeper))
                is_table = isinstance(by_stem[stem], Embedding) and isinstance(by_stem[keeper], Embedding)
                other = "the load is refused" if is_table else "it stays apart"
                self._add(
                    "untied", "note", stem,
                    f"{stem} is tied to {keeper} by the config, but stored too: "
                    f"it shares memory if the bytes are equal, else {other}",
                )  # fmt: skip
        return aliased, tuple(made)

    def find(self, node: Node) -> NodeParts | None:
        """Return a node's parts; None if one was not found (a finding says so) or the node is left out."""
        units: Units = {}
        classes: list[tuple[int, UnitClass]] = []
        if isinstance(node, Experts):
            if node.num_experts < 1:
                self._add(
                    "config", "error", node.stem, f"{node.stem}: {node.num_experts} experts; there must be at least 1"
                )
                return None
            for index, linear in enumerate((node.w13, node.w2)):
                for part in linear.parts:
                    found = self._experts(node, index, linear, part.name, units)
                    if found is not None:
                        classes.append((index, found))
            wanted = len(node.w13.parts) + len(node.w2.parts)
        else:
            if _is_optional(node) and not self._is_stored(node):
                self.skipped.append(node.stem)
                self._add(
                    "missing", "note", node.stem, f"{node.stem} is optional and not stored; the model does without it"
                )
                return None
            shape = self._shape(node)
            for name in _parts(node):
                sources = self.names.of(node, name, None)
                unit = self._unit(node, node, shape, name, sources, stem=node.stem)
                if unit is not None:
                    units[0, name, None] = unit
                    classes.append((0, unit.cls))
            wanted = len(_parts(node))
        if len(classes) < wanted or not any(cls.tensors for _, cls in classes):
            return None
        return NodeParts(node, units, tuple(classes))

    def _shape(self, node: Node) -> Node:
        shape = shape_of(node)
        return self._shapes.setdefault(shape, shape)

    def _is_stored(self, node: Node) -> bool:
        for part in _parts(node):
            sources = self.names.of(node, part, None)
            scheme = self._scheme(node, sources)
            layouts = self._layouts_of(scheme, self._shape(node), node, experts=False)
            if not self.matcher.absent(layouts, sources):
                return True
        return False

    def _experts(self, node: Experts, index: int, linear: Linear, part: str, units: Units) -> UnitClass | None:
        shape = self._shape(linear)
        first: UnitClass | None = None
        found = before = 0
        stored = len(self.matcher.entries)
        for expert in range(node.num_experts):
            if expert and node.num_experts > max(stored, FEW_EXPERTS):
                self._add(
                    "config", "error", f"{node.stem} {part}",
                    f"{node.stem}: the config states {node.num_experts} experts, which are not stacked, and the checkpoint "
                    f"holds {stored} tensors in all; the number is damaged",
                )  # fmt: skip
                return None
            sources = self.names.of(node, part, expert)
            stem = f"{node.stem}.{expert}"
            unit = self._unit(node, linear, shape, part, sources, stem=stem, experts=node.num_experts)
            if unit is None:
                continue
            if unit.cls.is_stacked:
                alone = [one.tensor.name for one in unit.cls.tensors if not one.stacked and one.fill is None]
                if alone:
                    self._add(
                        "layout", "error", node.stem,
                        f"{node.stem}: {part!r} is stored for all experts at once, but its {', '.join(alone)} for each; "
                        "all tensors of a part must be stored alike",
                    )  # fmt: skip
                units[index, part, None] = unit
                return unit.cls
            found += 1
            units[index, part, expert] = unit
            if first is None:
                first, before = unit.cls, expert
            if unit.cls is not first:
                self._add(
                    "layout", "error", stem,
                    f"{node.stem}: {part!r} of expert {expert} is stored or quantized in another way than expert "
                    f"{before}'s; the experts of a layer must agree",
                )  # fmt: skip
        return first if found == node.num_experts else None

    def _unit(
        self,
        node: Node,
        linear: Linear | Embedding | Norm | Param | AttentionState,
        shape: Node,
        part: str,
        sources: tuple[Source, ...],
        *,
        stem: str,
        experts: int | None = None,
    ) -> Unit | None:
        scheme = self._scheme(node, sources)
        layouts = self._layouts_of(scheme, shape, linear, experts=experts is not None)
        what = f"{stem} {part}".strip()
        allowed = self.options.allow_missing and self.matcher.absent(layouts, sources) and self._may_miss(stem, sources)
        if allowed:
            layouts = self._filled(layouts, what)
        unit = self.matcher.match(linear, shape, part, scheme, layouts, sources, stem=stem, experts=experts)
        if unit is not None and None in unit.entries and not allowed:
            filled = [f"{one.tensor.name or 'value'} = {one.fill.value:g}" for one in unit.cls.tensors if one.fill]
            self._add("missing", "note", what, f"{what} is not stored in full; it is filled: {', '.join(filled)}")
        return unit

    def _may_miss(self, stem: str, sources: Sequence[Source]) -> bool:
        names = [stem, *(name for source in sources for name in (source.path, f"{source.path}.weight"))]
        return any(fnmatchcase(name, pattern) for pattern in self.options.allow_missing for name in names)

    def _filled(self, layouts: tuple[Layout, ...], what: str) -> tuple[Layout, ...]:
        self._add("missing", "note", what, f"{what} is not stored and allow_missing names it: it is filled with zeros")
        known = self._allowed_layouts.get(id(layouts))
        if known is None:
            zero = FillWith(0.0)
            known = self._allowed_layouts[id(layouts)] = tuple(
                replace(one, tensors=tuple(replace(tensor, absent=zero) for tensor in one.tensors))
                for one in layouts[:1]
            )
        return known

    def _scheme(self, node: Node, sources: Sequence[Source]) -> LayerScheme:
        if self.quant is None or not isinstance(node, (Linear, Embedding, Experts)):
            return UNQUANTIZED
        names = [source.path for source in sources]
        scheme = self.quant.scheme(names, type(node).__name__, self.checkpoint.entries) or UNQUANTIZED
        if scheme.is_quantized and self.options.trust_files and (name := self._plain_name(names)):
            self._add(
                "plain-file", "note", name,
                f"{name}: the config says {scheme.key()}, the file holds a plain float; "
                "loaded as it is stored, as trust_files says",
            )  # fmt: skip
            return UNQUANTIZED
        return scheme

    def _plain_name(self, names: Sequence[str]) -> str | None:
        """Return the name of a plain float weight, if it stands without a scale beside it."""
        entries = self.checkpoint.entries
        for name in names:
            entry = entries.get(f"{name}.weight")
            if entry is not None and entry.dtype in FLOATS:
                beside = any(f"{name}.{ending}" in entries for ending in ("weight_scale", "weight_scale_inv", "scales"))
                return None if beside else entry.name
        return None

    def _layouts_of(self, scheme: LayerScheme, shape: Node, node: Node, *, experts: bool) -> tuple[Layout, ...]:
        key = (scheme, id(shape), experts)
        known = self._layouts.get(key)
        if known is None:
            known = self._layouts[key] = self._make_layouts(scheme, node, experts=experts)
        return known

    def _make_layouts(self, scheme: LayerScheme, node: Node, *, experts: bool) -> tuple[Layout, ...]:
        cls = "Experts" if experts else type(node).__name__
        companions = tuple(one.tensor for one in (self.quant.companions() if self.quant else ()) if one.node == cls)
        match node:
            case Norm():
                tensors = [plain("weight", (Axis("out"),), absent=_within(node))]
                if node.bias:
                    tensors.append(plain("bias", (Axis("out"),), absent=_within(node), role="bias"))
                return (Layout(NORM, tuple(tensors)),)
            case Param():
                return (Layout(PARAM, (plain("", node.dims, absent=_within(node)),)),)
            case AttentionState():
                return (Layout(COMPANIONS, companions),)
            case _:
                layouts = self._method(scheme, experts=experts).layouts(scheme, node)
        if isinstance(node, Embedding) and _within(node) != "error":
            layouts = tuple(_with_absent(layout, node) for layout in layouts)
        if isinstance(node, Linear) and node.bias:
            layouts = with_bias(layouts)
        if companions:
            layouts = tuple(replace(layout, tensors=(*layout.tensors, *companions)) for layout in layouts)
        return tuple(layouts)

    def _method(self, scheme: LayerScheme, *, experts: bool) -> QuantMethod:
        key = scheme.key(experts=experts)
        method = self.methods.get(key)
        if method is None:
            method = self.methods[key] = self.registry["quant method"][key]()
        return method

    def _add(self, code: FindingCode, severity: Severity, subject: str, text: str) -> None:
        self.findings.append(Finding(code, severity, subject, text))


def _parts(node: Node) -> list[str]:
    return [part.name for part in node.parts] if isinstance(node, Linear) else [""]


def _is_optional(node: Node) -> bool:
    return not isinstance(node, (Experts, AttentionState)) and node.absent == "skip"


def _within(node: Norm | Param | Embedding) -> Absent:
    """Return what one absent tensor of a node means: an optional node is left out whole, or stored whole."""
    return "error" if node.absent == "skip" else node.absent


def _tied(stems: Sequence[str], ties: Sequence[Tie]) -> list[list[str]]:
    """Return the groups of stems that are tied to one another, each with the stems that are no target first."""
    groups: dict[str, set[str]] = {}
    for tie in ties:
        joined = groups.get(tie.target, {tie.target}) | groups.get(tie.source, {tie.source})
        groups |= dict.fromkeys(joined, joined)
    targets = {tie.target for tie in ties}
    ordered = sorted(groups, key=lambda stem: (stem in targets, stems.index(stem)))
    return [[stem for stem in ordered if stem in group] for group in {id(one): one for one in groups.values()}.values()]


def _with_absent(layout: Layout, node: Embedding) -> Layout:
    tensors: tuple[StoredTensor, ...] = tuple(replace(tensor, absent=node.absent) for tensor in layout.tensors)
    return replace(layout, tensors=tensors)
