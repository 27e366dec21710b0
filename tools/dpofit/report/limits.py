"""`limits` as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from dpofit.report.console import console
from dpofit.report.rows import LimitRow, calibration_notes, short_names


def limits_document(rows: Sequence[LimitRow]) -> dict[str, Any]:
    """The `dpofit.limits/1` document."""
    notes = [asdict(note) for note in calibration_notes([row.planned for row in rows])]
    return {"schema": "dpofit.limits/1", "rows": [limit_json(row) for row in rows], "notes": notes}


def limit_json(row: LimitRow) -> dict[str, Any]:
    """One row."""
    limit, written = row.limit, row.planned.written_for
    documented = None
    if written is not None and written.documented_prompt_tokens is not None:
        documented = {"prompt_tokens": written.documented_prompt_tokens, "source": written.documented_source}
    return {
        "recipe": row.planned.job.recipe.name,
        "longest_prompt_tokens": limit.prompt_tokens,
        "longest_not_oom_prompt_tokens": limit.not_oom_prompt_tokens,
        "response_tokens": row.response_tokens,
        "cutoff_len": None if limit.prompt_tokens is None else limit.prompt_tokens + row.response_tokens,
        "binding": limit.binding,
        "documented": documented,
    }


def print_limits(rows: Sequence[LimitRow]) -> None:
    """A table of 100 columns, grouped by cluster."""
    out = console()
    for cluster in dict.fromkeys(_cluster(row) for row in rows):
        out.print(f"Longest prompt, answers of {rows[0].response_tokens:,} tokens, on {cluster}")
        table = Table(box=None, pad_edge=False)
        table.add_column("recipe")
        for heading in ("fits to", "oom past", "cutoff_len"):
            table.add_column(heading, justify="right")
        table.add_column("binds")
        table.add_column("documented", justify="right")
        for name, row in zip(short_names([row.planned for row in rows]), rows, strict=True):
            if _cluster(row) == cluster:
                table.add_row(name, *_cells(row))
        out.print(table)
        out.print()
    out.print("fits to: the whole interval is within capacity. oom past: even its lowest figure is not.")
    for note in calibration_notes([row.planned for row in rows]):
        out.print(f"[dim]{note.id}[/]: {note.text}")


def _cluster(row: LimitRow) -> str:
    cluster = row.planned.job.cluster
    ram = "" if cluster.host_ram_bytes is None else f", {cluster.host_ram_bytes / 2**30:,.0f} GiB a node"
    return f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}{ram}"


def _cells(row: LimitRow) -> list[str]:
    cells = limit_json(row)
    documented = cells["documented"]

    def tokens(value: int | None) -> str:
        return "nothing" if value is None else f"{value:,}"

    return [
        tokens(cells["longest_prompt_tokens"]), tokens(cells["longest_not_oom_prompt_tokens"]),
        "" if cells["cutoff_len"] is None else f"{cells['cutoff_len']:,}", cells["binding"],
        f"{documented['prompt_tokens']:,}" if documented else "",
    ]  # fmt: skip
