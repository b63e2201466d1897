"""What rank processes run for the tests of decoders; imports no transformers."""

from __future__ import annotations

from typing import Any

import torch

import steelyard
from steelyard.torch import Embedding


def outputs(folder: str, calls: list[dict[str, Any]], options: dict[str, Any]) -> list[torch.Tensor]:
    """Load a decoder on this rank's share and return what it computes of each batch.

    Args:
        folder: The checkpoint.
        calls: Batches, see `support.decoders.call`.
        options: ``tp``, ``ep``, ``moe_tp`` and ``dtype`` of the load.
    """
    model = steelyard.load(folder, device="cpu", **options)
    with torch.inference_mode():
        return [computed(model.module, asked) for asked in calls]


def computed(module: Any, asked: dict[str, Any]) -> torch.Tensor:
    """Return a decoder's output of one batch; in chunks over a cache, if asked for, one behind the other."""
    ids, mask, positions = (
        None if asked[name] is None else torch.tensor(asked[name]) for name in ("ids", "mask", "positions")
    )
    assert ids is not None
    tokens = ids.shape[1]
    cache = module.new_cache(len(ids), tokens) if asked["chunks"] is not None else None
    found, start = [], 0
    for size in asked["chunks"] or (tokens,):
        stop = start + size
        found.append(
            module(
                ids[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                position_ids=None if positions is None else positions[:, start:stop],
                cache=cache,
                keep=asked["keep"],
            )
        )
        start = stop
    assert start == tokens, "the chunks are not the text"
    return torch.cat(found, 1)


def looked_up(folder: str, stem: str, ids: list[int]) -> torch.Tensor:
    """Load a folder on this rank process and return what one of its tables looks up."""
    module = steelyard.load(folder, device="cpu").module
    (table,) = (one for one in module.modules() if isinstance(one, Embedding) and one.node.stem == stem)
    found: torch.Tensor = table(torch.tensor(ids))
    return found
