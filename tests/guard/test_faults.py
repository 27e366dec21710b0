"""Whatever is killed or fails during a save, the newest whole checkpoint loads and nothing whole was deleted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dpofit.train.guard import folders
from dpofit.train.guard.manifest import looks_whole
from dpofit.train.guard.steps import CHECKPOINT_STEPS, FINAL_STEPS
from tests.guard.ranks import RankResult, run_ranks, values
from tests.guard.runs import Run, weights

pytestmark = pytest.mark.stack

FAST = {"DPOFIT_GUARD_TIMEOUT": "2"}


def train_and_die(run: Run, victim: int, step: str, occurrence: int) -> None:
    """The run, in which rank `victim` is killed when it comes to `step` for the `occurrence`-th time."""
    from dpofit.train.guard import steps
    from tests.guard.runs import train

    seen = 0

    def listener(name: str) -> None:
        nonlocal seen
        seen += name == step
        if name == step and seen == occurrence and int(os.environ["RANK"]) == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    steps.listeners.append(listener)
    train(run)


def assert_recoverable(run_folder: Path, step_of_last_whole: tuple[int, ...]) -> None:
    newest = folders.newest_resumable(run_folder)
    assert newest is not None, "no checkpoint to resume from"
    assert int(newest.name.split("-")[1]) in step_of_last_whole
    for _, path in folders.checkpoints(run_folder):
        assert looks_whole(path), f"{path.name} is visible but not whole"
    tensors = weights(newest)
    assert tensors and all(tensor.numel() for tensor in tensors.values())


def assert_ended_by_itself(peer: RankResult) -> None:
    """It gave an answer or an error of its own; it wasn't waiting for the dead rank when its time was up."""
    assert "no answer in" not in (peer.error or "") and peer.exitcode == 0, peer


def temporaries(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".dpofit-*"))


def kills(steps: tuple[str, ...]) -> list[tuple[str, int]]:
    """Every step with every victim; by default each step with one of them, in turns."""
    if os.environ.get("DPOFIT_TEST_ALL"):
        return [(step, victim) for step in steps for victim in (0, 1)]
    return [(step, index % 2) for index, step in enumerate(steps)]


@pytest.mark.parametrize(("step", "victim"), kills(CHECKPOINT_STEPS))
def test_a_rank_killed_in_a_checkpoint_save_costs_at_most_that_checkpoint(
    tmp_path: Path, step: str, victim: int
) -> None:
    run = Run(str(tmp_path), steps=2, final_save=False)
    results = run_ranks(train_and_die, 2, run, victim, step, 2, env=FAST, timeout_s=60, stragglers_s=15)
    assert results[victim].exitcode == -signal.SIGKILL
    assert_ended_by_itself(results[1 - victim])
    assert_recoverable(tmp_path, (2,) if step in ("committed", "rotated") else (1, 2))


@pytest.mark.parametrize(("step", "victim"), kills(FINAL_STEPS))
def test_a_rank_killed_in_the_final_save_leaves_the_checkpoint(tmp_path: Path, step: str, victim: int) -> None:
    run = Run(str(tmp_path), steps=1)
    results = run_ranks(train_and_die, 2, run, victim, step, 2, env=FAST, timeout_s=60, stragglers_s=15)
    assert results[victim].exitcode == -signal.SIGKILL
    assert_ended_by_itself(results[1 - victim])
    assert_recoverable(tmp_path, (1,))
    folders.recover(tmp_path)
    assert temporaries(tmp_path) == []
    if (tmp_path / "config.json").exists():  # the final save went through: then all of it did
        assert looks_whole(tmp_path)


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=2, final_save=False)
    run_ranks(train_and_die, 2, run, 0, "weights-written", 2, env=FAST, timeout_s=60, stragglers_s=15)
    assert temporaries(tmp_path) != []
    values(run_ranks(_resumed, 2, run))
    assert temporaries(tmp_path) == []
    assert_recoverable(tmp_path, (2,))


def _resumed(run: Run) -> Any:
    from dataclasses import replace

    from dpofit.train import guard
    from tests.guard.runs import train

    guard.install()
    return train(replace(run, resume=True))


def _fail_once(run: Run, rank: int, step: str, fault: str) -> dict[str, Any]:
    """The run, in which `rank` meets `fault` at the first save's `step`; returns what became of training."""
    import errno

    from dpofit.train.guard import steps, writer
    from tests.guard.runs import train

    if int(os.environ["RANK"]) == rank:
        state = {"armed": False, "done": False}

        def listener(name: str) -> None:
            if name == step and not state["done"]:
                state["armed"] = True
            elif state["armed"]:
                state["armed"], state["done"] = False, True

        steps.listeners.append(listener)
        stock_pwrite = os.pwrite
        if fault == "slow":
            import time

            def slow(name: str) -> None:
                if name == step and not state["done"]:
                    time.sleep(3.5)  # the others wait 2 s

            steps.listeners.append(slow)
        elif fault == "short":
            os.pwrite = lambda fd, data, offset: stock_pwrite(fd, data[:7], offset)
        else:
            code = {"enospc": errno.ENOSPC, "eio": errno.EIO}[fault]

            def failing(fd: int, data: Any, offset: int) -> int:
                if state["armed"]:
                    raise OSError(code, os.strerror(code))
                return stock_pwrite(fd, data, offset)

            os.pwrite = failing
    assert writer.os is os
    return train(run)


@pytest.mark.parametrize(
    ("rank", "step", "fault"),
    [
        (0, "weights-started", "enospc"),
        (1, "weights-started", "enospc"),
        (1, "weights-started", "eio"),
        (0, "state-started", "enospc"),  # optimizer files, between DeepSpeed's barriers
        (1, "state-started", "eio"),
        (1, "planned", "slow"),  # longer than the timeout
    ],
    ids=str,
)
def test_one_failing_rank_aborts_that_save_and_training_goes_on(
    tmp_path: Path, rank: int, step: str, fault: str
) -> None:
    run = Run(str(tmp_path), steps=2, final_save=False)
    ends = values(run_ranks(_fail_once, 2, run, rank, step, fault, env=FAST, timeout_s=100))
    assert [end["step"] for end in ends] == [2, 2]
    assert [step for step, _ in folders.checkpoints(tmp_path)] == [2]
    assert_recoverable(tmp_path, (2,))
    assert temporaries(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=1, hidden=16, vocab=67, final_save=False)
    values(run_ranks(_fail_once, 2, run, 1, "begin", "short"))
    assert looks_whole(tmp_path / "checkpoint-1")
    from dpofit.train.guard.check import check_checkpoint

    assert [finding for finding in check_checkpoint(tmp_path / "checkpoint-1") if finding.severity == "error"] == []


def test_on_failure_stop_ends_the_run(tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=2, final_save=False)
    env = {**FAST, "DPOFIT_GUARD_ON_FAILURE": "stop"}
    results = run_ranks(_fail_once, 2, run, 1, "weights-started", "enospc", env=env)
    for result in results:
        assert result.error is not None
        assert "SaveAborted" in result.error and "rank 1: OSError: [Errno 28]" in result.error


def _private_mounts() -> Any:
    """This process's own view of the mounts; returns libc."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x00020000) == 0, "needs CAP_SYS_ADMIN"  # CLONE_NEWNS
    assert libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0  # MS_REC | MS_PRIVATE
    return libc


def _each_rank_its_own_disk(run: Run, private: str) -> Any:
    """Under one path every rank sees a folder of its own, as with node-local disks (a private mount per rank)."""
    from tests.guard.runs import train

    libc = _private_mounts()
    mine = Path(private) / os.environ["RANK"]
    mine.mkdir(parents=True)
    Path(run.output_dir).mkdir(exist_ok=True)
    assert libc.mount(os.fsencode(mine), os.fsencode(run.output_dir), None, 0x1000, None) == 0  # MS_BIND
    return train(run)


@pytest.mark.usefixtures("needs_mounts")
def test_node_local_disks_get_whole_weights_on_rank_0s_disk(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "out"), steps=1)
    values(run_ranks(_each_rank_its_own_disk, 2, run, str(tmp_path / "disks")))
    first, second = tmp_path / "disks" / "0", tmp_path / "disks" / "1"
    assert '"backend": "routed"' in (first / "dpofit" / "saves.jsonl").read_text()
    values(run_ranks(_one_shared_disk, 2, Run(str(tmp_path / "shared"), steps=1)))
    for place in ("", "checkpoint-1"):
        ours = (first / place / "model.safetensors").read_bytes()
        assert ours == (tmp_path / "shared" / place / "model.safetensors").read_bytes()
    assert looks_whole(first / "checkpoint-1") and looks_whole(second / "checkpoint-1")
    assert not (second / "checkpoint-1" / "model.safetensors").exists()
    assert list((second / "checkpoint-1").glob("global_step1/*rank_1*optim_states.pt")) != []
    from dpofit.train.guard.check import check_checkpoint

    assert [finding.id for finding in check_checkpoint(second / "checkpoint-1")] == ["save.weights-elsewhere"]


def _one_shared_disk(run: Run) -> Any:
    from tests.guard.runs import train

    return train(run)


def _on_a_full_disk(run: Run, kind: str) -> Any:
    """The run with an output folder that can't take a checkpoint, in this rank's private mounts."""
    from tests.guard.runs import train

    libc = _private_mounts()
    place = os.fsencode(run.output_dir)
    if kind == "full":
        assert libc.mount(b"tmpfs", place, b"tmpfs", 0, b"size=300k") == 0
    else:
        assert libc.mount(place, place, None, 0x1000, None) == 0  # MS_BIND
        assert libc.mount(b"none", place, None, 0x1000 | 0x20 | 1, None) == 0  # MS_BIND | MS_REMOUNT | MS_RDONLY
    ended = train(run)
    return ended["step"], sorted(path.name for path in Path(run.output_dir).iterdir())


@pytest.mark.usefixtures("needs_mounts")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_folder_that_cannot_take_the_checkpoint_is_refused_before_anything_is_written(
    tmp_path: Path, kind: str
) -> None:
    run = Run(str(tmp_path / "out"), steps=2, save_steps=1, final_save=False)
    (tmp_path / "out").mkdir()
    ends = values(run_ranks(_on_a_full_disk, 1, run, kind))
    assert ends == [(2, [])]


def _vanishing(run: Run) -> Any:
    import shutil

    from dpofit.train.guard import steps
    from tests.guard.runs import train

    done = []

    def listener(name: str) -> None:
        if name == "weights-started" and os.environ["RANK"] == "0" and not done:
            done.append(name)
            shutil.rmtree(run.output_dir)

    steps.listeners.append(listener)
    return train(run)["step"]


def test_a_folder_that_vanishes_during_a_save_costs_that_save_only(tmp_path: Path) -> None:
    run = Run(str(tmp_path / "out"), steps=2, final_save=False)
    assert values(run_ranks(_vanishing, 2, run, env=FAST)) == [2, 2]
    assert [step for step, _ in folders.checkpoints(tmp_path / "out")] == [2]
    assert_recoverable(tmp_path / "out", (2,))


@pytest.mark.parametrize("renames", range(0, 10))
def test_a_kill_between_the_final_saves_renames_is_finished_later(tmp_path: Path, renames: int) -> None:
    for name, content in (
        ("config.json", "old"),
        ("model-00001-of-00002.safetensors", "old"),
        ("model.safetensors.index.json", "old"),
        ("keep.txt", "mine"),
        ("adapter_model.safetensors", "mine"),
    ):
        (tmp_path / name).write_text(content)
    new = tmp_path / folders.FINAL_NEW
    new.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (new / name).write_text("new")
    from dpofit.train.guard.seal import seal

    seal(new, None, 1, "direct")

    pid = os.fork()
    if pid == 0:
        left = renames
        stock_rename = Path.rename

        def counted(path: Path, target: Path) -> Path:
            nonlocal left
            if left == 0:
                os._exit(9)
            left -= 1
            return stock_rename(path, target)

        Path.rename = counted  # type: ignore[method-assign]
        folders.settle_final_save(tmp_path)
        os._exit(0)
    os.waitpid(pid, 0)

    old_and_new = (tmp_path / "model.safetensors").exists() and (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert not old_and_new, "old and new weights side by side"
    folders.settle_final_save(tmp_path)
    assert looks_whole(tmp_path)
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    left.pop("dpofit-manifest.json")
    assert left == {
        "config.json": "new", "model.safetensors": "new", "tokenizer.json": "new", "keep.txt": "mine",
        "adapter_model.safetensors": "mine", "README.md": "new",
    }  # fmt: skip
    assert temporaries(tmp_path) == []
