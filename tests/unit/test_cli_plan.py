import json
import struct
from math import prod

import pytest
import typer
from typer.testing import CliRunner

from steelyard.blueprint import Blueprint, Embedding, Experts, Linear, Norm, Part, Placement, Tie
from steelyard.builtin.reference import TorchReference
from steelyard.builtin.unquantized import Unquantized
from steelyard.cli.explain import explain
from steelyard.cli.kernels import kernels
from steelyard.cli.plan import plan as plan_command
from steelyard.cli.render import preferences
from steelyard.layouts import Drop, Source
from steelyard.plan_table import plan_json
from steelyard.planning import plan
from steelyard.registry import default_registry, reset_default_registry
from steelyard.schemes import Accept, Verdict

HIDDEN, HEADS, KV_HEADS, VOCABULARY = 64, 4, 2, 100
Q, KV = 64, 32


class ToyMapping:
    """A fused qkv of three stored tensors, and a head that may be tied."""

    def names(self, node, part, expert):
        pieces = ("model", node.stem, "" if expert is None else str(expert), part)
        return (Source(".".join(piece for piece in pieces if piece)),)

    def drops(self, config):
        return (Drop("*.inv_freq", "a buffer that the model computes"),)


class Toy:
    """A model small enough that its figures can be worked out by hand."""

    keys = ("toy",)

    def blueprint(self, config):
        parts = (Part("q", Q, HEADS), Part("k", KV, KV_HEADS, kv=True), Part("v", KV, KV_HEADS, kv=True))
        vocabulary, moe = config.get("vocabulary", VOCABULARY), ()
        if "experts" in config:
            w13 = Linear("", HIDDEN, (Part("gate", 16), Part("up", 16)), Placement.COLWISE)
            moe = (Experts("moe", config["experts"], w13, Linear("", 16, (Part("down", HIDDEN),), Placement.ROWWISE)),)
        return Blueprint(
            (
                *moe,
                Embedding("embed", vocabulary, HIDDEN, Placement.COLWISE),
                *(Linear(f"layers.{i}.qkv", HIDDEN, parts, Placement.COLWISE, layer=i) for i in range(2)),
                *(Linear(f"layers.{i}.o", Q, (Part("", HIDDEN),), Placement.ROWWISE, layer=i) for i in range(2)),
                Norm("norm", HIDDEN),
                Norm("extra", HIDDEN, absent="skip"),
                Linear("head", HIDDEN, (Part("", vocabulary, padded=True),), Placement.COLWISE),
            ),
            (Tie("head", "embed"),) if config.get("tie_word_embeddings") else (),
        )

    def mapping(self, config):
        return ToyMapping()

    def defaults(self, config):
        return {"scale_grid": "strict"}

    def lora_targets(self):
        return {}


class Picky:
    """A backend that serves one target and has not been built here."""

    keys = ("picky",)

    def serves(self, target):
        return Verdict(target == "sm_90", "" if target == "sm_90" else f"has no kernels for {target}")

    def installed(self):
        return Verdict(False, "its library is not built")

    def accepts(self, scheme, node, target):
        return Accept(Verdict(False, "takes no plain floats"))


def tensors(vocabulary=VOCABULARY):
    """Return every stored tensor of the toy with its shape; all are BF16."""
    found = {"model.embed.weight": (vocabulary, HIDDEN), "model.head.weight": (vocabulary, HIDDEN)}
    for i in range(2):
        found |= {f"model.layers.{i}.qkv.{part}.weight": (n, HIDDEN) for part, n in (("q", Q), ("k", KV), ("v", KV))}
        found[f"model.layers.{i}.o.weight"] = (HIDDEN, Q)
    return {**found, "model.norm.weight": (HIDDEN,), "model.rotary.inv_freq": (8,)}


def write(folder, shapes, **config):
    header, start = {}, 0
    for name, shape in shapes.items():
        stop = start + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))
    config = {"model_type": "toy", "torch_dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return write(tmp_path, tensors())


@pytest.fixture(autouse=True)
def _registry():
    reset_default_registry()
    registry = default_registry()
    registry.add("model", Toy, override=True)
    registry.add("quant method", Unquantized, override=True)
    for backend in (TorchReference, Picky):
        registry.add("kernel backend", backend, override=True)
    yield
    reset_default_registry()


def run(name, *arguments):
    """Run one command line and return its exit code and what it printed."""
    alone = typer.Typer()
    alone.command(name)({"plan": plan_command, "kernels": kernels, "explain": explain}[name])
    return CliRunner().invoke(alone, [str(one) for one in arguments])


def as_json(done):
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


# --- plan --------------------------------------------------------------------------------------------


def test_a_plan_says_what_each_rank_needs_reads_and_holds(checkpoint):
    done = run("plan", checkpoint, "--target", "cpu", "--tp", 2, "--json")
    data = as_json(done)
    assert done.exit_code == 0
    half = 2 * (VOCABULARY * HIDDEN * 2 // 2 + 2 * ((Q + 2 * KV) * HIDDEN // 2 + HIDDEN * Q // 2))
    for rank, found in enumerate(data["ranks"]):
        assert found["rank"] == rank
        assert found["bytes_needed"] == found["final"] == half + 2 * HIDDEN
        assert found["bytes_read"] >= found["bytes_needed"]
        assert found["peak"] > found["final"]
    assert data["job"] == {"world": 2, "tp": 2, "ep": 1, "moe_tp": 2}
    assert (data["family"], data["target"], data["dtype"], data["ok"]) == ("toy", "cpu", "BF16", True)
    assert data["tensors"] == len(tensors())
    assert data["dropped"] == {"model.rotary.inv_freq": "a buffer that the model computes"}
    assert data["skipped"] == ["extra"]
    assert data["options"]["scale_grid"] == {"value": "strict", "origin": "family"}
    assert data["options"]["tp"] == {"value": 2, "origin": "explicit"}
    assert len(data["digest"]) == 64


def test_a_plan_says_which_kernel_runs_each_segment_and_what_was_refused(checkpoint):
    rows = as_json(run("plan", checkpoint, "--target", "cpu", "--json"))["kernels"]
    assert rows[0] == {
        "stem": "layers.0.qkv",
        "parts": ["q", "k", "v"],
        "scheme": "float.plain",
        "backend": "torch",
        "form": "dense",
        "refusals": [["picky", "has no kernels for cpu"]],
        "missing": "",
    }
    assert [one["stem"] for one in rows] == ["layers.0.qkv", "layers.1.qkv", "layers.0.o", "layers.1.o", "head"]


def test_the_table_shows_ranks_kernels_and_what_is_left_out(checkpoint):
    done = run("plan", checkpoint, "--target", "cpu", "--tp", 2)
    assert done.exit_code == 0, done.output
    for piece in (
        "toy, 12 tensors, 7 nodes",
        "tp_size=2, ep_size=1, moe_tp=2, world=2, target=cpu, dtype=BF16",
        "0-1",
        "picky: has no kernels for cpu",
        "layers.0.qkv",
        "model.rotary.inv_freq",
        "a buffer that the model computes",
    ):
        assert piece in done.stdout
    assert "errors" not in done.stdout


@pytest.mark.parametrize(("memory", "code"), [("1GB", 0), ("10kB", 1)])
def test_a_plan_that_does_not_fit_ends_with_one(checkpoint, memory, code):
    done = run("plan", checkpoint, "--target", "cpu", "--fits", memory)
    assert done.exit_code == code
    assert ("does not fit: the largest peak is" in done.stdout) == bool(code)
    data = as_json(run("plan", checkpoint, "--target", "cpu", "--fits", memory, "--json"))
    assert data["fits"] is not bool(code)


def test_the_exact_peak_fits_and_a_byte_less_does_not(checkpoint):
    peak = as_json(run("plan", checkpoint, "--target", "cpu", "--json"))["ranks"][0]["peak"]
    assert run("plan", checkpoint, "--target", "cpu", "--fits", peak).exit_code == 0
    assert run("plan", checkpoint, "--target", "cpu", "--fits", peak - 1).exit_code == 1


def test_a_checkpoint_with_something_missing_ends_with_one_and_says_what(tmp_path):
    shapes = tensors()
    del shapes["model.norm.weight"]
    write(tmp_path, {**shapes, "stray": (2,)})
    done = run("plan", tmp_path, "--target", "cpu", "--fits", "1GB")
    assert done.exit_code == 1
    assert "missing tensor model.norm.weight" in done.stdout
    assert "unexpected tensor stray" in done.stdout
    data = as_json(run("plan", tmp_path, "--target", "cpu", "--fits", "1GB", "--json"))
    assert (data["ok"], data["fits"], data["ranks"]) == (False, False, [])
    assert {one["code"] for one in data["findings"] if one["severity"] == "error"} == {"missing", "unexpected"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tp", 0], "tp=0 must be at least 1"),
        (["--tp", 2, "--world", 3], "world=3 is not a multiple of tp=2"),
        (["--scale-grid", "fine"], "must be one of 'refine', 'strict'"),
        (["--fits", "much"], "--fits='much' is no size"),
        (["--prefer", "model"], "is not KIND:KEY=DISTRIBUTION"),
        (["--prefer", "modle:toy=x"], "did you mean prefer.model?"),
        (["--dtype", "int8"], "must be one of 'auto'"),
        (["--nonsense"], "No such option"),
    ],
    ids=str,
)
def test_wrong_usage_ends_with_two_and_says_what_is_wrong(checkpoint, arguments, text):
    done = run("plan", checkpoint, *arguments)
    assert done.exit_code == 2
    said = " ".join(piece for piece in done.output.replace("│", " ").split() if piece)
    assert text in said


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (["--dtype", "float32"], "dtype", "float32"),
        (["--kernel", "torch"], "kernels", ["torch"]),
        (["--experts", "even"], "experts", "even"),
        (["--vocab-padding", "off"], "vocab_padding", "off"),
        (["--scale-grid", "refine"], "scale_grid", "refine"),
    ],
)
def test_each_option_reaches_the_plan(checkpoint, arguments, path, value):
    """D-13, as far as the command line goes."""
    data = as_json(run("plan", checkpoint, "--target", "cpu", *arguments, "--json"))
    assert data["options"][path] == {"value": value, "origin": "explicit"}


def test_a_padded_vocabulary_is_a_note_and_an_error_where_it_is_off(tmp_path):
    """P-14, D-13."""
    write(tmp_path, tensors(99), vocabulary=99)
    padded = run("plan", tmp_path, "--target", "cpu", "--tp", 2)
    assert padded.exit_code == 0
    assert "head: padded to 2 x 50 rows with zeros" in padded.stdout
    off = run("plan", tmp_path, "--target", "cpu", "--tp", 2, "--vocab-padding", "off")
    assert off.exit_code == 1
    assert "a vocabulary of 99 does not divide by tp 2; pad it to 100" in off.stdout


def test_preferences_of_one_kind_stand_together():
    assert preferences(["model:a=x", "model:b.c=y", "quant method:fp8.plain=z"]) == {
        "model": {"a": "x", "b.c": "y"},
        "quant method": {"fp8.plain": "z"},
    }


def test_a_plans_data_leaves_out_what_was_not_asked(checkpoint):
    data = plan_json(plan(checkpoint, target="cpu"))
    assert not {"budget", "fits"} & set(data)
    json.dumps(data)


# --- kernels -----------------------------------------------------------------------------------------


def test_kernels_says_of_each_backend_whether_it_serves_and_runs():
    data = as_json(run("kernels", "--target", "gfx942", "--json"))
    assert data["target"] == "gfx942"
    found = {row["key"]: row for row in data["kernels"]}
    assert (found["picky"]["serves"], found["picky"]["serves_why"]) == (False, "has no kernels for gfx942")
    assert (found["picky"]["installed"], found["picky"]["installed_why"]) == (False, "its library is not built")
    assert found["torch"]["serves"] is True


def test_the_table_of_kernels_holds_the_reasons():
    done = run("kernels", "--target", "sm_90")
    assert done.exit_code == 0
    assert "serves sm_90" in done.stdout
    assert "no: its library is not built" in done.stdout


# --- explain -----------------------------------------------------------------------------------------


def test_explain_says_who_uses_a_tensor_and_every_ranks_piece(checkpoint):
    data = as_json(run("explain", checkpoint, "model.layers.1.qkv.k.weight", "--tp", 4, "--target", "cpu", "--json"))
    (use,) = data["uses"]
    assert (data["is"], data["dtype"], data["shape"], data["file"]) == (
        "used",
        "BF16",
        [KV, HIDDEN],
        "model.safetensors",
    )
    assert (use["stem"], use["part"], use["layout"], use["dims"]) == ("layers.1.qkv", "k", "plain", "[out, in]")
    assert (use["scheme"], use["method"], use["kernel"]["backend"]) == ("float.plain", "Unquantized", "torch")
    assert use["kernel"]["refusals"] == {"picky": "has no kernels for cpu"}
    assert use["segment"] == {"index": 0, "parts": ["q", "k", "v"], "steps": {}}
    assert [(piece["rank"], piece["cut"], piece["into"], piece["bytes"]) for piece in data["ranks"]] == [
        (0, "[0:16, 0:64]", "[16:32, 0:64]", 2048),
        (1, "[0:16, 0:64]", "[16:32, 0:64]", 2048),
        (2, "[16:32, 0:64]", "[16:32, 0:64]", 2048),
        (3, "[16:32, 0:64]", "[16:32, 0:64]", 2048),
    ]


def test_explain_of_one_rank_shows_that_rank_alone(checkpoint):
    done = run("explain", checkpoint, "model.layers.0.o.weight", "--tp", 2, "--rank", 1, "--target", "cpu", "--json")
    assert [(piece["rank"], piece["slices"]) for piece in as_json(done)["ranks"]] == [
        (1, [[0, 64, 0, 1], [32, 32, 0, 1]])
    ]
    wrong = run("explain", checkpoint, "model.norm.weight", "--tp", 2, "--rank", 2)
    assert wrong.exit_code == 2


def test_explain_of_a_node_shows_all_its_tensors(checkpoint):
    data = as_json(run("explain", checkpoint, "layers.0.qkv", "--target", "cpu", "--json"))
    assert data["is"] == "node"
    assert [use["tensor"] for use in data["uses"]] == [f"model.layers.0.qkv.{part}.weight" for part in "qkv"]
    assert [piece["into"] for piece in data["ranks"]] == ["[0:64, 0:64]", "[64:96, 0:64]", "[96:128, 0:64]"]


def test_explain_of_a_padded_head_shows_the_constant(tmp_path):
    write(tmp_path, tensors(99), vocabulary=99)
    data = as_json(run("explain", tmp_path, "head", "--tp", 2, "--target", "cpu", "--json"))
    assert [(piece["rank"], piece.get("cut"), piece.get("fill"), piece["into"]) for piece in data["ranks"]] == [
        (0, "[0:50, 0:64]", None, "[0:50, 0:64]"),
        (1, "[50:99, 0:64]", None, "[0:49, 0:64]"),
        (1, None, 0.0, "[49:50, 0:64]"),
    ]
    assert "constant 0.0" in run("explain", tmp_path, "head", "--tp", 2, "--target", "cpu").stdout


def test_explain_of_a_norm_needs_no_kernel(checkpoint):
    data = as_json(run("explain", checkpoint, "norm", "--target", "cpu", "--json"))
    assert data["uses"][0]["kernel"] is None


def test_explain_of_an_experts_tensor_names_the_one_rank_that_holds_it(tmp_path):
    experts = {f"model.moe.{e}.{part}.weight": (16, HIDDEN) for e in range(4) for part in ("gate", "up")}
    experts |= {f"model.moe.{e}.down.weight": (HIDDEN, 16) for e in range(4)}
    write(tmp_path, {**tensors(), **experts}, experts=4)
    name = "model.moe.3.up.weight"
    data = as_json(run("explain", tmp_path, name, "--ep", 2, "--target", "cpu", "--json"))
    (use,) = data["uses"]
    assert (use["stem"], use["part"], use["expert"], use["scheme"]) == ("moe", "up", 3, "float.plain.experts")
    assert [(piece["rank"], piece["expert"], piece["into"]) for piece in data["ranks"]] == [
        (1, 3, "[1:2, 16:32, 0:64]")
    ]


def test_explain_says_why_a_tensor_is_left_out(checkpoint):
    done = run("explain", checkpoint, "model.rotary.inv_freq", "--target", "cpu")
    assert done.exit_code == 0
    assert "left out: a buffer that the model computes" in done.stdout


def test_explain_of_an_optional_node_that_is_not_stored_says_so(checkpoint):
    done = run("explain", checkpoint, "extra", "--target", "cpu")
    assert done.exit_code == 0
    assert "an optional node that is not stored" in done.stdout


def test_explain_of_a_tied_head_names_what_it_uses(tmp_path):
    shapes = tensors()
    del shapes["model.head.weight"]
    write(tmp_path, shapes, tie_word_embeddings=True)
    done = run("explain", tmp_path, "head", "--target", "cpu")
    assert done.exit_code == 0
    assert "head uses the weights of embed" in done.stdout


def test_explain_of_an_unused_tensor_shows_the_finding(tmp_path):
    write(tmp_path, {**tensors(), "stray": (2,)})
    data = as_json(run("explain", tmp_path, "stray", "--target", "cpu", "--json"))
    assert (data["is"], [one["code"] for one in data["findings"]]) == ("unused", ["unexpected"])
    used = as_json(run("explain", tmp_path, "model.norm.weight", "--target", "cpu", "--json"))
    assert (used["ranks"], used["no_ranks_because"]) == ([], "the plan has 1 error")


def test_explain_of_an_unknown_name_proposes_the_closest_and_ends_with_one(checkpoint):
    done = run("explain", checkpoint, "model.layers.0.qkv.q.wieght", "--target", "cpu", "--json")
    assert done.exit_code == 1
    assert as_json(done)["closest"][0] == "model.layers.0.qkv.q.weight"


def test_the_table_of_an_explanation_holds_cuts_and_kernels(checkpoint):
    done = run("explain", checkpoint, "layers.0.qkv", "--tp", 2, "--target", "cpu")
    assert done.exit_code == 0, done.output
    for piece in ("[32:64, 0:64]", "torch (dense)", "has no kernels for cpu", "Unquantized", "float.plain"):
        assert piece in done.stdout
