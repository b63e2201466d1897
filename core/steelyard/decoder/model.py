"""The runnable decoder over core's layers, on one rank's share of every node.

Legend: B texts, T new tokens, S tokens so far with the new ones, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from steelyard import ops
from steelyard.decoder.attention import Attention, KVCache
from steelyard.decoder.config import DecoderConfig
from steelyard.decoder.nodes import EMBEDDING, HEAD
from steelyard.layers import Embedding, Linear, Norm, take


class GatedMlp(nn.Module):
    """The activated gate times up, then down.

    Args:
        activation: What the gate passes, by the name that configs use.
        built: Stem to built node.
        stem: Where the two nodes stand.
    """

    def __init__(self, activation: str, built: Mapping[str, nn.Module], stem: str) -> None:
        super().__init__()
        self._activate = ops.activation(activation)
        self.gate_up = take(built, f"{stem}.gate_up_proj", Linear)
        self.down = take(built, f"{stem}.down_proj", Linear)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, whole on every rank.

        Shapes:
            (..., H) -> (..., H)
        """
        gate, up = self.gate_up.split(self.gate_up(x))
        y: Tensor = self.down(self._activate(gate) * up)
        return y


class DecoderLayer(nn.Module):
    """Attention and an MLP, each on the normalised input and added to it.

    Args:
        made: The decoder's sizes and choices.
        built: Stem to built node.
        layer: The layer's number.
        mlp: What stands behind attention.
    """

    def __init__(self, made: DecoderConfig, built: Mapping[str, nn.Module], layer: int, mlp: nn.Module) -> None:
        super().__init__()
        stem = f"layers.{layer}"
        self.attention_norm = take(built, f"{stem}.input_layernorm", Norm)
        self.attention = Attention(made, built, layer)
        self.mlp_norm = take(built, f"{stem}.post_attention_layernorm", Norm)
        self.mlp = mlp

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Return the next hidden states; arguments as in `Attention.forward`.

        Shapes:
            x (B, T, H) -> (B, T, H)
        """
        x = x + self.attention(self.attention_norm(x), turns, mask, cache)
        hidden: Tensor = x + self.mlp(self.mlp_norm(x))
        return hidden


class Decoder(nn.Module):
    """A decoder; its outputs are logits, or hidden states where the architecture has no head.

    Attributes:
        vocabulary: Columns of the logits.
        max_positions: Tokens that a text may have.
        has_head: Whether outputs are logits.

    Args:
        made: Its sizes and choices.
        built: Stem to built node; each is taken once.
        mlp: A layer's number to what stands behind its attention; a `GatedMlp` under ``mlp`` if not given.
    """

    def __init__(
        self,
        made: DecoderConfig,
        built: Mapping[str, nn.Module],
        mlp: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.made = made
        self.vocabulary, self.max_positions, self.has_head = made.vocabulary, made.max_positions, made.has_head
        self.embedding = take(built, EMBEDDING, Embedding)
        mlp = mlp or (lambda layer: GatedMlp(made.activation, built, f"layers.{layer}.mlp"))
        layers = [DecoderLayer(made, built, layer, mlp(layer)) for layer in range(made.layers)]
        self._kv_heads = layers[0].attention.kv_heads
        self.layers = nn.ModuleList(layers)
        self.norm = take(built, "norm", Norm)
        self.head = take(built, HEAD, Linear) if made.has_head else None
        self.rotary = ops.Rotary(made.rope)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the decoder is."""
        return self.embedding.weight.device

    def new_cache(self, batch: int, tokens: int) -> KVCache:
        """Return an empty cache.

        Args:
            batch: Texts.
            tokens: Tokens that each may have, prompt and continuation.
        """
        return KVCache(self.made.layers, batch, self._kv_heads, tokens, self.made.head_dim, like=self.embedding.weight)

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Compute a batch of new tokens.

        Args:
            input_ids: The new tokens.
            attention_mask: 1 for a token that is attended to, 0 for padding, of all tokens so far; all ones if not
                given.
            position_ids: Positions of the new tokens; counted from the cache's length on if not given.
            cache: What the tokens before left; the new ones are added.
            keep: Compute the output of so many last tokens alone; 0 for all.
        Raises:
            ConfigError: the cache is full, or the mask is of floats or of another length.
        Shapes:
            input_ids and position_ids (B, T), attention_mask (B, S) -> (B, T or keep, V), or H without a head
        """
        new = input_ids.shape[-1]
        before = 0 if cache is None else cache.length
        if cache is not None:
            cache.check(new)
        if position_ids is None:
            position_ids = torch.arange(before, before + new, device=input_ids.device)[None]
        hidden = self.embedding(input_ids)
        turns = self.rotary(position_ids, hidden.dtype)
        masks = {
            window: ops.causal_mask(new, before, window=window, kept=attention_mask, device=input_ids.device)
            for window in set(self.made.windows)
        }
        for layer, window in zip(self.layers, self.made.windows, strict=True):
            hidden = layer(hidden, turns, masks[window], cache)
        if cache is not None:
            cache.advance(new)
        hidden = self.norm(hidden[:, -keep:] if keep else hidden)
        return hidden if self.head is None else self.head.gathered(hidden)
