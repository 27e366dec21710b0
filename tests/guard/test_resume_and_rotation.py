"""Runs resume bit for bit from guarded checkpoints, and rotation never deletes what it doesn't know to be whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpofit.train.guard import folders
from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run, train

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("zero", [2, 3])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, zero: int) -> None:
    whole = Run(str(tmp_path / "whole"), zero=zero, steps=4, save_steps=2)
    uninterrupted = values(run_ranks(train, 2, whole))
    for later in ("checkpoint-4",):
        shutil.rmtree(tmp_path / "whole" / later)
    resumed = values(run_ranks(train, 2, replace(whole, resume=True)))
    assert [end["step"] for end in resumed] == [4, 4]
    assert [end["weights"] for end in resumed] == [end["weights"] for end in uninterrupted]


def test_resume_skips_a_newer_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=2, final_save=False)
    values(run_ranks(train, 2, run))
    with (tmp_path / "checkpoint-2" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    newest = folders.newest_resumable(tmp_path)
    assert newest is not None and newest.name == "checkpoint-1"


def test_a_stock_checkpoint_cut_short_is_not_resumed_from(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")  # the stock code writes it last
    newest = folders.newest_resumable(tmp_path)
    assert newest is not None and newest.name == "checkpoint-1"


def test_rotation_keeps_the_limit_and_never_touches_unknown_folders(tmp_path: Path) -> None:
    unknown = tmp_path / "checkpoint-0"
    unknown.mkdir()
    (unknown / "mine.bin").write_text("from another run")
    values(run_ranks(train, 2, Run(str(tmp_path), steps=4, save_total_limit=2, final_save=False)))
    assert [step for step, _ in folders.checkpoints(tmp_path)] == [0, 3, 4]
    assert (unknown / "mine.bin").read_text() == "from another run"


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=1, final_save=False)
    values(run_ranks(train, 2, run))
    first = (tmp_path / "checkpoint-1" / "dpofit-manifest.json").stat().st_ino
    values(run_ranks(train, 2, run))
    assert (tmp_path / "checkpoint-1" / "dpofit-manifest.json").stat().st_ino != first
    assert [path.name for path in tmp_path.glob(".dpofit*")] == []


def test_a_save_without_optimizer_has_only_the_model(tmp_path: Path) -> None:
    values(run_ranks(train, 2, Run(str(tmp_path), steps=1, save_only_model=True, final_save=False)))
    names = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "trainer_state.json", "training_args.bin",
        "dpofit-manifest.json",
    }  # fmt: skip


def test_every_save_leaves_a_record(tmp_path: Path) -> None:
    values(run_ranks(train, 2, Run(str(tmp_path), steps=1)))
    rows = [json.loads(line) for line in (tmp_path / "dpofit" / "saves.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, None]
    assert all(row["schema"] == "dpofit.save/1" and row["bytes"] > 0 and row["seconds"] > 0 for row in rows)
    # 259·32 twice, final norm, two layers of 12,832 + ... : the same sum as the index's, 2 bytes each
    parameters = 2 * 259 * 32 + 32 + 2 * (32 * 32 + 32 + 2 * (32 * 16 + 16) + 32 * 32 + 3 * 32 * 64 + 2 * 32)
    assert [row["native_bytes"] for row in rows] == [2 * parameters] * 2


def best_checkpoint(run: Run) -> Any:
    from dpofit.train import guard
    from tests.guard.runs import build_trainer

    guard.install()
    trainer = build_trainer(run)
    trainer.train()
    return trainer.state.best_model_checkpoint


def test_the_best_checkpoint_is_remembered_by_its_final_place(tmp_path: Path) -> None:
    extra = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}
    run = Run(str(tmp_path), steps=2, final_save=False, extra=extra)
    best = values(run_ranks(best_checkpoint, 2, run))[0]
    assert best is not None and Path(best).parent == tmp_path and Path(best).is_dir()
    for _, path in folders.checkpoints(tmp_path):
        remembered = json.loads((path / "trainer_state.json").read_text())["best_model_checkpoint"]
        assert remembered is not None and Path(remembered).parent == tmp_path


def expected_and_written_state(run: Run) -> tuple[int, int]:
    import os

    from dpofit.train import guard
    from dpofit.train.guard.room import state_bytes
    from tests.guard.runs import build_trainer

    guard.install()
    trainer = build_trainer(run)
    trainer.train()
    pattern = f"checkpoint-1/global_step1/*zero_pp_rank_{os.environ['RANK']}_mp_rank_00_optim_states.pt"
    return state_bytes(trainer), next(Path(run.output_dir).glob(pattern)).stat().st_size


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_room_that_optimizer_files_need_is_known_before_they_are_written(tmp_path: Path, zero: int) -> None:
    run = Run(str(tmp_path), zero=zero, vocab=4096, hidden=64, steps=1, final_save=False)
    for expected, written in values(run_ranks(expected_and_written_state, 2, run)):
        assert 0.97 * written < expected < 1.03 * written


def two_trainers(run: Run) -> list[int]:
    import os

    os.environ["DPOFIT_GUARD_TIMEOUT"] = "10"
    return [train(replace(run, output_dir=f"{run.output_dir}/{name}"))["step"] for name in ("first", "second")]


def test_a_second_trainer_in_one_process_saves_as_well(tmp_path: Path) -> None:
    run = Run(str(tmp_path), zero=2, steps=2)
    assert values(run_ranks(two_trainers, 2, run)) == [[2, 2], [2, 2]]
    for name in ("first", "second"):
        assert [step for step, _ in folders.checkpoints(tmp_path / name)] == [1, 2]
        assert folders.looks_whole(tmp_path / name)
