"""The wheels that we publish: they hold every file, and work beside what they declare and nothing else.

Wheels are built here and installed into a folder of their own. A child sees that folder, the standard library and
links to those installed packages that the wheels' metadata asks for: neither this checkout nor anything undeclared.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from support.minilm import minilm

pytest.importorskip("hatchling", reason="builds wheels with hatchling, in this environment")

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = {
    "steelyard": (REPOSITORY, REPOSITORY / "core"),
    "steelyard_model_bert": (REPOSITORY / "plugins" / "model_bert", REPOSITORY / "plugins" / "model_bert" / "src"),
}

FORWARD = """
import json, sys
from pathlib import Path
import steelyard, steelyard_model_bert, torch
model = steelyard.load(sys.argv[1], device="cpu", dtype="float32")
with torch.inference_mode():
    output = model.module(torch.tensor(json.loads(sys.argv[2])))
print(json.dumps({
    "files": [steelyard.__file__, steelyard_model_bert.__file__],
    "plugins": model.report.plugins,
    "undeclared": sorted({"transformers", "safetensors", "hypothesis"} & set(sys.modules)),
    "hidden": output.last_hidden_state.tolist(),
    "pooled": output.pooler_output.tolist(),
}))
"""


def build(project, out):
    """Build a project's wheel as its backend does, into a folder outside of it."""
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(project)).build(directory=str(out), versions=["standard"])
    return Path(wheel)


def files_below(folder):
    """Return what a source tree holds, without what tools leave in it."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = (path for path in found if not any(part == "__pycache__" or part.startswith(".") for part in path.parts))
    return {path.as_posix() for path in kept}


def files_in(wheel):
    """Return what a wheel installs, without its metadata."""
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheels")
    return {name: build(project, out) for name, (project, _) in SOURCES.items()}


@pytest.fixture(scope="module")
def site(wheels, tmp_path_factory):
    """Return a folder with both wheels installed."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command += ["--no-deps", "--no-index", "--no-compile", "--target", str(target), *map(str, wheels.values())]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    return target


def declared(name, extras, site, found):
    """Collect the distributions that one needs as its metadata says, itself included."""
    try:
        made = next(PathDistribution.discover(name=name, path=[str(site)]), None) or distribution(name)
    except PackageNotFoundError:
        return  # of a requirement for other machines; a child that needs it says so
    for extra in extras or ("",):
        if (made.name, extra) in found:
            continue
        found[made.name, extra] = made
        for line in made.requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                declared(needed.name, needed.extras, site, found)


def linked(names, site, folder):
    """Fill a folder with links to what distributions need besides the wheels, and return the names that it has."""
    found = {}
    for name, extras in names.items():
        declared(name, extras, site, found)
    others = {made.name: made for made in found.values() if not made.name.startswith("steelyard")}
    for made in others.values():
        for top in {Path(file).parts[0] for file in made.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(made.locate_file(top))
    return SimpleNamespace(path=os.pathsep.join([str(site), str(folder)]), names=set(others))


@pytest.fixture(scope="module")
def with_torch(site, tmp_path_factory):
    return linked({"steelyard-model-bert": ()}, site, tmp_path_factory.mktemp("declared"))


@pytest.fixture(scope="module")
def without_torch(site, tmp_path_factory):
    return linked({"steelyard": ()}, site, tmp_path_factory.mktemp("bare"))


def run(installed, *words):
    """Run Python where nothing is installed but that: -S leaves this environment's packages and checkouts out."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STEELYARD"))}
    return subprocess.run(
        [sys.executable, "-S", *words],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": installed.path},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_wheel_holds_every_file_of_its_package_and_no_other(wheels, name):
    """M-20: modules and data at any depth, py.typed included."""
    _, source = SOURCES[name]
    expected = files_below(source)
    assert f"{name}/py.typed" in expected
    assert files_in(wheels[name]) == expected


@pytest.mark.parametrize(
    ("excluded", "missing"),
    [("", set()), ("*.json", {"data/deep/table.json"}), ("deep", {"data/deep/table.json", "data/deep/__init__.py"})],
)
def test_a_nested_file_that_a_wheel_leaves_out_is_seen(tmp_path, excluded, missing):
    """M-20: the check above bites; and the plugin's own build takes data of any depth along."""
    project, source = SOURCES["steelyard_model_bert"]
    copy = shutil.copytree(project, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__", "tests", ".*"))
    deep = copy / "src" / "steelyard_model_bert" / "data" / "deep"
    deep.mkdir(parents=True)
    (deep / "table.json").write_text("{}")
    (deep / "__init__.py").write_text("")
    if excluded:
        with (copy / "pyproject.toml").open("a") as file:
            file.write(f'exclude = ["{excluded}"]\n')
    left_out = files_below(copy / source.name) - files_in(build(copy, tmp_path / "out"))
    assert left_out == {f"steelyard_model_bert/{name}" for name in missing}


def test_the_installed_wheels_run_a_bert_with_what_they_declare_alone(site, with_torch, tmp_path):
    """M-19: one forward of a small BERT equals transformers', in a process that has only declared packages."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2}
    reference = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    reference.save_pretrained(tmp_path)
    ids = [[1, 5, 9, 2], [1, 7, 33, 2]]
    with torch.inference_mode():
        wanted = reference(torch.tensor(ids))
    assert {"torch", "numpy", "tokenizers", "pydantic", "pluggy", "typer"} <= with_torch.names
    assert not {"transformers", "safetensors", "hypothesis", "pytest"} & with_torch.names
    done = run(with_torch, "-c", FORWARD, str(tmp_path), json.dumps(ids))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [Path(file).parents[1] for file in found["files"]] == [site, site]
    assert set(found["plugins"]) == {"steelyard", "steelyard-model-bert"}
    assert found["undeclared"] == []
    near = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(torch.tensor(found["hidden"]), wanted.last_hidden_state, **near)
    torch.testing.assert_close(torch.tensor(found["pooled"]), wanted.pooler_output, **near)


@pytest.mark.parametrize(("asked", "target"), [((), "cpu"), (("--target", "sm_90"), "sm_90")], ids=["here", "sm_90"])
def test_a_plan_of_a_real_model_is_made_where_torch_is_not_installed(site, without_torch, asked, target):
    """M-19, L-30: a plan, for this machine or another, needs neither torch nor numpy; what is missing is a note."""
    assert not {"torch", "numpy", "tokenizers"} & without_torch.names
    absent = run(without_torch, "-c", "import steelyard; print(steelyard.__file__)\nimport torch")
    assert Path(absent.stdout.strip()).parents[1] == site
    assert "ModuleNotFoundError: No module named 'torch'" in absent.stderr
    done = run(without_torch, "-m", "steelyard.cli", "plan", str(minilm()), "--tp", "2", *asked, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    made = json.loads(done.stdout)
    assert made["ok"]
    assert made["tensors"] == 104
    assert [finding["text"] for finding in made["findings"]] == [
        f"kernel backend torch serves {target} and was chosen for it, but cannot run here: torch is not installed; "
        "pip install 'steelyard[torch]'"
    ]
    size = (minilm() / "model.safetensors").stat().st_size
    assert all(size / 2 < rank["final"] < size for rank in made["ranks"])
