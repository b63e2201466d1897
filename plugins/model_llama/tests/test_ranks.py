"""What each rank holds, executed on real files in one process, against slices of arrays that know nothing of the code."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steelyard
from steelyard.config import LoadConfig
from steelyard.plugin import ConfigError
from steelyard.torch import weight_of
from support.decoders import consolidated, fused, rewritten
from support.loading import executed

LAYER = "model.layers.0."


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder of one layer, and how it is stored."""

    heads: int
    kv_heads: int
    head_dim: int = 4
    hidden: int = 6
    inner: int = 16
    vocabulary: int = 11
    model_type: str = "llama"
    bias: bool = False
    spelling: str = "plain"

    @property
    def config(self):
        head = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[self.model_type]
        return {
            "architectures": [f"{head}ForCausalLM"], "model_type": self.model_type, "hidden_size": self.hidden,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.inner, "num_hidden_layers": 1, "vocab_size": self.vocabulary,
            "rms_norm_eps": 1e-5, "attention_bias": self.bias, "mlp_bias": self.bias,
        }  # fmt: skip

    def tensors(self):
        """Return random tensors under transformers' names."""
        q, kv, hidden = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        out = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        shapes = {f"{LAYER}self_attn.{name}.weight": (rows, hidden) for name, rows in out.items()}
        shapes |= {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "lm_head.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
            f"{LAYER}input_layernorm.weight": (hidden,),
            f"{LAYER}post_attention_layernorm.weight": (hidden,),
            f"{LAYER}self_attn.o_proj.weight": (hidden, q),
            f"{LAYER}mlp.gate_proj.weight": (self.inner, hidden),
            f"{LAYER}mlp.up_proj.weight": (self.inner, hidden),
            f"{LAYER}mlp.down_proj.weight": (hidden, self.inner),
        }
        if self.model_type == "qwen3":
            shapes |= {f"{LAYER}self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        for name, shape in list(shapes.items()):
            attention = ("q_proj", "k_proj", "v_proj") if self.model_type == "qwen2" else ("q_", "k_", "v_", "o_proj")
            biased = attention if self.model_type != "mistral" else ()
            with_mlp = self.model_type == "llama"
            has = any(f"self_attn.{one}" in name for one in biased) and "_norm" not in name
            if (has and (self.bias or self.model_type == "qwen2")) or (self.bias and with_mlp and ".mlp." in name):
                shapes[name.replace(".weight", ".bias")] = shape[:1]
        draws = torch.Generator().manual_seed(0)
        return {name: torch.rand(shape, generator=draws) for name, shape in shapes.items()}

    def save(self, folder):
        """Write the checkpoint and return its folder and its tensors under transformers' names."""
        tensors = self.tensors()
        spelt = {
            "plain": lambda: tensors,
            "fused": lambda: fused(tensors),
            "consolidated": lambda: consolidated(tensors, self.head_dim),
        }[self.spelling]()
        return rewritten(Path(folder), self.config, spelt), tensors


def held(built, stem):
    """Return weight and bias of a node."""
    node = built[stem]
    bias = node.segments[0].bias if hasattr(node, "segments") else None
    return [weight_of(node), *([] if bias is None else [bias])]


def stored(tensors, stem):
    """Return weight and bias of a stored matrix."""
    return [tensors[f"{stem}.{ending}"] for ending in ("weight", "bias") if f"{stem}.{ending}" in tensors]


def check_pieces(model, tp, folder):
    """Compare every parameter of every rank with its slice, and the ranks together with the checkpoint."""
    path, tensors = model.save(folder)
    plan = steelyard.plan(path, tp=tp, target="cpu").check()
    ranks = [executed(plan, rank)[0].built for rank in range(tp)]
    repeats, local_kv = max(1, tp // model.kv_heads), max(1, model.kv_heads // tp)
    together = {}

    def keep(name, rank, found, expected):
        assert torch.equal(found, expected), (name, rank)
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size()  # P-24
        together.setdefault(name, []).append(found)

    for rank, built in enumerate(ranks):
        q = slice(rank * model.heads // tp * model.head_dim, (rank + 1) * model.heads // tp * model.head_dim)
        first = rank // repeats * local_kv
        kv = slice(first * model.head_dim, (first + local_kv) * model.head_dim)
        inner = slice(rank * model.inner // tp, (rank + 1) * model.inner // tp)
        for stem, parts, rows in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv)),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), (inner, inner)),
        ):
            pieces = [
                [tensor[cut] for tensor in stored(tensors, LAYER + part)] for part, cut in zip(parts, rows, strict=True)
            ]
            found = held(built, f"layers.0.{stem}")
            assert len(found) == len(pieces[0])
            for index, one in enumerate(found):
                keep(f"{stem} {index}", rank, one, torch.cat([piece[index] for piece in pieces]))
        for stem, columns in (("self_attn.o_proj", q), ("mlp.down_proj", inner)):
            weight, *bias = held(built, f"layers.0.{stem}")
            whole, *whole_bias = stored(tensors, LAYER + stem)
            keep(stem, rank, weight, whole[:, columns])
            assert len(bias) == len(whole_bias)
            for mine, theirs in zip(bias, whole_bias, strict=True):
                keep(f"{stem} bias", rank, mine, theirs)
        share = -(-model.vocabulary // tp)
        for stem, name in (("embed_tokens", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
            padded = torch.cat([tensors[name], torch.zeros(share * tp - model.vocabulary, model.hidden)])
            keep(stem, rank, weight_of(built[stem]), padded[rank * share : (rank + 1) * share])
        for name in tensors:
            if "norm" in name:
                stem = name.removeprefix("model.").removesuffix(".weight")
                assert torch.equal(weight_of(built[stem]), tensors[name])
    for name in ("embed_tokens", "lm_head"):
        rows = torch.cat(together[name])[: model.vocabulary]
        assert torch.equal(rows, tensors[f"{'' if name == 'lm_head' else 'model.'}{name}.weight"])
    for stem in ("self_attn.o_proj", "mlp.down_proj"):
        assert torch.equal(torch.cat(together[stem], 1), tensors[f"{LAYER}{stem}.weight"])
    qkv = [
        one.split([model.heads // tp * model.head_dim, *[local_kv * model.head_dim] * 2])
        for one in together["self_attn.qkv_proj 0"]
    ]
    assert torch.equal(torch.cat([q for q, _, _ in qkv]), tensors[f"{LAYER}self_attn.q_proj.weight"])
    for index, part in ((1, "k_proj"), (2, "v_proj")):
        for copy in range(repeats):
            assert torch.equal(
                torch.cat([one[index] for one in qkv[copy::repeats]]), tensors[f"{LAYER}self_attn.{part}.weight"]
            )
    gate_up = [one.chunk(2) for one in together["mlp.gate_up_proj 0"]]
    for index, part in enumerate(("gate_proj", "up_proj")):
        assert torch.equal(torch.cat([one[index] for one in gate_up]), tensors[f"{LAYER}mlp.{part}.weight"])
    return ranks, tensors


@st.composite
def models(draw):
    """Draw a model and a number of ranks that its heads go out over."""
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = kv_heads * group
    fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    tp = draw(st.sampled_from(fits))
    model_type = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]))
    spellings = ["plain", "fused", *(["consolidated"] if model_type in ("llama", "mistral") else [])]
    model = Model(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        hidden=draw(st.integers(1, 9)),
        inner=tp * draw(st.integers(1, 4)),
        vocabulary=draw(st.integers(1, 40)),
        model_type=model_type,
        bias=draw(st.booleans()),
        spelling=draw(st.sampled_from(spellings)),
    )
    return model, tp


@settings(max_examples=60, deadline=None)
@given(models())
def test_the_ranks_together_hold_the_checkpoint(drawn):
    """P-04, P-08, P-11, P-12, P-13, P-24: every parameter, split, fused or in rotary pairs on disk; nothing is shared."""
    with tempfile.TemporaryDirectory() as folder:
        check_pieces(*drawn, folder)


# query heads, key/value heads, tp, first key/value head of each rank
ACCEPTED = {
    "8-8-tp4": (8, 8, 4, [0, 2, 4, 6]),
    "32-8-tp4": (32, 8, 4, [0, 2, 4, 6]),
    "8-4-tp4": (8, 4, 4, [0, 1, 2, 3]),
    "8-2-tp4": (8, 2, 4, [0, 0, 1, 1]),
    "8-2-tp8": (8, 2, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
    "32-4-tp8": (32, 4, 8, [0, 0, 1, 1, 2, 2, 3, 3]),
    "32-1-tp8": (32, 1, 8, [0] * 8),
    "12-3-tp6": (12, 3, 6, [0, 0, 1, 1, 2, 2]),
    "64-8-tp16": (64, 8, 16, [rank // 2 for rank in range(16)]),
}


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "firsts"), ACCEPTED.values(), ids=ACCEPTED)
def test_heads_of_real_weights_go_out_as_the_table_says(heads, kv_heads, tp, firsts, tmp_path):
    """P-08, P-11: each row of the published table; the first key/value head of each rank is the one that it names."""
    ranks, tensors = check_pieces(Model(heads, kv_heads, head_dim=2, inner=tp), tp, tmp_path)
    keys = tensors[f"{LAYER}self_attn.k_proj.weight"]
    for built, first in zip(ranks, firsts, strict=True):
        mine = weight_of(built["layers.0.self_attn.qkv_proj"])[heads // tp * 2 :]
        assert torch.equal(mine[:2], keys[first * 2 : first * 2 + 2])


REFUSED = {
    "10-2-tp3": (10, 2, 3, "10 query heads do not divide by tp 3 (q_heads=10, kv_heads=2, tp=3); tp sizes that fit: 1, 2, 10"),
    "24-6-tp4": (24, 6, 4, "6 key/value heads neither split over tp 4 nor repeat evenly"),
    "24-3-tp8": (24, 3, 8, "3 key/value heads neither split over tp 8 nor repeat evenly"),
    "12-6-tp4": (12, 6, 4, "6 key/value heads neither split over tp 4 nor repeat evenly"),
    "12-4-tp6": (12, 4, 6, "4 key/value heads neither split over tp 6 nor repeat evenly"),
    "40-8-tp5": (40, 8, 5, "8 key/value heads neither split over tp 5 nor repeat evenly"),
}  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "tp", "text"), REFUSED.values(), ids=REFUSED)
def test_heads_that_would_compute_wrong_attention_are_refused(heads, kv_heads, tp, text, tmp_path):
    """P-09, P-10: while planning, with every number."""
    path, _ = Model(heads, kv_heads, head_dim=2, inner=tp).save(tmp_path)
    errors = [finding.text for finding in steelyard.plan(path, tp=tp, target="cpu").errors]
    assert len(errors) == 1 + (heads * 2 % tp > 0)  # then o_proj's columns do not divide either
    assert errors[0].startswith(f"layers.0.self_attn.qkv_proj: {text}")
    assert f"(q_heads={heads}, kv_heads={kv_heads}, tp={tp})" in errors[0]


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 6), (8, 3)])
def test_query_heads_that_are_no_multiple_of_pairs_are_refused_for_any_ranks(heads, kv_heads, tmp_path):
    """P-09: the table's first two rejections."""
    path, _ = Model(heads, kv_heads, head_dim=2).save(tmp_path)
    with pytest.raises(ConfigError) as caught:
        steelyard.plan(path, target="cpu")
    assert str(caught.value) == f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"


def test_a_vocabulary_that_does_not_divide_is_refused_where_padding_is_off(tmp_path):
    """P-14: embedding and head, with the size to pad to."""
    path, _ = Model(4, 4, vocabulary=10).save(tmp_path)
    plan = steelyard.plan(path, tp=4, target="cpu", config=LoadConfig(vocab_padding="off"))
    text = "a vocabulary of 10 does not divide by tp 4; pad it to 12, or allow vocab_padding='auto'"
    assert sorted(finding.text for finding in plan.errors) == [
        f"embed_tokens: cannot cut out[0:10]: {text}",
        f"lm_head: cannot cut out[0:10]: {text}",
    ]
    whole = steelyard.plan(path, tp=2, target="cpu", config=LoadConfig(vocab_padding="off")).check()
    assert [weight_of(executed(whole, rank)[0].built["embed_tokens"]).shape[0] for rank in range(2)] == [5, 5]


def test_a_look_up_finds_a_row_on_one_rank_and_zeros_on_the_others(tmp_path):
    """P-15: the sum over the ranks is the row, for the last word before the padding too."""
    path, tensors = Model(4, 2, vocabulary=9).save(tmp_path)
    plan = steelyard.plan(path, tp=4, target="cpu").check()
    tables = [executed(plan, rank)[0].built["embed_tokens"] for rank in range(4)]
    ids = torch.tensor([0, 8, 3])
    shares = torch.stack([table.local(ids) for table in tables])
    assert (shares.abs().sum(-1) > 0).sum(0).tolist() == [1, 1, 1]
    assert torch.equal(shares.sum(0), tensors["model.embed_tokens.weight"][ids])
