"""Agreement of all ranks of a load, in bounded time.

Collectives cannot say who died: some ranks see a reset connection, others wait on. So verdicts, failures
and heartbeats travel beside them, through a store that rank 0 holds; each stage ends by one decision that
every rank reads, and an error has the same text everywhere.

```python
with Agreement.open(ranks, bound=60.0) as agreement:  # before anything that can fail on one rank alone
    plan = make_plan()
    agreement.settle("plan", Verdict(digest=plan.digest, choices=plan.choices))
    for read in plan.reads:
        agreement.poll()
        perform(read)
    agreement.settle("loaded", Verdict())
```
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import distributed

from steelyard.agree.verdicts import Decision, Limits, Verdict, Word, text_of
from steelyard.errors import ConfigError, DistributedLoadError
from steelyard.ranks import Ranks

if TYPE_CHECKING:
    from steelyard.agree.channel import Channel

__all__ = ["Agreement", "Verdict"]


class Agreement:
    """What the ranks of one load have agreed upon; this class alone serves a job of one rank.

    Every rank opens one, and calls `settle` and `gather` with the same stages in the same order. An
    exception that leaves the ``with`` block is told to the others; an `Exception` becomes the error that
    all ranks raise, with itself as the cause. Use from one thread.
    """

    @staticmethod
    def open(ranks: Ranks, bound: float = 60.0, *, heartbeat: float = 1.0) -> Agreement:
        """Join the other ranks.

        Args:
            ranks: The job and this rank's place in it.
            bound: Seconds within which all ranks learn that one failed, died, or stopped giving signs of life.
            heartbeat: Longest time between two signs of life.
        Raises:
            ConfigError: the bound is not positive, or torch.distributed is not initialised for these ranks.
            DistributedLoadError: the agreement's store cannot be reached within the bound.
        """
        limits = Limits(bound, heartbeat)
        if ranks.world == 1:
            return Agreement()
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                f"world={ranks.world}, but torch.distributed is not initialised: start the ranks with torchrun and "
                f"call torch.distributed.init_process_group first"
            )
        found = distributed.get_world_size(), distributed.get_rank()
        if found != (ranks.world, ranks.rank):
            raise ConfigError(
                f"world={ranks.world}, rank={ranks.rank} were asked for, but torch.distributed says world={found[0]}, "
                f"rank={found[1]}"
            )
        from steelyard.agree.channel import Channel  # not at the top: a torch without distributed has no stores

        return _Joined(ranks.rank, Channel(ranks.rank, ranks.world, limits))

    def settle(self, stage: str, verdict: Verdict) -> None:
        """Wait for every rank at a stage; return iff all are well and say the same.

        Args:
            stage: The stage's name, the same on every rank.
            verdict: What this rank has to say; digests and choices must be equal on all ranks.
        Raises:
            DistributedLoadError: a rank failed, died, left, is stuck, or says something else; alike on all ranks.
        """
        if not verdict.ok:
            raise DistributedLoadError(0, verdict.error)

    def gather(self, stage: str, verdict: Verdict) -> tuple[Verdict, ...]:
        """Wait for every rank at a stage; return all verdicts by rank, whatever they say.

        Args:
            stage: The stage's name, the same on every rank.
            verdict: What this rank has to say; one that is not ``ok`` fails nobody.
        Raises:
            DistributedLoadError: a rank failed, died, left or is stuck; alike on all ranks.
        """
        return (verdict,)

    def poll(self) -> None:
        """Show that this rank makes progress, and learn what became of the others; takes a microsecond.

        Call it between reads: a rank that polls may take as long as it needs for its next stage, one that
        neither polls nor arrives for ``bound`` seconds while another waits is stuck.

        Raises:
            DistributedLoadError: a rank failed or died; alike on all ranks.
        """

    def fail(self, error: BaseException) -> DistributedLoadError:
        """Tell the others that this rank cannot go on; return the error that all raise.

        Args:
            error: What happened here.
        """
        return DistributedLoadError(0, text_of(error))

    def close(self) -> None:
        """Leave. Nothing of the agreement stays behind: no thread and no socket."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Joined(Agreement):
    """One rank's part in the agreement of several."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self._rank, self._channel = rank, channel
        self._raised: DistributedLoadError | None = None
        try:
            self._answer(self._channel.join())
        except BaseException:
            self._channel.close()
            raise

    def settle(self, stage: str, verdict: Verdict) -> None:
        if not verdict.ok:
            self._raised = self._fail(verdict.error)
            raise self._raised
        self._say(stage, Word(stage, False, verdict))

    def gather(self, stage: str, verdict: Verdict) -> tuple[Verdict, ...]:
        decision = self._say(stage, Word(stage, True, verdict))
        return tuple(Word.decode(word.encode()).verdict for word in decision.words)

    def poll(self) -> None:
        self._answer(self._channel.show_progress())

    def fail(self, error: BaseException) -> DistributedLoadError:
        return self._fail(text_of(error))

    def close(self) -> None:
        self._channel.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and error is not self._raised:
                raise self.fail(error) from error
            if error is not None and error is not self._raised:
                self._channel.say(failure=text_of(error))  # an interrupt waits for nobody
        finally:
            self._raised = None  # its traceback leads back to this object
            self._channel.close()

    def _say(self, stage: str, word: Word) -> Decision:
        decision = self._channel.wait(self._channel.say(word=word))
        decision = decision or Decision(f"left the load before {stage!r}", 0)
        self._answer(decision)
        return decision

    def _fail(self, text: str) -> DistributedLoadError:
        self._channel.say(failure=text)
        decision = self._channel.wait(-1) or Decision(text, self._rank)
        return decision.error() or DistributedLoadError(self._rank, text)

    def _answer(self, decision: Decision | None) -> None:
        error = decision.error() if decision is not None else None
        if error is not None:
            self._raised = error
            try:
                raise error from self._channel.cause()
            finally:
                del error  # the traceback holds this frame, and with it all that the caller holds
