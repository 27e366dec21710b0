"""Reads log-probabilities that the policy gave to the answers, to see whether it could have written them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dpofit.data.check import Pass
from dpofit.data.quality import PolicyView
from dpofit.errors import BadInput, Problem


def read_policy_view(path: Path, run: Pass) -> PolicyView:
    """JSON lines `{"row": 17, "chosen": -210.4, "rejected": -95.1}`: summed log-probabilities (nats) of the two answers
    under the policy before training; `row` as in the findings. Rows that are not there are left out. Raises BadInput.
    """
    if len(run.files) != 1:
        raise BadInput(Problem(str(path), None, "log-probabilities need one data file", "Check one file at a time"))
    given = _read(path)
    chosen, rejected = [], []
    for index in range(run.pairs):
        pair = given.get(run.number(index))
        if pair is not None:
            chosen.append(pair[0] / max(1, run.lengths.full_at(index).chosen))
            rejected.append(pair[1] / max(1, run.lengths.full_at(index).rejected))
    if not chosen:
        right = f"Rows of {run.files[0].path.name} are counted from 1"
        raise BadInput(Problem(str(path), "row", "no row number is one of a usable pair", right))
    return PolicyView.of(np.asarray(chosen), np.asarray(rejected))


def _read(path: Path) -> dict[int, tuple[float, float]]:
    given, problems = {}, []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    given[int(entry["row"])] = (float(entry["chosen"]), float(entry["rejected"]))
                except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                    right = 'Write {"row": 1, "chosen": -12.3, "rejected": -45.6}'
                    problems.append(Problem(f"{path}:{number}", None, "is not a row of log-probabilities", right))
                    if len(problems) == 10:
                        break
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(Problem(str(path), None, f"cannot be read: {error}", "Give a JSON lines file")) from None
    if problems:
        raise BadInput(problems)
    return given
