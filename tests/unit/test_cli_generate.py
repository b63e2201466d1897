"""``steelyard generate``: what goes to which stream, how it ends, and which words are wrong usage."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli import app
from steelyard.registry import default_registry, reset_default_registry
from steelyard.testing.trees import write_distribution
from support.parrot import BOS, END, EOS, START, ParrotFamily, write_parrot

TESTS = Path(__file__).parents[1]
SAID = "o€p\n"
SCRIPT = [ord("?"), *SAID.encode(), EOS]  # what follows a question mark
FOREVER = [*b"abcda"]


@pytest.fixture(autouse=True)
def _registry():
    reset_default_registry()
    default_registry().add("model", ParrotFamily, override=True)
    yield
    reset_default_registry()


@pytest.fixture
def parrot(tmp_path):
    return write_parrot(tmp_path / "parrot", SCRIPT, FOREVER)


def run(*words, stdin=None):
    return CliRunner().invoke(app, ["generate", *map(str, words), "--device", "cpu"], input=stdin)


def test_standard_output_has_the_continuation_alone(parrot):
    done = run(parrot, "why?")
    assert (done.exit_code, done.stdout) == (0, f"{SAID}\n")
    speed, _, rest = done.stderr.partition(" tokens/s; ")
    assert speed.startswith("7 tokens, ")
    assert rest.startswith("the model ended the text (prompt: 4 tokens, ")
    assert rest.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text", "why"),
    [
        (["--max-new-tokens", 6], "bcdabc", "--max-new-tokens was reached"),
        ([], "bcda" * 15 + "bcd", "the model has no more positions"),
    ],
    ids=["length", "positions"],
)
def test_why_a_text_ended_goes_to_standard_error(parrot, words, text, why):
    done = run(parrot, "a", *words)
    assert (done.exit_code, done.stdout) == (0, f"{text}\n")
    assert f"; {why} (prompt: 1 tokens" in done.stderr


def test_without_a_length_64_tokens_are_written(tmp_path):
    folder = write_parrot(tmp_path, FOREVER, max_position_embeddings=1000)
    assert run(folder, "a").stdout == "bcda" * 16 + "\n"


def test_a_text_of_one_token_has_no_speed(parrot):
    done = run(parrot, "a", "--max-new-tokens", 1)
    assert done.stderr.startswith("1 tokens; --max-new-tokens was reached")


def test_json_is_one_object_and_nothing_else(parrot):
    done = run(parrot, "why?", "--json")
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert found.pop("tokens_per_second") > 0
    assert found.pop("prefill_seconds") > 0
    assert found.pop("decode_seconds") > 0
    ids = [*SAID.encode(), EOS]
    assert found == {
        "prompt": "why?", "text": SAID, "ids": ids, "prompt_tokens": 4, "new_tokens": len(ids), "stop": "eos",
    }  # fmt: skip


@pytest.mark.parametrize(("stdin", "tokens"), [("why?\n", 4), ("why?\n\n", 5), ("why?", 4)], ids=repr)
def test_a_prompt_from_stdin_loses_one_final_newline(parrot, stdin, tokens):
    found = json.loads(run(parrot, "-", "--json", stdin=stdin).stdout)
    assert (found["prompt"], found["prompt_tokens"]) == (stdin.removesuffix("\n"), tokens)


def test_an_empty_prompt_begins_with_the_folders_first_token(tmp_path):
    folder = write_parrot(tmp_path, [BOS, *b"hi", EOS])
    assert run(folder, "").stdout == "hi\n"


def test_a_chat_puts_the_prompt_between_the_templates_tokens(tmp_path):
    """The model's answer follows the newline behind ``assistant``."""
    folder = write_parrot(tmp_path, [ord("\n"), *b"yes", EOS], max_position_embeddings=200)
    found = json.loads(run(folder, "no", "--chat", "--system", "Be brief", "--json").stdout)
    ids = [START, *b"system\nBe brief", END, *b"\n", START, *b"user\nno", END, *b"\n", START, *b"assistant\n"]
    assert (found["text"], found["prompt"], found["prompt_tokens"]) == ("yes", "no", len(ids))
    alone = json.loads(run(folder, "no", "--chat", "--json").stdout)
    assert alone["prompt_tokens"] == len(ids) - len([START, *b"system\nBe brief", END, *b"\n"])


def test_a_seed_makes_a_text_that_comes_again(tmp_path):
    folder = write_parrot(tmp_path, [*b"ab", EOS])

    def drawn(*words):
        return run(folder, "z", "--temperature", 2, "--max-new-tokens", 20, *words).stdout

    assert drawn("--seed", 1) == drawn("--seed", 1) != drawn("--seed", 2)
    assert drawn() != drawn()
    assert run(folder, "a", "--temperature", 2, "--top-p", 0.01).stdout == "b\n"


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "Missing argument"),
        (["why?", "--max-new-tokens", 0], "0 is not in the range"),
        (["why?", "--temperature", -1], "-1.0 is not in the range"),
        (["why?", "--temperature", "nan"], "temperature=nan: give 0"),
        (["why?", "--top-p", 0], "top_p=0.0 is no probability"),
        (["why?", "--seed", -1], "-1 is not in the range"),
        (["why?", "--system", "Be brief"], "give --chat too"),
        (["why?", "--dtype", "int3"], "int3"),
        (["why?", "--tp", "0"], "tp"),
    ],
    ids=str,
)
def test_wrong_usage_exits_with_2(parrot, words, text):
    done = run(parrot, *words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert text in " ".join(done.stderr.replace("│", " ").split())


def test_stdin_that_is_no_text_is_wrong_usage(parrot):
    done = run(parrot, "-", stdin=b"\xff")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "the prompt cannot be read from stdin" in done.stderr


def refused(done):
    assert (done.exit_code, done.stdout) == (1, "")
    return done.stderr


def test_a_folder_that_is_none_exits_with_1(tmp_path):
    assert refused(run(tmp_path / "nowhere", "why?")).startswith("error: ")


def test_a_prompt_that_is_too_long_exits_with_1(parrot):
    assert refused(run(parrot, "x" * 65)) == (
        "error: the prompt has 65 tokens, and the model takes 64, the continuation included; give a shorter prompt\n"
    )


def test_a_decoder_without_a_head_exits_with_1(tmp_path):
    folder = write_parrot(tmp_path, SCRIPT, architectures=["ParrotModel"])
    assert refused(run(folder, "why?")) == (
        "error: ParrotModel cannot write texts: it has no head; load the checkpoint of its causal language model\n"
    )


def test_a_model_without_a_chat_template_exits_with_1(parrot):
    (parrot / "tokenizer_config.json").unlink()
    assert refused(run(parrot, "why?", "--chat")).startswith(f"error: {parrot}: has no chat template, neither ")


# --- processes ---------------------------------------------------------------------------------------------------


def environment(tmp_path):
    """Return an environment in which the parrot is an installed plugin."""
    offered = {"steelyard.models": dict.fromkeys(ParrotFamily.keys, "support.parrot")}
    write_distribution(tmp_path / "tree", "parrot", entry_points=offered)
    paths = [str(tmp_path / "tree"), str(TESTS), *(path for path in sys.path if path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def test_text_comes_as_it_is_written_and_ctrl_c_ends_it_with_130(tmp_path):
    """Design 5: Ctrl-C leaves nothing behind: no traceback."""
    folder = write_parrot(tmp_path / "parrot", FOREVER, max_position_embeddings=10**9)
    words = ["generate", str(folder), "a", "--max-new-tokens", str(10**9), "--device", "cpu"]
    child = subprocess.Popen(
        [sys.executable, "-m", "steelyard.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    )
    first = child.stdout.read(8)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=120)
    assert (first, child.returncode, err) == (b"bcdabcda", 130, b"")
    assert set(out) <= set(b"abcd")


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_under_torchrun_rank_0_prints_and_reads_stdin(tmp_path, drawn):
    """Without a seed the ranks' own draws would differ."""
    folder = write_parrot(tmp_path / "parrot", [*SCRIPT, *b"abc"])
    words = ["generate", str(folder), "-", "--device", "cpu", *(["--temperature", "1.5"] if drawn else [])]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "steelyard.cli", *words],
        input="why?\n",
        capture_output=True,
        encoding="utf-8",
        env=environment(tmp_path),
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" (prompt: 4 tokens, ") == 1
    assert drawn or done.stdout == f"{SAID}\n"
