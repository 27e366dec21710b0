"""Ends a run in order: a flag file that training looks for after every step; signals only to its own job."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dpofit.launch.state import STOP_FILE, Running, alive


def ask_to_stop(state: Path) -> None:
    """Drop the flag; ranks on every node save and end after the step they are in."""
    (state / STOP_FILE).touch()


def wait_for_end(found: Running, seconds: float, tick: Callable[[], None] = lambda: None) -> bool:
    """Whether the supervisor has ended within `seconds`; `tick` is called about every second."""
    deadline = time.monotonic() + seconds
    while alive(found.pid, found.started):
        if time.monotonic() >= deadline:
            return False
        tick()
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
    return True


def end_now(found: Running) -> None:
    """SIGTERM to the supervisor, which ends its own job and waits for it (torchrun gives ranks 30 s). If only the
    supervisor is gone, to the job itself; start times guard against numbers given to strangers."""
    for pid, started in ((found.pid, found.started), (found.job_pid, found.job_started)):
        if alive(pid, started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            return
