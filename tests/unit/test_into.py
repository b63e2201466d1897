"""Loading into a module that is there: names and layouts of both sides, exactly once, ties, buffers, honest failures."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import steelyard
from steelyard.blueprint import Embedding, Experts, FillWith, Linear, Norm, Part, Placement, Tie
from steelyard.config import LoadConfig
from steelyard.errors import CapabilityError, ConfigError, LoadError, PlanError
from steelyard.into import load_into
from steelyard.into.copies import Copy, Place, covered
from steelyard.into.fill import Filler, turned, window
from steelyard.into.held import materialise, poison, state_of
from steelyard.layouts import Drop, Source
from steelyard.placement import Cut, Order, Pairs, RowOrder, Slice
from steelyard.reader import WAYS, MmapReader
from steelyard.storage import finish
from support.checkpoints import encode, values, write_config, write_shards
from support.loading import plan_toy, recording_format, registry_for, runnable, write_toy

HIDDEN, INNER, EXPERTS = 8, 6, 3
PLAIN = (Part("gate", INNER), Part("up", INNER))
MOE = Experts(
    "mlp.experts",
    EXPERTS,
    Linear("", HIDDEN, PLAIN, Placement.COLWISE),
    Linear("", INNER, (Part("down", HIDDEN),), Placement.ROWWISE),
)
BEHIND = Order((("gate", INNER), ("up", INNER)))
TURNS = Order((("gate", 2), ("up", 2)), INNER // 2)  # two rows of gate, two of up, and so on
EMBED = Embedding("embed", 10, HIDDEN, Placement.COLWISE)
HEAD = Linear("head", HIDDEN, (Part("", 10),), Placement.COLWISE)
OLDER = {"gate": "w1", "up": "w3", "down": "w2"}


def module_of(tensors, *, device="meta", dtype=torch.float32, buffers=()):
    """Return nested modules with parameters (or buffers) of the names and shapes given."""
    root = nn.Module()
    for name, shape in tensors.items():
        *path, last = name.split(".")
        owner = root
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        made = torch.zeros(shape, device=device, dtype=dtype)
        if name in buffers:
            owner.register_buffer(last, made)
        else:
            owner.register_parameter(last, nn.Parameter(made))
    return root


def like(tensors, **options):
    """Return a module with the names and shapes of numpy arrays."""
    return module_of({name: np.asarray(array).shape for name, array in tensors.items()}, **options)


def require_equal(module, tensors):
    """Require that the module's state is these arrays, to the bit."""
    state = module.state_dict()
    assert state.keys() == tensors.keys()
    for name, array in tensors.items():
        torch.testing.assert_close(state[name].float(), torch.from_numpy(np.array(array, np.float32)), rtol=0, atol=0)


def registry_of(*nodes, **options):
    return registry_for(runnable(*nodes, **options))


UNKNOWN = {"architectures": ["UnheardModel"], "model_type": "unheard"}


def by_name(folder, tensors, **options):
    """Write tensors under a config that no family knows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, UNKNOWN)
    write_shards(folder, tensors, **options)
    return folder


# --- layouts on both sides -----------------------------------------------------------------------------------------


def logical():
    """Return (part, expert) to its matrix (out, in)."""
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {
        (part, expert): values(7 * place + expert, shape)
        for place, (part, shape) in enumerate(shapes.items())
        for expert in range(EXPERTS)
    }


def alternating(gate, up):
    """Return two rows of gate, two of up, and so on."""
    return np.concatenate([rows for at in range(0, INNER, 2) for rows in (gate[at : at + 2], up[at : at + 2])])


def arranged(how):
    """Return the tensors of the toy's experts, as files or modules lay them out; written down without the geometry."""
    of, stem = logical(), "mlp.experts"
    both = {
        expert: (of["gate", expert], of["up", expert], of["down", expert], np.concatenate([of["gate", expert], of["up", expert]]))
        for expert in range(EXPERTS)
    }  # fmt: skip
    match how:
        case "split":
            return {f"{stem}.{expert}.{part}.weight": matrix for (part, expert), matrix in of.items()}
        case "older":
            return {f"{stem}.{expert}.{OLDER[part]}.weight": matrix for (part, expert), matrix in of.items()}
        case "pairs":
            return {f"{stem}.{expert}.both.weight": one[3] for expert, one in both.items()} | {
                f"{stem}.{expert}.down.weight": one[2] for expert, one in both.items()
            }
        case "stacked":
            return {
                f"{stem}.gate_up": np.stack([one[3] for one in both.values()]),
                f"{stem}.down": np.stack([one[2] for one in both.values()]),
            }
        case "turned":
            return {
                f"{stem}.gate_up_t": np.stack([one[3].T for one in both.values()]),
                f"{stem}.down_t": np.stack([one[2].T for one in both.values()]),
            }
        case "alternating":
            return {
                f"{stem}.gate_up_i": np.stack([alternating(one[0], one[1]) for one in both.values()]),
                f"{stem}.down": np.stack([one[2] for one in both.values()]),
            }
    raise AssertionError(how)


def expert_names(node, part, expert):
    stem, plain = node.stem, {".weight": ""}
    if part == "down":
        fused = (
            Source(f"{stem}.down", plain, stacked=True),
            Source(f"{stem}.down_t", plain, stacked=True, transposed=True),
        )
    else:
        fused = (
            Source(f"{stem}.{expert}.both", order=BEHIND),
            Source(f"{stem}.gate_up", plain, BEHIND, stacked=True),
            Source(f"{stem}.gate_up_t", plain, BEHIND, stacked=True, transposed=True),
            Source(f"{stem}.gate_up_i", plain, TURNS, stacked=True),
        )
    return (Source(f"{stem}.{expert}.{part}"), Source(f"{stem}.{expert}.{OLDER[part]}"), *fused)


ARRANGED = ("split", "older", "pairs", "stacked", "turned", "alternating")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("inside", ARRANGED)
@pytest.mark.parametrize("stored", ARRANGED)
def test_every_layout_of_experts_fills_every_other(tmp_path, stored, inside, way):
    """load_into: the module's names need not be the file's; swap, stack, order and runs are inverted."""
    folder = write_toy(tmp_path / "c", arranged(stored), shards=2)
    module = like(arranged(inside))
    loaded = load_into(
        module, folder, registry=registry_of(MOE, names=expert_names), config=LoadConfig(reader=way)
    )  # fmt: skip
    require_equal(module, arranged(inside))
    assert loaded.family == "ToyForCausalLM"
    assert loaded.report.tensors == len(arranged(stored))
    assert loaded.report.received == sum(array.nbytes for array in arranged(stored).values())


ROTATED = Linear(
    "qkv", HIDDEN, (Part("q", 8, 2), Part("k", 4, 1, kv=True), Part("v", 4, 1, kv=True)), Placement.COLWISE
)


def rotated_names(node, part, expert):
    """Rows of q and k in rotary pairs under names of their own, as consolidated files have them."""
    plain, order = Source(f"split.{part}"), Order((("q", 8), ("k", 4), ("v", 4)))
    if part == "v":
        return (plain, Source("pairs.v"), Source("fused", order=order))
    return (plain, Source(f"pairs.{part}", rows=RowOrder.ROPE_PAIRS), Source("fused", order=order))


def rotated(how):
    parts = {"q": values(0, (8, HIDDEN)), "k": values(1, (4, HIDDEN)), "v": values(2, (4, HIDDEN))}
    if how == "fused":
        return {"fused.weight": np.concatenate(list(parts.values()))}
    if how == "pairs":  # rows 0, 2, 1, 3 of every head of 4
        parts |= {name: parts[name].reshape(-1, 2, 2, HIDDEN).swapaxes(1, 2).reshape(-1, HIDDEN) for name in "qk"}
    return {f"{how}.{name}.weight": array for name, array in parts.items()}


@pytest.mark.parametrize("inside", ["split", "pairs", "fused"])
@pytest.mark.parametrize("stored", ["split", "pairs", "fused"])
def test_rotary_pairs_and_fused_heads_fill_each_other(tmp_path, stored, inside):
    """load_into: rows inverted."""
    folder = write_toy(tmp_path / "c", rotated(stored))
    module = like(rotated(inside))
    load_into(module, folder, registry=registry_of(ROTATED, names=rotated_names))
    require_equal(module, rotated(inside))


@given(
    st.tuples(st.integers(1, 3), st.sampled_from([4, 8, 12]), st.integers(1, 5)),
    st.sampled_from([None, (0, 2), (1, 2)]),
    st.booleans(),
)
def test_what_a_read_does_a_place_undoes(shape, swap, in_pairs):
    """The law of the module's side: read like a stored tensor, what was written comes back."""
    experts, rows, columns = shape
    pairs = Pairs(1, rows) if in_pairs else None
    stored = list(shape)
    if swap is not None:
        stored[swap[0]], stored[swap[1]] = stored[swap[1]], stored[swap[0]]
    everything = tuple(Slice(0, size) for size in stored)
    piece = torch.arange(experts * rows * columns).reshape(shape)
    back = finish(turned(piece, Place("w", everything, swap, pairs)), Cut(everything, (None,) * 3), swap, pairs)
    assert torch.equal(back, piece)


def test_a_piece_of_another_shape_than_its_place_is_refused():
    with pytest.raises(LoadError, match=r"w: a piece of shape \[3, 2\] does not fit into \[2, 3\]"):
        turned(torch.zeros(3, 2), Place("w", (Slice(0, 2), Slice(0, 3))))


@given(st.data())
def test_windows_cover_what_their_slices_say(data):
    """A place is a view: what is written there is in the tensor, at those indices and no other."""
    slices = []
    for size in (7, 9):
        length = data.draw(st.integers(1, 3))
        count = data.draw(st.integers(1, size // length))
        stride = data.draw(st.integers(length, max(length, (size - length) // max(count - 1, 1))))
        start = data.draw(st.integers(0, size - (stride * (count - 1) + length)))
        slices.append(Slice(start, length, stride if count > 1 else 0, count))
    tensor = torch.zeros(7, 9)
    window(tensor, slices).fill_(1)
    expected = np.zeros((7, 9))
    expected[np.ix_(*(one.indices() for one in slices))] = 1
    assert np.array_equal(tensor.numpy(), expected)
    elsewhere = (Slice(0, 7), Slice(0, 9))
    assert covered([tuple(slices)]) == (int(expected.sum()), None)
    assert covered([tuple(slices), elsewhere])[1] is not None


def test_interleaved_places_do_not_share_elements_and_equal_ones_do():
    gate, up = (Slice(0, 1), Slice(0, 2, 4, 3)), (Slice(0, 1), Slice(2, 2, 4, 3))
    assert covered([gate, up]) == (12, None)
    assert covered([gate, up, gate])[1] == gate
    assert covered([(), ()])[1] == ()  # a scalar, written twice


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([Slice(0, 2)], "a: 2 of 4 elements were written"),
        ([Slice(0, 2), Slice(0, 2)], "a: 4 of 4 elements were written, [0:2] more than once"),
        ([], "a: 0 of 4 elements were written"),
    ],
    ids=["a hole", "twice and never", "never"],
)
def test_what_was_done_is_held_to_exactly_once(places, said):
    """load_into: whatever the plan says; a right count is not enough."""
    module = module_of({"a": (4,)}, device="cpu")
    (held,) = state_of(module).held
    copies = [Copy(None, 1.0, Place("a", (place,))) for place in places]
    with pytest.raises(LoadError) as caught:
        Filler({"a": held}, ()).run(copies, None)
    assert str(caught.value) == f"stored values contradict the module:\n  - {said}"


def test_parts_that_the_module_ties_inside_one_node_are_refused(tmp_path):
    """load_into: the plan is held to exactly once before anything is read."""
    folder = write_toy(tmp_path / "c", {f"{one}.weight": values(0, (INNER, HIDDEN)) for one in ("gate", "up")})
    module = module_of({"gate.weight": (INNER, HIDDEN), "up.weight": (INNER, HIDDEN)})
    module.get_submodule("up").weight = module.get_submodule("gate").weight
    registry = registry_of(
        Linear("mlp", HIDDEN, PLAIN, Placement.COLWISE), names=lambda node, part, expert: (Source(part),)
    )
    with pytest.raises(PlanError, match=r"gate.weight of the module: \[0:6, 0:8\] would be written twice"):
        load_into(module, folder, registry=registry)


# --- what does not fit ---------------------------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_is_read(tmp_path):
    """load_into: missing, unexpected, shapes and dtypes of both sides, collected; the module stays on meta."""
    nodes = [Norm(name, 4) for name in ("gone", "wide", "odd", "fine", "apart")]
    stored = {
        "wide.weight": np.zeros(5, np.float32),
        "odd.weight": np.zeros(4, np.float32),
        "fine.weight": np.zeros(4, np.float32),
        "apart.weight": np.zeros(4, np.float32),
        "extra.weight": np.zeros(2, np.float32),
    }
    module = module_of(
        {"gone.weight": (4,), "wide.weight": (4,), "odd.weight": (3,), "fine.weight": (4,), "own.w": (2,)}
    )
    module.get_submodule("fine").weight = nn.Parameter(torch.zeros(4, dtype=torch.float64, device="meta"))
    readers = []
    registry = registry_for(runnable(*nodes), others=(recording_format(readers),))
    with pytest.raises(PlanError) as caught:
        load_into(module, write_toy(tmp_path / "c", stored), registry=registry)
    text = str(caught.value)
    assert "(into a Module), 7 problems:" in text
    for said in (
        "missing tensor gone.weight, needed for gone",
        "wide.weight (model.safetensors): stored shape [5], wide expects [4]",
        "in the module: odd.weight (the module): stored shape [3], odd expects [4]",
        "in the module: fine.weight (the module): stored as F64, fine takes F32 or BF16 or F16",
        "in the module: missing tensor apart.weight, needed for apart",
        "missing tensor own.w, which the module has: the model family 'ToyForCausalLM' does not know it",
        "unexpected tensor extra.weight (model.safetensors)",
    ):
        assert said in text, said
    assert readers == []
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_stored_tensor_without_a_place_is_an_error_and_a_note_where_that_is_asked_for(tmp_path):
    """load_into: an optional node that the module has not; R127: what the family drops stays dropped."""
    nodes = (Norm("norm", 4), Linear("pooler", 4, (Part("", 4),), Placement.REPLICATED, absent="skip"))
    stored = {"norm.weight": values(0, (4,)), "pooler.weight": values(1, (4, 4)), "position_ids": np.arange(4)}
    folder = write_toy(tmp_path / "c", stored)
    registry = registry_of(*nodes, drops=(Drop("position_ids", "positions are counted"),))
    with pytest.raises(
        PlanError, match="unexpected tensor pooler.weight .*no place for pooler; strict=False leaves it"
    ):
        load_into(module_of({"norm.weight": (4,)}), folder, registry=registry)
    module = module_of({"norm.weight": (4,)})
    loaded = load_into(module, folder, registry=registry, config=LoadConfig(strict=False))
    require_equal(module, {"norm.weight": stored["norm.weight"]})
    assert loaded.report.dropped == {"position_ids": "positions are counted"}
    assert [one.subject for one in loaded.report.findings if one.code == "unexpected"] == ["pooler.weight"]


def test_an_optional_node_that_only_the_module_has_is_named(tmp_path):
    nodes = (Norm("norm", 4), Linear("pooler", 4, (Part("", 4),), Placement.REPLICATED, absent="skip"))
    folder = write_toy(tmp_path / "c", {"norm.weight": values(0, (4,))})
    module = module_of({"norm.weight": (4,), "pooler.weight": (4, 4)})
    with pytest.raises(PlanError, match="pooler is optional and not stored, but the module has pooler.weight"):
        load_into(module, folder, registry=registry_of(*nodes))


def test_what_the_family_leaves_out_or_does_not_know_is_copied_by_its_own_name(tmp_path):
    """load_into: a head, or a buffer of the state, that file and module have under one name."""
    stored = {"norm.weight": values(0, (4,)), "cls.bias": values(1, (6,)), "position_ids": np.arange(4)}
    stored["own.weight"] = values(2, (3, 2))
    folder = write_toy(tmp_path / "c", stored)
    module = module_of({"norm.weight": (4,), "cls.bias": (6,), "own.weight": (3, 2)})
    module.register_buffer("position_ids", torch.zeros(4, dtype=torch.int64, device="meta"))
    registry = registry_of(Norm("norm", 4), drops=(Drop("cls.*", "no head"), Drop("position_ids", "counted")))
    loaded = load_into(module, folder, registry=registry)
    require_equal(module, {name: stored[name] for name in module.state_dict()})
    assert loaded.report.dropped == {}
    assert loaded.report.findings == ()
    details = {one.name: one.detail for one in loaded.report.parameters}
    assert details["cls.bias"] == "by name"
    assert details["norm.weight"] == "by the mapping of ToyForCausalLM"


def test_a_constant_in_place_of_what_is_not_stored_is_written_too(tmp_path):
    """load_into: FillWith and allow_missing fill the module, with a note."""
    table = Embedding("types", 3, 4, Placement.REPLICATED, absent=FillWith(0.0))
    folder = write_toy(tmp_path / "c", {"norm.weight": values(0, (4,))})
    module = module_of({"norm.weight": (4,), "types.weight": (3, 4), "scale.weight": (4,)})
    registry = registry_of(Norm("norm", 4), table, Norm("scale", 4))
    loaded = load_into(module, folder, registry=registry, config=LoadConfig(allow_missing=("scale",)))
    zeros = {"types.weight": np.zeros((3, 4)), "scale.weight": np.zeros(4)}
    require_equal(module, {"norm.weight": values(0, (4,))} | zeros)
    assert [one.code for one in loaded.report.findings] == ["missing", "missing"]


def test_allow_missing_speaks_of_the_file_and_not_of_the_module(tmp_path):
    folder = write_toy(tmp_path / "c", {"norm.weight": values(0, (4,)), "scale.weight": values(0, (4,))})
    registry = registry_of(Norm("norm", 4), Norm("scale", 4))
    with pytest.raises(PlanError, match="in the module: missing tensor scale.weight"):
        load_into(
            module_of({"norm.weight": (4,)}), folder, registry=registry, config=LoadConfig(allow_missing=("scale",))
        )


def test_a_stack_that_no_part_fills_in_full_is_named(tmp_path):
    """load_into: every element has a source, or the plan says which tensor has none."""
    more = Order((("gate", INNER), ("up", INNER), ("other", 2)))
    names = lambda node, part, expert: (Source(part), Source("fused", order=more))  # noqa: E731
    folder = write_toy(tmp_path / "c", {f"{one}.weight": values(0, (INNER, HIDDEN)) for one in ("gate", "up")})
    module = module_of({"fused.weight": (2 * INNER + 2, HIDDEN)})
    node = Linear("mlp", HIDDEN, PLAIN, Placement.COLWISE)
    with pytest.raises(PlanError, match="in the module: fused.weight: no node reads its parts other"):
        load_into(module, folder, registry=registry_of(node, names=names))


@pytest.mark.parametrize("quantized", [{"quant_method": "fp8"}, {"quant_method": "toy"}])
def test_a_quantized_checkpoint_is_refused_before_anything_is_read(tmp_path, quantized):
    """load_into takes plain floats; it says so whether or not the dialect is installed."""
    folder = write_toy(tmp_path / "c", {"norm.weight": values(0, (4,))}, {"quantization_config": quantized})
    module = module_of({"norm.weight": (4,)})
    with pytest.raises(CapabilityError, match=f"quantized by {quantized['quant_method']}, and load_into fills plain"):
        load_into(module, folder, registry=registry_of(Norm("norm", 4)))
    assert module.get_submodule("norm").weight.is_meta


def test_options_that_mean_nothing_here_are_refused():
    config = LoadConfig(tp=2, dtype="float16", keep_float32=("norm",), strict=False)
    with pytest.raises(ConfigError, match="^tp, dtype, keep_float32 of LoadConfig cannot be met by load_into"):
        load_into(nn.Linear(2, 2), "nowhere", config=config)


# --- names as they stand -------------------------------------------------------------------------------------------


def test_without_a_family_equal_names_are_enough(tmp_path):
    """load_into: nested names, scalars, integers and truth values, two shards, both readers."""
    stored = {
        "a.b.weight": values(0, (6, 4)), "a.bias": values(1, (6,)), "steps": np.int64(7), "mask": np.array([True, False]),
        "rotary_emb.inv_freq": np.ones(2, np.float32),
    }  # fmt: skip
    for way in WAYS:
        module = module_of({"a.b.weight": (6, 4), "a.bias": (6,)})
        module.register_buffer("steps", torch.tensor(0, device="meta"))
        module.register_buffer("mask", torch.zeros(2, dtype=torch.bool, device="meta"))
        folder = by_name(tmp_path / way, stored, shards=2)
        loaded = load_into(module, folder, registry=registry_of(MOE), config=LoadConfig(reader=way))
        require_equal(module, {name: stored[name] for name in module.state_dict()})
        assert loaded.family == ""
        assert list(loaded.report.dropped) == ["rotary_emb.inv_freq"]
        (note,) = loaded.report.findings
        assert note.text.startswith(
            "names were compared as they stand, because no model family maps them: no model named"
        )


def test_without_a_family_every_name_of_both_sides_that_does_not_match_is_told(tmp_path):
    """load_into: the first ten of a kind, with counts, and which package would help."""
    tensors = {f"layers.{layer}.w1": values(layer, (2, 2)) for layer in range(12)} | {
        "ids": np.arange(3),
        "wide": np.zeros(3),
    }
    write_config(tmp_path, {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"})
    write_shards(tmp_path, tensors)
    module = module_of({"stack": (12, 2, 2), "ids": (3,), "wide": (4,)})
    with pytest.raises(PlanError) as caught:
        load_into(module, tmp_path, registry=registry_of(MOE))
    lines = str(caught.value).split("\n  - ")
    assert "16 problems" in lines[0]
    assert "no model named 'MixtralForCausalLM'" in lines[1]
    assert "Install it with: pip install steelyard-model-" in lines[1]
    assert "ids (model.safetensors): stored as I64, the module has F32; they are never cast" in lines
    assert "wide (model.safetensors): stored shape [3], the module has [4]" in lines
    assert "missing tensor stack, which the module has" in lines
    assert "12 findings of kind unexpected, the first 10:" in lines
    assert sum("unexpected tensor layers." in line for line in lines) == 10


def test_a_config_that_names_no_architecture_is_loaded_by_name(tmp_path):
    write_config(tmp_path, {})
    write_shards(tmp_path, {"w": values(0, (3,))})
    module = module_of({"w": (3,)})
    assert load_into(module, tmp_path, registry=registry_of(MOE)).family == ""
    require_equal(module, {"w": values(0, (3,))})


# --- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("code", ["F32", "BF16", "F16"])
def test_the_parameter_says_its_dtype(tmp_path, code, dtype):
    """load_into: floats are cast to the dtype that the module has, parameter by parameter."""
    folder = by_name(tmp_path / "c", {"a": encode(values(0, (5, 3)), code), "b": encode(values(1, (4,)), code)})
    module = module_of({"a": (5, 3)}, dtype=dtype)
    module.b = nn.Parameter(torch.zeros(4, device="meta"))
    load_into(module, folder)
    assert (module.a.dtype, module.b.dtype) == (dtype, torch.float32)
    require_equal(module, {"a": values(0, (5, 3)), "b": values(1, (4,))})


def test_nan_payloads_pass_to_the_bit(tmp_path):
    bits = np.array([0x7FC00001, 0xFFC0BEEF, 0x7F800001, 0x80000000], np.uint32)
    folder = by_name(tmp_path / "c", {"a": bits.view(np.float32)})
    module = module_of({"a": (4,)})
    load_into(module, folder)
    assert np.array_equal(module.a.detach().numpy().view(np.uint32), bits)


def test_values_too_large_for_the_modules_dtype_are_all_named(tmp_path):
    """load_into: the executor's rule, and the error says that the weights are not usable."""
    big = np.array([1.0, 70000.0, np.inf, -1e6], np.float32)
    folder = by_name(tmp_path / "c", {"a": big, "b": big * 2, "c": values(0, (4,))})
    module = module_of({"a": (4,), "b": (4,), "c": (4,)}, dtype=torch.float16)
    with pytest.raises(LoadError) as caught:
        load_into(module, folder)
    text = str(caught.value)
    assert "a (model.safetensors): 2 of 4 values are too large for F16" in text
    assert "b (model.safetensors): 2 of 4 values are too large for F16" in text
    assert "the module's weights are not usable: 3 of its 3 tensors were written to" in text


# --- the module as it was ------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A table and a head over it, as transformers tie them; a list and an attribute point to the weight too."""

    def __init__(self, device="meta"):
        super().__init__()
        self.embed = nn.Embedding(10, HIDDEN, device=device)
        self.head = nn.Linear(HIDDEN, 10, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.found = [self.embed.weight]


TIE = (Tie("head", "embed"),)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("stored", "ties"),
    [(("embed",), TIE), (("head",), TIE), (("embed", "head"), TIE), (("head", "embed"), TIE), (("embed", "head"), ())],
    ids=["embed", "head", "both", "both, the head first", "both, untied by the config"],
)
def test_a_tied_parameter_stays_one(tmp_path, device, stored, ties):
    """load_into, R064, R066: whichever of the names is stored; both, if they are equal."""
    folder = write_toy(tmp_path / "c", {f"{name}.weight": values(0, (10, HIDDEN)) for name in stored})
    module = Tied(device)
    loaded = load_into(module, folder, registry=registry_of(EMBED, HEAD, ties=ties))
    assert module.head.weight is module.embed.weight
    assert module.found[0] is module.embed.weight
    assert isinstance(module.embed.weight, nn.Parameter)
    require_equal(module, {f"{name}.weight": values(0, (10, HIDDEN)) for name in ("embed", "head")})
    assert [(one.target, one.source, one.is_shared) for one in loaded.report.ties] == [
        ("head.weight", "embed.weight", True)
    ]


@pytest.mark.parametrize("ties", [TIE, ()], ids=["tied config", "untied config"])
@pytest.mark.parametrize("family", [True, False])
def test_a_tie_over_unlike_stored_weights_is_an_error(tmp_path, ties, family):
    """load_into, R060: the module ties what the file keeps apart, whichever stands first in the file."""
    for turn in (0, 1):
        stored = {"embed.weight": values(0, (10, HIDDEN)), "head.weight": values(1, (10, HIDDEN))}
        stored = dict(sorted(stored.items(), reverse=bool(turn)))
        folder = tmp_path / str(turn)
        made = write_toy(folder, stored) if family else by_name(folder, stored)
        with pytest.raises(LoadError) as caught:
            load_into(Tied(), made, registry=registry_of(EMBED, HEAD, ties=ties))
        assert (
            "head.weight (model.safetensors): differs from what fills embed.weight, and the module ties embed.weight and "
            "head.weight: it ties what the file keeps apart; make the module without the tie"
        ) in str(caught.value)
        assert "are not usable" in str(caught.value)


def test_a_module_that_does_not_tie_gets_both_from_the_one_that_is_stored(tmp_path):
    folder = write_toy(tmp_path / "c", {"embed.weight": values(0, (10, HIDDEN))})
    module = module_of({"embed.weight": (10, HIDDEN), "head.weight": (10, HIDDEN)})
    load_into(module, folder, registry=registry_of(EMBED, HEAD, ties=TIE))
    require_equal(module, {name: values(0, (10, HIDDEN)) for name in ("embed.weight", "head.weight")})
    assert module.get_submodule("head").weight is not module.get_submodule("embed").weight


def test_a_module_with_one_name_for_both_takes_equal_weights_and_refuses_others(tmp_path):
    """load_into: the head has no tensor of its own in the module; what the file stores for it must be equal."""
    for turn, fits in ((0, True), (1, False)):
        stored = {"embed.weight": values(0, (10, HIDDEN)), "head.weight": values(turn, (10, HIDDEN))}
        folder = write_toy(tmp_path / str(turn), stored)
        module = module_of({"embed.weight": (10, HIDDEN)})
        registry = registry_of(EMBED, HEAD, ties=TIE)
        if fits:
            load_into(module, folder, registry=registry)
            require_equal(module, {"embed.weight": values(0, (10, HIDDEN))})
        else:
            with pytest.raises(LoadError, match="head.weight .*differs from what fills embed.weight"):
                load_into(module, folder, registry=registry)


def test_training_mode_gradients_attributes_and_classes_stay(tmp_path):
    """load_into: only contents change."""
    module = module_of({"a": (3,), "b": (3,)})
    module.b.requires_grad_(False)
    module.a.owner = "somebody"
    kept = module.a, module.b
    assert module.training
    load_into(module, by_name(tmp_path / "c", {"a": values(0, (3,)), "b": values(1, (3,))}))
    assert module.training
    assert (module.a, module.b) == kept
    assert (module.a.requires_grad, module.b.requires_grad, module.a.owner) == (True, False, "somebody")
    module.a.sum().backward()
    assert module.a.grad.tolist() == [1, 1, 1]


def test_a_module_with_memory_is_filled_where_it_is(tmp_path):
    """load_into: in place, views too; its buffers outside the state dict are left alone."""
    module = module_of({"a": (4, 3), "b": (2, 3)}, device="cpu")
    memory = torch.zeros(6, 3)
    module.a.data, module.b.data = memory[:4], memory[4:]
    module.register_buffer("own", torch.full((2,), 5.0), persistent=False)
    load_into(module, by_name(tmp_path / "c", {"a": values(0, (4, 3)), "b": values(1, (2, 3))}))
    assert np.array_equal(memory.numpy(), np.concatenate([values(0, (4, 3)), values(1, (2, 3))]))
    assert module.own.tolist() == [5, 5]


def test_a_transposed_parameter_is_filled_through_its_strides(tmp_path):
    module = module_of({"a": (3, 4)}, device="cpu")
    module.a.data = torch.zeros(4, 3).T
    load_into(module, by_name(tmp_path / "c", {"a": values(0, (3, 4))}))
    assert not module.a.is_contiguous()
    require_equal(module, {"a": values(0, (3, 4))})


@pytest.mark.parametrize("other", [0, 1], ids=["equal", "unlike"])
def test_parameters_over_the_same_memory_are_tied(tmp_path, other):
    """load_into, R064: two objects, one weight; what the file stores for them must be equal."""
    module = module_of({"a": (4,), "b": (4,)}, device="cpu")
    module.b.data = module.a.data
    folder = by_name(tmp_path / "c", {"a": values(0, (4,)), "b": values(other, (4,))})
    if other:
        with pytest.raises(LoadError, match="b .*differs from what fills a, and the module ties a and b"):
            load_into(module, folder)
    else:
        load_into(module, folder)
        require_equal(module, {"a": values(0, (4,)), "b": values(0, (4,))})


def test_tensors_that_share_a_part_of_their_memory_are_refused(tmp_path):
    """load_into: one would be written over the other."""
    memory = torch.zeros(6)
    module = module_of({"a": (4,), "b": (4,)}, device="cpu")
    module.a.data, module.b.data = memory[:4], memory[2:]
    folder = by_name(tmp_path / "c", {"a": values(0, (4,)), "b": values(1, (4,))})
    with pytest.raises(PlanError, match="a and b of the module share a part of their memory"):
        load_into(module, folder)
    assert memory.count_nonzero() == 0


def test_a_load_inside_a_meta_context_is_a_load(tmp_path):
    """load_into: the reader's and the rebuilt tensors do not follow a device context around the call."""
    stored = {"a": values(0, (3,)), "0.big.weight": values(1, (4, 3))}
    for way in WAYS:
        with torch.device("meta"):
            module = nn.Sequential(Rotary(8))
            module.a = nn.Parameter(torch.zeros(3))
            load_into(module, by_name(tmp_path / way, stored), config=LoadConfig(reader=way))
        require_equal(module, stored)
        assert module[0].inv_freq.device.type == "cpu"


class Strange(nn.Module):
    """Has everything that a checkpoint cannot fill."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, device="meta"))
        self.secret = nn.Parameter(torch.zeros(2, device="meta"))
        self.kept = {"one": torch.zeros(1, device="meta")}
        self.rnn = nn.LSTM(2, 2, device="meta")
        self.register_state_dict_post_hook(self._hide)

    @staticmethod
    def _hide(module, state, prefix, metadata):
        del state[f"{prefix}secret"]
        state[f"{prefix}copy"] = torch.zeros(2)

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        raise AssertionError("nothing is set")


def test_what_cannot_be_filled_at_all_is_named(tmp_path):
    with pytest.raises(PlanError) as caught:
        load_into(Strange(), by_name(tmp_path / "c", {"weight": values(0, (2,))}))
    text = str(caught.value)
    for said in (
        "_extra_state of the module's state is a dict, not a tensor",
        "copy of the module's state is no parameter or buffer of it: writing there would change nothing",
        "secret is a parameter that the module's state dict leaves out",
        "kept of the module keeps tensors on meta in a dict",
        "rnn.weight_ih_l0 of the module is on meta and weakly referenced",
    ):
        assert said in text, said


# --- poison and buffers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_what_was_on_meta_is_poison_until_it_is_written(dtype):
    module = nn.Module()
    module.register_buffer("a", torch.zeros(3, 2, dtype=dtype, device="meta"))
    module.register_buffer("scalar", torch.zeros((), dtype=dtype, device="meta"))
    materialise(state_of(module), {}, torch.device("cpu"))
    for held in (module.a, module.scalar):
        expected = poison(torch.empty(held.shape, dtype=dtype))
        other = poison(torch.empty(held.shape, dtype=dtype), other=True)
        assert bytes(held.reshape(-1).view(torch.uint8)) == bytes(expected.reshape(-1).view(torch.uint8))
        assert bytes(held.reshape(-1).view(torch.uint8)) != bytes(other.reshape(-1).view(torch.uint8))


class Rotary(nn.Module):
    """Keeps its constructor's arguments, one value worked out of them, and an alias of its buffer."""

    def __init__(self, dim, base=10000.0, device=None):
        super().__init__()
        self.dim, self.base = dim, base
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", base ** -(steps / dim), persistent=False)
        self.original_inv_freq = self.inv_freq
        self.apart = self.inv_freq.clone()
        self.big = nn.Embedding(4, 3)


def frequencies(dim, base=10000.0):
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def owned(owner, tmp_path, **options):
    """Load into a module with this owner of a buffer and return (module, what was loaded)."""
    module = nn.Sequential(owner)
    state = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in module.state_dict().items()}
    folder = by_name(tmp_path / "c", state | {"unused": np.zeros(1, np.float32)})
    return module, load_into(module, folder, config=LoadConfig(strict=False), **options)


def on_meta(cls, *given):
    with torch.device("meta"):
        return cls(*given)


def test_a_module_made_again_from_the_arguments_that_it_keeps_gives_its_buffers(tmp_path):
    """load_into: non-persistent buffers, their aliases and tensor attributes are right; no table is allocated for it."""
    module, loaded = owned(on_meta(Rotary, 12, 500.0), tmp_path)
    for tensor in (module[0].inv_freq, module[0].apart):
        assert torch.equal(tensor, frequencies(12, 500.0))
    assert module[0].original_inv_freq is module[0].inv_freq
    assert loaded.rebuilt == {"0.inv_freq": "Rotary(...)", "0.apart": "Rotary(...)"}


class Halved(Rotary):
    """Changes an argument before it keeps it, so that made again it is another."""

    def __init__(self, base):
        super().__init__(8, base / 2)


class Forgetful(nn.Module):
    """Does not keep what its buffer was made of."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("table", torch.arange(dim), persistent=False)


class ForgetsADefault(nn.Module):
    """Does not keep an argument that has a default: whether it was given cannot be seen."""

    def __init__(self, dim, base=10):
        super().__init__()
        self.dim = dim
        self.register_buffer("table", torch.arange(dim) * base, persistent=False)


class Reset(Forgetful):
    """Follows torch's convention for modules that are made on meta."""

    def reset_parameters(self):
        self.table.copy_(torch.arange(len(self.table)) * 3)


class ResetInPart(Forgetful):
    def reset_parameters(self):
        self.table[1:] = 3


class ResetFromItself(Forgetful):
    def reset_parameters(self):
        self.table += 1


class ResetAtRandom(Forgetful):
    def reset_parameters(self):
        self.table.random_(0, 1000)


class Uninitialised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)


class Raising(Forgetful):
    def reset_parameters(self):
        raise RuntimeError("no kernel for this")


def test_reset_parameters_makes_the_buffers_of_its_module(tmp_path):
    module, loaded = owned(on_meta(Reset, 5), tmp_path)
    assert module[0].table.tolist() == [0, 3, 6, 9, 12]
    assert loaded.rebuilt == {"0.table": "Reset.reset_parameters()"}


@pytest.mark.parametrize(
    ("owner", "why"),
    [
        (lambda: on_meta(Forgetful, 5), r"Forgetful\(\.\.\.\): its constructor takes dim, which is not kept"),
        (
            lambda: on_meta(ForgetsADefault, 5, 3),
            r"ForgetsADefault\(\.\.\.\): its constructor takes base, which is not kept",
        ),
        (lambda: on_meta(Halved, 8.0), r"Halved\(\.\.\.\): made again it has base=2.0, and 4.0 here"),
        (lambda: on_meta(ResetInPart, 5), r"reset_parameters\(\): it is not overwritten in full"),
        (lambda: on_meta(ResetFromItself, 5), r"reset_parameters\(\): it is not overwritten in full"),
        (lambda: on_meta(ResetAtRandom, 5), r"or with other values each time"),
        (lambda: on_meta(Uninitialised), r"Uninitialised\(\.\.\.\): it is left without a value"),
        (lambda: on_meta(Raising, 5), r"reset_parameters\(\) failed with RuntimeError: no kernel for this"),
    ],
    ids=["forgetful", "default", "halved", "in part", "from itself", "at random", "uninitialised", "raising"],
)
def test_a_buffer_that_no_code_makes_in_full_is_refused_by_name_before_anything_is_read(tmp_path, owner, why):
    """load_into: over two poisons and two seeds; never garbage, never a guess."""
    made = owner()
    seed = torch.random.get_rng_state()
    with pytest.raises(PlanError, match=r"0\.\w+ is on meta, the module's state dict leaves it out") as caught:
        owned(made, tmp_path)
    assert caught.match(why)
    assert all(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    assert torch.equal(torch.random.get_rng_state(), seed)


def test_the_caller_can_say_how_a_buffer_is_made(tmp_path):
    """load_into: by name or pattern, from the module that owns it; what it gives is looked at too."""
    make = {"*.table": lambda owner: torch.arange(len(owner.table)) + 1}
    module, loaded = owned(on_meta(Forgetful, 4), tmp_path, rebuild=make)
    assert module[0].table.tolist() == [1, 2, 3, 4]
    assert loaded.rebuilt == {"0.table": "rebuild="}
    with pytest.raises(PlanError, match=r"rebuild=: it gives torch.float32 \[2\], the module has torch.int64 \[4\]"):
        owned(on_meta(Forgetful, 4), tmp_path, rebuild={"0.table": lambda owner: torch.zeros(2)})
    _, loaded = owned(on_meta(Reset, 4), tmp_path, rebuild={"0.tabel": lambda owner: torch.zeros(2)})
    assert "rebuild names 0.tabel, which matches no tensor on meta" in str([one.text for one in loaded.report.findings])


# --- failures ------------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_says_that_the_weights_are_not_usable_and_leaves_poison(tmp_path, monkeypatch):
    """load_into: nothing half-true in silence."""
    folder = by_name(tmp_path / "c", {name: values(0, (4,)) for name in "abc"})
    real = MmapReader.read

    def failing(self, read):
        if read.name == "b":
            raise OSError("the disk is gone")
        return real(self, read)

    monkeypatch.setattr(MmapReader, "read", failing)
    module = module_of({name: (4,) for name in "abc"})
    with pytest.raises(LoadError) as caught:
        load_into(module, folder)
    assert str(caught.value).startswith("the disk is gone\nthe module's weights are not usable: 1 of its 3 tensors")
    assert isinstance(caught.value.__cause__, OSError)
    require_equal(nn.ParameterDict({"a": module.a}), {"a": values(0, (4,))})
    assert torch.isnan(module.b).all()
    assert torch.isnan(module.c).all()


def test_an_interrupt_passes_and_says_it_in_a_note(tmp_path, monkeypatch):
    def interrupted(self, read):
        raise KeyboardInterrupt

    folder = by_name(tmp_path / "c", {"a": values(0, (4,))})
    monkeypatch.setattr(MmapReader, "read", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        load_into(module_of({"a": (4,)}), folder)
    assert "no weight was written" in caught.value.__notes__[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_written_to_while_it_is_read_is_an_error(tmp_path, way):
    """load_into: the readers' own look at the files counts here too."""
    folder = write_toy(tmp_path / "c", {"a.weight": values(0, (4,)), "b.weight": values(1, (4,))})

    def touch(read, count):
        if count == 1:
            os.utime(folder / "model.safetensors", ns=(1, 1))

    registry = registry_for(runnable(Norm("a", 4), Norm("b", 4)), others=(recording_format([], touch),))
    with pytest.raises(LoadError, match=r"was written to while it was read; plan again\nthe module's weights are not"):
        load_into(
            module_of({"a.weight": (4,), "b.weight": (4,)}), folder, registry=registry, config=LoadConfig(reader=way)
        )


@pytest.mark.parametrize("way", WAYS)
def test_one_piece_is_alive_at_a_time(tmp_path, way):
    """load_into, L-11: beside the module, memory for about one piece."""
    readers = []
    registry = registry_for(runnable(MOE, names=expert_names), others=(recording_format(readers),))
    module = like(arranged("stacked"), dtype=torch.bfloat16)
    loaded = load_into(
        module, write_toy(tmp_path / "c", arranged("split")), registry=registry, config=LoadConfig(reader=way)
    )
    (reader,) = readers
    assert len(reader.names) == 3 * EXPERTS
    assert reader.most_alive == 1
    assert reader.alive() == 0
    assert loaded.report.ranks[0].host_peak == INNER * HIDDEN * 4


def test_the_report_says_what_came_from_where(tmp_path):
    folder = write_toy(tmp_path / "c", arranged("split"), shards=2)
    loaded = steelyard.load_into(like(arranged("stacked")), folder, registry=registry_of(MOE, names=expert_names))
    records = {one.name: one for one in loaded.report.parameters}
    one = records["mlp.experts.gate_up.2.up"]
    (tensor,) = one.tensors
    assert (tensor.name, tensor.file) == ("mlp.experts.2.up.weight", "model-00002-of-00002.safetensors")
    assert tensor.stop - tensor.start == INNER * HIDDEN * 4
    report = loaded.report
    assert (report.device, report.dtype, report.reader, report.load_format) == ("cpu", "F32", "mmap", "safetensors")
    assert "steelyard" in report.plugins
    assert report.to_json()["summary"].startswith("loaded 9 tensors")


def test_the_digest_is_the_plans(tmp_path):
    plan = plan_toy(tmp_path / "c", arranged("split"), MOE, names=expert_names)
    loaded = load_into(like(arranged("stacked")), tmp_path / "c", registry=registry_of(MOE, names=expert_names))
    assert loaded.report.digest == plan.digest
