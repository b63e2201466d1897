"""Decoders on an accelerator: the same logits as on the CPU and as transformers', and no memory beside the weights."""

from __future__ import annotations

import pytest
import torch

import steelyard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator that torch can use; there is none"),
]

SIZES = {
    "vocab_size": 301,
    "hidden_size": 128,
    "intermediate_size": 208,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> str:
    """Save a small random decoder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(request.param, **SIZES, **KINDS[request.param])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return str(tmp_path)


def test_logits_on_the_device_are_those_of_the_cpu_and_of_transformers(folder):
    """X-24, P-25: float32; one text of 70 tokens, whole and token by token."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, SIZES["vocab_size"], (2, 70), generator=torch.Generator().manual_seed(1))
    here = steelyard.load(folder, device="cpu", dtype="float32").module
    there = steelyard.load(folder, device="cuda", dtype="float32").module
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = peer(ids).logits
        torch.testing.assert_close(here(ids), expected, atol=2e-5, rtol=0)
        whole = there(ids.cuda())
        cache = there.new_cache(2, 70)
        steps = [there(ids[:, at : at + 1].cuda(), cache=cache) for at in range(70)]
    torch.testing.assert_close(whole.cpu(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(steps, 1).cpu(), expected, atol=1e-4, rtol=1e-4)


def test_experts_and_projections_on_the_device_are_the_bits_of_the_file(folder):
    """X-24, E-23: every parameter equals the CPU's bit for bit, and every one of a kernel's is on the device."""
    here, there = (steelyard.load(folder, device=device) for device in ("cpu", "cuda"))
    mine, theirs = (dict(one.module.named_parameters()) for one in (here, there))
    assert mine.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert parameter.device.type == "cuda", name
        assert torch.equal(parameter.cpu(), mine[name]), name


def test_after_a_load_nothing_is_held_beside_the_parameters(folder):
    """L-22: to 1 MB, for a model of a few MB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    loaded = steelyard.load(folder, device="cuda")
    held = torch.cuda.memory_allocated() - before
    own = sum({one.data_ptr(): one.nbytes for one in loaded.module.parameters()}.values())
    assert held - own < 1 << 20


def test_a_module_on_meta_is_filled_on_the_device(folder):
    """X-24: transformers' own module, its buffers made again; logits as `from_pretrained` has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    steelyard.load_into(module, folder, device="cuda")
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to("cuda").eval()
    ids = torch.arange(1, 41, device="cuda").reshape(2, 20)
    with torch.inference_mode():
        assert torch.equal(module(ids).logits, peer(ids).logits)
