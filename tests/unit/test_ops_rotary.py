"""Rotary embeddings against transformers' own modules: equal bit for bit, not close."""

import copy
import importlib
import pickle

import pytest
import torch

from steelyard.errors import ConfigError
from steelyard.ops.rotary import Rotary, apply_rotary, inverse_frequencies, rotate
from steelyard.rope import DefaultRope, DynamicRope, RopeConfig, read_rope

FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 16}
WIDE = {**TINY, "hidden_size": 512, "head_dim": 128}

# max_position_embeddings, theta, and the keys of the scaling. Llama-3.1 and Qwen2.5 as published.
SCALINGS = {
    "default": (64, 10000.0, {"rope_type": "default"}),
    "default with a large theta": (40960, 1000000, {"rope_type": "default"}),
    "linear": (64, 10000.0, {"rope_type": "linear", "factor": 2.0}),
    "linear with a whole factor": (4096, 100000, {"rope_type": "linear", "factor": 3}),
    "dynamic": (64, 10000.0, {"rope_type": "dynamic", "factor": 2.0}),
    "dynamic with an uneven factor": (48, 500000.0, {"rope_type": "dynamic", "factor": 1.7}),
    "llama3": (
        131072,
        500000.0,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3, small": (
        256,
        10000.0,
        {
            "rope_type": "llama3",
            "factor": 4,
            "low_freq_factor": 0.5,
            "high_freq_factor": 16,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (32768, 1000000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "yarn, small": (256, 10000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "yarn without an original length": (256, 10000.0, {"rope_type": "yarn", "factor": 8.0}),
    "yarn with every choice": (
        256,
        10000.0,
        {
            "rope_type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 64,
            "beta_fast": 8,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
            "truncate": False,
        },
    ),
    "yarn with an attention factor": (
        256,
        10000.0,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.25},
    ),
    "yarn with mscale alone": (
        256,
        10000.0,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 2.0},
    ),
    "yarn with a ramp of no width": (
        256,
        10000.0,
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 8,
            "beta_slow": 8,
            "truncate": False,
        },
    ),
    "yarn with a ramp that ends before it begins": (
        8,
        10000.0,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
    ),
    "yarn with a ramp past the last dim": (
        256,
        1.5,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ),
    "yarn with a null factor": (
        256,
        10000.0,
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    ),
}


def spelled(spelling, positions, theta, keys):
    """Return a config's rope part in one of its spellings."""
    if spelling == "rope_parameters":
        group = {"rope_parameters": {**keys, "rope_theta": theta}}
    else:
        name = spelling.partition(".")[2]
        group = {
            "rope_theta": theta,
            "rope_scaling": {name if key == "rope_type" else key: value for key, value in keys.items()},
        }
    return {"max_position_embeddings": positions, **group}


SPELLINGS = ("rope_parameters", "rope_scaling.rope_type", "rope_scaling.type")


def theirs(config, family="llama"):
    """Return transformers' module for a config."""
    stem = FAMILIES[family]
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config_class = vars(configs)[f"{stem}Config"]
    # from_dict keeps what it is given, and standardizing writes into it
    return vars(models)[f"{stem}RotaryEmbedding"](config_class.from_dict(copy.deepcopy(config)))


def ours(config, head_dim):
    return Rotary(read_rope(config, head_dim=head_dim))


def positions_of(length):
    """Return two texts' positions, up to and far beyond a length of training."""
    near = torch.arange(9)
    return torch.stack([near, near * length // 3 + 5])


def assert_same(mine, reference, positions, dtype=torch.float32):
    """Compare cos and sin bit for bit; transformers takes the dtype from a tensor."""
    got, want = mine(positions, dtype), reference(torch.empty(0, dtype=dtype), positions)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


# --- frequencies, cos and sin -----------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [TINY, WIDE], ids=["16", "128"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_cos_and_sin_are_transformers_own(scaling, spelling, sizes):
    config = sizes | spelled(spelling, *scaling)
    reference, mine = theirs(config), ours(config, sizes["head_dim"])
    turns, attention_factor = inverse_frequencies(mine.rope)
    assert turns.dtype == torch.float32
    assert torch.equal(turns, reference.inv_freq)
    assert mine.attention_factor == attention_factor == reference.attention_scaling
    for dtype in DTYPES:
        assert_same(mine, theirs(config), positions_of(scaling[0]), dtype)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3, small", "yarn, small"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_rotates_alike(family, kind):
    for spelling in SPELLINGS:
        config = TINY | spelled(spelling, *SCALINGS[kind])
        assert_same(ours(config, 16), theirs(config, family), positions_of(64))


@pytest.mark.parametrize(("family", "theta"), [("llama", 10000.0), ("mixtral", 1000000.0)])
def test_a_config_without_theta_has_the_familys(family, theta):
    config = TINY | {"max_position_embeddings": 64}
    assert_same(Rotary(read_rope(config, head_dim=16, default_theta=theta)), theirs(config, family), positions_of(64))


def test_an_original_length_beside_the_group_is_read_as_transformers_does():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = TINY | spelled("rope_parameters", 256, 10000.0, scaling) | {"original_max_position_embeddings": 32}
    assert_same(ours(config, 16), theirs(config), positions_of(64))


def test_the_scalings_differ_from_each_other():
    """A test of the above: no two kinds agree by chance at these sizes."""
    kinds = ["default", "linear", "llama3, small", "yarn, small"]
    found = [inverse_frequencies(ours(TINY | spelled(SPELLINGS[0], *SCALINGS[kind]), 16).rope)[0] for kind in kinds]
    for at, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[at + 1 :])


@pytest.mark.parametrize("beside", [True, False], ids=["beside the group", "in the group"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3, small", "yarn, small"])
def test_a_part_of_a_head_has_transformers_frequencies(kind, beside):
    positions, theta, keys = SCALINGS[kind]
    part = {"partial_rotary_factor": 0.5}
    config = TINY | spelled(SPELLINGS[0], positions, theta, keys if beside else keys | part) | (part if beside else {})
    mine = ours(config, 16)
    assert mine.rope.dim == 8
    assert_same(mine, theirs(config), positions_of(64))


def test_a_part_of_a_head_without_scaling_is_that_of_the_families_that_rotate_one():
    """Llama's module passes over the key for this kind; GLM-4's and Qwen3-Next's do not."""
    from transformers.models.glm4.modeling_glm4 import Glm4Config, Glm4RotaryEmbedding

    config = TINY | spelled(SPELLINGS[0], 64, 10000.0, {"rope_type": "default", "partial_rotary_factor": 0.25})
    turns = Glm4RotaryEmbedding(Glm4Config.from_dict(copy.deepcopy(config))).inv_freq
    assert torch.equal(inverse_frequencies(read_rope(config, head_dim=16))[0], turns)


# --- the dynamic kind -------------------------------------------------------------------------------


DYNAMIC = TINY | spelled(SPELLINGS[0], *SCALINGS["dynamic with an uneven factor"])  # trained on 48


@pytest.mark.parametrize("length", [1, 47, 48, 49, 64, 1000, 40000])
def test_a_whole_text_has_the_frequencies_of_its_length(length):
    assert_same(ours(DYNAMIC, 16), theirs(DYNAMIC), torch.arange(length)[None])
    turns, _ = inverse_frequencies(read_rope(DYNAMIC, head_dim=16), tokens=length)
    same = torch.equal(turns, inverse_frequencies(read_rope(DYNAMIC, head_dim=16))[0])
    assert same == (length <= 48)


def test_one_text_that_grows_token_by_token_has_transformers_frequencies_at_each_step():
    mine, reference = ours(DYNAMIC, 16), theirs(DYNAMIC)
    assert_same(mine, reference, torch.arange(40)[None])
    for position in range(40, 60):
        assert_same(mine, reference, torch.tensor([[position]]))


def test_the_longest_text_of_a_batch_decides():
    positions = torch.stack([torch.arange(10), torch.arange(90, 100)])
    mine = ours(DYNAMIC, 16)
    assert_same(mine, theirs(DYNAMIC), positions)
    turns, _ = inverse_frequencies(mine.rope, tokens=100)
    assert torch.equal(mine(positions, torch.float32)[0][0, 1, :8], turns.cos())


def test_a_short_text_after_a_long_one_has_the_frequencies_of_training():
    mine, reference = ours(DYNAMIC, 16), theirs(DYNAMIC)
    for length in (20, 100, 20, 47, 200, 10):
        assert_same(mine, reference, torch.arange(length)[None])


def test_the_texts_before_do_not_matter():
    """transformers' module would keep the frequencies of 200 tokens for the text of 100."""
    mine, text = ours(DYNAMIC, 16), torch.arange(100)[None]
    mine(torch.arange(200)[None], torch.float32)
    assert_same(mine, theirs(DYNAMIC), text)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3, small", "yarn, small"])
def test_other_kinds_do_not_ask_for_the_length(kind):
    rope = read_rope(TINY | spelled(SPELLINGS[0], *SCALINGS[kind]), head_dim=16)
    assert torch.equal(inverse_frequencies(rope, tokens=10**6)[0], inverse_frequencies(rope)[0])


# --- the module -------------------------------------------------------------------------------------


def test_positions_of_one_text_need_no_batch():
    mine, positions = ours(TINY, 16), torch.arange(5)
    for one, batched in zip(mine(positions, torch.float32), mine(positions[None], torch.float32), strict=True):
        assert one.shape == (5, 16)
        assert torch.equal(one, batched[0])


def test_cos_and_sin_are_rounded_once():
    mine, positions = ours(WIDE | spelled(SPELLINGS[0], *SCALINGS["yarn"]), 128), positions_of(32768)
    wide = mine(positions, torch.float32)
    for dtype in DTYPES[1:]:
        for one, other in zip(mine(positions, dtype), wide, strict=True):
            assert torch.equal(one, other.to(dtype))


CASTS = {
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "the CPU": lambda module: module.to("cpu"),
    "a copy": copy.deepcopy,
    "a pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "inside a model": lambda module: torch.nn.Sequential(torch.nn.Linear(2, 2), module).to(torch.bfloat16)[1],
}


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("kind", ["default", "dynamic", "yarn, small"])
@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_no_cast_changes_a_value(cast, kind, used):
    config, positions = TINY | spelled(SPELLINGS[0], *SCALINGS[kind]), positions_of(640)
    wanted, mine = ours(config, 16)(positions, torch.float32), ours(config, 16)
    if used:
        mine(positions, torch.float32)
    for one, other in zip(cast(mine)(positions, torch.float32), wanted, strict=True):
        assert torch.equal(one, other)


def test_the_module_holds_nothing_that_a_checkpoint_fills():
    mine = ours(TINY, 16)
    mine(torch.arange(3), torch.float32)
    assert mine.state_dict() == {}
    assert [*mine.parameters(), *mine.buffers()] == []


@pytest.mark.parametrize("kind", ["default", "dynamic", "llama3, small", "yarn, small"])
def test_a_module_made_on_the_meta_device_is_whole(kind):
    """A loader builds modules without memory; there is nothing here for it to fill afterwards."""
    config, positions = TINY | spelled(SPELLINGS[0], *SCALINGS[kind]), positions_of(64)
    with torch.device("meta"):
        mine = ours(config, 16)
    assert_same(mine, theirs(config), positions)


def test_the_default_dtype_does_not_matter():
    config, positions = TINY | spelled(SPELLINGS[0], *SCALINGS["yarn, small"]), positions_of(64)
    wanted = ours(config, 16)(positions, torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        got = ours(config, 16)(positions, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, got, wanted))


def test_positions_decide_the_device():
    mine = ours(TINY, 16)
    for device in ("cpu", "meta", "cpu"):
        cos, sin = mine(torch.arange(3, device=device), torch.float32)
        assert (cos.device.type, sin.device.type) == (device, device)
    assert inverse_frequencies(mine.rope, device="meta")[0].device.type == "meta"


def test_the_module_says_what_it_is():
    assert repr(Rotary(RopeConfig(1e4, 8, DefaultRope()))) == (
        "Rotary(RopeConfig(theta=10000.0, dim=8, scaling=DefaultRope()))"
    )


# --- rotating ---------------------------------------------------------------------------------------


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_queries_and_keys_are_rotated_as_transformers_does(rng, family, dtype):
    models = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    q = torch.randn(2, 4, 9, 16, generator=rng).to(dtype)
    k = torch.randn(2, 2, 9, 16, generator=rng).to(dtype)
    cos, sin = ours(TINY, 16)(positions_of(64), dtype)
    for one, other in zip(rotate(q, k, cos, sin), models.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_the_values_behind_the_rotated_part_pass(rng):
    from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb

    q, k = torch.randn(2, 4, 9, 16, generator=rng), torch.randn(2, 2, 9, 16, generator=rng)
    cos, sin = ours(TINY | {"partial_rotary_factor": 0.25}, 16)(positions_of(64), torch.float32)
    assert cos.shape == (2, 9, 4)
    turned = rotate(q, k, cos, sin)
    for one, other, before in zip(turned, apply_rotary_pos_emb(q, k, cos, sin), (q, k), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one[..., 4:], before[..., 4:])
        assert not torch.equal(one[..., :4], before[..., :4])


def test_one_texts_cos_and_sin_serve_every_text(rng):
    mine, x = ours(TINY, 16), torch.randn(3, 2, 5, 16, generator=rng)
    alone, batched = mine(torch.arange(5), torch.float32), mine(torch.arange(5).expand(3, 5), torch.float32)
    assert torch.equal(apply_rotary(x, *alone), apply_rotary(x, *batched))


def test_a_rotation_turns_each_pair_by_its_angle(rng):
    """Written out in complex numbers: value i and value i + 8 are one number, turned by position * frequency."""
    x, positions = torch.randn(1, 2, 9, 16, generator=rng), positions_of(64)[1:]
    turned = apply_rotary(x, *ours(TINY, 16)(positions, torch.float32)).double()
    frequencies = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    pairs = torch.complex(x[..., :8].double(), x[..., 8:].double())
    wanted = pairs * torch.exp(1j * positions[..., None].double() * frequencies)[:, None]
    torch.testing.assert_close(turned, torch.cat((wanted.real, wanted.imag), -1), rtol=0, atol=1e-4)


def test_scores_depend_on_the_distance_alone(rng):
    mine, q, k = ours(TINY, 16), *torch.randn(2, 1, 1, 1, 16, generator=rng).double()
    scores = []
    for start in (0, 7, 1000):
        cos, sin = mine(torch.tensor([start, start + 5]), torch.float64)
        scores.append(float((apply_rotary(q, cos[:1], sin[:1]) * apply_rotary(k, cos[1:], sin[1:])).sum()))
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-3)


def test_a_head_smaller_than_its_rotated_part_is_refused():
    cos, sin = ours(TINY, 16)(torch.arange(3), torch.float32)
    with pytest.raises(ValueError, match="^cos and sin rotate 16 values of a head, which has 8$"):
        apply_rotary(torch.zeros(1, 1, 3, 8), cos, sin)
    with pytest.raises(ConfigError):
        ours(TINY | {"partial_rotary_factor": 2}, 16)


def test_inputs_are_left_as_they_were(rng):
    q = torch.randn(1, 2, 5, 16, generator=rng)
    kept, mine = q.clone(), Rotary(RopeConfig(1e4, 16, DynamicRope(2.0, 4)))
    positions = torch.arange(5)
    rotate(q, q, *mine(positions, torch.float32))
    assert torch.equal(q, kept)
    assert positions.tolist() == [0, 1, 2, 3, 4]
