"""The doctor's report as text and as JSON."""

from __future__ import annotations

from typing import Any

from dpofit.doctor.cause import Report
from dpofit.findings import Evidence, findings_json

MARKS = {"error": "[bold red]error[/]", "warning": "[yellow]warning[/]", "info": "[cyan]info[/]"}
SHOWN_FOLLOWED = 4


def as_json(report: Report) -> dict[str, Any]:
    """The dpofit.doctor/1 document."""

    def plain(lines: tuple[Evidence, ...]) -> list[dict[str, str]]:
        return [{"where": line.where, "text": line.text} for line in lines]

    logs = [{"log": log.name, "bytes": log.size_bytes, "lines": log.lines} for log in report.logs]
    return findings_json(
        "doctor",
        report.findings,
        followed=plain(report.followed),
        telling_lines=plain(report.telling_lines),
        logs=logs,
    )


def print_report(report: Report) -> None:
    """At most 100 columns on stdout: the first root cause, what followed from it, other remarks."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(width=min(100, Console().width), highlight=False)
    for number, finding in enumerate(report.findings):
        console.print(f"{MARKS[finding.severity]} [bold]{escape(finding.title)}[/]  [dim]{finding.id}[/]")
        for evidence in finding.evidence:
            console.print(f"    {escape(evidence.where)}: {escape(evidence.text)}", style="dim")
        console.print(f"  why: {escape(finding.cause)}")
        console.print(f"  fix: {escape(finding.fix)}")
        if number == 0 and report.root and report.followed:
            console.print("  then, as a consequence or later:", style="dim")
            for line in report.followed[:SHOWN_FOLLOWED]:
                console.print(f"    {escape(line.where)}: {escape(line.text)}", style="dim")
        console.print()
    if not report.findings:
        console.print("no known cause")
        if report.telling_lines:
            console.print("The most telling lines:")
        for line in report.telling_lines:
            console.print(f"    {escape(line.where)}: {escape(line.text)}")
