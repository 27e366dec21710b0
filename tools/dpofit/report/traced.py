"""Runs the tracer for a prediction and draws its timeline; the only place in report/ that needs the training stack."""

from __future__ import annotations

import gc
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from dpofit.errors import BadInput, Problem
from dpofit.memory.job import Job
from dpofit.memory.meter import phase_peaks
from dpofit.memory.predict import Traced
from dpofit.memory.program import Program
from dpofit.trace.job import STEPS, collector_off, trace_with_notes

COMPARED = ("forward", "reference_forward", "loss", "backward", "accumulate", "optimizer_step")


def trace_and_draw(job: Job, timeline: Path | None, force: bool) -> Traced:
    """Trace `job`; write `timeline` when given. BadInput without the stack, or when the file exists already."""
    if timeline is not None and os.path.exists(timeline) and not force:
        right = "Name another file, or add --force"
        raise BadInput(Problem(str(timeline), "--timeline", "exists already", right))
    if timeline is not None and not os.path.isdir(timeline.parent):  # before a minute of tracing
        raise BadInput(Problem(str(timeline), "--timeline", f"{timeline.parent} is no folder", "Make it first"))
    with redirect_stdout(StringIO()), collector_off():  # DeepSpeed prints its start; stdout is the answer's
        program, substitutions = _traced(job)
    gc.freeze()  # the command is about to end: at its exit the collector would look through all of that
    if timeline is not None:
        from dpofit.trace.timeline import draw_timeline

        try:
            draw_timeline(program, timeline, job.recipe.name)
        except OSError as error:
            wrong = f"cannot be written ({error.strerror})"
            raise BadInput(Problem(str(timeline), "--timeline", wrong, "Name another file")) from None
    peaks = compared_peaks(program)
    return Traced({name: peaks[name] for name in COMPARED if name in peaks}, substitutions)


def compared_peaks(program: Program) -> dict[str, int]:
    """Allocated bytes at the peak of each phase of the steady step; of cached_reference's pass, which is before."""
    peaks: dict[str, int] = {}
    for peak in phase_peaks(program, frozenset({"gpu"})):
        if peak.step == STEPS or (peak.phase, peak.step) == ("reference_forward", 0):
            peaks[peak.phase] = max(peak.size_bytes, peaks.get(peak.phase, 0))
    return peaks


def _traced(job: Job) -> tuple[Program, tuple[str, ...]]:
    try:
        from dpofit.trace.imports import import_training_stack

        import_training_stack()
    except ImportError as missing:
        right = "It runs LLaMA-Factory's own code: bash scripts/install.sh"
        wrong = f"the training stack is not installed ({missing.name} is missing)"
        raise BadInput(Problem("command line", "--trace", wrong, right)) from None
    return trace_with_notes(job)
