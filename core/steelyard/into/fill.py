"""Carries out planned copies: piece by piece from the file into the module's own tensors, each element once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch

from steelyard.dtypes import FLOATS, nbytes
from steelyard.errors import LoadError
from steelyard.into.copies import Copy, Place, covered, describe
from steelyard.into.held import Held
from steelyard.placement import Pairs, Slice
from steelyard.protocols import Reader
from steelyard.steps import Read
from steelyard.storage import finish, narrowed, words


class Filler:
    """Fills a module once.

    Attributes:
        received: Stored tensor to the bytes of it that the module received.
        started: First names of the tensors of the module that were written to.
        largest: Bytes of the largest piece.

    Args:
        held: Every name of the module's state to its tensor.
        files: Names of the checkpoint's files.
    """

    def __init__(self, held: Mapping[str, Held], files: Sequence[str]) -> None:
        self._held, self._files = held, files
        self._written: dict[str, list[tuple[Slice, ...]]] = {}
        self.received: dict[str, int] = {}
        self.largest = 0

    @property
    def started(self) -> tuple[str, ...]:
        """First names of the tensors of the module that were written to, in the order in which that began."""
        return tuple(self._written)

    def run(self, copies: Iterable[Copy], reader: Reader) -> None:
        """Copy everything.

        Args:
            copies: The pieces.
            reader: Where they come from.
        Raises:
            LoadError: bytes cannot be read, or contradict the module; all of that at once.
        """
        problems: list[str] = []
        with torch.no_grad():
            # What is compared comes last: what it must equal is written by then.
            for copy in sorted(copies, key=_in_file_order):
                problem = self._one(copy, reader)
                if problem:
                    problems.append(problem)
        problems += self._incomplete()
        if problems:
            listed = "".join(f"\n  - {problem}" for problem in problems)
            raise LoadError(f"stored values contradict the module:{listed}")

    def _one(self, copy: Copy, reader: Reader) -> str:
        """Carry out one copy; say what is wrong with its values, "" if nothing is."""
        held, place = self._held[copy.place.name], copy.place
        target = window(held.tensor.detach(), place.slices)
        problem = ""
        if copy.read is None:
            source: torch.Tensor = torch.full((), copy.value, dtype=held.tensor.dtype, device=target.device)
            source = source.expand(target.shape)
        else:
            source, problem = self._piece(copy.read, held, reader)
            source = turned(source, place).reshape(target.shape)
        if copy.is_compared:
            if not torch.equal(words(target, held.code), words(source, held.code)):
                stored = f"{copy.read.name} ({self._file(copy.read)})" if copy.read is not None else f"{copy.value:g}"
                return (
                    f"{stored}: differs from what fills {held.names[0]}, and the module ties {' and '.join(held.names)}: "
                    "it ties what the file keeps apart; make the module without the tie"
                )
            return problem
        words(target, held.code).copy_(words(source, held.code))
        self._written.setdefault(held.names[0], []).append(place.slices)
        return problem

    def _piece(self, read: Read, held: Held, reader: Reader) -> tuple[torch.Tensor, str]:
        """Return a piece in logical form, on the tensor's device and of its dtype, and what is wrong with it."""
        piece = reader.read(read)
        size = nbytes(read.dtype, read.cut.taken)
        self.received[read.name] = self.received.get(read.name, 0) + size
        self.largest = max(self.largest, size)
        moved = words(piece, read.dtype).to(held.tensor.device).view(piece.dtype)
        problem = ""
        if read.dtype != held.code:
            if read.dtype not in FLOATS or held.code not in FLOATS:
                raise LoadError(f"{held.names[0]}: a piece stored as {read.dtype} cannot become {held.code}")
            moved, lost = narrowed(moved, held.code)
            if lost:
                problem = (
                    f"{read.name} ({self._file(read)}): {lost} of {moved.numel()} values are too large for {held.code}"
                )
        finished = finish(words(moved, held.code), read.cut, read.swap, read.pairs)
        return finished.view(held.tensor.dtype), problem

    def _file(self, read: Read) -> str:
        return self._files[read.file]

    def _incomplete(self) -> list[str]:
        """Return a line for each tensor of the module of which an element was written twice or never."""
        lines = []
        for held in dict.fromkeys(self._held.values()):
            count, twice = covered(self._written.get(held.names[0], []))
            wanted = held.tensor.numel()
            if count != wanted or twice is not None:
                also = f", {describe(twice)} more than once" if twice is not None else ""
                lines.append(f"{held.names[0]}: {count} of {wanted} elements were written{also}")
        return lines


def window(tensor: torch.Tensor, slices: Sequence[Slice]) -> torch.Tensor:
    """Return the view of a tensor that slices name; a dim of several runs becomes two, the runs and what is in one.

    >>> window(torch.arange(8), (Slice(1, 1, 2, 4),)).tolist()
    [[1], [3], [5], [7]]
    """
    for dim in reversed(range(len(slices))):
        one = slices[dim]
        tensor = tensor.narrow(dim, one.start, one.stop - one.start)
        if one.count > 1:
            tensor = tensor.unfold(dim, one.length, one.stride).movedim(-1, dim + 1)
    return tensor


def turned(piece: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a piece in logical form as its place has it: what `finish` does, the other way round.

    Shapes:
        the place's indices, two dims swapped if it swaps any, unit dims aside -> the place's indices

    >>> turned(torch.tensor([0, 1, 2, 3]), Place("q", (Slice(0, 4),), None, Pairs(0, 4))).tolist()
    [0, 2, 1, 3]
    """
    shape = [one.size for one in place.slices]
    if place.swap is not None:
        a, b = place.swap
        shape[a], shape[b] = shape[b], shape[a]
    if prod(shape) != piece.numel() or [n for n in shape if n != 1] != [n for n in piece.shape if n != 1]:
        raise LoadError(f"{place.name}: a piece of shape {list(piece.shape)} does not fit into {list(shape)}")
    piece = piece.reshape(shape)
    if place.pairs is not None:
        piece = paired(piece, place.pairs)
    return piece if place.swap is None else piece.transpose(*place.swap)


def paired(piece: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """Return the rows of every head with those side by side that rotate together."""
    shape, dim = piece.shape, pairs.dim
    heads = piece.reshape(*shape[:dim], -1, 2, pairs.head // 2, *shape[dim + 1 :])
    return heads.transpose(dim + 1, dim + 2).reshape(shape)


def _in_file_order(copy: Copy) -> tuple[bool, int, int, int]:
    read = copy.read
    return (
        (copy.is_compared, read.file, read.start, read.expert or 0)
        if read is not None
        else (copy.is_compared, -1, 0, 0)
    )
