import subprocess
import sys
from itertools import permutations

import importlib_metadata
import pytest

from steelyard import discovery
from steelyard.discovery import Catalog, Offer
from steelyard.kinds import KINDS
from steelyard.testing.trees import importable, write_distribution


def read(root, block=()):
    return Catalog.from_environment(path=[str(root)], block=block)


def test_an_offer_says_who_offers_which_key_in_which_module(tmp_path):
    """M-01."""
    write_distribution(
        tmp_path,
        "Steelyard_Model.Toy",
        "2.1",
        entry_points={"steelyard.models": {"toy": "toy_pkg.plugin"}},
        requires=["steelyard[torch]>=0.1,<0.3", "numpy"],
    )
    assert read(tmp_path).offers == (
        Offer("model", "toy", "steelyard-model-toy", "2.1", "toy_pkg.plugin", ">=0.1,<0.3"),
    )


def test_offers_come_by_kind_then_key_then_distribution_whatever_the_order_on_disk(tmp_path):
    """M-08."""
    listings = []
    for number, names in enumerate(permutations(["aa", "bb", "cc"])):
        root = tmp_path / str(number)
        for place, name in enumerate(names):
            groups = {"steelyard.load_formats": {"x": f"{name}.p"}, "steelyard.models": {"z": f"{name}.p"}}
            write_distribution(root / str(place), name, entry_points=groups)
        folders = [str(root / str(place)) for place in range(3)]
        listings.append([(o.noun, o.key, o.distribution) for o in Catalog.from_environment(path=folders).offers])
    assert listings == [
        [("model", "z", name) for name in ("aa", "bb", "cc")]
        + [("load format", "x", name) for name in ("aa", "bb", "cc")]
    ] * len(listings)


def test_a_stub_with_one_key_of_each_kind_fills_every_kind(tmp_path):
    """M-01."""
    write_distribution(tmp_path, "stub", entry_points={kind.group: {"k": "stub.plugin"} for kind in KINDS})
    catalog = read(tmp_path)
    assert [[offer.key for offer in catalog.of(kind.noun)] for kind in KINDS] == [["k"]] * 7


def test_an_empty_path_offers_nothing(tmp_path):
    """M-01."""
    assert read(tmp_path) == Catalog()


def test_the_environment_is_read_by_one_call(tmp_path, monkeypatch):
    """Design 4: one entry_points() call."""
    write_distribution(tmp_path, "toy", entry_points={"steelyard.models": {"toy": "toy"}})
    calls = []
    real = importlib_metadata.entry_points

    def counted(**params):
        calls.append(params)
        return real(**params)

    monkeypatch.setattr(importlib_metadata, "entry_points", counted)
    with importable(tmp_path):
        assert "toy" in {offer.key for offer in Catalog.from_environment().of("model")}
    assert calls == [{}]


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        ([], ""),
        (["numpy>=1"], ""),
        (["steelyard"], ""),
        (["steelyard-quant-fp8>=9"], ""),
        (["steelyard (>=0.1)"], ">=0.1"),
        (["Steelyard[torch] >=0.1 , <1"], ">=0.1 , <1"),
        (["steelyard>=0.1", "steelyard<0.5"], ">=0.1,<0.5"),
        (["steelyard>=9; extra == 'test'"], ""),
        (["steelyard>=0.1; python_version >= '3'"], ">=0.1"),
        (["steelyard>=0.1; no marker"], ">=0.1"),
        (["steelyard @ file:///somewhere"], ""),
    ],
    ids=["none", "other", "any", "longer name", "parens", "extra", "two", "of an extra", "marker", "bad marker", "url"],
)
def test_the_range_on_steelyard_is_read_from_the_requirements(tmp_path, requirements, expected):
    """Design 4: API range."""
    write_distribution(tmp_path, "toy", entry_points={"steelyard.models": {"toy": "toy"}}, requires=requirements)
    assert [offer.requires for offer in read(tmp_path).offers] == [expected]


@pytest.mark.parametrize("spelling", ["toy-pack", "Toy_Pack", " toy.pack "])
def test_a_blocked_distribution_is_dropped_in_any_spelling_and_still_shown(tmp_path, spelling):
    """Design 4: STEELYARD_BLOCK."""
    write_distribution(tmp_path, "toy-pack", entry_points={"steelyard.models": {"toy": "toy"}})
    write_distribution(tmp_path, "other", entry_points={"steelyard.models": {"other": "other"}})
    catalog = read(tmp_path, block=[spelling])
    assert [offer.key for offer in catalog.offers] == ["other"]
    assert [offer.key for offer in catalog.blocked] == ["toy"]
    assert catalog.block == ("toy-pack",)


def test_the_block_list_is_read_in_the_call_and_not_at_import(tmp_path, monkeypatch):
    """D-05, D-06."""
    write_distribution(tmp_path, "toy", entry_points={"steelyard.models": {"toy": "toy"}})
    seen = []
    for value in ("", "toy,absent", ""):
        monkeypatch.setenv("STEELYARD_BLOCK", value)
        seen.append(len(Catalog.from_environment(path=[str(tmp_path)]).offers))
    assert seen == [1, 0, 1]


def test_an_explicit_block_list_wins_over_the_variable(tmp_path, monkeypatch):
    """D-01."""
    write_distribution(tmp_path, "toy", entry_points={"steelyard.models": {"toy": "toy"}})
    monkeypatch.setenv("STEELYARD_BLOCK", "toy")
    assert [offer.key for offer in read(tmp_path, block=()).offers] == ["toy"]


def test_ambiguous_places_are_those_of_several_distributions(tmp_path):
    """M-07."""
    write_distribution(tmp_path, "one", entry_points={"steelyard.models": {"same": "one", "own": "one"}})
    write_distribution(tmp_path, "two", entry_points={"steelyard.models": {"same": "two"}})
    assert read(tmp_path).ambiguous() == {("model", "same")}


MODULES = ["steelyard", "steelyard.discovery", "steelyard.registry", "steelyard.flags", "steelyard.cli"]


@pytest.mark.parametrize("module", [*MODULES, "steelyard.hookspecs"])
def test_no_variable_is_read_at_import(module):
    """D-05, X-11."""
    code = f"""
import os, sys
read = []
class Watched(type(os.environ)):
    def __getitem__(self, key):
        read.append(key)
        return super().__getitem__(key)
    def get(self, key, default=None):
        read.append(key)
        return super().get(key, default)
os.environ.__class__ = Watched
import {module}
print([key for key in read if key.startswith(("STEELYARD_", "AITER_", "DG_"))])
"""
    assert run(code) == "[]"


@pytest.mark.parametrize("module", MODULES)
def test_discovery_imports_neither_pydantic_nor_pluggy_nor_torch(module):
    """Design 4: Configuration."""
    code = f"import sys, {module}; print([name for name in ('pydantic', 'pluggy', 'torch') if name in sys.modules])"
    assert run(code) == "[]"


def test_importing_steelyard_imports_nothing_else():
    """Design 4: import steelyard imports nothing (PEP 562)."""
    code = "import sys; before = set(sys.modules); import steelyard; print(sorted(set(sys.modules) - before))"
    assert run(code) == "['steelyard']"


def test_public_names_are_listed_and_an_error_class_comes_on_first_use():
    """D-10."""
    code = (
        "import steelyard; assert set(steelyard.__all__) <= set(dir(steelyard)); "
        "from steelyard import errors; assert steelyard.UnknownPlugin is errors.UnknownPlugin; "
        "print(steelyard.__version__)"
    )
    assert run(code) == discovery.core_version()


def test_a_name_that_is_not_public_is_an_attribute_error():
    """D-10."""
    import steelyard

    with pytest.raises(AttributeError) as caught:
        steelyard.lod  # noqa: B018 - the access is the test
    assert str(caught.value) == "module 'steelyard' has no attribute 'lod'"


def run(code):
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()
