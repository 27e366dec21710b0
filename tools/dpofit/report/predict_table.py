"""A prediction as a person reads it: the verdict, where the peak is, what it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from dpofit.memory.explain import explain as sums
from dpofit.memory.predict import Prediction, Traced
from dpofit.recipe.notes import Note
from dpofit.report.console import STYLE, console
from dpofit.units import GIB, format_gib


def print_prediction(
    prediction: Prediction, notes: Sequence[Note], explain: bool, traced: Traced | None = None
) -> None:
    out = console()
    job = prediction.job
    cluster = job.cluster
    tokens = f"{job.rows} rows x {job.row_tokens:,} tokens"
    out.print(f"[bold]{job.recipe.name}[/] on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}: {tokens}")
    style = STYLE[prediction.verdict]
    out.print(f"verdict: [bold {style}]{prediction.verdict}[/]   (peaks of {job.model.name}, interval in brackets)\n")
    out.print(_spaces(prediction))
    out.print(_phases(prediction))
    if traced is not None:
        out.print(_trace(prediction, traced))
        for substitution in traced.substitutions:
            out.print(f"[dim]traced with[/]: {substitution}")
    if explain:
        out.print(_sums(prediction))
    for note in notes:
        out.print(f"[dim]{note.id}[/]: {note.text}", soft_wrap=False)


def _spaces(prediction: Prediction) -> Table:
    gpu, host, disk = prediction.gpu, prediction.host, prediction.disk
    cluster = prediction.job.cluster
    table = Table(box=None, pad_edge=False)
    for heading in ("", "peak", "interval", "capacity", "verdict", "peak in"):
        table.add_column(heading, justify="left" if heading in ("", "verdict", "peak in") else "right")
    rows = (
        ("GPU", gpu.peak_bytes, gpu.low_bytes, gpu.high_bytes, gpu.capacity_bytes, prediction.gpu_verdict,
         gpu.peak.phase),
        ("host, a node", host.peak_bytes, host.low_bytes, host.high_bytes, cluster.host_ram_bytes,
         prediction.host_verdict, host.peak_phase),
        ("disk", disk.total_bytes, disk.total_bytes, disk.total_bytes, cluster.disk_bytes, prediction.disk_verdict,
         f"checkpoint {format_gib(disk.checkpoint_bytes)}"),
    )  # fmt: skip
    for name, peak, low, high, capacity, verdict, phase in rows:
        table.add_row(
            name, format_gib(peak), f"[{low / GIB:,.1f}, {high / GIB:,.1f}]".replace("[", "\\["),
            format_gib(capacity) if capacity is not None else "unknown",
            f"[{STYLE[verdict]}]{verdict}[/]" if verdict else "not checked", phase,
        )  # fmt: skip
    return table


def _phases(prediction: Prediction) -> Table:
    gpu = prediction.gpu
    table = Table(title="GPU by phase, steady step (GiB)", title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    table.add_column("allocated", justify="right")
    table.add_column("reserved", justify="right")
    table.add_column("made of")
    for name, peak in gpu.phases.items():
        parts = sorted(peak.breakdown.items(), key=lambda item: -item[1])[:4]
        made_of = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts if size >= GIB / 20)
        marked = f"[bold]{name}[/]" if peak is gpu.peak else name
        held = gpu.reserved.phases.get(name)
        table.add_row(marked, f"{peak.size_bytes / GIB:,.1f}", f"{held / GIB:,.1f}" if held else "", made_of)
    return table


def _trace(prediction: Prediction, traced: Traced) -> Table:
    table = Table(title="Allocated, by two routes (GiB)", title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    for heading in ("closed form", "traced", "difference"):
        table.add_column(heading, justify="right")
    for name, size_bytes in traced.phases.items():
        closed = prediction.gpu.phases[name].size_bytes
        table.add_row(name, f"{closed / GIB:,.2f}", f"{size_bytes / GIB:,.2f}", f"{closed / size_bytes - 1:+.2%}")
    return table


def _sums(prediction: Prediction) -> Table:
    table = Table(title="The sum behind every figure at the peak", title_justify="left", box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("GiB", justify="right")
    table.add_column("=")
    for line in sums(prediction):
        table.add_row(line.what, f"{line.figure_bytes / GIB:,.2f}", line.arithmetic)
    return table
