"""Small checkpoints, written byte by byte: no line here calls steelyard, torch or the safetensors package.

The values of tensor ``t`` (its place in the sorted list of the weights' names) are
``F_t(i, j) = ((7 i + 3 j + 5 t) mod 15) - 7``: whole numbers from -7 to 7, exact in every format used.
"""

import json
import struct
from pathlib import Path

import numpy as np

CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "uint32": "U32",
    "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
}  # fmt: skip
BLOCK = 128  # of FP8-B; the group size of CT-W4
FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
CT_W4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": BLOCK},
        }
    },
    "ignore": ["lm_head"],
}
HIDDEN, INTER, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 96, 2, 4, 2, 128
TOY_D_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
TOY_B_CONFIG = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 50, "max_position_embeddings": 32,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip


def header_bytes(header):
    """Return a file's first bytes: the length and the header, which may be ready bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw)) + raw


def write_safetensors(path, tensors, metadata=None):
    """Write a file; the tensors stand in the order given, and a value is an array or (code, shape, bytes)."""
    header, data = {}, []
    if metadata is not None:
        header["__metadata__"] = metadata
    offset = 0
    for name, value in tensors.items():
        if not isinstance(value, tuple):
            array = np.asarray(value)
            value = (CODES[array.dtype.name], array.shape, array.tobytes())
        code, shape, raw = value
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        data.append(raw)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header_bytes(header) + b"".join(data))
    return path


def write_shards(folder, tensors, shards=1, *, index=True, metadata=None):
    """Write tensors as one file, or in equal runs of names as numbered shards with an index; return the names."""
    folder = Path(folder)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, metadata or {"format": "pt"})
        return ["model.safetensors"]
    names = list(tensors)
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    weight_map = {name: files[place * shards // len(names)] for place, name in enumerate(names)}
    for file in files:
        mine = {name: tensors[name] for name in names if weight_map[name] == file}
        write_safetensors(folder / file, mine, metadata or {"format": "pt"})
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def write_config(folder, config):
    """Write ``config.json``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def values(t, shape):
    """Return F_t as float32; a vector is the row i = 0."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return (((7 * i + 3 * j + 5 * t) % 15) - 7).astype(np.float32).reshape(shape)


def encode(array, code):
    """Return an array as (code, shape, bytes) in F32, F16, BF16 or F8_E4M3; the values must be exact there."""
    array = np.ascontiguousarray(array, dtype=np.float32)
    if code == "F32":
        raw = array.tobytes()
    elif code == "F16":
        raw = array.astype(np.float16).tobytes()
    elif code == "BF16":
        bits = array.view(np.uint32)
        assert not (bits & 0xFFFF).any()
        raw = (bits >> 16).astype(np.uint16).tobytes()
    else:
        assert code == "F8_E4M3"
        raw = e4m3(array).tobytes()
    return (code, array.shape, raw)


def e4m3(array):
    """Return the bytes of normal e4m3 values (and zeros): sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    mantissa, exponent = np.frexp(np.abs(array))  # |x| = mantissa * 2**exponent, mantissa in [0.5, 1)
    fraction = mantissa * 16 - 8  # of 8 steps
    biased = exponent - 1 + 7
    assert ((array == 0) | ((fraction == np.round(fraction)) & (biased >= 1) & (biased <= 15))).all()
    codes = np.where(array == 0, 0, biased * 8 + fraction).astype(np.uint8)
    return codes | np.where(np.signbit(array), 0x80, 0).astype(np.uint8)


def dense_shapes(config):
    """Return the names and shapes of a dense Llama of any size, sorted by name."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        shapes |= {
            f"{stem}input_layernorm.weight": (hidden,),
            f"{stem}post_attention_layernorm.weight": (hidden,),
            f"{stem}self_attn.q_proj.weight": (q, hidden),
            f"{stem}self_attn.k_proj.weight": (kv, hidden),
            f"{stem}self_attn.v_proj.weight": (kv, hidden),
            f"{stem}self_attn.o_proj.weight": (hidden, q),
            f"{stem}mlp.gate_proj.weight": (inner, hidden),
            f"{stem}mlp.up_proj.weight": (inner, hidden),
            f"{stem}mlp.down_proj.weight": (hidden, inner),
        }
    return dict(sorted(shapes.items()))


def toy_d_shapes(layers=LAYERS):
    """Return the names and shapes of TOY-D, sorted by name."""
    return dense_shapes(TOY_D_CONFIG | {"num_hidden_layers": layers})


def toy_d_tensors(dtype="BF16", quant=None, shift=0):
    """Return TOY-D's stored tensors.

    Args:
        dtype: Code of the tensors that are not quantized.
        quant: None, ``"FP8-T"``, ``"FP8-B"`` or ``"CT-W4"``.
        shift: Added to every value; of plain tensors only.
    """
    tensors = {}
    for t, (name, shape) in enumerate(toy_d_shapes().items()):
        if quant is None or "_proj." not in name:
            tensors[name] = encode(values(t, shape) + shift, dtype)
        elif quant == "FP8-T":
            tensors[name] = encode(values(t, shape), "F8_E4M3")
            tensors[f"{name}_scale"] = np.float32(2.0 ** (t % 3 - 1))
            tensors[name.replace(".weight", ".input_scale")] = np.float32(2.0 ** (t % 2))
        elif quant == "FP8-B":
            rows, columns = np.indices((shape[0] // BLOCK, shape[1] // BLOCK))
            tensors[name] = encode(values(t, shape), "F8_E4M3")
            tensors[f"{name}_scale_inv"] = (2.0 ** ((rows + columns + t) % 3 - 1)).astype(np.float32)
        else:
            assert quant == "CT-W4"
            rows, groups = np.indices((shape[0], shape[1] // BLOCK))
            tensors[f"{name}_packed"] = pack4(values(t, shape))
            tensors[f"{name}_scale"] = encode(2.0 ** ((rows + groups + t) % 3 - 1), "BF16")
            tensors[f"{name}_shape"] = np.array(shape, dtype=np.int64)
    return dict(sorted(tensors.items()))


def pack4(array):
    """Return [out, in / 8] int32: value + 8 as nibbles, the lowest nibble first."""
    nibbles = (array + 8).astype(np.uint32).reshape(array.shape[0], -1, 8)
    return (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(axis=2, dtype=np.uint32).view(np.int32)


def toy_d(folder, *, dtype="BF16", quant=None, shards=1, index=True, config=None, shift=0):
    """Write TOY-D and return its folder; ``config`` is merged over the toy's, and None drops a key."""
    folder = Path(folder)
    stated = {None: {}, "FP8-T": FP8_TENSOR, "FP8-B": FP8_BLOCK, "CT-W4": CT_W4}[quant]
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    merged = TOY_D_CONFIG | {"torch_dtype": names[dtype]} | ({"quantization_config": stated} if stated else {})
    write_config(folder, _merged(merged, config))
    write_shards(folder, toy_d_tensors(dtype, quant, shift), shards, index=index)
    return folder


def toy_b_shapes(*, pooler=True):
    """Return the names and shapes of TOY-B, sorted by name."""
    hidden, inter = TOY_B_CONFIG["hidden_size"], TOY_B_CONFIG["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (TOY_B_CONFIG["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (TOY_B_CONFIG["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (TOY_B_CONFIG["type_vocab_size"], hidden),
    }
    layer = "encoder.layer.0."
    linears = {
        f"{layer}attention.self.query": (hidden, hidden),
        f"{layer}attention.self.key": (hidden, hidden),
        f"{layer}attention.self.value": (hidden, hidden),
        f"{layer}attention.output.dense": (hidden, hidden),
        f"{layer}intermediate.dense": (inter, hidden),
        f"{layer}output.dense": (hidden, inter),
    }
    if pooler:
        linears["pooler.dense"] = (hidden, hidden)
    for stem, shape in linears.items():
        shapes |= {f"{stem}.weight": shape, f"{stem}.bias": shape[:1]}
    for stem in ("embeddings.LayerNorm", f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"):
        shapes |= {f"{stem}.weight": (hidden,), f"{stem}.bias": (hidden,)}
    return dict(sorted(shapes.items()))


def toy_b_tensors(dtype="F32", *, prefix="", pooler=True, old_norms=False):
    """Return TOY-B's stored tensors: with a prefix, without the pooler, or with the norms' old names."""
    tensors = {}
    for t, (name, shape) in enumerate(toy_b_shapes(pooler=pooler).items()):
        if old_norms and "LayerNorm" in name:
            name = name.replace(".weight", ".gamma").replace(".bias", ".beta")
        tensors[prefix + name] = encode(values(t, shape), dtype)
    return dict(sorted(tensors.items()))


def toy_b(folder, *, dtype="F32", prefix="", pooler=True, old_norms=False, shards=1, index=True, config=None):
    """Write TOY-B and return its folder; ``config`` is merged over the toy's, and None drops a key."""
    folder = Path(folder)
    write_config(folder, _merged(TOY_B_CONFIG, config))
    tensors = toy_b_tensors(dtype, prefix=prefix, pooler=pooler, old_norms=old_norms)
    write_shards(folder, tensors, shards, index=index)
    return folder


def _merged(config, changes):
    return {key: value for key, value in {**config, **(changes or {})}.items() if value is not None}
