"""Bad input, as one error that names every problem: file, key, what was wrong, what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with what the user gave."""

    where: str  # file, optionally with :line; or the command-line argument
    key: str | None  # the offending key or flag, None when the whole file is meant
    wrong: str  # what was wrong
    right: str  # what would be right

    def __str__(self) -> str:
        subject = f"{self.where}: {self.key}" if self.key else self.where
        return f"{subject}: {self.wrong}. {self.right}" if self.right else f"{subject}: {self.wrong}"


class BadInput(Exception):
    """What the user gave cannot be used; carries all problems at once. The CLI prints them and exits 2."""

    def __init__(self, problems: Problem | Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
