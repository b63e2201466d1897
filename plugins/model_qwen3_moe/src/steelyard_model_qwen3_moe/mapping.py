"""Where these decoders' tensors stand in published checkpoints.

Stacks of experts are declared (expert, out, in), as transformers 5 holds them in memory; none of these families was
published in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from steelyard.plugin import Experts, Linear, Node, Source, decoder
from steelyard_model_qwen3_moe.config import MoeConfig

MIXTRAL_NAMES: Final[Mapping[str, str]] = {"gate": "w1", "up": "w3", "down": "w2"}
"""What Mixtral's release calls an expert's matrices."""


class MixtralMapping(decoder.DecoderMapping):
    """Names of Mixtral's release beside those of transformers' other decoders.

    Source:
        transformers 5.24, ``conversion_mapping.py``: ``mixtral``; ``save_pretrained`` writes the release's names.
    """

    def below(self, prefix: str, node: Node, part: str, expert: int | None) -> Iterable[Source]:
        """Yield where a part may stand behind one prefix."""
        yield from super().below(prefix, node, part, expert)
        path = f"{prefix}{node.stem}".replace(".mlp.", ".block_sparse_moe.")
        if isinstance(node, Experts):
            yield Source(f"{path}.{expert}.{MIXTRAL_NAMES[part]}")
        elif isinstance(node, Linear) and node.stem.endswith(".mlp.gate"):
            yield Source(path)


def mapping_of(made: MoeConfig) -> decoder.DecoderMapping:
    """Return the mapping of a decoder."""
    return MixtralMapping(made.decoder) if made.style == "Mixtral" else decoder.DecoderMapping(made.decoder)
