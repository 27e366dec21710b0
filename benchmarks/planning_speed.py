"""How long the planning commands take, whole process, on every recipe of the catalogue.

    python benchmarks/planning_speed.py [--json benchmarks/results/planning-speed.json]

predict, check and advise run once for each recipe, limits and compare for each family, list once. `cpu_s` is what the
process and its workers computed, `wall_s` what a person waits: on a busy machine only the first says much.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import speed_document

from dpofit.recipe.catalogue import newest, recipe_files

MAIN = "from dpofit.cli.app import main; main()"
LENGTHS = ["--prompt", "8192", "--response", "1024"]


def commands() -> dict[str, list[list[str]]]:
    """The command lines of each planning command."""
    files = newest(recipe_files())
    recipes, families = [file.full_name for file in files], dict.fromkeys(file.family for file in files)
    return {
        "list": [["list"]],
        "check": [["check", name] for name in recipes],
        "predict": [["predict", name, *LENGTHS] for name in recipes],
        "advise": [["advise", name, *LENGTHS] for name in recipes],
        "limits": [["limits", family] for family in families],
        "compare": [["compare", family, *LENGTHS] for family in families],
    }


def run(arguments: list[str]) -> tuple[float, float]:
    """CPU and wall seconds of one process; exit 1 is an answer, 2 a mistake of ours."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MAIN, *arguments, "--json"], capture_output=True, text=True)
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def measure(lines: list[list[str]]) -> dict[str, object]:
    times = [(*run(line), line) for line in lines]
    slowest = max(times)
    return {
        "runs": len(times),
        "median_cpu_s": round(median(cpu_s for cpu_s, _, _ in times), 2),
        "median_wall_s": round(median(wall_s for _, wall_s, _ in times), 2),
        "slowest_cpu_s": round(slowest[0], 2),
        "slowest_wall_s": round(max(wall_s for _, wall_s, _ in times), 2),
        "slowest": " ".join(slowest[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run(["list"])  # compiles
    rows = {name: measure(lines) for name, lines in commands().items()}
    for name, row in rows.items():
        print(
            f"{name:8} {row['runs']:3} runs  median {row['median_cpu_s']:5.2f} s CPU, {row['median_wall_s']:5.2f} wall"
            f"  slowest {row['slowest_cpu_s']:5.2f} s CPU, {row['slowest_wall_s']:5.2f} wall: {row['slowest']}"
        )
    if options.json:
        speed_document.write(options.json, commands=rows)


if __name__ == "__main__":
    main()
