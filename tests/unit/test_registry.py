import importlib
import logging
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from textwrap import dedent
from threading import Barrier

import pytest

from steelyard.discovery import Catalog
from steelyard.errors import AmbiguousPlugin, BrokenPlugin, ConfigError, PluginError, UnknownPlugin
from steelyard.registry import Registry, default_registry, reset_default_registry
from steelyard.testing.trees import importable, write_distribution

PLUGIN = """
    from steelyard.hookspecs import hookimpl

    CALLS = []


    class {name}:
        keys = {keys!r}


    @hookimpl
    def {hook}():
        CALLS.append("{hook}")
        return [{name}]
"""


@pytest.fixture
def root(tmp_path):
    with importable(tmp_path):
        yield tmp_path


def install(root, distribution, keys, *, group="steelyard.models", hook="steelyard_models", name="Toy", source=None):
    module = f"tree_{distribution.replace('-', '_')}"
    text = source if source is not None else PLUGIN.format(name=name, keys=tuple(keys), hook=hook)
    write_distribution(
        root,
        distribution,
        entry_points={group: dict.fromkeys(keys, module)},
        modules={f"{module}.py": text},
    )
    return module


def registry_of(root, **options):
    return Registry.from_environment(path=[str(root)], block=(), **options)


def by_hand(name, *keys):
    return type(name, (), {"keys": keys, "__module__": "handmade"})


def imported():
    return sorted(name for name in sys.modules if name.startswith("tree_"))


# --- listing and resolving ---------------------------------------------------------------------------


def test_listing_imports_nothing_and_resolving_imports_only_the_asked_plugin(root):
    """M-02."""
    for number in range(50):
        install(root, f"dummy-{number}", [f"m{number}"])
    models = registry_of(root)["model"]
    assert len(models) == 50
    assert list(models) == sorted(f"m{number}" for number in range(50))
    assert "m7" in models
    assert "m50" not in models
    assert imported() == []
    assert models["m7"].keys == ("m7",)
    assert imported() == ["tree_dummy_7"]


def test_the_mapping_is_the_union_of_offered_and_added(root):
    """M-03."""
    install(root, "bert", ["bert", "roberta"])
    registry = registry_of(root)
    models = registry["model"]
    registry.add("model", by_hand("Foo", "foo"))
    assert len(models) == 3
    assert set(models) == set(models.keys()) == {"bert", "roberta", "foo"}
    assert "foo" in models
    assert models.list_keys() == sorted(models)
    assert dict(models.items()).keys() == set(models)
    assert [cls.__name__ for cls in models.values()] == ["Toy", "Foo", "Toy"]


def test_a_key_that_is_offered_and_added_counts_once(root):
    """M-03."""
    install(root, "bert", ["bert"])
    registry = registry_of(root)
    registry.add("model", registry["model"]["bert"])
    registry.add("model", by_hand("Other", "bert"), override=True)
    assert list(registry["model"]) == ["bert"]
    assert registry["model"]["bert"].__name__ == "Other"


def test_values_and_items_agree_with_keys_in_order(root):
    """M-04."""
    install(root, "bert", ["bert", "roberta"])
    models = registry_of(root)["model"]
    assert len(list(models.values())) == len(models)
    assert list(zip(models.keys(), models.values(), strict=True)) == list(models.items())


def test_get_returns_the_default_for_an_unknown_key_only(root):
    """M-03."""
    install(root, "broken", ["bad"], source="import no_such_module_anywhere\n")
    models = registry_of(root)["model"]
    assert models.get("nobody") is None
    assert models.get("nobody", int) is int
    with pytest.raises(BrokenPlugin):
        models.get("bad", int)


def test_one_plugin_is_asked_once_for_a_kind(root):
    """M-08."""
    module = install(root, "bert", ["bert", "roberta"])
    models = registry_of(root)["model"]
    assert models["bert"] is models["roberta"] is models["bert"]
    assert sys.modules[module].CALLS == ["steelyard_models"]


def test_sixteen_threads_at_once_get_one_class_from_one_call(root):
    """M-08: the hook takes a while, so that all of them ask before it answers."""
    waiting = "import time\n" + dedent(PLUGIN.format(name="Toy", keys=("bert",), hook="steelyard_models"))
    source = waiting.replace("    return", "    time.sleep(0.2)\n    return")
    module = install(root, "bert", ["bert"], source=source)
    registry, start = registry_of(root), Barrier(16)

    def ask(_):
        start.wait(timeout=60)
        return registry["model"]["bert"]

    with ThreadPoolExecutor(16) as threads:
        classes = list(threads.map(ask, range(16)))
    assert len(set(classes)) == 1
    assert sys.modules[module].CALLS == ["steelyard_models"]


def test_a_registry_with_further_options_asks_no_plugin_again(root):
    """M-08: what is resolved or added by hand is shared with it."""
    module = install(root, "bert", ["bert"])
    registry, mine = registry_of(root), by_hand("Mine", "mine")
    registry.add("model", mine)
    found = registry["model"]["bert"]
    assert registry.under(prefer={}, strict_plugins=False) is registry
    other = registry.under(prefer={"model": {"bert": "bert"}}, strict_plugins=True)
    assert other["model"]["bert"] is found
    assert other["model"]["mine"] is mine
    assert sys.modules[module].CALLS == ["steelyard_models"]


def test_offer_says_who_serves_a_key_without_importing_it(root):
    """M-06: the report names plugin versions."""
    install(root, "bert", ["bert"])
    registry = registry_of(root)
    registry.add("model", by_hand("Foo", "foo"), distribution="my script")
    offer, added = registry.offer("model", "bert"), registry.offer("model", "foo")
    assert (offer.distribution, offer.version, offer.module) == ("bert", "1.0", "tree_bert")
    assert (added.distribution, added.version, added.module) == ("my script", "", "handmade")
    assert imported() == []


# --- unknown -----------------------------------------------------------------------------------------


def test_an_unknown_key_names_what_is_installed_and_what_to_install(root):
    """M-06."""
    install(root, "toy", ["toy"], group="steelyard.quant_dialects", hook="steelyard_quant_dialects")
    with pytest.raises(UnknownPlugin) as caught:
        registry_of(root)["quant dialect"]["awq"]
    assert str(caught.value) == (
        "no quant dialect named 'awq'; installed: toy. Install it with: pip install steelyard-quant-awq"
    )


def test_an_unknown_model_lists_known_names_and_recorded_import_errors(root):
    """M-06."""
    install(root, "bert", ["bert", "roberta"])
    install(root, "broken", ["bad"], source="import no_such_module_anywhere\n")
    registry = registry_of(root)
    registry.available("model")
    with pytest.raises(UnknownPlugin) as caught:
        registry["model"]["qwen99"]
    assert str(caught.value) == (
        "no model named 'qwen99'; installed: bad, bert, roberta. No known package offers it.\n"
        "Installed, but failed to import: plugin broken 1.0 is installed, but tree_broken failed: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'."
    )


def test_experts_are_looked_up_under_their_own_key(root):
    """M-17: a method for linear layers does not serve experts."""
    quant = {"group": "steelyard.quant_methods", "hook": "steelyard_quant_methods"}
    install(root, "fp8", ["fp8.plain"], name="Fp8", **quant)
    install(root, "fp8-moe", ["fp8.plain.experts"], name="Fp8Experts", **quant)
    install(root, "awq", ["int4.awq"], name="Awq", **quant)
    methods = registry_of(root)["quant method"]
    assert methods["fp8.plain"].__name__ == "Fp8"
    assert methods["fp8.plain.experts"].__name__ == "Fp8Experts"
    with pytest.raises(UnknownPlugin) as caught:
        methods["int4.awq.experts"]
    assert str(caught.value) == (
        "no quant method named 'int4.awq.experts'; installed: fp8.plain, fp8.plain.experts, int4.awq. "
        "No known package offers it."
    )


# --- broken ------------------------------------------------------------------------------------------


def test_a_failed_import_is_kept_chained_and_still_listed(root):
    """M-05, R177: known but failed to import is not unknown."""
    install(root, "broken", ["awq"], source="import no_such_module_anywhere\n")
    registry = registry_of(root)
    models = registry["model"]
    with pytest.raises(BrokenPlugin) as caught:
        models["awq"]
    assert str(caught.value) == (
        "plugin broken 1.0 is installed, but tree_broken failed: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert "awq" in models
    assert list(models) == ["awq"]
    assert registry.import_errors == {("model", "awq"): str(caught.value)}


def test_values_and_items_raise_at_the_broken_entry_and_keys_do_not(root):
    """M-04, O-28."""
    install(root, "broken", ["bad"], source="raise RuntimeError('no')\n")
    install(root, "good", ["aaa"])
    models = registry_of(root)["model"]
    values, items = iter(models.values()), iter(models.items())
    assert next(values).__name__ == "Toy"
    assert next(items)[0] == "aaa"
    with pytest.raises(BrokenPlugin):
        next(values)
    with pytest.raises(BrokenPlugin):
        next(items)
    assert list(models.keys()) == ["aaa", "bad"]


def test_a_second_try_really_tries_again_and_clears_the_record(root):
    """R178."""
    module = install(root, "late", ["late"], source="raise RuntimeError('not yet')\n")
    registry = registry_of(root)
    for _ in range(2):
        with pytest.raises(BrokenPlugin) as caught:
            registry["model"]["late"]
        assert str(caught.value) == "plugin late 1.0 is installed, but tree_late failed: RuntimeError: not yet"
    install(root, "late", ["late"])
    assert registry["model"]["late"].keys == ("late",)
    assert registry.import_errors == {}
    assert module in sys.modules


def test_a_hook_that_fails_once_is_called_again(root):
    """R178."""
    source = """
        from steelyard.hookspecs import hookimpl

        TRIES = []


        class Toy:
            keys = ("toy",)


        @hookimpl
        def steelyard_models():
            TRIES.append(1)
            if len(TRIES) == 1:
                raise RuntimeError("first call")
            return [Toy]
    """
    install(root, "shaky", ["toy"], source=source)
    registry = registry_of(root)
    with pytest.raises(BrokenPlugin):
        registry["model"]["toy"]
    assert registry["model"]["toy"].keys == ("toy",)


def test_a_hook_that_breaks_its_promise_once_is_called_again(root):
    """M-08, R178: an answer that was refused is not kept."""
    source = """
        from steelyard.hookspecs import hookimpl

        TRIES = []


        class Toy:
            keys = ("toy",)


        class Other:
            keys = ("other",)


        @hookimpl
        def steelyard_models():
            TRIES.append(1)
            return [Other] if len(TRIES) == 1 else [Toy]
    """
    install(root, "late", ["toy"], source=source)
    registry = registry_of(root)
    with pytest.raises(BrokenPlugin, match="declares 'toy', but its classes have the keys: other$"):
        registry["model"]["toy"]
    assert registry["model"]["toy"].keys == ("toy",)


def test_a_broken_plugin_is_warned_of_once_and_the_others_work(root, caplog):
    """M-15, R172, R174."""
    install(root, "broken", ["bad", "worse"], source="raise RuntimeError('no')\n")
    install(root, "good", ["good"])
    registry = registry_of(root)
    with caplog.at_level(logging.WARNING):
        first = registry.available("model")
        assert registry.available("model") == first
    assert [key for key, _ in first] == ["good"]
    assert [record.getMessage() for record in caplog.records] == [
        "plugin broken 1.0 is installed, but tree_broken failed: RuntimeError: no"
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert set(registry.import_errors) == {("model", "bad"), ("model", "worse")}


def test_strict_plugins_raise_where_others_warn(root):
    """M-15."""
    install(root, "broken", ["bad"], source="raise RuntimeError('no')\n")
    install(root, "good", ["good"])
    registry = registry_of(root, strict_plugins=True)
    with pytest.raises(BrokenPlugin) as caught:
        registry.available("model")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_ctrl_c_during_an_import_passes(root):
    """M-15: only a plugin's failures are kept, not the user's wish to stop."""
    install(root, "slow", ["slow"], source="raise KeyboardInterrupt\n")
    registry = registry_of(root)
    with pytest.raises(KeyboardInterrupt):
        registry["model"]["slow"]
    assert registry.import_errors == {}


def test_a_blocked_plugin_is_neither_listed_nor_imported_and_the_message_says_so(root):
    """Design 4: STEELYARD_BLOCK."""
    install(root, "bert", ["bert"])
    registry = Registry.from_environment(path=[str(root)], block=["bert"])
    assert list(registry["model"]) == []
    with pytest.raises(UnknownPlugin) as caught:
        registry["model"]["bert"]
    assert str(caught.value) == (
        "no model named 'bert'; installed: none. "
        "bert 1.0 would offer it, but is blocked by STEELYARD_BLOCK; unblock it."
    )
    assert imported() == []


# --- duplicates --------------------------------------------------------------------------------------


def test_two_distributions_for_one_key_are_an_error_only_when_it_is_asked_for(root):
    """M-07."""
    install(root, "one", ["same", "own"])
    install(root, "two", ["same"])
    models = registry_of(root)["model"]
    assert models["own"].keys == ("same", "own")
    with pytest.raises(AmbiguousPlugin) as caught:
        models["same"]
    assert str(caught.value) == (
        "model 'same' is offered by one and two. Uninstall one, block one with STEELYARD_BLOCK, "
        "or name the one you want: prefer={'model': {'same': 'one'}}"
    )


def test_the_preferred_distribution_serves_the_key(root):
    """M-07."""
    install(root, "one", ["same"])
    install(root, "the-two", ["same"])
    registry = registry_of(root, prefer={"model": {"same": "The_Two"}})
    assert registry["model"]["same"].__module__ == "tree_the_two"
    assert imported() == ["tree_the_two"]


def test_a_preferred_distribution_that_does_not_offer_the_key_is_an_error(root):
    """M-07."""
    install(root, "one", ["same"])
    with pytest.raises(ConfigError) as caught:
        registry_of(root, prefer={"model": {"same": "three"}})["model"]["same"]
    assert str(caught.value) == "prefer names 'three' for model 'same', which does not offer it; offered by one"


def test_a_preference_for_an_unknown_kind_is_an_error():
    """D-08."""
    with pytest.raises(ConfigError) as caught:
        Registry(Catalog(), prefer={"modle": {}})
    assert str(caught.value) == (
        "prefer: there is no kind named 'modle'; the kinds are model, weight mapping, quant method, kernel backend, "
        "tuning provider, quant dialect, load format"
    )


def test_an_ambiguous_key_is_not_available_and_is_warned_of(root, caplog):
    """M-07, M-15."""
    install(root, "one", ["same"])
    install(root, "two", ["same"])
    assert registry_of(root).available("model") == []
    assert len(caplog.records) == 1


# --- added by hand -----------------------------------------------------------------------------------


def test_adding_the_same_class_again_changes_nothing(caplog):
    """M-07, R176."""
    registry, toy = Registry(Catalog()), by_hand("Toy", "toy")
    registry.add("model", toy)
    registry.add("model", toy)
    assert registry["model"]["toy"] is toy
    assert caplog.records == []


def test_adding_another_class_for_a_key_names_both_origins_and_adds_nothing():
    """M-07, R176."""
    registry, toy = Registry(Catalog()), by_hand("Toy", "toy")
    registry.add("model", toy, distribution="first")
    with pytest.raises(AmbiguousPlugin) as caught:
        registry.add("model", by_hand("Other", "fresh", "toy"), distribution="second")
    assert str(caught.value) == (
        "model 'toy' is offered by first and second. Uninstall one, block one with STEELYARD_BLOCK, "
        "or name the one you want: prefer={'model': {'toy': 'first'}}"
    )
    assert list(registry["model"]) == ["toy"]
    assert registry["model"]["toy"] is toy


def test_override_replaces_with_one_warning(root, caplog):
    """M-07."""
    install(root, "bert", ["bert"])
    registry, mine = registry_of(root), by_hand("Mine", "bert")
    with pytest.raises(AmbiguousPlugin):
        registry.add("model", mine)
    registry.add("model", mine, override=True)
    assert registry["model"]["bert"] is mine
    assert [record.getMessage() for record in caplog.records] == ["model 'bert' of added by hand replaces that of bert"]


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (type("Bare", (), {"__module__": "m"}), "m.Bare has no keys; give it a tuple of strings with that name"),
        (by_hand("Empty"), "handmade.Empty.keys must be a tuple of non-empty strings, is ()"),
        (by_hand("Blank", ""), "handmade.Blank.keys must be a tuple of non-empty strings, is ('',)"),
        ("toy", "'toy' is not a class"),
    ],
    ids=["no keys", "none", "blank", "not a class"],
)
def test_a_class_without_usable_keys_cannot_be_added(cls, why):
    """M-07."""
    with pytest.raises(PluginError) as caught:
        Registry(Catalog()).add("model", cls)
    assert str(caught.value) == why


# --- the registry of a process -----------------------------------------------------------------------


@pytest.fixture
def fresh_default():
    reset_default_registry()
    yield
    reset_default_registry()


@pytest.mark.usefixtures("fresh_default")
def test_threads_share_one_default_registry_until_it_is_reset():
    """M-08."""
    with ThreadPoolExecutor(16) as threads:
        registries = set(threads.map(lambda _: default_registry(), range(64)))
    assert len(registries) == 1
    reset_default_registry()
    assert default_registry() not in registries


def test_a_spawned_process_builds_its_own_registry(root):
    """R176."""
    install(root, "spawned", ["tree-key"])
    child_module = "from steelyard.registry import default_registry\n\n\ndef resolve(answers):\n"
    child_module += "    answers.put(default_registry()['model']['tree-key'].__name__)\n"
    (root / "tree_child.py").write_text(child_module)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=importlib.import_module("tree_child").resolve, args=(answers,))
    child.start()
    assert answers.get(timeout=60) == "Toy"
    child.join(60)
    assert child.exitcode == 0
