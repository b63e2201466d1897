"""The runnable encoder (torch): BERT's post-norm Transformer over core's layers, on one rank's share of every node.

Legend: B texts, T tokens, H hidden size, h this rank's heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steelyard.torch import Embedding, Linear, Norm, ops, take
from steelyard_model_bert.config import EncoderConfig


class EncoderOutput(NamedTuple):
    """What the encoder computes.

    Shapes:
        last_hidden_state (B, T, H), pooler_output (B, H); None without a pooler
    """

    last_hidden_state: Tensor
    pooler_output: Tensor | None


class BertEncoder(nn.Module):
    """An encoder of BERT, RoBERTa or XLM-RoBERTa.

    Attributes:
        max_positions: Tokens that a text may have.

    Args:
        made: Its sizes and choices.
        built: Stem to built node; each is taken once.
    """

    def __init__(self, made: EncoderConfig, built: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.max_positions = made.max_positions
        self.embeddings = _Embeddings(made, built)
        self.layers = nn.ModuleList(_Layer(made, built, layer) for layer in range(made.layers))
        self.pooler = take(built, "pooler.dense", Linear) if "pooler.dense" in built else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.embeddings.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return self.embeddings.norm.weight.device

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> EncoderOutput:
        """Compute a batch.

        Args:
            input_ids: Tokens.
            attention_mask: 1 for a token that is attended to, 0 for padding; all ones if not given.
            token_type_ids: Which text of a pair a token is of; all zeros if not given.
            position_ids: Rows of the position table; as the architecture counts them if not given.
        Raises:
            ValueError: a text is longer than the position table allows.
        Shapes:
            each argument (B, T)
        """
        tokens = input_ids.shape[-1]
        if tokens > self.max_positions:
            raise ValueError(f"the texts have {tokens} tokens; this encoder has positions for {self.max_positions}")
        hidden = self.embeddings(input_ids, token_type_ids, position_ids)
        mask = None if attention_mask is None else ops.padding_mask(attention_mask)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        return EncoderOutput(hidden, pooled)


class _Embeddings(nn.Module):
    """Words, positions and token types, added and normalised."""

    def __init__(self, made: EncoderConfig, built: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._style, self._pad = made.style, made.pad
        self.word = take(built, "embeddings.word_embeddings", Embedding)
        self.position = take(built, "embeddings.position_embeddings", Embedding)
        self.token_type = take(built, "embeddings.token_type_embeddings", Embedding)
        self.norm = take(built, "embeddings.LayerNorm", Norm)

    def forward(self, ids: Tensor, types: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return the first hidden states.

        Shapes:
            (B, T) -> (B, T, H)
        """
        if types is None:
            types = torch.zeros_like(ids)
        if positions is None:
            positions = self._positions(ids)
        columns = self.word.local(ids) + self.token_type.local(types) + self.position.local(positions)
        hidden: Tensor = self.norm(self.word.whole(columns))
        return hidden

    def _positions(self, ids: Tensor) -> Tensor:
        if self._style == "roberta":
            return ops.positions_from_padding(ids, self._pad)
        return torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)


class _Layer(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, made: EncoderConfig, built: Mapping[str, nn.Module], layer: int) -> None:
        super().__init__()
        stem = f"encoder.layer.{layer}"
        self._head_dim = made.hidden // made.heads
        self._activate = ops.activation(made.activation)
        self.qkv = take(built, f"{stem}.attention.qkv", Linear)
        self.out = take(built, f"{stem}.attention.output.dense", Linear)
        self.attention_norm = take(built, f"{stem}.attention.output.LayerNorm", Norm)
        self.up = take(built, f"{stem}.intermediate.dense", Linear)
        self.down = take(built, f"{stem}.output.dense", Linear)
        self.norm = take(built, f"{stem}.output.LayerNorm", Norm)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the next hidden states.

        Shapes:
            x (B, T, H), mask (B, 1, 1, T) -> (B, T, H)
        """
        q, k, v = (self._heads(part) for part in self.qkv.split(self.qkv(x)))
        mixed = ops.attention(q, k, v, mask=mask)
        x = self.attention_norm(x + self.out(mixed.transpose(1, 2).flatten(2)))
        hidden: Tensor = self.norm(x + self.down(self._activate(self.up(x))))
        return hidden

    def _heads(self, x: Tensor) -> Tensor:
        """Return a part's rows as heads.

        Shapes:
            (B, T, h * d) -> (B, h, T, d)
        """
        return x.view(*x.shape[:-1], -1, self._head_dim).transpose(1, 2)
