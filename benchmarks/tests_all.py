"""The full matrices' result: `python benchmarks/tests_all.py JUNIT.xml... > benchmarks/results/tests-all.json`.

`bash scripts/test.sh --all` writes the first; of a test that several files name, the last counts (a rerun). Tests that
measure how far two runs are apart put it into the report (tests/longdpo/conftest.py): the largest is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURES = ("loss", "logps", "reference", "gradients")


@dataclass(frozen=True)
class Outcome:
    """Of one test: `function` is `room.module.test`, `variant` what its parameters make of it."""

    function: str
    variant: str
    outcome: str  # passed, failed, skipped
    errors: tuple[dict[str, Any], ...]  # commit, case, steps, pieces, and a number for each of MEASURES


def outcomes(paths: Iterable[Path]) -> list[Outcome]:
    found = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            name, _, variant = case.get("name", "").partition("[")
            said = [one.get("value", "") for one in case.iter("property") if one.get("name") == "errors"]
            row = Outcome(f"{case.get('classname')}.{name}", variant.rstrip("]"), outcome, tuple(map(json.loads, said)))
            found[row.function, row.variant] = row
    return list(found.values())


def names(found: Iterable[Outcome], outcome: str) -> dict[str, list[str]]:
    """Functions and their variants."""
    rows: dict[str, list[str]] = defaultdict(list)
    for one in found:
        if one.outcome == outcome:
            rows[one.function].append(one.variant)
    return {function: sorted(variants) for function, variants in sorted(rows.items())}


def worst_errors(found: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Of each function and choice of pieces: how many comparisons of how many steps, and the largest errors."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        for error in one.errors:
            groups[one.function, error["pieces"], error["steps"]].append(error)
    return [
        {"test": function, "pieces": pieces, "steps": steps, "comparisons": len(errors)}
        | {measure: max(error[measure] for error in errors) for measure in MEASURES}
        for (function, pieces, steps), errors in sorted(groups.items())
    ]


def head() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    paths = [Path(argument) for argument in sys.argv[1:]]
    found = outcomes(paths)
    dates = {suite.get("timestamp", "")[:10] for path in paths for suite in ElementTree.parse(path).iter("testsuite")}
    document = {
        "schema": "dpofit.tests-all/1",
        "dates": sorted(dates),
        "commits": sorted({error["commit"] for one in found for error in one.errors} or {head()}),
        "counts": {kind: sum(one.outcome == kind for one in found) for kind in ("passed", "failed", "skipped")},
        "errors": worst_errors(found),
        **{kind: names(found, kind) for kind in ("failed", "skipped", "passed")},
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
