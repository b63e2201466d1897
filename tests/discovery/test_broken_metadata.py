"""Installed metadata, each wrong in one way: recorded, never raised, and no harm to the others."""

import pytest

from steelyard.discovery import BrokenOffer, Catalog
from steelyard.errors import UnknownPlugin
from steelyard.registry import Registry
from steelyard.testing.trees import importable, write_distribution

GROUPS = (
    "steelyard.models, steelyard.weight_mappings, steelyard.quant_methods, steelyard.kernel_backends, "
    "steelyard.tuning_providers, steelyard.quant_dialects, steelyard.load_formats"
)

WRONG = {
    "attribute": (
        "[steelyard.models]\nbad = tree_bad:register\n",
        ("model", "bad", "tree_bad:register"),
        "'tree_bad:register' is not the dotted name of a module, which 'bad' needs",
    ),
    "not a name": (
        "[steelyard.models]\nbad = tree-bad/plugin.py\n",
        ("model", "bad", "tree-bad/plugin.py"),
        "'tree-bad/plugin.py' is not the dotted name of a module, which 'bad' needs",
    ),
    "empty value": (
        "[steelyard.models]\nbad =\n",
        ("model", "bad", ""),
        "'' is not the dotted name of a module, which 'bad' needs",
    ),
    "empty key": (
        "[steelyard.models]\n= tree_bad\n",
        ("model", "", "tree_bad"),
        "an entry point of steelyard.models has an empty key; name the key before the '='",
    ),
    "unknown group": (
        "[steelyard.modles]\nbad = tree_bad\n",
        ("steelyard.modles", "bad", "tree_bad"),
        f"there is no group steelyard.modles; the groups are {GROUPS}",
    ),
    "declared twice": (
        "[steelyard.models]\nbad = tree_bad\nbad = tree_worse\n",
        ("model", "bad", "tree_worse"),
        "'bad' is declared twice, for tree_bad and for tree_worse; keep one",
    ),
}


@pytest.fixture
def root(tmp_path):
    write_distribution(tmp_path, "healthy", entry_points={"steelyard.models": {"good": "tree_healthy"}})
    return tmp_path


def read(root):
    return Catalog.from_environment(path=[str(root)], block=())


@pytest.mark.parametrize(("text", "place", "why"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_entry_point_is_recorded_with_what_is_wrong(root, text, place, why):
    """M-15: broken metadata cannot break the core."""
    (write_distribution(root, "bad-plugin") / "entry_points.txt").write_text(text)
    noun, key, module = place
    catalog = read(root)
    assert catalog.broken == (BrokenOffer(noun, key, "bad-plugin", "1.0", module, why),)
    assert "good" in {offer.key for offer in catalog.offers}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"[steelyard.models]\njust words\n", "TypeError: "),
        (b"[steelyard.models]\nbad = \xff\xfe\n", "UnicodeDecodeError: "),
    ],
    ids=["no equals sign", "not utf-8"],
)
@pytest.mark.parametrize("from_path", [True, False], ids=["folders", "environment"])
def test_an_unreadable_file_costs_only_its_own_distribution(root, content, error, from_path):
    """M-15: one bad file fails importlib_metadata's one call for everybody."""
    info = write_distribution(root, "steelyard-bad")
    (info / "entry_points.txt").write_bytes(content)
    with importable(root):
        catalog = read(root) if from_path else Catalog.from_environment(block=())
    (entry,) = (entry for entry in catalog.broken if entry.distribution == "steelyard-bad")
    assert entry.why.startswith(f"entry_points.txt cannot be read ({error}")
    assert entry.why.endswith("); reinstall the distribution")
    assert "good" in {offer.key for offer in catalog.of("model")}


@pytest.mark.parametrize("content", [b"[console_scripts]\njust words\n", b"\xff\xfe"], ids=["words", "bytes"])
def test_an_unreadable_file_that_is_none_of_our_business_is_not_reported(root, content):
    """M-15."""
    (write_distribution(root, "someone-else") / "entry_points.txt").write_bytes(content)
    assert read(root).broken == ()


def test_a_folder_without_metadata_is_recorded(root):
    """M-15: the rest of a failed uninstall."""
    info = write_distribution(root, "ghost", entry_points={"steelyard.models": {"ghost": "tree_ghost"}})
    (info / "METADATA").unlink()
    (entry,) = read(root).broken
    assert str(entry) == (
        "an unnamed distribution of no version: its metadata has no name; remove its dist-info folder, or reinstall it"
    )


def test_a_distribution_found_twice_counts_once_and_the_first_folder_wins(tmp_path):
    """Style 5.6."""
    for place, version in (("first", "1.0"), ("second", "2.0")):
        write_distribution(
            tmp_path / place, "twice", version, entry_points={"steelyard.models": {"same": f"tree_{place}"}}
        )
    folders = [str(tmp_path / place) for place in ("first", "second")]
    (offer,) = Catalog.from_environment(path=folders, block=()).offers
    assert (offer.version, offer.module) == ("1.0", "tree_first")
    with importable(tmp_path / "second"), importable(tmp_path / "first"):
        (offer,) = (o for o in Catalog.from_environment(block=()).offers if o.distribution == "twice")
    assert (offer.version, offer.module) == ("1.0", "tree_first")


def test_the_same_line_twice_is_one_offer(root):
    """M-07: the same registration twice is a no-op."""
    text = "[steelyard.models]\nsame = tree_same\nsame = tree_same\n"
    (write_distribution(root, "repeated") / "entry_points.txt").write_text(text)
    catalog = read(root)
    assert [offer.key for offer in catalog.offers] == ["good", "same"]
    assert catalog.broken == ()


def test_a_key_that_only_a_broken_entry_point_offers_is_unknown_and_the_entry_is_named(root):
    """R177."""
    (write_distribution(root, "bad-plugin") / "entry_points.txt").write_text(
        "[steelyard.models]\nbert = tree_bad:register\n"
    )
    with pytest.raises(UnknownPlugin) as caught:
        Registry(read(root))["model"]["bert"]
    assert str(caught.value) == (
        "no model named 'bert'; installed: good. Install it with: pip install steelyard-model-bert\n"
        "Installed, but failed to import: bad-plugin 1.0: "
        "'tree_bad:register' is not the dotted name of a module, which 'bert' needs."
    )


def test_a_broken_entry_point_is_warned_of_once_among_the_available(root, caplog):
    """M-15."""
    (write_distribution(root, "bad-plugin") / "entry_points.txt").write_text("[steelyard.models]\nx = a:b\n")
    (root / "tree_healthy.py").write_text(
        "from steelyard.hookspecs import hookimpl\n\nclass Good:\n    keys = ('good',)\n\n"
        "@hookimpl\ndef steelyard_models():\n    return [Good]\n"
    )
    with importable(root):
        registry = Registry(read(root))
        for _ in range(2):
            assert [key for key, _ in registry.available("model")] == ["good"]
    assert [record.getMessage() for record in caplog.records] == [
        "plugin bad-plugin 1.0 is installed, but a:b failed: 'a:b' is not the dotted name of a module, which 'x' needs"
    ]
