"""Node classes: what nodes with equal shapes and equal stored tensors share, worked out once.

Local nodes come first, then Segments, then a kernel for each, then the cuts of every rank; each step's refusal is a
finding that names one node and counts the others like it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from steelyard.blueprint import AttentionState, Experts, Linear, Node
from steelyard.choice import Choice, NoKernel, choose, choose_experts
from steelyard.config import LoadConfig
from steelyard.errors import ConfigError, CutError, HeadsError
from steelyard.findings import Finding, FindingCode, Severity
from steelyard.local import LocalExperts, LocalNode, localize
from steelyard.parts import NodeParts
from steelyard.protocols import KernelBackend
from steelyard.ranks import Ranks
from steelyard.segments import Segment, can_join, starts_inside, steps_of, strict
from steelyard.tasks import NodeClass
from steelyard.units import UnitClass, shape_of


@dataclass(frozen=True, slots=True)
class _Noted:
    cls: NodeClass
    stem: str
    code: FindingCode
    severity: Severity
    text: str


class Segmenter:
    """Makes node classes for one job; used once."""

    def __init__(
        self,
        backends: Mapping[str, KernelBackend],
        options: LoadConfig,
        job: Ranks,
        target: str,
        dtype: str,
        *,
        here: bool,
    ) -> None:
        self._backends, self._options, self._job, self._target = backends, options, job, target
        self._dtype, self._here = dtype, here
        self._classes: dict[tuple[object, ...], NodeClass] = {}
        self._noted: list[_Noted] = []
        self.chosen: dict[str, str] = {}  # backend -> why it cannot run here, "" if it can

    def class_of(self, found: NodeParts) -> NodeClass:
        """Return the class of a node; what cannot be done with it is noted."""
        shape = shape_of(found.node)
        dtype = self._param_dtype(found.node)
        key = (shape, dtype, tuple((linear, id(cls)) for linear, cls in found.classes))
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = NodeClass(shape, ())
            known.segments = self._segments(found, known, dtype)
        return known

    def findings(self, counts: Mapping[NodeClass, int]) -> list[Finding]:
        """Return what was noted, each with the number of nodes that it holds for."""
        made = []
        for note in self._noted:
            more = counts.get(note.cls, 1) - 1
            also = f" (and {more} more like it)" if more else ""
            made.append(Finding(note.code, note.severity, note.stem, f"{note.stem}: {note.text}{also}"))
        for name, why in self.chosen.items():
            if why:
                made.append(
                    Finding(
                        "not-installed",
                        "note",
                        name,
                        f"kernel backend {name} serves {self._target} and was "
                        f"chosen for it, but cannot run here: {why}",
                    )
                )
        return made

    def _param_dtype(self, node: Node) -> str:
        own = (
            None if isinstance(node, AttentionState) else (node.w13.dtype if isinstance(node, Experts) else node.dtype)
        )
        if own is not None:
            return own
        kept = any(fragment.lower() in node.stem.lower() for fragment in self._options.keep_float32)
        return "F32" if kept else self._dtype

    def _segments(self, found: NodeParts, cls: NodeClass, dtype: str) -> tuple[Segment, ...]:
        stem = found.node.stem
        try:
            by_rank = [self._localize(cls.shape, ranks) for ranks in self._job.all()]
        except CutError as error:
            self._note(cls, stem, "cut", "error", str(error))
            return ()
        except ConfigError as error:
            self._note(cls, stem, "heads" if isinstance(error, HeadsError) else "config", "error", str(error))
            return ()
        made: list[tuple[Segment, list[LocalNode]]] = []
        try:
            for linear in sorted({index for index, _ in found.classes}):
                locals_ = list(dict.fromkeys(row[linear] for row in by_rank))
                units = [unit for index, unit in found.classes if index == linear]
                for group in self._group(cls, stem, units, locals_):
                    made.append((self._segment(cls, linear, group, locals_, dtype), locals_))
            segments = tuple(segment for segment, _ in made)
            if isinstance(found.node, Linear):
                for segment, locals_ in made:
                    self._choose(cls, stem, segment, locals_)
            elif isinstance(found.node, Experts) and len(segments) == 2:
                self._choose_experts(cls, stem, segments, by_rank)
            for segment, locals_ in made:
                self._lay_out(cls, stem, segment, locals_)
        except CutError as error:
            self._note(cls, stem, "cut", "error", str(error))
            return ()
        return segments

    def _localize(self, shape: Node, ranks: Ranks) -> tuple[LocalNode, ...]:
        return localize(shape, ranks, experts=self._options.experts, vocab_padding=self._options.vocab_padding)

    def _joins(self, cls: NodeClass) -> bool:
        """Return whether the parts of a node must share a buffer, on a refined scale grid if that is what it takes."""
        return isinstance(cls.shape, Experts) and self._options.scale_grid != "strict"

    def _group(
        self, cls: NodeClass, stem: str, units: Sequence[UnitClass], locals_: Sequence[LocalNode]
    ) -> list[list[UnitClass]]:
        groups = [[units[0]]]
        for unit in units[1:]:
            verdict = can_join(groups[-1], unit, locals_, joined=self._joins(cls))
            if verdict:
                groups[-1].append(unit)
            else:
                groups.append([unit])
                if isinstance(cls.shape, Experts):
                    text = f"{verdict.why}; gate and up of an expert must lie in one buffer"
                    self._note(cls, stem, "layout", "error", text)
                else:
                    self._note(cls, stem, "not-fused", "note", f"not fused because {verdict.why}")
        return groups

    def _segment(
        self, cls: NodeClass, linear: int, units: Sequence[UnitClass], locals_: Sequence[LocalNode], dtype: str
    ) -> Segment:
        steps = steps_of(units[0], locals_, joined=self._joins(cls) and len(units) > 1)
        if steps and self._options.scale_grid == "strict":
            refused = next((error for unit in units if (error := strict(unit, locals_, steps))), None)
            if refused is not None:
                raise refused
        return Segment(linear, tuple(units), units[0].scheme.refined(steps), steps, dtype)

    def _lay_out(self, cls: NodeClass, stem: str, segment: Segment, locals_: Sequence[LocalNode]) -> None:
        """Make every rank's cuts, and tell what was done so that they fit."""
        for local in locals_:
            segment.on(local)
        if segment.steps:
            stored = segment.units[0].scheme.grid()
            finer = ", ".join(f"{axis} {stored[axis]} -> {step}" for axis, step in segment.steps.items())
            self._note(
                cls, stem, "refined", "note", f"its scale grid is refined so that every rank starts on an edge: {finer}"
            )
        padding = max((local.padding for local in locals_), default=0)
        if padding:
            rows = sum(len(part.out) for part in locals_[0].parts)
            self._note(
                cls,
                stem,
                "padded",
                "note",
                f"padded to {self._job.tp} x {rows + locals_[0].padding} rows with zeros, so that the ranks divide it",
            )

    def _choose(self, cls: NodeClass, stem: str, segment: Segment, locals_: Sequence[LocalNode]) -> None:
        nodes = list(dict.fromkeys(local.only(segment.parts) for local in locals_))
        try:
            choice = choose(
                self._backends, segment.scheme, nodes, self._target,
                wanted=self._options.kernels, is_refined=bool(segment.steps), here=self._here,
            )  # fmt: skip
        except NoKernel as error:
            self._no_kernel(cls, stem, segment.scheme.key(), f"local shape [{nodes[0].n}, {nodes[0].k}]", error)
            return
        self._take(cls, stem, choice, segment, locals_)

    def _choose_experts(
        self, cls: NodeClass, stem: str, segments: Sequence[Segment], by_rank: Sequence[tuple[LocalNode, ...]]
    ) -> None:
        """Choose one backend for both matrices of the experts."""
        assert isinstance(cls.shape, Experts)
        w13, w2 = segments
        nodes = [
            LocalExperts(cls.shape, mine[0].only(w13.parts), mine[1].only(w2.parts), ranks.moe_tp_rank == 0)
            for mine, ranks in zip(by_rank, self._job.all(), strict=True)
        ]
        refined = [step for segment in segments if segment.steps for step in segment.scheme.grid().values()]
        try:
            choice = choose_experts(
                self._backends, w13.scheme, w2.scheme, list(dict.fromkeys(nodes)), self._target,
                wanted=self._options.kernels, finest=min(refined, default=None), here=self._here,
            )  # fmt: skip
        except NoKernel as error:
            keys = dict.fromkeys(segment.scheme.key(experts=True) for segment in segments)
            what = f"{len(nodes[0].experts)} local experts, {nodes[0].inner} rows of gate and of up each"
            self._no_kernel(cls, stem, " and ".join(keys), what, error)
            return
        for segment, locals_ in zip(segments, zip(*by_rank, strict=True), strict=True):
            self._take(cls, stem, choice, segment, locals_)

    def _take(self, cls: NodeClass, stem: str, choice: Choice, segment: Segment, locals_: Sequence[LocalNode]) -> None:
        """Give a Segment its kernel, and its parts the order that the kernel's form wants."""
        form, order = choice.form, choice.form.part_order
        if order is not None and len(segment.units) > 1:
            segment.units = tuple(sorted(segment.units, key=lambda unit: order.index(unit.part)))
            for unit, follower in pairwise(segment.units):
                if why := starts_inside(unit, follower, locals_, segment.steps):
                    wanted = ", ".join(segment.parts)
                    text = f"kernel backend {choice.backend} wants the parts in the order {wanted}, but {why}"
                    self._note(cls, stem, "kernel", "error", text)
                    return
        if form.weight_dtype is None:
            choice = replace(choice, form=replace(form, weight_dtype=segment.param_dtype))
        segment.choice = choice
        self.chosen[choice.backend] = choice.missing

    def _no_kernel(self, cls: NodeClass, stem: str, key: str, what: str, error: NoKernel) -> None:
        text = f"no kernel backend takes {key} with {what} on {self._target}: {error}"
        self._note(cls, stem, "kernel", "error", text)

    def _note(self, cls: NodeClass, stem: str, code: FindingCode, severity: Severity, text: str) -> None:
        self._noted.append(_Noted(cls, stem, code, severity, text))
