"""Runs a plan to its end: one child in a session of its own, signals passed on, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil

from dpofit.launch.death import Outcome, explain, read_phases
from dpofit.launch.plan import Plan, job_environment
from dpofit.launch.state import begin, clear_run_files, end
from dpofit.train.cgroup import oom_kills
from dpofit.train.failures import read_failures

GRACE_S = 35.0  # torchrun gives its ranks 30 s between SIGTERM and SIGKILL
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_plan(plan: Plan, log: Path | None = None, quiet: bool = False) -> Outcome:
    """Start, wait, explain. Output goes where ours goes, or to `log`. OSError if it can't be started."""
    clear_run_files(plan.state)
    environment = job_environment(plan, os.environ)
    environment["DPOFIT_STATE"] = str(plan.state)
    environment["PYTHONUNBUFFERED"] = "1"
    kills_before = oom_kills()
    output = subprocess.DEVNULL if quiet else None
    with contextlib.ExitStack() as stack:
        if log is not None:
            output = stack.enter_context(log.open("ab", buffering=0))  # type: ignore[assignment]
        job = subprocess.Popen(
            plan.command, cwd=plan.folder, env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT if log is not None else output,
        )  # fmt: skip
        begin(plan, job.pid, log)
        family = _Family(job.pid)
        received: list[int] = []
        with _passed_on(job, received):
            while True:
                try:
                    code = job.wait(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    family.look()
        family.look()
        family.end()
    kills_after = oom_kills()
    killed_here = None if kills_before is None or kills_after is None else kills_after - kills_before
    outcome = explain(code, received, read_failures(plan.state), read_phases(plan.state), killed_here)
    end(plan.state, outcome)
    return outcome


class _Family:
    """Every process the job has started, remembered while it runs: workers lead sessions of their own, and a worker
    whose agent was killed has lost its parent."""

    def __init__(self, pid: int) -> None:
        self._root = pid
        self._members: dict[int, psutil.Process] = {}

    def look(self) -> None:
        for known in [self._root, *self._members]:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(known).children(recursive=True):
                    self._members.setdefault(child.pid, child)

    def end(self) -> None:
        """End what outlived the job: SIGTERM, some seconds, SIGKILL. psutil checks start times, so a number that was
        given to a stranger meanwhile is left alone."""
        alive = [process for process in self._members.values() if process.is_running()]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, stubborn = psutil.wait_procs(alive, timeout=5)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=5)


@contextlib.contextmanager
def _passed_on(job: subprocess.Popen, received: list[int]) -> Iterator[None]:
    """Inside, signals meant to end us end the job in an orderly way first: SIGTERM, and SIGKILL after the grace."""
    deadline: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not deadline:
            deadline.append(time.monotonic() + GRACE_S)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            job.send_signal(signal.SIGTERM)

    def too_late(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            job.kill()

    previous: dict[int, Callable[..., object] | int | None] = {
        number: signal.signal(number, pass_on) for number in _SIGNALS
    }
    previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, too_late)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
