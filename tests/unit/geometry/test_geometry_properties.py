"""Properties of the geometry's functions, each against a count of single elements."""

from itertools import product
from math import prod

import numpy as np
import pytest
from geometry.law import taken
from geometry.rules import positions
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from steelyard.blueprint import Part
from steelyard.errors import ConfigError, CutError
from steelyard.extents import covering
from steelyard.local import even, padded_rows
from steelyard.placement import (
    Axis,
    Cut,
    Fixed,
    Order,
    Regrid,
    Slice,
    Span,
    cut,
    describe_dims,
    fitting_sizes,
    grid_step,
    stored_shape,
    transpose,
    whole,
)
from steelyard.ranks import Ranks, distribute, head_range

STEPS = st.sampled_from([1, 2, 3, 4, 8])
checked = settings(deadline=None, derandomize=True)
thorough = settings(checked, max_examples=300)


@st.composite
def axes(draw, of="out"):
    return Axis(of, draw(STEPS), draw(st.integers(1, 3)), draw(st.booleans()))


@st.composite
def spans(draw, size):
    start = draw(st.integers(0, size - 1))
    return Span(start, draw(st.integers(start + 1, size)), size)


@st.composite
def orders(draw):
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    runs = tuple((name, draw(st.integers(1, 6))) for name in names)
    return Order(runs, draw(st.integers(1, 5)))


# --- Axis --------------------------------------------------------------------------------------------------------


@checked
@given(axes(), st.integers(0, 40))
def test_stored_is_the_least_number_of_indices_that_hold_the_elements(axis, size):
    if size % axis.elements and not axis.short_tail:
        with pytest.raises(ValueError, match="not a multiple"):
            axis.stored(size)
        return
    least = next(count for count in range(200) if count * axis.elements >= size * axis.indices)
    assert axis.stored(size) == least


@pytest.mark.parametrize(("elements", "indices"), [(0, 1), (1, 0), (-1, 1)], ids=str)
def test_an_axis_of_nothing_is_refused(elements, indices):
    with pytest.raises(ValueError, match="at least 1"):
        Axis("in", elements, indices)


# --- Order -------------------------------------------------------------------------------------------------------


@checked
@given(orders(), st.data())
def test_an_order_puts_every_row_where_it_lies(order, data):
    """P-12, P-13, R026: exactly the rows of the range, in order; a range that cuts runs is refused."""
    part, run = data.draw(st.sampled_from(order.runs))
    span = data.draw(spans(order.rows(part)))
    expected = positions(order, Part(part, order.rows(part)))[span.start : span.stop]
    crosses = order.repeat > 1 and span.start // run != (span.stop - 1) // run
    if crosses and (span.start % run or span.stop % run):
        with pytest.raises(CutError) as caught:
            order.physical(part, span)
        assert (caught.value.axis, caught.value.range, caught.value.step) == ("out", (span.start, span.stop), run)
        return
    assert order.physical(part, span).indices() == expected.tolist()


@checked
@given(orders())
def test_the_parts_of_an_order_fill_it_exactly_once(order):
    rows = [at for part, _ in order.runs for at in order.physical(part, whole(order.rows(part))).indices()]
    assert sorted(rows) == list(range(order.total))


def test_a_part_that_an_order_has_not_is_a_key_error():
    with pytest.raises(KeyError):
        Order((("gate", 1),)).physical("up", whole(1))
    with pytest.raises(ValueError, match="exactly once"):
        Order((("gate", 1), ("gate", 1)))
    with pytest.raises(ValueError, match="at least 1"):
        Order((("gate", 1),), 0)


# --- cut ---------------------------------------------------------------------------------------------------------


def periods(axis, span):
    """Return whether a range is made of whole periods, the short one at the end counted as whole."""
    return span.start % axis.elements == 0 and (
        span.stop % axis.elements == 0 or (axis.short_tail and span.stop == span.size)
    )


@checked
@given(axes("in"), st.integers(1, 40), st.data())
def test_a_cut_takes_the_indices_of_its_elements_and_no_other(axis, size, data):
    """P-16, P-21: an index is taken if one of its period's elements is wanted; a period is never shared."""
    assume(size % axis.elements == 0 or axis.short_tail)
    span = data.draw(spans(size))
    if not periods(axis, span):
        with pytest.raises(CutError) as caught:
            cut((axis,), {"in": span})
        assert (caught.value.axis, caught.value.range, caught.value.step) == (
            "in",
            (span.start, span.stop),
            axis.elements,
        )
        return
    expected = [
        at for at in range(axis.stored(size)) if span.start <= at // axis.indices * axis.elements < span.stop
    ]  # fmt: skip
    piece = cut((axis,), {"in": span})
    assert piece.slices[0].indices() == expected
    assert (piece.taken, piece.shape, piece.is_regridded) == ((len(expected),), (len(expected),), False)


@thorough
@given(orders(), axes(), st.data())
def test_a_cut_through_an_order_takes_the_indices_of_its_rows_and_no_other(order, axis, data):
    """R026, R028: packed rows of interleaved parts are cut only where both agree."""
    assume(order.total % axis.elements == 0 or axis.short_tail)
    part, _ = data.draw(st.sampled_from(order.runs))
    span = data.draw(spans(order.rows(part)))
    wanted = set(positions(order, Part(part, order.rows(part)))[span.start : span.stop].tolist())
    groups = [range(at, min(at + axis.elements, order.total)) for at in range(0, order.total, axis.elements)]
    whole_periods = all(wanted.issuperset(group) or wanted.isdisjoint(group) for group in groups)
    try:
        piece = cut((axis,), {"out": span}, order=order, part=part)
    except CutError:
        run = dict(order.runs)[part]
        assert not whole_periods or span.start % run or span.stop % run
        return
    assert whole_periods
    got = piece.slices[0].indices()
    assert got == [
        at for at in range(axis.stored(order.total)) if wanted.issuperset(groups[at // axis.indices])
    ]  # fmt: skip


@thorough
@given(st.sampled_from([4, 6, 8, 12]), st.integers(1, 60), st.data())
def test_a_finer_grid_gives_every_element_the_value_it_had(block, size, data):
    """P-16, R040, R044: repeat, skip and keep, against a table of one value an element."""
    span = data.draw(spans(size))
    fine = data.draw(st.sampled_from([step for step in range(1, block + 1) if block % step == 0]))
    axis = Axis("out", block, short_tail=True)
    labels = np.arange(axis.stored(size))
    fits = span.start % fine == 0 and (span.stop % fine == 0 or span.stop == size)
    if not fits:
        with pytest.raises(CutError):
            cut((axis,), {"out": span}, steps={"out": fine}, grid={"out": block})
        return
    piece = cut((axis,), {"out": span}, steps={"out": fine}, grid={"out": block})
    held = taken(labels, piece)
    elements = np.repeat(labels, block)[:size]
    assert np.repeat(held, fine)[: len(span)].tolist() == elements[span.start : span.stop].tolist()
    assert held.shape == piece.shape == (-(-len(span) // fine),)
    read = sorted(set(elements[span.start : span.stop].tolist()))
    assert piece.slices[0].indices() == read


def test_a_grid_that_does_not_divide_the_block_is_refused():
    with pytest.raises(CutError) as caught:
        cut((Axis("out", 128),), {"out": Span(0, 96, 384)}, steps={"out": 96}, grid={"out": 128})
    assert (caught.value.axis, caught.value.range, caught.value.step) == ("out", (0, 96), 96)


def test_steps_speak_of_grid_dims_alone():
    """P-21: the eight codes of a word are no scale grid, also where the scheme has one along the same axis."""
    dims, grid = (Axis("in", 64), Axis("out", 8)), {"in": 64, "out": 128}
    spans = {"in": Span(32, 96, 128), "out": Span(8, 16, 32)}
    piece = cut(dims, spans, steps={"in": 32, "out": 4}, grid=grid)
    assert piece == Cut((Slice(0, 2), Slice(1, 1)), (Regrid(2, 1, 2), None))
    with pytest.raises(CutError) as caught:
        cut(dims, {**spans, "out": Span(4, 8, 32)}, steps={"in": 32, "out": 4}, grid=grid)
    assert (caught.value.axis, caught.value.range, caught.value.step) == ("out", (4, 8), 8)


def test_a_fixed_dim_is_taken_whole():
    assert cut((Fixed(16),), {}) == Cut((Slice(0, 16),), (None,))


@checked
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 8), st.integers(1, 3)), min_size=1))
def test_a_grid_step_is_the_coarsest_divisor_with_an_edge_at_every_boundary(rows):
    """P-16, P-22: by trying every divisor."""
    size = 96
    pieces = [Slice(start, length, length + gap, count) for start, length, gap, count in rows]
    assume(all(piece.stop <= size for piece in pieces))
    bounds = {piece.start + run * piece.stride for piece in pieces for run in range(piece.count)}
    bounds |= {piece.start + run * piece.stride + piece.length for piece in pieces for run in range(piece.count)}
    expected = max(d for d in range(1, 25) if 24 % d == 0 and not any(bound % d for bound in bounds - {size}))
    assert grid_step(24, [(piece, size) for piece in pieces]) == expected


# --- covering ----------------------------------------------------------------------------------------------------


@st.composite
def pieces(draw, size):
    count = draw(st.integers(1, 3))
    length = draw(st.integers(1, max(1, size // count // 2)))
    if count == 1:
        start = draw(st.integers(0, size - 1))
        return Slice(start, draw(st.integers(1, size - start)))
    stride = length + draw(st.integers(1, 3))
    assume((count - 1) * stride + length <= size)
    return Slice(draw(st.integers(0, size - (count - 1) * stride - length)), length, stride, count)


def implied(shape, slices, level, requests):
    """Return the (start, length) in elements of every request that a level stands for."""
    at, outer = slices[level], slices[:level]
    inner = prod(shape[level + 1 :])
    by_run = at.count > 1 and requests == prod(one.size for one in outer) * at.count
    runs = [(at.start + run * at.stride, at.length) for run in range(at.count)]
    if not by_run:
        runs = [(at.start, at.stop - at.start)]
    found = []
    for index in product(*(one.indices() for one in outer)):
        base = 0
        for dim, one in enumerate(index):
            base += one * prod(shape[dim + 1 :])
        found += [(base + start * inner, length * inner) for start, length in runs]
    return found


@thorough
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([8, 16, 32]), st.integers(0, 80), st.data())
def test_the_requests_of_a_covering_hold_what_is_needed(shape, bits, smallest, data):
    """The bytes read contain every byte needed, and requests and bytes are those implied."""
    slices = tuple(data.draw(pieces(size)) for size in shape)
    level, requests, held = covering(shape, Cut(slices, (None,) * len(shape)), bits=bits, smallest=smallest)
    extents = implied(shape, slices, level, requests)
    assert (len(extents), sum(length for _, length in extents) * bits // 8) == (requests, held)
    mask = np.zeros(prod(shape), np.int64)
    for start, length in extents:
        assert start + length <= mask.size
        mask[start : start + length] += 1
    needed = np.zeros(shape, bool)
    needed[np.ix_(*(one.indices() for one in slices))] = True
    assert mask.max() == 1, "no byte is read twice"
    assert mask[needed.ravel()].all(), "every byte needed is read"
    for start, length in extents:
        assert needed.ravel()[start : start + length].any(), "no request is for nothing"
        assert requests == 1 or length * bits // 8 >= min(smallest, prod(shape) * bits // 8)
    if needed.all():
        assert (requests, held) == (1, prod(shape) * bits // 8)


def test_a_covering_of_a_scalar_and_of_nothing_costs_no_more_than_they_hold():
    assert covering((), Cut((), ()), bits=32, smallest=8192) == (0, 1, 4)
    assert covering((4, 4), Cut((Slice(4, 0), Slice(0, 4)), (None, None)), bits=8, smallest=1)[2] == 0


def test_long_runs_are_read_one_by_one_and_short_ones_together():
    shape, rows = (8, 16), Cut((Slice(0, 1, 2, 4), Slice(0, 16)), (None, None))
    assert covering(shape, rows, bits=8, smallest=16) == (0, 4, 64)
    assert covering(shape, rows, bits=8, smallest=17) == (0, 1, 112)
    columns = Cut((Slice(0, 8), Slice(4, 4)), (None, None))
    assert covering(shape, columns, bits=8, smallest=4) == (1, 8, 32)
    assert covering(shape, columns, bits=8, smallest=5) == (0, 1, 128)


def test_half_byte_elements_are_counted_in_bytes():
    piece = Cut((Slice(0, 2), Slice(16, 16)), (None, None))
    assert covering((4, 64), piece, bits=4, smallest=8) == (1, 2, 16)


# --- dims --------------------------------------------------------------------------------------------------------


def test_transposing_twice_changes_nothing_and_keeps_what_has_one_axis():
    """E-10, E-11."""
    block = (Axis("out", 128, short_tail=True), Fixed(1), Axis("in", 128))
    assert transpose(block) == (block[2], Fixed(1), block[0])
    assert transpose(transpose(block)) == block
    assert transpose((Axis("out"), Fixed(1))) == (Axis("out"), Fixed(1))
    with pytest.raises(ValueError, match="several dims"):
        transpose((Axis("out"), Axis("in", 32), Axis("in", 2)))


@checked
@given(axes("out"), axes("in"), st.integers(1, 40), st.integers(1, 40))
def test_the_shape_of_whole_spans_is_the_stored_shape(rows, cols, n, k):
    assume((n % rows.elements == 0 or rows.short_tail) and (k % cols.elements == 0 or cols.short_tail))
    dims = (rows, Fixed(3), cols)
    piece = cut(dims, {"out": whole(n), "in": whole(k)})
    assert piece.taken == stored_shape(dims, {"out": n, "in": k})


def test_a_formula_of_a_shape_reads_like_one():
    assert (
        describe_dims((Axis("expert"), Axis("out", 8), Axis("in", 32, 3), Fixed(16))) == "[expert, out/8, in*3/32, 16]"
    )
    assert describe_dims(()) == "[]"


@checked
@given(st.integers(1, 400), st.sampled_from([1, 8, 16, 32, 64]))
def test_sizes_that_fit_cut_on_edges(size, step):
    """R043."""
    for n in fitting_sizes(size, step):
        assert size % n == 0
        assert n == 1 or size // n % step == 0


# --- ranks -------------------------------------------------------------------------------------------------------


@checked
@given(st.integers(0, 300), st.integers(1, 64))
def test_things_go_out_exactly_once_and_the_first_ranks_take_more(count, parts):
    """R034."""
    ranges = [distribute(count, parts, index) for index in range(parts)]
    assert [thing for start, stop in ranges for thing in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("index", [-1, 4], ids=str)
def test_a_part_that_there_is_not_is_refused(index):
    """P-03, P-23."""
    with pytest.raises(ConfigError, match=r"outside 0\.\.3"):
        distribute(8, 4, index)


@checked
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from([1, 2, 4, 8, 16]))
def test_every_local_query_finds_its_key_value_head(pairs, group, tp):
    """P-08, P-10, P-11."""
    queries = pairs * group
    assume(queries % tp == 0 and (pairs % tp == 0 or tp % pairs == 0))
    for rank in range(tp):
        first_q, stop_q = head_range(queries, pairs, tp, rank, kv=False)
        first, stop = head_range(queries, pairs, tp, rank, kv=True)
        assert {q // group for q in range(first_q, stop_q)} == set(range(first, stop))


@checked
@given(st.integers(1, 100), st.sampled_from([1, 2, 3, 4, 8]))
def test_equal_shares_lie_side_by_side(size, parts):
    """P-01, P-02, P-03, P-04."""
    if size % parts:
        with pytest.raises(CutError) as caught:
            even("in", size, parts, 0)
        assert (caught.value.axis, caught.value.range, caught.value.step) == ("in", (0, size), 0)
        return
    spans_ = [even("in", size, parts, index) for index in range(parts)]
    assert [at for span in spans_ for at in range(span.start, span.stop)] == list(range(size))


@checked
@given(st.integers(1, 100), st.sampled_from([1, 2, 3, 4, 8]))
def test_a_padded_vocabulary_is_held_once_in_equal_pieces(vocabulary, tp):
    """P-04, R036."""
    pieces_ = [padded_rows(vocabulary, tp, rank, "auto") for rank in range(tp)]
    assert [at for span, _ in pieces_ for at in range(span.start, span.stop)] == list(range(vocabulary))
    assert {len(span) + padding for span, padding in pieces_} == {-(-vocabulary // tp)}


def test_a_vocabulary_that_does_not_divide_can_be_refused():
    """P-14: the text names the size to pad to."""
    with pytest.raises(CutError, match="pad it to 12"):
        padded_rows(10, 4, 0, "off")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        pytest.param({"world": 0}, "world=0", id="empty-world"),
        pytest.param({"world": 2, "rank": 2}, "rank=2 is outside", id="rank-outside"),
        pytest.param({"world": 3, "tp": 2}, "not a multiple of tp=2", id="tp-does-not-divide"),
        pytest.param(
            {"world": 4, "tp": 2, "ep": 3, "moe_tp": 2}, "ep=3 x moe_tp=2", id="experts-do-not-fill-the-world"
        ),
    ],
)
def test_ranks_that_do_not_multiply_are_refused(sizes, text):
    """P-23."""
    with pytest.raises(ConfigError, match=text):
        Ranks(**sizes)


@checked
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_every_rank_has_one_place_among_experts_and_inside_them(tp, ep, moe_tp):
    """World 4 as tp 2, ep 2 x moe_tp 2 is one of them."""
    world = ep * moe_tp
    assume(world % tp == 0)
    ranks = list(Ranks(world=world, tp=tp, ep=ep, moe_tp=moe_tp).all())
    if ep > 1:
        assert sorted((one.ep_rank, one.moe_tp_rank) for one in ranks) == list(product(range(ep), range(moe_tp)))
    assert [one.tp_rank for one in ranks] == [rank % tp for rank in range(world)]
