"""Rows of `limits` and `compare`: each recipe's job with what was worked out for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpofit.cli.job_options import DEFAULT_RESPONSE, PlannedJob
from dpofit.memory.job import Lengths
from dpofit.memory.limits import Limit, longest_prompt
from dpofit.memory.predict import Prediction, predict
from dpofit.memory.speed import StepTime, step_time


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One recipe's longest prompt."""

    planned: PlannedJob
    limit: Limit
    response_tokens: int


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One recipe's prediction at the job's lengths, its longest prompt, and its step time there (an estimate)."""

    planned: PlannedJob
    prediction: Prediction
    limit: LimitRow
    time: StepTime


def short_names(planned: Sequence[PlannedJob]) -> list[str]:
    """Recipe names without the family when all belong to one, so that tables stay narrow."""
    names = [plan.job.recipe.name for plan in planned]
    families = {name.rpartition("/")[0] for name in names}
    return [name.rpartition("/")[2] for name in names] if len(families) == 1 else names


def limit_rows(planned: Sequence[PlannedJob]) -> list[LimitRow]:
    """Search each recipe's longest prompt, answers as in its job."""
    rows = []
    for plan in planned:
        response = max(plan.job.lengths.chosen, plan.job.lengths.rejected)
        rows.append(LimitRow(plan, longest_prompt(plan.job), response))
    return rows


def comparison_rows(planned: Sequence[PlannedJob]) -> list[ComparisonRow]:
    """Predict each job, and search its longest prompt; answers of 1,024 tokens where the job names none."""
    rows = []
    for plan in planned:
        job = plan.job
        lengths = job.lengths
        searched = plan
        if not max(lengths.chosen, lengths.rejected):
            answered = Lengths(lengths.prompt, DEFAULT_RESPONSE, DEFAULT_RESPONSE, lengths.padded)
            searched = replace(plan, job=replace(job, lengths=answered))
        [limit] = limit_rows([searched])
        rows.append(ComparisonRow(plan, predict(job, plan.mix), limit, step_time(job)))
    return rows
