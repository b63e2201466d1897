"""Tiny random decoders: transformers' models saved to a folder, and what they and steelyard compute of texts.

Sizes are awkward on purpose: a head is no hidden // heads, 97 words do not divide by 2 or 4 ranks, two key/value heads
split over 2 ranks and repeat over 4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

WORKER = "support.ranks_decoders:outputs"
VOCABULARY = 97
SIZES = {
    "hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 36,
    "num_hidden_layers": 3, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FURTHER: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 28,
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}  # fmt: skip
"""What a model type has beside `SIZES`; an entry may replace one of them."""

Call = dict[str, Any]
"""One text batch: see `call`."""


def call(
    ids: list[list[int]],
    mask: list[list[int]] | None = None,
    positions: list[list[int]] | None = None,
    *,
    chunks: tuple[int, ...] | None = None,
    keep: int = 0,
) -> Call:
    """Return what is computed: a batch, its attention mask and positions, in one forward or in chunks with a cache."""
    return {"ids": ids, "mask": mask, "positions": positions, "chunks": chunks, "keep": keep}


def texts(batch: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Return random ids, none of them padding."""
    draws = torch.Generator().manual_seed(seed)
    found: list[list[int]] = torch.randint(3, VOCABULARY, (batch, tokens), generator=draws).tolist()
    return found


def left_padded(lengths: list[int], seed: int = 0) -> Call:
    """Return texts of several lengths, padded in front, with mask and positions as transformers' ``generate`` has them."""
    longest = max(lengths)
    ids = torch.tensor(texts(len(lengths), longest, seed))
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return call((ids * mask).tolist(), mask.tolist(), positions.tolist())


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: with models as small as these, more would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tiny(folder: Path, model_type: str, *, bare: bool = False, seed: int = 0, **changes: Any) -> str:
    """Save a tiny model with every parameter random, so that no term of its formula is zero or one; return the folder.

    Args:
        folder: Where.
        model_type: The ``model_type`` of its config.
        bare: Save the model without a head.
        seed: Of the parameters.
        changes: Keys of the config that differ from `SIZES`; transformers' own names.
    """
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **SIZES | FURTHER.get(model_type, {}) | changes)
    kind = transformers.AutoModel if bare else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1 if "norm" in name else 0, 0.2)
    model.save_pretrained(folder)
    return str(folder)


def config_of(folder: str) -> dict[str, Any]:
    """Return a folder's ``config.json``."""
    found: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return found


def tensors_of(folder: str) -> dict[str, torch.Tensor]:
    """Return a folder's tensors."""
    found: dict[str, torch.Tensor] = safetensors.torch.load_file(Path(folder) / "model.safetensors")
    return found


def rewritten(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """Save tensors under other names, or others beside them, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors refuses shared memory
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with q, k, v and gate, up of every layer laid one behind the other."""
    left = dict(tensors)
    made: dict[str, torch.Tensor] = {}
    for name in tensors:
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            if f".{parts[0]}." in name:
                made[name.replace(parts[0], whole)] = torch.cat(
                    [left.pop(name.replace(parts[0], part)) for part in parts]
                )
    return left | made


def in_pairs(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows of heads as Meta stores them: those that rotate together side by side (the inverse of HF's permute)."""
    order = [half * (dim // 2) + pair for pair in range(dim // 2) for half in range(2)]
    return rows.unflatten(0, (-1, dim))[:, order].flatten(0, 1)


CONSOLIDATED = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
}


def consolidated(tensors: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """Return tensors under the names, and with the rows, of Meta's and Mistral's own releases."""
    made = {"rope.freqs": torch.zeros(dim // 2)}
    for name, tensor in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            tensor = in_pairs(tensor, dim)
        for ours, theirs in CONSOLIDATED.items():
            name = name.replace(ours, theirs)
        made[name] = tensor
    return made


@lru_cache(maxsize=4)
def reference(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return transformers' model of a folder; without a head if its architecture has none."""
    import transformers

    bare = config_of(folder)["architectures"][0].endswith("Model")
    kind = transformers.AutoModel if bare else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=dtype).eval()


def expected_logits(folder: str, asked: Call, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what transformers computes in one forward: logits, or hidden states without a head."""
    model = reference(folder, dtype)
    given = {"attention_mask": asked["mask"], "position_ids": asked["positions"]}
    with torch.inference_mode(), one_thread():
        found = model(
            torch.tensor(asked["ids"]),
            use_cache=False,
            **{name: torch.tensor(value) for name, value in given.items() if value is not None},
        )
    states: torch.Tensor = found.logits if "logits" in found else found.last_hidden_state
    return states[:, -asked["keep"] :] if asked["keep"] else states


def logits(pool: Any, folder: str, *calls: Call, tp: int = 1, **options: Any) -> list[torch.Tensor]:
    """Return what steelyard computes of each batch, in real rank processes; all of them must agree.

    Args:
        pool: The pool of rank processes.
        folder: The checkpoint.
        calls: The batches.
        tp: Tensor-parallel size.
        options: ``ep``, ``moe_tp`` and ``dtype``; the job has max(tp, ep * moe_tp) ranks.
    """
    world = max(tp, options.get("ep", 1) * options.get("moe_tp", 1))
    options = {"tp": tp, "dtype": "float32"} | options
    ranks = pool.values(WORKER, world, (folder, list(calls), options))
    for other in ranks[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(ranks[0], other, strict=True)), "the ranks disagree"
    found: list[torch.Tensor] = ranks[0]
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, atol: float = 2e-5, asked: Call | None = None) -> None:
    """Compare two outputs element by element; where a mask is asked for, rows of padding need only be numbers."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    if asked is not None and asked["mask"] is not None:
        kept = torch.tensor(asked["mask"]).bool()
        kept = kept[:, -asked["keep"] :] if asked["keep"] else kept
        found, expected = found[kept], expected[kept]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
