"""What `check`, `preflight`, `data`, `doctor` and `verify` report: findings with evidence, cause and fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where it was seen (`file:line`, key, row) and what stood there."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding; `id` is stable and namespaced: memory. save. launch. data. config."""

    id: str
    severity: Severity
    title: str
    evidence: tuple[Evidence, ...] = field(default=())
    cause: str = ""
    fix: str = ""


def findings_json(command: str, findings: Iterable[Finding], **extra: Any) -> dict[str, Any]:
    """The `dpofit.<command>/1` document of findings; `extra` fields follow the contract's own."""
    return {"schema": f"dpofit.{command}/1", "findings": [asdict(finding) for finding in findings], **extra}


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when any finding is an error, else 0."""
    return 1 if any(finding.severity == "error" for finding in findings) else 0
