"""How fast `dpofit doctor` reads a log, whole process on one core, beside `grep -c` over the same file.

    python benchmarks/doctor_speed.py [--megabytes 200] [--json benchmarks/results/doctor-speed.json]

Three logs: a training run as it comes (metrics, tqdm, DeepSpeed and warning lines), the same with a sentence of
prose in every record (runs that print samples), and random text (nothing repeats).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROSE = """when a model answers well people tend to read past its mistakes and the pairs that were meant to teach it
caution end up teaching it style so the longer answer wins and nobody notices until the rewards drift apart"""
MAIN = "from dpofit.cli.app import main; main()"
KEYS = "loss grad_norm learning_rate rewards/chosen rewards/rejected rewards/margins logps/chosen epoch"


def training(rng: random.Random, step: int) -> Iterator[str]:
    """What LLaMA-Factory with DeepSpeed writes around one logged step."""
    values = [rng.random() for _ in range(8)]
    keys = KEYS.split()
    clock = f"{step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d}"
    for part in range(4):
        bar = "█" * (step % 10) + " " * (10 - step % 10)
        yield f"\r {step % 100:2d}%|{bar}| {step}/420000 [{clock}<31:02:{part:02d}, {2 + values[part]:.2f}s/it]"
    yield "\n" + repr(dict(zip(keys, (round(value, 4) for value in values), strict=True))) + "\n"
    yield (
        f"[2026-10-28 {clock},{step % 1000:03d}] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, "
        f"lr=[{values[0]:.3e}], mom=[(0.9, 0.999)]\n"
    )
    if step % 10 == 0:
        for rank in range(8):
            yield (
                f"[rank{rank}]:W1028 {clock}.{step % 1000:03d} {7000 + rank} torch/utils/checkpoint.py:429] "
                "UserWarning: torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly.\n"
            )


def prose(rng: random.Random, step: int) -> Iterator[str]:
    yield from training(rng, step)
    yield "sample: " + " ".join(rng.choices(PROSE.split(), k=40)) + "\n"


def noise(rng: random.Random, step: int) -> Iterator[str]:
    yield "".join(rng.choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJ 0123456789", k=120)) + "\n"


def write(path: Path, megabytes: float, record: Callable[[random.Random, int], Iterator[str]]) -> None:
    rng = random.Random(1)
    written, step = 0, 0
    with path.open("w", encoding="utf-8", newline="") as out:
        while written < megabytes * 1e6:
            text = "".join(record(rng, step))
            out.write(text)
            written += len(text.encode())
            step += 1


def measure(path: Path) -> dict[str, float]:
    """Best of three, user + system seconds of the whole process, and its peak resident memory."""

    def cost(command: list[str]) -> tuple[float, float]:
        best, peak_mib = float("inf"), 0.0
        for _ in range(3):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})
            _, _, used = os.wait4(process.pid, 0)
            process.returncode = 0  # waited for
            best, peak_mib = min(best, used.ru_utime + used.ru_stime), used.ru_maxrss / 1024
        return best, peak_mib

    grep_seconds, _ = cost(["grep", "-c", "OutOfMemoryError", str(path)])
    size = path.stat().st_size / 1e6
    found: dict[str, float] = {"megabytes": round(size, 1), "grep_seconds": round(grep_seconds, 3)}
    seconds, peak_mib = cost([sys.executable, "-c", MAIN, "doctor", "--json", str(path)])
    found |= {
        "seconds": round(seconds, 2),
        "mb_per_s": round(size / seconds),
        "ratio_to_grep": round(seconds / grep_seconds, 1),
        "peak_mib": round(peak_mib),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, record in (("training", training), ("prose", prose), ("noise", noise)):
            path = Path(folder) / f"{name}.log"
            write(path, arguments.megabytes, record)
            results[name] = measure(path)
            print(name, results[name], flush=True)
            path.unlink()
    if arguments.json:
        about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "cores": os.cpu_count()}
        arguments.json.write_text(json.dumps({**about, "logs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
