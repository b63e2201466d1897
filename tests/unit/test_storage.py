"""Stored dtypes in torch, and pieces of stored tensors: bytes move as they are, whatever the dtype says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.dtypes import DTYPES, nbytes
from steelyard.placement import Cut, Regrid, Slice
from steelyard.storage import (
    TORCH_DTYPES,
    WORDS,
    cut_in_memory,
    finish,
    in_memory,
    itemsize,
    region_of,
    take,
)
from support.stored import BITS, WHOLE_BYTES, runs


def test_every_stored_dtype_has_one_in_torch_of_its_width():
    """R153: one table of dtypes for every reader."""
    assert set(TORCH_DTYPES) == set(DTYPES) == set(BITS)
    for code, dtype in TORCH_DTYPES.items():
        assert torch.empty(0, dtype=dtype).element_size() == itemsize(code) == max(BITS[code] // 8, 1)
        assert WORDS[itemsize(code)].itemsize == itemsize(code)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_a_shape_in_memory_takes_the_bytes_that_it_takes_on_disk(code):
    for shape in ((), (8,), (3, 8), (0, 8), (3, 0), (2, 3, 16)):
        if code in WHOLE_BYTES and not shape:
            continue
        held = torch.empty(in_memory(code, shape), dtype=TORCH_DTYPES[code])
        assert held.nbytes == nbytes(code, shape)


@pytest.mark.parametrize(
    ("code", "slices", "held"),
    [
        ("F4", (Slice(1, 2), Slice(4, 8)), (Slice(1, 2), Slice(2, 4))),
        ("F4", (Slice(2, 2, 6, 3),), (Slice(1, 1, 3, 3),)),
        ("F6_E3M2", (Slice(8, 4),), (Slice(6, 3),)),
        ("BF16", (Slice(1, 2), Slice(3, 1)), (Slice(1, 2), Slice(3, 1))),
        ("F4", (), ()),
    ],
    ids=["half-bytes", "half-bytes-in-runs", "six-bits", "whole-bytes", "scalar"],
)
def test_a_cut_of_elements_narrower_than_a_byte_is_counted_in_bytes(code, slices, held):
    assert cut_in_memory(code, Cut(slices, (None,) * len(slices))) == held


@pytest.mark.parametrize("piece", [Slice(1, 2), Slice(2, 3), Slice(0, 2, 3, 2)], ids=["start", "length", "stride"])
def test_a_cut_inside_a_byte_is_refused(piece):
    with pytest.raises(ValueError, match="does not start and stop on whole bytes"):
        cut_in_memory("F4", Cut((piece,), (None,)))


@given(st.integers(0, 9).flatmap(lambda size: st.tuples(st.just(size), runs(size))))
def test_taking_runs_equals_picking_their_indices(drawn):
    size, piece = drawn
    rows = np.arange(size * 3).reshape(size, 3)
    assert take(torch.from_numpy(rows), 0, piece).tolist() == rows[piece.indices()].tolist()


def test_one_run_is_a_view_and_several_are_a_copy():
    t = torch.arange(12)
    assert take(t, 0, Slice(2, 5)).data_ptr() == t[2:].data_ptr()
    several = take(t, 0, Slice(0, 2, 4, 3))
    assert several.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()
    assert several.tolist() == [0, 1, 4, 5, 8, 9]


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), st.booleans(), st.booleans(), st.data()
)
def test_a_finer_grid_repeats_skips_and_keeps(rows, columns, by_row, by_column, on_rows, on_columns, data):
    """Design 3: a `Regrid` is data on the step; numpy's repeat and slicing say what it means."""
    stored = np.arange(rows * columns).reshape(rows, columns)
    expected, regrids = stored, []
    for dim, (on, repeat) in enumerate(((on_rows, by_row), (on_columns, by_column))):
        if not on:
            regrids.append(None)
            continue
        fine = stored.shape[dim] * repeat
        skip = data.draw(st.integers(0, fine - 1))
        keep = data.draw(st.integers(1, fine - skip))
        regrids.append(Regrid(repeat, skip, keep))
        expected = np.repeat(expected, repeat, axis=dim).take(range(skip, skip + keep), axis=dim)
    swapped = data.draw(st.booleans())
    cut = Cut((Slice(0, rows), Slice(0, columns)), tuple(regrids))
    made = finish(torch.from_numpy(stored), cut, (0, 1) if swapped else None)
    assert cut.shape == expected.shape
    assert made.tolist() == (expected.T if swapped else expected).tolist()


def test_a_scale_grid_is_refined_as_the_design_says():
    """Design 3: N=320, block 128, TP 2, rank 1: scale rows 1..2, repeat each 4 times, skip 1, keep 5."""
    scales = torch.tensor([10, 20, 30])
    cut = Cut((Slice(1, 2),), (Regrid(4, 1, 5),))
    rows_of_32 = [scales[(160 + 32 * row) // 128].item() for row in range(5)]
    assert finish(take(scales, 0, cut.slices[0]), cut, None).tolist() == rows_of_32 == [20, 20, 20, 30, 30]


def test_a_region_is_a_view_counted_in_stored_elements():
    buffer = torch.zeros(4, 8, dtype=torch.uint8)  # F4 (4, 16)
    region_of(buffer, ((1, 2), (4, 8)), "F4").fill_(7)
    assert buffer[1:3, 2:6].eq(7).all()
    assert buffer.sum() == 7 * 8
    scalar = torch.zeros(())
    region_of(scalar, (), "F32").fill_(3)
    assert scalar == 3
