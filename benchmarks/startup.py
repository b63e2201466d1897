"""How long steelyard takes to start, beside a bare typer and rich program that prints the same table.

Both run as fresh processes on the same folder of synthetic distributions, in turns and in the same run, so that
a ratio does not depend on how fast or how busy the machine is. The bare program is typer as it comes, with a table
of as many rows and columns; it looks at no metadata.

Run:
    python benchmarks/startup.py [--distributions 300] [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from steelyard.testing.trees import write_distribution

BARE = """
import sys, typer
rows = int(sys.argv.pop())
app = typer.Typer()

@app.command()
def show():
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    table = Table("kind", "key", "distribution", "version", "module", "state", box=SIMPLE_HEAD)
    for number in range(rows):
        table.add_row("model", f"model-{number:03d}", f"steelyard-model-{number:03d}", "1.0", f"steelyard_model_{number:03d}.plugin", "offered")
    console = Console(markup=False, highlight=False)
    console.width = 240
    console.print(table)

app()
"""
PLUGINS = "from steelyard.cli import main; main()"

IMPORT_LIMIT_MS, IMPORT_AIM_MS = 60, 30
RATIO_LIMIT, RATIO_AIM = 1.3, 1.1


def write_tree(root: Path, distributions: int, offering: int) -> None:
    """Write distributions with a METADATA of a usual length, of which the first ones offer a model each."""
    for number in range(distributions):
        name = f"steelyard-model-{number:03d}" if number < offering else f"library-{number:03d}"
        module = f"{name.replace('-', '_')}.plugin"
        group = "steelyard.models" if number < offering else "console_scripts"
        requires = ["steelyard>=0.1,<0.2", "numpy"] if number < offering else ["numpy"]
        info = write_distribution(root, name, entry_points={group: {f"model-{number:03d}": module}}, requires=requires)
        with (info / "METADATA").open("a", encoding="utf-8") as file:
            file.write("A line of the long description that an index shows.\n" * 100)


def run(root: Path, *words: str) -> float:
    """Return the wall time of one fresh interpreter in milliseconds."""
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, *words], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path}
    )
    return (time.perf_counter() - begin) * 1e3


def in_turns(root: Path, programs: dict[str, tuple[str, ...]], rounds: int) -> dict[str, list[float]]:
    """Run every program once a round; the first round, which writes and warms caches, is not counted."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name, words in programs.items():
            taken = run(root, *words)
            if turn:
                times[name].append(taken)
    return times


def ratio(times: dict[str, list[float]], name: str, to: str) -> float:
    """Return the median of the ratios within a round, which drifts of the machine's speed hardly touch."""
    return median(a / b for a, b in zip(times[name], times[to], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--distributions", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    print(f"$ python {' '.join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])}")
    print(f"python {platform.python_version()}, {os.cpu_count()} CPUs, medians of {asked.rounds} rounds")
    for offering in (asked.distributions, asked.distributions // 10):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            write_tree(root, asked.distributions, offering)
            programs = {
                "python -c pass": ("-c", "pass"),
                "import steelyard": ("-c", "import steelyard"),
                "bare typer + rich": ("-c", BARE, str(offering)),
                "steelyard plugins": ("-c", PLUGINS, "plugins"),
            }
            times = in_turns(root, programs, asked.rounds)
        print(f"\n{asked.distributions} distributions, {offering} of them offer a plugin")
        for name, taken in times.items():
            print(f"  {name:<20} {median(taken):7.1f} ms   (fastest {min(taken):.1f}, slowest {max(taken):.1f})")
        added = median(times["import steelyard"]) - median(times["python -c pass"])
        print(f"  import steelyard adds {added:.1f} ms (limit {IMPORT_LIMIT_MS}, aim {IMPORT_AIM_MS})")
        share = ratio(times, "steelyard plugins", "bare typer + rich")
        print(f"  steelyard plugins takes {share:.2f}x the bare program (limit {RATIO_LIMIT}, aim {RATIO_AIM})")


if __name__ == "__main__":
    main()
