"""Indexes and numberings that are incomplete, contradict the files, or point out of the folder."""

import json

import numpy as np
import pytest

from steelyard.checkpoint import Checkpoint
from steelyard.errors import CheckpointError, MissingShard
from support.checkpoints import toy_d, write_config, write_safetensors

INDEX = "model.safetensors.index.json"


def refused(folder, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def write_index(folder, weight_map):
    write_config(folder, {"model_type": "x"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def numbers(count):
    return {f"t{number}": np.full(2, number, dtype=np.float32) for number in range(count)}


def damage(folder):
    """Make every file of weights unreadable as such: whoever opens one fails with BadHeader."""
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"damaged")


def test_all_absent_shards_are_named_before_any_header_is_read(tmp_path):
    """R141, L-17: the index names what is gone; the others are damaged, which nobody sees."""
    folder = toy_d(tmp_path, quant="FP8-B", shards=4)
    damage(folder)
    for number in (2, 4):
        (folder / f"model-0000{number}-of-00004.safetensors").unlink()
    message = refused(folder, MissingShard)
    assert message == (
        f"{folder}: index file {INDEX} names files that are absent: "
        "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors"
    )


def test_a_gap_in_the_numbering_is_a_missing_shard(tmp_path):
    """R141: no index, shards 1 and 3 of 3 by name."""
    folder = toy_d(tmp_path, quant="FP8-B", shards=3, index=False)
    damage(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = refused(folder, MissingShard)
    assert message == (
        f"{folder}: the numbering of the shards names files that are absent: model-00002-of-00003.safetensors"
    )
    assert isinstance(pytest.raises(FileNotFoundError, Checkpoint.open, folder).value, CheckpointError)


def test_a_numbering_may_start_at_nought(tmp_path):
    write_config(tmp_path, {})
    for number, (name, value) in enumerate(numbers(2).items()):
        write_safetensors(tmp_path / f"m-{number}-of-2.safetensors", {name: value})
    assert Checkpoint.open(tmp_path).source == "numbered shards"
    (tmp_path / "m-1-of-2.safetensors").unlink()
    assert refused(tmp_path, MissingShard) == (
        f"{tmp_path}: the numbering of the shards names files that are absent: m-1-of-2.safetensors"
    )


def test_two_numberings_are_an_error(tmp_path):
    """An older save in the same folder."""
    folder = toy_d(tmp_path, shards=2, index=False)
    toy_d(folder, shards=3, index=False)
    assert refused(folder) == (
        f"{folder}: holds shards of two numberings, model-*-of-00002.safetensors and model-*-of-00003.safetensors; "
        "remove the older ones"
    )


@pytest.mark.parametrize("name", ["model-00005-of-00003.safetensors", "model-00001-of-999999999.safetensors"])
def test_numbers_that_cannot_be_are_an_error_and_are_not_spelt_out(name, tmp_path):
    write_safetensors(tmp_path / name, numbers(1))
    assert refused(tmp_path) == f"{tmp_path}: the numbers of these shards cannot be: {name}"


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "sub/../../evil.safetensors",
        "sub/./evil.safetensors",
        "sub//evil.safetensors",
        "/etc/evil.safetensors",
        "..\\evil.safetensors",
        "C:\\evil.safetensors",
        "evil.safetensors/..",
        "evil.bin",
        "evil.safetensors\0.safetensors",
        "evil\n.safetensors",
        "evil\ud800.safetensors",
        "",
        "..",
    ],
    ids=repr,
)
def test_an_index_entry_that_leaves_the_folder_is_an_error(name, tmp_path):
    """R145, X-22: whether the target exists or not."""
    folder = tmp_path / "model"
    write_safetensors(tmp_path / "evil.safetensors", {"b": np.zeros(2, dtype=np.float32)})
    write_safetensors(folder / "model.safetensors", {"a": np.zeros(2, dtype=np.float32)})
    (folder / "sub").mkdir()
    write_index(folder, {"a": "model.safetensors", "b": name})
    assert refused(folder) == (
        f"{folder / INDEX}: names files that it must not: {name!r}; "
        "a name is relative, stays in the folder and ends in .safetensors"
    )


def test_an_index_may_name_files_of_a_folder_below(tmp_path):
    write_safetensors(tmp_path / "sub" / "model.safetensors", {"a": np.zeros(2, dtype=np.float32)})
    write_index(tmp_path, {"a": "sub/model.safetensors"})
    assert Checkpoint.open(tmp_path).files[0].name == "sub/model.safetensors"


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["x.safetensors"]}}'],
)
def test_an_index_of_another_form_is_an_error(content, tmp_path):
    toy_d(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert refused(tmp_path) == (
        f"{tmp_path / INDEX}: must be a JSON object with a weight_map of tensor names to file names"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"weight_map": {}}', "its weight_map is empty"),
        ('{"weight_map"', "is not JSON: Expecting ':' delimiter at line 1, column 14; fetch the file again"),
        (
            '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
            "gives a twice, with different values",
        ),
    ],
)
def test_an_index_that_says_nothing_certain_is_an_error(content, why, tmp_path):
    toy_d(tmp_path)
    (tmp_path / INDEX).write_text(content)
    assert refused(tmp_path) == f"{tmp_path / INDEX}: {why}"


def test_two_index_files_of_other_names_are_an_error(tmp_path):
    for name in ("a.safetensors.index.json", "b.safetensors.index.json"):
        (tmp_path / name).write_text("{}")
    assert refused(tmp_path) == (
        f"{tmp_path}: holds several index files and no model.safetensors.index.json: "
        "a.safetensors.index.json, b.safetensors.index.json; keep one of them"
    )


def test_every_contradiction_of_index_and_shards_is_in_one_error(tmp_path):
    """L-17: a name in the index alone, in a shard alone, in another shard than named, and in two shards."""
    t = numbers(5)
    write_safetensors(tmp_path / "x.safetensors", {name: t[name] for name in ("t0", "t1", "t4")})
    write_safetensors(tmp_path / "y.safetensors", {name: t[name] for name in ("t0", "t2", "t3")})
    names = {"t0": "x", "t1": "y", "t2": "y", "t4": "x", "gone": "y"}
    write_index(tmp_path, {name: f"{file}.safetensors" for name, file in names.items()})
    assert refused(tmp_path) == (
        f"{tmp_path}: the files contradict each other, 4 problems:\n"
        "  - tensor t0 stands in x.safetensors and in y.safetensors\n"
        f"  - tensor t1 is not in y.safetensors, where {INDEX} says it is\n"
        f"  - tensor gone is not in y.safetensors, where {INDEX} says it is\n"
        f"  - tensor t3 is in y.safetensors, and {INDEX} does not name it"
    )


def test_one_name_in_two_shards_is_an_error_without_an_index_too(tmp_path):
    """L-17: both files are named; also if the bytes are the same."""
    write_config(tmp_path, {})
    for number in (1, 2):
        write_safetensors(tmp_path / f"m-{number}-of-2.safetensors", {"same": np.zeros(2, dtype=np.float32)})
    assert refused(tmp_path) == (
        f"{tmp_path}: the files contradict each other, 1 problem:\n"
        "  - tensor same stands in m-1-of-2.safetensors and in m-2-of-2.safetensors"
    )


def test_a_long_list_of_contradictions_is_cut_and_counted(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", numbers(13))
    write_index(tmp_path, {"t0": "x.safetensors"})
    lines = refused(tmp_path).splitlines()
    assert lines[0] == f"{tmp_path}: the files contradict each other, 12 problems:"
    assert len(lines) == 12
    assert lines[-1] == "  - and 2 more"
