"""Writing texts: what the model is fed, how a token is chosen, when a text ends, and how tokens become text."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn

from steelyard.errors import CheckpointError, ConfigError, LoadError
from steelyard.generation import Generation, TextGenerator, TextWindow
from steelyard.sampling import COOLEST, Chooser, Sampling, nucleus
from steelyard.texts import GenerationSettings
from support.parrot import BOS, CHATML, END, EOS, START, V, bytes_tokenizer, letters
from support.ranks_generation import generator_of, hot, script

HERE = "support.ranks_generation"
UNFINISHED = "\ufffd"


def consumed(pieces):
    """Return the pieces of a stream and what it returned."""
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return found, end.value


# --- what the model is fed ---------------------------------------------------------------------------------------


def test_the_prompt_goes_in_once_and_then_each_token(tmp_path):
    generator = generator_of(tmp_path, script(*b"abcd", after=3))
    made = generator.generate("xyz", max_new_tokens=4)
    assert generator.module.fed == [[*b"xyz"], [*b"a"], [*b"b"], [*b"c"]]
    assert generator.module.caches == [7]
    assert (made.text, made.ids, made.prompt_tokens, made.new_tokens, made.stop) == (
        "abcd",
        (*b"abcd",),
        3,
        4,
        "length",
    )


def test_each_text_has_a_cache_of_its_own(tmp_path):
    generator = generator_of(tmp_path, script(*b"abcd", after=3))
    first, second = (generator.generate("xyz", max_new_tokens=4).text for _ in range(2))
    assert first == second == "abcd"


def test_tokens_may_be_given_in_place_of_a_text(tmp_path):
    generator = generator_of(tmp_path, script(*b"ab", after=2))
    assert generator.generate(torch.tensor([*b"hi"]), max_new_tokens=2).text == "ab"
    assert generator.module.fed[0] == [*b"hi"]


def test_the_truncation_and_padding_that_are_baked_in_are_dropped(tmp_path):
    baked = bytes_tokenizer()
    baked.enable_truncation(2)
    baked.enable_padding(length=9, pad_id=0)
    baked.save(str(tmp_path / "tokenizer.json"))
    assert generator_of(tmp_path, hot).encode("xyz") == [*b"xyz"]


def test_an_empty_prompt_begins_with_the_token_that_begins_a_text(tmp_path):
    generator = generator_of(tmp_path, script(*b"ab", after=1))
    for prompt in ("", []):
        assert generator.generate(prompt, max_new_tokens=2).text == "ab"
        assert generator.module.fed.pop(0) == [BOS]
        generator.module.fed.clear()


def test_an_empty_prompt_without_such_a_token_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        generator_of(tmp_path, hot, bos=None).stream("")
    assert str(caught.value) == f"the prompt is empty, and {tmp_path} names no bos_token_id to begin a text with"


@pytest.mark.parametrize("token", [-1, V])
def test_a_prompt_with_a_token_of_another_model_is_refused(tmp_path, token):
    with pytest.raises(ConfigError) as caught:
        generator_of(tmp_path, hot).stream([1, token])
    assert str(caught.value) == f"the prompt has the token {token}, which is none of the model's {V}"


def test_bytes_of_a_terminal_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        generator_of(tmp_path, hot).stream("a\udcff")
    assert str(caught.value) == "the text is not Unicode at character 1: surrogates not allowed"


def test_a_chat_is_encoded_as_its_template_writes_it(tmp_path):
    """Special tokens of the template are one token each, and the tokenizer adds none of its own."""
    from tokenizers import processors

    (tmp_path / "chat_template.jinja").write_text(CHATML)
    made = bytes_tokenizer()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made.save(str(tmp_path / "tokenizer.json"))
    generator = generator_of(tmp_path, hot)
    ids = generator.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [START, *b"user\nhi", END, *b"\n", START, *b"assistant\n"]
    assert generator.encode("hi") == [BOS, *b"hi"]


# --- when a text ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [(EOS,), (END, EOS), (EOS, ord("z"))], ids=str)
def test_a_token_that_ends_a_text_is_counted_and_not_written(tmp_path, eos):
    """Any of several ends it; nothing is fed behind it."""
    generator = generator_of(tmp_path, script(*b"ab", EOS, after=2), eos=eos)
    pieces, made = consumed(generator.stream("hi", max_new_tokens=9))
    assert pieces == ["a", "b"]
    assert (made.text, made.ids, made.new_tokens, made.stop) == ("ab", (*b"ab", EOS), 3, "eos")
    assert generator.module.fed == [[*b"hi"], [*b"a"], [*b"b"]]


def test_an_ordinary_token_that_ends_a_text_is_not_written_either(tmp_path):
    generator = generator_of(tmp_path, script(*b"abz", after=2), eos=(ord("z"),))
    assert generator.generate("hi", max_new_tokens=9).text == "ab"


def test_a_text_may_end_at_once(tmp_path):
    made = generator_of(tmp_path, script(EOS, after=2)).generate("hi")
    assert (made.text, made.ids, made.stop, made.tokens_per_second) == ("", (EOS,), "eos", None)


def test_without_a_token_that_ends_it_a_text_gets_the_length_asked_for(tmp_path):
    made = generator_of(tmp_path, script(*b"a", EOS, after=2), eos=()).generate("hi", max_new_tokens=5)
    assert (made.text, made.ids, made.stop) == ("aaa", (97, EOS, 97, EOS, 97), "length")


@pytest.mark.parametrize(
    ("asked", "written", "stop"), [(2, 2, "length"), (3, 3, "length"), (4, 3, "positions"), (99, 3, "positions")]
)
def test_a_text_ends_where_the_model_has_no_more_positions(tmp_path, asked, written, stop):
    generator = generator_of(tmp_path, script(*b"abcd", after=5), max_positions=8)
    made = generator.generate("hello", max_new_tokens=asked)
    assert (made.new_tokens, made.stop) == (written, stop)
    assert generator.module.caches == [5 + written]


def test_a_prompt_that_fills_the_model_gets_no_token(tmp_path):
    generator = generator_of(tmp_path, hot, max_positions=5)
    made = generator.generate("hello")
    assert (made.text, made.ids, made.stop, generator.module.fed) == ("", (), "positions", [])


def test_a_prompt_longer_than_the_models_positions_is_refused(tmp_path):
    """When the stream is asked for, not when it is read."""
    with pytest.raises(ConfigError) as caught:
        generator_of(tmp_path, hot, max_positions=5).stream("hello!")
    assert str(caught.value) == (
        "the prompt has 6 tokens, and the model takes 5, the continuation included; give a shorter prompt"
    )


@pytest.mark.parametrize("count", [0, -1, 1.5, True], ids=repr)
def test_a_number_of_tokens_that_is_none_is_refused(tmp_path, count):
    with pytest.raises(ConfigError) as caught:
        generator_of(tmp_path, hot).stream("hi", max_new_tokens=count)
    assert str(caught.value) == f"max_new_tokens={count!r} is no number of tokens above 0"


# --- what is returned --------------------------------------------------------------------------------------------


def test_seconds_of_the_reader_are_not_the_models(tmp_path, monkeypatch):
    """A clock that the model moves by 1 and the reader by 100."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def rule(seen):
        clock[0] += 1 if len(seen) > 2 else 7
        return hot(97)

    def read(piece):
        clock[0] += 100

    made = generator_of(tmp_path, rule).generate("hi", max_new_tokens=4, on_text=read)
    assert (made.prefill_seconds, made.decode_seconds, made.tokens_per_second) == (7, 3, 1)


def test_a_stream_and_a_whole_text_are_the_same(tmp_path):
    generator = generator_of(tmp_path, script(*"é€a".encode(), after=2))
    heard = []
    whole = generator.generate("hi", max_new_tokens=6, on_text=heard.append)
    pieces, streamed = consumed(generator.stream("hi", max_new_tokens=6))
    assert pieces == heard == ["é", "€", "a"]
    assert (streamed.text, streamed.ids) == (whole.text, whole.ids) == ("é€a", tuple("é€a".encode()))


def test_a_text_that_is_cut_inside_a_character_ends_with_a_mark(tmp_path):
    generator = generator_of(tmp_path, script(*"a€".encode(), after=2))
    pieces, made = consumed(generator.stream("hi", max_new_tokens=3))
    assert pieces == ["a", UNFINISHED]
    assert made.text == f"a{UNFINISHED}"


def test_the_model_is_in_inference_mode_and_who_reads_its_stream_is_not(tmp_path):
    modes = []

    def rule(seen):
        modes.append(torch.is_inference_mode_enabled())
        return hot(97)

    for _ in generator_of(tmp_path, rule).stream("hi", max_new_tokens=3):
        modes.append(torch.is_inference_mode_enabled())
    assert modes == [True, False] * 3


# --- which models write ------------------------------------------------------------------------------------------


def test_a_decoder_without_a_head_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        generator_of(tmp_path, hot, has_head=False)
    assert str(caught.value) == (
        "toy cannot write texts: it has no head; load the checkpoint of its causal language model"
    )


def test_a_model_that_is_no_decoder_is_refused(tmp_path):
    model = type("Model", (), {"module": nn.Linear(2, 2), "plan": type("Plan", (), {"family_key": "toy"})()})()
    with pytest.raises(ConfigError) as caught:
        TextGenerator(model, GenerationSettings(tmp_path))
    assert str(caught.value) == "toy does not write texts: its module makes no logits one token at a time"


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="the two files belong to different models$"):
        generator_of(tmp_path, hot, vocabulary=V - 1)


# --- how a token is chosen ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1}, "temperature=-1: give 0 for the likeliest token, or 0.0001 and more"),
        ({"temperature": 1e-9}, "temperature=1e-09: give 0 for the likeliest token, or 0.0001 and more"),
        ({"temperature": math.nan}, "temperature=nan: give 0 for the likeliest token, or 0.0001 and more"),
        ({"temperature": math.inf}, "temperature=inf: give 0 for the likeliest token, or 0.0001 and more"),
        ({"top_p": 0.0}, "top_p=0.0 is no probability above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p=1.1 is no probability above 0 and up to 1"),
        ({"top_p": math.nan}, "top_p=nan is no probability above 0 and up to 1"),
        ({"seed": -1}, "seed=-1 is no whole number from 0 and below 2**63"),
        ({"seed": 1 << 63}, "seed=9223372036854775808 is no whole number from 0 and below 2**63"),
        ({"seed": True}, "seed=True is no whole number from 0 and below 2**63"),
        ({"seed": 1.0}, "seed=1.0 is no whole number from 0 and below 2**63"),
    ],
    ids=str,
)
def test_values_out_of_their_range_are_refused(options, text):
    with pytest.raises(ConfigError) as caught:
        Sampling(**options)
    assert str(caught.value) == text


def test_the_likeliest_token_is_taken_unless_a_temperature_is_given():
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    assert {Chooser(Sampling()).choose(logits).item() for _ in range(20)} == {1}


LIKELY = [0.5, 0.25, 0.125, 0.0625, 0.0625]  # exact in binary, and so are their sums


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.001, 1), (0.5, 1), (0.5000001, 2), (0.75, 2), (0.7500001, 3), (0.9375, 4), (0.93750001, 5), (1.0, 5)],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_the_probability(top_p, kept):
    expected = LIKELY[:kept] + [0.0] * (len(LIKELY) - kept)
    assert nucleus(torch.tensor(LIKELY), top_p).tolist() == expected


def test_the_likeliest_token_is_always_in_the_nucleus():
    assert nucleus(torch.tensor([1.0, 0.0, 0.0]), 1e-12).tolist() == [1, 0, 0]


def expected_shares(logits, temperature, top_p):
    """Return token to probability: by the book, in python's own floats."""
    weights = [math.exp(logit / temperature) for logit in logits]
    shares = sorted(((weight / sum(weights), token) for token, weight in enumerate(weights)), reverse=True)
    kept, total = {}, 0.0
    for share, token in shares:
        if total >= top_p:
            break
        kept[token] = share
        total += share
    return {token: share / total for token, share in kept.items()}


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.7), (0.7, 0.9), (3, 0.5)]
)
def test_draws_come_as_often_as_their_probability(temperature, top_p):
    """Against a computation that shares nothing with the code; the bound is five standard deviations of a count."""
    logits = [0.3, 2.0, -1.0, 1.1, 0.0, 1.9, -3.0]
    draws = 4000
    chooser = Chooser(Sampling(temperature, top_p, seed=7))
    found = Counter(chooser.choose(torch.tensor(logits)).item() for _ in range(draws))
    expected = expected_shares(logits, temperature, top_p)
    assert set(found) <= set(expected)
    for token, share in expected.items():
        assert abs(found[token] - share * draws) <= 5 * math.sqrt(draws * share * (1 - share)) + 1e-9, token


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24], ids=["lowest", "highest"])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_token_without_probability_is_never_drawn(monkeypatch, draw, top_p):
    """By the draws at both ends, which come once in 16 million times."""
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.tensor(draw))
    logits = torch.tensor([-1e30, 0.0, 0.1, -1e30])
    assert Chooser(Sampling(1.0, top_p)).choose(logits).item() in (1, 2)


def test_a_seed_makes_draws_that_come_again():
    def drawn(seed):
        chooser = Chooser(Sampling(1.0, seed=seed))
        return [chooser.choose(torch.zeros(50)).item() for _ in range(30)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)
    assert len(set(drawn(3))) > 10


def test_draws_do_not_touch_the_random_numbers_of_the_program():
    before = torch.random.get_rng_state()
    Chooser(Sampling(1.0, seed=3)).choose(torch.zeros(50))
    Chooser(Sampling(1.0)).choose(torch.zeros(50))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("scale", [1e36, -1e36, 1.0])
def test_the_coolest_temperature_takes_the_likeliest_of_any_logits(scale):
    logits = torch.tensor([1.0, 2.0, 3.0]) * scale
    chooser = Chooser(Sampling(COOLEST, seed=0))
    assert {chooser.choose(logits).item() for _ in range(20)} == {logits.argmax().item()}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, 0.9, seed=0)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_logits_that_are_not_finite_are_an_error_and_never_a_token(tmp_path, sampling, value):
    def rule(seen):
        logits = hot(97)
        if len(seen) > 3:
            logits[5] = value
        return logits

    heard = []
    with pytest.raises(LoadError) as caught:
        generator_of(tmp_path, rule).generate("xyz", sampling=sampling, on_text=heard.append)
    assert str(caught.value) == (
        "the model's logits are not finite, so no token can be chosen: a weight is damaged, or the values do not fit "
        "its dtype; load it with dtype='float32' to tell which"
    )
    assert len(heard) <= 1


# --- how tokens become text --------------------------------------------------------------------------------------


def merged_tokenizer():
    """Return a byte-level BPE with merges, some of which end inside a character."""
    letter = letters()
    spell = "".join(letter[byte] for byte in "€".encode())
    merges = [("h", "e"), (letter[32], "w"), (spell[0], spell[1]), (spell[2], "a")]
    vocabulary = {one: byte for byte, one in enumerate(letter)}
    vocabulary |= {left + right: 300 + place for place, (left, right) in enumerate(merges)}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return made


def space_tokenizer():
    """Return a BPE as Llama 2 has it: a space in front of a text, and bytes for what it does not know."""
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefgh", "\u2581a"]
    merges = [("\u2581", "a")]
    made = Tokenizer(
        models.BPE({one: place for place, one in enumerate(known)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in ("<s>", "</s>")])
    return made


TOKENIZERS = {"bytes": bytes_tokenizer(), "merges": merged_tokenizer(), "spaces": space_tokenizer()}


def streamed(tokenizer, prompt, ids):
    window = TextWindow(tokenizer, prompt)
    pieces = [window.add(one) for one in ids]
    return [piece for piece in [*pieces, window.rest()] if piece]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("ab he w  €é\u20ac😀\n"), max_size=20) | st.text(max_size=12),
    more=st.text(st.sampled_from(" a€h😀"), max_size=12) | st.text(max_size=12),
)
def test_pieces_are_the_text_of_all_tokens_whatever_stands_before(name, text, more):
    """For every text and continuation; no piece ends in half a character."""
    tokenizer = TOKENIZERS[name]
    prompt, ids = tokenizer.encode(text).ids, tokenizer.encode(more).ids
    pieces = streamed(tokenizer, prompt, ids)
    assert decoded(tokenizer, prompt) + "".join(pieces) == decoded(tokenizer, [*prompt, *ids])
    if UNFINISHED not in more:
        assert not any(UNFINISHED in piece for piece in pieces)


@pytest.mark.parametrize("name", list(TOKENIZERS))
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab he w  €é😀\n"), min_size=1, max_size=12), data=st.data())
def test_a_character_that_prompt_and_continuation_share_comes_whole(name, text, data):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    before = decoded(tokenizer, ids[:cut]).rstrip(UNFINISHED)
    assert before + "".join(streamed(tokenizer, ids[:cut], ids[cut:])) == decoded(tokenizer, ids)


def test_a_character_of_several_tokens_comes_with_its_last():
    window = TextWindow(bytes_tokenizer(), [*b"hi"])
    assert [window.add(byte) for byte in "a€😀b".encode()] == ["a", "", "", "€", "", "", "", "😀", "b"]
    assert window.rest() == ""


def test_a_character_whose_bytes_never_come_is_marked_at_the_end():
    assert streamed(bytes_tokenizer(), [*b"hi"], [*b"a", *"€".encode()[:2]]) == ["a", UNFINISHED]


def test_bytes_that_are_no_character_are_marked_where_they_stand():
    assert streamed(bytes_tokenizer(), [*b"hi"], [*b"a", 0xFF, *b"b"]) == ["a", f"{UNFINISHED}b"]


def test_a_first_space_is_kept_behind_a_prompt_and_dropped_at_the_start():
    tokenizer = space_tokenizer()
    a = tokenizer.encode("a").ids
    assert decoded(tokenizer, a) == "a"
    assert streamed(tokenizer, tokenizer.encode("b").ids, a * 3) == [" a", " a", " a"]
    assert streamed(tokenizer, [1], a * 3) == ["a", " a", " a"]


def test_special_tokens_have_no_text():
    assert streamed(bytes_tokenizer(), [BOS, *b"hi"], [*b"a", START, END, *b"b", END]) == ["a", "b"]


# --- many ranks --------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    return str(tmp_path)


@pytest.mark.parametrize(
    ("case", "ids"),
    [
        ("draws", None),
        ("logits", (*b"abcdab",)),
        ("prompts", (*b"abcdab",)),
        ("eos", (*b"ab", EOS)),
        ("broken second", (65,) * 6),
    ],
)
def test_ranks_that_would_differ_write_what_rank_0_writes(rank_pool, folders, case, ids):
    """Draws, numbers, prompts: what one rank has another way decides nothing unless the rank is 0."""
    (first, fed), (second, other) = rank_pool.values(f"{HERE}:write", 2, (folders, case))
    assert isinstance(first, Generation)
    assert (first.text, first.ids, first.stop) == (second.text, second.ids, second.stop)
    assert fed == other
    assert fed[0] == [*b"hi"]
    assert ids in (None, first.ids)


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [("broken first", "LoadError", "the model's logits are not finite"), ("long", "ConfigError", "the prompt has 65")],
)
def test_an_error_of_rank_0_is_every_ranks(rank_pool, folders, case, kind, text):
    """A rank that went on alone would wait for the others for ever."""
    for outcome in rank_pool.run(f"{HERE}:write", 2, (folders, case)):
        assert (outcome.kind, outcome.text[: len(text)]) == (kind, text)
