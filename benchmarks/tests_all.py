"""The full matrices' result: `python benchmarks/tests_all.py JUNIT.xml... > benchmarks/results/tests-all.json`.

`bash scripts/test.sh --all` writes the first; of a test that several files name, the last counts (a rerun).
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def outcomes(paths: list[Path]) -> dict[str, str]:
    """`room.test[case]` → passed, failed or skipped."""
    found = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return found


def main() -> None:
    found = outcomes([Path(argument) for argument in sys.argv[1:]])
    suites = [ElementTree.parse(argument).getroot().find("testsuite") for argument in sys.argv[1:]]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    document = {
        "schema": "dpofit.tests-all/1",
        "dates": [suite.get("timestamp", "")[:10] for suite in suites if suite is not None],
        "commit": commit,
        "counts": {kind: list(found.values()).count(kind) for kind in ("passed", "failed", "skipped")},
        "failed": sorted(name for name, outcome in found.items() if outcome == "failed"),
        "skipped": sorted(name for name, outcome in found.items() if outcome == "skipped"),
        "passed": sorted(name for name, outcome in found.items() if outcome == "passed"),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
