"""Ranks of a parallel load, and the three rules by which things go out over them.

Units:
    Every size counts ranks, heads or experts; nothing here counts elements or bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from steelyard.errors import ConfigError, HeadsError


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's place in the job.

    Dense layers are cut by ``tp`` and repeated over the ``world // tp`` data-parallel replicas. Experts go
    out by ``ep`` and are cut by ``moe_tp``.

    Attributes:
        world: Ranks of the job.
        rank: This one, ``dp_rank * tp + tp_rank``.
        tp: Tensor-parallel size of the dense layers.
        ep: Expert-parallel size.
        moe_tp: Tensor-parallel size inside one expert.
    Raises:
        ConfigError: a size below 1, a rank outside the world, or sizes that do not multiply to the world.
    """

    world: int = 1
    rank: int = 0
    tp: int = 1
    ep: int = 1
    moe_tp: int = 1

    def __post_init__(self) -> None:
        for name, size in (("world", self.world), ("tp", self.tp), ("ep", self.ep), ("moe_tp", self.moe_tp)):
            if size < 1:
                raise ConfigError(f"{name}={size}: a size must be at least 1")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"rank={self.rank} is outside 0..{self.world - 1} (world={self.world})")
        if self.world % self.tp:
            raise ConfigError(f"world={self.world} is not a multiple of tp={self.tp}")
        whole = self.ep * self.moe_tp == self.world
        if not whole and not (self.ep == 1 and self.moe_tp == self.tp):
            raise ConfigError(
                f"ep={self.ep} x moe_tp={self.moe_tp} must be world={self.world}, or ep=1 with moe_tp=tp={self.tp}"
            )

    @classmethod
    def of(
        cls, *, tp: int = 1, ep: int = 1, moe_tp: int | None = None, world: int | None = None, rank: int = 0
    ) -> Ranks:
        """Return ranks with the defaults filled in.

        ``moe_tp`` is 1 where experts are distributed, else ``tp``; ``world`` is the smallest that holds both.
        """
        inner = moe_tp if moe_tp is not None else (1 if ep > 1 else tp)
        return cls(world=world if world is not None else max(tp, ep * inner), rank=rank, tp=tp, ep=ep, moe_tp=inner)

    @property
    def tp_rank(self) -> int:
        """This rank's index in its tensor-parallel group."""
        return self.rank % self.tp

    @property
    def ep_rank(self) -> int:
        """This rank's index among the expert-parallel groups."""
        return self.rank // self.moe_tp if self.ep > 1 else 0

    @property
    def moe_tp_rank(self) -> int:
        """This rank's index inside its experts' tensor-parallel group."""
        return self.rank % self.moe_tp

    def at(self, rank: int) -> Ranks:
        """Return the same job seen from another rank."""
        return replace(self, rank=rank)

    def all(self) -> Iterator[Ranks]:
        """Yield every rank of the job, in order."""
        return (self.at(rank) for rank in range(self.world))

    def describe(self) -> str:
        """Return the sizes and the rank as one readable line."""
        return (
            f"tp_size={self.tp}, tp_rank={self.tp_rank}, ep_size={self.ep}, ep_rank={self.ep_rank}, "
            f"moe_tp={self.moe_tp}, world={self.world}"
        )


def distribute(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the range of ``count`` things that part ``index`` of ``parts`` holds.

    Parts are contiguous; where the count does not divide, the first parts take one more.

    >>> [distribute(30, 8, r) for r in (0, 5, 6, 7)]
    [(0, 4), (20, 24), (24, 27), (27, 30)]
    """
    if not 0 <= index < parts:
        raise ConfigError(f"part {index} is outside 0..{parts - 1}")
    base, more = divmod(count, parts)
    start = index * base + min(index, more)
    return start, start + base + (index < more)


def head_range(q_heads: int, kv_heads: int, tp: int, tp_rank: int, *, kv: bool) -> tuple[int, int]:
    """Return the query heads, or the key/value heads, that a tensor-parallel rank holds.

    Key/value heads split where ``tp`` divides them and are repeated where they divide ``tp``. Every other
    pair would give some rank a query head without its own key/value head, and is refused.

    Args:
        q_heads: Query heads of the layer.
        kv_heads: Key/value heads of the layer.
        tp: Tensor-parallel size.
        tp_rank: This rank's index in the group.
        kv: Whether the key/value range is asked for.
    Raises:
        HeadsError: the heads do not go out over the ranks; all numbers are in the text.

    >>> [head_range(8, 2, 8, r, kv=True) for r in (0, 3, 4, 7)]
    [(0, 1), (0, 1), (1, 2), (1, 2)]
    """
    asked = f"q_heads={q_heads}, kv_heads={kv_heads}, tp={tp}"
    if q_heads % tp:
        raise HeadsError(
            f"{q_heads} query heads do not divide by tp {tp} ({asked}); tp sizes that fit: "
            f"{', '.join(map(str, head_sizes(q_heads, kv_heads)))}"
        )
    if q_heads % kv_heads:
        raise HeadsError(f"{q_heads} query heads are not a multiple of {kv_heads} key/value heads ({asked})")
    if kv_heads % tp and tp % kv_heads:
        raise HeadsError(
            f"{kv_heads} key/value heads neither split over tp {tp} nor repeat evenly ({asked}); "
            f"tp sizes that fit: {', '.join(map(str, head_sizes(q_heads, kv_heads)))}"
        )
    if not kv:
        local = q_heads // tp
        return tp_rank * local, (tp_rank + 1) * local
    if kv_heads % tp == 0:
        local = kv_heads // tp
        return tp_rank * local, (tp_rank + 1) * local
    head = tp_rank // (tp // kv_heads)
    return head, head + 1


def head_sizes(q_heads: int, kv_heads: int, limit: int = 64) -> tuple[int, ...]:
    """Return the tensor-parallel sizes up to ``limit`` that the heads go out over."""
    return tuple(
        tp
        for tp in range(1, min(limit, q_heads) + 1)
        if q_heads % tp == 0 and q_heads % kv_heads == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    )
