"""Runs the tracer for a prediction and draws its timeline; the only place in report/ that needs the training stack."""

from __future__ import annotations

import os
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.memory.job import Job
from dpofit.memory.predict import Traced

COMPARED = ("forward", "reference_forward", "loss", "backward", "accumulate", "optimizer_step")


def trace_and_draw(job: Job, timeline: Path | None, force: bool) -> Traced:
    """Trace `job`; write `timeline` when given. BadInput without the stack, or when the file exists already."""
    if timeline is not None and os.path.exists(timeline) and not force:
        right = "Name another file, or add --force"
        raise BadInput(Problem(str(timeline), "--timeline", "exists already", right))
    if timeline is not None and not os.path.isdir(timeline.parent):  # before a minute of tracing
        raise BadInput(Problem(str(timeline), "--timeline", f"{timeline.parent} is no folder", "Make it first"))
    try:
        from dpofit.trace.job import substitutions_of, trace_job, trace_peaks

        substitutions = substitutions_of(job)
    except ImportError as missing:
        right = "It runs LLaMA-Factory's own code: bash scripts/install.sh"
        wrong = f"the training stack is not installed ({missing.name} is missing)"
        raise BadInput(Problem("command line", "--trace", wrong, right)) from None
    if timeline is not None:
        from dpofit.trace.timeline import draw_timeline

        traced = trace_job(job)
        try:
            draw_timeline(traced, timeline, job.recipe.name)
        except OSError as error:
            wrong = f"cannot be written ({error.strerror})"
            raise BadInput(Problem(str(timeline), "--timeline", wrong, "Name another file")) from None
    peaks = trace_peaks(job)
    last = max(step for _, step in peaks)
    return Traced({name: peaks[name, last] for name in COMPARED if (name, last) in peaks}, substitutions)
