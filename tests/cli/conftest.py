"""Runs the real command line, in this process or in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dpofit.cli.app import main


@dataclass(frozen=True)
class Ran:
    """What a person sees of one command."""

    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def dpofit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """`dpofit ARGUMENTS` in this process."""

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def python() -> Callable[[str], Ran]:
    """`python -c CODE` in a process of its own."""

    def run(code: str) -> Ran:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
