"""A detached run: closing the terminal does not end it, `status` shows it, `stop` saves and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.runs import (
    DPOFIT,
    dpofit,
    environment,
    memory_lines,
    nothing_left,
    started_from,
    until,
    write_run,
)

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder with a space in its name, started with --detach by a shell that then got SIGHUP."""
    folder = tmp_path_factory.mktemp("runs") / "my run"
    recipe = write_run(folder, tiny_model)
    with nothing_left(folder):
        terminal = subprocess.Popen(
            [*DPOFIT, "launch", str(recipe), "--detach"], cwd=folder, env=environment(), start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        output, _ = terminal.communicate(timeout=120)
        assert terminal.returncode == 0, output
        with contextlib.suppress(ProcessLookupError):  # nobody of it is left: what we want
            os.killpg(terminal.pid, signal.SIGHUP)  # the group of the command that was typed
        yield folder


def test_plain_nohup_torchrun_dies_when_the_terminal_closes(tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'up').touch()\ntime.sleep(600)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    with nothing_left(tmp_path):
        job = subprocess.Popen(
            ["nohup", *torchrun], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until((tmp_path / "up").exists, "torchrun's worker", 120)
        os.killpg(job.pid, signal.SIGHUP)
        assert job.wait(timeout=60) != 0


def test_detached_run_goes_on_after_sighup(folder: Path) -> None:
    until(lambda: memory_lines(folder), "the first step")
    before = memory_lines(folder)[-1]["step"]
    until(lambda: memory_lines(folder)[-1]["step"] > before + 1, "more steps", 60)


def test_detached_run_has_no_terminal_and_a_session_of_its_own(folder: Path) -> None:
    state = json.loads(next((folder / ".dpofit").glob("*/pid")).read_text())
    assert state["session"] == state["pid"] != os.getsid(0)
    assert started_from(folder)[0].terminal() is None


def test_status_shows_step_loss_and_log(folder: Path) -> None:
    until(lambda: memory_lines(folder), "the first step")
    done = dpofit("status", folder, "--json", cwd=folder)
    status = json.loads(done.stdout)
    assert done.returncode == 0
    assert status["state"] == "running"
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    assert status["ranks"][0]["step"] >= 1
    assert {phase["phase"] for phase in status["phases"]} <= {"train", "after step"}
    assert Path(status["log"]).read_text()


def test_memory_log_has_a_line_for_each_rank_and_step(folder: Path) -> None:
    lines = until(
        lambda: [line for line in memory_lines(folder) if line["step"] <= 2][3:] and memory_lines(folder), "two steps"
    )
    first = [line for line in lines if line["step"] == 1]
    assert sorted(line["rank"] for line in first) == [0, 1]
    assert all(line["schema"] == "dpofit.memory/1" for line in lines)
    assert all(100 * 2**20 < line["host_rss_bytes"] < 8 * 2**30 for line in first)
    assert first[0]["gpu_allocated_peak_bytes"] is None
    assert first[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_rank_table_is_printed_before_training(folder: Path) -> None:
    until(lambda: memory_lines(folder), "the first step")
    log = next((folder / ".dpofit").glob("*/log")).read_text()
    host = next((folder / ".dpofit").glob("*/log")).parent.name
    assert f"dpofit: rank   0  {host}  local rank 0  GPU none" in log
    assert f"dpofit: rank   1  {host}  local rank 1  GPU none" in log


def test_a_second_run_in_the_same_folder_is_refused(folder: Path) -> None:
    done = dpofit("launch", folder, cwd=folder)
    assert done.returncode == 2
    assert "a run is going on here" in done.stderr


def test_a_second_run_into_the_same_output_dir_is_refused(folder: Path, tiny_model: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", tiny_model)
    done = dpofit("launch", other, f"output_dir={folder / 'output'}", "--force", cwd=other.parent)
    assert done.returncode == 2
    assert "another run trains into it now (pid " in done.stderr


def test_stop_saves_and_ends_every_rank(folder: Path) -> None:
    """Last in this file: ends the run."""
    until(lambda: memory_lines(folder), "the first step")
    done = dpofit("stop", folder, "--wait", "200", "--json", cwd=folder)
    assert (done.returncode, json.loads(done.stdout)) == (
        0, {"schema": "dpofit.stop/1", "ended": True, "title": "finished"},
    )  # fmt: skip
    checkpoint = next((folder / "output").glob("checkpoint-*"))
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(
        checkpoint.name.rpartition("-")[2]
    )
    time.sleep(1)
    assert started_from(folder) == []
    status = json.loads(dpofit("status", folder, "--json", cwd=folder).stdout)
    assert status["state"] == "finished"
