"""`calibrate` as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from dpofit.findings import Finding
from dpofit.hardware.calibration import Calibration
from dpofit.memory.calibrate import Compared
from dpofit.memory.measured import RunRead
from dpofit.memory.predict import Prediction
from dpofit.recipe.notes import Note
from dpofit.report.console import console
from dpofit.units import GIB


def calibrate_document(
    run: RunRead, prediction: Prediction, rows: Sequence[Compared], own: Calibration, out: Path | None,
    notes: Sequence[Note], findings: Sequence[Finding],
) -> dict[str, Any]:  # fmt: skip
    """The `dpofit.calibrate/1` document; `out`: the file written, None when there was nothing to write."""
    return {
        "schema": "dpofit.calibrate/1",
        "files": [str(path) for path in run.files],
        "recipe": prediction.job.recipe.name,
        "world_size": prediction.job.world_size,
        "ranks_read": len(run.ranks),
        "compared": [
            {
                "what": row.what, "predicted_bytes": row.predicted_bytes, "measured_bytes": row.measured_bytes,
                "error": row.error, "why": row.why if row.measured_bytes is None else None,
            }
            for row in rows
        ],
        "calibration": asdict(own) if own.holds_something else None,
        "written": None if out is None else str(out),
        "notes": [asdict(note) for note in notes],
        "findings": [asdict(finding) for finding in findings],
    }  # fmt: skip


def print_calibration(
    run: RunRead, prediction: Prediction, rows: Sequence[Compared], own: Calibration, out: Path | None,
    notes: Sequence[Note], findings: Sequence[Finding],
) -> None:  # fmt: skip
    """A table of 100 columns, and what a prediction with the file will use."""
    screen = console()
    job, cluster = prediction.job, prediction.job.cluster
    ranks = f"{len(run.ranks)} rank{'s' * (len(run.ranks) != 1)}"
    steps = f"{max((rank.steps for rank in run.ranks), default=0)} steps of {ranks}"
    screen.print(
        f"[bold]{job.recipe.name}[/] on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}, "
        f"{job.rows} rows x {job.lengths.row_tokens:,} tokens; {steps} read"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB")
    for heading in ("predicted", "measured", "difference"):
        table.add_column(heading, justify="right")
    for row in rows:
        measured = "-" if row.measured_bytes is None else f"{row.measured_bytes / GIB:,.2f}"
        error = row.why if row.error is None else f"{row.error:+.1%}"
        table.add_row(row.what, f"{row.predicted_bytes / GIB:,.2f}", measured, error)
    screen.print(table)
    for note in notes:
        screen.print(f"[dim]{note.id}[/]: {note.text}")
    for finding in findings:
        seen = ", ".join(f"{evidence.where} {evidence.text}" for evidence in finding.evidence)
        screen.print(f"[yellow]{finding.severity}[/]: {finding.title}: {seen}  [dim]{finding.id}[/]\n    {finding.fix}")
    if out is None:
        screen.print("nothing to calibrate with: no reading from a GPU; no file written")
    else:
        screen.print(f"written: {out}", soft_wrap=True)
        screen.print(f"--calibration {out} gives predictions: {own.says(job.world_size)}", soft_wrap=True)
