"""Grouped-query attention over a rank's heads, and the cache of keys and values it grows.

Legend: B texts, T new tokens, S tokens so far with the new ones, H hidden size, h this rank's query heads, g its
key/value heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from steelyard import ops
from steelyard.decoder.config import DecoderConfig
from steelyard.errors import ConfigError
from steelyard.layers import Linear, Norm, State, take


class KVCache:
    """Keys and values of the tokens so far, in every layer; memory for all tokens is taken at once.

    Attributes:
        length: Tokens that every layer holds.
        tokens: Tokens that there is room for.

    Args:
        layers: Layers.
        batch: Texts.
        kv_heads: This rank's key/value heads.
        tokens: Tokens a text may have.
        head_dim: Size of a head.
        like: A tensor whose dtype and device the cache has.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, tokens: int, head_dim: int, like: Tensor) -> None:
        self._kv = like.new_empty(layers, 2, batch, kv_heads, tokens, head_dim)
        self.length, self.tokens = 0, tokens

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._kv.nbytes

    def check(self, new: int) -> None:
        """Raise ConfigError if there is no room for so many further tokens."""
        if self.length + new > self.tokens:
            raise ConfigError(
                f"the cache has room for {self.tokens} tokens; {self.length} are in it, {new} would follow"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values, and return all of them; `advance` once every layer has.

        Shapes:
            (B, g, T, d) each -> (B, g, S, d) each
        """
        stop = self.length + k.shape[2]
        for index, new in enumerate((k, v)):
            self._kv[layer, index, :, :, self.length : stop] = new
        return self._kv[layer, 0, :, :, :stop], self._kv[layer, 1, :, :, :stop]

    def advance(self, new: int) -> None:
        """Count tokens that every layer has kept."""
        self.length += new


class Attention(nn.Module):
    """One rank's heads of a layer's attention.

    Args:
        made: The decoder's sizes and choices.
        built: Stem to built node.
        layer: The layer's number.
    """

    def __init__(self, made: DecoderConfig, built: Mapping[str, nn.Module], layer: int) -> None:
        super().__init__()
        stem = f"layers.{layer}.self_attn"
        self.layer, self.head_dim = layer, made.head_dim
        self.qkv = take(built, f"{stem}.qkv_proj", Linear)
        self.out = take(built, f"{stem}.o_proj", Linear)
        self.q_norm = take(built, f"{stem}.q_norm", Norm) if made.has_qk_norm else None
        self.k_norm = take(built, f"{stem}.k_norm", Norm) if made.has_qk_norm else None
        self.state = take(built, f"{stem}.state", State) if f"{stem}.state" in built else None

    @property
    def kv_heads(self) -> int:
        """This rank's key/value heads."""
        return self.qkv.part_sizes["k"] // self.head_dim

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """Attend, and return what is added to the layer's input.

        Args:
            x: Hidden states of the new tokens.
            turns: Cosines and sines of their positions.
            mask: Which tokens each may attend to; None for itself and all before it.
            cache: Keys and values of the tokens before; the new ones' are added.
        Shapes:
            x (B, T, H), mask (B, 1, T, S) or (1, 1, T, S) -> (B, T, H)
        """
        q, k, v = (self._heads(part) for part in self.qkv.split(self.qkv(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = ops.apply_rotary(q, *turns), ops.apply_rotary(k, *turns)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        causal = mask is None and q.shape[2] > 1
        mixed = ops.attention(q, k, v, mask=mask, is_causal=causal)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        """Return a part's rows as heads.

        Shapes:
            (B, T, h * d) -> (B, h, T, d)
        """
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
