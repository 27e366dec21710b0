"""What is known about ranks that failed, on disk for the launcher to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FAILURES_FILE = "failures.json"


@dataclass(frozen=True, slots=True)
class Failed:
    """One rank that failed; `exitcode` below zero is a signal, `message` the rank's own words or torch's about it."""

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    timestamp: int
    message: str


def note_failures(state: Path, failed: Sequence[Failed]) -> None:
    """Leave them in the state folder; a full disk must not hide the failure itself."""
    try:
        (state / FAILURES_FILE).write_text(json.dumps([asdict(one) for one in failed]))
    except OSError:
        return


def read_failures(state: Path) -> tuple[Failed, ...]:
    """What was left; empty when nothing was, or not whole."""
    try:
        return tuple(Failed(**entry) for entry in json.loads((state / FAILURES_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return ()
