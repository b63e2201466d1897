"""The report of a finished load, put together from the plan and from what this rank did."""

from __future__ import annotations

from collections.abc import Iterator

from steelyard.execute import Executed
from steelyard.loadplan import LoadPlan
from steelyard.parts import CORE_LAYOUTS
from steelyard.report import LoadReport, ParameterRecord, RankBytes, TensorRange, TieRecord
from steelyard.steps import Alias
from steelyard.tasks import SegmentTask


def report_of(
    plan: LoadPlan, executed: Executed, bytes_read: int, rank: int, device: str, *, reading: float, seconds: float
) -> LoadReport:
    """Return the report of one rank.

    Args:
        plan: What was to be done.
        executed: What was done.
        bytes_read: What the reader asked of files.
        rank: This rank.
        device: Where the weights are.
        reading: Seconds from the first read to the last weight in place.
        seconds: Seconds of the whole load.
    """
    way, why = plan.reader
    received = sum(executed.received.values())
    ties = [
        TieRecord(tie.target, tie.source, isinstance(tie, Alias) or tie.target in executed.shared) for tie in plan.ties
    ]
    return LoadReport(
        checkpoint=str(plan.checkpoint.folder),
        digest=plan.digest,
        target=plan.target,
        device=device,
        dtype=plan.dtype,
        load_format=plan.load_format[0],
        reader=way,
        reader_reason=why,
        parameters=tuple(_parameters(plan, rank)),
        kernels=plan.kernels(),
        ranks=(RankBytes(rank, received, bytes_read, reading, executed.device_peak, executed.peak_open),),
        ties=tuple(ties),
        dropped=plan.dropped,
        skipped=plan.skipped,
        findings=plan.findings,
        options=plan.options,
        plugins=plan.plugins,
        seconds=seconds,
    )


def _parameters(plan: LoadPlan, rank: int) -> Iterator[ParameterRecord]:
    for task in plan.tasks(rank):
        yield from _of_task(plan, task)
    for tie in plan.ties:
        if isinstance(tie, Alias):
            yield ParameterRecord(tie.target, "", "alias", tie.source)


def _of_task(plan: LoadPlan, task: SegmentTask) -> Iterator[ParameterRecord]:
    files = plan.checkpoint.files
    method, distribution, version = "", "", ""
    if ("quant method", task.method) in plan.offers and task.segment.units[0].layout.name not in CORE_LAYOUTS:
        method, offer = task.method, plan.offers["quant method", task.method]
        distribution, version = offer.distribution, offer.version
    ranges: dict[tuple[str, int | None], list[TensorRange]] = {}
    for read in task.reads:
        entry = plan.checkpoint.entries[read.name]
        place = TensorRange(read.name, files[read.file].name, entry.start, entry.stop)
        ranges.setdefault((read.part, read.expert), []).append(place)
    layouts = {unit.part: unit.layout.name for unit in task.segment.units}
    for (part, expert), tensors in ranges.items():
        yield ParameterRecord(
            task.stem, part, "layout", layouts[part], tuple(tensors), method, distribution, version, expert
        )  # fmt: skip
    for fill in task.fills:
        yield ParameterRecord(task.stem, "", "fill", f"{fill.buffer or 'value'} = {fill.value:g}")
