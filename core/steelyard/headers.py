"""The header of one safetensors file: read in one piece, and refused unless all of it fits the file.

Units:
    Offsets and sizes count bytes. `TensorEntry.start` and `TensorEntry.stop` count from the start of the file, not of
    its data.
Source:
    safetensors 0.8.0, its file format: a little-endian length of 8 bytes, a JSON object, then the tensors' bytes
    without holes. What it lets through and this module refuses: a name twice, fields beyond the three, entries
    written as lists, a null ``__metadata__``, more dims than `MAX_DIMS`, sizes past 2**63, blanks before the object.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from steelyard import dtypes
from steelyard.errors import BadHeader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_HEADER: Final = 100_000_000
"""Bytes of the longest header that is read; the limit of safetensors itself."""

MAX_DIMS: Final = 64
"""Dims of the widest tensor; what torch and numpy can make."""

FETCH_AGAIN: Final = "fetch the file again"

_LENGTH = 8  # bytes of the length before the header
_LIMIT = 1 << 63  # elements past this cannot be addressed, whatever the file's size
_METADATA = "__metadata__"
_POINTER = b"version https://git-lfs"
_FIELDS = ("dtype", "shape", "data_offsets")
_SHOWN = 200  # characters of a name that a message shows


def _strict_int(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no count")
    return int(text)


_DECODER = JSONDecoder()
_STRICT_DECODER = JSONDecoder(parse_int=_strict_int)
_PAIRS_DECODER = JSONDecoder(object_pairs_hook=tuple)  # loses no name that stands twice


class TensorEntry(NamedTuple):
    """Where a stored tensor lies.

    Attributes:
        name: Its name in the file.
        dtype: A key of `steelyard.dtypes.DTYPES`.
        shape: Shape as stored, in elements.
        file: Index of its file in the checkpoint.
        start: First byte, counted from the start of the file.
        stop: The byte after its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


class Stamp(NamedTuple):
    """What tells that a file is still the one whose header was read."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """Return the stamp of a file from its ``stat`` or ``fstat``."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Header:
    """A header that fits its file.

    Attributes:
        entries: Name to tensor, in the header's order.
        metadata: The file's own strings.
        sha256: Hash of the header's bytes, as hex.
        data_start: Offset of the first byte of data.
        stamp: The file as it was found; a reader compares it with its own handle's.
    """

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    sha256: str
    data_start: int
    stamp: Stamp

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.stamp.size


def shown(name: str) -> str:
    r"""Return a name from a file for a message: short, on one line, and without control characters.

    >>> shown("model.norm.weight"), shown("a\nb")
    ('model.norm.weight', "'a\\nb'")
    """
    text = name if name and name.isprintable() else repr(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(name)} characters)"


def explain(path: str | os.PathLike[str], error: OSError) -> str:
    """Return why a file could not be opened or read, with the target of a link that leads nowhere."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return f"link target missing: {os.path.realpath(path)}; {FETCH_AGAIN}"
    if error.errno == errno.ELOOP:
        return "its links lead in a circle"
    return error.strerror or str(error)


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file, or a link to one, and yield its descriptor and status; close it on every exit.

    Nothing else is ever opened: not a pipe, which could block, and not a device, which could act on it.

    Raises:
        OSError: the file is absent, not readable or not a regular file.
    """
    _require_regular(os.stat(path))
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(handle)
        _require_regular(status)  # it may have been replaced between the two calls
        yield handle, status
    finally:
        os.close(handle)


def read_bytes(handle: int, length: int, offset: int) -> bytes:
    """Return bytes of an open file; fewer than ``length`` only if the file ends before."""
    raw = os.pread(handle, length, offset)
    while len(raw) < length:
        more = os.pread(handle, length - len(raw), offset + len(raw))
        if not more:
            break
        raw += more
    return raw


def _require_regular(status: os.stat_result) -> None:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    kind = next((name for test, name in kinds if test(mode)), "something else")
    raise OSError(errno.EINVAL, f"is {kind}, not a regular file")


def read_header(path: str | os.PathLike[str], file: int = 0) -> Header:
    """Read and check the header of a safetensors file; the file is closed again on return.

    Args:
        path: The file.
        file: Index that the entries carry.

    Raises:
        BadHeader: the file cannot be read, is not a safetensors file, or its header contradicts itself or the file.
    """
    where = os.fspath(path)
    try:
        with open_regular(path) as (handle, status):
            raw = _read_raw(where, handle, status.st_size)
            stamp = Stamp.of(status)
            if Stamp.of(os.fstat(handle)) != stamp:
                _refuse(where, "changed while its header was read; wait until it is complete")
    except OSError as error:
        raise BadHeader(where, explain(path, error)) from error
    members = _decode(where, raw)
    metadata = _metadata(where, members)
    data_start = _LENGTH + len(raw)
    entries, end = _entries(where, members, file, data_start)
    # Quotes of the members' names and, a tensor, of three fields and a dtype; a lost double would have more.
    quotes = 2 * len(members) + 8 * len(entries) + 4 * len(metadata)
    if b"\\" in raw or raw.count(b'"') != quotes:
        _require_once(where, raw)
        _require_text(where, (*entries, *metadata, *metadata.values()))
    if end is None:
        end = _require_gapless(where, entries.values(), data_start)
    _require_end(where, end, stamp.size, data_start)
    return Header(entries, metadata, hashlib.sha256(raw).hexdigest(), data_start, stamp)


def _refuse(where: str, why: str) -> NoReturn:
    raise BadHeader(where, why)


def _read_raw(where: str, handle: int, size: int) -> bytes:
    """Return the header's bytes; reads no more than the file can hold."""
    if size == 0:
        _refuse(where, f"is empty; {FETCH_AGAIN}")
    prefix = os.pread(handle, len(_POINTER), 0)
    if prefix.startswith(_POINTER):
        _refuse(where, f"is a Git LFS pointer of {size} bytes, not the weights; fetch them with: git lfs pull")
    if len(prefix) < _LENGTH:
        _refuse(where, f"has {size} bytes, too few for a safetensors file; {FETCH_AGAIN}")
    length = int.from_bytes(prefix[:_LENGTH], "little")
    if length > MAX_HEADER:
        _refuse(
            where,
            f"claims a header of {length} bytes, past the limit of {MAX_HEADER}; "
            f"it is damaged, or no safetensors file: {FETCH_AGAIN}",
        )
    if length > size - _LENGTH:
        _refuse(where, f"claims a header of {length} bytes, but only {size - _LENGTH} follow; {FETCH_AGAIN}")
    raw = read_bytes(handle, length, _LENGTH)
    if len(raw) < length:
        _refuse(where, f"was cut to {_LENGTH + len(raw)} bytes while its header was read; {FETCH_AGAIN}")
    return raw


def _decode(where: str, raw: bytes) -> dict[str, Any]:
    """Return the header as JSON; of a name that stands twice, only the last."""
    if not raw.startswith(b"{"):
        _refuse(where, f"its header does not begin with '{{'; it is damaged, or no safetensors file: {FETCH_AGAIN}")
    try:
        # "-0" is an integer for Python and none for the format; asking for it costs time, so only where it occurs
        decoder = _STRICT_DECODER if b"-0" in raw else _DECODER
        members: dict[str, Any] = decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadHeader(where, f"its header is not UTF-8 at byte {error.start}; {FETCH_AGAIN}") from error
    except JSONDecodeError as error:
        raise BadHeader(where, f"its header is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise BadHeader(where, "its header is nested too deeply") from error
    except ValueError as error:  # -0, or an integer of thousands of digits
        raise BadHeader(where, "its header holds a number that is no count: -0, or thousands of digits") from error
    return members


def _require_once(where: str, raw: bytes) -> None:
    """Refuse names that stand twice: of members, of a tensor's fields, of metadata."""
    pairs = _PAIRS_DECODER.decode(raw.decode("utf-8"))
    for what, inner in (("its header", pairs), *((shown(name), value) for name, value in pairs)):
        counts = Counter(name for name, _ in inner)
        if len(counts) != len(inner):
            names = ", ".join(shown(name) for name, count in counts.items() if count > 1)
            _refuse(where, f"{what} gives twice: {names}")


def _require_text(where: str, texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadHeader(where, f"its header holds a text that is not Unicode: {shown(text)}") from error


def _metadata(where: str, members: Mapping[str, Any]) -> dict[str, str]:
    found = members.get(_METADATA, {})
    if type(found) is not dict or not all(type(text) is str for text in found.values()):
        _refuse(where, f"{_METADATA} must map strings to strings")
    metadata: dict[str, str] = found
    return metadata


def _entries(
    where: str, members: Mapping[str, Any], file: int, data_start: int
) -> tuple[dict[str, TensorEntry], int | None]:
    """Return the tensors, each checked alone, and the end of their data if they stand in its order without holes."""
    entries: dict[str, TensorEntry] = {}
    known: dict[tuple[str, tuple[int, ...]], int] = {}  # bytes of a dtype and shape, worked out once
    new = tuple.__new__
    expected = data_start
    in_order = True
    for name, value in members.items():
        if name == _METADATA:
            continue
        if type(value) is not dict or len(value) != 3:
            _bad_fields(where, name, value)
        try:
            dtype, dims, offsets = value["dtype"], value["shape"], value["data_offsets"]
        except KeyError:
            _bad_fields(where, name, value)
        if type(dtype) is not str:
            _bad_tensor(where, name, "its dtype must be a string")
        if type(dims) is not list:
            _bad_tensor(where, name, "its shape must be a list")
        for dim in dims:
            if type(dim) is not int or dim < 0:  # a bool is no number here
                _bad_tensor(where, name, "its shape must hold whole numbers from 0")
        if type(offsets) is not list or len(offsets) != 2:
            _bad_tensor(where, name, "its data_offsets must be a list of two")
        begin, end = offsets
        if type(begin) is not int or type(end) is not int or begin < 0 or end < 0:
            _bad_tensor(where, name, "its data_offsets must be whole numbers from 0")
        if end < begin:
            _bad_tensor(where, name, f"it ends at {_count(end)}, before its start {_count(begin)}")
        shape = tuple(dims)
        nbytes = known.get((dtype, shape))
        if nbytes is None:
            nbytes = known[dtype, shape] = _nbytes(where, name, dtype, shape)
        if end - begin != nbytes:
            _bad_tensor(
                where, name, f"{dtype} {list(shape)} takes {nbytes} bytes, its data_offsets give {_count(end - begin)}"
            )
        start, stop = data_start + begin, data_start + end
        if start != expected:
            in_order = False
        expected = stop
        # past TensorEntry's own __new__, which takes a tenth of this function's time and checks nothing
        entries[name] = new(TensorEntry, (name, dtype, shape, file, start, stop))
    return entries, expected if in_order else None


def _bad_tensor(where: str, name: str, why: str) -> NoReturn:
    _refuse(where, f"tensor {shown(name)}: {why}")


def _count(value: int) -> str:
    return str(value) if value < _LIMIT else "2**63 or more"


def _bad_fields(where: str, name: str, value: object) -> NoReturn:
    if type(value) is not dict:
        _bad_tensor(where, name, f"it must be an object of {', '.join(_FIELDS)}")
    names = ", ".join(map(shown, value)) or "nothing"
    _bad_tensor(where, name, f"it must have {', '.join(_FIELDS)}; it has {names}")


def _nbytes(where: str, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in dtypes.DTYPES:
        _bad_tensor(where, name, f"unknown dtype {shown(dtype)}; known: {', '.join(dtypes.DTYPES)}")
    if len(shape) > MAX_DIMS:
        _bad_tensor(where, name, f"it has {len(shape)} dims, past the limit of {MAX_DIMS}")
    elements = 1
    for dim in shape:
        elements *= dim or 1  # a zero elsewhere does not make a dim that cannot be addressed sound
        if elements >= _LIMIT // 64:
            _bad_tensor(where, name, "its shape holds more elements than can be addressed")
    try:
        return dtypes.nbytes(dtype, shape)
    except ValueError as error:
        raise BadHeader(where, f"tensor {shown(name)}: {error}") from error


def _require_gapless(where: str, entries: Iterable[TensorEntry], data_start: int) -> int:
    """Return the end of the data of tensors that do not stand in the order of their bytes."""
    expected, before = data_start, ""
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start < expected:
            _refuse(
                where,
                f"tensors {shown(before)} and {shown(entry.name)} overlap by {_count(expected - entry.start)} bytes",
            )
        if entry.start > expected:
            _refuse(
                where, f"{_count(entry.start - expected)} bytes before tensor {shown(entry.name)} belong to no tensor"
            )
        expected, before = entry.stop, entry.name
    return expected


def _require_end(where: str, end: int, size: int, data_start: int) -> None:
    if end > size:
        have, want = size - data_start, end - data_start
        _refuse(where, f"is cut short: its tensors take {want} bytes, and {have} are there; {FETCH_AGAIN}")
    if end < size:
        _refuse(where, f"{size - end} bytes at its end belong to no tensor; {FETCH_AGAIN}")
