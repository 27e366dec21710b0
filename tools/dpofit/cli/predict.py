"""`dpofit predict`: one job's memory, before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dpofit.cli.job_options import one_recipe, split_overrides, takes_job_flags
from dpofit.memory.predict import Prediction, Traced
from dpofit.plan import JobFlags, PlannedJob, plan_job
from dpofit.recipe.notes import Note

WORTH_SAYING = 1.05  # times the memory of the rest


@takes_job_flags()
def command(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE [KEY=VALUE]...", help="Name or path, overrides.")],
    flags: JobFlags,
    explain: Annotated[bool, typer.Option("--explain", help="Show the sum behind every figure.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG or SVG: memory by phase.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also trace the real code (training stack).")] = False,
    timeline: Annotated[Path | None, typer.Option("--timeline", help="Draw the traced step: html, png, svg.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a picture's file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.predict/1.")] = False,
) -> None:
    """Peak GPU, host and disk memory of a job, per phase. Exit code 1 when it will not fit.

    \b
    Examples:
      dpofit predict qwen2.5-72b-dpo/full-z3
      dpofit predict my.yaml --gpu a100-80g --nodes 4 --host-ram 1000GiB --prompt 8192 --response 1024
      dpofit predict my.yaml per_device_train_batch_size=2 deepspeed=ds_z3_offload_config.json --explain
      dpofit predict full-z2 --lengths lengths.jsonl --plot memory.png
      dpofit predict qwen2.5-72b-dpo/full-z3 --trace --timeline step.html
      dpofit predict full-z2 --json | jq .gpu.peak_bytes
    """
    from dpofit.memory.notes import prediction_notes
    from dpofit.memory.predict import predict

    references, overrides = split_overrides(arguments)
    reference = one_recipe(references)
    planned = plan_job(reference, overrides, flags)
    prediction = predict(planned.job, planned.mix)
    notes = [*planned.notes, *_few_note(planned, prediction)]
    notes += prediction_notes(prediction, mix_given=planned.mix is not None)
    traced = _traced(planned, trace, timeline, force)
    if plot is not None:
        from dpofit.report.plot import plot_phases

        plot_phases(prediction, plot, force)
    if as_json:
        from dpofit.report.predict_json import predict_document

        print(json.dumps(predict_document(prediction, notes, traced), indent=2))
    else:
        from dpofit.report.predict_table import print_prediction

        print_prediction(prediction, notes, explain, traced)
    raise typer.Exit(1 if prediction.verdict == "oom" else 0)


def _few_note(planned: PlannedJob, prediction: Prediction) -> list[Note]:
    """What a few outliers in the lengths cost everyone: the peak with them beside the peak without."""
    from dpofit.memory.predict import predict
    from dpofit.units import format_gib

    few = planned.few
    if few is None:
        return []
    shorter = tuple(lengths for lengths in planned.mix or () if lengths.row_tokens < few.rest.row_tokens)
    rest = predict(replace(planned.job, lengths=few.rest), shorter)
    ratio = prediction.gpu.peak_bytes / rest.gpu.peak_bytes
    if ratio < WORTH_SAYING:
        return []
    text = (
        f"{few.count:,} of {few.total:,} pairs need {ratio:.1f}x the memory of the rest: without them a GPU peaks at "
        f"{format_gib(rest.gpu.peak_bytes)} (`dpofit data … --fix` drops or caps them)."
    )
    return [Note("length-outliers", text)]


def _traced(planned: PlannedJob, trace: bool, timeline: Path | None, force: bool) -> Traced | None:
    """The second route to allocated bytes, from the real code on fake tensors; None when not asked for."""
    if not trace and timeline is None:
        return None
    from dpofit.report.traced import trace_and_draw

    return trace_and_draw(planned.job, timeline, force)
