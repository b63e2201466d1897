"""``steelyard plan``: what a load would read, hold and run on every rank, from headers alone."""

from __future__ import annotations

from typing import Annotated

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
    preferences,
    show,
)


def plan(
    path: FolderArgument,
    tp: TpOption = None,
    ep: EpOption = None,
    moe_tp: MoeTpOption = None,
    world: WorldOption = None,
    target: TargetOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of what is not quantized: auto, float32, bfloat16, float16.")
    ] = None,
    fits: Annotated[
        str | None, typer.Option(help="Memory of a rank, such as 80GB or 80GiB; exit with 1 if less.")
    ] = None,
    scale_grid: Annotated[
        str | None, typer.Option(help="A rank boundary inside a block of scales: refine the grid, or strict.")
    ] = None,
    vocab_padding: Annotated[
        str | None, typer.Option(help="A vocabulary that the ranks do not divide: auto pads it, off refuses.")
    ] = None,
    experts: Annotated[
        str | None, typer.Option(help="Experts that the ranks do not divide: uneven gives some one more, even refuses.")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option(help="A kernel backend to ask; give it again for the next. No other is asked.")
    ] = None,
    prefer: Annotated[
        list[str] | None, typer.Option(help="KIND:KEY=DISTRIBUTION that serves a key where several offer it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a load: what each rank reads, holds and runs, whether it fits, and all that is wrong; read no tensor.

    Exit with 1 if something is wrong with it or it does not fit.
    """
    from steelyard import planning
    from steelyard.errors import ConfigError
    from steelyard.plan_table import fits as fits_all
    from steelyard.plan_table import plan_json, render_plan
    from steelyard.sizes import parse_size

    asked = {
        "tp": tp,
        "ep": ep,
        "moe_tp": moe_tp,
        "target": target,
        "dtype": dtype,
        "scale_grid": scale_grid,
        "vocab_padding": vocab_padding,
        "experts": experts,
        "kernels": kernel or None,
        "prefer": preferences(prefer or ()) or None,
    }
    config = config_of(asked, world)
    try:
        budget = None if fits is None else parse_size(fits, "--fits")
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    made = planning.plan(path, config=config, world=world)
    if as_json:
        print_json(plan_json(made, budget=budget))
    else:
        show(render_plan(made, budget=budget))
    if made.errors or (budget is not None and not fits_all([rank.to_json() for rank in made.ranks], budget)):
        raise typer.Exit(1)
