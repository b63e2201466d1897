"""What a sound header says."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from steelyard.headers import MAX_DIMS, Stamp, TensorEntry, read_header, shown
from support.checkpoints import header_bytes, write_safetensors


def write(path, header, data=b""):
    path.write_bytes(header_bytes(header) + data)
    return path


def test_entries_give_name_dtype_shape_file_and_bytes_of_the_file(tmp_path):
    """R146: offsets count from the start of the file."""
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([7], dtype=np.int64)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "pt", "by": "hand"})
    header = read_header(path, 5)
    raw = path.read_bytes()
    start = int.from_bytes(raw[:8], "little") + 8
    assert header.entries == {
        "b": TensorEntry("b", "F32", (2, 3), 5, start, start + 24),
        "a": TensorEntry("a", "I64", (1,), 5, start + 24, start + 32),
    }
    assert list(header.entries) == ["b", "a"]
    assert isinstance(header.entries["a"], TensorEntry)
    assert header.entries["b"].nbytes == 24
    assert header.metadata == {"format": "pt", "by": "hand"}
    assert header.sha256 == hashlib.sha256(raw[8:start]).hexdigest()
    assert (header.data_start, header.file_size) == (start, len(raw))
    for name, array in tensors.items():
        entry = header.entries[name]
        assert raw[entry.start : entry.stop] == array.tobytes()


def test_scalars_and_empty_tensors_are_legal(tmp_path):
    """R146: [] and [0, 8], also between others."""
    header = {
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "none": {"dtype": "F32", "shape": [0, 8], "data_offsets": [4, 4]},
        "after": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "last": {"dtype": "BF16", "shape": [3, 0], "data_offsets": [6, 6]},
    }
    entries = read_header(write(tmp_path / "x.safetensors", header, bytes(6))).entries
    assert {name: (entry.shape, entry.nbytes) for name, entry in entries.items()} == {
        "scalar": ((), 4),
        "none": ((0, 8), 0),
        "after": ((2,), 2),
        "last": ((3, 0), 0),
    }


def test_the_header_may_list_tensors_in_any_order(tmp_path):
    """R146: order by name, bytes by another; an empty one on an edge is no overlap."""
    header = {
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "c": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]},
    }
    assert set(read_header(write(tmp_path / "x.safetensors", header, bytes(6))).entries) == {"a", "b", "c"}


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_shapes_count_elements_of_less_than_a_byte(code, tmp_path):
    bits = 4 if code == "F4" else 6
    header = {"a": {"dtype": code, "shape": [2, 8], "data_offsets": [0, 2 * bits]}}
    entry = read_header(write(tmp_path / "x.safetensors", header, bytes(2 * bits))).entries["a"]
    assert (entry.shape, entry.nbytes) == ((2, 8), 2 * bits)


@pytest.mark.parametrize(
    ("raw", "names"),
    [
        (b"{}", []),
        (b"{}      ", []),
        (b'{"__metadata__":{}}', []),
        (b'{"":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', [""]),
        (b'{"a\\"b\\u00e9\\ud83d\\ude00":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', ['a"b\u00e9\U0001f600']),
        ('{"\u00e9":{"data_offsets":[0,0],"shape":[0],"dtype":"U8"}}'.encode(), ["\u00e9"]),
        (b'{"x-0":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', ["x-0"]),
        (b'{"__metadata__":{"a":"quote \\" and \\\\"}}', []),
    ],
    ids=["nothing", "padding", "metadata", "no-name", "escapes", "unicode", "minus-zero-in-a-name", "quotes"],
)
def test_unusual_headers_that_are_sound(raw, names, tmp_path):
    assert list(read_header(write(tmp_path / "x.safetensors", raw)).entries) == names


def test_the_widest_tensor_is_legal(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1] * MAX_DIMS, "data_offsets": [0, 1]}}
    assert read_header(write(tmp_path / "x.safetensors", header, b"1")).entries["a"].shape == (1,) * MAX_DIMS


def test_the_stamp_tells_a_file_that_was_replaced(tmp_path):
    """A reader compares it with its own handle's."""
    path = write_safetensors(tmp_path / "x.safetensors", {"a": np.zeros(4, dtype=np.uint8)})
    stamp = read_header(path).stamp
    assert stamp == Stamp.of(os.stat(path))
    other = write_safetensors(tmp_path / "y.safetensors", {"a": np.ones(4, dtype=np.uint8)})
    os.utime(other, ns=(stamp.mtime_ns, stamp.mtime_ns))
    os.replace(other, path)
    assert Stamp.of(os.stat(path)) != stamp
    assert Stamp.of(os.stat(path))[:2] == stamp[:2]


def test_a_link_to_a_regular_file_is_read(tmp_path):
    """R145: the hub cache is made of links."""
    path = write_safetensors(tmp_path / "blob", {"a": np.zeros(4, dtype=np.uint8)})
    (tmp_path / "x.safetensors").symlink_to(path)
    assert read_header(tmp_path / "x.safetensors").entries["a"].nbytes == 4


def test_reading_needs_neither_torch_nor_numpy():
    code = "import sys, steelyard.headers; print(sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)))"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout == "[]\n"


def test_names_in_messages_are_short_and_on_one_line():
    assert shown("model.norm.weight") == "model.norm.weight"
    assert shown("") == "''"
    assert shown("a\x1b[31m\n") == "'a\\x1b[31m\\n'"
    assert shown("n" * 1000) == "n" * 200 + "... (1000 characters)"
