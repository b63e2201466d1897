"""Where a decoder's tensors stand in checkpoints with transformers' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from steelyard.blueprint import AttentionState, Experts, Linear, Node, Part
from steelyard.decoder.config import DecoderConfig
from steelyard.decoder.nodes import HEAD
from steelyard.layouts import Drop, Source
from steelyard.placement import Order
from steelyard.protocols import Config

PROJECTIONS: Mapping[str, str] = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


class DecoderMapping:
    """Names of transformers' decoders, and the fused ``qkv_proj`` and ``gate_up_proj`` that others store.

    Args:
        made: The decoder.
    """

    def __init__(self, made: DecoderConfig) -> None:
        self.made = made
        if made.is_nested:
            self.prefixes: tuple[str, ...] = ("model.language_model.", "language_model.model.", "model.")
            self.heads: tuple[str, ...] = ("lm_head", "language_model.lm_head")
        else:
            self.prefixes = ("model.",) if made.has_head else ("", "model.")
            self.heads = ("lm_head",)
        self._stacks: dict[tuple[str, str], tuple[Order | None, tuple[Source, ...]]] = {}

    def names(self, node: Node, part: str, expert: int | None) -> tuple[Source, ...]:
        """Return where a part may stand, behind every prefix."""
        if node.stem == HEAD:
            return tuple(Source(name) for name in self.heads)
        if len(self.prefixes) == 1:
            return tuple(self.below(self.prefixes[0], node, part, expert))
        return tuple(source for prefix in self.prefixes for source in self.below(prefix, node, part, expert))

    def below(self, prefix: str, node: Node, part: str, expert: int | None) -> Iterable[Source]:
        """Return where a part may stand behind one prefix."""
        path = f"{prefix}{node.stem}"
        if isinstance(node, Experts):
            return self.experts(path, node, part, expert)
        if isinstance(node, AttentionState):
            return (Source(path.removesuffix(".state")),)
        if isinstance(node, Linear) and len(node.parts) > 1:
            above = path.rpartition(".")[0]
            return (Source(f"{above}.{PROJECTIONS[part]}"), Source(path, order=order_of(node.parts)))
        return (Source(path),)

    def experts(self, path: str, node: Experts, part: str, expert: int | None) -> Iterable[Source]:
        """Return where a part of an expert may stand: on its own, fused with the other part, or with all experts."""
        known = self._stacks.get((path, part))  # one for all experts of a layer: a large model asks for many thousand
        if known is None:
            order = None if part == "down" else order_of(node.w13.parts)
            fused = f"{path}.down_proj" if part == "down" else f"{path}.gate_up_proj"
            spelled: tuple[Mapping[str, str], ...] = ({".weight": ""}, {})
            stacks = tuple(Source(fused, respell, order, stacked=True) for respell in spelled)
            known = self._stacks[path, part] = (order, stacks)
        order, stacks = known
        single = Source(f"{path}.{expert}.{PROJECTIONS[part]}")
        if order is None:
            return (single, *stacks)
        return (single, Source(f"{path}.{expert}.gate_up_proj", order=order), *stacks)

    def drops(self, config: Config) -> tuple[Drop, ...]:
        """Return the layers that only draft tokens, and the head of a model that is used without one."""
        first = self.made.layers
        drops = [
            Drop(f"{prefix}layers.{first + extra}.*", "a layer that drafts tokens (num_nextn_predict_layers)")
            for extra in range(self.made.drafts)
            for prefix in self.prefixes
        ]
        if not self.made.has_head:
            drops += [Drop(f"{name}.*", "the architecture has no head") for name in self.heads]
        return tuple(drops)


def order_of(parts: Iterable[Part]) -> Order:
    """Return the order of parts that lie one behind the other."""
    return Order(tuple((part.name, part.out) for part in parts))
