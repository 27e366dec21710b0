"""Measures `dpofit verify` as a whole process beside `cat` and hashlib's sha256 on one core, page cache warm.

    python benchmarks/verify_speed.py [--gigabytes 4] [--rounds 3] [--write]

Twice: with the guard's manifest (every byte hashed) and without one, as the stock save leaves it (headers, holes of
zeros, CRCs of torch files). All in turns. `--write` renews benchmarks/results/verify-speed.json. Wall seconds depend on
what else the machine does; GB per CPU second (user and system, whole process) is what one core checks, busy or not.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "verify-speed.json"
SHARDS = 4
ONE_CORE = "hashlib's sha256, one core"
HASH_ALL = "import hashlib, sys; [hashlib.file_digest(open(path, 'rb'), 'sha256') for path in sys.argv[1:]]"
ROWS, COLUMNS = 8192, 4096  # one bf16 matrix: 64 MiB


def make_checkpoint(folder: Path, gigabytes: float) -> int:
    """Shards of random bf16 matrices, and a torch file an eighth as large; returns the bytes of all."""
    import torch

    from dpofit.train.guard.safetensors_layout import lay_out

    matrices = max(1, round(gigabytes * 1e9 * 8 / 9 / SHARDS / (2 * ROWS * COLUMNS)))
    noise = os.urandom(2 * ROWS * COLUMNS)
    weight_map = {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        tensors = {f"model.layers.{shard * matrices + i}.w": ("BF16", (ROWS, COLUMNS)) for i in range(matrices)}
        weight_map |= dict.fromkeys(tensors, name)
        with (folder / name).open("wb") as file:
            file.write(lay_out(tensors, {"format": "pt"}, {"BF16": 0}.__getitem__).header)
            for _ in tensors:
                file.write(noise)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    torch.save({"moments": torch.randn(SHARDS * matrices * ROWS * COLUMNS // 16)}, folder / "optimizer.pt")
    return sum(path.stat().st_size for path in folder.iterdir())


def seconds(command: list[str], files: list[Path]) -> tuple[float, float]:
    """Wall and CPU seconds of the whole process, after the files have been read into the page cache."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write the checkpoint (a temporary folder by default)")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    from dpofit.train.guard.manifest import MANIFEST_NAME
    from dpofit.train.guard.seal import seal

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        stock, guarded = Path(name) / "stock", Path(name) / "guarded"
        stock.mkdir()
        guarded.mkdir()
        size = make_checkpoint(stock, arguments.gigabytes)
        for path in stock.iterdir():
            os.link(path, guarded / path.name)
        seal(guarded, None, 1, "benchmark")
        assert (guarded / MANIFEST_NAME).exists()
        files = sorted(stock.iterdir())
        verify = [sys.executable, "-c", "import sys; from dpofit.cli.app import main; main(['verify', sys.argv[1]])"]
        commands = {
            "cat": ["cat", *map(str, files)],
            ONE_CORE: [sys.executable, "-c", HASH_ALL, *map(str, files)],
            "verify, manifest": [*verify, str(guarded)],
            "verify, no manifest": [*verify, str(stock)],
        }
        rounds = [
            {name: seconds(command, files) for name, command in commands.items()} for _ in range(arguments.rounds)
        ]
    table = [
        {
            "what": name,
            "gb_per_s": size / 1e9 / statistics.median(row[name][0] for row in rounds),
            "gb_per_s_best": size / 1e9 / min(row[name][0] for row in rounds),
            "gb_per_cpu_s": size / 1e9 / statistics.median(row[name][1] for row in rounds),
            "wall_against_one_core": statistics.median(row[ONE_CORE][0] / row[name][0] for row in rounds),
        }
        for name in commands
    ]
    print(f"{'':28}{'GB/s':>8}{'best':>8}{'GB/CPU s':>10}{'x hashlib':>13}")
    for row in table:
        speeds = f"{row['gb_per_s']:8.2f}{row['gb_per_s_best']:8.2f}{row['gb_per_cpu_s']:10.2f}"
        print(f"{row['what']:28}{speeds}{row['wall_against_one_core']:13.2f}")
    if arguments.write:
        group = Path("/proc/self/autogroup")  # what decides beside other sessions on a Linux desktop or server
        priority = group.read_text(encoding="ascii").split()[-1] if group.exists() else str(os.nice(0))
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        document = {
            "benchmark": "verify_speed", "date": datetime.date.today().isoformat(), "commit": commit.stdout.strip(),
            "machine": {
                "cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg(), "priority": priority,
            },
            "bytes": size, "summary": table, "rounds": rounds,
        }  # fmt: skip
        RESULT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
