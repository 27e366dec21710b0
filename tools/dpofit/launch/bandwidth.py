"""All-reduce bandwidth within a node, by nccl-tests where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

PROGRAM = "all_reduce_perf"  # https://github.com/NVIDIA/nccl-tests
_AVERAGE = re.compile(r"^#\s*Avg bus bandwidth\s*:\s*([0-9.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What was measured, in nccl-tests' GB/s (10^9 bytes), or why not."""

    command: str
    bus_gb_per_s: float | None
    error: str = ""


def measure_all_reduce(gpus: int, environment: Mapping[str, str], timeout_s: float = 60.0) -> Bandwidth:
    """One all-reduce of 256 MiB over `gpus` GPUs of this machine, 5 times. Uses CUDA, so only when asked for."""
    program = shutil.which(PROGRAM, path=environment.get("PATH"))
    if program is None:
        return Bandwidth("", None, f"{PROGRAM} is not installed")
    if gpus < 2:
        return Bandwidth("", None, f"{gpus} visible GPUs")
    command = [program, "-b", "256M", "-e", "256M", "-n", "5", "-w", "2", "-g", str(gpus)]
    shown = " ".join([PROGRAM, *command[1:]])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=dict(environment))
    except subprocess.TimeoutExpired:
        return Bandwidth(shown, None, f"no end within {timeout_s:g} s")
    except OSError as error:
        return Bandwidth(shown, None, str(error))
    found = _AVERAGE.search(done.stdout)
    if done.returncode != 0 or found is None:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no output"]
        return Bandwidth(shown, None, f"exit code {done.returncode}: {last[0][:200]}")
    return Bandwidth(shown, float(found[1]))
