"""What doesn't fit is known before anything is written: at the start of training, and before each save."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run

pytestmark = pytest.mark.stack

GIB = 2**30


def need(**changes: Any) -> Any:
    from dpofit.train.guard.room import Needs

    fields = {
        "host": "node1", "leader": 0, "state_bytes": 10 * GIB, "free_disk_bytes": 100 * GIB, "in_memory": False,
        "headroom_bytes": GIB, "headroom_by": "MemAvailable",
    }  # fmt: skip
    return Needs(**{**fields, **changes})


def lacking(needs: list[Any], weights: int = 2 * GIB, held: int = 0) -> str:
    from dpofit.train.guard.config import GuardConfig
    from dpofit.train.guard.room import check_room

    try:
        check_room(needs, GuardConfig(), weights, held)
    except OSError as error:
        return str(error)
    return ""


def test_two_ranks_that_fit_are_let_through() -> None:
    assert lacking([need(), need()]) == ""


def test_all_ranks_of_one_disk_count_together() -> None:
    text = lacking([need(free_disk_bytes=21 * GIB)] * 2)
    # two states and the weights, 1 % over: (2·10 + 2) GiB · 1.01
    assert text.startswith(f"disk of node1: this save needs {int(1.01 * 22 * GIB):,} bytes, {21 * GIB:,} are free")


def test_a_node_local_disk_needs_no_room_for_rank_0s_weights() -> None:
    assert lacking([need(free_disk_bytes=13 * GIB), need(host="node2", leader=1, free_disk_bytes=11 * GIB)]) == ""


def test_files_on_tmpfs_count_as_memory() -> None:
    text = lacking([need(in_memory=True, headroom_bytes=12 * GIB, headroom_by="cgroup /pod")])
    assert text.startswith("memory of node1") and text.endswith("left by cgroup /pod")


def test_a_writer_that_holds_the_model_must_have_room_for_it() -> None:
    assert "memory of node1" in lacking([need(headroom_bytes=2 * GIB)], held=2 * GIB)


def first_lines(run: Run) -> tuple[str, list[str]]:
    """What the run prints and warns of, save lines included."""
    from tests.guard.runs import train

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dpofit.guard").addHandler(handler)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(run)
    return out.getvalue(), said


KINDS: list[dict[str, Any]] = [{"zero": 3}]
if os.environ.get("DPOFIT_TEST_ALL"):
    KINDS += [{"zero": 2, "lora": True}]


@pytest.mark.parametrize("fields", KINDS, ids=str)
def test_training_begins_with_what_a_checkpoint_will_take(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = Run(str(tmp_path), steps=1, vocab=65_536, hidden=128, final_save=False, **fields)
    (printed, said), (other, _) = values(run_ranks(first_lines, 2, run))
    start, save = [line for line in printed.splitlines() if line.startswith("dpofit save guard: ")]
    told = re.search(r"a checkpoint will take about ([\d.]+) GB of disk and at most 256 MiB", start)
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint-1").rglob("*") if path.is_file())
    assert told and abs(float(told[1]) - written / 1e9) < 0.01 + 0.03 * written / 1e9
    pattern = (
        r"\S+checkpoint-1: [\d.]+ GB in [\d.]+ s \([\d.]+ GB/s\), direct \(.+\), peak extra memory \d+ MiB a rank; "
    )
    assert re.search(pattern + r"the stock save holds [\d.]+ GiB on rank 0, [\d.]+ with DeepSpeed's leak$", save)
    assert said == [] and "dpofit" not in other


def warned_on_a_small_disk(run: Run) -> list[str]:
    from tests.guard.test_faults import _private_mounts

    libc = _private_mounts()
    assert libc.mount(b"tmpfs", os.fsencode(run.output_dir), b"tmpfs", 0, b"size=300k") == 0
    return first_lines(run)[1]


@pytest.mark.usefixtures("needs_mounts")
def test_a_disk_too_small_is_warned_of_before_the_first_step(tmp_path: Path) -> None:
    run = Run(str(tmp_path), steps=1, final_save=False)
    (said,) = values(run_ranks(warned_on_a_small_disk, 1, run))
    assert said[0].startswith("dpofit save guard: saves will be refused unless room is made: disk of ")
    assert "save aborted" in said[1]
