"""What ranks say, what is seen of them, and the one decision that follows from it.

Nothing here talks to a store or starts a thread: every rank may run `judge` over what it sees, and the
first decision that reaches the store counts.

Units:
    Every time is in seconds of this process's monotonic clock; nothing here compares clocks of two machines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steelyard.errors import ConfigError, DistributedLoadError, SteelyardError

LISTED = 10  # differing choices, and failures, that a text names; the rest is counted
TEXT_LIMIT = 8000  # characters of one rank's failure; a store takes values of 8 MiB
DIGEST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank has to say at one stage.

    Attributes:
        ok: Whether the load can go on, as far as this rank can tell.
        digest: What must be the same on every rank, such as the plan's digest.
        choices: Named choices that must be the same on every rank; a difference is told by name.
        error: Why not, where ``ok`` is false.
    """

    ok: bool = True
    digest: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Word:
    """A verdict as it travels.

    Attributes:
        stage: Where it was given.
        gather: Whether the verdicts may differ and are handed to every rank.
        verdict: The verdict.
    """

    stage: str
    gather: bool
    verdict: Verdict

    def encode(self) -> str:
        """Return the word as JSON."""
        said = self.verdict
        return json.dumps([self.stage, self.gather, said.ok, said.digest, dict(said.choices), said.error])

    @classmethod
    def decode(cls, raw: bytes) -> Word:
        """Return the word that `encode` wrote."""
        stage, gather, ok, digest, choices, error = json.loads(raw)
        return cls(stage, gather, Verdict(ok, digest, choices, error))


@dataclass(frozen=True, slots=True)
class Decision:
    """How a stage ended, the same on every rank.

    Attributes:
        why: What went wrong; None if the load goes on.
        rank: The rank that failed; -1 where several are named in ``why``.
        words: Every rank's word, where the stage gathers.
    """

    why: str | None = None
    rank: int = -1
    words: tuple[str, ...] = ()

    def encode(self) -> str:
        """Return the decision as JSON."""
        return json.dumps([self.why, self.rank, self.words])

    @classmethod
    def decode(cls, raw: bytes) -> Decision:
        """Return the decision that `encode` wrote."""
        why, rank, words = json.loads(raw)
        return cls(why, rank, tuple(words))

    def error(self) -> DistributedLoadError | None:
        """Return what to raise, or None if the load goes on."""
        return None if self.why is None else DistributedLoadError(self.rank, self.why)


@dataclass(frozen=True, slots=True)
class Limits:
    """The times of one agreement, all derived from its bound.

    Attributes:
        bound: Seconds within which every rank learns of a failure.
        heartbeat: Longest time between two signs of life; ten of them fit into a short bound all the same.
    Raises:
        ConfigError: the bound is not positive.
    """

    bound: float
    heartbeat: float = 1.0

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ConfigError(f"bound={self.bound:g}: an agreement needs a positive number of seconds")

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return min(self.heartbeat, self.bound / 10)

    @property
    def silence(self) -> float:
        """Seconds without a heartbeat after which a rank is lost; with two intervals more it stays in the bound."""
        return self.bound * 2 / 3

    @property
    def grace(self) -> float:
        """Seconds to wait for further failures once one is known, so that a text names all that failed alike."""
        return min(0.5, self.interval)

    @property
    def linger(self) -> float:
        """Seconds that the store's host waits at the end for the others to have read what was decided."""
        return min(10.0, self.bound / 2)


@dataclass(slots=True)
class Seat:
    """What one rank sees of another.

    Attributes:
        since: When this rank began to watch, and later when the other's heartbeat last changed.
        progressed_at: When its loading thread last showed a sign of life.
        arrived_at: When it was first seen at the stage that it waits at.
        beats: Heartbeats so far; 0 until it has joined.
        progress: Signs of life of its loading thread so far.
        arrived: Stages that it has reached.
        failed: Whether it posted a failure.
        left: Whether it has ended its part of the agreement.
    """

    since: float
    progressed_at: float = 0.0
    arrived_at: float = 0.0
    beats: int = 0
    progress: int = 0
    arrived: int = 0
    failed: bool = False
    left: bool = False

    def update(self, raw: bytes, now: float) -> None:
        """Take in a heartbeat that was read at a time."""
        beats, progress, arrived, failed, left = map(int, raw.split())
        if beats != self.beats:
            self.since = now
        if progress != self.progress or arrived != self.arrived:
            self.progressed_at = now
        if arrived != self.arrived:
            self.arrived_at = now
        self.beats, self.progress, self.arrived = beats, progress, arrived
        self.failed, self.left = bool(failed), bool(left)

    def lost(self, now: float, limits: Limits) -> bool:
        """Tell whether the rank has fallen silent, or never joined."""
        return not self.left and now - self.since > (limits.silence if self.beats else limits.bound)


def beat(beats: int, progress: int, arrived: int, failed: bool, left: bool) -> str:
    """Return a heartbeat as `Seat.update` reads it."""
    return f"{beats} {progress} {arrived} {failed:d} {left:d}"


def text_of(error: BaseException) -> str:
    """Return a failure as other ranks print it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (KeyboardInterrupt)"
    text, name = str(error), type(error).__name__
    if not isinstance(error, SteelyardError):
        text = f"{name}: {text}" if text else name
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}... ({len(text)} characters)"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a text names them; long runs are shortened.

    >>> name_ranks([1]), name_ranks([0, 2]), name_ranks([0, 1, 2, 3, 6])
    ('rank 1', 'ranks 0, 2', 'ranks 0-3, 6')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def of_ranks(ranks: Sequence[int], why: str) -> Decision:
    """Return the decision that one or more ranks failed in the same way."""
    return Decision(why, ranks[0]) if len(ranks) == 1 else Decision(f"{name_ranks(ranks)}: {why}")


def lost_host() -> Decision:
    """Return what a rank says when the store no longer answers; composed alike on every rank."""
    return Decision(
        "the process was killed or stopped, or its machine is out of reach: the store through which the ranks agree, "
        "which this rank holds, does not answer",
        0,
    )


def judge_failures(failures: Mapping[int, str]) -> Decision:
    """Return the decision over the failures that ranks posted; ranks that failed alike share a sentence."""
    alike: dict[str, list[int]] = {}
    for rank in sorted(failures):
        alike.setdefault(failures[rank], []).append(rank)
    first, *others = [of_ranks(ranks, text) for text, ranks in alike.items()]
    shown = [str(decision.error()) for decision in others[:LISTED]]
    if len(others) > LISTED:
        shown.append(f"{len(others) - LISTED} further failures")
    return Decision("; ".join([first.why or "", *shown]), first.rank)


def judge_silence(seats: Sequence[Seat], now: float, limits: Limits) -> Decision | None:
    """Return the decision that ranks are gone, or None if all can be heard."""
    gone = [rank for rank, seat in enumerate(seats) if seat.lost(now, limits)]
    silent = [rank for rank in gone if seats[rank].beats]
    if silent:
        return of_ranks(
            silent,
            f"no heartbeat for {limits.silence:.3g} s: the process was killed or stopped, or its machine is out of reach",
        )
    return of_ranks(gone, f"did not join the load within {limits.bound:g} s") if gone else None


def judge_absence(seats: Sequence[Seat], index: int, stage: str, now: float, limits: Limits) -> Decision | None:
    """Return the decision that ranks will not come to a stage at which this rank waits, or None.

    A rank whose loading thread shows signs of life may take as long as it needs.

    Args:
        seats: What is seen of every rank.
        index: The stage's number, from 0.
        stage: Its name.
        now: The time.
        limits: The agreement's times.
    """
    absent = [rank for rank, seat in enumerate(seats) if seat.arrived <= index]
    left = [rank for rank in absent if seats[rank].left]
    if left:
        return of_ranks(left, f"left the load before {stage!r}")
    first = min((seat.arrived_at for seat in seats if seat.arrived > index), default=now)
    stuck = [rank for rank in absent if now - max(first, seats[rank].progressed_at) > limits.bound]
    return of_ranks(stuck, f"did not answer within {limits.bound:g} s at {stage!r}") if stuck else None


def judge_words(words: Sequence[Word]) -> Decision:
    """Return the decision of a stage that every rank has reached."""
    stage = words[0].stage
    if len({word.stage for word in words}) > 1:
        return Decision(f"the ranks are at different stages: {_per_rank([repr(word.stage) for word in words])}")
    if words[0].gather:
        return Decision(words=tuple(word.encode() for word in words))
    verdicts = [word.verdict for word in words]
    differences = []
    digests = [verdict.digest or "none" for verdict in verdicts]
    if len(set(digests)) > 1:
        short = [digest[:DIGEST_SHOWN] for digest in digests]
        differences.append(f"digest {_per_rank(short if len(set(short)) == len(set(digests)) else digests)}")
    names = sorted({name for verdict in verdicts for name in verdict.choices})
    found = {
        name: [repr(said.choices[name]) if name in said.choices else "absent" for said in verdicts] for name in names
    }
    differing = [name for name in names if len(set(found[name])) > 1]
    differences.extend(f"{name} is {_per_rank(found[name])}" for name in differing[:LISTED])
    if len(differing) > LISTED:
        differences.append(f"{len(differing) - LISTED} further choices differ")
    if not differences:
        return Decision()
    return Decision(
        f"the ranks do not agree at {stage!r}: {'; '.join(differences)}. Every rank needs the same checkpoint "
        f"files, options and plugin versions"
    )


def _per_rank(values: Sequence[str]) -> str:
    """Return values with the ranks that hold them: ``a on ranks 0, 2, b on rank 1``."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in holders.items())
