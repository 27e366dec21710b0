"""`dpofit calibrate`: a run of one's own beside its prediction, and its cluster's constants for later ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpofit.cli.job_options import takes_job_flags
from dpofit.errors import BadInput, Problem
from dpofit.plan import JobFlags, plan_job
from dpofit.recipe.notes import Note

if TYPE_CHECKING:
    from dpofit.memory.measured import RunRead

FILE = "calibration.json"


@takes_job_flags(but=("host_ram", "disk", "calibration"))
def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder, or a run's output_dir.")],
    flags: JobFlags,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides the run was started with.")
    ] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="What ran, if not RUN_DIR/recipe.yaml.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help=f"The file to write; RUN_DIR/{FILE}.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.calibrate/1.")] = False,
) -> None:
    """What a run used beside what is predicted for it, from output_dir/dpofit/memory.*.jsonl (`dpofit launch`) or from
    trainer_log.jsonl (LLaMA-Factory with RECORD_VRAM=1); stores what `--calibration` gives later predictions.

    Give the run's real lengths: by default rows are cutoff_len, and shorter ones make every figure look too high.
    Exit code 1 when the log holds nothing from a GPU.

    \b
    Examples:
      dpofit calibrate runs/first --gpu h100-80g --lengths lengths.jsonl
      dpofit calibrate saves/qwen --recipe my.yaml --gpu a100-80g --nodes 1 --gpus-per-node 8 --out a100.json
      dpofit predict my.yaml --gpu h100-80g --calibration runs/first/calibration.json
    """
    from dpofit.hardware.calibration import calibration_text
    from dpofit.memory.calibrate import calibration, compared, far_off
    from dpofit.memory.measured import read_run
    from dpofit.memory.predict import predict
    from dpofit.report.calibrate import calibrate_document, print_calibration

    target = folder / FILE if out is None else out
    if target.exists() and not force:
        raise BadInput(Problem(str(target), "--out", "is there already", "Name another file, or add --force"))
    reference = recipe or str(_recipe_of(folder))
    run = read_run(_output_dir(folder, reference, overrides or []))
    flags, notes = _as_run(flags, run, reference)
    planned = plan_job(reference, overrides or [], flags)
    prediction = predict(planned.job, planned.mix)
    own = calibration(run, str(folder), prediction)
    notes += planned.notes
    if not own.holds_something:
        written = None
    else:
        written = target
        try:
            target.write_text(calibration_text(own), encoding="utf-8")
        except OSError as error:
            wrong = f"can't be written ({error.strerror})"
            raise BadInput(Problem(str(target), "--out", wrong, "Name another file")) from None
    lengths_given = (flags.lengths, flags.prompt, flags.response, flags.chosen, flags.rejected) != (None,) * 5
    show = (run, prediction, compared(run, prediction), own, written, notes, far_off(own, lengths_given))
    if as_json:
        print(json.dumps(calibrate_document(*show), indent=2))
    else:
        print_calibration(*show)
    raise typer.Exit(0 if written is not None else 1)


def _recipe_of(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    if not path.is_file():
        right = "Give a run folder of `dpofit copy`, or name what ran with --recipe"
        raise BadInput(Problem(str(folder), "RUN_DIR", "has no recipe.yaml", right))
    return path


def _output_dir(folder: Path, reference: str, overrides: list[str]) -> Path:
    """Where the run wrote: `folder` itself, where its launch said, or the recipe's output_dir from there or here."""
    from dpofit.launch.plan import read_plan
    from dpofit.recipe.load import load_recipe

    if (folder / "dpofit").is_dir() or (folder / "trainer_log.jsonl").is_file():
        return folder
    said = str(load_recipe(reference, overrides).recipe.settings.get("output_dir", "trainer_output"))
    plans = [plan for state in sorted(folder.glob(".dpofit/*")) if (plan := read_plan(state)) is not None]
    candidates = [*(plan.output_dir for plan in plans), folder / said, Path(said)]
    return next((path for path in candidates if path.is_dir()), folder)


def _as_run(flags: JobFlags, run: RunRead, reference: str) -> tuple[JobFlags, list[Note]]:
    """The flags with the nodes and ranks that the logs show, and the card that the recipe is written for; BadInput
    when the logs hold more ranks than the flags say."""
    from dpofit.launch.environment import catalogue_source
    from dpofit.recipe.catalogue import written_for

    if not run.ranks:
        return flags, []
    written = written_for(catalogue_source(Path(reference)))
    if written is not None and flags.gpu is None:
        flags = replace(flags, gpu=written.gpu)
    nodes, ranks = run.nodes, len({rank.rank for rank in run.ranks})
    given = (flags.nodes or nodes) * (flags.gpus_per_node or max(ranks // nodes, 1))
    if given < ranks:
        wrong = f"the logs hold {ranks} ranks of {nodes} nodes, more than the {given} GPUs given"
        raise BadInput(Problem("command line", "--nodes, --gpus-per-node", wrong, "Leave them out, or mend them"))
    text = f"From the logs: {nodes} node{'s' * (nodes > 1)}, {ranks} rank{'s' * (ranks > 1)}."
    known = replace(flags, nodes=flags.nodes or nodes, gpus_per_node=flags.gpus_per_node or max(ranks // nodes, 1))
    return known, [] if (flags.nodes and flags.gpus_per_node) else [Note("cluster-from-logs", text)]
