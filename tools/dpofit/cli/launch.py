"""`dpofit launch`: runs a recipe with torchrun and real LLaMA-Factory, after everything that can be checked first."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpofit.cli.job_options import takes_job_flags
from dpofit.errors import BadInput, Problem
from dpofit.plan import JobFlags

if TYPE_CHECKING:
    from dpofit.launch.plan import Plan
    from dpofit.launch.prepare import Prepared
    from dpofit.recipe.load import ReadRecipe


class Emit(StrEnum):
    """What --emit writes."""

    slurm = "slurm"
    kubernetes = "kubernetes"


@takes_job_flags("long_context", "calibration")
def command(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A catalogue name, a YAML or JSON, or a run folder.")],
    flags: JobFlags,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run it here with a tiny model: 3 steps, a save, a resume, checks.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="With --smoke: leave everything in this folder.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print exactly what would run.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Outlive this terminal; see `dpofit status`.")] = False,
    emit: Annotated[Emit | None, typer.Option("--emit", help="Print a job file for a scheduler instead.")] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Start in spite of `oom` or preflight errors.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Train into an output_dir that holds other checkpoints.")
    ] = False,
    guard_memory: Annotated[
        str | None, typer.Option("--guard-memory", metavar="SIZE", help="Memory a save may add to a rank (256MiB).")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print dpofit.launch/1 (with --smoke, --dry-run, --detach).")
    ] = False,
) -> None:
    """Run a recipe under torchrun with LLaMA-Factory and DeepSpeed; on several nodes run the same command on each.

    Before anything starts: the memory model (`oom` stops), preflight (errors stop), and the output_dir (other
    checkpoints stop). NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT mean what they mean to
    llamafactory-cli; under Slurm and Kubeflow they are found out. --smoke needs no GPU and no network.

    Exit code 1 when training did not end well, or should not start; 2 for bad input.

    \b
    Examples:
      dpofit launch runs/first/recipe.yaml --smoke
      dpofit launch runs/first/recipe.yaml learning_rate=1e-6 --dry-run
      NNODES=4 NODE_RANK=0 MASTER_ADDR=10.0.0.1 dpofit launch runs/first --detach
      dpofit launch runs/first --emit slurm > job.sbatch
    """
    from dpofit.hardware.calibration import read_calibration
    from dpofit.launch.prepare import prepare, read
    from dpofit.recipe.long_context import with_option

    _refuse_together(smoke, dry_run, detach, emit, keep)
    loaded = read(recipe, overrides or [], with_option(os.environ, flags.long_context))
    if smoke:
        raise typer.Exit(_smoke(loaded, keep, as_json))
    if emit is not None:
        from dpofit.launch.emit import emitted

        print(emitted(loaded, overrides or [], emit.value), end="")
        return
    if flags.calibration is not None:
        read_calibration(flags.calibration)  # bad input here, though the forecast is only advice
    prepared = prepare(
        loaded, recipe, overrides or [], guard_memory=guard_memory, dry_run=dry_run, detach=detach,
        calibration=flags.calibration,
    )  # fmt: skip
    if dry_run:
        _dry_run(prepared, as_json)
        return
    _tell(prepared)
    if not anyway and prepared.stops:
        print(f"error: not started: {'; '.join(prepared.stops)}. --anyway starts it all the same.")
        raise typer.Exit(1)
    prepared.settle_output_dir(force)
    try:
        code = _detach(prepared.plan, as_json) if detach else _run(prepared.plan)
    except OSError as error:
        right = "The run's state lies there: launch from a folder you can write."
        raise BadInput(Problem(str(prepared.plan.state), None, f"the run can't be started: {error}", right)) from None
    raise typer.Exit(code)


def _refuse_together(smoke: bool, dry_run: bool, detach: bool, emit: Emit | None, keep: Path | None) -> None:
    """An option that would be ignored is refused instead."""
    modes = {"--smoke": smoke, "--dry-run": dry_run, "--detach": detach, "--emit": emit is not None}
    asked = [name for name, given in modes.items() if given]
    problems = []
    if len(asked) > 1:
        problems.append(Problem("command line", " ".join(asked), "exclude each other", "Give one of them."))
    if keep is not None and not smoke:
        problems.append(Problem("command line", "--keep", "works only with --smoke", "Add --smoke, or leave it out."))
    if problems:
        raise BadInput(problems)


def _run(plan: Plan) -> int:
    from dpofit.launch.run import run_plan

    return _report_end(run_plan(plan))


def _report_end(outcome: Any) -> int:
    print(f"dpofit: {outcome.title}", flush=True)
    if outcome.advice:
        print(f"        {outcome.advice}", flush=True)
    return 0 if outcome.ok else 2 if outcome.cause == "bad-input" else 1


def _detach(plan: Plan, as_json: bool) -> int:
    from dpofit.launch.detach import start_detached

    running, log = start_detached(plan)
    folder = plan.state.parent.parent
    if as_json:
        document = {"schema": "dpofit.launch/1", "pid": running, "log": str(log), "folder": str(folder)}
        print(json.dumps(document, indent=2))
    else:
        print(f"running detached, pid {running}, log {log}")
        print(f"  dpofit status {folder}")
        print(f"  dpofit stop {folder}      # saves, then ends, on all nodes")
    return 0


def _tell(prepared: Prepared) -> None:
    for finding in prepared.findings:
        print(f"{finding.severity}: {finding.title}")
        for seen in finding.evidence:
            print(f"    {seen.where}: {seen.text}")
        if finding.fix:
            print(f"    {finding.fix}")
    print(f"memory: {prepared.forecast.text}")
    for variable in prepared.plan.variables:
        from dpofit.launch.environment import masked

        print(f"env: {variable.name}={masked(variable.name, variable.value)}: {variable.why}")


def _dry_run(prepared: Prepared, as_json: bool) -> None:
    from dpofit.launch.environment import masked
    from dpofit.launch.plan import masked_override, shown

    plan = prepared.plan
    if not as_json:
        print(f"# {prepared.topology_text}")
        print(f"# memory: {prepared.forecast.text}")
        print(shown(plan))
        if prepared.accelerate:
            print(f"# or, with accelerate: {prepared.accelerate}")
        return
    variables = [{"name": v.name, "value": masked(v.name, v.value), "why": v.why} for v in plan.variables]
    document = {
        "schema": "dpofit.launch/1",
        "command": [masked_override(word) for word in plan.command],
        "environment": variables,
        "folder": str(plan.folder),
        "state": str(plan.state),
        "output_dir": str(plan.output_dir),
        "nodes": prepared.topology.nodes,
        "node_rank": prepared.topology.node_rank,
        "processes_per_node": prepared.topology.processes,
        "verdict": prepared.forecast.verdict,
    }
    print(json.dumps(document, indent=2))


def _smoke(loaded: ReadRecipe, keep: Path | None, as_json: bool) -> int:
    import sys
    from dataclasses import asdict

    from dpofit.launch.prepare import smoke_ranks
    from dpofit.launch.smoke import smoke

    ranks, gpus = smoke_ranks(loaded, os.environ)
    try:
        report = smoke(loaded, gpus, ranks, keep, lambda text: print(f"smoke {text} …", file=sys.stderr, flush=True))
    except OSError as error:
        right = "--keep DIR, or TMPDIR, names a folder that can be written and has room."
        raise BadInput(Problem("smoke run", None, f"can't write: {error}", right)) from None
    if as_json:
        document = {
            "schema": "dpofit.launch/1",
            "smoke": {
                "ok": report.ok,
                "ranks": report.ranks,
                "device": "gpu" if report.gpus else "cpu",
                "seconds": round(report.seconds, 1),
                "replaced": [asdict(replacement) for replacement in report.plan.replaced],
                "checks": [asdict(check) for check in report.checks],
                "outcome": asdict(report.outcome),
                "log": str(report.log) if report.log else None,
            },
        }
        print(json.dumps(document, indent=2, default=str))
        return 0 if report.ok else 1
    print("replaced for the smoke run (everything else is your recipe):")
    for replacement in report.plan.replaced:
        was, now = (_short(value) for value in (replacement.was, replacement.now))
        print(f"  {replacement.key}: {was} → {now}  ({replacement.why})")
    for check in report.checks:
        mark = {True: "ok  ", False: "FAIL", None: "–   "}[check.ok]
        print(f"{mark} {check.name}: {check.seen} (expected {check.expected})")
    if not report.outcome.ok:
        print(f"FAIL {report.outcome.title}")
        if report.outcome.advice:
            print(f"     {report.outcome.advice}")
    if report.log:
        print(f"log: {report.log}")
    print(f"smoke run {'passed' if report.ok else 'failed'} in {report.seconds:.0f} s")
    return 0 if report.ok else 1


def _short(value: Any) -> str:
    text = "unset" if value is None else str(value)
    return text if len(text) <= 48 else f"…{text[-47:]}"
