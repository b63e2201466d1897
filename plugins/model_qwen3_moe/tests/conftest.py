"""Fixtures: mixtures of every family in any size and form, written byte by byte, and what a rank must hold of one."""

from types import SimpleNamespace

import numpy as np
import pytest

from steelyard_model_qwen3_moe.family import MoeFamily
from support.checkpoints import dense_shapes, encode, values, write_config, write_shards
from support.loading import registry_for
from support.planned import TOY_M_CONFIG

CONFIGS = {
    "qwen3_moe": TOY_M_CONFIG,
    "qwen2_moe": TOY_M_CONFIG
    | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "shared_expert_intermediate_size": 512},
    "mixtral": {
        key: value for key, value in TOY_M_CONFIG.items() if key not in ("num_experts", "moe_intermediate_size")
    }
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "intermediate_size": 256,
    },
}
PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
RELEASE = {"gate": "w1", "up": "w3", "down": "w2"}


def experts_of(config):
    return config.get("num_experts", config.get("num_local_experts"))


def inner_of(config):
    return config["intermediate_size"] if config["model_type"] == "mixtral" else config["moe_intermediate_size"]


def is_sparse(config, layer):
    dense = layer in config.get("mlp_only_layers", []) or (layer + 1) % config.get("decoder_sparse_step", 1) != 0
    return config["model_type"] == "mixtral" or not dense


def shapes_of(config):
    """Return the names and shapes of a mixture as it is published, one tensor a projection of an expert."""
    hidden, count, inner, dim = config["hidden_size"], experts_of(config), inner_of(config), config["head_dim"]
    shapes = dense_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        if config["model_type"] == "qwen3_moe":
            shapes |= {f"{attention}.{one}_norm.weight": (dim,) for one in "qk"}
        if config["model_type"] == "qwen2_moe":
            shapes |= {f"{attention}.{one}_proj.bias": shapes[f"{attention}.{one}_proj.weight"][:1] for one in "qkv"}
        if not is_sparse(config, layer):
            continue
        for name in PARTS.values():
            del shapes[f"{mlp}.{name}.weight"]
        path, names = (mlp, PARTS) if config["model_type"] != "mixtral" else (mlp[:-3] + "block_sparse_moe", RELEASE)
        shapes[f"{path}.gate.weight"] = (count, hidden)
        for expert in range(count):
            for part, name in names.items():
                shape = (hidden, inner) if part == "down" else (inner, hidden)
                shapes[f"{path}.experts.{expert}.{name}.weight"] = shape
        if config["model_type"] == "qwen2_moe":
            shared = config["shared_expert_intermediate_size"]
            shapes |= {
                f"{mlp}.shared_expert.gate_proj.weight": (shared, hidden),
                f"{mlp}.shared_expert.up_proj.weight": (shared, hidden),
                f"{mlp}.shared_expert.down_proj.weight": (hidden, shared),
                f"{mlp}.shared_expert_gate.weight": (1, hidden),
            }
    return dict(sorted(shapes.items()))


def arrays_of(config):
    """Return small whole numbers for every tensor, which differ from one tensor to the next."""
    return {name: values(t, shape) for t, (name, shape) in enumerate(shapes_of(config).items())}


def numbered_of(config):
    """Return another number for every element of every tensor, all exact in float32."""
    made, at = {}, 1
    for name, shape in shapes_of(config).items():
        size = int(np.prod(shape))
        made[name] = np.arange(at, at + size, dtype=np.float32).reshape(shape)
        at += size
    assert at < 2**24
    return made


def expert_of(config, arrays, layer, expert, part):
    """Return one expert's whole matrix (out, in) from tensors stored one by one."""
    if config["model_type"] == "mixtral":
        return arrays[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{RELEASE[part]}.weight"]
    return arrays[f"model.layers.{layer}.mlp.experts.{expert}.{PARTS[part]}.weight"]


def stored_as(config, arrays, form):
    """Return the same numbers stored in another form.

    Args:
        config: The config.
        arrays: Tensors stored one by one, under the published names.
        form: ``split`` (as given), ``named`` (gate_proj, up_proj and down_proj below mlp, as transformers' other
            mixtures have them), ``fused`` (gate and up of one expert in one tensor), ``stacked``, or
            ``stacked.weight`` (with the ending).
    """
    if form == "split":
        return dict(arrays)
    made = {
        name.replace("block_sparse_moe.gate", "mlp.gate"): array
        for name, array in arrays.items()
        if ".experts." not in name
    }
    ending = ".weight" if form == "stacked.weight" else ""
    for layer in range(config["num_hidden_layers"]):
        if not is_sparse(config, layer):
            continue
        stem = f"model.layers.{layer}.mlp.experts"
        every = {
            part: [expert_of(config, arrays, layer, one, part) for one in range(experts_of(config))] for part in PARTS
        }
        pairs = [np.concatenate(pair) for pair in zip(every["gate"], every["up"], strict=True)]
        if form.startswith("stacked"):
            made[f"{stem}.gate_up_proj{ending}"] = np.stack(pairs)
            made[f"{stem}.down_proj{ending}"] = np.stack(every["down"])
            continue
        for expert, pair in enumerate(pairs):
            made[f"{stem}.{expert}.down_proj.weight"] = every["down"][expert]
            if form == "fused":
                made[f"{stem}.{expert}.gate_up_proj.weight"] = pair
            else:
                made[f"{stem}.{expert}.gate_proj.weight"] = every["gate"][expert]
                made[f"{stem}.{expert}.up_proj.weight"] = every["up"][expert]
    return dict(sorted(made.items()))


def written(folder, config, arrays, dtype="BF16", shards=1):
    """Write a checkpoint and return its folder."""
    write_config(folder, config | {"torch_dtype": {"BF16": "bfloat16", "F32": "float32"}[dtype]})
    write_shards(folder, {name: encode(array, dtype) for name, array in arrays.items()}, shards)
    return folder


def share(size, parts, index):
    return slice(size // parts * index, size // parts * (index + 1))


def owned(count, parts, index):
    """Return a group's experts: dealt out one by one, then sorted, so that the first groups have one more."""
    owners = sorted(expert % parts for expert in range(count))
    return [expert for expert, owner in enumerate(owners) if owner == index]


def expected_of(config, arrays, *, tp=1, ep=1, moe_tp=None, rank=0):
    """Return what a rank must hold, by plain slices of whole matrices: (stem, tensor) to array."""
    moe_tp = moe_tp or (1 if ep > 1 else tp)
    group, place, tp_rank = rank // moe_tp if ep > 1 else 0, rank % moe_tp, rank % tp
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q_rows = share(heads * dim, tp, tp_rank)
    kv_rows = share(kv * dim, tp, tp_rank) if kv % tp == 0 else share(kv * dim, kv, tp_rank // (tp // kv))
    held = {("norm", "weight"): arrays["model.norm.weight"]}
    size = -(-config["vocab_size"] // tp)
    for stem, name in (("embed_tokens", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        table = np.concatenate([arrays[name], np.zeros((size * tp - len(arrays[name]), config["hidden_size"]))])
        held[stem, "weight"] = table[size * tp_rank :][:size]

    def mlp(stem, width):
        rows = share(width, tp, tp_rank)
        gate, up, down = (arrays[f"model.{stem}.{name}.weight"] for name in PARTS.values())
        held[f"{stem}.gate_up_proj", "weight"] = np.concatenate([gate[rows], up[rows]])
        held[f"{stem}.down_proj", "weight"] = down[:, rows]

    for layer in range(config["num_hidden_layers"]):
        stem = f"layers.{layer}"
        attention = f"{stem}.self_attn"
        for ending in ("weight", "bias"):
            whole = [arrays.get(f"model.{attention}.{one}_proj.{ending}") for one in "qkv"]
            if whole[0] is not None:
                pieces = [one[rows] for one, rows in zip(whole, (q_rows, kv_rows, kv_rows), strict=True)]
                held[f"{attention}.qkv_proj", ending] = np.concatenate(pieces)
        held[f"{attention}.o_proj", "weight"] = arrays[f"model.{attention}.o_proj.weight"][:, q_rows]
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            if f"model.{stem}.{norm}.weight" in arrays:
                held[f"{stem}.{norm}", "weight"] = arrays[f"model.{stem}.{norm}.weight"]
        if not is_sparse(config, layer):
            mlp(f"{stem}.mlp", config["intermediate_size"])
            continue
        router = "block_sparse_moe.gate" if config["model_type"] == "mixtral" else "mlp.gate"
        held[f"{stem}.mlp.gate", "weight"] = arrays[f"model.{stem}.{router}.weight"]
        rows, hidden = share(inner_of(config), moe_tp, place), config["hidden_size"]
        width = inner_of(config) // moe_tp
        w13, w2 = [], []
        for expert in owned(experts_of(config), ep, group):
            gate, up, down = (expert_of(config, arrays, layer, expert, part) for part in PARTS)
            w13.append(np.concatenate([gate[rows], up[rows]]))
            w2.append(down[:, rows])
        held[f"{stem}.mlp.experts", "w13"] = np.reshape(w13, (len(w13), 2 * width, hidden))
        held[f"{stem}.mlp.experts", "w2"] = np.reshape(w2, (len(w2), hidden, width))
        if config["model_type"] == "qwen2_moe":
            mlp(f"{stem}.mlp.shared_expert", config["shared_expert_intermediate_size"])
            held[f"{stem}.mlp.shared_expert_gate", "weight"] = arrays[f"model.{stem}.mlp.shared_expert_gate.weight"]
    return held


def held_by(built):
    """Return (stem, tensor) to array of a rank's built nodes."""
    return {
        (stem, name.rpartition(".")[2]): tensor.float().numpy()
        for stem, node in built.items()
        for name, tensor in node.state_dict().items()
    }


@pytest.fixture(scope="session")
def mixture():
    """Return the functions of this file: checkpoints, and what ranks must hold of them."""
    return SimpleNamespace(
        configs=CONFIGS, shapes=shapes_of, arrays=arrays_of, numbered=numbered_of, stored=stored_as, write=written,
        expected=expected_of, held=held_by, owned=owned,
    )  # fmt: skip


@pytest.fixture(scope="session")
def registry():
    return registry_for(MoeFamily)
