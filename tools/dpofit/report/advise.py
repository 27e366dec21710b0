"""`advise` as JSON and as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dpofit.memory.advise import Advice, Suggestion
from dpofit.memory.levers import KINDS, Change
from dpofit.memory.notes import calibration_note
from dpofit.memory.popular import NoHelp
from dpofit.memory.predict import Prediction
from dpofit.report.console import STYLE, console
from dpofit.units import GIB, format_gib

# Arguments to append to the command, and environment variables to put before it.
Written = Callable[[Sequence[Change]], tuple[list[str], dict[str, str]]]


def advise_document(advice: Advice, no_help: Sequence[NoHelp], written: Written) -> dict[str, Any]:
    """The `dpofit.advise/1` document, bytes as integers; deltas are against the job as it is."""
    base = advice.base
    return {
        "schema": "dpofit.advise/1",
        "recipe": base.job.recipe.name,
        "verdict": base.verdict,
        "verdict_by": {"gpu": base.gpu_verdict, "host": base.host_verdict, "disk": base.disk_verdict},
        **_spaces(base),
        "suggestions": [_suggestion(suggestion, base, written) for suggestion in advice.suggestions],
        "would_not_help": [
            {
                "id": found.id, "change": found.change, "why": found.why,
                "gpu_saved_bytes": found.gpu_saved_bytes, "host_added_bytes": found.host_added_bytes,
            }
            for found in no_help
        ],
        "notes": [asdict(note) for note in [calibration_note(base.job)] if note],
    }  # fmt: skip


def _spaces(found: Prediction) -> dict[str, Any]:
    cluster = found.job.cluster
    return {
        "gpu": {"capacity_bytes": cluster.gpu.capacity_bytes, "peak_bytes": found.gpu.peak_bytes,
                "high_bytes": found.gpu.high_bytes, "allocated_bytes": found.gpu.allocated_bytes},
        "host": {"capacity_bytes": cluster.host_ram_bytes, "peak_bytes": found.host.peak_bytes,
                 "high_bytes": found.host.high_bytes, "pinned_bytes": found.host.pinned_bytes},
        "disk": {"capacity_bytes": cluster.disk_bytes, "total_bytes": found.disk.total_bytes},
    }  # fmt: skip


def _suggestion(suggestion: Suggestion, base: Prediction, written: Written) -> dict[str, Any]:
    arguments, environment = written(suggestion.changes)
    after = suggestion.prediction
    return {
        "kind": suggestion.kind,
        "changes": [{"id": change.id, "title": change.title, "remark": change.remark} for change in suggestion.changes],
        "arguments": arguments,
        "environment": environment,
        "changes_method": suggestion.kind == "method",
        "verdict": after.verdict,
        **_spaces(after),
        "gpu_delta_bytes": after.gpu.peak_bytes - base.gpu.peak_bytes,
        "host_delta_bytes": after.host.peak_bytes - base.host.peak_bytes,
        "disk_delta_bytes": after.disk.total_bytes - base.disk.total_bytes,
        "relative_time": suggestion.relative_time,
        "relative_gpu_time": suggestion.relative_gpu_time,
    }


def print_advice(advice: Advice, no_help: Sequence[NoHelp], written: Written) -> None:
    """What to append, best first, then what not to bother with; 100 columns."""
    out = console()
    base = advice.base
    job, cluster = base.job, base.job.cluster
    out.print(f"[bold]{job.recipe.name}[/] on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}: "
              f"{job.rows} rows x {job.row_tokens:,} tokens")  # fmt: skip
    out.print(f"as it is: [bold {STYLE[base.verdict]}]{base.verdict}[/]   {_sizes(base)}\n")
    if note := calibration_note(job):
        out.print(f"[dim]{note.id}[/]: {note.text}\n")
    if base.verdict == "fits":
        out.print("Nothing needs to change. dpofit limits says how much longer it could be.")
        _print_no_help(out, "Costs memory here", no_help)
        return
    if not advice.suggestions:
        out.print("No change dpofit knows makes it fit.\n")
    for number, suggestion in enumerate(advice.suggestions, 1):
        arguments, environment = written(suggestion.changes)
        titles = ", ".join(change.title for change in suggestion.changes)
        out.print(f"[bold]{number}. {titles}[/]  ({KINDS[suggestion.changes and suggestion.kind]})")  # type: ignore[index]
        before = " ".join(f"{name}={value}" for name, value in environment.items())
        if before:
            out.print(f"   in the environment: [cyan]{before}[/]", soft_wrap=True)
        if arguments:
            out.print(f"   [cyan]{' '.join(arguments)}[/]", soft_wrap=True)
        time = f"{suggestion.relative_gpu_time:.2f}x GPU time a pair"
        out.print(f"   {_sizes(suggestion.prediction)}; {time}")
        for change in suggestion.changes:
            if change.remark:
                out.print(f"   [dim]{change.remark}[/]")
    _print_no_help(out, "Would not help here", no_help)
    out.print("[dim]Append a line to the command (or write its keys into the YAML). Times are estimates.[/]")


def _print_no_help(out: Console, title: str, no_help: Sequence[NoHelp]) -> None:
    if not no_help:
        return
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(overflow="fold", max_width=38)
    table.add_column()
    for found in no_help:
        table.add_row(found.change, found.why)
    out.print(table)


def _sizes(found: Prediction) -> str:
    cluster = found.job.cluster
    host = "" if cluster.host_ram_bytes is None else f" of {cluster.host_ram_bytes / GIB:,.0f}"
    disk = "" if cluster.disk_bytes is None else f" of {cluster.disk_bytes / GIB:,.0f}"
    return (
        f"GPU {found.gpu.peak_bytes / GIB:,.1f} of {format_gib(cluster.gpu.capacity_bytes)}, "
        f"host {found.host.peak_bytes / GIB:,.0f}{host} GiB, disk {found.disk.total_bytes / GIB:,.0f}{disk} GiB"
    )
