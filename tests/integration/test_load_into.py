"""Checkpoints that transformers saved, loaded into transformers' own modules on meta, against its own loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from torch import nn

import steelyard
from steelyard import load_into
from steelyard.config import LoadConfig
from steelyard.discovery import Catalog
from steelyard.errors import CapabilityError, LoadError, PlanError
from steelyard.into.held import poison
from steelyard.reader import WAYS
from steelyard.registry import Registry, default_registry
from support.minilm import minilm

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MOE = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama, tied, scaled": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"head_dim": 12, "mlp_only_layers": [0]}),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "bert": ("Bert", {}),
}  # fmt: skip
STORED_ALONE = {
    "qwen2_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
}
STACKED = "model.layers.1.mlp.experts.gate_up_proj"
IDS = torch.tensor([[1, 5, 6, 9, 11, 2], [1, 21, 22, 23, 2, 7]])
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def architecture(kind: str) -> str:
    name, _ = KINDS[kind]
    return "BertModel" if kind == "bert" else f"{name}ForCausalLM"


def auto(kind: str) -> Any:
    return transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM


def config_of(kind: str) -> Any:
    name, further = KINDS[kind]
    return getattr(transformers, f"{name}Config")(**SIZES, **further)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Return a folder a kind, saved by transformers from random weights; norms and biases are random too."""
    folders = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = auto(kind).from_config(config_of(kind))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.normal_(1.0, 0.2)
        folders[kind] = tmp_path_factory.mktemp("saved")
        model.save_pretrained(folders[kind], max_shard_size="40KB")
    return folders


def on_meta(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return auto(kind).from_config(config_of(kind), dtype=dtype)


def require_family(kind: str) -> None:
    assert architecture(kind) in default_registry().list_keys("model"), "the plugins are installed for the tests"


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        made = model.eval()(IDS)
    return made.last_hidden_state if "logits" not in made else made.logits


def require_same_module(mine: nn.Module, theirs: nn.Module) -> None:
    """Require equal parameters and buffers, those outside the state dict too, to the bit."""
    for kind in ("named_parameters", "named_buffers"):
        left, right = (dict(getattr(one, kind)(remove_duplicate=False)) for one in (mine, theirs))
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert tensor.dtype == right[name].dtype, name
            assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_on_meta_becomes_what_from_pretrained_gives(saved, kind, dtype):
    """load_into, X-02: names, experts, ties, buffers; every tensor equal to the bit, and so every logit."""
    require_family(kind)
    theirs = auto(kind).from_pretrained(saved[kind], dtype=DTYPES[dtype])
    mine = on_meta(kind, DTYPES[dtype])
    assert mine.training
    loaded = load_into(mine, saved[kind])
    assert loaded.module is mine
    assert mine.training
    assert loaded.family == architecture(kind)
    require_same_module(mine, theirs)
    assert torch.equal(outputs(mine), outputs(theirs))
    expected = ["embeddings.position_ids", "embeddings.token_type_ids"] if kind == "bert" else [
        "model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"
    ]  # fmt: skip
    assert list(loaded.rebuilt) == expected
    assert loaded.report.received == sum(file.stat().st_size for file in saved[kind].glob("*.safetensors")) - headers(
        saved[kind]
    )


def headers(folder: Path) -> int:
    """Return the bytes of a folder's headers."""
    return sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("kind", STORED_ALONE)
def test_stacked_experts_are_filled_from_files_that_store_each(saved, kind):
    """load_into: what transformers writes for experts is not what its modules hold."""
    require_family(kind)
    mine = on_meta(kind)
    stored = {name for file in saved[kind].glob("*.safetensors") for name in safetensors.safe_open(file, "pt").keys()}
    assert STORED_ALONE[kind] in stored
    assert STACKED in mine.state_dict()
    assert STACKED not in stored
    loaded = load_into(mine, saved[kind])
    records = {one.name: one for one in loaded.report.parameters}
    (tensor,) = records[f"{STACKED}.3.gate"].tensors
    assert tensor.name == STORED_ALONE[kind]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["llama, tied, scaled", "mixtral", "bert"])
def test_a_module_with_weights_is_filled_where_they_are(saved, kind, way):
    """load_into: in place; poison in every parameter before, the module's own buffers afterwards."""
    require_family(kind)
    mine = auto(kind).from_config(config_of(kind))
    memory = {name: tensor.data_ptr() for name, tensor in mine.state_dict().items()}
    with torch.no_grad():
        for parameter in mine.parameters():
            poison(parameter)
    loaded = load_into(mine, saved[kind], config=LoadConfig(reader=way))
    assert {name: tensor.data_ptr() for name, tensor in mine.state_dict().items()} == memory
    assert loaded.rebuilt == {}
    theirs = auto(kind).from_pretrained(saved[kind])
    require_same_module(mine, theirs)
    assert torch.equal(outputs(mine), outputs(theirs))


@pytest.mark.parametrize("kind", ["llama, tied, scaled", "qwen3"])
def test_a_tied_head_on_meta_stays_the_table(saved, kind):
    """load_into, R064: one parameter under two names, with one gradient."""
    require_family(kind)
    mine = on_meta(kind)
    loaded = load_into(mine, saved[kind])
    assert mine.lm_head.weight is mine.get_input_embeddings().weight
    assert [(one.target, one.source) for one in loaded.report.ties] == [("lm_head.weight", "model.embed_tokens.weight")]
    mine(IDS, labels=IDS).loss.backward()
    assert mine.lm_head.weight.grad is not None


def untied_folder(folder: Path, kind: str, *, equal: bool) -> Path:
    """Save a tied model with its head stored beside the table, equal to it or not."""
    torch.manual_seed(1)
    model = auto(kind).from_config(config_of(kind))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not equal:
        tensors["lm_head.weight"][3, 4] += 1
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


def test_a_head_stored_beside_a_tied_table_must_be_equal(tmp_path):
    """load_into, R060: else the module ties what the file keeps apart."""
    kind = "llama, tied, scaled"
    require_family(kind)
    mine = on_meta(kind)
    load_into(mine, untied_folder(tmp_path / "equal", kind, equal=True))
    assert mine.lm_head.weight is mine.get_input_embeddings().weight
    with pytest.raises(
        LoadError, match=r"lm_head.weight \(model.safetensors\): differs from what fills model.embed_tokens"
    ):
        load_into(on_meta(kind), untied_folder(tmp_path / "apart", kind, equal=False))


def test_without_the_family_stacked_experts_are_refused_with_the_package_that_would_help(saved):
    """load_into: by name alone, every tensor that does not match is counted, and nothing is read."""
    core = tuple(one for one in Catalog.from_environment(block=()).offers if one.distribution == "steelyard")
    mine = on_meta("mixtral")
    with pytest.raises(PlanError) as caught:
        load_into(mine, saved["mixtral"], registry=Registry(Catalog(core)))
    text = str(caught.value)
    assert "no model named 'MixtralForCausalLM'; installed: none. Install it with: pip install steelyard-model-" in text
    assert "missing tensor model.layers.0.mlp.experts.gate_up_proj, which the module has" in text
    assert "26 findings of kind unexpected, the first 10:" in text
    assert all(parameter.is_meta for parameter in mine.parameters())


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_without_the_family_equal_names_load(saved, kind):
    core = tuple(one for one in Catalog.from_environment(block=()).offers if one.distribution == "steelyard")
    mine = on_meta(kind)
    loaded = load_into(mine, saved[kind], registry=Registry(Catalog(core)))
    assert loaded.family == ""
    assert torch.equal(outputs(mine), outputs(auto(kind).from_pretrained(saved[kind])))


def test_a_head_that_the_family_leaves_out_is_loaded_by_its_name(tmp_path):
    """load_into: a masked language model's head, tied to the table, in a file whose family is the encoder's."""
    require_family("bert")
    torch.manual_seed(2)
    transformers.BertForMaskedLM(config_of("bert")).save_pretrained(tmp_path)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    with torch.device("meta"):
        mine = transformers.BertForMaskedLM(config_of("bert"))
    loaded = load_into(mine, tmp_path)
    assert loaded.family == "BertForMaskedLM"
    require_same_module(mine, theirs)
    assert mine.cls.predictions.decoder.weight is mine.bert.embeddings.word_embeddings.weight
    assert torch.equal(outputs(mine), outputs(theirs))


def test_a_module_of_another_size_is_refused_by_names_and_shapes(saved):
    require_family("llama")
    config = config_of("llama")
    config.intermediate_size += 8
    with torch.device("meta"):
        mine = transformers.LlamaForCausalLM(config)
    with pytest.raises(PlanError) as caught:
        load_into(mine, saved["llama"])
    text = str(caught.value)
    assert "into a LlamaForCausalLM" in text
    name = "model.layers.0.mlp.gate_proj.weight"
    assert f"in the module: {name} (the module): stored shape [56, 32], layers.0.mlp" in text
    assert "6 problems" in text


def test_the_real_minilm_fills_the_real_module():
    """load_into, X-02: a published checkpoint; its integer buffer is dropped, the module's own is made anew."""
    require_family("bert")
    folder = minilm()
    theirs = transformers.BertModel.from_pretrained(folder)
    with torch.device("meta"):
        mine = transformers.AutoModel.from_config(theirs.config)
    loaded = load_into(mine, folder)
    require_same_module(mine, theirs)
    assert loaded.report.dropped == {"embeddings.position_ids": "a buffer that counts positions; they are computed"}
    assert torch.equal(outputs(mine), outputs(theirs))


def test_a_quantized_checkpoint_is_refused(saved, tmp_path):
    for file in saved["llama"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(CapabilityError, match="config.json.*: quantized by fp8, and load_into fills plain floats only"):
        steelyard.load_into(on_meta("llama"), tmp_path)
