"""The number formats and packings that the proof decodes with, against worked examples and torch."""

import numpy as np
import pytest
from geometry.bits import (
    AWQ_ORDER,
    E2M1,
    E4M3,
    bf16,
    e8m0,
    pack_awq,
    pack_nibbles,
    pack_tiles,
    pack_words,
    signed,
    unpack_awq,
    unpack_nibbles,
    unpack_tiles,
    unpack_words,
)


def test_every_fp8_byte_means_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch states what an e4m3fn byte means")
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert np.array_equal(E4M3, codes.view(torch.float8_e4m3fn).double().numpy(), equal_nan=True)


def test_every_bfloat16_pattern_of_a_sample_means_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch states what a bfloat16 pattern means")
    bits = np.arange(0, 0x7F80, 7, dtype=np.uint16)
    expected = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16).double().numpy()
    assert np.array_equal(bf16(bits), expected)


@pytest.mark.parametrize(
    ("codes", "bits", "words"),
    [
        pytest.param(range(8), 4, [0x76543210], id="4bit"),
        pytest.param([1, 2, 3, 4], 8, [0x04030201], id="8bit"),
        pytest.param([i % 4 for i in range(16)], 2, [0xE4E4E4E4], id="2bit"),
        pytest.param([i % 8 for i in range(32)], 3, [0x88FAC688, 0xC688FAC6, 0xFAC688FA], id="3bit-stream"),
        pytest.param([7] * 8, 4, [0x77777777], id="gptq-v1-symmetric-zero"),
    ],
)
def test_words_have_the_published_value(codes, bits, words):
    packed = pack_words(np.array([list(codes)]), bits, 1)
    assert packed.tolist() == [words]
    assert unpack_words(packed, bits, len(list(codes)), 1).tolist() == [list(codes)]


def test_awq_words_have_the_published_value():
    packed = pack_awq(np.arange(8)[None])
    assert packed.tolist() == [[0x75316420]]
    assert unpack_awq(packed).tolist() == [list(range(8))]
    assert [int(packed[0, 0]) >> 4 * i & 15 for i in range(8)] == list(AWQ_ORDER)


def test_nibbles_and_exponents_have_the_published_value():
    assert pack_nibbles(np.array([3, 15])).tolist() == [0xF3]
    assert E2M1[unpack_nibbles(np.array([0xF3]))].tolist() == [1.5, -6.0]
    assert pack_nibbles(np.array([-8, 7])).tolist() == [0x78]
    assert signed(unpack_nibbles(np.array([0x78])), 4).tolist() == [-8, 7]
    assert pack_nibbles(np.array([[1, -1], [2, -8]]), 0).tolist() == [[0x21, 0x8F]]
    assert e8m0(np.array([127, 130])).tolist() == [1.0, 8.0]


def test_tiles_have_the_published_value_and_are_read_back():
    ramp = np.tile(np.arange(128) % 16, (8, 1))
    words = pack_tiles(ramp)
    assert words[0, 0, 0].tolist() == [0x91918080] * 4
    assert words[0, 0, 1].tolist() == [0xB3B3A2A2] * 4
    codes = np.random.default_rng(1).integers(0, 16, (16, 256))
    assert np.array_equal(unpack_tiles(pack_tiles(codes)), codes)
