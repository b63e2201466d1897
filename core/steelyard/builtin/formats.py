"""The safetensors load format: pieces of tensors by mapped files or by plain reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from steelyard.plugin import Reader, Verdict

if TYPE_CHECKING:
    from steelyard.plugin import Checkpoint


class Safetensors:
    """Reads safetensors files; core has read and checked their headers."""

    keys: ClassVar[tuple[str, ...]] = ("safetensors",)

    def claims(self, files: Sequence[str]) -> Verdict:
        """Say whether every file ends in ``.safetensors``."""
        others = [name for name in files if not name.endswith(".safetensors")]
        if others or not files:
            return Verdict(False, f"not safetensors: {', '.join(others) or 'no file'}")
        return Verdict(True)

    def open(self, checkpoint: Checkpoint, way: str) -> Reader:
        """Open a reader, ``"mmap"`` or ``"pread"``."""
        from steelyard.torch import open_reader

        return open_reader(checkpoint, way)
