"""The public names stand in `public_names.json`; `make freeze` rewrites it after a change that was meant."""

import json

from freeze import SNAPSHOT, current, described, differences, fields


def test_public_names_are_the_frozen_ones():
    """D-10: the table of the package, the three doors, and the fields of LoadConfig with their defaults."""
    found = differences(json.loads(SNAPSHOT.read_text()), current())
    assert not found, "\n".join(["", *found])


def test_every_public_name_loads():
    """M-16: only what works is exported."""
    listed = {f"{place}.{name}": what for place, names in current().items() for name, what in names.items()}
    assert [name for name, what in listed.items() if what == "absent"] == []


def test_the_package_lists_its_public_names_before_they_are_loaded():
    import steelyard

    assert set(steelyard.__all__) <= set(dir(steelyard))


def test_an_added_field_of_the_configuration_is_named():
    """D-10: adding a field without updating the snapshot fails with the field's name."""
    from pydantic import BaseModel

    class Before(BaseModel):
        tp: int = 1

    class After(Before):
        ep: int = 1
        order: list[str] = []

    old, new = {"config": fields(Before)}, {"config": fields(After)}
    assert old == {"config": {"tp": f"{int} = 1"}}
    assert differences(old, new) == ["config: ep is new", "config: order is new"]


def test_a_removed_name_and_a_changed_signature_are_named():
    def load(path: str, *, device: str = "cpu") -> None: ...

    now = {"a": {"load": described(load)}}
    assert now == {"a": {"load": "function (path: str, *, device: str = 'cpu') -> None"}}
    assert differences({"a": {"load": "function (path)", "plan": "class"}}, now) == [
        "a: plan is gone",
        "a: load was 'function (path)', is \"function (path: str, *, device: str = 'cpu') -> None\"",
    ]
