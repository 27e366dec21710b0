"""Small ways to write a data set and to run the command on it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dpofit.data.checks import DataFinding
from dpofit.data.run import Result, check_data

WORDS = (Path(__file__).parent / "words.txt").read_text().split()


def sentence(seed: Any, words: int) -> str:
    choose = random.Random(str(seed))
    return " ".join(choose.choices(WORDS, k=words))


def pair(number: int, prompt_words: int = 12, answer_words: int = 15) -> dict[str, str]:
    """A row like no other; answers of equal length and like style."""
    return {
        "instruction": sentence(f"p{number}", prompt_words),
        "chosen": sentence(f"c{number}", answer_words),
        "rejected": sentence(f"r{number}", answer_words),
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def check(path: Path, *overrides: str, **options: Any) -> Result:
    return check_data(str(path), list(overrides), lambda what, total: nullcontext(lambda count: None), **options)


def finding(result: Result, check_id: str) -> DataFinding:
    found = [finding for finding in result.findings if finding.id == f"data.{check_id}"]
    assert len(found) == 1, [finding.id for finding in result.findings]
    return found[0]


def ids(result: Result) -> set[str]:
    return {finding.id.removeprefix("data.") for finding in result.findings}


def dpofit(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("dpofit")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
