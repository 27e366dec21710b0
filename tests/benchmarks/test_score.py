"""The scoreboard: what is committed is what the code gives, no run that died is called fits, halves stay apart."""

import json
from dataclasses import replace

import pytest
import score
from score_cases import CASES, measured_cases, planned, verdict_cases
from score_evaluate import calibrated, calibrates
from score_report import document


def test_the_committed_accuracy_page_and_residuals_are_what_the_cases_give(board) -> None:
    assert score.DOCUMENT.read_text(encoding="utf-8") == document(board)
    assert score.RESIDUALS.read_text(encoding="utf-8") == score.residuals_text(board.residuals)


def test_no_run_that_ran_out_of_memory_is_called_fits(board) -> None:
    assert [row.case.name for row in board.verdicts if row.false_fits] == []
    died = [row for row in board.verdicts if row.case.happened == "oom"]
    assert len(died) >= 45


def test_no_run_that_fitted_is_called_oom(board) -> None:
    assert [row.case.name for row in board.verdicts if row.outcome == "wrong"] == []
    assert [row.case.name for row in board.lengths if not row.right] == []


@pytest.mark.parametrize(("kind", "mean", "worst"), [("allocated", 0.01, 0.01), ("nvml", 0.03, 0.10)])
def test_errors_on_the_scoring_half_stay_small_where_the_code_is_known(board, kind, mean, worst) -> None:
    errors = [
        abs(row.error)
        for row in board.rows
        if row.case.half == "scoring" and row.case.known_code and row.case.kind == kind
    ]
    assert len(errors) >= 20
    assert sum(errors) / len(errors) <= mean
    assert max(errors) <= worst


def test_the_half_of_a_row_depends_on_its_name_alone() -> None:
    rows = {case.name: case.half for case in measured_cases()}
    # printf %s NAME | sha256sum: 30ee…, fb9b…
    assert rows["fms-mistral-7b-v0.1-lora-none-1gpu-b8-allocated"] == "calibration"
    assert rows["fms-mistral-7b-v0.1-lora-none-1gpu-b4-allocated"] == "scoring"


def test_a_scoring_row_changes_no_residual(board) -> None:
    used = [row for row in board.rows if calibrates(row.case)]
    assert calibrated(used) == board.residuals
    assert all(row.case.half == "calibration" for row in used)
    scoring = next(row for row in board.rows if row.case.half == "scoring" and row.case.known_code)
    assert not calibrates(scoring.case)
    assert calibrates(replace(scoring.case, name=used[0].case.name))


def test_a_mix_whose_order_is_not_known_is_taken_in_six() -> None:
    jobs = {case.name: case.job for case in measured_cases() if case.job is not None}
    orders = planned(jobs["swift-bench-qwen-7b-chat-lora-t4096-b1"]).mixes
    assert len(set(orders)) == 6
    rows = {tuple(sorted(lengths.row_tokens for lengths in order)) for order in orders}
    assert len(rows) == 1 and len(rows.pop()) == 12
    assert planned(jobs["qwen1-qwen-7b-lora-t256"]).mixes == ((),)


def test_the_page_says_which_goals_are_met(board) -> None:
    goals = document(board).partition("## Goals")[2].partition("## By group")[0]
    assert goals.count("| yes |") + goals.count("| **no** |") == 7


def test_the_page_gives_both_halves_of_every_group(board) -> None:
    table = document(board).partition("## By group")[2].partition("##")[0]
    assert "calibration: n" in table and "scoring: n" in table
    for group in {row.case.group for row in board.rows}:
        assert f"| {group} |" in table


def test_every_row_of_the_cases_is_scored_or_listed_with_a_reason(board) -> None:
    measured = {row.case.name for row in board.rows} | {row.case.name for row in board.lengths}
    assert measured | {row.name for row in board.left} == {case.name for case in measured_cases()}
    verdicts = {row.case.name for row in board.verdicts} | {row.name for row in board.left_verdicts}
    assert verdicts == {case.name for case in verdict_cases()}
    assert all(row.reason for row in [*board.left, *board.left_verdicts])


@pytest.mark.parametrize("name", ["measured.json", "verdicts.json"])
def test_every_case_has_a_name_of_its_own_a_source_and_a_job_or_a_reason(name) -> None:
    cases = json.loads((CASES / name).read_text(encoding="utf-8"))["cases"]
    assert len({case["id"] for case in cases}) == len(cases) >= 160
    for case in cases:
        assert case["source"], case["id"]
        assert sum(key in case for key in ("job", "out_of_scope", "undecidable")) == 1, case["id"]


def test_check_says_what_is_out_of_date(board, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(score, "ROOT", tmp_path)
    monkeypatch.setattr(score, "DOCUMENT", tmp_path / "accuracy.md")
    monkeypatch.setattr(score, "scoreboard", lambda: board)
    assert score.main(["--check"]) == 1
    assert "accuracy.md is out of date" in capsys.readouterr().err
