"""`dpofit repair`: a Hugging Face folder from a checkpoint that has lost its weights files."""

from __future__ import annotations

import importlib.util
import json as json_
import sys
from pathlib import Path
from typing import Annotated

import typer

from dpofit.errors import BadInput, Problem


def command(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint with ZeRO files, or a folder with a final save cut short.")
    ],
    out: Annotated[Path, typer.Argument(help="A new or empty folder, or what a killed repair left.")],
    json: Annotated[bool, typer.Option("--json", help="Print dpofit.repair/1.")] = False,
    guard_memory: Annotated[str, typer.Option("--guard-memory", help="Memory to use at most.")] = "256MiB",
) -> None:
    """Write a loadable Hugging Face folder from a checkpoint's ZeRO files (ZeRO 1, 2, 3; full or LoRA).

    Streams under the memory cap, whatever the model's size. The checkpoint itself is only read. Config and tokenizer
    come from the checkpoint, or from the run folder above it. Needs torch and DeepSpeed.

    Examples:

      dpofit repair saves/qwen/checkpoint-500 saves/qwen-500

      dpofit repair saves/qwen/checkpoint-500 /data/out --guard-memory 1GiB

    Exit code: 0 written and checked, 1 written but not whole, 2 can't be repaired.
    """
    from dpofit.train.guard.folders import is_left_by_repair

    problems = []
    if not checkpoint.is_dir():
        problems.append(Problem(str(checkpoint), None, "is not a folder", "Give a checkpoint-N folder."))
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not is_left_by_repair(out))):
        problems.append(
            Problem(str(out), None, "exists and is not empty", "Give a new folder; nothing is overwritten.")
        )
    problems += [
        Problem("dpofit repair", None, f"needs {name}", "Run it where the training stack is installed.")
        for name in ("torch", "deepspeed")
        if importlib.util.find_spec(name) is None
    ]
    if problems:
        raise BadInput(problems)

    from rich.console import Console
    from rich.progress import Progress

    from dpofit.findings import exit_code, findings_json
    from dpofit.train.guard.check import check_checkpoint
    from dpofit.train.guard.config import read_config
    from dpofit.train.guard.repair import repair

    config = read_config({"DPOFIT_GUARD_MEMORY": guard_memory})
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("repairing", total=None)
        written = repair(checkpoint, out, config, lambda nbytes: bar.advance(task, nbytes))
    findings = check_checkpoint(out)
    code = exit_code(findings)
    if json:
        print(json_.dumps(findings_json("repair", findings, out=str(out), bytes=written)))
    else:
        for finding in findings:
            print(f"{finding.severity}: {finding.title} [{finding.id}]")
        print(f"{out}: {written / 1e9:,.2f} GB written, {'whole' if code == 0 else 'NOT whole'}")
    raise typer.Exit(code)
