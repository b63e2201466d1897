import json
import os
import signal
import subprocess
import sys
import time

import pytest

from steelyard.discovery import Catalog, core_version
from steelyard.testing.trees import write_distribution

GOOD = """
    from steelyard.hookspecs import hookimpl


    class Good:
        keys = ("good", "same")


    @hookimpl
    def steelyard_models():
        return [Good]
"""

INSTALLED = {offer.distribution for offer in Catalog.from_environment(block=()).offers}
"""What this environment offers, core's own included: blocked here, so that a test sees its tree alone."""

THREE = {"raises": "raise RuntimeError('no')\n", "exits": "raise SystemExit(3)\n", "typo": "def broken(:\n"}


@pytest.fixture
def root(tmp_path):
    write_distribution(
        tmp_path, "good", entry_points={"steelyard.models": {"good": "tree_good"}}, modules={"tree_good.py": GOOD}
    )
    return tmp_path


def steelyard(*words, path=None, block=""):
    """Run the command line with the trees of a test alone."""
    found = {**os.environ, "STEELYARD_BLOCK": ",".join([*INSTALLED, block]), "COLUMNS": "200"}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path or ""), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-c", "from steelyard.cli import main; main()", *words],
        capture_output=True,
        text=True,
        env=found,
        check=False,
    )


def listed(*words, path, **options):
    child = steelyard(*words, "--json", path=path, **options)
    entries = json.loads(child.stdout)["plugins"]
    return child.returncode, {
        (e["distribution"], e["key"]): (e["state"], e["error"]) for e in entries if e["distribution"] not in INSTALLED
    }


def test_plugins_lists_a_broken_plugin_as_offered_since_it_imports_none(root):
    """M-01, R174."""
    write_distribution(
        root, "bad", "3.0", entry_points={"steelyard.models": {"bad": "tree_bad"}}, modules={"tree_bad.py": "1/0\n"}
    )
    child = steelyard("plugins", path=root)
    assert child.returncode == 0
    assert child.stderr == ""
    rows = [line.split() for line in child.stdout.splitlines() if line.startswith("  model")]
    assert [row for row in rows if row[-1] != "blocked"] == [
        ["model", "bad", "bad", "3.0", "tree_bad", "offered"],
        ["model", "good", "good", "1.0", "tree_good", "offered"],
    ]


def test_plugins_shows_blocked_ambiguous_and_broken_entries(root):
    """M-07, M-15."""
    write_distribution(root, "one", entry_points={"steelyard.models": {"same": "one"}})
    write_distribution(root, "two", entry_points={"steelyard.models": {"same": "two"}})
    write_distribution(root, "off", entry_points={"steelyard.models": {"off": "off"}})
    write_distribution(root, "wrong", entry_points={"steelyard.models": {"wrong": "a:b"}})
    code, entries = listed("plugins", path=root, block="off,absent")
    assert code == 0
    assert entries == {
        ("good", "good"): ("offered", ""),
        ("one", "same"): ("ambiguous", ""),
        ("two", "same"): ("ambiguous", ""),
        ("off", "off"): ("blocked", "dropped by STEELYARD_BLOCK"),
        ("wrong", "wrong"): ("broken", "'a:b' is not the dotted name of a module, which 'wrong' needs"),
    }
    child = steelyard("plugins", path=root, block="off,absent")
    assert "STEELYARD_BLOCK names absent, which offers nothing here" in child.stdout.splitlines()


@pytest.mark.parametrize("words", [["plugins"], ["plugins", "--json"], ["--help"], ["--version"], ["doctor", "--help"]])
def test_light_commands_import_neither_pydantic_nor_pluggy_nor_torch_nor_a_plugin(root, words):
    """Design 4: Configuration; M-02."""
    code = (
        "import sys, atexit\n"
        "heavy = ('pydantic', 'pluggy', 'torch', 'tree_good')\n"
        "atexit.register(lambda: print([n for n in heavy if n in sys.modules], file=sys.stderr))\n"
        "from steelyard.cli import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, check=False
    )
    assert (child.returncode, child.stderr) == (0, "[]\n")


def test_help_imports_no_command():
    """Design 5: --help imports nothing heavy."""
    code = (
        "import sys, atexit\n"
        "import steelyard.cli as cli\n"
        "modules = {row.module for row in cli.COMMANDS.values()}\n"
        "atexit.register(lambda: print(sorted(modules & set(sys.modules)), file=sys.stderr))\n"
        "cli.main()"
    )
    child = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "[]\n")


def test_doctor_is_content_with_what_works(root):
    """R172."""
    assert listed("doctor", path=root) == (0, {("good", "good"): ("ok", "")})


def test_doctor_shows_all_three_errors_and_the_others_as_working(root):
    """R174."""
    for name, source in THREE.items():
        write_distribution(
            root,
            name,
            entry_points={"steelyard.models": {name: f"tree_{name}"}},
            modules={f"tree_{name}.py": source},
        )
    code, entries = listed("doctor", path=root)
    assert code == 1
    assert entries == {
        ("good", "good"): ("ok", ""),
        ("raises", "raises"): ("broken", "RuntimeError: no"),
        ("exits", "exits"): ("broken", "SystemExit: 3"),
        ("typo", "typo"): ("broken", "SyntaxError: invalid syntax (tree_typo.py, line 1)"),
    }
    child = steelyard("doctor", path=root)
    assert child.returncode == 1
    assert "broken: model 'exits' of exits 1.0: SystemExit: 3" in child.stdout.splitlines()


def test_doctor_resolves_each_offer_of_an_ambiguous_key(root):
    """M-07."""
    for name in ("one", "two"):
        write_distribution(
            root,
            name,
            entry_points={"steelyard.models": {"same": f"tree_{name}"}},
            modules={f"tree_{name}.py": GOOD if name == "one" else "1/0\n"},
        )
    code, entries = listed("doctor", path=root)
    assert code == 1
    assert entries[("one", "same")] == ("ambiguous", "")
    assert entries[("two", "same")] == ("broken", "ZeroDivisionError: division by zero")


def test_version_is_that_of_the_distribution():
    """Design 5."""
    child = steelyard("--version")
    assert (child.returncode, child.stdout, child.stderr) == (0, f"steelyard {core_version()}\n", "")


@pytest.mark.parametrize(
    "words",
    [["nothing-like-it"], ["plugins", "--jason"], ["plugins", "extra"], []],
    ids=["unknown command", "unknown option", "extra word", "no words"],
)
def test_wrong_usage_exits_with_2(words):
    """Design 5: exit codes."""
    assert steelyard(*words).returncode == 2


def run_patched(body, signature="", words=()):
    code = (
        "import sys, types, steelyard.cli as cli\n"
        "from steelyard.errors import ConfigError\n"
        f"def fails({signature}) -> None:\n    {body}\n"
        "module = types.ModuleType('tree_command'); module.fails = fails; sys.modules['tree_command'] = module\n"
        "cli.COMMANDS['fails'] = cli.Row('tree_command', 'fails', 'Fail.')\n"
        "cli.app.command('fails')(cli.stub)\n"
        "cli.main()\n"
    )
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code, "fails", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_an_error_for_the_user_is_one_block_without_a_traceback():
    """Design 5: exit codes."""
    child = run_patched("raise ConfigError('asked this, found that')")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (1, "", "error: asked this, found that\n")


def test_an_error_of_our_own_keeps_its_traceback():
    """X-09: errors are narrow."""
    child = run_patched("raise ZeroDivisionError('ours')")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.startswith("Traceback")


def test_ctrl_c_exits_with_130_and_no_traceback():
    """Design 5: Ctrl-C leaves nothing behind."""
    child = run_patched("import time; print('running'); time.sleep(60)")
    assert child.stdout.readline() == "running\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("signature", "words", "expected"),
    [
        ("path: str, tp: int = 2, deep: bool = False, name: str = ''", ["x"], "['x', 2, False, '']"),
        ("path: str, tp: int = 2", ["x", "--tp", "4"], "['x', 4]"),
        ("paths: list[str]", ["x", "y"], "[['x', 'y']]"),
    ],
    ids=["texts and defaults", "a number", "many"],
)
def test_no_command_needs_pydantic_to_read_its_words(signature, words, expected):
    """Design 4: inspect PATH imports no pydantic; typer from 0.29 on would."""
    names = [part.split(":")[0].strip() for part in signature.split(",") if ":" in part]
    child = run_patched(f"print([{', '.join(names)}], 'pydantic' in sys.modules)", signature, words)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, f"{expected} False\n", "")


def test_a_value_of_the_wrong_type_is_wrong_usage():
    """Design 5: exit codes."""
    child = run_patched("pass", "tp: int = 1", ["--tp", "many"])
    child.communicate(timeout=60)
    assert child.returncode == 2
