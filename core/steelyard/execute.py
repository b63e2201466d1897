"""Runs one rank's plan: bytes into buffers, buffers into weights, weights into kernels, node by node.

Pieces are read in the order in which they lie in the files. A Segment's buffers are made when its first piece comes and
prepared when the last one is in, so beside the weights only the open Segments and one piece are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from steelyard.blueprint import AttentionState, Embedding, Experts, Linear, Node, Norm, Param
from steelyard.checks import violated
from steelyard.collectives import Groups
from steelyard.dtypes import FLOATS, nbytes
from steelyard.errors import LoadError, SteelyardError
from steelyard.experts import Experts as ExpertsLayer
from steelyard.layers import BuiltSegment, DenseLinear, State, Weight, share_weight, weight_of
from steelyard.layers import Embedding as EmbeddingLayer
from steelyard.layers import Linear as LinearLayer
from steelyard.layers import Norm as NormLayer
from steelyard.loadplan import LoadPlan
from steelyard.local import LocalExperts, localize
from steelyard.protocols import ExpertsBackend, Reader
from steelyard.steps import Alias, Check, Read, Region
from steelyard.storage import TORCH_DTYPES, finish, in_memory, narrowed, region_of, words
from steelyard.tasks import SegmentTask
from steelyard.units import shape_of


@dataclass(slots=True)
class Executed:
    """What a rank's plan became.

    Attributes:
        built: Stem to built node.
        received: Stored tensor to the bytes of it that this rank received.
        peak_open: The most bytes that unprepared buffers held at once.
        device_peak: The most memory of the accelerator that torch held at once; 0 on the CPU.
        shared: Stems whose weights turned out equal to the one they are tied to.
        apart: Stems that are tied by the config, but whose stored weights differ.
    """

    built: dict[str, nn.Module] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    peak_open: int = 0
    device_peak: int = 0
    shared: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)


def allocate(shape: tuple[int, ...], code: str, device: torch.device) -> torch.Tensor:
    """Return an uninitialised buffer for a stored dtype.

    Shapes:
        stored shape -> the same, the last dim in bytes where elements are narrower than a byte
    """
    return torch.empty(in_memory(code, shape), dtype=TORCH_DTYPES[code], device=device)


def overlapping(regions: Sequence[Region]) -> Region | None:
    """Return a region that shares an element with another; None if there is none.

    >>> overlapping([((0, 2), (0, 4)), ((2, 2), (0, 4))]), overlapping([((0, 3),), ((2, 2),)])
    (None, ((2, 2),))
    """
    beside: list[Region] = []  # those before, in the order of the first dim, that reach as far as the one at hand
    for region in sorted(one for one in regions if all(length for _, length in one)):
        beside = [one for one in beside if not region or sum(one[0]) > region[0][0]]
        for one in beside:
            if all(a < c + d and c < a + b for (a, b), (c, d) in zip(one, region, strict=True)):
                return region
        beside.append(region)
    return None


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn what a plugin's code raises into a LoadError that names it; errors that are meant for the user pass."""
    try:
        yield
    except SteelyardError:
        raise
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise LoadError(f"{what} failed: {type(error).__name__}: {error}") from error


class _Open:
    """A Segment with its buffers, being filled."""

    def __init__(self, task: SegmentTask, device: torch.device) -> None:
        self.task = task
        self.left = len(task.reads)
        self.buffers = {one.name: allocate(one.shape, one.dtype, device) for one in task.on_rank.buffers}
        self.codes = {one.name: one.dtype for one in task.on_rank.buffers}
        self.written: dict[str, list[Region]] = {name: [] for name in self.buffers}
        self.bytes = sum(nbytes(one.dtype, one.shape) for one in task.on_rank.buffers)

    def write(self, name: str, region: Region, source: torch.Tensor | float, code: str) -> None:
        """Write a piece, or a constant, into one buffer."""
        target = region_of(self.buffers[name], region, self.codes[name])
        if not isinstance(source, torch.Tensor):
            target.fill_(source)
        elif code == self.codes[name]:
            words(target, code).copy_(words(source, code).reshape(target.shape))
        elif code in FLOATS and self.codes[name] in FLOATS:
            target.copy_(source.reshape(target.shape))
        else:
            raise LoadError(f"{self.task.stem}.{name}: a piece stored as {code} cannot become {self.codes[name]}")
        self.written[name].append(region)

    def complete(self) -> dict[str, torch.Tensor]:
        """Return the full buffers; raise LoadError if an element was written twice or never."""
        for one in self.task.on_rank.buffers:
            written = sum(prod(length for _, length in region) for region in self.written[one.name])
            twice = overlapping(self.written[one.name])
            if written != prod(one.shape) or twice is not None:
                where = f", {list(twice)} (start, length) more than once" if twice is not None else ""
                raise LoadError(
                    f"{self.task.stem}.{one.name}: {written} of {prod(one.shape)} elements were written{where}; "
                    "the plan does not cover it exactly once"
                )
        lead = 0 if self.task.on_rank.local.experts is None else 1
        return {
            one.name: self.buffers[one.name].amax(lead) if one.merge == "max" else self.buffers[one.name]
            for one in self.task.on_rank.buffers
        }


@dataclass(frozen=True, slots=True)
class _Ready:
    """A prepared Segment: a kernel and its bias, or tensors for a node that runs none, or one for several Segments."""

    task: SegmentTask
    tensors: Mapping[str, torch.Tensor]
    kernel: nn.Module | None = None
    bias: torch.Tensor | None = None


class Executor:
    """Runs the plan of one rank; used once."""

    def __init__(
        self, plan: LoadPlan, rank: int, device: torch.device, reader: Reader, groups: Groups, poll: Callable[[], None]
    ) -> None:
        self._plan, self._rank, self._device, self._reader = plan, rank, device, reader
        self._groups, self._poll = groups, poll
        self._problems: list[str] = []
        self._segments: dict[tuple[str, int], _Ready] = {}
        self._open_bytes = 0
        self._ran = False
        self.executed = Executed()

    def run(self) -> Executed:
        """Read, prepare and build everything.

        Raises:
            LoadError: bytes cannot be read, or contradict what the plan requires of them; all of that at once.
            RuntimeError: it ran before; a second time would prepare weights that are prepared.
        """
        if self._ran:
            raise RuntimeError("an Executor runs once; make another for another load")
        self._ran = True
        tasks = list(self._plan.tasks(self._rank))
        with torch.no_grad():
            self._read_all(tasks)
            if self._problems:
                listed = "".join(f"\n  - {problem}" for problem in self._problems)
                raise LoadError(f"{self._plan.checkpoint.folder}: stored values contradict the plan:{listed}")
            for planned in self._plan.nodes:
                parts = [self._segments.pop((planned.node.stem, index)) for index in range(len(planned.cls.segments))]
                self.executed.built[planned.node.stem] = self._build(planned.node, parts)
            self._tie()
        if self._device.type == "cuda":
            self.executed.device_peak = torch.cuda.max_memory_allocated(self._device)
        return self.executed

    def _read_all(self, tasks: Iterable[SegmentTask]) -> None:
        by_key = {(task.stem, task.index): task for task in tasks}
        checks: dict[tuple[str, str], list[Check]] = {}
        for task in by_key.values():
            for check in task.checks:
                checks.setdefault((check.read.name, task.stem), []).append(check)
        opened: dict[tuple[str, int], _Open] = {}
        for task in by_key.values():
            if not task.reads:
                self._prepare(_filled(task, self._device))
        for read in sorted((read for task in by_key.values() for read in task.reads), key=_in_file_order):
            self._poll()
            key = (read.stem, read.segment)
            segment = opened.get(key)
            if segment is None:
                segment = opened[key] = _filled(by_key[key], self._device)
                self._open_bytes += segment.bytes
                self.executed.peak_open = max(self.executed.peak_open, self._open_bytes)
            self._one(read, segment, checks.get((read.name, read.stem), ()))
            segment.left -= 1
            if not segment.left:
                del opened[key]
                self._open_bytes -= segment.bytes
                self._prepare(segment)

    def _one(self, read: Read, segment: _Open, checks: Iterable[Check]) -> None:
        piece = self._reader.read(read)
        received = self.executed.received
        received[read.name] = received.get(read.name, 0) + nbytes(read.dtype, read.cut.taken)
        self._check(piece, read, segment.task, checks)
        moved = words(piece, read.dtype) if piece.device != self._device else piece
        moved = moved.to(self._device).view(piece.dtype)
        code, kept = read.dtype, segment.codes[read.buffer]
        if kept in ("F16", "BF16") and code != kept and code in FLOATS:
            moved, lost = narrowed(moved, kept)
            code = kept
            if lost:
                self._problems.append(
                    f"{read.name} ({self._file(read)}): {lost} of {moved.numel()} values are too large for {kept}"
                )
        segment.write(read.buffer, read.region, _finished(moved, read, code), code)

    def _check(self, piece: torch.Tensor, read: Read, task: SegmentTask, checks: Iterable[Check]) -> None:
        scheme = task.segment.units[0].scheme  # as stored; the Segment's own may be on a finer grid
        for check in checks:
            if check.read is not read:
                continue
            for rule in check.rules:
                wrong = violated(rule, piece, read.dtype, scheme, task.on_rank.local.inner)
                if wrong:
                    self._problems.append(f"{read.name} ({self._file(read)}): {wrong}")

    def _file(self, read: Read) -> str:
        return self._plan.checkpoint.files[read.file].name

    def _prepare(self, segment: _Open) -> None:
        task = segment.task
        stored = segment.complete()
        for check in task.checks:
            if check.equal_to is not None:
                mine = _finished(self._reader.read(check.read).to(self._device), check.read, check.read.dtype)
                theirs = region_of(segment.buffers[check.read.buffer], check.read.region, check.read.dtype)
                code = check.read.dtype
                if not torch.equal(words(mine, code).reshape(theirs.shape), words(theirs, code)):
                    self._problems.append(
                        f"{check.read.name} ({self._file(check.read)}): differs from {check.equal_to}, "
                        "which the same input uses; they must be equal"
                    )
        if self._problems:
            return  # nothing will be built; what is left is read only to find every other problem
        choice = task.segment.choice
        if choice is None:
            self._segments[task.stem, task.index] = _Ready(task, stored)
            return
        method = self._plan.methods[task.method]
        bias = stored.pop("bias", None)
        local = task.on_rank.local
        with blamed(f"{task.stem}: quant method {task.method}"):
            weights = method.prepare(stored, task.segment.scheme, local, choice.form)
        if local.experts is not None:  # their kernel takes both Segments
            beside = {} if bias is None else {"bias": bias}
            self._segments[task.stem, task.index] = _Ready(task, {**weights, **beside})
            return
        with blamed(f"{task.stem}: kernel backend {choice.backend}"):
            kernel = self._plan.backends[choice.backend].linear(weights, task.segment.scheme, local)
        kernel = _module(kernel, choice.backend, "linear")
        self._segments[task.stem, task.index] = _Ready(task, {}, kernel, bias)

    def _build(self, node: Node, segments: Sequence[_Ready]) -> nn.Module:
        task, stored = segments[0].task, segments[0].tensors
        local = task.on_rank.local
        match node:
            case Linear():
                built = [
                    BuiltSegment(one.task.on_rank.local, one.kernel, one.bias)
                    for one in segments
                    if one.kernel is not None
                ]
                return LinearLayer(node, built, self._groups.tensor)
            case Embedding():
                scheme = task.segment.scheme
                to = TORCH_DTYPES[task.segment.param_dtype]
                with blamed(f"{task.stem}: quant method {task.method}"):
                    weight = self._plan.methods[task.method].dequantize(stored, scheme, local, to)
                return EmbeddingLayer(node, local, weight, self._groups.tensor)
            case Norm():
                return NormLayer(node, stored["weight"], stored.get("bias"))
            case Param():
                return Weight(stored[""])
            case AttentionState():
                return State(stored)
            case Experts():
                return self._experts(node, *segments)

    def _experts(self, node: Experts, w13: _Ready, w2: _Ready) -> nn.Module:
        choice = w13.task.segment.choice
        assert choice is not None, "experts without a kernel are an error of the plan"
        first, second = (one.task.on_rank.local for one in (w13, w2))
        is_first = self._plan.job.at(self._rank).moe_tp_rank == 0
        shape = shape_of(node)
        assert isinstance(shape, Experts), "a shape is of its node's class"
        local = LocalExperts(shape, first, second, is_first)
        tensors = dict(w2.tensors)
        if "bias" in tensors and not is_first:  # the outputs are summed over these ranks, the bias is added by one
            tensors["bias"] = torch.zeros_like(tensors["bias"])
        schemes = (w13.task.segment.scheme, w2.task.segment.scheme)
        backend = self._plan.backends[choice.backend]
        with blamed(f"{node.stem}: kernel backend {choice.backend}"):
            assert isinstance(backend, ExpertsBackend), "only such a backend was asked"
            kernel = backend.experts(w13.tensors, tensors, schemes, local)
        return ExpertsLayer(node, local, _module(kernel, choice.backend, "experts"), self._groups)

    def _tie(self) -> None:
        built = self.executed.built
        for tie in self._plan.ties:
            if isinstance(tie, Alias):
                built[tie.target] = self._alias(self._plan.aliased[tie.target], built[tie.source])
            elif _equal(built[tie.target], built[tie.source]):
                share_weight(built[tie.target], built[tie.source])
                self.executed.shared.append(tie.target)
            elif all(isinstance(built[stem], EmbeddingLayer) for stem in (tie.target, tie.source)):
                one, other = (self._stored(stem) for stem in (tie.target, tie.source))
                raise LoadError(f"{one} and {other} are one table in the model, and differ; keep one of them")
            else:
                self.executed.apart.append(tie.target)

    def _stored(self, stem: str) -> str:
        """Return which tensor of which file a table was read from."""
        (unit,) = (unit for planned in self._plan.nodes if planned.node.stem == stem for unit in planned.units.values())
        names = [
            f"{one.name} ({self._plan.checkpoint.files[one.file].name})" for one in unit.entries if one is not None
        ]
        return " and ".join(names)

    def _alias(self, node: Node, source: nn.Module) -> nn.Module:
        """Build a node around another's weight."""
        options = self._plan.effective.config
        ranks = self._plan.job.at(self._rank)
        local = localize(node, ranks, experts=options.experts, vocab_padding=options.vocab_padding)[0]
        weight = weight_of(source)
        if tuple(weight.shape) != (local.n, local.k):
            raise LoadError(
                f"{node.stem} is tied to a weight of shape {list(weight.shape)} on this rank, and needs [{local.n}, {local.k}]"
            )
        module: nn.Module
        if isinstance(node, Linear):
            module = LinearLayer(node, [BuiltSegment(local, DenseLinear(weight), None)], self._groups.tensor)
        elif isinstance(node, Embedding):
            module = EmbeddingLayer(node, local, weight, self._groups.tensor)
        else:
            raise LoadError(f"{node.stem}: a {type(node).__name__} cannot use another node's weight")
        share_weight(module, source)
        return module


def _module(kernel: object, backend: str, what: str) -> nn.Module:
    if not isinstance(kernel, nn.Module):
        raise LoadError(f"kernel backend {backend}: its {what} kernel is a {type(kernel).__name__}, not an nn.Module")
    return kernel


def _equal(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two layers hold plain weights of the same dtype and values."""
    try:
        mine, theirs = weight_of(one), weight_of(other)
    except LoadError:
        return False  # one is packed for its kernel
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def _filled(task: SegmentTask, device: torch.device) -> _Open:
    segment = _Open(task, device)
    for fill in task.fills:
        segment.write(fill.buffer, fill.region, fill.value, segment.codes[fill.buffer])
    return segment


def _finished(piece: torch.Tensor, read: Read, code: str) -> torch.Tensor:
    """Refine and swap a piece, by now of dtype ``code``, as integers, so that dtypes without kernels pass too."""
    return finish(words(piece, code), read.cut, read.swap, read.pairs).view(piece.dtype)


def _in_file_order(read: Read) -> tuple[int, int]:
    return read.file, read.start
