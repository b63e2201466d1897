"""``steelyard inspect``: what a checkpoint is, from its headers and its config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from steelyard.checkpoint import Checkpoint

LARGEST = 5  # tensors listed by size


def inspect(
    path: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a hub id that the local cache holds.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a checkpoint is: model, dtype, quantization, files and tensors; read no tensor."""
    from steelyard.checkpoint import Checkpoint

    found = describe(Checkpoint.open(path, revision=revision))
    if as_json:
        print_json(found)
    else:
        _print(found)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what `inspect` prints, as plain data.

    Units:
        Every ``bytes`` counts the tensors' bytes on disk; ``size`` of a file counts the whole file.
    """
    from steelyard.checkpoint import quantization_config
    from steelyard.errors import BadConfig

    config, entries = checkpoint.config, checkpoint.entries
    quantized = quantization_config(checkpoint)
    try:
        dtype = checkpoint.dtype_hint()
    except BadConfig:  # it is a fact to show here, and an error only for who needs a dtype
        dtype = None
    totals: dict[str, list[int]] = {}
    for entry in entries.values():
        total = totals.setdefault(entry.dtype, [0, 0])
        total[0] += 1
        total[1] += entry.nbytes
    largest = sorted(entries.values(), key=lambda entry: (-entry.nbytes, entry.name))[:LARGEST]
    return {
        "folder": str(checkpoint.folder),
        "architectures": config.get("architectures"),
        "model_type": config.get("model_type"),
        "dtype": dtype,
        "quantization": None if quantized is None else {"method": _method(quantized[0]), "source": quantized[1]},
        "source": checkpoint.source,
        "tensors": len(entries),
        "bytes": sum(total for _, total in totals.values()),
        "dtypes": {code: {"tensors": count, "bytes": total} for code, (count, total) in sorted(totals.items())},
        "largest": [
            {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.nbytes}
            for entry in largest
        ],
        "files": [
            {
                "name": file.name,
                "size": file.header.file_size,
                "tensors": len(file.header.entries),
                "metadata": dict(file.header.metadata),
            }
            for file in checkpoint.files
        ],
        "ignored": [{"name": ignored.name, "reason": ignored.reason} for ignored in checkpoint.ignored],
    }


def _method(config: Mapping[str, Any]) -> Any:
    nested = config.get("quantization")
    for level in (config, nested if isinstance(nested, dict) else {}):
        for key in ("quant_method", "quant_algo"):
            if key in level:
                return level[key]
    return None


def _print(found: Mapping[str, Any]) -> None:
    from steelyard.headers import shown

    quantization = found["quantization"]
    architectures = found["architectures"]
    facts = {
        "folder": found["folder"],
        "architecture": ", ".join(map(str, architectures)) if isinstance(architectures, list) else architectures,
        "model type": found["model_type"],
        "dtype": found["dtype"],
        "quantization": f"{quantization['method']} ({quantization['source']})" if quantization else "none",
        "weights": f"{found['tensors']} tensors, {found['bytes']} bytes, in {len(found['files'])} files",
        "chosen by": found["source"],
    }
    for name, fact in facts.items():
        print(f"{name + ':':14}{shown('not stated' if fact is None else str(fact))}")
    print_table(
        ["dtype", "tensors", "bytes"],
        [[code, str(total["tensors"]), str(total["bytes"])] for code, total in found["dtypes"].items()],
    )
    print_table(
        ["largest tensors", "dtype", "shape", "bytes"],
        [[shown(one["name"]), one["dtype"], str(one["shape"]), str(one["bytes"])] for one in found["largest"]],
    )
    print_table(
        ["file", "size", "tensors", "metadata"],
        [
            [
                shown(file["name"]),
                str(file["size"]),
                str(file["tensors"]),
                shown(", ".join(f"{key}={text}" for key, text in file["metadata"].items()) or "none"),
            ]
            for file in found["files"]
        ],
    )
    for ignored in found["ignored"]:
        print(f"not read: {shown(ignored['name'])}: {ignored['reason']}")
