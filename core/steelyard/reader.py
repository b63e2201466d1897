"""Readers of safetensors: a rank's pieces out of mapped files, or by plain reads.

Both hand out the piece that a cut takes, as stored. A mapped file gives views, so only the pages touched are read; a
plain read asks for the extents that `placement.covering` plans.

A mapped file that another process truncates kills this one (SIGBUS); where files may change, choose ``"pread"``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import product
from math import prod
from types import TracebackType

import torch
from steelyard.checkpoint import Checkpoint
from steelyard.dtypes import DTYPES, nbytes
from steelyard.errors import ConfigError, LoadError
from steelyard.headers import Stamp
from steelyard.loadplan import SMALLEST_REQUEST
from steelyard.placement import Slice, covering
from steelyard.steps import Read
from steelyard.storage import TORCH_DTYPES, WORDS, cut_in_memory, in_memory, itemsize, take

WAYS = ("mmap", "pread")


class SafetensorsReader:
    """What both ways share: files opened once, checked to be those whose headers were planned, closed on exit."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.bytes_read = 0

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give back every handle."""
        raise NotImplementedError

    def read(self, read: Read) -> torch.Tensor:
        """Return the piece that a read's cut takes, as stored."""
        raise NotImplementedError

    def _open(self, file: int) -> int:
        """Return a descriptor of a shard; raise LoadError if it is no longer the file that was planned."""
        shard = self._checkpoint.files[file]
        try:
            descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LoadError(f"{shard.name}: cannot be opened any more: {error.strerror}") from error
        found = os.fstat(descriptor)
        planned = shard.header.stamp
        if Stamp.of(found) != planned:
            os.close(descriptor)
            raise LoadError(
                f"{shard.name}: the file changed after it was planned (size {planned.size} -> {found.st_size}); plan again"
            )
        return descriptor


class MmapReader(SafetensorsReader):
    """Hands out views of mapped files; a mapping goes away with its last view."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._maps: dict[int, mmap.mmap] = {}

    def close(self) -> None:
        """Forget the mappings; descriptors were closed when the files were mapped."""
        self._maps.clear()

    def read(self, read: Read) -> torch.Tensor:
        """Return a view of the piece, or a copy where it is several runs or not aligned."""
        size = itemsize(read.dtype)
        shape = in_memory(read.dtype, read.shape)
        self.bytes_read += nbytes(read.dtype, read.cut.taken)
        if not prod(shape):
            return torch.empty(read.cut.taken, dtype=TORCH_DTYPES[read.dtype])
        data = self._map(read.file)
        if read.start % size:
            flat = torch.frombuffer(data, dtype=torch.uint8, count=prod(shape) * size, offset=read.start)
            words = flat.clone().view(WORDS[size])
        else:
            words = torch.frombuffer(data, dtype=WORDS[size], count=prod(shape), offset=read.start)
        piece = words.view(shape)
        for dim, one in enumerate(cut_in_memory(read.dtype, read.cut)):
            piece = take(piece, dim, one)
        return piece.view(TORCH_DTYPES[read.dtype])

    def _map(self, file: int) -> mmap.mmap:
        known = self._maps.get(file)
        if known is None:
            descriptor = self._open(file)
            try:
                # A private writable mapping: torch refuses to promise that it will not write to a read-only one.
                known = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
            self._maps[file] = known
        return known


class PreadReader(SafetensorsReader):
    """Copies the planned extents of a file into memory of its own."""

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
        size = itemsize(read.dtype)
        shape = in_memory(read.dtype, read.shape)
        slices = cut_in_memory(read.dtype, read.cut)
        if not prod(read.cut.taken):
            return torch.empty(in_memory(read.dtype, read.cut.taken), dtype=TORCH_DTYPES[read.dtype])
        level, requests, _ = covering(
            read.shape, read.cut, bits=DTYPES[read.dtype].bits, smallest=SMALLEST_REQUEST
        )  # fmt: skip
        if not shape:
            return self._extents(read, [0], size, size).view(WORDS[size]).view(()).view(TORCH_DTYPES[read.dtype])
        outer, at = slices[:level], slices[level]
        in_runs = at.count > 1 and requests == prod(one.size for one in outer) * at.count
        starts, run = _offsets(shape, outer, at, in_runs=in_runs)
        data = self._extents(read, [start * size for start in starts], run * size, size).view(WORDS[size])
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
        descriptor = self._descriptor(read.file)
        for index, start in enumerate(starts):
            self._fill(descriptor, memory[index * length : (index + 1) * length], read.start + start, read)
        self.bytes_read += len(starts) * length
        return data

    def _fill(self, descriptor: int, memory: memoryview, offset: int, read: Read) -> None:
        while memory:
            got = os.preadv(descriptor, [memory], offset)
            if not got:
                name = self._checkpoint.files[read.file].name
                raise LoadError(f"{name}: ends at byte {offset}, inside tensor {read.name}; the file was cut after it was planned")
            memory, offset = memory[got:], offset + got

    def _descriptor(self, file: int) -> int:
        known = self._descriptors.get(file)
        if known is None:
            known = self._descriptors[file] = self._open(file)
        return known


def _offsets(
    shape: Sequence[int], outer: Sequence[Slice], at: Slice, *, in_runs: bool
) -> tuple[list[int], int]:
    """Return where each extent starts, in elements of the tensor, and how long all of them are."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = strides[len(outer)]
    first = [at.start + run * at.stride for run in range(at.count)] if in_runs else [at.start]
    run = (at.length if in_runs else at.stop - at.start) * inner
    starts = [
        sum(index * stride for index, stride in zip(indices, strides, strict=False)) + start * inner
        for indices in product(*(one.indices() for one in outer))
        for start in first
    ]
    return starts, run


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
