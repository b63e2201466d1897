"""No algorithm stands twice: no long run of equal lines in core and the plugins' packages."""

import ast
from collections import defaultdict

import pytest
from house_rules import shipped

RUN = 10  # lines of code

# Both places of a pair that may stay, as the checker prints them without line numbers, and why.
ALLOWED: dict[str, str] = {}


def code_lines(text):
    """Return (number, stripped line) of each line of code: no blank line, comment, import or docstring."""
    skipped = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in lines if line and line[0] != "#" and number not in skipped]


def repeated(files, run=RUN):
    """Return a line for each longest run of equal lines that stands in two places, which do not overlap."""
    code = {name: code_lines(text) for name, text in files.items()}
    places = defaultdict(list)
    for name, lines in code.items():
        for at in range(len(lines) - run + 1):
            places[tuple(line for _, line in lines[at : at + run])].append((name, at))
    found = []
    for same in places.values():
        for index, (name, at) in enumerate(same):
            for other, there in same[index + 1 :]:
                if name == other and there - at < run:
                    continue
                if at and there and code[name][at - 1][1] == code[other][there - 1][1]:
                    continue  # told where the run begins
                length = 0
                rows = zip(code[name][at:], code[other][there:], strict=False)
                while (pair := next(rows, None)) is not None and pair[0][1] == pair[1][1]:
                    length += 1
                found.append(f"{name}:{code[name][at][0]} and {other}:{code[other][there][0]}: {length} equal lines")
    return sorted(found)


def without_numbers(line):
    """Return the two files of a finding."""
    places, _, _ = line.rpartition(": ")
    return " and ".join(place.rpartition(":")[0] for place in places.split(" and "))


def test_no_run_of_ten_lines_stands_twice():
    """X-12: a copy of an algorithm drifts from the other."""
    found = [line for line in repeated(shipped()) if without_numbers(line) not in ALLOWED]
    assert not found, "\n".join(["", *found])


def test_every_allowed_pair_is_still_there():
    assert set(ALLOWED) <= {without_numbers(line) for line in repeated(shipped())}


BODY = [f"x{number} = f(x{number - 1}, {number})" for number in range(1, 13)]


def module(lines, *, indent=0, between=""):
    """Return a module with a function of these lines."""
    inner = [f"{' ' * indent}    {line}{between}" for line in lines]
    return "\n".join([f"{' ' * indent}def g(x0):", *inner]) + "\n"


@pytest.mark.parametrize(
    "copy",
    [
        module(BODY),
        "class A:\n" + module(BODY, indent=4),
        module(BODY, between="\n\n    # a comment of its own"),
        '"""Another docstring."""\n\nimport os\n\n' + module(BODY),
        module(["y = 1", *BODY, "return y"]),
    ],
    ids=["as it is", "deeper", "comments", "other head", "inside"],
)
def test_a_copy_is_found(copy):
    (line,) = repeated({"a.py": "y = 2\n" + module(BODY), "b.py": copy})
    assert line.startswith("a.py:")
    assert int(line.split()[-3]) >= len(BODY)
    assert without_numbers(line) == "a.py and b.py"


def test_a_copy_inside_one_file_is_found_once():
    text = module(BODY) + "z = 3\n" + module(BODY)
    assert repeated({"a.py": text}) == ["a.py:1 and a.py:15: 13 equal lines"]


@pytest.mark.parametrize(
    "other",
    [
        module(BODY[:8]),
        module([*BODY[:6], "y = 1", *BODY[6:]]),
        "\n".join(f"import m{number}" for number in range(20)),
        '"""' + "\n".join(BODY) + '\n"""\n',
    ],
    ids=["short", "a line between", "imports", "docstring"],
)
def test_what_is_no_copy_is_let_through(other):
    head = "\n".join(f"import m{number}" for number in range(20))
    assert repeated({"a.py": head + "\n" + module(BODY), "b.py": other}) == []
