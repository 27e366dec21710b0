"""The named steps of a save, in order, and a place for tests and progress reports to listen."""

from __future__ import annotations

from collections.abc import Callable

CHECKPOINT_STEPS = (
    "begin", "probed", "planned", "weights-started", "weights-written", "state-started", "state-written",
    "manifest-written", "committed", "rotated",
)  # fmt: skip
FINAL_STEPS = (
    "begin", "probed", "planned", "weights-started", "weights-written", "manifest-written", "committed",
)  # fmt: skip

listeners: list[Callable[[str], None]] = []


def reached(name: str) -> None:
    """This rank has come to step `name`."""
    for listener in listeners:
        listener(name)
