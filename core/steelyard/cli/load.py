"""``steelyard load``: load a checkpoint here and say what was done."""

from __future__ import annotations

from typing import Annotated

import typer

from steelyard.cli.output import AsJson, print_json
from steelyard.cli.render import EpOption, FolderArgument, MoeTpOption, TpOption, config_of, show

DeviceOption = Annotated[str | None, typer.Option(help="Where the weights go: cpu, cuda.")]
DtypeOption = Annotated[str | None, typer.Option(help="Dtype of what is not quantized: float32, bfloat16, float16.")]


def load(
    path: FolderArgument,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    ep: EpOption = None,
    moe_tp: MoeTpOption = None,
    reader: Annotated[str | None, typer.Option(help="How bytes are read: auto, mmap, pread.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="List every parameter, not the first few.")] = False,
    as_json: AsJson = False,
) -> None:
    """Load a checkpoint and print the report; under torchrun, on every rank, and rank 0 prints."""
    config = config_of({"device": device, "dtype": dtype, "reader": reader})
    from steelyard.cli.job import job, require_torch

    require_torch()
    from steelyard.loader import load as load_checkpoint

    with job() as prints:
        report = load_checkpoint(path, tp=tp, ep=ep, moe_tp=moe_tp, config=config).report
        if not prints:
            return
        if as_json:
            print_json(report.to_json())
        else:
            show(report.table(parameters=None) if everything else report.table())
