"""``steelyard inspect``: what it says, as JSON and for people."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from steelyard.checkpoint import Checkpoint
from steelyard.cli.inspect import describe, inspect
from steelyard.errors import NoWeights
from support.checkpoints import toy_d, write_config, write_safetensors


def test_json_says_what_the_checkpoint_is(tmp_path, capsys):
    folder = toy_d(tmp_path, quant="FP8-B", shards=2)
    (folder / "consolidated.safetensors").write_bytes(b"never read")
    inspect(str(folder), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found == describe(Checkpoint.open(folder))
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert (found["model_type"], found["dtype"]) == ("llama", "BF16")
    assert found["quantization"] == {"method": "fp8", "source": "config.json: quantization_config"}
    assert (found["tensors"], found["bytes"]) == (35, 1674112)
    assert found["dtypes"] == {
        "BF16": {"tensors": 7, "bytes": 100864},
        "F32": {"tensors": 14, "bytes": 384},
        "F8_E4M3": {"tensors": 14, "bytes": 1572864},
    }
    assert found["largest"][0] == {
        "name": "model.layers.0.mlp.down_proj.weight",
        "dtype": "F8_E4M3",
        "shape": [256, 512],
        "bytes": 131072,
    }
    assert [file["tensors"] for file in found["files"]] == [18, 17]
    assert found["files"][0]["metadata"] == {"format": "pt"}
    reason = "model.safetensors.index.json does not name it"
    assert found["ignored"] == [{"name": "consolidated.safetensors", "reason": reason}]


def test_people_read_the_same(tmp_path, capsys):
    folder = toy_d(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    inspect(str(folder))
    text = capsys.readouterr().out
    for line in (
        f"folder:       {folder}",
        "architecture: LlamaForCausalLM",
        "model type:   llama",
        "dtype:        BF16",
        "quantization: none",
        "chosen by:    single file model.safetensors",
        "not read: pytorch_model.bin: .safetensors files are preferred",
    ):
        assert line in text.splitlines()
    assert "format=pt" in text


def test_what_is_not_stated_is_said_and_names_cannot_write_on_the_terminal(tmp_path, capsys):
    write_config(tmp_path, {"architectures": "\x1b[2J"})
    tensors = {"\x1b[31mscale": np.zeros(2, dtype=np.float32), "[red]x": np.zeros(2, dtype=np.uint8)}
    write_safetensors(tmp_path / "model.safetensors", tensors, {"k": "\x1b[0m"})
    inspect(str(tmp_path))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "[red]x" in text
    assert "dtype:        not stated" in text
    assert "model type:   not stated" in text


def test_an_error_is_left_to_the_command_line(tmp_path):
    with pytest.raises(NoWeights):
        inspect(str(tmp_path))


def test_neither_torch_nor_pydantic_nor_pluggy_is_imported(tmp_path):
    code = (
        "import sys\nfrom steelyard.cli.inspect import inspect\ninspect(sys.argv[1], as_json=True)\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'pluggy'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(toy_d(tmp_path))], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stderr == "[]\n"
