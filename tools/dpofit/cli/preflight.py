"""`dpofit preflight`: finds in seconds what a job would fail at after an hour of loading."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpofit.findings import Finding
    from dpofit.launch.preflight.compare import Participant


def command(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check its model, data, output and offload.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys.")] = None,
    start: Annotated[
        str | None, typer.Option("--start", metavar="COMMAND", help="How the job will be started, as a shell line.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="Meet all nodes there, over gloo.")
    ] = None,
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure all-reduce with nccl-tests' all_reduce_perf: uses the GPUs.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the other nodes.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print dpofit.preflight/1.")] = False,
) -> None:
    """Check GPUs, launcher, network, shared memory, files and disk of this machine, and with --rendezvous of all nodes.

    --start understands torchrun, torch.distributed.launch, accelerate launch (with its config file), deepspeed (with
    --include and hostfile), llamafactory-cli, nohup, srun and assignments in front. With --rendezvous run the same on
    every node (NNODES, NODE_RANK, or Slurm's and Kubeflow's names), or in every process of a loop over GPUs (RANK,
    WORLD_SIZE, CUDA_VISIBLE_DEVICES): it prints rank → host → local rank → GPU, and finds ranks that share a GPU and
    hosts that NCCL can't tell apart. No CUDA context is made unless --bandwidth asks for a measurement.
    docs/preflight.md lists the findings.

    Exit code 1 when a finding is an error.

    \b
    Examples:
      dpofit preflight runs/first/recipe.yaml
      dpofit preflight --start "CUDA_VISIBLE_DEVICES=0,2 deepspeed --num_gpus 2 train.py"
      dpofit preflight --bandwidth
      NNODES=4 NODE_RANK=1 MASTER_ADDR=10.0.0.1 dpofit preflight runs/first --rendezvous 10.0.0.1:29400
    """
    from dpofit.findings import exit_code, findings_json
    from dpofit.launch.bandwidth import measure_all_reduce
    from dpofit.launch.inventory import visible_cards
    from dpofit.launch.machine import read_machine
    from dpofit.launch.preflight import local_findings
    from dpofit.launch.preflight.compare import compare, rank_table
    from dpofit.launch.preflight.links import bandwidth_findings
    from dpofit.launch.prepare import read
    from dpofit.launch.rendezvous import meet, participant
    from dpofit.launch.starts import read_start, start_of_environment
    from dpofit.launch.topology import read_topology

    found = read(recipe, overrides or []) if recipe is not None else None
    how = read_start(start, os.environ, Path.cwd()) if start is not None else start_of_environment(os.environ)
    machine = read_machine(how.environment)
    topology = read_topology(
        how.environment, how.processes or len(visible_cards(machine.inventory, how.environment).cards)
    )
    findings = list(local_findings(found, topology if start is None else None, start=how, machine=machine))
    if bandwidth:
        gpus = len(visible_cards(machine.inventory, how.environment).cards)
        findings += bandwidth_findings(machine, measure_all_reduce(gpus, how.environment))
    everybody: Sequence[Participant] = ()
    if rendezvous is not None:
        me, count = participant(machine, how.environment, topology, found)
        everybody, about = meet(rendezvous, me, count, timeout_s)
        findings += [*about, *compare(everybody)]
    ranks = rank_table(everybody)
    if as_json:
        keys = ("rank", "host", "local_rank", "gpu", "pci_bus")
        table = [dict(zip(keys, row, strict=True)) for row in ranks]
        print(json.dumps(findings_json("preflight", findings, ranks=table), indent=2))
    else:
        _print(findings, ranks)
    raise typer.Exit(exit_code(findings))


def _print(findings: Sequence[Finding], ranks: Sequence[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if ranks:
        table = Table("rank", "host", "local", "GPU", "PCI bus", box=box.SIMPLE)
        for row in ranks:
            table.add_row(*row)
        Console(width=100).print(table)
    for finding in findings:
        print(f"{finding.severity}: {finding.title}  [{finding.id}]")
        for seen in finding.evidence:
            print(f"    {seen.where}: {seen.text}")
        if finding.cause:
            print(f"    why: {finding.cause}")
        if finding.fix:
            print(f"    fix: {finding.fix}")
    if not findings:
        print("nothing found")
