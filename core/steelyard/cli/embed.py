"""``steelyard embed``: texts to vectors with a published encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelyard.cli.load import DeviceOption, DtypeOption
from steelyard.cli.output import AsJson, print_json, print_table
from steelyard.cli.render import FolderArgument, TpOption, config_of

SHOWN = 4  # numbers of a vector that the table shows


def embed(
    path: FolderArgument,
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="A file with one text a line, instead or as well.")] = None,
    rank: Annotated[str | None, typer.Option(help="Order the texts by how near they are to this one.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    tp: TpOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts computed at once.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Turn texts into vectors, pooled and normalised as the checkpoint's folder says.

    The table shows the first numbers of each vector; --json prints them all.
    """
    wanted = [*(texts or ())]
    if file is not None:
        try:
            wanted += [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--file {file}: {error}") from None
    if not wanted:
        raise typer.BadParameter("give at least one text, or --file")
    config = config_of({"device": device, "dtype": dtype})

    from steelyard.cli.job import job, require_torch

    require_torch()
    from steelyard.embedding import SentenceEncoder
    from steelyard.loader import load
    from steelyard.sentences import sentence_settings

    settings = sentence_settings(path)
    with job() as prints:
        encoder = SentenceEncoder(load(settings.folder, tp=tp, config=config), settings)
        vectors = encoder.encode(wanted if rank is None else [*wanted, rank], batch_size=batch_size)
        if not prints:
            return
        rows = list(zip(wanted, vectors[: len(wanted)], strict=True))
        scores = None
        if rank is not None:
            unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            scores = dict(zip(wanted, (unit[:-1] @ unit[-1]).tolist(), strict=True))
            rows.sort(key=lambda row: -scores[row[0]])
        if as_json:
            found = [{"text": text, "vector": vector.tolist()} for text, vector in rows]
            print_json([{**one, "similarity": scores[str(one["text"])]} for one in found] if scores else found)
        elif scores is not None:
            print_table(["similarity", "text"], ((f"{scores[text]:.4f}", text) for text, _ in rows))
        else:
            head = (
                (text, str(len(vector)), " ".join(f"{x:+.4f}" for x in vector[:SHOWN].tolist()))
                for text, vector in rows
            )
            print_table(["text", "dim", f"first {SHOWN} numbers"], head)
