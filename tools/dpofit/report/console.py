"""The console tables are printed on: 100 columns at most, plain when piped."""

from __future__ import annotations

from rich.console import Console

WIDTH = 100
STYLE = {"fits": "green", "tight": "yellow", "oom": "red"}


def console() -> Console:
    """Standard output, never wider than 100 columns."""
    found = Console()
    return Console(width=min(found.width, WIDTH) if found.is_terminal else WIDTH, highlight=False)
