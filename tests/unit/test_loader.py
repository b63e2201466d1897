"""Loading on one process: the order of things, what is said, what every option does, and what is left behind."""

import ast
import contextlib
import gc
import inspect
import logging
import os
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import steelyard
from steelyard import loader
from steelyard.agree import Agreement
from steelyard.agree.verdicts import Limits
from steelyard.blueprint import Embedding, Experts, FillWith, Linear, Norm, Part, Placement
from steelyard.config import LoadConfig
from steelyard.errors import (
    AmbiguousPlugin,
    BrokenPlugin,
    ConfigError,
    LoadError,
    PlanError,
)
from steelyard.layers import weight_of
from steelyard.loader import Built, device_of, load
from steelyard.planning import plan
from steelyard.plugin import Verdict
from steelyard.reader import WAYS, SafetensorsReader
from steelyard.registry import Registry
from steelyard.testing.trees import importable, write_distribution
from support.checkpoints import encode, values
from support.loading import (
    Toy,
    ToyBackend,
    ToyMethod,
    recording_format,
    registry_for,
    runnable,
    write_toy,
)
from support.planned import hollow_d, hollow_m, planned, registry_of
from support.quant import backend

HIDDEN, ROWS = 8, 12
STEMS = ("a", "b", "c")
NODES = tuple(Linear(stem, HIDDEN, (Part("x", ROWS), Part("y", ROWS)), Placement.COLWISE) for stem in STEMS)
TENSORS = {f"{stem}.{part}.weight": values(place, (ROWS, HIDDEN)) for place, stem in enumerate(STEMS) for part in "xy"}
QUANTIZED = {"quantization_config": {"quant_method": "toy"}}
CODED = {
    f"{stem}.{part}{ending}": value
    for place, stem in enumerate(STEMS)
    for part in "xy"
    for ending, value in (
        (".codes", values(place, (ROWS, HIDDEN)).astype(np.int8)),
        (".scale", np.float32(0.5)),
    )
}
HERE = os.path.dirname(__file__)


def toy(folder, tensors=None, *nodes, config=None, shards=1, module=None, others=(), ties=()):
    """Write a toy's checkpoint; return the folder and the registry that knows it."""
    write_toy(folder, TENSORS if tensors is None else tensors, config, shards)
    return folder, registry_for(runnable(*(nodes or NODES), module=module, ties=ties), others=others)


def loaded(folder, *given, config=None, tp=None, **further):
    """Write a toy's checkpoint and load it to the CPU."""
    options = further.pop("options", None)
    path, registry = toy(folder, *given, config=config, **further)
    return load(path, device="cpu", config=options, registry=registry)


def open_handles():
    """Return what this process has open, without the handle that lists it."""
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if not path.startswith("/proc"))


def mapped(folder):
    with open("/proc/self/maps") as maps:
        return [line for line in maps if str(folder) in line]


# --- what comes out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_is_loaded_alike_by_every_reader(tmp_path, way, shards):
    """R005: one accounting for all readers; values, report and errors do not depend on how bytes are read."""
    model = loaded(tmp_path, shards=shards, options=LoadConfig(reader=way))
    for place, stem in enumerate(STEMS):
        assert weight_of(model.module.nodes[stem]).tolist() == np.tile(values(place, (ROWS, HIDDEN)), (2, 1)).tolist()
    assert not model.module.training
    assert model.report.reader == way
    assert model.report.tensors == len(TENSORS)


def test_every_reader_refuses_extra_tensors_with_the_same_text(tmp_path):
    """R005, L-18: the mode must not change what counts as an error, nor how it is told."""
    said = set()
    extra = TENSORS | {"a.rel_bias": np.zeros(4, np.float32)}
    path, registry = toy(tmp_path, extra, shards=2)
    for way in WAYS:
        with pytest.raises(PlanError) as caught:
            load(path, device="cpu", config=LoadConfig(reader=way), registry=registry)
        said.add(str(caught.value))
    assert len(said) == 1
    assert "unexpected tensor a.rel_bias" in said.pop()


def test_parameters_of_a_loaded_model_are_not_trained(tmp_path):
    assert not any(parameter.requires_grad for parameter in loaded(tmp_path).module.parameters())


def test_nothing_of_the_file_is_kept(tmp_path):
    """P-24: when the model is there, no mapping of the checkpoint is."""
    model = loaded(tmp_path, shards=2, options=LoadConfig(reader="mmap"))
    gc.collect()
    assert not mapped(tmp_path)
    assert not [path for path in open_handles() if str(tmp_path) in path]
    held = sum(one.untyped_storage().nbytes() for one in model.module.parameters())
    assert held == sum(one.nbytes for one in TENSORS.values()) == model.report.ranks[0].received


def test_two_loads_do_not_know_of_each_other(tmp_path):
    """L-32 in our form: nothing accumulates across calls."""
    path, registry = toy(tmp_path, CODED, config=QUANTIZED)
    first, second = (load(path, device="cpu", registry=registry) for _ in range(2))
    states = [list(one.module.state_dict().items()) for one in (first, second)]
    for (name, mine), (other, theirs) in zip(*states, strict=True):
        assert name == other
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()
    assert first.report.to_json() | {"seconds": 0, "summary": "", "ranks": []} == (
        second.report.to_json() | {"seconds": 0, "summary": "", "ranks": []}
    )


# --- the order of stages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_mixed", [False, True], ids=["in-order", "mixed"])
def test_a_segment_is_prepared_when_its_last_tensor_is_in(tmp_path, is_mixed):
    """L-22 as the design has it: the order holds for each Segment, and each stage of it runs once."""
    events = []

    class Method(ToyMethod):
        pass

    class Backend(ToyBackend):
        pass

    Method.events = Backend.events = events

    def module(config, built):
        events.append(("module", ""))
        return Toy(built)

    tensors = dict(sorted(CODED.items(), key=lambda one: one[0][1:])) if is_mixed else CODED
    others = (
        ("quant method", Method),
        ("kernel backend", Backend),
        recording_format([], before=lambda read, count: events.append(("read", read.stem))),
    )
    loaded(tmp_path, tensors, config=QUANTIZED, module=module, others=others)
    done = [("prepare", ""), ("kernel", "")]
    if is_mixed:
        whole = [("read", stem) for _ in range(3) for stem in STEMS]
        expected = whole + [event for stem in STEMS for event in (("read", stem), *done)]
    else:
        expected = [event for stem in STEMS for event in (*[("read", stem)] * 4, *done)]
    assert events == [*expected, ("module", "")]


def test_nothing_is_read_of_a_checkpoint_that_is_not_complete(tmp_path):
    """L-19: completeness is proved on the plan, all that is missing at once."""
    readers = []
    tensors = {name: value for name, value in TENSORS.items() if name not in ("b.y.weight", "c.x.weight")}
    path, registry = toy(tmp_path, tensors, others=(recording_format(readers),))
    with pytest.raises(PlanError) as caught:
        load(path, device="cpu", registry=registry)
    assert [finding.subject for finding in caught.value.findings] == ["b.y.weight", "c.x.weight"]
    assert readers == []


def test_checks_are_raised_before_a_model_is_built(tmp_path):
    """Design 4: what only bytes can tell is told before the family is asked for its module."""
    asked = []
    bad = CODED | {"b.x.scale": np.float32("nan")}
    with pytest.raises(LoadError, match="b.x.scale .* 1 of 1 values are negative or not finite"):
        loaded(tmp_path, bad, config=QUANTIZED, module=lambda config, built: asked.append(1))
    assert asked == []


# --- every way out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_nothing_stays_open_after_a_load(tmp_path, way):
    """L-24 (a)."""
    path, registry = toy(tmp_path, shards=3)
    load(path, device="cpu", registry=registry)  # what python opens at the first load stays open
    before = open_handles()
    model = load(path, device="cpu", config=LoadConfig(reader=way), registry=registry)
    assert open_handles() == before
    assert model.report.tensors == len(TENSORS)


def test_nothing_stays_open_after_a_plan_that_fails(tmp_path):
    """L-24 (b)."""
    path, registry = toy(tmp_path, {name: TENSORS[name] for name in list(TENSORS)[1:]}, shards=3)
    before = open_handles()
    with pytest.raises(PlanError):
        load(path, device="cpu", registry=registry)
    assert open_handles() == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, LoadError, MemoryError])
def test_nothing_stays_open_after_an_interrupt_at_the_third_tensor(tmp_path, way, error):
    """L-24 (c): Ctrl-C and failures leave as they came, through every reader."""

    def interrupt(read, count):
        if count == 2:
            raise error

    readers = []
    path, registry = toy(tmp_path, shards=3, others=(recording_format(readers, interrupt),))
    before = open_handles()
    with pytest.raises(error):
        load(path, device="cpu", config=LoadConfig(reader=way), registry=registry)
    assert open_handles() == before
    assert readers[0].alive() == 0
    assert not mapped(tmp_path)
    assert len(readers[0].names) == 2


def test_an_error_while_the_model_is_built_names_the_plugin_and_keeps_its_cause(tmp_path):
    """X-14, M-15: nothing hides what went wrong, nor whose it is."""

    def module(config, built):
        raise ZeroDivisionError("the family's own")

    before = open_handles()
    with pytest.raises(LoadError, match="the model of .* failed: ZeroDivisionError: the family's own$") as caught:
        loaded(tmp_path, module=module)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert open_handles() == before


def test_a_reader_that_fails_to_close_does_not_hide_the_first_error(tmp_path, monkeypatch):
    """X-14: the first failure is in the chain of what is raised."""

    def module_error(read, count):
        raise LoadError("first")

    path, registry = toy(tmp_path, others=(recording_format([], module_error),))
    real = SafetensorsReader.__exit__

    def broken(self, *given):
        real(self, *given)
        raise OSError("second")

    monkeypatch.setattr(SafetensorsReader, "__exit__", broken)
    with pytest.raises(OSError, match="^second$") as caught:
        load(path, device="cpu", registry=registry)
    assert str(caught.value.__context__) == "first"


# --- families that break the contract ----------------------------------------------------------------------------


def test_a_family_that_takes_a_node_twice_is_refused(tmp_path):
    def module(config, built):
        return nn.ModuleList([built["a"], built["a"]])

    with pytest.raises(LoadError) as caught:
        loaded(tmp_path, module=module)
    assert str(caught.value) == ("the family took the node 'a' twice; two places of a model may not own one module")


def test_a_family_that_leaves_nodes_out_is_refused(tmp_path):
    """A weight that is loaded and not used is a wrong model."""
    with pytest.raises(LoadError) as caught:
        loaded(tmp_path, module=lambda config, built: nn.ModuleList([built["a"]]))
    assert str(caught.value) == "the family left out 2 loaded nodes, such as 'b'"


def test_a_family_that_makes_no_module_is_refused(tmp_path):
    with pytest.raises(LoadError) as caught:
        loaded(tmp_path, module=lambda config, built: dict(built))
    assert str(caught.value) == "ToyForCausalLM: the family's model is a dict, not an nn.Module"


def test_built_nodes_are_a_mapping_from_which_each_is_taken_once():
    built = Built({"a": nn.Identity(), "b": nn.Identity()})
    assert (list(built), len(built), "a" in built, "c" in built) == (["a", "b"], 2, True, False)
    assert built.get("c") is None
    with pytest.raises(KeyError):
        built["c"]
    taken = dict(built)
    assert set(taken) == {"a", "b"}
    built.check()


def test_experts_that_no_kernel_takes_are_refused_before_anything_is_read(tmp_path):
    """E-23: the kernel is chosen while planning."""
    inner = Linear("", HIDDEN, (Part("gate", 8), Part("up", 8)), Placement.COLWISE)
    down = Linear("", 8, (Part("down", HIDDEN),), Placement.ROWWISE)
    node = Experts("experts", 1, inner, down, activation="sine")
    tensors = {f"experts.0.{part}.weight": np.ones((8, HIDDEN), np.float32) for part in ("gate", "up", "down")}
    readers = []
    with pytest.raises(PlanError, match="torch: has no activation 'sine'"):
        loaded(tmp_path, tensors, node, others=(recording_format(readers),))
    assert readers == []


# --- devices and targets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("gpu", "device='gpu': "),
        ("CPU", "device='CPU': "),
        ("meta", "device='meta': weights go to cpu or cuda"),
        ("mps", "device='mps': weights go to cpu or cuda"),
        ("cuda:x", "device='cuda:x': "),
    ],
)
def test_devices_that_are_none_are_refused(tmp_path, device, text):
    """A model on ``meta`` would have no weights at all, and no error."""
    path, registry = toy(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(path, device=device, registry=registry)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_an_accelerator_that_is_not_there_is_named_before_anything_is_read(tmp_path, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    readers = []
    path, registry = toy(tmp_path, others=(recording_format(readers),))
    with pytest.raises(ConfigError) as caught:
        load(path, device=device, registry=registry)
    assert str(caught.value) == f"device='{device}': torch finds no accelerator here; use device='cpu'"
    assert readers == []


def test_a_process_takes_the_accelerator_of_its_number(monkeypatch):
    """torchrun numbers the processes of a machine; an index that is given goes before."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device_of("cuda") == torch.device("cuda", 3)
    assert device_of("cuda:1") == torch.device("cuda", 1)
    assert device_of(None) == torch.device("cuda", 3)
    assert device_of("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError) as caught:
        device_of("cuda:4")
    assert str(caught.value) == "device='cuda:4': index 4 of 4 accelerators here"


def test_a_plan_for_another_machine_is_not_loaded_here(tmp_path):
    path, registry = toy(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(path, device="cpu", config=LoadConfig(target="sm_90"), registry=registry)
    assert str(caught.value) == ("target='sm_90': this machine is 'cpu'; a plan for another can be made, not loaded")


def test_sizes_for_several_ranks_need_several_processes(tmp_path):
    path, registry = toy(tmp_path)
    with pytest.raises(ConfigError, match=r"^tp=2, but torch\.distributed is not initialised in this process; start "):
        load(path, device="cpu", tp=2, registry=registry)


# --- what is said ------------------------------------------------------------------------------------------------


def test_a_load_says_little_and_warns_of_nothing(tmp_path, caplog):
    """L-34: method, reason, tensors and seconds in at most 5 records of level INFO; nothing for each tensor."""
    with caplog.at_level(logging.DEBUG, "steelyard"):
        model = loaded(tmp_path, shards=2)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    summary = caplog.records[-1].getMessage()
    assert summary == model.report.summary()
    assert summary.startswith("loaded 6 tensors, ")
    assert " s (" in summary
    assert summary.endswith(
        "from safetensors by mmap: on the CPU a mapped file is copied once, and only pages that are touched are read"
    )


def test_one_record_states_the_effective_configuration_with_its_origins(tmp_path, caplog):
    """D-14: every value with where it came from; the report has the same."""

    class Stating(runnable(*NODES)):
        def defaults(self, config):
            return {"scale_grid": "strict", "vocab_padding": "off"}

    write_toy(tmp_path, TENSORS)
    config = LoadConfig(dtype="float32", vocab_padding="auto")
    with caplog.at_level(logging.INFO, "steelyard"):
        model = load(tmp_path, device="cpu", config=config, registry=registry_for(Stating))
    said = caplog.records[0].getMessage().split(", ")
    for entry in (
        "dtype=float32 (explicit)",
        "device=cpu (explicit)",
        "vocab_padding=auto (explicit)",
        "scale_grid=strict (family default)",
        "load_format=auto (default)",
        "reader=auto (default)",
        "tp=None (default)",
        "agreement.timeout=60.0 (default)",
    ):
        assert entry in said
    assert model.report.options["scale_grid"] == {"value": "strict", "origin": "family"}
    assert set(model.report.options) == set(plan(tmp_path, registry=registry_for(Stating)).options)


def test_debug_variables_of_other_loaders_change_nothing(tmp_path, monkeypatch):
    """L-27: no dump, no other result, no file; `load` asks no environment for them."""
    first = loaded(tmp_path / "c")
    files = sorted(path.name for path in (tmp_path / "c").iterdir())
    monkeypatch.chdir(tmp_path)
    for name in ("DUMP_WEIGHTS", "DUMP_TENSOR_SLICES", "DUMP_DIR", "STEELYARD_DEBUG"):
        monkeypatch.setenv(name, "1")
    second = loaded(tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    for mine, theirs in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_body_of_load_is_short_and_reads_no_environment():
    """L-27: fewer than 60 lines, without ``os.environ`` and without imports of its own."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(load))).body
    body = function.body[1:]
    assert body[-1].end_lineno - body[0].lineno < 60
    text = ast.unparse(ast.Module(body, []))
    assert "environ" not in text
    assert not [
        node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Import | ast.ImportFrom)
    ]


class Counting(dict):
    """An environment that counts what is asked of it."""

    def __init__(self, real):
        super().__init__(real)
        self.asked = []

    def __getitem__(self, key):
        self.asked.append(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.append(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.asked.append(key)
        return super().__contains__(key)


def test_a_forward_logs_nothing_and_asks_no_environment(tmp_path, caplog, monkeypatch):
    """X-21: a hundred forwards of layers that a load made; no record, no look at the environment."""
    nodes = (
        Embedding("embed", 10, HIDDEN, Placement.COLWISE),
        Norm("norm", HIDDEN),
        Linear("up", HIDDEN, (Part("", HIDDEN),), Placement.COLWISE, bias=True),
    )
    tensors = {
        "embed.weight": values(0, (10, HIDDEN)),
        "norm.weight": values(1, (HIDDEN,)),
        "up.weight": values(2, (HIDDEN, HIDDEN)),
        "up.bias": values(3, (HIDDEN,)),
    }
    model = loaded(tmp_path, tensors, *nodes).module.nodes
    ids = torch.arange(6).reshape(2, 3)
    expected = model["up"](model["norm"](model["embed"](ids)))
    counting = Counting(os.environ)
    monkeypatch.setattr(os, "environ", counting)
    with caplog.at_level(logging.DEBUG):
        caplog.clear()
        for _ in range(100):
            got = model["up"](model["norm"](model["embed"](ids)))
    assert torch.equal(got, expected)
    assert caplog.records == []
    assert counting.asked == []


def test_what_the_environment_says_after_a_load_has_no_effect_on_it(tmp_path, monkeypatch):
    """D-06: options are decided once, at the start; a second load decides anew."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = loaded(tmp_path)
    options = dict(model.report.options)
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("STEELYARD_BLOCK", "steelyard")
    assert dict(model.report.options) == options
    assert model.module.nodes["a"](torch.ones(1, HIDDEN)).shape == (1, 2 * ROWS)
    assert loaded(tmp_path).report.digest == model.report.digest


# --- every option has an effect ----------------------------------------------------------------------------------


def tp_reaches(folder):
    path, registry = toy(folder)
    assert plan(path, config=LoadConfig(tp=2), target="cpu", registry=registry).job.tp == 2
    assert load(path, device="cpu", config=LoadConfig(tp=1), registry=registry).plan.job.tp == 1


def ep_reaches(folder):
    path, registry = toy(folder)
    assert plan(path, config=LoadConfig(ep=3), target="cpu", registry=registry).job.ep == 3


def moe_tp_reaches(folder):
    path, registry = toy(folder)
    job = plan(path, config=LoadConfig(tp=4, ep=2, moe_tp=2), target="cpu", registry=registry).job
    assert (job.tp, job.ep, job.moe_tp) == (4, 2, 2)


def target_reaches(folder):
    path, registry = toy(folder)
    assert plan(path, config=LoadConfig(target="gfx942"), registry=registry).target == "gfx942"


def device_reaches(folder):
    path, registry = toy(folder)
    model = load(path, config=LoadConfig(device="cpu"), registry=registry)
    assert model.report.device == "cpu"
    assert {parameter.device.type for parameter in model.module.parameters()} == {"cpu"}


def dtype_reaches(folder):
    path, registry = toy(folder)
    for name in ("float32", "bfloat16", "float16"):
        model = load(path, device="cpu", config=LoadConfig(dtype=name), registry=registry)
        assert {parameter.dtype for parameter in model.module.parameters()} == {vars(torch)[name]}
    assert load(path, device="cpu", dtype="float16", registry=registry).report.dtype == "F16"


def load_format_reaches(folder):
    class Other:
        keys = ("other",)

        def claims(self, files):
            return Verdict(True)

        def open(self, checkpoint, way):
            raise LoadError("the other format was asked")

    path, registry = toy(folder, others=(("load format", Other),))
    with pytest.raises(LoadError, match="^the other format was asked$"):
        load(path, device="cpu", registry=registry)
    assert load(path, device="cpu", config=LoadConfig(load_format="safetensors"), registry=registry).report


def reader_reaches(folder):
    path, registry = toy(folder)
    for way in WAYS:
        report = load(path, device="cpu", config=LoadConfig(reader=way), registry=registry).report
        assert (report.reader, report.reader_reason) == (way, "asked for")
    assert load(path, device="cpu", registry=registry).report.reader == "mmap"


def kernels_reaches(folder):
    path, registry = toy(folder)
    for name in ("torch", "toy"):
        report = load(path, device="cpu", config=LoadConfig(kernels=(name,)), registry=registry).report
        assert {kernel.backend for kernel in report.kernels} == {name}


def prefer_reaches(folder):
    """Two distributions offer the family; the option says which, and the plan takes that one."""
    source = """
        from steelyard.plugin import hookimpl
        from support.loading import runnable
        from steelyard.plugin import Linear, Part, Placement
        class Family(runnable(*(Linear(s, 8, (Part("x", 12), Part("y", 12)), Placement.COLWISE) for s in "abc"))):
            keys = ("ToyForCausalLM",)
        @hookimpl
        def steelyard_models():
            return [Family]
    """
    write_toy(folder / "c", TENSORS)
    for name in ("first-toy", "second-toy"):
        module = name.replace("-", "_")
        write_distribution(
            folder, name, entry_points={"steelyard.models": {"ToyForCausalLM": module}},
            modules={f"{module}.py": source},
        )  # fmt: skip
    with importable(folder):
        registry = Registry.from_environment(path=[str(folder), *sys.path], block=())
        with pytest.raises(AmbiguousPlugin):
            load(folder / "c", device="cpu", registry=registry)
        for name in ("first-toy", "second-toy"):
            config = LoadConfig(prefer={"model": {"ToyForCausalLM": name}})
            assert name in load(folder / "c", device="cpu", config=config, registry=registry).report.plugins


def scale_grid_reaches(folder):
    hollow_d(folder, quant="FP8-B", intermediate_size=320)
    registry = registry_of(backends=(backend("toy", smallest_grid=16),))
    assert not planned(folder, registry=registry, tp=2).errors
    assert [one.code for one in planned(folder, registry=registry, tp=2, scale_grid="strict").errors] == ["cut", "cut"]


def experts_reaches(folder):
    hollow_m(folder)
    assert not planned(folder, ep=3).errors
    assert planned(folder, ep=3, experts="even").errors


def vocab_padding_reaches(folder):
    nodes = (Embedding("embed", 10, HIDDEN, Placement.COLWISE),)
    path, registry = toy(folder, {"embed.weight": values(0, (10, HIDDEN))}, *nodes)
    assert not plan(path, tp=4, target="cpu", registry=registry).errors
    assert plan(path, tp=4, target="cpu", config=LoadConfig(vocab_padding="off"), registry=registry).errors


def trust_files_reaches(folder):
    path, registry = toy(folder, config=QUANTIZED)
    with pytest.raises(PlanError):
        load(path, device="cpu", registry=registry)
    model = load(path, device="cpu", config=LoadConfig(trust_files=True), registry=registry)
    assert {finding.code for finding in model.report.findings} == {"plain-file"}


def strict_reaches(folder):
    path, registry = toy(folder, TENSORS | {"extra": np.zeros(2, np.float32)})
    with pytest.raises(PlanError):
        load(path, device="cpu", registry=registry)
    model = load(path, device="cpu", config=LoadConfig(strict=False), registry=registry)
    assert [finding.code for finding in model.report.findings] == ["unexpected"]


def strict_plugins_reaches(folder):
    """Beside a kernel plugin that cannot be imported the plan goes on with a note; strict, it does not."""
    write_toy(folder / "c", TENSORS)
    write_distribution(
        folder, "broken-kernels", entry_points={"steelyard.kernel_backends": {"broken": "broken_kernels"}},
        modules={"broken_kernels.py": "raise ImportError('no such library')"},
    )  # fmt: skip
    with importable(folder):

        def registry():
            made = Registry.from_environment(path=[str(folder), *sys.path], block=())
            made.add("model", runnable(*NODES))
            return made

        assert load(folder / "c", device="cpu", registry=registry()).report
        with pytest.raises(BrokenPlugin):
            load(folder / "c", device="cpu", config=LoadConfig(strict_plugins=True), registry=registry())


def keep_float32_reaches(folder):
    nodes = (*NODES, Norm("norm", HIDDEN))
    tensors = TENSORS | {"norm.weight": values(3, (HIDDEN,))}
    options = LoadConfig(dtype="bfloat16", keep_float32=("norm",))
    model = loaded(folder, tensors, *nodes, options=options).module.nodes
    assert model["norm"].weight.dtype == torch.float32
    assert weight_of(model["a"]).dtype == torch.bfloat16


def allow_missing_reaches(folder):
    path, registry = toy(folder, {name: one for name, one in TENSORS.items() if not name.startswith("c.")})
    with pytest.raises(PlanError):
        load(path, device="cpu", registry=registry)
    model = load(path, device="cpu", config=LoadConfig(allow_missing=("c.*",)), registry=registry)
    assert not weight_of(model.module.nodes["c"]).any()


def opened(folder, **times) -> tuple[float, float]:
    """Return the times with which a load opens the agreement of its ranks."""
    path, registry = toy(folder)
    seen = []
    real = Agreement.open

    def recorded(ranks, bound, *, heartbeat):
        seen.append((bound, heartbeat))
        return real(ranks, bound, heartbeat=heartbeat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader.Agreement, "open", staticmethod(recorded))
        load(path, device="cpu", config=LoadConfig(agreement=times), registry=registry)
    (only,) = seen
    return only


def agreement_timeout_reaches(folder):
    assert opened(folder, timeout=7.0) == (7.0, 1.0)


def agreement_heartbeat_reaches(folder):
    assert opened(folder, heartbeat=0.25) == (60.0, 0.25)
    assert (Limits(60.0, 0.25).interval, Limits(60.0).interval, Limits(5.0).interval) == (0.25, 1.0, 0.5)


EFFECTS = {
    name.removesuffix("_reaches").replace("agreement_", "agreement."): check
    for name, check in list(globals().items())
    if name.endswith("_reaches")
}


def test_every_option_stands_in_the_table():
    """D-13: a knob that is documented and in no test of its effect fails here."""
    fields = [name for name in LoadConfig.model_fields if name != "agreement"]
    inner = LoadConfig.model_fields["agreement"].annotation.model_fields
    assert set(EFFECTS) == {*fields, *(f"agreement.{name}" for name in inner)}


@pytest.mark.parametrize("option", EFFECTS)
def test_an_option_reaches_where_it_acts(tmp_path, option):
    """D-13: from the public surface to an effect."""
    EFFECTS[option](tmp_path)


def test_the_public_load_is_this_one():
    assert steelyard.load is load


def test_values_given_in_the_call_go_before_those_of_the_config(tmp_path):
    path, registry = toy(tmp_path)
    model = load(path, device="cpu", dtype="float16", config=LoadConfig(dtype="bfloat16"), registry=registry)
    assert model.report.dtype == "F16"


def test_a_constant_is_reported_as_one(tmp_path):
    model = loaded(tmp_path, TENSORS, *NODES, Norm("last", HIDDEN, absent=FillWith(1.0)))
    last = [one for one in model.report.parameters if one.stem == "last"]
    assert [(one.rule, one.detail) for one in last] == [("fill", "weight = 1")]


def test_bytes_that_were_received_and_read_are_told_apart(tmp_path):
    """The report's figures: what buffers received, and what files were asked for."""
    model = loaded(
        tmp_path, {"norm.weight": encode(np.ones(8), "BF16")}, Norm("norm", 8), options=LoadConfig(reader="pread")
    )
    rank = model.report.ranks[0]
    assert (rank.received, rank.read) == (16, 16)
