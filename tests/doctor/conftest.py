"""Logs as text in, the doctor's report out."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import cache

import pytest

from dpofit.doctor.cause import Report, report
from dpofit.doctor.knowledge import load
from dpofit.doctor.scan import Scan


@cache
def _scan() -> Scan:
    return Scan(load().diagnoses)


def read(*logs: str | bytes) -> Report:
    """The report over these logs, named node-0.log, node-1.log …"""
    diagnoses = load().diagnoses
    facts = [
        _scan().read(f"node-{number}.log", io.BytesIO(log if isinstance(log, bytes) else log.encode()))
        for number, log in enumerate(logs)
    ]
    return report(facts, diagnoses)


def ids(*logs: str | bytes) -> list[str]:
    return [finding.id for finding in read(*logs).findings]


def several_logs(example: str) -> list[str]:
    """An example of a diagnosis may hold several logs, each after a line `=== NAME`."""
    parts = re.split(r"(?m)^=== \S+\n", example)
    return parts if len(parts) == 1 else parts[1:]


@pytest.fixture
def found() -> Callable[..., list[str]]:
    """Ids of the findings over some logs."""
    return ids
