"""Shared by the long-context tests."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.longdpo.runs import SAME, Case, Errors

ROOT = Path(__file__).parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])  # the fork server imports tests.guard
)
AssertSame = Callable[[Mapping[tuple[Case, tuple[str, ...]], Errors]], None]


@pytest.fixture(scope="module")
def the_stack_is_no_garbage() -> Iterator[None]:
    """accelerate collects garbage when a run ends; looking through all that was imported takes as long as ten steps."""
    importlib.import_module("llamafactory.extras.packages")  # first: it mends transformers' package lookup
    importlib.import_module("llamafactory.train.tuner")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "none"


@pytest.fixture
def assert_same(record_property: Callable[[str, object], None], commit: str) -> AssertSame:
    """Checks errors of any number of runs; what was seen goes to pytest's report (benchmarks/tests_all.py)."""

    def check(found: Mapping[tuple[Case, tuple[str, ...]], Errors]) -> None:
        for (case, pieces), errors in found.items():
            seen = {"commit": commit, "case": str(case), "steps": case.steps, "pieces": "+".join(pieces)}
            record_property("errors", json.dumps(seen | asdict(errors)))
        assert {str(what): errors for what, errors in found.items() if not errors.worst < SAME} == {}

    return check
