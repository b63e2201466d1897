"""Checkpoints that are sound: what is read, chosen and ignored."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping

import numpy as np
import pytest

from steelyard.checkpoint import Checkpoint, Ignored, quantization_config
from steelyard.errors import BadConfig, CheckpointError, ConfigError, NoWeights
from support.checkpoints import (
    FP8_BLOCK,
    TOY_D_CONFIG,
    encode,
    toy_b,
    toy_d,
    toy_d_tensors,
    write_config,
    write_safetensors,
    write_shards,
)

CONVERT = (
    "no load format for .bin, .pt, .pth is installed. Convert it once, with transformers: "
    "AutoModel.from_pretrained(folder).save_pretrained(target, safe_serialization=True)"
)


def stored(checkpoint, name):
    """Return a tensor's bytes, found by its entry."""
    entry = checkpoint.entries[name]
    with checkpoint.files[entry.file].path.open("rb") as stream:
        stream.seek(entry.start)
        return stream.read(entry.nbytes)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_every_tensor_is_found_in_its_file(shards, index, tmp_path):
    """L-17: one file, and shards with and without an index."""
    checkpoint = Checkpoint.open(toy_d(tmp_path, shards=shards, index=index))
    tensors = toy_d_tensors()
    assert set(checkpoint.entries) == set(tensors)
    for name, (code, shape, raw) in tensors.items():
        entry = checkpoint.entries[name]
        assert (entry.name, entry.dtype, entry.shape) == (name, code, shape)
        assert stored(checkpoint, name) == raw
    assert len(checkpoint.files) == shards
    assert checkpoint.ignored == ()
    assert checkpoint.source == (
        "single file model.safetensors"
        if shards == 1
        else "index file model.safetensors.index.json"
        if index
        else "numbered shards"
    )


def test_the_config_is_read_whole_and_cannot_be_changed(tmp_path):
    folder = toy_b(tmp_path)
    checkpoint = Checkpoint.open(str(folder))
    raw = (folder / "config.json").read_bytes()
    assert checkpoint.folder == folder
    assert dict(checkpoint.config) == json.loads(raw)
    assert checkpoint.config_bytes_hash == hashlib.sha256(raw).hexdigest()
    with pytest.raises(TypeError):
        checkpoint.config["hidden_size"] = 1


def test_identity_is_the_same_wherever_the_checkpoint_lies(tmp_path):
    """Names, header hashes and sizes; no path, no time, no inode."""
    first = toy_d(tmp_path / "a", shards=3)
    shutil.copytree(first, tmp_path / "b")
    for name in os.listdir(tmp_path / "b"):
        os.utime(tmp_path / "b" / name, (1, 1))
    one, two = Checkpoint.open(first), Checkpoint.open(tmp_path / "b")
    assert one.identity() == two.identity() == tuple(sorted(one.identity()))
    assert [name for name, _, _ in one.identity()] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [size for _, _, size in one.identity()] == [file.path.stat().st_size for file in one.files]
    write_shards(first, {**toy_d_tensors(), "lm_head.weight": np.zeros((96, 256), dtype=np.float32)}, 3)
    assert Checkpoint.open(first).identity() != two.identity()


def test_other_names_of_an_index_are_taken_if_there_is_one(tmp_path):
    toy_d(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "weights.safetensors.index.json")
    assert Checkpoint.open(tmp_path).source == "index file weights.safetensors.index.json"


def test_the_index_wins_over_a_consolidated_copy(tmp_path):
    """R143: the copy holds other names and values + 1, and is not opened: it is not even a sound file."""
    toy_d(tmp_path, shards=2)
    copies = {"layers.0.attention.wq.weight": encode(np.ones((2, 2)), "BF16")}
    write_safetensors(tmp_path / "consolidated.safetensors", copies)
    (tmp_path / "consolidated-2.safetensors").write_bytes(b"damaged")
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.entries) == set(toy_d_tensors())
    assert stored(checkpoint, "model.norm.weight") == toy_d_tensors()["model.norm.weight"][2]
    reason = "model.safetensors.index.json does not name it"
    assert checkpoint.ignored == (
        Ignored("consolidated-2.safetensors", reason),
        Ignored("consolidated.safetensors", reason),
    )


def test_without_an_index_a_consolidated_copy_is_ignored_too(tmp_path):
    """R143, O-07."""
    toy_d(tmp_path, shards=2, index=False)
    (tmp_path / "consolidated.safetensors").write_bytes(b"damaged")
    (tmp_path / "consolidated.safetensors.index.json").write_text("damaged")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.source == "numbered shards"
    assert checkpoint.ignored == (Ignored("consolidated.safetensors", "a consolidated copy"),)


def test_a_consolidated_file_alone_is_read(tmp_path):
    write_config(tmp_path, {"model_type": "x"})
    write_safetensors(tmp_path / "consolidated.safetensors", {"a": np.zeros(2, dtype=np.float32)})
    assert Checkpoint.open(tmp_path).source == "single file consolidated.safetensors"


def test_safetensors_are_preferred_over_pickles(tmp_path):
    """L-17: only the safetensors file is opened; training leftovers are no weights."""
    toy_d(tmp_path)
    for name in ("pytorch_model.bin", "extra.pt", "optimizer.pt", "training_args.bin"):
        (tmp_path / name).write_bytes(b"never read")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.source == "single file model.safetensors"
    assert checkpoint.ignored == (
        Ignored("extra.pt", ".safetensors files are preferred"),
        Ignored("pytorch_model.bin", ".safetensors files are preferred"),
    )


def test_only_the_exact_suffix_makes_a_file_of_weights(tmp_path):
    """R140, R149: names that contain the word are left alone; the .bin is refused clearly."""
    write_config(tmp_path, TOY_D_CONFIG)
    names = ["notes_safetensors.json", "model.safetensors.bak", "._model.safetensors", "model.safetensors.lock"]
    for name in [*names, "pytorch_model.bin"]:
        (tmp_path / name).write_bytes(b"left alone")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value) == f"{tmp_path}: holds pytorch_model.bin and no .safetensors file; {CONVERT}"
    assert all((tmp_path / name).read_bytes() == b"left alone" for name in names)
    toy_d(tmp_path)
    assert [file.name for file in Checkpoint.open(tmp_path).files] == ["model.safetensors"]


@pytest.mark.parametrize("names", [(), ("optimizer.pt", "training_args.bin", "notes.txt")], ids=["empty", "leftovers"])
def test_a_folder_without_weights_says_what_was_looked_for(names, tmp_path):
    """L-17, O-07."""
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileNotFoundError) as caught:
        Checkpoint.open(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: no weights: looked for model.safetensors.index.json, *.safetensors.index.json, *.safetensors, "
        "*.bin, *.pt, *.pth"
    )
    assert isinstance(caught.value, NoWeights)
    assert isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float16"}, "F16"),
        ({"torch_dtype": "float32"}, "F32"),
        ({"torch_dtype": "torch.float32"}, "F32"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "F32"),
        ({"text_config": {"dtype": "float16"}}, "F16"),
        ({"dtype": None, "text_config": {"torch_dtype": "float16"}}, "F16"),
        ({}, "BF16"),
        ({"dtype": "auto"}, "BF16"),
        ({"dtype": "int32"}, "BF16"),
        ({"dtype": 5, "text_config": [1]}, "BF16"),
    ],
)
def test_the_dtype_is_the_configs_or_the_first_floats(config, expected, tmp_path):
    """R157: a packed integer and a scale come first in the file, and neither is the model's dtype."""
    write_config(tmp_path, config)
    tensors = {
        "a.weight_packed": np.zeros((2, 2), dtype=np.int32),
        "a.weight_scale": np.zeros((2, 1), dtype=np.float32),
        "b.scales": np.zeros((2, 1), dtype=np.float16),
        "c.weight": ("F8_E4M3", (4,), bytes(4)),
        "d.weight": np.zeros(2, dtype=np.float64),
        "norm.weight": encode(np.ones(4), "BF16"),
        "z.weight": np.zeros(2, dtype=np.float32),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert Checkpoint.open(tmp_path).dtype_hint() == expected


def test_a_packed_checkpoint_has_the_dtype_of_its_norms(tmp_path):
    """R157: TOY-D CT-W4 with weight_packed first and no dtype in the config; the packed data keep their own."""
    folder = toy_d(tmp_path, quant="CT-W4", config={"torch_dtype": None})
    tensors = toy_d_tensors(quant="CT-W4")
    write_shards(folder, dict(sorted(tensors.items(), key=lambda item: not item[0].endswith("weight_packed"))))
    checkpoint = Checkpoint.open(folder)
    first = next(iter(checkpoint.entries.values()))
    assert (first.name, first.dtype) == ("model.layers.0.mlp.down_proj.weight_packed", "I32")
    assert checkpoint.dtype_hint() == "BF16"
    assert stored(checkpoint, first.name) == tensors[first.name].tobytes()


def test_no_dtype_anywhere_is_an_error(tmp_path):
    write_config(tmp_path, {})
    write_safetensors(tmp_path / "model.safetensors", {"a.scale": np.zeros(2, dtype=np.float32)})
    with pytest.raises(BadConfig) as caught:
        Checkpoint.open(tmp_path).dtype_hint()
    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: states no dtype, and no tensor but scales is stored as F32, BF16, F16; "
        "state the dtype"
    )


AWQ = {"quant_method": "awq", "bits": 4}
NO = [None, {}, "", " ", "none", {"quant_method": ""}, {"quant_method": "  "}, {"quant_method": "None"}]


def found(folder, config, files=None):
    write_config(folder, config)
    for name, content in (files or {}).items():
        (folder / name).write_text(json.dumps(content))
    write_safetensors(folder / "model.safetensors", {"a": np.zeros(2, dtype=np.float32)})
    return quantization_config(Checkpoint.open(folder))


@pytest.mark.parametrize("value", NO, ids=repr)
def test_an_empty_quantization_config_is_none(value, tmp_path):
    """L-04: at every place where it may stand."""
    for number, config in enumerate(
        [
            {"quantization_config": value},
            {"text_config": {"quantization_config": value}},
            {"compression_config": value},
        ]
    ):
        assert found(tmp_path / str(number), config) is None
    assert found(tmp_path / "side", {}, {"quantize_config.json": value}) is None


def test_no_quantization_config_is_none(tmp_path):
    """L-04."""
    assert found(tmp_path, {}) is None


@pytest.mark.parametrize(
    ("config", "files", "source"),
    [
        ({"quantization_config": AWQ}, {}, "config.json: quantization_config"),
        ({"text_config": {"quantization_config": AWQ}}, {}, "config.json: text_config.quantization_config"),
        ({"compression_config": AWQ}, {}, "config.json: compression_config"),
        ({}, {"hf_quant_config.json": AWQ}, "hf_quant_config.json"),
        ({}, {"quantize_config.json": AWQ}, "quantize_config.json"),
        ({}, {"quant_config.json": AWQ}, "quant_config.json"),
        ({}, {"quantization_config.json": AWQ}, "quantization_config.json"),
        ({"quantization_config": AWQ, "text_config": {"quantization_config": AWQ}}, {}, "config.json: quantization_config"),
        ({"quantization_config": {}, "text_config": {"quantization_config": AWQ}}, {}, "config.json: text_config.quantization_config"),
        ({"quantization_config": AWQ}, {"quantize_config.json": FP8_BLOCK}, "config.json: quantization_config"),
        ({"quantization_config": None}, {"quantize_config.json": AWQ}, "quantize_config.json"),
        ({}, {"quant_config.json": FP8_BLOCK, "hf_quant_config.json": AWQ}, "hf_quant_config.json"),
    ],
)  # fmt: skip
def test_the_quantization_config_is_looked_for_in_order(config, files, source, tmp_path):
    """The first place that says something answers."""
    assert found(tmp_path, config, files) == (AWQ, source)


@pytest.mark.parametrize("other", [FP8_BLOCK, {"quant_method": "none"}], ids=["fp8", "none"])
def test_two_quantization_configs_that_differ_are_an_error(other, tmp_path):
    config = {"quantization_config": AWQ, "text_config": {"quantization_config": other}}
    with pytest.raises(BadConfig) as caught:
        found(tmp_path, config)
    keys = ", ".join(sorted({"bits", "quant_method"} | set(other)))
    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: quantization_config and text_config.quantization_config differ in {keys}; "
        "keep the one that the weights were made with"
    )


def test_a_quantization_config_of_another_type_is_an_error(tmp_path):
    with pytest.raises(BadConfig) as caught:
        found(tmp_path, {"quantization_config": "awq"})
    assert str(caught.value) == (f"{tmp_path / 'config.json'}: quantization_config must be a JSON object, not a string")


def test_a_method_that_is_null_is_not_taken_for_unquantized(tmp_path):
    """L-04: a config with settings says that something is quantized."""
    assert found(tmp_path, {"quantization_config": {"quant_method": None, "bits": 4}}) is not None


def test_side_files_are_read_when_they_are_looked_up(tmp_path):
    folder = toy_d(tmp_path, shards=2)
    (folder / "generation_config.json").write_text('{"top_k": 5}')
    (folder / "broken.json").write_text("{")
    (folder / "notes.txt").write_text("")
    checkpoint = Checkpoint.open(folder)
    files = checkpoint.side_files()
    assert isinstance(files, Mapping)
    assert list(files) == ["broken.json", "generation_config.json"]
    assert len(files) == 2
    assert files["generation_config.json"] == {"top_k": 5}
    assert files["generation_config.json"] is files["generation_config.json"]
    assert "config.json" not in files
    assert files.get("notes.txt") is None
    with pytest.raises(BadConfig):
        files["broken.json"]
    assert checkpoint.has("notes.txt")
    assert not checkpoint.has("absent.json")
    assert checkpoint.json("generation_config.json") == {"top_k": 5}


@pytest.mark.parametrize("name", ["absent.json", "../config.json", "/etc/hostname", ""])
def test_a_json_file_that_is_not_in_the_folder_is_an_error(name, tmp_path):
    """X-22: no way out of the folder."""
    checkpoint = Checkpoint.open(toy_b(tmp_path / "a"))
    write_config(tmp_path, {})
    with pytest.raises(BadConfig) as caught:
        checkpoint.json(name)
    assert str(caught.value) == f"{tmp_path / 'a' / name}: is absent"


CONFIGS = {
    "cut": (b'{"a": ', "is not JSON: Expecting value at line 1, column 7; fetch the file again"),
    "empty": (b"", "is not JSON: Expecting value at line 1, column 1; fetch the file again"),
    "latin-1": (b'{"a": "\xe9"}', "is not UTF-8 at byte 7; fetch the file again"),
    "list": (b"[]", "must be a JSON object, not a list; fetch the file again"),
    "null": (b"null", "must be a JSON object, not null; fetch the file again"),
    "number": (b"5", "must be a JSON object, not a number; fetch the file again"),
    "double": (b'{"a": 1, "a": 2}', "gives a twice, with different values"),
    "nested": (b'{"a":' * 100_000, "is nested too deeply"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_read_is_named(case, tmp_path):
    """The whole message of each."""
    raw, why = CONFIGS[case]
    folder = toy_b(tmp_path)
    (folder / "config.json").write_bytes(raw)
    with pytest.raises(BadConfig) as caught:
        Checkpoint.open(folder)
    assert str(caught.value) == f"{folder / 'config.json'}: {why}"
    assert isinstance(caught.value, ConfigError)


def test_a_name_twice_with_one_value_is_let_through(tmp_path):
    folder = toy_b(tmp_path)
    (folder / "config.json").write_text('{"model_type": "bert", "model_type": "bert"}')
    assert Checkpoint.open(folder).config == {"model_type": "bert"}


def test_a_missing_config_says_where_it_comes_from(tmp_path):
    folder = toy_b(tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(BadConfig) as caught:
        Checkpoint.open(folder)
    assert str(caught.value) == (
        f"{folder / 'config.json'}: is absent; it says what model this is: fetch it from where the weights came from"
    )
