"""A pool of real rank processes, started once a session and used by many tests.

A test names a worker function as ``"module:function"`` (modules in this folder, ``support.ranks_*``) or as
``"path/to/file.py:function"``. Each run has a process group of its own, made before the function is called
and destroyed after it. A worker that dies or hangs is reported, and replaced for the next run.

Results, exceptions and arguments travel pickled through a pipe between a test and its own children.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

TIMEOUT = 120.0  # seconds for one run
FORBIDDEN = ("transformers",)  # seconds and hundreds of MB a worker; the reference models run in the tests' process


@dataclass(frozen=True)
class Outcome:
    """How a run ended on one rank.

    Attributes:
        rank: The rank.
        value: What the function returned.
        kind: Type name of the exception that left the function; ``"Died"`` or ``"Timeout"`` if none could.
        text: Its text, ``str(error)``; the end of the worker's stderr if it died.
        trace: Its traceback.
        seconds: From the call of the function to its end.
        log: What the worker wrote to stderr in this run, libraries in C++ included.
    """

    rank: int
    value: Any = None
    kind: str = ""
    text: str = ""
    trace: str = ""
    seconds: float = 0.0
    log: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return not self.kind


class RankPool:
    """Rank processes that wait for work; up to as many as the largest world asked for."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._workers: list[_Worker] = []
        self._runs = 0

    def run(
        self, function: str, world: int = 2, args: Sequence[Any] = (), *, timeout: float = TIMEOUT
    ) -> list[Outcome]:
        """Call a function on every rank of a new process group (gloo) and return the outcomes by rank.

        Args:
            function: ``"module:function"`` or ``"path/to/file.py:function"``.
            world: Ranks.
            args: Its arguments, the same on every rank.
            timeout: Seconds until ranks that have not answered are killed.
        """
        self._runs += 1
        meeting = Path(self._folder.name) / f"meeting-{self._runs}"
        for worker in [worker for worker in self._workers if not worker.alive()]:
            worker.stop()
            self._workers.remove(worker)
        while len(self._workers) < world:
            self._workers.append(_Worker(Path(self._folder.name)))
        workers = self._workers[:world]
        for rank, worker in enumerate(workers):
            worker.send((function, world, rank, str(meeting), tuple(args), timeout))
        deadline = time.monotonic() + timeout
        return [worker.outcome(rank, deadline) for rank, worker in enumerate(workers)]

    def values(self, function: str, world: int = 2, args: Sequence[Any] = (), *, timeout: float = TIMEOUT) -> list[Any]:
        """Do as `run`, and return what the ranks returned.

        Raises:
            AssertionError: a rank raised, died or hung; its traceback is in the text.
        """
        outcomes = self.run(function, world, args, timeout=timeout)
        bad = [f"rank {item.rank}: {item.kind}: {item.text}\n{item.trace}" for item in outcomes if not item.ok]
        assert not bad, "\n".join(["", *bad])
        return [item.value for item in outcomes]

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(dir=folder)
        paths = [entry for entry in sys.path if entry and Path(entry).is_dir()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from support.pool import serve; serve({theirs.fileno()})"],
            stdin=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the tests' process's; it ends the workers itself
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[1]), *paths])),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
        )
        theirs.close()
        self._pipe = Connection(ours.detach())
        self._start = 0

    def alive(self) -> bool:
        return self._process.poll() is None and not self._pipe.closed

    def send(self, work: tuple[Any, ...]) -> None:
        self._start = os.fstat(self._log.fileno()).st_size
        try:
            self._pipe.send_bytes(pickle.dumps(work))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died while idle; `outcome` reports that

    def outcome(self, rank: int, deadline: float) -> Outcome:
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                value, kind, text, trace, seconds = pickle.loads(self._pipe.recv_bytes())
                return Outcome(rank, value, kind, text, trace, seconds, self._written())
        except (EOFError, ConnectionResetError):
            code, log = self._process.wait(), self._written()
            self.stop()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return Outcome(rank, kind="Died", text=f"{how}\n{log[-4000:]}", log=log)
        log = self._written()
        self.stop()
        return Outcome(rank, kind="Timeout", text=f"no answer in time\n{log[-4000:]}", log=log)

    def stop(self) -> None:
        self._pipe.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def _written(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size - self._start, self._start).decode(errors="replace")


def serve(descriptor: int) -> None:
    """Run what the pool sends, until it hangs up. This is the whole life of a rank process."""
    import torch

    torch.set_num_threads(1)
    with Connection(descriptor) as pipe:
        while True:
            try:
                work = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            # Plain pickle on both sides: what multiprocessing pickles of a tensor is a handle of shared memory.
            pipe.send_bytes(_perform(*work))


def _perform(function: str, world: int, rank: int, meeting: str, args: tuple[Any, ...], timeout: float) -> bytes:
    from datetime import timedelta

    from torch import distributed

    started = time.monotonic()
    try:
        distributed.init_process_group(
            "gloo",
            init_method=Path(meeting).as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        started = time.monotonic()
        value = find(function)(*args)
        loaded = [name for name in FORBIDDEN if name in sys.modules]
        assert not loaded, f"{function} imports {', '.join(loaded)}"
        answer = pickle.dumps((value, "", "", "", time.monotonic() - started))
    # A function under test may raise anything, KeyboardInterrupt and SystemExit included; the test judges it.
    except BaseException as error:  # noqa: BLE001
        seconds = time.monotonic() - started
        trace = "".join(traceback.format_exception(error))
        answer = pickle.dumps((None, type(error).__name__, str(error), trace, seconds))
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return answer


def find(function: str) -> Callable[..., Any]:
    """Return the function that a text names."""
    where, _, name = function.rpartition(":")
    if not where.endswith(".py"):
        return _attribute(importlib.import_module(where), name)
    spec = importlib.util.spec_from_file_location(f"rank_functions_{abs(hash(where))}", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return _attribute(module, name)


def _attribute(module: object, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = vars(module)[name]
    return found
