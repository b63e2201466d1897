"""Rotary position embeddings in the form of halves: value i of a head turns with value i + n / 2.

Legend: B texts, T tokens, h heads, d size of a head, n of its values are rotated.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor, nn

from steelyard.rope import DefaultRope, DynamicRope, LinearRope, Llama3Rope, RopeConfig, YarnRope


def inverse_frequencies(
    rope: RopeConfig, *, tokens: int = 0, device: torch.device | str | None = None
) -> tuple[Tensor, float]:
    """Return how far each pair turns a token, and what cos and sin are multiplied by.

    They are computed on the CPU, so that every device has the same ones.

    Args:
        rope: The rotation.
        tokens: Length of the longest text; only the dynamic kind asks, and only beyond the length of training.
        device: Where the result goes; the CPU if not given.
    Shapes:
        -> (n / 2,), float32
    Units:
        Radians a token.
    Source:
        transformers 5.24, ``modeling_rope_utils.py``, operation by operation: the values are equal bit for bit.

    >>> from steelyard.rope import LinearRope
    >>> inverse_frequencies(RopeConfig(10000.0, 4, LinearRope(2.0)))
    (tensor([0.5000, 0.0050]), 1.0)
    """
    scaling, attention_factor = rope.scaling, 1.0
    match scaling:
        case DefaultRope():
            turns = 1.0 / _periods(rope.theta, rope.dim)
        case LinearRope(factor):
            turns = 1.0 / _periods(rope.theta, rope.dim) / factor
        case DynamicRope():
            turns = 1.0 / _periods(_dynamic_theta(rope.theta, rope.dim, scaling, tokens), rope.dim)
        case Llama3Rope():
            turns = _llama3(1.0 / _periods(rope.theta, rope.dim), scaling)
        case YarnRope():
            turns = _yarn(rope.theta, rope.dim, scaling)
            attention_factor = scaling.attention_factor
        case _:
            assert_never(scaling)
    return turns.to(device), attention_factor


def _periods(theta: float | Tensor, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return torch.pow(theta, exponents)


def _dynamic_theta(theta: float, dim: int, scaling: DynamicRope, tokens: int) -> float | Tensor:
    factor, positions = scaling.factor, scaling.positions
    # Beyond the length of training transformers has the length in a tensor and so computes in float32.
    length = torch.tensor(tokens, device="cpu") if tokens > positions else positions
    growth: float | Tensor = factor * length / positions - (factor - 1)
    scaled: float | Tensor = theta * growth ** (dim / (dim - 2))
    return scaled


def _llama3(turns: Tensor, scaling: Llama3Rope) -> Tensor:
    lengths = 2 * math.pi / turns  # tokens of a full turn
    longest, shortest = scaling.positions / scaling.low, scaling.positions / scaling.high
    scaled = torch.where(lengths > longest, turns / scaling.factor, turns)
    share = (scaling.positions / lengths - scaling.low) / (scaling.high - scaling.low)
    between = (1 - share) * scaled / scaling.factor + share * scaled
    return torch.where((lengths >= shortest) & (lengths <= longest), between, scaled)


def _yarn(theta: float, dim: int, scaling: YarnRope) -> Tensor:
    def pair(turns: float) -> float:
        """Return the pair, as a fraction, that makes so many turns within the length of training."""
        return (dim * math.log(scaling.positions / (turns * 2 * math.pi))) / (2 * math.log(theta))

    start, end = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, dim - 1)
    if start == end:
        end += 0.001  # no division by 0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - start) / (end - start)).clamp(0, 1)
    kept = 1 - ramp
    periods = _periods(theta, dim)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


class Rotary(nn.Module):
    """Cos and sin of every position; a decoder asks once a forward and hands them to its layers.

    Frequencies are float32 on every device and under every cast of the module, and no part of its state.

    The dynamic kind takes the length from the largest position of the call and remembers no other call, so that a
    text's numbers do not depend on the texts before it: beyond the length of training each length has frequencies of
    its own, and a shorter text has those of training again. Keys that a cache holds stay as they were rotated, so that
    a text which grows past the length of training is not what one forward over it gives; transformers does the same.
    (Its module also keeps the frequencies of its longest text for others that are longer than those of training.) On
    an accelerator this kind waits for the device.

    Attributes:
        rope: The rotation.
        attention_factor: What cos and sin are multiplied by.
    """

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self._turns, self.attention_factor = inverse_frequencies(rope)
        self._held: dict[torch.device, Tensor] = {}  # no buffer: a cast of the module would round it

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, computed in float32.

        Args:
            positions: Each token's position, from 0.
            dtype: What the result is cast to: that of queries and keys.
        Shapes:
            (B, T) or (T,) -> twice (B, T, n) or (T, n); the second half of n repeats the first
        """
        angles = positions[..., None].float() * self._turns_for(positions)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return cos.to(dtype), sin.to(dtype)

    def extra_repr(self) -> str:
        """Return what tells one rotation from another."""
        return str(self.rope)

    def _turns_for(self, positions: Tensor) -> Tensor:
        device = positions.device
        if isinstance(self.rope.scaling, DynamicRope):
            tokens = int(positions.max()) + 1
            if tokens > self.rope.scaling.positions:
                return inverse_frequencies(self.rope, tokens=tokens, device=device)[0]
        if device not in self._held:
            self._held[device] = self._turns.to(device)
        return self._held[device]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first n values of every head; the others pass.

    Args:
        x: Queries or keys.
        cos: As `Rotary` gives it, in x's dtype.
        sin: Likewise.
    Raises:
        ValueError: a head has fewer than n values.
    Shapes:
        x (B, h, T, d), cos and sin (B, T, n) or (T, n) -> (B, h, T, d)
    """
    rotated = cos.shape[-1]
    if rotated > x.shape[-1]:
        raise ValueError(f"cos and sin rotate {rotated} values of a head, which has {x.shape[-1]}")
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    turned, passed = x[..., :rotated], x[..., rotated:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, passed), -1) if passed.shape[-1] else turned


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, which may differ in heads; see `apply_rotary`.

    Args:
        q: Queries.
        k: Keys.
        cos: As `Rotary` gives it, in their dtype.
        sin: Likewise.
    Shapes:
        q (B, h, T, d), k (B, g, T, d), cos and sin (B, T, n) or (T, n) -> as q and k
    """
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
