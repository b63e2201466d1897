"""R146: files of weights that are damaged or hostile, each refused with one sentence that names the file."""

import os
import struct
import tracemalloc

import pytest

from steelyard.dtypes import DTYPES
from steelyard.errors import BadHeader, CheckpointError
from steelyard.headers import MAX_DIMS, read_header
from support.checkpoints import header_bytes

DAMAGED = "it is damaged, or no safetensors file: fetch the file again"
BIG = 1 << 70


def one(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file(header, data=b"1234"):
    return header_bytes(header) + data


def entry(text):
    return b'{"a":' + text + b"}"


FILES = {
    "empty": (b"", "is empty; fetch the file again"),
    "seven bytes": (b"1234567", "has 7 bytes, too few for a safetensors file; fetch the file again"),
    "length alone": (struct.pack("<Q", 2), "claims a header of 2 bytes, but only 0 follow; fetch the file again"),
    "lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "is a Git LFS pointer of 70 bytes, not the weights; fetch them with: git lfs pull",
    ),
    "header of 2**40": (
        struct.pack("<Q", 1 << 40) + b"{}",
        f"claims a header of 1099511627776 bytes, past the limit of 100000000; {DAMAGED}",
    ),
    "header past the end": (
        struct.pack("<Q", 1000) + b"{}",
        "claims a header of 1000 bytes, but only 2 follow; fetch the file again",
    ),
    "no header": (file(b"", b""), f"its header does not begin with '{{'; {DAMAGED}"),
    "blank first": (file(b" {}", b""), f"its header does not begin with '{{'; {DAMAGED}"),
    "list": (file(b"[]", b""), f"its header does not begin with '{{'; {DAMAGED}"),
    "utf-16": (file("{}".encode("utf-16"), b""), f"its header does not begin with '{{'; {DAMAGED}"),
    "not utf-8": (file(b'{"\xff":1}'), "its header is not UTF-8 at byte 2; fetch the file again"),
    "cut json": (file(b'{"a":'), "its header is not JSON: Expecting value at character 5"),
    "rest after json": (file(b"{}{}"), "its header is not JSON: Extra data at character 2"),
    "nested": (file(b'{"a":' + b"[" * 200_000), "its header is nested too deeply"),
    "long number": (
        file(entry(b"9" * 5000)),
        "its header holds a number that is no count: -0, or thousands of digits",
    ),
    "minus zero": (
        file(entry(b'{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}')),
        "its header holds a number that is no count: -0, or thousands of digits",
    ),
    "double name": (
        file(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
        ),
        "its header gives twice: a",
    ),
    "double name by escape": (
        file(
            b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
            b'"\\u0061":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
        ),
        "its header gives twice: a",
    ),
    "double field": (
        file(entry(b'{"dtype":"F32","dtype":"U8","shape":[4],"data_offsets":[0,4]}')),
        "a gives twice: dtype",
    ),
    "double metadata": (file(b'{"__metadata__":5,"__metadata__":{}}', b""), "its header gives twice: __metadata__"),
    "double in metadata": (file(b'{"__metadata__":{"k":"1","k":"2"}}', b""), "__metadata__ gives twice: k"),
    "half a pair": (
        file(b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
        "its header holds a text that is not Unicode: '\\ud800'",
    ),
    "half a pair in metadata": (
        file(b'{"__metadata__":{"k":"\\udfff"}}', b""),
        "its header holds a text that is not Unicode: '\\udfff'",
    ),
    "metadata list": (file({"__metadata__": []}, b""), "__metadata__ must map strings to strings"),
    "metadata null": (file({"__metadata__": None}, b""), "__metadata__ must map strings to strings"),
    "metadata number": (file({"__metadata__": {"k": 1}}, b""), "__metadata__ must map strings to strings"),
    "metadata like a tensor": (file({"__metadata__": one()}), "__metadata__ must map strings to strings"),
    "entry number": (file({"a": 5}), "tensor a: it must be an object of dtype, shape, data_offsets"),
    "entry list": (
        file({"a": ["U8", [4], [0, 4]]}),
        "tensor a: it must be an object of dtype, shape, data_offsets",
    ),
    "entry of pairs": (
        file({"a": [["dtype", "U8"], ["shape", [4]], ["data_offsets", [0, 4]]]}),
        "tensor a: it must be an object of dtype, shape, data_offsets",
    ),
    "no fields": (file({"a": {}}), "tensor a: it must have dtype, shape, data_offsets; it has nothing"),
    "field short": (
        file({"a": {"dtype": "U8", "shape": [4]}}),
        "tensor a: it must have dtype, shape, data_offsets; it has dtype, shape",
    ),
    "field other": (
        file({"a": {"dtype": "U8", "shape": [4], "offsets": [0, 4]}}),
        "tensor a: it must have dtype, shape, data_offsets; it has dtype, shape, offsets",
    ),
    "field more": (
        file({"a": {**one(), "strides": [1]}}),
        "tensor a: it must have dtype, shape, data_offsets; it has dtype, shape, data_offsets, strides",
    ),
    "dtype number": (file({"a": one(dtype=8)}), "tensor a: its dtype must be a string"),
    "dtype unknown": (file({"a": one(dtype="F128")}), f"tensor a: unknown dtype F128; known: {', '.join(DTYPES)}"),
    "dtype lower case": (file({"a": one(dtype="u8")}), f"tensor a: unknown dtype u8; known: {', '.join(DTYPES)}"),
    "shape number": (
        file({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}),
        "tensor a: its shape must be a list",
    ),
    "dim bool": (
        file({"b": one(shape=(1,), offsets=(0, 1)), "a": one(shape=(True,), offsets=(1, 2))}, b"12"),
        "tensor a: its shape must hold whole numbers from 0",
    ),
    "dim float": (file({"a": one(shape=(4.0,))}), "tensor a: its shape must hold whole numbers from 0"),
    "dim string": (file({"a": one(shape=("4",))}), "tensor a: its shape must hold whole numbers from 0"),
    "dim negative": (file({"a": one(shape=(-2, -2))}), "tensor a: its shape must hold whole numbers from 0"),
    "dim nan": (
        file(entry(b'{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}')),
        "tensor a: its shape must hold whole numbers from 0",
    ),
    "dim list": (file({"a": one(shape=([4],))}), "tensor a: its shape must hold whole numbers from 0"),
    "dims many": (
        file({"a": one(shape=(1,) * (MAX_DIMS + 1), offsets=(0, 1))}, b"1"),
        "tensor a: it has 65 dims, past the limit of 64",
    ),
    "dim huge": (file({"a": one(shape=(BIG,))}), "tensor a: its shape holds more elements than can be addressed"),
    "product wraps to 4": (
        file({"a": one(shape=(1 << 32, 1 << 32, 4))}),
        "tensor a: its shape holds more elements than can be addressed",
    ),
    "huge beside zero": (
        file({"a": one(shape=(0, BIG), offsets=(0, 0))}, b""),
        "tensor a: its shape holds more elements than can be addressed",
    ),
    "offsets number": (
        file({"a": {"dtype": "U8", "shape": [4], "data_offsets": 4}}),
        "tensor a: its data_offsets must be a list of two",
    ),
    "offsets three": (file({"a": one(offsets=(0, 4, 8))}), "tensor a: its data_offsets must be a list of two"),
    "offset bool": (
        file({"a": one(shape=(1,), offsets=(False, True))}, b"1"),
        "tensor a: its data_offsets must be whole numbers from 0",
    ),
    "offset float": (file({"a": one(offsets=(0, 4.0))}), "tensor a: its data_offsets must be whole numbers from 0"),
    "offset negative": (file({"a": one(offsets=(-4, 0))}), "tensor a: its data_offsets must be whole numbers from 0"),
    "end before begin": (file({"a": one(offsets=(4, 0))}), "tensor a: it ends at 0, before its start 4"),
    "wrong shape": (
        file({"a": one(shape=(5,))}),
        "tensor a: U8 [5] takes 5 bytes, its data_offsets give 4",
    ),
    "wrong dtype": (
        file({"a": one(dtype="F32", shape=(2, 2))}),
        "tensor a: F32 [2, 2] takes 16 bytes, its data_offsets give 4",
    ),
    "offsets huge": (
        file({"a": one(offsets=(0, BIG))}),
        "tensor a: U8 [4] takes 4 bytes, its data_offsets give 2**63 or more",
    ),
    "half a byte": (file({"a": one(dtype="F4", shape=(7,))}), "tensor a: F4 [7] takes 28 bits, not whole bytes"),
    "overlap": (
        file({"a": one(), "b": one(offsets=(2, 6))}, b"123456"),
        "tensors a and b overlap by 2 bytes",
    ),
    "one range twice": (file({"a": one(), "b": one()}), "tensors a and b overlap by 4 bytes"),
    "empty inside another": (
        file({"a": one(), "b": one(shape=(0,), offsets=(2, 2))}),
        "tensors a and b overlap by 2 bytes",
    ),
    "hole": (
        file({"a": one(), "b": one(offsets=(6, 10))}, b"1234567890"),
        "2 bytes before tensor b belong to no tensor",
    ),
    "hole at the start": (file({"a": one(offsets=(2, 6))}, b"123456"), "2 bytes before tensor a belong to no tensor"),
    "hole beyond everything": (
        file({"a": one(offsets=(BIG, BIG + 4))}),
        "2**63 or more bytes before tensor a belong to no tensor",
    ),
    "cut in the data": (
        file({"a": one()}, b"123"),
        "is cut short: its tensors take 4 bytes, and 3 are there; fetch the file again",
    ),
    "extra bytes": (file({"a": one()}, b"123456"), "2 bytes at its end belong to no tensor; fetch the file again"),
    "data without a tensor": (file({}, b"12"), "2 bytes at its end belong to no tensor; fetch the file again"),
    "name that writes on the terminal": (
        file({"\x1b[2J\na": 5}),
        "tensor '\\x1b[2J\\na': it must be an object of dtype, shape, data_offsets",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_damaged_file_is_refused_in_one_sentence(case, tmp_path):
    """R146: the whole message of each; no crash, no other exception."""
    raw, why = FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(BadHeader) as caught:
        read_header(path)
    assert str(caught.value) == f"{path}: {why}"
    assert isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, ValueError)


def test_a_header_past_the_limit_is_not_read_even_from_a_giant_file(tmp_path):
    """R146: a sparse file as long as it claims; the memory taken stays small."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{")
    os.truncate(path, 1 << 41)
    assert _peak(path) < 1 << 20


def test_memory_is_bounded_by_the_file_and_not_by_its_claim(tmp_path):
    """R146: within the limit, but past the file's end."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 99_000_000) + b"{}")
    assert _peak(path) < 1 << 20


def _peak(path):
    tracemalloc.start()
    try:
        with pytest.raises(BadHeader):
            read_header(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
