"""Users' faults with experts, as loads of real values: numbers that ranks do not divide, stacks, what a rank reads."""

import numpy as np
import pytest

from steelyard.config import LoadConfig
from steelyard.planning import plan
from steelyard.reader import WAYS
from support import cases
from support.planned import hollow, plain

LAYERS = (0, 1)


@pytest.fixture(autouse=True, params=cases.PATTERNS.values(), ids=cases.PATTERNS)
def fresh_memory(request):
    with cases.poisoned(request.param):
        yield


def experts_of(names):
    """Return the experts that tensors stored one by one are of."""
    return {int(name.partition(".experts.")[2].partition(".")[0]) for name in names if ".experts." in name}


# --- F: experts that do not divide -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one by one", "stacked"])
@pytest.mark.parametrize(
    ("count", "ep", "ranges"), [(6, 4, [(0, 2), (2, 4), (4, 5), (5, 6)]), (5, 2, [(0, 3), (3, 5)])], ids=["6-4", "5-2"]
)
def test_R034_experts_that_do_not_divide_are_held_exactly_once(tmp_path, form, count, ep, ranges):
    """R034, L-13, E-02: the first ranks take one more; no rank keeps or reads another's."""
    config = cases.TOY_M | {"num_experts": count}
    whole = cases.toy_m(num_experts=count)
    folder = cases.folder_of(tmp_path, whole if form == "one by one" else cases.stacked(whole), config)
    found = cases.ranks(folder, tp=1, ep=ep)
    for rank, (start, stop) in enumerate(ranges):
        cases.assert_holds(found[rank].module, cases.moe_share(whole, range(start, stop)))
        if form == "one by one":
            assert experts_of(found[rank].names) == set(range(start, stop))
    received = [sum(size for name, size in one.received.items() if ".experts." in name) for one in found]
    assert received == [len(LAYERS) * (stop - start) * 3 * 256 * 256 * 2 for start, stop in ranges]


def test_R034_thirty_experts_on_eight_ranks(tmp_path):
    """R034, E-02: index arithmetic alone; six ranks with 4 and two with 3, and an error where they must be even."""
    config = cases.TOY_M | {"num_experts": 30}
    hollow(tmp_path, config, plain({name: array.shape for name, array in cases.toy_m(num_experts=30).items()}))
    made = plan(tmp_path, ep=8, target="cpu", registry=cases.installed())
    held = [experts_of(read.name for read in made.reads(rank)) for rank in range(8)]
    assert [len(one) for one in held] == [4] * 6 + [3] * 2
    assert [expert for one in held for expert in sorted(one)] == list(range(30))
    even = plan(tmp_path, ep=8, target="cpu", config=LoadConfig(experts="even"), registry=cases.installed())
    assert [finding.text for finding in even.errors] == [
        "layers.0.mlp.experts: 30 experts do not divide by ep 8 and experts='even' (and 1 more like it)"
    ]


# --- J: names and stacks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 2])
def test_R068_experts_one_by_one_and_stacked_are_the_same_memory(tmp_path, ep):
    """R068, E-08, E-14: both forms, both readers, on one rank and two; every bit is the same."""
    whole = cases.toy_m()
    alone = cases.folder_of(tmp_path / "alone", whole, cases.TOY_M)
    together = cases.folder_of(tmp_path / "stacked", cases.stacked(whole), cases.TOY_M)
    for folder in (alone, together):
        for way in WAYS:
            found = cases.ranks(folder, ep=ep, reader=way)
            for rank, one in enumerate(found):
                mine = range(rank * 4 // ep, (rank + 1) * 4 // ep)
                cases.assert_holds(one.module, cases.moe_share(whole, mine))
            if ep == 1:
                cases.assert_holds(cases.load(folder, reader=way).module, cases.moe_share(whole, range(4)))


def test_R068_a_mix_of_single_experts_and_stacks_is_an_error(tmp_path):
    """R068, L-21: experts 0 to 2 alone beside the stacks; each tensor that stands twice is named with its other place."""
    whole = cases.toy_m()
    single = {name: array for name, array in whole.items() if ".experts.3." not in name}
    folder = cases.folder_of(tmp_path, single | cases.stacked(whole), cases.TOY_M)
    said = cases.errors(lambda: cases.load(folder))
    for layer in LAYERS:
        stem = f"model.layers.{layer}.mlp.experts"
        for expert in range(3):
            for part, stack in (("gate", "gate_up"), ("up", "gate_up"), ("down", "down")):
                first, second = f"{stem}.{expert}.{part}_proj.weight", f"{stem}.{stack}_proj"
                assert sum(first in text and f" {second}" in text for text in said) == 1
    assert len(said) == len(LAYERS) * 9
    assert cases.errors(lambda: cases.ranks(folder, ep=2)) == said


def test_R068_experts_that_are_left_over_are_an_error(tmp_path):
    """R068, E-05: a fifth expert of four."""
    whole = cases.toy_m()
    extra = {
        name.replace("experts.3.", "experts.4."): array for name, array in whole.items() if ".0.mlp.experts.3." in name
    }
    folder = cases.folder_of(tmp_path, whole | extra, cases.TOY_M)
    assert cases.errors(lambda: cases.load(folder)) == [
        f"unexpected tensor {name} (model.safetensors): no rule of the model uses or drops it" for name in sorted(extra)
    ]


def test_R071_every_reader_hands_out_a_ranks_own_experts_and_no_other(tmp_path):
    """R071, E-14: 4 shards, EP 2: 6 expert tensors a layer and rank, the same bytes by every reader."""
    whole = cases.toy_m()
    folder = cases.folder_of(tmp_path, whole, cases.TOY_M, shards=4)
    seen = {way: cases.ranks(folder, ep=2, reader=way) for way in WAYS}
    for rank, mine in enumerate([(0, 1), (2, 3)]):
        for way, found in seen.items():
            one = found[rank]
            cases.assert_holds(one.module, cases.moe_share(whole, range(mine[0], mine[1] + 1)))
            assert sorted(name for name in one.names if ".experts." in name) == sorted(
                f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
                for layer in LAYERS
                for expert in mine
                for part in ("gate", "up", "down")
            )
            wanted = sum(array.size * 2 for name, array in whole.items() if not experts_of([name]) - set(mine))
            assert sum(one.received.values()) == wanted
            pages = 2 * 4096 * len(one.names) if way == "mmap" else 0  # a mapped file counts whole pages
            assert wanted <= one.read <= wanted + pages


@pytest.mark.parametrize("values", ["by expert", "by place"])
def test_R073_a_stack_is_narrowed_to_the_ranks_experts_and_cut_inside(tmp_path, values):
    """R073, E-03: EP 2 x TP 2; ranks 2 and 3 hold experts 2 and 3 (values 3 and 4), 128 rows of gate and 128 of up each."""
    whole = cases.toy_m()
    if values == "by expert":
        whole |= {
            name: np.full_like(array, 1 + max(experts_of([name])))
            for name, array in whole.items()
            if experts_of([name])
        }
    folder = cases.folder_of(tmp_path, cases.stacked(whole), cases.TOY_M)
    for rank, one in enumerate(cases.ranks(folder, tp=2, ep=2, moe_tp=2, world=4)):
        first, place = rank // 2 * 2, rank % 2
        mine = {"tp": 2, "tp_rank": place, "inner": slice(128 * place, 128 * place + 128)}
        cases.assert_holds(one.module, cases.moe_share(whole, range(first, first + 2), **mine))
        held = cases.held(one.module)
        shapes = {part: tuple(held[f"layers.0.mlp.experts.{part}_proj"].shape) for part in ("gate", "up", "down")}
        assert shapes == {"gate": (2, 128, 256), "up": (2, 128, 256), "down": (2, 256, 128)}
        if values == "by expert":
            for part in shapes:
                found = held[f"layers.1.mlp.experts.{part}_proj"]
                assert [set(expert.flatten().tolist()) for expert in found] == [{first + 1.0}, {first + 2.0}]
