"""What rank processes run for the tests of generation; and a model that writes what a test says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import distributed, nn

from steelyard.generation import Generation, TextGenerator
from steelyard.sampling import Sampling
from steelyard.texts import GenerationSettings
from support.parrot import BOS, EOS, V, bytes_tokenizer

Rule = Callable[[list[int]], torch.Tensor]


class Scripted(nn.Module):
    """A decoder whose logits a rule makes of all tokens so far; it records what it is fed."""

    def __init__(self, rule: Rule, *, max_positions: int = 64, has_head: bool = True, vocabulary: int = V) -> None:
        super().__init__()
        self.rule, self.max_positions, self.has_head, self.vocabulary = rule, max_positions, has_head, vocabulary
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.fed: list[list[int]] = []
        self.caches: list[int] = []

    def new_cache(self, batch: int, tokens: int) -> list[int]:
        assert batch == 1
        self.caches.append(tokens)
        return []

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: list[int] | None = None,
        keep: int = 0,
    ) -> torch.Tensor:
        assert (attention_mask, position_ids, keep) == (None, None, 1)
        assert input_ids.dtype == torch.int64
        assert cache is not None
        self.fed.append(input_ids[0].tolist())
        cache.extend(self.fed[-1])
        assert len(cache) <= self.caches[-1]
        return self.rule(cache)[None, None]


def hot(token: int) -> torch.Tensor:
    """Return logits that are largest at one token."""
    logits = torch.zeros(V, dtype=torch.bfloat16)
    logits[token] = 1
    return logits


def script(*tokens: int, after: int) -> Rule:
    """Return a rule that writes tokens behind a prompt of ``after`` tokens, and then the first again and again."""
    return lambda seen: hot(tokens[(len(seen) - after) % len(tokens)])


def generator_of(
    folder: Path | str, rule: Rule, *, eos: Sequence[int] = (EOS,), bos: int | None = BOS, **options: int
) -> TextGenerator:
    """Return a `TextGenerator` around a model that needs no checkpoint."""
    folder = Path(folder)
    if not (folder / "tokenizer.json").exists():
        bytes_tokenizer().save(str(folder / "tokenizer.json"))
    plan = type("Plan", (), {"family_key": "toy", "config": {}})()
    model = type("Model", (), {"module": Scripted(rule, **options), "plan": plan})()
    return TextGenerator(model, GenerationSettings(folder, tuple(eos), bos))


def write(folder: str, case: str) -> tuple[Generation, list[list[int]]]:
    """Write one text on this rank; what differs between the ranks is in the case's name."""
    rank = distributed.get_rank()
    rules: dict[str, Rule] = {
        "draws": lambda seen: torch.zeros(V),
        "logits": script(*b"abcd" if rank == 0 else b"wxyz", after=2),
        "prompts": script(*b"abcd", after=2),
        "eos": script(*(b"ab" if rank == 0 else b"a"), EOS, after=2),
        "broken first": lambda seen: torch.full((V,), math.nan if rank == 0 else 0.0),
        "broken second": lambda seen: hot(65) if rank == 0 else torch.full((V,), math.nan),
        "long": script(*b"abcd", after=2),
    }
    prompts = {"prompts": b"hi" if rank == 0 else b"something else", "long": b"x" * 65 if rank == 0 else b"x"}
    generator = generator_of(f"{folder}/{rank}", rules[case])
    sampling = Sampling(temperature=1.0) if case == "draws" else Sampling()
    made = generator.generate(list(prompts.get(case, b"hi")), max_new_tokens=6, sampling=sampling)
    return made, generator.module.fed
