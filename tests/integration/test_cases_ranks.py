"""Users' faults with ranks, as loads of real values: merged tensors, few key/value heads, vocabularies that do not divide."""

import numpy as np
import pytest
import torch

from steelyard.config import LoadConfig
from steelyard.planning import plan
from support import cases
from support.ranks_decoders import outputs

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
LAYERS = (0, 1)


@pytest.fixture(autouse=True, params=cases.PATTERNS.values(), ids=cases.PATTERNS)
def fresh_memory(request):
    with cases.poisoned(request.param):
        yield


# --- D: fused on disk --------------------------------------------------------------------------------------------


def rows_of(runs):
    return np.concatenate([np.arange(start, stop) for start, stop in runs])


MERGED_ROWS = {  # rows of the merged tensors that the two ranks hold, as the report lists them
    QKV: ([(0, 256), (512, 640), (768, 896)], [(256, 512), (640, 768), (896, 1024)]),
    GATE_UP: ([(0, 256), (512, 768)], [(256, 512), (768, 1024)]),
}
PARTS = {QKV: ("q", "k", "v"), GATE_UP: ("gate", "up")}


def joined(module, layer, stem):
    """Return a rank's rows of one merged tensor."""
    held, above = cases.held(module), stem.rpartition(".")[0]
    return torch.cat([held[f"layers.{layer}.{above}.{part}_proj.weight"] for part in PARTS[stem]]).float().numpy()


def test_R026_a_merged_tensor_is_cut_part_by_part(tmp_path):
    """R026, P-12, P-13: rows 0-255, 512-639 and 768-895 of qkv for rank 0, not its first half; gate_up likewise."""
    whole = cases.toy_d()
    merged = cases.fused(whole)
    folder = cases.folder_of(tmp_path, merged)
    for rank, module in enumerate(cases.modules(folder, 2)):
        cases.assert_holds(module, cases.share(whole, 2, rank))
        for layer in LAYERS:
            for stem, runs in MERGED_ROWS.items():
                stored = merged[f"model.layers.{layer}.{stem}.weight"]
                assert (joined(module, layer, stem) == stored[rows_of(runs[rank])]).all()
                assert not np.array_equal(joined(module, layer, stem), np.split(stored, 2)[rank])


def numbered(rows):
    """Return rows that tell their own index: BF16 holds whole numbers to 256, so a row has a high part and a low one."""
    index = np.arange(rows)[:, None]
    return np.where(np.arange(256)[None, :] % 2 == 0, index // 256 * 256, index % 256).astype(np.float32)


def indices(rows):
    return (rows[:, 0] + rows[:, 1]).astype(int).tolist()


def test_R029_no_rank_holds_another_ranks_rows(tmp_path):
    """R029, P-04: row value is row index; the ranks together rebuild q, gate and up, and k and v (twice at TP 4)."""
    merged = cases.fused(cases.toy_d())
    merged |= {name: numbered(1024) for name in merged if QKV in name or GATE_UP in name}
    folder = cases.folder_of(tmp_path, merged)
    for tp in (2, 4):
        found = cases.modules(folder, tp)
        for layer in LAYERS:
            rows = {stem: [indices(joined(module, layer, stem)) for module in found] for stem in PARTS}
            q, kv, gate = 512 // tp, 128, 512 // tp
            assert [row for rank in rows[QKV] for row in rank[:q]] == list(range(512))
            for first, start in ((512, q), (768, q + kv)):
                held = [rank[start : start + kv] for rank in rows[QKV]]
                heads = [list(range(first, first + 128)), list(range(first + 128, first + 256))]
                assert held == [head for head in heads for _ in range(tp // 2)]
            assert [row for rank in rows[GATE_UP] for row in rank[:gate]] == list(range(512))
            assert [row for rank in rows[GATE_UP] for row in rank[gate:]] == list(range(512, 1024))
            if tp == 2:
                assert rows[GATE_UP][1] == [*range(256, 512), *range(768, 1024)]
                assert rows[GATE_UP][0] == [*range(256), *range(512, 768)]


# --- E: more ranks than key/value heads --------------------------------------------------------------------------


@pytest.mark.parametrize("is_merged", [False, True], ids=["split", "merged"])
def test_R031_more_ranks_than_key_value_heads_repeat_whole_heads(tmp_path, is_merged):
    """R031, P-08, P-11: TP 4, two heads: rank r holds q rows r * 128 on and head r // 2; merged, rank 3 by its rows."""
    whole = cases.toy_d()
    merged = cases.fused(whole)
    folder = cases.folder_of(tmp_path, merged if is_merged else whole)
    found = cases.modules(folder, 4)
    for rank, module in enumerate(found):
        cases.assert_holds(module, cases.share(whole, 4, rank))
        k = cases.held(module)["layers.0.self_attn.k_proj.weight"].float().numpy()
        assert (k == whole["model.layers.0.self_attn.k_proj.weight"][rank // 2 * 128 :][:128]).all()
    stored = merged["model.layers.1.self_attn.qkv_proj.weight"]
    assert (joined(found[3], 1, QKV) == stored[rows_of([(384, 512), (640, 768), (896, 1024)])]).all()


@pytest.mark.parametrize("tp", [3, 8])
def test_R031_ranks_over_which_the_heads_do_not_go_out_are_refused(tmp_path, tp):
    """R031, P-09: neither TP 3 nor TP 8; the heads and tp are named."""
    folder = cases.folder_of(tmp_path, cases.toy_d())
    said = [text for text in cases.errors(lambda: cases.ranks(folder, tp=tp)) if "heads" in text]
    assert said == [
        f"layers.0.self_attn.qkv_proj: 4 query heads do not divide by tp {tp} (q_heads=4, kv_heads=2, tp={tp}); "
        "tp sizes that fit: 1, 2, 4 (and 1 more like it)"
    ]


# --- F: a vocabulary that does not divide ------------------------------------------------------------------------


def odd_vocabulary(folder):
    """Write TOY-D with 97 words, embedding and head of row index + 1; return its tensors and the folder."""
    whole = cases.toy_d(vocab_size=97)
    rows = np.repeat(np.arange(1, 98, dtype=np.float32)[:, None], 256, axis=1)
    whole |= {"model.embed_tokens.weight": rows, "lm_head.weight": rows}
    return whole, cases.folder_of(folder, whole, {"vocab_size": 97})


def test_R036_a_vocabulary_that_does_not_divide_ends_with_zero_rows(tmp_path):
    """R036, P-14: 97 words on two ranks are 49 rows each; rank 1 holds rows 49 to 96 and one of zeros, in both tables."""
    whole, folder = odd_vocabulary(tmp_path)
    found = cases.modules(folder, 2)
    for rank, module in enumerate(found):
        cases.assert_holds(module, cases.share(whole, 2, rank))
    for name in ("embed_tokens.weight", "lm_head.weight"):
        firsts = [cases.held(module)[name][:, 0].tolist() for module in found]
        assert firsts == [list(range(1, 50)), [*range(50, 98), 0]]


def test_R036_logits_of_padded_words_are_cut(tmp_path, rank_pool):
    """R036: the real forward on two rank processes; a zero logit would win where all others are below it."""
    whole, folder = odd_vocabulary(tmp_path)
    whole["model.norm.weight"] = -np.ones(256, np.float32)  # every true logit is below zero
    cases.folder_of(folder, whole, {"vocab_size": 97})
    asked = [{"ids": [[96, 0, 48, 49, 5]], "mask": None, "positions": None, "chunks": None, "keep": 0}]
    (alone,) = outputs(str(folder), asked, {"tp": 1, "dtype": "float32"})
    for (logits,) in rank_pool.values(
        "support.ranks_decoders:outputs", 2, (str(folder), asked, {"tp": 2, "dtype": "float32"})
    ):
        assert logits.shape == (1, 5, 97)
        assert (logits < 0).all()
        torch.testing.assert_close(logits, alone, rtol=1e-3, atol=0)  # sums of thousands that nearly cancel


def test_R036_without_padding_the_vocabulary_is_refused_with_both_numbers(tmp_path):
    """R036, P-14: both tables are named, with 97, 2 and the size to pad to."""
    _, folder = odd_vocabulary(tmp_path)
    assert cases.errors(lambda: cases.ranks(folder, tp=2, vocab_padding="off")) == [
        f"{stem}: cannot cut out[0:97]: a vocabulary of 97 does not divide by tp 2; pad it to 98, or allow "
        "vocab_padding='auto'"
        for stem in ("embed_tokens", "lm_head")
    ]


def test_R037_padding_is_planned_alike_for_every_device(tmp_path):
    """R037: cpu, cuda and meta; the same figures, findings, digest, reads and fills."""
    _, folder = odd_vocabulary(tmp_path)
    seen = []
    for device in ("cpu", "cuda", "meta"):
        made = plan(folder, tp=2, target="cpu", config=LoadConfig(device=device), registry=cases.installed()).check()
        said = made.to_json()
        del said["options"]["device"]
        steps = [(task.stem, task.reads, task.fills) for rank in (0, 1) for task in made.tasks(rank)]
        seen.append((said, made.digest, steps))
    assert seen[0] == seen[1] == seen[2]
    fills = [(stem, fill.region, fill.value) for stem, _, fills in seen[0][2] for fill in fills]
    assert fills == [(stem, ((48, 1), (0, 256)), 0.0) for stem in ("embed_tokens", "lm_head")]
