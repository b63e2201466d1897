"""Print lines a file and a row of floors, against the aims of the design. It informs and never fails."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CORE = REPOSITORY / "core" / "steelyard"
sys.path.insert(0, str(REPOSITORY / "tests" / "architecture"))

from floors import BUILTIN, ROWS, TORCH_LINE, module_files, table  # noqa: E402  # the table stands beside its test

FILE_AIM = 400
AIMS = {
    "torch-free": 4000,
    "reader to kernels": 2500,
    "layers and ops": 2500,
    "cli": 900,
}
LAYERS = frozenset({"layers", "ops", "torch"})  # the second door and what stands behind it
OUTSIDE = frozenset({"testing", BUILTIN})  # counted, without an aim


def group_of(module: str) -> str:
    """Return the group that a module of core counts in."""
    floors = table()
    entry = floors.entry(module) or module.partition(".")[0]
    if entry in OUTSIDE or entry == "cli":
        return entry
    if entry in LAYERS:
        return "layers and ops"
    return "torch-free" if entry in floors.below_line() or entry == "__init__" else "reader to kernels"


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text().splitlines())


def report() -> list[str]:
    """Return the printed report, a line each."""
    sizes = {module: lines_of(path) for module, path in module_files(CORE).items()}
    floors = table()
    text: list[str] = []
    number = 0
    for row in ROWS:
        if isinstance(row, str):
            text.append(f"        -- {TORCH_LINE} --")
            continue
        inside = {module: size for module, size in sizes.items() if floors.entry(module) in row}
        names = "  ".join(f"{module} {size}" for module, size in inside.items()) or "(nothing yet)"
        text.append(f"{number:5}  {sum(inside.values()):5}  {names}")
        number += 1
    text.append("")
    groups: dict[str, int] = dict.fromkeys(AIMS, 0)
    for module, size in sizes.items():
        groups[group_of(module)] = groups.get(group_of(module), 0) + size
    text.extend(f"{size:6} {against(size, AIMS.get(group))}  {group}" for group, size in groups.items())
    for folder in sorted(REPOSITORY.glob("plugins/*/src")):
        text.append(f"{sum(map(lines_of, folder.rglob('*.py'))):6} {against(0, None)}  {folder.parent.name}")
    shipped = [*CORE.rglob("*.py"), *REPOSITORY.glob("plugins/*/src/**/*.py")]
    long = sorted(((lines_of(path), path) for path in shipped), reverse=True)
    text.append("")
    text.extend(
        f"{size:6} {against(size, FILE_AIM)}  {path.relative_to(REPOSITORY)}" for size, path in long if size > FILE_AIM
    )
    if long and long[0][0] <= FILE_AIM:
        text.append(f"no file is longer than {FILE_AIM} lines")
    return text


def against(size: int, aim: int | None) -> str:
    """Return an aim as text, marked where the size is over it."""
    if aim is None:
        return " " * 16
    return f"of about {aim:5} {'!' if size > aim else ' '}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(report()) + "\n")
