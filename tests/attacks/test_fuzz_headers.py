"""Headers at random: what steelyard accepts, the safetensors package accepts and reads alike; the rest is BadHeader."""

import json
import struct

import pytest
import safetensors
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from steelyard.dtypes import DTYPES, nbytes
from steelyard.errors import BadHeader
from steelyard.headers import read_header
from support.checkpoints import header_bytes

FUZZ = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
NAMES = st.one_of(
    st.sampled_from(["a", "b", "a.weight", "", "__metadata__", 'q"', "\\", "\u00e9"]), st.text(max_size=3)
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([-0.0, 1.0, 1 << 62, 1 << 63, 1 << 64, 1 << 80, "", "F32", "0"]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "dtype"]), st.integers(0, 3), max_size=2),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


def accepted(place, raw):
    """Read bytes as a file with both; return whether we take them, having compared what was read."""
    place.write_bytes(raw)
    try:
        header = read_header(place)
    except BadHeader as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert refusal.startswith(f"{place}: ")
        assert "\n" not in refusal
        return False
    theirs = dict(safetensors.deserialize(raw))
    assert {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()} == {
        name: (info["dtype"], tuple(info["shape"])) for name, info in theirs.items()
    }
    for name, entry in header.entries.items():
        assert raw[entry.start : entry.stop] == bytes(theirs[name]["data"])
    with safetensors.safe_open(place, "np") as opened:
        assert dict(header.metadata) == (opened.metadata() or {})
        assert set(opened.keys()) == set(header.entries)
    return True


@st.composite
def sound(draw):
    """A sound header as a dict, and its data."""
    header, offset = {}, 0
    for name in draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), max_size=4, unique=True)):
        code = draw(st.sampled_from(sorted(DTYPES)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        if DTYPES[code].bits % 8:
            shape = [*shape, 8]
        size = nbytes(code, tuple(shape))
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    items = draw(st.permutations(list(header.items())))
    if draw(st.booleans()):
        items.insert(
            draw(st.integers(0, len(items))), ("__metadata__", draw(st.dictionaries(NAMES, st.text(max_size=3))))
        )
    return dict(items), bytes(range(offset % 251)) + bytes(offset - offset % 251)


def dump(header, ascii_only):
    return json.dumps(header, ensure_ascii=ascii_only, separators=(",", ":")).encode("utf-8", "surrogatepass")


@FUZZ
@given(made=sound(), ascii_only=st.booleans(), padding=st.integers(0, 8))
def test_every_sound_file_is_read_as_the_package_reads_it(made, ascii_only, padding, place):
    """R146: nothing sound is refused, but texts that are not Unicode."""
    header, data = made
    raw = dump(header, ascii_only) + b" " * padding
    assert accepted(place, header_bytes(raw) + data)


@FUZZ
@given(made=sound(), values=st.data())
def test_a_file_with_one_thing_wrong_is_refused_or_harmless(made, values, place):
    """R146: a field, an offset, a dim, a key, the length or the data is changed."""
    header, data = made
    tensors = [name for name in header if name != "__metadata__"]
    what = values.draw(st.sampled_from(["field", "item", "drop", "add", "length", "data", "entry", "twice"]))
    if what in ("field", "item", "drop", "add", "entry") and tensors:
        name = values.draw(st.sampled_from(tensors))
        entry = header[name]
        key = values.draw(st.sampled_from(sorted(entry)))
        if what == "field":
            entry[key] = values.draw(ODD)
        elif what == "item" and key != "dtype" and entry[key]:
            entry[key][values.draw(st.integers(0, len(entry[key]) - 1))] = values.draw(ODD)
        elif what == "drop":
            del entry[key]
        elif what == "add":
            entry[values.draw(NAMES)] = values.draw(ODD)
        else:
            header[name] = values.draw(ODD)
    elif what == "data":
        data = data[: values.draw(st.integers(0, len(data)))] + bytes(values.draw(st.integers(0, 2)))
    raw = header_bytes(dump(header, True))
    if what == "twice" and header:
        raw = header_bytes(dump(header, True)[:-1] + b"," + dump(header, True)[1:])
        assert not accepted(place, raw + data)
    if what == "length":
        length = struct.unpack("<Q", raw[:8])[0] + values.draw(st.sampled_from([-2, -1, 1, 2, 255, 1 << 20, 1 << 40]))
        raw = struct.pack("<Q", max(length, 0)) + raw[8:]
    event(f"{what}: {'accepted' if accepted(place, raw + data) else 'refused'}")


@FUZZ
@given(made=sound(), changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_make_another_error(made, changes, place):
    """R146: anywhere in the file, its length included."""
    header, data = made
    raw = bytearray(header_bytes(dump(header, False)) + data)
    for offset, byte in changes:
        raw[offset % len(raw)] = byte
    event("accepted" if accepted(place, bytes(raw)) else "refused")


TOKENS = st.sampled_from(
    [b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b'"a"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"U8"', b"0",
     b"-0", b"1", b"1.0", b"1e0", b"NaN", b"true", b"null", b"\\ud800", b"\xff", b" ", b"\n", b"\0", b'"__metadata__"',
     b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', b'{"dtype":"U8","shape":[],"data_offsets":[0,1]}']
)  # fmt: skip


@FUZZ
@given(tokens=st.lists(TOKENS, max_size=12), data=st.binary(max_size=2), closed=st.booleans())
def test_tokens_at_random_never_make_another_error(tokens, data, closed, place):
    """R146: pieces of JSON in any order."""
    raw = b"{" + b"".join(tokens) + (b"}" if closed else b"")
    event("accepted" if accepted(place, header_bytes(raw) + data) else "refused")
