"""A finished plan: what each rank reads, holds and runs, with every finding; data that prints itself.

A plan keeps one `NodeClass` for all nodes alike and works out a rank's figures from the classes, so that a further
rank costs next to nothing. The steps themselves are made when they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from steelyard.blueprint import Experts, Node
from steelyard.checkpoint import Checkpoint
from steelyard.config import Effective
from steelyard.discovery import Offer
from steelyard.dtypes import DTYPES, nbytes
from steelyard.errors import PlanError
from steelyard.extents import covering
from steelyard.findings import Finding, errors_of
from steelyard.local import LocalNode, localize
from steelyard.plan_table import kernel_records, plan_json, render_plan
from steelyard.protocols import Config, KernelBackend, LoadFormat, ModelFamily, QuantMethod
from steelyard.ranks import Ranks
from steelyard.report import KernelRecord
from steelyard.segments import Piece
from steelyard.steps import Alias, AliasIfEqual, Read
from steelyard.target import CPU
from steelyard.tasks import NodeClass, PlannedNode, SegmentTask, repeats, task_of

if TYPE_CHECKING:
    from rich.console import Group

SMALLEST_REQUEST = 8192
"""Bytes below which a run of a cut is read together with what lies around it."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's figures.

    Attributes:
        rank: The rank.
        reads: Pieces of stored tensors that it needs.
        requests: Reads of files that the planned way takes.
        bytes_needed: What its buffers receive.
        bytes_read: What is read from files for that.
        final: Its weights when the model is ready.
        peak: The most that weights, buffers and work need at once, Segments being prepared in turn.
    Units:
        Bytes, but for ``reads`` and ``requests``, which count.
    """

    rank: int
    reads: int
    requests: int
    bytes_needed: int
    bytes_read: int
    final: int
    peak: int

    def to_json(self) -> dict[str, int]:
        """Return the figures as plain data."""
        return {
            "rank": self.rank,
            "reads": self.reads,
            "requests": self.requests,
            "bytes_needed": self.bytes_needed,
            "bytes_read": self.bytes_read,
            "final": self.final,
            "peak": self.peak,
        }


@dataclass(eq=False)
class LoadPlan:
    """What will be done to load a checkpoint, on every rank, before any tensor is read.

    Attributes:
        checkpoint: The checkpoint's headers.
        config: Its config.
        family: The model family.
        family_key: The key under which it was found.
        job: Sizes of the job; its rank is of no account here.
        target: What it is planned for: ``"cpu"``, ``"sm_90"``.
        dtype: Code of the model's dtype.
        nodes: The model's nodes that are loaded.
        ties: Nodes that share memory.
        aliased: Stem to node of those that use another's memory and are not among ``nodes``.
        methods: Scheme key to method.
        backends: Key to kernel backend of those chosen.
        dropped: Stored tensor to the reason why it is left out.
        skipped: Stems of optional nodes that are not stored.
        findings: All that was found, errors and notes.
        effective: The effective options, each with where it came from.
        load_format: Key of the format of the files, and the format.
        offers: (kind, key) to what offers it, of every plugin that took part.
        digest: Equal on all ranks of a job, and for a later run of the same plan.
    """

    checkpoint: Checkpoint
    config: Config
    family: ModelFamily
    family_key: str
    job: Ranks
    target: str
    dtype: str
    nodes: tuple[PlannedNode, ...]
    ties: tuple[Alias | AliasIfEqual, ...]
    aliased: Mapping[str, Node]
    methods: Mapping[str, QuantMethod]
    backends: Mapping[str, KernelBackend]
    dropped: Mapping[str, str]
    skipped: tuple[str, ...]
    findings: tuple[Finding, ...]
    effective: Effective
    load_format: tuple[str, LoadFormat]
    offers: Mapping[tuple[str, str], Offer]
    digest: str
    _ranks: dict[int, RankPlan] = field(default_factory=dict, repr=False)
    _locals: dict[tuple[NodeClass, int], tuple[LocalNode, ...]] = field(default_factory=dict, repr=False)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that stop a load."""
        return errors_of(self.findings)

    @property
    def options(self) -> Mapping[str, Any]:
        """The effective options as plain data: path to value and origin."""
        return self.effective.to_json()

    @property
    def plugins(self) -> Mapping[str, str]:
        """Distribution to version of every plugin that took part."""
        return dict(sorted({offer.distribution: offer.version for offer in self.offers.values()}.items()))

    @property
    def reader(self) -> tuple[str, str]:
        """How bytes will be read, ``"mmap"`` or ``"pread"``, and why."""
        return way_to_read(self.effective.config.reader, self.target)

    @property
    def asked(self) -> str:
        """The sizes asked for, as one line."""
        job = self.job
        return f"tp_size={job.tp}, ep_size={job.ep}, moe_tp={job.moe_tp}, world={job.world}, target={self.target}"

    def check(self) -> LoadPlan:
        """Return the plan; raise PlanError with every error if it has any."""
        if self.errors:
            raise PlanError(str(self.checkpoint.folder), self.errors, asked=self.asked)
        return self

    @property
    def ranks(self) -> tuple[RankPlan, ...]:
        """Every rank's figures; empty if the plan has errors."""
        return () if self.errors else tuple(self.rank(index) for index in range(self.job.world))

    def fits(self, bytes_per_rank: int) -> bool:
        """Return whether every rank's peak stays within ``bytes_per_rank``; raise PlanError if the plan has errors."""
        self.check()
        return all(rank.peak <= bytes_per_rank for rank in self.ranks)

    def rank(self, index: int) -> RankPlan:
        """Return one rank's figures; raise PlanError if the plan has errors."""
        self.check()
        known = self._ranks.get(index)
        if known is None:
            known = self._ranks[index] = self._figures(index)
        return known

    def locals_of(self, cls: NodeClass, rank: int) -> tuple[LocalNode, ...]:
        """Return a class's local nodes on a rank: one, or w13 and w2 for experts."""
        known = self._locals.get((cls, rank))
        if known is None:
            options = self.effective.config
            ranks = self.job.at(rank)
            known = localize(cls.shape, ranks, experts=options.experts, vocab_padding=options.vocab_padding)
            self._locals[cls, rank] = known
        return known

    def tasks(self, rank: int) -> Iterator[SegmentTask]:
        """Yield what a rank does, Segment by Segment, in the order of the nodes."""
        self.check()
        for planned in self.nodes:
            locals_ = self.locals_of(planned.cls, rank)
            for index, segment in enumerate(planned.cls.segments):
                yield task_of(planned, index, segment.on(locals_[segment.linear]))

    def kernels(self) -> tuple[KernelRecord, ...]:
        """Return the kernel chosen for every Segment, in the order of the nodes."""
        return tuple(kernel_records(self))

    def table(self) -> Group:
        """Return the plan for a rich console."""
        return render_plan(self)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return plan_json(self)

    def reads(self, rank: int) -> Iterator[Read]:
        """Yield every piece that a rank reads."""
        for task in self.tasks(rank):
            yield from task.reads

    def method_of(self, cls: NodeClass, index: int) -> QuantMethod:
        """Return the quant method of one Segment of a class."""
        return self.methods[cls.segments[index].scheme.key(experts=isinstance(cls.shape, Experts))]

    def _figures(self, rank: int) -> RankPlan:
        reads = requests = needed = read = final = work = 0
        for cls, times in Counter(planned.cls for planned in self.nodes).items():
            locals_ = self.locals_of(cls, rank)
            for index, segment in enumerate(cls.segments):
                on_rank = segment.on(locals_[segment.linear])
                buffered = sum(nbytes(buffer.dtype, buffer.shape) for buffer in on_rank.buffers)
                received: set[str] = set()
                for piece in (piece for pieces in on_rank.pieces.values() for piece in pieces):
                    copies = times * repeats(piece, on_rank.local)
                    asked, wanted, covered = _cost(piece)
                    reads += copies * (piece.cut is not None)
                    requests += copies * asked
                    # A tensor that parts must share is received once and compared for the others.
                    compared = piece.found.tensor.merge == "equal" and piece.found.tensor.name in received
                    received.add(piece.found.tensor.name)
                    needed += 0 if compared else copies * wanted
                    read += copies * covered
                if segment.choice is None:
                    final += times * buffered
                    continue
                size = self.method_of(cls, index).prepared(segment.scheme, on_rank.local, segment.choice.form)
                slabs = len(on_rank.local.experts) if on_rank.local.experts is not None else 1
                bias = sum(nbytes(one.dtype, one.shape) for one in on_rank.buffers if one.name == "bias")
                final += times * (size.final * slabs + bias)
                work = max(work, buffered + size.transient)
        return RankPlan(rank, reads, requests, needed, read, final, final + work)


def way_to_read(asked: str, target: str) -> tuple[str, str]:
    """Return how bytes are read for a target, ``"mmap"`` or ``"pread"``, and why; what is asked for, if not ``"auto"``."""
    if asked != "auto":
        return asked, "asked for"
    if target == CPU:
        return "mmap", "on the CPU a mapped file is copied once, and only pages that are touched are read"
    return "pread", "for an accelerator, extents are read whole instead of page by page"


def _cost(piece: Piece) -> tuple[int, int, int]:
    """Return requests, bytes needed and bytes read of one piece; zeros for a constant."""
    if piece.cut is None:
        return 0, 0, 0
    found = piece.found
    bits = DTYPES[found.dtype].bits
    _, requests, planned = covering(found.shape, piece.cut, bits=bits, smallest=SMALLEST_REQUEST)
    return requests, nbytes(found.dtype, piece.cut.taken), planned
