"""A load to an accelerator: the same bits as on the CPU, by either reader."""

from __future__ import annotations

import pytest
import torch

import steelyard
from steelyard.target import this_machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator that torch can use; there is none"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Save a small random encoder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=192, num_attention_heads=6, intermediate_size=400, num_hidden_layers=3
    )
    path = tmp_path_factory.mktemp("encoder")
    transformers.BertModel(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("reader", ["mmap", "pread", "auto"])
def test_parameters_on_the_device_are_the_bits_of_the_file(folder, reader):
    """X-24, P-24: every parameter equals the CPU's bit for bit."""
    config = steelyard.LoadConfig(reader=reader)
    here = steelyard.load(folder, device="cpu")
    there = steelyard.load(folder, device="cuda", config=config)
    assert there.report.device == "cuda:0"
    assert there.plan.target == this_machine("cuda") != "cpu"
    assert there.report.reader == ("pread" if reader == "auto" else reader)
    assert there.report.ranks[0].device_peak >= there.plan.ranks[0].final
    mine, theirs = dict(here.module.named_parameters()), dict(there.module.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert parameter.device.type == "cuda", name
        assert torch.equal(parameter.cpu(), mine[name]), name


def test_hidden_states_on_the_device_equal_the_cpus(folder):
    """X-24: B-07 on an accelerator, float32."""
    ids = torch.arange(1, 41).reshape(2, 20)
    with torch.inference_mode():
        here = steelyard.load(folder, device="cpu").module(ids).last_hidden_state
        there = steelyard.load(folder, device="cuda").module(ids.cuda()).last_hidden_state.cpu()
    torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-4)
