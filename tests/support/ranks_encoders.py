"""What rank processes run for the encoder tests; imports no transformers."""

from __future__ import annotations

from typing import Any

import torch

import steelyard
from steelyard.embedding import SentenceEncoder
from steelyard.sentences import sentence_settings


def embed(folder: str, texts: list[str]) -> dict[str, Any]:
    """Load an encoder on this rank's share and embed texts."""
    model = steelyard.load(folder, device="cpu")
    vectors = SentenceEncoder(model, sentence_settings(folder)).encode(texts, batch_size=16)
    return {"vectors": vectors, "rank": model.report.ranks[0].to_json(), "digest": model.report.digest}


def hidden(folder: str, ids: list[list[int]], mask: list[list[int]]) -> dict[str, Any]:
    """Load an encoder on this rank's share and return its hidden states."""
    model = steelyard.load(folder, device="cpu")
    with torch.inference_mode():
        found = model.module(torch.tensor(ids), torch.tensor(mask)).last_hidden_state
    return {"hidden": found, "rank": model.report.ranks[0].to_json()}


def heavy_modules() -> list[str]:
    """Return what a rank process has imported of what only the parent needs."""
    import sys

    return sorted({name.partition(".")[0] for name in sys.modules} & {"transformers", "hypothesis", "sklearn"})
