"""The decoder toolkit by itself: masks against the rule they stand for, windows, the cache, names and orders."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard import ops
from steelyard.blueprint import Part
from steelyard.decoder import Traits, order_of, read_decoder, text_config
from steelyard.decoder.attention import KVCache
from steelyard.errors import ConfigError
from steelyard.placement import Order

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 5, "intermediate_size": 16, "vocab_size": 10,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
}  # fmt: skip


@st.composite
def masks(draw):
    """Draw new tokens, tokens before them, a window or None, and which tokens are kept or None."""
    new, before = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    window = draw(st.none() | st.integers(1, 13))
    row = st.lists(st.booleans(), min_size=new + before, max_size=new + before)
    return new, before, window, draw(st.none() | st.lists(row, min_size=1, max_size=3))


@settings(max_examples=300, deadline=None)
@given(masks())
def test_a_token_attends_to_itself_and_to_what_is_kept_of_its_window(drawn):
    """Element by element; None stands only for a mask that `attention` makes itself."""
    new, before, window, kept = drawn
    held = None if kept is None else torch.tensor(kept).long()
    mask = ops.causal_mask(new, before, window=window, kept=held, device=CPU)
    wanted = torch.tensor(
        [
            [
                [
                    key == query or (key < query and (window is None or query - key < window) and row[key])
                    for key in range(before + new)
                ]
                for query in range(before, before + new)
            ]
            for row in (kept or [[True] * (before + new)])
        ]
    )[:, None]
    if mask is None:
        assert kept is None
        if new > 1:
            assert before == 0  # then is_causal says it
            assert torch.equal(wanted[0, 0], torch.ones(new, new, dtype=torch.bool).tril())
        else:
            assert wanted.all()
    else:
        assert mask.dtype == torch.bool
        assert torch.equal(mask, wanted)


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        (torch.ones(1, 3), "an attention mask is 1 and 0 in whole numbers or bools, not torch.float32"),
        (torch.ones(1, 2).long(), "an attention mask of 2 tokens, and there are 3 with those before"),
    ],
)
def test_a_mask_that_could_be_misread_is_refused(kept, text):
    with pytest.raises(ConfigError) as caught:
        ops.causal_mask(2, 1, kept=kept, device=CPU)
    assert str(caught.value) == text


SLIDING = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3}
WINDOWS = {
    "none": (Traits(), SLIDING, [None] * 5),
    "always": (Traits(window="always"), {"sliding_window": 4}, [4] * 5),
    "always, switched off": (Traits(window="always"), {"sliding_window": 4, "use_sliding_window": False}, [None] * 5),
    "always, off by default": (
        Traits(window="always", defaults={"use_sliding_window": False}), {"sliding_window": 4}, [None] * 5,
    ),
    "upper": (Traits(window="upper"), SLIDING, [None] * 3 + [4] * 2),
    "upper, off": (Traits(window="upper"), SLIDING | {"use_sliding_window": False}, [None] * 5),
    "upper, off, and a window of 0": (
        Traits(window="upper"), SLIDING | {"use_sliding_window": False, "sliding_window": 0}, [None] * 5,
    ),
    "every other": (Traits(window="every_other"), SLIDING, [4, None, 4, None, None]),
    "by default": (Traits(window="upper", defaults=SLIDING), {}, [None] * 3 + [4] * 2),
    "null is no default": (Traits(window="upper", defaults=SLIDING), {"sliding_window": None}, [None] * 5),
    "by layer": (
        Traits(window="every_other"),
        SLIDING | {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
        [None] * 4 + [4],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("traits", "stated", "windows"), WINDOWS.values(), ids=WINDOWS)
def test_each_layer_has_the_window_that_its_type_gives_it(traits, stated, windows):
    assert list(read_decoder(SIZES | stated, traits).windows) == windows


def test_defaults_stand_for_keys_that_are_absent_and_not_for_null():
    """A null number of heads or size of a head is worked out; any other null is refused by name."""
    traits = Traits(defaults={"num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 1.0})
    bare = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    made = read_decoder(bare, traits)
    assert (made.kv_heads, made.head_dim, made.eps) == (1, 6, 1.0)
    worked_out = read_decoder(bare | {"num_key_value_heads": None, "head_dim": None}, traits)
    assert (worked_out.kv_heads, worked_out.head_dim) == (2, 4)
    with pytest.raises(ConfigError) as caught:
        read_decoder(bare | {"rms_norm_eps": None}, traits)
    assert str(caught.value) == "rms_norm_eps is null; a positive number is needed"


def test_a_text_model_goes_before_its_wrapper():
    """R060."""
    assert text_config({"a": 1, "b": 2, "text_config": {"b": 3}}) == {"a": 1, "b": 3}
    assert text_config({"a": 1, "text_config": None}) == {"a": 1, "text_config": None}


def test_the_cache_returns_all_tokens_so_far_and_counts_when_every_layer_has_them():
    draws = torch.Generator().manual_seed(0)
    k, v = torch.rand(2, 2, 3, 5, 4, generator=draws)  # two texts, three heads, five tokens
    cache = KVCache(2, 2, 3, 6, 4, k)
    for start, stop in ((0, 3), (3, 5)):
        for layer in range(2):
            keys, values = cache.append(layer, k[:, :, start:stop] + layer, v[:, :, start:stop] + layer)
            assert torch.equal(keys, k[:, :, :stop] + layer)
            assert torch.equal(values, v[:, :, :stop] + layer)
        assert cache.length == start
        cache.advance(stop - start)
    cache.check(1)
    with pytest.raises(ConfigError) as caught:
        cache.check(2)
    assert str(caught.value) == "the cache has room for 6 tokens; 5 are in it, 2 would follow"
    assert cache.nbytes == 2 * 2 * 2 * 3 * 6 * 4 * 4


def test_parts_lie_one_behind_the_other():
    """P-12: in the order of the node's parts, with their rows."""
    assert order_of((Part("q", 8, 4), Part("k", 4, 2, kv=True))) == Order((("q", 8), ("k", 4)))
