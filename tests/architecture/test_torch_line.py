"""What an import brings along, asked of fresh interpreters."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from floors import CORE, ROOT, table, torch_free_modules

BELOW = tuple("steelyard" if module == ROOT else f"steelyard.{module}" for module in torch_free_modules(CORE, table()))


def fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds this checkout first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CORE.parent), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def brought(code: str, *arguments: str) -> set[str]:
    """Return the top-level names that a piece of code adds to ``sys.modules``."""
    dump = (
        "import atexit, json, os, sys\n"
        "before = set(sys.modules)\n"
        "def dump():\n"
        "    names = sorted({name.partition('.')[0] for name in set(sys.modules) - before})\n"
        "    os.write(2, ('\\n@modules ' + json.dumps(names) + '\\n').encode())\n"
        "atexit.register(dump)\n"
    )
    done = fresh(dump + code, *arguments)
    lines = [line for line in done.stderr.splitlines() if line.startswith("@modules ")]
    assert lines, done.stderr
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return set(json.loads(lines[-1].removeprefix("@modules ")))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder with a config and one tensor, written without any library."""
    header = json.dumps({"a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    return tmp_path


def test_the_checker_sees_what_an_import_brings():
    assert "numpy" in brought("import numpy")
    assert "numpy" not in brought("import json")


def test_every_torch_free_module_imports_without_torch_and_numpy():
    """Prove the torch line for core (L-30)."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    found = {'torch', 'numpy'} & set(sys.modules)\n"
        "    if found: raise SystemExit(f'{name} brings {sorted(found)}')\n"
    )
    assert len(BELOW) > 1
    done = fresh(code, *BELOW)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", BELOW)
def test_each_torch_free_module_imports_where_torch_is_absent(module):
    """A module that only works after another one was imported, or with torch installed, fails here."""
    code = (
        "import importlib, sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'numpy')))\n"
        "importlib.import_module(sys.argv[1])\n"
    )
    done = fresh(code, module)
    assert done.returncode == 0, done.stderr


def test_import_steelyard_brings_only_the_standard_library():
    assert brought("import steelyard") - set(sys.stdlib_module_names) == {"steelyard"}


CLI = "import sys\nfrom steelyard.cli import main\nsys.argv = ['steelyard', *sys.argv[1:]]\nsys.exit(main())\n"


@pytest.mark.parametrize("arguments", [("--help",), ("plugins",), ("plugins", "--json")], ids=" ".join)
def test_light_commands_bring_no_heavy_package(arguments):
    assert brought(CLI, *arguments) & {"pydantic", "pluggy", "torch", "numpy"} == set()


def test_inspect_brings_no_heavy_package(checkpoint):
    assert brought(CLI, "inspect", str(checkpoint)) & {"pydantic", "pluggy", "torch", "numpy"} == set()
