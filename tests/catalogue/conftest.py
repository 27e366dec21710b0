"""A scratch copy of the catalogue, and the command line as a person runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of recipes/ and deepspeed/ to change at will."""
    for folder in ("recipes", "deepspeed"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


@pytest.fixture
def render_recipes() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs scripts/render_recipes.py with arguments."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts/render_recipes.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def dpofit(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `dpofit ARGUMENTS…`; gives exit code, stdout, stderr."""
    from dpofit.cli.app import main

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        try:
            main([str(argument) for argument in arguments])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run
