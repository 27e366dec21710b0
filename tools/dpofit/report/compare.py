"""`compare` as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from dpofit.report.console import STYLE, console
from dpofit.report.limits import limit_json
from dpofit.report.rows import ComparisonRow, calibration_notes, short_names
from dpofit.units import GIB


def compare_document(rows: Sequence[ComparisonRow], pairs: int) -> dict[str, Any]:
    """The `dpofit.compare/1` document; times are estimates."""
    notes = [asdict(note) for note in calibration_notes([row.planned for row in rows])]
    found = [_row(row, rows[0], pairs) for row in rows]
    return {"schema": "dpofit.compare/1", "pairs": pairs, "rows": found, "notes": notes}


def _row(row: ComparisonRow, first: ComparisonRow, pairs: int) -> dict[str, Any]:
    prediction, time = row.prediction, row.time
    seconds = time.seconds_per_pair * pairs
    return {
        "recipe": row.planned.job.recipe.name,
        "verdict": prediction.verdict,
        "gpu": {
            "capacity_bytes": prediction.gpu.capacity_bytes, "peak_bytes": prediction.gpu.peak_bytes,
            "allocated_bytes": prediction.gpu.allocated_bytes, "peak_phase": prediction.gpu.peak.phase,
        },
        "host": {"capacity_bytes": prediction.job.cluster.host_ram_bytes, "peak_bytes": prediction.host.peak_bytes},
        "disk": {"checkpoint_bytes": prediction.disk.checkpoint_bytes, "total_bytes": prediction.disk.total_bytes},
        "limit": limit_json(row.limit),
        "time": {
            "estimate": True,
            "relative_seconds_per_pair": time.seconds_per_pair / first.time.seconds_per_pair,
            "compute_s": time.compute_s, "collectives_s": time.collectives_s, "pcie_s": time.pcie_s,
            "optimizer_s": time.optimizer_s, "step_s": time.step_s,
            "gpu_hours": seconds * prediction.job.world_size / 3600,
        },
    }  # fmt: skip


def print_comparison(rows: Sequence[ComparisonRow], pairs: int) -> None:
    """A table of 100 columns."""
    out = console()
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", overflow="fold")
    for heading in ("verdict", "GPU GiB", "of", "host GiB", "ckpt GiB", "prompt fits", "time", "GPU-h"):
        table.add_column(heading, justify="left" if heading == "verdict" else "right")
    for name, row in zip(short_names([row.planned for row in rows]), rows, strict=True):
        cells = _row(row, rows[0], pairs)
        limit = cells["limit"]["longest_prompt_tokens"]
        table.add_row(
            name,
            f"[{STYLE[cells['verdict']]}]{cells['verdict']}[/]",
            f"{cells['gpu']['peak_bytes'] / GIB:,.1f}",
            f"{cells['gpu']['capacity_bytes'] / GIB:,.1f}",
            f"{cells['host']['peak_bytes'] / GIB:,.0f}",
            f"{cells['disk']['checkpoint_bytes'] / GIB:,.0f}",
            "nothing" if limit is None else f"{limit:,}",
            f"{cells['time']['relative_seconds_per_pair']:.2f}x",
            f"{cells['time']['gpu_hours']:,.0f}",
        )
    out.print(table)
    job = rows[0].planned.job
    out.print(
        f"{rows[0].planned.job.recipe.name}: {job.rows} rows x {job.row_tokens:,} tokens on "
        f"{job.cluster.nodes} x {job.cluster.gpus_per_node} {job.cluster.gpu.name}. "
        f"GPU-hours for {pairs:,} pairs; times are estimates from FLOPs, PCIe and collective bytes, to compare with."
    )
    for note in calibration_notes([row.planned for row in rows]):
        out.print(f"[dim]{note.id}[/]: {note.text}")
