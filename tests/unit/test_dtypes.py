"""The dtype table against the safetensors package, which writes the files that the table describes."""

import json
import struct

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from steelyard.dtypes import CONFIG_DTYPES, DTYPES, FLOATS, nbytes
from steelyard.headers import read_header
from support.checkpoints import header_bytes

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F4": torch.float4_e2m1fn_x2,
}
UNKNOWN_TO_TORCH = {"F6_E2M3", "F6_E3M2"}


def test_every_code_is_compared():
    """One table for every reader; a new code needs its torch dtype here, or a reason."""
    assert set(TORCH) | UNKNOWN_TO_TORCH == set(DTYPES)


@pytest.mark.parametrize("code", TORCH)
def test_a_tensor_saved_by_the_package_has_our_code_and_size(code, tmp_path):
    """F4 is the one whose header counts two elements a stored byte."""
    stored = torch.zeros(6, 16, dtype=torch.uint8).view(TORCH[code])
    save_file({"a": stored}, tmp_path / "a.safetensors")
    entry = read_header(tmp_path / "a.safetensors").entries["a"]
    columns = stored.shape[1] * (2 if code == "F4" else 1)
    assert (entry.dtype, entry.shape) == (code, (6, columns))
    assert entry.nbytes == nbytes(code, entry.shape) == 96


@pytest.mark.parametrize("code", DTYPES)
def test_the_package_takes_our_size_and_no_other(code):
    """R146: also for the codes that torch does not know."""
    size = nbytes(code, (4, 8))

    def file(count):
        return header_bytes({"a": {"dtype": code, "shape": [4, 8], "data_offsets": [0, count]}}) + bytes(count)

    assert len(safetensors.deserialize(file(size))) == 1
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(file(size + 1))


def test_the_package_knows_no_code_that_we_lack():
    """The package lists its codes when it meets an unknown one."""
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(header_bytes({"a": {"dtype": "NOT", "shape": [], "data_offsets": [0, 0]}}))
    listed = str(caught.value).partition("expected one of ")[2].partition(" at line")[0]
    assert {code.strip("` ") for code in listed.split(",")} == set(DTYPES)


def test_elements_must_fill_whole_bytes():
    with pytest.raises(ValueError, match=r"^F4 \[3\] takes 12 bits, not whole bytes$"):
        nbytes("F4", (3,))


def test_floats_and_config_names_are_of_the_table():
    assert {DTYPES[code].family for code in FLOATS} == {"float"}
    assert set(CONFIG_DTYPES.values()) == set(FLOATS)
    for name, code in CONFIG_DTYPES.items():
        assert TORCH[code] is getattr(torch, name)


def test_our_bytes_are_what_the_package_reads(tmp_path):
    """A header written by hand in the tests is read by the package as we read it."""
    raw = header_bytes({"a": {"dtype": "I16", "shape": [2], "data_offsets": [0, 4]}}) + struct.pack("<2h", 1, -2)
    (tmp_path / "a.safetensors").write_bytes(raw)
    entry = read_header(tmp_path / "a.safetensors").entries["a"]
    assert raw[entry.start : entry.stop] == bytes(dict(safetensors.deserialize(raw))["a"]["data"])
    assert json.loads(raw[8 : entry.start])["a"]["data_offsets"] == [0, 4]
