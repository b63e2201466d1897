"""Stored tensors as bits: pieces worked out by numpy alone, and files that hold random bytes of every dtype."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from steelyard.placement import Cut, Slice
from steelyard.steps import Read
from support.checkpoints import write_config, write_safetensors

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8, "F8_E8M0": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
WHOLE_BYTES = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}  # elements that fill whole bytes


def random_bytes(code, shape, rng):
    """Return the bytes of a stored tensor; of bools, only 0 and 1."""
    raw = rng.integers(0, 256, prod(shape) * BITS[code] // 8, dtype=np.uint8)
    return (raw & 1 if code == "BOOL" else raw).tobytes()


def piece_of(code, shape, raw, slices):
    """Return the bytes of a piece, taken bit by bit."""
    bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").reshape(*shape, BITS[code])
    for dim, one in enumerate(slices):
        bits = np.take(bits, one.indices(), axis=dim)
    return np.packbits(bits.reshape(-1), bitorder="little").tobytes()


def bytes_of(tensor):
    """Return a tensor's bytes in order."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    return (flat if flat.dtype == torch.bool else flat.view(torch.uint8)).numpy().tobytes()


def write_checkpoint(folder, tensors, padding=0):
    """Write name to (code, shape, bytes) as a checkpoint; data starts ``padding`` bytes past a multiple of 8."""
    write_config(folder, {"architectures": ["Toy"], "model_type": "toy", "torch_dtype": "float32"})
    for more in range(8):
        path = write_safetensors(folder / "model.safetensors", tensors, {"pad": "x" * more})
        if int.from_bytes(path.read_bytes()[:8], "little") % 8 == padding:
            break
    return folder


def read_of(checkpoint, name, slices, **further):
    """Return a Read of a piece of a stored tensor."""
    entry = checkpoint.entries[name]
    cut = Cut(tuple(slices), further.pop("regrids", (None,) * len(slices)))
    swap = further.pop("swap", None)
    region = tuple((0, size) for size in cut.shape)
    return Read(
        name, entry.file, entry.start, entry.dtype, entry.shape, cut, swap, None, "node", 0, "weight", region, ""
    )


def whole_slices(shape):
    """Return the slices of a whole tensor."""
    return tuple(Slice(0, size) for size in shape)


@st.composite
def pieces(draw, most=7, dims=4):
    """Draw (code, shape, slices): any dtype, scalars, empty tensors and pieces, strided runs."""
    code = draw(st.sampled_from(sorted(BITS)))
    step = WHOLE_BYTES.get(code, 1)
    count = draw(st.integers(1 if step > 1 else 0, dims))
    shape, slices = [], []
    for dim in range(count):
        unit = step if dim == count - 1 else 1
        size = draw(st.integers(0, most))
        shape.append(size * unit)
        slices.append(draw(runs(size, unit)))
    return code, tuple(shape), tuple(slices)


@st.composite
def runs(draw, size, unit=1):
    """Draw a slice of ``size`` units: nothing, one run, or several with gaps between them."""
    start = draw(st.integers(0, size))
    length = draw(st.integers(0, size - start))
    if not length or not draw(st.booleans()):
        return Slice(start * unit, length * unit)
    stride = draw(st.integers(length, size))
    count = draw(st.integers(1, 1 + (size - start - length) // stride))
    return Slice(start * unit, length * unit, stride * unit, count)
