"""Tied nodes on the plan: which one keeps the weight, whatever the order of the ties, and what is only decided by bytes."""

import json
from itertools import permutations

import pytest

from steelyard.blueprint import Embedding, Linear, Norm, Part, Placement, Tie
from steelyard.checkpoint import Checkpoint
from steelyard.errors import BadHeader
from steelyard.steps import Alias, AliasIfEqual
from support.planned import (
    TOY_D,
    dense_shapes,
    error_texts,
    family_of,
    hollow,
    hollow_d,
    plain,
    plan_of,
    planned,
    registry_of,
    texts,
)

TIED = TOY_D | {"tie_word_embeddings": True}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def stored(*without):
    return {name: value for name, value in plain(dense_shapes(TOY_D)).items() if name not in without}


def stems(made):
    return {one.node.stem for one in made.nodes}


def test_a_tied_head_that_is_not_stored_shares_the_embeddings_memory(tmp_path):
    """O-18: exempt from completeness."""
    hollow(tmp_path, TIED, stored(HEAD))
    made = planned(tmp_path).check()
    assert made.ties == (Alias("lm_head", "embed_tokens"),)
    assert "lm_head" not in stems(made)
    assert set(made.aliased) == {"lm_head"}
    assert texts(made) == []
    assert made.rank(0).bytes_needed == sum(entry.nbytes for entry in made.checkpoint.entries.values())


def test_a_tied_head_that_is_stored_too_is_decided_by_its_bytes_with_a_note(tmp_path):
    """O-18, R060: equal bytes share memory, others untie; both are planned."""
    hollow(tmp_path, TIED, stored())
    made = planned(tmp_path).check()
    assert made.ties == (AliasIfEqual("lm_head", "embed_tokens"),)
    assert {"lm_head", "embed_tokens"} <= stems(made)
    assert texts(made) == [
        "lm_head is tied to embed_tokens by the config, but stored too: it shares memory if the bytes are equal, else it "
        "stays apart"
    ]
    assert [finding.severity for finding in made.findings] == ["note"]


@pytest.mark.parametrize("inner", [True, False], ids=["tied-inside", "untied-inside"])
def test_the_flag_of_the_part_that_owns_the_head_counts(tmp_path, inner):
    """R060: text_config and top level contradict each other."""
    config = TOY_D | {"tie_word_embeddings": not inner, "text_config": TOY_D | {"tie_word_embeddings": inner}}
    hollow(tmp_path / "stored", config, stored())
    made = planned(tmp_path / "stored").check()
    assert "lm_head" in stems(made)
    assert made.ties == ((AliasIfEqual("lm_head", "embed_tokens"),) if inner else ())
    hollow(tmp_path / "absent", config, stored(HEAD))
    absent = planned(tmp_path / "absent")
    if inner:
        assert absent.check().ties == (Alias("lm_head", "embed_tokens"),)
    else:
        assert error_texts(absent) == [f"missing tensor {HEAD}, needed for lm_head"]


def test_an_untied_head_is_needed_where_the_architecture_has_one(tmp_path):
    """R062: LlamaForCausalLM has a head, LlamaModel has none."""
    hollow(tmp_path / "causal", TOY_D | {"tie_word_embeddings": False}, stored(HEAD))
    assert error_texts(planned(tmp_path / "causal")) == [f"missing tensor {HEAD}, needed for lm_head"]
    hollow(tmp_path / "model", TOY_D | {"architectures": ["LlamaModel"]}, stored(HEAD))
    made = planned(tmp_path / "model").check()
    assert "lm_head" not in stems(made)
    hollow(tmp_path / "more", TOY_D | {"architectures": ["LlamaModel"]}, stored())
    assert error_texts(planned(tmp_path / "more")) == [
        f"unexpected tensor {HEAD} (model.safetensors): no rule of the model uses or drops it"
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_an_embedding_that_is_not_stored_takes_the_heads_weight(tmp_path, tp):
    """R066: the name that was kept is found by the model's ties, whatever the metadata says."""
    hollow(tmp_path, TIED, stored(TABLE))
    made = planned(tmp_path, tp=tp).check()
    assert made.ties == (Alias("embed_tokens", "lm_head"),)
    assert "embed_tokens" not in stems(made)


def test_a_pair_of_which_nothing_is_stored_misses_the_source(tmp_path):
    """R066: one name is asked for, the one that owns the weight."""
    hollow(tmp_path, TIED, stored(TABLE, HEAD))
    assert error_texts(planned(tmp_path)) == [f"missing tensor {TABLE}, needed for embed_tokens"]


# --- an encoder and a decoder -------------------------------------------------------------------------------------

SHARED, ENCODER, DECODER = "shared", "encoder.embed_tokens", "decoder.embed_tokens"
GROUP = (Tie(ENCODER, SHARED), Tie(DECODER, SHARED))


def plan_group(folder, names, ties=GROUP, *, head=True):
    """Plan an encoder-decoder whose tables are one group and whose head is its own."""
    nodes = [Embedding(stem, 96, 64, Placement.COLWISE) for stem in (SHARED, ENCODER, DECODER)]
    tensors = {f"{name}.weight": ("BF16", (96, 64)) for name in names}
    if head:
        nodes.append(Linear("lm_head", 64, (Part("", 96, padded=True),), Placement.COLWISE))
        tensors["lm_head.weight"] = ("BF16", (96, 64))
    return plan_of(folder, tensors, *nodes, ties=ties)


@pytest.mark.parametrize("only", [SHARED, ENCODER, DECODER])
@pytest.mark.parametrize("ties", list(permutations(GROUP)), ids=["as-listed", "reversed"])
def test_one_stored_table_serves_its_whole_group(tmp_path, only, ties):
    """R064: case (a); every other name uses the stored one directly, the head is not asked."""
    made = plan_group(tmp_path, [only], ties).check()
    assert {(tie.target, tie.source) for tie in made.ties} == {
        (one, only) for one in (SHARED, ENCODER, DECODER) if one != only
    }
    assert {type(tie) for tie in made.ties} == {Alias}
    assert stems(made) == {only, "lm_head"}


@pytest.mark.parametrize("ties", list(permutations(GROUP)), ids=["as-listed", "reversed"])
def test_a_stored_head_never_feeds_an_embedding_that_it_is_not_tied_to(tmp_path, ties):
    """R064: case (b); decoder table and head are stored, and differ."""
    made = plan_group(tmp_path, [DECODER], ties).check()
    assert "lm_head" not in {tie.source for tie in made.ties}


@pytest.mark.parametrize("ties", list(permutations(GROUP)), ids=["as-listed", "reversed"])
def test_two_stored_tables_of_a_group_are_compared_and_the_order_of_ties_decides_nothing(tmp_path, ties):
    """R064: case (c); no name is given two weights."""
    made = plan_group(tmp_path, [DECODER, ENCODER], ties).check()
    assert set(made.ties) == {Alias(SHARED, ENCODER), AliasIfEqual(DECODER, ENCODER)}
    assert texts(made) == [
        f"{DECODER} is tied to {ENCODER} by the config, but stored too: it shares memory if the bytes are equal, else the "
        "load is refused"
    ]


def test_a_table_tied_to_two_others_joins_them(tmp_path):
    """R064: neither tie is lost."""
    made = plan_group(tmp_path, [SHARED, ENCODER], (Tie(DECODER, ENCODER), Tie(DECODER, SHARED))).check()
    assert set(made.ties) == {Alias(DECODER, SHARED), AliasIfEqual(ENCODER, SHARED)}


def test_the_source_of_every_tie_is_planned(tmp_path):
    """R064: chains end at a node that has tensors."""
    chain = (Tie(DECODER, ENCODER), Tie(ENCODER, SHARED), Tie("lm_head", DECODER))
    nodes = [Embedding(stem, 96, 64, Placement.COLWISE) for stem in (SHARED, ENCODER, DECODER)]
    nodes.append(Linear("lm_head", 64, (Part("", 96, padded=True),), Placement.COLWISE))
    for only in (SHARED, ENCODER, DECODER, "lm_head"):
        made = plan_of(tmp_path / only, {f"{only}.weight": ("BF16", (96, 64))}, *nodes, ties=chain).check()
        assert stems(made) == {only}
        assert {tie.source for tie in made.ties} == {only}
        assert {tie.target for tie in made.ties} == set(made.aliased)


# --- ties that cannot be ------------------------------------------------------------------------------------------


def test_a_tie_to_an_optional_node_that_is_absent_asks_for_the_needed_one(tmp_path):
    """A node must not be left with the memory of one that is skipped."""
    table = Embedding("table", 96, 64, Placement.COLWISE, absent="skip")
    head = Linear("head", 64, (Part("", 96, padded=True),), Placement.COLWISE)
    made = plan_of(
        tmp_path, {"norm.weight": ("BF16", (64,))}, Norm("norm", 64), table, head, ties=(Tie("head", "table"),)
    )
    assert error_texts(made) == ["missing tensor head.weight, needed for head"]


def test_a_tie_between_optional_nodes_that_are_absent_is_nothing(tmp_path):
    nodes = [Embedding(stem, 96, 64, Placement.COLWISE, absent="skip") for stem in ("a", "b")]
    made = plan_of(tmp_path, {"norm.weight": ("BF16", (64,))}, Norm("norm", 64), *nodes, ties=(Tie("a", "b"),)).check()
    assert (made.ties, made.skipped) == ((), ("a", "b"))


def test_ties_in_a_circle_miss_a_tensor(tmp_path):
    nodes = [Embedding(stem, 96, 64, Placement.COLWISE) for stem in ("a", "b")]
    made = plan_of(
        tmp_path, {"norm.weight": ("BF16", (64,))}, Norm("norm", 64), *nodes, ties=(Tie("a", "b"), Tie("b", "a"))
    )
    assert error_texts(made) == ["missing tensor a.weight, needed for a"]


@pytest.mark.parametrize("is_head_stored", [False, True], ids=["alias", "if-equal"])
def test_nodes_of_which_a_rank_holds_other_pieces_cannot_be_tied(tmp_path, is_head_stored):
    """A table cut along the hidden size and a head cut along the vocabulary are the same matrix, and not the same memory."""
    table = Embedding("table", 96, 64, Placement.ROWWISE)
    head = Linear("head", 64, (Part("", 96, padded=True),), Placement.COLWISE)
    tensors = {f"{stem}.weight": ("BF16", (96, 64)) for stem in ("table", "head")[: 1 + is_head_stored]}
    made = plan_of(tmp_path, tensors, table, head, ties=(Tie("head", "table"),), tp=2)
    assert error_texts(made) == ["head is tied to table, but rank 0 holds [48, 64] of one and [96, 32] of the other"]
    assert planned(tmp_path, registry=registry_of(family_of(table, head, ties=(Tie("head", "table"),)))).check()


def test_the_name_of_a_part_does_not_keep_a_tie_apart(tmp_path):
    table = Embedding("table", 96, 64, Placement.COLWISE)
    head = Linear("head", 64, (Part("logits", 96, padded=True),), Placement.COLWISE)
    made = plan_of(
        tmp_path, {"table.weight": ("BF16", (96, 64))}, table, head, ties=(Tie("head", "table"),), tp=2
    ).check()
    assert made.ties == (Alias("head", "table"),)


def test_a_tied_head_with_another_vocabulary_is_refused(tmp_path):
    """A table of 100 rows is no head of 96."""
    table = Embedding("table", 100, 64, Placement.COLWISE)
    head = Linear("head", 64, (Part("", 96, padded=True),), Placement.COLWISE)
    made = plan_of(tmp_path, {"table.weight": ("BF16", (100, 64))}, table, head, ties=(Tie("head", "table"),))
    assert error_texts(made) == ["head is tied to table, but rank 0 holds [96, 64] of one and [100, 64] of the other"]


def test_a_tied_head_that_the_ranks_do_not_divide_is_refused(tmp_path):
    """P-14: a node without tensors is looked at too."""
    table = Embedding("table", 97, 64, Placement.COLWISE)
    head = Linear("head", 64, (Part("", 97),), Placement.COLWISE)
    made = plan_of(tmp_path, {"table.weight": ("BF16", (97, 64))}, table, head, ties=(Tie("head", "table"),), tp=2)
    assert error_texts(made) == ["head: cannot cut out[0:97]: 97 elements do not divide by tp 2; sizes that fit: 1"]


def test_two_names_for_one_byte_range_are_refused_by_the_header(tmp_path):
    """R065: aliases belong in the model, not in the file."""
    header = {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}
    raw = json.dumps(header).encode()
    hollow_d(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(BadHeader, match="b.*a|a.*b") as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
