"""Scores dpofit against public measurements: prints the summary, writes docs/accuracy.md and the residuals.

python benchmarks/score.py            print
python benchmarks/score.py --write    set the residuals from the calibration half, then write docs/accuracy.md
python benchmarks/score.py --check    exit 1 when what is committed differs, or a run that died is called fits
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from score_cases import measured_cases, verdict_cases
from score_evaluate import calibrated, calibrates, score_measured, score_verdicts
from score_gpu import score_records, score_results
from score_report import Scoreboard, document

import dpofit.memory.predict as prediction
from dpofit.memory.predict import Residuals

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "accuracy.md"
RESIDUALS = Path(prediction.__file__).with_name("residuals.json")


def scoreboard() -> Scoreboard:
    """Score everything with the residuals that the calibration half gives."""
    residuals = calibrated(score_measured(case for case in measured_cases() if calibrates(case))[0])
    committed = prediction.residuals
    prediction.residuals = lambda: residuals
    try:
        rows, lengths, left = score_measured(measured_cases())
        verdicts, left_verdicts = score_verdicts(verdict_cases())
        results, records = score_results(), score_records()
    finally:
        prediction.residuals = committed
    return Scoreboard(rows, lengths, verdicts, left, left_verdicts, residuals, results, records)


def residuals_text(residuals: Residuals) -> str:
    """residuals.json."""
    return (
        json.dumps({"allocated": residuals.allocated, "reserved": residuals.reserved, "points": residuals.points})
        + "\n"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="write docs/accuracy.md and residuals.json")
    group.add_argument("--check", action="store_true", help="compare with what is committed")
    options = parser.parse_args(arguments)
    board = scoreboard()
    text, residuals = document(board), residuals_text(board.residuals)
    if options.write:
        RESIDUALS.write_text(residuals, encoding="utf-8")
        DOCUMENT.write_text(text, encoding="utf-8")
        print(f"wrote {DOCUMENT.relative_to(ROOT)} and {RESIDUALS.relative_to(ROOT)}")
    elif options.check:
        stale = [
            path for path, wanted in ((DOCUMENT, text), (RESIDUALS, residuals))
            if not path.is_file() or path.read_text(encoding="utf-8") != wanted
        ]  # fmt: skip
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: python benchmarks/score.py --write", file=sys.stderr)
        for row in board.false_fits:
            print(f"{row.case.name} ran out of memory and is called fits", file=sys.stderr)
        return 1 if stale or board.false_fits else 0
    else:
        print(text.partition("## Every measurement")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
