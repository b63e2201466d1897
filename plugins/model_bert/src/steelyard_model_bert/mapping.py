"""Where an encoder's tensors stand in published checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from steelyard.plugin import Config, Drop, Node, Norm, Source
from steelyard_model_bert.config import read_config

PREFIXES: Final = ("", "bert.", "roberta.", "xlm_roberta.")
"""What stands before a name: nothing in a bare encoder, the encoder's attribute in a model with a head."""

_PROJECTIONS: Final = {"q": "query", "k": "key", "v": "value"}

_FIRST_NORM_NAMES: Final[Mapping[str, str]] = {".weight": ".gamma", ".bias": ".beta"}
"""What BERT's TensorFlow release and the checkpoints converted from it call a norm's tensors."""

_BUFFERS: Final = {
    "embeddings.position_ids": "a buffer that counts positions; they are computed",
    "embeddings.token_type_ids": "a buffer of zeros; token types come with the input",
}
_HEADS: Final = {
    "cls.*": "the pretraining head (masked words, next sentence); this model is the encoder",
    "lm_head.*": "the masked-word head; this model is the encoder",
    "classifier.*": "a classifier's head; this model is the encoder",
}


class BertMapping:
    """Names of transformers' BERT, RoBERTa and XLM-RoBERTa; a node's stem is its name there, but for fused q, k, v."""

    def names(self, node: Node, part: str, expert: int | None) -> tuple[Source, ...]:
        """Return the part's name behind every prefix, for a norm under its first names too."""
        path = f"{node.stem.removesuffix('.qkv')}.self.{_PROJECTIONS[part]}" if part else node.stem
        spelled = [{}, _FIRST_NORM_NAMES] if isinstance(node, Norm) else [{}]
        return tuple(Source(f"{prefix}{path}", respell) for respell in spelled for prefix in PREFIXES)

    def drops(self, config: Config) -> tuple[Drop, ...]:
        """Return buffers and heads, and the pooler where the architecture has none."""
        drops = [Drop(f"{prefix}{name}", why) for name, why in _BUFFERS.items() for prefix in PREFIXES]
        drops += [Drop(name, why) for name, why in _HEADS.items()]
        if not read_config(config).has_pooler:
            drops += [Drop(f"{prefix}pooler.*", "the architecture has no pooler") for prefix in PREFIXES]
        return tuple(drops)
