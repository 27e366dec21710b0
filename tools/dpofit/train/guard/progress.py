"""The bar on rank 0's terminal while a long save runs, and the one line after every save."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dpofit.units import GIB, MIB

_LONG_SAVE_BYTES = 4 * GIB


@contextmanager
def weights_bar(total_bytes: int, world_size: int, backend: str) -> Iterator[Callable[[int], None]]:
    """Yields a function to report written bytes to. Silent for short saves and where stderr is no terminal.

    Under `direct` rank 0 knows only its own share, which stands for all: ranks hold equal partitions.
    """
    if total_bytes < _LONG_SAVE_BYTES or not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    factor = world_size if backend == "direct" else 1
    columns = (
        TextColumn("saving weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights", total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes * factor)


_COST = {
    "routed": "rank 0 writes alone; the other ranks send it their slices in chunks",
    "gather": "rank 0 writes alone, one gathered parameter at a time",
    "native-safe": "the stock code writes, and holds the whole model on rank 0 while it does",
}


def slower_line(backend: str, reason: str) -> str | None:
    """What to tell once about saves that take a slower way than direct; None for direct."""
    if backend not in _COST:
        return None
    return f"dpofit save guard: {reason}; so saves go by {backend}, correct but slower: {_COST[backend]}"


def one_line(
    folder: str, backend: str, written: int, seconds: float, peak_extra_bytes: int | None, native: int, reason: str
) -> str:
    """What a save did, in one line of a log."""
    peak = "unknown" if peak_extra_bytes is None else f"{peak_extra_bytes / MIB:,.0f} MiB"
    speed = written / max(seconds, 1e-9) / 1e9
    return (
        f"dpofit save guard: {folder}: {written / 1e9:,.2f} GB in {seconds:,.1f} s ({speed:,.2f} GB/s), "
        f"{backend} ({reason}), peak extra memory {peak} a rank; the stock save holds {native / GIB:,.2f} GiB "
        f"on rank 0, {2 * native / GIB:,.2f} with DeepSpeed's leak"
    )
