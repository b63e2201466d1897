import json
from dataclasses import FrozenInstanceError, replace
from io import StringIO

import pytest
from rich.console import Console

from steelyard.findings import Finding
from steelyard.report import KernelRecord, LoadReport, ParameterRecord, RankBytes, TensorRange, TieRecord

FILE = "model-00001-of-00002.safetensors"


def parameter(layer=0, part="q"):
    stem = f"layers.{layer}.attention.qkv"
    tensor = TensorRange(f"model.layers.{layer}.self_attn.{part}_proj.weight", FILE, 4096, 8192)
    return ParameterRecord(stem, part, "layout", "plain", (tensor,), "float.plain", "steelyard", "0.1.0")


def report():
    return LoadReport(
        checkpoint="/models/toy",
        digest="d1ge57",
        target="sm_90",
        device="cuda",
        dtype="BF16",
        load_format="safetensors",
        reader="pread",
        reader_reason="pages are cold",
        parameters=(
            parameter(),
            ParameterRecord("layers.0.attention.qkv.bias", "", "fill", "0.0"),
            ParameterRecord("lm_head", "", "alias", "embed_tokens"),
            ParameterRecord("layers.1.mlp", "gate", "layout", "plain", expert=3),
        ),
        kernels=(
            KernelRecord(
                "layers.0.attention.qkv", ("q", "k", "v"), "fp8.plain", "triton", "rows", (("deepgemm", "no"),)
            ),
            KernelRecord(
                "layers.1.attention.qkv", ("q", "k", "v"), "fp8.plain", "triton", "rows", (("deepgemm", "no"),)
            ),
            KernelRecord("lm_head", ("",), "float.plain", "torch", "plain", missing="no GPU here"),
        ),
        ranks=(
            RankBytes(0, 2_000_000_000, 2_100_000_000, 0.5, 3_000_000_000, 100_000_000),
            RankBytes(1, 2_000_000_000, 2_000_000_000, 0.4),
        ),
        ties=(TieRecord("lm_head", "embed_tokens", True), TieRecord("decoder.head", "embed_tokens", False)),
        dropped={"rotary.inv_freq": "computed from the config"},
        skipped=("pooler",),
        findings=(Finding("refined", "note", "x", "x: its [scale] grid is refined"),),
        options={"load_format": {"value": "safetensors", "origin": "family"}},
        plugins={"steelyard-quant-fp8": "0.3.1"},
        seconds=0.8,
    )


def printed(made):
    console = Console(width=200, file=StringIO())
    console.print(made)
    return console.file.getvalue()


def test_two_reports_of_one_load_are_equal_whatever_the_clock_and_memory_said():
    slow = replace(
        report(), seconds=99.0, ranks=tuple(replace(r, seconds=9.0, device_peak=1, host_peak=2) for r in report().ranks)
    )
    assert slow == report()
    assert slow.to_json() != report().to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "other"},
        {"ranks": (RankBytes(0, 1, 1),)},
        {"parameters": ()},
        {"kernels": ()},
        {"findings": ()},
        {"dropped": {}},
        {"reader": "mmap"},
    ],
    ids=str,
)
def test_reports_of_different_loads_differ(change):
    assert replace(report(), **change) != report()


def test_a_report_is_plain_data_that_json_keeps():
    again = json.loads(json.dumps(report().to_json()))
    assert again["parameters"][0] == {
        "stem": "layers.0.attention.qkv",
        "part": "q",
        "rule": "layout",
        "detail": "plain",
        "tensors": [
            {"name": "model.layers.0.self_attn.q_proj.weight", "file": FILE, "start": 4096, "stop": 8192},
        ],
        "method": "float.plain",
        "distribution": "steelyard",
        "version": "0.1.0",
        "expert": None,
    }
    assert again["ranks"][0] == {
        "rank": 0,
        "received": 2_000_000_000,
        "read": 2_100_000_000,
        "seconds": 0.5,
        "device_peak": 3_000_000_000,
        "host_peak": 100_000_000,
        "gigabytes_per_second": 4.0,
    }
    assert again["kernels"][0]["refusals"] == [["deepgemm", "no"]]
    assert again["ties"][1] == {"target": "decoder.head", "source": "embed_tokens", "is_shared": False}
    assert again["findings"][0]["code"] == "refined"
    assert again["options"] == {"load_format": {"value": "safetensors", "origin": "family"}}
    assert again["summary"] == report().summary()


def test_the_data_has_every_field():
    empty = LoadReport(checkpoint="", digest="", target="", device="", dtype="", load_format="", reader="").to_json()
    assert set(empty) == {*report().to_json()}
    assert {name: value for name, value in empty.items() if value} == {
        "summary": "loaded 0 tensors, 0 B, in 0.00 s from  by "
    }


def test_one_line_says_how_much_how_fast_how_and_why():
    """L-34: method, reason, number of tensors, seconds."""
    assert report().summary() == (
        "loaded 1 tensor, 4.00 GB, in 0.80 s (5.00 GB/s) from safetensors by pread: pages are cold"
    )


def test_no_time_taken_is_no_rate():
    assert RankBytes(0, 10, 10).gigabytes_per_second == 0.0
    assert "GB/s" not in replace(report(), seconds=0.0).summary()


def test_a_parameters_name_holds_expert_and_part():
    assert [one.name for one in report().parameters] == [
        "layers.0.attention.qkv.q",
        "layers.0.attention.qkv.bias",
        "lm_head",
        "layers.1.mlp.3.gate",
    ]


def test_a_record_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        parameter().stem = "x"
    with pytest.raises(FrozenInstanceError):
        report().digest = "x"


def test_the_table_shows_where_weights_came_from_and_what_it_cost():
    text = printed(report().table())
    for piece in (
        "loaded 1 tensor, 4.00 GB",
        "steelyard-quant-fp8 0.3.1",
        "d1ge57",
        "4096-8192",
        FILE,
        "float.plain steelyard 0.1.0",
        "alias embed_tokens",
        "2.10 GB",
        "4.00",
        "deepgemm: no",
        "cannot run here: no GPU here",
        "dropped: computed from the config",
        "shares the memory of embed_tokens",
        "is tied by the config, but differs in the file from embed_tokens",
        "not stored, and optional",
        "x: its [scale] grid is refined",
        "load_format",
    ):
        assert piece in text


def test_kernels_alike_share_a_row_with_their_count():
    rows = [line.split() for line in printed(report().table()).splitlines() if "fp8.plain" in line]
    assert [row[:4] for row in rows] == [["triton", "rows", "fp8.plain", "2"]]


def test_a_long_list_is_cut_with_a_count_unless_all_is_asked_for():
    many = replace(report(), parameters=tuple(parameter(layer) for layer in range(50)))
    assert "and 30 more" in printed(many.table())
    assert "layers.49.attention" not in printed(many.table())
    assert "layers.49.attention" in printed(many.table(parameters=None))
    assert len(many.to_json()["parameters"]) == 50


def test_names_from_a_file_are_neither_markup_nor_control_characters():
    """A published file must not be able to write to the terminal of who loads it."""
    text = printed(replace(report(), dropped={"a\x1b[31m[bold]b": "no\tuse"}).table())
    assert r"a\x1b[31m[bold]b" in text
    assert r"no\tuse" in text
    assert "\x1b" not in text
