"""`dpofit compare`: recipes side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpofit.cli.job_options import split_overrides, takes_job_flags
from dpofit.plan import JobFlags, plan_jobs


@takes_job_flags()
def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE... [KEY=VALUE]...", help="Names, paths or a whole family; overrides.")
    ],
    flags: JobFlags,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Pairs to train on, for GPU-hours.")] = 10_000,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG or SVG: memory against length.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the plot's file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.compare/1.")] = False,
) -> None:
    """Recipes side by side: GPU, host, disk, longest prompt, step time relative to the first, GPU-hours (estimates).

    \b
    Examples:
      dpofit compare qwen2.5-72b-dpo
      dpofit compare full-z3 full-z3-unsloth-gc full-z3-offload --gpu h200-141g --nodes 4 --host-ram 2000GiB
      dpofit compare full-z3 lora-z3 --prompt 8192 --response 1024 --pairs 42000 --plot lengths.svg
    """
    from dpofit.report.compare import compare_document, print_comparison
    from dpofit.report.rows import comparison_rows

    references, overrides = split_overrides(arguments)
    planned = plan_jobs(references, overrides, flags)
    rows = comparison_rows(planned)
    if plot is not None:
        from dpofit.report.plot import plot_lengths

        plot_lengths(rows, plot, force)
    if as_json:
        print(json.dumps(compare_document(rows, pairs), indent=2))
    else:
        print_comparison(rows, pairs)
