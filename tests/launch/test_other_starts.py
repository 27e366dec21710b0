"""Those who start everything themselves get the same run: scripts/train.py under stock torchrun and accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.runs import environment, memory_lines, nothing_left, write_run

pytestmark = pytest.mark.stack

TRAIN = Path(__file__).parents[2] / "scripts/train.py"
BIN = Path(sys.executable).parent


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    """To its end; what it printed."""
    cpu = {"DPOFIT_CPU": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}", **variables}
    with nothing_left(folder):
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env=environment(**cpu), capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_stock_torchrun_and_tensorboard_shows_memory_beside_the_loss(tiny_model: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "my run", tiny_model, max_steps=2)
    torchrun: list[str | Path] = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", TRAIN]
    run([*torchrun, recipe, "report_to=tensorboard"], recipe.parent)
    assert [(line["step"], line["rank"]) for line in memory_lines(recipe.parent)].count((2, 1)) == 1

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [events] = (recipe.parent / "output").rglob("events.out.tfevents.*")
    shown = EventAccumulator(str(events.parent)).Reload()
    rss_bytes = [line["host_rss_bytes"] for line in memory_lines(recipe.parent) if line["rank"] == 0]
    assert {"train/loss", "train/memory/host_rss_gib"} <= set(shown.Tags()["scalars"])
    in_gib = [event.value for event in shown.Scalars("train/memory/host_rss_gib")]
    assert in_gib == pytest.approx([n_bytes / 2**30 for n_bytes in rss_bytes], rel=1e-5)


def test_wandb_gets_the_memory_beside_the_loss(tiny_model: Path, tmp_path: Path) -> None:
    """Where wandb is installed; it is none of our dependencies."""
    pytest.importorskip("wandb")
    recipe = write_run(tmp_path / "my run", tiny_model, max_steps=2)
    train: list[str | Path] = [sys.executable, TRAIN, recipe, "report_to=wandb"]
    run(train, recipe.parent, WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    [logged] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert len(memory_lines(recipe.parent)) == 2
    for line in memory_lines(recipe.parent):  # values are kept as JSON text
        assert json.dumps(line["host_rss_bytes"] / 2**30).encode() in logged.read_bytes()
    assert b"train/memory/host_rss_gib" in logged.read_bytes()


def test_accelerate_with_one_process(tiny_model: Path, tmp_path: Path) -> None:
    recipe = write_run(tmp_path / "one", tiny_model, max_steps=1)
    accelerate: list[str | Path] = [BIN / "accelerate", "launch", "--num_processes", "1", "--num_machines", "1"]
    run([*accelerate, "--mixed_precision", "no", "--dynamo_backend", "no", TRAIN, recipe], recipe.parent)
    assert [(line["step"], line["rank"]) for line in memory_lines(recipe.parent)] == [(1, 0)]
    assert (recipe.parent / "output" / "adapter_model.safetensors").exists()
