"""What a load did, as data that prints itself: where every weight came from, what it cost, which kernels run it.

Two reports of the same load are equal whatever the clock and the memory said: figures that differ from run to run
are kept, printed and left out of the comparison.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from steelyard.sizes import human

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from steelyard.findings import Finding

Rule: TypeAlias = Literal["layout", "fill", "alias"]
"""What put a parameter in place: an alternative of its method, a constant, or another node's memory."""

LISTED = 20  # parameters and dropped tensors that a table shows; the data has all


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where one stored tensor of a parameter lies.

    Attributes:
        name: Its name in the checkpoint.
        file: Its file, relative to the checkpoint.
        start: First byte of the tensor, from the start of the file.
        stop: The byte after its last.
    """

    name: str
    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """Where one part of one node came from.

    Attributes:
        stem: The node.
        part: The part of it; empty if it has only one.
        rule: What put it in place.
        detail: The layout's name, the constant, or the stem whose memory it uses.
        tensors: The stored tensors that it was read from; empty for a constant or an alias.
        method: Key of the quant method; empty if none had to do with it.
        distribution: Who provides the method.
        version: That distribution's version.
        expert: The expert; None if it is of none, or of all that are stacked.
    """

    stem: str
    part: str
    rule: Rule
    detail: str
    tensors: tuple[TensorRange, ...] = ()
    method: str = ""
    distribution: str = ""
    version: str = ""
    expert: int | None = None

    @property
    def name(self) -> str:
        """The node, expert and part as one dotted name."""
        expert = "" if self.expert is None else str(self.expert)
        return ".".join(piece for piece in (self.stem, expert, self.part) if piece)


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """Which kernel runs one Segment.

    Attributes:
        stem: The node.
        parts: The parts that share the kernel.
        scheme: Key of the scheme.
        backend: The chosen backend.
        form: Name of the form that it takes.
        refusals: Backend and reason, of those asked before it.
        missing: Why the backend cannot run here; empty if it can.
    """

    stem: str
    parts: tuple[str, ...]
    scheme: str
    backend: str
    form: str
    refusals: tuple[tuple[str, str], ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TieRecord:
    """Two nodes that the config ties.

    Attributes:
        target: The node that may have no weights of its own.
        source: The node whose weights it uses.
        is_shared: Whether they share memory; they do not where the file holds another weight for the target.
    """

    target: str
    source: str
    is_shared: bool


@dataclass(frozen=True, slots=True)
class RankBytes:
    """What one rank moved, and what it took.

    Attributes:
        rank: The rank.
        received: What its buffers received.
        read: What was read from files for that.
        seconds: Wall-clock time from the first read to the last weight in place; not compared.
        device_peak: Most memory of the device at one time; not compared.
        host_peak: Most memory of the host beyond the parameters; not compared.
    Units:
        Bytes, but for ``seconds``.
    """

    rank: int
    received: int
    read: int
    seconds: float = field(default=0.0, compare=False)
    device_peak: int = field(default=0, compare=False)
    host_peak: int = field(default=0, compare=False)

    @property
    def gigabytes_per_second(self) -> float:
        """Received bytes a second, in 10^9 bytes; 0 if no time was taken."""
        return self.received / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data, the rate among them."""
        return {**asdict(self), "gigabytes_per_second": self.gigabytes_per_second}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All that is worth knowing about a finished load.

    Attributes:
        checkpoint: The folder.
        digest: The plan's.
        target: What kernels were chosen for.
        device: Where the weights are.
        dtype: Code of the model's dtype.
        load_format: What the files are.
        reader: How they were read.
        reader_reason: Why so.
        parameters: Where every part of every node came from.
        kernels: Which kernel runs each Segment.
        ranks: What each rank moved.
        ties: The nodes that the config ties.
        dropped: Stored tensor to the reason why it was left out.
        skipped: Optional nodes that are not stored.
        findings: What the plan and the bytes had to say.
        options: The effective configuration, path to value and origin.
        plugins: Distribution to version of every plugin that took part.
        seconds: Wall-clock time of the whole load; not compared.
    """

    checkpoint: str
    digest: str
    target: str
    device: str
    dtype: str
    load_format: str
    reader: str
    reader_reason: str = ""
    parameters: tuple[ParameterRecord, ...] = ()
    kernels: tuple[KernelRecord, ...] = ()
    ranks: tuple[RankBytes, ...] = ()
    ties: tuple[TieRecord, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @property
    def tensors(self) -> int:
        """Stored tensors that were read, each once."""
        return len({tensor.name for parameter in self.parameters for tensor in parameter.tensors})

    @property
    def received(self) -> int:
        """Bytes that the buffers of all ranks received."""
        return sum(rank.received for rank in self.ranks)

    def summary(self) -> str:
        """Return the one line that a load logs: what, how much, how fast, how and why so."""
        rate = f" ({self.received / self.seconds / 1e9:.2f} GB/s)" if self.seconds > 0 else ""
        why = f": {self.reader_reason}" if self.reader_reason else ""
        return (
            f"loaded {self.tensors} tensor{'' if self.tensors == 1 else 's'}, {human(self.received)}, in {self.seconds:.2f} s{rate} "
            f"from {self.load_format} by {self.reader}{why}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        made: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            made[one.name] = list(value) if isinstance(value, tuple) else value
        for name in ("parameters", "kernels", "ties"):
            made[name] = [asdict(record) for record in made[name]]
        for name in ("ranks", "findings"):
            made[name] = [record.to_json() for record in made[name]]
        for name in ("dropped", "plugins"):
            made[name] = dict(made[name])
        made["options"] = {path: dict(entry) for path, entry in self.options.items()}
        return {**made, "summary": self.summary()}

    def table(self, *, parameters: int | None = LISTED) -> Group:
        """Return the report for a rich console.

        Args:
            parameters: Parameters, kernels of one kind aside, and dropped tensors to show; None for all.
        """
        from rich.console import Group

        parts: list[Table | Text] = [plain_text(self.summary()), self._facts(), self._ranks()]
        parts += [self._kernels()] if self.kernels else []
        parts += [self._parameters(parameters)] if self.parameters else []
        parts += [self._left_out(parameters)] if self.dropped or self.skipped or self.ties else []
        found = [[one.code, one.text] for one in self.findings]
        parts += [listing("findings", ["code", "what"], found)] if found else []
        options = [[path, str(entry["value"]), str(entry["origin"])] for path, entry in self.options.items()]
        parts += [listing("configuration", ["setting", "value", "origin"], options)]
        return Group(*parts)

    def _facts(self) -> Table:
        plugins = ", ".join(f"{name} {version}" for name, version in self.plugins.items()) or "none"
        rows = [
            ["checkpoint", self.checkpoint],
            ["target", self.target],
            ["device", self.device],
            ["dtype", self.dtype],
            ["plugins", plugins],
            ["digest", self.digest],
        ]
        return listing("", ["", ""], rows)

    def _ranks(self) -> Table:
        columns = ["rank", "received", "read", "seconds", "GB/s", "device peak", "host peak"]
        rows = [
            [
                str(rank.rank), human(rank.received), human(rank.read), f"{rank.seconds:.2f}",
                f"{rank.gigabytes_per_second:.2f}", human(rank.device_peak), human(rank.host_peak),
            ]
            for rank in self.ranks
        ]  # fmt: skip
        return listing("ranks", columns, rows)

    def _kernels(self) -> Table:
        return kernel_listing(self.kernels)

    def _parameters(self, limit: int | None) -> Table:
        rows = []
        for one in self.parameters:
            where = one.tensors or (None,)
            for index, tensor in enumerate(where):
                first = [one.name, f"{one.rule} {one.detail}", f"{one.method} {one.distribution} {one.version}".strip()]
                place = [tensor.name, tensor.file, f"{tensor.start}-{tensor.stop}"] if tensor else ["", "", ""]
                rows.append([*(first if index == 0 else ["", "", ""]), *place])
        columns = ["parameter", "rule", "method", "tensor", "file", "bytes"]
        return listing("parameters", columns, rows, limit=limit)

    def _left_out(self, limit: int | None) -> Table:
        rows = [[name, f"dropped: {why}"] for name, why in self.dropped.items()]
        rows += [[stem, "not stored, and optional"] for stem in self.skipped]
        for tie in self.ties:
            how = "shares the memory of" if tie.is_shared else "is tied by the config, but differs in the file from"
            rows.append([tie.target, f"{how} {tie.source}"])
        return listing("left out, tied", ["name", "why"], rows, limit=limit)


def kernel_listing(kernels: Iterable[KernelRecord]) -> Table:
    """Return a table of kernels, those alike in one row with their count."""
    groups: dict[tuple[str, str, str, tuple[tuple[str, str], ...], str], list[KernelRecord]] = {}
    for one in kernels:
        groups.setdefault((one.backend, one.form, one.scheme, one.refusals, one.missing), []).append(one)
    rows = []
    for (backend, form, scheme, refusals, missing), alike in groups.items():
        notes = [f"{name}: {why}" for name, why in refusals]
        notes += [f"cannot run here: {missing}"] if missing else []
        rows.append([backend, form, scheme, str(len(alike)), alike[0].stem, "; ".join(notes)])
    return listing("kernels", ["kernel", "form", "scheme", "segments", "such as", "refused before it"], rows)


def listing(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, limit: int | None = None) -> Table:
    """Return a plain table whose cells are text and never markup.

    Args:
        title: What stands over it; empty for nothing, and then the columns have no heads either.
        columns: The heads.
        rows: The cells.
        limit: Rows to show; a last row counts the others. None for all.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title or None, title_justify="left", box=SIMPLE_HEAD if title else None, show_header=bool(title)
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    shown = rows if limit is None else rows[:limit]
    for row in shown:
        table.add_row(*(plain_text(cell) for cell in row))
    if len(shown) < len(rows):
        table.add_row(plain_text(f"and {len(rows) - len(shown)} more"))
    return table


def plain_text(text: str) -> Text:
    """Return a text for a rich console: nothing in it is markup, and no control character reaches the terminal."""
    from rich.text import Text

    return Text("".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text))
