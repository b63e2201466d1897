"""Installed plugins, each wrong in one way, resolved for real from hand-written dist-info trees."""

import sys

import pytest

from steelyard.discovery import core_version
from steelyard.errors import BrokenPlugin
from steelyard.registry import Registry
from steelyard.testing.trees import importable, write_distribution

GOOD = """
    from steelyard.hookspecs import hookimpl


    class Good:
        keys = ("good",)


    @hookimpl
    def steelyard_models():
        return [Good]
"""

HEAD = "from steelyard.hookspecs import hookimpl\n\n\nclass A:\n    keys = ('bad',)\n\n\nclass B:\n    keys = ('bad',)\n\n\n"

WRONG = {
    "missing module": (None, "ModuleNotFoundError: No module named 'tree_bad'"),
    "missing dependency": ("import no_such_thing\n", "ModuleNotFoundError: No module named 'no_such_thing'"),
    "syntax error": ("def broken(:\n", "SyntaxError: invalid syntax (tree_bad.py, line 1)"),
    "exit at import": ("raise SystemExit(3)\n", "SystemExit: 3"),
    "error at import": ("raise OSError('no device')\n", "OSError: no device"),
    "no hook": ("X = 1\n", "it declares keys under steelyard.models, but has no hook steelyard_models"),
    "hook of another kind": (
        HEAD + "@hookimpl\ndef steelyard_load_formats():\n    return [A]\n",
        "it declares keys under steelyard.models, but has no hook steelyard_models",
    ),
    "hook not marked": (
        HEAD + "def steelyard_models():\n    return [A]\n",
        "it declares keys under steelyard.models, but has no hook steelyard_models",
    ),
    "extra argument": (
        HEAD + "@hookimpl\ndef steelyard_models(config):\n    return [A]\n",
        "PluginValidationError: Plugin 'tree_bad' for hook 'steelyard_models'\n"
        "hookimpl definition: steelyard_models(config)\n"
        "Argument(s) {'config'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "hook fails": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    raise ValueError('inside')\n",
        "ValueError: inside",
    ),
    "hook fails while it is read": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    yield A\n    raise ValueError('midway')\n",
        "ValueError: midway",
    ),
    "hook returns nothing": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    return None\n",
        "steelyard_models returned no classes",
    ),
    "hook returns a class": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    return A\n",
        "steelyard_models returned no classes",
    ),
    "hook returns objects": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    return ['bad']\n",
        "'bad' is not a class",
    ),
    "promise not kept": (
        HEAD + "A.keys = ('else', 'other')\n@hookimpl\ndef steelyard_models():\n    return [A]\n",
        "its metadata declares 'bad', but its classes have the keys: else, other",
    ),
    "empty answer": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    return []\n",
        "its metadata declares 'bad', but its classes have the keys: none",
    ),
    "two classes for one key": (
        HEAD + "@hookimpl\ndef steelyard_models():\n    return [A, B]\n",
        "the key 'bad' is in two classes: tree_bad.A and tree_bad.B",
    ),
    "no keys": (
        HEAD + "del A.keys\n@hookimpl\ndef steelyard_models():\n    return [A]\n",
        "tree_bad.A has no keys; give it a tuple of strings with that name",
    ),
    "keys are a string": (
        HEAD + "A.keys = 'bad'\n@hookimpl\ndef steelyard_models():\n    return [A]\n",
        "tree_bad.A.keys must be a tuple of non-empty strings, is 'bad'",
    ),
}


@pytest.fixture
def root(tmp_path):
    with importable(tmp_path):
        write_distribution(
            tmp_path,
            "healthy",
            entry_points={"steelyard.models": {"good": "tree_healthy"}},
            modules={"tree_healthy.py": GOOD},
        )
        yield tmp_path


def install(root, source, requires=()):
    write_distribution(
        root,
        "bad-plugin",
        "1.2",
        entry_points={"steelyard.models": {"bad": "tree_bad"}},
        modules={} if source is None else {"tree_bad.py": source},
        requires=requires,
    )
    return Registry.from_environment(path=[str(root)], block=())


@pytest.mark.parametrize(("source", "why"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_plugin_is_named_with_its_version_and_cause_and_harms_no_other(root, source, why):
    """M-05, M-15, R174, R177."""
    registry = install(root, source)
    with pytest.raises(BrokenPlugin) as caught:
        registry["model"]["bad"]
    assert str(caught.value) == f"plugin bad-plugin 1.2 is installed, but tree_bad failed: {why}"
    assert caught.value.__cause__ is not None
    assert registry.import_errors == {("model", "bad"): str(caught.value)}
    assert registry["model"]["good"].__name__ == "Good"
    assert [key for key, _ in registry.available("model")] == ["good"]


def test_a_hook_with_an_unknown_name_is_blamed_on_its_own_plugin(root):
    """Style 5.6: pluggy blames the next healthy plugin."""
    registry = install(root, HEAD + "@hookimpl\ndef steelyard_modles():\n    return [A]\n")
    with pytest.raises(BrokenPlugin) as caught:
        registry["model"]["bad"]
    module = sys.modules["tree_bad"]
    assert caught.value.why == f"PluginValidationError: unknown hook 'steelyard_modles' in plugin {module!r}"
    assert registry["model"]["good"].__name__ == "Good"


def test_a_plugin_for_another_steelyard_is_refused_before_it_is_imported(root):
    """Design 4: API range."""
    registry = install(root, "raise AssertionError('imported')\n", requires=["steelyard>=99,<100"])
    with pytest.raises(BrokenPlugin) as caught:
        registry["model"]["bad"]
    running = core_version()
    assert str(caught.value) == (
        "plugin bad-plugin 1.2 is installed, but tree_bad failed: it requires steelyard>=99,<100, this is steelyard "
        f"{running}; install a version of it that works with {running}, or a steelyard in that range: "
        "pip install --upgrade bad-plugin steelyard"
    )
    assert "tree_bad" not in sys.modules


def test_a_range_that_cannot_be_read_is_refused(root):
    """Design 4: API range."""
    registry = install(root, GOOD, requires=["steelyard>=banana"])
    with pytest.raises(BrokenPlugin) as caught:
        registry["model"]["bad"]
    assert caught.value.why == "its metadata requires steelyard>=banana, which is no version range"


def test_a_range_that_holds_the_running_version_is_accepted(root):
    """Design 4: API range."""
    source = HEAD + "@hookimpl\ndef steelyard_models():\n    return [A]\n"
    assert install(root, source, requires=["steelyard>=0.0.1.dev0,<99"])["model"]["bad"].__name__ == "A"


def test_a_promise_counts_for_every_key_of_the_plugin_and_kind(root):
    """M-16: a key must work."""
    write_distribution(
        root,
        "half",
        entry_points={"steelyard.models": {"kept": "tree_half", "lost": "tree_half"}},
        modules={"tree_half.py": GOOD.replace('"good"', '"kept"')},
    )
    with pytest.raises(BrokenPlugin) as caught:
        Registry.from_environment(path=[str(root)], block=())["model"]["kept"]
    assert caught.value.why == "its metadata declares 'lost', but its classes have the keys: kept"
