"""`dpofit verify`: is this checkpoint whole?"""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import Annotated

import typer

from dpofit.errors import BadInput, Problem


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint-N folder, or the folder of a final model.")],
    json: Annotated[bool, typer.Option("--json", help="Print dpofit.verify/1.")] = False,
) -> None:
    """Check that a checkpoint is whole: sizes, checksums, every tensor once, dtype and shape against config.json.

    Works on checkpoints of the stock save too, as far as they carry the information. Reads only; runs offline.

    Examples:

      dpofit verify saves/qwen/checkpoint-500

      dpofit verify saves/qwen --json

    Exit code: 0 whole, 1 not, 2 no such folder.
    """
    from dpofit.findings import exit_code, findings_json
    from dpofit.train.guard.check import check_checkpoint, total_bytes
    from dpofit.train.guard.manifest import MANIFEST_NAME

    if not checkpoint.is_dir():
        raise BadInput(Problem(str(checkpoint), None, "is not a folder", "Give a checkpoint-N folder."))
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    size = total_bytes(checkpoint)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("checking", total=size)
        findings = check_checkpoint(checkpoint, lambda nbytes: bar.advance(task, nbytes))
    has_manifest = (checkpoint / MANIFEST_NAME).exists()
    code = exit_code(findings)
    if json:
        extra = {"checkpoint": str(checkpoint), "whole": code == 0, "bytes": size, "manifest": has_manifest}
        print(json_.dumps(findings_json("verify", findings, **extra)))
        raise typer.Exit(code)
    console = Console(width=min(100, Console().width), highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(f"{finding.severity}: {finding.title}  \\[{finding.id}]")
        for evidence in finding.evidence:
            console.print(f"    {evidence.where}: {evidence.text}", markup=False)
        if finding.cause:
            console.print(f"    cause: {finding.cause}", markup=False)
        if finding.fix:
            console.print(f"    fix: {finding.fix}", markup=False)
    how = "every byte matches its manifest" if has_manifest else "no manifest; structure and tensors were checked"
    console.print(f"{checkpoint}: {f'whole ({how})' if code == 0 else 'NOT whole'}", markup=False)
    raise typer.Exit(code)
