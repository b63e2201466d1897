"""Real wheels: built, installed into a folder and resolved by an interpreter that has never seen the sources."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("hatchling", reason="builds wheels with hatchling, in this environment")

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "steelyard-model-wheeled"
version = "3.2.1"
dependencies = ["steelyard{versions}"]

[project.entry-points."steelyard.models"]
wheeled = "steelyard_model_wheeled.plugin"
"wheeled.v2" = "steelyard_model_wheeled.plugin"

[tool.hatch.build.targets.wheel]
packages = ["src/steelyard_model_wheeled"]
"""

PLUGIN = """
from steelyard.hookspecs import hookimpl

from steelyard_model_wheeled.deep.family import Wheeled


@hookimpl
def steelyard_models():
    yield Wheeled
"""

ASK = """
import json, sys
from steelyard.errors import BrokenPlugin
from steelyard.registry import default_registry
registry = default_registry()
listed = "wheeled.v2" in registry["model"], any(name.startswith("steelyard_model_wheeled") for name in sys.modules)
offer = registry.offer("model", "wheeled.v2")
try:
    answer = registry["model"]["wheeled.v2"].__module__
except BrokenPlugin as error:
    answer = error.why
print(json.dumps([*listed, offer.distribution, offer.version, offer.requires, answer]))
"""


def pip(*words):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


def build_and_install(tmp_path, versions):
    project, wheels, site = tmp_path / "project", tmp_path / "wheels", tmp_path / "site"
    package = project / "src" / "steelyard_model_wheeled"
    (package / "deep").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT.format(versions=versions))
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(PLUGIN)
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "family.py").write_text("class Wheeled:\n    keys = ('wheeled', 'wheeled.v2')\n")
    pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(wheels), str(project))
    (wheel,) = wheels.iterdir()
    pip("install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    return site


def ask(site, *words):
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    child = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_an_installed_wheel_is_listed_without_an_import_and_resolved_on_demand(tmp_path):
    """M-01, M-02, M-19, X-02: no core file changes, nested modules included."""
    site = build_and_install(tmp_path, ">=0.1,<9")
    assert json.loads(ask(site, "-c", ASK)) == [
        True,
        False,
        "steelyard-model-wheeled",
        "3.2.1",
        "<9,>=0.1",
        "steelyard_model_wheeled.deep.family",
    ]
    listing = json.loads(ask(site, "-c", "from steelyard.cli import main; main()", "plugins", "--json"))
    keys = [entry["key"] for entry in listing["plugins"] if entry["distribution"] == "steelyard-model-wheeled"]
    assert keys == ["wheeled", "wheeled.v2"]


def test_an_installed_wheel_for_another_steelyard_is_refused_unimported(tmp_path):
    """Design 4: API range, as an installer writes it."""
    site = build_and_install(tmp_path, ">=77")
    listed, was_imported, *_, why = json.loads(ask(site, "-c", ASK))
    assert (listed, was_imported) == (True, False)
    assert why.startswith("it requires steelyard>=77, this is steelyard ")
