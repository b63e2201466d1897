"""What rank processes run for the tests of SmolLM2; imports no transformers."""

from __future__ import annotations

import steelyard
from steelyard.generation import TextGenerator
from steelyard.texts import generation_settings


def continued(folder: str, prompts: list[str], tokens: int) -> list[tuple[int, ...]]:
    """Load on this rank's share, in float32, and return the tokens that follow each prompt."""
    generator = TextGenerator(steelyard.load(folder, device="cpu", dtype="float32"), generation_settings(folder))
    return [generator.generate(prompt, max_new_tokens=tokens).ids for prompt in prompts]
