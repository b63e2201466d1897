"""The suite must bite: each law is broken by one wrong package."""

import pytest

from steelyard.testing import PluginPackageSuite
from steelyard.testing.trees import importable, write_distribution

GOOD = """
    from steelyard.hookspecs import hookimpl


    class Toy:
        keys = ("toy",)


    @hookimpl
    def steelyard_models():
        return [Toy]
"""


class Toy(PluginPackageSuite):
    distribution = "Steelyard.Toy"


LAWS = [name for name in dir(PluginPackageSuite) if name.startswith("test_")]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr("steelyard.testing.packages.DOORS", ("steelyard.hookspecs",))
    with importable(tmp_path):
        yield tmp_path


def install(root, plugin=GOOD, keys=("toy",), **modules):
    sources = {"steelyard_toy/__init__.py": "", "steelyard_toy/plugin.py": plugin}
    sources |= {f"steelyard_toy/{name}.py": source for name, source in modules.items()}
    points = {"steelyard.models": dict.fromkeys(keys, "steelyard_toy.plugin")}
    write_distribution(root, "steelyard-toy", entry_points=points, modules=sources)


def verdicts():
    failed = {}
    for law in LAWS:
        try:
            getattr(Toy(), law)()
        except AssertionError as error:
            failed[law] = str(error).partition("\n")[0]
    return failed


def test_a_good_package_keeps_every_law(root):
    """Style 5.10."""
    install(root, helper="import json\nfrom . import plugin\nfrom steelyard_toy import plugin as again\n")
    assert verdicts() == {}


def test_a_package_that_is_not_installed_breaks_every_law(root):
    """Style 5.10."""
    text = "steelyard-toy declares no key in any of steelyard's groups; is it installed here?"
    assert verdicts() == dict.fromkeys(LAWS, text)


def test_an_import_of_torch_is_found(root):
    """Style 5.10, M-02."""
    (root / "torch.py").write_text("")
    install(root, "import torch\n" + GOOD.replace("\n    ", "\n"))
    assert verdicts() == {
        "test_plugin_modules_import_without_torch": (
            "importing steelyard_toy.plugin imports torch; import them inside the functions"
        )
    }


def test_a_key_that_is_declared_only_is_found(root):
    """Style 5.10, M-16."""
    install(root, keys=("toy", "more"))
    why = "its metadata declares 'more', but its classes have the keys: toy"
    assert verdicts() == {
        "test_every_declared_key_resolves": f"model 'more': {why}; model 'toy': {why}",
        "test_declared_keys_equal_returned_keys": (
            "steelyard_toy.plugin declares the model keys more, toy, its classes have toy"
        ),
    }


def test_a_key_that_is_returned_only_is_found(root):
    """Style 5.10, M-16."""
    install(root, GOOD.replace('("toy",)', '("toy", "hidden")'))
    assert verdicts() == {
        "test_declared_keys_equal_returned_keys": (
            "steelyard_toy.plugin declares the model keys toy, its classes have hidden, toy"
        )
    }


def test_a_wrong_signature_is_found(root):
    """Style 5.10."""
    install(root, GOOD.replace("steelyard_models()", "steelyard_models(config)"))
    failed = Toy().offers()
    assert len(failed) == 1
    with pytest.raises(AssertionError, match="PluginValidationError"):
        Toy().test_every_declared_key_resolves()


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from steelyard.registry import Registry", "steelyard.registry"),
        ("import steelyard", "steelyard"),
        ("from steelyard import registry", "steelyard.registry"),
        ("def late():\n    import steelyard_other.thing", "steelyard_other.thing"),
        ("import neighbour.part", "neighbour.part"),
    ],
    ids=["core module", "core", "from core", "other plugin by name", "other plugin by metadata"],
)
def test_an_import_around_the_doors_is_found(root, line, module):
    """Style 5.10: plugins lean on the two doors and never on each other."""
    install(root, helper=line + "\n")
    write_distribution(root, "neighbour", entry_points={"steelyard.models": {"n": "neighbour.plugin"}})
    (root / "neighbour").mkdir()
    at = 2 if line.startswith("def") else 1
    assert verdicts() == {
        "test_sources_import_only_the_doors": (
            f"helper.py:{at} imports {module}; a plugin imports steelyard.hookspecs and no other plugin"
        )
    }
