"""How long the planning commands take, whole process, on recipes of the catalogue.

    python benchmarks/planning_speed.py [--seconds 25] [--json benchmarks/results/planning-speed.json]

check, predict and advise run for one recipe at a time, the first of each family, then the second of each, and so on;
limits and compare for one family at a time, the largest first; list once. Each command stops when its seconds are
spent: `runs` of `lines` says how far it came. `cpu_s` is what the process and its workers computed, `wall_s` what a
person waits: on a busy machine only the first says much, and `times_predict`, CPU beside predict's of the same run,
more still.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import speed_document

from dpofit.recipe.catalogue import newest, recipe_files

MAIN = "from dpofit.cli.app import main; main()"
LENGTHS = ["--prompt", "8192", "--response", "1024"]


def commands() -> dict[str, list[list[str]]]:
    """The command lines of each planning command, in the order they run in."""
    files = newest(recipe_files())
    sizes = Counter(file.family for file in files)
    families = [family for family, _ in sizes.most_common()]
    of_each = zip_longest(*([file.full_name for file in files if file.family == family] for family in families))
    recipes = [name for names in of_each for name in names if name]
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


def measure(lines: list[list[str]], seconds: float) -> dict[str, Any]:
    times: list[tuple[float, float, list[str]]] = []
    until = time.perf_counter() + seconds
    for line in lines:
        times.append((*run(line), line))
        print(f"{' '.join(line)}: {times[-1][0]:.2f} s CPU, {times[-1][1]:.2f} wall", file=sys.stderr)
        if time.perf_counter() > until:
            break
    slowest = max(times)
    return {
        "runs": len(times),
        "lines": len(lines),
        "first_cpu_s": round(times[0][0], 2),
        "first_wall_s": round(times[0][1], 2),
        "median_cpu_s": round(median(cpu_s for cpu_s, _, _ in times), 2),
        "median_wall_s": round(median(wall_s for _, wall_s, _ in times), 2),
        "slowest_cpu_s": round(slowest[0], 2),
        "slowest_wall_s": round(max(wall_s for _, wall_s, _ in times), 2),
        "first": " ".join(lines[0]),
        "slowest": " ".join(slowest[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25, help="for each command")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    run(["list"])  # compiles
    rows = {name: measure(lines, options.seconds) for name, lines in commands().items()}
    for name, row in rows.items():
        row["times_predict"] = round(row["median_cpu_s"] / rows["predict"]["median_cpu_s"], 1)
        print(
            f"{name:8} {row['runs']:2} of {row['lines']:2}  median {row['median_cpu_s']:5.2f} s CPU, "
            f"{row['median_wall_s']:5.2f} wall, {row['times_predict']:5.1f} times predict's; "
            f"slowest {row['slowest_cpu_s']:5.2f} s CPU, {row['slowest_wall_s']:5.2f} wall: {row['slowest']}"
        )
    if options.json:
        speed_document.write(options.json, commands=rows)


if __name__ == "__main__":
    main()
