"""A decoder as nodes. Stems are transformers' names below ``model.``, with the parts of one input fused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from steelyard.blueprint import AttentionState, Blueprint, Embedding, Linear, Node, Norm, Part, Placement, Tie
from steelyard.decoder.config import DecoderConfig

HEAD, EMBEDDING = "lm_head", "embed_tokens"

LORA_TARGETS: Mapping[str, str] = {
    "q_proj": "self_attn.qkv_proj.q",
    "k_proj": "self_attn.qkv_proj.k",
    "v_proj": "self_attn.qkv_proj.v",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_up_proj.gate",
    "up_proj": "mlp.gate_up_proj.up",
    "down_proj": "mlp.down_proj",
}
"""Adapter module names of a dense decoder, and the node parts that they stand for."""


def blueprint_of(made: DecoderConfig, mlp: Callable[[int], Iterable[Node]]) -> Blueprint:
    """Return a decoder's nodes.

    Args:
        made: Its sizes and choices.
        mlp: A layer's number to the nodes behind its attention.
    """
    nodes: list[Node] = [Embedding(EMBEDDING, made.vocabulary, made.hidden, Placement.COLWISE, rows_key="vocab_size")]
    for layer in range(made.layers):
        stem = f"layers.{layer}"
        nodes.append(Norm(f"{stem}.input_layernorm", made.hidden, "rms", made.eps, layer=layer))
        nodes += attention(made, layer)
        nodes.append(Norm(f"{stem}.post_attention_layernorm", made.hidden, "rms", made.eps, layer=layer))
        nodes += mlp(layer)
    nodes.append(Norm("norm", made.hidden, "rms", made.eps))
    ties: tuple[Tie, ...] = ()
    if made.has_head:
        rows = (Part("", made.vocabulary, padded=True),)
        because = "" if made.ties_head else "tie_word_embeddings=False"
        nodes.append(Linear(HEAD, made.hidden, rows, Placement.COLWISE, because=because))
        ties = (Tie(HEAD, EMBEDDING),) if made.ties_head else ()
    return Blueprint(tuple(nodes), ties, made.notes)


def attention(made: DecoderConfig, layer: int) -> Iterator[Node]:
    """Yield the nodes of a layer's attention."""
    stem, dim = f"layers.{layer}.self_attn", made.head_dim
    queries, keys = made.heads * dim, made.kv_heads * dim
    qkv = (
        Part("q", queries, made.heads),
        Part("k", keys, made.kv_heads, kv=True),
        Part("v", keys, made.kv_heads, kv=True),
    )
    yield Linear(f"{stem}.qkv_proj", made.hidden, qkv, Placement.COLWISE, bias=made.has_qkv_bias, layer=layer)
    if made.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Norm(f"{stem}.{name}", dim, "rms", made.eps, layer=layer)
    yield AttentionState(f"{stem}.state", made.heads, made.kv_heads, dim, layer=layer)
    out = (Part("", made.hidden),)
    yield Linear(f"{stem}.o_proj", queries, out, Placement.ROWWISE, bias=made.has_out_bias, layer=layer)


def gated_mlp(stem: str, hidden: int, inner: int, *, layer: int, bias: bool = False) -> Iterator[Node]:
    """Yield the nodes of a gated MLP: gate and up share their input, down makes the output."""
    parts = (Part("gate", inner), Part("up", inner))
    yield Linear(f"{stem}.gate_up_proj", hidden, parts, Placement.COLWISE, bias=bias, layer=layer)
    yield Linear(f"{stem}.down_proj", inner, (Part("", hidden),), Placement.ROWWISE, bias=bias, layer=layer)
