"""Tests that pass only where the temporary folder is no link would fail on machines where it is one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = ("tests/unit/test_checkpoint.py", "tests/attacks/test_paths.py")

# pytest resolves the folders that it hands out; this hands them out as a user's shell would name them.
UNRESOLVED = """
import tempfile
from pathlib import Path
import pytest

class Unresolved:
    @pytest.fixture
    def tmp_path(self):
        made = Path(tempfile.mkdtemp())
        assert made != made.resolve(), made
        return made

def pytest_configure(config):
    config.pluginmanager.register(Unresolved())
"""


def test_tests_pass_below_a_temporary_folder_that_is_a_link(tmp_path):
    """X-19: paths are compared as they were given or resolved on both sides."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "unresolved_tmp.py").write_text(textwrap.dedent(UNRESOLVED))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "unresolved_tmp", "-p", "no:cacheprovider", *MODULES],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "link")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "real").iterdir())) > 50, done.stdout
