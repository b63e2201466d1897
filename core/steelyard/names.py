"""The mapping at work: where a node's tensors may stand, over the family's mapping and further publishers', and drops."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate

from steelyard.blueprint import Node
from steelyard.layouts import Drop, Source
from steelyard.protocols import Config, WeightMapping

BUFFERS: tuple[Drop, ...] = (
    Drop("*rotary_emb.inv_freq", "a buffer that the model computes"),
    Drop("*rotary_emb.cos_cached", "a buffer that the model computes"),
    Drop("*rotary_emb.sin_cached", "a buffer that the model computes"),
)
"""Tensors that no model takes from a file."""


class Names:
    """Several publishers' mappings as one: the family's own first, then installed ones."""

    def __init__(self, mappings: Sequence[WeightMapping]) -> None:
        self._mappings = tuple(mappings)

    def of(self, node: Node, part: str, expert: int | None) -> tuple[Source, ...]:
        """Return every place where a part may stand."""
        if len(self._mappings) == 1:
            return self._mappings[0].names(node, part, expert)
        return tuple(source for mapping in self._mappings for source in mapping.names(node, part, expert))

    def drops(self, config: Config) -> tuple[Drop, ...]:
        """Return every rule that leaves tensors out, core's own last."""
        return (*(drop for mapping in self._mappings for drop in mapping.drops(config)), *BUFFERS)


def dropped(names: Iterable[str], drops: Sequence[Drop]) -> Mapping[str, str]:
    """Return which names a rule leaves out, each with the reason of the first rule that matches it.

    >>> dropped(["bert.pooler.w", "x"], [Drop("*pooler.*", "no pooler")])
    {'bert.pooler.w': 'no pooler'}
    """
    rules = [(re.compile(translate(drop.pattern)), drop.because) for drop in drops]
    reasons: dict[str, str] = {}
    for name in names:
        for pattern, because in rules:
            if pattern.match(name):
                reasons[name] = because
                break
    return reasons
