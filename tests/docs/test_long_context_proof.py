"""benchmarks/results/longdpo-identity.json, of which docs/long-context.md has a table, holds what the page says."""

from __future__ import annotations

import json
from pathlib import Path

from dpofit.recipe.long_context import PIECES
from tests.longdpo.test_same_as_stock import cases

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "longdpo-identity.json"
PROOF = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_nothing_failed_and_every_difference_is_below_1e_5() -> None:
    assert PROOF["failed"] == {}
    measures = ("loss", "logps", "reference", "gradients")
    assert max(row[measure] for row in PROOF["errors"] for measure in measures) < 1e-5


def test_every_case_of_the_matrix_has_run() -> None:
    passed = PROOF["passed"]["tests.longdpo.test_same_as_stock.test_dpo_is_the_same"]
    wanted = {f"{case}-{'+'.join(pieces)}" for case, pieces in cases(everything=True)}
    assert len(wanted) > 500
    assert wanted - set(passed) == set()


def test_each_piece_alone_and_all_five_ran_20_steps_in_one_process_and_on_zero3_ranks() -> None:
    for place in ("test_dpo_is_the_same", "zero3"):
        ran = {row["pieces"] for row in PROOF["errors"] if place in row["test"] and row["steps"] == 20}
        assert {*PIECES, "+".join(PIECES)} <= ran
