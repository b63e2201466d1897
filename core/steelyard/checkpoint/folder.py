"""Which files of a folder hold its weights: names and links only, no file is opened but the index.

Order: an index file; else ``*.safetensors`` without consolidated copies; else the consolidated ones. What is found
and not used is kept with its reason.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from steelyard.checkpoint.configs import read_json
from steelyard.errors import BadConfig, CheckpointError, MissingShard, NoWeights
from steelyard.findings import LISTED
from steelyard.headers import FETCH_AGAIN, explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
INDEX: Final = f"model{INDEX_SUFFIX}"
PICKLED: Final = (".bin", ".pt", ".pth")

_COPY = "consolidated"  # the same weights a second time, under the publisher's own names
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,9})-of-(?P<total>[0-9]{1,9})\.safetensors", re.ASCII)
_MOST_SHARDS = 100_000  # a claimed total past this is no numbering, and is not spelt out


@dataclass(frozen=True, slots=True)
class Ignored:
    """A file that looks like weights and is not read."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The weight files of a folder.

    Attributes:
        names: Relative names of the files to read, sorted.
        ignored: The others.
        source: What chose them, for messages.
        weight_map: Tensor to file as the index says; None without one.
        index: Name of the index file; empty without one.
    """

    names: tuple[str, ...]
    ignored: tuple[Ignored, ...]
    source: str
    weight_map: Mapping[str, str] | None = None
    index: str = ""


def list_folder(folder: Path) -> tuple[str, ...]:
    """Return the names in a folder, sorted.

    Raises:
        CheckpointError: the folder cannot be listed.
    """
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {explain(folder, error)}") from error


def find_weights(folder: Path, listing: Sequence[str]) -> Found:
    """Return the files that hold the weights, all of them present.

    Args:
        folder: The checkpoint's folder.
        listing: The names in it.

    Raises:
        NoWeights: there are none.
        MissingShard: the index or the numbering names files that are absent.
        CheckpointError: the index is not sound, a link leads nowhere, or the weights are of another kind.
    """
    visible = [name for name in listing if not name.startswith(".")]
    weights = [name for name in visible if name.endswith(SUFFIX)]
    index = _choose_index(folder, visible, weights)
    if index is not None:
        found = _by_index(folder, index, weights)
    elif weights:
        found = _by_name(folder, weights)
    else:
        _refuse_without(folder, visible)
    _require_links(folder, found.names)
    pickled = [Ignored(name, f"{SUFFIX} files are preferred") for name in visible if _is_pickled(name)]
    return Found(found.names, (*found.ignored, *pickled), found.source, found.weight_map, found.index)


def _choose_index(folder: Path, visible: Sequence[str], weights: Sequence[str]) -> str | None:
    indexes = [name for name in visible if name.endswith(INDEX_SUFFIX)]
    if INDEX in indexes:
        return INDEX
    own = [name for name in indexes if not name.startswith(_COPY)]
    if not own and all(name.startswith(_COPY) for name in weights):
        own = indexes
    if len(own) > 1:
        raise CheckpointError(f"{folder}: holds several index files and no {INDEX}: {_listed(own)}; keep one of them")
    return own[0] if own else None


def _by_index(folder: Path, index: str, weights: Sequence[str]) -> Found:
    weight_map = _read_index(folder / index)
    names = tuple(sorted(set(weight_map.values())))
    source = f"index file {index}"
    missing = [name for name in names if not os.path.lexists(folder / name)]
    if missing:
        raise MissingShard(str(folder), missing, source)
    ignored = tuple(Ignored(name, f"{index} does not name it") for name in weights if name not in names)
    return Found(names, ignored, source, weight_map, index)


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = read_json(path).content
    except BadConfig as error:
        raise CheckpointError(str(error)) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or set(map(type, weight_map.values())) - {str}:
        raise CheckpointError(f"{path}: must be a JSON object with a weight_map of tensor names to file names")
    if not weight_map:
        raise CheckpointError(f"{path}: its weight_map is empty")
    bad = sorted(name for name in set(weight_map.values()) if not _is_inside(name))
    if bad:
        raise CheckpointError(
            f"{path}: names files that it must not: {_listed(map(repr, bad))}; "
            f"a name is relative, stays in the folder and ends in {SUFFIX}"
        )
    return weight_map


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return name.endswith(SUFFIX) and name.isprintable() and "\\" not in name and not {"", ".", ".."}.intersection(parts)


def _by_name(folder: Path, weights: Sequence[str]) -> Found:
    own = [name for name in weights if not name.startswith(_COPY)]
    copies = [name for name in weights if name.startswith(_COPY)] if own else []
    names = own or list(weights)
    _require_complete(folder, names)
    ignored = tuple(Ignored(name, "a consolidated copy") for name in copies)
    if len(names) == 1:
        source = f"single file {names[0]}"
    elif all(map(_NUMBERED.fullmatch, names)):
        source = "numbered shards"
    else:
        source = f"{len(names)} files"
    return Found(tuple(names), ignored, source)


def _require_complete(folder: Path, names: Sequence[str]) -> None:
    """Refuse numbered shards of which some are absent, or whose totals contradict each other."""
    numbers: dict[tuple[str, str], dict[int, str]] = {}
    totals: dict[str, set[str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            stem, total = match["stem"], match["total"]
            totals.setdefault(stem, set()).add(total)
            numbers.setdefault((stem, total), {})[int(match["number"])] = match["number"]
    for stem, several in totals.items():
        if len(several) > 1:
            kinds = " and ".join(f"{stem}-*-of-{total}{SUFFIX}" for total in sorted(several))
            raise CheckpointError(f"{folder}: holds shards of two numberings, {kinds}; remove the older ones")
    missing: list[str] = []
    for (stem, total), present in numbers.items():
        first = 0 if 0 in present else 1
        wanted = range(first, first + int(total))
        beyond = [f"{stem}-{text}-of-{total}{SUFFIX}" for number, text in present.items() if number not in wanted]
        if beyond or len(wanted) > _MOST_SHARDS:
            odd = beyond or [f"{stem}-{text}-of-{total}{SUFFIX}" for text in present.values()]
            raise CheckpointError(f"{folder}: the numbers of these shards cannot be: {_listed(odd)}")
        width = len(next(iter(present.values())))
        missing += [f"{stem}-{number:0{width}}-of-{total}{SUFFIX}" for number in wanted if number not in present]
    if missing:
        raise MissingShard(str(folder), missing, "the numbering of the shards")


def _require_links(folder: Path, names: Sequence[str]) -> None:
    links = [f"{folder / name} -> {os.path.realpath(folder / name)}" for name in names if _leads_nowhere(folder / name)]
    if links:
        raise CheckpointError(f"{folder}: link target missing: {_listed(links)}; {FETCH_AGAIN}")


def _leads_nowhere(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # reading its header says what is wrong
    return False


def _is_pickled(name: str) -> bool:
    return name.endswith(PICKLED) and not name.startswith(_NOT_WEIGHTS)


def _refuse_without(folder: Path, visible: Sequence[str]) -> NoReturn:
    pickled = [name for name in visible if _is_pickled(name)]
    if pickled:
        raise CheckpointError(
            f"{folder}: holds {_listed(pickled)} and no {SUFFIX} file; no load format for {', '.join(PICKLED)} is "
            "installed. Convert it once, with transformers: "
            "AutoModel.from_pretrained(folder).save_pretrained(target, safe_serialization=True)"
        )
    tried = (INDEX, f"*{INDEX_SUFFIX}", f"*{SUFFIX}", *(f"*{suffix}" for suffix in PICKLED))
    raise NoWeights(str(folder), f"no weights: looked for {', '.join(tried)}", tried)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more
