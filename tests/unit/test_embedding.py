"""Texts to vectors: what is tokenized, how tokens become one vector, and in which order vectors come back."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from steelyard import ops
from steelyard.embedding import POOLING, SentenceEncoder, read_tokenizer
from steelyard.errors import CheckpointError, ConfigError
from steelyard.loader import load
from steelyard.sentences import SentenceSettings, sentence_settings
from support.checkpoints import TOY_B_CONFIG, toy_b

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop"]
CLS, SEP = 2, 3
LONG = "a b c d e f g h i j k l m n o p"
TEXTS = ["a b c", "", "p", LONG, "b", "a b c", "h g f e d c b a"]


def ids_of(*letters):
    return [CLS, *(WORDS.index(letter) for letter in letters), SEP]


def write_tokenizer(folder, *, padding=True, truncation=8, specials=True):
    """Write a tiny WordPiece tokenizer, with the truncation and padding of its last use baked in."""
    made = Tokenizer(models.WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if specials:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
        )
    if truncation:
        made.enable_truncation(truncation)
    if padding:
        made.enable_padding(length=16, pad_id=0, pad_token="[PAD]")
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


class Hot(nn.Module):
    """An encoder whose hidden state of a token is its id, its place and 1; padding is seen to be masked."""

    def __init__(self, max_positions=14):
        super().__init__()
        self.max_positions = max_positions
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.batches = []

    def forward(self, ids, mask):
        self.batches.append((ids.clone(), mask.clone()))
        places = torch.arange(ids.shape[1]).expand_as(ids)
        hidden = torch.stack([ids, places, torch.ones_like(ids)], -1).to(torch.bfloat16)
        hidden[mask == 0] = 1000
        return type("Out", (), {"last_hidden_state": hidden})()


def encoder_of(folder, *, module=None, config=None, **settings):
    """Return a `SentenceEncoder` around a module that needs no checkpoint."""
    plan = type("Plan", (), {"family_key": "toy", "config": config or {}})()
    model = type("Model", (), {"module": module or Hot(), "plan": plan})()
    return SentenceEncoder(model, SentenceSettings(folder, **settings))


# --- tokens ------------------------------------------------------------------------------------------------------


def test_the_truncation_that_is_baked_in_is_replaced(tmp_path):
    """A file that was last used with 8 tokens would otherwise cut every text at 8, in silence."""
    encoder = encoder_of(write_tokenizer(tmp_path), max_tokens=12)
    encoder.encode([LONG])
    ((ids, mask),) = encoder._module.batches
    assert ids.tolist() == [ids_of(*"abcdefghij")]
    assert mask.all()


def test_the_padding_that_is_baked_in_is_replaced(tmp_path):
    """Texts are padded to the longest of their batch, not to the 16 of the file."""
    encoder = encoder_of(write_tokenizer(tmp_path))
    encoder.encode(["a b c", "d"])
    ((ids, mask),) = encoder._module.batches
    assert ids.tolist() == [[*ids_of("d"), 0, 0], ids_of(*"abc")]
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("asked", "positions", "limit"), [(None, 14, 14), (6, 14, 6), (100, 14, 14)], ids=["encoder", "folder", "smaller"]
)
def test_texts_are_cut_at_the_folders_length_and_never_past_the_encoders(tmp_path, asked, positions, limit):
    encoder = encoder_of(write_tokenizer(tmp_path), module=Hot(positions), max_tokens=asked)
    encoder.encode([LONG])
    assert encoder.max_tokens == limit
    assert encoder._module.batches[0][0].shape == (1, limit)


@pytest.mark.parametrize("pad", [0, 1])
def test_the_padding_id_is_the_files_and_else_the_configs(tmp_path, pad):
    """RoBERTa pads with 1; a file without padding does not say so, its config does."""
    folder = write_tokenizer(tmp_path, padding=False)
    encoder = encoder_of(folder, config={"pad_token_id": pad})
    encoder.encode(["a b", "c"])
    assert encoder._module.batches[0][0][0].tolist() == [*ids_of("c"), pad]
    baked = encoder_of(write_tokenizer(tmp_path), config={"pad_token_id": 1})
    baked.encode(["a b", "c"])
    assert baked._module.batches[0][0][0, -1] == 0


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_that_special_tokens_alone_reach_is_refused(tmp_path, limit):
    """The tokenizer would leave such a text whole, or empty."""
    with pytest.raises(CheckpointError) as caught:
        encoder_of(write_tokenizer(tmp_path), max_tokens=limit)
    assert str(caught.value) == f"{tmp_path}: a limit of {limit} tokens leaves no room beside 2 special tokens"
    assert read_tokenizer(write_tokenizer(tmp_path, specials=False), limit, 0).encode(LONG).ids == [4, 5][:limit]


def test_a_folder_without_a_tokenizer_says_what_writes_one(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        encoder_of(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: has no tokenizer.json; "
        "transformers writes one with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"version": "1.0", "model": {"type": "Unheard"}}'], ids=repr)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        encoder_of(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'}: ")


def test_a_model_that_is_no_encoder_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        encoder_of(write_tokenizer(tmp_path), module=nn.Linear(2, 2))
    assert str(caught.value) == "toy is not an encoder of texts: it states no max_positions"


@pytest.mark.parametrize("lower", [True, False])
def test_texts_are_lower_cased_where_the_folder_says_so(tmp_path, lower):
    encoder = encoder_of(write_tokenizer(tmp_path), lower=lower)
    encoder.encode(["A B"])
    assert encoder._module.batches[0][0].tolist() == [ids_of(*"ab") if lower else [CLS, 1, 1, SEP]]


# --- vectors -----------------------------------------------------------------------------------------------------


def hidden_of(text):
    """Return the hidden states that `Hot` has for a text's own tokens."""
    ids = ids_of(*text.split()) if text else [CLS, SEP]
    return [[float(token), float(place), 1.0] for place, token in enumerate(ids)]


def pooled(text, mode):
    """Return the vector of a text by the mode's formula, written out."""
    rows = hidden_of(text)
    sums = [sum(column) for column in zip(*rows, strict=True)]
    match mode:
        case "mean":
            return [one / len(rows) for one in sums]
        case "mean_sqrt_len":
            return [one / len(rows) ** 0.5 for one in sums]
        case "max":
            return [max(column) for column in zip(*rows, strict=True)]
        case "cls":
            return rows[0]
        case "last":
            return rows[-1]


@pytest.mark.parametrize("mode", list(POOLING))
@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_a_vector_is_what_its_mode_says_whatever_stands_beside_it(tmp_path, mode, batch_size):
    """Padding has no part in it, and the batch does not matter."""
    encoder = encoder_of(write_tokenizer(tmp_path), module=Hot(20), pooling=(mode,))
    got = encoder.encode(TEXTS, batch_size=batch_size)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor([pooled(text, mode) for text in TEXTS]))


def test_several_modes_are_laid_behind_one_another(tmp_path):
    encoder = encoder_of(write_tokenizer(tmp_path), pooling=("cls", "mean"))
    torch.testing.assert_close(encoder.encode(["a b"]), torch.tensor([pooled("a b", "cls") + pooled("a b", "mean")]))


def test_vectors_are_scaled_to_length_one_where_the_folder_says_so(tmp_path):
    folder = write_tokenizer(tmp_path)
    plain = encoder_of(folder, pooling=("cls", "mean")).encode(TEXTS[:3])
    scaled = encoder_of(folder, pooling=("cls", "mean"), normalize=True).encode(TEXTS[:3])
    torch.testing.assert_close(scaled, plain / plain.norm(dim=-1, keepdim=True))


def test_vectors_come_back_in_the_order_of_the_texts(tmp_path):
    """Texts are computed by length, and told apart by place also where two are equal."""
    encoder = encoder_of(write_tokenizer(tmp_path), module=Hot(20), pooling=("mean",))
    got = encoder.encode(TEXTS, batch_size=3)
    lengths = [batch.shape[1] for batch, _ in encoder._module.batches]
    assert lengths == sorted(lengths)
    assert torch.equal(got[0], got[5])
    for place, text in enumerate(TEXTS):
        torch.testing.assert_close(got[place], encoder.encode([text])[0])


def test_no_text_gives_no_vector_and_runs_nothing(tmp_path):
    encoder = encoder_of(write_tokenizer(tmp_path))
    assert encoder.encode([]).shape == (0, 0)
    assert encoder._module.batches == []


def test_one_text_in_place_of_a_list_is_refused(tmp_path):
    """A text is a sequence of texts to python, and would give a vector for every letter."""
    with pytest.raises(ConfigError) as caught:
        encoder_of(write_tokenizer(tmp_path)).encode("a b c")
    assert str(caught.value) == "encode takes a list of texts; put the one text into a list"


@pytest.mark.parametrize("side", ["left", "right"])
def test_mean_sqrt_len_is_the_sum_over_the_root_of_the_count(side):
    hidden = torch.arange(24, dtype=torch.float32).reshape(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    if side == "right":
        mask = mask.flip(1)
    kept = [hidden[0], hidden[1, 2:] if side == "left" else hidden[1, :2]]
    expected = torch.stack([rows.sum(0) / len(rows) ** 0.5 for rows in kept])
    torch.testing.assert_close(ops.mean_sqrt_len_pool(hidden, mask), expected)


def test_a_real_encoder_is_used_as_its_folder_says(tmp_path):
    """From files to vectors: modules.json, pooling, the tokenizer and a loaded BERT; padding changes nothing."""
    folder = toy_b(write_tokenizer(tmp_path))
    chain = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (folder / "modules.json").write_text(
        json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in chain])
    )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    settings = sentence_settings(folder)
    model = load(settings.folder, device="cpu")
    encoder = SentenceEncoder(model, settings)
    assert encoder.max_tokens == TOY_B_CONFIG["max_position_embeddings"]
    together = encoder.encode(["a b c", LONG])
    alone = torch.cat([encoder.encode(["a b c"]), encoder.encode([LONG])])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    states = model.module(torch.tensor([ids_of(*"abc")])).last_hidden_state[0, 0]
    torch.testing.assert_close(together[0], states / states.norm(), atol=1e-5, rtol=0)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """An id past the vocabulary would fail at the first text that has it."""
    with pytest.raises(CheckpointError, match="the two files belong to different models$"):
        encoder_of(write_tokenizer(tmp_path), config={"vocab_size": 2})


@pytest.mark.parametrize("pad", ["0", -1, True], ids=repr)
def test_a_padding_id_that_is_none_is_refused(tmp_path, pad):
    with pytest.raises(CheckpointError, match="is no token's id$"):
        read_tokenizer(write_tokenizer(tmp_path, padding=False), 8, pad)
