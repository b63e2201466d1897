"""From what a user gave to a folder: a folder itself, or a hub id found in the local Hugging Face cache.

Nothing is downloaded, and the environment is read when a hub id is looked up.

Source:
    The layout of the cache and its variables: huggingface_hub 1.x, its guide "Understand caching" and
    ``constants.py``; ``models--<org>--<name>/refs/<revision>`` holds the name of a folder under ``snapshots``.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from steelyard.errors import CheckpointError, NoWeights
from steelyard.headers import explain, open_regular

MAIN: Final = "main"

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_SNAPSHOT = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_LONGEST_REF = 256  # characters of a ref file; a commit's name has 40


def locate(path: str | os.PathLike[str], revision: str | None) -> Path:
    """Return the folder of a checkpoint.

    Args:
        path: A folder, or ``org/name`` if there is no such folder.
        revision: Branch, tag or commit of a hub id; its main branch if None.

    Raises:
        NoWeights: there is nothing at the path, nor in the cache.
        CheckpointError: the path is a file, cannot be looked at, or is a folder and a revision is given.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise CheckpointError(f"{text!r} is no path; give the folder of a checkpoint, or a hub id such as org/name")
    try:
        status = os.stat(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        return _cached(text, revision, error)
    except OSError as error:
        raise CheckpointError(f"{text}: cannot be looked at: {explain(text, error)}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{text}: is no folder; give the folder that holds the checkpoint's files")
    if revision is not None:
        raise CheckpointError(f"{text}: is a folder; revision {revision!r} can only be asked of a hub id")
    return Path(text)


def cache_folder() -> Path:
    """Return where the Hugging Face cache of models lies, as the environment says now."""
    environ = os.environ
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _cached(text: str, revision: str | None, cause: OSError) -> Path:
    if os.path.islink(text):
        raise CheckpointError(f"{text}: {explain(text, cause)}") from cause
    here = os.path.abspath(text)
    if not _HUB_ID.fullmatch(text):
        raise NoWeights(text, f"no such folder ({here})", (here,)) from cause
    wanted = revision if revision is not None else MAIN
    if not wanted or any(part in ("", ".", "..") for part in wanted.split("/")) or not wanted.isprintable():
        raise CheckpointError(f"{text}: revision {revision!r} is no branch, tag or commit")
    repository = cache_folder() / f"models--{text.replace('/', '--')}"
    for name in (_ref(repository / "refs" / wanted), wanted):
        if name is not None and _SNAPSHOT.fullmatch(name) and os.path.isdir(repository / "snapshots" / name):
            return repository / "snapshots" / name
    asked = "" if revision is None else f" --revision {revision}"
    raise NoWeights(
        text,
        f"neither a folder ({here}) nor, at revision {wanted}, in the Hugging Face cache ({repository}). "
        f"Fetch it with: hf download {text}{asked}",
        (here, str(repository)),
    ) from cause


def _ref(path: Path) -> str | None:
    """Return the snapshot that a ref names; None if there is no such ref."""
    try:
        with open_regular(path) as (handle, _):
            return os.read(handle, _LONGEST_REF).decode("ascii").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        why = explain(path, error) if isinstance(error, OSError) else "is no text"
        raise CheckpointError(f"{path}: {why}") from error
