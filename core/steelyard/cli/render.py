"""How commands print what rich draws, and how they read the options that several of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from steelyard.cli.output import PIPE_WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.console import RenderableType

    from steelyard.config import LoadConfig

FolderArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="PATH", help="Folder of a checkpoint, or a hub id that the local cache holds.")
]
TpOption: TypeAlias = Annotated[int | None, typer.Option("--tp", help="Ranks that share each dense layer.")]
EpOption: TypeAlias = Annotated[int | None, typer.Option("--ep", help="Ranks that the experts go out over.")]
MoeTpOption: TypeAlias = Annotated[int | None, typer.Option("--moe-tp", help="Ranks that share one expert.")]
WorldOption: TypeAlias = Annotated[
    int | None, typer.Option("--world", help="Ranks of the job; the smallest that holds the sizes if left out.")
]
TargetOption: TypeAlias = Annotated[
    str | None, typer.Option("--target", help="What to plan for: cpu, sm_90, gfx942; this machine if left out.")
]


def show(drawn: RenderableType) -> None:
    """Print what rich draws, as wide as the terminal, or wide enough for any name where there is none."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(drawn)


def config_of(options: Mapping[str, Any], world: int | None = None) -> LoadConfig:
    """Return the configuration that command-line options ask for; None is an option left out.

    Args:
        options: Field of `LoadConfig` to value.
        world: Ranks of the job, checked against the other sizes.

    Raises:
        typer.BadParameter: a value cannot be met; a command ends with 2.
    """
    from steelyard.config import LoadConfig
    from steelyard.errors import ConfigError
    from steelyard.ranks import Ranks

    try:
        config = LoadConfig(**{name: value for name, value in options.items() if value is not None})
        Ranks.of(tp=config.tp or 1, ep=config.ep or 1, moe_tp=config.moe_tp, world=world)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    return config


def preferences(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return what ``--prefer KIND:KEY=DISTRIBUTION`` asks for, given any number of times.

    Raises:
        typer.BadParameter: a text is not of that form.

    >>> preferences(["quant method:fp8.plain=steelyard-quant-fp8"])
    {'quant method': {'fp8.plain': 'steelyard-quant-fp8'}}
    """
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        kind, colon, rest = text.partition(":")
        key, equals, distribution = rest.partition("=")
        if not (colon and equals and kind and key and distribution):
            raise typer.BadParameter(f"--prefer {text!r} is not KIND:KEY=DISTRIBUTION, such as 'model:bert=my-bert'")
        found.setdefault(kind, {})[key] = distribution
    return found
