"""Rows of `limits` and `compare`: each recipe's job with what was worked out for it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from dpofit.memory.job import Lengths
from dpofit.memory.limits import Limit, longest_prompt
from dpofit.memory.notes import calibration_note
from dpofit.memory.predict import Prediction, default_mix, fitting_prediction, predict
from dpofit.memory.scope import check_scope
from dpofit.memory.screen import screen
from dpofit.memory.speed import StepTime, step_time
from dpofit.plan import DEFAULT_RESPONSE, PlannedJob
from dpofit.recipe.notes import Note

Row = TypeVar("Row")


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


def calibration_notes(planned: Sequence[PlannedJob]) -> list[Note]:
    """What calibrated clusters change, each remark once."""
    return list(dict.fromkeys(note for plan in planned if (note := calibration_note(plan.job))))


def short_names(planned: Sequence[PlannedJob]) -> list[str]:
    """Recipe names without the family when all belong to one, so that tables stay narrow."""
    names = [plan.job.recipe.name for plan in planned]
    families = {name.rpartition("/")[0] for name in names}
    return [name.rpartition("/")[2] for name in names] if len(families) == 1 else names


def limit_rows(planned: Sequence[PlannedJob]) -> list[LimitRow]:
    """Search each recipe's longest prompt, answers as in its job."""
    return _on_all_cores(_limit_row, planned)


def comparison_rows(planned: Sequence[PlannedJob]) -> list[ComparisonRow]:
    """Predict each job, and search its longest prompt; answers of 1,024 tokens where the job names none."""
    return _on_all_cores(_comparison_row, planned)


def fitting(planned: Sequence[PlannedJob]) -> list[bool]:
    """Is each job predicted to fit?"""
    return _on_all_cores(_fits, planned)


def _fits(plan: PlannedJob) -> bool:
    screened = screen(plan.job, plan.mix or default_mix(plan.job))
    return screened.may_fit and fitting_prediction(plan.job, plan.mix, screened.plan) is not None


def _limit_row(plan: PlannedJob) -> LimitRow:
    return LimitRow(plan, longest_prompt(plan.job), max(plan.job.lengths.chosen, plan.job.lengths.rejected))


def _comparison_row(plan: PlannedJob) -> ComparisonRow:
    job = plan.job
    lengths = job.lengths
    searched = plan
    if not max(lengths.chosen, lengths.rejected):
        answered = Lengths(lengths.prompt, DEFAULT_RESPONSE, DEFAULT_RESPONSE, lengths.padded)
        searched = replace(plan, job=replace(job, lengths=answered))
    return ComparisonRow(plan, predict(job, plan.mix), _limit_row(searched), step_time(job))


def _on_all_cores(work: Callable[[PlannedJob], Row], planned: Sequence[PlannedJob]) -> list[Row]:
    """`work` on each job, in order. Recipes have nothing to do with each other, and a whole family takes seconds."""
    workers = min(os.cpu_count() or 1, len(planned))
    if len(planned) < 3 or workers == 1 or "fork" not in multiprocessing.get_all_start_methods():
        return [work(plan) for plan in planned]
    for plan in planned:
        check_scope(plan.job.recipe, plan.job.model, plan.job.world_size)  # bad input is found here, in one process
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        # A family ends with its adapter recipes, whose searches are the longest: begun first, no core waits for them.
        return list(pool.map(work, reversed(planned)))[::-1]
