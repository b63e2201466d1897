"""The names of Meta's and Mistral's own releases, whose query and key rows lie in rotary pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from steelyard.plugin import Config, Drop, Linear, Node, RowOrder, Source, fields

_NAMES: Final[Mapping[str, str]] = {"embed_tokens": "tok_embeddings", "lm_head": "output", "norm": "norm"}
_IN_A_LAYER: Final[Mapping[str, str]] = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj.q": "attention.wq",
    "self_attn.qkv_proj.k": "attention.wk",
    "self_attn.qkv_proj.v": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_up_proj.gate": "feed_forward.w1",
    "mlp.gate_up_proj.up": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_IN_PAIRS: Final = ("attention.wq", "attention.wk")


class ConsolidatedMapping:
    """Names in ``consolidated*.safetensors``.

    Source:
        github.com/meta-llama/llama and mistralai/mistral-inference, ``model.py``: values 2 i and 2 i + 1 of a head are
        rotated together. transformers' ``convert_llama_weights_to_hf.py`` takes them apart in ``permute``.
    """

    keys: ClassVar[tuple[str, ...]] = ("llama.meta", "mistral.consolidated")

    def names(self, node: Node, part: str, expert: int | None) -> tuple[Source, ...]:
        """Return the one name of a part; none for what these releases do not have."""
        stem = f"{node.stem}.{part}" if isinstance(node, Linear) and part else node.stem
        if stem in _NAMES:
            return (Source(_NAMES[stem]),)
        layers, _, rest = stem.partition(".")
        layer, _, inside = rest.partition(".")
        if layers != "layers" or inside not in _IN_A_LAYER:
            return ()
        name = _IN_A_LAYER[inside]
        rows = RowOrder.ROPE_PAIRS if name in _IN_PAIRS else RowOrder.PLAIN
        return (Source(f"layers.{layer}.{name}", rows=rows),)

    def drops(self, config: Config) -> tuple[Drop, ...]:
        """Return the table of rotations, and the head of a model that is used without one."""
        drops = [Drop("rope.freqs", "a buffer that the model computes")]
        names = fields.architectures(config)
        if names and all(name.endswith("Model") for name in names):
            drops.append(Drop("output.*", "the architecture has no head"))
        return tuple(drops)
