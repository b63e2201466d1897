"""What the tests themselves must be: run without an accelerator, try what must fail, cover the riskiest parts."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from floors import REPOSITORY
from house_rules import suite_files

GPU = "gpu"  # name of the marker, and of the folders whose tests carry it
QUERIES = {"is_available", "is_initialized"}  # of torch.cuda: answer anywhere
NEGATIVE = re.compile(
    r"pytest\.raises\(|\berror_texts\(|\.errors\b|\(\w+\.kind, \w+\.text\)"
)  # the last: of a rank process
TESTING = REPOSITORY / "docs" / "testing.md"
RISKIEST = "## The riskiest parts"
RISKS = (  # what must have a row
    "experts over ranks",
    "order of gate and up",
    "scale offsets and grids",
    "key/value heads",
    "fused tensors",
    "every element exactly once",
    "registry",
    "a failing rank",
    "headers",
    "tied weights",
)


def script():
    """Return scripts/requirements.py as a module."""
    spec = importlib.util.spec_from_file_location("requirements_of_suite", REPOSITORY / "scripts" / "requirements.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def is_on_gpu(name):
    return GPU in Path(name).parts[:-1]


def modules_of_tests(files):
    """Return the text of those files that hold tests."""
    return {name: text for name, text in files.items() if Path(name).name.startswith("test_")}


# --- accelerators (X-01) ---


def marks(text):
    """Return marker and reason of each mark that a module puts on all of its tests."""
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                every = value.elts if isinstance(value, ast.List) else [value]
                return dict(map(_mark, every))
    return {}


def _mark(node):
    match node:
        case ast.Call(func=ast.Attribute(attr=name), keywords=words):
            literals = {word.arg: word.value.value for word in words if isinstance(word.value, ast.Constant)}
            return name, literals.get("reason", "")
        case ast.Attribute(attr=name):
            return name, ""
    return ast.unparse(node), ""


def carries(text, marker):
    """Tell whether a module puts a marker anywhere."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=name):
                if name == marker:
                    return True
    return False


def needs_accelerator(text):
    """Find uses of torch.cuda that are no query and no patch, and moves to an accelerator."""
    tree = ast.parse(text)
    patched = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr"), args=[owner, *_]):
                patched.add(owner)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="cuda") as owner, attr=name):
                patched.add(owner)
                if name not in QUERIES and node not in patched:
                    yield f"{node.lineno} torch.cuda.{name}"
            case ast.Call(func=ast.Attribute(attr="cuda")):
                yield f"{node.lineno} .cuda()"
            case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Constant(value=str(place)), *_]) if _is_gpu(place):
                yield f"{node.lineno} .to({place!r})"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch")), keywords=words):
                places = [word.value for word in words if word.arg == "device"]
                if any(isinstance(place, ast.Constant) and _is_gpu(str(place.value)) for place in places):
                    yield f"{node.lineno} torch makes a tensor on an accelerator"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda") if node not in patched:
                yield f"{node.lineno} torch.cuda"


def _is_gpu(place):
    return place.partition(":")[0] == "cuda"


def test_tests_of_accelerators_are_marked_and_skip_with_a_reason():
    """X-01: and no other test carries their marker."""
    for name, text in modules_of_tests(suite_files()).items():
        if is_on_gpu(name):
            found = marks(text)
            assert GPU in found, f"{name} has no pytestmark {GPU}"
            assert len(found.get("skipif", "")) > len(GPU), f"{name} does not skip with a reason"
        else:
            assert not carries(text, GPU), f"{name} belongs into a folder named {GPU}"


def test_no_other_test_needs_an_accelerator():
    """X-01: by source, workers and helpers included."""
    files = {name: text for name, text in suite_files().items() if not is_on_gpu(name)}
    found = [f"{name}:{line}" for name, text in files.items() for line in needs_accelerator(text)]
    assert not found, "\n".join(["", *found])


def test_nine_tests_of_ten_run_on_a_plain_machine():
    """X-01: of the tests without accelerators every function counts once, however often it runs."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", GPU, "tests/gpu"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    on_gpu = sum("::" in line for line in done.stdout.splitlines())
    assert on_gpu > 0
    tests_of = script().tests_of
    plain = sum(
        len(list(tests_of(text))) for name, text in modules_of_tests(suite_files()).items() if not is_on_gpu(name)
    )
    assert plain / (plain + on_gpu) >= 0.9


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.cuda.synchronize()", ["1 torch.cuda.synchronize"]),
        ("x.cuda()", ["1 .cuda()"]),
        ("x.to('cuda:1')", ["1 .to('cuda:1')"]),
        ("torch.zeros(2, device='cuda')", ["1 torch makes a tensor on an accelerator"]),
        ("cuda = torch.cuda", ["1 torch.cuda"]),
        ("torch.cuda.is_available()", []),
        ("monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)", []),
        ("torch.device('cuda', 3)", []),
        ("plan(device='cuda')", []),
        ("x.to('cpu')", []),
    ],
)
def test_the_check_of_accelerators_bites(code, found):
    assert list(needs_accelerator(code)) == found


def test_marks_are_read_with_their_reasons():
    text = "pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not f(), reason='there is none')]"
    assert marks(text) == {"gpu": "", "skipif": "there is none"}
    assert marks("pytestmark = pytest.mark.gpu") == {"gpu": ""}
    assert marks("x = 1") == {}
    assert carries("@pytest.mark.gpu\ndef test_a(): ...", "gpu")
    assert not carries("'pytest.mark.gpu'", "gpu")


# --- what must fail (X-06) ---


def untried(tests, texts):
    """Return the ids of P and E none of whose test modules has a negative assertion."""
    found = []
    for requirement, names in sorted(tests.items()):
        modules = {name.partition("::")[0] for name in names}
        if requirement[0] in "PE" and not any(NEGATIVE.search(texts[module]) for module in modules):
            found.append(f"{requirement} has no negative test in {', '.join(sorted(modules))}")
    return found


def test_every_rule_of_cuts_and_experts_is_tried_with_what_must_fail():
    """X-06: a module that names the rule has an assertion about an error."""
    tests = script().named(REPOSITORY)
    texts = {name.partition("::")[0]: "" for names in tests.values() for name in names}
    found = untried(tests, {name: (REPOSITORY / name).read_text() for name in texts})
    assert sum(requirement[0] in "PE" for requirement in tests) > 30
    assert not found, "\n".join(["", *found])


def test_a_rule_that_is_only_tried_with_what_works_is_named():
    tests = {"P-01": ["a.py::test_a"], "E-01": ["a.py::test_a", "b.py::test_b"], "L-01": ["a.py::test_a"]}
    texts = {"a.py": "assert f() == 1", "b.py": "with pytest.raises(ValueError):\n    f()"}
    assert untried(tests, texts) == ["P-01 has no negative test in a.py"]


# --- the riskiest parts (X-23) ---


def rows_of_risks(page):
    """Return part and test ids of each row of the table."""
    _, _, section = page.partition(f"{RISKIEST}\n")
    lines = section.partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {part: re.findall(r"`([^`]+)`", tests) for part, tests in cells[2:]}


def absent(rows, root):
    """Return what is wrong with a table of risks: parts without a test, and tests that do not exist."""
    tests_of = script().tests_of
    found = [f"{part}: no test" for part, names in rows.items() if not names]
    for part, names in rows.items():
        for name in names:
            path, _, test = name.partition("::")
            file = root / path
            if not file.is_file() or test not in {known for known, _ in tests_of(file.read_text())}:
                found.append(f"{part}: there is no {name}")
    return found


def test_every_risk_is_mapped_to_tests_that_exist():
    """X-23: by the table in docs/testing.md."""
    rows = rows_of_risks(TESTING.read_text())
    missing = [risk for risk in RISKS if not any(part.startswith(risk) for part in rows)]
    assert not missing, f"docs/testing.md has no row for {', '.join(missing)}"
    found = absent(rows, REPOSITORY)
    assert not found, "\n".join(["", *found])


def test_a_test_that_was_renamed_is_missed(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_one():\n    pass\n")
    page = (
        f"{RISKIEST}\n\nText.\n\n| part | tests |\n|---|---|\n| a | `test_a.py::test_one`, `test_a.py::test_two` |\n"
        "| b | `test_b.py::test_one` |\n| c | none |\n\n## Next\n\n| d | `test_d.py::test_d` |\n"
    )
    rows = rows_of_risks(page)
    assert list(rows) == ["a", "b", "c"]
    assert absent(rows, tmp_path) == [
        "c: no test",
        "a: there is no test_a.py::test_two",
        "b: there is no test_b.py::test_one",
    ]
