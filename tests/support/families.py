"""Toy model families for core's tests: Llama and Qwen3-MoE names, as published; no plugin is needed.

Nodes have the model's own stems; the mapping puts ``model.`` in front and knows the split and the fused names.
"""

from steelyard.blueprint import Tie
from steelyard.placement import Order
from steelyard.plugin import (
    AttentionState,
    Axis,
    Blueprint,
    ConfigError,
    Drop,
    Embedding,
    Experts,
    Linear,
    Norm,
    Param,
    Part,
    Placement,
    Source,
)

SPLIT = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def sizes(config):
    """Return the part of a config that has the text model's sizes: a wrapper keeps them in ``text_config``."""
    return config.get("text_config", config)


def order_of(parts):
    """Return the order of parts that lie one behind the other."""
    return Order(tuple((part.name, part.out) for part in parts))


class ToyMapping:
    """Where the toys' tensors stand, by split names or fused ones; ``prefix`` stands before the text model's names."""

    prefix = "model."
    is_transposed = False  # whether stacked experts are stored (in, out)

    def names(self, node, part, expert):
        if isinstance(node, Param) or node.stem == "lm_head":
            return (Source(node.stem),)
        if isinstance(node, Experts):
            return self._experts(node, part, expert)
        path = f"{self.prefix}{node.stem}"
        above = path.rpartition(".")[0]
        if isinstance(node, Linear) and len(node.parts) > 1:
            return (Source(f"{above}.{SPLIT[part]}"), Source(path, order=order_of(node.parts)))
        if isinstance(node, AttentionState):
            return (Source(above),)
        if path.endswith("mlp.gate"):
            return (Source(path), Source(path.replace("mlp.gate", "block_sparse_moe.gate")))
        return (Source(path),)

    def _experts(self, node, part, expert):
        path = f"{self.prefix}{node.stem}"
        older = path.replace("mlp.experts", "block_sparse_moe.experts")
        fused = f"{path}.down_proj" if part == "down" else f"{path}.gate_up_proj"
        order = None if part == "down" else order_of(node.w13.parts)
        turned = self.is_transposed
        return (
            Source(f"{path}.{expert}.{SPLIT[part]}"),
            Source(f"{older}.{expert}.{MIXTRAL[part]}"),
            Source(fused, {".weight": ""}, order, stacked=True, transposed=turned),
            Source(fused, {}, order, stacked=True, transposed=turned),
        )

    def drops(self, config):
        return (Drop("*.self_attn.masked_bias", "a mask that the model computes"),)


class ToyDense:
    """TOY-D: Llama names. Architecture ``LlamaModel`` has no head; ``text_config`` may hold the sizes."""

    keys = ("LlamaForCausalLM", "LlamaModel", "llama")
    set_defaults = {}

    def blueprint(self, config):
        text = sizes(config)
        nodes = [Embedding("embed_tokens", text["vocab_size"], text["hidden_size"], Placement.COLWISE)]
        for layer in range(text["num_hidden_layers"]):
            nodes += self.layer(text, layer)
        nodes.append(Norm("norm", text["hidden_size"]))
        ties = ()
        if not any(str(name).endswith("Model") for name in config.get("architectures") or ()):
            head = (Part("", text["vocab_size"], padded=True),)
            nodes.append(Linear("lm_head", text["hidden_size"], head, Placement.COLWISE))
            if text.get("tie_word_embeddings"):
                ties = (Tie("lm_head", "embed_tokens"),)
        return Blueprint(tuple(nodes), ties)

    def layer(self, text, layer):
        stem = f"layers.{layer}"
        hidden = text["hidden_size"]
        return [
            Norm(f"{stem}.input_layernorm", hidden, layer=layer),
            *self.attention(text, layer),
            Norm(f"{stem}.post_attention_layernorm", hidden, layer=layer),
            *self.mlp(text, layer),
        ]

    def attention(self, text, layer):
        stem = f"layers.{layer}.self_attn"
        hidden, heads, kv = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
        dim = text.get("head_dim", hidden // heads)
        qkv = (Part("q", heads * dim, heads), *(Part(name, kv * dim, kv, kv=True) for name in ("k", "v")))
        bias = text.get("attention_bias", False)
        return [
            Linear(f"{stem}.qkv_proj", hidden, qkv, Placement.COLWISE, bias=bias, layer=layer),
            AttentionState(f"{stem}.attn", heads, kv, dim, layer=layer),
            Linear(f"{stem}.o_proj", heads * dim, (Part("", hidden),), Placement.ROWWISE, layer=layer),
        ]

    def mlp(self, text, layer):
        stem, hidden, inner = f"layers.{layer}.mlp", text["hidden_size"], text["intermediate_size"]
        if text.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act={text['hidden_act']!r}: this toy has silu only")
        up = (Part("gate", inner), Part("up", inner))
        return [
            Linear(f"{stem}.gate_up_proj", hidden, up, Placement.COLWISE, layer=layer),
            Linear(f"{stem}.down_proj", inner, (Part("", hidden),), Placement.ROWWISE, layer=layer),
        ]

    def mapping(self, config):
        return ToyMapping()

    def defaults(self, config):
        return self.set_defaults

    def lora_targets(self):
        return {}


class ToyMoe(ToyDense):
    """TOY-M: Qwen3-MoE names; layers below ``first_k_dense_replace`` are dense."""

    keys = ("Qwen3MoeForCausalLM", "qwen3_moe")

    def mlp(self, text, layer):
        if layer < text.get("first_k_dense_replace", 0):
            return super().mlp(text, layer)
        stem, hidden, inner = f"layers.{layer}.mlp", text["hidden_size"], text["moe_intermediate_size"]
        count = text["num_experts"]
        w13 = Linear("", hidden, (Part("gate", inner), Part("up", inner)), Placement.COLWISE)
        w2 = Linear("", inner, (Part("down", hidden),), Placement.ROWWISE)
        return [
            Linear(f"{stem}.gate", hidden, (Part("", count),), Placement.REPLICATED, layer=layer),
            Experts(f"{stem}.experts", count, w13, w2, top_k=text.get("num_experts_per_tok", 1), layer=layer),
        ]


class InFirstMapping(ToyMapping):
    is_transposed = True


class ToyMoeInFirst(ToyMoe):
    """TOY-M whose stacked experts are declared (in, out), as gpt-oss and Llama 4 store them."""

    keys = ("ToyInFirstForCausalLM",)

    def mapping(self, config):
        return InFirstMapping()


class NestedMapping(ToyMapping):
    prefix = "model.language_model."


class ToyVision(ToyDense):
    """TOY-D inside a wrapper: its names are nested, and a vision encoder stands beside it."""

    keys = ("ToyVLForConditionalGeneration",)

    def blueprint(self, config):
        text = super().blueprint(config)
        weight = (Axis("out"), Axis("in"))
        encoder = (
            Param("visual.patch_embed.weight", weight, 64, 48),
            Param("visual.blocks.0.attn.qkv.weight", weight, 192, 64),
        )
        return Blueprint((*text.nodes, *encoder), text.ties)

    def mapping(self, config):
        return NestedMapping()
