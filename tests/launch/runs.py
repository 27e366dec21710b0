"""Real runs for these tests: a tiny model, a recipe for two CPU ranks, the `dpofit` command, what is left of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ASSETS = Path(__file__).parents[2] / "tools/dpofit/launch/smoke_assets"
DPOFIT = (sys.executable, "-c", "from dpofit.cli.app import main; main()")
RECIPE = """\
model_name_or_path: {folder}/model
template: qwen
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 4
dataset: smoke_pairs
dataset_dir: {folder}/data
cutoff_len: 256
per_device_train_batch_size: 1
gradient_accumulation_steps: 1
learning_rate: 1.0e-3
max_steps: {max_steps}
logging_steps: 1
save_strategy: steps
save_steps: 1000000
bf16: true
report_to: none
output_dir: {folder}/output
"""


def write_run(folder: Path, model: Path, max_steps: int = 1_000_000) -> Path:
    """A run folder with a recipe that two CPU ranks can train; returns the recipe."""
    folder.mkdir(parents=True)
    shutil.copytree(model, folder / "model")
    (folder / "data").mkdir()
    for path in ASSETS.glob("*.json"):
        shutil.copyfile(path, folder / "data" / path.name)
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder, max_steps=max_steps))
    return recipe


def environment(**variables: str) -> dict[str, str]:
    """Ours, with two CPU ranks and nothing of a job around us."""
    dropped = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "DPOFIT_CPU_RANKS": "2", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}


def dpofit(*arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None, timeout_s: float = 240) -> Any:
    """Run a command to its end."""
    return subprocess.run(
        [*DPOFIT, *map(str, arguments)], cwd=cwd, env=dict(env or environment()), capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip


def until(condition: Callable[[], Any], what: str, timeout_s: float = 240) -> Any:
    """Wait for `condition` to be true; fails the test by name otherwise."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")


def started_from(folder: Path) -> list[psutil.Process]:
    """Living processes whose command line names `folder`."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in word for word in words):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Afterwards ends whatever a failed test left behind, by pid."""
    try:
        yield
    finally:
        for process in started_from(folder):
            try:
                process.kill()
            except psutil.Error:
                continue


def memory_lines(folder: Path) -> list[dict[str, Any]]:
    """The memory log of node 0 so far."""
    path = folder / "output" / "dpofit" / "memory.0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
