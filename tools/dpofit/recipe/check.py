"""`dpofit check`: every finding about a recipe, worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpofit.findings import Finding
from dpofit.hardware.cluster import Gpu
from dpofit.recipe.advice import settings_advice
from dpofit.recipe.kinds import KINDS
from dpofit.recipe.load import read_recipe
from dpofit.recipe.surroundings import disk_advice, launch_advice

_ORDER = {"error": 0, "warning": 1, "info": 2}


def check_recipe(
    reference: str,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    gpu: Gpu | None = None,
) -> tuple[Finding, ...]:
    """Findings of a recipe. BadInput only when there is no file, or no syntax, to check.

    Advice needs values of the right types: it comes once what `kinds.refuses` names is corrected.
    """
    read = read_recipe(reference, overrides, environment)
    issues = list(read.issues)
    if not any(issue.kind.refuses for issue in issues):
        issues += [*settings_advice(read.run), *launch_advice(read, gpu), *disk_advice(read.run)]
    return tuple(issue.finding() for issue in sorted(issues, key=lambda issue: _ORDER[issue.kind.severity]))


def check_exit_code(findings: Sequence[Finding]) -> int:
    """2 when the file is bad input, 1 when a run would fail, else 0."""
    if any(KINDS[finding.id].refuses for finding in findings):
        return 2
    return 1 if any(finding.severity == "error" for finding in findings) else 0
