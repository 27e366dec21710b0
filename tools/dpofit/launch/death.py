"""Says in plain words how a job ended: exit code, signal, the kernel's OOM counter, the first rank that failed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpofit.train.failures import Failed

PHASE_PREFIX = "phase."


@dataclass(frozen=True, slots=True)
class Phase:
    """What one local rank was doing last."""

    local_rank: int
    phase: str
    step: int | None
    time: float

    def __str__(self) -> str:
        return f"{self.phase} {self.step}" if self.step is not None else self.phase


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. `cause` is a stable word; `title` one line; `advice` what to do next."""

    code: int
    cause: str  # finished, stopped, host-memory, killed, gpu-memory, disk-full, ...
    title: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return self.cause in ("finished", "stopped")


@dataclass(frozen=True, slots=True)
class _Text:
    """Words in an exception that tell the cause."""

    pattern: str
    cause: str
    title: str
    advice: str


_EXCEPTIONS = (
    _Text(r"OutOfMemoryError|CUDA out of memory", "gpu-memory", "ran out of GPU memory",
          "`dpofit advise RECIPE` names the smallest change that fits."),
    _Text(r"No space left on device|Errno 28\b|Disk quota exceeded|needs [0-9,]+ bytes, [0-9,]+ are free",
          "disk-full", "had no disk space left",
          "Free space, or point output_dir at a larger disk; the newest whole checkpoint is untouched."),
    _Text(r"Cannot allocate memory|Errno 12\b|MemoryError|can't allocate memory", "host-memory",
          "was refused host memory", "`dpofit predict RECIPE --host-ram …` shows what the node needs."),
    _Text(r"EADDRINUSE|Address already in use|errno: 98", "port-in-use", "found its port in use",
          "Set MASTER_PORT to a free port, the same on every node, or leave it unset on one node."),
    _Text(r"Duplicate GPU detected", "duplicate-gpu", "shares a GPU with another rank",
          "`dpofit preflight --rendezvous HOST:PORT` shows which."),
    _Text(r"invalid device ordinal", "too-few-gpus", "was given a GPU that is not there",
          "Set NPROC_PER_NODE to the number of visible GPUs."),
    _Text(r"Timeout\(ms\)=|Watchdog caught collective operation timeout|Timed out waiting|DistStoreError|"
          r"Connection (reset|closed) by peer|Connection refused", "peer-lost", "waited in vain for another rank",
          "Look at the rank that failed first, on every node; a longer ddp_timeout helps only if it was slow."),
    _Text(r"NCCL error|ncclSystemError|ncclInternalError|ncclUnhandled", "nccl", "got an error from NCCL",
          "`dpofit preflight` checks interfaces, /dev/shm and host identities; NCCL_DEBUG=INFO says more."),
    _Text(r"FileNotFoundError|No such file or directory|does not appear to have a file|Undefined dataset|"
          r"Cannot open .*dataset_info|is not the path to a directory", "missing-file", "did not find a file",
          "`dpofit check RECIPE` and `dpofit preflight RECIPE` look for every path."),
    _Text(r"SaveAborted|save aborted", "save-failed", "could not write a checkpoint",
          "What was there before is untouched; the message says which rank and why."),
    _Text(r"BadInput", "bad-input", "was given something it can't use", ""),
)  # fmt: skip


def explain(
    code: int,
    received: Sequence[int],
    failures: Sequence[Failed],
    phases: Sequence[Phase],
    oom_killed: int | None,
) -> Outcome:
    """`code` is the child's return code (negative: a signal); `received` the signals that reached us meanwhile;
    `oom_killed` how many processes of our cgroups the kernel killed for memory during the run, None if unknown."""
    doing = _doing(phases)
    if received:
        name = signal.Signals(received[0]).name
        advice = "`dpofit launch --detach` outlives its terminal." if received[0] == signal.SIGHUP else ""
        return Outcome(code, "interrupted", f"ended because dpofit received {name}, {doing}", advice)
    if code == 0:
        return Outcome(0, "finished", "finished")
    if code < 0:
        return _by_signal(code, -code, "torchrun", doing, oom_killed)
    if not failures:
        return Outcome(code, "unknown", f"torchrun ended with exit code {code}, {doing}", "Its own words are above.")
    first = min(failures, key=lambda failure: (failure.exitcode == -signal.SIGTERM, failure.timestamp))
    own = [phase for phase in phases if phase.local_rank == first.local_rank]
    doing = _doing(own or phases)
    who = f"rank {first.rank}"
    if first.exitcode < 0:
        return _by_signal(code, -first.exitcode, who, doing, oom_killed)
    for text in _EXCEPTIONS:
        if re.search(text.pattern, first.message):
            return Outcome(code, text.cause, f"{who} {text.title}, {doing}: {_short(first.message)}", text.advice)
    if first.exitcode == 2:
        return Outcome(2, "bad-input", f"{who} was given something it can't use, {doing}", "")
    told = _short(first.message)
    shown = f": {told}" if told else f" with exit code {first.exitcode}"
    return Outcome(code, "exception", f"{who} failed, {doing}{shown}", "The traceback is in the output above.")


def _by_signal(code: int, number: int, who: str, doing: str, oom_killed: int | None) -> Outcome:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL and oom_killed:
        advice = "`dpofit predict RECIPE --host-ram …` shows what the node needs; the save guard keeps saves flat."
        title = f"the kernel killed {who} for want of host memory (cgroup oom_kill went up by {oom_killed}), {doing}"
        return Outcome(code, "host-memory", title, advice)
    if number == signal.SIGKILL:
        unknown = "" if oom_killed is not None else " (no cgroup counter to read here)"
        advice = (
            "No OOM kill was counted in this cgroup: look for the kernel's OOM killer on the host (dmesg), the "
            "scheduler's memory or time limit, or a person."
        )
        return Outcome(code, "killed", f"{who} was killed from outside by SIGKILL{unknown}, {doing}", advice)
    causes = {
        signal.SIGBUS: ("shared-memory", "touched memory that could not be provided", "Most often /dev/shm is full: "
                        "enlarge it (docker --shm-size or --ipc=host) or set dataloader_num_workers=0."),
        signal.SIGSEGV: ("crash", "crashed in native code", "PYTHONFAULTHANDLER=1 shows where."),
        signal.SIGABRT: ("abort", "aborted itself", "NCCL's watchdog and glibc do that; their reason is above."),
        signal.SIGTERM: ("terminated", "was told to end", "A scheduler's limit, another node's failure, or a person."),
        signal.SIGHUP: ("hangup", "lost its terminal", "`dpofit launch --detach` outlives its terminal."),
        signal.SIGILL: ("crash", "met an instruction this CPU has not", "A library was built for a newer CPU."),
    }  # fmt: skip
    cause, what, advice = causes.get(signal.Signals(number) if number < 65 else number, ("signal", "ended", ""))  # type: ignore[call-overload]
    return Outcome(code, cause, f"{who} {what} ({name}), {doing}", advice)


def _doing(phases: Sequence[Phase]) -> str:
    if not phases:
        return "before any rank reported"
    names = list(dict.fromkeys(str(phase) for phase in sorted(phases, key=lambda phase: phase.time)))
    return f"last phase: {' / '.join(names)}"


def _short(message: str) -> str:
    """The exception's last line that says something, at most 300 characters."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    told = lines[0] if lines else ""
    return told if len(told) <= 300 else told[:297] + "…"


def read_phases(state: Path) -> tuple[Phase, ...]:
    """What each local rank was doing last."""
    found = []
    for path in sorted(state.glob(f"{PHASE_PREFIX}*")):
        local_rank = path.name.removeprefix(PHASE_PREFIX)
        try:
            found.append(Phase(int(local_rank), **json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return tuple(found)
