"""One problem or remark about a recipe, before it becomes a line of `check` or of a BadInput."""

from __future__ import annotations

from dataclasses import dataclass

from dpofit.errors import Problem
from dpofit.findings import Evidence, Finding
from dpofit.recipe.kinds import KINDS, Kind


@dataclass(frozen=True, slots=True)
class Issue:
    """`where` is `file:line` or `command line`; `id` is one of kinds.KINDS."""

    id: str
    where: str
    key: str | None
    wrong: str
    right: str

    @property
    def kind(self) -> Kind:
        """Severity and cause, by id."""
        return KINDS[self.id]

    @property
    def stops(self) -> bool:
        """Whether the run could not happen, so that planning it makes no sense."""
        return self.kind.severity == "error"

    def problem(self) -> Problem:
        """For BadInput."""
        return Problem(self.where, self.key, self.wrong, self.right)

    def finding(self) -> Finding:
        """For `check`."""
        title = f"{self.key} {self.wrong}" if self.key else self.wrong
        return Finding(
            id=self.id,
            severity=self.kind.severity,
            title=title,
            evidence=(Evidence(self.where, title),),
            cause=self.kind.why,
            fix=self.right,
        )
