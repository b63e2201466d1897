"""How a token is chosen from logits: the likeliest one, or one drawn by temperature and nucleus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from steelyard.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

COOLEST = 1e-4
"""The lowest temperature above 0; below it logits over the temperature leave float32."""

BROKEN = -1  # in a token's place: the logits were not finite


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits.

    Attributes:
        temperature: 0 takes the likeliest token; above, what logits are divided by before one is drawn.
        top_p: Draw only from the likeliest tokens whose probability together reaches this.
        seed: Draws of the same seed are the same, on every device; None draws anew each time.

    Raises:
        ConfigError: a value is out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or COOLEST <= self.temperature < math.inf):
            raise ConfigError(
                f"temperature={self.temperature!r}: give 0 for the likeliest token, or {COOLEST} and more"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p!r} is no probability above 0 and up to 1")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 1 << 63):
            raise ConfigError(f"seed={self.seed!r} is no whole number from 0 and below 2**63")


GREEDY = Sampling()


class Chooser:
    """Chooses tokens as a `Sampling` says; draws follow one another.

    Args:
        sampling: What says so.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._draws = torch.Generator()
        if sampling.seed is None:
            self._draws.seed()
        else:
            self._draws.manual_seed(sampling.seed)

    def choose(self, logits: Tensor) -> Tensor:
        """Return a token, or `BROKEN` if a logit is not finite.

        Shapes:
            logits: (V,) -> (), int64
        """
        logits = logits.float()
        if self._sampling.temperature == 0:
            token = logits.argmax()
        else:
            scaled = (logits - logits.max()) / self._sampling.temperature
            likely, tokens = scaled.softmax(0), None
            if self._sampling.top_p < 1:
                likely, tokens = likely.sort(descending=True, stable=True)
                likely = nucleus(likely, self._sampling.top_p)
            reached = likely.cumsum(0, dtype=torch.float64)
            # A draw has 24 bits, so that draw * total stays below the total in float64, and the place below V.
            draw = torch.rand((), generator=self._draws).item()
            place = (reached <= draw * reached[-1]).sum()
            token = place if tokens is None else tokens.take(place)
        return torch.where(logits.isfinite().all(), token, BROKEN)


def nucleus(likely: Tensor, top_p: float) -> Tensor:
    """Keep the fewest probabilities that together reach ``top_p``, and put 0 in the others' place.

    Args:
        likely: Probabilities, the largest first.
        top_p: What they must reach.
    Shapes:
        likely: (V,) -> the same
    """
    before = likely.cumsum(0, dtype=torch.float64) - likely
    return likely.masked_fill(before >= top_p, 0)
