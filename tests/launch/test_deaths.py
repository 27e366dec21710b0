"""Whatever ends a run, there is one clear message, the right exit code, and no process left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launch.runs import DPOFIT, dpofit, environment, nothing_left, started_from, until, write_run

pytestmark = pytest.mark.stack


@contextmanager
def launched(folder: Path, recipe: Path) -> Iterator[subprocess.Popen]:
    """A foreground launch whose ranks have reported their first phase."""
    with nothing_left(folder):
        job = subprocess.Popen(
            [*DPOFIT, "launch", str(recipe)], cwd=folder, env=environment(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        until(lambda: len(list(folder.glob(".dpofit/*/phase.*"))) == 2, "both ranks", 120)
        yield job


def rank_process(folder: Path, rank: int) -> psutil.Process:
    for process in started_from(folder):
        try:
            if process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no process is rank {rank}")


def test_a_killed_rank_is_named_with_its_signal(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launched(folder, write_run(folder, tiny_model)) as job:
        rank_process(folder, 1).kill()
        output, _ = job.communicate(timeout=120)
        assert job.returncode == 1
        said = [line for line in output.splitlines() if line.startswith("dpofit: rank 1 was killed")]
        assert len(said) == 1
        assert "was killed from outside by SIGKILL" in said[0]
        assert "last phase: " in said[0]
        assert started_from(folder) == []
    status = dpofit("status", folder, "--json", cwd=folder)
    assert status.returncode == 1
    assert json.loads(status.stdout)["state"] == "died"


def test_ranks_end_when_their_launcher_is_killed_outright(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launched(folder, write_run(folder, tiny_model)) as job:
        job.kill()
        job.wait(timeout=10)
        until(lambda: not started_from(folder), "the end of all processes", 60)


def test_ctrl_c_ends_everything(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with launched(folder, write_run(folder, tiny_model)) as job:
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=120)
        assert job.returncode == 1
        assert "dpofit: ended because dpofit received SIGINT" in output
        assert started_from(folder) == []


def test_an_exception_in_a_rank_is_told_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = write_run(folder, tiny_model)
    (folder / "data" / "pairs.json").write_text('[{"question": "no such column"}]')
    with nothing_left(folder):
        done = dpofit("launch", recipe, cwd=folder)
    # Both ranks raise; the one that torchrun saw first is named.
    said = [line for line in done.stdout.splitlines() if re.match(r"dpofit: rank [01] failed", line)]
    assert done.returncode == 1
    assert len(said) == 1, done.stdout[-3000:]
    assert "last phase: dataset" in said[0]
    assert "KeyError" in said[0] or "instruction" in said[0]


def test_a_port_in_use_stops_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = write_run(folder, tiny_model)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        done = dpofit("launch", recipe, cwd=folder, env=environment(MASTER_PORT=str(port)))
    assert done.returncode == 1
    assert f"error: port {port} is in use on this machine" in done.stdout
    assert not (folder / ".dpofit").exists()


def test_a_run_folder_that_cannot_hold_its_state_is_told_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = write_run(folder, tiny_model)
    (folder / ".dpofit").touch()
    for options in ((), ("--detach",)):
        done = dpofit("launch", recipe, *options, cwd=folder)
        assert done.returncode == 2
        assert "the run can't be started: [Errno 20] Not a directory" in done.stderr
        assert started_from(folder) == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dataset=no_such_set", "error: dataset no_such_set is not defined in"),
        ("dataset_dir=/no such/folder", "error: /no such/folder/dataset_info.json can't be read"),
        ("model_name_or_path=/no such/model", "error: there is no model at /no such/model"),
    ],
)
def test_a_missing_path_stops_before_anything_starts(
    tiny_model: Path, tmp_path: Path, override: str, message: str
) -> None:
    folder = tmp_path / "a run"
    done = dpofit("launch", write_run(folder, tiny_model), override, cwd=folder)
    assert done.returncode == 1
    assert message in done.stdout
    assert not (folder / ".dpofit").exists()


def test_a_full_disk_is_told_before_and_if_insisted_after(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recipe = write_run(folder, tiny_model, max_steps=1)
    (folder / "output").mkdir()
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare for a small file system of its own")
    mount = f"mount -t tmpfs -o size=64k tmpfs '{folder}/output' && exec \"$@\""
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", *DPOFIT, "launch", str(recipe)]

    def run(*more: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, *more], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
        )

    before = run()
    if "Operation not permitted" in before.stderr or "permission denied" in before.stderr:
        pytest.skip("mounting is not permitted here")
    assert before.returncode == 1
    assert "error: less than 1 GiB is free at" in before.stdout
    with nothing_left(folder):
        after = run("--anyway")
    said = [line for line in after.stdout.splitlines() if line.startswith("dpofit: rank ") and "last phase" in line]
    assert after.returncode == 1
    assert len(said) == 1
    assert "had no disk space left" in said[0]
    time.sleep(0.5)
    assert started_from(folder) == []
