"""A sealed folder belongs to its leader: it moves at once, whatever the other ranks are at."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dpofit.train.guard import folders
from dpofit.train.guard.manifest import Manifest, read_manifest, write_manifest
from tests.guard.ranks import run_ranks, values
from tests.guard.runs import Run

pytestmark = pytest.mark.stack

STAGED = (folders.STAGING, folders.FINAL_NEW)


def _opened_after_sealing(run: Run) -> list[str]:
    """What a rank other than the leader opens of a folder that its leader may move at any moment."""
    from dpofit.train.guard import steps
    from tests.guard.runs import train

    sealed, opened = False, []

    def listener(name: str) -> None:
        nonlocal sealed
        sealed = name == "manifest-written"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and sealed and any(name in str(arguments[0]) for name in STAGED):
            opened.append(str(arguments[0]))

    steps.listeners.append(listener)
    if os.environ["RANK"] != "0":
        sys.addaudithook(hook)
    train(run)
    return opened


def test_nobody_but_the_leader_looks_into_a_sealed_folder(tmp_path: Path) -> None:
    assert values(run_ranks(_opened_after_sealing, 2, Run(str(tmp_path), steps=1))) == [[], []]


def test_a_manifest_is_read_or_is_not_there_while_its_folder_moves(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    write_manifest(here, Manifest(1, 1, "direct", {}, ()))
    ended = threading.Event()

    def move() -> None:
        while not ended.is_set():
            here.rename(there)
            there.rename(here)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        found = [read_manifest(here) is not None for _ in range(20_000)]
    finally:
        ended.set()
        mover.join()
    assert any(found) and not all(found)
