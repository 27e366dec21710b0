"""The state folder of a run on this host: who runs, where its log is, how it ended."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dpofit.launch.death import PHASE_PREFIX, Outcome
from dpofit.launch.plan import Plan, write_plan
from dpofit.train.failures import FAILURES_FILE

PID_FILE, OUTCOME_FILE, STOP_FILE, LOG_FILE = "pid", "outcome.json", "stop", "log"


@dataclass(frozen=True, slots=True)
class Running:
    """The supervisor (`pid`, with its start time, so that a reused number is not mistaken for it) and its job."""

    pid: int
    started: float  # psutil create_time of pid
    session: int
    job_pid: int
    job_started: float
    log: str | None


def begin(plan: Plan, job_pid: int, log: Path | None) -> None:
    """Note that this process now supervises `job_pid`."""
    write_plan(plan)
    pid = os.getpid()
    running = Running(
        pid, psutil.Process(pid).create_time(), os.getsid(0), job_pid, _create_time(job_pid),
        None if log is None else str(log),
    )  # fmt: skip
    (plan.state / PID_FILE).write_text(json.dumps(asdict(running)))


def end(state: Path, outcome: Outcome) -> None:
    """Note how it ended."""
    (state / OUTCOME_FILE).write_text(json.dumps({**asdict(outcome), "time": time.time()}))


def clear_run_files(state: Path) -> None:
    """Forget an earlier run: its flag would stop this one, its phases would explain the wrong death."""
    state.mkdir(parents=True, exist_ok=True)
    stale = [state / STOP_FILE, state / OUTCOME_FILE, state / FAILURES_FILE, *state.glob(f"{PHASE_PREFIX}*")]
    for path in stale:
        path.unlink(missing_ok=True)


def running(state: Path) -> Running | None:
    """Who runs here now; None when nobody does, whatever an old pid file says."""
    found = last_run(state)
    return found if found is not None and alive(found.pid, found.started) else None


def last_run(state: Path) -> Running | None:
    """The pid file, alive or not."""
    try:
        return Running(**(_read(state / PID_FILE) or {}))
    except TypeError:  # none, or of another kind
        return None


def outcome(state: Path) -> Outcome | None:
    """How the last run ended; None while it runs, or when its supervisor was killed too."""
    document = _read(state / OUTCOME_FILE) or {}
    document.pop("time", None)
    try:
        return Outcome(**document)
    except TypeError:
        return None


def alive(pid: int, started: float) -> bool:
    """Whether `pid` is still the process that was started then."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _create_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:  # gone already
        return 0.0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
