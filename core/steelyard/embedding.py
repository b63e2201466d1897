"""Texts to vectors with a loaded encoder, as its sentence-transformers folder says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from steelyard import ops
from steelyard.errors import CheckpointError, ConfigError
from steelyard.loader import LoadedModel
from steelyard.sentences import PoolingMode, SentenceSettings
from steelyard.texts import open_tokenizer, require_rows

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_TOKENS = ("[PAD]", "<pad>")

POOLING: Mapping[PoolingMode, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": ops.mean_pool,
    "cls": ops.cls_pool,
    "max": ops.max_pool,
    "mean_sqrt_len": ops.mean_sqrt_len_pool,
    "last": ops.last_token_pool,
}


class Encoder(Protocol):
    """What an encoder's module offers."""

    max_positions: int

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Return something with ``last_hidden_state`` (B, T, H)."""
        ...


class SentenceEncoder:
    """Turns texts into vectors.

    Args:
        model: A loaded encoder.
        settings: How hidden states become one vector.
    Raises:
        CheckpointError: the folder has no ``tokenizer.json``, or one of another model.
        ConfigError: the model is not an encoder.
    """

    def __init__(self, model: LoadedModel, settings: SentenceSettings) -> None:
        self.settings = settings
        self._module = model.module
        limit = model.module.__dict__.get("max_positions")
        if not isinstance(limit, int):
            raise ConfigError(f"{model.plan.family_key} is not an encoder of texts: it states no max_positions")
        self.max_tokens = min(settings.max_tokens or limit, limit)
        self._device = next(iter(model.module.parameters())).device
        config = model.plan.config
        self._tokenizer = read_tokenizer(settings.folder, self.max_tokens, config.get("pad_token_id"))
        require_rows(self._tokenizer, settings.folder, config.get("vocab_size"))

    def encode(self, texts: Sequence[str], *, batch_size: int = 32) -> torch.Tensor:
        """Return one vector a text, in the order given.

        Texts of like length are computed together, so that little is padded.

        Raises:
            ConfigError: one text is given, not a list of texts.
        Shapes:
            (texts, dim), float32, on the CPU; (0, 0) for no text
        """
        if isinstance(texts, str):
            raise ConfigError("encode takes a list of texts; put the one text into a list")
        cased = [text.lower() if self.settings.lower else text for text in texts]
        order = sorted(range(len(cased)), key=lambda index: len(cased[index]))
        rows: dict[int, torch.Tensor] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            vectors = self._batch([cased[index] for index in batch])
            rows.update(zip(batch, vectors, strict=True))
        return torch.stack([rows[index] for index in range(len(cased))]) if rows else torch.empty(0, 0)

    def _batch(self, texts: Sequence[str]) -> torch.Tensor:
        encoded = self._tokenizer.encode_batch(list(texts))
        ids = torch.tensor([one.ids for one in encoded], device=self._device)
        mask = torch.tensor([one.attention_mask for one in encoded], device=self._device)
        with torch.inference_mode():
            hidden = self._module(ids, mask).last_hidden_state.float()
            vectors = torch.cat([POOLING[mode](hidden, mask) for mode in self.settings.pooling], dim=-1)
            return (ops.normalize(vectors) if self.settings.normalize else vectors).cpu()


def read_tokenizer(folder: Path, max_tokens: int, pad_id: object) -> Tokenizer:
    """Return a folder's tokenizer, cutting at ``max_tokens`` and padding to the longest text of a batch.

    A ``tokenizer.json`` often has the truncation and padding of its last use baked in; both are replaced.

    Args:
        folder: The checkpoint's folder.
        max_tokens: Tokens to cut at.
        pad_id: The config's padding id, used if the file has no padding of its own.
    Raises:
        CheckpointError: there is none, it cannot be read, or special tokens alone reach ``max_tokens``.
        ConfigError: the tokenizers package is not installed.
    """
    tokenizer = open_tokenizer(folder)
    if pad_id is not None and (not isinstance(pad_id, int) or isinstance(pad_id, bool) or pad_id < 0):
        raise CheckpointError(f"{folder}: the config's pad_token_id={pad_id!r} is no token's id")
    special = tokenizer.num_special_tokens_to_add(is_pair=False)
    if max_tokens <= special:
        raise CheckpointError(
            f"{folder}: a limit of {max_tokens} tokens leaves no room beside {special} special tokens"
        )
    baked = tokenizer.padding or {}
    named = (tokenizer.token_to_id(name) for name in PAD_TOKENS)
    choices = (baked.get("pad_id"), pad_id, *named, 0)
    chosen = next(one for one in choices if one is not None)
    token = baked.get("pad_token") or tokenizer.id_to_token(chosen) or PAD_TOKENS[0]
    tokenizer.enable_truncation(max_tokens)
    tokenizer.enable_padding(pad_id=chosen, pad_token=token)
    return tokenizer
