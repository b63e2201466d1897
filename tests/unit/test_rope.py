"""Rotations from configs alone: both spellings, published values, and what is refused. The numbers: test_ops_rotary."""

import pytest

from steelyard.errors import ConfigError
from steelyard.rope import KINDS, DefaultRope, DynamicRope, LinearRope, Llama3Rope, RopeConfig, YarnRope, read_rope

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
SCALED = {
    "linear": ({"factor": 2.0}, LinearRope(2.0)),
    "dynamic": ({"factor": 2.0}, DynamicRope(2.0, 4096)),
    "llama3": (LLAMA3, Llama3Rope(8.0, 1.0, 4.0, 8192)),
    "yarn": (YARN, YarnRope(4.0, 1.138629436111989, 32.0, 1.0, True, 32768)),
}
PLAIN = {"max_position_embeddings": 4096, "rope_theta": 500000.0}


def old(kind, name="rope_type", **keys):
    """Return a config in the older spelling."""
    return PLAIN | {"rope_scaling": {name: kind, **keys}}


def new(kind, **keys):
    """Return a config as transformers 5 writes it."""
    return {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": kind, "rope_theta": 500000.0, **keys}}


def yarn(**keys):
    return read_rope(old("yarn", **YARN | keys), head_dim=8).scaling


@pytest.mark.parametrize(("kind", "given", "scaling"), [(kind, *row) for kind, row in SCALED.items()], ids=SCALED)
def test_every_spelling_says_the_same(kind, given, scaling):
    wanted = RopeConfig(500000.0, 64, scaling)
    assert wanted.kind == kind
    for config in (
        old(kind, **given),
        old(kind, "type", **given),
        old(kind, type=kind, **given),
        new(kind, **given),
        new(kind, type=kind, **given),
        new(kind, **given) | {"rope_theta": 500000},  # beside the group too, and alike
        new(kind, **given) | old(kind, **given),  # both groups
        {**new(kind, **given), "rope_parameters": {"full_attention": new(kind, **given)["rope_parameters"]}},
    ):
        assert read_rope(config, head_dim=64) == wanted


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {}, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 10000}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}}},
        {"partial_rotary_factor": None, "rope_scaling": None},
    ],
    ids=str,
)
def test_without_scaling_theta_alone_counts(config):
    assert read_rope(config, head_dim=64) == RopeConfig(10000.0, 64, DefaultRope())


def test_theta_is_the_groups_or_beside_it_or_the_familys():
    assert read_rope({}, head_dim=8, default_theta=1e6).theta == 1e6
    assert read_rope({"rope_theta": 5e5}, head_dim=8, default_theta=1e6).theta == 5e5
    assert read_rope({"rope_parameters": {"rope_theta": 2e6}}, head_dim=8, default_theta=1e6).theta == 2e6
    assert read_rope(old("linear", factor=2, rope_theta=5e5), head_dim=8).theta == 5e5
    with pytest.raises(ConfigError, match="rope_theta=0.5 is not greater than 1"):
        read_rope({}, head_dim=8, default_theta=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_head_is_rotated_where_the_config_says_so(kind):
    given = SCALED[kind][0] if kind in SCALED else {}
    for config in (
        new(kind, partial_rotary_factor=0.4, **given),
        new(kind, partial_rotary_factor=0.4, **given) | {"partial_rotary_factor": 0.4},
        old(kind, **given) | {"partial_rotary_factor": 0.4},
    ):
        assert read_rope(config, head_dim=80).dim == 32
    assert read_rope(new(kind, partial_rotary_factor=1, **given), head_dim=80).dim == 80


def test_the_original_length_stands_in_the_group_or_beside_it():
    inside = old("yarn", factor=4.0, original_max_position_embeddings=1024)
    beside = old("yarn", factor=4.0) | {"original_max_position_embeddings": 1024}
    both = inside | beside | {"rope_scaling": inside["rope_scaling"]}
    for config in (inside, beside, both):
        assert read_rope(config, head_dim=8).scaling.positions == 1024
    without = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    assert read_rope(old("llama3", **without) | {"original_max_position_embeddings": 99}, head_dim=8).scaling == (
        Llama3Rope(8.0, 1.0, 4.0, 99)
    )


def test_yarn_without_an_original_length_was_trained_on_all_positions():
    assert read_rope(old("yarn", factor=4.0), head_dim=8).scaling.positions == 4096


def test_a_null_factor_of_yarn_is_the_growth_of_the_length():
    config = old("yarn", factor=None, original_max_position_embeddings=1024)
    assert read_rope(config, head_dim=8).scaling.factor == 4.0


def test_yarns_choices_have_defaults_for_null_and_zero():
    for value in (None, 0):
        assert (yarn(beta_fast=value).beta_fast, yarn(beta_slow=value).beta_slow) == (32.0, 1.0)
    assert (yarn(beta_fast=16, beta_slow=2).beta_fast, yarn(beta_fast=16, beta_slow=2).beta_slow) == (16.0, 2.0)
    assert [yarn().truncate, yarn(truncate=True).truncate, yarn(truncate=False).truncate] == [True, True, False]


def test_yarns_attention_factor_is_given_or_from_both_mscales_or_from_the_factor():
    """One mscale alone counts for nothing, as in transformers; DeepSeek states both."""
    inferred = 1.138629436111989  # 0.1 * ln 4 + 1
    assert yarn(attention_factor=1.5, mscale=2.0, mscale_all_dim=1.0).attention_factor == 1.5
    assert yarn(mscale=0.707, mscale_all_dim=0.707).attention_factor == 1.0
    assert yarn(mscale=2.0, mscale_all_dim=1.0).attention_factor == pytest.approx(1.277258872 / 1.138629436)
    for alone in ({"mscale": 2.0}, {"mscale_all_dim": 2.0}, {"mscale": 2.0, "mscale_all_dim": 0}, {"mscale": None}):
        assert yarn(**alone).attention_factor == inferred
    assert yarn(attention_factor=None).attention_factor == inferred
    assert yarn(factor=0.5).attention_factor == 1.0
    assert yarn(factor=0.5, mscale=2.0, mscale_all_dim=1.0).attention_factor == 1.0


# Published, as their config.json has them.
PUBLISHED = {
    "Llama-2-7b": (
        {"max_position_embeddings": 4096, "rope_scaling": None},
        RopeConfig(10000.0, 128, DefaultRope()),
    ),
    "Llama-3.1-8B": (
        {
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
        },
        RopeConfig(500000.0, 128, Llama3Rope(8.0, 1.0, 4.0, 8192)),
    ),
    "Qwen2.5 with 128k": (
        {
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        },
        RopeConfig(1000000.0, 128, YarnRope(4.0, 1.138629436111989, 32.0, 1.0, True, 32768)),
    ),
    "DeepSeek-V3's keys": (
        {
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
        },
        RopeConfig(10000.0, 128, YarnRope(40.0, 1.0, 32.0, 1.0, True, 4096)),
    ),
    "deepseek-coder-6.7b": (
        {"max_position_embeddings": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
        RopeConfig(100000.0, 128, LinearRope(4.0)),
    ),
    "internlm2's keys": (
        {"max_position_embeddings": 32768, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1000000},
        RopeConfig(1000000.0, 128, DynamicRope(2.0, 32768)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "wanted"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_read_as_they_are(config, wanted):
    assert read_rope(config, head_dim=128) == wanted


POSITIVE = "a number greater than 0 that float32 holds"
COUNT = "a whole number from 1 to 2**53"
ORIGINAL = "original_max_position_embeddings"
YARN_READS = (
    "rope_type, type, rope_theta, partial_rotary_factor, factor, original_max_position_embeddings, attention_factor, "
    "beta_fast, beta_slow, mscale, mscale_all_dim, truncate"
)


def without(group, key):
    return {name: value for name, value in group.items() if name != key}


REFUSED = {
    # kinds
    "mrope": (
        old("mrope", "type", mrope_section=[16, 24, 24]),
        "rope_scaling.type='mrope' is not computed; computed are default, linear, dynamic, llama3, yarn",
    ),
    "longrope": (
        new("longrope", short_factor=[1.0], long_factor=[1.0]),
        "rope_parameters.rope_type='longrope' is not computed; computed are default, linear, dynamic, llama3, yarn",
    ),
    "no kind at all": (
        old(None),
        "rope_scaling.rope_type=None is not computed; computed are default, linear, dynamic, llama3, yarn",
    ),
    "a kind that is a list": (
        old(["yarn"]),
        "rope_scaling.rope_type=['yarn'] is not computed; computed are default, linear, dynamic, llama3, yarn",
    ),
    "two kinds": (
        old("linear", type="dynamic", factor=2.0),
        "rope_scaling.rope_type='linear' and rope_scaling.type='dynamic' contradict each other; "
        "state one, or both alike",
    ),
    # groups
    "a number for a group": (
        PLAIN | {"rope_scaling": 2.0},
        "rope_scaling=2.0 is not a group of keys; null or a group is accepted",
    ),
    "a list for a group": (
        {"rope_parameters": []},
        "rope_parameters=[] is not a group of keys; null or a group is accepted",
    ),
    "a layer type without rotation": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}},
        "rope_parameters.sliding_attention=None is not a group of keys; every layer is rotated",
    ),
    "layer types that differ": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        "rope_parameters.full_attention={'rope_theta': 1000000.0} and rope_parameters.sliding_attention="
        "{'rope_theta': 10000.0} ask for different rotations; one rotation is computed for all layers",
    ),
    "a wrong value in a layer type": (
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"type": "linear", "factor": "2"}}},
        f"rope_parameters.sliding_attention.factor='2' is not {POSITIVE}",
    ),
    "two groups that differ": (
        {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters={'rope_type': 'default'} and rope_scaling={'type': 'linear', 'factor': 2} ask for different "
        "rotations; one rotation is computed for all layers",
    ),
    # keys that nothing reads
    "a factor without a kind": (
        PLAIN | {"rope_scaling": {"factor": 2.0}},
        "rope_scaling.factor=2.0: rope type 'default' reads rope_type, type, rope_theta, partial_rotary_factor "
        "and nothing else",
    ),
    "sections of the default kind": (
        old("default", mrope_section=[1, 1, 2]),
        "rope_scaling.mrope_section=[1, 1, 2]: rope type 'default' reads rope_type, type, rope_theta, "
        "partial_rotary_factor and nothing else",
    ),
    "two keys that nothing reads": (
        old("dynamic", factor=1.0, alpha=1000, beta_fast=32),
        "rope_scaling.alpha=1000, rope_scaling.beta_fast=32: rope type 'dynamic' reads rope_type, type, rope_theta, "
        "partial_rotary_factor, factor and nothing else",
    ),
    "a key of linear that is llama3's": (
        old("linear", **LLAMA3),
        "rope_scaling.low_freq_factor=1.0, rope_scaling.high_freq_factor=4.0, "
        "rope_scaling.original_max_position_embeddings=8192: rope type 'linear' reads rope_type, type, rope_theta, "
        "partial_rotary_factor, factor and nothing else",
    ),
    "a misspelt key of llama3": (
        old("llama3", low_freq_facter=1.0, **LLAMA3),
        "rope_scaling.low_freq_facter=1.0: rope type 'llama3' reads rope_type, type, rope_theta, "
        "partial_rotary_factor, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings "
        "and nothing else",
    ),
    "a key of yarn that only its first code had": (
        old("yarn", finetuned=True, **YARN),
        f"rope_scaling.finetuned=True: rope type 'yarn' reads {YARN_READS} and nothing else",
    ),
    # theta
    "theta twice": (
        new("default") | {"rope_theta": 10000.0},
        "rope_theta=10000.0 and rope_parameters.rope_theta=500000.0 contradict each other; state one, or both alike",
    ),
    "theta null": ({"rope_theta": None}, f"rope_theta is null; {POSITIVE} is needed"),
    "theta null in the group": (
        {"rope_parameters": {"rope_theta": None}},
        f"rope_parameters.rope_theta is null; {POSITIVE} is needed",
    ),
    "theta as text": ({"rope_theta": "10000"}, f"rope_theta='10000' is not {POSITIVE}"),
    "theta true": ({"rope_theta": True}, f"rope_theta=True is not {POSITIVE}"),
    "theta not a number": ({"rope_theta": float("nan")}, f"rope_theta=nan is not {POSITIVE}"),
    "theta past float32": ({"rope_theta": 10**39}, f"rope_theta={10**39} is not {POSITIVE}"),
    "theta negative": ({"rope_theta": -1.0}, f"rope_theta=-1.0 is not {POSITIVE}"),
    "theta one": ({"rope_theta": 1}, "rope_theta=1 is not greater than 1"),
    # the rotated part
    "part twice": (
        new("default", partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.25},
        "partial_rotary_factor=0.25 and rope_parameters.partial_rotary_factor=0.5 contradict each other; "
        "state one, or both alike",
    ),
    "part above one": (
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor=1.5 is greater than 1, the whole head",
    ),
    "part zero": ({"partial_rotary_factor": 0.0}, f"partial_rotary_factor=0.0 is not {POSITIVE}"),
    "part odd": (
        {"partial_rotary_factor": 0.375},
        "head_dim=8 with partial_rotary_factor=0.375 rotates 3 values of a head; rope type 'default' needs an even "
        "number of at least 2",
    ),
    "part too small": (
        new("default", partial_rotary_factor=0.1),
        "head_dim=8 with rope_parameters.partial_rotary_factor=0.1 rotates 0 values of a head; rope type 'default' "
        "needs an even number of at least 2",
    ),
    "part too small for dynamic": (
        old("dynamic", factor=2.0) | {"partial_rotary_factor": 0.25},
        "head_dim=8 with partial_rotary_factor=0.25 rotates 2 values of a head; rope type 'dynamic' needs an even "
        "number of at least 4",
    ),
    # factors
    **{
        f"{kind} without a factor": (
            old(kind, **without(SCALED[kind][0], "factor")),
            f"rope_scaling.factor is absent; {POSITIVE} is needed",
        )
        for kind in SCALED
    },
    **{
        f"{kind} with factor 0": (
            new(kind, **{**SCALED[kind][0], "factor": 0}),
            f"rope_parameters.factor=0 is not {POSITIVE}",
        )
        for kind in SCALED
    },
    "factor null": (old("linear", factor=None), f"rope_scaling.factor is null; {POSITIVE} is needed"),
    "factor infinite": (old("linear", factor=float("inf")), f"rope_scaling.factor=inf is not {POSITIVE}"),
    "factor in a list": (old("linear", factor=[2.0]), f"rope_scaling.factor=[2.0] is not {POSITIVE}"),
    # dynamic
    "dynamic without a length": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        f"max_position_embeddings is absent; rope_scaling needs it, {COUNT}",
    ),
    "dynamic with a fraction for a length": (
        old("dynamic", factor=2.0) | {"max_position_embeddings": 4096.5},
        f"max_position_embeddings=4096.5 is not {COUNT}",
    ),
    "dynamic with a true length": (
        old("dynamic", factor=2.0) | {"max_position_embeddings": True},
        f"max_position_embeddings=True is not {COUNT}",
    ),
    "dynamic with a damaged length": (
        old("dynamic", factor=2.0) | {"max_position_embeddings": 2**53 + 1},
        f"max_position_embeddings=9007199254740993 is not {COUNT}",
    ),
    "dynamic with a null length": (
        old("dynamic", factor=2.0) | {"max_position_embeddings": None},
        f"max_position_embeddings is null; {COUNT} is needed",
    ),
    # llama3
    **{
        f"llama3 without {key}": (
            old("llama3", **without(LLAMA3, key)),
            f"rope_scaling.{key} is absent; {COUNT if key == ORIGINAL else POSITIVE} is needed",
        )
        for key in LLAMA3
    },
    "llama3 with a low factor of 0": (
        old("llama3", **LLAMA3 | {"low_freq_factor": 0}),
        f"rope_scaling.low_freq_factor=0 is not {POSITIVE}",
    ),
    "llama3 with bounds in the wrong order": (
        old("llama3", **LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        "rope_scaling.high_freq_factor=1 is not greater than low_freq_factor=4",
    ),
    "llama3 with bounds that are one": (
        old("llama3", **LLAMA3 | {"low_freq_factor": 4.0}),
        "rope_scaling.high_freq_factor=4 is not greater than low_freq_factor=4",
    ),
    "an original length of 0": (
        old("llama3", **LLAMA3 | {ORIGINAL: 0}),
        f"rope_scaling.{ORIGINAL}=0 is not {COUNT}",
    ),
    "two original lengths": (
        old("llama3", **LLAMA3) | {ORIGINAL: 4096},
        f"{ORIGINAL}=4096 and rope_scaling.{ORIGINAL}=8192 contradict each other; state one, or both alike",
    ),
    # yarn
    "a null original length": (
        old("yarn", factor=4.0, original_max_position_embeddings=None),
        f"rope_scaling.{ORIGINAL} is null; {COUNT} is needed",
    ),
    "yarn without any length": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        f"max_position_embeddings is absent; rope_scaling needs it, {COUNT}",
    ),
    "attention factor 0": (
        old("yarn", **YARN, attention_factor=0),
        f"rope_scaling.attention_factor=0 is not {POSITIVE}",
    ),
    "beta_fast as text": (old("yarn", **YARN, beta_fast="32"), f"rope_scaling.beta_fast='32' is not {POSITIVE}"),
    "beta_slow negative": (old("yarn", **YARN, beta_slow=-1), f"rope_scaling.beta_slow=-1 is not {POSITIVE}"),
    "betas in the wrong order": (
        old("yarn", **YARN, beta_fast=1, beta_slow=32.5),
        "rope_scaling.beta_fast=1 is less than beta_slow=32.5",
    ),
    "mscale negative": (old("yarn", **YARN, mscale=-1.0), f"rope_scaling.mscale=-1.0 is not {POSITIVE}"),
    "mscale_all_dim as text": (
        old("yarn", **YARN, mscale_all_dim="1"),
        f"rope_scaling.mscale_all_dim='1' is not {POSITIVE}",
    ),
    "truncate as a number": (old("yarn", **YARN, truncate=1), "rope_scaling.truncate=1 is neither true nor false"),
    "truncate null": (old("yarn", **YARN, truncate=None), "rope_scaling.truncate=None is neither true nor false"),
}


@pytest.mark.parametrize(("config", "text"), REFUSED.values(), ids=REFUSED)
def test_a_value_that_cannot_be_met_is_refused_by_key_and_value(config, text):
    with pytest.raises(ConfigError) as caught:
        read_rope(config, head_dim=8)
    assert str(caught.value) == text


def test_an_odd_head_is_refused():
    with pytest.raises(ConfigError) as caught:
        read_rope({}, head_dim=7)
    assert str(caught.value) == (
        "head_dim=7 rotates 7 values of a head; rope type 'default' needs an even number of at least 2"
    )


def test_reading_changes_no_config():
    config = new("yarn", **YARN)
    kept = {**config, "rope_parameters": dict(config["rope_parameters"])}
    read_rope(config, head_dim=8)
    assert config == kept
