"""The guard's pages say what the code and the committed results say."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpofit.train.guard.config import MIN_MEMORY_BYTES, GuardConfig
from dpofit.units import MIB

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "save-guard.md").read_text(encoding="utf-8")


def test_the_tables_are_what_the_results_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "render_save_guard.py"), "--check"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_the_settings_table_has_the_defaults() -> None:
    defaults = GuardConfig()
    assert f"| `DPOFIT_GUARD_MEMORY` | `{defaults.memory_bytes // MIB}MiB` |" in PAGE
    assert f"{MIN_MEMORY_BYTES // MIB}MiB to 64GiB" in PAGE
    assert f"| `DPOFIT_GUARD_TIMEOUT` | `{defaults.timeout_s:g}` |" in PAGE


def test_every_finding_that_verify_can_give_is_on_the_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "tools" / "dpofit" / "train" / "guard").glob("*.py"))
    given = set(re.findall(r'"(save\.[a-z-]+)"', source))
    assert given and given == set(re.findall(r"`(save\.[a-z-]+)`", PAGE))


def test_every_test_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", PAGE))
    assert named and all((ROOT / "tests" / "guard" / name).is_file() for name in named)


@pytest.mark.stack
@pytest.mark.skipif(not os.environ.get("DPOFIT_TEST_ALL"), reason="imports DeepSpeed twice; run with DPOFIT_TEST_ALL=1")
def test_the_leak_page_shows_what_the_reproducer_prints() -> None:
    page = (ROOT / "docs" / "deepspeed-save-leak.md").read_text(encoding="utf-8")
    shown = re.findall(r"(?m)^(after save|after gc)(.*)$", page)
    command = [sys.executable, str(ROOT / "benchmarks" / "ds_save_leak.py")]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}

    def lines(*options: str) -> list[list[int]]:
        out = subprocess.run([*command, *options], capture_output=True, text=True, env=env, timeout=200).stdout
        return [
            [int(n) for n in re.findall(r"\d+", line)] for line in out.splitlines() if line.startswith("after save")
        ]

    printed = lines()
    assert importlib.metadata.version("deepspeed") in page
    assert [[int(n) for n in re.findall(r"\d+", text)] for start, text in shown if start == "after save"] == printed
    for save, (_, mib, alive) in enumerate(lines("--remedy"), start=1):
        assert (mib, alive) == (0, 0), f"save {save}"
