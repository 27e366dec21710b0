"""`dpofit predict`: one job's memory, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpofit.cli import job_options as options


def command(
    arguments: Annotated[list[str], typer.Argument(metavar="RECIPE [KEY=VALUE]...", help="Name or path, overrides.")],
    gpu: options.GpuOption = None,
    nodes: options.NodesOption = None,
    gpus_per_node: options.GpusPerNodeOption = None,
    host_ram: options.HostRamOption = None,
    disk: options.DiskOption = None,
    prompt: options.PromptOption = None,
    response: options.ResponseOption = None,
    chosen: options.ChosenOption = None,
    rejected: options.RejectedOption = None,
    lengths: options.LengthsOption = None,
    no_padding: options.NoPaddingOption = False,
    stack: options.StackOption = "pinned",
    explain: Annotated[bool, typer.Option("--explain", help="Show the sum behind every figure.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG or SVG: memory by phase.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the plot's file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.predict/1.")] = False,
) -> None:
    """Peak GPU, host and disk memory of a job, per phase. Exit code 1 when it will not fit.

    \b
    Examples:
      dpofit predict full-z3
      dpofit predict my.yaml --gpu a100-80g --nodes 4 --host-ram 1000GiB --prompt 8192 --response 1024
      dpofit predict my.yaml per_device_train_batch_size=2 deepspeed=ds_z3_offload_config.json --explain
      dpofit predict full-z3 --lengths lengths.jsonl --plot memory.png
      dpofit predict full-z3 --json | jq .gpu.peak_bytes
    """
    from dpofit.memory.notes import prediction_notes
    from dpofit.memory.predict import predict

    references, overrides = options.split_overrides(arguments)
    reference = options.one_recipe(references)
    flags = options.JobFlags(gpu, nodes, gpus_per_node, host_ram, disk, prompt, response, chosen, rejected, lengths,
                             no_padding, stack)  # fmt: skip
    planned = options.plan_job(reference, overrides, flags)
    prediction = predict(planned.job, planned.mix)
    notes = [*planned.notes, *prediction_notes(prediction, mix_given=planned.mix is not None)]
    if plot is not None:
        from dpofit.report.plot import plot_phases

        plot_phases(prediction, plot, force)
    if as_json:
        from dpofit.report.predict_json import predict_document

        print(json.dumps(predict_document(prediction, notes), indent=2))
    else:
        from dpofit.report.predict_table import print_prediction

        print_prediction(prediction, notes, explain)
    raise typer.Exit(1 if prediction.verdict == "oom" else 0)
