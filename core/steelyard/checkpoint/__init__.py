"""A published checkpoint: its files, its config and the place of every tensor, all from headers and JSON.

No handle stays open: what is known of a file's identity is its `Stamp`, which a reader compares with its own handle's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from steelyard.checkpoint.configs import (
    CONFIG,
    SideFiles,
    config_dtype,
    find_quantization,
    read_config,
    read_json,
)
from steelyard.checkpoint.folder import Found, Ignored, find_weights, list_folder
from steelyard.checkpoint.hub import locate
from steelyard.dtypes import FLOATS
from steelyard.errors import BadConfig, CheckpointError
from steelyard.findings import LISTED
from steelyard.headers import Header, TensorEntry, read_header, shown

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Checkpoint", "Ignored", "ShardFile", "quantization_config"]


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of weights.

    Attributes:
        name: Relative to the checkpoint's folder.
        path: Where it is opened.
        header: Its header.
    """

    name: str
    path: Path
    header: Header


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's headers and config; made by `open`.

    Attributes:
        folder: Where its files lie.
        config: ``config.json``; not to be changed, its nested values neither.
        config_bytes_hash: SHA-256 of that file, as hex.
        files: Its files of weights, sorted by name.
        entries: Tensor name to place; ``files[entry.file]`` holds it.
        ignored: Files that look like weights and are not read.
        source: What chose the files, for messages.
    """

    folder: Path
    config: Mapping[str, Any]
    config_bytes_hash: str
    files: tuple[ShardFile, ...]
    entries: Mapping[str, TensorEntry]
    ignored: tuple[Ignored, ...]
    source: str
    _listing: frozenset[str]

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
        """Read a checkpoint's config and headers, and check that they fit each other and the files.

        Args:
            path: A folder, or a hub id such as ``org/name`` that the local Hugging Face cache holds.
            revision: Branch, tag or commit of a hub id.

        Raises:
            NoWeights: there is nothing at the path, or no weights in it.
            MissingShard: files that the index or the numbering names are absent.
            BadHeader: a file of weights is damaged.
            BadConfig: ``config.json`` is absent or unreadable.
            CheckpointError: the folder cannot be read, or index and files contradict each other.
        """
        folder = locate(path, revision)
        listing = list_folder(folder)
        found = find_weights(folder, listing)
        config = read_config(folder)
        # One after the other: most of the time is spent in the interpreter, and threads made it half as long again.
        files = tuple(
            ShardFile(name, folder / name, read_header(folder / name, index)) for index, name in enumerate(found.names)
        )
        return cls(
            folder,
            MappingProxyType(config.content),
            config.sha256,
            files,
            _merge(folder, files, found),
            found.ignored,
            found.source,
            frozenset(listing),
        )

    def identity(self) -> tuple[tuple[str, str, int], ...]:
        """Return name, hash of the header and size of each file: equal wherever the same checkpoint lies."""
        return tuple((file.name, file.header.sha256, file.header.file_size) for file in self.files)

    def has(self, name: str) -> bool:
        """Tell whether the folder held a file of this name when it was opened."""
        return name in self._listing

    def json(self, name: str) -> Any:
        """Read a JSON file of the folder.

        Args:
            name: Its name, without a path.

        Raises:
            BadConfig: it is absent, unreadable or no JSON.
        """
        if not self.has(name):
            raise BadConfig(str(self.folder / name), "is absent")
        return read_json(self.folder / name).content

    def side_files(self) -> SideFiles:
        """Return the folder's JSON files other than config and index: name to content, read when looked up."""
        names = (name for name in self._listing if name.endswith(".json") and not name.endswith(".index.json"))
        return SideFiles(self.folder, tuple(sorted(name for name in names if name != CONFIG)))

    def dtype_hint(self) -> str:
        """Return the code of the model's dtype: the config's, else that of the first float tensor that is no scale.

        Raises:
            BadConfig: neither says it.
        """
        stated = config_dtype(self.config)
        if stated is not None:
            return stated
        for name, entry in self.entries.items():
            if entry.dtype in FLOATS and "scale" not in name.rpartition(".")[2]:
                return entry.dtype
        raise BadConfig(
            str(self.folder / CONFIG),
            f"states no dtype, and no tensor but scales is stored as {', '.join(FLOATS)}; state the dtype",
        )


def quantization_config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], str] | None:
    """Return a checkpoint's quantization config as published, and where it stands; None if it is not quantized.

    Raises:
        BadConfig: the config contradicts itself, or a side file is unreadable.
    """
    return find_quantization(checkpoint.config, checkpoint.side_files(), checkpoint.folder)


def _merge(folder: Path, files: Sequence[ShardFile], found: Found) -> dict[str, TensorEntry]:
    """Return the tensors of all files; every contradiction is in one error."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        entries.update(file.header.entries)
    problems: list[str] = []
    if len(entries) != sum(len(file.header.entries) for file in files):
        problems += _doubles(files)
    if found.weight_map is not None:
        problems += _against_index(files, found.weight_map, found.index)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        more = f"\n  - and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        lines = "".join(f"\n  - {line}" for line in problems[:LISTED])
        raise CheckpointError(f"{folder}: the files contradict each other, {count}:{lines}{more}")
    return entries


def _doubles(files: Sequence[ShardFile]) -> list[str]:
    holders: dict[str, list[str]] = {}
    for file in files:
        for name in file.header.entries:
            holders.setdefault(name, []).append(file.name)
    return [f"tensor {shown(name)} stands in {' and in '.join(names)}" for name, names in holders.items() if names[1:]]


def _against_index(files: Sequence[ShardFile], weight_map: Mapping[str, str], index: str) -> list[str]:
    problems: list[str] = []
    by_name = {file.name: file for file in files}
    for name, file in weight_map.items():
        if name not in by_name[file].header.entries:
            problems.append(f"tensor {shown(name)} is not in {file}, where {index} says it is")
    for shard in files:
        for name in shard.header.entries:
            if name not in weight_map:
                problems.append(f"tensor {shown(name)} is in {shard.name}, and {index} does not name it")
    return problems
