import inspect

import pytest

from steelyard import hookspecs
from steelyard.kinds import KINDS

SECTIONS = ["Called:", "Returns:", "Raises:", "Imports:", "Proved by:"]


def test_there_is_one_hook_a_kind_and_no_other():
    """M-01."""
    names = [name for name, value in vars(hookspecs).items() if inspect.isfunction(value)]
    assert names == [kind.hook for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.hook for kind in KINDS])
def test_a_hook_takes_nothing_and_documents_five_sections_in_order(kind):
    """Style 5.4."""
    hook = getattr(hookspecs, kind.hook)
    lines = inspect.getdoc(hook).splitlines()
    assert inspect.signature(hook).parameters == {}
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == SECTIONS
    assert lines[0].endswith(".")
    assert kind.group in "\n".join(lines)
