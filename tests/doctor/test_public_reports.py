"""The log lines of public failure reports get the diagnosis they should, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpofit.doctor.knowledge import load
from tests.doctor.conftest import ids, read

CASES = json.loads((Path(__file__).parents[2] / "benchmarks/cases/reports_logs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['source']}")
def test_report(case: dict[str, Any]) -> None:
    assert ids("\n".join(case["lines"]) + "\n") == case["expected"]


def test_reports_without_a_known_cause_get_their_lines_back() -> None:
    unknown = [case for case in CASES if not case["expected"]]
    assert len(unknown) >= 10
    for case in unknown:
        told = [line.text for line in read("\n".join(case["lines"]) + "\n").telling_lines]
        assert case["lines"][-1][:100] in "\n".join(told)


def test_every_expected_id_exists() -> None:
    assert {name for case in CASES for name in case["expected"]} <= load().diagnoses.keys()
