"""A module imports only from strictly lower floors; the table is in `floors.py` beside this file."""

from pathlib import Path
from textwrap import dedent

import pytest
from floors import CORE, TORCH_LINE, Floors, table, torch_violations, violations

SMALL = Floors((("words", "more"), ("shapes",), TORCH_LINE, ("reader",), ("torch", "plugin"), ("__init__",), ("face",)))


@pytest.fixture
def tree(tmp_path: Path):
    """Return a function that writes a package of the given modules; those of `SMALL` are empty where not given."""

    def write(**modules: str) -> Path:
        root = tmp_path / "small"
        for name in (*SMALL.numbers(), *modules):
            path = root.joinpath(*name.split("__")) if name != "__init__" else root / "__init__"
            if not path.with_suffix("").is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_suffix(".py").write_text(dedent(modules.get(name, "")))
        return root

    return write


def test_core_keeps_its_floors():
    found = violations(CORE, table())
    assert not found, "\n".join(["", *found])


def test_no_torch_free_module_of_core_imports_torch_by_source():
    found = torch_violations(CORE, table())
    assert not found, "\n".join(["", *found])


def test_a_clean_tree_passes(tree):
    root = tree(
        shapes="from small.words import Word\nfrom .more import other\n",
        reader="import torch\nfrom small import shapes\n",
        face="import small\nfrom small.reader import read\n",
    )
    assert violations(root, SMALL) == []
    assert torch_violations(root, SMALL) == []


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("from small.more import x", ""),
        ("import small.more", ""),
        ("from small import more", ""),
        ("from . import more", ""),
        ("from .more import x", ""),
        ("try:\n    from small.more import x\nexcept ImportError:\n    x = None", ""),
        ("class A:\n    from small.more import x", ""),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small.more import x", ", under TYPE_CHECKING"),
        ("import typing\nif typing.TYPE_CHECKING:\n    import small.more", ", under TYPE_CHECKING"),
        ("def f():\n    from small.more import x", ", in a function"),
        ("async def f():\n    import small.more", ", in a function"),
        ("import importlib\ndef f():\n    importlib.import_module('small.more')", ", in a function"),
    ],
)
def test_an_import_of_the_same_floor_is_found_however_it_is_written(tree, source, how):
    (line,) = violations(tree(words=source), SMALL)
    number = source[: source.index("small.more" if "small.more" in source else "more")].count("\n") + 1
    assert line == (f"words:{number} (floor 0) imports more (floor 0){how}: only lower floors may be imported")


def test_an_import_of_a_higher_floor_is_found(tree):
    assert violations(tree(words="from small.reader import read"), SMALL) == [
        "words:1 (floor 0) imports reader (floor 2): only lower floors may be imported"
    ]


def test_the_package_itself_has_a_floor(tree):
    assert violations(tree(words="from small import load"), SMALL) == [
        "words:1 (floor 0) imports __init__ (floor 4): only lower floors may be imported"
    ]


def test_a_module_without_a_row_is_told_where_to_go(tree):
    assert violations(tree(stranger=""), SMALL) == [
        "stranger has no floor: put it in ROWS of tests/architecture/floors.py, one row above "
        "the highest module that it imports"
    ]


def test_a_row_without_a_module_needs_to_be_planned(tree):
    root = tree()
    (root / "more.py").unlink()
    assert violations(root, SMALL) == [
        "more stands in ROWS but does not exist: remove its row, or list it in PLANNED until it is written"
    ]
    assert violations(root, Floors(SMALL.rows, frozenset({"more"}))) == []


def test_a_planned_module_that_exists_leaves_the_list(tree):
    assert violations(tree(), Floors(SMALL.rows, frozenset({"more"}))) == [
        "more exists: take it out of PLANNED in tests/architecture/floors.py"
    ]


def test_an_import_of_a_module_that_is_nowhere_is_found(tree):
    assert violations(tree(shapes="from small.nowhere import x"), SMALL) == [
        "shapes:1 imports nowhere, which neither exists nor has a row"
    ]


def test_a_name_in_two_rows_is_found(tree):
    doubled = Floors((*SMALL.rows, ("words",)))
    assert "words stands in two rows of the table" in violations(tree(), doubled)


def test_modules_of_one_package_may_import_each_other_but_not_in_a_cycle(tree):
    root = tree(
        face____init__="", face__a="from small.face import b\n", face__b="from small.face.c import x\n", face__c=""
    )
    (root / "face.py").unlink(missing_ok=True)
    assert violations(root, SMALL) == []
    (root / "face" / "c.py").write_text("def f():\n    from .a import y\n")
    assert violations(root, SMALL) == ["face.a -> face.b -> face.c -> face.a: a cycle inside a package"]


def test_builtin_imports_the_doors_only_and_nothing_imports_builtin(tree):
    root = tree(
        builtin____init__="",
        builtin__plugin="from small.plugin import hookimpl\ndef f():\n    from small.builtin.method import M\n",
        builtin__method="from small.shapes import cut\nfrom small.torch import ops\ndef f():\n    import small.torch\n",
        face="from small.builtin.method import M\n",
    )
    assert violations(root, SMALL) == [
        "builtin.method:1 imports shapes: a plugin, core's own too, imports the doors only",
        "builtin.method:2 imports torch at module level, but stands below the torch line",
        "face:1 imports builtin.method: builtin enters through entry points, nothing imports it",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "from torch.nn import Module",
        "import numpy as np",
        "def f():\n    import torch",
        "x = __import__('torch')",
    ],
)
def test_torch_below_the_line_is_found(tree, source):
    (line,) = torch_violations(tree(shapes=source), SMALL)
    assert line.endswith("but stands below the torch line")
    assert torch_violations(tree(reader=source, shapes=""), SMALL) == []


def test_torch_types_below_the_line_are_fine(tree):
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\n"
    assert torch_violations(tree(shapes=source), SMALL) == []


def test_a_face_above_the_line_may_import_torch_in_functions_only(tree):
    free = Floors((*SMALL.rows, ("cli",)))
    assert torch_violations(tree(cli="def f():\n    import torch\n"), free) == []
    assert torch_violations(tree(cli="import torch\n"), free) == [
        "cli:1 imports torch, but stands below the torch line"
    ]
