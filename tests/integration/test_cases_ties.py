"""Users' faults with tied and aliased tensors, as loads of real values."""

import json
from itertools import permutations

import numpy as np
import pytest
import torch

from steelyard.blueprint import Embedding, Linear, Part, Placement, Tie
from steelyard.errors import BadHeader, LoadError
from support import cases
from support.checkpoints import write_config
from support.loading import registry_for, runnable
from support.planned import TOY_D

HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"


@pytest.fixture(autouse=True, params=cases.PATTERNS.values(), ids=cases.PATTERNS)
def fresh_memory(request):
    with cases.poisoned(request.param):
        yield


def is_shared(module, one=HEAD, other=TABLE):
    """Tell whether two names of a model are one memory."""
    held = cases.held(module)
    return held[one].data_ptr() == held[other].data_ptr()


def without(arrays, *names):
    return {name: array for name, array in arrays.items() if name.removeprefix("model.") not in names}


def holds_table_twice(module, table, tp, rank):
    """Check that embedding and head are one memory, and that it holds the rank's rows."""
    held = cases.held(module)
    rows = table[rank * 96 // tp : (rank + 1) * 96 // tp]
    return is_shared(module) and held[TABLE].float().tolist() == rows.tolist()


# --- R060 --------------------------------------------------------------------------------------------------------


def nested(*, inner, outer):
    """Return a wrapper's config whose two levels say other things of the tie."""
    return {"text_config": TOY_D | {"tie_word_embeddings": inner}, "tie_word_embeddings": outer}


def said_of(*, inner, outer):
    return (
        f"tie_word_embeddings is {outer} at the top level and {inner} in text_config; text_config, which owns the head, "
        "decides"
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_R060_a_stored_head_is_loaded_and_the_contradiction_told(tmp_path, tp):
    """R060: untied in text_config, tied at the top; the head is the stored one, embedding + 1."""
    whole = cases.toy_d()
    whole["lm_head.weight"] = whole["model.embed_tokens.weight"] + 1
    folder = cases.folder_of(tmp_path, whole, nested(inner=False, outer=True))
    for rank, module in enumerate(cases.modules(folder, tp)):
        cases.assert_holds(module, cases.share(whole, tp, rank))
        assert not is_shared(module)
    notes = [(finding.severity, finding.text) for finding in cases.plan(folder, tp=tp).findings]
    assert notes == [("note", said_of(inner=False, outer=True))]


@pytest.mark.parametrize("tp", [1, 2])
def test_R060_a_head_that_is_not_stored_shares_the_embeddings_memory(tmp_path, tp):
    """R060, O-18: the flags swapped; one memory on every rank, also after the model has moved."""
    whole = without(cases.toy_d(), HEAD)
    folder = cases.folder_of(tmp_path, whole, nested(inner=True, outer=False))
    for rank, module in enumerate(cases.modules(folder, tp)):
        expected = cases.share(whole, tp, rank)
        cases.assert_holds(module, expected | {HEAD: expected[TABLE]})
        assert is_shared(module)
        assert is_shared(module.to(torch.float32))
    notes = [finding.text for finding in cases.plan(folder, tp=tp).findings]
    assert notes == [said_of(inner=True, outer=False)]


def test_R060_a_stored_head_wins_over_the_flag_that_ties_it(tmp_path):
    """R060, O-18: a file that holds a head is evidence; equal bytes share memory, others stay apart, both with a note."""
    whole = cases.toy_d()
    for name, head in (("equal", 0), ("other", 1)):
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"] + head
        model = cases.load(cases.folder_of(tmp_path / name, whole, nested(inner=True, outer=False)))
        cases.assert_holds(model.module, cases.share(whole, 1, 0))
        assert is_shared(model.module) == (name == "equal")
        assert [finding.code for finding in model.report.findings] == ["untied", "config"]
        assert [tie.is_shared for tie in model.report.ties] == [name == "equal"]


# --- R062 --------------------------------------------------------------------------------------------------------


def test_R062_a_missing_head_is_an_error_where_the_architecture_has_one(tmp_path):
    """R062: LlamaForCausalLM: the head and the flag that asks for it are named."""
    folder = cases.folder_of(tmp_path, without(cases.toy_d(), HEAD), {"tie_word_embeddings": False})
    (said,) = cases.errors(lambda: cases.load(folder))
    assert said.startswith("missing tensor lm_head.weight ")
    assert "tie_word_embeddings=False" in said
    assert cases.errors(lambda: cases.ranks(folder, tp=2)) == [said]


@pytest.mark.parametrize("tp", [1, 2])
def test_R062_an_architecture_without_a_head_needs_none(tmp_path, tp):
    """R062: LlamaModel; there is no head, and hidden states come out."""
    whole = without(cases.toy_d(), HEAD)
    config = {"tie_word_embeddings": False, "architectures": ["LlamaModel"]}
    folder = cases.folder_of(tmp_path, whole, config)
    for rank, module in enumerate(cases.modules(folder, tp)):
        cases.assert_holds(module, cases.share(whole, tp, rank))
        assert not module.has_head
    if tp == 1:
        assert module(torch.tensor([[1, 2, 3]])).shape == (1, 3, 256)


# --- R064 --------------------------------------------------------------------------------------------------------

TABLES = ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
GROUP = (Tie(TABLES[1], TABLES[0]), Tie(TABLES[2], TABLES[0]))
both_orders = pytest.mark.parametrize("ties", list(permutations(GROUP)), ids=["as-listed", "reversed"])


def encoder_decoder(folder, stored, ties, tp):
    """Write tables filled with one number each and return every rank's tables and head as the numbers in them."""
    nodes = [Embedding(stem, 96, 64, Placement.COLWISE) for stem in TABLES]
    nodes.append(Linear("lm_head", 64, (Part("", 96, padded=True),), Placement.COLWISE))
    arrays = {f"{stem}.weight": np.full((96, 64), value, np.float32) for stem, value in stored.items()}
    config = {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
    registry = registry_for(runnable(*nodes, ties=ties))
    found = []
    for module in cases.modules(cases.folder_of(folder, arrays, config), tp, registry=registry):
        held = cases.held(module)
        assert {tuple(tensor.shape) for tensor in held.values()} == {(96 // tp, 64)}
        found.append({name.removesuffix(".weight"): set(tensor.flatten().tolist()) for name, tensor in held.items()})
    return found


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("only", TABLES)
@both_orders
def test_R064_one_stored_table_fills_its_whole_group(tmp_path, only, ties, tp):
    """R064: case (a), each in turn; the head is its own."""
    for held in encoder_decoder(tmp_path, {only: 1, "lm_head": 2}, ties, tp):
        assert held == dict.fromkeys(TABLES, {1.0}) | {"lm_head": {2.0}}


@pytest.mark.parametrize("tp", [1, 2])
@both_orders
def test_R064_a_stored_head_that_differs_never_feeds_a_table(tmp_path, ties, tp):
    """R064: case (b), decoder table 1 and head 2; also where the head is tied to the group by the config."""
    for tied in ((), (Tie("lm_head", TABLES[2]),)):
        for held in encoder_decoder(tmp_path / str(len(tied)), {TABLES[2]: 1, "lm_head": 2}, (*tied, *ties), tp):
            assert held == dict.fromkeys(TABLES, {1.0}) | {"lm_head": {2.0}}


@pytest.mark.parametrize("tp", [1, 2])
@both_orders
def test_R064_two_stored_tables_that_differ_are_an_error(tmp_path, ties, tp):
    """R064: case (c), encoder 1 and decoder 3: which of them the third name means, nobody knows."""
    with pytest.raises(LoadError) as caught:
        encoder_decoder(tmp_path / "other", {TABLES[1]: 1, TABLES[2]: 3, "lm_head": 2}, ties, tp)
    assert str(caught.value) == (
        "decoder.embed_tokens.weight (model.safetensors) and encoder.embed_tokens.weight (model.safetensors) are one table "
        "in the model, and differ; keep one of them"
    )
    for held in encoder_decoder(tmp_path / "alike", {TABLES[1]: 3, TABLES[2]: 3, "lm_head": 2}, ties, tp):
        assert held == dict.fromkeys(TABLES, {3.0}) | {"lm_head": {2.0}}


# --- R065, R066 --------------------------------------------------------------------------------------------------


def test_R065_two_names_for_one_byte_range_are_refused(tmp_path):
    """R065: the file and both names are in the text."""
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}).encode()
    write_config(tmp_path, TOY_D)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(BadHeader) as caught:
        cases.load(tmp_path)
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: tensors a and b overlap by 16 bytes"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("metadata", [{}, {"model.embed_tokens.weight": "lm_head.weight"}], ids=["plain", "metadata"])
def test_R066_an_embedding_that_was_dropped_on_save_is_the_stored_head(tmp_path, metadata, tp):
    """R066, O-18: tied, only the head is stored; the metadata is not needed."""
    whole = cases.toy_d()
    config = {"tie_word_embeddings": True}
    folder = cases.folder_of(tmp_path, without(whole, TABLE), config, metadata=metadata)
    whole["model.embed_tokens.weight"] = whole["lm_head.weight"]
    for rank, module in enumerate(cases.modules(folder, tp)):
        cases.assert_holds(module, cases.share(whole, tp, rank))
        assert is_shared(module)
