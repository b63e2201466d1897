"""``steelyard explain``: one stored tensor or one node, who uses it, by which rule, and every rank's piece of it."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.output import AsJson, print_json
from steelyard.cli.render import (
    EpOption,
    FolderArgument,
    MoeTpOption,
    TargetOption,
    TpOption,
    WorldOption,
    config_of,
    show,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from steelyard.loadplan import LoadPlan
    from steelyard.placement import Cut
    from steelyard.segments import Segment
    from steelyard.steps import Region
    from steelyard.tasks import PlannedNode, SegmentTask
    from steelyard.units import Found, Unit

CLOSEST = 5  # names proposed for one that does not exist


def explain(
    path: FolderArgument,
    tensor: Annotated[
        str, typer.Argument(metavar="TENSOR", help="Name of a stored tensor, or of a node of the model.")
    ],
    tp: TpOption = None,
    ep: EpOption = None,
    moe_tp: MoeTpOption = None,
    world: WorldOption = None,
    target: TargetOption = None,
    rank: Annotated[int | None, typer.Option(help="One rank; all of them if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say who uses a stored tensor, by which rule, and which piece of it every rank takes; read no tensor.

    Exit with 1 if there is no such name.
    """
    from steelyard import planning

    config = config_of({"tp": tp, "ep": ep, "moe_tp": moe_tp, "target": target}, world)
    plan = planning.plan(path, config=config, world=world)
    if rank is not None and not 0 <= rank < plan.job.world:
        raise typer.BadParameter(f"--rank {rank} is outside 0..{plan.job.world - 1} ({plan.asked})")
    found = explanation(plan, tensor, range(plan.job.world) if rank is None else (rank,))
    if as_json:
        print_json(found)
    else:
        _print(found)
    if found["is"] == "unknown":
        raise typer.Exit(1)


def explanation(plan: LoadPlan, name: str, ranks: Iterable[int]) -> dict[str, Any]:
    """Return what a plan says of one name, as plain data.

    Args:
        plan: The plan; one with errors says everything but the ranks' pieces.
        name: A stored tensor, or a node's stem.
        ranks: The ranks whose pieces are wanted.
    """
    from steelyard.findings import errors_of

    ranks = list(ranks)
    findings = [one.to_json() for one in plan.findings if one.subject == name or one.subject.startswith(f"{name}.")]
    said: dict[str, Any] = {"name": name, "asked": plan.asked}
    entry = plan.checkpoint.entries.get(name)
    nodes = [planned for planned in plan.nodes if planned.node.stem == name]
    ties = [f"{tie.target} uses the weights of {tie.source}" for tie in plan.ties if name in (tie.target, tie.source)]
    uses = [use for planned in plan.nodes for use in _uses(plan, planned, name if not nodes else None)] if entry else []
    if nodes:
        uses = [use for planned in nodes for use in _uses(plan, planned, None)]
    if entry is not None:
        stored = {"file": plan.checkpoint.files[entry.file].name, "start": entry.start, "stop": entry.stop}
        said.update(stored, dtype=entry.dtype, shape=list(entry.shape))
    if uses:
        said["is"] = "node" if nodes else "used"
    elif name in plan.dropped:
        said.update({"is": "dropped", "because": plan.dropped[name]})
    elif entry is not None:
        said["is"] = "unused"
    elif name in plan.skipped:
        said["is"] = "skipped"
    elif ties:
        said["is"] = "tied"
    else:
        said.update({"is": "unknown", "closest": _closest(plan, name)})
    errors = len(errors_of(plan.findings))
    if uses:
        said["uses"] = uses
        said["ranks"] = [] if errors else list(_pieces(plan, name, nodes, uses, ranks))
        said["no_ranks_because"] = f"the plan has {errors} error{'' if errors == 1 else 's'}" if errors else ""
    return {**said, "ties": ties, "findings": findings}


def _uses(plan: LoadPlan, planned: PlannedNode, name: str | None) -> Iterator[dict[str, Any]]:
    """Yield each tensor of a node that is read from ``name``; every tensor of it if that is None."""
    for (linear, part, expert), unit in planned.units.items():
        for found, entry in zip(unit.cls.tensors, unit.entries, strict=True):
            if name is None or (entry is not None and entry.name == name):
                use = {"stem": planned.node.stem, "linear": linear, "part": part, "expert": expert}
                stored = None if entry is None else entry.name
                yield {**use, "tensor": stored, **_rule(unit, found), **_segment(plan, planned, linear, part)}


def _rule(unit: Unit, found: Found) -> dict[str, Any]:
    from steelyard.placement import describe_dims

    return {
        "buffer": found.tensor.name,
        "role": found.tensor.role,
        "layout": unit.cls.layout.name,
        "dims": describe_dims(found.dims),
        "dtype": found.dtype,
        "order": None if found.order is None else {"runs": list(found.order.runs), "repeat": found.order.repeat},
        "is_stacked": found.stacked,
        "is_transposed": found.swap is not None,
        "fill": None if found.fill is None else found.fill.value,
        "stored_grid": str(unit.cls.scheme.granularity or "none"),
    }


def _segment(plan: LoadPlan, planned: PlannedNode, linear: int, part: str) -> dict[str, Any]:
    from steelyard.blueprint import Experts

    index, segment = _segment_of(planned, linear, part)
    if segment is None:
        return {"segment": None, "scheme": None, "method": None, "kernel": None}
    scheme = segment.scheme.key(experts=isinstance(planned.cls.shape, Experts))
    kernel = None
    if segment.choice is not None:
        kernel = {
            "backend": segment.choice.backend,
            "form": segment.choice.form.name,
            "refusals": dict(segment.choice.refusals),
            "missing": segment.choice.missing,
        }
    return {
        "segment": {"index": index, "parts": list(segment.parts), "steps": dict(segment.steps)},
        "scheme": scheme,
        "method": type(plan.methods[scheme]).__name__ if scheme in plan.methods else None,
        "kernel": kernel,
    }


def _segment_of(planned: PlannedNode, linear: int, part: str) -> tuple[int, Segment | None]:
    for index, segment in enumerate(planned.cls.segments):
        if segment.linear == linear and part in segment.parts:
            return index, segment
    return -1, None


def _pieces(
    plan: LoadPlan, name: str, nodes: Sequence[PlannedNode], uses: Sequence[Mapping[str, Any]], ranks: Iterable[int]
) -> Iterator[dict[str, Any]]:
    from steelyard.dtypes import nbytes

    stems = {use["stem"] for use in uses}
    users = [planned for planned in plan.nodes if planned.node.stem in stems]
    for rank in ranks:
        for task in (task for planned in users for task in _tasks(plan, planned, rank)):
            for read in task.reads:
                if not nodes and read.name != name:
                    continue
                yield {
                    "rank": rank,
                    "tensor": read.name,
                    "stem": read.stem,
                    "part": read.part,
                    "expert": read.expert,
                    "cut": cut_text(read.cut),
                    "slices": [[one.start, one.length, one.stride, one.count] for one in read.cut.slices],
                    "regrids": [one and [one.repeat, one.skip, one.keep] for one in read.cut.regrids],
                    "bytes": nbytes(read.dtype, read.cut.taken),
                    "buffer": read.buffer,
                    "into": _region_text(read.region),
                    "segment": read.segment,
                }
            if nodes:
                for fill in task.fills:
                    into = _region_text(fill.region)
                    yield {"rank": rank, "stem": fill.stem, "fill": fill.value, "buffer": fill.buffer, "into": into}


def _tasks(plan: LoadPlan, planned: PlannedNode, rank: int) -> Iterator[SegmentTask]:
    from steelyard.tasks import task_of

    locals_ = plan.locals_of(planned.cls, rank)
    for index, segment in enumerate(planned.cls.segments):
        yield task_of(planned, index, segment.on(locals_[segment.linear]))


def cut_text(cut: Cut) -> str:
    """Return the indices of each dim, and what becomes of them on a finer grid.

    >>> from steelyard.placement import Cut, Regrid, Slice
    >>> cut_text(Cut((Slice(1, 2), Slice(5, 1, 2, 3)), (Regrid(4, 1, 5), None)))
    '[1:3 (each 4 times, without the first 1, 5 kept), 5:6 and 2 more, 2 apart]'
    """
    dims = []
    for piece, regrid in zip(cut.slices, cut.regrids, strict=True):
        text = f"{piece.start}:{piece.stop}"
        if piece.count > 1:
            text = f"{piece.start}:{piece.start + piece.length} and {piece.count - 1} more, {piece.stride} apart"
        if regrid is not None:
            text += f" (each {regrid.repeat} times, without the first {regrid.skip}, {regrid.keep} kept)"
        dims.append(text)
    return f"[{', '.join(dims)}]"


def _region_text(region: Region) -> str:
    return f"[{', '.join(f'{start}:{start + length}' for start, length in region)}]"


def _closest(plan: LoadPlan, name: str) -> list[str]:
    names = [*plan.checkpoint.entries, *(planned.node.stem for planned in plan.nodes), *plan.skipped]
    return difflib.get_close_matches(name, names, CLOSEST)


# --- for people -------------------------------------------------------------------------------------

ANSWERS = {
    "dropped": "left out: {because}",
    "unused": "nothing uses it",
    "skipped": "an optional node that is not stored",
    "tied": "a node without tensors of its own",
    "unknown": "neither a stored tensor nor a node of the model",
}


def _print(said: Mapping[str, Any]) -> None:
    from rich.console import Group

    from steelyard.report import listing, plain_text

    lines = [f"{said['name']} ({said['asked']})"]
    if "file" in said:
        lines.append(f"{said['dtype']} {said['shape']} in {said['file']}, bytes {said['start']}-{said['stop']}")
    if said["is"] in ANSWERS:
        lines.append(ANSWERS[said["is"]].format(because=said.get("because", "")))
    if said.get("closest"):
        lines.append(f"closest: {', '.join(said['closest'])}")
    lines += said["ties"]
    if said.get("no_ranks_because"):
        lines.append(f"no rank's piece is shown: {said['no_ranks_because']}")
    parts: list[Any] = [plain_text(line) for line in lines]
    if "uses" in said:
        heads = ["node", "tensor", "buffer", "layout", "dims", "scheme", "method", "kernel"]
        parts.append(listing("used by", heads, [_use_row(use) for use in said["uses"]]))
        kernels = {use["kernel"]["backend"]: use["kernel"] for use in said["uses"] if use["kernel"]}
        refused = [[name, why] for kernel in kernels.values() for name, why in kernel["refusals"].items()]
        if refused:
            parts.append(listing("kernels refused", ["kernel", "why"], refused))
    if said.get("ranks"):
        heads = ["rank", "tensor", "part", "cut", "bytes", "buffer", "into"]
        parts.append(listing("pieces", heads, [_piece_row(piece) for piece in said["ranks"]]))
    if said["findings"]:
        rows = [[one["severity"], one["code"], one["text"]] for one in said["findings"]]
        parts.append(listing("findings", ["", "code", "what"], rows))
    show(Group(*parts))


def _use_row(use: Mapping[str, Any]) -> list[str]:
    expert = "" if use["expert"] is None else str(use["expert"])
    node = ".".join(piece for piece in (use["stem"], expert, use["part"]) if piece)
    kernel = use["kernel"]
    stored = use["tensor"] or f"constant {use['fill']}"
    chosen = f"{kernel['backend']} ({kernel['form']})" if kernel else "none needed"
    return [node, stored, use["buffer"], use["layout"], use["dims"], use["scheme"] or "", use["method"] or "", chosen]


def _piece_row(piece: Mapping[str, Any]) -> list[str]:
    if "fill" in piece:
        return [str(piece["rank"]), f"constant {piece['fill']}", "", "", "", piece["buffer"], piece["into"]]
    expert = "" if piece["expert"] is None else f"expert {piece['expert']} "
    part = f"{expert}{piece['part']}".strip()
    return [
        str(piece["rank"]), piece["tensor"], part, piece["cut"], str(piece["bytes"]), piece["buffer"], piece["into"],
    ]  # fmt: skip
