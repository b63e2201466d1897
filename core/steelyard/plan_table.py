"""A plan as a table for people and as plain data for programs.

A plan is described here by what is read of it, so that this module stands below the plan, which prints itself with it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from steelyard.blueprint import Experts
from steelyard.findings import errors_of, summarize
from steelyard.report import LISTED, KernelRecord, kernel_listing, listing, plain_text
from steelyard.sizes import human

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from steelyard.checkpoint import Checkpoint
    from steelyard.findings import Finding
    from steelyard.ranks import Ranks
    from steelyard.steps import Alias, AliasIfEqual
    from steelyard.tasks import PlannedNode


class _Figures(Protocol):
    def to_json(self) -> dict[str, int]: ...


class _Plan(Protocol):
    checkpoint: Checkpoint
    family_key: str
    job: Ranks
    target: str
    dtype: str
    nodes: tuple[PlannedNode, ...]
    ties: tuple[Alias | AliasIfEqual, ...]
    dropped: Mapping[str, str]
    skipped: tuple[str, ...]
    findings: tuple[Finding, ...]
    digest: str

    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def plugins(self) -> Mapping[str, str]: ...
    @property
    def asked(self) -> str: ...
    @property
    def ranks(self) -> Sequence[_Figures]: ...


FIGURES = (
    ("bytes_needed", "needed"),
    ("bytes_read", "read"),
    ("reads", "pieces"),
    ("requests", "requests"),
    ("final", "weights"),
    ("peak", "peak"),
)
"""A rank's figures in the order of the table, with the heads of their columns."""

COUNTS = ("reads", "requests")  # figures that do not count bytes


def kernel_records(plan: _Plan) -> Iterator[KernelRecord]:
    """Yield the kernel chosen for each Segment, in the order of the nodes."""
    for planned in plan.nodes:
        is_experts = isinstance(planned.cls.shape, Experts)
        for segment in planned.cls.segments:
            chosen = segment.choice
            if chosen is not None:
                scheme = segment.scheme.key(experts=is_experts)
                yield KernelRecord(
                    planned.node.stem,
                    segment.parts,
                    scheme,
                    chosen.backend,
                    chosen.form.name,
                    chosen.refusals,
                    chosen.missing,
                )


def plan_json(plan: _Plan, *, budget: int | None = None) -> dict[str, Any]:
    """Return a plan as plain data.

    Args:
        plan: The plan.
        budget: Bytes that each rank has; None to leave out whether it fits.
    """
    ranks = [rank.to_json() for rank in plan.ranks]
    job = plan.job
    return {
        "checkpoint": str(plan.checkpoint.folder),
        "family": plan.family_key,
        "job": {"world": job.world, "tp": job.tp, "ep": job.ep, "moe_tp": job.moe_tp},
        "target": plan.target,
        "dtype": plan.dtype,
        "ok": not errors_of(plan.findings),
        **({"budget": budget, "fits": fits(ranks, budget)} if budget is not None else {}),
        "tensors": len(plan.checkpoint.entries),
        "nodes": len(plan.nodes),
        "ranks": ranks,
        "kernels": [asdict(record) for record in kernel_records(plan)],
        "ties": [{"target": tie.target, "source": tie.source, "rule": type(tie).__name__} for tie in plan.ties],
        "dropped": dict(plan.dropped),
        "skipped": list(plan.skipped),
        "findings": [finding.to_json() for finding in plan.findings],
        "options": dict(plan.options),
        "plugins": dict(plan.plugins),
        "digest": plan.digest,
    }


def fits(ranks: Sequence[Mapping[str, int]], budget: int) -> bool:
    """Return whether every rank's peak stays within a budget; a plan with errors has no ranks and does not fit.

    Args:
        ranks: Figures of every rank.
        budget: Bytes that each rank has.
    """
    return bool(ranks) and all(rank["peak"] <= budget for rank in ranks)


def render_plan(plan: _Plan, *, budget: int | None = None) -> Group:
    """Return a plan for a rich console.

    Args:
        plan: The plan.
        budget: Bytes that each rank has; None to leave out whether it fits.
    """
    from rich.console import Group

    errors = errors_of(plan.findings)
    notes = [finding for finding in plan.findings if finding not in errors]
    ranks = [rank.to_json() for rank in plan.ranks]
    lines = [
        f"{plan.checkpoint.folder}: {plan.family_key}, {len(plan.checkpoint.entries)} tensors, {len(plan.nodes)} nodes",
        f"{plan.asked}, dtype={plan.dtype}, digest={plan.digest[:16]}",
    ]
    if budget is not None and ranks:
        verdict = "fits" if fits(ranks, budget) else "does not fit"
        peak = max(rank["peak"] for rank in ranks)
        lines.append(f"{verdict}: the largest peak is {human(peak)} ({peak} bytes), a rank has {human(budget)}")
    parts: list[Table | Text] = [plain_text(line) for line in lines]
    if ranks:
        parts.append(_ranks(ranks, budget))
    kernels = list(kernel_records(plan))
    if kernels:
        parts.append(kernel_listing(kernels))
    left = [[name, why] for name, why in plan.dropped.items()]
    left += [[stem, "not stored, and optional"] for stem in plan.skipped]
    if left:
        parts.append(listing("left out", ["name", "why"], left, limit=LISTED))
    for title, found in (("notes", notes), ("errors", errors)):
        if found:
            parts.append(listing(title, [f"{len(found)} in all"], [[line] for line in summarize(found)]))
    return Group(*parts)


def _ranks(ranks: Sequence[Mapping[str, int]], budget: int | None) -> Table:
    """Return the table of ranks; neighbours whose figures are equal share a row."""
    runs: list[list[Mapping[str, int]]] = []
    for rank in ranks:
        if runs and all(rank[name] == runs[-1][0][name] for name, _ in FIGURES):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    rows = []
    for run in runs:
        first, last = run[0], run[-1]
        name = str(first["rank"]) if len(run) == 1 else f"{first['rank']}-{last['rank']}"
        cells = [str(first[key]) if key in COUNTS else human(first[key]) for key, _ in FIGURES]
        over = [] if budget is None else ["yes" if first["peak"] <= budget else "no"]
        rows.append([name, *cells, *over])
    heads = ["rank", *(head for _, head in FIGURES), *(["fits"] if budget is not None else [])]
    return listing("ranks", heads, rows)
