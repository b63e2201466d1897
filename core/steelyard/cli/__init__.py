"""The command line: one table of commands, each in a module of its own that is imported only to run it.

Exit codes: 0 if all is well, 1 for findings and failures, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

FAILED = 1
INTERRUPTED = 130


class Row(NamedTuple):
    """Where a command lives.

    Attributes:
        module: Module to import when the command runs.
        function: The function there; its signature and docstring are the command's.
        help: One line for ``steelyard --help``, which imports no command.
    """

    module: str
    function: str
    help: str


_CLI = "steelyard.cli"
COMMANDS: dict[str, Row] = {
    "inspect": Row(f"{_CLI}.inspect", "inspect", "Say what a checkpoint holds, from its headers."),
    "plan": Row(f"{_CLI}.plan", "plan", "Say what a load would read, hold and run on every rank, and what is wrong."),
    "explain": Row(f"{_CLI}.explain", "explain", "Say where one tensor goes, how it is cut, and why."),
    "load": Row(f"{_CLI}.load", "load", "Load a checkpoint here and print the report."),
    "embed": Row(f"{_CLI}.embed", "embed", "Turn texts into vectors with a published encoder."),
    "generate": Row(f"{_CLI}.generate", "generate", "Continue a text with a published decoder."),
    "kernels": Row(f"{_CLI}.kernels", "kernels", "List kernel backends, what they serve and what they lack here."),
    "plugins": Row(f"{_CLI}.plugins", "plugins", "List what installed plugins offer, and import none of them."),
    "doctor": Row(f"{_CLI}.plugins", "doctor", "Import every installed plugin and say which ones work."),
}


class LazyGroup(TyperGroup):
    """The commands of `COMMANDS`: a stub with one line of help each, until one is run or asked for its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the stub of the command that is about to run."""
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if name is None else command(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn an error that is meant for the user into one block of text and an exit code."""
        try:
            return super().invoke(ctx)
        except _for_the_user() as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _for_the_user() -> type[Exception]:
    """Return the class of errors that are shown without a traceback, imported only once something was raised."""
    from steelyard.errors import SteelyardError

    return SteelyardError


def command(name: str) -> Any:
    """Import one command and return it in the form in which a group holds it."""
    row = COMMANDS[name]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name)(getattr(import_module(row.module), row.function))
    return typer.main.get_command(alone)


def stub() -> None:
    """Stand for a command in the list of commands; never run."""


app = typer.Typer(
    name="steelyard",
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, _row in COMMANDS.items():
    app.command(_name, help=_row.help)(stub)


def _print_version(wanted: bool) -> None:
    if wanted:
        from steelyard.discovery import core_version

        print(f"steelyard {core_version()}")
        raise typer.Exit


@app.callback()
def steelyard(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Load a published checkpoint into a runnable, sharded, quantized model; no wrong weight passes in silence."""


def main() -> None:
    """Run the command line of this process and exit.

    The collector of reference cycles is off: most commands end before it could free anything, and it would take a tenth
    of their time. Commands that run a model turn it on.
    """
    gc.disable()
    try:
        app(prog_name="steelyard")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
