"""The real SmolLM2-135M-Instruct: what it writes here is what transformers makes it write, on one rank and on three."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import steelyard
from steelyard.generation import TextGenerator
from steelyard.texts import generation_settings
from support.smollm2 import smollm2

PROMPT = "The capital of France is"
WRITES = (
    " Paris.\n\nThe answer is: 2"  # ten tokens, by transformers; with rows left in rotary pairs only the first is right
)
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8,"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def folder():
    return str(smollm2())


@pytest.fixture(scope="module")
def model(folder):
    return steelyard.load(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def peer(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_model_writes_what_it_should(model, folder):
    """The text goes on as by transformers, ten tokens far, and ends by itself in a chat."""
    generator = TextGenerator(model, generation_settings(folder))
    assert generator.generate(PROMPT, max_new_tokens=10).text == WRITES
    chat = generator.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    made = generator.generate(chat, max_new_tokens=20)
    assert (made.text, made.stop) == (ANSWER, "eos")


def test_logits_equal_transformers(model, peer, folder):
    """P-25: bf16 as stored, computed in float32; a text, a chat and a count, each whole and token by token."""
    generator = TextGenerator(model, generation_settings(folder))
    for text in (PROMPT, COUNTING, "<|im_start|>user\nWie heißt du?<|im_end|>\n"):
        ids = torch.tensor([generator.encode(text)])
        with torch.inference_mode():
            expected = peer(ids).logits
            whole = model.module(ids)
            cache = model.module.new_cache(1, ids.shape[1])
            steps = [model.module(ids[:, at : at + 1], cache=cache) for at in range(ids.shape[1])]
        assert (whole - expected).abs().max() <= 1e-3
        assert (torch.cat(steps, 1) - expected).abs().max() <= 1e-3


def test_the_head_is_the_table(model):
    """R060, O-18: tied and not stored, so one memory."""
    assert model.report.ties[0].target == "lm_head"
    head, table = model.module.head.segments[0].kernel.weight, model.module.embedding.weight
    assert head.data_ptr() == table.data_ptr()


def test_three_ranks_write_the_same(model, folder, rank_pool):
    """P-08, P-25: nine heads and three key/value heads go out over three ranks; every rank has the same tokens."""
    generator = TextGenerator(model, generation_settings(folder))
    alone = [generator.generate(prompt, max_new_tokens=12).ids for prompt in (PROMPT, COUNTING)]
    asked = (folder, [PROMPT, COUNTING], 12)
    for found in rank_pool.values("support.ranks_smollm2:continued", 3, asked, timeout=300):
        assert found == alone


def test_the_command_streams_the_text_on_three_ranks(folder):
    """Under torchrun rank 0 alone prints, and nothing but the continuation."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    command = [
        "-m",
        "steelyard.cli",
        "generate",
        folder,
        PROMPT,
        "--max-new-tokens",
        "10",
        "--dtype",
        "float32",
        "--json",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *command], capture_output=True, text=True, timeout=300, check=True, env=environment
    )
    said = json.loads(done.stdout)
    assert (said["prompt"], said["text"]) == (PROMPT, WRITES)


def test_two_ranks_are_refused_by_the_heads(folder):
    """R031: nine heads do not go out over two ranks, and the plan says so before anything is read."""
    errors = steelyard.plan(folder, tp=2, target="cpu").errors
    assert errors
    assert all("9 query heads do not divide by tp 2" in error.text for error in errors)
