"""Every public name of core says what it does, in one order of sections."""

import ast

import pytest
from docstrings import bad_hookspecs, hookspecs, misordered, undocumented
from floors import CORE, REPOSITORY

FILES = {path.relative_to(REPOSITORY).as_posix(): path for path in sorted(CORE.rglob("*.py"))}
HOOKSPECS = CORE / "hookspecs.py"
HOOKS_PAGE = REPOSITORY / "docs" / "hooks.md"


def over_core(check) -> list[str]:
    """Return what a checker finds in core, each with its file in front."""
    return [f"{name}:{line}" for name, path in FILES.items() for line in check(path.read_text())]


def test_every_public_name_has_a_docstring():
    """X-15: modules, classes, functions and methods of core."""
    found = over_core(undocumented)
    assert not found, "\n".join(["", *found])


def test_sections_stand_in_one_order():
    found = over_core(misordered)
    assert not found, "\n".join(["", *found])


def test_every_hook_has_its_five_sections():
    """M-01: when it is called, what it returns and raises, what it may import, which suite proves it."""
    text = HOOKSPECS.read_text()
    assert hookspecs(text)
    assert list(bad_hookspecs(text)) == []


def test_there_is_one_hook_a_kind():
    """M-01: the table of kinds and the hook specifications name the same hooks."""
    from steelyard.kinds import KINDS

    assert sorted(hookspecs(HOOKSPECS.read_text())) == sorted(kind.hook for kind in KINDS)


def test_the_hooks_page_has_every_signature_word_for_word():
    """M-01: docs/hooks.md says what the code says."""
    page = HOOKS_PAGE.read_text()
    assert [name for name, signature in hookspecs(HOOKSPECS.read_text()).items() if signature not in page] == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1", "1 the module has no docstring"),
        ('"""M."""\ndef f(): ...', "2 f has no docstring"),
        ('"""M."""\nclass A: ...', "2 A has no docstring"),
        ('"""M."""\nclass A:\n    """A."""\n    def f(self): ...', "4 A.f has no docstring"),
        ('"""M."""\nif x:\n    def f(): ...', "3 f has no docstring"),
    ],
)
def test_a_missing_docstring_is_found(source, line):
    assert list(undocumented(source)) == [line]


def test_private_repeated_and_inner_definitions_need_none():
    source = '''"""M."""
def _f(): ...
class _A:
    def f(self): ...
def g():
    """Do."""
    def inner(): ...
@overload
def h(): ...
class B:
    """B."""
    def __init__(self): ...
    @x.setter
    def x(self, value): ...
'''
    assert list(undocumented(source)) == []


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("Returns:\n        x\n    Args:\n        a: b", "Args stands behind Returns"),
        ("Shapes:\n        x\n    Raises:\n        ValueError: b", "Raises stands behind Shapes"),
        ("Source: a file\n    Units:\n        bytes", "Units stands behind Source"),
        ("Args:\n        a: b\n    Args:\n        c: d", "Args stands twice"),
        ("Examples:\n        >>> 1\n        1", "Examples is written as a doctest without a heading"),
        ("Parameters:\n        a: b", "Parameters is written as Args"),
        (">>> 1\n    1\n\n    Raises:\n        ValueError: b", "Raises stands behind an example"),
    ],
)
def test_a_section_out_of_order_is_found(body, what):
    assert list(misordered(f'"""M."""\ndef f():\n    """Do.\n\n    {body}\n    """')) == [f"2 f: {what}"]


def test_sections_in_order_pass():
    body = "Args:\n        a: b\n    Returns:\n        x\n    Raises:\n        E: y\n    Source:\n        z\n\n    >>> 1\n    1"
    assert list(misordered(f'def f():\n    """Do.\n\n    {body}\n    """')) == []


HOOK = '''
@hookspec
def steelyard_things() -> Iterable[type[Thing]]:
    """Offer things.

    Called:
        Once.
    Returns:
        Classes.
    Raises:
        Anything.
    Imports:
        Nothing.
    Proved by:
        A suite.
    """
'''


def test_a_hook_with_five_sections_passes_and_its_signature_is_read():
    assert list(bad_hookspecs(HOOK)) == []
    assert hookspecs(HOOK) == {"steelyard_things": "def steelyard_things() -> Iterable[type[Thing]]:"}
    assert list(hookspecs(HOOK.replace("@hookspec", "@hookspec(firstresult=True)"))) == ["steelyard_things"]
    ast.parse(HOOK)


@pytest.mark.parametrize("section", ["Called", "Returns", "Raises", "Imports", "Proved by"])
def test_a_hook_without_one_of_them_is_found(section):
    (line,) = bad_hookspecs(HOOK.replace(f"{section}:", f"{section}"))
    assert line.startswith("3 steelyard_things: sections ")


def test_a_hook_with_sections_in_another_order_is_found():
    swapped = HOOK.replace("Called:", "X:").replace("Returns:", "Called:").replace("X:", "Returns:")
    assert len(list(bad_hookspecs(swapped))) == 1
