"""Worker functions for the tests of agreement; each runs on every rank, and one of them misbehaves."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping

from torch import distributed

from steelyard.agree import Agreement, Verdict
from steelyard.collectives import current_ranks
from steelyard.errors import DistributedLoadError
from steelyard.ranks import Ranks

SAME = Verdict(digest="abc", choices={"load_method": "scratch"})


def rank() -> int:
    return distributed.get_rank()


def load(bound: float, at: Mapping[str, Callable[[], object]] | None = None, seconds: float = 0.3) -> float:
    """Load as the loader does: settle the plan, read with a poll between reads, settle the end.

    Args:
        bound: The agreement's bound.
        at: What this rank does at a place: ``"start"``, ``"reading"``, ``"end"``.
        seconds: How long the reading takes.
    """
    started, at = time.monotonic(), at or {}
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        at.get("start", time.monotonic)()
        agreement.settle("plan", SAME)
        reads = max(1, round(seconds / 0.02))
        for read in range(reads):
            if read == min(10, reads - 1):
                at.get("reading", time.monotonic)()
            time.sleep(0.02)
            agreement.poll()
        at.get("end", time.monotonic)()
        agreement.settle("loaded", Verdict())
    return time.monotonic() - started


def good(bound: float) -> float:
    return load(bound)


def raises(who: int, where: str, bound: float) -> None:
    load(bound, {where: raise_disk} if rank() == who else None, seconds=0.3 if where == "end" else 10)


def raise_disk() -> None:
    raise OSError("disk")


def all_raise(bound: float) -> None:
    load(bound, {"start": raise_disk})


def raise_apart(bound: float) -> None:
    def own() -> None:
        raise OSError("disk") if rank() == 1 else KeyError(f"tensor of {rank()}")

    load(bound, {"start": own})


def says_no(who: int, bound: float) -> None:
    """Settle as a rank that may not take the fast path."""
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        mine = Verdict(ok=False, error="not allowed: free 14 GiB, share 15 GiB") if rank() == who else SAME
        agreement.settle("method", mine)


def dies(who: int, where: str, bound: float) -> tuple[str, str, float]:
    """Return the survivors' error and the seconds from the death to it; one rank kills itself."""
    mine = {where: lambda: os.kill(os.getpid(), signal.SIGKILL)} if rank() == who else None
    at = time.monotonic()
    try:
        load(bound, mine, seconds=30)
    except DistributedLoadError as error:
        return str(error), str(error.rank), time.monotonic() - at
    raise AssertionError("the load went on without a rank")


def stops(who: int, seconds: float, bound: float) -> tuple[str, float]:
    """Have one rank stopped by a signal for some seconds; return every rank's error, also its own."""

    at = time.monotonic()
    try:
        load(bound, {"reading": lambda: stop(seconds)} if rank() == who else None, seconds=30)
    except DistributedLoadError as error:
        return str(error), time.monotonic() - at
    raise AssertionError("the load went on without a rank")


def stop(seconds: float) -> None:
    waker = os.posix_spawn("/bin/sh", ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"], os.environ)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.waitpid(waker, 0)


def all_stop_reading(seconds: float, bound: float) -> float:
    """Have the whole job stopped and woken, as by Ctrl-Z or a suspended machine, while every rank reads."""
    return load(bound, {"reading": lambda: stop(seconds)})


def all_stop_waiting(seconds: float, bound: float) -> float:
    """Do the same while one rank reads and the others wait for it."""
    me = os.getpid()
    script = f"sleep 0.5; kill -STOP {me}; sleep {seconds}; kill -CONT {me}"
    waker = os.posix_spawn("/bin/sh", ["sh", "-c", script], os.environ)
    try:
        return load(bound, seconds=1.5 if rank() == 1 else 0.1)
    finally:
        os.waitpid(waker, 0)


def stuck(who: int, where: str, bound: float) -> None:
    """Have one rank sleep, alive and beating; it sees the error when it wakes."""
    load(bound, {where: lambda: time.sleep(bound + 1)} if rank() == who else None)


def slow(who: int, bound: float) -> float:
    """Have one rank read for longer than the bound, showing progress."""
    return load(bound, seconds=1.4 * bound if rank() == who else 0.1)


def interrupted(who: int, bound: float) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    load(bound, {"reading": interrupt} if rank() == who else None, seconds=10)


def says(verdicts: list[Verdict], bound: float) -> None:
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        agreement.settle("plan", verdicts[rank()])


def gathers(verdicts: list[Verdict], bound: float) -> tuple[Verdict, ...]:
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        return agreement.gather("method", verdicts[rank()])


def choose_method(importable_on: int, bound: float) -> tuple[str, float]:
    """Choose one load method for all ranks, as `auto` does: the fast one only if every rank can."""
    started = time.monotonic()
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        mine = "fastsafetensors" if rank() == importable_on else "scratch: fastsafetensors cannot be imported"
        told = agreement.gather("method", Verdict(choices={"load_method": mine}))
        fast = all(said.choices["load_method"] == "fastsafetensors" for said in told)
        method = "fastsafetensors" if fast else "scratch"
        agreement.settle("plan", Verdict(choices={"load_method": method}))
        agreement.settle("loaded", Verdict())
    return method, time.monotonic() - started


def other_stage(bound: float) -> None:
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        agreement.settle("plan" if rank() else "loaded", Verdict())


def leaves(who: int, bound: float) -> None:
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        agreement.settle("plan", Verdict())
        if rank() != who:
            agreement.settle("loaded", Verdict())


def never_opens(who: int, bound: float) -> None:
    if rank() != who:
        load(bound)


def fails_after_the_end(who: int, bound: float) -> None:
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        agreement.settle("loaded", Verdict())
        if rank() == who:
            raise OSError("disk")


def retries(bound: float) -> tuple[str, str, float]:
    """Load three times: one rank fails before it joins, then it fails within, then all are well."""
    texts = []
    try:
        if rank() != 1:
            load(bound)
    except DistributedLoadError as error:
        texts.append(str(error))
    distributed.barrier()
    if rank() == 0:
        time.sleep(0.6 * bound)  # the others find what the first load left
    try:
        load(bound, {"reading": raise_disk} if rank() == 1 else None)
    except DistributedLoadError as error:
        texts.append(str(error))
    return "; ".join(texts), "", load(bound)


def leftovers(loads: int, bound: float, fail: bool) -> tuple[int, int, list[str]]:
    """Return what several loads left behind: threads, descriptors, and the names of Python's threads.

    The first load is not counted: libraries open pipes once a process. A joined thread is gone from Python
    a moment before it is gone from the system, so the counts are awaited for a second. gloo closes a socket of
    its own late, so that there may be fewer than before.
    """
    attempt(bound, fail)
    time.sleep(0.3)
    before = threads(), descriptors()
    for _ in range(loads):
        attempt(bound, fail)
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    until = time.monotonic() + 1
    while (threads() > before[0] or descriptors() > before[1]) and time.monotonic() < until:
        time.sleep(0.02)
    return max(0, threads() - before[0]), max(0, descriptors() - before[1]), names


def attempt(bound: float, fail: bool) -> None:
    try:
        load(bound, {"reading": raise_disk} if fail and rank() == 1 else None, seconds=0.1)
    except DistributedLoadError:
        if not fail:
            raise


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wrong_ranks(bound: float) -> None:
    Agreement.open(Ranks(world=3, rank=rank(), tp=3, moe_tp=3), bound=bound)


def poll_cost(polls: int) -> float:
    """Return the seconds of one poll."""
    with Agreement.open(current_ranks(), bound=20) as agreement:
        started = time.perf_counter()
        for _ in range(polls):
            agreement.poll()
        cost = (time.perf_counter() - started) / polls
        agreement.settle("end", Verdict())
    return cost


def beside_a_stranger(bound: float) -> float:
    """Load while connections to the store's port come and go, and one of them talks nonsense."""
    with Agreement.open(current_ranks(), bound=bound) as agreement:
        if rank() == 1:
            port = int(agreement.gather("port", Verdict())[0].digest)
            with socket.create_connection(("localhost", port), 2) as line:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        else:
            agreement.gather("port", Verdict(digest=str(listening())))
        agreement.settle("loaded", Verdict())
    return 0.0


def listening() -> int:
    """Return the highest port at which this process listens."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that listed the folder
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    ports = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    ports.append(int(words[1].rpartition(":")[2], 16))
    return max(ports)
