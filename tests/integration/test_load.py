"""Loads as users do them: installed plugins, real files, nothing replaced; and processes that are interrupted."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

import steelyard
from steelyard.config import LoadConfig
from steelyard.errors import PlanError, UnknownPlugin
from steelyard.reader import WAYS
from support.checkpoints import toy_b, toy_b_tensors, write_config, write_shards
from support.stored import bytes_of

IDS = torch.tensor([[2, 5, 6, 9, 11, 3], [2, 7, 3, 0, 0, 0]])
MASK = IDS.ne(0).long()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shards", [1, 3])
def test_an_installed_family_loads_what_is_stored(tmp_path, way, shards):
    """X-02: entry point to registry to plan to reader to module, nothing mocked; every stored byte is in the model."""
    model = steelyard.load(toy_b(tmp_path, shards=shards), device="cpu", config=LoadConfig(reader=way))
    stored = toy_b_tensors()
    held = [bytes_of(value) for value in model.module.state_dict().values()]
    for name, (_, _, raw) in stored.items():
        assert any(raw in one for one in held), name
    assert sum(map(len, held)) == sum(len(raw) for _, _, raw in stored.values())
    assert model.report.tensors == len(stored)
    assert set(model.report.plugins) == {"steelyard", "steelyard-model-bert"}
    hidden = model.module(IDS, MASK).last_hidden_state
    assert hidden.shape == (2, 6, 64)
    assert torch.isfinite(hidden).all()


def test_every_reader_and_number_of_shards_gives_the_same_model(tmp_path):
    """R005, R131: bits, findings and digest do not depend on how bytes are read."""
    seen = []
    for shards in (1, 3):
        folder = toy_b(tmp_path / str(shards), shards=shards)
        for way in WAYS:
            model = steelyard.load(folder, device="cpu", config=LoadConfig(reader=way))
            seen.append((model.module(IDS, MASK).last_hidden_state, model.report))
    for hidden, report in seen[1:]:
        assert torch.equal(hidden, seen[0][0])
        assert report.findings == seen[0][1].findings
    assert seen[0][1].digest == seen[1][1].digest != seen[2][1].digest


def test_every_reader_refuses_the_same_checkpoint_with_the_same_text(tmp_path):
    """R005, L-18: an extra tensor in the second shard, in every way to read."""
    tensors = toy_b_tensors() | {"encoder.layer.0.attention.self.rel_bias": np.zeros(4, np.float32)}
    folder = toy_b(tmp_path)
    (folder / "model.safetensors").unlink()
    write_shards(folder, dict(sorted(tensors.items())), 2)
    said = set()
    for way in WAYS:
        with pytest.raises(PlanError) as caught:
            steelyard.load(folder, device="cpu", config=LoadConfig(reader=way))
        said.add(str(caught.value))
    (text,) = said
    assert "unexpected tensor encoder.layer.0.attention.self.rel_bias (model-0000" in text


def test_an_architecture_that_nobody_installed_says_what_is_known(tmp_path):
    write_config(tmp_path, {"architectures": ["UnheardModel"], "model_type": "unheard"})
    write_shards(tmp_path, {"w": np.zeros(2, np.float32)})
    with pytest.raises(UnknownPlugin, match="^no model named 'UnheardModel'; installed: .*BertModel"):
        steelyard.load(tmp_path, device="cpu")


def test_no_whole_file_is_ever_loaded(tmp_path, monkeypatch):
    """L-12: with every function that loads a whole file set to raise, a model loads."""
    import safetensors
    import safetensors.torch

    def refused(*given, **named):
        raise AssertionError("a whole file was asked for")

    for name in ("load_file", "load", "load_model"):
        monkeypatch.setattr(safetensors.torch, name, refused)
    monkeypatch.setattr(safetensors, "safe_open", refused)
    monkeypatch.setattr(torch, "load", refused)
    assert steelyard.load(toy_b(tmp_path), device="cpu").report.tensors == len(toy_b_tensors())


def test_a_hundred_forwards_log_nothing_ask_nothing_and_read_nothing(tmp_path, caplog, monkeypatch):
    """X-21: a loaded model's hot path has no record, no look at the environment and no file."""
    model = steelyard.load(toy_b(tmp_path), device="cpu").module
    asked = []
    kind = type(os.environ)
    real = kind.__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda self, key: asked.append(key) or real(self, key))
    assert os.environ.get("STEELYARD_PROBE") is None
    assert asked.pop() == "STEELYARD_PROBE"
    (tmp_path / "model.safetensors").unlink()
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.DEBUG), torch.inference_mode():
        first = model(IDS, MASK).last_hidden_state
        caplog.clear()
        for _ in range(100):
            last = model(IDS, MASK).last_hidden_state
    assert torch.equal(first, last)
    assert caplog.records == []
    assert asked == []
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before


# --- processes of their own --------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_load_at_once_and_leaves_nothing(tmp_path):
    """Design 5: a process that is interrupted while it reads dies of the interrupt, without threads that hold it."""
    folder = toy_b(tmp_path, shards=3)
    script = textwrap.dedent(
        f"""
        import time
        import steelyard
        from steelyard.reader import MmapReader
        real = MmapReader.read
        def slow(self, read):
            print("reading", flush=True)
            time.sleep(30)
            return real(self, read)
        MmapReader.read = slow
        steelyard.load({str(folder)!r}, device="cpu")
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout.readline() == "reading\n"
        asked = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=20)
        assert time.monotonic() - asked < 10
    finally:
        child.kill()
        child.wait()
    assert child.returncode == -signal.SIGINT, said
    assert said.strip().endswith("KeyboardInterrupt")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["config.json", "model.safetensors.index.json", *(f"model-0000{one}-of-00003.safetensors" for one in (1, 2, 3))]
    )


def test_importing_every_module_of_core_asks_the_environment_for_nothing_of_ours():
    """D-05: in a fresh interpreter, with the environment counted."""
    script = textwrap.dedent(
        """
        import importlib, os, pkgutil
        import numpy, pydantic, rich.console, rich.table, tokenizers, torch, typer  # what others ask is theirs
        from torch import distributed
        asked = []
        kind = type(os.environ)
        real = kind.__getitem__
        def counted(self, key):
            asked.append(key)
            return real(self, key)
        kind.__getitem__ = counted
        os.environ.get("STEELYARD_PROBE")
        assert asked.pop() == "STEELYARD_PROBE"
        import steelyard
        names = [one.name for one in pkgutil.walk_packages(steelyard.__path__, "steelyard.")]
        for name in names:
            if "__main__" not in name:
                importlib.import_module(name)
        ours = [key for key in asked if key.startswith(("STEELYARD", "DG_", "KIMI_", "AITER_", "RTP_", "DUMP", "LOCAL_"))]
        print(len(names) > 40, ours)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "True []", done.stderr


def test_core_imports_where_no_compiled_library_is(tmp_path):
    """L-30: loader and layers need neither CUDA nor triton nor any kernel library."""
    script = textwrap.dedent(
        """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"triton", "aiter", "deep_gemm", "fastsafetensors", "safetensors", "vllm"}:
                    raise ImportError(f"{name} is blocked")
        sys.meta_path.insert(0, Blocked())
        import steelyard, torch
        from steelyard.loader import load
        from steelyard.layers import Norm
        from steelyard.plugin import Norm as Node
        x = torch.randn(3, 8)
        layer = Norm(Node("n", 8, eps=1e-6), torch.ones(8))
        wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        print(torch.allclose(layer(x), wide, atol=1e-6), "safetensors" in sys.modules)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "True False", done.stderr
