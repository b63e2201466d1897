"""Both readers hand out the same pieces, bit for bit, and count what they ask of files."""

import gc
import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from steelyard import reader as module
from steelyard.checkpoint import Checkpoint
from steelyard.errors import ConfigError, LoadError
from steelyard.extents import covering
from steelyard.placement import Axis, Order, Regrid, Slice, Span, cut
from steelyard.reader import WAYS, open_reader
from steelyard.storage import TORCH_DTYPES, finish, in_memory
from support.checkpoints import toy_b, toy_b_tensors
from support.stored import BITS, bytes_of, piece_of, pieces, random_bytes, read_of, runs, whole_slices, write_checkpoint

PAGE = mmap.PAGESIZE
SEED = 20240607
both = pytest.mark.parametrize("way", WAYS)


def checkpoint_of(folder, tensors, padding=0):
    return Checkpoint.open(write_checkpoint(folder, tensors, padding))


def open_files():
    """Return the descriptors of this process that point to files of weights."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [path for path in found if path.endswith(".safetensors")]


def mapped_files():
    with open("/proc/self/maps") as maps:
        return [line for line in maps if ".safetensors" in line]


@pytest.fixture
def rng():
    return np.random.default_rng(SEED)


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    before = (open_files(), mapped_files())
    yield
    if (open_files(), mapped_files()) != before:
        gc.collect()
    assert (open_files(), mapped_files()) == before


# --- pieces ------------------------------------------------------------------------------------------------------


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(pieces(), min_size=1, max_size=3), st.integers(0, 7), st.sampled_from([1, 3, 8, 32, 8192]), st.randoms()
)
@example([("F64", (5, 7), (Slice(1, 3), Slice(0, 2, 3, 2)))], 1, 1, None)
@example([("F4", (0, 8), (Slice(0, 0), Slice(2, 4)))], 0, 8192, None)
@example([("C64", (), ())], 3, 8192, None)
def test_both_readers_give_the_bits_that_numpy_picks(tmp_path_factory, drawn, padding, smallest, random):
    """R153: every dtype of the format, scalars, empty tensors and pieces, unaligned data, runs of any length."""
    rng = np.random.default_rng(SEED if random is None else random.getrandbits(32))
    tensors = {
        f"t{place}": (code, shape, random_bytes(code, shape, rng)) for place, (code, shape, _) in enumerate(drawn)
    }
    checkpoint = checkpoint_of(tmp_path_factory.mktemp("c"), tensors, padding)
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch, open_reader(checkpoint, way) as reader:
            patch.setattr(module, "SMALLEST_REQUEST", smallest)
            for place, (code, shape, slices) in enumerate(drawn):
                before = reader.bytes_read
                read = read_of(checkpoint, f"t{place}", slices)
                got = reader.read(read)
                assert got.dtype == TORCH_DTYPES[code]
                assert tuple(got.shape) == in_memory(code, read.cut.taken)
                assert bytes_of(got) == piece_of(code, shape, tensors[f"t{place}"][2], slices)
                if way == "pread":
                    planned = covering(shape, read.cut, bits=BITS[code], smallest=smallest)[2]
                    assert reader.bytes_read - before == (planned if got.numel() else 0)


@both
@pytest.mark.parametrize("code", sorted(BITS))
@pytest.mark.parametrize("padding", [0, 1, 4], ids=["pad-0", "pad-1", "pad-4"])
def test_every_dtype_is_read_whole(tmp_path, rng, way, code, padding):
    """R153: the same table for every reader, also where a header leaves the data unaligned."""
    shape = (6, 8)
    raw = random_bytes(code, shape, rng)
    checkpoint = checkpoint_of(tmp_path, {"first": ("U8", (3,), b"abc"), "t": (code, shape, raw)}, padding)
    with open_reader(checkpoint, way) as reader:
        assert bytes_of(reader.read(read_of(checkpoint, "t", whole_slices(shape)))) == raw


@both
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_scalars_are_read_whole(tmp_path, way, shape):
    """P-19: a scale of one element passes whole, with whatever shape it is stored."""
    checkpoint = checkpoint_of(tmp_path, {"scale": ("F32", shape, np.float32(0.5).tobytes())})
    with open_reader(checkpoint, way) as reader:
        got = reader.read(read_of(checkpoint, "scale", whole_slices(shape)))
    assert tuple(got.shape) == shape
    assert got.item() == 0.5


@both
def test_an_interleaved_part_is_gathered(tmp_path, way):
    """R026: gate and up row by row in one tensor, and MLA's runs of heads."""
    stored = np.arange(48 * 5, dtype=np.float32).reshape(48, 5)
    checkpoint = checkpoint_of(tmp_path, {"t": stored})
    dims = (Axis("out"), Axis("in"))
    every_other = Order((("gate", 1), ("up", 1)), 24)
    heads = Order((("nope", 4), ("v", 8)), 4)
    cases = [
        (every_other, "up", Span(6, 12, 24), stored[1::2][6:12]),
        (heads, "v", Span(8, 24, 32), stored.reshape(4, 12, 5)[1:3, 4:].reshape(16, 5)),
        (heads, "nope", Span(0, 16, 16), stored.reshape(4, 12, 5)[:, :4].reshape(16, 5)),
    ]
    with open_reader(checkpoint, way) as reader:
        for order, part, rows, expected in cases:
            made = cut(dims, {"out": rows, "in": Span(1, 4, 5)}, order=order, part=part)
            got = reader.read(read_of(checkpoint, "t", made.slices))
            assert got.numpy().tolist() == expected[:, 1:4].tolist()


@both
def test_regrids_and_swaps_are_left_to_the_next_step(tmp_path, way):
    """A reader returns what is stored; `finish` refines and swaps it, alike for both."""
    stored = np.arange(12, dtype=np.float32).reshape(3, 4)
    checkpoint = checkpoint_of(tmp_path, {"t": stored})
    slices = (Slice(1, 2), Slice(0, 4))
    read = read_of(checkpoint, "t", slices, regrids=(Regrid(4, 1, 5), None), swap=(0, 1))
    with open_reader(checkpoint, way) as reader:
        got = reader.read(read)
    assert got.tolist() == stored[1:].tolist()
    assert finish(got, read.cut, read.swap).tolist() == np.repeat(stored[1:], 4, 0)[1:6].T.tolist()


@both
def test_a_piece_inside_a_byte_is_an_error_that_names_the_tensor(tmp_path, way):
    checkpoint = checkpoint_of(tmp_path, {"codes": ("F4", (2, 4), bytes(4))})
    with open_reader(checkpoint, way) as reader, pytest.raises(LoadError, match="^tensor codes: F4: a piece "):
        reader.read(read_of(checkpoint, "codes", (Slice(0, 2), Slice(1, 2))))


@both
def test_an_odd_last_dim_of_half_bytes_is_an_error_and_never_short(tmp_path, way):
    checkpoint = checkpoint_of(tmp_path, {"codes": ("F4", (2, 3), bytes(3))})
    with open_reader(checkpoint, way) as reader, pytest.raises(LoadError, match="^tensor codes: F4: a piece "):
        reader.read(read_of(checkpoint, "codes", (Slice(0, 2), Slice(0, 3))))


@both
def test_shards_are_told_apart(tmp_path, way):
    toy_b(tmp_path, shards=3)
    expected = toy_b_tensors()
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.files) == 3
    with open_reader(checkpoint, way) as reader:
        for name, (_, shape, raw) in expected.items():
            assert bytes_of(reader.read(read_of(checkpoint, name, whole_slices(shape)))) == raw


def test_an_unknown_way_lists_the_ways(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_reader(checkpoint_of(tmp_path, {"t": np.zeros(1)}), "direct")
    assert str(caught.value) == "reader='direct': there are mmap, pread"


# --- what is asked of files --------------------------------------------------------------------------------------


def columns_of(folder, rows, columns, slices):
    checkpoint = checkpoint_of(folder, {"t": np.zeros((rows, columns), np.float32)})
    return checkpoint, read_of(checkpoint, "t", slices)


@pytest.mark.parametrize(
    ("rows", "columns", "slices", "asked"),
    [
        (64, 4096, (Slice(0, 16), Slice(0, 4096)), 16 * 4096 * 4),
        (16, 8192, (Slice(0, 16), Slice(2048, 2048)), 16 * 2048 * 4),
        (64, 64, (Slice(0, 64), Slice(0, 16)), 64 * 64 * 4),
        (8, 16384, (Slice(0, 8), Slice(0, 2048, 4096, 4)), 8 * 4 * 2048 * 4),
        (4, 8, (Slice(2, 0), Slice(0, 8)), 0),
    ],
    ids=["rows", "columns-of-8-KiB", "narrow-columns", "runs-of-8-KiB", "nothing"],
)
def test_pread_asks_for_what_was_planned(tmp_path, rows, columns, slices, asked):
    """The plan's figure for a piece and the reader's count are the same number."""
    checkpoint, read = columns_of(tmp_path, rows, columns, slices)
    with open_reader(checkpoint, "pread") as reader:
        reader.read(read)
        assert reader.bytes_read == asked
        assert asked == covering(read.shape, read.cut, bits=32, smallest=8192)[2]


def touched(read, itemsize):
    """Return the numbers of the pages that hold a byte of the piece, worked out element by element."""
    places = np.arange(int(np.prod(read.shape))).reshape(read.shape)
    for dim, one in enumerate(read.cut.slices):
        places = np.take(places, one.indices(), axis=dim)
    first = read.start + places.reshape(-1) * itemsize
    return {int(page) for byte in range(itemsize) for page in (first + byte) // PAGE}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 7), st.sampled_from([(40, 1500), (3, 9000), (2, 5, 3000), (30000,), (7, 600)]))
def test_mmap_counts_the_pages_that_a_piece_lies_on(tmp_path_factory, data, padding, shape):
    """Pages are what a mapped file is read by: never fewer than those touched, never more than the tensor's own."""
    tensors = {"before": ("U8", (5000,), bytes(5000)), "t": ("U16", shape, bytes(2 * int(np.prod(shape))))}
    checkpoint = checkpoint_of(tmp_path_factory.mktemp("c"), tensors, padding)
    slices = tuple(data.draw(runs(size)) for size in shape)
    read = read_of(checkpoint, "t", slices)
    entry = checkpoint.entries["t"]
    with open_reader(checkpoint, "mmap") as reader:
        got = reader.read(read)
        counted = reader.bytes_read
    least = len(touched(read, 2)) * PAGE if got.numel() else 0
    own = (-(-entry.stop // PAGE) - entry.start // PAGE) * PAGE
    assert least <= counted <= own
    assert counted % PAGE == 0


def test_mmap_counts_rows_exactly(tmp_path):
    checkpoint, read = columns_of(tmp_path, 64, PAGE, (Slice(3, 2), Slice(0, PAGE)))
    with open_reader(checkpoint, "mmap") as reader:
        reader.read(read)
        assert reader.bytes_read == len(touched(read, 4)) * PAGE


def test_a_piece_that_fills_pages_counts_those_and_no_other(tmp_path):
    """Where a piece starts and stops on the edges of pages there is nothing to round."""
    tensors = {"filler": ("U8", (10_000,), bytes(10_000)), "t": ("U8", (4, PAGE), bytes(4 * PAGE))}
    start = checkpoint_of(tmp_path, tensors).entries["t"].start
    tensors["filler"] = ("U8", (10_000 + PAGE - start % PAGE,), bytes(10_000 + PAGE - start % PAGE))
    checkpoint = checkpoint_of(tmp_path, tensors)
    assert checkpoint.entries["t"].start % PAGE == 0
    with open_reader(checkpoint, "mmap") as reader:
        reader.read(read_of(checkpoint, "t", (Slice(1, 2), Slice(0, PAGE))))
        assert reader.bytes_read == 2 * PAGE


def test_mmap_does_not_read_a_whole_tensor_for_a_few_columns_that_fill_pages(tmp_path):
    """P-24, L-13: wide columns of a large tensor touch their own pages alone, also where data is not aligned."""
    rows, columns = 16, 8 * PAGE
    for padding in (0, 1):
        checkpoint = checkpoint_of(
            tmp_path / str(padding), {"t": ("U16", (rows, columns), bytes(2 * rows * columns))}, padding
        )
        read = read_of(checkpoint, "t", (Slice(0, rows), Slice(PAGE, PAGE)))
        with open_reader(checkpoint, "mmap") as reader:
            reader.read(read)
            assert reader.bytes_read == len(touched(read, 2)) * PAGE <= rows * 3 * PAGE


# --- lifetimes ---------------------------------------------------------------------------------------------------


@both
def test_pieces_are_right_after_the_reader_is_closed(tmp_path, way):
    """R131, R164: a consumer may list the whole stream and look at it later; one contract for every reader."""
    toy_b(tmp_path, shards=3)
    checkpoint = Checkpoint.open(tmp_path)
    expected = toy_b_tensors()
    with open_reader(checkpoint, way) as reader:
        kept = [
            (name, reader.read(read_of(checkpoint, name, whole_slices(entry.shape))))
            for name, entry in checkpoint.entries.items()
        ]
    del reader
    gc.collect()
    rubbish = [torch.full((1 << 16,), float("nan")) for _ in range(20)]
    assert len(kept) == len(expected)
    for name, tensor in kept:
        assert bytes_of(tensor) == expected[name][2]
    del rubbish


def test_pread_hands_out_memory_that_nobody_else_holds(tmp_path):
    checkpoint = checkpoint_of(tmp_path, {"t": np.arange(4, dtype=np.float32)})
    with open_reader(checkpoint, "pread") as reader:
        first, second = (reader.read(read_of(checkpoint, "t", (Slice(0, 4),))) for _ in range(2))
        first.zero_()
        assert second.tolist() == [0, 1, 2, 3]
        assert reader.read(read_of(checkpoint, "t", (Slice(0, 4),))).tolist() == [0, 1, 2, 3]


def test_writing_into_a_mapped_piece_never_reaches_the_file(tmp_path):
    checkpoint = checkpoint_of(tmp_path, {"t": np.arange(4, dtype=np.float32)})
    before = (tmp_path / "model.safetensors").read_bytes()
    with open_reader(checkpoint, "mmap") as reader:
        reader.read(read_of(checkpoint, "t", (Slice(0, 4),))).zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_mapping_lives_as_long_as_its_last_view(tmp_path):
    checkpoint = checkpoint_of(tmp_path, {"t": np.arange(4, dtype=np.float32)})
    with open_reader(checkpoint, "mmap") as reader:
        kept = reader.read(read_of(checkpoint, "t", (Slice(1, 2),)))
    assert len(mapped_files()) == 1
    assert kept.tolist() == [1, 2]
    del kept
    assert not mapped_files()
    assert not open_files()


@both
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_open(tmp_path, way, error):
    """L-24: handles and mappings are given back on every exit, with a piece still in somebody's hands."""
    checkpoint = checkpoint_of(tmp_path, {name: np.arange(4, dtype=np.float32) for name in "abc"})
    kept = []

    def interrupted():
        with open_reader(checkpoint, way) as reader:
            for name in "abc":
                kept[:] = [reader.read(read_of(checkpoint, name, (Slice(0, 4),)))]
                assert open_files()
            raise error

    with pytest.raises(error):
        interrupted()
    assert len(mapped_files()) == (way == "mmap")  # the view's own mapping
    assert kept[0].tolist() == [0, 1, 2, 3]
    kept.clear()
    assert not mapped_files()
    assert not open_files()


@both
def test_a_file_is_opened_once(tmp_path, way, monkeypatch):
    toy_b(tmp_path, shards=3)
    checkpoint = Checkpoint.open(tmp_path)
    opened = []
    real = os.open

    def counted(path, *flags):
        opened.append(str(path))
        return real(path, *flags)

    monkeypatch.setattr(os, "open", counted)
    with open_reader(checkpoint, way) as reader:
        for _ in range(2):
            for name, entry in checkpoint.entries.items():
                reader.read(read_of(checkpoint, name, whole_slices(entry.shape)))
    assert sorted(opened) == [str(file.path) for file in checkpoint.files]


@both
def test_nothing_is_opened_for_a_piece_without_elements(tmp_path, way):
    checkpoint = checkpoint_of(tmp_path, {"t": np.zeros((4, 8), np.float32)})
    (tmp_path / "model.safetensors").unlink()
    with open_reader(checkpoint, way) as reader:
        assert tuple(reader.read(read_of(checkpoint, "t", (Slice(2, 0), Slice(0, 8)))).shape) == (0, 8)
        assert reader.bytes_read == 0


def test_a_read_that_gets_less_than_asked_goes_on(tmp_path, monkeypatch):
    """A network file system may answer in pieces."""
    stored = np.arange(1000, dtype=np.float32)
    checkpoint = checkpoint_of(tmp_path, {"t": stored})
    real = os.preadv

    def short(descriptor, buffers, offset):
        return real(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    with open_reader(checkpoint, "pread") as reader:
        assert reader.read(read_of(checkpoint, "t", (Slice(0, 1000),))).tolist() == stored.tolist()


def test_an_input_error_names_file_and_tensor(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(tmp_path, {"t": np.zeros(4, np.float32)})

    def broken(descriptor, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with open_reader(checkpoint, "pread") as reader, pytest.raises(LoadError) as caught:
        reader.read(read_of(checkpoint, "t", (Slice(0, 4),)))
    start = checkpoint.entries["t"].start
    assert str(caught.value) == f"model.safetensors: cannot be read at byte {start}, tensor t: Input/output error"


def test_a_file_that_cannot_be_mapped_says_what_to_choose(tmp_path, monkeypatch):
    checkpoint = checkpoint_of(tmp_path, {"t": np.zeros(4, np.float32)})

    def refused(*given, **named):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(module.mmap, "mmap", refused)
    with open_reader(checkpoint, "mmap") as reader, pytest.raises(LoadError) as caught:
        reader.read(read_of(checkpoint, "t", (Slice(0, 4),)))
    assert str(caught.value) == ("model.safetensors: cannot be mapped: Cannot allocate memory; choose reader='pread'")
