"""``steelyard generate``: continue a text with a published decoder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from steelyard.cli.load import DeviceOption, DtypeOption
from steelyard.cli.output import AsJson, print_json
from steelyard.cli.render import EpOption, FolderArgument, TpOption, config_of

if TYPE_CHECKING:
    from steelyard.generation import Generation
    from steelyard.sampling import Sampling

STDIN = "-"
REASONS = {
    "eos": "the model ended the text",
    "length": "--max-new-tokens was reached",
    "positions": "the model has no more positions",
}


def generate(
    path: FolderArgument,
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin, less one final newline.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token; 1 draws as the model says.")
    ] = 0,
    top_p: Annotated[float, typer.Option(help="Draw only from the likeliest tokens that reach this together.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Draw the same tokens each time.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt to the model as a message of a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the message before it, which sets the tone.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    ep: EpOption = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text; under torchrun, on every rank, and rank 0 prints.

    Standard output gets the continuation alone, as it comes; what it took goes to standard error.
    """
    if system is not None and not chat:
        raise typer.BadParameter("--system is a message of a chat; give --chat too")
    config = config_of({"device": device, "dtype": dtype, "tp": tp, "ep": ep})

    from steelyard.cli.job import job, require_torch

    require_torch()
    from steelyard.generation import TextGenerator
    from steelyard.loader import load
    from steelyard.texts import generation_settings

    sampling = _sampling(temperature, top_p, seed)
    settings = generation_settings(path)
    with job() as prints:
        # One process alone can read stdin. The others' prompts do not matter: the tokens are those of rank 0.
        text = _stdin() if prompt == STDIN and prints else prompt
        generator = TextGenerator(load(settings.folder, config=config), settings)
        ids = generator.encode_chat(_messages(text, system)) if chat else generator.encode(text)
        made = generator.generate(
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            on_text=_show if prints and not as_json else None,
        )
        if not prints:
            return
        if as_json:
            print_json(_plain(text, made))
        else:
            print(flush=True)
            print(_summary(made), file=sys.stderr)


def _sampling(temperature: float, top_p: float, seed: int | None) -> Sampling:
    from steelyard.errors import ConfigError
    from steelyard.sampling import Sampling

    try:
        return Sampling(temperature, top_p, seed)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _stdin() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"the prompt cannot be read from stdin: {error}") from None


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _summary(made: Generation) -> str:
    speed = made.tokens_per_second
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    return (
        f"{made.new_tokens} tokens{rate}; {REASONS[made.stop]} "
        f"(prompt: {made.prompt_tokens} tokens, {made.prefill_seconds:.2f} s)"
    )


def _plain(prompt: str, made: Generation) -> dict[str, object]:
    return {
        "prompt": prompt,
        "text": made.text,
        "ids": list(made.ids),
        "prompt_tokens": made.prompt_tokens,
        "new_tokens": made.new_tokens,
        "stop": made.stop,
        "prefill_seconds": made.prefill_seconds,
        "decode_seconds": made.decode_seconds,
        "tokens_per_second": made.tokens_per_second,
    }
