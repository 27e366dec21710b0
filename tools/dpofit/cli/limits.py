"""`dpofit limits`: the longest prompt that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from dpofit.cli.job_options import split_overrides, takes_job_flags
from dpofit.plan import DEFAULT_RESPONSE, JobFlags, plan_jobs


@takes_job_flags(but=("prompt", "lengths"))
def command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="RECIPE... [KEY=VALUE]...", help="Names, paths or a whole family; overrides.")
    ],
    flags: JobFlags,
    reproduce: Annotated[
        bool, typer.Option("--reproduce", help="Also: which clusters could have produced the documented limits.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.limits/1.")] = False,
) -> None:
    """The longest prompt that fits (in steps of 8 tokens), what binds there, and the cutoff_len to set.

    Answers are 1,024 tokens unless given. Exit code 1 when some recipe fits at no length. --reproduce asks another
    question of the recipes with a documented limit: which clusters of 2024, tuning and unit of "k" agree with it.

    \b
    Examples:
      dpofit limits qwen2.5-72b-dpo
      dpofit limits full-z3 full-z3-unsloth-gc --gpu h20-96g --nodes 12 --host-ram 2000GiB
      dpofit limits full-z3-liger-unsloth-gc full-z3-offload-liger-unsloth-gc --reproduce
      dpofit limits my.yaml per_device_train_batch_size=2 --gpu 64GiB --response 512 --json
    """
    from dpofit.report.limits import limits_document, print_limits
    from dpofit.report.rows import limit_rows

    references, overrides = split_overrides(arguments)
    if (flags.response, flags.chosen, flags.rejected) == (None, None, None):
        flags = replace(flags, response=DEFAULT_RESPONSE)
    planned = plan_jobs(references, overrides, flags)
    clusters = None
    if reproduce:
        from dpofit.report.reproduce import clusters_json, documented, print_reproductions, reproductions

        clusters = reproductions(documented(planned), overrides)
    rows = limit_rows(planned)
    if as_json:
        document = limits_document(rows)
        print(json.dumps(document if clusters is None else {**document, "clusters": clusters_json(clusters)}, indent=2))
    else:
        print_limits(rows)
        if clusters is not None:
            print_reproductions(clusters)
    raise typer.Exit(1 if any(row.limit.prompt_tokens is None for row in rows) else 0)
