"""SmolLM2 as ``examples/smollm2.py`` converts it: what transformers makes of the folder, and how the folder is made."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import regex
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.smollm2 import converter, smollm2

PROMPT = "The capital of France is"
PARIS = " Paris.\n\nThe answer is: 2"  # the next ten tokens
TEXTS = (
    PROMPT,
    "In 1969, 12345 + 67890 = 80235; ½ and ² and Ⅷ and ٣ are numbers too.",
    "  leading,\ttabs\t\tand   trailing   \n\n",
    "I'm sure they'll say it's Zoë's naïve café, where we've been; I'd don't.",
    "日本語の文章、한국어 문장, русский текст, नमस्ते, مرحبا",
    "👩‍👩‍👧‍👦 and 🇫🇷 and e\u0301",
    "def f(x: int = 10) -> str:\n    return f'{x:>08.3f}' if x != -1 else \"\"  # no\n",
    "x\r\ny\u00a0z\u3000w",
    "a  1   22",  # blanks before a digit stay whole: without the split at digits, the last would go with it
)


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(converter().gguf_file())


@pytest.fixture(scope="module")
def tokens(reader):
    return reader.fields["tokenizer.ggml.tokens"].contents()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(smollm2())


@pytest.fixture(scope="module")
def loaded():
    """Return transformers' float32 model, and what it says about the keys."""
    model, found = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32, output_loading_info=True)
    return model.eval(), found


@pytest.fixture
def light(monkeypatch):
    """Let the converter write small files in place of the real ones; what is returned lists the folders it wrote."""
    folders = []

    def convert(source, folder):
        folders.append(folder)
        for name in converter().WRITTEN:
            (folder / name).write_text(name)

    monkeypatch.setattr(converter(), "convert", convert)
    return folders


# --- the model ---


def test_transformers_finds_every_weight_and_no_other(loaded):
    model, found = loaded
    assert {name: list(keys) for name, keys in found.items()} == dict.fromkeys(found, [])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_transformers_continues_with_paris(loaded, tokenizer):
    prompt = tokenizer(PROMPT, return_tensors="pt")
    made = loaded[0].generate(**prompt, max_new_tokens=10, do_sample=False)
    assert tokenizer.decode(made[0]) == PROMPT + PARIS


def test_without_the_order_of_hugging_face_the_model_cannot_count(loaded, tokenizer):
    """Query and key rows as stored load without complaint, and even then the next word of the prompt above is Paris."""
    model, _ = loaded
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    stored = {
        name: as_llama_cpp_stores(weight, heads[part])
        for name, weight in model.state_dict().items()
        if (part := name.split(".")[-2]) in heads
    }
    counted = tokenizer(", ".join(map(str, range(1, 21))), return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        right, wrong = (
            torch.func.functional_call(model, changed, kwargs={"input_ids": counted, "labels": counted}).loss
            for changed in ({}, stored)
        )
    assert len(stored) == 60
    assert right < 0.2  # nats a token: 0.139
    assert wrong > 1.0  # 1.454


def as_llama_cpp_stores(rows, heads):
    """Return rows in llama.cpp's order: row ``i`` of half ``s`` of a head goes to place ``2 i + s`` of that head."""
    size = len(rows) // heads
    places = [
        head * size + 2 * index + half for head in range(heads) for half in range(2) for index in range(size // 2)
    ]
    stored = rows + 0  # a copy
    stored[places] = rows
    return stored


@pytest.mark.parametrize(("heads", "size"), [(1, 2), (1, 8), (3, 4), (9, 64)])
def test_rotary_rows_come_back_from_the_order_of_llama_cpp(heads, size):
    rows = np.arange(heads * size * 5).reshape(heads * size, 5)
    stored = as_llama_cpp_stores(rows, heads)
    assert np.array_equal(converter().halves_from_pairs(stored, heads), rows)
    assert np.array_equal(stored, rows) == (size == 2)


# --- the tokenizer ---


def test_every_id_is_the_tokens_place_in_the_file(tokenizer, tokens):
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}
    assert len(tokenizer) == 49152


def test_control_tokens_are_special_and_no_others(tokenizer, reader):
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    control = [index for index, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL]
    assert list(tokenizer.added_tokens_decoder) == control == list(range(17))
    assert all(token.special for token in tokenizer.added_tokens_decoder.values())
    for index in control:
        token = tokenizer.convert_ids_to_tokens(index)
        assert tokenizer(f"a{token}b")["input_ids"] == [81, index, 82]
        assert tokenizer.decode([81, index, 82], skip_special_tokens=True) == "ab"
    named = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
    assert named == (1, 2, 2, 0)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_and_split_as_llama_cpp_says(tokenizer, tokens, reader, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    places = {token: index for index, token in enumerate(tokens)}
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    assert ids == [places[token] for piece in pieces(text) for token in merged(piece, ranks)]


def pieces(text):
    """Split as ``LLAMA_VOCAB_PRE_TYPE_SMOLLM`` of llama.cpp does, and write each byte as GPT-2's visible character."""
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for piece in regex.findall(gpt2, part):
            yield [letters[byte] for byte in piece.encode()]


def merged(symbols, ranks):
    """Merge the neighbours of the lowest rank, again and again."""
    while True:
        found = [(ranks[pair], at) for at, pair in enumerate(zip(symbols, symbols[1:], strict=False)) if pair in ranks]
        if not found:
            return symbols
        _, at = min(found)
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]


def test_tokenizer_json_is_what_transformers_uses(tokenizer):
    path = smollm2() / "tokenizer.json"
    written, used = json.loads(path.read_text()), json.loads(tokenizer.backend_tokenizer.to_str())
    nothing_added = used.pop("post_processor")  # transformers writes one that adds no token
    assert written.pop("post_processor") is None
    assert nothing_added["special_tokens"] == {}
    assert written == used
    alone = Tokenizer.from_file(str(path))
    assert [alone.encode(text).ids for text in TEXTS] == tokenizer(list(TEXTS))["input_ids"]


def test_the_chat_template_renders(tokenizer):
    asked = [{"role": "user", "content": "What is 2 + 2?"}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert tokenizer.decode(ids) == text


# --- how the folder is made ---


def test_a_fresh_conversion_equals_the_cached_folder(tmp_path, monkeypatch, reader):
    """Fails as well when the converter was changed and its version was not."""
    monkeypatch.setattr(gguf, "GGUFReader", lambda source: reader)  # reading takes longer than all the rest
    fresh = converter().smollm2_folder(tmp_path)
    assert fresh.name == smollm2().name
    assert sorted(path.name for path in fresh.iterdir()) == sorted(converter().WRITTEN)
    for path in fresh.iterdir():
        assert path.read_bytes() == (smollm2() / path.name).read_bytes(), path.name
    shutil.rmtree(fresh)  # pytest keeps the folders of its last three runs


def test_a_second_call_writes_nothing(tmp_path, light):
    folder = converter().smollm2_folder(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, folder, *folder.iterdir())}
    assert converter().smollm2_folder(tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before
    assert len(light) == 1


def test_the_cache_is_the_users(tmp_path, monkeypatch, light):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert converter().smollm2_folder().parent == tmp_path / "steelyard"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert converter().smollm2_folder().parent == tmp_path / "home" / ".cache" / "steelyard"


def test_another_file_or_version_has_another_folder(tmp_path, monkeypatch):
    names = set()
    for content in (b"ab", b"ba", b"abc"):
        (tmp_path / "a.gguf").write_bytes(content)
        names.add(converter().folder_name(tmp_path / "a.gguf"))
    monkeypatch.setattr(converter(), "VERSION", converter().VERSION + 1)
    names.add(converter().folder_name(tmp_path / "a.gguf"))
    assert len(names) == 4


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def convert(source, folder):
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(converter(), "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        converter().smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_never_served(tmp_path, light):
    name = converter().folder_name(converter().gguf_file())
    left = tmp_path / f".{name}-left" / name
    left.mkdir(parents=True)
    (left / "config.json").write_text("half")
    folder = converter().smollm2_folder(tmp_path)
    assert folder == tmp_path / name
    assert (folder / "config.json").read_text() == "config.json"
    assert light[0].parent.parent == tmp_path  # one file system: the rename is one step
    assert light[0].parent.name.startswith(f".{name}-")


def test_a_folder_that_lost_files_is_refused(tmp_path, light):
    folder = converter().smollm2_folder(tmp_path)
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileExistsError) as caught:
        converter().smollm2_folder(tmp_path)
    assert str(caught.value) == f"{folder} lacks config.json, tokenizer.json; remove it, and it is made again"


def test_two_conversions_at_once_return_one_whole_folder(tmp_path, monkeypatch, light):
    both, write = threading.Barrier(2, timeout=30), converter().convert

    def convert(source, folder):
        both.wait()  # both have found nothing in the cache
        write(source, folder)

    monkeypatch.setattr(converter(), "convert", convert)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(converter().smollm2_folder, [tmp_path, tmp_path])
    assert first == second
    assert len(set(light)) == 2
    assert list(tmp_path.iterdir()) == [first]
    assert sorted(path.name for path in first.iterdir()) == sorted(converter().WRITTEN)


def test_a_file_of_another_kind_is_refused(tmp_path):
    source = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="tokenizer") as caught:
        converter().convert(source, tmp_path)
    assert str(caught.value) == f"{source}: tokenizer.ggml.pre is 'llama-bpe'; this converter reads 'smollm'"
