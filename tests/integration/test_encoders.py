"""Real encoders against transformers: one process, and two and three real rank processes."""

from __future__ import annotations

import random

import pytest
import torch

import steelyard
from steelyard.embedding import SentenceEncoder
from steelyard.sentences import sentence_settings
from support import ranks_encoders
from support.minilm import minilm

WORDS = "the cat sat on a mat while rain fell over quiet hills and rivers ran to the sea at dawn".split()
TOLERANCE = 1e-5


def sentences() -> list[str]:
    rng = random.Random(0)
    lengths = [1, 2, 5, 9, 20, 40, 80, 130, 180, 250]
    return [" ".join(rng.choice(WORDS) for _ in range(lengths[index % 10])) for index in range(50)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return sentences()


@pytest.fixture(scope="module")
def oracle(texts):
    """Return transformers' vectors: mean of the tokens, normalised, cut at the folder's 256 tokens."""
    from transformers import AutoTokenizer, BertModel

    folder = minilm()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).eval()
    vectors, lengths = [], []
    with torch.inference_mode():
        for text in texts:
            batch = tokenizer([text], truncation=True, max_length=256, padding=False, return_tensors="pt")
            states = model(**batch).last_hidden_state
            vectors.append(torch.nn.functional.normalize(states.mean(1), dim=-1)[0])
            lengths.append(batch["input_ids"].shape[1])
    assert sum(128 < length <= 256 for length in lengths) >= 10
    return torch.stack(vectors)


def test_embeddings_of_the_real_model_equal_transformers(texts, oracle):
    """B-07, X-02: registry to plugin to loader to module, nothing mocked; texts past the 128 that tokenizer.json bakes in."""
    folder = minilm()
    settings = sentence_settings(str(folder))
    model = steelyard.load(settings.folder, device="cpu")
    encoder = SentenceEncoder(model, settings)
    assert (settings.pooling, settings.normalize, encoder.max_tokens) == (("mean",), True, 256)
    torch.testing.assert_close(encoder.encode(texts), oracle, atol=TOLERANCE, rtol=0)
    assert model.report.dropped == {"embeddings.position_ids": "a buffer that counts positions; they are computed"}


@pytest.mark.parametrize("world", [2, 3], ids="{} ranks".format)
def test_embeddings_on_several_real_ranks_equal_transformers(rank_pool, texts, oracle, world):
    """B-06, X-03, P-04: every rank gets the whole result, and received exactly its share of the bytes."""
    folder = minilm()
    results = rank_pool.values("support.ranks_encoders:embed", world, (str(folder), texts), timeout=240)
    plan = steelyard.plan(folder, tp=world, target="cpu")
    for rank, found in enumerate(results):
        torch.testing.assert_close(found["vectors"], oracle, atol=TOLERANCE, rtol=0)
        assert found["digest"] == plan.digest
        assert found["rank"]["rank"] == rank
        assert found["rank"]["received"] == plan.ranks[rank].bytes_needed
        assert found["rank"]["received"] <= found["rank"]["read"]
    entries = plan.checkpoint.entries
    whole = sum(entry.nbytes for name, entry in entries.items() if name not in plan.dropped)
    repeated = sum(  # what every rank holds whole: norms, rowwise biases, the pooler
        read_bytes
        for read in plan.reads(0)
        if (read_bytes := entries[read.name].nbytes) and read.cut.taken == read.shape
    )
    assert sum(found["rank"]["received"] for found in results) == whole + (world - 1) * repeated


def tiny(kind: str, folder) -> str:
    """Save a tiny random encoder and return its folder."""
    import transformers

    config, model = {
        "roberta": (transformers.RobertaConfig, transformers.RobertaModel),
        "xlm-roberta": (transformers.XLMRobertaConfig, transformers.XLMRobertaModel),
        "bert": (transformers.BertConfig, transformers.BertModel),
    }[kind]
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 36, "num_hidden_layers": 2}
    made = model(config(vocab_size=50, max_position_embeddings=40, pad_token_id=1, **sizes)).eval()
    made.save_pretrained(folder)
    return str(folder)


IDS = [[0, 5, 6, 9, 11, 2], [0, 7, 2, 1, 1, 1], [0, 21, 22, 23, 2, 1]]
MASK = [[int(token != 1) for token in row] for row in IDS]


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_tiny_encoders_equal_transformers_on_one_two_and_three_ranks(rank_pool, tmp_path, kind):
    """B-06, B-07, B-09, X-03."""
    import transformers

    folder = tiny(kind, tmp_path)
    mask = torch.tensor(MASK)
    with torch.inference_mode():
        expected = transformers.AutoModel.from_pretrained(folder)(torch.tensor(IDS), mask).last_hidden_state
    kept = mask.bool()
    for world in (1, 2, 3):
        if world == 1:
            results = [ranks_encoders.hidden(folder, IDS, MASK)]
        else:
            results = rank_pool.values("support.ranks_encoders:hidden", world, (folder, IDS, MASK))
        for found in results:
            torch.testing.assert_close(found["hidden"][kept], expected[kept], atol=TOLERANCE, rtol=0)


def test_rank_processes_never_import_transformers(rank_pool):
    """X-18: what only the parent needs is not paid for by every rank."""
    assert rank_pool.values("support.ranks_encoders:heavy_modules") == [[], []]
