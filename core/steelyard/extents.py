"""How a cut is read: in as few requests as make sense.

Units:
    Bytes on disk, but for requests, which count.
"""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.placement import Cut


def covering(shape: Sequence[int], cut: Cut, *, bits: int, smallest: int) -> tuple[int, int, int]:
    """Return how to read a cut in as few requests as make sense.

    Runs shorter than ``smallest`` bytes cost more as requests than as bytes, so the cut of the innermost dims is
    then made after reading them whole.

    Args:
        shape: Header shape.
        cut: What the rank needs.
        bits: Bits per element.
        smallest: Bytes below which a run is not worth a request of its own.
    Returns:
        ``(level, requests, bytes)``: dims from ``level`` + 1 on are read whole, dim ``level`` from the first to the
        last index touched, dims before it exactly. Where dim ``level`` has several runs and each is worth a request,
        its runs are read one by one, and ``requests`` counts them. A 0-d tensor has level 0.
    Units:
        ``smallest`` and the returned bytes count bytes on disk.
    """
    if not shape:
        return 0, 1, -(-bits // 8)
    inner = 1  # elements of one index of the dim at hand
    best = (0, 1, 0)
    outer_runs = [1]
    for piece in cut.slices:
        outer_runs.append(outer_runs[-1] * piece.size)
    for level in range(len(shape) - 1, -1, -1):
        piece = cut.slices[level]
        exact_runs = outer_runs[level] * piece.count
        run = piece.length * inner
        whole_dim = piece.count == 1 and piece.size == shape[level]
        if level and whole_dim:
            inner *= shape[level]
            continue
        if piece.count > 1 and run * bits // 8 >= smallest:
            return level, exact_runs, exact_runs * run * bits // 8
        extent = (piece.stop - piece.start) * inner
        requests = outer_runs[level]
        best = (level, requests, requests * extent * bits // 8)
        if extent * bits // 8 >= smallest or requests == 1:
            return best
        inner *= shape[level]
    return best
