"""The runnable decoders, loaded from files that transformers wrote, against transformers."""

from pathlib import Path

import pytest
import torch

import steelyard
from steelyard.config import LoadConfig
from support.decoders import assert_close, call, expected_logits, left_padded, one_thread, texts, tiny

WORKER = f"{Path(__file__).with_name('ranks_moe.py')}:outputs"
VARIANTS = {
    "qwen2_moe": [
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"num_experts": 5, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
        {"num_experts": 5, "num_experts_per_tok": 1, "decoder_sparse_step": 2, "qkv_bias": False},
    ],
    "qwen3_moe": [
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"num_experts": 5, "num_experts_per_tok": 3, "decoder_sparse_step": 2, "attention_bias": True},
        {"num_experts": 5, "num_experts_per_tok": 1, "mlp_only_layers": [0]},
    ],
    "mixtral": [
        {"num_local_experts": 6, "num_experts_per_tok": 2},
        {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 4},
        {"num_local_experts": 5, "num_experts_per_tok": 1},
    ],
}
JOBS = [  # tp, ep, moe_tp; all legal ones of up to 4 ranks
    (1, 1, 1), (2, 1, 2), (4, 1, 4), (1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 4, 1), (4, 4, 1), (1, 2, 2), (2, 2, 2), (4, 2, 2),
]  # fmt: skip


def world_of(tp, ep, moe_tp):
    return max(tp, ep * moe_tp)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function from a model type and changes of its config to a tiny checkpoint that transformers wrote."""

    made = {}

    def folder_of(model_type, /, **changes):
        key = f"{model_type} {sorted(changes.items())}"
        if key not in made:
            made[key] = tiny(tmp_path_factory.mktemp(model_type), model_type, **changes)
        return made[key]

    return folder_of


@pytest.fixture(scope="module")
def variants_of(folder_of):
    def variants_of(model_type):
        return [folder_of(model_type, **changes) for changes in VARIANTS[model_type]]

    return variants_of


@pytest.fixture(scope="module")
def expected():
    """Return `expected_logits`, each result kept: many ways to cut a model are compared with it."""
    kept = {}

    def expected(folder, asked):
        if (folder, str(asked)) not in kept:
            kept[folder, str(asked)] = expected_logits(folder, asked)
        return kept[folder, str(asked)]

    return expected


@pytest.fixture
def outputs(rank_pool):
    """Return a function that loads checkpoints over ranks and returns, by rank, what each computes of its texts."""

    def outputs(folders, calls, *, tp=1, ep=1, moe_tp=None, dtype="float32"):
        options = {"tp": tp, "ep": ep, "moe_tp": moe_tp, "dtype": dtype}
        return rank_pool.values(WORKER, world_of(tp, ep, moe_tp or 1), (folders, calls, options))

    return outputs


def asked_of(replica):
    """Return a replica's batches: whole texts and padded ones, others and longer ones than those of the replica before."""
    return [call(texts(2, 6 + 3 * replica, seed=replica)), left_padded([7, 3 + replica], seed=10 + replica)]


@pytest.mark.parametrize("model_type", VARIANTS)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: "tp{}-ep{}-moe_tp{}".format(*job))
def test_every_rank_computes_what_transformers_computes(outputs, expected, variants_of, model_type, job):
    """E-02, E-03, E-31, R034, R073: 5 and 6 experts over 2 and 4 ranks, whole and cut, each replica with its own texts.

    Jobs of 4 ranks take two of the three variants in turn.
    """
    tp, ep, moe_tp = job
    calls = [asked_of(replica) for replica in range(world_of(*job) // tp)]
    left_out = JOBS.index(job) % 3 if world_of(*job) == 4 else None
    folders = [folder for place, folder in enumerate(variants_of(model_type)) if place != left_out]
    for rank, found in enumerate(outputs(folders, calls, tp=tp, ep=ep, moe_tp=moe_tp)):
        for folder, outs in zip(folders, found, strict=True):
            for asked, out in zip(calls[rank // tp], outs, strict=True):
                assert_close(out, expected(folder, asked), asked=asked)


@pytest.mark.parametrize("model_type", VARIANTS)
def test_replicas_may_bring_texts_of_any_length(outputs, folder_of, model_type):
    """One token on one rank beside 21 on the other; both go through the experts of both."""
    folder = folder_of(model_type, **VARIANTS[model_type][0])
    calls = [[call(texts(1, 1, seed=3))], [call(texts(3, 7, seed=4))]]
    for asked, found in zip(calls, outputs([folder], calls, ep=2), strict=True):
        assert_close(found[0][0], expected_logits(folder, asked[0]))


@pytest.mark.parametrize(("tp", "ep", "moe_tp"), [(1, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("model_type", VARIANTS)
def test_decoding_with_a_cache_is_the_whole_forward(outputs, folder_of, model_type, tp, ep, moe_tp):
    """A prompt, then tokens alone and in pairs, with experts on several ranks; a window of 4 slides over it."""
    folder = folder_of(model_type, **VARIANTS[model_type][1])
    calls = [
        [
            call(texts(2, 9, seed=replica), chunks=(3, 1, 1, 2, 2)),
            left_padded([6, 4], seed=replica) | {"chunks": (4, 1, 1)},
        ]
        for replica in range(world_of(tp, ep, moe_tp) // tp)
    ]
    for rank, found in enumerate(outputs([folder], calls, tp=tp, ep=ep, moe_tp=moe_tp)):
        for asked, out in zip(calls[rank // tp], found[0], strict=True):
            assert_close(out, expected_logits(folder, asked), asked=asked)


WINDOWS = {
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 3},
    "mixtral": {"sliding_window": 3},
}


@pytest.mark.parametrize("model_type", WINDOWS)
def test_a_sliding_window_is_the_models(outputs, folder_of, model_type):
    """Over every other layer of Qwen2-MoE, over all of the others; without it the numbers are others."""
    asked = call(texts(2, 9))
    slides, whole = folder_of(model_type, **WINDOWS[model_type]), folder_of(model_type)
    ((first,), (second,)) = outputs([slides, whole], [[asked]])[0]
    assert_close(first, expected_logits(slides, asked))
    assert (first - second).abs().max() > 1e-2


def test_a_model_without_a_head_returns_hidden_states(tmp_path, outputs):
    """Its names have no prefix."""
    asked = call(texts(2, 5))
    for model_type in VARIANTS:
        folder = tiny(tmp_path / model_type, model_type, bare=True)
        assert_close(outputs([folder], [[asked]])[0][0][0], expected_logits(folder, asked))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_renormalisation_changes_the_numbers(outputs, folder_of, model_type):
    """So that the comparison above tells a lost switch."""
    asked = call(texts(1, 5))
    (with_it,), (without,) = outputs([folder_of(model_type, norm_topk_prob=one) for one in (True, False)], [[asked]])[0]
    assert (with_it - without).abs().max() > 1e-2


@pytest.mark.parametrize("model_type", VARIANTS)
def test_all_experts_a_token_and_one_expert_are_computed(outputs, folder_of, model_type):
    """E-31: top-k equal to the number of experts, and a layer of one expert."""
    key = "num_local_experts" if model_type == "mixtral" else "num_experts"
    asked = call(texts(2, 5))
    for count in (1, 3):
        folder = folder_of(model_type, **{key: count, "num_experts_per_tok": count})
        assert_close(outputs([folder], [[asked]])[0][0][0], expected_logits(folder, asked))


@pytest.mark.parametrize("model_type", VARIANTS)
def test_bfloat16_keeps_the_weights_of_experts_in_float32(folder_of, model_type):
    """The router runs in the model's dtype, or in float32 if the user keeps it so; its softmax is float32 in both."""
    folder = folder_of(model_type, **VARIANTS[model_type][0])
    asked = call(texts(2, 6))
    expected = expected_logits(folder, asked)
    for kept, dtype in (((), torch.bfloat16), (("mlp.gate",), torch.float32)):
        options = LoadConfig(dtype="bfloat16", keep_float32=kept)
        module = steelyard.load(folder, device="cpu", config=options).module
        seen = []
        mlp = module.layers[0].mlp
        mlp.experts.register_forward_pre_hook(lambda _, given, seen=seen: seen.append([one.dtype for one in given]))
        with torch.inference_mode(), one_thread():
            out = module(torch.tensor(asked["ids"]))
        assert seen == [[torch.bfloat16, torch.int64, torch.float32]]
        assert next(mlp.router.parameters()).dtype == dtype
        assert out.dtype == torch.bfloat16
        # The median: a token between two experts may fall to the other one in 8 bits of mantissa.
        assert (out.float() - expected).abs().median() < 0.03 * expected.abs().median()
