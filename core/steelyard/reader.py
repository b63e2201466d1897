"""Readers of safetensors: a rank's pieces out of mapped files, or by plain reads.

Both hand out the piece that a cut takes, as stored. A mapped file gives views, so only the pages touched are read; a
plain read asks for the extents that `extents.covering` plans.

A mapped file that another process truncates kills this one (SIGBUS); where files may change, choose ``"pread"``.
"""

from __future__ import annotations

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from types import TracebackType

import torch

from steelyard.checkpoint import Checkpoint
from steelyard.dtypes import DTYPES
from steelyard.errors import ConfigError, LoadError
from steelyard.extents import covering
from steelyard.headers import Stamp, explain
from steelyard.loadplan import SMALLEST_REQUEST
from steelyard.placement import Slice
from steelyard.steps import Read
from steelyard.storage import TORCH_DTYPES, WORDS, cut_in_memory, in_memory, itemsize, take

WAYS = ("mmap", "pread")
PAGE = mmap.PAGESIZE


class SafetensorsReader(ABC):
    """What both ways share: files opened once, checked to be those whose headers were planned, closed on exit.

    They are looked at again when the reader is left without an error, so that a file that was written to meanwhile is
    an error too.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._opened: set[int] = set()
        self.bytes_read = 0

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if kind is None:
            self._require_unchanged()

    @abstractmethod
    def close(self) -> None:
        """Give back every handle."""

    @abstractmethod
    def read(self, read: Read) -> torch.Tensor:
        """Return the piece that a read's cut takes, as stored."""

    def _open(self, read: Read) -> int:
        """Return a descriptor of a read's shard; raise LoadError if it is no longer the file that was planned."""
        shard = self._checkpoint.files[read.file]
        try:
            # Never blocks, should a pipe stand there by now.
            descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            why = explain(shard.path, error)
            raise LoadError(f"{shard.name}: cannot be opened any more to read tensor {read.name}: {why}") from error
        found = Stamp.of(os.fstat(descriptor))
        if found != shard.header.stamp:
            os.close(descriptor)
            change = _change(shard.header.stamp, found)
            raise LoadError(f"{shard.name}: {change} after it was planned, found at tensor {read.name}; plan again")
        self._opened.add(read.file)
        return descriptor

    def _require_unchanged(self) -> None:
        """Raise LoadError if a file that was read has been written to since; one that was replaced was read whole."""
        for file in sorted(self._opened):
            shard = self._checkpoint.files[file]
            try:
                found = Stamp.of(os.stat(shard.path))
            except OSError:
                continue
            if found.inode == shard.header.stamp.inode and found != shard.header.stamp:
                change = _change(shard.header.stamp, found)
                raise LoadError(f"{shard.name}: {change} while it was read; plan again")


class MmapReader(SafetensorsReader):
    """Hands out views of mapped files; a mapping and its descriptor go away with the last view.

    ``bytes_read`` counts pages: those that a piece lies on.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._maps: dict[int, mmap.mmap] = {}

    def close(self) -> None:
        """Forget the mappings."""
        self._maps.clear()

    def read(self, read: Read) -> torch.Tensor:
        """Return a view of the piece, or a copy where it is several runs or not aligned."""
        size, shape, slices = itemsize(read.dtype), in_memory(read.dtype, read.shape), _slices(read)
        if not prod(read.cut.taken):
            return _nothing(read)
        data = self._map(read)
        _, starts, run = _extents(read, smallest=PAGE)
        self.bytes_read += _on_pages(starts + read.start, run)
        if read.start % size:
            flat = torch.frombuffer(data, dtype=torch.uint8, count=prod(shape) * size, offset=read.start)
            piece = flat.view(*shape, size)
        else:
            words = torch.frombuffer(data, dtype=WORDS[size], count=prod(shape), offset=read.start)
            piece = words.view(shape)
        for dim, one in enumerate(slices):
            piece = take(piece, dim, one)
        if read.start % size:
            aligned = piece.clone(memory_format=torch.contiguous_format)
            piece = aligned.view(-1).view(WORDS[size]).view(piece.shape[:-1])
        return piece.view(TORCH_DTYPES[read.dtype])

    def _map(self, read: Read) -> mmap.mmap:
        known = self._maps.get(read.file)
        if known is None:
            descriptor = self._open(read)
            try:
                # A private writable mapping: torch refuses to promise that it will not write to a read-only one.
                known = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                name = self._checkpoint.files[read.file].name
                raise LoadError(f"{name}: cannot be mapped: {error.strerror}; choose reader='pread'") from error
            finally:
                os.close(descriptor)
            self._maps[read.file] = known
        return known


class PreadReader(SafetensorsReader):
    """Copies the planned extents of a file into memory of its own; ``bytes_read`` counts them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._descriptors: dict[int, int] = {}

    def close(self) -> None:
        """Close every file."""
        while self._descriptors:
            _, descriptor = self._descriptors.popitem()
            os.close(descriptor)

    def read(self, read: Read) -> torch.Tensor:
        """Return the piece, in memory that nobody else holds."""
        size, shape, slices = itemsize(read.dtype), in_memory(read.dtype, read.shape), _slices(read)
        if not prod(read.cut.taken):
            return _nothing(read)
        level, starts, run = _extents(read, smallest=SMALLEST_REQUEST)
        data = self._extents(read, starts.tolist(), run, size).view(WORDS[size])
        if not shape:
            return data.view(()).view(TORCH_DTYPES[read.dtype])
        outer, at = slices[:level], slices[level]
        in_runs = len(starts) != prod(one.size for one in outer)
        rows = at.size if in_runs else at.stop - at.start
        piece = data.view(*(one.size for one in outer), rows, *shape[level + 1 :])
        if not in_runs:
            piece = take(piece, level, Slice(0, at.length, at.stride, at.count))
        for dim in range(level + 1, len(shape)):
            piece = take(piece, dim, slices[dim])
        return piece.view(TORCH_DTYPES[read.dtype])

    def _extents(self, read: Read, starts: Sequence[int], length: int, size: int) -> torch.Tensor:
        # Words, not bytes, so that the memory is aligned for them.
        data = torch.empty(len(starts) * length // size, dtype=WORDS[size]).view(torch.uint8)
        memory = memoryview(data.numpy().data)
        descriptor = self._descriptor(read)
        for index, start in enumerate(starts):
            self._fill(descriptor, memory[index * length : (index + 1) * length], read.start + start, read)
        self.bytes_read += len(starts) * length
        return data

    def _fill(self, descriptor: int, memory: memoryview, offset: int, read: Read) -> None:
        name = self._checkpoint.files[read.file].name
        while memory:
            try:
                got = os.preadv(descriptor, [memory], offset)
            except OSError as error:
                raise LoadError(
                    f"{name}: cannot be read at byte {offset}, tensor {read.name}: {error.strerror}"
                ) from error
            if not got:
                raise LoadError(
                    f"{name}: ends at byte {offset}, inside tensor {read.name}; the file was cut after it was planned"
                )
            memory, offset = memory[got:], offset + got

    def _descriptor(self, read: Read) -> int:
        known = self._descriptors.get(read.file)
        if known is None:
            known = self._descriptors[read.file] = self._open(read)
        return known


def _change(planned: Stamp, found: Stamp) -> str:
    """Say how a file differs from the one that was planned."""
    if found.inode != planned.inode:
        return "was replaced by another file"
    if found.size != planned.size:
        return f"changed (size {planned.size} -> {found.size})"
    return "was written to"


def _nothing(read: Read) -> torch.Tensor:
    """Return a piece without elements."""
    return torch.empty(in_memory(read.dtype, read.cut.taken), dtype=TORCH_DTYPES[read.dtype])


def _slices(read: Read) -> tuple[Slice, ...]:
    try:
        return cut_in_memory(read.dtype, read.cut)
    except ValueError as error:
        raise LoadError(f"tensor {read.name}: {error}") from error


def _extents(read: Read, *, smallest: int) -> tuple[int, torch.Tensor, int]:
    """Return what to read for a piece that is not empty: `covering`'s level, where each extent starts, and its length.

    Units:
        Starts and length count bytes from the start of the tensor; the starts ascend.
    """
    size, shape, slices = itemsize(read.dtype), in_memory(read.dtype, read.shape), _slices(read)
    level, requests, _ = covering(read.shape, read.cut, bits=DTYPES[read.dtype].bits, smallest=smallest)
    starts = torch.zeros(1, dtype=torch.int64)
    if not shape:
        return level, starts, size
    outer, at = slices[:level], slices[level]
    inner = prod(shape[level + 1 :]) * size
    for dim, one in enumerate(outer):
        stride = prod(shape[dim + 1 :]) * size
        starts = (starts[:, None] + torch.tensor(one.indices()) * stride).flatten()
    in_runs = at.count > 1 and requests == prod(one.size for one in outer) * at.count
    if in_runs:
        runs = torch.arange(at.count) * at.stride + at.start
        return level, (starts[:, None] + runs * inner).flatten(), at.length * inner
    return level, starts + at.start * inner, (at.stop - at.start) * inner


def _on_pages(starts: torch.Tensor, length: int) -> int:
    """Return the bytes of the pages that extents lie on, each page once.

    Shapes:
        starts (extents,), ascending, no two extents overlapping
    Units:
        Bytes, counted from the start of the file.
    """
    first, last = starts // PAGE, (starts + length - 1) // PAGE
    shared = int((first[1:] == last[:-1]).sum())
    return (int((last - first + 1).sum()) - shared) * PAGE


def open_reader(checkpoint: Checkpoint, way: str) -> SafetensorsReader:
    """Open a reader.

    Args:
        checkpoint: The checkpoint whose headers were planned.
        way: ``"mmap"`` or ``"pread"``.
    Raises:
        ConfigError: there is no such way.
    """
    if way == "mmap":
        return MmapReader(checkpoint)
    if way == "pread":
        return PreadReader(checkpoint)
    raise ConfigError(f"reader={way!r}: there are {', '.join(WAYS)}")
