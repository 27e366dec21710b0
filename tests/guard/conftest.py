"""Shared by the guard's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])  # the fork server imports tests.guard
)


@pytest.fixture(autouse=True)
def _no_guard_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("DPOFIT_GUARD")]:
        monkeypatch.delenv(name)
    yield


@pytest.fixture
def needs_mounts() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("private mounts need root")
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    def faults(outcome: str) -> int:
        reports = terminalreporter.stats.get(outcome, [])
        return sum("guard/test_faults.py" in report.nodeid and report.when == "call" for report in reports)

    survived, tried = faults("passed"), faults("passed") + faults("failed")
    if tried:
        terminalreporter.write_line(f"save guard: {tried} faults tried, {survived} survived")
