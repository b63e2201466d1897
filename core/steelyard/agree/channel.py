"""One rank's line to the store through which the ranks agree, run by a thread of its own.

The thread alone talks to the store, so nothing that the loading thread does delays a heartbeat, and a
store that hangs never hangs the load. The loading thread says what it has to say under a lock and waits,
bounded, for what the thread has heard.

Keys of the store: ``token`` tells one store from another; ``beat/<rank>`` is rewritten every interval;
``word/<stage>/<rank>`` and ``failed/<rank>`` are written once; ``decision/<stage>`` is taken by compare_set.
All values are JSON or numbers: nothing that comes from the network is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

# Documented in torch.distributed, whose __init__ re-exports them without saying so.
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from steelyard.agree.meeting import STORE_ERRORS, addresses, connect, job_store, machine
from steelyard.agree.verdicts import (
    Decision,
    Limits,
    Seat,
    Word,
    beat,
    judge_absence,
    judge_failures,
    judge_silence,
    judge_words,
    lost_host,
    text_of,
)

RECORD = "steelyard/agreement"  # key of the job's own store under which rank 0 tells where its store is
PAUSES = (0.005, 0.1)  # seconds between two looks while something is awaited, growing from the first to the second
PROBE = 2.0  # seconds, at most, given to one step of a connection
_joined_last: list[str] = []  # token of the agreement that this process joined last


@dataclass(frozen=True, slots=True)
class _Said:
    """What the loading thread wants the others to know; ``revision`` counts its changes."""

    revision: int = 0
    words: tuple[Word, ...] = ()
    progress: int = 0
    failure: str | None = None
    leaving: bool = False


@dataclass(slots=True)
class _Heard:
    """What the line's thread found out, guarded by the channel's condition.

    Attributes:
        at: When the store last answered.
        decisions: Every stage's decision so far.
        lost: Set when the store can no longer be asked.
        cause: The store's own error.
        refused: Where rank 0 said that its store is, and is not.
        joined: Whether this rank's heartbeat has arrived once.
        ended: Whether the thread is done.
    """

    at: float
    decisions: list[Decision] = field(default_factory=list)
    lost: Decision | None = None
    cause: Exception | None = None
    refused: str = ""
    joined: bool = False
    ended: bool = False

    def failure(self) -> Decision | None:
        """Return the decision that ends the load, if there is one; what was agreed goes before what is seen here."""
        if self.decisions and self.decisions[-1].why is not None:
            return self.decisions[-1]
        return self.lost


class Channel:
    """One rank's line to the agreement's store.

    Attributes:
        rank: This rank.
        world: Ranks of the job.
        limits: The agreement's times.
    """

    def __init__(self, rank: int, world: int, limits: Limits) -> None:
        self.rank, self.world, self.limits = rank, world, limits
        self._condition = threading.Condition()
        self._said = _Said()
        self._heard = _Heard(time.monotonic())
        self._thread = threading.Thread(
            target=self._run, args=(job_store(limits.bound),), name="steelyard-agreement", daemon=True
        )
        self._thread.start()

    # --- called by the loading thread ---

    def say(self, *, word: Word | None = None, failure: str | None = None, leaving: bool = False) -> int:
        """Have something sent at once.

        Args:
            word: This rank's word at its next stage.
            failure: Why this rank cannot go on; the first one counts.
            leaving: Whether this rank's part is over.
        Returns:
            The number of the stage that the last word was for, from 0.
        """
        with self._condition:
            said = self._said
            words = said.words if word is None else (*said.words, word)
            why = failure if said.failure is None else said.failure
            self._said = _Said(said.revision + 1, words, said.progress + 1, why, leaving or said.leaving)
            self._condition.notify_all()
            return len(words) - 1

    def show_progress(self) -> Decision | None:
        """Give a sign of life; return the decision that ends the load, if there is one."""
        with self._condition:
            said = self._said
            self._said = _Said(said.revision, said.words, said.progress + 1, said.failure, said.leaving)
            if self._silent_for() < self.limits.silence:
                return self._heard.failure()
        return self.wait(None)

    def wait(self, index: int | None) -> Decision | None:
        """Wait, bounded, for a stage's decision.

        Args:
            index: The stage's number; None to return as soon as the store is known to answer; -1 for whatever
                ends the load.
        Returns:
            The decision that ends the load, else that of the stage; None if the thread ended without one.
        """
        heard, entered, known = self._heard, time.monotonic(), self._heard.at
        with self._condition:
            while True:
                failure = heard.failure()
                if failure is not None:
                    return failure
                if index is None and (heard.at != known or heard.ended):
                    return None
                if index is not None and 0 <= index < len(heard.decisions):
                    return heard.decisions[index]
                if heard.ended:
                    return None
                # A long call that held the interpreter may have kept the thread from running: give it a turn first.
                patience = max(
                    self.limits.silence - self._silent_for(), entered + 2 * self.limits.interval - time.monotonic()
                )
                if patience <= 0:
                    heard.lost = lost_host()
                    continue
                before = time.monotonic()
                self._condition.wait(patience)
                if time.monotonic() - before > patience + self.limits.interval:
                    entered = time.monotonic()  # this very process was stopped meanwhile

    def join(self) -> Decision | None:
        """Wait, bounded, until this rank has joined; return why it could not."""
        with self._condition:
            heard = self._heard
            patience = self.limits.bound + self.limits.interval
            if not self._condition.wait_for(lambda: heard.joined or heard.ended, patience):
                heard.lost = lost_host() if heard.refused else self._no_host()
            return None if heard.joined else heard.lost

    def cause(self) -> Exception | None:
        """Return the store's own error, if it failed."""
        return self._heard.cause

    def close(self) -> None:
        """Leave, and wait, bounded, until the thread has ended and its socket is closed.

        A thread that hangs in a store whose machine is gone cannot be ended; it is a daemon, and is left.
        """
        self.say(leaving=True)
        with self._condition:
            hangs = self._heard.lost is not None and not self._heard.ended
        self._thread.join(self.limits.interval if hangs else self.limits.linger + 2 * self.limits.interval)

    def _silent_for(self) -> float:
        return 0.0 if self._heard.ended else time.monotonic() - self._heard.at

    def _no_host(self) -> Decision:
        return Decision(f"did not open the agreement of this load within {self.limits.bound:g} s", 0)

    # --- run by the line's own thread ---

    def _run(self, job: Store) -> None:
        broken: Decision | None = Decision("its agreement thread ended by an error of its own", self.rank)
        try:
            if self.rank == 0:
                self._host(job)
            else:
                self._visit(job)
            broken = None
        except STORE_ERRORS as error:
            broken = lost_host()
            if self.rank == 0:
                broken = Decision(f"cannot hold the store through which the ranks agree: {text_of(error)}", 0)
            self._heard.cause = error.with_traceback(None)  # its frames would keep the store's socket open
        finally:
            with self._condition:
                self._heard.lost = self._heard.lost or broken
                self._heard.ended = True
                self._condition.notify_all()

    def _host(self, job: Store) -> None:
        """Open the store, tell where it is, watch, and close it when the others know how it ended."""
        token = uuid.uuid4().hex
        store = TCPStore(
            "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self.limits.bound)
        )
        store.set("token", token)
        for rank in range(self.world):
            store.set(f"beat/{rank}", beat(0, 0, 0, False, False))
        record = {"token": token, "machine": machine(), "hosts": addresses(job), "port": store.port}
        job.set(RECORD, json.dumps(record))
        try:
            self._watch(store)
        finally:
            job.set(RECORD, json.dumps({**record, "port": 0}))

    def _visit(self, job: Store) -> None:
        """Find rank 0's store, and watch."""
        deadline = time.monotonic() + self.limits.bound
        while time.monotonic() < deadline:
            record = json.loads(job.get(RECORD)) if job.check([RECORD]) else {}
            if not record.get("port") and self._heard.refused:
                self._heard.refused, deadline = "", time.monotonic() + self.limits.bound  # that load has ended
            if record.get("port") and record["token"] not in _joined_last:
                store = connect(record, min(PROBE, self.limits.silence / 4), self.limits.bound)
                if store is not None:
                    _joined_last[:] = [record["token"]]
                    self._watch(store)
                    return
                if not self._heard.refused:
                    deadline = min(deadline, time.monotonic() + self.limits.silence / 2)
                self._heard.refused = f"no connection to {', '.join(record['hosts'])}, port {record['port']}"
            time.sleep(PAUSES[1] / 2)
        if self._heard.refused:
            raise ConnectionError(self._heard.refused)
        with self._condition:
            self._heard.lost = self._no_host()

    def _watch(self, store: TCPStore) -> None:
        beats, sent, pause = 0, _Said(-1), PAUSES[0]
        keys = [f"beat/{rank}" for rank in range(self.world)]
        seats = [Seat(time.monotonic()) for _ in keys]
        first_failure = leaving_until = float("inf")
        now = time.monotonic()
        while True:
            with self._condition:
                said = self._said
            beats += 1
            self._send(store, said, sent, beats)
            looked, now = now, time.monotonic()
            if now - looked > self.limits.silence / 2:  # this very process was stopped, and the others perhaps with it
                for seat in seats:
                    seat.since = seat.progressed_at = now
            for seat, raw in zip(seats, store.multi_get(keys), strict=True):
                seat.update(raw, now)
            if any(seat.failed for seat in seats):
                first_failure = min(first_failure, now)
            known = len(self._heard.decisions)
            news = self._hear(store, seats, said, now, now - first_failure > self.limits.grace)
            if said.leaving:
                leaving_until = min(leaving_until, now + self.limits.linger)
            others = [seat for rank, seat in enumerate(seats) if rank != self.rank]
            told = self.rank != 0 or all(seat.left or seat.lost(now, self.limits) for seat in others)
            if said.leaving and (told or now > leaving_until):
                return
            with self._condition:
                self._heard.decisions.extend(news)
                self._heard.at, self._heard.joined = time.monotonic(), True
                self._condition.notify_all()
                undecided = any(seat.failed for seat in seats) and self._heard.failure() is None
                if self.rank != 0 and seats[0].left and not undecided:
                    break
                waiting = said.leaving or said.failure is not None or len(said.words) > known + len(news)
                pause = min(2 * pause, PAUSES[1]) if waiting and said.revision == sent.revision else PAUSES[0]
                if self._said.revision == said.revision:
                    self._condition.wait(min(pause, self.limits.interval) if waiting else self.limits.interval)
            sent = said
        with contextlib.suppress(*STORE_ERRORS):  # the host waits for this, but not for ever
            store.set(keys[self.rank], beat(beats + 1, said.progress, len(said.words), False, True))

    def _send(self, store: TCPStore, said: _Said, sent: _Said, beats: int) -> None:
        """Write what is new, and the heartbeat last: it tells that the rest can be read."""
        for index in range(len(sent.words), len(said.words)):
            store.set(f"word/{index}/{self.rank}", said.words[index].encode())
        if said.failure is not None and sent.failure is None:
            store.set(f"failed/{self.rank}", said.failure)
        failed = said.failure is not None
        store.set(f"beat/{self.rank}", beat(beats, said.progress, len(said.words), failed, said.leaving))

    def _hear(
        self, store: TCPStore, seats: Sequence[Seat], said: _Said, now: float, all_failed: bool
    ) -> list[Decision]:
        """Return the decisions that are new, and take the one that is due."""
        before = self._heard.decisions
        if before and before[-1].why is not None:
            return []
        news: list[Decision] = []
        while store.check([f"decision/{len(before) + len(news)}"]):
            news.append(Decision.decode(store.get(f"decision/{len(before) + len(news)}")))
        if news and news[-1].why is not None:
            return news
        index = len(before) + len(news)
        due = self._judge(store, seats, said, index, now, all_failed)
        if due is not None:
            news.append(Decision.decode(store.compare_set(f"decision/{index}", "", due.encode())))
        return news

    def _judge(
        self, store: TCPStore, seats: Sequence[Seat], said: _Said, index: int, now: float, all_failed: bool
    ) -> Decision | None:
        failed = [rank for rank, seat in enumerate(seats) if seat.failed]
        if failed and (all_failed or all(seat.failed or seat.left or seat.arrived > index for seat in seats)):
            return judge_failures({rank: store.get(f"failed/{rank}").decode() for rank in failed})
        silence = None if failed else judge_silence(seats, now, self.limits)
        if failed or silence is not None or len(said.words) <= index:
            return silence
        if all(seat.arrived > index for seat in seats):
            return judge_words([Word.decode(store.get(f"word/{index}/{rank}")) for rank in range(self.world)])
        return judge_absence(seats, index, said.words[index].stage, now, self.limits)
