"""How commands print: a table for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

PIPE_WIDTH = 240  # columns where no terminal says how many there are: a name must not be cut for a program


def print_json(data: Any) -> None:
    """Print plain data as indented JSON."""
    import json

    print(json.dumps(data, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as wide as the terminal; long cells are folded and never cut."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    console.print(table)
