"""Every format, both axes, 1 to 4 ranks, parts stored apart or together: cut then decode equals decode then cut.

Where a boundary cannot be met, the refusal is predicted from the published slice table by arithmetic, and its axis,
range and step are compared.
"""

import pytest
from geometry.formats import FORMATS
from geometry.law import broken, localized, world_of
from geometry.rules import Setup, grid_of_part, heads_fit, joins, refusals

from steelyard.blueprint import Part, Placement
from steelyard.errors import ConfigError, CutError
from steelyard.placement import Order
from steelyard.segments import can_join, steps_of

COLWISE, ROWWISE = Placement.COLWISE, Placement.ROWWISE
TP = (1, 2, 3, 4)


def one(n):
    return (Part("", n),)


def gate_up(n):
    return (Part("gate", n), Part("up", n))


def qkv(queries, pairs, size):
    return (
        Part("q", queries * size, heads=queries),
        Part("k", pairs * size, heads=pairs, kv=True),
        Part("v", pairs * size, heads=pairs, kv=True),
    )


def concatenated(parts):
    return Order(tuple((part.name, part.out) for part in parts))


def interleaved(parts, run):
    return Order(tuple((part.name, run) for part in parts), parts[0].out // run)


ARRANGEMENTS = {
    "one-192x128-colwise": (one(192), 128, COLWISE, None),
    "one-320x128-colwise": (one(320), 128, COLWISE, None),
    "one-32x384-rowwise": (one(32), 384, ROWWISE, None),
    "one-32x512-rowwise": (one(32), 512, ROWWISE, None),
    "gate_up-96-apart": (gate_up(96), 128, COLWISE, None),
    "gate_up-256-apart": (gate_up(256), 128, COLWISE, None),
    "gate_up-192-fused": (gate_up(192), 128, COLWISE, concatenated(gate_up(192))),
    "gate_up-256-fused": (gate_up(256), 128, COLWISE, concatenated(gate_up(256))),
    "gate_up-96-rows-interleaved": (gate_up(96), 128, COLWISE, interleaved(gate_up(96), 1)),
    "gate_up-128-by-32-interleaved": (gate_up(128), 128, COLWISE, interleaved(gate_up(128), 32)),
    "gate_up-fused-rowwise": (gate_up(64), 256, ROWWISE, concatenated(gate_up(64))),
    "qkv-4-2-32-apart": (qkv(4, 2, 32), 128, COLWISE, None),
    "qkv-4-2-32-fused": (qkv(4, 2, 32), 128, COLWISE, concatenated(qkv(4, 2, 32))),
    "qkv-4-2-24-fused": (qkv(4, 2, 24), 128, COLWISE, concatenated(qkv(4, 2, 24))),
    "qkv-6-3-64-apart": (qkv(6, 3, 64), 128, COLWISE, None),
    "qkv-4-1-32-fused": (qkv(4, 1, 32), 128, COLWISE, concatenated(qkv(4, 1, 32))),
}


def is_legal(fmt, setup):
    """Return whether such a file can exist: sizes are multiples of what the format packs."""
    rows = [setup.order.total] if setup.order else [part.out for part in setup.parts]
    return not any(n % fmt.legal[0] for n in rows) and setup.k % fmt.legal[1] == 0


def cases():
    for name, fmt in FORMATS.items():
        for label, (parts, k, placement, order) in ARRANGEMENTS.items():
            for tp in TP:
                setup = Setup(parts, k, placement, tp, order)
                if is_legal(fmt, setup):
                    yield pytest.param(fmt, setup, id=f"{name}-{label}-tp{tp}")


CASES = list(cases())


@pytest.mark.parametrize(("fmt", "setup"), CASES)
def test_cut_then_decode_equals_decode_then_cut_or_is_refused_by_name(fmt, setup):
    """P-04, P-08, P-11, P-12, P-13, P-16, P-17, P-18, P-19, P-20, P-21, P-22, R014, R025, R026, R028, R079, R082, R084."""
    reasons = refusals(fmt, setup)
    if not heads_fit(setup):
        with pytest.raises(ConfigError, match=f"tp={setup.tp}"):
            broken(fmt, setup)
    elif reasons:
        with pytest.raises(CutError) as caught:
            broken(fmt, setup)
        assert (caught.value.axis, caught.value.range, caught.value.step) in reasons
    else:
        assert broken(fmt, setup) == []


@pytest.mark.parametrize(
    ("fmt", "setup"),
    [case for case in CASES if heads_fit(case.values[1]) and not refusals(*case.values)],
)
def test_grids_and_joins_are_those_of_the_arithmetic(fmt, setup):
    """P-16, P-22, R042: the finer grid is the coarsest that fits, and parts join exactly where they may."""
    world, unique = world_of(fmt, setup), list(dict.fromkeys(localized(setup)))
    for part in setup.parts:
        assert steps_of(world.unit(part.name), unique) == grid_of_part(fmt, setup, part)
    for count in range(1, len(setup.parts)):
        before, part = list(setup.parts[:count]), setup.parts[count]
        verdict = can_join([world.unit(one.name) for one in before], world.unit(part.name), unique)
        assert bool(verdict) is joins(fmt, setup, before, part), verdict.why


def test_the_table_meets_every_outcome_for_every_kind_of_edge():
    """The proof would be empty if nothing were refused, refined or fused."""
    outcomes = [(refusals(*case.values), case.values) for case in CASES if heads_fit(case.values[1])]
    refused = {(axis, step) for reasons, _ in outcomes for axis, _, step in reasons}
    assert {("out", 2), ("out", 8), ("out", 32), ("out", 8), ("in", 128), ("out", 0), ("in", 0)} <= refused
    held = [values for reasons, values in outcomes if not reasons]
    refined = {step for values in held for part in values[1].parts for step in grid_of_part(*values, part).values()}
    assert {16, 32, 64} <= refined
    assert len(held) > len(CASES) // 2
    assert {fmt.name for fmt, _ in held} == set(FORMATS)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_format_means_what_its_encoder_says(fmt):
    """The decoder is right on the whole before it judges a piece."""
    setup = Setup(one(256), 256, COLWISE, 1)
    assert broken(fmt, setup) == []
    assert world_of(fmt, setup).meaning[None, ""].shape == (256, 256)
